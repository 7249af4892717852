"""Calls of tools as models write them: told from text by value, however the answer is cut."""

from __future__ import annotations

import json
import random
import time
from itertools import product
from typing import Any

import pytest

from kvq_models.tools import (
    FORMS,
    CallPiece,
    CallReader,
    Piece,
    ToolForm,
    reader_of,
    tool_form,
    with_calls_as_text,
)

HERMES, GRANITE, PHI, MISTRAL, MISTRAL_3, XML, GEMMA, PYTHON, HARMONY, LLAMA = FORMS
A = '{"name": "add", "%s": {"a": 1, "b": ["}", "\\"{"], "c": {"d": {}}}}'
B = '{"%s": {"q": "é\\n"}, "name": "look_up"}'
CALLS = [("add", {"a": 1, "b": ["}", '"{'], "c": {"d": {}}}), ("look_up", {"q": "é\n"})]


NAMES = ("add", "look_up")


def read(
    form: ToolForm, text: str, cuts: list[int] | None = None, *, cut: bool = False
) -> tuple[str, list[list[str]]]:
    """Returns the text of an answer and its calls, fed in the pieces between `cuts`."""
    reader, pieces = CallReader(form, NAMES), list[Piece]()
    ends = [*(cuts or []), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        pieces += reader.feed(text[start:end])
    pieces += reader.flush(cut=cut)
    call_pieces = [piece for piece in pieces if isinstance(piece, CallPiece)]
    assert [piece.index for piece in call_pieces] == list(range(reader.calls))
    calls = [[piece.name, piece.arguments] for piece in call_pieces]
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


def every_way(form: ToolForm, text: str) -> tuple[str, list[tuple[str, object]]]:
    """Returns what is read of `text`: the same in one piece, by characters and cut at random."""
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
        (LLAMA, '<|python_tag|>print("{}")'),
        # Offered under another name, or by no name, in a form that is not the model's own.
        (HERMES, '{"name": "remove", "arguments": {}}'),
        (HERMES, '```json\n{"name": "remove", "arguments": {}}\n```\nis one.'),
        (HERMES, '<tools>\n{"name": "remove", "arguments": {}}\n</tools>'),
        (HERMES, '{"name": "add"}'),
        (HERMES, '{"name": "add", "arguments": [1]}'),
        (HERMES, '{"name": "add", "arguments": {"a": 1e999}}'),
        (HERMES, '{"name": "add", "arguments": {"a": NaN}}'),
        (HERMES, 'See `{"name": "add", "arguments": {}}` there'),
        (HERMES, "```c\nint main()\n{\n  {\n    return 0;\n  }\n}\n```\n"),
        (HERMES, "```\n{\n  return;\n}\n```"),
        (HERMES, "```json\n[]\n```"),
        (HERMES, "``` " * 3000),
        (HERMES, "```js\n{}\n```\n`` ` <"),
        (HERMES, '{"name": "ad\\'),
        (HERMES, '{"city": {"name": "add", "arguments": {}}}'),
        (HERMES, "<tool_call></tool_call>"),
        (PHI, '<|tool_call|>{"a": 1}'),
    ],
)
def test_what_is_no_call_is_text(form: ToolForm, text: str) -> None:
    assert every_way(form, text) == (text, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{A}\n\n{B}", ""),
        ("I look.\n{A}\n{B}\n", "I look."),
        ("{A} {B}", ""),
        ("```json\n{A}\n```\n```json\n{B}\n```", ""),
        ("Here:\n\n```\n{A}\n{B}\n```\n", "Here:"),
        ("```json\n[{A}, {B}]\n```", ""),
        ("```json\n<tool_call>\n{A}\n</tool_call>\n```\n{B}", ""),
        ("<tool_call>\n```json\n{A}\n```\n</tool_call>{B}", ""),
        ("<tools>\n{A}\n{B}\n</tools>", ""),
        ("[TOOL_CALLS] [{A}, {B}]", ""),
        ("<|python_tag|>{A}\n<function_call>{B}</function_call>", ""),
    ],
)
@pytest.mark.parametrize("arguments", ["arguments", "parameters"])
def test_a_model_may_write_calls_as_others_do(text: str, said: str, arguments: str) -> None:
    """Reads what llama-server reads, in whatever form the model's template asks for."""
    text = text.replace("{A}", A % arguments).replace("{B}", B % arguments)
    for form in FORMS:
        assert every_way(form, text) == (said, CALLS)


