"""Sessions of a server: prefixes found again, the disk, leaving and coming back."""

import json
import os
import signal
import stat
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from kvq_apps.serve.server import Server
from kvq_runtime.serving.pool import Counts
from kvq_runtime.serving.saving import SavedSessions, as_ids
from kvq_runtime.serving.slots import Slot, Slots
from kvq_runtime.session.snapshot import SnapshotError
from serving import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    PATIENCE_S,
    Reply,
    Rule,
    ask,
    chat,
    fault,
    leased,
    loaded,
    metric,
    process,
    read_all,
    running,
    send,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("own_state")


# Prefixes, arenas and the disk (SRV-14, SRV-23)


def test_a_conversation_is_read_once(rule: Rule, served: Server) -> None:
    messages = [{"role": "user", "content": "How many pages does a session hold?"}]
    first = ask(served, CHAT, {"messages": messages, "max_tokens": 6})
    assert first.cached_tokens == 0
    answer = first.json["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
    rule.backend.passes.clear()
    second = ask(served, CHAT, {"messages": messages, "max_tokens": 1})
    # all of the first prompt and of the answer, but what its end made different
    assert second.cached_tokens >= first.json["usage"]["prompt_tokens"] + 4
    prompt = second.json["usage"]["prompt_tokens"]
    read = [len(ids) for one_pass in rule.backend.passes for ids in one_pass]
    assert sum(read) == prompt - second.cached_tokens
    # an earlier message edited: only what stands before it is reused
    messages[0]["content"] = messages[0]["content"].replace("session", "bundle")
    third = ask(served, CHAT, {"messages": messages, "max_tokens": 1})
    assert 0 < third.cached_tokens < first.json["usage"]["prompt_tokens"]
    off = ask(served, CHAT, {"messages": messages, "max_tokens": 1, "cache_prompt": False})
    assert off.cached_tokens == 0
    assert off.json["choices"] == third.json["choices"]


def test_more_conversations_than_arenas_go_to_disk_and_back(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path / "sessions")
    with running(rule.load, sessions=2, idle_save_s=3600) as server:
        prompts = [[70 + number] * 100 for number in range(4)]
        texts = []
        for ids in prompts:
            reply = ask(server, COMPLETIONS, {"prompt": ids, "max_tokens": 2})
            assert reply.cached_tokens == 0
            texts.append(reply.json["choices"][0]["text"])
        wait_until(lambda: metric(server, "sessions_saved_total") == 2)
        for ids, text in zip(prompts, texts, strict=True):
            rule.backend.passes.clear()
            reply = ask(server, COMPLETIONS, {"prompt": ids, "max_tokens": 2})
            assert reply.cached_tokens == 99
            assert sum(map(len, rule.backend.passes)) == 2
            assert reply.json["choices"][0]["text"] == text
        assert metric(server, "sessions_restored_total") == 4
        assert len(rule.sessions) == 2
        assert metric(server, "kv_budget_bytes") == 2 << 20
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    folders = {stat.S_IMODE(path.parent.stat().st_mode) for path in files}
    assert folders == {0o700}


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_prompt_is_found_again_by_its_owner_only(sessions: int, tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    prompt = [70] * 50 + [71] * 50

    def cached_tokens(salt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
        # While the disk is behind, a text that another takes the place of is not saved.
        wait_until(lambda: server.pool.served.slots.saved.has_room)
        return ask(server, COMPLETIONS, body).cached_tokens

    with running(rule.load, sessions=sessions, idle_save_s=0.0) as server:
        assert [cached_tokens(salt) for salt in ("a", "a", "b", "", "b")] == [0, 100, 0, 0, 100]
        # with one slot the text comes back from the disk, and from its owner's file
        wait_until(lambda: metric(server, "sessions_saved_total") >= 1)
        assert cached_tokens("c") == 0
        assert cached_tokens("a") == 100


def test_a_short_common_beginning_does_not_destroy_a_long_session(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=1, idle_save_s=3600) as server:
        head = [70] * 40
        ask(server, COMPLETIONS, {"prompt": head + [71] * 300, "max_tokens": 1})
        other = ask(server, COMPLETIONS, {"prompt": head + [72] * 10, "max_tokens": 1})
        assert other.cached_tokens == 40
        again = ask(server, COMPLETIONS, {"prompt": head + [71] * 300, "max_tokens": 1})
        # the logits of the prompt's last token are still held
        assert again.cached_tokens == 340


def test_an_editors_keystrokes_leave_the_chats_alone(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path, infills=True)
    talks = [chat(f"{number} " + "How many pages does a session hold? " * 4) for number in range(2)]
    with running(rule.load, sessions=4, idle_save_s=3600) as server:
        for talk in talks:
            ask(server, CHAT, {**talk, "max_tokens": 2})
        for number in range(12):
            body = {"input_prefix": f"x{number} = ", "input_suffix": "\nprint(x)" * 20}
            assert ask(server, "/infill", {**body, "n_predict": 3}).json["tokens_predicted"] == 3
        assert metric(server, "sessions_saved_total") == 0
        filled = [slot for slot in server.pool.served.slots.all if len(slot.tokens)]
        assert [slot.transient for slot in filled].count(True) == 1
        for talk in talks:
            reply = ask(server, CHAT, {**talk, "max_tokens": 2})
            assert reply.cached_tokens == reply.json["usage"]["prompt_tokens"] - 1
    # only the chats are worth a file
    assert len(list(tmp_path.rglob("*.kvq"))) == 2


@pytest.mark.parametrize("damage", ["flip", "remove", "ids", "foreign"])
def test_a_damaged_session_file_costs_time_only(
    damage: str, bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = loaded(bundle, context_tokens=512)
    body = {
        "prompt": "The quick brown fox jumps over the lazy dog. " * 4,
        "max_tokens": 8,
        **GREEDY,
    }
    with running(load, sessions=1) as server:
        text = ask(server, COMPLETIONS, body).json["choices"][0]["text"]
    (path,) = tmp_path.rglob("*.kvq")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "remove":
        path.unlink()
    elif damage == "ids":
        path.with_suffix(".ids").write_bytes(b"123")
    else:
        options = {"context_tokens": 256}
        with running(loaded(bundle, **options), sessions=1) as server:
            ask(server, COMPLETIONS, body)
        (other,) = set(tmp_path.rglob("*.kvq")) - {path}
        path.write_bytes(other.read_bytes())
    with running(load, sessions=1) as server:
        reply = ask(server, COMPLETIONS, body)
        assert reply.cached_tokens == 0
        assert reply.json["choices"][0]["text"] == text
        failures = metric(server, "session_files_failed_total")
    assert failures == (1 if damage in ("flip", "truncate", "foreign") else 0)


def test_a_full_disk_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise SnapshotError("the session cannot be saved: No space left on device")

    monkeypatch.setattr("kvq_runtime.session.snapshot.write", full)
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=1, idle_save_s=0.01) as server:
        for number in range(6):
            body = {"prompt": [70 + number % 3] * 100, "max_tokens": 3}
            assert ask(server, COMPLETIONS, body).status == 200
            wait_until(lambda n=number: metric(server, "session_files_failed_total") > n)
        assert metric(server, "sessions_saved_total") == 0
    assert "No space left" in caplog.text
    assert list(tmp_path.rglob("*.kvq")) == []


def test_saved_sessions_stay_within_their_bytes(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    session = rule.session()
    saved = SavedSessions(tmp_path, "key", 8000)
    rows = []
    for number in range(6):
        session.rollback(len(session.tokens))
        session.prefill([70 + number] * 200)
        rows.append(saved.save(session, as_ids(session.tokens), None))
        saved.flush()
        os.utime(rows[-1].path, (number, number)) if rows[-1].path.exists() else None
        total = sum(path.stat().st_size for path in tmp_path.rglob("*.kvq"))
        assert total <= 8000
    assert 1 <= len(saved) < 6
    assert rows[-1].path.exists()
    assert saved.best(as_ids([75] * 200))[1] == 200
    assert saved.best(as_ids([70] * 200)) == (None, 0)
    # one that can never fit is not even tried
    assert (
        SavedSessions(tmp_path, "key", 100).save(session, as_ids([1] * 99), None).path.exists()
        is False
    )
    longer = as_ids([*session.tokens, 1, 2, 3])
    assert saved.save(session, longer, rows[-1]).path == rows[-1].path
    saved.close()


def test_half_written_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    session = rule.session()
    session.prefill([70] * 50)
    saved = SavedSessions(tmp_path, "key", 1 << 20)
    row = saved.save(session, as_ids(session.tokens), None)
    saved.close()
    old, young = (row.path.with_name(f".{name}.kvq-abc") for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert len(SavedSessions(tmp_path, "key", 1 << 20)) == 1
    assert (old.exists(), young.exists()) == (False, True)


def test_a_squeezed_session_is_not_reused_for_what_fits(rule: Rule) -> None:
    session = rule.session()
    arena: Any = SimpleNamespace(whole_tokens=100)
    session.sequence.config = replace(session.sequence.config, arena=arena)
    slot = Slot(session)

    def reused(length: int) -> int:
        ids = [70] * length
        count = slot.align(ids)
        if session.pending_tokens:
            session.prefill()
        slot.settle()
        return count

    assert [reused(length) for length in (80, 90, 150, 160)] == [0, 80, 90, 150]
    # what was given up for 160 tokens would be missing from 60, so these are read anew
    assert [reused(length) for length in (60, 70)] == [0, 60]


def test_what_an_editor_changed_is_found_once(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """What told which slot to take is what the cache is edited by, and for this text alone."""
    slots = Slots(rule.session, 2, SavedSessions(Path(), "key", 0))
    text = [*range(70, 150)]
    edited = [*text[:20], 60, 61, *text[20:]]

    def reuse(ids: list[int]) -> int:
        slot = leased(slots, ids, owner="me", transient=True)
        kept = slot.align(ids, edits=True)
        assert list(slot.session.tokens) == ids
        slot.session.prefill()
        slots.release(slot)
        return kept

    assert reuse(text) == 0
    with monkeypatch.context() as patched:
        patched.setattr("kvq_runtime.sequence.sequence.hunks", None)
        assert reuse(edited) > 60
    (slot,) = (slot for slot in slots.all if len(slot.tokens))
    assert slot.align(text, edits=True) > 60
    assert slot.session.tokens == tuple(text)


def test_a_text_that_idle_time_cannot_refresh_is_forgotten(rule: Rule) -> None:
    slots = Slots(rule.session, 1, SavedSessions(Path(), "key", 0))
    (slot,) = slots.all
    text = [*range(70, 150)]
    slot.align(text)
    slot.session.prefill()
    slot.align([*text[:20], 60, *text[20:]], edits=True)
    slots.release(slot)
    rule.backend.fails_on = dict.fromkeys(text, fault())
    assert slots.refresh_idle(0.0, 16)
    assert (len(slot.tokens), slot.session.tokens, slot.stale) == (0, (), False)
    assert not slots.refresh_idle(0.0, 16)


# Leaving (SRV-13), a real process (SRV-14, SRV-22)


def test_leaving_ends_streams_with_an_error_and_refuses_newcomers(rule: Rule) -> None:
    backend = rule.backend
    with ExitStack() as stack:
        server = stack.enter_context(running(rule.load, sessions=1, grace_s=PATIENCE_S))
        backend.shut = True
        body = {"prompt": "abc", "max_tokens": 900, "stream": True}
        stream = stack.enter_context(send(server, COMPLETIONS, body))
        wait_until(lambda: server.pool.queue == (0, 1))
        queued = stack.enter_context(send(server, COMPLETIONS, {"prompt": "abc"}))
        wait_until(lambda: server.pool.queue == (1, 1))
        backend.let(5)
        wait_until(lambda: backend.arrivals == 6)
        server.stop()
        assert Reply(read_all(queued)).status == 503
        for path, ask_body in (("/health", None), (COMPLETIONS, {"prompt": "hi"})):
            reply = ask(server, path, ask_body)
            assert (reply.status, reply.json["error"]["code"]) == (503, "shutting_down")
        server.stop()
        wait_until(lambda: server.pool._stopping)
        backend.let(2)
        events = Reply(read_all(stream)).events
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert last["error"]["type"] == "unavailable_error"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert len(text) >= 5
    assert rule.text("abc", 10).startswith(text)


def test_a_short_answer_may_end_while_leaving(rule: Rule) -> None:
    backend = rule.backend
    with ExitStack() as stack:
        server = stack.enter_context(running(rule.load, sessions=1, grace_s=PATIENCE_S))
        backend.shut = True
        stream = stack.enter_context(send(server, COMPLETIONS, {"prompt": "abc", "max_tokens": 4}))
        wait_until(lambda: server.pool.queue == (0, 1))
        server.stop()
        wait_until(lambda: server.pool.draining)
        backend.open()
        assert Reply(read_all(stream)).json["choices"][0]["text"] == rule.text("abc", 4)


def test_what_has_a_slot_and_has_not_begun_is_answered_while_leaving(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running(rule.load, sessions=1, grace_s=PATIENCE_S))
        release, begin = Event(), server.pool._begin

        def late(*job_and_model: Any) -> None:
            assert release.wait(PATIENCE_S)
            begin(*job_and_model)

        monkeypatch.setattr(server.pool, "_begin", late)
        stack.callback(release.set)
        stream = stack.enter_context(send(server, COMPLETIONS, {"prompt": "abc", "max_tokens": 4}))
        wait_until(lambda: server.pool.queue == (0, 1))
        server.stop()
        wait_until(lambda: server.pool.draining)
        assert server.pool.busy
        release.set()
        assert Reply(read_all(stream)).json["choices"][0]["text"] == rule.text("abc", 4)


def test_what_a_client_has_heard_of_is_counted(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Counts.add

    def late(*args: Any, **options: Any) -> None:
        sleep(0.2)
        add(*args, **options)

    monkeypatch.setattr(Counts, "add", late)
    with running(rule.load) as server:
        ask(server, COMPLETIONS, {"prompt": "abc", "max_tokens": 4})
        assert server.pool.counts.new_tokens == 4


@pytest.mark.slow
def test_a_process_leaves_on_sigterm_and_comes_back_with_its_sessions(
    bundle: str, home: dict[str, str], tmp_path: Path
) -> None:
    prompt = "Secret words nobody logs: the quick brown fox jumps over the lazy dog. " * 3
    body = {"prompt": prompt, "max_tokens": 20, **GREEDY}
    with process(bundle, home, "--kv", "fp", "--debug") as server:
        assert server.facts["kv_budget_total"] == 4 * server.facts["kv_budget"]
        port = server.address.rpartition(":")[2]
        first = ask(server, COMPLETIONS, body)
        assert first.cached_tokens == 0
        with send(server, CHAT, chat("more", max_tokens=4000, stream=True)) as stream:
            stream.recv(1 << 12)
            code, complaint = server.end(signal.SIGTERM)
        assert (code, "Traceback" in complaint) == (0, False)
    assert "Secret words" not in complaint
    assert "sessions of" in complaint
    with process(bundle, home, "--kv", "fp", "--port", port) as server:
        assert server.address.rpartition(":")[2] == port
        again = ask(server, COMPLETIONS, body)
        # The last token is healed, the one before it gone through again for its logits.
        assert again.cached_tokens == first.json["usage"]["prompt_tokens"] - 2
        assert again.json["choices"] == first.json["choices"]
        # saved while idle: even a kill costs nothing
        later = {**body, "prompt": "Another text entirely. " * 8}
        text = ask(server, COMPLETIONS, later).json["choices"][0]["text"]
        wait_until(lambda: metric(server, "sessions_saved_total") >= 2)
        assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
    with process(bundle, home, "--kv", "fp") as server:
        reply = ask(server, COMPLETIONS, later)
        assert reply.cached_tokens > 30
        assert reply.json["choices"][0]["text"] == text
        assert server.end(signal.SIGINT)[0] == 0
