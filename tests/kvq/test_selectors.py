"""Reading less: what a selector says of pages by hand, native as in numpy, what matters is read."""

import numpy as np
import pytest

from caches import budget_for_tokens
from kvq import native_library
from kvq.class_cache import ClassCache
from kvq.config import DEFAULT_READ, CacheShape, KvPlan
from kvq.errors import UsageError
from kvq.reference.stored import chosen_pages, decode, encode, page_bounds, weighing
from kvq.selectors import READ_ALL, SELECTORS, ReadRule, rule_named
from native_calls import select_isa
from pairs import Pair, attention, forward, frequencies, pack_heads, random_heads, relative_rms

SHAPE = CacheShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64)
PROMPT = 22 * 64  # closes twenty pages
NARROW = KvPlan(k_bits=4, v_bits=2)
SHARES = ["25%", "quest:share=0.6", "quest:share=1e-5"]


def filled(
    read: str,
    *,
    plan: KvPlan = NARROW,
    tokens: int = 1500,
    turned: int = 32,
    loud: slice = slice(None),
) -> Pair:
    """Both caches with random tokens, `turned` pairs of channels rotated, some keys `loud`."""
    budget = budget_for_tokens(SHAPE, plan, 2048) + (1 << 19)
    pair = Pair.open(SHAPE, plan, budget, 2048, read=read)
    q, k, v = random_heads(np.random.default_rng(0), SHAPE, tokens)
    strength = np.full((tokens, 1, 1), 0.1, np.float32)
    strength[loud] = 1
    k = strength * k
    pair.fill([attention(SHAPE)], [pack_heads(4 * q, k, v)], frequencies(turned))
    return pair


def step(pair: Pair, rows: int) -> list[np.ndarray]:
    q, k, v = random_heads(np.random.default_rng(1), SHAPE, rows)
    packed = pack_heads(4 * q, k, v)
    return [ask(cache, packed) for cache in pair]


def ask(cache: ClassCache, packed: np.ndarray, turned: int = 32) -> np.ndarray:
    """What rows after the committed tokens see; they are forgotten."""
    at = np.arange(len(packed)) + cache.tokens
    out = forward(cache, [attention(SHAPE)], [packed], at, frequencies(turned))[0]
    cache.rewind()
    return out


# ---- by hand ---------------------------------------------------------------------------------


def test_a_bound_is_above_every_product_and_quests_own_sum() -> None:
    """Quest: the sum over channels of max(q min, q max), here of the codes' reach."""
    rng = np.random.default_rng(0)
    keys, q = rng.standard_normal((64, 64)).astype(np.float32), rng.standard_normal((5, 64))
    codes, grid = encode(keys, 0)
    scale, mid = grid.scale[None], grid.mid[None]
    bound = page_bounds(q, scale, mid)
    minimum, largest = mid - 120.5 * scale, mid + 120.5 * scale
    papers = np.maximum(q * minimum, q * largest).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(bound, papers, rtol=1e-5)
    for bits in (8, 6, 4, 2):
        read = decode(codes, grid, bits, 0)
        assert (q @ read.T <= bound + 1e-4).all()


def test_heads_that_share_keys_share_the_choice_each_by_its_own_scale() -> None:
    """Head 0's scores are a hundred times head 1's; its second page yields to head 1's best."""
    scores = np.array([[900.0, 500, 100, 0], [1.0, 2, 3, 9]])
    seen = np.ones(4, bool)
    assert chosen_pages(scores, seen, 0.5).tolist() == [True, False, False, True]
    # A page nobody sees is none of those counted, and a share is at least one page.
    assert chosen_pages(scores, np.array([False, True, True, True]), 0.1).tolist() == [
        False, True, False, False,
    ]  # fmt: skip
    assert chosen_pages(np.zeros((1, 4)), seen, 0.5).tolist() == [True, True, False, False]


# ---- native as in numpy ----------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("read", [*SHARES, "blasst:octaves=3"])
def test_native_reads_what_numpy_reads(read: str, rows: int) -> None:
    pair = filled(read)
    pair.shift(3, 7)
    pair.mask(5, 0xFFFF00FFFF)
    pair.demote([[0, 0, 2, 0, 0], [0, 1, 4, 2, 2]])
    got, want = step(pair, rows)
    assert relative_rms(got, want) < 0.05
    for name in ("pages_seen", "pages_read"):
        ours, numpys = (getattr(cache.storage, name) for cache in pair)
        assert ours == numpys
    assert 0 < pair.native.read_share <= 1
    assert pair.native.usage().read_share == pair.native.read_share
    pair.close()


@pytest.mark.sampled
@pytest.mark.parametrize("read", [*SHARES, "blasst:octaves=3"])
def test_a_draft_reads_what_its_rows_would_read_one_by_one(read: str) -> None:
    pair = filled(read)
    cache = pair.native
    q, k, v = random_heads(np.random.default_rng(1), SHAPE, 5)
    packed, at = pack_heads(4 * q, k, v), np.arange(5) + cache.tokens
    together = ask(cache, packed)
    for row in range(5):
        row_slice = slice(row, row + 1)
        alone = forward(
            cache, [attention(SHAPE)], [packed[row_slice]], at[row_slice], frequencies(32)
        )[0]
        np.testing.assert_allclose(alone[0], together[row], atol=2e-5)
        cache.commit(1)
    pair.close()


