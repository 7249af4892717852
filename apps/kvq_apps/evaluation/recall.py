"""Finding one thing far back: pass keys in filler, values in a table.

The wording is `kvq_models.recall`'s, which the training data shares; here prompts are made to
fill a length in tokens and the answers are scored: repeated digit by digit, greedily, and how
likely the right digits were, which also tells weak caches of a weak model apart.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from kvq.errors import DataError
from kvq_apps.evaluation.measurement import (
    AnswerScore,
    HeldBytes,
    Measurement,
    OpenSession,
    Progress,
    score_answer,
)
from kvq_models.recall import Recall, filler_text, key_value, passkey
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling

# What an answer may add to a prompt that fills its length.
ANSWER_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt in ids and its answer; `depth` is where it lies (0 start, 1 end).

    `answered` is the prompt and the answer as one text in ids; from `first` on it differs from
    the prompt.
    """

    ids: list[int]
    answered: list[int]
    first: int
    answer: str
    length_tokens: int
    depth: float


def questions(
    task: str,
    tokenizer: Tokenizer,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
) -> list[Question]:
    """Prompts of `task` (passkey or retrieval) of at most each of `lengths` tokens.

    Each question depends on the seed and its own length, depth and trial alone. Raises
    `DataError` for a length that is too short.
    """
    makers = {"passkey": _passkey_maker, "retrieval": _retrieval_maker}
    return [
        _question(tokenizer, task, makers[task](f"{seed}/{length}/{depth}/{trial}"), length, depth)
        for length in lengths
        for depth in depths
        for trial in range(trials)
    ]


def recall(
    open_session: OpenSession,
    tokenizer: Tokenizer,
    asked: Sequence[Question],
    progress: Progress,
) -> Measurement:
    """Share of questions answered exactly, greedily; one row per length and depth."""
    cells: dict[tuple[int, float], list[tuple[bool, AnswerScore]]] = {}
    held = HeldBytes()
    for number, question in enumerate(asked):
        with open_session() as session:
            session.prefill(question.ids)
            steps = session.generate(2 * len(question.answer) + 4, sampling=Sampling(temperature=0))
            text = tokenizer.decode([step.token for step in steps])
            session.rollback(len(session.tokens) - (question.first - 1))
            score = score_answer(session, question.answered, question.first)
            held.see(session)
        cell = cells.setdefault((question.length_tokens, question.depth), [])
        cell.append((first_digits(text) == question.answer, score))
        progress(number + 1, len(asked))
    every = [outcome for cell in cells.values() for outcome in cell]
    return held.measurement(
        _share_exact(every),
        "exact match",
        len(asked),
        **_means(every),
        rows=[
            {
                "length": length,
                "depth": depth,
                "correct": sum(exact for exact, _ in cell),
                "trials": len(cell),
                **_means(cell),
            }
            for (length, depth), cell in cells.items()
        ],
    )


def first_digits(text: str) -> str:
    """The first run of digits in `text`, or nothing."""
    match = re.search(r"\d+", text)
    return match[0] if match else ""


def _share_exact(outcomes: Sequence[tuple[bool, AnswerScore]]) -> float:
    return sum(exact for exact, _ in outcomes) / len(outcomes)


def _means(outcomes: Sequence[tuple[bool, AnswerScore]]) -> dict[str, object]:
    return {
        "answer_nats": float(np.mean([score.nats for _, score in outcomes])),
        "answer_reciprocal_rank": float(np.mean([score.reciprocal_rank for _, score in outcomes])),
    }


def _random(origin: str) -> random.Random:
    return random.Random(origin)  # noqa: S311  texts are made alike each time, nothing is kept secret


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """Makes a question of some size; `least` is the smallest, `probe` one to measure tokens by."""

    make: Callable[[int, float], Recall]
    least: int
    probe: int


def _passkey_maker(origin: str) -> _Maker:
    """Size: characters of filler, cut at a sentence's end."""

    def make(characters: int, depth: float) -> Recall:
        text = filler_text(_random(f"filler {origin}"), characters)
        cut = text[: text.rfind(".", 0, characters) + 1]
        return passkey(_random(f"passkey {origin}"), cut, depth)

    return _Maker(make=make, least=0, probe=1000)


def _retrieval_maker(origin: str) -> _Maker:
    """Size: pairs of the table."""

    def make(num_pairs: int, depth: float) -> Recall:
        return key_value(_random(f"retrieval {origin}"), num_pairs, depth)

    return _Maker(make=make, least=1, probe=40)


def _question(
    tokenizer: Tokenizer, task: str, maker: _Maker, length_tokens: int, depth: float
) -> Question:
    """The longest of its task that fits: begins a little too long, then moves back."""

    def encoded(size: int) -> list[int]:
        return tokenizer.encode(maker.make(size, depth).prompt, start=True)

    shortest = len(encoded(maker.least))
    if shortest > length_tokens:
        raise DataError(
            f"a {task} prompt of {length_tokens} tokens is not possible; "
            f"the shortest with this tokenizer has {shortest}"
        )
    per_size = (len(encoded(maker.probe)) - shortest) / (maker.probe - maker.least)
    size = maker.least + ceil(1.03 * (length_tokens - shortest) / per_size)
    while len(ids := encoded(size)) > length_tokens:
        excess = (len(ids) - length_tokens) / per_size
        size = max(maker.least, size - max(1, ceil(excess)))
    prompt, answer = maker.make(size, depth)
    answered = tokenizer.encode(prompt + answer, start=True)
    # A tokenizer may join the end of the prompt with the answer.
    first = next(
        (i for i, (one, other) in enumerate(zip(ids, answered, strict=False)) if one != other),
        len(ids),
    )
    return Question(
        ids=ids,
        answered=answered,
        first=first,
        answer=answer.strip(),
        length_tokens=length_tokens,
        depth=depth,
    )
