"""A decoder's forward pass in torch, and a bundle's weights whose constants it can train.

`Decoder` computes what `kvq_models.reference.forward` does, with gradients, over whole texts.
Products and vectors are callables, so a checkpoint that is read from disk and a bundle are run
alike. The codes of a `Matrix` stay. Its scales and zero points are rounded as a panel stores them
whenever they are used, and gradients pass that rounding as if it were not there; its weights exist
while one product needs them. Knows no file and no text. Needs torch: only `tuning` imports it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvq.reference.linear import SCALE_UNIT, ZERO_PARTS, Blocks, Grid, PanelFormat
from kvq_models.config import Activation, Dense, ModelConfig, Norms

Product = Callable[[str, Tensor], Tensor]
"""Multiplies: (canonical name of a matrix, inputs float32 [R, K]) -> products [R, N]."""

Vector = Callable[[str], Tensor]
"""Gives the norm or bias of a canonical name, float32 [n]."""


def tensor_of(array: np.ndarray) -> Tensor:
    """Returns a tensor of the same memory."""
    return cast(Any, torch).from_numpy(array)


class Decoder:
    """Computes the forward pass of a model that `tuning.check_tunable` lets pass."""

    def __init__(
        self,
        config: ModelConfig,
        product: Product,
        vector: Vector,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        """Takes `embed`: ids int64 [T] -> rows of the embedding, float32 [T, hidden]."""
        self._config = config
        self._product = product
        self._vector = vector
        self._embed = embed

    def hidden(self, ids: Tensor) -> Tensor:
        """Returns what enters the head, float32 [S T, hidden], of texts int64 [S, T]."""
        config = self._config
        hidden = self._embed(ids.flatten()) * config.embedding_scale
        for index, layer in enumerate(config.layers):
            name = f"layers.{index}."
            layer_input = hidden
            hidden = hidden + self._attention(index, hidden, len(ids))
            hidden = hidden + self._feed(index, layer_input if layer.parallel else hidden)
            if layer.scaled:
                hidden = hidden * self._vector(f"{name}scalar")
        return self._normed("final_norm", hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits float32 [R, vocab] of rows of `hidden`."""
        config = self._config
        logits = self._product("embed" if config.tied_head else "head", hidden)
        if config.head_bias:
            logits = logits + self._vector("head_bias")
        return _softcap(logits, config.final_softcap)

    def _attention(self, index: int, hidden: Tensor, texts: int) -> Tensor:
        config, name = self._config, f"layers.{index}."
        mixer = config.layers[index].attention
        qkv = self._product(f"{name}qkv", self._half(index, hidden, "attn_norm", without="after"))
        if mixer.qkv_bias:
            qkv = qkv + self._vector(f"{name}qkv_bias")
        first, last = mixer.width, mixer.width + mixer.kv_width
        query, key, value = qkv[:, :first], qkv[:, first:last], qkv[:, last:]
        if mixer.qk_norm == "rows":
            query, key = self._rms(f"{name}q_norm", query), self._rms(f"{name}k_norm", key)
        # Each as [S, heads, T, D].
        query, key, value = (
            part.view(texts, len(qkv) // texts, -1, mixer.head_dim).transpose(1, 2)
            for part in (query, key, value)
        )
        if mixer.qk_norm == "heads":
            query, key = self._rms(f"{name}q_norm", query), self._rms(f"{name}k_norm", key)
        rope, positions = config.ropes[mixer.rope], torch.arange(query.shape[2])
        angles = positions[:, None].float() * torch.tensor(rope.inv_freq)
        cos, sin = angles.cos() * rope.factor, angles.sin() * rope.factor
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        shared = mixer.heads // mixer.kv_heads
        key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        scores = _softcap(query @ key.transpose(2, 3) * mixer.scale, mixer.softcap)
        distance = positions[:, None] - positions
        hides = distance < 0
        if mixer.window_tokens:
            hides |= distance >= mixer.window_tokens
        mixed = scores.masked_fill(hides, -torch.inf).softmax(dim=-1) @ value
        output = self._product(f"{name}o", mixed.transpose(1, 2).reshape(len(qkv), -1))
        if mixer.output_bias:
            output = output + self._vector(f"{name}o_bias")
        return self._half(index, output, "post_attn_norm", without="before")

    def _feed(self, index: int, hidden: Tensor) -> Tensor:
        layer, name = self._config.layers[index], f"layers.{index}."
        feed = layer.feed
        assert isinstance(feed, Dense)
        norm, up = "attn_norm" if layer.parallel else "mlp_norm", "gate_up" if feed.gated else "up"
        inner = self._product(name + up, self._half(index, hidden, norm, without="after"))
        if feed.bias:
            inner = inner + self._vector(f"{name}{up}_bias")
        active = _active(inner[:, : feed.width], feed.activation)
        output = self._product(
            f"{name}down", active * inner[:, feed.width :] if feed.gated else active
        )
        if feed.bias:
            output = output + self._vector(f"{name}down_bias")
        return self._half(index, output, "post_mlp_norm", without="before")

    def _half(self, index: int, x: Tensor, norm: str, *, without: Norms) -> Tensor:
        if self._config.layers[index].norms == without:
            return x
        return self._normed(f"layers.{index}.{norm}", x)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        if self._config.norm == "rms":
            return self._rms(name, x)
        weight, bias = self._vector(name), self._vector(f"{name}_bias")
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self._config.norm_eps)

    def _rms(self, name: str, x: Tensor) -> Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        return x * (mean + self._config.norm_eps).rsqrt() * self._vector(name)


