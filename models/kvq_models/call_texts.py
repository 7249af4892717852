"""Calls of tools that are not JSON objects: how they stand between marks, and how they are read.

`tools` has the table of forms that names these. Whatever a model writes there, a reader says None
for what is no call, in time and depth that are bounded by the text. Knows no stream, no grammar.
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
# A string of Gemma's stands between two of these, as it is.
_RAW_QUOTE = '<|"|>'
_QUOTED = {
    mark: re.compile(rf"[^{mark}\\]*(?:\\.[^{mark}\\]*)*{mark}", re.DOTALL) for mark in "\"'"
}
_HARMONY = re.compile(
    r"(?: to=functions\.)?([\w.\-]+)(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json)?\s*"
    r"<\|message\|>(.*?)(?:<\|call\|>)?",
    re.DOTALL,
)
_MISTRAL = re.compile(r"(?:\[TOOL_CALLS\])?([\w.\-]+)(?:\[CALL_ID\][\w.\-]*)?\[ARGS\]\s*(?=\{)")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class _NoCallError(Exception):
    """What was read is no call."""


def xml_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter>..</function>`, one or several.

    A value is text where the schema of its parameter says so, and where it is no JSON.
    """
    return _calls(body, partial(_xml_call, schemas=schemas))


def gemma_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`call:NAME{KEY:VALUE,..}` with bare keys, and strings between the marks `<|"|>`."""
    return _calls(body, _gemma_call)


def python_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`[NAME(KEY=VALUE, ..), ..]` with Python's literals; the brackets may be left out."""

    def call(scanner: _Scanner) -> Call:
        name = scanner.name()
        scanner.want("(")
        return name, scanner.items("=", ")", depth=0)

    return _calls(body, call, listed=True)


def harmony_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`NAME <|constrain|>json<|message|>{..}`, or ` to=functions.NAME<|channel|>..<|message|>{..}`.

    What says that the arguments are JSON may be left out.
    """
    found = _HARMONY.fullmatch(body)
    if found is None:
        return None
    try:
        arguments: Any = json.loads(found[2])
    except (ValueError, RecursionError):
        return None
    return [(found[1], arguments)] if is_object(arguments) else None


def mistral_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`NAME[ARGS]{..}`, others behind the mark [TOOL_CALLS]; an id of the call may be there too.

    Or what older models of the family write there, which is JSON.
    """
    calls: list[Call] = []
    body, place = body.strip(), 0
    while found := _MISTRAL.match(body, place):
        try:
            arguments, place = json.JSONDecoder().raw_decode(body, found.end())
        except (ValueError, RecursionError):
            return None
        if not is_object(arguments):
            return None
        calls.append((found[1], arguments))
    return calls if calls and place == len(body) else json_calls(body)


def python_text(calls: Sequence[Call]) -> str:
    """What `python_calls` reads as these calls."""
    rows = (
        f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(rows)}]"


def _literal(value: Any) -> str:
    """A value in Python's literals; of a string each character stands there as it is."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, cast(list[Any], value)))}]"
    if is_object(value):
        rows = (f"{_literal(key)}: {_literal(one)}" for key, one in value.items())
        return f"{{{', '.join(rows)}}}"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """How values stand in a notation.

    A string stands between two of one of `quotes`. What may not stand there bare has a backslash
    before it where the notation `escapes`, and stands nowhere else; the ends of lines and their
    like may stand there with `controls`. A space at the end of `comma`,
    between two values, and of `colon`, behind a key, may be left out. Keys of objects are `bare`,
    or strings; `by_name`: they come in the order of their names. `inner` is how values stand within
    lists and objects, where that is otherwise.
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
    """How a family's template writes a call between the marks of its form, and what reads it.

    `head` and `tail` stand around the arguments, `key` and `end` around each value, `comma` between
    two of them; NAME and KEY stand for the names. Without a `key` the arguments are one object.
    `bare_head` stands in place of `head` where a call may begin with the bare mark of its form too.
    """

    read: Callable[[str, Schemas], list[Call] | None]
    values: Values
    head: str
    tail: str = ""
    key: str = ""
    end: str = ""
    comma: str = ""
    bare_head: str = ""


_JSON = Values(words=_JSON_WORDS, quotes=('"',), escapes=True)

XML = Notation(
    read=xml_calls,
    # A string that is an argument stands there as it is.
    values=Values(words=_ANY_WORDS, quotes=("",), inner=_JSON),
    head="<function=NAME>\n",
    tail="</function>",
    key="<parameter=KEY>\n",
    end="\n</parameter>\n",
)
GEMMA = Notation(
    read=gemma_calls,
    values=Values(
        words={**_JSON_WORDS, None: ("null", "None")},
        quotes=(_RAW_QUOTE,),
        comma=",",
        colon=":",
        bare=True,
        by_name=True,
    ),
    head="call:NAME{",
    tail="}",
    key="KEY:",
    comma=",",
)
PYTHON = Notation(
    read=python_calls,
    values=Values(words=_ANY_WORDS, quotes=("'", '"'), escapes=True, controls=True),
    head="NAME(",
    tail=")",
    key="KEY=",
    comma=", ",
)
# Models put the recipient into the channel or, as the template writes earlier calls, before it.
HARMONY = Notation(
    read=harmony_calls,
    values=_JSON,
    head="NAME <|constrain|>json<|message|>",
    bare_head="NAME<|channel|>commentary json<|message|>",
)
MISTRAL = Notation(read=mistral_calls, values=_JSON, head="NAME[ARGS]")


