"""What a completion is, and the rules for which part of it is worth showing.

The rules apply in a fixed order, after tabby's for a completion of one line. Nothing slow is
imported, since `kvq lsp` begins with this module.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

from kvq_apps.completion.document import TextDocument

Steps = tuple[tuple[int, float], ...]

DEFAULT_DRAFTS = 3
DEFAULT_TOKENS = 16
# Most tokens of a suggestion that is a block's body.
BLOCK_TOKENS = 48
# Lines after the cursor that a suggestion must not repeat, and blank lines before it with which a
# block may begin.
_LINES_BELOW = _LINES_ABOVE = 3
_DOCSTRING = re.compile(r"""\s*(\"{3}|'{3}).+\1\s*$""")
# What ends a line that opens a block, and what begins a line that does not.
_OPENERS, _COMMENTS = (":", "{"), ("#", "//", "/*", "*", '"', "'")
MIN_CHARACTERS = 2
_WORD_AT_END = re.compile(r"\w+$")
# The least log-probability of what is shown to somebody who did not ask: a probability of 0.7.
LIKELY_COMPLETION = -0.36
_CLOSERS = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Holds a suggestion to show, and the model's log-probability of all that it wrote.

    `steps` are pairs: characters up to the end of a token, log-probability of the text up to there.
    Without steps nobody knows how likely a part of the text is.
    """

    text: str
    logprob: float
    steps: Steps = ()

    def after(self, characters: int) -> "Suggestion":
        """Returns what remains when so many characters are typed: they are certain then."""
        ends = ((0, 0.0), *self.steps)
        certain = next((logprob for end, logprob in ends if end >= characters), 0.0)
        rest = tuple(
            (end - characters, logprob - certain) for end, logprob in self.steps if end > characters
        )
        return Suggestion(text=self.text[characters:], logprob=self.logprob - certain, steps=rest)

    def likely_part(self, least_logprob: float = LIKELY_COMPLETION) -> "Suggestion":
        """Returns the longest beginning that has at least this log-probability.

        It ends where a word does, or a line if it has several. It is empty if hardly anything is
        likely.
        """
        likely = takewhile(lambda step: step[1] >= least_logprob, self.steps)
        length, logprob = max(likely, default=(0, 0.0))
        if not self.steps or length >= len(self.text):
            return self
        part, following = self.text[:length], self.text[length]
        if _WORD_AT_END.match(following):
            part = _WORD_AT_END.sub("", part)
        if following != "\n" and "\n" in part:
            part = part.rpartition("\n")[0]
        return Suggestion(text=without_blank_end(part), logprob=logprob, steps=self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Holds suggestions, the greedy one first, and their cost.

    `why_not` says why there are none.
    """

    drafts: tuple[Suggestion, ...]
    reused_tokens: int = 0
    encoded_tokens: int = 0
    ms: float = 0.0
    why_not: str | None = None

    def likely_part(self, least_logprob: float = LIKELY_COMPLETION) -> "Completion":
        """Returns the likely part of each suggestion, and of equal ones the first."""
        parts: dict[str, Suggestion] = {}
        for draft in self.drafts:
            part = draft.likely_part(least_logprob)
            parts.setdefault(part.text, part)
        parts.pop("", None)
        why_not = self.why_not if parts or not self.drafts else "unlikely"
        return replace(self, drafts=tuple(parts.values()), why_not=why_not)


@dataclass(frozen=True, slots=True)
class CursorContext:
    """Holds the cursor's line before and after the cursor, and the next line that is not blank.

    `indent`: the lines of a block that begins here have so many spaces at least; 0: none begins.
    """

    before: str
    rest: str
    next_filled_line: str = ""
    indent: int = 0


def first_line(draft: str, context: CursorContext) -> str:
    """Returns the first line; nothing if that is empty, since the line is complete then."""
    return draft.split("\n", maxsplit=1)[0].rstrip("\r")


def without_cut_character(draft: str, context: CursorContext) -> str:
    """Cuts the text at a character that is incomplete."""
    return draft.split("\ufffd", maxsplit=1)[0]


