"""The cache of a model whose layers differ in their heads: a cache for each class of them.

Layers of one class have the same query heads, KV heads and channels, so that their pages are alike.
All caches hold the same tokens, together in exactly the bytes of one budget. Knows no model; a
class is a `CacheSpec`, and what says so is the order they are given in.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache, Holdings
from kvq.config import AttentionParams, Budget, KvPlan
from kvq.errors import CacheError, SnapshotError, UsageError, argument
from kvq.geometry import require_budget
from kvq.reference_delta import DeltaWeights
from kvq.sizing import DEFAULT_TOKENS, Arena, CacheSpec, longest_context

WeightNorms = Callable[[], NDArray[np.float64]]
Feedback = NDArray[np.float32]
Retrieval = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class ClassedSpec:
    """What is asked of the caches of several classes, with the names `CacheSpec` has for it.

    `parts` differ in `shape`, `windows` and `forms` alone; the first may have `conv` or `delta`.
    `budget` is that of all together: a class gets the least it can be opened in, then those whose
    every layer has a window get what holds their whole context, for that does not grow with it, and
    what is left goes to the classes by what each still lacks. A budget in tokens is one of every
    class.
    """

    parts: tuple[CacheSpec, ...]
    budget: Budget

    def __post_init__(self) -> None:
        if self.offload_bytes:
            raise UsageError(
                f"{argument('kv_offload')} is for models whose layers are all alike: leave it out"
            )

    @property
    def plan(self) -> KvPlan:
        """Widths and floating-point tokens, the same of every class."""
        return self.parts[0].plan

    @property
    def policy(self) -> str:
        """What decides in every class."""
        return self.parts[0].policy

    @property
    def read(self) -> str:
        """What is read of the pages."""
        return self.parts[0].read

    @property
    def offload_bytes(self) -> int:
        """None: there is one tier."""
        return self.parts[0].offload_bytes

    @property
    def context_tokens(self) -> int:
        """Most tokens they will ever hold."""
        return self.parts[0].context_tokens

    @cached_property
    def budget_bytes(self) -> int:
        """Bytes the budget means, all classes together."""
        if self.budget.num_bytes is not None:
            return self.budget.num_bytes
        if self.budget.fraction is not None:
            return int(self.budget.fraction * self.float_bytes)
        return self.bytes_for_tokens(self._budget_tokens)

    @property
    def _budget_tokens(self) -> int:
        return DEFAULT_TOKENS if self.budget.tokens is None else self.budget.tokens

    @property
    def float_bytes(self) -> int:
        """See `CacheSpec.float_bytes`."""
        return sum(part.float_bytes for part in self.parts)

    @cached_property
    def minimum_bytes(self) -> int:
        """See `CacheSpec.minimum_bytes`."""
        return sum(part.minimum_bytes for part in self.parts)

    @cached_property
    def whole_bytes(self) -> int:
        """See `CacheSpec.whole_bytes`."""
        return sum(part.whole_bytes for part in self.parts)

    def bytes_for_tokens(self, tokens: int) -> int:
        """See `CacheSpec.bytes_for_tokens`."""
        return sum(part.bytes_for_tokens(tokens) for part in self.parts)

    def changed(self, **changes: Any) -> "ClassedSpec":
        """With other values of what all classes share; see `CacheSpec.changed`."""
        budget = changes.pop("budget", self.budget)
        parts = tuple(part.changed(**changes) for part in self.parts)
        return ClassedSpec(parts=parts, budget=budget)

    def shortened(self) -> "ClassedSpec":
        """See `CacheSpec.shortened`."""
        if self.plan.quantized:
            return self
        if self.budget.num_bytes is None and self.budget.fraction is None:
            tokens = min(self._budget_tokens, self.context_tokens)
            return self.changed(context_tokens=tokens)
        num_bytes = self.budget_bytes
        fits = longest_context(
            self.context_tokens,
            lambda tokens: self.changed(context_tokens=tokens).minimum_bytes <= num_bytes,
        )
        return self.changed(context_tokens=fits, budget=Budget(num_bytes=num_bytes))

    def resolved(self) -> "ClassedArena":
        """What is held of it. Raises `BudgetError` naming the smallest budget that opens."""
        require_budget(self.budget_bytes, self.minimum_bytes)
        arenas = tuple(
            part.changed(budget=Budget(num_bytes=num_bytes)).resolved()
            for part, num_bytes in zip(self.parts, self._shares(), strict=True)
        )
        return ClassedArena(spec=self, parts=arenas)

    def _shares(self) -> list[int]:
        """Bytes of every class, `budget_bytes` together."""
        if self.budget.num_bytes is None and self.budget.fraction is None:
            return [part.bytes_for_tokens(self._budget_tokens) for part in self.parts]
        shares = [part.minimum_bytes for part in self.parts]
        left = self.budget_bytes - sum(shares)
        lacks = [part.whole_bytes - least for part, least in zip(self.parts, shares, strict=True)]
        windowed = [all(part.windows) and bool(part.windows) for part in self.parts]
        for kind in (True, False):
            chosen = [i for i, one in enumerate(windowed) if one == kind and lacks[i] > 0]
            wanted = sum(lacks[i] for i in chosen)
            given = min(left, wanted)
            for i in chosen:
                shares[i] += given * lacks[i] // wanted
            left = self.budget_bytes - sum(shares)
        # What nobody needs, and what division leaves over, is the last class's.
        shares[-1] += left
        return shares


@dataclass(frozen=True, kw_only=True)
class ClassedArena:
    """The memory of all classes, in exactly the bytes of the budget; names as `Arena` has them."""

    spec: ClassedSpec
    parts: tuple[Arena, ...]

    @property
    def plan(self) -> KvPlan:
        """That of the class that holds least in floating point."""
        return min((part.plan for part in self.parts), key=lambda plan: plan.tail_tokens)

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def context_tokens(self) -> int:
        """Most tokens."""
        return self.parts[0].context_tokens

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prompt at once."""
        return min(part.chunk_tokens for part in self.parts)

    @property
    def draft_tokens(self) -> int:
        """Rows of a branch."""
        return self.parts[0].draft_tokens

    @property
    def whole_tokens(self) -> int:
        """Most tokens that no class gives anything of up."""
        return min(part.whole_tokens for part in self.parts)

    @property
    def probes(self) -> bool:
        """Whether any class keeps evidence."""
        return any(part.probes for part in self.parts)

    @property
    def evidence(self) -> str:
        """What each class keeps for policies to decide by; see `kvq.geometry.Geometry`."""
        return "; ".join(part.evidence for part in self.parts)

    @property
    def keeps_places(self) -> bool:
        """Whether some class keeps places to go back to; see `kvq.geometry.Geometry`."""
        return any(part.keeps_places for part in self.parts)


