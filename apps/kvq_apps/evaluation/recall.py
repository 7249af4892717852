"""Look-ups far back in a text: pass keys in filler, values in a table, made-up facts in prose.

The wording is `kvq_models.recall`'s, which the training data shares. Prompts are made to fill a
length in tokens. The answers are scored in two ways: exactly right, written greedily, and how
likely the right tokens were, which also tells weak caches of a weak model apart.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np

from kvq.errors import DataError, argument
from kvq_apps.evaluation.measurement import (
    AnswerScore,
    Measurement,
    OpenSession,
    PeakCacheUsage,
    Progress,
    score_answer,
)
from kvq_models.recall import (
    Recall,
    fact_question,
    filler_text,
    key_value,
    passkey,
    sentence_starts,
    two_facts,
)
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling

# Tokens that an answer may add to its prompt; a fact is told in a sentence.
ANSWER_TOKENS = {"passkey": 16, "retrieval": 16, "facts": 64}
UNITS = {"passkey": "exact match", "retrieval": "exact match", "facts": "facts found"}
# Prose that fills less than this share of a length is too short for it.
LEAST_FILLED = 0.9
# Two facts lie half a text apart.
FACTS_APART = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallQuestion:
    """Holds a prompt in ids and its answer; `depth` is where it lies (0 start, 1 end).

    `ids_with_answer` is the prompt and the answer as one text in ids. The answer begins at `first`,
    since a tokenizer may join it with the end of the prompt. For a model that chats, the prompt is
    followed by the words before the answer. At most `most_tokens` are written.
    """

    ids: list[int]
    ids_with_answer: list[int]
    first: int
    answer: str
    length_tokens: int
    depth: float
    most_tokens: int

    def is_right(self, text: str) -> bool:
        """Tells whether `text` answers: its first number is right, or it has the right name."""
        if self.answer.isdigit():
            return first_digits(text) == self.answer
        return self.answer.casefold() in text.casefold()


def questions(
    task: str,
    tokenizer: Tokenizer,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
    prose: str = "",
) -> list[RecallQuestion]:
    """Makes prompts of `task` (a row of `ANSWER_TOKENS`) of at most each of `lengths` tokens.

    `facts` hides two facts in a piece of `prose`, one at each of `depths` and one half the text
    away, and asks for both. Each question depends only on the seed and its own length, depth and
    trial. Raises `DataError` for a length that is too short, or longer than the prose.
    """
    makers: dict[str, Callable[[str, float], list[_QuestionMaker]]] = {
        "passkey": _passkey_makers,
        "retrieval": _retrieval_makers,
        "facts": partial(_fact_makers, prose=prose),
    }
    return [
        _question(tokenizer, task, maker, length)
        for length in lengths
        for depth in depths
        for trial in range(trials)
        for maker in makers[task](f"{seed}/{length}/{depth}/{trial}", depth)
    ]


def recall(
    open_session: OpenSession,
    tokenizer: Tokenizer,
    questions: Sequence[RecallQuestion],
    progress: Progress,
    unit: str = UNITS["passkey"],
) -> Measurement:
    """Measures the share of questions answered rightly, greedily; one row per length and depth."""
    cells: dict[tuple[int, float], list[tuple[bool, AnswerScore]]] = {}
    usage = PeakCacheUsage()
    for number, question in enumerate(questions):
        with open_session() as session:
            session.prefill(question.ids)
            steps = session.generate(question.most_tokens, sampling=Sampling(temperature=0))
            text = tokenizer.decode([step.token for step in steps])
            before = question.first - 1
            session.rollback(len(session.tokens) - min(before, len(question.ids)))
            if len(question.ids) < before:
                session.prefill(question.ids_with_answer[len(question.ids) : before])
            score = score_answer(session, question.ids_with_answer, question.first)
            usage.record(session)
        cell = cells.setdefault((question.length_tokens, question.depth), [])
        cell.append((question.is_right(text), score))
        progress(number + 1, len(questions))
    outcomes = [outcome for cell in cells.values() for outcome in cell]
    return usage.measurement(
        sum(exact for exact, _ in outcomes) / len(outcomes),
        unit,
        len(questions),
        **_means(outcomes),
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
    """Returns the first run of digits in `text`, or nothing."""
    match = re.search(r"\d+", text)
    return match[0] if match else ""


def _means(outcomes: Sequence[tuple[bool, AnswerScore]]) -> dict[str, object]:
    return {
        "answer_nats": float(np.mean([score.nats for _, score in outcomes])),
        "answer_reciprocal_rank": float(np.mean([score.reciprocal_rank for _, score in outcomes])),
    }


def _random(origin: str) -> random.Random:
    return random.Random(origin)  # noqa: S311  texts are made alike each time, nothing is kept secret


@dataclass(frozen=True, kw_only=True, slots=True)
class _QuestionMaker:
    """Makes a question of some size; `least` is the smallest, `probe` one to measure tokens by.

    Its answer lies at `depth`. `most` is the largest size, if there is one. The prompt ends with
    `lead` on a line of its own, but not for a model that chats.
    """

    make: Callable[[int], Recall]
    depth: float
    least: int
    probe: int
    most: int | None = None
    lead: str = ""


def _passkey_makers(origin: str, depth: float) -> list[_QuestionMaker]:
    """Makes questions by characters of filler, cut at a sentence's end."""

    def make(characters: int) -> Recall:
        text = filler_text(_random(f"filler {origin}"), characters)
        cut = text[: text.rfind(".", 0, characters) + 1]
        return passkey(_random(f"passkey {origin}"), cut, depth)

    return [_QuestionMaker(make=make, depth=depth, least=0, probe=1000)]


