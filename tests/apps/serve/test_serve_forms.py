"""Answers held to a form, and calls of tools, through the official client and by value."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import AddedToken

from kvq.errors import UsageError
from kvq_apps.serve.server import Server
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer import grammar_trial as trial
from serving import (
    CHAT,
    COMPLETIONS,
    PATIENCE_S,
    Reply,
    Rule,
    ask,
    client,
    read_all,
    running,
    send,
    wait_until,
)
from tiny import byte_level_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.usefixtures("own_state")

GO = "<|im_start|>"
# In the manner of the families: each row how it lists tools, calls and results.
SAYS = {
    "hermes": "<tool_call>\n{{ call.function | tojson }}\n</tool_call>",
    "phi": "<|tool_call|>[{{ call.function | tojson }}]<|/tool_call|>",
    "mistral": "[TOOL_CALLS] [{{ call.function | tojson }}]",
    "llama": '{"name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}',
}
# Those with a notation of their own, by what their templates are known by.
NOTED = {
    "qwen": "<tool_call><function=><parameter=",
    "gemma": "<|tool_call>",
    "lfm": "List of tools: ",
    "gpt-oss": "<|call|>",
}
TEMPLATE = (
    "{%% if tools %%}{{ tools | tojson }}{%% endif %%}"
    "{%% for message in messages %%}{{ message.role }}: {{ message.content }}"
    "{%% for call in message.tool_calls or [] %%}%s{%% endfor %%}"
    "{%% if message.role == 'tool' %%}={{ message.name }}#{{ message.tool_call_id }}{%% endif %%}"
    "{{ '\\n' }}"
    "{%% endfor %%}{%% if add_generation_prompt %%}" + GO + "{%% endif %%}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}
EMPTY = {
    "type": "function",
    "function": {
        "name": "empty",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
ARGUMENTS = '{"city": "Zürich", "days": 3}'
CALLS = {
    "hermes": "I ask.\n<tool_call>\n{C}\n</tool_call>\n<tool_call>\n{D}\n</tool_call>",
    "phi": "<|tool_call|>[{C}, {D}]<|/tool_call|>",
    "mistral": "[TOOL_CALLS] [{C}, {D}]",
    "llama": "{C}",
}


def tokenizer(form: str) -> Tokenizer:
    """Marks that are control tokens in the real ones are so here."""
    library = byte_level_tokenizer()
    marks = ["<|tool_call|>", "<|/tool_call|>", "[TOOL_CALLS]", "<|python_tag|>"]
    marks += ["<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>"]
    marks += ["<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"]
    library.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    library.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    return Tokenizer.from_json(
        library.to_str(),
        ControlTokens(eos=(0,)),
        TEMPLATE % {**SAYS, **NOTED}[form] if form else "{{ messages }}",
    )


@contextmanager
def served(
    form: str,
    said: str | None = None,
    context_tokens: int = 2000,
    before: Callable[[int], object] = lambda _: None,
    **settings: Any,
) -> Iterator[Server]:
    """A server on a model that always says `said`, or random tokens where that is None.

    `before` is called with the place of each token of `said` before the model says it.
    """
    rule = Rule(context_tokens=context_tokens)
    rule.tokenizer = tokenizer_of_form = tokenizer(form)
    go = tokenizer_of_form.token_id(GO)
    script = [] if said is None else [*tokenizer_of_form.encode(said, special=True), 0]

    def random(tokens: Sequence[int]) -> np.ndarray:
        seed = [len(tokens), sum(tokens)]
        return np.random.default_rng(seed).standard_normal(400).astype(np.float32)

    def scripted(tokens: Sequence[int]) -> int:
        place = list(tokens[::-1]).index(go)
        before(place)
        return script[min(place, len(script) - 1)]

    rule.backend.rule = scripted if said is not None else random
    with running(rule.load, sessions=2, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def wild() -> Iterator[Server]:
    """A model of random tokens that has been told of hermes' form."""
    with served("hermes") as server:
        yield server


