"""What the schema of a call's arguments says: the branches a value may fit, and their kinds.

A part of JSON Schema 2020-12: what is no part of it is refused by name. Knows no notation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations, product
from typing import Any

from kvq.errors import UsageError
from kvq.json_values import is_array, is_object

Branch = dict[str, Any]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return is_array(value) and all(isinstance(one, str) for one in value)


_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# What may be said of each kind, by JSON's names of kinds.
KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": _NUMBER,
    "integer": _NUMBER,
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "boolean": (),
    "null": (),
}
# An integer is a number.
KINDS = frozenset(KEYWORDS) - {"integer"}
_SAID = {keyword for keywords in KEYWORDS.values() for keyword in keywords} | {"type", "enum"}
_PARTS = ("$ref", "allOf", "anyOf", "oneOf", "const")
# Words for people and places of other schemas; `format` says what is meant, as the standard has it.
_NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "format", "nullable"),
    *("contentEncoding", "contentMediaType", "discriminator", "x-guidance", "strict", "example"),
}
_SHAPES = {
    "properties": (is_object, "an object of schemas"),
    "required": (_are_texts, "a list of names"),
    "enum": (is_array, "a list of values"),
    **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), (is_array, "a list of schemas")),
    "minLength": (_is_count, "a whole number"),
    "maxLength": (_is_count, "a whole number"),
    "minItems": (_is_count, "a whole number"),
    "maxItems": (_is_count, "a whole number"),
    "pattern": (_is_text, "a pattern"),
}
_KNOWN = {*_SAID, *_NOTES, *_PARTS}
_MOST_DEEP = 64
_MOST_BRANCHES = 64
# Parts may refer to others twice over and over.
_MOST_STEPS = 4000


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Branch]:
    """The branches of `schema`, one of which a value has to fit; none where nothing fits.

    Each says its `type` as a list and holds no reference; `root` is the schema that references
    mean. Raises `UsageError` for what is no schema or cannot be followed here.
    """
    found: list[Branch] = []
    for branch in _branches(schema, root, iter(range(_MOST_STEPS)), 0):
        kinds = _types(branch)
        if "enum" in branch:
            values = [one for one in branch["enum"] if _fits(one, kinds)]
            mine = sorted({kind_of(one) for one in values})
            found += [{"type": mine, "enum": values}] if values else []
        elif kinds:
            found.append(branch | {"type": kinds})
    return found


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of value that `schema` wants, all of them where that cannot be told."""
    try:
        found = {kind for branch in alternatives(schema, root) for kind in branch["type"]}
    except UsageError:
        return KINDS
    return frozenset("number" if kind == "integer" else kind for kind in found)


