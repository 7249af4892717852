"""ONNX Runtime over a bundle's graph, with kvq's attention op and cache inside.

One graph is one `InferenceSession`. The state lives in the native cache behind its handle, so no
past or present tensors pass through Python.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq import devices, native_library, native_linear
from kvq.cache import Cache
from kvq.errors import BackendError, BundleError, CacheError, argument
from kvq.residency import Residency, Resident
from kvq_runtime.backends import WHOLE, Mode, SequencePass, bounded_experts
from kvq_runtime.backends.paged import PagedBackend
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.graph_check import cache_inputs
from kvq_runtime.machine import gpu, huge_pages, tuning
from kvq_runtime.machine.onnx_runtime import onnx_runtime, onnx_runtime_state

# Threads spin while they wait for the next node. Never spinning slows steps down, and spinning
# without limit burns a core between steps and disturbs other programs. A millisecond spans every
# node of a step. Initializers go straight to the device.
SESSION_ENTRIES = {
    "session.intra_op.allow_spinning": "1",
    "session.intra_op.spin_duration_us": "1000",
    "session.use_device_allocator_for_initializers": "1",
}
ONLY_FATAL = 4
# Value of a layer in the graph's `layer_modes`: only its keys and values are made.
KEYS_AND_VALUES = 2
# Where the best logits of a row decide, at least so many are copied, as drafters learn from them.
FEWEST_BEST = 64
_CPU = "CPUExecutionProvider"


class _Node(Protocol):
    """Declares an input of a graph."""

    name: str


class _InferenceSession(Protocol):
    """Declares the part of `onnxruntime.InferenceSession` that is used; it has no types."""

    def get_inputs(self) -> Sequence[_Node]: ...
    def get_overridable_initializers(self) -> Sequence[_Node]: ...
    def run(
        self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]]
    ) -> list[NDArray[np.float32]]: ...
    def io_binding(self) -> Any: ...
    def run_with_iobinding(self, binding: Any) -> None: ...


class OnnxBackend(PagedBackend):
    """Runs quantised weights with the native cache, on one thread pool: the fast backend."""

    name = "onnx"
    cache_kind = "native"

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int,
        device: str = gpu.PROCESSOR,
        weights_budget: int | None = None,
        residency: Residency | None = None,
    ) -> None:
        """Opens the graph on a device.

        `residency` is that of the model whose draft head this is; the head's experts count there
        too.
        """
        reason = self.missing()
        if reason is not None:
            raise BackendError(f"the onnx backend cannot run: {reason}")
        super().__init__(bundle, threads=threads)
        self.device = device
        self.logit_bytes_copied = 0  # from the device to the host
        tuning.apply()
        if weights_budget is not None:
            bounded_experts(bundle, weights_budget)
            residency = Residency(weights_budget)
        self._residency = residency
        before = huge_pages.regions()
        self._session: _InferenceSession | None = _open(bundle, threads, device, self._residency)
        self.paging = huge_pages.advise_since(before)
        self._has_long_rope = "rope_long" in {node.name for node in self._session.get_inputs()}
        self._caches = cache_inputs(len(bundle.config.cache_classes))
        # True: the head may rank by half its bytes where only the largest logits matter.
        optional = {node.name for node in self._session.get_overridable_initializers()}
        self.ranks_by_halves = "exact_rows" in optional
        # Products do not mix rows, but a device splits work by the number of rows.
        self.rows_agree = device == gpu.PROCESSOR
        self._has_head_rows = "head_rows" in optional
        self._has_states = bundle.config.has_states
        self._maps = bundle.maps() if "layers.1.map" in optional else {}
        if device != gpu.PROCESSOR:
            if not bundle.config.uniform:
                raise BackendError(
                    f"layers of a {bundle.config.model_type} model differ in their heads or "
                    f"windows, read others' keys or convolve, which {device!r} has no kernels for; "
                    f"use {argument('device', 'cpu')}"
                )
            self._maps = {name: ort_value(array, device) for name, array in self._maps.items()}

    @staticmethod
    def missing() -> str | None:
        """Returns why this backend cannot run here, or None."""
        if find_spec("onnxruntime") is None:
            return "onnxruntime is not installed; pip install onnxruntime"
        return native_library.why_not() or None

    def check_mode(self, mode: Mode) -> None:
        """Implements `Backend.check_mode`; graphs of earlier versions have no head in part."""
        super().check_mode(mode)
        if mode.head_tokens and not self._has_head_rows:
            raise BackendError(
                f"{self.bundle.path} has no head of which a part can be computed; export the "
                "model again with this version of kvq"
            )

    def forward(
        self, rows: Sequence[SequencePass[Cache]], *, rope_long: bool = False
    ) -> list[NDArray[np.float32]]:
        """Implements `Backend.forward` by one run of the graph over the rows of all sequences."""
        mode = rows[0].mode
        if len(rows) > 1:
            feeds, exact_rows = _joint_feeds(rows), _joint_exact_rows(rows)
        else:
            feeds, exact_rows = _single_feeds(rows[0]), rows[0].exact_rows
        for index, name in enumerate(self._caches):
            feeds[name] = np.array([sequence.cache.handles[index] for sequence in rows], np.int64)
        if self._has_long_rope:
            feeds["rope_long"] = np.array([rope_long], np.int64)
        if self.ranks_by_halves and exact_rows:
            feeds["exact_rows"] = np.array([exact_rows], np.int64)
        if mode is not WHOLE:
            feeds |= self._mode_feeds(mode)
        if self._has_states:
            feeds |= _state_feeds(rows)
        try:
            logits = self._run(feeds, rows, exact_rows)
        except _run_errors() as error:
            raise CacheError(f"the model could not be computed: {_message_of(error)}") from error
        if mode.head_tokens:
            logits = _all_tokens(logits, self.model.vocab_size)
        if logits.shape != (len(feeds["logit_rows"]), self.model.vocab_size):
            raise CacheError(f"the graph gave logits of shape {logits.shape}; export it again")
        return [logits] if len(rows) == 1 else _split(logits, rows)

    def _run(
        self, feeds: Mapping[str, Any], rows: Sequence[SequencePass[Cache]], exact_rows: int
    ) -> NDArray[np.float32]:
        session = self._session
        if session is None:
            raise BackendError("this model is closed; open it again with Engine.open")
        if self._has_states and any(sequence.hidden_states is not None for sequence in rows):
            logits, states = session.run(["logits", "states"], feeds)
            _write_states(rows, states)
            return logits
        if self.device == gpu.PROCESSOR:
            return session.run(["logits"], feeds)[0]
        # Inputs are arrays of the host, or values on the device. The logits stay on the device.
        binding = session.io_binding()
        for name, value in feeds.items():
            on_device = name in self._maps
            binding.bind_ortvalue_input(
                name, value if on_device else ort_value(value, gpu.PROCESSOR)
            )
        binding.bind_output("logits", memory_kind(self.device), 0)
        session.run_with_iobinding(binding)
        return self._copied(binding.get_outputs()[0], exact_rows)

    def _copied(self, logits: Any, exact_rows: int) -> NDArray[np.float32]:
        """Returns the logits [R, n] on the host.

        Where only few decide, only these are copied, and all others are minus infinity.
        """
        rows, columns = logits.shape()
        count = max(exact_rows, FEWEST_BEST)
        if not rows or not exact_rows or count > min(devices.MOST_BEST, columns // 2):
            whole = logits.numpy()
            self.logit_bytes_copied += whole.nbytes
            return whole
        device = devices.opened(self.device)
        places, values = devices.best(device, logits.data_ptr(), (rows, columns), count)
        self.logit_bytes_copied += places.nbytes + values.nbytes
        whole = np.full((rows, columns), -np.inf, np.float32)
        np.put_along_axis(whole, places, values, axis=1)
        return whole

    def _mode_feeds(self, mode: Mode) -> dict[str, Any]:
        """Returns the graph's inputs that say how much to read, where that is not all."""
        layers = np.zeros(self.bundle.config.num_layers, np.int64)
        layers[list(mode.predicted)] = KEYS_AND_VALUES
        view = np.array([native_linear.VIEWS.index(mode.view)], np.int64)
        head = np.array([mode.head_tokens], np.int64)
        return (
            {"layer_modes": layers, "weights_view": view}
            | ({"head_rows": head} if mode.head_tokens else {})
            | (self._maps if mode.fitted else {})
        )

    def _open_draft_head(self, head: Bundle) -> "OnnxBackend":
        return OnnxBackend(head, threads=self.threads, residency=self._residency)

    def resident(self) -> Resident | None:
        """Implements `Backend.resident`."""
        return None if self._residency is None else self._residency.stats()

    def close(self) -> None:
        """Implements `Backend.close`."""
        super().close()
        self._session = None
        if self._residency is not None:
            self._residency.close()


