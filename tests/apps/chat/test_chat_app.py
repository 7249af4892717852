"""The app by its keys: sending, queueing, cancelling, failing, commands, writing, app_module."""

import os
import re
import subprocess
import sys
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from textual.events import Paste
from textual.pilot import Pilot

from chat_pilot import (
    LONG_S,
    gated,
    help_of_app,
    meter,
    run,
    saved,
    say,
    send,
    sent_messages,
    shown,
    telling,
    until,
)
from environment import ROOTS
from fake_chat import FakeClient, FakeOptions
from kvq_apps.chat import chat_app as app_module
from kvq_apps.chat import threads
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.client import EngineLostError, Facts
from kvq_apps.chat.commands import COMMANDS, parse_command
from kvq_apps.chat.screens import QuestionScreen
from kvq_apps.names import pulling
from kvq_apps.names.model_names import NotPulledError
from kvq_apps.names.pull_request import PullRequest
from kvq_apps.terminal.output import Reporter
from kvq_models.catalogue import CatalogueSource

# Starting, queueing


def test_neither_torch_nor_onnxruntime_is_imported_before_the_first_frame() -> None:
    program = """
import asyncio, sys
from kvq_apps import cli
from kvq_apps.chat import chat_app as module
seen = []
async def headless(self):
    async with self.run_test():
        heavy = {"torch", "onnxruntime", "transformers", "numpy", "tokenizers"} & set(sys.modules)
        seen.append((sorted(heavy), self.prompt.has_focus))
module.ChatApp.run = lambda self, mouse: asyncio.run(headless(self))
sys.stdin.isatty = sys.stdout.isatty = lambda: True
cli.main(["chat", "/no/such/model", "--no-log"])
print(seen)
"""
    environment = os.environ | ROOTS
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert finished.stdout == "[([], True)]\n", finished.stderr


def test_messages_typed_while_the_model_loads_are_queued_and_sent_in_order() -> None:
    client, gate = gated("", "answer")
    opened = client.open
    client.open = lambda: (gate.wait(LONG_S), opened())[1]  # type: ignore[method-assign]

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for text in ("one", "two", "three"):
            await send(app, pilot, text)
        await until(pilot, lambda: app.controller.queue == ["one", "two", "three"])
        assert "queued: three" in str(app.query_one("#queue").render())
        # Up in the empty prompt takes the last one back; emptied it is gone.
        await pilot.press("up")
        assert app.prompt.text == "three"
        await send(app, pilot, "two and a half")
        gate.set()
        await until(pilot, lambda: app.controller.idle)
        users = [m.text for m in app.controller.conversation.messages if m.role == "user"]
        assert users == ["one", "two", "two and a half"]
        assert not app.query_one("#queue").display

    run(script, client, ready=False)


def test_a_model_that_cannot_be_loaded_leaves_the_app_usable() -> None:
    made = []

    def client_for(name: str) -> FakeClient:
        made.append(name)
        return FakeClient()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "no model" in meter(app))
        assert "/model NAME tries another" in shown(app)
        assert "there is no model here" in shown(app)
        app.controller.client_for = client_for
        await send(app, pilot, "hello")
        await send(app, pilot, "/model better")
        await until(pilot, lambda: app.controller.idle)
        assert made == ["better"]
        assert "You asked: hello" in shown(app)

    run(script, FakeClient(FakeOptions(broken=True)), ready=False)


@pytest.mark.parametrize("answer", ["enter", "escape"])
def test_a_model_that_is_not_here_is_pulled_if_the_user_agrees(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[str] = []
    missing = PullRequest(
        name="better", sources=(CatalogueSource(kind="hub", place="a/better"),), license="MIT"
    )

    class Missing(FakeClient):
        def open(self) -> Facts:
            if missing.name not in pulled:
                raise NotPulledError(missing)
            return super().open()

    def pull(request: PullRequest, _: Reporter) -> None:
        pulled.append(request.name)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.controller.client_for = lambda _: Missing()
        await send(app, pilot, "/model better")
        await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
        await pilot.press(answer)
        await until(pilot, lambda: app.controller.idle)
        assert pulled == (["better"] if answer == "enter" else [])
        assert ("fake answers from now on" in shown(app)) == (answer == "enter")
        assert "ready" in meter(app)

    monkeypatch.setattr(pulling, "pull", pull)
    run(script)


# Cancelling, failing


def test_cancel_in_decode_keeps_the_partial_text(tmp_path: Path) -> None:
    client, gate = gated("some words", " never seen")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: "some words" in shown(app))
        await pilot.press("escape")
        gate.set()
        await until(pilot, lambda: app.controller.idle)
        assert app.prompt.has_focus
        assert "kvq  stopped\n" in shown(app)
        await say(app, pilot, "go on")

    run(script, client, folder=tmp_path)
    assert sent_messages(client)[:2] == [("user", "go"), ("assistant", "some words")]
    messages = saved(tmp_path)
    assert [(m.text, m.state) for m in messages][:2] == [("go", "done"), ("some words", "stopped")]


