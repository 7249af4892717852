"""What a model is to llama.cpp: its architecture there, its rotary table, its tensors.

Owns the refusals of what llama.cpp does not compute. Knows neither files nor widths: a tensor is
rows of a canonical weight. Facts about llama.cpp are of commit 0c1e57098.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kvq.errors import UnsupportedModelError, argument
from kvq_models.config import Dense, Experts, ModelConfig, RopeConfig
from kvq_models.family import is_stack, layer_shapes
from kvq_models.rope import RopeSettings

# Any base serves where tensors of factors describe a table: they are relative to it.
NEUTRAL_BASE = 10_000.0
# llama.cpp's defaults, which no key of these architectures changes.
YARN_FAST, YARN_SLOW = 32.0, 1.0
# llama.cpp takes a gemma3 of this depth for the 27B model, whose scale is by hidden size.
GEMMA3_27B_LAYERS = 62
# Likewise of a gemma2.
GEMMA2_27B_LAYERS = 46

Scaling = Literal["none", "linear", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Rows [start, stop) of a canonical weight, times `factor`, under a name llama.cpp reads.

    `interleave` is 0, or the rows of a head whose pairs (i, i + interleave/2) become neighbours.
    `experts` is 0, or how many there are: the canonical weight has `stretch` rows of each, of which
    [start, stop) are taken, and the shape begins with their number.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    start: int = 0
    interleave: int = 0
    factor: float = 1.0
    experts: int = 0
    stretch: int = 0

    @property
    def rows(self) -> tuple[range, ...]:
        """Which rows of the canonical weight are taken, in their order."""
        count = self.shape[1] if self.experts else self.shape[0]
        starts = (one * self.stretch + self.start for one in range(max(1, self.experts)))
        return tuple(range(start, start + count) for start in starts)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what is read of it as one matrix each, as `GgufRows.parts` has them."""
        return part_names(self.name, self.experts)

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        """Whole heads of the canonical rows [n, ...] in this tensor's order, scaled."""
        if self.interleave:
            heads = rows.reshape(-1, 2, self.interleave // 2, *rows.shape[1:])
            rows = heads.swapaxes(1, 2).reshape(rows.shape)
        return rows if self.factor == 1 else rows * np.float32(self.factor)


def part_names(name: str, experts: int) -> tuple[str, ...]:
    """Of a tensor that holds the matrices of all experts those of each; else its own."""
    return tuple(f"{name}.{one}" for one in range(experts)) if experts else (name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufRope:
    """A rotary table as keys: `base ** (-2i / n)`, scaled; `tensors` hold float32 factors [n / 2].

    `attention_factor` multiplies what the scaling itself does to cos and sin.
    """

    base: float
    dimensions: int
    scaling: Scaling = "none"
    factor: float = 1.0
    original_context: int | None = None
    attention_factor: float = 1.0
    base_windowed: float | None = None
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufModel:
    """One model under one architecture of llama.cpp.

    `windowed` says per layer whether it sees `window_tokens` only; an architecture without windows
    has none, and `context_length` then ends where a window would begin to matter. `multipliers` are
    keys of the architecture's own, such as `embedding_scale`.
    """

    architecture: str
    config: ModelConfig
    rope: GgufRope
    tensors: tuple[GgufTensor, ...]
    context_length: int
    window_tokens: int = 0
    windowed: tuple[bool, ...] = ()
    multipliers: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """What llama.cpp computes under a name, of the traits `_traits` finds.

    It computes those of `_USUAL` too, but for what it `lacks`.
    `interleaved`: it rotates neighbouring channels, checkpoints rotate halves. `rope_tensors`: it
    reads tensors of rotary factors. `fused`: it wants one tensor for q, k and v, and one for gate
    and up. `windows`: layers may have one. `keyed_scales`: its embedding and its attention are
    multiplied by what keys say. `windowed_base`: a key says by which base layers with a window
    rotate; else it is that of all others, whose scaling they leave out.
    """

    name: str
    computes: frozenset[str]
    lacks: frozenset[str] = frozenset()
    interleaved: bool = False
    rope_tensors: bool = False
    fused: bool = False
    windows: bool = False
    keyed_scales: bool = False
    windowed_base: bool = False


_QK_NORM = "norms on queries and keys"
_SANDWICH = "norms after attention and MLP"
_GELU = "a GELU"
_FINAL_CAP = "a soft cap on its logits"
_ATTENTION_CAP = "a soft cap on attention"
_QKV_BIAS = "biases on queries, keys and values"
_OUTPUT_BIAS = "a bias on the attention's output"
_MLP_BIAS = "biases in its MLP"
_WIDTH = "heads that together are not as wide as its hidden states"
_PARTIAL = "heads that rotate in part"
_LONG_ROPE = "a second rotary table for long contexts"
_SCALED = "scaled embeddings"
_TWO_ROPES = "two kinds of rotary layers"
_ROW_NORM = "norms of all heads together"
_ONLY_AFTER = "no norm before a layer"
_LAYER_NORM = "norms with a mean and biases"
_RMS_NORM = "norms without a mean"
_UNGATED = "an MLP without a gate"
_GATED = "an MLP with a gate"
_PARALLEL = "layers whose halves are parallel"
_HEAD_BIAS = "a bias on its logits"
_ATTENTION_SCALE = "its scale of attention"
_STILL = "layers that do not rotate"
_OTHER_STILL = "layers that do not rotate other than every fourth"
_WINDOWS_OTHERWISE = "windows in other layers than every second, from the first on"
_UNTIED = "an output head of its own"
_TIED = "an output head that is its embedding"
_UNCAPPED = "attention and logits without soft caps"
_GROWTH = "queries that grow with their position"
_GROUPED = "fewer heads of keys than of queries"
_DENSE = "layers without experts"
_EXPERTS = "experts"
_NORMALISED = "shares of experts that are divided by their sum"
_UNNORMALISED = "shares of experts that are not divided by their sum"
# What an architecture need not name to compute it, because most do.
_USUAL = frozenset(
    {
        *(_RMS_NORM, _GATED, _TIED, _UNTIED, _UNCAPPED, _WINDOWS_OTHERWISE, _OTHER_STILL),
        *(_GROUPED, _DENSE),
    }
)

_ARCHITECTURES = {
    row.name: row
    for row in (
        _Architecture(
            name="llama",
            computes=frozenset(
                {
                    *(_QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _WIDTH, _LONG_ROPE),
                    *(_EXPERTS, _NORMALISED),
                }
            ),
            interleaved=True,
            rope_tensors=True,
        ),
        _Architecture(
            name="mistral3",
            computes=frozenset({_QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _WIDTH, _GROWTH}),
            interleaved=True,
            rope_tensors=True,
        ),
        _Architecture(name="qwen2", computes=frozenset({_QKV_BIAS})),
        _Architecture(name="qwen3", computes=frozenset({_QKV_BIAS, _QK_NORM, _WIDTH})),
        _Architecture(
            name="qwen3moe",
            computes=frozenset({_QKV_BIAS, _QK_NORM, _WIDTH, _EXPERTS, _NORMALISED}),
            lacks=frozenset({_DENSE}),
        ),
        _Architecture(
            name="olmoe",
            computes=frozenset({_ROW_NORM, _EXPERTS, _UNNORMALISED}),
            lacks=frozenset({_TIED, _GROUPED, _DENSE}),
        ),
        _Architecture(
            name="phi3",
            computes=frozenset({_PARTIAL, _LONG_ROPE}),
            rope_tensors=True,
            fused=True,
        ),
        _Architecture(
            name="gemma3",
            computes=frozenset(
                {_QKV_BIAS, _QK_NORM, _SANDWICH, _GELU, _FINAL_CAP, _WIDTH, _SCALED, _TWO_ROPES}
            ),
            windows=True,
            windowed_base=True,
        ),
        _Architecture(
            name="gemma",
            computes=frozenset({_GELU, _WIDTH, _SCALED, _ATTENTION_SCALE}),
            lacks=frozenset({_UNTIED}),
        ),
        _Architecture(
            name="gemma2",
            computes=frozenset(
                {_SANDWICH, _GELU, _FINAL_CAP, _ATTENTION_CAP, _WIDTH, _SCALED, _ATTENTION_SCALE}
            ),
            lacks=frozenset({_UNTIED, _UNCAPPED, _WINDOWS_OTHERWISE}),
            windows=True,
        ),
        _Architecture(
            name="smollm3",
            computes=frozenset({_QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _WIDTH, _STILL}),
            lacks=frozenset({_OTHER_STILL}),
            interleaved=True,
        ),
        _Architecture(
            name="granite",
            computes=frozenset(
                {_QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _WIDTH, _SCALED, _ATTENTION_SCALE}
            ),
            interleaved=True,
            rope_tensors=True,
            keyed_scales=True,
        ),
        _Architecture(
            name="olmo2",
            computes=frozenset({_ROW_NORM, _ONLY_AFTER, _TWO_ROPES}),
            lacks=frozenset({_TIED}),
            windows=True,
        ),
        _Architecture(
            name="starcoder2",
            computes=frozenset({_LAYER_NORM, _UNGATED, _GELU, _QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS}),
            lacks=frozenset({_RMS_NORM, _GATED}),
        ),
        _Architecture(
            name="phi2",
            computes=frozenset(
                {
                    *(_LAYER_NORM, _UNGATED, _GELU, _QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS),
                    *(_PARTIAL, _PARALLEL, _HEAD_BIAS),
                }
            ),
            lacks=frozenset({_RMS_NORM, _GATED}),
        ),
    )
}
# The first that computes the model is taken: the family's own name, then the plainest one.
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    "llama": ("llama",),
    "mistral": ("llama",),
    "mixtral": ("llama",),
    "ministral3": ("mistral3",),
    "qwen2": ("qwen2", "llama"),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3moe",),
    "phi3": ("phi3", "llama"),
    "gemma3_text": ("gemma3",),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "smollm3": ("smollm3", "llama"),
    "granite": ("granite",),
    "olmo2": ("olmo2",),
    "olmo3": ("olmo2",),
    "olmoe": ("olmoe",),
    "starcoder2": ("starcoder2",),
    "phi": ("phi2",),
}


def gguf_model(config: ModelConfig, settings: RopeSettings | None = None) -> GgufModel:
    """The model as llama.cpp computes it; `settings` help to describe a scaled rotary table.

    Raises `UnsupportedModelError` naming what llama.cpp does not compute of it.
    """
    if config.model_type not in CANDIDATES:
        raise UnsupportedModelError(
            f"kvq writes GGUF files of {', '.join(CANDIDATES)} models, and not of "
            f"{config.model_type}; export it with {argument('format', 'onnx')}"
        )
    refusals: list[str] = []
    for name in CANDIDATES[config.model_type]:
        architecture = _ARCHITECTURES[name]
        missing = [trait for trait, has in _traits(config).items() if has]
        computed = (architecture.computes | _USUAL) - architecture.lacks
        missing = [trait for trait in missing if trait not in computed]
        rope = _rope(config, architecture, settings)
        if not missing and rope is not None:
            return _describe(config, architecture, rope)
        what = ", ".join(missing) or "a rotary table that its keys do not describe"
        refusals.append(f"not as {name}, which does not compute {what}")
    raise UnsupportedModelError(
        f"llama.cpp cannot compute this {config.model_type} model: "
        f"{'; '.join(refusals)}; export it with {argument('format', 'onnx')}"
    )


def tensors_of(config: ModelConfig, architecture: str) -> tuple[GgufTensor, ...]:
    """The tensors of a model in a file of this architecture, those of its rotary table left out."""
    return tuple(_tensors(config, _ARCHITECTURES[architecture]))


def _traits(config: ModelConfig) -> dict[str, bool]:
    """What some architecture there does not compute, and whether any layer has it."""
    mixers = [layer.attention for layer in config.layers]
    feeds = [layer.feed for layer in config.layers]
    experts = [feed for feed in feeds if isinstance(feed, Experts)]
    turning = [rope for rope in config.ropes if any(rope.inv_freq)]
    still = [not any(config.ropes[mixer.rope].inv_freq) for mixer in mixers]
    return {
        _QK_NORM: any(mixer.qk_norm == "heads" for mixer in mixers),
        _ROW_NORM: any(mixer.qk_norm == "rows" for mixer in mixers),
        _SANDWICH: any(layer.norms == "both" for layer in config.layers),
        _ONLY_AFTER: any(layer.norms == "after" for layer in config.layers),
        _LAYER_NORM: config.norm != "rms",
        _RMS_NORM: config.norm == "rms",
        _UNGATED: any(not feed.gated for feed in feeds),
        _GATED: any(feed.gated for feed in feeds),
        _GELU: any(feed.activation != "silu" for feed in feeds),
        _FINAL_CAP: config.final_softcap > 0,
        _ATTENTION_CAP: any(mixer.softcap > 0 for mixer in mixers),
        _QKV_BIAS: any(mixer.qkv_bias for mixer in mixers),
        _OUTPUT_BIAS: any(mixer.output_bias for mixer in mixers),
        _MLP_BIAS: any(isinstance(feed, Dense) and feed.bias for feed in feeds),
        _WIDTH: config.num_heads * config.head_dim != config.hidden_size,
        _PARTIAL: any(2 * len(rope.inv_freq) != config.head_dim for rope in turning),
        _LONG_ROPE: config.has_long_rope,
        _SCALED: config.embedding_scale != 1,
        _GROWTH: any(mixer.growth for mixer in mixers),
        _GROUPED: any(mixer.kv_heads != mixer.heads for mixer in mixers),
        _DENSE: len(experts) < len(feeds),
        _EXPERTS: bool(experts),
        _NORMALISED: any(feed.normalised for feed in experts),
        _UNNORMALISED: any(not feed.normalised for feed in experts),
        "experts in some layers alone": 0 < len(experts) < len(feeds),
        "experts of another kind": any(feed != _plain_experts(feed) for feed in experts),
        _PARALLEL: any(layer.parallel for layer in config.layers),
        _HEAD_BIAS: config.head_bias,
        _TWO_ROPES: len(turning) > 1,
        _STILL: any(still),
        _OTHER_STILL: still != [(layer + 1) % 4 == 0 for layer in range(len(still))],
        _WINDOWS_OTHERWISE: any(bool(w) != (i % 2 == 0) for i, w in enumerate(config.windows)),
        _TIED: config.tied_head,
        _UNTIED: not config.tied_head,
        _UNCAPPED: not config.final_softcap or any(not mixer.softcap for mixer in mixers),
        _ATTENTION_SCALE: any(
            mixer.qk_norm == "none"
            and not math.isclose(mixer.scale, mixer.head_dim**-0.5, rel_tol=1e-6)
            for mixer in mixers
        ),
    }


def _plain_experts(feed: Experts) -> Experts:
    """What every architecture with experts computes of their arithmetic."""
    return Experts(
        count=feed.count, chosen=feed.chosen, width=feed.width, normalised=feed.normalised
    )


def _describe(config: ModelConfig, architecture: _Architecture, rope: GgufRope) -> GgufModel:
    windows = config.windows
    windowed = tuple(tokens > 0 for tokens in windows)
    context_length = config.context_length
    if not architecture.windows and any(windowed):
        context_length = min(context_length, *filter(None, windows))
    mixer = config.layers[0].attention
    if mixer.growth:
        rope = replace(rope, original_context=mixer.growth_tokens)
    return GgufModel(
        architecture=architecture.name,
        config=config,
        rope=rope,
        tensors=tuple(_tensors(config, architecture)),
        context_length=context_length,
        window_tokens=max(windows),
        multipliers=_multipliers(config, architecture),
        windowed=windowed if architecture.windows and any(windowed) else (),
    )


def _multipliers(config: ModelConfig, architecture: _Architecture) -> dict[str, float]:
    """Keys of scales and caps; those of residuals and logits are in the weights already."""
    scales = {"embedding_scale": config.embedding_scale, "residual_scale": 1.0, "logit_scale": 1.0}
    keyed = scales | {"attention.scale": config.layers[0].attention.scale}
    mixer = config.layers[0].attention
    found = keyed if architecture.keyed_scales else {}
    found |= {"attn_logit_softcapping": mixer.softcap} if mixer.softcap else {}
    return found | ({"attention.temperature_scale": mixer.growth} if mixer.growth else {})


# Tensors


def _tensors(config: ModelConfig, architecture: _Architecture) -> Iterator[GgufTensor]:
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    # Exact for a tied head too, because the last norm undoes what the embedding gains.
    gain = _embedding_gain(config, architecture)
    yield GgufTensor(name="token_embd.weight", source="embed", shape=table, factor=gain)
    if not config.tied_head:
        yield GgufTensor(name="output.weight", source="head", shape=table)
    yield GgufTensor(
        name="output_norm.weight",
        source="final_norm",
        shape=(hidden,),
        factor=1 / gain if config.tied_head else 1.0,
    )
    if config.norm == "layer":
        yield GgufTensor(name="output_norm.bias", source="final_norm_bias", shape=(hidden,))
    if config.head_bias:
        yield GgufTensor(name="output.bias", source="head_bias", shape=(config.vocab_size,))
    for layer in range(config.num_layers):
        shapes, gain = layer_shapes(config, layer), _query_gain(config, layer, architecture)
        for source, parts in _parts(config, layer, architecture).items():
            feed, row = config.layers[layer].feed, 0
            experts = feed.count if isinstance(feed, Experts) and is_stack(source) else 0
            stretch = shapes[source][0] // max(1, experts)
            for name, rows, interleave in parts:
                # A norm of the queries carries it, else what makes them does.
                carries = source == "q_norm" or (name == "attn_q" and "q_norm" not in shapes)
                yield GgufTensor(
                    name=f"blk.{layer}.{name}.{'bias' if source.endswith('bias') else 'weight'}",
                    source=f"layers.{layer}.{source}",
                    shape=(*([experts] if experts else []), rows, *shapes[source][1:]),
                    start=row,
                    interleave=interleave,
                    factor=gain if carries else 1.0,
                    experts=experts,
                    stretch=stretch,
                )
                row += rows
            assert row == stretch


def _parts(
    config: ModelConfig, layer: int, architecture: _Architecture
) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """Canonical weight of a layer -> (tensor, its rows, interleave) in the order of its rows."""
    mixer, feed = config.layers[layer].attention, config.layers[layer].feed
    inner, experts = feed.width, feed.count if isinstance(feed, Experts) else 0
    hidden = config.hidden_size
    query, key, head = mixer.width, mixer.kv_width, mixer.head_dim
    turned = head if architecture.interleaved else 0
    if architecture.fused:
        qkv = (("attn_qkv", mixer.qkv_width, 0),)
        gate_up = (("ffn_up", 2 * inner, 0),)
    else:
        qkv = (("attn_q", query, turned), ("attn_k", key, turned), ("attn_v", key, 0))
        gate_up = (("ffn_gate", inner, 0), ("ffn_up", inner, 0))
    names = {
        "attn_norm": (("attn_norm", hidden, 0),),
        "attn_norm_bias": (("attn_norm", hidden, 0),),
        "qkv": qkv,
        "qkv_bias": qkv,
        "q_norm": (("attn_q_norm", query if mixer.qk_norm == "rows" else head, 0),),
        "k_norm": (("attn_k_norm", key if mixer.qk_norm == "rows" else head, 0),),
        "o": (("attn_output", hidden, 0),),
        "o_bias": (("attn_output", hidden, 0),),
        "post_attn_norm": (("post_attention_norm", hidden, 0),),
        "mlp_norm": (("ffn_norm", hidden, 0),),
        "mlp_norm_bias": (("ffn_norm", hidden, 0),),
        "up": (("ffn_up", inner, 0),),
        "up_bias": (("ffn_up", inner, 0),),
        "gate_up": gate_up,
        "gate_up_bias": gate_up,
        "down": (("ffn_down", hidden, 0),),
        "down_bias": (("ffn_down", hidden, 0),),
        "post_mlp_norm": (("post_ffw_norm", hidden, 0),),
        "router": (("ffn_gate_inp", experts, 0),),
        "experts_gate_up": (("ffn_gate_exps", inner, 0), ("ffn_up_exps", inner, 0)),
        "experts_down": (("ffn_down_exps", hidden, 0),),
    }
    return {name: names[name] for name in layer_shapes(config, layer)}


def _embedding_gain(config: ModelConfig, architecture: _Architecture) -> float:
    """The model's embedding scale over llama.cpp's, which is not rounded to the trained type."""
    if _SCALED not in architecture.computes or architecture.keyed_scales:
        return 1.0
    gain = config.embedding_scale / math.sqrt(config.hidden_size)
    return 1.0 if math.isclose(gain, 1.0, rel_tol=1e-6) else gain


def _query_gain(config: ModelConfig, layer: int, architecture: _Architecture) -> float:
    """The model's attention scale over llama.cpp's."""
    if architecture.keyed_scales:
        return 1.0
    theirs = config.head_dim**-0.5
    large = {"gemma3": GEMMA3_27B_LAYERS, "gemma2": GEMMA2_27B_LAYERS}.get(architecture.name)
    if config.num_layers == large:
        theirs = (config.hidden_size // config.num_heads) ** -0.5
    gain = config.layers[layer].attention.scale / theirs
    return 1.0 if math.isclose(gain, 1.0, rel_tol=1e-6) else gain


# Rotary tables


def _rope(
    config: ModelConfig, architecture: _Architecture, settings: RopeSettings | None
) -> GgufRope | None:
    """Every layer's table, or None where no keys describe it."""
    rope = _whole_rope(config, architecture, settings)
    return None if rope is None else _with_windows(config, architecture, rope)


def _whole_rope(
    config: ModelConfig, architecture: _Architecture, settings: RopeSettings | None
) -> GgufRope | None:
    """The first table, of layers that see everything."""
    rope = config.ropes[0]
    dimensions = 2 * len(rope.inv_freq)
    if rope.long_inv_freq is not None:
        if not architecture.rope_tensors:
            return None
        return GgufRope(
            base=NEUTRAL_BASE,
            dimensions=dimensions,
            scaling="longrope",
            original_context=rope.original_context,
            attention_factor=rope.factor,
            tensors={
                "rope_factors_short.weight": _factors(rope.inv_freq),
                "rope_factors_long.weight": _factors(rope.long_inv_freq),
            },
        )
    plain = _plain(rope)
    if plain is not None:
        base, factor = plain
        return GgufRope(
            base=base,
            dimensions=dimensions,
            scaling="none" if factor == 1 else "linear",
            factor=factor,
            attention_factor=rope.factor,
        )
    if architecture.rope_tensors:
        return GgufRope(
            base=NEUTRAL_BASE,
            dimensions=dimensions,
            attention_factor=rope.factor,
            tensors={"rope_freqs.weight": _factors(rope.inv_freq)},
        )
    return _yarn(rope, settings)


def _with_windows(
    config: ModelConfig, architecture: _Architecture, rope: GgufRope
) -> GgufRope | None:
    """Adds the base of windowed layers, where these have a plain table of their own."""
    for local in config.ropes[1:]:
        if not any(local.inv_freq):
            continue
        plain = _plain(local)
        if plain is None or (plain[1], local.factor, rope.base_windowed) != (1, 1, None):
            return None
        if architecture.windowed_base:
            rope = replace(rope, base_windowed=plain[0])
        elif not math.isclose(plain[0], rope.base, rel_tol=1e-6):
            return None
    return rope


def _plain(rope: RopeConfig) -> tuple[float, float] | None:
    """(base, factor) of a table `base ** (-i / n) / factor`, or None where it is another one."""
    table = np.asarray(rope.inv_freq, np.float64)
    pairs, factor = len(table), float(1 / table[0])
    if pairs == 1:
        return NEUTRAL_BASE, factor
    base = float((table[-1] * factor) ** (-pairs / (pairs - 1)))
    base = float(round(base)) if abs(base - round(base)) < 1e-3 * base else base
    close = np.allclose(table, _powers(base, pairs) / factor, rtol=1e-5, atol=0)
    return (base, factor) if close else None


def _powers(base: float, pairs: int) -> np.ndarray:
    return base ** (-np.arange(pairs) / pairs)


def _factors(table: tuple[float, ...]) -> np.ndarray:
    """What llama.cpp divides the frequencies of `NEUTRAL_BASE` by to get the model's."""
    found = np.asarray(table, np.float64)
    return (_powers(NEUTRAL_BASE, len(found)) / found).astype(np.float32)


def _yarn(rope: RopeConfig, settings: RopeSettings | None) -> GgufRope | None:
    """The keys of a YaRN table (arXiv:2309.00071), if llama.cpp makes this very table of them."""
    if settings is None or settings.kind != "yarn":
        return None
    base, context = settings.number("rope_theta"), settings.trained_context
    factor = settings.number("factor", settings.max_positions / context)
    pairs = len(rope.inv_freq)

    def pair(rotations: float) -> float:
        return pairs * math.log(context / (rotations * 2 * math.pi)) / math.log(base)

    low, high = max(math.floor(pair(YARN_FAST)), 0), min(math.ceil(pair(YARN_SLOW)), 2 * pairs - 1)
    kept = 1 - np.clip((np.arange(pairs) - low) / max(0.001, high - low), 0, 1)
    table = _powers(base, pairs) * (kept + (1 - kept) / factor)
    if not np.allclose(table, rope.inv_freq, rtol=1e-4, atol=0):
        return None
    return GgufRope(
        base=base,
        dimensions=2 * pairs,
        scaling="yarn",
        factor=factor,
        original_context=context,
        attention_factor=rope.factor / (0.1 * math.log(factor) + 1 if factor > 1 else 1.0),
    )
