"""What a request says of the model's thinking."""

from collections.abc import Sequence
from typing import Any

from kvq_apps.serve.fields import Fields
from kvq_apps.thinking import Thinks
from kvq_models.thinking import Thinking
from kvq_models.tokenizer import Tokenizer

# OpenAI's words, and those of templates that know more of them.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = ("auto", "deepseek", "none")
# What a chat template is given by us, or by fields of their own.
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_MOST_VARIABLES = 32
_MOST_TOKENS = 1 << 31


def thinks_of(fields: Fields, tokenizer: Tokenizer, prompt: Sequence[int]) -> Thinks | None:
    """How answers to `prompt` think; None: they do not, or their thought is text of the answer."""
    budget = fields.whole("reasoning_budget_tokens", -1, _MOST_TOKENS, -1)
    wanted, told = fields.text("reasoning_format", "auto"), fields.flag("include_reasoning", True)
    if wanted not in FORMATS:
        fields.refuse("reasoning_format", f"one of {', '.join(FORMATS)}")
    thinking = Thinking.of(tokenizer)
    if thinking is None or wanted == "none":
        return None
    return Thinks(
        thinking=thinking,
        begun=thinking.begun(prompt),
        budget=None if budget < 0 else budget,
        told=told,
    )


def template_variables(fields: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the request gives the chat template: its own variables, and how much to think.

    `reasoning_effort` goes to templates that know it; those that only know a switch are switched
    off by `none` and on by other efforts.
    """
    given = fields.object("chat_template_kwargs")
    names = given.names()
    if len(names) > _MOST_VARIABLES:
        fields.refuse("chat_template_kwargs", f"at most {_MOST_VARIABLES} variables")
    for name in names:
        if name in _OWN_VARIABLES:
            given.refuse_with(name, f"chat_template_kwargs.{name} is not possible: it is ours")
    effort = fields.text("reasoning_effort")
    if effort and effort not in EFFORTS:
        fields.refuse("reasoning_effort", f"one of {', '.join(EFFORTS)}")
    thinking = Thinking.of(tokenizer)
    found: dict[str, Any] = {}
    if effort and thinking is not None:
        found = thinking.variables(on=effort != "none")
        found |= {} if thinking.effort is None else {thinking.effort: effort}
    return found | {name: given.get(name) for name in names}
