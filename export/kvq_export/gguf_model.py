"""What a model is to llama.cpp: its architecture there, its rotary table, its keys, its tensors.

Refuses what llama.cpp does not compute. Knows neither files nor widths: a tensor is rows of a
canonical weight.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvq.errors import UnsupportedModelError, argument
from kvq_export.gguf_architectures import (
    CANDIDATES,
    COMPUTED,
    SCALED,
    Architecture,
    attending,
    not_computed,
)
from kvq_export.gguf_ropes import GgufRope, gguf_rope
from kvq_models.config import (
    Attention,
    DeltaNet,
    Dense,
    Experts,
    ModelConfig,
    ShortConv,
)
from kvq_models.family import is_stack, layer_shapes
from kvq_models.rope import RopeSettings

# llama.cpp takes a gemma3 of this depth for the 27B model, whose scale is by hidden size.
GEMMA3_27B_LAYERS = 62
# Likewise of a gemma2.
GEMMA2_27B_LAYERS = 46
# llama.cpp's number for shares by sigmoids.
SIGMOID_GATING = 2
_FUSED_EXPERTS = "ffn_gate_up_exps"

Key = float | int | list[int] | list[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtHeads:
    """The value heads of a delta net, `size` numbers of each, as llama.cpp wants them.

    Canonical weights have all heads that share the keys of one of `key_heads` side by side; it has
    the first of each, then the second of each. Any other rows in runs of `size` may be dealt so.
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
        architecture = COMPUTED[name]
        missing = not_computed(config, architecture)
        rope = gguf_rope(config, architecture, settings)
        if not missing and rope is not None:
            return _describe(config, architecture, rope)
        what = ", ".join(missing) or "a rotary table that its keys do not describe"
        refusals.append(f"not as {name}, which does not compute {what}")
    raise UnsupportedModelError(
        f"llama.cpp cannot compute this {config.model_type} model: "
        f"{'; '.join(refusals)}; export it with {argument('format', 'onnx')}"
    )


def tensors_of(
    config: ModelConfig, architecture: str, names: Collection[str]
) -> tuple[GgufTensor, ...]:
    """The tensors of a model in a file of this architecture, those of its rotary table left out.

    `names` are those of the file: gate and up of experts are one tensor there, or two.
    """
    fused = any(name.endswith(f".{_FUSED_EXPERTS}.weight") for name in names)
    return tuple(_tensors(config, replace(COMPUTED[architecture], fused_experts=fused)))


def expert_factors(layer: int) -> str:
    """The tensor that a file may have of what a layer's experts' outputs are multiplied by."""
    return f"blk.{layer}.ffn_down_exps.scale"


def spare_tensors(config: ModelConfig) -> frozenset[str]:
    """Tensors that a file may hold although nothing reads them, as `Family.spare` knows them."""
    return frozenset(
        f"blk.{index}.{name}.weight"
        for index, layer in enumerate(config.layers)
        if layer.attends and not layer.owns_keys
        for name in ("attn_k", "attn_v", "attn_k_norm")
    )


def _describe(config: ModelConfig, architecture: Architecture, rope: GgufRope) -> GgufModel:
    windows = config.windows
    windowed = tuple(tokens > 0 for tokens in windows)
    context_length = config.context_length
    if not architecture.windows and any(windowed):
        context_length = min(context_length, *filter(None, windows))
    mixers = attending(config)
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


def _multipliers(config: ModelConfig, architecture: Architecture) -> dict[str, Key]:
    """Keys of scales and caps; those of residuals and logits are in the weights already."""
    mixer = attending(config)[0]
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


