"""`textDocument/copilotInlineEdit`: the next edit, with a completer that is told what to say."""

import time
from typing import Any

import pytest

from kvq_apps.completion.document import LineChange
from kvq_apps.completion.edit_history import LIKELY_EDIT, LIKELY_LINES, NextEdit
from kvq_apps.lsp.documents import WORD_S
from language_client import URI, GatedCompleter, ThreadClient, at

METHOD = "textDocument/copilotInlineEdit"
TEXT = "def f(name):\n    return name\n\n\nf(name=1)\n"
CALL = LineChange(4, ("f(name=1)\n",), ("f(title=1)\n",))
RANGE = {"start": {"line": 4, "character": 0}, "end": {"line": 4, "character": 9}}


def rename(editor: ThreadClient, **settings: Any) -> None:
    """Opens the text and gives the parameter another name."""
    editor.start(TEXT, initializationOptions={"nextEditDelay": 0, **settings})
    editor.ready(3, 0)
    editor.change(2, 0, 6, 10, "title")


def asked_at(line: int, column: int, version: int = 2) -> dict[str, Any]:
    params = at(line, column)
    params["textDocument"]["version"] = version
    return params


def test_the_next_edit_has_its_range_and_the_history_its_hunk(
    editor: ThreadClient, completer: GatedCompleter
) -> None:
    rename(editor)
    completer.next_edits = [NextEdit(changes=(CALL,), logprob=-0.5)]
    answer = editor.ask(METHOD, asked_at(0, 11))
    document = {"uri": URI, "version": 2}
    assert answer["result"] == {
        "edits": [{"textDocument": document, "range": RANGE, "text": "f(title=1)"}]
    }
    (call,) = completer.edits
    assert call == ("auto", (0, 11), [("def f(name):\n", "def f(title):\n")])
    assert editor.command("explain", URI)["nextEdit"]["logprob"] == -0.5


@pytest.mark.parametrize(
    ("change", "text", "begin", "end"),
    [
        (LineChange(4, (), ("a\n", "\n")), "a\n\n", (4, 0), (4, 0)),
        (LineChange(3, ("\n", "f(name=1)\n"), ()), "", (3, 0), (5, 0)),
        (LineChange(1, ("    return name\n",), ("    x\n", "\n")), "    x\n", (1, 0), (1, 15)),
    ],
)
def test_lines_are_added_and_removed_whole(
    change: LineChange,
    text: str,
    begin: tuple[int, int],
    end: tuple[int, int],
    editor: ThreadClient,
    completer: GatedCompleter,
) -> None:
    rename(editor)
    completer.next_edits = [NextEdit(changes=(change,))]
    (edit,) = editor.ask(METHOD, asked_at(0, 11))["result"]["edits"]
    assert edit["text"] == text
    assert [tuple(edit["range"][side].values()) for side in ("start", "end")] == [begin, end]


@pytest.mark.parametrize(
    ("eagerness", "edit", "shown"),
    [
        ("likely", NextEdit(changes=(CALL,), logprob=LIKELY_EDIT), 1),
        ("likely", NextEdit(changes=(CALL,), logprob=LIKELY_EDIT - 0.1), 0),
        ("likely", NextEdit(changes=(LineChange(0, (), ("a\n",) * (LIKELY_LINES + 1)),)), 0),
        ("always", NextEdit(changes=(CALL,), logprob=LIKELY_EDIT - 0.1), 1),
        ("off", NextEdit(changes=(CALL,)), 0),
    ],
)
def test_eagerness_decides_what_is_shown(
    eagerness: str, edit: NextEdit, shown: int, editor: ThreadClient, completer: GatedCompleter
) -> None:
    rename(editor, nextEdit=eagerness)
    completer.next_edits = [edit]
    assert len(editor.ask(METHOD, asked_at(0, 11))["result"]["edits"]) == shown
    assert len(completer.edits) == (eagerness != "off")


def test_a_word_that_is_typed_and_the_delay_are_waited_for(
    editor: ThreadClient, completer: GatedCompleter
) -> None:
    rename(editor, nextEditDelay=100)
    completer.next_edits = [NextEdit()] * 3
    since = time.monotonic()
    editor.ask(METHOD, asked_at(0, 11))  # behind the new name
    assert time.monotonic() - since >= WORD_S - 0.1
    editor.change(3, 1, 0, 0, " ")
    since = time.monotonic()
    editor.ask(METHOD, asked_at(1, 0, 3))
    assert time.monotonic() - since >= 0.09
    # Another key supersedes the request, and no model is asked about an older text.
    editor.change(4, 1, 0, 0, " ")
    editor.send(METHOD, asked_at(1, 0, 4), 90)
    editor.change(5, 1, 0, 0, " ")
    assert editor.read() == {"jsonrpc": "2.0", "id": 90, "result": {"edits": []}}
    assert editor.ask(METHOD, asked_at(1, 0, 3))["result"] == {"edits": []}
    assert len(completer.edits) == 2


def test_a_completion_goes_first(editor: ThreadClient, completer: GatedCompleter) -> None:
    rename(editor)
    completer.next_edits = [NextEdit(changes=(CALL,))]
    time.sleep(WORD_S)
    completer.gate.clear()
    editor.send(METHOD, asked_at(0, 11), 90)
    while not completer.edits:
        time.sleep(0.01)
    editor.send("textDocument/inlineCompletion", at(1, 4), 91)
    while len(completer.calls) < 2:
        time.sleep(0.01)
    completer.gate.set()
    completion, edit = editor.read(), editor.read()
    assert (completion["id"], edit["id"]) == (91, 90)
    assert completion["result"]["items"]
    assert len(edit["result"]["edits"]) == 1
    assert len(completer.edits) == 2


def test_a_model_without_a_form_says_so_once(
    editor: ThreadClient, completer: GatedCompleter
) -> None:
    rename(editor)
    completer.next_edits = [NextEdit(why_not="no form", impossible=True)] * 2
    for _ in range(2):
        assert editor.ask(METHOD, asked_at(0, 11))["result"] == {"edits": []}
    assert [line for line in editor.log if "no form" in line] == ["no next edits: no form"]


def test_ignored_files_and_other_versions_have_none(
    editor: ThreadClient, completer: GatedCompleter
) -> None:
    rename(editor)
    assert editor.ask(METHOD, asked_at(0, 11, version=1))["result"] == {"edits": []}
    for ignored in (["*.py"], []):
        editor.send("workspace/didChangeConfiguration", {"settings": {"kvq": {"ignore": ignored}}})
        editor.change(3 + (not ignored), 3, 0, 0, "secret" if ignored else "x")
        completer.next_edits = [NextEdit()]
        version = 3 + (not ignored)
        assert editor.ask(METHOD, asked_at(0, 11, version))["result"] == {"edits": []}
    # What was changed while it was ignored is not in the history.
    ((_, _, edits),) = completer.edits
    assert edits == [("def f(name):\n", "def f(title):\n"), ("secret\n", "xsecret\n")]
