"""The one rule by which guesses are kept."""

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.answer.drafter import Draft
from kvq_runtime.answer.sampling import draw

Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]


def accept(
    ids: Ids,
    probabilities: Probabilities,
    draft: Draft,
    place: int,
    generator: np.random.Generator,
) -> tuple[int, int | None]:
    """Chooses the token after `place` of a draft, and says where the draft has guessed it.

    The token has exactly the model's distribution, whatever was guessed. A certain guess (one
    without probabilities) is right when the model's own draw hits it, with the same random numbers
    as plain decoding. A guess x that was drawn from q is kept with probability min(1, p(x) / q(x));
    else the part of p that exceeds q is used for the next guess at the same place, and in the end
    for the draw (arXiv 2211.17192, algorithm 1; several guesses of one place: 2305.09781, section
    4.3).

    Args:
        ids: Candidate tokens int64 [n].
        probabilities: Their probabilities float64 [n] after every filter.
        draft: The guesses. Its probabilities are not used where one candidate is left.
        place: A place of the draft, -1 for the text's end.
        generator: Source of random numbers.

    Returns:
        The token, and its place in the draft, None if it was not guessed there.
    """
    if not draft.ids:
        return draw(ids, probabilities, generator), None
    if draft.probabilities is None or len(ids) == 1:
        token = draw(ids, probabilities, generator)
        return token, draft.after(place, token)
    for guess in draft.places_after(place):
        token, drawn_from = draft.ids[guess], draft.probabilities[guess]
        probability = float(probabilities[ids == token].sum())
        if generator.random() * float(drawn_from[token]) < probability:
            return token, guess
        probabilities = _residual(probabilities, drawn_from[ids])
    return draw(ids, probabilities, generator), None


def _residual(probabilities: Probabilities, drawn_from: NDArray[np.floating]) -> Probabilities:
    """Returns the part of `probabilities` that exceeds `drawn_from`, as a distribution."""
    remainder = np.maximum(probabilities - drawn_from, 0.0)
    total = float(remainder.sum())
    # Equal distributions leave nothing; a guess from one of them fails by rounding alone.
    return remainder / total if total > 0 else probabilities
