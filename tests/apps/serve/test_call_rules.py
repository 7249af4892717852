"""Forced calls in notations of their own: what fits is read back, and what templates write fits."""

from __future__ import annotations

import json
import random
import re
from copy import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from kvq.errors import UsageError
from kvq_apps.serve.tools import Tools
from kvq_models.chat import ChatTemplate
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from kvq_models.tools import FORMS, CallPiece
from kvq_runtime.answer.constraint import Constraint, Grammar, Grammars, Guide
from kvq_runtime.answer.healing import Beginning
from tiny import byte_level_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

END = 0
# How each family's template writes the calls of an answer.
ARGUMENT = (
    "{% macro shown(value) %}{% if value is string %}'{{ value }}'{% elif value is mapping %}"
    "{{ value | tojson }}{% else %}{{ value | string }}{% endif %}{% endmacro %}"
)
GEMMA_ARGUMENT = (
    '{% macro shown(value) %}{% if value is string %}<|"|>{{ value }}<|"|>'
    "{% elif value is boolean %}{{ 'true' if value else 'false' }}"
    "{% elif value is mapping %}{{ '{' }}{% for key, one in value | dictsort %}"
    "{% if not loop.first %},{% endif %}{{ key }}:{{ shown(one) }}{% endfor %}{{ '}' }}"
    "{% elif value is sequence %}[{% for one in value %}{{ shown(one) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ value }}{% endif %}{% endmacro %}"
)
FAMILIES = {
    "qwen": (
        "<parameter=",
        "{% for call in calls %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
        "<tool_call>{{ '\\n' }}<function={{ call.name }}>{{ '\\n' }}"
        "{% for key, value in call.arguments | items %}<parameter={{ key }}>{{ '\\n' }}"
        "{{ value | tojson if value is mapping or (value is sequence and value is not string) "
        "else value | string }}{{ '\\n</parameter>\\n' }}{% endfor %}"
        "</function>{{ '\\n' }}</tool_call>{% endfor %}",
    ),
    "gemma": (
        "<|tool_call>",
        GEMMA_ARGUMENT + "{% for call in calls %}<|tool_call>call:{{ call.name }}{{ '{' }}"
        "{% for key, value in call.arguments | dictsort %}{% if not loop.first %},{% endif %}"
        "{{ key }}:{{ shown(value) }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}",
    ),
    "lfm": (
        "List of tools: ",
        ARGUMENT + "<|tool_call_start|>[{% for call in calls %}{{ call.name }}("
        "{% for key, value in call.arguments | items %}{{ key }}={{ shown(value) }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}"
        "{% endfor %}]<|tool_call_end|>",
    ),
    "gpt-oss": (
        "<|call|>",
        "{% for call in calls %}<|channel|>commentary to=functions.{{ call.name }} "
        "<|constrain|>json<|message|>{{ call.arguments | tojson }}{% endfor %}",
    ),
    # As its own template has earlier calls.
    "gpt-oss header": (
        "<|call|>",
        "{% for call in calls %} to=functions.{{ call.name }}<|channel|>commentary json"
        "<|message|>{{ call.arguments | tojson }}{% endfor %}",
    ),
    "mistral": (
        "[ARGS]",
        "{% for call in calls %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}"
        "{% endfor %}",
    ),
}
FORM = {
    name: next(form for form in FORMS if form.known_by == known)
    for name, (known, _) in FAMILIES.items()
}
# Those whose form no other has; they differ in what a template writes.
OWN_FORMS = [name for name in FAMILIES if name != "gpt-oss header"]
# What a model of random tokens ends its strings and calls with.
ENDINGS = ["\n</parameter>\n", '<|"|>', *"'\"])}>,:5"]


