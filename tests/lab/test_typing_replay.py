"""`kvq eval --task replay`: what is typed, what is counted, and a run on the embedded model."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import DataError, UsageError
from kvq_apps.cli import main
from kvq_apps.completion.document import LineChange, TextDocument
from kvq_apps.completion.edit_history import LIKELY_EDIT, LIKELY_LINES, NextEdit
from kvq_apps.completion.suggestions import LIKELY_COMPLETION, Completion, Suggestion
from kvq_lab.text_pairs import TextPair, commit_pairs, file_pairs
from kvq_lab.typing_replay import TypingReplay, hunks_between, report, tally, typing_session
from kvq_runtime.session.session import no_progress
from shelf import Shelf

OLD = "def f(name):\n    return name\n\n\nf(name=1)\nf(2)\n"
NEW = "def f(title):\n    return title\n\n\nf(title=1)\nf(2)\ng(len(title))\n"
LINE = "g(len(title))"
HUNKS = [
    LineChange(0, ("def f(name):\n",), ("def f(title):\n",)),
    LineChange(1, ("    return name\n",), ("    return title\n",)),
    LineChange(4, ("f(name=1)\n",), ("f(title=1)\n",)),
    LineChange(6, (), ("g(len(title))\n",)),
]


class ScriptedService:
    """Completes a line as `answers` says, and writes `edits` one after the other."""

    def __init__(
        self,
        answers: dict[str, Sequence[tuple[str, float] | Suggestion]],
        edits: Sequence[NextEdit] = (),
    ) -> None:
        self.answers = answers
        self.edits = list(edits)
        self.lines: list[str] = []
        self.texts: list[str] = []
        self.read_at: list[tuple[int, int]] = []
        self.histories: list[list[tuple[str, str, str]]] = []

    def complete(self, document: TextDocument, place: tuple[int, int], **_: Any) -> Completion:
        self.lines.append(document.line(place[0])[: place[1]])
        drafts = (
            draft
            if isinstance(draft, Suggestion)
            else Suggestion(text=draft[0], logprob=draft[1], steps=((len(draft[0]), draft[1]),))
            for draft in self.answers.get(self.lines[-1], ())
        )
        return Completion(drafts=tuple(drafts))

    def read(self, document: TextDocument, place: tuple[int, int], **_: Any) -> bool:
        self.read_at.append(place)
        return True

    def next_edit(self, document: TextDocument, place: tuple[int, int], **more: Any) -> NextEdit:
        self.texts.append(document.text)
        self.histories.append([(edit.uri, edit.old, edit.new) for edit in more["edits"]])
        return self.edits.pop(0) if self.edits else NextEdit()

    def close(self) -> None:
        pass


def replayed(
    service: ScriptedService, old: str = OLD, new: str = NEW, pause: str = "word", limit: int = 99
) -> TypingReplay:
    replay = TypingReplay(service, pause)
    replay.type_pairs([TextPair("a b.py", old, new)], limit, no_progress)
    return replay


def edit_of(*changes: LineChange, logprob: float = -1.0) -> NextEdit:
    return NextEdit(changes=changes, logprob=logprob)


# What is typed


@pytest.mark.parametrize(
    ("old", "new", "start", "removed", "keys"),
    [
        # A line is added from the end of the line above, and an editor indents it.
        ("a:\nc\n", "a:\n    b c\nc\n", 2, 0, ["\n    ", "b", " ", "c"]),
        ("c\n", "b\nc\n", 0, 0, ["b", "\n"]),
        # Whole names give way.
        ("a = name\n", "a = same\n", 4, 4, ["s", "a", "m", "e"]),
        ("f(a)\n", "f(a, b)\n", 3, 0, [",", " ", "b"]),
        ("f(a)\n", "f(a)(a)\n", 4, 0, ["(", "a", ")"]),
        ("a\nb\nc\n", "a\nc\n", 2, 2, []),
        ("f(a)\n", "f(\n  a)\n", 2, 0, ["\n  "]),
    ],
)  # fmt: skip
def test_a_hunk_is_deleted_first_and_then_typed(
    old: str, new: str, start: int, removed: int, keys: list[str]
) -> None:
    (hunk,) = hunks_between(old, new)
    session = typing_session("a", old, hunk)
    jump, *events = session.events
    assert jump == ["jump", start, []]
    if removed:
        assert events.pop(0) == ["delete", start, [[start, removed, ""]]]
    assert [(kind, *edits) for kind, _, edits in events] == [
        ("key", [start + len("".join(keys[:number])), 0, key]) for number, key in enumerate(keys)
    ]
    *_, last = session.moments()
    assert last.prefix + last.suffix == new
    assert len(last.prefix) == start + len("".join(keys))


def test_hunks_are_line_by_line_where_their_number_stays() -> None:
    assert hunks_between(OLD, NEW) == HUNKS
    assert hunks_between("a\nb\nc\n", "x\nb\ny\nz\n") == [
        LineChange(0, ("a\n",), ("x\n",)),
        LineChange(2, ("c\n",), ("y\n", "z\n")),
    ]
    assert hunks_between("a\nb\nc\n", "x\n  b\nz\n") == [
        LineChange(0, ("a\n",), ("x\n",)),
        LineChange(2, ("c\n",), ("z\n",)),
    ]


def test_the_service_sees_the_text_as_it_grows_and_the_hunks_so_far() -> None:
    service = ScriptedService({})
    replayed(service)
    lines = OLD.splitlines(keepends=True)
    for number, text in enumerate(service.texts):
        shown = lines.copy()
        for hunk in HUNKS[: number + 1]:
            shown[hunk.first : hunk.first + len(hunk.old)] = hunk.new
        assert text == "".join(shown)
    assert service.read_at == [(0, 6), (1, 11), (4, 2), (5, 4)]
    uri = "file:///a%20b.py"
    assert service.histories[0] == [(uri, "def f(name):\n", "def f(title):\n")]
    # Changes of lines side by side are one to a person.
    assert service.histories[1] == [
        (uri, "def f(name):\n    return name\n", "def f(title):\n    return title\n")
    ]
    assert len(service.histories[3]) == 3


@pytest.mark.parametrize(
    ("pause", "asked_after"),
    [
        ("word", [LINE[:size] for size in (0, 1, 2, 5, 6, 11, 12, 13)]),
        ("line", [""]),
        ("key", [LINE[:size] for size in range(14)]),
    ],
)  # fmt: skip
def test_a_suggestion_is_asked_for_at_pauses(pause: str, asked_after: list[str]) -> None:
    service = ScriptedService({})
    replay = replayed(service, "f(1)\nf(2)\n", "f(1)\ng(len(title))\nf(2)\n", pause)
    assert service.lines == asked_after
    assert len(replay.completion_ms) == len(asked_after)
    assert len(replay.edit_ms) == 1


# What is counted


def test_keys_saved_and_wrong_suggestions_are_counted() -> None:
    service = ScriptedService(
        {
            # Right: 12 of the 14 keys of the line that is added, with one.
            "g": [("(len(title))", LIKELY_COMPLETION)],
            # More than what is typed is wrong, also behind what was right.
            "g(len(title))": [(" + 1", LIKELY_COMPLETION / 2)],
            # Wrong, and counted as long as its beginning is typed only once.
            "def f(title": [("_text", 2 * LIKELY_COMPLETION)],
            "f(title": [],
        }
    )
    replay = replayed(service)
    # Deleting a name is a key.
    assert [hunk.keys for hunk in replay.hunks] == [6, 6, 6, 14]
    count = tally(replay.hunks, -inf)
    assert (count.keys, count.saved, count.shown, count.wrong) == (32, 11, 3, 2)
    assert (count.edits_shown, count.offered) == (0, 0)
    # While a right suggestion is typed, its rest is known.
    assert service.lines == ["def f(title", "    return title", "f(title", "", "g", "g(len(title))"]
    result = report(replay)
    assert (result["value"], result["n"]) == (11 / 32, 4)
    # As a user has it: what is likely.
    assert (result["shown"], result["wrong_share"]) == (2, 1 / 2)
    rows = result["rows"][:4]
    assert [(row["shown"], row["wrong"]) for row in rows] == [(3, 2), (3, 2), (2, 1), (2, 1)]
    assert [row["least_logprob"] for row in rows] == [
        "any", *(round(part * LIKELY_COMPLETION, 3) for part in (2, 1, 0.5)),
    ]  # fmt: skip
    # Behind the bracket, the rest of its token is certain.
    assert [row["saved"] for row in rows] == [11 / 32, 11 / 32, 11 / 32, 10 / 32]


def test_a_suggestion_that_stays_visible_is_shown_once() -> None:
    drafts = [(" = first_name - 1", -1.0), (" = first_name + (last_name)", -2.0)]
    service = ScriptedService({"x": drafts})
    replay = replayed(service, "y\n", "x = first_name + (last_name)\n")
    # Once `+` is typed, the second is left, and becomes visible at the bracket.
    assert [(pause.typed, pause.shown(-inf)) for pause in replay.hunks[0].pauses] == [
        (2, " = first_name - 1"), (15, " - 1"), (19, "last_name)"), (28, ")"), (29, ""),
    ]  # fmt: skip
    count = tally(replay.hunks, -inf)
    assert (count.shown, count.wrong, count.saved) == (2, 1, 9)
    assert service.lines == ["x", "x = first_name + (last_name)"]


def test_keys_inside_of_what_was_accepted_show_nothing() -> None:
    service = ScriptedService({"": [("ab(cd(e", -1.0)], "ab(cd(e": [("f", -1.0)]})
    replay = replayed(service, "x\n", "x\nab(cd(ef)\n")
    count = tally(replay.hunks, -1.0)
    assert (count.shown, count.wrong, count.saved) == (1, 0, 6)
    # Too unlikely at first; behind a bracket the rest of its token is certain.
    assert tally(replay.hunks, -0.5).saved == 4


def test_the_likely_part_is_shown_and_its_rest_when_that_is_typed() -> None:
    steps = ((2, -0.1), (5, -0.2), (8, -0.3), (10, -1.3))
    draft = Suggestion(text=" = ab().cd", logprob=-1.3, steps=steps)
    replay = replayed(ScriptedService({"x": [draft]}), "y\n", "x = ab().cd\n")
    # What is typed is certain, so that the next token counts by itself.
    assert [(pause.typed, pause.shown(-0.25)) for pause in replay.hunks[0].pauses[:4]] == [
        (2, " = ab"), (7, "()."), (8, ")."), (9, ""),
    ]  # fmt: skip
    count = tally(replay.hunks, -0.25)
    assert (count.shown, count.wrong, count.saved) == (2, 0, 6)


def test_edits_that_come_later_are_offered() -> None:
    later = [hunk._replace(first=hunk.first) for hunk in HUNKS]
    wrong = LineChange(4, ("f(name=1)\n",), ("f(title=2)\n",))
    edits = [
        edit_of(*later[1:3]),
        edit_of(later[2], logprob=-2.0),
        edit_of(wrong, logprob=-1.0),
        edit_of(later[0], logprob=-5.0),
    ]
    service = ScriptedService({"    return title": [("s", -0.3)], "f(title": [("s", -0.3)]}, edits)
    replay = replayed(service)
    assert [hunk.ahead for hunk in replay.hunks] == [{1, 2}, {2}, set(), set()]
    count = tally(replay.hunks)
    # Two hunks of six keys are taken with a key each, and nothing is shown while they are made; the
    # second edit was taken with the first, and the last one is too unlikely.
    assert (count.saved, count.shown) == (10, 0)
    assert (count.edits_shown, count.edits_wrong, count.offered) == (2, 1, 2)
    unsure = tally(replay.hunks, edit_logprob=-inf)
    assert (unsure.edits_shown, unsure.edits_wrong) == (3, 2)
    sure = tally(replay.hunks, edit_logprob=-0.5)
    assert (sure.edits_shown, sure.saved, sure.shown, sure.wrong) == (0, 0, 2, 2)


def test_an_edit_is_right_only_where_all_of_it_comes() -> None:
    moved = LineChange(3, HUNKS[2].old, HUNKS[2].new)
    edits = [edit_of(HUNKS[1], moved), edit_of(moved), edit_of(HUNKS[1])]
    replay = replayed(ScriptedService({}, edits))
    assert [len(hunk.ahead) for hunk in replay.hunks] == [0, 0, 0, 0]
    # Lines that were added above move what comes.
    service = ScriptedService({}, [edit_of(LineChange(3, ("c\n",), ("d\n",)))])
    assert replayed(service, "a\nb\nc\n", "a\nx\nb\nd\n").hunks[0].ahead == {1}


def test_edits_are_shown_as_the_language_server_shows_them() -> None:
    lines = tuple(f"{number}\n" for number in range(LIKELY_LINES + 1))
    shown = [
        tally(replayed(ScriptedService({}, [edit])).hunks).edits_shown
        for edit in (
            edit_of(LineChange(4, (), lines[1:]), logprob=LIKELY_EDIT),
            edit_of(LineChange(4, (), lines), logprob=LIKELY_EDIT),
            edit_of(LineChange(4, (), lines[1:]), logprob=LIKELY_EDIT - 0.1),
        )
    ]
    assert shown == [1, 0, 0]


def test_the_limit_counts_hunks_of_all_files_and_a_model_without_edits_says_so() -> None:
    edits = [NextEdit(why_not="no tokens", impossible=True), edit_of(HUNKS[1])]
    replay = TypingReplay(ScriptedService({}, edits))
    progress: list[tuple[int, int]] = []
    pairs = [TextPair("a", "a\n", "a \n"), TextPair("b", "a\n", "b\n"), TextPair("c", OLD, NEW)]
    replay.type_pairs(iter(pairs), 3, lambda *amounts: progress.append(amounts))
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert [hunk.keys for hunk in replay.hunks] == [2, 6, 6]
    assert [hunk.ahead for hunk in replay.hunks] == [set(), {2}, set()]
    assert report(replay)["no_edits"] == "no tokens"
    with pytest.raises(DataError, match="nothing was changed"):
        TypingReplay(ScriptedService({})).type_pairs(pairs[:1], 3, no_progress)


# Where versions come from


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_files_of_two_folders_are_paired_by_their_paths(tmp_path: Path) -> None:
    old = write(
        tmp_path / "1",
        {"b/x.py": "a\r\nb\r", "a.py": "1", "same.py": "2", "c.md": "3", "gone": "", ".git/a": "1",
         "d": b"\xff"},
    )  # fmt: skip
    new = write(
        tmp_path / "2",
        {"b/x.py": "a\nc\n", "a.py": "2", "same.py": "2", "c.md": "4", "come": "", ".git/a": "2",
         "d": b"\xfe"},
    )  # fmt: skip
    pairs = list(file_pairs(str(old), str(new)))
    assert [pair.name for pair in pairs] == ["a.py", "b/x.py", "c.md"]
    assert pairs[1] == TextPair("b/x.py", "a\nb\n", "a\nc\n")
    assert [pair.name for pair in file_pairs(str(old), str(new), "*.md")] == ["c.md"]
    files = [str(folder / "a.py") for folder in (old, new)]
    assert list(file_pairs(files[0], files[1])) == [TextPair("a.py", "1", "2")]
    with pytest.raises(UsageError, match="two files, or two folders"):
        list(file_pairs(str(old), files[1]))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not here")
def test_commits_are_read_from_the_newest_on(tmp_path: Path) -> None:
    people = [f"GIT_{role}_{key}" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")]
    environment = os.environ | dict.fromkeys(people, "a")

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], env=environment, check=True)

    git("init", "-q")
    for number in range(3):
        write(tmp_path, {"p/ä b.py": f"{number}\n", "top.py": f"{number}\n", f"new{number}": "a"})
        git("add", "-A")
        git("commit", "-q", "--no-verify", "-m", "a")
    pairs = list(commit_pairs(str(tmp_path)))
    assert pairs[:2] == [TextPair("p/ä b.py", "1\n", "2\n"), TextPair("top.py", "1\n", "2\n")]
    assert [(pair.old, pair.new) for pair in pairs[2:]] == [("0\n", "1\n")] * 2
    assert [pair.name for pair in commit_pairs(str(tmp_path / "p"))] == ["ä b.py"] * 2
    with pytest.raises(UsageError, match=r"not a git repository.*give a folder"):
        list(commit_pairs("/"))


# The command


@pytest.mark.parametrize("words", [[], ["a.py"], ["a.py", "a.py", "a.py"], ["a.py", "--git", "."]])
def test_two_versions_are_needed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(write(tmp_path, {"a.py": "a"}))
    assert main(["eval", "--task", "replay", "-m", "default", *words]) == 2
    assert "--task replay" in capsys.readouterr().err


@pytest.mark.slow
def test_the_embedded_model_completes_what_is_typed(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, {"old.py": OLD, "new.py": NEW})
    model = str(shelf.embedded("default"))
    command = ["eval", "--task", "replay", "-m", model, "--json", "--limit", "4"]
    reports = []
    for _ in range(2):
        assert main([*command, str(folder / "old.py"), str(folder / "new.py")]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    for result in reports:
        assert (result["task"], result["n"], result["keys"]) == ("replay", 4, 32)
        assert 0 < result.pop("completion_p50_ms") <= result.pop("completion_p95_ms")
        assert 0 < result.pop("edit_p50_ms") <= result.pop("edit_p95_ms")
        assert result["shown"] >= result["wrong"]
        assert result["value"] == result["saved"] / 32
    assert reports[0] == reports[1]
    assert main(["eval", "--task", "ppl", "--pause", "key", "-m", model, __file__]) == 2
    assert "--pause is for replay only" in capsys.readouterr().err
