"""Describes a model as a GGUF file does: its architecture there, its keys and its tensors.

What llama.cpp would not compute is refused: the description is read as a file is (`gguf_config`),
and what comes out must be the model. Knows neither files nor widths.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvq.errors import UnsupportedModelError, argument
from kvq.reference.delta import SQUARES_EPS
from kvq_export.gguf.gguf_architectures import ARCHITECTURES, Architecture
from kvq_export.gguf.gguf_config import FAMILIES, SIGMOID_GATING, GgufShapes, Metadata, read_config
from kvq_export.gguf.gguf_tensors import GgufTensor, model_tensors
from kvq_models.config import Attention, DeltaNet, Dense, Experts, ModelConfig, RopeConfig
from kvq_models.rope import RopeSettings

# llama.cpp's name of each family. Mistral and Mixtral call themselves llama.
ARCHITECTURE_OF = {family: name for name, family in FAMILIES.items()} | {
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "gemma4_unified_text": "gemma4",
}
# Any base serves where tensors of factors describe a table: they are relative to it.
_NEUTRAL_BASE = 10_000.0
# What llama.cpp's converter divides the frequency of a pair by that does not turn.
_STILL_FACTOR = 1e30
# What a config says that a file does not, or says otherwise. Scales are in the weights.
_SAID_OTHERWISE = {
    *("model_type", "ropes", "context_length", "embedding_scale", "logits_scale", "norm_offset"),
    *("draft_head", "joins", "windows_apart", "bos_token_id", "eos_token_ids", "scale"),
}

Key = str | float | int | list[int] | list[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufModel:
    """Describes one model under one architecture of llama.cpp.

    `keys` are those of the architecture, without its name before. `rope_factors` are the tensors of
    the rotary table. `context_length` ends where a window begins to matter that is not computed.
    """

    architecture: str
    config: ModelConfig
    keys: Mapping[str, Key]
    tensors: tuple[GgufTensor, ...]
    rope_factors: Mapping[str, np.ndarray]

    @property
    def context_length(self) -> int:
        return int(self.keys["context_length"])  # type: ignore[arg-type]


def gguf_model(config: ModelConfig, settings: RopeSettings | None = None) -> GgufModel:
    """Describes the model as llama.cpp computes it; `settings` help with a scaled rotary table.

    Raises `UnsupportedModelError` naming what llama.cpp does not compute of it.
    """
    if config.model_type not in ARCHITECTURE_OF:
        raise UnsupportedModelError(
            f"kvq writes GGUF files of {', '.join(sorted(ARCHITECTURE_OF))} models, and not of "
            f"{config.model_type}; export it with {argument('format', 'onnx')}"
        )
    name, refusals = ARCHITECTURE_OF[config.model_type], list[str]()
    # Unusual models of these compute as the plainest architecture does.
    names = (name, "llama") if name in ("phi3", "qwen2", "smollm3") else (name,)
    for architecture in map(ARCHITECTURES.__getitem__, names):
        try:
            return _described(config, architecture, settings)
        except UnsupportedModelError as error:
            refusals.append(f"not as {architecture.name}: {error}")
    raise UnsupportedModelError(
        f"llama.cpp cannot compute this {config.model_type} model, {'; '.join(refusals)}; export "
        f"it with {argument('format', 'onnx')}"
    )


def _refuse(config: ModelConfig, architecture: Architecture) -> None:
    """Raises `UnsupportedModelError` for what a file can say and llama.cpp does not compute."""
    name, net, mixers = architecture.name, config.delta_shape, _attending(config)
    biased = [mixer.output_bias for mixer in mixers]
    # llama.cpp takes the last two layers with keys, whatever they are, for the two kinds of keys.
    others_keys = any(
        mixer.kv_from not in (None, config.first_reader - (2 if mixer.window_tokens else 1))
        for mixer in mixers
    )
    traits = {
        "heads that together are not as wide as its hidden states": architecture.square
        and config.first_attention.width != config.hidden_size,
        "an output head that is its embedding": config.tied_head
        and name in ("gpt-oss", "olmo2", "olmoe"),
        "an output head of its own": not config.tied_head and name in ("gemma", "gemma2"),
        "fewer heads of keys than of queries": name == "olmoe"
        and any(mixer.kv_heads != mixer.heads for mixer in mixers),
        "a bias on the attention's output": name in ("qwen3", "qwen3moe") and any(biased),
        "attention whose output has no bias": name == "gpt-oss" and not all(biased),
        "layers that all see everything": name in ("gemma4", "gpt-oss") and not any(config.windows),
        "layers that read the keys of others than the last two that have any": others_keys,
        "a table of per-layer embeddings of other tokens": config.per_layer is not None
        and config.per_layer.rows != config.vocab_size,
        "a scale of attention of its own": architecture.fused
        and any(not _same(mixer.scale, mixer.head_dim**-0.5) for mixer in mixers),
        "delta nets whose keys are not as wide as their values": net is not None
        and net.key_dim != net.value_dim,
        f"norms beside delta nets with another epsilon than {SQUARES_EPS}": net is not None
        and config.norm_eps != SQUARES_EPS,
    }
    if present := [trait for trait, has in traits.items() if has]:
        raise UnsupportedModelError(f"it does not compute {', '.join(present)}")


def _described(
    config: ModelConfig, architecture: Architecture, settings: RopeSettings | None
) -> GgufModel:
    """Raises `UnsupportedModelError` where the description is that of another model."""
    _refuse(config, architecture)
    rope_keys, rope_factors = _rope(config, architecture, settings)
    tensors: dict[str, GgufTensor] = {}
    for tensor in model_tensors(config, architecture):
        # Keys that are values too are one tensor.
        tensors.setdefault(tensor.name, tensor)
    model = GgufModel(
        architecture=architecture.name,
        config=config,
        keys=_keys(config, architecture) | rope_keys,
        tensors=tuple(tensors.values()),
        rope_factors=rope_factors,
    )
    read = _read_back(model)
    expected, actual = (dict(_numbers(_layers_with_ropes(both))) for both in (config, read))
    ignored = {*_SAID_OTHERWISE, *([] if architecture.windows else ["window_tokens"])}
    differences: dict[str, str] = {}
    for path in dict.fromkeys((*expected, *actual)):
        pair = actual.get(path), expected.get(path)
        if ignored.isdisjoint(path) and not _same(*pair):
            text = f"{'.'.join(path)} = {pair[0]} instead of {pair[1]}"
            is_table = "rope" in path
            differences.setdefault(
                *("rope", "another rotary table") if is_table else (path[-1], text)
            )
    if differences:
        raise UnsupportedModelError(f"it computes {', '.join([*differences.values()][:3])}")
    return replace(model, tensors=tuple(_scaled(model.tensors, config, read)))


def _read_back(model: GgufModel) -> ModelConfig:
    """Returns the config that a reader of the file makes of it."""
    values: dict[str, Any] = {"general.architecture": model.architecture}
    for key, value in model.keys.items():
        is_list = isinstance(value, list)
        values[f"{model.architecture}.{key}"] = np.array(value) if is_list else value
    shapes = {tensor.name: tensor.stored_shape for tensor in model.tensors}
    tensors = GgufShapes(shapes=shapes, rope=model.rope_factors)
    metadata = Metadata(Path("the file"), values)
    return read_config(metadata, tensors, [], np.zeros(0, np.int32))[1]


def _layers_with_ropes(config: ModelConfig) -> dict[str, Any]:
    """Returns the config as JSON, each layer with its own rotary table."""
    values = config.to_json()
    for layer in values["layers"]:
        if "rope" in layer["mixer"]:
            layer["mixer"]["rope"] = values["ropes"][layer["mixer"]["rope"]]
    return values


def _numbers(value: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each number and text of JSON after the path to it."""
    if isinstance(value, list | tuple):
        value = {str(index): item for index, item in enumerate(cast(list[Any], value))}
    if isinstance(value, dict):
        for key, item in cast(dict[str, Any], value).items():
            yield from _numbers(item, *path, key)
    else:
        yield path, value


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float | int):
        return math.isclose(first, second, rel_tol=1e-4)
    return first == second


