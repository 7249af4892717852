"""`kvq lsp`: a language server that completes code, for any editor that speaks LSP 3.18."""

import sys
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

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
    source, sink = sys.stdin.buffer, sys.stdout.buffer

    def load() -> "Completer":
        if arguments.server is not None:
            return ServedCompletions(arguments.server, tokens=arguments.predict or DEFAULT_TOKENS)
        engine = Engine.open(options.model_name(arguments), **options.engine_options(arguments))
        return asked.completion_engine(arguments, engine, DEFAULT_CONTEXT, exact=arguments.exact)

    def log(line: str) -> None:
        print(f"kvq lsp: {line}", file=sys.stderr, flush=True)

    # What a library prints must not get between the frames.
    with redirect_stdout(sys.stderr):
        return LanguageServer(source, sink, load, log).run()
