"""Random traces of calls: native and numpy caches hold what a plain list of tokens says they do.

Nothing is rotated where bytes must be equal. In layer 0 a token's value is its own number in every
channel, which pages and tail hold exactly at any width: so each can be asked which tokens it holds.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from caches import budget_for_tokens, minimum_budget
from kvq import native_library
from kvq.class_cache import ClassCache
from kvq.config import CacheShape, KvPlan
from kvq.errors import (
    CacheError,
)
from kvq.formats import constant_bytes, grid_bytes, page_bytes
from kvq.policies import policy_named
from kvq.reference.stored import KEYS, VALUES, PageGrid, ancestry, planes
from pairs import (
    ALL,
    WIDTHS,
    Float,
    Pair,
    attention,
    forward,
    pack_heads,
    random_heads,
    some_feedback,
)
from planes import codes_of
from tolerances import TRACE_ERROR

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())


def recorded(cache: ClassCache) -> list[list[list[int]]]:
    """Fills with the actions of every call that lowers or evicts pages, whoever decided them."""
    calls: list[list[list[int]]] = []
    demote = cache.storage.demote

    def record(actions: NDArray[np.int32]) -> None:
        calls.append(actions.tolist())
        demote(actions)

    cache.storage.demote = record  # type: ignore[method-assign]
    return calls


@dataclass(slots=True)
class ListPage:
    """A page as a list of numbers."""

    numbers: list[int]
    first_token: int
    widths: dict[tuple[int, int], tuple[int, int]]
    delta: int = 0
    mask: int = ALL


@dataclass(slots=True)
class ListModel:
    """The cache as lists of token numbers: what is held where, and how wide."""

    shape: CacheShape
    plan: KvPlan
    sinks: list[int] = field(default_factory=list)
    pages: list[ListPage] = field(default_factory=list)
    recent: list[int] = field(default_factory=list)
    tokens: int = 0
    new_page_widths: dict[tuple[int, int], tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.new_page_widths = dict.fromkeys(self.streams(), (self.plan.k_bits, self.plan.v_bits))

    def streams(self) -> list[tuple[int, int]]:
        heads = range(self.shape.num_kv_heads)
        return [(layer, head) for layer in range(self.shape.num_layers) for head in heads]

    def append(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            room = len(self.sinks) < self.plan.sink_tokens
            (self.sinks if room else self.recent).append(number)
        self.tokens += len(numbers)
        while self.plan.quantized and len(self.recent) >= 64 + self.plan.tail_tokens:
            first = self.tokens - len(self.recent)
            self.pages.append(ListPage(self.recent[:64], first, dict(self.new_page_widths)))
            del self.recent[:64]

    def trim(self, tokens: int) -> None:
        lost = self.tokens - tokens
        self.tokens = tokens
        # What is not seen any more goes with the next tokens that do.
        self.pages = [page for page in self.pages if page.mask]
        if lost <= len(self.recent):
            del self.recent[len(self.recent) - lost :]
            return
        self.recent.clear()
        del self.sinks[tokens:]
        while self.pages:
            last = self.pages[-1]
            kept = min(64, max(0, tokens - last.first_token))
            last.mask &= (1 << kept) - 1
            if last.mask:
                break
            self.pages.pop()

    def demote(self, actions: Sequence[Sequence[int]]) -> None:
        for layer, head, column, k_bits, v_bits in actions:
            self.pages[column].widths[layer, head] = (k_bits, v_bits)
        self.pages = [page for page in self.pages if any(map(any, page.widths.values()))]

    def facts(self) -> list[list[int]]:
        """Rows as `ClassCache.columns` gives them; a column's first token is its position here."""
        signed = [page.mask - (page.mask >> 63 << 64) for page in self.pages]
        return [
            [page.first_token, page.delta, page.first_token, mask]
            for page, mask in zip(self.pages, signed, strict=True)
        ]

    def page_bytes(self) -> int:
        dim = self.shape.head_dim
        widths = [pair for page in self.pages for pair in page.widths.values()]
        return sum(page_bytes(dim, *pair) for pair in widths if pair[0])


