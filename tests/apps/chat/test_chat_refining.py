"""What a chat does while its user reads: what was predicted of the prompt is computed."""

from typing import Any

import pytest
from textual.pilot import Pilot

from chat_pilot import meter, run, say, shown, until
from fake_chat import FakeClient, FakeOptions
from kvq import native_library
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.client import Stream, Turn
from kvq_apps.chat.local import LocalClient
from kvq_apps.chat.messages import Message
from kvq_runtime.config import Sampling
from shelf import EIGHT, Shelf


def test_what_was_predicted_is_computed_while_nobody_waits() -> None:
    client = FakeClient()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        client.predicted = 30
        await say(app, pilot, "hello")
        await until(pilot, lambda: client.predicted == 0)
        await until(pilot, lambda: app.controller.idle)
        assert "predicted" not in meter(app)
        assert app.controller.engine.stats.new_tokens > 0

    app = run(script, client, size=(140, 24))
    assert "30 predicted tokens are computed: all is exact" in shown(app)


@pytest.mark.slow
def test_a_question_stops_it_and_it_goes_on_afterwards() -> None:
    client = FakeClient(FakeOptions(tok_ms=1))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        client.predicted = 1 << 30
        # `say` would wait for a rest that may be over before it looks.
        app.controller.enqueue("first")
        await until(pilot, lambda: client.predicted < 1 << 30)
        await until(pilot, lambda: "predicted" in meter(app))
        app.controller.enqueue("second")
        await until(pilot, lambda: len(client.turns) == 2)
        await until(pilot, lambda: app.controller.engine.stats.new_tokens > 0)
        client.predicted = 5
        await until(pilot, lambda: client.predicted == 0)

    run(script, client, size=(140, 24))


@pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
def test_a_local_engine_refines_in_pieces(shelf: Shelf) -> None:
    bundle = str(shelf.bundle(EIGHT, num_hidden_layers=4))
    client = LocalClient(
        bundle, engine_options={"threads": 1}, session_options={"predict": "50%", "kv": "8:8"}
    )
    client.open()
    stream = Stream()
    turn = Turn(
        messages=[Message(role="user", text="The quick brown fox. " * 20)],
        sampling=Sampling(temperature=0),
        max_tokens=4,
    )
    client.reply(turn, stream)
    stats = stream.take().stats
    assert stats is not None
    assert stats.predicted_tokens > 50
    stopped = Stream()
    stopped.cancel()
    remaining = client.refine(stopped)
    assert remaining > stats.predicted_tokens
    again = Stream()
    assert client.refine(again) == 0
    update = again.take()
    assert update.stats is not None
    assert (update.stats.predicted_tokens, update.stats.context_tokens) == (
        0,
        remaining + 5,
    )  # the last token was pending
    client.close()
