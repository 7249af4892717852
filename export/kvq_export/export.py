"""The export itself: checkpoint in, bundle out, in the order things must happen.

Owns no format: reading, quantising, the graph, the manifest and the comparison with the original
each have their own module.
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import BackendError, CheckpointError, UsageError, argument
from kvq.reference_linear import WIDTHS, Grid
from kvq_export import auxiliary, eight_bits, prediction, quality
from kvq_export.calibrated import (
    ENDS,
    CalibratedWeights,
    calibration_segments,
    report_texts,
)
from kvq_export.checkpoint import holds
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.damage import mixed_formats
from kvq_export.gguf_export import GgufExport
from kvq_export.gguf_model import gguf_model
from kvq_export.gguf_vocabulary import read_vocabulary
from kvq_export.hub_files import unseen
from kvq_export.layout import Layout, plan_layout
from kvq_export.page_forms import fit_pages
from kvq_export.quality import Original
from kvq_export.retrieval import score_heads
from kvq_export.source import Source, open_source
from kvq_export.staging import free_destination, require_space, staged
from kvq_export.writer import (
    CheckpointWeights,
    ClosingReader,
    Progress,
    WithDraftHead,
    weight_info,
    write_manifest,
    write_model,
)
from kvq_models.decoder import rope_settings
from kvq_models.family import WeightSource
from kvq_models.keys import read_keys
from kvq_models.tokenizer import ControlTokens, Tokenizer, TokenizerFiles
from kvq_runtime.bundle import Bundle
from kvq_runtime.file_hashes import file_sha256
from kvq_runtime.manifest import GGUF_FILE, TEMPLATE_FILE, TOKENIZER_FILE, FileInfo, Manifest

logger = logging.getLogger(__name__)

# Room for the graph and the manifest beside the weights.
_SLACK_BYTES = 4 << 20
# Of what is freed glibc gives back at once what is this large (`_return_large_arrays`), by the
# number that `mallopt` knows it by.
_LARGE_BYTES, _M_MMAP_THRESHOLD = 4 << 20, -3


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """Everything known about the model before its weights are read; `draft` of its draft head."""

    source: Source
    original: Original
    draft: Mapping[str, WeightSource]
    tokenizer: Tokenizer | None
    files: TokenizerFiles | None
    gguf: GgufExport | None


def export_model(
    source: str | Path,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: Progress = unseen,
) -> Bundle:
    """Exports the model `source` (a folder, a GGUF file or a hub id) to the folder `destination`.

    `progress` is called with bytes done, bytes in total and what is being done. Raises
    `ModelError` for the checkpoint and `BundleError` for the destination; then, and when it is
    interrupted, nothing is left behind.
    """
    options = options or ExportOptions()
    _return_large_arrays()
    folder = Path(destination).expanduser()
    name = options.name or folder.name
    # Before the long work, and once more when it is done.
    free_destination(folder, force=options.force)
    if options.tune:
        _check_torch()
    model = open_model(open_source(source, progress), options)
    weights = _weight_format(model, options, progress)
    options = replace(options, weights=weights)
    _check_prediction(model, options)
    _check_tuning(model, options)
    original = model.original
    sources = {**original.sources, **model.draft}
    layout = plan_layout(original.config, sources, weights) if options.onnx else None
    total = _graph_bytes(layout) + (0 if model.gguf is None else model.gguf.written_bytes)
    with staged(folder, force=options.force) as partial:
        files = _write_files(
            partial, name, model, layout, options,
            lambda done, label: progress(done, total, label),
        )  # fmt: skip
        manifest = _manifest(name, model, layout, options, files)
        write_manifest(partial, manifest)
        manifest, gained = _tuned(manifest, model, partial, layout, options, progress)
        manifest = _measured(manifest, model, partial, options, progress)
        if gained is not None:
            manifest = replace(manifest, quality={**(manifest.quality or {}), "tuning": gained})
        write_manifest(partial, manifest)
    return Bundle.open(folder)


def _return_large_arrays() -> None:
    """Has arrays' memory go back to the system when they are freed; nothing but glibc hears it.

    Left to itself, that keeps arrays of up to 32 MiB for later in the heap of every thread: a fifth
    of what an export of half a billion parameters took at its peak.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _graph_bytes(layout: Layout | None) -> int:
    """What the graph's weights take; none without a graph."""
    return 0 if layout is None else layout.num_bytes


def _write_files(
    partial: Path,
    name: str,
    model: OpenModel,
    layout: Layout | None,
    options: ExportOptions,
    progress: Callable[[int, str], None],
) -> dict[str, FileInfo]:
    """Writes all but the manifest; `progress` is told the bytes of weights that are written."""
    before = _graph_bytes(layout)
    disk_bytes = before + (0 if model.gguf is None else model.gguf.disk_bytes)
    require_space(partial, disk_bytes + _SLACK_BYTES)
    files = _write_texts(partial, model)
    if layout is not None:
        with closing(_reader(model, layout, options)) as reader:
            files |= write_model(
                partial,
                model.original.config,
                layout,
                reader,
                lambda done, _, what: progress(done, what),
            )
    if model.gguf is not None:
        model.gguf.write(partial, name, lambda done, _, what: progress(before + done, what))
        files[GGUF_FILE] = _file_info(partial / GGUF_FILE)
    return files


