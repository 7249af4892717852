"""A server for tests of coding agents: its model follows a script of tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken

from chat_templates import TEMPLATES
from kvq_apps.serve.server import Server
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from serving import Rule, running
from tiny import byte_level_tokenizer

_TOOLS, _RESULT, _ANSWER = "<|tools|>", "<|result|>", "<|answer|>"
# smolagents sends results as messages of the user.
_TEMPLATE = (
    f"{{% if tools %}}{_TOOLS}{{{{ tools | tojson }}}}{{% endif %}}"
    + TEMPLATES["qwen 3"].replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message.role == 'tool' or "
        f"message.content.startswith('Observation:') %}}{_RESULT}{{% endif %}}",
        1,
    )
    + f"{{% if add_generation_prompt %}}{_ANSWER}{{% endif %}}"
)
# Agents send prompts of tens of thousands of bytes, and a token of this vocabulary has about one.
_CONTEXT_TOKENS = 1 << 19


def call(name: str, **arguments: Any) -> str:
    """A call as the model of a script writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def scripted_agent(steps: Sequence[str], plain: str = "Done.", **settings: Any) -> Iterator[Server]:
    """A server whose model says a step for each result of a tool that it has seen so far.

    To a request without tools, such as one for a title, it says `plain`.
    """
    library = byte_level_tokenizer()
    marks = (_TOOLS, _RESULT, _ANSWER)
    library.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    control = ControlTokens(eos=(0,))
    rule = Rule(context_tokens=_CONTEXT_TOKENS)
    rule.tokenizer = tokenizer = Tokenizer.from_json(library.to_str(), control, _TEMPLATE)
    tools, result, answer = (tokenizer.token_id(mark) for mark in marks)
    spoken = [[*tokenizer.encode(said), 0] for said in (plain, *steps)]

    def scripted(tokens: Sequence[int]) -> int:
        place = tokens[::-1].index(answer)
        step = 1 + tokens.count(result) if tools in tokens else 0
        said = spoken[min(step, len(steps))]
        return said[min(place, len(said) - 1)]

    rule.backend.rule = scripted
    with running(
        rule.load, **{"sessions": 2, "chunk_tokens": 4096, "saved_bytes": 0} | settings
    ) as server:
        yield server
