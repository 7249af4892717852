"""Measures what drafts gain: every drafter on every workload, in turn with plain decoding.

A model of random weights (`--shape`) writes nothing worth guessing. There each workload's answer is
replayed: the model computes every pass as always, and then its choice is replaced by the token that
the text really goes on with. Times are the shape's, acceptance is the text's, as it would be for a
model that writes exactly this; its tokens are those of the embedded model. What such a model
guesses by itself on fewer bits or layers is made right as often as `right` says. Any other model
writes greedily what it likes, and acceptance is its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError, UsageError, argument
from kvq_apps.bench.suite import Setup
from kvq_apps.names.model_path import resolve_model
from kvq_apps.settings import flags
from kvq_apps.settings.flag_values import check_range
from kvq_apps.terminal import output
from kvq_lab.workloads import Workload, other_text, workloads
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.drafter import Drafter
from kvq_runtime.answer.generation import Step
from kvq_runtime.backends import WHOLE, Backend, Mode, SequencePass
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passes import run
from kvq_runtime.session.session import Session
from kvq_runtime.session.snapshot import Snapshot
from kvq_specdraft import DRAFTERS, drafter_named

PLAIN = "none"
_HEADER = (
    "workload", "prompt", "drafter", "x plain", "(best)", "right", "tokens/pass", "guessing",
    "tok/s",
)  # fmt: skip
# Rows of a pass that are timed, and how often.
_MOST_ROWS = 16
_PASSES = 7
# Of an answer, written before another one is gone on with.
_TURN_TOKENS = 16
_HALVES = Mode(view="hi")
# Above every logit of a model.
_CERTAIN = 1e9


# Those that draft for every model; few have a draft head.
ANY_MODELS = tuple(name for name in DRAFTERS if name != "mtp")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftJob:
    """Asks for at most `tokens` of each answer, `repeat` times; `replay`: see above.

    Prompts are filled up to each of `contexts` tokens with another text before them, again and
    again where it is shorter; 0: as they are. `right` is the share of right guesses where a
    replayed model makes them by itself. `drafters` are written as `--draft` has them; the model
    that drafts for another is `nano`.
    """

    replay: bool
    repeat: int = 5
    tokens: int = 256
    contexts: tuple[int, ...] = (0,)
    right: float = 0.85
    drafters: tuple[str, ...] = ANY_MODELS

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        check_range(1, predict=self.tokens, repeat=self.repeat)
        if not 0 <= self.right <= 1:
            raise UsageError(f"{argument('--right')} {self.right} is not possible: give 0 to 1")
        for text in self.drafters:
            drafter_named(_spelled(text, "nano"))


class Replay:
    """Computes the passes of a real backend, but chooses the tokens of `text`."""

    def __init__(self, backend: Backend[Any], *, right: float = 1.0) -> None:
        self.text: Sequence[int] = ()
        self._backend = backend
        self._right = right
        self._random = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(
        self, rows: Sequence[SequencePass[Any]], *, rope_long: bool = False
    ) -> list[NDArray[np.float32]]:
        """Runs `Backend.forward`; a row at position p then chooses the text's token p + 1.

        A pass of less than the whole model does so as often as it is to be right.
        """
        logits = [part.copy() for part in self._backend.forward(rows, rope_long=rope_long)]
        for sequence, part in zip(rows, logits, strict=True):
            places = sequence.positions[sequence.logit_rows].tolist()
            for row, values in zip(places, part, strict=True):
                hits = sequence.mode == WHOLE or self._random.random() < self._right
                if row + 1 < len(self.text):
                    values[self.text[row + 1] if hits else 0] = _CERTAIN
        return logits


@dataclass(kw_only=True, slots=True)
class _Case:
    """Holds a drafter, its session after the prompt, and the seconds its answers took."""

    drafter: str
    make: Callable[[], Drafter] | None
    session: Session[Any]
    after_prompt: Snapshot
    seconds: list[float] = field(default_factory=list[float])
    answer: tuple[int, ...] = ()
    _steps: Iterator[Step] = field(default_factory=lambda: iter(()))

    def begin(self, tokens: int) -> None:
        """Begins an answer of so many tokens, with a drafter that knows the prompt only."""
        self.session.restore(self.after_prompt)
        self.session.drafter = None if self.make is None else self.make()
        self._steps = self.session.generate(tokens, sampling=Sampling(temperature=0), stop_ids=())
        self.seconds.append(0.0)
        self.answer = ()

    def go_on(self) -> bool:
        """Writes the answer's next tokens; returns whether there were any."""
        since = perf_counter()
        steps = list(islice(self._steps, _TURN_TOKENS))
        self.seconds[-1] += perf_counter() - since
        self.answer += tuple(step.token for step in steps)
        return bool(steps)