def _reader(model: OpenModel, layout: Layout, options: ExportOptions) -> ClosingReader:
    """Those of the model, and of its draft head, whose guesses are checked: each by itself."""
    reader = _model_reader(model, layout, options)
    if not model.draft:
        return reader
    draft = CheckpointWeights(model.original.checkpoint, model.draft, options.threads)
    return WithDraftHead(reader, draft)


def _model_reader(model: OpenModel, layout: Layout, options: ExportOptions) -> ClosingReader:
    """Rounds with error feedback where there is a text to feed, else every weight by itself.

    So too at 8 bits, which lose next to nothing, and where none of the layers is rounded.
    """
    original, weights = model.original, layout.format
    plain = weights.linear == "ort" or weights.bits == max(WIDTHS)
    kept = all(
        original.checkpoint.stored(original.sources[name], form.format) is not None
        for name, form in layout.matrices.items()
        if name not in ENDS
    )
    if model.tokenizer is None or not options.calibrate or plain or kept:
        return CheckpointWeights(original.checkpoint, original.sources, options.threads)
    segments = calibration_segments(model.tokenizer, original.config, options.calibration_text)
    return CalibratedWeights(original, layout.matrices, segments, options.threads)


def _manifest(
    name: str,
    model: OpenModel,
    layout: Layout | None,
    options: ExportOptions,
    files: Mapping[str, FileInfo],
) -> Manifest:
    """What is known before the written model is run."""
    control = control_tokens(model)
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
        source=model.source.describe() | _became(model, layout),
        policy=options.policy,
    )


def _check_prediction(model: OpenModel, options: ExportOptions) -> None:
    """Raises `UsageError` for maps that this model cannot have."""
    config, asked = model.original.config, options.predict
    layers = config.num_layers
    plain = config.norm == "rms" and all(one.norms != "after" for one in config.layers)
    if (asked or options.predict_with) and not plain:
        raise UsageError(
            f"{argument('predict')} is fitted to what an RMS norm before a layer gives it, and a "
            f"layer of {config.model_type} has none; leave it out"
        )
    if (asked or options.predict_with) and not config.uniform:
        raise UsageError(
            f"{argument('predict')} is of models whose layers are alike, and some of "
            f"{config.model_type} differ in heads, read others' keys or convolve; leave it out"
        )
    if model.tokenizer is None and (asked or options.predict_with):
        raise UsageError(
            f"{argument('predict')} is fitted to a text, and a checkpoint without tokenizer.json "
            "reads none; leave it out"
        )
    if asked is not None and not 1 <= (1 if asked == "auto" else int(asked)) < layers:
        raise UsageError(
            about="predict",
            value=asked,
            possible=f"1 to {layers - 1} of this model's {layers} "
            "layers can be computed while the others are predicted",
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
        form.grid in (Grid.MINIMUM, Grid.E2M1) for form in weights.others.values()
    ):
        raise UsageError(
            f"{argument('tune')} trains what an export rounds, and blocks of this file are kept "
            f"as they are; leave it out, or ask for {argument('bits')}"
        )
    from kvq_export import tuning

    tuning.check_tunable(model.original.config)


def _tuned(
    manifest: Manifest,
    model: OpenModel,
    partial: Path,
    layout: Layout | None,
    options: ExportOptions,
    progress: Progress,
) -> tuple[Manifest, dict[str, Any] | None]:
    """The manifest of the trained weights, where that was asked for and gained, and what it did."""
    if not options.tune:
        return manifest, None
    assert layout is not None
    assert model.tokenizer is not None
    from kvq_export import tuning

    return tuning.tuned(
        partial, manifest, layout, model.original, model.tokenizer, options, progress
    )


def _weight_format(model: OpenModel, options: ExportOptions, progress: Progress) -> WeightFormat:
    """What the options ask for, with the names of the matrices that are kept wide."""
    weights, original = options.weights, model.original
    if weights is None:
        weights = model.source.weight_format(original.checkpoint, original.sources)
        # Without a text to measure on, or the wish to, a mix of widths becomes one.
        if weights.mixed and (model.tokenizer is None or not options.calibrate):
            weights = WeightFormat()
    if not (weights.mixed and options.onnx):
        return weights
    if model.tokenizer is None:
        raise UsageError(
            "which matrices are worth more bits is measured on a text, and a checkpoint without "
            f"tokenizer.json reads none; choose {argument('bits')} 4, 5, 6 or 8"
        )
    segments = calibration_segments(model.tokenizer, original.config, options.calibration_text)
    return replace(
        weights, others=mixed_formats(original, segments, weights, options.threads, progress)
    )


