"""Responses and Messages by the clients that agents use: text, thoughts, calls, streams, errors."""

import json
from typing import Any

import anthropic
import openai
import pytest

from chat_templates import TEMPLATES
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.messages_api import chat_body as messages_body
from kvq_apps.serve.responses_api import StoredResponses
from kvq_apps.serve.responses_api import chat_body as responses_body
from kvq_apps.serve.server import Server
from serving import Reply, Rule, ask, read_all, running, scripted_server, send

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("own_state")

TEMPLATE = "qwen 3"
WITH_TOOLS = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}" + TEMPLATES[TEMPLATE]
)
SAID = "<think>\nHm.\n</think>\n\nIt is Paris."
CALLED = '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
INPUT_TOKENS = "/v1/responses/input_tokens"
QUESTION = {"role": "user", "content": "The capital of France?"}


def open_ai(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def claude(server: Server, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key=key, max_retries=0)


def test_a_response_has_a_thought_and_a_text() -> None:
    with scripted_server(TEMPLATE, SAID) as server, open_ai(server) as client:
        response = client.responses.create(model="x", input="The capital of France?")
    assert response.status == "completed"
    assert response.output_text == "It is Paris."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens > 10
    assert usage.output_tokens == usage.total_tokens - usage.input_tokens > 10
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_response_streams_in_the_order_that_clients_assert() -> None:
    with (
        scripted_server(TEMPLATE, SAID) as server,
        open_ai(server) as client,
        client.responses.stream(model="x", input="Hi") as stream,
    ):
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(delta.delta for delta in deltas) == final.output_text == "It is Paris."
    opened = kinds.index("response.output_item.added", 2)
    assert kinds[opened + 1] == "response.content_part.added"
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    )


