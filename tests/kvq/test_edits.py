"""Edits in the cache (PIE) against a list of tokens, against policy A, and native against numpy.

In layer 0 a token's value is its own number in every channel, which pages and tail hold exactly at
any width: so each can be asked which tokens it holds, and where they stand.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from caches import budget_for_tokens, open_cache
from kvq import native_library
from kvq.class_cache import ClassCache
from kvq.config import CacheShape, KvPlan
from kvq.errors import CacheError
from kvq.formats import constant_bytes, grid_bytes
from kvq.policies import POLICIES
from kvq.reference.stored import KEYS, VALUES, PageGrid, decode, rotate
from pairs import Pair, attention, forward, frequencies, pack_heads, random_heads, relative_rms
from planes import codes_of
from tolerances import TRACE_ERROR

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

SHAPE = CacheShape(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
SINKS = 4


class Text:
    """A list of numbers with None in gaps, and the caches that should hold it."""

    def __init__(self, caches: Sequence[ClassCache], seed: int, *, rotary_pairs: int = 8) -> None:
        self.caches = caches
        self.numbers: list[int | None] = []
        self.made = 0
        self.rng = np.random.default_rng(seed)
        self.inv_freq = frequencies(rotary_pairs)

    def rows(self, count: int) -> np.ndarray:
        """Random rows whose values are the numbers of the tokens."""
        q, k, v = random_heads(self.rng, SHAPE, count)
        v[:] = (np.arange(count) + self.made)[:, None, None] % 2000
        return pack_heads(q, k, v)

    def write(self, at: int, count: int) -> list[np.ndarray]:
        """Tokens `at` on, at the end or in a gap, through the one layer of every cache."""
        for _ in range(max(0, count - 1) // 100):
            self.write(at, 100)
            at, count = at + 100, count - 100
        rows, outs = self.rows(count), []
        gap = at < len(self.numbers)
        for cache in self.caches:
            cache.begin(count, at=at if gap else None)
            where = at + np.arange(count)
            outs.append(cache.attend(attention(SHAPE), rows, where, self.inv_freq))
            cache.commit(count)
        self.numbers[at : at + count] = [(self.made + i) % 2000 for i in range(count)]
        self.made += count
        return outs

    def edit(self, start: int, stop: int, count: int) -> None:
        for cache in self.caches:
            cache.edit(start, stop, count)
        self.numbers[start:stop] = [None] * count

    def trim(self, tokens: int) -> None:
        for cache in self.caches:
            cache.trim(tokens)
        del self.numbers[tokens:]

    def look(self) -> list[np.ndarray]:
        """What a row at the end sees; it is forgotten."""
        rows, outs = self.rows(1), []
        for cache in self.caches:
            out = forward(
                cache,
                [attention(SHAPE)],
                [rows],
                np.array([len(self.numbers)]),
                self.inv_freq,
            )
            outs.append(out[0])
            cache.rewind()
        return outs

    def check(self, cache: ClassCache) -> None:
        """Every token but those in gaps stands once, at the position it has in the list."""
        stored: dict[int, tuple[int, int]] = {}
        for column, pos0, delta, first, mask in cache.views().tolist():
            numbers = values_of(cache, column)[:, 0]
            for slot in range(64):
                if mask >> slot & 1:
                    assert first + slot not in stored
                    stored[first + slot] = (round(float(numbers[slot])), pos0 + slot + delta)
        values = cache.tail(0, 0)[1][:, 0]
        for (token, position, _), value in zip(cache.places().tolist(), values, strict=True):
            assert token not in stored
            stored[token] = (round(float(value)), position)
        expected = {i: (number, i) for i, number in enumerate(self.numbers) if number is not None}
        assert stored == expected
        assert cache.tokens == len(self.numbers)


def sides_of(cache: ClassCache, column: int) -> list[np.ndarray]:
    """Keys and values [64, D] of a page as attention reads them, from its stored bytes."""
    stored = np.frombuffer(cache.page(0, 0, column), np.uint8)
    bits = cache.columns()[1][0, 0, column].tolist()
    dim, sides = SHAPE.head_dim, []
    ends = grid_bytes(dim), constant_bytes(dim)
    grids = [PageGrid.load(part.tobytes()) for part in np.split(stored[: ends[1]], ends[:1])]
    planes = stored[ends[1] :]
    for side in (KEYS, VALUES):
        count = 64 * dim * bits[side] // 8
        codes = codes_of(planes[:count], bits[side], side, dim)
        sides.append(decode(codes, grids[side], bits[side], side))
        planes = planes[count:]
    return sides


def values_of(cache: ClassCache, column: int) -> np.ndarray:
    return sides_of(cache, column)[VALUES]


def opened(plan: KvPlan, context: int = 600, **options: object) -> Pair:
    budget = budget_for_tokens(SHAPE, plan, context)
    return Pair.open(SHAPE, plan, budget, context, **options)


def random_edit(text: Text, rng: np.random.Generator) -> tuple[int, int, int]:
    """Where a person edits: mostly a few tokens, now and then many, or where it was last."""
    start = int(rng.integers(SINKS, len(text.numbers) + 1))
    stop = min(len(text.numbers), start + int(rng.choice([0, 0, 1, 2, 5, 40])))
    room = 500 - len(text.numbers)
    return start, stop, int(rng.integers(0, max(1, min(room, rng.choice([2, 3, 8, 40])))))


@pytest.mark.parametrize(("bits", "edits"), [(8, 10_000), (4, 300), (16, 500)])
def test_any_edits_are_those_of_a_list(bits: int, edits: int) -> None:
    """Tokens, positions, masks. Where views run out a text is computed again, as by a sequence.

    The budget holds pages of which edits have left little, so that none is evicted.
    """
    plan = KvPlan(k_bits=bits, v_bits=bits, sink_tokens=SINKS, tail_tokens=16)
    cache = open_cache(SHAPE, plan, budget_for_tokens(SHAPE, plan, 8000), 8000)
    text, rng = Text([cache], 1), np.random.default_rng(bits)
    text.write(0, 300)
    again = 0
    for turn in range(edits):
        start, stop, count = random_edit(text, rng)
        try:
            text.edit(start, stop, count)
        except CacheError:
            again += 1
            text.trim(start)
        first = text.numbers.index(None) if None in text.numbers else len(text.numbers)
        while None in text.numbers[first:]:
            last = first
            while last < len(text.numbers) and text.numbers[last] is None and last - first < 7:
                last += 1
            text.write(first, last - first)
            first = text.numbers.index(None) if None in text.numbers else len(text.numbers)
        if len(text.numbers) < 200:
            text.write(len(text.numbers), 60)
        if rng.random() < 0.02:
            text.trim(max(SINKS, len(text.numbers) - int(rng.integers(90))))
        if rng.random() < 0.02:
            state = cache.state()
            cache.trim(SINKS)
            cache.load_state(state)
            assert cache.state() == state
        if turn % (edits // 50) == 0:
            text.check(cache)
    assert again < edits / 2
    cache.close()


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [(8, 8), (4, 2), (16, 16)])
@pytest.mark.parametrize("pairs", [8, 3])
def test_both_caches_see_an_edited_text_alike(bits: tuple[int, int], pairs: int) -> None:
    """PIE-4: and as policy A would, every key decoded, turned to where it stands, and in order."""
    plan = KvPlan(k_bits=bits[0], v_bits=bits[1], sink_tokens=SINKS, tail_tokens=16)
    pair, rng = opened(plan), np.random.default_rng(3)
    text = Text(list(pair), 4, rotary_pairs=pairs)
    text.write(0, 300)
    for _ in range(25):
        start, stop, count = random_edit(text, rng)
        text.edit(start, stop, count)
        if count:
            native_out, numpy_out = text.write(start, count)
            assert relative_rms(native_out, numpy_out) < TRACE_ERROR
        facts = [cache.views().tolist() for cache in pair]
        assert facts[0] == facts[1]
        assert (pair.native.places() == pair.numpy.places()).all()
        native_out, numpy_out = text.look()
        assert relative_rms(native_out, numpy_out) < TRACE_ERROR
        for cache in pair:
            text.check(cache)
    assert len(pair.native.views()) > len(pair.native.columns()[0]) or bits[0] == 16
    rows = text.rows(1)
    out = [
        forward(c, [attention(SHAPE)], [rows], np.array([len(text.numbers)]), text.inv_freq)[0]
        for c in pair
    ]
    assert relative_rms(out[0], plain(pair.numpy, rows, len(text.numbers), text.inv_freq)) < 2e-3
    pair.close()


@pytest.mark.parametrize("piece", [90, 7])
def test_the_end_of_a_text_stays_in_floating_point(piece: int) -> None:
    """However much is encoded in its middle: pages take the first tokens, not the oldest rows."""
    pair = opened(KvPlan(k_bits=4, v_bits=2, sink_tokens=SINKS, tail_tokens=16))
    text = Text(list(pair), 4)
    text.write(0, 300)
    for start in (20, 150, 60):
        text.edit(start, start + 2, 90)
        for at in range(start, start + 90, piece):
            count = min(piece, start + 90 - at)
            rows = sorted([*floats(pair.native), *range(at, at + count)])
            native_out, numpy_out = text.write(at, count)
            assert relative_rms(native_out, numpy_out) < TRACE_ERROR
            assert (pair.native.places() == pair.numpy.places()).all()
            left = floats(pair.native)
            assert left == rows[len(rows) - len(left) :]
        native_out, numpy_out = text.look()
        assert relative_rms(native_out, numpy_out) < TRACE_ERROR
        text.edit(start, start + 60, 0)
        for cache in pair:
            text.check(cache)
    pair.close()


def floats(cache: ClassCache) -> list[int]:
    """The tokens behind the sinks that are in no page, in order."""
    return sorted(cache.places()[:, 0].tolist())[SINKS:]


def plain(cache: ClassCache, rows: np.ndarray, position: int, inv_freq: np.ndarray) -> np.ndarray:
    """Attention of one row over keys turned to where they stand (policy A), in text order."""
    heads = rows.reshape(1, -1, SHAPE.head_dim)
    entries: list[tuple[int, np.ndarray, np.ndarray]] = []
    for column, pos0, delta, _, mask in cache.views().tolist():
        keys, values = sides_of(cache, column)
        for slot in range(64):
            if mask >> slot & 1:
                turned = turn(keys[slot], delta, inv_freq)
                entries.append((pos0 + slot + delta, turned, values[slot]))
    k, v, _ = cache.tail(0, 0)
    for row, (_, at, delta) in enumerate(cache.places().tolist()):
        entries.append((at, turn(k[row].astype(np.float32), delta, inv_freq), v[row]))
    own_key = turn(heads[0, 2], position, inv_freq).astype(np.float16).astype(np.float32)
    entries.append((position, own_key, heads[0, 3].astype(np.float16)))
    entries.sort(key=lambda entry: entry[0])
    keys, values = (np.stack([entry[i] for entry in entries]).astype(np.float64) for i in (1, 2))
    out = []
    for head in range(2):
        logits = keys @ turn(heads[0, head], position, inv_freq) * SHAPE.head_dim**-0.5
        weights = np.exp(logits - logits.max())
        out.append(weights @ values / weights.sum())
    return np.concatenate(out)[None]


def turn(x: np.ndarray, delta: int, inv_freq: np.ndarray) -> np.ndarray:
    return rotate(x[None, None], np.array([delta]), inv_freq)[0, 0]


@pytest.mark.parametrize("pairs", [16, 5])
def test_rotations_add_up_and_keep_norms(pairs: int) -> None:
    """PIE-2 and PIE-3: a key turned on is the key at the new position; nothing is magnified."""
    rng, inv_freq = np.random.default_rng(0), frequencies(pairs)
    k = rng.standard_normal(32).astype(np.float32)
    for position, delta in ((0, 5), (700, -300), (4000, 63)):
        there = turn(k, position + delta, inv_freq)
        moved = turn(turn(k, position, inv_freq), delta, inv_freq)
        assert np.abs(moved - there).max() < 2e-3 * np.abs(k).max()
        assert np.linalg.norm(moved) == pytest.approx(np.linalg.norm(k), rel=1e-5)
        back = turn(turn(k, delta, inv_freq), -delta, inv_freq)
        assert np.abs(back - k).max() < 1e-5
        half = turn(k, position, inv_freq).astype(np.float16).astype(np.float32)
        assert np.abs(turn(half, delta, inv_freq) - there).max() < 4e-3
        q = rng.standard_normal(32).astype(np.float32)
        assert turn(q, -delta, inv_freq) @ k == pytest.approx(
            q @ turn(k, delta, inv_freq), abs=1e-4
        )


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "numpy"])
@pytest.mark.parametrize("bits", [8, 16])
def test_an_edit_and_its_undoing_leave_what_was(bits: int, use_native: bool) -> None:
    """PIE-1, 7 and 10: positions, masks and outputs return bit for bit; no page's byte changes."""
    plan = KvPlan(k_bits=bits, v_bits=bits, sink_tokens=SINKS, tail_tokens=16)
    cache = open_cache(SHAPE, plan, budget_for_tokens(SHAPE, plan, 600), 600, native=use_native)
    text = Text([cache], 5)
    text.write(0, 300)
    rows, at, inv_freq = text.rows(1), np.array([300]), text.inv_freq

    def seen() -> np.ndarray:
        out = forward(cache, [attention(SHAPE)], [rows], at, inv_freq)[0]
        cache.rewind()
        return out

    before, facts, places, state = seen(), cache.views(), cache.places(), cache.state()
    pages = [cache.page(0, 0, c) for c in range(len(cache.columns()[0]))]
    cache.edit(150, 150, 0)
    assert cache.state() == state
    for start, count in ((90, 5), (SINKS, 3), (297, 8)):
        text.edit(start, start, count)
        text.write(start, count)
        text.edit(start, start + count, 0)
        assert pages == [cache.page(0, 0, c) for c in range(len(pages))]
        assert (cache.views() == facts).all()
        assert (cache.places() == places).all()
        assert (seen() == before).all()
    cache.close()


