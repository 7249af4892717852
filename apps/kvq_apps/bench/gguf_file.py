"""Writes a bundle's weights as a GGUF file for llama.cpp, rounded to its blocks of 4 or 8 bits.

`kvq_export` knows what a file holds and writes it; this file has no tokenizer.
"""

import hashlib
import os
from collections.abc import Iterator
from typing import cast

import numpy as np

from kvq.errors import BackendError, KvqError
from kvq.settings import cache_folder
from kvq_apps.terminal import output
from kvq_export.gguf.gguf_model import gguf_model
from kvq_export.gguf.gguf_tensors import GgufTensor
from kvq_export.gguf.gguf_writer import BLOCK, encode, write_gguf
from kvq_models.config import ModelConfig
from kvq_models.registry import family_for
from kvq_runtime.backends import ModelFiles
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.bundle.manifest import DATA_FILE, MODEL_FILE
from kvq_runtime.machine.device import physical_cores

# Goes up when this module writes something else for the same bundle.
REVISION = 5
# Most weights in memory at once, on each core.
_CHUNK_WEIGHTS = 1 << 22


def gguf_of(files: ModelFiles, peer: str) -> GgufFile:
    """Returns the GGUF file itself, or a graph's weights as one, written the first time.

    Raises `BackendError` for a model that llama.cpp cannot compute.
    """
    if not files.has_onnx:
        return files.gguf()
    # Only a bundle has a graph.
    bundle = cast(Bundle, files)
    if (reason := refusal(bundle.config)) is not None:
        raise BackendError(f"the peer {peer} cannot compute this model: {reason}")
    model = gguf_model(bundle.config)
    parts = (bundle.manifest.files[name].sha256 for name in (MODEL_FILE, DATA_FILE))
    digest = hashlib.sha256("".join([str(REVISION), *parts]).encode()).hexdigest()[:12]
    path = cache_folder() / "bench" / f"{bundle.manifest.name}-{digest}.gguf"
    if not path.exists():
        output.print_note(f"writing the weights once for {peer}: {path}")
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        kinds = {tensor.name: _kind(tensor.source, bundle) for tensor in model.tensors}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_gguf(
                partial,
                model,
                {"general.name": bundle.manifest.name, "tokenizer.ggml.model": "no_vocab"},
                kinds,
                lambda tensor: encode(
                    kinds[tensor.name], _chunks(tensor, bundle), physical_cores()
                ),
                lambda _: None,
            )
            partial.replace(path)
        except OSError as error:
            raise BackendError(f"{path} cannot be written: {error.strerror}") from error
        finally:
            partial.unlink(missing_ok=True)
    return GgufFile.open(path).trusted()


def refusal(config: ModelConfig) -> str | None:
    """Says why llama.cpp cannot compute exactly this model, or None."""
    try:
        model = gguf_model(config)
    except KvqError as error:
        return str(error)
    weights = family_for({"model_type": config.model_type}).weights(config)
    odd = any(
        tensor.shape[-1] % BLOCK and weights[tensor.source].quantised for tensor in model.tensors
    )
    if model.context_length < config.context_length:
        return "it has attention windows"
    return f"it has rows that are not whole blocks of {BLOCK}" if odd else None


def _kind(source: str, bundle: Bundle) -> str:
    """Chooses how a weight is stored: f32, or the narrowest type that keeps its bits."""
    weights = bundle.manifest.weights
    if weights is None or source not in weights.formats:
        return "f32"
    return "q4_0" if weights.format_of(source).bits == 4 else "q8_0"


def _chunks(tensor: GgufTensor, bundle: Bundle) -> Iterator[np.ndarray]:
    """Yields the tensor's rows, whole heads at a time."""
    whole = max(1, tensor.interleave)
    step = whole * max(1, _CHUNK_WEIGHTS // (whole * tensor.shape[-1]))
    for run in tensor.rows:
        for start in range(run.start, run.stop, step):
            rows = slice(start, min(start + step, run.stop))
            yield tensor.arrange(bundle.read_weight(tensor.source, rows))
