"""Writes a checkpoint as `model.gguf`: at once, or as floats that llama.cpp then quantises.

Owns which type each tensor gets. Keys go through the gguf package, tensors a few rows at a time: as
plain floats, or as ggml's Q8_0, Q4_0 and MXFP4 blocks. The codes and scales of Q8_0 and Q4_0 come
from `weights.quantize`, as a bundle's do; only the scales are rounded, to float16. MXFP4 keeps the
codes and scales of a checkpoint.
"""

import ctypes
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from kvq.errors import BackendError, CheckpointError, argument
from kvq.reference.linear import BlockFormat, Blocks
from kvq_export.config import ExportOptions
from kvq_export.gguf.gguf_groups import GRIDS
from kvq_export.gguf.gguf_model import GgufModel
from kvq_export.gguf.gguf_tensors import GgufTensor
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.write.weights import quantize_chunks, stored_exponents
from kvq_models.family import WeightSource
from kvq_runtime.backends import forward_chain
from kvq_runtime.backends.llama_cpp import LlamaCppBackend
from kvq_runtime.backends.llama_library import library, missing
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.bundle.gguf_format import DEFAULT_ALIGNMENT, TENSOR_TYPES, TensorType
from kvq_runtime.bundle.manifest import GGUF_FILE, GgufInfo
from kvq_runtime.config import SessionRequest

logger = logging.getLogger(__name__)

BLOCK = 32
# What llama.cpp's quantiser makes, a mixture of types.
MIXTURE = "q4_k_m"
TYPES = {kind.name.lower(): kind for kind in TENSOR_TYPES.values()}
_BITS = {"q8_0": 8, "q4_0": 4}
_FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
_PHI3_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}


def gguf_package() -> ModuleType:
    """Returns the gguf package. Raises `BackendError` saying how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise BackendError(
            'writing a GGUF file needs the gguf package: pip install "kvq-runtime[export]"; '
            f"{argument('format', 'onnx')} needs nothing more"
        ) from error
    return gguf


def llama_missing() -> str | None:
    """Returns why llama.cpp cannot be asked, or None."""
    try:
        return missing() or (library() and None)
    except BackendError as error:
        return str(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufExport:
    """Holds what is known of one GGUF file before the first weight is read.

    `vocabulary` are its keys; without one the file takes token ids only.
    """

    model: GgufModel
    checkpoint: Checkpoint
    sources: Mapping[str, WeightSource]
    options: ExportOptions
    vocabulary: Mapping[str, Any] | None
    license: str

    def check(self) -> None:
        """Refuses, before anything is written, what is not installed. Raises `BackendError`."""
        gguf_package()
        if self._requantized and (reason := llama_missing()) is not None:
            raise BackendError(
                f"{argument('gguf_type')} {MIXTURE} is made by llama.cpp's own quantiser, and "
                f"{reason}; {argument('gguf_type')} q8_0, q4_0, f16 and bf16 work without it"
            )
        model = self.model
        if model.config.draft_head is not None:
            logger.warning("the GGUF file is written without the model's draft head")
        if model.context_length < model.config.context_length:
            logger.warning(
                "llama.cpp computes no window of %d tokens for this family: the GGUF file says "
                "%d tokens of context, up to which the window changes nothing",
                max(model.config.windows),
                model.context_length,
            )

    @property
    def disk_bytes(self) -> int:
        """Returns the bytes of disk needed at most, while the floats are still there."""
        tensors = _stored(self.model, self._kinds()).values()
        num_bytes = sum(kind.num_bytes(shape) for shape, kind in tensors)
        return num_bytes * (2 if self._requantized else 1)

    @property
    def info(self) -> GgufInfo:
        """Returns the manifest's entry."""
        return GgufInfo(
            type=self.options.gguf_type,
            architecture=self.model.architecture,
            context_length=self.model.context_length,
        )

    def write(self, folder: Path, name: str, on_tensor: Callable[[str], None]) -> None:
        """Writes `model.gguf` into `folder`. Raises OSError, `BackendError`, `CheckpointError`."""
        kinds, kind, destination = self._kinds(), self.options.gguf_type, folder / GGUF_FILE
        path = folder / "model.float.gguf" if self._requantized else destination
        write_gguf(path, self.model, self._metadata(name), kinds, self._encoded, on_tensor)
        if self._requantized:
            on_tensor(f"quantising to {kind}")
            fixed = [(name, same) for name, same in kinds.items() if same in ("f32", "mxfp4")]
            quantize_file(path, destination, kind, self.options.threads, fixed)
            path.unlink()

    def _metadata(self, name: str) -> dict[str, Any]:
        gguf, kv = gguf_package(), self.options.kv
        vocabulary = self.vocabulary or {"tokenizer.ggml.model": "no_vocab"}
        if not _PHI3_TOKENS.issubset(vocabulary.get("tokenizer.ggml.tokens", ())):
            # llama.cpp sets traits of Phi-3's tokens for any model of that name, and does not load
            # one without them.
            name = re.sub(r"(phi)-?(3)", r"\1 \2", name, flags=re.IGNORECASE)
        return {
            "general.name": name,
            "general.license": self.license,
            "general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{self._written_type.upper()}"]),
            "general.quantization_version": gguf.GGML_QUANT_VERSION,
            "kvq.kv.k_bits": kv.k_bits,
            "kvq.kv.v_bits": kv.v_bits,
            "kvq.kv.sink_tokens": kv.sink_tokens,
            **vocabulary,
        }

    @property
    def _requantized(self) -> bool:
        return self.options.gguf_type == MIXTURE

    @property
    def _written_type(self) -> str:
        """Returns what this code writes: the type asked for, or the checkpoint's own floats."""
        if not self._requantized:
            return self.options.gguf_type
        dtypes = {entry.dtype for entry in self.checkpoint.tensors.values()}
        return "bf16" if "BF16" in dtypes else "f16"

    def _kinds(self) -> dict[str, str]:
        return {tensor.name: self._kind(tensor) for tensor in self.model.tensors}

    def _kind(self, tensor: GgufTensor) -> str:
        source = self.sources[tensor.source]
        if not source.quantised:
            return "f32"
        # Blocks of MXFP4 are kept, whatever type was asked for.
        unscaled = source.scale == tensor.factor == 1 and source.factors is None
        if unscaled and self.checkpoint.format_of(source) == GRIDS["MXFP4"]:
            return "mxfp4"
        kind = self._written_type
        wide = self.options.weights is None or self.options.weights.embedding_bits == 8
        if kind == "q4_0" and wide and tensor.source in ("embed", "head"):
            kind = "q8_0"
        # As llama.cpp falls back where rows are not whole blocks.
        return "f16" if tensor.shape[-1] % TYPES[kind].block else kind

    def _encoded(self, tensor: GgufTensor) -> Iterator[np.ndarray]:
        """Yields a tensor's rows, as arrays whose bytes are the file's."""
        kind, source = self._kind(tensor), self.sources[tensor.source]
        if kind != "mxfp4":
            chunks = (
                tensor.arrange(chunk)
                for rows in tensor.rows
                for chunk in self.checkpoint.chunks(
                    source, rows=rows, multiple=max(1, tensor.interleave)
                )
            )
            yield from encode(kind, chunks, self.options.threads)
            return
        for rows in tensor.rows:
            blocks = self.checkpoint.kept_blocks(source, GRIDS["MXFP4"], rows)
            assert blocks is not None
            yield from map(pack_e2m1, blocks)


