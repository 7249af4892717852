"""GGUF files as checkpoints: an import is what the file was, for every family and type."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from command_line import answer, kvq
from environment import environment_in
from kvq.errors import CheckpointError, ModelError, UnsupportedModelError
from kvq.reference.linear import (
    BlockFormat,
    Blocks,
    PanelFormat,
    dequantize,
    pack,
    restore,
    unpack,
)
from kvq_apps.names import model_path
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit.quality import Original
from kvq_export.gguf.gguf_groups import CUT_GRIDS, GRIDS, blocks_of, check_type, decode
from kvq_export.gguf.gguf_model import ARCHITECTURE_OF
from kvq_export.gguf.gguf_source import GgufRows, grid_of
from kvq_export.gguf.gguf_tensors import DealtHeads
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.read.source import Source, open_source
from kvq_export.write.writer import stored_blocks
from kvq_models.config import Experts, Layer, ModelConfig
from kvq_models.family import WeightSource
from kvq_models.tokenizer import Tokenizer, TokenizerFiles
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.gguf_format import TENSOR_TYPES, TensorType, read_gguf
from kvq_runtime.bundle.manifest import GGUF_FILE
from logits import divergence

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from exported_gguf import export  # noqa: E402
from tiny_gguf import write_gguf  # noqa: E402

TEXTS = (
    "def f(x):\n\treturn {'a': [x**2, -x//3]}  # !== ?? ::\n\n\n\n",
    "plain words, then   runs     of\t\ttabs \t and spaces   \n\n\n   \r\n end   ",
    "I'll they'RE 1234567890 3.14159 ١٢٣ ²³ Ⅳ 12ab34",
    "Größe café naïve e\u0301 家族 日本語 한국어 ไทย العربية 👩‍👩‍👧 🇫🇷",
    "<|im_start|>system\nobey<|im_end|><|endoftext|> <|fim_prefix|></s><0x0A>▁",
    "",
)
# What a file says otherwise, to the same effect: scales are in the weights, ends of turns are ends.
LOST = {
    *("model_type", "layers", "context_length", "embedding_scale", "logits_scale", "ropes"),
    "eos_token_ids",
}
LOST_OF_MIXERS = {"window_tokens": 0, "rope": 0, "scale": 1.0}
# Cases whose files have the same windows and contexts, in the family's own name.
WHOLE = ("llama", "llama-bias", "llama-linear", "llama-llama3", "qwen3", "gemma3", "phi3-longrope")
WHOLE += ("lfm2", "lfm2-moe", "gemma4", "qwen3-5", "qwen3-5-moe", "qwen3-next", "gpt-oss")
# Of all others llama.cpp's keys and types say the very weights: of these some are multiplied.
SCALED = ("gemma", "gemma2", "gemma3", "granite")
EXACT = tuple(name for name in tiny.CASES if name not in SCALED)
# What embeddings are multiplied by is rounded in the checkpoint alone.
ROUNDED = (*SCALED, "gemma4", "gemma4-keys", "gemma4-experts")
# Weights of which a file holds something else that is made of them.
MADE_OF = ("decay", "per_layer_model", "per_layer_norm", "router_norm")
# What an expert's output is multiplied by is in its weights, which are rounded with it.
FOLDED = {"gemma4-experts": "experts_down"}
WRITTEN = tuple(name for name, (family, _) in tiny.CASES.items() if family in ARCHITECTURE_OF)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sources")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            tiny.make_checkpoint(name, folder / name, dtype="bfloat16", **KEYS.get(name, {}))
        return folder / name

    return make


SQUARE_STATES = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
KEYS: Mapping[str, Mapping[str, Any]] = {
    # Shapes that llama.cpp computes under the family's own name.
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "phi3": {"hidden_size": 128, "head_dim": 32, "sliding_window": None},
    "starcoder2": {"hidden_size": 256},
    "olmo2": {"head_dim": 32, "tie_word_embeddings": False},
    "olmo3": {"head_dim": 32, "tie_word_embeddings": False},
    "olmoe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layer_interval": 4},
    "granite": {"tie_word_embeddings": False},
    "lfm2": {"head_dim": 32},
    # A scale of experts is in their weights.
    "lfm2-moe": {"head_dim": 32, "routed_scaling_factor": 1.0},
    "gemma4": {
        "layer_types": [
            *["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2,
            "full_attention",
        ]
    },
    "qwen3-5": SQUARE_STATES,
    "qwen3-5-moe": SQUARE_STATES,
    "qwen3-next": {**SQUARE_STATES, "mlp_only_layers": []},
}  # fmt: skip


def opened(source: Source) -> tuple[Original, Tokenizer]:
    family, config, _ = source.config()
    sources = source.weight_sources(family, config)
    weights = source.checkpoint(config)
    weights.check(sources)
    original = Original(config=config, sources=sources, checkpoint=weights)
    return original, Tokenizer.from_files(source.tokenizer_files(), family, config)


def rounding(name: str, kind: str) -> float:
    """Returns how far a weight of an import may be from its checkpoint's, relatively."""
    return 2**-8 if FOLDED.get(name) == kind else 1e-6 if kind in MADE_OF else 0


