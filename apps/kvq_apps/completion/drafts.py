"""What a completion is, whoever wrote it, and what of it is worth showing.

What is shown is left by rules in a fixed order, after tabby's for a completion of one line. Loads
nothing slow: `kvq lsp` begins with it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvq_apps.completion.document import Document

DEFAULT_DRAFTS = 3
DEFAULT_TOKENS = 16
# Lines after the cursor that a suggestion must not repeat.
_LINES_BELOW = 3
MIN_CHARACTERS = 2
_CLOSERS = {")": "(", "]": "[", "}": "{"}


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


@dataclass(frozen=True, slots=True)
class Around:
    """The cursor's line before and after it, and the lines that follow."""

    before: str
    rest: str
    next_lines: tuple[str, ...] = ()


def one_line(draft: str, around: Around) -> str:
    """The first line; of what begins with a line end, nothing: the line is complete."""
    return draft.split("\n", maxsplit=1)[0].rstrip("\r")


def whole_characters(draft: str, around: Around) -> str:
    """Up to a character that was cut in the middle."""
    return draft.split("\ufffd", maxsplit=1)[0]


def not_repeated(draft: str, around: Around) -> str:
    """One of what is written over and over at the end: `ab, ab, ab` becomes `ab`.

    Letters and digits alone, and rows of one sign, stay: `1000`, `lalala` and three quotation marks
    are meant.
    """
    for size in range(2, len(draft) // 3 + 1):
        unit = draft[-size:]
        one_sign = unit == unit[0] * size
        if not one_sign and not unit.isalnum() and unit.strip() and draft.endswith(unit * 3):
            while draft.endswith(unit * 2):
                draft = draft[:-size]
            return draft
    return draft


def without_rest(draft: str, around: Around) -> str:
    """Without what the rest of the line says already: before `)` the suggestion `a, b)` is `a, b`.

    What closes a bracket of the suggestion's own stays: `len(x)` is whole.
    """
    rest = around.rest.rstrip()
    for size in range(min(len(rest), len(draft)), 0, -1):
        left = draft[:-size]
        if left + rest[:size] == draft and len(_open_brackets(left)) <= len(_open_brackets(draft)):
            return left
    return draft


def balanced(draft: str, around: Around) -> str:
    """Up to a bracket that the rest of the line closes already: in `foo(|)` it is not `a) + b`."""
    closed_by_rest = _unopened(around.rest)
    waiting = len(_open_brackets(around.before)) - closed_by_rest
    opened = 0
    for place, character in enumerate(draft):
        opened += character in _CLOSERS.values()
        if character not in _CLOSERS:
            continue
        if opened:
            opened -= 1
        elif waiting > 0:
            waiting -= 1
        elif closed_by_rest:
            return draft[:place]
    return draft


def not_below(draft: str, around: Around) -> str:
    """Nothing, when the same stands on the next line that is not blank."""
    following = next((line.strip() for line in around.next_lines if line.strip()), None)
    whole = (around.before + draft + around.rest).strip()
    return "" if following is not None and whole == following and len(whole) > 3 else draft


def trimmed(draft: str, around: Around) -> str:
    """Without white space at its end; nothing, when hardly anything is left."""
    draft = draft.rstrip()
    return draft if len(draft.strip()) >= MIN_CHARACTERS else ""


# A rule gets the suggestion and what stands around the cursor, and returns what is left of it.
RULES: tuple[Callable[[str, Around], str], ...] = (
    one_line, whole_characters, not_repeated, without_rest, balanced, not_below, trimmed,
)  # fmt: skip


def shown(draft: str, around: Around) -> str:
    """What is left of a suggestion after all rules."""
    for rule in RULES:
        draft = rule(draft, around)
        if not draft:
            return ""
    return draft


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


def _surroundings(document: Document, place: tuple[int, int]) -> Around:
    """What the rules are told of a place."""
    line, column = place
    own = document.line(line)
    below = tuple(document.line(line + 1 + i) for i in range(_LINES_BELOW))
    return Around(before=own[:column], rest=own[column:], next_lines=below)


def _open_brackets(text: str) -> list[str]:
    """Brackets of a line that are still open at its end."""
    opened = list[str]()
    for character in text:
        if character in "([{":
            opened.append(character)
        elif character in _CLOSERS and opened and opened[-1] == _CLOSERS[character]:
            opened.pop()
    return opened


def _unopened(text: str) -> int:
    """Brackets of a line that close what stands before it."""
    opened = unopened = 0
    for character in text:
        if character in _CLOSERS.values():
            opened += 1
        elif character in _CLOSERS:
            unopened += opened == 0
            opened = max(0, opened - 1)
    return unopened
