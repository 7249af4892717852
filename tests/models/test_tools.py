"""Calls of tools as models write them: told from text by value, however the answer is cut."""

from __future__ import annotations

import json
import random

import pytest

from kvq_models.tools import FORMS, CallPiece, CallReader, Piece, ToolForm, tool_form

HERMES, PHI, MISTRAL, LLAMA = FORMS
A = '{"name": "add", "%s": {"a": 1, "b": ["}", "\\"{"], "c": {"d": {}}}}'
B = '{"%s": {"q": "é\\n"}, "name": "look_up"}'
CALLS = [("add", {"a": 1, "b": ["}", '"{'], "c": {"d": {}}}), ("look_up", {"q": "é\n"})]


def read(form: ToolForm, text: str, cuts: list[int] | None = None) -> tuple[str, list[list[str]]]:
    """The text of an answer and its calls, fed in the pieces between `cuts`."""
    reader, pieces = CallReader(form), list[Piece]()
    ends = [*(cuts or []), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        pieces += reader.feed(text[start:end])
    pieces += reader.flush()
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append([piece.name, ""])
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
    assert reader.calls == len(calls)
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


def every_way(form: ToolForm, text: str) -> tuple[str, list[tuple[str, object]]]:
    """What is read of `text`, the same in one piece, by single characters and cut at random."""
    whole = read(form, text)
    assert read(form, text, list(range(1, len(text)))) == whole
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(len(text) + 1), min(4, len(text))))
        assert read(form, text, cuts) == whole
    return whole[0], [(name, json.loads(arguments)) for name, arguments in whole[1]]


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        (
            HERMES,
            "I look.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>",
            "I look.",
        ),
        (HERMES, "<tool_call>{A}</tool_call><tool_call>{B}</tool_call>\n", ""),
        (PHI, "<|tool_call|>[{A}, {B}]<|/tool_call|>", ""),
        (MISTRAL, "[TOOL_CALLS] [{A},{B}]", ""),
        (MISTRAL, "Well: [TOOL_CALLS][{A}, {B}]", "Well:"),
    ],
)
def test_calls_are_told_from_text(form: ToolForm, text: str, said: str) -> None:
    text = text.replace("{A}", A % form.arguments).replace("{B}", B % form.arguments)
    assert every_way(form, text) == (said, CALLS)


@pytest.mark.parametrize("before", ["", "\n", "<|python_tag|>"])
def test_a_call_may_be_the_whole_answer(before: str) -> None:
    assert every_way(LLAMA, before + A % "parameters") == ("", CALLS[:1])
    assert every_way(LLAMA, before + B % "parameters") == ("", CALLS[1:])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "Nothing is called here: <tool> {} </tool_call"),
        (HERMES, "  two lines\n\nand a third"),
        (HERMES, "<tool_call>{not json}"),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}'),
        (LLAMA, 'The object {"name": "add", "parameters": {}} is one'),
        (LLAMA, '{"name": "Ada", "age": 36}'),
        (LLAMA, "<|python"),
        (PHI, '<|tool_call|>{"a": 1}'),
    ],
)
def test_what_is_no_call_is_text(form: ToolForm, text: str) -> None:
    assert every_way(form, text) == (text, [])


def test_a_call_that_is_cut_short_keeps_what_came() -> None:
    text, calls = read(HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2')
    assert (text, calls) == ("", [["add", '{"a": [1, 2']])
    assert read(HERMES, '<tool_call>{"name": "ad') == ('<tool_call>{"name": "ad', [])


def test_arguments_come_while_they_are_written() -> None:
    reader = CallReader(HERMES)
    assert reader.feed('<tool_call>\n{"name": "add", "argu') == []
    assert reader.feed('ments": {"a') == [CallPiece(index=0, name="add", arguments='{"a')]
    assert reader.feed('": 1}') == [CallPiece(index=0, arguments='": 1}')]
    assert reader.feed("}\n</tool_call>") == []


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call><function=x>{% endif %}", None),
        ("{% if tools %}<|tool_call|>{% endif %}", PHI),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}[TOOL_CALLS][ARGS]{% endif %}", None),
        ('{{ tools }}{"name": function name, "parameters": dictionary}', LLAMA),
        ("<tool_call>{{ messages }}", None),
        (None, None),
    ],
)
def test_a_form_is_known_by_its_template(template: str | None, form: ToolForm | None) -> None:
    assert tool_form(template) is form
