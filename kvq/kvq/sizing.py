"""How many bytes a cache needs, and what one of given bytes can hold: asked and held.

The native library counts the same bytes (`kvq_layout_of`); a test compares them region by region.
Knows policies by name and holds no data.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from kvq.config import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_POLICY,
    DEFAULT_READ,
    FOLD_TOKENS,
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
from kvq.formats import (
    ALIGNMENT,
    aligned,
    constant_bytes,
    format_bytes,
    granule_bytes,
    kept_heads,
    page_bytes,
    probe_slots,
    seen_tokens,
    sized,
    value_groups,
)
from kvq.policies import policy_named
from kvq.selectors import rule_named

# Without a budget there is room for this many tokens, or for the context if that is shorter.
DEFAULT_TOKENS = 8192
SHORTEST_CONTEXT_TOKENS = 2
# What a layer's window has passed is kept this much longer: a rollback by no more loses nothing.
WINDOW_MARGIN_TOKENS = 4 * PAGE_TOKENS
# `sizeof` of the library's structs.
STATE_BYTES = 200
VIEW_BYTES = 24
ENTRY_BYTES = 40
PROBE_BYTES = 8
BRANCH_ROW_BYTES = 24
CONV_STATE_BYTES = 40
DELTA_STATE_BYTES = 40
# Of `kvq_config.probes`: KVQ_SAMPLES.
SAMPLES = 1 << 20
# Of the bytes for pages their table may take so many, where a policy decides by what attention
# looks at: heads then give up different pages of one column, and those that look back keep nearly
# all. A row goes only with every page in it: a table too short takes from these what they keep.
TABLE_SHARE = 0.05
LAYER_BYTES = 552
# Rotary frequencies of a layer that those bytes have room for; a head may have more.
LAYER_PAIRS = 128
# Bytes of what a floating-point row is: token, position, how far it has moved.
PLACE_BYTES = 12
# Views that columns share beyond one each: so many, and one more per column. Of them an edit leaves
# free what filling gaps may take.
SPARE_VIEWS, GAP_VIEWS = 64, 32
# Convolutions: committed rows kept beyond those that the next row needs, so that going back by no
# more computes nothing again; places further back that may be gone back to; and how many tokens
# decoding passes from one such place to the next.
CONV_BACK_ROWS = 8
CONV_CHECKPOINTS = 16
CONV_STEP_TOKENS = 256
# Of the places that are kept those that were wanted last, at most: marked, or gone back to.
MOST_WANTED = 8
# Delta nets: states that are needed, that by which the next token is computed and the one before
# it; and of how many places further back they are kept, in a budget that holds the whole context.
# In a smaller one it is as many as this share of what it has beyond the least has room for.
LEAST_DELTA_STATES = 2
DELTA_PLACES = 4
PLACES_SHARE = 1 / 4
# Of a budget that cannot hold its context a chunk's rows on their way take at most this share, or
# as much as those of `SHORT_CHUNK_TOKENS`: what they take is the pages'.
CHUNK_SHARE = 1 / 32
SHORT_CHUNK_TOKENS = 128
# Every region ends at a multiple of `ALIGNMENT`; this much room is lost to that at most.
SLACK_BYTES = 8 * ALIGNMENT


class Tiers(NamedTuple):
    """Where the bytes of a device's cache are.

    Allocated on the device; of pages that lie in the host's memory instead; copied from there to
    the device by the newest pass.
    """

    device_bytes: int = 0
    offloaded_bytes: int = 0
    streamed_bytes: int = 0


class Regions(NamedTuple):
    """Bytes of the regions that lie before an arena's pages, in their order."""

    state: int
    forms: int
    entering: int
    views: int
    entries: int
    constant_owners: int
    granule_owners: int
    places: int
    tail: int
    branch: int
    probes: int
    probe_rows: int
    layers: int
    conv_state: int
    conv_rows: int
    delta_state: int
    delta_rows: int
    delta_states: int
    staging_positions: int
    staging: int
    rope: int
    partials: int

    @property
    def num_bytes(self) -> int:
        """All of them, each up to where the next may begin."""
        return sum(map(aligned, self))


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What decides how an arena's bytes divide, whatever their number.

    `chunk_tokens`: tokens of a prompt that go through the model at once. `draft_tokens`: rows of
    the tail kept free for a branch. `splits`: parts a KV head's pages are divided into for
    threads. `probes`: query rows are kept, for policies that ask what attention looks at,
    `samples`: not of the newest tokens alone but of the whole text as well.
    `value_groups`: what a page has room for scales of, see `kvq.formats.value_groups`. `windows`:
    the sliding window of every layer whose pages go when it has passed them, 0 for one that sees
    all; empty: no page goes. `conv`: the convolutions beside the layers that attend, `delta`: the
    delta nets, of which `delta_states` states are kept. `readers`: layers of no keys that read
    those of the last layer, and whose queries are probes like its own.
    """

    shape: CacheShape
    plan: KvPlan
    context_tokens: int
    chunk_tokens: int
    draft_tokens: int
    splits: int
    probes: bool
    samples: bool = False
    value_groups: int = PAGE_TOKENS
    windows: tuple[int, ...] = ()
    conv: ConvShape | None = None
    delta: DeltaShape | None = None
    delta_states: int = LEAST_DELTA_STATES + DELTA_PLACES
    readers: int = 0

    @property
    def heard_readers(self) -> int:
        """Readers whose queries are kept."""
        return self.readers if self.probes else 0

    @property
    def probe_kinds(self) -> int:
        """Whose queries are kept, and of which tokens, as `kvq_config.probes` says it."""
        return self.probes + self.heard_readers + SAMPLES * self.samples

    @property
    def keeps_places(self) -> bool:
        """Whether convolutions or delta nets beside attention keep places to go back to."""
        return self.conv is not None or self.delta is not None

    @property
    def pass_tokens(self) -> int:
        """Most tokens one forward pass may bring: a chunk, or a draft."""
        return max(self.chunk_tokens, self.draft_tokens)

    @property
    def tail_rows(self) -> int:
        """Floating-point rows of a stream, sinks and the room for a draft included."""
        if not self.plan.quantized:
            return max(self.context_tokens, self.draft_tokens)
        return self.plan.sink_tokens + self.plan.tail_tokens + PAGE_TOKENS + self.draft_tokens

    @property
    def streams(self) -> int:
        """(layer, KV head) pairs."""
        return self.shape.streams

    @property
    def wanted_columns(self) -> int:
        """Pages per stream that the whole context needs."""
        paged = self.context_tokens - self.plan.sink_tokens - self.plan.tail_tokens
        return _pages(paged) if self.plan.quantized and paged > 0 else 0

    @property
    def minimum_bytes(self) -> int:
        """Smallest budget that opens: sinks, tail, scratch and the pages a draft can close."""
        return self.bytes_for_columns(self._columns_closed_by(self.draft_tokens))

    def held_pages(self, columns: int) -> int:
        """Most pages that are held of so many per stream: of a layer with a window the newest."""
        if not self.windows:
            return columns * self.streams
        newest = (self.window_columns(window) if window else columns for window in self.windows)
        return self.shape.num_kv_heads * sum(min(columns, most) for most in newest)

    def window_columns(self, window_tokens: int) -> int:
        """Most pages per stream of a layer with such a window.

        They hold what the first row of a pass sees, what a rollback may want again, and the pass;
        at both ends a page is there in part. A draft is looked at as of its first row.
        """
        behind = window_tokens + WINDOW_MARGIN_TOKENS + self.draft_tokens
        return _pages(behind + self.pass_tokens) + 2

    def column_bytes(self, k_bits: int, v_bits: int) -> int:
        """Bytes of one page of every stream."""
        return self.streams * self._page_bytes(k_bits, v_bits)

    def columns_within(self, num_bytes: int, k_bits: int, v_bits: int, row_bytes: int = 0) -> int:
        """Most pages per stream, up to what the context needs, that fit `num_bytes`.

        Each also takes `row_bytes` per stream of all.
        """
        page = self._page_bytes(k_bits, v_bits)
        return (
            bisect_right(
                range(self.wanted_columns + 1),
                num_bytes,
                key=lambda columns: columns * row_bytes + self.held_pages(columns) * page,
            )
            - 1
        )

    def closing_pages(self, tail_rows: int, tokens: int) -> int:
        """Pages per stream that close when `tokens` more join `tail_rows` floating-point rows."""
        rows = tail_rows + tokens - self.plan.sink_tokens - self.plan.tail_tokens
        return max(0, rows) // PAGE_TOKENS if self.plan.quantized else 0

    def regions_for(self, columns: int, pool_bytes: int) -> Regions:
        """Everything but pages: state, tables, tail, probes, scratch."""
        shape, dim = self.shape, self.shape.head_dim
        slots = probe_slots(self.draft_tokens, samples=self.samples) if self.probes else 0
        askers = shape.num_layers + self.readers
        split_rows = self.splits * self.draft_tokens * shape.num_heads
        return Regions(
            state=STATE_BYTES,
            forms=self.streams,
            entering=self.streams * 2,
            views=(2 * columns + SPARE_VIEWS) * VIEW_BYTES,
            entries=columns * self.streams * ENTRY_BYTES,
            constant_owners=columns * self.streams * 4,
            granule_owners=pool_bytes // granule_bytes(dim) * 4,
            places=self.tail_rows * PLACE_BYTES,
            tail=self.streams * self.tail_rows * dim * 4,
            branch=self.draft_tokens * BRANCH_ROW_BYTES,
            probes=slots * (1 + self.readers) * PROBE_BYTES,
            probe_rows=slots * askers * shape.num_kv_heads * kept_heads(shape) * dim * 2,
            layers=askers * _layer_bytes(dim) if slots else 0,
            conv_state=CONV_STATE_BYTES + 4 * CONV_CHECKPOINTS if self.conv else 0,
            conv_rows=conv_bytes(self.conv, self.draft_tokens),
            delta_state=DELTA_STATE_BYTES + 4 * self.delta_states if self.delta else 0,
            delta_rows=delta_row_bytes(self.delta, self.draft_tokens, self.delta_states),
            delta_states=delta_state_bytes(self.delta, self.delta_states),
            staging_positions=self.pass_tokens * 4,
            staging=shape.num_kv_heads * self.pass_tokens * dim * 4 * self.plan.quantized,
            rope=self.pass_tokens * dim * 4,
            partials=split_rows * (dim + 2) * 4,
        )

    def bytes_for_columns(self, columns: int) -> int:
        """Smallest budget in which `columns` pages per stream fit at the plan's widths."""
        least = columns * self._row_bytes + self.pages_bytes(columns) if columns else 0
        # The table of granule owners takes 4 bytes for each granule of the room it lies in itself.
        table = 4 * (least // (granule_bytes(self.shape.head_dim) - 4) + 1)
        return self.regions_for(0, 0).num_bytes + least + table + SLACK_BYTES

    def divide(self, num_bytes: int) -> tuple[int, Regions]:
        """(page columns the table holds, regions before the pages). Raises `BudgetError`."""
        require_budget(num_bytes, self.minimum_bytes)
        room = num_bytes - self.regions_for(0, 0).num_bytes - SLACK_BYTES
        columns = 0
        if self.wanted_columns:
            free = room - room // granule_bytes(self.shape.head_dim) * 4
            # No more rows than leave the pages a draft can close at full width.
            first = self.pages_bytes(self._columns_closed_by(self.draft_tokens))
            wanted = self.columns_within(free, 2, 2, self._row_bytes)
            if self.probes:
                wanted = max(wanted, int(free * TABLE_SHARE) // self._row_bytes)
            columns = min(wanted, self.wanted_columns, (free - first) // self._row_bytes)
        return columns, self.regions_for(columns, room)

    def room_for_pages(self, num_bytes: int) -> int:
        """Bytes that `num_bytes` leave for pages. Raises `BudgetError`."""
        return num_bytes - self.divide(num_bytes)[1].num_bytes

    def takes_chunk(self, num_bytes: int) -> bool:
        """Whether the pages one chunk closes fit `num_bytes`; those of a shortest one always do."""
        if self.chunk_tokens <= PAGE_TOKENS:
            return True
        if num_bytes < self.minimum_bytes:
            return False
        columns = self._columns_closed_by(self.pass_tokens)
        return not columns or self.room_for_pages(num_bytes) >= self.pages_bytes(columns)

    def crowds(self, num_bytes: int) -> bool:
        """Whether a chunk's rows take more of so many bytes than a shorter chunk is worth.

        Measured at an eighth of the fp16 bytes of 2048 tokens: with 128 tokens in place of 256
        Qwen2.5-Coder loses .78 as much (x/ 1.09), SmolLM2 .90 (x/ 1.05); their prompts take .97
        and 1.11 times as long.
        """
        regions = self.regions_for(0, 0)
        rows = regions.staging_positions + regions.staging + regions.rope
        return self.chunk_tokens > SHORT_CHUNK_TOKENS and rows > num_bytes * CHUNK_SHARE

    def with_shorter_chunk(self) -> "Geometry":
        """With half the tokens in a chunk, a page of them at least."""
        return replace(self, chunk_tokens=max(PAGE_TOKENS, self.chunk_tokens // 2))

    @property
    def _row_bytes(self) -> int:
        """Bytes of one column of the page table."""
        return 2 * VIEW_BYTES + self.streams * (ENTRY_BYTES + 4)

    def _page_bytes(self, k_bits: int, v_bits: int) -> int:
        return page_bytes(self.shape.head_dim, k_bits, v_bits, self.value_groups)

    def pages_bytes(self, columns: int) -> int:
        """Bytes of what is held of so many pages per stream at the plan's widths."""
        return self.held_pages(columns) * self._page_bytes(self.plan.k_bits, self.plan.v_bits)

    def _columns_closed_by(self, tokens: int) -> int:
        """Most pages per stream that a pass of so many tokens closes."""
        return min(_pages(tokens), self.wanted_columns)


@dataclass(frozen=True, kw_only=True)
class Arena(Geometry):
    """The memory of one cache: what is held, in exactly `num_bytes`, of what `spec` asks for.

    `max_columns`: pages per stream the table has room for. `regions`: what lies before the pages.
    `resident_columns`: of an arena in two tiers the newest so many lie on the device, in
    `device_bytes` with all that is no page, and the others on the host; 0: there is one tier.
    `file_bytes`: the last so many of a processor's arena, where the oldest pages lie, are a file's.
    """

    spec: "CacheSpec"
    num_bytes: int
    max_columns: int
    regions: Regions
    resident_columns: int = 0
    file_bytes: int = 0

    @property
    def spare_views(self) -> int:
        """Views beyond one of every column that an edited text may have."""
        return self.max_columns + SPARE_VIEWS

    @property
    def pool_bytes(self) -> int:
        """Bytes left for pages."""
        return self.num_bytes - self.regions.num_bytes

    @property
    def evidence(self) -> str:
        """In words, what is kept for policies to decide by, and of how many pages a stream."""
        if not self.probes:
            return "nothing"
        heads, spread = kept_heads(self.shape), "new and old" if self.samples else "new"
        return (
            f"{heads} query heads of {spread} tokens, {self.heard_readers} readers, "
            f"{self.max_columns} columns"
        )

    @property
    def whole_tokens(self) -> int:
        """Most tokens held at the plan's widths; of more, bits or tokens are given up."""
        if not self.plan.quantized:
            return self.context_tokens
        within = self.columns_within(self.pool_bytes, self.plan.k_bits, self.plan.v_bits)
        columns = min(self.max_columns, within)
        if columns >= self.wanted_columns:
            return self.context_tokens
        return self.plan.sink_tokens + self.plan.tail_tokens + columns * PAGE_TOKENS

    @property
    def device_bytes(self) -> int:
        """Bytes on a device."""
        if not self.resident_columns:
            return self.num_bytes
        return self.bytes_with_resident(self.resident_columns)

    @property
    def offload_bytes(self) -> int:
        """Bytes of the second tier: of the host's memory, or of a file."""
        spilled = self.max_columns - self.resident_columns if self.resident_columns else 0
        return self.file_bytes or spilled * self.streams * self._plane_bytes

    def bytes_with_resident(self, columns: int) -> int:
        """Bytes on a device: all constants, planes of so many columns, twice a layer's others."""
        heads, spilled = self.shape.num_kv_heads, self.max_columns - columns
        planes = (columns * self.streams + 2 * spilled * heads) * self._plane_bytes
        return self.regions.num_bytes + self.max_columns * self.streams * self._constants + planes

    @property
    def _constants(self) -> int:
        return constant_bytes(self.shape.head_dim, self.value_groups)

    @property
    def _plane_bytes(self) -> int:
        """Bytes of one page's planes at the plan's widths."""
        return self._page_bytes(self.plan.k_bits, self.plan.v_bits) - self._constants

    def in_tiers(self, device_bytes: int) -> "Arena":
        """With as many columns on a device as so many bytes there take.

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

    def over_file(self, memory_bytes: int) -> "Arena":
        """With so many bytes in memory and the others, all of them planes of pages, in a file.

        What is asked of every page, the constants, stays in memory. Raises `BudgetError`.
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
class CacheSpec:
    """What is asked of a cache.

    `context_tokens`: most tokens it will ever hold. `budget`: empty for `DEFAULT_TOKENS`.
    `chunk_tokens`: tokens of a prompt at once, fewer in a small context or budget. `windows`: the
    sliding window of every layer, 0 for none; empty: none has one. `edits`: the text will be edited
    in the middle, where queries look again at what a window has passed: all of it is kept.
    `observed`: keep probe queries for evidence; None: if the policy asks for attention and the
    budget cannot hold the whole context. `forms`: how the
    pages of every layer's KV heads are encoded, layer by layer; empty: all plain. `read`:
    what is read of the pages, as `--kv-read` writes it. `offload_bytes`: of the host's memory,
    for the pages of the context that the budget of a device does not hold; 0: they lose bits.
    `offload_file`: they are a file's, behind a processor's memory.
    `conv`: convolutions beside the layers that attend, whose rows are held here too. `delta`:
    likewise delta nets. `readers`: layers that own nothing and read the last one's pages.
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
    forms: tuple[PageForm, ...] = ()
    read: str = DEFAULT_READ
    offload_bytes: int = 0
    offload_file: bool = False
    conv: ConvShape | None = None
    delta: DeltaShape | None = None
    readers: int = 0

    def __post_init__(self) -> None:
        streams = self.shape.streams
        if self.forms and len(self.forms) != streams:
            raise UsageError(f"{len(self.forms)} forms of pages were given for {streams} heads")
        if self.windows and len(self.windows) != self.shape.num_layers:
            raise UsageError(
                f"{len(self.windows)} windows were given for {self.shape.num_layers} layers"
            )
        if not 1 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise UsageError(
                f"room for {self.draft_tokens} draft tokens is not possible: give 1 to "
                f"{MOST_DRAFT_TOKENS}"
            )

        # Evaluated for its refusals.
        _ = rule_named(self.read)

    def resolved(self) -> Arena:
        """What is held of it. Raises `BudgetError` naming the smallest budget that opens."""
        num_bytes = self.budget_bytes
        whole = num_bytes >= self.whole_bytes
        if self.offload_bytes and not whole:
            return self._in_tiers()
        probes = self.observed
        if probes is None:
            require_budget(num_bytes, self.minimum_bytes)
            # Where the whole context fits nothing is ever short, and nobody looks.
            probes = self._asks_attention and not whole
        places = DELTA_PLACES if whole else self._affordable_places(num_bytes)
        geometry = self.geometry(tight=not whole, probes=probes, places=places)
        while places and num_bytes < geometry.minimum_bytes:
            places -= 1
            geometry = self.geometry(tight=not whole, probes=probes, places=places)
        while not geometry.takes_chunk(num_bytes) or (not whole and geometry.crowds(num_bytes)):
            geometry = geometry.with_shorter_chunk()
        columns, regions = geometry.divide(num_bytes)
        return Arena(
            **vars(geometry), spec=self, num_bytes=num_bytes, max_columns=columns, regions=regions
        )

    def _in_tiers(self) -> Arena:
        """The whole context, in a first tier and behind it. Raises `BudgetError`."""
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
        """Of how many places delta nets keep states in a budget less than the whole context's."""
        one = delta_state_bytes(self.delta, 1)
        free = max(0, num_bytes - self.minimum_bytes)
        return min(DELTA_PLACES, int(free * PLACES_SHARE) // one) if one else 0

    def geometry(self, *, tight: bool, probes: bool, places: int) -> Geometry:
        """The arena's, before its bytes. `tight`: of a cache that cannot hold its whole context.

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
            value_groups=value_groups(self.shape.head_dim, self.forms),
            # A second tier has room for all, and gives up no page.
            windows=() if self.edits or self.offload_bytes else self.windows,
            conv=self.conv,
            delta=self.delta,
            delta_states=LEAST_DELTA_STATES + places,
            readers=self.readers,
        )

    @cached_property
    def budget_bytes(self) -> int:
        """Bytes the budget means."""
        budget = self.budget
        if budget.num_bytes is not None:
            return budget.num_bytes
        if budget.fraction is not None:
            return int(budget.fraction * self.float_bytes)
        return self.bytes_for_tokens(self._budget_tokens)

    @property
    def float_bytes(self) -> int:
        """Bytes of the whole context at 16 bits, of a layer with a window those it sees."""
        layers = self.shape.num_layers
        seen = seen_tokens(layers, self.windows, self.context_tokens)
        return seen * self.shape.float_bytes_per_token // layers

    @cached_property
    def minimum_bytes(self) -> int:
        """Smallest budget that opens a cache of this context.

        Holding a short context whole can cost less than the probes of a policy that asks for
        attention.
        """
        geometry = self.geometry(tight=True, probes=self._asks_attention, places=0)
        shortest = replace(geometry, chunk_tokens=min(geometry.chunk_tokens, PAGE_TOKENS))
        return min(shortest.minimum_bytes, self.whole_bytes)

    @cached_property
    def whole_bytes(self) -> int:
        """Smallest budget that holds the whole context without losing a bit."""
        geometry = self.geometry(tight=False, probes=False, places=DELTA_PLACES)
        return geometry.bytes_for_columns(geometry.wanted_columns)

    def bytes_for_tokens(self, tokens: int) -> int:
        """Smallest budget that holds `tokens` tokens, or the whole context, without losing a bit.

        A cache whose context is longer than that spends more on its page table, and on probes if
        its policy asks for attention.
        """
        if tokens >= self.context_tokens:
            return self.whole_bytes
        if not self.plan.quantized:
            return replace(self, context_tokens=tokens).whole_bytes
        # As many places as are kept in the bytes that are found with them.
        found = (self._tight_bytes(tokens, places) for places in range(DELTA_PLACES + 1))
        enough = (
            num_bytes
            for places, num_bytes in enumerate(found)
            if self._affordable_places(num_bytes) <= places
        )
        # From here on the whole context fits, and there are no probes.
        return min(next(enough), self.whole_bytes)

    def _tight_bytes(self, tokens: int, places: int) -> int:
        """Smallest budget that holds `tokens` tokens of a longer context and so many places."""
        geometry = self.geometry(tight=True, probes=self._asks_attention, places=places)
        columns = replace(geometry, context_tokens=tokens).wanted_columns
        pages = geometry.pages_bytes(columns)
        while True:
            num_bytes = geometry.bytes_for_columns(columns)
            while (short := pages - geometry.room_for_pages(num_bytes)) > 0:
                num_bytes += short
            if not geometry.crowds(num_bytes):
                return num_bytes
            geometry = geometry.with_shorter_chunk()

    def changed(self, **changes: Any) -> "CacheSpec":
        """With other values of these fields."""
        return replace(self, **changes)

    def shortened(self) -> "CacheSpec":
        """With the longest context, up to this one, of which the budget gives up nothing.

        A quantised cache demotes and evicts, so it keeps its context. An unquantised one does
        not: its budget decides how long the context can be.
        """
        if self.plan.quantized:
            return self
        if self.budget.num_bytes is None and self.budget.fraction is None:
            return replace(self, context_tokens=min(self._budget_tokens, self.context_tokens))
        num_bytes = self.budget_bytes
        fits = longest_context(
            self.context_tokens,
            lambda tokens: replace(self, context_tokens=tokens).minimum_bytes <= num_bytes,
        )
        return replace(self, context_tokens=fits, budget=Budget(num_bytes=num_bytes))

    @property
    def _budget_tokens(self) -> int:
        return DEFAULT_TOKENS if self.budget.tokens is None else self.budget.tokens

    @property
    def _asks_attention(self) -> bool:
        return "attention" in policy_named(self.policy).needs

    @property
    def _asks_samples(self) -> bool:
        return bool(self.observed) or "samples" in policy_named(self.policy).needs


def longest_context(most: int, opens: Callable[[int], bool]) -> int:
    """The longest context of up to `most` tokens that `opens`, as every shorter one does."""
    fits, too_many = SHORTEST_CONTEXT_TOKENS, most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if opens(middle):
            fits = middle
        else:
            too_many = middle
    return fits


def tight_plan(plan: KvPlan) -> KvPlan:
    """The plan of a cache whose budget cannot hold its context: no float tail beyond a page.

    64 tokens in float16 take the bytes of 256 at K4V4. Measured on the embedded model (2048 tokens,
    `budget`): 0.0051 nats with them and 0.0031 without at a quarter of the fp16 bytes, 0.066 and
    0.034 at an eighth; with 16 of them 0.0040 and 0.038.
    """
    return replace(plan, tail_tokens=0)


def require_budget(num_bytes: int, minimum_bytes: int) -> None:
    """Raises `BudgetError` for a budget below the smallest that opens."""
    if num_bytes < minimum_bytes:
        raise BudgetError(
            f"{format_bytes(num_bytes)} of KV budget cannot hold the least that this model keeps, "
            f"its first and newest tokens in 16 bits and a page of {PAGE_TOKENS} quantised ones; "
            f"{sized(minimum_bytes)} can"
        )


def conv_bytes(conv: ConvShape | None, draft_tokens: int) -> int:
    """Bytes of the rows that convolutions remember.

    The newest committed ones, those of a branch, the newest of a chunk, and of every place that may
    be gone back to, of which one is on the way into a chunk, those before it.
    """
    if conv is None:
        return 0
    newest = conv.before + CONV_BACK_ROWS
    rows = 2 * newest + draft_tokens + (CONV_CHECKPOINTS + 1) * conv.before
    return conv.num_layers * rows * conv.width * 4


def most_delta_newest(delta: DeltaShape) -> int:
    """Committed rows of a delta net that are kept at most: see `delta_newest`."""
    return delta.before + 2 * FOLD_TOKENS


def delta_newest(delta: DeltaShape, states: int) -> int:
    """Committed rows of a delta net that are kept beside so many states.

    Two folds', and what convolutions see there: so far can be gone back without computing anything
    again. Who keeps no place to go back to has one fold's, and computes what lies further back.
    """
    if states > LEAST_DELTA_STATES:
        return most_delta_newest(delta)
    return max(delta.before, FOLD_TOKENS)


def delta_row_bytes(delta: DeltaShape | None, draft_tokens: int, states: int) -> int:
    """Bytes of the rows that delta nets remember: the newest, a branch's, the newest of a chunk.

    Of a chunk these begin at the last base but one at the latest, whose state it makes.
    """
    if delta is None:
        return 0
    newest = delta_newest(delta, states)
    rows = newest + draft_tokens + max(newest, 2 * FOLD_TOKENS - 1)
    return delta.num_layers * rows * delta.row_width * 4


def delta_state_bytes(delta: DeltaShape | None, states: int) -> int:
    """Bytes of so many states of delta nets, each with the rows that convolutions see before it."""
    if delta is None:
        return 0
    return states * delta.num_layers * (delta.state_width + delta.before * delta.conv_width) * 4


def _layer_bytes(head_dim: int) -> int:
    """Bytes of what is kept of a layer's attention, to repeat it."""
    return LAYER_BYTES + 4 * max(0, head_dim // 2 - LAYER_PAIRS)


def _pages(tokens: int) -> int:
    """Pages that so many tokens fill or begin."""
    return -(-tokens // PAGE_TOKENS)
