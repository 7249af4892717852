"""The peer ONNX Runtime: the same weights under its own GroupQueryAttention, IO-bound.

The cache is a pair of tensors per layer, bound as past and present at once, so that a step copies
nothing. On a device activations are float16, all that its kernels take; on the processor those
of a float16 cache are. Knows no other engine.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvq_apps import output
from kvq_apps.bench.attention_graph import WEIGHT_FOLDER, attention_model
from kvq_apps.bench.engines import InProcess, Setting, check_computable, draft_ids, wanted_rows
from kvq_apps.bench.ort_twin import ort_twin
from kvq_lab.gqa_graph import KV_TYPES, gqa_model, past_names, present_names
from kvq_models.config import ModelConfig
from kvq_runtime import gpu
from kvq_runtime.backends.onnx import held, memory_kind, open_session, session_options
from kvq_runtime.bundle import Bundle
from kvq_runtime.onnx_runtime import onnx_runtime_state

# The caches to measure; an operator of a device has none of float32.
KINDS = {"cpu": ("fp32", "fp16", "int8"), "cuda": ("fp16", "int8")}
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": gpu.PROVIDER}


class OnnxRuntimeEngine:
    """The stock operators of the installed wheel."""

    name = "onnxruntime"

    def __init__(
        self, bundle: Bundle, *, threads: int, settings: Sequence[Setting], device: str
    ) -> None:
        del settings
        check_computable(self.name, _refusal(bundle.config))
        self._config, self._threads, self._device = bundle.config, threads, device
        kinds, lacking = _kinds(device)
        if lacking:
            output.print_note(
                f"onnxruntime {', '.join(lacking)} is left out: its GroupQueryAttention for "
                f"{device} keeps no such cache"
            )
        self.settings = tuple(Setting(kv=kv) for kv in kinds)
        self._standard = ort_twin(bundle)
        self.weight_bytes = self._standard.weight_bytes_per_step
        self._sessions = {
            setting.kv: self._open(self._standard.read_graph(), setting.kv)
            for setting in self.settings
        }

    @staticmethod
    def missing(device: str) -> str | None:
        """Why it cannot run here, or None."""
        if importlib.util.find_spec("onnxruntime") is None:
            return "onnxruntime is not installed; pip install onnxruntime"
        if not _kinds(device)[0]:
            return f"its GroupQueryAttention has no kernel for {device}; upgrade onnxruntime"
        return None

    def sequence(self, setting: Setting, depth: int, room: int) -> "OnnxRuntimeSequence":
        alone = self.batch(setting, depth, room, 1)
        return OnnxRuntimeSequence(
            self._sessions[setting.kv], self._config, alone, weight_bytes=self.weight_bytes
        )

    def batch(self, setting: Setting, depth: int, room: int, count: int) -> "OnnxRuntimeBatch":
        """See `BenchEngine.batch`; rows of one sequence are no batch to it either."""
        session = self._open(attention_model(self._standard), setting.kv, batch=count)
        values = _Values(
            self._config, setting.kv, self._device, tokens=depth + room, batch=count,
            half=self._half(setting.kv),
        )  # fmt: skip
        return OnnxRuntimeBatch(session, values, depth)

    def cache_bytes(self, setting: Setting, tokens: int) -> int:
        return tokens * _bytes_per_token(self._config, setting.kv)

    def close(self) -> None:
        self._sessions.clear()

    def _half(self, kv: str) -> bool:
        return kv == "fp16" or self._device != gpu.PROCESSOR

    def _open(self, model: ir.Model, kv: str, *, batch: int = 1) -> Any:
        options = session_options(self._threads)
        options.add_session_config_entry(WEIGHT_FOLDER, str(self._standard.path))
        graph = gqa_model(model, self._config, kv=kv, half=self._half(kv), batch=batch)
        return open_session(graph, options, self._device)


class _Values:
    """What stays bound from pass to pass: the cache of `batch` sequences, and rotary tables."""

    def __init__(
        self, config: ModelConfig, kv: str, device: str, *, tokens: int, batch: int, half: bool
    ) -> None:
        self.batch, self.device = batch, device
        self.float = np.float16 if half else np.float32
        self.width = config.qkv_width
        self.bytes_per_token = _bytes_per_token(config, kv)
        tables = rotary_tables(config, tokens)
        self.tables = {
            name: held(table.astype(self.float), device) for name, table in tables.items()
        }
        numbers = _random_numbers(config, kv, tokens, batch)
        # Arrays of ours are not copied, and no two layers may share one.
        self.cache = {
            layer: [held(numbers.copy(), device) for _ in range(2)]
            for layer in range(config.num_layers)
        }


class _Bound:
    """A session's inputs and outputs for passes over one number of rows."""

    def __init__(
        self,
        session: Any,
        values: _Values,
        fixed: Mapping[str, Any],
        result: tuple[str, NDArray[np.float32] | None],
    ) -> None:
        """`fixed`: inputs that stay. `result`: the output and, if it is wanted, its array."""
        self._session = session
        self._binding = session.io_binding()
        self._inputs = {node.name for node in session.get_inputs()}
        name, self.array = result
        for given, value in {**values.tables, **fixed}.items():
            if given in self._inputs:
                self._binding.bind_ortvalue_input(given, value)
        if self.array is None:
            self._binding.bind_output(name, memory_kind(values.device))
        else:
            self._binding.bind_ortvalue_output(name, held(self.array, gpu.PROCESSOR))
        for layer, pair in values.cache.items():
            names = zip(past_names(layer), present_names(layer), pair, strict=True)
            for past, present, value in names:
                self._binding.bind_ortvalue_input(past, value)
                self._binding.bind_ortvalue_output(present, value)

    def run(self, feeds: Mapping[str, np.ndarray]) -> None:
        """One pass, which has been computed when this returns."""
        # A device copies what is bound when it is bound.
        for name in self._inputs & feeds.keys():
            self._binding.bind_ortvalue_input(name, held(feeds[name], gpu.PROCESSOR))
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()


