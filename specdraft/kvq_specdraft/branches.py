"""Alternatives as rows of one batched pass over one prefix: all rows read the same weights, once.

`kind=first`: the k likeliest first tokens, each continued greedily; the first line is plain greedy
decoding. `kind=samples`: k answers drawn with the sampling that was asked for. `kind=beam`: beam
search with patience (arXiv 2204.05424): it goes on until `patience` times k beams have ended.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.alternatives import AlternativesRequest, Line, log_normalizers, step
from kvq_runtime.backends import C
from kvq_runtime.branch import Branch
from kvq_runtime.passes import Work
from kvq_runtime.sampling import largest, sample

Choose = Callable[[list[Line], NDArray[np.float32], AlternativesRequest], list[Line]]


@dataclass(slots=True)
class Branches:
    """`kvq_runtime.alternatives.Writer` of up to k rows a pass."""

    kind: str = "first"
    patience: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"branches: kind={self.kind} is unknown; possible: {', '.join(KINDS)}")
        if not self.patience > 0:
            raise UsageError(f"branches: patience={self.patience} is not possible: give above 0")

    def writing(self, branch: Branch[C], asked: AlternativesRequest) -> Work[C, list[Line]]:
        """The lines: of `first` the greedy one, then the likeliest first."""
        asked.need_rows(asked.count * (asked.longest - 1), "branches")
        choose = KINDS[self.kind]
        going = [asked.start] * (asked.count if self.kind == "samples" else 1)
        done, enough = list[Line](), self.patience * asked.count if self.kind == "beam" else inf
        # After a first token each line goes on with the likeliest one.
        greedy = self.kind == "first" and asked.start.choices is None
        exact_rows = int(greedy and not asked.exact)
        while going and len(done) < enough and not asked.cancel():
            going, logits = yield from step(branch, going, exact_rows)
            grown = choose(going, logits, asked)
            done += [line for line in grown if line.finish_reason is not None]
            going = [line for line in grown if line.finish_reason is None]
        return sorted([*done, *going], key=lambda line: -line.score)[: asked.count]


def _first(
    lines: list[Line], logits: NDArray[np.float32], asked: AlternativesRequest
) -> list[Line]:
    """The likeliest next token of each; of a line of none yet, the likeliest k make k lines."""
    if lines[0].ids:
        next_ones = [
            int(np.argmax(line.allowed(own))) for line, own in zip(lines, logits, strict=True)
        ]
        return _grown(lines, logits, next_ones, asked)
    tokens = best(lines[0].allowed(logits[0]), asked.count)
    # Its score stays above all others', whatever is added to it.
    greedy = replace(lines[0], score=inf)
    starts = [greedy, *[lines[0]] * (len(tokens) - 1)]
    return _grown(starts, np.broadcast_to(logits[0], (len(tokens), len(logits[0]))), tokens, asked)


def _samples(
    lines: list[Line], logits: NDArray[np.float32], asked: AlternativesRequest
) -> list[Line]:
    """A token drawn for each."""
    tokens = [
        sample(
            own, asked.options.sampling, (*asked.history, *line.ids), asked.generator,
            line.choices,
        )
        for line, own in zip(lines, logits, strict=True)
    ]  # fmt: skip
    return _grown(lines, logits, tokens, asked)


def _grown(
    lines: list[Line], logits: NDArray[np.float32], tokens: list[int], asked: AlternativesRequest
) -> list[Line]:
    """Each line with its own token more."""
    logprobs = logits[np.arange(len(lines)), tokens] - log_normalizers(logits)
    rows = zip(lines, tokens, logprobs.tolist(), strict=True)
    return [asked.grow(line, token, logprob) for line, token, logprob in rows]


def _beam(lines: list[Line], logits: NDArray[np.float32], asked: AlternativesRequest) -> list[Line]:
    """Of all that are one token longer the k best that go on, and those better that end."""
    found = list[tuple[float, int, int, float]]()
    rows = zip(lines, logits, log_normalizers(logits).tolist(), strict=True)
    for number, (line, own, normalizer) in enumerate(rows):
        for token in best(line.allowed(own), 2 * asked.count):
            logprob = float(own[token]) - normalizer
            found.append((-line.score - logprob, number, token, logprob))
    grown, going = list[Line](), 0
    for _, number, token, logprob in sorted(found):
        grown.append(asked.grow(lines[number], token, logprob))
        going += grown[-1].finish_reason is None
        if going == asked.count:
            break
    return grown


KINDS: dict[str, Choose] = {"first": _first, "samples": _samples, "beam": _beam}


def best(scores: NDArray[np.floating], count: int) -> list[int]:
    """Places of the `count` largest scores, largest first and ties by place; none of minus inf."""
    if count < len(scores):
        return largest(scores, count).tolist()
    places = np.argsort(-scores, kind="stable")
    return places[np.isfinite(scores[places])].tolist()
