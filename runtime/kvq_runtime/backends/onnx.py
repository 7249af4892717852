"""ONNX Runtime over a bundle's graph, with our attention op and cache inside. Knows no loop.

One graph, one `InferenceSession`; the state lives in the native cache behind its handle, so no
past or present tensors cross Python.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq import devices, native, native_linear
from kvq.errors import BackendError, BundleError, CacheError, argument
from kvq.residency import Residency, Resident
from kvq_runtime import gpu, huge_pages, tuning
from kvq_runtime.backends import WHOLE, Mode, Pass, SequencePass, bounded_experts
from kvq_runtime.backends.paged import PagedBackend, PagedCache
from kvq_runtime.bundle import Bundle
from kvq_runtime.graph_check import cache_inputs
from kvq_runtime.onnx_runtime import onnx_runtime, onnx_runtime_state

# Threads wait for the next node by spinning, but not for long: never spinning costs a quarter of a
# decode step on an idle machine, spinning without limit burns a core between steps and doubles the
# step when another program runs. A millisecond spans every node of a step.
# Initializers go straight to the device.
SESSION_ENTRIES = {
    "session.intra_op.allow_spinning": "1",
    "session.intra_op.spin_duration_us": "1000",
    "session.use_device_allocator_for_initializers": "1",
}
ONLY_FATAL = 4
# Of a layer in the graph's `layer_modes`.
SKIP, KEYS_AND_VALUES = 1, 2
# Where the best logits of a row decide, a device tells at least so many: drafters learn of them.
FEWEST_BEST = 64
_CPU = "CPUExecutionProvider"


class _Node(Protocol):
    """An input of a graph."""

    name: str


class _InferenceSession(Protocol):
    """What we use of `onnxruntime.InferenceSession`; the package comes without types."""

    def get_inputs(self) -> Sequence[_Node]: ...
    def get_overridable_initializers(self) -> Sequence[_Node]: ...
    def run(
        self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]]
    ) -> list[NDArray[np.float32]]: ...
    def io_binding(self) -> Any: ...
    def run_with_iobinding(self, binding: Any) -> None: ...


class OnnxBackend(PagedBackend):
    """The fast path: quantised weights, native cache, one thread pool for both."""

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
        """`residency`: that of the model whose draft head this is; its experts count there too."""
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
        # Whether the head may rank by half its bytes where only the largest logits matter.
        optional = {node.name for node in self._session.get_overridable_initializers()}
        self.ranks_by_halves = "exact_rows" in optional
        self._has_modes = "layer_modes" in optional
        # Our own products do not mix rows; a graph that has modes has no others. A device shares
        # out pages by how many rows there are.
        self.rows_agree = self._has_modes and device == gpu.PROCESSOR
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
            if not self._has_modes:
                raise BackendError(
                    f"{bundle.path} was exported with {argument('linear', 'ort')}, whose products "
                    f"{device!r} does not run; export it with {argument('linear', 'kvq')}"
                )
            self._maps = {name: held(array, device) for name, array in self._maps.items()}

    @staticmethod
    def missing() -> str | None:
        """Why this backend cannot run here, or None."""
        if find_spec("onnxruntime") is None:
            return "onnxruntime is not installed; pip install onnxruntime"
        return native.why_not() or None

    def check_mode(self, mode: Mode) -> None:
        """See `Backend.check_mode`; ONNX Runtime's own products read whole weights."""
        super().check_mode(mode)
        if mode != WHOLE and not self._has_modes:
            raise BackendError(
                f"{self.bundle.path} was exported with {argument('linear', 'ort')}, whose "
                "products always read "
                f"all weights of all layers; export it with {argument('linear', 'kvq')}"
            )
        if mode.head_tokens and not self._has_head_rows:
            raise BackendError(
                f"{self.bundle.path} has no head of which a part can be computed; export the "
                "model again with this version of kvq"
            )

    def forward(self, one_pass: Pass[PagedCache]) -> list[NDArray[np.float32]]:
        """See `Backend.forward`: one run of the graph, the sequences' rows one after the other."""
        rows, mode, exact_rows = one_pass.rows, one_pass.mode, one_pass.exact_rows
        feeds = _own_rows(rows[0]) if len(rows) == 1 else _joint_rows(rows)
        for index, name in enumerate(self._caches):
            feeds[name] = np.array([own.cache.handles[index] for own in rows], np.int64)
        feeds["sequence_rows"] = np.array([len(own.ids) for own in rows], np.int64)
        if self._has_long_rope:
            feeds["rope_long"] = np.array([one_pass.rope_long], np.int64)
        if self.ranks_by_halves and exact_rows:
            feeds["exact_rows"] = np.array([exact_rows], np.int64)
        if mode != WHOLE:
            feeds |= self._mode_feeds(mode)
        if self._has_states:
            feeds |= _state_feeds(rows)
        try:
            logits = self._run(feeds, rows, exact_rows)
        except _run_errors() as error:
            raise CacheError(f"the model could not be computed: {_told(error)}") from error
        if mode.head_tokens:
            logits = _for_all(logits, self.model.vocab_size)
        wanted = [len(own.wanted) for own in rows]
        if logits.shape != (sum(wanted), self.model.vocab_size):
            raise CacheError(f"the graph gave logits of shape {logits.shape}; export it again")
        return [logits] if len(rows) == 1 else np.split(logits, np.cumsum(wanted)[:-1])

    def _run(
        self, feeds: Mapping[str, Any], rows: Sequence[SequencePass[PagedCache]], exact_rows: int
    ) -> NDArray[np.float32]:
        session = self._session
        if session is None:
            raise BackendError("this model is closed; open it again with Engine.open")
        if self._has_states and any(own.states is not None for own in rows):
            logits, states = session.run(["logits", "states"], feeds)
            _tell_states(rows, states)
            return logits
        if self.device == gpu.PROCESSOR:
            return session.run(["logits"], feeds)[0]
        # Arrays are the host's, values lie on the device, where the logits stay too.
        binding = session.io_binding()
        for name, given in feeds.items():
            on_device = name in self._maps
            binding.bind_ortvalue_input(name, given if on_device else held(given, gpu.PROCESSOR))
        binding.bind_output("logits", memory_kind(self.device), 0)
        session.run_with_iobinding(binding)
        return self._copied(binding.get_outputs()[0], exact_rows)

    def _copied(self, logits: Any, exact_rows: int) -> NDArray[np.float32]:
        """Logits [R, n] on the host; where few decide only these, all others minus infinity."""
        rows, columns = logits.shape()
        count = max(exact_rows, FEWEST_BEST)
        if not rows or not exact_rows or count > min(devices.MOST_BEST, columns // 2):
            whole = logits.numpy()
            self.logit_bytes_copied += whole.nbytes
            return whole
        there = devices.opened(self.device)
        places, values = devices.best(there, logits.data_ptr(), (rows, columns), count)
        self.logit_bytes_copied += places.nbytes + values.nbytes
        whole = np.full((rows, columns), -np.inf, np.float32)
        np.put_along_axis(whole, places, values, axis=1)
        return whole

    def _mode_feeds(self, mode: Mode) -> dict[str, Any]:
        """What the graph is told of how much to read, where that is not all."""
        layers = np.zeros(self.bundle.config.num_layers, np.int64)
        layers[list(mode.skipped)] = SKIP
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
        """See `Backend.resident`."""
        return None if self._residency is None else self._residency.stats()

    def close(self) -> None:
        """See `Backend.close`."""
        super().close()
        self._session = None
        if self._residency is not None:
            self._residency.close()


def _own_rows(own: SequencePass[PagedCache]) -> dict[str, NDArray[Any]]:
    """The graph's inputs about the rows of one sequence alone.

    After a step the weights have passed through every cache of the processor: each line of Python
    not run here is one less to fetch again.
    """
    return {
        "input_ids": own.ids,
        "input_weights": own.weights,
        "position_ids": own.positions,
        "logit_rows": own.wanted,
    }


def _joint_rows(rows: Sequence[SequencePass[PagedCache]]) -> dict[str, NDArray[Any]]:
    """Those of several sequences, one after the other."""
    starts = np.cumsum([0, *(len(own.ids) for own in rows)])
    width = max(own.ids.shape[1] for own in rows)
    wanted = [start + own.wanted for start, own in zip(starts, rows, strict=False)]
    return {
        "input_ids": np.concatenate([_widened(own.ids, width) for own in rows]),
        "input_weights": np.concatenate([_widened(own.weights, width) for own in rows]),
        "position_ids": np.concatenate([own.positions for own in rows]),
        "logit_rows": np.concatenate(wanted),
    }


def _state_feeds(rows: Sequence[SequencePass[PagedCache]]) -> dict[str, NDArray[Any]]:
    """What a graph that tells states is given beside: the rows that are computed to the end.

    Those whose states or logits are wanted; and which of these give logits.
    """
    last, wanted, first, place = list[NDArray[np.int64]](), list[NDArray[np.int64]](), 0, 0
    for own in rows:
        whole = own.states is not None
        last.append(first + (np.arange(len(own.ids), dtype=np.int64) if whole else own.wanted))
        wanted.append(place + (own.wanted if whole else np.arange(len(own.wanted))))
        first, place = first + len(own.ids), place + len(last[-1])
    feeds = {"state_rows": np.concatenate(last), "logit_rows": np.concatenate(wanted)}
    joined = [own.joined for own in rows if own.joined is not None]
    return feeds | ({"joined": np.concatenate(joined)} if joined else {})


def _tell_states(rows: Sequence[SequencePass[PagedCache]], states: NDArray[np.float32]) -> None:
    """Gives each sequence the states of its rows, those of the graph's `state_rows` [N, hidden]."""
    first = 0
    for own in rows:
        count = len(own.wanted) if own.states is None else len(own.ids)
        if own.states is not None:
            own.states[:] = states[first : first + count]
        first += count


def _for_all(logits: NDArray[np.float32], tokens: int) -> NDArray[np.float32]:
    """Logits [R, n] of the first n tokens, as those of all."""
    whole = np.full((len(logits), tokens), -np.inf, np.float32)
    whole[:, : logits.shape[1]] = logits
    return whole


def _widened(table: NDArray[Any], width: int) -> NDArray[Any]:
    """[T, K] with columns of zeros up to `width`: embeddings that weigh nothing."""
    missing = width - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing))) if missing else table


