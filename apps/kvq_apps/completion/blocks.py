"""Token ids of a text that changes a little at every key: only blocks that changed are encoded.

A text is cut into blocks after line ends. Whether the ids of a whole are those of its blocks one
after the other depends on the tokenizer: GPT-2's takes a line end and the next line's indentation
as one piece, others do not. So the places to cut at are tried on a sample, and a tokenizer that
allows none encodes the whole text each time.
"""

import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator

from kvq_models.tokenizer import Tokenizer

# Of the blocks whose ids are remembered.
MOST_CHARACTERS = 1 << 18
# What stands before the cursor and what behind it, now and before.
LAST_TEXTS = 3

# From the finest cut on: before any line that is not blank, before a line that is not indented.
_CUTS = (re.compile(r"(?<=\n)(?=[ \t]*\S)"), re.compile(r"(?<=\n)(?=\S)"))
_SAMPLE = (
    "import os\n\n\nclass A:\n    def f(self):\n        return {\n            1: 2,\n        }\n"
    "\n    # a note\n\tx = '''\n  \n'''\n\nif A:\r\n    pass\r\n\r\nprint(A().f())  \n)\n123\n\"\n"
    "def g(): ...\n\u00e9t\u00e9 = '\u4f60\u597d'\n\n\n\n    y = (1,\n         2)\n"
)


class BlockTokenizer:
    """Encodes texts without control tokens, as `Tokenizer.encode` does.

    Of a text like one of the last ones only what differs is cut and looked up again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encoded_characters = 0
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        self._known_characters = 0
        self._last: list[_Encoded] = []
        whole = tokenizer.encode(_SAMPLE)
        self._cut = next(
            (
                cut
                for cut in _CUTS
                if [one for block in cut.split(_SAMPLE) for one in tokenizer.encode(block)] == whole
            ),
            None,
        )

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        new, done, old = (
            _Encoded(text),
            0,
            max(self._last, key=lambda one: one.like(text), default=None),
        )
        behind, stop = 0, len(text)
        if old is not None and self._cut is not None:
            before, behind = old.kept(text)
            new.add_all(old, 0, before, 0)
            done = old.starts[before] if before else 0
            if behind < len(old.starts):
                stop -= len(old.text) - old.starts[behind]
        for characters, ids in self._blocks(text[done:stop]):
            new.add(done, ids)
            done += characters
        if old is not None and stop < len(text):
            new.add_all(old, behind, len(old.starts), len(text) - len(old.text))
        self._last = [new, *self._last[: LAST_TEXTS - 1]]
        return new.ids.copy()

    def _blocks(self, text: str) -> Iterator[tuple[int, list[int]]]:
        """Characters and ids of each block of `text`."""
        for block in filter(None, [text] if self._cut is None else self._cut.split(text)):
            ids = self._known.pop(block, None)
            if ids is None:
                ids = self._tokenizer.encode(block)
                self.encoded_characters += len(block)
                self._known_characters += len(block)
            self._known[block] = ids
            yield len(block), ids
        while self._known_characters > MOST_CHARACTERS:
            self._known_characters -= len(self._known.popitem(last=False)[0])


class _Encoded:
    """A text, where its blocks begin in it and in its ids, and these."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts: list[int] = []
        self.places: list[int] = []
        self.ids: list[int] = []

    def like(self, text: str) -> int:
        """Characters of both ends that `text` has too."""
        return sum(self._shared(text))

    def kept(self, text: str) -> tuple[int, int]:
        """(blocks of the beginning, first one of the end) that are blocks of `text` as well.

        A block begins where a line is not blank, so that its beginning depends on its first line;
        the one in which two texts part, and the one before it, are cut again.
        """
        start, end = self._shared(text)
        before = max(0, bisect_right(self.starts, start) - 2)
        return before, bisect_left(self.starts, len(self.text) - end + 1)

    def _shared(self, text: str) -> tuple[int, int]:
        start = _common_start(self.text, text)
        return start, _common_end(self.text, text, min(len(self.text), len(text)) - start)

    def add(self, start: int, ids: list[int]) -> None:
        """The next block."""
        self.starts.append(start)
        self.places.append(len(self.ids))
        self.ids += ids

    def add_all(self, other: "_Encoded", first: int, stop: int, shift: int) -> None:
        """Blocks `first` to `stop` of a text in which they begin `shift` characters earlier."""
        if first == stop:
            return
        begin = other.places[first]
        end = other.places[stop] if stop < len(other.places) else len(other.ids)
        moved = len(self.ids) - begin
        self.starts += [start + shift for start in other.starts[first:stop]]
        self.places += [place + moved for place in other.places[first:stop]]
        self.ids += other.ids[begin:end]


def _common_start(a: str, b: str) -> int:
    """Characters that two texts begin with alike."""
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _common_end(a: str, b: str, most: int) -> int:
    """Characters, up to `most`, that two texts end with alike."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        if a[len(a) - middle : len(a) - least] == b[len(b) - middle : len(b) - least]:
            least = middle
        else:
            most = middle - 1
    return least
