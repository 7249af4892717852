"""`kvq eval --task calls`: what is asked, and how answers are judged."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from chat_templates import TEMPLATES
from kvq_apps.serve.errors import RequestError
from kvq_lab.tool_calls import RIGHT, call_problems
from kvq_models.tokenizer import ControlTokens, Tokenizer
from tiny import CHATML, byte_level_tokenizer

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATES["qwen 2.5"]
TEXT = "def add(a, b):\n    return a + b\n" * 200


@dataclass
class RequestedCalls:
    """The calls of a request, read from its words."""

    calls: list[dict[str, Any]]

    @classmethod
    def of(cls, text: str) -> "RequestedCalls":
        calls = []
        for part in text.partition("without any other words: ")[2].split("Then ")[:2]:
            head, _, values = part.partition(" with ")
            rows = dict(pair.split(": ", 1) for pair in values.split("; "))
            arguments = {}
            for name, value in rows.items():
                arguments[name] = json.JSONDecoder().raw_decode(value)[0]
            calls.append({"name": head.removeprefix("call ").strip(), "arguments": arguments})
        return cls(calls)


def tokenizer_of(template: str) -> Tokenizer:
    return Tokenizer.from_json(byte_level_tokenizer().to_str(), ControlTokens(eos=(0,)), template)


def hermes(calls: list[dict[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def test_right_answers_are_right_and_others_are_told_apart() -> None:
    tokenizer = tokenizer_of(TEMPLATE)
    problems, verdicts = call_problems(tokenizer, [TEXT], limit=21, seed=1, context_tokens=1500)
    assert len(problems) == len({problem.name for problem in problems}) == 21
    begin = len("two")
    for problem in problems:
        prompt = tokenizer.decode(problem.ids)
        expected = RequestedCalls.of(prompt[prompt.rindex("Now do only this") :])
        assert len(expected.calls) == (2 if problem.name[:begin] == "two" else 1)
        assert problem.solves(hermes(expected.calls))
        assert not problem.solves("I cannot do this.")
        assert not problem.solves(hermes([expected.calls[0] | {"name": "search_web"}]))
        other = expected.calls[0] | {"arguments": expected.calls[0]["arguments"] | {"more": 1}}
        assert not problem.solves(hermes([other, *expected.calls[1:]]))
    others = {verdict: 21 for verdict in ("no call", "another tool", "other arguments")}
    assert verdicts == Counter({RIGHT: 21, **others})


def test_the_conversation_has_the_length_that_is_asked_for() -> None:
    tokenizer = tokenizer_of(TEMPLATE)
    lengths = [
        len(call_problems(tokenizer, [TEXT], limit=1, seed=1, context_tokens=tokens)[0][0].ids)
        for tokens in (1000, 2500)
    ]
    assert 1000 < lengths[1] - lengths[0] < 2000


def test_a_model_without_calls_is_refused() -> None:
    with pytest.raises(RequestError, match="no form of tool calls"):
        call_problems(tokenizer_of(CHATML), [TEXT], limit=1, seed=1, context_tokens=500)
