"""The file format of a saved session, and its checks.

Layout, integers little-endian: 8 bytes magic, uint32 header length, header (JSON), tokens (int64),
logits (float32), ages (int32), cache state, then the SHA-256 of everything before it. The header
holds format, version, what the session must agree on, and the length of each part. Magic, digest,
and the format and version in a JSON header are the same in every version, so any kvq can say what a
file of any other version is. `VERSION` rises with every change of what is written, also of the
cache's bytes (`PAGE_VERSION`).
"""

import hashlib
import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvq.errors import DataError, SnapshotError
from kvq.files import read_regular, replace_file
from kvq_runtime.backends import SequenceCache
from kvq_runtime.sequence.encoding import SequenceState

FORMAT = "kvq-session"
VERSION = 10
# Version 8 differs in the queries that it keeps and in places of convolutions and delta nets. What
# a session must agree on says where there are such.
READ_VERSIONS = (8, 9, VERSION)
MAGIC = b"kvq-sess"
PREFIX = struct.Struct("<8sI")
_DIGEST_BYTES = 32
# Bytes of an item of each part: tokens, logits, ages, cache.
_ITEM_BYTES = (8, 4, 4, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Holds a session at one moment, and what it must agree on to be restored.

    `generator` is the state of its numpy bit generator. `version` is that of the file it was read
    from, or would be written to.
    """

    identity: Mapping[str, Any]
    state: SequenceState
    generator: Mapping[str, Any]
    version: int = VERSION


def write(path: Path, copy: Snapshot) -> None:
    """Writes a whole file or none, from any thread. Raises `SnapshotError` where it cannot."""
    state = copy.state
    parts = (
        state.tokens.astype("<i8").tobytes(),
        b"" if state.logits is None else state.logits.astype("<f4").tobytes(),
        state.ages.astype("<i4").tobytes(),
        state.cache,
    )
    header = {
        "format": FORMAT,
        "version": VERSION,
        "identity": dict(copy.identity),
        "generator": dict(copy.generator),
        "part_bytes": [len(part) for part in parts],
    }
    encoded = json.dumps(header).encode()
    try:
        _replace(path, (PREFIX.pack(MAGIC, len(encoded)) + encoded, *parts))
    except OSError as error:
        raise SnapshotError(f"the session cannot be saved to {path}: {error.strerror}") from error


def check_state(source: Path | str, state: SequenceState, *, vocab_size: int) -> None:
    """Raises `SnapshotError` if `state`, found at `source`, is none of this model."""
    tokens, logits, ages = state.tokens, state.logits, state.ages
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise _damaged(source, f"holds tokens that are not the model's 0 to {vocab_size - 1}")
    if logits is not None and (len(logits) != vocab_size or not np.isfinite(logits).all()):
        raise _damaged(source, f"holds no {vocab_size} finite logits")
    if len(ages) > len(tokens) or (len(ages) and ages.min() < -1):
        raise _damaged(source, "holds ages that are not its tokens'")


def fill(source: Path | str, cache: SequenceCache, state: SequenceState) -> None:
    """Gives `cache` what `state` holds; raises `SnapshotError` and changes nothing if refused.

    The cache's tokens are the first of the session's. How many is known once it is loaded.
    """
    before = cache.state()
    cache.load_state(state.cache)
    if not len(state.ages) <= cache.tokens <= len(state.tokens):
        mismatch = f"holds {len(state.tokens)} tokens and a cache of {cache.tokens}"
        cache.load_state(before)
        raise _damaged(source, mismatch)


def examine(path: Path, *, most_bytes: int = sys.maxsize, private: bool = False) -> Snapshot:
    """Reads the file at `path`, of any model, and checks its digest, types and lengths.

    `private`: only a file of this user will do, and no link. `check_state` checks what depends on
    the model. Raises `SnapshotError`.
    """
    try:
        content = read_regular(path, most_bytes, through_links=not private, private=private)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    except DataError as error:
        raise SnapshotError(str(error)) from error
    header, offset = _header(path, content)
    tokens, logits, ages, cache = _parts(path, content, offset, header["part_bytes"])
    state = SequenceState(
        tokens=np.frombuffer(tokens, "<i8").astype(np.int64),
        logits=np.frombuffer(logits, "<f4").astype(np.float32) if logits else None,
        cache=cache,
        ages=np.frombuffer(ages, "<i4").astype(np.int32),
    )
    return Snapshot(
        identity=header["identity"],
        state=state,
        generator=_generator_state(path, header["generator"]),
        version=header["version"],
    )


def is_snapshot(path: Path) -> bool:
    """Decides whether the file at `path` begins as a saved session does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _header(path: Path, content: bytes) -> tuple[dict[str, Any], int]:
    """Returns the checked header and the place where the parts begin."""
    if content[: len(MAGIC)] != MAGIC:
        raise SnapshotError(f"{path} is not a saved session")
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(content) < PREFIX.size + _DIGEST_BYTES or hashlib.sha256(body).digest() != digest:
        raise SnapshotError(
            f"{path} is truncated or was altered after it was saved; save the session again"
        )
    offset = PREFIX.size + PREFIX.unpack_from(content)[1]
    try:
        header: Any = json.loads(content[PREFIX.size : offset])
        kind, version = header["format"], header["version"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise _damaged(path, "has a header that is none") from error
    if kind != FORMAT or type(version) is not int:
        raise _damaged(path, "has a header that is none")
    _check_version(path, version)
    types = {"identity": dict, "generator": dict, "part_bytes": list}
    if not all(isinstance(header.get(key), type) for key, type in types.items()):
        raise _damaged(path, "has a header that lacks something")
    return header, offset


def _check_version(path: Path, version: int) -> None:
    if version > VERSION:
        raise SnapshotError(
            f"{path} is a session of version {version}, newer than the {VERSION} this kvq reads; "
            "upgrade kvq-runtime, or read its text again and save the session again"
        )
    if version not in READ_VERSIONS:
        raise SnapshotError(
            f"{path} is a session of version {version}, older than the {VERSION} this kvq reads; "
            "read its text again and save the session again"
        )


def _generator_state(source: Path | str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `state` if a bit generator takes it and gives it back."""
    generator = np.random.default_rng(0).bit_generator
    try:
        generator.state = state
        accepted = generator.state == state
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        raise _damaged(source, "holds a random state that is none") from error
    if not accepted:
        raise _damaged(source, "holds a random state that is none")
    return state


def _damaged(source: Path | str, how: str) -> SnapshotError:
    return SnapshotError(f"{source} {how}; it is damaged: save the session again")


def check_agrees(path: Path | str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises `SnapshotError` if `saved`, found at `path`, is not what a session needs."""
    for key, value in expected.items():
        if saved.get(key) != value:
            saved_text, expected_text = _differences(saved.get(key), value)
            raise SnapshotError(
                f"{path} was saved with another {key}: {saved_text}, this session has "
                f"{expected_text}; open the session with the same model and KV settings, or "
                "prefill again"
            )


def _differences(saved: Any, expected: Any) -> tuple[str, str]:
    """Returns both in words; of two tables only the rows that differ."""
    saved_table, expected_table = cast("dict[str, Any]", saved), cast("dict[str, Any]", expected)
    if not type(saved) is type(expected) is dict:
        return str(saved_table), str(expected_table)
    keys = [key for key in expected_table if saved_table.get(key) != expected_table[key]]
    return _rows(saved_table, keys), _rows(expected_table, keys)


def _rows(table: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {table.get(key)}" for key in keys)


def _parts(path: Path, content: bytes, offset: int, lengths: list[Any]) -> list[bytes]:
    """Returns tokens, logits, ages and cache, which are the rest of the file."""
    whole = all(type(length) is int and length >= 0 for length in lengths)
    end = len(content) - _DIGEST_BYTES
    if not whole or len(lengths) != len(_ITEM_BYTES) or offset + sum(lengths) != end:
        raise _damaged(path, "holds parts of the wrong length")
    parts: list[bytes] = []
    for length, item_bytes in zip(lengths, _ITEM_BYTES, strict=True):
        if length % item_bytes:
            raise _damaged(path, "holds parts of the wrong length")
        parts.append(content[offset : offset + length])
        offset += length
    return parts


def _replace(path: Path, parts: Iterable[bytes]) -> None:
    """Writes `parts` and their digest without copies; hashing and writing let other threads run."""
    digest = hashlib.sha256()
    with replace_file(path) as stream:
        for part in parts:
            digest.update(part)
            stream.write(part)
        stream.write(digest.digest())
