"""`kvq models`: the models that are here, what they take and whether they fit; deletes one."""

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from kvq.errors import KvqError, UsageError
from kvq.formats import format_bytes
from kvq_apps import flags, output
from kvq_apps.flags import told

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq models`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="rm MODEL",
        help="delete the pulled model of this name; without words, list all that are here",
    )
    flags.add_flags(parser, "threads")


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    match arguments.words:
        case []:
            return _list(arguments)
        case ["rm", name]:
            return _remove(name, as_json=arguments.json)
        case _:
            raise UsageError("give `kvq models`, or `kvq models rm NAME` for one model to delete")


def _remove(name: str, *, as_json: bool) -> int:
    from kvq_apps.pulling import pulled

    folder, num_bytes = pulled.remove(name)
    if as_json:
        output.print_json({"removed": str(folder), "bytes": num_bytes})
    left = "; the folder has other files and stays" if folder.exists() else ""
    output.print_note(f"removed {name} ({format_bytes(num_bytes)}){left}")
    return 0


def _list(arguments: Namespace) -> int:
    from kvq_apps.model_path import known_names

    found = [_described(name, path, arguments) for name, path in sorted(known_names().items())]
    if arguments.json:
        output.print_json({"models": found})
    elif found:
        output.print_table(
            (_row(one) for one in found),
            header=("name", "bytes", "licence", "fits", "last used", "source"),
        )
    else:
        output.print_note(
            "no model is here yet; `kvq pull --list` shows which there are, `kvq pull NAME` "
            "brings one"
        )
    return 0


def _described(name: str, path: Path, arguments: Namespace) -> dict[str, Any]:
    """What the list says of the model at `path`; of a damaged one, what is wrong with it."""
    from kvq_apps import options
    from kvq_apps.estimate import estimate
    from kvq_apps.pulling import last_use, pulled
    from kvq_runtime.bundle import Bundle
    from kvq_runtime.gguf_file import GgufFile

    record = pulled.record_of(path)
    found: dict[str, Any] = {
        "name": name,
        "path": str(path),
        "pulled": record is not None,
        "bytes": _num_bytes(path),
        "last_used_s": last_use.seconds(path),
    }
    try:
        if path.is_file():
            files, source = GgufFile.open(path), dict[str, Any]()
        else:
            files = Bundle.open(path, verify="size")
            source = files.manifest.source
        fits = estimate(files, **options.given(arguments, threads="threads"))["fits"]
    except KvqError as error:
        return found | {"error": told(error)}
    said = (source.get("license", "unknown"), source.get("model", str(path)))
    license, origin = said if record is None else (record.license, record.source)
    return found | {"license": license, "source": origin, "fits": fits}


def _num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.iterdir()
    return sum(file.stat().st_size for file in files if file.is_file())


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    size, used = format_bytes(one["bytes"]), _ago(one["last_used_s"])
    if "error" in one:
        return (one["name"], size, "-", "-", used, f"unusable: {one['error']}")
    fits = {True: "yes", False: "no", None: "unknown"}[one["fits"]]
    cells = (one["name"], size, one["license"], fits, used, one["source"])
    return tuple(output.line(cell) for cell in cells)


def _ago(when_s: float | None) -> str:
    """How long ago that was, in the largest unit."""
    if when_s is None:
        return "never"
    passed = time.time() - when_s
    for seconds, name in _UNITS:
        if passed >= 2 * seconds:
            return f"{passed // seconds:.0f} {name} ago"
    return "just now"
