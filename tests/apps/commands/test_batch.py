"""`kvq batch` from outside: order, errors as lines, what ended early, flags and lines."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from command_line import Ask, kvq, started
from kvq_apps.batch import Answers, BatchPrompt
from kvq_apps.cli import main
from serving import wait_until


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def written(file: Path, *lines: Any) -> str:
    """A file of these lines, an object as JSON and a text as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(f"{text}\n" for text in texts))
    return str(file)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def text(row: dict[str, Any]) -> str:
    choice = row["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def batch(model: str, file: Path, out: Path, *words: str) -> tuple[str, ...]:
    return ("batch", model, str(file), "--out", str(out), "--temp", "0", *words)


def test_one_line_in_one_line_out_in_order(
    bundle: str, ask: Ask, file: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An answer of random weights may say the end by chance, by the processor that rounds them.
    alone = {
        prompt: ask("run", "-m", bundle, prompt, "--temp", "0", "-n", limit)
        for prompt, limit in (("The slow", "90"), ("The quick", "7"), ("A fox", "7"))
    }
    written(
        file,
        # The first ends last: answers do not wait for each other, and are in order all the same.
        {"prompt": "The slow", "max_tokens": 90},
        {"prompt": "The quick"},
        "",
        "no JSON",
        {"messages": [{"role": "user", "content": "Hi"}], "custom_id": "chat"},
        {"prompt": "A fox", "temperature": "hot"},
        {"prompt": "A fox"},
        {"text": "neither"},
    )
    assert main(batch(bundle, file, out, "-n", "7", "--json")) == 2
    output = capsys.readouterr()
    assert json.loads(output.out) == {"lines": 7, "answered": 7, "failed": 3, "out": str(out)}
    assert f"3 of 7 lines have an error in {out}" in output.err
    answers = rows(out)
    assert [row["line"] for row in answers] == [1, 2, 4, 5, 6, 7, 8]
    assert [row["line"] for row in answers if "error" in row] == [4, 6, 8]
    for place, prompt in ((0, "The slow"), (1, "The quick"), (5, "A fox")):
        assert text(answers[place]) == alone[prompt]["text"]
        assert answers[place]["usage"]["completion_tokens"] == alone[prompt]["new_tokens"]
    assert answers[3]["custom_id"] == "chat"
    assert answers[3]["object"] == "chat.completion"
    assert "not JSON" in answers[2]["error"]["message"]
    assert answers[4]["error"]["param"] == "temperature"
    assert answers[6]["error"]["message"] == "the line has no prompt or messages; give one of them"
    assert not Path(f"{out}.partial").exists()


@pytest.mark.slow
def test_what_was_killed_goes_on_and_asks_no_finished_line_again(
    bundle: str, home: dict[str, str], file: Path, out: Path
) -> None:
    written(file, *({"prompt": f"Number {number}", "max_tokens": 60} for number in range(40)))
    words = batch(bundle, file, out, "--sessions", "2", "--threads", "1")
    journal = Path(f"{out}.partial")
    first = started(*words, home=home)
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 3)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not out.exists()
    finished = {row["line"]: row["id"] for row in rows_of_whole_lines(journal)}
    assert 3 <= len(finished) < 40
    with journal.open("ab") as stream:
        stream.write(b'{"line": 40, "dig')
    again = kvq(*words, "--json", home=home)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["answered"] == 40 - len(finished)
    assert [row["line"] for row in rows(out)] == list(range(1, 41))
    # An answer's id is drawn anew each time.
    assert finished.items() <= {row["line"]: row["id"] for row in rows(out)}.items()
    before = out.read_bytes()
    third = kvq(*words, "--json", home=home)
    assert json.loads(third.stdout)["answered"] == 0
    assert out.read_bytes() == before


def rows_of_whole_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")]


def test_lines_added_to_the_prompts_are_answered_too(
    bundle: str, ask: Ask, file: Path, out: Path
) -> None:
    words = batch(bundle, file, out, "-n", "3")
    written(file, {"prompt": "a"}, {"prompt": "b"})
    assert ask(*words)["answered"] == 2
    first = rows(out)
    written(file, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    assert ask(*words)["answered"] == 1
    assert rows(out)[:2] == first
    assert len(rows(out)) == 3


def test_answers_to_other_lines_or_by_other_flags_are_left_alone(
    bundle: str, file: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = batch(bundle, file, out, "-n", "3")
    written(file, {"prompt": "a"})
    assert main(words) == 0
    before = out.read_bytes()
    assert main([*words, "--top-k", "3"]) == 2
    written(file, {"prompt": "b"})
    assert main(words) == 2
    assert capsys.readouterr().err.count("has an answer to another line 1, or one by another") == 2
    assert out.read_bytes() == before
    out.write_text("a diary\n")
    assert main(words) == 2
    assert "holds no answers of a batch" in capsys.readouterr().err
    assert out.read_text() == "a diary\n"


def test_flags_hold_where_a_line_does_not_say(
    bundle: str, file: Path, out: Path, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    written(
        file,
        {"prompt": "Hi"},
        {"prompt": "Hi", "n_predict": 2, "regex": "[ab]+"},
        {"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
    )
    words = batch(bundle, file, out, "-n", "5", "--regex", "[xy]{9}", "--system", "A long word.")
    assert main(words) == 0
    plain, limited, counted, streamed = rows(out)
    assert [row["usage"]["completion_tokens"] for row in rows(out)] == [5, 2, 5, 5]
    assert set(text(plain)) <= set("xy")
    assert set(text(limited)) <= set("ab")
    assert all(row["object"] == "chat.completion" for row in rows(out))
    tokens = [row["usage"]["prompt_tokens"] for row in (plain, counted, streamed)]
    assert tokens[0] == tokens[2] > tokens[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{file}"], "--out is missing; give the file"),
        (["{file}", "--out", "{file}"], "--out is the file of the prompts"),
        (["{file}", "--out", "{file}/no/a"], "there is no folder"),
        (["nano", "two", "{file}", "--out", "{file}.out"], "give one model and one file"),
        (["-m", "nano", "default", "{file}", "--out", "{file}.out"], "give one model and one file"),
        (["{file}", "--out", "{file}.out", "--stream"], "--stream is not known to `kvq batch`"),
        (["{file}.no", "--out", "{file}.out"], "cannot be read: No such file"),
        (["{file}", "--out", "{file}.out"], "has no lines"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_model_is_loaded(
    words: list[str], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("\n")
    assert main(["batch", *(word.format(file=file) for word in words)]) == 2
    assert says in capsys.readouterr().err


def test_an_answer_is_on_disk_when_it_is_kept(tmp_path: Path) -> None:
    path, prompts = tmp_path / "out", [BatchPrompt(line=n, text="", digest=f"{n}") for n in (1, 2)]
    digests = {prompt.line: prompt.digest for prompt in prompts}
    answers = Answers(path, digests)
    answers.add(prompts[1], {"text": "two"})
    kept = Answers(path, digests)
    assert (2 in kept, 1 in kept, kept.failed) == (True, False, 0)
    answers.close()
    # What a crash left of a line must not become a part of the next.
    with Path(f"{path}.partial").open("ab") as stream:
        stream.write(b'{"line": 1, "dig')
    answers = Answers(path, digests)
    answers.add(prompts[0], {"error": {}})
    assert len(Answers(path, digests)) == 2
    answers.finish()
    assert [row["line"] for row in rows(path)] == [1, 2]
    assert Answers(path, digests).failed == 1
