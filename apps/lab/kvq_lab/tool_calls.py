"""Calls of tools after a long conversation, which a small cache has to write as they were asked.

Every request names the tool and each argument, so that only its form is hard: several calls at
once, nested values, quotes, line breaks, letters of other alphabets. The files stand in the
conversation before it, as an agent has read them.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvq_apps.evaluation.measurement import Measurement, OpenSession, Progress
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.tools import Tools, tools_of
from kvq_lab.problems import Problem, solving
from kvq_models.tokenizer import Tokenizer
from kvq_models.tools import CallPiece

# What became of an answer, from worst to best.
VERDICTS = UNPARSED, OTHER_TOOL, OTHER_ARGUMENTS, RIGHT = (
    *("no call", "another tool", "other arguments", "right"),
)
_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_TOOLS: dict[str, dict[str, Any]] = {
    "send_message": {"to": _TEXT, "text": _TEXT},
    "create_event": {"title": _TEXT, "day": _TEXT, "minutes": _WHOLE},
    "write_file": {"path": _TEXT, "content": _TEXT},
    "search_files": {"pattern": _TEXT, "folders": {"type": "array", "items": _TEXT}},
    "set_option": {"name": _TEXT, "enabled": {"type": "boolean"}},
    "order_item": {
        "item": _TEXT,
        "count": _WHOLE,
        "address": {"type": "object", "properties": {"street": _TEXT, "city": _TEXT}},
    },
}
_NAMES = ("Ana", "Björn", "Chidi", "Dmitri", "Eleni", "Fatima", "José", "Łukasz", "Mei", "Zoë")
_THINGS = ("lamp", "notebook", "kettle", "bicycle", "ladder", "blanket", "compass", "teapot")
_PLACES = ("Lisbon", "Kraków", "Oslo", "Quito", "Hà Nội", "Athens", "Nairobi", "Reykjavík")
_WORDS = ("north", "river", "seven", "copper", "window", "garden", "signal", "harbour", "paper")
_TASK = "Now do only this, with the tools and without any other words: "


def call_problems(
    tokenizer: Tokenizer, texts: Sequence[str], *, limit: int, seed: int, context_tokens: int
) -> tuple[list[Problem], Counter[str]]:
    """Returns problems after a conversation of about `context_tokens`, and a count of verdicts.

    The count grows as the problems are judged. Raises `RequestError` for a model whose template
    has no form of calls.
    """
    rows = [_row(name, fields) for name, fields in _TOOLS.items()]
    tools, _ = tools_of(Fields({"tools": rows}), tokenizer)
    assert tools is not None
    variables = {"tools": tools.rows}
    shown, verdicts = tools.shown(tokenizer), Counter[str]()
    before = _conversation(tokenizer, texts, context_tokens)
    chance = random.Random(seed)
    return [
        Problem(
            name=f"{kind} {number}",
            ids=tokenizer.chat(
                [*before, {"role": "user", "content": _TASK + text}], variables=variables
            ),
            stops=(),
            solves=partial(_judged, tools, calls, verdicts),
            shown=shown,
        )
        for number, (kind, text, calls) in zip(range(limit), _requests(chance), strict=False)
    ], verdicts  # fmt: skip


def calling(
    open_session: OpenSession,
    problems: Sequence[Problem],
    verdicts: Counter[str],
    answer_tokens: int,
    progress: Progress,
) -> Measurement:
    """Measures the share of requests whose calls are right, and counts the verdicts."""
    measured = solving(open_session, problems, answer_tokens, progress, "right calls")
    counts = {verdict: verdicts[verdict] for verdict in VERDICTS}
    return replace(measured, details=measured.details | counts)


Call = tuple[str, dict[str, Any]]


def _quotes(chance: random.Random) -> Call:
    text = f'{chance.choice(_NAMES)} said "{_words(chance)}" and left'
    return "send_message", {"to": chance.choice(_NAMES), "text": text}


def _lines(chance: random.Random) -> Call:
    lines = [f"{word} = {chance.randrange(100)}" for word in chance.sample(_WORDS, 3)]
    return "write_file", {"path": f"{chance.choice(_THINGS)}.ini", "content": "\n".join(lines)}


def _letters(chance: random.Random) -> Call:
    text = f"Ça va, {chance.choice(_NAMES)}? → {chance.choice(_PLACES)} №{chance.randrange(90)}"
    return "send_message", {"to": chance.choice(_NAMES), "text": text}


def _nested(chance: random.Random) -> Call:
    street = f"{chance.choice(_WORDS).title()} Street {chance.randrange(1, 90)}"
    address = {"street": street, "city": chance.choice(_PLACES)}
    item, count = chance.choice(_THINGS), chance.randrange(2, 40)
    return "order_item", {"item": item, "count": count, "address": address}


def _list(chance: random.Random) -> Call:
    folders = chance.sample(_THINGS, 3)
    return "search_files", {"pattern": f"{chance.choice(_WORDS)}_*.py", "folders": folders}


def _flag(chance: random.Random) -> Call:
    return "set_option", {"name": chance.choice(_WORDS), "enabled": chance.random() < 0.5}


def _plain(chance: random.Random) -> Call:
    day = f"2026-0{chance.randrange(1, 10)}-{chance.randrange(10, 28)}"
    minutes = 5 * chance.randrange(3, 30)
    return "create_event", {"title": _words(chance), "day": day, "minutes": minutes}


# The calls of each kind of request.
_KINDS: dict[str, tuple[Callable[[random.Random], Call], ...]] = {
    "plain": (_plain,), "quotes": (_quotes,), "lines": (_lines,), "letters": (_letters,),
    "nested": (_nested,), "list": (_list,), "two": (_plain, _flag),
}  # fmt: skip


def _requests(chance: random.Random) -> Iterator[tuple[str, str, list[Call]]]:
    """Yields kinds, texts of requests, and the calls that they ask for."""
    while True:
        for kind, parts in _KINDS.items():
            calls = [part(chance) for part in parts]
            yield kind, " Then ".join(_request_text(*call) for call in calls), calls


def _words(chance: random.Random) -> str:
    return " ".join(chance.sample(_WORDS, 3))


def _request_text(name: str, arguments: dict[str, Any]) -> str:
    values = "; ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}"
                       for key, value in arguments.items())  # fmt: skip
    return f"call {name} with {values}."


def _judged(tools: Tools, calls: Sequence[Call], verdicts: Counter[str], text: str) -> bool:
    """Decides whether `text` makes these calls, in any order, and counts the verdict."""
    reader = tools.reader()
    pieces = [*reader.feed(text), *reader.flush()]
    written = [(piece.name, json.loads(piece.arguments))
               for piece in pieces if isinstance(piece, CallPiece)]  # fmt: skip
    verdict = _verdict(written, calls)
    verdicts[verdict] += 1
    return verdict == RIGHT


def _verdict(written: Sequence[Call], calls: Sequence[Call]) -> str:
    if not written:
        return UNPARSED
    if sorted(name for name, _ in written) != sorted(name for name, _ in calls):
        return OTHER_TOOL
    same = all(written.count(call) == calls.count(call) for call in calls)
    return RIGHT if same else OTHER_ARGUMENTS


def _conversation(
    tokenizer: Tokenizer, texts: Sequence[str], context_tokens: int
) -> list[dict[str, Any]]:
    """Returns turns in which somebody shows pieces of `texts`, of `context_tokens` in all."""
    turns: list[dict[str, Any]] = []
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    pieces = ["".join(lines[start : start + 10]) for start in range(0, len(lines), 10)]
    for number, piece in enumerate(pieces):
        turn = [
            {"role": "user", "content": f"Part {number + 1}:\n{piece}"},
            {"role": "assistant", "content": f"I have read part {number + 1}."},
        ]
        if len(tokenizer.chat([*turns, *turn])) > context_tokens:
            break
        turns += turn
    return turns


def _row(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": fields, "required": [*fields]}
    return {
        "type": "function",
        "function": {"name": name, "description": name.replace("_", " "), "parameters": parameters},
    }
