"""`kvq inspect`: shows and checks what a model or a saved session holds, and what it takes.

Each kind of file has a report: an object for `--json` and a table.
"""

from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import ModelError, SnapshotError, UsageError, argument, reason_of
from kvq.files import path_of
from kvq.formats import format_bytes
from kvq_apps.settings import flags, options
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_runtime.backends import ModelFiles
    from kvq_runtime.bundle.bundle import Bundle

Rows = list[tuple[str, Any]]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq inspect`."""
    parser.add_argument(
        "path",
        nargs="?",
        metavar="MODEL",
        help="a bundle, a GGUF file, a checkpoint folder, a saved session or a model's name "
        "(default: see --model)",
    )
    flags.add_flags(parser, "model", "offline", "estimate", "verbose")
    sized = parser.add_argument_group("estimating")
    flags.add_flags(
        sized, "threads", "weights-budget", "ctx-size",
        *(flag for flag in flags.KV_FLAGS if flag != "kv-offload"),
        kv_budget="bytes of the cache (default: what the context needs)",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    from kvq_apps.names.model_path import default_name

    name = arguments.path or arguments.model or default_name()
    report, rows = _inspected(name, arguments)
    if arguments.json:
        output.print_json(report)
    elif arguments.verbose or "session" not in report:
        output.print_table(rows)
    else:
        _print_summary(name, report)
    return 0


def _print_summary(name: str, report: dict[str, Any]) -> None:
    """Prints what the model is, how good it is, what its cache holds and what to do next."""
    from kvq_apps.terminal import estimate

    size, session = format_bytes(report["weight_bytes"]), report["session"]
    good = f"; {output.quality_text(report)}" if report.get("quality") else ""
    family = report.get("model_type") or report["architecture"]
    # Only a bundle has hashes to compare.
    intact = ", nothing is damaged" if "model_type" in report else ""
    output.print_data(output.line(f"{report['name']} ({family}): {size} of weights{intact}{good}."))
    if "estimate" in report:
        output.print_data(estimate.summary(report["estimate"]))
    output.print_data(
        "It is put into kvq's layout when it first runs; what its cache holds is known then."
        if session is None
        else f"Its cache takes {format_bytes(session['kv_budget'])} unless --kv-budget says "
        f"otherwise, and holds {output.cache_sentence(session)}."
    )
    more = "" if "estimate" in report else "--estimate says what it takes in memory, "
    output.print_note(f"try: kvq run -m {name} ...; {more}-v every number")


def _inspected(name: str, arguments: Namespace) -> tuple[dict[str, Any], Rows]:
    from kvq_apps.names.model_path import resolve_model
    from kvq_apps.terminal import estimate, gguf_report
    from kvq_runtime.bundle.bundle import Bundle
    from kvq_runtime.bundle.gguf_file import GgufFile
    from kvq_runtime.bundle.gguf_format import is_gguf
    from kvq_runtime.session.snapshot import is_snapshot

    path = _located(name)
    files: ModelFiles
    if is_gguf(path):
        files = GgufFile.open(path)
        report, rows = gguf_report.report(files), gguf_report.rows
    elif (path / "config.json").exists() and not (path / "kvq.json").exists():
        if not arguments.estimate:
            return _checkpoint(path)
        files = Bundle.open(resolve_model(str(path)))
        report, rows = _bundle(files), _bundle_rows
    elif is_snapshot(path):
        if arguments.estimate:
            raise UsageError(
                f"{argument('--estimate')} is of a model; leave it out for a saved session"
            )
        return _snapshot(path)
    elif path.is_file():
        raise UsageError(
            f"{path} is a file, and neither a GGUF file nor a saved session; give one of them, a "
            "bundle or a checkpoint folder"
        )
    else:
        files = Bundle.open(path)
        report, rows = _bundle(files), _bundle_rows
    runnable = _files_to_run(files)
    sizes = estimate.estimate(
        runnable,
        **options.session_options(arguments),
        **options.keywords(arguments, threads="threads", weights_budget="weights-budget"),
    )
    # What a default session holds is not known of a GGUF file that was not run yet.
    session = None if isinstance(runnable, GgufFile) else sizes["session"]
    report |= {"session": session, "weight_bytes": sizes["weight_bytes"]}
    if not arguments.estimate:
        return report, rows(report)
    return report | {"estimate": sizes}, rows(report) + estimate.rows(sizes)


def _files_to_run(files: "ModelFiles") -> "ModelFiles":
    """Returns the bundle that was made of a GGUF file, else the files themselves."""
    from kvq_apps.names.model_path import bundle_of_gguf
    from kvq_runtime.bundle.bundle import Bundle

    if isinstance(files, Bundle):
        return files
    made = bundle_of_gguf(files.path)
    return files if made is None else Bundle.open(made, verify="size")


def _located(name: str) -> Path:
    """Returns the path itself, or the bundle of a model with this name. Raises `ModelError`."""
    from kvq_apps.names.model_path import (
        EMBEDDED,
        FILE_BACKEND,
        check_regular,
        is_name,
        ready_model,
        resolve_model,
    )
    from kvq_apps.names.pull_request import in_catalogue
    from kvq_runtime.bundle.gguf_format import is_gguf

    path = path_of(name, ModelError)
    if not is_name(name) and (path.exists() or is_gguf(path)):
        check_regular(path)
        return path
    if name not in EMBEDDED and ready_model(name) is None:
        how = f"kvq pull {name}" if in_catalogue(name) else f"kvq export {name} -o NAME"
        raise ModelError(f"{name} is no bundle here yet; make one: `{how}`")
    return resolve_model(name, FILE_BACKEND)


# Bundles


def _bundle(bundle: "Bundle") -> dict[str, Any]:
    from kvq.formats import bytes_per_token, seen_tokens
    from kvq.sizing import ClassSpec
    from kvq_runtime.backends.paged import class_fields

    config, manifest = bundle.config, bundle.manifest.to_json()
    experts = bundle.experts
    first = ClassSpec(
        **class_fields(config)[0], plan=bundle.manifest.kv, context_tokens=config.context_length
    )
    regions = first.whole_geometry.regions_for(0, 0)
    token_bytes = at_context = 0.0
    for cache_class in config.cache_classes:
        class_bytes = bytes_per_token(cache_class.shape, bundle.manifest.kv)
        layers = cache_class.shape.num_layers
        seen = seen_tokens(layers, cache_class.windows, config.context_length)
        token_bytes += class_bytes
        at_context += class_bytes * seen / layers
    return manifest | {
        "path": str(bundle.path),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "bytes_per_token": token_bytes,
        "bytes_at_context": round(at_context),
        "conv_bytes": regions.conv_rows,
        "delta_bytes": regions.delta_rows + regions.delta_states,
        "fp16_bytes_per_token": config.float_bytes_per_token,
        "experts": None if experts is None else experts.to_json(),
    }


def _bundle_rows(report: dict[str, Any]) -> Rows:
    config, kv = report["config"], report["kv"]
    ratio = report["fp16_bytes_per_token"] / report["bytes_per_token"]
    sampling = ", ".join(f"{name} {value:g}" for name, value in report["sampling"].items())
    return [
        ("bundle", report["path"]),
        ("format", f"{report['format']} version {report['version']}"),
        ("model", f"{report['name']} ({report['model_type']})"),
        ("shape", _shape(config)),
        ("context", f"{report['context_length']} tokens"),
        *output.weight_rows(report),
        *_experts(report["experts"]),
        (
            "KV plan",
            f"{output.kv_text(kv['k_bits'], kv['v_bits'])}, {kv['sink_tokens']} sink tokens",
        ),
        (
            "KV per token",
            f"{report['bytes_per_token']:.0f} bytes ({report['fp16_bytes_per_token']} at 16 bits, "
            f"{ratio:.1f} times as much)",
        ),
        (
            "KV at context",
            format_bytes(report["bytes_at_context"]) + _windowed(config),
        ),
        *_other_layers(report),
        ("sampling", sampling or "kvq's own defaults; the model asks for none"),
        ("end tokens", " ".join(map(str, report["eos_token_id"])) or "none"),
        *((f"source, {key}", value) for key, value in output.flat(report["source"])),
        *output.verdict_rows(report),
        *((f"quality, {key}", value) for key, value in output.flat(report["quality"] or {})),
        *(
            (name, f"{format_bytes(file['bytes'])}, sha256 {file['sha256'][:16]} ok")
            for name, file in report["files"].items()
        ),
    ]


def _experts(experts: dict[str, int] | None) -> Rows:
    """Returns how much of the weights `--weights-budget` may leave on the disk."""
    if experts is None:
        return []
    return [
        (
            "experts",
            f"{format_bytes(experts['bytes'])} of the weights, of which a token reads "
            f"{format_bytes(experts['token_bytes'])}; --weights-budget from "
            f"{format_bytes(experts['least_budget'])}",
        )
    ]


def _shape(config: dict[str, Any]) -> str:
    mixers = [layer["mixer"] for layer in config["layers"]]
    attending = [mixer for mixer in mixers if "heads" in mixer]
    kinds = Counter((mixer["heads"], mixer["kv_heads"], mixer["head_dim"]) for mixer in attending)
    heads = [
        (f"{count} with " if count < len(mixers) else "")
        + f"{heads} heads over {kv_heads} KV heads of {head_dim}"
        for (heads, kv_heads, head_dim), count in kinds.items()
    ]
    readers = sum(mixer.get("kv_from") is not None for mixer in mixers)
    reading = f", {readers} read others' keys and values" if readers else ""
    return (
        f"{len(mixers)} layers, {', '.join(heads)}{reading}, hidden "
        f"{config['hidden_size']}, vocabulary {config['vocab_size']}"
    )


def _other_layers(report: dict[str, Any]) -> Rows:
    """Returns how many layers have no attention, and what a session holds for them."""
    layers = report["config"]["layers"]
    count = sum("heads" not in layer["mixer"] for layer in layers)
    if not count:
        return []
    deltas = report["delta_bytes"]
    name, most = ("delta nets", "up to ") if deltas else ("convolutions", "")
    size = format_bytes(deltas or report["conv_bytes"])
    return [(name, f"{count} of {len(layers)} layers, which hold {most}{size} of any budget")]


def _windowed(config: dict[str, Any]) -> str:
    """Says how many layers see less than the context."""
    windows = [layer["mixer"].get("window_tokens", 0) for layer in config["layers"]]
    some = sorted({window for window in windows if window})
    if not some:
        return ""
    sizes = " or ".join(map(str, some))
    return f" ({sum(map(bool, windows))} of {len(windows)} layers see the last {sizes} tokens)"


# Checkpoints and saved sessions


def _checkpoint(folder: Path) -> tuple[dict[str, Any], Rows]:
    """Returns the report on a checkpoint after checking that all tensors are there."""
    from kvq_export.read.source import open_source

    source = open_source(folder)
    family, config, _ = source.config()
    checkpoint = source.checkpoint(config)
    checkpoint.check(source.weight_sources(family, config), family.spare(config))
    tensors = checkpoint.tensors.values()
    report: dict[str, Any] = {
        "format": "checkpoint",
        "path": str(folder),
        "name": folder.resolve().name,
        "model_type": config.model_type,
        "config": config.to_json(),
        "context_length": config.context_length,
        "tensors": len(tensors),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "bytes": sum(file.stat().st_size for file in {tensor.file for tensor in tensors}),
        "fp16_bytes_per_token": config.float_bytes_per_token,
    }
    return report, [
        ("checkpoint", report["path"]),
        ("model", f"{report['name']} ({report['model_type']})"),
        ("shape", _shape(report["config"])),
        ("context", f"{config.context_length} tokens"),
        (
            "weights",
            f"{format_bytes(report['bytes'])}: {len(tensors)} tensors, "
            f"{' '.join(report['dtypes'])}",
        ),
        ("KV per token", f"{config.float_bytes_per_token} bytes at 16 bits"),
        ("to run it", f"kvq export {folder} -o NAME"),
    ]


def _snapshot(path: Path) -> tuple[dict[str, Any], Rows]:
    from kvq_runtime.session import snapshot

    saved = snapshot.examine(path)
    identity = saved.identity
    report: dict[str, Any] = {
        "format": snapshot.FORMAT,
        "version": saved.version,
        "path": str(path),
        "bytes": path.stat().st_size,
        "tokens": len(saved.state.tokens),
        "cache_bytes": len(saved.state.cache),
        **identity,
    }
    try:
        return report, [
            ("session", report["path"]),
            ("format", f"{snapshot.FORMAT} version {saved.version}, sha256 ok"),
            ("tokens", f"{report['tokens']}, of a context of {identity['context_tokens']}"),
            ("KV plan", output.kv_text(identity["plan"]["k_bits"], identity["plan"]["v_bits"])),
            ("KV budget", format_bytes(identity["budget_bytes"])),
            ("cache", f"{format_bytes(report['cache_bytes'])}, {identity['cache']}"),
            ("model", f"fingerprint {identity['model']}"),
        ]
    except (KeyError, TypeError) as error:
        raise SnapshotError(
            f"{path} lacks what it must say of its session: {reason_of(error)}"
        ) from error
