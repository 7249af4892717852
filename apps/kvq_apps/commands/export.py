"""`kvq export`: turn a Hugging Face checkpoint or a GGUF file into a bundle."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError, argument
from kvq.formats import format_bytes
from kvq_apps import flags, options, output, text_input
from kvq_runtime.gguf_format import SUFFIX

if TYPE_CHECKING:
    from kvq_export.config import ExportOptions, WeightFormat
    from kvq_runtime.bundle import Bundle


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq export`."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="CHECKPOINT",
        help="folder with config.json and safetensors, a GGUF file, a hub id such as "
        "Qwen/Qwen3-0.6B, or an embedded model: default, nano",
    )
    flags.add_flags(
        parser,
        "out", "format", "gguf-type", "wbits", "size", "group", "embedding-bits", "linear",
        "kbits", "vbits", "kv",
        "kv-policy", *flags.PREDICT_FLAGS, "no-quality", "calibrate", "no-calibrate", "tune",
        "force",
        "threads", "offline",
        kbits="bits of cached keys the bundle asks for: 8, 6, 4 or 2 "
        "(default: {kvq.config:KvPlan.k_bits})",
        vbits="bits of cached values the bundle asks for: 8, 6, 4 or 2 "
        "(default: {kvq.config:KvPlan.v_bits})",
        tune="train scales, zero points and norms until the bundle answers more like the "
        "checkpoint: minutes, and needs torch (pip install \"kvq-runtime[train]\")",
        kv_predict="fit what predicts prompts' later keys and values from so many first layers; "
        "auto: the fewest that lose little, by measurement",
        kv_predict_with="fit what makes keys and values of prompts from those of this smaller "
        "model",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if not arguments.source:
        raise UsageError(
            "CHECKPOINT is missing; give a checkpoint folder, a GGUF file, a hub id, default or "
            "nano"
        )
    _refuse_unused(arguments)
    destination = Path(arguments.out or f"{_name(arguments.source)}-kvq")

    from kvq_apps import known_models
    from kvq_apps.model_path import resolve_checkpoint
    from kvq_export.export import export_model

    export_options = _export_options(arguments)
    source = resolve_checkpoint(arguments.source)
    since = perf_counter()
    with output.Progress(quiet=arguments.json and not sys.stderr.isatty()) as progress:
        bundle = export_model(source, destination, export_options, progress)
        if bundle.manifest.quality is not None and bundle.has_onnx:
            progress(1, 1, "which way to write several drafts is best")
            bundle = _with_drafts(bundle, export_options.threads)
    known_models.remember(bundle.path, made=True)
    report = _report(bundle, perf_counter() - since)
    if arguments.json:
        output.print_json(report)
    else:
        _print(bundle, report, arguments.source)
    return 0


def _export_options(arguments: Namespace) -> "ExportOptions":
    """What the flags ask for."""
    from kvq.config import KvPlan
    from kvq_apps.model_path import resolve_model
    from kvq_export.config import ExportOptions
    from kvq_runtime.tuning import default_threads

    weights = options.given(
        arguments,
        wbits="wbits",
        size="size",
        block="group",
        embedding_bits="embedding-bits",
        linear="linear",
    )
    reader = arguments.kv_predict_with
    return ExportOptions(
        **options.given(
            arguments,
            format="format",
            gguf_type="gguf-type",
            policy="kv-policy",
            predict="kv-predict",
        ),
        predict_with=None if reader is None else resolve_model(reader),
        weights=_weight_format(weights) if weights else None,
        kv=KvPlan(**options.kv_bits(arguments)),
        force=arguments.force,
        quality=not arguments.no_quality,
        calibrate=not arguments.no_calibrate,
        calibration_text=_calibration_text(arguments),
        tune=bool(arguments.tune),
        threads=default_threads() if arguments.threads is None else arguments.threads,
    )


def _weight_format(asked: dict[str, Any]) -> "WeightFormat":
    """What the flags of the weights ask for. Raises `UsageError` for two that contradict."""
    from kvq.config import parse_bytes
    from kvq_export.config import WeightFormat

    bits, size = asked.pop("wbits", None), asked.pop("size", None)
    if size is not None:
        if bits is not None:
            raise UsageError(
                f"{argument('--size')} finds the widths itself; leave {argument('--wbits')} out"
            )
        asked["size_bytes"] = parse_bytes("--size", size)
    elif bits is None and not {"embedding_bits", "linear"} & asked.keys():
        return WeightFormat.recommended(**asked)
    elif bits is not None:
        whole = bits == int(bits)
        asked["bits" if whole else "mean_bits"] = int(bits) if whole else bits
    return WeightFormat(**asked)


def _calibration_text(arguments: Namespace) -> str | None:
    """What the file of --calibrate says; None without it. Raises `KvqError`."""
    if arguments.calibrate is None:
        return None
    if arguments.no_calibrate:
        raise UsageError(
            f"{argument('--calibrate')} FILE and {argument('--no-calibrate')} contradict; leave "
            "one of them out"
        )
    text = text_input.read_text(arguments.calibrate)
    if not text.strip():
        raise UsageError(f"{arguments.calibrate} is empty; {argument('--calibrate')} needs a text")
    return text


def _with_drafts(bundle: "Bundle", threads: int) -> "Bundle":
    """The bundle with the method of several drafts in its report: what `auto` then means."""
    from dataclasses import replace

    from kvq_apps.evaluation.several import candidates_compared
    from kvq_export.quality import quality_text
    from kvq_export.writer import write_manifest
    from kvq_runtime.named_engine import Engine

    with Engine(bundle, threads=threads) as engine:
        found = candidates_compared(engine, engine.writer, quality_text())
    quality = {**(bundle.manifest.quality or {}), "drafts": found}
    bundle = replace(bundle, manifest=replace(bundle.manifest, quality=quality))
    write_manifest(bundle.path, bundle.manifest)
    return bundle


def _refuse_unused(arguments: Namespace) -> None:
    """Flags of a file that is not written would be ignored."""
    chosen = arguments.format or "onnx"
    kind = arguments.gguf_type or "q4_k_m"
    unused: dict[str, str] = {}
    if chosen == "onnx":
        unused["gguf-type"] = "is of the GGUF file; add --format gguf or both"
    if chosen == "gguf":
        unused |= dict.fromkeys(
            ("wbits", "size", "group", "linear"),
            "is of the ONNX graph; choose --gguf-type, or --format both",
        )
        if kind != "q4_0":
            unused["embedding-bits"] = (
                f"changes nothing in a GGUF file of type {kind}, only in q4_0"
            )
    for flag, why in unused.items():
        if options.given(arguments, value=flag):
            raise UsageError(f"{argument(f'--{flag}')} {why}")


def _name(source: str) -> str:
    """Last part of a folder's path or a hub id; a file's without its suffix."""
    if Path(source).suffix == SUFFIX:
        return Path(source).stem
    return Path(source).resolve().name if Path(source).is_dir() else source.rsplit("/", 1)[-1]


def _report(bundle: "Bundle", seconds: float) -> dict[str, Any]:
    manifest = bundle.manifest.to_json()
    files = manifest["files"]
    return {
        "path": str(bundle.path),
        "seconds": seconds,
        "bytes": sum(file["bytes"] for file in files.values()),
        **{
            key: manifest[key]
            for key in (
                "name",
                "model_type",
                "weights",
                "gguf",
                "kv",
                "quality",
                "prediction",
                "auxiliary",
                "source",
                "files",
            )
        },
    }


def _prediction_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What predicting after so many layers costs, of all that were tried."""
    quality: dict[str, Any] = report["quality"] or {}
    found = report["prediction"] or quality.pop("prediction", None)
    if found is None:
        return _auxiliary_rows(report["auxiliary"])
    rows = [
        (
            f"predicted after layer {row['layers']}",
            f"{row['fitted']['nll']:.3f} nats a token ({row['own']['nll']:.3f} without maps), "
            f"computed {row['exact_nll']:.3f}, no prompt {row['no_prompt_nll']:.3f}; KLD "
            f"{row['fitted']['kld']:.3f}",
        )
        for row in found["rows"]
    ]
    chosen = found.get("layers")
    kept = f"after layer {chosen}" if chosen else f"none: all lose over {found['limit_nats']} nats"
    fitted = f"{found['fit_tokens']} tokens, {format_bytes(found['fit_peak_bytes'])} at most"
    rows += [("maps kept", kept), ("maps fitted to", fitted)]
    return rows + _auxiliary_rows(report["auxiliary"])


