"""`kvq complete`: what an editor would show at a place of a file."""

import re
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError
from kvq_apps import options, output, text_input
from kvq_apps.completion import asked

if TYPE_CHECKING:
    from kvq_apps.completion.drafts import Completion

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?")
# A file and what is written in it.
DEFAULT_CONTEXT = 4096
CHUNK_TOKENS = 256


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq complete`."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="[MODEL] FILE:LINE[:COL]",
        help="a place in a UTF-8 text, line and column from 1; without a column the line's end. A "
        "first word before it is the model",
    )
    asked.add_arguments(parser)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    *model, where = arguments.words
    if len(model) > 1 or (model and options.written(arguments, "model")):
        raise UsageError("give one model and one place: kvq complete [MODEL] FILE:LINE[:COL]")
    file, line, column = _place(where)
    asked.check(arguments)
    from kvq_apps.completion.document import Document
    from kvq_apps.opening import open_engine

    document = Document(text_input.read_text(file))
    if line > document.num_lines:
        raise UsageError(f"{file} has {document.num_lines} lines; there is no line {line}")
    end = len(document.line(line - 1))
    place = line - 1, end if column is None else min(column - 1, end)
    name = model[0] if model else arguments.model
    with open_engine(name, **options.engine_options(arguments)) as engine:
        # Nobody waits for the disk or for another key: the text is read in large pieces.
        completions = asked.completion_engine(
            arguments, engine, DEFAULT_CONTEXT, chunk_tokens=CHUNK_TOKENS
        )
        found = completions.complete(document, place)
        completions.close()
    _print(found, as_json=arguments.json)
    return 0


def _place(text: str) -> tuple[str, int, int | None]:
    """File, line and column of `FILE:LINE[:COL]`."""
    match = _PLACE.fullmatch(text)
    if match is None or int(match["line"]) < 1 or match["column"] == "0":
        raise UsageError(
            f"{text} is no place: give FILE:LINE or FILE:LINE:COL, both counted from 1"
        )
    return match["file"], int(match["line"]), int(match["column"]) if match["column"] else None


def _print(found: "Completion", *, as_json: bool) -> None:
    if as_json:
        report: dict[str, Any] = {
            "drafts": [{"text": one.text, "logprob": one.logprob} for one in found.drafts],
            "reused_tokens": found.reused_tokens,
            "encoded_tokens": found.encoded_tokens,
            "ms": found.ms,
            "why_not": found.why_not,
        }
        output.print_json(report)
        return
    for one in found.drafts:
        output.print_data(one.text)
    if not found.drafts:
        output.print_note(f"no suggestion is worth showing here ({found.why_not})")
