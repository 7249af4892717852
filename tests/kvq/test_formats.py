"""Bytes of the stored forms."""

import pytest

from kvq.config import PAGE_WIDTHS, CacheShape, KvPlan
from kvq.formats import (
    GRANULES,
    bytes_per_token,
    constant_bytes,
    format_bytes,
    granule_bytes,
    page_bytes,
)


def test_page_bytes_of_known_models() -> None:
    """Qwen2.5-0.5B and Qwen3-0.6B: codes, then bytes of scales and mids."""
    assert page_bytes(64, 4, 2) == 64 * 64 * 6 // 8 + 2 * 64 + 2 * 64 + 16
    assert page_bytes(128, 4, 2) == 64 * 128 * 6 // 8 + 2 * 128 + 2 * 64 + 16 == 6544
    assert page_bytes(128, 8, 8) == 2 * 64 * 128 + 400
    qwen = CacheShape(num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64)
    per_token = {
        (kv.k_bits, kv.v_bits): bytes_per_token(qwen, kv)
        for kv in (KvPlan(k_bits=k, v_bits=v) for k in PAGE_WIDTHS for v in PAGE_WIDTHS)
    }
    assert per_token[8, 8] == 6348
    assert per_token[8, 4] == 4812
    assert per_token[6, 6] == 4812
    assert per_token[4, 4] == 3276
    assert per_token[4, 2] == 2508
    assert per_token[2, 2] == 1740
    assert bytes_per_token(qwen, KvPlan(k_bits=16, v_bits=16)) == 12288


def test_formats_table_is_what_a_page_holds() -> None:
    assert tuple(GRANULES) == PAGE_WIDTHS
    for bits, granules in GRANULES.items():
        assert granules * granule_bytes(80) == 64 * 80 * bits // 8
    assert constant_bytes(80) == 304  # 8 + 2 * 80 and 8 + 2 * 64
    assert constant_bytes(16) == 176
    assert page_bytes(80, 8, 2) == 304 + 5 * 16 * 80


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (67108864, "64.0 MiB"),
        (1536 << 20, "1.50 GiB"),
        (12_345_678, "11.8 MiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text
