"""Fields as clients of other servers send them: raw prompts, scores, sampling, routes."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.raw_prompts import healed
from kvq_apps.serve.sampling import sampling_of
from kvq_apps.serve.server import Server
from kvq_runtime.answer.healing import heal
from kvq_runtime.answer.sampling import likeliest, log_probability
from kvq_runtime.engine import Engine
from kvq_runtime.serving import job
from serving import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    Rule,
    ask,
    chat,
    data,
    metric,
    running,
    send,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("own_state")

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


# Control tokens in raw prompts


def tokens_read(server: Server, path: str, body: dict[str, Any]) -> int:
    """How many tokens the prompt of `body` had."""
    answer = ask(server, path, {**GREEDY, "max_tokens": 1, "n_predict": 1, **body}).json
    return answer["usage"]["prompt_tokens"] if path == COMPLETIONS else answer["tokens_evaluated"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/completion"])
def test_marks_in_a_raw_prompt_are_control_tokens_unless_asked(path: str, tiny: Server) -> None:
    marked = {"prompt": "<|im_start|>user<|im_end|>"}
    plain = [{"x_kvq": {"parse_special": False}}, {"parse_special": False}]
    few = tokens_read(tiny, path, marked)
    assert few == tokens_read(tiny, path, {**marked, "x_kvq": {"parse_special": True}})
    many = {tokens_read(tiny, path, marked | field) for field in plain}
    assert len(many) == 1
    assert min(many) > few + 5
    ids = ask(tiny, "/tokenize", {"content": marked["prompt"], "add_special": True}).json["tokens"]
    assert len(ids) == few
    spelt = {"content": marked["prompt"], "parse_special": False, "add_special": True}
    assert {len(ask(tiny, "/tokenize", spelt).json["tokens"])} == many


def test_marks_in_chats_and_around_gaps_stay_plain(tiny: Server) -> None:
    def chat_tokens(text: str) -> int:
        return ask(tiny, CHAT, chat(text, max_tokens=1)).json["usage"]["prompt_tokens"]

    assert chat_tokens("<|im_end|>") > chat_tokens("x") + 2
    bodies = [
        {"input_prefix": text, "input_suffix": "b", "n_predict": 1} for text in ("<|im_end|>", "a")
    ]
    marked, bare = (ask(tiny, "/infill", body).json["tokens_evaluated"] for body in bodies)
    assert marked > bare + 2
    suffixed = [{"prompt": text, "suffix": "b", "max_tokens": 1} for text in ("<|im_end|>", "a")]
    marked, bare = (
        ask(tiny, COMPLETIONS, body).json["usage"]["prompt_tokens"] for body in suffixed
    )
    assert marked > bare + 2


@pytest.mark.parametrize("path", [COMPLETIONS, "/completion"])
def test_a_prompt_that_asks_for_a_middle_is_one(path: str, tiny: Server) -> None:
    """Token healing sees the gap, and the answer ends where one to `/infill` does."""
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 8, **GREEDY}
    infilled = ask(tiny, "/infill", body).json
    prompt = f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    raw = ask(tiny, path, {"prompt": prompt, "n_predict": 8, "max_tokens": 8, **GREEDY}).json
    text = raw["content"] if path == "/completion" else raw["choices"][0]["text"]
    assert text == infilled["content"]
    assert tokens_read(tiny, path, {"prompt": prompt}) == infilled["tokens_evaluated"]


def test_what_ends_a_middle_ends_an_answer_to_a_prompt_for_one() -> None:
    rule = Rule(infills=True)
    rule.backend.rule = lambda tokens: 4
    with running(rule.load, sessions=1) as server:
        for prompt, reason in (
            ([70, 5], "stop"),
            ([70, 71], "length"),
            ([[70, 5], [70]], "length"),
        ):
            body = {"prompt": prompt, "max_tokens": 3, **GREEDY}
            choices = ask(server, COMPLETIONS, body).json["choices"]
            assert {choice["finish_reason"] for choice in choices} == {reason}


def test_only_prompts_that_end_in_text_are_healed() -> None:
    tokenizer = Rule(heals=True).tokenizer
    ids = tokenizer.encode("the q")
    (healed_text,) = heal(tokenizer, ids)[:1]
    assert len(healed_text) < len(ids)  # or there would be nothing to see
    view: Any = SimpleNamespace(tokenizer=tokenizer)
    for prompt, whole in (
        ("the q", False), ([*ids], True), (["the ", ids[-1]], True), ([ids[0], "he q"], False),
    ):  # fmt: skip
        ((read, begin_with),) = healed(Fields({"prompt": prompt}), view, [ids])
        assert (list(read) == ids, begin_with == b"") == (whole, whole)
    assert healed(Fields({"prompt": "the q", "x_kvq": {"heal": False}}), view, [ids]) == ()


def test_a_prompt_that_ends_with_a_control_token_is_not_healed() -> None:
    with running(Rule(heals=True).load, sessions=1) as server:
        ended = ask(server, COMPLETIONS, {"prompt": "hi<|im_start|>", "max_tokens": 3, **GREEDY})
        assert len(ended.json["choices"][0]["text"]) == 3


def test_the_beginning_stands_before_a_text_once(rule: Rule) -> None:
    (mark,) = rule.tokenizer.encode("<|im_start|>", special=True)
    rule.tokenizer.control = replace(rule.tokenizer.control, start=(mark,))
    with running(rule.load, sessions=1) as server:
        for prompt, count in (("ab", 3), ("<|im_start|>ab", 3), ("<|im_start|><|im_start|>ab", 4)):
            assert tokens_read(server, COMPLETIONS, {"prompt": prompt}) == count
        assert tokens_read(server, COMPLETIONS, {"prompt": "ab", "add_special_tokens": False}) == 2
        (choice,) = scores(server, "<|im_start|>ab")
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("ab", [0, 0, 1])


# Prompts: lists, pieces, none


def test_a_list_of_prompts_is_answered_by_a_list(rule: Rule, served: Server) -> None:
    body = {"prompt": ["abc", [*rule.tokenizer.encode("x")], "z"], "n_predict": 3}
    rows = ask(served, "/completion", body).json
    assert [row["content"] for row in rows] == [rule.text(text, 3) for text in ("abc", "x", "z")]
    assert [row["index"] for row in rows] == [0, 1, 2]
    single = ask(served, "/completion", body | {"prompt": ["abc"]}).json
    assert single["content"] == rule.text("abc", 3)


@pytest.mark.parametrize("path", [COMPLETIONS, "/completion"])
def test_pieces_of_text_and_ids_are_one_prompt(path: str, rule: Rule, served: Server) -> None:
    (token,) = rule.tokenizer.encode("b")
    for prompt in (["a", token, "c"], [["a", token, "c"]], [token, "ca"]):
        answer = ask(served, path, {"prompt": prompt, "n_predict": 3, "max_tokens": 3}).json
        text = answer["content"] if path == "/completion" else answer["choices"][0]["text"]
        assert text == rule.text("abc", 3)  # the rule adds its tokens up


def test_an_empty_prompt_goes_on_from_the_token_between_texts(rule: Rule, served: Server) -> None:
    for path in (COMPLETIONS, "/completion"):
        assert tokens_read(served, path, {"prompt": ""}) == 1
    assert tokens_read(served, COMPLETIONS, {"prompt": ["", "ab"]}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_only_read_the_prompt(stream: bool, served: Server) -> None:
    for path, body in ((CHAT, chat("hi", n=2)), (COMPLETIONS, {"prompt": "abc", "n": 2})):
        reply = ask(served, path, {**body, "max_tokens": 0, "stream": stream})
        rows = [row["choices"][0] for row in data(reply)] if stream else reply.json["choices"]
        assert [row["finish_reason"] for row in rows if row["finish_reason"]] == ["length"]
        assert not any("text" in row and row["text"] for row in rows)


# Scores of a prompt


def scores(server: Server, prompt: Any, **more: Any) -> Any:
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0, **GREEDY, **more}
    reply = ask(server, COMPLETIONS, body)
    assert reply.status == 200, reply.body
    return reply.json["choices"]


def test_scores_are_those_of_a_session_whatever_is_cached(
    bundle: str, tiny: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The quick brown fox jumps over the lazy dog and runs away. " * 4
    ask(tiny, COMPLETIONS, {"prompt": text, "max_tokens": 4})  # which leaves it in a session
    (whole,) = scores(tiny, text)
    logprobs = whole["logprobs"]
    with Engine.open(bundle) as engine:
        ids = engine.tokenizer.encode(text, start=True)
        with engine.session(context_tokens=512, chunk_tokens=16) as session:
            rows = np.concatenate(list(session.logits(ids)))
    expected = [log_probability(row, token) for row, token in zip(rows, ids[1:], strict=False)]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=0.02)
    top = [dict(likeliest(row, 2)) for row in rows[:-1]]
    assert [max(row.values()) for row in logprobs["top_logprobs"][1:]] == pytest.approx(
        [max(row.values()) for row in top], abs=0.02
    )
    assert whole["text"] == text
    assert "".join(logprobs["tokens"][-3:]) == text[logprobs["text_offset"][-3] :]
    assert scores(tiny, text)[0]["logprobs"] == logprobs
    # Fewer rows at once, as a large vocabulary has.
    monkeypatch.setattr(job, "_SCORED_BYTES", 1)
    (single,) = scores(tiny, text)
    assert single["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=0.05)


def test_scores_come_before_the_answer_as_evaluations_ask(rule: Rule, served: Server) -> None:
    """lm-eval's local-completions: ids, one token more, which it leaves out again."""
    prompts = [rule.tokenizer.encode(text) for text in ("abc", "zy")]
    choices = scores(served, prompts, max_tokens=1, logprobs=1)
    for choice, ids, text in zip(choices, prompts, ("abc", "zy"), strict=True):
        logprobs = choice["logprobs"]
        assert [len(column) for column in logprobs.values()] == [len(ids) + 1] * 4
        assert logprobs["tokens"] == [*text, rule.text(text, 1)]
        assert logprobs["text_offset"] == list(range(len(ids) + 1))
        assert logprobs["top_logprobs"][0] is None
        assert choice["text"] == text + rule.text(text, 1)
        for place in range(1, len(ids)):
            (likely,) = logprobs["top_logprobs"][place]
            right = likely == text[place]
            assert likely == rule.text(text[:place], 1)
            assert (
                logprobs["token_logprobs"][place] == logprobs["top_logprobs"][place][likely]
            ) == right