def test_the_order_of_edits_makes_no_difference() -> None:
    """PIE-8: left to right, and from the last to the first, also adjacent ones."""
    plan = KvPlan(k_bits=8, v_bits=8, sink_tokens=SINKS, tail_tokens=16)
    edits = [(20, 25, 3), (25, 25, 2), (70, 71, 9), (200, 260, 0), (260, 261, 1), (295, 298, 5)]
    outs = []
    for leftwards in (True, False):
        pair = opened(plan)
        text = Text(list(pair), 6)
        text.write(0, 300)
        moved = 0
        for start, stop, count in edits[:: -1 if leftwards else 1]:
            shift = 0 if leftwards else moved
            text.edit(start + shift, stop + shift, count)
            moved += count - (stop - start)
        while None in text.numbers:
            first = text.numbers.index(None)
            last = next(i for i in range(first, 999) if text.numbers[i : i + 1] != [None])
            text.write(first, last - first)
        for cache in pair:
            text.check(cache)
        outs.append((text.look(), pair.native.views().tolist(), pair.numpy.views().tolist()))
        pair.close()
    assert outs[0][1:] == outs[1][1:]
    for mine, theirs in zip(outs[0][0], outs[1][0], strict=True):
        assert (mine == theirs).all()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_keeps_its_budget_while_a_text_is_edited(policy: str) -> None:
    """With nearly no probe left by the edits; what is held is where it should be."""
    plan = KvPlan(k_bits=8, v_bits=8, sink_tokens=SINKS)
    budget = budget_for_tokens(SHAPE, plan, 200, context_tokens=900, policy=policy)
    cache = open_cache(SHAPE, plan, budget, 900, policy=policy)
    text, rng = Text([cache], 8), np.random.default_rng(8)
    text.write(0, 400)
    for _ in range(60):
        start, stop, count = random_edit(text, rng)
        try:
            text.edit(start, stop, count)
        except CacheError:
            text.trim(start)
            count = 0
        if count:
            text.write(start, count)
        text.write(len(text.numbers), 3)
        assert cache.used_bytes <= budget
    for _, pos0, delta, first, mask in cache.views().tolist():
        assert mask == 0 or first == pos0 + delta
    assert cache.tokens == len(text.numbers)
    cache.close()


