"""Experts of gpt-oss in MXFP4: decoded as transformers does, and kept as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq.reference.linear import BlockFormat, Grid
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit.quality import Original
from kvq_export.read.source import open_source
from kvq_models.registry import read_checkpoint
from kvq_runtime.bundle.manifest import GGUF_FILE
from kvq_runtime.engine import Engine
from logits import divergence, prompt
from shelf import Shelf
from tiny import checkpoint_weights, read_safetensors, write_safetensors

NAMES = ("packed", "floats")
STACKS = ("gate_up_proj", "down_proj")
Tensors = dict[str, np.ndarray]


def pack(folder: Path, change: Callable[[Tensors], None] = lambda tensors: None) -> Tensors:
    """Gives a checkpoint random experts in MXFP4; returns what transformers decodes of them."""
    file, random = folder / "model.safetensors", np.random.default_rng(1)
    tensors, decoded = read_safetensors(file), Tensors()
    for name in [name for name in tensors if name.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = random.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
        scales = random.integers(120, 126, (experts, rows, columns // 32)).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
        decoded[name] = whole.numpy()
    change(tensors)
    write_safetensors(file, tensors)
    path = folder / "config.json"
    said = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return decoded


def plain(folder: Path, decoded: Tensors) -> None:
    """Gives a checkpoint these experts as floats."""
    file = folder / "model.safetensors"
    write_safetensors(file, read_safetensors(file) | decoded)


@pytest.fixture(scope="module")
def both(shelf: Shelf) -> tuple[Path, Path]:
    """Makes a checkpoint of such experts, and one of the same experts as floats."""

    def make(folder: Path) -> None:
        packed, floats = (Path(copytree(shelf.family("gpt-oss"), folder / name)) for name in NAMES)
        plain(floats, pack(packed))

    folder = shelf.once("mxfp4", "", make)
    return folder / NAMES[0], folder / NAMES[1]


def test_a_bundle_keeps_every_weight_of_experts(both: tuple[Path, Path], tmp_path: Path) -> None:
    folder, floats = both
    expected = checkpoint_weights(floats)
    bundle = export_model(folder, tmp_path / "bundle", ExportOptions(quality=False))
    assert bundle.manifest.weights is not None
    stacks = {
        name: form for name, form in bundle.manifest.weights.formats.items() if "experts" in name
    }
    exact = BlockFormat(bits=4, block=32, grid=Grid.E2M1)
    assert stacks == dict.fromkeys(stacks, exact)
    assert len(stacks) == 2 * bundle.config.num_layers
    for name in stacks:
        np.testing.assert_array_equal(bundle.read_weight(name), expected(name))
        assert len(np.unique(np.abs(expected(name)))) > 8
    # And products with them are those of the reference, but for inputs that are rounded.
    logits = []
    for backend in ("onnx", "float"):
        opened = Engine.open(bundle.path, threads=1, backend=backend)
        with opened as engine, engine.session(kv="fp") as session:
            logits.append(np.concatenate(list(session.logits(prompt(40)))))
    assert divergence(*logits) < 0.05
    assert divergence(logits[0], np.roll(logits[1], 1, axis=0)) > 0.5
    types = bundle.manifest.source["types"]
    assert types["mxfp4"]["kept"] == types["mxfp4"]["tensors"] == 3 * 8 * bundle.config.num_layers


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_a_gguf_file_keeps_every_weight_of_experts(
    both: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    """Keeps them whatever type was asked for, and back; so does llama.cpp's own quantiser."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from exported_gguf import export, tensors
    from kvq_export.gguf.gguf_writer import file_logits, llama_missing

    if kind == "q4_k_m" and llama_missing() is not None:
        pytest.skip(str(llama_missing()))
    folder, expected = Path(copytree(both[0], tmp_path / "packed")), checkpoint_weights(both[1])
    bundle = export(folder, kind)
    types = {tensor.name: tensor.tensor_type.name for tensor in tensors(bundle)}
    stacks = [name for name in types if name.endswith("exps.weight")]
    assert len(stacks) == 3 * bundle.config.num_layers
    assert {types[name] for name in stacks} == {"MXFP4"}
    assert types["blk.0.ffn_down_exps.bias"] == "F32"
    file = bundle.path / GGUF_FILE
    source = open_source(file)
    family, config, said = source.config()
    checkpoint, sources = source.checkpoint(config), source.weight_sources(family, config)
    again = export_model(file, tmp_path / "again", ExportOptions(quality=False, calibrate=False))
    assert again.manifest.weights is not None
    for layer in range(config.num_layers):
        for name in (f"layers.{layer}.experts_gate_up", f"layers.{layer}.experts_down"):
            np.testing.assert_array_equal(checkpoint.read(sources[name]), expected(name))
            assert str(again.manifest.weights.format_of(name)) == "4/32/e2m1"
            np.testing.assert_array_equal(again.read_weight(name), expected(name))
    assert again.manifest.source["types"]["MXFP4"]["kept"] == 3 * config.num_layers * 8
    if llama_missing() is not None:
        return
    # llama.cpp's ramp is one of whole pairs; a rounded input may go to another expert.
    ramp = {"rope_scaling": said["rope_scaling"] | {"truncate": True}}
    config, ids = family.config(said | ramp), np.array(prompt(40))
    logits = file_logits(file, ids, 1)
    ours = Original(config=config, sources=sources, checkpoint=checkpoint).logits(ids)
    assert divergence(ours, logits) < 0.1
    assert divergence(ours, np.roll(logits, 1, axis=0)) > 0.5


