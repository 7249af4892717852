"""Where a text has said the same before: an index that follows the text forwards and back."""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from kvq.errors import UsageError, argument

# Heads of the chains: 256 KiB an index. A text has 8 bytes more for each of its tokens.
_SLOTS = 1 << 16
# Knuth's multiplicative hash: odd, near the golden section of 2^32.
_SPREAD = 2_654_435_761
# From so many new tokens on, numpy adds them faster than one by one.
_MANY = 256


class Repeats:
    """Earlier places whose last tokens are those the text ends with.

    The positions of all runs of `least` tokens hang in chains, newest first, from a hash table of
    fixed size, as deflate finds its matches (RFC 1951, section 4). A token is added or taken back
    in constant time: chains are a stack, so that taking back undoes exactly what was added.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._tokens = array("i")
        # Of each end of a run the next older one whose hash is the same, 0: none.
        self._older = array("i")
        self._newest = array("i", bytes(4 * _SLOTS))

    def __len__(self) -> int:
        return len(self._tokens)

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """The text is now its first `kept` tokens and then `new`."""
        for _ in range(len(self._tokens) - kept):
            self._newest[self._slot()] = self._older.pop()
            self._tokens.pop()
        if len(new) >= _MANY:
            self._append(new)
            return
        tokens, older, newest, least = self._tokens, self._older, self._newest, self._least
        for token in new:  # what a look costs most; `_slot` in place is twice as fast
            tokens.append(token)
            mixed = 0
            for one in tokens[-least:]:
                mixed = (mixed + one) * _SPREAD & 0xFFFFFFFF
            older.append(newest[mixed >> 16])
            newest[mixed >> 16] = len(tokens)

    def find(self, longest: int, most: int) -> Iterator[tuple[int, int]]:
        """Ends of earlier runs like the text's own end, newest first, and how long each is.

        A run is `least` tokens or more and is compared up to `longest`; of those in the chain the
        newest `most` are looked at.
        """
        end = self._older[-1] if self._older else 0
        while end and most:
            length = self._common(end, longest)
            if length >= self._least:
                yield end, length
            end = self._older[end - 1]
            most -= 1

    def tail(self, count: int) -> list[int]:
        """The last `count` tokens, or all."""
        return self._tokens[max(0, len(self._tokens) - count) :].tolist()

    def at(self, place: int, otherwise: int) -> int:
        """The token at `place`, or `otherwise` where the text is over."""
        return self._tokens[place] if place < len(self._tokens) else otherwise

    def after(self, end: int, place: int) -> int:
        """The token `place` tokens after `end`, as if what lies from there on went on for ever.

        Deflate copies beyond the end of what it has in the same way: a run of one token repeats.
        """
        return self._tokens[end + place % (len(self._tokens) - end)]

    def _slot(self) -> int:
        mixed = 0
        for token in self._tokens[-self._least :]:
            mixed = (mixed + token) * _SPREAD & 0xFFFFFFFF
        return mixed >> 16

    def _append(self, new: Sequence[int]) -> None:
        """Adds `new` at once, to the same end as one by one."""
        first = len(self._tokens)
        self._tokens.extend(new)
        before = max(0, first - self._least + 1)
        text = np.array(self._tokens[before:], np.uint64)
        text = np.concatenate([np.zeros(self._least - 1 - (first - before), np.uint64), text])
        mixed = np.zeros(len(new), np.uint64)
        for place in range(self._least):
            mixed = (mixed + text[place : place + len(new)]) * _SPREAD & 0xFFFFFFFF
        slots = (mixed >> 16).astype(np.int64)
        newest = np.frombuffer(self._newest, np.int32)
        order = np.argsort(slots, kind="stable")
        same = np.append(False, np.diff(slots[order]) == 0)
        older = np.empty(len(new), np.int32)
        older[order] = np.where(same, first + np.roll(order, 1) + 1, newest[slots[order]])
        newest[slots] = first + 1 + np.arange(len(new), dtype=np.int32)
        self._older.frombytes(older.tobytes())

    def _common(self, end: int, longest: int) -> int:
        tokens, last = self._tokens, len(self._tokens)
        limit = min(longest, end)
        length = 0
        while length < limit and tokens[end - 1 - length] == tokens[last - 1 - length]:
            length += 1
        return length


def chance(length: int, places: int = 1, alike: int = 1) -> float:
    """What to think of a token that `alike` of `places` went on with after `length` of a kind."""
    return alike / (places + 1 / length)


def check_lengths(drafter: str, **lengths: int) -> None:
    """Raises `UsageError` unless every option of `drafter` is 1 or more, and min at most max."""
    for name, length in lengths.items():
        if length < 1:
            raise UsageError(
                about="draft", value=f"{drafter}: {name}={length}", possible="1 or more"
            )
    if lengths["min_ngram"] > lengths["max_ngram"]:
        raise UsageError(
            f"{argument('draft')} {drafter}: min_ngram={lengths['min_ngram']} is more than "
            f"max_ngram={lengths['max_ngram']}; give as much at most"
        )