@pytest.fixture(scope="module")
def roomy() -> Iterator[Server]:
    """The same with room for tools of any size."""
    with served("hermes", context_tokens=1 << 20) as server:
        yield server


def user(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "rule", "messages": [{"role": "user", "content": text}], **more}


def streamed(
    sdk: openai.OpenAI, **settings: Any
) -> tuple[dict[int, str], dict[int, list[Any]], dict[int, str | None]]:
    """Texts, calls and reasons of a stream's choices, put together as its deltas say."""
    texts: dict[int, str] = {}
    calls: dict[int, list[Any]] = {}
    reasons: dict[int, str | None] = {}
    with sdk.chat.completions.create(stream=True, **settings) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                mine = calls.setdefault(choice.index, [])
                for delta in choice.delta.tool_calls or []:
                    assert delta.index == len(mine)
                    assert re.fullmatch("[0-9a-z]{9}", delta.id)
                    mine.append([delta.function.name, delta.function.arguments])
                reasons[choice.index] = choice.finish_reason
    return texts, calls, reasons


# Forms


def test_the_official_client_gets_json_of_its_schema(wild: Server) -> None:
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True},
    }
    settings = user(response_format=response_format, n=3, seed=4, temperature=1.4)
    with client(wild) as sdk:
        whole = sdk.chat.completions.create(**settings)
        texts = [choice.message.content for choice in whole.choices]
        assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 3
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
        pieces, _, reasons = streamed(sdk, **settings)
    assert list(pieces.values()) == texts
    assert set(reasons.values()) == {"stop"}


