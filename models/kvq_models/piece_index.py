"""A vocabulary's text tokens in the order of their bytes: with which of them a text may begin.

Knows no control tokens, no text of a prompt and no logits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The tokens that may stand at one place of a given text, `ids` in their order.

    `ends` tells of those that lie within the text where they end; the others reach beyond it.
    """

    ids: Ids
    ends: Mapping[int, int]


class PieceIndex:
    """Token ids sorted by the bytes they stand for; ids without bytes are left out."""

    def __init__(self, pieces: Iterable[tuple[int, bytes]] = ()) -> None:
        rows = sorted((piece, token) for token, piece in pieces if piece)
        self._pieces = [piece for piece, _ in rows]
        self._ids: Ids = np.array([token for _, token in rows], np.int64)
        self._longest = max(map(len, self._pieces), default=0)

    def extends(self, text: bytes) -> bool:
        """Whether some token is longer than `text` and begins with it."""
        return len(self._longer(text)) > 0

    def openings(self, text: bytes) -> Sequence[Opening]:
        """For every place in `text` the tokens that may stand there in a text that begins so.

        These are the tokens that begin with the rest of `text`, one range of the order, and those
        that are a beginning of it after which the remainder can be spelled too. An opening is
        empty where no tokens spell what follows.
        """
        openings: list[Opening] = []
        spelled = [False] * len(text) + [True]
        for start in range(len(text) - 1, -1, -1):
            ends: dict[int, int] = {}
            for end in range(start + 1, min(len(text), start + self._longest) + 1):
                if spelled[end]:
                    ends |= dict.fromkeys(self._equal(text[start:end]).tolist(), end)
            inside = np.fromiter(ends, np.int64, len(ends))
            ids = np.sort(np.concatenate([inside, self._longer(text[start:])]))
            spelled[start] = len(ids) > 0
            openings.append(Opening(ids=ids, ends=ends))
        return openings[::-1]

    def spelling(self, text: bytes) -> list[int]:
        """Tokens that together are `text`, from the left the longest ones; none if there are none.

        Where several tokens have the same bytes, the first of them.
        """
        openings, ids, place = self.openings(text), list[int](), 0
        while place < len(text):
            ends = openings[place].ends
            if not ends:
                return []
            token = max(ends, key=lambda one: (ends[one], -one))
            ids.append(token)
            place = ends[token]
        return ids

    def _equal(self, piece: bytes) -> Ids:
        first = bisect_left(self._pieces, piece)
        return self._ids[first : bisect_right(self._pieces, piece, first)]

    def _longer(self, beginning: bytes) -> Ids:
        first = bisect_right(self._pieces, beginning)
        size = len(beginning)
        last = bisect_right(self._pieces, beginning, first, key=lambda piece: piece[:size])
        return self._ids[first:last]