def test_a_response_calls_a_function_and_goes_on_from_its_result() -> None:
    tool: Any = {"type": "function", "name": "find", "parameters": SCHEMA}
    with scripted_server(WITH_TOOLS, CALLED) as server, open_ai(server) as client:
        first = client.responses.create(model="x", input="Find x", tools=[tool])
        (call,) = first.output
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("find", '{"q": "x"}')
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
        second = client.responses.create(
            model="x", input=[result], tools=[tool], previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.create(model="x", input="Hi", previous_response_id="resp_0")
        unstored = client.responses.create(model="x", input="Hi", store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="x", input="Hi", previous_response_id=unstored.id)


def test_input_tokens_are_those_that_the_response_reads() -> None:
    tool: Any = {"type": "function", "name": "find", "parameters": SCHEMA}
    request: Any = {"model": "x", "input": "Find x"}
    with scripted_server(WITH_TOOLS, SAID) as server, open_ai(server) as client:
        first = client.responses.create(**request)
        more = [
            {},
            {"instructions": "Be brief."},
            {"tools": [tool]},
            {"previous_response_id": first.id},
        ]
        counts: list[int] = []
        for fields in more:
            request |= fields
            counted = client.responses.input_tokens.count(**request)
            usage = client.responses.create(**request).usage
            assert counted.object == "response.input_tokens"
            assert usage is not None
            assert counted.input_tokens == usage.input_tokens
            counts.append(counted.input_tokens)
    assert counts == sorted({*counts})


def test_input_tokens_need_no_model_and_are_refused_as_the_response_is(
    rule: Rule, served: Server
) -> None:
    whole = {"input": "Hi", "stream": True, "max_output_tokens": 3, "store": True}
    reply = ask(served, INPUT_TOKENS, whole)
    assert reply.json.keys() == {"object", "input_tokens"}
    assert rule.backend.arrivals == 0
    wrong: list[Any] = [
        {"input": []},
        {"input": "word " * 9000},
        {"input": "Hi", "store": "no"},
        {"input": "Hi", "previous_response_id": "resp_0"},
    ]
    for body in wrong:
        refused, expected = ask(served, INPUT_TOKENS, body), ask(served, "/v1/responses", body)
        assert refused.status == expected.status >= 400
        assert refused.json == expected.json


def test_input_tokens_go_on_from_the_responses_of_their_owner(served: Server) -> None:
    mine = {"input": "Hi", "cache_salt": "mine", "max_output_tokens": 2}
    first = ask(served, "/v1/responses", mine).json
    more = {**mine, "previous_response_id": first["id"]}
    count = ask(served, INPUT_TOKENS, more).json["input_tokens"]
    assert count > first["usage"]["input_tokens"]
    assert count == ask(served, "/v1/responses", more).json["usage"]["input_tokens"]
    assert ask(served, INPUT_TOKENS, {**more, "cache_salt": "other"}).status == 404


def test_a_response_that_is_cut_says_so() -> None:
    with scripted_server(TEMPLATE, "one two three four") as server, open_ai(server) as client:
        response = client.responses.create(model="x", input="Hi", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_input_items_are_the_conversation() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Find x"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"q": "x"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
    ]
    fields = Fields({"instructions": "Help.", "input": items, "max_output_tokens": 5})
    body, conversation = responses_body(fields, StoredResponses(), "")
    assert body["max_completion_tokens"] == 5
    assert [message["role"] for message in body["messages"]] == [
        *("system", "developer", "user", "assistant", "tool"),
    ]
    assistant = body["messages"][3]
    assert assistant["reasoning_content"] == "Hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"q": "x"}'}
    assert conversation == body["messages"][1:]


def test_responses_are_kept_for_their_owner_and_the_oldest_go() -> None:
    stored = StoredResponses()
    for number in range(257):
        stored.put("mine", str(number), [QUESTION])
    assert stored.get("mine", "256") == [QUESTION]
    for owner, identity in (("mine", "0"), ("", "256"), ("other", "256")):
        with pytest.raises(RequestError, match="there is no response"):
            stored.get(owner, identity)


def test_a_message_has_a_thought_and_a_text() -> None:
    with scripted_server(TEMPLATE, SAID) as server, claude(server) as client:
        message = client.messages.create(
            model="x", max_tokens=99, messages=[QUESTION], system="Be."
        )
        count = client.messages.count_tokens(model="x", messages=[QUESTION], system="Be.")
        again = client.messages.create(model="x", max_tokens=99, messages=[QUESTION], system="Be.")
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[1].text == "It is Paris."
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == count.input_tokens
    read = again.usage
    assert read.cache_read_input_tokens is not None
    assert read.input_tokens + read.cache_read_input_tokens == count.input_tokens
    assert read.cache_read_input_tokens > 0


def test_a_message_streams_its_blocks() -> None:
    with (
        scripted_server(TEMPLATE, SAID) as server,
        claude(server) as client,
        client.messages.stream(model="x", max_tokens=99, messages=[QUESTION]) as stream,
    ):
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "It is Paris."
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 10


@pytest.mark.parametrize("streams", [False, True])
def test_a_message_uses_a_tool(streams: bool) -> None:
    tools: Any = [{"name": "find", "description": "Finds.", "input_schema": SCHEMA}]
    request: Any = {"model": "x", "max_tokens": 99, "messages": [QUESTION], "tools": tools}
    with scripted_server(WITH_TOOLS, CALLED) as server, claude(server) as client:
        if streams:
            with client.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**request)
        (block,) = message.content
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("find", {"q": "x"})
        assert message.stop_reason == "tool_use"
        result: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [], "is_error": False},
            {"type": "text", "text": "Go on."},
        ]
        turns = [
            QUESTION,
            {"role": "assistant", "content": [block.model_dump()]},
            {"role": "user", "content": result},
        ]
        assert client.messages.create(**{**request, "messages": turns}).stop_reason == "tool_use"


