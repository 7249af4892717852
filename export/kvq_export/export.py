"""The export itself: checkpoint in, bundle out, in the order things must happen.

Owns no format: reading, quantising, the graph, the manifest and the comparison with the original
each have their own module.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import CheckpointError, UsageError
from kvq_export import auxiliary, calibration, prediction, quality
from kvq_export.checkpoint import Checkpoint
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.gguf_export import GgufExport
from kvq_export.gguf_model import gguf_model
from kvq_export.gguf_vocabulary import read_vocabulary
from kvq_export.hub import Located, locate
from kvq_export.layout import Layout, plan_layout
from kvq_export.quality import Original
from kvq_export.sensitive import most_sensitive
from kvq_export.staging import free_destination, require_space, staged
from kvq_export.writer import CheckpointWeights, Progress, weight_info, write_manifest, write_model
from kvq_models.config import ModelConfig
from kvq_models.decoder import rope_settings
from kvq_models.keys import read_keys
from kvq_models.registry import read_checkpoint
from kvq_models.tokenizer import ControlTokens, Tokenizer
from kvq_runtime.bundle import (
    GGUF_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Bundle,
    FileInfo,
    Manifest,
    file_sha256,
)

# Room for the graph and the manifest beside the weights.
_SLACK_BYTES = 4 << 20


def unseen(done: int, total: int, label: str) -> None:
    """The progress nobody watches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """Everything known about the checkpoint before its weights are read."""

    located: Located
    original: Original
    tokenizer: Tokenizer | None
    gguf: GgufExport | None


def export_model(
    source: str | Path,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: Progress = unseen,
) -> Bundle:
    """Exports the checkpoint `source` (a folder or a hub id) to the folder `destination`.

    `progress` is called with bytes done, bytes in total and what is being done. Raises
    `ModelError` for the checkpoint and `BundleError` for the destination; then, and when it is
    interrupted, nothing is left behind.
    """
    options = options or ExportOptions()
    folder = Path(destination).expanduser()
    name = options.name or folder.name
    # Before the long work, and once more when it is done.
    free_destination(folder, force=options.force)
    model = _open_model(locate(source), options)
    weights = _weight_format(model, options, progress)
    _check_prediction(model, options)
    original = model.original
    layout = plan_layout(original.config, original.sources, weights) if options.onnx else None
    total = _graph_bytes(layout) + (0 if model.gguf is None else model.gguf.written_bytes)
    with staged(folder, force=options.force) as partial:
        files = _write_files(
            partial, name, model, layout, options.threads,
            lambda done, label: progress(done, total, label),
        )  # fmt: skip
        manifest = _manifest(name, model, layout, options, files)
        write_manifest(partial, manifest)
        manifest = _measured(
            manifest, model, partial, options, lambda label: progress(total, total, label)
        )
        write_manifest(partial, manifest)
    return Bundle.open(folder)


def _graph_bytes(layout: Layout | None) -> int:
    """What the graph's weights take; none without a graph."""
    return 0 if layout is None else layout.num_bytes


def _write_files(
    partial: Path,
    name: str,
    model: _Model,
    layout: Layout | None,
    threads: int,
    progress: Callable[[int, str], None],
) -> dict[str, FileInfo]:
    """Writes all but the manifest; `progress` is told the bytes of weights that are written."""
    before = _graph_bytes(layout)
    disk_bytes = before + (0 if model.gguf is None else model.gguf.disk_bytes)
    require_space(partial, disk_bytes + _SLACK_BYTES)
    files = _write_texts(partial, model)
    if layout is not None:
        original = model.original
        reader = CheckpointWeights(original.checkpoint, original.sources, threads)
        files |= write_model(
            partial, original.config, layout, reader, lambda done, _, what: progress(done, what)
        )
    if model.gguf is not None:
        model.gguf.write(partial, name, lambda done, _, what: progress(before + done, what))
        files[GGUF_FILE] = _file_info(partial / GGUF_FILE)
    return files


