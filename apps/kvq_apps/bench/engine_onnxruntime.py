"""The peer ONNX Runtime: the same weights under its own GroupQueryAttention, IO-bound.

The cache is a pair of tensors per layer, float32 or int8, bound as past and present at once, so
that a step copies nothing. Knows no other engine.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError
from kvq_apps.bench.engines import Setting, draft_ids, wanted_rows
from kvq_apps.bench.gqa_graph import WEIGHT_FOLDER, gqa_model, past_names, present_names
from kvq_apps.bench.ort_twin import ort_twin
from kvq_models.config import ModelConfig
from kvq_runtime.backends.onnx import session_options
from kvq_runtime.bundle import Bundle

DTYPES: Mapping[str, type[np.generic]] = {"fp32": np.float32, "int8": np.int8}


class OnnxRuntimeEngine:
    """The stock operators of the installed wheel."""

    name = "onnxruntime"

    def __init__(self, bundle: Bundle, *, threads: int, settings: Sequence[Setting]) -> None:
        del settings
        reason = _refusal(bundle.config)
        if reason is not None:
            raise BackendError(f"the peer onnxruntime cannot compute this model: {reason}")
        self._config = bundle.config
        kinds = ("fp32", "int8") if _has_int8_cache() else ("fp32",)
        self.settings = tuple(Setting(kv=kv) for kv in kinds)
        standard = ort_twin(bundle)
        self.weight_bytes = standard.weight_bytes_per_step
        self._sessions = {kv: _session(standard, kv, threads) for kv in kinds}

    @staticmethod
    def missing() -> str | None:
        """Why it cannot run here, or None."""
        if importlib.util.find_spec("onnxruntime") is None:
            return "onnxruntime is not installed; pip install onnxruntime"
        return None

    def sequence(self, setting: Setting, depth: int, room: int) -> "OnnxRuntimeSequence":
        session = self._sessions[setting.kv]
        return OnnxRuntimeSequence(
            session, self._config, setting.kv, depth, room, weight_bytes=self.weight_bytes
        )

    def cache_bytes(self, setting: Setting, tokens: int) -> int:
        return tokens * _bytes_per_token(self._config, setting.kv)

    def close(self) -> None:
        self._sessions.clear()


class OnnxRuntimeSequence:
    """The cache's buffers and how many of their rows are in use."""

    relief_s = 0.0

    def __init__(
        self,
        session: Any,
        config: ModelConfig,
        kv: str,
        depth: int,
        room: int,
        *,
        weight_bytes: int,
    ) -> None:
        self._weight_bytes = weight_bytes
        self.kv_bytes = depth * _bytes_per_token(config, kv)
        self._session = session
        self._config = config
        self._depth = self._tokens = depth
        self._cache = _random_cache(config, kv, depth + room)
        self._constants = rotary_tables(config, depth + room)
        self._steps: dict[tuple[int, int], _Step] = {}

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._run(ids, np.array([len(ids) - 1]))[0]

    def verify(self, rows: int) -> bool:
        self._run(draft_ids(rows), wanted_rows(rows))
        return True

    def _run(self, ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        key = len(ids), len(wanted)
        if key not in self._steps:
            self._steps[key] = self._step(wanted, len(ids))
        step = self._steps[key]
        self._tokens += len(ids)
        step.arrays["input_ids"][:, 0] = ids
        step.arrays["seqlens_k"][0] = self._tokens - 1
        step.arrays["total_sequence_length"][...] = self._tokens
        self._session.run_with_iobinding(step.binding)
        return step.logits

    def rollback(self) -> None:
        self._tokens = self._depth

    def attend(self, rows: int) -> bool:
        """See `BenchSequence.attend`; its attention is inside the graph."""
        return False

    def step_bytes(self) -> tuple[int, int]:
        return self._weight_bytes, self.kv_bytes

    def close(self) -> None:
        self._steps.clear()
        self._cache.clear()

    def _step(self, wanted: NDArray[np.int64], tokens: int) -> "_Step":
        step = _Step(self._session.io_binding(), tokens, wanted, self._config.vocab_size)
        for name, array in (step.arrays | self._constants).items():
            step.binding.bind_ortvalue_input(name, _aliased(array))
        step.binding.bind_ortvalue_output("logits", _aliased(step.logits))
        for layer, buffers in self._cache.items():
            names = zip(past_names(layer), present_names(layer), buffers, strict=True)
            for past, present, buffer in names:
                value = _aliased(buffer)
                step.binding.bind_ortvalue_input(past, value)
                step.binding.bind_ortvalue_output(present, value)
        return step


class _Step:
    """Inputs and outputs of passes over one number of tokens and of logits, bound once."""

    def __init__(
        self, binding: Any, tokens: int, wanted: NDArray[np.int64], vocab_size: int
    ) -> None:
        self.binding = binding
        self.arrays: dict[str, np.ndarray] = {
            "input_ids": np.zeros((tokens, 1), np.int64),
            "input_weights": np.ones((tokens, 1), np.float32),
            "logit_rows": wanted,
            "seqlens_k": np.zeros(1, np.int32),
            "total_sequence_length": np.zeros((), np.int32),
        }
        self.logits = np.zeros((len(wanted), vocab_size), np.float32)


def _session(bundle: Bundle, kv: str, threads: int) -> Any:
    import onnxruntime

    options = session_options(threads)
    options.add_session_config_entry(WEIGHT_FOLDER, str(bundle.path))
    model = gqa_model(bundle, int8=kv == "int8")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _aliased(array: np.ndarray) -> Any:
    """An OrtValue over the array's own memory."""
    from onnxruntime import OrtValue

    return OrtValue.ortvalue_from_numpy(array)


def _has_int8_cache() -> bool:
    """Whether the wheel's CPU kernel takes quantised past tensors."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    return any(
        kernel.op_name == "GroupQueryAttention"
        and kernel.provider == "CPUExecutionProvider"
        and any("tensor(int8)" in types for types in kernel.type_constraints.values())
        for kernel in get_all_opkernel_def()
    )


def _refusal(config: ModelConfig) -> str | None:
    if any(layer.window_tokens for layer in config.layers):
        return "it has attention windows"
    if config.attention_softcap > 0:
        return "its attention has a soft cap"
    return None


def _bytes_per_token(config: ModelConfig, kv: str) -> int:
    row = config.num_kv_heads * config.head_dim * np.dtype(DTYPES[kv]).itemsize
    return 2 * config.num_layers * row


def _random_cache(config: ModelConfig, kv: str, tokens: int) -> dict[int, list[np.ndarray]]:
    """Layer -> keys and values [1, H_kv, tokens, D]; all layers hold the same numbers."""
    random = np.random.default_rng(0)
    shape = (1, config.num_kv_heads, tokens, config.head_dim)
    if kv == "int8":
        numbers = random.integers(-40, 41, shape, np.int8)
    else:
        numbers = random.standard_normal(shape, np.float32)
    return {layer: [numbers.copy(), numbers.copy()] for layer in range(config.num_layers)}


def rotary_tables(config: ModelConfig, tokens: int) -> dict[str, np.ndarray]:
    """The graph's `cos` and `sin` inputs for `tokens` positions."""
    long_rope = config.needs_long_rope(tokens)
    tables: dict[str, np.ndarray] = {}
    for index, rope in enumerate(config.ropes):
        layer = next(i for i, layer in enumerate(config.layers) if layer.rope == index)
        angles = np.outer(np.arange(tokens), config.inv_freq(layer, long_rope=long_rope))
        tables[f"cos.{index}"] = (np.cos(angles) * rope.factor).astype(np.float32)
        tables[f"sin.{index}"] = (np.sin(angles) * rope.factor).astype(np.float32)
    return tables
