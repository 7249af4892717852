"""The cache as a whole: traces against the reference and a plain list, the budget, snapshots.

Nothing is rotated where bytes must be equal. In layer 0 a token's value is its own number in every
channel, which pages and tail hold exactly at any width: so each can be asked which tokens it holds.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

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

from caches import budget_for_tokens, minimum_budget, open_cache
from environment import ROOTS
from kvq import native
from kvq.cache import Cache, Holdings
from kvq.config import PAGE_WIDTHS, CacheShape, KvPlan
from kvq.errors import (
    BackendError,
    BudgetError,
    CacheError,
    KvqError,
    SnapshotError,
    UsageError,
)
from kvq.formats import constant_bytes, grid_bytes, page_bytes
from kvq.policies import Evidence, Relief, policy_named
from kvq.reference import KEYS, VALUES, Grid, ancestry, codes_of, planes
from kvq.sizing import tight_plan
from pairs import (
    UNROTATED,
    Float,
    Pair,
    attention,
    forward,
    frequencies,
    pack_heads,
    random_heads,
)
from tolerances import TRACE_ERROR

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

ALL = (1 << 64) - 1
WIDTHS = [(k_bits, v_bits) for k_bits in PAGE_WIDTHS for v_bits in PAGE_WIDTHS]
BOTH = pytest.mark.parametrize("use_native", [True, False], ids=["native", "numpy"])


def recorded(cache: Cache) -> list[list[list[int]]]:
    """Fills with the actions of every call that lowers or evicts pages, whoever decided them."""
    calls: list[list[list[int]]] = []
    demote = cache.engine.demote

    def told(actions: NDArray[np.int32]) -> None:
        calls.append(actions.tolist())
        demote(actions)

    cache.engine.demote = told  # type: ignore[method-assign]
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
    entering: dict[tuple[int, int], tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.entering = dict.fromkeys(self.streams(), (self.plan.k_bits, self.plan.v_bits))

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
            self.pages.append(ListPage(self.recent[:64], first, dict(self.entering)))
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
        """Rows as `Cache.columns` gives them; a column's first token is its position here."""
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
    grid = Grid.load(page[grid_bytes(head_dim) : constant_bytes(head_dim)])
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
        options = {"draft_tokens": self.draft_tokens}
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
        for wanted in passes:
            room = self.pair.native.arena.draft_tokens - len(parents)
            new = [min(p, len(parents) + i - 1) for i, p in enumerate(wanted[:room])]
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
            for (layer, head), held in page.widths.items():
                lower = [w for w in WIDTHS if w[0] <= held[0] and w[1] <= held[1]]
                if held[0] and self.rng.random() < share:
                    lower.append((0, 0))
                    choice = lower[int(self.rng.integers(len(lower)))]
                    actions.append((layer, head, column, *choice))
        self.pair.demote(actions)
        self.follow()

    @precondition(lambda self: self.plan.quantized)
    @rule(share=st.sampled_from([0.5, 0.1]))
    def demote_entering(self, share: float) -> None:
        """Lowers what pages of some heads will close at."""
        for stream, held in self.model.entering.items():
            lower = [w for w in WIDTHS if w[0] <= held[0] and w[1] <= held[1]]
            if self.rng.random() < share:
                self.model.entering[stream] = lower[int(self.rng.integers(len(lower)))]
        widths = np.array(list(self.model.entering.values()), np.uint8)
        for cache in self.pair:
            cache.demote_entering(widths.reshape(2, -1, 2))

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
            entering = cache.entering().reshape(-1, 2).tolist()
            assert entering == list(map(list, model.entering.values()))
            for layer, head in model.streams():
                held = [list(page.widths[layer, head]) for page in model.pages]
                assert widths[layer, head].tolist() == held
            for head in range(self.shape.num_kv_heads):
                _, v, _ = cache.tail(0, head)
                assert v[:, 0].astype(int).tolist() == model.sinks + model.recent
        for layer, head in model.streams():
            for got, want in zip(*(cache.tail(layer, head) for cache in self.pair), strict=True):
                assert (got == want).all()
            for column, page in enumerate(model.pages):
                stored = self.pair.native.page(layer, head, column)
                assert stored == self.pair.numpy.page(layer, head, column)
                held = page.widths[layer, head]
                if not held[0]:
                    assert stored == b""
                    continue
                if layer == 0:
                    assert holds_numbers(stored, dim, page.numbers)
                key = (layer, head, page.numbers[0])
                widths_then, bytes_then = self.closed.setdefault(key, (held, stored))
                assert stored == lowered(bytes_then, widths_then, held, dim)

    @invariant()
    def the_budget_holds_and_every_byte_is_counted(self) -> None:
        if not hasattr(self, "pair"):
            return
        fixed = self.pair.native.arena.regions.num_bytes
        for cache in self.pair:
            assert cache.used_bytes == fixed + self.model.page_bytes()
            assert cache.used_bytes <= cache.peak_bytes <= self.budget


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


