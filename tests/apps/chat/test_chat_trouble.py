"""What is not as it should be: another chat's message, a damaged file, an engine that is stuck."""

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from textual.pilot import Pilot

from chat_pilot import LONG_S, run, saved, say, send, shown, telling, until
from fake_chat import FakeClient, FakeOptions
from kvq_apps.chat import chat_app as app_module
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.chat.client import Facts, Stream, Turn
from kvq_apps.chat.history import History
from kvq_apps.chat.messages import Message
from kvq_apps.chat.plain import PlainChat
from kvq_apps.chat.screens import DraftsScreen, HelpScreen, QuestionScreen

# Another chat's


def test_an_edit_ends_with_its_chat_and_its_message_is_refused_afterwards() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        question, answer = app.controller.conversation.messages
        await say(app, pilot, "/edit")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: app.controller.idle and not app.transcript.messages)
        assert (app.prompt.text, app.prompt.border_title) == ("", None)
        control = app.controller
        # Keys that were pressed before the other chat was there.
        for job in (
            partial(control.answer_edited, question, "late"),
            partial(control.retry, answer),
            partial(control.choose_sibling, question, 1),
            partial(control.choose_sibling, answer, 1),
        ):
            control.do(job)
        control.make_drafts(2)
        await until(pilot, lambda: control.idle)
        texts = [message.text for message in app.transcript.messages]
        assert texts == [
            "this message is not on the screen any more; Alt+Up selects another"
        ] * 4 + ["there is nothing to answer yet; write a message first"]
        await say(app, pilot, "two")
        assert [row.text for row in control.conversation.messages if row.role == "user"] == ["two"]

    run(script)


def test_what_another_process_is_writing_is_not_waited_for(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert "no KV cache of this chat is saved" in shown(app)
        assert app.controller.unanswered

    history = History(tmp_path / "chats.sqlite3")
    history.new_chat("c")
    history.add("c", Message(id="u", role="user", text="question"))
    history.add("c", Message(id="a", parent_id="u", role="assistant", text="", state="streaming"))
    history._db.execute("UPDATE message SET writer = 1")
    history._db.commit()
    history.close()
    run(script, folder=tmp_path, latest=True)


# Damaged, refused


def test_a_history_damaged_in_the_middle_is_said_and_the_chat_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    history = History(path)
    history.new_chat("c")
    for number in range(20):
        parent = f"m{number - 1}" if number else None
        text = os.urandom(5000).hex()
        history.add("c", Message(id=f"m{number}", parent_id=parent, role="user", text=text))
    history.close()
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + b"\xff" * (len(content) - half))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert "the chat history cannot be read (" in shown(app)
        await say(app, pilot, "hi")
        assert "You asked: hi" in shown(app)
        await pilot.press("ctrl+r")
        await pilot.pause()
        await pilot.press("escape")

    run(script, folder=tmp_path, chat_id="c", size=(200, 24))


def test_a_refused_command_stays_in_the_prompt_and_a_failed_one_ends_nothing(
    tmp_path: Path,
) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for line in ("/etc/hosts is what?\nand more", "/load ~nobody-of-that-name/x"):
            await say(app, pilot, line)
            assert app.prompt.text == line
        assert "there is no such user" in shown(app)
        broken = tmp_path / "conversations.json"
        broken.write_text(json.dumps([{"mapping": {"a": 5}, "current_node": "a"}]))
        await say(app, pilot, f"/load {broken}")
        assert "is not as ChatGPT writes its" in " ".join(shown(app).split())
        app.controller.client_for = lambda _: FakeClient(FakeOptions(load_ms=-1))
        await say(app, pilot, "/model other")
        assert "internal error: ValueError: sleep length" in " ".join(shown(app).split())

    run(script, size=(120, 24))


@pytest.mark.parametrize(
    ("keeps_kv", "folder", "says"),
    [
        (False, True, "is not saved: the server keeps it itself"),
        (True, False, "is not saved: --no-log keeps nothing"),
        (True, True, "is not saved: full"),
    ],
)
def test_a_cache_that_is_not_saved_is_not_called_saved(
    keeps_kv: bool, folder: bool, says: str, tmp_path: Path
) -> None:
    class Full(FakeClient):
        def open(self) -> Facts:
            return Facts(model="m", context_tokens=1000, keeps_kv=keeps_kv)

        def save(self, path: Path) -> str | None:
            raise OSError("full")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "/save")
        assert says in shown(app)
        assert "is saved" not in shown(app)

    run(script, Full(), folder=tmp_path if folder else None)


