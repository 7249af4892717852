-- A suggestion as text: what of it goes on from the cursor, its next word or line, and putting it in.
local M = {}

-- What of `text`, which begins at byte `start` of the cursor's line, is still to come.
-- Nothing when the line says something else, or when all of it is typed.
function M.rest(text, start, line, column)
  local typed = line:sub(start + 1, column)
  if column < start or text:sub(1, #typed) ~= typed or #text == #typed then
    return nil
  end
  return text:sub(#typed + 1)
end

-- The first word of `text` with the space before it; a run of signs counts as a word.
-- Every byte outside ASCII is of a word, so that no character is cut.
local function word(text)
  return text:match('^%s*[%w_\128-\255]+') or text:match('^%s*[^%w%s_\128-\255]+') or text
end

-- The first line of `text`; when it begins with a line end, that and the line after it.
local function line(text)
  return text:match('^\n?[^\n]+') or text
end

local parts = {
  all = function(text)
    return text
  end,
  line = line,
  word = word,
}

-- Puts a part ('all', 'line', 'word') of `rest` at the cursor, which goes behind it.
function M.insert(rest, part)
  local row, column = unpack(vim.api.nvim_win_get_cursor(0))
  local text = parts[part](rest)
  local lines = vim.split(text, '\n', { plain = true })
  vim.api.nvim_buf_set_text(0, row - 1, column, row - 1, column, lines)
  local before = #lines == 1 and column or 0
  vim.api.nvim_win_set_cursor(0, { row + #lines - 1, before + #lines[#lines] })
end

return M
