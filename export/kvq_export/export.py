"""The export: from a checkpoint to a bundle, in the order things must happen.

Owns no format: reading, quantising, the graph, the manifest and the comparison with the original
have modules of their own.
"""

import ctypes
import logging
import re
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import BackendError, ModelError, UsageError, argument
from kvq.files import path_of
from kvq.reference.linear import SUPER_BLOCK, WIDTHS, Grid
from kvq_export.config import BLOCK, ExportOptions, WeightFormat
from kvq_export.fit import auxiliary, prediction, quality
from kvq_export.fit.calibrated import (
    TABLES,
    CalibratedWeights,
    calibration_segments,
    report_texts,
)
from kvq_export.fit.damage import mixed_formats
from kvq_export.fit.page_encodings import fit_pages
from kvq_export.fit.quality import Original
from kvq_export.fit.retrieval import score_heads
from kvq_export.gguf.gguf_importance import Importance, read_importance
from kvq_export.gguf.gguf_model import gguf_model
from kvq_export.gguf.gguf_vocabulary import read_vocabulary
from kvq_export.gguf.gguf_writer import GgufExport
from kvq_export.phases import FETCH, MAKE, Phases, Progress, no_progress
from kvq_export.read.checkpoint import HEAD, keeps
from kvq_export.read.source import Source, open_source
from kvq_export.write.layout import Layout, plan_layout
from kvq_export.write.staging import free_destination, require_space, staged
from kvq_export.write.weights import quantizers
from kvq_export.write.writer import (
    CheckpointWeights,
    WeightReader,
    weight_info,
    write_manifest,
    write_model,
)
from kvq_models.config import ModelConfig
from kvq_models.decoder import rope_settings
from kvq_models.family import Family, WeightSource
from kvq_models.keys import read_keys
from kvq_models.spare_tokens import without_spare_tokens
from kvq_models.tokenizer import ControlTokens, Tokenizer, TokenizerFiles
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.file_hashes import file_sha256
from kvq_runtime.bundle.manifest import GGUF_FILE, TEMPLATE_FILE, TOKENIZER_FILE, FileInfo, Manifest
from kvq_runtime.text_embedding import TextEmbedding

logger = logging.getLogger(__name__)

# Room for the graph and the manifest beside the weights.
_SLACK_BYTES = 4 << 20
# The phases of an export in their order, as they are shown.
FIND_WIDTHS = "finding which weights need more bits"
WRITE = "rounding and writing the weights"
TUNE = "tuning the weights"
FIT_CACHE = "fitting the cache to the model"
SCORE_HEADS = "finding what looks far back"
COMPARE = "comparing with the original model"
PREDICT = "fitting what predicts prompts"
# Finds the layer in the name of a weight, of the graph or of a GGUF file.
_LAYER = re.compile(r"\b(?:layers|blk)\.(\d+)\.")
# Arrays from this size on go back to the system when they are freed (`_return_large_arrays`), and
# the number of that option of `mallopt`.
_LARGE_BYTES, _M_MMAP_THRESHOLD = 4 << 20, -3


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """Holds what is known about a model before its weights are read.

    `draft` names the weights of its draft head, `embedding` says how it makes vectors of texts.
    """

    source: Source
    original: Original
    draft: Mapping[str, WeightSource]
    tokenizer: Tokenizer | None
    files: TokenizerFiles | None
    gguf: GgufExport | None
    embedding: TextEmbedding | None = None
    importance: Importance | None = None


