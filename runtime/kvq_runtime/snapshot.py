"""The file a session is saved in. Knows bytes and their checks, not what the cache's mean.

Layout, integers little-endian: 8 bytes magic, uint32 header length, header (JSON), tokens
(int64), logits (float32), ages (int32), cache state, then the SHA-256 of everything before it. The
header holds format, version, what the session must agree on, and the length of each part. Magic,
digest, and format and version in a header of JSON, are the same in every version, so that any kvq
can say of a file of any other what it is. `VERSION` rises with every change of what is written,
also of the cache's bytes (`PAGE_VERSION`).
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvq.errors import SnapshotError
from kvq.files import replace_file
from kvq_runtime.staleness import Ages

FORMAT = "kvq-session"
VERSION = 10
# Version 8 kept no queries of layers that read others' keys, and places of convolutions and delta
# nets otherwise, both kept more of the queries that policies decide by; where there are such, what
# a session must agree on says so.
READ_VERSIONS = (8, 9, VERSION)
MAGIC = b"kvq-sess"
PREFIX = struct.Struct("<8sI")
_DIGEST_BYTES = 32
# Of an item of each part: tokens, logits, ages, cache.
_ITEM_BYTES = (8, 4, 4, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionState:
    """All a session needs to go on: `tokens` int64 [n], `logits` float32 [V] or [0].

    `ages` int32, of the first tokens: see `kvq_runtime.staleness.Staleness`. `generator` is the
    state of its numpy bit generator, `cache` that of its cache.
    """

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]
    generator: Mapping[str, Any]
    cache: bytes
    ages: Ages


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A checked `SessionState`, ready to be used: its random numbers go on where they were."""

    tokens: list[int]
    logits: NDArray[np.float32]
    generator: np.random.Generator
    cache: bytes
    ages: Ages


class Restorable(Protocol):
    """The cache a session has: `load_state` leaves it as it was when it refuses."""

    @property
    def tokens(self) -> int:
        """Tokens held."""
        ...

    def state(self) -> bytes:
        """Everything held."""
        ...

    def load_state(self, state: bytes, /) -> None:
        """Becomes what `state` gave. Raises `SnapshotError`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A session as it was at one moment, in memory, with what it must agree on to be restored.

    `version`: of the file that it was read from, or would be written to.
    """

    identity: Mapping[str, Any]
    state: SessionState
    version: int = VERSION

    def write(self, path: Path | str) -> None:
        """Writes a whole file or none, from any thread. Raises `SnapshotError`."""
        write(Path(path), self.identity, self.state)


def write(path: Path, identity: Mapping[str, Any], state: SessionState) -> None:
    """Writes a whole file or none. Raises `SnapshotError` when the place cannot be written."""
    parts = (
        state.tokens.astype("<i8").tobytes(),
        state.logits.astype("<f4").tobytes(),
        state.ages.astype("<i4").tobytes(),
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
        _replace(path, (PREFIX.pack(MAGIC, len(encoded)) + encoded, *parts))
    except OSError as error:
        raise SnapshotError(f"the session cannot be saved to {path}: {error.strerror}") from error


def read(path: Path, identity: Mapping[str, Any]) -> SessionState:
    """The state saved at `path`, checked as `examine` does. Raises `SnapshotError`."""
    taken = examine(path)
    check_agrees(path, taken.identity, identity)
    return taken.state


def restored(what: Path | str, state: SessionState, *, vocab_size: int) -> Restored:
    """`state`, found at `what`, checked against the model. Raises `SnapshotError`."""
    tokens, logits = state.tokens, state.logits
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise _damaged(what, f"holds tokens that are not the model's 0 to {vocab_size - 1}")
    if len(logits) not in (0, vocab_size) or not np.isfinite(logits).all():
        raise _damaged(what, f"holds no {vocab_size} finite logits")
    if len(state.ages) > len(tokens) or (len(state.ages) and state.ages.min() < -1):
        raise _damaged(what, "holds ages that are not its tokens'")
    generator = np.random.default_rng(0)
    generator.bit_generator.state = _generator_state(what, state.generator)
    return Restored(
        tokens=tokens.tolist(),
        logits=logits.copy(),
        generator=generator,
        cache=state.cache,
        ages=state.ages,
    )


def fill(what: Path | str, cache: Restorable, found: Restored) -> None:
    """Gives `cache` what `found` holds; unchanged when that is refused. Raises `SnapshotError`.

    The cache's tokens are the first of the session's: how many is known when it is loaded.
    """
    before = cache.state()
    cache.load_state(found.cache)
    if not len(found.ages) <= cache.tokens <= len(found.tokens):
        told = f"holds {len(found.tokens)} tokens and a cache of {cache.tokens}"
        cache.load_state(before)
        raise _damaged(what, told)


def examine(path: Path) -> Snapshot:
    """What is saved at `path`, whatever it is of: its digest, types and lengths are right.

    Raises `SnapshotError`. What depends on the model is left to `restored`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    header, offset = _header(path, content)
    tokens, logits, ages, cache = _parts(path, content, offset, header["part_bytes"])
    state = SessionState(
        tokens=np.frombuffer(tokens, "<i8").astype(np.int64),
        logits=np.frombuffer(logits, "<f4").astype(np.float32),
        generator=_generator_state(path, header["generator"]),
        cache=cache,
        ages=np.frombuffer(ages, "<i4").astype(np.int32),
    )
    return Snapshot(identity=header["identity"], state=state, version=header["version"])


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


def _generator_state(what: Path | str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state`, which a bit generator takes and gives back."""
    generator = np.random.default_rng(0).bit_generator
    try:
        generator.state = state
        taken = generator.state == state
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        raise _damaged(what, "holds a random state that is none") from error
    if not taken:
        raise _damaged(what, "holds a random state that is none")
    return state


def _damaged(what: Path | str, how: str) -> SnapshotError:
    return SnapshotError(f"{what} {how}; it is damaged: save the session again")


def check_agrees(path: Path | str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises `SnapshotError` when `saved`, found at `path`, is not what a session needs."""
    for key, value in wanted.items():
        if saved.get(key) != value:
            theirs, ours = _what_differs(saved.get(key), value)
            raise SnapshotError(
                f"{path} was saved with another {key}: {theirs}, this session has {ours}; "
                "open the session with the same model and KV settings, or prefill again"
            )


def _what_differs(saved: Any, wanted: Any) -> tuple[str, str]:
    """Both in words; of two tables only the rows that differ."""
    theirs, ours = cast("dict[str, Any]", saved), cast("dict[str, Any]", wanted)
    if not type(saved) is type(wanted) is dict:
        return str(theirs), str(ours)
    keys = [key for key in ours if theirs.get(key) != ours[key]]
    return _rows(theirs, keys), _rows(ours, keys)


def _rows(table: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {table.get(key)}" for key in keys)


def _parts(path: Path, content: bytes, offset: int, lengths: list[Any]) -> list[bytes]:
    """Tokens, logits, ages and cache, whose bytes are all that is left."""
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
    """Writes `parts` and their digest. Copies none: hashing and writing let other threads run."""
    digest = hashlib.sha256()
    with replace_file(path) as stream:
        for part in parts:
            digest.update(part)
            stream.write(part)
        stream.write(digest.digest())
