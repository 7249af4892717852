"""Reads a GGUF file as a model to export: its tensors by row, under the names the file has.

Owns the parts of a split file and the order of rows in it. `kvq_runtime.bundle.gguf_format` checks
what a header says; `gguf_config`, `gguf_groups` and `gguf_tokenizer` know what keys, blocks and
tokens mean.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import CheckpointError
from kvq.reference.linear import BlockFormat, Blocks
from kvq_export.gguf.gguf_config import (
    ROPE_TENSORS,
    GgufShapes,
    Metadata,
    draft_layers,
    read_config,
)
from kvq_export.gguf.gguf_groups import CUT_GRIDS, GRIDS, blocks_of, check_type, decode
from kvq_export.gguf.gguf_tensors import (
    DealtHeads,
    GgufTensor,
    expert_factors,
    spare_tensors,
    tensors_of,
)
from kvq_export.gguf.gguf_tokenizer import read_tokenizer, read_tokens
from kvq_export.read.checkpoint import Checkpoint, Tensor, read_bytes
from kvq_export.read.source import Source
from kvq_models.config import ModelConfig
from kvq_models.family import Family, WeightSource
from kvq_models.tokenizer import TokenizerFiles
from kvq_runtime.bundle.gguf_format import GgufContents, TensorType, read_gguf

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufRows(Tensor):
    """Reads one tensor of a file; `start` is its first byte, counted from the file's.

    `interleave` is 0, or the rows of a head whose pairs (i, i + interleave/2) are neighbours in the
    file; they are put back. So are columns of heads that were dealt out (`dealt_columns`), and
    numbers that `decays` made of others: see `GgufTensor`.
    """

    kind: TensorType
    start: int
    interleave: int = 0
    dealt_columns: DealtHeads | None = None
    decays: bool = False

    def parts(self, tensor: GgufTensor) -> dict[str, "GgufRows"]:
        """Returns by name what is read as one matrix, or vector, in the model's own order.

        That is each expert's, and each head's where they were dealt out.
        """
        if _longer_axes(self.shape) != _longer_axes(tensor.shape):
            return {self.name: self}
        whole = replace(
            self,
            shape=tensor.shape,
            grid=grid_of(self.kind, tensor.dealt_columns),
            interleave=tensor.interleave,
            dealt_columns=tensor.dealt_columns,
            decays=tensor.decays,
        )
        is_dealt = tensor.dealt is not None and (len(tensor.shape) > 1 or self.kind.block == 1)
        if not tensor.experts and not is_dealt:
            return {self.name: whole}
        start, parts = self.start, dict[str, GgufRows]()
        for name, rows in tensor.parts.items():
            shape = (len(rows), *tensor.shape[2 if tensor.experts else 1 :])
            parts[name] = replace(whole, name=name, shape=shape, start=start)
            start += self.kind.num_bytes(shape)
        return parts

    def check(self) -> None:
        check_type(self.kind)

    def read(self, start: int, stop: int) -> np.ndarray:
        if len(self.shape) > 1:
            values = decode(self.kind, self._raw(start, stop))
            if self.dealt_columns is not None:
                values = values[:, np.argsort(self.dealt_columns.columns)]
            return values.reshape(-1, *self.shape[1:])
        values = decode(self.kind, self._bytes(0, 1))[0]
        if self.decays:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log(-values)
        return self._heads(values)[start:stop]

    def read_blocks(self, start: int, stop: int) -> Blocks:
        assert self.grid is not None
        blocks = blocks_of(self.kind, self._raw(start, stop), self.grid)
        if self.dealt_columns is None:
            return blocks
        order = np.argsort(self.dealt_columns.columns)

        def moved(numbers: np.ndarray) -> np.ndarray:
            """Orders numbers that stand for so many columns each."""
            width = len(order) // numbers.shape[1]
            return numbers[:, order[::width] // width]

        return blocks.changed(moved)

    def _raw(self, start: int, stop: int) -> np.ndarray:
        """Returns rows [start, stop) of the model, of whole heads, uint8 [n, row bytes]."""
        if not self.interleave:
            return self._bytes(start, stop)
        first = start // self.interleave * self.interleave
        last = min(-(-stop // self.interleave) * self.interleave, self.shape[0])
        return self._heads(self._bytes(first, last))[start - first : stop - first]

    def _heads(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows of whole heads in the model's order."""
        if not self.interleave:
            return rows
        pairs = rows.reshape(-1, self.interleave // 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        """Returns rows of the file as they lie there; a vector is one row."""
        row_bytes = self.kind.num_bytes(self.shape[-1:])
        begin, count = self.start + start * row_bytes, (stop - start) * row_bytes
        return read_bytes(self.file, begin, count, str(self)).reshape(-1, row_bytes)


@dataclass(frozen=True, kw_only=True)
class GgufSource(Source):
    """Reads an opened file, or all files of one that was split; the first has the metadata."""

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
        """Returns the first file."""
        return self.parts[0][0]

    @property
    def name(self) -> str:
        return self._text("general.name") or self.path.stem

    @property
    def licence(self) -> str:
        return self._text("general.license") or "unknown"

    def _text(self, key: str) -> str:
        value = self.metadata.values.get(key)
        return value if isinstance(value, str) else ""

    @cached_property
    def metadata(self) -> Metadata:
        """Returns the keys of the first file."""
        return Metadata(self.path, self.parts[0][1].metadata)

    @cached_property
    def _tokens(self) -> tuple[list[str], np.ndarray]:
        return read_tokens(self.metadata)

    @cached_property
    def _rows(self) -> dict[str, GgufRows]:
        """Returns every tensor of every file, by its name there."""
        rows_by_name: dict[str, GgufRows] = {}
        for path, contents in self.parts:
            begin = -(-contents.header_bytes // contents.alignment) * contents.alignment
            for tensor in contents.tensors:
                if tensor.name in rows_by_name:
                    raise CheckpointError(
                        f"{path} has a tensor {tensor.name}, which another part has too; copy the "
                        "files again"
                    )
                rows_by_name[tensor.name] = GgufRows(
                    name=tensor.name,
                    file=path,
                    dtype=tensor.kind.name,
                    shape=tensor.shape,
                    grid=grid_of(tensor.kind),
                    kind=tensor.kind,
                    start=begin + tensor.offset,
                )
        return rows_by_name

    def config(self) -> tuple[Family, ModelConfig, dict[str, Any]]:
        rope = {
            name: self._rows[name].read(0, self._rows[name].shape[0])
            for name in ROPE_TENSORS
            if name in self._rows
        }
        shapes = {name: rows.shape for name, rows in self._rows.items()}
        return read_config(self.metadata, GgufShapes(shapes=shapes, rope=rope), *self._tokens)

    def weight_sources(self, family: Family, config: ModelConfig) -> Mapping[str, WeightSource]:
        """Returns the tensors of each weight.

        Norms are stored as they multiply: none has an offset.
        """
        parts: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for tensor in tensors_of(config, self.metadata.architecture, self._rows):
            parts[tensor.source] += [(rows.start, name) for name, rows in tensor.parts.items()]
        factors = {
            f"layers.{layer}.experts_down": expert_factors(layer)
            for layer in range(config.num_layers)
            if expert_factors(layer) in self._rows
        }
        return {
            name: replace(
                source,
                parts=tuple(part for _, part in sorted(parts[name])),
                offset=0.0,
                factors=factors.get(name),
            )
            for name, source in family.weights(config).items()
        }

    def checkpoint(self, config: ModelConfig) -> Checkpoint:
        """Opens the tensors without a draft head's, and the rotary table's: the config has it."""
        model_tensors = tensors_of(config, self.metadata.architecture, self._rows)
        known = {tensor.name: tensor for tensor in model_tensors}
        spare = {*ROPE_TENSORS, *spare_tensors(config)}
        first, count = config.num_layers, draft_layers(self.metadata)
        drafts = tuple(f"blk.{layer}." for layer in range(first, first + count))
        tensors: dict[str, GgufRows] = {}
        for name, rows in self._rows.items():
            tensor = known.get(name)
            if tensor is not None:
                tensors |= rows.parts(tensor)
            elif name not in spare and not name.startswith(drafts):
                tensors[name] = rows
        return Checkpoint(path=self.path, tensors=tensors, described_by="its metadata")

    def tokenizer_files(self) -> TokenizerFiles:
        return read_tokenizer(self.metadata, *self._tokens)

    def describe(self) -> dict[str, Any]:
        """Returns the source's entry; the hash is of the headers, which say all but the weights."""
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


def grid_of(kind: TensorType, dealt: DealtHeads | None = None) -> BlockFormat | None:
    """Returns the grid of a matrix whose blocks, or those of `CUT_GRIDS`, are not cut."""
    for grid in (GRIDS.get(kind.name), CUT_GRIDS.get(kind.name)):
        if grid is not None and not (dealt and dealt.size % grid.activation_block):
            return grid
    return None


def _longer_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without axes of length 1, which some files have and some have not."""
    return tuple(size for size in shape if size != 1)


def split_files(path: Path) -> tuple[Path, ...]:
    """Returns all files of the model that `path` is a part of, in order; itself where it is whole.

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
