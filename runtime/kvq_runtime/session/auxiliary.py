"""KV Prediction by a smaller model that reads prompts in place of the larger one (2410.08391).

The auxiliary model runs over the prompt. An affine map makes the keys and values of each layer of
the base model from those of one layer of the auxiliary model, token by token
(`kvq_export.fit.auxiliary` fits the maps). The base model runs over the prompt's first and last
tokens only. Unlike in the paper, the auxiliary model's keys are taken after its own key norm, as
its cache has them, and their rotation is undone.
"""

from collections.abc import Sequence as Ids
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.class_cache import KeyTransform
from kvq.config import FLOAT_WIDTH, Budget
from kvq.errors import BackendError, argument
from kvq.reference.stored import rotate
from kvq_models.config import ModelConfig
from kvq_runtime.backends import Backend, open_backend
from kvq_runtime.backends.paged import PagedBackend
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import SessionRequest
from kvq_runtime.sequence.passes import Work
from kvq_runtime.sequence.sequence import TokenSequence
from kvq_runtime.session.vocabularies import check_vocabularies

Floats = NDArray[np.float32]

# Loaded auxiliary models by path and threads.
_backends: WeakValueDictionary[tuple[str, int], PagedBackend] = WeakValueDictionary()
_loading = Lock()


def consistent(base_layers: int, auxiliary_layers: int) -> tuple[int, ...]:
    """Returns the auxiliary layer that serves each base layer, so that all serve about as many.

    This is the rule KVP-C of the paper.
    """
    each, more = divmod(base_layers, auxiliary_layers)
    counts = [each + (layer < more) for layer in range(auxiliary_layers)]
    return tuple(np.repeat(np.arange(auxiliary_layers), counts).tolist())


def pruned(base_layers: int, auxiliary_layers: int) -> tuple[int, ...]:
    """Returns the layer that serves each base layer as if the auxiliary ones were kept base layers.

    This is the rule KVP-LP of the paper. The kept layers are at equal distances, and each base
    layer is served by the kept one at or before it: of 4 and 2 layers 0, 0, 1, 1.
    """
    kept = [layer * base_layers // auxiliary_layers for layer in range(auxiliary_layers)]
    places = np.searchsorted(kept, np.arange(base_layers), side="right") - 1
    return tuple(places.tolist())


RULES = {"c": consistent, "lp": pruned}


class AuxiliaryReader:
    """Holds what one auxiliary model has read of a text, in a 16-bit cache of its own."""

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
        """Becomes `ids` and computes what it does not hold of them; returns the seconds."""
        seconds = 0.0
        self.sequence.align(ids)
        while self.sequence.due():
            seconds += yield from self.sequence.advancing()
        return seconds

    def read(self, layer: int, start: int) -> Floats:
        """Returns keys and values of the tokens from `start` on, float32 [T, 2 Hk D + 1].

        The rotation of the keys is undone. The last column is 1, for the maps' constant.
        """
        config = self._config
        (cache,) = self.sequence.cache.parts
        heads = [cache.tail(layer, head) for head in range(config.first_attention.kv_heads)]
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
    """Holds a session's auxiliary model, and the maps from its cache to the base model's."""

    def __init__(self, base: Backend[Any], path: str, context_tokens: int) -> None:
        """Raises `BackendError` for two models that do not belong together."""
        paged = base.paged
        if paged is None:
            raise BackendError(
                f"{argument('predict_with')} is not possible on the {base.name} backend, whose "
                "cache takes no keys and values; run a bundle with an ONNX graph"
            )
        auxiliary, bundle = open_auxiliary(path, paged), paged.bundle
        fit = bundle.manifest.auxiliary
        if fit is None or fit["fingerprint"] != auxiliary.model.fingerprint:
            fitted = "none" if fit is None else str(fit["name"])
            raise BackendError(
                f"{bundle.path} has no matrices that make its keys and values from those of "
                f"{auxiliary.model.name} (from those of: {fitted}); export it with "
                f"{argument('predict_with')} {path}"
            )
        # For each layer the auxiliary layer that serves it, and W [2 Ha Da + 1, 2 Hk D].
        self._maps = list(zip(fit["served_by"], bundle.auxiliary_maps(), strict=True))
        self._config: ModelConfig = bundle.config
        self._norms = [
            bundle.read_weight(f"layers.{layer}.k_norm")
            if self._config.layers[layer].attention.qk_norm == "heads"
            else None
            for layer in range(self._config.num_layers)
        ]
        self._reader = AuxiliaryReader(auxiliary, context_tokens)

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of its cache; its weights are shared in the process."""
        return self.sequence.config.budget_bytes

    @property
    def sequence(self) -> TokenSequence[Cache]:
        """Returns the text as far as the auxiliary model has read it."""
        return self._reader.sequence

    def filling(
        self, cache: Cache, ids: Ids[int], start: int, *, rope_long: bool
    ) -> Work[Any, float]:
        """Gives `cache` keys and values of the tokens of `ids` from `start` on; returns seconds."""
        seconds = yield from self._reader.reading(ids)
        config = self._config
        attention = config.first_attention
        shape = (len(ids) - start, 2, attention.kv_heads, attention.head_dim)
        made = np.stack(
            [
                (self._reader.read(layer, start) @ weights).reshape(shape)
                for layer, weights in self._maps
            ]
        )
        layers = [
            KeyTransform(
                params=config.attention(layer),
                inv_freq=config.inv_freq(layer, long_rope=rope_long),
                k_norm=norm,
            )
            for layer, norm in enumerate(self._norms)
        ]
        cache.append(made[:, :, 0], made[:, :, 1], np.arange(start, len(ids)), layers)
        return seconds

    def close(self) -> None:
        self.sequence.close()


def open_auxiliary(path: str, base: PagedBackend) -> PagedBackend:
    """Returns the model at `path`, whose weights all its users share.

    Raises `BundleError`, and `BackendError` where it cannot read for `base`.
    """
    with _loading:
        backend = _backends.get((path, base.threads))
        if backend is None:
            opened = open_backend("auto", Bundle.open(path), threads=base.threads)
            backend = opened.paged
            if backend is None:
                opened.close()
                raise BackendError(
                    f"{path} has no ONNX graph; export it with {argument('format', 'both')}"
                )
            if not backend.bundle.config.uniform:
                backend.close()
                raise BackendError(
                    f"{path} cannot read for another model: its layers differ in their heads, "
                    "read others' keys or convolve; take a model whose layers are all alike"
                )
            _backends[path, base.threads] = backend
    check_vocabularies(argument("predict_with"), backend, base)
    return backend
