"""What llama.cpp's cache of a model costs, byte for byte, and how long a context a budget buys.

Widths come from the file, which layers share a cache and how many cells it has from llama.cpp's
own report; the two are compared, so that a model counted wrongly is refused instead of exceeding
its budget. Opens no context.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvq.config import Budget, KvPlan
from kvq.errors import BackendError, BudgetError, argument
from kvq.formats import format_bytes, sized
from kvq.sizing import DEFAULT_TOKENS, SHORTEST_CONTEXT_TOKENS
from kvq_runtime.config import SessionRequest

# llama.cpp gives caches a multiple of this many cells.
CELLS = 256
# A context has the sequence itself and, where it can be edited, one to park tokens in.
SEQUENCES = 2
# llama.cpp's caches of a model with windows: the one that holds all, the one that does not.
_MOST_CACHES = 2
# How far a number printed with two decimals may be from its value, in MiB.
_ROUNDING_MIB = 0.0051

_LAYER = re.compile(r"llama_kv_cache: layer\s+(\d+): dev")
_SIZE = re.compile(
    r"llama_kv_cache: size =\s*[\d.]+ MiB \(\s*(\d+) cells,\s*(\d+) layers,.*"
    r"K \(\w+\):\s*([\d.]+) MiB, V \(\w+\):\s*([\d.]+) MiB"
)
_STATE = re.compile(r"llama_memory_recurrent: size =\s*([\d.]+) MiB")
_ROTATION = re.compile(r"attn_rot_k = (\d)")


@dataclass(frozen=True, slots=True)
class CacheType:
    """A type of llama.cpp's for keys or values: `block` of them take `block_bytes`."""

    name: str
    number: int
    block: int
    block_bytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of one token's `width` channels in one layer."""
        return width // self.block * self.block_bytes


CACHE_TYPES: Mapping[int, CacheType] = {
    16: CacheType("f16", 1, 1, 2),
    8: CacheType("q8_0", 8, 32, 34),
    4: CacheType("q4_0", 2, 32, 18),
}


@dataclass(frozen=True, slots=True)
class ReportedCache:
    """One cache as llama.cpp reports it: its layers, cells, and MiB of K and V, rounded."""

    layers: tuple[int, ...]
    cells: int
    k_mib: float
    v_mib: float


def reported_caches(lines: Sequence[str]) -> list[ReportedCache]:
    """The caches of a context, from the messages of its opening."""
    found: list[ReportedCache] = []
    layers: list[int] = []
    for line in lines:
        if match := _LAYER.match(line):
            layers.append(int(match[1]))
        elif match := _SIZE.match(line):
            found.append(
                ReportedCache(tuple(layers), int(match[1]), float(match[3]), float(match[4]))
            )
            layers = []
    return found


def reported_state_mib(lines: Sequence[str]) -> float:
    """MiB of the states of layers that do not attend, rounded, from the same messages."""
    found = (match for line in lines if (match := _STATE.match(line)))
    return sum(float(match[1]) for match in found)


