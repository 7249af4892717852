"""A sequence against a list of tokens, and answers with drafts against answers without."""

from collections.abc import Sequence as Tokens
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.config import KvPlan
from kvq.errors import BackendError, UsageError
from kvq_runtime.answer.drafter import Draft, DraftContext, Drafter, Round
from kvq_runtime.answer.generation import GenerationOptions, Vocabulary
from kvq_runtime.config import Sampling, SessionConfig
from kvq_runtime.sequence.hunks import (
    COMPARED_TOKENS,
    MOST_GAP_TOKENS,
    MOST_HUNKS,
    hunks,
    one_by_one,
    with_moved_gap,
)
from kvq_runtime.sequence.passes import Work, run
from kvq_runtime.sequence.sequence import TokenSequence
from kvq_runtime.session.session import Session
from rule_backend import RuleBackend, RuleCache
from sequences import advance

VOCABULARY = 16
END = 15


def logits_after(tokens: Tokens[int]) -> np.ndarray:
    """Returns logits [V] that depend on every token, with a few likely ones."""
    seed = [len(tokens), *tokens[-3:], sum(tokens)]
    return (3 * np.random.default_rng(seed).standard_normal(VOCABULARY)).astype(np.float32)


def backend() -> RuleBackend:
    return RuleBackend(logits_after, vocab_size=VOCABULARY)


def config(**settings: int) -> SessionConfig:
    return SessionConfig(
        **({"plan": KvPlan(), "context_tokens": 60, "budget_bytes": 1000, "chunk_tokens": 4}
        | settings)
    )  # fmt: skip


def open_sequence() -> TokenSequence[RuleCache]:
    return TokenSequence(backend(), config())


token = st.integers(0, VOCABULARY - 2)
text = st.lists(token, max_size=9)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), text),
            st.tuples(st.just("advance"), st.integers(1, 9)),
            st.tuples(st.just("rollback"), st.integers(0, 9)),
            st.tuples(st.just("align"), text),
            st.tuples(st.just("become"), st.integers(0, 3)),
            st.tuples(st.just("forget"), text),
            st.tuples(st.just("fork"), st.none()),
            st.tuples(st.just("edit"), st.tuples(st.integers(0, 50), st.integers(0, 4), text)),
            st.tuples(st.just("refresh"), st.integers(0, 9)),
        ),
        max_size=14,
    )
)
def test_any_history_is_that_of_a_list(history: list[tuple[str, object]]) -> None:
    sequence, tokens, followed = open_sequence(), [], []
    for action, value in history:
        if action == "append" and len(tokens) + len(value) < 50:
            sequence.append(value)
            tokens += value
        elif action == "advance":
            before = len(sequence.due())
            # A piece ends where the gap that an edit left does.
            gap = next((stop - start for start, stop in sequence.encoding.staleness.gaps), before)
            assert advance(sequence, value) == max(0, before - min(value, 4, gap))
        elif action == "rollback":
            count = min(value, len(tokens))
            sequence.rollback(count)
            tokens = tokens[: len(tokens) - count]
        elif action == "align":
            shared = 0
            while shared < min(len(tokens), len(value)) and tokens[shared] == value[shared]:
                shared += 1
            missing = sum(
                max(0, min(stop, shared) - start)
                for start, stop in sequence.encoding.staleness.gaps
            )
            cached = min(shared, sequence.cache.tokens) - missing
            # the last token again, where a rollback has dropped its logits
            assert sequence.align(value) in (cached, cached - (cached == len(value)))
            tokens = list(value)
        elif action == "forget" and tokens:
            while advance(sequence):
                pass
            with sequence.forward(value[:8]) as branch:
                assert len(branch.logits) == len(value[:8])
        elif action == "become":
            remaining = [token for i, token in enumerate(tokens) if i % 7 != value]
            assert sequence.align(remaining, edits=True) <= len(remaining)
            tokens = remaining
        elif action == "edit" and len(tokens) < 40:
            start = min(value[0], len(tokens))
            stop = min(start + value[1], len(tokens))
            kept = sequence.edit(start, stop, value[2])
            tokens[start:stop] = value[2]
            assert kept == len(tokens) - sequence.pending_tokens
        elif action == "refresh":
            # Pending tokens become stale where they see stale ones.
            stale = sequence.encoding.staleness.stale + sequence.pending_tokens
            assert sequence.refresh(value) <= stale
        elif action == "fork":
            other, sequence = sequence, sequence.fork()
            other.close()
            followed = []
        if len(history) % 2 or action == "append":
            kept, new = sequence.changes("me")
            followed[kept:] = new
            assert followed == tokens
        assert sequence.tokens == tuple(tokens)
        expected = tokens[: sequence.cache.tokens]
        for start, stop in sequence.encoding.staleness.gaps:
            expected[start:stop] = [-1] * (stop - start)
        assert list(sequence.cache.ids) == expected
    if tokens:
        while advance(sequence):
            pass
        with sequence.forward([], rows=[-1]) as branch:
            np.testing.assert_array_equal(branch.logits[0], logits_after(tokens))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), text), max_size=4),
    st.sampled_from([4, 16, COMPARED_TOKENS]),
)
def test_hunks_make_one_text_of_another(
    before: list[int], changes: list[tuple], window: int
) -> None:
    after = list(before)
    for start, count, new in changes:
        after[start : start + count] = new
    made, edits = list(before), hunks(before, after, window=window)
    for start, stop, new in reversed(edits):
        made[start:stop] = new
    assert made == after
    made = list(before)
    for start, stop, new in one_by_one(edits):
        made[start:stop] = new
        assert len(made) <= max(len(before), len(after))
    assert made == after
    assert len(edits) <= MOST_HUNKS
    assert [hunk.start for hunk in edits] == sorted(hunk.start for hunk in edits)


