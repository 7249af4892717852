"""A server for tests: in a thread of this process or a process of its own, and raw HTTP.

`rule_served` is a model made of a rule, with a gate: its forward passes can be counted and held
back, so that tests assert order and counts instead of times.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
from tokenizers import AddedToken

from chat_templates import TEMPLATES
from kvq.config import KvPlan
from kvq.errors import BackendError
from kvq_apps.completion.prompts import OwnedPrompts
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.hosted_app import HostedApp
from kvq_apps.serve.loading import DRAFT_TOKENS, ServedModel, serve_engine
from kvq_apps.serve.server import Server
from kvq_models.control import ControlTokens, FimTokens
from kvq_models.pieces import PieceIndex
from kvq_models.tokenizer import IncrementalDetokenizer, Tokenizer
from kvq_runtime.answer.generation import Vocabulary
from kvq_runtime.backends import SequencePass
from kvq_runtime.config import Sampling, SessionConfig
from kvq_runtime.engine import Engine
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.saving import SavedSessions
from kvq_runtime.serving.slots import Slot, Slots
from kvq_runtime.session.session import Session
from rule_backend import RuleBackend, RuleCache
from tiny import CHATML, byte_level_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PATIENCE_S = 300.0


def wait_until(holds: Callable[[], Any], condition: str = "") -> None:
    """Returns as soon as `holds` does; fails after a long time."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"waited in vain {condition}"
        time.sleep(0.002)


def leased(slots: Slots, ids: Sequence[int], **fields: Any) -> Slot:
    """The slot that a request for one prompt gets."""
    return slots.lease(
        GenerationRequest(prompts=(tuple(ids),), sampling=Sampling(), seed=0, rank=1, **fields)
    )


class GatedBackend(RuleBackend):
    """The next token is the letter after the sum of all tokens so far.

    `owners` are the caches of each pass, `arrivals` counts passes begun. While the gate is shut,
    each needs a permit from `let`. A pass over a token of `fails_on` raises.
    """

    def __init__(self, letters: list[int], tokenizer: Tokenizer) -> None:
        super().__init__(
            lambda tokens: letters[sum(tokens) % len(letters)],
            vocab_size=400,
            stop_ids=[0],
            tokenizer=tokenizer,
            chunk_tokens=10_000,
        )
        self.letters = letters
        self.owners: list[list[RuleCache]] = []
        self.arrivals = 0
        self.fails_on: dict[int, Exception] = {}
        self.gate = threading.Semaphore(0)
        self.shut = False
        self.on_pass = self._arrive

    def let(self, count: int = 1) -> None:
        """Lets `count` passes go through the shut gate."""
        self.gate.release(count)

    def open(self) -> None:
        """Ends the gate."""
        self.shut = False
        self.gate.release(1000)

    def _arrive(self, one_pass: Sequence[SequencePass[RuleCache]]) -> None:
        self.arrivals += 1
        if self.shut:
            assert self.gate.acquire(timeout=PATIENCE_S)
        self.owners.append([rows.cache for rows in one_pass])
        for rows in one_pass:
            for token in rows.ids[:, 0].tolist():
                if token in self.fails_on:
                    raise self.fails_on[token]


class Rule:
    """A served model made of a rule: its tokenizer, its backend, its `load`."""

    def __init__(
        self,
        *,
        context_tokens: int = 2000,
        detokenizer: Callable[[], Any] | None = None,
        folder: Path | None = None,
        infills: bool = False,
        heals: bool = False,
    ) -> None:
        fim = FimTokens(prefix=3, suffix=4, middle=5) if infills else None
        self.tokenizer = Tokenizer.from_json(
            byte_level_tokenizer().to_str(), ControlTokens(eos=(0,), fim=fim), CHATML
        )
        if not heals:
            # Without an index no token is longer than another: prompts stay whole.
            self.tokenizer.pieces = PieceIndex()
        letters = [self.tokenizer.encode(letter)[0] for letter in LETTERS]
        self.backend = GatedBackend(letters, self.tokenizer)
        self.context_tokens = context_tokens
        self.detokenizer = detokenizer or (lambda: IncrementalDetokenizer(self.tokenizer))
        self.folder = folder
        self.sessions: list[Session] = []

    def session(self) -> Session:
        session = Session(
            backend=self.backend,
            vocabulary=Vocabulary(
                stop_ids=frozenset({0}),
                detokenizer=self.detokenizer,
                pieces=lambda: self.tokenizer.pieces,
            ),
            config=SessionConfig(
                plan=KvPlan(),
                context_tokens=self.context_tokens,
                budget_bytes=1 << 20,
                chunk_tokens=10_000,
                draft_tokens=DRAFT_TOKENS,
            ),
        )
        self.sessions.append(session)
        return session

    def load(self, config: ServeConfig) -> ServedModel:
        limit = config.saved_bytes if self.folder is not None else 0
        return ServedModel(
            name="rule",
            names=frozenset({"rule", *config.aliases}),
            tokenizer=self.tokenizer,
            owned_gaps=OwnedPrompts(self.tokenizer),
            grammar=Vocabulary.of(self.tokenizer, frozenset({0})).grammar,
            backend=self.backend,
            vocab_size=400,
            stop_ids=frozenset({0}),
            k_bits=4,
            v_bits=2,
            facts={
                "model": "rule",
                "kv": "4:2",
                "context": self.context_tokens,
                "budget_tokens": self.context_tokens,
                "full_kv": "2:2",
                "full_tokens": self.context_tokens,
                "kv_budget": 1 << 20,
            },
            sampling=replace(self.backend.model.sampling, **config.sampling),
            loaded_at=1,
            strict=config.strict_model,
            exact=config.reuse == "exact",
            slots=Slots(
                self.session, config.sessions, SavedSessions(self.folder or Path(), "rule", limit)
            ),
            close=lambda: None,
        )

    def text(self, prompt: str, count: int) -> str:
        """What the rule continues `prompt` with."""
        total = sum(self.tokenizer.encode(prompt))
        letters = ""
        for _ in range(count):
            letters += LETTERS[total % len(LETTERS)]
            total += self.backend.letters[total % len(LETTERS)]
        return letters


