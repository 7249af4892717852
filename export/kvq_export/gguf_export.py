"""A checkpoint as `model.gguf`: written at once, or as floats that llama.cpp then quantises.

Owns which type each tensor gets. Knows no manifest.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvq.errors import BackendError, argument
from kvq.reference_linear import Blocks
from kvq_export.checkpoint import Checkpoint
from kvq_export.config import ExportOptions
from kvq_export.gguf_blocks import MXFP4, Kind, StoredKind, pack_e2m1
from kvq_export.gguf_file import GgufHeader, gguf_package, tensor_bytes, write_gguf
from kvq_export.gguf_llama import FILE_TYPES, llama_missing, quantize_file
from kvq_export.gguf_model import GgufModel, GgufTensor
from kvq_export.gguf_vocabulary import Vocabulary
from kvq_export.writer import Progress
from kvq_models.family import WeightSource
from kvq_runtime.manifest import GGUF_FILE, GgufInfo

logger = logging.getLogger(__name__)

FLOAT_FILE = "model.float.gguf"


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufExport:
    """One GGUF file to be: everything known before the first weight is read."""

    model: GgufModel
    checkpoint: Checkpoint
    sources: Mapping[str, WeightSource]
    options: ExportOptions
    vocabulary: Vocabulary | None
    license: str

    def check(self) -> None:
        """Refuses, before anything is written, what is not installed. Raises `BackendError`."""
        gguf_package()
        missing = llama_missing() if self._requantized else None
        if missing is not None:
            raise BackendError(
                f"{argument('gguf_type')} {self.options.gguf_type} is made by llama.cpp's own "
                "quantiser, and "
                f"{missing}; {argument('gguf_type')} q8_0, q4_0, f16 and bf16 work without it"
            )
        if self.model.config.draft_head is not None:
            logger.warning("the GGUF file is written without the model's draft head")
        if self.model.context_length < self.model.config.context_length:
            logger.warning(
                "llama.cpp computes no window of %d tokens for this family: the GGUF file says "
                "%d tokens of context, up to which the window changes nothing",
                self.model.window_tokens,
                self.model.context_length,
            )
        if self.model.rope.rounded:
            logger.warning(
                "llama.cpp computes YaRN's table of this family with whole pairs where its ramp "
                "begins and ends: answers from the GGUF file are a little different"
            )

    @property
    def written_bytes(self) -> int:
        """Bytes of tensors that `write` writes, and reports as progress."""
        return tensor_bytes(self.model, self._kinds())

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk needed at most, while the floats are still there."""
        return 2 * self.written_bytes if self._requantized else self.written_bytes

    @property
    def info(self) -> GgufInfo:
        """The manifest's entry."""
        return GgufInfo(
            type=self.options.gguf_type,
            architecture=self.model.architecture,
            context_length=self.model.context_length,
        )

    def write(self, folder: Path, name: str, progress: Progress) -> None:
        """Writes `model.gguf` into `folder`. Raises OSError, `BackendError`, `CheckpointError`."""
        kinds = self._kinds()
        path = folder / (FLOAT_FILE if self._requantized else GGUF_FILE)
        header = GgufHeader(
            name=name,
            file_type=f"MOSTLY_{self._written_type.upper()}",
            license=self.license,
            vocabulary=self.vocabulary,
            kv=self.options.kv,
        )
        write_gguf(
            path,
            self.model,
            kinds,
            lambda tensor: self._encoded(tensor, kinds[tensor.name]),
            header,
            progress,
        )
        if self._requantized:
            total = tensor_bytes(self.model, kinds)
            progress(total, total, f"quantising to {self.options.gguf_type}")
            quantize_file(
                path,
                folder / GGUF_FILE,
                self.options.gguf_type,
                self.options.threads,
                kept={
                    name: kind.kind for name, kind in kinds.items() if kind.kind in ("f32", "mxfp4")
                },
            )
            path.unlink()

    @property
    def _requantized(self) -> bool:
        return self.options.gguf_type in FILE_TYPES

    @property
    def _written_type(self) -> Kind:
        """What this code writes: the type asked for, or the checkpoint's own floats."""
        if not self._requantized:
            return self.options.gguf_type  # type: ignore[return-value]
        dtypes = {entry.dtype for entry in self.checkpoint.tensors.values()}
        return "bf16" if "BF16" in dtypes else "f16"

    def _kinds(self) -> dict[str, StoredKind]:
        return {tensor.name: self._kind(tensor) for tensor in self.model.tensors}

    def _kind(self, tensor: GgufTensor) -> StoredKind:
        source = self.sources[tensor.source]
        if not source.quantised:
            return StoredKind(kind="f32")
        # Whatever was asked for: what is in these blocks is there to be kept.
        unscaled = source.scale == tensor.factor == 1 and source.factors is None
        if unscaled and self.checkpoint.format_of(source) == MXFP4:
            return StoredKind(kind="mxfp4")
        kind = self._written_type
        wide = self.options.weights is None or self.options.weights.embedding_bits == 8
        if kind == "q4_0" and wide and tensor.source in ("embed", "head"):
            kind = "q8_0"
        return StoredKind.fitting(kind, tensor.shape[-1])

    def _encoded(self, tensor: GgufTensor, kind: StoredKind) -> Iterator[np.ndarray]:
        """Its rows, as arrays whose bytes are the file's."""
        if kind.kind == "mxfp4":
            return map(pack_e2m1, self._stored(tensor))
        return kind.encode(self._chunks(tensor), self.options.threads)

    def _stored(self, tensor: GgufTensor) -> Iterator[Blocks]:
        for rows in tensor.rows:
            blocks = self.checkpoint.stored(self.sources[tensor.source], MXFP4, rows)
            assert blocks is not None
            yield from blocks

    def _chunks(self, tensor: GgufTensor) -> Iterator[np.ndarray]:
        source = self.sources[tensor.source]
        multiple = max(1, tensor.interleave)
        for rows in tensor.rows:
            for chunk in self.checkpoint.chunks(source, rows=rows, multiple=multiple):
                yield tensor.arrange(chunk)