def holds_numbers(page: bytes, head_dim: int, numbers: list[int]) -> bool:
    """Whether these are the tokens of a layer-0 page: each value row is constant, its mid one of
    255 steps between the page's smallest and largest."""
    grid = PageGrid.load(page[grid_bytes(head_dim) : constant_bytes(head_dim)])
    step = (max(numbers) - min(numbers)) / 255
    return bool(np.abs(grid.mid - np.array(numbers)).max() <= max(step, 0.01))


def lowered(page: bytes, old: tuple[int, int], new: tuple[int, int], head_dim: int) -> bytes:
    """The bytes a page must have once its widths have fallen from `old` to `new`."""
    constants = constant_bytes(head_dim)
    parts, at = [page[:constants]], constants
    for side, before, after in zip((KEYS, VALUES), old, new, strict=True):
        count = 64 * head_dim * before // 8
        stored = np.frombuffer(page, np.uint8, count, offset=at)
        parts.append(planes(codes_of(stored, before, side, head_dim), after, side).tobytes())
        at += count
    return b"".join(parts)


@dataclass(slots=True)
class Snapshot:
    """What both caches and the model were at one moment."""

    states: list[bytes]
    model: ListModel
    closed: dict[tuple[int, int, int], tuple[tuple[int, int], bytes]]


