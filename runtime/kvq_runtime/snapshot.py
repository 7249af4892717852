"""The file a session is saved in. Knows bytes and their checks, not what the cache's mean.

Layout, integers little-endian: 8 bytes magic, uint32 header length, header (JSON), tokens
(int64), logits (float32), cache state, then the SHA-256 of everything before it. The header
holds format, version, what the session must agree on, and the length of each part.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import SnapshotError
from kvq.files import replace_file

FORMAT = "kvq-session"
VERSION = 3
MAGIC = b"kvq-sess"
_PREFIX = struct.Struct("<8sI")
_DIGEST_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionState:
    """All a session needs to go on: `tokens` int64 [n], `logits` float32 [V] or [0].

    `generator` is the state of its numpy bit generator, `cache` that of its cache.
    """

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]
    generator: Mapping[str, Any]
    cache: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A session as it was at one moment, in memory, with what it must agree on to be restored."""

    identity: Mapping[str, Any]
    state: SessionState

    def write(self, path: Path | str) -> None:
        """Writes a whole file or none, from any thread. Raises `SnapshotError`."""
        write(Path(path), self.identity, self.state)


def write(path: Path, identity: Mapping[str, Any], state: SessionState) -> None:
    """Writes a whole file or none. Raises `SnapshotError` when the place cannot be written."""
    parts = (
        state.tokens.astype("<i8").tobytes(),
        state.logits.astype("<f4").tobytes(),
        state.cache,
    )
    header = {
        "format": FORMAT,
        "version": VERSION,
        "identity": dict(identity),
        "generator": dict(state.generator),
        "part_bytes": [len(part) for part in parts],
    }
    encoded = json.dumps(header).encode()
    try:
        _replace(path, (_PREFIX.pack(MAGIC, len(encoded)) + encoded, *parts))
    except OSError as error:
        raise SnapshotError(f"the session cannot be saved to {path}: {error.strerror}") from error


def read(path: Path, identity: Mapping[str, Any]) -> SessionState:
    """The state saved at `path`, every byte checked. Raises `SnapshotError`."""
    taken = examine(path)
    check_agrees(path, taken.identity, identity)
    return taken.state


def examine(path: Path) -> Snapshot:
    """What is saved at `path`, whatever it is of; every byte checked. Raises `SnapshotError`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    header, offset = _header(path, content)
    tokens, logits, cache = _parts(path, content, offset, header["part_bytes"])
    state = SessionState(
        tokens=np.frombuffer(tokens, "<i8").astype(np.int64),
        logits=np.frombuffer(logits, "<f4").astype(np.float32),
        generator=header["generator"],
        cache=cache,
    )
    return Snapshot(identity=header["identity"], state=state)


def is_snapshot(path: Path) -> bool:
    """Whether the file at `path` begins as a saved session does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _header(path: Path, content: bytes) -> tuple[dict[str, Any], int]:
    """The checked header and where the parts begin."""
    if content[: len(MAGIC)] != MAGIC:
        raise SnapshotError(f"{path} is not a saved session")
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(content) < _PREFIX.size + _DIGEST_BYTES or hashlib.sha256(body).digest() != digest:
        raise SnapshotError(
            f"{path} is truncated or was altered after it was saved; save the session again"
        )
    offset = _PREFIX.size + _PREFIX.unpack_from(content)[1]
    header = json.loads(content[_PREFIX.size : offset])
    if header["format"] != FORMAT or header["version"] != VERSION:
        raise SnapshotError(
            f"{path} is a {header['format']} file of version {header['version']}; this kvq reads "
            f"{FORMAT} version {VERSION}: upgrade kvq-runtime or save the session again"
        )
    return header, offset


def check_agrees(path: Path | str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises `SnapshotError` when `saved`, found at `path`, is not what a session needs."""
    for key, value in wanted.items():
        if saved.get(key) != value:
            raise SnapshotError(
                f"{path} was saved with another {key}: {saved.get(key)}, this session has {value}; "
                "open the session with the same model and KV settings, or prefill again"
            )


def _parts(path: Path, content: bytes, offset: int, lengths: list[int]) -> list[bytes]:
    parts: list[bytes] = []
    for length in lengths:
        parts.append(content[offset : offset + length])
        offset += length
    if offset != len(content) - _DIGEST_BYTES:
        raise SnapshotError(f"{path} holds parts of the wrong length; save the session again")
    return parts


def _replace(path: Path, parts: Iterable[bytes]) -> None:
    """Writes `parts` and their digest. Copies none: hashing and writing let other threads run."""
    digest = hashlib.sha256()
    with replace_file(path) as stream:
        for part in parts:
            digest.update(part)
            stream.write(part)
        stream.write(digest.digest())
