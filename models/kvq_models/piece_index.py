"""A vocabulary's text tokens in the order of their bytes: with which of them a text may begin.

Knows no control tokens, no text of a prompt and no logits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
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


NO_PIECES: Mapping[int, bytes] = {}


class PieceIndex:
    """Token ids by the bytes they stand for; ids without bytes are left out.

    Those that begin with one byte are put in order when that byte is first asked for: a text is
    gone on from after few of a large vocabulary's.
    """

    def __init__(self, pieces: Mapping[int, bytes] = NO_PIECES) -> None:
        self._pieces = pieces
        self._longest = max(map(len, pieces.values()), default=0)
        self._by_first_byte = defaultdict[int, list[int]](list)
        for token, piece in pieces.items():
            if piece:
                self._by_first_byte[piece[0]].append(token)
        self._ordered: dict[int, list[int]] = {}

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
                    ends |= dict.fromkeys(self._equal(text[start:end]), end)
            inside = np.fromiter(ends, np.int64, len(ends))
            beyond = np.array(self._longer(text[start:]), np.int64)
            ids = np.sort(np.concatenate([inside, beyond]))
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

    def _equal(self, piece: bytes) -> list[int]:
        ids, told = self._beginning_like(piece), self._pieces.__getitem__
        first = bisect_left(ids, piece, key=told)
        return ids[first : bisect_right(ids, piece, first, key=told)]

    def _longer(self, beginning: bytes) -> list[int]:
        if not beginning:
            return [token for token, piece in self._pieces.items() if piece]
        ids, pieces, size = self._beginning_like(beginning), self._pieces, len(beginning)
        first = bisect_right(ids, beginning, key=pieces.__getitem__)
        last = bisect_right(ids, beginning, first, key=lambda token: pieces[token][:size])
        return ids[first:last]

    def _beginning_like(self, text: bytes) -> list[int]:
        """Ids of all pieces that share the first byte of `text`, in the order of their bytes."""
        first = text[0]
        if first not in self._ordered:
            ids = self._by_first_byte.get(first, [])
            self._ordered[first] = sorted(ids, key=self._pieces.__getitem__)
        return self._ordered[first]
