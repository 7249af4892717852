"""Reads the raw prompts of a request: texts, token ids, and lists of pieces of both.

A raw prompt is the whole text for the model. As in llama-server and vLLM, control tokens may be
written in it, unless the request asks for plain characters.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvq.errors import DataError
from kvq.json_values import is_array
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Fields, is_token
from kvq_apps.serve.loading import ServedModel
from kvq_runtime.answer.healing import heal

T = TypeVar("T")
MOST_PROMPTS = 64


def prompts_of(fields: Fields, model: ServedModel) -> list[list[int]]:
    """Returns the ids of every prompt in `prompt`.

    A list with a token id is one prompt made of pieces; any other list is a list of prompts.
    """
    rows = _rows(fields)
    if len(rows) > MOST_PROMPTS:
        fields.refuse("prompt", f"at most {MOST_PROMPTS} prompts")
    special = reads_control_tokens(fields)
    start = fields.flag("add_special_tokens", True)
    return [_ids(fields, row, model, special=special, start=start) for row in rows]


def healed(
    fields: Fields, model: ServedModel, prompts: list[list[int]]
) -> tuple[tuple[tuple[int, ...], bytes], ...]:
    """Returns what `heal` makes of prompts that end in text, unless `x_kvq.heal` is false.

    The first call builds the tokenizer's index, here and not in the engine's thread.
    """
    if not fields.object("x_kvq").flag("heal", True):
        return ()
    pairs = [
        (ids, b"")
        if is_array(row) and row and not isinstance(row[-1], str)
        else heal(model.tokenizer, ids)
        for row, ids in zip(_rows(fields), prompts, strict=True)
    ]
    return tuple((tuple(ids), begin_with) for ids, begin_with in pairs)


def reads_control_tokens(fields: Fields) -> bool:
    """Says whether the request wants control tokens in a raw text read as such."""
    return fields.object("x_kvq").flag("parse_special", fields.flag("parse_special", True))


def encoded(param: str, encode: Callable[[], T]) -> T:
    """Returns what `encode` returns, and turns its errors into errors about the field `param`."""
    try:
        return encode()
    except DataError as error:
        raise RequestError(str(error), param=param) from error


def _rows(fields: Fields) -> list[Any]:
    """Returns `prompt` as a list of prompts."""
    prompt = fields.get("prompt")
    several = is_array(prompt) and bool(prompt) and not any(isinstance(row, int) for row in prompt)
    return cast(list[Any], prompt) if several else [prompt]


def _ids(
    fields: Fields, prompt: Any, model: ServedModel, *, special: bool, start: bool
) -> list[int]:
    """Returns the ids of one prompt: a text, token ids, or a list of pieces of both."""
    pieces = prompt if is_array(prompt) else [prompt]
    ids: list[int] = []
    for place, piece in enumerate(pieces):
        if isinstance(piece, str):
            first = start and place == 0
            ids += _text_ids(piece, model, special=special, start=first)
        elif is_array(prompt) and is_token(piece, model.vocab_size):
            ids.append(piece)
        else:
            possible = f"a string, token ids from 0 to {model.vocab_size - 1}, or a list of prompts"
            fields.refuse("prompt", possible)
    if not ids and prompt == "":
        # Something must stand before the first token, also where texts begin with none.
        tokenizer = model.tokenizer
        return list(tokenizer.eos_ids[-1:]) if tokenizer.bos_id is None else [tokenizer.bos_id]
    return ids


def _text_ids(text: str, model: ServedModel, *, special: bool, start: bool) -> list[int]:
    """Returns the ids of a text with the model's start tokens once, even if the text has them."""
    tokenizer, most = model.tokenizer, model.context_tokens
    ids = encoded("prompt", lambda: tokenizer.encode(text, special=special, most=most))
    beginning = [*tokenizer.control.start] if start else []
    return ids if ids[: len(beginning)] == beginning else [*beginning, *ids]
