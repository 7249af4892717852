"""Token ids of a text that changes a little at every key: only changed blocks are encoded.

A text is cut into blocks after line ends. Whether the ids of the whole text are those of its blocks
depends on the tokenizer: GPT-2's takes a line end and the next line's indentation as one piece,
others do not. So the places to cut at are tried on a sample. A tokenizer that allows none encodes
the whole text each time.
"""

import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator

from kvq_models.tokenizer import Tokenizer

# Of the blocks whose ids are remembered.
MOST_CHARACTERS = 1 << 18
# The texts before and after the cursor, of now and of the last request.
LAST_TEXTS = 3

# The finest cut first: before any line that is not blank, then before a line that is not indented.
_CUTS = (re.compile(r"(?<=\n)(?=[ \t]*\S)"), re.compile(r"(?<=\n)(?=\S)"))
_SAMPLE = (
    "import os\n\n\nclass A:\n    def f(self):\n        return {\n            1: 2,\n        }\n"
    "\n    # a note\n\tx = '''\n  \n'''\n\nif A:\r\n    pass\r\n\r\nprint(A().f())  \n)\n123\n\"\n"
    "def g(): ...\n\u00e9t\u00e9 = '\u4f60\u597d'\n\n\n\n    y = (1,\n         2)\n"
)


class BlockTokenizer:
    """Encodes texts without control tokens, as `Tokenizer.encode` does.

    Only what differs from one of the last texts is cut and looked up again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encoded_characters = 0
        self._tokenizer = tokenizer
        self._ids_by_block: OrderedDict[str, list[int]] = OrderedDict()
        self._remembered_characters = 0
        self._last: list[_EncodedText] = []
        whole = tokenizer.encode(_SAMPLE)
        self._cut = next(
            (
                cut
                for cut in _CUTS
                if [token for block in cut.split(_SAMPLE) for token in tokenizer.encode(block)]
                == whole
            ),
            None,
        )

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`."""
        new, done, old, shared = _EncodedText(text), 0, None, (-1, 0)
        for last in self._last:
            ends = last.shared_ends(text)
            if sum(ends) > sum(shared):
                old, shared = last, ends
        tail_start, stop = 0, len(text)
        if old is not None and self._cut is not None:
            head_stop, tail_start = old.shared_blocks(*shared)
            new.add_all(old, 0, head_stop, 0)
            done = old.starts[head_stop] if head_stop else 0
            if tail_start < len(old.starts):
                stop -= len(old.text) - old.starts[tail_start]
        for characters, ids in self._blocks(text[done:stop]):
            new.add(done, ids)
            done += characters
        if old is not None and stop < len(text):
            new.add_all(old, tail_start, len(old.starts), len(text) - len(old.text))
        self._last = [new, *self._last[: LAST_TEXTS - 1]]
        return new.ids.copy()

    def _blocks(self, text: str) -> Iterator[tuple[int, list[int]]]:
        """Yields characters and ids of each block of `text`."""
        for block in filter(None, [text] if self._cut is None else self._cut.split(text)):
            ids = self._ids_by_block.pop(block, None)
            if ids is None:
                ids = self._tokenizer.encode(block)
                self.encoded_characters += len(block)
                self._remembered_characters += len(block)
            self._ids_by_block[block] = ids
            yield len(block), ids
        while self._remembered_characters > MOST_CHARACTERS:
            self._remembered_characters -= len(self._ids_by_block.popitem(last=False)[0])


class _EncodedText:
    """Holds a text, its ids, and where its blocks begin in both."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts: list[int] = []
        self.id_offsets: list[int] = []
        self.ids: list[int] = []

    def shared_ends(self, text: str) -> tuple[int, int]:
        """Counts the characters of both ends that `text` has too."""
        start = _common_start(self.text, text)
        return start, _common_end(self.text, text, min(len(self.text), len(text)) - start)

    def shared_blocks(self, start: int, end: int) -> tuple[int, int]:
        """Returns how many first blocks a text shares, and the first of the last blocks it shares.

        It shares `start` characters at its beginning and `end` at its end. A block begins where a
        line is not blank, so its beginning depends on its first line. The block in which two texts
        part, and the one before it, are cut again.
        """
        head_stop = max(0, bisect_right(self.starts, start) - 2)
        return head_stop, bisect_left(self.starts, len(self.text) - end + 1)

    def add(self, start: int, ids: list[int]) -> None:
        """Appends the next block."""
        self.starts.append(start)
        self.id_offsets.append(len(self.ids))
        self.ids += ids

    def add_all(self, other: "_EncodedText", first: int, stop: int, shift: int) -> None:
        """Appends blocks `first` to `stop` of `other`, moved by `shift` characters."""
        if first == stop:
            return
        begin = other.id_offsets[first]
        end = other.id_offsets[stop] if stop < len(other.id_offsets) else len(other.ids)
        id_shift = len(self.ids) - begin
        self.starts += [start + shift for start in other.starts[first:stop]]
        self.id_offsets += [offset + id_shift for offset in other.id_offsets[first:stop]]
        self.ids += other.ids[begin:end]


def _common_start(a: str, b: str) -> int:
    """Counts the characters that two texts begin with alike."""
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _common_end(a: str, b: str, most: int) -> int:
    """Counts the characters, up to `most`, that two texts end with alike."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        if a[len(a) - middle : len(a) - least] == b[len(b) - middle : len(b) - least]:
            least = middle
        else:
            most = middle - 1
    return least
