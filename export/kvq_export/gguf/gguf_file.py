"""Writes a GGUF file: keys through the gguf package, then the tensors, a few rows at a time.

Encodes them as plain floats, or as ggml's Q8_0, Q4_0 and MXFP4 blocks. The codes and scales of Q8_0
and Q4_0 come from `weights.quantize`, as a bundle's do; only the scales are rounded, to float16.
MXFP4 keeps the codes and scales of a checkpoint.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from kvq.errors import BackendError, CheckpointError, argument
from kvq.reference.linear import BlockFormat, Blocks, Grid
from kvq_export.gguf.gguf_model import GgufModel
from kvq_export.gguf.gguf_tensors import GgufTensor
from kvq_export.phases import Progress
from kvq_export.write.weights import quantize_chunks, stored_exponents

ALIGNMENT = 32
BLOCK = 32
# The format of a bundle that keeps MXFP4 as it is.
MXFP4 = BlockFormat(bits=4, block=BLOCK, grid=Grid.E2M1)

_BITS = {"q8_0": 8, "q4_0": 4}
_FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


Encode = Callable[[GgufTensor], Iterator[np.ndarray]]
"""Gives a tensor's rows in order, as arrays whose bytes are the file's."""


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


def write_gguf(
    path: Path,
    model: GgufModel,
    metadata: Mapping[str, Any],
    kinds: Mapping[str, str],
    encode: Encode,
    progress: Progress,
) -> None:
    """Writes `path`. Raises OSError.

    `metadata` are keys beside those of the model. `kinds` has the type of each tensor, and `encode`
    gives its bytes. `progress` gets how many bytes of tensors are written.
    """
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, model.architecture)
    named = {f"{model.architecture}.{key}": value for key, value in model.keys.items()}
    for key, value in {**metadata, **named}.items():
        _add(writer, key, value)
    for tensor in model.tensors:
        kind = kinds[tensor.name]
        writer.add_tensor_info(
            tensor.name,
            tensor.stored_shape,
            np.dtype(np.float32),
            _num_bytes(tensor, kind),
            raw_dtype=gguf.GGMLQuantizationType[kind.upper()],
        )
    for name, values in model.rope_factors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    # The package writes whole tensors only.
    total, done = tensor_bytes(model, kinds), 0
    with path.open("ab") as stream:
        for tensor in model.tensors:
            stream.write(bytes(-stream.tell() % ALIGNMENT))
            start = stream.tell()
            for chunk in encode(tensor):
                stream.write(np.ascontiguousarray(chunk).view(np.uint8).data)
                progress(done + stream.tell() - start, total, tensor.name)
            done += _num_bytes(tensor, kinds[tensor.name])
            assert stream.tell() - start == _num_bytes(tensor, kinds[tensor.name]), tensor.name
        for values in model.rope_factors.values():
            stream.write(bytes(-stream.tell() % ALIGNMENT))
            stream.write(values.data)
        stream.write(bytes(-stream.tell() % ALIGNMENT))


def tensor_bytes(model: GgufModel, kinds: Mapping[str, str]) -> int:
    """Returns the bytes of the tensors together."""
    return sum(_num_bytes(tensor, kinds[tensor.name]) for tensor in model.tensors)


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _num_bytes(tensor: GgufTensor, kind: str) -> int:
    return math.prod(tensor.shape[:-1]) * row_bytes(kind, tensor.shape[-1])


def fitting(kind: str, columns: int) -> str:
    """Returns `kind`, or f16 where `columns` are not whole blocks, as llama.cpp falls back."""
    return "f16" if kind in _BITS and columns % BLOCK else kind


def row_bytes(kind: str, columns: int) -> int:
    """Returns the bytes of one row."""
    if kind in _FLOATS:
        return columns * np.dtype(_FLOATS[kind]).itemsize
    constants = 1 if kind == "mxfp4" else 2
    return columns // BLOCK * (constants + BLOCK * _BITS.get(kind, 4) // 8)


def encode(kind: str, chunks: Iterable[np.ndarray], threads: int) -> Iterator[np.ndarray]:
    """Turns float32 row chunks into arrays whose bytes are the file's."""
    if kind in _BITS:
        form = BlockFormat(bits=_BITS[kind], block=BLOCK)
        for blocks in quantize_chunks(chunks, form, threads):
            yield pack_blocks(blocks.codes, blocks.scales, form.bits)
        return
    for chunk in chunks:
        with np.errstate(over="ignore"):
            values = chunk.astype(_FLOATS[kind])
        if kind == "f16" and not np.isfinite(values).all():
            raise _too_large(f"a weight of {np.abs(chunk).max():.3g}")
        yield values


def pack_blocks(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes and scales of a bundle into blocks of a float16 scale and codes.

    Returns uint8 [rows, bytes]. `codes` is uint8 [rows, columns], one per byte, and `scales`
    float32 [rows, blocks], as `weights.quantize` gives them for any block of 32 or more. Raises
    `CheckpointError` for a scale beyond float16.
    """
    per_block = codes.shape[1] // BLOCK // scales.shape[1]
    largest = np.abs(scales).max(initial=0)
    with np.errstate(over="ignore"):
        scales = np.repeat(scales, per_block, axis=1).astype(np.float16)
    if not np.isfinite(scales).all():
        raise _too_large(f"a block's scale of {largest:.3g}")
    codes = codes.reshape(*scales.shape, BLOCK)
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
