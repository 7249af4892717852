"""Problems that are solved or not: programs to write, judged by their tests, and word problems.

`program`: records in the form of HumanEval (Chen et al., arXiv 2107.03374), a prompt to continue
greedily. Of infilling records of one program (arXiv 2207.14255) it is the one with the shortest
prompt, which lacks all of the body. `math`: records in the form of GSM8K (Cobbe et al., arXiv
2110.14168), asked after the first `NUM_EXAMPLES` of them as examples; the last number of an answer
counts.
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
from kvq_apps.evaluation.measurement import (
    Measurement,
    OpenSession,
    PeakCacheUsage,
    Progress,
)
from kvq_lab import execution, text_files
from kvq_lab.infilling import AT_ONCE, Sample
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.generation import GenerationOptions
from kvq_runtime.config import Sampling
from kvq_runtime.sequence.passes import Work, run_all

# The tasks, and the unit of each.
UNITS = {"program": "tests passed", "math": "right answers"}
# Examples before each question.
NUM_EXAMPLES = 8
# Here a function's body is over, or the next example begins.
_AFTER_PROGRAM = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert ", "\n```")
_AFTER_ANSWER = ("\n\n", "Question:")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# GSM8K notes each sum for a calculator.
_CALCULATION = re.compile(r"<<.*?>>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Holds a prompt in ids; `solves` decides whether a text is a solution.

    Control tokens in `shown` are part of that text.
    """

    name: str
    ids: list[int]
    stops: tuple[str, ...]
    solves: Callable[[str], bool]
    shown: frozenset[int] = frozenset()


def problems(
    task: str,
    tokenizer: Tokenizer,
    files: Sequence[str],
    *,
    limit: int,
    seed: int,
    most_tokens: int,
) -> list[Problem]:
    """Returns up to `limit` problems of `task` (a row of `UNITS`) that fit `most_tokens`.

    The order depends on the seed. Raises `DataError` for a damaged
    file, and when there is no problem.
    """
    made = _programs(tokenizer, files) if task == "program" else _questions(tokenizer, files)
    candidates = [problem for problem in made if len(problem.ids) <= most_tokens]
    if not candidates:
        fields = "prompt, test and entry_point" if task == "program" else "question and answer"
        raise DataError(
            f"{', '.join(files)}: no problem has {most_tokens} tokens or less; "
            f"{argument('--task')} {task} needs "
            f"records (.jsonl, .jsonl.gz) with {fields}, or a longer {argument('--context')}"
        )
    random.Random(seed).shuffle(candidates)
    return candidates[:limit]


def solving(
    open_session: OpenSession,
    problems: Sequence[Problem],
    answer_tokens: int,
    progress: Progress,
    unit: str,
) -> Measurement:
    """Measures the share of problems solved greedily in `answer_tokens`, one attempt each.

    What all prompts begin with is read once; `AT_ONCE` answers share passes. `outcomes` has a 1 or
    0 for each problem, so that two caches can be compared problem by problem; `standard_error` is
    of the share.
    """
    usage = PeakCacheUsage()
    columns = zip(*(problem.ids[:-1] for problem in problems), strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    checkpoint = None
    if shared:
        with open_session() as session:
            session.prefill(problems[0].ids[:shared])
            checkpoint = session.capture()

    def attempt(problem: Problem) -> Work[Any, bool]:
        options = GenerationOptions(
            max_tokens=answer_tokens, sampling=Sampling(temperature=0),
            stop_strings=problem.stops, draft=False, shown=problem.shown,
        )  # fmt: skip
        with open_session() as session:
            if checkpoint is not None:
                session.restore(checkpoint)
            session.prefill(problem.ids[shared:])
            steps = yield from session.answering(options)
            usage.record(session)
        return problem.solves("".join(step.text for step in steps))

    solved = [False] * len(problems)
    attempts = run_all((attempt(problem) for problem in problems), AT_ONCE)
    for number, (place, is_solved) in enumerate(attempts, 1):
        solved[place] = is_solved
        progress(number, len(problems))
    share = sum(solved) / len(solved)
    return usage.measurement(
        share,
        unit,
        len(solved),
        standard_error=sqrt(share * (1 - share) / len(solved)),
        outcomes="".join(str(int(outcome)) for outcome in solved),
    )


def last_number(text: str) -> float | None:
    """Returns the last number written in `text`, thousands with or without commas."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _programs(tokenizer: Tokenizer, files: Sequence[str]) -> list[Problem]:
    """Returns one problem for each program, which is known by its whole text."""
    shortest: dict[str, Sample] = {}
    for file in files:
        for place, record in text_files.records(file):
            prompt = text_files.field(record, "prompt", place)
            rest = text_files.field(record, "canonical_solution", place)
            rest += str(record.get("suffix", ""))
            sample = Sample(
                name=str(record.get("task_id", place)),
                text=prompt + rest,
                start=len(prompt),
                end=len(prompt + rest),
                test=text_files.field(record, "test", place),
                entry_point=text_files.field(record, "entry_point", place),
            )
            before = shortest.setdefault(sample.text, sample)
            if sample.start < before.start:
                shortest[sample.text] = sample
    return [
        Problem(
            name=sample.name,
            ids=tokenizer.encode(sample.prefix, start=True),
            stops=_AFTER_PROGRAM,
            solves=partial(execution.passes, sample),
        )
        for sample in shortest.values()
    ]


def _questions(tokenizer: Tokenizer, files: Sequence[str]) -> list[Problem]:
    """Returns each record after the first `NUM_EXAMPLES` of all files."""
    records = [
        (
            place,
            text_files.field(record, "question", place),
            _CALCULATION.sub("", text_files.field(record, "answer", place)).replace(
                "####", "The answer is"
            ),
        )
        for file in files
        for place, record in text_files.records(file)
    ]
    examples = [(question, answer) for _, question, answer in records[:NUM_EXAMPLES]]
    return [
        Problem(
            name=place,
            ids=_question_ids(tokenizer, examples, question),
            stops=() if tokenizer.chat_template else _AFTER_ANSWER,
            solves=partial(_same_number, answer),
        )
        for place, question, answer in records[NUM_EXAMPLES:]
    ]


def _question_ids(
    tokenizer: Tokenizer, examples: Sequence[tuple[str, str]], question: str
) -> list[int]:
    """Encodes the examples and the question as a conversation, or as text without a template."""
    if tokenizer.chat_template is None:
        preamble = "".join(
            f"Question: {example}\nAnswer: {answer}\n\n" for example, answer in examples
        )
        return tokenizer.encode(f"{preamble}Question: {question}\nAnswer:", start=True)
    turns = [
        {"role": role, "content": text}
        for pair in examples
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return tokenizer.chat(
        [*turns, {"role": "user", "content": question}], add_generation_prompt=True
    )


def _same_number(answer: str, text: str) -> bool:
    return last_number(text) == last_number(answer)
