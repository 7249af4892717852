"""From the JSON of a request to what the engine is asked: every field checked, by its name.

Knows OpenAI's and llama-server's fields; what a client may send that this server cannot do is
refused, what it does not know is ignored.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from secrets import randbits
from typing import Any, TypeVar, cast

from kvq.errors import DataError, ModelError, UsageError, argument
from kvq_apps.completion.prompts import GapPrompts
from kvq_apps.options import NO_DRAFTER
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.formats import NAMES, constraint_of
from kvq_apps.serve.thinking import template_variables, thinks_of
from kvq_apps.serve.tools import Tools, answered_calls, calls_of, tools_of
from kvq_apps.thinking import Thinks
from kvq_models.thinking import said
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.constraint import Constraint
from kvq_runtime.drafter import Drafter
from kvq_runtime.healing import heal
from kvq_runtime.prediction import WithAuxiliary, predictor_named
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.scheduler import PRIORITIES
from kvq_specdraft import FREE_DRAFTERS, drafter_named

T = TypeVar("T")

MOST_CHOICES = 16
MOST_PROMPTS = 64
MOST_LOGPROBS = 20
# OpenAI takes 4, llama-server any number.
MOST_STOPS = 64
_MOST_TOKENS = 1 << 31
_COMPLETION_TOKENS = 16
_DECIMAL = re.compile("[0-9]{1,12}")
_ROLES = {
    **{"system": "system", "developer": "system"},
    **{"user": "user", "assistant": "assistant", "tool": "tool"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelView:
    """What a request is read against: the served model and its limits.

    `strict`: a request for a model of another name than `names` is refused.
    """

    name: str
    names: frozenset[str]
    strict: bool
    tokenizer: Tokenizer
    gaps: GapPrompts
    vocab_size: int
    context_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer has to look like, and the field that says so."""

    constraint: Constraint
    param: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """How the answer is to be sent."""

    stream: bool
    include_usage: bool = False
    response_fields: tuple[str, ...] | None = None
    tools: Tools | None = None
    thinks: Thinks | None = None
    echo: bool = False


def delivery(fields: Fields, tools: Tools | None, thinks: Thinks | None = None) -> Delivery:
    """How the client wants the answer, in which `tools` may be called, and which so `thinks`."""
    names = fields.get("response_fields")
    if names is not None and not _is_list_of(names, str):
        fields.refuse("response_fields", "a list of strings")
    return Delivery(
        stream=fields.flag("stream"),
        include_usage=fields.object("stream_options").flag("include_usage"),
        response_fields=None if names is None else tuple(cast(list[str], names)),
        tools=tools,
        thinks=thinks,
        echo=fields.flag("echo"),
    )


def chat_request(fields: Fields, model: ModelView) -> GenerationRequest:
    """`POST /v1/chat/completions`."""
    _refuse_unsupported(fields, _CHAT_UNSUPPORTED)
    _check_model(fields, model)
    tools = tools_of(fields, model.tokenizer)
    variables = template_variables(fields, model.tokenizer)
    messages = answered_calls(_messages(fields), model.tokenizer.chat_template)
    ids = _chat_ids(model, messages, tools, variables)
    thinks = thinks_of(fields, model.tokenizer, ids)
    count = fields.whole("top_logprobs", 0, MOST_LOGPROBS, 0)
    logprobs = fields.flag("logprobs")
    if count and not logprobs:
        fields.refuse_with("top_logprobs", "top_logprobs needs logprobs to be true")
    return _checked(
        replace(
            _openai_request(fields, model, "chat"),
            prompts=(tuple(ids),),
            max_tokens=_most_tokens(fields, "max_completion_tokens", "max_tokens", default=None),
            logprobs=logprobs,
            top_logprobs=count,
            shown=_shown(model.tokenizer, tools, thinks),
        ),
        model,
        "messages",
    )


def _shown(tokenizer: Tokenizer, tools: Tools | None, thinks: Thinks | None) -> frozenset[int]:
    """The control tokens that are text, as what calls and thoughts are known by."""
    shown = frozenset[int]() if tools is None else tools.shown(tokenizer)
    return shown if thinks is None else shown | thinks.thinking.shown


