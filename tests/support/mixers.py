"""A native and a numpy cache with layers that mix without attention, and are told the same."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pytest

from kvq.class_cache import ClassCache
from kvq.config import AttentionParams, CacheShape
from kvq.errors import CacheError
from kvq.sizing import ClassArena
from numpy_cache import storage_named

ENGINES = ("native", "numpy")
SHAPE = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
CHUNK, DRAFT = 64, 8


class Row(Protocol):
    """A row of a branch, and the one it follows; -1: the text."""

    @property
    def parent(self) -> int: ...


R = TypeVar("R", bound=Row)


class Twins(ABC, Generic[R]):
    """Both caches, the rows of their branch, and those of the text so far.

    Whoever derives from it says in `add` what a pass of such layers is, and in `check` what all
    that was kept must have given.
    """

    def __init__(self, arena: ClassArena, seed: int = 0) -> None:
        self.arena = arena
        self.draw = np.random.default_rng(seed)
        self.text: list[R] = []
        self.branch: list[R] = []
        self.open()

    def open(self) -> None:
        self.caches = tuple(
            ClassCache(self.arena, storage=storage_named(engine)) for engine in ENGINES
        )

    @abstractmethod
    def add(self, count: int, parents: Sequence[int] | None = None) -> None:
        """A pass, in which both are compared."""

    def check(self) -> None:
        """All that was kept; nothing is left to compare where `add` compares it with an oracle."""

    @property
    def tokens(self) -> int:
        (count,) = {cache.tokens for cache in self.caches}
        return count

    def commit(self, path: Sequence[int] | int) -> None:
        for cache in self.caches:
            cache.commit(path)
        rows = range(path) if isinstance(path, int) else path
        self.text += [self.branch[row] for row in rows]
        self.branch = []
        assert self.tokens == len(self.text)

    def rewind(self, rows: int) -> None:
        for cache in self.caches:
            cache.rewind(rows)
        del self.branch[rows:]

    def trim(self, tokens: int) -> int:
        """How many tokens are gone that could have stayed."""
        for cache in self.caches:
            cache.trim(tokens)
        assert self.tokens <= tokens
        del self.text[self.tokens :]
        return tokens - self.tokens

    def mark(self, tokens: int) -> None:
        for cache in self.caches:
            assert cache.keeps_places
            cache.mark(tokens)

    def reload(self) -> None:
        """Both become new caches that were told what these hold."""
        states = [cache.state() for cache in self.caches]
        self.close()
        self.open()
        for cache, state in zip(self.caches, states, strict=True):
            cache.load_state(state)
            assert cache.state() == state
        assert self.tokens == len(self.text)

    def grow(self, tokens: int) -> None:
        """Reads so many tokens more, chunk by chunk."""
        while tokens:
            count = min(tokens, CHUNK)
            self.step(count)
            tokens -= count

    def step(self, count: int = 1) -> None:
        """A pass of which every row is kept."""
        self.add(count)
        self.commit(count)

    def path_to(self, row: int) -> list[int]:
        """The branch's rows from its beginning to this one."""
        path = [row]
        while self.branch[path[0]].parent >= 0:
            path.insert(0, self.branch[path[0]].parent)
        return path

    def random_step(self, draw: np.random.Generator, most: int, limit: int) -> None:
        """Reads, keeps a path of a tree or a part of a chain, goes back, or begins again.

        A branch has `most` rows; beyond `limit` tokens it goes back.
        """
        match int(draw.integers(8)) if self.tokens < limit else 6:
            case 0:
                self.grow(int(draw.integers(1, CHUNK)))
            case 1 | 2:
                rows = int(draw.integers(1, most + 1))
                self.add(rows, [int(draw.integers(-1, row)) if row else -1 for row in range(rows)])
                self.commit(self.path_to(int(draw.integers(rows))))
            case 3 | 4:
                rows = int(draw.integers(1, most + 1))
                self.add(rows)
                kept = int(draw.integers(rows + 1))
                self.rewind(kept)
                if kept < most:
                    self.add(1)
                    kept += 1
                self.commit(kept)
            case 5:
                self.trim(max(0, self.tokens - int(draw.integers(12))))
            case 6:
                self.trim(int(draw.integers(self.tokens + 1)))
            case _:
                self.reload()

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


def attend(cache: ClassCache, count: int) -> None:
    """The layers beside them, which say nothing here."""
    positions = cache.tokens + np.arange(count, dtype=np.int64)
    for layer in range(SHAPE.num_layers):
        params = AttentionParams(layer=layer, num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
        cache.attend(params, np.ones((count, 64), np.float32), positions, np.ones(8, np.float32))


def forget_drafts_in_part(both: Twins[Any]) -> None:
    """Of one draft a path is kept behind rows that are forgotten, of the next nothing."""
    both.grow(70)
    both.add(5)
    both.rewind(2)
    both.add(3)
    both.commit(4)
    both.add(DRAFT)
    both.rewind(0)
    both.step(2)
    both.check()


def keep_a_chunk_as_a_draft(both: Twins[Any]) -> None:
    """A chunk is kept whole, or as far as a draft goes."""
    both.grow(5)
    both.add(20)
    for cache in both.caches:
        with pytest.raises(CacheError):
            cache.commit(DRAFT + 1)
        with pytest.raises(CacheError):
            cache.rewind(19)
    both.rewind(DRAFT - 1)
    both.add(1)
    both.commit(DRAFT)
    both.add(40)
    both.rewind(0)
    both.step()
    both.check()


def refuse_edits_and_silence(both: Twins[Any], mixers: str) -> None:
    """Nothing in the middle is replaced, and no layer left out, beside `mixers`."""
    both.grow(20)
    for cache in both.caches:
        assert mixers in (cache.why_not_edit() or "")
        with pytest.raises(CacheError, match=f"{mixers} remember"):
            cache.edit(8, 9, 1)
        with pytest.raises(CacheError, match=f"beside {mixers}"):
            cache.begin(1, kv_only_layers=[0])
        assert cache.tokens == 20
    with pytest.raises(CacheError):
        both.caches[0].storage.edit(8, 9, 1)


def refuse_rows_in_a_gap(both: Twins[Any], mixers: str) -> None:
    """Where pages were evicted there is room for rows, which `mixers` could not remember."""
    both.grow(300)
    for cache in both.caches:
        heads = range(SHAPE.num_layers)
        cache.demote(np.array([[layer, 0, 1, 0, 0] for layer in heads], np.int32))
        with pytest.raises(CacheError, match=f"{mixers} remember"):
            cache.begin(2, at=72)
        with pytest.raises(CacheError):
            cache.storage.begin(2, at=72)
        assert (cache.tokens, cache.branch_rows) == (300, 0)
    both.step()
    both.reload()
