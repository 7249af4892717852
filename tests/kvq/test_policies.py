"""Which pages give way: the order, no more than needed, and what is never touched.

Laws all policies share. `test_policy_methods.py` and `test_scorers.py` have what sets them apart.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import minimum_budget, open_cache
from kvq.config import PAGE_WIDTHS, CacheShape, KvPlan
from kvq.errors import UsageError
from kvq.formats import page_bytes
from kvq.policies import POLICIES, Evidence, policy_named
from pairs import attention, forward, pack_heads
from policy_evidence import DIM, after, all_at, bytes_of, evidence, random_evidence

# Every policy as it is, and what an option changes in the order.
VARIANTS = sorted(
    {
        *POLICIES,
        "chunkkv:reuse=1,demote=1",
        "expected-attention:demote=1",
        "h2o:recent=0,demote=1",
        "l2norm:skip=0",
        "lagkv:demote=1",
        "snapkv:pool=1",
        "uniform:order=4:4/4:2",
        "zipcache:salient=0.3,high=8,low=4",
    }
)
WHOLE_COLUMNS = ("oldest", "streaming", "uniform")


def settled(examples: int) -> settings:
    return settings(deadline=None, database=None, derandomize=True, max_examples=examples)


def free_space(facts: Evidence, bytes_short: int, columns_short: int = 0, policy: str = "oldest"):
    return policy_named(policy).free_space(facts, bytes_short, columns_short).actions.tolist()


def every_page(column: int, k_bits: int, v_bits: int) -> list[list[int]]:
    return [[layer, head, column, k_bits, v_bits] for layer in (0, 1) for head in (0, 1)]


def last_of_each_page(actions: list[list[int]]) -> list[list[int]]:
    """A page that falls twice is told once, where it falls last."""
    last = {tuple(action[:3]): i for i, action in enumerate(actions)}
    return [actions[i] for i in sorted(last.values())]


def test_all_fall_to_a_rung_before_any_falls_below_it() -> None:
    rungs = [6, 4, 2, 0]
    order = [every_page(column, bits, bits) for bits in rungs for column in range(3)]
    sizes = [4 * page_bytes(DIM, bits, bits) for bits in PAGE_WIDTHS] + [0]
    freed = [above - below for above, below in pairwise(sizes) for _ in range(3)]
    for steps in range(1, len(order) + 1):
        enough = sum(freed[:steps])
        expected = last_of_each_page([action for step in order[:steps] for action in step])
        assert free_space(evidence(all_at(8, 8)), enough) == expected
        assert free_space(evidence(all_at(8, 8)), enough - freed[steps - 1] + 1) == expected


def test_sides_fall_only_where_they_are_wider() -> None:
    assert free_space(evidence(all_at(8, 2)), 1) == every_page(0, 6, 2)
    assert free_space(evidence(all_at(2, 8)), 1) == every_page(0, 2, 6)
    assert free_space(evidence(all_at(4, 2)), 1) == every_page(0, 2, 2)
    assert free_space(evidence(all_at(2, 2)), 1) == every_page(0, 0, 0)


def test_pages_already_lower_are_left_alone() -> None:
    widths = all_at(8, 8)
    widths[0, 1, 0] = 2, 2
    widths[1, 0, 0] = 0, 0
    assert free_space(evidence(widths), 1) == [[0, 0, 0, 6, 6], [1, 1, 0, 6, 6]]


def test_nothing_short_means_no_action() -> None:
    assert free_space(evidence(all_at(8, 8)), 0) == []
    assert free_space(evidence(all_at(8, 8, columns=0)), 1000) == []


def test_more_than_there_is_frees_everything() -> None:
    widths = all_at(4, 2)
    assert not after(widths, free_space(evidence(widths), 10**9)).any()


def test_columns_are_freed_whole_and_oldest_first() -> None:
    """Demotion frees no row of the table, so only eviction is of use."""
    widths = all_at(8, 8)
    assert free_space(evidence(widths), 0, 1) == every_page(0, 0, 0)
    assert free_space(evidence(widths), 0, 2) == every_page(0, 0, 0) + every_page(1, 0, 0)
    widths[:, :, 0] = 0
    widths[0, 0, 0] = 2, 2
    assert free_space(evidence(widths), 0, 1) == [[0, 0, 0, 0, 0]]


# ---- laws of all policies ----------------------------------------------------------------------

WIDTH_PAIRS = st.sampled_from([(0, 0), *((k, v) for k in PAGE_WIDTHS for v in PAGE_WIDTHS)])
SHAPES = st.sampled_from([(2, 1, 6), (1, 1, 5), (3, 2, 4), (5, 2, 2), (2, 2, 0)])


@st.composite
def situations(draw: st.DrawFn) -> Evidence:
    """Any pages with any evidence."""
    shape = draw(SHAPES, "shape")
    pairs = st.lists(WIDTH_PAIRS, min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    widths = np.array(draw(pairs, "widths"), np.uint8).reshape(*shape, 2)
    windows = draw(st.sampled_from([(), (100,) * shape[0], (100, *(0,) * (shape[0] - 1))]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32), "seed"))
    return random_evidence(rng, widths, windows=windows)


@pytest.mark.sampled
@pytest.mark.parametrize("policy", VARIANTS)
@settled(20)
@given(situations(), st.integers(0, 150_000), st.integers(0, 3))
def test_enough_is_freed_and_the_same_each_time(
    policy: str, facts: Evidence, short: int, columns: int
) -> None:
    before = facts.widths.copy()
    actions = free_space(facts, short, columns, policy)
    assert (facts.widths == before).all(), "the evidence was changed"
    assert actions == free_space(facts, short, columns, policy), "the same evidence, other actions"
    left = after(before, actions)
    lost = int((before.any(axis=(0, 1, 3)) & ~left.any(axis=(0, 1, 3))).sum())
    assert (bytes_of(before) - bytes_of(left) >= short and lost >= columns) or not left.any()
    assert actions or (short <= 0 and columns <= 0) or not before.any()


@pytest.mark.sampled
@pytest.mark.parametrize("policy", VARIANTS)
@settled(20)
@given(situations(), st.integers(0, 150_000))
def test_no_step_too_many(policy: str, facts: Evidence, short: int) -> None:
    """A byte less asked for frees less by one step at most, and the same steps before it."""
    left = after(facts.widths, free_space(facts, short, 0, policy))
    freed = bytes_of(facts.widths) - bytes_of(left)
    if freed <= short:
        return
    fewer = after(facts.widths, free_space(facts, short - 1, 0, policy)) if short else facts.widths
    assert (fewer >= left).all(), "asked for less, something was kept less"
    if short == 0:
        assert freed == 0
    elif (fewer == left).all():
        # The surplus is part of one step: a page, or a column where those fall whole.
        streams = facts.widths.shape[0] * facts.widths.shape[1]
        pages = streams if policy.partition(":")[0] in WHOLE_COLUMNS else 1
        assert freed - short < pages * page_bytes(DIM, 8, 8)


@pytest.mark.sampled
@pytest.mark.parametrize("policy", VARIANTS)
@settled(12)
@given(situations(), st.lists(st.integers(0, 150_000), min_size=2, max_size=5))
def test_a_larger_shortage_keeps_nothing_that_a_smaller_one_gives_up(
    policy: str, facts: Evidence, shortages: list[int]
) -> None:
    kept = [after(facts.widths, free_space(facts, short, 0, policy)) for short in sorted(shortages)]
    for more, less in pairwise(kept):
        assert (more >= less).all()


@pytest.mark.parametrize("policy", VARIANTS)
def test_equal_pages_go_by_column_layer_and_head(policy: str) -> None:
    """Nothing to tell pages apart: three evictions' worth comes from the oldest column."""
    facts = evidence(all_at(2, 2, layers=1, heads=4, columns=3))
    gone = free_space(facts, 3 * page_bytes(DIM, 2, 2) - 100, 0, policy)
    whole = policy.partition(":")[0] in WHOLE_COLUMNS
    assert gone == [[0, head, 0, 0, 0] for head in range(4 if whole else 3)]


