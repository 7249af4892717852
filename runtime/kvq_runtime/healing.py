"""Token healing: the end of a prompt is generated again, so that it falls on token boundaries.

A prompt that ends inside what a tokenizer writes as one token ends in tokens that the model has
hardly ever seen before what follows. Its last token is dropped, and what is generated must begin
with that token's bytes. Of a prompt that asks for a middle that token is the one before the gap.
Knows bytes and token ids, no logits and no session.
"""

from collections.abc import Callable, Mapping, Sequence

from kvq.errors import UsageError
from kvq_models.pieces import Ids, Opening, PieceIndex
from kvq_models.tokenizer import Tokenizer

__all__ = ["Beginning", "heal"]


def heal(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], bytes]:
    """Ids to prefill for a text of tokens `ids`, and the bytes generation must begin with.

    The token taken back is the last one, or the last one before the gap of a text that is to be
    filled in. The prompt stays whole, and the bytes are none, when that token is the only one or a
    control token, and when no token of the vocabulary is longer and begins the same.
    """
    whole = list(ids)
    end = _text_end(tokenizer, whole)
    ending = tokenizer.token_bytes(whole[end - 1], special=False) if end > 1 else b""
    if not ending or not tokenizer.pieces.extends(ending):
        return whole, b""
    return [*whole[: end - 1], *whole[end:]], ending


def _text_end(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Where the text ends that is gone on from: before the text after a gap, else with `ids`."""
    fim = tokenizer.fim
    if fim is None or ids[-1:] != [fim.middle] or fim.suffix not in ids:
        return len(ids)
    return len(ids) - 1 - ids[::-1].index(fim.suffix)


class Beginning:
    """Bytes that generated tokens must begin with, and how far they have come.

    Tokens that lie within these bytes belong to the prompt; the first that reaches beyond them is
    the first new one, and after it every token may come.
    """

    def __init__(self, pieces: Callable[[], PieceIndex], text: bytes = b"") -> None:
        """`pieces` is asked only for a `text`; raises `UsageError` if no tokens spell it."""
        self._openings: Sequence[Opening] = pieces().openings(text) if text else ()
        self._place = 0
        if self._openings and len(self._openings[0].ids) == 0:
            raise UsageError(
                f"no tokens of this model spell {text!r}, which the text is to begin with; "
                "begin it with other bytes, or with none"
            )

    @property
    def allowed(self) -> Ids | None:
        """The tokens that may come next, in the order of their ids; None: every token."""
        done = self._place == len(self._openings)
        return None if done else self._openings[self._place].ids

    @property
    def left_bytes(self) -> int:
        """How many of the bytes are still to come."""
        return len(self._openings) - self._place

    @property
    def within(self) -> Mapping[int, int]:
        """Of the tokens that may come next those that lie within the bytes, and their ends."""
        return self._openings[self._place].ends if self.left_bytes else {}

    @property
    def ended(self) -> bool:
        """Whether nothing may follow: never."""
        return False

    def take(self, token: int) -> bool:
        """Notes that `token`, an allowed one, comes next; whether it lies within the bytes."""
        beyond = len(self._openings)
        if self._place == beyond:
            return False
        end = self._openings[self._place].ends.get(token)
        self._place = beyond if end is None else end
        return end is not None
