"""Writes `model.onnx` and `model.onnx.data`, weight by weight, hashing as it goes.

Owns the order of the bytes and the progress. The weights come from a `WeightReader`: a checkpoint
that is quantised on the way, or random codes in a model's shape. In memory are a few row chunks and
the scales of one matrix.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Protocol

import numpy as np
import onnx_ir as ir

from kvq.files import replace_file
from kvq.reference.linear import BLOCKS, PANEL_ROWS, Blocks, Grid, PanelFormat, pack
from kvq_export.phases import Progress
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.write.graph import build_graph
from kvq_export.write.layout import Layout, rope_table
from kvq_export.write.weights import half_scales, quantize_chunks, stored_exponents, whole_panels
from kvq_models.config import ModelConfig
from kvq_models.family import WeightSource
from kvq_runtime.bundle.file_hashes import file_sha256
from kvq_runtime.bundle.manifest import (
    DATA_FILE,
    DRAFT_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    FileInfo,
    Manifest,
    WeightInfo,
)


class WeightReader(Protocol):
    """Gives the values of a layout's weights by canonical name."""

    def vector(self, name: str) -> np.ndarray:
        """Returns a norm or a bias, float32."""
        ...

    def matrix(self, name: str, form: PanelFormat) -> Iterator[Blocks]:
        """Yields row chunks in units of the weights; all but the last are whole panels."""
        ...


class CheckpointWeights:
    """Quantises a checkpoint's weights while they are read; those on our grid pass as they are.

    `importance` of a matrix's columns is float32 [experts, columns], of one that is no stack [1,
    columns]. A matrix without it has columns that matter alike.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Mapping[str, WeightSource],
        threads: int,
        importance: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        self._checkpoint = checkpoint
        self._sources = sources
        self._threads = threads
        self._importance = importance

    def vector(self, name: str) -> np.ndarray:
        return self._checkpoint.read(self._sources[name])

    def matrix(self, name: str, form: PanelFormat) -> Iterator[Blocks]:
        blocks = self._checkpoint.kept_blocks(self._sources[name], form.format)
        if blocks is None:
            blocks = quantize_chunks(self._chunks(name), form.format, self._threads)
        return (Blocks(*rows) for rows in whole_panels(blocks))

    def _chunks(self, name: str) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yields row chunks of a matrix, each with the importance of its columns."""
        source, importance = self._sources[name], self._importance.get(name, (None,))
        height = source.shape[0] // len(importance)
        for expert, weights in enumerate(importance):
            rows = range(expert * height, (expert + 1) * height)
            for chunk in self._checkpoint.chunks(source, rows=rows):
                yield chunk, weights


