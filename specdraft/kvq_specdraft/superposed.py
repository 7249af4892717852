"""Superposed Decoding (arXiv 2405.18400): k drafts for one row a pass.

What goes through the model is no token but the mixture of the k drafts' last tokens' embeddings,
each weighed by its draft's share of the score; which of the likeliest next tokens suits which
draft, n-grams of the user's own files decide. Departs from the paper: a greedy row runs beside the
mixture (`greedy=0` leaves it out), as one more row costs next to nothing here and the drafts of
small models fall below greedy; n-grams have 2 to 4 tokens (those of 5 and 6 cost memory and bring
little by the paper's own table); all drafts are rescored by the model in one last pass.

For drafts d_i of scores s_i: w = softmax(s); x = sum_i w_i E[last(d_i)]; p = softmax(logits / tau)
over the likeliest 3k tokens, renormalised; log p_f(t | d_i) = (1 - alpha) log p(t) + alpha log
p_ng(t | d_i), and where no n-gram of d_i is known (1 - alpha) log p(t) - delta; the best k of all
s_i + log p_f stay. The first tokens are the k likeliest, s_i = log p.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvq.errors import DataError, UsageError
from kvq_runtime.alternatives import AlternativesRequest, Line, step
from kvq_runtime.backends import C
from kvq_runtime.branch import Branch
from kvq_runtime.passes import Work
from kvq_runtime.sampling import sample
from kvq_specdraft.branches import best
from kvq_specdraft.ngrams import Ngrams
from kvq_specdraft.rescoring import distinct, rescored

# Candidates for each draft, as in the paper's code.
WIDTH_PER_DRAFT = 3
# Local variants of each sample that is spliced.
VARIANTS = 2


@dataclass(slots=True)
class Superposed:
    """`kvq_runtime.alternatives.Writer`; `ngrams` is a file of `kvq ngrams build`.

    Defaults are the paper's for 3 drafts of 10 tokens.
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

    def writing(self, branch: Branch[C], asked: AlternativesRequest) -> Work[C, list[Line]]:
        """The greedy line, then the others by their true log-probability."""
        asked.need_rows((asked.count + self.greedy) * asked.longest, "superposed")
        (start,), logits = yield from step(branch, [asked.start])
        mixture = Mixture(self, start, logits[0], asked, width=asked.count)
        return (yield from self._finished(branch, asked, start, logits[0], [mixture]))

    def scores(
        self,
        line: Line,
        tokens: NDArray[np.int64],
        logp: NDArray[np.float64],
        asked: AlternativesRequest,
    ) -> NDArray[np.float64]:
        """The logarithms of p_f, float64 [N], of the candidates `tokens` after `line`."""
        own = (1 - self.alpha) * logp
        if self.alpha == 0:
            return own
        known = np.zeros(len(tokens))
        if self._store is not None:
            known = self._store.probabilities((*asked.history[-3:], *line.ids), tokens)
        if not known.any():
            return own - self.delta
        with np.errstate(divide="ignore"):
            return own + self.alpha * np.log(known)

    def _finished(
        self,
        branch: Branch[C],
        asked: AlternativesRequest,
        start: Line,
        logits: NDArray[np.float32],
        mixtures: "list[Mixture]",
        ended: Sequence[Line] = (),
    ) -> Work[C, list[Line]]:
        """Grows the mixtures, a greedy line beside them, and lets the model rank what they say.

        Lines that `ended` before there was a mixture of them are ranked, too.
        """
        self._check_vocabulary(logits.shape[-1])
        greedy = [_greedy(start, logits, asked)][: self.greedy]
        exact = WIDTH_PER_DRAFT * asked.count
        while not asked.cancel():
            going = [line for line in greedy if line.finish_reason is None]
            mixed = [mixture for mixture in mixtures if mixture.going]
            if not going and not mixed:
                break
            first = branch.rows
            table = _table(
                [([line.ids[-1]], [1.0]) for line in going] + [mix.embedding for mix in mixed]
            )
            passed = yield from branch.extend(
                table[0][:, 0].tolist(),
                [part.row for part in (*going, *mixed)],
                mixed=table,
                exact_rows=exact,
            )
            greedy = [
                _greedy(replace(line, row=first + i), passed.logits[i], asked)
                for i, line in enumerate(going)
            ] or greedy
            for i, mixture in enumerate(mixed, len(going)):
                mixture.grow(passed.logits[i], first + i)
        # What the greedy line says needs no rows of its own, nor what would come after the last.
        lines = [*ended, *(line for mixture in mixtures for line in mixture.all)]
        lines = [line for line in lines if line.ids]
        lines = [line for line in lines if all(line.ids != other.ids for other in greedy)]
        if len(mixtures) == 1:
            lines = sorted(lines, key=lambda line: -line.score)[: asked.count - len(greedy)]
        lines = yield from rescored(branch, [*greedy, *lines], asked)
        return distinct(lines, asked)[: asked.count]

    def _check_vocabulary(self, vocab_size: int) -> None:
        if self._store is not None and self._store.vocab_size != vocab_size:
            raise DataError(
                f"{self.ngrams} counts tokens of a vocabulary of {self._store.vocab_size}; this "
                f"model's has {vocab_size}: build it again with `kvq ngrams build -m MODEL`"
            )


