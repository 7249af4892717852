"""`kvq lsp`: a language server that completes code, for any editor that speaks LSP 3.18."""

import os
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, BinaryIO

from kvq_apps import flags, options
from kvq_apps.completion import asked

if TYPE_CHECKING:
    from kvq_apps.lsp.server import Completer

# A file of some thousand lines and what is drafted in it.
DEFAULT_CONTEXT = 8192


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq lsp`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="see --model")
    asked.add_arguments(parser)
    flags.add_flags(
        parser, "exact", "server",
        server="one draft of a running `kvq serve` instead of loading a model",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code. Standard output carries frames only."""
    from kvq_apps.completion.engine import DEFAULT_TOKENS
    from kvq_apps.completion.served import ServedCompletions
    from kvq_apps.engine import Engine
    from kvq_apps.lsp.server import LanguageServer

    asked.check(arguments)
    source, sink = sys.stdin.buffer, _own_stdout()

    def load() -> "Completer":
        if arguments.server is not None:
            return ServedCompletions(arguments.server, tokens=arguments.predict or DEFAULT_TOKENS)
        engine = Engine.open(options.model_name(arguments), **options.engine_options(arguments))
        return asked.completion_engine(arguments, engine, DEFAULT_CONTEXT, exact=arguments.exact)

    def log(line: str) -> None:
        print(f"kvq lsp: {line}", file=sys.stderr, flush=True)

    return LanguageServer(source, sink, load, log).run()


def _own_stdout() -> BinaryIO:
    """Standard output for frames alone: what a library prints, native or not, joins the log."""
    stdout = sys.stdout.fileno()
    sink = os.fdopen(os.dup(stdout), "wb")
    log = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()
    os.dup2(log, stdout)
    return sink
