-- What a user can set, what holds where nothing is set, and what is refused.
local M = {}

M.defaults = {
  path = 'kvq', -- the executable
  model = nil, -- a bundle's name or folder; nil: the model that kvq brings
  drafts = 3,
  args = {}, -- more of the command line, such as { '--kbits', '4' }
  cmd = nil, -- the whole command line instead of the four above
  mode = 'eager', -- 'subtle': only when the trigger key is pressed
  filetypes = { ['*'] = true }, -- { markdown = false } leaves Markdown alone
  completions = 'likely', -- 'always': also the part that the model is not sure of
  other_files = true, -- the model also reads parts of other open files
  next_edits = 'likely', -- 'always': also what the model is not sure of; 'off'
  next_edit_delay_ms = 150, -- without a change, before the model is asked for the next edit
  debounce_ms = 20, -- between a key and the request
  keys = {
    accept = '<Tab>',
    accept_line = '<S-Tab>',
    accept_word = '<C-Right>',
    next = '<M-]>',
    previous = '<M-[>',
    trigger = '<C-\\>',
    dismiss = '<C-]>',
  }, -- false for a key: none; false for all of them: none at all
}

local types = {
  path = 'string', model = 'string', drafts = 'number', args = 'table', cmd = 'table',
  mode = 'string', filetypes = 'table', debounce_ms = 'number', keys = 'table',
  completions = 'string', other_files = 'boolean', next_edits = 'string', next_edit_delay_ms = 'number',
}

local function possible(of)
  local names = vim.tbl_keys(of)
  table.sort(names)
  return table.concat(names, ', ')
end

local function check(settings)
  for name, value in pairs(settings) do
    local type_name = types[name]
    if type_name == nil then
      error(('kvq: setup() has no option %q; possible are %s'):format(name, possible(types)), 0)
    end
    if type(value) ~= type_name and not (name == 'keys' and value == false) then
      error(('kvq: %s must be a %s, not a %s'):format(name, type_name, type(value)), 0)
    end
  end
  for name in pairs(settings.keys or {}) do
    if M.defaults.keys[name] == nil then
      local names = possible(M.defaults.keys)
      error(('kvq: there is no key for %q; possible are %s'):format(name, names), 0)
    end
  end
  if settings.mode ~= nil and settings.mode ~= 'eager' and settings.mode ~= 'subtle' then
    error(("kvq: mode is 'eager' or 'subtle', not %q"):format(settings.mode), 0)
  end
  for _, name in ipairs({ 'completions', 'next_edits' }) do
    local eager = settings[name]
    if eager ~= nil and not vim.tbl_contains({ 'off', 'likely', 'always' }, eager) then
      error(("kvq: %s is 'off', 'likely' or 'always', not %q"):format(name, eager), 0)
    end
  end
end

-- The defaults with what is `settings` on top; an error names what it does not know.
function M.merged(settings)
  check(settings or {})
  return vim.tbl_deep_extend('force', M.defaults, settings or {})
end

-- The command line of the language server.
function M.command(options)
  if options.cmd then
    return options.cmd
  end
  local command = { options.path, 'lsp', '--drafts', tostring(options.drafts) }
  if options.model then
    vim.list_extend(command, { '--model', options.model })
  end
  return vim.list_extend(command, options.args)
end

return M
