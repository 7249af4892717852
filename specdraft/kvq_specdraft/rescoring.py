"""The model's own word on lines that another method wrote: one pass over all of them, as a tree."""

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from math import inf, log

from kvq_runtime.alternatives import AlternativesRequest, Line, log_normalizers
from kvq_runtime.backends import C
from kvq_runtime.branch import Branch
from kvq_runtime.passes import Work

# A line is cut before a token the model itself would hardly write there.
LEAST_LOGPROB = log(0.002)
# Lines as alike as this say the same to who reads them.
ALIKE = 0.95


def rescored(
    branch: Branch[C], lines: list[Line], asked: AlternativesRequest
) -> Work[C, list[Line]]:
    """The lines with true log-probabilities, likeliest first, cut where these collapse.

    A line of an infinite score, plain greedy decoding, stays whole and first, and under a grammar
    all stay whole. Lines share the rows
    of what they begin with alike; rows of the branch before this are forgotten. Of lines that are
    cut, none is shorter than one token.
    """
    branch.rewind(0)
    rows, ids, parents = _tree(lines)
    yield from branch.extend(ids, parents, rows=range(-1, len(ids)))
    logits, normalizers = branch.logits, log_normalizers(branch.logits)
    whole = list[Line]()
    for line, path in zip(lines, rows, strict=True):
        own = [
            float(logits[row + 1, token] - normalizers[row + 1])
            for row, token in zip(path, line.ids, strict=True)
        ]
        cuts = () if asked.options.grammar else enumerate(own)
        kept = next((n for n, one in cuts if n and one < LEAST_LOGPROB), len(own))
        scored = replace(line, logprobs=tuple(own))
        if line.score == inf:
            whole.append(scored)
        else:
            cut = asked.shortened(scored, kept)
            whole.append(replace(cut, score=sum(cut.logprobs)))
    return sorted(whole, key=lambda line: -line.score)


def distinct(lines: list[Line], asked: AlternativesRequest) -> list[Line]:
    """The lines that say something those before them do not: no beginning of one, not alike.

    What a line says is its text; its tokens, for a model without a tokenizer.
    """
    said, kept = list[Sequence[object]](), list[Line]()
    for line in lines:
        says = asked.finished(line).text.strip() or line.ids
        if not any(_alike(says, before) for before in said):
            said.append(says)
            kept.append(line)
    return kept


def _alike(says: Sequence[object], before: Sequence[object]) -> bool:
    if says == before[: len(says)]:
        return True
    return SequenceMatcher(None, says, before, autojunk=False).ratio() >= ALIKE


def _tree(lines: list[Line]) -> tuple[list[list[int]], list[int], list[int]]:
    """Rows before each token of each line; tokens of the rows, and the row each one follows."""
    places: dict[tuple[int, int], int] = {}
    before = list[list[int]]()
    for line in lines:
        row, path = -1, [-1]
        # The last token's own row would say only what comes after it.
        for token in line.ids[:-1]:
            row = places.setdefault((row, token), len(places))
            path.append(row)
        before.append(path[: len(line.ids)])
    return before, [token for _, token in places], [parent for parent, _ in places]