def _scaled(
    tensors: Sequence[GgufTensor], config: ModelConfig, read: ModelConfig
) -> Iterator[GgufTensor]:
    """Yields the tensors with scales that llama.cpp has no keys for in their factors.

    `read` has its scales, but that of a gemma's embedding, which is not rounded there.
    """
    theirs = read.embedding_scale
    if config.model_type.startswith("gemma"):
        theirs = math.sqrt(config.hidden_size)
    gains = {"embed": config.embedding_scale / theirs}
    if config.tied_head:
        gains["final_norm"] = 1 / gains["embed"]
    names = {tensor.name for tensor in tensors}
    for index, (layer, other) in enumerate(zip(config.layers, read.layers, strict=True)):
        if isinstance(layer.mixer, Attention):
            norm = f"blk.{index}.attn_q_norm.weight"
            stem = (norm if norm in names else f"blk.{index}.attn_q.").rpartition(".")[0]
            gains[stem] = layer.mixer.scale / other.attention.scale
    for tensor in tensors:
        stem = tensor.name.rpartition(".")[0]
        gain = gains.get(tensor.source, gains.get(stem, 1.0))
        yield tensor if _same(gain, 1.0) else replace(tensor, factor=tensor.factor * gain)


# Keys


def _keys(config: ModelConfig, architecture: Architecture) -> dict[str, Key]:
    name, mixers, windows = architecture.name, _attending(config), config.windows
    mixer = next((mixer for mixer in mixers if not mixer.window_tokens), mixers[0])
    feeds = [layer.feed for layer in config.layers]
    dense = [feed if isinstance(feed, Dense) else feed.beside for feed in feeds]
    widths = [feed.width for feed in dense if feed is not None] or [config.widest_feed]
    context = config.context_length
    if not architecture.windows:
        context = min(context, *filter(None, windows), context)
    # llama.cpp knows convolutions by 0 heads, delta nets by a list of their own.
    kv_heads = [
        layer.mixer.kv_heads
        if isinstance(layer.mixer, Attention)
        else config.first_attention.kv_heads * isinstance(layer.mixer, DeltaNet)
        for layer in config.layers
    ]
    epsilon = "layer_norm_epsilon" if config.norm == "layer" else "layer_norm_rms_epsilon"
    keys: dict[str, Key] = {
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "vocab_size": config.vocab_size,
        "feed_forward_length": _one_or_all(widths),
        "attention.head_count": config.first_attention.heads,
        "attention.head_count_kv": _one_or_all(kv_heads),
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        f"attention.{epsilon}": config.norm_eps,
    }
    if any(windows):
        keys["attention.sliding_window"] = max(windows)
        if architecture.windows:
            keys["attention.sliding_window_pattern"] = [tokens > 0 for tokens in windows]
    if experts := next((feed for feed in feeds if isinstance(feed, Experts)), None):
        keys |= {"expert_count": experts.count, "expert_used_count": experts.chosen}
        keys["expert_feed_forward_length"] = experts.width
        if experts.shared is not None:
            keys["expert_shared_feed_forward_length"] = experts.shared.width
    if name == "granite":
        # Other scales are in the weights.
        keys |= {"embedding_scale": config.embedding_scale, "attention.scale": mixer.scale}
        keys |= {"residual_scale": 1.0, "logit_scale": 1.0}
    if name in ("gemma2", "gemma3", "gemma4"):
        keys["final_logit_softcapping"] = config.final_softcap
    if name == "gemma2":
        keys["attn_logit_softcapping"] = mixer.softcap
    if mixer.growth:
        keys["attention.temperature_scale"] = mixer.growth
    return keys | _rare_keys(config, name)


