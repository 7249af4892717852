"""`kvq doctor`: shows what this installation found and what it will use."""

import platform
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvq
from kvq.errors import KvqError
from kvq.formats import format_bytes
from kvq_apps.settings import flags, options
from kvq_apps.settings.flag_values import with_component_values
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal import output

PACKAGES = (
    "numpy", "onnxruntime", "onnxruntime-gpu", "llama-cpp-python", "tokenizers", "onnx-ir",
    "ml-dtypes",
    "llguidance", "huggingface-hub", "starlette", "uvicorn", "textual", "markdown-it-py",
    "pygments",
)  # fmt: skip
EDITORS = ("nvim", "vim", "code", "codium", "emacs", "hx", "zed", "subl")
SECRETS = ("api-key",)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq doctor`."""
    flags.add_flags(parser, "model", "threads", "config", "paths", "verbose")


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.config:
        return _print_settings(as_json=arguments.json)
    if arguments.paths:
        return _print(_paths(), as_json=arguments.json)
    report = _report(arguments)
    if arguments.json or arguments.verbose:
        _print(report, as_json=arguments.json)
    else:
        output.print_data(_summary(report))
    runs = report["runs"].items()
    slow = [(kind, runner) for kind, runner in runs if runner["backend"] and runner["slower"]]
    for kind, runner in slow:
        # A reason ends with the command that helps.
        output.print_note(
            f"a {kind} runs on the slow {runner['backend']} backend: {runner['slower']}"
        )
    if not report["native"]["loaded"]:
        output.print_note(report["native"]["reason"])
    elif not slow:
        output.print_note("ready")
    return 0


def _summary(report: dict[str, Any]) -> str:
    """Says what kvq runs on, and which model runs when none is named."""
    native, device, model = report["native"], report["device"], report["model"]
    if not native["loaded"]:
        return f"kvq {report['kvq']} cannot run a model here: its compiled library is missing."
    kernels = f"kvq's own kernels ({native['kernels']})"
    free = device["memory_free_bytes"]
    memory = f", {format_bytes(free)} of memory free" if free else ""
    lines = [
        f"kvq {report['kvq']} runs models on {kernels} with {report['threads']} threads{memory}.",
        f"Without a name it runs {model['name']}: {_model_text(model)}.",
    ]
    if report["servers"]:
        servers = report["servers"]
        lines.append("Serving: " + (servers if isinstance(servers, str) else "; ".join(servers)))
    return "\n".join([*lines, "Everything that was found: kvq doctor -v"])


def _model_text(model: dict[str, Any]) -> str:
    """Says whether that model is here, and fits with its whole context."""
    if model["state"] != "ok":
        return model["state"]
    fits = {True: "which fits", False: "which does not fit", None: "if that fits"}[model["fits"]]
    return f"with its whole context it takes {format_bytes(model['total_bytes'])}, {fits}"


def _print(report: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        output.print_json(report)
    else:
        output.print_table((key, _text(value)) for key, value in output.flat(report))
    return 0


def _report(arguments: Namespace) -> dict[str, Any]:
    from kvq import native_library
    from kvq_apps.bench import machine
    from kvq_runtime import backends
    from kvq_runtime.machine import device, huge_pages, tuning

    runs = {kind.name: _runner(kind) for kind in (_FileKind("bundle"), _FileKind("gguf"))}
    return {
        "kvq": kvq.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}",
        "packages": {name: machine.version(name) for name in PACKAGES},
        "native": _native(native_library.library_path()),
        "backend": runs["bundle"]["backend"],
        "runs": runs,
        "backends": {name: backends.missing(name) or "ok" for name in backends.PREFERENCE},
        "device": asdict(device.probe()),
        "gpu": _gpu(),
        "huge_pages": huge_pages.state(),
        "threads": tuning.default_threads(),
        "tuning": _tuning(),
        "built_in": _built_in(),
        "model": _model(arguments),
        "servers": _servers(),
        "editors": {name: path for name in EDITORS if (path := shutil.which(name)) is not None},
        "paths": _paths(),
    }


@dataclass(frozen=True, slots=True)
class _FileKind:
    """Stands for all files of a kind in questions to backends."""

    name: str

    @property
    def has_onnx(self) -> bool:
        return self.name == "bundle"

    @property
    def has_gguf(self) -> bool:
        return not self.has_onnx

    @property
    def path(self) -> str:
        return f"a {self.name} file" if self.has_gguf else "a bundle"


def _runner(kind: Any) -> dict[str, Any]:
    """Returns the backend that runs files of this kind, and why it is not the fastest one."""
    from kvq_runtime import backends

    try:
        backend, slower = backends.choose(kind)
    except KvqError as error:
        return {"backend": None, "slower": format_error(error)}
    return {"backend": backend, "slower": slower}


def _native(path: Path | None) -> dict[str, Any]:
    """Returns where the native library is and what it uses, or why it is missing."""
    from kvq import native_library

    reason = native_library.why_not()
    if reason:
        return {"loaded": False, "path": str(path), "reason": reason}
    return {
        "loaded": True,
        "path": str(path),
        "kernels": native_library.isa(),
        "kernels_available": native_library.isas(),
    } | ({"kernels_refused": refused} if (refused := native_library.isa_refused()) else {})


def _tuning() -> dict[str, Any]:
    """Returns what was measured on this machine, and how to go back to the built-in values."""
    from kvq_runtime.machine import tuning

    path = tuning.tuning_path()
    try:
        kept = tuning.load_tuning()
    except KvqError as error:
        return {"measured": False, "reason": str(error)}
    if kept is None:
        other = f"{path} is of another machine; " if path.exists() else ""
        return {"measured": False, "reason": f"{other}kvq bench --tune measures it"}
    shown = {key: getattr(kept, key) for key in ("threads", "second_level", "ahead_bytes")}
    return {"measured": True} | shown | {"remove": str(path)}


def _built_in() -> dict[str, Any]:
    """Returns the built-in values for fetching weights on this processor, and their reason."""
    from kvq import native_library
    from kvq_runtime.machine import tuning

    if not native_library.available():
        return {}
    processor = tuning.processor()
    values = tuning.built_in_of(processor)
    return {
        "maker": processor.maker.decode(),
        "level2_bytes": processor.level2_bytes,
        "second_level": bool(values.second_level),
        **{name: getattr(values, name) for name in ("ahead_bytes", "panel_bytes", "row_bytes")},
        "reason": tuning.reason(processor),
    }


def _gpu() -> dict[str, Any]:
    """Returns what `--device cuda` runs on, or why it cannot."""
    from kvq import devices
    from kvq_runtime.machine import gpu

    if reason := gpu.why_not("cuda"):
        return {"usable": False, "reason": reason}
    device = devices.opened("cuda")
    shown = ("name", "capability", "memory_bytes", "free_bytes", "library")
    return {"usable": True} | {key: str(getattr(device, key)) for key in shown}


def _model(arguments: Namespace) -> dict[str, Any]:
    """Returns the model that runs when none is named, and whether its whole context fits."""
    from kvq_apps.names.model_path import default_name, ready_model
    from kvq_apps.terminal.estimate import estimate
    from kvq_runtime.engine import open_files

    name = arguments.model or default_name()
    try:
        path = ready_model(name)
        if path is None:
            return {"name": name, "state": "is exported on first use"}
        files = open_files(path)
        sizes = estimate(files, **options.keywords(arguments, threads="threads"))
    except KvqError as error:
        return {"name": name, "state": f"cannot be used: {format_error(error)}"}
    shown = ("kv", "context", "weight_bytes", "total_bytes", "fits")
    experts = {} if files.experts is None else {"experts": files.experts.to_json()}
    shown_sizes = {key: sizes[key] for key in shown} | experts
    return {"name": name, "state": "ok", "path": str(path)} | shown_sizes


def _servers() -> list[str] | str:
    from kvq_apps.serve.instances import running

    try:
        return [
            f"{instance.address} ({instance.model}, process {instance.pid})"
            for instance in running()
        ]
    except (KvqError, OSError) as error:
        return f"unknown: {format_error(error)}"


def _paths() -> dict[str, str]:
    """Returns every path that kvq reads or writes, which need not exist."""
    from kvq import native_library, settings
    from kvq_apps.names.known_models import bundles_folder, models_folder
    from kvq_apps.settings import configuration
    from kvq_runtime.machine.tuning import tuning_path

    cache = settings.cache_folder()
    return {
        "package": str(Path(kvq.__file__).parent),
        "native": str(native_library.library_path()),
        "config": str(configuration.user_path()),
        "data": str(settings.data_folder()),
        "state": str(settings.state_folder()),
        "cache": str(cache),
        "models": str(models_folder()),
        "bundles": str(bundles_folder()),
        "sessions": str(cache / "sessions"),
        "tuning": str(tuning_path()),
    }


# Settings


def _print_settings(*, as_json: bool) -> int:
    rows = list(_settings())
    if as_json:
        output.print_json({"settings": rows})
    else:
        output.print_table(
            ((row["setting"], row["shown"], row["origin"], row["flag"], row["variable"])
             for row in rows),
            header=("setting", "value", "origin", "flag", "variable"),
        )  # fmt: skip
    return 0


def _settings() -> Iterator[dict[str, Any]]:
    """Yields one row for each setting; a `value` None is the default, in words in `shown`."""
    from kvq.settings import environment_name
    from kvq_apps.settings import configuration

    for setting, flag_value in configuration.resolved().items():
        name = configuration.FLAG_OF[setting]
        value = None if flag_value is None else "(set)" if name in SECRETS else flag_value.value
        yield {
            "setting": setting,
            "value": value,
            "shown": with_component_values(flags.FLAGS[name].default) or "-"
            if flag_value is None
            else _text(value),
            "origin": "default" if flag_value is None else flag_value.origin,
            "flag": f"--{name}",
            "variable": environment_name(name),
        }


def _text(value: str | float | Sequence[str] | None) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)
