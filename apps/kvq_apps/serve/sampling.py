"""Reads the sampling fields of a request, by the names of OpenAI and of other servers.

It also refuses fields that ask for what is not possible here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from kvq.errors import DataError
from kvq.json_values import is_array, is_object
from kvq_apps.serve.fields import Fields, is_token
from kvq_apps.serve.loading import ServedModel
from kvq_runtime.config import Sampling

_DECIMAL = re.compile("[0-9]+")
# Ids have fewer digits.
_MOST_DIGITS = 12
_LARGEST_BIAS = 1e6
# So small that only the likeliest token is left.
_LEAST_TOP_P = 1e-9
_MOST_MIN_P = 0.999
_MOST_BIASED, _MOST_SAMPLERS = 1 << 16, 64
# llama-server's samplers, and the values that switch off those that are not in a list of them.
_SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"top_k": {"top_k": 0}, "top_p": {"top_p": 1.0}, "min_p": {"min_p": 0.0}},
    "temperature": {"temperature": 1.0},
}
# Samplers that do nothing here, since the fields that switch them on are refused.
_IDLE_SAMPLERS = ("dry", "typ_p", "typical_p", "xtc", "top_n_sigma", "adaptive_p")
_INFILL_SAMPLER = "infill"
_SAMPLING = "use temperature, top_k, top_p and min_p"
_REPEATS = "use repeat_penalty, presence_penalty and frequency_penalty"
_NO_PICTURES = "this model reads and writes text only"
# Fields of other servers that ask for what this server cannot do: for each the values that ask for
# nothing, beside empty ones, and what is possible instead. What is not here and not read by
# anything has no effect, and the answer names it in `x_kvq.ignored`.
UNSUPPORTED: Mapping[str, tuple[Sequence[Any], str]] = {
    "mirostat": ((), _SAMPLING),
    "typical_p": ((1,), _SAMPLING),
    "tfs_z": ((1,), _SAMPLING),
    "top_n_sigma": ((-1,), _SAMPLING),
    "adaptive_target": ((-1,), _SAMPLING),
    "dynatemp_range": ((), _SAMPLING),
    "xtc_probability": ((), _SAMPLING),
    "min_keep": ((1,), _SAMPLING),
    "dry_multiplier": ((), _REPEATS),
    "min_tokens": ((), "use ignore_eos with max_tokens, or n_predict"),
    "post_sampling_probs": ((), "n_probs tells probabilities before sampling"),
    "lora": ((), "export a model with the adapter merged into it"),
    "n_cache_reuse": ((), "/infill keeps what stands behind a change"),
    "return_progress": ((), "comments in a stream say how much of the prompt is read"),
    "modalities": ((["text"],), _NO_PICTURES),
    "audio": ((), _NO_PICTURES),
    "images": ((), _NO_PICTURES),
    "template": ((), "the model's own chat template holds; with raw the prompt is the whole text"),
    "context": ((), "send the conversation as messages"),
}


def sampling_of(fields: Fields, model: ServedModel) -> Sampling:
    """Returns how tokens are sampled; fields that the request does not have are the model's."""
    default = model.sampling
    penalty = fields.number("repetition_penalty", 0.01, 100, default.repeat_penalty)
    window = fields.whole("repeat_last_n", -1, 1 << 20, default.repeat_window_tokens)
    sampling = replace(
        default,
        temperature=fields.number("temperature", 0, 100, default.temperature),
        top_k=max(0, fields.whole("top_k", -1, 1 << 31, default.top_k)),
        top_p=max(_LEAST_TOP_P, fields.number("top_p", 0, 1, default.top_p)),
        min_p=min(_MOST_MIN_P, fields.number("min_p", 0, 1, default.min_p)),
        repeat_penalty=fields.number("repeat_penalty", 0.01, 100, penalty),
        repeat_window_tokens=model.context_tokens if window < 0 else window,
        presence_penalty=fields.number("presence_penalty", -2, 2, default.presence_penalty),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, default.frequency_penalty),
        logit_bias=_logit_bias(fields, model),
    )
    return replace(sampling, **_by_samplers(fields, model))


def refuse_unsupported(fields: Fields) -> None:
    """Raises a `RequestError` for a field that asks for what is not possible here."""
    for name, (harmless, advice) in UNSUPPORTED.items():
        value = fields.get(name)
        if value and value not in harmless:
            fields.refuse_with(name, f"{name} is not supported; {advice}", "unsupported")


def _by_samplers(fields: Fields, model: ServedModel) -> Mapping[str, Any]:
    """Returns what switches off the samplers that a list of `samplers` leaves out.

    The order of the list has no effect. `infill` is off where there is no list.
    """
    names = fields.texts("samplers", _MOST_SAMPLERS)
    known = (*_SAMPLERS, *_IDLE_SAMPLERS, _INFILL_SAMPLER)
    if not {*names} <= {*known}:
        fields.refuse_with("samplers", f"samplers may have these names: {', '.join(known)}")
    if not names:
        return {}
    absent = (values for name, values in _SAMPLERS.items() if name not in names)
    chosen: dict[str, Any] = {name: value for values in absent for name, value in values.items()}
    if _INFILL_SAMPLER in names and not fields.flag("ignore_eos"):
        tokenizer = model.tokenizer
        control = tokenizer.fim.ids() if tokenizer.fim else ()
        chosen["infill_ends"] = tuple(dict.fromkeys((*tokenizer.eos_ids, *control)))
    return chosen


def _logit_bias(fields: Fields, model: ServedModel) -> Mapping[int, float]:
    """Returns what is added to the logits of tokens; `ignore_eos` forbids tokens that end."""
    ends = model.tokenizer.eos_ids if fields.flag("ignore_eos") else ()
    bias = dict.fromkeys(ends, -inf)
    for place, (token, value) in enumerate(_bias_rows(fields)):
        row = Fields({"bias": value}, f"logit_bias[{place}].")
        # false forbids the token.
        added = -inf if value is False else row.number("bias", -_LARGEST_BIAS, _LARGEST_BIAS, 0.0)
        bias |= dict.fromkeys(_token_ids(fields, token, model), added)
        if len(bias) > _MOST_BIASED:
            fields.refuse("logit_bias", f"at most {_MOST_BIASED} tokens")
    return bias


def _bias_rows(fields: Fields) -> Iterable[tuple[Any, Any]]:
    """Returns tokens, by id or text, with their values, from an object or a list of pairs."""
    rows = fields.get("logit_bias")
    if is_object(rows):
        return ((_bias_key(key), rows[key]) for key in rows)
    if rows is not None and not (
        is_array(rows) and all(is_array(row) and len(row) == 2 for row in rows)
    ):
        fields.refuse(
            "logit_bias", "an object from tokens to numbers, or a list of [token, number]"
        )
    return ((row[0], row[1]) for row in rows or ())


def _bias_key(key: str) -> int | str:
    """Returns the id that a key writes, -1 if it is too long; other keys are texts."""
    if not _DECIMAL.fullmatch(key):
        return key
    return int(key) if len(key) <= _MOST_DIGITS else -1


def _token_ids(fields: Fields, token: Any, model: ServedModel) -> list[int]:
    """Returns the id that names a token, or the ids of all tokens of a text."""
    if is_token(token, model.vocab_size):
        return [token]
    if not isinstance(token, str):
        possible = f"its id, 0 to {model.vocab_size - 1}, or its text"
        fields.refuse_with("logit_bias", f"logit_bias names a token by {possible}")
    try:
        return model.tokenizer.encode(token, special=True)
    except DataError as error:
        fields.refuse_with("logit_bias", str(error))
