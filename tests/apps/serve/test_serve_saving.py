"""Sessions reach the disk on a thread of their own: order and counts on a disk held back."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvq.errors import SnapshotError
from kvq_runtime.serving.saving import SavedSessions, as_ids
from kvq_runtime.session import snapshot
from kvq_runtime.session.session import Session
from serving import COMPLETIONS, PATIENCE_S, Rule, ask, running, wait_until


class SlowDisk:
    """A disk on which a session is written only when it may; `begun` and `ended` are counts."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._permits = threading.Semaphore(0)
        self.begun = self.ended = 0
        self.fault: Exception | None = None

    def let(self, count: int = 1) -> None:
        self._permits.release(count)

    def __call__(self, *arguments: object) -> None:
        self.begun += 1
        assert self._permits.acquire(timeout=PATIENCE_S)
        if self.fault is not None:
            raise self.fault
        self._write(*arguments)
        self.ended += 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(snapshot.write)
    monkeypatch.setattr(snapshot, "write", disk)
    yield disk
    disk.let(1000)


def refuse(error: Exception) -> Callable[..., None]:
    """Whatever it is called with, it raises `error`."""

    def refused(*_: object) -> None:
        raise error

    return refused


def prompt(number: int, tokens: int = 1) -> dict[str, object]:
    return {"prompt": [70 + number] * 100, "max_tokens": tokens}


def test_tokens_go_on_while_a_session_is_written(tmp_path: Path, disk: SlowDisk) -> None:
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=1, idle_save_s=3600) as server:
        first = ask(server, COMPLETIONS, prompt(0, 3))
        second = ask(server, COMPLETIONS, prompt(1, 3))
        assert (second.cached_tokens, second.status) == (0, 200)
        wait_until(lambda: disk.begun == 1)
        # what is on its way to the disk need not come back from there
        again = ask(server, COMPLETIONS, prompt(0, 3))
        assert again.cached_tokens == 99
        assert again.json["choices"] == first.json["choices"]
        assert (disk.begun, disk.ended) == (1, 0)
        disk.let(1000)
    # the second text, and the first with what came of it
    assert disk.ended == 3
    files = list(tmp_path.rglob("*.kvq"))
    assert len(files) == len(list(tmp_path.rglob("*.ids"))) == 2
    with running(rule.load, sessions=1) as server:
        assert ask(server, COMPLETIONS, prompt(1)).cached_tokens == 99


def test_a_disk_that_is_behind_holds_up_no_request(
    tmp_path: Path, disk: SlowDisk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=3, idle_save_s=3600) as server:
        for number in range(5):  # three held, one being written, one waiting for it
            assert ask(server, COMPLETIONS, prompt(number)).status == 200
        wait_until(lambda: disk.begun == 1)
        assert not server.pool.served.slots.saved.has_room
        for number in (5, 6):
            assert ask(server, COMPLETIONS, prompt(number)).status == 200
        assert (disk.begun, disk.ended) == (1, 0)
        assert caplog.text.count("others are still on their way to the disk") == 2
        disk.let(1000)
    # The first two, and the three that were held at the end; those between have to be read again.
    assert disk.ended == len(list(tmp_path.rglob("*.kvq"))) == 5
    with running(rule.load, sessions=1) as server:
        cached = [ask(server, COMPLETIONS, prompt(number)).cached_tokens for number in range(7)]
        assert cached == [100, 100, 0, 0, 100, 100, 100]


def test_idle_sessions_are_saved_once_the_disk_has_caught_up(
    tmp_path: Path, disk: SlowDisk
) -> None:
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=3, idle_save_s=0.01) as server:
        saved = server.pool.served.slots.saved
        for number in range(3):
            assert ask(server, COMPLETIONS, prompt(number)).status == 200
        wait_until(lambda: disk.begun == 1 and not saved.has_room)
        disk.let(1000)
        wait_until(lambda: saved.saved == 3)


def test_leaving_waits_for_the_disk(tmp_path: Path, disk: SlowDisk) -> None:
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=3, idle_save_s=3600) as server:
        for number in range(3):
            ask(server, COMPLETIONS, prompt(number))
        server.stop()
        wait_until(lambda: disk.begun == 1)
        assert not server.pool.ended
        threading.Timer(0.05, disk.let, (3,)).start()
    assert disk.ended == 3
    assert len(list(tmp_path.rglob("*.kvq"))) == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvq-writer")]