@pytest.mark.parametrize(
    ("path", "field", "value", "fits"),
    [
        (CHAT, "regex", "(yes|no), [a-f]{3}", r"(yes|no), [a-f]{3}"),
        (CHAT, "grammar", 'root ::= "<" [0-9]{2} ">"', r"<\d\d>"),
        (CHAT, "json_schema", {"enum": ["é", 2]}, r'"é"|2'),
        (COMPLETIONS, "regex", "[xy]{4}", "[xy]{4}"),
        (COMPLETIONS, "response_format", {"type": "json_object", "schema": {"const": 7}}, "7"),
        ("/completion", "grammar", 'root ::= "a" root | "b"', "a*b"),
        ("/completion", "json_schema", {"type": "boolean"}, "true|false"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_route_holds_to_a_form(
    path: str, field: str, value: Any, fits: str, stream: bool, wild: Server
) -> None:
    limit = {"n_predict": 60} if path == "/completion" else {"max_tokens": 60}
    prompt = user() if path == CHAT else {"prompt": "The quick bro"}
    reply = ask(wild, path, {**prompt, **limit, field: value, "stream": stream})
    assert reply.status == 200, reply.body
    if not stream:
        body = reply.json
        text = body["content"] if path == "/completion" else _text(body["choices"][0])
    else:
        rows = [json.loads(event[6:]) for event in reply.events if event != "data: [DONE]"]
        text = "".join(
            row["content"] if path == "/completion" else _text(row["choices"][0]) for row in rows
        )
    assert re.fullmatch(fits, text), text


def _text(choice: dict[str, Any]) -> str:
    holder = choice.get("message") or choice.get("delta")
    return choice.get("text", "") if holder is None else holder.get("content") or ""


@pytest.mark.parametrize(
    ("more", "param", "complaint"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or"),
        ({"response_format": "json"}, "response_format", "an object"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "schema",
        ),
        ({"json_schema": {"type": "bogus"}}, "json_schema", "at /type: 'bogus' is none of"),
        ({"json_schema": [1]}, "json_schema", "an object"),
        ({"grammar": "root ::= x"}, "grammar", "names 'x', which has no rule"),
        ({"grammar": 3}, "grammar", "a string"),
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": "(", "response_format": {"type": "text"}}, "regex", "unclosed group"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "regex", "exclude each other"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "the same name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name", "the name of the function"),
        (
            {"tools": [{"type": "browser"}], "tool_choice": "required"},
            "tool_choice",
            "none that can be called",
        ),
        (
            {"tools": [{"function": {"name": "a", "description": "b" * (1 << 20)}}]},
            "tools",
            "at most 1048576 bytes",
        ),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "none, auto, required"),
        (
            {"tools": [WEATHER], "tool_choice": {"function": {"name": "x"}}},
            "tool_choice",
            "no function 'x'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tools has none"),
        ({"functions": [{}]}, "functions[0].name", "the name of the function"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_name(
    more: dict[str, Any], param: str, complaint: str, wild: Server
) -> None:
    reply = ask(wild, CHAT, user(**more))
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param)
    assert complaint in error["message"]


# Forms that are too much


def chained(levels: int, opening: str = "", closing: str = "") -> dict[str, Any]:
    """A schema whose definitions refer to each other in a chain."""
    parts = [f'"{n}":{opening}{{"$ref":"#/$defs/{n + 1}"}}{closing}' for n in range(levels)]
    return json.loads(f'{{"$ref":"#/$defs/0","$defs":{{{",".join(parts)},"{levels}":{{}}}}}}')


def many_properties(count: int) -> dict[str, Any]:
    rows = {f"p{n}": {"type": "string"} for n in range(count)}
    return {"type": "object", "properties": rows}


CHAIN = chained(1000, '{"type":"object","properties":{"a":', "}}")
NESTED_CHAIN = chained(499, '{"items":{"items":{"items":{"items":', "}}}}")
RULES = "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(5000)) + '\nr5000 ::= "a"'


def calling(schema: dict[str, Any], choice: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"tools": [tool], "tool_choice": choice}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"json_schema": CHAIN}, "json_schema"),
        ({"json_schema": NESTED_CHAIN}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": NESTED_CHAIN}}, "response_format"),
        ({"grammar": RULES}, "grammar"),
        (calling(CHAIN, "required"), "tools"),
        (calling(NESTED_CHAIN, "required"), "tools"),
        (calling(NESTED_CHAIN, {"type": "function", "function": {"name": "f"}}), "tools"),
        (calling(many_properties(7000), "required"), "tools"),
        ({**calling(NESTED_CHAIN, "auto"), "regex": "a|b"}, "regex"),
    ],
)
def test_a_form_that_is_too_much_is_refused_and_the_server_lives(
    more: dict[str, Any], param: str, roomy: Server
) -> None:
    reply = ask(roomy, CHAT, user(**more))
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param), error
    assert re.search("too much work|at most|more than 64", error["message"])
    assert ask(roomy, CHAT, user(regex="[ab]{3}")).status == 200


def test_large_forms_wait_for_each_other_and_nobody_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More are held up than the threads all requests share; a client that leaves ends its own."""
    waiting: list[str] = []
    ended: list[str] = []

    def wait_for_leaving(lark: str, cancelled: Callable[[], bool]) -> None:
        waiting.append(lark)
        wait_until(cancelled, "for the client to leave")
        ended.append(lark)
        raise UsageError("nobody wants it")

    rule = Rule()
    with running(rule.load, sessions=2) as server:
        monkeypatch.setattr(trial, "try_out", wait_for_leaving)
        request = user(json_schema=many_properties(300), max_tokens=5)
        clients = [send(server, CHAT, request) for _ in range(40)]
        wait_until(lambda: len(waiting) == 2)
        for more in ({}, {"regex": "[ab]{3}"}, {"json_schema": SCHEMA}):
            reply = ask(server, CHAT, user(**more, max_tokens=5))
            assert reply.status == 200, reply.body
        assert (len(waiting), ended) == (2, [])
        for client in clients:
            client.close()
        wait_until(lambda: len(ended) == len(waiting) == len(clients))
        monkeypatch.undo()
        assert ask(server, CHAT, request).status == 200


# Tools


@pytest.mark.parametrize("form", SAYS)
def test_calls_are_told_by_value(form: str) -> None:
    key = "parameters" if form == "llama" else "arguments"
    said = CALLS[form].replace("{C}", f'{{"name": "weather", "{key}": {ARGUMENTS}}}')
    said = said.replace("{D}", f'{{"name": "clock", "{key}": {{}}}}')
    calls = [["weather", ARGUMENTS], ["clock", "{}"]][: 1 + ("{D}" in CALLS[form])]
    content = "I ask." if form == "hermes" else None
    with served(form, said) as server, client(server) as sdk:
        settings = user(tools=[WEATHER, CLOCK], temperature=0)
        (choice,) = sdk.chat.completions.create(**settings).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == content
        tool_calls = choice.message.tool_calls
        assert [[call.function.name, call.function.arguments] for call in tool_calls] == calls
        assert len({call.id for call in tool_calls}) == len(calls)
        assert {call.type for call in tool_calls} == {"function"}
        texts, parts, reasons = streamed(sdk, n=2, **settings)
        assert texts == dict.fromkeys(range(2), content or "")
        assert parts == dict.fromkeys(range(2), calls)
        assert reasons == dict.fromkeys(range(2), "tool_calls")
        # Offered none, or told to call none, the same answer is text.
        for more in ({"tool_choice": "none"}, {"tools": []}):
            (choice,) = sdk.chat.completions.create(**settings | more).choices
            assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


BARE = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("said", "content"),
    [
        (f"I ask.\n\n```json\n{BARE}\n```\n", "I ask."),
        (f"[TOOL_CALLS] [{BARE}]", None),
    ],
)
def test_a_call_need_not_be_in_the_models_own_form(said: str, content: str | None) -> None:
    """As Qwen2.5-Coder writes them, told of <tool_call>: in a fence, or behind another's token."""
    with served("hermes", said) as server, client(server) as sdk:
        settings = user(tools=[WEATHER, CLOCK], temperature=0)
        (choice,) = sdk.chat.completions.create(**settings).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert streamed(sdk, **settings) == (
            {0: content or ""},
            {0: [["weather", ARGUMENTS]]},
            {0: "tool_calls"},
        )
        # Of a tool that was not offered, and where none was, it is text.
        for tools in ([CLOCK], []):
            if said.startswith("[TOOL_CALLS]") and not tools:
                continue  # a control token, which is shown to those who offer tools
            (choice,) = sdk.chat.completions.create(**settings | {"tools": tools}).choices
            assert (choice.finish_reason, choice.message.content) == ("stop", said)
            assert choice.message.tool_calls is None
            assert streamed(sdk, **settings | {"tools": tools}) == ({0: said}, {0: []}, {0: "stop"})


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_call_that_the_length_cuts_is_left_out(form: str) -> None:
    said = f"<tool_call>{BARE}</tool_call>\n<tool_call>{BARE}</tool_call>"
    with served(form, said) as server, client(server) as sdk:
        count = len(tokenizer(form).encode(said, special=True))
        whole = ["weather", ARGUMENTS]
        for tokens, calls in ((count - 8, [whole]), (count // 2 - 8, []), (count + 9, [whole] * 2)):
            settings = user(tools=[WEATHER], temperature=0, max_tokens=tokens)
            reason = "length" if tokens < count else "tool_calls"
            (choice,) = sdk.chat.completions.create(**settings).choices
            tool_calls = choice.message.tool_calls or []
            assert [[call.function.name, call.function.arguments] for call in tool_calls] == calls
            assert (choice.finish_reason, choice.message.content or "") == (reason, "")
            assert streamed(sdk, **settings) == ({0: ""}, {0: calls}, {0: reason})


def test_a_stream_that_holds_a_call_back_does_not_fall_silent() -> None:
    heard = threading.Event()

    def wait(place: int) -> None:
        # Within the call: whatever the client hears now, it hears before the call is whole.
        if place == 12:
            assert heard.wait(PATIENCE_S)

    with served("hermes", BARE, before=wait, ping_s=0.0) as server:
        body = user(tools=[WEATHER], temperature=0, stream=True)
        with send(server, CHAT, body) as connection:
            reply = b""
            while b": the answer is being written" not in reply:
                part = connection.recv(1 << 16)
                assert part, reply
                reply += part
            assert b"tool_calls" not in reply
            heard.set()
            reply += read_all(connection)
    events = [event for event in Reply(reply).events if event.startswith("data: {")]
    assert json.loads(events[-1][6:])["choices"][0]["finish_reason"] == "tool_calls"


def test_as_many_calls_are_told_as_are_welcome() -> None:
    with served("hermes", CALLS["hermes"].replace("{C}", BARE).replace("{D}", BARE)) as server:
        for many, count in ((None, 2), (True, 2), (False, 1)):
            reply = ask(
                server, CHAT, user(tools=[WEATHER], temperature=0, parallel_tool_calls=many)
            )
            assert len(reply.json["choices"][0]["message"]["tool_calls"]) == count


@pytest.mark.parametrize(
    "call", ['"name": "\\ud800", "arguments": {}', '"arguments": {}, "name": "\\ud800"']
)
def test_a_call_that_is_no_unicode_text_is_told_too(call: str) -> None:
    with served("hermes", f"<tool_call>{{{call}}}</tool_call>") as server:
        reply = ask(server, CHAT, user(tools=[CLOCK], temperature=0))
    assert reply.status == 200
    (tool_call,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert tool_call["function"] == {"name": "\ud800", "arguments": "{}"}


def test_text_is_text_with_tools_too() -> None:
    with served("hermes", "It is <b>four</b> o'clock.\n") as server, client(server) as sdk:
        settings = user(tools=[CLOCK], temperature=0)
        (choice,) = sdk.chat.completions.create(**settings).choices
        assert (choice.message.content, choice.message.tool_calls) == (
            "It is <b>four</b> o'clock.\n",
            None,
        )
        assert choice.finish_reason == "stop"
        texts, calls, reasons = streamed(sdk, **settings)
        assert (texts, calls, reasons) == (
            {0: "It is <b>four</b> o'clock.\n"},
            {0: []},
            {0: "stop"},
        )


@pytest.mark.sampled
@pytest.mark.parametrize("form", [*SAYS, *NOTED])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_must_be_is_made(form: str, choice: Any) -> None:
    """By a model of random tokens: name and arguments fit whatever it would rather say."""
    with served(form) as server, client(server) as sdk:
        for seed in range(3):
            settings = user(
                tools=[EMPTY, WEATHER], tool_choice=choice, seed=seed, temperature=1.5,
            )  # fmt: skip
            (answer,) = sdk.chat.completions.create(**settings).choices
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            calls = answer.message.tool_calls
            for call in calls:
                arguments = json.loads(call.function.arguments)
                if call.function.name == "weather":
                    jsonschema.validate(arguments, SCHEMA)
                else:
                    assert (call.function.name, arguments) == ("empty", {})
            if choice != "required":
                assert [call.function.name for call in calls] == ["weather"]
            _, parts, _ = streamed(sdk, **settings)
            assert parts[0] == [[call.function.name, call.function.arguments] for call in calls]
            assert len(calls) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["hermes", *NOTED])
def test_several_calls_that_must_be_are_for_those_who_ask(form: str) -> None:
    """A model of random tokens seldom ends where it may go on: as small ones do."""
    counts: dict[bool | None, list[int]] = {}
    with served(form) as server:
        for many in (None, False, True):
            for seed in range(6):
                request = user(
                    tools=[EMPTY], tool_choice="required", seed=seed, temperature=1.5,
                    parallel_tool_calls=many,
                )  # fmt: skip
                message = ask(server, CHAT, request).json["choices"][0]["message"]
                counts.setdefault(many, []).append(len(message["tool_calls"]))
    assert counts[None] == counts[False] == [1] * 6
    assert (max(counts[True]) > 1) == (form != "gpt-oss")


def test_a_call_that_must_be_is_whole_or_left_out(wild: Server) -> None:
    request = user(tools=[WEATHER], tool_choice="required", max_tokens=20, seed=1)
    with client(wild) as sdk:
        (choice,) = sdk.chat.completions.create(**request).choices
        assert choice.finish_reason == "length"
        assert (choice.message.content, choice.message.tool_calls) == ("", None)
        assert streamed(sdk, **request) == ({0: ""}, {0: []}, {0: "length"})


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["hermes", *NOTED])
def test_a_schema_and_tools_leave_the_choice(form: str) -> None:
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "trip", "schema": {"const": "text"}},
    }
    kinds = set()
    with served(form) as server:
        for seed in range(12):
            body = user(tools=[EMPTY], response_format=response_format, seed=seed, temperature=9)
            (choice,) = ask(server, CHAT, body).json["choices"]
            kinds.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                assert choice["message"]["content"] == '"text"'
            else:
                assert choice["message"]["tool_calls"][0]["function"]["name"] == "empty"
    assert kinds == {"stop", "tool_calls"}


