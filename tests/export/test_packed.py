"""Checkpoints that GPTQ, AWQ and compressed-tensors wrote: codes pass bit for bit.

Where they cannot, the export says why. The packers here are plain loops, written from the
definitions of the layouts and not from the reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tiny
from draft_heads import HEAD, make_drafting
from kvq.errors import CheckpointError, ModelError, UnsupportedModelError
from kvq.reference.linear import dequantize
from kvq_apps.cli import main
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit.quality import Original
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.read.packed import PackedMatrix, unpack
from kvq_export.read.source import open_source
from kvq_models.family import WeightSource
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.engine import Engine
from logits import divergence, prompt

Tensors = dict[str, np.ndarray]
WEIGHTS = "model.safetensors"
STEM = "model.layers.0.mlp.down_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
METHODS = ("gptq", "gptq_v2", "awq", "compressed-tensors")


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """Holds codes [out, in], scales and zero points [out, groups], each column's group [in]."""

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    def weight(self) -> np.ndarray:
        levels = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return levels * self.scales.astype(np.float32)[:, self.groups]


def quantise(
    weight: np.ndarray, bits: int, group: int, symmetric: bool, *, dealt: bool = False
) -> Quantised:
    """Rounds to the nearest code; `dealt` gives the groups columns from all over the row."""
    rows, columns = weight.shape
    size = columns if group < 0 else group
    groups = np.arange(columns) // size
    if dealt:
        groups = np.random.default_rng(1).permutation(groups)
    top = (1 << bits) - 1
    scales = np.zeros((rows, groups.max() + 1), np.float16)
    zeros = np.full(scales.shape, 1 << (bits - 1))
    for place in range(scales.shape[1]):
        of_group = weight[:, groups == place]
        low, high = np.minimum(of_group.min(1), 0), np.maximum(of_group.max(1), 0)
        reach = 2 * np.maximum(-low, high) if symmetric else high - low
        scales[:, place] = reach / top
        if not symmetric:
            zeros[:, place] = np.clip(np.rint(-low / scales[:, place]), 0, top)
    codes = np.rint(weight / scales.astype(np.float32)[:, groups]) + zeros[:, groups]
    codes = np.clip(codes, 0, top).astype(int)
    return Quantised(bits=bits, codes=codes, scales=scales, zeros=zeros, groups=groups)


def packed(values: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Packs rows of numbers into words: field i of a word is its number `order[i]`."""
    many = 32 // bits
    order = order or tuple(range(many))
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // many)), np.uint32)
    for row in range(rows):
        for column in range(columns):
            field = order.index(column % many)
            words[row, column // many] |= np.uint32(int(values[row, column]) << bits * field)
    return words


def tensors_of(method: str, stem: str, matrix: Quantised, *, symmetric: bool = False) -> Tensors:
    """Returns the tensors in which a method stores a matrix."""
    bits = matrix.bits
    if method == "compressed-tensors":
        tensors = {
            "weight_packed": packed(matrix.codes, bits),
            "weight_scale": matrix.scales,
            "weight_shape": np.array(matrix.codes.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(matrix.zeros.T, bits).T
        if is_dealt(matrix):
            tensors["weight_g_idx"] = matrix.groups
    else:
        order = AWQ_ORDER if method == "awq" else ()
        codes = packed(matrix.codes.T, bits, order) if order else packed(matrix.codes, bits).T
        zeros = packed(matrix.zeros.T, bits, order)
        if method == "gptq":
            zeros = zeros - np.uint32(0x11111111 if bits == 4 else 0x01010101)
        tensors = {"qweight": codes, "qzeros": zeros, "scales": matrix.scales.T}
        if method != "awq":
            tensors["g_idx"] = matrix.groups
    kinds = {np.dtype(np.uint32): np.int32, np.dtype(np.intp): np.int32}
    return {
        f"{stem}.{part}": value.astype(
            np.int64 if part == "weight_shape" else kinds.get(value.dtype, value.dtype)
        )
        for part, value in tensors.items()
    }


def is_dealt(matrix: Quantised) -> bool:
    return bool((np.diff(matrix.groups) < 0).any())


def config_of(
    method: str, bits: int, group: int, symmetric: bool, dealt: bool = False
) -> dict[str, Any]:
    """Returns a `quantization_config` as the tools write it, with keys that change no byte."""
    if method == "awq":
        return {
            "quant_method": "awq", "bits": bits, "group_size": group, "version": "gemm",
            "zero_point": not symmetric, "modules_to_not_convert": None, "backend": "autoawq",
        }  # fmt: skip
    if method != "compressed-tensors":
        return {
            "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
            "desc_act": dealt, "checkpoint_format": method, "damp_percent": 0.01,
            "true_sequential": True, "model_name_or_path": None, "is_marlin_format": False,
            "meta": {"quantizer": "gptqmodel:2.2.0"},
        }  # fmt: skip
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
        "strategy": "channel" if group < 0 else "group", "actorder": "group" if dealt else None,
        "group_size": None if group < 0 else group, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": None,
                "output_activations": None,
            }
        },
        "kv_cache_scheme": None, "transform_config": {}, "sparsity_config": {"format": "dense"},
        "quantization_status": "compressed", "global_compression_ratio": None,
    }  # fmt: skip


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the safetensors format, with whole numbers."""
    names = {
        "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64",
        "int8": "I8",
    }  # fmt: skip
    header, data = dict[str, Any](), b""
    for name, array in tensors.items():
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {
            "dtype": names[str(array.dtype)], "shape": [*array.shape], "data_offsets": ends,
        }  # fmt: skip
        data += np.ascontiguousarray(array).tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def matrix_of(folder: Path, tensors: Tensors, config: object) -> PackedMatrix:
    folder.mkdir(exist_ok=True)
    write(folder / WEIGHTS, tensors)
    (matrix,) = unpack(Checkpoint.open(folder), config).tensors.values()
    assert isinstance(matrix, PackedMatrix)
    return matrix


def gaussian(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns), np.float32) / np.float32(8)


