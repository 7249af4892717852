"""The writer `branches`: alternatives are rows of one batched pass, which read the weights once."""

from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.answer.alternatives import AlternativesRequest, Line, log_normalizers, step
from kvq_runtime.answer.sampling import largest
from kvq_runtime.backends import C
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.passes import Work


@dataclass(slots=True)
class Branches:
    """Writes the k likeliest first tokens, each continued greedily, one row of a pass each.

    The first line is plain greedy decoding. It has no options.
    """

    def writing(self, branch: Branch[C], request: AlternativesRequest) -> Work[C, list[Line]]:
        """Returns the lines: the greedy one, then the likeliest first."""
        request.need_rows(request.count * (request.longest - 1), "branches")
        unfinished, done = [request.start], list[Line]()
        # After a first token each line goes on with the likeliest one.
        exact_rows = int(request.start.choices is None and not request.exact)
        while unfinished and not request.cancel():
            unfinished, logits = yield from step(branch, unfinished, exact_rows)
            lines = _extended(unfinished, logits, request)
            done += [line for line in lines if line.finish_reason is not None]
            unfinished = [line for line in lines if line.finish_reason is None]
        return sorted([*done, *unfinished], key=lambda line: -line.score)[: request.count]


def _extended(
    lines: list[Line], logits: NDArray[np.float32], request: AlternativesRequest
) -> list[Line]:
    """Extends each line by its likeliest token; a single empty line becomes k lines."""
    if lines[0].ids:
        tokens = [
            int(np.argmax(line.so_far.masked(row))) for line, row in zip(lines, logits, strict=True)
        ]
    else:
        tokens = best(lines[0].so_far.masked(logits[0]), request.count)
        # An infinite score stays above all others, whatever is added to it.
        lines = [replace(lines[0], score=inf), *[lines[0]] * (len(tokens) - 1)]
        logits = np.broadcast_to(logits[0], (len(tokens), len(logits[0])))
    logprobs = logits[np.arange(len(lines)), tokens] - log_normalizers(logits)
    rows = zip(lines, tokens, logprobs.tolist(), strict=True)
    return [request.grow(line, token, logprob) for line, token, logprob in rows]


def best(scores: NDArray[np.floating], count: int) -> list[int]:
    """Returns places of the `count` largest scores, largest first, ties by place, none of -inf."""
    if count < len(scores):
        return largest(scores, count).tolist()
    places = np.argsort(-scores, kind="stable")
    return places[np.isfinite(scores[places])].tolist()
