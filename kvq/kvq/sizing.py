"""Computes how many bytes a cache needs, and what a cache of given bytes can hold.

`geometry` divides them into regions. Knows policies by name and holds no data.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from kvq.abi import Regions
from kvq.config import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_POLICY,
    DEFAULT_READ,
    MOST_DRAFT_TOKENS,
    PAGE_TOKENS,
    Budget,
    CacheShape,
    ConvShape,
    DeltaShape,
    KvPlan,
    PageForm,
)
from kvq.errors import BudgetError, UsageError, argument
from kvq.formats import constant_bytes, format_bytes, kept_heads, seen_tokens, sized, value_groups
from kvq.geometry import DELTA_PLACES, LEAST_DELTA_STATES, Geometry, require_budget
from kvq.policies import policy_named
from kvq.selectors import rule_named

# Without a budget there is room for this many tokens, or for the context if that is shorter.
DEFAULT_TOKENS = 8192
SHORTEST_CONTEXT_TOKENS = 2
# Share of a smaller budget, beyond the least that opens, that delta nets may fill with checkpoints.
PLACES_SHARE = 1 / 4


@dataclass(frozen=True, kw_only=True)
class ClassArena(Geometry):
    """Describes the memory of one cache: what `num_bytes` hold of what `spec` asks for.

    Attributes:
        max_columns: Pages per stream that the table has room for.
        regions: Bytes of each region before the pages.
        resident_columns: Columns of an arena in two tiers that lie on the device, the newest, in
            `device_bytes` with all that is no page; 0: there is one tier.
        file_bytes: The last bytes of a processor's arena, of the oldest pages, that are a file's.
    """

    spec: "ClassSpec"
    num_bytes: int
    max_columns: int
    regions: Regions
    resident_columns: int = 0
    file_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """Returns the bytes left for pages."""
        return self.num_bytes - self.regions.num_bytes

    @property
    def evidence(self) -> str:
        """Says in words what is kept for policies to decide by, and of how many pages a stream.

        Saved sessions have this text.
        """
        if not self.probes:
            return "nothing"
        heads, spread = kept_heads(self.shape), "new and old" if self.samples else "new"
        return (
            f"{heads} query heads of {spread} tokens, {self.probed_shared_layers} readers, "
            f"{self.max_columns} columns"
        )

    @property
    def whole_tokens(self) -> int:
        """Returns the most tokens held at the plan's widths, before bits or tokens are given up."""
        return self.tokens_at(self.plan.k_bits, self.plan.v_bits)

    @property
    def fewest_bits(self) -> tuple[int, int]:
        """Returns the key and value bits that pages fall to before tokens are given up."""
        plan = (self.plan.k_bits, self.plan.v_bits)
        fewest = policy_named(self.spec.policy).fewest_bits if self.plan.quantized else None
        return plan if fewest is None else (min(plan[0], fewest[0]), min(plan[1], fewest[1]))

    def tokens_at(self, k_bits: int, v_bits: int) -> int:
        """Returns the most tokens held while all pages have these widths."""
        if not self.plan.quantized:
            return self.context_tokens
        within = self.columns_within(self.pool_bytes, k_bits, v_bits)
        columns = min(self.max_columns, within)
        if columns >= self.context_columns:
            return self.context_tokens
        return self.plan.sink_tokens + self.plan.tail_tokens + columns * PAGE_TOKENS

    @property
    def offload_bytes(self) -> int:
        """Returns the bytes of the second tier: of the host's memory, or of a file."""
        spilled = self.max_columns - self.resident_columns if self.resident_columns else 0
        return self.file_bytes or spilled * self.streams * self._plane_bytes

    def bytes_with_resident(self, columns: int) -> int:
        """Returns a device's bytes: constants, planes of `columns`, and twice a layer's others."""
        heads, spilled = self.shape.num_kv_heads, self.max_columns - columns
        planes = (columns * self.streams + 2 * spilled * heads) * self._plane_bytes
        return self.regions.num_bytes + self.max_columns * self.streams * self._constants + planes

    @property
    def _constants(self) -> int:
        return constant_bytes(self.shape.head_dim, self.value_groups)

    @property
    def _plane_bytes(self) -> int:
        """Returns the bytes of one page's planes at the plan's widths."""
        return self._page_bytes(self.plan.k_bits, self.plan.v_bits) - self._constants

    def in_tiers(self, device_bytes: int) -> "ClassArena":
        """Returns the arena with as many columns on a device as so many bytes there take.

        At least what one pass closes stays there. Raises `BudgetError`.
        """
        least = max(1, self._columns_closed_by(self.pass_tokens))
        if least >= self.max_columns or device_bytes < self.bytes_with_resident(least):
            needed = min(self.bytes_with_resident(min(least, self.max_columns)), self.num_bytes)
            raise BudgetError(
                f"{format_bytes(device_bytes)} of KV budget cannot hold, beside what "
                f"{argument('kv_offload')} "
                f"moves to the host, all pages' constants, the pages of one pass and twice those "
                f"of a layer; "
                f"{sized(needed)} can"
            )
        step = self.bytes_with_resident(least + 1) - self.bytes_with_resident(least)
        more = (device_bytes - self.bytes_with_resident(least)) // step if step > 0 else 0
        return replace(self, resident_columns=min(least + more, self.max_columns - 1))

    def over_file(self, memory_bytes: int) -> "ClassArena":
        """Returns the arena with so many bytes in memory and the others, all planes, in a file.

        Constants, which are read of every page, stay in memory. Raises `BudgetError`.
        """
        least = self.num_bytes - self.max_columns * self.streams * self._plane_bytes
        if memory_bytes < least:
            raise BudgetError(
                f"{format_bytes(memory_bytes)} of KV budget cannot hold, beside what "
                f"{argument('kv_offload')} moves to a file, the page table, the pages' constants "
                f"and the newest tokens; {sized(least)} can"
            )
        return replace(self, file_bytes=self.num_bytes - memory_bytes)


