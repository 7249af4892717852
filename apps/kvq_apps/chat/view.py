"""What shows a chat: the screen, as the rooms behind it see it."""

from collections.abc import Sequence
from typing import Protocol

from kvq_apps.chat.messages import Message


class View(Protocol):
    """Where it is all shown. Called on the screen's thread only, but for `say_from_thread`."""

    def say(self, text: str, *, error: bool = False) -> None:
        """Shows a remark in the conversation."""
        ...

    def say_from_thread(self, text: str) -> None:
        """Shows an error that another thread met."""
        ...

    def changed(self) -> None:
        """The activity, the numbers or the queue are new."""
        ...

    def show(self, messages: Sequence[Message]) -> None:
        """Shows these messages alone."""
        ...

    def add(self, message: Message) -> None:
        """Shows one more message."""
        ...

    def feed(self, text: str) -> None:
        """Shows more of the last message; empty: draws what is not drawn yet."""
        ...

    def finished(self, message: Message) -> None:
        """The last message is whole, its state is new."""
        ...

    async def ask(self, question: str, answers: Sequence[tuple[str, str]]) -> str | None:
        """The key of the answer the user chooses, None for none."""
        ...

    def set_theme(self, name: str) -> None:
        """Takes the theme used last, if it is there."""
        ...
