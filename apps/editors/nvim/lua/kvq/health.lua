-- :checkhealth kvq
local M = {}

local health = vim.health or require('health') -- 0.7 has the second only
local start = health.start or health.report_start
local ok = health.ok or health.report_ok
local info = health.info or health.report_info
local warn = health.warn or health.report_warn
local bad = health.error or health.report_error

local function check_command(config)
  local command = require('kvq.options').command(config)
  if vim.fn.executable(command[1]) ~= 1 then
    bad(('the command %q was not found'):format(command[1]), {
      'install kvq: `pip install .` in its checkout',
      'or give its place: require("kvq").setup({ path = "/where/it/is/kvq" })',
    })
    return
  end
  ok('the server is started by: ' .. table.concat(command, ' '))
end

local function check_server()
  local server = require('kvq.server')
  if server.client() then
    ok('the server runs')
  else
    warn('the server does not run', { 'open a file; then :Kvq restart, and look into the LSP log' })
  end
  if server.why_not then
    info('the last answer was empty: ' .. server.why_not)
  end
end

local function check_keys(config)
  for action, key in pairs(config.keys or {}) do
    local mapping = key and vim.fn.maparg(key, 'i', false, true) or {}
    if key and not (mapping.desc or ''):find('^kvq') then
      local advice = ('another plugin has it; map <Plug>(kvq-%s) to a key that is free'):format(action)
      warn(('%s does not do %q'):format(key, action), { advice })
    end
  end
end

function M.check()
  start('kvq')
  local facts = require('kvq').facts()
  if facts.options == nil then
    warn('setup() was not called', { "put require('kvq').setup() into your init.lua" })
    return
  end
  if not facts.enabled then
    warn('kvq is switched off', { ':KvqToggle switches it on' })
  end
  check_command(facts.options)
  check_server()
  check_keys(facts.options)
end

return M
