"""Reads a model's weights by name, in row chunks, and those of a Hugging Face checkpoint folder.

Owns the refusals of what is missing, of another shape or no part of the model, and the safetensors
format, single or sharded; knows no quantiser. A large embedding never sits in memory as a whole.
Nothing here loads a pickle.
"""

import json
import logging
import math
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kvq.errors import CheckpointError, reason_of
from kvq.json_values import is_array, is_object
from kvq.reference.linear import (
    CODE_BITS,
    E2M1_CODES,
    E2M1_MIDDLE,
    ZERO_PARTS,
    BlockFormat,
    Blocks,
    Grid,
)
from kvq_models.config import MOST_EXPERTS
from kvq_models.family import WeightSource
from kvq_models.keys import read_json

logger = logging.getLogger(__name__)

# The two names of one matrix where a model ties its head to its embedding.
_EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# How names of tensors begin, unless the model was saved without its head.
_PREFIX = "model."
# How names of tensors begin where a language model is part of another, and where it stands alone.
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
_BESIDE_TEXT = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in (
        "vision_tower", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio",
        "visual",
    )
)  # fmt: skip
# Rows that are compared of a head and an embedding that are said to be tied.
_HEAD_ROWS = 32
# Tensors that hold a matrix, or a bias, of each expert, and how many axes they have.
_STACKED = {
    f"{name}{end}": rank
    for name in ("gate_up_proj", "down_proj")
    for end, rank in (("", 3), ("_bias", 2), ("_blocks", 4), ("_scales", 3))
}
MAX_HEADER_BYTES = 100_000_000
# No model has more; a larger number would be multiplied before it is refused.
MAX_DIMENSIONS, MAX_DTYPE_LETTERS = 8, 32
LENGTH_BYTES = 8
FLOAT_DTYPES: dict[str, DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """Stands for one tensor of a file, whose rows are read when they are asked for.

    `dtype` is what the file calls the type of its weights, `grid` the narrowest format of a bundle
    that keeps its codes, if one does.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    grid: BlockFormat | None = None

    def __str__(self) -> str:
        return f"tensor {self.name!r} of {self.file.name}"

    def check(self) -> None:
        """Raises `CheckpointError` or `BackendError` for a type that cannot be read."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns rows [start, stop), float32, perhaps not finite. Raises `CheckpointError`."""
        raise NotImplementedError

    def read_blocks(self, start: int, stop: int) -> Blocks:
        """Returns the same rows on their `grid`, constants in units of the weights."""
        raise AssertionError(f"{self} is on no grid")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry(Tensor):
    """Describes a tensor of a safetensors file, which begins at its byte `start`."""

    start: int

    def check(self) -> None:
        if self.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self} has dtype {self.dtype}; F32, F16 and BF16 are possible. "
                "Export the original checkpoint, not one that is already quantised"
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        values = self.raw(start, stop).view(FLOAT_DTYPES[self.dtype])
        return values.astype(np.float32, copy=False).reshape(stop - start, *self.shape[1:])

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Returns rows [start, stop) as they lie in the file, uint8."""
        row_bytes = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        first, count = self.start + start * row_bytes, (stop - start) * row_bytes
        return read_bytes(self.file, first, count, str(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Holds opened weights: every header is read and checked, no weight is read yet.

    `path` is the folder or file they are in, `described_by` what says which weights there must be.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    described_by: str = "config.json"

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Opens the weights in `folder`.

        Raises `CheckpointError` naming the file for anything missing or inconsistent.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder with config.json")
        tensors: dict[str, Tensor] = {}
        for file, expected in _weight_files(folder).items():
            entries = read_header(file)
            missing = [name for name in expected if name not in entries]
            if missing:
                raise CheckpointError(
                    f"tensor {missing[0]!r} is missing from {file.name}, where the index puts it"
                    f"{_and_more(missing)}; download the file again"
                )
            # The index says which of two tensors of one name is meant.
            tensors = entries | tensors | {name: entries[name] for name in expected}
        tensors = dict(chain.from_iterable(starmap(_experts_of, tensors.items())))
        if _EMBEDDING not in tensors and HEAD in tensors:
            # Some tools save tied weights under the other name alone; where they are not tied,
            # `check` refuses.
            tensors[_EMBEDDING] = tensors[HEAD]
        return cls(path=folder, tensors=tensors)

    def with_prefix(self) -> "Checkpoint":
        """Returns it with the names of a whole model, where it was saved without its head."""
        if _EMBEDDING.removeprefix(_PREFIX) not in self.tensors:
            return self
        return replace(
            self, tensors={f"{_PREFIX}{name}": self.tensors[name] for name in self.tensors}
        )

    def text_part(self) -> "Checkpoint":
        """Returns the language model of one that sees images too, its tensors by its own names.

        Tensors of the other parts are left out, and a line in the log says how many.
        """
        tensors: dict[str, Tensor] = {}
        left_out = 0
        for name, tensor in self.tensors.items():
            if name.startswith(_BESIDE_TEXT):
                left_out += 1
                continue
            prefix = next((start for start in _TEXT_PREFIXES if name.startswith(start)), "")
            text_name = _TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            tensors.setdefault(text_name, tensor)
        if left_out:
            logger.warning("%d tensors for images or sounds are left out: kvq reads text", left_out)
        return replace(self, tensors=tensors)

    def check(
        self, sources: Mapping[str, WeightSource], spare: Collection[str] = frozenset()
    ) -> None:
        """Checks that every part exists in a readable dtype, with the shapes of `sources`.

        Tensors that belong to a layer or to nothing known are refused too, unless they are `spare`:
        leaving out a bias would silently change the model.
        """
        needed = [part for source in sources.values() for part in source.parts]
        factors = {row.factors: len(row.parts) for row in sources.values() if row.factors}
        needed += factors
        missing = [name for name in needed if name not in self.tensors]
        if missing:
            raise CheckpointError(
                f"tensor {missing[0]!r} is missing from {self.path}{_and_more(missing)}; "
                f"the weights are incomplete or do not belong to this {self.described_by}"
            )
        for source in sources.values():
            self._check_shapes(source)
        for name, count in factors.items():
            self._check_shapes(WeightSource(parts=(name,), shape=(count,)))
        if HEAD in needed and self.tensors[_EMBEDDING] is self.tensors[HEAD]:
            raise CheckpointError(
                f"tensor {_EMBEDDING!r} is missing from {self.path}, and config.json does not "
                "tie it to the head (tie_word_embeddings): the weights are incomplete"
            )
        if HEAD not in needed and self._has_other_head():
            raise CheckpointError(
                f"{self.described_by} ties the output head to the embedding, but {self.path} has a "
                f"head of its own ({HEAD}); if it is the model's, set tie_word_embeddings to false"
            )
        known = {*needed, *spare}
        extra = [
            name
            for name, tensor in self.tensors.items()
            if not (name in known or _ignorable(name) or _adds_nothing(name, tensor))
        ]
        if extra:
            raise CheckpointError(
                f"{self.tensors[extra[0]]} is not part of this architecture{_and_more(extra)}; "
                f"exporting without it would change the model, so check {self.described_by}"
            )

    def _has_other_head(self) -> bool:
        """Tells whether there is a head that some rows of the embedding differ from."""
        head, embedding = (self.tensors.get(name) for name in (HEAD, _EMBEDDING))
        if head is None or embedding is None or {head.dtype, embedding.dtype} - {*FLOAT_DTYPES}:
            return False
        if head.shape != embedding.shape:
            return True
        places = np.unique(np.linspace(0, head.shape[0] - 1, _HEAD_ROWS).astype(int)).tolist()
        return any(
            not np.array_equal(head.read(row, row + 1), embedding.read(row, row + 1))
            for row in places
        )

    def chunks(
        self,
        source: WeightSource,
        max_weights: int = 1 << 20,
        rows: range | None = None,
        multiple: int = 1,
    ) -> Iterator[np.ndarray]:
        """Yields float32 row chunks [n, *shape[1:]] of a canonical weight, of about `max_weights`.

        `rows` picks a run of rows. A chunk ends where a part does, else on a `multiple` of rows
        from where it began. Raises `CheckpointError` for a short file, and for NaN or infinite
        weights.
        """
        for tensor, start, stop, scale in self._runs(source, max_weights, rows, multiple):
            values = _finite(tensor, start, tensor.read(start, stop))
            values = values + np.float32(source.offset) if source.offset else values
            yield values * np.float32(scale) if scale != 1 else values

    def kept_blocks(
        self, source: WeightSource, form: BlockFormat, rows: range | None = None
    ) -> Iterator[Blocks] | None:
        """Returns row chunks of a canonical matrix with the file's codes, as `form` keeps them.

        Of `rows` alone, if given. Constants are in units of the weights. Returns None where `form`
        cannot keep a part of the matrix.
        """
        grids = [self.tensors[part].grid for part in source.parts]
        if not all(grid is not None and keeps(form, grid) for grid in grids):
            return None
        return self._kept_blocks(source, form, rows)

    def _kept_blocks(
        self, source: WeightSource, form: BlockFormat, rows: range | None
    ) -> Iterator[Blocks]:
        for tensor, start, stop, scale in self._runs(source, rows=rows):
            blocks = tensor.read_blocks(start, stop)
            _finite(tensor, start, blocks.scales)
            assert tensor.grid is not None
            yield _scaled(_converted(blocks, tensor.grid, form), form.grid, scale)

    def format_of(self, source: WeightSource) -> BlockFormat | None:
        """Returns the narrowest format that keeps all of a canonical matrix as the file has it."""
        grids = [self.tensors[part].grid for part in source.parts]
        known = [grid for grid in grids if grid is not None]
        if len(known) == len(grids) and all(grid.grid.has_supers for grid in known):
            return _joint_super_format(known)
        kinds = {(grid.block, grid.grid is Grid.E2M1) for grid in known}
        if len(known) < len(grids) or len(kinds) > 1:
            return None
        return BlockFormat(
            bits=max(grid.bits for grid in known),
            block=known[0].block,
            grid=max(grid.grid for grid in known),
        )

    def _runs(
        self,
        source: WeightSource,
        max_weights: int = 1 << 20,
        rows: range | None = None,
        multiple: int = 1,
    ) -> Iterator[tuple[Tensor, int, int, float]]:
        """Yields the tensors of a canonical weight, with the rows of every chunk and a scale.

        All numbers of a tensor are multiplied by its scale.
        """
        scales = [source.scale] * len(source.parts)
        if source.factors is not None:
            factors = self.tensors[source.factors]
            values = _finite(factors, 0, factors.read(0, len(scales)))
            scales = (values * np.float32(source.scale)).tolist()
        rows = rows or range(source.shape[0])
        row_weights = math.prod(source.shape[1:])
        step = multiple * max(1, max_weights // max(1, row_weights * multiple))
        first = 0
        for part, scale in zip(source.parts, scales, strict=True):
            tensor = self.tensors[part]
            last = min(rows.stop - first, tensor.shape[0])
            for start in range(max(0, rows.start - first), last, step):
                yield tensor, start, min(start + step, last), scale
            first += tensor.shape[0]

    def read(self, source: WeightSource) -> np.ndarray:
        """Returns a whole canonical weight, float32."""
        out = np.empty(source.shape, np.float32)
        row = 0
        for chunk in self.chunks(source):
            out[row : row + len(chunk)] = chunk
            row += len(chunk)
        return out

    def read_rows(self, source: WeightSource, rows: np.ndarray) -> np.ndarray:
        """Returns float32 rows [n, *shape[1:]] of a canonical weight, by index."""
        out = np.empty((len(rows), *source.shape[1:]), np.float32)
        first = 0
        for part in source.parts:
            entry = self.tensors[part]
            for place in np.flatnonzero((rows >= first) & (rows < first + entry.shape[0])):
                row = int(rows[place]) - first
                out[place] = _finite(entry, row, entry.read(row, row + 1))[0]
            first += entry.shape[0]
        return out

    def _check_shapes(self, source: WeightSource) -> None:
        entries = [self.tensors[part] for part in source.parts]
        for entry in entries:
            entry.check()
        trailing = all(entry.shape[1:] == source.shape[1:] for entry in entries)
        ranks = all(len(entry.shape) == len(source.shape) for entry in entries)
        if not ranks or not trailing or sum(e.shape[0] for e in entries) != source.shape[0]:
            shapes = ", ".join(f"{entry} {list(entry.shape)}" for entry in entries)
            together = " in rows together" if len(entries) > 1 else ""
            raise CheckpointError(
                f"wrong shape: {shapes}; "
                f"{self.described_by} asks for {list(source.shape)}{together}"
            )


def _experts_of(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the matrices of a tensor that has those of all experts, by the experts' numbers."""
    owner, _, suffix = name.rpartition(".")
    stacked = owner.endswith(".experts") and len(tensor.shape) == _STACKED.get(suffix)
    # A file may claim any number of experts that take no bytes.
    if not stacked or tensor.shape[0] > MOST_EXPERTS or not isinstance(tensor, TensorEntry):
        yield name, tensor
        return
    count, *shape = tensor.shape
    matrix_bytes = math.prod(shape) * ITEM_BYTES[tensor.dtype]
    for expert in range(count):
        part, start = f"{owner}.{expert}.{suffix}", tensor.start + expert * matrix_bytes
        yield part, replace(tensor, name=part, shape=tuple(shape), start=start)


