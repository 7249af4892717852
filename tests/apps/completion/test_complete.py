"""Completions of a file that is being edited, and `kvq complete`."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import numpy as np
import pytest

from kvq.errors import BackendError, UsageError
from kvq_apps.bench.typing_sessions import PROGRAM
from kvq_apps.cli import main
from kvq_apps.completion.document import Document, Position
from kvq_apps.completion.engine import CompletionEngine
from kvq_apps.completion.served import ServedCompletions
from kvq_apps.engine import Engine
from kvq_runtime.session import Session
from kvq_specdraft import writer_named

TEXT = """import os


def read_lines(path):
    with open(path) as file:
        return file.readlines()


def count_words(path):
    total = 0
    for line in read_lines(path):
        total +=
    return total
"""
PLACE = (11, 16)


@pytest.fixture(scope="module")
def engine() -> Engine:
    with Engine.open(threads=1) as opened:
        yield opened


def completions(engine: Engine, **settings: bool) -> CompletionEngine:
    options = {"kv": "fp", "context_tokens": 1024}
    return CompletionEngine(engine, writer_named("branches"), session_options=options, **settings)


def test_a_key_costs_its_own_tokens(engine: Engine) -> None:
    own, document = completions(engine), Document(TEXT)
    first = own.complete(document, PLACE)
    assert (first.reused_tokens, first.why_not) == (0, None)
    assert len(first.drafts) >= 1
    prompt = first.encoded_tokens
    # Typing moves the cursor's place in the prompt with it.
    document.replace(Position(*PLACE), Position(*PLACE), " len")
    typed = own.complete(document, (11, 20))
    assert 0 < typed.encoded_tokens <= 8
    assert typed.reused_tokens >= prompt - 4
    # The same place again: nothing but the last token.
    again = own.complete(document, (11, 20))
    assert again.encoded_tokens <= 1
    assert [one.text for one in again.drafts] == [one.text for one in typed.drafts]
    # An edit elsewhere is not the file once more.
    document.replace(Position(9, 4), Position(9, 9), "count")
    assert own.complete(document, (11, 20)).encoded_tokens <= 16
    own.close()


def test_a_jump_costs_the_lines_between(engine: Engine) -> None:
    """However the model orders the two texts, what a jump does not pass over stays cached."""
    own, text = completions(engine), PROGRAM.read_text("utf-8")
    document = Document(text[: text.index("\n", 3000) + 1])
    first = own.complete(document, (60, 0))
    passed = 0
    for line in (70, 40, 44):
        found = own.complete(document, (line, 0))
        lines = range(*sorted((line, passed or 60)))
        passed = line
        between = sum(len(engine.tokenizer.encode(document.line(one))) + 1 for one in lines)
        assert found.encoded_tokens <= between + 16 < first.encoded_tokens / 2
    own.close()


def test_exactly_what_a_fresh_session_says(engine: Engine) -> None:
    own, document = completions(engine, exact=True), Document(TEXT)
    own.complete(document, PLACE)
    document.replace(Position(9, 4), Position(9, 9), "count")
    found = own.complete(document, PLACE)
    fresh = completions(engine).complete(document, PLACE)
    assert [one.text for one in found.drafts] == [one.text for one in fresh.drafts]
    for one, other in zip(found.drafts, fresh.drafts, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    own.close()


def test_typing_behind_a_frozen_file_is_exact(engine: Engine) -> None:
    """EFIM: what is cached never precedes a change, token for token a fresh prefill (LSP-23)."""
    own, document = completions(engine, exact=True), Document(TEXT)
    own.complete(document, PLACE)
    column = PLACE[1]
    for key in " len(li":
        document.replace(Position(11, column), Position(11, column), key)
        column += 1
        found = own.complete(document, (11, column))
        assert found.encoded_tokens <= 3
        held = own._session
        assert held.stats().stale_tokens == 0
        with engine.session(kv="fp", context_tokens=1024) as fresh:
            fresh.prefill(held.tokens)
            np.testing.assert_allclose(logits(fresh), logits(held), atol=2e-3)
    # Taking letters back goes on from there; an edit elsewhere begins anew.
    document.replace(Position(11, column - 1), Position(11, column), "")
    assert own.complete(document, (11, column - 1)).encoded_tokens <= 2
    document.replace(Position(9, 4), Position(9, 9), "count")
    assert own.complete(document, (11, column - 1)).encoded_tokens > 8
    own.close()


def logits(session: Session) -> np.ndarray:
    with session.sequence.forward([], rows=[-1]) as held:
        return held.logits[0]


class Infill(BaseHTTPRequestHandler):
    """`POST /infill` as `kvq serve` answers it; hangs up in the middle when told to."""

    asked: ClassVar[list[dict[str, Any]]] = []
    waits: ClassVar[Event] = Event()
    dies = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.waits.wait(60)
        if type(self).dies:
            self.connection.close()
            return
        answer = {"content": "path)\n", "x_kvq": {"prompt_tokens": 90, "cached_tokens": 88}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_running_server_completes_and_may_die_in_the_middle() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Infill)
    Thread(target=server.serve_forever, daemon=True).start()
    served = ServedCompletions(f"http://127.0.0.1:{server.server_port}", tokens=9)
    document = Document("def f(path):\n    open(\n")
    Infill.waits.set()
    found = served.complete(document, (1, 9), cancel=lambda: False)
    assert [one.text for one in found.drafts] == ["path)"]
    assert (found.reused_tokens, found.encoded_tokens, found.why_not) == (88, 2, None)
    asked = Infill.asked[-1]
    assert (asked["input_prefix"], asked["input_suffix"]) == ("def f(path):\n    open(", "\n")
    Infill.waits.clear()
    assert served.complete(document, (1, 9), cancel=lambda: True).why_not == "cancelled"
    Infill.dies = True
    Infill.waits.set()
    with pytest.raises(BackendError, match="does not answer"):
        served.complete(document, (1, 9), cancel=lambda: False)
    Infill.dies = False  # and it is there again
    assert served.complete(document, (1, 9), cancel=lambda: False).drafts
    server.shutdown()
    server.server_close()
    with pytest.raises(BackendError, match="does not answer"):
        served.complete(document, (1, 9), cancel=lambda: False)
    with pytest.raises(UsageError, match="give http://HOST:PORT"):
        ServedCompletions("ftp://x")


def test_a_cancelled_request_leaves_the_next_one_right(engine: Engine) -> None:
    own, document = completions(engine), Document(TEXT)
    cut = own.complete(document, PLACE, cancel=lambda: True)
    assert (cut.drafts, cut.why_not) == ((), "cancelled")
    found = own.complete(document, PLACE)
    fresh = completions(engine).complete(document, PLACE)
    assert [one.text for one in found.drafts] == [one.text for one in fresh.drafts]
    own.close()


def test_the_command_prints_what_an_editor_shows(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a b.py"
    file.write_text(TEXT)
    assert main(["complete", f"{file}:12:17", "--json", "--kv", "fp"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = completions(engine).complete(Document(TEXT), PLACE)
    assert [one["text"] for one in report["drafts"]] == [one.text for one in found.drafts]
    assert report["encoded_tokens"] == found.encoded_tokens
    assert main(["complete", f"{file}:12", "--kv", "fp", "--drafts", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines in ([report["drafts"][0]["text"]], [])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("{file}",), "is no place"),
        (("{file}:0",), "counted from 1"),
        (("{file}:99",), "14 lines; there is no line 99"),
        (("/nowhere.py:1",), "cannot be read"),
        (("a", "b", "{file}:1"), "one model and one place"),
        (("{file}:1", "--drafts", "1,2"), "one number of --drafts"),
    ],
)
def test_wrong_places_are_refused(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text(TEXT)
    assert main(["complete", *(word.format(file=file) for word in words)]) == 2
    assert says in capsys.readouterr().err
