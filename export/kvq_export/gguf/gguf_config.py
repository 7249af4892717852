"""Reads the config that a GGUF file's metadata describes, by way of a family's config.json.

Owns which architectures of llama.cpp are families here, and what their keys are called there. A key
that is not known is refused by name: leaving it out could silently mean another model.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvq.errors import CheckpointError, ModelError, UnsupportedModelError
from kvq_export.gguf.gguf_architectures import ARCHITECTURES
from kvq_models.config import ModelConfig, RopeConfig
from kvq_models.family import MOST_LAYERS, Family, FimNames
from kvq_models.registry import family_for
from kvq_runtime.bundle.gguf_file import CONTROL, FIM_KEYS, TOKENIZER
from kvq_runtime.bundle.gguf_format import Value

logger = logging.getLogger(__name__)

# The family of each architecture.
FAMILIES = {name: row.family for name, row in ARCHITECTURES.items()}
# What config.json calls the epsilon of norms, and GGUF their kind, where not as in most.
_EPSILONS = {
    "phi2": ("layer_norm_eps", ""), "starcoder2": ("norm_epsilon", ""),
    "lfm2": ("norm_eps", "rms_"), "lfm2moe": ("norm_eps", "rms_"),
}  # fmt: skip
# Tokens that llama.cpp takes for the ends of an answer by their texts alone.
_ENDS = ("<|endoftext|>", "<|end_of_text|>")
# llama.cpp takes a gemma2 or gemma3 of this depth for the 27B model, whose scale is by hidden size.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
# llama.cpp's number for shares by sigmoids.
SIGMOID_GATING = 2
_GEMMA3_PERIOD = 6
# A pair whose frequency is divided by as much does not turn.
_STILL = 1e20
_LOCAL_BASE = 10_000.0
# Keys that say nothing of the arithmetic, or what a shape says too.
_HARMLESS = frozenset(("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"))
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class Metadata:
    """Reads the keys of one model, each checked; can name those that were never asked for."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self.values = values
        name = values.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"{path} is damaged: general.architecture is {name}; convert it again"
            )
        self.architecture = name
        self._keys_read: set[str] = set()
        self._absent: set[str] = set()

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns a whole number, also where every layer has the same one.

        Raises `CheckpointError`.
        """
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise UnsupportedModelError(
                f"{self.path} has layers of different shapes ({self._name(key)} = "
                f"{value[:8].tolist()}); layers of one shape are supported"
            )
        if type(value) is not int:
            self.refuse(key, value, "a whole number")
        return value

    def wholes(self, key: str, default: int | None = None) -> list[int]:
        """Returns a whole number for every layer, also where the file has one for all."""
        value = self._get(key, default)
        layers = self.whole("block_count")
        if not isinstance(value, np.ndarray):
            return [self.whole(key, default)] * min(layers, MOST_LAYERS)
        if value.dtype.kind not in "iu" or len(value) != layers:
            self.refuse(key, value[:8].tolist(), f"{layers} whole numbers")
        return value.tolist()

    def real(self, key: str, default: float | None = None) -> float:
        """Returns a finite number, the shortest that rounds to the float32 in the file."""
        value = self._get(key, default)
        if isinstance(value, bool | str | list | np.ndarray) or not math.isfinite(value):
            self.refuse(key, value, "a finite number")
        return float(str(np.float32(value))) if isinstance(value, float) else float(value)

    def text(self, key: str, default: str) -> str:
        """Returns a text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self.refuse(key, value, "a text")
        return value

    def flags(self, key: str) -> list[bool] | None:
        """Returns a truth value per layer, where the file has such a list."""
        value = self._get(key, 0)
        return [bool(item) for item in value] if isinstance(value, np.ndarray) else None

    def token(self, key: str, tokens: int) -> int | None:
        """Returns the id that `tokenizer.ggml.KEY_token_id` names, or None.

        One that no token has, such as -1, counts as absent; the first look at it is logged.
        """
        name = f"{TOKENIZER}{key}_token_id"
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not int:
            raise CheckpointError(f"{self.path} is damaged: {name} is {value}, not a whole number")
        if 0 <= value < tokens:
            return value
        if name not in self._absent:
            self._absent.add(name)
            logger.warning(
                "%s: %s is %d, and the file has %d tokens: it counts as absent",
                self.path,
                name,
                value,
                tokens,
            )
        return None

    def check_all_known(self) -> None:
        """Raises `UnsupportedModelError` for a key of the architecture that nobody asked for."""
        for name, value in self.values.items():
            prefix, _, key = name.partition(".")
            known = prefix != self.architecture or key in self._keys_read or key in _HARMLESS
            if not known and (len(value) if isinstance(value, list | np.ndarray) else value):
                note = " (a mixture of experts)" if key.startswith("expert_") else ""
                raise UnsupportedModelError(
                    f"{self.path} has {name} = {str(value)[:60]}{note}, which kvq does not compute "
                    f"for {self.architecture}"
                )

    def _get(self, key: str, default: Value | None) -> Value:
        self._keys_read.add(key)
        value = self.values.get(self._name(key), default)
        if value is None:
            raise CheckpointError(
                f"{self.path} lacks {self._name(key)}, which a model of architecture "
                f"{self.architecture} needs; convert it again"
            )
        return value

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        """Raises `CheckpointError`: a key is not what is `expected`."""
        raise CheckpointError(
            f"{self.path} is damaged: {self._name(key)} is {value}, not {expected}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufShapes:
    """Holds what the tensors say: `shapes` by name, and the vectors of `ROPE_TENSORS`."""

    shapes: Mapping[str, tuple[int, ...]]
    rope: Mapping[str, np.ndarray]

    @property
    def output_biased(self) -> bool:
        """Tells whether the attention's output has a bias."""
        return "blk.0.attn_output.bias" in self.shapes


_Reader = Callable[[Metadata, GgufShapes], dict[str, Any]]


def read_config(
    metadata: Metadata, tensors: GgufShapes, tokens: list[str], types: np.ndarray
) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """Returns family, config and config.json, as `registry.read_checkpoint` does for a folder.

    The family knows the fill-in-the-middle tokens and ends of turns that the file names, too.
    Raises `UnsupportedModelError` naming what is not computed, `CheckpointError` for damage.
    """
    if metadata.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{metadata.path} is of architecture {metadata.architecture!r}, which kvq does not "
            f"compute; supported: {', '.join(sorted(FAMILIES))}"
        )
    embedding = tensors.shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise CheckpointError(
            f"{metadata.path} has no token embedding: it is an adapter, or a part of a model"
        )
    # Lists of this length are made.
    if not 1 <= (layers := metadata.whole("block_count")) <= MOST_LAYERS:
        metadata.refuse("block_count", layers, f"1 to {MOST_LAYERS}")
    config_json = _common(metadata, tensors, embedding[0], len(tokens))
    model_type = _model_type(metadata, tensors, tokens)
    parts = _FAMILY_KEYS[model_type]
    if _some_rotated not in parts:
        _check_whole_rotation(metadata)
    config_json["model_type"] = model_type
    for part in parts:
        config_json |= part if isinstance(part, dict) else part(metadata, tensors)
    metadata.check_all_known()
    family = _with_names(family_for(config_json), metadata, tokens, types)
    try:
        config = family.config(config_json)
    except ModelError as error:
        refused = isinstance(error, UnsupportedModelError)
        kind = UnsupportedModelError if refused else CheckpointError
        raise kind(f"{metadata.path}, its metadata as a config.json: {error}") from error
    ropes = config.ropes
    if tensors.rope:
        ropes = (_rope_of_factors(metadata, tensors, config), *ropes[1:])
    scaling: dict[str, Any] = config_json["rope_scaling"] or {}
    if scaling.get("rope_type", "default") in ("default", "linear"):
        # llama.cpp multiplies any table by it; a YaRN table has it in its settings already.
        attention = metadata.real("rope.scaling.attn_factor", 1.0)
        ropes = tuple(replace(rope, factor=attention) for rope in ropes)
    return family, replace(config, ropes=ropes), config_json


