"""Where a long text may be cut so that its parts have the tokens of the whole.

Knows the pieces of a vocabulary and a function that encodes, no library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from string import ascii_letters

# Characters of a slice, about: some 30 ms of work.
SLICE_CHARACTERS = 1 << 15

# The marks that vocabularies write for a space.
_SPACE_AFTER_LETTER = re.compile(r"([A-Za-z])[ Ġ▁]")
_PROBE = " ".join(
    [f"{a}{ascii_letters[: place % 21]} {a}" for place, a in enumerate(ascii_letters)]
    + ["It's the 42 lazy Dogs; über naïve 家族 e\u0301 a\n\nline\tof code(x) <b c> {d e}\r\nend 7"]
)


class Slices:
    """Cuts before a space between two ASCII letters.

    A cut is safe where no merge crosses it, so where no piece holds this letter and a space, and
    where normaliser and pre-tokeniser look no further. The first is read off the pieces; the
    second is tried on a sample with every letter and many lengths, once with the space in the
    later part and once without (where a tokeniser puts one before every text). A vocabulary that
    passes neither is never cut.
    """

    def __init__(self, pieces: Collection[str], encode: Callable[[str], list[int]]) -> None:
        spaced = set(_SPACE_AFTER_LETTER.findall("\0".join(pieces)))
        letters = "".join(letter for letter in ascii_letters if letter not in spaced)
        cut = re.compile(f"(?<=[{letters}]) (?=[A-Za-z])" if letters else r"(?!)")
        whole = encode(_PROBE)
        self._cut = re.compile(r"(?!)")
        for drops_space in (False, True):
            self._drops_space = drops_space
            if [token for part in self._parts(cut, _PROBE, 1) for token in encode(part)] == whole:
                self._cut = cut
                return

    def of(self, text: str, characters: int = SLICE_CHARACTERS) -> Iterator[str]:
        """`text` in parts of `characters` or a little more; the last may be any length."""
        return self._parts(self._cut, text, characters)

    def _parts(self, cut: re.Pattern[str], text: str, characters: int) -> Iterator[str]:
        start = 0
        while found := cut.search(text, start + characters):
            yield text[start : found.start()]
            start = found.end() if self._drops_space else found.start()
        yield text[start:]


def encoded_up_to(most: int | None, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Ids of a text that is not cut; of one of more than `most` tokens perhaps its beginning's.

    Beginnings are tried first. What follows one changes its last tokens: twice too many are
    certainly too many.
    """
    size = len(text) if most is None else max(SLICE_CHARACTERS, 4 * most)
    while size < len(text):
        ids = encode(text[:size])
        if most is not None and len(ids) > 2 * most:
            return ids
        size *= 4
    return encode(text)
