"""Bytes of every stored form, in Python: what `csrc/format.h` and the arena's layout mean.

The native library computes the same numbers (`kvq_layout_of`); a test compares them. Knows no
policy and holds no data.
"""

from dataclasses import dataclass

from kvq.config import PAGE_TOKENS, CacheShape, KvPlan
from kvq.errors import BudgetError

DRAFT_TOKENS = 8
STATE_BYTES = 128
COLUMN_BYTES = 24
ENTRY_BYTES = 40
ALIGNMENT = 64
# Query rows kept as evidence: the newest of every 8 tokens, and one of every run of 64.
PROBE_STRIDE = 8
PROBES = 4
RING_SLOTS = PROBES + 2
PROBE_SLOTS = 2 * RING_SLOTS
# Rows of a KV head that are looked at, probes times query heads, at most.
PROBE_ROWS = 16
PROBE_BYTES = 8
LAYER_FACTS_BYTES = 552


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One width: how many granules (of 16 * head_dim bytes) a page's side takes."""

    bits: int
    granules: int
    planes: str


FORMATS = {
    8: Format(bits=8, granules=4, planes="hi4 + lo4"),
    4: Format(bits=4, granules=2, planes="hi4"),
    2: Format(bits=2, granules=1, planes="top 2 bits of hi4"),
}


def granule_bytes(head_dim: int) -> int:
    """Bytes of the unit pages are stored in: half a nibble plane."""
    return 16 * head_dim


def constant_bytes(head_dim: int) -> int:
    """Bytes of one page's float16 scales and minima: K per channel, V per token."""
    return _align(4 * head_dim + 4 * PAGE_TOKENS)


def page_bytes(head_dim: int, k_bits: int, v_bits: int) -> int:
    """Bytes of one page of one (layer, KV head) at these widths, constants included."""
    granules = FORMATS[k_bits].granules + FORMATS[v_bits].granules
    return constant_bytes(head_dim) + granules * granule_bytes(head_dim)