def without_repetition(draft: str, context: CursorContext) -> str:
    """Keeps one of what is repeated at the end: `ab, ab, ab` becomes `ab`.

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


def without_rest_of_line(draft: str, context: CursorContext) -> str:
    """Drops what the rest of the line says already: before `)`, `a, b)` becomes `a, b`.

    What closes a bracket of the suggestion itself stays: `len(x)` is whole.
    """
    rest = context.rest.rstrip()
    for size in range(min(len(rest), len(draft)), 0, -1):
        kept = draft[:-size]
        if kept + rest[:size] == draft and len(_open_brackets(kept)) <= len(_open_brackets(draft)):
            return kept
    return draft


def without_closed_bracket(draft: str, context: CursorContext) -> str:
    """Cuts at a bracket that is already closed after the cursor: in `foo(|)`, `a) + b` becomes `a`.

    Brackets that the rest of the line closes may have been opened before the cursor. Those that the
    next line begins with were opened above.
    """
    closed_by_rest = _count_unopened(context.rest)
    unclosed = len(_open_brackets(context.before)) - closed_by_rest
    if not context.rest.strip() and context.next_filled_line.lstrip()[:1] in _CLOSERS:
        closed_by_rest += 1
    opened = 0
    for place, character in enumerate(draft):
        opened += character in _CLOSERS.values()
        if character not in _CLOSERS:
            continue
        if opened:
            opened -= 1
        elif unclosed > 0:
            unclosed -= 1
        elif closed_by_rest:
            return draft[:place]
    return draft


def without_next_line(draft: str, context: CursorContext) -> str:
    """Returns nothing when the next line that is not blank says the same."""
    line = (context.before + draft + context.rest).strip()
    return "" if line == context.next_filled_line.strip() and len(line) > 3 else draft


def trim(draft: str, context: CursorContext) -> str:
    """Drops white space at the end; returns nothing when hardly anything remains."""
    return without_blank_end(draft)


def without_blank_end(text: str) -> str:
    """Drops white space at the end; returns nothing when hardly anything remains."""
    text = text.rstrip()
    return text if len(text.strip()) >= MIN_CHARACTERS else ""


# A rule gets the suggestion and the cursor's context, and returns what remains of it.
RULES: tuple[Callable[[str, CursorContext], str], ...] = (
    first_line, without_cut_character, without_repetition, without_rest_of_line,
    without_closed_bracket, without_next_line, trim,
)  # fmt: skip
# Rules for a block's body, which has several lines.
BLOCK_RULES = (without_cut_character, without_repetition, trim)


def apply_rules(draft: str, context: CursorContext) -> str:
    """Applies all rules to a suggestion."""
    for rule in BLOCK_RULES if context.indent else RULES:
        draft = rule(draft, context)
        if not draft:
            return ""
    return draft


def filter_suggestions(
    context: CursorContext, drafts: Iterable[tuple[str, Steps]]
) -> list[Suggestion]:
    """Applies the rules to texts with their steps.

    Of texts that differ only in white space the first is kept.
    """
    kept: dict[str, Suggestion] = {}
    for text, steps in drafts:
        if filtered := apply_rules(text, context):
            logprob = steps[-1][1] if steps else 0.0
            suggestion = Suggestion(text=filtered, logprob=logprob, steps=steps)
            kept.setdefault("".join(filtered.split()), suggestion)
    return list(kept.values())


def cursor_context(document: TextDocument, place: tuple[int, int]) -> CursorContext:
    """Returns the context of a place that the rules need."""
    number, column = place
    line = document.line(number)
    below = map(document.line, range(number + 1, number + 1 + _LINES_BELOW))
    filled = next(filter(str.strip, below), "")
    context = CursorContext(line[:column], line[column:], filled)
    above = map(document.line, range(number - 1, max(number - _LINES_ABOVE, 0) - 1, -1))
    return replace(context, indent=_block_indent(context, above))


def _block_indent(context: CursorContext, above: Iterable[str]) -> int:
    """Returns `CursorContext.indent`: above 0 where the line at or above the cursor opens a block.

    A block that already has lines below the cursor does not begin here.
    """
    lines = (context.before, *above)
    code = (line for line in lines if line.strip() and not _DOCSTRING.match(line))
    opener = next(code, "").rstrip()
    if context.rest.strip() or not opener.endswith(_OPENERS):
        return 0
    margin = _margin(opener)
    has_lines = context.next_filled_line and _margin(context.next_filled_line) > margin
    return 0 if has_lines or opener.lstrip().startswith(_COMMENTS) else margin + 1


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def whole_lines(text: str) -> str:
    """Drops the last line of a body that was cut at its limit, unless it is the first."""
    lines = text.rstrip().rpartition("\n")[0]
    return lines if lines.strip() else text


def _open_brackets(text: str) -> list[str]:
    """Returns the brackets of a line that are still open at its end."""
    opened = list[str]()
    for character in text:
        if character in "([{":
            opened.append(character)
        elif character in _CLOSERS and opened and opened[-1] == _CLOSERS[character]:
            opened.pop()
    return opened


def _count_unopened(text: str) -> int:
    """Counts the brackets of a line that close what stands before it."""
    opened = unopened = 0
    for character in text:
        if character in _CLOSERS.values():
            opened += 1
        elif character in _CLOSERS:
            unopened += opened == 0
            opened = max(0, opened - 1)
    return unopened
