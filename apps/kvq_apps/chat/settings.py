"""What a chat is started with and what `/set` changes. Knows no screen and no engine."""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvq.errors import UsageError
from kvq_apps.chat.client import Turn
from kvq_apps.chat.messages import Message
from kvq_apps.flags import FLAGS
from kvq_apps.options import SAMPLING_FIELDS, max_tokens
from kvq_apps.thinking import AUTO
from kvq_runtime.config import Sampling, check_seed

# A small model may never end a reply by itself; the context is longer than anybody waits for.
REPLY_TOKENS = 2048


@dataclass(kw_only=True, slots=True)
class ChatSettings:
    """How replies are sampled, and where things are kept.

    `asked` are the fields of `Sampling` that flags and `/set` name; of the others those of
    `model_sampling` hold, which is what the open model asks for.
    `max_tokens` are a reply's at most, None: to the end of the context.

    `history_path` None keeps the chats in memory; `snapshots` is the folder of saved KV caches.
    `chat_id` is the chat to go on with, `latest` says the one used last. `theme` comes from
    `theme_origin`, as a warning names it; None: the one used last. `warnings` are about settings.
    `kv_pinned`: the KV settings of the command line hold, also for a chat that was kept at others;
    `model_pinned`: so does its model, also for a chat that was written with another.
    """

    asked: dict[str, Any] = field(default_factory=dict[str, Any])
    model_sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = REPLY_TOKENS
    seed: int | None = None
    system: str | None = None
    history_path: Path | None = None
    snapshots: Path | None = None
    kv_pinned: bool = False
    model_pinned: bool = False
    keys_path: Path | None = None
    theme: str | None = None
    theme_origin: str = "--theme"
    meter: str = "full"
    think: str = AUTO
    warnings: Sequence[str] = ()
    chat_id: str | None = None
    latest: bool = False

    @property
    def sampling(self) -> Sampling:
        """What holds for the next reply."""
        return replace(self.model_sampling, **self.asked)

    def turn(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        *,
        edited: Sequence[Message] = (),
    ) -> Turn:
        """Asks for a reply to `messages`, of `max_tokens` or as many as the settings say."""
        return Turn(
            messages=messages,
            edited=edited,
            sampling=self.sampling,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            seed=self.seed,
            think=self.think,
        )

    def change(self, words: str) -> str:
        """`"temp 0.2"` changes one value; returns what it is now. Raises `UsageError`."""
        name, _, value = words.strip().partition(" ")
        known = (*SAMPLING_FIELDS, "seed", "predict", "think")
        if name not in known or not value.strip():
            raise UsageError(
                f"/set {words} is not possible: write /set NAME VALUE, NAME of {', '.join(known)}"
            )
        if name == "think":
            self.think = _chosen("think", value.strip())
            return f"think is {self.think} from the next reply on"
        try:
            number = FLAGS[name].read(value)
        except ArgumentTypeError:
            raise UsageError(f"/set {name} {value} is not possible: give a number") from None
        if name == "seed":
            check_seed(number)
            self.seed = number
        elif name == "predict":
            self.max_tokens = max_tokens(number, None)
        else:
            asked = self.asked | {SAMPLING_FIELDS[name]: number}
            _ = Sampling(**asked)
            self.asked = asked
        return f"{name} is {value.strip()} from the next reply on"

    def lines(self) -> list[str]:
        """Every value, one per line."""
        sampling = self.sampling
        return [
            f"temp {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}, "
            f"min-p {sampling.min_p}, repeat-penalty {sampling.repeat_penalty}",
            f"seed {'fresh' if self.seed is None else self.seed}, predict "
            f"{'to the end of the context' if self.max_tokens is None else self.max_tokens}, "
            f"think {self.think}",
        ]


def _chosen(name: str, value: str) -> str:
    """`value`, if it is one of those that the flag `name` takes."""
    choices = FLAGS[name].choices or ()
    if value not in choices:
        raise UsageError(f"/set {name} {value} is not possible: give {', '.join(choices)}")
    return value
