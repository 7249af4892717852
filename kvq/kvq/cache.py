"""The KV cache of one sequence: a cache for each class of layers, in exactly one budget of bytes.

Layers of one class have the same query heads, KV heads and channels, so that their pages are alike;
most models have a single class. All classes hold the same tokens. Knows no model.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvq.class_cache import CacheUsage, ClassCache, KeyTransform
from kvq.config import AttentionParams, Budget, KvPlan
from kvq.errors import CacheError, SnapshotError, UsageError, argument
from kvq.geometry import require_budget
from kvq.native import NativeCache, figure
from kvq.sizing import DEFAULT_TOKENS, SHORTEST_CONTEXT_TOKENS, ClassArena, ClassSpec

if TYPE_CHECKING:
    from kvq.reference.delta import DeltaWeights

_USED_BYTES = attrgetter("storage.used_bytes")
WeightNorms = Callable[[], NDArray[np.float64]]
Feedback = NDArray[np.float32]
Retrieval = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Describes the cache that a sequence asks for.

    Attributes:
        parts: One `ClassSpec` per class of layers. They differ in `shape`, `windows`,
            `page_encodings` and `kv_shared_layers` alone; the first may have `conv` or `delta`.
        budget: The budget of all classes together. Each class gets the smallest number of bytes
            that opens it. Classes whose layers all have a sliding window then get what holds their
            whole context, since that does not grow with the context. What is left goes to the
            classes by what each still lacks. A budget in tokens holds so many in every class.
    """

    parts: tuple[ClassSpec, ...]
    budget: Budget

    def __post_init__(self) -> None:
        if self.offload_bytes and len(self.parts) > 1:
            raise UsageError(
                f"{argument('kv_offload')} is for models whose layers are all alike: leave it out"
            )

    @classmethod
    def of(
        cls, *classes: dict[str, Any], budget: Budget | None = None, **shared: Any
    ) -> "CacheSpec":
        """Describes a cache by the fields of `ClassSpec` that differ, and those that all share.

        Args:
            classes: For each class of layers its fields of `ClassSpec`, at least `shape`.
            budget: Budget of all classes together; None for `DEFAULT_TOKENS` tokens.
            shared: Fields of `ClassSpec` that all classes have, at least `plan` and
                `context_tokens`.

        Raises:
            UsageError: For a combination that is not possible.
        """
        parts = tuple(ClassSpec(**shared, **fields) for fields in classes)
        return cls(parts=parts, budget=budget or Budget())

    @property
    def plan(self) -> KvPlan:
        """Returns the widths and floating-point tokens, the same of every class."""
        return self.parts[0].plan

    @property
    def policy(self) -> str:
        """Names the policy of every class."""
        return self.parts[0].policy

    @property
    def read(self) -> str:
        """Names the selector of every class."""
        return self.parts[0].read

    @property
    def offload_bytes(self) -> int:
        """Returns the bytes of the second tier; 0 where there is none."""
        return self.parts[0].offload_bytes

    @property
    def context_tokens(self) -> int:
        """Returns the most tokens that the cache will ever hold."""
        return self.parts[0].context_tokens

    @cached_property
    def budget_bytes(self) -> int:
        """Returns the bytes that the budget means."""
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
        """Returns the whole context's bytes at 16 bits; of a layer with a window those it sees."""
        return sum(part.float_bytes for part in self.parts)

    @cached_property
    def minimum_bytes(self) -> int:
        """Returns the smallest budget that opens a cache of this context."""
        return sum(part.minimum_bytes for part in self.parts)

    @cached_property
    def whole_bytes(self) -> int:
        """Returns the smallest budget that holds the whole context without losing a bit."""
        return sum(part.whole_bytes for part in self.parts)

    def bytes_for_tokens(self, tokens: int) -> int:
        """Returns the smallest budget that holds `tokens` tokens without losing a bit."""
        return sum(part.bytes_for_tokens(tokens) for part in self.parts)

    def changed(self, **changes: Any) -> "CacheSpec":
        """Returns a copy with other values of fields that all classes share, and of `budget`."""
        budget = changes.pop("budget", self.budget)
        parts = tuple(replace(part, **changes) for part in self.parts)
        return CacheSpec(parts=parts, budget=budget)

    def shortened(self) -> "CacheSpec":
        """Returns the spec with the longest context that an unquantised cache can hold.

        A quantised cache gives up bits and pages instead: its context stays as it is.
        """
        if self.plan.quantized:
            return self
        if self.budget.num_bytes is None and self.budget.fraction is None:
            tokens = min(self._budget_tokens, self.context_tokens)
            return self.changed(context_tokens=tokens)
        num_bytes, shortest = self.budget_bytes, SHORTEST_CONTEXT_TOKENS
        longer = bisect_right(
            range(shortest + 1, self.context_tokens + 1),
            num_bytes,
            key=lambda tokens: self.changed(context_tokens=tokens).minimum_bytes,
        )
        return self.changed(context_tokens=shortest + longer, budget=Budget(num_bytes=num_bytes))

    def resolved(self) -> "Arena":
        """Divides the budget. Raises `BudgetError` naming the smallest budget that opens."""
        if len(self.parts) == 1:
            (part,) = self.parts
            return Arena(spec=self, parts=(replace(part, budget=self.budget).resolved(),))
        require_budget(self.budget_bytes, self.minimum_bytes)
        arenas = tuple(
            replace(part, budget=Budget(num_bytes=num_bytes)).resolved()
            for part, num_bytes in zip(self.parts, self._shares(), strict=True)
        )
        return Arena(spec=self, parts=arenas)

    def _shares(self) -> list[int]:
        """Returns the bytes of every class, `budget_bytes` together."""
        if self.budget.num_bytes is None and self.budget.fraction is None:
            return [part.bytes_for_tokens(self._budget_tokens) for part in self.parts]
        shares = [part.minimum_bytes for part in self.parts]
        left = self.budget_bytes - sum(shares)
        lacks = [part.whole_bytes - least for part, least in zip(self.parts, shares, strict=True)]
        windowed = [all(part.windows) and bool(part.windows) for part in self.parts]
        for kind in (True, False):
            chosen = [i for i, has in enumerate(windowed) if has == kind and lacks[i] > 0]
            lacking = sum(lacks[i] for i in chosen)
            shared = min(left, lacking)
            for i in chosen:
                shares[i] += shared * lacks[i] // lacking
            left = self.budget_bytes - sum(shares)
        # The last class gets what no class lacks and the remainders of the divisions.
        shares[-1] += left
        return shares


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Describes the memory of a sequence's cache, in exactly the bytes of the budget.

    It has a `ClassArena` for each class of layers.
    """

    spec: CacheSpec
    parts: tuple[ClassArena, ...]

    @property
    def plan(self) -> KvPlan:
        """Returns the plan of the class that holds fewest tokens in floating point."""
        return min((part.plan for part in self.parts), key=lambda plan: plan.tail_tokens)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all classes."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def context_tokens(self) -> int:
        """Returns the most tokens that the cache will ever hold."""
        return self.parts[0].context_tokens

    @property
    def chunk_tokens(self) -> int:
        """Returns the most tokens of a prompt that go through the model at once."""
        return min(part.chunk_tokens for part in self.parts)

    @property
    def draft_tokens(self) -> int:
        """Returns the most rows of a branch."""
        return self.parts[0].draft_tokens

    @property
    def whole_tokens(self) -> int:
        """Returns the most tokens of which no class gives anything up."""
        return min(part.whole_tokens for part in self.parts)

    @property
    def fewest_bits(self) -> tuple[int, int]:
        """Returns the key and value bits that pages fall to before tokens are given up."""
        return self.parts[0].fewest_bits

    def tokens_at(self, k_bits: int, v_bits: int) -> int:
        """Returns the most tokens of which no class gives any up at these widths."""
        return min(part.tokens_at(k_bits, v_bits) for part in self.parts)

    @property
    def probes(self) -> bool:
        """Returns whether any class keeps evidence for its policy."""
        return any(part.probes for part in self.parts)

    @property
    def evidence(self) -> str:
        """Says in words what each class keeps for its policy to decide by."""
        return "; ".join(part.evidence for part in self.parts)

    @property
    def offload_bytes(self) -> int:
        """Returns the bytes of the second tier: of the host's memory, or of a file."""
        return sum(part.offload_bytes for part in self.parts)

    @property
    def keeps_places(self) -> bool:
        """Returns whether convolutions or delta nets keep checkpoints to go back to."""
        return any(part.keeps_places for part in self.parts)

    def first(self, count: int) -> "Arena":
        """Returns the arena of the first `count` classes alone, in the bytes they have here."""
        return self._of(slice(count))

    def last(self) -> "Arena":
        """Returns the arena of the last class alone, in the bytes it has here."""
        return self._of(slice(-1, None))

    def _of(self, which: slice) -> "Arena":
        parts = self.parts[which]
        budget = Budget(num_bytes=sum(part.num_bytes for part in parts))
        return Arena(spec=CacheSpec(parts=self.spec.parts[which], budget=budget), parts=parts)