def test_the_end_of_an_answer_counts_among_scores(rule: Rule, served: Server) -> None:
    rule.backend.rule = lambda tokens: 0
    (choice,) = scores(served, "ab", max_tokens=1)
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["text"] == "ab"


@pytest.mark.parametrize("count", [1, 2])
def test_streamed_scores_are_the_same(count: int, rule: Rule, served: Server) -> None:
    whole = scores(served, "abcde", max_tokens=2, n=count)
    body = {"prompt": "abcde", "echo": True, "logprobs": 2, "max_tokens": 2, "n": count, **GREEDY}
    reply = ask(served, COMPLETIONS, body | {"stream": True})
    for index, choice in enumerate(whole):
        rows = [row["choices"][0] for row in data(reply) if row["choices"][0]["index"] == index]
        assert "".join(row["text"] for row in rows) == choice["text"]
        for name, column in choice["logprobs"].items():
            pieces = [row["logprobs"][name] for row in rows if row["logprobs"]]
            assert [value for piece in pieces for value in piece] == column


def test_a_prompt_that_is_scored_lets_others_go_first(rule: Rule) -> None:
    with running(rule.load, sessions=2, chunk_tokens=16) as server:
        long = rule.tokenizer.encode("a" * 200)
        scores(server, long)
        longest = max(len(owners) for owners in rule.backend.owners)
        assert longest == 1
        # 16 tokens a pass, so that others take turns with it.
        assert len(rule.backend.owners) >= 200 // 16


