"""What the tests of `kvq bench` measure: every kind of model, small, and which peers are here."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvq import devices
from kvq.errors import BackendError
from kvq_apps.bench import model_shapes as shapes
from kvq_apps.bench.engines import PEERS, check_peers
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.write.random_bundle import random_bundle
from kvq_models.registry import family_for
from kvq_runtime.bundle.bundle import Bundle
from tiny_shape import COMMON

SCALED_ROPE = shapes.SHAPES["llama-3.2-1b"]["rope_scaling"]
CASES: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_scaling": {**SCALED_ROPE, "original_max_position_embeddings": 16},
    },
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "hidden_size": 256},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True},
}
# RMS of the difference from our logits with an unquantised cache, relative to their RMS. Every
# engine rounds activations to 8 bits before a matrix product, which costs about 0.015 by itself.
TOLERANCE = {
    ("llama.cpp", "f16"): 0.04,
    ("llama.cpp", "q8_0"): 0.05,
    ("llama.cpp", "q4_0"): 0.4,
    ("transformers", "fp32"): 0.03,
    ("transformers", "fp8"): 0.06,
}

# The other kinds in the table, made small: what a layer is stays as it is.
_SMALL = {
    **COMMON,
    "num_hidden_layers": 4,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_FEW = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_GEMMA = {
    "global_head_dim": 128,
    "sliding_window": 8,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "granite-2b": {},
    "smollm3-3b": {},
    "lfm2-1.2b": {"num_attention_heads": 2, "full_attn_idxs": [1, 3]},
    "qwen3.5-0.8b": _NET,
    "gemma-4-e2b": {
        **_GEMMA,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512,
    },
    "olmoe-1b-7b": {
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": _FEW,
    "qwen3.5-35b-a3b": {**_NET, **_FEW, "shared_expert_intermediate_size": 64},
    "qwen3-next-80b-a3b": {**_NET, **_FEW, "shared_expert_intermediate_size": 64},
    "lfm2-8b-a1b": {**_FEW, "num_attention_heads": 2, "full_attn_idxs": [1, 3]},
    "gemma-4-26b-a4b": {
        **_GEMMA,
        "num_global_key_value_heads": 1,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "gpt-oss-20b": {"num_local_experts": 4, "sliding_window": 8},
}
SHAPES = {
    **CASES,
    **{name: shapes.SHAPES[name] | _SMALL | fields for name, fields in KINDS.items()},
}

Make = Callable[..., Bundle]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Tiny bundles with random weights, each made once."""
    folder, made = tmp_path_factory.mktemp("bench"), {}

    def bundle(case: str, **weights: int) -> Bundle:
        key = f"{case}-{'-'.join(map(str, weights.values()))}"
        if key not in made:
            config_json = COMMON | SHAPES[case]
            config = family_for(config_json).config(config_json)
            overrides = shapes._published(config)
            options = ExportOptions(weights=WeightFormat(**weights, overrides=overrides))
            made[key] = random_bundle(config, folder / key, options=options)
        return made[key]

    return bundle


def need(engine: str, device: str = "cpu") -> None:
    """Skips a test whose engine is not installed, or whose device is not here."""
    if device != "cpu" and (reason := devices.why_not(device)):
        pytest.skip(reason)
    try:
        check_peers([engine] if engine in PEERS else [], device)
    except BackendError as error:
        pytest.skip(str(error))
