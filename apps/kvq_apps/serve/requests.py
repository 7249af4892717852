"""Turns the JSON of a request into a request to the engine, and checks every field.

It reads the fields of OpenAI and llama-server. What this server cannot follow is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from secrets import randbits
from typing import Any, TypeVar, cast

from kvq.errors import DataError, ModelError, UsageError, argument
from kvq.json_values import is_array
from kvq_apps.serve.errors import RequestError, too_long
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.formats import NAMES, constraint_of
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.raw_prompts import encoded, healed, prompts_of
from kvq_apps.serve.sampling import refuse_unsupported, sampling_of
from kvq_apps.serve.thinking_fields import answer_thoughts, template_variables
from kvq_apps.serve.tools import Tools, attach_results, template_call, tools_of
from kvq_apps.settings.options import NO_DRAFTER
from kvq_apps.thinking import AnswerThoughts
from kvq_models.thinking import Thinking, assistant_message
from kvq_models.tokenizer import ChatPrompt, Tokenizer
from kvq_runtime.answer.constraint import Constraint
from kvq_runtime.answer.drafter import Drafter
from kvq_runtime.sequence.prediction import WithAuxiliary, predictor_named
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.scheduler import PRIORITIES
from kvq_specdraft import FREE_DRAFTERS, drafter_named

T = TypeVar("T")

MOST_CHOICES = 16
MOST_LOGPROBS = 20
# llama-server's clients ask for more.
MOST_NATIVE_LOGPROBS = 100
# OpenAI takes 4, llama-server any number.
MOST_STOPS = 64
_MOST_TOKENS = 1 << 31
_COMPLETION_TOKENS = 16
_ROLES = {
    **{"system": "system", "developer": "system"},
    **{"user": "user", "assistant": "assistant", "tool": "tool"},
}

# Parts of a message that are text, by the field with the text.
_TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
}
_KIND_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRequest:
    """Holds a request after its fields are read: what is generated, and how it is sent.

    `answer_format` are the constraint on an answer and the name of the field that asks for it.
    `logprobs` adds the log-probabilities of the tokens. Of the answers to each prompt the `choices`
    likeliest are sent. `steps` adds how likely each beginning of a text is. `notes` are what
    `x_kvq` says about a request that is followed only in part: `unheld` places of schemas,
    `skipped_tools`, and `ignored` fields.
    """

    generation: GenerationRequest
    answer_format: tuple[Constraint, str] | None
    tools: Tools | None = None
    thoughts: AnswerThoughts | None = None
    stream: bool
    include_usage: bool
    response_fields: tuple[str, ...] | None
    echo: bool = False
    logprobs: bool
    steps: bool = False
    choices: int
    notes: Mapping[str, list[str]]


def _answer_request(
    fields: Fields,
    model: ServedModel,
    generation: GenerationRequest,
    param: str,
    *,
    tools: Tools | None = None,
    skipped_tools: tuple[str, ...] = (),
    thoughts: AnswerThoughts | None = None,
) -> AnswerRequest:
    """Reads how the client wants the answer to prompts that come from the field `param`.

    It gets the log-probabilities and all choices that are generated.
    """
    _check_prompts(generation, model, param)
    names = fields.get("response_fields")
    if names is not None and not (is_array(names) and all(isinstance(name, str) for name in names)):
        fields.refuse("response_fields", "a list of strings")
    call_tokens = frozenset[int]() if tools is None else tools.shown(model.tokenizer)
    answer_format = _answer_format(fields, model.tokenizer, tools, thoughts, call_tokens)
    unheld = () if answer_format is None else answer_format[0].unheld
    notes = {"unheld": [*unheld], "skipped_tools": [*skipped_tools]}
    return AnswerRequest(
        generation=replace(
            generation,
            # A prompt that is only read has one answer.
            choices=1 if generation.max_tokens == 0 else generation.choices,
            shown=call_tokens if thoughts is None else call_tokens | thoughts.thinking.shown,
        ),
        answer_format=answer_format,
        tools=tools,
        thoughts=thoughts,
        stream=fields.flag("stream"),
        include_usage=fields.object("stream_options").flag("include_usage"),
        response_fields=tuple(cast(list[str], names)) if names else None,
        logprobs=generation.logprobs,
        choices=generation.choices,
        notes={name: note for name, note in notes.items() if note},
    )


def _alternatives(fields: Fields) -> int | None:
    """Returns how many alternatives each token has; None: log-probabilities are not wanted.

    Chat has a flag and a number, older routes have only the number; both are read everywhere.
    """
    value = fields.get("logprobs")
    if isinstance(value, bool) or value is None:
        count = fields.whole("top_logprobs", 0, MOST_LOGPROBS, 0)
        if count and not value:
            fields.refuse_with("top_logprobs", "top_logprobs needs logprobs to be true")
        return count if value else None
    return fields.whole("logprobs", 0, MOST_LOGPROBS, 0)


def chat_request(fields: Fields, model: ServedModel) -> AnswerRequest:
    """Reads `POST /v1/chat/completions`."""
    generation = _openai_request(fields, model, "chat")
    tokenizer = model.tokenizer
    tools, skipped = tools_of(fields, tokenizer)
    thinking = Thinking.of(tokenizer)
    variables = template_variables(fields, thinking)
    messages = attach_results(_messages(fields), tokenizer.chat_template)
    continued = _continued_message(fields)
    continues = continued is not None
    prompt = _chat_prompt(
        *(model, messages, tools, variables),
        continue_final_message=continues,
        add_generation_prompt=not continues and fields.flag("add_generation_prompt", True),
    )
    generation = replace(
        generation,
        prompts=(tuple(prompt.ids),),
        reconciled=prompt.reconciled,
        max_tokens=_most_tokens(fields, "max_completion_tokens", "max_tokens", default=None),
    )
    return _answer_request(
        *(fields, model, generation, "messages"),
        tools=tools,
        skipped_tools=skipped,
        thoughts=answer_thoughts(fields, thinking, continued, prompt.ids),
    )


def _continued_message(fields: Fields) -> Fields | None:
    """Returns the last message where the answer goes on with it, None where a turn begins.

    An assistant's last message is continued unless a field says otherwise. Raises `RequestError`
    for fields that exclude each other, and for a message that cannot be continued.
    """
    rows = fields.objects("messages")
    last = rows[-1] if rows and rows[-1].get("role") == "assistant" else None
    possible = last is not None and not last.get("tool_calls")
    begins = fields.flag("add_generation_prompt", not possible)
    continues = fields.flag("continue_final_message", possible and not begins)
    if not continues:
        return None
    if fields.get("add_generation_prompt"):
        fields.refuse_with(
            "continue_final_message",
            "continue_final_message goes on with the last message and add_generation_prompt "
            "begins a new one; send one of them",
        )
    if not possible:
        fields.refuse_with(
            "continue_final_message",
            "continue_final_message is not possible: the last message has to be an assistant's "
            "without tool_calls; end with one, or leave the field out",
        )
    return last


def _chat_prompt(
    model: ServedModel,
    messages: list[dict[str, Any]],
    tools: Tools | None,
    variables: Mapping[str, Any],
    **ending: bool,
) -> ChatPrompt:
    """Returns the prompt that the model's template makes of `messages`."""
    variables = {**variables, **({} if tools is None else {"tools": tools.rows})}
    try:
        return model.tokenizer.prompt(messages, variables, most=model.context_tokens, **ending)
    except DataError as error:
        raise RequestError(str(error), param="messages") from error
    except ModelError as error:
        raise RequestError(f"{model.name}: {error}", param="messages") from error
    except RecursionError:
        message = "the arguments of a call, or tools, are nested too deeply; nest them less"
        raise RequestError(message, param="messages" if tools is None else "tools") from None


