"""The forward pass in plain numpy float32, with which every backend is compared.

It has the arithmetic of a decoder, and an exact attention with unquantised keys and values. The
config says everything about a family. Attention is a callable, so that a cache can replace the
exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvq.config import AttentionParams
from kvq.reference.conv import products, seen_rows, short_conv
from kvq.reference.delta import DeltaWeights, Recurrence, sigmoid
from kvq.reference.experts import added, by_expert, clamped_swiglu, routed
from kvq.reference.stored import normalize, rotate, split_heads
from kvq_models.config import Attention, DeltaNet, Dense, Experts, ModelConfig, Norms

Weights = Callable[[str], np.ndarray]
"""Canonical name -> float32 array, as `Family.weights` describes it (offsets added)."""


class Memory(Protocol):
    """Remembers tokens for attention, for convolutions and for delta nets.

    `attend` is causal attention of T new tokens over all tokens so far and themselves. qkv: float32
    [T, (H + 2 Hk) * D], unrotated, query heads then key heads then value heads; positions: int64
    [T]; inv_freq: float32 [rotary_dim / 2]; q_norm, k_norm: float32 [D] or None. `sink_logits`:
    float32 [H] or None, see `kvq.reference.stored.attention_weights`. For a layer that reads
    another's keys and values `shared` is true: qkv has its queries alone, float32 [T, H * D], and
    nothing is stored. Returns float32 [T, H * D].
    """

    def attend(
        self,
        params: AttentionParams,
        qkv: np.ndarray,
        positions: np.ndarray,
        inv_freq: np.ndarray,
        q_norm: np.ndarray | None,
        k_norm: np.ndarray | None,
        *,
        shared: bool = False,
        sink_logits: np.ndarray | None = None,
    ) -> np.ndarray: ...

    def convolve(self, layer: int, bcx: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Returns the output of a convolution for the new tokens; `layer` counts convolutions.

        bcx float32 [T, 3 n]; weight [n, taps]; returns float32 [T, n]. See `kvq.reference.conv`.
        """
        ...

    def recur(
        self, layer: int, rows: np.ndarray, gates: np.ndarray, weights: DeltaWeights
    ) -> np.ndarray:
        """Returns the output of a delta net for the new tokens; `layer` counts delta nets.

        rows float32 [T, n + m], the part to convolve and the gate; gates [T, 2 heads]; returns
        float32 [T, m]. See `kvq.reference.delta`.
        """
        ...


