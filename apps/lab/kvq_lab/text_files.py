"""Files of many texts: JSON lines, plain or compressed, one object per line; or one plain text."""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvq.errors import DataError, reason_of
from kvq.json_values import is_object
from kvq_apps.terminal import text_input

_OPENERS = {".jsonl": open, ".gz": gzip.open, ".xz": lzma.open}


def is_records(path: str) -> bool:
    """Tells whether a file's name says that it holds JSON lines."""
    return path.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz"))


def records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, object) of every line that is not blank. Raises `DataError` with the line."""
    try:
        with _OPENERS[Path(path).suffix](path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _record(line, f"{path}:{number}")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        why = reason_of(error) if str(error) else "it is cut short"
        raise DataError(f"{path} cannot be read: {why}") from error


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not is_object(value):
        raise DataError(f"{place} is not a JSON object; give one object per line")
    return value


def field(record: Mapping[str, Any], name: str, place: str) -> str:
    """Returns a text of a record. Raises `DataError` when it is missing or no text."""
    value = record.get(name)
    if not isinstance(value, str):
        raise DataError(f"{place} has no text {name!r}; it has {', '.join(record) or 'nothing'}")
    return value


def training_texts(path: str) -> Iterator[str]:
    """Yields the texts of a file: itself, or each record's `text` unless it says `held_out`."""
    if not is_records(path):
        yield text_input.read_text(path)
        return
    for place, record in records(path):
        if record.get("held_out") is not True:
            yield field(record, "text", place)


def may_judge(record: Mapping[str, Any]) -> bool:
    """Tells whether a record may judge a model on code: it is not trained on, and Python."""
    source = str(record.get("source", ".py"))
    return record.get("held_out") is not False and source.endswith(".py")