def bytes_per_token(shape: CacheShape, plan: KvPlan) -> float:
    """Bytes one more token of context costs, all layers, at the plan's widths."""
    if not plan.quantized:
        return float(shape.float_bytes_per_token)
    streams = shape.num_layers * shape.num_kv_heads
    return streams * page_bytes(shape.head_dim, plan.k_bits, plan.v_bits) / PAGE_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """What a cache is opened with, and how its bytes divide."""

    shape: CacheShape
    plan: KvPlan
    tail_rows: int
    chunk_tokens: int
    context_tokens: int
    splits: int
    probes: bool = False

    @property
    def streams(self) -> int:
        """(layer, KV head) pairs."""
        return self.shape.num_layers * self.shape.num_kv_heads

    @property
    def wanted_columns(self) -> int:
        """Pages per stream that the whole context needs."""
        paged = self.context_tokens - self.plan.sink_tokens - self.plan.tail_tokens
        return -(-paged // PAGE_TOKENS) if self.plan.quantized and paged > 0 else 0

    def column_bytes(self, k_bits: int, v_bits: int) -> int:
        """Bytes of one page of every stream."""
        return self.streams * page_bytes(self.shape.head_dim, k_bits, v_bits)

    def closing_pages(self, tail_rows: int, tokens: int) -> int:
        """Pages per stream that close when `tokens` more join `tail_rows` floating-point rows."""
        rows = tail_rows + tokens - self.plan.sink_tokens - self.plan.tail_tokens
        return max(0, rows) // PAGE_TOKENS if self.plan.quantized else 0

    def fixed_bytes(self, columns: int, pool_bytes: int) -> int:
        """Bytes of everything but pages: state, tables, tail, scratch."""
        shape, dim = self.shape, self.shape.head_dim
        staging = shape.num_kv_heads * self.chunk_tokens * dim * 4 if self.plan.quantized else 0
        group = shape.num_heads // shape.num_kv_heads
        slots = PROBE_SLOTS if self.probes else 0
        regions = (
            STATE_BYTES,
            self.streams * 2,
            columns * COLUMN_BYTES,
            columns * self.streams * ENTRY_BYTES,
            columns * self.streams * 4,
            pool_bytes // granule_bytes(dim) * 4,
            self.tail_rows * 4,
            self.streams * self.tail_rows * dim * 4,
            slots * PROBE_BYTES,
            slots * shape.num_layers * shape.num_heads * dim * 2,
            shape.num_layers * LAYER_FACTS_BYTES if slots else 0,
            self.chunk_tokens * 4,
            staging,
            self.chunk_tokens * dim * 4,
            shape.num_kv_heads * self.splits * DRAFT_TOKENS * group * (dim + 2) * 4,
        )
        return sum(_align(size) for size in regions)

    def _row_bytes(self) -> int:
        return COLUMN_BYTES + self.streams * (ENTRY_BYTES + 4)

    def bytes_for_columns(self, columns: int) -> int:
        """Smallest budget in which `columns` pages per stream fit at the plan's widths."""
        least = 0
        if columns:
            pages = self.column_bytes(self.plan.k_bits, self.plan.v_bits)
            least = columns * (self._row_bytes() + pages)
        # The table of granule owners takes 4 bytes for each granule of the room it lies in itself.
        table = 4 * (least // (granule_bytes(self.shape.head_dim) - 4) + 1)
        return self.fixed_bytes(0, 0) + least + table + 8 * ALIGNMENT

    @property
    def minimum_bytes(self) -> int:
        """Smallest budget that opens: sinks, tail, scratch and one page per stream."""
        return self.bytes_for_columns(min(1, self.wanted_columns))

    def divide(self, budget_bytes: int) -> tuple[int, int]:
        """(page columns the table holds, bytes of the page pool). Raises `BudgetError`."""
        require_budget(budget_bytes, self.minimum_bytes)
        room = budget_bytes - self.fixed_bytes(0, 0) - 8 * ALIGNMENT
        columns = 0
        if self.wanted_columns:
            free = room - room // granule_bytes(self.shape.head_dim) * 4
            row = self._row_bytes()
            first = self.column_bytes(self.plan.k_bits, self.plan.v_bits)
            # No more rows than leave one page of every stream at full width.
            most = min(free // (row + self.column_bytes(2, 2)), (free - first) // row)
            columns = min(self.wanted_columns, most)
        return columns, budget_bytes - self.fixed_bytes(columns, room)


def arena_for(
    shape: CacheShape,
    plan: KvPlan,
    *,
    context_tokens: int,
    chunk_tokens: int,
    threads: int,
    probes: bool = False,
) -> Arena:
    """The arena of a session: tail rows and work splits follow from the plan and the threads.

    `probes`: keep query rows for policies that ask what attention looks at.
    """
    tail = plan.sink_tokens + plan.tail_tokens + PAGE_TOKENS + DRAFT_TOKENS
    splits = 1 if threads == 1 else -(-2 * threads // shape.num_kv_heads)
    return Arena(
        shape=shape,
        plan=plan,
        tail_rows=tail if plan.quantized else max(context_tokens, DRAFT_TOKENS),
        chunk_tokens=max(chunk_tokens, DRAFT_TOKENS),
        context_tokens=context_tokens,
        splits=splits,
        probes=probes and plan.quantized,
    )


def require_budget(budget_bytes: int, minimum_bytes: int) -> None:
    """Raises `BudgetError` for a budget below the smallest that opens."""
    if budget_bytes < minimum_bytes:
        raise BudgetError(
            f"{format_bytes(budget_bytes)} of KV budget cannot hold this model's sinks, tail "
            f"and one page; {format_bytes(minimum_bytes)} ({minimum_bytes} bytes) can"
        )


def format_bytes(count: float) -> str:
    """Bytes in the largest unit that keeps the number readable: `1536` -> `1.5 KiB`."""
    for unit, size, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} bytes"


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
