"""The index of repeats, prompt look-up and suffix decoding against searches of the whole text."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import UsageError
from kvq_runtime.answer.drafter import NO_DRAFT
from kvq_specdraft import FREE_DRAFTERS, drafter_named
from kvq_specdraft.lookup import Lookup
from kvq_specdraft.repeats import Repeats
from kvq_specdraft.suffix import Suffix

PROPERTY = settings(max_examples=200, deadline=None)
# Few tokens, so that texts repeat themselves; one that needs more than two bytes.
token = st.sampled_from([0, 1, 2, 150_000])
# Edits: how many of the first tokens stay, and what follows them.
edits = st.lists(st.tuples(st.integers(0, 40), st.lists(token, max_size=20)), max_size=8)


def matches(text: list[int], least: int, longest: int) -> list[tuple[int, int]]:
    """Returns all earlier ends of a run like the text's end, newest first, by trying all."""
    ends = []
    for end in range(len(text) - 1, 0, -1):
        length = max(n for n in range(end + 1) if text[end - n : end] == text[len(text) - n :])
        if length >= least:
            ends.append((end, min(length, longest)))
    return ends


def edited(edit: tuple[int, list[int]], text: list[int]) -> tuple[int, list[int]]:
    return min(edit[0], len(text)), edit[1]


@PROPERTY
@given(edits, st.integers(1, 3), st.integers(3, 6))
def test_all_runs_are_found_after_any_edits(history: list, least: int, longest: int) -> None:
    repeats, text = Repeats(least), list[int]()
    for edit in history:
        kept, new = edited(edit, text)
        repeats.follow(kept, new)
        text[kept:] = new
        actual = list(repeats.find(longest, 1000))
        assert actual == matches(text, least, longest)
        assert list(repeats.find(longest, 2)) == actual[:2]
        for end, _ in actual:
            endless = list(text)
            for place in range(9):
                assert repeats.after(end, place) == endless[end + place]
                endless.append(endless[end + place])


@pytest.mark.slow
@PROPERTY
@given(st.lists(token, max_size=9), st.lists(token, min_size=256, max_size=400), st.integers(1, 4))
def test_many_tokens_at_once_are_as_one_by_one(before: list, many: list, least: int) -> None:
    once, slowly = Repeats(least), Repeats(least)
    for repeats in (once, slowly):
        repeats.follow(0, before)
    once.follow(len(before), many)
    for place, token in enumerate(many):
        slowly.follow(len(before) + place, [token])
    assert vars(once) == vars(slowly)


def test_forgetting_all_leaves_nothing_behind() -> None:
    repeats = Repeats(2)
    repeats.follow(0, [5, 6, 7, 5, 6])
    repeats.follow(0, [])
    assert vars(repeats) == vars(Repeats(2))


@PROPERTY
@given(edits, st.integers(1, 8))
def test_lookup_proposes_what_followed_the_longest_newest_run(history: list, room: int) -> None:
    drafter, text = Lookup(max_ngram=5, min_ngram=2), list[int]()
    for edit in history:
        kept, new = edited(edit, text)
        drafter.follow(kept, new)
        text[kept:] = new
        matching = matches(text, 2, 5)
        draft = drafter.propose(room)
        if not matching:
            assert draft == NO_DRAFT
            continue
        end, length = max(matching, key=lambda match: (match[1], match[0]))
        endless = text[end:]
        while len(endless) < room:
            endless += text[end:]
        assert draft.ids == tuple(endless[:room])
        assert draft.chances == tuple(1 / (1 + 1 / (length + place)) for place in range(room))


def walked(text: list[int], matching: list[tuple[int, int]], room: int) -> tuple[float, list[int]]:
    """Returns the best walk by counting, for each length of match, how continuations begin."""
    best = (0.0, list[int]())
    for length in sorted({match_length for _, match_length in matching}, reverse=True):
        going = []
        for end in (end for end, match_length in matching if match_length >= length):
            endless = text[end:]
            while len(endless) < room:
                endless += text[end:]
            going.append(endless[:room])
        likely, score, path = 1.0, 0.0, list[int]()
        for place in range(room):
            like = [path_tokens for path_tokens in going if path_tokens[:place] == path]
            chosen, count = Counter(path_tokens[place] for path_tokens in like).most_common(1)[0]
            likely *= count / (len(like) + 1 / (length + place))
            if likely < 0.1:
                break
            score += likely
            path.append(chosen)
        if score > best[0]:
            best = (score, path)
    return best


@PROPERTY
@given(st.lists(token, max_size=60), st.integers(1, 8))
def test_suffix_proposes_the_walk_of_the_largest_sum(text: list[int], room: int) -> None:
    drafter = Suffix(max_ngram=5, min_ngram=1, most=1000)
    drafter.follow(0, text)
    _, path = walked(text, matches(text, 1, 5), room)
    assert drafter.propose(room).ids == tuple(path)


@pytest.mark.parametrize("name", sorted(FREE_DRAFTERS))
def test_a_drafter_by_its_name_says_nothing_of_a_new_text(name: str) -> None:
    drafter = drafter_named(name)
    assert drafter.propose(5) == NO_DRAFT
    drafter.follow(0, range(50))
    assert drafter.propose(5) == NO_DRAFT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("guess", "draft 'guess' is unknown; possible: auto, lookup, model"),
        ("lookup:ngram=3", "option 'ngram=3'; possible: max_ngram=..., min_ngram=..."),
        ("lookup:max_ngram=x", "max_ngram takes a whole number, not 'x'"),
        ("suffix:most=0", "draft suffix: most=0 is not possible: 1 or more"),
        ("suffix:min_ngram=5,max_ngram=4", "min_ngram=5 is more than max_ngram=4"),
        ("suffix:least=nan", "least=nan is not possible: above 0, at most 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        drafter_named(text)
    assert message in str(refused.value)