def test_cancel_in_prefill_stops_within_a_chunk() -> None:
    client = FakeClient(FakeOptions(prefill_ms=300))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "word " * 3000)
        await until(pilot, lambda: "/3002" in app.controller.engine.activity)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].state == "stopped"
        assert app.controller.conversation.messages[-1].text == ""
        assert len(client.tokens) == 0

    run(script, client)


def test_a_silent_engine_ticks_and_can_be_stopped() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: app.controller.engine.stream is not None)
        assert app.controller.engine.stream is not None
        app.controller.engine.stream.started_s -= 6000
        assert re.search(r"(encoding|answering) 60\d\d s", meter(app))
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].state == "stopped"

    run(script, FakeClient(FakeOptions(hold_at=1)))


@pytest.mark.parametrize(
    ("fault", "key", "says"),
    [("fail_at", "alt+up r", "failed as it was told to. Enter in the empty prompt asks again"),
     ("lose_at", "enter", "the engine is back; Enter in the empty prompt asks again")],
)  # fmt: skip
def test_an_error_in_the_middle_keeps_the_partial_and_one_key_retries(
    fault: str, key: str, says: str, tmp_path: Path
) -> None:
    client = telling("first half and second half", fail_times=1, **{fault: 4})

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "go")
        assert app.controller.conversation.messages[-1].state == "failed"
        assert app.controller.conversation.messages[-1].text == "first half a"[:12]
        assert says in " ".join(shown(app).split())
        assert "Traceback" not in shown(app)
        await pilot.press(*key.split())
        await until(pilot, lambda: app.controller.idle)
        last = app.controller.conversation.messages[-1]
        assert (last.state, last.text) == ("done", "first half and second half")
        assert (last.branch, last.branches) == (2, 2)
        # There is nothing left to ask again.
        await pilot.press("escape", "enter")
        await pilot.pause()
        assert len(client.turns) == 2

    run(script, client, folder=tmp_path)
    assert [(m.text, m.state) for m in saved(tmp_path)][1][1] == "done"


def lost_client(times: int) -> tuple[FakeClient, list[int]]:
    """A client that loses its engine in the first reply; then `times` openings find none."""
    client = telling("first half and second half", lose_at=4, fail_times=1)
    opened, openings = client.open, [0]

    def open_again() -> object:
        openings[0] += 1
        if 1 < openings[0] <= 1 + times:
            raise EngineLostError("nobody there; start it")
        return opened()

    client.open = open_again  # type: ignore[method-assign, assignment]
    return client, openings


def test_a_lost_engine_is_looked_for_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RETRY_S", (0.01, 0.02))
    client, openings = lost_client(5)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: app.controller.engine.activity == "engine lost, retrying")
        assert "engine lost, retrying" in meter(app)
        # What is typed meanwhile waits for the engine instead of failing.
        await send(app, pilot, "and then?")
        await until(pilot, lambda: app.controller.idle)
        assert openings == [7]
        assert shown(app).count("engine lost, retrying") == 1
        assert [m.state for m in app.controller.conversation.messages if m.role == "assistant"] == [
            "failed", "done"
        ]  # fmt: skip

    run(script, client)


def test_looking_for_a_lost_engine_can_be_stopped_and_other_jobs_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "RETRY_S", (0.01, 60.0))
    client, openings = lost_client(1000)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: openings == [2])
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not app.controller.conversation.messages)
        await until(pilot, lambda: openings == [3])
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.idle)
        assert "the engine is not looked for any more" in " ".join(shown(app).split())
        assert openings == [3]

    run(script, client)


