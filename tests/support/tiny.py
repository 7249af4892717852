"""Tiny random checkpoints and tokenizers for tests.

`make_checkpoint` covers every family and kind of rope scaling through transformers (slow import,
exact peer); `make_llama_checkpoint` writes a llama checkpoint with numpy alone, for tests that
need a model but no peer. Weights are scaled so that logits differ by several nats: a wrong sign
or position shows.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvq_models.config import Layer, ModelConfig, Norms
from kvq_models.family import Family, layer_shapes
from kvq_models.reference import Weights
from kvq_models.registry import family_for, read_checkpoint

VOCAB_SIZE = 384
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def add(first, second):\n    return first + second\n",
    "for index in range(10):\n    print(index, values[index])\n",
    "A page holds sixty-four tokens; a plan says how many bits each page keeps.",
    "Größe, café, naïve: words with more bytes than letters. 12345 67890",
)

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
# Families whose norms have weights around 0.
_AROUND_ZERO = ("gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.02 * i for i in range(24)],
    "long_factor": [1.0 + 0.3 * i for i in range(24)],
}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-linear": (
        "llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        },
    ),
    "llama-llama3": (
        "llama",
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "head_dim": 128,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "max_position_embeddings": 512,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "mistral-window": (
        "mistral",
        {"head_dim": 80, "num_key_value_heads": 1, "sliding_window": 24},
    ),
    "qwen2": ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1}),
    "qwen2-window": (
        "qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "phi": ("phi", {"hidden_size": 256, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5}),
    "phi3": (
        "phi3",
        {"hidden_size": 96, "head_dim": 96, "num_key_value_heads": 4, "sliding_window": 40},
    ),
    "phi3-longrope": (
        "phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 64,
            "rope_parameters": _LONGROPE,
        },
    ),
    "gemma": ("gemma", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 48,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.05,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.75,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    # As the large model is; as the small one is.
    "exaone4": (
        "exaone4",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "exaone4-whole": (
        "exaone4",
        {
            "num_hidden_layers": 3,
            "sliding_window": None,
            "layer_types": [_FULL] * 3,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": (
        "olmoe",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "sliding_window": 24,
            "intermediate_size": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "intermediate_size": 264,
            "block_multiple_of": 64,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-5": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 5,
            "layer_types": [*[_LINEAR] * 2, _FULL, _LINEAR, _FULL],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [3, 3, 2],
            },
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        {
            "num_hidden_layers": 3,
            "layer_types": [_LINEAR, _FULL, _LINEAR],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 96,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "num_hidden_layers": 3,
            "layer_types": [_LINEAR, _LINEAR, _FULL],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "mlp_only_layers": [1],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 96,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", _SLIDING, "conv", _FULL, _SLIDING],
            "sliding_window": 24,
            "conv_L_cache": 5,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 24}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 3}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
            "sliding_window": 24,
            "query_pre_attn_scalar": 48,
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    # As the small ones are: keys that others read, an embedding per layer; as the large ones are.
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "global_head_dim": 64,
            "layer_types": [*[_SLIDING] * 2, _FULL, *[_SLIDING] * 3, _FULL],
            "sliding_window": 24,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-keys": (
        "gemma4_unified_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "global_head_dim": 64,
            "layer_types": [_SLIDING, _SLIDING, _FULL],
            "sliding_window": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "global_head_dim": 64,
            "layer_types": [_SLIDING, _SLIDING, _FULL],
            "sliding_window": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": False,
        },
    ),
}


def make_checkpoint(
    case: str,
    folder: Path,
    *,
    dtype: str = "float32",
    shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """A random checkpoint of a row of CASES, saved by transformers, with a tokenizer.

    `overrides` replace config keys; `dtype` is that of the saved weights, `shard_size` the
    largest file.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_type, keys = CASES[case]
    values = json.loads(json.dumps({**COMMON, **keys, **overrides}))
    config = transformers.AutoConfig.for_model(model_type, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            offset = float(model_type in _AROUND_ZERO)
            mean, deviation = weight_statistics(
                name, tuple(parameter.shape), 0.0 if "linear_attn.norm" in name else offset
            )
            parameter.copy_(mean + deviation * draw)
            if model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                parameter.mul_(3)  # so that its limits are reached
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)
    return folder


def weight_statistics(
    name: str, shape: tuple[int, ...], norm_offset: float = 0.0
) -> tuple[float, float]:
    """Mean and standard deviation a random weight is drawn with, by its checkpoint name."""
    if "norm" in name:
        return 1.0 - norm_offset, 0.1
    if name.endswith("A_log"):  # states that last, some for ten tokens, some for a hundred
        return -3.0, 1.0
    if name.endswith("sinks"):
        return 1.0, 1.0
    if name.endswith((".bias", "proj_bias", "expert_bias")):
        return 0.0, 0.2
    if name.endswith(("router.scale", "per_expert_scale")):
        return 1.0, 0.3
    if "embed_tokens" in name:
        return 0.0, 0.3
    return 0.0, (3.0 if "lm_head" in name else 1.4) / shape[-1] ** 0.5


