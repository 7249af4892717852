"""Switches a model's thinking on or off, and constrains answers that follow a thought."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError, argument

if TYPE_CHECKING:
    from kvq_models.thinking import Thinking, ThinkingReader
    from kvq_runtime.answer.constraint import Constraint

# Values of `--think`: as the template does; on; off; as the template does, but not shown.
AUTO, ON, OFF, HIDE = "auto", "on", "off", "hide"
CHOICES = (AUTO, ON, OFF, HIDE)


def switched(think: str) -> bool | None:
    """Says whether thinking is switched on or off; None leaves it to the model's template."""
    return {ON: True, OFF: False}.get(think)


def variables(thinking: "Thinking | None", think: str) -> dict[str, Any]:
    """Returns the template's variables for `think`.

    Raises `UsageError` for `on` where the model cannot think.
    """
    on = switched(think)
    if thinking is None and on:
        raise UsageError(
            f"{argument('--think')} on is not possible: this model's chat template has no form of "
            "thinking that is known here; leave it out, or choose a model that thinks"
        )
    return {} if thinking is None else thinking.variables(on=on)


def request_fields(think: str) -> dict[str, Any]:
    """Returns the fields that ask a server for `think`; its template may ignore them."""
    if think == HIDE:
        return {"include_reasoning": False}
    on = switched(think)
    return {} if on is None else {"chat_template_kwargs": {"enable_thinking": on}}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerThoughts:
    """Describes the thoughts of answers to one prompt.

    `begun` says that the prompt has opened the thought already. A thought has at most `budget`
    tokens; None sets no limit. `visible` says that the client gets the thought.
    """

    thinking: "Thinking"
    begun: bool
    budget: int | None = None
    visible: bool = True

    def reader(self) -> "ThinkingReader":
        """Returns a reader of one answer."""
        from kvq_models.thinking import ThinkingReader

        return ThinkingReader(self.thinking.form, begun=self.begun)

    def said(self, answer: "Constraint | None") -> "Constraint | None":
        """Returns the constraint of an answer after the mark that some models write before it."""
        form = self.thinking.form
        if answer is None or not form.plain:
            return answer
        rules = answer.lark.replace("start:", "said:", 1)
        return replace(answer, lark=f"start: {self._spelled(form.plain)} said\n{rules}")

    def constraint(
        self, answer: "Constraint | None", shown: Collection[int] = (), *, calls: bool = False
    ) -> "Constraint | None":
        """Returns the constraint of a thought that `answer` follows.

        `answer` has its mark already (`said`). Without an `answer` any text and the tokens `shown`
        may follow, and with `calls` also tool calls. Returns None where nothing is constrained.
        Raises `UsageError` for a budget that cannot be kept.
        """
        from kvq_runtime.answer.constraint import Constraint

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
        whole = f"start: {first} behind\n{rules}"
        return Constraint(whole) if answer is None else replace(answer, lark=whole)

    def _thought(self, end: str) -> str:
        """Returns the rules of a thought and of the mark `end` after it."""
        mark = _text(self.thinking.form.end)
        if not end.startswith("<"):
            return f'thought[lazy]: /(?s:.*){mark}/\nthought_end: ""\n'
        limit = "" if self.budget is None else f"[max_tokens={self.budget}]"
        rest = f"/(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/"
        return f"thought{limit}: THOUGHT\nTHOUGHT: {rest}\nthought_end: {end}\n"

    def _spelled(self, mark: str) -> str:
        """Returns a mark as a part of a rule: control tokens by their ids, the rest as text."""
        from kvq_runtime.answer.constraint import spelled

        form, tokenizer = self.thinking.form, self.thinking.tokenizer
        tokens = {token: tokenizer.token_id(token) for token in form.tokens}
        ids = {token: token_id for token, token_id in tokens.items() if token_id is not None}
        return spelled(mark, ids)

    def _any(self, shown: Collection[int], *, calls: bool) -> str:
        """Returns the rules of an answer of any text that may contain the tokens `shown`."""
        form, thought_tokens = self.thinking.form, self.thinking.shown
        opening = _text(form.opening)
        text = f"THOUGHTLESS: /(?s:.+)/ & ~/[ \\n]*{opening}(?s:.*)/\n"
        # An answer does not contain the marks of thoughts.
        anything = f"(THOUGHTLESS{_tokens(set(shown) - thought_tokens)})*"
        if not form.plain:
            return f"behind: {anything}\n{text}"
        said = f"{self._spelled(form.plain)} {anything}"
        if not calls:
            return f"behind: {said}\n{text}"
        # A message ends with a mark of its own; after a call there is none.
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
    """Returns each of these tokens as another alternative of a rule."""
    return "".join(f" | <[{token}]>" for token in sorted(ids))


def _text(mark: str) -> str:
    """Returns a mark as a part of a pattern that matches it literally."""
    from kvq_runtime.answer.constraint import escaped

    return escaped(mark).strip("/")