def _lengths(tokens: int, batch: int) -> dict[str, np.ndarray]:
    """What the operator is told of `batch` sequences of so many tokens, with the new ones."""
    return {
        "seqlens_k": np.full(batch, tokens - 1, np.int32),
        "total_sequence_length": np.array(tokens, np.int32),
    }


class OnnxRuntimeBatch:
    """Sequences of one depth, and the attention of all layers alone."""

    def __init__(self, session: Any, values: _Values, depth: int) -> None:
        self.values = values
        self.depth = depth
        self._session = session
        self._bound: dict[int, _Bound] = {}

    def attend(self, rows: int) -> bool:
        """See `BenchBatch.attend`."""
        if rows not in self._bound:
            values = self.values
            shape = (rows * values.batch, values.width)
            qkv = np.random.default_rng(rows).standard_normal(shape, np.float32)
            fixed = {"qkv": held(qkv.astype(values.float), values.device)}
            self._bound[rows] = _Bound(self._session, values, fixed, ("attended", None))
        self._bound[rows].run(_lengths(self.depth + rows, self.values.batch))
        return True

    def close(self) -> None:
        """Gives the cache's memory back."""
        self._bound.clear()
        self.values.cache.clear()


class OnnxRuntimeSequence(InProcess):
    """One sequence's buffers and how many of their rows are in use."""

    def __init__(
        self, session: Any, config: ModelConfig, alone: OnnxRuntimeBatch, *, weight_bytes: int
    ) -> None:
        self._session = session
        self._config = config
        self._alone = alone
        self._tokens = alone.depth
        self._weight_bytes = weight_bytes
        self.kv_bytes = alone.depth * alone.values.bytes_per_token
        self._steps: dict[tuple[int, int], _Bound] = {}

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._run(ids, np.array([len(ids) - 1]))[0]

    def verify(self, rows: int) -> bool:
        self._run(draft_ids(rows), wanted_rows(rows))
        return True

    def attend(self, rows: int) -> bool:
        """See `BenchSequence.attend`."""
        return self._alone.attend(rows)

    def rollback(self) -> None:
        self._tokens = self._alone.depth

    def step_bytes(self) -> tuple[int, int]:
        return self._weight_bytes, self.kv_bytes

    def close(self) -> None:
        self._steps.clear()
        self._alone.close()

    def _run(self, ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        key = len(ids), len(wanted)
        if key not in self._steps:
            self._steps[key] = self._step(len(ids), wanted)
        step = self._steps[key]
        self._tokens += len(ids)
        step.run({"input_ids": ids[:, None], **_lengths(self._tokens, 1)})
        assert step.array is not None
        return step.array

    def _step(self, tokens: int, wanted: NDArray[np.int64]) -> _Bound:
        values = self._alone.values
        fixed = {
            "input_weights": held(np.ones((tokens, 1), values.float), values.device),
            "logit_rows": held(wanted, values.device),
        }
        logits = np.zeros((len(wanted), self._config.vocab_size), np.float32)
        return _Bound(self._session, values, fixed, ("logits", logits))


def _kinds(device: str) -> tuple[list[str], list[str]]:
    """Of the caches to measure those that the wheel's kernel for the device takes, and the rest."""
    where = memory_kind(device)
    stored = _stored_types(_PROVIDERS[where])
    taken = [kv for kv in KINDS[where] if np.dtype(KV_TYPES[kv]).name in stored]
    return taken, [kv for kv in KINDS[where] if kv not in taken]


def _stored_types(provider: str) -> set[str]:
    """Numpy's names of the types that the provider's operator stores keys and values in."""
    kernels = (
        kernel.type_constraints
        for kernel in onnx_runtime_state().get_all_opkernel_def()
        if kernel.op_name == "GroupQueryAttention" and kernel.provider == provider
    )
    # Where a cache has no type of its own it has that of the activations.
    types = {one for types in kernels for one in types.get("T_CACHE", types["T"])}
    names = {one.removeprefix("tensor(").removesuffix(")") for one in types}
    return {"float32" if name == "float" else name for name in names}


def _refusal(config: ModelConfig) -> str | None:
    if any(config.windows):
        return "it has attention windows"
    if not config.uniform:
        return "its layers do not all attend alike"
    if any(layer.attention.softcap > 0 for layer in config.layers):
        return "its attention has a soft cap"
    return None


def _bytes_per_token(config: ModelConfig, kv: str) -> int:
    row = config.num_kv_heads * config.head_dim * np.dtype(KV_TYPES[kv]).itemsize
    return 2 * config.num_layers * row


def _random_numbers(config: ModelConfig, kv: str, tokens: int, batch: int) -> np.ndarray:
    """Keys or values [B, H_kv, tokens, D], of every sequence the same."""
    random = np.random.default_rng(0)
    shape = (1, config.num_kv_heads, tokens, config.head_dim)
    if kv == "int8":
        numbers = random.integers(-40, 41, shape, np.int8)
    else:
        numbers = random.standard_normal(shape, np.float32).astype(KV_TYPES[kv])
    return np.repeat(numbers, batch, axis=0)


def rotary_tables(config: ModelConfig, tokens: int) -> dict[str, np.ndarray]:
    """The graph's `cos` and `sin` inputs for `tokens` positions."""
    long_rope = config.needs_long_rope(tokens)
    tables: dict[str, np.ndarray] = {}
    for index, rope in enumerate(config.ropes):
        layer = next(i for i, layer in enumerate(config.layers) if layer.attention.rope == index)
        angles = np.outer(np.arange(tokens), config.inv_freq(layer, long_rope=long_rope))
        tables[f"cos.{index}"] = (np.cos(angles) * rope.factor).astype(np.float32)
        tables[f"sin.{index}"] = (np.sin(angles) * rope.factor).astype(np.float32)
    return tables
