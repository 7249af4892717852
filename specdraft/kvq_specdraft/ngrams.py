"""Counts the runs of 2, 3 and 4 tokens in a person's own files, for the writer `superposed`.

The paper (arXiv 2405.18400) counts 200 thousand web documents. Here the counts copy the user's own
text in small pieces, so they stay in one file on this machine, which may be removed at any time.
Contexts are 64-bit hashes, sorted, in a mapped file. Each has its 32 most frequent next tokens,
with counts as 8-bit logarithms (within 2.2 %).
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import DataError
from kvq.files import replace_file

ORDERS = (2, 3, 4)
# The weights of 2-, 3- and 4-grams in the paper.
WEIGHTS = {2: 0.01, 3: 0.04, 4: 0.15}
MOST_TOKENS = 16_000_000
MOST_CONTINUATIONS = 32
# A count is stored as the nearest 2 ** (i / 16).
STEPS_PER_DOUBLING = 16

_MAGIC = b"kvqngram1\n"
_TYPES = {"contexts": "<u8", "totals": "u1", "starts": "<u4", "tokens": "<u4", "counts": "u1"}
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))

Table = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Holds an opened file; `tables[n]` has the contexts of n-grams and what followed them."""

    vocab_size: int
    tokenizer: str
    text_tokens: int
    tables: dict[int, Table]

    @classmethod
    def open(cls, path: Path | str) -> "Ngrams":
        """Maps the file. Raises `DataError` for one that cannot be read or is damaged."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                if file.readline() != _MAGIC:
                    raise DataError(f"{path} holds no n-grams; make it with `kvq ngrams build`")
                header: dict[str, Any] = json.loads(file.readline())
                start = file.tell()
            whole: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
            laid_out: dict[str, dict[str, list[int]]] = header["tables"]
            tables = {n: _table(whole[start:], laid_out[str(n)]) for n in ORDERS}
            facts = int(header["vocab_size"]), str(header["tokenizer"]), int(header["text_tokens"])
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{path} is damaged; make it again with `kvq ngrams build`") from None
        return cls(*facts, tables)

    def probabilities(self, text: Sequence[int], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns sum_n lambda_n c(ctx_n, t) / c(ctx_n) for each token t after `text`.

        Unknown runs add 0. The sum over all tokens is at most the sum of the weights.
        """
        total_probability = np.zeros(len(tokens))
        for n, table in self.tables.items():
            if len(text) < n - 1:
                continue
            context = _hashes(np.array([list(text[1 - n :])], np.int64))[0]
            contexts: NDArray[np.uint64] = table["contexts"]
            place = bisect_left(contexts, context)
            if place == len(contexts) or contexts[place] != context:
                continue
            known = slice(*table["starts"][place : place + 2])
            counts = _counts(table["counts"][known])
            total = max(float(_counts(table["totals"][place])), counts.sum())
            shares = dict(zip(table["tokens"][known].tolist(), counts / total, strict=True))
            token_shares = np.array([shares.get(token, 0.0) for token in tokens.tolist()])
            total_probability += WEIGHTS[n] * token_shares
        return total_probability


def build(
    texts: Iterable[Sequence[int]], path: Path | str, *, vocab_size: int, tokenizer: str
) -> int:
    """Counts `texts`, token ids each, into the file `path`, and returns the number of tokens.

    Texts beyond `MOST_TOKENS` are left out. `tokenizer` identifies the tokenizer of the ids. Only
    the owner can read the file. Raises `DataError` if it cannot be written.
    """
    kept, count = list[NDArray[np.int64]](), 0
    for text in texts:
        if count + len(text) > MOST_TOKENS:
            break
        kept.append(np.asarray(text, np.int64))
        count += len(text)
    tables = {n: _counted(kept, n) for n in ORDERS}
    header, parts = _laid_out(tables)
    facts = {"vocab_size": vocab_size, "tokenizer": tokenizer, "text_tokens": count}
    try:
        with replace_file(Path(path)) as file:
            file.write(_MAGIC + json.dumps(facts | {"tables": header}).encode() + b"\n")
            for part in parts:
                file.write(part)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return count


