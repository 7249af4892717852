"""What gives way when a conversation is longer than the context. Asks and writes nothing.

What a token is only the engine knows: its count of the whole conversation says how many
characters one has.
"""

from collections.abc import Sequence

from kvq_apps.chat.client import ContextFullError, Turn
from kvq_apps.chat.messages import Message
from kvq_apps.chat.settings import ChatSettings

# Filled again so far, a conversation has room for some turns more.
FILLED_SHARE = 0.75
FILLED_SHARE_SUMMARISED = 0.5
SUMMARY_SHARE = 1 / 8
SUMMARY_TOKENS = (16, 512)
WAYS = (
    ("trim", "Leave the oldest messages out (they stay in the chat)"),
    ("summarise", "Let the model sum the oldest messages up (they stay in the chat)"),
    ("new", "Begin a new chat with this message"),
    ("keep", "Do nothing"),
)
_REQUEST = (
    "Sum up our conversation so far in at most {words} words and in its language, so that we can "
    "go on from the summary alone. Keep names, numbers, decisions, code we still need and open "
    "questions. Write the summary and nothing else."
)


def excess_characters(
    context: Sequence[Message], error: ContextFullError, *, summarised: bool
) -> int:
    """About how many of its first characters a context must lose to have room again; 1 or more."""
    if error.needed <= 0:
        return 1
    share = FILLED_SHARE_SUMMARISED if summarised else FILLED_SHARE
    tokens = error.needed - share * error.limit
    return max(1, round(tokens * sum(len(row.text) for row in context) / error.needed))


def too_long(error: ContextFullError) -> str:
    """What to say when there is nothing that could give way."""
    holds = f" of {error.limit} tokens" if error.limit else ""
    return (
        f"this message alone is longer than the context{holds}; shorten it (Alt+Up, then e), or "
        "give more with --ctx-size"
    )


def summary_turn(
    system: Sequence[Message], old: Sequence[Message], limit: int, settings: ChatSettings
) -> Turn:
    """Asks for a summary of the messages `old` in an eighth of a context of `limit` tokens."""
    least, most = SUMMARY_TOKENS
    tokens = min(most, max(least, round(limit * SUMMARY_SHARE)))
    request = Message(role="user", text=_REQUEST.format(words=tokens // 2))
    return settings.turn([*system, *old, request], tokens)
