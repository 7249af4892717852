"""Writes `model.onnx` and `model.onnx.data`, weight by weight, hashing as it goes.

Owns the order of the bytes and the progress; where the weights come from is a `WeightReader`: a
checkpoint that is quantised on the way, or random codes in a model's shape. What is in memory is
a few row chunks and the scales of one matrix.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import onnx_ir as ir

from kvq_export.checkpoint import Checkpoint
from kvq_export.graph import build_graph
from kvq_export.layout import Layout, StoredMatrix
from kvq_export.weights import quantize_chunks
from kvq_models.config import ModelConfig, RopeConfig
from kvq_models.family import WeightSource
from kvq_runtime.bundle import (
    DATA_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    FileInfo,
    Manifest,
    WeightInfo,
    file_sha256,
)

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in total and what is being done."""


class WeightReader(Protocol):
    """Gives the values of a layout's weights by canonical name."""

    def vector(self, name: str) -> np.ndarray:
        """A norm or a bias, float32."""
        ...

    def matrix(self, matrix: StoredMatrix) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Row chunks of (codes uint8 [n, blocks, block_bytes], scales float32 [n, blocks])."""
        ...


class CheckpointWeights:
    """Quantises a checkpoint's weights while they are read."""

    def __init__(
        self, checkpoint: Checkpoint, sources: Mapping[str, WeightSource], threads: int
    ) -> None:
        self._checkpoint = checkpoint
        self._sources = sources
        self._threads = threads

    def vector(self, name: str) -> np.ndarray:
        """See `WeightReader.vector`."""
        return self._checkpoint.read(self._sources[name])

    def matrix(self, matrix: StoredMatrix) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `WeightReader.matrix`."""
        chunks = self._checkpoint.chunks(self._sources[matrix.name])
        return quantize_chunks(chunks, matrix.bits, matrix.block, self._threads)


class RandomWeights:
    """Random codes at once, of about the size trained weights have; no quantiser is involved."""

    def __init__(self, sources: Mapping[str, WeightSource], seed: int) -> None:
        self._sources = sources
        self._random = np.random.default_rng(seed)

    def vector(self, name: str) -> np.ndarray:
        """Norms near 1, small biases."""
        centre = 1.0 if name.endswith("norm") else 0.0
        noise = self._random.standard_normal(self._sources[name].shape, np.float32)
        return noise * np.float32(0.02) + np.float32(centre)

    def matrix(self, matrix: StoredMatrix) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Codes uniform over their range, scaled to weights of variance 1 / columns."""
        code_deviation = (1 << matrix.bits) / np.sqrt(12)
        scale = np.float32(1 / (code_deviation * np.sqrt(matrix.columns)))
        step = max(1, (1 << 20) // matrix.columns)
        for start in range(0, matrix.rows, step):
            rows = min(step, matrix.rows - start)
            shape = (rows, matrix.blocks, matrix.block_bytes)
            codes = np.frombuffer(
                self._random.bytes(rows * matrix.blocks * matrix.block_bytes), "u1"
            )
            spread = self._random.uniform(0.5, 1.5, (rows, matrix.blocks)).astype(np.float32)
            yield codes.reshape(shape), spread * scale


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
                data.matrix(name, reader.matrix(layout.matrices[name]))
            else:
                data.tensor(name, reader.vector(name))
        for index, rope in enumerate(config.ropes):
            data.tensor(f"rope.{index}.inv_freq", _frequencies(rope))
    ir.save(build_graph(config, layout), folder / MODEL_FILE)
    model = folder / MODEL_FILE
    return {
        MODEL_FILE: FileInfo(num_bytes=model.stat().st_size, sha256=file_sha256(model)),
        DATA_FILE: FileInfo(num_bytes=data.position, sha256=data.digest.hexdigest()),
    }


def weight_info(layout: Layout) -> WeightInfo:
    """The manifest's entry about the weights."""
    return WeightInfo(
        bits=layout.format.bits,
        block=layout.format.block,
        embedding_bits=layout.format.embedding_bits,
        num_bytes=layout.num_bytes,
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes or rewrites `kvq.json`. Raises OSError."""
    text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n"
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


class _DataStream:
    """The data file while it grows; every byte goes through `_write`, in order."""

    def __init__(self, stream: BinaryIO, layout: Layout, progress: Progress) -> None:
        self._stream = stream
        self._layout = layout
        self._progress = progress
        self.position = 0
        self.digest = hashlib.sha256()

    def matrix(self, name: str, chunks: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
        """Codes as they come, then the scales, which are an eighth of the codes or less."""
        self._seek(f"{name}.codes")
        scales: list[np.ndarray] = []
        for codes, chunk_scales in chunks:
            self._write(codes)
            scales.append(chunk_scales)
            self._progress(self.position, self._layout.num_bytes, name)
        self.tensor(f"{name}.scales", np.concatenate(scales))

    def tensor(self, name: str, values: np.ndarray) -> None:
        """A whole tensor at its place."""
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


def _frequencies(rope: RopeConfig) -> np.ndarray:
    if rope.long_inv_freq is None:
        return np.array(rope.inv_freq, np.float32)
    return np.array([rope.inv_freq, rope.long_inv_freq], np.float32)
