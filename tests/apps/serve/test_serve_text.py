"""What an answer holds: stop strings, seeds, text between two others, what editors send."""

import json
import time
from itertools import accumulate, pairwise
from typing import Any

import pytest

from kvq_apps.serve.server import Server
from kvq_runtime.answer.stop_strings import IndentLimit
from serving import (
    COMPLETIONS,
    GREEDY,
    Rule,
    ask,
    chat,
    data,
    running,
)

pytestmark = pytest.mark.usefixtures("own_state")


# Text: stop strings, seeds, what stands between (SRV-11, SRV-12, SRV-18)


def test_stop_strings_end_the_text_and_are_never_sent(rule: Rule, served: Server) -> None:
    text = rule.text("abc", 30)
    cases = {
        "across tokens": ([text[7:10]], text[:7]),
        "overlapping": ([text[9:12], text[7:11]], text[:7]),
        "at the beginning": ([text[:2]], ""),
        "never": (["ABC"], text),
    }
    for name, (stop, expected) in cases.items():
        for stream in (False, True):
            body = {"prompt": "abc", "max_tokens": 30, "stop": stop, "stream": stream}
            reply = ask(served, COMPLETIONS, body)
            if stream:
                chunks = [chunk["choices"][0] for chunk in data(reply)]
                content = "".join(chunk["text"] for chunk in chunks)
                reason = chunks[-1]["finish_reason"]
            else:
                (choice,) = reply.json["choices"]
                content, reason = choice["text"], choice["finish_reason"]
            assert (content, reason) == (expected, "stop" if expected != text else "length"), name


def test_a_stop_string_inside_a_character() -> None:
    class Halves:
        """Every second token completes an é."""

        def __init__(self) -> None:
            self.half = False

        def push(self, token: int) -> str:
            self.half = not self.half
            return "" if self.half else "é"

        def flush(self) -> str:
            return "\ufffd" if self.half else ""

    with running(Rule(detokenizer=Halves).load, sessions=1) as server:
        body = {"prompt": "abc", "max_tokens": 9, "stop": "éé"}
        (choice,) = ask(server, COMPLETIONS, body).json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        (choice,) = ask(server, COMPLETIONS, body | {"stop": None}).json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("éééé\ufffd", "length")


def test_a_seed_repeats_and_greedy_ignores_it(tiny: Server) -> None:
    prompt = {"prompt": "The quick brown fox", "max_tokens": 12}

    def texts(count: int, **settings: Any) -> set[str]:
        replies = [ask(tiny, COMPLETIONS, prompt | settings) for _ in range(count)]
        return {reply.json["choices"][0]["text"] for reply in replies}

    seeded = texts(20, temperature=1.5, seed=5)
    assert len(seeded) == 1
    assert seeded != texts(1, temperature=1.5, seed=-5)
    assert len(texts(6, temperature=1.5)) >= 4
    assert len(texts(1, temperature=0, seed=1) | texts(1, temperature=0, seed=2)) == 1
    first, second = ask(tiny, COMPLETIONS, prompt | {"temperature": 1.5, "seed": 5, "n": 2}).json[
        "choices"
    ]
    assert {first["text"]} == seeded != {second["text"]}


def test_a_suffix_and_infill_give_the_same_text(tiny: Server) -> None:
    settings = {"temperature": 0, "max_tokens": 8, "n_predict": 8}
    prefix, suffix = "def add(first, second):\n    return ", "\n\nprint(add(1, 2))"
    suffixed = ask(tiny, COMPLETIONS, {"prompt": prefix, "suffix": suffix, **settings}).json
    body = {"input_prefix": prefix[:-4], "prompt": prefix[-4:], "input_suffix": suffix, **settings}
    infilled = ask(tiny, "/infill", body).json
    assert infilled["content"] == suffixed["choices"][0]["text"]
    assert infilled["tokens_evaluated"] == suffixed["usage"]["prompt_tokens"]
    reverse = ask(tiny, "/infill", body | {"input_prefix": suffix, "input_suffix": prefix}).json
    assert reverse["content"] != infilled["content"]


# What llama.vim sends (LSP-29)
LLAMA_VIM = {
    "id_slot": 0,
    "input_prefix": "def add(first, second):\n",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "input_extra": [
        {"text": "def sub(a, b):\n    return a - b\n", "time": [1, 2], "filename": "sub.py"},
        {"text": "VALUE = 3\n", "time": [1, 2], "filename": "value.py"},
    ],
    "prompt": "    return ",
    "n_predict": 16,
    "stop": ["\n\n\n"],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": [
        "content",
        "timings/prompt_n",
        "timings/prompt_ms",
        "timings/prompt_per_token_ms",
        "timings/prompt_per_second",
        "timings/predicted_n",
        "timings/predicted_ms",
        "timings/predicted_per_token_ms",
        "timings/predicted_per_second",
        "truncated",
        "tokens_cached",
    ],
}