def test_what_stands_behind_a_call_is_text() -> None:
    call = '{"name": "add", "arguments": {}}'
    assert every_way(HERMES, f"{call} is one") == (" is one", [("add", {})])
    assert every_way(HERMES, f"```json\n{call}\n```\nDone.") == ("\nDone.", [("add", {})])
    text = f'{call}\n{{"name": "remove", "arguments": {{}}}}.'
    assert every_way(HERMES, text) == (text.removeprefix(call), [("add", {})])


def test_a_call_is_told_whole_or_not_at_all() -> None:
    begun = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2'
    assert read(HERMES, begun) == (begun, [])
    assert read(HERMES, begun, cut=True) == ("", [])
    assert read(HERMES, begun[12:], cut=True) == ("", [])
    assert read(HERMES, '<tool_call>{"na', cut=True) == ("", [])
    assert read(HERMES, "<tool_call>", cut=True) == ("", [])
    # Nobody knows yet what these become.
    for text in ('{"na', '```json\n{"name": "ad', '<tools>{"name": "ad', "<tool_c"):
        assert read(HERMES, text, cut=True) == (text, [])
    call = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>\n'
    assert read(HERMES, call + begun, cut=True) == ("", [["look_up", "{}"]])
    reader = CallReader(HERMES, NAMES)
    assert reader.feed(begun) == []
    assert reader.feed("]}") == []
    assert reader.feed("}") == [CallPiece(index=0, name="add", arguments='{"a": [1, 2]}')]


def test_one_call_at_most_where_no_more_are_welcome() -> None:
    reader = CallReader(HERMES, NAMES, most=1)
    call = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>\n'
    pieces = [*reader.feed(call * 3), *reader.flush()]
    assert pieces == [CallPiece(index=0, name="look_up", arguments="{}")]


def test_text_is_held_back_only_while_it_may_become_a_call() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.feed("It is {") == ["It is {"]
    assert reader.feed(" four.\n") == [" four."]
    assert reader.feed('{"ci') == []
    assert reader.feed('ty": "Par') == ['\n{"city"', ': "Par']
    assert reader.feed('is"}\n```') == ['is"}']
    assert reader.feed("js") == []
    assert reader.feed("\n{") == ["\n```js"]
    assert reader.feed('}\n  {"name": "remove') == ["\n{}"]
    assert reader.feed('", ') == ['\n  {"name": "remove"', ","]
    assert reader.flush() == [" "]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call><function=x>{% endif %}", None),
        ("{% if tools %}<|tool_call|>{% endif %}", PHI),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}[TOOL_CALLS][ARGS]{% endif %}", MISTRAL_3),
        ("{% if tools %}<|start_of_role|><|tool_call|>{% endif %}", GRANITE),
        ("{% if tools %}<|start_of_role|><tool_call>{% endif %}", HERMES),
        ('{{ tools }}{"name": function name, "parameters": dictionary}', LLAMA),
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=p>", XML),
        ("{{ tools }}<|tool_call>call:", GEMMA),
        ("List of tools: {{ tools | tojson }}", PYTHON),
        ("{{ tools }}<|start|>assistant to=functions.f<|channel|>commentary<|call|>", HARMONY),
        ("<tool_call>{{ messages }}", None),
        (None, None),
    ],
)
def test_a_form_is_known_by_its_template(template: str | None, form: ToolForm | None) -> None:
    assert tool_form(template) is form


