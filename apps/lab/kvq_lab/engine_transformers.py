"""The peer transformers: the bundle's weights restored to floats, under PyTorch's own attention.

Products take no quantised weights, so its steps read several times the bytes of ours: what is to
be compared is how a step grows with the context. float16 on a GPU, float32 on the processor. Its
caches are the plain one and each quantised one whose package is installed. Knows no other engine.
"""

import copy
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError
from kvq_apps.bench.engines import (
    BenchSequence,
    Setting,
    draft_ids,
    logit_rows,
)
from kvq_apps.terminal import output
from kvq_models.config import Dense, ModelConfig
from kvq_models.registry import family_for
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.machine import gpu

INSTALL = "pip install torch transformers optimum-quanto hqq"
# Numbers that share a scale and a zero, by the library's default.
GROUP = 64
# Families whose attention, norms and biases a config of these few fields describes.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheKind:
    """Describes a quantised cache of `package`: `bytes_each` number stored, with constants."""

    package: str
    bytes_each: float
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


# With float16 constants: a scale and a zero per group.
_GROUPED = 4 / 8 + 2 * 2 / GROUP
QUANTIZED: Mapping[str, CacheKind] = {
    "fp8": CacheKind(package="torch", bytes_each=1.0, options={"backend": "fp8"}),
    "quanto4": CacheKind(
        package="optimum.quanto",
        bytes_each=_GROUPED,
        # Along a channel it groups 64 tokens, and takes no number of tokens but multiples of it.
        options={"backend": "quanto", "nbits": 4, "axis_key": 0, "axis_value": 0},
    ),
    "hqq4": CacheKind(
        package="hqq",
        bytes_each=_GROUPED,
        options={"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    ),
}


class TransformersEngine:
    """Holds one model in PyTorch's memory; each sequence is a cache of the library's."""

    name = "transformers"

    def __init__(
        self, bundle: Bundle, *, threads: int, settings: Sequence[Setting], device: str
    ) -> None:
        del settings
        if (reason := _refusal(bundle.config)) is not None:
            raise BackendError(f"the peer {self.name} cannot compute this model: {reason}")
        self._torch = import_module("torch")
        self._config = bundle.config
        self._torch.set_num_threads(threads)
        self._device = "cpu" if device == gpu.PROCESSOR else device
        self._dtype = self._torch.float32 if device == gpu.PROCESSOR else self._torch.float16
        self._plain = "fp32" if device == gpu.PROCESSOR else "fp16"
        self._model = _model(bundle, self._dtype, self._device)
        kinds = [self._plain, *(kind for kind in QUANTIZED if self._possible(kind))]
        self.settings = tuple(Setting(kv=kv) for kv in kinds)

    @staticmethod
    def missing(device: str) -> str | None:
        """Returns why it cannot run here, or None."""
        for package in ("torch", "transformers"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed; {INSTALL}"
        if device != gpu.PROCESSOR and not import_module("torch").cuda.is_available():
            return f"torch here computes on no GPU; {INSTALL}, torch from PyTorch's CUDA index"
        return None

    def sequence(self, setting: Setting, depth: int, room: int) -> "TransformersSequence":
        del room
        cache = self._cache(setting.kv)
        if depth:
            self._fill(cache, depth)
        return TransformersSequence(
            self._model, cache, kv_bytes=self.cache_bytes(setting, depth), device=self._device
        )

    def cache_bytes(self, setting: Setting, tokens: int) -> int:
        """Counts what is stored; a step restores a layer's keys and values beside it."""
        kind = QUANTIZED.get(setting.kv)
        each = self._dtype.itemsize if kind is None else kind.bytes_each
        row = self._config.first_attention.kv_width
        return int(2 * self._config.num_layers * row * tokens * each)

    def close(self) -> None:
        del self._model

    def _cache(self, kv: str) -> Any:
        transformers = import_module("transformers")
        config = self._model.config
        if kv == self._plain:
            return transformers.DynamicCache(config=config)
        return transformers.QuantizedCache(config=config, **QUANTIZED[kv].options)

    def _fill(self, cache: Any, depth: int) -> None:
        """Fills the cache with random keys and values, the same in all layers."""
        attention = self._config.first_attention
        shape = (1, attention.kv_heads, depth, attention.head_dim)
        random = self._torch.Generator(self._device).manual_seed(0)
        rows = self._torch.randn(shape, generator=random, dtype=self._dtype, device=self._device)
        with self._torch.inference_mode():
            for layer in range(self._config.num_layers):
                cache.update(rows.clone(), rows.clone(), layer)

    def _possible(self, kv: str) -> bool:
        """Returns whether the cache can be used here; names one that cannot."""
        package = QUANTIZED[kv].package
        try:
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"{package} is not installed")
            self._fill(self._cache(kv), 2 * GROUP)
        # What an optional package raises that is too old for the other.
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            output.print_note(f"transformers {kv} is left out: {error}; {INSTALL}")
            return False
        return True


class TransformersSequence(BenchSequence):
    """Holds a cache, and its layers as they were in the beginning."""

    def __init__(self, model: Any, cache: Any, *, kv_bytes: int, device: str) -> None:
        self._torch = import_module("torch")
        self._model = model
        self._cache = cache
        self._device = device
        # An update puts new tensors into a layer and leaves the old ones as they are.
        self._beginning = [copy.copy(layer) for layer in cache.layers]
        self.kv_bytes = kv_bytes

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._run(ids, 1)[0]

    def verify(self, rows: int) -> bool:
        self._run(draft_ids(rows), len(logit_rows(rows)))
        return True

    def rollback(self) -> None:
        self._cache.layers = [copy.copy(layer) for layer in self._beginning]

    def step_bytes(self) -> tuple[int, int]:
        """Counts as `BenchSequence.step_bytes` says; an embedding that is no head is not read."""
        parameters = self._model.parameters()
        stored = sum(part.numel() * part.element_size() for part in parameters)
        embedding = self._model.get_input_embeddings().weight
        tied = embedding is self._model.get_output_embeddings().weight
        unread = 0 if tied else embedding.numel() * embedding.element_size()
        return stored - unread, self.kv_bytes

    def close(self) -> None:
        self._beginning.clear()
        self._cache.layers = []

    def _run(self, ids: NDArray[np.int64], rows: int) -> NDArray[np.float32]:
        """Returns logits of the last `rows` tokens; copying them waits for the device."""
        with self._torch.inference_mode():
            tokens = self._torch.from_numpy(ids[None]).to(self._device)
            cache = {cache_argument(self._model): self._cache}
            answer = self._model(tokens, use_cache=True, logits_to_keep=rows, **cache)
            return answer.logits[0].float().cpu().numpy()


def cache_argument(model: Any) -> str:
    """Returns what a model calls its cache, an argument and a result: new in 5.24."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def _refusal(config: ModelConfig) -> str | None:
    if config.model_type not in FAMILIES:
        return f"it is a {config.model_type}; this peer knows {', '.join(FAMILIES)}"
    if any(config.windows):
        return "it has attention windows"
    return None


def _model(bundle: Bundle, dtype: Any, device: str) -> Any:
    """Returns the bundle's model with its own weights, made without values before."""
    torch, transformers = import_module("torch"), import_module("transformers")
    config = bundle.config
    described = transformers.AutoConfig.for_model(config.model_type, **_fields(config))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described, dtype=dtype)
    model.to_empty(device=device).eval()
    model.tie_weights()
    rope = config.ropes[0]
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq = torch.tensor(rope.inv_freq, device=device)
    rotary.attention_scaling = rope.factor
    with torch.no_grad():
        _load(bundle, model.get_parameter)
    return model


def _fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json; rotary tables are put into the model itself."""
    mixer, feed = config.layers[0].attention, config.layers[0].feed
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": feed.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.first_attention.heads,
        "num_key_value_heads": config.first_attention.kv_heads,
        "head_dim": config.first_attention.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": mixer.output_bias,
        "mlp_bias": isinstance(feed, Dense) and feed.bias,
        "sliding_window": None,
    }


def _load(bundle: Bundle, parameter: Callable[[str], Any]) -> None:
    """Copies every canonical weight into the parameters that it is made of."""
    torch, config = import_module("torch"), bundle.config
    for name, source in family_for({"model_type": config.model_type}).weights(config).items():
        parts = [parameter(part) for part in source.parts]
        ends = np.cumsum([len(part) for part in parts])
        for part, end in zip(parts, ends.tolist(), strict=True):
            rows = bundle.read_weight(name, slice(end - len(part), end))
            part.copy_(torch.from_numpy(rows))
