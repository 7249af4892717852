"""Measures what typing costs: recorded sessions replayed for every way to keep a prompt current.

Two parts. *Counts*: the tokens that each way encodes in every session; they need a tokenizer only.
*Passes* on a model: tokens encoded, time until the next token is known, and how far the prediction
is from a full computation in a cache of 16 bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError, argument
from kvq_apps.bench.suite import Setup
from kvq_apps.completion.frozen_file import FrozenFile
from kvq_apps.completion.token_blocks import BlockTokenizer
from kvq_apps.evaluation.measurement import log_softmax
from kvq_apps.evaluation.text import kl_divergence
from kvq_apps.settings.flag_values import check_range
from kvq_apps.terminal import output
from kvq_apps.terminal.output import ShowProgress
from kvq_lab.typing_sessions import LONG, SHORT, Moment, TypingSession
from kvq_models.infilling import infill_prompt
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.hunks import Hunk, common_prefix, hunks, one_by_one
from kvq_runtime.sequence.staleness import next_tokens
from kvq_runtime.session.session import Session

EXACT = "fp"
# What `llama-server --cache-reuse` is started with in its editor presets.
LEAST_REUSED = 256
_NO_LIMIT = 1 << 40
_HEADER_COUNTS = ("session", "way", "tokens", "a key", "p95", "max", "elsewhere")
_HEADER_PASSES = ("session", "way", "KV", "a key", "ms", "p95 ms", "KL, nats", "same top 1")

Ids = list[int]
Changes = Callable[[Ids, Ids], list[Hunk]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EditJob:
    """Asks for the first `events` events of each session, a full pass beside every `every`th.

    `kv` are settings as `--kv` writes them.
    """

    kv: tuple[str, ...] = (EXACT, "8:8", "4:2")
    events: int = 48
    every: int = 4

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        check_range(1, repeat=self.events)


@dataclass(frozen=True, slots=True)
class Way:
    """Says how a prompt is made of a moment, and which changes lead there from the one before."""

    name: str
    prompt: Callable[[Moment], Ids]
    changes: Changes

    @property
    def reencode_next(self) -> int | None:
        """Returns what `Session.edit` takes: peers encode nothing again."""
        return None if self.changes is hunks else 0


def ways(tokenizer: Tokenizer) -> list[Way]:
    """Makes all ways anew, since one of them keeps what was frozen."""
    encode, frozen = BlockTokenizer(tokenizer).encode, FrozenFile()

    def ordered(suffix_first: bool) -> Callable[[Moment], Ids]:
        def prompt(now: Moment) -> Ids:
            return infill_prompt(
                tokenizer, now.prefix, now.suffix, _NO_LIMIT, encode, suffix_first=suffix_first
            )

        return prompt

    def typed_behind(now: Moment) -> Ids:
        prefix, suffix, typed = frozen.split(now.prefix, now.suffix)
        ids = infill_prompt(tokenizer, prefix, suffix, _NO_LIMIT, encode, suffix_first=False)
        return [*ids, *tokenizer.encode(typed)]

    first, last = ordered(suffix_first=False), ordered(suffix_first=True)
    return [
        Way("edits", first, hunks),
        Way("edits, SPM", last, hunks),
        Way("prefix", first, from_the_change_on),
        Way("prefix, SPM", last, from_the_change_on),
        Way("prefix, EFIM", typed_behind, from_the_change_on),
        Way(f"chunks >= {LEAST_REUSED}", first, chunks_kept),
    ]


def _fixed_tokens(tokenizer: Tokenizer) -> int:
    """Counts the tokens that the prompts of every way begin with, in whichever order."""
    return len(tokenizer.control.start) + 1


def from_the_change_on(before: Ids, after: Ids) -> list[Hunk]:
    """Encodes everything behind the first change again, as a prefix cache does."""
    start = common_prefix(before, after)
    return [Hunk(start, len(before), after[start:])] if before != after else []


def chunks_kept(before: Ids, after: Ids) -> list[Hunk]:
    """Moves equal runs left over what went, as llama-server's `--cache-reuse` does.

    Behind the common prefix the cache is walked through; a run of at least `LEAST_REUSED` tokens
    that is what the prompt goes on with is kept, anything else is dropped. Nothing is inserted.
    """
    old, new = np.asarray(before, np.int64), np.asarray(after, np.int64)
    kept = at = dropped = common_prefix(old, new)
    changes: list[Hunk] = []
    while at < len(old) and kept < len(new):
        size = common_prefix(old[at:], new[kept:]) if old[at] == new[kept] else 0
        if size < LEAST_REUSED:
            at += 1
            continue
        if at > dropped:
            changes.append(Hunk(dropped, at, []))
        at, kept, dropped = at + size, kept + size, at + size
    if dropped < len(old) or kept < len(new):
        changes.append(Hunk(dropped, len(old), after[kept:]))
    return changes


def measure(setup: Setup, job: EditJob) -> dict[str, Any]:
    """Measures both parts. Raises `KvqError`."""
    if not setup.files.has_onnx:
        raise UsageError(
            f"{argument('--suite')} edit runs a bundle; {setup.files.path} has no ONNX graph"
        )
    with Engine(setup.files, threads=setup.threads) as engine:
        tokenizer = engine.tokenizer
        return {
            "model": engine.model.name,
            "counts": [row for name in (*SHORT, LONG) for row in counts(name, tokenizer)],
            "passes": _passes(engine, ways(tokenizer), job, setup.progress),
        }


# What would be encoded


def counts(name: str, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yields a row for each way to follow session `name`, its file already in the cache."""
    session = TypingSession.read(name)
    for way in ways(tokenizer):
        before: Ids = []
        encoded: dict[bool, list[int]] = {True: [], False: []}
        for now in session.moments():
            after = way.prompt(now)
            new = _encoded(before, after, way)
            if now.kind != "open":
                encoded[now.kind == "key"].append(new)
            before = after
        yield {"session": name, "way": way.name, **_of_keys(encoded[True], encoded[False])}


