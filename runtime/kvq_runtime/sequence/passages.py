"""Passages: texts that stand in several prompts, whose keys and values are computed once.

A passage is for example another file of a project. When a prompt with a new passage is read, the
keys and values of its tokens are copied at 16 bits, without their rotation. Later prompts take the
copy over wherever the passage stands in them, and rotate its keys for that place. The tokens have
not seen what stands before them now, so they are stale, and idle time computes them again.

This is the reuse of Prompt Cache (2311.04934) and CacheBlend (2405.16444). Prompt Cache reads each
passage alone, which changes its first tokens most. CacheBlend repairs this: it computes the tokens
again whose values change most. Here a passage is copied from a prompt in which other text stands
before it. That loses less than the repair does, and computes nothing (`apps/lab/log/edits.md`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvq.class_cache import KeyTransform
from kvq.reference.stored import rotate
from kvq_models.config import ModelConfig
from kvq_runtime.backends.paged import PagedBackend

Half = NDArray[np.float16]

# A passage that is copied with fewer tokens before it has seen little but the text's first tokens,
# which attention falls back on. Such a copy does only for its own place.
LEAST_BEFORE = 64
# A text's first tokens are computed, since attention falls back on them.
FIRST_TOKENS = 16
# Taking over fewer tokens than this costs about as much as computing them.
LEAST_TOKENS = 32
# Memory of the copies of one model.
DEFAULT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PassageCopy:
    """Holds keys and values of a passage, float16 [L, n, Hk, D]; the keys are not rotated.

    `before` tokens stood before it where it was copied.
    """

    keys: Half
    values: Half
    before: int

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that it takes."""
        return self.keys.nbytes + self.values.nbytes

    def does_after(self, tokens: int) -> bool:
        """Decides whether it may be taken over where so many tokens stand before it."""
        return self.before >= LEAST_BEFORE or tokens == self.before


class PassageStore:
    """Keeps passages of one model in at most `limit_bytes`; any thread may use it.

    Those unused for longest leave first. Nobody finds the passages of another owner, so that speed
    tells nothing about others' texts.
    """

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.used_bytes = 0
        self._limit_bytes = limit_bytes
        self._passages: OrderedDict[tuple[str, bytes], PassageCopy] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._passages)

    def find(self, owner: str, ids: Sequence[int]) -> PassageCopy | None:
        """Returns the passage of these tokens, None if there is none."""
        key = _key(owner, ids)
        with self._lock:
            passage = self._passages.get(key)
            if passage is not None:
                self._passages.move_to_end(key)
            return passage

    def add(self, owner: str, ids: Sequence[int], passage: PassageCopy) -> None:
        """Adds or replaces a passage; one above the limit is not kept."""
        key = _key(owner, ids)
        with self._lock:
            replaced = self._passages.pop(key, None)
            self.used_bytes -= 0 if replaced is None else replaced.num_bytes
            if passage.num_bytes > self._limit_bytes:
                return
            self._passages[key] = passage
            self.used_bytes += passage.num_bytes
            while self.used_bytes > self._limit_bytes:
                self.used_bytes -= self._passages.popitem(last=False)[1].num_bytes


# Of each backend, which is one loaded model.
_stores: WeakKeyDictionary[PagedBackend, PassageStore] = WeakKeyDictionary()


def store_of(backend: PagedBackend) -> PassageStore:
    """Returns the store that all sessions of a loaded model share."""
    return _stores.setdefault(backend, PassageStore())


class PassagePlace(NamedTuple):
    """Says where a passage stands in a prompt: its first token, and the token after its last."""

    start: int
    stop: int


class Piece(NamedTuple):
    """Describes pending tokens that are read in the same way, up to `stop`.

    They are taken over from `passage`; or computed and copied for the passage at `place`; or only
    computed where both are None.
    """

    stop: int
    place: PassagePlace | None = None
    passage: PassageCopy | None = None


def without_passages(prompt: Sequence[int], passages: Sequence[Sequence[int]]) -> list[int]:
    """Returns the tokens of `prompt` outside of its passages."""
    ids = list(prompt)
    for place in reversed(_places(ids, passages)):
        del ids[place.start : place.stop]
    return ids


