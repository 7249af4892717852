"""Files of many texts: JSON lines, plain or compressed, one object per line; or one plain text."""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvq.errors import DataError
from kvq.json_values import is_object
from kvq_apps import text_input

_OPENERS = {".jsonl": open, ".gz": gzip.open, ".xz": lzma.open}


def is_records(path: str) -> bool:
    """Whether a file's name says that it holds JSON lines."""
    return path.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz"))


def records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line that is not blank. Raises `DataError` naming the line."""
    try:
        with _OPENERS[Path(path).suffix](path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _record(line, f"{path}:{number}")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it is cut short"
        raise DataError(f"{path} cannot be read: {reason}") from error


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not is_object(value):
        raise DataError(f"{place} is not a JSON object; give one object per line")
    return value


def field(record: Mapping[str, Any], name: str, place: str) -> str:
    """A text of a record. Raises `DataError` when it is missing or something else."""
    value = record.get(name)
    if not isinstance(value, str):
        raise DataError(f"{place} has no text {name!r}; it has {', '.join(record) or 'nothing'}")
    return value


def training_texts(path: str) -> Iterator[str]:
    """The texts of a file: itself, or each record's `text` unless it says `held_out`."""
    if not is_records(path):
        yield text_input.read_text(path)
        return
    for place, record in records(path):
        if record.get("held_out") is not True:
            yield field(record, "text", place)


def may_judge(record: Mapping[str, Any]) -> bool:
    """Whether a record's text may judge a model on code: not trained on, and Python if it says."""
    source = str(record.get("source", ".py"))
    return record.get("held_out") is not False and source.endswith(".py")