def write_gguf(
    path: Path,
    model: GgufModel,
    metadata: Mapping[str, Any],
    kinds: Mapping[str, str],
    encode: Callable[[GgufTensor], Iterator[np.ndarray]],
    on_tensor: Callable[[str], None],
) -> None:
    """Writes `path`. Raises OSError.

    `metadata` are keys beside those of the model. `kinds` has the type of each tensor, and `encode`
    gives its rows, as arrays whose bytes are the file's. `on_tensor` gets the name of a tensor
    after each piece of it.
    """
    gguf = gguf_package()
    writer, tensors = gguf.GGUFWriter(path, model.architecture), _stored(model, kinds)
    named = {f"{model.architecture}.{key}": value for key, value in model.keys.items()}
    add: dict[type, str] = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    all_keys: dict[str, object] = {**metadata, **named}
    for key, value in all_keys.items():
        getattr(writer, f"add_{add.get(type(value), 'array')}")(key, value)
    for name, (shape, kind) in tensors.items():
        raw_dtype = gguf.GGMLQuantizationType[kind.name]
        size = kind.num_bytes(shape)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    # The package writes whole tensors only.
    pieces = {tensor.name: encode(tensor) for tensor in model.tensors}
    pieces |= {name: iter([values]) for name, values in model.rope_factors.items()}
    with path.open("ab") as stream:
        stream.write(bytes(-stream.tell() % DEFAULT_ALIGNMENT))
        for name, (shape, kind) in tensors.items():
            end = stream.tell() + kind.num_bytes(shape)
            for piece in pieces[name]:
                stream.write(np.ascontiguousarray(piece).view(np.uint8).data)
                on_tensor(name)
            assert stream.tell() == end, name
            stream.write(bytes(-end % DEFAULT_ALIGNMENT))


