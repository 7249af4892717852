"""Token ids of a text that changes a little at every key: only changed blocks are encoded.

A text is cut into blocks after line ends. Whether the ids of the whole text are those of its blocks
depends on the tokenizer: GPT-2's takes a line end and the next line's indentation as one piece,
others do not. So the places to cut at are tried on a sample. A tokenizer that allows none encodes
the whole text each time.
"""

import re
from collections import OrderedDict

from kvq_models.tokenizer import Tokenizer

# Of the blocks whose ids are remembered. More than the texts before and after the cursor have:
# blocks are forgotten in the order of the text, so of a longer one none would be remembered.
MOST_CHARACTERS = 1 << 20

# The finest cut first: before any line that is not blank, then before a line that is not indented.
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
        self._ids_by_block: OrderedDict[str, list[int]] = OrderedDict()
        self._remembered_characters = 0
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
        ids: list[int] = []
        for block in [text] if self._cut is None else self._cut.split(text):
            block_ids = self._ids_by_block.pop(block, None)
            if block_ids is None:
                block_ids = self._tokenizer.encode(block)
                self.encoded_characters += len(block)
                self._remembered_characters += len(block)
            self._ids_by_block[block] = block_ids
            ids += block_ids
        while self._remembered_characters > MOST_CHARACTERS:
            self._remembered_characters -= len(self._ids_by_block.popitem(last=False)[0])
        return ids
