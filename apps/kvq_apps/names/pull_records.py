"""Keeps a record of each pulled model: where it came from, and when.

The record is a small file in the bundle's folder. It is written last, so that a model with a record
is complete.
"""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvq.files import replace_file
from kvq_apps.names import known_models
from kvq_apps.names.known_models import RECORD_FILE, record_beside
from kvq_apps.names.model_names import is_name, local_name
from kvq_runtime.bundle.manifest import MANIFEST_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class PullRecord:
    """Holds a model's source in words, its licence, and when it was pulled (seconds since 1970)."""

    source: str
    license: str
    pulled_s: float


def record_of(bundle: Path) -> PullRecord | None:
    """Returns the record of a bundle whose pull is complete, else None.

    A pull that was killed while it replaced the bundle may have left the record beside it.
    """
    for file in (bundle / RECORD_FILE, record_beside(bundle)):
        with suppress(OSError, ValueError, TypeError, KeyError):
            fields = json.loads(file.read_bytes())
            if (bundle / MANIFEST_FILE).exists():
                return PullRecord(
                    source=str(fields["source"]),
                    license=str(fields["license"]),
                    pulled_s=float(fields["pulled_s"]),
                )
    return None


@contextmanager
def keep_record(bundle: Path) -> Generator[None]:
    """Keeps the record of a pulled bundle while, inside, a bundle without a record replaces it."""
    record, beside = record_of(bundle), record_beside(bundle)
    if record is None:
        with suppress(OSError):
            beside.unlink()
        yield
        return
    _write(beside, record)
    try:
        yield
    finally:
        if (bundle / RECORD_FILE).exists():
            beside.unlink(missing_ok=True)
        elif bundle.is_dir():
            beside.replace(bundle / RECORD_FILE)


def write_record(bundle: Path, record: PullRecord) -> None:
    """Makes the bundle a pulled model. Raises `OSError`."""
    _write(bundle / RECORD_FILE, record)


def pulled_bundle(name: str) -> Path | None:
    """Returns the bundle of the pulled model called `name`, with or without the hub's address."""
    name = local_name(name)
    folder = known_models.pulled_folder(name)
    return folder if is_name(name) and record_of(folder) is not None else None


def latest_name() -> str | None:
    """Returns the name of the model pulled last."""
    return max(_dated_names(), default=(0.0, None))[1]


def _write(file: Path, record: PullRecord) -> None:
    with replace_file(file) as stream:
        stream.write(json.dumps(asdict(record)).encode())


def _dated_names() -> Iterator[tuple[float, str]]:
    """Yields the time and the name of each pulled model."""
    folder = known_models.models_folder()
    for bundle in sorted(folder.glob("[!.]*")) if folder.is_dir() else ():
        record = record_of(bundle)
        if record is not None:
            yield record.pulled_s, known_models.pulled_name(bundle)
