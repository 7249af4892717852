"""An n-gram model over a tokenizer's ids: what infilling scores must beat. Needs no training loop.

Stupid backoff (Brants et al., EMNLP 2007): the share of a token after the longest context seen,
and 0.4 of the share after a context shorter by one for tokens not seen there. All n-grams lie
sorted as pairs of 64-bit keys, so a context is a range found by bisection and no table of counts
is built: 16 bytes per token of text.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvq.errors import DataError
from kvq_models.tokenizer import Tokenizer

ORDER = 6
BACKOFF = 0.4
# About 260 MB of keys; sorting them needs twice as much again.
MOST_TOKENS = 16_000_000

Integers = NDArray[np.uint64]


class NGram:
    """n-grams of up to six tokens. Texts do not run into each other."""

    def __init__(self, texts: Iterable[Sequence[int]], vocab_size: int) -> None:
        """Raises `DataError` for a vocabulary that does not fit three tokens into 64 bits."""
        self._bits = int(vocab_size).bit_length()
        if 3 * self._bits > 64:
            raise DataError(f"a vocabulary of {vocab_size} tokens is too large for the n-grams")
        self._separator = vocab_size
        gap = np.full(ORDER, vocab_size, np.uint64)
        parts = [part for ids in texts for part in (np.array(ids, np.uint64), gap)]
        tokens = np.concatenate([*parts, gap])
        triples = self._key(tokens[:-2], tokens[1:-1], tokens[2:])
        # What begins between two texts is no n-gram.
        begins = tokens[: 1 - ORDER] != vocab_size
        high, low = triples[:-3][begins], triples[3:][begins]
        order = np.lexsort((low, high))
        self._high, self._low = high[order], low[order]
        self._single = self._counted(self._high, 0)

    @property
    def tokens(self) -> int:
        """Tokens learnt."""
        return len(self._high)

    def predict(self, context: Sequence[int]) -> int | None:
        """The likeliest token after `context`; None for a model of no text.

        Of equals it is the one that a longer context knows, then the one with the lowest id.
        """
        seen = np.zeros(0, np.uint64)
        best, choice, weight = 0.0, None, 1.0
        for length in range(min(len(context), ORDER - 1), -1, -1):
            if best >= weight:
                break
            tokens, counts = self._continuations(context[len(context) - length :])
            total = counts.sum()
            fresh = ~np.isin(tokens, seen)
            seen = np.concatenate([seen, tokens])
            tokens, counts = tokens[fresh], counts[fresh]
            if len(tokens) and weight * counts.max() / total > best:
                best, choice = weight * counts.max() / total, int(tokens[counts.argmax()])
            weight *= BACKOFF
        return choice

    def _continuations(self, context: Sequence[int]) -> tuple[Integers, NDArray[np.int64]]:
        """(tokens, counts) of what follows `context`, in the order of their ids."""
        if not context:
            return self._single
        first, last = 0, len(self._high)
        for keys, part in ((self._high, context[:3]), (self._low, context[3:])):
            view = keys[first:last]
            low, high = self._range(part)
            last = first + int(np.searchsorted(view, high, side="right"))
            first += int(np.searchsorted(view, low))
        keys = self._high if len(context) < 3 else self._low
        return self._counted(keys[first:last], len(context) % 3)

    def _counted(self, keys: Integers, slot: int) -> tuple[Integers, NDArray[np.int64]]:
        """(tokens, counts) of the tokens in one slot (0 to 2) of sorted keys."""
        shift = np.uint64((2 - slot) * self._bits)
        tokens = (keys >> shift) & np.uint64((1 << self._bits) - 1)
        tokens, counts = np.unique(tokens, return_counts=True)
        inside = tokens != self._separator
        return tokens[inside], counts[inside]

    def _key(self, first: Integers, second: Integers, third: Integers) -> Integers:
        """Three tokens in one number, in their order."""
        bits = np.uint64(self._bits)
        return (first << bits << bits) | (second << bits) | third

    def _range(self, context: Sequence[int]) -> tuple[Integers, Integers]:
        """Lowest and highest key of triples that begin with `context` (0 to 3 tokens)."""
        most = (1 << self._bits) - 1
        low = np.array([*context, 0, 0, 0], np.uint64)
        high = np.array([*context, most, most, most], np.uint64)
        return self._key(*low[:3]), self._key(*high[:3])


class LineBaseline:
    """Completes a line from the n-grams of the text before it.

    Lines are encoded one by one, in training as in use, so that a line's first token never
    depends on the line before: the n-grams see exactly the tokens they know.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Iterable[str],
        progress: Callable[[int, int], None],
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """Learns `texts` up to `most_tokens` tokens. Raises `DataError` when there are none."""
        self._tokenizer = tokenizer
        self._ngram = NGram(self._encoded(texts, most_tokens, progress), tokenizer.vocab_size)
        if not self._ngram.tokens:
            raise DataError("the baseline's files hold no text")

    @property
    def tokens(self) -> int:
        """Tokens learnt."""
        return self._ngram.tokens

    def complete(self, prefix: str, max_tokens: int) -> str:
        """What follows `prefix`, which ends with a line's end, up to the next line's end."""
        near = prefix.splitlines(keepends=True)[-(ORDER - 1) :]
        ids = self._ids("".join(near))
        line = b""
        for _ in range(max_tokens):
            token = self._ngram.predict(ids[-(ORDER - 1) :])
            if token is None:
                break
            ids.append(token)
            line += self._tokenizer.token_bytes(token, special=False)
            if b"\n" in line:
                break
        return line.partition(b"\n")[0].decode("utf-8", errors="replace")

    def _encoded(
        self, texts: Iterable[str], most_tokens: int, progress: Callable[[int, int], None]
    ) -> Iterator[list[int]]:
        count = 0
        for text in texts:
            ids = self._ids(text)[: most_tokens - count]
            count += len(ids)
            yield ids
            progress(count, most_tokens)
            if count == most_tokens:
                return

    def _ids(self, text: str) -> list[int]:
        lines = text.splitlines(keepends=True)
        return [token for line in lines for token in self._tokenizer.encode(line)]
