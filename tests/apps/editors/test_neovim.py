"""The Neovim plugin in a real Neovim, against the real language server with a completer of its own.

Runs in the Neovim that is installed, or in those that KVQ_NVIM names.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from neovim import FAKE_SERVER, PLUGIN, Neovim, executables

pytestmark = pytest.mark.skipif(not executables(), reason="no Neovim is installed")

MODE = "vim.api.nvim_get_mode().mode"
STATUS = "require('kvq').status()"
VISIBLE = "require('kvq').visible()"
COLUMN = "vim.fn.col('.') - 1"
MESSAGES = "vim.fn.execute('messages')"
EXPLAINED = "kvq: 3 suggestions; reused 5 tokens, encoded 2, 11 ms"
WHAT_TAB_DID = "vim.keymap.set('i', '<Tab>', function() return '[tab]' end, { expr = true })"
COMMAND = f"cmd = {{ '{sys.executable}', '{FAKE_SERVER}' }}"


class Editor(Neovim):
    """Neovim with the plugin set up, and what its server was asked."""

    def __init__(
        self, executable: str, folder: Path, setup: str, *files: Path, **environment: str
    ) -> None:
        self._folder, self._calls = folder, folder / "calls.jsonl"
        self._calls.touch()
        init = f"{WHAT_TAB_DID} require('kvq').setup({{ {setup} }})"
        calls = {"FAKE_LSP_CALLS": str(self._calls)}
        super().__init__(executable, folder, init, *files, **calls, **environment)

    def write(self, text: str, keys: str) -> None:
        """Opens a new file of `text` and types `keys`."""
        self.keys("<Esc>")
        self.until(MODE, "n")
        self.open(self._folder / f"{len(list(self._folder.glob('*.txt')))}.txt", text)
        self.keys(keys)

    def calls(self) -> list[dict[str, Any]]:
        """What stood around the cursor at each completion, and the process that wrote it."""
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture(scope="module", params=executables())
def executable(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(executable: str, tmp_path: Path) -> Iterator[Callable[..., Editor]]:
    """Starts a Neovim with options of its own."""
    with ExitStack() as stack:
        yield lambda *setup, **environment: stack.enter_context(
            closing(Editor(executable, tmp_path, *setup, **environment))
        )


@pytest.fixture(scope="module")
def editor(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    folder = tmp_path_factory.mktemp("nvim")
    with closing(Editor(executable, folder, COMMAND)) as opened:
        yield opened


def test_a_draft_is_shown_cycled_and_accepted(editor: Editor) -> None:
    editor.write("one\ntwo\n", "ogre")
    editor.until_row(1, "greet(name, loudly=True)")
    assert editor.lines() == ["one", "gre", "two"]
    editor.keys("<M-]>")
    editor.until_row(1, "greet_all(names)")
    editor.keys("<M-[>")
    editor.until_row(1, "greet(name, loudly=True)")
    editor.keys("<M-]><Tab>")
    editor.until("vim.fn.getline(2)", "greet_all(names)")
    assert editor.lua(f"return {COLUMN}") == len("greet_all(names)")
    editor.until(VISIBLE, False)
    # With nothing to accept the key does what it did before the plugin came.
    editor.keys("<Tab>")
    editor.until("vim.fn.getline(2)", "greet_all(names)[tab]")
    # What was accepted is one step of undo; what was typed before it stays.
    editor.keys("<Esc>u")
    editor.until("vim.fn.getline(2)", "gre")


def test_words_and_lines_are_accepted_one_by_one(editor: Editor) -> None:
    editor.write("", "iplu")
    editor.until_row(0, "plural(")
    assert [editor.row(row) for row in (1, 2, 3)] == ["    one,", "    two,", ")"]
    editor.keys("<C-Right>")
    editor.until("vim.fn.getline(1)", "plural")
    editor.until(VISIBLE, True)
    editor.keys("<S-Tab>")
    editor.until("vim.fn.getline(1)", "plural(")
    editor.until(VISIBLE, True)
    editor.keys("<S-Tab>")
    editor.until("vim.fn.getline(2)", "    one,")


def test_what_stands_behind_the_cursor_stays(editor: Editor) -> None:
    editor.write("()\n", "icall<Right>")
    editor.until_row(0, "call(argument)")
    assert editor.lines() == ["call()"]
    editor.keys("<Tab>")
    editor.until("vim.fn.getline(1)", "call(argument)")
    assert editor.lua(f"return {COLUMN}") == len("call(argument")


def test_places_are_exact_behind_an_emoji(editor: Editor) -> None:
    editor.write("", "i\U0001f44b caf")
    editor.until_row(0, "\U0001f44b caf\u00e9 = '\U0001f44b'")
    editor.keys("<C-Right>")
    editor.until("vim.fn.getline(1)", "\U0001f44b caf\u00e9")
    assert editor.lua(f"return {COLUMN}") == len("\U0001f44b caf\u00e9".encode())
    editor.until(VISIBLE, True)
    editor.keys("<Tab>")
    editor.until("vim.fn.getline(1)", "\U0001f44b caf\u00e9 = '\U0001f44b'")


def test_nothing_is_shown_where_nothing_fits(editor: Editor) -> None:
    editor.write("", "igre")
    editor.until(VISIBLE, True)
    editor.keys("x")
    editor.until(STATUS, "kvq: filtered")
    assert editor.row(0) == "grex"
    editor.keys("<BS>")
    editor.until(VISIBLE, True)
    editor.keys("<C-]>")
    editor.until(VISIBLE, False)
    assert editor.row(0) == "gre"
    editor.keys("e<Esc>")
    editor.until(MODE, "n")
    assert editor.lua(f"return {VISIBLE}") is False
    assert editor.row(0) == "gree"


def test_switched_off_it_is_silent(editor: Editor) -> None:
    editor.write("", "igre")
    editor.until(VISIBLE, True)
    editor.lua("vim.cmd('KvqToggle')")
    editor.until(STATUS, "kvq off")
    assert editor.row(0) == "gre"
    editor.lua("vim.cmd('Kvq toggle')")
    editor.keys("e")
    editor.until(VISIBLE, True)
    editor.lua("vim.cmd('messages clear') vim.cmd('Kvq explain')")
    editor.until(f"{MESSAGES}:match('kvq: %d suggestions.*')", EXPLAINED)


def test_a_draft_is_typed_without_another_request(editor: Editor) -> None:
    editor.write("", "igre")
    editor.until_row(0, "greet(name, loudly=True)")
    before = len(editor.calls())
    for key in "en = ":
        editor.keys(key)
    # The first draft does not fit any more; the third does.
    editor.until("vim.fn.getline(1)", "green = ")
    editor.until_row(0, "green = 1")
    editor.until(STATUS, "kvq 1/1")
    editor.keys("<BS><BS><BS><BS><M-]>")
    editor.until_row(0, "greet(name, loudly=True)")
    assert len(editor.calls()) == before


def test_a_list_of_completions_comes_first(editor: Editor) -> None:
    editor.write("green_apple\n", "ogre")
    editor.until(VISIBLE, True)
    editor.keys("<C-n>")
    editor.until("vim.fn.pumvisible()", 1)
    editor.until(VISIBLE, False)
    editor.keys("<C-e>")
    editor.until(VISIBLE, True)


def test_while_the_model_loads_it_says_so_and_then_shows(
    start: Callable[..., Editor], tmp_path: Path
) -> None:
    gate = tmp_path / "loaded"
    file = tmp_path / "of_the_command_line"
    file.write_text("one\n")
    editor = start(COMMAND, file, FAKE_LSP_LOADS=str(gate))
    editor.keys("ccgre")
    editor.until(STATUS, "kvq: loading the model")
    gate.touch()
    editor.until_row(0, "greet(name, loudly=True)")
    editor.lua("vim.cmd('checkhealth kvq')")
    report = "\n".join(editor.lines())
    assert "the server runs" in report
    assert "ERROR" not in report
    assert "WARNING" not in report


def test_without_kvq_it_says_once_what_to_do(start: Callable[..., Editor]) -> None:
    editor = start("path = 'no-such-kvq', mode = 'subtle'")
    for _ in range(2):
        editor.write("", "igre<C-\\><Tab>")
        editor.until("vim.fn.getline(1)", "gre[tab]")
    messages = editor.lua(f"return {MESSAGES}")
    assert messages.count("was not found") == 1
    assert "pip install" in messages
    editor.lua("vim.cmd('checkhealth kvq')")
    assert 'the command "no-such-kvq" was not found' in "\n".join(editor.lines())


def test_shown_only_when_asked_for(start: Callable[..., Editor]) -> None:
    editor = start(f"{COMMAND}, mode = 'subtle'")
    editor.write("", "igre")
    editor.until("require('kvq.server').client().initialized == true", True)
    assert editor.calls() == []
    editor.keys("<C-\\>")
    editor.until_row(0, "greet(name, loudly=True)")
    editor.keys("<Esc>")
    editor.until(MODE, "n")
    # A server that ends is started anew.
    editor.lua("vim.cmd('Kvq restart')")
    editor.write("", "iplu<C-\\>")
    editor.until_row(0, "plural(")
    refused = editor.lua("return select(2, pcall(require('kvq').setup, { draft = 2 }))")
    assert 'no option "draft"; possible are args, cmd, completions, debounce_ms, drafts' in refused


@pytest.mark.parametrize("reads", [True, False])
def test_other_buffers_are_read_unless_that_is_off(
    start: Callable[..., Editor], tmp_path: Path, reads: bool
) -> None:
    editor = start(f"{COMMAND}, other_files = {str(reads).lower()}")
    editor.lua("vim.o.hidden = true")
    editor.open(tmp_path / "greetings.py", "def greet(name, loudly):\n    return name\n")
    editor.open(tmp_path / "main.py", "name, loudly = \n")
    editor.keys("A gre")
    editor.until(VISIBLE, True)
    files = editor.calls()[-1]["others"]
    assert files == [f"{tmp_path.name}/greetings.py"] * reads


def test_a_server_that_died_comes_back_for_every_buffer(start: Callable[..., Editor]) -> None:
    editor = start(f"{COMMAND}, filetypes = {{ markdown = false }}")
    editor.write("", "igre")
    editor.until(VISIBLE, True)
    editor.write("", "iplu")
    editor.until(VISIBLE, True)
    editor.keys("<Esc>")
    editor.until(MODE, "n")
    number = "require('kvq.server').client_id"
    before = editor.lua(f"return {number}")
    os.kill(editor.calls()[-1]["pid"], signal.SIGKILL)
    editor.until(f"{number} == nil", True)
    editor.keys("Ax<BS>")
    editor.until(VISIBLE, True)
    assert editor.lua(f"return {number}") != before
    editor.keys("<Esc>:buffer 0.txt<CR>A")
    editor.until(VISIBLE, True)
    # A buffer that gets a type which is left alone is left.
    editor.keys("<Esc>:set filetype=markdown<CR>A")
    editor.until(f"vim.lsp.buf_is_attached(0, {number})", False)
    assert editor.lua(f"return {VISIBLE}") is False


def test_options_that_are_given_later_are_those_of_the_server(start: Callable[..., Editor]) -> None:
    editor = start(COMMAND)
    editor.write("", "igre")
    editor.until(VISIBLE, True)
    # Nor is a client of this name that somebody else has started taken for it.
    command = f"cmd = {{ '{sys.executable}', '{FAKE_SERVER}', '%s' }}"
    other = f"{{ name = 'kvq', root_dir = vim.loop.cwd(), {command % 'other'} }}"
    editor.lua(f"return vim.lsp.start and vim.lsp.start({other})")
    editor.lua(f"require('kvq').setup({{ {command % 'later'} }})")
    assert editor.lua("return require('kvq.server').client().config.cmd[3]") == "later"


def test_the_help_names_every_option_key_and_command() -> None:
    text = (PLUGIN / "doc/kvq.txt").read_text()
    options = (PLUGIN / "lua/kvq/options.lua").read_text()
    names = re.findall(r"^  (\w+) = ", options.partition("local types")[0], re.MULTILINE)
    keys = re.findall(r"^    (\w+) = '(.+)',$", options, re.MULTILINE)
    assert len(names) > 8
    assert len(keys) == 7
    assert [name for name in names if f"*kvq-{name}*" not in text] == []
    for action, key in keys:
        line = rf"{re.escape(key.replace(chr(92) * 2, chr(92)))}\s+<Plug>\(kvq-{action}\)"
        assert re.search(line, text), action


@pytest.mark.slow
def test_the_embedded_model_completes(start: Callable[..., Editor]) -> None:
    command = f"cmd = {{ '{sys.executable}', '-m', 'kvq_apps.cli', 'lsp', '--threads', '1' }}"
    editor = start(command)
    editor.write("import os\n\n\ndef read(path):\n", "Go    with open(")
    editor.until(VISIBLE, True)
    editor.keys("<Tab>")
    editor.until("#vim.fn.getline('.') > #'    with open('", True)


CALLS = "def f(name):\n    return name\n\n\nf(name=1)\nf(name=2)\n"
EDITS = "require('kvq').next_edit_visible()"


def _rename(editor: Editor) -> None:
    """Gives the parameter of `CALLS` another name, once the server follows what is typed."""
    editor.write("", "igre")
    editor.until(VISIBLE, True)
    editor.write(CALLS, "0fncwtitle")


def _seen(editor: Editor) -> None:
    """Waits until the next edits are shown, and for as long as a person must see them."""
    editor.until(EDITS, True)
    editor.lua("vim.wait(60)")


def test_the_next_edits_are_shown_jumped_to_and_taken(editor: Editor) -> None:
    _rename(editor)
    _seen(editor)
    new = "vim.tbl_map(function(mark) return mark[4].virt_lines and mark[4].virt_lines[1][1][1] "
    marks = (
        "vim.api.nvim_buf_get_extmarks(0, vim.api.nvim_get_namespaces()['kvq-edits'], 0, -1, "
        "{ details = true })"
    )
    shown = editor.lua(f"return {new} or '' end, {marks})")
    assert list(filter(None, shown)) == ["    return title", "f(title=1)", "f(title=2)"]
    assert editor.lines() == [line.replace("f(name)", "f(title)") for line in CALLS.splitlines()]
    # In Insert mode as in Normal mode: Tab goes there, Tab again takes it, and the others stay.
    editor.keys("<Tab>")
    editor.until("vim.fn.line('.')", 2)
    editor.keys("<Tab>")
    editor.until("vim.fn.getline(2)", "    return title")
    editor.keys("<Esc><Tab>")
    editor.until("vim.fn.line('.')", 5)
    editor.lua("vim.wait(60)")
    editor.keys("<Tab>")
    editor.until("vim.fn.getline(5)", "f(title=1)")
    assert editor.lua("return vim.fn.getline(6)") == "f(name=2)"
    editor.until(EDITS, True)
    editor.keys("u")
    editor.until("vim.fn.getline(5)", "f(name=1)")


def test_behind_an_edit_that_was_taken_the_key_goes_on(editor: Editor) -> None:
    _rename(editor)
    editor.write("def f(name):\n    name gre\n    name gre\n", "0fncwtitle")
    _seen(editor)
    editor.keys("<Tab>")
    editor.until("vim.fn.line('.')", 2)
    editor.keys("<Tab>")
    editor.until("vim.fn.getline(2)", "    title gre")
    # A suggestion is shown there, too; a second Tab must not take it by accident.
    editor.until(VISIBLE, True)
    editor.keys("<Tab>")
    editor.until("vim.fn.line('.')", 3)
    assert editor.lines()[1:] == ["    title gre", "    name gre"]


def test_next_edits_go_with_the_next_key_and_can_be_switched_off(
    start: Callable[..., Editor],
) -> None:
    editor = start(COMMAND)
    _rename(editor)
    editor.until(EDITS, True)
    editor.keys("x")
    assert editor.lua(f"return {EDITS}") is False
    editor.until(EDITS, True)
    editor.keys("<C-]>")
    editor.until(EDITS, False)
    # Without one, the key does what it did before.
    editor.keys("<Tab>")
    editor.until("vim.fn.getline(1)", "def f(titlex[tab]):")
    off = start(f"{COMMAND}, next_edits = 'off'")
    _rename(off)
    off.lua("vim.wait(800)")
    assert off.lua(f"return {EDITS}") is False
    with pytest.raises(AssertionError, match="next_edits is 'off', 'likely' or 'always'"):
        off.lua("require('kvq').setup({ next_edits = 'on' })")
