"""What a request says of the model's thinking, and the form an answer that begins with it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import UsageError
from kvq_apps.serve.fields import Fields
from kvq_models.thinking import Thinking, ThinkingReader
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.constraint import Constraint, escaped

# OpenAI's words, and those of templates that know more of them.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = ("auto", "deepseek", "none")
# What a chat template is given by us, or by fields of their own.
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_MOST_VARIABLES = 32
_MOST_TOKENS = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinks:
    """How answers to a request think: `begun` says that the prompt opened the thought.

    It has at most `budget` tokens, None: any. `told`: the client is told of it.
    """

    thinking: Thinking
    begun: bool
    budget: int | None
    told: bool

    def reader(self) -> ThinkingReader:
        """Reads one answer."""
        return ThinkingReader(self.thinking.form, begun=self.begun)

    def constraint(self, answer: Constraint | None, shown: Sequence[int]) -> Constraint | None:
        """The form of a thought and then an `answer`, None: any text and the tokens `shown`.

        None where nothing is asked. Raises `UsageError` for a budget that cannot be kept.
        """
        if answer is None and self.budget is None:
            return None
        closing = self.thinking.tokenizer.token_id(self.thinking.form.closing)
        if closing is None and self.budget is not None:
            raise UsageError(
                "this model's mark after a thought is no token of its own, so its thinking cannot "
                "be held to reasoning_budget_tokens; leave that out"
            )
        thought, opening = f"thought close /[ \\n]*/ answer\n{self._thought(closing)}", ""
        if not self.begun:
            thought, opening = f"(open {thought.replace(' answer', ')? answer', 1)}", self._open()
        return Constraint(f"start: {thought}{opening}{self._answer(answer, shown)}")

    def _thought(self, closing: int | None) -> str:
        """Rules of a thought and of the mark after it."""
        mark = escaped(self.thinking.form.closing).strip("/")
        if closing is None:
            return f'thought[lazy]: /(?s:.*){mark}/\nclose: ""\n'
        limit = "" if self.budget is None else f"[max_tokens={self.budget}]"
        rest = f"/(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/"
        return f"thought{limit}: THOUGHT\nTHOUGHT: {rest}\nclose: <[{closing}]>\n"

    def _open(self) -> str:
        """The rule of the mark before a thought: a control token by its id, then its text."""
        tokenizer, mark = self.thinking.tokenizer, self.thinking.form.opening
        first = self.thinking.form.tokens[0]
        token = tokenizer.token_id(first)
        if token is None:
            return f"open: {escaped(mark)}\n"
        rest = mark.removeprefix(first)
        return f"open: <[{token}]>{f' {escaped(rest)}' if rest else ''}\n"

    def _answer(self, answer: Constraint | None, shown: Sequence[int]) -> str:
        if answer is not None:
            return answer.lark.replace("start:", "answer:", 1)
        tokens = "".join(f" | <[{token}]>" for token in shown)
        opening = escaped(self.thinking.form.opening).strip("/")
        return f"answer: (TEXT{tokens})*\nTEXT: /(?s:.+)/ & ~/[ \\n]*{opening}(?s:.*)/\n"


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
