"""Real edits typed again, key by key: what the suggestions of `kvq lsp` would have been worth.

Two versions of a file become sessions, one for each hunk, from top to bottom: what goes is deleted
at once, then what comes is typed. The text is always what somebody wrote, so what is asked for does
not depend on what was accepted before. One replay therefore judges every threshold.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from time import perf_counter
from typing import Any
from urllib.parse import quote

import numpy as np

from kvq.errors import DataError
from kvq_apps.completion.completion_engine import CompletionEngine
from kvq_apps.completion.document import LineChange, TextDocument
from kvq_apps.completion.edit_history import LIKELY_EDIT, EditHistory, NextEdit
from kvq_apps.completion.next_edit import changed_lines
from kvq_apps.completion.suggestions import LIKELY_COMPLETION, Completion
from kvq_apps.evaluation.measurement import Progress
from kvq_apps.lsp.documents import OpenDocument, TypedSuggestions
from kvq_lab.text_pairs import TextPair
from kvq_lab.typing_sessions import KEY, TypingSession
from kvq_runtime.answer.generation import never_cancelled
from kvq_runtime.session.session import no_progress

# Seconds from key to key, by which the history joins changes that touch.
KEY_S = 0.2
BRACKETS = frozenset("()[]{}")
# Least log-probabilities that the table compares.
COMPLETION_LOGPROBS = (-inf, 2 * LIKELY_COMPLETION, LIKELY_COMPLETION, LIKELY_COMPLETION / 2)
EDIT_LOGPROBS = (-inf, 2 * LIKELY_EDIT, LIKELY_EDIT, LIKELY_EDIT / 2, LIKELY_EDIT / 4)
# A name, or one sign: a hunk begins and ends between two of them.
_PIECE = re.compile(r"\w+|\W")


def _ends_word(key: str, following: str) -> bool:
    return _in_word(key) and not _in_word(following)


def _in_word(key: str) -> bool:
    return key.isalnum() or key == "_"


# Whether somebody pauses between two keys, so that an editor asks for a suggestion.
PAUSES: Mapping[str, Callable[[str, str], bool]] = {
    "word": lambda key, following: key[0] == "\n" or key in BRACKETS or _ends_word(key, following),
    "line": lambda key, following: key[0] == "\n",
    "key": lambda key, following: True,
}


# What is typed


def hunks_between(old: str, new: str) -> list[LineChange]:
    """Returns the changes of lines, as lines of `old`; those of white space alone are left out."""
    changes = changed_lines(0, TextDocument(old).lines(), TextDocument(new).lines())
    return [hunk for change in changes for hunk in _line_by_line(change)]


def _line_by_line(change: LineChange) -> Iterator[LineChange]:
    """Yields a change of as many lines as there were as a change of each."""
    if len(change.old) != len(change.new):
        yield change
        return
    for number, (old, new) in enumerate(zip(change.old, change.new, strict=True), change.first):
        if old.split() != new.split():
            yield LineChange(number, (old,), (new,))


def typing_session(name: str, text: str, hunk: LineChange) -> TypingSession:
    """Returns what somebody does who makes this change: go there, delete, and type."""
    start = sum(map(len, TextDocument(text).lines(0, hunk.first)))
    old, new = "".join(hunk.old), "".join(hunk.new)
    if not old and new.endswith("\n") and text[:start].endswith("\n"):
        # Lines are added from the end of the line above.
        start, new = start - 1, f"\n{new[:-1]}"
    # Read backwards, so that what both begin with is kept first.
    pieces = _PIECE.findall(old)
    change = LineChange.between(0, pieces[::-1], _PIECE.findall(new)[::-1])
    start += len("".join(pieces[: len(pieces) - change.first - len(change.old)]))
    removed = len("".join(change.old))
    events: list[Any] = [["jump", start, []]]
    if removed:
        events.append(["delete", start, [[start, removed, ""]]])
    for key in KEY.findall("".join(change.new[::-1])):
        events.append(["key", start + len(key), [[start, 0, key]]])
        start += len(key)
    return TypingSession(name, text, events)


# What an editor shows meanwhile


@dataclass(frozen=True, slots=True)
class Pause:
    """Holds the completion after `typed` keys of a hunk, and the text that is typed next."""

    typed: int
    following: str
    completion: Completion

    def shown(self, least_logprob: float) -> str:
        """Returns what is shown of the completion to somebody who sees only what is so likely."""
        drafts = self.completion.likely_part(least_logprob).drafts
        return drafts[0].text if drafts else ""


@dataclass(frozen=True, slots=True)
class TypedHunk:
    """Holds what became of a hunk: its keys, the pauses in it, and the next edit after it.

    `ahead` are the numbers of the later hunks that the edit makes; empty: it makes something else.
    """

    keys: int
    pauses: tuple[Pause, ...]
    edit: NextEdit
    ahead: frozenset[int] = frozenset()


class TypingReplay:
    """Types hunks in an editor that asks `service` whenever `pause` says so.

    Attributes:
        hunks: What became of the hunks, in their order.
        completion_ms: Milliseconds of each completion that the service was asked for.
        edit_ms: Milliseconds of each next edit, which is asked for after every hunk.
    """

    def __init__(self, service: CompletionEngine, pause: str = "word") -> None:
        self.hunks: list[TypedHunk] = []
        self.completion_ms: list[float] = []
        self.edit_ms: list[float] = []
        self._service = service
        self._pauses = PAUSES[pause]
        self._history = EditHistory()
        self._clock_s = 0.0

    def type_pairs(self, pairs: Iterable[TextPair], limit: int, progress: Progress) -> None:
        """Types the first `limit` hunks. Raises `DataError` where there is none."""
        for pair in pairs:
            opened, uri = OpenDocument.of(pair.old, 0), f"file:///{quote(pair.name)}"
            hunks, begun, more = hunks_between(pair.old, pair.new), len(self.hunks), 0
            for number, hunk in enumerate(hunks[: limit - begun], 1):
                typed = self._type(uri, opened, _moved(hunk, more))
                # All that comes later stands below.
                more += len(hunk.new) - len(hunk.old)
                later = {
                    _moved(hunk, more): begun + place
                    for place, hunk in enumerate(hunks[number:], number)
                }
                changes = [row for change in typed.edit.changes for row in _line_by_line(change)]
                if later.keys() >= {*changes}:
                    typed = replace(typed, ahead=frozenset(later[change] for change in changes))
                self.hunks.append(typed)
                progress(len(self.hunks), limit)
            if len(self.hunks) == limit:
                return
        if not self.hunks:
            raise DataError("nothing was changed there but white space; give other versions")

    def _type(self, uri: str, opened: OpenDocument, hunk: LineChange) -> TypedHunk:
        session = typing_session(uri, opened.document.text, hunk)
        keys = [edits[0][2] for _, _, edits in session.events[1:]]
        pauses, place = list[Pause](), (0, 0)
        for typed, (before, now) in enumerate(pairwise(session.moments())):
            place = _place(now.prefix)
            if now.kind == "jump":
                # Time enough for the server to read what is there.
                self._service.read(
                    opened.document, place, cancel=never_cancelled, progress=no_progress
                )
                continue
            self._change(uri, opened, before.prefix + before.suffix, *session.events[typed][2])
            key, coming = keys[typed - 1], "".join(keys[typed:])
            if now.kind == "delete" or not self._pauses(key, coming[:1]):
                continue
            pauses.append(Pause(typed, coming, self._completion(opened, place)))
        since = perf_counter()
        edit = self._service.next_edit(
            opened.document, place, uri=uri, edits=tuple(self._history), form="auto",
            cancel=never_cancelled,
        )  # fmt: skip
        self.edit_ms.append((perf_counter() - since) * 1e3)
        return TypedHunk(len(keys), tuple(pauses), edit)

    def _change(self, uri: str, opened: OpenDocument, text: str, edit: list[Any]) -> None:
        """Sends a change of `text` to the document as an editor does."""
        start, removed, new = edit
        self._clock_s += KEY_S
        ends = (_place(text[:end]) for end in (start, start + removed))
        rows = [{"line": line, "character": column} for line, column in ends]
        opened.change(
            [{"range": {"start": rows[0], "end": rows[1]}, "text": new}],
            opened.version + 1,
            "utf-32",
            lambda change: self._history.add(uri, change, self._clock_s),
        )

    def _completion(self, opened: OpenDocument, place: tuple[int, int]) -> Completion:
        """Returns the completion at a place, as the server has it."""
        completion = opened.known_completion(place)
        if completion is None:
            since = perf_counter()
            completion = self._service.complete(opened.document, place, cancel=never_cancelled)
            self.completion_ms.append((perf_counter() - since) * 1e3)
            if completion.drafts:
                opened.typed = TypedSuggestions(opened.document, place, completion)
        return completion


def _moved(hunk: LineChange, lines: int) -> LineChange:
    return hunk._replace(first=hunk.first + lines)


def _place(prefix: str) -> tuple[int, int]:
    return prefix.count("\n"), len(prefix.rpartition("\n")[2])


# What that is worth


@dataclass(slots=True)
class SuggestionTally:
    """Counts keys, and completions and next edits that were shown, and those that were wrong.

    `saved` are keys that both save, `offered` hunks that an edit made before they were typed.
    """

    keys: int = 0
    saved: int = 0
    shown: int = 0
    wrong: int = 0
    edits_shown: int = 0
    edits_wrong: int = 0
    offered: int = 0


def tally(
    hunks: Sequence[TypedHunk],
    completion_logprob: float = LIKELY_COMPLETION,
    edit_logprob: float = LIKELY_EDIT,
) -> SuggestionTally:
    """Counts for a user who is shown what the model is so sure of, and takes what is right.

    Each completion and each hunk of an edit is taken with one key. A completion is right if all of
    it is typed next, an edit if each of its changes is a later hunk.
    """
    count, made = SuggestionTally(), set[int]()
    for number, hunk in enumerate(hunks):
        count.keys += hunk.keys
        if number in made:
            count.saved += hunk.keys - 1
        else:
            _count_completions(count, hunk, completion_logprob)
        edit, is_small = hunk.edit, replace(hunk.edit, logprob=0.0).likely
        # An edit that was taken is not offered again.
        done = hunk.ahead and hunk.ahead <= made
        if edit.changes and is_small and edit.logprob >= edit_logprob and not done:
            count.edits_shown += 1
            count.edits_wrong += not hunk.ahead
            made |= hunk.ahead
    count.offered = len(made)
    return count


def _count_completions(count: SuggestionTally, hunk: TypedHunk, least_logprob: float) -> None:
    """Counts a suggestion as shown again only if it does not go on with what was shown before."""
    typed, last, before = 0, "", ""
    for pause in hunk.pauses:
        if pause.typed < typed:
            continue
        shown = pause.shown(least_logprob)
        rest = last[len(before) - len(pause.following) :]
        goes_on = rest != "" and (shown.startswith(rest) or rest.startswith(shown))
        is_new, is_right = shown != "" and not goes_on, pause.following.startswith(shown)
        count.shown += is_new
        count.wrong += is_new and not is_right
        if shown and is_right:
            keys = len(KEY.findall(shown))
            count.saved += keys - 1
            typed = pause.typed + keys
        last, before = shown, pause.following


def report(replay: TypingReplay) -> dict[str, Any]:
    """Returns the share of keys saved as `kvq lsp` shows, counts, times, and other thresholds."""
    present = tally(replay.hunks)
    times = {"completion": replay.completion_ms, "edit": replay.edit_ms}
    rows = [
        *(_row("completions", least, tally(replay.hunks, least)) for least in COMPLETION_LOGPROBS),
        *(_row("edits", least, tally(replay.hunks, edit_logprob=least)) for least in EDIT_LOGPROBS),
    ]
    return {
        "value": present.saved / present.keys,
        "unit": "keys saved",
        "n": len(replay.hunks),
        **asdict(present),
        "wrong_share": _share(present.wrong, present.shown),
        "edits_wrong_share": _share(present.edits_wrong, present.edits_shown),
        **{
            f"{name}_p{percent}_ms": float(np.percentile(ms, percent))
            for name, ms in times.items()
            for percent in (50, 95)
            if ms
        },
        # A model that writes no next edits says why.
        "no_edits": next((hunk.edit.why_not for hunk in replay.hunks if hunk.edit.impossible), ""),
        "rows": rows,
    }


def _row(kind: str, least_logprob: float, count: SuggestionTally) -> dict[str, Any]:
    shown, wrong = count.shown, count.wrong
    if kind == "edits":
        shown, wrong = count.edits_shown, count.edits_wrong
    return {
        "suggestions": kind,
        "least_logprob": "any" if least_logprob == -inf else round(least_logprob, 3),
        "shown": shown,
        "wrong": wrong,
        "wrong_share": _share(wrong, shown),
        "offered": count.offered,
        "saved": count.saved / count.keys,
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