class RandomWeights:
    """Makes random codes of about the size of trained weights; nothing is quantised.

    `repeated` says how many of a matrix's last rows repeat those before them.
    """

    def __init__(
        self,
        sources: Mapping[str, WeightSource],
        seed: int,
        repeated: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._sources = sources
        self._repeated = repeated
        self._random = np.random.default_rng(seed)

    def vector(self, name: str) -> np.ndarray:
        """Returns numbers near 1 for what multiplies, and near 0 for what is added."""
        centre = 1.0 if name.endswith(("norm", "scalar", "head_scale")) else 0.0
        noise = self._random.standard_normal(self._sources[name].shape, np.float32)
        return noise * np.float32(0.02) + np.float32(centre)

    def matrix(self, name: str, form: PanelFormat) -> Iterator[Blocks]:
        """Yields codes uniform over their range, scaled to weights of variance 1 / columns."""
        code_deviation = (1 << form.bits) / np.sqrt(12)
        scale = np.float32(1 / (code_deviation * np.sqrt(form.columns)))
        step = PANEL_ROWS * max(1, (1 << 20) // form.columns // PANEL_ROWS)
        repeat_start = form.rows - self._repeated.get(name, 0)
        original_start = 2 * repeat_start - form.rows
        state = self._random.bit_generator.state
        for start, rows in _chunks(sorted({0, original_start, repeat_start, form.rows}), step):
            if start == original_start:
                state = self._random.bit_generator.state
            elif start == repeat_start:
                self._random.bit_generator.state = state
            raw = np.frombuffer(self._random.bytes(rows * form.blocks * form.block), np.uint8)
            codes = raw.reshape(rows, -1) >> np.uint8(8 - form.bits)
            spread = self._random.uniform(0.5, 1.5, (rows, form.supers)).astype(np.float32)
            scales, middle = spread * scale, 1 << (form.bits - 1)
            if form.grid.has_supers:
                yield self._super_blocks(form, codes, scales)
                continue
            if form.grid is Grid.E2M1:
                scales = np.exp2(np.rint(np.log2(scales)))
            zeros = np.full(scales.shape, 128, np.uint8)
            offsets = {Grid.ZERO_POINT: zeros, Grid.MINIMUM: -scales * middle}.get(form.grid)
            yield Blocks(codes, scales, offsets)

    def _super_blocks(self, form: PanelFormat, codes: np.ndarray, scales: np.ndarray) -> Blocks:
        """Gives super-blocks numbers of sub-blocks that are about 48."""
        numbers = self._random.integers(32, 64, (len(codes), form.blocks)).astype(np.int8)
        if form.block == BLOCKS[0]:
            numbers = numbers.view(np.uint8)
        scales = scales / np.float32(48)
        if not form.grid.has_minimum:
            return Blocks(codes, scales, sub_scales=numbers)
        return Blocks(codes, scales, -scales * (1 << (form.bits - 1)), numbers, numbers)


def _chunks(bounds: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
    """Yields first row and number of rows of parts of `step` at most, none across a bound."""
    for first, end in pairwise(bounds):
        for start in range(first, end, step):
            yield start, min(step, end - start)


def write_model(
    folder: Path,
    config: ModelConfig,
    layout: Layout,
    reader: WeightReader,
    progress: Progress,
) -> dict[str, FileInfo]:
    """Writes graph and data into `folder`; returns size and hash of both. Raises OSError."""
    with (folder / DATA_FILE).open("wb") as stream:
        data = _DataStream(stream, layout, progress)
        for name in layout.names:
            if name in layout.matrices:
                data.matrix(name, reader.matrix(name, layout.matrices[name]))
            else:
                data.tensor(name, reader.vector(name))
        for index, rope in enumerate(config.ropes):
            data.tensor(f"rope.{index}.inv_freq", rope_table(rope))
    files = {DATA_FILE: FileInfo(num_bytes=data.position, sha256=data.digest.hexdigest())}
    for name, graph_config in ((MODEL_FILE, config), (DRAFT_FILE, config.drafting)):
        if graph_config is not None:
            graph = folder / name
            # onnx-ir gives the type of its `path` only in part.
            ir.save(build_graph(graph_config, layout), graph)  # pyright: ignore[reportUnknownMemberType]
            files[name] = FileInfo(num_bytes=graph.stat().st_size, sha256=file_sha256(graph))
    return files


def weight_info(layout: Layout) -> WeightInfo:
    """Returns the manifest's entry about the weights."""
    return WeightInfo(
        formats={name: matrix.format for name, matrix in layout.matrices.items()},
        num_bytes=layout.num_bytes,
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes or replaces `kvq.json`. Raises OSError."""
    text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n"
    with replace_file(folder / MANIFEST_FILE, private=False) as stream:
        stream.write(text.encode())


class _DataStream:
    """Writes the data file; every byte goes through `_write`, in order."""

    def __init__(self, stream: BinaryIO, layout: Layout, progress: Progress) -> None:
        self._stream = stream
        self._layout = layout
        self._progress = progress
        self.position = 0
        self.digest = hashlib.sha256()

    def matrix(self, name: str, chunks: Iterator[Blocks]) -> None:
        """Writes the rows of one matrix, panel by panel."""
        form = self._layout.matrices[name]
        self._seek(f"{name}.panels")
        for blocks in chunks:
            chunk_form = replace(form, rows=len(blocks.codes))
            self._write(pack(chunk_form, stored_blocks(blocks, form.grid)))
            self._progress(self.position, self._layout.num_bytes, name)

    def tensor(self, name: str, values: np.ndarray) -> None:
        """Writes a whole tensor at its place."""
        tensor = self._layout.tensors[name]
        assert values.shape == tensor.shape, f"{name}: {values.shape} is not {tensor.shape}"
        self._seek(name)
        self._write(values)
        assert self.position == tensor.offset + tensor.num_bytes, f"{name} has a wrong size"
        self._progress(self.position, self._layout.num_bytes, name)

    def _seek(self, name: str) -> None:
        gap = self._layout.tensors[name].offset - self.position
        assert gap >= 0, f"{name} comes too late"
        self._write(np.zeros(gap, np.uint8))

    def _write(self, values: np.ndarray) -> None:
        raw = np.ascontiguousarray(values).data.cast("B") if values.size else b""
        self._stream.write(raw)
        self.digest.update(raw)
        self.position += len(raw)


def stored_blocks(blocks: Blocks, grid: Grid = Grid.SYMMETRIC) -> Blocks:
    """Returns blocks with constants as a panel stores them.

    Raises `CheckpointError` for a constant that is too large.
    """
    if grid is Grid.E2M1:
        return blocks._replace(scales=stored_exponents(blocks.scales))
    offsets = blocks.offsets
    if offsets is not None and offsets.dtype != np.uint8:
        offsets = half_scales(offsets)
    return blocks._replace(scales=half_scales(blocks.scales), offsets=offsets)
