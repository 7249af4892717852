"""The one description of a model that every other component reads.

A model is a list of layers between an embedding and a head, and a layer says all of itself: what
mixes tokens, what feeds each of them forward, where its norms are. Shapes of weights, the forward
pass, the graph and the check of a graph are derived from the list. Knows nothing about the file a
model came from or the names its weights had there (see `family`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from kvq.config import MOST_TAPS, AttentionParams, CacheShape, ConvShape, DeltaShape
from kvq.errors import ModelError, UsageError
from kvq.reference_experts import SCORINGS, Scoring

T = TypeVar("T")

Activation = Literal["silu", "gelu_tanh"]
# How an expert's gate meets its up: activation(gate) * up, or as `reference_experts` says.
Gating = Literal["silu", "gelu_tanh", "clamped_swiglu"]
# By the root mean square, with weights; by mean and variance, with weights and biases.
NormKind = Literal["rms", "layer"]
# Of each half of a layer: before it, on what it adds to the stream, or both.
Norms = Literal["before", "after", "both"]
# What is normalised together before queries and keys rotate: each head, or all of a token's.
QkNorm = Literal["none", "heads", "rows"]
# What a layer's values are made by: a matrix of their own, or that of the keys.
Values = Literal["own", "keys"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """One rotary table: the first 2 * len(inv_freq) dimensions of a head rotate, i with i + half.

    `inv_freq` holds float32 values (radians per position); cos and sin are multiplied by
    `factor`. A model trained with two tables also has `long_inv_freq`, used for a whole session
    when its context exceeds `original_context` tokens.
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    long_inv_freq: tuple[float, ...] | None = None
    original_context: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Causal attention: `heads` query heads share `kv_heads` key-value heads of `head_dim`.

    `scale` multiplies q.k; a `softcap` c > 0 turns that into c * tanh(x / c) (0 = none); of the
    tokens the newest `window_tokens` are seen (0 = all). `rope` is the index of its rotary table.
    `qk_norm`: how queries, and keys, are normalised before they are rotated. With a `growth` the
    query of a token at position p is multiplied by 1 + growth * ln(1 + p // growth_tokens): in a
    long context attention stays as sharp as in a short one. With a `value_norm` each head of values
    is divided by its root mean square. A layer with a `kv_from` has queries alone, and reads the
    keys and values of that earlier layer. With an `output_gate` the matrix of queries makes a gate
    of every head too, behind its query; what the head gives is multiplied by sigmoid(gate). With
    `sinks` each head has a learned logit beside those of its keys, of no token: it shares in the
    softmax and gives nothing. With a `head_gate` one more product makes a number of every head,
    by whose sigmoid what the head gives is multiplied.
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
        """Columns of what it gives: all query heads side by side."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of its keys, and of its values; none where it reads another layer's."""
        return 0 if self.kv_from is not None else self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the packed row: query heads, then key heads, then value heads."""
        return self.width + 2 * self.kv_width

    @property
    def projected_width(self) -> int:
        """Columns of what the matrix makes: the packed row, and the gates where there are any."""
        return self.qkv_width + self.width * self.output_gate


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv:
    """A short convolution: each channel of the stream is summed over a token and a few before it.

    One matrix makes rows [B | C | x] of what enters, three times as wide as the stream. The rows of
    B * x are summed over `taps` tokens, the newest itself, with weights of each channel; C times
    that goes through a second matrix. It has no keys and values, and no positions.
    """

    taps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """A gated delta net: `value_heads` keep a matrix each, which every token changes a little.

    One matrix makes queries, keys, values and a gate of what enters; the first three are convolved
    over `taps` tokens, channel by channel, and activated. A second, small and exact, says how much
    a head forgets and how much it takes in. What the heads give is normalised head by head, times
    silu(gate), and goes through a third matrix. `value_heads` share the queries and keys of
    `key_heads`. It has no positions. See `kvq.reference_delta`.
    """

    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def shape(self, num_layers: int) -> DeltaShape:
        """Of so many layers. Raises UsageError where it is not possible."""
        return DeltaShape(num_layers=num_layers, **dataclasses.asdict(self))


Mixer = Attention | ShortConv | DeltaNet


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """An MLP: `down` of activation(gate) * up, both of `width` columns, or of activation(up)."""

    width: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True

    @property
    def widest(self) -> int:
        """Columns of the widest of its MLPs, which is its own."""
        return self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of `count` gated MLPs of `width`, of which each token is fed to `chosen`.

    A router gives every expert a share by `scoring`: the softmax of its products, or the sigmoid of
    each; a token's output is the sum of those of its `chosen` experts with the largest shares, each
    times its share, which are first divided by their sum where `normalised` (Mixtral, 2401.04088),
    and times `scale`, which canonical weights have in them. With a `choice_bias` each expert has a
    number that is added to its share where experts are chosen (2408.15664). `router_bias` and
    `bias`: whether the products of the router, and of the experts, have biases. `activation` says
    how gate and up meet.

    Each token is also fed to the MLP `beside`, if there is one. Then router, experts and MLP each
    read the stream through a norm of their own, and what the experts and the MLP make is normalised
    before both are added. Or it is fed to the MLP `shared`, which reads what the router reads; what
    that makes is multiplied by the sigmoid of one more product, and added.
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

    @property
    def widest(self) -> int:
        """Columns of the widest of its MLPs."""
        return max(self.width, *(one.width for one in (self.beside, self.shared) if one), 0)

    @property
    def gated(self) -> bool:
        """They all are, as `Dense` may be."""
        return True


Feed = Dense | Experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer: what its mixer and then its feed make of the stream is added to the stream.

    That is multiplied by `scale` before, which canonical weights have in them. Where both are
    `parallel` the feed reads what the mixer does, through the same norm, and not what it made.
    Behind a `scaled` layer the stream is multiplied by a learned number.
    """

    mixer: Mixer
    feed: Feed
    norms: Norms = "before"
    scale: float = 1.0
    parallel: bool = False
    scaled: bool = False

    @property
    def attention(self) -> Attention:
        """Its mixer. Raises ModelError for a layer that does not attend."""
        if not isinstance(self.mixer, Attention):
            raise ModelError("a layer that does not attend has no heads of queries")
        return self.mixer

    @property
    def attends(self) -> bool:
        """Whether its mixer is attention."""
        return isinstance(self.mixer, Attention)

    @property
    def owns_keys(self) -> bool:
        """Whether tokens have keys and values of this layer."""
        return isinstance(self.mixer, Attention) and self.mixer.kv_from is None


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayer:
    """Embeddings of a second table, `width` numbers for every layer: they enter behind its feed.

    A token's row of the table, `rows` tokens of it, is added to what the normalised stream that
    enters the first layer makes by one matrix; both are of `layers * width` columns. A layer
    multiplies its part by activation(gate . stream), and what another matrix makes of that is
    normalised and added to the stream.
    """

    rows: int
    width: int
    activation: Activation = "gelu_tanh"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheClass:
    """Layers whose keys and values lie in one cache: `layers` of the model, alike in shape.

    `windows`: the sliding window of each, 0 for one that sees all. `readers`: how many layers of
    the model own nothing and read what the last of them has stored.
    """

    shape: CacheShape
    layers: tuple[int, ...]
    windows: tuple[int, ...]
    readers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything the arithmetic of a decoder-only model depends on, apart from its weights.

    The embedding row is multiplied by `embedding_scale`, logits by `logits_scale`, which the
    canonical weight of the last norm has in it; logits x become c * tanh(x / c) where
    `final_softcap` is a c > 0; norm weights are stored as w - `norm_offset`. `norm` is the kind of
    all norms but those of queries and keys. With a `head_bias` one is added to the logits. With
    `windows_apart` layers that see a window have a cache of their own, which holds little more than
    that; else pages behind it go when room is short.

    A model may have a `draft_head`: one layer that guesses, from the state that the model made of a
    token and from the token after it, the one after that (multi-token prediction). What it computes
    is a model of its own, `drafting`, which `joins` a token's embedding and such a state, each
    normalised, by one matrix. A *state* is the stream behind the final norm.
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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be a model. Raises ModelError."""
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
            _check_count(_CALLED[name], getattr(mixer, name), least=1)
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
        """A layer reads one of the same shape whose rows are still there: the last of its class."""
        if self.draft_head is not None and not self.draft_head.owns_keys:
            raise ModelError("a draft head attends, with keys and values of its own")
        last = {one.layers[-1] for one in self.cache_classes}
        if not last:
            raise ModelError("no layer has keys and values: a model without any is not possible")
        others = {one.mixer for one in self.layers if not isinstance(one.mixer, Attention)}
        if len(others) > 1:
            raise ModelError(
                "layers that do not attend must be alike: convolutions over different numbers of "
                "rows, or beside delta nets, are not possible"
            )
        for index, layer in enumerate(self.layers):
            own = layer.mixer
            if not isinstance(own, Attention) or own.kv_from is None:
                continue
            source = own.kv_from
            if type(source) is not int or not 0 <= source < index or source not in last:
                raise ModelError(
                    f"layer {index} reads the keys of layer {source!r}, which must be an earlier "
                    "layer, the last of those that are like it and have keys of their own"
                )
            read = self.layers[source].attention
            if (own.heads, own.kv_heads, own.head_dim) != (
                read.heads,
                read.kv_heads,
                read.head_dim,
            ):
                raise ModelError(f"layer {index} reads the keys of a layer of another shape")

    @property
    def drafting(self) -> ModelConfig | None:
        """The draft head as a model of one layer; it shares the embedding and the output head."""
        if self.draft_head is None:
            return None
        return dataclasses.replace(self, layers=(self.draft_head,), draft_head=None, joins=True)

    @property
    def has_states(self) -> bool:
        """Whether a pass can tell the states of its rows: a draft head reads them."""
        return self.joins or self.draft_head is not None

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of the first layer that attends, and of every one of a `uniform` model."""
        return self._attends_first.heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads, likewise."""
        return self._attends_first.kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head, likewise."""
        return self._attends_first.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of a packed row, likewise; see `Attention.qkv_width`."""
        return self._attends_first.qkv_width

    @property
    def _attends_first(self) -> Attention:
        return next(one.mixer for one in self.layers if isinstance(one.mixer, Attention))

    @property
    def widest_feed(self) -> int:
        """Columns of the widest MLP."""
        return max(layer.feed.widest for layer in self.layers)

    @property
    def cache_classes(self) -> tuple[CacheClass, ...]:
        """What a sequence keeps of layers that have keys of their own, by the shape of their heads.

        In the order of their first layers. Where layers read others' keys, those with a window are
        apart from those without: only the last of a class can be read. So they are where
        `windows_apart` asks for it.
        """
        attending = [one.mixer for one in self.layers if isinstance(one.mixer, Attention)]
        apart = self.windows_apart or any(mixer.kv_from is not None for mixer in attending)
        members: dict[tuple[int, ...], list[int]] = {}
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            if isinstance(mixer, Attention) and mixer.kv_from is None:
                window = mixer.window_tokens if apart else 0
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
                windows=tuple(self.windows[layer] for layer in layers),
                readers=sum(mixer.kv_from == layers[-1] for mixer in attending),
            )
            for (heads, kv_heads, head_dim, _), layers in members.items()
        )

    @property
    def conv_shape(self) -> ConvShape | None:
        """What the layers that convolve have in common, or None where there are none."""
        found = [one.mixer for one in self.layers if isinstance(one.mixer, ShortConv)]
        if not found:
            return None
        return ConvShape(num_layers=len(found), width=self.hidden_size, taps=found[0].taps)

    @property
    def delta_shape(self) -> DeltaShape | None:
        """What the layers that are delta nets have in common, or None where there are none."""
        found = [one.mixer for one in self.layers if isinstance(one.mixer, DeltaNet)]
        return found[0].shape(len(found)) if found else None

    def mixer_place(self, layer: int) -> int:
        """Which it is of the layers that do not attend."""
        return sum(not one.attends for one in self.layers[:layer])

    @property
    def streams(self) -> int:
        """(layer, KV head) pairs of all classes."""
        return sum(one.shape.streams for one in self.cache_classes)

    def by_class(self, of_streams: Sequence[T]) -> list[Sequence[T]]:
        """What is given of all streams, class by class; of none, nothing of each."""
        ends = np.cumsum([one.shape.streams for one in self.cache_classes]).tolist()
        return [of_streams[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def uniform(self) -> bool:
        """Whether every layer has keys of its own, and heads as all others."""
        return len(self.cache_classes) == 1 and len(self.cache_classes[0].layers) == self.num_layers

    def place(self, layer: int) -> tuple[int, int]:
        """Which of `cache_classes` holds the keys that a layer reads, and which layer there."""
        source = self.layers[layer].attention.kv_from
        owner = layer if source is None else source
        for index, one in enumerate(self.cache_classes):
            if owner in one.layers:
                return index, one.layers.index(owner)
        raise AssertionError(f"layer {layer} is of no class")

    @property
    def first_reader(self) -> int:
        """The first layer from which on all read others' keys, or how many layers there are."""
        first = self.num_layers
        while first:
            mixer = self.layers[first - 1].mixer
            if not isinstance(mixer, Attention) or mixer.kv_from is None:
                break
            first -= 1
        return first

    @property
    def float_bytes_per_token(self) -> int:
        """Bytes of all keys and values of one token at 16 bits."""
        return sum(one.shape.float_bytes_per_token for one in self.cache_classes)

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of every layer, 0 for one that sees all, or that does not attend."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple(one.window_tokens if isinstance(one, Attention) else 0 for one in mixers)

    @property
    def has_long_rope(self) -> bool:
        """True when a session must choose between two rotary tables, see `needs_long_rope`."""
        return any(rope.long_inv_freq is not None for rope in self.ropes)

    def needs_long_rope(self, context_tokens: int) -> bool:
        """True when a session of up to `context_tokens` tokens uses the long rotary table."""
        return any(
            rope.long_inv_freq is not None
            and rope.original_context is not None
            and context_tokens > rope.original_context
            for rope in self.ropes
        )

    def attention(self, layer: int) -> AttentionParams:
        """The constants of one layer's attention."""
        mixer = self.layers[layer].attention
        cache, own = self.place(layer)
        return AttentionParams(
            layer=own,
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
        """The layer's rotary table, float32 [rotary_dim / 2]; the long one if asked for."""
        rope = self.ropes[self.layers[layer].attention.rope]
        values = (
            rope.inv_freq if not long_rope or rope.long_inv_freq is None else rope.long_inv_freq
        )
        return np.asarray(values, dtype=np.float32)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for a manifest; `from_json` gives back an equal config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Rebuild a config from `to_json`'s dict (also after a trip through JSON text).

        Also from the flat form of bundles up to version 6, whose layers differed in two numbers.
        Raises ModelError when a key is missing, unknown or of the wrong kind.
        """
        values = dict(data)
        try:
            values["ropes"] = tuple(_rope_from_json(rope) for rope in values["ropes"])
            if "num_heads" in values:
                values = _of_flat(values)
            values["layers"] = tuple(_layer_from_json(layer) for layer in values["layers"])
            if values.get("draft_head") is not None:
                values["draft_head"] = _layer_from_json(values["draft_head"])
            if values.get("per_layer") is not None:
                values["per_layer"] = PerLayer(**values["per_layer"])
            values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ModelError(f"this is not a model configuration: {error}") from error


_POSITIVE = ("vocab_size", "hidden_size", "context_length")
_REAL = ("norm_eps", "final_softcap", "embedding_scale", "logits_scale", "norm_offset")
_CALLED = {"heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim"}
# What native code counts with.
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


def _check_known(what: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ModelError(f"the {what} {value!r} is none of {', '.join(known)}")


def _rope_from_json(data: Mapping[str, Any]) -> RopeConfig:
    values = dict(data)
    values["inv_freq"] = tuple(data["inv_freq"])
    if data.get("long_inv_freq") is not None:
        values["long_inv_freq"] = tuple(data["long_inv_freq"])
    return RopeConfig(**values)


def _layer_from_json(data: Mapping[str, Any]) -> Layer:
    values = dict(data)
    mixer, feed = values.pop("mixer"), values.pop("feed")
    mixes = Attention if "heads" in mixer else DeltaNet if "key_dim" in mixer else ShortConv
    feeds = Experts if "count" in feed else Dense
    for name in ("beside", "shared"):
        if feed.get(name) is not None:
            feed = feed | {name: Dense(**feed[name])}
    return Layer(mixer=mixes(**mixer), feed=feeds(**feed), **values)


def _of_flat(data: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(data)
    mixer = {
        name: values.pop(old)
        for name, old in (
            ("heads", "num_heads"),
            ("kv_heads", "num_kv_heads"),
            ("head_dim", "head_dim"),
            ("scale", "attention_scale"),
            ("softcap", "attention_softcap"),
            ("qkv_bias", "qkv_bias"),
            ("output_bias", "output_bias"),
        )
    }
    mixer["qk_norm"] = "heads" if values.pop("qk_norm") else "none"
    feed = {
        name: values.pop(old)
        for name, old in (
            ("width", "intermediate_size"),
            ("activation", "activation"),
            ("bias", "mlp_bias"),
        )
    }
    norms = "both" if values.pop("sandwich_norms") else "before"
    layers = [{"mixer": mixer | own, "feed": feed, "norms": norms} for own in values.pop("layers")]
    if len(layers) != values.pop("num_layers"):
        raise TypeError(f"{len(layers)} layers are described, num_layers says another number")
    return values | {"layers": layers}
