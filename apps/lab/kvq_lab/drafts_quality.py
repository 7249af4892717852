"""Several drafts at places in texts: how near the best of k comes to what stands there, and when.

A place is some tokens of a text; the tokens that stand there next are the truth. All methods write
at the same places, one after the other at each, so that the machine slows all or none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import Any

from kvq.errors import DataError, argument
from kvq_apps.evaluation.measurement import Measurement, OpenSession, PeakCacheUsage, Progress
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.alternatives import Alternative, Writer
from kvq_runtime.sequence.hunks import common_prefix

# A draft alone, as completion without drafts has it. The others' times are shares of its time.
GREEDY = "greedy"
METHODS = ("branches", "superposed")


@dataclass(frozen=True, slots=True)
class Place:
    """Holds the token ids before a place, and those that stand after it."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(slots=True)
class Scores:
    """Holds what the best of a method's drafts came to at every place, and their time."""

    similarity: list[float] = field(default_factory=list[float])
    leading: list[int] = field(default_factory=list[int])
    exact: list[bool] = field(default_factory=list[bool])
    ratio: list[float] = field(default_factory=list[float])

    def add(self, drafts: Sequence[Alternative], truth: str, place: Place, ratio: float) -> None:
        """Scores `drafts`; `ratio` is their time, in times of the greedy draft's."""
        lines = {draft.text.split("\n")[0].rstrip() for draft in drafts}
        self.exact.append(truth.split("\n", maxsplit=1)[0].rstrip() in lines)
        self.leading.append(max(common_prefix(draft.ids, place.after) for draft in drafts))
        matchers = (SequenceMatcher(None, draft.text, truth, autojunk=False) for draft in drafts)
        self.similarity.append(max(matcher.ratio() for matcher in matchers))
        self.ratio.append(ratio)


def places(
    tokenizer: Tokenizer, texts: Sequence[str], *, count: int, context: int, length: int, seed: int
) -> list[Place]:
    """Returns places spread over all texts, the same for the same seed. Raises `DataError`."""
    encoded = [tokenizer.encode(text) for text in texts]
    ends = [(ids, end) for ids in encoded for end in range(context, len(ids) - length)]
    if not ends:
        raise DataError(
            f"no text has {context} + {length} tokens: give longer ones, or a smaller "
            f"{argument('--context')}"
        )
    return [
        Place(tuple(ids[end - context : end]), tuple(ids[end : end + length]))
        for ids, end in Random(seed).sample(ends, min(count, len(ends)))
    ]


def drafting(
    open_session: OpenSession,
    writer: Callable[[str], Writer],
    tokenizer: Tokenizer,
    places: Sequence[Place],
    methods: Sequence[str],
    counts: Sequence[int],
    progress: Progress,
) -> Measurement:
    """Measures each method with each number of drafts; the value is the first one's best.

    Raises what the methods raise.
    """
    runs = [(GREEDY, 1), *((method, count) for method in methods for count in counts)]
    writers = {method: writer("branches" if method == GREEDY else method) for method, _ in runs}
    scores = {run: Scores() for run in runs}
    usage = PeakCacheUsage()
    with open_session() as session:
        for number, place in enumerate(places, 1):
            session.align(place.before)
            session.prefill()
            truth, greedy_s = tokenizer.decode(list(place.after)), 0.0
            for run in runs:
                since = perf_counter()
                drafts = session.drafts(run[1], len(place.after), method=writers[run[0]])
                seconds = perf_counter() - since
                greedy_s = greedy_s or seconds
                scores[run].add(drafts, truth, place, seconds / greedy_s)
            progress(number, len(places))
        usage.record(session)
    rows: list[dict[str, Any]] = [
        {
            "method": method,
            "k": count,
            "similarity": mean(score.similarity),
            "leading": mean(score.leading),
            "exact": mean(score.exact),
            "ms_ratio": median(score.ratio),
        }
        for (method, count), score in scores.items()
    ]
    best = max(row["similarity"] for row in rows if row["method"] == methods[0])
    return usage.measurement(best, "similarity", len(places), rows=rows)
