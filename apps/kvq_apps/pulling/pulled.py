"""What lies in the models folder, and what is known of each: where it came from, and when.

A model is there once its record is, a small file in the bundle's folder that is written last.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvq.errors import UsageError
from kvq.files import replace_file
from kvq_apps import known_models
from kvq_apps.pulling import last_use
from kvq_apps.pulling.names import is_name, name_here
from kvq_runtime.manifest import MANIFEST_FILE

RECORD_FILE = "pulled.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Where a model came from: the source in words, its licence, and when (seconds since 1970)."""

    source: str
    license: str
    pulled_s: float


def record_of(bundle: Path) -> Record | None:
    """What is known of the bundle, if it was pulled, and that to its end."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((bundle / RECORD_FILE).read_bytes())
        if (bundle / MANIFEST_FILE).exists():
            return Record(
                source=str(found["source"]),
                license=str(found["license"]),
                pulled_s=float(found["pulled_s"]),
            )
    return None


def write_record(bundle: Path, record: Record) -> None:
    """From now on the bundle is a pulled model. Raises `OSError`."""
    with replace_file(bundle / RECORD_FILE) as stream:
        stream.write(json.dumps(asdict(record)).encode())


def pulled(name: str) -> Path | None:
    """The bundle of the pulled model called `name`, as it was asked for or as it is called here."""
    name = name_here(name)
    folder = known_models.pulled_folder(name)
    return folder if is_name(name) and record_of(folder) is not None else None


def latest() -> str | None:
    """The name of the model pulled last."""
    return max(_all(), default=(0.0, None))[1]


def remove(name: str) -> tuple[Path, int]:
    """Deletes the pulled model called `name`: its folder, and the bytes it took.

    Raises `UsageError` for what was not pulled.
    """
    folder = pulled(name)
    if folder is None:
        here = ", ".join(sorted(one for _, one in _all())) or "none is here"
        raise UsageError(
            f"{name} was not pulled, and `kvq models rm` deletes only what was: {here}; "
            "`kvq inspect --remove` deletes a bundle that was exported"
        )
    num_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    last_use.forget(folder)
    (folder / RECORD_FILE).unlink()
    known_models.remove(folder)
    return folder, num_bytes


def _all() -> Iterator[tuple[float, str]]:
    """When each model was pulled, and its name."""
    folder = known_models.models_folder()
    for bundle in sorted(folder.glob("[!.]*")) if folder.is_dir() else ():
        record = record_of(bundle)
        if record is not None:
            yield record.pulled_s, known_models.pulled_name(bundle)
