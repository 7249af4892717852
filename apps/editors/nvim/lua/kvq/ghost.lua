-- Suggestions as ghost text, drawn with extended marks.
local insertion = require('kvq.insertion')
local server = require('kvq.server')

local M = {}

local INVOKED, AUTOMATIC = 1, 2

local space = vim.api.nvim_create_namespace('kvq')
local has_inline = vim.fn.has('nvim-0.10') == 1

local config = nil -- the options
-- What is known of the one buffer that is being typed in.
local state = { drafts = {}, index = 1, requested = nil, number = nil, generation = 0 }

local function cursor()
  local row, column = unpack(vim.api.nvim_win_get_cursor(0))
  return row - 1, column, vim.api.nvim_get_current_line()
end

local function rest_of(draft)
  local row, column, line = cursor()
  if draft.row ~= row or line:sub(column + 1) ~= draft.after then
    return nil
  end
  return insertion.rest(draft.text, draft.start, line, column)
end

-- The suggestion to show and what of it is to come: the chosen one, else the first that still fits.
local function current()
  if state.buffer ~= vim.api.nvim_get_current_buf() then
    return nil
  end
  for step = 0, #state.drafts - 1 do
    local index = (state.index - 1 + step) % #state.drafts + 1
    local rest = rest_of(state.drafts[index])
    if rest then
      state.index = index
      return rest
    end
  end
end

local function fits_now()
  local mode = vim.api.nvim_get_mode().mode
  return mode:sub(1, 1) == 'i' and vim.fn.pumvisible() == 0 and vim.fn.reg_executing() == ''
end

-- Text as virtual text can show it: tabs as wide as they are, other controls by name.
local function shown(text)
  return vim.fn.strtrans((text:gsub('\t', (' '):rep(vim.fn.shiftwidth()))))
end

local function erase()
  if state.buffer and vim.api.nvim_buf_is_valid(state.buffer) then
    vim.api.nvim_buf_clear_namespace(state.buffer, space, 0, -1)
  end
end

local function draw(rest)
  local row, column, line = cursor()
  local lines = vim.split(rest, '\n', { plain = true })
  local first, below = { { shown(lines[1]), 'KvqGhost' } }, {}
  local after = line:sub(column + 1)
  if after ~= '' and not has_inline then
    table.insert(first, { shown(after), 'Normal' })
  end
  for index = 2, #lines do
    table.insert(below, { { shown(lines[index]), 'KvqGhost' } })
  end
  erase()
  vim.api.nvim_buf_set_extmark(0, space, row, column, {
    virt_text = first,
    virt_text_pos = has_inline and 'inline' or 'overlay',
    virt_lines = #below > 0 and below or nil,
    hl_mode = 'combine',
  })
end

-- Shows what fits the cursor's place, or nothing; whether something is shown.
local function show()
  local rest = fits_now() and current()
  if rest then
    draw(rest)
  else
    erase()
  end
  return rest and true or false
end

local function forget()
  erase()
  server.cancel(state.number)
  state.drafts, state.index, state.number = {}, 1, nil
  state.generation = state.generation + 1
end

local function place()
  local row, column = cursor()
  local tick = vim.api.nvim_buf_get_changedtick(0)
  return ('%d %d %d %d'):format(vim.api.nvim_get_current_buf(), tick, row, column)
end

local function drafts_of(items, client)
  local row, column, line = cursor()
  local drafts = {}
  for _, item in ipairs(items) do
    local start = item.range and item.range.start or nil
    table.insert(drafts, {
      row = row,
      start = start and server.bytes(client, line, start.character) or column,
      after = line:sub(column + 1),
      text = item.insertText,
    })
  end
  return drafts
end

local function ask(kind)
  forget()
  local generation, requested_at = state.generation, place()
  state.buffer, state.requested = vim.api.nvim_get_current_buf(), requested_at
  state.number = server.ask(state.buffer, kind, function(items, client)
    if generation ~= state.generation then
      return
    end
    state.number = nil
    if #items == 0 then
      server.learn_why(state.buffer, function()
        if generation == state.generation and fits_now() then
          ask(kind)
        end
      end)
    elseif fits_now() and place() == requested_at then
      state.drafts, state.index = drafts_of(items, client), 1
      show()
      server.answered(nil)
    end
  end)
end

-- After each key: what is typed of a suggestion leaves the rest of it; anything else asks anew.
local function refresh()
  if show() or state.requested == place() or not fits_now() then
    return
  end
  forget()
  if config.mode == 'eager' then
    local generation = state.generation
    vim.defer_fn(function()
      if generation == state.generation and fits_now() then
        ask(AUTOMATIC)
      end
    end, config.debounce_ms)
  end
end

function M.setup(options)
  config = options
end

-- Follows what is typed in `buffer`, within the autocommand group `group`.
function M.attach(buffer, group)
  local function on(events, callback)
    vim.api.nvim_create_autocmd(events, { group = group, buffer = buffer, callback = callback })
  end
  on({ 'InsertEnter' }, function()
    state.requested = nil
    vim.schedule(refresh) -- the mode is not Insert yet
  end)
  on({ 'TextChangedI', 'CursorMovedI', 'TextChangedP', 'CompleteDone' }, refresh)
  on({ 'InsertLeave', 'BufLeave' }, forget)
end

M.detach = forget

function M.visible()
  return fits_now() and current() ~= nil
end

function M.accept(part)
  local rest = current()
  if rest then
    insertion.insert(rest, part)
    if part == 'all' then
      forget()
    end
  end
end

-- The next suggestion (`step` 1) or the previous one (-1) of those that still fit.
function M.cycle(step)
  for _ = 1, #state.drafts do
    state.index = (state.index - 1 + step) % #state.drafts + 1
    if rest_of(state.drafts[state.index]) then
      break
    end
  end
  show()
end

function M.trigger()
  ask(INVOKED)
end

function M.dismiss()
  forget()
end

-- The number of the suggestion shown and how many fit; nothing when none is shown.
function M.count()
  if not M.visible() then
    return nil
  end
  local number, of = 0, 0
  for index, draft in ipairs(state.drafts) do
    of = of + (rest_of(draft) and 1 or 0)
    number = index == state.index and of or number
  end
  return number, of
end

return M
