"""Writes a checkpoint as `model.gguf`: at once, or as floats that llama.cpp then quantises.

Owns which type each tensor gets. Knows no manifest.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import BackendError, argument
from kvq_export.config import ExportOptions
from kvq_export.gguf.gguf_file import (
    TYPES,
    encode,
    gguf_package,
    pack_e2m1,
    tensor_bytes,
    write_gguf,
)
from kvq_export.gguf.gguf_groups import GRIDS
from kvq_export.gguf.gguf_llama import FILE_TYPES, llama_missing, quantize_file
from kvq_export.gguf.gguf_model import GgufModel
from kvq_export.gguf.gguf_tensors import GgufTensor
from kvq_export.read.checkpoint import Checkpoint
from kvq_models.family import WeightSource
from kvq_runtime.bundle.manifest import GGUF_FILE, GgufInfo

logger = logging.getLogger(__name__)

FLOAT_FILE = "model.float.gguf"
_PHI3_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufExport:
    """Holds what is known of one GGUF file before the first weight is read.

    `vocabulary` are its keys; without one the file takes token ids only.
    """

    model: GgufModel
    checkpoint: Checkpoint
    sources: Mapping[str, WeightSource]
    options: ExportOptions
    vocabulary: Mapping[str, Any] | None
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
        model = self.model
        if model.config.draft_head is not None:
            logger.warning("the GGUF file is written without the model's draft head")
        if model.context_length < model.config.context_length:
            logger.warning(
                "llama.cpp computes no window of %d tokens for this family: the GGUF file says "
                "%d tokens of context, up to which the window changes nothing",
                max(model.config.windows),
                model.context_length,
            )
        if model.rope_differs:
            logger.warning(
                "llama.cpp computes YaRN's table of this family with whole pairs where its ramp "
                "begins and ends: answers from the GGUF file are a little different"
            )

    @property
    def disk_bytes(self) -> int:
        """Returns the bytes of disk needed at most, while the floats are still there."""
        return tensor_bytes(self.model, self._kinds()) * (2 if self._requantized else 1)

    @property
    def info(self) -> GgufInfo:
        """Returns the manifest's entry."""
        return GgufInfo(
            type=self.options.gguf_type,
            architecture=self.model.architecture,
            context_length=self.model.context_length,
        )

    def write(self, folder: Path, name: str, on_tensor: Callable[[str], None]) -> None:
        """Writes `model.gguf` into `folder`. Raises OSError, `BackendError`, `CheckpointError`."""
        kinds, kind, destination = self._kinds(), self.options.gguf_type, folder / GGUF_FILE
        path = folder / FLOAT_FILE if self._requantized else destination
        write_gguf(path, self.model, self._metadata(name), kinds, self._encoded, on_tensor)
        if self._requantized:
            on_tensor(f"quantising to {kind}")
            fixed = [(name, same) for name, same in kinds.items() if same in ("f32", "mxfp4")]
            quantize_file(path, destination, kind, self.options.threads, fixed)
            path.unlink()

    def _metadata(self, name: str) -> dict[str, Any]:
        gguf, kv = gguf_package(), self.options.kv
        vocabulary = self.vocabulary or {"tokenizer.ggml.model": "no_vocab"}
        if not _PHI3_TOKENS.issubset(vocabulary.get("tokenizer.ggml.tokens", ())):
            # llama.cpp sets traits of Phi-3's tokens for any model of that name, and does not load
            # one without them.
            name = re.sub(r"(phi)-?(3)", r"\1 \2", name, flags=re.IGNORECASE)
        return {
            "general.name": name,
            "general.license": self.license,
            "general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{self._written_type.upper()}"]),
            "general.quantization_version": gguf.GGML_QUANT_VERSION,
            "kvq.kv.k_bits": kv.k_bits,
            "kvq.kv.v_bits": kv.v_bits,
            "kvq.kv.sink_tokens": kv.sink_tokens,
            **vocabulary,
        }

    @property
    def _requantized(self) -> bool:
        return self.options.gguf_type in FILE_TYPES

    @property
    def _written_type(self) -> str:
        """Returns what this code writes: the type asked for, or the checkpoint's own floats."""
        if not self._requantized:
            return self.options.gguf_type
        dtypes = {entry.dtype for entry in self.checkpoint.tensors.values()}
        return "bf16" if "BF16" in dtypes else "f16"

    def _kinds(self) -> dict[str, str]:
        return {tensor.name: self._kind(tensor) for tensor in self.model.tensors}

    def _kind(self, tensor: GgufTensor) -> str:
        source = self.sources[tensor.source]
        if not source.quantised:
            return "f32"
        # Blocks of MXFP4 are kept, whatever type was asked for.
        unscaled = source.scale == tensor.factor == 1 and source.factors is None
        if unscaled and self.checkpoint.format_of(source) == GRIDS["MXFP4"]:
            return "mxfp4"
        kind = self._written_type
        wide = self.options.weights is None or self.options.weights.embedding_bits == 8
        if kind == "q4_0" and wide and tensor.source in ("embed", "head"):
            kind = "q8_0"
        # As llama.cpp falls back where rows are not whole blocks.
        return "f16" if tensor.shape[-1] % TYPES[kind].block else kind

    def _encoded(self, tensor: GgufTensor) -> Iterator[np.ndarray]:
        """Yields a tensor's rows, as arrays whose bytes are the file's."""
        kind, source = self._kind(tensor), self.sources[tensor.source]
        if kind != "mxfp4":
            chunks = (
                tensor.arrange(chunk)
                for rows in tensor.rows
                for chunk in self.checkpoint.chunks(
                    source, rows=rows, multiple=max(1, tensor.interleave)
                )
            )
            yield from encode(kind, chunks, self.options.threads)
            return
        for rows in tensor.rows:
            blocks = self.checkpoint.kept_blocks(source, GRIDS["MXFP4"], rows)
            assert blocks is not None
            yield from map(pack_e2m1, blocks)
