"""The app by its keys: sending, queueing, cancelling, failing, branching, settings, leaving."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
from textual.events import Paste
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from chat_pilot import LONG_S, gated, meter, run, say, shown, telling, until
from environment import ROOTS
from kvq_apps import cli
from kvq_apps.chat import app as app_module
from kvq_apps.chat import controller, engine_link, keys
from kvq_apps.chat.app import ChatApp
from kvq_apps.chat.client import EngineLostError, Turn
from kvq_apps.chat.commands import COMMANDS, parse_command
from kvq_apps.chat.drafts import DraftsScreen
from kvq_apps.chat.fake import FakeClient, FakeOptions
from kvq_apps.chat.fitting import WAYS
from kvq_apps.chat.history import History
from kvq_apps.chat.kv_files import forget_oldest
from kvq_apps.chat.menu import MenuView
from kvq_apps.chat.messages import Message
from kvq_apps.chat.screens import ChatPicker, Entry, HelpScreen, Question
from kvq_apps.chat.settings import ChatSettings
from kvq_apps.commands import chat as chat_command
from kvq_runtime.config import Sampling


def saved(folder: Path) -> list[Message]:
    """The chosen branch of the latest chat on disk."""
    history = History(folder / "chats.sqlite3")
    messages = history.branch(history.chats(1)[0].id)
    history.close()
    return messages


def asked(client: FakeClient, turn: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in client.turns[turn].messages]


# Starting, queueing


def test_neither_torch_nor_onnxruntime_is_imported_before_the_first_frame() -> None:
    program = """
import asyncio, sys
from kvq_apps import cli
from kvq_apps.chat import app as module
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
            app.prompt.fill(text)
            await pilot.press("enter")
        await until(pilot, lambda: app.controller.queue == ["one", "two", "three"])
        assert "queued: three" in str(app.query_one("#queue").render())
        # Up in the empty prompt takes the last one back; emptied it is gone.
        await pilot.press("up")
        assert app.prompt.text == "three"
        app.prompt.fill("two and a half")
        await pilot.press("enter")
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
        app.slash.client_for = client_for
        app.prompt.fill("hello")
        await pilot.press("enter")
        app.prompt.fill("/model better")
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.idle)
        assert made == ["better"]
        assert "You asked: hello" in shown(app)

    run(script, FakeClient(FakeOptions(broken=True)), ready=False)


# Cancelling, failing


def test_cancel_in_decode_keeps_the_partial_text(tmp_path: Path) -> None:
    client, gate = gated("some words", " never seen")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.fill("go")
        await pilot.press("enter")
        await until(pilot, lambda: "some words" in shown(app))
        await pilot.press("escape")
        gate.set()
        await until(pilot, lambda: app.controller.idle)
        assert app.prompt.has_focus
        assert "kvq  stopped\n" in shown(app)
        await say(app, pilot, "go on")

    run(script, client, folder=tmp_path)
    assert asked(client)[:2] == [("user", "go"), ("assistant", "some words")]
    messages = saved(tmp_path)
    assert [(m.text, m.state) for m in messages][:2] == [("go", "done"), ("some words", "stopped")]


def test_cancel_in_prefill_stops_within_a_chunk() -> None:
    client = FakeClient(FakeOptions(prefill_ms=300))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.fill("word " * 3000)
        await pilot.press("enter")
        await until(pilot, lambda: "/3002" in app.controller.engine.activity)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].state == "stopped"
        assert app.controller.conversation.messages[-1].text == ""
        assert len(client.tokens) == 0

    run(script, client)


def test_a_silent_engine_ticks_and_can_be_stopped() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.fill("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.engine.stream is not None)
        assert app.controller.engine.stream is not None
        app.controller.engine.stream.started_s -= 6000
        assert re.search(r"(encoding|answering) 60\d\d s", meter(app))
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].state == "stopped"

    run(script, FakeClient(FakeOptions(hold_at=1)))