def _measured(
    manifest: Manifest,
    model: OpenModel,
    partial: Path,
    options: ExportOptions,
    progress: Progress,
) -> Manifest:
    """The manifest with what running the written model tells; without a tokenizer, nothing."""
    if model.tokenizer is None:
        return manifest

    def step(label: str) -> None:
        progress(1, 1, label)

    if options.calibrate and options.onnx:
        step("how pages are best encoded")
        manifest = fit_pages(partial, manifest, model.tokenizer, options.threads)
        step("which heads look far back")
        manifest = score_heads(partial, manifest, model.tokenizer)
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


def open_model(source: Source, options: ExportOptions) -> OpenModel:
    """Refuses what cannot be exported before the first byte is written."""
    family, config, config_json = source.config()
    # Evaluated for its refusals: the cache must be able to hold this model.
    _ = config.cache_classes
    checkpoint = source.checkpoint(config)
    config = family.with_draft_head(config, checkpoint.tensors)
    if (reason := family.why_no_draft_head(checkpoint.tensors)) is not None:
        logger.warning("the draft head of %s (mtp) is left out: %s", source.name, reason)
    sources, draft = source.weight_sources(family, config), family.draft_weights(config)
    checkpoint.check({**sources, **draft}, family.spare(config))
    files = source.tokenizer_files() if options.tokenizer else None
    tokenizer = None if files is None else Tokenizer.from_files(files, family, config)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"tokenizer.json names {tokenizer.vocab_size} tokens, config.json gives the model "
            f"{config.vocab_size}; they do not belong together"
        )
    model = OpenModel(
        source=source,
        original=Original(config=config, sources=sources, checkpoint=checkpoint),
        draft=draft,
        tokenizer=tokenizer,
        files=files,
        gguf=None,
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


def control_tokens(model: OpenModel) -> ControlTokens:
    """Those of its tokenizer, or what config.json says without one."""
    if model.tokenizer is not None:
        return model.tokenizer.control
    config = model.original.config
    return ControlTokens(bos=config.bos_token_id, eos=config.eos_token_ids)


def _write_texts(folder: Path, model: OpenModel) -> dict[str, FileInfo]:
    """The tokenizer's files, with size and hash."""
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
    step: Callable[[str], None],
) -> Mapping[str, Any]:
    bundle = Bundle.open(folder, verify="size")
    texts = report_texts(tokenizer, bundle.config)
    report: dict[str, Any] = {"text": "prose, code, chats", "tokens": texts.size}
    if bundle.has_onnx:
        with quality.engine_run(bundle, options.threads) as run:
            wide = _at_8_bits(model, bundle, texts, step)
            report |= quality.measure(model.original.logits, options.kv, run, texts, step, wide)
    if model.gguf is not None:
        step("what the GGUF file loses")
        # Beyond its context llama.cpp computes something else where it has no window.
        within = texts[0, : model.gguf.model.context_length]
        found = quality.measure_gguf(model.original, folder / GGUF_FILE, within, options.threads)
        report["gguf"] = {"type": options.gguf_type} | found
    return report


def _at_8_bits(
    model: OpenModel, bundle: Bundle, texts: np.ndarray, step: Callable[[str], None]
) -> dict[int, np.ndarray] | None:
    """The likeliest tokens with 8 bits of every second text, where any matrix has fewer."""
    weights = bundle.manifest.weights
    if weights is None or all(form.bits == max(WIDTHS) for form in weights.formats.values()):
        return None
    step("what 8 bits would keep")
    found = eight_bits.likeliest_tokens(model.original, texts[::2])
    return dict(zip(range(0, len(texts), 2), found, strict=True))


def _became(model: OpenModel, layout: Layout | None) -> dict[str, Any]:
    """Of each type of the file's tensors how many there are, and how many got which format.

    `exact` counts those whose very weights the bundle has, `kept` those whose codes it has.
    """
    if layout is None:
        return {}
    original, types = model.original, dict[str, Any]()
    for name, source in original.sources.items():
        form = layout.matrices.get(name)
        spelled = "float32" if form is None else str(form.format)
        tensors = [original.checkpoint.tensors[part] for part in source.parts]
        kept = form is None or all(one.grid and holds(form.format, one.grid) for one in tensors)
        for tensor in tensors:
            row = types.setdefault(
                tensor.dtype, {"tensors": 0, "kept": 0, "exact": 0, "formats": {}}
            )
            row["tensors"] += 1
            row["kept"] += kept
            row["exact"] += kept and tensor.exact and source.scale == 1
            row["formats"][spelled] = row["formats"].get(spelled, 0) + 1
    return {"types": types}
