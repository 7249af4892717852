"""Lines to fill in and problems to solve: which, how they are scored, and how programs run."""

import gzip
import json
import lzma
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infill_tokens import LETTERS, MIDDLE, PREFIX, SUFFIX, infill_tokenizer
from kvq.errors import DataError
from kvq_lab.execution import passes
from kvq_lab.infilling import (
    Sample,
    edit_similarity,
    gaps,
    infilling,
    line_scores,
    read_samples,
)
from kvq_lab.problems import Problem, last_number, problems, solving
from kvq_lab.text_files import training_texts
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.generation import GenerationOptions, Step
from kvq_runtime.sequence.passes import Work
from kvq_runtime.session.session import no_progress

PROGRAM = "def add(first, second):\n    total = first + second\n\n    return total\nx = 1\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return infill_tokenizer()


# Samples


def test_lines_of_source_files_are_the_samples(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PROGRAM)
    (tmp_path / "b.py").write_text("\n\n    value = other.value\r\nend")
    samples = read_samples([str(tmp_path / "a.py"), str(tmp_path / "b.py")], seed=0)
    by_place = {sample.name.rpartition("/")[2]: sample for sample in samples}
    # `x = 1`, `end` and blank lines are too short
    assert sorted(by_place) == ["a.py:1", "a.py:2", "a.py:4", "b.py:3"]
    second = by_place["a.py:2"]
    assert second.prefix == "def add(first, second):\n"
    assert second.middle == "    total = first + second"
    assert second.suffix == "\n    return total\nx = 1\n"
    assert by_place["b.py:3"].middle.rstrip() == "    value = other.value"