def test_a_client_that_leaves_ends_the_scoring(rule: Rule) -> None:
    with running(rule.load, sessions=1, chunk_tokens=16) as server:
        rule.backend.shut = True
        body = {"prompt": "a" * 500, "echo": True, "logprobs": 1, "max_tokens": 0}
        with send(server, COMPLETIONS, body):
            wait_until(lambda: rule.backend.arrivals == 1)
        wait_until(lambda: all(job.cancelled for job in server.pool.running))
        rule.backend.open()
        wait_until(lambda: metric(server, "jobs_cancelled_total") == 1)
        assert rule.backend.arrivals < 5


def test_an_echo_repeats_marks_and_no_start(tiny: Server) -> None:
    for prompt in ("a<|im_end|>b", "plain"):
        for more in ({}, {"logprobs": 0}):
            body = {"prompt": prompt, "echo": True, "max_tokens": 0, **more}
            assert ask(tiny, COMPLETIONS, body).json["choices"][0]["text"] == prompt


# Sampling


def test_top_p_of_nothing_leaves_the_likeliest(tiny: Server) -> None:
    body = {"prompt": "The quick", "max_tokens": 8, "temperature": 5, "top_k": 0, "min_p": 0}
    likeliest_text = ask(tiny, COMPLETIONS, body | GREEDY).json["choices"][0]["text"]
    texts = [
        ask(tiny, COMPLETIONS, body | {"top_p": 0, "seed": seed}).json["choices"][0]["text"]
        for seed in range(3)
    ]
    assert texts == [likeliest_text] * 3


