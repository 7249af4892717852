"""`kvq models`: lists the local models, deletes a model, or fits a cache to it."""

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from kvq.errors import KvqError, UsageError
from kvq.formats import format_bytes
from kvq_apps.settings import flags, options
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal import output, text_input

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq models`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="rm|fit MODEL",
        help="rm: delete the model of this name or path, after asking; fit: measure how its cache "
        "is stored best, which the first run of a GGUF file leaves out; without words, list all "
        "that are here",
    )
    flags.add_flags(
        parser, "yes", "threads",
        yes="rm: delete without asking, also files that lie in folders of your own",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    match arguments.words:
        case [] | ["list" | "ls"]:
            return _list(arguments)
        case ["rm", name]:
            return _remove(name, arguments)
        case ["fit", name]:
            return _fit(name, arguments)
        case _:
            raise UsageError(
                "give `kvq models`; `kvq models rm NAME` deletes a model, `kvq models fit NAME` "
                "fits the cache to it"
            )


def _fit(name: str, arguments: Namespace) -> int:
    """Fits the cache to a model. Raises `KvqError`."""
    from kvq_apps.names import model_path
    from kvq_export.export import fit_cache
    from kvq_runtime.machine.device import physical_cores

    folder = model_path.resolve_model(name)
    with output.ProgressBar() as progress:
        fit_cache(folder, arguments.threads or physical_cores(), progress)
    output.print_note(f"the cache of {name} is fitted to it")
    return 0


def _remove(name: str, arguments: Namespace) -> int:
    """Deletes a model, or removes one in a user's folder from the list. Raises `UsageError`."""
    from kvq_apps.names import known_models, model_path

    path = model_path.listed_path(name)
    try:
        num_bytes = known_models.num_bytes(path) if path.exists() else 0
        # `KVQ_YES` answers the questions of pulls only, and deletes nothing.
        question = f"Delete the files of {name}, {format_bytes(num_bytes)} in {path}?"
        deletes = path.exists() and (
            options.on_command_line(arguments, "yes") or text_input.agrees(question)
        )
        if deletes:
            known_models.remove(path)
        elif known_models.is_ours(path):
            raise UsageError(
                f"{name} stays, since nobody said yes; `kvq models rm {name} --yes` deletes it"
            )
        else:
            known_models.forget(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be deleted: {error.strerror}") from error
    _tell_removed(name, path, num_bytes if deletes else 0, as_json=arguments.json)
    return 0


def _tell_removed(name: str, path: Path, num_bytes: int, *, as_json: bool) -> None:
    if as_json:
        output.print_json({"removed": str(path), "bytes": num_bytes})
    if num_bytes:
        left = "; the folder has other files and stays" if path.exists() else ""
        output.print_note(f"removed {name} ({format_bytes(num_bytes)}){left}")
    else:
        left = f"; its files stay in {path}" if path.exists() else ""
        output.print_note(f"{name} is listed no more{left}")


def _list(arguments: Namespace) -> int:
    from kvq_apps.names.model_path import known_names

    models = [_described(name, path, arguments) for name, path in sorted(known_names().items())]
    if arguments.json:
        output.print_json({"models": models})
    elif models:
        output.print_table(
            (_row(model) for model in models),
            header=("name", "bytes", "licence", "fits", "last used", "source"),
        )
    else:
        output.print_note(
            "no model is here yet; `kvq pull --list` shows which there are, `kvq pull NAME` "
            "brings one"
        )
    return 0


def _described(name: str, path: Path, arguments: Namespace) -> dict[str, Any]:
    """Returns the list's facts about the model at `path`, or what is wrong with it."""
    from kvq_apps.names import known_models, pull_records
    from kvq_apps.terminal.estimate import estimate
    from kvq_runtime.bundle.bundle import Bundle
    from kvq_runtime.bundle.gguf_file import GgufFile

    record = pull_records.record_of(path)
    parts = [path] if path.is_file() else path.iterdir()
    row: dict[str, Any] = {
        "name": name,
        "path": str(path),
        "pulled": record is not None,
        "bytes": sum(part.stat().st_size for part in parts if part.is_file()),
        "last_used_s": known_models.last_used_s(path),
    }
    try:
        if path.is_file():
            files, source = GgufFile.open(path), dict[str, Any]()
        else:
            files = Bundle.open(path, verify="size")
            source = files.manifest.source
        fits = estimate(files, **options.keywords(arguments, threads="threads"))["fits"]
    except KvqError as error:
        return row | {"error": format_error(error)}
    origin_facts = (source.get("license", "unknown"), source.get("model", str(path)))
    license, origin = origin_facts if record is None else (record.license, record.source)
    return row | {"license": license, "source": origin, "fits": fits}


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    size, used = format_bytes(model["bytes"]), _ago(model["last_used_s"])
    if "error" in model:
        return (model["name"], size, "-", "-", used, f"unusable: {model['error']}")
    fits = {True: "yes", False: "no", None: "unknown"}[model["fits"]]
    return model["name"], size, model["license"], fits, used, model["source"]


def _ago(when_s: float | None) -> str:
    """Says how long ago a time was, in the largest unit."""
    if when_s is None:
        return "never"
    passed = time.time() - when_s
    for seconds, name in _UNITS:
        if passed >= 2 * seconds:
            return f"{passed // seconds:.0f} {name} ago"
    return "just now"
