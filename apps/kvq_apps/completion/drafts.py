"""What a completion is, whoever wrote it. Loads nothing slow: `kvq lsp` begins with it."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvq_apps.completion.document import Document
from kvq_apps.completion.filters import Around, shown

DEFAULT_DRAFTS = 3
DEFAULT_TOKENS = 16
# Lines after the cursor that a suggestion must not repeat.
_LINES_BELOW = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A suggestion to show, and the model's log-probability of all that it wrote."""

    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Suggestions, the greedy one first, and what they cost: `why_not` says why there are none."""

    drafts: tuple[Suggestion, ...]
    reused_tokens: int = 0
    encoded_tokens: int = 0
    ms: float = 0.0
    why_not: str | None = None


def _surroundings(document: Document, place: tuple[int, int]) -> Around:
    """What the rules of `filters` are told of a place."""
    line, column = place
    own = document.line(line)
    below = tuple(document.line(line + 1 + i) for i in range(_LINES_BELOW))
    return Around(before=own[:column], rest=own[column:], next_lines=below)


def to_show(
    document: Document, place: tuple[int, int], written: Iterable[tuple[str, float]]
) -> list[Suggestion]:
    """What is shown of texts and their log-probabilities, each text once, those that are any."""
    around = _surroundings(document, place)
    kept: dict[str, Suggestion] = {}
    for text, logprob in written:
        if left := shown(text, around):
            kept.setdefault(left, Suggestion(text=left, logprob=logprob))
    return list(kept.values())