def session_options(threads: int) -> Any:
    """Options every session of ours runs with, `kvq bench`'s peer included."""
    options = onnx_runtime().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ONLY_FATAL
    # A plan of its own for each number of rows is a block of memory beside what passes share
    # already, and was not seen to make any step faster.
    options.enable_mem_pattern = False
    for key, value in SESSION_ENTRIES.items():
        options.add_session_config_entry(key, value)
    return options


def memory_kind(device: str) -> str:
    """What ONNX Runtime calls the memory a device's nodes read; an emulated one's is ours."""
    return device if device == "cuda" else "cpu"


def held(array: NDArray[Any], device: str) -> Any:
    """The array where a device's nodes read it, once and for all passes; ours is not copied."""
    kind = memory_kind(device)
    return onnx_runtime().OrtValue.ortvalue_from_numpy(array, kind, 0)


def open_session(model: bytes | Path, options: Any, device: str) -> Any:
    """ONNX Runtime's session over a graph on a device. Raises what ONNX Runtime does."""
    package = onnx_runtime()
    if device == "cuda":
        package.preload_dlls()  # CUDA's libraries of the wheels that come with it
    # Its fallback is the same provider again, and a banner on stdout.
    return package.InferenceSession(model, options, providers=_providers(device), enable_fallback=0)


