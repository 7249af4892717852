"""Reads and writes tool calls that are not JSON objects, as they stand between marks.

The table of forms in `tools` names these notations. A reader returns None for what is no call, in
time and depth that are bounded by the text. The module knows no stream and no grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from kvq.json_values import is_object
from kvq_models.call_schemas import kind_of, kinds_of

Call = tuple[str, dict[str, Any]]
Schemas = Mapping[str, Mapping[str, Any]]

_MOST_NESTED = 64
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,4})?")
Words = Mapping[bool | None, tuple[str, ...]]
_JSON_WORDS: Words = {True: ("true",), False: ("false",), None: ("null",)}
_ANY_WORDS: Words = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}
_WORDS = {word: value for value, words in _ANY_WORDS.items() for word in words}
# Gemma writes a string between two of these, without escapes.
_RAW_QUOTE = '<|"|>'
_QUOTED = {
    mark: re.compile(rf"[^{mark}\\]*(?:\\.[^{mark}\\]*)*{mark}", re.DOTALL) for mark in "\"'"
}
_HARMONY = re.compile(
    r"(?: to=functions\.)?([\w.\-]+)(?:<\|channel\|>\w+)?\s*+(?:<\|constrain\|>)?(?:json)?\s*+"
    r"<\|message\|>(.*?)(?:<\|call\|>)?",
    re.DOTALL,
)
_MISTRAL = re.compile(r"(?:\[TOOL_CALLS\])?([\w.\-]+)(?:\[CALL_ID\][\w.\-]*)?\[ARGS\]\s*(?=\{)")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class _NoCallError(Exception):
    """Says that the text is no call."""


def xml_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """Reads calls `<function=NAME><parameter=KEY>VALUE</parameter>..</function>`.

    A value is text if the schema of its parameter says so, or if it is no JSON.
    """
    return _calls(body, partial(_xml_call, schemas=schemas))


def gemma_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """Reads calls `call:NAME{KEY:VALUE,..}` with bare keys and strings between `<|"|>`."""
    return _calls(body, _gemma_call)


def python_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """Reads calls `[NAME(KEY=VALUE, ..), ..]` with Python literals; the brackets may be missing."""

    def call(scanner: _Scanner) -> Call:
        name = scanner.name()
        scanner.expect("(")
        return name, scanner.items("=", ")", depth=0)

    return _calls(body, call, listed=True)


def harmony_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """Reads a call `NAME <|constrain|>json<|message|>{..}`.

    It also reads ` to=functions.NAME<|channel|>..<|message|>{..}`. The part that says that the
    arguments are JSON may be missing.
    """
    match = _HARMONY.fullmatch(body)
    if match is None:
        return None
    try:
        arguments: Any = json.loads(match[2])
    except (ValueError, RecursionError):
        return None
    return [(match[1], arguments)] if is_object(arguments) else None


def mistral_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """Reads calls `NAME[ARGS]{..}`, further ones after [TOOL_CALLS]; each may have an id.

    It also reads the JSON that older models of the family write.
    """
    calls: list[Call] = []
    body, place = body.strip(), 0
    while match := _MISTRAL.match(body, place):
        try:
            arguments, place = json.JSONDecoder().raw_decode(body, match.end())
        except (ValueError, RecursionError):
            return None
        if not is_object(arguments):
            return None
        calls.append((match[1], arguments))
    return calls if calls and place == len(body) else json_calls(body)


def python_text(calls: Sequence[Call]) -> str:
    """Writes calls as `python_calls` reads them."""
    rows = (
        f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(rows)}]"


def _literal(value: Any) -> str:
    """Writes a value as a Python literal; all characters of a string stay as they are."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, cast(list[Any], value)))}]"
    if is_object(value):
        rows = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(rows)}}}"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """Describes how values are written in a notation.

    A string stands between two equal ones of `quotes`. With `escapes` a backslash stands before
    characters that may not stand there bare, and nowhere else. With `controls` line ends and other
    control characters may stand in a string. A space at the end of `comma`, between two values, and
    of `colon`, after a key, may be missing. Keys of objects are `bare`, or strings; with `by_name`
    they are sorted. `inner` describes the values within lists and objects, if these are written in
    another way.
    """

    words: Words
    quotes: tuple[str, ...]
    escapes: bool = False
    controls: bool = False
    comma: str = ", "
    colon: str = ": "
    bare: bool = False
    by_name: bool = False
    inner: Values | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Notation:
    """Describes how a family's template writes a call between the marks of its form.

    `read` reads such calls. `head` and `tail` stand around the arguments, `key` and `end` around
    each value, `comma` between two of them; NAME and KEY stand for the names. Without a `key` the
    arguments are one object. `bare_head` replaces `head` where a call may also begin with the bare
    mark of its form.
    """

    read: Callable[[str, Schemas], list[Call] | None]
    values: Values
    head: str
    tail: str = ""
    key: str = ""
    end: str = ""
    comma: str = ""
    bare_head: str = ""

    def writes(self, name: str, *, bare: bool = False) -> bool:
        """Returns whether a call with this name can be written so that it is read as one."""
        head = (self.bare_head if bare else self.head).replace("NAME", name)
        empty = f"{head}{'' if self.key else '{}'}{self.tail}"
        return self.read(empty, {}) == [(name, {})]


_JSON = Values(words=_JSON_WORDS, quotes=('"',), escapes=True)

XML = Notation(
    read=xml_calls,
    # An argument that is a string has no quotes and no escapes.
    values=Values(words=_ANY_WORDS, quotes=("",), inner=_JSON),
    head="<function=NAME>\n", tail="</function>",
    key="<parameter=KEY>\n", end="\n</parameter>\n",
)  # fmt: skip
GEMMA = Notation(
    read=gemma_calls,
    values=Values(words={**_JSON_WORDS, None: ("null", "None")}, quotes=(_RAW_QUOTE,), comma=",",
        colon=":", bare=True, by_name=True),
    head="call:NAME{", tail="}", key="KEY:", comma=",",
)  # fmt: skip
PYTHON = Notation(
    read=python_calls,
    values=Values(words=_ANY_WORDS, quotes=("'", '"'), escapes=True, controls=True),
    head="NAME(", tail=")", key="KEY=", comma=", ",
)  # fmt: skip
# The recipient may stand in the channel or before it, as templates write earlier calls.
HARMONY = Notation(
    read=harmony_calls,
    values=_JSON,
    head="NAME <|constrain|>json<|message|>",
    bare_head="NAME<|channel|>commentary json<|message|>",
)
MISTRAL = Notation(read=mistral_calls, values=_JSON, head="NAME[ARGS]")


def json_calls(body: str) -> list[Call] | None:
    """Reads one JSON object of a name and arguments, or a list of them."""
    try:
        parsed: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    rows = cast(list[Any], parsed) if isinstance(parsed, list) else [parsed]
    calls: list[Call] = []
    for row in rows:
        if not isinstance(row, Mapping):
            return None
        entry = cast(Mapping[str, Any], row)
        name, arguments = entry.get("name"), entry.get("arguments", entry.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append((name, cast(dict[str, Any], arguments)))
    return calls or None


def _calls(body: str, read: Any, *, listed: bool = False) -> list[Call] | None:
    """Returns all calls that `read` finds, or JSON calls, which some models write instead."""
    scanner = _Scanner(body)
    calls: list[Call] = []
    try:
        bracket = listed and scanner.accept("[")
        while not scanner.at_end and not (bracket and scanner.accept("]")):
            calls.append(read(scanner))
            scanner.accept(",")
        if not scanner.at_end:
            return None
    except _NoCallError:
        return json_calls(body)
    return calls or None


class _Scanner:
    """Reads a text from its beginning; methods raise `_NoCallError` if what they want is absent."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    @property
    def at_end(self) -> bool:
        """Returns whether only spaces are left."""
        self._skip_spaces()
        return self._place == len(self._text)

    def accept(self, mark: str) -> bool:
        """Skips spaces, and `mark` if it is next; returns whether it was."""
        self._skip_spaces()
        is_next = self._text.startswith(mark, self._place)
        self._place += len(mark) if is_next else 0
        return is_next

    def expect(self, mark: str) -> None:
        """Skips spaces and `mark`."""
        if not self.accept(mark):
            raise _NoCallError

    def read_until(self, mark: str) -> str:
        """Returns the text before `mark`, and skips the mark."""
        end = self._text.find(mark, self._place)
        if end < 0:
            raise _NoCallError
        text, self._place = self._text[self._place : end], end + len(mark)
        return text

    def name(self) -> str:
        """Reads the name of a function or of an argument."""
        self._skip_spaces()
        return self._match(_NAME)

    def items(self, between: str, closing: str, *, depth: int) -> dict[str, Any]:
        """Reads keys and values up to `closing`, with `between` after each key."""
        entries: dict[str, Any] = {}
        while not self.accept(closing):
            key = self._key(between)
            self.expect(between)
            entries[key] = self.value(depth=depth + 1)
            if not self.accept(","):
                self.expect(closing)
                break
        return entries

    def value(self, *, depth: int) -> Any:
        """Reads a string, a number, a word, a list or an object."""
        if depth > _MOST_NESTED:
            raise _NoCallError
        if self.accept("{"):
            return self.items(":", "}", depth=depth)
        if self.accept("["):
            rows: list[Any] = []
            while not self.accept("]"):
                rows.append(self.value(depth=depth + 1))
                if not self.accept(","):
                    self.expect("]")
                    break
            return rows
        text = self._string()
        if text is not None:
            return text
        if _NUMBER.match(self._text, self._place):
            return _number(self._match(_NUMBER))
        word = self._match(_NAME)
        if word not in _WORDS:
            raise _NoCallError
        return _WORDS[word]

    def _key(self, between: str) -> str:
        text = self._string()
        if text is None:
            text = self.read_until(between).strip()
            self._place -= len(between)
        if not text:
            raise _NoCallError
        return text

    def _string(self) -> str | None:
        if self.accept(_RAW_QUOTE):
            return self.read_until(_RAW_QUOTE)
        quote = next((mark for mark in _QUOTED if self.accept(mark)), None)
        if quote is None:
            return None
        text = self._match(_QUOTED[quote])[:-1]
        return _ESCAPED.sub(_unescaped, text)

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._place)
        if match is None:
            raise _NoCallError
        self._place = match.end()
        return match[0]

    def _skip_spaces(self) -> None:
        while self._place < len(self._text) and self._text[self._place].isspace():
            self._place += 1


