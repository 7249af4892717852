"""The writer `branches`: alternatives are rows of one batched pass, which read the weights once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.answer.alternatives import AlternativesRequest, Line, log_normalizers, step
from kvq_runtime.answer.sampling import largest, sample
from kvq_runtime.backends import C
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.passes import Work

Choose = Callable[[list[Line], NDArray[np.float32], AlternativesRequest], list[Line]]


@dataclass(slots=True)
class Branches:
    """Writes up to k alternatives side by side, one row of a pass each.

    Args:
        kind: `first`, the default: the k likeliest first tokens, each continued greedily; the first
            line is plain greedy decoding. `samples`: k answers drawn with the requested sampling.
            `beam`: beam search with patience (arXiv 2204.05424).
        patience: Only for `beam`: the search goes on until `patience` times k beams have ended;
            above 0. Default 1.
    """

    kind: str = "first"
    patience: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"branches: kind={self.kind} is unknown; possible: {', '.join(KINDS)}")
        if not self.patience > 0:
            raise UsageError(f"branches: patience={self.patience} is not possible: give above 0")

    def writing(self, branch: Branch[C], request: AlternativesRequest) -> Work[C, list[Line]]:
        """Returns the lines: for `first` the greedy one, then the likeliest first."""
        request.need_rows(request.count * (request.longest - 1), "branches")
        choose = KINDS[self.kind]
        unfinished = [request.start] * (request.count if self.kind == "samples" else 1)
        done = list[Line]()
        enough = self.patience * request.count if self.kind == "beam" else inf
        # After a first token each line goes on with the likeliest one.
        greedy = self.kind == "first" and request.start.choices is None
        exact_rows = int(greedy and not request.exact)
        while unfinished and len(done) < enough and not request.cancel():
            unfinished, logits = yield from step(branch, unfinished, exact_rows)
            lines = choose(unfinished, logits, request)
            done += [line for line in lines if line.finish_reason is not None]
            unfinished = [line for line in lines if line.finish_reason is None]
        return sorted([*done, *unfinished], key=lambda line: -line.score)[: request.count]


def _first(
    lines: list[Line], logits: NDArray[np.float32], request: AlternativesRequest
) -> list[Line]:
    """Extends each line by its likeliest token; a single empty line becomes k lines."""
    if lines[0].ids:
        tokens = [
            int(np.argmax(line.so_far.masked(row))) for line, row in zip(lines, logits, strict=True)
        ]
        return _extended(lines, logits, tokens, request)
    tokens = best(lines[0].so_far.masked(logits[0]), request.count)
    # An infinite score stays above all others, whatever is added to it.
    greedy = replace(lines[0], score=inf)
    starts = [greedy, *[lines[0]] * (len(tokens) - 1)]
    return _extended(
        starts, np.broadcast_to(logits[0], (len(tokens), len(logits[0]))), tokens, request
    )


def _samples(
    lines: list[Line], logits: NDArray[np.float32], request: AlternativesRequest
) -> list[Line]:
    """Extends each line by a token that is drawn for it."""
    tokens = [
        sample(
            row, request.options.sampling, (*request.history, *line.ids), request.generator,
            line.choices,
        )
        for line, row in zip(lines, logits, strict=True)
    ]  # fmt: skip
    return _extended(lines, logits, tokens, request)


def _extended(
    lines: list[Line], logits: NDArray[np.float32], tokens: list[int], request: AlternativesRequest
) -> list[Line]:
    """Returns each line with its token of `tokens` added."""
    logprobs = logits[np.arange(len(lines)), tokens] - log_normalizers(logits)
    rows = zip(lines, tokens, logprobs.tolist(), strict=True)
    return [request.grow(line, token, logprob) for line, token, logprob in rows]


def _beam(
    lines: list[Line], logits: NDArray[np.float32], request: AlternativesRequest
) -> list[Line]:
    """Returns the k best longer lines that go on, and those better than these that end."""
    candidates = list[tuple[float, int, int, float]]()
    rows = zip(lines, logits, log_normalizers(logits).tolist(), strict=True)
    for number, (line, row, normalizer) in enumerate(rows):
        for token in best(line.so_far.masked(row), 2 * request.count):
            logprob = float(row[token]) - normalizer
            candidates.append((-line.score - logprob, number, token, logprob))
    chosen, unfinished = list[Line](), 0
    for _, number, token, logprob in sorted(candidates):
        chosen.append(request.grow(lines[number], token, logprob))
        unfinished += chosen[-1].finish_reason is None
        if unfinished == request.count:
            break
    return chosen


KINDS: dict[str, Choose] = {"first": _first, "samples": _samples, "beam": _beam}


def best(scores: NDArray[np.floating], count: int) -> list[int]:
    """Returns places of the `count` largest scores, largest first, ties by place, none of -inf."""
    if count < len(scores):
        return largest(scores, count).tolist()
    places = np.argsort(-scores, kind="stable")
    return places[np.isfinite(scores[places])].tolist()
