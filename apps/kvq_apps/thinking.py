"""Whether a chat's model thinks before it answers, and the form of an answer behind a thought."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError, argument

if TYPE_CHECKING:
    from kvq_models.thinking import Thinking, ThinkingReader
    from kvq_runtime.constraint import Constraint

# What `--think` says: as the template has it; switched on or off; as the template, but not shown.
AUTO, ON, OFF, HIDE = "auto", "on", "off", "hide"
CHOICES = (AUTO, ON, OFF, HIDE)


def switched(think: str) -> bool | None:
    """Whether thinking is to be on or off; None: as the model's template has it."""
    return {ON: True, OFF: False}.get(think)


def variables(thinking: "Thinking | None", think: str) -> dict[str, Any]:
    """What the template is given. Raises `UsageError` for `on` where the model cannot think."""
    on = switched(think)
    if thinking is None and on:
        raise UsageError(
            f"{argument('--think')} on is not possible: this model's chat template has no form of "
            "thinking that is known here; leave it out, or choose a model that thinks"
        )
    return {} if thinking is None else thinking.variables(on=on)


def request_fields(think: str) -> dict[str, Any]:
    """What a server is asked for; it leaves out what its model's template does not know."""
    if think == HIDE:
        return {"include_reasoning": False}
    on = switched(think)
    return {} if on is None else {"chat_template_kwargs": {"enable_thinking": on}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinks:
    """How answers to one prompt think: `begun` says that the prompt opened the thought.

    It has at most `budget` tokens, None: any. `told`: whoever asks is told of it.
    """

    thinking: "Thinking"
    begun: bool
    budget: int | None = None
    told: bool = True

    def reader(self) -> "ThinkingReader":
        """Reads one answer."""
        from kvq_models.thinking import ThinkingReader

        return ThinkingReader(self.thinking.form, begun=self.begun)

    def constraint(self, answer: "Constraint | None", shown: Sequence[int]) -> "Constraint | None":
        """The form of a thought and then an `answer`, None: any text and the tokens `shown`.

        None where nothing is asked. Raises `UsageError` for a budget that cannot be kept.
        """
        from kvq_runtime.constraint import Constraint

        if answer is None and self.budget is None:
            return None
        form = self.thinking.form
        closing = self._spelled(form.closing)
        if not closing.startswith("<") and self.budget is not None:
            raise UsageError(
                "this model's mark after a thought is no token of its own, so its thinking cannot "
                "be held to reasoning_budget_tokens; leave that out"
            )
        thought = "thought thought_end /[ \\n]*/"
        rules = self._thought(closing)
        if self.begun:
            first = thought
        elif form.plain:
            first = f"(thought_mark {thought} | plain_mark)"
            rules += f"plain_mark: {self._spelled(form.plain)}\n"
        else:
            first = f"(thought_mark {thought})?"
        rules += "" if self.begun else f"thought_mark: {self._spelled(form.opening)}\n"
        return Constraint(f"start: {first} behind\n{rules}{self._answer(answer, shown)}")

    def _thought(self, closing: str) -> str:
        """Rules of a thought and of the mark after it, as it is spelled."""
        mark = _text(self.thinking.form.closing)
        if not closing.startswith("<"):
            return f'thought[lazy]: /(?s:.*){mark}/\nthought_end: ""\n'
        limit = "" if self.budget is None else f"[max_tokens={self.budget}]"
        rest = f"/(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/"
        return f"thought{limit}: THOUGHT\nTHOUGHT: {rest}\nthought_end: {closing}\n"

    def _spelled(self, mark: str) -> str:
        """A mark in a rule: control tokens by their ids, and what lies between as text."""
        token_id, tokens = self.thinking.tokenizer.token_id, self.thinking.form.tokens
        known = {token: token_id(token) for token in tokens}
        held = "|".join(re.escape(token) for token in tokens if known[token] is not None)
        parts = re.split(f"({held})", mark) if held else [mark]
        spelled = (
            f"<[{known[part]}]>" if known.get(part) is not None else f"/{_text(part)}/"
            for part in parts
            if part
        )
        return " ".join(spelled)

    def _answer(self, answer: "Constraint | None", shown: Sequence[int]) -> str:
        if answer is not None:
            return answer.lark.replace("start:", "behind:", 1)
        tokens = "".join(f" | <[{token}]>" for token in shown)
        opening = _text(self.thinking.form.opening)
        return (
            f"behind: (THOUGHTLESS{tokens})*\nTHOUGHTLESS: /(?s:.+)/ & ~/[ \\n]*{opening}(?s:.*)/\n"
        )


def _text(mark: str) -> str:
    """A mark itself as a part of a pattern."""
    from kvq_runtime.constraint import escaped

    return escaped(mark).strip("/")