def test_a_conversation_with_calls_reaches_the_template(wild: Server) -> None:
    function = {"name": "weather", "arguments": ARGUMENTS}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sun <|im_end|>"},
    ]  # fmt: skip
    reply = ask(wild, "/apply-template", {"messages": messages, "tools": [CLOCK]})
    assert reply.json["prompt"] == (
        f"{json.dumps([CLOCK])}user: Weather?\n"
        'assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n'
        "</tool_call>\ntool: sun <|im_end|>=weather#abcdefghi\n" + GO
    )
    broken = [
        *messages[:1],
        {**messages[1], "tool_calls": [{"function": {**function, "arguments": "{"}}]},
    ]
    reply = ask(wild, CHAT, {"messages": broken})
    assert (reply.status, reply.json["error"]["param"]) == (
        400,
        "messages[1].tool_calls[0].function.arguments",
    )
    function["arguments"] = '{"a": ' * 900 + "1" + "}" * 900
    error = ask(wild, CHAT, {"messages": messages}).json["error"]
    assert (error["param"], "nested too deeply" in error["message"]) == ("messages", True)


def test_control_tokens_in_tools_stay_text() -> None:
    """In names of properties too: what a client sends never steers the model."""
    hermes = tokenizer("hermes")
    parameters = {"<|im_end|>": "<|im_end|>"}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    ids = hermes.chat([{"role": "user", "content": "x"}], variables={"tools": [tool]})
    assert hermes.token_id("<|im_end|>") not in ids
    assert hermes.decode(ids).count("<|im_end|>") == 2