class Cache:
    """Caches the keys and values of one sequence, quantised, in exactly the bytes of `arena`.

    A forward pass is `begin(n)` and one `attend` per layer, by the graph or directly. Its rows form
    a branch. Further passes may extend it, until `commit` keeps a path of it or `rewind` forgets
    it. `AttentionParams.cache` names the class that `AttentionParams.layer` counts in.
    """

    # Committed tokens, evicted ones included.
    tokens = figure("_first.tokens")
    # Rows after the committed tokens that are neither kept nor forgotten yet.
    branch_rows = figure("_first.branch_rows")

    def __init__(
        self,
        arena: Arena,
        *,
        weight_norms: Sequence[WeightNorms] = (),
        retrieval: Sequence[Retrieval] = (),
        feedback: Sequence[Feedback] = (),
        storage: type[NativeCache] = NativeCache,
    ) -> None:
        """Opens an empty cache.

        Args:
            arena: Made by `CacheSpec.resolved`.
            weight_norms: For every class a function that gives its `Evidence.weight_norms`; or ().
            retrieval: For every class its `Evidence.retrieval`; or ().
            feedback: For every class float32 [L, Hk, D, D], by which the rounding error of a key's
                channel is carried to the next ones (`kvq.reference.stored.carried`); or ().
            storage: Class that holds the pages, see `kvq.devices.storage_on`.

        Raises:
            BackendError: Where the native library or the device cannot be used.
            UsageError: For a second tier that the device does not have.
        """
        self.arena = arena
        self.plan = arena.plan
        parts: list[ClassCache] = []
        try:
            for index, part in enumerate(arena.parts):
                parts.append(
                    ClassCache(
                        part,
                        weight_norms=weight_norms[index] if weight_norms else None,
                        retrieval=retrieval[index] if retrieval else None,
                        feedback=feedback[index] if feedback else None,
                        storage=storage,
                    )
                )
        except BaseException:
            for opened in parts:
                opened.close()
            raise
        self.parts = tuple(parts)
        # All classes hold the same tokens.
        self._first = self.parts[0].storage
        # Numbers by which the nodes of a graph name the classes' caches.
        self.handles = tuple(part.handle for part in parts)
        # Bytes of all classes.
        self.budget_bytes = arena.num_bytes
        # Most tokens the cache will ever hold.
        self.context_tokens = arena.context_tokens
        # Most tokens one forward pass may bring.
        self.chunk_tokens = min(part.chunk_tokens for part in parts)
        # Bytes that one more token costs at the plan's widths, all layers.
        self.bytes_per_token = sum(part.bytes_per_token for part in parts)
        # Whether convolutions or delta nets keep checkpoints to go back to.
        self.keeps_places = parts[0].keeps_places

    @property
    def used_bytes(self) -> int:
        """Returns the bytes in use now."""
        return sum(map(_USED_BYTES, self.parts))

    @property
    def peak_bytes(self) -> int:
        """Returns no fewer bytes than were ever in use at once, and never above `budget_bytes`."""
        return sum(part.peak_bytes for part in self.parts)

    @property
    def read_share(self) -> float:
        """Returns which share of the pages in sight steps have read so far; 1 before any."""
        seen = sum(part.storage.pages_seen for part in self.parts)
        return sum(part.storage.pages_read for part in self.parts) / seen if seen else 1.0

    @property
    def draft_room(self) -> int:
        """Returns how many rows a pass may bring so that each sees what it would see alone.

        It is 1 or more. A row that closes a page is a pass of its own: rows before it must not see
        what gives way for the page, and those after it see the page and no longer what it was made
        from.
        """
        return min(part.draft_room for part in self.parts)

    @property
    def tree_room(self) -> int:
        """Returns how many rows of `draft_room` may be a tree: those read in one tile of 64 rows.

        Within it a row's result does not depend on where it stands, so that a path through a tree
        has, bit for bit, what it would have alone.
        """
        return min(part.tree_room for part in self.parts)

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        kv_only_layers: Sequence[int] = (),
    ) -> None:
        """Adds a pass of `tokens` rows to the branch, which holds `arena.draft_tokens` at most.

        It makes room for what they may become: the policy lowers and evicts pages. Rows are
        numbered from 0 in the order they were added. A row sees the committed tokens, its ancestors
        and itself. Only a chain into an empty branch may bring more rows, up to `chunk_tokens`: a
        chunk of a prompt. Where one class of layers refuses, no class has begun.

        Args:
            tokens: Rows of the pass.
            parents: For each new row the number of the row that it follows; -1 is the last
                committed token. None: a chain that goes on from the newest row.
            view: "full", or "hi" to read 8-bit pages by their high nibbles (QuantSpec, arXiv
                2502.10424).
            at: Token that the first row is, in a gap that `edit` left and that holds all rows of
                the branch. None: the pass goes on from the end, or as the open branch does.
            kv_only_layers: Layers in which the rows are stored but attend to nothing: `attend`
                returns zeros. The policy learns nothing from such a pass.

        Raises:
            BudgetError: The rows exceed the context, a pass, the branch or the budget.
            CacheError: The rows, parents or layers are not possible here.
            UsageError: The view is not known.
        """
        if kv_only_layers and len(self.parts) > 1:
            raise CacheError("layers of several classes cannot be left out of a pass")
        begun: list[ClassCache] = []
        try:
            for part in self.parts:
                part.begin(tokens, parents, view=view, at=at, kv_only_layers=kv_only_layers)
                begun.append(part)
        except Exception:
            for part in begun:
                part.rewind(part.branch_rows - tokens)
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
        """Computes a layer's attention over the cache and the new tokens, and stores these.

        Args:
            params: Constants of the layer.
            qkv: float32 [T, (H + 2 Hk) * D]: query, key and value heads, not yet rotated; with
                `shared` the query heads alone.
            positions: int64 [T]: the position of each row.
            inv_freq: float32 [rotary_dim / 2]: angle per position of each rotated pair.
            q_norm: float32 [D]: weights of the RMS norm of queries; None for no norm.
            k_norm: float32 [D]: the same of keys.
            shared: Whether the layer reuses the keys and values of the layer that `params` names.
                Call it after every other layer's `attend` of the pass. Default False.
            sink_logits: float32 [H]: a learned logit of no token that shares in each head's softmax
                (`kvq.reference.stored.attention_weights`). The policy's evidence leaves it out.

        Returns:
            The heads' outputs, float32 [T, H * D].

        Raises:
            CacheError: A shape is wrong, or a key or value is beyond float16.
        """
        arrays = (params, qkv, positions, inv_freq, q_norm, k_norm)
        return self._of(params).attend(*arrays, shared=shared, sink_logits=sink_logits)

    def convolve(
        self, layer: int, bcx: NDArray[np.float32], weight: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Computes a short convolution of the pass's new rows; see `kvq.reference.conv`.

        Every convolution is called once per pass, in order, before, between or after those layers
        that attend. The first class of layers keeps its rows.

        Args:
            layer: Number of the convolution, from 0.
            bcx: float32 [T, 3 width]: B, C and x side by side.
            weight: float32 [width, taps].

        Returns:
            float32 [T, width].

        Raises:
            CacheError: A shape is wrong, or B * x is not finite.
        """
        return self.parts[0].convolve(layer, bcx, weight)

    def recur(
        self,
        layer: int,
        rows: NDArray[np.float32],
        gates: NDArray[np.float32],
        weights: "DeltaWeights",
    ) -> NDArray[np.float32]:
        """Computes a delta net of the pass's new rows; see `kvq.reference.delta`.

        It is called as `convolve` is. The first class of layers keeps its states.

        Args:
            layer: Number of the delta net, from 0.
            rows: float32 [T, conv_width + value_width]: queries, keys, values and gate.
            gates: float32 [T, 2 * value_heads]: b, then a.
            weights: Weights of the net.

        Returns:
            float32 [T, value_width].

        Raises:
            CacheError: A shape is wrong, or a number is not finite.
        """
        return self.parts[0].recur(layer, rows, gates, weights)

    def _of(self, params: AttentionParams) -> ClassCache:
        if not 0 <= params.cache < len(self.parts):
            raise CacheError(f"class {params.cache} is none of {len(self.parts)}")
        return self.parts[params.cache]

    def commit(self, rows: int | Sequence[int]) -> None:
        """Ends the branch: keeps a path of it, forgets every other row, closes full pages.

        Args:
            rows: Row numbers, root first, each the parent of the next; or how many of the first
                rows, which must be a chain. 0 forgets all.

        Raises:
            CacheError: The rows are no such path.
        """
        for part in self.parts:
            part.commit(rows)

    def rewind(self, rows: int = 0) -> None:
        """Keeps only the branch's first `rows` rows."""
        for part in self.parts:
            part.rewind(rows)

    def trim(self, tokens: int) -> None:
        """Rolls back to the first `tokens` tokens, or to fewer.

        It goes back to none where some layer no longer holds what the next token sees in its
        window, and all classes go back as far as the one that goes furthest. Convolutions and
        delta nets go back exactly by a few tokens, and otherwise to the nearest earlier
        checkpoint, see `mark`.
        """
        while any(part.tokens > tokens for part in self.parts):
            for part in self.parts:
                if part.tokens > tokens:
                    part.trim(tokens)
                tokens = min(tokens, part.tokens)

    def mark(self, tokens: int) -> None:
        """Asks for a checkpoint after the first `tokens` tokens, which may be still to come.

        Convolutions and delta nets keep the two places longest that were marked, or gone back to,
        last. Nothing happens in a model without these, see `keeps_places`.
        """
        self.parts[0].mark(tokens)

    def why_not_edit(self) -> str | None:
        """Returns why nothing in the middle can be replaced, or None."""
        return self.parts[0].why_not_edit()

    def edit(self, start: int, stop: int, count: int) -> None:
        """Removes tokens `start` to `stop` and moves what follows, leaving a gap for `count`.

        This is positional integrity encoding (PIE, arXiv 2407.03157), which changes metadata only:
        no page's bytes change and no key is rotated. A page that holds tokens of both sides gets
        two *views*, each with a mask and a shift, and queries are turned back by the shift.
        `begin(n, at=start)` fills the gap; until then nobody sees its tokens.

        Args:
            start: First token that goes.
            stop: First token behind it that stays.
            count: Tokens of the gap.

        Raises:
            CacheError: A sink would move, the context would overflow, the budget has no more views,
                or some layer no longer holds what is seen from `start`. Of several classes all
                then keep only what stands before `start`.
        """
        try:
            for part in self.parts:
                part.edit(start, stop, count)
        except CacheError:
            if len(self.parts) > 1:
                self.trim(start)
            raise

    def crowded(self, tokens: int) -> list[tuple[int, int]]:
        """Returns what to encode again if edits have left too little room for `tokens` more rows.

        Returns:
            Runs (first token, token after the last) in the page that has the fewest tokens left:
            once they are gaps, the page is free. The list is empty if there is room or no page has
            lost a token. In a budget that gives pages up anyway, a page must be half gone.
        """
        for part in self.parts:
            if runs := part.crowded(tokens):
                return runs
        return []

    def append(
        self,
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        positions: NDArray[np.int64],
        layers: Sequence[KeyTransform],
        *,
        at: int | None = None,
    ) -> None:
        """Adds T tokens whose keys and values were made elsewhere, in every layer, and commits.

        The policy learns nothing from them. After an error the cache is unchanged.

        Args:
            keys: float32 [L, T, Hk, D], before each layer's key norm and rotation; T is up to
                `chunk_tokens`.
            values: float32 [L, T, Hk, D].
            positions: int64 [T]: the position of each token.
            layers: How each layer turns keys into what is stored.
            at: As `begin` takes it.

        Raises:
            BudgetError: There is no room.
            CacheError: A shape is wrong or a number is not finite.
        """
        first, *rest = self.parts
        if rest:
            raise CacheError("keys and values of several classes of layers cannot be appended")
        first.append(keys, values, positions, layers, at=at)

    def usage(self) -> CacheUsage:
        """Counts mean widths and losses of all classes from their page tables."""
        return CacheUsage.of([part.tally() for part in self.parts], self.read_share)

    def state(self) -> bytes:
        """Returns a snapshot of everything held; `load_state` of an equal cache restores it."""
        states = [part.state() for part in self.parts]
        if len(states) == 1:
            return b"".join(states)
        lengths = struct.pack(f"<{len(states)}q", *map(len, states))
        return lengths + b"".join(states)

    def load_state(self, state: bytes) -> None:
        """Restores a snapshot; a refused one changes nothing. Raises `SnapshotError`."""
        if len(self.parts) == 1:
            self.parts[0].load_state(state)
            return
        header = struct.Struct(f"<{len(self.parts)}q")
        whole = len(state) >= header.size
        lengths: tuple[int, ...] = header.unpack_from(state) if whole else (-1,)
        if min(lengths) < 0 or header.size + sum(lengths) != len(state):
            raise SnapshotError(
                "the saved cache is not of a model with as many classes of layers; read its text "
                "again and save the session again"
            )
        before = [part.state() for part in self.parts]
        start = header.size
        try:
            for part, length in zip(self.parts, lengths, strict=True):
                part.load_state(state[start : start + length])
                start += length
            if len({part.tokens for part in self.parts}) > 1:
                raise SnapshotError("the saved cache holds other tokens in one class of layers")
        except SnapshotError:
            for part, earlier in zip(self.parts, before, strict=True):
                part.load_state(earlier)
            raise

    def close(self) -> None:
        """Gives the arena back; the cache cannot be used afterwards."""
        for part in self.parts:
            part.close()