def test_blocks_are_the_conversation() -> None:
    marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    turns = [
        QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "find", "input": {"q": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "none", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    body = messages_body(Fields({"system": [marked], "messages": turns, "max_tokens": 5}))
    system, _, assistant, tool, user = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm")
    assert tool == {"role": "tool", "tool_call_id": "t1", "content": "Error: none"}
    assert user == {"role": "user", "content": "Go on."}


def test_a_result_with_a_picture_does_not_end_a_conversation() -> None:
    picture = {"source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    seen = [{"type": "text", "text": "A file."}, {"type": "image", **picture}]
    turns: Any = [
        QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "see"}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": seen}],
        },
    ]
    items: Any = [
        QUESTION,
        {"type": "function_call", "call_id": "t1", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t1", "output": [{"type": "input_image"}]},
    ]
    with scripted_server(TEMPLATE, SAID) as server:
        with claude(server) as client:
            message = client.messages.create(model="x", max_tokens=99, messages=turns)
        with open_ai(server) as other:
            response = other.responses.create(model="x", input=items)
        messages = messages_body(Fields({"messages": turns}))["messages"]
        prompt = ask(server, "/apply-template", {"messages": messages}).json["prompt"]
    assert message.stop_reason == "end_turn"
    assert response.output_text == "It is Paris."
    assert "A file.\n\n[image left out: this model reads text only]" in prompt


def test_a_deferred_tool_is_shown_where_a_result_refers_to_it() -> None:
    find = {"name": "find", "description": "Finds.", "input_schema": SCHEMA}
    later = {**find, "name": "later", "defer_loading": True}
    called = CALLED.replace("find", "later")
    request: Any = {"model": "x", "messages": [QUESTION], "tools": [find]}
    reference = {"type": "tool_reference", "tool_name": "later"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [reference]}
    with scripted_server(WITH_TOOLS, called) as server, claude(server) as client:
        alone = client.messages.count_tokens(**request)
        request["tools"].append(later)
        assert client.messages.count_tokens(**request) == alone
        (block,) = client.messages.create(**request, max_tokens=99).content
    assert (block.type, block.type == "tool_use" and block.name) == ("tool_use", "later")
    body = messages_body(Fields({**request, "messages": [{"role": "user", "content": [result]}]}))
    text = body["messages"][0]["content"]
    shown = json.loads(text.removeprefix("<function>").removesuffix("</function>"))
    assert shown == {"name": "later", "description": "Finds.", "parameters": SCHEMA}


def test_two_conversations_of_claude_code_begin_alike() -> None:
    def system_of(version: str) -> str:
        bill = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={version};"}
        blocks = [bill, {"type": "text", "text": "Be brief."}]
        body = messages_body(Fields({"system": blocks, "messages": [QUESTION]}))
        return body["messages"][0]["content"]

    assert system_of("2.1.59e") == system_of("2.1.a01") == "Be brief."
    late, answer = {"role": "system", "content": "Here."}, {"role": "assistant", "content": "Yes."}
    turns = [QUESTION, late, answer, QUESTION, late]
    rows = messages_body(Fields({"system": "Be.", "messages": turns}))["messages"]
    roles = ["system", "system", "user", "assistant", "user", "system"]
    assert [row["role"] for row in rows] == roles


def test_output_config_says_effort_and_format() -> None:
    output = {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    fields = {"messages": [QUESTION], "thinking": {"type": "adaptive"}, "output_config": output}
    body = messages_body(Fields(fields))
    assert (body["reasoning_effort"], body["response_format"]) == ("low", output["format"])
    body = messages_body(Fields({**fields, "thinking": {"type": "disabled"}}))
    assert body["reasoning_effort"] == "none"


def test_a_response_has_events_while_its_prompt_is_read() -> None:
    rule = Rule()
    rule.backend.shut = True
    body = {"input": "Hi", "max_output_tokens": 2, "stream": True}
    with (
        running(rule.load, sessions=1, ping_s=0.01) as server,
        send(server, "/v1/responses", body) as connection,
    ):
        raw = b""
        while raw.count(b": prompt") < 3:
            raw += connection.recv(1 << 16)
        rule.backend.open()
        reply = Reply(raw + read_all(connection))
    rows = [event.partition("data: ")[2] for event in reply.events if event.startswith("event: ")]
    events = [json.loads(row) for row in rows]
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert (kinds.count("response.created"), kinds[-1]) == (1, "response.incomplete")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_errors_are_said_in_each_form() -> None:
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with scripted_server(TEMPLATE, SAID) as server, claude(server) as client:
        with pytest.raises(anthropic.BadRequestError, match="'image' is not supported") as refused:
            client.messages.create(model="x", max_tokens=9, messages=image)
        body = refused.value.body
        assert isinstance(body, dict)
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        long: Any = [{"role": "user", "content": "word " * 9000}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
            client.messages.create(model="x", max_tokens=9, messages=long)
        empty = ask(server, "/v1/responses", {"input": []})
        assert (empty.status, empty.json["error"]["param"]) == (400, "input")


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    rule = Rule()
    with running(rule.load, sessions=1, api_key="secret") as server:
        body = {"messages": [QUESTION], "max_tokens": 2}
        assert ask(server, "/v1/messages", body).status == 401
        assert ask(server, "/v1/messages", body, headers={"x-api-key": "wrong"}).status == 401
        assert ask(server, "/v1/messages", body, headers={"x-api-key": "secret"}).status == 200
