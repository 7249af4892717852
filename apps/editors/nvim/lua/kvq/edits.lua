-- Next edits: lines that may change after what was just typed, as virtual text. Tab jumps, then takes.
local server = require('kvq.server')

local M = {}

local METHOD = 'textDocument/copilotInlineEdit'
-- What was shown for less than this was not seen: a key does not take it.
local SEEN_MS = 50

local space = vim.api.nvim_create_namespace('kvq-edits')
local config = nil -- the options
-- The edits of one buffer, top to bottom; `tick` is the text that they were made for.
local state = { edits = {}, generation = 0 }
-- The text after an edit was taken: as long as it is the text, the key goes on to the next edit.
local taken_tick = nil

local function now()
  return vim.loop.hrtime() / 1e6
end

function M.clear()
  server.cancel(state.number)
  if state.buffer and vim.api.nvim_buf_is_valid(state.buffer) then
    vim.api.nvim_buf_clear_namespace(state.buffer, space, 0, -1)
  end
  state = { edits = {}, generation = state.generation + 1 }
end

-- An edit of the protocol as rows: where it begins, how many it replaces, and by which lines.
local function rows_of(edit)
  local first, last = edit.range.start.line, edit.range['end'].line
  if edit.range['end'].character > 0 then
    return { first = first, count = last + 1 - first, lines = vim.split(edit.text, '\n') }
  end
  local text = edit.text:gsub('\n$', '')
  return {
    first = first,
    count = last - first,
    lines = edit.text == '' and {} or vim.split(text, '\n'),
  }
end

local function draw(edit)
  local below = {}
  for _, line in ipairs(edit.lines) do
    local text = line:gsub('\t', (' '):rep(vim.bo[state.buffer].tabstop))
    table.insert(below, { { vim.fn.strtrans(text), 'KvqNewLine' } })
  end
  local last = vim.api.nvim_buf_line_count(state.buffer) - 1
  local above = edit.count == 0 and edit.first <= last
  if edit.count > 0 then
    edit.old = vim.api.nvim_buf_set_extmark(state.buffer, space, edit.first, 0, {
      end_row = edit.first + edit.count, hl_group = 'KvqOldLine', hl_eol = true, strict = false,
    })
  end
  local row = above and edit.first or math.min(last, edit.first + math.max(edit.count - 1, 0))
  edit.new = vim.api.nvim_buf_set_extmark(state.buffer, space, row, 0, {
    virt_lines = #below > 0 and below or nil,
    virt_lines_above = above,
  })
  edit.offset = row - edit.first
end

-- Where an edit is now: other edits may have been taken above it.
local function row_of(edit)
  local place = vim.api.nvim_buf_get_extmark_by_id(state.buffer, space, edit.new, {})
  return place[1] and place[1] - edit.offset
end

local function ask(buffer)
  M.clear()
  local generation = state.generation
  state.buffer, state.tick = buffer, vim.api.nvim_buf_get_changedtick(buffer)
  state.number = server.ask_edit(METHOD, buffer, function(edits)
    if generation ~= state.generation then
      return
    end
    state.number = nil
    if not vim.api.nvim_buf_is_valid(buffer) or vim.api.nvim_buf_get_changedtick(buffer) ~= state.tick then
      return
    end
    state.edits, state.shown = vim.tbl_map(rows_of, edits), now()
    vim.tbl_map(draw, state.edits)
  end)
  if state.number == nil and server.client() then
    -- The server is starting.
    vim.defer_fn(function()
      if generation == state.generation and vim.api.nvim_get_current_buf() == buffer then
        ask(buffer)
      end
    end, server.LOADING_MS)
  end
end

-- Asks after a change, but for one that `take` made while other edits are left.
local function on_change(buffer)
  if state.buffer ~= buffer or state.tick ~= vim.api.nvim_buf_get_changedtick(buffer) then
    ask(buffer)
  end
end

function M.setup(options)
  config = options
  vim.api.nvim_set_hl(0, 'KvqOldLine', { default = true, link = 'DiffDelete' })
  vim.api.nvim_set_hl(0, 'KvqNewLine', { default = true, link = 'DiffAdd' })
end

-- Follows what changes in `buffer`, within the autocommand group `group`.
function M.attach(buffer, group)
  if config.next_edits == 'off' then
    return
  end
  state.tick = state.buffer == buffer and state.tick or nil
  vim.api.nvim_create_autocmd({ 'TextChanged', 'TextChangedI' }, {
    group = group,
    buffer = buffer,
    callback = function()
      on_change(buffer)
    end,
  })
end

M.detach = M.clear

function M.visible()
  return #state.edits > 0 and state.buffer == vim.api.nvim_get_current_buf()
end

-- Whether the key is the next edit's even where a suggestion is shown: one was just taken, and there
-- are more, or may be.
function M.goes_on()
  local tick = vim.api.nvim_buf_get_changedtick(0)
  return tick == taken_tick and (M.visible() or state.number ~= nil)
end

local function take(edit, row)
  vim.api.nvim_buf_del_extmark(state.buffer, space, edit.new)
  if edit.old then
    vim.api.nvim_buf_del_extmark(state.buffer, space, edit.old)
  end
  vim.api.nvim_buf_set_lines(state.buffer, row, row + edit.count, false, edit.lines)
  table.remove(state.edits, 1)
  if #edit.lines > 0 then
    local last = row + #edit.lines
    vim.api.nvim_win_set_cursor(0, { last, #edit.lines[#edit.lines] })
  end
  taken_tick = vim.api.nvim_buf_get_changedtick(state.buffer)
  -- With none left, the change is one to ask after.
  state.tick = #state.edits > 0 and taken_tick or nil
end

-- Goes to the next edit; takes it where the cursor is there.
function M.go()
  local edit = M.visible() and state.edits[1]
  local row = edit and row_of(edit)
  if not row or now() - state.shown < SEEN_MS then
    return
  end
  local line = vim.api.nvim_win_get_cursor(0)[1] - 1
  if line >= row and line < row + math.max(edit.count, 1) then
    take(edit, row)
  else
    vim.cmd("normal! m'")
    local count = vim.api.nvim_buf_line_count(state.buffer)
    vim.api.nvim_win_set_cursor(0, { math.min(row + 1, count), 0 })
    vim.cmd('normal! ^')
  end
end

return M