class Traces(RuleBasedStateMachine):
    """Any order of calls leaves native, numpy and the lists with the same contents."""

    snapshots = Bundle("snapshots")

    @initialize(
        heads=st.sampled_from([(2, 1), (4, 2)]),
        head_dim=st.sampled_from([16, 32, 48]),
        widths=st.sampled_from([*WIDTHS, (16, 16)]),
        sinks=st.sampled_from([0, 4, 64]),
        tail=st.sampled_from([64, 0, 17]),
        share=st.sampled_from([0.1, 0.0, 0.3, 1.0]),
        odd=st.integers(0, 300),
        prompt=st.sampled_from([700, 0, 150, 400]),
        draft=st.sampled_from([8, 20, 128]),
    )
    def open(
        self,
        heads: tuple[int, int],
        head_dim: int,
        widths: tuple[int, int],
        sinks: int,
        tail: int,
        share: float,
        odd: int,
        prompt: int,
        draft: int,
    ) -> None:
        self.shape = CacheShape(
            num_layers=2, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim
        )
        self.plan = KvPlan(k_bits=widths[0], v_bits=widths[1], sink_tokens=sinks, tail_tokens=tail)
        self.context = 3500
        self.draft_tokens = draft
        least = minimum_budget(self.shape, self.plan, self.context, draft_tokens=draft)
        most = budget_for_tokens(self.shape, self.plan, self.context, draft_tokens=draft)
        self.budget = least + int(share * max(0, most - least)) + odd
        self.pair = self.opened()
        self.layers = [attention(self.shape, layer) for layer in range(2)]
        self.model = ListModel(self.shape, self.pair.native.plan)
        self.closed: dict[tuple[int, int, int], tuple[tuple[int, int], bytes]] = {}
        self.rng = np.random.default_rng(odd)
        self.next_number = -2048
        self.append(prompt)

    def opened(self) -> Pair:
        streams = (self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_dim)
        rng = np.random.default_rng(self.budget)
        options = {
            "draft_tokens": self.draft_tokens,
            "feedback": some_feedback(rng, *streams) if self.budget % 2 else None,
        }
        pair = Pair.open(self.shape, self.plan, self.budget, self.context, **options)
        for cache in pair:
            cache.policy = policy_named("oldest")
        self.given_up = [recorded(cache) for cache in pair]
        return pair

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()

    # -- what can be done --

    def rows(self, count: int) -> tuple[list[int], list[Float]]:
        """New token numbers and both layers' packed rows."""
        numbers = list(range(self.next_number, self.next_number + count))
        self.next_number += count
        first, second = (random_heads(self.rng, self.shape, count) for _ in range(2))
        first[2][:] = np.array(numbers, np.float32)[:, None, None]
        return numbers, [pack_heads(*first), pack_heads(*second)]

    def attend(
        self,
        rows: list[Float],
        positions: NDArray[np.int64] | None = None,
        parents: Sequence[int] | None = None,
        view: str = "full",
    ) -> list[list[int]]:
        """One forward pass of both; returns what the policy took away."""
        if positions is None:
            positions = np.arange(len(rows[0])) + self.model.tokens
        outputs = [
            forward(cache, self.layers, rows, positions, parents=parents, view=view)
            for cache in self.pair
        ]
        for got, want, largest in zip(*outputs, (2048.0, 5.0), strict=True):
            assert np.abs(got - want).max() <= TRACE_ERROR * largest
        assert self.given_up[0] == self.given_up[1]
        return self.follow()

    def follow(self) -> list[list[int]]:
        """Gives up in the model what the caches gave up; returns it."""
        calls = self.given_up[0].copy()
        for log in self.given_up:
            log.clear()
        for actions in calls:
            self.model.demote(actions)
        return [action for actions in calls for action in actions]

    def has_numbers_left(self, count: int) -> bool:
        return self.next_number + count <= 2048 and self.model.tokens + count <= self.context

    @rule(count=st.one_of(st.sampled_from([300, 64, 129]), st.integers(1, 300)))
    def append(self, count: int) -> None:
        while count and self.has_numbers_left(count):
            part = min(count, self.pair.native.chunk_tokens)
            numbers, rows = self.rows(part)
            self.attend(rows)
            for cache in self.pair:
                cache.commit(part)
            self.model.append(numbers)
            count -= part

    @rule(count=st.integers(1, 8), kept=st.integers(0, 8), aborts=st.booleans())
    def draft(self, count: int, kept: int, aborts: bool) -> None:
        """Drafts of which some are kept; with none kept, nothing has happened."""
        if not self.has_numbers_left(count):
            return
        before = [cache.state() for cache in self.pair]
        numbers, rows = self.rows(count)
        actions = self.attend(rows)
        kept = min(kept, count)
        for cache in self.pair:
            if kept or not aborts:
                cache.commit(kept)
            else:
                cache.rewind()
        self.model.append(numbers[:kept])
        if not kept and not actions:
            assert [cache.state() for cache in self.pair] == before

    @rule(
        passes=st.lists(
            st.lists(st.integers(-1, 6), min_size=1, max_size=5), min_size=1, max_size=4
        ),
        back=st.lists(st.integers(0, 7), max_size=3),
        view=st.sampled_from(["full", "hi"]),
        keep=st.integers(-1, 7),
    )
    def branch(self, passes: list[list[int]], back: list[int], view: str, keep: int) -> None:
        """Trees in several passes, rewound now and then; one path of what is left is kept."""
        parents: list[int] = []
        numbers: list[int] = []
        changes: list[list[int]] = []
        before = [cache.state() for cache in self.pair]
        for parents_of_pass in passes:
            room = self.pair.native.arena.draft_tokens - len(parents)
            new = [min(p, len(parents) + i - 1) for i, p in enumerate(parents_of_pass[:room])]
            if not new or not self.has_numbers_left(len(parents) + len(new)):
                break
            parents += new
            depth = ancestry(parents).sum(axis=1) - 1
            added, rows = self.rows(len(new))
            numbers += added
            at = self.model.tokens + depth[-len(new) :]
            changes += self.attend(rows, at, new, view)
            if back:
                left = min(back.pop(), len(parents))
                del parents[left:], numbers[left:]
                for cache in self.pair:
                    cache.rewind(left)
        path: list[int] = []
        if parents and keep >= 0:
            path = np.flatnonzero(ancestry(parents)[min(keep, len(parents) - 1)]).tolist()
        for cache in self.pair:
            assert cache.branch_rows == len(parents)
            if path:
                cache.commit(path)
            else:
                cache.rewind()
        self.model.append([numbers[row] for row in path])
        if not path and not changes:
            assert [cache.state() for cache in self.pair] == before

    @rule(layer=st.integers(0, 1), value=st.sampled_from([np.nan, np.inf, -1e6]), key=st.booleans())
    def offer_a_bad_number(self, layer: int, value: float, key: bool) -> None:
        """A key or value that is not finite is refused, and nothing of that pass stays."""
        if not self.has_numbers_left(3):
            return
        _, rows = self.rows(3)
        heads = self.shape.num_heads + (0 if key else self.shape.num_kv_heads)
        rows[layer][2, heads * self.shape.head_dim] = value
        with pytest.raises(CacheError, match="not finite in float16"):
            forward(self.pair.native, self.layers, rows, np.arange(3) + self.model.tokens)
        with pytest.raises(CacheError, match="not finite in float16"):
            forward(self.pair.numpy, self.layers, rows, np.arange(3) + self.model.tokens)
        for cache in self.pair:
            cache.rewind()
        self.follow()

    @precondition(lambda self: self.model.pages)
    @rule(share=st.sampled_from([0.5, 0.1, 1.0]))
    def demote(self, share: float) -> None:
        """Lowers or evicts some pages of some heads."""
        actions = []
        for column, page in enumerate(self.model.pages):
            for (layer, head), page_widths in page.widths.items():
                lower = [w for w in WIDTHS if w[0] <= page_widths[0] and w[1] <= page_widths[1]]
                if page_widths[0] and self.rng.random() < share:
                    lower.append((0, 0))
                    choice = lower[int(self.rng.integers(len(lower)))]
                    actions.append((layer, head, column, *choice))
        self.pair.demote(actions)
        self.follow()

    @precondition(lambda self: self.plan.quantized)
    @rule(share=st.sampled_from([0.5, 0.1]))
    def lower_new_page_widths(self, share: float) -> None:
        """Lowers what pages of some heads will close at."""
        for stream, page_widths in self.model.new_page_widths.items():
            lower = [w for w in WIDTHS if w[0] <= page_widths[0] and w[1] <= page_widths[1]]
            if self.rng.random() < share:
                self.model.new_page_widths[stream] = lower[int(self.rng.integers(len(lower)))]
        widths = np.array(list(self.model.new_page_widths.values()), np.uint8)
        for cache in self.pair:
            cache.lower_new_page_widths(widths.reshape(2, -1, 2))

    @precondition(lambda self: self.model.pages)
    @rule(data=st.data(), delta=st.sampled_from([0, 5, -64, 4000]))
    def shift(self, data: st.DataObject, delta: int) -> None:
        column = data.draw(st.integers(0, len(self.model.pages) - 1), "column")
        self.pair.shift(column, delta)
        self.model.pages[column].delta = delta

    @precondition(lambda self: self.model.pages)
    @rule(data=st.data(), mask=st.sampled_from([0, 1, ALL, ALL - 1, 0x8000000000000001]))
    def mask(self, data: st.DataObject, mask: int) -> None:
        column = data.draw(st.integers(0, len(self.model.pages) - 1), "column")
        self.pair.mask(column, mask)
        self.model.pages[column].mask &= mask

    @rule(back=st.one_of(st.sampled_from([1, 70, 3500]), st.integers(0, 300)))
    def trim(self, back: int) -> None:
        tokens = max(0, self.model.tokens - back)
        self.pair.trim(tokens)
        self.model.trim(tokens)

    @rule(target=snapshots)
    def save(self) -> Snapshot:
        states = [cache.state() for cache in self.pair]
        return Snapshot(states, copy.deepcopy(self.model), dict(self.closed))

    @rule(snapshot=snapshots, fresh=st.booleans())
    def load(self, snapshot: Snapshot, fresh: bool) -> None:
        """Into the same caches, or into new ones."""
        if fresh:
            self.pair.close()
            self.pair = self.opened()
        for cache, state in zip(self.pair, snapshot.states, strict=True):
            cache.load_state(state)
            assert cache.state() == state
        self.model = copy.deepcopy(snapshot.model)
        self.closed = dict(snapshot.closed)

    # -- what must hold --

    @invariant()
    def both_hold_what_the_lists_say(self) -> None:
        if not hasattr(self, "pair"):
            return
        model, dim = self.model, self.shape.head_dim
        for cache in self.pair:
            assert cache.tokens == model.tokens
            facts, widths = cache.columns()
            assert facts.tolist() == model.facts()
            page_widths = cache.new_page_widths().reshape(-1, 2).tolist()
            assert page_widths == list(map(list, model.new_page_widths.values()))
            for layer, head in model.streams():
                page_widths = [list(page.widths[layer, head]) for page in model.pages]
                assert widths[layer, head].tolist() == page_widths
            for head in range(self.shape.num_kv_heads):
                _, v, _ = cache.tail(0, head)
                assert v[:, 0].astype(int).tolist() == model.sinks + model.recent
        for layer, head in model.streams():
            for got, want in zip(*(cache.tail(layer, head) for cache in self.pair), strict=True):
                assert (got == want).all()
            for column, page in enumerate(model.pages):
                stored = self.pair.native.page(layer, head, column)
                assert stored == self.pair.numpy.page(layer, head, column)
                page_widths = page.widths[layer, head]
                if not page_widths[0]:
                    assert stored == b""
                    continue
                if layer == 0:
                    assert holds_numbers(stored, dim, page.numbers)
                key = (layer, head, page.numbers[0])
                widths_then, bytes_then = self.closed.setdefault(key, (page_widths, stored))
                expected = lowered(bytes_then, widths_then, page_widths, dim)
                if self.budget % 2:  # keys with feedback are rounded anew
                    keys = slice(
                        constant_bytes(dim), constant_bytes(dim) + 8 * dim * page_widths[0]
                    )
                    stored, expected = (
                        side[: keys.start] + side[keys.stop :] for side in (stored, expected)
                    )
                assert stored == expected

    @invariant()
    def the_budget_holds_and_every_byte_is_counted(self) -> None:
        if not hasattr(self, "pair"):
            return
        fixed = self.pair.native.arena.regions.num_bytes
        for cache in self.pair:
            assert cache.used_bytes == fixed + self.model.page_bytes()
            assert cache.used_bytes <= cache.peak_bytes <= self.budget


@pytest.mark.slow
def test_any_trace_of_calls_keeps_the_same_contents() -> None:
    run_state_machine_as_test(
        Traces,
        settings=settings(
            deadline=None,
            database=None,
            derandomize=True,
            max_examples=40,
            stateful_step_count=20,
        ),
    )


def test_the_newest_tokens_stay_floating_point_only_where_the_context_fits() -> None:
    shape = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
    plan = KvPlan(sink_tokens=4)
    whole = budget_for_tokens(shape, plan, 1000)
    for budget, newest in ((whole, 64), (whole - 1, 0)):
        pair = Pair.open(shape, plan, budget, 1000)
        for tokens in range(4 + newest + 63 + 64 + 1):
            pages = max(0, tokens - 4 - newest) // 64
            for cache in pair:
                assert len(cache.tail(0, 0)[2]) == tokens - 64 * pages
                assert cache.columns()[0][:, 2].tolist() == [4 + 64 * p for p in range(pages)]
            rows = pack_heads(*random_heads(np.random.default_rng(tokens), shape, 1))
            pair.fill([attention(shape, 0)], [rows])
        pair.close()
