"""Time to the first token of a prompt, computed and with its later layers predicted, in turn."""

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvq.errors import UsageError, argument
from kvq_apps.bench.suite import Setup
from kvq_apps.settings.flag_values import check_range
from kvq_apps.terminal import output
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.prediction import prediction_named

DECODED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftJob:
    """Asks for prompts of each of `contexts` tokens, read in both ways `repeat` times."""

    contexts: tuple[int, ...] = (2048,)
    predict: str = "50%"
    repeat: int = 3

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        check_range(1, repeat=self.repeat, context=min(self.contexts))


def measure(setup: Setup, job: TtftJob) -> dict[str, Any]:
    """Measures a row for each length of prompt. Raises `KvqError`."""
    options = {name: value for name, value in setup.session_options.items() if name != "predict"}
    with Engine(setup.files, threads=setup.threads) as engine:
        prediction = prediction_named(job.predict, engine.model)
        if prediction is None or not prediction.mode.predicted:
            raise UsageError(
                f"{argument('--kv-predict')} {job.predict} predicts nothing; give a share such as "
                "50%"
            )
        rows = [_row(engine, job, context, options, setup) for context in job.contexts]
        for row in rows:
            row["layers"] = prediction.mode.predicted[0]
        name, layers = engine.model.name, engine.model.num_layers
    return {"model": name, "num_layers": layers, "predict": job.predict, "rows": rows}


def _row(
    engine: Engine, job: TtftJob, context: int, options: dict[str, Any], setup: Setup
) -> dict[str, Any]:
    """Measures medians, and that of the rounds' ratios. A first round of each is not counted."""
    numbers = np.random.default_rng(context)
    rounds: list[list[tuple[float, float, int]]] = []
    for turn in range(job.repeat + 1):
        setup.progress(turn, job.repeat + 1, f"{context} tokens")
        ways = ("off", job.predict)
        rounds.append([_timed(engine, numbers, way, context, options) for way in ways])
    exact, predicted = zip(*rounds[1:], strict=True)
    return {
        "prompt_tokens": context,
        "exact_ms": 1e3 * median(seconds for seconds, _, _ in exact),
        "predicted_ms": 1e3 * median(seconds for seconds, _, _ in predicted),
        "ratio": median(a[0] / b[0] for a, b in zip(exact, predicted, strict=True)),
        "decode_ratio": median(b[1] / a[1] for a, b in zip(exact, predicted, strict=True)),
        "predicted_tokens": predicted[0][2],
    }


def _timed(
    engine: Engine,
    numbers: np.random.Generator,
    predict: str,
    context: int,
    options: dict[str, Any],
) -> tuple[float, float, int]:
    """Measures the seconds to the first token and for the next ones, and counts predictions."""
    size = engine.model.vocab_size
    ids = numbers.integers(size // 4, size // 2, context).tolist()
    options = {"context_tokens": context + DECODED + 1} | options
    with engine.session(predict=predict, **options) as session:
        since = perf_counter()
        session.prefill(ids)
        steps = session.generate(DECODED, sampling=Sampling(temperature=0), stop_ids=())
        next(steps)
        first = perf_counter()
        for _ in steps:
            pass
        return first - since, perf_counter() - first, session.stats().edits.predicted_tokens


def print_report(data: dict[str, Any]) -> None:
    """Prints the rows as a table."""
    cells = [
        (
            row["prompt_tokens"], f"{row['exact_ms']:.0f}", f"{row['predicted_ms']:.0f}",
            f"{row['ratio']:.2f}", f"{row['layers']} of {data['num_layers']}",
            f"{row['decode_ratio']:.2f}",
        )
        for row in data["rows"]
    ]  # fmt: skip
    output.print_table(
        cells,
        header=(
            "prompt tokens", "ms to first token", "predicted", "times as fast", "layers computed",
            "decode, times computed's",
        ),
    )  # fmt: skip
