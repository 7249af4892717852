"""`kvq lsp`: a language server that completes code, for any editor that speaks LSP 3.18."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from kvq_apps import flags, options
from kvq_apps.completion import asked

if TYPE_CHECKING:
    from kvq_apps.lsp.server import Completer

# A file of some thousand lines and what is suggested in it.
DEFAULT_CONTEXT = 8192
DEFAULT_FILES = 2


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq lsp`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="see --model")
    asked.add_arguments(parser)
    flags.add_flags(
        parser, "exact", "files", "server", "api-key",
        server="suggestions of a running `kvq serve`, http://HOST:PORT or the path of its "
        "--socket, instead of loading a model",
        api_key="what the server asks for",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code. Standard output carries frames only."""
    from kvq_apps.lsp.server import LanguageServer

    asked.check(arguments)

    def load() -> "Completer":
        if arguments.server is not None:
            from kvq_apps.completion.served import ServedCompletions

            return ServedCompletions(
                arguments.server,
                exact=arguments.exact,
                api_key=arguments.api_key,
                **asked.drafts_and_tokens(arguments),
            )
        from kvq_apps.opening import open_engine

        engine = open_engine(options.model_name(arguments), **options.engine_options(arguments))
        files = DEFAULT_FILES if arguments.files is None else arguments.files
        return asked.completion_engine(
            arguments, engine, DEFAULT_CONTEXT, exact=arguments.exact, files=files
        )

    def log(line: str) -> None:
        print(f"kvq lsp: {line}", file=sys.stderr, flush=True)

    with _own_stdout() as sink:
        return LanguageServer(sys.stdin.buffer, sink, load, log, arguments.untrusted).run()


@contextmanager
def _own_stdout() -> Generator[BinaryIO]:
    """Standard output for frames alone: what a library prints, native or not, joins the log."""
    stdout = sys.stdout.fileno()
    log = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()
    # Without a buffer, whose lock a write that nobody reads would hold for ever.
    with os.fdopen(os.dup(stdout), "wb", buffering=0) as sink:
        os.dup2(log, stdout)
        try:
            yield sink
        finally:
            sys.stdout.flush()
            os.dup2(sink.fileno(), stdout)
