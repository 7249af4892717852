"""The rule that keeps guesses: tokens come as the model alone would draw them (QS-5)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from answers import LIMITS, chi_square
from kvq_runtime.answer.drafter import Draft, Foresight
from kvq_runtime.answer.generation import IDS_ONLY, Generation, GenerationOptions
from kvq_runtime.answer.sampling import distribution
from kvq_runtime.answer.verify import accept
from kvq_runtime.config import Sampling

SIZE = 8
IDS = np.arange(SIZE)


def distributions(seed: int, count: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).dirichlet(np.ones(SIZE), count)


@pytest.mark.sampled
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_drawn_guesses_leave_the_distribution_as_it_is(siblings: int) -> None:
    """Draws guesses of one place without replacement, as a drafter does by its chances."""
    random = np.random.default_rng(siblings)
    p, q = distributions(siblings, 2)
    rows = [q]
    seen, kept, rounds = np.zeros(SIZE, np.int64), 0, 20_000
    for _ in range(rounds):
        ids, rows = list[int](), list[NDArray[np.float64]]()
        left = q
        for _ in range(siblings):
            ids.append(int(np.searchsorted(np.cumsum(left), random.random() * left.sum())))
            rows.append(left / left.sum())
            left = left.copy()
            left[ids[-1]] = 0
        parents = (-1,) * siblings
        draft = Draft(ids=tuple(ids), parents=parents, probabilities=np.array(rows))
        token, guess = accept(IDS, p, draft, -1, random)
        assert guess is None or ids[guess] == token
        seen[token] += 1
        kept += guess is not None
    assert chi_square(seen, p) < LIMITS[7]
    best = float(np.minimum(p, q).sum())
    if siblings == 1:
        assert kept / rounds == pytest.approx(best, abs=0.007)
    else:
        assert kept / rounds > best + 0.02


def test_certain_guesses_are_kept_as_often_as_the_model_says_the_same() -> None:
    random, plain = np.random.default_rng(3), np.random.default_rng(3)
    (p,) = distributions(9, 1)
    draft = Draft(ids=(2, 5, 6), parents=(-1, -1, 0))
    kept = Counter[int | None]()
    for _ in range(20_000):
        token, guess = accept(IDS, p, draft, -1, random)
        assert token == accept(IDS, p, Draft(), -1, plain)[0]
        kept[guess] += 1
    assert kept[0] / 20_000 == pytest.approx(p[2], abs=0.01)
    assert kept[1] / 20_000 == pytest.approx(p[5], abs=0.01)
    assert kept[2] == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_k=5, top_p=0.95, min_p=0.02),
        Sampling(
            temperature=1.3, top_k=0, top_p=1, min_p=0, repeat_penalty=1.8, presence_penalty=0.4,
            logit_bias={3: 1.0},
        ),
    ],
)  # fmt: skip
def test_two_tokens_have_their_joint_distribution(sampling: Sampling) -> None:
    """Lets filters, bias and penalties see what was guessed before, for draft and model."""
    random = np.random.default_rng(1)
    # Rows: after the text, and after each token that may come first.
    model, drafter = random.normal(size=(2, 1 + SIZE, SIZE)).astype(np.float32) * 1.5
    history = [1, 4]
    seen = np.zeros((SIZE, SIZE), np.int64)
    for _ in range(4_000):
        generation = Generation(
            IDS_ONLY,
            GenerationOptions(sampling=sampling),
            history=history,
            room=9,
            generator=random,
        )
        draft = drawn(generation.foresight(), drafter)
        accepted = generation.take(model[[0, 1 + draft.ids[0], 0]], draft)
        tokens = [*(draft.ids[place] for place in accepted.path), accepted.token]
        if len(tokens) == 1:
            tokens.append(generation.take(model[[1 + tokens[0]]]).token)
        seen[tokens[0], tokens[1]] += 1
    first = distribution(model[0], sampling, history)
    second = [distribution(model[1 + token], sampling, [*history, token]) for token in range(SIZE)]
    assert chi_square(seen.ravel(), (first[:, None] * np.array(second)).ravel()) < LIMITS[63]


def drawn(foresight: Foresight, logits: NDArray[np.float32]) -> Draft:
    """Makes a chain of two tokens by another model."""
    first, q = foresight.choose(logits[0])
    second, r = foresight.choose(logits[1 + first])
    assert q is not None
    assert r is not None
    return Draft(ids=(first, second), probabilities=np.array([q, r]))


def test_a_greedy_choice_asks_for_no_chances() -> None:
    random = np.random.default_rng(0)
    state = random.bit_generator.state
    generation = Generation(
        IDS_ONLY,
        GenerationOptions(sampling=Sampling(temperature=0)),
        history=[0],
        room=9,
        generator=random,
    )
    logits = np.eye(SIZE, dtype=np.float32)
    assert generation.foresight().choose(logits[3]) == (3, None)
    uniform = np.full((2, SIZE), 1 / SIZE)
    accepted = generation.take(logits[[3, 4, 5]], Draft(ids=(3, 1), probabilities=uniform))
    assert (accepted.path, accepted.token) == ((0,), 4)
    assert random.bit_generator.state == state


@pytest.mark.parametrize("parents", [None, (-1, 0, 0, 1, -1)])
def test_places_after_a_place(parents: Sequence[int] | None) -> None:
    draft = Draft(ids=(7, 8, 9, 9, 8), parents=None if parents is None else tuple(parents))
    expected = (
        [[0], [1], [2], [3], [4], []] if parents is None else [[0, 4], [1, 2], [3], [], [], []]
    )
    assert [draft.places_after(place) for place in range(-1, 5)] == expected
    assert draft.after(-1, 8) == (None if parents is None else 4)
    first = draft.first(3)
    assert first.ids == (7, 8, 9)
    assert first.parents == (None if parents is None else (-1, 0, 0))
