"""What opens over the conversation: the list of chats, help, and questions with a few answers."""

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from kvq_apps.chat.chat_list import ChatList, Find, chat_line

_BOX = """
    align: center middle;
    & > Vertical {
        width: 90%; max-width: 100; height: auto; max-height: 90%;
        border: round $primary; background: $surface; padding: 0 1;
    }
"""


class ChatPicker(ModalScreen[str | None]):
    """A chat to resume, found by its words; returns its id."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(None)", "close")]
    DEFAULT_CSS = f"ChatPicker {{ {_BOX} OptionList {{ max-height: 20; }} }}"

    def __init__(self, find: Find, text: str) -> None:
        super().__init__()
        hint = "words of a message; Enter opens the first chat"
        self.chats = ChatList(find, chat_line, text, hint)

    def compose(self) -> ComposeResult:
        """A line to search with, and what it finds."""
        with Vertical():
            yield self.chats

    def on_chat_list_opened(self, event: ChatList.Opened) -> None:
        """The one to go on with."""
        event.stop()
        self.dismiss(event.chat_id)


class Entry(ModalScreen[str | None]):
    """A line to write; returns it, None for nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(None)", "leave it")]
    DEFAULT_CSS = f"Entry {{ {_BOX} }}"

    def __init__(self, text: str, value: str) -> None:
        super().__init__()
        self._text = text
        self._value = value

    def compose(self) -> ComposeResult:
        """What is asked for, above the line."""
        with Vertical():
            yield Static(self._text, markup=False)
            yield Input(self._value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """The line is written."""
        self.dismiss(event.value.strip() or None)


class HelpScreen(ModalScreen[None]):
    """Keys and commands."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,f1,q", "dismiss(None)", "close")]
    DEFAULT_CSS = f"HelpScreen {{ {_BOX} VerticalScroll {{ height: auto; max-height: 100%; }} }}"

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        """The text, scrollable."""
        with Vertical(), VerticalScroll():
            yield Static(self.text, markup=False)


class Question(ModalScreen[str | None]):
    """A question with a few answers; returns the key of the one chosen, None for none."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(None)", "leave it")]
    DEFAULT_CSS = f"Question {{ {_BOX} OptionList {{ height: auto; }} }}"

    def __init__(self, text: str, answers: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._text = text
        self._answers = answers

    def compose(self) -> ComposeResult:
        """The question above its answers."""
        with Vertical():
            yield Static(self._text, markup=False)
            yield OptionList(
                *(Option(Content(says), id=key) for key, says in self._answers), markup=False
            )

    def on_mount(self) -> None:
        """Enter takes the first answer."""
        options = self.query_one(OptionList)
        options.highlighted = 0
        options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """The answer is given."""
        self.dismiss(event.option.id)