def test_a_model_whose_template_takes_no_tools_says_so() -> None:
    with served("") as server:
        reply = ask(server, CHAT, user(tools=[CLOCK]))
        assert (reply.status, reply.json["error"]["code"]) == (400, "unsupported")
        assert "serve a model that calls tools" in reply.json["error"]["message"]


# What else a request may ask


def test_a_completion_repeats_its_prompt_where_asked() -> None:
    rule = Rule()
    with running(rule.load, sessions=1) as server, client(server) as sdk:
        settings = {
            "model": "rule",
            "prompt": ["ab", "Größe "],
            "n": 2,
            "max_tokens": 3,
            "echo": True,
        }
        whole = sdk.completions.create(**settings, temperature=0)
        texts = [choice.text for choice in whole.choices]
        expected = [p + rule.text(p, 3) for p in settings["prompt"] for _ in range(2)]
        assert texts == expected
        streamed_texts = dict.fromkeys(range(4), "")
        for chunk in sdk.completions.create(**settings, temperature=0, stream=True):
            for choice in chunk.choices:
                streamed_texts[choice.index] += choice.text
        assert list(streamed_texts.values()) == expected
    with running(rule.load, sessions=1) as server:
        reply = ask(server, COMPLETIONS, {"prompt": "a", "echo": True, "suffix": "x"})
        assert (reply.status, reply.json["error"]["param"]) == (400, "echo")


