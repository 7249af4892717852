"""How far each engine's quantised KV cache moves its own predictions, and what the cache costs.

    python apps/bench/peer_quality.py CHECKPOINT TEXT --context 2048 --out FOLDER

Every engine runs the checkpoint with weights that its caches share and is compared with itself
holding an unquantised cache, on the same windows of the same text, so that only the cache differs:
the KL divergence over the second half of each window, as `kvq eval --task kld` measures it. All
bytes a cache holds are counted; `COUNTED` says per engine what they are. kvq is measured last, with
fixed widths and once within the bytes of each peer; beside a peer stands how many times the
divergence of that it has. FOLDER keeps the rows of every engine, and a run that finds it goes on.

Engines: kvq pages; transformers' QuantizedCache with Quanto and HQQ, where they are installed,
along both axes; llama.cpp's cache types; ONNX Runtime's GroupQueryAttention with int8 and int4 past
tensors, its static scales calibrated on the very windows that are measured.
"""

import argparse
import importlib.util
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir

from kvq.config import KvPlan
from kvq.errors import BudgetError, KvqError, UsageError
from kvq.files import replace_file
from kvq_apps import output, text_input
from kvq_apps.bench.engine_onnxruntime import rotary_tables
from kvq_apps.bench.gqa_graph import WEIGHT_FOLDER, gqa_model, past_names, present_names
from kvq_apps.evaluation.cache_setting import UNQUANTIZED, CacheSetting
from kvq_apps.evaluation.measurement import Measurement
from kvq_apps.evaluation.sweep_report import ratio_text, standard_error
from kvq_apps.evaluation.text import SCORE_CHUNK_TOKENS, divergence, windows
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_models.config import ModelConfig
from kvq_runtime.backends.onnx import session_options
from kvq_runtime.bundle import Bundle
from kvq_runtime.engine import Engine

Windows = Sequence[Sequence[int]]
Openers = Mapping[str, Callable[[], Any]]
Row = dict[str, Any]

# Groups must be closed at multiples of this many tokens, or Quanto refuses its per-channel axis.
GROUP_TOKENS = 64
# Transformers holds floats in the model's type. The forward pass is float32 here, so that no other
# rounding is measured, but a deployed model has 16 bits: that is what its floats are counted at.
HALF_BYTES = 2
NOTHING_AHEAD: Mapping[str, int] = {}
SHORTEST_CONTEXT = 4 * GROUP_TOKENS

COUNTED = {
    "kvq": "the whole arena for the context, used or not: codes, scales and mids, floating-point "
    "tail and sinks, room for a chunk, page table, statistics, scratch; forms by calibration, "
    "pages of 64",
    "transformers": "packed codes, scales and zero points, and the residual window, floats as 16 "
    "bits; not the whole cache that every step restores to floats; the prompt attends to exact "
    "keys and values",
    "llama.cpp": "the cells it allocates: blocks of 32 codes and one 16-bit scale, along a token",
    "onnxruntime": "past tensors and scales; one cache, not the copy that unshared past and "
    "present need; scales that minimise the squared error on the measured windows themselves",
}


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


# kvq and llama.cpp: sessions of ours


def with_float_activations(bundle: Bundle) -> Bundle:
    """The bundle with matrix products that do not round activations to 8 bits.

    Rounding is deterministic, but turns the least change of the cache into a visible one.
    """
    model = ir.load(bundle.model_path)
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    path = bundle.path / "exact.onnx"
    ir.save(model, path)
    path.replace(bundle.model_path)
    return Bundle.open(bundle.path, verify="size")


def engine_sessions(
    engine: Engine, names: Mapping[str, tuple[int, int]], policy: str | None, context_tokens: int
) -> Openers:
    """Openers of the engine's sessions: the unquantised one first, then those of `names`."""

    def opener(setting: CacheSetting) -> Callable[[], Any]:
        return setting.opener(engine.session, context_tokens)

    openers = {
        name: opener(CacheSetting(k_bits=k_bits, v_bits=v_bits, policy=policy))
        for name, (k_bits, v_bits) in names.items()
    }
    return {"f16": opener(UNQUANTIZED)} | openers


def budget_sessions(engine: Engine, held_bytes: Iterable[float], context_tokens: int) -> Openers:
    """Openers of sessions within so many bytes per token, whatever else they would need."""
    setting = CacheSetting(k_bits=8, v_bits=8, policy="budget")
    return {
        budget_name(held): setting.opener(
            engine.session, context_tokens, int(held * context_tokens)
        )
        for held in sorted(held_bytes, reverse=True)
    }