@pytest.mark.parametrize(
    "policy", ["h2o:recent=0", "a2sf:recent=0", "snapkv", "chunkkv:reuse=1", "zipcache", "qaq"]
)
@settled(20)
@given(st.integers(0, 2**32), st.integers(0, 200_000), st.booleans())
def test_less_attention_never_keeps_more(policy: str, seed: int, short: int, demote: bool) -> None:
    """Pages of one head, alike in all but attention: the less attended has no more bits left."""
    if policy not in ("zipcache", "qaq"):
        policy += f"{':' if ':' not in policy else ','}demote={int(demote)}"
    rng = np.random.default_rng(seed)
    widths = all_at(8, 8, layers=2, heads=1 if "chunkkv" in policy else 2, columns=6)
    mass = rng.permuted(np.broadcast_to(2.0 ** -np.arange(6), widths.shape[:3]), axis=-1)
    facts = evidence(
        widths,
        mass=mass,
        recent_mass=mass,
        total_mass=mass,
        peak_weight=mass,
        mean_mass=mass,
        key_error=mass,
        value_error=mass,
        evict_error=1e5 * mass,
        key_range=2,
        value_range=1,
        query_mean=0.1,
        query_square=0.02,
        output_square=1,
    )
    left = after(widths, free_space(facts, short, 0, policy)).astype(int)
    order = np.argsort(mass, axis=-1)[..., None]
    rising = np.take_along_axis(left, order, axis=2)
    # Key bits of qaq follow range and length alone.
    decided = rising[..., 1:] if policy == "qaq" else rising
    assert (np.diff(decided, axis=2) >= 0).all()


