"""The language server over real pipes: what requests are answered with, and when nobody asks.

`test_protocol` says which check of an editor's server is tested where.
"""

import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from kvq_apps.completion.completion_engine import CompletionEngine
from kvq_apps.completion.document import NamedText, TextDocument
from kvq_apps.completion.suggestions import Completion
from kvq_apps.names.engine import Engine
from kvq_lab.typing_sessions import PROGRAM
from kvq_specdraft import writer_named
from language_client import (
    PATIENCE_S,
    URI,
    GatedCompleter,
    ProcessClient,
    ThreadClient,
    at,
    texts,
)

COMPLETE = "textDocument/inlineCompletion"


@pytest.mark.parametrize(
    ("encoding", "column"), [("utf-8", 9), ("utf-16", 6), ("utf-32", 5), (None, 6)]
)
def test_positions_are_counted_as_the_client_counts(
    encoding: str | None, column: int, editor: ThreadClient, completer: GatedCompleter
) -> None:
    """LSP-14 in all three units; edits are counted in `test_document` (LSP-5)."""
    general = {"positionEncodings": [encoding]} if encoding else {}
    editor.start("x\n\u00e9 \U0001f44b ab(c)\n", capabilities={"general": general})
    (item, _) = editor.ready(1, column)["result"]["items"]
    assert completer.calls[-1][1] == (1, 5)
    # The word that ends at the cursor is replaced by itself and what goes on from it.
    assert item["insertText"] == "a<\u00e9 \U0001f44b a>"
    assert item["range"] == {
        "start": {"line": 1, "character": column - 1}, "end": {"line": 1, "character": column}
    }  # fmt: skip


def test_drafts_stay_until_the_next_edit(editor: ThreadClient, completer: GatedCompleter) -> None:
    """LSP-12, LSP-14: asked automatically, then by a key, the list is the same."""
    editor.start("one\n  two\n")
    first = editor.ready(1, 2)
    # The line is blank before the cursor: its indentation is replaced with it.
    assert texts(first) == ["  <  >", "  second 1"]
    assert first["result"]["items"][0]["range"]["start"] == {"line": 1, "character": 0}
    invoked = editor.ask(COMPLETE, at(1, 2, kind=1))
    assert invoked["result"] == first["result"]
    assert len(completer.calls) == 1
    editor.change(2, 0, 0, 3, "1")
    assert texts(editor.complete(1, 2)) == ["  <  >", "  second 2"]
    assert completer.calls[-1][0] == "1\n  two\n"
    assert [draft["text"] for draft in editor.command("explain", URI)["drafts"]] == [
        "<  >",
        "second 2",
    ]


@pytest.mark.parametrize(
    ("text", "chosen"), [("a.pri b\n", "print"), ("a.pri b\n", "x"), ("a.pri b\n", "p\n  q")]
)
def test_what_the_editors_list_has_chosen_is_gone_on_from(
    text: str, chosen: str, editor: ThreadClient, completer: GatedCompleter
) -> None:
    """LSP-14: each item is the choice and what follows it, in the range of the choice."""
    editor.start(text)
    plain = editor.ready(0, 5)["result"]
    places = {"start": {"line": 0, "character": 2}, "end": {"line": 0, "character": 5}}
    params = at(0, 5, selectedCompletionInfo={"range": places, "text": chosen})
    items = editor.ask(COMPLETE, params)["result"]["items"]
    before = ("a." + chosen).rpartition("\n")[2]
    assert completer.calls[-1] == (f"a.{chosen} b\n", (chosen.count("\n"), len(before)))
    assert [item["insertText"] for item in items] == [f"{chosen}<{before}>", f"{chosen}second 2"]
    assert all(item["range"] == places for item in items)
    # The document itself, and its list, are what they were.
    assert editor.complete(0, 5)["result"] == plain
    wrong = at(0, 5, selectedCompletionInfo={"text": "x"})
    assert editor.ask(COMPLETE, wrong)["error"]["code"] == -32602