def tokenizer(*, control: bool) -> Tokenizer:
    """With the families' marks, as control tokens where the vocabulary has them so."""
    library = byte_level_tokenizer()
    marks = {mark for form in FORM.values() for mark in (form.opening, form.closing, *form.tokens)}
    if control:
        single = [
            mark
            for mark in sorted(marks)
            if (re.fullmatch(r"<\|?[^<]*\|?>", mark) and "|" in mark) or mark.startswith("[")
        ]
        library.add_special_tokens([AddedToken(mark, special=True) for mark in single])
    return Tokenizer.from_json(library.to_str(), ControlTokens(eos=(END,)))


TOKENIZERS = {control: tokenizer(control=control) for control in (False, True)}
GRAMMARS = {control: Grammars(tokenizer) for control, tokenizer in TOKENIZERS.items()}


def tools(family: str, *functions: dict[str, Any], many: bool = False) -> Tools:
    names = tuple(function["name"] for function in functions)
    by_place = {
        f"/{number}" if number else "": function for number, function in enumerate(functions)
    }
    return Tools(form=FORM[family], functions=by_place, required=names, many=many)


def function(schema: Any, name: str = "act") -> dict[str, Any]:
    return {"name": name, "parameters": schema}


def constraint(toolset: Tools, *, control: bool) -> Constraint:
    forced = toolset.constraint(TOKENIZERS[control], None)
    assert forced is not None
    return forced


def grammar(toolset: Tools, *, control: bool) -> Grammar:
    return GRAMMARS[control].read(constraint(toolset, control=control))


def fits(toolset: Tools, text: str, *, control: bool) -> bool:
    """Whether the forced answer may be `text`, marks within it being control tokens."""
    ids = TOKENIZERS[control].encode(text, special=True)
    matcher = grammar(toolset, control=control).matcher.deep_copy()
    return (
        matcher.validate_tokens(ids) == len(ids)
        and all(matcher.consume_token(token) for token in ids)
        and matcher.is_accepting()
    )


def read(toolset: Tools, text: str) -> list[tuple[str, Any]]:
    """The calls of an answer, which has nothing else."""
    reader = toolset.reader()
    pieces = [*reader.feed(text), *reader.flush()]
    assert all(isinstance(piece, CallPiece) for piece in pieces), (text, pieces)
    return [
        (piece.name, json.loads(piece.arguments))
        for piece in pieces
        if isinstance(piece, CallPiece)
    ]


def written(family: str, calls: list[tuple[str, Any]]) -> str:
    """What the family's template writes."""
    rows = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return ChatTemplate(FAMILIES[family][1]).prompt({"calls": rows})[0]


def answered(toolset: Tools, seed: int, *, control: bool, most: int = 1500) -> str | None:
    """What a model of random tokens answers that likes to end things; None: it goes on and on."""
    model, generator = TOKENIZERS[control], random.Random(seed)
    beginning = Beginning(lambda: model.pieces)
    guide = grammar(toolset, control=control).guide(beginning, frozenset({END}))
    ids: list[int] = []
    while not guide.ended and len(ids) < most:
        token = generator.choice(guide.allowed.tolist())
        liked = model.encode(generator.choice(ENDINGS), special=True)
        for next_token in liked if generator.random() < 0.7 and follows(guide, liked) else [token]:
            if next_token == END:
                return model.decode(ids, special=True)
            guide.take(next_token)
            ids.append(next_token)
    return None if len(ids) >= most else model.decode(ids, special=True)


def follows(guide: Guide, ids: list[int]) -> bool:
    """Whether these tokens may come one after the other."""
    guide = copy(guide)
    for token in ids:
        if guide.ended or token not in guide.allowed:
            return False
        guide.take(token)
    return True


TEXT = "ab é\n\"'<>\\5{}:,x"
KEYS = ("city", "Days", "a b", "x-y", "größe")


def _texts(most: int = 8, least: int = 0) -> st.SearchStrategy[str]:
    return st.text(TEXT, min_size=least, max_size=most)


