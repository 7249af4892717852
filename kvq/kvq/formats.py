"""Bytes of every stored form, in Python: what `csrc/format.h` means. Holds no data."""

from collections.abc import Iterable, Sequence

from kvq.config import PAGE_TOKENS, CacheShape, KvPlan, PageForm

# Counts changes of what a page's bytes mean.
PAGE_VERSION = 3
ALIGNMENT = 64
# Query rows kept as evidence: the newest of every 8 tokens, and samples of the whole text.
NEWEST_PROBES = 4
SAMPLED_PROBES = 8
# Most query rows of a KV head that are used of each kind of probes: probes times query heads.
PROBE_ROWS = 16
# Steps of a group's scale from its smallest number to its largest, and from its mid to each.
CODE_SPAN = 240
REACH = CODE_SPAN // 2
# Granules of one side of a page by its width: a code's high nibble and low one; the high one and
# the top 2 bits of the low one; the high one; its top 2 bits.
GRANULES = {8: 4, 6: 3, 4: 2, 2: 1}


def kept_heads(shape: CacheShape) -> int:
    """Counts the query heads of each KV head that a probe keeps."""
    return min(shape.num_heads // shape.num_kv_heads, PROBE_ROWS // NEWEST_PROBES)


def granule_bytes(head_dim: int) -> int:
    """Returns the bytes of a granule, the unit that pages are stored in: half a nibble plane."""
    return 16 * head_dim


def grid_bytes(groups: int) -> int:
    """Returns the bytes of so many groups' scales and mids, and of what they are relative to."""
    return 8 + 2 * groups


def constant_bytes(head_dim: int, value_groups: int = PAGE_TOKENS) -> int:
    """Returns the bytes of a page's grids: of its keys' channels and its values' groups."""
    return grid_bytes(head_dim) + grid_bytes(value_groups)


def value_groups(head_dim: int, page_encodings: Iterable[int]) -> int:
    """Counts the groups of values that a page has room for: its tokens, or more channels."""
    channels = any(encoding & PageForm.CHANNEL_VALUES for encoding in page_encodings)
    return max(PAGE_TOKENS, head_dim) if channels else PAGE_TOKENS


def page_bytes(head_dim: int, k_bits: int, v_bits: int, value_groups: int = PAGE_TOKENS) -> int:
    """Returns the bytes of one page of one (layer, KV head) at these widths, with constants."""
    granules = GRANULES[k_bits] + GRANULES[v_bits]
    return constant_bytes(head_dim, value_groups) + granules * granule_bytes(head_dim)


def bytes_per_token(shape: CacheShape, plan: KvPlan, value_groups: int = PAGE_TOKENS) -> float:
    """Returns the bytes that one more token of context costs, all layers, at the plan's widths."""
    if not plan.quantized:
        return float(shape.float_bytes_per_token)
    page = page_bytes(shape.head_dim, plan.k_bits, plan.v_bits, value_groups)
    return shape.streams * page / PAGE_TOKENS


def seen_tokens(num_layers: int, windows: Sequence[int], context_tokens: int) -> int:
    """Counts the tokens that a text's last one sees, summed over layers with these windows.

    A window of 0 sees all; without `windows` every layer does.
    """
    each = windows or (0,) * num_layers
    return sum(min(context_tokens, window or context_tokens) for window in each)


def format_bytes(count: float) -> str:
    """Writes bytes in the largest unit that keeps the number readable: `1536` -> `1.5 KiB`."""
    for unit, size, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} bytes"


def sized(count: int) -> str:
    """Writes a size to read and to type: `1.5 KiB (1536 bytes)`."""
    text = format_bytes(count)
    return text if text.endswith("bytes") else f"{text} ({count} bytes)"


def aligned(size: int) -> int:
    """Returns `size` up to where the next region or page may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
