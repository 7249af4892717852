"""What sharing one engine costs: an editor's completions while a chat streams, both over HTTP.

A round has three phases in turn: the chat alone, completions alone, completions beside the chat.
Latency is what a client sees. Knows the server's routes and no engine.
"""

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from math import ceil
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import BackendError, KvqError, UsageError
from kvq_apps import output
from kvq_apps.bench.measure import p95
from kvq_apps.bench.suite import Setup
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.loading import serve_engine
from kvq_apps.serve.server import Server
from kvq_runtime.named_engine import Engine

# A chat is never longer: the arenas have room for it.
MOST_CHAT_TOKENS = 1024
_SESSIONS = 3
_TIMEOUT_S = 600.0
# Phases, as the rows name them.
CHAT, COMPLETIONS, BOTH = "chat alone", "completions alone", "completions beside a chat"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeJob:
    """What is measured: texts of `context` tokens, in `repeat` rounds.

    A chat streams for about `chat_s`. Every `every_s` an editor asks for `completion_tokens`,
    its text a token longer each time; later when the answer before took longer.
    """

    context: int = 512
    repeat: int = 7
    completion_tokens: int = 8
    every_s: float = 0.5
    chat_s: float = 4.0

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        for flag, value in (("context", self.context), ("repeat", self.repeat)):
            if value < 1:
                raise UsageError(about=f"--{flag}", value=value, possible="give 1 or more")


@dataclass(kw_only=True, slots=True)
class Samples:
    """Seconds: `chat` per token and round, `completion` per request, by phase."""

    chat: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    completion: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def rows(self) -> list[dict[str, Any]]:
        """The medians of every phase, in milliseconds; None where a phase has none."""
        return [
            {
                "load": phase,
                "chat_token_ms": _ms(median, self.chat.get(phase)),
                "completion_p50_ms": _ms(median, self.completion.get(phase)),
                "completion_p95_ms": _ms(p95, self.completion.get(phase)),
                "completions": len(self.completion.get(phase, ())),
            }
            for phase in (CHAT, COMPLETIONS, BOTH)
        ]


def measure(setup: Setup, job: ServeJob) -> dict[str, Any]:
    """The rows of all phases and how much the chat slows. Raises `KvqError`."""
    context = job.context + MOST_CHAT_TOKENS + _most_completions(job)
    samples = Samples()
    with _serving(setup, context) as asker:
        seconds, _ = asker.chat(job.context, 32)
        chat_tokens = max(16, min(MOST_CHAT_TOKENS, int(job.chat_s / seconds)))
        asker.complete(job, _times(1))
        for number in range(job.repeat):
            setup.progress(number, job.repeat, "a chat and an editor in turn")
            samples.chat.setdefault(CHAT, []).append(asker.chat(job.context, chat_tokens)[0])
            count = max(1, min(_most_completions(job), int(job.chat_s / job.every_s)))
            samples.completion.setdefault(COMPLETIONS, []).extend(
                asker.complete(job, _times(count))
            )
            seconds, completions = asker.both(job, chat_tokens)
            samples.chat.setdefault(BOTH, []).append(seconds)
            samples.completion.setdefault(BOTH, []).extend(completions)
        facts = asker.facts
    alone, beside = (median(samples.chat[phase]) for phase in (CHAT, BOTH))
    return {
        **facts,
        "context": job.context,
        "repeat": job.repeat,
        "chat_tokens": chat_tokens,
        "completion_tokens": job.completion_tokens,
        "every_s": job.every_s,
        "rows": samples.rows(),
        "chat_slowdown": beside / alone - 1,
    }