SCHEMAS = {
    "add": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "l": {}}},
    "look_up": {},
}
ADDED = ("add", {"a": -3, "s": "4\n\"x'", "l": [1.5, True, None, {"b": []}]})
RAW = '<|"|>'
MARKED = {
    "xml": (
        XML,
        "<tool_call>\n<function=add>\n<parameter=a>\n-3\n</parameter>\n<parameter=s>\n4\n\"x'\n"
        '</parameter>\n<parameter=l>\n[1.5, true, null, {"b": []}]\n</parameter>\n</function>\n'
        "</tool_call>",
        "<tool_call>\n<function=look_up>\n</function>\n</tool_call>",
    ),
    "gemma": (
        GEMMA,
        f"<|tool_call>call:add{{a:-3,s:{RAW}4\n\"x'{RAW},l:[1.5,true,null,{{b:[]}}]}}<tool_call|>",
        "<|tool_call>call:look_up{}<tool_call|>",
    ),
    "python": (
        PYTHON,
        "<|tool_call_start|>[add(a=-3, s='4\\n\"x\\'', l=[1.5, True, None, {'b': []}])"
        "]<|tool_call_end|>",
        "<|tool_call_start|>[look_up()]<|tool_call_end|>",
    ),
    "harmony": (
        HARMONY,
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": -3, "s": "4\\n\\"x\'", "l": [1.5, true, null, {"b": []}]}<|call|>',
        "<|channel|>commentary to=functions.look_up<|message|>{}<|call|>",
    ),
    "mistral": (
        MISTRAL_3,
        '[TOOL_CALLS]add[ARGS]{"a": -3, "s": "4\\n\\"x\'", "l": [1.5, true, null, {"b": []}]}</s>',
        "[TOOL_CALLS]look_up[CALL_ID]a1b2c3d4e[ARGS]{}</s>",
    ),
}


def marked(
    form: ToolForm, text: str, cuts: list[int] | None = None, *, cut: bool = False, most: int = 9
) -> tuple[str, list[tuple[str, object]]]:
    reader, pieces = reader_of(form, SCHEMAS, most), list[Piece]()
    ends = [*(cuts or []), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        pieces += reader.feed(text[start:end])
    pieces += reader.flush(cut=cut)
    calls = [piece for piece in pieces if isinstance(piece, CallPiece)]
    assert [piece.index for piece in calls] == list(range(reader.calls))
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    return said, [(piece.name, json.loads(piece.arguments)) for piece in calls]


def marked_every_way(form: ToolForm, text: str) -> tuple[str, list[tuple[str, object]]]:
    whole = marked(form, text)
    assert marked(form, text, list(range(1, len(text)))) == whole
    for seed in range(10):
        cuts = sorted(random.Random(seed).sample(range(len(text) + 1), min(4, len(text))))
        assert marked(form, text, cuts) == whole
    return whole


@pytest.mark.parametrize("name", MARKED)
def test_calls_in_a_notation_of_their_own(name: str) -> None:
    form, call, other = MARKED[name]
    both = [ADDED, ("look_up", {})]
    assert marked_every_way(form, f"I look.\n{call}\n{other}\n") == ("I look.", both)
    assert marked_every_way(form, call + other) == ("", both)
    assert marked(form, call + other, most=1) == ("", both[:1])
    # One that its closing mark does not end is one where the model ended it, and none where it
    # was cut.
    open_end = f"I look. {call[: -len(form.closing)]}"
    assert marked_every_way(form, open_end) == ("I look.", both[:1])
    assert marked(form, open_end, cut=True) == ("I look.", [])
    assert marked(form, f"{other}{call[:-30]}", cut=True) == ("", [("look_up", {})])
    if form is HARMONY:
        return
    # As other families write them.
    written = json.dumps({"name": "add", "arguments": ADDED[1]})
    assert marked_every_way(form, f"{form.opening}{written}{form.closing}") == ("", both[:1])


def test_what_a_model_says_beside_its_calls_has_no_marks_of_messages() -> None:
    """Reads a preamble, calls whose recipient stands before the channel, and an unknown call."""
    turn, call = "<|start|>assistant", "<|channel|>commentary json<|message|>{}<|call|>"
    said = f"<|channel|>commentary<|message|>I look.<|end|>{turn}"
    expected = ("I look.", [("look_up", {})])
    assert marked_every_way(HARMONY, f"{said} to=functions.look_up{call}") == expected
    assert marked_every_way(HARMONY, f"{said}{MARKED['harmony'][2]}") == expected
    assert marked_every_way(HARMONY, f" to=functions.look_up{call}") == ("", [("look_up", {})])
    assert marked_every_way(HARMONY, f" to=functions.other{call}")[1] == []
    assert marked_every_way(HARMONY, f"So.<|end|>{turn}<|channel|>final<|message|> It is.") == (
        "So. It is.",
        [],
    )


def test_several_calls_between_one_pair_of_marks() -> None:
    text = "<|tool_call_start|>[look_up(), look_up(q=[])]<|tool_call_end|>So."
    assert marked_every_way(PYTHON, text) == ("So.", [("look_up", {}), ("look_up", {"q": []})])


def test_a_function_without_its_outer_mark_is_a_call_where_it_was_offered() -> None:
    text = "<function={}>\n<parameter=q>\n1\n</parameter>\n</function>"
    actual = marked_every_way(XML, text.format("look_up"))
    assert actual == ("", [("look_up", {"q": "1"})])
    assert marked_every_way(XML, text.format("other")) == (text.format("other"), [])


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (XML, ""),
        (XML, "<function=add>"),
        (XML, "<function=add><parameter=a>1</function>"),
        (XML, "<function=add>1</function>"),
        (XML, "<function=><parameter=a>1</parameter></function>"),
        (XML, "<function=add>" + "<parameter=a>" * 2000),
        (GEMMA, "call:add{a:}"),
        (GEMMA, "call:add{a:1"),
        (GEMMA, "add{a:1}"),
        (GEMMA, "call:add{a:word}"),
        (GEMMA, "call:add{a:1e999}"),
        (GEMMA, "call:add{a:" + "{b:" * 3000),
        (GEMMA, "call:add{a:" + "9" * 5000 + "}"),
        (PYTHON, "[add(1)]"),
        (PYTHON, "[add(a=b)]"),
        (PYTHON, "[add(a=1"),
        (PYTHON, "[__import__('os').system('x')]"),
        (PYTHON, "[" * 5000),
        (PYTHON, "[add(s='\\\\\\')]"),
        (PYTHON, "[]"),
        (PYTHON, '[{"name": "add"}]'),
        (HARMONY, "add"),
        (HARMONY, "add<|message|>{"),
        (HARMONY, "add<|message|>[1]"),
        (HARMONY, 'add<|message|>{"a": 1e999}'),
    ],
)
def test_what_is_no_call_between_the_marks_is_text(form: ToolForm, body: str) -> None:
    text = f"a {form.opening}{body}{form.closing} b"
    assert marked(form, text) == (text, [])
    assert marked(form, text, list(range(1, len(text)))) == (text, [])


