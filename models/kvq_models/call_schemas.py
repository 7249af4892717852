"""Reads the JSON schema of a call's arguments: the branches that a value may fit, and their kinds.

It follows a part of JSON Schema 2020-12 and ignores the rest. It knows no notation of calls.
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
    return is_array(value) and all(isinstance(item, str) for item in value)


_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# The keywords of each kind of value, by JSON's names of kinds.
KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": _NUMBER,
    "integer": _NUMBER,
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "boolean": (),
    "null": (),
}
# Integers are counted as numbers.
KINDS = frozenset(KEYWORDS) - {"integer"}
_SAID = {keyword for keywords in KEYWORDS.values() for keyword in keywords} | {"type", "enum"}
_PARTS = ("$ref", "allOf", "anyOf", "oneOf", "const")
# What the value of a keyword must be: a test, and its description.
SHAPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
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
# The keywords that are followed.
FOLLOWED = frozenset({*_SAID, *_PARTS})
_MOST_DEPTH = 64
_MOST_BRANCHES = 64
# References may multiply: each part may refer to another one twice.
_MOST_STEPS = 4000


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Branch]:
    """Returns the branches of `schema`, one of which a value has to fit; none if no value fits.

    Each branch has its `type` as a list and no references. `root` is the schema that references
    point into. Raises `UsageError` for what is no schema or cannot be followed here.
    """
    branches: list[Branch] = []
    for branch in _branches(schema, root, iter(range(_MOST_STEPS)), 0):
        kinds = _types(branch)
        if "enum" in branch:
            values = [value for value in branch["enum"] if _fits(value, kinds)]
            value_kinds = sorted({kind_of(value) for value in values})
            branches += [{"type": value_kinds, "enum": values}] if values else []
        elif kinds:
            branches.append(branch | {"type": kinds})
    return branches


def are_disjoint(schemas: Iterable[Any], root: Mapping[str, Any]) -> bool:
    """Returns whether no value fits two of `schemas`, as far as types and properties tell."""
    try:
        groups = [_branches(schema, root, iter(range(_MOST_STEPS)), 0) for schema in schemas]
        return all(_disjoint(*pair) for pair in combinations(groups, 2))
    except UsageError:
        return False


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the kinds of value that `schema` allows; all kinds if this cannot be told."""
    try:
        kinds = {kind for branch in alternatives(schema, root) for kind in branch["type"]}
    except UsageError:
        return KINDS
    return frozenset("number" if kind == "integer" else kind for kind in kinds)


