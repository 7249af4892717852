"""Filling in one line of a program: the samples, the model's lines, how near they come.

Samples are records in the form of HumanEval's infilling benchmark (Bavarian et al., arXiv
2207.14255) or lines chosen from source files. Only the first line of what a model writes counts,
without the white space at its end.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.errors import DataError
from kvq_apps import text_input
from kvq_apps.evaluation import documents
from kvq_apps.evaluation.measurement import (
    AT_ONCE,
    HeldBytes,
    Measurement,
    OpenSession,
    Progress,
    score_answer,
)
from kvq_models.infilling import infill_prompt, infill_tokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.generation import GenerationOptions
from kvq_runtime.passes import Work, run_all

# Shorter lines (`else:`, `pass`, a bracket) say little about a model.
MIN_LINE_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A program whose line from `start` to `end` (characters, line end excluded) is missing.

    `test` is a program text that defines `check(candidate)`, or empty; `entry_point` names the
    candidate.
    """

    name: str
    text: str
    start: int
    end: int
    test: str = ""
    entry_point: str = ""

    @property
    def prefix(self) -> str:
        """What stands before the missing line."""
        return self.text[: self.start]

    @property
    def middle(self) -> str:
        """The missing line."""
        return self.text[self.start : self.end]

    @property
    def suffix(self) -> str:
        """What stands after the missing line's end."""
        return self.text[self.end :].removeprefix("\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A sample as a prompt in ids; `answered` goes on with the right line."""

    sample: Sample
    ids: list[int]
    answered: list[int]


Passes = Callable[[Sample, str], bool]


def read_samples(files: Sequence[str], *, seed: int) -> list[Sample]:
    """Every sample of `files`, in an order that the seed decides.

    Raises `DataError` for a damaged file, and when there is no sample.
    """
    found = [sample for path in files for sample in _samples(path)]
    if not found:
        raise DataError(
            f"{', '.join(files)}: there is no line to fill in; give infilling records (.jsonl, "
            f".jsonl.gz) or source files with lines of {MIN_LINE_CHARACTERS} or more characters"
        )
    random.Random(seed).shuffle(found)  # noqa: S311  alike each time, nothing is kept secret
    return found


def gaps(
    tokenizer: Tokenizer,
    samples: Iterable[Sample],
    *,
    limit: int,
    prompt_tokens: tuple[int, int],
    answer_tokens: int,
) -> list[Gap]:
    """The first `limit` samples whose prompts have at least `prompt_tokens[0]` tokens.

    Longer prompts are cut to `prompt_tokens[1]`, answers to `answer_tokens`.
    """
    least, most = prompt_tokens
    found: list[Gap] = []
    for sample in samples:
        ids = infill_prompt(tokenizer, sample.prefix, sample.suffix, most)
        if len(ids) < least:
            continue
        answer = tokenizer.encode(f"{sample.middle}\n")[:answer_tokens]
        found.append(Gap(sample=sample, ids=ids, answered=[*ids, *answer]))
        if len(found) == limit:
            break
    return found


def infilling(
    open_session: OpenSession,
    tokenizer: Tokenizer,
    asked: Sequence[Gap],
    answer_tokens: int,
    progress: Progress,
    passes: Passes | None = None,
) -> Measurement:
    """Share of lines filled in exactly, greedily, up to a line's end or `answer_tokens`.

    `passes` runs a sample's test on a line; samples without a test are left out of its rate.
    `outcomes` has a 1 or 0 for each line, right or not, and `test_outcomes` for each test that ran,
    by which two caches are compared line by line.
    """
    options = GenerationOptions(
        max_tokens=answer_tokens, sampling=Sampling(temperature=0), stop_strings=("\n",),
        stop_ids=frozenset({*infill_tokens(tokenizer).ids(), *tokenizer.eos_ids}), draft=False,
    )  # fmt: skip
    held = HeldBytes()

    def fill(gap: Gap) -> Work[Any, tuple[str, float]]:
        with open_session() as session:
            session.prefill(gap.ids)
            steps = yield from session.answering(options)
            session.rollback(len(session.tokens) - (len(gap.ids) - 1))
            nats = score_answer(session, gap.answered, len(gap.ids)).nats
            held.see(session)
        return "".join(step.text for step in steps), nats

    found: dict[int, tuple[str, float]] = {}
    for place, line in run_all(map(fill, asked), AT_ONCE):
        found[place] = line
        progress(len(found), len(asked))
    lines, nats = zip(*(found[place] for place in range(len(asked))), strict=True)
    samples = [gap.sample for gap in asked]
    nearness: dict[str, Any] = {**line_scores(samples, lines)}
    tested = [(sample, line) for sample, line in zip(samples, lines, strict=True) if sample.test]
    if passes is not None and tested:
        passed = [passes(*one) for one in tested]
        nearness["pass_rate"] = sum(passed) / len(tested)
        nearness["tested"] = len(tested)
        nearness["test_outcomes"] = _digits(passed)
    exact = nearness.pop("exact_match")
    return held.measurement(
        exact,
        "exact match",
        len(asked),
        **nearness,
        answer_nats=float(np.mean(nats)),
        outcomes=_digits(one == other for one, other in _pairs(samples, lines)),
    )


def line_scores(samples: Sequence[Sample], lines: Sequence[str]) -> dict[str, float]:
    """`exact_match` and `edit_similarity` of the lines written for the samples, means."""
    pairs = _pairs(samples, lines)
    return {
        "exact_match": sum(line == wanted for line, wanted in pairs) / len(pairs),
        "edit_similarity": sum(edit_similarity(*pair) for pair in pairs) / len(pairs),
    }


def _pairs(samples: Sequence[Sample], lines: Sequence[str]) -> list[tuple[str, str]]:
    """What was written and what was wanted, as they are compared."""
    return [
        (line.split("\n", 1)[0].rstrip(), sample.middle.rstrip())
        for line, sample in zip(lines, samples, strict=True)
    ]


def _digits(outcomes: Iterable[bool]) -> str:
    return "".join(str(int(one)) for one in outcomes)


def edit_similarity(one: str, other: str) -> float:
    """1 - (single-character edits between the texts) / (length of the longer); 1 is equal."""
    longest = max(len(one), len(other))
    distances = list(range(len(other) + 1))
    for row, character in enumerate(one, 1):
        above_left, distances[0] = distances[0], row
        for column, wanted in enumerate(other, 1):
            above = distances[column]
            distances[column] = min(
                above + 1, distances[column - 1] + 1, above_left + (character != wanted)
            )
            above_left = above
    return 1 - distances[-1] / longest if longest else 1.0


def _samples(path: str) -> Iterator[Sample]:
    if not documents.is_records(path):
        yield from _lines(path, text_input.read_text(path))
        return
    for place, record in documents.records(path):
        if "text" not in record:
            yield _from_record(place, record)
        elif documents.may_judge(record):
            yield from _lines(place, documents.field(record, "text", place))


def _from_record(place: str, record: dict[str, object]) -> Sample:
    prefix = documents.field(record, "prompt", place)
    middle = documents.field(record, "canonical_solution", place)
    return Sample(
        name=str(record.get("task_id", place)),
        text=prefix + middle + documents.field(record, "suffix", place),
        start=len(prefix),
        end=len(prefix) + len(middle.removesuffix("\n")),
        test=str(record.get("test", "")),
        entry_point=str(record.get("entry_point", "")),
    )


def _lines(name: str, text: str) -> Iterator[Sample]:
    """Every line of a source file that is worth filling in, one sample each."""
    start = 0
    for number, line in enumerate(text.split("\n"), 1):
        end = start + len(line)
        if len(line.strip()) >= MIN_LINE_CHARACTERS:
            yield Sample(name=f"{name}:{number}", text=text, start=start, end=end)
        start = end + 1
