"""Maps canonical weights to the tensors of a GGUF file, in llama.cpp's names and orders.

It serves files that are read and files that are written. A tensor is rows of a canonical weight.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvq.errors import UnsupportedModelError
from kvq_export.gguf.gguf_architectures import ARCHITECTURES, Architecture
from kvq_models.config import Attention, DeltaNet, Experts, ModelConfig, ShortConv
from kvq_models.family import is_stack, layer_shapes

_FUSED_EXPERTS = "ffn_gate_up_exps"


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtHeads:
    """Orders the value heads of a delta net, `size` numbers of each, as llama.cpp wants them.

    Canonical weights have all heads that share the keys of one of `key_heads` side by side;
    llama.cpp has the first of each, then the second of each. Other rows in runs of `size` may be
    dealt out in the same way.
    """

    key_heads: int
    value_heads: int
    size: int

    @property
    def columns(self) -> np.ndarray:
        """Returns the canonical numbers of columns in llama.cpp's order."""
        order = np.arange(self.value_heads * self.size).reshape(self.key_heads, -1, self.size)
        return order.swapaxes(0, 1).reshape(-1)

    def runs(self, rows: range) -> tuple[range, ...]:
        """Returns canonical `rows` in llama.cpp's order; those before the heads stay first."""
        before = len(rows) - self.value_heads * self.size
        starts = (before + self.columns[:: self.size]).tolist()
        heads = tuple(rows[start : start + self.size] for start in starts)
        return (rows[:before], *heads) if before else heads


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Takes runs of `rows` of a canonical weight, times `factor`, under a name of llama.cpp's.

    `interleave` is 0, or the rows of a head whose pairs (i, i + interleave/2) become neighbours.
    `experts` is 0, or how many there are: each has a run, and the shape begins with their number.
    `dealt`: rows are in the order of these heads; `dealt_columns`: columns are. `decays`: it holds
    -exp of the weight.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    rows: tuple[range, ...] = ()
    interleave: int = 0
    factor: float = 1.0
    experts: int = 0
    dealt: DealtHeads | None = None
    dealt_columns: DealtHeads | None = None
    decays: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Returns its shape in a file, which has no axes of length 1 between the others."""
        return (*self.shape[:1], *(n for n in self.shape[1:-1] if n > 1), *self.shape[1:][-1:])

    @property
    def parts(self) -> dict[str, range]:
        """Returns `rows` by the names of what is read of it, each as a matrix or vector.

        Names have the place among the rows of the canonical weight.
        """
        if not self.experts and self.dealt is None:
            return {self.name: self.rows[0]}
        places = {start: place for place, start in enumerate(sorted(r.start for r in self.rows))}
        return {f"{self.name}.{places[rows.start]}": rows for rows in self.rows}

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        """Puts whole heads of the canonical rows [n, ...] in this tensor's order, scaled."""
        if self.interleave:
            heads = rows.reshape(-1, 2, self.interleave // 2, *rows.shape[1:])
            rows = heads.swapaxes(1, 2).reshape(rows.shape)
        if self.dealt_columns is not None:
            rows = rows[:, self.dealt_columns.columns]
        if self.decays:
            rows = -np.exp(rows)
        return rows if self.factor == 1 else rows * np.float32(self.factor)


def tensors_of(
    config: ModelConfig, architecture: str, names: Collection[str]
) -> tuple[GgufTensor, ...]:
    """Returns the tensors of a model in a file of this architecture, without its rotary table's.

    `names` are those of the file: gate and up of experts are one tensor there, or two.
    """
    fused = any(name.endswith(f".{_FUSED_EXPERTS}.weight") for name in names)
    return tuple(model_tensors(config, replace(ARCHITECTURES[architecture], fused_experts=fused)))


def expert_factors(layer: int) -> str:
    """Names the tensor of the factors of experts' outputs, which a file may have."""
    return f"blk.{layer}.ffn_down_exps.scale"


def spare_tensors(config: ModelConfig) -> frozenset[str]:
    """Returns tensors that a file may have although nothing reads them, as `Family.spare` does."""
    return frozenset(
        f"blk.{index}.{name}.weight"
        for index, layer in enumerate(config.layers)
        if layer.attends and not layer.owns_keys
        for name in ("attn_k", "attn_v", "attn_k_norm")
    )


def model_tensors(config: ModelConfig, architecture: Architecture) -> Iterator[GgufTensor]:
    """Yields the tensors of a model in a file of this architecture, without its rotary table's."""
    yield from _outer_tensors(config, architecture.called.get("output_norm", "output_norm"))
    for layer in range(config.num_layers):
        shapes = layer_shapes(config, layer)
        for source, parts in _parts(config, layer, architecture).items():
            feed, row = config.layers[layer].feed, 0
            experts = feed.count if isinstance(feed, Experts) and is_stack(source) else 0
            stretch = shapes[source][0] // max(1, experts)
            for part in parts:
                rows = part.shape[0] or stretch
                starts = (expert * stretch + row for expert in range(max(1, experts)))
                runs = tuple(range(start, start + rows) for start in starts)
                name = f"blk.{layer}.{architecture.called.get(part.name, part.name)}"
                end = ".bias" if source.endswith("bias") else ".weight"
                yield replace(
                    part,
                    name=name if part.decays or name.endswith(".scale") else f"{name}{end}",
                    source=f"layers.{layer}.{source}",
                    shape=(*([experts] if experts else []), rows, *shapes[source][1:]),
                    rows=part.dealt.runs(*runs) if part.dealt else runs,
                    experts=experts,
                )
                row += rows
            assert row == stretch


def _outer_tensors(config: ModelConfig, final_norm: str) -> Iterator[GgufTensor]:
    """Yields the tensors of no layer; llama.cpp scales those of per-layer embeddings itself."""
    hidden, tokens, per_layer = config.hidden_size, config.vocab_size, config.per_layer
    tensors: list[tuple[str, str, tuple[int, ...], bool]] = [
        ("token_embd.weight", "embed", (tokens, hidden), True),
        ("output.weight", "head", (tokens, hidden), not config.tied_head),
        (f"{final_norm}.weight", "final_norm", (hidden,), True),
        ("output_norm.bias", "final_norm_bias", (hidden,), config.norm == "layer"),
        ("output.bias", "head_bias", (tokens,), config.head_bias),
    ]
    if per_layer is not None:
        columns = config.num_layers * per_layer.width
        tensors += [
            ("per_layer_token_embd.weight", "per_layer_embed", (per_layer.rows, columns), True),
            ("per_layer_model_proj.weight", "per_layer_model", (columns, hidden), True),
            ("per_layer_proj_norm.weight", "per_layer_norm", (per_layer.width,), True),
        ]
    factors = {"per_layer_model": hidden**0.5, "per_layer_norm": 2**0.5}
    for name, source, shape, is_there in tensors:
        if is_there:
            rows, factor = (range(shape[0]),), factors.get(source, 1.0)
            yield GgufTensor(name=name, source=source, shape=shape, rows=rows, factor=factor)


def _part(name: str, rows: int = 0, **order: Any) -> GgufTensor:
    """Returns a tensor of a layer before its place is known, with its rows (0: all)."""
    return GgufTensor(name=name, source="", shape=(rows,), **order)


# Canonical weights of a layer that are one tensor.
_WHOLE_PARTS = {
    "attn_norm": "attn_norm", "attn_norm_bias": "attn_norm", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "o": "attn_output", "o_bias": "attn_output",
    "sink_logits": "attn_sinks", "post_attn_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm", "mlp_norm_bias": "ffn_norm", "up": "ffn_up", "up_bias": "ffn_up",
    "down": "ffn_down", "down_bias": "ffn_down", "post_mlp_norm": "post_ffw_norm",
    "router": "ffn_gate_inp", "router_bias": "ffn_gate_inp", "choice_bias": "exp_probs_b",
    "moe_norm": "pre_ffw_norm_2", "experts_down": "ffn_down_exps",
    "experts_down_bias": "ffn_down_exps", "post_dense_norm": "post_ffw_norm_1",
    "post_moe_norm": "post_ffw_norm_2", "shared_down": "ffn_down_shexp",
    "shared_gate": "ffn_gate_inp_shexp", "per_layer_gate": "inp_gate", "per_layer_up": "proj",
    "post_per_layer_norm": "post_norm", "scalar": "layer_output_scale",
}  # fmt: skip


def _parts(
    config: ModelConfig, layer: int, architecture: Architecture
) -> dict[str, tuple[GgufTensor, ...]]:
    """Returns the tensors of each canonical weight of a layer, in the order of its rows.

    Raises `UnsupportedModelError` for a weight that llama.cpp has no tensor for.
    """
    mixer, feed = config.layers[layer].mixer, config.layers[layer].feed
    dense = shared = feed
    if isinstance(feed, Experts):
        dense, shared = feed.beside or feed, feed.shared or feed

    def gate_and_up(end: str, width: int) -> tuple[GgufTensor, ...]:
        return _part(f"ffn_gate{end}", width), _part(f"ffn_up{end}", width)

    names = {source: (_part(name),) for source, name in _WHOLE_PARTS.items()}
    names |= {
        "gate_up": gate_and_up("", dense.width),
        # llama.cpp divides by this root itself.
        "router_norm": (_part("ffn_gate_inp.scale", factor=config.hidden_size**0.5),),
        "experts_gate_up": gate_and_up("_exps", feed.width),
        "shared_gate_up": gate_and_up("_shexp", shared.width),
    }
    match mixer:
        case Attention():
            names["qkv"] = _attention_parts(mixer, architecture)
        case ShortConv():
            parts = ("in_proj", "conv", "out_proj")
            names |= {name: (_part(f"shortconv.{name}"),) for name in parts}
        case DeltaNet():
            names |= _delta_parts(mixer, architecture)
    if architecture.fused:
        names |= {"gate_up": (_part("ffn_up"),), "qkv": (_part("attn_qkv"),)}
    if architecture.fused_experts:
        names["experts_gate_up"] = (_part(_FUSED_EXPERTS),)
    for name in ("qkv", "gate_up", "experts_gate_up"):
        names[f"{name}_bias"] = names.get(name, ())
    shapes = layer_shapes(config, layer)
    if unknown := shapes.keys() - names.keys():
        raise UnsupportedModelError(f"it has no tensor for {min(unknown)}")
    return {name: names[name] for name in shapes}


def _attention_parts(mixer: Attention, architecture: Architecture) -> tuple[GgufTensor, ...]:
    interleave = mixer.head_dim if architecture.interleaved else 0
    query, key = mixer.projected_width - 2 * mixer.kv_width, mixer.kv_width
    parts = (_part("attn_q", query, interleave=interleave),)
    if not key:
        return parts
    values = "attn_k" if mixer.values == "keys" else "attn_v"
    return (*parts, _part("attn_k", key, interleave=interleave), _part(values, key))


def _delta_parts(net: DeltaNet, architecture: Architecture) -> dict[str, tuple[GgufTensor, ...]]:
    """Returns the parts of a delta net, whose heads llama.cpp may want in another order.

    It does where several value heads share the keys of one.
    """
    shape, heads, single = net.shape(1), None, None
    if net.value_heads != net.key_heads and not architecture.by_key_head:
        heads, single = (
            DealtHeads(key_heads=net.key_heads, value_heads=net.value_heads, size=size)
            for size in (net.value_dim, 1)
        )
    gates = tuple(_part(f"ssm_{name}", net.value_heads, dealt=single) for name in ("beta", "alpha"))
    if architecture.by_key_head:
        # For each key head what its value heads take in, then what they forget.
        per_key_head = net.value_heads // net.key_heads
        both = DealtHeads(key_heads=2, value_heads=2 * net.key_heads, size=per_key_head)
        gates = (_part("ssm_ba", dealt=both),)
    return {
        "in_proj": (
            _part("attn_qkv", shape.conv_width, dealt=heads),
            _part("attn_gate", shape.value_width, dealt=heads),
        ),
        "gates": gates,
        "conv": (_part("ssm_conv1d", dealt=heads),),
        "decay": (_part("ssm_a", dealt=single, decays=True),),
        "dt_bias": (_part("ssm_dt", dealt=single),),
        "head_scale": (_part("ssm_norm"),),
        "out_proj": (_part("ssm_out", dealt_columns=heads),),
    }
