"""Bundles and checkpoints that lie, with every hash right: refused before anything runs."""

from __future__ import annotations

import io
import json
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from kvq.errors import BundleError, CheckpointError, KvqError
from kvq_export.export import export_model
from kvq_models.registry import read_checkpoint
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.file_hashes import file_sha256
from kvq_runtime.bundle.manifest import FEEDBACK_FILE, MANIFEST_FILE, MODEL_FILE, checksum
from kvq_runtime.engine import Engine
from shelf import PLAIN
from tiny import make_llama_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    source = make_llama_checkpoint(folder / "source")
    return export_model(source, folder / "bundle", PLAIN).path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def sealed(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """Makes the manifest true to its files again, after a change of both."""
    data = json.loads((folder / MANIFEST_FILE).read_text())
    file = folder / MODEL_FILE
    data["files"][MODEL_FILE] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    change(data)
    data["checksum"] = checksum(data)
    (folder / MANIFEST_FILE).write_text(json.dumps(data))
    return folder


def layer(data: dict[str, Any]) -> dict[str, Any]:
    return data["config"]["layers"][0]


def respelled(manifest: dict[str, Any], old: str, new: str) -> None:
    """Names the format of some of the manifest's matrices otherwise."""
    formats = manifest["weights"]["formats"]
    manifest["weights"]["formats"] = {
        spelled.replace(old, new): names for spelled, names in formats.items()
    }


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "window 2^63": lambda d: layer(d).update(window_tokens=1 << 63),
    "window of text": lambda d: layer(d).update(window_tokens="8"),
    "window": lambda d: layer(d).update(window_tokens=8),
    "rope": lambda d: layer(d).update(rope=1),
    "rope of text": lambda d: d["config"]["ropes"][0].update(inv_freq=["x"] * 32),
    "rope that is not finite": lambda d: d["config"]["ropes"][0].update(inv_freq=[1e999] * 32),
    "a long rope of no context": lambda d: d["config"]["ropes"][0].update(
        long_inv_freq=d["config"]["ropes"][0]["inv_freq"], original_context="x"
    ),
    "NUL in a file name": lambda d: d["files"].update({"a\0b": d["files"][MODEL_FILE]}),
    "vocabulary of NaN": lambda d: d["config"].update(vocab_size=float("nan")),
    "vocabulary": lambda d: d["config"].update(vocab_size=d["config"]["vocab_size"] - 1),
    "hidden size": lambda d: d["config"].update(hidden_size=d["config"]["hidden_size"] * 2),
    "activation": lambda d: d["config"].update(activation="gelu_tanh"),
    "activation zz": lambda d: d["config"].update(activation="zz"),
    "eos -1": lambda d: d["config"].update(eos_token_ids=[-1]),
    "context 2^62": lambda d: d["config"].update(context_length=1 << 62),
    "infinite scale": lambda d: d["config"].update(attention_scale=float("inf")),
    "scale": lambda d: d["config"].update(attention_scale=0.5),
    "fewer layers": lambda d: d["config"].update(num_layers=1, layers=d["config"]["layers"][:1]),
    "block 0": lambda d: respelled(d, "4/64", "4/0"),
    "block": lambda d: respelled(d, "4/64", "4/128"),
    "bits 5": lambda d: respelled(d, "4/64", "5/64"),
    "bits 7": lambda d: respelled(d, "4/64", "7/64"),
    "grid": lambda d: respelled(d, "zero_point", "minimum"),
    "grid zz": lambda d: respelled(d, "zero_point", "zz"),
    "matrices": lambda d: d["weights"]["formats"]["4/64/zero_point"].pop(),
    "a matrix twice": lambda d: d["weights"]["formats"].update(
        {"5/64/zero_point": ["layers.0.qkv"]}
    ),
    "a matrix of no model": lambda d: d["weights"]["formats"]["4/64/zero_point"].append("layers.0"),
    "formats": lambda d: d["weights"].update(formats=["4/64/zero_point"]),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_not_its_graphs_is_refused(name: str, folder: Path) -> None:
    sealed(folder, MANIFESTS[name])
    with pytest.raises(BundleError):
        Bundle.open(folder)


@pytest.mark.parametrize("token", [-1, 1 << 32])
@pytest.mark.parametrize("name", ["bos", "eos", "start", "fim.suffix", "fim.pad"])
def test_an_id_no_tokenizer_has_is_named(name: str, token: int, folder: Path) -> None:
    first, _, last = name.partition(".")
    fim = {"prefix": 1, "suffix": 2, "middle": 3} | ({last: token} if last else {})
    tokens = {"bos": 1, "eos": [1], "start": [], "fim": fim}
    if not last:
        tokens[first] = token if first == "bos" else [1, token]
    sealed(folder, lambda d: d.update(tokens=tokens))
    with pytest.raises(BundleError, match=re.escape(f"tokens.{name} is {token}; ids are 0 to")):
        Bundle.open(folder)


def changed_graph(folder: Path, change: Callable[[ir.Graph], object]) -> Path:
    model = ir.load(folder / MODEL_FILE)
    change(model.graph)
    ir.save(model, folder / MODEL_FILE)
    return sealed(folder)


def attention(graph: ir.Graph) -> ir.Node:
    return next(node for node in graph if node.op_type == "Attention")


def down(graph: ir.Graph) -> ir.Node:
    return next(node for node in graph if node.name == "/model/layers.0/mlp/down/Linear")


def set_attribute(name: str, value: Any) -> Callable[[ir.Graph], object]:
    return lambda graph: attention(graph).attributes.add(
        ir.AttrFloat32(name, value) if isinstance(value, float) else ir.AttrInt64(name, value)
    )


def narrow_logits(graph: ir.Graph) -> None:
    graph.outputs[0].shape = ir.Shape(["R", 5])


GRAPHS: dict[str, Callable[[ir.Graph], object]] = {
    "heads 2^32 + 4": set_attribute("num_heads", (1 << 32) + 4),
    "layer": set_attribute("layer", 1),
    "scale": set_attribute("scale", 3.0),
    "window": set_attribute("window_tokens", 64),
    "a window of -1": set_attribute("window_tokens", -1),
    "no scale": lambda graph: attention(graph).attributes.pop("scale"),
    "logits": narrow_logits,
    "a product without its activation": lambda graph: down(graph).attributes.add(
        ir.AttrInt64("activation", 0)
    ),
    "a product of another layer": lambda graph: down(graph).attributes.add(
        ir.AttrInt64("layer", 1)
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_is_not_its_manifests_is_refused(name: str, folder: Path) -> None:
    changed_graph(folder, GRAPHS[name])
    with pytest.raises(BundleError, match="does not compute the model"):
        Bundle.open(folder)


def test_an_unchanged_graph_opens(folder: Path) -> None:
    assert Bundle.open(changed_graph(folder, lambda _: None)).has_onnx


def test_flipped_graphs_never_raise_anything_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (folder / MODEL_FILE).read_bytes()
    chance = np.random.default_rng(0)
    for _ in range(60):
        raw = bytearray(content)
        for place in chance.integers(0, len(raw), 3):
            raw[place] = chance.integers(0, 256)
        (folder / MODEL_FILE).write_bytes(raw)
        sealed(folder)
        with (
            suppress(KvqError),
            Engine.open(folder, threads=1) as engine,
            engine.session() as session,
        ):
            session.prefill([1, 2, 3])
    assert capsys.readouterr().out == ""


def test_a_cut_graph_is_refused(folder: Path) -> None:
    content = (folder / MODEL_FILE).read_bytes()
    for size in range(0, len(content) - 1, 97):
        (folder / MODEL_FILE).write_bytes(content[:size])
        sealed(folder)
        with pytest.raises(BundleError):
            Bundle.open(folder)


def _fitted(folder: Path, content: bytes) -> Bundle:
    """Returns the bundle with these bytes as the file of how its keys are rounded."""
    file = folder / FEEDBACK_FILE
    file.write_bytes(content)
    row = {"bytes": len(content), "sha256": file_sha256(file)}
    return Bundle.open(sealed(folder, lambda data: data["files"].update({FEEDBACK_FILE: row})))


@pytest.fixture
def feedback(folder: Path) -> np.ndarray:
    """Returns feedback that changes no key."""
    (group,) = Bundle.open(folder).config.cache_classes
    shape = group.shape
    return np.zeros((shape.num_layers, shape.num_kv_heads, *(shape.head_dim,) * 2), np.float16)


def _saved(feedback: np.ndarray, **other: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=True, **({"0": feedback} | other))
    return stream.getvalue()


def test_a_file_of_what_was_fitted_is_read(folder: Path, feedback: np.ndarray) -> None:
    (actual,) = _fitted(folder, _saved(feedback)).key_feedback
    np.testing.assert_array_equal(actual, feedback)
    for wrong in (
        feedback.astype(np.float32),
        feedback[..., 0],
        np.full_like(feedback, np.nan),
        np.ones_like(feedback),
        np.array([print], object),
    ):
        with pytest.raises(BundleError, match="does not hold what was fitted"):
            _ = _fitted(folder, _saved(wrong)).key_feedback


def test_altered_files_of_what_was_fitted_never_raise_anything_else(
    folder: Path, feedback: np.ndarray
) -> None:
    content, chance, refused = _saved(feedback), np.random.default_rng(0), 0
    # The header of the array, and the archive's table at the end.
    places = [*range(200), *range(content.rindex(b"PK\1\2"), len(content))]
    for index in range(200):
        altered = bytearray(content)
        for place in chance.choice(places, chance.integers(1, 4)):
            altered[place] = chance.integers(0, 256)
        bundle = _fitted(folder, bytes(altered[: None if index % 4 else chance.integers(1, 999)]))
        try:
            _ = bundle.key_feedback
        except BundleError:
            refused += 1
    assert refused > 100


def test_a_thousand_million_layers_take_no_memory(tmp_path: Path) -> None:
    folder = make_llama_checkpoint(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 10**9}
    path.write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="num_hidden_layers = 1000000000"):
        read_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