# ---- drafts --------------------------------------------------------------------------------------


SMALL = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def numbered_rows(rng: np.random.Generator, count: int) -> list[Float]:
    return [pack_heads(*random_heads(rng, SMALL, count)) for _ in range(SMALL.num_layers)]


LAYERS = [attention(SMALL, layer) for layer in range(SMALL.num_layers)]


@pytest.mark.parametrize(
    ("use_native", "widths", "share"),
    [
        *((True, w, s) for w in ((8, 8), (4, 2), (16, 16)) for s in (0.0, 0.3, 1.0)),
        (False, (4, 2), 0.3),
        (False, (16, 16), 1.0),
    ],
)
def test_accepted_drafts_leave_the_state_of_sequential_decoding(
    use_native: bool, widths: tuple[int, int], share: float
) -> None:
    """Byte for byte, whatever was rejected in between, in any budget."""
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1])
    total = 700
    least, most = minimum_budget(SMALL, plan, total), budget_for_tokens(SMALL, plan, total)
    budget = least + int(share * max(0, most - least))
    sequential, drafting = (
        open_cache(SMALL, plan, budget, total, native=use_native) for _ in range(2)
    )
    rng = np.random.default_rng(11)
    true_rows = numbered_rows(rng, total)
    while drafting.tokens < total - 8:
        start, count = drafting.tokens, int(rng.integers(1, 9))
        kept = int(rng.integers(0, count + 1))
        wrong = numbered_rows(rng, count - kept)
        rows = [
            np.concatenate([true[start : start + kept], bad])
            for true, bad in zip(true_rows, wrong, strict=True)
        ]
        forward(drafting, LAYERS, rows, np.arange(start, start + count))
        drafting.commit(kept)
        for token in range(start, start + kept):
            step = [rows[token : token + 1] for rows in true_rows]
            forward(sequential, LAYERS, step, np.array([token]))
            sequential.commit(1)
        # Drafts near a page's end make the room it will need a few tokens early.
        if (drafting.tokens - plan.sink_tokens) % 64 < 50:
            assert drafting.state() == sequential.state()
    assert len(sequential.columns()[0]) > 0 or not plan.quantized
    sequential.close()
    drafting.close()


# ---- the pool ------------------------------------------------------------------------------------


class Scattered:
    """Takes bits and pages from anywhere, no more than asked."""

    needs = frozenset()

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        held = evidence.widths.astype(int)
        lost_columns = np.flatnonzero(held.any(axis=(0, 1, 3)))
        actions = []
        for column in self.rng.permutation(lost_columns)[:columns_short]:
            for layer, head in np.argwhere(held[:, :, column].any(axis=-1)):
                bytes_short -= page_bytes(evidence.head_dim, *held[layer, head, column])
                held[layer, head, column] = 0
                actions.append((layer, head, column, 0, 0))
        while bytes_short > 0:
            live = np.argwhere(held.any(axis=-1))
            layer, head, column = live[self.rng.integers(len(live))]
            before = tuple(held[layer, head, column])
            lower = [w for w in WIDTHS if w[0] <= before[0] and w[1] <= before[1] and w != before]
            lower.append((0, 0))
            after = lower[self.rng.integers(len(lower))]
            bytes_short -= page_bytes(evidence.head_dim, *before)
            bytes_short += page_bytes(evidence.head_dim, *after) if after[0] else 0
            held[layer, head, column] = after
            actions.append((layer, head, column, *after))
        return Relief(actions=np.array(actions, np.int32).reshape(-1, 5))


def exact_budget(shape: CacheShape, plan: KvPlan, context: int, pages: int, spare: int) -> int:
    """A budget whose pool holds just `pages` full pages of every stream, and `spare` bytes."""
    arena_of = open_cache(shape, tight_plan(plan), 64 << 20, context).arena
    budget = arena_of.bytes_for_columns(pages)
    wanted = pages * arena_of.column_bytes(plan.k_bits, plan.v_bits) + spare
    while (short := wanted - arena_of.room_for_pages(budget)) != 0:
        budget += short
    return budget


