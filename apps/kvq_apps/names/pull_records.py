"""Keeps a record of each pulled model: where it came from, and when.

The record is a small file in the bundle's folder. A pull writes it before the folder gets its name,
so that the record comes and goes with its bundle.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvq.files import replace_file
from kvq_apps.names import known_models
from kvq_apps.names.known_models import RECORD_FILE
from kvq_apps.names.model_names import is_name, local_name
from kvq_runtime.bundle.manifest import MANIFEST_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class PullRecord:
    """Holds a model's source in words, its licence, and when it was pulled (seconds since 1970)."""

    source: str
    license: str
    pulled_s: float


def record_of(bundle: Path) -> PullRecord | None:
    """Returns the record of a pulled bundle, else None."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        fields = json.loads((bundle / RECORD_FILE).read_bytes())
        if (bundle / MANIFEST_FILE).exists():
            return PullRecord(
                source=str(fields["source"]),
                license=str(fields["license"]),
                pulled_s=float(fields["pulled_s"]),
            )
    return None


def write_record(bundle: Path, record: PullRecord) -> None:
    """Makes the bundle a pulled model. Raises `OSError`."""
    with replace_file(bundle / RECORD_FILE) as stream:
        stream.write(json.dumps(asdict(record)).encode())


def pulled_bundle(name: str) -> Path | None:
    """Returns the bundle of the pulled model called `name`, with or without the hub's address."""
    name = local_name(name)
    folder = known_models.pulled_folder(name)
    return folder if is_name(name) and record_of(folder) is not None else None


def latest_name() -> str | None:
    """Returns the name of the model pulled last."""
    dated = [
        (record.pulled_s, known_models.pulled_name(bundle))
        for bundle in known_models.models_folder().glob("[!.]*")
        if (record := record_of(bundle)) is not None
    ]
    return max(dated, default=(0.0, None))[1]
