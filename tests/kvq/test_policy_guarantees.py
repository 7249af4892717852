"""What every policy must keep, whatever it decides: bytes, determinism, drafts, snapshots.

One model of traces for all rows of the table: prompts in chunks, decoding, rejected drafts.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import budget_for_tokens, minimum_budget, open_cache
from kvq.class_cache import ClassCache
from kvq.config import CacheShape, KvPlan
from kvq.policies import POLICIES
from pairs import attention, forward, frequencies, pack_heads, structured_heads

SHAPE = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
LAYERS = [attention(SHAPE, layer) for layer in range(2)]
CONTEXT = 1600
FREQUENCIES = frequencies(16)
FEW = settings(deadline=None, derandomize=True, database=None, max_examples=6)
every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


def truth(seed: int) -> list[np.ndarray]:
    """Packed rows [CONTEXT, ...] of both layers."""
    rng = np.random.default_rng(seed)
    return [pack_heads(*structured_heads(rng, SHAPE, CONTEXT)) for _ in LAYERS]


@dataclass
class Run:
    """One cache and the rows it is given."""

    cache: ClassCache
    rows: list[np.ndarray]

    def feed(self, count: int, kept: int | None = None, *, wrong: bool = False) -> None:
        """Forwards `count` tokens and commits `kept`; the bytes are counted at every step."""
        at = self.cache.tokens
        kept = count if kept is None else kept
        rows = [layer[at : at + count].copy() for layer in self.rows]
        if wrong:
            for layer in rows:
                layer[kept:] = 3 - layer[kept:]
        forward(self.cache, LAYERS, rows, np.arange(at, at + count), FREQUENCIES)
        assert self.cache.used_bytes <= self.cache.budget_bytes
        self.cache.commit(kept)
        assert self.cache.peak_bytes <= self.cache.budget_bytes

    def prompt(self, tokens: int) -> None:
        while self.cache.tokens < tokens:
            self.feed(min(self.cache.chunk_tokens, tokens - self.cache.tokens))


def opened(policy: str, share: float, seed: int) -> Run:
    """A cache whose budget lies `share` of the way from the least to all that is needed."""
    plan = KvPlan(k_bits=8, v_bits=8)
    least = minimum_budget(SHAPE, plan, CONTEXT) + (1 << 14)
    most = budget_for_tokens(SHAPE, plan, CONTEXT)
    budget = least + int(share * (most - least))
    return Run(
        open_cache(SHAPE, plan, budget, CONTEXT, chunk_tokens=128, policy=policy), truth(seed)
    )


@pytest.mark.sampled
@every_policy
@FEW
@given(
    share=st.floats(0.0, 0.5),
    prompt=st.integers(200, 900),
    drafts=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=5, max_size=60),
)
def test_rejected_drafts_leave_what_plain_decoding_leaves(
    policy: str, share: float, prompt: int, drafts: list[tuple[int, int]]
) -> None:
    """Byte for byte, under pressure: what is given up does not depend on how tokens came."""
    drafting, plain = opened(policy, share, 1), opened(policy, share, 1)
    for run in (drafting, plain):
        run.prompt(prompt)
    for count, accepted in drafts:
        kept = min(count, accepted)
        drafting.feed(count, kept, wrong=True)
        for _ in range(kept):
            plain.feed(1)
    # A draft may have made room that the next token would have made.
    for run in (drafting, plain):
        run.feed(8)
    assert drafting.cache.columns()[1].tolist() == plain.cache.columns()[1].tolist()
    assert drafting.cache.page(1, 1, 0) == plain.cache.page(1, 1, 0)
    for run in (drafting, plain):
        run.cache.close()


@pytest.mark.sampled
@every_policy
@FEW
@given(share=st.floats(0.0, 0.4), first=st.integers(150, 700), then=st.integers(1, 400))
def test_a_saved_cache_goes_on_as_the_one_that_stayed(
    policy: str, share: float, first: int, then: int
) -> None:
    stayed, loaded = opened(policy, share, 2), opened(policy, share, 2)
    stayed.prompt(first)
    loaded.cache.load_state(stayed.cache.state())
    for run in (stayed, loaded):
        run.prompt(first + then)
    assert stayed.cache.state() == loaded.cache.state()
    for run in (stayed, loaded):
        run.cache.close()


@pytest.mark.sampled
@every_policy
def test_a_trace_repeats_and_pressure_was_real(policy: str) -> None:
    runs = [opened(policy, 0.15, 3) for _ in range(2)]
    for run in runs:
        run.prompt(700)
        for _ in range(70):
            run.feed(1)
    first, second = (run.cache for run in runs)
    assert first.state() == second.state()
    widths = first.columns()[1]
    assert widths.shape[2] < 10 or (widths < 8).any()
    # Sinks and tail are as they came.
    k, _, positions = first.tail(0, 0)
    moved = positions[0]  # StreamingLLM's sinks stand before what is left
    assert (positions[:4] - moved).tolist() == [0, 1, 2, 3]
    assert (moved > 0) == (policy == "streaming")
    assert positions[-1] == 769
    assert len(k) == 4 + (770 - 4) % 64
    for cache in (first, second):
        cache.close()


@every_policy
def test_going_back_and_on_again_ends_within_the_budget(policy: str) -> None:
    run = opened(policy, 0.1, 4)
    for back in (500, 130, 64, 5, 0):
        run.prompt(700)
        run.cache.trim(700 - back)
    run.prompt(900)
    assert run.cache.tokens == 900
    assert run.cache.peak_bytes <= run.cache.budget_bytes
    run.cache.close()


def test_a_larger_budget_is_never_worse() -> None:
    """Distance of the default policy's output from the unquantised one, over budgets."""
    plan = KvPlan(k_bits=16, v_bits=16)
    exact = Run(open_cache(SHAPE, plan, 4 << 20, CONTEXT, chunk_tokens=128), truth(5))
    exact.prompt(900)
    question = [layer[900:908] for layer in exact.rows]
    expected = forward(exact.cache, LAYERS, question, np.arange(900, 908), FREQUENCIES)
    errors = []
    for share in (0.02, 0.1, 0.2, 0.4, 0.7, 1.0):
        run = opened("budget", share, 5)
        run.prompt(900)
        got = forward(run.cache, LAYERS, question, np.arange(900, 908), FREQUENCIES)
        errors.append(
            sum(float(np.square(a - b).sum()) for a, b in zip(got, expected, strict=True))
        )
        run.cache.close()
    exact.cache.close()
    for tight, wide in itertools.pairwise(errors):
        assert wide <= tight * 1.1
    assert errors[-1] < 0.05 * errors[0]