# Schemas, each with values that fit it; what may be something else too begins with a letter.
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ({"type": "string"}, _texts()),
    ({"type": "string", "minLength": 2, "maxLength": 3}, _texts(3, 2)),
    ({"type": "string", "pattern": "^[a-c]{2}-"}, st.just("ab-/5")),
    ({"type": "string", "pattern": "b"}, st.just("abc")),
    ({"enum": ["Paris", "Zürich", "Par is", 3, None, True]}, st.sampled_from(["Par is", 3, None])),
    ({"const": "1"}, st.just("1")),
    ({"const": {"a": ["x", 1.5]}}, st.just({"a": ["x", 1.5]})),
    ({"type": "integer"}, st.integers(-(10**20), 10**20)),
    ({"type": "integer", "minimum": 1, "maximum": 12}, st.integers(1, 12)),
    ({"type": "number"}, st.integers(-999, 999).map(lambda number: number / 8)),
    ({"type": "number"}, st.sampled_from([1e-07, 2.5e16, -0.0])),
    ({"type": "number", "exclusiveMinimum": 0}, st.sampled_from([0.5, 3])),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "null"}, st.none()),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, st.none() | _texts().map("x".__add__)),
    ({"type": ["string", "integer", "array"]}, st.integers(0, 9) | _texts().map("x".__add__)),
    ({}, st.sampled_from([None, True, 5, "x y", [1, {"k": "v"}]])),
    ({"type": "object"}, st.just({"some": ["x"], "other": {"b": False}})),
    ({"type": "array"}, st.just([[], {}, "x", 1])),
    ({"$ref": "#/$defs/tree"}, st.just({"name": "x", "of": [{"name": "y", "of": []}]})),
]
TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "of": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
    "required": ["name", "of"],
    "additionalProperties": False,
}


@st.composite
def pairs(draw: st.DrawFn, depth: int = 2) -> tuple[Any, Any]:
    """A schema and a value that fits it."""
    kind = draw(st.sampled_from(["scalar", "scalar", "array", "object"][: 4 if depth else 1]))
    if kind == "scalar":
        schema, values = draw(st.sampled_from(SCALARS))
        return schema, draw(values)
    if kind == "object":
        return draw(objects(depth - 1))
    schema, value = draw(pairs(depth - 1))
    count = draw(st.integers(0, 3))
    bounds = draw(st.sampled_from([{}, {"minItems": count}, {"maxItems": max(count, 1)}]))
    return {"type": "array", "items": schema, **bounds}, [value] * count


@st.composite
def objects(draw: st.DrawFn, depth: int = 2) -> tuple[Any, Any]:
    """The same of objects, whose properties are there where they must be and may be otherwise."""
    properties: dict[str, Any] = {}
    value: dict[str, Any] = {}
    required: list[str] = []
    for name in draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=4)):
        properties[name], item = draw(pairs(depth))
        must, there = draw(st.booleans()), draw(st.booleans())
        required += [name] * must
        value |= {name: item} if must or there else {}
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": required, **closed}, value


MANY = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.sampled
@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("family", OWN_FORMS)
@MANY
@given(pair=objects(), seed=st.integers(0, 1 << 30))
def test_what_fits_is_read_back_as_arguments_that_fit(
    family: str, control: bool, pair: tuple[Any, Any], seed: int
) -> None:
    schema = pair[0] | {"$defs": {"tree": TREE}}
    toolset = tools(family, function(schema))
    text = answered(toolset, seed, control=control)
    assume(text is not None)
    ((name, arguments),) = read(toolset, str(text))
    assert name == "act"
    jsonschema.validate(arguments, schema)


