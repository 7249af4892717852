"""Token ids of a text that changes a little at every key: only blocks that changed are encoded.

A text is cut into blocks after line ends. Whether the ids of a whole are those of its blocks one
after the other depends on the tokenizer: GPT-2's takes a line end and the next line's indentation
as one piece, others do not. So the places to cut at are tried on a sample, and a tokenizer that
allows none encodes the whole text each time.
"""

import re
from collections import OrderedDict

from kvq_models.tokenizer import Tokenizer

MOST_BLOCKS = 1 << 15

# From the finest cut on: before any line that is not blank, before a line that is not indented.
_CUTS = (re.compile(r"(?<=\n)(?=[ \t]*\S)"), re.compile(r"(?<=\n)(?=\S)"))
_SAMPLE = (
    "import os\n\n\nclass A:\n    def f(self):\n        return {\n            1: 2,\n        }\n"
    "\n    # a note\n\tx = '''\n  \n'''\n\nif A:\r\n    pass\r\n\r\nprint(A().f())  \n)\n123\n\"\n"
    "def g(): ...\n\u00e9t\u00e9 = '\u4f60\u597d'\n\n\n\n    y = (1,\n         2)\n"
)


class BlockTokenizer:
    """Encodes texts without control tokens, as `Tokenizer.encode` does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encoded_characters = 0
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, list[int]] = OrderedDict()
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
        found = list[int]()
        for block in [text] if self._cut is None else self._cut.split(text):
            ids = self._known.pop(block, None)
            if ids is None:
                ids = self._tokenizer.encode(block)
                self.encoded_characters += len(block)
            self._known[block] = ids
            found += ids
        while len(self._known) > MOST_BLOCKS:
            self._known.popitem(last=False)
        return found