@pytest.mark.parametrize("widths", [(8, 8), (2, 2), (4, 2), (8, 2)])
@pytest.mark.parametrize("spare", [0, 7, 255, 300])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_pages_survive_any_mixture_of_evictions_and_new_pages(
    widths: tuple[int, int], spare: int, head_dim: int
) -> None:
    """A pool full to the last byte: what moves inside it keeps its bytes and its owner."""
    shape = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1], sink_tokens=0)
    context = 64 * 64
    budget = exact_budget(shape, plan, context, 5, spare)
    pair = Pair.open(shape, plan, budget, context, chunk_tokens=64)
    layers = [attention(shape, layer, window_tokens=1) for layer in range(2)]
    fullest = 0
    for cache in pair:
        cache.policy = Scattered(head_dim + spare)
    rng = np.random.default_rng(spare)
    for turn in range(50):
        rows = [pack_heads(*random_heads(rng, shape, 64)) for _ in layers]
        pair.fill(layers, rows)
        fullest = max(fullest, pair.native.used_bytes)
        if turn % 7 == 6:
            # Everything that is left becomes small, so that the next pages need other slots.
            held = pair.native.columns()[1]
            lower = [(*at, 2, 2) for at in np.argwhere(held.any(axis=-1)).tolist()]
            pair.demote(lower)
        if turn % 11 == 10:
            held = pair.native.columns()[1]
            gone = [(*at, 0, 0) for at in np.argwhere(held.any(axis=-1)).tolist() if at[2] % 2]
            pair.demote(gone)
        assert_same_pages(pair)
        assert pair.native.peak_bytes <= budget
    # The table's rows run out before the bytes do where many pages are half evicted.
    pages = 1 if widths == (8, 8) else 10
    assert budget - fullest < pages * page_bytes(head_dim, *widths)
    pair.close()


def assert_same_pages(pair: Pair) -> None:
    facts, widths = pair.native.columns()
    wanted = pair.numpy.columns()
    assert (facts == wanted[0]).all()
    assert (widths == wanted[1]).all()
    for layer, head, column in np.ndindex(*widths.shape[:3]):
        stored = pair.native.page(layer, head, column)
        assert stored == pair.numpy.page(layer, head, column)
    assert pair.native.used_bytes == pair.numpy.used_bytes


@BOTH
def test_closed_pages_never_change_over_thousands_of_steps(use_native: bool) -> None:
    """Single steps, some rejected; a page's bytes are those it was closed with."""
    plan = KvPlan(k_bits=8, v_bits=8)
    steps = 3000 if use_native else 600
    cache = open_cache(SMALL, plan, budget_for_tokens(SMALL, plan, steps), steps, native=use_native)
    rng = np.random.default_rng(1)
    closed: list[bytes] = []
    layers = [attention(SMALL, layer, window_tokens=8) for layer in range(2)]
    while cache.tokens < steps:
        count = int(rng.integers(1, 5))
        count = min(count, steps - cache.tokens)
        rows = numbered_rows(rng, count)
        forward(cache, layers, rows, np.arange(count) + cache.tokens)
        cache.commit(int(rng.integers(1, count + 1)))
        columns = len(cache.columns()[0])
        if columns > len(closed):
            closed.append(cache.page(1, 0, columns - 1))
            assert [cache.page(1, 0, column) for column in range(columns)] == closed
    assert len(closed) == (steps - 4) // 64 - 1
    cache.close()


# ---- calls out of order --------------------------------------------------------------------------


def filled_cache(use_native: bool, tokens: int = 300, **options: int) -> Cache:
    plan = KvPlan(k_bits=8, v_bits=4)
    cache = open_cache(SMALL, plan, 1 << 20, 1000, native=use_native, **options)
    rng = np.random.default_rng(2)
    for start in range(0, tokens, 100):
        count = min(100, tokens - start)
        forward(cache, LAYERS, numbered_rows(rng, count), np.arange(start, start + count))
        cache.commit(count)
    return cache


def forward_and_commit(cache: Cache, rows: list[Float], positions: NDArray[np.int64]) -> None:
    forward(cache, LAYERS, rows, positions)
    cache.commit(len(positions))