@lru_cache(maxsize=1)
def transformers_model(folder: Path) -> Any:
    """A checkpoint that no test changes, in transformers; the newest stays loaded."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def transformers_logits(folder: Path, ids: np.ndarray, **kwargs: Any) -> np.ndarray:
    """Logits float32 [T, vocab] that transformers computes in float32 for ids int64 [T]."""
    import torch

    with torch.no_grad():
        logits = transformers_model(folder)(torch.from_numpy(ids)[None], **kwargs).logits
        return logits[0].float().numpy()


def checkpoint_weights(folder: Path) -> Weights:
    """The canonical weights of a checkpoint folder (one or many files), float32, offsets added."""
    family, config, _ = read_checkpoint(folder)
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= read_safetensors(path)
    tensors = parts_of(family, config, tensors)
    canonical: dict[str, np.ndarray] = {}
    for name, source in family.weights(config).items():
        factors = np.ones(len(source.parts)) if source.factors is None else tensors[source.factors]
        parts = zip(source.parts, factors, strict=True)
        rows = [tensors[part].astype(np.float32) * np.float32(factor) for part, factor in parts]
        whole = np.concatenate(rows) + np.float32(source.offset)
        canonical[name] = np.float32(source.scale) * whole
    return canonical.__getitem__


_STACKED = re.compile(r"(.*\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")


def parts_of(
    family: Family, config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors, of those that hold several weights each by the name a family has for it.

    All of them lie in the tensors' memory.
    """
    by_name: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        stacked = _STACKED.fullmatch(name)
        rows = {name: tensor} if stacked is None else dict(enumerate(tensor))
        by_name |= {
            name if stacked is None else f"{stacked[1]}.{part_name}.{stacked[2]}": part
            for part_name, part in rows.items()
        }
    views = family.views(config)
    parts = {
        name: (by_name[view.tensor].T if view.across else by_name[view.tensor])[
            view.rows.start : view.rows.stop : view.rows.step
        ]
        for name, view in views.items()
        if view.tensor in by_name
    }
    fused = {view.tensor for view in views.values()}
    return {name: tensor for name, tensor in by_name.items() if name not in fused} | parts


def make_llama_checkpoint(
    folder: Path,
    *,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    **overrides: Any,
) -> Path:
    """A random llama checkpoint written with numpy alone; `overrides` replace config keys.

    `change` may alter the tensors, by their names, before they are written.
    """
    config_json = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **COMMON,
        **overrides,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    write_tokenizer(folder)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in llama_tensor_shapes(config_json).items():
        mean, deviation = weight_statistics(name, shape)
        values = mean + deviation * rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = values.astype(_DTYPES[dtype][0])
    change(tensors)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def altered(
    config: ModelConfig,
    *,
    mixer: Mapping[str, Any] = MappingProxyType({}),
    feed: Mapping[str, Any] = MappingProxyType({}),
    norms: Norms | None = None,
    **fields: Any,
) -> ModelConfig:
    """The config with these fields, and every layer of it with these of its parts."""
    layers = tuple(
        Layer(
            mixer=dataclasses.replace(layer.mixer, **mixer),
            feed=dataclasses.replace(layer.feed, **feed),
            norms=norms or layer.norms,
        )
        for layer in config.layers
    )
    return dataclasses.replace(config, **({"layers": layers} | fields))


def llama_tensor_shapes(config_json: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensor name -> shape of a llama checkpoint with this config.json."""
    family = family_for(config_json)
    config = family.config(config_json)
    kv_width = config.first_attention.kv_width
    rows = {
        "self_attn.q_proj": config.first_attention.width,
        "self_attn.k_proj": kv_width,
        "self_attn.v_proj": kv_width,
        "mlp.gate_proj": config.widest_feed,
        "mlp.up_proj": config.widest_feed,
    }
    embedding = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding}
    for layer in range(config.num_layers):
        for name, shape in layer_shapes(config, layer).items():
            for part in family.layer_weights[name]:
                first = rows.get(part.rpartition(".")[0], shape[0])
                shapes[f"model.layers.{layer}.{part}"] = (first, *shape[1:])
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied_head:
        shapes["lm_head.weight"] = embedding
    return shapes


_DTYPES: Mapping[str, tuple[Any, str]] = {
    "float32": (np.float32, "F32"),
    "float16": (np.float16, "F16"),
    "bfloat16": (ml_dtypes.bfloat16, "BF16"),
    "uint8": (np.uint8, "U8"),
}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """The safetensors format: u64 header length, JSON header, raw little-endian data."""
    codes = {np.dtype(dtype): code for dtype, code in _DTYPES.values()}
    header: dict[str, Any] = {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": codes[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, in the dtypes `write_safetensors` writes."""
    dtypes = {code: np.dtype(dtype) for dtype, code in _DTYPES.values()}
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
            dtypes[entry["dtype"]],
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE of fewer than VOCAB_SIZE tokens; <|endoftext|> has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=[AddedToken(token, special=True) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and a ChatML chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    case = sys.argv[2] if len(sys.argv) > 2 else "llama"
    make_checkpoint(case, target, dtype="bfloat16")
    print(f"wrote a random {case} checkpoint to {target}")