def export_model(
    source: str | Path,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: Progress | Phases = no_progress,
    finish: Callable[[Path, Manifest], None] | None = None,
) -> Bundle:
    """Exports the model `source` (a folder, a GGUF file or a hub id) to the folder `destination`.

    `progress` gets how much of the whole is done and what is being done; it may be the phases of a
    job that has fetched the source already. `finish` may add files to the finished folder before it
    gets its name, so that they come and go with it. Raises `ModelError` for the checkpoint and
    `BundleError` for the destination; then, and when it is interrupted, nothing is left behind.
    """
    options = options or ExportOptions()
    _return_large_arrays()
    folder = Path(destination).expanduser()
    name = options.name or folder.name
    # Checked before the long work, and once more when it is done.
    free_destination(folder, force=options.force)
    if options.tune:
        _check_torch()
    job = progress
    if not isinstance(job, Phases):
        job = Phases.of_making(job, fetches=not path_of(source, ModelError).exists())
    quantizers(options.threads)
    model = open_model(open_source(source, job.of(FETCH)), options)
    weights = _weight_format(model, options)
    phases = Phases(_costs(model, weights, options), job.of(MAKE))
    weights = _mix_widths(model, weights, options, phases)
    options = replace(options, weights=weights)
    _check_prediction(model, options)
    _check_tuning(model, options)
    original = model.original
    sources = {**original.sources, **model.draft}
    layout = plan_layout(original.config, sources, weights) if options.onnx else None
    _check_widths(layout, weights)
    with staged(folder, force=options.force) as partial:
        on_weight = _by_layer(phases.of(WRITE), original.config.num_layers)
        files = _write_files(partial, name, model, layout, options, on_weight)
        manifest = _manifest(name, model, layout, options, files)
        write_manifest(partial, manifest)
        tuned: dict[str, Any] | None = None
        if options.tune:
            assert layout is not None
            assert model.tokenizer is not None
            from kvq_export.fit import tuning

            steps = phases.of(TUNE)
            manifest, tuned = tuning.tune(
                partial, manifest, layout, original, model.tokenizer, options, steps
            )
        manifest = _measure_bundle(manifest, model, partial, options, phases)
        if tuned is not None:
            manifest = replace(manifest, quality={**(manifest.quality or {}), "tuning": tuned})
        write_manifest(partial, manifest)
        if finish is not None:
            finish(partial, manifest)
    bundle = Bundle.open(folder)
    job.end(MAKE)
    return bundle


def _costs(model: OpenModel, weights: WeightFormat, options: ExportOptions) -> dict[str, float]:
    """Returns what each phase of this export costs, relative to the others."""
    has_tokenizer = model.tokenizer is not None
    fits_cache = has_tokenizer and options.calibrate and options.fit_cache and options.onnx
    # Codes of a file are kept; only widths that are asked for are rounded for a text.
    widths_given = weights.mixed or options.weights is not None
    calibrates = fits_cache and options.feedback and not _rounds_plainly(weights) and widths_given
    return {
        phase: cost
        for phase, cost, included in (
            (FIND_WIDTHS, 37.0, weights.mixed and options.onnx),
            (WRITE, 120.0 if calibrates else 1.5, True),
            (TUNE, 600.0, options.tune),
            (FIT_CACHE, 8.0, fits_cache),
            (SCORE_HEADS, 5.5, fits_cache),
            (COMPARE, 40.0, has_tokenizer and options.quality),
            (PREDICT, 100.0, has_tokenizer and (options.predict or options.predict_with)),
        )
        if included
    }


def _by_layer(progress: Progress, layers: int) -> Callable[[str], None]:
    """Returns a callback that reports which layer a written weight belongs to, by its name.

    Layers cost about the same, and tables beside them little for their bytes.
    """

    def report(name: str) -> None:
        if (layer := _LAYER.search(name)) is None:
            progress(0, layers, "")
        else:
            number = int(layer[1])
            progress(number + 0.5, layers, f"{WRITE}, layer {number + 1} of {layers}")

    return report