def _laid_out(tables: dict[int, Table]) -> tuple[dict[str, dict[str, list[int]]], list[bytes]]:
    """Returns where each array begins and how long it is, and the bytes of all arrays in order."""
    header: dict[str, dict[str, list[int]]] = {}
    parts, offset = list[bytes](), 0
    for n, table in tables.items():
        header[str(n)] = {}
        for name, kind in _TYPES.items():
            data = table[name].astype(kind).tobytes()
            header[str(n)][name] = [offset, len(table[name])]
            parts.append(data + bytes(-len(data) % 8))
            offset += len(parts[-1])
    return header, parts


def _table(data: NDArray[np.uint8], places: dict[str, list[int]]) -> Table:
    """Returns the arrays of one n, checked so that no look-up leaves them. Raises `ValueError`."""
    table: Table = {}
    for name, kind in _TYPES.items():
        start, length = places[name]
        end = start + length * np.dtype(kind).itemsize
        if not 0 <= start <= end <= len(data):
            raise ValueError(name)
        table[name] = data[start:end].view(kind)
    starts = table["starts"]
    ordered = len(starts) > 0 and bool(np.all(starts[1:] >= starts[:-1]))
    lengths = len(table["contexts"]) == len(table["totals"]) == len(starts) - 1
    if not (ordered and lengths and starts[-1] == len(table["tokens"]) == len(table["counts"])):
        raise ValueError("starts")
    return table


def _counted(texts: list[NDArray[np.int64]], n: int) -> Table:
    """Returns the n-grams of all texts; none crosses from one text into the next."""
    windows = [
        np.lib.stride_tricks.sliding_window_view(text, n) for text in texts if len(text) >= n
    ]
    if not windows:
        empty: Table = {name: np.zeros(0, kind) for name, kind in _TYPES.items()}
        return empty | {"starts": np.zeros(1, np.uint32)}
    contexts = np.concatenate([_hashes(rows[:, :-1]) for rows in windows])
    tokens = np.concatenate([rows[:, -1] for rows in windows]).astype(np.uint32)
    order = np.lexsort((tokens, contexts))
    contexts, tokens = contexts[order], tokens[order]
    new = np.r_[True, (contexts[1:] != contexts[:-1]) | (tokens[1:] != tokens[:-1])]
    places = np.flatnonzero(new)
    counts = np.diff(np.r_[places, len(contexts)])
    contexts, tokens = contexts[places], tokens[places]
    # The most frequent token of each context first; ties by token.
    order = np.lexsort((-counts, contexts))
    contexts, tokens, counts = contexts[order], tokens[order], counts[order]
    first = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
    lengths = np.diff(np.r_[first, len(contexts)])
    rank = np.arange(len(contexts)) - np.repeat(first, lengths)
    kept = rank < MOST_CONTINUATIONS
    return {
        "contexts": contexts[first],
        "totals": _logs(np.add.reduceat(counts, first)),
        "starts": np.r_[0, np.cumsum(np.minimum(lengths, MOST_CONTINUATIONS))].astype(np.uint32),
        "tokens": tokens[kept],
        "counts": _logs(counts[kept]),
    }


def _hashes(contexts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns one hash uint64 [N] for each row of [N, n - 1] tokens."""
    mixed = np.full(len(contexts), contexts.shape[1], np.uint64)
    for column in contexts.T:
        mixed = (mixed ^ column.astype(np.uint64)) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX[1]
    return mixed ^ (mixed >> np.uint64(32))


def _logs(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.minimum(np.rint(STEPS_PER_DOUBLING * np.log2(counts)), 255).astype(np.uint8)


def _counts(logs: NDArray[np.uint8] | np.uint8) -> NDArray[np.float64]:
    return np.exp2(np.asarray(logs, np.float64) / STEPS_PER_DOUBLING)
