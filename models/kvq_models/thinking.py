"""Separates what a model thinks from its answer while the text comes.

A model that thinks puts a thought between two marks before its answer. Its chat template tells
which marks these are, and which variable switches its thinking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvq_models.marks import TextUpToMark, in_pieces

if TYPE_CHECKING:
    from kvq_models.tokenizer import Tokenizer

_TOKEN = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingForm:
    """Describes one form: a thought stands between `opening` and `closing`.

    Args:
        known_by: Text in the templates of models that use this form.
        opening: The mark before a thought.
        closing: The mark after a thought.
        plain: The mark before an answer without a thought, with which the closing mark ends.
        breaks: Whether lines end after the opening mark and around the closing mark.
        turns: Other marks that end a thought, before a call or other text, each with the part of it
            that stays.
    """

    known_by: str
    opening: str
    closing: str
    plain: str = ""
    breaks: bool = True
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Returns the parts of the marks that may be control tokens of a vocabulary."""
        return tuple(dict.fromkeys(_TOKEN.findall(self.opening + self.closing)))

    @property
    def end(self) -> str:
        """Returns the mark after a thought, whatever follows."""
        return self.closing.removesuffix(self.plain)

    @property
    def starts(self) -> tuple[tuple[str, bool], ...]:
        """Returns other beginnings of an answer than `plain`, and whether each begins a call."""
        return tuple((mark.removeprefix(self.end), kept != "") for mark, kept in self.turns)


FORMS = (
    # Gemma 4
    ThinkingForm(known_by="<|channel>", opening="<|channel>thought", closing="<channel|>"),
    # gpt-oss
    ThinkingForm(known_by="<|channel|>analysis", opening="<|channel|>analysis<|message|>",
        closing="<|end|><|start|>assistant<|channel|>final<|message|>",
        plain="<|channel|>final<|message|>", breaks=False,
        turns=(
            ("<|end|><|start|>assistant<|channel|>commentary<|message|>", ""),
            ("<|end|><|start|>assistant<|channel|>commentary to=functions.",
                "<|channel|>commentary to=functions."),
            ("<|end|><|start|>assistant to=functions.", " to=functions."),
        )),
    # Ministral 3 Reasoning, Magistral
    ThinkingForm(known_by="[THINK]", opening="[THINK]", closing="[/THINK]", breaks=False),
    # Qwen 3 and 3.5, SmolLM 3, LFM 2.5, DeepSeek R1
    ThinkingForm(known_by="</think>", opening="<think>", closing="</think>"),
)  # fmt: skip
# The form in which messages are stored, whichever model wrote them.
KEPT = FORMS[-1]

# Names that templates use for the thought of an earlier message.
THOUGHT_NAMES = ("reasoning_content", "thinking")
# Variables of templates that switch thinking, the most frequent first.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
# No mark has more tokens than these at the end of a prompt.
_TAIL_TOKENS = 32
# A thought is recognised by this many of its last characters.
_TAIL_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Thought:
    """Holds a piece of a thought; a plain string is a piece of the answer."""

    text: str


Piece = str | Thought


