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
from kvq_apps.completion.document import TextDocument
from kvq_apps.completion.other_files import blocks_of, related, short_name
from kvq_apps.completion.prompts import GapPrompts
from kvq_apps.evaluation.measurement import (
    Measurement,
    OpenSession,
    PeakCacheUsage,
    Progress,
    score_answer,
)
from kvq_apps.terminal import text_input
from kvq_lab import text_files
from kvq_models.infilling import infill_prompt, infill_tokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.generation import GenerationOptions
from kvq_runtime.config import Sampling
from kvq_runtime.sequence.passes import Work, run_all

# Answers written in one pass: the weights are read once for all of them.
AT_ONCE = 8
# Shorter lines (`else:`, `pass`, a bracket) say little about a model.
MIN_LINE_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Holds a program whose line from `start` to `end` (characters, without line end) is missing.

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
    def file(self) -> str:
        """Returns the source file that it is of."""
        return self.name.rpartition(":")[0]

    @property
    def prefix(self) -> str:
        """Returns the text before the missing line."""
        return self.text[: self.start]

    @property
    def middle(self) -> str:
        """Returns the missing line."""
        return self.text[self.start : self.end]

    @property
    def suffix(self) -> str:
        """Returns the text after the missing line's end."""
        return self.text[self.end :].removeprefix("\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Holds a sample as a prompt in ids; `ids_with_answer` goes on with the right line."""

    sample: Sample
    ids: list[int]
    ids_with_answer: list[int]


Passes = Callable[[Sample, str], bool]


def read_samples(files: Sequence[str], *, seed: int) -> list[Sample]:
    """Reads every sample of `files`, in an order that the seed decides.

    Raises `DataError` for a damaged file, and when there is no sample.
    """
    samples = [sample for path in files for sample in _samples(path)]
    if not samples:
        raise DataError(
            f"{', '.join(files)}: there is no line to fill in; give infilling records (.jsonl, "
            f".jsonl.gz) or source files with lines of {MIN_LINE_CHARACTERS} or more characters"
        )
    random.Random(seed).shuffle(samples)
    return samples


def gaps(
    tokenizer: Tokenizer,
    samples: Iterable[Sample],
    prompt_tokens: int,
    answer_tokens: int,
    files: Sequence[str] = (),
) -> list[Gap]:
    """Returns the samples as prompts, cut to `prompt_tokens` and `answer_tokens`.

    Of `files`, parts of the others stand in front of each prompt, as `kvq lsp` chooses them.
    """
    blocks = {
        file: blocks_of(short_name(file), TextDocument(text_input.read_text(file)))
        for file in files
    }
    prompts = GapPrompts(tokenizer)
    chosen: list[Gap] = []
    for sample in samples:
        if files:
            other_blocks = [
                block for file in files if file != sample.file for block in blocks[file]
            ]
            document = TextDocument(f"{sample.prefix}\n{sample.suffix}")
            extra = related(other_blocks, document, (sample.prefix.count("\n"), 0))
            ids = prompts.fit(sample.prefix, sample.suffix, prompt_tokens, extra).ids
        else:
            ids = infill_prompt(tokenizer, sample.prefix, sample.suffix, prompt_tokens)
        answer = tokenizer.encode(f"{sample.middle}\n")[:answer_tokens]
        chosen.append(Gap(sample=sample, ids=ids, ids_with_answer=[*ids, *answer]))
    return chosen


def infilling(
    open_session: OpenSession,
    tokenizer: Tokenizer,
    gaps: Sequence[Gap],
    answer_tokens: int,
    progress: Progress,
    passes: Passes | None = None,
) -> Measurement:
    """Measures the share of lines filled in exactly, up to their end or `answer_tokens`.

    Lines are written greedily. `passes` runs a sample's test on a line; samples without a test are
    left out of its rate. `outcomes` has a 1 or 0 for each line, right or not, and `test_outcomes`
    for each test that ran, so that two caches can be compared line by line.
    """
    options = GenerationOptions(
        max_tokens=answer_tokens, sampling=Sampling(temperature=0), stop_strings=("\n",),
        stop_ids=frozenset({*infill_tokens(tokenizer).ids(), *tokenizer.eos_ids}), draft=False,
    )  # fmt: skip
    usage = PeakCacheUsage()

    def fill(gap: Gap) -> Work[Any, tuple[str, float]]:
        with open_session() as session:
            session.prefill(gap.ids)
            steps = yield from session.answering(options)
            session.rollback(len(session.tokens) - (len(gap.ids) - 1))
            nats = score_answer(session, gap.ids_with_answer, len(gap.ids)).nats
            usage.record(session)
        return "".join(step.text for step in steps), nats

    answers: dict[int, tuple[str, float]] = {}
    for place, line in run_all(map(fill, gaps), AT_ONCE):
        answers[place] = line
        progress(len(answers), len(gaps))
    lines, nats = zip(*(answers[place] for place in range(len(gaps))), strict=True)
    samples = [gap.sample for gap in gaps]
    exact, similarity = line_scores(samples, lines)
    tests: dict[str, Any] = {}
    tested = [(sample, line) for sample, line in zip(samples, lines, strict=True) if sample.test]
    if passes is not None and tested:
        passed = [passes(*pair) for pair in tested]
        tests = {
            "pass_rate": sum(passed) / len(tested),
            "tested": len(tested),
            "test_outcomes": _digits(passed),
        }
    return usage.measurement(
        sum(exact) / len(exact),
        "exact match",
        len(gaps),
        edit_similarity=similarity,
        **tests,
        answer_nats=float(np.mean(nats)),
        outcomes=_digits(exact),
    )


def line_scores(samples: Sequence[Sample], lines: Sequence[str]) -> tuple[list[bool], float]:
    """Returns which of the lines written for the samples are right, and their mean similarity."""
    pairs = [
        (line.split("\n", 1)[0].rstrip(), sample.middle.rstrip())
        for line, sample in zip(lines, samples, strict=True)
    ]
    similarity = sum(edit_similarity(*pair) for pair in pairs) / len(pairs)
    return [line == expected for line, expected in pairs], similarity


def _digits(outcomes: Iterable[bool]) -> str:
    return "".join(str(int(outcome)) for outcome in outcomes)


def edit_similarity(first: str, second: str) -> float:
    """Returns 1 - (single-character edits between the texts) / (length of the longer one)."""
    longest = max(len(first), len(second))
    distances = list(range(len(second) + 1))
    for row, character in enumerate(first, 1):
        above_left, distances[0] = distances[0], row
        for column, other_character in enumerate(second, 1):
            above = distances[column]
            distances[column] = min(
                above + 1, distances[column - 1] + 1, above_left + (character != other_character)
            )
            above_left = above
    return 1 - distances[-1] / longest if longest else 1.0


def _samples(path: str) -> Iterator[Sample]:
    if not text_files.is_records(path):
        yield from _lines(path, text_input.read_text(path))
        return
    for place, record in text_files.records(path):
        if "text" not in record:
            yield _from_record(place, record)
        elif text_files.may_judge(record):
            yield from _lines(place, text_files.field(record, "text", place))


def _from_record(place: str, record: dict[str, object]) -> Sample:
    prefix = text_files.field(record, "prompt", place)
    middle = text_files.field(record, "canonical_solution", place)
    return Sample(
        name=str(record.get("task_id", place)),
        text=prefix + middle + text_files.field(record, "suffix", place),
        start=len(prefix),
        end=len(prefix) + len(middle.removesuffix("\n")),
        test=str(record.get("test", "")),
        entry_point=str(record.get("entry_point", "")),
    )


def _lines(name: str, text: str) -> Iterator[Sample]:
    """Yields every line of a source file that is worth filling in, one sample each."""
    start = 0
    for number, line in enumerate(text.split("\n"), 1):
        end = start + len(line)
        if len(line.strip()) >= MIN_LINE_CHARACTERS:
            yield Sample(name=f"{name}:{number}", text=text, start=start, end=end)
        start = end + 1
