-- Suggestions drawn by Neovim itself: vim.lsp.inline_completion, from 0.12 on.
--
-- Neovim draws, counts and asks; two things are done here. It keeps what it shows when the answer
-- is null, so an empty list is made of it; and it would insert a stale item with characters too
-- many (neovim#36529), so what is accepted is compared with the line first.
local insertion = require('kvq.insertion')
local server = require('kvq.server')

local M = {}

local shown_by_neovim = 'nvim.lsp.inline_completion'
local count = 0
-- How often Neovim's part was taken away: it fails over an answer to what it asked before that.
local detached = 0

local function on_answer(buffer, result)
  count = result and #(result.items or result) or 0
  if count > 0 then
    server.answered(nil)
    return result
  end
  server.learn_why(buffer, M.trigger)
  return { items = {} }
end

-- Reads the answers before Neovim does.
local function listen(client)
  if client.kvq_listens then
    return
  end
  client.kvq_listens = true
  local request = client.request
  function client.request(self, method, params, handler, buffer)
    local answered, before = handler, detached
    if method == server.METHOD then
      answered = function(err, result, context)
        if before == detached then
          return handler(err, on_answer(context.bufnr, result), context)
        end
      end
    end
    return request(self, method, params, answered, buffer)
  end
end

function M.setup() end

function M.attach(buffer, group)
  listen(server.client())
  -- What was typed before the server was there is asked for once it is.
  vim.api.nvim_create_autocmd('LspAttach', {
    group = group,
    buffer = buffer,
    -- Neovim schedules its own part after this event, so this must come after that.
    callback = vim.schedule_wrap(vim.schedule_wrap(M.trigger)),
  })
  vim.lsp.inline_completion.enable(true, { bufnr = buffer })
end

function M.detach(buffer)
  detached = detached + 1
  vim.lsp.inline_completion.enable(false, { bufnr = buffer })
end

function M.visible()
  local space = vim.api.nvim_get_namespaces()[shown_by_neovim]
  local marks = space and vim.api.nvim_buf_get_extmarks(0, space, 0, -1, {}) or {}
  return #marks > 0 and vim.fn.pumvisible() == 0
end

function M.accept(part)
  vim.lsp.inline_completion.get({
    on_accept = function(item)
      local row, column = unpack(vim.api.nvim_win_get_cursor(0))
      local first, start = row - 1, column
      if item.range then
        first, start = item.range:to_extmark()
      end
      local line = vim.api.nvim_get_current_line()
      local rest = first == row - 1 and insertion.rest(item.insert_text, start, line, column)
      if rest then
        server.accepted(vim.api.nvim_get_current_buf(), insertion.insert(rest, part))
      end
    end,
  })
end

function M.cycle(step)
  vim.lsp.inline_completion.select({ count = step })
end

-- Neovim asks by itself, a fifth of a second after the cursor's last move.
function M.trigger()
  if vim.api.nvim_get_mode().mode:sub(1, 1) == 'i' then
    vim.api.nvim_exec_autocmds('CursorMovedI', { buffer = 0, modeline = false })
  end
end

function M.dismiss()
  local buffer = vim.api.nvim_get_current_buf()
  M.detach(buffer)
  vim.lsp.inline_completion.enable(true, { bufnr = buffer })
end

-- Neovim does not say which suggestion it shows, only how many there are.
function M.count()
  if M.visible() then
    return nil, count
  end
end

return M