class ClassedCache:
    """Caches of several classes behind the face of one; see `kvq.cache.Cache`.

    `AttentionParams.cache` says whose layer `AttentionParams.layer` is. `weight_norms`,
    `retrieval` and `feedback`: as `Cache` has them, of every class.
    """

    def __init__(
        self,
        arena: ClassedArena,
        *,
        weight_norms: Sequence[WeightNorms] = (),
        retrieval: Sequence[Retrieval] = (),
        feedback: Sequence[Feedback] = (),
        engine: str = "native",
    ) -> None:
        self.arena = arena
        self.plan = arena.plan
        parts: list[Cache] = []
        try:
            for index, part in enumerate(arena.parts):
                parts.append(
                    Cache(
                        part,
                        weight_norms=weight_norms[index] if weight_norms else None,
                        retrieval=retrieval[index] if retrieval else None,
                        feedback=feedback[index] if feedback else None,
                        engine=engine,
                    )
                )
        except BaseException:
            for opened in parts:
                opened.close()
            raise
        self.parts = tuple(parts)

    @property
    def handles(self) -> tuple[int, ...]:
        """What a graph is given, class by class."""
        return tuple(part.handle for part in self.parts)

    @property
    def budget_bytes(self) -> int:
        """Bytes of all classes."""
        return self.arena.num_bytes

    @property
    def context_tokens(self) -> int:
        """Most tokens they will ever hold."""
        return self.arena.context_tokens

    @property
    def chunk_tokens(self) -> int:
        """Most tokens one forward pass may bring."""
        return min(part.chunk_tokens for part in self.parts)

    @property
    def tokens(self) -> int:
        """Committed tokens, evicted ones included."""
        return self.parts[0].tokens

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""
        return sum(part.used_bytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """No fewer than were ever in use at once; never above `budget_bytes`."""
        return sum(part.peak_bytes for part in self.parts)

    @property
    def bytes_per_token(self) -> float:
        """Bytes one more token costs at the plan's widths, all layers."""
        return sum(part.bytes_per_token for part in self.parts)

    @property
    def read_share(self) -> float:
        """Of the pages that steps could see so far the share they have read; 1 before any."""
        seen = sum(part.engine.pages_seen for part in self.parts)
        return sum(part.engine.pages_read for part in self.parts) / seen if seen else 1.0

    @property
    def branch_rows(self) -> int:
        """Rows after the committed tokens that are neither kept nor forgotten yet."""
        return self.parts[0].branch_rows

    @property
    def draft_room(self) -> int:
        """See `Cache.draft_room`."""
        return min(part.draft_room for part in self.parts)

    @property
    def tree_room(self) -> int:
        """See `Cache.tree_room`."""
        return min(part.tree_room for part in self.parts)

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        silent: Sequence[int] = (),
    ) -> None:
        """See `Cache.begin`; no layer can be silent. Where one class refuses, none has begun."""
        if silent:
            raise CacheError("layers of several classes cannot be left out of a pass")
        before = self.branch_rows
        begun: list[Cache] = []
        try:
            for part in self.parts:
                part.begin(tokens, parents, view=view, at=at)
                begun.append(part)
        except Exception:
            for part in begun:
                part.rewind(before)
            raise

    def attend(
        self,
        params: AttentionParams,
        qkv: NDArray[np.float32],
        positions: NDArray[np.int64],
        inv_freq: NDArray[np.float32],
        q_norm: NDArray[np.float32] | None = None,
        k_norm: NDArray[np.float32] | None = None,
        *,
        shared: bool = False,
        sink_logits: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """See `Cache.attend`."""
        given = (params, qkv, positions, inv_freq, q_norm, k_norm)
        return self._of(params).attend(*given, shared=shared, sink_logits=sink_logits)

    def convolve(
        self, layer: int, bcx: NDArray[np.float32], weight: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """See `Cache.convolve`; the first class remembers."""
        return self.parts[0].convolve(layer, bcx, weight)

    def recur(
        self,
        layer: int,
        rows: NDArray[np.float32],
        gates: NDArray[np.float32],
        weights: DeltaWeights,
    ) -> NDArray[np.float32]:
        """See `Cache.recur`; the first class remembers."""
        return self.parts[0].recur(layer, rows, gates, weights)

    def look(
        self,
        params: AttentionParams,
        queries: NDArray[np.float32],
        rows: NDArray[np.int64],
        inv_freq: NDArray[np.float32],
        q_norm: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """See `Cache.look`."""
        return self._of(params).look(params, queries, rows, inv_freq, q_norm)

    def _of(self, params: AttentionParams) -> Cache:
        if not 0 <= params.cache < len(self.parts):
            raise CacheError(f"class {params.cache} is none of {len(self.parts)}")
        return self.parts[params.cache]

    def commit(self, rows: int | Sequence[int]) -> None:
        """See `Cache.commit`."""
        for part in self.parts:
            part.commit(rows)

    def rewind(self, rows: int = 0) -> None:
        """See `Cache.rewind`."""
        for part in self.parts:
            part.rewind(rows)

    def trim(self, tokens: int) -> None:
        """See `Cache.trim`; all classes keep what the one keeps that must go back furthest."""
        while any(part.tokens > tokens for part in self.parts):
            for part in self.parts:
                if part.tokens > tokens:
                    part.trim(tokens)
                tokens = min(tokens, part.tokens)

    @property
    def keeps_places(self) -> bool:
        """See `Cache`; the first class remembers."""
        return self.parts[0].keeps_places

    def mark(self, tokens: int) -> None:
        """See `Cache.mark`."""
        self.parts[0].mark(tokens)

    def why_not_edit(self) -> str | None:
        """Why nothing in the middle can be replaced, or None."""
        return self.parts[0].why_not_edit()

    def edit(self, start: int, stop: int, count: int) -> None:
        """See `Cache.edit`. Where one class refuses, all keep what stands before `start` alone."""
        try:
            for part in self.parts:
                part.edit(start, stop, count)
        except CacheError:
            self.trim(start)
            raise

    def crowded(self, tokens: int) -> list[tuple[int, int]]:
        """See `Cache.crowded`: of the first class that is short of room."""
        for part in self.parts:
            if runs := part.crowded(tokens):
                return runs
        return []

    def holdings(self) -> Holdings:
        """Of all classes; a token of a class counts by the numbers it has there."""
        return Holdings.of([part.tally() for part in self.parts], self.read_share)

    def state(self) -> bytes:
        """A snapshot of everything held; `load_state` of an equal cache restores it."""
        states = [part.state() for part in self.parts]
        lengths = struct.pack(f"<{len(states)}q", *map(len, states))
        return lengths + b"".join(states)

    def load_state(self, state: bytes) -> None:
        """Restores a snapshot; unchanged when that is refused. Raises `SnapshotError`."""
        form = struct.Struct(f"<{len(self.parts)}q")
        whole = len(state) >= form.size
        lengths: tuple[int, ...] = form.unpack_from(state) if whole else (-1,)
        if min(lengths) < 0 or form.size + sum(lengths) != len(state):
            raise SnapshotError(
                "the saved cache is not of a model with as many classes of layers; read its text "
                "again and save the session again"
            )
        before = [part.state() for part in self.parts]
        start = form.size
        try:
            for part, length in zip(self.parts, lengths, strict=True):
                part.load_state(state[start : start + length])
                start += length
            if len({part.tokens for part in self.parts}) > 1:
                raise SnapshotError("the saved cache holds other tokens in one class of layers")
        except SnapshotError:
            for part, own in zip(self.parts, before, strict=True):
                part.load_state(own)
            raise

    def close(self) -> None:
        """Gives the arenas back; the cache cannot be used afterwards."""
        for part in self.parts:
            part.close()


def spec_of(
    classes: Sequence[dict[str, Any]], *, budget: Budget | None = None, **shared: Any
) -> CacheSpec | ClassedSpec:
    """What is asked of a cache: `shared` by all classes, and each one's own of `CacheSpec`."""
    budget = budget or Budget()
    if len(classes) == 1:
        return CacheSpec(**classes[0], **shared, budget=budget)
    return ClassedSpec(parts=tuple(CacheSpec(**own, **shared) for own in classes), budget=budget)


def first_classes(arena: ClassedArena, count: int) -> Arena | ClassedArena:
    """The first `count` classes of an arena alone, in the bytes that they have in it."""
    parts = arena.parts[:count]
    if count == 1:
        return parts[0]
    budget = Budget(num_bytes=sum(part.num_bytes for part in parts))
    return ClassedArena(
        spec=ClassedSpec(parts=arena.spec.parts[:count], budget=budget), parts=parts
    )


def open_cache(
    arena: Arena | ClassedArena,
    *,
    weight_norms: Sequence[WeightNorms] = (),
    retrieval: Sequence[Retrieval] = (),
    feedback: Sequence[Feedback] = (),
    engine: str = "native",
) -> Cache | ClassedCache:
    """An empty cache in `arena`; of every class its own, or none. Raises as `Cache` does."""
    if isinstance(arena, ClassedArena):
        return ClassedCache(
            arena,
            weight_norms=weight_norms,
            retrieval=retrieval,
            feedback=feedback,
            engine=engine,
        )
    return Cache(
        arena,
        weight_norms=weight_norms[0] if weight_norms else None,
        retrieval=retrieval[0] if retrieval else None,
        feedback=feedback[0] if feedback else None,
        engine=engine,
    )