def kind_of(value: Any) -> str:
    """Returns the kind of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "object" if is_object(value) else "array"


def _branches(
    schema: Any, root: Mapping[str, Any], steps: Iterator[int], depth: int
) -> list[Branch]:
    """Returns the branches as `alternatives` does, before their types are completed.

    `steps` limits how many schemas are read.
    """
    if isinstance(schema, bool):
        return [{}] if schema else []
    if depth > _MOST_DEPTH or next(steps, None) is None:
        raise UsageError("the JSON schema is nested too deeply, or a part of it refers to itself")
    checked = _checked(schema)
    branches = [{key: value for key, value in checked.items() if key in _SAID}]
    for part in _parts(checked, root, partial(_branches, root=root, steps=steps, depth=depth + 1)):
        if len(branches) * len(part) > _MOST_BRANCHES:
            raise UsageError(
                f"the JSON schema has more than {_MOST_BRANCHES} branches in one place"
            )
        branches = [_both(left, right) for left, right in product(branches, part)]
    return branches


def _checked(schema: Any) -> dict[str, Any]:
    """Returns `schema` after checking the values of its keywords. Raises `UsageError`."""
    if not is_object(schema):
        raise UsageError(f"a JSON schema is an object; {type(schema).__name__} was given")
    for name, (holds, description) in SHAPES.items():
        if name in schema and not holds(schema[name]):
            raise UsageError(f"{name!r} in the JSON schema is {description}")
    return schema


def _parts(
    schema: Mapping[str, Any], root: Mapping[str, Any], read: Callable[[Any], list[Branch]]
) -> Iterator[list[Branch]]:
    """Yields the branches of each part that applies beside the keywords of `schema` itself."""
    if "const" in schema:
        yield [{"enum": [schema["const"]]}]
    if "$ref" in schema:
        yield read(_referred(schema["$ref"], root))
    for part in schema.get("allOf", ()):
        yield read(part)
    for name in ("anyOf", "oneOf"):
        groups = [read(part) for part in schema.get(name, ())]
        if name == "oneOf" and not all(_disjoint(*pair) for pair in combinations(groups, 2)):
            raise UsageError(
                "'oneOf' in the JSON schema has parts that one value may fit at once; let them "
                "differ in their types or in a required property, or say 'anyOf'"
            )
        if name in schema:
            yield [branch for group in groups for branch in group]


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Returns the part of `root` that `reference` points to."""
    place: Any = root
    steps = reference.split("/") if isinstance(reference, str) else []
    for step in steps[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if is_object(place) else None
    if steps[:1] != ["#"] or place is None:
        raise UsageError(f"{reference!r} in the JSON schema refers to no part of it")
    return place


def _both(left: Branch, right: Branch) -> Branch:
    """Returns the branch of values that fit both branches."""
    merged = {**right, **left}
    for key in left.keys() & right.keys():
        left_value, right_value = left[key], right[key]
        if key == "required":
            merged[key] = [*left_value, *right_value]
        elif key == "properties":
            names = left_value.keys() & right_value.keys()
            both = {name: {"allOf": [left_value[name], right_value[name]]} for name in names}
            merged[key] = {**left_value, **right_value, **both}
        elif key == "enum":
            shared = _json_texts(right_value)
            merged[key] = [value for value in left_value if _json_texts([value]) <= shared]
        elif key == "type":
            merged[key] = [kind for kind in _types(left) if kind in _types(right)]
        elif left_value != right_value:
            raise UsageError(f"parts of the JSON schema that hold at once differ in {key!r}")
    for closed, open_ in ((left, right), (right, left)):
        if closed.get("additionalProperties", True) is not True and not (
            open_.get("properties", {}).keys() <= closed.get("properties", {}).keys()
        ):
            raise UsageError(
                "parts of the JSON schema that hold at once exclude each other's properties; name "
                "all properties in one part, or leave 'additionalProperties' out"
            )
    return merged


def _types(branch: Branch) -> list[str]:
    """Returns the kinds of a branch; without a `type` they follow from its other keywords."""
    declared = branch.get("type")
    kinds = [declared] if isinstance(declared, str) else declared
    if kinds is None:
        about = [kind for kind in KEYWORDS if any(key in branch for key in KEYWORDS[kind])]
        kinds = [kind for kind in about or KEYWORDS if kind != "integer"]
    if not is_array(kinds) or not all(kind in KEYWORDS for kind in kinds):
        raise UsageError(
            f"Invalid type: {declared!r} in the JSON schema; one of {', '.join(KEYWORDS)}"
        )
    return kinds


def _fits(value: Any, kinds: Iterable[str]) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return kind_of(value) in kinds or ("integer" in kinds and kind_of(value) == "number" and whole)


def _json_texts(values: Iterable[Any]) -> set[str]:
    """Returns the values as JSON texts, which are equal where the values are."""
    plain = (
        int(value) if isinstance(value, float) and value.is_integer() else value for value in values
    )
    return {json.dumps(value, sort_keys=True) for value in plain}


def _disjoint(left: list[Branch], right: list[Branch]) -> bool:
    """Returns whether no value fits a branch of both."""
    return all(_disjoint_branches(*pair) for pair in product(left, right))


def _disjoint_branches(left: Branch, right: Branch) -> bool:
    if "enum" in left and "enum" in right:
        return _json_texts(left["enum"]).isdisjoint(_json_texts(right["enum"]))
    left_kinds, right_kinds = (
        {"number" if kind == "integer" else kind for kind in _types(branch)}
        for branch in (left, right)
    )
    if left_kinds & right_kinds != {"object"}:
        return not left_kinds & right_kinds
    left_properties, right_properties = left.get("properties", {}), right.get("properties", {})
    names = set(left.get("required", ())) & set(right.get("required", ())) & left_properties.keys()
    values = (
        (_values(left_properties[name]), _values(right_properties.get(name))) for name in names
    )
    return any(
        first is not None
        and second is not None
        and _json_texts(first).isdisjoint(_json_texts(second))
        for first, second in values
    )


def _values(schema: Any) -> list[Any] | None:
    """Returns the values that a property is limited to; None: it is not limited."""
    if not is_object(schema):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if is_array(values) else None