def _answer_format(
    fields: Fields,
    tokenizer: Tokenizer,
    tools: Tools | None,
    thoughts: AnswerThoughts | None,
    call_tokens: frozenset[int],
) -> tuple[Constraint, str] | None:
    """Returns the format that the answer must have after its thought, or None for any text.

    The request asks for a format, for calls of tools, or for both. `call_tokens` are the control
    tokens in calls.
    """
    constraint = constraint_of(fields)
    # With another of these fields `response_format` can only ask for text.
    name = next((name for name in reversed(NAMES) if fields.get(name)), "tools")
    try:
        if thoughts is not None:
            constraint = thoughts.said(constraint)
        if tools is not None:
            constraint = tools.constraint(tokenizer, constraint)
        if thoughts is not None:
            constraint = thoughts.constraint(constraint, call_tokens, calls=tools is not None)
    except UsageError as error:
        raise RequestError(str(error), param=name) from error
    return None if constraint is None else (constraint, name)


def _most_tokens(fields: Fields, *names: str, default: int | None) -> int | None:
    """Returns the limit of new tokens in the first of OpenAI's fields `names`, or in `n_predict`.

    None, for -1 and llama-server's -2, is as much as fits. 0 only reads the prompt: llama.vim warms
    a model up so.
    """
    for name in (*names, "n_predict"):
        limit = fields.whole(name, -2 if name == "n_predict" else -1, _MOST_TOKENS, None)
        if limit is not None:
            return None if limit < 0 else limit
    return default


