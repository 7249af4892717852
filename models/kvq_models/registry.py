"""Finds the family of a checkpoint and reads its config files; it has the table of families."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_models.config import ModelConfig
from kvq_models.decoder import token_ids
from kvq_models.family import Family
from kvq_models.keys import read_json

# Each family's module, by its model_type; most are called like it.
FAMILIES: Mapping[str, str] = {
    name: f"kvq_models.{name}:FAMILY"
    for name in """
    exaone4 gemma gemma2 gemma3_text gpt_oss granite lfm2 lfm2_moe lfm3 llama ministral3 mistral
    mixtral olmo2 olmo3 olmoe phi phi3 qwen2 qwen3 qwen3_moe smollm3 starcoder2
    """.split()  # noqa: SIM905 - a list would take a line a word
} | {
    "gemma4_text": "kvq_models.gemma4:FAMILY",
    "gemma4_unified_text": "kvq_models.gemma4:UNIFIED",
    "qwen3_5_moe_text": "kvq_models.qwen3_5_moe:FAMILY",
    "qwen3_5_text": "kvq_models.qwen3_5:FAMILY",
    "qwen3_next": "kvq_models.qwen3_5_moe:NEXT",
}

_GEMMA = {
    "vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072,
}  # fmt: skip
# Models that see images, of which only the language model is read, and the defaults of their
# text_config.
WRAPPERS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {**_GEMMA, "vocab_size": 262208},
    "gemma4": _GEMMA,
    "gemma4_unified": {**_GEMMA, "max_position_embeddings": 262144},
    "mistral3": {
        "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120,
        "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": 32768,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
}  # fmt: skip
# Keys that may stand beside a text_config and apply to it.
_SHARED = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")


def is_wrapper(config_json: Mapping[str, Any]) -> bool:
    """Returns whether the language model is a part of this model, with a config of its own."""
    model_type = config_json.get("model_type")
    return isinstance(model_type, str) and model_type in WRAPPERS


def text_config(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of the language model alone.

    Raises CheckpointError if it is missing.
    """
    if not is_wrapper(config_json):
        return config_json
    inner: object = config_json.get("text_config")
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"config.json of a {config_json['model_type']} model needs a text_config, which says "
            "what its language model is"
        )
    shared = {name: config_json[name] for name in _SHARED if name in config_json}
    # The value of tie_word_embeddings outside wins over the one inside.
    tied = {name: shared[name] for name in shared if name == "tie_word_embeddings"}
    return {**WRAPPERS[config_json["model_type"]], **shared, **cast(dict[str, Any], inner), **tied}


def family_for(config_json: Mapping[str, Any]) -> Family:
    """Returns the family of a `text_config`.

    Raises UnsupportedModelError, naming the supported ones.
    """
    model_type = config_json.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        problem = (
            "config.json names no model_type"
            if model_type is None
            else f"model_type {model_type!r} is not supported"
        )
        supported = sorted({*FAMILIES, *WRAPPERS})
        raise UnsupportedModelError(f"{problem}; supported: {', '.join(supported)}")
    module, name = FAMILIES[model_type].split(":")
    return getattr(importlib.import_module(module), name)


def read_checkpoint(
    folder: Path, excluded_key: str | None = None
) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """Returns family, config and config.json of a checkpoint folder, without `excluded_key`.

    End tokens of generation_config.json, if it exists, join those of config.json. Raises
    CheckpointError if a file is missing or is not JSON, UnsupportedModelError as `family_for` and
    `Family.config` do.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no config.json; give the folder of a Hugging Face checkpoint"
        )
    text_json = text_config(read_json(path))
    config_json = {key: value for key, value in text_json.items() if key != excluded_key}
    family = family_for(config_json)
    config = family.config(config_json)
    generation = folder / "generation_config.json"
    if generation.is_file():
        values = read_json(generation) | {"vocab_size": config.vocab_size}
        more = token_ids(values, "eos_token_id")
        ends = tuple(dict.fromkeys(config.eos_token_ids + more))
        config = dataclasses.replace(config, eos_token_ids=ends)
    return family, config, config_json
