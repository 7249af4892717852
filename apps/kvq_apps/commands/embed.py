"""`kvq embed`: makes vectors of texts, for search and for comparing them."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """Holds a text and where it stands; `line` counts from 1 in a file with one text a line."""

    file: str
    line: int | None
    text: str

    @property
    def place(self) -> dict[str, Any]:
        """Returns file and line, as a row of the output names them."""
        return {"file": self.file} | ({} if self.line is None else {"line": self.line})


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

    from kvq_apps.opening import open_engine

    with open_engine(model, **options.engine_options(arguments)) as engine:
        vectors = engine.embed(
            [text.text for text in texts],
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


def _texts(file: str) -> Iterator[_Text]:
    """Yields the texts of a file. Raises `KvqError` for a file or a line that has none."""
    content = text_input.read_text(file)
    if Path(file).suffix != LINES:
        yield _Text(file=file, line=None, text=content)
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
        yield _Text(file=file, line=number, text=text)


def _rows(texts: list[_Text], vectors: NDArray[np.float32]) -> Iterator[str]:
    """Yields a line of JSON for each text."""
    for text, vector in zip(texts, vectors, strict=True):
        yield json.dumps(text.place | {"embedding": vector.tolist()})


def _write(out: Path, texts: list[_Text], vectors: NDArray[np.float32]) -> None:
    with replace_file(out) as stream:
        if out.suffix == ARRAY:
            np.save(stream, vectors)
        else:
            stream.writelines(f"{row}\n".encode() for row in _rows(texts, vectors))
