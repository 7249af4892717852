"""Short texts that each teach one thing: a whole function, an edit that repeats its input, JSON.

Generators of plain text, in an order that the given random state fixes; those that read no sources
are endless.
"""

from __future__ import annotations

import ast
import json
import keyword
import random
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Source = tuple[str, str]

MOST_LINES, FEWEST_LINES = 40, 3
WORD = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{2,}\b")
NUMBER = re.compile(r"\b\d+\b")
DOCSTRING = re.compile(r':\n\s+r?(""|\'\')')  # behind a first line
# What people call the same thing: varied, so that a form is learnt and not one spelling of it.
SYNONYMS = {
    "items": ("values", "elements", "data", "arr", "lst", "numbers"),
    "item": ("value", "element", "x"), "result": ("res", "output", "total"),
    "text": ("s", "string", "word"), "n": ("num", "number", "k"),
    "values": ("items", "numbers", "data"), "found": ("result", "out"), "middle": ("mid",),
    "low": ("left", "lo"), "high": ("right", "hi"), "index": ("i", "position"),
    "path": ("filename",), "target": ("key", "wanted"), "count": ("n", "length"),
    "limit": ("n", "maximum"), "numbers": ("nums", "sequence"), "counts": ("result", "frequencies"),
}  # fmt: skip
NEW_WORDS = (
    "total", "amount", "record", "entry", "payload", "buffer", "handler", "context", "options",
    "settings", "source", "target", "result", "current", "previous", "label", "title", "message",
    "response", "request", "session", "account", "client", "server", "worker", "queue", "batch",
)  # fmt: skip
JSON_KEYS = (
    "id", "name", "email", "age", "active", "price", "quantity", "tags", "city", "country", "color",
    "size", "status", "created", "updated", "version", "author", "license", "port", "host",
    "timeout", "retries", "enabled", "path", "score", "rank", "title", "items", "owner", "address",
    "phone",
)  # fmt: skip
JSON_WORDS = (
    "alice", "bob", "carol", "red", "green", "blue", "small", "large", "open", "closed", "pending",
    "paris", "oslo", "lima", "apple", "pear", "table", "chair", "lamp", "book", "draft", "final",
)  # fmt: skip


def definitions(text: str) -> list[str]:
    """The short functions and classes of a source file, each from column 0, without decorators."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.split("\n")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    short = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.end_lineno is not None:
            size = node.end_lineno - node.lineno + 1
            if FEWEST_LINES <= size <= MOST_LINES:
                whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if whole.startswith(("def ", "async def ", "class ")):
                    short.append(whole + "\n")
    return short


def functions(rng: random.Random, sources: Iterable[Source]) -> Iterator[str]:
    """Whole functions and small classes; those with a docstring four times as often as others.

    What equals an earlier one but for white space is left out.
    """
    seen = set[int]()
    for _, text in sources:
        known = definitions(text)
        kept = [whole for whole in known if DOCSTRING.search(whole) or rng.random() < 0.25]
        for whole in rng.sample(kept, min(len(kept), 12)):
            key = hash(" ".join(whole.split()))
            if key not in seen:
                seen.add(key)
                yield whole


def primer(rng: random.Random) -> Iterator[str]:
    """The functions of primer.txt with other names, with and without their docstrings."""
    known = definitions((Path(__file__).parent / "primer.txt").read_text(encoding="utf-8"))
    alone = [whole for whole in known if not re.match(r"def \w+\(self", whole)]
    while True:
        rng.shuffle(alone)
        for whole in alone:
            yield varied(rng, whole)


def varied(rng: random.Random, definition: str) -> str:
    """`definition` under some other names."""
    if rng.random() < 0.4:
        definition = re.sub(r'(:\n)\s+"""[^\n]*"""\n+', r"\1", definition, count=1)
    for old, synonyms in SYNONYMS.items():
        new = rng.choice(synonyms)
        if rng.random() < 0.35 and not re.search(rf"\b{new}\b", definition):
            definition = re.sub(rf"\b{old}\b", new, definition)
    return definition


def edits(rng: random.Random, sources: Iterable[Source]) -> Iterator[tuple[str, str, str]]:
    """(request, text, edited text): a name, a number or a line of a piece of source is changed."""
    for _, text in sources:
        for whole in definitions(text)[:4]:
            change = rng.choice((_renamed, _renamed, _renumbered, _without_line))
            changed = change(rng, whole)
            if changed is not None:
                yield changed[0], whole, changed[1]


def _renamed(rng: random.Random, text: str) -> tuple[str, str] | None:
    names = sorted({word for word in WORD.findall(text) if not keyword.iskeyword(word)})
    new = rng.choice(NEW_WORDS)
    if not names or new in names:
        return None
    old = rng.choice(names)
    return f"Rename {old} to {new}.", re.sub(rf"\b{old}\b", new, text)


def _renumbered(rng: random.Random, text: str) -> tuple[str, str] | None:
    numbers = sorted(set(NUMBER.findall(text)))
    if not numbers:
        return None
    old, new = rng.choice(numbers), str(rng.randrange(2, 100))
    return f"Change {old} to {new}.", re.sub(rf"\b{old}\b", new, text)


def _without_line(rng: random.Random, text: str) -> tuple[str, str] | None:
    lines = text.splitlines(keepends=True)
    at = rng.randrange(1, len(lines))
    if not lines[at].strip():
        return None
    return f"Remove the line {lines[at].strip()}", "".join(lines[:at] + lines[at + 1 :])


def json_edits(rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """(request, JSON text, changed JSON text): a value is set, a key goes, or the form changes."""
    while True:
        records = [_record(rng) for _ in range(rng.choice((1, 2, 3, 5, 8)))]
        value: Any = records[0] if len(records) == 1 else records
        indent = rng.choice((None, 2, 2, 4))
        before = json.dumps(value, indent=indent)
        keys = sorted(set().union(*records))
        key = rng.choice(keys)
        kind = rng.randrange(3)
        if kind == 0:
            new = _scalar(rng)
            records[rng.randrange(len(records))][key] = new
            for record in records[1:] if rng.random() < 0.5 else ():
                record[key] = new
            request = f"Set {key} to {json.dumps(new)}."
        elif kind == 1:
            for record in records:
                record.pop(key, None)
            request = f"Remove {key}."
        else:
            indent = None if indent else 2
            request = f"Write it {'with an indent of 2' if indent else 'on one line'}."
        yield request, before + "\n", json.dumps(value, indent=indent) + "\n"


def _record(rng: random.Random) -> dict[str, Any]:
    keys = rng.sample(JSON_KEYS, rng.randint(2, 7))
    return {key: _scalar(rng) if rng.random() < 0.85 else _several(rng) for key in keys}


def _several(rng: random.Random) -> Any:
    words = [_scalar(rng) for _ in range(rng.randint(1, 4))]
    keys = rng.sample(JSON_KEYS, len(words))
    return words if rng.random() < 0.6 else dict(zip(keys, words, strict=True))


def _scalar(rng: random.Random) -> Any:
    return rng.choice(
        (
            rng.choice(JSON_WORDS), rng.choice(JSON_WORDS), rng.randrange(1000),
            round(rng.random() * 100, 2), rng.random() < 0.5, None,
        )
    )  # fmt: skip
