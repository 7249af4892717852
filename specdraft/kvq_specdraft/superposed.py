"""The writer `superposed`: several drafts for one row a pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from kvq.errors import DataError, UsageError
from kvq_runtime.answer.alternatives import AlternativesRequest, Line, log_normalizers, step
from kvq_runtime.backends import C
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.passes import Work
from kvq_specdraft.branches import best
from kvq_specdraft.ngrams import Ngrams

# Candidate tokens for each draft, as in the paper's code.
WIDTH_PER_DRAFT = 3
# A line is cut before a token to which the model gives less probability than this.
_LEAST_LOGPROB = log(0.002)
# Lines whose texts are at least this similar count as the same.
_ALIKE = 0.95


@dataclass(slots=True)
class Superposed:
    """Writes k drafts with one row of a pass, whose input is a mixture of their last tokens.

    Superposed Decoding (arXiv 2405.18400). The input of the row is the mean of the embeddings of
    the k drafts' last tokens, weighted by the drafts' scores. N-grams of the user's own files
    decide which of the likeliest next tokens suits which draft.

    For drafts d_i with scores s_i: w = softmax(s); x = sum_i w_i E[last(d_i)]; p = softmax(logits /
    tau) over the likeliest 3k tokens, renormalised; log p_f(t | d_i) = (1 - alpha) log p(t) + alpha
    log p_ng(t | d_i), or (1 - alpha) log p(t) - delta where no n-gram of d_i is known. The best k
    of all s_i + log p_f stay. The first tokens are the k likeliest, with s_i = log p.

    It departs from the paper in three ways. A greedy row runs beside the mixture, as one more row
    costs little here and the drafts of small models are worse than greedy ones. N-grams have 2 to 4
    tokens, since those of 5 and 6 cost memory and help little. The model rescores all drafts in one
    last pass.

    Args:
        alpha: Weight of the n-grams, 0 up to, not including, 1. Default 0.54, the paper's for 3
            drafts of 10 tokens, as the next two.
        tau: Temperature of the model's probabilities, above 0. Default 0.06.
        delta: Natural log-probability that a draft without a known n-gram loses, 0 or more. Default
            200.
        ngrams: File that `kvq ngrams build` made; empty, the default: no n-grams.
        greedy: 1, the default: a greedy row runs beside the mixture; 0: it does not.
    """

    alpha: float = 0.54
    tau: float = 0.06
    delta: float = 200.0
    ngrams: str = ""
    greedy: int = 1
    _store: Ngrams | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not (0 <= self.alpha < 1 and self.tau > 0 and self.delta >= 0):
            raise UsageError(
                f"superposed: alpha={self.alpha}, tau={self.tau}, delta={self.delta} are not "
                "possible: give alpha from 0 up to, not including, 1, tau above 0, delta 0 or more"
            )
        if self.ngrams:
            self._store = Ngrams.open(self.ngrams)

    def writing(self, branch: Branch[C], request: AlternativesRequest) -> Work[C, list[Line]]:
        """Returns the greedy line, then the others by their true log-probability."""
        request.need_rows((request.count + self.greedy) * request.longest, "superposed")
        (start,), logits = yield from step(branch, [request.start])
        self._check_vocabulary(logits.shape[-1])
        greedy = [_greedy(start, logits[0], request)][: self.greedy]
        mixture = Mixture(self, start, logits[0], request)
        greedy = yield from self._grow(branch, request, greedy, mixture)
        # A line equal to the greedy one needs no rows.
        lines = [line for line in mixture.all if line.ids]
        lines = [line for line in lines if all(line.ids != same.ids for same in greedy)]
        lines = sorted(lines, key=lambda line: -line.score)[: request.count - len(greedy)]
        lines = yield from _rescored(branch, [*greedy, *lines], request)
        return _distinct(lines, request)[: request.count]

    def scores(
        self,
        line: Line,
        tokens: NDArray[np.int64],
        logp: NDArray[np.float64],
        request: AlternativesRequest,
    ) -> NDArray[np.float64]:
        """Returns log p_f, float64 [N], of the candidates `tokens` after `line`."""
        model_part = (1 - self.alpha) * logp
        if self.alpha == 0:
            return model_part
        known = np.zeros(len(tokens))
        if self._store is not None:
            known = self._store.probabilities((*request.history[-3:], *line.ids), tokens)
        if not known.any():
            return model_part - self.delta
        with np.errstate(divide="ignore"):
            return model_part + self.alpha * np.log(known)

    def _grow(
        self,
        branch: Branch[C],
        request: AlternativesRequest,
        greedy: list[Line],
        mixture: "Mixture",
    ) -> Work[C, list[Line]]:
        """Grows the mixture to its end and returns the greedy line that grew beside it, if any."""
        exact = WIDTH_PER_DRAFT * request.count
        while not request.cancel():
            unfinished = [line for line in greedy if line.finish_reason is None]
            mixed = [mixture] if mixture.unfinished else []
            if not unfinished and not mixed:
                break
            first = branch.rows
            table = _table(
                [([line.ids[-1]], [1.0]) for line in unfinished] + [mix.embedding for mix in mixed]
            )
            passed = yield from branch.extend(
                table[0][:, 0].tolist(),
                [part.row for part in (*unfinished, *mixed)],
                mixed=table,
                exact_rows=exact,
            )
            greedy = [
                _greedy(replace(line, row=first + i), passed.logits[i], request)
                for i, line in enumerate(unfinished)
            ] or greedy
            if mixed:
                mixture.grow(passed.logits[-1], branch.rows - 1)
        return greedy

    def _check_vocabulary(self, vocab_size: int) -> None:
        if self._store is not None and self._store.vocab_size != vocab_size:
            raise DataError(
                f"{self.ngrams} counts tokens of a vocabulary of {self._store.vocab_size}; this "
                f"model's has {vocab_size}: build it again with `kvq ngrams build -m MODEL`"
            )


class Mixture:
    """Holds drafts that share one row a pass, and the row of their last mixture."""

    def __init__(
        self,
        method: Superposed,
        start: Line,
        logits: NDArray[np.float32],
        request: AlternativesRequest,
    ) -> None:
        self.row = start.row
        self.unfinished: list[Line] = [start]
        self._method = method
        self._request = request
        self._done: list[Line] = []
        self._first = True
        self.grow(logits, start.row)

    @property
    def all(self) -> list[Line]:
        """Returns all lines, finished or not."""
        return [*self._done, *self.unfinished]

    @property
    def embedding(self) -> tuple[list[int], list[float]]:
        """Returns the distinct last tokens and their weights, which sum to 1."""
        scores = np.array([line.score for line in self.unfinished])
        weights = np.exp(scores - scores.max())
        shares: dict[int, float] = {}
        for line, weight in zip(self.unfinished, weights / weights.sum(), strict=True):
            shares[line.ids[-1]] = shares.get(line.ids[-1], 0.0) + float(weight)
        return list(shares), list(shares.values())

    def grow(self, logits: NDArray[np.float32], row: int) -> None:
        """Extends the lines by the logits [V] after the mixture, which is now in row `row`."""
        self.row = row
        request = self._request
        allowed = [line.so_far.masked(logits) for line in self.unfinished]
        count = WIDTH_PER_DRAFT * request.count
        tokens = np.array(best(_allowed_by_any(allowed), count), np.int64)
        logp = log_softmax(logits[tokens] / self._method.tau)
        rows = list[NDArray[np.float64]]()
        for line, row_logits in zip(self.unfinished, allowed, strict=True):
            scores = logp if self._first else self._method.scores(line, tokens, logp, request)
            rows.append(line.score + np.where(np.isfinite(row_logits[tokens]), scores, -np.inf))
        self._first = False
        scores = np.stack(rows)
        lines = list[Line]()
        for place in best(scores.ravel(), request.count - len(self._done)):
            number, column = divmod(place, len(tokens))
            score, token = float(scores[number, column]), int(tokens[column])
            line = self.unfinished[number]
            lines.append(request.grow(line, token, float(logp[column]), score=score))
        self._done += [line for line in lines if line.finish_reason is not None]
        self.unfinished = [line for line in lines if line.finish_reason is None]


def _table(
    parts: list[tuple[list[int], list[float]]],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns token ids and weights [T, K] of rows that mix different numbers of embeddings."""
    width = max(len(ids) for ids, _ in parts)
    table = np.zeros((len(parts), width), np.int64), np.zeros((len(parts), width), np.float32)
    for row, (ids, weights) in enumerate(parts):
        table[0][row, : len(ids)] = ids
        table[1][row, : len(ids)] = weights
    return table