@pytest.mark.parametrize(
    ("fault", "says"),
    [("fail_at", "failed as it was told to. Enter in the empty prompt asks again"),
     ("lose_at", "the engine is back; Enter in the empty prompt asks again")],
)  # fmt: skip
@pytest.mark.parametrize("key", ["enter", "alt+up r"])
def test_an_error_in_the_middle_keeps_the_partial_and_one_key_retries(
    fault: str, says: str, key: str, tmp_path: Path
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
    monkeypatch.setattr(engine_link, "RETRY_S", (0.01, 0.02))
    client, openings = lost_client(5)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.fill("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.engine.activity == "engine lost, retrying")
        assert "engine lost, retrying" in meter(app)
        # What is typed meanwhile waits for the engine instead of failing.
        app.prompt.fill("and then?")
        await pilot.press("enter")
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
    monkeypatch.setattr(engine_link, "RETRY_S", (0.01, 60.0))
    client, openings = lost_client(1000)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.fill("go")
        await pilot.press("enter")
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
    monkeypatch.setattr(engine_link, "RETRY_S", (0.01,))
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

    run(script, FakeClient(script=script_of))


# Branches


def test_an_edited_message_branches_and_both_branches_can_be_seen(tmp_path: Path) -> None:
    client = FakeClient()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for text in ("one", "two", "three"):
            await say(app, pilot, text)
        before = [m.text for m in app.controller.conversation.messages]
        await pilot.press("alt+up", "alt+up", "alt+up", "alt+up")
        assert app.transcript.selected is app.controller.conversation.messages[2]
        await pilot.press("e")
        assert app.prompt.text == "two"
        await say(app, pilot, "two, but better")
        texts = [m.text for m in app.controller.conversation.messages]
        assert texts[:3] == [*before[:2], "two, but better"]
        assert len(texts) == 4
        stats = app.controller.engine.stats
        note = f"encoded {stats.encoded_tokens} of {stats.prompt_tokens} tokens again"
        assert note in shown(app)
        assert 0 < stats.encoded_tokens < stats.prompt_tokens
        (edited,) = [one.edited for one in client.turns if one.edited]
        assert [row.text for row in edited] == before[:3]
        left = client.stale
        await say(app, pilot, "/exact")
        assert f"{left} tokens were encoded again" in shown(app)
        await say(app, pilot, "/exact")
        assert "all of it is exact already" in shown(app)
        await pilot.press("alt+p")
        await until(
            pilot, lambda: app.controller.idle and len(app.controller.conversation.messages) == 6
        )
        assert [m.text for m in app.controller.conversation.messages] == before
        assert "you  1/2" in shown(app)
        await pilot.press("alt+n")
        await until(
            pilot, lambda: app.controller.idle and len(app.controller.conversation.messages) == 4
        )
        assert "you  2/2" in shown(app)

    run(script, client, folder=tmp_path)
    assert len(saved(tmp_path)) == 4


def test_escape_leaves_an_edit() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await say(app, pilot, "/edit")
        assert app.prompt.border_title
        await pilot.press("escape")
        assert (app.prompt.text, app.prompt.border_title) == ("", None)
        await say(app, pilot, "two")
        assert len(app.controller.conversation.messages) == 4

    run(script)


def test_an_edit_keeps_what_was_being_written() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        for end in ("escape", "enter"):
            app.prompt.fill("not sent yet")
            await pilot.press("alt+up", "alt+up", "e")
            assert app.prompt.text == "one"
            await pilot.press("alt+up", "e")
            await pilot.press(end)
            await until(pilot, lambda: app.controller.idle)
            assert (app.prompt.text, app.prompt.border_title) == ("not sent yet", None)
        assert app.controller.conversation.messages[0].branches == 2

    run(script)


def drafts_of(app: ChatApp) -> list[str]:
    """What the drafts on the screen say, in their order."""
    assert isinstance(app.screen, DraftsScreen)
    return [message.text for column in app.screen.columns for message in column.messages]


async def open_drafts(app: ChatApp, pilot: Pilot[Any], *keys_pressed: str) -> DraftsScreen:
    """The drafts once they are on screen and written."""
    await pilot.press(*keys_pressed)
    await until(pilot, lambda: isinstance(app.screen, DraftsScreen) and app.screen.is_mounted)
    await until(pilot, lambda: app.controller.engine.activity == "choose a draft")
    assert isinstance(app.screen, DraftsScreen)
    return app.screen


def test_drafts_are_written_side_by_side_and_one_is_kept(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "go")
        app.prompt.fill("/drafts 3")
        screen = await open_drafts(app, pilot, "enter")
        # The reply that is there is the first; the next one is marked.
        assert (drafts_of(app), screen.marked) == (["alpha", "beta", "gamma"], 1)
        drawn = on_screen(app)
        assert all(word in drawn for word in ("alpha", "beta", "gamma", "1/3", "2/3", "3/3"))
        await pilot.press("alt+n")
        assert (screen.marked, screen.columns[2].has_class("marked")) == (2, True)
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].text == "gamma"
        assert "kvq  3/3" in shown(app)
        # Alt+] shows the same three again, the one before is marked by its fellow; Esc leaves all.
        screen = await open_drafts(app, pilot, "alt+right_square_bracket")
        assert (drafts_of(app), screen.marked) == (["alpha", "beta", "gamma"], 0)
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].text == "gamma"
        screen = await open_drafts(app, pilot, "alt+p")
        assert screen.marked == 1
        await pilot.press("1", "enter")
        await until(pilot, lambda: app.controller.idle)
        await say(app, pilot, "next")
        assert [m.text for m in app.controller.conversation.messages][:3] == ["go", "alpha", "next"]

    client = telling("alpha", "beta", "gamma", "delta")
    run(script, client, folder=tmp_path, size=(120, 24))
    # The drafts were asked for without the reply that stood there.
    assert asked(client, 1) == [("user", "go")]
    history = History(tmp_path / "chats.sqlite3")
    (chat,) = history.chats()
    found = history.beside(chat.id, history.branch(chat.id)[1].id)
    assert [(m.text, m.state) for m in found] == [
        ("alpha", "done"), ("beta", "done"), ("gamma", "done")
    ]  # fmt: skip
    history.close()