def test_the_newest_request_wins_and_each_gets_one_answer(
    editor: ThreadClient, completer: GatedCompleter
) -> None:
    """LSP-11: superseded and cancelled in a pass, cancelled after its answer."""
    editor.start("a\n")
    editor.ready(0, 0)
    completer.begun.acquire()
    completer.gate.clear()
    editor.change(2, 0, 0, 0, "b")
    editor.send(COMPLETE, at(0, 1), 101)
    assert completer.begun.acquire(timeout=PATIENCE_S)
    editor.change(3, 0, 1, 1, "c")
    editor.send(COMPLETE, at(0, 2), 102)
    superseded = editor.read()
    assert (superseded["id"], superseded["result"]) == (101, None)
    assert completer.begun.acquire(timeout=PATIENCE_S)
    editor.send("$/cancelRequest", {"id": 102})
    cancelled = editor.read()
    assert (cancelled["id"], cancelled["error"]["code"]) == (102, -32800)
    editor.send("$/cancelRequest", {"id": 102})
    editor.send("$/cancelRequest", {"id": 999})
    completer.gate.set()
    assert texts(editor.complete(0, 2))[0] == "bc<bc>"


class OneStep(GatedCompleter):
    """Does not hear of a cancel before its step is over."""

    def complete(
        self, document: TextDocument, place: tuple[int, int], **options: Any
    ) -> Completion:
        return super().complete(document, place, **options | {"cancel": lambda: False})


def test_of_rapid_requests_the_newest_alone_is_completed() -> None:
    """LSP-10, LSP-11: 200 edits, each with a request, and a cancel before its request begins."""
    completer = OneStep()
    with closing(ThreadClient(lambda: completer)) as client:
        client.start("\n")
        client.ready(0, 0)
        completer.begun.acquire()
        completer.gate.clear()
        for number in range(200):
            client.change(number + 2, 0, number, number, "x")
            client.send(COMPLETE, at(0, number + 1), number)
            if number == 0:
                assert completer.begun.acquire(timeout=PATIENCE_S)
        client.send("$/cancelRequest", {"id": 150})
        # Whatever was sent before is taken once this is answered.
        client.send("workspace/executeCommand", {"command": "kvq.explain"}, "taken")
        answers = [client.read()]
        completer.gate.set()
        answers += [client.read() for _ in range(200)]
        assert [answer["id"] for answer in answers] == ["taken", *range(200)]
        assert answers[151]["error"]["code"] == -32800
        assert [answer["id"] for answer in answers[1:] if answer.get("result")] == [199]
        assert texts(answers[-1])[0] == "x" * 200 + "<" + "x" * 200 + ">"
        # One step that was superseded, and the newest.
        assert [text for text, _ in completer.calls[1:]] == ["x\n", "x" * 200 + "\n"]


def test_what_fails_is_logged_and_nothing_is_shown(
    editor: ThreadClient, completer: GatedCompleter
) -> None:
    editor.start("a\n")
    editor.ready(0, 1)
    completer.fails = True
    editor.change(2, 0, 0, 0, "b")
    assert editor.complete(0, 1)["result"] is None
    assert any("the engine broke" in line for line in editor.log)
    completer.fails = False
    assert texts(editor.complete(0, 1))[0] == "b<b>"
    assert editor.command("toggle") is False
    assert editor.complete(0, 0)["result"] is None
    assert editor.why_not() == "completion is switched off"


def gated(completer: GatedCompleter, loads: threading.Event) -> Callable[[], GatedCompleter]:
    """What loads the completer once `loads` is set."""

    def load() -> GatedCompleter:
        assert loads.wait(PATIENCE_S)
        return completer

    return load


def test_while_the_model_loads_the_answer_is_nothing(completer: GatedCompleter) -> None:
    """LSP-18."""
    loads = threading.Event()
    with closing(ThreadClient(gated(completer, loads))) as client:
        client.start("a\n")
        assert client.complete(0, 1)["result"] is None
        assert client.why_not() == "the model is loading"
        loads.set()
        assert texts(client.ready(0, 1))[0] == "a<a>"