def _manifest(
    name: str,
    model: _Model,
    layout: Layout | None,
    options: ExportOptions,
    files: Mapping[str, FileInfo],
) -> Manifest:
    """What is known before the written model is run."""
    control = _control(model)
    return Manifest(
        name=name,
        config=model.original.config,
        weights=None if layout is None else weight_info(layout),
        gguf=None if model.gguf is None else model.gguf.info,
        kv=options.kv,
        files=files,
        eos_token_ids=control.eos,
        tokens=control.to_json(),
        source=_describe(model.located),
        policy=options.policy,
    )


def _check_prediction(model: _Model, options: ExportOptions) -> None:
    """Raises `UsageError` for maps that this model cannot have."""
    layers, asked = model.original.config.num_layers, options.predict
    if model.tokenizer is None and (asked or options.predict_with):
        raise UsageError(
            "--kv-predict is fitted to a text, and a checkpoint without tokenizer.json reads none; "
            "leave it out"
        )
    if asked is not None and not 1 <= (1 if asked == "auto" else int(asked)) < layers:
        raise UsageError(
            f"--kv-predict {asked} is not possible: 1 to {layers - 1} of this model's {layers} "
            "layers can be computed while the others are predicted"
        )


def _weight_format(model: _Model, options: ExportOptions, progress: Progress) -> WeightFormat:
    """What the options ask for, with the names of the matrices that are kept wide."""
    weights = options.weights
    if not (weights.sensitive and options.onnx):
        return weights
    if model.tokenizer is None:
        raise UsageError(
            "--sensitive is measured on a text, and a checkpoint without tokenizer.json reads "
            "none; leave it out, or choose --wbits 8"
        )
    progress(0, 1, "what each matrix loses at 4 bits")
    ids = _quality_ids(model.tokenizer, model.original.config)
    return replace(weights, wide=most_sensitive(model.original, ids, weights))


def _quality_ids(tokenizer: Tokenizer, config: ModelConfig) -> np.ndarray:
    """The tokens that the quality report is measured on, int64 [T]."""
    ids = tokenizer.encode(quality.quality_text(), start=True)
    return np.array(ids[: min(quality.token_limit(config.vocab_size), config.context_length)])


def _measured(
    manifest: Manifest,
    model: _Model,
    partial: Path,
    options: ExportOptions,
    step: Callable[[str], None],
) -> Manifest:
    """The manifest with what running the written model tells; without a tokenizer, nothing."""
    if model.tokenizer is None:
        return manifest
    if options.calibrate and options.onnx:
        forms, sensitivity = _calibrate(partial, model, model.tokenizer, options, step)
        manifest = replace(manifest, forms=forms, sensitivity=sensitivity)
        write_manifest(partial, manifest)
    if options.quality:
        quality = _measure(model, model.tokenizer, partial, options, step)
        manifest = replace(manifest, quality=quality)
    if options.predict is not None:
        manifest = prediction.predicting(
            partial, manifest, options.predict, model.tokenizer, options.threads, step
        )
    if options.predict_with is not None:
        path, tokenizer = options.predict_with, model.tokenizer
        manifest = auxiliary.fitting(partial, manifest, path, tokenizer, options.threads, step)
    return manifest


def _open_model(located: Located, options: ExportOptions) -> _Model:
    """Refuses what cannot be exported before the first byte is written."""
    family, config, config_json = read_checkpoint(located.folder)
    # Evaluated for its refusals: the cache must be able to hold this model.
    _ = config.cache_shape
    checkpoint = Checkpoint.open(located.folder)
    sources = family.weights(config)
    checkpoint.check(sources)
    tokenizer = None
    if options.tokenizer:
        tokenizer = Tokenizer.from_checkpoint(located.folder, family, config)
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"tokenizer.json names {tokenizer.vocab_size} tokens, config.json gives the model "
                f"{config.vocab_size}; they do not belong together"
            )
    model = _Model(
        located=located,
        original=Original(config=config, sources=sources, checkpoint=checkpoint),
        tokenizer=tokenizer,
        gguf=None,
    )
    if not options.gguf:
        return model
    settings = rope_settings(read_keys(family.model_type, family.keys, config_json))
    gguf = GgufExport(
        model=gguf_model(config, settings),
        checkpoint=checkpoint,
        sources=sources,
        options=options,
        vocabulary=tokenizer
        and read_vocabulary(located.folder, tokenizer, family, config.vocab_size),
        license=_licence(located.folder),
    )
    gguf.check()
    return replace(model, gguf=gguf)