def library_path(device: str) -> str:
    """The library with our ops for the device."""
    on_processor = device == gpu.PROCESSOR
    return str(native.library_path() if on_processor else devices.opened(device).library)


def _providers(device: str) -> list[Any]:
    """ONNX Runtime's, best first. Work that our cache queues between passes keeps its order."""
    if device != "cuda":
        return [_CPU]
    stream = str(devices.opened(device).stream)
    return [(gpu.PROVIDER, {"device_id": "0", "user_compute_stream": stream}), _CPU]


def _open(
    bundle: Bundle, threads: int, device: str, residency: Residency | None
) -> _InferenceSession:
    package = onnx_runtime()
    options = session_options(threads)
    if residency is not None:
        options.add_session_config_entry("kvq.residency", str(residency.handle))
    path = bundle.model_path
    try:
        options.register_custom_ops_library(library_path(device))
        return open_session(path, options, device)
    except _load_errors() as error:
        if device == "cuda":
            raise BackendError(
                f"{path} cannot be run on the GPU by onnxruntime {package.__version__}: "
                f"{_told(error)}; if it runs with {argument('device', 'cpu')}, CUDA's libraries "
                f"are missing (cuBLAS, cuDNN, cuFFT, cuRAND): {gpu.INSTALL}"
            ) from error
        raise BundleError(
            f"{path} cannot be loaded by onnxruntime {package.__version__}: {_told(error)}; "
            "export the bundle again with this version of kvq"
        ) from error


def _told(error: Exception) -> str:
    """What ONNX Runtime says; a message that repeats a file's bytes may be no text."""
    if isinstance(error, UnicodeDecodeError):
        return error.object.decode("utf-8", errors="replace")
    return str(error)


def _load_errors() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises for a graph or library it cannot use; they share no base class."""
    state = onnx_runtime_state()
    return (
        *_run_errors(), state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf,
        state.NotImplemented, state.NoSuchFile,
    )  # fmt: skip


def _run_errors() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises when a node fails; a wrong argument of ours is not among them."""
    state = onnx_runtime_state()
    return state.Fail, state.RuntimeException, state.EPFail, UnicodeDecodeError
