"""Finds the part of a JSON schema that can be enforced; the rest is left out and listed.

Schemas are of JSON Schema 2020-12; words of older drafts are translated. What is no schema is
refused, with its place.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn
from urllib.parse import unquote

from kvq.errors import UsageError
from kvq.json_values import is_array, is_object
from kvq_models.call_schemas import KEYWORDS, SHAPES, are_disjoint

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Words of the standard that are never enforced, and values that ask for nothing, which are not
# listed as left out.
UNFOLLOWED: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("if", "not", "contains", "$dynamicRef", "$recursiveRef"), ()),
}
# Words that mean nothing where the word beside them is not enforced.
_BESIDE = ("then", "else", "minContains", "maxContains")
_STANDARD = {
    *(word for words in KEYWORDS.values() for word in words),
    *("patternProperties", "minProperties", "maxProperties", "format", "$ref"),
    *("allOf", "anyOf", "oneOf"),
}
FORMATS = frozenset(
    {*("date-time", "time", "date", "duration", "email"), *("hostname", "ipv4", "ipv6"),
     "uuid", "uri"}
)  # fmt: skip
_MOST_UNHELD = 100
# So many patterns and numbers of a schema are tried. A fault in a later one refuses the schema.
_MOST_TRIED = 500
_PATTERN_FAULTS = {
    **dict.fromkeys(("(?=", "(?!"), "look-ahead"),
    **dict.fromkeys(("(?<=", "(?<!"), "look-behind"),
    **{f"\\{digit}": "a back reference" for digit in "k123456789"},
    **dict.fromkeys((r"\b", r"\B"), "a word boundary"),
}
_MOST_DIGITS = 8
# Words that hold schemas: by name, in a list, or one alone.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties")
_MAKES_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_SHAPES = {
    **SHAPES,
    **dict.fromkeys(_NAMED, (is_object, "an object of schemas")),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    **dict.fromkeys(("minProperties", "maxProperties"), SHAPES["minLength"]),
    **dict.fromkeys(("format", "$ref"), (_is_text, "a text")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """Says what can be enforced: which words and formats, and which patterns.

    `pattern_fault` returns the part of a pattern that cannot be followed, None if all of it can.
    """

    words: Collection[str]
    formats: Collection[str]
    pattern_fault: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """Holds a schema that can be enforced, and the places of what was left out of it."""

    schema: dict[str, Any]
    unheld: tuple[str, ...]


def pattern_fault(pattern: str) -> str | None:
    """Returns the part of `pattern` that llguidance cannot follow, None if it can follow all."""
    if _is_followed("pattern", pattern):
        return None
    return next(
        (fault for mark, fault in _PATTERN_FAULTS.items() if mark in pattern),
        "a pattern that cannot be followed",
    )


JSON_FOLLOWER = Follower(words=_STANDARD, formats=FORMATS, pattern_fault=pattern_fault)


def held_schema(
    schema: Mapping[str, Any],
    follower: Follower = JSON_FOLLOWER,
    *,
    strict: bool = False,
    place: str = "",
) -> HeldSchema:
    """Returns what `follower` can enforce of `schema`, which is not changed.

    `place` stands before the JSON pointers of what is left out. Raises `UsageError`, which names
    the place, for what is no schema and, if `strict`, where anything but a format is left out.
    """
    reader = _SchemaReader(schema, follower, place)
    reader.read()
    lost = [entry for entry, word in reader.unheld.items() if word != "format"]
    if strict and lost:
        raise UsageError(
            f"the JSON schema is strict, and an answer cannot be held to {', '.join(lost[:3])}; "
            "leave that out, or leave strict out, which holds the answer to the rest"
        )
    return HeldSchema(reader.root, tuple(reader.unheld)[:_MOST_UNHELD])


class _SchemaReader:
    """Reads a copy of one schema and removes what cannot be enforced."""

    def __init__(self, schema: Mapping[str, Any], follower: Follower, place: str) -> None:
        self.root: dict[str, Any] = deepcopy(dict(schema))
        # Message -> the word that it is about.
        self.unheld: dict[str, str] = {}
        self._follower = follower
        self._first = place
        # Parts to read. A list, as parts that refer to each other may be a long chain.
        self._due: list[tuple[Any, str]] = [(self.root, place)]
        self._seen: set[int] = set()
        self._tried = 0
        self._names = set(_names(self.root))

    def read(self) -> None:
        """Reads the schema, part by part, and all that the parts refer to."""
        while self._due:
            self._read(*self._due.pop())

    def _read(self, schema: Any, place: str) -> None:
        """Reads the part of the root that stands at `place`."""
        if isinstance(schema, bool) or id(schema) in self._seen:
            return
        if not is_object(schema):
            _refuse(place, "a schema is an object, true or false")
        self._seen.add(id(schema))
        renamed = _as_today(schema)
        self._narrow(schema)
        _check(schema, place)
        for word in [*schema]:
            self._read_word(schema, word, place)
        self._due += [(part, place + path) for path, part in _parts(schema, renamed)]
        if "oneOf" in schema and not are_disjoint(schema["oneOf"], self.root):
            self._leave_out(schema, "oneOf", place, "held as anyOf")

    def _read_word(self, schema: dict[str, Any], word: str, place: str) -> None:
        """Leaves `word` out where it cannot be enforced."""
        value = schema[word]
        if word in UNFOLLOWED:
            reason = None if value in UNFOLLOWED[word] else "not followed"
            self._leave_out(schema, word, place, reason)
        elif word in _BESIDE or (word == "type" and "any" in value):
            del schema[word]
        elif word in _STANDARD - {"format"} and word not in self._follower.words:
            self._leave_out(schema, word, place, "not followed")
        elif word == "format" and value not in self._follower.formats:
            text = "string" in schema.get("type", "string")
            self._leave_out(schema, word, place, f"{value[:40]} is not followed" if text else None)
        elif word == "$ref":
            self._read_reference(schema, place)
        elif word == "patternProperties":
            for pattern in [*value]:
                self._try(value, pattern, f"{place}/{word}", pattern, "pattern")
        elif word == "pattern" or word in _NUMBERS:
            self._try(schema, word, place, value, word)

    def _try(self, holder: dict[str, Any], key: str, place: str, value: Any, word: str) -> None:
        """Leaves `key` of `holder` out where its pattern or number `value` cannot be enforced."""
        self._tried += 1
        if self._tried > _MOST_TRIED:
            return
        if word == "pattern":
            fault = self._follower.pattern_fault(value)
        else:
            fault = None if _is_bound(word, value) else "a number that cannot be followed"
        if fault is not None:
            self._leave_out(holder, key, place, fault)

    def _read_reference(self, schema: dict[str, Any], place: str) -> None:
        """Reads what `$ref` names; a schema of another document is left out."""
        reference: str = schema["$ref"]
        document, _, path = reference.partition("#")
        if document and document not in self._names:
            self._leave_out(schema, "$ref", place, "another document is not looked up")
        elif not document and path.startswith("/"):
            self._due.append((self._referred(path, place), self._first + path))
        elif not document and path and path not in self._names:
            _refuse(f"{place}/$ref", f"{reference[:80]!r} refers to no part of the schema")

    def _referred(self, path: str, place: str) -> Any:
        part: Any = self.root
        for step in unquote(path).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if is_array(part) and name.isdecimal() and int(name[:9]) < len(part):
                part = part[int(name[:9])]
            elif is_object(part) and name in part:
                part = part[name]
            else:
                _refuse(f"{place}/$ref", f"{path[:80]!r} refers to no part of the schema")
        return part

    def _narrow(self, schema: dict[str, Any]) -> None:
        """Replaces words that cannot be enforced by others that mean the same."""
        names, rest = schema.get("propertyNames"), schema.get("additionalProperties", True)
        if is_object(names) and str(names.get("$ref", "")).startswith("#/"):
            names = self._referred(names["$ref"][1:], "/propertyNames")
        if is_object(names) and not {"properties", "patternProperties"} & schema.keys():
            listed = names.get("enum", [names["const"]] if "const" in names else None)
            if is_array(listed) and all(isinstance(name, str) for name in listed):
                schema["properties"] = dict.fromkeys(listed, rest)
            elif isinstance(names.get("pattern"), str) and names.keys() <= {"type", "pattern"}:
                schema["patternProperties"] = {names["pattern"]: rest}
            else:
                return
            del schema["propertyNames"]
            schema["additionalProperties"] = False
        if schema.get("unevaluatedProperties") is False and not (
            schema.keys() & {*_MAKES_PROPERTIES, "additionalProperties"}
        ):
            schema["additionalProperties"] = schema.pop("unevaluatedProperties")

    def _leave_out(self, holder: dict[str, Any], word: str, place: str, reason: str | None) -> None:
        value = holder.pop(word)
        if word == "oneOf":
            holder["allOf"] = [*holder.get("allOf", []), {"anyOf": value}]
        if reason is not None:
            name = word.replace("~", "~0").replace("/", "~1")
            self.unheld[f"{place}/{name}: {reason}"] = word


def _as_today(schema: dict[str, Any]) -> Mapping[str, str]:
    """Translates words of older drafts, and removes words that are null.

    Returns the old name of each part that was renamed.
    """
    renamed: Mapping[str, str] = {}
    for word in [*schema]:
        absent = schema[word] is None and (word in _SHAPES or word in ("type", *_ALONE))
        if word == "$schema" or absent:
            del schema[word]
        elif word in _SHAPES and isinstance(schema[word], float) and schema[word].is_integer():
            schema[word] = int(schema[word])
    if is_array(schema.get("items")):
        renamed = {"prefixItems": "items", "items": "additionalItems"}
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema.pop("additionalItems")
    for bound in ("minimum", "maximum"):
        name = f"exclusive{bound.title()}"
        if isinstance(schema.get(name), bool):
            exclusive = schema.pop(name)
            if exclusive and bound in schema:
                schema[name] = schema.pop(bound)
    return renamed


def _check(schema: Mapping[str, Any], place: str) -> None:
    """Raises `UsageError` where a word has a value that it cannot have."""
    for word in schema.keys() & _SHAPES.keys():
        holds, description = _SHAPES[word]
        if not holds(schema[word]):
            _refuse(f"{place}/{word}", f"it has to be {description}")
    kinds = schema.get("type", "any")
    for kind in kinds if is_array(kinds) else [kinds]:
        if kind not in (*KEYWORDS, "any"):
            _refuse(f"{place}/type", f"{str(kind)[:40]!r} is none of {', '.join(KEYWORDS)}")


def _parts(schema: Mapping[str, Any], renamed: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yields the schemas inside `schema`, each with its path as it was written."""
    for word in schema:
        called = renamed.get(word, word)
        if word in _NAMED:
            for name, part in schema[word].items():
                yield f"/{called}/{name.replace('~', '~0').replace('/', '~1')}", part
        elif word in _LISTED:
            for place, part in enumerate(schema[word]):
                yield f"/{called}/{place}", part
        elif word in _ALONE:
            yield f"/{called}", schema[word]


def _names(value: Any) -> Iterator[str]:
    """Yields the names that parts of a schema give themselves, for references."""
    if is_object(value):
        for word in ("$id", "id", "$anchor"):
            if isinstance(value.get(word), str):
                yield value[word]
    rows = value.values() if is_object(value) else value if is_array(value) else ()
    for row in rows:
        yield from _names(row)


def _is_bound(word: str, value: float) -> bool:
    """Decides whether the bound `value` of the number word `word` can be enforced."""
    if word == "multipleOf":
        # Trying a long one is much work.
        return 0 < value < 10**_MOST_DIGITS and len(str(value)) <= _MOST_DIGITS + 1
    return isfinite(value) and _is_followed(word, value)


def _is_followed(word: str, value: Any) -> bool:
    """Tries whether llguidance can follow this pattern or number."""
    from llguidance import LLMatcher

    kind = "string" if word == "pattern" else "number"
    grammar = f"start: %json {json.dumps({'type': kind, word: value})}\n"
    return not LLMatcher.validate_grammar(grammar)


def _refuse(place: str, message: str) -> NoReturn:
    raise UsageError(f"the JSON schema cannot be read at {place or 'its top'}: {message}")
