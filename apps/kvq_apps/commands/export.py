"""`kvq export`: turns a Hugging Face checkpoint or a GGUF file into a bundle."""

import sys
from argparse import ArgumentParser, Namespace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvq.errors import ModelError, UsageError, argument
from kvq.files import path_of
from kvq.formats import format_bytes
from kvq_apps.commands.pull import first_command
from kvq_apps.settings import flags, options
from kvq_apps.terminal import output, text_input
from kvq_runtime.bundle.gguf_format import SUFFIX
from kvq_runtime.bundle.manifest import GGUF_FILE

if TYPE_CHECKING:
    from kvq_export.config import ExportOptions, WeightFormat
    from kvq_runtime.bundle.bundle import Bundle


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq export`."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="CHECKPOINT",
        help="folder with config.json and safetensors, a GGUF file, a hub id such as "
        "Qwen/Qwen3-0.6B, or an embedded model: default, nano",
    )
    flags.add_flags(
        parser,
        "out", "format", "gguf-type", "wbits", "size", "group", "embedding-bits",
        "kbits", "vbits", "kv",
        "kv-policy", *flags.PREDICT_FLAGS, "no-quality", "calibrate", "no-calibrate",
        "tune", "embed", "force",
        "threads", "offline", "verbose",
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

    from kvq_apps.names import known_models
    from kvq_apps.names.model_path import other_meaning, resolve_checkpoint
    from kvq_export.export import export_model

    destination = path_of(arguments.out or f"{_name(arguments.source)}-kvq")
    if known_models.is_ours(destination):
        raise UsageError(
            f"{argument('--out')} {destination} is in a folder where kvq keeps what it pulled and "
            "exported itself; choose another, or `kvq pull` the checkpoint"
        )
    export_options = _export_options(arguments)
    source = resolve_checkpoint(arguments.source)
    since = perf_counter()
    with output.ProgressBar(quiet=arguments.json and not sys.stderr.isatty()) as progress:
        bundle = export_model(source, destination, export_options, progress)
    other = other_meaning(bundle.path)
    known_models.remember(bundle.path, made=other is None)
    report = _report(bundle, perf_counter() - since)
    if arguments.json:
        output.print_json(report)
    else:
        _print(bundle, report, arguments.source, verbose=arguments.verbose)
    if other is not None:
        name, path = known_models.exported_name(bundle.path), bundle.path.resolve()
        output.print_note(f"{name} still means {other}; this bundle is used by its path: -m {path}")
    return 0


def _export_options(arguments: Namespace) -> "ExportOptions":
    from kvq.config import KvPlan
    from kvq_apps.names.model_path import resolve_model
    from kvq_export.config import ExportOptions
    from kvq_runtime.machine.tuning import default_threads

    weights = options.keywords(
        arguments,
        wbits="wbits",
        size="size",
        block="group",
        embedding_bits="embedding-bits",
    )
    reader = arguments.kv_predict_with
    return ExportOptions(
        **options.keywords(
            arguments,
            format="format",
            gguf_type="gguf-type",
            policy="kv-policy",
            predict="kv-predict",
            embed="embed",
        ),
        predict_with=None if reader is None else resolve_model(reader),
        weights=_weight_format(weights) if weights else None,
        kv=KvPlan(**options.kv_bits(arguments)),
        force=arguments.force,
        quality=not arguments.no_quality,
        calibrate=not arguments.no_calibrate,
        **_calibration(arguments),
        tune=bool(arguments.tune),
        threads=default_threads() if arguments.threads is None else arguments.threads,
    )


def _weight_format(values: dict[str, Any]) -> "WeightFormat":
    """Returns the format of the weights. Raises `UsageError` for flags that contradict."""
    from kvq.config import parse_bytes
    from kvq_export.config import WeightFormat

    bits, size = values.pop("wbits", None), values.pop("size", None)
    if size is not None:
        if bits is not None:
            raise UsageError(
                f"{argument('--size')} finds the widths itself; leave {argument('--wbits')} out"
            )
        values["size_bytes"] = parse_bytes("--size", size)
    elif bits is None and "embedding_bits" not in values:
        return WeightFormat.recommended(**values)
    elif bits is not None:
        whole = bits == int(bits)
        values["bits" if whole else "mean_bits"] = int(bits) if whole else bits
    return WeightFormat(**values)


def _calibration(arguments: Namespace) -> dict[str, Any]:
    """Returns the option that the file of `--calibrate` gives. Raises `KvqError`."""
    from kvq_export.gguf.gguf_importance import is_importance

    if arguments.calibrate is None:
        return {}
    if arguments.no_calibrate:
        raise UsageError(
            f"{argument('--calibrate')} FILE and {argument('--no-calibrate')} contradict; leave "
            "one of them out"
        )
    if is_importance(path := path_of(arguments.calibrate)):
        return {"importance": path}
    text = text_input.read_text(arguments.calibrate)
    if not text.strip():
        raise UsageError(f"{arguments.calibrate} is empty; {argument('--calibrate')} needs a text")
    return {"calibration_text": text}


def _refuse_unused(arguments: Namespace) -> None:
    """Raises `UsageError` for flags of a file that is not written."""
    from kvq_export.config import ExportOptions

    defaults = ExportOptions()
    file_format = arguments.format or defaults.format
    kind = arguments.gguf_type or defaults.gguf_type
    unused: dict[str, str] = {}
    if file_format == "onnx":
        unused["gguf-type"] = "is of the GGUF file; add --format gguf or both"
    if file_format == "gguf":
        unused |= dict.fromkeys(
            ("wbits", "size", "group"),
            "is of the ONNX graph; choose --gguf-type, or --format both",
        )
        if kind != "q4_0":
            unused["embedding-bits"] = (
                f"changes nothing in a GGUF file of type {kind}, only in q4_0"
            )
    for flag, why in unused.items():
        if options.keywords(arguments, value=flag):
            raise UsageError(f"{argument(f'--{flag}')} {why}")


def _name(source: str) -> str:
    """Returns the last part of a folder's path or a hub id, or a file's name without suffix."""
    path = path_of(source, ModelError)
    if path.suffix == SUFFIX:
        return path.stem
    return path.resolve().name if path.is_dir() else source.rsplit("/", 1)[-1]


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
    """Returns the loss of predicting after each number of layers that was tried."""
    quality: dict[str, Any] = report["quality"] or {}
    prediction = report["prediction"] or quality.pop("prediction", None)
    if prediction is None:
        return _auxiliary_rows(report["auxiliary"])
    rows = [
        (
            f"predicted after layer {row['layers']}",
            f"{row['fitted']['nll']:.3f} nats a token ({row['own']['nll']:.3f} without maps), "
            f"computed {row['exact_nll']:.3f}, no prompt {row['no_prompt_nll']:.3f}; KLD "
            f"{row['fitted']['kld']:.3f}",
        )
        for row in prediction["rows"]
    ]
    chosen = prediction.get("layers")
    kept = (
        f"after layer {chosen}"
        if chosen
        else f"none: all lose over {prediction['limit_nats']} nats"
    )
    rows += [("maps kept", kept), ("maps fitted to", f"{prediction['fit_tokens']} tokens")]
    return rows + _auxiliary_rows(report["auxiliary"])


def _auxiliary_rows(auxiliary: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Returns the loss where a smaller model reads prompts."""
    if auxiliary is None:
        return []
    return [
        (
            f"prompts read by {auxiliary['name']}, rule {rule}",
            f"{row['nll']:.3f} nats a token, computed {row['exact_nll']:.3f}, no prompt "
            f"{row['no_prompt_nll']:.3f}, {auxiliary['name']} alone {auxiliary['alone_nll']:.3f}; "
            f"KLD {row['kld']:.3f}",
        )
        for rule, row in auxiliary["rules"].items()
    ]


def _print(bundle: "Bundle", report: dict[str, Any], source: str, *, verbose: bool) -> None:
    if verbose:
        output.print_table(_rows(bundle, report, source))
    output.print_data(
        f"{report['path']} is ready: {format_bytes(report['bytes'])}, made in "
        f"{output.duration(report['seconds'])}; {output.quality_text(report)}."
    )
    advice = dict(output.verdict_rows(report, source)).get("advice")
    if advice is not None and not verbose:
        output.print_data(advice)
    # A folder with only a GGUF file needs llama.cpp to run; the file itself does not.
    model = report["path"] if bundle.has_onnx else str(bundle.path / GGUF_FILE)
    output.print_note(
        f"try: {first_command(bundle, model)}" + ("" if verbose else "  (-v: every number)")
    )


def _rows(bundle: "Bundle", report: dict[str, Any], source: str) -> list[tuple[str, Any]]:
    """Returns all facts about the bundle as rows of a table."""
    kv, predicted = report["kv"], _prediction_rows(report)
    return [
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


def _type_rows(types: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what became of the tensors of each type in a GGUF source."""
    rows: list[tuple[str, str]] = []
    for kind, row in sorted(types.items()):
        formats = ", ".join(f"{count} as {form}" for form, count in row["formats"].items())
        kept = f"; {row['kept']} of them code for code" if row["kept"] else ""
        rows.append((f"from {kind}", f"{row['tensors']} tensors: {formats}{kept}"))
    return rows
