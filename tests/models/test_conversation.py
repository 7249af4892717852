"""Conversations that templates refuse or leave out in part: said so that nothing is lost."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from chat_templates import TEMPLATES
from kvq.errors import ModelError
from kvq_models.chat import ChatTemplate

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def answer(text: str, *words: str, thought: str = "") -> Message:
    """Returns an assistant's message that calls a tool with each of the words."""
    calls = [
        {"id": f"id{word}", "type": "function",
         "function": {"name": "find", "arguments": {"q": word}}}
        for word in words
    ]  # fmt: skip
    message: Message = {"role": "assistant", "content": text}
    message |= {"tool_calls": calls} if calls else {}
    return message | ({"reasoning_content": thought, "thinking": thought} if thought else {})


def result(text: str, word: str) -> Message:
    return {"role": "tool", "name": "find", "tool_call_id": f"id{word}", "content": text}


# Each text is a word that no other holds.
CONVERSATIONS = {
    "a question": [user("apple")],
    "a system and turns": [system("brick"), user("apple"), answer("cedar"), user("daisy")],
    "a developer": [{"role": "developer", "content": "brick"}, user("apple")],
    "three systems": [system("brick"), system("chalk"), system("drill"), user("apple")],
    "systems throughout": [
        system("brick"), user("apple"), system("chalk"), answer("cedar"), system("drill"),
        user("daisy"), system("elbow"),
    ],
    "a system at the end": [user("apple"), system("brick")],
    "a system alone": [system("brick")],
    "a system before an answer": [system("brick"), answer("cedar"), user("apple")],
    "three users": [user("apple"), user("berry"), user("daisy"), answer("cedar"), user("eagle")],
    "two answers": [user("apple"), answer("cedar"), answer("daisy"), user("eagle")],
    "an answer first": [answer("cedar"), user("apple"), answer("daisy"), user("eagle")],
    "parts": [{"role": "user", "content": [
        {"type": "text", "text": "apple"}, {"type": "text", "text": "berry"}]}],
    "a call": [user("apple"), answer("", "delta1234"), result("eagle", "delta1234")],
    "a call with a long id": [
        user("apple"), answer("", "delta-of-many-letters"),
        result("eagle", "delta-of-many-letters"), answer("fruit"), user("grape"),
    ],
    "a call with a text": [
        system("brick"), user("apple"), answer("cedar", "delta1234"), result("eagle", "delta1234"),
    ],
    "a call with a text, answered": [
        user("apple"), answer("cedar", "delta1234"), result("eagle", "delta1234"),
        answer("fruit"), user("grape"),
    ],
    "a call with a thought and a text": [
        user("apple"), answer("cedar", "delta1234", thought="hmm"), result("eagle", "delta1234"),
    ],
    "a call with a thought and a text, answered": [
        user("apple"), answer("cedar", "delta1234", thought="hmm"), result("eagle", "delta1234"),
        answer("fruit"), user("grape"),
    ],
    "several calls at once": [
        user("apple"), answer("cedar", "delta1234", "extra1234"), result("fruit", "delta1234"),
        result("grape", "extra1234"), answer("house"), user("index"),
    ],
    "calls one after another": [
        user("apple"), answer("", "delta1234", thought="hmm"), result("eagle", "delta1234"),
        answer("cedar", "fruit1234", thought="so"), result("grape", "fruit1234"),
    ],
    "a call that nobody answered": [user("apple"), answer("", "delta1234"), user("eagle")],
    "a question behind a result": [
        user("apple"), answer("", "delta1234"), result("eagle", "delta1234"), user("grape"),
    ],
    "a result without a call": [user("apple"), answer("cedar"), result("eagle", "delta1234")],
}  # fmt: skip


def texts(messages: Sequence[Message], *, calls: bool = True) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        parts = [part["text"] for part in content] if isinstance(content, list) else [content]
        yield from (part for part in parts if part)
        rows = message.get("tool_calls", ()) if calls else ()
        yield from (row["function"]["arguments"]["q"] for row in rows)


