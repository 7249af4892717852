"""What a model is to llama.cpp: its architecture there, its rotary table, its tensors.

Owns the refusals of what llama.cpp does not compute. Knows neither files nor widths: a tensor is
rows of a canonical weight. Facts about llama.cpp are of commit 0c1e57098, those about gemma4, lfm2
and qwen35 of the one inside llama-cpp-python 0.3.36.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kvq.errors import UnsupportedModelError, argument
from kvq.reference_delta import SQUARES_EPS
from kvq_models.config import (
    Attention,
    DeltaNet,
    Dense,
    Experts,
    ModelConfig,
    RopeConfig,
    ShortConv,
)
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
# What llama.cpp's converter divides the frequency of a pair by that does not turn.
STILL_FACTOR = 1e30
# llama.cpp's number for shares by sigmoids.
SIGMOID_GATING = 2

Scaling = Literal["none", "linear", "yarn", "longrope"]
Key = float | int | list[int] | list[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtHeads:
    """The value heads of a delta net, `size` numbers of each, as llama.cpp wants them.

    Canonical weights have all heads that share the keys of one of `key_heads` side by side; it has
    the first of each, then the second of each.
    """

    key_heads: int
    value_heads: int
    size: int

    @property
    def places(self) -> tuple[int, ...]:
        """Of the heads in llama.cpp's order the canonical numbers."""
        order = np.arange(self.value_heads).reshape(self.key_heads, -1)
        return tuple(order.T.reshape(-1).tolist())

    def runs(self, rows: range) -> tuple[range, ...]:
        """Canonical `rows` in llama.cpp's order; those before the heads, if any, stay first."""
        before = len(rows) - self.value_heads * self.size
        starts = (before + place * self.size for place in self.places)
        heads = tuple(rows[start : start + self.size] for start in starts)
        return (rows[:before], *heads) if before else heads

    @property
    def columns(self) -> np.ndarray:
        """Of columns in llama.cpp's order the canonical numbers."""
        starts = np.array(self.places)[:, None] * self.size
        return (starts + np.arange(self.size)).reshape(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Rows [start, stop) of a canonical weight, times `factor`, under a name llama.cpp reads.

    `interleave` is 0, or the rows of a head whose pairs (i, i + interleave/2) become neighbours.
    `experts` is 0, or how many there are: the canonical weight has `stretch` rows of each, of which
    [start, stop) are taken, and the shape begins with their number. `dealt`: rows are in the order
    of these heads; `dealt_columns`: columns are. `decays`: it holds -exp of the weight.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    start: int = 0
    interleave: int = 0
    factor: float = 1.0
    experts: int = 0
    stretch: int = 0
    dealt: DealtHeads | None = None
    dealt_columns: DealtHeads | None = None
    decays: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in a file, which has no axes of length 1 between the others."""
        return (*self.shape[:1], *(n for n in self.shape[1:-1] if n > 1), *self.shape[1:][-1:])

    @property
    def rows(self) -> tuple[range, ...]:
        """Which rows of the canonical weight are taken, in their order."""
        count = self.shape[1] if self.experts else self.shape[0]
        starts = (one * self.stretch + self.start for one in range(max(1, self.experts)))
        found = tuple(range(start, start + count) for start in starts)
        return found if self.dealt is None else self.dealt.runs(*found)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what is read of it as one matrix each, as `GgufRows.parts` has them."""
        if self.dealt is not None:
            return tuple(f"{self.name}.{start}" for start in sorted(run.start for run in self.rows))
        return part_names(self.name, self.experts)

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        """Whole heads of the canonical rows [n, ...] in this tensor's order, scaled."""
        if self.interleave:
            heads = rows.reshape(-1, 2, self.interleave // 2, *rows.shape[1:])
            rows = heads.swapaxes(1, 2).reshape(rows.shape)
        if self.dealt_columns is not None:
            rows = rows[:, self.dealt_columns.columns]
        if self.decays:
            rows = -np.exp(rows)
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
    has none, and `context_length` then ends where a window would begin to matter. `head_dim` is
    that of layers which see everything. `keys` are of the architecture's own, such as
    `embedding_scale`: a float, a whole number, or a list of one for each layer.
    """

    architecture: str
    config: ModelConfig
    rope: GgufRope
    tensors: tuple[GgufTensor, ...]
    context_length: int
    head_dim: int
    window_tokens: int = 0
    windowed: tuple[bool, ...] = ()
    keys: Mapping[str, Key] = field(default_factory=dict[str, Key])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """What llama.cpp computes under a name, of the traits `_traits` finds.

    It computes those of `_USUAL` too, but for what it `lacks`.
    `interleaved`: it rotates neighbouring channels, checkpoints rotate halves. `rope_tensors`: it
    reads tensors of rotary factors. `fused`: it wants one tensor for q, k and v, and one for gate
    and up. `windows`: layers may have one. `keyed_scales`: its embedding and its attention are
    multiplied by what keys say. `windowed_base`: a key says by which base layers with a window
    rotate; else it is that of all others, whose scaling they leave out. `always_factors`: the
    table of layers that see everything is always such tensors. `unscaled`: it does not divide
    queries by the root of their size. `called`: tensors that have other names than in most.
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
    always_factors: bool = False
    unscaled: bool = False
    called: Mapping[str, str] = field(default_factory=dict[str, str])


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
_PLAIN_EXPERTS = "experts chosen by their shares alone"
_BIASED_CHOICE = "experts chosen by sigmoids and biases"
_LATER_EXPERTS = "experts in some layers alone"
_WINDOWLESS = "layers that all see everything"
# What an architecture need not name to compute it, because most do.
_USUAL = frozenset(
    {
        *(_RMS_NORM, _GATED, _TIED, _UNTIED, _UNCAPPED, _WINDOWS_OTHERWISE, _OTHER_STILL),
        *(_GROUPED, _DENSE, _PLAIN_EXPERTS, _WINDOWLESS),
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
        _Architecture(
            name="lfm2",
            computes=frozenset({_QK_NORM}),
            called={"output_norm": "token_embd_norm"},
        ),
        _Architecture(
            name="lfm2moe",
            computes=frozenset({_QK_NORM, _EXPERTS, _NORMALISED, _BIASED_CHOICE, _LATER_EXPERTS}),
            lacks=frozenset({_PLAIN_EXPERTS}),
            called={"output_norm": "token_embd_norm"},
        ),
        _Architecture(
            name="gemma4",
            computes=frozenset(
                {_QK_NORM, _SANDWICH, _GELU, _FINAL_CAP, _WIDTH, _SCALED, _TWO_ROPES}
            ),
            lacks=frozenset({_WINDOWLESS}),
            rope_tensors=True,
            windows=True,
            windowed_base=True,
            always_factors=True,
            unscaled=True,
        ),
        _Architecture(
            name="qwen35",
            computes=frozenset({_QK_NORM, _WIDTH, _PARTIAL}),
            called={"ffn_norm": "post_attention_norm"},
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
    "lfm2": ("lfm2",),
    "lfm2_moe": ("lfm2moe",),
    "gemma4_text": ("gemma4",),
    "gemma4_unified_text": ("gemma4",),
    "qwen3_5_text": ("qwen35",),
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


def spare_tensors(config: ModelConfig) -> frozenset[str]:
    """Tensors that a file may hold although nothing reads them, as `Family.spare` knows them."""
    return frozenset(
        f"blk.{index}.{name}.weight"
        for index, layer in enumerate(config.layers)
        if layer.attends and not layer.owns_keys
        for name in ("attn_k", "attn_v", "attn_k_norm")
    )


def _traits(config: ModelConfig) -> dict[str, bool]:
    """What some architecture there does not compute, and whether any layer has it."""
    mixers = _attending(config)
    nets = [layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNet)]
    feeds = [layer.feed for layer in config.layers]
    experts = [feed for feed in feeds if isinstance(feed, Experts)]
    kinds = [_kind_of_experts(feed) for feed in experts]
    sizes = {(mixer.window_tokens > 0, mixer.head_dim) for mixer in mixers}
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
        _PARTIAL: any(
            2 * len(config.ropes[mixer.rope].inv_freq) != mixer.head_dim
            for mixer in mixers
            if config.ropes[mixer.rope] in turning
        ),
        _LONG_ROPE: config.has_long_rope,
        _SCALED: config.embedding_scale != 1,
        _GROWTH: any(mixer.growth for mixer in mixers),
        _GROUPED: any(mixer.kv_heads != mixer.heads for mixer in mixers),
        _DENSE: len(experts) < len(feeds),
        _EXPERTS: bool(experts),
        _NORMALISED: any(feed.normalised for feed in experts),
        _UNNORMALISED: any(not feed.normalised for feed in experts),
        _LATER_EXPERTS: 0 < len(experts) < len(feeds),
        "experts before layers without them": feeds[len(feeds) - len(experts) :] != experts,
        _PLAIN_EXPERTS: _PLAIN_EXPERTS in kinds,
        _BIASED_CHOICE: _BIASED_CHOICE in kinds,
        "experts of another kind": None in kinds,
        _PARALLEL: any(layer.parallel for layer in config.layers),
        _HEAD_BIAS: config.head_bias,
        _TWO_ROPES: len(turning) > 1,
        _STILL: any(still),
        _OTHER_STILL: still != [(layer + 1) % 4 == 0 for layer in range(len(still))],
        _WINDOWS_OTHERWISE: any(bool(w) != (i % 2 == 0) for i, w in enumerate(config.windows)),
        _WINDOWLESS: not any(config.windows),
        "heads whose sizes differ otherwise than by windows": (
            len(sizes) > len({windowed for windowed, _ in sizes})
        ),
        # It takes these, whatever they are, for the two kinds of keys there are.
        "layers that read the keys of others than the last two that have any": any(
            mixer.kv_from != config.first_reader - (2 if mixer.window_tokens else 1)
            for mixer in mixers
            if mixer.kv_from is not None
        ),
        "a table of per-layer embeddings of other tokens": (
            config.per_layer is not None and config.per_layer.rows != config.vocab_size
        ),
        "delta nets whose keys are not as wide as their values": any(
            net.key_dim != net.value_dim for net in nets
        ),
        # It takes one number for both.
        f"norms beside delta nets with another epsilon than {SQUARES_EPS}": (
            bool(nets) and config.norm_eps != SQUARES_EPS
        ),
        _TIED: config.tied_head,
        _UNTIED: not config.tied_head,
        _UNCAPPED: not config.final_softcap or any(not mixer.softcap for mixer in mixers),
        _ATTENTION_SCALE: any(
            mixer.qk_norm == "none"
            and not math.isclose(mixer.scale, mixer.head_dim**-0.5, rel_tol=1e-6)
            for mixer in mixers
        ),
    }


def _attending(config: ModelConfig) -> list[Attention]:
    return [layer.mixer for layer in config.layers if isinstance(layer.mixer, Attention)]


def _kind_of_experts(feed: Experts) -> str | None:
    """Which of the two kinds that some architecture computes, or None; weights have the scale."""
    plain = Experts(
        count=feed.count,
        chosen=feed.chosen,
        width=feed.width,
        normalised=feed.normalised,
        scale=feed.scale,
    )
    biased = replace(plain, scoring="sigmoid", choice_bias=True)
    return {plain: _PLAIN_EXPERTS, biased: _BIASED_CHOICE}.get(feed)


def _describe(config: ModelConfig, architecture: _Architecture, rope: GgufRope) -> GgufModel:
    windows = config.windows
    windowed = tuple(tokens > 0 for tokens in windows)
    context_length = config.context_length
    if not architecture.windows and any(windowed):
        context_length = min(context_length, *filter(None, windows))
    mixers = _attending(config)
    if mixers[0].growth:
        rope = replace(rope, original_context=mixers[0].growth_tokens)
    tensors: dict[str, GgufTensor] = {}
    for tensor in _tensors(config, architecture):
        # Keys that are values too are one tensor.
        tensors.setdefault(tensor.name, tensor)
    return GgufModel(
        architecture=architecture.name,
        config=config,
        rope=rope,
        tensors=tuple(tensors.values()),
        context_length=context_length,
        head_dim=next((one for one in mixers if not one.window_tokens), mixers[0]).head_dim,
        window_tokens=max(windows),
        keys=_multipliers(config, architecture) | _own_keys(config, architecture),
        windowed=windowed if architecture.windows and any(windowed) else (),
    )


def _multipliers(config: ModelConfig, architecture: _Architecture) -> dict[str, Key]:
    """Keys of scales and caps; those of residuals and logits are in the weights already."""
    mixer = _attending(config)[0]
    scales = {"embedding_scale": config.embedding_scale, "residual_scale": 1.0, "logit_scale": 1.0}
    found: dict[str, Key] = {}
    if architecture.keyed_scales:
        found |= {**scales, "attention.scale": mixer.scale}
    if mixer.softcap:
        found["attn_logit_softcapping"] = mixer.softcap
    if config.final_softcap:
        found["final_logit_softcapping"] = config.final_softcap
    if mixer.growth:
        found["attention.temperature_scale"] = mixer.growth
    return found


def _own_keys(config: ModelConfig, architecture: _Architecture) -> dict[str, Key]:
    """Keys of parts that few architectures have."""
    found: dict[str, Key] = {}
    if (conv := config.conv_shape) is not None:
        found["shortconv.l_cache"] = conv.taps
    if (net := config.delta_shape) is not None:
        pairs = len(config.ropes[0].inv_freq)
        found |= {
            "ssm.conv_kernel": net.taps,
            "ssm.state_size": net.key_dim,
            "ssm.group_count": net.key_heads,
            "ssm.time_step_rank": net.value_heads,
            "ssm.inner_size": net.value_heads * net.value_dim,
            "attention.recurrent_layers": [not layer.attends for layer in config.layers],
            # Every third pair turns by another number of a position; of text all are one.
            "rope.dimension_sections": [*(-(-(pairs - part) // 3) for part in range(3)), 0],
        }
    if architecture.name == "gemma4":
        windowed = next(one for one in _attending(config) if one.window_tokens)
        sizes = ("attention.key_length_swa", "attention.value_length_swa")
        found |= {
            **dict.fromkeys((*sizes, "rope.dimension_count_swa"), windowed.head_dim),
            "attention.shared_kv_layers": config.num_layers - config.first_reader,
            "embedding_length_per_layer_input": config.per_layer.width if config.per_layer else 0,
            # A file that does not say it has another one there.
            "final_logit_softcapping": config.final_softcap,
        }
    if architecture.name == "lfm2moe":
        dense = sum(isinstance(layer.feed, Dense) for layer in config.layers)
        found |= {"leading_dense_block_count": dense, "expert_gating_func": SIGMOID_GATING}
    return found


# Tensors


def _tensors(config: ModelConfig, architecture: _Architecture) -> Iterator[GgufTensor]:
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    # Exact for a tied head too, because the last norm undoes what the embedding gains.
    gain = _embedding_gain(config, architecture)
    yield GgufTensor(name="token_embd.weight", source="embed", shape=table, factor=gain)
    if not config.tied_head:
        yield GgufTensor(name="output.weight", source="head", shape=table)
    final_norm = architecture.called.get("output_norm", "output_norm")
    yield GgufTensor(
        name=f"{final_norm}.weight",
        source="final_norm",
        shape=(hidden,),
        factor=1 / gain if config.tied_head else 1.0,
    )
    if config.norm == "layer":
        yield GgufTensor(name="output_norm.bias", source="final_norm_bias", shape=(hidden,))
    if config.head_bias:
        yield GgufTensor(name="output.bias", source="head_bias", shape=(config.vocab_size,))
    yield from _per_layer_tensors(config)
    for layer in range(config.num_layers):
        shapes, gain = layer_shapes(config, layer), _query_gain(config, layer, architecture)
        for source, parts in _parts(config, layer, architecture).items():
            feed, row = config.layers[layer].feed, 0
            experts = feed.count if isinstance(feed, Experts) and is_stack(source) else 0
            stretch = shapes[source][0] // max(1, experts)
            for part in parts:
                rows = stretch if part.rows is None else part.rows
                # A norm of the queries carries it, else what makes them does.
                carries = source == "q_norm" or (part.name == "attn_q" and "q_norm" not in shapes)
                name = f"blk.{layer}.{architecture.called.get(part.name, part.name)}"
                end = ".bias" if source.endswith("bias") else "" if part.decays else ".weight"
                yield GgufTensor(
                    name=f"{name}{end}",
                    source=f"layers.{layer}.{source}",
                    shape=(*([experts] if experts else []), rows, *shapes[source][1:]),
                    start=row,
                    interleave=part.interleave,
                    factor=gain if carries else 1.0,
                    experts=experts,
                    stretch=stretch,
                    dealt=part.dealt,
                    dealt_columns=part.dealt_columns,
                    decays=part.decays,
                )
                row += rows
            assert row == stretch


def _per_layer_tensors(config: ModelConfig) -> Iterator[GgufTensor]:
    """Those that all layers' own embeddings come from; llama.cpp scales them itself."""
    if config.per_layer is None:
        return
    width, columns = config.per_layer.width, config.num_layers * config.per_layer.width
    yield GgufTensor(
        name="per_layer_token_embd.weight",
        source="per_layer_embed",
        shape=(config.per_layer.rows, columns),
    )
    yield GgufTensor(
        name="per_layer_model_proj.weight",
        source="per_layer_model",
        shape=(columns, config.hidden_size),
        factor=config.hidden_size**0.5,
    )
    yield GgufTensor(
        name="per_layer_proj_norm.weight",
        source="per_layer_norm",
        shape=(width,),
        factor=2**0.5,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor, its rows of a canonical weight (None: all), and how `GgufTensor` orders them."""

    name: str
    rows: int | None = None
    interleave: int = 0
    dealt: DealtHeads | None = None
    dealt_columns: DealtHeads | None = None
    decays: bool = False


def _parts(
    config: ModelConfig, layer: int, architecture: _Architecture
) -> dict[str, tuple[_Part, ...]]:
    """Canonical weight of a layer -> its tensors in the order of its rows."""
    mixer, feed = config.layers[layer].mixer, config.layers[layer].feed
    gate_up = (_Part("ffn_gate", feed.width), _Part("ffn_up", feed.width))
    if architecture.fused:
        gate_up = (_Part("ffn_up"),)
    names = {
        "attn_norm": (_Part("attn_norm"),),
        "attn_norm_bias": (_Part("attn_norm"),),
        "post_attn_norm": (_Part("post_attention_norm"),),
        "mlp_norm": (_Part("ffn_norm"),),
        "mlp_norm_bias": (_Part("ffn_norm"),),
        "up": (_Part("ffn_up"),),
        "up_bias": (_Part("ffn_up"),),
        "gate_up": gate_up,
        "gate_up_bias": gate_up,
        "down": (_Part("ffn_down"),),
        "down_bias": (_Part("ffn_down"),),
        "post_mlp_norm": (_Part("post_ffw_norm"),),
        "router": (_Part("ffn_gate_inp"),),
        "choice_bias": (_Part("exp_probs_b"),),
        "experts_gate_up": (_Part("ffn_gate_exps", feed.width), _Part("ffn_up_exps", feed.width)),
        "experts_down": (_Part("ffn_down_exps"),),
        "per_layer_gate": (_Part("inp_gate"),),
        "per_layer_up": (_Part("proj"),),
        "post_per_layer_norm": (_Part("post_norm"),),
        "scalar": (_Part("layer_output_scale"),),
    }
    match mixer:
        case Attention():
            names |= _attention_parts(mixer, architecture)
        case ShortConv():
            names |= {
                "in_proj": (_Part("shortconv.in_proj"),),
                "conv": (_Part("shortconv.conv"),),
                "out_proj": (_Part("shortconv.out_proj"),),
            }
        case DeltaNet():
            names |= _delta_parts(mixer)
    return {name: names[name] for name in layer_shapes(config, layer)}


def _attention_parts(mixer: Attention, architecture: _Architecture) -> dict[str, tuple[_Part, ...]]:
    turned = mixer.head_dim if architecture.interleaved else 0
    query, key = mixer.projected_width - 2 * mixer.kv_width, mixer.kv_width
    qkv = (_Part("attn_q", query, turned),)
    if key:
        values = "attn_k" if mixer.values == "keys" else "attn_v"
        qkv = (*qkv, _Part("attn_k", key, turned), _Part(values, key))
    if architecture.fused:
        qkv = (_Part("attn_qkv"),)
    return {
        "qkv": qkv,
        "qkv_bias": qkv,
        "q_norm": (_Part("attn_q_norm"),),
        "k_norm": (_Part("attn_k_norm"),),
        "o": (_Part("attn_output"),),
        "o_bias": (_Part("attn_output"),),
    }


def _delta_parts(net: DeltaNet) -> dict[str, tuple[_Part, ...]]:
    """Where several value heads share the keys of one, they are dealt out in another order."""

    def dealt(size: int) -> DealtHeads | None:
        if net.value_heads == net.key_heads:
            return None
        return DealtHeads(key_heads=net.key_heads, value_heads=net.value_heads, size=size)

    heads, shape = dealt(net.value_dim), net.shape(1)
    single = dealt(1)
    return {
        "in_proj": (
            _Part("attn_qkv", shape.conv_width, dealt=heads),
            _Part("attn_gate", shape.value_width, dealt=heads),
        ),
        "gates": (
            _Part("ssm_beta", net.value_heads, dealt=single),
            _Part("ssm_alpha", net.value_heads, dealt=single),
        ),
        "conv": (_Part("ssm_conv1d", dealt=heads),),
        "decay": (_Part("ssm_a", dealt=single, decays=True),),
        "dt_bias": (_Part("ssm_dt", dealt=single),),
        "head_scale": (_Part("ssm_norm"),),
        "out_proj": (_Part("ssm_out", dealt_columns=heads),),
    }


def _embedding_gain(config: ModelConfig, architecture: _Architecture) -> float:
    """The model's embedding scale over llama.cpp's, which is not rounded to the trained type."""
    if _SCALED not in architecture.computes or architecture.keyed_scales:
        return 1.0
    gain = config.embedding_scale / math.sqrt(config.hidden_size)
    return 1.0 if math.isclose(gain, 1.0, rel_tol=1e-6) else gain


def _query_gain(config: ModelConfig, layer: int, architecture: _Architecture) -> float:
    """The model's attention scale over llama.cpp's."""
    mixer = config.layers[layer].mixer
    if architecture.keyed_scales or not isinstance(mixer, Attention):
        return 1.0
    theirs = 1.0 if architecture.unscaled else mixer.head_dim**-0.5
    large = {"gemma3": GEMMA3_27B_LAYERS, "gemma2": GEMMA2_27B_LAYERS}.get(architecture.name)
    if config.num_layers == large:
        theirs = (config.hidden_size // config.num_heads) ** -0.5
    gain = mixer.scale / theirs
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
    plain = None if architecture.always_factors else _plain(rope)
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
    if not table.all():
        return None
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
    still = found == 0
    factors = _powers(NEUTRAL_BASE, len(found)) / np.where(still, 1, found)
    return np.where(still, STILL_FACTOR, factors).astype(np.float32)


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