def step(cache: Cache, count: int = 1) -> list[Float]:
    """One more forward pass that must work."""
    rows = numbered_rows(np.random.default_rng(3), count)
    outputs = forward(cache, LAYERS, rows, np.arange(count) + cache.tokens)
    cache.commit(count)
    return outputs


@BOTH
def test_calls_out_of_order_are_refused_and_do_no_harm(use_native: bool) -> None:
    cache = filled_cache(use_native)
    before = cache.state()
    rows, at = numbered_rows(np.random.default_rng(0), 2), np.array([300, 301])
    for call in (
        lambda: cache.attend(LAYERS[0], rows[0], at, UNROTATED),  # begin was not called
        lambda: cache.commit(0),
        lambda: cache.commit(1),
        lambda: cache.trim(-1),
        lambda: cache.trim(301),
    ):
        with pytest.raises(CacheError):
            call()
    for count in (0, -1, 257):
        with pytest.raises(BudgetError, match=f"1 to 256 tokens .* {count} were given"):
            cache.begin(count)
    cache.begin(2)
    for call in (
        lambda: cache.begin(2),
        lambda: cache.attend(LAYERS[0], rows[0][:1], at[:1], UNROTATED),
        lambda: cache.commit(2),  # no layer has seen the tokens
        lambda: cache.trim(100),
        lambda: cache.demote(np.array([[0, 0, 0, 2, 2]], np.int32)),
        lambda: cache.shift(0, 1),
        lambda: cache.mask(0, 1),
    ):
        with pytest.raises(CacheError):
            call()
    cache.attend(LAYERS[0], rows[0], at, UNROTATED)
    with pytest.raises(CacheError):
        cache.commit(1)  # one layer of two
    cache.attend(LAYERS[1], rows[1], at, UNROTATED)
    for count in (3, -1):
        with pytest.raises(CacheError):
            cache.commit(count)
    cache.rewind()
    cache.rewind()
    assert cache.state() == before
    step(cache, 2)
    assert cache.tokens == 302
    cache.close()


@BOTH
def test_actions_that_do_not_fit_a_page_change_nothing(use_native: bool) -> None:
    cache = filled_cache(use_native)
    columns = len(cache.columns()[0])
    assert columns == 3
    before = cache.state()
    good = [0, 0, 0, 2, 2]
    for bad in (
        [0, 0, 1, 8, 8],  # wider than the 8:4 it has
        [0, 0, 1, 3, 2],
        [0, 0, 1, 4, 0],
        [0, 0, 1, 0, 4],
        [0, 0, 1, -2, 2],
        [0, 0, columns, 2, 2],
        [0, 0, -1, 2, 2],
        [2, 0, 0, 2, 2],
        [0, 1, 0, 2, 2],
        [-1, 0, 0, 2, 2],
    ):
        with pytest.raises(CacheError):
            cache.demote(np.array([good, bad], np.int32))
        assert cache.state() == before
    for entering in ((8, 8), (0, 0), (3, 2), (8, 0)):  # pages enter at 8:4
        with pytest.raises(CacheError):
            cache.demote_entering(np.full((2, 1, 2), entering, np.uint8))
    for call in (
        lambda: cache.shift(columns, 1),
        lambda: cache.shift(-1, 1),
        lambda: cache.mask(columns, 1),
        lambda: cache.mask(-1, 1),
        lambda: cache.page(0, 0, columns),
        lambda: cache.page(0, 1, 0),
        lambda: cache.page(2, 0, 0),
    ):
        with pytest.raises(CacheError):
            call()
    assert cache.state() == before
    cache.demote(np.array([good], np.int32))
    assert cache.state() != before
    cache.close()


