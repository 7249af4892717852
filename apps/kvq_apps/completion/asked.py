"""What `kvq complete` and `kvq lsp` ask alike: their flags, and the completion engine they mean."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError, argument
from kvq_apps import flags, options

if TYPE_CHECKING:
    from kvq_apps.completion.completion_engine import CompletionEngine
    from kvq_runtime.named_engine import Engine


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of both."""
    flags.add_flags(parser, *flags.ENGINE_FLAGS)
    flags.add_flags(
        parser, "drafts", "drafts-method", "predict",
        drafts="suggestions to show (default: {kvq_apps.completion.drafts:DEFAULT_DRAFTS}; "
        "1 with llama.cpp)",
        drafts_method="how they are written: auto, branches, superposed, spliced (default: auto)",
        predict="most tokens of one (default: {kvq_apps.completion.drafts:DEFAULT_TOKENS})",
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS, "ctx-size"
    )


def check(arguments: Namespace) -> None:
    """Refuses what needs no model to be refused."""
    asked = options.given(arguments, drafts="drafts", method="drafts-method")
    if any(len(values) > 1 for values in asked.values()):
        raise UsageError(
            f"completion takes one number of {argument('--drafts')} and one "
            f"{argument('--drafts-method')}"
        )


def drafts_and_tokens(arguments: Namespace) -> dict[str, Any]:
    """`drafts` and `tokens` as far as flags ask for them."""
    asked = options.given(arguments, drafts="drafts", tokens="predict")
    if "drafts" in asked:
        (asked["drafts"],) = asked["drafts"]
    return asked


def completion_engine(
    arguments: Namespace, engine: "Engine", context_tokens: int, **settings: Any
) -> "CompletionEngine":
    """What completes as the flags say, in up to `context_tokens` unless they say that, too.

    `settings` are further ones of `CompletionEngine`.
    """
    from kvq_apps.completion.completion_engine import CompletionEngine

    (method,) = options.given(arguments, method="drafts-method").get("method", ("auto",))
    session = {"context_tokens": min(context_tokens, engine.model.context_length)}
    return CompletionEngine(
        engine,
        engine.writer(method),
        session_options=session | options.session_options(arguments),
        **settings,
        **drafts_and_tokens(arguments),
    )