def read_bytes(file: Path, start: int, count: int, label: str) -> np.ndarray:
    """Returns bytes [start, start + count) of a file, uint8.

    Raises a `CheckpointError` that begins with `label`.
    """
    try:
        raw = np.fromfile(file, np.uint8, count, offset=start)
    except OSError as error:
        raise CheckpointError(f"{label} cannot be read: {error.strerror}") from error
    if len(raw) < count:
        raise CheckpointError(f"{label} ends early: {file} was cut while it was read")
    return raw


def _finite(tensor: Tensor, start: int, rows: np.ndarray) -> np.ndarray:
    """Returns the rows themselves. Raises `CheckpointError` for NaN or infinite weights in them."""
    if not np.isfinite(rows).all():
        bad = start + int(np.flatnonzero(~np.isfinite(rows).reshape(len(rows), -1).all(1))[0])
        raise CheckpointError(
            f"{tensor} holds NaN or infinite weights (first in row {bad}); "
            "the checkpoint is damaged: download or train it again"
        )
    return rows


# A format that keeps the levels of e2m1, too.
LEVELS = BlockFormat(bits=5, block=32, grid=Grid.SYMMETRIC)


def as_levels(blocks: Blocks) -> Blocks:
    """Returns blocks of e2m1 as `LEVELS`."""
    shift = np.uint8((1 << (LEVELS.bits - 1)) - E2M1_MIDDLE)
    return blocks._replace(codes=E2M1_CODES[blocks.codes] + shift)


