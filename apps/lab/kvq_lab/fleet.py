"""What a fleet costs and keeps: requests through `kvq serve --ray` and through `kvq serve` in turn.

Two questions. What does a request take longer, and how much do many write at once? And of many
sessions that take turns, how much of their texts is found in a cache, wherever they are sent?
Every server is a process of its own; nothing is kept on disk, so that only the sessions count.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import BackendError, UsageError
from kvq_apps import output
from kvq_apps.bench.measure import p95

REPLICAS = (1, 2, 4)
SESSIONS = 20
_TURNS = 5
_TURN_TOKENS = 8
# Characters of a session's first prompt, and of each later one.
_FIRST, _LATER = 600, 160
_CLIENTS = 8
_CLIENT_TOKENS = 64
_TIMEOUT_S = 600.0
_WARM = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetJob:
    """What is measured: `model` on so many `replicas`, `repeat` requests to each server in turn."""

    model: str
    replicas: tuple[int, ...] = REPLICAS
    repeat: int = 200

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        if self.repeat < 1:
            raise UsageError(f"--repeat {self.repeat} is not possible: give 1 or more")


def measure(job: FleetJob, progress: output.Shown) -> dict[str, Any]:
    """A row for each number of replicas. Raises `KvqError`."""
    rows: list[dict[str, Any]] = []
    with _server(job.model) as (plain, facts):
        for number, count in enumerate(job.replicas):
            progress(number, len(job.replicas), f"{count} replicas")
            with _server(job.model, "--ray", "--replicas", str(count)) as (fleet, _):
                alone, through = _requests(plain, fleet, job.repeat)
                rows.append(
                    {
                        "replicas": count,
                        "plain_ms": median(alone) * 1e3,
                        "request_ms": median(through) * 1e3,
                        "p95_ms": p95(through) * 1e3,
                        "overhead_ms": (median(through) - median(alone)) * 1e3,
                        "plain_tok_s": _tokens_per_second(plain),
                        "tok_s": _tokens_per_second(fleet),
                        "prefix_share": _prefix_share(fleet),
                    }
                )
        plain_share = _prefix_share(plain)
    one = facts["kv_budget"]
    return {
        "model": facts["model"], "kv": facts["kv"], "session_bytes": one, "sessions": SESSIONS,
        "turns": _TURNS, "clients": _CLIENTS, "plain_prefix_share": plain_share, "rows": rows,
    }  # fmt: skip


def _requests(plain: str, fleet: str, repeat: int) -> tuple[list[float], list[float]]:
    """Seconds of a request for one token, from either server in turn."""
    body = {"prompt": "def f(", "max_tokens": 1, "temperature": 0}
    found: list[list[float]] = [[], []]
    with ExitStack() as stack:
        asks = [stack.enter_context(_asking(url)) for url in (plain, fleet)]
        for _ in range(repeat + _WARM):
            for ask, seconds in zip(asks, found, strict=True):
                since = perf_counter()
                ask(body)
                seconds.append(perf_counter() - since)
    return found[0][_WARM:], found[1][_WARM:]


def _tokens_per_second(url: str) -> float:
    """What several clients are written together, each a text of its own."""

    def write(number: int) -> int:
        body = {"prompt": f"def f{number}(", "max_tokens": _CLIENT_TOKENS, "seed": number}
        with _asking(url) as ask:
            return ask(body)["usage"]["completion_tokens"]

    with ThreadPoolExecutor(_CLIENTS) as clients:
        list(clients.map(write, range(_CLIENTS)))
        since = perf_counter()
        tokens = sum(clients.map(write, range(_CLIENTS)))
        return tokens / (perf_counter() - since)


def _prefix_share(url: str) -> float:
    """Tokens that were found in a cache, of those that later turns of all sessions begin with."""
    texts = [f"# Session {number}\n" + _code(number, _FIRST) for number in range(SESSIONS)]
    cached = asked = 0
    with _asking(url) as ask:
        for turn in range(_TURNS):
            for number, text in enumerate(texts):
                body = {"prompt": text, "max_tokens": _TURN_TOKENS, "temperature": 0}
                usage = (answer := ask(body))["usage"]
                if turn:
                    cached += usage["prompt_tokens_details"]["cached_tokens"]
                    asked += usage["prompt_tokens"]
                texts[number] += answer["choices"][0]["text"] + _code(turn, _LATER)
    return cached / asked


def _code(seed: int, characters: int) -> str:
    """Some text, another for each seed."""
    line = "value_{0} = (value_{0} * {1}) % {2}\n"
    lines = (line.format(place, seed + place, seed * 7 + 3) for place in range(characters))
    text = ""
    while len(text) < characters:
        text += next(lines)
    return text


@contextmanager
def _asking(url: str) -> Generator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Asks for completions on one connection."""
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)) as http:

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            headers = {"Content-Type": "application/json"}
            http.request("POST", "/v1/completions", json.dumps(body), headers)
            response = http.getresponse()
            content = response.read()
            if response.status != 200:
                raise BackendError(f"the server refused: {content.decode()}")
            return json.loads(content)

        yield ask


@contextmanager
def _server(model: str, *words: str) -> Generator[tuple[str, dict[str, Any]]]:
    """A `kvq serve` with room for all sessions in each pool: its address, and what it announced."""
    command = [
        sys.executable, "-m", "kvq_apps.cli", "serve", model, "--json", "--port", "0", "--threads",
        "1", "--sessions", str(SESSIONS), "--sessions-disk", "0", *words,
    ]  # fmt: skip
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None
        said = ""
        for line in server.stdout:
            said += line
            if line == "}\n":
                break
        try:
            facts = json.loads(said or "{}")
            if "url" not in facts:
                raise BackendError(f"kvq serve did not start: {server.communicate()[1].strip()}")
            yield facts["url"], facts
        finally:
            server.terminate()
            server.communicate()


def print_report(data: dict[str, Any]) -> None:
    """The same as a table."""
    rows = [
        (row["replicas"], f"{row['plain_ms']:.1f}", f"{row['request_ms']:.1f}",
         f"{row['overhead_ms']:.1f}", f"{row['p95_ms']:.1f}", f"{row['plain_tok_s']:.0f}",
         f"{row['tok_s']:.0f}", f"{row['prefix_share']:.1%}")
        for row in data["rows"]
    ]  # fmt: skip
    header = (
        "replicas", "kvq serve ms", "fleet ms", "more ms", "p95 ms", "kvq serve tok/s",
        "fleet tok/s", "found in caches",
    )  # fmt: skip
    output.print_table(rows, header=header)
    output.print_data(
        f"\n{data['model']} {data['kv']}, a thread each: requests for one token, "
        f"{data['clients']} clients that are written to at once, {data['sessions']} sessions in "
        f"turn; kvq serve finds {data['plain_prefix_share']:.1%} in its caches"
    )
