"""The bytes of a GGUF file: its metadata and tensor table, with every count and offset checked.

llama.cpp trusts a file too much, so nothing reaches it before this module has read it. It knows the
format (versions 2 and 3, little-endian), not the meaning of a key.

Layout: magic, uint32 version, uint64 tensors, uint64 keys; for each key its name, type and value;
for each tensor its name, dimensions (the contiguous one first), type and offset; padding; the
tensors.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvq.errors import CheckpointError, UnsupportedModelError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MAX_NAME_BYTES = 1 << 16
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMENSIONS = 4

_PREFIX = struct.Struct("<4sIQQ")
_SCALARS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_UINT32_BYTES, _UINT64_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class TensorType:
    """Describes a ggml type: `block` values take `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a tensor of this type; its rows are whole blocks."""
        return prod(shape) // self.block * self.block_bytes


TENSOR_TYPES: Mapping[int, TensorType] = {
    number: TensorType(*row)
    for number, row in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
        10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
        26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    }.items()
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Holds one row of the table; `shape` is [rows, ..., columns] as numpy writes it."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    offset: int

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of its data."""
        return self.kind.num_bytes(self.shape)


Value = bool | int | float | str | list[bytes] | NDArray[Any]
"""A metadata value: strings alone are text, in arrays the bytes they are in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufContents:
    """Holds what a file says."""

    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    header_bytes: int
    alignment: int
    num_bytes: int


def is_gguf(path: Path | str) -> bool:
    """Decides by its suffix or its first bytes whether `path` is meant as a GGUF file."""
    path = Path(path)
    if path.suffix == SUFFIX or not path.is_file():
        return path.suffix == SUFFIX and not path.is_dir()
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufContents:
    """Reads and checks everything but the tensors' values.

    Raises `UnsupportedModelError` for another version, byte order or type, else `CheckpointError`.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < _PREFIX.size:
                raise CheckpointError(f"{path} is not a GGUF file, or is cut short")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _GgufReader(path, data).contents()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


class _GgufReader:
    """Reads one file from its first byte; every step is checked against the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def contents(self) -> GgufContents:
        magic, version, num_tensors, num_keys = _PREFIX.unpack(self._take(_PREFIX.size))
        if magic != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it begins with {magic!r}")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "a big-endian file" if swapped else f"of version {version}"
            raise UnsupportedModelError(
                f"{self._path} is a GGUF file {why}; kvq reads versions 2 and 3, little-endian: "
                "convert the model again"
            )
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            name = self._name(MAX_NAME_BYTES)
            if name in metadata:
                self._damaged(f"it has two values for {name}")
            metadata[name] = self._value(self._number(_UINT32_BYTES))
        tensors = self._table(num_tensors)
        header_bytes = self._at
        alignment = self._alignment(metadata)
        self._check_data(tensors, header_bytes, alignment)
        return GgufContents(
            version=version,
            metadata=metadata,
            tensors=tensors,
            header_bytes=header_bytes,
            alignment=alignment,
            num_bytes=len(self._data),
        )

    def _table(self, num_tensors: int) -> tuple[TensorInfo, ...]:
        tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            tensor = self._tensor()
            if tensor.name in tensors:
                self._damaged(f"it has two tensors called {tensor.name}")
            tensors[tensor.name] = tensor
        return tuple(tensors.values())

    def _tensor(self) -> TensorInfo:
        name = self._name(MAX_TENSOR_NAME_BYTES)
        num_dimensions = self._number(_UINT32_BYTES)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self._damaged(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number(_UINT64_BYTES) for _ in range(num_dimensions))[::-1]
        number = self._number(_UINT32_BYTES)
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            raise UnsupportedModelError(
                f"{self._path} keeps tensor {name} in type {number}, which kvq does not know; "
                "upgrade kvq-runtime, or quantise the model to a type such as Q4_K or Q8_0"
            )
        if min(shape) < 1 or shape[-1] % kind.block:
            self._damaged(f"tensor {name} of type {kind.name} has shape {shape}")
        return TensorInfo(name=name, shape=shape, kind=kind, offset=self._number(_UINT64_BYTES))

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._damaged(f"its alignment is {alignment}")
        return alignment

    def _check_data(
        self, tensors: tuple[TensorInfo, ...], header_bytes: int, alignment: int
    ) -> None:
        """Checks that every tensor lies in the file, aligned, one after the other."""
        begin = -(-header_bytes // alignment) * alignment
        expected = 0
        for tensor in tensors:
            if tensor.offset != expected:
                self._damaged(f"tensor {tensor.name} is at {tensor.offset}, not at {expected}")
            if begin + tensor.offset + tensor.num_bytes > len(self._data):
                raise CheckpointError(
                    f"{self._path} is truncated: {len(self._data)} bytes, and tensor "
                    f"{tensor.name} ends at {begin + tensor.offset + tensor.num_bytes}; copy the "
                    "file again"
                )
            expected += -(-tensor.num_bytes // alignment) * alignment

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string().decode("utf-8", errors="replace")
        if kind == _ARRAY:
            return self._array(self._number(_UINT32_BYTES), self._number(_UINT64_BYTES))
        return self._numbers(kind, 1)[0].item()

    def _array(self, kind: int, count: int) -> list[bytes] | NDArray[Any]:
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            self._damaged(f"it uses value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind == _BOOL and values.view(np.uint8).max(initial=0) > 1:
            self._damaged("it has a truth value that is neither")
        return values

    def _name(self, max_bytes: int) -> str:
        name = self._string()
        if not 1 <= len(name) <= max_bytes or b"\0" in name:
            self._damaged(f"it has a name of {len(name)} bytes")
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError:
            self._damaged("it has a name that is not UTF-8")

    def _string(self) -> bytes:
        return self._take(self._number(_UINT64_BYTES))

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _damaged(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._path} is damaged: {reason}; copy or convert the model again")

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated or damaged: its header asks for byte {end} of "
                f"{len(self._data)}; copy the file again"
            )
        chunk = self._data[self._at : end]
        self._at = end
        return chunk