# One matrix


@pytest.mark.sampled
@pytest.mark.parametrize("group", [32, 64, 128, 256, 48, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("method", "bits"),
    [*((method, 4) for method in METHODS), ("gptq", 8), ("gptq_v2", 8), ("compressed-tensors", 8)],
)
def test_a_matrix_is_what_was_packed(
    tmp_path: Path, method: str, bits: int, symmetric: bool, group: int
) -> None:
    columns = 192 if group == 48 else 256
    matrix = quantise(gaussian(40, columns), bits, group, symmetric)
    tensors = tensors_of(method, STEM, matrix, symmetric=symmetric)
    actual = matrix_of(tmp_path, tensors, config_of(method, bits, group, symmetric))
    assert (actual.name, actual.shape) == (f"{STEM}.weight", (40, columns))
    for start, stop in ((0, 40), (0, 1), (7, 9), (3, 33), (39, 40)):
        expected = matrix.weight()[start:stop]
        assert actual.read(start, stop).dtype == np.float32
        np.testing.assert_array_equal(actual.read(start, stop), expected)
        if group == 48:
            assert actual.grid is None
            continue
        blocks = actual.read_blocks(start, stop)
        np.testing.assert_array_equal(blocks.codes, matrix.codes[start:stop])
        np.testing.assert_array_equal(dequantize(blocks, bits), expected)
        grid = "symmetric" if symmetric else "zero_point"
        assert str(actual.grid) == f"{bits}/{group if 0 < group < 128 else 128}/{grid}"


@pytest.mark.parametrize(("columns", "block"), [(104, 64), (192, 64), (160, 32)])
def test_a_row_with_one_scale_is_cut_anywhere(tmp_path: Path, columns: int, block: int) -> None:
    matrix = quantise(gaussian(16, columns), 4, -1, False)
    tensors = tensors_of("compressed-tensors", STEM, matrix)
    actual = matrix_of(tmp_path, tensors, config_of("compressed-tensors", 4, -1, False))
    assert str(actual.grid) == f"4/{block}/zero_point"
    restored = dequantize(actual.read_blocks(0, 16), 4)[:, :columns]
    np.testing.assert_array_equal(restored, matrix.weight())


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_multiplier_goes_into_the_scales(tmp_path: Path, symmetric: bool) -> None:
    """Leaves codes as they are; the weights are those of the matrix, times so much."""
    matrix = quantise(gaussian(16, 128), 4, 32, symmetric)
    tensors = tensors_of("gptq", STEM, matrix)
    actual = matrix_of(tmp_path, tensors, config_of("gptq", 4, 32, symmetric))
    checkpoint = Checkpoint(path=tmp_path, tensors={actual.name: actual})
    source = WeightSource(parts=(actual.name,), shape=(16, 128), scale=0.375)
    assert actual.grid is not None
    kept = checkpoint.kept_blocks(source, actual.grid)
    assert kept is not None
    (blocks,) = kept
    np.testing.assert_array_equal(blocks.codes, actual.read_blocks(0, 16).codes)
    expected = matrix.weight() * np.float32(0.375)
    np.testing.assert_allclose(dequantize(blocks, 4), expected, rtol=1e-6)
    np.testing.assert_allclose(checkpoint.read(source), expected, rtol=1e-6)


def test_awq_has_older_names_for_its_keys(tmp_path: Path) -> None:
    matrix = quantise(gaussian(16, 64), 4, 32, False)
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    actual = matrix_of(tmp_path, tensors_of("awq", STEM, matrix), config)
    assert str(actual.grid) == "4/32/zero_point"
    np.testing.assert_array_equal(actual.read(0, 16), matrix.weight())


def test_rows_and_columns_that_fill_no_word(tmp_path: Path) -> None:
    matrix = quantise(gaussian(13, 100), 4, -1, False)
    tensors = tensors_of("compressed-tensors", STEM, matrix)
    actual = matrix_of(tmp_path, tensors, config_of("compressed-tensors", 4, -1, False))
    np.testing.assert_array_equal(actual.read(0, 13), matrix.weight())
    np.testing.assert_array_equal(actual.read(11, 13), matrix.weight()[11:])


def test_the_last_group_of_a_row_may_be_short(tmp_path: Path) -> None:
    matrix = quantise(gaussian(16, 192), 4, 128, False)
    tensors = tensors_of("gptq", STEM, matrix)
    del tensors[f"{STEM}.g_idx"]
    actual = matrix_of(tmp_path, tensors, config_of("gptq", 4, 128, False))
    np.testing.assert_array_equal(actual.read(0, 16), matrix.weight())
    blocks = actual.read_blocks(0, 16)
    assert blocks.scales.shape == (16, 2)
    np.testing.assert_array_equal(dequantize(blocks, 4)[:, :192], matrix.weight())


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_gptq_may_be_zero(tmp_path: Path, bits: int) -> None:
    """Takes 1 off the word, as version 1 of GPTQ does: only there a field lends to another."""
    matrix = quantise(gaussian(40, 64), bits, 32, False)
    matrix.zeros[::3] = 0
    matrix.zeros[1::3] = (1 << bits) - 1
    for method in ("gptq", "gptq_v2"):
        tensors = tensors_of(method, STEM, matrix)
        actual = matrix_of(tmp_path, tensors, config_of(method, bits, 32, False))
        np.testing.assert_array_equal(actual.read(0, 40), matrix.weight())
        np.testing.assert_array_equal(dequantize(actual.read_blocks(0, 40), bits), matrix.weight())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "compressed-tensors"])
