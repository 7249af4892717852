"""Sessions of the engines that `peer_quality.py` compares kvq with, and of their caches.

transformers' QuantizedCache and ONNX Runtime's GroupQueryAttention; an opener makes one session.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from kvq_apps import output
from kvq_apps.bench.attention_graph import WEIGHT_FOLDER
from kvq_apps.evaluation.text import SCORE_CHUNK_TOKENS
from kvq_lab.engine_onnxruntime import rotary_tables
from kvq_lab.engine_transformers import cache_argument
from kvq_lab.gqa_graph import gqa_model, past_names, present_names
from kvq_models.config import ModelConfig
from kvq_runtime.backends.onnx import session_options
from kvq_runtime.bundle import Bundle
from kvq_runtime.onnx_runtime import onnx_runtime

Windows = Sequence[Sequence[int]]
Openers = Mapping[str, Callable[[], Any]]

# Groups must be closed at multiples of this many tokens, or Quanto refuses its per-channel axis.
GROUP_TOKENS = 64
# Transformers holds floats in the model's type. The forward pass is float32 here, so that no other
# rounding is measured, but a deployed model has 16 bits: that is what its floats are counted at.
HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of a peer's cache, under the names a session's statistics have."""

    kv_bytes_peak: int
    bytes_per_token: float


class PeerSession(ABC):
    """What `divergence` needs of a session: a prompt in one pass, then logits in chunks."""

    def prefill(self, ids: Sequence[int]) -> None:
        """Runs the prompt."""
        self.forward(ids)

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Runs `ids` and yields logits float32 [n, V], in a session's chunks."""
        for start in range(0, len(ids), SCORE_CHUNK_TOKENS):
            yield self.forward(ids[start : start + SCORE_CHUNK_TOKENS])

    @abstractmethod
    def forward(self, ids: Sequence[int]) -> np.ndarray:
        """Runs `ids` after all before them; their logits float32 [n, V]."""

    @abstractmethod
    def stats(self) -> Held:
        """What the cache held at its fullest."""

    def __enter__(self) -> "PeerSession":
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - most peers hold nothing else
        """Nothing is held beyond the object's own arrays."""


# transformers


