"""Sessions of the engines that `peer_quality.py` compares kvq with, and of their caches.

Those of transformers' QuantizedCache; an opener makes one session.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvq_apps.evaluation.text import SCORE_CHUNK_TOKENS
from kvq_apps.terminal import output
from kvq_lab.engine_transformers import cache_argument

Windows = Sequence[Sequence[int]]
Openers = Mapping[str, Callable[[], Any]]

# Groups must be closed at multiples of this many tokens, or Quanto refuses its per-channel axis.
GROUP_TOKENS = 64
# Transformers holds floats in the model's type. The forward pass is float32 here, so that no other
# rounding is measured, but a deployed model has 16 bits: that is what its floats are counted at.
HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheBytes:
    """Holds the bytes of a peer's cache, under the names a session's statistics have."""

    kv_bytes_peak: int
    bytes_per_token: float


class TransformersSession:
    """Runs a transformers model with one of its caches, as `divergence` needs a session."""

    def __init__(self, model: Any, cache: Any) -> None:
        self._model = model
        self._cache = cache
        self._tokens = 0
        self._peak_bytes = 0

    def __enter__(self) -> "TransformersSession":
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: only the object's arrays hold memory."""

    def prefill(self, ids: Sequence[int]) -> None:
        """Runs the prompt."""
        self._forward(ids)

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Runs `ids` and yields logits float32 [n, V], in a session's chunks."""
        for start in range(0, len(ids), SCORE_CHUNK_TOKENS):
            yield self._forward(ids[start : start + SCORE_CHUNK_TOKENS])

    def _forward(self, ids: Sequence[int]) -> np.ndarray:
        """Computes logits float32 [n, V], in two passes where the first can end on a group."""
        rest = min(len(ids), (self._tokens + len(ids)) % GROUP_TOKENS)
        parts = [part for part in (ids[: len(ids) - rest], ids[len(ids) - rest :]) if part]
        return np.concatenate([self._pass(part) for part in parts])

    def _pass(self, ids: Sequence[int]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            tokens = torch.tensor([list(ids)])
            cache = {cache_argument(self._model): self._cache}
            out = self._model(tokens, use_cache=True, **cache)
        self._tokens += len(ids)
        self._peak_bytes = max(self._peak_bytes, sum(self._layer_bytes()))
        return out.logits[0].numpy()

    def stats(self) -> CacheBytes:
        """Counts bytes; one more token costs what the quantised ones do on average, or all do."""
        residual, quantized = self._layer_bytes()
        layer = self._cache.layers[0]
        in_floats = layer.keys.shape[-2] if layer.keys.numel() else 0
        size, tokens = (quantized, self._tokens - in_floats) if quantized else (residual, in_floats)
        return CacheBytes(kv_bytes_peak=self._peak_bytes, bytes_per_token=size / tokens)

    def _layer_bytes(self) -> tuple[int, int]:
        """Counts the bytes of floating-point tokens and of quantised ones, all layers."""
        residual = quantized = 0
        for layer in self._cache.layers:
            residual += (layer.keys.numel() + layer.values.numel()) * HALF_BYTES
            for name in ("_quantized_keys", "_quantized_values"):
                if hasattr(layer, name):
                    quantized += _quantized_bytes(getattr(layer, name))
        return residual, quantized


def _quantized_bytes(tensor: Any) -> int:
    """Counts the bytes of packed codes and constants: HQQ's pair, or Quanto's tensor."""
    if isinstance(tensor, tuple):
        codes, meta = tensor
        constants = meta["scale"], meta["zero"]
    else:
        codes, constants = tensor._data._data, (tensor._scale, tensor._shift)
    return codes.nbytes + sum(constant.numel() * HALF_BYTES for constant in constants)


# What each back-end calls the axes, (along a token, along a channel), and its widths. HQQ's second
# one takes 64 rows of equal distance as a group, across heads: one channel, tokens far apart, so
# that along a token is its better one. Quanto's is the other, and along tokens is left out.
BY_TOKEN, BY_CHANNEL, MIXED = "K token, V token", "K channel, V channel", "K channel, V token"
TRANSFORMERS_BACKENDS = {
    "quanto": ((0, -1), {BY_CHANNEL: (4, 2), MIXED: (4, 2)}),
    "hqq": ((1, 0), {BY_TOKEN: (8, 4, 2), BY_CHANNEL: (4, 2)}),
}
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}


def transformers_sessions(checkpoint: str, threads: int) -> Openers:
    """Returns openers of the unquantised cache and of every back-end that is installed."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
    openers: dict[str, Callable[[], Any]] = {
        "f16": lambda: TransformersSession(model, transformers.DynamicCache(config=model.config))
    }

    def open_quantized(**options: Any) -> TransformersSession:
        cache = transformers.QuantizedCache(config=model.config, **options)
        return TransformersSession(model, cache)

    for backend, ((by_token, by_channel), widths) in TRANSFORMERS_BACKENDS.items():
        if not is_installed(PACKAGES[backend]):
            output.print_note(f"no {backend}: it is not installed")
            continue
        for axes, axis_widths in widths.items():
            for bits in axis_widths:
                openers[f"{backend} {bits}, {axes}"] = partial(
                    open_quantized,
                    backend=backend,
                    nbits=bits,
                    axis_key=by_token if axes == BY_TOKEN else by_channel,
                    axis_value=by_channel if axes == BY_CHANNEL else by_token,
                    q_group_size=GROUP_TOKENS,
                )
    return openers


def is_installed(package: str) -> bool:
    """Returns whether there is such a module, also of a package that may be missing itself."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
