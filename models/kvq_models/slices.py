"""Cuts a long text where its parts have the same tokens as the whole.

It knows the pieces of a vocabulary and a function that encodes, but no library.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterator
from string import ascii_letters

# Characters of a slice, about 30 ms of work.
SLICE_CHARACTERS = 1 << 15
# The most characters of a slice, whether or not there is a safe place to cut.
MOST_CHARACTERS = 2 * SLICE_CHARACTERS

# The marks that vocabularies write for a space.
_SPACE_AFTER_LETTER = re.compile(r"([A-Za-z])[ Ġ▁]")
_PROBE = " ".join(
    [f"{a}{ascii_letters[: place % 21]} {a}" for place, a in enumerate(ascii_letters)]
    + ["It's the 42 lazy Dogs; über naïve 家族 e\u0301 a\n\nline\tof code(x) <b c> {d e}\r\nend 7"]
)
_NOWHERE = re.compile(r"(?!)")
# Places that merges seldom cross, the best first: before white space, between sentences and words
# of other scripts, and between letters, digits and other characters.
_BOUNDARIES = (
    re.compile(r"(?<=\S)(?=\s)"),
    re.compile(r"(?<=[^\w\s])(?=\w)"),
    re.compile(r"(?<=\w)(?=[^\w\s])|(?<=[^\W\d_])(?=[\d_])|(?<=[\d_])(?=[^\W\d_])"),
)


class Slices:
    """Cuts texts before a space between two ASCII letters.

    A cut is safe if no merge crosses it, so if no piece has this letter and a space, and if
    normaliser and pre-tokeniser look no further. The first is read from the pieces. The second is
    tried on a sample with every letter and many lengths, once with the space in the later part and
    once without (for tokenisers that put one before every text). In a vocabulary that passes
    neither no cut is safe.

    A text without a safe place is still cut, so that no slice is longer than `MOST_CHARACTERS`:
    where the class of the characters changes, else anywhere, but within none of the contents
    `whole`. There the tokens may differ from those of the uncut text.
    """

    def __init__(
        self,
        pieces: Collection[str],
        encode: Callable[[str], list[int]],
        whole: Collection[str] = (),
    ) -> None:
        spaced = set(_SPACE_AFTER_LETTER.findall("\0".join(pieces)))
        letters = "".join(letter for letter in ascii_letters if letter not in spaced)
        cut = re.compile(f"(?<=[{letters}]) (?=[A-Za-z])" if letters else r"(?!)")
        probed = encode(_PROBE)
        self._whole = tuple(content for content in whole if len(content) > 1)
        self._cut = _NOWHERE
        for drops_space in (False, True):
            self._drops_space = drops_space
            parts = self._safe_parts(cut, _PROBE)
            if [token for part in parts for token in encode(part)] == probed:
                self._cut = cut
                return

    def of(self, text: str, characters: int = SLICE_CHARACTERS) -> Iterator[str]:
        """Yields `text` in parts of `characters` or a little more, where there is a safe place."""
        return (part for part, _ in self.cut(text, characters))

    def cut(self, text: str, characters: int = SLICE_CHARACTERS) -> Iterator[tuple[str, bool]]:
        """Yields the same parts, and whether each begins where the cut was not safe."""
        start, forced = 0, False
        while True:
            safe = self._cut.search(text, start + characters, start + MOST_CHARACTERS + 1)
            if safe is None and len(text) - start <= MOST_CHARACTERS:
                break
            end = self._boundary(text, start, characters) if safe is None else safe.start()
            yield text[start:end], forced
            forced = safe is None
            start = safe.end() if safe is not None and self._drops_space else end
        yield text[start:], forced

    def _boundary(self, text: str, start: int, characters: int) -> int:
        """Returns the best place to cut a slice that begins at `start`."""
        first, last = start + characters, start + MOST_CHARACTERS
        matches = (boundary.search(text, first, last) for boundary in _BOUNDARIES)
        place = next((match.start() for match in matches if match is not None), first)
        while place < last and unicodedata.combining(text[place]):
            place += 1
        for content in self._whole:
            begin = text.find(
                content, max(start, place - len(content) + 1), place + len(content) - 1
            )
            if start < begin < place:
                place = begin
        return place

    def _safe_parts(self, cut: re.Pattern[str], text: str) -> list[str]:
        """Returns `text` cut at all places that are believed to be safe."""
        ends = [(match.start(), match.end()) for match in cut.finditer(text, 1)]
        starts = [0, *(end if self._drops_space else start for start, end in ends)]
        return [
            text[start:end]
            for start, end in zip(starts, [*(start for start, _ in ends), len(text)], strict=True)
        ]


def encoded_up_to(most: int | None, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the ids of a text; if it has more than `most`, perhaps those of its beginning alone.

    Beginnings are tried first. The text after a beginning changes its last tokens, so only twice as
    many tokens are certainly too many.
    """
    size = len(text) if most is None else max(SLICE_CHARACTERS, 4 * most)
    while size < len(text):
        ids = encode(text[:size])
        if most is not None and len(ids) > 2 * most:
            return ids
        size *= 4
    return encode(text)
