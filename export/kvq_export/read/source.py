"""Where a model comes from: the one protocol that an export reads, and a checkpoint folder as one.

The other one is a GGUF file, see `gguf_source`. Knows no quantiser.
"""

import logging
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvq.errors import CheckpointError, ModelError, UsageError
from kvq.files import path_of
from kvq.reference.linear import WIDTHS
from kvq_export.config import WeightFormat
from kvq_export.phases import Progress, no_progress
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.read.hub import Located, locate
from kvq_export.read.packed import unpack
from kvq_export.read.sentence_transformers import read_embedding
from kvq_export.read.views import apply_views
from kvq_models.config import ModelConfig
from kvq_models.family import Family, WeightSource
from kvq_models.keys import read_json
from kvq_models.registry import is_wrapper, read_checkpoint, text_config
from kvq_models.tokenizer import TokenizerFiles
from kvq_runtime.bundle.file_hashes import file_sha256
from kvq_runtime.bundle.gguf_format import is_gguf
from kvq_runtime.config import Sampling
from kvq_runtime.text_embedding import TextEmbedding

logger = logging.getLogger(__name__)

# The key of config.json that says how weights were quantised before.
_QUANTIZATION = "quantization_config"
# What generation_config.json calls fields of `Sampling`.
_SAMPLING_KEYS = {
    **{key: key for key in ("temperature", "top_k", "top_p", "min_p")},
    "repetition_penalty": "repeat_penalty",
}


class Source(Protocol):
    """Gives a model as it came: config, weights by canonical name, tokenizer files, licence."""

    @property
    def path(self) -> Path:
        """Returns the folder or the file."""
        ...

    @property
    def name(self) -> str:
        """Returns a hub id, or what the folder or file is called."""
        ...

    def config(self) -> tuple[Family, ModelConfig, dict[str, Any]]:
        """Returns family, config and config.json; raises as `registry.read_checkpoint` does."""
        ...

    def weight_sources(self, family: Family, config: ModelConfig) -> Mapping[str, WeightSource]:
        """Returns which tensors make each canonical weight, in the order of the forward pass."""
        ...

    def checkpoint(self, config: ModelConfig) -> Checkpoint:
        """Returns the tensors. Raises `CheckpointError` for files that are missing or damaged."""
        ...

    def tokenizer_files(self) -> TokenizerFiles:
        """Returns how texts are cut. Raises `CheckpointError` when that is missing or damaged."""
        ...

    def weight_format(
        self, checkpoint: Checkpoint, sources: Mapping[str, WeightSource]
    ) -> WeightFormat:
        """Returns the widths of an export that asks for no others: what the files have."""
        return format_of_file(checkpoint, sources)

    def sampling(self) -> Mapping[str, Any]:
        """Returns the fields of `Sampling` that the model asks for."""
        return {}

    def embedding(self) -> TextEmbedding | None:
        """Returns how it makes vectors of texts; None for a model that was not made for them."""
        return None

    def describe(self) -> dict[str, Any]:
        """Returns what a manifest says of a bundle's source: model, revision, hash, licence."""
        ...

    @property
    def licence(self) -> str:
        """Returns its licence's name, or `unknown`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSource(Source):
    """Reads a Hugging Face checkpoint folder."""

    located: Located

    @property
    def path(self) -> Path:
        return self.located.folder

    @property
    def name(self) -> str:
        return self.located.name

    def config(self) -> tuple[Family, ModelConfig, dict[str, Any]]:
        """Reads the config; how weights are quantised is read with them."""
        return read_checkpoint(self.path, excluded_key=_QUANTIZATION)

    def weight_sources(self, family: Family, config: ModelConfig) -> Mapping[str, WeightSource]:
        return family.weights(config)

    def checkpoint(self, config: ModelConfig) -> Checkpoint:
        """Opens the weights; a matrix is one tensor, whatever it was stored as."""
        checkpoint, settings = Checkpoint.open(self.path).with_prefix(), self._quantization
        if is_wrapper(read_json(self.path / "config.json")):
            checkpoint = checkpoint.text_part()
        checkpoint = checkpoint if settings is None else unpack(checkpoint, settings)
        return apply_views(checkpoint, self.config()[0].views(config))

    def tokenizer_files(self) -> TokenizerFiles:
        return TokenizerFiles.read(self.path)

    def weight_format(
        self, checkpoint: Checkpoint, sources: Mapping[str, WeightSource]
    ) -> WeightFormat:
        """Returns the project's default where all weights are floats, else what the file has."""
        if self._quantization is None:
            return WeightFormat.recommended()
        return format_of_file(checkpoint, sources)

    @property
    def _quantization(self) -> object:
        return text_config(read_json(self.path / "config.json")).get(_QUANTIZATION)

    def sampling(self) -> Mapping[str, Any]:
        """Reads generation_config.json; a field that cannot be is left out, with a warning."""
        path = self.path / "generation_config.json"
        settings = read_json(path) if path.is_file() else {}
        if settings.get("do_sample") is False:
            return {"temperature": 0}
        sampling: dict[str, Any] = {}
        for key, field in _SAMPLING_KEYS.items():
            value = settings.get(key)
            if value is None:
                continue
            try:
                # transformers switches top_k off by 0, others by a negative number.
                sampling[field] = max(0, operator.index(value)) if key == "top_k" else float(value)
                _ = Sampling(**sampling)
            except (UsageError, TypeError, ValueError, OverflowError):
                sampling.pop(field, None)
                logger.warning("%s: %s = %.40r is not possible and is left out", path, key, value)
        return sampling

    def embedding(self) -> TextEmbedding | None:
        return read_embedding(self.path)

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "revision": self.located.revision,
            "config_sha256": file_sha256(self.path / "config.json"),
            "license": self.licence,
        }

    @property
    def licence(self) -> str:
        """Returns what the card's header says, else a licence file's first line, else `unknown`."""
        card = self.path / "README.md"
        if card.is_file():
            header = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
            for key in ("license_name", "license"):
                match = re.search(
                    rf"^{key}:(?:\s*\n *-)? *[\"']?([^\s\"'#]+)", header, re.MULTILINE
                )
                if match and header.startswith("---"):
                    return match[1]
        for file in filter(Path.is_file, sorted(self.path.glob("LICENSE*"))):
            lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line.strip() for line in lines if line.strip()), "unknown")
        return "unknown"


def format_of_file(checkpoint: Checkpoint, sources: Mapping[str, WeightSource]) -> WeightFormat:
    """Returns every matrix's format in the file, and 8 bits where no format keeps that."""
    matrices = {name: source for name, source in sources.items() if source.quantised}
    known = {name: checkpoint.format_of(source) for name, source in matrices.items()}
    kept = {name: form for name, form in known.items() if form is not None}
    return WeightFormat(bits=max(WIDTHS), overrides=kept)


def open_source(source: str | Path, progress: Progress = no_progress) -> Source:
    """Opens the model that a folder, a GGUF file or a hub id has.

    Raises `ModelError` for what is none of them, for a download that cannot be made, and for a GGUF
    file that is damaged or of an architecture that is not supported.
    """
    path = path_of(source, ModelError)
    if is_gguf(path):
        if not path.is_file():
            raise CheckpointError(f"there is no file {path}")
        from kvq_export.gguf.gguf_source import GgufSource

        return GgufSource.open(path)
    return FolderSource(located=locate(source, progress))