def _encoded(before: Ids, after: Ids, way: Way) -> int:
    """Counts a pass's tokens: new ones, those next to them, and the last one for its logits."""
    changes = way.changes(before, after)
    ends_new = bool(changes) and changes[-1].stop == len(before) and bool(changes[-1].new_ids)
    count = sum(len(hunk.new_ids) for hunk in changes) + (not ends_new)
    if way.reencode_next is None:
        ends = [*(hunk.start for hunk in changes[1:]), len(before) - 1]
        for (start, stop, new), end in zip(changes, ends, strict=False):
            count += max(0, min(next_tokens(stop - start, len(new)), end - stop))
    return count


def _of_keys(keys: Sequence[int], jumps: Sequence[int]) -> dict[str, Any]:
    return {
        "tokens": sum(keys) + sum(jumps),
        "tokens_a_key": mean(keys),
        "tokens_a_key_p95": _p95(keys),
        "tokens_a_key_most": max(keys),
        "tokens_elsewhere": mean(jumps) if jumps else 0.0,
    }


def _p95(numbers: Sequence[float]) -> float:
    return float(np.percentile(numbers, 95))


# Passes of a model


@dataclass(slots=True)
class _Outcome:
    """Collects what passes after the events of a session came to."""

    tokens: list[int] = field(default_factory=list[int])
    keys: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])
    nats: list[float] = field(default_factory=list[float])
    same: list[bool] = field(default_factory=list[bool])