# ---- names and options ---------------------------------------------------------------------------


def test_unknown_policy_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError, match="policy 'newest' is unknown; possible: ") as caught:
        policy_named("newest")
    assert str(caught.value).split("possible: ")[1].split(", ") == sorted(POLICIES)
    shape = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=DIM)
    with pytest.raises(UsageError, match="'newest' is unknown"):
        open_cache(shape, KvPlan(), 1 << 20, 100, policy="newest")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h2o:recent", r"option 'recent'; possible: demote=\.\.\., recent=\.\.\."),
        ("h2o:window=3", r"option 'window=3'; possible: demote=\.\.\., recent=\.\.\."),
        ("streaming:demote=1", "option 'demote=1'; possible: none"),
        ("h2o:recent=most", "recent takes a number, not 'most'"),
        ("snapkv:pool=1.5", "pool takes a whole number, not '1.5'"),
        ("h2o:recent=1.5", "recent=1.5 is not possible: a share from 0 to 1"),
        ("h2o:recent=nan", "recent=nan is not possible: a share from 0 to 1"),
        ("lagkv:demote=2", "demote=2 is not possible: 0 evicts at once"),
        ("snapkv:pool=2", "pool=2 is not possible: an odd number of pages from 1"),
        ("snapkv:pool=-1", "pool=-1 is not possible"),
        ("chunkkv:reuse=0", "reuse=0 is not possible: 1 layer or more"),
        ("l2norm:skip=-1", "skip=-1 is not possible: 0 layers or more"),
        ("zipcache:salient=-0.1", "salient=-0.1 is not possible: a share from 0 to 1"),
        ("zipcache:high=3", "high=3, low=2 is not possible: 8, 6, 4 and 2 are"),
        ("zipcache:high=4,low=4", "high=4, low=4 is not possible: .*the first above"),
        ("uniform:order=4:2/4:4", "order=4:2/4:4 is not possible: .*that only fall"),
        ("uniform:order=4:4/4:4", "order=4:4/4:4 is not possible"),
        ("uniform:order=fp/4:4", "order=fp/4:4 is not possible: .*8, 6, 4 and 2"),
        ("uniform:order=", "order= is not possible: write K:V pairs"),
        ("uniform:order=5:2", "order=5:2 is not possible: .*8, 6, 4 and 2"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_what_does(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        policy_named(text)


# ---- through the cache -------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settled(8)
@given(
    st.data(),
    st.sampled_from([(8, 8), (8, 2), (4, 4), (4, 2), (2, 8), (2, 2)]),
    st.integers(0, 64),
    st.sampled_from([(), (90, 0), (64, 300)]),
    st.booleans(),
)
def test_any_budget_holds_and_keeps_sinks_and_recent_tokens(
    policy: str,
    data: st.DataObject,
    widths: tuple[int, int],
    sinks: int,
    windows: tuple[int, ...],
    use_native: bool,
) -> None:
    """Prompts of any length under any budget from the minimum on: never above it, never refused,

    and the sinks and the tokens that fill no page keep their floating-point rows. Each token's
    value is its number, so the rows say which tokens they are.
    """
    shape = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1], sink_tokens=sinks)
    least = minimum_budget(shape, plan, 2100, policy=policy)
    budget = least + data.draw(st.one_of(st.integers(0, 3000), st.integers(0, 60_000)), "extra")
    cache = open_cache(shape, plan, budget, 2100, policy=policy, windows=windows, native=use_native)
    layers = [
        attention(shape, layer, window_tokens=window)
        for layer, window in enumerate(windows or (0, 0))
    ]
    rng = np.random.default_rng(0)
    for count in data.draw(st.lists(st.integers(1, 300), min_size=2, max_size=7), "prompts"):
        for start in range(0, count, cache.chunk_tokens):
            size = min(cache.chunk_tokens, count - start)
            first = cache.tokens
            numbers = np.arange(first, first + size, dtype=np.float32)[:, None, None]
            q = rng.standard_normal((size, 2, 16)).astype(np.float32)
            k = rng.standard_normal((size, 1, 16)).astype(np.float32)
            rows = pack_heads(q, k, np.broadcast_to(numbers, (size, 1, 16)))
            cache.begin(size)
            assert cache.used_bytes <= budget
            cache.rewind()
            forward(cache, layers, [rows, rows], np.arange(first, first + size))
            cache.commit(size)
            assert cache.used_bytes <= cache.peak_bytes <= budget
            tail_tokens = cache.tail(1, 0)[1][:, 0].astype(int).tolist()
            assert tail_tokens[:sinks] == list(range(min(sinks, cache.tokens)))
            closed = max(0, cache.tokens - sinks - cache.plan.tail_tokens) // 64
            assert tail_tokens[sinks:] == list(range(sinks + 64 * closed, cache.tokens))
    cache.close()