def _single_feeds(sequence: SequencePass[Cache]) -> dict[str, NDArray[Any]]:
    """Returns the graph's inputs for the rows of one sequence alone.

    After a step the weights have passed through every cache of the processor. Each line of Python
    that does not run here is one less to fetch again.
    """
    return {
        "input_ids": sequence.ids,
        "input_weights": sequence.weights,
        "position_ids": sequence.positions,
        "logit_rows": sequence.logit_rows,
        "sequence_rows": np.array([len(sequence.ids)], np.int64),
    }


def _joint_exact_rows(rows: Sequence[SequencePass[Cache]]) -> int:
    """Returns how many of the largest logits serve every sequence, see `SequencePass`."""
    counts = [sequence.exact_rows for sequence in rows if len(sequence.logit_rows)]
    return max(counts) if counts and min(counts) else 0


def _joint_feeds(rows: Sequence[SequencePass[Cache]]) -> dict[str, NDArray[Any]]:
    """Returns the graph's inputs for the rows of several sequences, one after the other."""
    counts = [len(sequence.ids) for sequence in rows]
    starts = np.cumsum([0, *counts])
    width = max(sequence.ids.shape[1] for sequence in rows)
    logit_rows = [
        start + sequence.logit_rows for start, sequence in zip(starts, rows, strict=False)
    ]
    return {
        "input_ids": np.concatenate([_widened(sequence.ids, width) for sequence in rows]),
        "input_weights": np.concatenate([_widened(sequence.weights, width) for sequence in rows]),
        "position_ids": np.concatenate([sequence.positions for sequence in rows]),
        "logit_rows": np.concatenate(logit_rows),
        "sequence_rows": np.array(counts, np.int64),
    }