def test_rows_are_read_alike_in_any_chunks(both: tuple[Path, Path]) -> None:
    expected = checkpoint_weights(both[1])
    for path in both:
        source = open_source(path)
        family, config, _ = source.config()
        checkpoint, sources = source.checkpoint(config), family.weights(config)
        for name in ("layers.1.experts_gate_up", "layers.0.experts_down"):
            for most, rows in ((1 << 20, None), (700, None), (900, range(100, 290))):
                chunks = list(checkpoint.chunks(sources[name], most, rows))
                expected_rows = (
                    expected(name) if rows is None else expected(name)[rows.start : rows.stop]
                )
                np.testing.assert_array_equal(np.concatenate(chunks), expected_rows)
            some = np.array([3, 97, 98, 200])
            actual = checkpoint.read_rows(sources[name], some)
            np.testing.assert_array_equal(actual, expected(name)[some])


def test_other_widths_are_rounded_from_what_is_there(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, expected = both[0], checkpoint_weights(both[1])
    options = ExportOptions(weights=WeightFormat(bits=4), quality=False, calibrate=False)
    bundle = export_model(folder, tmp_path / "bundle", options)
    actual, original = (read("layers.0.experts_down") for read in (bundle.read_weight, expected))
    assert 0.001 < np.abs(actual - original).mean() / np.abs(original).mean() < 0.2


def without_scales(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def narrow_scales(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    tensors[name] = tensors[name][..., :-1]


def no_numbers(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 5, 1] = 255


def fewer_rows(tensors: Tensors) -> None:
    for end in ("blocks", "scales"):
        name = f"model.layers.0.mlp.experts.gate_up_proj_{end}"
        tensors[name] = tensors[name][:, :-2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_scales, "down_proj_scales' is missing, without which blocks of MXFP4"),
        (narrow_scales, "make no matrix of MXFP4"),
        (no_numbers, "NaN or infinite weights"),
        (fewer_rows, r"wrong shape.*asks for 192 rows"),
    ],
)
def test_what_is_damaged_is_refused(
    change: Callable[[Tensors], None], says: str, shelf: Shelf, tmp_path: Path
) -> None:
    folder = Path(copytree(shelf.family("gpt-oss"), tmp_path / "packed"))
    pack(folder, lambda tensors: (make_writable(tensors), change(tensors))[1])
    with pytest.raises(CheckpointError, match=says):
        export_model(folder, tmp_path / "bundle", ExportOptions(quality=False, calibrate=False))
    assert not (tmp_path / "bundle").exists()


def make_writable(tensors: Tensors) -> None:
    tensors |= {name: tensor.copy() for name, tensor in tensors.items()}


def test_experts_with_biases_are_calibrated(shelf: Shelf, tmp_path: Path) -> None:
    """Rounds experts of floats while a text is read through them; biases are no matrices."""
    source = shelf.family("gpt-oss", max_position_embeddings=1024)
    options = ExportOptions(weights=WeightFormat(bits=4), quality=False)
    bundle = export_model(source, tmp_path / "bundle", options)
    plain = export_model(source, tmp_path / "plain", replace(options, calibrate=False))
    expected, name = checkpoint_weights(source), "layers.0.experts_gate_up"
    assert bundle.forms
    errors = [
        float(np.square(candidate.read_weight(name) - expected(name)).mean())
        for candidate in (bundle, plain)
    ]
    assert 0 < errors[1] < errors[0] < 9 * errors[1]
    bias = bundle.read_weight(f"{name}_bias")
    np.testing.assert_allclose(bias, expected(f"{name}_bias"), atol=1e-3)


def test_another_gate_is_refused(shelf: Shelf) -> None:
    folder = shelf.family("gpt-oss", swiglu_limit=5.0)
    with pytest.raises(UnsupportedModelError, match=r"swiglu_limit = 5\.0 is not supported"):
        read_checkpoint(folder)