def _return_large_arrays() -> None:
    """Returns the memory of freed arrays to the system at once; does nothing without glibc.

    Otherwise glibc keeps arrays of up to 32 MiB in the heap of every thread, a fifth of an export's
    peak.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _write_files(
    partial: Path,
    name: str,
    model: OpenModel,
    layout: Layout | None,
    options: ExportOptions,
    on_weight: Callable[[str], None],
) -> dict[str, FileInfo]:
    """Writes all files but the manifest; `on_weight` gets the name of each written weight."""
    graph_bytes = 0 if layout is None else layout.num_bytes
    gguf_bytes = 0 if model.gguf is None else model.gguf.disk_bytes
    require_space(partial, graph_bytes + gguf_bytes + _SLACK_BYTES)
    files = _write_texts(partial, model)
    if layout is not None:
        with _reader(model, layout, options) as reader:
            files |= write_model(
                partial,
                model.original.config,
                layout,
                reader,
                lambda _, __, name: on_weight(name),
            )
    if model.gguf is not None:
        model.gguf.write(partial, name, on_weight)
        files[GGUF_FILE] = _file_info(partial / GGUF_FILE)
    return files


@contextmanager
def _reader(model: OpenModel, layout: Layout, options: ExportOptions) -> Generator[WeightReader]:
    """Yields a reader that rounds with error feedback, or each weight by itself.

    The latter where there is no text, at 8 bits, which lose next to nothing, and where no matrix of
    the layers is rounded at all.
    """
    original, weights, threads = model.original, layout.format, options.threads
    all_kept = all(
        original.checkpoint.kept_blocks(source, layout.matrices[name].format) is not None
        for name, source in original.sources.items()
        if name in layout.matrices and name not in TABLES
    )
    if model.tokenizer is None or not options.feedback or _rounds_plainly(weights) or all_kept:
        columns, sources = _column_importance(model, layout), {**original.sources, **model.draft}
        yield CheckpointWeights(original.checkpoint, sources, threads, columns)
        return
    segments = calibration_segments(model.tokenizer, original.config, options.calibration_text)
    calibrated = CalibratedWeights(original, layout.matrices, segments, threads, model.draft)
    with closing(calibrated) as reader:
        yield reader


def _column_importance(model: OpenModel, layout: Layout) -> Mapping[str, np.ndarray]:
    """Returns the importance of matrices' columns, and warns of what the file and the model lack.

    Tables are not missed: llama.cpp measures the head only if it is told to, and no embedding.
    """
    original, importance = model.original, model.importance
    if importance is None:
        return {}
    rounded = original.sources.keys() & layout.matrices.keys() - {*TABLES, *importance.columns}
    kept = original.checkpoint.kept_blocks
    lacking = [
        name
        for name in rounded
        if kept(original.sources[name], layout.matrices[name].format) is None
    ]
    if lacking or importance.unknown:
        logger.warning(
            "%s says nothing of %d matrices, whose columns count alike, and has %d names that are "
            "of no matrix of this model",
            importance.file,
            len(lacking),
            importance.unknown,
        )
    return importance.columns


def _manifest(
    name: str,
    model: OpenModel,
    layout: Layout | None,
    options: ExportOptions,
    files: Mapping[str, FileInfo],
) -> Manifest:
    """Returns a manifest of all that is known before the written model is run."""
    control = _control_tokens(model)
    return Manifest(
        name=name,
        config=model.original.config,
        weights=None if layout is None else weight_info(layout),
        gguf=None if model.gguf is None else model.gguf.info,
        kv=options.kv,
        files=files,
        eos_token_ids=control.eos,
        tokens=control.to_json(),
        sampling=model.source.sampling(),
        source=model.source.describe() | _type_report(model, layout),
        policy=options.policy,
        embedding=None if layout is None else model.embedding,
    )


def _check_prediction(model: OpenModel, options: ExportOptions) -> None:
    """Raises `UsageError` for maps that this model cannot have."""
    config, predict = model.original.config, options.predict
    if predict is None and options.predict_with is None:
        return
    layers, why = config.num_layers, None
    if config.norm != "rms" or any(layer.norms == "after" for layer in config.layers):
        why = (
            "fitted to what an RMS norm before a layer gives it, and a layer of "
            f"{config.model_type} has none"
        )
    elif not config.uniform:
        why = (
            f"of models whose layers are alike, and some of {config.model_type} differ in heads, "
            "read others' keys or convolve"
        )
    elif model.tokenizer is None:
        why = "fitted to a text, and a checkpoint without tokenizer.json reads none"
    if why is not None:
        raise UsageError(f"{argument('predict')} is {why}; leave it out")
    if predict is not None and not 1 <= (1 if predict == "auto" else int(predict)) < layers:
        raise UsageError(
            about="predict",
            value=predict,
            possible=f"1 to {layers - 1} of this model's {layers} "
            "layers can be computed while the others are predicted",
        )


def _check_widths(layout: Layout | None, weights: WeightFormat) -> None:
    """Raises `UsageError` where no matrix can have as few bits as are asked for."""
    if layout is None or weights.mixed or weights.bits >= min(WIDTHS):
        return
    layers = [form for name, form in layout.matrices.items() if name not in TABLES]
    if all(form.bits != weights.bits for form in layers):
        columns = ", ".join(map(str, sorted({form.columns for form in layers})))
        raise UsageError(
            f"codes of {weights.bits} bits are of super-blocks, and {SUPER_BLOCK} divides the "
            f"columns of no matrix ({columns}); choose {argument('bits')} {min(WIDTHS)} or more"
        )


def _check_torch() -> None:
    """Raises `BackendError` where torch is missing."""
    if find_spec("torch") is None:
        raise BackendError(
            f'{argument("tune")} needs torch: pip install "kvq-runtime[train]"; or leave it out'
        )


def _check_tuning(model: OpenModel, options: ExportOptions) -> None:
    """Raises `UsageError` or `UnsupportedModelError` for constants that cannot be trained."""
    if not options.tune:
        return
    if model.tokenizer is None:
        raise UsageError(
            f"{argument('tune')} reads texts, and a checkpoint without tokenizer.json reads none; "
            "leave it out"
        )
    weights = options.weights
    if weights is not None and any(
        form.grid not in (Grid.SYMMETRIC, Grid.ZERO_POINT) for form in weights.overrides.values()
    ):
        raise UsageError(
            f"{argument('tune')} trains what an export rounds, and blocks of this file are kept "
            f"as they are; leave it out, or ask for {argument('bits')}"
        )
    from kvq_export.fit import tuning

    tuning.check_tunable(model.original.config)


def _rounds_plainly(weights: WeightFormat) -> bool:
    """Tells whether every weight is rounded by itself, which at 8 bits loses next to nothing."""
    return weights.bits == max(WIDTHS)


def _weight_format(model: OpenModel, options: ExportOptions) -> WeightFormat:
    """Returns the format that the options ask for, or else the source."""
    weights = options.weights
    if weights is None:
        weights = model.source.weight_format(model.original.checkpoint, model.original.sources)
        # Widths are mixed by a measurement on a text; without one all matrices get the same.
        if weights.mixed and (model.tokenizer is None or not options.feedback):
            weights = WeightFormat()
    if options.tune:
        # Constants that are trained are those of blocks.
        weights = replace(weights, block=weights.block or BLOCK)
    return weights


def _mix_widths(
    model: OpenModel, weights: WeightFormat, options: ExportOptions, phases: Phases
) -> WeightFormat:
    """Returns the format with one of its own for every matrix, where widths are mixed."""
    if not (weights.mixed and options.onnx):
        return weights
    if model.tokenizer is None:
        raise UsageError(
            "which matrices are worth more bits is measured on a text, and a checkpoint without "
            f"tokenizer.json reads none; choose {argument('bits')} 3, 4, 5, 6 or 8"
        )
    original = model.original
    segments = calibration_segments(model.tokenizer, original.config, options.calibration_text)
    progress = phases.of(FIND_WIDTHS)
    return replace(
        weights, overrides=mixed_formats(original, segments, weights, options.threads, progress)
    )


def _measure_bundle(
    manifest: Manifest,
    model: OpenModel,
    partial: Path,
    options: ExportOptions,
    phases: Phases,
) -> Manifest:
    """Runs the written model and returns the manifest with what that tells.

    Without a tokenizer nothing is measured.
    """
    if model.tokenizer is None:
        return manifest
    if options.calibrate and options.fit_cache and options.onnx:
        manifest = fit_pages(
            partial, manifest, model.tokenizer, options.threads, phases.of(FIT_CACHE)
        )
        manifest = score_heads(partial, manifest, model.tokenizer, phases.of(SCORE_HEADS))
        write_manifest(partial, manifest)
    if options.quality:
        report = _measure(model, model.tokenizer, partial, options, phases.of(COMPARE))
        manifest = replace(manifest, quality=report)
    if options.predict is None and options.predict_with is None:
        return manifest
    progress = phases.of(PREDICT)

    def step(label: str) -> None:
        progress(0, 1, label)

    if options.predict is not None:
        manifest = prediction.add_maps(
            partial, manifest, options.predict, model.tokenizer, options.threads, step
        )
    if options.predict_with is not None:
        path, tokenizer = options.predict_with, model.tokenizer
        manifest = auxiliary.add_maps(partial, manifest, path, tokenizer, options.threads, step)
    return manifest


def fit_cache(folder: Path, threads: int, progress: Progress = no_progress) -> None:
    """Measures how the cache of a bundle is stored best, unless its export has done so.

    An interrupt leaves the bundle whole: what is measured counts once the manifest says so.

    Args:
        folder: The bundle, whose manifest is replaced.
        threads: How many threads compute.
        progress: Hears how far it is.

    Raises:
        BundleError: There is no bundle, or it is damaged.
        ModelError: It lacks a graph or a tokenizer.
    """
    bundle = Bundle.open(folder)
    if bundle.manifest.forms:
        return
    tokenizer = bundle.tokenizer()
    if not bundle.has_onnx or tokenizer is None:
        raise ModelError(f"{folder} has no graph, or no tokenizer to read a text with")
    manifest = fit_pages(folder, bundle.manifest, tokenizer, threads, progress)
    manifest = score_heads(folder, manifest, tokenizer, progress)
    write_manifest(folder, manifest)


def open_model(source: Source, options: ExportOptions) -> OpenModel:
    """Opens a model and refuses what cannot be exported, before the first byte is written."""
    family, config, config_json = source.config()
    # Raises for a model whose keys and values the cache cannot hold.
    _ = config.cache_classes
    checkpoint = source.checkpoint(config)
    config = family.with_draft_head(config, checkpoint.tensors)
    embedding = source.embedding()
    if options.embed is not None:
        embedding = replace(embedding or TextEmbedding(), pooling=options.embed)
    if embedding is not None:
        # Without a head it was saved for its vectors alone, and any logits do.
        tied = config.tied_head or HEAD not in checkpoint.tensors
        config = replace(config, states=True, tied_head=tied)
    if (reason := family.why_no_draft_head(checkpoint.tensors)) is not None:
        logger.warning("the draft head of %s (mtp) is left out: %s", source.name, reason)
    sources, draft = source.weight_sources(family, config), family.draft_weights(config)
    checkpoint.check({**sources, **draft}, family.spare(config))
    files, tokenizer = None, None
    if options.tokenizer:
        files, tokenizer = _read_tokenizer(source.tokenizer_files(), family, config)
    file = options.importance
    importance = None if file is None else read_importance(file, config)
    model = OpenModel(
        source=source,
        original=Original(config=config, sources=sources, checkpoint=checkpoint),
        draft=draft,
        tokenizer=tokenizer,
        files=files,
        gguf=None,
        embedding=embedding,
        importance=importance,
    )
    if not options.gguf:
        return model
    values = read_keys(family.model_type, family.keys, config_json)
    ropes: dict[str, Any] = values["rope_parameters"] or {}
    settings = rope_settings(values, parameters=ropes.get("full_attention"))
    gguf = GgufExport(
        model=gguf_model(config, settings),
        checkpoint=checkpoint,
        sources=sources,
        options=options,
        vocabulary=None
        if files is None or tokenizer is None
        else read_vocabulary(files, tokenizer, family, config.vocab_size),
        license=source.licence,
    )
    gguf.check()
    return replace(model, gguf=gguf)


def _read_tokenizer(
    files: TokenizerFiles, family: Family, config: ModelConfig
) -> tuple[TokenizerFiles, Tokenizer]:
    """Returns the tokenizer of the tokens that the model has, and its files."""
    tokenizer = Tokenizer.from_files(files, family, config)
    model_files = without_spare_tokens(files, tokenizer, config.vocab_size)
    if model_files is not files:
        tokenizer = Tokenizer.from_files(model_files, family, config)
    return model_files, tokenizer


def _control_tokens(model: OpenModel) -> ControlTokens:
    """Returns the control tokens of the tokenizer, or those of config.json without one."""
    if model.tokenizer is not None:
        return model.tokenizer.control
    config = model.original.config
    return ControlTokens(bos=config.bos_token_id, eos=config.eos_token_ids)


def _write_texts(folder: Path, model: OpenModel) -> dict[str, FileInfo]:
    """Writes the tokenizer's files; returns their sizes and hashes."""
    if model.files is None:
        return {}
    (folder / TOKENIZER_FILE).write_bytes(model.files.definition.encode())
    names = [TOKENIZER_FILE]
    if model.files.chat_template is not None:
        (folder / TEMPLATE_FILE).write_text(model.files.chat_template, encoding="utf-8")
        names.append(TEMPLATE_FILE)
    return {name: _file_info(folder / name) for name in names}