def test_a_choice_stops_what_is_still_written_and_a_narrow_screen_shows_one() -> None:
    def endless(turn: Turn) -> Iterator[str]:
        yield from repeat("word ")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.fill("go")
        await pilot.press("enter")
        await until(pilot, lambda: "word" in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.idle)
        app.prompt.fill("/drafts 3")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DraftsScreen) and drafts_of(app)[2])
        screen = app.screen
        assert isinstance(screen, DraftsScreen)
        await until(pilot, lambda: [column.display for column in screen.columns].count(True) == 1)
        await pilot.press("tab", "enter")
        await until(pilot, lambda: app.controller.idle)
        last = app.controller.conversation.messages[-1]
        assert (last.state, last.branch, last.branches) == ("stopped", 3, 3)
        assert last.text.startswith("word word")

    run(script, FakeClient(FakeOptions(tok_ms=1), script=endless), size=(60, 24))


def test_leaving_with_drafts_on_the_screen() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "go")
        app.prompt.fill("/drafts 2")
        await open_drafts(app, pilot, "enter")
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app._exit)

    run(script, telling("alpha", "beta"))


# The context


def test_a_nearly_full_context_warns_and_a_full_one_asks() -> None:
    client = FakeClient(FakeOptions(context=105, tokens=30))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for number in range(3):
            await say(app, pilot, f"question {number}")
        assert "% full: /new begins a new chat" in shown(app)
        app.prompt.fill("word " * 30)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Question))
        assert len(client.turns[-1].messages) == 7
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.idle)
        assert len(client.turns[-1].messages) < 7
        left_out = app.controller.conversation.left_out
        text = " ".join(shown(app).split())
        assert f"the first {left_out} messages are no longer given to the model" in text
        assert len(client.turns[-1].messages) == 7 - left_out
        assert len(app.controller.conversation.messages) == 8
        assert app.controller.conversation.messages[-1].text

    run(script, client)


def summing_up(*summaries: str, **options: Any) -> FakeClient:
    """Answers like the fake, and what asks for a summary with these, in turn."""
    texts = iter(summaries)

    def script(turn: Turn) -> list[str]:
        if turn.messages[-1].text.startswith("Sum up our conversation"):
            return next(texts).split(" ")
        return [f"answer{number} " for number in range(60)]

    return FakeClient(FakeOptions(**options), script)


async def choose(app: ChatApp, pilot: Pilot[Any], way: str) -> None:
    """Answers the question that is asked."""
    await until(pilot, lambda: isinstance(app.screen, Question))
    asked_on = app.screen
    keys_of = [key for key, _ in WAYS]
    await pilot.press(*["down"] * keys_of.index(way), "enter")
    await until(pilot, lambda: app.screen is not asked_on)


def test_the_model_sums_up_what_no_longer_fits(tmp_path: Path) -> None:
    client = summing_up("We-spoke-of-foxes.", "Foxes-and-hens.", context=280)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for text in ("foxes", "hens", "ducks"):
            await say(app, pilot, text)
        app.prompt.fill("geese " * 120)
        await pilot.press("enter")
        await choose(app, pilot, "summarise")
        await until(pilot, lambda: app.controller.idle)
        asked_for, answered = asked(client, -2), asked(client)
        # The oldest turns as they were, then the request, with an eighth of the context for it.
        assert [text for _, text in asked_for[:-1]] == [
            m.text for m in app.controller.conversation.messages[: len(asked_for) - 1]
        ]
        assert client.turns[-2].max_tokens == 35
        left_out = len(asked_for) - 1
        assert answered[0][1].startswith("(What was said before, summed up: We-spoke-of-foxes.)")
        assert len(answered) == 7 - left_out
        text = " ".join(shown(app).split())
        assert f"this instead of the first {left_out} messages" in text
        assert "We-spoke-of-foxes." in text
        assert len(app.controller.conversation.messages) == 8
        assert app.controller.conversation.messages[-1].state == "done"
        # A summary that has become old is summed up with what followed it.
        app.prompt.fill("swans " * 120)
        await pilot.press("enter")
        await choose(app, pilot, "summarise")
        await until(pilot, lambda: app.controller.idle)
        assert "We-spoke-of-foxes." in asked(client, -2)[0][1]
        assert "Foxes-and-hens." in asked(client)[0][1]
        assert "We-spoke" not in asked(client)[0][1]

    run(script, client, folder=tmp_path)
    assert len(saved(tmp_path)) == 10

    async def resumed(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert "Foxes-and-hens." in shown(app)

    run(resumed, FakeClient(FakeOptions(context=280)), folder=tmp_path, latest=True)


def test_without_a_summary_the_question_comes_back() -> None:
    client = summing_up(" ", context=280)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for text in ("foxes", "hens", "ducks"):
            await say(app, pilot, text)
        app.prompt.fill("geese " * 120)
        await pilot.press("enter")
        await choose(app, pilot, "summarise")
        await until(pilot, lambda: isinstance(app.screen, Question))
        assert app.controller.conversation.left_out == 0
        await choose(app, pilot, "keep")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].state == "failed"
        assert app.controller.conversation.left_out == 0

    run(script, client)