def test_a_model_that_cannot_be_loaded_is_no_model_that_loads() -> None:
    def load() -> GatedCompleter:
        raise OSError("no such bundle")

    with closing(ThreadClient(load)) as client:
        client.ask("initialize", {"capabilities": {"window": {"workDoneProgress": True}}})
        client.open("a\n")
        reason, expected = "", "there is no model: no such bundle"
        for _ in range(100_000):
            assert client.complete(0, 1)["result"] is None
            if (reason := client.why_not()) == expected:
                break
        assert reason == expected
        # Nor one whose loading would be shown for ever.
        client.send("initialized", {})
        assert client.why_not() == expected


@pytest.mark.slow
def test_the_command_completes_with_the_embedded_model(tmp_path: Path) -> None:
    client = ProcessClient(tmp_path, "--threads", "1", "--drafts", "2")
    client.start("import os\n\ndef read(path):\n    with open(\n")
    result = None
    while result is None:
        time.sleep(0.02)
        result = client.complete(3, 14)["result"]
    assert 1 <= len(result["items"]) <= 2
    assert all(item["insertText"].strip() for item in result["items"])
    assert client.close() == 1  # the editor went without a word


def started(completer: GatedCompleter, text: str, **options: Any) -> ThreadClient:
    """An editor whose document is open; `options` goes into `initialize`."""
    client = ThreadClient(lambda: completer)
    client.start(text, **options)
    return client


def test_typing_a_draft_asks_no_engine(editor: ThreadClient, completer: GatedCompleter) -> None:
    """LSP-13."""
    editor.start("ab\nrest\n")
    assert texts(editor.ready(0, 2)) == ["ab<ab>", "absecond 1"]
    calls = len(completer.calls)
    editor.change(2, 0, 2, 2, "<a")
    assert texts(editor.complete(0, 4)) == ["ab>"]
    editor.change(3, 0, 4, 4, "b")
    assert texts(editor.complete(0, 5)) == ["ab>"]
    editor.change(4, 0, 4, 5, "")  # and back
    assert texts(editor.complete(0, 4)) == ["ab>"]
    assert len(completer.calls) == calls
    editor.change(5, 0, 4, 4, "X")
    assert texts(editor.complete(0, 5))[0] == "aX<ab<aX>"
    assert len(completer.calls) == calls + 1
    # A change of another line makes drafts of another text.
    editor.change(6, 1, 0, 0, "y")
    editor.change(7, 0, 5, 5, "<")
    editor.complete(0, 6)
    assert len(completer.calls) == calls + 2


def test_editors_without_inline_completion_may_ask_for_a_list(completer: GatedCompleter) -> None:
    client = started(completer, "ab\n", initializationOptions={"fallbackCompletion": True})
    answer = None
    while answer is None:
        answer = client.ask("textDocument/completion", at(0, 2))["result"]
    first = answer["items"][0]
    assert first["textEdit"]["newText"] == "ab<ab>"
    assert first["textEdit"]["range"]["start"] == {"line": 0, "character": 0}
    assert answer["isIncomplete"] is True
    client.close()
    plain = started(completer, "ab\n")
    assert plain.ask("textDocument/completion", at(0, 2))["error"]["code"] == -32601
    plain.close()


# The first draft is "<ab>": of these steps "<ab" is likely, and the rest is not.
STEPS = ((1, -0.1), (3, -0.2), (4, -9.0), (9, -9.5))