def test_biases_name_tokens_by_id_or_text(rule: Rule, served: Server) -> None:
    first = rule.text("abc", 1)
    (token,) = rule.tokenizer.encode(first)
    (other,) = rule.tokenizer.encode("z" if first != "z" else "y")
    for bias in (
        [[token, False]], [[first, False]], {str(token): -100}, {first: -100}, [[first, -100.0]],
    ):  # fmt: skip
        body = {"prompt": "abc", "n_predict": 1, "max_tokens": 1, "logit_bias": bias, **GREEDY}
        assert ask(served, "/completion", body).json["content"] != first
    body["logit_bias"] = [[other, 1e6]]
    text = ask(served, "/completion", body).json["content"]
    assert rule.tokenizer.encode(text) == [other]
    assert ask(served, "/completion", body | {"logit_bias": []}).json["content"] == first


def test_an_answer_may_be_kept_from_ending(rule: Rule, served: Server) -> None:
    rule.backend.rule = lambda tokens: 0
    body = {"prompt": "abc", "max_tokens": 3, **GREEDY}
    (choice,) = ask(served, COMPLETIONS, body).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    (choice,) = ask(served, COMPLETIONS, body | {"ignore_eos": True}).json["choices"]
    assert choice["finish_reason"] == "length"


def test_the_likeliest_of_several_are_told(tiny: Server) -> None:
    body = {"prompt": "The quick", "max_tokens": 6, "temperature": 3, "top_k": 0, "seed": 3}
    every = ask(tiny, COMPLETIONS, body | {"n": 6, "logprobs": 0}).json["choices"]
    means = [float(np.mean(choice["logprobs"]["token_logprobs"])) for choice in every]
    best = np.argsort(means)[::-1][:2]
    reply = ask(tiny, COMPLETIONS, body | {"n": 2, "best_of": 6}).json
    assert [choice["text"] for choice in reply["choices"]] == [every[i]["text"] for i in best]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in reply["choices"]] == [None, None]
    assert reply["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("stream", [False, True])
def test_n_probs_are_told_as_llama_server_does(stream: bool, rule: Rule, served: Server) -> None:
    body = {"prompt": "abc", "n_predict": 3, "n_probs": 2, "stream": stream, **GREEDY}
    reply = ask(served, "/completion", body)
    rows = [json.loads(event[6:]) for event in reply.events] if stream else [reply.json]
    probabilities = [entry for row in rows for entry in row.get("completion_probabilities", [])]
    text = rule.text("abc", 3)
    assert [row["token"] for row in probabilities] == [*text]
    for row in probabilities:
        assert row["id"] == rule.tokenizer.encode(row["token"])[0]
        assert row["bytes"] == [*row["token"].encode()]
        assert row["top_logprobs"][0]["id"] == row["id"]
        assert row["top_logprobs"][0]["logprob"] == row["logprob"] <= 0
        assert len(row["top_logprobs"]) == 2
    assert "completion_probabilities" not in ask(served, "/completion", {"prompt": "a"}).json


# What others send beside


ODD: list[dict[str, Any]] = [
    {name: None}
    for name in (
        *("tools", "tool_choice", "stop", "stream_options", "seed", "n", "logprobs", "user"),
        *("response_format", "logit_bias", "top_p", "functions", "function_call", "x_kvq"),
        *("max_tokens", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"),
        *("stream", "model", "temperature", "modalities", "echo", "best_of", "repeat_last_n"),
    )
] + [
    {"stop": ""}, {"stop": [""]}, {"stop": ["", "~"]}, {"tools": []}, {"functions": []},
    {"parallel_tool_calls": True}, {"user": {"id": 3}}, {"seed": -7}, {"seed": 4.0},
    {"seed": (1 << 64) - 1}, {"repetition_penalty": 1.1}, {"top_k": -1}, {"top_k": 0},
    {"typical_p": 1.0}, {"repeat_last_n": -1}, {"min_p": 1}, {"top_p": 1.0},
    {"max_completion_tokens": 2, "max_tokens": 3}, {"min_tokens": 0}, {"ignore_eos": False},
    {"prediction": {"type": "content", "content": "hi"}}, {"logprobs": 3}, {"logprobs": False},
    {"mirostat": 0}, {"dry_multiplier": 0.0}, {"samplers": ["top_k"]}, {"response_fields": []},
    {"grammar": "", "json_schema": None}, {"best_of": 1}, {"cache_prompt": True},
]  # fmt: skip


@pytest.mark.parametrize("fields", ODD, ids=json.dumps)
def test_what_clients_send_is_taken(fields: dict[str, Any], tiny: Server) -> None:
    request = {"max_tokens": 1, "n_predict": 1} | fields
    for path, prompt in ((CHAT, chat("hi")), (COMPLETIONS, {"prompt": "x"})):
        reply = ask(tiny, path, prompt | request)
        assert reply.status == 200, (path, reply.body)
    if "logprobs" not in fields:
        assert ask(tiny, "/completion", {"prompt": "x"} | request).status == 200


# The fields of llama-server's `/completion`, as its README lists them, with a value that asks for
# something, and what becomes of it.
DONE: dict[str, Any] = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "n_predict": 2, "n_indent": 1,
    "n_cmpl": 2, "stream": False, "stop": ["~"], "repeat_penalty": 1.1, "repeat_last_n": 8,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "grammar": 'root ::= "ab"',
    "json_schema": {"const": 1}, "seed": 3, "ignore_eos": True, "logit_bias": [[70, 1]],
    "n_probs": 2, "t_max_predict_ms": 9, "cache_prompt": False, "return_tokens": True,
    "samplers": ["top_k", "temperature"], "response_fields": ["content", "x_kvq"],
}  # fmt: skip
# Each with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dynatemp_range": (0.5, (0,)), "typical_p": (0.5, (1, 1.0)), "dry_multiplier": (0.8, (0.0,)),
    "xtc_probability": (0.5, (0,)), "mirostat": (2, (0,)), "min_keep": (3, (0, 1)),
    "post_sampling_probs": (True, (False,)), "lora": ([{"id": 0, "scale": 1}], ([],)),
    "n_cache_reuse": (9, (0,)), "return_progress": (True, (False,)),
    # Of older versions, of newer ones, and of vLLM.
    "tfs_z": (0.5, (1,)), "top_n_sigma": (1.5, (-1, 0)), "adaptive_target": (0.5, (-1,)),
    "min_tokens": (3, (0,)),
}  # fmt: skip
NAMED: dict[str, Any] = {
    "dynatemp_exponent": 1.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["*"], "xtc_threshold": 0.1, "mirostat_tau": 5, "mirostat_eta": 0.1,
    "n_keep": 4, "id_slot": 0, "timings_per_token": True, "sse_ping_interval": 9,
    "t_max_prompt_ms": 500, "made_up": {"a": 1},
}  # fmt: skip