def budget_name(held_bytes: float) -> str:
    """What the kvq cache within a peer's bytes per token is called."""
    return f"budget, {held_bytes:.0f} bytes"


def allocated_bytes(openers: Openers) -> dict[str, int]:
    """What each cache reserves when it is opened, but for those that are refused."""
    found: dict[str, int] = {}
    for name, open_session in openers.items():
        with suppress(BudgetError), open_session() as session:
            found[name] = session.stats().kv_budget
    return found


KVQ_WIDTHS = ((8, 8), (6, 6), (4, 4), (4, 2), (2, 2))
KVQ_CACHES = {f"K{k}V{v}": (k, v) for k, v in KVQ_WIDTHS}
UNQUANTIZED_CACHES = ("f16", "f32")
LLAMA_CACHES = {"q8_0": (8, 8), "K q8_0, V q4_0": (8, 4), "q4_0": (4, 4)}


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
            out = self._model(tokens, past_key_values=self._cache, use_cache=True)
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
        if not _installed(PACKAGES[backend]):
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


def _installed(package: str) -> bool:
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
    import onnxruntime

    model = gqa_model(ir.load(bundle.model_path), bundle.config)
    if cache is not None:
        model = quantized_gqa(model, bundle.config, cache)
    options = session_options(threads)
    options.add_session_config_entry(WEIGHT_FOLDER, str(bundle.path))
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


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


# The comparison


def compare(
    engine: str,
    openers: Openers,
    texts: Windows,
    config: ModelConfig,
    allocated: Mapping[str, int] = NOTHING_AHEAD,
) -> list[Row]:
    """A row per cache; the first opener is the reference, and a row of its own.

    `allocated` has the bytes of caches that are allocated before the first token.
    """
    progress = output.Progress()
    try:
        outcomes = divergence(
            list(openers.values()),
            next(iter(openers.values())),
            texts,
            lambda done, total: progress(done, total, engine),
        )
    finally:
        progress.clear()
    tokens = len(texts[0])
    numbers = _numbers(config)
    rows = []
    for name, outcome in zip(openers, outcomes, strict=True):
        if isinstance(outcome, BudgetError):
            output.print_note(f"{engine} {name}: {outcome}")
            continue
        held_bytes = allocated.get(name, outcome.kv_bytes)
        columns = _columns(outcome, held_bytes / tokens, numbers)
        rows.append({"engine": engine, "cache": name} | columns)
    return rows


