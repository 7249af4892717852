"""Tiny checkpoints and their bundles, each made once per run: to read, never to change.

A test that damages or replaces one copies it first (`shutil.copytree`). Worker processes of one
run share the folder, so whoever comes first makes what another waits for.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from filelock import FileLock

from kvq_apps.names.model_path import resolve_model
from kvq_apps.terminal.output import LOG
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_models.catalogue import EMBEDDED
from tiny import make_checkpoint, make_llama_checkpoint

# As a first use exports it, and as quickly as can be.
USUAL = ExportOptions(quality=False)
PLAIN = ExportOptions(quality=False, calibrate=False)
# Of which rounding leaves little in the way of what is compared.
EIGHT = ExportOptions(quality=False, weights=WeightFormat(bits=8))


def cut(file: Path, num_bytes: int = 1) -> None:
    """A copy that was not finished."""
    file.write_bytes(file.read_bytes()[:-num_bytes])


class Shelf:
    """The folder they lie in, by what they were asked to be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self, **config: Any) -> Path:
        """`make_llama_checkpoint` with these keys of its configuration; the folder is `tiny`."""
        return self.once("tiny", config, lambda path: make_llama_checkpoint(path, **config))

    def family(self, case: str, **options: Any) -> Path:
        """A row of `tiny.CASES`, as `make_checkpoint` saves it; the folder is `source`."""
        return self.once(
            "source", (case, options), lambda path: make_checkpoint(case, path, **options)
        )

    def bundle(self, options: ExportOptions = USUAL, **config: Any) -> Path:
        """That checkpoint exported; the folder is `bundle`."""
        source = self.checkpoint(**config)
        return self.exported(source, options)

    def exported(self, source: Path, options: ExportOptions = USUAL) -> Path:
        """Any checkpoint that no test changes, exported."""
        return self.once(
            "bundle", (source, options), lambda path: export_model(source, path, options)
        )

    def embedded(self, name: str) -> Path:
        """The embedded model `name`, as its first use exports it."""

        def make(cache: Path) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(cache))
                resolve_model(name, reporter=LOG)

        (bundle,) = (self.once("cache", name, make) / "kvq/bundles").iterdir()
        return bundle

    def used_before(self, cache: Path, names: Iterable[str] = EMBEDDED) -> None:
        """Makes a cache folder that of a user who has run these embedded models."""
        for bundle in map(self.embedded, names):
            copytree(bundle, cache / "kvq/bundles" / bundle.name, copy_function=os.link)

    def once(self, name: str, options: object, make: Callable[[Path], object]) -> Path:
        """What `make` writes at a path that ends with `name`, by its `options`."""
        folder = self.folder / hashlib.sha256(f"{name} {options}".encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        done = folder / "done"
        with FileLock(folder / "lock"):
            if not done.exists():
                make(folder / name)
                done.touch()
        return folder / name
