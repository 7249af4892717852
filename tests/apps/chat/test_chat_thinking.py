"""What a model thinks, in the chat: folded away, kept with the message, and handed back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from tokenizers import AddedToken

from chat_pilot import gated, run, saved, say, send, shown, telling, until
from command_line import kvq
from environment import environment_in
from kvq.errors import UsageError
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.chat.client import ReplyWriter, Stream, Turn
from kvq_apps.chat.local import LocalClient
from kvq_apps.chat.messages import Message, ReplyStats, answer_text, thought_line
from kvq_apps.chat.plain import answer_once
from kvq_apps.chat.remote import RemoteClient
from kvq_export.export import export_model
from kvq_models.control import ControlTokens
from kvq_models.thinking import KEPT, ThinkingReader
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from serving import Rule, running
from shelf import PLAIN, Shelf
from tiny import byte_level_tokenizer, make_llama_checkpoint

Pilots = Pilot[Any]
REPLY = "<think>\nOne is odd.\nTwo is not.\n</think>\n\nIt is **two**."
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.reasoning_content and KEEP %}"
    "{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}"
    "{% endif %}{% endif %}"
)


def test_a_thought_is_one_line_until_a_key_shows_it(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilots) -> None:
        await say(app, pilot, "which?")
        lines = shown(app).splitlines()
        assert lines[-2:] == ["thought", "It is two."]
        await pilot.press("ctrl+o")
        assert shown(app).splitlines()[-4:] == [
            "thought", "One is odd.", "Two is not.", "It is two."
        ]  # fmt: skip
        await pilot.press("ctrl+o")
        assert shown(app).splitlines() == lines
        # Copied is what was said.
        copied: list[str] = []
        app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        app.action_copy()
        assert copied == ["It is **two**."]

    run(script, telling(REPLY), folder=tmp_path)
    assert saved(tmp_path)[-1].text == REPLY

    async def again(app: ChatApp, pilot: Pilots) -> None:
        await until(pilot, lambda: "It is two." in shown(app))
        assert "thought\nIt is two." in shown(app)

    run(again, telling(REPLY), folder=tmp_path, latest=True)


def test_a_thought_may_be_hidden() -> None:
    async def script(app: ChatApp, pilot: Pilots) -> None:
        await say(app, pilot, "which?")
        app.transcript.unfold(shown=True)
        assert shown(app).splitlines() == ["you", "which?", "", "kvq", "It is two."]

    run(script, telling(REPLY), think="hide")


def test_a_thought_streams_into_its_line() -> None:
    client, gate = gated(REPLY[:20], REPLY[20:])

    async def script(app: ChatApp, pilot: Pilots) -> None:
        await send(app, pilot, "which?")
        await until(pilot, lambda: "thinking" in shown(app))
        assert "One" not in shown(app)
        app.transcript.unfold(shown=True)
        assert "One is odd" in shown(app)
        gate.set()
        await until(pilot, lambda: app.controller.idle)
        assert shown(app).splitlines()[-4:] == [
            "thought", "One is odd.", "Two is not.", "It is two."
        ]  # fmt: skip

    run(script, client)


def test_a_long_thought_is_drawn_whole_in_parts() -> None:
    lines = [f"line {number} of the thought" for number in range(600)]
    text = "<think>\n" + "\n".join(lines) + "\n</think>\n\nDone."

    async def script(app: ChatApp, pilot: Pilots) -> None:
        await say(app, pilot, "which?")
        assert len(app.transcript.lines_since(0.0)) < 8
        app.transcript.unfold(shown=True)
        assert shown(app).splitlines()[-601:] == [*lines, "Done."]
        # What grows is drawn again, so its last part is short.
        assert len(app.transcript._rows) > 4

    run(script, telling(text, context=100_000), max_tokens=None)


def test_what_a_thought_took_is_told() -> None:
    assert thought_line(ReplyStats(thought_ms=3210, thought_tokens=120)) == (
        "thought for 3.2 s, 120 tokens"
    )
    stream = Stream()
    thoughts = ReplyWriter(stream, ThinkingReader(KEPT))
    for text in ("<think>", "\n", "a", " b", "\n", "</think>", "\n\n", "c"):
        thoughts.token(text)
    thoughts.end("stop")
    assert stream.take().text == "<think>\na b\n</think>\n\nc"
    measured = thoughts.with_thought(ReplyStats(new_tokens=8))
    assert (measured.new_tokens, measured.thought_tokens) == (8, 5)
    assert measured.thought_ms > 0
    assert answer_text(Message(role="user", text=REPLY)) == REPLY
    assert answer_text(Message(role="assistant", text=REPLY)) == "It is **two**."


def test_a_pipe_gets_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer_once(telling(REPLY), ChatSettings(), "which?", as_json=False) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("It is **two**.\n", "One is odd.\nTwo is not.\n\n")
    answer_once(telling(REPLY), ChatSettings(think="hide"), "which?", as_json=False)
    assert capsys.readouterr() == ("It is **two**.\n", "")
    answer_once(telling(REPLY), ChatSettings(), "which?", as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["thought"], report["text"]) == ("One is odd.\nTwo is not.", "It is **two**.")


def test_think_is_set_in_the_chat() -> None:
    settings = ChatSettings()
    assert settings.turn([]).think == "auto"
    settings.change("think off")
    assert settings.turn([]).think == "off"
    assert "think off" in settings.lines()[-1]
    with pytest.raises(UsageError, match="auto, on, off, hide"):
        settings.change("think maybe")


def bundle_with(template: str, shelf: Shelf, tmp_path: Path) -> str:
    source = tmp_path / "checkpoint"
    make_llama_checkpoint(source, max_position_embeddings=1024)
    (source / "chat_template.jinja").write_text(template)
    export_model(source, tmp_path / "bundle", PLAIN)
    return str(tmp_path / "bundle")


def replied(client: LocalClient, *texts: str, **settings: Any) -> tuple[str, ReplyStats]:
    roles, stream = ("user", "assistant"), Stream()
    rows = [Message(role=roles[index % 2], text=text) for index, text in enumerate(texts)]
    settings = {"sampling": Sampling(temperature=0), "max_tokens": 6} | settings
    client.reply(Turn(messages=rows, **settings), stream)
    update = stream.take()
    assert update.stats is not None
    return update.text, update.stats


@pytest.mark.parametrize("keeps", [True, False])
def test_a_local_model_thinks_and_goes_on(keeps: bool, shelf: Shelf, tmp_path: Path) -> None:
    template = TEMPLATE.replace("KEEP", str(keeps))
    client = LocalClient(
        bundle_with(template, shelf, tmp_path),
        engine_options={"threads": 1, "backend": "float"},
        session_options={"k_bits": 16, "v_bits": 16},
    )
    client.open()
    first, stats = replied(client, "which?")
    assert first.startswith("<think>\n")
    assert stats.thought_tokens == stats.new_tokens == 6
    assert stats.thought_ms > 0
    # A reply that was cut goes on where it is, from the tokens that are held.
    more, stats = replied(client, "which?", first)
    assert stats.cached_tokens == stats.prompt_tokens - 1
    whole, _ = replied(client, "which?", max_tokens=12)
    assert first + more == whole
    # In the next turn the template decides whether the thought is read again.
    shared = replied(client, "which?", "<think>\nWell.\n</think>\n\nTwo.")[1].prompt_tokens
    _, stats = replied(client, "which?", "<think>\nWell.\n</think>\n\nTwo.", "why?")
    text = client._opened()[0].tokenizer.decode(client._opened()[1].tokens)
    assert ("Well.\n</think>\n\nTwo." in text) == keeps
    assert (stats.cached_tokens >= shared) == keeps
    # Switched off, what comes is said.
    off, stats = replied(client, "which?", think="off")
    assert not off.startswith("<think>")
    assert stats.thought_tokens == 0
    client.close()


def test_a_model_that_cannot_think_is_not_asked_to(shelf: Shelf) -> None:
    client = LocalClient(
        str(shelf.bundle(max_position_embeddings=1024)),
        engine_options={"threads": 1, "backend": "float"},
        session_options={},
    )
    client.open()
    assert replied(client, "which?", think="off")[0] == replied(client, "which?")[0]
    with pytest.raises(UsageError, match="--think on is not possible"):
        replied(client, "which?", think="on")
    client.close()


@pytest.fixture
def thinking_server(own_state: None) -> Iterator[tuple[str, Tokenizer]]:
    """A server on a model that always thinks first, then says."""
    rule, library = Rule(), byte_level_tokenizer()
    library.add_tokens([AddedToken(mark) for mark in KEPT.tokens])
    rule.tokenizer = Tokenizer.from_json(
        library.to_str(), ControlTokens(eos=(0,)), TEMPLATE.replace("KEEP", "True")
    )
    go = rule.tokenizer.encode("<think>\n", special=True)
    script = [*rule.tokenizer.encode(f"{REPLY[8:]}", special=True), 0]

    def scripted(tokens: Any) -> int:
        place = list(tokens[::-1]).index(go[0]) - len(go) + 1
        return script[max(0, min(place, len(script) - 1))]

    rule.backend.rule = scripted
    with running(rule.load, sessions=1) as server:
        yield server.address, rule.tokenizer  # type: ignore[attr-defined]


def test_a_server_tells_thoughts_apart(thinking_server: tuple[str, Tokenizer]) -> None:
    address, tokenizer = thinking_server
    client, stream = RemoteClient(address), Stream()
    client.open()
    rows = [
        Message(role="user", text="which?"), Message(role="assistant", text=REPLY),
        Message(role="user", text="sure?"),
    ]  # fmt: skip
    turn = Turn(messages=rows, sampling=Sampling(temperature=0))
    assert client.reply(turn, stream) == "stop"
    update = stream.take()
    assert update.text == REPLY
    assert update.stats is not None
    assert update.stats.thought_tokens > 4
    # What was thought before goes back apart from what was said.
    sent: list[dict[str, str]] = [{"role": row.role, "content": row.text} for row in rows]
    sent[1] |= {"content": "It is **two**.", "reasoning_content": "One is odd.\nTwo is not."}
    assert update.stats.prompt_tokens == len(tokenizer.chat(sent))


@pytest.mark.slow
def test_run_tells_thoughts_beside_the_answer(shelf: Shelf, tmp_path: Path) -> None:
    bundle = bundle_with(TEMPLATE.replace("KEEP", "True"), shelf, tmp_path)
    home = environment_in(tmp_path)
    words = ("run", "-m", bundle, "--temp", "0", "-n", "8", "which?")
    finished = kvq(*words, "--chat", home=home)
    assert finished.returncode == 0
    assert finished.stdout == b"\n"
    thought = finished.stderr.decode().removesuffix("\n\n")
    assert thought
    assert kvq(*words, "--chat", "--think", "hide", home=home).stderr == b""
    off = kvq(*words, "--chat", "--think", "off", home=home)
    assert (off.stderr, off.stdout != b"\n") == (b"", True)
    report = json.loads(kvq(*words, "--chat", "--json", home=home).stdout)
    assert (report["text"], report["thought"], report["thought_tokens"]) == ("", thought, 8)
    refused = kvq(*words, "--think", "off", home=home)
    assert refused.returncode == 2
    assert b"--chat" in refused.stderr