def kind_of(value: Any) -> str:
    """The kind of a value of JSON."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "object" if is_object(value) else "array"


def _branches(
    schema: Any, root: Mapping[str, Any], steps: Iterator[int], depth: int
) -> list[Branch]:
    """As `alternatives`, with what each branch says as it came; `steps` are left to be made."""
    if isinstance(schema, bool):
        return [{}] if schema else []
    if depth > _MOST_DEEP or next(steps, None) is None:
        raise UsageError("the JSON schema is nested too deeply, or a part of it refers to itself")
    checked = _checked(schema)
    found = [{key: value for key, value in checked.items() if key in _SAID}]
    for part in _parts(checked, root, partial(_branches, root=root, steps=steps, depth=depth + 1)):
        if len(found) * len(part) > _MOST_BRANCHES:
            raise UsageError(
                f"the JSON schema has more than {_MOST_BRANCHES} branches in one place"
            )
        found = [_both(one, other) for one, other in product(found, part)]
    return found


def _checked(schema: Any) -> dict[str, Any]:
    """`schema`, of which every word is known and fit to be followed."""
    if not is_object(schema):
        raise UsageError(f"a JSON schema is an object; {type(schema).__name__} was given")
    unknown = next((key for key in schema if key not in _KNOWN and key[:2] != "x-"), None)
    if unknown is not None:
        raise UsageError(
            f"{unknown!r} in the JSON schema is nothing that calls of this model can be held to; "
            "leave it out, or let tool_choice be auto"
        )
    for name, (holds, what) in _SHAPES.items():
        if name in schema and not holds(schema[name]):
            raise UsageError(f"{name!r} in the JSON schema is {what}")
    return schema


def _parts(
    schema: Mapping[str, Any], root: Mapping[str, Any], read: Callable[[Any], list[Branch]]
) -> Iterator[list[Branch]]:
    """The branches of each part that holds beside what `schema` says itself."""
    if "const" in schema:
        yield [{"enum": [schema["const"]]}]
    if "$ref" in schema:
        yield read(_referred(schema["$ref"], root))
    for one in schema.get("allOf", ()):
        yield read(one)
    for name in ("anyOf", "oneOf"):
        groups = [read(one) for one in schema.get(name, ())]
        if name == "oneOf" and not all(_apart(*two) for two in combinations(groups, 2)):
            raise UsageError(
                "'oneOf' in the JSON schema has parts that one value may fit at once; let them "
                "differ in their types or in a required property, or say 'anyOf'"
            )
        if name in schema:
            yield [branch for group in groups for branch in group]


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """The part of `root` that `reference` means."""
    place: Any = root
    steps = reference.split("/") if isinstance(reference, str) else []
    for step in steps[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if is_object(place) else None
    if steps[:1] != ["#"] or place is None:
        raise UsageError(f"{reference!r} in the JSON schema refers to no part of it")
    return place


def _both(one: Branch, other: Branch) -> Branch:
    """What fits both branches."""
    found = {**other, **one}
    for key in one.keys() & other.keys():
        mine, others = one[key], other[key]
        if key == "required":
            found[key] = [*mine, *others]
        elif key == "properties":
            both = {name: {"allOf": [mine[name], others[name]]} for name in mine if name in others}
            found[key] = {**mine, **others, **both}
        elif key == "enum":
            shared = _told(others)
            found[key] = [value for value in mine if _told([value]) <= shared]
        elif key == "type":
            found[key] = [kind for kind in _types(one) if kind in _types(other)]
        elif mine != others:
            raise UsageError(f"parts of the JSON schema that hold at once differ in {key!r}")
    for closed, open_ in ((one, other), (other, one)):
        if closed.get("additionalProperties", True) is not True and not (
            open_.get("properties", {}).keys() <= closed.get("properties", {}).keys()
        ):
            raise UsageError(
                "parts of the JSON schema that hold at once exclude each other's properties; name "
                "all properties in one part, or leave 'additionalProperties' out"
            )
    return found


def _types(branch: Branch) -> list[str]:
    """The kinds of a branch, by what it says where it does not name them."""
    given = branch.get("type")
    kinds = [given] if isinstance(given, str) else given
    if kinds is None:
        about = [kind for kind in KEYWORDS if any(key in branch for key in KEYWORDS[kind])]
        kinds = [kind for kind in about or KEYWORDS if kind != "integer"]
    if not is_array(kinds) or not all(kind in KEYWORDS for kind in kinds):
        raise UsageError(
            f"Invalid type: {given!r} in the JSON schema; one of {', '.join(KEYWORDS)}"
        )
    return kinds


def _fits(value: Any, kinds: Iterable[str]) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return kind_of(value) in kinds or ("integer" in kinds and kind_of(value) == "number" and whole)


def _told(values: Iterable[Any]) -> set[str]:
    """Values by texts that are the same where they are."""
    whole = (int(one) if isinstance(one, float) and one.is_integer() else one for one in values)
    return {json.dumps(one, sort_keys=True) for one in whole}


def _apart(one: list[Branch], other: list[Branch]) -> bool:
    """Whether no value fits a branch of both."""
    return all(_two_apart(*two) for two in product(one, other))


def _two_apart(one: Branch, other: Branch) -> bool:
    if "enum" in one and "enum" in other:
        return _told(one["enum"]).isdisjoint(_told(other["enum"]))
    kinds, others = (
        {"number" if kind == "integer" else kind for kind in _types(branch)}
        for branch in (one, other)
    )
    if kinds & others != {"object"}:
        return not kinds & others
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    both = set(one.get("required", ())) & set(other.get("required", ())) & mine.keys()
    values = ((_values(mine[name]), _values(theirs.get(name))) for name in both)
    return any(a is not None and b is not None and _told(a).isdisjoint(_told(b)) for a, b in values)


def _values(schema: Any) -> list[Any] | None:
    """The few values that a property may have, None: it may have others."""
    if not is_object(schema):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if is_array(values) else None
