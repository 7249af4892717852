"""`kvq doctor`: what this installation found, and what it will use."""

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
from kvq_apps import flags, options, output
from kvq_apps.flags import told
from kvq_apps.owners import filled

PACKAGES = (
    "numpy", "onnxruntime", "onnxruntime-gpu", "llama-cpp-python", "tokenizers", "onnx-ir",
    "ml-dtypes",
    "llguidance", "huggingface-hub", "starlette", "uvicorn", "textual", "markdown-it-py",
    "pygments",
)  # fmt: skip
EDITORS = ("nvim", "vim", "code", "codium", "emacs", "hx", "zed", "subl")
SECRETS = ("api-key",)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq doctor`."""
    flags.add_flags(parser, "model", "threads", "config", "paths")


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.config:
        return _print_settings(as_json=arguments.json)
    if arguments.paths:
        return _print(_paths(), as_json=arguments.json)
    report = _report(arguments)
    code = _print(report, as_json=arguments.json)
    runs = report["runs"].items()
    slow = [(kind, found) for kind, found in runs if found["backend"] and found["slower"]]
    for kind, found in slow:
        # Reasons end in the command that mends it.
        output.print_note(
            f"a {kind} runs on the slow {found['backend']} backend: {found['slower']}"
        )
    if not slow:
        output.print_note("ready")
    return code


def _print(report: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        output.print_json(report)
    else:
        output.print_table((key, _text(value)) for key, value in output.flat(report))
    return 0


def _report(arguments: Namespace) -> dict[str, Any]:
    from kvq import native
    from kvq_apps.bench import machine
    from kvq_runtime import backends, device, huge_pages, tuning

    runs = {kind.name: _runner(kind) for kind in (_Kind("bundle"), _Kind("gguf"))}
    return {
        "kvq": kvq.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}",
        "packages": {name: machine.version(name) for name in PACKAGES},
        "native": _native(native.library_path()),
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
class _Kind:
    """Stands for all files of a kind where a backend is asked whether it reads them."""

    name: str

    @property
    def has_checkpoint(self) -> bool:
        return False

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
    """The backend that runs files of this kind, and why it is not the fastest one of them."""
    from kvq_runtime import backends

    try:
        backend, slower = backends.choose(kind)
    except KvqError as error:
        return {"backend": None, "slower": told(error)}
    return {"backend": backend, "slower": slower}


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
    } | ({"kernels_refused": refused} if (refused := native.isa_refused()) else {})


def _tuning() -> dict[str, Any]:
    """What was measured on this machine, and how to go back to what is built in."""
    from kvq_runtime import tuning

    path = tuning.tuning_path()
    try:
        found = tuning.kept()
    except KvqError as error:
        return {"measured": False, "reason": str(error)}
    if found is None:
        other = f"{path} is of another machine; " if path.exists() else ""
        return {"measured": False, "reason": f"{other}kvq bench --tune measures it"}
    shown = {key: getattr(found, key) for key in ("threads", "past_caches", "ahead_bytes")}
    return {"measured": True} | shown | {"remove": str(path)}


def _built_in() -> dict[str, Any]:
    """How products fetch weights where nobody has measured, and why."""
    from kvq import native
    from kvq_runtime import tuning

    if not native.available():
        return {}
    here = tuning.processor()
    return asdict(here) | asdict(tuning.built_in_of(here)) | {"reason": tuning.reason(here)}


def _gpu() -> dict[str, Any]:
    """What `--device cuda` runs on, or why it cannot."""
    from kvq import devices
    from kvq_runtime import gpu

    if reason := gpu.why_not("cuda"):
        return {"usable": False, "reason": reason}
    found = devices.opened("cuda")
    shown = ("name", "capability", "memory_bytes", "free_bytes", "library")
    return {"usable": True} | {key: str(getattr(found, key)) for key in shown}


def _model(arguments: Namespace) -> dict[str, Any]:
    """The model that runs when none is named, and whether it fits with its whole context."""
    from kvq_apps.estimate import estimate
    from kvq_apps.model_path import default_name, ready_model
    from kvq_runtime.engine import open_files

    name = arguments.model or default_name()
    try:
        path = ready_model(name)
        if path is None:
            return {"name": name, "state": "is exported on first use"}
        files = open_files(path)
        sizes = estimate(files, **options.given(arguments, threads="threads"))
    except KvqError as error:
        return {"name": name, "state": f"cannot be used: {told(error)}"}
    shown = ("kv", "context", "weight_bytes", "total_bytes", "fits")
    experts = {} if files.experts is None else {"experts": files.experts.to_json()}
    told_sizes = {key: sizes[key] for key in shown} | experts
    return {"name": name, "state": "ok", "path": str(path)} | told_sizes


def _servers() -> list[str] | str:
    """Addresses of the servers of this user that run now."""
    from kvq_apps.serve.instances import running

    try:
        return [f"{one.address} ({one.model}, process {one.pid})" for one in running()]
    except (KvqError, OSError) as error:
        return f"unknown: {told(error)}"


def _paths() -> dict[str, str]:
    """Every place kvq reads or writes, whether or not something is there yet."""
    from kvq import native, settings
    from kvq_apps import configuration
    from kvq_apps.known_models import bundles_folder, models_folder
    from kvq_runtime.tuning import tuning_path

    project = configuration.project_path()
    cache = settings.cache_folder()
    return {
        "package": str(Path(kvq.__file__).parent),
        "native": str(native.library_path()),
        "config": str(configuration.user_path()),
        "project": "none" if project is None else str(project),
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
            ((row["setting"], row["shown"], row["origin"], row["flag"], row["variable"],
              row["waits_for_trust"] or "")
             for row in rows),
            header=("setting", "value", "origin", "flag", "variable", "waits for trust"),
        )  # fmt: skip
    return 0


def _settings() -> Iterator[dict[str, Any]]:
    """One row for each setting; `value` None is the default, which `shown` says in words."""
    from kvq.settings import environment_name
    from kvq_apps import configuration

    waiting = configuration.waiting()
    for setting, found in configuration.resolved().items():
        name = configuration.FLAG_OF[setting]
        value = None if found is None else "(set)" if name in SECRETS else found.value
        yield {
            "setting": setting,
            "value": value,
            "shown": filled(flags.FLAGS[name].default) or "-" if found is None else _text(value),
            "origin": "default" if found is None else found.origin,
            "flag": f"--{name}",
            "variable": environment_name(name),
            "waits_for_trust": waiting[setting].origin if setting in waiting else None,
        }


def _text(value: str | float | Sequence[str] | None) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)