@BOTH
def test_wrong_shapes_are_refused_with_the_right_ones(use_native: bool) -> None:
    cache = filled_cache(use_native)
    cache.begin(2)
    rows, at = numbered_rows(np.random.default_rng(0), 2)[0], np.array([300, 301])
    ones = np.ones(16, np.float32)
    other = CacheShape(num_layers=1, num_heads=4, num_kv_heads=1, head_dim=16)
    for message, arguments in (
        ("none of CacheShape", (attention(SMALL, 2), rows, at, UNROTATED)),
        ("none of CacheShape", (attention(SMALL, -1), rows, at, UNROTATED)),
        ("none of CacheShape", (attention(other), rows, at, UNROTATED)),
        (r"\(2, 63\) is not the \(2, 64\)", (LAYERS[0], rows[:, :63], at, UNROTATED)),
        (r"\(2, 64\) is not the \(1, 64\)", (LAYERS[0], rows, at[:1], UNROTATED)),
        (r"\(2, 64\) is not the", (LAYERS[0], rows, at[:, None], UNROTATED)),
        ("frequencies do not fit 16", (LAYERS[0], rows, at, frequencies(9))),
        ("frequencies do not fit 16", (LAYERS[0], rows, at, frequencies(8)[:, None])),
        ("norm's weights are not", (LAYERS[0], rows, at, UNROTATED, ones[:8])),
        ("norm's weights are not", (LAYERS[0], rows, at, UNROTATED, None, ones[None])),
    ):
        with pytest.raises(CacheError, match=message):
            cache.attend(*arguments)
    wide = cache.attend(LAYERS[0], rows.astype(np.float64), at.astype(np.int32), UNROTATED)
    assert (wide == cache.attend(LAYERS[0], rows, at, UNROTATED)).all()
    normed = cache.attend(LAYERS[0], rows, at, UNROTATED, 2 * ones.astype(np.float64))
    assert (normed == cache.attend(LAYERS[0], rows, at, UNROTATED, 2 * ones)).all()
    cache.close()


# Of what the layout header keeps beyond a view for each page.
SPARE_VIEWS = 64


@BOTH
def test_a_page_has_a_view_for_every_run_of_positions(use_native: bool) -> None:
    """As far as there are views; then a token that needs one more is refused."""
    plan = KvPlan(k_bits=8, v_bits=8, sink_tokens=4)
    for count in (8, 64):  # in the tail, and staged
        cache = open_cache(SMALL, plan, 1 << 20, 1000, native=use_native)
        rows = numbered_rows(np.random.default_rng(0), 127)
        positions = np.arange(127) + (np.arange(127) > 50)
        forward(cache, LAYERS, rows, positions)
        cache.commit(127)
        more = numbered_rows(np.random.default_rng(1), count)
        scattered = 2 * np.arange(count) + 128
        forward_and_commit(cache, more, scattered)
        assert cache.views()[:, 1:4].tolist() == [[4, 0, 4], [5, 0, 4]]
        assert cache.views()[:, 4].tolist() == [(1 << 47) - 1, -(1 << 47)]
        before = cache.tokens

        def fill(cache: Cache = cache, more: list[Float] = more, count: int = count) -> None:
            while cache.tokens < 900:
                forward_and_commit(cache, more, 2 * np.arange(count) + 2 * cache.tokens)

        with pytest.raises(CacheError):
            fill()
        assert cache.tokens - before >= SPARE_VIEWS - 2 * count
        cache.rewind()
        cache.trim(40)
        step(cache, 50)
        assert cache.tokens == 90
        cache.close()


@BOTH
def test_a_gap_between_sinks_and_pages_is_allowed(use_native: bool) -> None:
    cache = open_cache(SMALL, KvPlan(sink_tokens=4), 1 << 20, 1000, native=use_native)
    positions = np.r_[0:4, 100:228]
    forward(cache, LAYERS, numbered_rows(np.random.default_rng(0), 132), positions)
    cache.commit(132)
    assert cache.columns()[0].tolist() == [[100, 0, 4, -1]]
    assert cache.tail(0, 0)[2].tolist() == [*range(4), *range(164, 228)]
    cache.close()


