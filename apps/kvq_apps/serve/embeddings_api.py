"""OpenAI's embeddings: a vector for each text, from the model's hidden states."""

import base64
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError, DataError, UsageError
from kvq.json_values import is_array
from kvq_apps.serve.errors import RequestError, too_long
from kvq_apps.serve.fields import Fields, is_token
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.requests import check_name
from kvq_apps.serve.wire import Json, VectorRequest
from kvq_runtime import text_embedding
from kvq_runtime.config import Sampling
from kvq_runtime.serving.outbox import Report
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.scheduler import PRIORITIES
from kvq_runtime.text_embedding import TextEmbedding

# As many as OpenAI takes.
MOST_INPUTS = 2048
_ENCODINGS = ("float", "base64")


def embed(fields: Fields, served: ServedModel) -> VectorRequest:
    """Reads `POST /v1/embeddings`."""
    check_name(fields.text("model", served.name), served)
    embedding = embedding_of(served)
    encoding = fields.choice("encoding_format", _ENCODINGS, _ENCODINGS[0])
    dimensions = fields.whole("dimensions", 1, served.state_width, None)
    prompts = texts_of(fields, "input", served)

    def answer(rows: Sequence[NDArray[np.float32]], report: Report) -> Json:
        vectors = [embedding.vector(row, dimensions) for row in rows]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
                for index, vector in enumerate(vectors)
            ],
            "model": served.name,
            "usage": usage(report),
        }

    return VectorRequest(generation=prompts_request(fields, served, prompts), answer=answer)


def usage(report: Report) -> Json:
    """Returns what OpenAI's answers say about tokens, where none are written."""
    return {"prompt_tokens": report.prompt_tokens, "total_tokens": report.prompt_tokens}


def embedding_of(served: ServedModel) -> TextEmbedding:
    """Returns how the model makes vectors. Raises `RequestError` for one that makes none."""
    try:
        return text_embedding.embedding_of(served.name, served.embedding)
    except BackendError as error:
        raise RequestError(str(error), status=501, code="unsupported") from error


def prompts_request(
    fields: Fields, served: ServedModel, prompts: Sequence[Sequence[int]]
) -> GenerationRequest:
    """Returns the request for the pooled states of `prompts`."""
    priority = fields.object("x_kvq").choice("priority", PRIORITIES, "chat")
    return GenerationRequest(
        prompts=tuple(map(tuple, prompts)),
        sampling=Sampling(),
        seed=0,
        rank=PRIORITIES[priority],
        owner=served.owner,
        reuse=False,
        transient=True,
        draft=False,
        pooled=True,
    )


def texts_of(
    fields: Fields, name: str, served: ServedModel, *, cuts: bool = False
) -> list[list[int]]:
    """Returns the tokens of every text in the field `name`.

    It is a text or token ids, or a list of several. Ids are taken as they are; a text gets the
    prompt of its kind (`prompt_name`) and the tokens that the model expects around it. With `cuts`
    the end of a text that is too long is left out. Otherwise it is refused.
    """
    value = fields.get(name)
    several = is_array(value) and bool(value) and not any(isinstance(row, int) for row in value)
    rows = cast(list[Any], value) if several else [value]
    if len(rows) > MOST_INPUTS:
        fields.refuse(name, f"at most {MOST_INPUTS} texts")
    kind = fields.text("prompt_name") or None
    prompts: list[list[int]] = []
    for place, row in enumerate(rows):
        label = f"{name}[{place}]" if several else name
        ids = _ids(fields, name, label, row, served, kind)
        if len(ids) > served.context_tokens and not cuts:
            raise too_long(label, name, len(ids), served.context_tokens, "cut the text")
        end = served.tokenizer.control.end if len(ids) > served.context_tokens else ()
        prompts.append([*ids[: served.context_tokens - len(end)], *end])
    return prompts


def _ids(
    fields: Fields, name: str, label: str, row: Any, served: ServedModel, kind: str | None
) -> list[int]:
    """Returns the tokens of one text, or of token ids."""
    if isinstance(row, str):
        try:
            before = embedding_of(served).prompt(kind)
            if not row:
                raise UsageError(f"{label} is empty; give some text")
            return text_embedding.embedded_ids(
                served.tokenizer, before + row, served.context_tokens
            )
        except (UsageError, DataError) as error:
            raise RequestError(str(error), param=name) from error
    if is_array(row) and row and all(is_token(token, served.vocab_size) for token in row):
        return [*row]
    possible = f"a string, token ids from 0 to {served.vocab_size - 1}, or a list of these"
    if row == []:
        fields.refuse_with(name, f"{label} is empty; give {possible}")
    return fields.refuse(name, possible)


def _encoded(vector: NDArray[np.float32], encoding: str) -> list[float] | str:
    """Returns the numbers, or the base64 of their bytes, float32 with the lowest byte first."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
