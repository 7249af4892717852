"""A file frozen while somebody types in it: the typed text goes on from the end of the prompt.

EFIM (arXiv 2505.21889): prefix and suffix stay what they were when typing began, and what was
typed since stands where the middle is written. Typing then appends to the prompt, and a backspace
within it goes back; nothing in the cache precedes a change on its left. The last word or signs
before the cursor when a burst begins, and the blanks before them, are typed text already: where
they end inside a token, that is generated again, and the frozen file stays. Knows texts only.
"""

import re

# Bytes, of which no tokenizer makes more tokens.
MOST_TYPED = 256
# Characters that a burst may begin with.
MOST_BEGUN = 32
_LAST = re.compile(r"\s*(?:\w+|[^\w\s]+)?\Z")


class Frozen:
    """Where the typing began; `split` says what has been typed since."""

    def __init__(self) -> None:
        self._prefix = self._suffix = ""

    def split(self, prefix: str, suffix: str) -> tuple[str, str, str]:
        """(prefix, suffix, typed) to ask with: frozen ones, and what stands behind that prefix.

        A new burst begins, with the end of `prefix` as typed, after any change but typing or
        deleting behind the frozen prefix, and when more than `MOST_TYPED` bytes have been typed.
        """
        typed = prefix[len(self._prefix) :]
        goes_on = suffix == self._suffix and prefix.startswith(self._prefix)
        if not goes_on or len(typed.encode("utf-8", "surrogatepass")) > MOST_TYPED:
            typed = _LAST.findall(prefix, max(0, len(prefix) - MOST_BEGUN))[0]
            self._prefix, self._suffix = prefix.removesuffix(typed), suffix
        return self._prefix, self._suffix, typed