def _own_keys(config: ModelConfig, architecture: Architecture) -> dict[str, Key]:
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
        }
        if architecture.name != "qwen3next":
            # Every third pair turns by another number of a position; of text all are one.
            sections = [-(-(pairs - part) // 3) for part in range(3)]
            found["rope.dimension_sections"] = [*sections, 0]
    if architecture.name == "gemma4":
        windowed = next(one for one in attending(config) if one.window_tokens)
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


def _tensors(config: ModelConfig, architecture: Architecture) -> Iterator[GgufTensor]:
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
                end = part.end or (".bias" if source.endswith("bias") else ".weight")
                yield GgufTensor(
                    name=f"{name}{'' if part.decays else end}",
                    source=f"layers.{layer}.{source}",
                    shape=(*([experts] if experts else []), rows, *shapes[source][1:]),
                    start=row,
                    interleave=part.interleave,
                    factor=gain if carries else part.factor,
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
    """A tensor, its rows of a canonical weight (None: all), and how `GgufTensor` orders them.

    `end` is of its name, where it is not that of its kind.
    """

    name: str
    rows: int | None = None
    interleave: int = 0
    factor: float = 1.0
    end: str = ""
    dealt: DealtHeads | None = None
    dealt_columns: DealtHeads | None = None
    decays: bool = False


def _parts(
    config: ModelConfig, layer: int, architecture: Architecture
) -> dict[str, tuple[_Part, ...]]:
    """Canonical weight of a layer -> its tensors in the order of its rows."""
    mixer, feed = config.layers[layer].mixer, config.layers[layer].feed
    gate_up = (_Part("ffn_gate", feed.width), _Part("ffn_up", feed.width))
    if architecture.fused:
        gate_up = (_Part("ffn_up"),)
    shared = feed.shared.width if isinstance(feed, Experts) and feed.shared else None
    if isinstance(feed, Experts) and feed.beside is not None:
        gate_up = (_Part("ffn_gate", feed.beside.width), _Part("ffn_up", feed.beside.width))
    experts_up = (_Part("ffn_gate_exps", feed.width), _Part("ffn_up_exps", feed.width))
    if architecture.fused_experts:
        experts_up = (_Part(_FUSED_EXPERTS),)
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
        "router_bias": (_Part("ffn_gate_inp"),),
        # llama.cpp divides by this root itself.
        "router_norm": (_Part("ffn_gate_inp", factor=config.hidden_size**0.5, end=".scale"),),
        "choice_bias": (_Part("exp_probs_b"),),
        "moe_norm": (_Part("pre_ffw_norm_2"),),
        "experts_gate_up": experts_up,
        "experts_gate_up_bias": experts_up,
        "experts_down": (_Part("ffn_down_exps"),),
        "experts_down_bias": (_Part("ffn_down_exps"),),
        "post_dense_norm": (_Part("post_ffw_norm_1"),),
        "post_moe_norm": (_Part("post_ffw_norm_2"),),
        "shared_gate_up": (_Part("ffn_gate_shexp", shared), _Part("ffn_up_shexp", shared)),
        "shared_down": (_Part("ffn_down_shexp"),),
        "shared_gate": (_Part("ffn_gate_inp_shexp"),),
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
            names |= _delta_parts(mixer, architecture)
    return {name: names[name] for name in layer_shapes(config, layer)}


def _attention_parts(mixer: Attention, architecture: Architecture) -> dict[str, tuple[_Part, ...]]:
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
        "sink_logits": (_Part("attn_sinks"),),
    }


def _delta_parts(net: DeltaNet, architecture: Architecture) -> dict[str, tuple[_Part, ...]]:
    """Where several value heads share the keys of one, they may be dealt out in another order."""

    def dealt(size: int) -> DealtHeads | None:
        if net.value_heads == net.key_heads or architecture.delta != "dealt":
            return None
        return DealtHeads(key_heads=net.key_heads, value_heads=net.value_heads, size=size)

    heads, shape = dealt(net.value_dim), net.shape(1)
    single = dealt(1)
    gates = (
        _Part("ssm_beta", net.value_heads, dealt=single),
        _Part("ssm_alpha", net.value_heads, dealt=single),
    )
    if architecture.delta == "by key head":
        # Of each key head what its value heads take in, then what they forget.
        own = net.value_heads // net.key_heads
        both = DealtHeads(key_heads=2, value_heads=2 * net.key_heads, size=own)
        gates = (_Part("ssm_ba", dealt=both),)
    return {
        "in_proj": (
            _Part("attn_qkv", shape.conv_width, dealt=heads),
            _Part("attn_gate", shape.value_width, dealt=heads),
        ),
        "gates": gates,
        "conv": (_Part("ssm_conv1d", dealt=heads),),
        "decay": (_Part("ssm_a", dealt=single, decays=True),),
        "dt_bias": (_Part("ssm_dt", dealt=single),),
        "head_scale": (_Part("ssm_norm"),),
        "out_proj": (_Part("ssm_out", dealt_columns=heads),),
    }


def _embedding_gain(config: ModelConfig, architecture: Architecture) -> float:
    """The model's embedding scale over llama.cpp's, which is not rounded to the trained type."""
    if SCALED not in architecture.computes or architecture.keyed_scales:
        return 1.0
    gain = config.embedding_scale / math.sqrt(config.hidden_size)
    return 1.0 if math.isclose(gain, 1.0, rel_tol=1e-6) else gain


def _query_gain(config: ModelConfig, layer: int, architecture: Architecture) -> float:
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