def test_hostile_text_is_read_and_never_an_error() -> None:
    parts = [
        *(mark for _, call, _ in MARKED.values() for mark in (call[:20], call[20:40], call[40:])),
        *("<", "<function=", "</function>", "{", "[", "(", "'", '"', RAW, ":", "=", ",", "\\", "1"),
    ]
    for seed in range(600):
        form = (XML, GEMMA, PYTHON, HARMONY)[seed % 4]
        text = "".join(random.Random(seed).choices([*parts, form.opening, form.closing], k=12))
        whole = marked(form, text)
        assert marked(form, text, list(range(1, len(text)))) == whole


def test_calls_end_with_the_answer_where_no_mark_closes_them() -> None:
    reader = reader_of(MISTRAL_3, SCHEMAS)
    text = 'Look. [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]look_up[ARGS]{"s": "[TOOL_CALLS]"}'
    pieces = [piece for character in text for piece in reader.feed(character)]
    assert "".join(map(str, pieces)) == "Look."
    assert reader.flush() == [
        CallPiece(index=0, name="add", arguments='{"a": 1}'),
        CallPiece(index=1, name="look_up", arguments='{"s": "[TOOL_CALLS]"}'),
    ]
    assert read(GRANITE, f"<|tool_call|>[{A % 'arguments'}, {B % 'arguments'}]")[0] == ""


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_are_told_where_a_template_would_leave_them_out() -> None:
    """Checks that they are read again; other templates write calls themselves."""
    calls = [
        called("add", a=-3, s="4\n\"x'", l=[1.5, True, None, {"b": []}]),
        called("look_up", q="\ue0001\ue000"),
    ]
    messages = [
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "Look.", "tool_calls": calls},
        {"role": "tool", "content": "5"},
    ]
    expected = [(row["function"]["name"], row["function"]["arguments"]) for row in calls]
    for template in ("{{ tools }}List of tools: ", "{{ tools }}<tool_call>",
                     "{{ tools }}<|start_of_role|><|tool_call|>"):  # fmt: skip
        form = tool_form(template)
        assert form is not None
        first, written, last = with_calls_as_text(messages, template)
        assert [first, last] == messages[::2]
        assert "\ue0001\ue000" in written["content"]
        reader = reader_of(form, SCHEMAS)
        pieces = [*reader.feed(written["content"]), *reader.flush()]
        assert [
            (piece.name, json.loads(piece.arguments))
            for piece in pieces
            if isinstance(piece, CallPiece)
        ] == expected
        assert [piece for piece in pieces if isinstance(piece, str)] == ["Look."]
        spelt = "[1.5, True, None" if form is PYTHON else "[1.5, true, null"
        assert spelt in written["content"]
        for other in (f"{template}{{{{ message.tool_calls }}}}", "{{ messages }}"):
            assert with_calls_as_text(messages, other) is messages


