"""The cost of sharing one engine: an editor's completions while a chat streams, over HTTP.

A round has three phases in turn: the chat alone, completions alone, completions beside the chat.
Latency is what a client sees. Knows the server's routes and no engine.
"""

import json
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from math import ceil
from statistics import median
from threading import Event
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import BackendError
from kvq_apps.bench.measure import p95
from kvq_apps.bench.report import cell_text
from kvq_apps.bench.suite import Setup
from kvq_apps.names.engine import Engine
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.hosted_app import HostedApp
from kvq_apps.serve.loading import ServedModel, serve_engine
from kvq_apps.serve.server import Server
from kvq_apps.settings.flag_values import check_range
from kvq_apps.terminal import output

# Most tokens of a chat, for which the arenas have room.
MOST_CHAT_TOKENS = 1024
_SESSIONS = 3
_TIMEOUT_S = 600.0
# The phases, as the rows name them.
CHAT, COMPLETIONS, BOTH = "chat alone", "completions alone", "completions beside a chat"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeJob:
    """Holds what is measured: texts of `context` tokens, in `repeat` rounds.

    A chat streams for about `chat_s`. Every `every_s`, or later if the last answer took longer, an
    editor asks for `completion_tokens`. Its text grows by a token each time.
    """

    context: int = 512
    repeat: int = 7
    completion_tokens: int = 8
    every_s: float = 0.5
    chat_s: float = 4.0

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        check_range(1, context=self.context, repeat=self.repeat)


def measure(setup: Setup, job: ServeJob) -> dict[str, Any]:
    """Measures the rows of all phases and how much the chat slows. Raises `KvqError`."""
    most = _most_completions(job)
    # Seconds by phase: of a chat's token in each round, of each completion.
    chat_s: dict[str, list[float]] = {CHAT: [], BOTH: []}
    completion_s: dict[str, list[float]] = {COMPLETIONS: [], BOTH: []}
    with serving(setup, job.context + MOST_CHAT_TOKENS + most, _SESSIONS) as (url, served):
        client = LoadClient(url, served)
        token_s = client.chat(job.context, 32)
        chat_tokens = max(16, min(MOST_CHAT_TOKENS, int(job.chat_s / token_s)))
        client.complete(job, 1)
        for number in range(job.repeat):
            setup.progress(number, job.repeat, "a chat and an editor in turn")
            chat_s[CHAT].append(client.chat(job.context, chat_tokens))
            count = max(1, min(most, int(job.chat_s / job.every_s)))
            completion_s[COMPLETIONS] += client.complete(job, count)
            seconds, completions = client.chat_and_complete(job, chat_tokens)
            chat_s[BOTH].append(seconds)
            completion_s[BOTH] += completions
    return {
        **client.facts,
        "context": job.context,
        "repeat": job.repeat,
        "chat_tokens": chat_tokens,
        "completion_tokens": job.completion_tokens,
        "every_s": job.every_s,
        "rows": [
            {
                "load": phase,
                "chat_token_ms": _ms(median, chat_s.get(phase)),
                "completion_p50_ms": _ms(median, completion_s.get(phase)),
                "completion_p95_ms": _ms(p95, completion_s.get(phase)),
                "completions": len(completion_s.get(phase, ())),
            }
            for phase in (CHAT, COMPLETIONS, BOTH)
        ],
        "chat_slowdown": median(chat_s[BOTH]) / median(chat_s[CHAT]) - 1,
    }


class LoadClient:
    """Sends requests to a running server as a chat and as an editor do."""

    def __init__(self, address: str, served: ServedModel) -> None:
        self._address = urlsplit(address).netloc
        self._body = {
            "temperature": 0,
            "logit_bias": {str(token): -100 for token in served.stop_ids},
        }
        self.facts = {name: served.facts[name] for name in ("model", "kv", "kv_budget")}

    def chat(
        self, context: int, tokens: int, on_first_token: Callable[[], None] = lambda: None
    ) -> float:
        """Streams an answer of `tokens`; returns the seconds of each after the first."""
        body = {
            "prompt": _text(context, 7),
            "max_tokens": tokens,
            "stream": True,
            "x_kvq": {"priority": "chat"},
        }
        first, last = 0.0, 0.0
        with closing(HTTPConnection(self._address, timeout=_TIMEOUT_S)) as connection:
            for line in self._send(connection, body):
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise BackendError(f"the server failed: {event['error']['message']}")
                last = perf_counter()
                if not first:
                    first = last
                    on_first_token()
        return (last - first) / max(1, tokens - 1)

    def complete(
        self, job: ServeJob, most: int, ended: Callable[[], bool] = lambda: False
    ) -> list[float]:
        """Times `most` completions one after the other, fewer once `ended`; returns seconds."""
        text, seconds = _text(job.context, 11), list[float]()
        with closing(HTTPConnection(self._address, timeout=_TIMEOUT_S)) as connection:
            while len(seconds) < most and not ended():
                text.append(len(text) % 13 + 1)
                since = perf_counter()
                body = {"prompt": text, "max_tokens": job.completion_tokens}
                json.loads(self._send(connection, body).read())
                seconds.append(perf_counter() - since)
                time.sleep(max(0.0, job.every_s - seconds[-1]))
        return seconds

    def chat_and_complete(self, job: ServeJob, chat_tokens: int) -> tuple[float, list[float]]:
        """Returns the chat's seconds per token, and those of each completion beside it."""
        started = Event()
        with ThreadPoolExecutor(1) as pool:
            chat = pool.submit(self.chat, job.context, chat_tokens, started.set)
            chat.add_done_callback(lambda _: started.set())
            started.wait()
            completions = self.complete(job, _most_completions(job), chat.done)
            return chat.result(), completions

    def _send(self, connection: HTTPConnection, body: dict[str, Any]) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(self._body | body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise BackendError(f"the server refused: {response.read().decode()}")
        return response


@contextmanager
def serving(
    setup: Setup, context: int, sessions: int, reuse: str = "exact"
) -> Generator[tuple[str, ServedModel]]:
    """Runs a server on a port of its own, which keeps nothing on disk; yields its URL and model."""
    session_options = setup.session_options | {"context_tokens": context}
    config = ServeConfig(port=0, sessions=sessions, saved_bytes=0, grace_s=0.0, reuse=reuse)
    ready = Event()
    hosted = HostedApp(
        lambda: serve_engine(Engine(setup.files, threads=setup.threads), session_options, config),
        config,
    )
    server = Server(hosted, config, lambda _: ready.set())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.run)
        running.add_done_callback(lambda _: ready.set())
        try:
            ready.wait()
            if running.done():
                running.result()
            assert hosted.pool.served is not None
            yield server.url or "", hosted.pool.served
        finally:
            server.stop()


def print_report(data: dict[str, Any]) -> None:
    """Prints the same as a table, and the chat's slowdown in a line."""
    rows = [
        (row["load"], cell_text(row["chat_token_ms"], "{:.2f}"),
         cell_text(row["completion_p50_ms"], "{:.1f}"),
         cell_text(row["completion_p95_ms"], "{:.1f}"), row["completions"])
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
    """Returns token ids that every vocabulary has; texts of another `step` share no beginning."""
    return [(place * step) % 61 + step for place in range(tokens)]


def _most_completions(job: ServeJob) -> int:
    """Returns how many completions fit the editor's text, which grows by a token each."""
    return max(1, ceil(4 * job.chat_s / job.every_s))


def _ms(summary: Callable[[list[float]], float], seconds: list[float] | None) -> float | None:
    return summary(seconds) * 1e3 if seconds else None