def _auxiliary_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What it costs where a smaller model reads prompts."""
    if found is None:
        return []
    return [
        (
            f"prompts read by {found['name']}, rule {rule}",
            f"{row['nll']:.3f} nats a token, computed {row['exact_nll']:.3f}, no prompt "
            f"{row['no_prompt_nll']:.3f}, {found['name']} alone {found['alone_nll']:.3f}; KLD "
            f"{row['kld']:.3f}",
        )
        for rule, row in found["rules"].items()
    ]


def _print(bundle: "Bundle", report: dict[str, Any], source: str) -> None:
    kv, predicted = report["kv"], _prediction_rows(report)
    rows = [
        ("bundle", report["path"]),
        ("model", f"{report['name']} ({report['model_type']})"),
        *output.weight_rows(report),
        *_type_rows(report["source"].get("types", {})),
        (
            "KV plan",
            f"{output.kv_text(kv['k_bits'], kv['v_bits'])}, {kv['sink_tokens']} sink tokens "
            f"({bundle.config.float_bytes_per_token} bytes per token at 16 bits)",
        ),
        ("KV policy", kv["policy"]),
        *output.verdict_rows(report, source),
        *((f"quality, {key}", value) for key, value in output.flat(report["quality"] or {})),
        *predicted,
        ("total", f"{format_bytes(report['bytes'])} in {report['seconds']:.1f} s"),
    ]
    output.print_table(rows)
    output.print_note(f"try: kvq run -m {report['path']} {_example(bundle)}")


def _example(bundle: "Bundle") -> str:
    """What to ask the model first: a question, of one that chats."""
    tokenizer = bundle.tokenizer()
    if tokenizer is None or tokenizer.chat_template is None:
        return "'Once upon a time'"
    return "--chat 'Who are you?'"


def _type_rows(types: dict[str, Any]) -> list[tuple[str, str]]:
    """What became of the tensors of each type of the file it came from."""
    rows: list[tuple[str, str]] = []
    for kind, row in sorted(types.items()):
        formats = ", ".join(f"{count} as {form}" for form, count in row["formats"].items())
        kept = f"; {row['exact']} of them bit for bit" if row["exact"] else ""
        if row["kept"] > row["exact"]:
            kept = f"; {row['kept']} of them code for code"
        rows.append((f"from {kind}", f"{row['tensors']} tensors: {formats}{kept}"))
    return rows
