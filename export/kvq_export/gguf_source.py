"""A GGUF file as a model to export: its tensors by row, under the names the file has for them.

Owns the parts of a split file and the order of rows in it. What a header says is checked by
`kvq_runtime.gguf_format`; what keys, blocks and tokens mean is in `gguf_config`, `gguf_groups` and
`gguf_tokenizer`.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import CheckpointError
from kvq.reference_linear import BlockFormat, Blocks, Grid
from kvq_export.checkpoint import Checkpoint, read_bytes
from kvq_export.config import WeightFormat
from kvq_export.gguf_config import (
    ROPE_TENSORS,
    GgufShapes,
    Metadata,
    draft_layers,
    read_config,
)
from kvq_export.gguf_groups import (
    GRIDS,
    ROUNDED,
    blocks_of,
    check_type,
    decode,
    holds_exponents,
)
from kvq_export.gguf_model import (
    DealtHeads,
    GgufTensor,
    expert_factors,
    part_names,
    spare_tensors,
    tensors_of,
)
from kvq_export.gguf_tokenizer import read_tokenizer, read_tokens
from kvq_export.source import format_of_file
from kvq_models.config import ModelConfig
from kvq_models.family import Family, WeightSource, is_stack
from kvq_models.tokenizer import TokenizerFiles
from kvq_runtime.gguf_format import GgufContents, Tensor, TensorType, read_gguf

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufRows:
    """One tensor of a file; `start` is its first byte, counted from the file's.

    `interleave` is 0, or the rows of a head whose pairs (i, i + interleave/2) are neighbours in
    the file; they are read apart again. So are columns of heads that were `dealt_columns`, and
    numbers that `decays` made of others: see `GgufTensor`.
    """

    name: str
    file: Path
    kind: TensorType
    shape: tuple[int, ...]
    start: int
    interleave: int = 0
    dealt_columns: DealtHeads | None = None
    decays: bool = False

    def __str__(self) -> str:
        return f"tensor {self.name!r} of {self.file.name}"

    @property
    def dtype(self) -> str:
        """See `Tensor.dtype`."""
        return self.kind.name

    @property
    def grid(self) -> BlockFormat | None:
        """See `Tensor.grid`; a vector is never asked for one, and a block is never cut."""
        grid = GRIDS.get(self.kind.name)
        cut = grid and self.dealt_columns and self.dealt_columns.size % grid.block
        return None if cut else grid

    @property
    def exact(self) -> bool:
        """See `Tensor.exact`."""
        if self.kind.name in ROUNDED:
            return False
        grid = GRIDS.get(self.kind.name)
        if grid is None or grid.grid is not Grid.E2M1:
            return True
        return holds_exponents(self.kind, self._bytes(0, self.shape[0]))

    def parts(self, own: GgufTensor) -> dict[str, "GgufRows"]:
        """By name what is read of it as one matrix, or vector, in the model's own order.

        That is each expert's, and each head's where they were dealt out.
        """
        if _longer_axes(self.shape) != _longer_axes(own.shape):
            return {self.name: self}
        whole = replace(
            self,
            shape=own.shape,
            interleave=own.interleave,
            dealt_columns=own.dealt_columns,
            decays=own.decays,
        )
        if own.experts:
            names, shapes = part_names(self.name, own.experts), [own.shape[1:]] * own.experts
        elif own.dealt is not None and (len(own.shape) > 1 or self.kind.block == 1):
            names = tuple(f"{self.name}.{run.start}" for run in own.rows)
            shapes = [(len(run), *own.shape[1:]) for run in own.rows]
        else:
            return {self.name: whole}
        start, found = self.start, dict[str, GgufRows]()
        for name, shape in zip(names, shapes, strict=True):
            found[name] = replace(whole, name=name, shape=shape, start=start)
            start += math.prod(shape) // self.kind.block * self.kind.block_bytes
        return found

    def check(self) -> None:
        """See `Tensor.check`."""
        check_type(self.kind)

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `Tensor.read`."""
        if len(self.shape) > 1:
            values = decode(self.kind, self._raw(start, stop))
            if self.dealt_columns is not None:
                values = values[:, np.argsort(self.dealt_columns.columns)]
            return values.reshape(-1, *self.shape[1:])
        values = decode(self.kind, self._bytes(0, 1))[0]
        if self.decays:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log(-values)
        return values[self._order(0, len(values))][start:stop]

    def read_blocks(self, start: int, stop: int) -> Blocks:
        """See `Tensor.read_blocks`."""
        blocks = blocks_of(self.kind, self._raw(start, stop))
        if self.dealt_columns is None:
            return blocks
        order = np.argsort(self.dealt_columns.columns)
        block = blocks.codes.shape[1] // blocks.scales.shape[1]
        offsets = blocks.offsets
        groups = order[::block] // block
        return Blocks(
            blocks.codes[:, order],
            blocks.scales[:, groups],
            None if offsets is None else offsets[:, groups],
        )

    def _raw(self, start: int, stop: int) -> np.ndarray:
        """The bytes of rows [start, stop) of the model, uint8 [n, row bytes]; of whole heads."""
        if not self.interleave:
            return self._bytes(start, stop)
        first = start // self.interleave * self.interleave
        last = min(-(-stop // self.interleave) * self.interleave, self.shape[0])
        return self._bytes(first, last)[self._order(first, last)[start - first : stop - first]]

    def _order(self, first: int, last: int) -> np.ndarray:
        """Of rows of whole heads the places in the file, counted from the first."""
        order = np.arange(last - first)
        if not self.interleave:
            return order
        return order.reshape(-1, self.interleave // 2, 2).swapaxes(1, 2).reshape(-1)

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        """Rows of the file as they lie there; a vector is one row."""
        row_bytes = self.shape[-1] // self.kind.block * self.kind.block_bytes
        begin, count = self.start + start * row_bytes, (stop - start) * row_bytes
        return read_bytes(self.file, begin, count, str(self)).reshape(-1, row_bytes)


@dataclass(frozen=True, kw_only=True)
class GgufSource:
    """An opened file, or all files of one that was split; the first has the metadata."""

    parts: tuple[tuple[Path, GgufContents], ...]

    @classmethod
    def open(cls, path: Path) -> "GgufSource":
        """Reads and checks the headers. Raises `CheckpointError` or `UnsupportedModelError`."""
        parts = tuple((part, read_gguf(part)) for part in split_files(path))
        count = parts[0][1].metadata.get("split.count", 1)
        if count not in (0, len(parts)):
            raise CheckpointError(
                f"{path} is one of {count} files of a split model; they are called "
                "NAME-00001-of-00003.gguf and so on: give them their names back"
            )
        return cls(parts=parts)

    @property
    def path(self) -> Path:
        """The first file."""
        return self.parts[0][0]

    @property
    def name(self) -> str:
        """See `Source.name`."""
        found = self.metadata.values.get("general.name")
        return found if isinstance(found, str) and found else self.path.stem

    @property
    def licence(self) -> str:
        """See `Source.licence`."""
        found = self.metadata.values.get("general.license")
        return found if isinstance(found, str) and found else "unknown"

    @cached_property
    def metadata(self) -> Metadata:
        """The keys of the first file."""
        return Metadata(self.path, self.parts[0][1].metadata)

    @cached_property
    def _tokens(self) -> tuple[list[str], np.ndarray]:
        return read_tokens(self.metadata)

    @cached_property
    def _rows(self) -> dict[str, GgufRows]:
        """Every tensor of every file, by its name there."""
        found: dict[str, GgufRows] = {}
        for path, contents in self.parts:
            begin = -(-contents.header_bytes // contents.alignment) * contents.alignment
            for tensor in contents.tensors:
                if tensor.name in found:
                    raise CheckpointError(
                        f"{path} has a tensor {tensor.name}, which another part has too; copy the "
                        "files again"
                    )
                found[tensor.name] = _rows_of(path, tensor, begin)
        return found

    def config(self) -> tuple[Family, ModelConfig, dict[str, Any]]:
        """See `Source.config`."""
        rope = {
            name: self._rows[name].read(0, self._rows[name].shape[0])
            for name in ROPE_TENSORS
            if name in self._rows
        }
        shapes = {name: rows.shape for name, rows in self._rows.items()}
        return read_config(self.metadata, GgufShapes(shapes=shapes, rope=rope), *self._tokens)

    def weight_sources(self, family: Family, config: ModelConfig) -> Mapping[str, WeightSource]:
        """See `Source.weight_sources`. Norms are stored as they multiply: none has an offset."""
        parts: dict[str, list[tuple[str, ...]]] = {}
        for tensor in tensors_of(config, self.metadata.architecture, self._rows):
            parts.setdefault(tensor.source, []).append(tensor.parts)
        factors = {
            f"layers.{layer}.experts_down": expert_factors(layer)
            for layer in range(config.num_layers)
            if expert_factors(layer) in self._rows
        }
        return {
            # Of experts one's matrices after the other's.
            name: replace(
                source,
                parts=tuple(
                    chain(*(zip(*parts[name], strict=True) if is_stack(name) else parts[name]))
                ),
                offset=0.0,
                factors=factors.get(name),
            )
            for name, source in family.weights(config).items()
        }

    def checkpoint(self, config: ModelConfig) -> Checkpoint:
        """See `Source.checkpoint`; the tensors of the rotary table are in the config already.

        Those of a head that guesses further are left out.
        """
        own_tensors = tensors_of(config, self.metadata.architecture, self._rows)
        known = {one.name: one for one in own_tensors}
        spare = {*ROPE_TENSORS, *spare_tensors(config)}
        drafts = tuple(
            f"blk.{config.num_layers + layer}." for layer in range(draft_layers(self.metadata))
        )
        tensors: dict[str, GgufRows] = {}
        for name, rows in self._rows.items():
            own = known.get(name)
            if own is not None:
                tensors |= rows.parts(own)
            elif name not in spare and not name.startswith(drafts):
                tensors[name] = rows
        return Checkpoint(path=self.path, tensors=tensors, described_by="its metadata")

    def tokenizer_files(self) -> TokenizerFiles:
        """See `Source.tokenizer_files`."""
        return read_tokenizer(self.metadata, *self._tokens)

    def weight_format(
        self, checkpoint: Checkpoint, sources: Mapping[str, WeightSource]
    ) -> WeightFormat:
        """See `format_of_file`."""
        return format_of_file(checkpoint, sources)

    def sampling(self) -> Mapping[str, Any]:
        """A GGUF file says none."""
        return {}

    def describe(self) -> dict[str, Any]:
        """See `Source.describe`; the hash is of the headers, which say all but the weights."""
        digest = hashlib.sha256()
        for path, contents in self.parts:
            digest.update(read_bytes(path, 0, contents.header_bytes, str(path)).tobytes())
        return {
            "model": self.name,
            "revision": None,
            "file": self.path.name,
            "config_sha256": digest.hexdigest(),
            "license": self.licence,
        }


def _longer_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without axes of length 1, which some files have and some have not."""
    return tuple(size for size in shape if size != 1)


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` is a part of, in order; itself where it is whole.

    Raises `CheckpointError` naming one that is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match[3])
    files = tuple(
        path.with_name(f"{match[1]}-{part:05d}-of-{match[3]}.gguf") for part in range(1, count + 1)
    )
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None or path not in files:
        raise CheckpointError(
            f"{path} is one of {count} files of a split model, and {(missing or path).name} is "
            "missing beside it; download all of them"
        )
    return files


def _rows_of(path: Path, tensor: Tensor, begin: int) -> GgufRows:
    return GgufRows(
        name=tensor.name,
        file=path,
        kind=tensor.kind,
        shape=tensor.shape,
        start=begin + tensor.offset,
    )
