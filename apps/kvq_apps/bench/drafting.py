"""What drafts gain: every drafter on every workload, in turn with plain decoding of the same cache.

A model of random weights (`--shape`) writes nothing worth guessing. There each workload's answer is
replayed: the model computes every pass as always, and then its choice is replaced by the token that
the text really goes on with. Times are the shape's, acceptance is the text's, as it would be for a
model that writes exactly this; its tokens are those of the embedded model. What such a model
guesses by itself on fewer bits or layers is made right as often as `right` says. Any other model
writes greedily what it likes, and acceptance is its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError, UsageError
from kvq_apps import output
from kvq_apps.bench.workloads import Workload, workloads
from kvq_apps.model_path import resolve_model
from kvq_apps.output import Shown
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends import WHOLE, Backend, ModelFiles, Pass
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.drafter import Drafter
from kvq_runtime.engine import Engine
from kvq_runtime.session import Session
from kvq_runtime.snapshot import Snapshot
from kvq_specdraft import DRAFTERS, drafter_named

PLAIN = "none"
# Above every logit of a model.
_CERTAIN = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftJob:
    """What is measured: `tokens` of each answer at most, `repeat` times; `replay`: see above.

    `right` is the share of right guesses where a replayed model makes them by itself. `drafters`
    as `--draft` has them; the model that drafts for another is `nano`.
    """

    replay: bool
    repeat: int = 5
    tokens: int = 256
    right: float = 0.85
    drafters: tuple[str, ...] = tuple(DRAFTERS)

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        if not 0 <= self.right <= 1:
            raise UsageError(f"--right {self.right} is not possible: give 0 to 1")
        for text in self.drafters:
            drafter_named(_spelled(text, "nano"))
        if self.repeat < 1:
            raise UsageError(f"--repeat {self.repeat} is not possible: give 1 or more")


class Replay:
    """A backend whose passes are real, and whose greedy choices are those of `text`."""

    def __init__(self, backend: Backend[Any], *, right: float = 1.0) -> None:
        self.text: Sequence[int] = ()
        self._backend = backend
        self._right = right
        self._random = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, one_pass: Pass[Any]) -> list[NDArray[np.float32]]:
        """See `Backend.forward`; a row at position p chooses the text's token p + 1.

        One of less than the whole model does so as often as it is to be right.
        """
        logits = [part.copy() for part in self._backend.forward(one_pass)]
        for rows, part in zip(one_pass.rows, logits, strict=True):
            for row, own in zip(rows.positions[rows.wanted].tolist(), part, strict=True):
                hits = one_pass.mode == WHOLE or self._random.random() < self._right
                if row + 1 < len(self.text):
                    own[self.text[row + 1] if hits else 0] = _CERTAIN
        return logits


@dataclass(kw_only=True, slots=True)
class _Case:
    """A drafter, its session after the prompt, and the seconds its answers took."""

    drafter: str
    session: Session[Any]
    after_prompt: Snapshot
    seconds: list[float] = field(default_factory=list[float])
    answer: tuple[int, ...] = ()

    def run(self, tokens: int) -> None:
        """Writes the answer once, with a drafter that knows the prompt only."""
        self.session.restore(self.after_prompt)
        self.session.drafter = _made(self.drafter)
        since = perf_counter()
        steps = list(self.session.generate(tokens, sampling=Sampling(temperature=0), stop_ids=()))
        self.seconds.append(perf_counter() - since)
        self.answer = tuple(step.token for step in steps)


def measure(
    files: ModelFiles,
    job: DraftJob,
    session_options: dict[str, Any],
    threads: int,
    progress: Shown,
) -> dict[str, Any]:
    """A row for each workload and drafter. Raises `KvqError`."""
    rows: list[dict[str, Any]] = []
    works = workloads()
    with Engine(files, threads=threads) as engine:
        tokenizer = _embedded_tokenizer() if job.replay else engine.tokenizer
        replay = Replay(engine.backend, right=job.right)
        if job.replay:
            engine.backend = cast(Any, replay)
        for number, work in enumerate(works):
            progress(number, len(works), work.name)
            prompt = tokenizer.encode(work.prompt, start=True)
            answer = tokenizer.encode(work.answer)
            replay.text = [*prompt, *answer]
            tokens = min(job.tokens, len(answer))
            context = {"context_tokens": len(prompt) + tokens + 1}
            rows += _rows(engine, work, prompt, tokens, job, session_options | context)
        name = engine.model.name
    return {
        "model": name,
        "replayed": job.replay,
        "right": job.right,
        "repeat": job.repeat,
        "rows": rows,
    }


def _rows(
    engine: Engine,
    work: Workload,
    prompt: list[int],
    tokens: int,
    job: DraftJob,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """The rows of one workload: plain decoding and all drafters in turn, `repeat` times."""
    cases = [_opened(engine, name, prompt, options) for name in (PLAIN, *job.drafters)]
    try:
        cases = [case for case in cases if _possible(case)]
        for case in cases:
            case.run(tokens)  # brings the weights back, and is not counted
            case.seconds.clear()
        for _ in range(job.repeat):
            for case in cases:
                case.run(tokens)
        plain = cases[0]
        assert all(case.answer == plain.answer for case in cases)
        return [_row(work, case, plain, len(prompt)) for case in cases[1:]]
    finally:
        for case in cases:
            case.session.close()


def _spelled(drafter: str, path: str) -> str:
    """With the model that drafts, where it is to be one and none is named."""
    name, _, written = drafter.partition(":")
    if name != "model" or "path=" in written:
        return drafter
    return ",".join(filter(None, [f"model:path={path}", written]))


def _made(drafter: str) -> Drafter | None:
    if drafter == PLAIN:
        return None
    ready = drafter if drafter.partition(":")[0] != "model" else str(resolve_model("nano"))
    return drafter_named(_spelled(drafter, ready))


def _possible(case: _Case) -> bool:
    """Whether the model can have this drafter; one that cannot is named and left out."""
    try:
        case.session.drafter = _made(case.drafter)
    except BackendError as error:
        output.print_note(f"{case.drafter} is left out: {error}")
        case.session.close()
        return False
    return True


def _opened(engine: Engine, name: str, prompt: list[int], options: dict[str, Any]) -> _Case:
    session = engine.session(**options)
    session.prefill(prompt)
    return _Case(drafter=name, session=session, after_prompt=session.capture())


def _row(work: Workload, case: _Case, plain: _Case, prompt_tokens: int) -> dict[str, Any]:
    stats = case.session.stats()
    return {
        "workload": work.name,
        "drafter": case.drafter,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(case.answer),
        "ratio": median(plain.seconds) / median(case.seconds),
        "accepted_share": (
            stats.accepted_tokens / stats.drafted_tokens if stats.drafted_tokens else None
        ),
        "tokens_per_round": stats.tokens_per_round,
        "tok_s": len(case.answer) / median(case.seconds),
        "plain_tok_s": len(case.answer) / median(plain.seconds),
    }


def _embedded_tokenizer() -> Tokenizer:
    found = Bundle.open(resolve_model("default")).tokenizer()
    assert found is not None
    return found


def print_report(data: dict[str, Any]) -> None:
    """The same as a table."""
    rows = [
        (
            row["workload"],
            str(row["prompt_tokens"]),
            row["drafter"],
            f"{row['ratio']:.2f}",
            "-" if row["accepted_share"] is None else f"{row['accepted_share']:.0%}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['tok_s']:.1f}",
        )
        for row in data["rows"]
    ]
    header = ("workload", "prompt", "drafter", "x plain", "right", "tokens/pass", "tok/s")
    output.print_table(rows, header=header)
    forced = f"replayed texts, {data['right']:.0%} of its own guesses right"
    texts = forced if data["replayed"] else "its own greedy answers"
    output.print_data(f"\n{data['model']}, {data['threads']} threads, {texts}")