def as_gguf(folder: Path, kind: str = "bf16", **options: Any) -> Path:
    return export(folder, kind, **options).path / GGUF_FILE


def assert_same_config(actual: ModelConfig, expected: ModelConfig) -> None:
    ours, theirs = actual.to_json(), expected.to_json()
    assert {key: ours[key] for key in ours.keys() - LOST} == {
        key: theirs[key] for key in theirs.keys() - LOST
    }
    assert comparable_layers(actual) == comparable_layers(expected)
    for rope, expected_rope in zip(actual.ropes, expected.ropes, strict=True):
        for name in ("inv_freq", "long_inv_freq"):
            assert (getattr(rope, name) is None) == (getattr(expected_rope, name) is None)
            if getattr(rope, name) is not None:
                np.testing.assert_allclose(
                    getattr(rope, name), getattr(expected_rope, name), rtol=1e-6
                )
        assert rope.factor == pytest.approx(expected_rope.factor, rel=1e-6)
        assert rope.original_context == expected_rope.original_context


def comparable_layers(config: ModelConfig) -> list[Layer]:
    """Returns the layers without what a file says otherwise."""
    return [
        replace(
            layer,
            mixer=replace(layer.mixer, **LOST_OF_MIXERS) if layer.attends else layer.mixer,
            scale=1.0,
        )
        for layer in config.layers
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("name", WRITTEN)
def test_an_import_of_an_export_is_the_model(checkpoint: Callable[[str], Path], name: str) -> None:
    folder = checkpoint(name)
    actual, tokenizer = opened(open_source(as_gguf(folder)))
    expected, expected_tokenizer = opened(open_source(folder))
    assert_same_config(actual.config, expected.config)
    if name in WHOLE:
        assert actual.config.model_type == expected.config.model_type
        for layer, expected_layer in zip(actual.config.layers, expected.config.layers, strict=True):
            assert layer.attends == expected_layer.attends
            if layer.attends:
                assert layer.attention.window_tokens == expected_layer.attention.window_tokens
                assert layer.attention.rope == expected_layer.attention.rope
        assert actual.config.context_length == expected.config.context_length
    if name in EXACT:
        for canonical, source in expected.sources.items():
            np.testing.assert_allclose(
                actual.checkpoint.read(actual.sources[canonical]),
                expected.checkpoint.read(source),
                rtol=rounding(name, canonical.rpartition(".")[2]),
            )
    tokens = min(60, actual.config.context_length)
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB_SIZE, tokens)
    logits = expected.logits(ids)
    assert logits.std() > 2
    assert divergence(logits, actual.logits(ids)) < (1e-8 if name not in ROUNDED else 2e-5)
    for text in TEXTS:
        assert tokenizer.encode(text) == expected_tokenizer.encode(text)
        ids = tokenizer.encode(text, special=True, start=True)
        assert ids == expected_tokenizer.encode(text, special=True, start=True)
        assert tokenizer.decode(ids, special=True) == expected_tokenizer.decode(ids, special=True)
    if actual.config.model_type == expected.config.model_type:
        assert tokenizer.control.fim == expected_tokenizer.control.fim
    assert tokenizer.control.start == expected_tokenizer.control.start
    assert set(expected_tokenizer.eos_ids) <= set(tokenizer.eos_ids)
    assert tokenizer.chat_template == tiny.CHATML
    assert tokenizer.vocab_size == expected_tokenizer.vocab_size


