"""`kvq complete`: completes code at a place of a file, as an editor would show it."""

import re
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError
from kvq_apps.completion import engine_options
from kvq_apps.settings import options
from kvq_apps.terminal import output, text_input

if TYPE_CHECKING:
    from kvq_apps.completion.suggestions import Completion

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?")
# Enough for a file and the answer.
DEFAULT_CONTEXT = 4096
CHUNK_TOKENS = 256


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq complete`."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="[MODEL] FILE:LINE[:COL]",
        help="a place in a UTF-8 text, line and column from 1; without a column the line's end. A "
        "first word before it is the model",
    )
    engine_options.add_arguments(parser)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    *model, location = arguments.words
    if len(model) > 1 or (model and options.on_command_line(arguments, "model")):
        raise UsageError("give one model and one place: kvq complete [MODEL] FILE:LINE[:COL]")
    file, line, column = _place(location)
    from kvq_apps.completion.document import TextDocument
    from kvq_apps.names.engine import open_engine

    document = TextDocument(text_input.read_text(file))
    if line > document.num_lines:
        raise UsageError(f"{file} has {document.num_lines} lines; there is no line {line}")
    end = len(document.line(line - 1))
    place = line - 1, end if column is None else min(column - 1, end)
    name = model[0] if model else arguments.model
    with open_engine(name, **options.engine_options(arguments)) as engine:
        # No other request waits here, so the text is read in large pieces.
        completions = engine_options.completion_engine(
            arguments, engine, DEFAULT_CONTEXT, chunk_tokens=CHUNK_TOKENS
        )
        completion = completions.complete(document, place)
        completions.close()
    _print(completion, as_json=arguments.json)
    return 0


def _place(text: str) -> tuple[str, int, int | None]:
    """Returns file, line and column of `FILE:LINE[:COL]`."""
    match = _PLACE.fullmatch(text)
    if match is None or int(match["line"]) < 1 or match["column"] == "0":
        raise UsageError(
            f"{text} is no place: give FILE:LINE or FILE:LINE:COL, both counted from 1"
        )
    return match["file"], int(match["line"]), int(match["column"]) if match["column"] else None


def _print(completion: "Completion", *, as_json: bool) -> None:
    if as_json:
        report: dict[str, Any] = {
            "drafts": [
                {"text": draft.text, "logprob": draft.logprob} for draft in completion.drafts
            ],
            "reused_tokens": completion.reused_tokens,
            "encoded_tokens": completion.encoded_tokens,
            "ms": completion.ms,
            "why_not": completion.why_not,
        }
        output.print_json(report)
        return
    for draft in completion.drafts:
        output.print_data(draft.text)
    if not completion.drafts:
        output.print_note(f"no suggestion is worth showing here ({completion.why_not})")
