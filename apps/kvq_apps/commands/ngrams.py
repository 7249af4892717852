"""`kvq ngrams`: counts short runs of tokens in files of one's own, for Superposed Decoding."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps import flags, options, output

if TYPE_CHECKING:
    from kvq_models.tokenizer import Tokenizer

ACTIONS = ("build", "show", "remove")
# A larger file is data or was made by a program.
MOST_FILE_BYTES = 1 << 20


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq ngrams`."""
    parser.add_argument(
        "action",
        nargs="?",
        default="show",
        metavar="ACTION",
        help="build: count PATHs, in place of what was counted before; show: say what there is "
        "(default); remove: delete it",
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="text files, and folders to look through"
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
    from kvq_apps.model_path import resolve_model
    from kvq_apps.ngram_file import ngram_file
    from kvq_runtime.engine import Engine

    with Engine.open(resolve_model(arguments.model), **options.engine_options(arguments)) as engine:
        tokenizer, model = engine.tokenizer, engine.model.name
    file = ngram_file(tokenizer)
    if arguments.action == "build":
        _build(arguments.paths, file, tokenizer)
    elif arguments.action == "remove":
        there = file.exists()
        file.unlink(missing_ok=True)
        if not arguments.json:
            output.print_note("removed" if there else f"there were no n-grams for {model}")
    _show(file, model, as_json=arguments.json)
    return 0


def _build(paths: list[str], file: Path, tokenizer: "Tokenizer") -> None:
    from kvq_apps.ngram_file import identity
    from kvq_specdraft.ngrams import build

    found = list(dict.fromkeys(own for path in paths for own in _files(Path(path))))
    file.parent.mkdir(parents=True, exist_ok=True)
    with output.Progress() as progress:

        def texts() -> Iterator[list[int]]:
            counted = False
            for number, path in enumerate(found, 1):
                if text := _text(path):
                    counted = True
                    yield tokenizer.encode(text)
                progress(number, len(found))
            if not counted:
                raise UsageError(f"{', '.join(paths)}: there is no text file to count")

        build(texts(), file, vocab_size=tokenizer.vocab_size, tokenizer=identity(tokenizer))


def _files(path: Path) -> Iterator[Path]:
    """`path`, or the files below it, hidden ones and their folders left out."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; give text files or folders")
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _text(path: Path) -> str:
    """What a file says; nothing where it is no text, or too large to be one's own."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_FILE_BYTES:
            return ""
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
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