def with_more(
    file: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    without: Collection[str] = (),
) -> Path:
    """Copies a file, with other values of some keys of its architecture, and more tensors.

    Keys that are None and tensors named in `without` are left out.
    """
    reader, copy = gguf.GGUFReader(file), file.with_name("more.gguf")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(copy, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            value = keys.get(name.removeprefix(f"{architecture}."), field.contents())
            if value is not None:
                writer.add_key_value(name, value, kind, sub)
    for key in keys.keys() - {name.removeprefix(f"{architecture}.") for name in reader.fields}:
        writer.add_uint32(f"{architecture}.{key}", keys[key])
    for tensor in reader.tensors:
        if tensor.name not in without:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


def test_what_nothing_reads_is_passed_over(checkpoint: Callable[[str], Path]) -> None:
    """Adds a draft head after the layers, and keys of layers that read another's."""
    vector = np.ones(8, np.float32)
    draft = {
        "block_count": 6,
        "nextn_predict_layers": 1,
        "attention.recurrent_layers": [True, True, False, True, False, False],
    }
    for name, keys, more in (
        ("qwen3-5", draft, {"blk.5.nextn.enorm.weight": vector}),
        ("gemma4", {}, {"blk.6.attn_k.weight": vector, "blk.6.attn_k_norm.weight": vector}),
    ):
        file = as_gguf(checkpoint(name))
        expected, _ = opened(open_source(file))
        actual, _ = opened(open_source(with_more(file, keys, more)))
        assert actual.config == expected.config
        assert set(actual.checkpoint.tensors) == set(expected.checkpoint.tensors)
        with pytest.raises(CheckpointError, match="is not part of this architecture"):
            opened(open_source(with_more(file, {}, {"blk.0.attn_sinks.weight": vector})))


def restacked(file: Path, layers: int) -> tuple[dict[str, np.ndarray], set[str]]:
    """Splits gate and up of a file's experts where they are one tensor, or joins them.

    Also returns what these were called.
    """
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    restacked_tensors, replaced = dict[str, np.ndarray](), set[str]()
    for layer in range(layers):
        fused, *split_names = (
            f"blk.{layer}.ffn_{name}_exps.weight" for name in ("gate_up", "gate", "up")
        )
        names = [fused] if fused in stored else split_names
        values = [gguf.dequantize(stored[name].data, stored[name].tensor_type) for name in names]
        whole = np.concatenate(values, axis=1)
        halves = np.split(whole, 2, axis=1)
        restacked_tensors |= (
            dict(zip(split_names, halves, strict=True)) if fused in stored else {fused: whole}
        )
        replaced.update(names)
    return restacked_tensors, replaced


def test_a_ramp_of_whole_pairs_is_llama_cpps_alone(checkpoint: Callable[[str], Path]) -> None:
    """Ignores what a file says; where it says nothing, every second layer has a window."""
    folder = checkpoint("gpt-oss")
    unset = {"attention.sliding_window_pattern": None}
    actual, _ = opened(open_source(with_more(as_gguf(folder), unset, {})))
    expected, _ = opened(open_source(folder))
    np.testing.assert_allclose(
        actual.config.ropes[0].inv_freq, expected.config.ropes[0].inv_freq, rtol=1e-6
    )
    assert actual.config.windows == expected.config.windows == (24, 0)


def test_a_file_of_experts_alone_need_not_say_how_wide_others_are(
    checkpoint: Callable[[str], Path],
) -> None:
    for name in ("gpt-oss", "qwen3-moe", "qwen3-5-moe", "qwen3-next"):
        file = as_gguf(checkpoint(name))
        expected, _ = opened(open_source(file))
        actual, _ = opened(open_source(with_more(file, {"feed_forward_length": None}, {})))
        assert actual.config == expected.config


def test_experts_are_read_as_llama_cpp_has_them(checkpoint: Callable[[str], Path]) -> None:
    """Reads gate and up as one tensor or two, factors of outputs apart, and one axis less."""
    for name in ("gemma4-experts", "qwen3-moe", "qwen3-5-moe"):
        file = as_gguf(checkpoint(name))
        expected, _ = opened(open_source(file))
        factors, experts = np.linspace(0.5, 2, 12, dtype=np.float32), expected.config.layers[0].feed
        assert isinstance(experts, Experts)
        more, replaced = restacked(file, expected.config.num_layers)
        more["blk.1.ffn_down_exps.scale"] = factors[: experts.count]
        if experts.shared is not None:
            gate = "blk.1.ffn_gate_inp_shexp.weight"
            more[gate] = expected.checkpoint.read(expected.sources["layers.1.shared_gate"])[0]
            replaced.add(gate)
        actual, _ = opened(open_source(with_more(file, {}, more, replaced)))
        assert actual.config == expected.config
        for canonical, source in expected.sources.items():
            values = expected.checkpoint.read(source)
            if canonical == "layers.1.experts_down":
                stack = values.reshape(experts.count, -1, experts.width)
                values = (stack * factors[: experts.count, None, None]).reshape(values.shape)
            np.testing.assert_array_equal(
                actual.checkpoint.read(actual.sources[canonical]), values, err_msg=canonical
            )


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("lfm2-moe", {"expert_gating_func": 1}, "chooses experts by function 1; 2, sigmoids, is"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 2]}, r"head_count_kv is \[0, 0, 2\], not 5"),
        ("gemma4", {"feed_forward_length": [192] * 3 + [96] * 4}, r"MLPs of \[96, 192\] columns"),
        ("gemma4", {"rope.dimension_count_swa": 16}, "or that rotate in part"),
        ("gemma4", {"rope.dimension_count": 16}, "rotates 16 of 64 channels of a head"),
        ("qwen3-5", {"ssm.group_count": 3}, "4 .* 3"),
        ("gemma4-keys", {"expert_count": 4}, "lacks gemma4.expert_used_count"),
        ("qwen3-5", {"expert_count": 4}, r"qwen35.expert_count = 4 \(a mixture of experts\)"),
        ("gpt-oss", {"expert_shared_feed_forward_length": 9}, "which kvq does not compute"),
    ],
)
def test_a_file_of_unlike_layers_says_what_it_cannot_be(
    checkpoint: Callable[[str], Path], name: str, keys: Mapping[str, Any], words: str
) -> None:
    file = with_more(as_gguf(checkpoint(name)), keys, {})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        opened(open_source(file))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_dealt_blocks_pass_bit_for_bit(checkpoint: Callable[[str], Path], kind: str) -> None:
    """Moves whole blocks of a delta net's heads, of rows and of columns."""
    file = as_gguf(checkpoint("qwen3-5"), kind.lower())
    original, _ = opened(open_source(file))
    form = GRIDS[kind]
    for name in ("layers.0.in_proj", "layers.0.out_proj"):
        source = original.sources[name]
        blocks = original.checkpoint.kept_blocks(source, form)
        assert blocks is not None
        kept = np.concatenate([dequantize(part, form.bits) for part in blocks])
        np.testing.assert_array_equal(kept, original.checkpoint.read(source))