def test_what_is_too_long_to_be_summed_up_at_once_is_halved() -> None:
    client = summing_up("Short.", "Shorter.", "Shortest.", context=400)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for text in ("foxes", "hens", "ducks", "geese"):
            await say(app, pilot, text)
        # The same chat in a smaller context.
        client.facts = dataclasses.replace(client.facts, context_tokens=200)
        app.prompt.fill("swans")
        await pilot.press("enter")
        await choose(app, pilot, "summarise")
        await until(pilot, lambda: app.controller.idle)
        requests = [
            len(turn.messages) for turn in client.turns if "Sum up" in turn.messages[-1].text
        ]
        assert requests[0] > requests[1]
        assert app.controller.conversation.summary
        assert app.controller.conversation.messages[-1].state == "done"

    run(script, client)


def test_one_message_that_is_too_long_asks_nothing() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "word " * 200)
        assert "this message alone is longer than the context of 60 tokens" in shown(app)
        assert not isinstance(app.screen, Question)

    run(script, FakeClient(FakeOptions(context=60)), size=(120, 24))


def test_a_full_context_can_lead_to_a_new_chat_or_nowhere() -> None:
    client = FakeClient(FakeOptions(context=60, tokens=30))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        first = app.controller.conversation.id
        app.prompt.fill("word " * 30)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Question))
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].state == "failed"
        app.prompt.fill("/retry")
        await pilot.press("enter")
        await choose(app, pilot, "new")
        await until(pilot, lambda: app.controller.idle and app.controller.conversation.id != first)
        assert [m.role for m in app.controller.conversation.messages] == ["user", "assistant"]
        assert app.controller.conversation.messages[-1].state in ("done", "length")

    run(script, client)


# Resuming