def context(messages: Sequence[Mapping[str, Any]], *, tools: bool = False) -> dict[str, Any]:
    return {
        **{"messages": messages, "add_generation_prompt": True},
        **{"bos_token": "<s>", "eos_token": "</s>"},
        **({"tools": TOOLS} if tools else {}),
    }


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(source) for name, source in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_is_in_the_prompt_once_and_in_order(
    name: str, templates: dict[str, ChatTemplate]
) -> None:
    for shape, messages in CONVERSATIONS.items():
        for tools in (False, True):
            text, _ = templates[name].prompt(context(messages, tools=tools))
            # An id may say the word of its call again.
            said = re.sub(r"id[a-z]+[-a-z0-9]+", "", text)
            assert [word for word in texts(messages) if said.count(word) != 1] == [], (
                shape,
                text,
            )
            turns = [row for row in messages if row["role"] not in ("system", "developer")]
            places = [said.index(word) for word in texts(turns, calls=False)]
            assert places == sorted(places), (shape, text)


PLAIN = {
    "chatml": "<|im_start|>system\nbrick<|im_end|>\n<|im_start|>user\napple<|im_end|>\n"
    "<|im_start|>assistant\ncedar<|im_end|>\n<|im_start|>user\ndaisy<|im_end|>\n"
    "<|im_start|>assistant\n",
    "mistral 0.3": "[INST] apple[/INST] cedar</s>[INST] brick\n\ndaisy[/INST]",
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_a_template_takes_is_rendered_as_it_is(name: str) -> None:
    """Tries texts with spaces, marks and nothing in them too."""
    template = ChatTemplate(TEMPLATES[name])
    assert template.prompt(context(CONVERSATIONS["a system and turns"])) == (PLAIN[name], ())


def test_a_conversation_that_is_taken_is_the_very_same_one() -> None:
    """Checks that the template sees the given messages, other fields, null contents, parts."""
    template = ChatTemplate("{% for row in messages %}{{ row | tojson }}{% endfor %}")
    messages = [
        {"role": "assistant", "content": None, "tool_calls": answer("", "a")["tool_calls"]},
        {"role": "user", "content": " a \n", "name": "Ada"},
        {"role": "user", "content": ""},
        {"role": "system", "content": "s"},
    ]
    text, changed = template.prompt({"messages": messages})
    assert changed == ()
    assert '{"role": "user", "content": " a \\n", "name": "Ada"}' in text
    assert text.count('"content": null') == 1


@pytest.mark.parametrize(
    ("name", "shape", "changes", "said"),
    [
        ("qwen 3.5", "systems throughout", ("system moved", "systems merged"),
         "<|im_start|>system\nbrick\n\nchalk\n\ndrill\n\nelbow<|im_end|>\n<|im_start|>user\napple"),
        ("gemma 1 and 2", "a system and turns", ("system folded",),
         "<start_of_turn>user\nbrick\n\napple<end_of_turn>"),
        ("gemma 1 and 2", "a system alone", ("system folded",),
         "<start_of_turn>user\nbrick<end_of_turn>"),
        ("gemma 1 and 2", "three users", ("users merged",),
         "<start_of_turn>user\napple\n\nberry\n\ndaisy<end_of_turn>"),
        ("mistral nemo", "an answer first", ("user added",), "[INST][/INST]cedar</s>[INST]apple"),
        ("gpt-oss", "a call with a text", (), "<|channel|>analysis<|message|>cedar<|end|>"),
        ("gpt-oss", "a call with a thought and a text", ("text moved into the thought",),
         "<|channel|>analysis<|message|>hmm\n\ncedar<|end|>"),
        ("gpt-oss", "a call with a thought and a text, answered", ("text parted from calls",),
         "<|channel|>final<|message|>cedar<|end|>"),
        ("gpt-oss", "several calls at once", ("calls parted", "text parted from calls"),
         '{"q": "delta1234"}<|call|><|start|>functions.find to=assistant<|channel|>commentary'
         '<|message|>"fruit"<|end|>'),
        ("mistral 0.3", "a question behind a result", ("call ids shortened", "assistant added"),
         "[/TOOL_RESULTS] </s>[INST] grape[/INST]"),
        ("deepseek", "a call", ("content of calls null",), "find\n{\"q\": \"delta1234\"}"),
        ("phi 3", "a call", ("calls and results written as text",),
         '{"name": "find", "arguments": {"q": "delta1234"}}<|end|>\n<|user|>\neagle<|end|>'),
        ("parts only", "a question", ("parts made",), "<|user|>apple<|end|>"),
        ("chatml", "parts", ("parts joined",), "<|im_start|>user\nappleberry<|im_end|>"),
        ("llama 2", "a developer", ("developer renamed",), "<<SYS>>\nbrick\n<</SYS>>"),
    ],
)  # fmt: skip
def test_only_what_is_needed_is_changed_and_told(
    name: str, shape: str, changes: tuple[str, ...], said: str,
    templates: dict[str, ChatTemplate], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    text, changed = templates[name].prompt(context(CONVERSATIONS[shape]))
    assert changed == changes
    assert said in text


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(TEMPLATES["gemma 1 and 2"])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            template.prompt(context(CONVERSATIONS["a system and turns"]))
    assert [record.getMessage().partition("changed: ")[2] for record in caplog.records] == [
        "system folded"
    ]


def test_where_nothing_helps_the_template_has_its_say() -> None:
    template = ChatTemplate("{{ raise_exception('not ' ~ messages[0].content) }}")
    with pytest.raises(ModelError, match="refuses these messages: not apple"):
        template.prompt(context(CONVERSATIONS["three systems"][3:]))
    # What would help against one of its complaints does not against another.
    count = (
        "{% if messages|length > 4 %}{{ raise_exception(messages|length ~ ' rows') }}{% endif %}"
    )
    rows = [*CONVERSATIONS["systems throughout"], *CONVERSATIONS["three users"]]
    with pytest.raises(ModelError, match=f"refuses these messages: {len(rows)} rows"):
        ChatTemplate(count + TEMPLATES["qwen 3.5"]).prompt(context(rows))
    silent = ChatTemplate("silence")
    assert silent.prompt(context(CONVERSATIONS["a call"])) == ("silence", ())


@pytest.mark.slow
def test_a_template_that_takes_too_long_is_asked_once() -> None:
    template = ChatTemplate("{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}")
    with pytest.raises(ModelError, match="takes more than 3 s"):
        template.prompt(context(CONVERSATIONS["three users"]))


# The last message is continued


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["The capital is", " Two spaces  and a line \n", "{", ""])
def test_a_continued_prompt_ends_with_the_text_of_its_last_message(
    name: str, text: str, templates: dict[str, ChatTemplate]
) -> None:
    messages = [system("brick"), user("apple"), answer(text)]
    variables = context(messages) | {"continue_final_message": True}
    prompt, _ = templates[name].prompt(variables)
    assert prompt.endswith(text.lstrip() or ("" if text else prompt[-1]))
    assert "apple" in prompt
    assert not re.search(r"(im_end|end_of_turn|eot_id|</s>)\W*$", prompt) or not text


def test_a_thought_that_was_cut_goes_on() -> None:
    messages = [user("apple"), answer("", thought="Let me")]
    variables = context(messages) | {"continue_final_message": True}
    assert ChatTemplate(TEMPLATES["qwen 3"]).prompt(variables)[0].endswith("<think>\nLet me")
    # Where it is not shown, the message is begun.
    assert (
        ChatTemplate(TEMPLATES["chatml"]).prompt(variables)[0].endswith("<|im_start|>assistant\n")
    )
    messages = [user("apple"), answer("So", thought="Let me")]
    variables = context(messages) | {"continue_final_message": True}
    expected = "<think>\nLet me\n</think>\n\nSo"
    assert ChatTemplate(TEMPLATES["qwen 3"]).prompt(variables)[0].endswith(expected)


def test_what_leaves_the_last_message_out_cannot_continue_it() -> None:
    with pytest.raises(ModelError, match="leaves out the last message"):
        ChatTemplate("{{ messages[0].content }}").prompt(
            context([user("apple"), answer("cedar")]) | {"continue_final_message": True}
        )