def _gemma_call(scanner: _Scanner) -> Call:
    scanner.expect("call:")
    name = scanner.name()
    scanner.expect("{")
    return name, scanner.items(":", "}", depth=0)


def _xml_call(scanner: _Scanner, schemas: Schemas) -> Call:
    scanner.expect("<function=")
    name = scanner.read_until(">").strip()
    root = schemas.get(name, {})
    properties, additional = root.get("properties"), root.get("additionalProperties")
    rows = properties if is_object(properties) else dict[str, Any]()
    arguments: dict[str, Any] = {}
    while not scanner.accept("</function>"):
        scanner.expect("<parameter=")
        key = scanner.read_until(">").strip()
        text = scanner.read_until("</parameter>").removeprefix("\n").removesuffix("\n")
        schema = rows.get(key, additional)
        arguments[key] = typed(text, kinds_of(schema, root)) if is_object(schema) else text
    if not name or "" in arguments:
        raise _NoCallError
    return name, arguments


def typed(text: str, kinds: Collection[str]) -> Any:
    """Returns the value that `text` stands for.

    It stays a text if it is of no other kind, or of one that is not among `kinds`, provided that
    these include strings.
    """
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = _WORDS.get(text.strip(), text)
    if (isinstance(value, float) and value in _INFINITE) or (
        "string" in kinds and kind_of(value) not in kinds
    ):
        return text
    return value


_INFINITE = (float("inf"), float("-inf"))


def _no_number(text: str) -> Any:
    raise ValueError(text)


def _number(text: str) -> int | float:
    # `int` refuses thousands of digits, and JSON has no infinite number.
    try:
        value = int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise _NoCallError from None
    if value in _INFINITE:
        raise _NoCallError
    return value


def _unescaped(match: re.Match[str]) -> str:
    if match[1]:
        return chr(int(match[1], 16))
    return _ESCAPES.get(match[2], match[2])