def json_calls(body: str) -> list[Call] | None:
    """JSON objects of a name and arguments, one or a list of them."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    rows = cast(list[Any], found) if isinstance(found, list) else [found]
    calls: list[Call] = []
    for row in rows:
        if not isinstance(row, Mapping):
            return None
        one = cast(Mapping[str, Any], row)
        name, arguments = one.get("name"), one.get("arguments", one.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append((name, cast(dict[str, Any], arguments)))
    return calls or None


def _calls(body: str, read: Any, *, listed: bool = False) -> list[Call] | None:
    """All that `read` finds one after the other; some models write JSON in the place of it."""
    scanner = _Scanner(body)
    calls: list[Call] = []
    try:
        bracket = listed and scanner.took("[")
        while not scanner.ended and not (bracket and scanner.took("]")):
            calls.append(read(scanner))
            scanner.took(",")
        if not scanner.ended:
            return None
    except _NoCallError:
        return json_calls(body)
    return calls or None


class _Scanner:
    """A text read from its beginning. Its methods raise `_NoCallError` for what is not there."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    @property
    def ended(self) -> bool:
        """Whether only spaces are left."""
        self._skip()
        return self._place == len(self._text)

    def took(self, mark: str) -> bool:
        """Goes past spaces and `mark`, if it is there."""
        self._skip()
        found = self._text.startswith(mark, self._place)
        self._place += len(mark) if found else 0
        return found

    def want(self, mark: str) -> None:
        """Goes past spaces and `mark`."""
        if not self.took(mark):
            raise _NoCallError

    def up_to(self, mark: str) -> str:
        """What stands before `mark`, which is passed too."""
        end = self._text.find(mark, self._place)
        if end < 0:
            raise _NoCallError
        found, self._place = self._text[self._place : end], end + len(mark)
        return found

    def name(self) -> str:
        """The name of a function or of an argument."""
        self._skip()
        return self._matched(_NAME)

    def items(self, between: str, closing: str, *, depth: int) -> dict[str, Any]:
        """Keys and values up to `closing`, `between` standing between each two."""
        found: dict[str, Any] = {}
        while not self.took(closing):
            key = self._key(between)
            self.want(between)
            found[key] = self.value(depth=depth + 1)
            if not self.took(","):
                self.want(closing)
                break
        return found

    def value(self, *, depth: int) -> Any:
        """A string, a number, a word, a list or an object."""
        if depth > _MOST_NESTED:
            raise _NoCallError
        if self.took("{"):
            return self.items(":", "}", depth=depth)
        if self.took("["):
            rows: list[Any] = []
            while not self.took("]"):
                rows.append(self.value(depth=depth + 1))
                if not self.took(","):
                    self.want("]")
                    break
            return rows
        text = self._string()
        if text is not None:
            return text
        if _NUMBER.match(self._text, self._place):
            return _number(self._matched(_NUMBER))
        word = self._matched(_NAME)
        if word not in _WORDS:
            raise _NoCallError
        return _WORDS[word]

    def _key(self, between: str) -> str:
        text = self._string()
        if text is None:
            text = self.up_to(between).strip()
            self._place -= len(between)
        if not text:
            raise _NoCallError
        return text

    def _string(self) -> str | None:
        if self.took(_RAW_QUOTE):
            return self.up_to(_RAW_QUOTE)
        quote = next((mark for mark in _QUOTED if self.took(mark)), None)
        if quote is None:
            return None
        text = self._matched(_QUOTED[quote])[:-1]
        return _ESCAPED.sub(_unescaped, text)

    def _matched(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._place)
        if found is None:
            raise _NoCallError
        self._place = found.end()
        return found[0]

    def _skip(self) -> None:
        while self._place < len(self._text) and self._text[self._place].isspace():
            self._place += 1


def _gemma_call(scanner: _Scanner) -> Call:
    scanner.want("call:")
    name = scanner.name()
    scanner.want("{")
    return name, scanner.items(":", "}", depth=0)


def _xml_call(scanner: _Scanner, schemas: Schemas) -> Call:
    scanner.want("<function=")
    name = scanner.up_to(">").strip()
    root = schemas.get(name, {})
    properties, others = root.get("properties"), root.get("additionalProperties")
    rows = properties if is_object(properties) else dict[str, Any]()
    found: dict[str, Any] = {}
    while not scanner.took("</function>"):
        scanner.want("<parameter=")
        key = scanner.up_to(">").strip()
        text = scanner.up_to("</parameter>").removeprefix("\n").removesuffix("\n")
        schema = rows.get(key, others)
        found[key] = typed(text, kinds_of(schema, root)) if is_object(schema) else text
    if not name or "" in found:
        raise _NoCallError
    return name, found


def typed(text: str, kinds: Collection[str]) -> Any:
    """A value that stands as text, of one of `kinds` if they have text and it may be another."""
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = _WORDS.get(text.strip(), text)
    if (isinstance(value, float) and value in _ENDLESS) or (
        "string" in kinds and kind_of(value) not in kinds
    ):
        return text
    return value


_ENDLESS = (float("inf"), float("-inf"))


def _no_number(text: str) -> Any:
    raise ValueError(text)


def _number(text: str) -> int | float:
    # A number of thousands of digits is refused by `int`, one too large for a float by JSON.
    try:
        value = int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise _NoCallError from None
    if value in _ENDLESS:
        raise _NoCallError
    return value


def _unescaped(found: re.Match[str]) -> str:
    if found[1]:
        return chr(int(found[1], 16))
    return _ESCAPES.get(found[2], found[2])
