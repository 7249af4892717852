"""Thoughts as models write them: told from the answer by value, however the text is cut."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken

from kvq_models.control import ControlTokens
from kvq_models.thinking import (
    FORMS,
    Piece,
    Thinking,
    ThinkingForm,
    ThinkingReader,
    ThinkingWriter,
    Thought,
    said,
    split,
)
from kvq_models.tokenizer import Tokenizer
from tiny import byte_level_tokenizer

GEMMA, HARMONY, MISTRAL, QWEN = FORMS


def pieces_of(form: ThinkingForm, text: str, cuts: list[int], *, begun: bool) -> list[Piece]:
    """What is read of the pieces of `text` between `cuts`."""
    reader, pieces = ThinkingReader(form, begun=begun), list[Piece]()
    ends = [*cuts, len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        pieces += reader.feed(text[start:end])
    return pieces + reader.flush()


def read(
    form: ThinkingForm, text: str, cuts: list[int] | None = None, *, begun: bool = False
) -> tuple[str, str]:
    """The thought and the answer."""
    pieces = pieces_of(form, text, cuts or [], begun=begun)
    assert all(piece != "" and piece != Thought("") for piece in pieces)
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        "".join(piece for piece in pieces if isinstance(piece, str)),
    )


@pytest.mark.parametrize(
    ("form", "begun", "text", "found"),
    [
        (QWEN, False, "<think>\nOne, two.\n\nThree.\n</think>\n\nFour.\n", (1, "Four.\n")),
        (QWEN, True, "One, two.\n\nThree.\n</think>\n\nFour.\n", (1, "Four.\n")),
        # Told to think by an open mark, some write it again.
        (QWEN, True, "<think>\nOne, two.\n\nThree.</think>Four.\n", (1, "Four.\n")),
        (GEMMA, False, "<|channel>thought\nOne, two.\n\nThree.\n<channel|>Four.\n", (1, "Four.\n")),
        (QWEN, False, "<think>\n\n</think>\n\n    Four", (0, "    Four")),
        (QWEN, False, "\n<think></think> Four", (0, " Four")),
        (QWEN, False, "Four <think> five </think>", (0, "Four <think> five </think>")),
        (QWEN, False, "<thinking>Four", (0, "<thinking>Four")),
        (QWEN, False, " \n Four", (0, " \n Four")),
        (QWEN, False, "<thin", (0, "<thin")),
        (QWEN, False, "", (0, "")),
        (GEMMA, False, "<|channel>final\nFour", (0, "<|channel>final\nFour")),
        (MISTRAL, False, "[THINK]One, two.\n\nThree.[/THINK]Four.\n", (1, "Four.\n")),
        (
            HARMONY,
            False,
            "<|channel|>analysis<|message|>One, two.\n\nThree."
            "<|end|><|start|>assistant<|channel|>final<|message|>Four.\n",
            (1, "Four.\n"),
        ),
        (HARMONY, False, "<|channel|>final<|message|>  Four", (0, "  Four")),
        (HARMONY, False, "<|channel|>comm", (0, "<|channel|>comm")),
        # What a call behind the thought begins with belongs to the call.
        (
            HARMONY,
            False,
            "<|channel|>analysis<|message|>One, two.\n\nThree."
            "<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}",
            (1, "<|channel|>commentary to=functions.f<|message|>{}"),
        ),
        (
            HARMONY,
            False,
            "<|channel|>analysis<|message|>One, two.\n\nThree."
            "<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
            (1, " to=functions.f<|channel|>commentary json<|message|>{}"),
        ),
        (
            HARMONY,
            False,
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant b",
            ("a<|end|><|start|>assistant b", ""),
        ),
        (HARMONY, False, "<|channel|>final", (0, "<|channel|>final")),
        # Cut off within the thought, and within the mark after it.
        (QWEN, True, "One, two.\n\nThree.", (1, "")),
        (QWEN, True, "One, two.\n\nThree.\n</think>\n \n", (1, "")),
        (QWEN, False, "<think> a </ think> < </thin", ("a </ think> < </thin", "")),
    ],
)
def test_a_thought_is_told_from_the_answer(
    form: ThinkingForm, begun: bool, text: str, found: tuple[str | int, str]
) -> None:
    thought = {0: "", 1: "One, two.\n\nThree."}.get(found[0], found[0])  # type: ignore[call-overload]
    assert read(form, text, begun=begun) == (thought, found[1])
    assert read(form, text, list(range(1, len(text))), begun=begun) == (thought, found[1])
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(len(text) + 1), min(3, len(text))))
        assert read(form, text, cuts, begun=begun) == (thought, found[1])


def test_text_is_told_as_it_comes_and_no_part_of_a_mark_is() -> None:
    reader = ThinkingReader(QWEN)
    told = [reader.feed(text) for text in ("<thi", "nk>a ", "b </thi", "s </th", "ink>", "\n", "c")]
    thoughts = [Thought("a"), Thought(" b"), Thought(" </this")]
    assert told == [[], thoughts[:1], thoughts[1:2], thoughts[2:], [], [], ["c"]]


def test_a_reader_says_whether_it_is_in_a_thought() -> None:
    assert ThinkingReader(QWEN, begun=True).thinking
    reader = ThinkingReader(QWEN)
    states = [
        (reader.feed(text), reader.thinking)[1] for text in ("\n", "<think>", "a", "</think>")
    ]
    assert states == [False, True, True, False]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("answer", ["", "Four.", "    Four\n"])
def test_what_is_kept_is_split_again(form: ThinkingForm, answer: str) -> None:
    text = f"{form.opening}\nOne.\n{form.closing}\n\n{answer}"
    for cuts in ([], list(range(1, len(text)))):
        writer = ThinkingWriter()
        kept = "".join(writer.text([one]) for one in pieces_of(form, text, cuts, begun=False))
        assert split(kept) == ("One.", answer)
        assert kept == (f"<think>\nOne.\n</think>\n\n{answer}" if answer else "<think>\nOne.")
    assert ThinkingWriter().text([answer]) == answer
    assert said("One.", answer) == {
        "content": answer, "reasoning_content": "One.", "thinking": "One."
    }  # fmt: skip
    assert said("", answer) == {"content": answer}


def tokenizer(template: str, *, special: bool = False) -> Tokenizer:
    library = byte_level_tokenizer()
    marks = [mark for form in FORMS for mark in form.tokens]
    library.add_tokens([AddedToken(mark, special=special) for mark in marks])
    return Tokenizer.from_json(library.to_str(), ControlTokens(eos=(0,)), template)


SWITCHED = (
    "{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{{ messages[0].content }}|{{ messages[0].thinking }}|"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


def test_the_template_says_how_a_model_thinks() -> None:
    found = Thinking.of(tokenizer(SWITCHED))
    assert found is not None
    assert (found.form, found.switch, found.effort) == (QWEN, "enable_thinking", None)
    assert found.shown == frozenset()
    assert Thinking.of(tokenizer("{{ messages }}")) is None
    gemma = tokenizer(
        "<|channel>{{ thinking }}{{ reasoning_effort }}{{ messages[0].thinking }}", special=True
    )
    found = Thinking.of(gemma)
    assert found is not None
    assert (found.form, found.switch, found.effort) == (GEMMA, "thinking", "reasoning_effort")
    assert found.shown == {gemma.token_id("<|channel>"), gemma.token_id("<channel|>")}


@pytest.mark.parametrize(("on", "begun"), [(None, True), (True, True), (False, False)])
def test_a_prompt_may_begin_the_thought(on: bool | None, begun: bool) -> None:
    for special in (False, True):
        model = tokenizer(SWITCHED, special=special)
        found = Thinking.of(model)
        assert found is not None
        prompt = model.chat(
            [{"role": "user", "content": "<think>"}], variables=found.variables(on=on)
        )
        assert found.begun(prompt) == begun
        assert found.reader(prompt).thinking == begun
