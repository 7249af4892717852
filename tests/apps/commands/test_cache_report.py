"""What a cache holds is said in one sentence, and its numbers are what a session does."""

from typing import Any

import pytest

from kvq_apps.names.engine import Engine
from kvq_apps.terminal import output
from shelf import Shelf


@pytest.mark.parametrize(
    ("kv", "fits", "full_kv", "full_fits", "sentence"),
    [
        ("4:4", 9000, "2:2", 9000, "all 9,000 tokens of its context at 4 bits"),
        ("fp", 9000, "fp", 9000, "all 9,000 tokens of its context at 16 bits"),
        (
            *("8:8", 2100, "2:2", 7000),
            "2,100 of 9,000 tokens at 8 bits; when it is full, older ones go down to 2 bits, at "
            "which 7,000 fit; of longer texts some are given up",
        ),
        (
            *("8:8", 2100, "4:2", 9000),
            "2,100 of 9,000 tokens at 8 bits; when it is full, older ones go down to 4 bits for "
            "keys and 2 for values, at which all fit",
        ),
        (
            *("4:2", 68, "2:2", 68),
            "68 of 9,000 tokens at 4 bits for keys and 2 for values; when it is full, older ones "
            "are given up",
        ),
        (
            *("2:2", 2100, "2:2", 2100),
            "2,100 of 9,000 tokens at 2 bits; when it is full, older ones are given up",
        ),
    ],
)
def test_the_sentence(kv: str, fits: int, full_kv: str, full_fits: int, sentence: str) -> None:
    facts = {"kv": kv, "context": 9000, "budget_tokens": fits}
    assert output.cache_sentence(facts | {"full_kv": full_kv, "full_tokens": full_fits}) == sentence


@pytest.mark.parametrize(
    ("options", "kv", "full_kv"),
    [
        ({}, "4:4", "2:2"),
        ({"kv_budget": "192KiB"}, "8:8", "2:2"),
        ({"kv_budget": "192KiB", "kv": "6:4"}, "6:4", "2:2"),
        ({"kv_budget": "192KiB", "policy": "streaming"}, "4:4", "4:4"),
        ({"kv_budget": "192KiB", "policy": "uniform:order=4:4/4:2"}, "4:4", "4:2"),
        ({"kv_budget": "192KiB", "policy": "h2o:demote=1"}, "4:4", "2:2"),
        ({"kv_budget": "192KiB", "policy": "zipcache"}, "4:4", "2:2"),
        ({"kv": "fp"}, "fp", "fp"),
    ],
)
def test_the_facts_are_those_of_a_session(
    options: dict[str, Any], kv: str, full_kv: str, shelf: Shelf
) -> None:
    with Engine.open(shelf.bundle(), threads=1) as engine, engine.session(**options) as session:
        facts = output.cache_facts(session.config)
        assert (facts["kv"], facts["full_kv"], facts["context"]) == (kv, full_kv, 512)
        assert facts["budget_tokens"] <= facts["full_tokens"] <= 512
        # A text that fits at the first widths loses nothing of them.
        session.prefill([1] * facts["budget_tokens"] if facts["budget_tokens"] < 512 else [1] * 500)
        usage = session.stats().held
        assert usage.evicted_share == 0
        k_bits = 16 if kv == "fp" else int(kv[0])
        assert usage.mean_k_bits >= k_bits