def test_the_choice_of_lines_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("".join(f"number_{i} = {i}\n" for i in range(100)))
    names = [[sample.name for sample in read_samples([str(path)], seed=seed)] for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    assert sorted(names[0]) == sorted(names[2])


RECORD = {
    "task_id": "t/0",
    "prompt": "def f(x):\n",
    "canonical_solution": "    y = x + 1\n",
    "suffix": "    return y\n",
    "test": "def check(f):\n    assert f(1) == 2\n",
    "entry_point": "f",
}


@pytest.mark.parametrize(
    ("name", "opener"), [("r.jsonl", open), ("r.jsonl.gz", gzip.open), ("r.jsonl.xz", lzma.open)]
)
def test_records_are_samples(tmp_path: Path, name: str, opener: Callable) -> None:
    with opener(tmp_path / name, "wt") as file:
        file.write(json.dumps(RECORD) + "\n\n")
    (sample,) = read_samples([str(tmp_path / name)], seed=0)
    assert (sample.prefix, sample.suffix) == (RECORD["prompt"], RECORD["suffix"])
    assert sample.middle == "    y = x + 1"
    assert (sample.name, sample.entry_point, sample.test) == ("t/0", "f", RECORD["test"])


def test_records_of_text_give_held_out_python_only(tmp_path: Path) -> None:
    rows = [
        {"text": "held_out = 1111\n", "source": "p/a.py", "held_out": True},
        {"text": "trained_on = 2222\n", "source": "p/b.py", "held_out": False},
        {"text": "not a program\n", "source": "book", "held_out": True},
        {"text": "unmarked = 3333\n"},
    ]
    path = tmp_path / "corpus.jsonl.xz"
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    lines = {sample.middle for sample in read_samples([str(path)], seed=0)}
    assert lines == {"held_out = 1111", "unmarked = 3333"}
    assert list(training_texts(str(path))) == ["trained_on = 2222\n", "unmarked = 3333\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{}\nno\n", "a.jsonl:1 has no text 'prompt'; it has nothing"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1 is not a JSON object"),
        ("a.jsonl", b'{"prompt": "p", "suffix": 3}', "has no text 'canonical_solution'"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1 is not a JSON object"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20,
            "a.jsonl.gz cannot be read: Error -3",
        ),
        ("a.jsonl.gz", b"no", "a.jsonl.gz cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}" * 99, mtime=0)[:20],
            "a.jsonl.gz cannot be read: Compressed",
        ),
        ("a.jsonl.xz", b"not compressed", "a.jsonl.xz cannot be read: Input format not supported"),
        ("a.py", b"x\n", "there is no line to fill in"),
        ("a.py", b"\xff\xfe", "a.py is not valid UTF-8"),
        ("a.jsonl", b"\n", "there is no line to fill in"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refusal:
        read_samples([str(tmp_path / name)], seed=0)
    assert message in str(refusal.value)


def test_gaps_are_cut_around_the_line(tokenizer: Tokenizer) -> None:
    text = f"{LETTERS}\n" * 5
    samples = [Sample(name=str(at), text=text, start=11 * at, end=11 * at + 10) for at in range(5)]
    # 44 characters around each line, one token each, and three control tokens
    whole = gaps(tokenizer, samples, 100, 4)
    assert [gap.sample.name for gap in whole] == list("01234")
    assert [len(gap.ids) for gap in whole] == [47] * 5
    for gap in whole:
        assert gap.ids_with_answer == [*gap.ids, *tokenizer.encode(LETTERS[:4])]
    cut = gaps(tokenizer, samples, 30, 99)
    assert [len(gap.ids) for gap in cut] == [30] * 5
    assert tokenizer.decode(cut[1].ids_with_answer[30:]) == f"{LETTERS}\n"


def test_parts_of_other_files_stand_in_front(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of the file itself there is none, and of the others those that share names with it."""
    texts = {
        "own.py": "def total(invoice):\n    return invoice.amount\n",
        "alike.py": "invoice = 1\namount = 2\n",
        "unlike.py": "nothing = 17\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in texts]
    (gap,) = gaps(tokenizer, read_samples(files[:1], seed=0)[:1], 400, 4, files)
    (alone,) = gaps(tokenizer, [gap.sample], 400, 4)
    front = tokenizer.decode(gap.ids[: len(gap.ids) - len(alone.ids)])
    assert front.strip() == texts["alike.py"].strip()
    assert gap.ids[-len(alone.ids) :] == alone.ids


# Scores


@pytest.mark.parametrize(
    ("first", "second", "similarity"),
    [
        ("", "", 1.0),
        ("abc", "abc", 1.0),
        ("abc", "", 0.0),
        ("", "abcd", 0.0),
        ("kitten", "sitting", 1 - 3 / 7),
        ("flaw", "lawn", 1 - 2 / 4),
        ("return x", "return xs", 1 - 1 / 9),
        ("ab", "ba", 0.0),
    ],
)
def test_edit_similarity(first: str, second: str, similarity: float) -> None:
    assert edit_similarity(first, second) == pytest.approx(similarity)
    assert edit_similarity(second, first) == pytest.approx(similarity)


def lines_of(*middles: str) -> list[Sample]:
    return [Sample(name="", text=middle, start=0, end=len(middle)) for middle in middles]


def test_a_line_counts_up_to_its_end_without_its_last_spaces() -> None:
    samples = lines_of("    a = 1", "    a = 1", "    a = 1 ", "    a = 1")
    right, similarity = line_scores(
        samples, ["    a = 1  ", "    a = 1\nb = 2", "    a = 1", "  a = 1"]
    )
    assert right == [True, True, True, False]
    assert similarity == pytest.approx((3 + 1 - 2 / 9) / 4)


class Writer:
    """Writes one text whatever it is asked, and holds every token equally likely."""

    kv_bytes_peak = 5
    bytes_per_token = 1.0

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.tokens: list[int] = []
        self.options = GenerationOptions()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to free."""

    def prefill(self, ids: Sequence[int]) -> bool:
        self.tokens += ids
        return True

    def answering(self, options: GenerationOptions) -> Work[Any, list[Step]]:
        """Needs no pass."""
        yield from ()
        self.options = options
        ids = self.tokenizer.encode(self.text)
        self.tokens += ids
        return [Step(token=i, text=self.tokenizer.decode([i]), logprob=None) for i in ids]

    def rollback(self, n_tokens: int) -> None:
        del self.tokens[len(self.tokens) - n_tokens :]

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        self.tokens += ids
        yield np.zeros((len(ids), self.tokenizer.vocab_size), np.float32)

    def stats(self) -> "Writer":
        return self


def test_infilling_asks_greedily_to_the_lines_end_and_scores(tokenizer: Tokenizer) -> None:
    samples = [
        Sample(name=str(at), text=PROGRAM, start=start, end=end, test=test, entry_point="add")
        for at, (start, end, test) in enumerate([(24, 50, "T"), (52, 68, ""), (24, 50, "T")])
    ]
    chosen = gaps(tokenizer, samples, 400, 64)
    writers = [
        Writer(tokenizer, text)
        for text in ("    total = first + second", "    return first", "    total = 0")
    ]
    remaining = iter(writers)
    tested: list[tuple[str, str]] = []

    def passes(sample: Sample, line: str) -> bool:
        tested.append((sample.name, line))
        return sample.name == "2"

    measured = infilling(lambda: next(remaining), tokenizer, chosen, 64, no_progress, passes)
    assert (measured.value, measured.n, measured.unit) == (1 / 3, 3, "exact match")
    similarity = (1 + (1 - 5 / 16) + (1 - 14 / 26)) / 3
    assert measured.details["edit_similarity"] == pytest.approx(similarity)
    assert measured.details["answer_nats"] == pytest.approx(np.log(tokenizer.vocab_size), rel=1e-5)
    assert (measured.details["pass_rate"], measured.details["tested"]) == (0.5, 2)
    assert (measured.details["outcomes"], measured.details["test_outcomes"]) == ("100", "01")
    assert tested == [("0", "    total = first + second"), ("2", "    total = 0")]
    for writer, gap in zip(writers, chosen, strict=True):
        assert writer.tokens == gap.ids_with_answer[:-1]
        assert writer.options.stop_strings == ("\n",)
        assert sorted(writer.options.stop_ids or ()) == sorted({0, PREFIX, SUFFIX, MIDDLE})
        assert writer.options.sampling.greedy


# Problems


PROGRAMS = [
    {
        "task_id": f"HumanEval/{at}",
        "prompt": f"def f{at}(x):\n",
        "canonical_solution": f"    return x + {at}\n",
        "test": f"def check(f):\n    assert f(1) == {at + 1}\n",
        "entry_point": f"f{at}",
    }
    for at in range(3)
]
LINE_MISSING = PROGRAMS[0] | {
    "prompt": "def f0(x):\n    return x",
    "canonical_solution": " + 0\n",
    "suffix": "",
}
SUMS = [
    {"question": f"How much is {at} and 1?", "answer": f"It is {at}+1=<<{at}+1=6>>.\n#### {at + 1}"}
    for at in range(10)
]


def records_file(folder: Path, rows: Sequence[dict[str, str]]) -> str:
    path = folder / "problems.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 and then 1,234.50 dollars", 1234.5),
        ("it is -7.", -7),
        ("12", 12),
        ("none", None),
        ("$1,000,000", 1_000_000),
    ],
)
def test_the_last_number_of_an_answer_counts(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_a_program_is_asked_for_once_without_its_body(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = records_file(tmp_path, [LINE_MISSING, *PROGRAMS])
    programs = problems("program", tokenizer, [path], limit=9, seed=1, most_tokens=99)
    assert sorted(problem.name for problem in programs) == [
        "HumanEval/0",
        "HumanEval/1",
        "HumanEval/2",
    ]
    problem = next(problem for problem in programs if problem.name == "HumanEval/1")
    assert tokenizer.decode(problem.ids) == "def f1(x):\n"
    assert problem.solves("    return 1 + x")
    assert not problem.solves("    return 2 + x")
    assert not problem.solves("    return")
    few = problems("program", tokenizer, [path], limit=2, seed=1, most_tokens=99)
    assert [problem.name for problem in few] == [problem.name for problem in programs][:2]


def test_a_sum_is_asked_after_the_first_ones_as_examples(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = records_file(tmp_path, SUMS)
    word_problems = problems("math", tokenizer, [path], limit=9, seed=0, most_tokens=9999)
    assert sorted(problem.name for problem in word_problems) == [f"{path}:10", f"{path}:9"]
    last = next(problem for problem in word_problems if problem.name.endswith(":10"))
    text = tokenizer.decode(last.ids)
    assert text.startswith(
        "Question: How much is 0 and 1?\nAnswer: It is 0+1=.\nThe answer is 1\n\nQuestion: "
    )
    assert text.endswith("The answer is 8\n\nQuestion: How much is 9 and 1?\nAnswer:")
    assert last.solves(" 9 + 1 is 10.\nThe answer is 10")
    assert not last.solves("The answer is 10, or 11")
    assert not last.solves("no idea")


def test_a_model_that_chats_is_asked_in_turns(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    chats = infill_tokenizer(template=template)
    path = records_file(tmp_path, SUMS[:9])
    (problem,) = problems("math", chats, [path], limit=9, seed=0, most_tokens=9999)
    text = chats.decode(problem.ids)
    assert text.startswith(
        "[user]How much is 0 and 1?[assistant]It is 0+1=.\nThe answer is 1[user]"
    )
    assert text.endswith("[user]How much is 8 and 1?[assistant]")


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("program", PROGRAMS, "no problem has 2 tokens or less; --task program needs records"),
        ("program", SUMS, "problems.jsonl:1 has no text 'prompt'"),
        ("math", PROGRAMS, "problems.jsonl:1 has no text 'question'"),
        (
            "math",
            SUMS[:8],
            "--task math needs records (.jsonl, .jsonl.gz) with question and answer",
        ),
    ],
)
def test_files_without_problems_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, task: str, rows: list[dict[str, str]], message: str
) -> None:
    path = records_file(tmp_path, rows)
    with pytest.raises(DataError) as refusal:
        problems(task, tokenizer, [path], limit=9, seed=0, most_tokens=2)
    assert message in str(refusal.value)


class Solver(Writer):
    """Goes on from what another session read."""

    def capture(self) -> list[int]:
        return list(self.tokens)

    def restore(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)


def test_problems_are_solved_one_by_one_after_what_they_share(tokenizer: Tokenizer) -> None:
    similar_problems = [
        Problem(name=text, ids=tokenizer.encode(f"shared {text}"), stops=("!",), solves="7".__eq__)
        for text in ("first", "second", "third")
    ]
    writers = [Solver(tokenizer, text) for text in ("", "7", "8", "7")]
    remaining = iter(writers)
    measurement = solving(
        lambda: next(remaining), similar_problems, 16, no_progress, "right answers"
    )
    assert (measurement.value, measurement.n, measurement.unit) == (2 / 3, 3, "right answers")
    assert measurement.details["outcomes"] == "101"
    assert measurement.details["standard_error"] == pytest.approx((2 / 9 / 3) ** 0.5)
    assert tokenizer.decode(writers[0].tokens).startswith("shared")
    for writer, problem in zip(writers[1:], similar_problems, strict=True):
        assert writer.tokens[: len(problem.ids)] == problem.ids
        assert writer.options.stop_strings == ("!",)


def test_problems_that_share_nothing_are_read_whole(tokenizer: Tokenizer) -> None:
    unlike_problems = [
        Problem(name=text, ids=tokenizer.encode(text), stops=(), solves="7".__eq__)
        for text in ("one", "two")
    ]
    writers = [Solver(tokenizer, "7"), Solver(tokenizer, "7")]
    remaining = iter(writers)
    assert (
        solving(lambda: next(remaining), unlike_problems, 16, no_progress, "right answers").value
        == 1
    )
    assert tokenizer.decode(writers[1].tokens) == "two7"


# Running what a model wrote


def program(test: str) -> Sample:
    return Sample(
        name="",
        text="def f(x):\n    ?\n    return y\n",
        start=10,
        end=15,
        test=test,
        entry_point="f",
    )


CHECK = "def check(f):\n    assert f(1) == 2\n"
CHECK_ENVIRONMENT = "import os\ndef check(f):\n    assert set(os.environ) <= {'LC_CTYPE'}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of time and memory there")
@pytest.mark.parametrize(
    ("line", "test", "passed"),
    [
        ("    y = x + 1", CHECK, True),
        ("    y = x", CHECK, False),
        ("    y = (", CHECK, False),
        ("    raise SystemExit(0)", CHECK, False),
        ("    import os; os._exit(0)", CHECK, False),
        ("    y = bytearray(1 << 33) and 2", CHECK, False),
        ("    y = 1 + x + 0 * open('f', 'wb').write(bytes(1 << 21))", CHECK, False),
        ("    y = 2", CHECK_ENVIRONMENT, True),
    ],
)  # fmt: skip
def test_a_line_passes_when_its_test_does(line: str, test: str, passed: bool) -> None:
    assert passes(program(test), line) is passed


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of time and memory there")
def test_a_line_that_never_ends_is_stopped() -> None:
    assert passes(program(CHECK), "    while True: pass", timeout_s=0.5) is False
