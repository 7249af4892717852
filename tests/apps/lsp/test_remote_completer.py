"""`kvq lsp --server`: drafts of a running server, which may die; over an address or a socket."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import pytest

from environment import environment_in
from kvq.errors import BackendError, UsageError
from kvq_apps.completion.completion_engine import CompletionEngine
from kvq_apps.completion.document import Position, TextDocument
from kvq_apps.completion.remote_completer import RemoteCompleter
from kvq_apps.names.engine import Engine
from kvq_apps.serve.protocol import PROTOCOL, PROTOCOL_HEADER
from kvq_lab.typing_sessions import PROGRAM
from kvq_specdraft import writer_named
from language_client import URI, ProcessClient, ThreadClient, at, texts
from serving import process
from shelf import Shelf

TEXT = "import os\n\n\ndef read(path):\n    with open(\n"


class Infill(BaseHTTPRequestHandler):
    """`POST /infill` as `kvq serve` answers it; hangs up in the middle when told to."""

    requests: ClassVar[list[dict[str, Any]]] = []
    waits: ClassVar[Event] = Event()
    dies = False
    protocol = PROTOCOL

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        self.waits.wait(60)
        if type(self).dies:
            self.connection.close()
            return
        answer_json = {
            "content": "path)\n",
            "x_kvq": {
                "prompt_tokens": 90, "cached_tokens": 88, "steps": [[4, -0.2], [6, -4.0]]
            },
        }  # fmt: skip
        # A server that does not make its answers distinct.
        answer = [answer_json] * body["n_cmpl"]
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header(PROTOCOL_HEADER, str(self.protocol))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_running_server_completes_and_may_die_in_the_middle() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Infill)
    Thread(target=server.serve_forever, daemon=True).start()
    served = RemoteCompleter(f"http://127.0.0.1:{server.server_port}", tokens=9)
    document = TextDocument("def f(path):\n    open(\n")
    Infill.waits.set()
    completion = served.complete(document, (1, 9), cancel=lambda: False)
    assert [draft.text for draft in completion.drafts] == ["path)"]
    assert completion.drafts[0].steps == ((4, -0.2), (6, -4.0))
    assert [draft.text for draft in completion.likely_part().drafts] == ["path"]
    assert (completion.reused_tokens, completion.encoded_tokens, completion.why_not) == (
        88,
        2,
        None,
    )
    request = Infill.requests[-1]
    assert (request["input_prefix"], request["input_suffix"]) == ("def f(path):\n    open(", "\n")
    assert (request["n_predict"], request["n_cmpl"]) == (9, 3)
    Infill.waits.clear()
    assert served.complete(document, (1, 9), cancel=lambda: True).why_not == "cancelled"
    Infill.dies = True
    Infill.waits.set()
    with pytest.raises(BackendError, match="does not answer"):
        served.complete(document, (1, 9), cancel=lambda: False)
    Infill.dies = False  # and it is there again
    assert served.complete(document, (1, 9), cancel=lambda: False).drafts
    Infill.protocol = PROTOCOL + 1
    with pytest.raises(BackendError, match="this kvq is older: upgrade kvq-runtime here"):
        served.complete(document, (1, 9), cancel=lambda: False)
    server.shutdown()
    server.server_close()
    with pytest.raises(BackendError, match="does not answer"):
        served.complete(document, (1, 9), cancel=lambda: False)


@pytest.mark.parametrize("address", ["ftp://x", "http://", "http://h:99999", "https://h:1", ""])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="give http://HOST:PORT or a socket's path"):
        RemoteCompleter(address)


@pytest.fixture(scope="module")
def addresses(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A real server of the embedded model: its address, and its socket."""
    home = tmp_path_factory.mktemp("serve")
    shelf.used_before(home / "cache", ["nano"])
    socket = str(home / "kvq.sock")
    words = "--socket", socket, "--sessions", "2", "--kv", "fp"
    with process("nano", environment_in(home), *words) as server:
        yield [server.address, socket]


