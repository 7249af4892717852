"""How models write what they think, and how that is told from the answer while it comes.

A model that thinks puts a thought between two marks before its answer. Which marks these are, and
by which variable its thinking is switched, its chat template says. Knows text, no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingForm:
    """One form: a thought stands between `opening` and `closing`.

    `known_by` stands in the templates of models that write it. `tokens` are the parts of the marks
    that a vocabulary may have as control tokens. Before an answer without a thought stands `plain`,
    with which the closing mark ends. With `breaks` lines end behind the opening and around the
    closing mark. `turns` are other marks that end a thought, before a call or what is said beside
    it, each with what of it stays.
    """

    known_by: str
    opening: str
    closing: str
    tokens: tuple[str, ...]
    plain: str = ""
    breaks: bool = True
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def end(self) -> str:
        """What stands behind a thought, whatever follows."""
        return self.closing.removesuffix(self.plain)

    @property
    def starts(self) -> tuple[tuple[str, bool], ...]:
        """What else than `plain` an answer may begin with, and whether that begins a call."""
        return tuple((mark.removeprefix(self.end), kept != "") for mark, kept in self.turns)


FORMS = (
    # Gemma 4
    ThinkingForm(
        known_by="<|channel>",
        opening="<|channel>thought",
        closing="<channel|>",
        tokens=("<|channel>", "<channel|>"),
    ),
    # gpt-oss
    ThinkingForm(
        known_by="<|channel|>analysis",
        opening="<|channel|>analysis<|message|>",
        closing="<|end|><|start|>assistant<|channel|>final<|message|>",
        tokens=("<|channel|>", "<|message|>", "<|end|>", "<|start|>"),
        plain="<|channel|>final<|message|>",
        breaks=False,
        turns=(
            ("<|end|><|start|>assistant<|channel|>commentary<|message|>", ""),
            *(
                (f"<|end|><|start|>assistant{call}", call)
                for call in ("<|channel|>commentary to=functions.", " to=functions.")
            ),
        ),
    ),
    # Ministral 3 Reasoning, Magistral
    ThinkingForm(
        known_by="[THINK]",
        opening="[THINK]",
        closing="[/THINK]",
        tokens=("[THINK]", "[/THINK]"),
        breaks=False,
    ),
    # Qwen 3 and 3.5, SmolLM 3, LFM 2.5, DeepSeek R1
    ThinkingForm(
        known_by="</think>",
        opening="<think>",
        closing="</think>",
        tokens=("<think>", "</think>"),
    ),
)
# What is kept of a message, whichever model wrote it.
KEPT = FORMS[-1]

# Variables of templates that switch thinking, by how many of them know each.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
# Of a prompt that is one of the marks the end has at most so many tokens.
_TAIL_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks; a plain string is a piece of its answer."""

    text: str


Piece = str | Thought


class ThinkingReader:
    """Tells the thought at an answer's beginning from the answer, piece by piece.

    `begun`: the prompt has the opening mark already. No piece has a part of a mark; spaces around
    the thought, and the blank lines before the answer, are nobody's. A text that does not begin
    with a thought is the answer as it stands.
    """

    def __init__(self, form: ThinkingForm, *, begun: bool = False) -> None:
        self._form = form
        self._begun = begun
        self._read: Callable[[list[Piece]], bool] = self._opening
        self._held: str = ""
        self._told = False

    @property
    def thinking(self) -> bool:
        """Whether what comes next belongs to a thought, as far as that is known."""
        return self._read == self._inside or (self._begun and self._read == self._opening)

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds; some of it may be held back until it is plain what it is."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._read(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        if self._read == self._gap or not held:
            return []
        return [Thought(held)] if self.thinking else [held]

    def _opening(self, pieces: list[Piece]) -> bool:
        text = self._held.lstrip()
        marks: dict[str, Callable[[list[Piece]], bool]] = {self._form.opening: self._inside}
        if self._form.plain:
            marks[self._form.plain] = self._answer
        found = next((mark for mark in marks if text.startswith(mark)), None)
        if found is not None:
            self._held, self._read = text[len(found) :], marks[found]
        elif any(mark.startswith(text) for mark in marks):
            return False
        else:
            self._read = self._inside if self._begun else self._answer
        return True

    def _inside(self, pieces: list[Piece]) -> bool:
        marks = {self._form.closing: ""} | dict(self._form.turns)
        text = self._held if self._told else self._held.lstrip()
        found = min(((text.find(mark), mark) for mark in marks if mark in text), default=None)
        if found is not None:
            place, mark = found
            thought = text[:place].rstrip()
            self._held, self._read = marks[mark] + text[place + len(mark) :], self._gap
        else:
            longest = min(len(text), max(map(len, marks)) - 1)
            ends = (n for n in range(longest, 0, -1) if _begins(marks, text[-n:]))
            thought = text[: len(text) - next(ends, 0)].rstrip()
            self._held = text[len(thought) :]
        if thought:
            self._told = True
            pieces.append(Thought(thought))
        return found is not None

    def _gap(self, pieces: list[Piece]) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        space = self._held[: len(self._held) - len(text)]
        self._held, self._read = space[space.rfind("\n") + 1 :] + text, self._answer
        return True

    def _answer(self, pieces: list[Piece]) -> bool:
        pieces.append(self._held)
        self._held = ""
        return False