@dataclass(slots=True)
class Spliced(Superposed):
    """Nucleus samples of `sampled` tokens, each with local variants from a mixture of its own.

    The combination of section 4.3 of arXiv 2405.18400, at one place of each sample.
    """

    sampled: int = 4

    def writing(self, branch: Branch[C], asked: AlternativesRequest) -> Work[C, list[Line]]:
        """The greedy line, then the others by their true log-probability."""
        asked.need_rows((asked.count * VARIANTS + self.greedy) * asked.longest, "spliced")
        (start,), first = yield from step(branch, [asked.start])
        going, ended = [start] * asked.count, list[Line]()
        logits = np.broadcast_to(first, (asked.count, first.shape[1]))
        for _ in range(min(self.sampled, asked.length - 1)):
            if not going or asked.cancel():
                break
            drawn = [_sampled(line, own, asked) for line, own in zip(going, logits, strict=True)]
            ended += [line for line in drawn if line.finish_reason is not None]
            going = [line for line in drawn if line.finish_reason is None]
            if going:
                going, logits = yield from step(branch, going)
        mixtures = [
            Mixture(self, line, own, asked, width=VARIANTS)
            for line, own in zip(going, logits, strict=False)
        ]
        return (yield from self._finished(branch, asked, start, first[0], mixtures, ended))


class Mixture:
    """Drafts that share one row a pass: k lines, and the row that holds their last mixture."""

    def __init__(
        self,
        method: Superposed,
        start: Line,
        logits: NDArray[np.float32],
        asked: AlternativesRequest,
        *,
        width: int,
    ) -> None:
        self.row = start.row
        self.going: list[Line] = [start]
        self._method = method
        self._asked = asked
        self._width = width
        self._done: list[Line] = []
        self._first = True
        self.grow(logits, start.row)

    @property
    def all(self) -> list[Line]:
        """Every line, finished or not."""
        return [*self._done, *self.going]

    @property
    def embedding(self) -> tuple[list[int], list[float]]:
        """Last tokens and their weights, which sum to 1; a token stands there once."""
        scores = np.array([line.score for line in self.going])
        weights = np.exp(scores - scores.max())
        shares: dict[int, float] = {}
        for line, weight in zip(self.going, weights / weights.sum(), strict=True):
            shares[line.ids[-1]] = shares.get(line.ids[-1], 0.0) + float(weight)
        return list(shares), list(shares.values())

    def grow(self, logits: NDArray[np.float32], row: int) -> None:
        """Takes the logits [V] after the mixture, which `row` holds now."""
        self.row = row
        asked, many = self._asked, WIDTH_PER_DRAFT * self._width
        allowed = [line.allowed(logits) for line in self.going]
        tokens = np.array(best(_either(allowed), many), np.int64)
        logp = log_softmax(logits[tokens] / self._method.tau)
        rows = list[NDArray[np.float64]]()
        for line, own in zip(self.going, allowed, strict=True):
            scores = logp if self._first else self._method.scores(line, tokens, logp, asked)
            rows.append(line.score + np.where(np.isfinite(own[tokens]), scores, -np.inf))
        self._first = False
        scores = np.stack(rows)
        grown = list[Line]()
        for place in best(scores.ravel(), self._width - len(self._done)):
            number, column = divmod(place, len(tokens))
            score, token = float(scores[number, column]), int(tokens[column])
            grown.append(asked.grow(self.going[number], token, float(logp[column]), score=score))
        self._done += [line for line in grown if line.finish_reason is not None]
        self.going = [line for line in grown if line.finish_reason is None]


def _table(
    parts: list[tuple[list[int], list[float]]],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and weights [T, K] of rows that mix different numbers of embeddings."""
    width = max(len(ids) for ids, _ in parts)
    table = np.zeros((len(parts), width), np.int64), np.zeros((len(parts), width), np.float32)
    for row, (ids, weights) in enumerate(parts):
        table[0][row, : len(ids)] = ids
        table[1][row, : len(ids)] = weights
    return table


def _either(allowed: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Logits of what any line may take; all take the same wherever nothing is forced."""
    return allowed[0] if all(own is allowed[0] for own in allowed) else np.maximum.reduce(allowed)


def _greedy(line: Line, logits: NDArray[np.float32], asked: AlternativesRequest) -> Line:
    return asked.grow(line, int(np.argmax(line.allowed(logits))), 0.0, score=inf)


def _sampled(line: Line, logits: NDArray[np.float32], asked: AlternativesRequest) -> Line:
    history = (*asked.history, *line.ids)
    sampling, allowed = asked.options.sampling, line.choices
    return asked.grow(line, sample(logits, sampling, history, asked.generator, allowed), 0.0)


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Natural logarithms of softmax(logits) [N]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