def test_an_engine_that_starts_later_than_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RETRY_S", (0.01,))
    client = FakeClient()
    opened, openings = client.open, [0]

    def open_later() -> object:
        openings[0] += 1
        if openings[0] < 4:
            raise EngineLostError("it does not answer; start it with `kvq serve`")
        return opened()

    client.open = open_later  # type: ignore[method-assign, assignment]

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hello")
        assert "the engine is back\n" in shown(app)
        assert "You asked: hello" in shown(app)

    run(script, client, ready=False)


def test_an_internal_error_shows_no_traceback() -> None:
    def script_of(_turn: object) -> list[str]:
        raise ZeroDivisionError("oops")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "go")
        assert "internal error: ZeroDivisionError: oops" in shown(app)
        await say(app, pilot, "again")
        assert len(app.controller.conversation.messages) == 4
        await say(app, pilot, "/edit")
        await say(app, pilot, "and again")
        assert "tokens again" not in shown(app)

    run(script, FakeClient(script=script_of))


# Commands and keys


def test_kv_is_changed_live() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await say(app, pilot, "/kv 8:4 32MiB")
        assert "/32.0 MiB K8V4" in meter(app)
        assert "read again" in shown(app)
        await say(app, pilot, "/kv 1MiB")
        assert "2 MiB can" in shown(app)
        await say(app, pilot, "/kv 3:2")
        assert "/kv 3:2 is not possible: choose " in " ".join(shown(app).split())
        assert "/32.0 MiB K8V4" in meter(app)
        await say(app, pilot, "two")
        assert app.controller.conversation.messages[-1].text.startswith("You asked: **two**")

    run(script)


def test_commands_are_never_sent_to_the_model(tmp_path: Path) -> None:
    client = FakeClient()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for line in (
            "/nosuch",
            "/kv",
            "/set temp hot",
            "/set nothing 1",
            "/drafts x",
            "/export",
            "/theme none",
            "/load /no/file",
            "/retry",
            "/model",
            "/system",
        ):
            await say(app, pilot, line)  # fmt: skip
        assert client.turns == []
        assert "/nosuch is not a command" in shown(app)
        # Two lines of a usual terminal at most, and what to do.
        remarks = [message.text for message in app.transcript.messages]
        assert len(remarks) == 11
        assert max(map(len, remarks)) < 160
        assert all(";" in text or "needs" in text or ":" in text for text in remarks)
        await say(app, pilot, "/set temp 0.25")
        await say(app, pilot, "/set seed 7")
        await say(app, pilot, "/set predict 5")
        await say(app, pilot, "/system Be brief.")
        await say(app, pilot, "//slash")
        assert client.turns[0].sampling.temperature == 0.25
        assert (client.turns[0].seed, client.turns[0].max_tokens) == (7, 5)
        assert sent_messages(client) == [("system", "Be brief."), ("user", "/slash")]
        await say(app, pilot, "/show")
        assert "temp 0.25" in shown(app)
        await say(app, pilot, f"/export {tmp_path / 'chat.md'}")
        assert (tmp_path / "chat.md").read_text().startswith("## system\n")
        await say(app, pilot, f"/load {tmp_path / 'chat.md'}")
        assert app.controller.conversation.messages[1].text == "/slash"
        await say(app, pilot, "/stats")
        await say(app, pilot, "/quit")

    run(script, client)


def test_every_command_has_a_line_of_help() -> None:
    command, argument = parse_command("/bye")
    assert (command.name, argument) == ("quit", "")
    text = help_of_app()
    assert all(f"/{command.name}" in text for command in COMMANDS)


# Writing a message


def test_a_large_paste_arrives_exactly() -> None:
    client = FakeClient(FakeOptions(context=10_000_000))
    text = ("line with \x1b[31m and\ttab é 你\n" * 7000).strip()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.post_message(Paste(text.replace("\n", "\r\n")))
        await until(pilot, lambda: app.prompt.full_text == text)
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.idle and client.turns)
        app.prompt.post_message(Paste(text[:30]))
        await until(pilot, lambda: app.prompt.text == text[:30])
        drawn = [app.prompt.render_line(y).text for y in range(app.prompt.size.height)]
        assert any("\u241b[31m" in line for line in drawn)
        assert not any("\x1b" in line for line in drawn)

    run(script, client)
    assert sent_messages(client) == [("user", text)]