def _stored(
    model: GgufModel, kinds: Mapping[str, str]
) -> dict[str, tuple[tuple[int, ...], TensorType]]:
    """Returns the shape and the type of each tensor in the file."""
    tensors = {row.name: (row.stored_shape, TYPES[kinds[row.name]]) for row in model.tensors}
    factors = {name: (values.shape, TYPES["f32"]) for name, values in model.rope_factors.items()}
    return tensors | factors


def encode(kind: str, chunks: Iterable[np.ndarray], threads: int) -> Iterator[np.ndarray]:
    """Turns float32 row chunks into arrays whose bytes are the file's."""
    if kind in _BITS:
        form = BlockFormat(bits=_BITS[kind], block=BLOCK)
        for blocks in quantize_chunks(((rows, None) for rows in chunks), form, threads):
            yield pack_blocks(blocks, form.bits)
        return
    for chunk in chunks:
        with np.errstate(over="ignore"):
            values = chunk.astype(_FLOATS[kind])
        if kind == "f16" and not np.isfinite(values).all():
            raise _too_large(f"a weight of {np.abs(chunk).max():.3g}")
        yield values


def pack_blocks(blocks: Blocks, bits: int) -> np.ndarray:
    """Packs symmetric blocks of 32 as a float16 scale and codes, uint8 [rows, bytes].

    Raises `CheckpointError` for a scale beyond float16.
    """
    with np.errstate(over="ignore"):
        scales = blocks.scales.astype(np.float16)
    if not np.isfinite(scales).all():
        raise _too_large(f"a block's scale of {np.abs(blocks.scales).max():.3g}")
    codes = blocks.codes.reshape(*scales.shape, BLOCK)
    # Q8_0 is signed, we add 128.
    codes = _pairs(codes) if bits == 4 else codes ^ np.uint8(128)
    return np.concatenate([scales[..., None].view(np.uint8), codes], -1).reshape(len(scales), -1)


def pack_e2m1(blocks: Blocks) -> np.ndarray:
    """Packs the codes that a checkpoint has into blocks of an exponent and codes.

    Returns uint8 [rows, bytes]. Raises `CheckpointError` for scales that are no power of two, or
    too large.
    """
    exponents = stored_exponents(blocks.scales)
    codes = _pairs(blocks.codes.reshape(*exponents.shape, BLOCK))
    return np.concatenate([exponents[..., None], codes], axis=-1).reshape(len(exponents), -1)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Packs codes of four bits, two to a byte: element i of a block with i + 16."""
    half = BLOCK // 2
    return codes[..., :half] | codes[..., half:] << 4


def _too_large(subject: str) -> CheckpointError:
    return CheckpointError(
        f"{subject} does not fit float16; export with {argument('gguf_type', 'bf16')} or "
        f"{argument('format', 'onnx')}"
    )


def quantize_file(
    source: Path, destination: Path, kind: str, threads: int, fixed: Iterable[tuple[str, str]]
) -> None:
    """Requantises a float GGUF file. A tensor whose rows do not fit falls back to another type.

    Tensors named in `fixed` stay of the type they have: else llama.cpp would round gates of a
    delta net. Raises `BackendError` with llama.cpp's words.
    """
    functions = library().functions
    parameters = functions.llama_model_quantize_default_params()
    parameters.ftype = getattr(functions, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    parameters.nthread = threads
    row = functions.llama_model_tensor_override
    rows = [
        row(f"^{re.escape(name)}$".encode(), getattr(functions, f"GGML_TYPE_{same.upper()}"))
        for name, same in fixed
    ]
    # A row without a name ends them.
    parameters.tt_overrides = (row * (len(rows) + 1))(*rows)
    names = str(source).encode(), str(destination).encode()
    if functions.llama_model_quantize(*names, ctypes.byref(parameters)):
        raise BackendError(
            f"llama.cpp could not quantise to {kind}: {library().last_errors()}; make room on the "
            f"disk, or choose {argument('gguf_type', 'q8_0')}"
        )


def file_logits(path: Path, ids: np.ndarray, threads: int) -> np.ndarray:
    """Returns logits float32 [T, V] of `ids` int64 [T] from a GGUF file; the cache is in float16.

    Raises `KvqError` when llama.cpp does not load or run the file.
    """
    count = len(ids)
    request = SessionRequest(k_bits=16, v_bits=16, context_tokens=count, chunk_tokens=count)
    with closing(LlamaCppBackend(GgufFile.open(path).trusted(), threads=threads)) as backend:
        cache = backend.open_cache(backend.session_config(request))
        return forward_chain(backend, cache, ids, np.arange(count))