@BOTH
def test_holdings_are_counted_over_layers_heads_and_tokens(use_native: bool) -> None:
    plan = KvPlan(k_bits=8, v_bits=4, sink_tokens=4)
    cache = open_cache(SMALL, plan, 1 << 20, 1000, native=use_native)
    streams = SMALL.num_layers * SMALL.num_kv_heads
    assert cache.holdings() == Holdings(mean_k_bits=0, mean_v_bits=0, evicted_share=0)
    step(cache, 200)
    step(cache, 66)
    # Three pages of 64 tokens; 4 sinks and 70 newer tokens are not quantised.
    held = cache.holdings()
    assert held.mean_k_bits == pytest.approx((3 * 64 * 8 + 74 * 16) / 266)
    assert held.mean_v_bits == pytest.approx((3 * 64 * 4 + 74 * 16) / 266)
    assert held.evicted_share == 0

    cache.demote(np.array([[0, 0, 0, 2, 2], [0, 0, 1, 0, 0]], np.int32))
    held, tokens = cache.holdings(), 266 * streams
    k_bits = (3 * 64 * 8 + 74 * 16) * streams - 64 * (6 + 8)
    v_bits = (3 * 64 * 4 + 74 * 16) * streams - 64 * (2 + 4)
    assert held.mean_k_bits == pytest.approx(k_bits / (tokens - 64))
    assert held.mean_v_bits == pytest.approx(v_bits / (tokens - 64))
    assert held.evicted_share == pytest.approx(64 / tokens)

    # A page gone everywhere leaves the table and still counts; so do masked tokens.
    gone = [[layer, head, 1, 0, 0] for layer in range(2) for head in range(SMALL.num_kv_heads)]
    cache.demote(np.array(gone[1:], np.int32))
    assert len(cache.columns()[0]) == 2
    assert cache.holdings().evicted_share == pytest.approx(64 / 266)
    cache.mask(1, ALL >> 16)
    assert cache.holdings().evicted_share == pytest.approx(80 / 266)
    cache.trim(4 + 40)
    held = cache.holdings()
    assert held.evicted_share == 0
    k_bits = (40 * 8 + 4 * 16) * streams - 40 * 6
    assert held.mean_k_bits == pytest.approx(k_bits / (44 * streams))
    cache.close()


def test_a_mask_shows_nothing_that_was_rolled_back() -> None:
    """Tokens behind the end would stand beside those that come next; no saved state has them."""
    shape = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
    pair = Pair.open(shape, KvPlan(sink_tokens=0, tail_tokens=0), 1 << 20, 1000)
    rows = pack_heads(*random_heads(np.random.default_rng(0), shape, 128))
    pair.fill([attention(shape, 0)], [rows])
    pair.trim(100)
    for cache in pair:
        cache.mask(1, ALL)
        assert cache.columns()[0][:, 3].tolist() == [-1, (1 << 36) - 1]
        cache.load_state(cache.state())
    pair.close()


def test_an_unquantised_cache_holds_everything_at_16_bits() -> None:
    cache = open_cache(SMALL, KvPlan(k_bits=16, v_bits=16), 1 << 20, 300)
    step(cache, 200)
    assert cache.holdings() == Holdings(mean_k_bits=16, mean_v_bits=16, evicted_share=0)
    cache.close()


def test_a_chunk_is_committed_whole_and_its_layers_come_in_order() -> None:
    """Native pages of a chunk close layer by layer, so it can be neither cut nor repeated."""
    cache = filled_cache(True)
    rows = numbered_rows(np.random.default_rng(0), 200)
    at = np.arange(300, 500)
    cache.begin(200)
    with pytest.raises(CacheError):
        cache.attend(LAYERS[1], rows[1], at, UNROTATED)
    cache.attend(LAYERS[0], rows[0], at, UNROTATED)
    used = cache.used_bytes
    with pytest.raises(CacheError):
        cache.attend(LAYERS[0], rows[0], at, UNROTATED)
    assert cache.used_bytes == used
    cache.attend(LAYERS[1], rows[1], at, UNROTATED)
    with pytest.raises(CacheError):
        cache.commit(199)
    cache.commit(200)
    assert cache.tokens == 500
    assert len(cache.columns()[0]) == 6
    cache.close()


def test_a_chunk_that_fails_half_way_ends_the_session_until_a_snapshot_is_loaded() -> None:
    cache = filled_cache(True)
    saved = cache.state()
    rows, at = numbered_rows(np.random.default_rng(0), 200), np.arange(300, 500)
    rows[1][7, 40] = np.nan
    with pytest.raises(CacheError, match="not finite in float16"):
        forward(cache, LAYERS, rows, at)
    cache.rewind()
    for call in (lambda: cache.begin(1), lambda: cache.trim(0), cache.state):
        with pytest.raises(CacheError, match="an earlier chunk failed"):
            call()
    cache.load_state(saved)
    assert cache.state() == saved
    step(cache)
    cache.close()


def test_a_chunk_that_fails_in_its_first_layer_does_no_harm() -> None:
    cache = filled_cache(True)
    saved = cache.state()
    rows, at = numbered_rows(np.random.default_rng(0), 200), np.arange(300, 500)
    rows[0][199, 32] = np.inf
    with pytest.raises(CacheError, match="not finite in float16"):
        forward(cache, LAYERS, rows, at)
    cache.rewind()
    assert cache.state() == saved
    step(cache)
    cache.close()


