"""`kvq lsp`: a language server that completes code, for any editor that speaks LSP 3.18."""

import sys
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from kvq.errors import UsageError
from kvq_apps import flags, options

if TYPE_CHECKING:
    from kvq_apps.lsp.server import Completer

# A file of some thousand lines and what is drafted in it.
DEFAULT_CONTEXT = 8192


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq lsp`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="see --model")
    flags.add_flags(parser, *flags.ENGINE_FLAGS)
    flags.add_flags(
        parser, "drafts", "drafts-method", "predict",
        drafts="drafts to offer (default: {kvq_apps.completion.engine:DEFAULT_DRAFTS})",
        drafts_method="how they are written: auto, branches, superposed, spliced (default: auto)",
        predict="tokens of a draft at most (default: {kvq_apps.completion.engine:DEFAULT_TOKENS})",
    )  # fmt: skip
    flags.add_flags(parser.add_argument_group("cache"), *flags.KV_FLAGS, "kv-predict", "ctx-size")


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code. Standard output carries frames only."""
    from kvq_apps.completion.engine import CompletionEngine
    from kvq_apps.engine import Engine
    from kvq_apps.lsp.server import LanguageServer

    counts, methods = arguments.drafts or (), arguments.drafts_method or ["auto"]
    if len(counts) > 1 or len(methods) > 1:
        raise UsageError("kvq lsp takes one number of --drafts and one --drafts-method")
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    wanted = {"drafts": counts[0] if counts else None, "tokens": arguments.predict}
    settings = {key: own for key, own in wanted.items() if own is not None}

    def load() -> "Completer":
        engine = Engine.open(options.model_name(arguments), **options.engine_options(arguments))
        context = min(DEFAULT_CONTEXT, engine.model.context_length)
        session = {"context_tokens": context} | options.session_options(arguments)
        return CompletionEngine(
            engine, engine.writer(methods[0]), session_options=session, **settings
        )

    def log(line: str) -> None:
        print(f"kvq lsp: {line}", file=sys.stderr, flush=True)

    # What a library prints must not get between the frames.
    with redirect_stdout(sys.stderr):
        return LanguageServer(source, sink, load, log).run()