class ThinkingReader:
    """Separates the thought at the beginning of an answer from the answer, piece by piece.

    With `begun` the prompt has the opening mark already. No piece has a part of a mark. Spaces
    around the thought, and blank lines before the answer, are dropped. A text that does not begin
    with a thought is the answer as it is.
    """

    def __init__(self, form: ThinkingForm, *, begun: bool = False) -> None:
        self._form = form
        self._begun = begun
        # The state: it takes text, adds pieces, and returns the rest for the next state.
        self._read: Callable[[str, list[Piece]], str] = self._opening
        # White space whose place is not decided yet, and a possible opening mark after it.
        self._spaces: list[str] = []
        self._start = ""
        self._ends = dict(form.turns) | {form.closing: ""}
        self._thought = TextUpToMark(self._ends)
        self._has_thought = False

    @property
    def thinking(self) -> bool:
        """Returns whether the next text belongs to a thought, as far as this is known."""
        return self._read == self._inside or (self._begun and self._read == self._opening)

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes; the rest is held back until more has come."""
        pieces: list[Piece] = []
        for piece in in_pieces(text):
            rest = piece
            while rest:
                rest = self._read(rest, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """Returns the pieces that were held back, at the end of the text."""
        if self._read == self._gap:
            return []
        text = "".join([*self._spaces, self._start])
        self._spaces, self._start = [], ""
        if self._read == self._inside:
            text = self._thought.flush() if self._has_thought else self._thought.flush().lstrip()
        if not text:
            return []
        return [Thought(text)] if self.thinking else [text]

    def _opening(self, text: str, pieces: list[Piece]) -> str:
        if not self._start:
            start = text.lstrip()
            self._spaces.append(text[: len(text) - len(start)])
            text = start
        self._start += text
        marks: dict[str, Callable[[str, list[Piece]], str]] = {self._form.opening: self._inside}
        if self._form.plain:
            marks[self._form.plain] = self._answer
        mark = next(filter(self._start.startswith, marks), None)
        if mark is None and any(mark.startswith(self._start) for mark in marks):
            return ""
        rest = "".join([*self._spaces, self._start]) if mark is None else self._start[len(mark) :]
        self._spaces, self._start = [], ""
        begun = self._inside if self._begun else self._answer
        self._read = begun if mark is None else marks[mark]
        return rest

    def _inside(self, text: str, pieces: list[Piece]) -> str:
        thought, mark, rest = self._thought.feed(text)
        if thought:
            pieces.append(Thought(thought if self._has_thought else thought.lstrip()))
            self._has_thought = True
        if not mark:
            return ""
        self._read = self._gap
        return self._ends[mark] + rest

    def _gap(self, text: str, pieces: list[Piece]) -> str:
        answer = text.lstrip()
        space = text[: len(text) - len(answer)]
        if "\n" in space:
            self._spaces = []
        self._spaces.append(space[space.rfind("\n") + 1 :])
        if not answer:
            return ""
        self._read, spaces = self._answer, "".join(self._spaces)
        self._spaces = []
        return spaces + answer

    def _answer(self, text: str, pieces: list[Piece]) -> str:
        pieces.append(text)
        return ""


class ThinkingWriter:
    """Writes pieces as one text in the stored form, from which `split` reads them again."""

    def __init__(self) -> None:
        self._opened = self._closed = False

    def text(self, pieces: Sequence[Piece]) -> str:
        """Returns the text that `pieces` add."""
        return "".join(map(self._write, pieces))

    def _write(self, piece: Piece) -> str:
        if isinstance(piece, Thought):
            opened, self._opened = self._opened, True
            return piece.text if opened else f"{KEPT.opening}\n{piece.text}"
        closed, self._closed = self._closed, True
        return piece if closed or not self._opened else f"\n{KEPT.closing}\n\n{piece}"


def split(text: str) -> tuple[str, str]:
    """Returns the thought and the answer of a stored text."""
    reader = ThinkingReader(KEPT)
    pieces = [*reader.feed(text), *reader.flush()]
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        "".join(piece for piece in pieces if isinstance(piece, str)),
    )


def assistant_message(thought: str, answer: str) -> dict[str, str]:
    """Returns an assistant's message for templates, with the thought under each name they know."""
    if not thought:
        return {"content": answer}
    return {"content": answer, **dict.fromkeys(THOUGHT_NAMES, thought)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """Describes how one model thinks: the form, and the template variables that control it.

    `switch` turns it on and off, and `effort` sets how much; None: the template has no such
    variable.
    """

    form: ThinkingForm
    tokenizer: Tokenizer
    switch: str | None
    effort: str | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Thinking | None:
        """Returns how the model with this tokenizer thinks, or None if it has no known form."""
        template = tokenizer.chat_template or ""
        form = next((form for form in FORMS if form.known_by in template), None)
        if form is None:
            return None
        known = tokenizer.template_variables
        return cls(
            form=form,
            tokenizer=tokenizer,
            switch=next((name for name in _SWITCHES if name in known), None),
            effort=_EFFORT if _EFFORT in known else None,
        )

    @property
    def shown(self) -> frozenset[int]:
        """Returns the control tokens in the marks, which have to be shown as text."""
        ids = map(self.tokenizer.token_id, self.form.tokens)
        return frozenset(
            token for token in ids if token is not None and self.tokenizer.is_control(token)
        )

    def variables(self, *, on: bool | None = None) -> dict[str, Any]:
        """Returns the template variables for thinking `on` or off; none without a switch."""
        return {} if on is None or self.switch is None else {self.switch: on}

    def begun(self, prompt: Sequence[int], thought: str = "") -> bool:
        """Returns whether the prompt ends with the opening mark, or with a begun `thought`."""
        tail = self.tokenizer.decode(prompt[-_TAIL_TOKENS:], special=True).rstrip()
        end = thought.rstrip()[-_TAIL_CHARACTERS:]
        return tail.endswith(self.form.opening) or (end != "" and tail.endswith(end))

    def ids(self, thought: str, answer: str, *, begun: bool) -> list[int]:
        """Returns the tokens of a reply, after a prompt that has `begun` the thought or not."""
        encode = self.tokenizer.encode
        form, line = self.form, "\n" * self.form.breaks
        if not thought and not begun:
            return [*encode(form.plain, special=True), *encode(answer)]
        ids = [] if begun else encode(f"{form.opening}{line}", special=True)
        ids += encode(thought)
        closing = encode(f"{line}{form.closing}{2 * line}", special=True)
        return [*ids, *closing, *encode(answer)] if answer else ids

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of a reply's tokens, with its marks."""
        from kvq_models.tokenizer import IncrementalDetokenizer

        detokenizer = IncrementalDetokenizer(self.tokenizer)
        detokenizer.show(self.shown)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def reader(self, prompt: Sequence[int]) -> ThinkingReader:
        """Returns a reader for an answer to `prompt`."""
        return ThinkingReader(self.form, begun=self.begun(prompt))