def keeps(form: BlockFormat, grid: BlockFormat) -> bool:
    """Tells whether `form` keeps the very weights on `grid`, whose zero points are whole codes."""
    if grid.grid.has_supers or form.grid.has_supers:
        return grid.grid.has_supers and form == _joint_super_format([form, grid])
    if grid.grid is Grid.E2M1 and form.grid is not Grid.E2M1:
        grid = LEVELS
    known = grid.grid is Grid.SYMMETRIC or form.grid is grid.grid
    return form.block == grid.block and form.bits >= grid.bits and known


def _joint_super_format(forms: Sequence[BlockFormat]) -> BlockFormat | None:
    """Returns the narrowest format of super-blocks that keeps weights of all `forms`, or None."""
    grids, block = {form.grid for form in forms}, min(form.block for form in forms)
    grid = grids.pop() if len(grids) == 1 else Grid.SUPER_MINIMUM
    bits = max(form.bits for form in forms)
    joint = (BlockFormat(bits=each, block=block, grid=grid) for each in CODE_BITS if each >= bits)
    return next((form for form in joint if form.possible), None)


def _with_supers(blocks: Blocks, grid: BlockFormat, form: BlockFormat) -> Blocks:
    """Returns the same super-blocks in a format that keeps them."""
    if grid == form:
        return blocks
    if form.grid is Grid.SUPER_SYMMETRIC:
        more = np.uint8((1 << (form.bits - 1)) - (1 << (grid.bits - 1)))
        return blocks._replace(codes=blocks.codes + more)
    assert blocks.sub_scales is not None
    if grid.grid is Grid.SUPER_SYMMETRIC:
        middle = np.float32(1 << (grid.bits - 1))
        return blocks._replace(offsets=-blocks.scales * middle, sub_offsets=blocks.sub_scales)
    numbers = (blocks.sub_scales, blocks.sub_offsets)
    if grid.block != form.block:
        numbers = tuple(
            np.repeat(np.asarray(side).astype(np.int8), grid.block // form.block, axis=1)
            for side in numbers
        )
    return Blocks(*blocks[:3], *numbers)


def _converted(blocks: Blocks, grid: BlockFormat, form: BlockFormat) -> Blocks:
    """Returns the same weights in a format that `keeps` them."""
    if grid.grid.has_supers:
        return _with_supers(blocks, grid, form)
    if grid.grid is Grid.E2M1 and form.grid is not Grid.E2M1:
        grid, blocks = LEVELS, as_levels(blocks)
    if grid.grid in (Grid.MINIMUM, Grid.E2M1):
        return blocks
    if grid.grid is Grid.ZERO_POINT:
        assert blocks.offsets is not None
        # The same code is a smaller part of a wider range.
        parts = blocks.offsets.astype(np.uint8) >> np.uint8(form.bits - grid.bits)
        return blocks._replace(offsets=parts)
    middle = 1 << (grid.bits - 1)
    if form.grid is Grid.MINIMUM:
        return blocks._replace(offsets=-blocks.scales * np.float32(middle))
    codes = blocks.codes + np.uint8((1 << (form.bits - 1)) - middle)
    zeros = np.full(blocks.scales.shape, ZERO_PARTS // 2, np.uint8)
    return Blocks(codes, blocks.scales, zeros if form.grid is Grid.ZERO_POINT else None)


def _scaled(blocks: Blocks, grid: Grid, scale: float) -> Blocks:
    """Multiplies the weights by `scale`, in their constants alone."""
    if scale == 1:
        return blocks
    offsets = blocks.offsets
    if grid.has_minimum and offsets is not None:
        offsets = np.float32(scale) * offsets.astype(np.float32)
    return blocks._replace(scales=blocks.scales * np.float32(scale), offsets=offsets)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Returns the entries of a safetensors file, with every offset checked against its size."""
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} is truncated or not safetensors: its header claims {length} bytes, "
                    f"the file has {file_bytes}; download it again"
                )
            header = json.loads(stream.read(length), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; download the checkpoint again") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged header ({reason_of(error)})") from error
    if not is_object(header):
        raise CheckpointError(f"{file} has a damaged header (not an object)")
    header.pop("__metadata__", None)
    return {
        name: _entry(file, name, row, LENGTH_BYTES + length, file_bytes)
        for name, row in header.items()
    }


def _entry(file: Path, name: str, row: Any, base: int, file_bytes: int) -> TensorEntry:
    # A header may hold a hundred million bytes of anything.
    damaged = CheckpointError(
        f"{file} has a damaged header entry for tensor {name[:200]!r}: {reprlib.repr(row)}"
    )
    try:
        dtype, shape, (start, stop) = row["dtype"], row["shape"], row["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise damaged from None
    numbers = [*shape, start, stop] if is_array(shape) and len(shape) <= MAX_DIMENSIONS else [-1]
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise damaged
    if not isinstance(dtype, str) or len(dtype) > MAX_DTYPE_LETTERS:
        raise damaged
    if base + stop > file_bytes:
        raise CheckpointError(
            f"{file} is truncated: tensor {name!r} ends at byte {base + stop}, "
            f"the file has {file_bytes}; download it again"
        )
    if dtype in ITEM_BYTES and stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise damaged
    return TensorEntry(name=name, file=file, dtype=dtype, shape=tuple(shape), start=base + start)


def _weight_files(folder: Path) -> dict[Path, Sequence[str]]:
    """Returns each safetensors file with the tensors its index promises, if there is one."""
    if (folder / "model.safetensors").exists():
        return {folder / "model.safetensors": ()}
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        hint = (
            f"it has {pickles[0]}, a pickle that can run code, which is never loaded: save the "
            "model with save_pretrained(..., safe_serialization=True) or pick a safetensors copy"
            if pickles
            else "model.safetensors or model.safetensors.index.json is needed"
        )
        raise CheckpointError(f"{folder} has no safetensors weights; {hint}")
    weight_map = read_json(index).get("weight_map")
    if not is_object(weight_map) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    files: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in (".", ".."):
            raise CheckpointError(f"{index} puts tensor {name!r} outside the folder: {shard!r}")
        files.setdefault(folder / shard, []).append(name)
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(
            f"shard {missing[0]} is missing from {folder}{_and_more(missing)}; download it again"
        )
    return dict(files)


def _ignorable(name: str) -> bool:
    """Tells whether nothing needs a tensor: a buffer, the head of a tied model, a draft head."""
    buffer = name.endswith(("rotary_emb.inv_freq", "attn.masked_bias"))
    return buffer or name == HEAD or name.startswith("mtp.")


def _adds_nothing(name: str, tensor: Tensor) -> bool:
    """Tells whether a tensor is a bias of zeros: GPTQ's tools save one for every matrix."""
    vector = name.endswith(".bias") and len(tensor.shape) == 1 and tensor.dtype in FLOAT_DTYPES
    return vector and not tensor.read(0, tensor.shape[0]).any()


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name appears twice")
    return out