def _begins(marks: Iterable[str], text: str) -> bool:
    """Whether one of `marks` begins with `text`."""
    return any(mark.startswith(text) for mark in marks)


class ThinkingWriter:
    """Writes pieces as one text in the form that is kept, from which `split` has them again."""

    def __init__(self) -> None:
        self._opened = self._closed = False

    def text(self, pieces: Sequence[Piece]) -> str:
        """What `pieces` add to the text."""
        return "".join(map(self._one, pieces))

    def _one(self, piece: Piece) -> str:
        if isinstance(piece, Thought):
            opened, self._opened = self._opened, True
            return piece.text if opened else f"{KEPT.opening}\n{piece.text}"
        closed, self._closed = self._closed, True
        return piece if closed or not self._opened else f"\n{KEPT.closing}\n\n{piece}"


def split(text: str) -> tuple[str, str]:
    """The thought and the answer of a text that is kept."""
    reader = ThinkingReader(KEPT)
    pieces = [*reader.feed(text), *reader.flush()]
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        "".join(piece for piece in pieces if isinstance(piece, str)),
    )


def said(thought: str, answer: str) -> dict[str, str]:
    """An assistant's message as templates take it, the thought under each name they know it by."""
    if not thought:
        return {"content": answer}
    return {"content": answer, **dict.fromkeys(("reasoning_content", "thinking"), thought)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """How one model thinks: the form, and the variables of its template that steer it.

    `switch` turns it on and off, `effort` says how much; None: the template knows none.
    """

    form: ThinkingForm
    tokenizer: Tokenizer
    switch: str | None
    effort: str | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Thinking | None:
        """That of the model with this tokenizer; None: it does not think, or in no known form."""
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
        """The control tokens that the marks have, which are to be text."""
        ids = map(self.tokenizer.token_id, self.form.tokens)
        return frozenset(one for one in ids if one is not None and self.tokenizer.is_control(one))

    def variables(self, *, on: bool | None = None) -> dict[str, Any]:
        """What the template is given for thinking `on` or off; None, or no switch: nothing."""
        return {} if on is None or self.switch is None else {self.switch: on}

    def begun(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with the opening mark."""
        tail = self.tokenizer.decode(prompt[-_TAIL_TOKENS:], special=True)
        return tail.rstrip().endswith(self.form.opening)

    def ids(self, thought: str, answer: str, *, begun: bool) -> list[int]:
        """Tokens of a reply as the model writes it, after a prompt that has `begun` the thought."""
        encode = self.tokenizer.encode
        form, line = self.form, "\n" * self.form.breaks
        if not thought and not begun:
            return [*encode(form.plain, special=True), *encode(answer)]
        ids = [] if begun else encode(f"{form.opening}{line}", special=True)
        ids += encode(thought)
        closing = encode(f"{line}{form.closing}{2 * line}", special=True)
        return [*ids, *closing, *encode(answer)] if answer else ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of a reply's tokens, its marks included."""
        from kvq_models.tokenizer import IncrementalDetokenizer

        detokenizer = IncrementalDetokenizer(self.tokenizer)
        detokenizer.show(self.shown)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def reader(self, prompt: Sequence[int]) -> ThinkingReader:
        """Reads an answer to `prompt`."""
        return ThinkingReader(self.form, begun=self.begun(prompt))