def test_any_unicode_is_taken() -> None:
    texts = (
        "👩\u200d👩\u200d👧 family", "你好世界", "e\u0301a\u0308", "שלום עולם", "\ud800 lone",
        "a\x00b",
    )  # fmt: skip

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for number, text in enumerate(texts):
            app.prompt.post_message(Paste(text))
            await until(pilot, lambda: app.prompt.text)
            await pilot.press("x", "enter")
            messages = app.controller.conversation.messages
            await until(pilot, lambda: app.controller.idle and len(messages) > 2 * number)  # noqa: B023
            assert messages[2 * number].text == text.replace("\ud800", "\ufffd") + "x"
            app.export_screenshot()

    run(script)


def test_the_cursor_stands_after_wide_characters() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.post_message(Paste("你好"))
        await until(pilot, lambda: app.prompt.text)
        start = app.prompt.cursor_screen_offset.x
        await pilot.press("left", "left")
        assert start - app.prompt.cursor_screen_offset.x == 4

    run(script)


def test_new_lines_are_typed() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c", "alt+enter", "d")
        assert app.prompt.text == "a\nb\nc\nd"

    run(script)


def test_the_editor_round_trip_keeps_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf ' and more' >> \"$1\"\n")
    editor.chmod(0o755)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        monkeypatch.setattr(type(app._driver), "can_suspend", True, raising=False)
        monkeypatch.setattr(type(app._driver), "suspend_application_mode", lambda _: None)
        monkeypatch.setattr(type(app._driver), "resume_application_mode", lambda _: None)
        app.prompt.fill("draft")
        for command, expected in (
            (str(editor), "draft and more"),
            ("/no/such", "draft and more"),
            ("false", "draft and more"),
            ("'", "draft and more"),
        ):
            monkeypatch.setenv("VISUAL", command)
            await pilot.press("ctrl+g")
            await pilot.pause()
            assert app.prompt.text == expected  # fmt: skip

    run(script)


def test_a_resize_is_not_lost_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual waits 1/120 s for more of them, and would forget what comes later than that."""

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        with monkeypatch.context() as patch:
            seconds = chain(range(1000), repeat(1000))
            patch.setattr("textual._time.get_time", lambda: float(next(seconds)))
            app.set_timer(0.001, lambda: late.append("drawn"))
            await until(pilot, lambda: late)
            await pilot.pause(0.01)

    late: list[str] = []
    run(script)
    assert late == ["drawn"]


# Leaving


def test_ctrl_c_twice_quits_and_once_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    notes: list[str] = []
    monkeypatch.setattr(app_module, "monotonic", lambda: now)
    monkeypatch.setattr(ChatApp, "notify", lambda _app, text, **_options: notes.append(text))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await pilot.press("ctrl+c")
        await until(pilot, lambda: notes == ["press Ctrl+C again to quit"])
        assert not app._exit
        nonlocal now
        now += 2
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert not app._exit
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app._exit)

    run(script)


def test_leaving_while_streaming_keeps_what_came(tmp_path: Path) -> None:
    client, gate = gated("first part", " second")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: "first part" in shown(app))
        await pilot.press("ctrl+q")
        gate.set()
        await until(pilot, lambda: app._exit)

    run(script, client, folder=tmp_path)
    assert [(m.text, m.state) for m in saved(tmp_path)] == [
        ("go", "done"), ("first part", "stopped")
    ]  # fmt: skip
    assert list((tmp_path / "kv").iterdir())


def test_an_engine_that_hangs_does_not_keep_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "LEAVE_WITHIN_S", 0.3)
    client, gate = gated("first part", " second")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: "first part" in shown(app))
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app._exit)

    run(script, client, folder=tmp_path)
    gate.set()
    assert [(m.text, m.state) for m in saved(tmp_path)][1] == ("first part", "interrupted")


def test_history_trouble_is_said_and_the_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "chats.sqlite3").write_bytes(b"nonsense " * 1000)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        assert "nothing was deleted" in " ".join(shown(app).split())
        assert "You asked: hi" in shown(app)

    run(script, folder=tmp_path)
