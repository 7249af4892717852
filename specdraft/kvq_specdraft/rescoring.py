"""Scores lines that another method wrote: the model reads them all in one pass, as a tree."""

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from math import inf, log

from kvq_runtime.answer.alternatives import AlternativesRequest, Line, log_normalizers
from kvq_runtime.backends import C
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.passes import Work

# A line is cut before a token to which the model gives less probability than this.
LEAST_LOGPROB = log(0.002)
# Lines whose texts are at least this similar count as the same.
ALIKE = 0.95


def rescored(
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
        length = next((n for n, logprob in cuts if n and logprob < LEAST_LOGPROB), len(logprobs))
        scored = replace(line, logprobs=tuple(logprobs))
        if line.score == inf:
            whole.append(scored)
        else:
            cut = request.shortened(scored, length)
            whole.append(replace(cut, score=sum(cut.logprobs)))
    return sorted(whole, key=lambda line: -line.score)


def distinct(lines: list[Line], request: AlternativesRequest) -> list[Line]:
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
    return SequenceMatcher(None, content, earlier, autojunk=False).ratio() >= ALIKE


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
