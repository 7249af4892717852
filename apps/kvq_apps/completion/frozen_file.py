"""Freezes a file while somebody types in it: the typed text is appended to the prompt.

EFIM (arXiv 2505.21889): prefix and suffix stay what they were when typing began, and the text typed
since then stands where the middle is written. Typing then appends to the prompt, a backspace goes
back, and nothing in the cache precedes a change on its left. When typing begins, the last word or
signs before the cursor and the blanks before them count as typed: where they end inside a token,
that token is generated again, and the frozen file stays. Knows texts only.
"""

import re

# In bytes, because no tokenizer makes more tokens of them.
MOST_TYPED = 256
# Most characters before the cursor that count as typed when typing begins.
MOST_BEGUN = 32
_LAST = re.compile(r"\s*(?:\w+|[^\w\s]+)?\Z")


class FrozenFile:
    """Remembers where the typing began; `split` says what has been typed since."""

    def __init__(self) -> None:
        self._prefix = self._suffix = ""

    def split(self, prefix: str, suffix: str) -> tuple[str, str, str]:
        """Returns (prefix, suffix, typed): the frozen texts, and what stands after that prefix.

        The file is frozen anew after any change but typing or deleting after the frozen prefix, and
        when more than `MOST_TYPED` bytes have been typed.
        """
        typed = prefix[len(self._prefix) :]
        continues = suffix == self._suffix and prefix.startswith(self._prefix)
        if not continues or len(typed.encode("utf-8", "surrogatepass")) > MOST_TYPED:
            typed = _LAST.findall(prefix, max(0, len(prefix) - MOST_BEGUN))[0]
            self._prefix, self._suffix = prefix.removesuffix(typed), suffix
        return self._prefix, self._suffix, typed
