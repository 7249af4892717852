-- Code completion by `kvq lsp` as ghost text: require('kvq').setup() is all there is to call.
local edits = require('kvq.edits')
local ghost = require('kvq.ghost')
local options = require('kvq.options')
local server = require('kvq.server')

local M = {}

local config = nil -- the options, once set up
local enabled = true
local attached = {} -- by buffer: the client that knows it

-- Whether kvq is to complete in `buffer`: a file's text, of a kind that is not switched off.
local function completes(buffer)
  if vim.bo[buffer].buftype ~= '' or not vim.bo[buffer].modifiable then
    return false
  end
  local rule = config.filetypes[vim.bo[buffer].filetype]
  if rule == nil then
    rule = config.filetypes['*']
  end
  return rule and true or false
end

local function group_of(buffer)
  return vim.api.nvim_create_augroup('kvq-' .. buffer, { clear = true })
end

local function detach(buffer)
  if attached[buffer] then
    attached[buffer] = nil
    vim.api.nvim_del_augroup_by_id(group_of(buffer))
    if vim.api.nvim_buf_is_valid(buffer) then
      ghost.detach(buffer)
      edits.detach()
      server.detach(buffer)
    end
  end
end

local function detach_all()
  for buffer in pairs(vim.deepcopy(attached)) do
    detach(buffer)
  end
end

local function attach(buffer)
  if not enabled or not completes(buffer) then
    return detach(buffer)
  end
  local known = server.client() and attached[buffer] == server.client_id
  if not known and server.attach(buffer, config) then
    attached[buffer] = server.client_id
    local group = group_of(buffer)
    ghost.attach(buffer, group)
    edits.attach(buffer, group)
  end
  if attached[buffer] and buffer == vim.api.nvim_get_current_buf() then
    server.focus()
  end
end

-- The actions

local function inserter(part)
  return function()
    ghost.accept(part)
  end
end

M.accept = inserter('all')
M.accept_line = inserter('line')
M.accept_word = inserter('word')

function M.next()
  ghost.cycle(1)
end

function M.previous()
  ghost.cycle(-1)
end

function M.trigger()
  attach(vim.api.nvim_get_current_buf())
  ghost.trigger()
end

function M.dismiss()
  ghost.dismiss()
  edits.clear()
end

-- Goes to the next edit, or takes it where the cursor is there.
M.next_edit = edits.go
M.next_edit_visible = edits.visible

-- Whether a suggestion is shown at the cursor.
M.visible = ghost.visible

-- Switches completion off or on, for all buffers.
function M.toggle()
  enabled = not enabled
  if not enabled then
    detach_all()
  end
  attach(vim.api.nvim_get_current_buf())
  vim.api.nvim_echo({ { 'kvq is ' .. (enabled and 'on' or 'off') } }, false, {})
end

function M.restart()
  detach_all()
  server.stop()
  attach(vim.api.nvim_get_current_buf())
end

-- One line that says what the last completion cost, or why there was none.
function M.explain()
  server.explain(vim.api.nvim_get_current_buf(), function(report)
    local line = server.why_not or 'no completion of this buffer was asked for'
    if report and report.whyNot then
      line = 'no completion: ' .. report.whyNot
    elseif report then
      line = ('%d suggestions; reused %d tokens, encoded %d, %.0f ms'):format(
        #report.drafts, report.reusedTokens, report.encodedTokens, report.ms
      )
    end
    vim.notify('kvq: ' .. line)
  end)
end

-- A few words for a status line: which suggestion is shown, what is done meanwhile, or why none is.
function M.status()
  if config == nil or not enabled then
    return 'kvq off'
  end
  local index, of = ghost.count()
  if of then
    return ('kvq %d/%d'):format(index, of)
  end
  local says = server.progress or server.why_not
  return says and 'kvq: ' .. says or 'kvq'
end

-- Keys and commands

local ACTIONS = {
  'accept', 'accept_line', 'accept_word', 'next', 'previous', 'trigger', 'dismiss', 'next_edit',
}
local COMMANDS = vim.list_extend({ 'toggle', 'restart', 'explain' }, ACTIONS)

local function typed(key)
  return vim.api.nvim_replace_termcodes(key, true, true, true)
end