def took(cache: ClassCache, edit: tuple[int, int, int]) -> bool:
    """Whether there were views for an edit; if not it must have changed nothing."""
    state = cache.state()
    try:
        cache.edit(*edit)
    except CacheError:
        assert cache.state() == state
        return False
    return True


def test_what_cannot_be_edited_is_refused_and_leaves_all_as_it_was() -> None:
    plan = KvPlan(k_bits=8, v_bits=8, sink_tokens=SINKS, tail_tokens=16)
    for cache in (pair := opened(plan, 320)):
        text = Text([cache], 7)
        text.write(0, 300)
        state = cache.state()
        for wrong in ((3, 9, 1), (9, 8, 0), (8, 301, 0), (8, 8, 21), (8, 9, -1), (300, 300, 21)):
            with pytest.raises(CacheError):
                cache.edit(*wrong)
        assert cache.state() == state
        for at in (10, 299, 301):
            with pytest.raises(CacheError):
                cache.begin(1, at=at)
        cache.edit(50, 52, 4)
        for at, count in ((50, 5), (49, 2), (53, 2)):
            with pytest.raises(CacheError):
                cache.begin(count, at=at)
        many = [(start, start + 2, 1) for start in range(70, 280, 2)]
        done = sum(1 for edit in many if took(cache, edit))
        assert 4 < done < len(many)
        before = cache.state()
        cache.begin(2, at=51)
        cache.rewind()
        assert cache.state() == before
    pair.close()