def keys_are_rotated(lines: Sequence[str]) -> bool:
    """Whether every cache of a context turns its keys before it quantises them."""
    found = [match[1] for line in lines if (match := _ROTATION.search(line))]
    return bool(found) and all(value != "0" for value in found)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers that share one cache: their K and V channels; `window_tokens` 0: it holds all."""

    widths: tuple[tuple[int, int], ...]
    window_tokens: int = 0

    def cells(self, context_tokens: int, chunk_tokens: int) -> int:
        """Tokens the cache has room for."""
        cells = padded(context_tokens)
        if self.window_tokens == 0:
            return cells
        batch_tokens = batch_size(context_tokens, chunk_tokens)
        return min(cells, padded(self.window_tokens + batch_tokens))

    def token_bytes(self, plan: KvPlan) -> tuple[int, int]:
        """Bytes of one token's keys and of its values, all layers of the group."""
        k_type, v_type = CACHE_TYPES[plan.k_bits], CACHE_TYPES[plan.v_bits]
        return (
            sum(k_type.row_bytes(k_width) for k_width, _ in self.widths),
            sum(v_type.row_bytes(v_width) for _, v_width in self.widths),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayout:
    """All caches of a context. `turns_in_part`: some channels of a key do not rotate.

    `state_bytes` are those of layers that do not attend: a state of all tokens so far, of which
    none can be taken back.
    """

    groups: tuple[LayerGroup, ...]
    turns_in_part: bool = False
    state_bytes: int = 0

    @property
    def forgets(self) -> bool:
        """Whether trimming may not lead back to what was there: states, or windows."""
        return self.state_bytes > 0 or self.window_tokens > 0

    @property
    def window_tokens(self) -> int:
        """What layers that forget look back over, of unlike ones the most; 0: there are none."""
        return max(group.window_tokens for group in self.groups)

    def num_bytes(self, plan: KvPlan, context_tokens: int, chunk_tokens: int) -> int:
        """Bytes of K, V and states that llama.cpp allocates for a context."""
        return self.state_bytes + sum(
            group.cells(context_tokens, chunk_tokens) * sum(group.token_bytes(plan))
            for group in self.groups
        )

    def bytes_per_token(self, plan: KvPlan) -> int:
        """Bytes of one token, all layers."""
        return sum(sum(group.token_bytes(plan)) for group in self.groups)

    def held_bytes(self, plan: KvPlan, tokens: int) -> int:
        """Bytes of what a step reads after `tokens` tokens."""
        return self.state_bytes + sum(
            min(tokens, group.window_tokens or tokens) * sum(group.token_bytes(plan))
            for group in self.groups
        )

    def check(self, lines: Sequence[str], plan: KvPlan, context_tokens: int, chunk: int) -> None:
        """Compares these counts with llama.cpp's own, from the messages of a context's opening.

        Raises `BackendError` where they differ.
        """
        reported, state_mib = reported_caches(lines), reported_state_mib(lines)
        if abs(self.state_bytes / (1 << 20) - state_mib) > _ROUNDING_MIB:
            raise BackendError(
                _uncounted(f"states of {state_mib} MiB where {self.state_bytes} bytes were counted")
            )
        if len(reported) != len(self.groups):
            raise BackendError(_uncounted(f"{len(reported)} caches instead of {len(self.groups)}"))
        for cache, group in zip(reported, self.groups, strict=True):
            cells = group.cells(context_tokens, chunk)
            counted = [cells * num_bytes / (1 << 20) for num_bytes in group.token_bytes(plan)]
            found = (cache.k_mib, cache.v_mib)
            differs = any(
                abs(one - other) > _ROUNDING_MIB for one, other in zip(counted, found, strict=True)
            )
            if differs or cache.cells != cells:
                raise BackendError(
                    _uncounted(
                        f"{cache.cells} cells of {found} MiB of K and V where {cells} of "
                        f"({counted[0]:.2f}, {counted[1]:.2f}) were counted"
                    )
                )


def layout_of(
    reported: Sequence[ReportedCache],
    widths: Sequence[tuple[int, int]],
    window_tokens: int,
) -> CacheLayout:
    """The layout of a model with `widths` per layer, from a context of it.

    llama.cpp reports the cache that holds everything first, then the one of the windows. Raises
    `BackendError` when the report is not understood.
    """
    kept = [cache for cache in reported if cache.layers]
    windowed = len(reported) == _MOST_CACHES
    if not kept or len(reported) > _MOST_CACHES:
        raise BackendError(_uncounted(f"{len(reported)} caches"))
    if max(max(cache.layers) for cache in kept) >= len(widths):
        raise BackendError(_uncounted(f"more than {len(widths)} layers"))
    windows = (0, window_tokens) if windowed else (0,)
    return CacheLayout(
        groups=tuple(
            LayerGroup(widths=tuple(widths[layer] for layer in cache.layers), window_tokens=window)
            for cache, window in zip(reported, windows, strict=True)
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSizing:
    """A session's context and bytes: llama.cpp evicts nothing, so each decides the other."""

    layout: CacheLayout
    plan: KvPlan
    model_tokens: int
    chunk_tokens: int

    def session(self, request: SessionRequest) -> tuple[int, int]:
        """(context tokens, budget bytes) of what was asked.

        Raises `BudgetError` for a budget that cannot hold the context or the smallest cache.
        """
        given = self._given(request.kv_budget)
        context_tokens = request.context_tokens
        if context_tokens is not None:
            needed = self._bytes(context_tokens)
            if given is not None and needed > given:
                raise BudgetError(
                    f"a context of {context_tokens} tokens takes {sized(needed)} on the "
                    "llama.cpp backend, which evicts nothing, and "
                    f"{argument('kv_budget')} is {format_bytes(given)}; raise it or lower "
                    f"{argument('context_tokens')}"
                )
            return context_tokens, needed if given is None else given
        if given is None:
            context_tokens = min(DEFAULT_TOKENS, self.model_tokens)
            return context_tokens, self._bytes(context_tokens)
        if request.kv_budget.tokens is not None:
            context_tokens = min(_at_least_shortest(request.kv_budget.tokens), self.model_tokens)
            return context_tokens, self._bytes(context_tokens)
        return self._longest(given), given

    def _bytes(self, context_tokens: int) -> int:
        return self.layout.num_bytes(self.plan, context_tokens, self.chunk_tokens)

    def _given(self, budget: Budget) -> int | None:
        """The budget in bytes, or None for none."""
        if budget.tokens is not None:
            return self._bytes(_at_least_shortest(budget.tokens))
        if budget.fraction is not None:
            exact = KvPlan(k_bits=16, v_bits=16)
            return int(budget.fraction * self.layout.bytes_per_token(exact) * self.model_tokens)
        return budget.num_bytes

    def _longest(self, given: int) -> int:
        """The longest context of the model's that `given` bytes hold."""
        smallest = self._bytes(CELLS)
        if smallest > given:
            raise BudgetError(
                f"{argument('kv_budget')} {format_bytes(given)} does not hold the smallest cache "
                f"of this model on the llama.cpp backend, {CELLS} tokens; {sized(smallest)} do"
            )
        fits, too_many = 1, -(-self.model_tokens // CELLS) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (
                (middle, too_many) if self._bytes(middle * CELLS) <= given else (fits, middle)
            )
        return min(fits * CELLS, self.model_tokens)


def batch_size(context_tokens: int, chunk_tokens: int) -> int:
    """Most tokens of one pass; llama.cpp insists on one for each of its sequences."""
    return max(SEQUENCES, min(chunk_tokens, padded(context_tokens)))


def _at_least_shortest(tokens: int) -> int:
    return max(tokens, SHORTEST_CONTEXT_TOKENS)


def padded(tokens: int) -> int:
    """Cells of a context of `tokens` tokens."""
    return -(-tokens // CELLS) * CELLS


def _uncounted(what: str) -> str:
    return (
        f"the llama.cpp backend cannot keep a budget with this model: llama.cpp reports {what}; "
        "install llama-cpp-python 0.3.36, or choose another model"
    )