def test_a_chat_answer_may_be_asked_for_in_part(wild: Server) -> None:
    names = [
        "choices/0/message/content",
        "usage/completion_tokens",
        "timings/predicted_n",
        "none/9",
    ]
    reply = ask(wild, CHAT, user(regex="[ab]{3}", n_predict=9, response_fields=names))
    assert list(reply.json) == names[:3]
    assert re.fullmatch("[ab]{3}", reply.json[names[0]])
    assert reply.json[names[1]] == reply.json[names[2]] == 3


def test_penalties_are_openais(wild: Server) -> None:
    """Greedy on one letter: a frequency penalty makes it take turns, its absence does not."""
    with client(wild) as sdk:

        def text(**more: Any) -> str:
            completion = sdk.chat.completions.create(
                **user(temperature=0), extra_body={"regex": "[ab]{8}"}, logit_bias={}, **more
            )
            return completion.choices[0].message.content

        assert len(set(text())) == 2
        assert text(frequency_penalty=2.0, presence_penalty=0.0) != text(frequency_penalty=-2.0)
        assert len(set(text(frequency_penalty=-2.0, presence_penalty=-2.0))) == 1


# Schemas that are held in part, tools that are skipped

EMAIL = {
    "type": "string",
    "format": "email",
    "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z]+@[a-z]+\\.[a-z]{2,}$",
}
MAIL = {
    "type": "object",
    "properties": {"to": EMAIL},
    "required": ["to"],
    "additionalProperties": False,
}
SEND = {"type": "function", "function": {"name": "send", "parameters": MAIL}}
LOST = "properties/to/pattern: look-ahead"


