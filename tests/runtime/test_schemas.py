"""Schemas as libraries write them: all are followed, and what cannot be is listed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from kvq.errors import UsageError
from kvq_models.control import ControlTokens
from kvq_models.pieces import PieceIndex
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.constraint import Constraint, Grammars
from kvq_runtime.answer.healing import Beginning
from kvq_runtime.answer.schemas import held_schema
from tiny import byte_level_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

END = 0
TOKENIZER = Tokenizer.from_json(byte_level_tokenizer().to_str(), ControlTokens(eos=(END,)))
GRAMMARS = Grammars(TOKENIZER)
CLOSERS = {token for mark in '"}],:@.-T0' for token in TOKENIZER.encode(mark)}


def of(schema: Any, *, required: bool = True) -> dict[str, Any]:
    """Makes an object whose one property has this schema."""
    names = ["a"] if required else []
    return {
        "type": "object", "properties": {"a": schema}, "required": names,
        "additionalProperties": False,
    }  # fmt: skip


COLOR = {"enum": ["red", "blue"], "title": "Color", "type": "string"}
CAT = {
    "properties": {"kind": {"const": "cat", "type": "string"}, "lives": {"type": "integer"}},
    "required": ["kind", "lives"], "title": "Cat", "type": "object",
}  # fmt: skip
DOG = {
    "properties": {"kind": {"const": "dog", "type": "string"}, "name": {"type": "string"}},
    "required": ["kind", "name"], "title": "Dog", "type": "object",
}  # fmt: skip
PETS = {"Cat": CAT, "Dog": DOG}
REFS = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]

# Schemas that are followed as they are.
WHOLE: dict[str, Any] = {
    "boolean": of({"type": "boolean", "description": "yes or no", "default": False}),
    "optional": of({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}),
    "nullable required": of({"type": ["string", "null"]}),
    "enum by reference": {**of({"$ref": "#/$defs/Color"}), "$defs": {"Color": COLOR}},
    "reference with siblings": {
        **of({"$ref": "#/$defs/Color", "description": "which", "default": "red"}),
        "$defs": {"Color": COLOR},
    },
    "old definitions": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **of({"$ref": "#/definitions/Color"}), "definitions": {"Color": COLOR},
    },
    "a schema nobody published": {"$schema": "https://example.org/mine", **of({"type": "null"})},
    "components of an API": {
        **of({"$ref": "#/components/schemas/Pet"}),
        "components": {"schemas": {"Pet": {"type": "string", "maxLength": 3}}},
    },
    "list of strings": of({"type": "array", "items": {"type": "string"}}),
    "list within bounds": of(
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}
    ),
    "tuple": of(
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}],
         "minItems": 2, "maxItems": 2}
    ),
    "tuple of draft 7": of(
        {"type": "array", "items": [{"type": "integer"}, {"type": "string"}],
         "additionalItems": False}
    ),
    "dictionary": of({"type": "object", "additionalProperties": {"type": "integer"}}),
    "dictionary of an enum": {
        **of({"type": "object", "propertyNames": {"$ref": "#/$defs/Color"},
              "additionalProperties": {"type": "integer"}}),
        "$defs": {"Color": COLOR},
    },
    "record of names": of(
        {"type": "object", "propertyNames": {"type": "string", "enum": ["x", "y"]},
         "additionalProperties": {"type": "number"}, "required": ["x", "y"]}
    ),
    "record of texts": of(
        {"type": "object", "propertyNames": {"type": "string"},
         "additionalProperties": {"type": "boolean"}}
    ),
    "names by a pattern": of(
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"},
         "additionalProperties": {"type": "null"}}
    ),
    "pattern of properties": {
        "type": "object", "patternProperties": {"^x-": {"type": "string"}},
        "additionalProperties": False,
    },
    "at least one property": {
        "type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1,
    },
    "date-time": of({"type": "string", "format": "date-time"}),
    "date": of({"type": "string", "format": "date"}),
    "time": of({"type": "string", "format": "time"}),
    "duration": of({"type": "string", "format": "duration"}),
    "uuid": of({"type": "string", "format": "uuid"}),
    "uri": of({"type": "string", "format": "uri", "minLength": 1}),
    "ipv4": of({"type": "string", "format": "ipv4"}),
    "email": of({"type": "string", "format": "email"}),
    "int32": of({"type": "integer", "format": "int32"}),
    "positive": of({"type": "integer", "exclusiveMinimum": 0}),
    "share": of({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    "exclusive of draft 4": of({"type": "integer", "minimum": 0, "exclusiveMinimum": True}),
    "safe integer": of(
        {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
    ),
    "multiple": of({"type": "integer", "multipleOf": 5}),
    "price": of({"type": "number", "minimum": 0, "multipleOf": 0.01}),
    "decimal": of(
        {"anyOf": [{"type": "number"},
                   {"type": "string", "pattern": "^[+-]?\\d*\\.?\\d+$"}]}
    ),
    "pattern": of({"type": "string", "pattern": "^[A-Z]{2}\\d{4}$"}),
    "pattern somewhere": of({"type": "string", "pattern": "\\d{4}"}),
    "slashes in a pattern": of({"type": "string", "pattern": "^\\/api\\/v[12]$"}),
    "lengths": of({"type": "string", "minLength": 2, "maxLength": 5}),
    "lengths as decimals": of({"type": "string", "minLength": 2.0, "maxLength": 5.0}),
    "a long text": of({"type": "string", "maxLength": 100000}),
    "mixed literal": of({"enum": ["a", 1, None, True]}),
    "constant": of({"const": {"x": [1, 2]}}),
    "discriminated": {
        **of({"oneOf": REFS, "discriminator": {"propertyName": "kind", "mapping": {}}}),
        "$defs": PETS,
    },
    "union": {**of({"anyOf": REFS}), "$defs": PETS},
    "apart by type": of({"oneOf": [{"type": "integer"}, {"type": "string"}]}),
    "all of": of({"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]}),
    "recursive": {
        "$defs": {"Node": of({"type": "array", "items": {"$ref": "#/$defs/Node"}})},
        "$ref": "#/$defs/Node",
    },
    "refers to its top": of({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "root any of": {"anyOf": [CAT, DOG]},
    "anything": of({}),
    "any type": of({"type": "any"}),
    "nulls for nothing": of({"type": "string", "pattern": None, "enum": None, "format": None}),
    "nullable of OpenAPI": of({"type": "string", "nullable": True}),
    "no value for an option": of({"enum": []}, required=False),
    "unique in name only": of({"type": "array", "uniqueItems": False}),
    "closed": {
        "type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False,
    },
    "words of nobody": of({"type": "string", "x-order": 3, "errorMessage": {"a": 1}, "ui": "x"}),
    "escaped name": {**of({"$ref": "#/$defs/a~1b%20c"}), "$defs": {"a/b c": COLOR}},
    "anchor": {**of({"$ref": "#color"}), "$defs": {"C": {"$anchor": "color", **COLOR}}},
    "many": {
        "type": "object",
        "properties": {f"f{number}": {"type": "null"} for number in range(60)},
    },
}  # fmt: skip

ZOD_EMAIL = (
    "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@"
    "([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"
)
# Schemas that are followed in part, and what is listed as left out.
PARTLY: dict[str, tuple[Any, list[str]]] = {
    "look-ahead": (
        of({"type": "string", "format": "email", "pattern": ZOD_EMAIL}),
        ["/properties/a/pattern: look-ahead"],
    ),
    "look-behind": (of({"pattern": "(?<!x)y"}), ["/properties/a/pattern: look-behind"]),
    "back reference": (of({"pattern": r"(['\"])x\1"}), ["/properties/a/pattern: a back reference"]),
    "named back reference": (
        of({"pattern": r"(?<q>a)\k<q>"}), ["/properties/a/pattern: a back reference"],
    ),
    "word boundary": (of({"pattern": r"\bx\b"}), ["/properties/a/pattern: a word boundary"]),
    "another dialect": (
        of({"pattern": r"\Ax\Z"}), ["/properties/a/pattern: a pattern that cannot be followed"],
    ),
    "set": (
        of({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        ["/properties/a/uniqueItems: not followed"],
    ),
    "bytes": (
        of({"type": "string", "format": "binary"}),
        ["/properties/a/format: binary is not followed"],
    ),
    "phone": (
        of({"type": "string", "format": "phone"}),
        ["/properties/a/format: phone is not followed"],
    ),
    "overlapping": (
        of({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        ["/properties/a/oneOf: held as anyOf"],
    ),
    "if": (
        {**of({"type": "string"}), "if": {"properties": {"a": {"const": "x"}}},
         "then": {"required": ["b"]}, "else": {}},
        ["/if: not followed"],
    ),
    "not": (of({"not": {"type": "null"}}), ["/properties/a/not: not followed"]),
    "contains": (
        of({"type": "array", "contains": {"type": "integer"}, "minContains": 2}),
        ["/properties/a/contains: not followed"],
    ),
    "dependent": (
        {"type": "object", "dependentRequired": {"a": ["b"]}, "dependencies": {"a": ["b"]}},
        ["/dependentRequired: not followed", "/dependencies: not followed"],
    ),
    "names with properties": (
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 2}},
        ["/propertyNames: not followed"],
    ),
    "names by look-ahead": (
        {"type": "object", "patternProperties": {"^(?!_)": {"type": "null"}}},
        ["/patternProperties/^(?!_): look-ahead"],
    ),
    "beyond": (of({"type": "integer", "minimum": -(2**63)}),
        ["/properties/a/minimum: a number that cannot be followed"]),
    "elsewhere": (
        of({"$ref": "https://example.org/a.json#/x"}),
        ["/properties/a/$ref: another document is not looked up"],
    ),
    "in definitions": (
        {**of({"$ref": "#/$defs/S"}), "$defs": {"S": {"type": "array", "uniqueItems": True}}},
        ["/$defs/S/uniqueItems: not followed"],
    ),
    "in parts of parts": (
        of({"anyOf": [{"allOf": [{"type": "string", "pattern": "(?=a)"}]}, {"type": "null"}]}),
        ["/properties/a/anyOf/0/allOf/0/pattern: look-ahead"],
    ),
    "in items": (
        of({"type": "array", "items": [{"pattern": "(?=a)"}], "additionalItems": {"not": {}}}),
        ["/properties/a/items/0/pattern: look-ahead",
         "/properties/a/additionalItems/not: not followed"],
    ),
    "names that need escapes": (
        {"type": "object", "properties": {"a/b~": {"type": "array", "uniqueItems": True}}},
        ["/properties/a~1b~0/uniqueItems: not followed"],
    ),
}  # fmt: skip


def written(constraint: Constraint, seed: int) -> Any:
    """Returns JSON by a model of random tokens, which likes to end things; None: no end."""
    guide = GRAMMARS.read(constraint).guide(Beginning(PieceIndex), frozenset({END}))
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    while len(ids) < 400:
        allowed = guide.allowed.tolist()
        if END in allowed or guide.ended:
            return json.loads(TOKENIZER.decode(ids))
        closing = [token for token in allowed if token in CLOSERS]
        liked = closing if closing and generator.random() < 0.7 else allowed
        ids.append(int(generator.choice(liked)))
        guide.take(ids[-1])
        if guide.ended:
            return json.loads(TOKENIZER.decode(ids))
    return None


def check(schema: Mapping[str, Any], followed: Mapping[str, Any]) -> None:
    """Checks that answers held to `schema` fit the schema `followed`."""
    formats = jsonschema.FormatChecker(["email", "ipv4", "uuid"])
    validator = jsonschema.Draft202012Validator(followed, format_checker=formats)
    texts = [written(Constraint.json(schema), seed) for seed in range(6)]
    for value in filter(None, texts):
        validator.validate(value)


@pytest.mark.parametrize("name", WHOLE)
def test_an_ordinary_schema_is_followed_whole(name: str) -> None:
    schema = WHOLE[name]
    before = deepcopy(schema)
    result = held_schema(schema, strict=True)
    assert schema == before
    assert [row for row in result.unheld if "format" not in row] == []
    check(schema, result.schema)


@pytest.mark.parametrize("name", PARTLY)
def test_what_cannot_be_followed_is_left_out_and_told(name: str) -> None:
    schema, unheld = PARTLY[name]
    before = deepcopy(schema)
    result = held_schema(schema)
    assert schema == before
    assert sorted(result.unheld) == sorted(unheld)
    check(schema, result.schema)
    if any("format" not in row for row in unheld):
        with pytest.raises(UsageError, match="is strict"):
            held_schema(schema, strict=True)
    else:
        # The standard allows to ignore formats.
        held_schema(schema, strict=True)


@pytest.mark.parametrize("name", ["dictionary of an enum", "record of names", "closed"])
def test_words_that_say_the_same_are_followed(name: str) -> None:
    """Validates against the schema as it came, not against what is left of it."""
    check(WHOLE[name], WHOLE[name])


def test_places_begin_where_the_schema_stands() -> None:
    schema = {"$ref": "#/$defs/S", "$defs": {"S": {"uniqueItems": True}}}
    assert held_schema(schema, place="/tools/0").unheld == (
        "/tools/0/$defs/S/uniqueItems: not followed",
    )


def test_a_schema_of_many_faults_tells_the_first_hundred() -> None:
    rows = {f"p{number}": {"pattern": f"(?={number})"} for number in range(700)}
    result = held_schema({"type": "object", "properties": rows})
    assert len(result.unheld) == 100
