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

from kvq.errors import CheckpointError, UsageError
from kvq.reference_linear import WIDTHS
from kvq_export.checkpoint import Checkpoint
from kvq_export.config import WeightFormat
from kvq_export.hub import Located, locate
from kvq_export.hub_files import unseen
from kvq_export.packed import unpacked
from kvq_export.views import viewed
from kvq_export.writer import Progress
from kvq_models.config import ModelConfig
from kvq_models.family import Family, WeightSource
from kvq_models.registry import is_wrapper, read_checkpoint, read_json, text_config
from kvq_models.tokenizer import TokenizerFiles
from kvq_runtime.config import Sampling
from kvq_runtime.file_hashes import file_sha256
from kvq_runtime.gguf_format import is_gguf

logger = logging.getLogger(__name__)

# The key of config.json that says how weights were quantised before.
_QUANTIZATION = "quantization_config"
# What generation_config.json calls fields of `Sampling`.
_SAMPLING_KEYS = {
    **{key: key for key in ("temperature", "top_k", "top_p", "min_p")},
    "repetition_penalty": "repeat_penalty",
}


class Source(Protocol):
    """A model as it came: config, weights by canonical name, tokenizer files, licence."""

    @property
    def path(self) -> Path:
        """The folder or the file."""
        ...

    @property
    def name(self) -> str:
        """A hub id, or what the folder or file is called."""
        ...

    def config(self) -> tuple[Family, ModelConfig, dict[str, Any]]:
        """Family, config and config.json; raises as `registry.read_checkpoint` does."""
        ...

    def weight_sources(self, family: Family, config: ModelConfig) -> Mapping[str, WeightSource]:
        """Every canonical weight in the order of the forward pass, of what tensors it is made."""
        ...

    def checkpoint(self, config: ModelConfig) -> Checkpoint:
        """The tensors. Raises `CheckpointError` for files that are missing or damaged."""
        ...

    def tokenizer_files(self) -> TokenizerFiles:
        """What says how texts are cut. Raises `CheckpointError` when it is missing or damaged."""
        ...

    def weight_format(
        self, checkpoint: Checkpoint, sources: Mapping[str, WeightSource]
    ) -> WeightFormat:
        """The widths of an export that nobody asks for others."""
        ...

    def sampling(self) -> Mapping[str, Any]:
        """Fields of `Sampling` that the model asks for."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a manifest says of where a bundle came from: model, revision, hash, licence."""
        ...

    @property
    def licence(self) -> str:
        """Its licence's name, or `unknown`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSource:
    """A Hugging Face checkpoint folder."""

    located: Located

    @property
    def path(self) -> Path:
        """See `Source.path`."""
        return self.located.folder

    @property
    def name(self) -> str:
        """See `Source.name`."""
        return self.located.name

    def config(self) -> tuple[Family, ModelConfig, dict[str, Any]]:
        """See `Source.config`; how weights are quantised is read with them."""
        return read_checkpoint(self.path, apart=_QUANTIZATION)

    def weight_sources(self, family: Family, config: ModelConfig) -> Mapping[str, WeightSource]:
        """See `Source.weight_sources`."""
        return family.weights(config)

    def checkpoint(self, config: ModelConfig) -> Checkpoint:
        """See `Source.checkpoint`; matrices are one tensor each, whatever they were stored as."""
        opened, said = Checkpoint.open(self.path), self._quantization
        if is_wrapper(read_json(self.path / "config.json")):
            opened = opened.text_part()
        opened = opened if said is None else unpacked(opened, said)
        return viewed(opened, self.config()[0].views(config))

    def tokenizer_files(self) -> TokenizerFiles:
        """See `Source.tokenizer_files`."""
        return TokenizerFiles.read(self.path)

    def weight_format(
        self, checkpoint: Checkpoint, sources: Mapping[str, WeightSource]
    ) -> WeightFormat:
        """The project's default where all are floats, else what the file has."""
        if self._quantization is None:
            return WeightFormat.recommended()
        return format_of_file(checkpoint, sources)

    @property
    def _quantization(self) -> object:
        return text_config(read_json(self.path / "config.json")).get(_QUANTIZATION)

    def sampling(self) -> Mapping[str, Any]:
        """As generation_config.json has them; one that cannot be is left out, with a warning."""
        path = self.path / "generation_config.json"
        said = read_json(path) if path.is_file() else {}
        if said.get("do_sample") is False:
            return {"temperature": 0}
        found: dict[str, Any] = {}
        for key, field in _SAMPLING_KEYS.items():
            value = said.get(key)
            if value is None:
                continue
            try:
                # transformers switches top_k off by 0, others by a negative number.
                found[field] = max(0, operator.index(value)) if key == "top_k" else float(value)
                _ = Sampling(**found)
            except (UsageError, TypeError, ValueError, OverflowError):
                found.pop(field, None)
                logger.warning("%s: %s = %.40r is not possible and is left out", path, key, value)
        return found

    def describe(self) -> dict[str, Any]:
        """See `Source.describe`."""
        return {
            "model": self.name,
            "revision": self.located.revision,
            "config_sha256": file_sha256(self.path / "config.json"),
            "license": self.licence,
        }

    @property
    def licence(self) -> str:
        """What the card's header says, else a licence file's first line, else `unknown`."""
        card = self.path / "README.md"
        if card.is_file():
            header = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
            for key in ("license_name", "license"):
                found = re.search(
                    rf"^{key}:(?:\s*\n *-)? *[\"']?([^\s\"'#]+)", header, re.MULTILINE
                )
                if found and header.startswith("---"):
                    return found[1]
        for file in filter(Path.is_file, sorted(self.path.glob("LICENSE*"))):
            lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line.strip() for line in lines if line.strip()), "unknown")
        return "unknown"


def format_of_file(checkpoint: Checkpoint, sources: Mapping[str, WeightSource]) -> WeightFormat:
    """Every matrix as the file has it where a format holds that; 8 bits elsewhere."""
    matrices = {name: source for name, source in sources.items() if source.quantised}
    known = {name: checkpoint.format_of(source) for name, source in matrices.items()}
    kept = {name: form for name, form in known.items() if form is not None}
    return WeightFormat(bits=max(WIDTHS), others=kept)


def open_source(source: str | Path, progress: Progress = unseen) -> Source:
    """The model that a folder, a GGUF file or a hub id holds.

    Raises `ModelError` for what is none of them, for a download that cannot be made, and for a
    GGUF file that is damaged or of an architecture that is not supported.
    """
    path = Path(source).expanduser()
    if is_gguf(path):
        if not path.is_file():
            raise CheckpointError(f"there is no file {path}")
        from kvq_export.gguf_source import GgufSource

        return GgufSource.open(path)
    return FolderSource(located=locate(source, progress))