def test_a_quarter_is_read_and_a_sought_page_is_among_it() -> None:
    token = 4 + 64 * 7 + 11  # of the eighth page
    pair, whole = (
        filled(read, tokens=PROMPT, turned=0, loud=slice(token, token + 1))
        for read in ("25%", "all")
    )
    looked = random_heads(np.random.default_rng(0), SHAPE, PROMPT)[1][token]
    q = np.repeat(4 * looked, 3, axis=0)[None].astype(np.float32)
    _, k, v = random_heads(np.random.default_rng(2), SHAPE, 1)
    few, everything = (
        ask(cache_pair.native, pack_heads(q, k, v), 0) for cache_pair in (pair, whole)
    )
    assert pair.native.read_share == 0.25
    assert whole.native.read_share == 1
    assert relative_rms(few, everything) < 0.02
    pair.close()
    whole.close()


def test_a_prompt_reads_everything() -> None:
    pair, whole = filled("quest:share=0.05"), filled("all")
    for first, second in zip(step(pair, 9), step(whole, 9), strict=True):
        assert (first == second).all()
    assert pair.native.read_share == 1
    pair.close()
    whole.close()


@pytest.mark.sampled
@pytest.mark.usefixtures("kernels_restored")
@pytest.mark.parametrize("isa", native_library.isas() if native_library.available() else [])
@pytest.mark.parametrize(("rows", "softcap"), [(1, 0.0), (5, 30.0), (70, 0.0)])
def test_a_head_that_finds_a_pages_keys_faint_does_not_see_it(
    rows: int, softcap: float, isa: str
) -> None:
    """By head, page and row; where threads share the pages, each part knows what it needs."""
    select_isa(isa)
    shape = CacheShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
    layer = attention(shape, softcap=softcap)
    plan = KvPlan(k_bits=8, v_bits=8)
    outputs: dict[str, list[np.ndarray]] = {}
    for read in ("all", "blasst:octaves=4", "blasst:octaves=60"):
        pair = Pair.open(shape, plan, 4 << 20, 2048, read=read, threads=4)
        q, k, v = random_heads(np.random.default_rng(0), shape, 1500)
        k *= np.repeat(np.linspace(0.1, 2, 30), 50)[:, None, None].astype(np.float32)
        pair.fill([layer], [pack_heads(q, k, v)], frequencies(32))
        q, k, v = random_heads(np.random.default_rng(1), shape, rows)
        packed, at = pack_heads(2 * q, k, v), np.arange(rows) + pair.native.tokens
        outputs[read] = [
            forward(cache, [layer], [packed], at, frequencies(32))[0] for cache in pair
        ]
        for cache in pair:
            cache.rewind()
        assert relative_rms(*outputs[read]) < 0.01
        pair.close()
    everything, some, nothing = outputs.values()
    assert 0.02 < relative_rms(some[0], everything[0]) < 0.5
    np.testing.assert_allclose(nothing[0], everything[0], rtol=1e-4, atol=1e-6)


def test_what_weighs_by_hand() -> None:
    """Of two pages and two floating-point keys; one is left out 3 octaves below these."""
    params = attention(SHAPE)
    octave = np.log(2)
    logits = np.full((3, 130), -9 * octave)
    logits[:, 70] = -2.9 * octave  # of the second page
    logits[:, 128:] = [0, -5 * octave]
    logits[1, 3] = 4 * octave  # a page that is far above them counts all the same
    seen = np.ones((3, 130), bool)
    seen[2, 128] = False  # so the third row's best is 5 octaves below
    heard = weighing(params, logits, seen, 2, 3.0)
    assert [row[[0, 64, 128, 129]].tolist() for row in heard] == [
        [False, True, True, True],
        [True, True, True, True],
        [False, True, False, True],
    ]
    assert (heard[:, :64] == heard[:, :1]).all()
    assert (weighing(params, logits, seen, 2, 9.0)[:, 0]).all()
    # A sink's logit is one of those that are compared with.
    assert not weighing(params, logits, seen, 2, 3.0, sink_logit=0.2)[:, 64].any()
    assert (weighing(params, logits, seen, 2, 0.0) == seen).all()


def test_what_is_read_is_no_part_of_a_snapshot() -> None:
    pair, whole = filled("25%"), filled("all")
    assert pair.native.state() == whole.native.state()
    pair.native.load_state(whole.native.state())
    pair.close()
    whole.close()


# ---- names -----------------------------------------------------------------------------------


def test_names_and_shares_come_to_rules() -> None:
    assert rule_named("all") == rule_named("100%") == READ_ALL
    assert rule_named("12.5%") == rule_named("quest:share=0.125") == ReadRule(share=0.125)
    assert rule_named("blasst") == ReadRule(octaves=12)
    assert rule_named(DEFAULT_READ) == ReadRule(octaves=12)
    assert {rule_named(name).share for name in SELECTORS} == {0.25, 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quest:share=0", "above 0"),
        ("0%", "above 0"),
        ("101%", "up to 1"),
        ("best", "such as 25%"),
        ("0.25", "such as 25%"),
        ("quest:pages=3", "option 'pages=3'; possible: share="),
        ("landmarks:share=0.25", "one of all, blasst, quest"),
        ("blasst:octaves=0", "above 0; all reads every page"),
        ("exact", "blasst"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(UsageError, match="kv_read.*" + said):
        rule_named(text)
