"""The one rule by which guesses are kept. Knows tokens and probabilities, no model and no text."""

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.drafter import Draft
from kvq_runtime.sampling import draw

Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]


def accept(
    ids: Ids,
    probabilities: Probabilities,
    draft: Draft,
    place: int,
    generator: np.random.Generator,
) -> tuple[int, int | None]:
    """The token after `place` of `draft` (-1: the text), and where the draft has guessed it.

    `probabilities` float64 [n] of tokens `ids` [n] are the model's own after every filter; the
    token has exactly this distribution, whatever was guessed. A certain guess (no probabilities of
    its own) is right when the model's own draw hits it, with the same random numbers as plain
    decoding: rejection sampling with all of q at one token. A guess x drawn from q is kept with
    probability min(1, p(x) / q(x)), else what p has more than q is left for the next one after the
    same place, and in the end for the draw (arXiv 2211.17192, algorithm 1; for several guesses of
    one place 2305.09781, section 4.3). No probabilities are asked for where one token is left.
    """
    if not draft.ids:
        return draw(ids, probabilities, generator), None
    if draft.probabilities is None or len(ids) == 1:
        token = draw(ids, probabilities, generator)
        return token, draft.after(place, token)
    for guess in draft.places_after(place):
        token, drawn_from = draft.ids[guess], draft.probabilities[guess]
        own = float(probabilities[ids == token].sum())
        if generator.random() * float(drawn_from[token]) < own:
            return token, guess
        probabilities = _without(probabilities, drawn_from[ids])
    return draw(ids, probabilities, generator), None


def _without(probabilities: Probabilities, taken: NDArray[np.floating]) -> Probabilities:
    """What `probabilities` has more than `taken`, as a distribution."""
    left = np.maximum(probabilities - taken, 0.0)
    total = float(left.sum())
    # Nothing is left of equal distributions; a guess of these fails by rounding alone.
    return left / total if total > 0 else probabilities
