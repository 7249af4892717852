"""Copying on behind changes, and making them again where the source says the same."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import UsageError
from kvq_runtime.answer.drafter import NO_DRAFT, Drafter
from kvq_specdraft import drafter_named
from kvq_specdraft.changes import Changes
from kvq_specdraft.lookup import Lookup
from kvq_specdraft.rewrite import Rewrite

ROOM = 15


def rounds(drafter: Drafter, source: Sequence[int], answer: Sequence[int]) -> int:
    """Passes that `answer` takes after `source`, each with a draft and one token more."""
    drafter.follow(0, source)
    at = passes = 0
    while at < len(answer):
        draft, right = drafter.propose(min(ROOM, len(answer) - at - 1)), 0
        while right < len(draft.ids) and draft.ids[right] == answer[at + right]:
            right += 1
        drafter.follow(len(source) + at, answer[at : at + right + 1])
        at, passes = at + right + 1, passes + 1
    return passes


def words(count: int) -> list[int]:
    """Returns tokens of which no two are equal, none below 1000."""
    return (1000 + np.random.default_rng(count).permutation(count)).tolist()


def records(count: int, indent: int, keys: Sequence[int]) -> list[int]:
    """Returns records with the same keys, each with a number of its own, on lines of their own."""
    values = np.random.default_rng(3).integers(100, 110, (count, len(keys), 3)).tolist()
    lines = (
        [indent, key, *value, 2]
        for record in values
        for key, value in zip(keys, record, strict=True)
    )
    return [1, *(token for line in lines for token in line)]


def test_behind_a_change_it_goes_on_where_it_stood() -> None:
    """Changes values to other lengths: a pass for each of their tokens, and at most one more."""
    source = words(400)
    answer, new = list[int](), 0
    for place, word in enumerate(source):
        if place % 40 == 20:
            answer += range(10 * place, 10 * place + place // 100)
            new += place // 100
        else:
            answer.append(word)
    assert rounds(Rewrite(), source, answer) <= 400 / (ROOM + 1) + 10 + new + 10


@pytest.mark.parametrize("written", [[5], [5, 6, 7], []])
def test_a_change_made_twice_is_made_everywhere(written: list[int]) -> None:
    """Replaces a name by a name, by several tokens, and by none."""
    source = words(800)
    source[10::20] = [3] * 40
    answer = [
        replacement for token in source for replacement in (written if token == 3 else [token])
    ]
    assert rounds(Rewrite(), source, answer) <= len(answer) / (ROOM + 1) + 8
    assert rounds(Lookup(), source, answer) > len(answer) / (ROOM + 1) + 35


def test_what_is_put_in_is_put_in_where_it_was_before() -> None:
    """Inserts at the beginning of lines that begin alike, and of no other."""
    source = words(600)
    for place in range(0, 600, 30):
        source[place : place + 2] = [2, 4]  # a line's end and what some lines begin with
        source[place + 15] = 2
    answer = list[int]()
    for before, token in zip([0, *source], source, strict=False):
        answer += [8, 9] if (before, token) == (2, 4) else []
        answer.append(token)
    assert rounds(Rewrite(), source, answer) <= len(answer) / (ROOM + 1) + 12


def test_records_alike_keep_their_own_values() -> None:
    """Indents records more and renames a key: `lookup` finds the values of the record before."""
    source = records(20, 30, (40, 41, 42, 43))
    answer = records(20, 31, (40, 51, 42, 43))
    needed = len(answer) / (ROOM + 1)
    assert rounds(Rewrite(), source, answer) <= needed + 40
    assert rounds(Lookup(), source, answer) > needed + 100


def test_a_change_that_stopped_is_expected_no_more() -> None:
    source = words(2000)
    source[10::20] = [3] * 100
    answer = [5 if token == 3 and place < 200 else token for place, token in enumerate(source)]
    drafter = Rewrite()
    assert rounds(drafter, source, answer) <= len(answer) / (ROOM + 1) + 20


def test_chances_fall_where_copies_were_wrong() -> None:
    """Checks that only the value after one token, which is always new, gets a low chance."""
    source = words(1000)
    source[10::20] = [3] * 50
    answer = list(source)
    answer[11::20] = range(50)
    drafter = Rewrite(least=0)
    rounds(drafter, source, answer[:625])
    drafter.follow(1625, answer[625:627])
    draft = drafter.propose(ROOM)
    assert draft.ids == tuple(source[627 : 627 + ROOM])
    unsure = source.index(draft.ids[4])
    assert (source[unsure - 1], unsure % 20) == (3, 11)
    assert draft.chances[4] < 0.1
    assert min(draft.chances[:4]) > 0.7


def test_without_a_source_it_says_nothing_and_another_text_is_begun_anew() -> None:
    drafter = Rewrite()
    drafter.follow(0, words(50))
    assert drafter.propose(5) == NO_DRAFT
    rounds(drafter, [*words(50), 3, 4], [*words(50), 5, 4])
    drafter.follow(0, words(60))
    assert drafter.propose(5) == NO_DRAFT
    fresh = Rewrite()
    fresh.follow(0, words(60))
    assert state(drafter) == state(fresh)


def state(drafter: Rewrite) -> dict[str, object]:
    state = vars(drafter)
    return state | {"_changes": vars(state["_changes"])}


token = st.sampled_from([0, 1, 2, 150_000])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.lists(token, max_size=40)), max_size=8), st.data())
def test_any_text_may_become_any_other(history: list, data: st.DataObject) -> None:
    """Checks that it proposes what may be proposed, after any edits, whatever agrees with what."""
    drafter, length = Rewrite(least=0), 0
    for back, new in history:
        kept = max(0, length - back) if data.draw(st.booleans()) else length
        drafter.follow(kept, new)
        length = kept + len(new)
        draft = drafter.propose(7)
        assert len(draft.ids) == len(draft.chances) <= 7
        assert set(draft.ids) <= {0, 1, 2, 150_000}
        assert all(0 <= chance <= 1 for chance in draft.chances)


def test_a_change_is_as_likely_as_it_was_after_the_same_token() -> None:
    """Changes a token that follows two kinds of tokens, after one of them only."""
    text, changes = "axbxaxbxaxbxaxbx", Changes()
    changes.learn(text, 1, 2, "y")
    for place in (3, 5, 7, 9, 11):
        if text[place - 1] == "a":
            changes.learn(text, place, place + 1, "y")
        else:
            changes.count_copy(text, place, True)
    after_a, after_b = (changes.expected(text, place, 1)[0] for place in (13, 15))
    assert (after_a.token, after_b.token) == ("y", "x")
    assert after_a.chance == pytest.approx(3 / 3.3)
    assert after_b.chance == pytest.approx(1.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="draft rewrite: least=1"):
        drafter_named("rewrite:least=1")
    with pytest.raises(UsageError, match="draft rewrite: max_ngram=0 is not"):
        drafter_named("rewrite:max_ngram=0")
