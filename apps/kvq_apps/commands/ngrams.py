"""`kvq ngrams`: counts n-grams of tokens in the user's own files, for Superposed Decoding."""

import os
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.errors import DataError, UsageError
from kvq.files import read_regular
from kvq.formats import format_bytes
from kvq.settings import harmless_git
from kvq_apps.settings import flags, options
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_models.tokenizer import Tokenizer

ACTIONS = ("build", "show", "remove")
# A larger file is data or was made by a program.
MOST_FILE_BYTES = 1 << 20
# Python puts this file into every virtual environment, whose files are not the user's.
VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
GIT_LIMIT_S = 60


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq ngrams`."""
    parser.add_argument(
        "action",
        nargs="?",
        default="show",
        metavar="ACTION",
        help="build: count PATHs, in place of what was counted before; show: say what there is "
        "(default); remove: delete it",
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="text files, and folders to look through: without hidden files, symbolic links and "
        "virtual environments, and in a checkout without what .gitignore names, if git is "
        "installed",
    )
    flags.add_flags(parser, *flags.ENGINE_FLAGS)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.action not in ACTIONS:
        raise UsageError(
            f"kvq ngrams {arguments.action} is unknown; possible: {', '.join(ACTIONS)}"
        )
    if (arguments.action == "build") != bool(arguments.paths):
        needs = "needs files or folders" if arguments.action == "build" else "takes no paths"
        raise UsageError(f"kvq ngrams {arguments.action} {needs}: kvq ngrams build PATH...")
    from kvq_apps.names.model_path import resolve_model
    from kvq_apps.names.ngram_file import ngram_file
    from kvq_runtime.engine import Engine

    engine_options = options.engine_options(arguments)
    path = resolve_model(arguments.model, engine_options.get("backend", "auto"))
    with Engine.open(path, **engine_options) as engine:
        tokenizer, model = engine.tokenizer, engine.model.name
    file = ngram_file(tokenizer)
    if arguments.action == "build":
        _build(arguments.paths, file, tokenizer)
    elif arguments.action == "remove":
        existed = file.exists()
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"{file} cannot be removed: {error.strerror}") from None
        if not arguments.json:
            output.print_note("removed" if existed else f"there were no n-grams for {model}")
    _show(file, model, as_json=arguments.json)
    return 0


def _build(paths: list[str], file: Path, tokenizer: "Tokenizer") -> None:
    from kvq_apps.names.ngram_file import identity
    from kvq_specdraft.ngrams import build

    files = list(dict.fromkeys(file_path for path in paths for file_path in _files(Path(path))))
    named_paths = {Path(path) for path in paths}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{file.parent} cannot be made: {error.strerror}") from None
    with output.ProgressBar() as progress:

        def texts() -> Iterator[list[int]]:
            counted = False
            for number, path in enumerate(files, 1):
                if text := _text(path, through_links=path in named_paths):
                    counted = True
                    yield tokenizer.encode(text)
                progress(number, len(files))
            if not counted:
                raise UsageError(f"{', '.join(paths)}: there is no text file to count")

        build(texts(), file, vocab_size=tokenizer.vocab_size, tokenizer=identity(tokenizer))


def _files(path: Path) -> Iterator[Path]:
    """Yields `path`, or the user's files below it, without links, which may lead elsewhere."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; give text files or folders")
    if not path.is_dir():
        yield path
        return
    ignored = _ignored(path) if _in_checkout(path) else set[Path]()
    for place, folders, names in os.walk(path):
        folder = Path(place)
        if VIRTUAL_ENVIRONMENT in names and folder != path:
            folders.clear()
            continue
        if folder != path and _is_checkout(folder):
            ignored |= _ignored(folder)
        folders[:] = _counted(folder, folders, ignored)
        yield from (folder / name for name in _counted(folder, names, ignored))


def _counted(folder: Path, names: list[str], ignored: set[Path]) -> list[str]:
    return sorted(
        name for name in names if not name.startswith(".") and folder / name not in ignored
    )


def _in_checkout(folder: Path) -> bool:
    whole = folder.resolve()
    return any(map(_is_checkout, (whole, *whole.parents)))


def _is_checkout(folder: Path) -> bool:
    return (folder / ".git").exists()


def _ignored(folder: Path) -> set[Path]:
    """Returns the files and folders that git ignores in the checkout at `folder`.

    If git fails, a note says why, and nothing is ignored.
    """
    words = ["ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"]
    command, environment = harmless_git()
    try:
        listed = subprocess.run(  # noqa: S603  git, which runs nothing of the checkout
            [*command, "-C", str(folder), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=GIT_LIMIT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error).encode()
        reason = " ".join(message.decode("utf-8", "replace").split())
        output.print_note(f"{folder}: git does not say what .gitignore names ({reason})")
        return set()
    return {folder / os.fsdecode(name.rstrip(b"/")) for name in listed.split(b"\0") if name}


def _text(path: Path, *, through_links: bool) -> str:
    """Returns a file's text, or an empty one where it is no text or too large."""
    try:
        content = read_regular(path, MOST_FILE_BYTES, through_links=through_links)
        return content.decode("utf-8")
    except (OSError, DataError, UnicodeDecodeError):
        return ""


def _show(file: Path, model: str, *, as_json: bool) -> None:
    from kvq_specdraft.ngrams import Ngrams

    size = file.stat().st_size if file.exists() else 0
    tokens = Ngrams.open(file).text_tokens if size else 0
    if as_json:
        output.print_json({"path": str(file), "bytes": size, "text_tokens": tokens})
    elif size:
        output.print_table(
            [("n-grams for", model), ("file", str(file)), ("size", format_bytes(size)),
             ("tokens counted", tokens)]
        )  # fmt: skip
    else:
        output.print_note(f"there are no n-grams for {model}: kvq ngrams build PATH...")
