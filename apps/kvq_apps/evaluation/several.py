"""Several drafts at places in texts: how near the best of k comes to the truth, and its time.

A place is `context` tokens of a text; what stands there next is the truth. All methods write at
the same places, one after the other at each, so that what the machine does to one it does to all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import Any

from kvq.config import MOST_DRAFT_TOKENS
from kvq.errors import DataError, argument
from kvq_apps.evaluation.measurement import Progress
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.alternatives import Alternative, Writer
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.hunks import common_prefix
from kvq_runtime.session import Session, unseen

Report = dict[str, Any]

# One greedy draft, as completion without drafts has it.
GREEDY = "greedy"
# Nucleus samples as the paper compares with (arXiv 2405.18400): p 0.9, nothing else.
NUCLEUS = Sampling(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0)
METHODS = (
    "branches", "branches:kind=samples", "branches:kind=beam", "superposed",
    "superposed:alpha=0.2,tau=0.5", "spliced:alpha=0.2,tau=0.5",
)  # fmt: skip


# Compared when a model is exported, at so few places that only what is clearly better counts.
CANDIDATES = (
    "branches", "branches:kind=samples", "branches:kind=beam", "superposed",
    "spliced:alpha=0.2,tau=0.5",
)  # fmt: skip
CANDIDATE_PLACES, CANDIDATE_CONTEXT = 16, 64
CANDIDATE_DRAFTS, CANDIDATE_TOKENS = 3, 10
CLEARLY_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Token ids before a place, and those that stand after it."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(slots=True)
class Scores:
    """What one method gave at every place."""

    exact: list[float] = field(default_factory=list[float])
    similarity: list[float] = field(default_factory=list[float])
    leading: list[float] = field(default_factory=list[float])
    logprob: list[float] = field(default_factory=list[float])
    overlap: list[float] = field(default_factory=list[float])
    drafts: list[float] = field(default_factory=list[float])
    ratio: list[float] = field(default_factory=list[float])

    def row(self, method: str, k: int) -> dict[str, Any]:
        """A row of the report: means, standard errors of the first two, the median of the times."""
        return {
            "method": method,
            "k": k,
            "similarity": mean(self.similarity),
            "similarity_error": _error(self.similarity),
            "leading": mean(self.leading),
            "leading_error": _error(self.leading),
            "exact": mean(self.exact),
            "logprob": mean(self.logprob),
            "overlap": mean(self.overlap),
            "drafts": mean(self.drafts),
            "ms_ratio": median(self.ratio),
        }


def places(
    tokenizer: Tokenizer, texts: Sequence[str], *, count: int, context: int, length: int, seed: int
) -> list[Place]:
    """Places spread over all texts in proportion to their length, the same for the same seed."""
    ids = [tokenizer.encode(text) for text in texts]
    starts = [(t, i) for t, own in enumerate(ids) for i in range(context, len(own) - length)]
    if not starts:
        raise DataError(
            f"no text has {context} + {length} tokens: give longer ones, or a smaller "
            f"{argument('--context')}"
        )
    chosen = Random(seed).sample(starts, min(count, len(starts)))  # noqa: S311  no secret
    return [
        Place(tuple(ids[t][i - context : i]), tuple(ids[t][i : i + length]))
        for t, i in sorted(chosen)
    ]


def measure(
    open_session: Callable[[], Session[Any]],
    writer: Callable[[str], Writer],
    tokenizer: Tokenizer,
    asked: Sequence[Place],
    methods: Sequence[str],
    counts: Sequence[int],
    progress: Progress,
) -> dict[tuple[str, int], Scores]:
    """The scores of each method and k. Raises what the methods raise."""
    length = len(asked[0].after)
    runs = [(GREEDY, 1), *((method, k) for method in methods for k in counts)]
    writers = {method: writer(method if method != GREEDY else "branches") for method, _ in runs}
    scores = {run: Scores() for run in runs}
    with open_session() as session:
        for number, place in enumerate(asked, 1):
            session.align(place.before)
            session.prefill()
            session.reseed(number)
            plain_s = 0.0
            for method, k in runs:
                started = perf_counter()
                found = session.drafts(k, length, method=writers[method], sampling=NUCLEUS)
                seconds = perf_counter() - started
                plain_s = plain_s or seconds
                _score(scores[method, k], found, place, tokenizer, seconds / plain_s)
            progress(number, len(asked))
    return scores


def candidates_compared(engine: Engine, writer: Callable[[str], Writer], text: str) -> Report:
    """Which of `CANDIDATES` writes best on this model, for its bundle to record.

    `method` is the first of them unless another's best of three is more like the text by
    `CLEARLY_ERRORS` standard errors of the difference. Raises `DataError` for a short text.
    """
    asked = places(
        engine.tokenizer, [text], count=CANDIDATE_PLACES, context=CANDIDATE_CONTEXT,
        length=CANDIDATE_TOKENS, seed=0,
    )  # fmt: skip
    scores = measure(
        lambda: session_for_drafts(engine, CANDIDATE_CONTEXT), writer, engine.tokenizer, asked,
        CANDIDATES, [CANDIDATE_DRAFTS], unseen,
    )  # fmt: skip
    found = {name: scores[name, CANDIDATE_DRAFTS].similarity for name in CANDIDATES}
    return {
        "method": clearly_best(found),
        "places": len(asked),
        "similarity": {name: mean(values) for name, values in found.items()},
    }


def clearly_best(found: Mapping[str, Sequence[float]]) -> str:
    """Of values at the same places the first name, or the best that is clearly better."""
    first, *others = found
    gains = {first: 0.0}
    for name in others:
        apart = [own - base for own, base in zip(found[name], found[first], strict=True)]
        if mean(apart) > CLEARLY_ERRORS * _error(apart):
            gains[name] = mean(apart)
    return max(gains, key=lambda name: gains[name])


def session_for_drafts(engine: Engine, context: int, **more: Any) -> Session[Any]:
    """A session with room for drafts after `context` tokens, unquantised unless `more` says."""
    tokens = context + MOST_DRAFT_TOKENS
    own: Report = {"kv": "fp", "kv_budget": f"{tokens}tok", "context_tokens": tokens}
    own["draft_tokens"] = MOST_DRAFT_TOKENS
    return engine.session(**(own | more))


def _score(
    scores: Scores, found: Sequence[Alternative], place: Place, tokenizer: Tokenizer, ratio: float
) -> None:
    truth = tokenizer.decode(place.after)
    texts = [one.text for one in found]
    line = truth.split("\n")[0]
    scores.exact.append(any(text.split("\n")[0].rstrip() == line.rstrip() for text in texts))
    scores.similarity.append(
        max(SequenceMatcher(None, text, truth, autojunk=False).ratio() for text in texts)
    )
    scores.leading.append(max(common_prefix(one.ids, place.after) for one in found))
    scores.logprob.append(max(one.logprob for one in found))
    scores.overlap.append(_overlap(found))
    scores.drafts.append(len(found))
    scores.ratio.append(ratio)


def _overlap(found: Sequence[Alternative]) -> float:
    """Of all pairs of drafts the share of places with the same token."""
    pairs = [(a.ids, b.ids) for i, a in enumerate(found) for b in found[:i]]
    shares = [
        sum(x == y for x, y in zip(a, b, strict=False)) / max(len(a), len(b), 1) for a, b in pairs
    ]
    return mean(shares) if shares else 0.0


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return (sum((x - middle) ** 2 for x in values) / (len(values) - 1) / len(values)) ** 0.5
