"""`kvq lsp`: runs a language server that completes code, for editors that speak LSP 3.18."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from kvq.errors import UsageError
from kvq_apps.completion import engine_options
from kvq_apps.settings import flags, options, sources
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_apps.lsp.language_server import Completer

# Enough for a file of some thousand lines and a suggestion.
DEFAULT_CONTEXT = 8192
DEFAULT_FILES = 2
# Flags that an editor may set in its `initializationOptions`.
EDITOR_FLAGS = (
    "model", "backend", "device", "server", "api-key", "kv", "kv-budget", "kv-policy", "ctx-size",
    "predict", "files", "exact",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq lsp`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="see --model")
    engine_options.add_arguments(parser)
    flags.add_flags(
        parser, "exact", "files", "server", "api-key",
        server="suggestions of a running `kvq serve`, http://HOST:PORT or the path of its "
        "--socket, instead of loading a model",
        api_key="what the server asks for",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code. Standard output carries frames only."""
    from kvq_apps.lsp.language_server import LanguageServer

    # What the editor says before a model is loaded. Next edits take a session of their own.
    next_edits = True

    def load() -> "Completer":
        if arguments.server is not None:
            from kvq_apps.completion.remote_completer import RemoteCompleter

            return RemoteCompleter(
                arguments.server,
                exact=arguments.exact,
                api_key=arguments.api_key,
                **engine_options.drafts_and_tokens(arguments),
            )
        from kvq_apps.names.engine import open_engine

        engine = open_engine(options.model_name(arguments), **options.engine_options(arguments))
        files = DEFAULT_FILES if arguments.files is None else arguments.files
        return engine_options.completion_engine(
            *(arguments, engine, DEFAULT_CONTEXT),
            exact=arguments.exact,
            files=files,
            next_edits=next_edits,
        )

    def log(line: str) -> None:
        output.print_note(f"kvq lsp: {line}")

    def configure(editor: Mapping[str, Any]) -> None:
        nonlocal next_edits
        next_edits = editor.get("nextEdit") != "off"
        take_editor_options(arguments, editor, log)

    with _own_stdout() as sink:
        return LanguageServer(sys.stdin.buffer, sink, load, log, configure).run()


def take_editor_options(
    arguments: Namespace, editor: Mapping[str, Any], log: Callable[[str], None]
) -> None:
    """Sets flags from the editor's options, unless they are on the command line.

    The editor's options replace values of other sources. A wrong value is logged and ignored.
    """
    for name in EDITOR_FLAGS:
        value = editor.get(name)
        if value is None or options.on_command_line(arguments, name):
            continue
        try:
            setattr(arguments, flags.field(name), sources.checked_value(name, value, name))
        except UsageError as error:
            log(f"{flags.format_error(error)}; it stays as it was")
            continue
        for width in flags.KV_WIDTHS if name == "kv" else ():
            # Widths of the environment or the file do not change the editor's `kv`.
            if not options.on_command_line(arguments, width):
                setattr(arguments, flags.field(width), None)


@contextmanager
def _own_stdout() -> Generator[BinaryIO]:
    """Yields standard output for frames only; what libraries print goes to the log instead."""
    stdout = sys.stdout.fileno()
    log = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()
    # It has no buffer, whose lock a write that nobody reads would hold for ever.
    with os.fdopen(os.dup(stdout), "wb", buffering=0) as sink:
        os.dup2(log, stdout)
        try:
            yield sink
        finally:
            sys.stdout.flush()
            os.dup2(sink.fileno(), stdout)
