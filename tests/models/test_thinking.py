"""Thoughts as models write them: told from the answer by value, however the text is cut."""

from __future__ import annotations

import random
import time
from itertools import product

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
    assistant_message,
    split,
)
from kvq_models.tokenizer import Tokenizer
from tiny import byte_level_tokenizer

GEMMA, HARMONY, MISTRAL, QWEN = FORMS


def pieces_of(form: ThinkingForm, text: str, cuts: list[int], *, begun: bool) -> list[Piece]:
    """Returns what is read of the pieces of `text` between `cuts`."""
    reader, pieces = ThinkingReader(form, begun=begun), list[Piece]()
    ends = [*cuts, len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        pieces += reader.feed(text[start:end])
    return pieces + reader.flush()


def read(
    form: ThinkingForm, text: str, cuts: list[int] | None = None, *, begun: bool = False
) -> tuple[str, str]:
    """Returns the thought and the answer."""
    pieces = pieces_of(form, text, cuts or [], begun=begun)
    assert all(piece != "" and piece != Thought("") for piece in pieces)
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        "".join(piece for piece in pieces if isinstance(piece, str)),
    )


@pytest.mark.parametrize(
    ("form", "begun", "text", "expected"),
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
    form: ThinkingForm, begun: bool, text: str, expected: tuple[str | int, str]
) -> None:
    thought = {0: "", 1: "One, two.\n\nThree."}.get(expected[0], expected[0])  # type: ignore[call-overload]
    assert read(form, text, begun=begun) == (thought, expected[1])
    assert read(form, text, list(range(1, len(text))), begun=begun) == (thought, expected[1])
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(len(text) + 1), min(3, len(text))))
        assert read(form, text, cuts, begun=begun) == (thought, expected[1])


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_long_runs_are_read_alike_however_they_come(form: ThinkingForm) -> None:
    marks = [form.opening, form.closing, form.plain or "<", *(mark for mark, _ in form.turns)]
    parts = [" ", "\n", " \n", "word", "<", *marks, *(mark[: len(mark) // 2] for mark in marks)]
    for seed in range(20):
        chance, begun = random.Random(seed), seed % 2 == 0
        text = "".join(chance.choice(parts) * chance.choice((1, 1, 2, 30)) for _ in range(7))
        whole = read(form, text, begun=begun)
        for characters in (1, 7, 100, 1023):
            assert (
                read(form, text, list(range(characters, len(text), characters)), begun=begun)
                == whole
            )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_four_times_the_text_takes_four_times_the_time(form: ThinkingForm) -> None:
    def seconds(text: str) -> float:
        reader = ThinkingReader(form)
        started = time.process_time()
        for start in range(0, len(text), 16):
            reader.feed(text[start : start + 16])
        reader.flush()
        return time.process_time() - started

    thought = f"{form.opening}word"
    befores = ("", form.opening, thought, f"{thought}{form.closing}")
    for before, run in product(befores, (" ", " \n")):
        short, long = (before + run * (count // len(run)) for count in (50_000, 200_000))
        for _ in range(3):
            if seconds(long) < 8 * seconds(short) + 0.01:
                break
        else:
            pytest.fail(f"{before!r} and runs of {run!r}")


def test_text_is_told_as_it_comes_and_no_part_of_a_mark_is() -> None:
    reader = ThinkingReader(QWEN)
    pieces = [
        reader.feed(text) for text in ("<thi", "nk>a ", "b </thi", "s </th", "ink>", "\n", "c")
    ]
    thoughts = [Thought("a"), Thought(" b"), Thought(" </this")]
    assert pieces == [[], thoughts[:1], thoughts[1:2], thoughts[2:], [], [], ["c"]]


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
        kept = "".join(writer.text([piece]) for piece in pieces_of(form, text, cuts, begun=False))
        assert split(kept) == ("One.", answer)
        assert kept == (f"<think>\nOne.\n</think>\n\n{answer}" if answer else "<think>\nOne.")
    assert ThinkingWriter().text([answer]) == answer
    assert assistant_message("One.", answer) == {
        "content": answer, "reasoning_content": "One.", "thinking": "One."
    }  # fmt: skip
    assert assistant_message("", answer) == {"content": answer}


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
    thinking = Thinking.of(tokenizer(SWITCHED))
    assert thinking is not None
    assert (thinking.form, thinking.switch, thinking.effort) == (QWEN, "enable_thinking", None)
    assert thinking.shown == frozenset()
    assert Thinking.of(tokenizer("{{ messages }}")) is None
    gemma = tokenizer(
        "<|channel>{{ thinking }}{{ reasoning_effort }}{{ messages[0].thinking }}", special=True
    )
    thinking = Thinking.of(gemma)
    assert thinking is not None
    assert (thinking.form, thinking.switch, thinking.effort) == (
        GEMMA,
        "thinking",
        "reasoning_effort",
    )
    assert thinking.shown == {gemma.token_id("<|channel>"), gemma.token_id("<channel|>")}


@pytest.mark.parametrize(("on", "begun"), [(None, True), (True, True), (False, False)])
def test_a_prompt_may_begin_the_thought(on: bool | None, begun: bool) -> None:
    for special in (False, True):
        model = tokenizer(SWITCHED, special=special)
        thinking = Thinking.of(model)
        assert thinking is not None
        prompt = model.chat(
            [{"role": "user", "content": "<think>"}], variables=thinking.variables(on=on)
        )
        assert thinking.begun(prompt) == begun
        assert thinking.reader(prompt).thinking == begun
