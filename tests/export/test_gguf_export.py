"""GGUF exports: llama.cpp computes the model, or the export says that it does not.

llama.cpp itself is the peer: it loads every family's file, and its logits are compared with the
numpy forward pass over the checkpoint's own weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from kvq.errors import UnsupportedModelError
from kvq_export.config import WeightFormat
from kvq_export.gguf.gguf_model import gguf_model
from kvq_export.gguf.gguf_writer import file_logits
from kvq_export.read.checkpoint import Checkpoint
from kvq_models.config import Dense, Experts, ModelConfig, RopeConfig
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import family_for, read_checkpoint
from kvq_runtime.backends.llama_cache import padded
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import GGUF_FILE, GgufInfo
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from logits import divergence

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from exported_gguf import NATS, export, field, needs_llama, tensors  # noqa: E402

TOKENS = 120
# What a file of float16 may differ by: a logit (their standard deviation is near 3), and nats.
F16_LOGIT, F16_NATS = 0.12, 6e-5
PROMPTS, PROMPT_TOKENS, STEPS = 12, 8, 12

# The last layers with keys of their own are of both kinds, in the order llama.cpp asks for.
LAST_TWO = [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2]
LAST_TWO += ["full_attention"]
# Keys of a delta net are as wide as its values.
SQUARE_STATES = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Describes a row of `tiny.CASES` with some keys replaced, and its llama.cpp architecture.

    `flips`: the share of tokens for which rounding may choose other experts.
    """

    row: str
    architecture: str
    context: int = 512
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    slack: float = 1.0
    flips: float = 0.0

    def settled(self, expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drops the rows that differ most from both, so many as may have flipped."""
        order = np.argsort(np.abs(actual - expected).max(axis=1))
        rows = order[: len(order) - int(self.flips * len(order))]
        return expected[rows], actual[rows]


CASES = {
    "llama": Case(row="llama", architecture="llama"),
    "llama-bias": Case(row="llama-bias", architecture="llama"),
    "llama-linear": Case(row="llama-linear", architecture="llama"),
    "llama-llama3": Case(row="llama-llama3", architecture="llama"),
    "llama-yarn": Case(row="llama-yarn", architecture="llama", context=256),
    "mistral-window": Case(row="mistral-window", architecture="llama", context=24),
    "qwen2": Case(row="qwen2", architecture="llama"),
    "qwen2-square": Case(
        row="qwen2",
        architecture="qwen2",
        keys={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "qwen2-yarn": Case(
        row="qwen2",
        architecture="llama",
        keys={"rope_parameters": _YARN | {"attention_factor": 1.3}},
    ),
    "qwen2-window": Case(row="qwen2-window", architecture="llama", context=20),
    "qwen3": Case(row="qwen3", architecture="qwen3"),
    "qwen3-yarn": Case(
        row="qwen3",
        architecture="qwen3",
        keys={"rope_parameters": _YARN, "max_position_embeddings": 256},
        context=256,
    ),
    "phi3": Case(row="phi3", architecture="llama", context=40),
    "phi3-square": Case(
        row="phi3",
        architecture="phi3",
        keys={"hidden_size": 128, "head_dim": 32, "sliding_window": None},
    ),
    "phi3-longrope": Case(row="phi3-longrope", architecture="phi3"),
    "gemma3": Case(row="gemma3", architecture="gemma3"),
    # A head that does not repeat the last token; a local base that is not llama.cpp's default.
    "gemma3-untied": Case(
        row="gemma3",
        architecture="gemma3",
        keys={
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        dtype="bfloat16",
    ),
    "gemma": Case(row="gemma", architecture="gemma", slack=1.4),
    "gemma2": Case(row="gemma2", architecture="gemma2"),
    "smollm3": Case(row="smollm3", architecture="smollm3", keys={"no_rope_layer_interval": 4}),
    # A head that does not repeat the last token.
    "granite": Case(row="granite", architecture="granite", keys={"tie_word_embeddings": False}),
    "olmo2": Case(
        row="olmo2", architecture="olmo2", keys={"head_dim": 32, "tie_word_embeddings": False}
    ),
    "olmo3": Case(
        row="olmo3", architecture="olmo2", keys={"head_dim": 32, "tie_word_embeddings": False}
    ),
    "olmoe": Case(
        row="olmoe",
        architecture="olmoe",
        keys={
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "tie_word_embeddings": False,
        },
        slack=1.4,
        flips=0.2,
    ),
    "mixtral": Case(row="mixtral", architecture="llama", context=24, flips=0.1),
    "mixtral-whole": Case(
        row="mixtral", architecture="llama", keys={"sliding_window": None}, flips=0.1
    ),
    "qwen3-moe": Case(
        row="qwen3-moe", architecture="qwen3moe", keys={"mlp_only_layers": []}, flips=0.2
    ),
    "ministral3": Case(row="ministral3", architecture="mistral3"),
    "starcoder2": Case(
        row="starcoder2", architecture="starcoder2", context=24, keys={"hidden_size": 256}
    ),
    "phi": Case(row="phi", architecture="phi2"),
    "lfm2": Case(row="lfm2", architecture="lfm2", keys={"head_dim": 32}),
    "lfm2-moe": Case(row="lfm2-moe", architecture="lfm2moe", keys={"head_dim": 32}, flips=0.2),
    "gemma4": Case(row="gemma4", architecture="gemma4", keys={"layer_types": LAST_TWO}),
    "gemma4-keys": Case(row="gemma4-keys", architecture="gemma4"),
    "qwen3-5": Case(row="qwen3-5", architecture="qwen35", keys=SQUARE_STATES),
    "qwen3-5-even": Case(
        row="qwen3-5",
        architecture="qwen35",
        keys=SQUARE_STATES | {"linear_num_key_heads": 4, "tie_word_embeddings": False},
    ),
    "gemma4-experts": Case(row="gemma4-experts", architecture="gemma4", flips=0.2),
    "qwen3-5-moe": Case(row="qwen3-5-moe", architecture="qwen35moe", keys=SQUARE_STATES, flips=0.2),
    "qwen3-next": Case(
        row="qwen3-next",
        architecture="qwen3next",
        # Of three key heads two and two lie otherwise than three and three.
        keys=SQUARE_STATES
        | {"mlp_only_layers": [], "linear_num_key_heads": 3, "linear_num_value_heads": 6},
        flips=0.2,
    ),
    "gpt-oss": Case(row="gpt-oss", architecture="gpt-oss", flips=0.2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("gguf")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            case = CASES[name]
            tiny.make_checkpoint(case.row, folder / name, dtype=case.dtype, **case.keys)
        return folder / name

    return make


def expected_logits(source: Path, ids: np.ndarray) -> np.ndarray:
    family, config, values = read_checkpoint(source)
    if config.model_type == "gpt_oss":
        # llama.cpp's ramp is one of whole pairs.
        ramp = values["rope_parameters"] | {"truncate": True}
        config = family.config(values | {"rope_parameters": ramp})
    context = padded(len(ids))
    return forward(
        config,
        tiny.checkpoint_weights(source),
        ids,
        np.arange(len(ids)),
        PlainAttention(),
        long_rope=config.needs_long_rope(context),
    )


def actual_logits(bundle: Bundle, ids: np.ndarray) -> np.ndarray:
    return file_logits(bundle.path / GGUF_FILE, ids, 1)


# What llama.cpp computes


@needs_llama
@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_the_model(checkpoint: Callable[[str], Path], name: str) -> None:
    case, source = CASES[name], checkpoint(name)
    bundle = export(source, "f16")
    assert bundle.manifest.gguf == GgufInfo(
        type="f16", architecture=case.architecture, context_length=case.context
    )
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB_SIZE, min(TOKENS, case.context))
    reference = expected_logits(source, ids)
    expected, actual = case.settled(reference, actual_logits(bundle, ids))
    assert expected.std() > 2.5
    np.testing.assert_allclose(actual, expected, rtol=0, atol=case.slack * F16_LOGIT)
    assert divergence(expected, actual) < case.slack * F16_NATS
    nats = divergence(*case.settled(reference, actual_logits(export(source, "q8_0"), ids)))
    assert F16_NATS / 100 < nats < case.slack * NATS["q8_0"]


@needs_llama
@pytest.mark.parametrize("kind", ["bf16", "q4_0", "q4_k_m"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_other_types_stay_near(checkpoint: Callable[[str], Path], name: str, kind: str) -> None:
    source = checkpoint(name)
    ids = np.random.default_rng(1).integers(0, tiny.VOCAB_SIZE, TOKENS)
    bundle = export(source, kind)
    assert divergence(expected_logits(source, ids), actual_logits(bundle, ids)) < NATS[kind]
    assert [file.name for file in bundle.path.glob("*.gguf")] == [GGUF_FILE]


@needs_llama
@pytest.mark.parametrize("name", ["llama-llama3", "mistral-window", "qwen2", "qwen3", "gemma3"])
def test_both_engines_choose_the_same_tokens(checkpoint: Callable[[str], Path], name: str) -> None:
    """Takes a prompt whose tokens are decided, because both engines round activations."""
    source = checkpoint(name)
    weights = WeightFormat(bits=8, block=32, embedding_bits=8)
    bundle = export(source, "q8_0", format="both", weights=weights)
    assert (bundle.has_onnx, bundle.has_gguf) == (True, True)
    prompt, tokens = decided_prompt(source)
    with (
        Engine(bundle, threads=1, backend="onnx") as engine,
        engine.session(k_bits=16, v_bits=16, context_tokens=256) as session,
    ):
        session.prefill(prompt)
        steps = session.generate(STEPS, sampling=Sampling(temperature=0), stop_ids=[])
        assert [step.token for step in steps] == tokens
    # Given its own choices so far, llama.cpp's next choice is the greedy one.
    rows = actual_logits(bundle, np.array([*prompt, *tokens]))[len(prompt) - 1 : -1]
    assert rows.argmax(1).tolist() == tokens


def decided_prompt(source: Path) -> tuple[list[int], list[int]]:
    """Returns the random prompt whose greedy tokens lead the most, and these."""
    draw = np.random.default_rng(2)
    candidates = [
        greedy(source, draw.integers(0, tiny.VOCAB_SIZE, PROMPT_TOKENS)) for _ in range(PROMPTS)
    ]
    _, prompt, tokens = max(candidates)
    return prompt, tokens


def greedy(source: Path, prompt: np.ndarray) -> tuple[float, list[int], list[int]]:
    """Returns the smallest lead over the next best, the prompt and its greedy continuation."""
    _, config, _ = read_checkpoint(source)
    weight, attend = tiny.checkpoint_weights(source), PlainAttention()
    tokens, lead, ids, first = list[int](), math.inf, prompt, 0
    for _ in range(STEPS):
        positions = np.arange(first, first + len(ids))
        logits = forward(config, weight, ids, positions, attend)[-1]
        second, best = np.sort(logits)[-2:]
        lead = min(lead, float(best - second))
        tokens.append(int(logits.argmax()))
        first, ids = first + len(ids), np.array(tokens[-1:])
    return lead, prompt.tolist(), tokens


@needs_llama
@pytest.mark.parametrize(
    ("row", "gates"), [("qwen3-5", "ssm_beta ssm_alpha"), ("qwen3-next", "ssm_ba")]
)
def test_gates_of_a_delta_net_are_never_rounded(tmp_path: Path, row: str, gates: str) -> None:
    """Includes llama.cpp's own quantiser, which knows of no such gates."""
    keys = CASES[row].keys | {"hidden_size": 256}
    source = tiny.make_checkpoint(row, tmp_path / row, dtype="bfloat16", **keys)
    actual = {tensor.name: tensor for tensor in tensors(export(source, "q4_k_m"))}
    expected = {tensor.name: tensor for tensor in tensors(export(source, "bf16"))}
    assert actual["blk.0.attn_gate.weight"].tensor_type.name == "Q4_K"
    for name in gates.split():
        tensor_name = f"blk.0.{name}.weight"
        assert actual[tensor_name].tensor_type.name == "F32"
        np.testing.assert_array_equal(actual[tensor_name].data, expected[tensor_name].data)


@needs_llama
def test_rows_that_are_no_whole_blocks_fall_back(tmp_path: Path) -> None:
    source = tiny.make_llama_checkpoint(
        tmp_path / "source", hidden_size=80, intermediate_size=120, num_hidden_layers=1
    )
    ids = np.arange(60)
    for kind in ("q8_0", "q4_0", "q4_k_m"):
        bundle = export(source, kind)
        types = {tensor.name: tensor.tensor_type.name for tensor in tensors(bundle)}
        assert types["blk.0.ffn_down.weight"] == types["blk.0.attn_q.weight"] == "F16"
        # Its rows are the heads together: 256, whole blocks of any type.
        assert types["blk.0.attn_output.weight"] == {"q4_k_m": "Q4_K"}.get(kind, kind.upper())
        assert divergence(expected_logits(source, ids), actual_logits(bundle, ids)) < NATS[kind]


@pytest.mark.slow
def test_peak_memory_is_a_few_chunks_not_the_model(tmp_path: Path) -> None:
    source = tiny.make_llama_checkpoint(
        tmp_path / "source", dtype="bfloat16", shards=2, vocab_size=1 << 17, hidden_size=256
    )
    tracemalloc.start()
    try:
        bundle = export(source, "bf16", tokenizer=False)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bundle.manifest.files[GGUF_FILE].num_bytes > 128 << 20
    assert peak_bytes < 40 << 20


def test_a_float_file_holds_the_checkpoint(tmp_path: Path) -> None:
    """Checks names and values, and the order of heads as llama.cpp's llama rotates them."""
    source = tiny.make_llama_checkpoint(
        tmp_path / "source", attention_bias=True, mlp_bias=True, dtype="bfloat16", shards=2
    )
    weight = tiny.checkpoint_weights(source)
    bundle = export(source, "bf16")
    actual = {tensor.name: tensor for tensor in tensors(bundle)}
    rows = {"attn_q": slice(0, 256), "attn_k": slice(256, 384), "attn_v": slice(384, 512)}
    rows |= {"ffn_gate": slice(0, 192), "ffn_up": slice(192, 384)}
    sources = dict.fromkeys(("attn_q", "attn_k", "attn_v"), "qkv")
    sources |= {"ffn_gate": "gate_up", "ffn_up": "gate_up"}
    sources |= {"attn_output": "o", "ffn_down": "down"}
    for layer in range(bundle.config.num_layers):
        for name, canonical in sources.items():
            for ending, suffix in (("weight", ""), ("bias", "_bias")):
                tensor = actual[f"blk.{layer}.{name}.{ending}"]
                values = weight(f"layers.{layer}.{canonical}{suffix}")[rows.get(name, slice(None))]
                if name in ("attn_q", "attn_k"):
                    heads = values.reshape(-1, 2, 32, *values.shape[1:])
                    values = heads.swapaxes(1, 2).reshape(values.shape)
                assert tensor.tensor_type.name == ("BF16" if ending == "weight" else "F32")
                np.testing.assert_array_equal(floats(tensor), values)
    np.testing.assert_array_equal(floats(actual["token_embd.weight"]), weight("embed"))
    np.testing.assert_array_equal(floats(actual["output.weight"]), weight("head"))
    assert len(actual) == 3 + bundle.config.num_layers * (2 + 2 * len(sources))


def test_heads_of_a_delta_net_are_dealt_out(checkpoint: Callable[[str], Path]) -> None:
    """Expects the first value head of each key head, then the second of each; a decay is -exp."""
    source = checkpoint("qwen3-5")
    weight = tiny.checkpoint_weights(source)
    actual = {tensor.name: floats(tensor) for tensor in tensors(export(source, "f16"))}

    def dealt(values: np.ndarray, size: int) -> np.ndarray:
        heads = values.reshape(2, 2, size, *values.shape[1:])
        return heads.swapaxes(0, 1).reshape(values.shape)

    whole, gates, conv = (weight(f"layers.1.{name}") for name in ("in_proj", "gates", "conv"))
    expected = {
        "attn_qkv.weight": np.concatenate([whole[:128], dealt(whole[128:256], 32)]),
        "attn_gate.weight": dealt(whole[256:], 32),
        "ssm_beta.weight": dealt(gates[:4], 1),
        "ssm_alpha.weight": dealt(gates[4:], 1),
        "ssm_conv1d.weight": np.concatenate([conv[:128, 0], dealt(conv[128:, 0], 32)]),
        "ssm_a": dealt(-np.exp(weight("layers.1.decay")), 1),
        "ssm_dt.bias": dealt(weight("layers.1.dt_bias"), 1),
        "ssm_norm.weight": weight("layers.1.head_scale"),
        "ssm_out.weight": dealt(weight("layers.1.out_proj").T, 32).T,
        "post_attention_norm.weight": weight("layers.1.mlp_norm"),
    }
    for name, values in expected.items():
        half = values.astype(np.float16) if actual[f"blk.1.{name}"].ndim > 1 else values
        rough = {"rtol": 1e-3} if half is not values else {}
        np.testing.assert_allclose(actual[f"blk.1.{name}"], half, **rough)


def test_gates_lie_key_head_by_key_head(checkpoint: Callable[[str], Path]) -> None:
    """Expects what the value heads of each key head take in, then what they forget."""
    source = checkpoint("qwen3-next")
    weight = tiny.checkpoint_weights(source)
    actual = {tensor.name: floats(tensor) for tensor in tensors(export(source, "f16"))}
    gates, whole = weight("layers.1.gates"), weight("layers.1.in_proj")
    order = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    np.testing.assert_array_equal(actual["blk.1.ssm_ba.weight"], gates[order])
    np.testing.assert_allclose(actual["blk.1.attn_qkv.weight"], whole[:384], atol=1e-3)
    np.testing.assert_allclose(actual["blk.1.attn_gate.weight"], whole[384:], atol=1e-3)


def test_keys_say_how_layers_differ(checkpoint: Callable[[str], Path]) -> None:
    expected: dict[str, dict[str, Any]] = {
        "lfm2": {"attention.head_count_kv": [0, 0, 2, 0, 2], "shortconv.l_cache": 3},
        "lfm2-moe": {
            "attention.head_count_kv": [0, 0, 2, 0],
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "feed_forward_length": 192,
            "expert_feed_forward_length": 96,
        },
        "gemma4": {
            "attention.head_count_kv": 1,
            "attention.key_length": 64,
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "attention.shared_kv_layers": 3,
            "attention.sliding_window_pattern": [True] * 3 + [False, True, True, False],
            "rope.dimension_count": 64,
            "rope.dimension_count_swa": 32,
            "feed_forward_length": [192] * 4 + [384] * 3,
            "embedding_length_per_layer_input": 32,
        },
        "gemma4-keys": {
            "attention.head_count_kv": [2, 2, 1],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            # Left out it would be 30.
            "final_logit_softcapping": 0.0,
        },
        "qwen3-5": {
            "attention.head_count_kv": 2,
            "attention.recurrent_layers": [True, True, False, True, False],
            "rope.dimension_count": 16,
            "rope.dimension_sections": [3, 3, 2, 0],
            "ssm.state_size": 32,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 128,
        },
        "gemma4-experts": {
            "feed_forward_length": 192,
            "expert_feed_forward_length": 48,
            "expert_count": 8,
            "expert_used_count": 3,
        },
        "qwen3-5-moe": {
            "attention.recurrent_layers": [True, False, True],
            "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 64,
            "rope.dimension_sections": [3, 3, 2, 0],
        },
        "gpt-oss": {
            "attention.sliding_window": 24,
            "attention.sliding_window_pattern": [True, False],
            "rope.scaling.type": "yarn",
            "rope.scaling.original_context_length": 64,
            "expert_feed_forward_length": 96,
        },
    }
    for name, keys in expected.items():
        bundle = export(checkpoint(name), "f16")
        actual = {key: field(bundle, f"{CASES[name].architecture}.{key}") for key in keys}
        assert actual == keys
    names = {tensor.name: tensor for tensor in tensors(export(checkpoint("gemma4-keys"), "f16"))}
    assert "blk.1.attn_v.weight" in names
    assert "blk.2.attn_v.weight" not in names
    # An eighth of the pairs: of 64 channels a quarter turns.
    assert (names["rope_freqs.weight"].data > 1e20).tolist() == [False] * 8 + [True] * 24


def floats(tensor: Any) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("rows", [range(0, 256), range(256, 384), range(64, 448)])
def test_chunks_of_some_rows_are_whole_heads(tmp_path: Path, rows: range) -> None:
    """Reads a canonical weight of three parts; a head of 64 rows is never cut."""
    folder = tiny.make_llama_checkpoint(tmp_path)
    family, config, _ = read_checkpoint(folder)
    source = family.weights(config)["layers.1.qkv"]
    chunks = list(Checkpoint.open(folder).chunks(source, 100 * 128, rows, multiple=64))
    assert {len(chunk) for chunk in chunks} == {64}
    expected = tiny.checkpoint_weights(folder)("layers.1.qkv")[rows.start : rows.stop]
    np.testing.assert_array_equal(np.concatenate(chunks), expected)


# What llama.cpp cannot compute


def config_of(checkpoint: Callable[[str], Path], name: str, **changes: Any) -> ModelConfig:
    _, config, _ = read_checkpoint(checkpoint(name))
    return tiny.altered(config, **changes)


def of_row(row: str, **keys: Any) -> ModelConfig:
    """Returns the config of a row of `tiny.CASES` with these keys of its config.json."""
    model_type, defaults = tiny.CASES[row]
    values = {**tiny.COMMON, **defaults, **keys, "model_type": model_type}
    return family_for(values).config(values)


def with_experts(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns the config with these fields in all its experts."""
    layers = tuple(
        dataclasses.replace(layer, feed=dataclasses.replace(layer.feed, **changes))
        if isinstance(layer.feed, Experts)
        else layer
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=layers)


def test_what_llama_cpp_does_not_compute_is_refused_by_name(
    checkpoint: Callable[[str], Path],
) -> None:
    refusals: dict[str, ModelConfig] = {
        "as gemma3: it computes layers.0.mixer.softcap = 0.0 instead of 30.0": config_of(
            checkpoint, "gemma3", mixer={"softcap": 30.0}
        ),
        "as qwen3: it does not compute a bias on the attention's output": config_of(
            checkpoint, "qwen3", mixer={"output_bias": True}
        ),
        "as qwen3: it computes another rotary table": config_of(
            checkpoint, "qwen3", ropes=(RopeConfig(inv_freq=tuple(np.linspace(1, 0.1, 64))),)
        ),
        "as phi3: .* not as wide as its .*; not as llama: .* rotates .* channels": config_of(
            checkpoint, "phi3-longrope", hidden_size=96
        ),
        "as phi3: it does not compute a scale of attention of its own; not as llama": config_of(
            checkpoint, "phi3-longrope", mixer={"scale": 0.5}
        ),
        "as gemma: it does not compute an output head of its own": config_of(
            checkpoint, "gemma", tied_head=False
        ),
        "as olmo2: it does not compute an output head that is its": config_of(
            checkpoint, "olmo2", tied_head=True
        ),
        "as gemma2: it computes layers.1.mixer.window_tokens = 0 instead of 24": config_of(
            checkpoint, "gemma2", final_softcap=0.0, mixer={"window_tokens": 24}
        ),
        "as smollm3: it computes another rotary table": config_of(
            checkpoint, "smollm3", mixer={"rope": 1}
        ),
        "as qwen3moe: it computes .*layers.1.feed.width = 96 instead of 192": dataclasses.replace(
            mixed := config_of(checkpoint, "qwen3-moe"),
            layers=(mixed.layers[0], config_of(checkpoint, "qwen3").layers[0]),
        ),
        "as olmoe: it does not compute fewer heads of keys than": config_of(
            checkpoint, "olmoe", mixer={"kv_heads": 2}
        ),
        "as lfm2: it does not compute heads that together are not as wide": of_row("lfm2"),
        "as gemma4: it does not compute layers that read the keys of others": of_row("gemma4"),
        "as gemma4: it does not compute a table of per-layer embeddings": of_row(
            "gemma4", layer_types=LAST_TWO, vocab_size_per_layer_input=64
        ),
        "as gemma4: it does not compute layers that all see everything": of_row(
            "gemma4-keys", layer_types=["full_attention"] * 3
        ),
        "as qwen35moe: it has no tensor for shared_down_bias": with_experts(
            of_row("qwen3-5-moe", **SQUARE_STATES), shared=Dense(width=64, bias=True)
        ),
        "as gpt-oss: it does not compute attention whose output has no bias": of_row(
            "gpt-oss", attention_bias=False
        ),
        "as gpt-oss: it does not compute an output head that is its embedding": of_row(
            "gpt-oss", tie_word_embeddings=True
        ),
        "as qwen35: it does not compute delta nets whose keys are not as wide": of_row("qwen3-5"),
        "as qwen35: .* norms beside delta nets with another epsilon than 1e-06": of_row(
            "qwen3-5", **SQUARE_STATES, rms_norm_eps=1e-5
        ),
        "kvq writes GGUF files of gemma, .*llama, .* not of mamba": config_of(
            checkpoint, "llama", model_type="mamba"
        ),
    }
    for message, config in refusals.items():
        with pytest.raises(UnsupportedModelError, match=f'{message}.*format="onnx"'):
            gguf_model(config)


def test_scales_llama_cpp_has_no_key_for_go_into_weights(
    checkpoint: Callable[[str], Path],
) -> None:
    """Compares scales: a gemma3's embedding scale is rounded, llama.cpp takes the square root.

    An attention scale of its own goes into the norm of the queries, except for the 27B model, which
    llama.cpp knows by its depth.
    """
    config = config_of(checkpoint, "gemma3", hidden_size=640, embedding_scale=25.25)
    factors = {tensor.name: tensor.factor for tensor in gguf_model(config).tensors}
    assert factors["token_embd.weight"] * math.sqrt(640) == pytest.approx(25.25, rel=1e-12)
    assert factors["output_norm.weight"] * factors["token_embd.weight"] == pytest.approx(1)
    assert factors["blk.0.attn_q_norm.weight"] == pytest.approx(math.sqrt(64 / 48))
    untied = {
        tensor.name: tensor.factor
        for tensor in gguf_model(dataclasses.replace(config, tied_head=False)).tensors
    }
    assert untied["token_embd.weight"] == factors["token_embd.weight"]
    assert untied["output.weight"] == untied["output_norm.weight"] == 1
    changed = [name for name, factor in factors.items() if factor != 1]
    assert len(changed) == 2 + config.num_layers
    deep = tiny.altered(
        dataclasses.replace(config, layers=config.layers[:1] * 62),
        mixer={"scale": (640 // 4) ** -0.5},
    )
    factors = {tensor.name: tensor.factor for tensor in gguf_model(deep).tensors}
    assert factors["blk.61.attn_q_norm.weight"] == 1
    plain = config_of(checkpoint, "llama-bias", mixer={"scale": 0.5}, embedding_scale=3.0)
    factors = {tensor.name: tensor.factor for tensor in gguf_model(plain).tensors}
    changed = {name: factor for name, factor in factors.items() if factor != 1}
    layers = range(plain.num_layers)
    queries = {f"blk.{i}.attn_q.{end}" for i in layers for end in ("weight", "bias")}
    ends = {"token_embd.weight": 3.0, "output_norm.weight": 1 / 3}
    assert changed == {**ends, **dict.fromkeys(queries, 4.0)}


def test_a_yarn_table_of_other_speeds_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Changes beta_fast, which llama.cpp's qwen3 does not read: its table would be another one."""
    source = checkpoint("qwen3-yarn")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["beta_fast"] = 8.0
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="computes another rotary table"):
        export(tmp_path, "q8_0")


def test_a_window_ends_the_context(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = export(checkpoint("mistral-window"), "q8_0")
    assert "no window of 24 tokens for this family: the GGUF file says 24" in caplog.text
    assert field(bundle, "llama.context_length") == 24
    assert field(bundle, "llama.attention.sliding_window") == 24
    wide = config_of(checkpoint, "mistral-window", mixer={"window_tokens": 4096})
    assert gguf_model(wide).context_length == wide.context_length
    windows = field(export(checkpoint("gemma3"), "q8_0"), "gemma3.attention.sliding_window_pattern")
    assert windows == [True, True, False, True]
