"""Drafts that branch: the tree that is grown, and what Token Recycling learns."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_runtime.answer.drafter import NO_DRAFT, Draft, Round
from kvq_specdraft.recycle import Recycle, grow_tree

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
