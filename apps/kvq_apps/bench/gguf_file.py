"""Writes a bundle's weights as a GGUF file for llama.cpp: the same codes, scales rounded to fp16.

Symmetric codes of 4 bits become Q4_0 and those of 8 bits Q8_0 without requantising, so both engines
multiply by the same weights; others are rounded anew. What a file holds is `kvq_export`'s; this one
has no tokenizer.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvq.errors import BackendError, KvqError
from kvq.reference_linear import BlockFormat, Grid
from kvq.settings import cache_folder
from kvq_apps import output
from kvq_apps.bench.engines import check_computable
from kvq_export import gguf_file
from kvq_export.export import unseen
from kvq_export.gguf_blocks import BLOCK, StoredKind, pack_blocks
from kvq_export.gguf_model import GgufModel, GgufTensor, gguf_model
from kvq_export.weights import quantize
from kvq_models.config import ModelConfig
from kvq_runtime.bundle import Bundle
from kvq_runtime.gguf_file import GgufFile
from kvq_runtime.manifest import DATA_FILE, MODEL_FILE, WeightInfo

# Counts the changes of what this file writes for the same bundle.
REVISION = 2


def same_weights(bundle: Bundle, peer: str = "llama.cpp") -> GgufFile:
    """The graph's weights as GGUF in the cache folder, written the first time, for a `peer`."""
    check_computable(peer, refusal(bundle.config))
    files = bundle.manifest.files
    hashes = f"{REVISION}" + "".join(files[name].sha256 for name in (MODEL_FILE, DATA_FILE))
    digest = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    path = cache_folder() / "bench" / f"{bundle.manifest.name}-{digest}.gguf"
    if not path.exists():
        output.print_note(f"writing the weights once for {peer}: {path}")
        try:
            write_gguf(bundle, path)
        except OSError as error:
            raise BackendError(f"{path} cannot be written: {error.strerror}") from error
    return GgufFile.open(path).vouched_for()


def refusal(config: ModelConfig) -> str | None:
    """Why llama.cpp cannot compute exactly this model from the same codes, or None."""
    try:
        model = gguf_model(config)
    except KvqError as error:
        return str(error)
    traits = {
        "attention windows": model.window_tokens,
        f"rows that are not whole blocks of {BLOCK}": any(
            tensor.shape[-1] % BLOCK for tensor in model.tensors if len(tensor.shape) > 1
        ),
        "scaled embeddings": any(
            tensor.factor != 1 for tensor in model.tensors if len(tensor.shape) > 1
        ),
    }
    return next((f"it has {trait}" for trait, found in traits.items() if found), None)


def write_gguf(bundle: Bundle, path: Path) -> None:
    """Writes `path`, whole or not at all. Raises `BackendError` for a model it cannot describe."""
    reason = refusal(bundle.config)
    if reason is not None:
        raise BackendError(f"{bundle.path} has no GGUF form here: {reason}")
    weights = bundle.manifest.weights
    assert weights is not None
    model = gguf_model(bundle.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        gguf_file.write_gguf(
            partial,
            model,
            _kinds(model, weights),
            lambda tensor: _encode(tensor, bundle, weights),
            gguf_file.GgufHeader(name=bundle.manifest.name, file_type="MOSTLY_Q4_0"),
            unseen,
        )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _kinds(model: GgufModel, weights: WeightInfo) -> dict[str, StoredKind]:
    return {
        tensor.name: StoredKind(
            kind="f32"
            if len(tensor.shape) == 1
            else "q4_0"
            if _bits(tensor, weights) == 4
            else "q8_0"
        )
        for tensor in model.tensors
    }


def _encode(tensor: GgufTensor, bundle: Bundle, weights: WeightInfo) -> Iterator[np.ndarray]:
    for taken in tensor.rows:
        rows = slice(taken.start, taken.stop)
        if len(tensor.shape) == 1:
            yield tensor.arrange(bundle.read_weight(tensor.source, rows))
            continue
        form, bits = weights.format_of(tensor.source), _bits(tensor, weights)
        if form.grid is Grid.SYMMETRIC and form.bits == bits:
            blocks = bundle.read_codes(tensor.source, rows)
        else:
            weight = bundle.read_weight(tensor.source, rows)
            blocks = quantize(weight, BlockFormat(bits=bits, block=BLOCK))
        yield tensor.arrange(pack_blocks(blocks.codes, blocks.scales, bits))


def _bits(tensor: GgufTensor, weights: WeightInfo) -> int:
    """Of Q4_0 or Q8_0: the narrowest that is no narrower than what is stored."""
    return 4 if weights.format_of(tensor.source).bits == 4 else 8
