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
    HeldBytes,
    Measurement,
    OpenSession,
    Progress,
    log_softmax,
)
from kvq_apps.evaluation.text import kl_divergence
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.session import Session

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
# What is encoded again at places drawn by chance, in runs of so many tokens.
AGAIN_TOKENS, RUN_TOKENS = 64, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Tokens `start` to `stop` of the text as it is then give way to `new_ids`."""

    start: int
    stop: int
    new_ids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class EditCase:
    """A text before, the changes that make it `after`, and what is predicted behind it."""

    kind: str
    lines: int
    before: list[int]
    changes: tuple[Change, ...]
    after: list[int]
    following: list[int]


def edit_cases(
    tokenizer: Tokenizer, texts: Sequence[str], *, limit: int, context_tokens: int, seed: int
) -> list[EditCase]:
    """`limit` cases over all kinds and sizes, and rows of edits beside them.

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
    """One window of `lines` and edits of it that bring or remove lines of `other`, or change some.

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
    changes: list[Change] = []
    text = [part[0] for part in parts]
    for place in changed:
        at = len(start_ids) + sum(map(len, text[:place]))
        new = parts[place][1]
        changes.append(Change(start=at, stop=at + len(text[place]), new_ids=new))
        text[place] = new
    return EditCase(
        kind=kinds[0] if len(kinds) == 1 else ROW,
        lines=sizes[0] if len(sizes) == 1 else 0,
        before=[*start_ids, *(token for part in parts for token in part[0])],
        changes=tuple(changes),
        after=[*start_ids, *(token for part in parts for token in part[1])],
        following=following[:FOLLOWING_TOKENS] or same[:FOLLOWING_TOKENS],
    )


# How a session that holds the text before comes to hold what follows the changes; what it encoded.
Way = Callable[[Session[Any], EditCase], int]


def changing(*, reencode_next: int | None = 0, reencode_tail: int = 1) -> Way:
    """One edit after the other, each encoded before the next."""

    def change(session: Session[Any], case: EditCase) -> int:
        encoded = 0
        for one in case.changes:
            session.edit(
                one.start,
                one.stop,
                one.new_ids,
                reencode_next=reencode_next,
                reencode_tail=reencode_tail,
            )
            encoded += _prefilled(session)
        return encoded

    return change


def refreshing(max_tokens: int | None) -> Way:
    """The edits alone, and then so much idle time."""

    def change(session: Session[Any], case: EditCase) -> int:
        encoded, stale = changing()(session, case), session.sequence.encoding.staleness.stale
        session.refresh(max_tokens)
        return encoded + min(stale, max_tokens or stale)

    return change


def again(choose: Callable[[Sequence[int]], Sequence[int]]) -> Way:
    """The edits alone, and then `AGAIN_TOKENS` stale tokens once more, at places it chooses."""

    def change(session: Session[Any], case: EditCase) -> int:
        encoded = changing()(session, case)
        stale = np.flatnonzero(session.sequence.encoding.staleness.ages > 0).tolist()
        for start in choose(stale[::RUN_TOKENS])[: AGAIN_TOKENS // RUN_TOKENS]:
            ids = session.tokens[start : start + RUN_TOKENS]
            session.edit(start, start + len(ids), ids, reencode_next=0)
        return encoded + _prefilled(session)

    return change


def ignoring(session: Session[Any], case: EditCase) -> int:
    """The text stays as it was."""
    return 0


def _prefilled(session: Session[Any]) -> int:
    count = len(session.sequence.due())
    if count:
        session.prefill()
    return count


def _by_chance(places: Sequence[int]) -> Sequence[int]:
    return random.Random(len(places)).sample(places, len(places))


EDIT, FULL, TO_FULL = "edit", "full", "edit, to full"
WAYS: dict[str, Way] = {
    EDIT: changing(reencode_next=None),
    "moved": changing(),
    "moved, next 16": changing(reencode_next=16),
    "moved, next 64": changing(reencode_next=64),
    "moved, tail 16": changing(reencode_tail=16),
    "moved, tail 64": changing(reencode_tail=64),
    "moved, 64 refreshed": refreshing(AGAIN_TOKENS),
    "moved, 64 leftmost": again(list),
    "moved, 64 by chance": again(_by_chance),
    "refreshed": refreshing(None),
    "ignored": ignoring,
}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a session says next: log-probabilities [n, V] after each token, its own first line."""

    rows: Floats
    line: str
    encoded_tokens: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One case and one way, against another answer: nats [n], and where the best token agrees."""

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
    """Mean KL divergence after one edit; of every way a row, and one after ten edits.

    Compared with an unquantised cache that computed the edited text. `full` is the same at this
    width: what quantising alone costs; `refreshed` too, on the pages that the edit left. `moved`
    encodes what is new alone, `ignored` leaves the text as it was. `edit, to full` compares the
    edit with `full` instead: what it costs at this width.
    """
    held, found = HeldBytes(), list[_Outcome]()
    for number, case in enumerate(cases):
        wanted, full = (_full(opened, case) for opened in (open_exact, open_session))
        answers = {FULL: full, **_answers(open_session, case, held)}
        found += [_outcome(case, way, wanted, answer) for way, answer in answers.items()]
        found.append(_outcome(case, TO_FULL, full, answers[EDIT]))
        progress(number + 1, len(cases))
    edited = [one for one in found if one.way == EDIT and one.case.kind != ROW]
    details: dict[str, object] = {
        f"kld_{name}": _mean([one.nats for one in rows]) for name, rows in _groups(edited)
    }
    details["rows"] = [row for edits in (1, EDITS_IN_A_ROW) for row in _table(edits, found)]
    return held.measurement(_mean([one.nats for one in edited]), "nats", len(edited), **details)


def _table(edits: int, found: Sequence[_Outcome]) -> Iterator[dict[str, object]]:
    """A row for each way, over the cases of so many edits."""
    asked = [one for one in found if (one.case.kind == ROW) == (edits > 1)]
    for way in dict.fromkeys(one.way for one in asked):
        rows = [one for one in asked if one.way == way]
        yield {
            "way": way,
            "edits": edits,
            "n": len(rows),
            "encoded": sum(one.encoded_tokens for one in rows) / len(rows),
            "kld": _mean([one.nats for one in rows]),
            "same_top_1": _mean([one.same for one in rows]),
            "same_line": sum(one.same_line for one in rows) / len(rows),
        }


def _groups(edited: Sequence[_Outcome]) -> Iterator[tuple[str, list[_Outcome]]]:
    for kind in KINDS:
        yield kind, [one for one in edited if one.case.kind == kind]
    for lines in LINES:
        yield f"{lines}_lines", [one for one in edited if one.case.lines == lines]


def _mean(parts: Sequence[Floats]) -> float:
    return float(np.concatenate(parts).mean()) if parts else float("nan")


def _outcome(case: EditCase, way: str, wanted: _Answer, found: _Answer) -> _Outcome:
    nats = kl_divergence(wanted.rows, found.rows)
    same = found.rows.argmax(1) == wanted.rows.argmax(1)
    return _Outcome(case, way, found.encoded_tokens, nats, same, found.line == wanted.line)


def _full(open_session: OpenSession, case: EditCase) -> _Answer:
    """What is said after the edited text, computed from its beginning."""
    with open_session() as session:
        session.prefill(case.after)
        return _answer(session, case, len(case.after))


def _answers(open_session: OpenSession, case: EditCase, held: HeldBytes) -> dict[str, _Answer]:
    """What is said after each of `WAYS`."""
    answers: dict[str, _Answer] = {}
    with open_session() as session:
        session.prefill(case.before)
        before = session.sequence.state()
        for name, way in WAYS.items():
            session.sequence.restore(before)
            answers[name] = _answer(session, case, way(session, case))
            held.see(session)
        assert session.stats().edits.recomputed_edits == 0
    return answers


def _answer(session: Session[Any], case: EditCase, encoded_tokens: int) -> _Answer:
    state = session.sequence.state()
    rows = log_softmax(np.concatenate(list(session.logits(case.following))))
    session.sequence.restore(state)
    return _Answer(rows, _first_line(session), encoded_tokens)


def _first_line(session: Session[Any]) -> str:
    """The first line that is not blank, written greedily."""
    text = ""
    for step in session.generate(LINE_TOKENS, sampling=Sampling(temperature=0)):
        text = (text + step.text).lstrip("\n")
        if "\n" in text:
            break
    return text.partition("\n")[0].rstrip()