def _chat_ids(
    model: ModelView,
    messages: list[dict[str, Any]],
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> Sequence[int]:
    """The prompt that `messages` become in the model's template."""
    variables = {**variables, **({} if tools is None else {"tools": [*map(dict, tools.rows)]})}
    try:
        return model.tokenizer.chat(messages, variables=variables, most=model.context_tokens)
    except DataError as error:
        raise RequestError(str(error), param="messages") from error
    except ModelError as error:
        raise RequestError(f"{model.name}: {error}", param="messages") from error
    except RecursionError:
        message = "the arguments of a call, or tools, are nested too deeply; nest them less"
        raise RequestError(message, param="messages" if tools is None else "tools") from None


def form_of(
    fields: Fields, tokenizer: Tokenizer, tools: Tools | None, thinks: Thinks | None = None
) -> Form | None:
    """The form that is asked for, or that a call of `tools` needs, behind a thought; None: any."""
    constraint = constraint_of(fields)
    # Beside another name `response_format` only asks for text.
    name = next((name for name in reversed(NAMES) if fields.get(name)), "tools")
    try:
        if thinks is not None:
            constraint = thinks.said(constraint)
        if tools is not None:
            constraint = tools.constraint(tokenizer, constraint)
        if thinks is not None:
            shown = _shown(tokenizer, tools, None)
            constraint = thinks.constraint(constraint, shown, calls=tools is not None)
    except UsageError as error:
        raise RequestError(str(error), param=name) from error
    return None if constraint is None else Form(constraint, name)


def _most_tokens(fields: Fields, *names: str, default: int | None) -> int | None:
    """The length asked for by OpenAI's `names`, or llama-server's, whose 0 only reads the prompt.

    None, their -1: as much as fits. llama.vim warms its instruct model up with `n_predict` 0.
    """
    for name in names:
        if fields.get(name) is not None:
            limit = fields.whole(name, -1, _MOST_TOKENS, 0)
            if limit == 0:
                fields.refuse(name, "1 or more, or -1: as many as fit")
            return None if limit < 0 else limit
    if fields.get("n_predict") is None:
        return default
    return _native_tokens(fields)


def _native_tokens(fields: Fields) -> int | None:
    """`n_predict`, whose -1 and absence are no limit, and -2, until the context is full, too."""
    limit = fields.whole("n_predict", -2, _MOST_TOKENS, -1)
    return None if limit < 0 else limit


def completion_request(fields: Fields, model: ModelView) -> GenerationRequest:
    """`POST /v1/completions`; `suffix` asks for what stands before it."""
    _refuse_unsupported(fields, _COMPLETION_UNSUPPORTED)
    _check_model(fields, model)
    suffix = fields.text("suffix")
    if fields.flag("echo") and (suffix or fields.get("logprobs") is not None):
        fields.refuse_with("echo", "echo is not possible with suffix or logprobs", "unsupported")
    stop_ids = None
    if suffix:
        prefix = fields.text("prompt")
        prompts = [
            _infilled(
                "prompt", model, lambda: model.gaps.whole(prefix, suffix, model.context_tokens)
            )
        ]
        stop_ids = model.gaps.stop_ids
    else:
        prompts = _prompts(fields, model)
    count = fields.whole("logprobs", 0, MOST_LOGPROBS, 0)
    return _checked(
        replace(
            _openai_request(fields, model, "completion"),
            prompts=tuple(map(tuple, prompts)),
            max_tokens=_most_tokens(fields, "max_tokens", default=_COMPLETION_TOKENS),
            stop_ids=stop_ids,
            transient=stop_ids is not None,
            healed=() if fields.get("logprobs") is not None else _healed(fields, model, prompts),
            logprobs=fields.get("logprobs") is not None,
            top_logprobs=count,
        ),
        model,
        "prompt",
    )


def native_request(fields: Fields, model: ModelView) -> GenerationRequest:
    """llama-server's `POST /completion`."""
    _refuse_unsupported(fields, _NATIVE_UNSUPPORTED)
    prompts = _prompts(fields, model)
    if len(prompts) != 1:
        fields.refuse("prompt", "one prompt")
    request = replace(
        _native_request(fields, model),
        prompts=(tuple(prompts[0]),),
        healed=_healed(fields, model, prompts),
    )
    return _checked(request, model, "prompt")


def infill_request(fields: Fields, model: ModelView) -> GenerationRequest:
    """llama-server's `POST /infill`: `prompt` belongs to the end of `input_prefix`.

    What does not fit is left out, farthest from the gap first, as that server does. Requests of one
    editor are edits of one text, unless `x_kvq.exact` asks for a text computed in its order.
    """
    _refuse_unsupported(fields, _NATIVE_UNSUPPORTED)
    request = _native_request(fields, model)
    prefix = fields.text("input_prefix") + fields.text("prompt")
    suffix = fields.text("input_suffix")
    extra = [
        (chunk.text("filename", "snippet"), chunk.text("text"))
        for chunk in fields.objects("input_extra")
    ]
    # A model's answer gets at most a quarter of the context reserved; it may grow beyond.
    answer = min(model.context_tokens // 4, request.max_tokens or model.context_tokens)
    room = model.context_tokens - max(1, answer)
    ids, truncated = _infilled(
        "input_prefix", model, lambda: model.gaps.fitted(prefix, suffix, room, extra)
    )
    return _checked(
        replace(
            request,
            prompts=(tuple(ids),),
            healed=_healed(fields, model, [ids]),
            stop_ids=model.gaps.stop_ids,
            truncated=truncated,
            transient=True,
            edits=not fields.object("x_kvq").flag("exact"),
        ),
        model,
        "input_prefix",
    )


def _openai_request(fields: Fields, model: ModelView, priority: str) -> GenerationRequest:
    """What both of OpenAI's routes read alike; the prompts come later."""
    seed = fields.whole("seed", -(1 << 63), (1 << 63) - 1, randbits(62))
    return replace(
        _any_request(fields, model, priority),
        # A generator takes no negative seed; the two's complement keeps them apart.
        seed=seed % (1 << 64),
        choices=fields.whole("n", 1, MOST_CHOICES, 1),
    )


def _native_request(fields: Fields, model: ModelView) -> GenerationRequest:
    """What both of llama-server's routes read alike; -1 is its word for no limit, or any seed."""
    _check_model(fields, model)
    seed = fields.whole("seed", -1, (1 << 63) - 1, -1)
    return replace(
        _any_request(fields, model, "completion"),
        seed=randbits(62) if seed < 0 else seed,
        choices=fields.whole("n_cmpl", 1, MOST_CHOICES, 1),
        max_tokens=_native_tokens(fields),
        indent=fields.whole("n_indent", 0, 1 << 16, 0),
        time_limit_ms=fields.whole("t_max_predict_ms", -1, 1 << 31, 0),
    )


def _any_request(fields: Fields, model: ModelView, priority: str) -> GenerationRequest:
    """What every route reads alike; the prompts and the seed come later."""
    extension = fields.object("x_kvq")
    return GenerationRequest(
        prompts=(),
        seed=0,
        sampling=_sampling(fields, model),
        rank=_rank(extension, priority),
        distinct=extension.flag("distinct"),
        stop=fields.texts("stop", MOST_STOPS),
        reuse=fields.flag("cache_prompt", True),
        draft=_draft(extension),
        predict=_predict(extension),
    )


def _sampling(fields: Fields, model: ModelView) -> Sampling:
    default = model.sampling
    return replace(
        default,
        temperature=fields.number("temperature", 0, 100, default.temperature),
        top_k=max(0, fields.whole("top_k", -1, 1 << 31, default.top_k)),
        top_p=fields.number("top_p", 1e-6, 1, default.top_p),
        min_p=fields.number("min_p", 0, 0.999, default.min_p),
        repeat_penalty=fields.number("repeat_penalty", 0.01, 100, default.repeat_penalty),
        repeat_window_tokens=fields.whole(
            "repeat_last_n", 0, 1 << 20, default.repeat_window_tokens
        ),
        presence_penalty=fields.number("presence_penalty", -2, 2, default.presence_penalty),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, default.frequency_penalty),
        logit_bias=_logit_bias(fields, model),
    )


def _logit_bias(fields: Fields, model: ModelView) -> Mapping[int, float]:
    given = fields.object("logit_bias") if isinstance(fields.get("logit_bias"), dict) else None
    if given is None:
        if fields.get("logit_bias"):
            fields.refuse("logit_bias", "an object from token ids to numbers")
        return {}
    bias: dict[int, float] = {}
    for name in given.names():
        if not (_DECIMAL.fullmatch(name) and int(name) < model.vocab_size):
            shown, last = name[:20], model.vocab_size - 1
            given.refuse_with(shown, f"logit_bias names token {shown!r}; ids are 0 to {last}")
        bias[int(name)] = given.number(name, -1e6, 1e6, 0.0)
    return bias


def _draft(extension: Fields) -> bool | Callable[[], Drafter]:
    """Whether to draft, or by whom: a drafter's name, whose options are its own."""
    name = extension.get("draft")
    if not isinstance(name, str):
        return extension.flag("draft", True)
    if name != NO_DRAFTER and name not in FREE_DRAFTERS:
        possible = f"true, false, {NO_DRAFTER}, {', '.join(sorted(FREE_DRAFTERS))}"
        extension.refuse_with("draft", f"x_kvq.draft {name!r} is not possible; choose {possible}")
    return name != NO_DRAFTER and partial(drafter_named, name)


def _predict(extension: Fields) -> str | None:
    """What of the prompt is to be predicted; None: as the server does."""
    if extension.get("predict") is None:
        return None
    text = extension.text("predict")
    try:
        if isinstance(predictor_named(text), WithAuxiliary):
            extension.refuse_with("predict", "x_kvq.predict names no model; the server does")
    except UsageError as error:
        extension.refuse_with("predict", error.told(lambda name, _: f"x_kvq.{name}"))
    return text


def _rank(extension: Fields, priority: str) -> int:
    """The rank of the request; `x_kvq.priority` may ask for another one."""
    name = extension.text("priority", priority)
    if name not in PRIORITIES:
        extension.refuse("priority", f"one of {', '.join(PRIORITIES)}")
    return PRIORITIES[name]


def _check_model(fields: Fields, model: ModelView) -> None:
    check_name(fields.text("model", model.name), model)


def check_name(name: str, model: ModelView) -> None:
    """Raises a `RequestError` for a name that is not the model's, where that matters."""
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
    given = fields.objects("messages")
    if not given:
        fields.refuse("messages", "a list with at least one message")
    messages = [_message(message) for message in given]
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    for message in messages:
        if message["role"] == "tool":
            # Some templates want to be told the name that only the call has.
            message["name"] = names.get(message["tool_call_id"], "")
    return messages


def _message(message: Fields) -> dict[str, Any]:
    role = message.text("role")
    if role not in _ROLES:
        message.refuse_with("role", f"the role {role!r} is not supported; use {', '.join(_ROLES)}")
    found: dict[str, Any] = {"role": _ROLES[role], "content": _content(message, role)}
    if role == "tool":
        found["tool_call_id"] = message.text("tool_call_id")
    elif message.get("tool_calls"):
        if role != "assistant":
            message.refuse_with("tool_calls", "only an assistant's message has tool_calls")
        found["tool_calls"] = calls_of(message)
    if role == "assistant":
        # What an earlier turn thought the template keeps or drops.
        thought = message.text("reasoning_content") or message.text("reasoning")
        found |= said(thought, found["content"])
    return found


def _content(message: Fields, role: str) -> str:
    """The message's text; a list of text parts is joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    parts = message.objects("content")
    if not parts:
        message.refuse("content", "a string or a list of text parts")
    for part in parts:
        if part.text("type") != "text":
            part.refuse_with(
                "type", f"content of type {part.text('type')!r} is not supported; send text only"
            )
    return "".join(part.text("text") for part in parts)


def _prompts(fields: Fields, model: ModelView) -> list[list[int]]:
    """The prompts of `prompt`: a string, a list of strings, of ids, or of lists of ids."""
    prompt = fields.get("prompt")

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, start=True, most=model.context_tokens)

    if isinstance(prompt, str):
        return [_encoded("prompt", lambda: encode(prompt))]
    if _is_list_of(prompt, int):
        return [_ids(fields, prompt, model)]
    if _is_list_of(prompt, str) or _is_list_of(prompt, list):
        if len(prompt) > MOST_PROMPTS:
            fields.refuse("prompt", f"at most {MOST_PROMPTS} prompts")
        return [
            _encoded("prompt", lambda text=text: encode(text))
            if isinstance(text, str)
            else _ids(fields, text, model)
            for text in prompt
        ]
    fields.refuse("prompt", "a string, a list of strings, or a list of token ids")


def _healed(
    fields: Fields, model: ModelView, prompts: list[list[int]]
) -> tuple[tuple[tuple[int, ...], bytes], ...]:
    """What `heal` makes of prompts, unless they were given as ids or `x_kvq.heal` lets them be.

    The first to ask waits for the tokenizer's index, here rather than on the engine's thread.
    """
    prompt = fields.get("prompt")
    wanted = fields.object("x_kvq").flag("heal", True)
    if not wanted or _is_list_of(prompt, int) or _is_list_of(prompt, list):
        return ()
    found = (heal(model.tokenizer, one) for one in prompts)
    return tuple((tuple(one), begin_with) for one, begin_with in found)


def _ids(fields: Fields, ids: Any, model: ModelView) -> list[int]:
    if not _is_list_of(ids, int) or not all(0 <= token < model.vocab_size for token in ids):
        fields.refuse("prompt", f"token ids from 0 to {model.vocab_size - 1}")
    return ids


def _is_list_of(value: Any, kind: type) -> bool:
    if not isinstance(value, list) or not value:
        return False
    rows = cast(list[Any], value)
    return all(isinstance(row, kind) and not isinstance(row, bool) for row in rows)


def _encoded(param: str, encode: Callable[[], T]) -> T:
    """What `encode` makes of a field's text, whose mistakes are that field's."""
    try:
        return encode()
    except DataError as error:
        raise RequestError(str(error), param=param) from error


def _infilled(param: str, model: ModelView, encode: Callable[[], T]) -> T:
    """The same of the texts around a gap, which not every model fills."""
    try:
        return _encoded(param, encode)
    except ModelError as error:
        raise RequestError(f"{model.name}: {error}", param="suffix", code="no_infilling") from error


def _checked(request: GenerationRequest, model: ModelView, param: str) -> GenerationRequest:
    """`request`, unless a prompt is empty or leaves no room for an answer."""
    for ids in request.prompts:
        if not ids:
            raise RequestError(f"{param} is empty; give some text", param=param)
        if len(ids) + 1 > model.context_tokens:
            # A text much too long is not read to its end.
            raise RequestError(
                f"the prompt has at least {len(ids)} tokens and this model's context holds "
                f"{model.context_tokens}, the answer included; shorten the prompt or serve with a "
                f"larger {argument('--ctx-size')}",
                param=param,
                code="context_length_exceeded",
                numbers={"n_prompt_tokens": len(ids), "n_ctx": model.context_tokens},
            )
    return request


def _refuse_unsupported(fields: Fields, rows: Mapping[str, str]) -> None:
    for name, instead in rows.items():
        value = fields.get(name)
        if value and value != 0 and not _harmless(name, value):
            fields.refuse_with(name, f"{name} is not supported; {instead}", "unsupported")


def _harmless(name: str, value: Any) -> bool:
    """Values that ask for what happens anyway."""
    return value in _HARMLESS.get(name, ())


_HARMLESS: dict[str, Sequence[Any]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
}
_CHAT_UNSUPPORTED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "this model writes text only",
    "audio": "this model writes text only",
    "prediction": "leave it out",
}
_COMPLETION_UNSUPPORTED = {
    "best_of": "use n",
}
_NATIVE_UNSUPPORTED = {
    "n_probs": "use /v1/completions with logprobs",
    "mirostat": "use temperature, top_k, top_p and min_p",
}
