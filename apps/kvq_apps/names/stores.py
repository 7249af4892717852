"""Finds models that other programs left on this machine: Ollama, LM Studio, the hub's cache.

Nothing is changed, and what cannot be read is left out.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import DataError
from kvq.files import read_regular
from kvq.settings import ollama_folder
from kvq_models.catalogue import CatalogueSource
from kvq_runtime.bundle.gguf_format import SUFFIX

# Ollama leaves its own registry, and the folder of its own models there, out of a name.
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MANIFEST_BYTES = 1 << 20
_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
# The second and later parts of a split file, and the vision part of a model.
_NOT_A_MODEL = re.compile(r"(?!.*-00001-of-)-\d{5}-of-\d{5}\.gguf$|^mmproj", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """Holds a model of another program: its name there, its source, the bytes of its weights."""

    program: str
    name: str
    source: CatalogueSource
    num_bytes: int


def stored_models() -> list[StoredModel]:
    """Returns all models of other programs, by program and name."""
    return [*_ollama(), *_lm_studio(), *_hub_cache()]


def _ollama() -> Iterator[StoredModel]:
    """Yields Ollama's models.

    A manifest is at HOST/NAMESPACE/MODEL/TAG, and the weights are a blob named by its digest.
    """
    folder = ollama_folder()
    for manifest in sorted((folder / "manifests").glob("*/*/*/*")):
        with suppress(OSError, ValueError, KeyError, TypeError, DataError):
            layers = json.loads(read_regular(manifest, _MANIFEST_BYTES))["layers"]
            (weights,) = (layer for layer in layers if layer["mediaType"] == _MODEL_LAYER)
            digest = _DIGEST.fullmatch(weights["digest"])
            if digest is None:
                continue
            blob = folder / "blobs" / f"sha256-{digest[1]}"
            size = blob.stat().st_size
            name = _ollama_name(*manifest.parts[-4:])
            source = CatalogueSource(kind="path", place=str(blob), sha256=digest[1], num_bytes=size)
            yield StoredModel(program="Ollama", name=name, source=source, num_bytes=size)


def _ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    """Returns the name that `ollama list` prints."""
    if host != _REGISTRY:
        return f"{host}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == _LIBRARY else f"{namespace}/{model}:{tag}"


def _lm_studio() -> Iterator[StoredModel]:
    """Yields LM Studio's models, files PUBLISHER/REPOSITORY/NAME.gguf."""
    for folder in (Path.home() / place for place in _LM_STUDIO):
        for file in sorted(folder.glob(f"*/*/*{SUFFIX}")):
            if _NOT_A_MODEL.search(file.name):
                continue
            with suppress(OSError):
                size = file.stat().st_size
                source = CatalogueSource(kind="path", place=str(file))
                yield StoredModel(
                    program="LM Studio", name=file.stem, source=source, num_bytes=size
                )


def _hub_cache() -> Iterator[StoredModel]:
    """Yields the checkpoints in the hub's cache, by hub id."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        configs = folder.glob("snapshots/*/config.json")
        weights = [
            [file.stat().st_size for file in config.parent.glob("model*.safetensors")]
            for config in configs
        ]
        if not any(weights):
            continue
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        source = CatalogueSource(kind="hub", place=name)
        num_bytes = max(map(sum, weights))
        yield StoredModel(program="the hub's cache", name=name, source=source, num_bytes=num_bytes)
