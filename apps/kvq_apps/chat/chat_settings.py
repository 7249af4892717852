"""The settings of a chat, and how `/set` changes them. Knows no screen and no engine."""

from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvq.errors import UsageError
from kvq_apps.chat.client import Turn
from kvq_apps.chat.messages import Message
from kvq_apps.chat.tool_servers import ToolServerSettings
from kvq_apps.settings.flags import FLAGS
from kvq_apps.settings.options import SAMPLING_FIELDS, max_tokens
from kvq_apps.thinking import AUTO, CHOICES
from kvq_runtime.config import Sampling, check_seed

# A small model may never end a reply by itself, and a full context takes too long.
REPLY_TOKENS = 2048


@dataclass(kw_only=True, slots=True)
class ChatSettings:
    """Holds how replies are sampled and where things are kept.

    `sampling_overrides` are the fields of `Sampling` that flags and `/set` name; the other fields
    come from `model_sampling`, the defaults of the open model. `max_tokens` limits a reply; None:
    up to the context's end.

    `history_path` None keeps the chats in memory. `snapshots` is the folder of saved KV caches.
    `chat_id` is the chat to go on with; `latest` means the last one. `theme` comes from
    `theme_origin`, as a warning names it; None: the last theme. `warnings` are about settings.
    `kv_pinned`: the KV settings of the command line also hold for a chat that was saved at others.
    `model_pinned`: so does its model. `tool_servers` offer tools to the model.
    """

    sampling_overrides: dict[str, Any] = field(default_factory=dict[str, Any])
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
    tool_servers: Sequence[ToolServerSettings] = ()

    @property
    def sampling(self) -> Sampling:
        return replace(self.model_sampling, **self.sampling_overrides)

    def turn(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        *,
        edited: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Turn:
        """Makes a request for a reply to `messages`; `max_tokens` None: as the settings say."""
        return Turn(
            messages=messages,
            edited=edited,
            sampling=self.sampling,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            seed=self.seed,
            think=self.think,
            tools=tools,
        )

    def change(self, words: str) -> str:
        """Changes one value: `"temp 0.2"`. Returns what it is now. Raises `UsageError`."""
        name, _, value = words.strip().partition(" ")
        names = (*SAMPLING_FIELDS, "seed", "predict", "think")
        if name not in names or not value.strip():
            raise UsageError(
                f"/set {words} is not possible: write /set NAME VALUE, NAME of {', '.join(names)}"
            )
        if name == "think":
            if value.strip() not in CHOICES:
                raise UsageError(f"/set {words} is not possible: give {', '.join(CHOICES)}")
            self.think = value.strip()
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
            overrides = self.sampling_overrides | {SAMPLING_FIELDS[name]: number}
            _ = Sampling(**overrides)
            self.sampling_overrides = overrides
        return f"{name} is {value.strip()} from the next reply on"

    def lines(self) -> list[str]:
        """Describes every value, several per line."""
        sampling = self.sampling
        return [
            f"temp {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}, "
            f"min-p {sampling.min_p}, repeat-penalty {sampling.repeat_penalty}",
            f"seed {'fresh' if self.seed is None else self.seed}, predict "
            f"{'to the end of the context' if self.max_tokens is None else self.max_tokens}, "
            f"think {self.think}",
        ]
