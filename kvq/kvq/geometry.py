"""Divides the bytes of an arena into regions, a page table and pages. Holds no data.

The native library counts the bytes of each region; a test counts them again.
"""

from bisect import bisect_right
from ctypes import byref, c_int64
from dataclasses import dataclass, replace
from functools import lru_cache

from kvq.abi import NativeConfig, Regions
from kvq.config import (
    CONV_CHECKPOINTS,
    FOLD_TOKENS,
    PAGE_TOKENS,
    CacheShape,
    ConvShape,
    DeltaShape,
    KvPlan,
)
from kvq.errors import BudgetError, UsageError
from kvq.formats import (
    ALIGNMENT,
    PAGE_VERSION,
    format_bytes,
    granule_bytes,
    page_bytes,
    sized,
)
from kvq.native_library import library

# Tokens that a layer keeps behind its window, so that a rollback by no more loses nothing.
WINDOW_MARGIN_TOKENS = 4 * PAGE_TOKENS
# Of `kvq_config.probes`: KVQ_SAMPLES.
SAMPLES = 1 << 20
# Share of the bytes for pages that the page table may take, where a policy decides by attention.
# Heads then give up different pages of a column, and a column goes only with all its pages: in a
# table with too few columns, heads that look far back would lose pages that they should keep.
TABLE_SHARE = 0.05
# States that a delta net needs: the one that the next token is computed with, and the one before
# it. A budget for the whole context keeps those of `DELTA_PLACES` earlier places as well.
LEAST_DELTA_STATES = 2
DELTA_PLACES = 4
# Largest share that a chunk's rows take of a budget that cannot hold its context, unless chunks
# have no more than `SHORT_CHUNK_TOKENS`: what they take is lost for pages.
CHUNK_SHARE = 1 / 32
SHORT_CHUNK_TOKENS = 128
# Every region ends at a multiple of `ALIGNMENT`; this much room is lost to that at most.
SLACK_BYTES = 8 * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Holds what decides how an arena's bytes divide, whatever their number.

    Most fields are those of `kvq.sizing.ClassSpec`. `splits`: parts that a KV head's pages are
    divided into for threads. `probes`: query rows are kept, for policies that ask what attention
    looks at; `samples`: of the whole text as well as of the newest tokens. `value_groups`: see
    `kvq.formats.value_groups`. `windows`: those of the layers whose pages go when the window has
    passed them; empty: no page goes. `delta_states`: states that are kept of each delta net.
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
    kv_shared_layers: int = 0

    @property
    def probed_shared_layers(self) -> int:
        """Counts the layers that reuse keys and values and whose queries are kept."""
        return self.kv_shared_layers if self.probes else 0

    @property
    def probe_kinds(self) -> int:
        """Says whose queries are kept, and of which tokens, as `kvq_config.probes` does."""
        return self.probes + self.probed_shared_layers + SAMPLES * self.samples

    @property
    def keeps_places(self) -> bool:
        """Returns whether convolutions or delta nets beside attention keep checkpoints."""
        return self.conv is not None or self.delta is not None

    @property
    def pass_tokens(self) -> int:
        """Returns the most tokens of one forward pass: a chunk, or a draft."""
        return max(self.chunk_tokens, self.draft_tokens)

    @property
    def tail_rows(self) -> int:
        """Counts the floating-point rows of a stream, with sinks and the room for a draft."""
        if not self.plan.quantized:
            return max(self.context_tokens, self.draft_tokens)
        return self.plan.sink_tokens + self.plan.tail_tokens + PAGE_TOKENS + self.draft_tokens

    @property
    def streams(self) -> int:
        """Counts the streams: pairs of a layer and a KV head."""
        return self.shape.streams

    @property
    def context_columns(self) -> int:
        """Counts the pages per stream that the whole context needs."""
        paged = self.context_tokens - self.plan.sink_tokens - self.plan.tail_tokens
        return _pages(paged) if self.plan.quantized and paged > 0 else 0

    @property
    def minimum_bytes(self) -> int:
        """Returns the smallest budget: sinks, tail, scratch and the pages a draft can close."""
        return self.bytes_for_columns(self._columns_closed_by(self.draft_tokens))

    def held_pages(self, columns: int) -> int:
        """Counts the pages held of so many per stream: of a layer with a window the newest."""
        if not self.windows:
            return columns * self.streams
        newest = (self.window_columns(window) if window else columns for window in self.windows)
        return self.shape.num_kv_heads * sum(min(columns, most) for most in newest)

    def window_columns(self, window_tokens: int) -> int:
        """Returns the most pages per stream of a layer with such a window.

        They hold what the first row of a pass sees, what a rollback may want again, and the pass;
        at both ends a page is there in part. A draft is looked at as of its first row.
        """
        behind = window_tokens + WINDOW_MARGIN_TOKENS + self.draft_tokens
        return _pages(behind + self.pass_tokens) + 2

    def columns_within(self, num_bytes: int, k_bits: int, v_bits: int, row_bytes: int = 0) -> int:
        """Returns the most pages per stream that fit `num_bytes`, up to what the context needs.

        Each also takes `row_bytes` per stream of all.
        """
        page = self._page_bytes(k_bits, v_bits)
        return (
            bisect_right(
                range(self.context_columns + 1),
                num_bytes,
                key=lambda columns: columns * row_bytes + self.held_pages(columns) * page,
            )
            - 1
        )

    def closing_pages(self, tail_rows: int, tokens: int) -> int:
        """Counts the pages per stream that close when `tokens` more join `tail_rows` rows."""
        rows = tail_rows + tokens - self.plan.sink_tokens - self.plan.tail_tokens
        return max(0, rows) // PAGE_TOKENS if self.plan.quantized else 0

    def regions_for(self, columns: int, pool_bytes: int) -> Regions:
        """Returns the bytes of everything but pages: state, tables, tail, probes, scratch.

        The library counts them. `columns`: pages per stream that the table has room for;
        `pool_bytes`: bytes of pages whose owners are kept.
        """
        return _regions(self, columns, pool_bytes)

    def bytes_for_columns(self, columns: int) -> int:
        """Returns the smallest budget that fits `columns` pages per stream at the plan's widths."""
        least = columns * self._row_bytes + self.pages_bytes(columns) if columns else 0
        # The table of granule owners takes 4 bytes for each granule of the room it lies in itself.
        table = 4 * (least // (granule_bytes(self.shape.head_dim) - 4) + 1)
        return self.regions_for(0, 0).num_bytes + least + table + SLACK_BYTES

    def divide(self, num_bytes: int) -> tuple[int, Regions]:
        """Returns the columns of the page table, and the regions before the pages.

        Raises `BudgetError`.
        """
        require_budget(num_bytes, self.minimum_bytes)
        room = num_bytes - self.regions_for(0, 0).num_bytes - SLACK_BYTES
        columns = 0
        if self.context_columns:
            free = room - room // granule_bytes(self.shape.head_dim) * 4
            # The table leaves room for the pages that a draft can close, at full width.
            first = self.pages_bytes(self._columns_closed_by(self.draft_tokens))
            most_columns = self.columns_within(free, 2, 2, self._row_bytes)
            if self.probes:
                most_columns = max(most_columns, int(free * TABLE_SHARE) // self._row_bytes)
            columns = min(most_columns, self.context_columns, (free - first) // self._row_bytes)
        return columns, self.regions_for(columns, room)

    def room_for_pages(self, num_bytes: int) -> int:
        """Returns the bytes that `num_bytes` leave for pages. Raises `BudgetError`."""
        return num_bytes - self.divide(num_bytes)[1].num_bytes

    def fits_chunk(self, num_bytes: int) -> bool:
        """Decides whether the pages that a chunk closes fit; those of a shortest one always do."""
        if self.chunk_tokens <= PAGE_TOKENS:
            return True
        if num_bytes < self.minimum_bytes:
            return False
        columns = self._columns_closed_by(self.pass_tokens)
        return not columns or self.room_for_pages(num_bytes) >= self.pages_bytes(columns)

    def chunk_is_too_long(self, num_bytes: int) -> bool:
        """Decides whether a chunk's rows take so many of the bytes that a shorter one is better.

        Measured at an eighth of the fp16 bytes of 2048 tokens: with 128 tokens in place of 256
        Qwen2.5-Coder loses .78 as much (x/ 1.09), SmolLM2 .90 (x/ 1.05); their prompts take .97
        and 1.11 times as long.
        """
        regions = self.regions_for(0, 0)
        rows = regions.staging_positions + regions.staging + regions.rope
        return self.chunk_tokens > SHORT_CHUNK_TOKENS and rows > num_bytes * CHUNK_SHARE

    def with_shorter_chunk(self) -> "Geometry":
        """Returns a copy with half the tokens in a chunk, a page of them at least."""
        return replace(self, chunk_tokens=max(PAGE_TOKENS, self.chunk_tokens // 2))

    @property
    def _row_bytes(self) -> int:
        """Returns the bytes of one column of the page table."""
        return sum(self.regions_for(1, 0)) - sum(self.regions_for(0, 0))

    def _page_bytes(self, k_bits: int, v_bits: int) -> int:
        return page_bytes(self.shape.head_dim, k_bits, v_bits, self.value_groups)

    def pages_bytes(self, columns: int) -> int:
        """Returns the bytes of what is held of so many pages per stream at the plan's widths."""
        return self.held_pages(columns) * self._page_bytes(self.plan.k_bits, self.plan.v_bits)

    def _columns_closed_by(self, tokens: int) -> int:
        """Returns the most pages per stream that a pass of so many tokens closes."""
        return min(_pages(tokens), self.context_columns)


def require_budget(num_bytes: int, minimum_bytes: int) -> None:
    """Raises `BudgetError` for a budget below the smallest that opens."""
    if num_bytes < minimum_bytes:
        raise BudgetError(
            f"{format_bytes(num_bytes)} of KV budget cannot hold the least that this model keeps, "
            f"its first and newest tokens in 16 bits and a page of {PAGE_TOKENS} quantised ones; "
            f"{sized(minimum_bytes)} can"
        )


def _pages(tokens: int) -> int:
    """Counts the pages that so many tokens fill or begin."""
    return -(-tokens // PAGE_TOKENS)


def as_config(arena: Geometry) -> NativeConfig:
    """Returns what the library is asked to lay out."""
    shape, plan, conv = arena.shape, arena.plan, arena.conv
    convolutions = (conv.num_layers, conv.width, conv.taps, CONV_CHECKPOINTS) if conv else (0,) * 4
    delta_nets: tuple[int, ...] = ()
    if (delta := arena.delta) is not None:
        sizes = (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.taps)
        delta_nets = (delta.num_layers, *sizes, arena.delta_states, FOLD_TOKENS)
    return NativeConfig(
        shape.num_layers,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        plan.k_bits,
        plan.v_bits,
        plan.sink_tokens,
        plan.tail_tokens,
        arena.tail_rows,
        arena.pass_tokens,
        arena.context_tokens,
        arena.splits,
        arena.probe_kinds,
        arena.draft_tokens,
        arena.value_groups,
        PAGE_VERSION,
        *convolutions,
        *delta_nets,
    )


@lru_cache(maxsize=256)
def _regions(geometry: Geometry, columns: int, pool_bytes: int) -> Regions:
    config, out = as_config(geometry), (c_int64 * len(Regions._fields))()
    if status := library().kvq_regions_of(byref(config), columns, pool_bytes, out):
        text = library().kvq_status_text(status).decode()
        raise UsageError(f"a cache of {geometry.shape} is not possible: {text}")
    return Regions(*out)
