"""Edits of programs: what a cache that moves what follows loses against computing it all again.

The text after the edit is always one that somebody wrote; what stood there before is made of it.
The distributions over the tokens that follow, and the first line written greedily, are compared
with those of an unquantised cache that computed the edited text from its beginning.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.errors import DataError
from kvq_apps.evaluation.measurement import (
    Floats,
    Measurement,
    OpenSession,
    PeakCacheUsage,
    Progress,
    log_softmax,
)
from kvq_apps.evaluation.text import kl_divergence
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.session.session import Session

KINDS = ("insert", "delete", "replace")
ROW = "row"
LINES = (1, 5, 12)
WINDOW_LINES = 90
FOLLOWING_TOKENS = 48
# The first tokens of a text, which a cache keeps in float16, do not move.
FIRST_EDITED_TOKEN = 8
# So many places in a row that are too near the beginning mean that there are no others.
MOST_MISSES = 1000
# Of every so many cases one has this many edits in a row, and no refresh between them.
ROW_EVERY, EDITS_IN_A_ROW = 10, 10
# Of a line that is written greedily.
LINE_TOKENS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEdit:
    """Replaces tokens `start` to `stop` of the text as it is then by `new_ids`."""

    start: int
    stop: int
    new_ids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class EditCase:
    """Holds a text, the changes that make it `after`, and what is predicted behind it."""

    kind: str
    before: list[int]
    changes: tuple[TokenEdit, ...]
    after: list[int]
    following: list[int]


def edit_cases(
    tokenizer: Tokenizer, texts: Sequence[str], *, limit: int, context_tokens: int, seed: int
) -> list[EditCase]:
    """Makes `limit` cases over all kinds and sizes, and rows of edits beside them.

    Raises `DataError` where no text has lines enough.
    """
    chance = random.Random(seed)
    long = [lines for text in texts if len(lines := text.splitlines(keepends=True)) > 2 * LINES[-1]]
    if not long:
        raise DataError("there is nothing to edit; give source files of some hundred lines")
    window, missed = WINDOW_LINES, 0
    cases: list[EditCase] = []
    while len(cases) < limit + limit // ROW_EVERY:
        number = len(cases)
        in_a_row = number >= limit
        lines, other = chance.choice(long), chance.choice(long)
        sizes, kinds = [LINES[number // 3 % 3]], [KINDS[number % 3]]
        if in_a_row:
            sizes = chance.choices((1, 2), k=EDITS_IN_A_ROW)
            kinds = chance.choices(KINDS, k=EDITS_IN_A_ROW)
        case = _case(tokenizer, chance, lines, other, window, kinds, sizes)
        longest = max(len(case.before), len(case.after)) + sum(
            len(change.new_ids) for change in case.changes
        )
        if min(change.start for change in case.changes) < FIRST_EDITED_TOKEN:
            missed += 1
            if missed > MOST_MISSES:
                raise DataError("the lines are too short to edit; give source files")
            continue
        missed = 0
        if longest + len(case.following) <= context_tokens:
            cases.append(case)
        elif window > 3 * LINES[-1]:
            window -= 1
        else:
            raise DataError(f"a context of {context_tokens} tokens is too short to edit in")
    return cases


def _case(
    tokenizer: Tokenizer,
    chance: random.Random,
    lines: Sequence[str],
    other: Sequence[str],
    window: int,
    kinds: Sequence[str],
    sizes: Sequence[int],
) -> EditCase:
    """Makes a case of one window of `lines`; its edits bring, remove or change lines of `other`.

    The parts are encoded apart, so that the tokens beside a change do not depend on it.
    """
    first = chance.randrange(max(1, len(lines) - window - 8))
    shown = lines[first : first + window]
    room = len(shown) // len(sizes)
    parts: list[tuple[list[int], list[int]]] = []  # (before, after)
    done = 0
    for number, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        start = number * room + chance.randrange(1, max(2, room - size))
        stray = chance.randrange(max(1, len(other) - size))
        old = tokenizer.encode("".join(other[stray : stray + size])) if kind != "insert" else []
        stop = start if kind == "delete" else min(start + size, len(shown))
        same = tokenizer.encode("".join(shown[done:start]))
        parts += [(same, same), (old, tokenizer.encode("".join(shown[start:stop])))]
        done = stop
    same = tokenizer.encode("".join(shown[done:]))
    parts.append((same, same))
    following = tokenizer.encode("".join(lines[first + window : first + window + 30]))
    start_ids = list(tokenizer.control.start)
    changed = list(range(1, len(parts), 2))
    chance.shuffle(changed)
    changes: list[TokenEdit] = []
    text = [part[0] for part in parts]
    for place in changed:
        at = len(start_ids) + sum(map(len, text[:place]))
        new = parts[place][1]
        changes.append(TokenEdit(start=at, stop=at + len(text[place]), new_ids=new))
        text[place] = new
    return EditCase(
        kind=kinds[0] if len(kinds) == 1 else ROW,
        before=[*start_ids, *(token for part in parts for token in part[0])],
        changes=tuple(changes),
        after=[*start_ids, *(token for part in parts for token in part[1])],
        following=following[:FOLLOWING_TOKENS] or same[:FOLLOWING_TOKENS],
    )


# How a session that holds the text before comes to hold what follows the changes; what it encoded.
Way = Callable[[Session[Any], EditCase], int]


def changing(reencode_next: int | None) -> Way:
    """Makes a way with one edit after the other, each encoded before the next.

    `reencode_next`: as `Session.edit` takes it; None: its default.
    """

    def change(session: Session[Any], case: EditCase) -> int:
        encoded = 0
        for edit in case.changes:
            session.edit(edit.start, edit.stop, edit.new_ids, reencode_next=reencode_next)
            encoded += len(session.sequence.due())
            session.prefill()
        return encoded

    return change


def refreshing(session: Session[Any], case: EditCase) -> int:
    """Makes the edits alone, and then uses idle time to encode every stale token again."""
    encoded, stale = changing(0)(session, case), session.sequence.encoding.staleness.stale
    session.refresh(None)
    return encoded + stale


def ignoring(session: Session[Any], case: EditCase) -> int:
    """Leaves the text as it was."""
    return 0


EDIT, FULL, TO_FULL = "edit", "full", "edit, to full"
WAYS: dict[str, Way] = {
    EDIT: changing(None), "moved": changing(0), "refreshed": refreshing, "ignored": ignoring,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Answer:
    """Holds what a session says next: log-probabilities [n, V] of each token, and a first line."""

    rows: Floats
    line: str
    encoded_tokens: int


@dataclass(frozen=True, slots=True)
class _CaseOutcome:
    """Compares a case and way with another answer: nats [n], and where the best token agrees."""

    case: EditCase
    way: str
    encoded_tokens: int
    nats: Floats
    same: Floats
    same_line: bool


def editing(
    open_session: OpenSession,
    open_exact: OpenSession,
    cases: Sequence[EditCase],
    progress: Progress,
) -> Measurement:
    """Measures the mean KL divergence after one edit; of every way a row, and one after ten edits.

    It compares with an unquantised cache that computed the edited text. `full` is the same at this
    width: what quantising alone costs; `refreshed` too, on the pages that the edit left. `moved`
    encodes what is new alone, `ignored` leaves the text as it was. `edit, to full` compares the
    edit with `full` instead: what it costs at this width.
    """
    bytes_held, outcomes = PeakCacheUsage(), list[_CaseOutcome]()
    for number, case in enumerate(cases):
        exact, full = (_full(opened, case) for opened in (open_exact, open_session))
        answers = {FULL: full, **_answers(open_session, case, bytes_held)}
        outcomes += [_outcome(case, way, exact, answer) for way, answer in answers.items()]
        outcomes.append(_outcome(case, TO_FULL, full, answers[EDIT]))
        progress(number + 1, len(cases))
    edited = [row.nats for row in outcomes if row.way == EDIT and row.case.kind != ROW]
    rows = [row for edits in (1, EDITS_IN_A_ROW) for row in _table(edits, outcomes)]
    return bytes_held.measurement(_mean(edited), "nats", len(edited), rows=rows)


def _table(edits: int, outcomes: Sequence[_CaseOutcome]) -> Iterator[dict[str, object]]:
    """Yields a row for each way, over the cases of so many edits."""
    chosen = [row for row in outcomes if (row.case.kind == ROW) == (edits > 1)]
    for way in dict.fromkeys(row.way for row in chosen):
        rows = [row for row in chosen if row.way == way]
        yield {
            "way": way,
            "edits": edits,
            "n": len(rows),
            "encoded": sum(row.encoded_tokens for row in rows) / len(rows),
            "kld": _mean([row.nats for row in rows]),
            "same_top_1": _mean([row.same for row in rows]),
            "same_line": sum(row.same_line for row in rows) / len(rows),
        }


def _mean(parts: Sequence[Floats]) -> float:
    return float(np.concatenate(parts).mean()) if parts else float("nan")


def _outcome(case: EditCase, way: str, exact: _Answer, answer: _Answer) -> _CaseOutcome:
    nats = kl_divergence(exact.rows, answer.rows)
    same = answer.rows.argmax(1) == exact.rows.argmax(1)
    return _CaseOutcome(case, way, answer.encoded_tokens, nats, same, answer.line == exact.line)


def _full(open_session: OpenSession, case: EditCase) -> _Answer:
    """Returns the answer after the edited text, computed from its beginning."""
    with open_session() as session:
        session.prefill(case.after)
        return _answer(session, case, len(case.after))


def _answers(
    open_session: OpenSession, case: EditCase, bytes_held: PeakCacheUsage
) -> dict[str, _Answer]:
    """Returns the answer after each of `WAYS`."""
    answers: dict[str, _Answer] = {}
    with open_session() as session:
        session.prefill(case.before)
        before = session.sequence.state()
        for name, way in WAYS.items():
            session.sequence.restore(before)
            answers[name] = _answer(session, case, way(session, case))
            bytes_held.record(session)
        assert session.stats().edits.recomputed_edits == 0
    return answers


def _answer(session: Session[Any], case: EditCase, encoded_tokens: int) -> _Answer:
    state = session.sequence.state()
    rows = log_softmax(np.concatenate(list(session.logits(case.following))))
    session.sequence.restore(state)
    return _Answer(rows, first_line(session), encoded_tokens)


def first_line(session: Session[Any]) -> str:
    """Writes greedily and returns the first line that is not blank."""
    text = ""
    for step in session.generate(LINE_TOKENS, sampling=Sampling(temperature=0)):
        text = (text + step.text).lstrip("\n")
        if "\n" in text:
            break
    return text.partition("\n")[0].rstrip()
