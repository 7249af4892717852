"""What opens over the conversation: the list of chats, help, and questions with a few answers."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from kvq_apps.chat.history import ChatSummary
from kvq_apps.chat.visible import visible

Find = Callable[[str], Awaitable[list[ChatSummary]]]

_BOX = """
    align: center middle;
    & > Vertical {
        width: 90%; max-width: 100; height: auto; max-height: 90%;
        border: round $primary; background: $surface; padding: 0 1;
    }
"""


class ChatPicker(ModalScreen[str | None]):
    """A chat to resume, found by its words; returns its id."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "dismiss(None)", "close"),
        ("down", "focus_list", "to the list"),
    ]
    DEFAULT_CSS = f"ChatPicker {{ {_BOX} OptionList {{ height: auto; max-height: 20; }} }}"

    def __init__(self, find: Find, text: str) -> None:
        super().__init__()
        self._find = find
        self._text = text

    def compose(self) -> ComposeResult:
        """A line to search with, and what it finds."""
        with Vertical():
            yield Input(self._text, placeholder="words of a message; Enter opens the first chat")
            yield OptionList(markup=False)

    async def on_mount(self) -> None:
        """Shows the latest chats."""
        await self._show(self._text)

    async def on_input_changed(self, event: Input.Changed) -> None:
        """Searches while the user types."""
        await self._show(event.value)

    def on_input_submitted(self) -> None:
        """Enter opens the first."""
        options = self.query_one(OptionList)
        if options.option_count:
            self.dismiss(options.get_option_at_index(0).id)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Opens the one chosen."""
        self.dismiss(event.option.id)

    def action_focus_list(self) -> None:
        """Down leaves the search line."""
        self.query_one(OptionList).focus()

    async def _show(self, text: str) -> None:
        found = await self._find(text)
        seen: dict[str, ChatSummary] = {}
        for chat in found:
            seen.setdefault(chat.id, chat)
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(Option(Content(chat_line(chat)), id=chat.id) for chat in seen.values())


def chat_line(chat: ChatSummary) -> str:
    """A chat in one line: when, how long, what about."""
    when = datetime.fromtimestamp(chat.updated_s).astimezone().strftime("%Y-%m-%d %H:%M")
    about = chat.excerpt or chat.title or "(no title)"
    return visible(f"{when}  {chat.messages:>4} messages  {about}")


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