def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, disk: SlowDisk, caplog: pytest.LogCaptureFixture
) -> None:
    session = Rule(folder=tmp_path).session()
    saved = SavedSessions(tmp_path, "key", 1 << 20)
    disk.let(1000)
    session.prefill([70] * 100)
    row = saved.save(session, as_ids(session.tokens), None)
    saved.flush()
    content = row.path.read_bytes()
    disk.fault = SnapshotError("the session cannot be saved: No space left on device")
    session.prefill([71] * 50)
    for _ in range(3):
        # an earlier state of the same text stays, whole
        assert saved.save(session, as_ids(session.tokens), row).path == row.path
        assert saved.best(as_ids(session.tokens))[1] in (100, 150)
        saved.flush()
        assert saved.best(as_ids(session.tokens)) == (row, 100)
    assert row.path.read_bytes() == content
    assert caplog.text.count("No space left") == 1
    assert (saved.saved, saved.failures) == (1, 3)
    session.rollback(len(session.tokens))
    assert saved.load(session, row)
    assert session.tokens == (70,) * 100
    # a new text leaves no trace, and the writer goes on after any fault
    disk.fault = ZeroDivisionError("not foreseen")
    session.rollback(100)
    session.prefill([80] * 100)
    saved.save(session, as_ids(session.tokens), None)
    saved.flush()
    assert saved.best(as_ids(session.tokens)) == (None, 0)
    disk.fault = None
    saved.save(session, as_ids(session.tokens), None)
    saved.close()
    assert len(list(tmp_path.rglob("*.kvq"))) == len(saved) == 2
    assert list(tmp_path.rglob(".*")) == []


def test_what_fails_beside_the_writing_ends_neither_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=1, idle_save_s=3600) as server:
        saved = server.pool.served.slots.saved
        with monkeypatch.context() as patch:
            patch.setattr(Path, "glob", refuse(OSError("Too many open files")))
            for number in range(3):
                assert ask(server, COMPLETIONS, prompt(number)).status == 200
            wait_until(lambda: saved.saved == 2)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "capture", refuse(MemoryError()))
            assert ask(server, COMPLETIONS, prompt(3)).status == 200
        assert (saved.saved, saved.failures) == (2, 1)
        assert ask(server, COMPLETIONS, prompt(0)).cached_tokens == 100


def test_a_captured_session_is_that_moments(tmp_path: Path) -> None:
    rule = Rule()
    session, other = rule.session(), rule.session()
    session.prefill([70] * 40)
    copy = session.capture()
    session.rollback(30)
    session.prefill([71] * 5)
    other.restore(copy)
    assert other.tokens == (70,) * 40
    snapshot.write(tmp_path / "one.kvq", copy)
    session.load(tmp_path / "one.kvq")
    assert session.tokens == other.tokens
    narrow = Rule(context_tokens=64).session()
    with pytest.raises(SnapshotError, match="another context_tokens"):
        narrow.restore(copy)


def test_servers_that_share_a_folder_resume_each_others_sessions(tmp_path: Path) -> None:
    rule, other = Rule(folder=tmp_path), Rule(folder=tmp_path)
    with running(other.load, sessions=1) as second:
        ask(second, COMPLETIONS, prompt(1))  # it has looked, and found nothing
        with running(rule.load, sessions=1, idle_save_s=3600) as first:
            whole = ask(first, COMPLETIONS, prompt(0, 3))
        reply = ask(second, COMPLETIONS, prompt(0, 3))
        assert reply.cached_tokens == 99
        assert reply.json["choices"] == whole.json["choices"]


def plant(kind: str, path: Path) -> None:
    """What another program may leave in the place of a session's file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(path.parent.parent / "kept")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(100 << 30)


@pytest.mark.sampled
@pytest.mark.parametrize("suffix", [".ids", ".kvq"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder", "sparse"])
def test_what_is_no_file_of_a_session_is_told_once_and_never_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, suffix: str
) -> None:
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=1) as server:
        first = ask(server, COMPLETIONS, prompt(0))
    (path,) = tmp_path.rglob(f"*{suffix}")
    (tmp_path / "kept").write_bytes(path.read_bytes())
    plant(kind, path)
    caplog.clear()
    with running(rule.load, sessions=1, idle_save_s=0.01) as server:
        saved = server.pool.served.slots.saved
        reply = ask(server, COMPLETIONS, prompt(0))
        assert reply.cached_tokens == 0
        assert reply.json["choices"] == first.json["choices"]
        wait_until(lambda: saved.saved == 1)
        # The folder has changed, and is looked at again.
        assert ask(server, COMPLETIONS, prompt(1)).status == 200
    lines = [line for line in caplog.messages if line.startswith("a saved session")]
    assert len(lines) == 1, caplog.text


def test_another_users_sessions_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = SavedSessions(tmp_path, "key", 1 << 20)
    session = Rule(folder=tmp_path).session()
    session.prefill([70] * 100)
    row = saved.save(session, as_ids(session.tokens), None)
    saved.close()
    assert len(SavedSessions(tmp_path, "key", 1 << 20)) == 1
    assert len(SavedSessions(tmp_path, "key", 1 << 20, context_tokens=98)) == 0
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert len(SavedSessions(tmp_path, "key", 1 << 20)) == 0
    assert [line.partition(": ")[0] for line in caplog.messages] == [
        "a saved session is ignored"
    ] * 2
    # What is not ours is neither counted nor deleted.
    SavedSessions(tmp_path, "other", 0)._make_room(tmp_path / "none")
    assert row.path.exists()


def test_making_room_follows_no_link(tmp_path: Path) -> None:
    private, shared = tmp_path / "own", tmp_path / "shared"
    private.mkdir()
    shared.mkdir()
    (private / "talk.kvq").write_bytes(b"0" * 100)
    (shared / "planted").symlink_to(private)
    SavedSessions(shared, "key", 10)._make_room(shared / "none")
    assert (private / "talk.kvq").exists()