RUNS = (
    *(" ", "\n", "\t", " \n", "\r", "`", "```", "```\n", "```json ", "{", "{ ", "{\n", "[", ", "),
    *("<", "<tool", "<tool_call>", "<tool_call> ", "[TOOL_CALLS] ", '{"', "word", "a "),
    *('{"name": "add", "arguments": {}}', " to=functions.", "<function=add>", "<|message|> "),
)


def runs(form: ToolForm, seed: int, most: int) -> str:
    """Runs of what may hold text back, and of this form's marks and halves of them."""
    chance = random.Random(seed)
    marks = [form.opening or form.before, form.closing, *(form.bare or ()), *form.plain_marks]
    halves = [mark[: len(mark) // 2] for mark in marks]
    parts = [part for part in (*RUNS, *marks, *halves) if part]
    chosen = chance.choices(parts, k=8)
    return "".join(part * chance.choice((1, 1, 2, most // len(part))) for part in chosen)


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_long_runs_are_read_alike_however_they_come(form: ToolForm) -> None:
    def pieces(text: str, characters: int, *, cut: bool) -> list[object]:
        reader = reader_of(form, {name: {} for name in NAMES})
        calls = [
            piece
            for start in range(0, len(text), characters)
            for piece in reader.feed(text[start : start + characters])
        ]
        joined: list[object] = []
        for piece in [*calls, *reader.flush(cut=cut)]:
            if isinstance(piece, str) and joined and isinstance(joined[-1], str):
                joined.append(f"{joined.pop()}{piece}")
            else:
                joined.append(piece)
        return joined

    for seed in range(15):
        text = runs(form, seed, most=400)
        whole = pieces(text, len(text), cut=seed % 3 == 0)
        for characters in (1, 7, 100, 1023):
            assert pieces(text, characters, cut=seed % 3 == 0) == whole


BEFORE = ("", "x", "\n", "```", "```json", "{", '{"a', "MARK", "MARK{}CLOSING")
REPEATED = (" ", "\n", "`", "{\n", "<", "[", "\n```", "MARK", "HALF")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_four_times_the_text_takes_four_times_the_time(form: ToolForm) -> None:
    mark = form.opening or form.before

    def seconds(text: str) -> float:
        reader = reader_of(form, {name: {} for name in NAMES})
        started = time.process_time()
        for start in range(0, len(text), 16):
            reader.feed(text[start : start + 16])
        reader.flush()
        return time.process_time() - started

    for first, repeated in product(BEFORE, REPEATED):
        before = first.replace("MARK", mark).replace("CLOSING", form.closing)
        run = repeated.replace("MARK", mark).replace("HALF", mark[:-1])
        short, long = (before + run * (count // len(run)) for count in (5_000, 20_000))
        for _ in range(3):
            if seconds(long) < 8 * seconds(short) + 0.01:
                break
        else:
            pytest.fail(f"{before!r} and runs of {run!r}")


def test_a_message_to_a_function_is_refused_in_time_that_does_not_square() -> None:
    started = time.process_time()
    assert HARMONY.calls is not None
    assert HARMONY.calls.read("f" + " " * 200_000, {}) is None
    assert time.process_time() - started < 1.0