class Asker:
    """Asks a running server as a chat and as an editor do."""

    def __init__(self, address: str, facts: dict[str, Any], stop_ids: frozenset[int]) -> None:
        parts = urlsplit(address)
        self._address = (parts.hostname or "", parts.port)
        self._bias = {str(token): -100 for token in stop_ids}
        self.facts = facts

    def chat(
        self, context: int, tokens: int, begun: Callable[[], None] = lambda: None
    ) -> tuple[float, int]:
        """(seconds per token after the first, tokens) of a streamed answer."""
        body = {
            "prompt": _text(context, 7),
            "max_tokens": tokens,
            "logit_bias": self._bias,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "x_kvq": {"priority": "chat"},
        }
        first, last, count = 0.0, 0.0, 0
        with closing(self._connection()) as connection:
            for event in self._events(connection, body):
                last = perf_counter()
                if not first:
                    first = last
                    begun()
                usage: dict[str, int] = event.get("usage") or {}
                count = usage.get("completion_tokens", count)
        return (last - first) / max(1, count - 1), count

    def complete(self, job: ServeJob, more: Callable[[], bool]) -> list[float]:
        """Seconds of each completion, one after the other while there are `more`."""
        text, taken = _text(job.context, 11), list[float]()
        with closing(self._connection()) as connection:
            while more():
                text.append(len(text) % 13 + 1)
                body = {
                    "prompt": text,
                    "max_tokens": job.completion_tokens,
                    "logit_bias": self._bias,
                    "temperature": 0,
                }
                since = perf_counter()
                json.loads(self._send(connection, body).read())
                taken.append(perf_counter() - since)
                time.sleep(max(0.0, job.every_s - taken[-1]))
        return taken

    def both(self, job: ServeJob, chat_tokens: int) -> tuple[float, list[float]]:
        """The chat's seconds per token, and those of each completion that ended beside it."""
        begun, ended, found = Event(), Event(), list[float]()
        fault: list[Exception] = []

        def talk() -> None:
            try:
                found.append(self.chat(job.context, chat_tokens, begun.set)[0])
            except Exception as error:  # noqa: BLE001  raised again by whoever waits for it
                fault.append(error)
            finally:
                ended.set()
                begun.set()

        thread = Thread(target=talk)
        thread.start()
        begun.wait()
        limit = _times(_most_completions(job))
        completions = self.complete(job, lambda: not ended.is_set() and limit())
        thread.join()
        if fault:
            raise fault[0]
        return found[0], completions

    def _connection(self) -> HTTPConnection:
        return HTTPConnection(*self._address, timeout=_TIMEOUT_S)

    def _send(self, connection: HTTPConnection, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise BackendError(f"the server refused: {response.read().decode()}")
        return response

    def _events(self, connection: HTTPConnection, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for line in self._send(connection, body):
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise BackendError(f"the server failed: {event['error']['message']}")
                yield event


@contextmanager
def _serving(setup: Setup, context: int) -> Generator[Asker]:
    """A server of our own on a port of its own, which keeps nothing on disk."""
    session_options = setup.session_options | {"context_tokens": context}
    config = ServeConfig(port=0, sessions=_SESSIONS, saved_bytes=0, grace_s=0.0)
    ready = Event()
    fault: list[KvqError] = []
    server = Server(
        lambda: serve_engine(Engine(setup.files, threads=setup.threads), session_options, config),
        config,
        lambda _served, _url: ready.set(),
    )
    address = server.url or ""

    def run() -> None:
        try:
            server.run()
        except KvqError as error:
            fault.append(error)
        ready.set()

    thread = Thread(target=run)
    thread.start()
    try:
        ready.wait()
        if fault:
            raise fault[0]
        served = server.pool.served
        assert served is not None
        facts = {"model": served.name, "kv": served.kv, "kv_budget": served.slot_bytes}
        yield Asker(address, facts, served.stop_ids)
    finally:
        server.stop()
        thread.join()


def print_report(data: dict[str, Any]) -> None:
    """The same as a table, and the chat's slowdown in a line."""
    rows = [
        (row["load"], _cell(row["chat_token_ms"], ".2f"), _cell(row["completion_p50_ms"], ".1f"),
         _cell(row["completion_p95_ms"], ".1f"), str(row["completions"]))
        for row in data["rows"]
    ]  # fmt: skip
    header = ("load", "chat ms/token", "completion p50 ms", "p95 ms", "n")
    output.print_table(rows, header=header)
    output.print_data(
        f"\n{data['model']} {data['kv']}, {data['threads']} threads: the chat slows by "
        f"{data['chat_slowdown']:.1%} beside {data['completion_tokens']} tokens completed every "
        f"{data['every_s']:g} s"
    )


def _text(tokens: int, step: int) -> list[int]:
    """Token ids that every vocabulary has; another `step` shares no beginning."""
    return [(place * step) % 61 + step for place in range(tokens)]


def _most_completions(job: ServeJob) -> int:
    """So many fit the editor's text, which grows by a token each."""
    return max(1, ceil(4 * job.chat_s / job.every_s))


def _times(count: int) -> Callable[[], bool]:
    """True `count` times."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


def _ms(summary: Callable[[list[float]], float], seconds: list[float] | None) -> float | None:
    return summary(seconds) * 1e3 if seconds else None


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