def test_a_closed_cache_refuses_every_call() -> None:
    cache, other = filled_cache(True), filled_cache(True)
    handle, state = cache.handle, cache.state()
    cache.close()
    cache.close()
    rows, at = numbered_rows(np.random.default_rng(0), 1)[0], np.array([300])
    for call in (
        lambda: cache.tokens,
        lambda: cache.used_bytes,
        lambda: cache.begin(1),
        lambda: cache.attend(LAYERS[0], rows, at, UNROTATED),
        lambda: cache.commit(1),
        cache.rewind,
        lambda: cache.trim(0),
        cache.columns,
        cache.state,
        lambda: cache.page(0, 0, 0),
        lambda: cache.tail(0, 0),
        lambda: cache.shift(0, 1),
        lambda: cache.mask(0, 1),
        lambda: cache.demote(np.zeros((0, 5), np.int32)),
    ):
        with pytest.raises(CacheError):
            call()
    with pytest.raises(SnapshotError):
        cache.load_state(state)
    assert other.handle != handle
    assert filled_cache(True).handle not in (handle, other.handle)
    assert other.tokens == 300
    other.close()


def test_the_numpy_cache_has_no_handle() -> None:
    cache = filled_cache(False)
    with pytest.raises(UsageError, match="engine='numpy' and has no handle"):
        _ = cache.handle
    cache.close()


# ---- snapshots -----------------------------------------------------------------------------------


@BOTH
def test_a_snapshot_of_another_cache_is_refused_and_nothing_changes(use_native: bool) -> None:
    cache = filled_cache(use_native)
    own = cache.state()
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=1, head_dim=16)
    plan = KvPlan(k_bits=8, v_bits=4)
    others = [
        open_cache(shape, plan, 1 << 20, 1000, native=use_native),
        open_cache(SMALL, KvPlan(k_bits=8, v_bits=8), 1 << 20, 1000, native=use_native),
        open_cache(
            SMALL, KvPlan(k_bits=8, v_bits=4, sink_tokens=3), 1 << 20, 1000, native=use_native
        ),
        open_cache(SMALL, plan, (1 << 20) + 1, 1000, native=use_native),
    ]
    for other in others:
        with pytest.raises(SnapshotError, match="another shape, plan or budget"):
            cache.load_state(other.state())
        assert cache.state() == own
        other.close()
    cache.close()


