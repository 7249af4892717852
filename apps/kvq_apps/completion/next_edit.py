"""The next edit: where in a file it may be, and how lines there read after it.

A place is the cursor's, or a line with a word that was just replaced elsewhere. The model writes
the lines around it again, with the old lines as the draft, until they are the old ones again.
"""

import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from difflib import SequenceMatcher
from time import perf_counter
from urllib.parse import unquote, urlsplit

from kvq.errors import KvqError
from kvq_apps.completion.document import LineChange, TextDocument
from kvq_apps.completion.edit_history import EditedLines, NextEdit
from kvq_apps.completion.token_blocks import BlockTokenizer
from kvq_models.next_edits import (
    EditForm,
    Rewriting,
    ShownEdit,
    answered_lines,
    edit_form,
    edit_prompt,
)
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.drafter import Draft, Round
from kvq_runtime.answer.generation import Cancel
from kvq_runtime.serving.outbox import Delta, Event, Finished
from kvq_specdraft.rewrite import Rewrite

# Places that are asked about until one changes.
MOST_PLACES = 4
# Replaced words of so many last hunks are looked for.
RECENT_EDITS = 3
# An answer may have so many tokens more than twice the region.
MORE_TOKENS = 48
# More rows in a pass cost more than they save: each needs the logits of the whole vocabulary.
MOST_DRAFTED = 8
# This many lines that agree with the old ones end an answer.
AGREEING_LINES = 2
_WORD, _CALLED = re.compile(r"\w+"), re.compile(r"(\w+)\s*\(")


class ShortRewrite(Rewrite):
    """Drafts at most `MOST_DRAFTED` tokens at once, and counts the passes that it drafted for."""

    passes = 0

    def propose(self, room: int) -> Draft:
        """Proposes what comes next in the old lines."""
        return super().propose(min(room, MOST_DRAFTED))

    def observe(self, outcome: Round) -> None:
        """Counts a pass."""
        self.passes += 1


# Writes after a prompt: ids, most new tokens, texts and tokens that end it, a drafter, a cancel.
Write = Callable[
    [list[int], int, tuple[str, ...], Set[int | None], Rewrite, Cancel], Iterator[Event | None]
]


class NextEditor:
    """Asks one model for next edits. `write` lets it write."""

    def __init__(self, tokenizer: Tokenizer, model: str, write: Write) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._write = write
        self._blocks = BlockTokenizer(tokenizer)

    def next_edit(
        self,
        document: TextDocument,
        place: tuple[int, int],
        uri: str,
        edits: Sequence[EditedLines],
        form_name: str,
        cancel: Cancel,
    ) -> NextEdit:
        """Returns what comes next in `document`, with the cursor at `place`, after these edits."""
        try:
            form = edit_form(self._tokenizer, self._model, form_name)
        except KvqError as error:
            return NextEdit(why_not=str(error), impossible=True)
        if form is None:
            return NextEdit(
                why_not="this model reads no next edits: it has no fill-in-the-middle tokens",
                impossible=True,
            )
        if not edits:
            return NextEdit(why_not="nothing was edited yet")
        since, lines, result = perf_counter(), document.lines(), NextEdit()
        if not lines[-1]:
            lines.pop()  # what follows the last line end
        for first, stop in regions(lines, place, uri, edits, form):
            part = self._rewrite(form, lines, (first, stop), place, uri, edits, cancel)
            result = replace(
                part,
                places=result.places + 1,
                prompt_tokens=result.prompt_tokens + part.prompt_tokens,
                passes=result.passes + part.passes,
                ms=(perf_counter() - since) * 1e3,
            )
            if part.changes:
                return result
            if cancel():
                return replace(result, why_not="cancelled")
        return replace(result, why_not=result.why_not or "nothing else changes")

    def _rewrite(
        self,
        form: EditForm,
        lines: list[str],
        region: tuple[int, int],
        place: tuple[int, int],
        uri: str,
        edits: Sequence[EditedLines],
        cancel: Cancel,
    ) -> NextEdit:
        """Lets the model write the lines of `region` again; returns what it changed."""
        first, stop = region
        old = lines[first:stop]
        if any(mark.strip() and mark in "".join(old) for mark in form.stop):
            return NextEdit(why_not="the text contains what ends an answer")
        last = edits[-1]
        rewriting = Rewriting(
            path=_path(uri), lines=lines, first=first, stop=stop, cursor=place,
            original=last.undone(old, first) if last.uri == uri else old,
            edits=[
                ShownEdit(
                    path=_path(edit.uri), first=edit.change.first,
                    old=edit.change.old, new=edit.change.new,
                )
                for edit in edits
            ],
        )  # fmt: skip
        ids = edit_prompt(self._tokenizer, form, rewriting, self._blocks.encode)
        most = 2 * len(self._tokenizer.encode("".join(old))) + MORE_TOKENS
        control = {self._tokenizer.token_id(name) for name in form.control} - {None}
        drafter, text, logprob = ShortRewrite(), "", 0.0
        words, new = replaced_words(edits), None
        for event in self._write(ids, most, form.stop, control, drafter, cancel):
            if isinstance(event, Delta):
                text += event.text
                logprob += sum(log.logprob or 0.0 for log in event.logs)
                new = rejoined(old, answered_lines(form, text), words)
                if new is not None:
                    break
            elif isinstance(event, Finished) and event.reason != "length":
                new = answered_lines(form, text)
        changes = tuple(changed_lines(first, old, new)) if new else ()
        if any(edit.change.old == change.new for edit in edits[-1:] for change in changes):
            changes = ()  # It would take back what was just written.
        return NextEdit(
            changes=changes, logprob=logprob, prompt_tokens=len(ids), passes=drafter.passes
        )