def fault() -> BackendError:
    """An engine's error."""
    return BackendError("the rule broke")


@contextmanager
def running(load: Callable[[ServeConfig], ServedModel], **settings: Any) -> Iterator[Server]:
    """A server in a thread of this process, on a port of its own, ready to answer."""
    config = ServeConfig(**{"port": 0, "chunk_tokens": 16, "grace_s": 0.0} | settings)
    ready = threading.Event()
    hosted = HostedApp(lambda: load(config), config)
    server = Server(hosted, config, lambda _: ready.set())
    server.pool = hosted.pool  # type: ignore[attr-defined]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
        ready.set()

    address = server.url
    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        assert not failures, failures
        server.address = address  # type: ignore[attr-defined]
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class Reply:
    """Status, headers (lower case) and body of a raw response."""

    def __init__(self, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        status, *rows = head.decode("latin-1").split("\r\n")
        self.status = int(status.split()[1])
        self.headers = {
            name.lower(): value for name, _, value in (row.partition(": ") for row in rows)
        }
        chunked = self.headers.get("transfer-encoding") == "chunked"
        self.body = _unchunked(body) if chunked else body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return self.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def events(self) -> list[str]:
        """The blocks of a stream of server-sent events."""
        return self.body.decode().split("\n\n")[:-1]


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        parts.append(body[:count])
        if count == 0:
            break
        body = body[count + 2 :]
    return b"".join(parts)


def connect(server: Server) -> socket.socket:
    """A raw connection."""
    host, _, port = server.address.removeprefix("http://").rpartition(":")  # type: ignore[attr-defined]
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def request_bytes(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> bytes:
    """A whole HTTP request; an object becomes JSON."""
    content = (
        body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    )
    rows = {
        "Host": "127.0.0.1",
        "Connection": "close",
        "Content-Length": str(len(content)),
        **({"Content-Type": "application/json"} if body is not None else {}),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in rows.items() if value != "-")
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content


def ask(
    server: Server,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    method: str | None = None,
) -> Reply:
    """One request over a raw socket, read to the end."""
    method = method or ("GET" if body is None else "POST")
    with connect(server) as connection:
        connection.sendall(request_bytes(method, path, body, headers))
        return Reply(read_all(connection))


def send(server: Server, path: str, body: Any) -> socket.socket:
    """A connection on which a request was sent and nothing read yet."""
    connection = connect(server)
    connection.sendall(request_bytes("POST", path, body))
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@contextmanager
def process(bundle: str, home: dict[str, str], *words: str) -> Iterator[ServerProcess]:
    """A real `kvq serve`; killed at the end if it still runs."""
    server_process = ServerProcess(bundle, home, words)
    try:
        yield server_process
    finally:
        server_process.close()


class ServerProcess:
    """`kvq serve` in a process of its own, ready to answer."""

    def __init__(self, bundle: str, home: dict[str, str], words: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "kvq_apps.cli", "serve", "-m", bundle, "--json"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--threads", "1", "--chunk-tokens", "64", *words],
            env=os.environ | home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        lines: list[bytes] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if line == b"}\n":
                break
        self.facts = json.loads(b"".join(lines) or b"{}")
        if "url" not in self.facts:
            raise AssertionError(self.process.communicate()[1].decode())
        self.address = self.facts["url"]

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Sends a signal and waits; the exit code and what stood on stderr."""
        self.process.send_signal(number)
        _, complaint = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, complaint.decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def loaded(bundle: str, **options: Any) -> Callable[[ServeConfig], ServedModel]:
    """How a server loads a real engine on this bundle, with these options of its sessions."""

    def load(config: ServeConfig) -> ServedModel:
        return serve_engine(Engine.open(bundle, threads=1), options, config)

    return load


@contextmanager
def scripted_server(template: str, said: str) -> Iterator[Server]:
    """A server whose model says `said` to everything; `template` is one, or the name of one."""
    rule, library = Rule(), byte_level_tokenizer()
    library.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    rule.tokenizer = Tokenizer.from_json(
        library.to_str(), ControlTokens(eos=(0,)), TEMPLATES.get(template, template)
    )
    script = [*rule.tokenizer.encode(said, special=True), 0]

    def scripted(tokens: Sequence[int]) -> int:
        ends = list(tokens[-len(script) :])
        said_so_far = (n for n in range(len(script) - 1, 0, -1) if ends[-n:] == script[:n])
        return script[next(said_so_far, 0)]

    rule.backend.rule = scripted
    with running(rule.load, sessions=1) as server:
        yield server


def client(server: Server, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.address}/v1", max_retries=0, **{"api_key": "none"} | settings
    )


def metric(server: Server, name: str) -> float:
    text = ask(server, "/metrics").body.decode()
    return float(re.search(rf"^kvq_{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def data(reply: Reply) -> list[Any]:
    """The objects of a stream; its last event must be [DONE]."""
    *events, last = [event.removeprefix("data: ") for event in reply.events if event[0] != ":"]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}
