"""KV Prediction by a smaller model: it reads prompts in the larger one's place (2410.08391).

The auxiliary model runs over the prompt, and of its keys and values of one layer those of each
layer of the base model are made, token by token, by an affine map (`kvq_export.auxiliary` fits
them). The base model runs over the prompt's first and last tokens alone. Unlike in the paper, the
auxiliary model's keys are those after its own key norm, as its cache has them, turned back.
"""

from collections.abc import Sequence as Ids
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache, KeyForm
from kvq.config import FLOAT_WIDTH, Budget
from kvq.errors import BackendError, argument
from kvq.reference import rotate
from kvq_models.config import ModelConfig
from kvq_runtime.backends import Backend, open_backend
from kvq_runtime.backends.paged import PagedBackend, PagedCache
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import SessionRequest
from kvq_runtime.passes import Work
from kvq_runtime.sequence import TokenSequence
from kvq_runtime.vocabularies import check_vocabularies

Floats = NDArray[np.float32]

# Loaded auxiliary models by path and threads.
_backends: WeakValueDictionary[tuple[str, int], PagedBackend] = WeakValueDictionary()
_loading = Lock()


def consistent(base_layers: int, own_layers: int) -> tuple[int, ...]:
    """KVP-C: the auxiliary layer that serves each base layer, so that all serve about as many."""
    each, more = divmod(base_layers, own_layers)
    counts = [each + (layer < more) for layer in range(own_layers)]
    return tuple(np.repeat(np.arange(own_layers), counts).tolist())


def pruned(base_layers: int, own_layers: int) -> tuple[int, ...]:
    """KVP-LP: as if the auxiliary layers were base layers kept at equal distances.

    Each layer is served by the kept one at or before it: of 4 and 2 layers 0, 0, 1, 1.
    """
    kept = [layer * base_layers // own_layers for layer in range(own_layers)]
    places = np.searchsorted(kept, np.arange(base_layers), side="right") - 1
    return tuple(places.tolist())


RULES = {"c": consistent, "lp": pruned}


class Reader:
    """What one auxiliary model has read of a text, in a 16-bit cache of its own."""

    def __init__(self, backend: PagedBackend, context_tokens: int) -> None:
        self._config = backend.bundle.config
        request = SessionRequest(
            k_bits=FLOAT_WIDTH,
            v_bits=FLOAT_WIDTH,
            context_tokens=context_tokens,
            kv_budget=Budget(tokens=context_tokens),
        )
        self.sequence = TokenSequence(backend, backend.session_config(request))

    def reading(self, ids: Ids[int]) -> Work[Any, float]:
        """Becomes `ids`, computing what it does not hold of them; seconds that took."""
        seconds = 0.0
        self.sequence.align(ids)
        while self.sequence.due():
            seconds += yield from self.sequence.advancing()
        return seconds

    def read(self, layer: int, start: int) -> Floats:
        """Keys, turned back, and values of the tokens from `start` on, float32 [T, 2 Hk D + 1]."""
        config = self._config
        (cache,) = self.sequence.cache.parts
        heads = [cache.tail(layer, head) for head in range(config.num_kv_heads)]
        places = heads[0][2].astype(np.int64)
        newest = np.argsort(places)[start:]
        keys, values = (
            np.stack([head[side][newest].astype(np.float32) for head in heads], axis=1)
            for side in (0, 1)
        )
        params = config.attention(layer)
        inv_freq = config.inv_freq(layer, long_rope=self.sequence.rope_long)
        keys = rotate(keys, -places[newest], inv_freq, 1 / params.rope_factor)
        ones = np.ones((len(newest), 1), np.float32)
        return np.hstack([keys.reshape(len(keys), -1), values.reshape(len(values), -1), ones])


class Auxiliary:
    """A session's auxiliary model, and the maps from its cache to the base model's."""

    def __init__(self, base: Backend[Any], path: str, context_tokens: int) -> None:
        """Raises `BackendError` for two models that do not belong together."""
        paged = base.paged
        if paged is None:
            raise BackendError(
                f"{argument('predict_with')} is not possible on the {base.name} backend, whose "
                "cache takes no keys and values; run a bundle with an ONNX graph"
            )
        own, bundle = open_auxiliary(path, paged), paged.bundle
        told = bundle.manifest.auxiliary
        if told is None or told["fingerprint"] != own.model.fingerprint:
            fitted = "none" if told is None else str(told["name"])
            raise BackendError(
                f"{bundle.path} has no matrices that make its keys and values from those of "
                f"{own.model.name} (from those of: {fitted}); export it with "
                f"{argument('predict_with')} {path}"
            )
        # Of each layer the auxiliary model's that serves it, and W [2 Ha Da + 1, 2 Hk D].
        self._maps = list(zip(told["served_by"], bundle.auxiliary_maps(), strict=True))
        self._config: ModelConfig = bundle.config
        self._norms = [
            bundle.read_weight(f"layers.{layer}.k_norm")
            if self._config.layers[layer].attention.qk_norm == "heads"
            else None
            for layer in range(self._config.num_layers)
        ]
        self._reader = Reader(own, context_tokens)

    @property
    def held_bytes(self) -> int:
        """What its cache takes beside the base model's; its weights are the process's."""
        return self.sequence.config.budget_bytes

    @property
    def sequence(self) -> TokenSequence[PagedCache]:
        """The text as far as the auxiliary model has read it."""
        return self._reader.sequence

    def taking(
        self, cache: Cache, ids: Ids[int], start: int, *, rope_long: bool
    ) -> Work[Any, float]:
        """Gives `cache` the keys and values of the tokens of `ids` from `start` on; seconds."""
        seconds = yield from self._reader.reading(ids)
        config = self._config
        shape = (len(ids) - start, 2, config.num_kv_heads, config.head_dim)
        made = np.stack(
            [
                (self._reader.read(layer, start) @ weights).reshape(shape)
                for layer, weights in self._maps
            ]
        )
        layers = [
            KeyForm(
                params=config.attention(layer),
                inv_freq=config.inv_freq(layer, long_rope=rope_long),
                k_norm=norm,
            )
            for layer, norm in enumerate(self._norms)
        ]
        cache.append(made[:, :, 0], made[:, :, 1], np.arange(start, len(ids)), layers)
        return seconds

    def close(self) -> None:
        """Frees its cache."""
        self.sequence.close()


def open_auxiliary(path: str, base: PagedBackend) -> PagedBackend:
    """The model at `path`, its weights shared by all who read with it.

    Raises `BundleError`, and `BackendError` where it cannot read for `base`.
    """
    with _loading:
        own = _backends.get((path, base.threads))
        if own is None:
            opened = open_backend("auto", Bundle.open(path), threads=base.threads)
            own = opened.paged
            if own is None:
                opened.close()
                raise BackendError(
                    f"{path} has no ONNX graph; export it with {argument('format', 'both')}"
                )
            if not own.bundle.config.uniform:
                own.close()
                raise BackendError(
                    f"{path} cannot read for another model: its layers differ in their heads, "
                    "read others' keys or convolve; take a model whose layers are all alike"
                )
            _backends[path, base.threads] = own
    check_vocabularies(argument("predict_with"), own, base)
    return own