def completion_request(fields: Fields, model: ServedModel) -> AnswerRequest:
    """Reads `POST /v1/completions`; with `suffix` the answer is the text before it."""
    generation = _openai_request(fields, model, "completion")
    count, logprobs, echo = generation.choices, generation.logprobs, fields.flag("echo")
    best_of, suffix = _best_of(fields, count), fields.text("suffix")
    if suffix:
        if echo:
            fields.refuse_with("echo", "echo is not possible with suffix", "unsupported")
        prefix, most = fields.text("prompt"), model.context_tokens
        prompts = [
            _infilled("prompt", model, lambda: model.gaps.encode_whole(prefix, suffix, most))
        ]
    else:
        prompts = prompts_of(fields, model)
    generation = replace(
        generation,
        prompts=tuple(map(tuple, prompts)),
        max_tokens=_most_tokens(fields, "max_tokens", default=_COMPLETION_TOKENS),
        stop_ids=model.gaps.stop_ids if suffix else _gap_ends(model, prompts),
        transient=bool(suffix),
        healed=() if logprobs else healed(fields, model, prompts),
        choices=best_of,
        logprobs=logprobs or best_of > count,
        scored=echo and logprobs,
    )
    request = _answer_request(fields, model, generation, "prompt")
    return replace(request, echo=echo, logprobs=logprobs, choices=count)


def _best_of(fields: Fields, count: int) -> int:
    """Returns how many answers each prompt gets, of which the `count` likeliest are sent."""
    best_of = fields.whole("best_of", 1, MOST_CHOICES, count)
    if best_of < count:
        fields.refuse("best_of", f"n ({count}) or more: the likeliest n of these are told")
    if best_of > count and fields.flag("stream"):
        fields.refuse_with(
            "best_of", "best_of above n is known at the end only; leave stream out", "unsupported"
        )
    return best_of


def _gap_ends(model: ServedModel, prompts: list[list[int]]) -> frozenset[int] | None:
    """Returns the tokens that end a middle, if every prompt asks for one."""
    fim = model.tokenizer.fim
    asks = fim is not None and all(ids[-1:] == [fim.middle] for ids in prompts)
    return model.gaps.stop_ids if asks else None


def native_request(fields: Fields, model: ServedModel) -> AnswerRequest:
    """Reads llama-server's `POST /completion`."""
    generation = _native_request(fields, model)
    prompts = prompts_of(fields, model)
    generation = replace(
        generation,
        prompts=tuple(map(tuple, prompts)),
        stop_ids=_gap_ends(model, prompts),
        healed=() if generation.logprobs else healed(fields, model, prompts),
    )
    return _answer_request(fields, model, generation, "prompt")