class Matrix:
    """Holds a matrix of a bundle. Trained are `gain`, the growth of its scales, and zero points."""

    def __init__(self, form: PanelFormat, blocks: Blocks) -> None:
        """Takes `blocks` of `Bundle.read_codes`, of a grid with or without a zero point."""
        self.form = form
        self.codes = tensor_of(blocks.codes)
        self._scales = tensor_of(blocks.scales.astype(np.float32))
        self.gain = torch.zeros_like(self._scales, requires_grad=True)
        self.zeros: Tensor | None = None
        if form.grid is Grid.ZERO_POINT:
            assert blocks.offsets is not None
            offsets = tensor_of(blocks.offsets.astype(np.float32))
            self.zeros = (offsets * self._zero_step).requires_grad_()

    @property
    def _zero_step(self) -> float:
        """Returns how many codes lie between two zero points."""
        return (1 << self.form.bits) / ZERO_PARTS

    @property
    def middle(self) -> float:
        """Returns what a symmetric grid takes off a code."""
        return float(1 << (self.form.bits - 1))

    def constants(self) -> tuple[Tensor, Tensor | None]:
        """Returns scales and zero points (in codes) float32 [N, blocks], as a panel stores them."""
        unit, step = float(SCALE_UNIT), self._zero_step
        scales = self._scales * (1 + self.gain)
        scales = scales + ((scales / unit).half().float() * unit - scales).detach()
        if self.zeros is None:
            return scales, None
        rounded = (self.zeros / step).round().clamp(0, ZERO_PARTS - 1) * step
        return scales, self.zeros + (rounded - self.zeros).detach()

    def product(self, x: Tensor) -> Tensor:
        """Returns `x` float32 [R, K] times the matrix, [R, N], with gradients to its constants."""
        scales, zeros = self.constants()
        return cast(Any, _Product).apply(x, self.codes, scales, zeros, self)

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows of the matrix, float32 [T, K], with gradients to their constants."""
        scales, zeros = self.constants()
        codes = self.codes[ids].view(len(ids), scales.shape[1], -1)
        zero = self.middle if zeros is None else zeros[ids][..., None]
        rows = (codes.float() - zero) * scales[ids][..., None]
        return rows.view(len(ids), -1)[:, : self.form.columns]

    def blocks(self, rows: slice) -> Blocks:
        """Returns blocks as they are stored, with constants in units of the weights."""
        with torch.no_grad():
            scales, zeros = self.constants()
            offsets = None
            if zeros is not None:
                offsets = (zeros[rows] / self._zero_step).round().to(torch.uint8).numpy()
            return Blocks(self.codes[rows].numpy(), scales[rows].numpy(), offsets)


class _Product(torch.autograd.Function):
    """Multiplies by a matrix whose weights are made anew for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, matrix: Matrix
    ) -> Tensor:
        ctx.save_for_backward(x, codes, scales, zeros)
        ctx.matrix = matrix
        return x @ _weights(codes, scales, zeros, matrix).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, codes, scales, zeros = cast(
            tuple[Tensor, Tensor, Tensor, Tensor | None], ctx.saved_tensors
        )
        matrix: Matrix = ctx.matrix
        (grad,) = grads
        to_inputs = grad @ _weights(codes, scales, zeros, matrix)
        if not ctx.needs_input_grad[2]:
            return to_inputs, None, None, None, None
        to_weights = grad.T @ x
        spare = codes.shape[1] - to_weights.shape[1]
        by_block = functional.pad(to_weights, (0, spare)).view(*scales.shape, -1)
        total = by_block.sum(dim=-1)
        by_code = torch.einsum("nbk,nbk->nb", by_block, codes.view(by_block.shape).float())
        to_scales = by_code - total * (matrix.middle if zeros is None else zeros)
        return to_inputs, None, to_scales, None if zeros is None else -scales * total, None


def _weights(codes: Tensor, scales: Tensor, zeros: Tensor | None, matrix: Matrix) -> Tensor:
    """Returns weights float32 [N, K]."""
    values = codes.view(*scales.shape, -1).float()
    values -= matrix.middle if zeros is None else zeros[..., None]
    values *= scales[..., None]
    return values.view(codes.shape)[:, : matrix.form.columns]


class Trainable:
    """Holds the weights of a bundle: matrices and, by name, norms and biases."""

    def __init__(self, matrices: Mapping[str, Matrix], vectors: Mapping[str, Tensor]) -> None:
        self.matrices = matrices
        self.vectors = vectors

    # The methods of a `WeightReader`.

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name].detach().numpy()

    def matrix(self, name: str, form: PanelFormat) -> Iterator[Blocks]:
        assert self.matrices[name].form == form
        step = max(16, (1 << 20) // form.columns // 16 * 16)
        for start in range(0, form.rows, step):
            yield self.matrices[name].blocks(slice(start, start + step))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., T, D] by angles [T, pairs], as `kvq.reference.stored.rotate` does."""
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap > 0 else x


def _active(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh")