GAP = 77


@settings(max_examples=300, deadline=None)
@given(data=st.data(), length=st.sampled_from([40, 400, 3000]))
def test_what_lies_between_an_old_and_a_new_gap_is_new(data: st.DataObject, length: int) -> None:
    """And the edits still make one text of the other, whatever else was changed."""
    text = np.random.default_rng(length).integers(100, 5000, length).tolist()
    old_place, new_place = (data.draw(st.integers(0, length)) for _ in range(2))
    before = [*text[:old_place], GAP, *text[old_place:]]
    after = [*text[:new_place], GAP, *text[new_place:]]
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(after) - 1))
        if after[place] != GAP:
            after[place : place + 1] = data.draw(st.lists(st.integers(0, 50), max_size=4))
    changes = with_moved_gap(before, hunks(before, after), GAP)
    made, kept = list(before), set(range(len(before)))
    for hunk in changes:
        kept -= {*range(hunk.start, hunk.stop)}
    for hunk in one_by_one(changes):
        made[hunk.start : hunk.stop] = hunk.new_ids
    assert made == after
    if len(hunks(before, after)) < 2:
        return
    # As places of the old text: tokens beside the new gap, up to where the old one was.
    if new_place > old_place:
        between = range(max(old_place + 1, new_place + 1 - MOST_GAP_TOKENS), new_place + 1)
    else:
        between = range(new_place, min(old_place, new_place + MOST_GAP_TOKENS))
    assert not kept & {*between}
    # All that lies beyond is as it was.
    changed = sum(len(hunk.new_ids) for hunk in hunks(before, after))
    assert len(kept) >= len(before) - len(between) - changed - 16


def test_a_gap_that_stays_moves_nothing() -> None:
    before = [*range(100, 200), GAP, *range(200, 300)]
    after = [*before[:50], 1, 2, *before[50:]]
    changes = hunks(before, after)
    assert with_moved_gap(before, changes, GAP) == changes == [(50, 50, [1, 2])]


def test_hunks_leave_out_what_is_alike() -> None:
    before = list(range(1000))
    after = [*before[:100], 7, *before[100:400], *before[420:], 5]
    assert hunks(before, after) == [(100, 100, [7]), (400, 420, []), (1000, 1000, [5])]
    long = [*range(3000)]
    # Text between two changes is kept, however far apart they are.
    far = [*long[:5], 1, *long[6:2900], 2, *long[2900:]]
    assert hunks(long, far) == [(5, 6, [1]), (2900, 2900, [2])]
    # A block that is moved, as the order suffix, prefix does at a jump, is all that is new.
    moved = [*long[:10], *long[1500:2900], *long[10:1500], *long[2900:]]
    assert sum(len(hunk.new_ids) for hunk in hunks(long, moved)) == 1400
    # So is a block whose edges are written anew.
    moved = [*long[:10], -1, -2, *long[1500:2900], -3, *long[13:1500], *long[2900:]]
    assert sum(len(hunk.new_ids) for hunk in hunks(long, moved)) == 1403