def _file_info(file: Path) -> FileInfo:
    return FileInfo(num_bytes=file.stat().st_size, sha256=file_sha256(file))


def _measure(
    model: OpenModel,
    tokenizer: Tokenizer,
    folder: Path,
    options: ExportOptions,
    progress: Progress,
) -> Mapping[str, Any]:
    bundle = Bundle.open(folder, verify="size")
    texts = report_texts(tokenizer, bundle.config)
    report: dict[str, Any] = {"text": "prose, code, chats", "tokens": texts.size}
    if bundle.has_onnx:
        with quality.engine_run(bundle, options.threads) as run:
            report |= quality.measure(model.original.logits, options.kv, run, texts, progress)
    if model.gguf is not None:
        # Beyond this context llama.cpp computes another model where it has no window.
        ids = texts[0, : model.gguf.model.context_length]
        gguf_report = quality.measure_gguf(model.original, folder / GGUF_FILE, ids, options.threads)
        report["gguf"] = {"type": options.gguf_type} | gguf_report
    return report


def _type_report(model: OpenModel, layout: Layout | None) -> dict[str, Any]:
    """Counts the file's tensors by type, and by the formats that they got.

    `kept` counts those whose codes the bundle has.
    """
    if layout is None:
        return {}
    original, types = model.original, dict[str, Any]()
    for name, source in original.sources.items():
        form = layout.matrices.get(name)
        format_name = "float32" if form is None else str(form.format)
        tensors = [original.checkpoint.tensors[part] for part in source.parts]
        grids = [tensor.grid for tensor in tensors]
        kept = form is None or all(grid and keeps(form.format, grid) for grid in grids)
        for tensor in tensors:
            row = types.setdefault(tensor.dtype, {"tensors": 0, "kept": 0, "formats": {}})
            row["tensors"] += 1
            row["kept"] += kept
            row["formats"][format_name] = row["formats"].get(format_name, 0) + 1
    return {"types": types}