@BOTH
def test_a_damaged_snapshot_is_refused_and_nothing_changes(use_native: bool) -> None:
    cache = filled_cache(use_native)
    own = cache.state()
    for damaged in (b"", b"kvq", own[:50], own[:-1], own[: len(own) // 2], b"\0" * len(own)):
        with pytest.raises(SnapshotError):
            cache.load_state(damaged)
        assert cache.state() == own
    step(cache)
    cache.close()


def test_native_snapshots_are_sized_exactly() -> None:
    cache = filled_cache(True)
    own = cache.state()
    with pytest.raises(SnapshotError):
        cache.load_state(own + b"\0")
    held = sum(len(cache.page(layer, 0, c)) for layer in (0, 1) for c in range(3))
    tail = 300 - 3 * 64
    assert len(own) - held - tail * (2 * 2 * 16 * 2 + 12) < 200
    cache.close()


def test_changed_bytes_in_a_native_snapshot_harm_no_memory() -> None:
    """Any byte may be wrong: it is refused, or loads as other numbers that can be worked with."""
    cache = filled_cache(True)
    own = cache.state()
    rng = np.random.default_rng(0)
    outcomes = set()
    places = [*range(220), *rng.integers(0, len(own), 200).tolist()]
    for place in places:
        damaged = bytearray(own)
        damaged[place] ^= int(rng.integers(1, 256))
        try:
            cache.load_state(bytes(damaged))
        except SnapshotError:
            outcomes.add("refused")
            continue
        outcomes.add("loaded")
        assert cache.used_bytes <= cache.peak_bytes <= cache.budget_bytes
        with suppress(KvqError):
            forward(cache, LAYERS, numbered_rows(rng, 2), np.arange(2) + 300)
        cache.rewind()
        columns = len(cache.columns()[0])
        cache.demote(np.array([[0, 0, c, 0, 0] for c in range(columns)], np.int32).reshape(-1, 5))
    assert outcomes == {"refused", "loaded"}
    cache.load_state(own)
    assert cache.state() == own
    cache.close()


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_a_snapshot_loads_with_another_number_of_threads(head_dim: int) -> None:
    shape = CacheShape(num_layers=2, num_heads=8, num_kv_heads=1, head_dim=head_dim)
    layers = [attention(shape, layer) for layer in (0, 1)]
    caches = [open_cache(shape, KvPlan(), 4 << 20, 4000, threads=threads) for threads in (1, 8, 2)]
    rng = np.random.default_rng(0)
    rows = [pack_heads(*random_heads(rng, shape, 250)) for _ in layers]
    forward(caches[0], layers, rows, np.arange(250))
    caches[0].commit(250)
    for one, other in pairwise(caches):
        other.load_state(one.state())
        # Only the number of splits and the peak, which counts scratch, differ in the header.
        assert len(other.state()) == len(one.state())
        assert other.state()[96:] == one.state()[96:]
        for column in range(2):
            assert other.page(1, 0, column) == one.page(1, 0, column)
    for cache in caches:
        cache.close()


def test_equal_contents_give_equal_snapshots_whatever_came_before() -> None:
    """A snapshot holds what is held: no memory of evicted pages, and nothing uninitialised."""
    direct, busy = filled_cache(True), filled_cache(True, 100)
    saved = direct.state()
    step(busy, 200)
    busy.demote(np.array([[layer, 0, 1, 0, 0] for layer in (0, 1)], np.int32))
    busy.trim(0)
    step(busy, 256)
    step(busy, 256)
    busy.load_state(saved)
    assert busy.state() == saved
    for cache in (direct, busy):
        step(cache, 100)
    assert busy.state() == direct.state()
    direct.close()
    busy.close()


# ---- memory --------------------------------------------------------------------------------------


MEMORY_SLACK_BYTES = 6 << 20
_FILL = """
import resource
import numpy as np
from caches import open_cache
from kvq.config import CacheShape, KvPlan
from pairs import attention, forward, pack_heads, random_heads

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

shape = CacheShape(num_layers=4, num_heads=4, num_kv_heads=4, head_dim=256)
layers = [attention(shape, layer, window_tokens=4) for layer in range(4)]
rows = [pack_heads(*random_heads(np.random.default_rng(0), shape, 256))] * 4

def fill(cache, tokens):
    while cache.tokens < tokens:
        forward(cache, layers, rows, np.arange(256) + cache.tokens)
        cache.commit(256)
        yield resident()

plan = KvPlan(k_bits=8, v_bits=8)
# Already short of room, so that what the first relief loads is not counted.
warm = open_cache(shape, plan, 8 << 20, 2048)
list(fill(warm, 2048))
warm.close()
before = resident()
cache = open_cache(shape, plan, BUDGET, 12800)
peak = max(fill(cache, 12800))
assert cache.columns()[1].min() < 8
print(peak - before, cache.peak_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_process_memory_grows_by_the_budget_and_a_constant() -> None:
    """A session that fills its budget twice over, everything touched."""
    budget = 48 << 20
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FILL.replace("BUDGET", str(budget))],
        env=os.environ | ROOTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    growth, peak = map(int, finished.stdout.split())
    assert 0.95 * budget < peak <= budget
    assert 0.9 * budget < growth <= budget + MEMORY_SLACK_BYTES


def test_without_native_code_numpy_takes_over_and_says_so() -> None:
    script = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from kvq import native\n"
        "from caches import open_cache\n"
        "from kvq.config import CacheShape, KvPlan\n"
        "from kvq.errors import BackendError\n"
        "shape = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)\n"
        "for _ in range(2):\n"
        "    cache = open_cache(shape, KvPlan(), 1 << 20, 100)\n"
        "try:\n"
        "    cache.handle\n"
        "except BackendError as error:\n"
        "    print(error)\n"
        "cache.begin(3)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=os.environ | ROOTS | {"KVQ_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    reason = "KVQ_NATIVE=0 asks for the numpy path"
    assert finished.stdout == f"the native cache is not available: {reason}\n"
    assert (
        finished.stderr
        == f"native cache not in use ({reason}); numpy takes over, many times slower\n"
    )


def test_an_unknown_instruction_set_in_the_environment_is_refused() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", "from kvq import native; native.isa()"],
        env=os.environ | ROOTS | {"KVQ_ISA": "neon"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{BackendError.__name__}: KVQ_ISA=neon is not possible here" in finished.stderr
