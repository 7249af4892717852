"""Models that other programs left on this machine: Ollama's, LM Studio's, the hub's cache.

Only looks and names; whatever cannot be read is left out, since it is nobody's fault here.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvq.settings import ollama_folder
from kvq_models.catalogue import Source
from kvq_runtime.gguf_format import SUFFIX

# What Ollama leaves out of a name: its own registry, the folder of its own models there.
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MANIFEST_BYTES = 1 << 20
_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
# A part behind the first of a split file, and the half of a model that sees.
_NOT_A_MODEL = re.compile(r"(?!.*-00001-of-)-\d{5}-of-\d{5}\.gguf$|^mmproj", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A model that `program` left: its name there, what to fetch, the bytes of its weights."""

    program: str
    name: str
    source: Source
    num_bytes: int


def found_models() -> list[Found]:
    """All of them, by program and name."""
    return [*_ollama(), *_lm_studio(), *_hub_cache()]


def _ollama() -> Iterator[Found]:
    """A manifest is at HOST/NAMESPACE/MODEL/TAG; the weights are a blob under their digest."""
    folder = ollama_folder()
    for manifest in sorted((folder / "manifests").glob("*/*/*/*")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if manifest.stat().st_size > _MANIFEST_BYTES:
                continue
            layers = json.loads(manifest.read_bytes())["layers"]
            (weights,) = (layer for layer in layers if layer["mediaType"] == _MODEL_LAYER)
            digest = _DIGEST.fullmatch(weights["digest"])
            if digest is None:
                continue
            blob = folder / "blobs" / f"sha256-{digest[1]}"
            size = blob.stat().st_size
            name = _ollama_name(*manifest.parts[-4:])
            source = Source(kind="path", place=str(blob), sha256=digest[1], num_bytes=size)
            yield Found(program="Ollama", name=name, source=source, num_bytes=size)


def _ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    """As `ollama list` prints it."""
    if host != _REGISTRY:
        return f"{host}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == _LIBRARY else f"{namespace}/{model}:{tag}"


def _lm_studio() -> Iterator[Found]:
    """A file is at PUBLISHER/REPOSITORY/FILE.gguf; its name here is what stands before .gguf."""
    for folder in (Path.home() / place for place in _LM_STUDIO):
        for file in sorted(folder.glob(f"*/*/*{SUFFIX}")):
            if _NOT_A_MODEL.search(file.name):
                continue
            with suppress(OSError):
                size = file.stat().st_size
                source = Source(kind="path", place=str(file))
                yield Found(program="LM Studio", name=file.stem, source=source, num_bytes=size)


def _hub_cache() -> Iterator[Found]:
    """Checkpoints that were downloaded before, under their hub id."""
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
        source = Source(kind="hub", place=name)
        num_bytes = max(map(sum, weights))
        yield Found(program="the hub's cache", name=name, source=source, num_bytes=num_bytes)