@pytest.mark.parametrize(
    ("more", "unheld"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": MAIL}}}, f"/{LOST}"),
        ({"response_format": {"type": "json_schema", "schema": MAIL}}, f"/{LOST}"),
        ({"response_format": {"type": "json_object", "schema": MAIL}}, f"/{LOST}"),
        ({"json_schema": MAIL}, f"/{LOST}"),
        (
            {"tools": [CLOCK, SEND], "tool_choice": "required"},
            f"/tools/1/function/parameters/{LOST}",
        ),
        (
            {"functions": [SEND["function"]], "function_call": {"name": "send"}},
            f"/functions/0/parameters/{LOST}",
        ),
        (
            {"tools": [SEND], "response_format": {"type": "json_object"}},
            f"/tools/0/function/parameters/{LOST}",
        ),
        ({"tools": [SEND, CLOCK], "tool_choice": {"type": "function", "name": "clock"}}, None),
        ({"tools": [SEND]}, None),
    ],
)
def test_what_an_answer_is_not_held_to_is_told(
    more: dict[str, Any], unheld: str | None, wild: Server
) -> None:
    reply = ask(wild, CHAT, user(**more, max_tokens=200, seed=3))
    assert reply.status == 200, reply.body
    assert reply.json["x_kvq"].get("unheld") == (unheld and [unheld])
    chunks = ask(wild, CHAT, user(**more, max_tokens=2, stream=True)).events
    last = [json.loads(event[6:]) for event in chunks[:-1]][-1]
    assert last["x_kvq"].get("unheld") == (unheld and [unheld])


