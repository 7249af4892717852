"""Conversations over HTTP: said as the template takes them, and continued where they end."""

from typing import Any

import pytest

from kvq_apps.chat.client import Stream, Turn
from kvq_apps.chat.messages import Message
from kvq_apps.chat.remote import RemoteClient
from kvq_apps.serve.server import Server
from kvq_runtime.config import Sampling
from serving import CHAT, ask, data, scripted_server

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("own_state")

FRANCE = {"role": "user", "content": "The capital of France?"}
BEGUN = {"role": "assistant", "content": "It is"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}


def prompt(server: Server, *messages: Any, **more: Any) -> str:
    reply = ask(server, "/apply-template", {"messages": messages, **more})
    assert reply.status == 200, reply.json
    return reply.json["prompt"]


def refusal(server: Server, *messages: Any, **more: Any) -> str:
    reply = ask(server, "/apply-template", {"messages": messages, **more})
    assert reply.status == 400
    return reply.json["error"]["message"]


def test_what_was_said_otherwise_is_told() -> None:
    with scripted_server("gemma 1 and 2", "Paris.") as server:
        body = {"messages": [{"role": "system", "content": "Be brief."}, FRANCE], "temperature": 0}
        reply = ask(server, CHAT, body)
        assert reply.json["x_kvq"]["reconciled"] == ["system folded"]
        assert reply.json["choices"][0]["message"]["content"] == "Paris."
    with scripted_server("gemma 1 and 2", "Paris.") as server:
        *_, last = data(ask(server, CHAT, body | {"stream": True}))
        assert last["x_kvq"]["reconciled"] == ["system folded"]
    with scripted_server("gemma 1 and 2", "Paris.") as server:
        reply = ask(server, CHAT, body | {"messages": [FRANCE]})
        assert reply.json["x_kvq"]["reconciled"] == []
        assert prompt(server, *body["messages"]).startswith(
            "<start_of_turn>user\nBe brief.\n\nThe capital of France?<end_of_turn>"
        )


@pytest.mark.parametrize("template", ["qwen 2.5", "qwen 3.5", "gpt-oss", "mistral 0.3"])
@pytest.mark.parametrize(("said", "result"), [(None, []), (None, None), ([], "ok"), ("", "")])
def test_calls_and_results_may_say_nothing(template: str, said: Any, result: Any) -> None:
    with scripted_server(template, "Paris.") as server:
        called = {"role": "assistant", "content": said, "tool_calls": [CALL]}
        answered = {"role": "tool", "tool_call_id": "c1", "content": result}
        assert '"x"' in prompt(server, FRANCE, called, answered).replace("\nx\n", '"x"')
        assert "user[0].content" not in refusal(server, {"role": "user", "content": []})


def test_the_last_message_is_continued() -> None:
    with scripted_server("chatml", " Paris.") as server:
        ends = "<|im_start|>assistant\nIt is"
        continued = {"continue_final_message": True, "add_generation_prompt": False}
        for more in ({}, continued, {"add_generation_prompt": False}):
            assert prompt(server, FRANCE, BEGUN, **more).endswith(ends)
        again = "It is<|im_end|>\n<|im_start|>assistant\n"
        for more in ({"continue_final_message": False}, {"add_generation_prompt": True}):
            assert prompt(server, FRANCE, BEGUN, **more).endswith(again)
        closed = {"continue_final_message": False, "add_generation_prompt": False}
        assert prompt(server, FRANCE, BEGUN, **closed).endswith("It is<|im_end|>\n")
        assert prompt(server, FRANCE, add_generation_prompt=False).endswith("France?<|im_end|>\n")
        body = {"messages": [FRANCE, BEGUN], "temperature": 0}
        assert ask(server, CHAT, body).json["choices"][0]["message"]["content"] == " Paris."


def test_what_cannot_be_continued_is_refused() -> None:
    with scripted_server("chatml", "Paris.") as server:
        both = {"continue_final_message": True, "add_generation_prompt": True}
        assert "send one of them" in refusal(server, FRANCE, BEGUN, **both)
        options = {"continue_final_message": True}
        assert "has to be an assistant's" in refusal(server, FRANCE, **options)
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        assert "without tool_calls" in refusal(server, FRANCE, called, **options)
        assert prompt(server, FRANCE, called).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_continued_and_ends(stream: bool) -> None:
    """The answer holds what is new of the thought, and what is said behind it."""
    begun = {"role": "assistant", "content": "", "reasoning_content": "France, so"}
    with scripted_server("qwen 3", " Paris.\n</think>\n\nParis.") as server:
        assert prompt(server, FRANCE, begun).endswith("assistant\n<think>\nFrance, so")
        body = {"messages": [FRANCE, begun], "temperature": 0, "stream": stream}
        reply = ask(server, CHAT, body)
        chunks = data(reply) if stream else [reply.json]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        rows = [choice["delta" if stream else "message"] for choice in choices]
        assert "".join(row.get("reasoning_content", "") for row in rows) == "Paris."
        assert "".join(row.get("content") or "" for row in rows) == "Paris."


def test_behind_a_thought_the_answer_is_continued() -> None:
    begun = {"role": "assistant", "content": "It", "reasoning_content": "France, so Paris."}
    with scripted_server("qwen 3", " is <think>Paris.") as server:
        assert prompt(server, FRANCE, begun).endswith("France, so Paris.\n</think>\n\nIt")
        body = {"messages": [FRANCE, begun], "temperature": 0}
        message = ask(server, CHAT, body).json["choices"][0]["message"]
        assert message["content"].startswith(" is")
        assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("begun", "said", "rest"),
    [
        ("It", " is Paris.", " is Paris."),
        ("<think>\nFrance, so", " Paris.\n</think>\n\nParis.", "Paris.\n</think>\n\nParis."),
        ("<think>\nSo.\n</think>\n\nIt", " is Paris.", " is Paris."),
    ],
)
def test_a_chat_goes_on_with_a_reply_that_was_cut(begun: str, said: str, rest: str) -> None:
    rows = [Message(role="user", text="Where?"), Message(role="assistant", text=begun)]
    with scripted_server("qwen 3", said) as server:
        remote, stream = RemoteClient(server.address), Stream()
        remote.open()
        assert remote.reply(Turn(messages=rows, sampling=Sampling(temperature=0)), stream) == "stop"
        assert stream.take().text == rest
