"""Token healing: generates the end of a prompt again, so that it falls on token boundaries.

A prompt that ends inside what a tokenizer writes as one token ends in tokens that the model has
hardly ever seen before what follows. Its last token is dropped, and what is generated must begin
with that token's bytes. In a prompt that asks for a middle, it is the token before the gap.
"""

from collections.abc import Callable, Mapping, Sequence

from kvq.errors import UsageError
from kvq_models.pieces import Ids, Opening, PieceIndex
from kvq_models.tokenizer import Tokenizer

__all__ = ["Beginning", "heal"]


def heal(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], bytes]:
    """Takes the last token of a prompt back, so that generation can choose a longer one.

    In a text that is to be filled in, it is the last token before the gap. The prompt stays whole
    when this token is the only one or a control token, and when no longer token of the vocabulary
    begins with it.

    Args:
        tokenizer: The model's tokenizer.
        ids: Tokens of the prompt.

    Returns:
        The ids to prefill, and the bytes that generation must begin with (`begin_with` of
        `Session.generate`). The bytes are empty when the prompt stays whole.
    """
    whole = list(ids)
    end = _text_end(tokenizer, whole)
    ending = tokenizer.token_bytes(whole[end - 1], special=False) if end > 1 else b""
    if not ending or not tokenizer.pieces.extends(ending):
        return whole, b""
    return [*whole[: end - 1], *whole[end:]], ending


def _text_end(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Returns where the text to go on from ends: before the text after a gap, else with `ids`."""
    fim = tokenizer.fim
    if fim is None or ids[-1:] != [fim.middle] or fim.suffix not in ids:
        return len(ids)
    return len(ids) - 1 - ids[::-1].index(fim.suffix)


class Beginning:
    """Holds bytes that generated tokens must begin with, and how far they have come.

    Tokens within these bytes belong to the prompt. The first token that reaches beyond them is the
    first new one; after it every token may come.
    """

    def __init__(self, pieces: Callable[[], PieceIndex], text: bytes = b"") -> None:
        """Calls `pieces` only for a `text`. Raises `UsageError` if no tokens spell it."""
        self._openings: Sequence[Opening] = pieces().openings(text) if text else ()
        self._place = 0
        if self._openings and len(self._openings[0].ids) == 0:
            raise UsageError(
                f"no tokens of this model spell {text!r}, which the text is to begin with; "
                "begin it with other bytes, or with none"
            )

    @property
    def allowed(self) -> Ids | None:
        """Returns the tokens that may come next, in the order of their ids. None: every token."""
        done = self._place == len(self._openings)
        return None if done else self._openings[self._place].ids

    @property
    def remaining_bytes(self) -> int:
        """Returns how many of the bytes are still to come."""
        return len(self._openings) - self._place

    @property
    def within(self) -> Mapping[int, int]:
        """Returns the allowed tokens that lie within the bytes, and the place where each ends."""
        return self._openings[self._place].ends if self.remaining_bytes else {}

    def take(self, token: int) -> bool:
        """Notes that the allowed `token` comes next; says whether it lies within the bytes."""
        beyond = len(self._openings)
        if self._place == beyond:
            return False
        end = self._openings[self._place].ends.get(token)
        self._place = beyond if end is None else end
        return end is not None
