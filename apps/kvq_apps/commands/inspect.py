"""`kvq inspect`: what a bundle holds, every byte of it checked."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps import options, output

if TYPE_CHECKING:
    from kvq_runtime.bundle import Bundle


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq inspect`."""
    parser.add_argument("path", nargs="?", metavar="PATH", help="a bundle folder")
    options.add_flags(parser, "model")


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    path = arguments.path or arguments.model
    if path is None:
        raise UsageError("PATH is missing; give a bundle folder")

    from kvq_runtime.bundle import Bundle

    bundle = Bundle.open(path)
    report = _report(bundle)
    if arguments.json:
        output.print_json(report)
    else:
        _print(report)
    return 0


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
    config, weights, kv = report["config"], report["weights"], report["kv"]
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
        (
            "weights",
            f"{format_bytes(weights['bytes'])}: {weights['bits']} bits, block "
            f"{weights['block']}, embedding {weights['embedding_bits']} bits",
        ),
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
