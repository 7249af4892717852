"""Tiny GGUF files with random weights, as a stranger's converter would write them.

`write_gguf` covers the shapes the llama.cpp backend tells apart: plain and windowed attention,
positions of several dimensions, any tensor type the `gguf` package can write. `open_engine` opens
one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.engine import Engine
from tiny import CHATML, VOCAB_SIZE, byte_level_tokenizer

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, CONTEXT = 128, 192, 4, 2, 1024
NORMAL, CONTROL, UNUSED = 1, 3, 5
# What an architecture needs besides llama's metadata and tensors.
EXTRA_KEYS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"attention.sliding_window": 24},
    "qwen2vl": {"rope.dimension_sections": [8, 12, 12, 0]},
}
NORMS = {
    "qwen3": ("attn_q_norm", "attn_k_norm"),
    "gemma3": ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
}


def open_engine(path: Path) -> Engine:
    """Without the trial in another process; these files are our own."""
    return Engine(GgufFile.open(path).trusted(), threads=1)


def write_gguf(
    path: Path,
    *,
    kind: str = "F16",
    architecture: str = "llama",
    num_layers: int = 2,
    head_dim: int = 64,
    seed: int = 0,
    vocabulary: bool = True,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `path`; matrices in type `kind`, `keys` are added to the metadata or replace it."""
    metadata = _metadata(architecture, num_layers, head_dim)
    metadata |= _vocabulary() if vocabulary else {"tokenizer.ggml.model": "no_vocab"}
    metadata[f"{architecture}.vocab_size"] = VOCAB_SIZE
    metadata |= {
        f"{architecture}.{key}": value for key, value in EXTRA_KEYS.get(architecture, {}).items()
    }
    metadata |= keys or {}
    writer = gguf.GGUFWriter(path, str(metadata.pop("general.architecture", architecture)))
    for key, value in metadata.items():
        _add(writer, key, value)
    rng = np.random.default_rng(seed)
    for name, shape in _tensor_shapes(architecture, num_layers, head_dim).items():
        if len(shape) == 1:
            values = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
            writer.add_tensor(name, 0.1 * values if name.endswith("bias") else values)
            continue
        scale = {"token_embd.weight": 0.3 * shape[-1] ** 0.5, "output.weight": 3.0}.get(name, 1.4)
        values = (scale / shape[-1] ** 0.5 * rng.standard_normal(shape)).astype(np.float32)
        dtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, quantize(values, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(architecture: str, num_layers: int, head_dim: int) -> dict[str, Any]:
    sizes = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": num_layers,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10_000.0,
    }
    named = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return {"general.name": "tiny", "tokenizer.chat_template": CHATML, **named}


def _vocabulary() -> dict[str, Any]:
    definition = json.loads(byte_level_tokenizer().to_str())
    pieces = {token: piece for piece, token in definition["model"]["vocab"].items()}
    control = {token["id"]: token["content"] for token in definition["added_tokens"]}
    tokens = [(pieces | control).get(token, f"[PAD{token}]") for token in range(VOCAB_SIZE)]
    types = [
        CONTROL if token in control else NORMAL if token in pieces else UNUSED
        for token in range(VOCAB_SIZE)
    ]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in definition["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def _tensor_shapes(architecture: str, num_layers: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB_SIZE, HIDDEN),
        "output.weight": (VOCAB_SIZE, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    q_rows, kv_rows = HEADS * head_dim, KV_HEADS * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q_rows, HIDDEN),
        "attn_k.weight": (kv_rows, HIDDEN),
        "attn_v.weight": (kv_rows, HIDDEN),
        "attn_output.weight": (HIDDEN, q_rows),
        "ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }
    for norm in NORMS.get(architecture, ()):
        layer[f"{norm}.weight"] = (head_dim if norm.startswith("attn") else HIDDEN,)
    if architecture == "qwen2vl":
        layer |= {"attn_q.bias": (q_rows,), "attn_k.bias": (kv_rows,), "attn_v.bias": (kv_rows,)}
    for i in range(num_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
