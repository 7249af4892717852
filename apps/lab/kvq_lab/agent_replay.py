"""Measures what a changed beginning of an agent's prompt costs: read again, moved, elsewhere.

The same requests go to `kvq serve` twice: once to read a prompt from its change on (`exact`), once
to keep what follows the change (`moved`). A llama-server may get them too. Each answer is greedy
and short; the next request has the recorded one in its place.
"""

import json
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from statistics import median
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import BackendError
from kvq_apps.bench.measure import p95
from kvq_apps.bench.serve_bench import serving
from kvq_apps.bench.suite import Setup
from kvq_apps.settings.flag_values import check_range
from kvq_apps.terminal import output
from kvq_lab.agent_turns import AgentTurn, agent_turns
from kvq_runtime.sequence.hunks import hunks

EXACT, MOVED = "exact", "moved"
# Lines of a tool's result at most.
RESULT_LINES = 120
_SESSIONS = 2
_TIMEOUT_S = 3600.0
_START_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayJob:
    """Asks for `turns` turns with prompts that fit `context`.

    `peer` is the program of a llama-server, which reads `peer_model`.
    """

    turns: int = 200
    context: int = 16384
    answer_tokens: int = 64
    peer: str | None = None
    peer_model: str | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        check_range(1, repeat=self.turns)
        check_range(1024, context=self.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """Holds what a server said of one turn."""

    read_tokens: int
    first_s: float
    text: str


def measure(setup: Setup, job: ReplayJob) -> dict[str, Any]:
    """Measures a row for each way and form, and one for each way over all. Raises `KvqError`."""
    turns = agent_turns(job.turns, RESULT_LINES)
    with serving(setup, job.context, _SESSIONS, EXACT) as (server, _):
        if not _takes_tools(server, turns[0]):
            turns = [replace(turn, tools=[]) for turn in turns]
        prompts = [_prompt_ids(server, turn) for turn in turns]
        fitting = [
            (turn, prompt)
            for turn, prompt in zip(turns, prompts, strict=True)
            if prompt is not None and len(prompt) + job.answer_tokens <= job.context
        ]
        turns, ids = [turn for turn, _ in fitting], [prompt for _, prompt in fitting]
        replies = {EXACT: _replayed(server, turns, job, setup, EXACT)}
    with serving(setup, job.context, _SESSIONS, MOVED) as (server, _):
        replies[MOVED] = _replayed(server, turns, job, setup, MOVED)
    if job.peer is not None:
        with _peer(setup, job) as server:
            replies["llama-server"] = _replayed(server, turns, job, setup, "llama-server")
    unchanged = _unchanged(turns, ids)
    return {
        "model": setup.files.name,
        "context": job.context,
        "turns": len(turns),
        "left_out": job.turns - len(turns),
        "prompt_tokens": max(map(len, ids)),
        "rows": [
            _row(way, form, turns, ids, unchanged, answers, replies[EXACT])
            for way, answers in replies.items()
            for form in (*dict.fromkeys(turn.form for turn in turns), "all")
        ],
    }


def _unchanged(turns: Sequence[AgentTurn], ids: Sequence[list[int]]) -> list[int]:
    """Returns how many tokens of each prompt stand in the conversation's prompt before it."""
    before: dict[str, list[int]] = {}
    counts: list[int] = []
    for turn, prompt in zip(turns, ids, strict=True):
        new = sum(len(hunk.new_ids) for hunk in hunks(before.get(turn.name, []), prompt))
        counts.append(len(prompt) - new)
        before[turn.name] = prompt
    return counts


def _row(
    way: str,
    form: str,
    turns: Sequence[AgentTurn],
    ids: Sequence[list[int]],
    unchanged: Sequence[int],
    replies: Sequence[_Reply],
    exact: Sequence[_Reply],
) -> dict[str, Any]:
    """Sums up the turns of one form. A conversation's first turn has nothing to find again."""
    places = [place for place, turn in enumerate(turns)
              if form in (turn.form, "all") and unchanged[place]]  # fmt: skip
    again = sum(
        max(0, replies[place].read_tokens - len(ids[place]) + unchanged[place]) for place in places
    )
    seconds = [replies[place].first_s for place in places]
    return {
        "way": way,
        "form": form,
        "turns": len(places),
        "read_tokens": sum(replies[place].read_tokens for place in places),
        "read_again": again / max(1, sum(unchanged[place] for place in places)),
        "first_p50_s": median(seconds),
        "first_p95_s": p95(seconds),
        "same": sum(replies[place].text == exact[place].text for place in places) / len(places),
    }


def _replayed(
    address: str, turns: Sequence[AgentTurn], job: ReplayJob, setup: Setup, way: str
) -> list[_Reply]:
    """Sends all turns one after the other and returns the replies."""
    replies: list[_Reply] = []
    for number, turn in enumerate(turns):
        setup.progress(number, len(turns), f"{way}: {turn.form}")
        body = _body(turn) | {"max_tokens": job.answer_tokens, "temperature": 0}
        answer = _ask(address, "/v1/chat/completions", body)
        timings, message = answer["timings"], answer["choices"][0]["message"]
        first_ms = answer.get("x_kvq", {}).get("ttft_ms", timings["prompt_ms"])
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        replies.append(
            _Reply(
                read_tokens=timings["prompt_n"],
                first_s=first_ms / 1e3,
                text=f"{message.get('reasoning_content')} {message.get('content')} {calls}",
            )
        )
    return replies


def _body(turn: AgentTurn) -> dict[str, Any]:
    return {"messages": turn.messages} | ({"tools": turn.tools} if turn.tools else {})


def _takes_tools(address: str, turn: AgentTurn) -> bool:
    """Decides whether the model's template has a form for tools."""
    try:
        _ask(address, "/apply-template", _body(turn))
    except BackendError as error:
        if '"unsupported"' not in str(error):
            raise
        return False
    return True


def _prompt_ids(address: str, turn: AgentTurn) -> list[int] | None:
    """Returns the tokens of `turn`'s prompt by the model's template; None where it is too long."""
    try:
        prompt = _ask(address, "/apply-template", _body(turn))["prompt"]
    except BackendError as error:
        if '"context_length_exceeded"' not in str(error):
            raise
        return None
    body = {"content": prompt, "parse_special": True, "add_special": False}
    return _ask(address, "/tokenize", body)["tokens"]


def _ask(address: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    with closing(HTTPConnection(urlsplit(address).netloc, timeout=_TIMEOUT_S)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", route, json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
    if response.status != 200:
        raise BackendError(f"the server refused {route}: {text[:500]}")
    return json.loads(text)


@contextmanager
def _peer(setup: Setup, job: ReplayJob) -> Generator[str]:
    """Runs a llama-server as its users do for an agent; yields its address."""
    port = _free_port()
    words = [job.peer or "", "-m", job.peer_model or "", "--port", str(port), "--jinja"]
    words += ["-c", str(job.context * _SESSIONS), "-np", str(_SESSIONS), "-t", str(setup.threads)]
    words += ["--cache-reuse", "256", "--no-webui"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(lambda: _healthy(address), process)
        yield address
    finally:
        process.terminate()
        process.wait()


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Waits until a server answers. Raises `BackendError` where it does not."""
    deadline = monotonic() + _START_S
    while not ready():
        if process.poll() is not None or monotonic() > deadline:
            raise BackendError(f"the peer did not start: {process.args}")
        sleep(0.2)


def _healthy(address: str) -> bool:
    try:
        with closing(HTTPConnection(urlsplit(address).netloc, timeout=5.0)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    except OSError:
        return False


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def print_report(data: dict[str, Any]) -> None:
    """Prints the rows as a table."""
    rows = [
        (row["way"], row["form"], row["turns"], row["read_tokens"], f"{row['read_again']:.1%}",
         f"{row['first_p50_s']:.2f}", f"{row['first_p95_s']:.2f}", f"{row['same']:.0%}")
        for row in data["rows"]
    ]  # fmt: skip
    header = ("way", "form", "turns", "tokens read", "of the unchanged", "first token s", "p95",
              "answers as exact")  # fmt: skip
    output.print_table(rows, header=header)
    output.print_data(
        f"\n{data['model']}, {data['threads']} threads: prompts of up to {data['prompt_tokens']} "
        f"tokens; {data['left_out']} turns did not fit {data['context']}"
    )
