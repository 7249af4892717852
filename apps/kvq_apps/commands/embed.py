"""`kvq embed`: makes vectors of texts, for search and for comparing them."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import DataError, UsageError, argument, reason_of
from kvq.files import path_of, replace_file
from kvq.json_values import is_object
from kvq_apps.settings import flags, options
from kvq_apps.terminal import output, text_input

ARRAY, LINES = ".npy", ".jsonl"
# A text, and the file and the line where it stands, as a row of the output names them.
PlacedText = tuple[str, dict[str, Any]]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq embed`."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="[MODEL] FILE",
        help="texts in UTF-8, one a file, or one on each line of a FILE.jsonl (a JSON string, or "
        "an object with `text`); of several words the first is the model, unless -m names it",
    )
    flags.add_flags(
        parser, "out",
        out="FILE.npy, a float32 array with a row for each text, or FILE.jsonl (default: lines of "
        "JSON to the output)",
    )  # fmt: skip
    flags.add_flags(parser, "prompt-name", "dimensions", *flags.ENGINE_FLAGS, "ctx-size")
    flags.add_flags(parser.add_argument_group("cache"), *flags.KV_FLAGS)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    model, files = arguments.model, arguments.words
    if len(files) > 1 and not options.on_command_line(arguments, "model"):
        model, *files = files
    out = None if arguments.out is None else path_of(arguments.out)
    if out is not None and out.suffix not in (ARRAY, LINES):
        raise UsageError(f"{argument('--out')} {out} ends with neither {ARRAY} nor {LINES}")
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"{argument('--out')} {out}: there is no folder {out.parent}")
    texts = [text for file in files for text in _texts(file)]
    if not texts:
        raise DataError(f"{', '.join(files)}: there is no line to make a vector of")

    from kvq_apps.names.engine import open_engine

    with open_engine(model, **options.engine_options(arguments)) as engine:
        vectors = engine.embed(
            [text for text, _ in texts],
            session=options.session_options(arguments),
            **options.keywords(arguments, prompt_name="prompt-name", dimensions="dimensions"),
        )
    if out is None:
        for row in _rows(texts, vectors):
            output.print_data(row)
        return 0
    _write(out, texts, vectors)
    if arguments.json:
        count, width = vectors.shape
        output.print_json({"texts": count, "dimensions": width, "out": str(out)})
    return 0


def _texts(file: str) -> Iterator[PlacedText]:
    """Yields the texts of a file. Raises `KvqError` for a file or a line that has none."""
    content = text_input.read_text(file)
    if Path(file).suffix != LINES:
        yield content, {"file": file}
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}, line {number} is not JSON: {reason_of(error)}") from error
        text = value.get("text") if is_object(value) else value
        if not isinstance(text, str):
            raise DataError(f"{file}, line {number} is no string, and no object with a text")
        yield text, {"file": file, "line": number}


def _rows(texts: list[PlacedText], vectors: NDArray[np.float32]) -> Iterator[str]:
    """Yields a line of JSON for each text."""
    for (_, place), vector in zip(texts, vectors, strict=True):
        yield json.dumps(place | {"embedding": vector.tolist()})


def _write(out: Path, texts: list[PlacedText], vectors: NDArray[np.float32]) -> None:
    with replace_file(out) as stream:
        if out.suffix == ARRAY:
            np.save(stream, vectors)
        else:
            stream.writelines(f"{row}\n".encode() for row in _rows(texts, vectors))
