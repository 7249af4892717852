"""What a cache can be asked to be, and what it refuses."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.config import (
    AttentionParams,
    Budget,
    CacheShape,
    KvPlan,
    check_widths,
    parse_budget,
    parse_kv,
)
from kvq.errors import UsageError

QUIET = settings(deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
def test_head_dim_is_a_multiple_of_sixteen_up_to_256(head_dim: int) -> None:
    shape = CacheShape(num_layers=3, num_heads=8, num_kv_heads=2, head_dim=head_dim)
    assert shape.float_bytes_per_token == 3 * 2 * head_dim * 2 * 2


@pytest.mark.parametrize("head_dim", [0, -64, 8, 72, 100, 520, 528, 1024])
def test_other_head_dims_are_refused_by_value(head_dim: int) -> None:
    with pytest.raises(UsageError, match=f"head_dim {head_dim} is not possible.*multiple of 16"):
        CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 2), (4, 0), (2, 4), (3, -1)])
def test_query_heads_must_share_kv_heads_evenly(heads: int, kv_heads: int) -> None:
    with pytest.raises(UsageError, match=f"{heads} query heads cannot share {kv_heads} KV heads"):
        CacheShape(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=64)


def test_default_plan_is_k4_v4_with_four_sinks_and_a_page_of_newest_tokens() -> None:
    assert dataclasses.astuple(KvPlan()) == (4, 4, 4, 64)
    assert KvPlan().quantized
    assert not KvPlan(k_bits=16, v_bits=16).quantized


@pytest.mark.parametrize(
    ("k_bits", "v_bits", "flag"),
    [(3, 2, "k_bits 3"), (4, -2, "v_bits -2"), (0, 0, "k_bits 0"), (8, 1, "v_bits 1")],
)
def test_other_widths_are_refused_naming_the_argument(k_bits: int, v_bits: int, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} is not possible: choose 8, 6, 4 or 2$"):
        check_widths(k_bits, v_bits)


@pytest.mark.parametrize(("k_bits", "v_bits"), [(16, 8), (4, 16)])
def test_sixteen_bits_go_together(k_bits: int, v_bits: int) -> None:
    with pytest.raises(UsageError, match="16 is possible for both together"):
        KvPlan(k_bits=k_bits, v_bits=v_bits)


@pytest.mark.parametrize("sinks", [-1, 65])
def test_sinks_are_at_most_a_page(sinks: int) -> None:
    with pytest.raises(UsageError, match=f"{sinks} sink tokens: 0 to 64 are possible"):
        KvPlan(sink_tokens=sinks)
    assert KvPlan(sink_tokens=64).sink_tokens == 64


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("4:2", (4, 2)),
        ("8,4", (8, 4)),
        (" 2:8 ", (2, 8)),
        ("8", (8, 8)),
        ("fp", (16, 16)),
        ("FP16", (16, 16)),
        ("f16", (16, 16)),
        ("16", (16, 16)),
        ("16:16", (16, 16)),
    ],
)
def test_kv_flag_gives_both_widths(text: str, widths: tuple[int, int]) -> None:
    assert parse_kv(text) == widths


@pytest.mark.parametrize("text", ["", "4:", ":2", "4:2:2", "four", "-4:2", "4.0", "3:2", "8:16"])
def test_other_kv_flags_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not possible"):
        parse_kv(text)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("64MiB", Budget(num_bytes=64 << 20)),
        ("1.5 GiB", Budget(num_bytes=3 << 29)),
        ("10kib", Budget(num_bytes=10240)),
        ("10kB", Budget(num_bytes=10000)),
        ("2m", Budget(num_bytes=2 << 20)),
        ("67108864", Budget(num_bytes=67108864)),
        (4096, Budget(num_bytes=4096)),
        ("4096tok", Budget(tokens=4096)),
        ("1 token", Budget(tokens=1)),
        ("25%", Budget(fraction=0.25)),
        (".5%", Budget(fraction=0.005)),
    ],
)
def test_budget_flag_is_bytes_tokens_or_a_share(text: str | int, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", -5, 0, "0MiB", "0%", "64 MiBs", "tok", "1e6", "nan", "inf", "1,5GiB"),
        *("0.5tok", "0.4", "9" * 400, "9" * 400 + "%"),
    ],
)
def test_other_budgets_are_refused_with_examples(text: str | int) -> None:
    with pytest.raises(UsageError, match=r"kv_budget .* is not possible: give bytes \(64MiB"):
        parse_budget(text)


@QUIET
@given(st.text(max_size=400) | st.from_regex(r"[0-9]{1,400}(tok|%|GiB)?", fullmatch=True))
def test_any_text_is_a_budget_or_a_user_error(text: str) -> None:
    for parse in (parse_budget, parse_kv):
        try:
            parse(text)
        except UsageError as error:
            message = str(error)
        else:
            continue
        assert "is not possible" in message


def test_settings_are_frozen_and_keyword_only() -> None:
    params = AttentionParams(layer=0, num_heads=2, num_kv_heads=1, head_dim=64, scale=0.125)
    assert (params.softcap, params.window_tokens, params.rope_factor) == (0.0, 0, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.scale = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        KvPlan(4, 2)  # type: ignore[misc]
