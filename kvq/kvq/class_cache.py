"""The cache of one class of layers: one budget, one policy.

Space is made before compute, so the arena is never exceeded; the policy decides what is given up.
Knows no model: rotary frequencies and scales arrive with every call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvq.config import FLOAT_WIDTH, PAGE_TOKENS, AttentionParams
from kvq.errors import BudgetError, CacheError, UsageError, argument
from kvq.formats import REACH, bytes_per_token, format_bytes, sized
from kvq.geometry import WINDOW_MARGIN_TOKENS
from kvq.native import HOST, VIEWS, NativeCache, figure
from kvq.policies import Constants, Evidence, ObservedAttention, policy_named
from kvq.policies.spend import evictions
from kvq.selectors import rule_named
from kvq.sizing import ClassArena

if TYPE_CHECKING:
    from kvq.reference.delta import DeltaWeights

# Keys and values below this are in float16's range, however the keys are rotated.
_SMALL = 2.0**15


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUsage:
    """Tells what a cache still holds of the tokens it has taken, over all layers and KV heads.

    Attributes:
        mean_k_bits: Mean width of the keys that are held. A token of a page counts with the width
            of its page, a token of the tail or the sinks with 16. 0 while nothing is held.
        mean_v_bits: The same of the values.
        evicted_share: Share of the tokens whose page is gone or that are masked, of all tokens in
            all layers and heads but those that a sliding window has passed.
        read_share: Share of the pages that decoding steps have read, of those they could see.
        offloaded_bytes: Bytes of pages of a device's cache that lie in the host's memory.
        streamed_bytes: Bytes that the newest pass copied from there.
    """

    mean_k_bits: float
    mean_v_bits: float
    evicted_share: float
    read_share: float = 1.0
    offloaded_bytes: int = 0
    streamed_bytes: int = 0

    @classmethod
    def of(cls, tallies: Sequence["Tally"], read_share: float) -> "CacheUsage":
        """Adds up the tallies of all classes of layers of a sequence."""
        whole = Tally._make(map(sum, zip(*tallies, strict=True)))
        return cls(
            mean_k_bits=whole.k_bits / max(1, whole.stored),
            mean_v_bits=whole.v_bits / max(1, whole.stored),
            evicted_share=1 - whole.stored / whole.seen if whole.seen > 0 else 0.0,
            read_share=read_share,
            offloaded_bytes=whole.offloaded_bytes,
            streamed_bytes=whole.streamed_bytes,
        )


class Tally(NamedTuple):
    """Counts the numbers of K that a cache stores and has seen (as many of V), and their bits."""

    stored: int
    seen: int
    k_bits: int
    v_bits: int
    offloaded_bytes: int
    streamed_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyTransform:
    """Says how a layer turns its keys into the keys that a cache stores: norm, then rotation.

    Attributes:
        params: Constants of the layer.
        inv_freq: float32 [rotary_dim / 2]: angle per position of each pair of rotated channels.
        k_norm: float32 [D]: weights of the RMS norm of keys; None where there is none.
    """

    params: AttentionParams
    inv_freq: NDArray[np.float32]
    k_norm: NDArray[np.float32] | None = None


class ClassCache:
    """Caches the keys and values of one class of layers in exactly the bytes of `arena`.

    A forward pass is `begin(n)` and one `attend` per layer (by the graph or directly). Its rows
    form a branch, which further passes may extend, until `commit` keeps a path of it or `rewind`
    forgets it. The arguments are those of `Cache`, of one class each.
    """

    # The number by which a `kvq::Attention` node names the cache.
    handle = figure("storage.handle")
    # Committed tokens, evicted ones included.
    tokens = figure("storage.tokens")
    # Rows after the committed tokens that are neither kept nor forgotten yet.
    branch_rows = figure("storage.branch_rows")
    # Bytes in use now: tables, tail, scratch and pages.
    used_bytes = figure("storage.used_bytes")
    # Most bytes ever in use; never above `budget_bytes`.
    peak_bytes = figure("storage.peak_bytes")

    def __init__(
        self,
        arena: ClassArena,
        *,
        weight_norms: Callable[[], NDArray[np.float64]] | None = None,
        retrieval: NDArray[np.float32] | None = None,
        feedback: NDArray[np.float32] | None = None,
        storage: type[NativeCache] = NativeCache,
    ) -> None:
        spec = arena.spec
        _check_tier(arena, storage.device)
        self.arena = arena
        self.shape = arena.shape
        self.plan = arena.plan
        self.budget_bytes = arena.num_bytes
        self.context_tokens = arena.context_tokens
        # Most tokens one forward pass may bring.
        self.chunk_tokens = arena.pass_tokens
        # Whether convolutions or delta nets keep checkpoints; without them any rollback is exact.
        self.keeps_places = arena.keeps_places
        # Bytes that one more token costs at the plan's widths, all layers.
        self.bytes_per_token = bytes_per_token(arena.shape, arena.plan, arena.value_groups)
        self.policy = policy_named(spec.policy)
        self.windows = np.array(spec.windows or [0] * arena.shape.num_layers, np.int64)
        # How many first tokens each layer gave up because its window had passed them, int64 [L].
        self._passed_tokens = np.zeros(len(self.windows), np.int64)
        self._weight_norms = weight_norms
        self._retrieval = retrieval
        self.storage = storage(arena)
        self.storage.read_by(rule_named(spec.read))
        if feedback is not None:
            self.storage.set_rounding_feedback(feedback)

    @property
    def read_share(self) -> float:
        """Returns which share of the pages in sight steps have read so far; 1 before any."""
        return self.storage.pages_read / self.storage.pages_seen if self.storage.pages_seen else 1.0

    @property
    def draft_room(self) -> int:
        """Returns the rows of a pass that `kvq.cache.Cache.draft_room` describes."""
        if not self.plan.quantized:
            return self.arena.draft_tokens
        floats = self.plan.sink_tokens + self.plan.tail_tokens + PAGE_TOKENS
        return max(1, min(self.arena.draft_tokens, floats - 1 - self.storage.tail_rows))

    @property
    def tree_room(self) -> int:
        """Returns the rows of a tree that `kvq.cache.Cache.tree_room` describes."""
        return min(self.draft_room, PAGE_TOKENS - self.storage.tail_rows % PAGE_TOKENS)

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        kv_only_layers: Sequence[int] = (),
    ) -> None:
        """Adds a pass to the branch, as `kvq.cache.Cache.begin` says."""
        self._check_rows(tokens, parents, view, at)
        if kv_only_layers:
            self._check_kv_only(kv_only_layers)
        choices: dict[str, Any] = {"view": view, "at": at, "kv_only_layers": kv_only_layers}
        if not self.storage.begin(tokens, parents, **choices):
            self._make_room(tokens)
            if not self.storage.begin(tokens, parents, **choices):
                raise CacheError(f"no room was made for {tokens} tokens")

    def _check_kv_only(self, layers: Sequence[int]) -> None:
        if mixers := self._stateful_mixers:
            raise CacheError(f"layers beside {mixers} cannot be left out of a pass")
        if any(not 0 <= layer < self.shape.num_layers for layer in layers):
            raise CacheError(f"layers {tuple(layers)} are not among {self.shape.num_layers}")

    def _make_room(self, tokens: int) -> None:
        """Gives up what `tokens` more rows need: what nobody sees, then what the policy says.

        Raises `BudgetError`.
        """
        short, columns = self._missing(tokens)
        if (short or columns) and not self.arena.probes:
            short, columns = self._evict_sparsest_pages(tokens)
        if short or columns:
            closing = self.arena.closing_pages(self.storage.tail_rows, self.branch_rows + tokens)
            evidence = replace(
                self.evidence(), closing_pages=closing, new_page_widths=self.new_page_widths()
            )
            relief = self.policy.free_space(evidence, short, columns)
            self.storage.demote(relief.actions)
            if relief.new_page_widths is not None:
                self.storage.lower_new_page_widths(relief.new_page_widths)
            if relief.close_gap:
                self.storage.shift_sinks(self._gap_after_sinks)
            short, columns = self.storage.missing(tokens)
        if short or columns:
            raise BudgetError(
                f"{format_bytes(self.budget_bytes)} of KV budget cannot take {tokens} tokens at "
                f"once; {sized(self.budget_bytes + short)} can"
            )

    def _missing(self, tokens: int) -> tuple[int, int]:
        """Returns the bytes and columns that `tokens` more rows lack.

        Pages that their layer's window has passed stay for rollbacks as long as there is room; here
        they go first.
        """
        missing = self.storage.missing(tokens)
        if not any(missing) or not any(self.arena.windows):
            return missing
        facts, widths = self.storage.columns()
        ends = facts[:, 0] + facts[:, 1] + PAGE_TOKENS + WINDOW_MARGIN_TOKENS
        windows = self.windows[:, None]
        passed = (windows > 0) & (ends < self._boundary - windows)
        gone = np.where(passed, facts[:, 2] + PAGE_TOKENS, 0).max(axis=1, initial=0)
        self._passed_tokens = np.maximum(self._passed_tokens, gone)
        self.storage.demote(evictions((widths[..., 0] > 0) & passed[:, None, :]))
        return self.storage.missing(tokens)

    def _lacks_window_of(self, token: int) -> bool:
        """Returns whether some layer no longer holds what a row at `token` sees in its window."""
        sees = token - self.windows + 1
        return bool(((self.windows > 0) & (self._passed_tokens > np.maximum(sees, 0))).any())

    @property
    def _gap_after_sinks(self) -> int:
        """Counts the tokens that are gone between the sinks and what follows them."""
        sinks = self.plan.sink_tokens
        behind = [*self.storage.columns()[0][:1, 2], *self.storage.places()[sinks : sinks + 1, 0]]
        return int(behind[0]) - sinks if behind else 0

    def _check_rows(
        self, tokens: int, parents: Sequence[int] | None, view: str, at: int | None
    ) -> None:
        if view not in VIEWS:
            raise UsageError(f"view {view!r} is not known; choose {' or '.join(VIEWS)}")
        if parents is not None and len(parents) != tokens:
            raise CacheError(f"{len(parents)} parents were given for {tokens} rows")
        cached_tokens = self.storage.tokens
        if at not in (None, cached_tokens) and (reason := self.why_not_edit()) is not None:
            raise CacheError(f"no rows can be put before others: {reason}")
        rows, room = self.storage.branch_rows, self.arena.draft_tokens
        if rows + tokens > room and (rows or parents is not None):
            raise BudgetError(
                f"a branch of this session holds {room} rows, {rows} + {tokens} were given; open "
                "it with more draft tokens"
            )
        first = cached_tokens if at is None else at
        check_pass(first, rows, tokens, self.context_tokens, self.chunk_tokens)

    def evidence(self) -> Evidence:
        """Collects what the policy decides by, and adds an observation to each page's history.

        A draft makes room for the page it closes up to its length early, and must decide what
        decoding one by one decides: close to a page's end, attention is as of where that begins.
        """
        facts, widths = self.storage.columns()
        return Evidence(
            facts=facts,
            widths=widths,
            windows=self.windows,
            tokens=self._boundary,
            head_dim=self.shape.head_dim,
            value_groups=self.arena.value_groups,
            attention=self._attention() if self.arena.probes else None,
            constants=self._constants,
            key_squares=self.storage.key_squares,
            weight_norms=self._weight_norms,
            retrieval=self._retrieval,
        )

    @property
    def _boundary(self) -> int:
        """Returns the tokens so far or, if a draft could close a page, when one first could."""
        floats = self.plan.sink_tokens + self.plan.tail_tokens
        draft = self.arena.draft_tokens
        past = (self.tokens - floats + draft) % PAGE_TOKENS
        return max(0, self.tokens - (past if past < draft else 0))

    def _attention(self) -> ObservedAttention:
        facts, queries = self.storage.evidence(self._boundary)
        names = (field.name for field in fields(ObservedAttention))
        return ObservedAttention(**dict(zip(names, (*facts, *queries), strict=True)))

    def _constants(self, layer: int) -> Constants:
        keys, values = self.storage.constants(layer)
        return Constants(
            key_min=keys[..., 1, :] - REACH * keys[..., 0, :],
            key_range=2 * REACH * keys[..., 0, :],
            value_min=values[..., 1, :] - REACH * values[..., 0, :],
            value_range=2 * REACH * values[..., 0, :],
        )

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
        """Computes a layer's attention, as `kvq.cache.Cache.attend` says."""
        if shared:
            return self.attend_shared(params, qkv, np.arange(len(qkv)), inv_freq, q_norm)
        self._check_shapes(params, qkv, positions, inv_freq, (q_norm, k_norm))
        if sink_logits is not None and sink_logits.shape != (params.num_heads,):
            raise CacheError(f"sink logits {sink_logits.shape} are not one of each head")
        return self.storage.attend(params, qkv, positions, inv_freq, q_norm, k_norm, sink_logits)

    def convolve(
        self, layer: int, bcx: NDArray[np.float32], weight: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Computes a short convolution, as `kvq.cache.Cache.convolve` says."""
        conv = self.arena.conv
        if conv is None or not 0 <= layer < conv.num_layers:
            raise CacheError(f"convolution {layer} is none of {conv}")
        if bcx.shape[1:] != (3 * conv.width,) or weight.shape != (conv.width, conv.taps):
            raise CacheError(f"rows {bcx.shape} and weights {weight.shape} are not those of {conv}")
        return self.storage.convolve(layer, bcx, weight)

    def recur(
        self,
        layer: int,
        rows: NDArray[np.float32],
        gates: NDArray[np.float32],
        weights: "DeltaWeights",
    ) -> NDArray[np.float32]:
        """Computes a delta net, as `kvq.cache.Cache.recur` says."""
        delta = self.arena.delta
        if delta is None or not 0 <= layer < delta.num_layers:
            raise CacheError(f"delta net {layer} is none of {delta}")
        known = weights.belong_to(delta)
        wide = rows.shape[1:] == (delta.conv_width + delta.value_width,)
        if not known or not wide or gates.shape != (len(rows), 2 * delta.value_heads):
            raise CacheError(f"rows {rows.shape} and gates {gates.shape} are not those of {delta}")
        return self.storage.recur(layer, rows, gates, weights)

    def attend_shared(
        self,
        params: AttentionParams,
        queries: NDArray[np.float32],
        rows: NDArray[np.int64],
        inv_freq: NDArray[np.float32],
        q_norm: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Computes attention of a layer that reuses the keys and values of layer `params.layer`.

        It comes after every layer's `attend` of the pass; of a chunk only the last layer's can be
        reused. queries float32 [R, H * D], not yet rotated, are of the pass's `rows` int64 [R];
        returns as many. The policy learns nothing from them. Raises `CacheError`.
        """
        self._check_params(params, inv_freq, (q_norm,))
        if queries.shape != (len(rows), params.num_heads * params.head_dim):
            raise CacheError(f"queries of shape {queries.shape} are not those of {len(rows)} rows")
        return self.storage.attend_shared(params, queries, rows, inv_freq, q_norm)

    def append(
        self,
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        positions: NDArray[np.int64],
        layers: Sequence[KeyTransform],
        *,
        at: int | None = None,
    ) -> None:
        """Adds tokens in every layer and commits them, as `kvq.cache.Cache.append` says."""
        from kvq.reference.stored import stored_rows

        shape, tokens = self.shape, len(positions)
        expected = (shape.num_layers, tokens, shape.num_kv_heads, shape.head_dim)
        if keys.shape != expected or values.shape != expected or len(layers) != expected[0]:
            raise CacheError(f"{keys.shape} keys and {values.shape} values are not the {expected}")
        queries = np.zeros((tokens, shape.num_heads, shape.head_dim), np.float32)
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        rows: list[NDArray[np.float32]] = []
        for layer, k, v in zip(layers, keys, values, strict=True):
            rows.append(np.concatenate([queries, k, v], axis=1).reshape(tokens, width))
            self._check_shapes(layer.params, rows[-1], positions, layer.inv_freq, (layer.k_norm,))
            # Numbers are checked before the pass: it closes pages layer by layer, and a refusal in
            # the second layer could not open those of the first again.
            largest = max(np.abs(k).max(initial=0), np.abs(v).max(initial=0))
            if layer.k_norm is not None or not largest * layer.params.rope_factor < _SMALL:
                stored_rows(layer.params, k, v, positions, layer.inv_freq, layer.k_norm)
        self.begin(tokens, at=at, kv_only_layers=range(shape.num_layers))
        try:
            for layer, qkv in zip(layers, rows, strict=True):
                self.attend(
                    layer.params, qkv, positions, layer.inv_freq, layer.k_norm, layer.k_norm
                )
        except CacheError:
            self.rewind()
            raise
        self.commit(tokens)

    def _check_shapes(
        self,
        params: AttentionParams,
        qkv: NDArray[np.float32],
        positions: NDArray[np.int64],
        inv_freq: NDArray[np.float32],
        norms: tuple[NDArray[np.float32] | None, ...],
    ) -> None:
        """Refuses arrays of a wrong shape, since native code trusts what it gets."""
        self._check_params(params, inv_freq, norms)
        expected = (len(positions), (params.num_heads + 2 * params.num_kv_heads) * params.head_dim)
        if qkv.shape != expected or positions.ndim != 1:
            raise CacheError(f"qkv of shape {qkv.shape} is not the {expected} of these positions")

    def _check_params(
        self,
        params: AttentionParams,
        inv_freq: NDArray[np.float32],
        norms: tuple[NDArray[np.float32] | None, ...],
    ) -> None:
        shape = self.shape
        sizes = (params.num_heads, params.num_kv_heads, params.head_dim)
        if sizes != (shape.num_heads, shape.num_kv_heads, shape.head_dim) or not (
            0 <= params.layer < shape.num_layers
        ):
            raise CacheError(f"layer {params.layer} with heads {sizes} is none of {shape}")
        if inv_freq.ndim != 1 or 2 * len(inv_freq) > params.head_dim:
            raise CacheError(f"{inv_freq.shape} frequencies do not fit {params.head_dim} channels")
        if any(norm is not None and norm.shape != (params.head_dim,) for norm in norms):
            raise CacheError(f"a norm's weights are not of shape ({params.head_dim},)")

    def commit(self, rows: int | Sequence[int]) -> None:
        """Ends the branch and keeps a path of it, as `kvq.cache.Cache.commit` says."""
        self.storage.commit(rows)
        assert self.storage.used_bytes <= self.budget_bytes

    def rewind(self, rows: int = 0) -> None:
        """Keeps only the branch's first `rows` rows; pages and committed rows stay as they were."""
        self.storage.rewind(rows)

    def trim(self, tokens: int) -> None:
        """Rolls back, as `kvq.cache.Cache.trim` says."""
        if tokens < self.tokens and self._lacks_window_of(tokens):
            tokens = 0
        self.storage.trim(tokens)
        self._passed_tokens[:] = np.minimum(self._passed_tokens, self.tokens)

    def mark(self, tokens: int) -> None:
        """Asks for a checkpoint, as `kvq.cache.Cache.mark` says."""
        if self.keeps_places:
            self.storage.mark(tokens)

    def why_not_edit(self) -> str | None:
        """Returns why nothing in the middle can be replaced, or None."""
        if not (mixers := self._stateful_mixers):
            return None
        return f"the model's {mixers} remember what stood before each token"

    @property
    def _stateful_mixers(self) -> str | None:
        """Names the layers beside attention that remember tokens, or returns None."""
        if self.arena.delta is not None:
            return "delta nets"
        return None if self.arena.conv is None else "convolutions"

    def edit(self, start: int, stop: int, count: int) -> None:
        """Leaves a gap in place of tokens, as `kvq.cache.Cache.edit` says."""
        if self._lacks_window_of(start):
            raise CacheError(
                f"layers with a window have given up tokens that are seen from token {start} on; a "
                "session opened for edits keeps them"
            )
        if (reason := self.why_not_edit()) is not None:
            raise CacheError(reason)
        self.storage.edit(start, stop, count)

    def _evict_sparsest_pages(self, tokens: int) -> tuple[int, int]:
        """Evicts pages that edits have left least of; returns what is missing then.

        A budget that holds the context gathers no evidence for a policy, and is short only of what
        `crowded` would have encoded again.
        """
        while any(missing := self.storage.missing(tokens)):
            left = self._tokens_left()
            if not len(left) or left.min() == PAGE_TOKENS:
                break
            layers, heads = np.indices((self.shape.num_layers, self.shape.num_kv_heads))
            pages = np.zeros((layers.size, 5), np.int32)
            pages[:, 0], pages[:, 1], pages[:, 2] = layers.ravel(), heads.ravel(), left.argmin()
            self.storage.demote(pages)
        return missing

    def _tokens_left(self) -> NDArray[np.int64]:
        """Counts each page's tokens that some view shows, int64 [C]; 64 where none does."""
        masks = np.ascontiguousarray(self.storage.columns()[0][:, 3:]).view(np.uint8)
        left = np.unpackbits(masks, axis=1).sum(axis=1, dtype=np.int64)
        return np.where(left == 0, PAGE_TOKENS, left)

    def crowded(self, tokens: int) -> list[tuple[int, int]]:
        """Returns what to encode again, as `kvq.cache.Cache.crowded` says."""
        if not any(self._missing(max(0, min(tokens, self.context_tokens)))):
            return []
        left = self._tokens_left()
        most = PAGE_TOKENS // 2 if self.arena.probes else PAGE_TOKENS - 1
        if not len(left) or left.min() > most:
            return []
        views = self.storage.views()
        page_views = views[views[:, 0] == left.argmin()]
        masks = np.ascontiguousarray(page_views[:, 4:]).view(np.uint8)
        view, slot = np.nonzero(np.unpackbits(masks, axis=1, bitorder="little"))
        shown = np.sort(page_views[view, 3] + slot)
        runs = np.split(shown, np.flatnonzero(np.diff(shown) > 1) + 1)
        return [(int(run[0]), int(run[-1]) + 1) for run in runs]

    def demote(self, actions: NDArray[np.int32]) -> None:
        """Applies actions int32 [n, 5]: layer, head, column, K bits, V bits; 0 and 0 evict."""
        if actions.shape != (len(actions), 5):
            raise CacheError(f"actions of shape {actions.shape} are not [n, 5]")
        if self.arena.resident_columns and actions[:, 3:].any():
            raise CacheError(
                f"pages keep their widths in a cache with {argument('kv_offload')}: leave it out"
            )
        self.storage.demote(actions)

    def lower_new_page_widths(self, widths: NDArray[np.uint8]) -> None:
        """Lowers the widths uint8 [L, Hk, 2] that the pages to come close at."""
        expected = (self.shape.num_layers, self.shape.num_kv_heads, 2)
        if widths.shape != expected:
            raise CacheError(f"widths of shape {widths.shape} are not {expected}")
        self.storage.lower_new_page_widths(widths)

    def shift(self, column: int, delta: int) -> None:
        """Moves a page by `delta` positions; the query turns back, the keys stay."""
        self.storage.shift(column, delta)

    def mask(self, column: int, mask: int) -> None:
        """Hides those of a page's 64 tokens that `mask` leaves out; nothing shows them again."""
        self.storage.mask(column, mask)

    def views(self) -> NDArray[np.int64]:
        """Returns every view of every page, int64 [V, 5].

        Its columns are column, pos0, delta, first token and mask. Slot i of a page is token
        first + i where bit i of the mask is set: its key was rotated to position pos0 + i and
        stands delta further now.
        """
        return self.storage.views()

    def places(self) -> NDArray[np.int64]:
        """Returns token, position and shift of the tail's rows, int64 [n, 3]."""
        return self.storage.places()

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Returns facts int64 [C, 4] (pos0, delta, first token, mask), widths uint8 [L, Hk, C, 2].

        Of a page with several views the first three are those of the view that stands last, the
        mask is what any of them shows.
        """
        return self.storage.columns()

    def usage(self) -> CacheUsage:
        """Counts mean widths and losses from the page table."""
        return CacheUsage.of([self.tally()], self.read_share)

    def tally(self) -> "Tally":
        """Counts what `usage` is computed from."""
        facts, widths = self.storage.columns()
        masks = np.ascontiguousarray(facts[:, 3:]).view(np.uint8)
        visible = np.unpackbits(masks, axis=1).sum(axis=1, dtype=np.int64)
        streams, tail = self.arena.streams, self.storage.tail_rows
        stored = streams * tail + int(((widths[..., 0] > 0) @ visible).sum())
        passed = np.maximum(0, self._passed_tokens - self.plan.sink_tokens).sum()
        bits = FLOAT_WIDTH * streams * tail + np.einsum("lhcs,c->s", widths, visible)
        channels = self.shape.head_dim
        return Tally(
            stored=stored * channels,
            seen=int(streams * self.tokens - passed * self.shape.num_kv_heads) * channels,
            k_bits=int(bits[0]) * channels,
            v_bits=int(bits[1]) * channels,
            offloaded_bytes=self.storage.offloaded_bytes,
            streamed_bytes=self.storage.streamed_bytes,
        )

    def new_page_widths(self) -> NDArray[np.uint8]:
        """Returns the widths uint8 [L, Hk, 2] that the next pages close at: at first the plan's."""
        return self.storage.new_page_widths()

    def page(self, layer: int, head: int, column: int) -> bytes:
        """Returns the stored bytes of one page: constants, then planes."""
        return self.storage.page(layer, head, column)

    def tail(
        self, layer: int, head: int
    ) -> tuple[NDArray[np.float16], NDArray[np.float16], NDArray[np.int32]]:
        """Returns floating-point rows, k and v float16 [n, D], and their positions int32 [n]."""
        return self.storage.tail(layer, head)

    def state(self) -> bytes:
        """Returns a snapshot of everything held; `load_state` of an equal cache restores it."""
        return self.storage.state()

    def load_state(self, state: bytes) -> None:
        """Restores a snapshot. Raises `SnapshotError` if it belongs to another arena."""
        self.storage.load_state(state)
        self._passed_tokens = self._count_passed_tokens()

    def _count_passed_tokens(self) -> NDArray[np.int64]:
        """Returns how many first tokens each layer with a window neither holds nor sees, int64 [L].

        The policy may have evicted some of them. A rollback then computes more again than it must.
        """
        sinks = self.plan.sink_tokens
        facts, widths = self.storage.columns()
        floats = self.storage.places()[sinks:, 0].min(initial=self.tokens)
        stored = (widths[..., 0] > 0).any(axis=1)
        oldest = np.where(stored, facts[:, 2], floats).min(axis=1, initial=floats)
        unseen = np.minimum(oldest, np.maximum(0, self.tokens - self.windows))
        leaves = (self.windows > 0) & (oldest > sinks) & any(self.arena.windows)
        return np.where(leaves, unseen, 0)

    def close(self) -> None:
        """Gives the arena back; the cache cannot be used afterwards."""
        self.storage.close()


def check_pass(first: int, rows: int, tokens: int, context_tokens: int, chunk_tokens: int) -> None:
    """Raises `BudgetError` where `tokens` more of a branch's `rows` exceed the context or a pass.

    `first` is the branch's first token.
    """
    if first + rows + tokens > context_tokens:
        raise BudgetError(
            f"{first} + {rows + tokens} tokens exceed this session's context of {context_tokens}; "
            f"open it with a larger {argument('context_tokens')}"
        )
    if not 1 <= tokens <= chunk_tokens:
        raise BudgetError(
            f"one forward pass takes 1 to {chunk_tokens} tokens in this budget, {tokens} were "
            "given; split them"
        )


def _check_tier(arena: ClassArena, device: str) -> None:
    on_host = device == HOST
    if arena.resident_columns and on_host:
        raise UsageError(
            f"this arena's {argument('kv_offload')} is the host's memory behind a device; a "
            "processor's is a file: resolve the spec with offload_file=True"
        )
    if arena.file_bytes and not on_host:
        raise UsageError(
            f"this arena's {argument('kv_offload')} is a file behind a processor's memory: the "
            f"device {device!r} has none"
        )