def completed(server: Server, **fields: Any) -> Any:
    """One answer of llama-server's route, without what is named as ignored by others."""
    reply = ask(server, "/completion", {"prompt": "ab", "n_predict": 1} | fields)
    assert reply.status == 200, reply.body
    return reply.json if isinstance(reply.json, dict) else reply.json[0]


@pytest.mark.parametrize("name", DONE)
def test_a_field_with_an_effect_is_not_named(name: str, served: Server) -> None:
    assert "ignored" not in completed(served, **{name: DONE[name]})["x_kvq"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_asks_for_the_impossible_is_refused(name: str, served: Server) -> None:
    value, harmless = REFUSED[name]
    for path, body in (("/completion", {"prompt": "a"}), (CHAT, chat("a")), (COMPLETIONS, {})):
        error = ask(served, path, {**body, name: value}).json["error"]
        assert (error["param"], error["code"]) == (name, "unsupported")
        assert re.match(rf"{name} is not supported; \S+", error["message"])
    for off in harmless:
        assert "ignored" not in completed(served, **{name: off})["x_kvq"]


@pytest.mark.parametrize("name", NAMED)
def test_a_field_without_an_effect_is_named(
    name: str, served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert completed(served, **{name: NAMED[name]})["x_kvq"]["ignored"] == [name]
    assert caplog.text.count(f"the field {name!r} of a request has no effect here") == 1
    nothing = completed(served, **{name: None})
    assert "ignored" not in nothing["x_kvq"]


def test_a_field_inside_an_object_is_named_with_its_place(served: Server) -> None:
    body = chat("hi", max_tokens=1, max_completion_tokens=1, reasoning_effort="low")
    body |= {"x_kvq": {"drafts": 3}, "stream_options": {"include_usage": False, "more": 1}}
    assert ask(served, CHAT, body).json["x_kvq"]["ignored"] == [
        *("max_tokens", "reasoning_effort", "stream_options.more", "x_kvq.drafts"),
    ]


def test_tokens_are_told_where_they_are_wanted(rule: Rule, served: Server) -> None:
    reply = completed(served, n_predict=3, return_tokens=True)
    assert rule.tokenizer.decode(reply["tokens"]) == reply["content"] == rule.text("ab", 3)
    assert "completion_probabilities" not in reply
    assert completed(served, n_predict=3)["tokens"] == []
    body = {"prompt": "ab", "n_predict": 3, "return_tokens": True, "stream": True}
    rows = [json.loads(event[6:]) for event in ask(served, "/completion", body).events]
    assert [token for row in rows for token in row["tokens"]] == reply["tokens"]


def test_samplers_that_are_left_out_are_off(rule: Rule) -> None:
    default = replace(rule.backend.model.sampling, repeat_penalty=1.5)
    view: Any = SimpleNamespace(sampling=default, context_tokens=99, tokenizer=rule.tokenizer)
    sent = {"temperature": 0.2, "top_k": 7, "presence_penalty": 1}
    for names, changes in (
        (["top_k"], {"top_k": 7, "temperature": 1, "top_p": 1, "min_p": 0, "repeat_penalty": 1}),
        (["temperature", "dry"], {
            "top_k": 0, "temperature": 0.2, "top_p": 1, "min_p": 0, "repeat_penalty": 1,
        }),
        (["penalties"], {"temperature": 1, "presence_penalty": 1, "repeat_penalty": 1.5}),
        (["top_k", "infill"], {
            "top_k": 7, "temperature": 1, "top_p": 1, "infill_ends": (*rule.tokenizer.eos_ids,),
        }),
        ([], {"temperature": 0.2, "top_k": 7, "top_p": default.top_p, "presence_penalty": 1}),
    ):  # fmt: skip
        sampling = sampling_of(Fields({**sent, "samplers": names}), view)
        assert {name: getattr(sampling, name) for name in changes} == changes
    endless = sampling_of(Fields({"samplers": ["infill"], "ignore_eos": True}), view)
    assert endless.infill_ends == ()
    with pytest.raises(RequestError, match="samplers may have these names: penalties, top_k"):
        sampling_of(Fields({"samplers": ["greedy"]}), view)


def test_parts_of_a_message_are_text(tiny: Server) -> None:
    def tokens(content: Any) -> int:
        messages = [{"role": "user", "content": content}]
        reply = ask(tiny, CHAT, chat("", messages=messages, max_tokens=1))
        return reply.json["usage"]["prompt_tokens"]

    whole = tokens("abcd")
    for kind, name in (
        ("text", "text"), ("input_text", "text"), ("output_text", "text"), ("refusal", "refusal"),
    ):  # fmt: skip
        assert tokens([{"type": kind, name: "ab"}, {"text": "cd"}]) == whole


def test_routes_are_known_by_their_plain_names_too(rule: Rule, served: Server) -> None:
    body = {"prompt": "abc", "n_predict": 3}
    assert ask(served, "/completions", body).json["content"] == rule.text("abc", 3)
    reply = ask(served, "/chat/completions", chat("hi", max_tokens=2)).json
    assert reply["object"] == "chat.completion"
    assert ask(served, "/v1/health").json == {"status": "ok"}
    assert ask(served, "/models").json["data"][0]["id"] == "rule"