def test_a_tree_keeps_one_path_and_its_logits() -> None:
    sequence = open_sequence()
    sequence.append([1, 2, 3])
    advance(sequence)
    #      4 - 5 - 6
    #        \ 7        and 8 beside 4
    with sequence.forward([4, 5, 6, 7, 8], [-1, 0, 1, 0, -1]) as branch:
        paths = [[4], [4, 5], [4, 5, 6], [4, 7], [8]]
        for logits, path in zip(branch.logits, paths, strict=True):
            np.testing.assert_array_equal(logits, logits_after([1, 2, 3, *path]))
        branch.commit([0, 3])
    assert sequence.tokens == (1, 2, 3, 4, 7)
    assert sequence.due() == []
    with sequence.forward([], rows=[-1]) as branch:
        np.testing.assert_array_equal(branch.logits[0], logits_after([1, 2, 3, 4, 7]))


def test_what_is_due_is_told_without_changing_anything() -> None:
    """Checks the last token after a rollback that dropped its logits; `ready` does change it."""
    sequence = open_sequence()
    sequence.append([1, 2, 3, 4])
    advance(sequence)
    sequence.rollback(1)
    for _ in range(2):
        assert (sequence.due(), sequence.cache.tokens) == ([3], 3)
    assert (sequence.ready(), sequence.cache.tokens) == ([3], 2)
    assert sequence.due() == [3]


def test_rows_of_one_branch_can_be_written_anew() -> None:
    sequence = open_sequence()
    sequence.append([1])
    advance(sequence)
    with sequence.branch() as branch:
        run(branch.extend([2, 3]))
        run(branch.extend([4], [0]))
        np.testing.assert_array_equal(branch.logits[0], logits_after([1, 2, 4]))
        branch.rewind(1)
        run(branch.extend([5, 6], rows=[2]))
        np.testing.assert_array_equal(branch.logits, [logits_after([1, 2, 5, 6])])
        branch.commit([0, 1])
    assert sequence.tokens == (1, 2, 5)


def test_rows_of_mixed_embeddings_cannot_be_kept() -> None:
    sequence = open_sequence()
    sequence.append([1])
    advance(sequence)
    mixed = np.array([[2]]), np.ones((1, 1), np.float32)
    with sequence.branch() as branch:
        run(branch.extend([0], mixed=mixed))
        with pytest.raises(UsageError, match="mixed embeddings"):
            branch.commit([0])
    assert sequence.tokens == (1,)


class Guesser(Drafter):
    """Drafts trees that are right as often as `luck` says, and records its calls."""

    def __init__(self, seed: int, luck: float, *, trees: bool, greedy: list[int]) -> None:
        self.random = np.random.default_rng(seed)
        self.luck = luck
        self.trees = trees
        self.answer = greedy
        self.rooms: list[int] = []
        self.text: list[int] = []
        self.rounds: list[Round] = []

    def follow(self, kept: int, new: Tokens[int]) -> None:
        self.text[kept:] = new

    def propose(self, room: int) -> Draft:
        self.rooms.append(room)
        ids, parents = [], []
        for _ in range(int(self.random.integers(0, room + 1))):
            parent = int(self.random.integers(-1, len(ids))) if self.trees else len(ids) - 1
            place = len(self.text) + self._depth(parents, parent)
            right = self.random.random() < self.luck and place < len(self.answer)
            guess = self.answer[place] if right else int(self.random.integers(0, VOCABULARY))
            if (guess, parent) not in zip(ids, parents, strict=True):
                ids.append(guess)
                parents.append(parent)
        return Draft(ids=tuple(ids), parents=tuple(parents) if self.trees else None)

    def _depth(self, parents: list[int], place: int) -> int:
        return 0 if place < 0 else 1 + self._depth(parents, parents[place])

    def observe(self, outcome: Round) -> None:
        self.rounds.append(outcome)


class Letters:
    def skip(self, num_bytes: int) -> None:
        raise AssertionError

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return ""


def open_session(rule: RuleBackend, drafter: Drafter | None, seed: int) -> Session[RuleCache]:
    session = Session(
        backend=rule,
        config=config(seed=seed, draft_tokens=6, chunk_tokens=8),
        vocabulary=Vocabulary(stop_ids=frozenset({END}), detokenizer=Letters),
    )
    session.drafter = drafter
    session.prefill([1, 2, 3])
    return session