def _retrieval_makers(origin: str, depth: float) -> list[_QuestionMaker]:
    """Makes questions by pairs of the table."""

    def make(num_pairs: int) -> Recall:
        return key_value(_random(f"retrieval {origin}"), num_pairs, depth)

    return [_QuestionMaker(make=make, depth=depth, least=1, probe=40)]


def _fact_makers(origin: str, depth: float, prose: str) -> list[_QuestionMaker]:
    """Makes questions by characters of prose, from a random sentence up to a sentence's end.

    Two questions about one document: of the fact at `depth`, and of the one half the text away.
    """
    rng = _random(f"facts {origin}")
    facts = two_facts(rng)
    depths = depth, depth + FACTS_APART if depth <= FACTS_APART else depth - FACTS_APART
    start = rng.choice(sentence_starts(prose))
    turned = f"{prose[start:]}\n{prose[:start]}"
    ends = [*sentence_starts(turned), len(turned)]

    def make(characters: int, index: int) -> Recall:
        end = max(at for at in ends if at <= characters)
        return fact_question(turned[:end].rstrip(), facts, depths, index)

    return [
        _QuestionMaker(
            make=partial(make, index=index),
            depth=depths[index],
            least=0,
            probe=1000,
            most=len(turned),
            lead=fact.lead,
        )
        for index, fact in enumerate(facts)
    ]


def _question(
    tokenizer: Tokenizer, task: str, maker: _QuestionMaker, length_tokens: int
) -> RecallQuestion:
    """Makes the longest question that fits: begins a little too long, then shortens it."""
    chats = bool(maker.lead) and tokenizer.chat_template is not None

    def encoded(size: int) -> list[int]:
        prompt = maker.make(size).prompt
        if not chats:
            return tokenizer.encode(prompt, start=True)
        message = {"role": "user", "content": prompt.removesuffix(f"\n{maker.lead}")}
        return tokenizer.chat([message], add_generation_prompt=True)

    shortest = len(encoded(maker.least))
    if shortest > length_tokens:
        raise DataError(
            f"a {task} prompt of {length_tokens} tokens is not possible; "
            f"the shortest with this tokenizer has {shortest}"
        )
    per_size = (len(encoded(maker.probe)) - shortest) / (maker.probe - maker.least)
    size = maker.least + ceil(1.03 * (length_tokens - shortest) / per_size)
    size = size if maker.most is None else min(size, maker.most)
    while len(ids := encoded(size)) > length_tokens:
        excess = (len(ids) - length_tokens) / per_size
        size = max(maker.least, size - max(1, ceil(excess)))
    if size == maker.most and len(ids) < LEAST_FILLED * length_tokens:
        raise DataError(
            f"the text fills {len(ids)} of {argument('--context')} {length_tokens}; give more or "
            f"longer files, or a shorter {argument('--context')}"
        )
    prompt, answer = maker.make(size)
    if chats:
        prompt_ids = ids + tokenizer.encode(maker.lead)
        ids_with_answer = ids + tokenizer.encode(maker.lead + answer)
    else:
        prompt_ids, ids_with_answer = ids, tokenizer.encode(prompt + answer, start=True)
    # A tokenizer may join the end of the prompt with the answer.
    first = next(
        (
            i
            for i, (token, other) in enumerate(zip(prompt_ids, ids_with_answer, strict=False))
            if token != other
        ),
        len(prompt_ids),
    )
    return RecallQuestion(
        ids=ids,
        ids_with_answer=ids_with_answer,
        first=first,
        answer=answer.strip(),
        length_tokens=length_tokens,
        depth=maker.depth,
        most_tokens=ANSWER_TOKENS[task] - 2,
    )