def test_a_chat_is_resumed_with_its_kv(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await say(app, pilot, "two")

    run(first, folder=tmp_path)

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert "KV cache restored:" in shown(app)
        assert "You asked: two" in shown(app)
        await say(app, pilot, "three")
        assert app.controller.engine.stats.cached_tokens >= 0.9 * (
            app.controller.engine.stats.prompt_tokens - 4
        )

    run(second, folder=tmp_path, latest=True)

    async def other_plan(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert "KV cache restored at 4:2" in shown(app)
        await say(app, pilot, "four")
        assert app.controller.engine.stats.cached_tokens > 0

    client = FakeClient()
    client.facts = dataclasses.replace(client.facts, k_bits=8)
    run(other_plan, client, folder=tmp_path, latest=True)


def kept_in(app: ChatApp) -> tuple[str, int]:
    """Widths and budget of the engine."""
    facts = app.controller.engine.facts
    assert facts is not None
    return f"{facts.k_bits}:{facts.v_bits}", facts.kv_budget


def test_each_chat_goes_on_at_its_own_widths_and_budget(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "narrow")
        await say(app, pilot, "/new")
        await say(app, pilot, "wide")
        await say(app, pilot, "/kv 8:4 32MiB")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert kept_in(app) == ("8:4", 32 << 20)
        assert "KV cache restored at 8:4 in 32.0 MiB: " in shown(app)
        await say(app, pilot, "wide again")
        assert app.controller.engine.stats.cached_tokens > 0
        narrow = (await app.controller.history.read(lambda history: history.search("narrow")))[0]
        app.controller.do(lambda: app.controller.resume_chat(narrow.id))
        await until(pilot, lambda: app.controller.idle)
        assert kept_in(app) == ("4:2", 64 << 20)
        await say(app, pilot, "narrow again")
        assert app.controller.engine.stats.cached_tokens > 0

    run(first, folder=tmp_path)
    run(second, folder=tmp_path, latest=True)


def test_widths_of_the_command_line_hold_and_the_chat_says_so(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await say(app, pilot, "/kv 8:4 32MiB")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert kept_in(app) == ("4:2", 64 << 20)
        said = [message.text for message in app.transcript.messages if not message.id]
        assert said == [
            "the KV cache is not restored (it was kept at 8:4 in 32.0 MiB, and you asked for 4:2 "
            "in 64.0 MiB): the next reply encodes the chat again"
        ]

    run(first, folder=tmp_path)
    run(second, folder=tmp_path, latest=True, kv_pinned=True)


def test_a_cache_of_another_model_is_one_sentence(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert [message.text for message in app.transcript.messages if not message.id] == [
            "the KV cache is not restored (it was kept for another model): the next reply encodes "
            "the chat again"
        ]

    other = FakeClient()
    other.facts = dataclasses.replace(other.facts, fingerprint="other")
    run(first, folder=tmp_path)
    run(second, other, folder=tmp_path, latest=True)


def test_the_kv_is_saved_when_nothing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "SAVE_AFTER_S", 0.02)

    def kept() -> list[int]:
        return [len(json.loads(path.read_text())["tokens"]) for path in tmp_path.glob("kv/*.kv")]

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await until(pilot, lambda: kept() == [app.controller.engine.stats.context_tokens])
        before = kept()
        await say(app, pilot, "two")
        await until(pilot, lambda: kept() == [app.controller.engine.stats.context_tokens])
        assert kept() > before
        await until(pilot, lambda: app.controller.idle)
        # Nothing is new, so nothing is written.
        (path,) = (tmp_path / "kv").glob("*.kv")
        path.unlink()
        await pilot.pause(0.1)
        assert kept() == []

    run(script, folder=tmp_path)


def test_what_a_killed_process_had_begun_to_write_goes(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.kv-00", tmp_path / ".b.kv-00"
    for path in (old, new, tmp_path / "c.kv"):
        path.write_bytes(b"x" * 10)
    os.utime(old, (0, 0))
    forget_oldest(tmp_path, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.kv-00", "c.kv"]


def test_the_list_of_chats_searches_and_opens(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "about foxes")
        await say(app, pilot, "/new")
        await say(app, pilot, "about hens")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, ChatPicker))
        await pilot.press(*"foxes")
        await pilot.pause()
        options = app.screen.query_one("OptionList")
        await until(pilot, lambda: options.option_count == 1)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(
            pilot,
            lambda: app.controller.idle and app.controller.conversation.title == "about foxes",
        )
        assert "You asked: about foxes" in shown(app)
        assert "KV cache restored" in shown(app)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, ChatPicker))
        await pilot.press("escape")
        assert app.controller.conversation.title == "about foxes"

    run(script, folder=tmp_path)


async def sidebar_titles(app: ChatApp, pilot: Pilot[Any], *titles: str) -> None:
    """Waits until the sidebar lists these."""
    options = app.sidebar.query_one(OptionList)

    def listed() -> list[str]:
        return [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]

    await until(pilot, lambda: listed() == list(titles))


def test_the_sidebar_lists_finds_and_opens_chats(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert not app.sidebar.display
        await say(app, pilot, "about foxes")
        await pilot.press("ctrl+b")
        await sidebar_titles(app, pilot, "about foxes")
        assert app.sidebar.has_focus_within
        await pilot.press("escape")
        await say(app, pilot, "/new")
        await say(app, pilot, "about hens")
        await sidebar_titles(app, pilot, "about hens", "about foxes")
        # Where there is no room for it, it is away, and comes back.
        await pilot.resize_terminal(60, 24)
        await until(pilot, lambda: not app.sidebar.display)
        await pilot.resize_terminal(100, 24)
        await until(pilot, lambda: app.sidebar.display)
        app.sidebar.chats.search()
        await pilot.press(*"foxes")
        await until(pilot, lambda: app.sidebar.query_one(OptionList).option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.conversation.title == "about foxes")
        await until(pilot, lambda: app.controller.idle)
        assert app.prompt.has_focus
        await pilot.press("ctrl+b")
        await until(pilot, lambda: not app.sidebar.display)
        await pilot.press("ctrl+b")
        await pilot.pause()

    async def again(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.sidebar.display)
        assert app.prompt.has_focus

    run(script, folder=tmp_path, size=(100, 24))
    run(again, folder=tmp_path, size=(100, 24))


def test_chats_are_renamed_and_deleted(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "/rename Farm")
        await say(app, pilot, "about hens")
        await say(app, pilot, "/new")
        await say(app, pilot, "about foxes")
        await pilot.press("ctrl+b")
        await sidebar_titles(app, pilot, "about foxes", "Farm")
        # In the list F2 renames the one marked.
        await pilot.press("down", "down", "f2")
        await until(pilot, lambda: isinstance(app.screen, Entry))
        assert app.screen.query_one(Input).value == "Farm"
        await pilot.press("end", "2", "enter")
        await sidebar_titles(app, pilot, "about foxes", "Farm2")
        # Deleting asks first.
        for answer in (["enter"], ["down", "enter"]):
            await until(pilot, lambda: not isinstance(app.screen, Entry | Question))
            await pilot.press("delete")
            await until(pilot, lambda: isinstance(app.screen, Question))
            await pilot.press(*answer)
        await sidebar_titles(app, pilot, "about foxes")
        await pilot.press("escape")
        await say(app, pilot, "/save")
        kept = [path.stem for path in (tmp_path / "kv").glob("*.kv")]
        assert kept == [app.controller.conversation.id]
        await say(app, pilot, "/delete")
        await until(pilot, lambda: isinstance(app.screen, Question))
        await pilot.press("down", "enter")
        await sidebar_titles(app, pilot)
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages == []

    run(script, folder=tmp_path, size=(100, 24))
    history = History(tmp_path / "chats.sqlite3")
    assert history.chats() == history.search("hens") == history.search("foxes") == []
    assert b"hens" not in b"".join(row[0].encode() for row in history._db.execute(
        "SELECT text FROM chunk UNION ALL SELECT text FROM message_text"
    ))  # fmt: skip
    history.close()
    assert list((tmp_path / "kv").iterdir()) == []


def test_the_theme_is_remembered(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "/theme nord")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert app.theme == "nord"

    run(first, folder=tmp_path)
    run(second, folder=tmp_path)


def test_an_unknown_chat_is_said() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert "there is no chat nowhere" in shown(app)

    run(script, chat_id="nowhere")


# Commands and keys


def test_kv_is_changed_live() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await say(app, pilot, "/kv 8:4 32MiB")
        assert "/32.0 MiB K8V4" in meter(app)
        assert "encoded again" in shown(app)
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
        assert asked(client) == [("system", "Be brief."), ("user", "/slash")]
        await say(app, pilot, "/show")
        assert "temp 0.25" in shown(app)
        await say(app, pilot, f"/export {tmp_path / 'chat.md'}")
        assert (tmp_path / "chat.md").read_text().startswith("## system\n")
        await say(app, pilot, f"/load {tmp_path / 'chat.md'}")
        assert app.controller.conversation.messages[1].text == "/slash"
        await say(app, pilot, "/stats")
        await say(app, pilot, "/quit")

    run(script, client)


def test_every_command_has_an_action_and_a_line_of_help() -> None:
    app = ChatApp(FakeClient(), run(lambda *_: _nothing()).controller.settings)
    assert set(app.slash.by_name) == {command.name for command in COMMANDS}
    assert parse_command("/bye") == ("quit", "")
    text = help_of_app()
    assert all(f"/{command.name}" in text for command in COMMANDS)


# The first screen, the menu of commands, long pastes


def test_the_first_screen_says_the_model_what_to_try_and_where_help_is() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "ready" in meter(app))
        screen = on_screen(app)
        assert "kvq chat with fake" in screen
        for words in ("What is a KV cache?", "/drafts 3", "/kv 4:2 1MiB", "F1 shows every key"):
            assert words in screen
        assert meter(app) == "ready  KV 0 bytes/64.0 MiB K4V2  context 0/4096 0%  fake"
        await say(app, pilot, "hi")
        assert "Three things to try" not in on_screen(app)
        await say(app, pilot, "/new")
        await until(pilot, lambda: "Three things to try" in on_screen(app))
        await pilot.resize_terminal(60, 12)
        await until(pilot, lambda: "Three things to try" not in on_screen(app))

    run(script, size=(110, 24))


def on_screen(app: ChatApp) -> str:
    """The text of what is on the screen."""
    svg = app.export_screenshot()
    return unescape(re.sub("<[^>]*>", "", re.sub(r"</text>", "\n", svg))).replace("\xa0", " ")


def offered(app: ChatApp) -> list[str]:
    return [row.name for row in app.prompt.menu.rows(app.prompt.text)]


def test_a_slash_lists_the_commands_and_they_are_completed() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert not app.query_one(MenuView).display
        await pilot.press("/")
        await until(pilot, lambda: app.query_one(MenuView).display)
        assert offered(app) == [command.name for command in COMMANDS]
        assert "/help" in on_screen(app)
        await pilot.press("s")
        assert offered(app) == ["system", "set", "show", "stats", "save", "search"]
        await pilot.press("up", "tab")
        assert app.prompt.text == "/search "
        assert offered(app) == []
        app.prompt.fill("/s")
        await pilot.press("down", "tab")
        assert app.prompt.text == "/set "
        # Enter completes what needs words, and does what needs none.
        app.prompt.fill("/the")
        await pilot.press("enter")
        assert app.prompt.text == "/theme "
        app.prompt.fill("/sh")
        await pilot.press("enter")
        await until(pilot, lambda: "model fake, context 4096 tokens" in shown(app))
        # By a synonym, too; what is typed whole is taken as it is.
        app.prompt.fill("/by")
        assert offered(app) == ["quit"]
        app.prompt.fill("/new")
        await pilot.press("enter")
        assert app.prompt.text == ""
        # Escape closes the list until the text is another; // begins a message.
        app.prompt.fill("/s")
        await pilot.press("escape")
        assert (app.prompt.text, offered(app)) == ("/s", [])
        await pilot.press("t")
        assert offered(app) == ["stats"]
        app.prompt.fill("//s")
        assert offered(app) == []

    run(script)


def test_a_long_paste_is_one_word_until_it_is_sent() -> None:
    client = FakeClient()
    long = "\n".join(f"line {number}" for number in range(200))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await pilot.press(*"see ")
        app.prompt.post_message(Paste(long))
        word = f"[paste 1: 200 lines, {len(long)} characters]"
        await until(pilot, lambda: app.prompt.text == f"see {word}")
        app.prompt.post_message(Paste("short\none"))
        await until(pilot, lambda: app.prompt.text.endswith("short\none"))
        app.prompt.post_message(Paste("x" * 5000))
        await until(pilot, lambda: "[paste 2: 1 lines, 5000 characters]" in app.prompt.text)
        # Backspace takes one away whole.
        await pilot.press("backspace")
        await until(pilot, lambda: app.prompt.text == f"see {word}short\none")
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.idle and client.turns)
        # A word that nothing was pasted for is text.
        await say(app, pilot, word)

    run(script, client)
    assert asked(client, 0) == [("user", f"see {long}short\none")]
    assert asked(client)[-1] == ("user", f"[paste 1: 200 lines, {len(long)} characters]")