def infill_request(fields: Fields, model: ServedModel) -> AnswerRequest:
    """Reads llama-server's `POST /infill`, whose `prompt` is the end of `input_prefix`.

    What does not fit is left out, farthest from the gap first, as llama-server does. The requests
    of an editor are edits of one text, unless `x_kvq.exact` asks for a text computed in order.
    """
    generation = _native_request(fields, model)
    prefix = fields.text("input_prefix") + fields.text("prompt")
    suffix = fields.text("input_suffix")
    extra = [
        (chunk.text("filename", "snippet"), chunk.text("text"))
        for chunk in fields.objects("input_extra")
    ]
    # At most a quarter of the context is reserved for the answer, which may become longer.
    answer = min(model.context_tokens // 4, generation.max_tokens or model.context_tokens)
    room = model.context_tokens - max(1, answer)
    fitted = _infilled("input_prefix", model, lambda: model.gaps.fit(prefix, suffix, room, extra))
    exact, steps = (fields.object("x_kvq").flag(name) for name in ("exact", "steps"))
    generation = replace(
        generation,
        prompts=(tuple(fitted.ids),),
        healed=() if generation.logprobs else healed(fields, model, [fitted.ids]),
        stop_ids=model.gaps.stop_ids,
        truncated=fitted.truncated,
        transient=True,
        edits=not exact,
        gap=model.gaps.gap_id,
        passages=() if exact else fitted.passages,
        logprobs=generation.logprobs or steps,
    )
    return replace(_answer_request(fields, model, generation, "input_prefix"), steps=steps)


def _openai_request(fields: Fields, model: ServedModel, priority: str) -> GenerationRequest:
    """Reads what OpenAI's routes have in common; the prompts come later."""
    seed = fields.whole("seed", -(1 << 63), (1 << 64) - 1, None)
    alternatives = _alternatives(fields)
    return replace(
        _any_request(fields, model, priority),
        logprobs=alternatives is not None,
        top_logprobs=alternatives or 0,
        # The generator takes no negative seed; the two's complement maps them to other ones.
        seed=(randbits(62) if seed is None else seed) % (1 << 64),
        choices=fields.whole("n", 1, MOST_CHOICES, 1),
    )


def _native_request(fields: Fields, model: ServedModel) -> GenerationRequest:
    """Reads what llama-server's routes have in common; -1 means no limit, or any seed."""
    seed = fields.whole("seed", -(1 << 63), (1 << 64) - 1, -1)
    alternatives = fields.whole("n_probs", 0, MOST_NATIVE_LOGPROBS, 0)
    tokens = fields.flag("return_tokens")
    return replace(
        _any_request(fields, model, "completion"),
        seed=randbits(62) if seed < 0 else seed,
        choices=fields.whole("n_cmpl", 1, MOST_CHOICES, 1),
        max_tokens=_most_tokens(fields, default=None),
        # A token comes with its log-probability.
        logprobs=alternatives > 0 or tokens,
        top_logprobs=alternatives,
        indent=fields.whole("n_indent", 0, 1 << 16, 0),
        time_limit_ms=fields.whole("t_max_predict_ms", -1, 1 << 31, 0),
    )


def _any_request(fields: Fields, model: ServedModel, priority: str) -> GenerationRequest:
    """Reads what all routes have in common; the prompts and the seed come later."""
    check_name(fields.text("model", model.name), model)
    refuse_unsupported(fields)
    extension = fields.object("x_kvq")
    return GenerationRequest(
        prompts=(),
        seed=0,
        owner=model.owner,
        sampling=sampling_of(fields, model),
        rank=PRIORITIES[extension.choice("priority", PRIORITIES, priority)],
        distinct=extension.flag("distinct"),
        stop=fields.texts("stop", MOST_STOPS),
        reuse=fields.flag("cache_prompt", True),
        edits=not extension.flag("exact", model.exact),
        draft=_draft(extension),
        predict=_predict(extension),
    )


def _draft(extension: Fields) -> bool | Callable[[], Drafter]:
    """Returns whether to draft, or a function that makes the drafter that is named."""
    name = extension.get("draft")
    if name is None or isinstance(name, bool):
        return name is not False
    if not isinstance(name, str) or (name != NO_DRAFTER and name not in FREE_DRAFTERS):
        possible = f"true, false, {NO_DRAFTER}, {', '.join(sorted(FREE_DRAFTERS))}"
        extension.refuse_with("draft", f"x_kvq.draft {name!r} is not possible; choose {possible}")
    return name != NO_DRAFTER and partial(drafter_named, name)


def _predict(extension: Fields) -> str | None:
    """Returns the predictor of the prompt; None: the server's."""
    if extension.get("predict") is None:
        return None
    text = extension.text("predict")
    try:
        if isinstance(predictor_named(text), WithAuxiliary):
            extension.refuse_with("predict", "x_kvq.predict names no model; the server does")
    except UsageError as error:
        extension.refuse_with("predict", error.message_for(lambda name, _: f"x_kvq.{name}"))
    return text


def check_name(name: str, model: ServedModel) -> None:
    """Raises a `RequestError` for a name that is not the model's, if the server is strict."""
    if model.strict and name not in model.names:
        names = ", ".join(sorted(model.names))
        raise RequestError(
            f"the model {name[:80]!r} is not served here, and {argument('--strict-model')} "
            f"refuses other names than its own: {names}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _messages(fields: Fields) -> list[dict[str, Any]]:
    rows = fields.objects("messages")
    if not rows:
        fields.refuse("messages", "a list with at least one message")
    messages = [_message(message) for message in rows]
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    for message in messages:
        if message["role"] == "tool":
            # Some templates need the function's name, which only the call has.
            message["name"] = names.get(message["tool_call_id"], "")
    return messages


def _message(message: Fields) -> dict[str, Any]:
    role = message.text("role")
    if role not in _ROLES:
        message.refuse_with("role", f"the role {role!r} is not supported; use {', '.join(_ROLES)}")
    template_message: dict[str, Any] = {"role": _ROLES[role], "content": _content(message, role)}
    if role == "tool":
        template_message["tool_call_id"] = message.text("tool_call_id")
    elif message.get("tool_calls"):
        if role != "assistant":
            message.refuse_with("tool_calls", "only an assistant's message has tool_calls")
        calls = message.objects("tool_calls")
        template_message["tool_calls"] = [*map(template_call, calls)]
    if role == "assistant":
        # The template keeps or drops the thoughts of earlier turns.
        thought = message.text("reasoning_content") or message.text("reasoning")
        template_message |= assistant_message(thought, template_message["content"])
    return template_message


def _content(message: Fields, role: str) -> str:
    """Returns the message's text; parts are joined. Calls and results may have no text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content in (None, []) and role in ("assistant", "tool"):
        return ""
    parts = message.objects("content")
    if not parts:
        message.refuse("content", "a string or a list of text parts")
    return "".join(_part_text(part, role) for part in parts)


def _part_text(part: Fields, role: str) -> str:
    kind = part.text("type", "text")
    if kind in _TEXT_PARTS:
        return part.text(_TEXT_PARTS[kind])
    if role == "tool":
        return left_out(kind)
    part.refuse_with("type", f"content of type {kind!r} is not supported; send text only")


def left_out(kind: str) -> str:
    """Returns what the model reads in place of a part of a tool's result that is no text.

    Nobody chose that part, and refusing it would end the conversation.
    """
    return f"[{kind[:_KIND_CHARACTERS]} left out: this model reads text only]"


def _infilled(param: str, model: ServedModel, encode: Callable[[], T]) -> T:
    """Returns the ids of the texts around a gap, or refuses for a model that fills no gaps."""
    try:
        return encoded(param, encode)
    except ModelError as error:
        raise RequestError(f"{model.name}: {error}", param="suffix", code="no_infilling") from error


def _check_prompts(request: GenerationRequest, model: ServedModel, param: str) -> None:
    """Refuses a prompt that is empty or leaves no room for an answer."""
    for ids in request.prompts:
        if not ids:
            raise RequestError(f"{param} is empty; give some text", param=param)
        if len(ids) + 1 > model.context_tokens:
            advice = "shorten the prompt, so that an answer fits too"
            raise too_long("the prompt", param, len(ids), model.context_tokens, advice)
