"""An index of the places where a text says the same as at its end; the text may go back."""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from kvq.errors import UsageError, argument

# Slots of the hash table: 256 KiB an index; each token of the text takes 8 bytes more.
_SLOTS = 1 << 16
# Knuth's multiplicative hash: odd, near the golden section of 2^32.
_MULTIPLIER = 2_654_435_761
# The number of new tokens from which numpy is faster than a loop.
_MANY = 256


class Repeats:
    """Finds earlier places in a text whose last tokens are those at its end.

    All runs of `least` tokens are in chains, newest first, from a hash table of fixed size, as
    deflate finds its matches (RFC 1951, section 4). Adding or removing a token takes constant time.
    Chains are stacks, so removing undoes exactly what adding did.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._tokens = array("i")
        # For each end of a run the next older end with the same hash; 0: none.
        self._older = array("i")
        self._newest = array("i", bytes(4 * _SLOTS))

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """Makes the text its first `kept` tokens and then `new`."""
        for _ in range(len(self._tokens) - kept):
            self._newest[self._slot()] = self._older.pop()
            self._tokens.pop()
        if len(new) >= _MANY:
            self._append(new)
            return
        tokens, older, newest, least = self._tokens, self._older, self._newest, self._least
        for token in new:  # `_slot` is written out here: this loop is most of a look's cost
            tokens.append(token)
            mixed = 0
            for last_token in tokens[-least:]:
                mixed = (mixed + last_token) * _MULTIPLIER & 0xFFFFFFFF
            older.append(newest[mixed >> 16])
            newest[mixed >> 16] = len(tokens)

    def find(self, longest: int, most: int) -> Iterator[tuple[int, int]]:
        """Yields the ends of earlier runs like the text's end, newest first, and their lengths.

        A run has `least` tokens or more and is compared up to `longest`. Only the newest `most`
        places of the chain are checked.
        """
        end = self._older[-1] if self._older else 0
        while end and most:
            length = self._common(end, longest)
            if length >= self._least:
                yield end, length
            end = self._older[end - 1]
            most -= 1

    def after(self, end: int, place: int) -> int:
        """Returns the token `place` tokens after `end`, as if the text from there on repeated.

        Deflate copies beyond the end of its data in the same way: a run of one token repeats.
        """
        return self._tokens[end + place % (len(self._tokens) - end)]

    def _slot(self) -> int:
        mixed = 0
        for token in self._tokens[-self._least :]:
            mixed = (mixed + token) * _MULTIPLIER & 0xFFFFFFFF
        return mixed >> 16

    def _append(self, new: Sequence[int]) -> None:
        """Adds `new` at once, with the same result as one by one."""
        first = len(self._tokens)
        self._tokens.extend(new)
        before = max(0, first - self._least + 1)
        text = np.array(self._tokens[before:], np.uint64)
        text = np.concatenate([np.zeros(self._least - 1 - (first - before), np.uint64), text])
        mixed = np.zeros(len(new), np.uint64)
        for place in range(self._least):
            mixed = (mixed + text[place : place + len(new)]) * _MULTIPLIER & 0xFFFFFFFF
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
    """Returns the chance of a token that came at `alike` of `places` after `length` equal ones."""
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