def replaced_words(edits: Sequence[EditedLines]) -> list[str]:
    """Returns the words that the last edits replaced, the newest first."""
    return [word for edit in reversed(edits[-RECENT_EDITS:]) for word in edit.removed_words()]


def regions(
    lines: Sequence[str],
    place: tuple[int, int],
    uri: str,
    edits: Sequence[EditedLines],
    form: EditForm,
) -> Iterator[tuple[int, int]]:
    """Yields the regions (first line, line after the last) where the next edit may be.

    The cursor's comes first, for forms that show more than its line. Then come lines below it, and
    then above, with a word that was replaced, or that is called where the last edit was made.
    """
    words = replaced_words(edits) or _CALLED.findall(edits[-1].new)
    written = {line for edit in edits if edit.uri == uri for line in edit.change.new}
    wider = form.above + form.below > 0
    below = [*range(place[0], len(lines)), *range(place[0])]
    matching = (
        line
        for line in below
        if lines[line] not in written and _has_word(lines[line : line + 1], words)
    )
    done: list[tuple[int, int]] = []
    for line in [*([place[0]] if wider else []), *matching]:
        if len(done) == MOST_PLACES:
            return
        if not any(first <= line < stop for first, stop in done):
            done.append((max(0, line - form.above), min(len(lines), line + form.below + 1)))
            yield done[-1]


def rejoined(old: Sequence[str], written: Sequence[str], words: Sequence[str]) -> list[str] | None:
    """Returns the region as it will be, once what was written leads back to the old lines.

    That is when the last whole lines are old ones again and none of the replaced `words` follows;
    None: not yet. Where `old` has no such word, a first change must have been written.
    """
    whole = [line for line in written if line.endswith("\n")]
    size = min(AGREEING_LINES, len(old))
    changed = list(old[: len(whole)]) != whole
    if len(whole) < size or not (changed or _has_word(old, words)):
        return None
    ends = [
        end for end in range(size, len(old) + 1) if list(old[end - size : end]) == whole[-size:]
    ]
    # Of lines that stand there several times, those after as many lines as were written.
    end = min(ends, key=lambda end: abs(end - len(whole)), default=None)
    return None if end is None or _has_word(old[end:], words) else [*whole, *old[end:]]


def _has_word(lines: Sequence[str], words: Sequence[str]) -> bool:
    return any(not set(words).isdisjoint(_WORD.findall(line)) for line in lines)


def changed_lines(first: int, old: Sequence[str], new: Sequence[str]) -> Iterator[LineChange]:
    """Yields the changes but of white space that turn `old`, from line `first` on, into `new`."""
    if new and old:
        end = old[-1][len(old[-1].rstrip("\r\n")) :]
        new = [*new[:-1], new[-1].rstrip("\r\n") + end]
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for tag, begin, stop, new_begin, new_stop in matcher.get_opcodes():
        change = LineChange(first + begin, tuple(old[begin:stop]), tuple(new[new_begin:new_stop]))
        if tag != "equal" and "".join(change.old).split() != "".join(change.new).split():
            yield change


def _path(uri: str) -> str:
    """Returns a document's name for a prompt."""
    return unquote(urlsplit(uri).path).rpartition("/")[2]
