"""Vectors of texts are those of transformers, and what cannot be asked is refused by name."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from embedders import MODULES, QUERY, make_embedder
from kvq.errors import BackendError, BundleError, KvqError, ModelError, UsageError
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.text_embedding import Pooling, TextEmbedding
from shelf import EIGHT, Shelf
from tiny import make_checkpoint

TEXTS = ["The quick brown fox", "two plus two is four, " * 8, "Größe 12 <|endoftext|> not the end"]
GREEDY = Sampling(temperature=0)
EXACT = {"kv": "fp", "chunk_tokens": 32}
MEAN = ExportOptions(quality=False, weights=WeightFormat(bits=8), embed="mean")


@pytest.fixture(scope="module")
def embedder(shelf: Shelf) -> Path:
    return shelf.once("embedder", "last", make_embedder)


@pytest.fixture(scope="module")
def bundle(shelf: Shelf, embedder: Path) -> Path:
    return shelf.exported(embedder, EIGHT)


def expected(folder: Path, ids: list[list[int]], pooling: Pooling) -> np.ndarray:
    """What transformers and sentence-transformers make of tokens: pooled, of length 1."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    rows: list[np.ndarray] = []
    for text in ids:
        with torch.no_grad():
            states = model(torch.tensor([text])).last_hidden_state[0].numpy()
        rows.append(states[-1] if pooling == "last" else states.mean(axis=0))
    return np.stack([row / np.linalg.norm(row) for row in rows])


def test_a_text_ends_as_its_tokenizer_says(embedder: Path, bundle: Path) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(embedder)
    with Engine.open(bundle, threads=1) as engine:
        tokenizer = engine.tokenizer
        assert (tokenizer.control.start, tokenizer.control.end) == ((), (0,))
        for text in TEXTS[:2]:
            assert [*tokenizer.encode(text), 0] == theirs(text).input_ids


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(
    pooling: Pooling, shelf: Shelf, embedder: Path, bundle: Path
) -> None:
    source, exported = embedder, bundle
    if pooling == "mean":
        make = lambda folder: make_embedder(folder, pooling="pooling_mode_mean_tokens")  # noqa: E731
        source = shelf.once("embedder", "mean", make)
        exported = shelf.exported(source, EIGHT)
    for backend in ("float", "onnx"):
        with Engine.open(exported, threads=1, backend=backend) as engine:
            ids = [[*engine.tokenizer.encode(text), 0] for text in TEXTS]
            vectors = engine.embed(TEXTS, session=EXACT)
        right = expected(source, ids, pooling)
        assert (vectors * right).sum(axis=1).min() > 0.999
        assert (vectors * np.roll(right, 1, axis=0)).sum(axis=1).max() < 0.9


def test_any_causal_model_makes_vectors_where_the_export_asks_for_it(shelf: Shelf) -> None:
    source = shelf.family("llama")
    with Engine.open(shelf.exported(source, MEAN), threads=1) as engine:
        ids = [engine.tokenizer.encode(text, start=True) for text in TEXTS]
        vectors = engine.embed(TEXTS, session=EXACT)
    assert ((vectors * expected(source, ids, "mean")).sum(axis=1) > 0.999).all()


def test_an_output_for_vectors_changes_no_answer(shelf: Shelf) -> None:
    source = shelf.family("llama")
    answers: list[str] = []
    for options in (EIGHT, MEAN):
        with Engine.open(shelf.exported(source, options), threads=1) as engine:
            answers.append(engine.complete("The quick", 12, sampling=GREEDY))
    assert answers[0] == answers[1]


def test_prompts_and_dimensions(bundle: Path) -> None:
    with Engine.open(bundle, threads=1) as engine:
        whole, query, same = (
            engine.embed([text], prompt_name=name, session=EXACT)[0]
            for text, name in ((TEXTS[0], None), (TEXTS[0], "query"), (QUERY + TEXTS[0], None))
        )
        short = engine.embed(TEXTS[:1], dimensions=8, session=EXACT)[0]
        assert engine.embed([]).shape == (0, 0)
    assert np.array_equal(query, same)
    assert not np.array_equal(query, whole)
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "there is no text to make a vector of"),
        ("a", {"dimensions": 129}, "129 is not possible: give 1 to 128"),
        ("a", {"prompt_name": "code"}, "this model's prompts are: query, document"),
        ("a" * 999, {"session": {"context_tokens": 64}}, "the context holds 64"),
    ],
)
def test_what_cannot_be_is_refused(
    text: str, options: dict[str, Any], message: str, bundle: Path
) -> None:
    with Engine.open(bundle, threads=1) as engine, pytest.raises(UsageError) as refused:
        engine.embed([text], **options)
    assert message in str(refused.value)


def test_a_model_without_the_output_says_how_to_get_it(shelf: Shelf) -> None:
    with (
        Engine.open(shelf.bundle(), threads=1) as engine,
        pytest.raises(BackendError, match=r"export the checkpoint again with embed=.mean"),
    ):
        engine.embed(["a"])


def test_a_graph_without_the_output_that_its_manifest_names_is_refused(
    shelf: Shelf, bundle: Path, tmp_path: Path
) -> None:
    plain = export_model(make_checkpoint("qwen3", tmp_path / "source"), tmp_path / "plain", EIGHT)
    folder = copytree(bundle, tmp_path / "bundle")
    manifest = json.loads((folder / "kvq.json").read_text())
    (folder / "model.onnx").write_bytes(plain.model_path.read_bytes())
    from kvq_runtime.bundle.file_hashes import file_sha256
    from kvq_runtime.bundle.manifest import checksum

    path = folder / "model.onnx"
    manifest["files"]["model.onnx"] = {
        "bytes": path.stat().st_size,
        "sha256": file_sha256(path),
    }
    manifest["checksum"] = checksum({k: v for k, v in manifest.items() if k != "checksum"})
    (folder / "kvq.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"does not compute the model that kvq\.json describes"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"pooling": "pooling_mode_cls_token"}, "asks for the pooling pooling_mode_cls_token"),
        ({"modules": (*MODULES, "models.Dense")}, "makes vectors by a module Dense"),
    ],
)
def test_other_ways_to_make_vectors_are_refused(
    form: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        export_model(make_embedder(tmp_path / "source", **form), tmp_path / "bundle", EIGHT)


def test_a_module_that_normalises_is_what_gives_vectors_length_1(tmp_path: Path) -> None:
    source = make_embedder(tmp_path / "source", modules=MODULES[:2])
    bundle = export_model(source, tmp_path / "bundle", EIGHT)
    assert bundle.manifest.embedding == TextEmbedding(
        pooling="last", normalized=False, prompts={"query": QUERY, "document": ""}
    )
    with Engine(bundle, threads=1) as engine:
        (vector,) = engine.embed(["a"])
    assert np.linalg.norm(vector) > 2


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(KvqError, match="choose last or mean"):
        ExportOptions(embed="max")  # type: ignore[arg-type]