def answer(drafter: Drafter | None, options: GenerationOptions, seed: int) -> tuple:
    rule = backend()
    session = open_session(rule, drafter, seed)
    generation = session.begin(options)
    steps = []
    while generation.finish_reason is None:
        steps += run(session.stepping(generation))[0]
    return steps, session.tokens, session.pending_tokens, len(rule.passes)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1000),
    luck=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    trees=st.booleans(),
    temperature=st.sampled_from([0.0, 0.8]),
    penalty=st.sampled_from([1.0, 1.3]),
    max_tokens=st.sampled_from([None, 1, 7]),
    stop=st.sampled_from([(), ("cd",), ("b",)]),
)
def test_any_draft_leads_to_the_answer_of_plain_decoding(
    seed: int,
    luck: float,
    trees: bool,
    temperature: float,
    penalty: float,
    max_tokens: int | None,
    stop: tuple[str, ...],
) -> None:
    options = GenerationOptions(
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, repeat_penalty=penalty),
        stop_strings=stop,
        logprobs=True,
        top_logprobs=2,
    )
    plain, tokens, pending, passes = answer(None, options, seed)
    drafter = Guesser(seed, luck, trees=trees, greedy=list(tokens))
    actual, drafted_tokens, drafted_pending, drafted_passes = answer(drafter, options, seed)
    assert actual == plain
    assert (drafted_tokens, drafted_pending) == (tokens, pending)
    assert drafted_passes <= passes
    observed = [token for outcome in drafter.rounds for token in outcome.tokens]
    # the first token is chosen from the prompt's logits, without a pass
    assert observed == list(tokens[4:])
    # and before every one of these it was told the text
    last = drafter.rounds[-1].tokens if drafter.rounds else tokens[3:]
    assert drafter.text == ([] if not drafter.rounds else list(tokens[: -len(last)]))
    assert all(len(outcome.tokens) == outcome.accepted + 1 for outcome in drafter.rounds)
    assert all(outcome.rows == 1 + outcome.drafted for outcome in drafter.rounds)
    assert all(1 <= room <= 6 for room in drafter.rooms)


def test_a_right_draft_saves_its_passes() -> None:
    options = GenerationOptions(
        max_tokens=22, sampling=Sampling(temperature=0), stop_ids=frozenset()
    )
    _, tokens, _, passes = answer(None, options, 5)

    class Oracle(Guesser):
        def propose(self, room: int) -> Draft:
            return Draft(ids=tuple(self.answer[len(self.text) : len(self.text) + room]))

    actual, drafted, _, drafted_passes = answer(
        Oracle(0, 1, trees=False, greedy=list(tokens)), options, 5
    )
    assert drafted == tokens
    session = open_session(backend(), Oracle(0, 1, trees=False, greedy=list(tokens)), 5)
    list(session.generate(22, sampling=options.sampling, stop_ids=()))
    stats = session.stats()
    assert (stats.rounds.drafted_tokens, stats.rounds.accepted_tokens) == (17, 17)
    assert stats.tokens_per_round == 21 / 4
    # one token is due in every pass but the first, five or six are drafted, one more is chosen
    assert (passes, drafted_passes) == (22, 5)
    assert len(actual) == 22


def test_a_drafter_follows_rollback_align_and_restore() -> None:
    drafter = Guesser(0, 0.5, trees=True, greedy=[])
    session = open_session(backend(), drafter, 7)
    for step in range(4):
        list(session.generate(5, stop_ids=()))
        assert drafter.text == list(session.tokens[: len(drafter.text)])
        assert len(session.tokens) - len(drafter.text) <= 6
        if step == 0:
            session.rollback(3)
        if step == 1:
            session.align([1, 2, 9, 9])
        if step == 2:
            capture = session.capture()
            session.align([5])
            session.restore(capture)
    late = Guesser(0, 0.5, trees=True, greedy=[])
    session.drafter = late
    list(session.generate(5, stop_ids=()))
    assert late.text == list(session.tokens[: len(late.text)]) != []


class Itself(Guesser):
    """Guesses with the model itself, in rows that are forgotten before the check (QS-4)."""

    held_bytes = 0

    def open(self, backend: object, config: SessionConfig) -> None:
        self.opened = config

    def close(self) -> None:
        del self.opened

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        foresight, ids, rows = draft_context.foresight(), list[int](), list[Any]()
        next_ids = list(draft_context.due)
        while len(ids) < draft_context.room:
            passed = yield from draft_context.branch.extend(next_ids)
            token, probabilities = foresight.choose(passed.logits[-1])
            next_ids = [token]
            ids.append(token)
            rows.append(probabilities)
        drawn = None if rows[0] is None else np.array(rows)
        return Draft(ids=tuple(ids), probabilities=drawn)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_guesses_for_itself_is_always_right(temperature: float) -> None:
    drafter = Itself(0, 0, trees=False, greedy=[])
    session = open_session(backend(), drafter, 2)
    sampling = Sampling(temperature=temperature, repeat_penalty=1.2)
    steps = list(session.generate(16, sampling=sampling, stop_ids=()))
    assert [outcome.drafted for outcome in drafter.rounds] == [
        outcome.accepted for outcome in drafter.rounds
    ]
    assert {outcome.drafted for outcome in drafter.rounds[:-1]} == {5}
    if temperature == 0:
        _, tokens, _, _ = answer(
            None, GenerationOptions(max_tokens=16, sampling=sampling, stop_ids=frozenset()), 2
        )
        assert session.tokens == tokens
    assert len(steps) == 16
    assert session.stats().rounds.draft_ms > 0
    assert drafter.opened is session.config
    session.close()
    assert not hasattr(drafter, "opened")


