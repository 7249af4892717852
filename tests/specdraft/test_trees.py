"""Drafts that branch: the tree grown, what Token Recycling learns, the store."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_runtime.answer.drafter import NO_DRAFT, Draft, Round
from kvq_specdraft.finished import FinishedAnswers
from kvq_specdraft.recycle import Recycle
from kvq_specdraft.suffix import Suffix
from kvq_specdraft.trees import grow_tree

PROPERTY = settings(max_examples=60, deadline=None)


def outcome(draft: Draft, tokens: list[int], logits: np.ndarray) -> Round:
    """Returns what a pass makes of `draft` when `tokens` follow."""
    path, place = [], -1
    for token in tokens[:-1]:
        guess = draft.after(place, token)
        assert guess is not None
        path.append(guess)
        place = guess
    return Round(
        draft=draft,
        path=tuple(path),
        tokens=tuple(tokens),
        logits=logits,
        rows=1 + len(draft.ids),
        seconds=1.0,
    )


@PROPERTY
@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 4))
def test_a_grown_tree_is_the_likeliest_of_its_size(seed: int, room: int, width: int) -> None:
    """Compares with all nodes to a depth: the likeliest paths are the best tree."""
    random = np.random.default_rng(seed)
    chances: dict[tuple[int, ...], list[float]] = {}

    def children(path: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        siblings = chances.setdefault(path, sorted(random.random(width).tolist(), reverse=True))
        return [(token, chance, (*path, token)) for token, chance in enumerate(siblings)]

    draft = grow_tree(room, (), children)
    nodes, layer = list[float](), [((), 1.0)]
    for _ in range(room):
        layer = [
            (after, likely * chance)
            for path, likely in layer
            for _, chance, after in children(path)
            if len(after) <= 3 or likely * chance > 0
        ][:4000]
        nodes += [likely for _, likely in layer]
    likely = list[float]()
    assert draft.parents is not None
    for parent, chance in zip(draft.parents, draft.chances, strict=True):
        likely.append(chance * (likely[parent] if parent >= 0 else 1.0))
    np.testing.assert_allclose(likely, sorted(nodes, reverse=True)[:room])


def test_recycle_proposes_what_the_model_thought_of_even_after_wrong_guesses() -> None:
    drafter = Recycle()
    drafter.follow(0, [1, 2])
    assert drafter.propose(4) == NO_DRAFT
    logits = np.zeros((3, 20), np.float32)
    logits[0, [3, 4]] = 9, 8  # after 2
    logits[1, [5, 6]] = 9, 8  # after the wrong guess 7
    logits[2, [8, 9]] = 9, 8  # after the wrong guess 3's
    drafter.observe(outcome(Draft(ids=(7, 3)), [3], logits))
    drafter.follow(2, [3, 7])
    draft = drafter.propose(2)
    assert draft.ids[0] == 5
    drafter.follow(3, [2])
    draft = drafter.propose(3)
    assert draft.ids == (3, 4, 8)
    assert draft.parents == (-1, -1, 0)


def test_a_store_keeps_finished_answers_and_no_more_than_asked() -> None:
    first = Suffix(store=64)
    second, without = Suffix(store=64), Suffix()
    logits = np.zeros((1, 4), np.float32)
    first.follow(0, [1, 2])
    for place, token in enumerate((30, 31, 32, 33)):
        first.observe(outcome(NO_DRAFT, [token], logits))
        first.follow(2 + place, [token])
    for drafter in (second, without):
        drafter.follow(0, [5, 30, 31])
        assert drafter.propose(3) == NO_DRAFT
    first.follow(0, [9])  # another prompt: the answer is finished
    assert second.propose(5).ids == (32, 33)
    assert without.propose(5) == NO_DRAFT
    least = FinishedAnswers(1, 2)
    for _ in range(4):
        least.add([1, 2, 3])
        assert len(least) <= 1
    store = FinishedAnswers(64, 2)
    for start in range(0, 4000, 40):
        store.add(range(start, start + 40))
        assert len(store) <= 64
    assert [store.after(end, 0) for end, _ in store.find([3996, 3997], 8, 4)] == [3998]
    assert store.find([0, 1], 8, 4) == []


def test_a_suffix_tree_has_what_several_places_went_on_with() -> None:
    text = [7, 8, 1, 2, 7, 8, 1, 3, 7, 8, 4, 5, 7, 8]
    drafter = Suffix(tree=1)
    drafter.follow(0, text)
    draft = drafter.propose(6)
    assert draft.parents is not None
    assert {draft.ids[place] for place in draft.places_after(-1)} == {1, 4}
    guess = draft.after(-1, 1)
    assert guess is not None
    assert {draft.ids[place] for place in draft.places_after(guess)} == {2, 3}