def _control(model: _Model) -> ControlTokens:
    if model.tokenizer is not None:
        return model.tokenizer.control
    config = model.original.config
    return ControlTokens(bos=config.bos_token_id, eos=config.eos_token_ids)


def _write_texts(folder: Path, model: _Model) -> dict[str, FileInfo]:
    """The tokenizer's files, with size and hash."""
    if model.tokenizer is None:
        return {}
    shutil.copyfile(model.located.folder / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    names = [TOKENIZER_FILE]
    if model.tokenizer.chat_template is not None:
        (folder / TEMPLATE_FILE).write_text(model.tokenizer.chat_template, encoding="utf-8")
        names.append(TEMPLATE_FILE)
    return {name: _file_info(folder / name) for name in names}


def _file_info(file: Path) -> FileInfo:
    return FileInfo(num_bytes=file.stat().st_size, sha256=file_sha256(file))


def _measure(
    model: _Model,
    tokenizer: Tokenizer,
    folder: Path,
    options: ExportOptions,
    step: Callable[[str], None],
) -> Mapping[str, Any]:
    bundle = Bundle.open(folder, verify="size")
    ids = _quality_ids(tokenizer, bundle.config)
    step("the checkpoint's answers")
    expected = quality.log_softmax(model.original.logits(ids))
    report: dict[str, Any] = {"text": "quality.txt", "tokens": len(ids)}
    if bundle.has_onnx:
        with quality.engine_run(bundle, options.threads) as run:
            report |= quality.measure(expected, options.kv, run, ids, step)
    if model.gguf is not None:
        step("llama.cpp's answers")
        # Beyond its context llama.cpp computes something else where it has no window.
        within = ids[: model.gguf.model.context_length]
        found = quality.measure_gguf(
            model.original, expected[: len(within)], folder / GGUF_FILE, within, options.threads
        )
        report["gguf"] = {"type": options.gguf_type} | found
    return report


def _calibrate(
    folder: Path,
    model: _Model,
    tokenizer: Tokenizer,
    options: ExportOptions,
    step: Callable[[str], None],
) -> calibration.Calibration:
    known = calibration.kept(model.located.folder, options.weights, model.original.config)
    if known is not None:
        return known
    bundle = Bundle.open(folder, verify="size")
    ids = calibration.calibration_ids(tokenizer, bundle.config.context_length)
    if ids is None:
        return (), None

    def layer_done(done: int, layers: int) -> None:
        step(f"what errors cost, layer {done} of {layers}")

    step("how pages are best encoded")
    forms = calibration.choose_forms(bundle, ids, options.threads)
    return forms, calibration.calibrate(bundle, ids, options.threads, layer_done, forms=forms)


def _describe(located: Located) -> dict[str, Any]:
    return {
        "model": located.name,
        "revision": located.revision,
        "config_sha256": file_sha256(located.folder / "config.json"),
        "license": _licence(located.folder),
    }


def _licence(folder: Path) -> str:
    """What the model card's header says, else the first line of a licence file, else `unknown`."""
    card = folder / "README.md"
    if card.is_file():
        header = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
        for key in ("license_name", "license"):
            found = re.search(rf"^{key}:(?:\s*\n *-)? *[\"']?([^\s\"'#]+)", header, re.MULTILINE)
            if found and header.startswith("---"):
                return found[1]
    for file in filter(Path.is_file, sorted(folder.glob("LICENSE*"))):
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in lines if line.strip()), "unknown")
    return "unknown"
