"""Models most of whose layers do not attend, behind a server and in a chat: what of a conversation
is computed again, and that answers are those of a text that was never held."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

import chat_pilot
from draft_heads import make_drafting
from kvq import native_library
from kvq.config import FOLD_TOKENS
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.client import Stream, Turn
from kvq_apps.chat.local import LocalClient
from kvq_apps.chat.messages import Message
from kvq_apps.cli import main
from kvq_apps.serve.server import Server
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.sequence.hunks import common_prefix
from kvq_specdraft import drafter_named
from serving import CHAT, GREEDY, ask, loaded, metric, running
from shelf import EIGHT, Shelf

pytestmark = [
    pytest.mark.usefixtures("own_state"),
    pytest.mark.skipif(not native_library.available(), reason=native_library.why_not()),
]
SYSTEM = {"role": "system", "content": "A page holds sixty-four tokens; a plan says how many. " * 9}


@pytest.fixture(scope="module", params=["lfm2", "qwen3-5"])
def bundle(request: pytest.FixtureRequest, shelf: Shelf) -> Path:
    return shelf.exported(shelf.family(request.param, max_position_embeddings=2048), EIGHT)


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        load = loaded(str(bundle), context_tokens=1500)
        with running(load, sessions=1, saved_bytes=0) as started:
            yield started


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(server: Server, *messages: dict[str, str], **more: Any) -> Any:
    body = {"messages": list(messages), "max_tokens": 6, **GREEDY, **more}
    return ask(server, CHAT, body)


def ids_of(bundle: Path, *messages: dict[str, str]) -> list[int]:
    tokenizer = Bundle.open(bundle).tokenizer()
    assert tokenizer is not None
    return tokenizer.chat(list(messages), add_generation_prompt=True)


def turns_of(bundle: Path, ids: list[int]) -> list[int]:
    """Where turns end."""
    ends = Bundle.open(bundle).manifest.eos_token_ids
    return [place + 1 for place, token in enumerate(ids) if token in ends]


def test_a_server_goes_back_to_a_turns_end(server: Server, bundle: Path) -> None:
    """Another conversation, an answer again, a message changed, the same message with more behind
    it: each begins at the place that was marked, and answers as if nothing had been held."""
    first = [SYSTEM, user("How many pages does a session hold? " * 8)]
    other = [SYSTEM, user("What does a plan say of a page? " * 8)]
    edited = [SYSTEM, user("How many pages does a session hold? " * 7 + "And why?")]
    cached_ids, conversations = list[int](), (first, first, other, edited)
    answers: list[Any] = []
    for messages in conversations:
        reply = answered(server, *messages)
        ids = ids_of(bundle, *messages)
        assert reply.json["usage"]["prompt_tokens"] == len(ids)
        system, turn = turns_of(bundle, ids)
        shared = common_prefix(cached_ids, ids)
        nearest = max((place for place in (system, turn) if place <= shared), default=0)
        if cached_ids:
            assert system <= shared
            assert nearest - FOLD_TOKENS < reply.cached_tokens <= shared
        cached_ids = ids
        answers.append(reply.json["choices"])
    for messages, answer in zip(conversations, answers, strict=True):
        fresh = answered(server, *messages, cache_prompt=False)
        assert fresh.cached_tokens == 0
        assert fresh.json["choices"] == answer


def test_a_conversation_goes_on(server: Server, bundle: Path) -> None:
    messages = [SYSTEM, user("How many pages? " * 12)]
    reply = answered(server, *messages)
    for question in ("Why?", "And then?", "Who says so?"):
        ids = ids_of(bundle, *messages)
        answer = {"role": "assistant", "content": reply.json["choices"][0]["message"]["content"]}
        messages += [answer, user(question * 20)]
        reply = answered(server, *messages)
        assert reply.cached_tokens > turns_of(bundle, ids)[-1] - FOLD_TOKENS
    fresh = answered(server, *messages, cache_prompt=False)
    assert fresh.json["choices"] == reply.json["choices"]


def local(bundle: Path) -> LocalClient:
    return LocalClient(
        str(bundle), engine_options={"threads": 1}, session_options={"k_bits": 16, "v_bits": 16}
    )


def test_a_chat_edits_a_message(bundle: Path) -> None:
    def reply(client: LocalClient, *texts: str) -> tuple[str, Any]:
        roles, stream = ("user", "assistant"), Stream()
        rows = [Message(role=roles[at % 2], text=text) for at, text in enumerate(texts)]
        client.reply(Turn(messages=rows, sampling=Sampling(temperature=0), max_tokens=8), stream)
        news = stream.take()
        return news.text, news.stats

    client, question = local(bundle), "a long question about pages and plans " * 9
    client.open()
    first, _ = reply(client, question)
    second, _ = reply(client, question, first, "and now? " * 30)
    changed, stats = reply(client, question, first, "and later? " * 30)
    again, _ = reply(client, question)
    client.close()
    assert again == first
    # The first turn's end is where the text was gone back to.
    (turn,) = turns_of(bundle, ids_of(bundle, user(question)))
    assert stats.cached_tokens > turn - FOLD_TOKENS
    for texts, expected in (((question, first, "and later? " * 30), changed), ((question,), first)):
        fresh = local(bundle)
        fresh.open()
        actual, _ = reply(fresh, *texts)
        fresh.close()
        assert actual == expected
    assert second != changed


def test_commands_answer_as_a_chat_does(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvq run --chat`, a message piped into `kvq chat`, and the chat's app, of several turns."""
    words = ("--temp", "0", "--kv", "fp", "--threads", "1", "-n", "8")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"")))
    assert main(["run", str(bundle), "How many pages?", *words, "--chat"]) == 0
    once = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"How many pages?")))
    assert main(["chat", str(bundle), *words, "--no-log"]) == 0
    assert capsys.readouterr().out == once
    app = chat_pilot.run(
        conversation, local(bundle), max_tokens=8, sampling_overrides={"temperature": 0}
    )
    first, again = (row.text for row in app.controller.conversation.messages[1::2])
    assert first == once.removesuffix("\n")
    assert again


async def conversation(app: ChatApp, pilot: Pilot[Any]) -> None:
    await chat_pilot.say(app, pilot, "How many pages?")
    await chat_pilot.say(app, pilot, "And then?")


def test_a_server_drafts_with_the_models_head(shelf: Shelf) -> None:
    """Conversations in shared passes, which take turns in the slots, answer as without drafts."""
    source = shelf.once("source", "mtp", make_drafting)
    bundle = str(shelf.exported(source, EIGHT))
    talks = [[user(f"How many pages does plan {number} hold? " * 4)] for number in range(3)]
    answers: dict[str, list[Any]] = {}
    for name in ("none", "mtp:least=1e-9,most=3"):
        draft = (lambda: None) if name == "none" else partial(drafter_named, name)
        load = loaded(bundle, context_tokens=400, draft=draft)
        with running(load, sessions=2, saved_bytes=0) as server, ThreadPoolExecutor(3) as threads:
            replies = [
                reply.json
                for _ in range(2)
                for reply in threads.map(lambda talk: answered(server, *talk, max_tokens=20), talks)
            ]
            answers[name] = [reply["choices"] for reply in replies]
            drafted = metric(server, "drafted_tokens_total")
            assert (drafted > 0) == (name != "none")
    first, second = answers.values()
    assert first == second