class TransformersSession(PeerSession):
    """A transformers model and one of its caches."""

    def __init__(self, model: Any, cache: Any) -> None:
        self._model = model
        self._cache = cache
        self._tokens = 0
        self._peak_bytes = 0

    def forward(self, ids: Sequence[int]) -> np.ndarray:
        """In two passes where the first can end on a whole group."""
        rest = min(len(ids), (self._tokens + len(ids)) % GROUP_TOKENS)
        parts = [part for part in (ids[: len(ids) - rest], ids[len(ids) - rest :]) if part]
        return np.concatenate([self._pass(part) for part in parts])

    def _pass(self, ids: Sequence[int]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            tokens = torch.tensor([list(ids)])
            held = {cache_argument(self._model): self._cache}
            out = self._model(tokens, use_cache=True, **held)
        self._tokens += len(ids)
        self._peak_bytes = max(self._peak_bytes, sum(self._layer_bytes()))
        return out.logits[0].numpy()

    def stats(self) -> Held:
        """One more token costs what the quantised ones do on average, or all do."""
        residual, quantized = self._layer_bytes()
        layer = self._cache.layers[0]
        in_floats = layer.keys.shape[-2] if layer.keys.numel() else 0
        held, tokens = (quantized, self._tokens - in_floats) if quantized else (residual, in_floats)
        return Held(kv_bytes_peak=self._peak_bytes, bytes_per_token=held / tokens)

    def _layer_bytes(self) -> tuple[int, int]:
        """Bytes of floating-point tokens and of quantised ones, all layers."""
        residual = quantized = 0
        for layer in self._cache.layers:
            residual += (layer.keys.numel() + layer.values.numel()) * HALF_BYTES
            for name in ("_quantized_keys", "_quantized_values"):
                if hasattr(layer, name):
                    quantized += _quantized_bytes(getattr(layer, name))
        return residual, quantized


def _quantized_bytes(tensor: Any) -> int:
    """Bytes of packed codes and of their constants: HQQ's pair, or Quanto's tensor."""
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
    """Openers of the unquantised cache and of every back-end that is installed."""
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
    """Whether there is such a module, also of a package that may be missing itself."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


# ONNX Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticCache:
    """GroupQueryAttention's quantised past: one width, symmetric codes, scales fixed beforehand.

    `scales`: float32 [1, Hk, 1, D] per layer for keys and for values: one scale for a whole tensor
    loses about twice as much.
    """

    bits: int
    scales: Sequence[tuple[np.ndarray, np.ndarray]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the scales."""
        return sum(scale.nbytes for pair in self.scales for scale in pair)


class OnnxRuntimeSession(PeerSession):
    """The stock operator; past tensors [1, Hk, T, D] are fed and fetched, two codes to a byte."""

    def __init__(
        self, session: Any, config: ModelConfig, cache: StaticCache | None, context_tokens: int
    ) -> None:
        self._session = session
        self._constants = rotary_tables(config, context_tokens)
        self._inputs = {value.name for value in session.get_inputs()}
        self._layers = range(config.num_layers)
        dtype, row = _storage(config, cache)
        empty = np.zeros((1, config.num_kv_heads, 0, row), dtype)
        self._past = {name: empty for layer in self._layers for name in past_names(layer)}
        self._scale_bytes = 0 if cache is None else cache.num_bytes

    @property
    def tokens(self) -> int:
        """How many tokens the cache holds."""
        return next(iter(self._past.values())).shape[2]

    def past(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [1, Hk, T, D] of a layer."""
        key, value = past_names(layer)
        return self._past[key], self._past[value]

    def forward(self, ids: Sequence[int]) -> np.ndarray:
        """See `PeerSession.forward`."""
        total = self.tokens + len(ids)
        feeds = self._past | self._constants
        feeds |= {
            "input_ids": np.array(ids, np.int64)[:, None],
            "input_weights": np.ones((len(ids), 1), np.float32),
            "logit_rows": np.arange(len(ids)),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
        }
        names = [name for layer in self._layers for name in present_names(layer)]
        feeds = {name: array for name, array in feeds.items() if name in self._inputs}
        logits, *present = self._session.run(["logits", *names], feeds)
        self._past = dict(zip(self._past, present, strict=True))
        return logits

    def stats(self) -> Held:
        """See `PeerSession.stats`."""
        held = sum(array.nbytes for array in self._past.values())
        return Held(
            kv_bytes_peak=held + self._scale_bytes, bytes_per_token=held / max(1, self.tokens)
        )


def _storage(config: ModelConfig, cache: StaticCache | None) -> tuple[type[np.generic], int]:
    """Type and length of a stored row of one head."""
    if cache is None:
        return np.float32, config.head_dim
    if cache.bits == 8:
        return np.int8, config.head_dim
    return np.uint8, config.head_dim // 2


def onnxruntime_sessions(
    bundle: Bundle, texts: Windows, context_tokens: int, threads: int
) -> Openers:
    """Openers of the float32 cache and of calibrated static ones."""

    def opener(cache: StaticCache | None) -> Callable[[], OnnxRuntimeSession]:
        session = _gqa_session(bundle, cache, threads)
        return lambda: OnnxRuntimeSession(session, bundle.config, cache, context_tokens)

    exact = opener(None)
    seen = _keys_and_values(exact, bundle.config.num_layers, texts)
    openers: dict[str, Callable[[], Any]] = {"f32": exact}
    for bits in (8, 4):
        openers[f"int{bits}, per channel"] = opener(calibrated(seen, bits))
    return openers


def _keys_and_values(
    exact: Callable[[], OnnxRuntimeSession], num_layers: int, texts: Windows
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer, keys and values [1, Hk, T, D] of all tokens of all windows."""
    found: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(num_layers)]
    for ids in texts:
        session = exact()
        session.forward(ids)
        for layer, rows in enumerate(found):
            rows.append(session.past(layer))
    return [
        (
            np.concatenate([key for key, _ in rows], axis=2),
            np.concatenate([value for _, value in rows], axis=2),
        )
        for rows in found
    ]


def calibrated(seen: Sequence[tuple[np.ndarray, np.ndarray]], bits: int) -> StaticCache:
    """The cache whose scales have the least squared error on `seen`."""
    scales = [(best_scale(key, bits), best_scale(value, bits)) for key, value in seen]
    return StaticCache(bits=bits, scales=scales)


def best_scale(x: np.ndarray, bits: int) -> np.ndarray:
    """Each channel's scale of least squared error for x [1, Hk, T, D]: float32 [1, Hk, 1, D].

    Candidates are shares of the scale that clips nothing.
    """
    largest = 2 ** (bits - 1) - 1
    whole = np.abs(x).max(axis=2, keepdims=True) / largest + np.finfo(np.float32).tiny
    candidates = [(whole * share).astype(np.float32) for share in np.linspace(0.2, 1.0, 33)]
    errors = []
    for scale in candidates:
        codes = np.clip(np.rint(x / scale), -largest - 1, largest)
        errors.append(np.square(codes * scale - x).mean(axis=2, keepdims=True))
    best = np.argmin(errors, axis=0)[None]
    return np.take_along_axis(np.stack(candidates), best, axis=0)[0]


def _gqa_session(bundle: Bundle, cache: StaticCache | None, threads: int) -> Any:
    model = gqa_model(ir.load(bundle.model_path), bundle.config)
    if cache is not None:
        model = quantized_gqa(model, bundle.config, cache)
    options = session_options(threads)
    options.add_session_config_entry(WEIGHT_FOLDER, str(bundle.path))
    return onnx_runtime().InferenceSession(model, options, providers=["CPUExecutionProvider"])


def quantized_gqa(model_bytes: bytes, config: ModelConfig, cache: StaticCache) -> bytes:
    """The float graph of `gqa_model` with a quantised past, and its scales as initializers."""
    model = ir.from_proto(_model_proto(model_bytes))
    dtype, row = _storage(config, cache)
    attention = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    for layer, (node, pair) in enumerate(zip(attention, cache.scales, strict=True)):
        node.resize_inputs(14)
        for index, (letter, scale) in enumerate(zip("kv", pair, strict=True)):
            tensor = ir.Tensor(scale, name=f"layers.{layer}.{letter}_scale")
            value = ir.Value(
                name=tensor.name,
                shape=tensor.shape,
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            model.graph.register_initializer(value)
            node.replace_input_with(12 + index, value)
            node.attributes[f"{letter}_quant_type"] = ir.AttrString(
                f"{letter}_quant_type", "PER_CHANNEL"
            )
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", cache.bits)
        for stored in (*node.inputs[3:5], *node.outputs[1:3]):
            assert stored is not None
            stored.dtype = ir.DataType.from_numpy(np.dtype(dtype))
            stored.shape = ir.Shape([1, config.num_kv_heads, "S", row])
    return ir.to_proto(model).SerializeToString()


def _model_proto(model_bytes: bytes) -> Any:
    import onnx

    return onnx.load_model_from_string(model_bytes)