def test_llama_vims_requests_are_understood(tiny: Server) -> None:
    reply = ask(tiny, "/infill", LLAMA_VIM).json
    assert list(reply) == LLAMA_VIM["response_fields"]
    assert reply["truncated"] is False
    again = ask(tiny, "/infill", LLAMA_VIM).json
    # The last token, and of a prompt that ends within a word the one that is taken back.
    assert again["tokens_cached"] + again["timings/prompt_n"] == reply["timings/prompt_n"]
    assert again["timings/prompt_n"] <= 2
    # the extras stand in front: a new one behind them costs only itself and what follows
    warm = {**LLAMA_VIM, "n_predict": 0, "response_fields": [""], "prompt": ""}
    assert ask(tiny, "/infill", warm).json == {}
    three = {**LLAMA_VIM, "n_cmpl": 3, "temperature": 1.5}
    assert [row["content"] for row in ask(tiny, "/infill", three).json].__len__() == 3
    streamed = ask(tiny, "/infill", {**LLAMA_VIM, "stream": True, "response_fields": None})
    events = [json.loads(event.removeprefix("data: ")) for event in streamed.events]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_a_gap_that_jumps_is_followed_by_reading_what_lies_between(tiny: Server) -> None:
    """That text was behind the gap and is before it; what lies beyond keeps its cache."""
    lines = [f"value_{number} = {number}\n" for number in range(24)]

    def read(place: int) -> int:
        body = {"input_prefix": "".join(lines[:place]), "input_suffix": "".join(lines[place:])}
        return ask(tiny, "/infill", body | {"n_predict": 1}).json["timings"]["prompt_n"]

    whole = read(4)
    assert whole // 3 < read(14) < 2 * whole // 3
    assert read(14) < whole // 8