def test_the_focus_is_seen() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        writing = app.prompt.styles.border_top[1]
        await pilot.press("alt+up")
        await until(pilot, lambda: app.transcript.has_focus)
        assert app.transcript.styles.outline_left[0] == "thick"
        assert app.prompt.styles.border_top[1] != writing
        await pilot.press("escape")
        await until(pilot, lambda: app.prompt.styles.border_top[1] == writing)
        assert app.transcript.styles.outline_left[0] == ""

    run(script)


@pytest.mark.parametrize(
    ("keys_of", "name"),
    [
        ("ctrl+j,shift+enter,alt+enter", "Ctrl+J, Shift+Enter, Alt+Enter"),
        ("alt+right_square_bracket,alt+n", "Alt+], Alt+N"),
        ("pageup", "PgUp"),
        ("escape", "Esc"),
        ("f1", "F1"),
        ("y", "Y"),
        ("Y", "Shift+Y"),
    ],
)
def test_keys_are_named_as_keyboards_name_them(keys_of: str, name: str) -> None:
    assert keys.key_name(keys_of) == name


async def _nothing() -> None:
    """A script that does nothing."""


def help_of_app() -> str:
    texts: list[str] = []

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        texts.append(app.screen.text)
        await pilot.press("escape")

    run(script)
    return texts[0]


