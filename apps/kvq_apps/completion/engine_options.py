"""The flags that `kvq complete` and `kvq lsp` share, and the completion engine they describe."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kvq_apps.settings import flags, options

if TYPE_CHECKING:
    from kvq_apps.completion.completion_engine import CompletionEngine
    from kvq_apps.names.engine import Engine


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of both commands."""
    flags.add_flags(parser, *flags.ENGINE_FLAGS)
    flags.add_flags(
        parser, "drafts", "drafts-method", "predict",
        drafts="suggestions to show (default: {kvq_apps.completion.suggestions:DEFAULT_DRAFTS}; "
        "1 with llama.cpp)",
        drafts_method="how they are written: branches, superposed (default: branches)",
        predict="most tokens of one (default: {kvq_apps.completion.suggestions:DEFAULT_TOKENS})",
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS, "ctx-size"
    )


def drafts_and_tokens(arguments: Namespace) -> dict[str, Any]:
    """Returns `drafts` and `tokens`, as far as flags give them."""
    return options.keywords(arguments, drafts="drafts", tokens="predict")


def completion_engine(
    arguments: Namespace, engine: "Engine", context_tokens: int, **settings: Any
) -> "CompletionEngine":
    """Makes the completion engine that the flags describe.

    Its context has up to `context_tokens`, unless flags say otherwise. `settings` are further
    arguments of `CompletionEngine`.
    """
    from kvq_apps.completion.completion_engine import CompletionEngine

    session = {"context_tokens": min(context_tokens, engine.model.context_length)}
    return CompletionEngine(
        engine,
        engine.writer(arguments.drafts_method or "branches"),
        session_options=session | options.session_options(arguments),
        **settings,
        **drafts_and_tokens(arguments),
    )