def test_columns_dealt_by_importance_are_on_no_grid(tmp_path: Path, method: str, bits: int) -> None:
    matrix = quantise(gaussian(40, 256), bits, 64, False, dealt=True)
    tensors = tensors_of(method, STEM, matrix)
    actual = matrix_of(tmp_path, tensors, config_of(method, bits, 64, False, dealt=True))
    assert actual.grid is None
    np.testing.assert_array_equal(actual.read(0, 40), matrix.weight())
    np.testing.assert_array_equal(actual.read(5, 18), matrix.weight()[5:18])


def test_an_order_that_was_never_chosen_is_none(tmp_path: Path) -> None:
    matrix = quantise(gaussian(16, 64), 4, 32, True)
    tensors = tensors_of("compressed-tensors", STEM, matrix, symmetric=True)
    tensors[f"{STEM}.weight_g_idx"] = np.full(64, -1, np.int32)
    actual = matrix_of(tmp_path, tensors, config_of("compressed-tensors", 4, 32, True))
    assert str(actual.grid) == "4/32/symmetric"
    np.testing.assert_array_equal(actual.read(0, 16), matrix.weight())


@pytest.mark.parametrize(
    ("dtype", "smallest"),
    [(np.float16, 2.0**-24), (ml_dtypes.bfloat16, 255 * 2.0**-34), (np.float32, 2.0**-8)],
)
def test_scales_are_read_as_they_are(tmp_path: Path, dtype: Any, smallest: float) -> None:
    matrix = quantise(gaussian(16, 64), 4, 32, True)
    scales = np.geomspace(smallest, 200, 32).reshape(16, 2).astype(dtype)
    matrix = Quantised(**{**vars(matrix), "scales": scales})
    tensors = tensors_of("compressed-tensors", STEM, matrix, symmetric=True)
    actual = matrix_of(tmp_path, tensors, config_of("compressed-tensors", 4, 32, True))
    np.testing.assert_array_equal(actual.read(0, 16), matrix.weight())