@pytest.mark.parametrize(
    ("setting", "kind", "shown"),
    [
        (None, 2, ["<ab"]),
        ("likely", 2, ["<ab"]),
        ("likely", 1, ["<ab>", "second 1"]),
        ("always", 2, ["<ab>", "second 1"]),
        ("sometimes", 2, ["<ab"]),  # not possible: stays
    ],
)
def test_who_did_not_ask_is_shown_what_is_likely(
    setting: str | None, kind: int, shown: list[str], completer: GatedCompleter
) -> None:
    completer.steps = STEPS
    options = {} if setting is None else {"completion": setting}
    client = started(completer, "ab\n", initializationOptions=options)
    first = client.ask(COMPLETE, at(0, 2, kind))
    assert [text.removeprefix("ab") for text in texts(first)] == shown
    # The same again is known, whole, to whoever asks for it.
    again = client.ask(COMPLETE, at(0, 2, 1))
    assert [text.removeprefix("ab") for text in texts(again)] == ["<ab>", "second 1"]
    assert len(completer.calls) == 1
    client.close()


def test_nothing_is_shown_while_typing_if_that_is_off(completer: GatedCompleter) -> None:
    client = started(completer, "ab\n", initializationOptions={"completion": "off"})
    assert client.ask(COMPLETE, at(0, 2))["result"] is None
    assert not completer.calls
    assert client.command("explain", URI)["whyNot"] == "completions are shown on request only"
    assert texts(client.ask(COMPLETE, at(0, 2, 1)))
    client.close()


def test_what_is_unlikely_is_shown_when_somebody_asks(completer: GatedCompleter) -> None:
    completer.steps = ((9, -9.0),)
    client = started(completer, "ab\n")
    assert client.ask(COMPLETE, at(0, 2))["result"] is None
    assert client.why_not() == "unlikely"
    assert texts(client.ask(COMPLETE, at(0, 2, 1))) == ["ab<ab>", "absecond 1"]
    client.close()


def test_settings_are_pulled_and_a_bad_one_stays_as_it_was(completer: GatedCompleter) -> None:
    """LSP-21."""
    pulls = {"workspace": {"configuration": True}}
    client = started(completer, "ab\n", capabilities=pulls)

    def answer_pull(value: object) -> None:
        request = client.read()
        assert request["method"] == "workspace/configuration"
        assert request["params"] == {"items": [{"section": "kvq"}]}
        client.send_message({"id": request["id"], "result": [value]})

    answer_pull({"drafts": 1})
    assert len(texts(client.ready(0, 2))) == 1
    client.send("workspace/didChangeConfiguration", {"settings": {"kvq": {"drafts": 2}}})
    answer_pull(None)
    assert len(texts(client.complete(0, 2))) == 2
    client.send("workspace/didChangeConfiguration", {"settings": {"kvq": {"drafts": "x"}}})
    answer_pull({"ignore": ["*.py"]})
    assert client.complete(0, 2)["result"] is None
    assert client.why_not() == "this file is ignored"
    assert [line for line in client.log if "drafts" in line] == [
        "drafts = 'x' is not possible and stays 2"
    ]
    client.close()


@pytest.mark.parametrize(
    ("uri", "text", "says"),
    [
        ("file:///home/me/.env", "KEY=1\n", "this file is ignored"),
        ("file:///home/me/server.pem", "x\n", "this file is ignored"),
        ("git:/a.py?ref", "x\n", "git: documents are left alone"),
        ("file:///a.bin", "x\0y\n", "the document is no text"),
        ("file:///a.py", "x" * 1_000_000, "the line is too long"),
    ],
)
def test_odd_files_are_left_alone_with_a_reason(
    uri: str, text: str, says: str, completer: GatedCompleter
) -> None:
    """LSP-16."""
    client = started(completer, "a\n")
    client.ready(0, 1)
    calls = len(completer.calls)
    client.open(text, uri)
    assert client.ask(COMPLETE, at(0, 1, uri=uri))["result"] is None
    assert client.why_not(uri) == says
    assert len(completer.calls) == calls
    client.close()


