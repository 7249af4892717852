"""Real models' shapes with random weights: speed and bytes without a download.

Owns the configurations, as their publishers wrote them, and the bundles made from them in the
cache folder. Knows no engine.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq.errors import UsageError, argument
from kvq.reference_linear import WIDTHS, BlockFormat, Grid
from kvq.settings import cache_folder
from kvq_apps.model_path import made_once
from kvq_models.config import ModelConfig
from kvq_models.registry import family_for

# What Qwen's two models with delta nets and experts have in common.
_DELTA_EXPERTS: Mapping[str, Any] = {
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 7,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "full_attention_interval": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": True,
        "eos_token_id": 248044,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 50279,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
    },
    "qwen3.5-35b-a3b": {
        **_DELTA_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        "eos_token_id": 248044,
    },
    "qwen3-next-80b-a3b": {
        **_DELTA_EXPERTS,
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 24,
        "full_attn_idxs": [2, 6, 10, 14, 18, 21],
        "num_dense_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "conv_L_cache": 3,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 7,
    },
    "gemma-4-e2b": {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "sliding_window": 512,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    "granite-2b": {
        "model_type": "granite",
        "vocab_size": 49155,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5_000_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "smollm3-3b": {
        "model_type": "smollm3",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128012,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def shape_json(text: str) -> Mapping[str, Any]:
    """The config.json of shape `NAME`, or `NAME:layers=N`: with its first layers alone.

    Raises `UsageError` naming what is possible.
    """
    name, _, options = text.partition(":")
    if name not in SHAPES:
        raise UsageError(f"{argument('--shape')} {name!r} is not known; choose {', '.join(SHAPES)}")
    if not options:
        return SHAPES[name]
    key, _, count = options.partition("=")
    most = SHAPES[name]["num_hidden_layers"]
    if key != "layers" or not count.isdecimal() or not 1 <= int(count) <= most:
        raise UsageError(
            f"{argument('--shape')} {text!r} is not possible; write {name}:layers=1 to {most}"
        )
    return {**SHAPES[name], **_first_layers(SHAPES[name], int(count))}


def _first_layers(shape: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What a shape's config says of its first layers alone."""
    said: dict[str, Any] = {"num_hidden_layers": count}
    if "layer_types" in shape:
        said["layer_types"] = shape["layer_types"][:count]
    if "full_attn_idxs" in shape:
        said["full_attn_idxs"] = [layer for layer in shape["full_attn_idxs"] if layer < count]
    if "num_dense_layers" in shape:
        said["num_dense_layers"] = min(shape["num_dense_layers"], count)
    if "num_kv_shared_layers" in shape:
        owners = shape["num_hidden_layers"] - shape["num_kv_shared_layers"]
        said["num_kv_shared_layers"] = max(0, count - owners)
    return said


def shape_config(name: str) -> ModelConfig:
    """The model of shape `name`, as in `shape_json`."""
    config_json = shape_json(name)
    return family_for(config_json).config(config_json)


def _published(config: ModelConfig) -> dict[str, BlockFormat]:
    """Formats of the matrices that a checkpoint has in 4 bits: the experts of gpt-oss."""
    if config.model_type != "gpt_oss":
        return {}
    sources = family_for({"model_type": config.model_type}).weights(config)
    form = BlockFormat(bits=4, block=32, grid=Grid.E2M1)
    return {name: form for name, one in sources.items() if "experts" in name and one.quantised}


def shape_bundle(name: str, *, bits: int = 4) -> Path:
    """The bundle of shape `name`, of weights of `bits`, in the cache folder, made the first time.

    Raises `ModelError`.
    """
    from kvq_export.config import ExportOptions, WeightFormat
    from kvq_export.random_bundle import random_bundle
    from kvq_runtime.manifest import VERSION

    config = shape_config(name)
    called = name.replace(":layers=", "-layers-")
    weights = WeightFormat(bits=bits, others=_published(config) if bits == min(WIDTHS) else {})
    options = ExportOptions(name=called, weights=weights)
    parts = [VERSION, asdict(weights), dict(shape_json(name))]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return made_once(
        cache_folder() / "shapes" / f"{called}-{digest[:12]}",
        "making random weights once in",
        lambda destination, progress: (
            random_bundle(config, destination, options=options, progress=progress).path
        ),
    )