@pytest.mark.parametrize(
    "wrong",
    [
        Draft(ids=(1, 2), parents=(-1,)),
        Draft(ids=(1, 2), parents=(-1, 1)),
        Draft(ids=(1, 2), parents=(-2, 0)),
        Draft(ids=(1, 2), probabilities=np.ones((1, VOCABULARY))),
    ],
)
def test_a_draft_of_a_wrong_form_is_refused(wrong: Draft) -> None:
    class Wrong(Guesser):
        def propose(self, room: int) -> Draft:
            return wrong

    session = open_session(backend(), Wrong(0, 0, trees=False, greedy=[]), 1)
    with pytest.raises(UsageError, match=r"Wrong (proposed a tree|gave probabilities)"):
        list(session.generate(5, stop_ids=()))


@pytest.mark.parametrize("ids", [(1,) * 6, (VOCABULARY,), (-1,)])
def test_a_drafter_that_proposes_what_cannot_be_is_refused(ids: tuple[int, ...]) -> None:
    class Wrong(Guesser):
        def propose(self, room: int) -> Draft:
            return Draft(ids=ids)

    session = open_session(backend(), Wrong(0, 0, trees=False, greedy=[]), 1)
    with pytest.raises(UsageError, match="Wrong proposed"):
        list(session.generate(5, stop_ids=()))
    session.drafter = None
    assert len(list(session.generate(5, stop_ids=()))) == 5


def test_a_drafter_that_wants_a_pause_is_left_alone() -> None:
    class Tired(Guesser):
        def propose(self, room: int) -> Draft:
            self.rooms.append(room)
            return Draft(pause=3)

    drafter = Tired(0, 0, trees=False, greedy=[])
    session = open_session(backend(), drafter, 1)
    list(session.generate(14, stop_ids=()))
    # 13 rounds with a pass: the drafter learns of one in four, and drafts while there is room.
    assert (len(drafter.rooms), len(drafter.rounds)) == (3, 4)
    assert drafter.text == list(session.tokens[: len(drafter.text)]) != []


def test_an_answer_that_wants_no_drafts_asks_no_drafter() -> None:
    drafter = Guesser(0, 1, trees=False, greedy=[])
    answer(drafter, GenerationOptions(draft=False, max_tokens=9), 1)
    assert drafter.rooms == drafter.rounds == []


def test_who_stops_asking_leaves_no_guess_that_nobody_saw() -> None:
    greedy = Sampling(temperature=0)
    options = GenerationOptions(max_tokens=16, sampling=greedy, stop_ids=frozenset())
    tokens = list(answer(None, options, 2)[1])
    session = open_session(backend(), Guesser(0, 1.0, trees=False, greedy=tokens), 2)
    for count in (4, 5):
        before, steps = len(session.tokens), session.generate(12, sampling=greedy, stop_ids=())
        seen = [step.token for _, step in zip(range(count), steps, strict=False)]
        steps.close()
        assert seen == tokens[before : before + count]
        assert list(session.tokens) == tokens[: before + count]
    steps = session.generate(12, stop_ids=())
    next(steps)
    session.close()
    steps.close()


def test_a_refused_drafter_leaves_the_old_one_at_work() -> None:
    """Checks that putting the old one back, as a pool does after requests, changes nothing."""
    drafter, rule = Itself(0, 0, trees=False, greedy=[]), backend()
    session = open_session(rule, drafter, 2)
    rule.takes_trees = False
    with pytest.raises(BackendError, match="draft mock is not possible"):
        session.drafter = SimpleNamespace(branches=True, name="mock")
    session.drafter = drafter
    assert drafter.opened is session.config
    assert len(list(session.generate(9, stop_ids=()))) == 9
