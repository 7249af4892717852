"""Writes a bundle's weights as a GGUF file for llama.cpp: the same codes, scales rounded to fp16.

Symmetric codes of 4 bits become Q4_0, those of 8 bits Q8_0 and those of MXFP4 themselves without
requantising, so both engines multiply by the same weights; others are rounded anew. What a file
holds, and the writing of it, is `kvq_export`'s; this one has no tokenizer.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvq.errors import BackendError, KvqError
from kvq.reference_linear import (
    E2M1_CODES,
    ZERO_PARTS,
    BlockFormat,
    Blocks,
    Grid,
    PanelFormat,
)
from kvq.settings import cache_folder
from kvq_apps import output
from kvq_apps.bench.engines import check_computable
from kvq_export import gguf_file
from kvq_export.export import unseen
from kvq_export.gguf_blocks import BLOCK, MXFP4, StoredKind, pack_blocks, pack_e2m1
from kvq_export.gguf_model import GgufTensor, gguf_model
from kvq_export.weights import quantize
from kvq_models.config import ModelConfig
from kvq_models.registry import family_for
from kvq_runtime.bundle import Bundle
from kvq_runtime.gguf_file import GgufFile
from kvq_runtime.manifest import DATA_FILE, MODEL_FILE, WeightInfo

# Counts the changes of what this file writes for the same bundle.
REVISION = 3
# Weights that are in memory at once.
_CHUNK_WEIGHTS = 1 << 23
# What a bundle reads of e2m1 as the codes that a file has.
_CODES_OF_LEVELS = np.zeros(E2M1_CODES.max() + 1, np.uint8)
_CODES_OF_LEVELS[E2M1_CODES] = np.arange(len(E2M1_CODES))


def same_weights(bundle: Bundle, peer: str = "llama.cpp") -> GgufFile:
    """The graph's weights as GGUF in the cache folder, written the first time, for a `peer`."""
    check_computable(peer, refusal(bundle.config))
    if gguf_model(bundle.config).rope.rounded:
        output.print_note(f"{peer} computes this model's rotary table a little differently")
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
    quantized = {
        name
        for name, source in family_for({"model_type": config.model_type}).weights(config).items()
        if source.quantised
    }
    traits = {
        "attention windows": model.window_tokens and not model.windowed,
        f"rows that are not whole blocks of {BLOCK}": any(
            tensor.shape[-1] % BLOCK for tensor in model.tensors if tensor.source in quantized
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
    kinds = {tensor.name: _kind(tensor, weights) for tensor in model.tensors}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        gguf_file.write_gguf(
            partial,
            model,
            kinds,
            lambda tensor: _encoded(tensor, kinds[tensor.name], bundle),
            gguf_file.GgufHeader(name=bundle.manifest.name, file_type="MOSTLY_Q4_0"),
            unseen,
        )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _kind(tensor: GgufTensor, weights: WeightInfo) -> StoredKind:
    """Floats as they are; MXFP4, or the narrower of Q4_0 and Q8_0 that is no narrower."""
    if tensor.source not in weights.formats:
        return StoredKind(kind="f32")
    form = weights.format_of(tensor.source)
    if form == MXFP4 and tensor.factor == 1:
        return StoredKind(kind="mxfp4")
    return StoredKind(kind="q4_0" if form.bits == 4 else "q8_0")


def _encoded(tensor: GgufTensor, kind: StoredKind, bundle: Bundle) -> Iterator[np.ndarray]:
    """Its rows, as arrays whose bytes are the file's."""
    whole = max(1, tensor.interleave)
    step = whole * max(1, _CHUNK_WEIGHTS // (whole * tensor.shape[-1]))
    for run in tensor.rows:
        for start in range(run.start, run.stop, step):
            yield _encoded_rows(tensor, kind, bundle, slice(start, min(start + step, run.stop)))


def _encoded_rows(tensor: GgufTensor, kind: StoredKind, bundle: Bundle, rows: slice) -> np.ndarray:
    if kind.kind == "f32":
        return tensor.arrange(bundle.read_weight(tensor.source, rows))
    blocks, form = bundle.read_codes(tensor.source, rows), bundle.form(tensor.source)
    if kind.kind == "mxfp4":
        codes = _CODES_OF_LEVELS[blocks.codes]
        return pack_e2m1(_arranged(tensor, blocks._replace(codes=codes), form))
    bits = 4 if kind.kind == "q4_0" else 8
    if form.bits == bits and _fits(tensor, blocks, form.grid):
        blocks = _arranged(tensor, blocks, form)
    else:
        weight = tensor.arrange(bundle.read_weight(tensor.source, rows))
        blocks = quantize(weight, BlockFormat(bits=bits, block=BLOCK))
    return pack_blocks(blocks.codes, blocks.scales, bits)


def _fits(tensor: GgufTensor, blocks: Blocks, grid: Grid) -> bool:
    """Whether the middle code stands for zero in all blocks, and none is dealt out in parts."""
    if tensor.dealt_columns is not None and tensor.dealt_columns.size % BLOCK:
        return False
    if grid is Grid.ZERO_POINT:
        return bool(np.all(blocks.offsets == ZERO_PARTS // 2))
    return grid is Grid.SYMMETRIC


def _arranged(tensor: GgufTensor, blocks: Blocks, form: PanelFormat) -> Blocks:
    """Codes and scales, of blocks of `BLOCK`, in the tensor's order, its factor in the scales."""
    scales = np.repeat(blocks.scales, form.block, axis=1)[:, : form.columns]
    codes = replace(tensor, factor=1.0).arrange(blocks.codes[:, : form.columns])
    return Blocks(codes, tensor.arrange(scales)[:, ::BLOCK])
