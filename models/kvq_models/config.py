"""The one description of a model that all other components read.

A model is a list of layers between an embedding and a head. A layer describes itself completely:
what mixes tokens, what feeds each token forward, where its norms are. Shapes of weights, the
forward pass, the graph and the check of a graph follow from the list. The file a model came from,
and the names of its weights there, are in `family`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np

from kvq.config import MOST_TAPS, AttentionParams, CacheShape, ConvShape, DeltaShape
from kvq.errors import ModelError, UsageError, reason_of
from kvq.reference.experts import SCORINGS, Scoring

T = TypeVar("T")

Activation = Literal["silu", "gelu_tanh"]
# How an expert's gate and up are combined: activation(gate) * up, or `clamped_swiglu`.
Gating = Literal["silu", "gelu_tanh", "clamped_swiglu"]
# rms: by the root mean square, with weights; layer: by mean and variance, with weights and biases.
NormKind = Literal["rms", "layer"]
# Where each half of a layer has a norm: before it, on its output, or both.
Norms = Literal["before", "after", "both"]
# What is normalised together before queries and keys rotate: each head, or all heads of a token.
QkNorm = Literal["none", "heads", "rows"]
# The matrix that makes a layer's values: their own, or that of the keys.
Values = Literal["own", "keys"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Describes one rotary table: the first 2 * len(inv_freq) dimensions of a head rotate.

    Dimension i rotates with dimension i + half. `inv_freq` holds float32 values (radians per
    position); cos and sin are multiplied by `factor`. A model trained with two tables also has
    `long_inv_freq`, which a whole session uses if its context exceeds `original_context` tokens.
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    long_inv_freq: tuple[float, ...] | None = None
    original_context: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Describes causal attention: `heads` query heads share `kv_heads` key-value heads.

    Args:
        heads: Query heads.
        kv_heads: Key-value heads, which the query heads share evenly.
        head_dim: Channels of a head.
        scale: Multiplies q.k.
        softcap: c > 0 turns the scaled product x into c * tanh(x / c); 0: none.
        window_tokens: Only this many newest tokens are seen; 0: all.
        rope: Index of the rotary table.
        qk_norm: How queries and keys are normalised before they rotate.
        qkv_bias: Whether the products of queries, keys and values have biases.
        output_bias: Whether the output product has a bias.
        growth: The query of a token at position p is multiplied by 1 + growth * ln(1 + p //
            growth_tokens), so that attention stays as sharp in a long context as in a short one; 0:
            it is not.
        growth_tokens: See `growth`.
        value_norm: Whether each head of values is divided by its root mean square.
        values: What makes the values: a matrix of their own, or that of the keys.
        kv_from: An earlier layer whose keys and values are read; this layer then has queries alone.
            None: its own are read.
        output_gate: Whether the matrix of queries makes a gate of every head too, after its query;
            the output of the head is multiplied by sigmoid(gate).
        sinks: Whether each head has a learned logit of no token beside those of its keys, which
            takes part in the softmax and gives nothing.
        head_gate: Whether one more product makes a number for every head, by whose sigmoid the
            output of the head is multiplied.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window_tokens: int = 0
    rope: int = 0
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    growth: float = 0.0
    growth_tokens: int = 0
    value_norm: bool = False
    values: Values = "own"
    kv_from: int | None = None
    output_gate: bool = False
    sinks: bool = False
    head_gate: bool = False

    @property
    def width(self) -> int:
        """Returns the columns of the output: all query heads side by side."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Returns the columns of its keys, and of its values; 0 if it reads another layer's."""
        return 0 if self.kv_from is not None else self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Returns the columns of the packed row: query heads, then key heads, then value heads."""
        return self.width + 2 * self.kv_width

    @property
    def projected_width(self) -> int:
        """Returns the columns of the matrix's output: the packed row, and the gates if any."""
        return self.qkv_width + self.width * self.output_gate


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv:
    """Describes a short convolution: each channel is summed over a token and a few before it.

    One matrix makes rows [B | C | x] of the input, three times as wide as the stream. The rows of B
    * x are summed over `taps` tokens, the token itself included, with weights of each channel. C
    times this sum goes through a second matrix. A short convolution has no keys and values, and no
    positions.
    """

    taps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """Describes a gated delta net: each of `value_heads` keeps a matrix that every token changes.

    One matrix makes queries, keys, values and a gate of the input; the first three are convolved
    over `taps` tokens, channel by channel, and activated. A second, small and exact matrix tells
    how much a head forgets and how much it takes in. The output of the heads is normalised head by
    head, multiplied by silu(gate), and goes through a third matrix. `value_heads` share the queries
    and keys of `key_heads`. A delta net has no positions. See `kvq.reference.delta`.
    """

    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def shape(self, num_layers: int) -> DeltaShape:
        """Returns the shape of `num_layers` such layers.

        Raises UsageError if it is not possible.
        """
        return DeltaShape(num_layers=num_layers, **dataclasses.asdict(self))