@pytest.mark.slow
def test_a_server_writes_the_drafts_of_an_own_engine(addresses: list[str], shelf: Shelf) -> None:
    """SRV-18: the greedy one first, then those that begin with the next likeliest tokens."""
    document = TextDocument(TEXT)
    with Engine.open(shelf.embedded("nano"), threads=1) as engine:
        completer = CompletionEngine(
            engine, writer_named("branches"), session_options={"kv": "fp", "context_tokens": 1024}
        )
        local = completer.complete(document, (4, 14))
        completer.close()
    assert len(local.drafts) > 1
    for address in addresses:
        served = RemoteCompleter(address).complete(document, (4, 14), cancel=lambda: False)
        assert served.drafts[0].text == local.drafts[0].text
        ends, sums = zip(*served.drafts[0].steps, strict=True)
        assert ends == tuple(end for end, _ in local.drafts[0].steps)
        assert sums == pytest.approx([logprob for _, logprob in local.drafts[0].steps], abs=0.05)
        assert served.likely_part() == served.likely_part().likely_part()
        assert {draft.text for draft in served.drafts} == {draft.text for draft in local.drafts}


@pytest.mark.slow
def test_a_server_reads_before_anybody_asks(addresses: list[str]) -> None:
    """What is read is read once, and a server that is not there says nothing yet."""
    document = TextDocument(PROGRAM.read_text("utf-8")[4000:7000])
    for address in addresses:
        served = RemoteCompleter(address)
        for _ in range(2):
            assert served.read(document, (20, 4), cancel=lambda: False)
        completion = served.complete(document, (20, 4), cancel=lambda: False)
        assert completion.encoded_tokens <= 1
        assert completion.reused_tokens > 300
        document.replace(Position(0, 0), Position(0, 0), "x = 1\n")
    nobody = RemoteCompleter("http://127.0.0.1:9")
    assert nobody.read(document, (20, 4), cancel=lambda: False)


@pytest.mark.slow
def test_two_editors_of_one_server_keep_their_own_text(addresses: list[str]) -> None:
    """LSP-20: each has an arena, and a key of either is read alone."""
    whole = PROGRAM.read_text("utf-8")
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                closing(ThreadClient(lambda address=address: RemoteCompleter(address)))
            )
            for address in addresses
        ]
        for client, text in zip(clients, (whole[:2000], whole[2000:4000]), strict=True):
            client.start(text)
            client.ready(3, 0)
        for number in range(3):
            for client in clients:
                client.change(number + 2, 3, number, number, "x")
                client.complete(3, number + 1)
                assert client.command("explain", URI)["encodedTokens"] < 16


@pytest.mark.slow
def test_a_server_that_is_killed_comes_back(shelf: Shelf, tmp_path: Path) -> None:
    """LSP-19: nothing is shown, nothing lost; the next request finds the other server."""
    shelf.used_before(tmp_path / "cache", ["nano"])
    home, socket = environment_in(tmp_path), str(tmp_path / "kvq.sock")
    with closing(ProcessClient(tmp_path, "--server", socket, "--drafts", "2")) as client:
        client.start(TEXT)
        with process("nano", home, "--socket", socket) as first:
            before = texts(client.ready(4, 14))
            # No letter that a suggestion begins with: that would be answered without the server.
            client.change(2, 4, 14, 14, "q")
            # It takes the request, and dies before it answers.
            first.process.send_signal(signal.SIGSTOP)
            client.send("textDocument/inlineCompletion", at(4, 15), 99)
            first.process.kill()
            answer = client.read()
            assert (answer["id"], answer["result"]) == (99, None)
            assert "does not answer" in client.why_not()
        client.change(3, 4, 14, 15, "")
        client.change(4, 0, 0, 0, "x")
        assert client.complete(4, 14)["result"] is None
        assert "does not answer" in client.why_not()
        client.change(5, 0, 0, 1, "")
        with process("nano", home, "--socket", socket):
            assert texts(client.ready(4, 14)) == before
