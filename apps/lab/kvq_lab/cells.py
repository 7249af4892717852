"""`kvq eval --sweep --ray`: the cells of a sweep as tasks of Ray, in the same file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import ray
from ray.exceptions import RayTaskError

from kvq.errors import BudgetError
from kvq_apps.evaluation.cache_setting import UNQUANTIZED, CacheSetting
from kvq_apps.evaluation.measurement import Measurement
from kvq_apps.evaluation.tasks import Material
from kvq_apps.output import Shown
from kvq_lab.sweep import Sweep, SweepFile, cell, key_of
from kvq_runtime.named_engine import Engine
from kvq_runtime.session import unseen

# A task, a budget and the caches that are measured in it by one process.
Job = tuple[str, Fraction | None, tuple[CacheSetting, ...]]
Outcome = Measurement | BudgetError


def run(
    model: str | None,
    engine_options: Mapping[str, Any],
    material: Material,
    sweep: Sweep,
    file: SweepFile,
    progress: Shown,
) -> None:
    """Measures every cell that `file` does not hold yet, as many at once as Ray has CPUs for.

    A cell is in the file once it is measured, and all are in the sweep's order at the end. Raises
    what measuring one raised.
    """
    threads = engine_options.get("threads", 1)
    measure = ray.remote(num_cpus=threads)(_measure)
    shared = ray.put((replace(material, tokenizer=None), sweep))
    options = {**engine_options, "threads": threads}
    waiting = {measure.remote(model, options, shared, job): job for job in _jobs(sweep, file)}
    total = done = sum(len(settings) for _, _, settings in waiting.values())
    while waiting:
        done = total - sum(len(settings) for _, _, settings in waiting.values())
        progress(done, total, f"{done} of {total} cells")
        (first,), _ = ray.wait(list(waiting), num_returns=1)
        task, budget, settings = waiting.pop(first)
        for setting, outcome in zip(settings, _outcomes(first), strict=True):
            file.add(cell(sweep, task, setting, budget, outcome))
    file.arrange(
        key_of(task, one, budget) for task, budget, settings in sweep.batches() for one in settings
    )
    progress(1, 1, "done")


def _jobs(sweep: Sweep, file: SweepFile) -> Iterator[Job]:
    """What is left: a cell each, but those of `kld` compare with logits that are computed once."""
    for task, budget, settings in sweep.batches():
        left = tuple(one for one in settings if key_of(task, one, budget) not in file)
        if task == "kld" and left:
            yield task, budget, left
        else:
            yield from ((task, budget, (one,)) for one in left)


def _outcomes(reference: Any) -> Sequence[Outcome]:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None


def _measure(
    model: str | None, options: Mapping[str, Any], shared: tuple[Material, Sweep], job: Job
) -> list[Outcome]:
    """The outcomes of one job, in a process of Ray's."""
    engine = _opened(model, tuple(options.items()))
    (material, sweep), (task, budget, settings) = shared, job
    opened = [
        one.opener(engine.session, sweep.context_tokens, sweep.budget_bytes(budget))
        for one in settings
    ]
    exact = UNQUANTIZED.opener(engine.session, sweep.context_tokens)
    return list(
        replace(material, tokenizer=engine.tokenizer).measure_all(task, opened, exact, unseen)
    )


@lru_cache(1)
def _opened(model: str | None, options: tuple[tuple[str, Any], ...]) -> Engine:
    """The model, which a process opens once for all its tasks."""
    return Engine.open(model, **dict(options))
