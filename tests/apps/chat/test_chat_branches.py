"""Branches of a chat, drafts of a reply, and a conversation that outgrows its context."""

import dataclasses
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from chat_pilot import meter, on_screen, run, saved, say, send, sent_messages, shown, telling, until
from fake_chat import FakeClient, FakeOptions
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.client import Turn
from kvq_apps.chat.history import History
from kvq_apps.chat.replies import REMEDIES
from kvq_apps.chat.screens import DraftsScreen, QuestionScreen

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
        (edited,) = [turn.edited for turn in client.turns if turn.edited]
        assert [row.text for row in edited] == before[:3]
        stale = client.stale
        await say(app, pilot, "/exact")
        assert f"{stale} tokens were encoded again" in shown(app)
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


def test_the_meter_shows_what_was_predicted_until_all_is_exact() -> None:
    client = FakeClient()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        client.predicted = 30
        await say(app, pilot, "hello")
        assert "  predicted 30  " in meter(app)
        client.stale = 30
        await say(app, pilot, "/exact")
        assert "30 tokens were encoded again" in shown(app)
        assert "predicted" not in meter(app)
        assert app.controller.engine.stats.new_tokens > 0

    run(script, client, size=(140, 24))


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
        # From the last one goes round to the first.
        await pilot.press("3", "alt+n")
        assert screen.marked == 0
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
    assert sent_messages(client, 1) == [("user", "go")]
    history = History(tmp_path / "chats.sqlite3")
    (chat,) = history.chats()
    siblings = history.sibling_messages(chat.id, history.branch(chat.id)[1].id)
    assert [(m.text, m.state) for m in siblings] == [
        ("alpha", "done"), ("beta", "done"), ("gamma", "done")
    ]  # fmt: skip
    history.close()


def test_a_choice_stops_what_is_still_written_and_a_narrow_screen_shows_one() -> None:
    def endless(turn: Turn) -> Iterator[str]:
        yield from repeat("word ")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: "word" in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.idle)
        await send(app, pilot, "/drafts 3")
        await until(pilot, lambda: isinstance(app.screen, DraftsScreen) and drafts_of(app)[2])
        screen = app.screen
        assert isinstance(screen, DraftsScreen)
        await until(pilot, lambda: [column.display for column in screen.columns].count(True) == 1)
        await pilot.press("tab", "enter")
        await until(pilot, lambda: app.controller.idle)
        last = app.controller.conversation.messages[-1]
        assert (last.state, last.branch, last.branches) == ("stopped", 3, 3)
        assert last.text.startswith("word word")

    # Slowly: the pilot waits until the process does little.
    run(script, FakeClient(FakeOptions(tok_ms=60), script=endless), size=(60, 24))


# The context


def test_a_nearly_full_context_warns_and_a_full_one_asks() -> None:
    client = FakeClient(FakeOptions(context=105, tokens=30))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for number in range(3):
            await say(app, pilot, f"question {number}")
        assert "% full: /new begins a new chat" in shown(app)
        await send(app, pilot, "word " * 30)
        await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
        assert len(client.turns[-1].messages) == 7
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.idle)
        assert len(client.turns[-1].messages) < 7
        left_out = app.controller.conversation.num_left_out
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
    await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
    asked_on = app.screen
    keys_of = [key for key, _ in REMEDIES]
    await pilot.press(*["down"] * keys_of.index(way), "enter")
    await until(pilot, lambda: app.screen is not asked_on)


def test_the_model_sums_up_what_no_longer_fits(tmp_path: Path) -> None:
    client = summing_up("We-spoke-of-foxes.", "Foxes-and-hens.", context=280)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for text in ("foxes", "hens", "ducks"):
            await say(app, pilot, text)
        await send(app, pilot, "geese " * 120)
        await choose(app, pilot, "summarise")
        await until(pilot, lambda: app.controller.idle)
        asked_for, answered = sent_messages(client, -2), sent_messages(client)
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
        await send(app, pilot, "swans " * 120)
        await choose(app, pilot, "summarise")
        await until(pilot, lambda: app.controller.idle)
        assert "We-spoke-of-foxes." in sent_messages(client, -2)[0][1]
        assert "Foxes-and-hens." in sent_messages(client)[0][1]
        assert "We-spoke" not in sent_messages(client)[0][1]

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
        await send(app, pilot, "geese " * 120)
        await choose(app, pilot, "summarise")
        await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
        assert app.controller.conversation.num_left_out == 0
        await choose(app, pilot, "keep")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].state == "failed"
        assert app.controller.conversation.num_left_out == 0

    run(script, client)


def test_what_is_too_long_to_be_summed_up_at_once_is_halved() -> None:
    client = summing_up("Short.", "Shorter.", "Shortest.", context=400)

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        for text in ("foxes", "hens", "ducks", "geese"):
            await say(app, pilot, text)
        # The same chat in a smaller context.
        client.facts = dataclasses.replace(client.facts, context_tokens=200)
        await send(app, pilot, "swans")
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
        assert not isinstance(app.screen, QuestionScreen)

    run(script, FakeClient(FakeOptions(context=60)), size=(120, 24))


def test_a_full_context_can_lead_to_a_new_chat_or_nowhere() -> None:
    client = FakeClient(FakeOptions(context=60, tokens=30))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        first = app.controller.conversation.id
        await send(app, pilot, "word " * 30)
        await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages[-1].state == "failed"
        await send(app, pilot, "/retry")
        await choose(app, pilot, "new")
        await until(pilot, lambda: app.controller.idle and app.controller.conversation.id != first)
        assert [m.role for m in app.controller.conversation.messages] == ["user", "assistant"]
        assert app.controller.conversation.messages[-1].state in ("done", "length")

    run(script, client)