-- What the key did before, as <Plug> of its own; nothing when it had no mapping.
local function keep(mode, action, key)
  local before
  for _, mapping in ipairs(vim.api.nvim_get_keymap(mode)) do
    before = typed(mapping.lhs) == typed(key) and mapping or before
  end
  if before == nil then
    return nil
  end
  local plug = ('<Plug>(kvq-before-%s)'):format(action)
  local does = (before.rhs or ''):gsub('<SID>', ('<SNR>%d_'):format(before.sid or 0))
  vim.api.nvim_set_keymap(mode, plug, does, {
    callback = before.callback,
    expr = before.expr == 1,
    noremap = before.noremap == 1,
    silent = before.silent == 1,
    replace_keycodes = before.replace_keycodes == 1 or nil,
  })
  return plug
end

-- The key does `action` where a suggestion is shown, and what it did before elsewhere.
local function map_key(action, key)
  local describe = 'kvq: ' .. action:gsub('_', ' ')
  if action == 'trigger' then
    vim.keymap.set('i', key, '<Plug>(kvq-trigger)', { desc = describe })
    return
  end
  local otherwise = keep('i', action, key) or key
  local edit = ({ accept = 'next_edit', dismiss = 'dismiss' })[action]
  vim.keymap.set('i', key, function()
    local goes_on = edit == 'next_edit' and edits.goes_on()
    local does = not goes_on and M.visible() and action
      or (goes_on or edits.visible()) and edit
    return does and ('<Plug>(kvq-%s)'):format(does) or otherwise
  end, { expr = true, remap = true, desc = describe })
  if edit and config.next_edits ~= 'off' then
    local before = keep('n', action, key) or key
    vim.keymap.set('n', key, function()
      return edits.visible() and ('<Plug>(kvq-%s)'):format(edit) or before
    end, { expr = true, remap = true, desc = describe })
  end
end

local function map_plugs()
  for _, action in ipairs(ACTIONS) do
    -- Undo takes back what was accepted, and not what was typed before it.
    local undo = action:sub(1, 6) == 'accept' and '<C-g>u' or ''
    local plug = ('<Plug>(kvq-%s)'):format(action)
    local does = ("<Cmd>lua require('kvq').%s()<CR>"):format(action)
    vim.keymap.set('i', plug, undo .. does)
    vim.keymap.set('n', plug, does)
  end
end

local function map_keys()
  map_plugs()
  for action, key in pairs(config.keys or {}) do
    if key and not M.mapped[action] then
      map_key(action, key)
      M.mapped[action] = true
    end
  end
end

M.mapped = {}

local function create_commands()
  vim.api.nvim_create_user_command('Kvq', function(command)
    if not vim.tbl_contains(COMMANDS, command.args) then
      local names = table.concat(COMMANDS, ', ')
      vim.notify(('kvq: no command %q; possible are %s'):format(command.args, names), 3)
      return
    end
    M[command.args]()
  end, {
    nargs = 1,
    complete = function(lead)
      return vim.tbl_filter(function(name)
        return vim.startswith(name, lead)
      end, COMMANDS)
    end,
    desc = 'kvq: one of its actions',
  })
  vim.api.nvim_create_user_command('KvqToggle', M.toggle, { desc = 'kvq: off or on' })
end

-- Completes from now on; `settings`: see |kvq-options|. May be called again with other options.
function M.setup(settings)
  if vim.fn.has('nvim-0.7') ~= 1 then
    error('kvq: this is for Neovim 0.7 and later', 0)
  end
  local merged = options.merged(settings)
  detach_all()
  server.stop()
  config = merged
  ghost.setup(config)
  edits.setup(config)
  vim.api.nvim_set_hl(0, 'KvqGhost', { default = true, link = 'Comment' })
  create_commands()
  map_keys()
  local group = vim.api.nvim_create_augroup('kvq', { clear = true })
  local function on(events, callback)
    vim.api.nvim_create_autocmd(events, {
      group = group,
      callback = function(event)
        callback(event.buf)
      end,
    })
  end
  on({ 'BufEnter', 'BufFilePost', 'FileType', 'InsertEnter' }, attach)
  -- A buffer that gets another name is another document to the server.
  on({ 'BufDelete', 'BufFilePre' }, detach)
  if vim.v.vim_did_enter == 1 then
    attach(vim.api.nvim_get_current_buf())
  end
end

-- For :checkhealth.
function M.facts()
  return { options = config, enabled = enabled }
end

return M