def _model_type(metadata: Metadata, tensors: GgufShapes, tokens: list[str]) -> str:
    """Returns the family; many models call themselves llama, and few say which one they are."""
    model_type = FAMILIES[metadata.architecture]
    if model_type == "olmo2" and metadata.whole("attention.sliding_window", 0):
        return "olmo3"
    if model_type != "llama":
        return model_type
    if metadata.whole("expert_count", 0):
        return "mixtral"
    if "[INST]" in tokens or _window(metadata) is not None:
        return "mistral"
    biased = "blk.0.attn_q.bias" in tensors.shapes
    return "qwen2" if biased and not tensors.output_biased else "llama"


def _common(
    metadata: Metadata, tensors: GgufShapes, vocab_size: int, tokens: int
) -> dict[str, Any]:
    epsilon, norm = _EPSILONS.get(metadata.architecture, ("rms_norm_eps", "rms_"))
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
        "intermediate_size": _least(metadata, "feed_forward_length", _width_of_experts(metadata)),
        "num_hidden_layers": metadata.whole("block_count") - draft_layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": _least(metadata, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.whole("context_length"),
        epsilon: metadata.real(f"attention.layer_norm_{norm}epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors.shapes,
        "rope_theta": metadata.real("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(metadata, tensors),
        "bos_token_id": metadata.token("bos", tokens),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def draft_layers(metadata: Metadata) -> int:
    """Returns how many layers behind the model's own are of a draft head."""
    drafts = ARCHITECTURES[metadata.architecture].drafting
    return metadata.whole("nextn_predict_layers", 0) if drafts else 0


def _width_of_experts(metadata: Metadata) -> int | None:
    """Returns the width of experts: where every MLP is one, few files say the width of others."""
    key = "expert_feed_forward_length"
    return metadata.whole(key) if f"{metadata.architecture}.{key}" in metadata.values else None


def _least(metadata: Metadata, key: str, default: int | None = None) -> int:
    """Returns what every layer has, or, where layers may differ, the least that is not 0."""
    if not ARCHITECTURES[metadata.architecture].mixed:
        return metadata.whole(key, default)
    return min((number for number in metadata.wholes(key, default) if number), default=0)


def _head_dim(metadata: Metadata) -> int:
    heads = max(metadata.whole("attention.head_count"), 1)
    return metadata.whole("attention.key_length", metadata.whole("embedding_length") // heads)


def _scaling(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any] | None:
    """Returns a rotary table's scaling as config.json has it; None where factors say it all."""
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
    """Returns the table that tensors describe: what the frequencies of the base are divided by."""
    pairs = len(config.ropes[0].inv_freq)
    powers = metadata.real("rope.freq_base", 10_000.0) ** (-np.arange(pairs) / pairs)

    def table(name: str) -> tuple[float, ...]:
        factors = tensors.rope[name].astype(np.float64)
        if len(factors) != pairs or not (np.isfinite(factors) & (factors > 0)).all():
            raise CheckpointError(f"{metadata.path} is damaged: {name} holds no {pairs} factors")
        table = np.where(factors < _STILL, powers / factors, 0)
        return tuple(table.astype(np.float32).tolist())

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
    """Returns the tokens that a windowed layer sees; None where the context is no longer."""
    window = metadata.whole("attention.sliding_window", 0)
    return window if 0 < window < metadata.whole("context_length") else None


def _check_whole_rotation(metadata: Metadata) -> None:
    head_dim = _head_dim(metadata)
    rotated = metadata.whole("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{metadata.path} rotates {rotated} of {head_dim} channels of a head; all of them are "
            f"supported for {metadata.architecture}"
        )


# Parts of what families' config.json have beyond `_common`.


def _attention_bias(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {"attention_bias": tensors.output_biased}


def _use_bias(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {"use_bias": tensors.output_biased}


def _biases(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    biased = "blk.0.ffn_down.bias" in tensors.shapes
    return {"attention_bias": tensors.output_biased, "mlp_bias": biased}


def _one_window(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {"sliding_window": _window(metadata)}


def _no_window(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    if _window(metadata) is not None:
        raise UnsupportedModelError(
            f"{metadata.path} has a window of {_window(metadata)} tokens and does not say in which "
            "layers; export the original checkpoint"
        )
    return {}


def _some_windows(metadata: Metadata, tensors: GgufShapes, *, period: int) -> dict[str, Any]:
    """Reads which layers have a window: as a list says, or all but every so many-th."""
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
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if has_window else "full_attention" for has_window in windowed
        ],
    }


def _some_rotated(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    """Reads the share of a head's channels that rotate, so that as many come of it."""
    head_dim = _head_dim(metadata)
    rotated = metadata.whole("rope.dimension_count", head_dim)
    share = rotated / max(head_dim, 1)
    is_less = int(head_dim * share) < rotated
    return {"partial_rotary_factor": math.nextafter(share, 2) if is_less else share}


def _mixture(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    """Reads experts that take the place of every MLP."""
    width = metadata.whole("feed_forward_length", _width_of_experts(metadata))
    return {
        "intermediate_size": metadata.whole("expert_feed_forward_length", width),
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
    }


def _experts(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen3_moe(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    # llama.cpp's own guess where a file does not say it.
    chosen = max(metadata.whole("expert_used_count"), 1)
    width = metadata.whole(
        "expert_feed_forward_length", metadata.whole("feed_forward_length", 0) // chosen
    )
    return {"norm_topk_prob": True, "moe_intermediate_size": width}


def _shared_expert(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    width = metadata.whole("expert_feed_forward_length")
    width = metadata.whole("expert_shared_feed_forward_length", width)
    return {"shared_expert_intermediate_size": width}


def _ministral3(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    """Reads how YaRN scales cos and sin, which llama.cpp's own files say by another key."""
    scaling = _scaling(metadata, tensors) or {"rope_type": "default"}
    multiplier = metadata.real("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier and scaling["rope_type"] == "yarn":
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    growth = metadata.real("attention.temperature_scale", 0.0)
    context = metadata.whole("context_length")
    trained = metadata.whole("rope.scaling.original_context_length", context)
    return {
        "rope_scaling": scaling | {"llama_4_scaling_beta": growth},
        "original_max_position_embeddings": trained,
    }


def _granite(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    """Reads the multipliers; one that a file does not name, or names 0, is none."""
    scale = max(_head_dim(metadata), 1) ** -0.5
    return {
        "embedding_multiplier": metadata.real("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.real("attention.scale", 0.0) or scale,
        "residual_multiplier": metadata.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.real("logit_scale", 0.0) or 1.0,
    }


def _lfm2(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    attends = metadata.wholes("attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in attends],
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    gating = metadata.whole("expert_gating_func")
    if gating != SIGMOID_GATING:
        raise UnsupportedModelError(
            f"{metadata.path} chooses experts by function {gating}; {SIGMOID_GATING}, sigmoids, is "
            f"supported for {metadata.architecture}"
        )
    return {"num_dense_layers": metadata.whole("leading_dense_block_count", 0)}


def _gpt_oss(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    """Does not cut the ramp of the YaRN table to whole pairs; llama.cpp has no key for that."""
    scaling = _scaling(metadata, tensors) or {"rope_type": "default"}
    whole = {"truncate": False} if scaling["rope_type"] == "yarn" else {}
    return {"rope_scaling": scaling | whole}


def _qwen3_5(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    # In text all parts of a position are one number, however pairs are dealt out to them.
    metadata.flags("rope.dimension_sections")
    layers = metadata.whole("block_count") - draft_layers(metadata)
    recurrent = metadata.flags("attention.recurrent_layers")
    kinds = [
        "linear_attention" if recurs else "full_attention" for recurs in (recurrent or ())[:layers]
    ]
    heads = metadata.whole("ssm.time_step_rank")
    return {
        "layer_types": kinds,
        "full_attention_interval": metadata.whole("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_value_head_dim": metadata.whole("ssm.inner_size") // max(1, heads),
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


def _gemma4(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    """Reads sizes that differ as what layers without a window have of their own."""
    windows = _some_windows(metadata, tensors, period=_GEMMA3_PERIOD)
    types = windows["layer_types"]
    head_dim = metadata.whole("attention.key_length_swa")
    same = ("attention.value_length_swa", "rope.dimension_count_swa")
    is_same = all(metadata.whole(key, head_dim) == head_dim for key in same)
    if types[-1:] != ["full_attention"] or not is_same:
        raise UnsupportedModelError(
            f"{metadata.path} has a window in its last layer, or heads of {head_dim} channels in "
            "layers with a window whose values have another size or that rotate in part; kvq "
            "computes none of these"
        )
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    heads = metadata.wholes("attention.head_count_kv")
    local = next((heads[layer] for layer in range(len(types)) if layer not in full), max(heads))
    full_head = {"head_dim": _head_dim(metadata)}
    bases = {
        "full_attention": metadata.real("rope.freq_base", 10_000.0),
        "sliding_attention": metadata.real("rope.freq_base_swa", _LOCAL_BASE),
    }
    return {
        "head_dim": head_dim,
        "global_head_dim": _head_dim(metadata),
        "num_key_value_heads": local,
        "per_layer_config": {
            str(layer): full_head | {"num_key_value_heads": heads[layer]} for layer in full
        },
        **windows,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        },
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0),
        **_gemma4_sharing(metadata, tensors, full),
        **_gemma4_experts(metadata),
    }


def _gemma4_experts(metadata: Metadata) -> dict[str, Any]:
    count = metadata.whole("expert_count", 0)
    if not count:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
    }


def _gemma4_sharing(metadata: Metadata, tensors: GgufShapes, full: list[int]) -> dict[str, Any]:
    """Reads which layers read others' keys or take keys for values, and embeddings of layers."""
    layers, shared = metadata.whole("block_count"), metadata.whole("attention.shared_kv_layers", 0)
    widths, owners = metadata.wholes("feed_forward_length"), layers - shared
    wide = [widths[0] * (2 if layer >= owners else 1) for layer in range(len(widths))]
    doubled = len(set(widths)) > 1
    if doubled and widths != wide:
        raise UnsupportedModelError(
            f"{metadata.path} has MLPs of {sorted(set(widths))} columns; beside one width twice as "
            f"many in the {shared} layers that read others' keys are supported"
        )
    table = tensors.shapes.get("per_layer_token_embd.weight", (1,))
    return {
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": doubled,
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in tensors.shapes for layer in full if layer < owners
        ),
        "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table[0],
    }


def _query_scalar(metadata: Metadata, large_layers: int) -> float:
    """Returns what queries are divided by the root of; a model of `large_layers` has another."""
    if metadata.whole("block_count") != large_layers:
        return float(_head_dim(metadata))
    heads = max(metadata.whole("attention.head_count"), 1)
    return float(metadata.whole("embedding_length") // heads)


def _gemma2(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    # Every second layer has a window, whatever a list says.
    metadata.flags("attention.sliding_window_pattern")
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _query_scalar(metadata, _GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, tensors: GgufShapes) -> dict[str, Any]:
    return {
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", _LOCAL_BASE),
        "query_pre_attn_scalar": _query_scalar(metadata, _GEMMA3_27B_LAYERS),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0),
    }


_GELU = {"hidden_act": "gelu_pytorch_tanh"}
_GEMMA_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_EVERY_SIXTH = partial(_some_windows, period=_GEMMA3_PERIOD)
# What each family's config.json has beyond `_common`.
_FAMILY_KEYS: Mapping[str, tuple[dict[str, Any] | _Reader, ...]] = {
    "gemma": (_GEMMA_GELU,),
    "gemma2": (_GEMMA_GELU, _gemma2),
    "gemma3_text": (_EVERY_SIXTH, _gemma3),
    "gemma4_text": (_gemma4,),
    "gpt_oss": (_mixture, _attention_bias, partial(_some_windows, period=2), _gpt_oss),
    "granite": (_biases, _granite),
    "lfm2": (_lfm2,),
    "lfm2_moe": (_lfm2, _experts, _lfm2_moe),
    "llama": (_biases,),
    "ministral3": (_one_window, _ministral3),
    "mistral": (_one_window,),
    "mixtral": (_one_window, _mixture),
    "olmo2": (),
    "olmo3": (partial(_some_windows, period=4),),
    "olmoe": (_mixture, {"norm_topk_prob": False}),
    "phi": (_some_rotated, _GELU),
    "phi3": (_some_rotated, _one_window),
    "qwen2": (_no_window,),
    "qwen3": (_no_window, _attention_bias),
    "qwen3_5_moe_text": (_some_rotated, _qwen3_5, _experts, _shared_expert),
    "qwen3_5_text": (_some_rotated, _qwen3_5),
    "qwen3_moe": (_no_window, _attention_bias, _mixture, _qwen3_moe),
    "qwen3_next": (_some_rotated, _qwen3_5, _experts, _shared_expert),
    # llama.cpp has no key for layers without rotation.
    "smollm3": (_biases, {"no_rope_layer_interval": 4}),
    "starcoder2": (_use_bias, _one_window, _GELU),
}


def _with_names(family: Family, metadata: Metadata, tokens: list[str], types: np.ndarray) -> Family:
    """Adds to the family the tokens that the file names for parts of a text, before its own."""
    ids = {role: metadata.token(key, len(tokens)) for role, key in FIM_KEYS.items()}
    fim_tokens = family.fim_tokens
    if None not in (ids["prefix"], ids["suffix"], ids["middle"]):
        names: dict[str, Any] = {
            role: None if token is None else tokens[token] for role, token in ids.items()
        }
        fim_tokens = (FimNames(**names), *fim_tokens)
    control = [tokens[token] for token in np.flatnonzero(types == CONTROL).tolist()]
    ends = (text for text in control if text in _ENDS)
    return replace(family, fim_tokens=fim_tokens, turn_ends=(*family.turn_ends, *ends))
