"""The database of chats: branches, search, crashes, two processes, files it must not touch."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from environment import ROOTS
from kvq.errors import DataError
from kvq_apps.chat import conversation as conversation_module
from kvq_apps.chat import history as history_module
from kvq_apps.chat.conversation import ChatConversation
from kvq_apps.chat.history import MIGRATIONS, History, SnapshotRow
from kvq_apps.chat.interchange import export_chat, import_chat
from kvq_apps.chat.messages import Message, ReplyStats


def talk(history: History, *texts: str) -> ChatConversation:
    """A chat with these messages, the user's and the model's in turn."""
    conversation = ChatConversation(lambda write: write(history))
    for index, text in enumerate(texts):
        if index % 2:
            conversation.add("assistant", "")
            conversation.feed(text)
            conversation.finish("done", ReplyStats(new_tokens=len(text)))
        else:
            conversation.add("user", text)
    return conversation


def texts_of(history: History, chat_id: str) -> list[str]:
    return [message.text for message in history.branch(chat_id)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "chats.sqlite3"


def test_a_chat_comes_back_as_it_was(path: Path) -> None:
    history = History(path)
    chat = talk(history, "Hi \x00\x1b there", "Hello 👋", "And?", "So.")
    history.close()
    history = History(path)
    assert texts_of(history, chat.id) == ["Hi \x00\x1b there", "Hello 👋", "And?", "So."]
    assert history.branch(chat.id)[1].stats["new_tokens"] == 7
    assert [row.title for row in history.chats()] == ["Hi \x00\x1b there"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    history.close()


def sibling_ids(history: History, chat_id: str, message_id: str) -> list[str]:
    return [message.id for message in history.sibling_messages(chat_id, message_id)]


def test_an_edit_makes_a_sibling_and_old_children_stay(path: Path) -> None:
    history = History(path)
    chat = talk(history, *(f"m{number}" for number in range(10)))
    third = chat.messages[2]
    edited = chat.add("user", "m2 edited", instead_of=third)
    assert (edited.branch, edited.branches) == (2, 2)
    assert texts_of(history, chat.id) == ["m0", "m1", "m2 edited"]
    assert sibling_ids(history, chat.id, edited.id) == [third.id, edited.id]
    history.choose(chat.id, third.id)
    assert texts_of(history, chat.id) == [f"m{number}" for number in range(10)]
    assert [(m.branch, m.branches) for m in history.branch(chat.id)][1:4] == [
        (1, 1),
        (1, 2),
        (1, 1),
    ]
    history.choose(chat.id, edited.id)
    assert texts_of(history, chat.id)[-1] == "m2 edited"
    history.close()


def test_the_first_message_can_be_edited_too() -> None:
    history = History(None)
    chat = talk(history, "a", "b")
    first = chat.messages[0]
    chat.add("user", "c", instead_of=first)
    assert texts_of(history, chat.id) == ["c"]
    assert len(sibling_ids(history, chat.id, first.id)) == 2
    # Another chat's first messages are nobody's siblings here.
    other = talk(history, "x")
    assert len(sibling_ids(history, other.id, other.messages[0].id)) == 1


def test_search_finds_words_prefixes_and_text_without_spaces() -> None:
    history = History(None)
    fox = talk(history, 'the quick brown fox "said"', "it jumps")
    talk(history, "something else")
    chinese = talk(history, "我喜欢量化缓存")
    assert [row.id for row in history.search("brown fox")] == [fox.id]
    assert [row.id for row in history.search("jum")] == [fox.id]
    assert [row.id for row in history.search("量化")] == [chinese.id]
    assert history.search("brown cow") == []
    assert history.search("100%_") == history.search("\udcff") == []
    for hostile in ('"', "'; DROP TABLE chat; --", "* OR", "NEAR(", "a:b", "-", "%"):
        history.search(hostile)
    assert len(history.search("")) == 3
    assert "quick" in history.search("quick")[0].excerpt


def test_two_histories_on_one_file_see_each_other(path: Path) -> None:
    first, second = History(path), History(path)
    ids = []
    for number in range(20):
        ids.append(talk(first if number % 2 else second, f"chat {number}", "yes").id)
    assert {row.id for row in first.chats()} == {row.id for row in second.chats()} == set(ids)
    first.close()
    second.close()


def test_writers_in_two_processes_never_see_a_lock(path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from kvq_apps.chat.history import History
        from kvq_apps.chat.conversation import ChatConversation
        from kvq_apps.chat.messages import ReplyStats
        history = History(Path(sys.argv[1]), on_trouble=lambda text: sys.exit(text))
        for number in range(40):
            chat = ChatConversation(lambda write: write(history))
            chat.add("user", f"question {number}")
            chat.add("assistant", "")
            chat.feed("an answer")
            chat.finish("done", ReplyStats())
        """
    )
    environment = os.environ | ROOTS
    command = [sys.executable, "-c", program, str(path)]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(300) for process in running] == [0, 0]
    history = History(path)
    assert len(history.chats()) == 80
    history.close()


