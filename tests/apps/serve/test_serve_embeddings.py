"""Embeddings and reranking over HTTP, through the official clients and by value."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from embedders import QUERY, make_embedder, make_reranker
from kvq_apps.serve.server import Server
from kvq_runtime.engine import Engine
from serving import GREEDY, ask, client, loaded, running
from shelf import EIGHT, Shelf
from tiny import transformers_logits

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TEXTS = ["The quick brown fox", "a page of keys", "one, two, three"]
CONTEXT = 128


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> Path:
    return shelf.exported(shelf.once("embedder", "last", make_embedder), EIGHT)


@pytest.fixture(scope="module")
def vectors(bundle: Path) -> np.ndarray:
    with Engine.open(bundle, threads=1) as engine:
        return engine.embed(TEXTS, session={"kv": "fp", "chunk_tokens": 16})


@pytest.fixture(scope="module")
def embeds(bundle: Path) -> Iterator[Server]:
    with running(loaded(str(bundle), kv="fp", context_tokens=CONTEXT), sessions=2) as server:
        yield server


@pytest.fixture(scope="module")
def source(shelf: Shelf) -> Path:
    return shelf.once("reranker", "qwen3", make_reranker)


@pytest.fixture(scope="module")
def reranks(shelf: Shelf, source: Path) -> Iterator[Server]:
    bundle = shelf.exported(source, EIGHT)
    with running(loaded(str(bundle), kv="fp", context_tokens=768), sessions=1) as server:
        yield server


# OpenAI's form


def test_the_official_client_embeds(embeds: Server, vectors: np.ndarray) -> None:
    """The client asks for base64 by itself, and for lists where it is told to."""
    with client(embeds) as sdk:
        usual = sdk.embeddings.create(model="bundle", input=TEXTS)
        listed = sdk.embeddings.create(model="bundle", input=TEXTS[0], encoding_format="float")
        short = sdk.embeddings.create(model="bundle", input=TEXTS[0], dimensions=16)
    assert [row.index for row in usual.data] == [0, 1, 2]
    assert usual.model == "bundle"
    np.testing.assert_allclose([row.embedding for row in usual.data], vectors, atol=1e-5)
    np.testing.assert_allclose(listed.data[0].embedding, vectors[0], atol=1e-5)
    cut = vectors[0][:16] / np.linalg.norm(vectors[0][:16])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-5)
    assert usual.usage.prompt_tokens == usual.usage.total_tokens > listed.usage.prompt_tokens > 1


def test_base64_is_float32_with_the_lowest_byte_first(embeds: Server, vectors: np.ndarray) -> None:
    body = {"input": TEXTS[:1], "encoding_format": "base64", "user": "me", "truncation": 3}
    answer = ask(embeds, EMBEDDINGS, body).json
    decoded = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, vectors[0], atol=1e-5)
    assert answer["object"] == "list"
    assert answer["x_kvq"] == {"ignored": ["truncation"]}


def embedded(server: Server, value: Any, **fields: Any) -> np.ndarray:
    rows = ask(server, EMBEDDINGS, {"input": value, **fields}).json["data"]
    return np.array([row["embedding"] for row in rows])


def test_ids_are_read_as_they_are(embeds: Server, bundle: Path, vectors: np.ndarray) -> None:
    with Engine.open(bundle, threads=1) as engine:
        ids = [[*engine.tokenizer.encode(text), 0] for text in TEXTS]
    np.testing.assert_allclose(embedded(embeds, ids), vectors, atol=1e-5)
    np.testing.assert_allclose(embedded(embeds, ids[1])[0], vectors[1], atol=1e-5)
    assert np.abs(embedded(embeds, ids[1][:-1])[0] - vectors[1]).max() > 0.01


def test_a_prompt_stands_before_a_text_of_its_kind(embeds: Server) -> None:
    query = embedded(embeds, "fox", prompt_name="query")
    assert np.array_equal(query, embedded(embeds, QUERY + "fox"))
    assert not np.array_equal(query, embedded(embeds, "fox"))


def test_a_chat_between_two_requests_changes_no_vector(embeds: Server) -> None:
    before = embedded(embeds, TEXTS)
    ask(embeds, "/v1/completions", {"prompt": TEXTS[0], "max_tokens": 8, **GREEDY})
    assert np.array_equal(embedded(embeds, TEXTS), before)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input is missing; give a string, token ids from 0 to 383"),
        ({"input": ""}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"input": ["a", ""]}, "input[1] is empty"),
        ({"input": [[1], []]}, "input[1] is empty"),
        ({"input": [1, 384]}, "token ids from 0 to 383"),
        ({"input": ["a", "word " * 999]}, f"this model's context holds {CONTEXT}; cut the text"),
        ({"input": "a", "dimensions": 129}, "dimensions is 129; give a whole number from 1 to 128"),
        ({"input": "a", "encoding_format": "int8"}, "give one of float, base64"),
        ({"input": "a", "prompt_name": "code"}, "this model's prompts are: query, document"),
        ({"input": "a\ud800"}, "not valid Unicode"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(body: Any, message: str, embeds: Server) -> None:
    reply = ask(embeds, EMBEDDINGS, body)
    assert reply.status == 400
    assert message in reply.json["error"]["message"]


def test_a_model_without_vectors_says_so(reranks: Server, embeds: Server) -> None:
    with client(reranks) as sdk, pytest.raises(openai.APIStatusError) as refused:
        sdk.embeddings.create(model="bundle", input="a")
    assert refused.value.status_code == 501
    assert "bundle gives no vectors of texts" in refused.value.message
    reply = ask(embeds, RERANK, {"query": "a", "documents": ["b"]})
    assert (reply.status, reply.json["error"]["code"]) == (501, "unsupported")
    assert "cannot rerank: its vocabulary has no token '<think>'" in reply.json["error"]["message"]


# Ollama's form


def test_ollama_embeds(embeds: Server, vectors: np.ndarray) -> None:
    several = ask(embeds, "/api/embed", {"model": "bundle", "input": TEXTS}).json
    np.testing.assert_allclose(several["embeddings"], vectors, atol=1e-5)
    assert several["model"] == "bundle"
    assert several["prompt_eval_count"] > len(TEXTS)
    assert several["total_duration"] > several["load_duration"] >= 0
    older = ask(embeds, "/api/embeddings", {"prompt": TEXTS[0]}).json
    np.testing.assert_allclose(older["embedding"], vectors[0], atol=1e-5)
    assert "embedding" in ask(embeds, "/api/show", {"model": "bundle"}).json["capabilities"]
    assert ask(embeds, "/api/embed", {"input": []}).json == {"model": "bundle", "embeddings": []}
    short = ask(embeds, "/api/embed", {"input": TEXTS[0], "dimensions": 4}).json["embeddings"]
    assert len(short[0]) == 4
    refused = ask(embeds, "/api/embed", {"input": "word " * 999, "truncate": False})
    assert f"context holds {CONTEXT}" in refused.json["error"]


def test_ollama_cuts_a_text_that_is_too_long_before_its_end_token(
    embeds: Server, bundle: Path
) -> None:
    with Engine.open(bundle, threads=1) as engine:
        ids = engine.tokenizer.encode("word " * 999)
    cut = embedded(embeds, [*ids[: CONTEXT - 1], 0])[0]
    answer = ask(embeds, "/api/embed", {"input": "word " * 999}).json
    assert np.array_equal(answer["embeddings"][0], cut)
    assert answer["prompt_eval_count"] == CONTEXT


# Reranking


DOCUMENTS = ["A fox is quick.", "def add(first, second)", "Pages keep bits.", "12345"]


def probabilities(server: Server, source: Path, query: str) -> list[float]:
    """P(yes) of yes and no after the prompt of Qwen3-Reranker's card, by transformers."""
    scores: list[float] = []
    for document in DOCUMENTS:
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant "
            f"passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = ask(server, "/tokenize", {"content": text}).json["tokens"]
        yes, no = (
            ask(server, "/tokenize", {"content": word}).json["tokens"] for word in ("yes", "no")
        )
        logits = transformers_logits(source, np.array(ids))[-1]
        difference = float(logits[no[0]] - logits[yes[0]])
        scores.append(1 / (1 + np.exp(difference)))
    return scores


