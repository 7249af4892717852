"""The config that the metadata of a GGUF file describes, by way of a family's own config.json.

Owns which architectures of llama.cpp are families here, and what their keys are called there. A key
that is not known is refused by name: leaving it out could mean another model in silence.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvq.errors import CheckpointError, ModelError, UnsupportedModelError
from kvq_export.gguf_model import GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS
from kvq_models.config import ModelConfig, RopeConfig
from kvq_models.family import Family, FimNames
from kvq_models.registry import family_for
from kvq_runtime.gguf_format import Value

ARCHITECTURES: Mapping[str, str] = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "granite": "granite",
    "llama": "llama",
    "mistral3": "ministral3",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi2": "phi",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
# Those whose norms have a mean; config.json calls their epsilon by a name of the family's own.
_LAYER_NORMS: Mapping[str, str] = {"phi2": "layer_norm_eps", "starcoder2": "norm_epsilon"}
# What llama.cpp takes for the ends of an answer by their texts alone.
_ENDS = ("<|endoftext|>", "<|end_of_text|>")
_CONTROL = 3
_GEMMA3_PERIOD, _OLMO3_PERIOD = 6, 4
_LOCAL_BASE = 10_000.0
# Keys that say nothing of the arithmetic, or what a shape says too.
_HARMLESS = frozenset(("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"))
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class Metadata:
    """The keys of one model, each read once and checked; those never asked for can be named."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self.values = values
        self.architecture = self._text("general.architecture")
        self._asked: set[str] = set()

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, also where every layer has the same one. Raises `CheckpointError`."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise UnsupportedModelError(
                f"{self.path} has layers of different shapes ({self._name(key)} = "
                f"{value[:8].tolist()}); layers of one shape are supported"
            )
        if type(value) is not int:
            self._refuse(key, value, "a whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number, the shortest that rounds to the float32 in the file."""
        value = self._get(key, default)
        if isinstance(value, bool | str | list | np.ndarray) or not math.isfinite(value):
            self._refuse(key, value, "a finite number")
        return float(str(np.float32(value))) if isinstance(value, float) else float(value)

    def text(self, key: str, default: str) -> str:
        """A text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "a text")
        return value

    def flags(self, key: str) -> list[bool] | None:
        """A truth value per layer, where the file has such a list."""
        value = self._get(key, 0)
        if isinstance(value, np.ndarray):
            return [bool(item) for item in value]
        return None

    def token(self, key: str, tokens: int) -> int | None:
        """The id that `tokenizer.ggml.KEY_token_id` names, or None."""
        name = f"tokenizer.ggml.{key}_token_id"
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < tokens:
            raise CheckpointError(
                f"{self.path} is damaged: {name} is {value}, and it has {tokens} tokens"
            )
        return value

    def check_all_known(self) -> None:
        """Raises `UnsupportedModelError` for a key of the architecture that nobody asked for."""
        for name, value in self.values.items():
            prefix, _, key = name.partition(".")
            known = prefix != self.architecture or key in self._asked or key in _HARMLESS
            if not known and (len(value) if isinstance(value, list | np.ndarray) else value):
                what = " (a mixture of experts)" if key.startswith("expert_") else ""
                raise UnsupportedModelError(
                    f"{self.path} has {name} = {str(value)[:60]}{what}, which kvq does not compute "
                    f"for {self.architecture}"
                )

    def _get(self, key: str, default: Value | None) -> Value:
        self._asked.add(key)
        value = self.values.get(self._name(key), default)
        if value is None:
            raise CheckpointError(
                f"{self.path} lacks {self._name(key)}, which a model of architecture "
                f"{self.architecture} needs; convert it again"
            )
        return value

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            raise CheckpointError(f"{self.path} is damaged: {name} is {value}; convert it again")
        return value

    def _refuse(self, key: str, value: Any, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is damaged: {self._name(key)} is {value}, not {what}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufShapes:
    """What the tensors say: `shapes` by name, and the vectors of `ROPE_TENSORS` that are there."""

    shapes: Mapping[str, tuple[int, ...]]
    rope: Mapping[str, np.ndarray]


def read_config(
    metadata: Metadata, tensors: GgufShapes, tokens: list[str], types: np.ndarray
) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """Family, config and config.json, as `registry.read_checkpoint` gives them of a folder.

    The family knows the fill-in-the-middle tokens and ends of turns that the file names, too.
    Raises `UnsupportedModelError` naming what is not computed, `CheckpointError` for damage.
    """
    if metadata.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{metadata.path} is of architecture {metadata.architecture!r}, which kvq does not "
            f"compute; supported: {', '.join(ARCHITECTURES)}"
        )
    embedding = tensors.shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise CheckpointError(
            f"{metadata.path} has no token embedding: it is an adapter, or a part of a model"
        )
    config_json = _common(metadata, tensors, embedding[0], len(tokens))
    model_type = _model_type(metadata, tensors, tokens)
    config_json |= {"model_type": model_type, **_OWN[model_type](metadata, tensors)}
    metadata.check_all_known()
    family = _with_names(family_for(config_json), metadata, tokens, types)
    try:
        config = family.config(config_json)
    except ModelError as error:
        refused = isinstance(error, UnsupportedModelError)
        kind = UnsupportedModelError if refused else CheckpointError
        raise kind(f"{metadata.path}, its metadata as a config.json: {error}") from error
    ropes = (_rope_of_factors(metadata, tensors, config),) if tensors.rope else config.ropes
    scaling: dict[str, Any] = config_json["rope_scaling"] or {}
    if scaling.get("rope_type", "default") in ("default", "linear"):
        # llama.cpp multiplies by it whatever the table is; that of YaRN has its own way to say it.
        attention = metadata.real("rope.scaling.attn_factor", 1.0)
        ropes = tuple(replace(rope, factor=attention) for rope in ropes)
    return family, replace(config, ropes=ropes), config_json


def _model_type(metadata: Metadata, tensors: GgufShapes, tokens: list[str]) -> str:
    """The family; many models call themselves llama, and few say which one they are."""
    model_type = ARCHITECTURES[metadata.architecture]
    if model_type == "olmo2" and metadata.whole("attention.sliding_window", 0):
        return "olmo3"
    if model_type != "llama":
        return model_type
    if metadata.whole("expert_count", 0):
        return "mixtral"
    if "[INST]" in tokens or _window(metadata) is not None:
        return "mistral"
    biased = "blk.0.attn_q.bias" in tensors.shapes
    return "qwen2" if biased and "blk.0.attn_output.bias" not in tensors.shapes else "llama"


def _common(
    metadata: Metadata, tensors: GgufShapes, vocab_size: int, tokens: int
) -> dict[str, Any]:
    heads, head_dim = metadata.whole("attention.head_count"), _head_dim(metadata)
    if metadata.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{metadata.path} has keys of {head_dim} channels and values of another number; "
            "heads of one size are supported"
        )
    ends = [metadata.token(key, tokens) for key in ("eos", "eot", "eom")]
    return {
        "vocab_size": vocab_size,
        "hidden_size": metadata.whole("embedding_length"),
        "intermediate_size": metadata.whole("feed_forward_length"),
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.whole("context_length"),
        **_norm_eps(metadata),
        "tie_word_embeddings": "output.weight" not in tensors.shapes,
        "rope_theta": metadata.real("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(metadata, tensors),
        "bos_token_id": metadata.token("bos", tokens),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def _norm_eps(metadata: Metadata) -> dict[str, float]:
    name = _LAYER_NORMS.get(metadata.architecture)
    if name is not None:
        return {name: metadata.real("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon")}


def _head_dim(metadata: Metadata) -> int:
    heads = max(metadata.whole("attention.head_count"), 1)
    return metadata.whole("attention.key_length", metadata.whole("embedding_length") // heads)


def _scaling(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any] | None:
    """The scaling of a rotary table in the words of config.json; None where factors say it all."""
    kind = metadata.text("rope.scaling.type", "none")
    factor = metadata.real("rope.scaling.factor", metadata.real("rope.scale_linear", 1.0))
    context = metadata.whole("rope.scaling.original_context_length", 0)
    attention = metadata.real("rope.scaling.attn_factor", 1.0)
    fast, slow = (
        metadata.real(f"rope.scaling.yarn_beta_{end}", default)
        for end, default in (("fast", 32.0), ("slow", 1.0))
    )
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(
            f"{metadata.path} scales its rotary table by {kind!r}; supported: none, linear, yarn, "
            "longrope"
        )
    if kind == "longrope" and len(tensors.rope) < 2:
        raise CheckpointError(f"{metadata.path} scales by longrope and lacks the two tables of it")
    if tensors.rope or kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    settings: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": context or metadata.whole("context_length"),
        "beta_fast": fast,
        "beta_slow": slow,
    }
    if attention != 1:
        settings["attention_factor"] = attention * (0.1 * math.log(max(factor, 1)) + 1)
    return settings


def _rope_of_factors(metadata: Metadata, tensors: GgufShapes, config: ModelConfig) -> RopeConfig:
    """The table that tensors describe: what the frequencies of the base are divided by."""
    pairs = len(config.ropes[0].inv_freq)
    powers = metadata.real("rope.freq_base", 10_000.0) ** (-np.arange(pairs) / pairs)

    def table(name: str) -> tuple[float, ...]:
        factors = tensors.rope[name].astype(np.float64)
        if len(factors) != pairs or not (np.isfinite(factors) & (factors > 0)).all():
            raise CheckpointError(f"{metadata.path} is damaged: {name} holds no {pairs} factors")
        return tuple((powers / factors).astype(np.float32).tolist())

    short, long = ROPE_TENSORS[1:]
    if long not in tensors.rope:
        return RopeConfig(inv_freq=table(next(iter(tensors.rope))))
    context = metadata.whole("rope.scaling.original_context_length")
    return RopeConfig(
        inv_freq=table(short),
        long_inv_freq=table(long),
        original_context=context,
    )


def _window(metadata: Metadata) -> int | None:
    """Tokens that a windowed layer sees; none where the context is no longer."""
    window = metadata.whole("attention.sliding_window", 0)
    return window if 0 < window < metadata.whole("context_length") else None


# What each family has of its own.


def _whole_rotation(metadata: Metadata) -> None:
    head_dim = _head_dim(metadata)
    rotated = metadata.whole("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{metadata.path} rotates {rotated} of {head_dim} channels of a head; all of them are "
            f"supported for {metadata.architecture}"
        )


def _llama(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    return {
        "attention_bias": "blk.0.attn_output.bias" in tensors.shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors.shapes,
    }


def _mistral(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    return {"sliding_window": _window(metadata)}


def _experts(metadata: Metadata) -> dict[str, Any]:
    width = metadata.whole("feed_forward_length")
    return {
        "intermediate_size": metadata.whole("expert_feed_forward_length", width),
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
    }


def _mixtral(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {**_mistral(metadata, tensors), **_experts(metadata)}


def _ministral3(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    """A file of llama.cpp's own says by another key how YaRN scales cos and sin."""
    scaling = _scaling(metadata, tensors) or {"rope_type": "default"}
    multiplier = metadata.real("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier and scaling["rope_type"] == "yarn":
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    growth = metadata.real("attention.temperature_scale", 0.0)
    trained = metadata.whole(
        "rope.scaling.original_context_length", metadata.whole("context_length")
    )
    return {
        **_mistral(metadata, tensors),
        "rope_scaling": scaling | {"llama_4_scaling_beta": growth},
        "original_max_position_embeddings": trained,
    }


def _qwen2(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    if _window(metadata) is not None:
        raise UnsupportedModelError(
            f"{metadata.path} has a window of {_window(metadata)} tokens and does not say in which "
            "layers; export the original checkpoint"
        )
    return {}


def _qwen3(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {
        **_qwen2(metadata, tensors),
        "attention_bias": "blk.0.attn_output.bias" in tensors.shapes,
    }


def _qwen3_moe(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    experts = _experts(metadata)
    # llama.cpp's own guess where a file does not say it.
    guess = metadata.whole("feed_forward_length") // max(experts["num_experts_per_tok"], 1)
    width = metadata.whole("expert_feed_forward_length", guess)
    own = {"norm_topk_prob": True, "moe_intermediate_size": width}
    return {**_qwen3(metadata, tensors), **experts, **own}


def _rotated_share(metadata: Metadata) -> float:
    """Of the channels of a head those that rotate, so that as many come of it."""
    head_dim = _head_dim(metadata)
    rotated = metadata.whole("rope.dimension_count", head_dim)
    share = rotated / max(head_dim, 1)
    return math.nextafter(share, 2) if int(head_dim * share) < rotated else share


def _phi3(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {
        "partial_rotary_factor": _rotated_share(metadata),
        "sliding_window": _window(metadata),
    }


def _phi(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {"partial_rotary_factor": _rotated_share(metadata), "hidden_act": "gelu_pytorch_tanh"}


def _starcoder2(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    return {
        "use_bias": "blk.0.attn_output.bias" in tensors.shapes,
        "sliding_window": _window(metadata),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _smollm3(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    # llama.cpp has no key for it.
    return _llama(metadata, tensors) | {"no_rope_layer_interval": 4}


def _granite(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    """Multipliers that a file does not name, or names 0, are none."""
    return _llama(metadata, tensors) | {
        "embedding_multiplier": metadata.real("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.real("attention.scale", 0.0)
        or max(_head_dim(metadata), 1) ** -0.5,
        "residual_multiplier": metadata.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.real("logit_scale", 0.0) or 1.0,
    }


def _olmo2(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    return {}


def _olmo3(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _layer_types(metadata, _OLMO3_PERIOD),
    }


def _olmoe(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    return {**_experts(metadata), "norm_topk_prob": False}


def _gemma(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(metadata: Metadata, large_layers: int) -> float:
    """What queries are divided by the root of: in the model of so many layers it is another."""
    if metadata.whole("block_count") != large_layers:
        return float(_head_dim(metadata))
    heads = max(metadata.whole("attention.head_count"), 1)
    return float(metadata.whole("embedding_length") // heads)


def _layer_types(metadata: Metadata, period: int) -> list[str]:
    """Which layers have a window: as a list says, or all but every so many-th."""
    key, layers = "attention.sliding_window_pattern", metadata.whole("block_count")
    windowed = metadata.flags(key)
    if windowed is None:
        period = max(1, metadata.whole(key, period))
        windowed = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(windowed) != layers:
        raise CheckpointError(
            f"{metadata.path} is damaged: it says of {len(windowed)} layers whether they have a "
            f"window, and has {layers}"
        )
    return ["sliding_attention" if one else "full_attention" for one in windowed]


def _gemma2(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    # Every second layer has a window, whatever a list of ours says.
    metadata.flags("attention.sliding_window_pattern")
    return _gemma(metadata, tensors) | {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _query_scalar(metadata, GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    _whole_rotation(metadata)
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": _layer_types(metadata, _GEMMA3_PERIOD),
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", _LOCAL_BASE),
        "query_pre_attn_scalar": _query_scalar(metadata, GEMMA3_27B_LAYERS),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0),
    }


_OWN = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "ministral3": _ministral3,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "phi": _phi,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}


def _with_names(family: Family, metadata: Metadata, tokens: list[str], types: np.ndarray) -> Family:
    """The family with the tokens that the file names for parts of a text, before its own."""
    control = set(np.flatnonzero(types == _CONTROL).tolist())
    ends = [token for token in control if tokens[token] in _ENDS]
    return replace(
        family,
        fim_tokens=(*_fim_names(metadata, tokens), *family.fim_tokens),
        turn_ends=(*family.turn_ends, *(tokens[end] for end in sorted(ends))),
    )


def _fim_names(metadata: Metadata, tokens: list[str]) -> Iterator[FimNames]:
    found = {
        role: metadata.token(f"fim_{key}", len(tokens))
        for role, key in (
            ("prefix", "pre"), ("suffix", "suf"), ("middle", "mid"), ("pad", "pad"),
            ("repo", "rep"), ("file", "sep"),
        )
    }  # fmt: skip
    if None not in (found["prefix"], found["suffix"], found["middle"]):
        yield FimNames(
            **{role: None if token is None else tokens[token] for role, token in found.items()}  # type: ignore[arg-type]
        )