def test_a_first_opening_waits_for_another_ones_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing the journal of a new file is the one moment SQLite itself does not wait in."""
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(history_module, "BUSY_TIMEOUT_S", 300.0)
    holder = sqlite3.connect(path, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.1, holder.rollback)
    release.start()
    troubles: list[str] = []
    history = History(path, on_trouble=troubles.append)
    assert history.chats() == []
    release.join()
    holder.close()
    history.close()
    assert troubles == []


def test_kill_in_the_middle_keeps_the_message_and_the_chunks(path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from itertools import count
        from pathlib import Path
        from kvq_apps.chat import conversation
        from kvq_apps.chat.history import History
        ticks = count()
        conversation.monotonic = lambda: next(ticks) * 0.005
        history = History(Path(sys.argv[1]))
        chat = conversation.ChatConversation(lambda write: write(history))
        chat.add("user", "question")
        chat.add("assistant", "")
        for number in range(100_000):
            chat.feed(f"{number} ")
            print(number, flush=True)
        """
    )
    environment = os.environ | ROOTS
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for number in range(120):
        assert int(process.stdout.readline()) == number
    process.kill()
    process.communicate()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    history = History(path)
    (chat,) = history.chats()
    question, answer = history.branch(chat.id)
    assert (question.text, answer.state) == ("question", "interrupted")
    numbers = [int(word) for word in answer.text.split()]
    assert numbers == list(range(len(numbers)))
    # Of its own clock, 5 ms a word, all but the last 250 ms is there.
    assert len(numbers) >= 120 - 50
    assert [row.id for row in history.search("question")] == [chat.id]
    history.close()