def test_an_editors_next_infill_is_an_edit_of_the_text_before(tiny: Server) -> None:
    """Only what changed is read again; `exact` reads all that follows."""
    lines = [f"value_{number} = {number}\n" for number in range(12)]
    body = {"input_prefix": "".join(lines), "input_suffix": "print(total)\n", "n_predict": 2}
    ask(tiny, "/infill", body)
    for exact, word in ((False, "other"), (True, "third")):
        lines[6] = f"{word} = 1\n"
        changed = body | {"input_prefix": "".join(lines), "x_kvq": {"exact": exact}}
        counts = ask(tiny, "/infill", changed).json["x_kvq"]
        assert (counts["edited"] == 0) == exact
        read = counts["prompt_tokens"] - counts["cached_tokens"]
        assert (read > counts["prompt_tokens"] // 3) == exact


def test_keys_in_a_file_longer_than_the_context_cost_their_own_tokens(tiny: Server) -> None:
    """Its beginning stays where it is for many keys, and then goes by an eighth of the context."""
    body = {"input_prefix": "value = 1\n" * 200, "input_suffix": "print(total)\n", "n_predict": 2}
    ask(tiny, "/infill", body)
    read, beginnings = list[int](), set[bytes]()
    for _ in range(12):
        body["input_prefix"] += "ab "
        counts = ask(tiny, "/infill", body).json["x_kvq"]
        assert counts["edited"] > 0
        read.append(counts["prompt_tokens"] - counts["cached_tokens"])
        slot = max(tiny.pool.served.slots.all, key=lambda slot: slot.released_at)
        beginnings.add(slot.tokens[:64].tobytes())
    assert max(read) < 508 // 8
    assert len(beginnings) <= 2


def test_infill_drops_the_far_context_first(tiny: Server) -> None:
    near = {"input_prefix": "x = ", "input_suffix": "\n", "n_predict": 4, "temperature": 0}
    alone = ask(tiny, "/infill", near).json
    extra = [{"filename": f"{n}.py", "text": f"value_{n} = {n}\n" * 12} for n in range(12)]
    crowded = ask(tiny, "/infill", {**near, "input_extra": extra}).json
    assert crowded["truncated"]
    assert alone["tokens_evaluated"] < crowded["tokens_evaluated"] <= 512 - 4
    newest = ask(tiny, "/infill", {**near, "input_extra": extra[-1:]}).json
    assert not newest["truncated"]
    long = ask(tiny, "/infill", {**near, "input_prefix": "word " * 900 + "x = "}).json
    assert long["truncated"]
    assert 508 * 7 // 8 <= long["tokens_evaluated"] <= 508


def test_how_likely_each_beginning_of_an_infill_is(tiny: Server) -> None:
    body = {"input_prefix": "x = ", "input_suffix": "\n", "n_predict": 6, "temperature": 0}
    assert "steps" not in ask(tiny, "/infill", body).json["x_kvq"]
    steps_of_two = {"x_kvq": {"steps": True}, "n_cmpl": 2}
    for reply in ask(tiny, "/infill", body | steps_of_two).json:
        steps = reply["x_kvq"]["steps"]
        ends, sums = zip(*steps, strict=True)
        assert ends[-1] == len(reply["content"])
        assert list(ends) == sorted(ends)
        assert all(after < before < 0 for before, after in pairwise(sums))
    reply = ask(tiny, "/infill", body | {"n_probs": 1, "x_kvq": {"steps": True}}).json
    logprobs = [row["logprob"] for row in reply["completion_probabilities"]]
    # Two tokens that are parts of one letter come with it.
    sums = [logprob for _, logprob in reply["x_kvq"]["steps"]]
    assert {round(value, 6) for value in sums} <= {round(v, 6) for v in accumulate(logprobs)}
    assert sums[-1] == pytest.approx(sum(logprobs))


def test_other_files_are_read_once_for_all_files(tiny: Server) -> None:
    """Their order does not matter, and another owner or an exact request finds nothing."""
    extra = [
        {"filename": f"{name}.py", "text": "".join(f"{name}_{n} = {n}\n" for n in range(12))}
        for name in ("first", "second", "third")
    ]
    body = {"input_prefix": "x = ", "input_suffix": "\n", "n_predict": 2, "input_extra": extra}
    ask(tiny, "/infill", body)
    other = {"input_prefix": "for name in", "input_suffix": ":\n", "input_extra": extra[:0:-1]}
    exact = ask(tiny, "/infill", body | other | {"x_kvq": {"exact": True}}).json["x_kvq"]
    assert exact["cached_tokens"] < 20
    counts = ask(tiny, "/infill", body | other | {"input_prefix": "while name in"}).json["x_kvq"]
    assert counts["prompt_tokens"] - counts["cached_tokens"] < 30
    assert counts["prompt_tokens"] > 150


def test_a_model_that_cannot_infill_is_named(served: Server) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        reply = ask(served, path, body)
        assert (reply.status, reply.json["error"]["code"]) == (400, "no_infilling")
        assert reply.json["error"]["message"].startswith("rule: ")


@pytest.mark.parametrize("size", [1, 2, 100])
def test_infilled_text_ends_with_its_block(size: int) -> None:
    text = "a)\n        b\n\n        c\n    d\n"
    limit = IndentLimit(8)
    shown = ""
    for place in range(0, len(text), size):
        shown += limit.feed(text[place : place + size])
        if limit.reached:
            break
    assert shown + limit.flush() == "a)\n        b\n\n        c\n"
    assert limit.reached
    unlimited = IndentLimit(0)
    assert unlimited.feed(text) == text


def test_an_answer_ends_at_a_line_break_when_its_time_is_over() -> None:
    class Lines:
        """Every token is a line."""

        def push(self, token: int) -> str:
            time.sleep(0.004)
            return "line\n"

        def flush(self) -> str:
            return ""

    with running(Rule(detokenizer=Lines).load, sessions=1) as server:
        body = {"prompt": "abc", "n_predict": 1500, "t_max_predict_ms": 1}
        reply = ask(server, "/completion", body).json
        assert reply["content"] == "line\n"
        assert (reply["stop_type"], reply["tokens_predicted"]) == ("limit", 1)


def test_llama_servers_small_routes(tiny: Server) -> None:
    text = "Größe <|im_end|> 🎉"
    ids = ask(tiny, "/tokenize", {"content": text, "parse_special": False}).json["tokens"]
    assert ask(tiny, "/detokenize", {"tokens": ids}).json == {"content": text}
    special = ask(tiny, "/tokenize", {"content": text}).json["tokens"]
    assert len(special) < len(ids)
    pieces = ask(tiny, "/tokenize", {"content": "🎉", "with_pieces": True}).json["tokens"]
    content = b"".join(
        bytes(row["piece"]) if isinstance(row["piece"], list) else row["piece"].encode()
        for row in pieces
    )
    assert content.decode() == "🎉"
    prompt = ask(tiny, "/apply-template", chat("hi")).json["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    props = ask(tiny, "/props").json
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] == 4
    native = ask(tiny, "/completion", {"prompt": "The quick", "n_predict": 4, **GREEDY}).json
    whole = ask(tiny, COMPLETIONS, {"prompt": "The quick", "max_tokens": 4, **GREEDY}).json
    assert native["content"] == whole["choices"][0]["text"]
    assert (native["tokens_predicted"], native["stop_type"]) == (4, "limit")


@pytest.mark.parametrize("stream", [False, True])
def test_llama_servers_shape_tells_the_stop_string(
    stream: bool, rule: Rule, served: Server
) -> None:
    text = rule.text("hi", 6)
    body = {"prompt": "hi", "n_predict": 6, "stream": stream, "stop": ["~", text[3:5]]}
    reply = ask(served, "/completion", body | GREEDY)
    last = json.loads(reply.events[-1].removeprefix("data: ")) if stream else reply.json
    assert (last["stop_type"], last["stopping_word"]) == ("word", text[3:5])
