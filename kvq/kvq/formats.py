"""Bytes of every stored form, in Python: what `csrc/format.h` means. Holds no data."""

from collections.abc import Iterable, Sequence

from kvq.config import PAGE_TOKENS, CacheShape, KvPlan, PageForm

# Counts changes of what a page's bytes mean.
PAGE_VERSION = 3
ALIGNMENT = 64
# Query rows kept as evidence: the newest of every 8 tokens, and samples of the whole text.
NEWEST_PROBES = 4
SAMPLED_PROBES = 8
# Rows of a KV head that are looked at of each kind, probes times their query heads, at most.
PROBE_ROWS = 16
# Scales that what was encoded spans, and those from its middle to its ends.
CODE_SPAN = 240
REACH = CODE_SPAN // 2
# Granules of one side of a page by its width: hi4 + lo4, hi4 + the top 2 bits of lo4, hi4, the top
# 2 bits of hi4.
GRANULES = {8: 4, 6: 3, 4: 2, 2: 1}


def kept_heads(shape: CacheShape) -> int:
    """Query heads of each KV head that a probe keeps: as many as are looked at of the newest."""
    return min(shape.num_heads // shape.num_kv_heads, PROBE_ROWS // NEWEST_PROBES)


def granule_bytes(head_dim: int) -> int:
    """Bytes of the unit pages are stored in: half a nibble plane."""
    return 16 * head_dim


def grid_bytes(groups: int) -> int:
    """Bytes of the scales and mids of so many groups, and of the float16 they stand against."""
    return 8 + 2 * groups


def constant_bytes(head_dim: int, value_groups: int = PAGE_TOKENS) -> int:
    """Bytes of one page's grids: scales and mids of its keys' channels and its values' groups."""
    return grid_bytes(head_dim) + grid_bytes(value_groups)


def value_groups(head_dim: int, forms: Iterable[int]) -> int:
    """Groups of values a page has room for: its tokens, or its channels where those are more."""
    channels = any(form & PageForm.CHANNEL_VALUES for form in forms)
    return max(PAGE_TOKENS, head_dim) if channels else PAGE_TOKENS


def page_bytes(head_dim: int, k_bits: int, v_bits: int, value_groups: int = PAGE_TOKENS) -> int:
    """Bytes of one page of one (layer, KV head) at these widths, constants included."""
    granules = GRANULES[k_bits] + GRANULES[v_bits]
    return constant_bytes(head_dim, value_groups) + granules * granule_bytes(head_dim)


def bytes_per_token(shape: CacheShape, plan: KvPlan, value_groups: int = PAGE_TOKENS) -> float:
    """Bytes one more token of context costs, all layers, at the plan's widths."""
    if not plan.quantized:
        return float(shape.float_bytes_per_token)
    page = page_bytes(shape.head_dim, plan.k_bits, plan.v_bits, value_groups)
    return shape.streams * page / PAGE_TOKENS


def seen_tokens(num_layers: int, windows: Sequence[int], context_tokens: int) -> int:
    """Tokens that the last of a text sees, summed over layers with these windows; 0: all of them.

    No `windows`: every layer sees all.
    """
    each = windows or (0,) * num_layers
    return sum(min(context_tokens, window or context_tokens) for window in each)


def format_bytes(count: float) -> str:
    """Bytes in the largest unit that keeps the number readable: `1536` -> `1.5 KiB`."""
    for unit, size, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} bytes"


def sized(count: int) -> str:
    """A size to read and to type: `1.5 KiB (1536 bytes)`."""
    text = format_bytes(count)
    return text if text.endswith("bytes") else f"{text} ({count} bytes)"


def aligned(size: int) -> int:
    """`size` up to where the next region or page may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