def test_the_package_packs_so(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    from compressed_tensors.compressors.pack_quantized import base
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(
        num_bits=4, type="int", symmetric=False, strategy="group", group_size=32
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    matrix = quantise(gaussian(44, 256), 4, 32, False)
    state = {
        "weight": torch.from_numpy(matrix.weight()),
        "weight_scale": torch.from_numpy(matrix.scales).float(),
        "weight_zero_point": torch.from_numpy((matrix.zeros - 8).astype(np.int8)),
    }
    theirs = base.PackedQuantizationCompressor.compress(state, scheme)
    ours = tensors_of("compressed-tensors", STEM, matrix)
    for part in ("weight_packed", "weight_zero_point", "weight_shape"):
        np.testing.assert_array_equal(theirs[part].numpy(), ours[f"{STEM}.{part}"])
    config = config_of("compressed-tensors", 4, 32, False)
    np.testing.assert_array_equal(matrix_of(tmp_path, ours, config).read(0, 44), matrix.weight())


# Whole checkpoints

Store = Callable[[str, np.ndarray], tuple[Quantised, Tensors]]


def stored_by(method: str, bits: int, group: int, symmetric: bool, **options: Any) -> Store:
    """Stores every matrix of the layers in one way."""

    def store(name: str, weight: np.ndarray) -> tuple[Quantised, Tensors]:
        matrix = quantise(weight, bits, group, symmetric, **options)
        stem = name.removesuffix(".weight")
        return matrix, tensors_of(method, stem, matrix, symmetric=symmetric)

    return store


def checkpoints(folder: Path, config: Mapping[str, Any], store: Store) -> tuple[Path, Path]:
    """Makes a checkpoint with packed matrices, and one with the floats that they stand for."""
    stored: Tensors = {}

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            matrix, parts = store(name, tensors[name])
            tensors[name] = matrix.weight()
            stored.update(parts)
        stored.update({name: value for name, value in tensors.items() if "_proj" not in name})

    # Rows of whole groups of 128.
    floats = tiny.make_llama_checkpoint(folder / "floats", intermediate_size=256, change=change)
    whole = tiny.make_llama_checkpoint(folder / "packed", intermediate_size=256)
    say(whole, config)
    write(whole / WEIGHTS, stored)
    return whole, floats


def say(folder: Path, config: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def exported(source: Path, destination: Path, **options: Any) -> Bundle:
    settings = {"quality": False, "calibrate": False, "threads": 1, **options}
    return export_model(source, destination, ExportOptions(**settings))


def original(folder: Path) -> Original:
    source = open_source(folder)
    family, config, _ = source.config()
    sources, checkpoint = source.weight_sources(family, config), source.checkpoint(config)
    checkpoint.check(sources)
    return Original(config=config, sources=sources, checkpoint=checkpoint)


def assert_has_weights_of(bundle: Bundle, floats: Path) -> None:
    """Compares all but the embedding and the head, which are floats in either checkpoint."""
    expected = tiny.checkpoint_weights(floats)
    for name in original(floats).sources.keys() - {"embed", "head"}:
        np.testing.assert_array_equal(bundle.read_weight(name), expected(name), err_msg=name)


def test_inspect_tells_what_such_a_folder_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("awq", 4, 32, False)
    source, _ = checkpoints(tmp_path, config, stored_by("awq", 4, 32, False))
    assert main(["inspect", str(source), "--json"]) == 0
    assert "awq int4" in json.loads(capsys.readouterr().out)["dtypes"]


@pytest.mark.sampled
@pytest.mark.parametrize("group", [32, pytest.param(128, marks=pytest.mark.slow), -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_an_export_has_the_very_weights(
    tmp_path: Path, method: str, symmetric: bool, group: int
) -> None:
    config = config_of(method, 4, group, symmetric)
    source, floats = checkpoints(tmp_path, config, stored_by(method, 4, group, symmetric))
    bundle = exported(source, tmp_path / "bundle")
    assert_has_weights_of(bundle, floats)
    form = f"4/{32 if group == 32 else 128}/{'symmetric' if symmetric else 'zero_point'}"
    assert bundle.manifest.source["types"][f"{config['quant_method']} int4"] == {
        "tensors": 14, "kept": 14, "formats": {form: 14},
    }  # fmt: skip
    assert bundle.manifest.source["types"]["F32"]["formats"] == {"8/64/symmetric": 2, "float32": 5}


@pytest.mark.sampled
@pytest.mark.parametrize("method", METHODS)
def test_an_export_computes_what_transformers_does(tmp_path: Path, method: str) -> None:
    config = config_of(method, 4, 32, False)
    source, floats = checkpoints(tmp_path, config, stored_by(method, 4, 32, False))
    ids = np.array(prompt(40))
    expected = tiny.transformers_logits(floats, ids)
    assert expected.std() > 2
    assert divergence(expected, original(source).logits(ids)) < 1e-8
    bundle = exported(source, tmp_path / "bundle")
    with Engine(bundle, threads=1) as engine, engine.session(k_bits=16, v_bits=16) as session:
        actual = np.concatenate([*session.logits(ids.tolist())])
    # Activations, embedding and head are rounded to 8 bits; an export of the floats at 8 bits is as
    # far off (0.005), one at 5 bits ten times as far.
    assert divergence(expected, actual) < 0.01


def test_where_columns_are_dealt_weights_are_rounded(tmp_path: Path) -> None:
    config = config_of("gptq", 4, 32, True, dealt=True)
    source, floats = checkpoints(tmp_path, config, stored_by("gptq", 4, 32, True, dealt=True))
    bundle = exported(source, tmp_path / "bundle")
    row = bundle.manifest.source["types"]["gptq int4"]
    assert (row["kept"], row["formats"]) == (0, {"8/64/symmetric": 14})
    expected = tiny.checkpoint_weights(floats)("layers.1.qkv")
    np.testing.assert_allclose(bundle.read_weight("layers.1.qkv"), expected, atol=4e-3)
    assert (bundle.read_weight("layers.1.qkv") != expected).any()


def test_a_draft_head_of_floats_stands_beside_kept_codes(tmp_path: Path) -> None:
    config, store = config_of("gptq", 4, -1, True), stored_by("gptq", 4, -1, True)
    source, stored = make_drafting(tmp_path / "source"), Tensors()
    for name, tensor in tiny.read_safetensors(source / WEIGHTS).items():
        is_packed = "_proj" in name and not name.startswith(HEAD)
        stored |= store(name, tensor)[1] if is_packed else {name: tensor}
    say(source, config)
    write(source / WEIGHTS, stored)
    weights = exported(source, tmp_path / "bundle").manifest.weights
    assert weights is not None
    assert weights.format_of("layers.0.down").bits == 4
    assert weights.format_of("draft.layers.0.down").bits == 8


def test_parts_of_one_matrix_may_differ(tmp_path: Path) -> None:
    """Joins queries on a symmetric grid, keys with zero points, and values of 8 bits."""

    def store(name: str, weight: np.ndarray) -> tuple[Quantised, Tensors]:
        bits, symmetric = (8 if "v_proj" in name else 4), "q_proj" in name
        return stored_by("compressed-tensors", bits, 32, symmetric)(name, weight)

    config = config_of("compressed-tensors", 4, 32, True)
    config["config_groups"]["group_1"] = config_of("compressed-tensors", 8, 32, False)[
        "config_groups"
    ]["group_0"]
    source, floats = checkpoints(tmp_path, config, store)
    bundle = exported(source, tmp_path / "bundle")
    assert_has_weights_of(bundle, floats)
    weights = bundle.manifest.weights
    assert weights is not None
    assert str(weights.format_of("layers.0.qkv")) == "8/32/zero_point"
    assert str(weights.format_of("layers.0.down")) == "4/32/zero_point"


@pytest.mark.parametrize(("bits", "calibrate"), [(4, False), (5, True), (6, False)])
def test_wider_formats_keep_them_too(tmp_path: Path, bits: int, calibrate: bool) -> None:
    config = config_of("awq", 4, 32, False)
    source, floats = checkpoints(tmp_path, config, stored_by("awq", 4, 32, False))
    weights = WeightFormat(bits=bits, block=32)
    bundle = exported(source, tmp_path / "bundle", weights=weights, calibrate=calibrate)
    assert_has_weights_of(bundle, floats)
    row = bundle.manifest.source["types"]["awq int4"]
    assert (row["kept"], row["formats"]) == (14, {f"{bits}/32/zero_point": 14})


def test_wide_scales_are_rounded_and_codes_are_not(tmp_path: Path) -> None:
    plain = stored_by("compressed-tensors", 4, 32, False)

    def store(name: str, weight: np.ndarray) -> tuple[Quantised, Tensors]:
        matrix, _ = plain(name, weight)
        scales = matrix.scales.astype(np.float32) * np.float32(1.0001)
        wide = Quantised(**{**vars(matrix), "scales": scales})
        return wide, tensors_of("compressed-tensors", name.removesuffix(".weight"), wide)

    source, floats = checkpoints(tmp_path, config_of("compressed-tensors", 4, 32, False), store)
    bundle = exported(source, tmp_path / "bundle")
    row = bundle.manifest.source["types"]["compressed-tensors int4"]
    assert row["kept"] == 14
    expected, actual = (
        tiny.checkpoint_weights(floats)("layers.0.down"),
        bundle.read_weight("layers.0.down"),
    )
    assert 0 < np.abs(actual - expected).max() <= 2**-11 * np.abs(expected).max()


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    store = stored_by("gptq", 4, 32, True)
    config = config_of("gptq", 4, 32, True)

    def with_bias(value: float) -> Store:
        def biased(name: str, weight: np.ndarray) -> tuple[Quantised, Tensors]:
            matrix, tensors = store(name, weight)
            bias = np.full(len(weight), value, np.float16)
            return matrix, tensors | {name.replace(".weight", ".bias"): bias}

        return biased

    source, floats = checkpoints(tmp_path, config, with_bias(0))
    assert_has_weights_of(exported(source, tmp_path / "bundle"), floats)
    source, _ = checkpoints(tmp_path / "other", config, with_bias(0.5))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias' of .* is not part of this archit"):
        exported(source, tmp_path / "none")


# Refusals


def deep(*path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return change


GROUP = ("config_groups", "group_0")
REFUSED: tuple[tuple[str, Callable[[dict[str, Any]], object], str], ...] = (
    ("gptq", deep("quant_method", value="bitsandbytes"), "quant_method = 'bitsandbytes' is not"),
    ("gptq", deep("quant_method", value="fp8"), "'fp8' .*: 'gptq', 'awq', 'mxfp4', 'compr"),
    ("gptq", deep("quant_method", value="nvfp4"), "quant_method = 'nvfp4'"),
    ("gptq", deep("quant_method", value=None), "lacks quant_method"),
    ("gptq", deep("quant_method", value=["gptq"]), r"quant_method = \['gptq'\]"),
    ("gptq", deep("bits", value=3), "bits = 3 is not supported for gptq; supported: 4, 8"),
    ("gptq", deep("bits", value=4.0), r"bits = 4\.0 is not supported"),
    ("gptq", deep("bits", value="4"), "bits = '4' is not supported"),
    ("gptq", deep("group_size", value=0), "group_size = 0 is neither -1 nor above 0"),
    ("gptq", deep("group_size", value=-128), "group_size = -128 is neither"),
    ("gptq", deep("group_size", value="128"), "group_size = '128'; it should be of kind int"),
    ("gptq", deep("checkpoint_format", value="marlin"), "checkpoint_format = 'marlin' is not"),
    ("gptq", deep("is_marlin_format", value=True), "is_marlin_format = True is not"),
    ("awq", deep("version", value="gemv"), "version = 'gemv' is not .* supported: 'gemm'"),
    ("awq", deep("bits", value=8), "bits = 8 is not supported for awq; supported: 4"),
    ("compressed-tensors", deep("format", value="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
    ("compressed-tensors", deep("format", value="int-quantized"), "format = 'int-quantized'"),
    ("compressed-tensors", deep("kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme = {"),
    ("compressed-tensors", deep("transform_config", value={"u": {}}), "transform_config = {'u'"),
    ("compressed-tensors", deep("config_groups", value=None), "lacks config_groups"),
    ("compressed-tensors", deep("config_groups", value={}), "lacks config_groups"),
    ("compressed-tensors", deep(*GROUP, value=["Linear"]), r"group_0 = \['Linear'\]"),
    (
        "compressed-tensors", deep(*GROUP, "input_activations", value={"num_bits": 8}),
        r"input_activations = \{'num_bits': 8\} is not supported for compressed-tensors",
    ),
    ("compressed-tensors", deep(*GROUP, "weights", "num_bits", value=2), "num_bits = 2 is not"),
    ("compressed-tensors", deep(*GROUP, "weights", "type", value="float"), "type = 'float'"),
    ("compressed-tensors", deep(*GROUP, "weights", "strategy", value="tensor"), "'tensor' is not"),
    ("compressed-tensors", deep(*GROUP, "weights", "symmetric", value="no"), "symmetric = 'no'"),
)  # fmt: skip


@pytest.mark.parametrize(("method", "change", "words"), REFUSED)
def test_other_ways_are_refused_by_name(
    tmp_path: Path, method: str, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    config = config_of(method, 4, 32, False)
    change(config)
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    say(source, config)
    with pytest.raises(UnsupportedModelError, match=words) as refusal:
        export_model(source, tmp_path / "bundle")
    assert "export one of these or the original checkpoint" in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("said", [{}, [], "gptq", 4, True])
def test_what_is_no_config_is_refused(said: object) -> None:
    with pytest.raises(UnsupportedModelError, match="quant"):
        unpack(Checkpoint(path=Path(), tensors={}), said)


def put(part: str, value: np.ndarray) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{STEM}.{part}": value})


def drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{STEM}.{part}")


def cast(part: str, dtype: Any) -> Callable[[Tensors], object]:
    return lambda t: t.update({f"{STEM}.{part}": t[f"{STEM}.{part}"].astype(dtype)})


def cut(part: str, *places: slice) -> Callable[[Tensors], object]:
    return lambda t: t.update({f"{STEM}.{part}": t[f"{STEM}.{part}"][places]})


FIRST, NO_MATRIX = slice(1, None), f"the tensors of '{STEM}' make no .* matrix of 4 bits with"
WRONG: tuple[tuple[str, Callable[[Tensors], object], str], ...] = (
    ("gptq", drop("scales"), rf"tensor '{STEM}\.scales' is missing, .*download"),
    ("gptq", drop("qzeros"), rf"tensor '{STEM}\.qzeros' is missing"),
    ("gptq", cut("scales", FIRST), NO_MATRIX + r" group_size 32, .*scales F16 \[1, 40\]"),
    ("gptq", cut("scales", slice(0, 0)), NO_MATRIX),
    ("gptq", cut("qweight", slice(0, 0)), NO_MATRIX),
    ("gptq", cut("qweight", FIRST), NO_MATRIX),
    ("gptq", cut("qzeros", FIRST), NO_MATRIX),
    ("gptq", cut("g_idx", FIRST), NO_MATRIX),
    ("gptq", cast("scales", np.int32), NO_MATRIX + r".*scales I32"),
    ("gptq", cast("qweight", np.int64), NO_MATRIX + r".*qweight I64"),
    ("gptq", put("qweight", np.zeros(64, np.int32)), NO_MATRIX),
    ("gptq", put("scales", np.zeros((), np.float32)), NO_MATRIX),
    ("gptq", put("g_idx", np.full(64, 2, np.int32)), r"g_idx' of .* groups 2 to 2, .* are 2"),
    ("gptq", put("g_idx", np.full(64, -1, np.int32)), r"g_idx' of .* into groups -1 to -1"),
    ("gptq", put("weight", np.zeros((40, 64), np.float32)), "is there as floats, and as qweight"),
    ("awq", cut("qweight", slice(None), FIRST), NO_MATRIX),
    ("awq", cut("qweight", slice(32)), NO_MATRIX),
    ("awq", cast("qweight", np.float32), NO_MATRIX),
    ("awq", drop("scales"), rf"tensor '{STEM}\.scales' is missing"),
    ("compressed-tensors", drop("weight_scale"), r"weight_scale' is missing"),
    ("compressed-tensors", drop("weight_shape"), r"weight_shape' is missing"),
    ("compressed-tensors", drop("weight_zero_point"), r"weight_zero_point' is missing"),
    ("compressed-tensors", cast("weight_zero_point", np.int8), NO_MATRIX),
    ("compressed-tensors", put("weight_shape", np.array([40, -64])), NO_MATRIX),
    ("compressed-tensors", put("weight_shape", np.array([1 << 62, 1 << 62])), NO_MATRIX),
    ("compressed-tensors", put("weight_shape", np.array([40, 56])), NO_MATRIX),
    ("compressed-tensors", put("weight_shape", np.array([64])), NO_MATRIX),
    ("compressed-tensors", put("weight_shape", np.zeros(0, np.int64)), NO_MATRIX),
)  # fmt: skip


@pytest.mark.parametrize(("method", "change", "words"), WRONG)
def test_tensors_that_make_no_matrix_are_refused(
    tmp_path: Path, method: str, change: Callable[[Tensors], object], words: str
) -> None:
    matrix = quantise(gaussian(40, 64), 4, 32, False)
    tensors = tensors_of(method, STEM, matrix)
    change(tensors)
    with pytest.raises(CheckpointError, match=words):
        matrix_of(tmp_path, tensors, config_of(method, 4, 32, False))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group", [32, -1])
def test_a_matrix_of_nothing_is_refused(tmp_path: Path, method: str, group: int) -> None:
    matrix = quantise(gaussian(40, 64), 4, group, False)
    tensors = tensors_of(method, STEM, matrix)
    if method == "compressed-tensors":
        put("weight_packed", np.zeros((40, 0), np.int32))(tensors)
        put("weight_shape", np.array([40, 0]))(tensors)
    else:
        put("qweight", np.zeros((0, tensors[f"{STEM}.qweight"].shape[1]), np.int32))(tensors)
        tensors.pop(f"{STEM}.g_idx", None)
    with pytest.raises(CheckpointError, match=r"make no .* matrix of 4 bits with group_size"):
        matrix_of(tmp_path, tensors, config_of(method, 4, group, False))


def test_columns_of_other_groups_must_say_so(tmp_path: Path) -> None:
    tensors = tensors_of("gptq", STEM, quantise(gaussian(40, 64), 4, 32, False, dealt=True))
    del tensors[f"{STEM}.g_idx"]
    with pytest.raises(CheckpointError, match=rf"tensor '{STEM}\.g_idx' is missing"):
        matrix_of(tmp_path, tensors, config_of("gptq", 4, 32, False, dealt=True))


@pytest.mark.parametrize("dealt", [False, True])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, dealt: bool) -> None:
    def store(name: str, weight: np.ndarray) -> tuple[Quantised, Tensors]:
        matrix, tensors = stored_by("gptq", 4, 32, True, dealt=dealt)(name, weight)
        tensors[name.replace("weight", "scales")][1, 5] = np.inf
        return matrix, tensors

    source, _ = checkpoints(tmp_path, config_of("gptq", 4, 32, True, dealt=dealt), store)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' of .* NaN or infinite .*in row 5"):
        exported(source, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    matrix = quantise(gaussian(40, 64), 4, 32, False)
    actual = matrix_of(tmp_path, tensors_of("gptq", STEM, matrix), config_of("gptq", 4, 32, False))
    (tmp_path / WEIGHTS).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"qweight' of .* cannot be read"):
        actual.read(0, 40)


@pytest.mark.slow
def test_mutated_headers_are_refused_or_read(tmp_path: Path) -> None:
    """Changes numbers of the shapes and types at random: a clear error or a matrix results."""
    draw = np.random.default_rng(0)
    refused = 0
    for method in METHODS:
        tensors = tensors_of(method, STEM, quantise(gaussian(16, 64), 4, 32, False))
        config = config_of(method, 4, 32, False)
        matrix_of(tmp_path, tensors, config)
        raw = (tmp_path / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        for _ in range(300):
            changed = bytearray(raw)
            # Data too: what a shape or an order says is there.
            for at in draw.integers(8, end if draw.random() < 0.8 else len(raw), 2):
                changed[at] = draw.choice([*b"0123456789-[],IF", draw.integers(256)])
            (tmp_path / WEIGHTS).write_bytes(changed)
            try:
                opened = unpack(Checkpoint.open(tmp_path), config)
                for tensor in opened.tensors.values():
                    tensor.check()
                    if tensor.shape:
                        tensor.read(0, tensor.shape[0])
            except ModelError:
                refused += 1
    assert 600 < refused < 1200