def _state_feeds(rows: Sequence[SequencePass[Cache]]) -> dict[str, NDArray[Any]]:
    """Returns the additional inputs of a graph that gives hidden states.

    They say which rows are computed to the end (those whose hidden states or logits are asked for),
    and which of these give logits.
    """
    last, logit_rows, first, place = list[NDArray[np.int64]](), list[NDArray[np.int64]](), 0, 0
    for sequence in rows:
        whole = sequence.hidden_states is not None
        last.append(
            first + (np.arange(len(sequence.ids), dtype=np.int64) if whole else sequence.logit_rows)
        )
        logit_rows.append(
            place + (sequence.logit_rows if whole else np.arange(len(sequence.logit_rows)))
        )
        first, place = first + len(sequence.ids), place + len(last[-1])
    feeds = {"state_rows": np.concatenate(last), "logit_rows": np.concatenate(logit_rows)}
    joined = [sequence.joined for sequence in rows if sequence.joined is not None]
    return feeds | ({"joined": np.concatenate(joined)} if joined else {})


def _split(
    logits: NDArray[np.float32], rows: Sequence[SequencePass[Cache]]
) -> list[NDArray[np.float32]]:
    """Returns the logits of each sequence."""
    counts = [len(sequence.logit_rows) for sequence in rows]
    return np.split(logits, np.cumsum(counts)[:-1])


def _write_states(rows: Sequence[SequencePass[Cache]], states: NDArray[np.float32]) -> None:
    """Gives each sequence the hidden states of its rows, from the graph's [N, hidden]."""
    first = 0
    for sequence in rows:
        count = len(sequence.logit_rows) if sequence.hidden_states is None else len(sequence.ids)
        if sequence.hidden_states is not None:
            sequence.hidden_states[:] = states[first : first + count]
        first += count