@pytest.mark.sampled
@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@MANY
@given(pair=objects())
def test_what_a_template_writes_fits_where_it_can_be_read(
    family: str, control: bool, pair: tuple[Any, Any]
) -> None:
    """Templates do not escape what ends a string: such texts are no calls, and never forced."""
    schema = pair[0] | {"$defs": {"tree": TREE}}
    toolset = tools(family, function(schema))
    calls = [("act", pair[1])]
    text = written(family, calls)
    try:
        assume(read(toolset, text) == calls)
    except AssertionError:
        assume(condition=False)
    assert fits(toolset, text, control=control), text


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls_are_one_after_the_other(family: str, control: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    functions = [function(schema, "one"), function({}, "other.one-2")]
    calls = [("one", {"n": 5}), ("other.one-2", {}), ("one", {})]
    text = written(family, calls)
    alone = [written(family, [call]) for call in calls]
    for many in (False, True):
        toolset = tools(family, *functions, many=many)
        assert [fits(toolset, call_text, control=control) for call_text in alone] == [True] * 3
        assert fits(toolset, text, control=control) == (many and not FORM[family].last)
    if not family.startswith("gpt-oss"):
        assert read(tools(family, *functions, many=True), text) == calls
    # A parameter that nobody named, and one that is of another type.
    for arguments in ({"m": 5}, {"n": "x"}, {"n": 5, "m": 5}):
        assert not fits(toolset, written(family, [("one", arguments)]), control=control)


ENDS = {
    "qwen": ("</parameter>", "</tool_call>"),
    "gemma": ('<|"|>', "<tool_call|>"),
    "lfm": ("<|tool_call_end|>",),
    "gpt-oss": ("<|call|>",),
    "gpt-oss header": ("<|call|>",),
    "mistral": ("</s>",),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_string_has_what_would_end_it(family: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "l": {"type": "array", "items": {"type": "string"}},
            "e": {"enum": ["x", *(f"x{mark}x" for mark in ENDS[family])]},
            "o": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    }
    toolset = tools(family, function(schema))
    for whole in ({"s": "x%sx"}, {"l": ["x%s"]}, {"e": "x%sx"}, {"o": {"k": "%s"}}):
        for mark in ENDS[family]:
            text = written(family, [("act", whole)])
            assert fits(toolset, text.replace("%s", ""), control=False) == (whole != {"e": "x%sx"})
            assert fits(toolset, text.replace("%s", "<|"), control=False) == (
                whole != {"e": "x%sx"}
            )
            assert not fits(toolset, text.replace("%s", mark), control=False), text


def test_a_string_beside_other_kinds_is_none_that_is_read_as_one() -> None:
    """Qwen's strings have no quotes, so that their text alone says what they are."""
    schema = {"type": "object", "properties": {"v": {"type": ["string", "null", "integer"]}}}
    toolset = tools("qwen", function(schema))
    texts = {"x": "x", "null": None, "None": None, "nullable": "nullable", "-5": -5, "true": "true"}
    for text, value in texts.items():
        call = written("qwen", [("act", {"v": text})])
        assert fits(toolset, call, control=False), text
        assert read(toolset, call) == [("act", {"v": value})]
    for text in (" null", "5 km", '"x"'):
        assert not fits(toolset, written("qwen", [("act", {"v": text})]), control=False)
    # A text of an enumeration is left out where it would be read as what is not in it.
    for enum, value, fit in ((["1", "2"], "1", True), (["1", 1], 1, True), (["1", 2], 1, False)):
        toolset = tools("qwen", function({"properties": {"v": {"enum": enum}}}))
        call = written("qwen", [("act", {"v": "1"})])
        assert read(toolset, call) == [("act", {"v": value})]
        assert fits(toolset, call, control=False) == fit


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_that_are_read(family: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number"}, "any": {}}}
    toolset = tools(family, function(schema))
    for key in ("n", "any"):
        text = written(family, [("act", {key: 7})])
        assert fits(toolset, text, control=False)
        for number, fit in (("7.25e-9", True), ("1e999", False), ("9" * 5000, False)):
            assert fits(toolset, text.replace("7", number), control=False) == fit


@pytest.mark.parametrize("family", FAMILIES)
def test_what_holds_itself_does_so_a_few_times(family: str) -> None:
    schema = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "additionalProperties": False,
    }
    toolset = tools(family, function(schema))

    def chain(length: int) -> Any:
        return {"next": chain(length - 1) if length else None}

    for length in range(9):
        text = written(family, [("act", chain(length))])
        assert read(toolset, text) == [("act", chain(length))]
        # Qwen's arguments are none of the values within others.
        assert fits(toolset, text, control=False) == (length <= 5 + (family == "qwen")), length


@pytest.mark.parametrize("family", OWN_FORMS)
@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"properties": {"a": {"type": "bogus"}}}, "at /properties/a/type: 'bogus' is none of"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "refers to no part"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "refers to itself"),
        ({"properties": {"a": 3}}, "at /properties/a: a schema is an object"),
        ({"properties": []}, "an object of schemas"),
        ({"properties": {"a": False}, "required": ["a"]}, "cannot write one of act"),
    ],
)
def test_what_cannot_be_followed_is_refused(family: str, schema: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        constraint(tools(family, function(schema)), control=False)


@pytest.mark.parametrize("family", OWN_FORMS)
@pytest.mark.parametrize(
    ("schema", "unheld", "arguments"),
    [
        ({"properties": {"a": {"not": {}}}}, ["/properties/a/not: not followed"], {"a": 1}),
        (
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"minimum": 1}]}}},
            ["/properties/a/oneOf: held as anyOf"],
            {"a": 1},
        ),
        (
            {"properties": {"a": {"type": "string", "pattern": "a^|b"}}},
            ["/properties/a/pattern: ^ or $ elsewhere than around all of it"],
            {"a": "xyz"},
        ),
        (
            {"properties": {"a": {"type": "string", "format": "email"}}, "minProperties": 1},
            ["/minProperties: not followed", "/properties/a/format: email is not followed"],
            {"a": "xyz"},
        ),
        (
            {"properties": {"a": {"items": [{"type": "string"}], "additionalItems": False}}},
            [],
            {"a": ["xyz"]},
        ),
    ],
)
def test_what_calls_cannot_be_held_to_is_left_out(
    family: str, schema: Any, unheld: list[str], arguments: Any
) -> None:
    toolset = tools(family, function(schema))
    assert list(constraint(toolset, control=False).unheld) == unheld
    assert fits(toolset, written(family, [("act", arguments)]), control=False)
    if unheld:
        strict = tools(family, function(schema) | {"strict": True})
        with pytest.raises(UsageError, match=re.escape(f"held to {unheld[0]}")):
            constraint(strict, control=False)