def test_a_living_process_keeps_its_stream(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = History(path)
    chat = talk(first, "question")
    chat.add("assistant", "")
    monkeypatch.setattr(history_module.os, "getpid", lambda: 1)
    second = History(path)
    assert second.branch(chat.id)[-1].state == "streaming"
    first.close()
    second.close()


def corrupt(path: Path) -> None:
    History(path).close()
    content = bytearray(path.read_bytes())
    content[: len(content) // 2] = os.urandom(len(content) // 2)
    path.write_bytes(content)


def newer(path: Path) -> None:
    History(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def no_database(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is a letter to my aunt, not a database. " * 40)


def a_folder(path: Path) -> None:
    path.mkdir(parents=True)


def below_a_file(path: Path) -> None:
    path.parent.write_text("in the way")


@pytest.mark.parametrize("spoil", [corrupt, newer, no_database, a_folder, below_a_file])
def test_what_cannot_be_used_is_left_alone(spoil: object, path: Path) -> None:
    spoil(path)  # type: ignore[operator]
    before = path.read_bytes() if path.is_file() else None
    troubles: list[str] = []
    history = History(path, on_trouble=troubles.append)
    chat = talk(history, "still works", "yes")
    assert texts_of(history, chat.id) == ["still works", "yes"]
    assert not history.saved
    assert len(troubles) == 1
    assert str(path) in troubles[0]
    assert "nothing was deleted" in troubles[0]
    history.close()
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_newer_database_says_what_to_do(path: Path) -> None:
    newer(path)
    troubles: list[str] = []
    History(path, on_trouble=troubles.append).close()
    assert "version 99" in troubles[0]
    assert "upgrade kvq-runtime" in troubles[0]


def test_a_full_disk_moves_the_chats_to_memory(path: Path) -> None:
    troubles: list[str] = []
    history = History(path, on_trouble=troubles.append)
    old = talk(history, "before", "fine")
    pages = history._db.execute("PRAGMA page_count").fetchone()[0]
    history._db.execute(f"PRAGMA max_page_count = {pages}")
    chat = talk(history, "x" * 100_000, "y" * 100_000)
    assert len(troubles) == 1
    assert "full" in troubles[0]
    assert texts_of(history, chat.id) == ["x" * 100_000, "y" * 100_000]
    assert texts_of(history, old.id) == ["before", "fine"]
    history.close()
    assert texts_of(History(path), old.id) == ["before", "fine"]


def test_a_read_only_database_is_read_and_the_chat_goes_on(path: Path) -> None:
    history = History(path)
    old = talk(history, "before", "fine")
    troubles: list[str] = []
    history._on_trouble = troubles.append
    history._db.execute("PRAGMA query_only = 1")
    chat = talk(history, "now", "too")
    assert texts_of(history, old.id) == ["before", "fine"]
    assert texts_of(history, chat.id) == ["now", "too"]
    assert len(troubles) == 1
    history.close()


def test_migrations_run_once_after_copying_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(path)
    chat = talk(history, "old")
    history.close()
    script = "ALTER TABLE chat ADD COLUMN colour TEXT; UPDATE chat SET colour = 'red'"
    monkeypatch.setattr(history_module, "MIGRATIONS", (*MIGRATIONS, script))
    history = History(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT colour FROM chat").fetchone() == ("red",)
    assert texts_of(history, chat.id) == ["old"]
    history.close()
    copy = path.with_name(f"chats.sqlite3.version-{len(MIGRATIONS)}")
    with sqlite3.connect(copy) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert db.execute("SELECT count(*) FROM message").fetchone() == (1,)
    db.close()
    History(path).close()


def test_snapshots_and_settings() -> None:
    history = History(None)
    chat = talk(history, "a")
    assert history.snapshot(chat.id) is None
    row = SnapshotRow(path="/x.kv", model="m", kv_plan="4:2")
    history.remember_snapshot(chat.id, row)
    assert history.snapshot(chat.id) == row
    history.set("theme", "nord")
    assert (history.setting("theme"), history.setting("other")) == ("nord", None)


# Files in and out

CHAT = [
    Message(role="system", text="Be brief."),
    Message(role="user", text="Hi\n\n## user\nnot a heading"),
    Message(role="assistant", text="Hello 👋", stats={"new_tokens": 2}, created_s=5.0),
]


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.md"])
def test_a_chat_survives_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    export_chat(path, [*CHAT, Message(role="note", text="only on screen")])
    again = import_chat(path)
    assert [(m.role, m.text) for m in again] == [(m.role, m.text) for m in CHAT]
    if name.endswith("jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert list(rows[2]) == ["role", "content", "ts", "stats"]
        assert (rows[2]["ts"], rows[2]["stats"]) == (5, {"new_tokens": 2})


def test_chatgpt_exports_are_read(tmp_path: Path) -> None:
    def node(role: str, text: str, parent: str | None) -> dict[str, object]:
        content = {"parts": [text, {"image": 1}]}
        return {"message": {"author": {"role": role}, "content": content}, "parent": parent}

    mapping = {
        "root": {"message": None, "parent": None},
        "a": node("user", "Hi", "root"),
        "b": node("assistant", "old", "a"),
        "c": node("assistant", "Hello", "a"),
    }
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([{"mapping": mapping, "current_node": "c"}]))
    assert [(m.role, m.text) for m in import_chat(path)] == [("user", "Hi"), ("assistant", "Hello")]
    mapping["a"]["parent"] = "c"
    path.write_text(json.dumps([{"mapping": mapping, "current_node": "c"}]))
    assert len(import_chat(path)) == 2


@pytest.mark.parametrize(
    "content",
    ["", "not json", "[1]", '{"role": "king", "content": "x"}', '{"role": "user"}', "{}",
     '{"role": "assistant", "content": ""}', '{"mapping": {"a": 5}, "current_node": "a"}',
     pytest.param("[" * 100_000, id="deep")],
)  # fmt: skip
def test_files_that_hold_no_chat_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"x\.jsonl"):
        import_chat(path)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        export_chat(tmp_path / "no" / "where.jsonl", CHAT)


def test_the_context_is_what_the_model_is_given() -> None:
    chat = talk(History(None), *(f"m{number}" for number in range(7)))
    chat.messages[1].text = ""
    assert [m.text for m in chat.context()] == ["m0", "m2", "m3", "m4", "m5", "m6"]
    assert leave_out(chat, 1) == ["m0"]
    assert [m.text for m in chat.context()] == ["m2", "m3", "m4", "m5", "m6"]
    assert [leave_out(chat, 1) for _ in range(3)] == [["m2", "m3"], ["m4", "m5"], []]
    assert [m.text for m in chat.context()] == ["m6"]


def leave_out(chat: ChatConversation, characters: int) -> list[str]:
    """Leaves the oldest turns out that have so many characters; their texts."""
    old = chat.oldest_turns(characters)
    if old:
        chat.leave_out(old)
    return [message.text for message in old]


def test_as_many_turns_go_as_must_and_the_last_question_stays() -> None:
    texts = ["q" * 10, "a" * 10, "q" * 10, "a" * 70, "q" * 10, "a" * 10, "last"]
    chat = talk(History(None), *texts)
    assert [len(chat.oldest_turns(size)) for size in (1, 20, 21, 100, 101, 9999)] == [
        2, 2, 4, 4, 6, 6
    ]  # fmt: skip
    assert chat.oldest_turns(101)[-1].text == "a" * 10


def test_a_summary_stands_for_what_is_left_out_and_comes_back(path: Path) -> None:
    history = History(path)
    chat = ChatConversation(lambda write: write(history), system="Be brief.")
    for role, text in (("user", "one"), ("assistant", "two"), ("user", "three")):
        chat.add(role, text)
    chat.leave_out(chat.oldest_turns(1), "we counted")
    context = [(m.role, m.text) for m in chat.context()]
    assert context[0] == ("system", "Be brief.")
    assert context[1:] == [("user", "(What was said before, summed up: we counted)\n\nthree")]
    assert chat.num_left_out == 2
    # The messages themselves are as they were, here and on disk.
    assert [m.text for m in chat.messages] == ["Be brief.", "one", "two", "three"]
    history.close()
    history = History(path)
    saved = history.saved_chat(chat.id)
    assert saved is not None
    assert [m.text for m in saved.messages] == ["Be brief.", "one", "two", "three"]
    again = ChatConversation(lambda write: write(history))
    again.show(saved)
    assert [(m.role, m.text) for m in again.context()] == context
    # On a branch without the first message left, nothing is left out.
    again.add("user", "other", instead_of=again.messages[1])
    assert [m.text for m in again.context()] == ["Be brief.", "other"]
    assert again.num_left_out == 0
    history.close()


def test_a_database_of_the_first_version_gets_its_summaries(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "MIGRATIONS", MIGRATIONS[:1])
    History(path).close()
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO chat (id, title, created, updated) VALUES ('c', 'old', 1, 1)")
    monkeypatch.setattr(history_module, "MIGRATIONS", MIGRATIONS)
    history = History(path)
    saved = history.saved_chat("c")
    assert saved is not None
    assert (saved.title, saved.summary, saved.first_id) == ("old", "", None)
    assert history.saved_chat("nowhere") is None
    history.close()


def test_chunks_wait_250_ms_at_most(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(conversation_module, "monotonic", lambda: now[0])
    history = History(path)
    chat = talk(history, "q")
    chat.add("assistant", "")
    for _ in range(100):
        chat.feed("x")
        now[0] += 1 / 64
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT length(text) FROM chunk ORDER BY message_id, seq").fetchall()
    assert [length for (length,) in rows][1:] == [1, *[16] * 6]
    now[0] += 1
    chat.feed("")
    assert len(history.branch(chat.id)[-1].text) == 100
