"""`kvq inspect`: what a bundle holds, every byte of it checked, or what a GGUF file does."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps import options, output

if TYPE_CHECKING:
    from kvq_runtime.bundle import Bundle

Inspected = tuple[dict[str, Any], Callable[[dict[str, Any]], None]]


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq inspect`."""
    parser.add_argument("path", nargs="?", metavar="PATH", help="a bundle folder or a GGUF file")
    options.add_flags(parser, "model")


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    path = arguments.path or arguments.model
    if path is None:
        raise UsageError("PATH is missing; give a bundle folder or a GGUF file")

    from kvq_runtime.gguf_format import is_gguf

    report, print_report = _gguf(path) if is_gguf(path) else _bundle(path)
    if arguments.json:
        output.print_json(report)
    else:
        print_report(report)
    return 0


def _gguf(path: str) -> Inspected:
    from kvq_apps import gguf_report
    from kvq_runtime.gguf_file import GgufFile

    return gguf_report.report(GgufFile.open(path)), gguf_report.print_report


def _bundle(path: str) -> Inspected:
    from kvq_runtime.bundle import Bundle

    return _report(Bundle.open(path)), _print


def _report(bundle: "Bundle") -> dict[str, Any]:
    from kvq.formats import bytes_per_token

    shape = bundle.config.cache_shape
    manifest = bundle.manifest.to_json()
    return manifest | {
        "path": str(bundle.path),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "bytes_per_token": bytes_per_token(shape, bundle.manifest.kv),
        "fp16_bytes_per_token": shape.float_bytes_per_token,
    }


def _print(report: dict[str, Any]) -> None:
    config, kv = report["config"], report["kv"]
    ratio = report["fp16_bytes_per_token"] / report["bytes_per_token"]
    rows = [
        ("bundle", report["path"]),
        ("format", f"{report['format']} version {report['version']}"),
        ("model", f"{report['name']} ({report['model_type']})"),
        (
            "shape",
            f"{config['num_layers']} layers, {config['num_heads']} heads over "
            f"{config['num_kv_heads']} KV heads of {config['head_dim']}, hidden "
            f"{config['hidden_size']}, vocabulary {config['vocab_size']}",
        ),
        ("context", f"{report['context_length']} tokens"),
        *output.weight_rows(report),
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
            format_bytes(report["bytes_per_token"] * report["context_length"]),
        ),
        ("end tokens", " ".join(map(str, report["eos_token_id"])) or "none"),
        *((f"source, {key}", value) for key, value in output.flat(report["source"])),
        *((f"quality, {key}", value) for key, value in output.flat(report["quality"] or {})),
        *(
            (name, f"{format_bytes(file['bytes'])}, sha256 {file['sha256'][:16]} ok")
            for name, file in report["files"].items()
        ),
    ]
    output.print_table(rows)
