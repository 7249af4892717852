"""Writes a bundle's weights as a GGUF file for llama.cpp: the same codes, scales rounded to fp16.

4-bit codes become Q4_0 and 8-bit codes Q8_0 without requantising, so both engines multiply by the
same weights. Knows the two formats and no engine; the file has no tokenizer.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir

from kvq.errors import BackendError
from kvq_models.config import ModelConfig
from kvq_runtime.bundle import Bundle

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# llama.cpp's llama rotates neighbouring channels; the others rotate halves, as checkpoints do.
INTERLEAVED = ("llama",)
BLOCK = 32
# Counts the changes of what this file writes for the same bundle.
REVISION = 1
# Any base serves where factors describe the table: they are relative to it.
NEUTRAL_BASE = 10_000.0

Stored = Mapping[str, np.ndarray]
Tensor = tuple[str, np.ndarray, Any]


def refusal(config: ModelConfig) -> str | None:
    """Why llama.cpp cannot compute exactly this model from a GGUF file of ours, or None."""
    if config.model_type not in ARCHITECTURES:
        return f"it is a {config.model_type} model, not one of {', '.join(ARCHITECTURES)}"
    plain = config.model_type in INTERLEAVED or _plain_base(config) is not None
    scaled = config.has_long_rope or any(rope.factor != 1.0 for rope in config.ropes)
    traits = {
        "attention windows": any(layer.window_tokens for layer in config.layers),
        "rotary tables a GGUF file does not describe": scaled or not plain,
        f"rows that are not whole blocks of {BLOCK}": (
            config.hidden_size % BLOCK or config.intermediate_size % BLOCK
        ),
        "heads not as wide together as its hidden states, refused of qwen2": (
            config.model_type == "qwen2"
            and config.num_heads * config.head_dim != config.hidden_size
        ),
        "biases outside of q, k and v": config.output_bias or config.mlp_bias,
    }
    return next((f"it has {trait}" for trait, found in traits.items() if found), None)


def write_gguf(bundle: Bundle, path: Path) -> None:
    """Writes `path`, whole or not at all. Raises `BackendError` for a model it cannot describe."""
    import gguf

    reason = refusal(bundle.config)
    if reason is not None:
        raise BackendError(f"{bundle.path} has no GGUF form here: {reason}")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(partial, bundle.config.model_type)
    try:
        _add_metadata(writer, bundle.config)
        for name, array, kind in _tensors(bundle):
            writer.add_tensor(name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _add_metadata(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(2 * len(config.ropes[0].inv_freq))
    writer.add_rope_freq_base(_plain_base(config) or NEUTRAL_BASE)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _tensors(bundle: Bundle) -> Iterator[Tensor]:
    config, stored = bundle.config, _stored(bundle)
    embedding_bits, bits = bundle.manifest.weights.embedding_bits, bundle.manifest.weights.bits
    yield "token_embd.weight", *_matrix(stored, "embed", embedding_bits)
    if not config.tied_head:
        yield "output.weight", *_matrix(stored, "head", embedding_bits)
    yield _vector("output_norm.weight", stored["final_norm"])
    if config.model_type in INTERLEAVED and _plain_base(config) is None:
        yield _vector("rope_freqs.weight", _rope_factors(config))
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"blk.{layer}"
        for norm, name in _norms(config).items():
            yield _vector(f"{theirs}.{name}.weight", stored[f"{ours}.{norm}"])
        for weight, parts in _row_parts(config).items():
            blocks, kind = _matrix(stored, f"{ours}.{weight}", bits)
            bias = stored.get(f"{ours}.{weight}_bias")
            for name, rows in parts.items():
                yield f"{theirs}.{name}.weight", blocks[rows], kind
                if bias is not None:
                    yield _vector(f"{theirs}.{name}.bias", bias[rows])


def _norms(config: ModelConfig) -> dict[str, str]:
    norms = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}
    return norms | ({"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"} if config.qk_norm else {})


def _row_parts(config: ModelConfig) -> dict[str, dict[str, np.ndarray]]:
    """Canonical weight -> GGUF tensor -> the rows of ours it takes, in its order."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = np.split(np.arange(config.qkv_width), [q_rows, q_rows + kv_rows])
    if config.model_type in INTERLEAVED:
        q, k = (_interleaved(rows, config.head_dim) for rows in (q, k))
    gate, up = np.split(np.arange(2 * config.intermediate_size), 2)
    whole = np.arange(config.hidden_size)
    return {
        "qkv": {"attn_q": q, "attn_k": k, "attn_v": v},
        "o": {"attn_output": whole},
        "gate_up": {"ffn_gate": gate, "ffn_up": up},
        "down": {"ffn_down": whole},
    }


def _interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of heads whose channel pairs (i, i + D/2) become neighbours (2i, 2i + 1)."""
    return rows.reshape(-1, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


def _matrix(stored: Stored, name: str, bits: int) -> tuple[np.ndarray, Any]:
    """Blocks of fp16 scale and codes, uint8 [rows, bytes], and their GGUF type."""
    from gguf import GGMLQuantizationType

    scales = stored[f"{name}.scales"]
    codes = stored[f"{name}.codes"].reshape(*scales.shape, -1)
    per_block = codes.shape[-1] * 8 // bits // BLOCK
    scales = np.repeat(scales, per_block, axis=1).astype(np.float16)
    codes = codes.reshape(*scales.shape, -1)
    # Q4_0 pairs element i with i + 16, we pair neighbours; Q8_0 is signed, we add 128.
    codes = _halves_paired(codes) if bits == 4 else codes ^ np.uint8(128)
    blocks = np.concatenate([scales[..., None].view(np.uint8), codes], axis=-1)
    kind = GGMLQuantizationType.Q4_0 if bits == 4 else GGMLQuantizationType.Q8_0
    return blocks.reshape(len(scales), -1), kind


def _halves_paired(codes: np.ndarray) -> np.ndarray:
    """Nibbles (2i, 2i + 1) of uint8 [..., 16] -> (i, i + 16)."""
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], BLOCK)
    return nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4


def _vector(name: str, values: np.ndarray) -> Tensor:
    from gguf import GGMLQuantizationType

    return name, np.ascontiguousarray(values, np.float32), GGMLQuantizationType.F32


def _stored(bundle: Bundle) -> Stored:
    """The graph's initializers by name, read from the data file when they are asked for."""
    initializers = onnx_ir.load(bundle.model_path).graph.initializers
    return {
        name: value.const_value.numpy()
        for name, value in initializers.items()
        if value.const_value is not None
    }


def _plain_base(config: ModelConfig) -> float | None:
    """The base b of a table b^(-2i/d), or None where the table is another one."""
    table = np.asarray(config.ropes[0].inv_freq, np.float64)
    pairs = len(table)
    base = float(table[-1] ** (-pairs / (pairs - 1)))
    base = float(round(base)) if abs(base - round(base)) < 1e-3 * base else base
    plain = base ** (-np.arange(pairs) / pairs)
    return base if np.allclose(table, plain, rtol=1e-5, atol=0) else None


def _rope_factors(config: ModelConfig) -> np.ndarray:
    """What llama.cpp divides the frequencies of `NEUTRAL_BASE` by to get the model's."""
    table = np.asarray(config.ropes[0].inv_freq, np.float64)
    return NEUTRAL_BASE ** (-np.arange(len(table)) / len(table)) / table