@dataclass(frozen=True, kw_only=True)
class ClassSpec:
    """Describes the cache that one class of layers asks for.

    Attributes:
        context_tokens: Most tokens it will ever hold.
        budget: Its budget; empty for `DEFAULT_TOKENS` tokens.
        chunk_tokens: Tokens of a prompt at once, fewer in a small context or budget. Default 256.
        draft_tokens: Rows of a branch, 1 to 128. Default 8.
        threads: Threads that share a pass. Default 1.
        policy: What gives way when space is short, as `--kv-policy` writes it.
        windows: Sliding window of every layer in tokens, 0 for none. Empty: no layer has a window.
        edits: Whether the text will be edited in the middle, where queries look again at what a
            window has passed: all of it is kept.
        observed: Whether to keep probe queries as evidence. None: if the policy asks for attention
            and the budget cannot hold the whole context.
        page_encodings: How the pages of every layer's KV heads are encoded, layer by layer; empty:
            all plain.
        read: What is read of the pages, as `--kv-read` writes it.
        offload_bytes: Bytes of a second tier for the pages that the budget does not hold; 0: there
            is none, and pages lose bits.
        offload_file: Whether the second tier is a file behind a processor's memory, not the host's
            memory behind a device's.
        conv: Convolutions beside the layers that attend, whose rows are held here too.
        delta: Delta nets beside them, likewise.
        kv_shared_layers: How many layers store no keys and values and reuse the last layer's.

    Raises:
        UsageError: A value, or a combination of them, is not possible.
    """

    shape: CacheShape
    plan: KvPlan
    context_tokens: int
    budget: Budget = field(default_factory=Budget)
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    threads: int = 1
    policy: str = DEFAULT_POLICY
    windows: tuple[int, ...] = ()
    edits: bool = False
    observed: bool | None = None
    page_encodings: tuple[PageForm, ...] = ()
    read: str = DEFAULT_READ
    offload_bytes: int = 0
    offload_file: bool = False
    conv: ConvShape | None = None
    delta: DeltaShape | None = None
    kv_shared_layers: int = 0

    def __post_init__(self) -> None:
        streams = self.shape.streams
        if self.page_encodings and len(self.page_encodings) != streams:
            raise UsageError(
                f"{len(self.page_encodings)} encodings of pages were given for {streams} heads"
            )
        if self.windows and len(self.windows) != self.shape.num_layers:
            raise UsageError(
                f"{len(self.windows)} windows were given for {self.shape.num_layers} layers"
            )
        if not 1 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise UsageError(
                f"room for {self.draft_tokens} draft tokens is not possible: give 1 to "
                f"{MOST_DRAFT_TOKENS}"
            )
        if self.conv is not None and self.delta is not None:
            raise UsageError("a cache has convolutions or delta nets beside attention, not both")

        # Called because it refuses what is not possible.
        _ = rule_named(self.read)

    def resolved(self) -> ClassArena:
        """Divides the budget. Raises `BudgetError` naming the smallest budget that opens."""
        num_bytes = self.budget_bytes
        whole = num_bytes >= self.whole_bytes
        if self.offload_bytes and not whole:
            return self._in_tiers()
        probes = self.observed
        if probes is None:
            require_budget(num_bytes, self.minimum_bytes)
            # Where the whole context fits, space is never short and no policy runs.
            probes = self._asks_attention and not whole
        places = DELTA_PLACES if whole else self._affordable_places(num_bytes)
        geometry = self.geometry(tight=not whole, probes=probes, places=places)
        while places and num_bytes < geometry.minimum_bytes:
            places -= 1
            geometry = self.geometry(tight=not whole, probes=probes, places=places)
        while not geometry.fits_chunk(num_bytes) or (
            not whole and geometry.chunk_is_too_long(num_bytes)
        ):
            geometry = geometry.with_shorter_chunk()
        columns, regions = geometry.divide(num_bytes)
        return ClassArena(
            **vars(geometry), spec=self, num_bytes=num_bytes, max_columns=columns, regions=regions
        )

    def _in_tiers(self) -> ClassArena:
        """Divides the whole context between a first tier and a second. Raises `BudgetError`."""
        if not self.plan.quantized:
            raise UsageError(
                f"{argument('kv_offload')} moves quantised pages; {argument('kv', 'fp')} has "
                "none: leave one out"
            )
        whole = replace(self, budget=Budget(num_bytes=self.whole_bytes), offload_bytes=0)
        arena = replace(whole.resolved(), spec=self)
        divide = arena.over_file if self.offload_file else arena.in_tiers
        arena = divide(self.budget_bytes)
        if arena.probes:
            raise UsageError(
                f"{argument('kv_offload')} gives up no page, so nothing can be observed for it"
            )
        if arena.offload_bytes > self.offload_bytes:
            raise BudgetError(
                f"{argument('kv_offload')} {format_bytes(self.offload_bytes)} cannot hold what a "
                "context of "
                f"{self.context_tokens} tokens has beyond the budget; {sized(arena.offload_bytes)} "
                f"can, or a smaller {argument('context_tokens')} or a larger "
                f"{argument('kv_budget')}"
            )
        return arena

    def _affordable_places(self, num_bytes: int) -> int:
        """Counts the places whose states fit a budget less than the whole context's."""
        state_bytes = self.delta.state_bytes if self.delta else 0
        free = max(0, num_bytes - self.minimum_bytes)
        return min(DELTA_PLACES, int(free * PLACES_SHARE) // state_bytes) if state_bytes else 0

    def geometry(self, *, tight: bool, probes: bool, places: int) -> Geometry:
        """Returns the arena's geometry; `tight`: of a cache that cannot hold its whole context.

        Delta nets keep the states of so many `places` beside the newest.
        """
        return Geometry(
            shape=self.shape,
            plan=tight_plan(self.plan) if tight else self.plan,
            context_tokens=self.context_tokens,
            chunk_tokens=min(self.chunk_tokens, self.context_tokens),
            draft_tokens=self.draft_tokens,
            splits=1 if self.threads == 1 else -(-2 * self.threads // self.shape.num_kv_heads),
            probes=probes and self.plan.quantized,
            samples=probes and self.plan.quantized and self._asks_samples,
            value_groups=value_groups(self.shape.head_dim, self.page_encodings),
            # A second tier has room for all, and gives up no page.
            windows=() if self.edits or self.offload_bytes else self.windows,
            conv=self.conv,
            delta=self.delta,
            delta_states=LEAST_DELTA_STATES + places,
            kv_shared_layers=self.kv_shared_layers,
        )

    @cached_property
    def budget_bytes(self) -> int:
        """Returns the bytes that the budget means."""
        budget = self.budget
        if budget.num_bytes is not None:
            return budget.num_bytes
        if budget.fraction is not None:
            return int(budget.fraction * self.float_bytes)
        return self.bytes_for_tokens(self._budget_tokens)

    @property
    def float_bytes(self) -> int:
        """Returns the whole context's bytes at 16 bits; of a layer with a window those it sees."""
        layers = self.shape.num_layers
        seen = seen_tokens(layers, self.windows, self.context_tokens)
        return seen * self.shape.float_bytes_per_token // layers

    @cached_property
    def minimum_bytes(self) -> int:
        """Returns the smallest budget that opens a cache of this context.

        Holding a short context whole can cost less than the probes of a policy that asks for
        attention.
        """
        geometry = self.geometry(tight=True, probes=self._asks_attention, places=0)
        shortest = replace(geometry, chunk_tokens=min(geometry.chunk_tokens, PAGE_TOKENS))
        return min(shortest.minimum_bytes, self.whole_bytes)

    @cached_property
    def whole_bytes(self) -> int:
        """Returns the smallest budget that holds the whole context without losing a bit."""
        return self.whole_geometry.bytes_for_columns(self.whole_geometry.context_columns)

    @property
    def whole_geometry(self) -> Geometry:
        """Returns the geometry of an arena that holds the whole context."""
        return self.geometry(tight=False, probes=False, places=DELTA_PLACES)

    def bytes_for_tokens(self, tokens: int) -> int:
        """Returns the smallest budget that holds `tokens` tokens without losing a bit.

        A cache whose context is longer than that spends more on its page table, and on probes if
        its policy asks for attention.
        """
        if tokens >= self.context_tokens:
            return self.whole_bytes
        if not self.plan.quantized:
            return replace(self, context_tokens=tokens).whole_bytes
        # More bytes allow more places, which take bytes: the first number that fits its own bytes.
        candidates = (self._tight_bytes(tokens, places) for places in range(DELTA_PLACES + 1))
        enough = (
            num_bytes
            for places, num_bytes in enumerate(candidates)
            if self._affordable_places(num_bytes) <= places
        )
        # From here on the whole context fits, and there are no probes.
        return min(next(enough), self.whole_bytes)

    def _tight_bytes(self, tokens: int, places: int) -> int:
        """Returns the smallest budget for `tokens` of a longer context and so many places."""
        geometry = self.geometry(tight=True, probes=self._asks_attention, places=places)
        columns = replace(geometry, context_tokens=tokens).context_columns
        pages = geometry.pages_bytes(columns)
        while True:
            num_bytes = geometry.bytes_for_columns(columns)
            while (short := pages - geometry.room_for_pages(num_bytes)) > 0:
                num_bytes += short
            if not geometry.chunk_is_too_long(num_bytes):
                return num_bytes
            geometry = geometry.with_shorter_chunk()

    @property
    def _budget_tokens(self) -> int:
        return DEFAULT_TOKENS if self.budget.tokens is None else self.budget.tokens

    @property
    def _asks_attention(self) -> bool:
        return "attention" in policy_named(self.policy).needs

    @property
    def _asks_samples(self) -> bool:
        return bool(self.observed) or "samples" in policy_named(self.policy).needs


def tight_plan(plan: KvPlan) -> KvPlan:
    """Returns the plan where the budget cannot hold the context: no float tail beyond a page.

    64 tokens in float16 take the bytes of 256 at K4V4. Measured on the embedded model (2048 tokens,
    `budget`): 0.0051 nats with them and 0.0031 without at a quarter of the fp16 bytes, 0.066 and
    0.034 at an eighth; with 16 of them 0.0040 and 0.038.
    """
    return replace(plan, tail_tokens=0)