def _numbers(config: ModelConfig) -> int:
    """Of a token's keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def _columns(measured: Measurement, held: float, numbers: int) -> Row:
    """`held` bytes per token of a whole window; `*_next` are of one token more."""
    return {
        "bytes_per_token": held,
        "bits": 8 * held / numbers,
        "bytes_per_token_next": measured.bytes_per_token,
        "bits_next": 8 * measured.bytes_per_token / numbers,
        "kld": measured.value,
        "kld_99": measured.details["kld_99"],
        "same_top_1": measured.details["same_top_1"],
        "perplexity": measured.details["perplexity"],
        "window_nats": measured.details["window_nats"],
    }


HEADER = (
    "engine", "cache", "bits", "next", "KLD", "+-", "KLD 99 %", "top 1", "to kvq within its bytes",
)  # fmt: skip


def print_report(report: Mapping[str, Any]) -> None:
    """What was measured on, the table, and what the bytes are."""
    subject = report["subject"]
    output.print_table(
        (name, subject[name]) for name in ("checkpoint", "text", "context", "windows", "versions")
    )
    output.print_data("")
    kvq = {row["cache"]: row for row in report["rows"] if row["engine"] == "kvq"}
    output.print_table((_cells(row, kvq) for row in report["rows"]), header=HEADER)
    output.print_data("")
    output.print_table(COUNTED.items())


def _cells(row: Row, kvq: Mapping[str, Row]) -> tuple[str, ...]:
    ours = None if row["engine"] == "kvq" else kvq.get(budget_name(row["bytes_per_token"]))
    return (
        row["engine"],
        row["cache"],
        f"{row['bits']:.2f}",
        f"{row['bits_next']:.2f}",
        f"{row['kld']:.6f}",
        f"{standard_error(row['window_nats']):.6f}",
        f"{row['kld_99']:.5f}",
        f"{row['same_top_1']:.2%}",
        "" if ours is None else ratio_text(row["window_nats"], ours["window_nats"]),
    )


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole comparison; `folder` keeps the exported weights and every engine's rows."""
    context_tokens, threads = arguments.context, arguments.threads
    bundle = exported(arguments.checkpoint, folder / "bundle", threads)
    config = bundle.config
    with Engine(bundle, threads=threads, backend="onnx") as engine:
        ids = engine.tokenizer.encode(text_input.read_text(arguments.text))
        start = engine.tokenizer.control.start
        texts = windows(ids, start, context_tokens)[: arguments.windows]
    subject = {
        "checkpoint": arguments.checkpoint,
        "text": arguments.text,
        "context": context_tokens,
        "windows": len(texts),
        "versions": _versions(),
    }
    path = folder / "rows.json"
    report = resumed(path, subject)
    rows = report["rows"]

    def transformers_rows() -> list[Row]:
        openers = transformers_sessions(arguments.checkpoint, threads)
        return compare("transformers", openers, texts, config)

    def llama_rows() -> list[Row]:
        with Engine(bundle, threads=threads, backend="llama.cpp") as engine:
            openers = engine_sessions(engine, LLAMA_CACHES, None, context_tokens)
            return compare("llama.cpp", openers, texts, config, allocated_bytes(openers))

    def onnxruntime_rows() -> list[Row]:
        openers = onnxruntime_sessions(bundle, texts, context_tokens, threads)
        return compare("onnxruntime", openers, texts, config)

    def kvq_rows() -> list[Row]:
        held = {row["bytes_per_token"] for row in rows if row["cache"] not in UNQUANTIZED_CACHES}
        with Engine(bundle, threads=threads, backend="onnx") as engine:
            openers = {
                **engine_sessions(engine, KVQ_CACHES, "uniform", context_tokens),
                **budget_sessions(engine, held, context_tokens),
            }
            return compare("kvq", openers, texts, config, allocated_bytes(openers))

    measurers = {
        "llama.cpp": llama_rows,
        "onnxruntime": onnxruntime_rows,
        "transformers": transformers_rows,
        "kvq": kvq_rows,
    }
    for name, measurer in measurers.items():
        if not any(row["engine"] == name for row in rows):
            rows += measurer()
            with replace_file(path, private=False) as stream:
                stream.write(f"{json.dumps(report, indent=1)}\n".encode())
    return report


def exported(checkpoint: str, path: Path, threads: int) -> Bundle:
    """The weights all engines read: 8 bits for both graphs, f16 for llama.cpp; made once."""
    if path.exists():
        return Bundle.open(path, verify="size")
    output.print_note("exporting the weights: 8 bits for both graphs, f16 for llama.cpp")
    options = ExportOptions(
        weights=WeightFormat(bits=8, block=32, embedding_bits=8, linear="ort"),
        format="both",
        gguf_type="f16",
        kv=KvPlan(k_bits=8, v_bits=8),
        quality=False,
        threads=threads,
    )
    return with_float_activations(export_model(checkpoint, path, options))


def resumed(path: Path, subject: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run measured. Raises `UsageError` where that was something else."""
    if not path.exists():
        return {"subject": dict(subject), "rows": []}
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if report["subject"] != subject:
        raise UsageError(f"{path} holds another comparison: give another --out, or delete it")
    return report


def _versions() -> str:
    names = {
        "transformers": "transformers",
        "optimum.quanto": "optimum-quanto",
        "hqq": "hqq",
        "llama_cpp": "llama-cpp-python",
        "onnxruntime": "onnxruntime",
    }
    found = (f"{name} {version(name)}" for module, name in names.items() if _installed(module))
    return ", ".join(found)


def main() -> int:
    """Runs the comparison, prints it and keeps it; the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("checkpoint", help="Hugging Face folder")
    parser.add_argument("text", help="UTF-8 file the checkpoint was not trained on")
    parser.add_argument("--context", type=int, default=2048, help="tokens per window")
    parser.add_argument("--windows", type=int, default=16, help="how many of them at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="folder for weights and rows, to write or to go on with")
    arguments = parser.parse_args()
    try:
        for name, least in (("context", SHORTEST_CONTEXT), ("windows", 1), ("threads", 1)):
            if getattr(arguments, name) < least:
                raise UsageError(
                    f"--{name} {getattr(arguments, name)} is not possible: give {least} or more"
                )
        with ExitStack() as stack:
            held = arguments.out or stack.enter_context(TemporaryDirectory(prefix="kvq-peers-"))
            report = measure(arguments, Path(held))
    except KvqError as error:
        output.print_note(f"error: {error}")
        return 2
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