def forward(
    config: ModelConfig,
    weight: Weights,
    ids: np.ndarray,
    positions: np.ndarray,
    memory: Memory,
    rows: slice | np.ndarray | None = None,
    mixed: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    long_rope: bool = False,
    predicted: Collection[int] = (),
    maps: Mapping[int, tuple[np.ndarray, np.ndarray]] | None = None,
    watch: Callable[[int, np.ndarray], None] | None = None,
    start_at: tuple[int, np.ndarray] | None = None,
    joined: np.ndarray | None = None,
    states: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the logits float32 [R, vocab] of the tokens `ids` int64 [T] at `positions` int64 [T].

    Args:
        config: The model.
        weight: Returns a canonical weight by its name.
        ids: Token ids.
        positions: Their positions.
        memory: What stores keys and values.
        rows: The tokens whose logits are returned; None: all.
        mixed: (ids int64 [T, k], weights float32 [T, k]) in place of `ids`: token t is the weighted
            sum of k embeddings.
        long_rope: Whether the long rotary table is used, if the model has one.
        predicted: Layers that leave the stream as it is; `memory` still gets their keys and values.
        maps: For some predicted layers float32 [2 Hk D, hidden] and [2 Hk D], which make these keys
            and values.
        watch: Is called with each layer and its input, float32 [T, hidden].
        start_at: A layer and its input; earlier layers are not computed.
        joined: For a draft head, the states that it reads, float32 [T, hidden].
        states: Is filled with the stream after the final norm, float32 [T, hidden].
    """
    model = _ReferencePass(config, weight, positions, memory, long_rope)
    table = weight("embed")
    start, hidden = start_at or (0, model.embedded(table, ids, mixed))
    if joined is not None:
        both = (("embed_norm", hidden), ("state_norm", joined))
        normed = [model.normed(name, x) for name, x in both]
        hidden = np.concatenate(normed, axis=1) @ weight("join").T
    layer_embeddings = model.layer_embeddings(ids, mixed)
    for layer in range(start, config.num_layers):
        if watch is not None:
            watch(layer, hidden)
        if layer in predicted:
            model.remember(layer, hidden, None if maps is None else maps.get(layer))
            continue
        entered = hidden
        hidden = hidden + model.mixed(layer, hidden)
        parallel = config.layers[layer].parallel
        hidden = hidden + model.fed(layer, entered if parallel else hidden)
        if layer_embeddings is not None:
            hidden = hidden + model.per_layer(layer, hidden, layer_embeddings[:, layer])
        if config.layers[layer].scaled:
            hidden = hidden * weight(f"layers.{layer}.scalar")
    if states is not None:
        states[:] = model.normed("final_norm", hidden)
    hidden = hidden if rows is None else hidden[rows]
    hidden = model.normed("final_norm", hidden)
    logits = hidden @ (table if config.tied_head else weight("head")).T
    if config.head_bias:
        logits = logits + weight("head_bias")
    return softcap(logits, config.final_softcap)


@dataclass(frozen=True, slots=True)
class _ReferencePass:
    """Computes the parts of one pass; the arguments are those of `forward`."""

    config: ModelConfig
    weight: Weights
    positions: np.ndarray
    memory: Memory
    long_rope: bool

    def embedded(
        self, table: np.ndarray, ids: np.ndarray, mixed: tuple[np.ndarray, np.ndarray] | None
    ) -> np.ndarray:
        if mixed is None:
            hidden = table[ids].astype(np.float32)
        else:
            hidden = np.einsum("tk,tkh->th", mixed[1].astype(np.float32), table[mixed[0]])
        return hidden * np.float32(self.config.embedding_scale)

    def layer_embeddings(
        self, ids: np.ndarray, mixed: tuple[np.ndarray, np.ndarray] | None
    ) -> np.ndarray | None:
        """Returns the per-layer embeddings of each token, [T, L, P], or None if there are none."""
        per_layer, weight = self.config.per_layer, self.weight
        if per_layer is None:
            return None
        embedded = self.embedded(weight("embed"), ids, mixed)
        shape = (len(embedded), self.config.num_layers, per_layer.width)
        projected = (embedded @ weight("per_layer_model").T).reshape(shape)
        projected = normalize(projected, weight("per_layer_norm"), self.config.norm_eps)
        known, shares = mixed or (ids[:, None], np.ones((len(ids), 1), np.float32))
        rows = weight("per_layer_embed")[known.ravel()].reshape(*known.shape, -1)
        read = np.einsum("tk,tkp->tp", shares.astype(np.float32), rows)
        return projected + read.reshape(shape) * np.float32((per_layer.width / 2) ** 0.5)

    def per_layer(self, layer: int, hidden: np.ndarray, embedding: np.ndarray) -> np.ndarray:
        """Returns what a per-layer embedding [T, P] adds to the stream [T, hidden]."""
        name, per_layer = f"layers.{layer}.", self.config.per_layer
        assert per_layer is not None
        gate = ACTIVATIONS[per_layer.activation](hidden @ self.weight(name + "per_layer_gate").T)
        up = (gate * embedding) @ self.weight(name + "per_layer_up").T
        return self.normed(name + "post_per_layer_norm", up)

    def mixed(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """Returns the output of a layer's mixer."""
        mixer, name = self.config.layers[layer].mixer, f"layers.{layer}."
        normed = self._half(layer, hidden, "attn_norm", without="after")
        if isinstance(mixer, Attention):
            output = self._attention(layer, mixer, normed)
        else:
            place = self.config.mixer_place(layer)
            if isinstance(mixer, DeltaNet):
                output = self._delta_net(place, name, mixer, normed)
            else:
                bcx = normed @ self.weight(name + "in_proj").T
                output = self.memory.convolve(place, bcx, self.weight(name + "conv")[:, 0])
            output = output @ self.weight(name + "out_proj").T
        return self._half(layer, output, "post_attn_norm", without="before")

    def remember(
        self, layer: int, hidden: np.ndarray, maps: tuple[np.ndarray, np.ndarray] | None
    ) -> None:
        """Stores the keys and values of a predicted layer, which `maps` make if they are given."""
        mixer = self.config.layers[layer].attention
        normed = self._half(layer, hidden, "attn_norm", without="after")
        qkv, _ = self._qkv(layer, mixer, normed)
        qkv[:, : mixer.width] = 0
        if maps is not None:
            qkv[:, mixer.width :] = normed @ maps[0].T + maps[1]
        self._attended(layer, mixer, qkv)

    def _attention(self, layer: int, mixer: Attention, normed: np.ndarray) -> np.ndarray:
        name = f"layers.{layer}."
        qkv, gate = self._qkv(layer, mixer, normed)
        attended = self._attended(layer, mixer, qkv)
        if gate is not None:
            attended = attended * sigmoid(gate)
        if mixer.head_gate:
            gates = sigmoid(normed @ self.weight(name + "head_gate").T)
            attended = attended * np.repeat(gates, mixer.head_dim, axis=1)
        output = attended @ self.weight(name + "o").T
        return output + self.weight(name + "o_bias") if mixer.output_bias else output

    def _delta_net(self, place: int, name: str, mixer: DeltaNet, normed: np.ndarray) -> np.ndarray:
        rows, gates = (normed @ self.weight(name + matrix).T for matrix in ("in_proj", "gates"))
        weights = DeltaWeights(
            conv=self.weight(name + "conv")[:, 0],
            decay=self.weight(name + "decay"),
            dt_bias=self.weight(name + "dt_bias"),
            scale=self.weight(name + "head_scale"),
            key_heads=mixer.key_heads,
            norm_eps=self.config.norm_eps,
        )
        return self.memory.recur(place, rows, gates, weights)

    def _qkv(
        self, layer: int, mixer: Attention, normed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the packed row of every token, and the gates of its heads [T, H * D] or None."""
        name = f"layers.{layer}."
        qkv = normed @ self.weight(name + "qkv").T
        qkv = qkv + self.weight(name + "qkv_bias") if mixer.qkv_bias else qkv
        if not mixer.output_gate:
            return qkv, None
        both, rest = np.split(qkv, [2 * mixer.width], axis=1)
        both = both.reshape(len(qkv), mixer.heads, 2, mixer.head_dim)
        query, gate = (both[:, :, side].reshape(len(qkv), -1) for side in (0, 1))
        return np.concatenate([query, rest], axis=1), gate

    def _attended(self, layer: int, mixer: Attention, qkv: np.ndarray) -> np.ndarray:
        """Returns what the heads of a layer read, before its output matrix."""
        name, weight, norm_eps = f"layers.{layer}.", self.weight, self.config.norm_eps
        normed = mixer.qk_norm == "heads"
        if mixer.growth:
            # Rotation is linear, so it may come after this.
            factor = 1 + mixer.growth * np.log(1 + self.positions // mixer.growth_tokens)
            query = qkv[:, : mixer.width] * factor[:, None].astype(np.float32)
            qkv = np.concatenate([query, qkv[:, mixer.width :]], axis=1)
        if mixer.qk_norm == "rows":
            query, key, value = np.split(qkv, [mixer.width, mixer.width + mixer.kv_width], axis=1)
            query = normalize(query, weight(name + "q_norm"), norm_eps)
            key = normalize(key, weight(name + "k_norm"), norm_eps)
            qkv = np.concatenate([query, key, value], axis=1)
        shared = mixer.kv_from is not None
        if mixer.value_norm and not shared:
            value = qkv[:, mixer.width + mixer.kv_width :].reshape(-1, mixer.head_dim)
            value = normalize(value, np.ones(mixer.head_dim, np.float32), norm_eps)
            qkv = np.concatenate([qkv[:, : -mixer.kv_width], value.reshape(len(qkv), -1)], axis=1)
        more: dict[str, Any] = {"shared": True} if shared else {}
        if mixer.sinks:
            more["sink_logits"] = weight(name + "sink_logits")
        return self.memory.attend(
            self.config.attention(layer),
            qkv,
            self.positions,
            self.config.inv_freq(layer, long_rope=self.long_rope),
            weight(name + "q_norm") if normed else None,
            weight(name + "k_norm") if normed and not shared else None,
            **more,
        )

    def fed(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """Returns the output of a layer's feed for `hidden` [T, hidden]."""
        feed, name = self.config.layers[layer].feed, f"layers.{layer}."
        norm = "attn_norm" if self.config.layers[layer].parallel else "mlp_norm"
        x = self._half(layer, hidden, norm, without="after")

        def weight(of_layer: str) -> np.ndarray:
            return self.weight(name + of_layer)

        if isinstance(feed, Dense):
            output = _dense(weight, feed, x)
        elif feed.beside is None:
            shared = None if feed.shared is None else _shared(weight, feed.shared, x)
            output = experts(weight, feed, x, x)
            output = output if shared is None else output + shared
        else:
            output = self.normed(name + "post_dense_norm", _dense(weight, feed.beside, x))
            routing, expert_input = (
                self.normed(name + norm, hidden) for norm in ("router_norm", "moe_norm")
            )
            mixture = experts(weight, feed, routing, expert_input)
            output = output + self.normed(name + "post_moe_norm", mixture)
        return self._half(layer, output, "post_mlp_norm", without="before")

    def _half(self, layer: int, x: np.ndarray, norm: str, *, without: Norms) -> np.ndarray:
        """Returns the normalised input or output of a half; x in layers `without` that norm."""
        if self.config.layers[layer].norms == without:
            return x
        return self.normed(f"layers.{layer}.{norm}", x)

    def normed(self, name: str, x: np.ndarray) -> np.ndarray:
        """Returns x [T, n] after the norm called `name`."""
        if self.config.norm == "rms":
            return normalize(x, self.weight(name), self.config.norm_eps)
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + self.config.norm_eps)
        return centred / deviation * self.weight(name) + self.weight(f"{name}_bias")


def _shared(weight: Weights, feed: Dense, x: np.ndarray) -> np.ndarray:
    """Returns the gated output of the MLP that experts share."""
    output = _dense(lambda name: weight(f"shared_{name}"), feed, x)
    return output * sigmoid(x @ weight("shared_gate").T)


def _dense(weight: Weights, feed: Dense, x: np.ndarray) -> np.ndarray:
    up = "gate_up" if feed.gated else "up"
    inner = x @ weight(up).T
    if feed.bias:
        inner = inner + weight(f"{up}_bias")
    active = ACTIVATIONS[feed.activation](inner[:, : feed.width])
    if feed.gated:
        active *= inner[:, feed.width :]
    del inner  # It is as large as the next product, for a long text.
    output = active @ weight("down").T
    return output + weight("down_bias") if feed.bias else output


def experts(weight: Weights, feed: Experts, routing: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the output of the experts for x float32 [T, K]: [T, K].

    The router reads `routing`, float32 [T, K]. `weight` returns the layer's weights by name.
    """
    logits = routing @ weight("router").T
    chosen, shares = routed(
        logits + weight("router_bias") if feed.router_bias else logits,
        feed.chosen,
        normalised=feed.normalised,
        scoring=feed.scoring,
        choice_bias=weight("choice_bias") if feed.choice_bias else None,
    )
    order, counts = by_expert(chosen, feed.count)

    def product(name: str, rows: np.ndarray) -> np.ndarray:
        out = grouped(weight(name), rows, counts)
        if not feed.bias:
            return out
        return out + np.repeat(weight(f"{name}_bias").reshape(feed.count, -1), counts, axis=0)

    inner = product("experts_gate_up", x[order // feed.chosen])
    gate, up = inner[:, : feed.width], inner[:, feed.width :]
    inner = (
        clamped_swiglu(gate, up)
        if feed.activation == "clamped_swiglu"
        else ACTIVATIONS[feed.activation](gate) * up
    )
    return added(product("experts_down", inner), order, shares)


class ExpertStack(Protocol):
    """Replaces the matrices of all experts, see `grouped`."""

    def grouped(self, x: np.ndarray, counts: np.ndarray, /) -> np.ndarray: ...


def grouped(stack: np.ndarray | ExpertStack, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Multiplies rows x float32 [R, K], `counts` of them for each expert, by its matrix: [R, N].

    `stack` holds the experts' matrices one after the other, or replaces them.
    """
    if not isinstance(stack, np.ndarray):
        return stack.grouped(x, counts)
    matrices = stack.reshape(len(counts), -1, stack.shape[1])
    parts = np.split(x, np.cumsum(counts)[:-1])
    return np.concatenate([part @ matrix.T for part, matrix in zip(parts, matrices, strict=True)])


def softcap(x: np.ndarray, cap: float) -> np.ndarray:
    """Caps x: cap * tanh(x / cap), or x when the cap is 0."""
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap > 0 else x


def silu(x: np.ndarray) -> np.ndarray:
    """Computes x * sigmoid(x), written with tanh so that no exponential overflows."""
    half = np.float32(0.5)
    out = half * x
    np.tanh(out, out=out)
    out *= half
    out += half
    out *= x
    return out


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """Computes the tanh approximation of GELU."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


class PlainAttention:
    """Computes exact attention over the float32 keys and values of one sequence, which it stores.

    It also computes convolutions and delta nets over all rows so far. Memory grows with every
    token. A query sees a key whose position is not later (and lies within the window).
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[int, int], np.ndarray] = {}
        self._values: dict[tuple[int, int], np.ndarray] = {}
        self._positions: dict[tuple[int, int], np.ndarray] = {}
        self._rows: dict[int, np.ndarray] = {}
        self._deltas: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._recurrences: dict[int, Recurrence] = {}

    def recur(
        self, layer: int, rows: np.ndarray, gates: np.ndarray, weights: DeltaWeights
    ) -> np.ndarray:
        known = self._deltas.get(layer, (rows[:0], gates[:0]))
        if layer not in self._recurrences:  # at the beginning, and after `trim`
            self._recurrences[layer] = Recurrence(weights)
            self._recurrences[layer].run(*known, weights)
        self._deltas[layer] = (np.concatenate([known[0], rows]), np.concatenate([known[1], gates]))
        return self._recurrences[layer].run(rows, gates, weights)

    def convolve(self, layer: int, bcx: np.ndarray, weight: np.ndarray) -> np.ndarray:
        new_rows = products(bcx.astype(np.float32))
        rows = np.concatenate([self._rows[layer], new_rows]) if layer in self._rows else new_rows
        self._rows[layer] = rows
        return short_conv(bcx, weight, seen_rows(rows, weight.shape[1])[-len(bcx) :])

    def attend(
        self,
        params: AttentionParams,
        qkv: np.ndarray,
        positions: np.ndarray,
        inv_freq: np.ndarray,
        q_norm: np.ndarray | None,
        k_norm: np.ndarray | None,
        *,
        shared: bool = False,
        sink_logits: np.ndarray | None = None,
    ) -> np.ndarray:
        place = (params.cache, params.layer)
        if shared:
            query = qkv.astype(np.float32).reshape(len(qkv), params.num_heads, params.head_dim)
        else:
            query, key, value = split_heads(params, qkv.astype(np.float32))
            if k_norm is not None:
                key = normalize(key, k_norm, params.norm_eps)
            key = rotate(key, positions, inv_freq, params.rope_factor)
            for store, new in (
                (self._keys, key), (self._values, value), (self._positions, positions)
            ):  # fmt: skip
                store[place] = np.concatenate([store[place], new]) if place in store else new.copy()
        if q_norm is not None:
            query = normalize(query, q_norm, params.norm_eps)
        query = rotate(query, positions, inv_freq, params.rope_factor)
        keys, values, key_positions = self._keys[place], self._values[place], self._positions[place]
        distance = positions[:, None] - key_positions[None, :]
        weights = _weights(params, query, keys, distance, sink_logits)
        self.observe(params, query, weights)
        return _mixed(weights, values)

    def observe(self, params: AttentionParams, query: np.ndarray, weights: np.ndarray) -> None:
        """Gets a layer's queries [T, H, D] and attention weights [Hk, H / Hk, T, S], all float32.

        Subclasses may override it.
        """

    def trim(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens."""
        for store in (self._keys, self._values, self._positions):
            for place in store:
                store[place] = store[place][:tokens]
        self._rows = {layer: rows[:tokens] for layer, rows in self._rows.items()}
        self._deltas = {
            layer: (rows[:tokens], gates[:tokens]) for layer, (rows, gates) in self._deltas.items()
        }
        self._recurrences = {}


def _weights(
    params: AttentionParams,
    query: np.ndarray,
    keys: np.ndarray,
    distance: np.ndarray,
    sink_logits: np.ndarray | None,
) -> np.ndarray:
    """Returns the weights [Hk, H / Hk, T, S] of query [T, H, D] over keys [S, Hk, D].

    distance: int64 [T, S] = query position - key position; sink_logits [H] or None.
    """
    tokens, heads, dim = query.shape
    group = heads // params.num_kv_heads
    grouped = query.reshape(tokens, params.num_kv_heads, group, dim).transpose(1, 2, 0, 3)
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] * np.float32(params.scale)
    scores = softcap(scores, params.softcap)
    visible = distance >= 0
    if params.window_tokens > 0:
        visible &= distance < params.window_tokens
    scores = np.where(visible, scores, np.float32(-np.inf))
    top = scores.max(axis=-1, keepdims=True)
    if sink_logits is None:
        scores = np.exp(scores - top)
        return scores / scores.sum(axis=-1, keepdims=True)
    sinks = sink_logits.astype(np.float32).reshape(params.num_kv_heads, group, 1, 1)
    top = np.maximum(top, sinks)
    scores = np.exp(scores - top)
    return scores / (scores.sum(axis=-1, keepdims=True) + np.exp(sinks - top))


def _mixed(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the attended values [T, H * D] of `weights` over values [S, Hk, D]."""
    mixed = weights @ values.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(weights.shape[2], -1)
