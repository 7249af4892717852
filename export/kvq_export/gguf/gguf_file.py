"""Writes a GGUF file: keys through the gguf package, then the tensors, a few rows at a time.

Encodes them as plain floats, or as ggml's Q8_0, Q4_0 and MXFP4 blocks. The codes and scales of Q8_0
and Q4_0 come from `weights.quantize`, as a bundle's do; only the scales are rounded, to float16.
MXFP4 keeps the codes and scales of a checkpoint.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from kvq.errors import BackendError, CheckpointError, argument
from kvq.reference.linear import BlockFormat, Blocks
from kvq_export.gguf.gguf_model import GgufModel
from kvq_export.gguf.gguf_tensors import GgufTensor
from kvq_export.write.weights import quantize_chunks, stored_exponents
from kvq_runtime.bundle.gguf_format import DEFAULT_ALIGNMENT, TENSOR_TYPES, TensorType

BLOCK = 32
TYPES = {kind.name.lower(): kind for kind in TENSOR_TYPES.values()}
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
    on_tensor: Callable[[str], None],
) -> None:
    """Writes `path`. Raises OSError.

    `metadata` are keys beside those of the model. `kinds` has the type of each tensor, and `encode`
    gives its bytes. `on_tensor` gets the name of a tensor after each piece of it.
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


def tensor_bytes(model: GgufModel, kinds: Mapping[str, str]) -> int:
    """Returns the bytes of the tensors together."""
    return sum(kind.num_bytes(shape) for shape, kind in _stored(model, kinds).values())


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
