"""Reads the fields of a request about the model's thinking."""

from collections.abc import Sequence
from typing import Any

from kvq_apps.serve.fields import Fields
from kvq_apps.thinking import AnswerThoughts
from kvq_models.thinking import Thinking

# OpenAI's efforts, and some that only templates know.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = ("auto", "deepseek", "none")
# The server sets these variables itself, or other fields do.
_RESERVED_VARIABLES = (
    *("messages", "tools", "bos_token", "eos_token"),
    *("add_generation_prompt", "continue_final_message"),
)
_MOST_VARIABLES = 32
_MOST_TOKENS = 1 << 31


def answer_thoughts(
    fields: Fields, thinking: Thinking | None, continued: Fields | None, prompt: Sequence[int]
) -> AnswerThoughts | None:
    """Returns how answers to `prompt` think; None if they do not, or think as a part of the text.

    An answer that goes on with the text of a `continued` message has no thought.
    """
    budget = fields.whole("reasoning_budget_tokens", -1, _MOST_TOKENS, -1)
    reasoning_format = fields.choice("reasoning_format", FORMATS, "auto")
    visible = fields.flag("include_reasoning", True)
    if thinking is None or reasoning_format == "none":
        return None
    thought = ""
    if continued is not None and not continued.get("content"):
        thought = continued.text("reasoning_content") or continued.text("reasoning")
    begun = thinking.begun(prompt, thought)
    if continued is not None and not begun:
        return None
    return AnswerThoughts(
        thinking=thinking,
        begun=begun,
        budget=None if budget < 0 else budget,
        visible=visible,
    )


def template_variables(fields: Fields, thinking: Thinking | None) -> dict[str, Any]:
    """Returns the request's variables for the chat template, and those for how much to think.

    Templates that know `reasoning_effort` get it. In those that only know a switch, `none` switches
    thinking off and other efforts switch it on.
    """
    template_fields = fields.object("chat_template_kwargs")
    chosen = template_fields.values
    if len(chosen) > _MOST_VARIABLES:
        fields.refuse("chat_template_kwargs", f"at most {_MOST_VARIABLES} variables")
    for name in chosen:
        if name in _RESERVED_VARIABLES:
            template_fields.refuse_with(
                name, f"chat_template_kwargs.{name} is not possible: it is ours"
            )
    effort = fields.choice("reasoning_effort", EFFORTS)
    variables: dict[str, Any] = {}
    if thinking is None:
        fields.ignore("reasoning_effort")
    elif effort:
        variables = thinking.variables(on=effort != "none")
        variables |= {} if thinking.effort is None else {thinking.effort: effort}
    return {**variables, **chosen}
