"""The chats of the history, found by their words: in a list over everything, or beside the chat."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from kvq_apps.chat.conversation import model_name
from kvq_apps.chat.history import ChatSummary
from kvq_apps.chat.visible import visible

Find = Callable[[str], Awaitable[list[ChatSummary]]]


class ChatList(Vertical):
    """A line to search with, and the chats it finds, each drawn by `line`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down", "focus_list", "to the list"),
        ("f2", "rename", "rename"),
        ("delete", "delete", "delete"),
    ]
    DEFAULT_CSS = "ChatList { height: auto; } ChatList OptionList { height: auto; }"

    class Chosen(Event):
        """A chat and, by its kind, what is to be done with it."""

        def __init__(self, chat_id: str) -> None:
            super().__init__()
            self.chat_id = chat_id

    class Opened(Chosen):
        """The user wants to go on with a chat."""

    class Renaming(Chosen):
        """The user wants to give a chat another name."""

    class Deleting(Chosen):
        """The user wants a chat gone."""

    def __init__(
        self, find: Find, line: Callable[[ChatSummary], str], text: str = "", hint: str = ""
    ) -> None:
        super().__init__()
        self._find = find
        self._line = line
        self._input = Input(text, placeholder=hint)
        self._options = OptionList(markup=False)

    def compose(self) -> ComposeResult:
        """The search above what it finds."""
        yield self._input
        yield self._options

    async def on_mount(self) -> None:
        """Shows the latest chats."""
        await self.list_again()

    async def list_again(self) -> None:
        """Searches once more: chats have changed. The same one stays marked."""
        marked = self._marked()
        seen: dict[str, ChatSummary] = {}
        for chat in await self._find(self._input.value):
            seen.setdefault(chat.id, chat)
        self._options.clear_options()
        self._options.add_options(
            Option(Content(self._line(chat)), id=chat.id) for chat in seen.values()
        )
        if marked in seen:
            self._options.highlighted = self._options.get_option_index(marked)

    def search(self) -> None:
        """Has the line to search with take what is typed."""
        self._input.focus()

    async def on_input_changed(self, event: Input.Changed) -> None:
        """Searches while the user types."""
        event.stop()
        await self.list_again()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter opens the first."""
        event.stop()
        self._tell(self.Opened, self._first())

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Opens the one chosen."""
        event.stop()
        self._tell(self.Opened, event.option.id)

    def action_focus_list(self) -> None:
        """Down leaves the search line, to the first."""
        self._options.focus()
        if self._options.highlighted is None:
            self._options.action_first()

    def action_rename(self) -> None:
        self._tell(self.Renaming, self._marked() or self._first())

    def action_delete(self) -> None:
        self._tell(self.Deleting, self._marked() or self._first())

    def _tell(self, event: type[Chosen], chat_id: str | None) -> None:
        if chat_id is not None:
            self.post_message(event(chat_id))

    def _first(self) -> str | None:
        options = self._options
        return options.get_option_at_index(0).id if options.option_count else None

    def _marked(self) -> str | None:
        index = self._options.highlighted
        return None if index is None else self._options.get_option_at_index(index).id


class Sidebar(Vertical):
    """The chats beside the conversation."""

    DEFAULT_CSS = """
    Sidebar {
        width: 32; height: 1fr; display: none; border-right: solid $foreground-muted;
        &:focus-within { border-right: solid $primary; }
        ChatList { height: 1fr; }
        ChatList OptionList { height: 1fr; border: none; }
    }
    """

    def __init__(self, find: Find) -> None:
        super().__init__()
        self.chats = ChatList(find, _title, hint="search; F2 renames, Del")

    def compose(self) -> ComposeResult:
        """The list alone."""
        yield self.chats


def chat_line(chat: ChatSummary) -> str:
    """A chat in one line: when, how long, with which model, what about."""
    when = datetime.fromtimestamp(chat.updated_s).astimezone().strftime("%Y-%m-%d %H:%M")
    parts = when, f"{chat.messages:>4} messages", visible(model_name(chat.model)), _title(chat)
    return "  ".join(filter(None, parts))


def _title(chat: ChatSummary) -> str:
    return visible(chat.excerpt or chat.title or "(no title)")