def test_a_crowded_cache_names_the_page_with_least_left() -> None:
    """Its tokens, opened as gaps, leave the page free; where nothing is gone none is named."""
    plan = KvPlan(k_bits=8, v_bits=8, sink_tokens=SINKS, tail_tokens=16)
    pair = opened(plan, 400)
    text = Text(list(pair), 7)
    text.write(0, 350)
    assert [cache.crowded(50) for cache in pair] == [[], []]
    for start in range(20, 300, 13):
        if pair.native.crowded(50):
            break
        text.edit(start, start + 9, 9)
        text.write(start, 9)
    columns = [len(cache.columns()[0]) for cache in pair]
    runs = pair.native.crowded(50)
    assert runs == pair.numpy.crowded(50)
    left = sum(stop - start for start, stop in runs)
    assert 0 < left == min(pair.native._tokens_left()) < 64
    for start, stop in reversed(runs):
        text.edit(start, stop, stop - start)
    assert [len(cache.columns()[0]) for cache in pair] == [count - 1 for count in columns]
    for start, stop in runs:
        text.write(start, stop - start)
    assert pair.native.crowded(50) == []
    for cache in pair:
        text.check(cache)


def test_a_budget_for_the_context_gives_up_what_edits_left_least_of() -> None:
    """Where nobody encodes it again: no policy can decide there, and nothing fails."""
    plan = KvPlan(k_bits=8, v_bits=8, sink_tokens=SINKS, tail_tokens=16)
    cache = open_cache(SHAPE, plan, budget_for_tokens(SHAPE, plan, 400), 400)
    assert not cache.arena.probes
    text = Text([cache], 7)
    text.write(0, 390)
    for start in range(20, 380, 30):
        text.edit(start, start + 9, 9)
        text.write(start, 9)
    assert 0 < cache.usage().evicted_share < 0.2
    assert cache.used_bytes <= cache.budget_bytes
    cache.close()