def _all_tokens(logits: NDArray[np.float32], tokens: int) -> NDArray[np.float32]:
    """Widens logits [R, n] of the first n tokens to all tokens, with minus infinity."""
    whole = np.full((len(logits), tokens), -np.inf, np.float32)
    whole[:, : logits.shape[1]] = logits
    return whole


def _widened(table: NDArray[Any], width: int) -> NDArray[Any]:
    """Widens [T, K] to `width` columns with zeros: embeddings that weigh nothing."""
    missing = width - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing))) if missing else table


def session_options(threads: int) -> Any:
    """Returns the options of every session of kvq, and of its peer in `kvq bench`."""
    options = onnx_runtime().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ONLY_FATAL
    # A memory plan for each number of rows takes a block of memory and makes no step faster.
    options.enable_mem_pattern = False
    for key, value in SESSION_ENTRIES.items():
        options.add_session_config_entry(key, value)
    return options


def memory_kind(device: str) -> str:
    """Returns ONNX Runtime's name of a device's memory; an emulated device uses the host's."""
    return device if device == "cuda" else "cpu"


def ort_value(array: NDArray[Any], device: str) -> Any:
    """Puts an array where a device's nodes read it; on the processor it is not copied."""
    kind = memory_kind(device)
    return onnx_runtime().OrtValue.ortvalue_from_numpy(array, kind, 0)


def open_session(model: bytes | Path, options: Any, device: str) -> Any:
    """Opens ONNX Runtime's session over a graph on a device. Raises what ONNX Runtime raises."""
    package = onnx_runtime()
    if device == "cuda":
        package.preload_dlls()  # the CUDA libraries of its wheels
    # ONNX Runtime's fallback would try the same provider again and print a banner.
    return package.InferenceSession(model, options, providers=_providers(device), enable_fallback=0)


def library_path(device: str) -> str:
    """Returns the path of the library with kvq's ops for the device."""
    on_processor = device == gpu.PROCESSOR
    return str(native_library.library_path() if on_processor else devices.opened(device).library)


def _providers(device: str) -> list[Any]:
    """Returns ONNX Runtime's providers, best first.

    On a GPU they share the stream of kvq's cache, so work that is queued between passes keeps its
    order.
    """
    if device != "cuda":
        return [_CPU]
    stream = str(devices.opened(device).stream)
    return [(gpu.PROVIDER, {"device_id": "0", "user_compute_stream": stream}), _CPU]


def _check_text(path: Path) -> None:
    """Raises `BundleError` for a path that is not text, as ONNX Runtime cannot open it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise BundleError(
            f"{path} cannot be opened by onnxruntime, since the name of a folder in it is not "
            "UTF-8; rename that folder"
        ) from None


def _open(
    bundle: Bundle, threads: int, device: str, residency: Residency | None
) -> _InferenceSession:
    package = onnx_runtime()
    options = session_options(threads)
    if residency is not None:
        options.add_session_config_entry("kvq.residency", str(residency.handle))
    path = bundle.model_path
    _check_text(path)
    try:
        options.register_custom_ops_library(library_path(device))
        return open_session(path, options, device)
    except _load_errors() as error:
        if device == "cuda":
            raise BackendError(
                f"{path} cannot be run on the GPU by onnxruntime {package.__version__}: "
                f"{_message_of(error)}; if it runs with {argument('device', 'cpu')}, CUDA's "
                f"libraries are missing (cuBLAS, cuDNN, cuFFT, cuRAND): {gpu.INSTALL}"
            ) from error
        raise BundleError(
            f"{path} cannot be loaded by onnxruntime {package.__version__}: {_message_of(error)}; "
            "export the bundle again with this version of kvq"
        ) from error


def _message_of(error: Exception) -> str:
    """Returns ONNX Runtime's message; one that repeats a file's bytes may not be UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        return error.object.decode("utf-8", errors="replace")
    return str(error)


def _load_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of ONNX Runtime for a graph or library it cannot use.

    They share no base class.
    """
    state = onnx_runtime_state()
    return (
        *_run_errors(), state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf,
        state.NotImplemented, state.NoSuchFile,
    )  # fmt: skip


def _run_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of ONNX Runtime when a node fails, without that for a wrong argument."""
    state = onnx_runtime_state()
    return state.Fail, state.RuntimeException, state.EPFail, UnicodeDecodeError
