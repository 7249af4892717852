"""Policies against budgets against tasks: what a cache of N bytes still knows.

Budgets are shares of the context's fp16 bytes. The results lie in one JSON file that is replaced
after every cell; a sweep that finds its file goes on where it ended. A budget too small for its
plan is a result like any other: the cell says why it was refused.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvq.errors import BudgetError, DataError, UsageError, argument
from kvq.files import replace_file
from kvq_apps.evaluation.cache_setting import UNQUANTIZED, CacheSetting
from kvq_apps.evaluation.measurement import Measurement
from kvq_apps.evaluation.tasks import Material
from kvq_apps.settings import flags
from kvq_apps.terminal.output import ShowProgress
from kvq_runtime.session.session import Session

FORMAT, VERSION = "kvq-sweep", 1
TASKS = ("kld", "passkey", "retrieval")
BUDGETS = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 6), Fraction(1, 8))
# What a cell without a policy and a budget is called: the cache that everything is compared with.
EXACT = "unquantised"

Key = tuple[str, str, str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Asks for tasks, caches and shares of the `fp16_bytes` that `context_tokens` need."""

    tasks: tuple[str, ...]
    settings: tuple[CacheSetting, ...]
    budgets: tuple[Fraction, ...]
    context_tokens: int
    fp16_bytes: int

    def budget_bytes(self, budget: Fraction | None) -> int | None:
        """Returns the bytes of a share; None for the unquantised cache."""
        return None if budget is None else int(budget * self.fp16_bytes)

    def batches(self) -> Iterator[tuple[str, Fraction | None, tuple[CacheSetting, ...]]]:
        """Yields cells measured together: (task, budget, caches), the unquantised one first."""
        for task in self.tasks:
            yield task, None, (UNQUANTIZED,)
            for budget in self.budgets:
                yield task, budget, self.settings


class SweepFile:
    """Holds the JSON of a sweep: its material and the cells measured so far."""

    def __init__(self, path: Path, subject: Mapping[str, Any], tasks: Mapping[str, Any]) -> None:
        """Opens a new file or one to go on with: `subject` is judged, `tasks` have the material.

        Raises `UsageError` when the file is another sweep's, `DataError` when it cannot be used.
        """
        self.path = path
        self.data: dict[str, Any] = {
            "format": FORMAT, "version": VERSION, **subject, "tasks": dict(tasks), "cells": [],
        }  # fmt: skip
        if path.exists():
            self._resume(_read(path), subject, tasks)

    def __contains__(self, key: Key) -> bool:
        return any(_key(cell) == key for cell in self.data["cells"])

    def add(self, cell: Mapping[str, Any]) -> None:
        """Keeps a cell, on disk too: the file holds it whole or is what it was before."""
        self.data["cells"].append(dict(cell))
        content = json.dumps(self.data, indent=1) + "\n"
        try:
            with replace_file(self.path, private=False) as stream:
                stream.write(content.encode())
        except OSError as error:
            raise UsageError(
                f"{argument('--out')} {self.path} cannot be written: {error.strerror}"
            ) from error

    def _resume(
        self, data: dict[str, Any], subject: Mapping[str, Any], tasks: Mapping[str, Any]
    ) -> None:
        both = [task for task in tasks if task in data["tasks"]]
        asked_for = {**subject, **{task: tasks[task] for task in both}}
        on_disk = {**data, **{task: data["tasks"][task] for task in both}}
        other = [name for name, value in asked_for.items() if on_disk.get(name) != value]
        if other:
            raise UsageError(
                f"{argument('--out')} {self.path} holds a sweep that differs in: "
                f"{', '.join(other)}; give another name, or delete it to begin again"
            )
        self.data["tasks"] = data["tasks"] | dict(tasks)
        self.data["cells"] = data["cells"]


def check_out(path: Path) -> None:
    """Raises `UsageError` before anything is measured when the file could not be written."""
    if not path.parent.is_dir():
        raise UsageError(f"{argument('--out')} {path}: there is no folder {path.parent}")
    if path.suffix.lower() != ".json":
        raise UsageError(
            f"{argument('--out')} {path}: a sweep writes one JSON file; give a name in .json"
        )


def check_settings(open_session: Callable[..., Session[Any]], sweep: Sweep) -> None:
    """Raises `UsageError` for a policy that cannot be opened, before anything is measured."""
    for setting in sweep.settings:
        setting.opener(open_session, sweep.context_tokens)().close()


def run(
    open_session: Callable[..., Session[Any]],
    material: Material,
    sweep: Sweep,
    file: SweepFile,
    progress: ShowProgress,
) -> None:
    """Measures every cell that `file` does not hold yet."""
    exact = UNQUANTIZED.opener(open_session, sweep.context_tokens)
    for task, budget, settings in sweep.batches():
        waiting = [setting for setting in settings if key_of(task, setting, budget) not in file]
        if not waiting:
            continue
        num_bytes = sweep.budget_bytes(budget)
        sessions = [
            setting.opener(open_session, sweep.context_tokens, num_bytes) for setting in waiting
        ]
        label = f"{task} at {budget or 'fp'}"
        outcomes = material.measure_all(
            task, sessions, exact, lambda done, total, label=label: progress(done, total, label)
        )
        for setting, outcome in zip(waiting, outcomes, strict=True):
            file.add(cell(sweep, task, setting, budget, outcome))
    progress(1, 1, "done")


def cell(
    sweep: Sweep,
    task: str,
    setting: CacheSetting,
    budget: Fraction | None,
    outcome: Measurement | BudgetError,
) -> dict[str, Any]:
    """Returns what the file holds of one outcome."""
    place: dict[str, Any] = {
        "task": task,
        "policy": setting.policy or EXACT,
        "kv": setting.kv,
        "budget": None if budget is None else str(budget),
        "budget_bytes": sweep.budget_bytes(budget),
    }
    if isinstance(outcome, BudgetError):
        return place | {"refused": flags.format_error(outcome)}
    measured = asdict(outcome)
    details = measured.pop("details")
    return place | {"held": outcome.kv_bytes / sweep.fp16_bytes} | measured | details


def key_of(task: str, setting: CacheSetting, budget: Fraction | None) -> Key:
    """Returns what a cell is found by in the file."""
    return task, setting.policy or EXACT, setting.kv, None if budget is None else str(budget)


def _key(cell: Mapping[str, Any]) -> Key:
    return cell["task"], cell["policy"], cell["kv"], cell["budget"]


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise KeyError("format")
        if data["version"] != VERSION:
            raise DataError(
                f"{path} is a sweep of version {data['version']}, this is version {VERSION}; "
                f"give another {argument('--out')}"
            )
        for cell in data["cells"]:
            _key(cell)
        dict(data["tasks"])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"{path} is no sweep; give another {argument('--out')}, or delete it"
        ) from None
    return data