# Stuck


def test_leaving_while_a_change_of_kv_is_stuck_marks_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "LEAVE_WITHIN_S", 0.1)
    client, gate = FakeClient(), Event()
    client.change_kv = lambda *_: gate.wait(LONG_S)  # type: ignore[method-assign, assignment]

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await send(app, pilot, "/kv 8:8")
        await until(pilot, lambda: app.controller.engine.stream is not None)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app._exit)

    run(script, client, folder=tmp_path)
    gate.set()
    assert [message.state for message in saved(tmp_path)] == ["done", "done"]


def test_a_signal_ends_a_chat_whose_leaving_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STOP_WITHIN_S", 0.05)
    monkeypatch.setattr(app_module.os, "isatty", lambda _: True)
    client, gate = FakeClient(), Event()
    client.save = lambda _: gate.wait(LONG_S)  # type: ignore[method-assign, assignment]

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app.controller.engine.activity == "saving the KV cache")
        app._end(signal.SIGTERM)
        await until(pilot, lambda: app._exit)
        assert app.return_code == 128 + signal.SIGTERM

    run(script, client, folder=tmp_path)
    gate.set()


def test_leaving_takes_every_screen_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "LEAVE_WITHIN_S", 10 * LONG_S)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "one")
        await until(pilot, lambda: app.controller.idle and app.controller.conversation.messages)
        await send(app, pilot, "word " * 60)
        await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app._exit)
        assert app.controller.conversation.messages[-1].state == "failed"

    run(script, FakeClient(FakeOptions(context=60)))


def test_the_help_turns_pages() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        screen = app.screen
        assert isinstance(screen, HelpScreen)
        places = [screen.scroll.scroll_y]
        for key in ("down", "pagedown", "pageup", "end", "home"):
            await pilot.press(key)
            await pilot.wait_for_animation()
            places.append(screen.scroll.scroll_y)
        first, line, page, back, end, top = places
        assert first == top == 0 < line == back == 1 < page <= end == screen.scroll.max_scroll_y
        assert app.transcript.scroll_y == app.transcript.max_scroll_y

    run(script, size=(80, 24))


def test_drafts_are_written_on_below_the_help() -> None:
    gate = Event()

    def pieces(turn: Turn) -> Iterator[str]:
        yield "be"
        gate.wait(LONG_S)
        yield "ta"

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "go")
        client._script = pieces
        await send(app, pilot, "/drafts 2")
        await until(pilot, lambda: isinstance(app.screen, DraftsScreen))
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        gate.set()
        await until(pilot, lambda: app.controller.engine.activity == "choose a draft")
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, DraftsScreen))
        assert isinstance(app.screen, DraftsScreen)
        (draft,) = app.screen.columns[1].messages
        assert (draft.text, draft.state) == ("beta", "done")

    client = telling("alpha")
    run(script, client)


def test_another_model_is_opened_once_though_the_engine_was_lost() -> None:
    opened: list[int] = []

    class Other(FakeClient):
        def open(self) -> Facts:
            opened.append(1)
            return super().open()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.controller.client_for = lambda _: Other()
        await send(app, pilot, "go")
        await until(pilot, lambda: app.controller.engine.lost)
        await say(app, pilot, "/model other")
        assert len(opened) == 1

    run(script, telling("first half and second half", lose_at=4))


def test_an_engine_is_not_closed_under_a_reply_that_nobody_reads() -> None:
    class Watched(FakeClient):
        at_work, closed = False, 0

        def reply(self, turn: Turn, stream: Stream) -> str:
            self.at_work = True
            reason = super().reply(turn, stream)
            self.at_work = False
            return reason

        def close(self) -> None:
            assert not self.at_work
            self.closed += 1

    def show(text: str) -> None:
        raise BrokenPipeError

    client = Watched(FakeOptions(tok_ms=5, tokens=100_000))
    chat = PlainChat(client, ChatSettings(), show, "")
    with pytest.raises(BrokenPipeError):
        chat.answer("hi")
    chat.close()
    assert client.closed == 1
