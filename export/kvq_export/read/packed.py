"""Reads matrices that were quantised before: GPTQ, AWQ and compressed-tensors.

Owns how these lay out a matrix NAME.weight [out, in] and every check of its tensors; what
config.json says of them is read by `packed_config`. Codes and zero points are fields of 32-bit
words, n = 32 / bits to a word:

    quant_method         codes                      zero points                       scales
    gptq                 qweight [in/n, out]        qzeros [groups, out/n]            [groups, out]
    awq, gemm            qweight [in, out/n]        qzeros [groups, out/n]            [groups, out]
    compressed-tensors   weight_packed [out, in/n]  weight_zero_point [out/n, groups] [out, groups]

The lowest field comes first; awq has eight columns in the fields 0, 4, 1, 5, 2, 6, 3 and 7. A
weight is `scale * (code - zero)` with the scale and the zero point of its column's group, the
middle code where there are no zero points.

A bundle keeps codes and zero points as they are. It also keeps float16 scales below 256, and
bfloat16 scales of 2**-25 to 255; others, of float32 mostly, are rounded to float16. Where columns
were dealt to groups by importance (act-order), or no block divides a group, no format of a bundle
keeps a matrix, and it is read as floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import DTypeLike

from kvq.errors import CheckpointError, reason_of
from kvq.reference.linear import BLOCKS, ZERO_PARTS, BlockFormat, Blocks, Grid
from kvq_export.read.checkpoint import FLOAT_DTYPES, Checkpoint, Tensor, TensorEntry
from kvq_export.read.mxfp4 import unpack_experts
from kvq_export.read.packed_config import Quantization, read_quantization

WORD_BITS = 32
_WHOLE, _FLOATS, _LONG = ("I32",), tuple(FLOAT_DTYPES), ("I64",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Says what a matrix's tensors are called and what their axes are.

    `rows` is the axis of the matrix's rows, `packed` the one along which codes share a word; zero
    points share it along the rows. `places` says in which field of a word each code is.
    """

    codes: str = "qweight"
    scales: str = "scales"
    zeros: str = "qzeros"
    order: str = "g_idx"
    shape: str = ""
    rows: int = 1
    packed: int
    places: tuple[int, ...] = ()

    @property
    def types(self) -> dict[str, tuple[str, ...]]:
        """Returns the types that each tensor of a matrix may have."""
        types = {self.codes: _WHOLE, self.scales: _FLOATS, self.zeros: _WHOLE, self.order: _WHOLE}
        return types | ({self.shape: _LONG} if self.shape else {})

    def shapes(self, shape: tuple[int, int], bits: int, group: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors of a matrix of this shape."""
        (rows, columns), per_word = shape, WORD_BITS // bits
        across, down = (per_word, 1) if self.packed == self.rows else (1, per_word)
        groups, turn = -(-columns // group), -1 if self.rows else 1
        return {
            self.codes: (-(-rows // across), -(-columns // down))[::turn],
            self.scales: (rows, groups)[::turn],
            self.zeros: (-(-rows // per_word), groups)[::turn],
            self.order: (columns,),
            self.shape: (2,),
        }


_PACKINGS: Mapping[str, Packing] = {
    "gptq": Packing(packed=0),
    "awq": Packing(packed=1, places=(0, 4, 1, 5, 2, 6, 3, 7)),
    "compressed-tensors": Packing(
        codes="weight_packed", scales="weight_scale", zeros="weight_zero_point",
        order="weight_g_idx", shape="weight_shape", rows=0, packed=1,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix(Tensor):
    """Reads a matrix [out, in] from several tensors; `group` adjacent columns share a scale.

    Where there is an `order`, it says instead which group each column is in. `lowered`: zero points
    are stored with 1 taken off.
    """

    packing: Packing
    bits: int
    group: int
    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    order: TensorEntry | None
    lowered: bool

    @property
    def middle(self) -> int:
        """Returns the code that stands for zero where there are no zero points."""
        return 1 << (self.bits - 1)

    def read(self, start: int, stop: int) -> np.ndarray:
        groups = self.groups()
        values = self._codes(start, stop).astype(np.float32)
        values -= self.zero_points(start, stop)[:, groups]
        with np.errstate(over="ignore", invalid="ignore"):
            values *= self.row_scales(start, stop)[:, groups]
        return values

    def read_blocks(self, start: int, stop: int) -> Blocks:
        """Returns blocks as `Tensor.read_blocks` does; all blocks of a group have its constants."""
        assert self.grid is not None, f"{self} is on no grid"
        spare = ((0, 0), (0, -self.shape[1] % self.grid.block))
        codes = np.pad(self._codes(start, stop), spare, constant_values=self.middle)
        groups = self.groups()[:: self.grid.block]
        scales = self.row_scales(start, stop)[:, groups]
        if self.grid.grid is Grid.SYMMETRIC:
            return Blocks(codes, scales)
        parts = np.uint8(ZERO_PARTS >> self.bits)
        return Blocks(codes, scales, self.zero_points(start, stop)[:, groups] * parts)

    def groups(self) -> np.ndarray:
        """Returns which group each column is in, intp [in]."""
        if self.order is not None:
            return _mapped(self.order, np.int32).astype(np.intp)
        return np.arange(self.shape[1]) // self.group

    def row_scales(self, start: int, stop: int) -> np.ndarray:
        """Returns the scales of rows [start, stop): float32 [n, groups]."""
        scales = _mapped(self.scales, FLOAT_DTYPES[self.scales.dtype])
        rows = scales[:, start:stop].T if self.packing.rows else scales[start:stop]
        return np.ascontiguousarray(rows).astype(np.float32)

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        """Returns the codes that stand for zero in rows [start, stop): uint8 [n, groups]."""
        if self.zeros is None:
            groups = self.scales.shape[1 - self.packing.rows]
            return np.full((stop - start, groups), self.middle, np.uint8)
        # Taken off a word, not off its fields: below a zero point of 0 the next field lends 1.
        lowered = 0xFFFFFFFF // ((1 << self.bits) - 1) if self.lowered else 0
        return self._fields(self.zeros, self.packing.rows, start, stop, lowered)

    def _codes(self, start: int, stop: int) -> np.ndarray:
        """Returns the codes of rows [start, stop): uint8 [n, in]."""
        return self._fields(self.codes, self.packing.packed, start, stop)[:, : self.shape[1]]

    def _fields(
        self, entry: TensorEntry, packed: int, start: int, stop: int, lowered: int = 0
    ) -> np.ndarray:
        """Returns the fields of rows [start, stop) in words packed along an axis, uint8 [n, N].

        No more is read than the pages of the file that have these rows.
        """
        rows_a_word = WORD_BITS // self.bits if packed == self.packing.rows else 1
        part = slice(start // rows_a_word, -(-stop // rows_a_word))
        mapped = _mapped(entry, np.uint32)
        words = np.ascontiguousarray(mapped[:, part].T if self.packing.rows else mapped[part])
        words = words + np.uint32(lowered)
        places = np.array(self.packing.places or range(WORD_BITS // self.bits), np.uint32)
        fields = words[:, None] >> places[:, None] * np.uint32(self.bits)
        fields = (fields & np.uint32((1 << self.bits) - 1)).astype(np.uint8)
        if rows_a_word == 1:
            return fields.swapaxes(1, 2).reshape(len(words), -1)
        first = part.start * rows_a_word
        return fields.reshape(-1, words.shape[1])[start - first : stop - first]


def unpack(checkpoint: Checkpoint, settings: object) -> Checkpoint:
    """Returns a folder's checkpoint with one tensor NAME.weight for the several of each matrix.

    `settings` is the `quantization_config` of config.json. Raises `UnsupportedModelError` for one
    of another kind, `CheckpointError` for tensors that are missing or do not belong together.
    """
    quantization = read_quantization(settings)
    if quantization.method == "mxfp4":
        return unpack_experts(checkpoint)
    packing = _PACKINGS[quantization.method]
    entries = cast(Mapping[str, TensorEntry], checkpoint.tensors)
    tensors = dict(checkpoint.tensors)
    for codes in [name for name in entries if name.endswith(f".{packing.codes}")]:
        stem = codes.removesuffix(f".{packing.codes}")
        names = {part: f"{stem}.{part}" for part in packing.types}
        parts = {part: entries[name] for part, name in names.items() if name in entries}
        for name in names.values():
            tensors.pop(name, None)
        matrix = _matrix(stem, parts, quantization)
        if matrix.name in tensors:
            raise CheckpointError(
                f"{tensors[matrix.name]} is there as floats, and as {packing.codes} too; "
                "export the original checkpoint"
            )
        tensors[matrix.name] = matrix
    return replace(checkpoint, tensors=tensors)


def _matrix(
    stem: str, parts: Mapping[str, TensorEntry], quantization: Quantization
) -> PackedMatrix:
    """Returns the matrix of the tensors STEM.*, checking that types and shapes fit together."""
    method, packing = quantization.method, _PACKINGS[quantization.method]
    needed = {packing.zeros: quantization.zeros, packing.order: quantization.dealt}
    for part in packing.types:
        if part not in parts and needed.get(part, True):
            raise CheckpointError(
                f"tensor '{stem}.{part}' is missing, without which {method} codes stand for no "
                "weights; download the checkpoint again"
            )
    for scheme in quantization.schemes:
        shape = _shape(parts, packing, scheme.bits)
        group = shape[1] if scheme.group < 0 else scheme.group
        if min(shape) > 0:
            shapes = packing.shapes(shape, scheme.bits, group)
            fits = (
                row.dtype in packing.types[part] and row.shape == shapes[part]
                for part, row in parts.items()
            )
            if all(fits):
                break
    else:
        shapes = ", ".join(f"{part} {row.dtype} {list(row.shape)}" for part, row in parts.items())
        schemes = " or ".join(map(str, quantization.schemes))
        raise CheckpointError(
            f"the tensors of {stem!r} make no {method} matrix of {schemes}, as config.json has it: "
            f"{shapes}. Download the checkpoint again, or export the original one"
        )
    matrix = PackedMatrix(
        name=f"{stem}.weight",
        file=parts[packing.codes].file,
        dtype=f"{method} int{scheme.bits}",
        packing=packing,
        shape=shape,
        bits=scheme.bits,
        group=group,
        codes=parts[packing.codes],
        scales=parts[packing.scales],
        zeros=parts.get(packing.zeros),
        order=parts.get(packing.order),
        lowered=quantization.lowered,
    )
    matrix = replace(matrix, order=None) if _in_order(matrix) else matrix
    return replace(matrix, grid=_grid(matrix))


def _shape(parts: Mapping[str, TensorEntry], packing: Packing, bits: int) -> tuple[int, int]:
    """Returns rows and columns as the tensors have them, (0, 0) where these have other axes."""
    shape = parts.get(packing.shape)
    if shape is not None and (shape.dtype, shape.shape) == ("I64", (2,)):
        rows, columns = _mapped(shape, np.int64).tolist()
        return rows, columns
    codes, scales = parts[packing.codes].shape, parts[packing.scales].shape
    if not len(codes) == len(scales) == 2:
        return 0, 0
    codes_a_word = 1 if packing.packed == packing.rows else WORD_BITS // bits
    return scales[packing.rows], codes[1 - packing.rows] * codes_a_word


def _in_order(matrix: PackedMatrix) -> bool:
    """Tells whether columns lie group by group. Raises `CheckpointError` for one in no group."""
    groups, count = matrix.groups(), matrix.scales.shape[1 - matrix.packing.rows]
    # compressed-tensors stores -1 where there is no order.
    if matrix.order is None or (matrix.packing.shape and (groups == -1).any()):
        return True
    if groups.min() < 0 or groups.max() >= count:
        raise CheckpointError(
            f"{matrix.order} puts columns into groups {groups.min()} to {groups.max()}, and there "
            f"are {count}, counted from 0; download the checkpoint again"
        )
    return np.array_equal(groups, np.arange(matrix.shape[1]) // matrix.group)


def _grid(matrix: PackedMatrix) -> BlockFormat | None:
    """Returns the narrowest format that keeps codes and zero points."""
    block = next((block for block in BLOCKS[::-1] if matrix.group % block == 0), None)
    if block is None and matrix.group >= matrix.shape[1]:
        # Where all of a row shares a scale, it may be cut anywhere.
        block = BlockFormat().block
    if matrix.order is not None or block is None:
        return None
    symmetric = bool((matrix.zero_points(0, matrix.shape[0]) == matrix.middle).all())
    grid = Grid.SYMMETRIC if symmetric else Grid.ZERO_POINT
    return BlockFormat(bits=matrix.bits, block=block, grid=grid)


def _mapped(entry: TensorEntry, dtype: DTypeLike) -> np.ndarray:
    """Maps a tensor where it lies in its file. Raises `CheckpointError`."""
    try:
        return np.memmap(entry.file, dtype, "r", entry.start, entry.shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{entry} cannot be read: {reason_of(error)}") from error