def measure(setup: Setup, job: DraftJob) -> dict[str, Any]:
    """Measures a row per context, workload and drafter, and passes. Raises `KvqError`."""
    drafters = {name: partial(_made, name) for name in job.drafters}
    with Engine(setup.files, threads=setup.threads, device=setup.device) as engine:
        tokenizer = _embedded_tokenizer() if job.replay else engine.tokenizer
        rows = _measured(engine, tokenizer, job, drafters, setup)
        passes = [_pass_times(engine, context, setup.session_options) for context in job.contexts]
        name, backend = engine.model.name, engine.backend.name
    return {
        "model": name,
        "backend": backend,
        "device": setup.device,
        "replayed": job.replay,
        "right": job.right,
        "repeat": job.repeat,
        "rows": rows,
        "passes": passes,
    }


def _measured(
    engine: Engine,
    tokenizer: Tokenizer,
    job: DraftJob,
    drafters: Mapping[str, Callable[[], Drafter]],
    setup: Setup,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    works = workloads()
    replay, backend = Replay(engine.backend, right=job.right), engine.backend
    if job.replay:
        engine.backend = cast(Any, replay)
    before = tokenizer.encode(other_text()) if max(job.contexts) else []
    for context in job.contexts:
        for number, work in enumerate(works):
            setup.progress(number, len(works), work.name)
            prompt = tokenizer.encode(work.prompt, start=True)
            missing = max(0, context - len(prompt))
            prompt = [*prompt[:1], *islice(cycle(before), missing), *prompt[1:]]
            answer = tokenizer.encode(work.answer)
            replay.text = [*prompt, *answer]
            tokens = min(job.tokens, len(answer)) if job.replay else job.tokens
            room = {"context_tokens": len(prompt) + tokens + 1}
            makers = {PLAIN: None, **drafters}
            cases = _opened(engine, makers, prompt, setup.session_options | room)
            rows += _rows(engine, work, cases, tokens, job.repeat)
    engine.backend = backend
    return rows


def _pass_times(engine: Engine, context: int, options: dict[str, Any]) -> dict[str, Any]:
    """Measures passes of 1 to 16 rows after `context` tokens, in turn: medians in milliseconds.

    `hi_ms`: of one row on the upper nibbles, what `quantspec` guesses with; None without them.
    """
    room: dict[str, Any] = {"context_tokens": context + 2 * _MOST_ROWS, "draft_tokens": _MOST_ROWS}
    seconds: dict[int, list[float]] = {rows: [] for rows in range(1, _MOST_ROWS + 1)}
    guesses: list[float] = []
    with engine.session(**options | room) as session:
        session.prefill([1 + place % 200 for place in range(max(1, context))])
        for _ in range(_PASSES):
            for rows, measured in seconds.items():
                ids = list(range(1, 1 + rows))
                since = perf_counter()
                with session.sequence.forward(ids):
                    measured.append(perf_counter() - since)
            if _reads_halves(engine):
                guesses.append(_guess_seconds(session))
    return {
        "context": context,
        "ms": {rows: 1e3 * median(measured) for rows, measured in seconds.items()},
        "hi_ms": 1e3 * median(guesses) if guesses else None,
    }


def _reads_halves(engine: Engine) -> bool:
    try:
        engine.backend.check_mode(_HALVES)
    except BackendError:
        return False
    return True


def _guess_seconds(session: Session[Any]) -> float:
    with session.sequence.branch() as branch:
        since = perf_counter()
        run(branch.extend([1], mode=_HALVES))
        seconds = perf_counter() - since
        branch.rewind(0)
    return seconds


def _rows(
    engine: Engine, work: Workload, cases: list[_Case], tokens: int, repeat: int
) -> list[dict[str, Any]]:
    """Measures one workload: plain decoding and all drafters in turn, `repeat` times."""
    try:
        cases = [case for case in cases if _possible(case)]
        for _ in range(1 + repeat):
            _write_in_turn(cases, tokens)
        for case in cases:
            del case.seconds[0]  # that brought the weights back
        plain = cases[0]
        # Not all products round alike for one row and for many.
        assert not engine.backend.rows_agree or all(case.answer == plain.answer for case in cases)
        return [_row(engine, work, case, plain) for case in cases[1:]]
    finally:
        for case in cases:
            case.session.close()


def _write_in_turn(cases: list[_Case], tokens: int) -> None:
    """Writes an answer of each, a few tokens at a time, so that all see the same minutes."""
    for case in cases:
        case.begin(tokens)
    turn, going = 0, True
    while going:
        first = turn % len(cases)
        going = any([case.go_on() for case in (*cases[first:], *cases[:first])])
        turn += 1


def _spelled(drafter: str, path: str) -> str:
    """Adds the model that drafts, where it is to be one and none is named."""
    name, _, written = drafter.partition(":")
    if name.rpartition("+")[2] != "model" or "path=" in written:
        return drafter
    return ",".join(filter(None, [f"{name}:path={path}", written]))


def _made(drafter: str) -> Drafter:
    models = drafter.partition(":")[0].endswith("model")
    ready = str(resolve_model("nano")) if models else drafter
    return drafter_named(_spelled(drafter, ready))


def _possible(case: _Case) -> bool:
    """Returns whether the model can have this drafter; names one that it cannot have."""
    try:
        case.session.drafter = None if case.make is None else case.make()
    except BackendError as error:
        output.print_note(f"{case.drafter} is left out: {flags.format_error(error)}")
        case.session.close()
        return False
    return True


def _opened(
    engine: Engine,
    makers: Mapping[str, Callable[[], Drafter] | None],
    prompt: list[int],
    options: dict[str, Any],
) -> list[_Case]:
    """Opens a case of each drafter; the prompt is read once."""
    sessions = {name: engine.session(**options) for name in makers}
    first = sessions[PLAIN]
    first.prefill(prompt)
    after = first.capture()
    return [
        _Case(drafter=name, make=make, session=sessions[name], after_prompt=after)
        for name, make in makers.items()
    ]


def _row(engine: Engine, work: Workload, case: _Case, plain: _Case) -> dict[str, Any]:
    stats = case.session.stats()
    drafted, accepted = stats.rounds.drafted_tokens, stats.rounds.accepted_tokens
    return {
        "workload": work.name,
        "engine": engine.backend.name,
        "drafter": case.drafter,
        "prompt_tokens": len(case.after_prompt.state.tokens),
        "new_tokens": len(case.answer),
        "ratio": median(a / b for a, b in zip(plain.seconds, case.seconds, strict=True)),
        "best_ratio": min(plain.seconds) / min(case.seconds),
        "accepted_share": accepted / drafted if drafted else None,
        "tokens_per_round": stats.tokens_per_round,
        "draft_share": stats.rounds.draft_ms
        / (stats.rounds.draft_ms + stats.rounds.pass_ms + stats.rounds.choose_ms),
        "tok_s": len(case.answer) / median(case.seconds),
        "plain_tok_s": len(case.answer) / median(plain.seconds),
    }


def _embedded_tokenizer() -> Tokenizer:
    tokenizer = Bundle.open(resolve_model("default")).tokenizer()
    assert tokenizer is not None
    return tokenizer


def print_report(data: dict[str, Any]) -> None:
    """Prints the rows as a table."""
    rows = [
        (
            row["workload"],
            str(row["prompt_tokens"]),
            row["drafter"],
            f"{row['ratio']:.2f}",
            f"{row['best_ratio']:.2f}",
            "-" if row["accepted_share"] is None else f"{row['accepted_share']:.0%}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['draft_share']:.0%}",
            f"{row['tok_s']:.1f}",
        )
        for row in data["rows"]
    ]
    output.print_table(rows, header=_HEADER)
    for times in data["passes"]:
        first = times["ms"][1]
        shares = " ".join(f"{rows}: {ms / first:.2f}" for rows, ms in times["ms"].items())
        output.print_data(f"\na pass after {times['context']} tokens by its rows, of one: {shares}")
        if times["hi_ms"]:
            output.print_data(f"one on the upper nibbles (f): {times['hi_ms'] / first:.2f}")
    forced = f"replayed texts, {data['right']:.0%} of its own guesses right"
    texts = forced if data["replayed"] else "its own greedy answers"
    output.print_data(f"\n{data['model']}, {data['threads']} threads, {texts}")