class PromptPassages:
    """Takes the passages of one prompt over from a store, and copies new ones into it."""

    def __init__(
        self,
        store: PassageStore,
        config: ModelConfig,
        prompt: Sequence[int],
        passages: Sequence[Sequence[int]],
        owner: str = "",
    ) -> None:
        """Finds `passages` in `prompt`, in this order; those that are not in it are left out.

        `config` is of the model, whose layers must be all alike (`ModelConfig.uniform`).
        """
        self._store, self._config, self._owner = store, config, owner
        self._prompt = list(prompt)
        self._places = _places(self._prompt, passages)
        # The last token taken over, and the copy that is being made: up to a token, in pieces.
        self._taken_to = self._copied_to = -1
        self._copied: list[tuple[Half, Half]] = []

    def piece(self, start: int, stop: int) -> Piece:
        """Returns how the pending tokens from `start` on are read; it ends at `stop` or before."""
        for place in self._places:
            first, end = max(start, place.start), min(stop, place.stop)
            if first >= end:
                continue
            passage = self._store.find(self._owner, self._prompt[place.start : place.stop])
            if passage is not None and passage.does_after(place.start):
                first = max(first, FIRST_TOKENS)
                if end - first < (1 if first == self._taken_to else LEAST_TOKENS):
                    continue
                return Piece(end, place, passage) if first == start else Piece(first)
            if first in (place.start, self._copied_to):
                return Piece(end, place) if first == start else Piece(first)
        return Piece(stop)

    def take(
        self, cache: Any, piece: Piece, start: int, stop: int, *, at: int | None, rope_long: bool
    ) -> None:
        """Gives `cache` tokens `start` to `stop` of a piece that is taken over; `at`: see `begin`.

        Raises what `Cache.append` raises, which then has changed nothing.
        """
        assert piece.passage is not None
        assert piece.place is not None
        rows = slice(start - piece.place.start, stop - piece.place.start)
        forms = [
            KeyTransform(
                params=self._config.attention(layer),
                inv_freq=self._config.inv_freq(layer, long_rope=rope_long),
            )
            for layer in range(self._config.num_layers)
        ]
        keys, values = (
            part[:, rows].astype(np.float32) for part in (piece.passage.keys, piece.passage.values)
        )
        cache.append(keys, values, np.arange(start, stop), forms, at=at)
        self._taken_to = stop

    def copy(
        self, cache: Any, place: PassagePlace, start: int, stop: int, *, rope_long: bool
    ) -> None:
        """Copies tokens `start` to `stop` of the passage at `place`, which were just computed.

        They must still be in floating point. Where they are not, the passage is not copied.
        """
        if start == place.start:
            self._copied.clear()
        rows = np.flatnonzero(np.isin(cache.parts[0].places()[:, 0], range(start, stop)))
        self._copied_to = stop if len(rows) == stop - start else -1
        if self._copied_to < 0:
            return
        self._copied.append(self._rows(cache, rows, rope_long=rope_long))
        if stop == place.stop:
            keys, values = map(np.hstack, zip(*self._copied, strict=True))
            passage = PassageCopy(keys, values, before=place.start)
            self._store.add(self._owner, self._prompt[place.start : stop], passage)
            self._copied.clear()

    def _rows(self, cache: Any, rows: NDArray[np.int64], *, rope_long: bool) -> tuple[Half, Half]:
        """Returns keys and values float16 [L, n, Hk, D] of rows of the floating-point tail."""
        (part,), config = cache.parts, self._config
        keys, values = list[Half](), list[Half]()
        for layer in range(config.num_layers):
            heads = [part.tail(layer, head) for head in range(config.first_attention.kv_heads)]
            rotated = np.stack([head_keys[rows] for head_keys, _, _ in heads], axis=1)
            positions = heads[0][2][rows].astype(np.int64)
            turned_back = rotate(
                rotated.astype(np.float32),
                -positions,
                config.inv_freq(layer, long_rope=rope_long),
                1 / config.attention(layer).rope_factor,
            )
            keys.append(turned_back.astype(np.float16))
            values.append(np.stack([head_values[rows] for _, head_values, _ in heads], axis=1))
        return np.stack(keys), np.stack(values)


def _places(prompt: list[int], passages: Sequence[Sequence[int]]) -> list[PassagePlace]:
    """Returns the places of the passages that stand in `prompt` one after the other."""
    places, after = list[PassagePlace](), 0
    for passage in passages:
        ids = list(passage)
        if len(ids) < LEAST_TOKENS:
            continue
        start = after
        while start < len(prompt) and prompt[start : start + len(ids)] != ids:
            try:
                start = prompt.index(ids[0], start + 1)
            except ValueError:
                start = len(prompt)
        if start < len(prompt):
            after = start + len(ids)
            places.append(PassagePlace(start, after))
    return places


def _key(owner: str, ids: Sequence[int]) -> tuple[str, bytes]:
    return owner, np.asarray(ids, np.int32).tobytes()