def _passes(
    engine: Engine, all_ways: list[Way], job: EditJob, progress: ShowProgress
) -> list[dict[str, Any]]:
    """Measures a row for each session, way and width."""
    rows: list[dict[str, Any]] = []
    total = len(SHORT) * len(all_ways)
    for number, name in enumerate(SHORT):
        for place, way in enumerate(all_ways):
            progress(number * len(all_ways) + place, total, f"{name}, {way.name}")
            # The first event is a jump to where typing begins; a prompt is made at every one.
            moments = list(islice(TypingSession.read(name).moments(), 1, job.events + 2))
            prompts = [way.prompt(now) for now in moments]
            room: dict[str, Any] = {
                "context_tokens": max(map(len, prompts)) + 512,
                "sink_tokens": _fixed_tokens(engine.tokenizer),
            }
            exact = _exact(engine, prompts, job.every, {"kv": EXACT, **room})
            for kv in job.kv:
                with engine.session(kv=kv, **room) as session:
                    outcome = _replayed(session, way, moments, prompts, exact)
                rows.append(_row(name, way, kv, outcome))
    return rows


def _exact(
    engine: Engine, prompts: list[Ids], every: int, options: dict[str, Any]
) -> Mapping[int, NDArray[np.float32]]:
    """Computes log-probabilities [1, V] after some of the prompts, each from its beginning."""
    rows: dict[int, NDArray[np.float32]] = {}
    for number in range(every, len(prompts), every):
        with engine.session(**options) as session:
            session.prefill(prompts[number])
            rows[number] = _next(session)
    return rows


def _replayed(
    session: Session[Any],
    way: Way,
    moments: list[Moment],
    prompts: list[Ids],
    exact: Mapping[int, NDArray[np.float32]],
) -> _Outcome:
    session.prefill(prompts[0])
    outcome = _Outcome()
    for number, now in enumerate(moments[1:], 1):
        since = perf_counter()
        for hunk in one_by_one(way.changes(prompts[number - 1], prompts[number])):
            session.edit(*hunk, reencode_next=way.reencode_next)
        new = len(session.sequence.due())
        session.prefill()
        if now.kind == "key":
            outcome.seconds.append(perf_counter() - since)
            outcome.keys.append(new)
        outcome.tokens.append(new)
        if number in exact:
            ours = _next(session)
            outcome.nats.append(float(kl_divergence(exact[number], ours)[0]))
            outcome.same.append(bool(ours.argmax() == exact[number].argmax()))
    return outcome


def _next(session: Session[Any]) -> NDArray[np.float32]:
    """Computes log-probabilities float32 [1, V] of what follows the text."""
    with session.sequence.forward([], rows=[-1]) as step:
        return log_softmax(step.logits[:1])


def _row(name: str, way: Way, kv: str, outcome: _Outcome) -> dict[str, Any]:
    return {
        "session": name,
        "way": way.name,
        "kv": kv,
        "tokens": sum(outcome.tokens),
        "tokens_a_key": mean(outcome.keys),
        "ms": 1e3 * median(outcome.seconds),
        "p95_ms": 1e3 * _p95(outcome.seconds),
        "kl_nats": mean(outcome.nats) if outcome.nats else None,
        "same_top_1": mean(outcome.same) if outcome.same else None,
        "compared": len(outcome.nats),
    }


def print_report(data: dict[str, Any]) -> None:
    """Prints both parts as tables."""
    cells = [
        (
            row["session"], row["way"], row["tokens"], f"{row['tokens_a_key']:.1f}",
            f"{row['tokens_a_key_p95']:.0f}", row["tokens_a_key_most"],
            f"{row['tokens_elsewhere']:.0f}",
        )
        for row in data["counts"]
    ]  # fmt: skip
    output.print_table(cells, header=_HEADER_COUNTS)
    output.print_data("")
    output.print_table([_pass_cells(row) for row in data["passes"]], header=_HEADER_PASSES)


def _pass_cells(row: dict[str, Any]) -> tuple[str, ...]:
    missing = row["kl_nats"] is None
    return (
        row["session"], row["way"], row["kv"], f"{row['tokens_a_key']:.1f}", f"{row['ms']:.1f}",
        f"{row['p95_ms']:.1f}", "-" if missing else f"{row['kl_nats']:.4f}",
        "-" if missing else f"{row['same_top_1']:.1%}",
    )  # fmt: skip
