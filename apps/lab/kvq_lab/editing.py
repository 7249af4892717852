"""What typing costs: recorded sessions replayed against every way to keep a prompt up to date.

Three parts. *Counts*: tokens each way would encode for every session, which no model is needed
for. *Passes* on a model: tokens encoded, time until the next token is known, and how far what is
predicted is from a full computation in a cache of 16 bits. With `--shape`, whose random weights
predict nothing, *keys*: in a long file, the time of a first draft beside that of its tokens alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean, median
from time import perf_counter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.config import DEFAULT_DRAFT_TOKENS
from kvq.errors import UsageError, argument
from kvq_apps import output
from kvq_apps.bench.engine_kvq import fill
from kvq_apps.bench.gguf_file import same_weights
from kvq_apps.completion.blocks import BlockTokenizer
from kvq_apps.completion.frozen import Frozen
from kvq_apps.evaluation.measurement import log_softmax
from kvq_apps.evaluation.text import kl_divergence
from kvq_apps.output import Shown
from kvq_lab import around, starting
from kvq_lab.typing_sessions import LONG, SHORT, Moment, TypingSession
from kvq_models.infilling import infill_prompt
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends import ModelFiles
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.hunks import Hunk, common_prefix, hunks, one_by_one
from kvq_runtime.session import Session
from kvq_runtime.staleness import next_tokens
from kvq_specdraft import writer_named

LLAMA = "llama.cpp"
EXACT = "fp"
# What `llama-server --cache-reuse` is started with in its editor presets.
LEAST_REUSED = 256
_NO_LIMIT = 1 << 40
_WARM_KEYS = 3
_HEADER_COUNTS = ("session", "way", "tokens", "a key", "p95", "max", "elsewhere")
_HEADER_PASSES = ("session", "way", "KV", "a key", "ms", "p95 ms", "KL, nats", "same top 1")

Ids = list[int]
Changes = Callable[[Ids, Ids], list[Hunk]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EditJob:
    """The first `events` events of each session, compared with a full pass at every `every`th.

    `kv` are settings as `--kv` writes them; `tokens` those of a draft; `peer`: llama.cpp too.
    """

    kv: tuple[str, ...] = (EXACT, "8:8", "4:2")
    events: int = 48
    every: int = 4
    tokens: int = 16
    peer: bool = False

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        if min(self.events, self.tokens) < 1:
            raise UsageError(
                f"{argument('--repeat')} and {argument('--predict')} are not possible: give 1 or "
                "more"
            )


@dataclass(frozen=True, slots=True)
class Way:
    """How a prompt is made of a moment, and which changes lead there from the one before."""

    name: str
    prompt: Callable[[Moment], Ids]
    changes: Changes

    @property
    def reencode_next(self) -> int | None:
        """As `Session.edit` takes it: peers encode nothing again."""
        return None if self.changes is hunks else 0


def ways(tokenizer: Tokenizer) -> list[Way]:
    """All ways, each new: one of them keeps what was frozen."""
    encode, frozen = BlockTokenizer(tokenizer).encode, Frozen()

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
    """Tokens that the prompts of every way begin with, in whichever order."""
    return len(tokenizer.control.start) + 1


def from_the_change_on(before: Ids, after: Ids) -> list[Hunk]:
    """A prefix cache: everything behind the first change anew."""
    start = common_prefix(before, after)
    return [Hunk(start, len(before), after[start:])] if before != after else []


def chunks_kept(before: Ids, after: Ids) -> list[Hunk]:
    """What llama-server's `--cache-reuse` does: equal runs are moved left over what went.

    Behind the common prefix the cache is walked through; a run of at least `LEAST_REUSED` tokens
    that is what the prompt goes on with is kept, anything else is dropped. Nothing is inserted.
    """
    old, new = np.asarray(before, np.int64), np.asarray(after, np.int64)
    kept = at = dropped = common_prefix(old, new)
    found: list[Hunk] = []
    while at < len(old) and kept < len(new):
        size = common_prefix(old[at:], new[kept:]) if old[at] == new[kept] else 0
        if size < LEAST_REUSED:
            at += 1
            continue
        if at > dropped:
            found.append(Hunk(dropped, at, []))
        at, kept, dropped = at + size, kept + size, at + size
    if dropped < len(old) or kept < len(new):
        found.append(Hunk(dropped, len(old), after[kept:]))
    return found


def measure(
    files: ModelFiles,
    job: EditJob,
    threads: int,
    progress: Shown,
    *,
    shape: bool,
) -> dict[str, Any]:
    """The parts that this model can have. Raises `KvqError`."""
    with Engine(files, threads=threads) as engine:
        tokenizer = _embedded_tokenizer() if shape else engine.tokenizer
        data: dict[str, Any] = {
            "model": engine.model.name,
            "around": around.measure(tokenizer),
            "start": starting.measure(),
            "counts": [row for name in (*SHORT, LONG) for row in counts(name, tokenizer)],
        }
        if shape:
            data["keys"] = _keys(engine, cast(Bundle, files), tokenizer, job)
        else:
            data["passes"] = _passes(engine, ways(tokenizer), job, progress)
    if job.peer:
        same = same_weights(cast(Bundle, files))
        with Engine(same, threads=threads, backend=LLAMA) as engine:
            theirs = [way for way in ways(tokenizer) if way.changes is chunks_kept]
            exact = EditJob(kv=(EXACT,), events=job.events, every=job.every)
            data["passes"] += _passes(engine, theirs, exact, progress)
    return data


def _embedded_tokenizer() -> Tokenizer:
    from kvq_apps.model_path import DEFAULT, resolve_model

    found = Bundle.open(resolve_model(DEFAULT)).tokenizer()
    assert found is not None
    return found


# What would be encoded


def counts(name: str, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """A row for each way to follow session `name`, its file already in the cache."""
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
    """Tokens of a pass: new ones, those next to them, and the last one again for its logits."""
    found = way.changes(before, after)
    ends_new = bool(found) and found[-1].stop == len(before) and bool(found[-1].new_ids)
    count = sum(len(hunk.new_ids) for hunk in found) + (not ends_new)
    if way.reencode_next is None:
        ends = [*(hunk.start for hunk in found[1:]), len(before) - 1]
        for (start, stop, new), end in zip(found, ends, strict=False):
            count += max(0, min(next_tokens(stop - start, len(new)), end - stop))
    return count


def _of_keys(keys: Sequence[int], others: Sequence[int]) -> dict[str, Any]:
    return {
        "tokens": sum(keys) + sum(others),
        "tokens_a_key": mean(keys),
        "tokens_a_key_p95": _p95(keys),
        "tokens_a_key_most": max(keys),
        "tokens_elsewhere": mean(others) if others else 0.0,
    }


def _p95(numbers: Sequence[float]) -> float:
    return float(np.percentile(numbers, 95))


# Passes of a model


@dataclass(slots=True)
class _Found:
    """What passes after the events of a session came to."""

    tokens: list[int] = field(default_factory=list[int])
    keys: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])
    nats: list[float] = field(default_factory=list[float])
    same: list[bool] = field(default_factory=list[bool])


def _passes(
    engine: Engine, all_ways: list[Way], job: EditJob, progress: Shown
) -> list[dict[str, Any]]:
    """A row for each session, way and width."""
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
            wanted = _wanted(engine, prompts, job.every, {"kv": EXACT, **room})
            for kv in job.kv:
                with engine.session(kv=kv, **room) as session:
                    found = _replayed(session, way, moments, prompts, wanted)
                rows.append(_row(engine, name, way, kv, found))
    return rows


def _wanted(
    engine: Engine, prompts: list[Ids], every: int, options: dict[str, Any]
) -> Mapping[int, NDArray[np.float32]]:
    """Log-probabilities [1, V] after some of the prompts, each computed from its beginning."""
    found: dict[int, NDArray[np.float32]] = {}
    for number in range(every, len(prompts), every):
        with engine.session(**options) as session:
            session.prefill(prompts[number])
            found[number] = _next(session)
    return found


def _replayed(
    session: Session[Any],
    way: Way,
    moments: list[Moment],
    prompts: list[Ids],
    wanted: Mapping[int, NDArray[np.float32]],
) -> _Found:
    session.prefill(prompts[0])
    found = _Found()
    for number, now in enumerate(moments[1:], 1):
        since = perf_counter()
        for hunk in one_by_one(way.changes(prompts[number - 1], prompts[number])):
            session.edit(*hunk, reencode_next=way.reencode_next)
        new = len(session.sequence.due())
        session.prefill()
        if now.kind == "key":
            found.seconds.append(perf_counter() - since)
            found.keys.append(new)
        found.tokens.append(new)
        if number in wanted:
            ours = _next(session)
            found.nats.append(float(kl_divergence(wanted[number], ours)[0]))
            found.same.append(bool(ours.argmax() == wanted[number].argmax()))
    return found


def _next(session: Session[Any]) -> NDArray[np.float32]:
    """Log-probabilities float32 [1, V] of what follows the text."""
    with session.sequence.forward([], rows=[-1]) as held:
        return log_softmax(held.logits[:1])


def _row(engine: Engine, name: str, way: Way, kv: str, found: _Found) -> dict[str, Any]:
    return {
        "session": name,
        "way": way.name,
        "engine": engine.backend.name,
        "kv": kv,
        "tokens": sum(found.tokens),
        "tokens_a_key": mean(found.keys),
        "ms": 1e3 * median(found.seconds),
        "p95_ms": 1e3 * _p95(found.seconds),
        "kl_nats": mean(found.nats) if found.nats else None,
        "same_top_1": mean(found.same) if found.same else None,
        "compared": len(found.nats),
    }


# Keys in a long file


def _keys(engine: Engine, bundle: Bundle, tokenizer: Tokenizer, job: EditJob) -> dict[str, Any]:
    """First drafts of `tokens` tokens, each in turn with the same number decoded alone."""
    way = ways(tokenizer)[0]
    moments = islice(TypingSession.read(LONG).moments(), job.events + _WARM_KEYS + 1)
    first = way.prompt(next(moments))
    room: dict[str, Any] = {
        "context_tokens": len(first) + 1024,
        "draft_tokens": max(job.tokens, DEFAULT_DRAFT_TOKENS),
        "sink_tokens": _fixed_tokens(tokenizer),
    }
    with engine.session(kv=job.kv[-1], **room) as session:
        fill(cast(Cache, session.sequence.cache), bundle.config, len(first))
        session.sequence.adopt(first, None, np.zeros(0, np.int32))
        session.prefill()
        timed = [_key(session, way, now, job.tokens) for now in moments]
    timed = timed[_WARM_KEYS:]
    own, alone, around = ([row[i] for row in timed] for i in range(3))
    return {
        "context": len(first),
        "kv": job.kv[-1],
        "draft_tokens": job.tokens,
        "events": len(timed),
        "ms": 1e3 * median(own),
        "p95_ms": 1e3 * _p95(own),
        "alone_ms": 1e3 * median(alone),
        "ratio": median(a / b for a, b in zip(own, alone, strict=True)),
        "around_ms": 1e3 * median(around),
    }


def _key(session: Session[Any], way: Way, now: Moment, tokens: int) -> tuple[float, float, float]:
    """Seconds of a first draft after an event, of its tokens alone, and before any pass."""
    since = perf_counter()
    session.align(way.prompt(now), edits=True)
    around = perf_counter() - since
    session.prefill()
    session.drafts(1, tokens, method=writer_named("branches"), stop_ids=(), exact=False)
    own = perf_counter() - since
    since = perf_counter()
    written = list(session.generate(tokens, sampling=Sampling(temperature=0), stop_ids=()))
    alone = perf_counter() - since
    session.rollback(len(written))
    return own, alone, around


def print_report(data: dict[str, Any]) -> None:
    """The tables for people."""
    cells = [
        (
            row["session"], row["way"], row["tokens"], f"{row['tokens_a_key']:.1f}",
            f"{row['tokens_a_key_p95']:.0f}", row["tokens_a_key_most"],
            f"{row['tokens_elsewhere']:.0f}",
        )
        for row in data["counts"]
    ]  # fmt: skip
    output.print_table(cells, header=_HEADER_COUNTS)
    if "passes" in data:
        output.print_data("")
        output.print_table([_pass_cells(row) for row in data["passes"]], header=_HEADER_PASSES)
    if "keys" in data:
        keys = data["keys"]
        output.print_data(
            f"\na key in {keys['context']} tokens: the first draft of {keys['draft_tokens']} "
            f"tokens after {keys['ms']:.1f} ms (p95 {keys['p95_ms']:.1f}), {keys['ratio']:.2f} "
            f"times these tokens alone; {keys['around_ms']:.1f} ms of it before any pass"
        )
    for row in data["around"]:
        output.print_data(
            f"{row['lines']} lines, an engine that takes no time: a change {row['change_ms']:.2f} "
            f"ms (p95 {row['change_p95_ms']:.2f}), then the answer {row['answer_ms']:.2f} ms "
            f"(p95 {row['answer_p95_ms']:.2f})"
        )
    _print_start(data["start"])


def _print_start(start: dict[str, float | None]) -> None:
    extension = start["extension_ms"]
    built = "it is not built" if extension is None else f"active after {extension:.0f} ms"
    output.print_data(
        f"kvq lsp: its first answer {start['server_ms']:.0f} ms after it was started; the VS Code "
        f"extension: {built}"
    )


def _pass_cells(row: dict[str, Any]) -> tuple[str, ...]:
    name = row["way"] if row["engine"] != LLAMA else f"{LLAMA}, {row['way']}"
    missing = row["kl_nats"] is None
    return (
        row["session"], name, row["kv"], f"{row['tokens_a_key']:.1f}", f"{row['ms']:.1f}",
        f"{row['p95_ms']:.1f}", "-" if missing else f"{row['kl_nats']:.4f}",
        "-" if missing else f"{row['same_top_1']:.1%}",
    )  # fmt: skip
