"""A real Neovim without a screen, driven over two pipes: keys in, values out."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "apps/editors/nvim"
FAKE_SERVER = Path(__file__).with_name("fake_lsp.py")
PATIENCE_S = 120.0

# Answers lines of JSON ({"run": Lua}) with lines of JSON, while Neovim's own loop goes on.
_AGENT = """
local rest = ''
local channel
local function answer(line)
  local ok, result = pcall(function()
    return assert(loadstring(vim.json.decode(line).run))()
  end)
  local reply = ok and { ok = true, result = result } or { ok = false, failed = tostring(result) }
  vim.fn.chansend(channel, vim.json.encode(reply) .. '\\n')
end
channel = vim.fn.stdioopen({
  on_stdin = function(_, data)
    rest = rest .. data[1]
    for index = 2, #data do
      answer(rest)
      rest = data[index]
    end
  end,
})
"""


def executables() -> list[str]:
    """The Neovims to test in: of KVQ_NVIM (several, as in PATH), else the one that is installed."""
    named = os.environ.get("KVQ_NVIM")
    paths = named.split(os.pathsep) if named else [shutil.which("nvim")]
    return [path for path in paths if path]


class Neovim:
    """One Neovim with the plugin on its path and nobody's configuration."""

    def __init__(
        self, executable: str, folder: Path, init: str, *files: Path, **environment: str
    ) -> None:
        """`init` is the user's init.lua, `files` what the command line names."""
        agent = folder / "agent.lua"
        agent.write_text(_AGENT)
        init_file = folder / "init.lua"
        init_file.write_text(init)
        homes = {f"XDG_{name}_HOME": str(folder / name) for name in ("CONFIG", "STATE", "DATA")}
        paths = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [executable, "--headless", "--clean", "-n", "--cmd", f"set rtp^={PLUGIN}",
             "--cmd", f"luafile {init_file}", "-c", f"luafile {agent}", *files],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
            env=os.environ | homes | {"PYTHONPATH": paths, "TERM": "xterm"} | environment,
        )  # fmt: skip

    def lua(self, code: str) -> Any:
        """What the Lua `code` returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"run": code}).encode() + b"\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        assert reply["ok"], reply["failed"]
        return reply.get("result")

    def keys(self, keys: str) -> None:
        """Types `keys`, in Neovim's notation, and waits until all are taken."""
        self.lua(f"vim.api.nvim_input({_quoted(keys)})")

    def until(self, code: str, expected: Any) -> None:
        """Waits until the Lua expression `code` is `expected`."""
        _until(lambda: self.lua(f"return {code}"), expected, code)

    def until_row(self, number: int, expected: str) -> None:
        """Waits until a row of the screen is `expected`."""
        _until(lambda: self.row(number), expected, f"row {number}")

    def open(self, path: Path, text: str) -> None:
        """Edits a file of this text."""
        path.write_bytes(text.encode())
        self.lua(f"vim.cmd('edit ' .. vim.fn.fnameescape({_quoted(str(path))}))")

    def lines(self) -> list[str]:
        """The text of the current buffer."""
        return self.lua("return vim.api.nvim_buf_get_lines(0, 0, -1, false)")

    def row(self, number: int) -> str:
        """A row of the screen as it is drawn, from 0."""
        code = (
            "vim.cmd('redraw!') local row = {}"
            f"for column = 1, 60 do row[column] = vim.fn.screenstring({number + 1}, column) end "
            "return table.concat(row)"
        )
        return self.lua(code).rstrip()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def _until(find: Callable[[], Any], expected: Any, name: str) -> None:
    since = time.monotonic()
    while (actual := find()) != expected:
        assert time.monotonic() - since < PATIENCE_S, f"{name} is {actual!r}, not {expected!r}"
        time.sleep(0.005)


def _quoted(text: str) -> str:
    """`text` as a Lua string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
