"""`kvq doctor`: what this installation found, and what it will use."""

import platform
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import kvq
from kvq_apps import output

PACKAGES = (
    "numpy", "onnxruntime", "llama-cpp-python", "tokenizers", "onnx-ir", "ml-dtypes",
    "huggingface-hub",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """`kvq doctor` has no flags of its own."""
    del parser


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    report = _report()
    if arguments.json:
        output.print_json(report)
    else:
        output.print_table((key, _text(value)) for key, value in output.flat(report))
    return 0


def _report() -> dict[str, Any]:
    from kvq import native
    from kvq.settings import cache_folder
    from kvq_runtime import backends, device, huge_pages

    found = device.probe()
    path = native.library_path()
    reasons = {name: backends.missing(name) for name in backends.PREFERENCE}
    return {
        "kvq": kvq.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "native": _native(path),
        "backend": next(name for name, reason in reasons.items() if reason is None),
        "backends": {name: reason or "ok" for name, reason in reasons.items()},
        "device": asdict(found),
        "huge_pages": huge_pages.state(),
        "threads": device.default_threads(),
        "paths": {"package": str(Path(kvq.__file__).parent), "cache": str(cache_folder())},
    }


def _native(path: Path | None) -> dict[str, Any]:
    """The native library: where it is and what it uses, or why it is not there."""
    from kvq import native

    reason = native.why_not()
    if reason:
        return {"loaded": False, "path": str(path), "reason": reason}
    return {
        "loaded": True,
        "path": str(path),
        "kernels": native.isa(),
        "kernels_available": native.isas(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)
