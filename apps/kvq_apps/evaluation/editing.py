"""Edits of programs: what a cache that moves what follows loses against computing it all again.

The text after the edit is always one that somebody wrote; what stood there before is made of it.
The distributions over the tokens that follow are compared with those of an unquantised cache that
computed the edited text from its beginning.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from kvq_runtime.session import Session

KINDS = ("insert", "delete", "replace")
LINES = (1, 5, 12)
WINDOW_LINES = 90
FOLLOWING_TOKENS = 48
# The first tokens of a text, which a cache keeps in float16, do not move.
FIRST_EDITED_TOKEN = 8
# Of every so many cases one has this many edits in a row, and no refresh between them.
ROW_EVERY, EDITS_IN_A_ROW = 10, 10


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
    chance = random.Random(seed)  # noqa: S311  alike each time, nothing is kept secret
    long = [lines for text in texts if len(lines := text.splitlines(keepends=True)) > 2 * LINES[-1]]
    if not long:
        raise DataError("there is nothing to edit; give source files of some hundred lines")
    window = WINDOW_LINES
    cases: list[EditCase] = []
    while len(cases) < limit + limit // ROW_EVERY:
        number = len(cases)
        in_a_row = number >= limit
        lines, other = chance.choice(long), chance.choice(long)
        sizes = [LINES[number // 3 % 3]] if not in_a_row else chance.choices((1, 2), k=10)
        kinds = [KINDS[number % 3]] if not in_a_row else chance.choices(KINDS, k=10)
        case = _case(tokenizer, chance, lines, other, window, kinds, sizes)
        longest = max(len(case.before), len(case.after)) + sum(
            len(change.new_ids) for change in case.changes
        )
        if min(change.start for change in case.changes) < FIRST_EDITED_TOKEN:
            continue
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
        kind=kinds[0] if len(kinds) == 1 else "row",
        lines=sizes[0] if len(sizes) == 1 else 0,
        before=[*start_ids, *(token for part in parts for token in part[0])],
        changes=tuple(changes),
        after=[*start_ids, *(token for part in parts for token in part[1])],
        following=following[:FOLLOWING_TOKENS] or same[:FOLLOWING_TOKENS],
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One case and one way to go on: KL divergences [n], and where the best token is the same."""

    case: EditCase
    method: str
    nats: Floats
    same: Floats


def editing(
    open_session: OpenSession,
    open_exact: OpenSession,
    cases: Sequence[EditCase],
    progress: Progress,
) -> Measurement:
    """Mean KL divergence after one edit, and beside it what else could have been done.

    `kld_full` computes the edited text again at the same width, so that it is what quantising
    alone costs; `kld_ignored` leaves the text as it was; `kld_row` is after ten edits in a row.
    """
    held, outcomes = HeldBytes(), list[_Outcome]()
    for number, case in enumerate(cases):
        wanted = _predicted(open_exact, case.after, (), case.following, None)
        for method, text, changes in (
            ("edit", case.before, case.changes),
            ("full", case.after, ()),
            ("ignored", case.before, ()),
        ):
            if case.kind == "row" and method != "edit":
                continue
            found = _predicted(open_session, text, changes, case.following, held)
            same = found.argmax(1) == wanted.argmax(1)
            outcomes.append(_Outcome(case, method, kl_divergence(wanted, found), same))
        progress(number + 1, len(cases))
    single = [one for one in outcomes if one.case.kind != "row"]
    edited = [one for one in single if one.method == "edit"]
    details: dict[str, object] = {"same_top_1": _mean([one.same for one in edited])}
    for method in ("full", "ignored"):
        rows = [one for one in single if one.method == method]
        details[f"kld_{method}"] = _mean([one.nats for one in rows])
        details[f"same_top_1_{method}"] = _mean([one.same for one in rows])
    for name, rows in _groups(edited):
        details[f"kld_{name}"] = _mean([one.nats for one in rows])
    if in_a_row := [one for one in outcomes if one.case.kind == "row"]:
        details["kld_row"] = _mean([one.nats for one in in_a_row])
        details["same_top_1_row"] = _mean([one.same for one in in_a_row])
        details["rows"] = len(in_a_row)
    return held.measurement(_mean([one.nats for one in edited]), "nats", len(edited), **details)


def _groups(edited: Sequence[_Outcome]) -> Iterator[tuple[str, list[_Outcome]]]:
    for kind in KINDS:
        yield kind, [one for one in edited if one.case.kind == kind]
    for lines in LINES:
        yield f"{lines}_lines", [one for one in edited if one.case.lines == lines]


def _mean(parts: Sequence[Floats]) -> float:
    return float(np.concatenate(parts).mean()) if parts else float("nan")


def _predicted(
    open_session: OpenSession,
    text: Sequence[int],
    changes: Sequence[Change],
    following: Sequence[int],
    held: HeldBytes | None,
) -> Floats:
    """Log-probabilities float32 [n, V] after each of `following`, the text changed one by one."""
    with open_session() as session:
        session.prefill(text)
        for change in changes:
            session.edit(change.start, change.stop, change.new_ids)
            session.prefill()
        rows = log_softmax(np.concatenate(list(session.logits(following))))
        if held is not None:
            held.see(session)
            _check_not_computed_again(session)
    return rows


def _check_not_computed_again(session: Session) -> None:
    assert session.stats().recomputed_edits == 0
