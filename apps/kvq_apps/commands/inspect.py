"""`kvq inspect`: what a model or a saved session holds, every byte checked, and what it takes.

One kind of file, one report: an object for `--json` and its table.
"""

from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import KvqError, ModelError, SnapshotError, UsageError, argument
from kvq.formats import format_bytes
from kvq_apps import flags, options, output
from kvq_apps.flags import told

if TYPE_CHECKING:
    from kvq_runtime.backends import ModelFiles
    from kvq_runtime.bundle import Bundle

Rows = list[tuple[str, Any]]


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq inspect`."""
    parser.add_argument(
        "path",
        nargs="?",
        metavar="MODEL",
        help="a bundle, a GGUF file, a checkpoint folder, a saved session or a model's name; "
        "without one the models made or run so far are listed",
    )
    flags.add_flags(parser, "model", "offline", "estimate", "remove", "names")
    sized = parser.add_argument_group("estimating")
    flags.add_flags(
        sized, "threads", "weights-budget", "ctx-size",
        *(flag for flag in flags.KV_FLAGS if flag != "kv-offload"),
        kv_budget="bytes of the cache (default: what the context needs)",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    from kvq_apps.model_path import default_name

    name = arguments.path
    if name is None and (options.written(arguments, "model") or arguments.estimate):
        name = arguments.model or default_name()
    if arguments.names:
        return _print_names(as_json=arguments.json)
    if arguments.remove:
        return _remove(arguments.path or arguments.model, as_json=arguments.json)
    if name is None:
        return _list(as_json=arguments.json)
    report, rows = _inspected(name, arguments)
    if arguments.json:
        output.print_json(report)
    else:
        output.print_table([output.line(cell) for cell in row] for row in rows)
    return 0


def _inspected(name: str, arguments: Namespace) -> tuple[dict[str, Any], Rows]:
    from kvq_apps import gguf_report
    from kvq_apps.model_path import resolve_model
    from kvq_runtime.bundle import Bundle
    from kvq_runtime.gguf_file import GgufFile
    from kvq_runtime.gguf_format import is_gguf
    from kvq_runtime.snapshot import is_snapshot

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
    if not arguments.estimate:
        return report, rows(report)

    from kvq_apps import estimate

    found = estimate.estimate(
        files,
        **options.session_options(arguments),
        **options.given(arguments, threads="threads", weights_budget="weights-budget"),
    )
    return report | {"estimate": found}, rows(report) + estimate.rows(found)


def _located(name: str) -> Path:
    """The path itself, or the bundle of a model called so. Raises `ModelError`."""
    from kvq_apps.model_path import (
        EMBEDDED,
        FILE_BACKEND,
        check_regular,
        is_name,
        ready_model,
        resolve_model,
    )
    from kvq_apps.pulling.wanted import in_catalogue
    from kvq_runtime.gguf_format import is_gguf

    path = Path(name).expanduser()
    if not is_name(name) and (path.exists() or is_gguf(path)):
        check_regular(path)
        return path
    if name not in EMBEDDED and ready_model(name) is None:
        how = f"kvq pull {name}" if in_catalogue(name) else f"kvq export {name} -o NAME"
        raise ModelError(f"{name} is no bundle here yet; make one: `{how}`")
    return resolve_model(name, FILE_BACKEND)


# Bundles


def _bundle(bundle: "Bundle") -> dict[str, Any]:
    from kvq.config import DEFAULT_DRAFT_TOKENS
    from kvq.formats import bytes_per_token, seen_tokens
    from kvq.geometry import Geometry, conv_bytes, delta_row_bytes, delta_state_bytes

    config, manifest = bundle.config, bundle.manifest.to_json()
    experts = bundle.experts
    token_bytes = at_context = 0.0
    for one in config.cache_classes:
        own = bytes_per_token(one.shape, bundle.manifest.kv)
        layers = one.shape.num_layers
        seen = seen_tokens(layers, one.windows, config.context_length)
        token_bytes += own
        at_context += own * seen / layers
    return manifest | {
        "path": str(bundle.path),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "bytes_per_token": token_bytes,
        "bytes_at_context": round(at_context),
        "conv_bytes": conv_bytes(config.conv_shape, DEFAULT_DRAFT_TOKENS),
        "delta_bytes": delta_row_bytes(
            config.delta_shape, DEFAULT_DRAFT_TOKENS, Geometry.delta_states
        )
        + delta_state_bytes(config.delta_shape, Geometry.delta_states),
        "fp16_bytes_per_token": config.float_bytes_per_token,
        "experts": None if experts is None else experts.to_json(),
    }


def _bundle_rows(report: dict[str, Any]) -> Rows:
    config, kv = report["config"], report["kv"]
    ratio = report["fp16_bytes_per_token"] / report["bytes_per_token"]
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
        *_others(report),
        ("sampling", _sampling(report["sampling"])),
        ("end tokens", " ".join(map(str, report["eos_token_id"])) or "none"),
        *((f"source, {key}", value) for key, value in output.flat(report["source"])),
        *output.verdict_rows(report),
        *((f"quality, {key}", value) for key, value in output.flat(report["quality"] or {})),
        *(
            (name, f"{format_bytes(file['bytes'])}, sha256 {file['sha256'][:16]} ok")
            for name, file in report["files"].items()
        ),
    ]


def _experts(found: dict[str, int] | None) -> Rows:
    """How much of the weights `--weights-budget` may leave on the disk."""
    if found is None:
        return []
    return [
        (
            "experts",
            f"{format_bytes(found['bytes'])} of the weights, of which a token reads "
            f"{format_bytes(found['token_bytes'])}; --weights-budget from "
            f"{format_bytes(found['least_budget'])}",
        )
    ]


def _sampling(fields: dict[str, float]) -> str:
    """What chats and requests that say nothing of it are sampled with."""
    said = ", ".join(f"{name} {value:g}" for name, value in fields.items())
    return said or "kvq's own defaults; the model asks for none"


def _shape(config: dict[str, Any]) -> str:
    mixers = [layer["mixer"] for layer in config["layers"]]
    attending = [one for one in mixers if "heads" in one]
    kinds = Counter((one["heads"], one["kv_heads"], one["head_dim"]) for one in attending)
    heads = [
        (f"{count} with " if count < len(mixers) else "")
        + f"{heads} heads over {kv_heads} KV heads of {head_dim}"
        for (heads, kv_heads, head_dim), count in kinds.items()
    ]
    readers = sum(one.get("kv_from") is not None for one in mixers)
    reading = f", {readers} read others' keys and values" if readers else ""
    return (
        f"{len(mixers)} layers, {', '.join(heads)}{reading}, hidden "
        f"{config['hidden_size']}, vocabulary {config['vocab_size']}"
    )


def _others(report: dict[str, Any]) -> Rows:
    """How many layers do not attend, and what a session holds for them whatever its text."""
    layers = report["config"]["layers"]
    count = sum("heads" not in layer["mixer"] for layer in layers)
    if not count:
        return []
    deltas = report["delta_bytes"]
    name, most = ("delta nets", "up to ") if deltas else ("convolutions", "")
    held = format_bytes(deltas or report["conv_bytes"])
    return [(name, f"{count} of {len(layers)} layers, which hold {most}{held} of any budget")]


def _windowed(config: dict[str, Any]) -> str:
    """Which layers hold less than the context."""
    windows = [layer["mixer"].get("window_tokens", 0) for layer in config["layers"]]
    some = sorted({window for window in windows if window})
    if not some:
        return ""
    those = " or ".join(map(str, some))
    return f" ({sum(map(bool, windows))} of {len(windows)} layers see the last {those} tokens)"


# The list


def _print_names(*, as_json: bool) -> int:
    """Prints what `-m` takes: the embedded models, and those that were made or run."""
    from kvq_apps.model_path import known_names
    from kvq_models.embedded import installed_names

    names = list(dict.fromkeys((*installed_names(), *known_names())))
    if as_json:
        output.print_json({"names": names})
    else:
        output.print_data("\n".join(names))
    return 0


def _remove(name: str | None, *, as_json: bool) -> int:
    """Deletes a bundle. Raises `UsageError` for anything else: that is not ours."""
    from kvq_apps import known_models
    from kvq_runtime.manifest import MANIFEST_FILE

    if name is None:
        raise UsageError(
            f"{argument('--remove')} needs the bundle to delete; `kvq inspect` lists them"
        )
    path = _located(name).resolve()
    if not (path / MANIFEST_FILE).exists():
        raise UsageError(
            f"{argument('--remove')} deletes bundles only, and {path} is none; delete it yourself"
        )
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    known_models.remove(path)
    if as_json:
        output.print_json({"removed": str(path), "bytes": num_bytes})
    left = "; the folder has other files and stays" if path.exists() else ""
    output.print_note(f"removed {path} ({format_bytes(num_bytes)}){left}")
    return 0


def _list(*, as_json: bool) -> int:
    """Prints the models that were made or run; a damaged one is a row that says so."""
    from kvq_apps.model_path import known_names

    found = [_listed(name, path) for name, path in sorted(known_names().items())]
    if as_json:
        output.print_json({"models": found})
    elif found:
        output.print_table(
            ([output.line(cell) for cell in _listed_row(one)] for one in found),
            header=("name", "family", "weights", "KV", "context", "path"),
        )
    else:
        output.print_note(
            'no model was made or run yet: `kvq run "Once upon a time"` makes a bundle of the '
            "first one, `kvq export MODEL -o DIR` of any; `kvq inspect DIR` shows it"
        )
    return 0


def _listed(name: str, path: Path) -> dict[str, Any]:
    """What the list says of the model at `path`, which `-m name` means."""
    from kvq_apps import gguf_report
    from kvq_runtime.bundle import Bundle
    from kvq_runtime.gguf_file import GgufFile

    files: ModelFiles
    try:
        if path.is_file():
            files = GgufFile.open(path)
            report = gguf_report.report(files)
            family = report["architecture"]
        else:
            files = Bundle.open(path, verify="size")
            report = _bundle(files)
            family = report["model_type"]
    except KvqError as error:
        return {"name": name, "path": str(path), "error": told(error)}
    kept = ("path", "bytes", "context_length", "bytes_per_token")
    return {"name": name, "model": report["name"], "model_type": family} | {
        **{key: report[key] for key in kept},
        "weight_bytes": files.weights_json()["bytes"],
        "kv": output.kv_text(files.kv.k_bits, files.kv.v_bits),
    }


def _listed_row(row: dict[str, Any]) -> tuple[Any, ...]:
    if "error" in row:
        return (row["name"], "-", "-", "-", "-", f"unusable: {row['error']}")
    token_bytes = row["bytes_per_token"]
    return (
        row["name"],
        row["model_type"],
        format_bytes(row["weight_bytes"]),
        row["kv"] + (f", {token_bytes:.0f} bytes a token" if token_bytes else ""),
        row["context_length"],
        row["path"],
    )


# Checkpoints and saved sessions


def _checkpoint(folder: Path) -> tuple[dict[str, Any], Rows]:
    """A checkpoint that every tensor of its architecture was found in."""
    from kvq_export.source import open_source

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
    from kvq_runtime import snapshot

    taken = snapshot.examine(path)
    identity = taken.identity
    report: dict[str, Any] = {
        "format": snapshot.FORMAT,
        "version": taken.version,
        "path": str(path),
        "bytes": path.stat().st_size,
        "tokens": len(taken.state.tokens),
        "cache_bytes": len(taken.state.cache),
        **identity,
    }
    try:
        return report, [
            ("session", report["path"]),
            ("format", f"{snapshot.FORMAT} version {taken.version}, sha256 ok"),
            ("tokens", f"{report['tokens']}, of a context of {identity['context_tokens']}"),
            ("KV plan", output.kv_text(identity["plan"]["k_bits"], identity["plan"]["v_bits"])),
            ("KV budget", format_bytes(identity["budget_bytes"])),
            ("cache", f"{format_bytes(report['cache_bytes'])}, {identity['cache']}"),
            ("model", f"fingerprint {identity['model']}"),
        ]
    except (KeyError, TypeError) as error:
        raise SnapshotError(f"{path} lacks what it must say of its session: {error!r}") from error