def test_parts_of_other_open_files_are_read_first(completer: GatedCompleter) -> None:
    total = "def total(invoice):\n    return invoice.amount\n"
    with closing(ThreadClient(lambda: completer)) as client:
        client.start("invoice.amount + invoice.\n" + "\n" * 40)
        client.ready(0, 0)
        assert completer.other_parts[-1] == ()
        client.open(total, "file:///project/bills.py")
        client.open(total, "file:///project/.env")
        client.open("nothing = alike\n", "file:///project/other.py")
        client.complete(0, 25)
        assert completer.other_parts[-1] == (("project/bills.py", total),)
        # They stay while somebody types near one place, and go with their file.
        client.change(2, 0, 0, 25, "")
        client.complete(9, 0)
        assert completer.other_parts[-1] == (("project/bills.py", total),)
        client.complete(30, 0)
        assert completer.other_parts[-1] == ()
        client.change(3, 0, 0, 0, "total(invoice.amount)")
        client.complete(0, 3)
        assert completer.other_parts[-1] == (("project/bills.py", total),)
        client.open(f"# bills\n{total}", "file:///project/bills.py")
        client.complete(0, 2)
        assert completer.other_parts[-1] == (("project/bills.py", f"# bills\n{total}"),)
        client.send("workspace/didChangeConfiguration", {"settings": {"otherFiles": False}})
        client.complete(1, 0)
        assert completer.other_parts[-1] == ()