@pytest.mark.parametrize("path", [RERANK, "/reranking"])
def test_documents_come_in_the_order_of_their_scores(
    path: str, reranks: Server, source: Path
) -> None:
    expected = probabilities(reranks, source, "what is quick?")
    body = {"model": "bundle", "query": "what is quick?", "documents": DOCUMENTS}
    answer = ask(reranks, path, body).json
    results = answer["results"]
    scores = [row["relevance_score"] for row in results]
    assert scores == sorted(scores, reverse=True)
    assert max(scores) - min(scores) > 0.02
    assert sorted(row["index"] for row in results) == [0, 1, 2, 3]
    for row in results:
        assert row["relevance_score"] == pytest.approx(expected[row["index"]], abs=0.03)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 400
    assert answer["model"] == "bundle"


def test_the_first_and_their_texts(reranks: Server) -> None:
    body = {"query": "what?", "documents": DOCUMENTS}
    whole = ask(reranks, RERANK, body).json["results"]
    rows = [{"text": text} for text in DOCUMENTS]
    more = {"documents": rows, "top_n": 2, "return_documents": True}
    first = ask(reranks, RERANK, body | more).json["results"]
    assert [row["index"] for row in first] == [row["index"] for row in whole[:2]]
    assert [row["document"]["text"] for row in first] == [DOCUMENTS[row["index"]] for row in first]
    other = ask(reranks, RERANK, body | {"instruction": "Find code"}).json["results"]
    assert {row["relevance_score"] for row in other} != {row["relevance_score"] for row in whole}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": "", "documents": ["a"]}, "query is empty"),
        ({"query": "a", "documents": []}, "documents is a list of 0; give a list of 1 to"),
        ({"query": "a", "documents": ["a", 3]}, "documents is a list of 2; give a list of 1 to"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n is 0"),
        (
            {"query": "a", "documents": ["a", "b " * 999]},
            "documents[1] with the query has",
        ),
    ],
)
def test_a_wrong_question_is_refused_by_name(body: Any, message: str, reranks: Server) -> None:
    reply = ask(reranks, RERANK, body)
    assert reply.status == 400
    assert message in reply.json["error"]["message"]
