"""Thinking over HTTP: told apart, counted, switched, bounded, and before an answer's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tokenizers import AddedToken

from kvq_apps.serve.server import Server
from kvq_apps.serve.tools import attach_results
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from serving import CHAT, Rule, ask, client, running
from tiny import byte_level_tokenizer

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("own_state")

GO = "<|im_start|>"
# As Qwen's: on unless switched off, the mark at the prompt's end or the model's to write.
TEMPLATE = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ mood }}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content and loop.last %}({{ message.reasoning_content }}) {% endif %}"
    "{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}" + GO + "{% if not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif OPEN %}<think>\n{% endif %}{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
THOUGHT = "Größe or café?\n\nIt is 7."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"q": 1}}\n</tool_call>'


# As gpt-oss': a prompt ends before the channel, whose marks are several control tokens.
CHANNELS = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{# <|channel|>analysis #}" + GO
)
CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
FINAL = "<|channel|>final<|message|>"
ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant{FINAL}"


@contextmanager
def served(
    said: str,
    *,
    open_mark: bool = False,
    special: bool = False,
    template: str = TEMPLATE,
    marks: Sequence[str] = ("<think>", "</think>"),
    **settings: Any,
) -> Iterator[Server]:
    """A server on a model that always says `said` after a prompt that has the mark, or not.

    `special`: the marks are control tokens, as Gemma has them.
    """
    rule, library = Rule(), byte_level_tokenizer()
    library.add_tokens([AddedToken(mark, special=special) for mark in marks])
    rule.tokenizer = Tokenizer.from_json(
        library.to_str(), ControlTokens(eos=(0,)), template.replace("OPEN", str(open_mark))
    )
    go = rule.tokenizer.token_id(GO)
    skipped = len(rule.tokenizer.encode("<think>\n", special=True)) if open_mark else 0
    script = [*rule.tokenizer.encode(said, special=True), 0]

    def scripted(tokens: Sequence[int]) -> int:
        place = list(tokens[::-1]).index(go) - skipped
        return script[max(0, min(place, len(script) - 1))]

    rule.backend.rule = scripted
    with running(rule.load, sessions=2, **settings) as server:
        server.rule = rule  # type: ignore[attr-defined]
        yield server


def user(text: str = "hi", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "rule", "messages": messages, "temperature": 0, **more}


def message(server: Server, **more: Any) -> dict[str, Any]:
    reply = ask(server, CHAT, user(**more))
    assert reply.status == 200, reply.json
    return reply.json["choices"][0]["message"] | {"usage": reply.json["usage"]}


def streamed(server: Server, **more: Any) -> tuple[str, str, list[Any], dict[str, Any]]:
    """Thought, content, calls and usage of a stream, whose deltas hold no part of a mark."""
    body = user(stream=True, stream_options={"include_usage": True}, **more)
    thought, content, calls, usage = "", "", [], {}
    for event in ask(server, CHAT, body).events:
        if not event.startswith("data: {"):
            continue
        chunk = json.loads(event[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert not {"reasoning_content", "content"} <= delta.keys() or delta["content"]
            thought += delta.get("reasoning_content", "")
            content += delta.get("content", "")
            calls += delta.get("tool_calls", [])
    return thought, content, calls, usage


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("open_mark", [False, True])
def test_a_thought_is_told_apart_and_counted(open_mark: bool, special: bool) -> None:
    said = f"{'' if open_mark else '<think>'}\n{THOUGHT}\n</think>\n\nSeven."
    with served(said, open_mark=open_mark, special=special) as server:
        answer = message(server)
        assert (answer["reasoning_content"], answer["content"]) == (THOUGHT, "Seven.")
        count = len(server.rule.tokenizer.encode(THOUGHT))  # type: ignore[attr-defined]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
        assert answer["usage"]["completion_tokens"] > count
        thought, content, _, usage = streamed(server)
        assert (thought, content) == (THOUGHT, "Seven.")
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
        # The official client hands it on.
        with client(server) as sdk:
            chat_message = sdk.chat.completions.create(**user()).choices[0].message
            assert chat_message.reasoning_content == THOUGHT  # type: ignore[attr-defined]


@pytest.mark.parametrize("special", [False, True])
def test_a_channel_of_analysis_is_a_thought(special: bool) -> None:
    options = {"special": special, "template": CHANNELS, "marks": CHANNEL_MARKS}
    with served(f"{ANALYSIS}Seven.", **options) as server:
        answer = message(server)
        assert (answer["reasoning_content"], answer["content"]) == (THOUGHT, "Seven.")
        assert streamed(server)[:2] == (THOUGHT, "Seven.")
    with served(f"{FINAL}Seven.", **options) as server:
        answer = message(server)
        assert (answer.get("reasoning_content"), answer["content"]) == (None, "Seven.")
    for said, thought in ((ANALYSIS, THOUGHT), (FINAL, None)):
        with served(f'{said}{{"a": 7}}', **options) as server:
            answer = message(server, response_format={"type": "json_object"})
            assert json.loads(answer["content"]) == {"a": 7}
            assert answer.get("reasoning_content") == thought
    with served(f"{ANALYSIS}Seven.", **options) as server:
        answer = message(server, reasoning_budget_tokens=4, max_tokens=40)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 4
        assert THOUGHT.startswith(answer["reasoning_content"])


def test_a_cut_thought_is_no_answer() -> None:
    with served(f"<think>\n{THOUGHT}\n</think>\n\nSeven.", open_mark=False) as server:
        answer = message(server, max_tokens=6)
        assert answer["content"] == ""
        assert THOUGHT.startswith(answer["reasoning_content"])
        assert answer["reasoning_content"]


def test_what_is_told_of_a_thought() -> None:
    said = f"<think>\n{THOUGHT}\n</think>\n\nSeven."
    with served(said, open_mark=False) as server:
        raw = message(server, reasoning_format="none")
        assert (raw["content"], raw.get("reasoning_content")) == (said, None)
        hidden = message(server, include_reasoning=False)
        assert (hidden["content"], hidden.get("reasoning_content")) == ("Seven.", None)
        assert streamed(server, include_reasoning=False)[:2] == ("", "Seven.")


def test_thinking_is_switched_by_the_template() -> None:
    with served(f"{THOUGHT}</think>Seven.", open_mark=True) as server:

        def prompt(**more: Any) -> str:
            return ask(server, "/apply-template", user(**more)).json["prompt"].partition(GO)[2]

        assert prompt() == prompt(reasoning_effort="low") == "<think>\n"
        off = "<think>\n\n</think>\n\n"
        assert prompt(reasoning_effort="none") == off
        assert prompt(chat_template_kwargs={"enable_thinking": False}) == off
        # The template's own variable decides before the general word.
        both = {"enable_thinking": True}
        assert prompt(reasoning_effort="none", chat_template_kwargs=both) == "<think>\n"
        whole = ask(server, "/apply-template", user(chat_template_kwargs={"mood": "<think>"}))
        assert whole.json["prompt"].startswith("<think>user")
        # Switched off, what comes is the answer.
        answer = message(server, reasoning_effort="none")
        assert answer["content"].endswith("</think>Seven.")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_earlier_thoughts_are_the_templates_to_keep() -> None:
    with served("Seven.", open_mark=False) as server:
        thoughtful = {"role": "assistant", "content": "A", "reasoning_content": "B"}
        other = {"role": "assistant", "content": "C", "reasoning": "D"}
        body = user() | {"messages": [thoughtful, other], "add_generation_prompt": False}
        prompt = ask(server, "/apply-template", body).json["prompt"]
        assert prompt == "assistant: A\nassistant: (D) C"


@pytest.mark.parametrize("open_mark", [False, True])
def test_calls_come_after_a_thought(open_mark: bool) -> None:
    said = f"{'' if open_mark else '<think>'}Call <tool_call>?\n</think>\n\nNow.\n{CALL}"
    with served(said, open_mark=open_mark) as server:
        answer = message(server, tools=[WEATHER])
        assert answer["reasoning_content"] == "Call <tool_call>?"
        assert answer["content"] == "Now."
        assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"q": 1}'}
        thought, content, calls, _ = streamed(server, tools=[WEATHER])
        assert (thought, content, len(calls)) == ("Call <tool_call>?", "Now.", 1)


CALLING = CHANNELS.replace("<|channel|>analysis", "<|channel|>analysis {{ tools }} <|call|>")
HARMONY_CALL = (
    'to=functions.weather <|constrain|>json<|message|>{"q": 1}<|call|>',
    'to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"q": 1}<|call|>',
)


@pytest.mark.sampled
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("before", [True, False])
def test_a_call_may_be_a_message_of_its_own_behind_a_thought(special: bool, before: bool) -> None:
    """As gpt-oss writes it, the recipient before the channel or in it; its end may end the text."""
    call = f" {HARMONY_CALL[1]}" if before else f"<|channel|>commentary {HARMONY_CALL[0]}"
    marks = (*CHANNEL_MARKS, "<|constrain|>", "<|call|>")
    thought = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for said, content, thinks in (
        (f"{thought}{call}", None, THOUGHT),
        (f"{thought}{preamble}{call.removesuffix('<|call|>')}", "I look.", THOUGHT),
        (call, None, None),
        (f"{thought}{FINAL}It rains.", "It rains.", THOUGHT),
    ):
        options = {"special": special, "template": CALLING, "marks": marks}
        with served(said, **options) as server:  # type: ignore[arg-type]
            answer = message(server, tools=[WEATHER], max_tokens=200)
            assert (answer.get("reasoning_content"), answer["content"] or None) == (thinks, content)
            functions = [call["function"] for call in answer.get("tool_calls", [])]
            assert functions == [{"name": "weather", "arguments": '{"q": 1}'}] * (FINAL not in said)
            reasoning, text, calls, _ = streamed(server, tools=[WEATHER], max_tokens=200)
            assert (reasoning or None, text or None) == (thinks, content)
            assert len(calls) == len(functions)


SCHEMA = {"type": "object", "properties": {"q": {"const": 1}}, "required": ["q"]}
FORECAST = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
HEADER = ' to=functions.weather<|channel|>commentary json<|message|>{"q": 1}<|call|>'
SAID = f"<|channel|>commentary {HARMONY_CALL[0]}"
ASIDE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
STRING = {"response_format": {"type": "json_object", "schema": {"type": "string"}}}


def thinking_first(tokenizer: Tokenizer, said: str) -> Callable[[Sequence[int]], int]:
    """A model that thinks, as long as it may, and then says `said`."""
    go = tokenizer.token_id(GO)
    first, end, then = (
        tokenizer.encode(text, special=True)
        for text in (f"<|channel|>analysis<|message|>{THOUGHT}", "<|end|><|start|>assistant", said)
    )

    def rule(tokens: Sequence[int]) -> int:
        mine = list(tokens)[len(tokens) - list(tokens[::-1]).index(go) :]
        place = mine.index(end[0]) if end[0] in mine else len(mine)
        script = [*mine[:place], *end, *then, 0] if place < len(mine) else [*first, *end]
        return script[min(len(mine), len(script) - 1)]

    return rule


@pytest.mark.sampled
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("budget", [-1, 4])
@pytest.mark.parametrize(
    ("said", "more"),
    [
        (SAID, {}),
        (f" {HARMONY_CALL[1]}", {}),
        (f"{ASIDE}{SAID}", {}),
        (f"{FINAL}It rains.", {}),
        (SAID, {"tool_choice": "required"}),
        (HEADER, {"tool_choice": "required"}),
        (SAID, STRING),
        (HEADER, STRING),
        (f'{FINAL}"It rains."', STRING),
    ],
)
def test_a_call_comes_behind_a_thought_that_a_budget_cuts(
    special: bool, budget: int, said: str, more: dict[str, Any]
) -> None:
    marks = (*CHANNEL_MARKS, "<|constrain|>", "<|call|>")
    with served(said, special=special, template=CALLING, marks=marks) as server:
        rule = server.rule  # type: ignore[attr-defined]
        rule.backend.rule = thinking_first(rule.tokenizer, said)
        answer = message(server, tools=[FORECAST], reasoning_budget_tokens=budget, **more)
        encode, decode = rule.tokenizer.encode, rule.tokenizer.decode
        kept = decode(encode(THOUGHT)[:4]) if budget == 4 else THOUGHT
        content = "I look." if said.startswith(ASIDE) else said.partition(FINAL)[2]
        calls = [{"name": "weather", "arguments": '{"q": 1}'}] * (FINAL not in said)
        assert answer["reasoning_content"] == kept.strip()
        assert (answer["content"] or "") == content
        assert [call["function"] for call in answer.get("tool_calls", [])] == calls


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("open_mark", [False, True])
def test_a_budget_ends_a_thought(open_mark: bool, special: bool) -> None:
    said = f"{'' if open_mark else '<think>'}{THOUGHT}</think>Seven."
    with served(said, open_mark=open_mark, special=special) as server:
        assert message(server, reasoning_budget_tokens=500)["reasoning_content"] == THOUGHT
        answer = message(server, reasoning_budget_tokens=4, max_tokens=40)
        tokens = server.rule.tokenizer.encode(THOUGHT)  # type: ignore[attr-defined]
        kept = server.rule.tokenizer.decode(tokens[:4])  # type: ignore[attr-defined]
        assert answer["reasoning_content"] == kept.strip()
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 4
        # Without a thought the budget asks nothing of the answer.
        off = message(server, reasoning_budget_tokens=4, reasoning_effort="none", max_tokens=40)
        assert "reasoning_content" not in off


@pytest.mark.parametrize("open_mark", [False, True])
def test_an_answers_form_begins_after_the_thought(open_mark: bool) -> None:
    said = f'{"" if open_mark else "<think>"}{THOUGHT}\n</think>\n\n{{"a": 7}}'
    with served(said, open_mark=open_mark) as server:
        answer = message(server, response_format={"type": "json_object"})
        assert (answer["reasoning_content"], json.loads(answer["content"])) == (THOUGHT, {"a": 7})
        answer = message(server, response_format={"type": "json_object"}, tools=[WEATHER])
        assert (answer["reasoning_content"], json.loads(answer["content"])) == (THOUGHT, {"a": 7})
        grammar = 'root ::= thought\nthought ::= "{" behind "}"\nbehind ::= [^}]*'
        assert json.loads(message(server, grammar=grammar)["content"]) == {"a": 7}
        answer = message(server, regex="[0-9]{2}", reasoning_budget_tokens=3)
        assert answer["content"].isdigit()
        assert answer["reasoning_content"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("reasoning_effort", "huge", "none, minimal, low"),
        ("reasoning_effort", 3, "a string"),
        ("reasoning_format", "xml", "auto, deepseek, none"),
        ("reasoning_budget_tokens", "x", "a whole number"),
        ("chat_template_kwargs", [1], "an object"),
        ("chat_template_kwargs.messages", None, "it is ours"),
        ("chat_template_kwargs", {str(n): n for n in range(33)}, "at most 32"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(field: str, value: Any, said: str) -> None:
    with served("Seven.", open_mark=False) as server:
        name, _, inner = field.partition(".")
        reply = ask(server, CHAT, user(**{name: {inner: "x"} if inner else value}))
        assert (reply.status, reply.json["error"]["param"]) == (400, field)
        assert said in reply.json["error"]["message"]


def test_results_go_where_the_template_looks_for_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    call_turn = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    results = [{"role": "tool", "name": "f", "content": text} for text in ('{"b": 2}', "sunny")]
    rest = [{"role": "user", "content": "so?"}, {"role": "tool", "name": "", "content": "lost"}]
    messages = [call_turn, *results, *rest]
    merged = attach_results(messages, "{{ message.tool_responses }}")
    responses = [{"name": "f", "response": {"b": 2}}, {"name": "f", "response": "sunny"}]
    assert merged == [{**call_turn, "tool_responses": responses}, *rest]
    for template in (None, "{{ messages }}", "{{ tool_responses }}{% if role == 'tool' %}"):
        assert attach_results(messages, template) == messages