def test_what_is_left_of_a_schema_is_held_to(wild: Server) -> None:
    response_format = {"type": "json_schema", "schema": MAIL}
    for seed in range(3):
        reply = ask(wild, CHAT, user(response_format=response_format, seed=seed, max_tokens=400))
        choice = reply.json["choices"][0]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "length" or set(json.loads(text)) == {"to"}
        assert choice["finish_reason"] == "length" or "@" in json.loads(text)["to"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": MAIL, "strict": True},
                }
            },
            "response_format",
        ),
        (
            {
                "tools": [{"function": SEND["function"] | {"strict": True}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_a_strict_schema_is_held_to_as_a_whole_or_refused(
    more: dict[str, Any], param: str, wild: Server
) -> None:
    error = ask(wild, CHAT, user(**more)).json["error"]
    assert error["param"] == param
    assert f"{LOST}; leave that out, or leave strict out" in error["message"]


def test_tools_that_are_no_functions_are_skipped_and_told(wild: Server) -> None:
    odd = [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "web_search"},
        {"type": "mcp", "name": "docs"},
        {"type": "function", "function": {"name": "n" * 257}},
    ]
    skipped = ["custom patch: no function", "web_search: no function", "mcp docs: no function"]
    skipped += [f"{'n' * 80}: no call of this model's can have that name"]
    for tools in ([WEATHER, *odd], [*odd, WEATHER]):
        reply = ask(wild, CHAT, user(tools=tools, tool_choice="required", max_tokens=300)).json
        assert reply["x_kvq"]["skipped_tools"] == skipped
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
    alone = ask(wild, CHAT, user(tools=odd, max_tokens=2)).json
    assert alone["x_kvq"]["skipped_tools"] == skipped
    bare = ask(wild, CHAT, user(max_tokens=2)).json
    assert alone["usage"]["prompt_tokens"] == bare["usage"]["prompt_tokens"]
    assert "skipped_tools" not in bare["x_kvq"]


@pytest.mark.parametrize(
    "name",
    [
        "mcp__plugin_chrome-devtools__get_console_message" * 3,
        "m" * 256,
        "über alles!",
        'a"b\\c',
        "7",
    ],
)
def test_a_function_may_have_any_name_that_a_call_can_have(name: str, wild: Server) -> None:
    tool = {"function": {"name": name, "parameters": EMPTY["function"]["parameters"]}}
    reply = ask(wild, CHAT, user(tools=[tool], tool_choice="required", max_tokens=600))
    (call,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": name, "arguments": "{}"}


def test_a_name_that_a_notation_cannot_write_is_skipped() -> None:
    tools = [{"function": {"name": name}} for name in ("3 d", "map")]
    with served("gemma") as server:
        reply = ask(server, CHAT, user(tools=tools, tool_choice="required", max_tokens=2)).json
    assert reply["x_kvq"]["skipped_tools"] == ["3 d: no call of this model's can have that name"]


def test_many_tools_are_bounded_by_their_bytes(roomy: Server) -> None:
    tools = [{"function": {"name": f"t{number}"}} for number in range(300)]
    assert ask(roomy, CHAT, user(tools=tools, max_tokens=1)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}]
)
def test_json_mode_without_a_schema_is_an_object(
    more: dict[str, Any], stream: bool, wild: Server
) -> None:
    request = {
        "response_format": {"type": "json_object"},
        "max_tokens": 400,
        "stream": stream,
        **more,
    }
    for seed in range(4):
        reply = ask(wild, CHAT, user(**request, seed=seed))
        if stream:
            rows = [json.loads(event[6:]) for event in reply.events if event != "data: [DONE]"]
            choices = [row["choices"][0] for row in rows]
            reason = choices[-1]["finish_reason"]
            text = "".join(map(_text, choices))
        else:
            reason, text = (
                reply.json["choices"][0]["finish_reason"],
                _text(reply.json["choices"][0]),
            )
        assert reason in ("length", "tool_calls") or isinstance(json.loads(text), dict)
        assert not text or text.lstrip()[:1] == "{"
