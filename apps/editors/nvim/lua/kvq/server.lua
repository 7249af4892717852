-- One `kvq lsp` for all buffers: started once, attached to each, asked, and explained.
local options = require('kvq.options')

local M = {
  client_id = nil,
  why_not = nil, -- why the last answer was empty, in the server's words
  progress = nil, -- what the server does meanwhile, in its words
  title = nil, -- and those it began with
  -- How long a server that starts, or a model that loads, is left alone before it is asked again.
  LOADING_MS = 300,
}

local has_011 = vim.fn.has('nvim-0.11') == 1

-- What the last answer was: empty, and why, or not. A status line may show it.
function M.answered(why_not)
  M.why_not = why_not
  vim.cmd('redrawstatus')
end

function M.client()
  return M.client_id and vim.lsp.get_client_by_id(M.client_id)
end

-- `value`, or nil where JSON said null.
local function value(of)
  return of ~= vim.NIL and of or nil
end

-- `client.request`; from 0.11 on it is a method.
local function request(client, ...)
  if has_011 then
    return client:request(...)
  end
  return client.request(...)
end

local function on_exit(code, signal, client_id)
  if client_id ~= M.client_id then
    return -- another one runs already
  end
  M.client_id = nil
  if code ~= 0 or signal ~= 0 then
    M.answered(('kvq lsp ended with code %d; :Kvq restart starts it again'):format(code))
  end
end

-- Says once what is missing, and what to do.
local function missing(command)
  if M.why_not == nil then
    M.why_not = command .. ' was not found'
    local advice = 'kvq: the command %q was not found. Install kvq (`pip install .` in its checkout)'
      .. ' or give its place: require("kvq").setup({ path = "/where/it/is/kvq" })'
    vim.notify(advice:format(command), vim.log.levels.WARN)
  end
end

-- Remembers what the server does for a status line; Neovim's own part goes on.
local function on_progress(err, result, context, config)
  local value = result and result.value or {}
  if value.kind == 'end' then
    M.progress, M.title = nil, nil
  else
    M.title = value.title and value.title:gsub('^kvq: ', '') or M.title
    local done = value.percentage and (' %d%%'):format(value.percentage) or ''
    M.progress = M.title and M.title .. done
  end
  vim.cmd('redrawstatus')
  local handler = vim.lsp.handlers['$/progress']
  if handler then
    return handler(err, result, context, config)
  end
end

-- Another client of this name is somebody else's, or ends.
local function never()
  return false
end

local function configuration(config)
  return {
    name = 'kvq',
    cmd = options.command(config),
    root_dir = vim.loop.cwd(),
    on_exit = vim.schedule_wrap(on_exit),
    init_options = {
      completion = config.completions,
      otherFiles = config.other_files,
      nextEdit = config.next_edits,
      nextEditDelay = config.next_edit_delay_ms,
    },
    -- An answer of the server is what counts; what it logs is in Neovim's LSP log.
    handlers = { ['window/showMessage'] = function() end, ['$/progress'] = on_progress },
  }
end

-- Starts the server unless it runs, and tells it of `buffer`. Whether there is a server.
function M.attach(buffer, config)
  local command = options.command(config)[1]
  if M.client() == nil then
    if vim.fn.executable(command) ~= 1 then
      missing(command)
      return false
    end
    M.why_not, M.progress = nil, nil
    M.client_id = vim.lsp.start_client and not has_011 and vim.lsp.start_client(configuration(config))
      or vim.lsp.start(configuration(config), { attach = false, reuse_client = never })
  end
  if M.client_id and not vim.lsp.buf_is_attached(buffer, M.client_id) then
    vim.lsp.buf_attach_client(buffer, M.client_id)
  end
  return M.client_id ~= nil
end

function M.detach(buffer)
  if M.client_id and vim.lsp.buf_is_attached(buffer, M.client_id) then
    vim.lsp.buf_detach_client(buffer, M.client_id)
  end
end

function M.stop()
  local client = M.client()
  M.client_id, M.why_not = nil, nil
  if client and has_011 then
    client:stop()
  elseif client then
    client.stop()
  end
end

-- The items for the cursor's place, to `answer(items, client)`; the number of the request.
function M.ask(buffer, kind, answer)
  local client = M.client()
  if client == nil or not client.initialized then
    return answer({}, client)
  end
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  params.context = { triggerKind = kind }
  local _, number = request(client, 'textDocument/inlineCompletion', params, function(_, result)
    answer(result and result.items or {}, client)
  end, buffer)
  return number
end

-- The next edits of the text as it is, to `answer(edits)`; the number of the request.
function M.ask_edit(method, buffer, answer)
  local client = M.client()
  if client == nil or not client.initialized then
    return nil
  end
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  local _, number = request(client, method, params, function(_, result)
    answer(value(result) and result.edits or {})
  end, buffer)
  return number
end

-- Tells the server that somebody is in the current buffer, and where: it may read it beforehand.
function M.focus()
  local client = M.client()
  if client == nil or not client.initialized then
    return
  end
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  if has_011 then
    client:notify('textDocument/didFocus', params)
  else
    client.notify('textDocument/didFocus', params)
  end
end

function M.cancel(number)
  local client = M.client()
  if client == nil or number == nil then
    return
  end
  if has_011 then
    client:cancel_request(number)
  else
    client.cancel_request(number)
  end
end

-- What the last completion of `buffer` cost, or why there was none.
function M.explain(buffer, answer)
  local client = M.client()
  if client == nil then
    return answer(nil)
  end
  local params = { command = 'kvq.explain', arguments = { vim.uri_from_bufnr(buffer) } }
  request(client, 'workspace/executeCommand', params, function(_, result)
    local report = value(result)
    if report then
      report.whyNot = value(report.whyNot)
    end
    answer(report)
  end)
end

-- Learns why an answer was empty; calls `again` in a while where there only was no model yet.
function M.learn_why(buffer, again)
  local function waits(why_not)
    M.answered(why_not)
    vim.defer_fn(again, M.LOADING_MS)
  end
  local client = M.client()
  if client == nil then
    return -- why, is known
  end
  if not client.initialized then
    return waits('the server is starting')
  end
  M.explain(buffer, function(report)
    local why_not = report and report.whyNot
    if why_not and why_not:find('loading', 1, true) then
      waits(why_not)
    else
      M.answered(why_not)
    end
  end)
end

-- Bytes before a place that the server counts in units of its encoding.
function M.bytes(client, line, units)
  if client.offset_encoding == 'utf-8' then
    return math.min(units, #line)
  end
  if has_011 then
    return vim.str_byteindex(line, client.offset_encoding, units, false)
  end
  return vim.str_byteindex(line, units, client.offset_encoding == 'utf-16')
end

return M
