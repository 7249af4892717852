"""Ollama's routes by its own client: text, thoughts, calls, forms, gaps, streams, errors."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from chat_templates import TEMPLATES
from kvq import __version__
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.ollama_api import chat as ollama_chat
from kvq_apps.serve.server import Server
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from serving import Reply, Rule, ask, chat, fault, running, scripted_server
from tiny import byte_level_tokenizer

ollama = pytest.importorskip("ollama")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("own_state")

TEMPLATE = "qwen 3"
WITH_TOOLS = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}" + TEMPLATES[TEMPLATE]
)
SAID = "<think>\nHm.\n</think>\n\nIt is Paris."
CALLED = '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'
FIND: Any = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
QUESTION = {"role": "user", "content": "The capital of France?"}


def call(server: Server, method: str, **fields: Any) -> Any:
    """What the client returns; a stream as a list."""
    with ollama.Client(host=server.address) as client:  # type: ignore[attr-defined]
        answer = getattr(client, method)(**fields)
        return [*answer] if fields.get("stream") else answer


def lines(reply: Reply) -> list[Any]:
    """The objects of a stream: one on each line, and nothing else."""
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.body.endswith(b"\n")
    return [json.loads(line) for line in reply.body.splitlines()]


def check_ending(row: Any) -> None:
    assert (row["done"], row["done_reason"]) == (True, "stop")
    assert row["prompt_eval_count"] > 10
    assert row["eval_count"] > 10
    durations = ("prompt_eval_duration", "eval_duration", "load_duration")
    assert all(isinstance(row[name], int) for name in durations)
    assert row["total_duration"] >= sum(row[name] for name in durations) > 1000


def test_a_chat_has_a_thought_and_a_text() -> None:
    with scripted_server(TEMPLATE, SAID) as server:
        answer = call(server, "chat", model="qwen", messages=[QUESTION])
        parts = call(server, "chat", model="qwen", messages=[QUESTION], stream=True)
    assert (answer.message.thinking, answer.message.content) == ("Hm.", "It is Paris.")
    check_ending(answer.model_dump())
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert "".join(part.message.content or "" for part in parts) == "It is Paris."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    check_ending(parts[-1].model_dump())


def test_a_stream_is_lines_and_the_default() -> None:
    with scripted_server(TEMPLATE, SAID) as server:
        rows = lines(ask(server, "/api/chat", {"messages": [QUESTION]}))
        whole = ask(server, "/api/chat", {"messages": [QUESTION], "stream": False})
    assert {frozenset(row) for row in rows[:-1]} == {
        frozenset({"model", "created_at", "message", "done"})
    }
    assert rows[-1]["message"] == {"role": "assistant", "content": ""}
    assert rows[-1].keys() == whole.json.keys()
    assert whole.json["created_at"].endswith("Z")
    assert whole.json["model"] == "rule"
    assert whole.json["x_kvq"]["new_tokens"] == whole.json["eval_count"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_calls_a_tool_and_reads_its_result(stream: bool) -> None:
    with scripted_server(WITH_TOOLS, CALLED) as server:
        answer = call(server, "chat", messages=[QUESTION], tools=[FIND], stream=stream, model="x")
        parts = answer if stream else [answer]
        (use,) = [use for part in parts for use in part.message.tool_calls or ()]
        assert (use.function.name, dict(use.function.arguments)) == ("find", {"q": "x"})
        assert parts[-1].done_reason == "stop"
        said = {"role": "assistant", "content": "", "tool_calls": [use.model_dump()]}
        result = {"role": "tool", "tool_name": "find", "content": "found"}
        turns = [QUESTION, said, result]
        again = call(server, "chat", messages=turns, tools=[FIND], model="x")
    assert again.prompt_eval_count > parts[-1].prompt_eval_count


def test_results_find_their_calls_by_the_name_of_the_tool(rule: Rule) -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("find", "read", "find")]
    turns = [
        {"role": "assistant", "thinking": "Hm", "tool_calls": calls},
        *({"role": "tool", "tool_name": name, "content": "x"} for name in ("find", "find", "read")),
        {"role": "tool", "content": "y", "tool_call_id": "abc"},
    ]
    view: Any = SimpleNamespace(name="rule", names={"rule"}, tokenizer=rule.tokenizer)
    fields, *_ = ollama_chat(Fields({"messages": turns}), view)
    assistant, *results = fields.get("messages")
    identities = [call["id"] for call in assistant["tool_calls"]]
    assert identities == ["000000000", "000000001", "000000002"]
    assert assistant["reasoning_content"] == "Hm"
    assert [result["tool_call_id"] for result in results] == [
        *(identities[place] for place in (0, 2, 1)), "abc",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("think", "effort"), [(True, "medium"), (False, "none"), ("low", "low"), (None, None)]
)
def test_think_says_how_much(think: Any, effort: str | None) -> None:
    tokenizer = Tokenizer.from_json(
        byte_level_tokenizer().to_str(), ControlTokens(eos=(0,)), TEMPLATES[TEMPLATE]
    )
    view: Any = SimpleNamespace(name="rule", names={"rule"}, tokenizer=tokenizer)
    fields, *_ = ollama_chat(Fields({"messages": [QUESTION], "think": think}), view)
    assert fields.get("reasoning_effort") == effort


def test_a_format_holds_the_answer(rule: Rule, served: Server) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
    schema["additionalProperties"] = False
    answer = call(served, "chat", model="rule", messages=[QUESTION], format=schema)
    assert json.loads(answer.message.content) == {"a": 7}
    body = {"prompt": "Hi", "format": "json", "options": {"num_predict": 40}, "stream": False}
    reply = ask(served, "/api/generate", body)
    assert reply.json["response"].startswith("{")
    wrong = ask(served, "/api/chat", {"messages": [QUESTION], "format": "xml"})
    assert (wrong.status, wrong.json) == (
        400,
        {"error": "format is a string; give json or a JSON schema, an object"},
    )


def test_generate_asks_as_a_chat_unless_raw(rule: Rule, served: Server) -> None:
    options = {"num_predict": 3, "temperature": 0}
    raw = call(served, "generate", model="rule", prompt="abc", raw=True, options=options)
    assert raw.response == rule.text("abc", 3)
    assert (raw.done_reason, raw.prompt_eval_count, raw.eval_count) == ("length", 3, 3)
    generated = call(served, "generate", model="rule", prompt="abc", system="Be.", options=options)
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "abc"}]
    same = call(served, "chat", model="rule", messages=messages, options=options)
    assert generated.response == same.message.content
    assert generated.prompt_eval_count == same.prompt_eval_count > 20
    parts = call(
        served, "generate", model="rule", prompt="abc", raw=True, options=options, stream=True
    )
    assert "".join(part.response for part in parts) == raw.response


def test_a_suffix_asks_for_the_middle() -> None:
    rule = Rule(infills=True)
    with running(rule.load, sessions=1) as server:
        body = {"input_prefix": "ab", "input_suffix": "yz", "n_predict": 4, "temperature": 0}
        infilled = ask(server, "/infill", body).json["content"]
        options = {"num_predict": 4, "temperature": 0}
        infill = call(server, "generate", model="x", prompt="ab", suffix="yz", options=options)
    assert infill.response == infilled


def test_log_probabilities_stand_beside_their_text(rule: Rule, served: Server) -> None:
    request: Any = {"raw": True, "options": {"num_predict": 3}, "logprobs": True, "top_logprobs": 2}
    whole = call(served, "generate", model="x", prompt="abc", **request)
    assert "".join(row.token for row in whole.logprobs) == whole.response
    assert [len(row.top_logprobs) for row in whole.logprobs] == [2] * 3
    parts = call(served, "generate", model="x", prompt="abc", stream=True, **request)
    rows = [row.token for part in parts for row in part.logprobs or ()]
    assert "".join(rows) == whole.response


def test_options_without_an_effect_are_named(served: Server) -> None:
    options = {"num_predict": 1, "num_gpu": 1, "num_ctx": 4096, "use_mmap": None}
    body = {"messages": [QUESTION], "options": options, "keep_alive": -1, "stream": False}
    reply = ask(served, "/api/chat", body)
    assert reply.json["x_kvq"]["ignored"] == ["options.num_ctx", "options.num_gpu"]
    assert "ignored" not in ask(served, "/api/chat", {**body, "options": {}}).json["x_kvq"]


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_an_empty_request_loads_the_model(path: str, served: Server) -> None:
    """So `ollama run` begins, and so `ollama stop` ends."""
    for keep_alive in (None, "5m", 0, -1):
        body = {"model": "rule:latest", "keep_alive": keep_alive}
        reply = ask(served, f"/api/{path}", body).json
        assert (reply["model"], reply["done"], reply["done_reason"]) == ("rule", True, "load")


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat", {"messages": [{**QUESTION, "images": ["aGk="]}]}, 400, "images is not supported"),
        ("generate", {"prompt": "a", "images": ["aGk="]}, 400, "images is not supported"),
        ("chat", {"messages": [{"role": "wizard"}]}, 400, "the role 'wizard' is not supported"),
        ("chat", {"messages": [QUESTION], "think": True}, 400, "does not support thinking"),
        ("chat", {"messages": [QUESTION], "think": 3}, 400, "think is 3; give true, false"),
        ("chat", {"messages": [QUESTION], "options": {"top_p": 2}}, 400, "top_p is 2; give"),
        ("generate", {"prompt": "a", "template": "x"}, 400, "template is not supported"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "context is not supported"),
        ("embed", {"input": "a"}, 501, "rule gives no vectors of texts"),
        ("embeddings", {"prompt": "a"}, 501, "rule gives no vectors of texts"),
        ("nowhere", {}, 404, "there is no /api/nowhere here"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(
    path: str, body: Any, status: int, message: str, served: Server
) -> None:
    reply = ask(served, f"/api/{path}", body)
    assert (reply.status, [*reply.json]) == (status, ["error"])
    assert message in reply.json["error"]


def test_the_client_reads_an_error(served: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="images is not supported") as refused:
        call(served, "generate", model="x", prompt="a", images=["aGk="])
    assert refused.value.status_code == 400


def test_an_error_in_a_stream_is_its_last_line(rule: Rule, served: Server) -> None:
    text = rule.text("abc", 5)
    rule.backend.fails_on = {rule.tokenizer.encode(text[4])[0]: fault()}
    body = {"prompt": "abc", "raw": True, "options": {"temperature": 0}}
    *texts, last = lines(ask(served, "/api/generate", body))
    assert "".join(row["response"] for row in texts) == text
    assert last == {"error": "the rule broke"}


def test_the_served_model_is_listed_and_described() -> None:
    with scripted_server(WITH_TOOLS, SAID) as server:
        (model,) = call(server, "list").models
        assert (model.model, model.details.format) == ("rule", "kvq")
        assert len(model.digest) == 64
        (loaded,) = call(server, "ps").models
        assert (loaded.name, loaded.context_length) == ("rule", 2000)
        assert loaded.expires_at.year > 2300
        described = call(server, "show", model="rule")
        assert described.capabilities == ["completion", "tools", "thinking"]
        assert described.template == WITH_TOOLS
        assert described.modelinfo["general.architecture"] == "kvq"
        assert described.modelinfo["kvq.context_length"] == 2000
        assert "temperature 0.8" in described.parameters
        assert ask(server, "/api/version").json == {"version": __version__}


def test_a_strict_server_knows_its_names_with_their_tag(rule: Rule) -> None:
    with running(rule.load, sessions=1, strict_model=True) as server:
        body = {**chat("hi"), "options": {"num_predict": 1}, "stream": False}
        assert ask(server, "/api/chat", {**body, "model": "rule:latest"}).status == 200
        refused = ask(server, "/api/chat", {**body, "model": "llama"})
        assert refused.status == 404
        assert "the model 'llama' is not served here" in refused.json["error"]
        assert ask(server, "/api/show", {"model": "llama"}).status == 404