def test_a_long_file_is_completed_like_any_other(completer: GatedCompleter) -> None:
    """LSP-16: 10 MB, held in less than three times that."""
    line = "    a line of a program, as long as most are\n"
    text = line * (10_000_000 // len(line))
    tracemalloc.start()
    document = TextDocument(text)
    peak_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert document.num_lines == text.count("\n") + 1
    assert peak_bytes < 3 * len(text)
    with closing(ThreadClient(lambda: completer)) as client:
        client.start(text)
        assert texts(client.ready(100_000, 4))[0] == "    <    >"


def test_loading_is_progress_that_ends(completer: GatedCompleter) -> None:
    """LSP-18."""
    loads = threading.Event()
    client = ThreadClient(gated(completer, loads))
    client.ask("initialize", {"capabilities": {"window": {"workDoneProgress": True}}})
    client.send("initialized", {})
    create = client.read()
    assert create["method"] == "window/workDoneProgress/create"
    client.send_message({"id": create["id"], "result": None})
    begin = client.read()
    assert begin["params"]["value"]["kind"] == "begin"
    loads.set()
    assert client.read()["params"] == {"token": "kvq-loading", "value": {"kind": "end"}}
    client.close()


def test_a_reader_that_does_not_read_stops_nobody(completer: GatedCompleter) -> None:
    """LSP-17: far more than a pipe holds is answered, and the changes are all taken.

    An answer waits for each request and nothing else does; of one that is superseded, it is null.
    """
    with closing(started(completer, "a\n")) as client:
        client.ready(0, 1)
        for number in range(3000):
            client.change(number + 2, 0, 0, 0, "b")
            client.send(
                "workspace/executeCommand", {"command": "kvq.explain", "arguments": [URI]}, 7
            )
        client.send(COMPLETE, at(0, 3001), 8)
        answers = [client.read() for _ in range(3001)]
        assert [answer["id"] for answer in answers] == [7] * 3000 + [8]
        assert texts(answers[-1])[0].startswith("b" * 3000 + "a<")


def test_a_file_renamed_or_open_twice_is_another_document(completer: GatedCompleter) -> None:
    """LSP-20, LSP-22: documents are apart; what is cached is found by its tokens, not its name."""
    with closing(started(completer, "a\n")) as client:
        client.ready(0, 1)
        client.send("textDocument/didClose", {"textDocument": {"uri": URI}})
        assert client.complete(0, 1)["result"] is None
        client.open("a\n", "file:///b.py")
        client.open("zz\n")
        assert texts(client.ask(COMPLETE, at(0, 1, uri="file:///b.py")))[0] == "a<a>"
        assert texts(client.complete(0, 2))[0] == "zz<zz>"


PIECES = 3


class IdleReader(GatedCompleter):
    """Has `PIECES` to read of what it expects; each is begun when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = threading.Semaphore(0)
        self.waits, self.cancelled = threading.Semaphore(0), threading.Event()

    def read(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        other_parts: Sequence[NamedText] = (),
        cancel: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> bool:
        super().read(document, place, other_parts=other_parts, cancel=cancel, progress=progress)
        for left in range(PIECES, 0, -1):
            progress(PIECES - left, PIECES)
            self.waits.release()
            while not self.pieces.acquire(timeout=0.005):
                if cancel():
                    self.cancelled.set()
                    return False
        return True


def read_next(reader: IdleReader) -> tuple[str, tuple[int, int]]:
    """What the reader is told to expect; it waits for its first piece, and does not get it."""
    assert reader.waits.acquire(timeout=PATIENCE_S)
    return reader.expected[-1]


def test_idle_time_reads_where_somebody_is_until_something_comes() -> None:
    """From didOpen on; the newest document, unless the editor tells where somebody is."""
    reader = IdleReader()
    with closing(ThreadClient(lambda: reader)) as client:
        client.start("first\n")
        assert read_next(reader) == ("first\n", (0, 0))
        client.open("second\nrow\n", "file:///b.py")
        assert read_next(reader) == ("second\nrow\n", (0, 0))
        assert reader.cancelled.wait(PATIENCE_S)
        client.change(2, 0, 5, 5, "s")
        assert read_next(reader) == ("firsts\n", (0, 5))
        # Secrets are read by nobody, and what somebody only looks into is not read either.
        client.open("KEY=1\n", "file:///.env")
        focus = {"textDocument": {"uri": "file:///b.py"}, "position": {"line": 1, "character": 2}}
        client.send("textDocument/didFocus", focus)
        assert read_next(reader) == ("second\nrow\n", (1, 2))
        client.open("peek\n", "file:///c.py")
        assert texts(client.ask(COMPLETE, at(1, 3, uri="file:///b.py")))[0] == "row<row>"
        assert read_next(reader) == ("second\nrow\n", (1, 3))
        for _ in range(PIECES):
            reader.pieces.release()
        client.send("textDocument/didClose", {"textDocument": {"uri": "file:///b.py"}})
        client.ask(COMPLETE, at(0, 0))
    assert {text for text, _ in reader.expected} == {"first\n", "firsts\n", "second\nrow\n"}


def reading_of(client: ThreadClient) -> list[dict[str, Any]]:
    """What is shown of a document's reading, from its beginning to its end."""
    values = list[dict[str, Any]]()
    while not values or values[-1]["kind"] != "end":
        message = client.read()
        if message["method"] == "window/workDoneProgress/create":
            client.send_message({"id": message["id"], "result": None})
        elif message["params"]["token"].startswith("kvq-reading"):
            values.append(message["params"]["value"])
    return values


@pytest.mark.parametrize("exact", [False, True])
def test_a_document_is_read_before_anybody_asks(
    exact: bool,
) -> None:
    """Real passes: the first completion encodes what it is asked at, and the file was read."""
    text, shown = PROGRAM.read_text("utf-8")[:4000], threading.Event()
    with Engine.open("nano", threads=1) as engine:
        completer = CompletionEngine(
            engine, writer_named("branches"), exact=exact, chunk_tokens=16,
            session_options={"kv": "fp", "context_tokens": 2048},
        )  # fmt: skip
        whole = len(engine.tokenizer.encode(text))
        load = gated(cast(GatedCompleter, completer), shown)
        with closing(ThreadClient(load)) as client:
            client.start(text, capabilities={"window": {"workDoneProgress": True}})
            cursor = {"textDocument": {"uri": URI}, "position": {"line": 60, "character": 0}}
            client.send("textDocument/didFocus", cursor)
            shown.set()
            begun, *reports, ended = reading_of(client)
            assert (begun["title"], ended) == ("kvq: reading the document", {"kind": "end"})
            shares = [report["percentage"] for report in reports]
            assert shares == sorted(shares)
            assert len(shares) > 3
            client.complete(60, 0)
            report = client.command("explain", URI)
            assert report["encodedTokens"] <= 1
            assert report["reusedTokens"] > 0.9 * whole > 500