def test_keys_of_help_palette_and_bindings_come_from_one_table() -> None:
    text = help_of_app()
    app = ChatApp(FakeClient(), run(lambda *_: _nothing()).controller.settings)
    bound = {binding.id for rows in app._bindings.key_to_bindings.values() for binding in rows}
    for row in keys.KEYS:
        assert row.says in text
        assert not row.app or row.name in bound


def test_the_users_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        '[keys]\nnew = "ctrl+t"\nnosuch = "x"\nquit = "ctrl+r"\nsend = "f2"\nhelp = 3\n'
    )

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        text = "".join(shown(app).split())
        assert f"{path}:3:thereisnokeyactionnosuch" in text
        assert f"{path}:4:ctrl+risthekeyofresumealready" in text
        assert f"{path}:6:helpneedskeysinquotes" in text
        app.prompt.fill("one")
        await pilot.press("enter")
        assert app.prompt.text == "one\n"
        await pilot.press("f2")
        await until(pilot, lambda: app.controller.idle and app.controller.conversation.messages)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: not app.controller.conversation.messages)

    run(script, keys_path=path)


@pytest.mark.parametrize("content", ["[keys", "keys = 1", "\xff"])
def test_a_broken_settings_file_is_left_out_and_said(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings_file(tmp_path, monkeypatch, content)
    settings = settings_of()
    assert (settings.theme, settings.meter, settings.sampling) == (None, "full", Sampling())
    assert keys.read_keys(path) == ({}, [])

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert f"{path}" in "".join(shown(app).split())

    run(script, warnings=settings.warnings)


def settings_file(folder: Path, patch: pytest.MonkeyPatch, content: str) -> Path:
    """The user's settings, and a project's folder to be in."""
    for name in ("KVQ_SYSTEM", "KVQ_THEME", "KVQ_TEMP", "KVQ_METER"):
        patch.delenv(name, raising=False)
    patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    path = folder / "config" / "kvq" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    project = folder / "project"
    project.mkdir()
    patch.chdir(project)
    return path


def settings_of(*words: str) -> ChatSettings:
    """What `kvq chat WORDS` starts the chat with."""
    return chat_command.chat_settings(cli.parse(["chat", *words]))


def test_settings_come_from_flag_environment_project_user_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = '[chat]\nsystem = "user"\ntheme = "nord"\nmeter = "short"\n[model]\ntemp = 0.5\n'
    path = settings_file(tmp_path, monkeypatch, user)
    settings = settings_of()
    assert (settings.system, settings.theme, settings.meter) == ("user", "nord", "short")
    assert settings.theme_origin == f"{path}:3"
    assert (settings.sampling.temperature, settings.max_tokens) == (0.5, None)
    Path(".kvq.toml").write_text('[chat]\nsystem = "project"\nmeter = "loud"\ncolour = "red"\n')
    settings = settings_of()
    # A bad value and an unknown key change nothing, and say where they stand.
    assert (settings.system, settings.meter) == ("project", "short")
    (bad, unknown) = settings.warnings
    assert ".kvq.toml:3: " in bad
    assert "choose full, short, off" in bad
    assert ".kvq.toml:4: [chat] has no key colour" in unknown
    monkeypatch.setenv("KVQ_SYSTEM", "environment")
    monkeypatch.setenv("KVQ_THEME", "gruvbox")
    settings = settings_of()
    assert (settings.system, settings.theme) == ("environment", "gruvbox")
    assert settings.theme_origin == "--theme"
    settings = settings_of("--system", "flag", "--theme", "dracula", "--temp", "0")
    assert (settings.system, settings.theme) == ("flag", "dracula")
    assert settings.sampling.temperature == 0


def test_the_users_theme_wins_over_the_one_used_last(tmp_path: Path) -> None:
    said = "config.toml:3: there is no theme 'nosuch'; Ctrl+P, then Theme, lists them"

    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "/theme nord")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert app.theme == "gruvbox"

    async def third(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert app.theme == "nord"

    async def fourth(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert app.theme == "textual-dark"
        assert said in " ".join(shown(app).split())

    run(first, folder=tmp_path)
    run(second, folder=tmp_path, theme="gruvbox")
    run(third, folder=tmp_path)
    run(fourth, folder=tmp_path, theme="nosuch", theme_origin="config.toml:3")


@pytest.mark.parametrize(
    ("detail", "has", "has_not"),
    [("full", "tok/s", "none"), ("short", "context", "tok/s"), ("off", "ready", "KV")],
)
def test_the_meter_is_as_long_as_the_user_wants(detail: str, has: str, has_not: str) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        assert has in meter(app)
        assert has_not not in meter(app)

    run(script, FakeClient(FakeOptions(tok_ms=1)), meter=detail, size=(140, 24))


# Writing a message


def test_a_large_paste_arrives_exactly() -> None:
    client = FakeClient(FakeOptions(context=10_000_000))
    text = ("line with \x1b[31m and\ttab é 你\n" * 7000).strip()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.post_message(Paste(text.replace("\n", "\r\n")))
        await until(pilot, lambda: app.prompt.written == text)
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.idle and client.turns)
        app.prompt.post_message(Paste(text[:30]))
        await until(pilot, lambda: app.prompt.text == text[:30])
        drawn = [app.prompt.render_line(y).text for y in range(app.prompt.size.height)]
        assert any("\u241b[31m" in line for line in drawn)
        assert not any("\x1b" in line for line in drawn)

    run(script, client)
    assert asked(client) == [("user", text)]


@pytest.mark.parametrize(
    "text",
    [
        "👩\u200d👩\u200d👧 family",
        "你好世界",
        "e\u0301a\u0308",
        "שלום עולם",
        "\ud800 lone",
        "a\x00b",
    ],
)
def test_any_unicode_is_taken(text: str) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.post_message(Paste(text))
        await until(pilot, lambda: app.prompt.text)
        await pilot.press("x", "enter")
        await until(pilot, lambda: app.controller.idle and app.controller.conversation.messages)
        kept = text.replace("\ud800", "\ufffd")
        assert app.controller.conversation.messages[0].text == f"{kept}x"
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
            seconds = count()
            patch.setattr("textual._time.get_time", lambda: float(next(seconds)))
            app.set_timer(0.001, lambda: late.append(next(seconds)))
            await until(pilot, lambda: late)

    late: list[int] = []
    run(script)


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
        app.prompt.fill("go")
        await pilot.press("enter")
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
    monkeypatch.setattr(controller, "LEAVE_WITHIN_S", 0.3)
    client, gate = gated("first part", " second")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.prompt.fill("go")
        await pilot.press("enter")
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