@pytest.mark.parametrize("kind", ["Q3_K", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("size", [128, 256])
def test_super_blocks_are_dealt_whole_or_not_kept(kind: str, size: int, tmp_path: Path) -> None:
    """Columns of 256 move with all constants; of 128 the codes of some types are kept alone."""
    raw = np.random.default_rng(0).integers(0, 64, (16, 4 * TENSOR[kind].block_bytes), np.uint8)
    (tmp_path / "file").write_bytes(raw.tobytes())
    dealt = DealtHeads(key_heads=2, value_heads=1024 // size, size=size)
    rows = GgufRows(
        name="out_proj", file=tmp_path / "file", dtype=kind, shape=(16, 1024), start=0,
        kind=TENSOR[kind], grid=grid_of(TENSOR[kind], dealt), dealt_columns=dealt,
    )  # fmt: skip
    if size == 128:
        assert rows.grid == CUT_GRIDS.get(kind)
        return
    assert rows.grid == GRIDS[kind]
    blocks = rows.read_blocks(0, 16)
    np.testing.assert_array_equal(dequantize(blocks, rows.grid.bits), rows.read(0, 16))


# Types

TENSOR = {kind.name: kind for kind in TENSOR_TYPES.values()}


@pytest.mark.parametrize("kind", TENSOR_TYPES.values(), ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_gguf_package_reads_it(kind: TensorType) -> None:
    number = gguf.GGMLQuantizationType[kind.name] if kind.name in TYPES else None
    if number is None:
        with pytest.raises(UnsupportedModelError, match=f"weights of type {kind.name} cannot be"):
            check_type(kind)
        return
    raw = np.random.default_rng(0).integers(0, 256, (3, 4 * kind.block_bytes), np.uint8)
    check_type(kind)
    with np.errstate(all="ignore"):
        expected = PLAIN[kind.name](raw) if kind.name in PLAIN else gguf.dequantize(raw, number)
    actual = decode(kind, raw)
    assert (actual.dtype, actual.shape) == (np.float32, (3, 4 * kind.block))
    np.testing.assert_array_equal(actual, expected)


PLAIN = {
    "F32": lambda raw: raw.view(np.float32),
    "F16": lambda raw: raw.view(np.float16).astype(np.float32),
    "F64": lambda raw: raw.view(np.float64).astype(np.float32),
}
TYPES = {kind.name for kind in gguf.quants._type_traits} | PLAIN.keys()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "bits", "form"),
    [
        ("Q4_0", 4, "4/32/zero_point"), ("Q4_0", 6, "6/32/zero_point"),
        ("Q5_0", 5, "5/32/zero_point"), ("Q5_0", 8, "8/32/symmetric"),
        ("Q8_0", 8, "8/32/symmetric"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("calibrate", [False, True])
def test_blocks_on_our_grid_pass_bit_for_bit(
    tmp_path: Path, kind: str, bits: int, form: str, calibrate: bool
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    weights = WeightFormat(bits=bits, block=32, embedding_bits=bits)
    bundle = exported(file, tmp_path / "bundle", weights=weights, calibrate=calibrate)
    original, _ = opened(open_source(file))
    for name, source in original.sources.items():
        np.testing.assert_array_equal(bundle.read_weight(name), original.checkpoint.read(source))
    row = bundle.manifest.source["types"][kind]
    assert (row["kept"], row["formats"]) == (row["tensors"], {form: row["tensors"]})


def test_no_text_is_read_where_nothing_of_the_layers_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvq_export.export.CalibratedWeights", None)
    kept, rounded = (write_gguf(tmp_path / f"{kind}.gguf", kind=kind) for kind in ("Q4_0", "F16"))
    exported(kept, tmp_path / "kept", calibrate=True)
    with pytest.raises(TypeError):
        exported(rounded, tmp_path / "rounded", weights=WeightFormat(), calibrate=True)


def exported(file: Path, destination: Path, **options: Any) -> Bundle:
    settings = {"quality": False, "calibrate": False, "threads": 1, **options}
    return export_model(file, destination, ExportOptions(**settings))


@pytest.mark.parametrize(
    ("kind", "form", "kept"),
    [
        ("Q4_0", "4/32/symmetric", True), ("Q4_1", "4/32/minimum", True),
        ("Q5_0", "5/32/symmetric", True), ("Q5_1", "5/32/minimum", True),
        ("Q8_0", "8/32/symmetric", True), ("F16", "8/64/symmetric", False),
    ],
)  # fmt: skip
def test_formats_nobody_asks_for_follow_the_file(
    tmp_path: Path, kind: str, form: str, kept: bool
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    bundle = exported(file, tmp_path / "bundle")
    weights = bundle.manifest.weights
    assert weights is not None
    assert [*weights.by_format] == [form]
    row = bundle.manifest.source["types"][kind]
    assert row["kept"] == (row["tensors"] if kept else 0)
    original, _ = opened(open_source(file))
    for name, source in original.sources.items():
        expected = original.checkpoint.read(source)
        if kept:
            np.testing.assert_array_equal(bundle.read_weight(name), expected)
        else:
            np.testing.assert_allclose(bundle.read_weight(name), expected, atol=0.01)


# Where blocks with super-blocks have float16 scales.
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_XS": (0,),
}  # fmt: skip


def random_rows(kind: str) -> np.ndarray:
    """Returns sixteen rows of four random blocks, with scales like those of weights."""
    draw, num_bytes = np.random.default_rng(0), TENSOR[kind].block_bytes
    blocks = draw.integers(0, 256, (64, num_bytes), np.uint8)
    for place in HALVES[kind]:
        scales = draw.uniform(-0.03, 0.03, (64, 1)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(16, -1)


def packed(kind: str, raw: np.ndarray, grid: BlockFormat) -> tuple[Blocks, Blocks, np.ndarray]:
    """Returns rows as blocks, as they come back from a panel, and the weights of the panel."""
    blocks = blocks_of(TENSOR[kind], raw, grid)
    panel = PanelFormat.of(grid, (16, blocks.codes.shape[1]))
    panels = pack(panel, stored_blocks(blocks, grid.grid))
    return blocks, unpack(panel, panels), restore(panel, panels)


@pytest.mark.parametrize("kind", HALVES)
def test_super_blocks_are_kept_as_they_are(kind: str) -> None:
    raw = random_rows(kind)
    blocks, unpacked, actual = packed(kind, raw, GRIDS[kind])
    np.testing.assert_array_equal(unpacked.codes, blocks.codes)
    for name in ("sub_scales", "sub_offsets"):
        np.testing.assert_array_equal(getattr(unpacked, name), getattr(blocks, name))
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("kinds", "joint"),
    [
        (("Q2_K", "Q2_K"), "2/16/super_minimum"), (("Q3_K", "Q3_K"), "3/16/super_symmetric"),
        (("Q2_K", "Q3_K"), "4/16/super_minimum"), (("Q3_K", "Q4_K"), "4/16/super_minimum"),
        (("Q3_K", "Q6_K"), "6/16/super_symmetric"), (("Q2_K", "Q6_K"), "6/16/super_minimum"),
    ],
)  # fmt: skip
def test_super_blocks_of_two_types_meet_in_a_format_that_keeps_both(
    kinds: tuple[str, str], joint: str, tmp_path: Path
) -> None:
    """Meets in no wider one: a matrix of both types keeps every weight."""
    tensors, expected = {}, []
    for i, kind in enumerate(kinds):
        raw, file = random_rows(kind), tmp_path / str(i)
        file.write_bytes(raw.tobytes())
        tensors[str(i)] = GgufRows(
            name=str(i), file=file, dtype=kind, shape=(16, 1024), start=0, kind=TENSOR[kind],
            grid=grid_of(TENSOR[kind]),
        )  # fmt: skip
        expected.append(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    checkpoint = Checkpoint(path=tmp_path, tensors=tensors)
    source = WeightSource(parts=("0", "1"), shape=(32, 1024))
    form = checkpoint.format_of(source)
    assert str(form) == joint
    assert form is not None
    kept = checkpoint.kept_blocks(source, form)
    assert kept is not None
    panel = PanelFormat.of(form, (16, 1024))
    actual = [restore(panel, pack(panel, stored_blocks(blocks, form.grid))) for blocks in kept]
    np.testing.assert_array_equal(np.concatenate(actual), np.concatenate(expected))


@pytest.mark.parametrize("kind", CUT_GRIDS)
def test_codes_of_cut_super_blocks_are_kept_within_the_rounding_of_their_scales(kind: str) -> None:
    raw = random_rows(kind)
    blocks, unpacked, actual = packed(kind, raw, CUT_GRIDS[kind])
    np.testing.assert_array_equal(unpacked.codes, blocks.codes)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert 0 < np.abs(actual - expected).max() < 2**-10 * np.abs(expected).max()


def test_matrices_of_a_wider_type_are_kept_wide(tmp_path: Path) -> None:
    """Keeps them wide, as llama.cpp's q4_0 stores embeddings and others store values."""
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    file = as_gguf(source, "q4_0")
    bundle = exported(file, tmp_path / "bundle")
    weights = bundle.manifest.weights
    assert weights is not None
    assert {*weights.by_format["8/32/symmetric"]} == {"embed", "head"}
    assert len(weights.by_format["4/32/symmetric"]) == 8
    assert bundle.manifest.source["types"]["Q8_0"] == {
        "tensors": 2, "kept": 2, "formats": {"8/32/symmetric": 2},
    }  # fmt: skip
    mixed = tmp_path / "mixed.gguf"
    write_mixed(mixed, {"blk.0.attn_v.weight": "Q8_0", "blk.1.ffn_down.weight": "Q6_K"})
    bundle = exported(mixed, tmp_path / "other")
    weights = bundle.manifest.weights
    assert weights is not None
    assert str(weights.format_of("layers.0.qkv")) == "8/32/symmetric"
    assert str(weights.format_of("layers.1.down")) == "6/16/super_symmetric"
    assert str(weights.format_of("layers.1.qkv")) == "4/32/symmetric"
    assert bundle.manifest.source["types"]["Q6_K"] == {
        "tensors": 1, "kept": 1, "formats": {"6/16/super_symmetric": 1},
    }  # fmt: skip
    original, _ = opened(open_source(mixed))
    for name in ("layers.0.qkv", "layers.0.down", "layers.1.qkv", "layers.1.down"):
        expected = original.checkpoint.read(original.sources[name])
        np.testing.assert_array_equal(bundle.read_weight(name), expected)


def write_mixed(path: Path, kinds: Mapping[str, str], **options: Any) -> None:
    """Writes a file of Q4_0 with these tensors in other types; rows of 256 fill their blocks."""
    import tiny_gguf

    quantize = tiny_gguf.quantize
    writer = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, tensor: np.ndarray, raw_dtype: Any = None) -> None:
        if name in kinds:
            raw_dtype = gguf.GGMLQuantizationType[kinds[name]]
            plain = np.random.default_rng(1).standard_normal(SHAPES[name], np.float32)
            if kinds[name] == "Q6_K":
                blocks = np.random.default_rng(1).integers(0, 50, (SHAPES[name][0], 210), np.uint8)
                blocks[:, 208:] = np.array([0.01], np.float16).view(np.uint8)
                tensor = blocks
            else:
                tensor = quantize(plain, raw_dtype)
        writer(self, name, tensor, raw_dtype=raw_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        patch.setattr(tiny_gguf, "INTERMEDIATE", 256)
        write_gguf(path, kind="Q4_0", **options)


SHAPES = {"blk.0.attn_v.weight": (128, 128), "blk.1.ffn_down.weight": (128, 256)}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_strangers_file_runs(tmp_path: Path, architecture: str) -> None:
    from kvq_runtime.config import Sampling
    from kvq_runtime.engine import Engine

    file = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0", architecture=architecture)
    bundle = exported(file, tmp_path / "bundle")
    original, tokenizer = opened(open_source(file))
    ids = np.array(tokenizer.encode("def add(first, second):"))
    with Engine(bundle, threads=1) as engine, engine.session(k_bits=16, v_bits=16) as session:
        session.prefill(ids.tolist())
        (step,) = session.generate(1, sampling=Sampling(temperature=0), stop_ids=[])
    # Rounded activations may only decide between tokens that are nearly as likely.
    row = original.logits(ids)[-1]
    assert row[step.token] > row.max() - 0.1 * row.std()


# Split files


def split(file: Path, parts: int) -> list[Path]:
    """Deals the file's tensors out to several files, named as llama.cpp's tool names them."""
    reader = gguf.GGUFReader(file)
    made = [
        file.with_name(f"{file.stem}-{part + 1:05d}-of-{parts:05d}.gguf") for part in range(parts)
    ]
    for part, path in enumerate(made):
        writer = gguf.GGUFWriter(path, "llama")
        for name, field in reader.fields.items() if part == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                kind = field.types[0]
                sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), kind, sub)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", parts)
        for tensor in reader.tensors[part::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return made


def test_the_files_of_a_split_model_are_read_together(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    parts = split(file, 3)
    whole, _ = opened(open_source(file))
    for part in parts:
        actual, _ = opened(open_source(part))
        for name, source in whole.sources.items():
            np.testing.assert_array_equal(
                actual.checkpoint.read(actual.sources[name]), whole.checkpoint.read(source)
            )
    shutil.copy(parts[0], tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 files of a split model; they are"):
        open_source(tmp_path / "renamed.gguf")
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"tiny-00003-of-00003\.gguf is missing beside it"):
        open_source(parts[0])


# Refusals


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba', which kvq does not compute"),
        (
            {"llama.expert_shared_count": 2},
            r"llama\.expert_shared_count = 2 \(a mixture of experts\)",
        ),
        ({"llama.expert_count": 8}, r"lacks llama\.expert_used_count"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2},
            r"tensor 'blk\.0\.ffn_gate_inp\.weight' is missing",
        ),
        ({"llama.attention.temperature_scale": 0.5}, r"llama\.attention\.temperature_scale = 0.5"),
        ({"llama.attention.value_length": 32}, "keys of 64 channels and values of another"),
        ({"llama.attention.head_count": [4, 2]}, r"layers of different shapes \(llama\.attention"),
        ({"llama.rope.dimension_count": 32}, "rotates 32 of 64 channels of a head"),
        ({"llama.rope.scaling.type": "quadratic"}, "scales its rotary table by 'quadratic'"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "how its tokenizer cuts a text, 'kimi-k2', is not"),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of kind 'bert'; supported: gpt2, llama"),
        ({"tokenizer.ggml.eos_token_id": "end"}, r"eos_token_id is end, not a whole number"),
        ({"llama.embedding_length": "wide"}, r"llama\.embedding_length is wide, not a whole"),
        ({"llama.block_count": 3}, r"tensor 'blk\.2\.attn_norm\.weight' is missing"),
        ({"llama.block_count": 1}, r"tensor 'blk\.1\..*' of tiny\.gguf is not part of this"),
        ({"llama.block_count": 1 << 30}, r"block_count is 1073741824, not 1 to 4096"),
        ({"llama.feed_forward_length": 100}, r"wrong shape: tensor .*; its metadata asks for"),
    ],
)
def test_what_is_not_computed_is_refused_before_a_byte_is_written(
    tmp_path: Path, keys: Mapping[str, Any], words: str
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", keys=keys)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        export_model(file, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_other_versions_and_types_are_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    raw = file.read_bytes()
    file.write_bytes(raw[:4] + struct.pack(">I", 3) + raw[8:])
    with pytest.raises(UnsupportedModelError, match="GGUF file a big-endian file; kvq reads"):
        export_model(file, tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"there is no file .*nowhere\.gguf"):
        export_model(tmp_path / "nowhere.gguf", tmp_path / "bundle")


def test_a_file_with_infinite_scales_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q4_0")
    contents = read_gguf(file)
    (tensor,) = (row for row in contents.tensors if row.name == "blk.1.attn_output.weight")
    begin = -(-contents.header_bytes // contents.alignment) * contents.alignment
    with file.open("r+b") as stream:
        stream.seek(begin + tensor.offset + 18 * 8 * 5)
        stream.write(b"\x00\x7c")
    with pytest.raises(CheckpointError, match=r"attn_output.* holds NaN or infinite .*in row 5"):
        export_model(file, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
def test_mutated_headers_are_refused_or_read(tmp_path: Path) -> None:
    """Changes bytes, numbers and ends of the header at random: a clear error or a model results."""
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q4_0", num_layers=1)
    raw = file.read_bytes()
    header = read_gguf(file).header_bytes
    draw = random.Random(0)
    refused = 0
    mutant = tmp_path / "mutant.gguf"
    for _ in range(2000):
        changed = bytearray(raw)
        for _ in range(draw.randint(1, 3)):
            # Half of the mutations near the front, where the counts and the shapes are.
            at = min(draw.randrange(draw.choice((400, header))), len(changed) - 1)
            match draw.randrange(4):
                case 0:
                    changed[at] = draw.randrange(256)
                case 1:
                    changed[at : at + 8] = struct.pack("<Q", draw.choice(SIZES))
                case 2:
                    changed[at : at + 4] = struct.pack("<I", draw.choice((0, 1, 8, 9, 1 << 31)))
                case 3:
                    changed = changed[: draw.randrange(len(changed))] or bytearray(b"G")
        mutant.write_bytes(changed)
        try:
            opened(open_source(mutant))
        except ModelError:
            refused += 1
    assert refused > 500


SIZES = (0, 1, 255, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)


# Tokenizers; how they cut texts is in `test_gguf_tokenizers`


def test_the_file_names_parts_of_a_text(tmp_path: Path) -> None:
    """Gives ids for fill-in-the-middle that no family knows by name, and ends of turns."""
    names = tiny.CONTROL_TOKENS
    ids = {name: index for index, name in enumerate(names)}
    keys = {
        "tokenizer.ggml.bos_token_id": ids["<|im_start|>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.eot_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.fim_pre_token_id": ids["<|fim_suffix|>"],
        "tokenizer.ggml.fim_suf_token_id": ids["<|fim_prefix|>"],
        "tokenizer.ggml.fim_mid_token_id": ids["<|fim_middle|>"],
    }
    _, tokenizer = opened(open_source(write_gguf(tmp_path / "tiny.gguf", keys=keys)))
    assert tokenizer.control.start == (ids["<|im_start|>"],)
    assert tokenizer.eos_ids == (ids["<|endoftext|>"], ids["<|im_end|>"])
    fim = tokenizer.fim
    assert fim is not None
    assert (fim.prefix, fim.suffix) == (ids["<|fim_suffix|>"], ids["<|fim_prefix|>"])


def test_a_gguf_file_can_be_written_of_one(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    bundle = exported(file, tmp_path / "again", format="gguf", gguf_type="q8_0")
    actual, tokenizer = opened(open_source(bundle.path / GGUF_FILE))
    expected, expected_tokenizer = opened(open_source(file))
    for name, source in expected.sources.items():
        np.testing.assert_allclose(
            actual.checkpoint.read(actual.sources[name]),
            expected.checkpoint.read(source),
            rtol=0,
            atol=8e-3,
        )
    assert tokenizer.encode(TEXTS[0]) == expected_tokenizer.encode(TEXTS[0])


# Commands


def said(output: bytes) -> list[str]:
    return [line for line in output.decode().splitlines() if "exporting" not in line]


@pytest.mark.slow
def test_a_file_runs_on_our_kernels_and_says_so(tmp_path: Path) -> None:
    home = environment_in(tmp_path)
    file = str(write_gguf(tmp_path / "tiny.gguf", kind="Q8_0"))
    words = ("run", "-m", file, "--temp", "0", "-n", "4", "--json", "def add")
    first, again = (kvq(*words, home=home) for _ in range(2))
    assert answer(first)["text"] == answer(again)["text"]
    assert b"for the first time" in first.stderr
    assert said(again.stderr) == [
        "tiny.gguf runs on kvq's own kernels; --backend llama.cpp gives it to llama.cpp"
    ]
    finished = kvq(
        "export", file, "-o", str(tmp_path / "made"), "--json", "--no-quality", home=home
    )
    assert answer(finished)["source"]["types"]["Q8_0"]["formats"] == {"8/32/symmetric": 16}  # type: ignore[index]


def test_what_was_made_of_a_file_by_another_reading_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "checkpoint"
    folder.mkdir()
    before = [model_path._fingerprint(str(path)) for path in (file, folder)]
    monkeypatch.setattr(model_path, "GGUF_READING", model_path.GGUF_READING + 1)
    after = [model_path._fingerprint(str(path)) for path in (file, folder)]
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_llama_cpp_is_given_the_file_itself(tmp_path: Path) -> None:
    from kvq_apps.names.model_path import resolve_model

    file = write_gguf(tmp_path / "tiny.gguf")
    assert resolve_model(str(file), "llama.cpp") == file


def test_what_kvq_does_not_compute_is_left_to_llama_cpp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvq_apps.names.model_path import resolve_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", keys={"llama.expert_shared_count": 4})
    assert resolve_model(str(file)) == file
    assert "llama.cpp is to run tiny.gguf, kvq cannot" in capsys.readouterr().err


# Real files

REAL = Path(os.environ.get("KVQ_REAL_MODELS", "nowhere"))
# What the checkpoints of these models do, and what transformers leaves out of a GGUF file's.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "smollm2": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
            ],
        }
    },
    "qwen-coder": {"normalizer": {"type": "NFC"}},
}


@pytest.mark.real
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_real_file_is_the_checkpoint(name: str) -> None:
    if not (REAL / name / "tokenizer.json").exists():
        pytest.skip(f"KVQ_REAL_MODELS names no folder with {name}.gguf and the checkpoint {name}")
    actual, tokenizer = opened(open_source(REAL / f"{name}.gguf"))
    family, config, _ = open_source(REAL / name).config()
    expected, _ = opened(open_source(REAL / name))
    for canonical in ("layers.0.qkv", "layers.1.down", "layers.0.attn_norm", "final_norm"):
        np.testing.assert_array_equal(
            actual.checkpoint.read(actual.sources[canonical]),
            expected.checkpoint.read(expected.sources[canonical]),
        )
    made = TokenizerFiles.read(REAL / name)
    definition = json.dumps(json.loads(made.definition) | PUBLISHED[name])
    expected_tokenizer = Tokenizer.from_files(replace(made, definition=definition), family, config)
    files = sorted(Path(__file__).parent.glob("*.py"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    for text in (*TEXTS, *lines[::8]):
        for special in (False, True):
            ids = expected_tokenizer.encode(text, special=special)
            assert tokenizer.encode(text, special=special) == ids, repr(text)
