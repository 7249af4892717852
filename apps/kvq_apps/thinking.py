"""Whether a chat's model thinks before it answers, and the form of an answer behind a thought."""

import re
from collections.abc import Collection
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

    def said(self, answer: "Constraint | None") -> "Constraint | None":
        """The form of an `answer` that is said, behind the mark that some models have for it."""
        from kvq_runtime.constraint import Constraint

        form = self.thinking.form
        if answer is None or not form.plain:
            return answer
        rules = answer.lark.replace("start:", "said:", 1)
        return Constraint(f"start: {self._spelled(form.plain)} said\n{rules}")

    def constraint(
        self, answer: "Constraint | None", shown: Collection[int] = (), *, calls: bool = False
    ) -> "Constraint | None":
        """The form of a thought and then an `answer`, None: any text and the tokens `shown`.

        What is said has its mark (`said`); any text may be a call where `calls` may be made. None
        where nothing is asked. Raises `UsageError` for a budget that cannot be kept.
        """
        from kvq_runtime.constraint import Constraint

        if answer is None and self.budget is None:
            return None
        form = self.thinking.form
        end = self._spelled(form.end)
        if not end.startswith("<") and self.budget is not None:
            raise UsageError(
                "this model's mark after a thought is no token of its own, so its thinking cannot "
                "be held to reasoning_budget_tokens; leave that out"
            )
        gap = "/[ \\n]*/" if form.breaks else ""
        first = f"thought thought_end {gap}"
        rules = self._thought(end)
        if not self.begun:
            first = f"(thought_mark {first})?"
            rules += f"thought_mark: {self._spelled(form.opening)}\n"
        if answer is None:
            rules += self._any(shown, calls=calls)
        else:
            rules += answer.lark.replace("start:", "behind:", 1)
        return Constraint(f"start: {first} behind\n{rules}")

    def _thought(self, end: str) -> str:
        """Rules of a thought and of the mark after it, as it is spelled."""
        mark = _text(self.thinking.form.end)
        if not end.startswith("<"):
            return f'thought[lazy]: /(?s:.*){mark}/\nthought_end: ""\n'
        limit = "" if self.budget is None else f"[max_tokens={self.budget}]"
        rest = f"/(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/"
        return f"thought{limit}: THOUGHT\nTHOUGHT: {rest}\nthought_end: {end}\n"

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

    def _any(self, shown: Collection[int], *, calls: bool) -> str:
        """Rules of an answer of any text, in which the tokens `shown` may stand."""
        form, own = self.thinking.form, self.thinking.shown
        opening = _text(form.opening)
        text = f"THOUGHTLESS: /(?s:.+)/ & ~/[ \\n]*{opening}(?s:.*)/\n"
        # Marks of thoughts are none of what is said.
        anything = f"(THOUGHTLESS{_tokens(set(shown) - own)})*"
        if not form.plain:
            return f"behind: {anything}\n{text}"
        said = f"{self._spelled(form.plain)} {anything}"
        if not calls:
            return f"behind: {said}\n{text}"
        # A message ends with a mark of its own, and behind a call none comes.
        ends = {
            self.thinking.tokenizer.token_id(token) for token in form.tokens if token in form.end
        }
        called = f"(THOUGHTLESS{_tokens(set(shown) - ends)})*"
        call, aside = (
            " | ".join(self._spelled(mark) for mark, called in form.starts if called == which)
            for which in (True, False)
        )
        return (
            f"behind: (({aside}) THOUGHTLESS? thought_end)* ({said} | ({aside}) {anything} | "
            f"({call}) {called})\n{text}"
        )


def _tokens(ids: Collection[int]) -> str:
    """Each of these tokens as another possibility."""
    return "".join(f" | <[{token}]>" for token in sorted(ids))


def _text(mark: str) -> str:
    """A mark itself as a part of a pattern."""
    from kvq_runtime.constraint import escaped

    return escaped(mark).strip("/")