def _rare_keys(config: ModelConfig, name: str) -> dict[str, Key]:
    """Returns keys of parts that few architectures have."""
    keys: dict[str, Key] = {}
    if (conv := config.conv_shape) is not None:
        keys["shortconv.l_cache"] = conv.taps
    if (net := config.delta_shape) is not None:
        keys |= {
            "ssm.conv_kernel": net.taps,
            "ssm.state_size": net.key_dim,
            "ssm.group_count": net.key_heads,
            "ssm.time_step_rank": net.value_heads,
            "ssm.inner_size": net.value_heads * net.value_dim,
            "attention.recurrent_layers": [not layer.attends for layer in config.layers],
        }
        if name != "qwen3next":
            # In text all parts of a position are one number, whichever pairs turn by each.
            pairs = len(config.ropes[0].inv_freq)
            keys["rope.dimension_sections"] = [*(-(-(pairs - part) // 3) for part in range(3)), 0]
    if name == "gemma4":
        windowed = next(mixer for mixer in _attending(config) if mixer.window_tokens)
        sizes = ("attention.key_length_swa", "attention.value_length_swa")
        keys |= {
            **dict.fromkeys((*sizes, "rope.dimension_count_swa"), windowed.head_dim),
            "attention.shared_kv_layers": config.num_layers - config.first_reader,
            "embedding_length_per_layer_input": config.per_layer.width if config.per_layer else 0,
        }
    if name == "lfm2moe":
        dense = sum(isinstance(layer.feed, Dense) for layer in config.layers)
        keys |= {"leading_dense_block_count": dense, "expert_gating_func": SIGMOID_GATING}
    return keys


def _attending(config: ModelConfig) -> list[Attention]:
    return [layer.mixer for layer in config.layers if isinstance(layer.mixer, Attention)]


def _one_or_all(numbers: list[int]) -> int | list[int]:
    """Returns the number that all layers have, or that of each."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


# Rotary tables


def _rope(
    config: ModelConfig, architecture: Architecture, settings: RopeSettings | None
) -> tuple[dict[str, Key], dict[str, np.ndarray]]:
    """Returns keys and tensors of the rotary tables. One that they cannot say comes out otherwise.

    The first table is that of layers which see everything.
    """
    rope, factor = config.ropes[0], config.ropes[0].factor
    keys: dict[str, Key] = {
        "rope.dimension_count": 2 * len(rope.inv_freq),
        "rope.freq_base": _NEUTRAL_BASE,
    }
    factors: dict[str, np.ndarray] = {}
    plain = None if architecture.name == "gemma4" else _plain(rope)
    if rope.long_inv_freq is not None and architecture.rope_factors:
        keys["rope.scaling.type"] = "longrope"
        keys["rope.scaling.original_context_length"] = rope.original_context or 0
        factors["rope_factors_short.weight"] = _factors(rope.inv_freq)
        factors["rope_factors_long.weight"] = _factors(rope.long_inv_freq)
    elif plain is not None:
        keys["rope.freq_base"] = plain[0]
        if plain[1] != 1:
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": plain[1]}
    elif architecture.rope_factors:
        factors["rope_freqs.weight"] = _factors(rope.inv_freq)
    elif (yarn := _yarn(config, settings)) is not None:
        base, slowdown, context = yarn
        keys |= {"rope.freq_base": base, "rope.scaling.type": "yarn"}
        keys |= {"rope.scaling.factor": slowdown, "rope.scaling.original_context_length": context}
        factor /= 0.1 * math.log(slowdown) + 1
    if not _same(factor, 1.0):
        keys["rope.scaling.attn_factor"] = factor
    if growth_tokens := _attending(config)[0].growth_tokens:
        keys["rope.scaling.original_context_length"] = growth_tokens
    if architecture.name in ("gemma3", "gemma4"):
        for local in filter(None, map(_plain, config.ropes[1:])):
            keys["rope.freq_base_swa"] = local[0]
    return keys, factors


def _plain(rope: RopeConfig) -> tuple[float, float] | None:
    """Returns (base, factor) of a table `base ** (-i / n) / factor`, or None for another one."""
    table = np.asarray(rope.inv_freq, np.float64)
    if not table.all():
        return None
    pairs, factor = len(table), float(1 / table[0])
    if pairs == 1:
        return _NEUTRAL_BASE, factor
    base = float((table[-1] * factor) ** (-pairs / (pairs - 1)))
    base = float(round(base)) if abs(base - round(base)) < 1e-3 * base else base
    close = np.allclose(table, _powers(base, pairs) / factor, rtol=1e-5, atol=0)
    return (base, factor) if close else None


def _powers(base: float, pairs: int) -> np.ndarray:
    return base ** (-np.arange(pairs) / pairs)


def _factors(table: tuple[float, ...]) -> np.ndarray:
    """Returns what llama.cpp divides the frequencies of `_NEUTRAL_BASE` by to get the model's."""
    frequencies = np.asarray(table, np.float64)
    still = frequencies == 0
    factors = _powers(_NEUTRAL_BASE, len(frequencies)) / np.where(still, 1, frequencies)
    return np.where(still, _STILL_FACTOR, factors).astype(np.float32)


def _yarn(config: ModelConfig, settings: RopeSettings | None) -> tuple[float, float, int] | None:
    """Returns base, factor and context of a YaRN table (arXiv:2309.00071), or None.

    Without settings they are guessed of a table whose first two pairs are as fast as ever.
    """
    if settings is not None:
        if settings.kind != "yarn":
            return None
        context = settings.trained_context
        factor = settings.number("factor", settings.max_positions / context)
        return settings.number("rope_theta"), factor, context
    table = np.asarray(config.ropes[0].inv_freq, np.float64)
    base = float(round((table[0] / table[1]) ** len(table))) if len(table) > 1 else 0.0
    if base < 2 or not table.all():
        return None
    factor = round(float(_powers(base, len(table))[-1] / table[-1]), 3)
    return (base, factor, round(config.context_length / factor)) if factor > 1 else None
