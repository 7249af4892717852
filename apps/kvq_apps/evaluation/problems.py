"""Problems that are solved or not: programs to write, judged by their tests, and word problems.

`program`: records in the form of HumanEval (Chen et al., arXiv 2107.03374), a prompt to go on with
greedily; of infilling records of one program (arXiv 2207.14255) the one whose prompt is shortest,
which lacks all of the body. `math`: records in the form of GSM8K (Cobbe et al., arXiv 2110.14168),
asked after the first `SHOWN` of them as examples; the last number of an answer counts.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import sqrt
from typing import Any

from kvq.errors import DataError, argument
from kvq_apps.evaluation import documents
from kvq_apps.evaluation.infilling import Passes, Sample
from kvq_apps.evaluation.measurement import (
    AT_ONCE,
    HeldBytes,
    Measurement,
    OpenSession,
    Progress,
)
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.generation import GenerationOptions
from kvq_runtime.passes import Work, run_all

# What a solution may take.
PROGRAM_TOKENS = 512
MATH_TOKENS = 320
ANSWER_TOKENS = {"program": PROGRAM_TOKENS, "math": MATH_TOKENS}
# The tasks, and what each is measured in.
UNITS = {"program": "tests passed", "math": "right answers"}
# Examples before each question.
SHOWN = 8
# At these a function's body is over, or the next example begins.
_AFTER_PROGRAM = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert ", "\n```")
_AFTER_ANSWER = ("\n\n", "Question:")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# GSM8K notes each sum for a calculator.
_CALCULATION = re.compile(r"<<.*?>>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A prompt in ids; `solves` says of a text whether it is a solution."""

    name: str
    ids: list[int]
    stops: tuple[str, ...]
    solves: Callable[[str], bool]


def problems(
    task: str,
    tokenizer: Tokenizer,
    files: Sequence[str],
    *,
    limit: int,
    seed: int,
    most_tokens: int,
    passes: Passes | None = None,
) -> list[Problem]:
    """Up to `limit` problems of `task` (a row of `UNITS`) whose prompts have `most_tokens` or less.

    `passes` runs a program's test. Their order depends on the seed. Raises `DataError` for a
    damaged file, and when there is no problem.
    """
    if task == "program":
        assert passes is not None
        found = _programs(tokenizer, files, passes)
    else:
        found = _questions(tokenizer, files)
    found = [problem for problem in found if len(problem.ids) <= most_tokens]
    if not found:
        wanted = "prompt, test and entry_point" if task == "program" else "question and answer"
        raise DataError(
            f"{', '.join(files)}: no problem has {most_tokens} tokens or less; "
            f"{argument('--task')} {task} needs "
            f"records (.jsonl, .jsonl.gz) with {wanted}, or a longer {argument('--context')}"
        )
    random.Random(seed).shuffle(found)  # noqa: S311  alike each time, nothing is kept secret
    return found[:limit]


def solving(
    open_session: OpenSession,
    asked: Sequence[Problem],
    answer_tokens: int,
    progress: Progress,
    unit: str,
) -> Measurement:
    """Share of problems solved greedily in `answer_tokens`, one attempt each.

    What all prompts begin with is read once; `AT_ONCE` answers share passes. `outcomes` has a 1
    or 0 for each problem, by which two caches are compared problem by problem; `standard_error`
    is of the share.
    """
    held = HeldBytes()
    columns = zip(*(problem.ids[:-1] for problem in asked), strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    begun = None
    if shared:
        with open_session() as session:
            session.prefill(asked[0].ids[:shared])
            begun = session.capture()

    def attempt(problem: Problem) -> Work[Any, bool]:
        options = GenerationOptions(
            max_tokens=answer_tokens, sampling=Sampling(temperature=0),
            stop_strings=problem.stops, draft=False,
        )  # fmt: skip
        with open_session() as session:
            if begun is not None:
                session.restore(begun)
            session.prefill(problem.ids[shared:])
            steps = yield from session.answering(options)
            held.see(session)
        return problem.solves("".join(step.text for step in steps))

    solved = [False] * len(asked)
    attempts = run_all((attempt(problem) for problem in asked), AT_ONCE)
    for number, (place, is_solved) in enumerate(attempts, 1):
        solved[place] = is_solved
        progress(number, len(asked))
    share = sum(solved) / len(solved)
    return held.measurement(
        share,
        unit,
        len(solved),
        standard_error=sqrt(share * (1 - share) / len(solved)),
        outcomes="".join(str(int(one)) for one in solved),
    )


def last_number(text: str) -> float | None:
    """The last number written in `text`, thousands with or without commas."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _programs(tokenizer: Tokenizer, files: Sequence[str], passes: Passes) -> list[Problem]:
    """One problem for each program, which is known by its whole text."""
    shortest: dict[str, Sample] = {}
    for file in files:
        for place, record in documents.records(file):
            prompt = documents.field(record, "prompt", place)
            rest = documents.field(record, "canonical_solution", place)
            rest += str(record.get("suffix", ""))
            sample = Sample(
                name=str(record.get("task_id", place)),
                text=prompt + rest,
                start=len(prompt),
                end=len(prompt + rest),
                test=documents.field(record, "test", place),
                entry_point=documents.field(record, "entry_point", place),
            )
            before = shortest.setdefault(sample.text, sample)
            if sample.start < before.start:
                shortest[sample.text] = sample
    return [
        Problem(
            name=sample.name,
            ids=tokenizer.encode(sample.prefix, start=True),
            stops=_AFTER_PROGRAM,
            solves=partial(passes, sample),
        )
        for sample in shortest.values()
    ]


def _questions(tokenizer: Tokenizer, files: Sequence[str]) -> list[Problem]:
    """Each record after the `SHOWN` first of all files."""
    records = [
        (
            place,
            documents.field(record, "question", place),
            _CALCULATION.sub("", documents.field(record, "answer", place)).replace(
                "####", "The answer is"
            ),
        )
        for file in files
        for place, record in documents.records(file)
    ]
    shown = [(question, answer) for _, question, answer in records[:SHOWN]]
    return [
        Problem(
            name=place,
            ids=_asked(tokenizer, shown, question),
            stops=() if tokenizer.chat_template else _AFTER_ANSWER,
            solves=partial(_same_number, answer),
        )
        for place, question, answer in records[SHOWN:]
    ]


def _asked(tokenizer: Tokenizer, shown: Sequence[tuple[str, str]], question: str) -> list[int]:
    """The examples and the question as a conversation, or as text where a model has no template."""
    if tokenizer.chat_template is None:
        told = "".join(f"Question: {one}\nAnswer: {other}\n\n" for one, other in shown)
        return tokenizer.encode(f"{told}Question: {question}\nAnswer:", start=True)
    turns = [
        {"role": role, "content": text}
        for pair in shown
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return tokenizer.chat(
        [*turns, {"role": "user", "content": question}], add_generation_prompt=True
    )


def _same_number(answer: str, text: str) -> bool:
    return last_number(text) == last_number(answer)