def test_a_name_that_cannot_be_read_is_not_called() -> None:
    functions = [function({}, "3d"), function({}, "map")]
    for family, fit in (("gemma", False), ("lfm", False), ("qwen", True), ("gpt-oss header", True)):
        toolset = tools(family, *functions)
        assert fits(toolset, written(family, [("map", {})]), control=False)
        assert fits(toolset, written(family, [("3d", {})]), control=False) == fit
    with pytest.raises(UsageError, match="cannot write one of 3d"):
        constraint(tools("gemma", functions[0]), control=False)


def test_branches_that_are_apart_may_be_one_of() -> None:
    shapes = [
        {
            "properties": {"kind": {"const": kind}, kind: {"type": "integer"}},
            "required": ["kind", kind],
        }
        for kind in ("round", "long")
    ]
    schema = {
        "type": "object",
        "properties": {
            "shape": {"oneOf": [*shapes, {"type": "null"}]},
            "all": {"allOf": shapes[:1]},
        },
        "required": ["shape"],
    }
    for family in FAMILIES:
        toolset = tools(family, function(schema))
        for shape, fit in (
            ({"kind": "round", "round": 3}, True),
            ({"kind": "long", "long": 3}, True),
            (None, True),
            ({"kind": "long", "round": 3}, False),
        ):
            text = written(family, [("act", {"shape": shape})])
            assert fits(toolset, text, control=False) == fit
