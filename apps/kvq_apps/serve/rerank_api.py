"""Reranking in the form of llama-server and Jina: how well each document answers a query.

A reranker such as Qwen3-Reranker reads the query and one document and answers yes or no. The score
is the probability of yes among these two.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvq.errors import DataError
from kvq.json_values import is_array, is_object
from kvq_apps.serve.embeddings_api import MOST_INPUTS, prompts_request, usage
from kvq_apps.serve.errors import RequestError, too_long
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.requests import check_name
from kvq_apps.serve.wire import Json, VectorRequest
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.serving.outbox import Report

# The prompt of Qwen3-Reranker, as its card has it.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_ANSWERS = ("yes", "no")


def rerank(fields: Fields, served: ServedModel) -> VectorRequest:
    """Reads `POST /v1/rerank`."""
    check_name(fields.text("model", served.name), served)
    answers = _answer_tokens(served)
    query, instruction = fields.text("query"), fields.text("instruction", _INSTRUCTION)
    if not query:
        fields.refuse_with("query", "query is empty; give what the documents should answer")
    documents = _documents(fields)
    top = fields.whole("top_n", 1, 1 << 31, len(documents))
    repeats = fields.flag("return_documents")
    prompts: list[list[int]] = []
    for place, document in enumerate(documents):
        pair = _PAIR.format_map({"instruction": instruction, "query": query, "document": document})
        prompts.append(_prompt(served, pair))
        if len(prompts[-1]) > served.context_tokens:
            label = f"documents[{place}] with the query"
            count = len(prompts[-1])
            raise too_long(label, "documents", count, served.context_tokens, "cut the text")
    generation = replace(
        prompts_request(fields, served, prompts), reuse=True, pooled=False, compared=answers
    )

    def answer(rows: Sequence[NDArray[np.float32]], report: Report) -> Json:
        logits = (row.tolist() for row in rows)
        # The probability of yes among both.
        scores = [0.5 * (1 + float(np.tanh((yes - no) / 2))) for yes, no in logits]
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        results = [
            {"index": place, "relevance_score": scores[place]}
            | ({"document": {"text": documents[place]}} if repeats else {})
            for place in order[:top]
        ]
        return {
            "object": "list",
            "model": served.name,
            "results": results,
            "usage": usage(report),
        }

    return VectorRequest(generation=generation, answer=answer)


def _answer_tokens(served: ServedModel) -> tuple[int, ...]:
    """Returns the tokens of the two answers. Raises `RequestError` for other models."""
    tokenizer: Tokenizer = served.tokenizer
    missing = [word for word in (*_MARKS, *_ANSWERS) if tokenizer.token_id(word) is None]
    if missing:
        raise RequestError(
            f"{served.name} cannot rerank: its vocabulary has no token {missing[0]!r}, so it is no "
            "model like Qwen/Qwen3-Reranker-0.6B; serve such a model",
            status=501,
            code="unsupported",
        )
    return tuple(token for word in _ANSWERS if (token := tokenizer.token_id(word)) is not None)


def _documents(fields: Fields) -> list[str]:
    """Returns the texts of the documents, which are strings or objects with a `text`."""
    rows = fields.get("documents")
    texts = [row.get("text") if is_object(row) else row for row in rows] if is_array(rows) else []
    documents = [text for text in texts if isinstance(text, str)]
    if not 1 <= len(documents) <= MOST_INPUTS or len(documents) != len(texts):
        fields.refuse("documents", f"a list of 1 to {MOST_INPUTS} strings, or objects with a text")
    return documents


def _prompt(served: ServedModel, pair: str) -> list[int]:
    """Returns the tokens of the question about one document; control tokens in it are text."""
    encode = served.tokenizer.encode
    try:
        ids = encode(pair, most=served.context_tokens)
    except DataError as error:
        raise RequestError(str(error), param="documents") from error
    return [*encode(_BEFORE, special=True), *ids, *encode(_BEHIND, special=True)]