Mixer = Attention | ShortConv | DeltaNet


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """Describes an MLP of `width`: `down` of activation(gate) * up, or of activation(up)."""

    width: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Describes a mixture of `count` gated MLPs, of which each token uses `chosen`.

    A router gives every expert a share. A token's output is the sum of the outputs of its `chosen`
    experts with the largest shares, each multiplied by its share (Mixtral, arXiv 2401.04088).

    Args:
        count: Number of experts.
        chosen: Experts of a token.
        width: Columns of an expert.
        normalised: Whether the shares of the chosen experts are divided by their sum.
        activation: How gate and up are combined.
        beside: An MLP that each token also uses. Router, experts and this MLP then read the stream
            through a norm of their own each, and the outputs of the experts and of the MLP are
            normalised before they are added.
        shared: An MLP that each token also uses, with the input of the router. Its output is
            multiplied by the sigmoid of one more product, and added.
        scoring: The shares: the softmax of the router's products, or the sigmoid of each.
        choice_bias: Whether each expert has a number that is added to its share only to choose
            experts (arXiv 2408.15664).
        router_bias: Whether the products of the router have biases.
        bias: Whether the products of the experts have biases.
        scale: Multiplies the output; canonical weights contain it.
    """

    count: int
    chosen: int
    width: int
    normalised: bool
    activation: Gating = "silu"
    beside: Dense | None = None
    shared: Dense | None = None
    scoring: Scoring = "softmax"
    choice_bias: bool = False
    router_bias: bool = False
    bias: bool = False
    scale: float = 1.0
    # All experts are, as a `Dense` may be.
    gated: ClassVar[bool] = True


Feed = Dense | Experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Describes one layer: the outputs of its mixer and then of its feed are added to the stream.

    They are multiplied by `scale` before, which canonical weights contain. If the layer is
    `parallel`, the feed reads the same normalised input as the mixer, and not the mixer's output.
    After a `scaled` layer the stream is multiplied by a learned number.
    """

    mixer: Mixer
    feed: Feed
    norms: Norms = "before"
    scale: float = 1.0
    parallel: bool = False
    scaled: bool = False

    @property
    def attention(self) -> Attention:
        """Returns its mixer. Raises ModelError for a layer that does not attend."""
        if not isinstance(self.mixer, Attention):
            raise ModelError("a layer that does not attend has no heads of queries")
        return self.mixer

    @property
    def attends(self) -> bool:
        """Returns whether its mixer is attention."""
        return isinstance(self.mixer, Attention)

    @property
    def owns_keys(self) -> bool:
        """Returns whether tokens have keys and values of this layer."""
        return isinstance(self.mixer, Attention) and self.mixer.kv_from is None


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayer:
    """Describes a second embedding table with `width` numbers for every layer.

    A token's row of the table, which has `rows` tokens, is added to one matrix times the normalised
    stream that enters the first layer; both have `layers * width` columns. After its feed each
    layer multiplies its part by activation(gate . stream), and another matrix times this is
    normalised and added to the stream.
    """

    rows: int
    width: int
    activation: Activation = "gelu_tanh"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheClass:
    """Describes layers whose keys and values share one cache: `layers` of the model, of one shape.

    `windows` are their sliding windows, 0 for a layer that sees all. `kv_shared_layers` counts the
    layers of the model that have no keys and values and reuse those of the last layer here.
    """

    shape: CacheShape
    layers: tuple[int, ...]
    windows: tuple[int, ...]
    kv_shared_layers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Describes all arithmetic of a decoder-only model, apart from its weights.

    The embedding row is multiplied by `embedding_scale`. Logits are multiplied by `logits_scale`,
    which the canonical weight of the last norm contains, and become c * tanh(x / c) if
    `final_softcap` is a c > 0. Norm weights are stored as w - `norm_offset`. `norm` is the kind of
    all norms except those of queries and keys. With `head_bias` a bias is added to the logits. With
    `windows_apart` layers with a window have a cache of their own, which holds little more than the
    window; otherwise pages that left the window are dropped when space is short.

    A model may have a `draft_head`: one layer that guesses a token from the token before it and the
    model's state before that (multi-token prediction). It computes as a model of its own,
    `drafting`, which `joins` a token's embedding and such a state, each normalised, by one matrix.
    A *state* is the stream after the final norm. With `states` a pass can return those of its rows
    also where no draft head reads them: vectors of texts are made from them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    tied_head: bool
    context_length: int
    ropes: tuple[RopeConfig, ...]
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    norm_offset: float = 0.0
    norm: NormKind = "rms"
    head_bias: bool = False
    per_layer: PerLayer | None = None
    windows_apart: bool = False
    draft_head: Layer | None = None
    joins: bool = False
    states: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuses shapes that cannot be a model. Raises ModelError."""
        self._check_numbers()
        draft = () if self.draft_head is None else (self.draft_head,)
        for layer in dict.fromkeys((*self.layers, *draft)):
            self._check_layer(layer)
        self._check_sharing()
        if self.per_layer is not None:
            _check_count("tokens of per-layer embeddings", self.per_layer.rows, least=1)
            _check_count("numbers of a per-layer embedding", self.per_layer.width, least=1)
        for mixer in dict.fromkeys(layer.mixer for layer in self.layers):
            if not isinstance(mixer, Attention):
                continue
            rope, dim = self.ropes[mixer.rope], mixer.head_dim
            if not rope.inv_freq or 2 * len(rope.inv_freq) > dim:
                raise ModelError(
                    f"a rotary table turns {2 * len(rope.inv_freq)} of {dim} dimensions"
                )
        self._check_ropes()

    def _check_ropes(self) -> None:
        for rope in self.ropes:
            for value in (rope.factor, *rope.inv_freq, *(rope.long_inv_freq or ())):
                _check_real("a number of a rotary table", value)
            if rope.long_inv_freq is not None:
                _check_count("a table's original_context", rope.original_context, least=1)
                if len(rope.long_inv_freq) != len(rope.inv_freq):
                    raise ModelError("the long rotary table is not as long as the short one")

    def _check_numbers(self) -> None:
        for name in _POSITIVE:
            _check_count(name, getattr(self, name), least=1)
        for name in _REAL:
            _check_real(name, getattr(self, name))
        if self.norm not in get_args(NormKind):
            raise ModelError(f"the norm {self.norm!r} is none of {', '.join(get_args(NormKind))}")
        if not self.layers:
            raise ModelError("num_layers is 0; it must be a whole number, at least 1")
        for token in (*self.eos_token_ids, 0 if self.bos_token_id is None else self.bos_token_id):
            _check_count("a token id", token, least=0)

    def _check_layer(self, layer: Layer) -> None:
        mixer, feed = layer.mixer, layer.feed
        _check_count("intermediate_size", feed.width, least=1)
        if isinstance(feed, Experts):
            _check_count("the number of experts", feed.count, least=1, most=MOST_EXPERTS)
            _check_count("the experts of a token", feed.chosen, least=1, most=feed.count)
            self._check_mixture(feed, layer)
        else:
            _check_known("activation", feed.activation, get_args(Activation))
        _check_real("a layer's scale", layer.scale)
        _check_known("place of the norms", layer.norms, get_args(Norms))
        if layer.parallel and layer.norms != "before":
            raise ModelError("a layer whose halves are parallel has one norm, before both")
        if isinstance(mixer, ShortConv):
            _check_count("the rows of a convolution", mixer.taps, least=2, most=MOST_TAPS)
        elif isinstance(mixer, DeltaNet):
            for name, value in dataclasses.asdict(mixer).items():
                _check_count(f"{name} of a delta net", value, least=1)
            try:
                mixer.shape(1)
            except UsageError as error:
                raise ModelError(str(error)) from error
        else:
            self._check_attention(mixer)

    def _check_mixture(self, feed: Experts, layer: Layer) -> None:
        _check_real("the scale of experts", feed.scale)
        _check_known("activation", feed.activation, get_args(Gating))
        _check_known("scoring of experts", feed.scoring, SCORINGS)
        if feed.choice_bias and feed.scoring != "sigmoid":
            raise ModelError("a bias of the choice of experts is possible beside sigmoids alone")
        for other in (feed.beside, feed.shared):
            if other is not None:
                _check_count("intermediate_size", other.width, least=1)
                _check_known("activation", other.activation, get_args(Activation))
        if feed.beside is not None and (layer.norms != "both" or feed.shared is not None):
            raise ModelError("an MLP beside experts has norms before and after all of them")

    def _check_attention(self, mixer: Attention) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            _check_count(_CONFIG_NAMES[name], getattr(mixer, name), least=1)
        _check_count("a layer's window_tokens", mixer.window_tokens, least=0)
        _check_count("a layer's rope", mixer.rope, least=0, most=len(self.ropes) - 1)
        _check_real("attention_scale", mixer.scale)
        _check_real("attention_softcap", mixer.softcap)
        _check_real("the growth of queries", mixer.growth)
        least = 1 if mixer.growth else 0
        _check_count("the tokens after which queries grow", mixer.growth_tokens, least=least)
        if mixer.heads % mixer.kv_heads:
            raise ModelError(
                f"{mixer.heads} query heads cannot share {mixer.kv_heads} key-value heads "
                "evenly; num_attention_heads must be a multiple of num_key_value_heads"
            )
        _check_known("norm of queries and keys", mixer.qk_norm, get_args(QkNorm))
        _check_known("source of values", mixer.values, get_args(Values))
        if mixer.head_gate and mixer.output_gate:
            raise ModelError("a head has one gate: of every channel, or of all of them")
        if mixer.sinks and mixer.kv_from is not None:
            raise ModelError("a layer that reads another's keys has no sinks")

    def _check_sharing(self) -> None:
        """Checks that layers read stored keys of their own shape: those of the last of a class."""
        if self.draft_head is not None and not self.draft_head.owns_keys:
            raise ModelError("a draft head attends, with keys and values of its own")
        last = {cache_class.layers[-1] for cache_class in self.cache_classes}
        if not last:
            raise ModelError("no layer has keys and values: a model without any is not possible")
        other_mixers = {
            layer.mixer for layer in self.layers if not isinstance(layer.mixer, Attention)
        }
        if len(other_mixers) > 1:
            raise ModelError(
                "layers that do not attend must be alike: convolutions over different numbers of "
                "rows, or beside delta nets, are not possible"
            )
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            if not isinstance(mixer, Attention) or mixer.kv_from is None:
                continue
            source = mixer.kv_from
            if type(source) is not int or not 0 <= source < index or source not in last:
                raise ModelError(
                    f"layer {index} reads the keys of layer {source!r}, which must be an earlier "
                    "layer, the last of those that are like it and have keys of their own"
                )
            read = self.layers[source].attention
            if (mixer.heads, mixer.kv_heads, mixer.head_dim) != (
                read.heads,
                read.kv_heads,
                read.head_dim,
            ):
                raise ModelError(f"layer {index} reads the keys of a layer of another shape")

    @property
    def drafting(self) -> ModelConfig | None:
        """Returns the draft head as a model of one layer that shares the embedding and the head."""
        if self.draft_head is None:
            return None
        return dataclasses.replace(self, layers=(self.draft_head,), draft_head=None, joins=True)

    @property
    def has_states(self) -> bool:
        """Returns whether a pass can return the states of its rows."""
        return self.states or self.joins or self.draft_head is not None

    @property
    def num_layers(self) -> int:
        """Returns the number of layers."""
        return len(self.layers)

    @property
    def first_attention(self) -> Attention:
        """Returns the first layer's that attends; in a `uniform` model all have its shape."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def widest_feed(self) -> int:
        """Returns the columns of the widest MLP."""
        widths = [layer.feed.width for layer in self.layers]
        for layer in self.layers:
            if isinstance(layer.feed, Experts):
                mlps = (layer.feed.beside, layer.feed.shared)
                widths += [mlp.width for mlp in mlps if mlp is not None]
        return max(widths)

    @property
    def cache_classes(self) -> tuple[CacheClass, ...]:
        """Returns the layers with keys of their own, grouped by the shape of their heads.

        The groups are in the order of their first layers. If some layers read others' keys, layers
        with a window are in other groups than those without, since only the last layer of a group
        can be read. So they are if `windows_apart` is set.
        """
        attending = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        by_window = self.windows_apart or any(mixer.kv_from is not None for mixer in attending)
        windows = self.windows
        members: dict[tuple[int, ...], list[int]] = {}
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            if isinstance(mixer, Attention) and mixer.kv_from is None:
                window = mixer.window_tokens if by_window else 0
                key = (mixer.heads, mixer.kv_heads, mixer.head_dim, window)
                members.setdefault(key, []).append(index)
        return tuple(
            CacheClass(
                shape=CacheShape(
                    num_layers=len(layers),
                    num_heads=heads,
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                ),
                layers=tuple(layers),
                windows=tuple(windows[layer] for layer in layers),
                kv_shared_layers=sum(mixer.kv_from == layers[-1] for mixer in attending),
            )
            for (heads, kv_heads, head_dim, _), layers in members.items()
        )

    @property
    def conv_shape(self) -> ConvShape | None:
        """Returns the common shape of the convolution layers, or None if there are none."""
        convolutions = [layer.mixer for layer in self.layers if isinstance(layer.mixer, ShortConv)]
        if not convolutions:
            return None
        return ConvShape(
            num_layers=len(convolutions), width=self.hidden_size, taps=convolutions[0].taps
        )

    @property
    def delta_shape(self) -> DeltaShape | None:
        """Returns the common shape of the delta nets, or None if there are none."""
        nets = [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNet)]
        return nets[0].shape(len(nets)) if nets else None

    def mixer_place(self, layer: int) -> int:
        """Returns the number of a layer among those that do not attend."""
        return sum(not layer.attends for layer in self.layers[:layer])

    @property
    def streams(self) -> int:
        """Returns the number of (layer, KV head) pairs of all classes."""
        return sum(cache_class.shape.streams for cache_class in self.cache_classes)

    def by_class(self, of_streams: Sequence[T]) -> list[Sequence[T]]:
        """Splits a sequence over all streams by class; an empty one gives empty ones."""
        ends = np.cumsum([cache_class.shape.streams for cache_class in self.cache_classes]).tolist()
        return [of_streams[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def uniform(self) -> bool:
        """Returns whether all layers have keys of their own and heads of one shape."""
        return len(self.cache_classes) == 1 and len(self.cache_classes[0].layers) == self.num_layers

    def place(self, layer: int) -> tuple[int, int]:
        """Returns the number of the class whose keys a layer reads, and the layer in it."""
        source = self.layers[layer].attention.kv_from
        owner = layer if source is None else source
        for index, cache_class in enumerate(self.cache_classes):
            if owner in cache_class.layers:
                return index, cache_class.layers.index(owner)
        raise AssertionError(f"layer {layer} is of no class")

    @property
    def first_reader(self) -> int:
        """Returns the first layer from which on all read others' keys, or the number of layers."""
        first = self.num_layers
        while first:
            mixer = self.layers[first - 1].mixer
            if not isinstance(mixer, Attention) or mixer.kv_from is None:
                break
            first -= 1
        return first

    @property
    def float_bytes_per_token(self) -> int:
        """Returns the bytes of all keys and values of one token at 16 bits."""
        return sum(cache_class.shape.float_bytes_per_token for cache_class in self.cache_classes)

    @property
    def windows(self) -> tuple[int, ...]:
        """Returns the sliding window of every layer, 0 if it sees all or does not attend."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple(mixer.window_tokens if isinstance(mixer, Attention) else 0 for mixer in mixers)

    @property
    def has_long_rope(self) -> bool:
        """Returns whether a session has to choose between two rotary tables."""
        return any(rope.long_inv_freq is not None for rope in self.ropes)

    def needs_long_rope(self, context_tokens: int) -> bool:
        """Returns whether a session of up to `context_tokens` tokens uses the long rotary table."""
        return any(
            rope.long_inv_freq is not None
            and rope.original_context is not None
            and context_tokens > rope.original_context
            for rope in self.ropes
        )

    def attention(self, layer: int) -> AttentionParams:
        """Returns the constants of one layer's attention."""
        mixer = self.layers[layer].attention
        cache, index = self.place(layer)
        return AttentionParams(
            layer=index,
            cache=cache,
            num_heads=mixer.heads,
            num_kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.scale,
            softcap=mixer.softcap,
            window_tokens=mixer.window_tokens,
            rope_factor=self.ropes[mixer.rope].factor,
            norm_eps=self.norm_eps,
        )

    def inv_freq(self, layer: int, *, long_rope: bool = False) -> np.ndarray:
        """Returns the layer's rotary table, float32 [rotary_dim / 2], or the long one."""
        rope = self.ropes[self.layers[layer].attention.rope]
        values = (
            rope.inv_freq if not long_rope or rope.long_inv_freq is None else rope.long_inv_freq
        )
        return np.asarray(values, dtype=np.float32)

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dict for a manifest; `from_json` makes an equal config of it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Returns the config of a dict that `to_json` made, also after a trip through JSON text.

        Raises ModelError if a key is missing, unknown or of the wrong kind.
        """
        values = dict(data)
        try:
            values["ropes"] = tuple(_rope_from_json(rope) for rope in values["ropes"])
            values["layers"] = tuple(_layer_from_json(layer) for layer in values["layers"])
            if values.get("draft_head") is not None:
                values["draft_head"] = _layer_from_json(values["draft_head"])
            if values.get("per_layer") is not None:
                values["per_layer"] = PerLayer(**values["per_layer"])
            values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ModelError(f"this is not a model configuration: {reason_of(error)}") from error


_POSITIVE = ("vocab_size", "hidden_size", "context_length")
_REAL = ("norm_eps", "final_softcap", "embedding_scale", "logits_scale", "norm_offset")
_CONFIG_NAMES = {"heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim"}
# The largest count in native code.
_MOST = (1 << 31) - 1
MOST_EXPERTS = 1 << 12


def _check_real(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ModelError(f"{name} is {value!r}; it must be a finite number")


def _check_count(name: str, value: Any, *, least: int, most: int = _MOST) -> None:
    """Raises ModelError unless `value` is a whole number from `least` to `most`."""
    if type(value) is not int or value < least:
        raise ModelError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    if value > most:
        raise ModelError(f"{name} is {value}; it must be at most {most}")


def _check_known(label: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ModelError(f"the {label} {value!r} is none of {', '.join(known)}")


def _rope_from_json(data: Mapping[str, Any]) -> RopeConfig:
    values = dict(data)
    values["inv_freq"] = tuple(data["inv_freq"])
    if data.get("long_inv_freq") is not None:
        values["long_inv_freq"] = tuple(data["long_inv_freq"])
    return RopeConfig(**values)


def _layer_from_json(data: Mapping[str, Any]) -> Layer:
    values = dict(data)
    mixer, feed = values.pop("mixer"), values.pop("feed")
    mixer_type = Attention if "heads" in mixer else DeltaNet if "key_dim" in mixer else ShortConv
    feed_type = Experts if "count" in feed else Dense
    for name in ("beside", "shared"):
        if feed.get(name) is not None:
            feed = feed | {name: Dense(**feed[name])}
    return Layer(mixer=mixer_type(**mixer), feed=feed_type(**feed), **values)