def _allowed_by_any(allowed: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Returns logits of the tokens that any line may take; usually all lines may take the same."""
    return allowed[0] if all(row is allowed[0] for row in allowed) else np.maximum.reduce(allowed)


def _greedy(line: Line, logits: NDArray[np.float32], request: AlternativesRequest) -> Line:
    return request.grow(line, int(np.argmax(line.so_far.masked(logits))), 0.0, score=inf)


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Returns the natural logarithms of softmax(logits) [N]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _rescored(
    branch: Branch[C], lines: list[Line], request: AlternativesRequest
) -> Work[C, list[Line]]:
    """Returns the lines with true log-probabilities, likeliest first, cut where these collapse.

    A line with an infinite score, plain greedy decoding, stays whole and first. With a grammar all
    lines stay whole. No line is cut below one token. Lines share the rows of a common beginning;
    earlier rows of the branch are forgotten.
    """
    branch.rewind(0)
    rows, ids, parents = _tree(lines)
    yield from branch.extend(ids, parents, rows=range(-1, len(ids)))
    logits, normalizers = branch.logits, log_normalizers(branch.logits)
    whole = list[Line]()
    for line, path in zip(lines, rows, strict=True):
        logprobs = [
            float(logits[row + 1, token] - normalizers[row + 1])
            for row, token in zip(path, line.ids, strict=True)
        ]
        cuts = () if request.options.grammar else enumerate(logprobs)
        length = next((n for n, logprob in cuts if n and logprob < _LEAST_LOGPROB), len(logprobs))
        scored = replace(line, logprobs=tuple(logprobs))
        if line.score == inf:
            whole.append(scored)
        else:
            cut = request.shortened(scored, length)
            whole.append(replace(cut, score=sum(cut.logprobs)))
    return sorted(whole, key=lambda line: -line.score)


def _distinct(lines: list[Line], request: AlternativesRequest) -> list[Line]:
    """Returns the lines without those that are the beginning of an earlier line, or similar to one.

    Lines are compared by their text, or by their tokens for a model without a tokenizer.
    """
    contents, kept = list[Sequence[object]](), list[Line]()
    for line in lines:
        content = request.finished(line).text.strip() or line.ids
        if not any(_similar(content, earlier) for earlier in contents):
            contents.append(content)
            kept.append(line)
    return kept


def _similar(content: Sequence[object], earlier: Sequence[object]) -> bool:
    if content == earlier[: len(content)]:
        return True
    return SequenceMatcher(None, content, earlier, autojunk=False).ratio() >= _ALIKE


def _tree(lines: list[Line]) -> tuple[list[list[int]], list[int], list[int]]:
    """Returns the rows before each token of each line, the tokens of the rows and their parents."""
    places: dict[tuple[int, int], int] = {}
    before = list[list[int]]()
    for line in lines:
        row, path = -1, [-1]
        # The row of the last token would only tell what comes after it.
        for token in line.ids[:-1]:
            row = places.setdefault((row, token), len(places))
            path.append(row)
        before.append(path[: len(line.ids)])
    return before, [token for _, token in places], [parent for parent, _ in places]
