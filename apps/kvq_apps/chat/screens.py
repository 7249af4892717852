"""What stands over the conversation, beside it, and in its place while it is empty."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from rich.console import Group
from rich.padding import Padding
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from kvq_apps.chat.client import Facts
from kvq_apps.chat.history import ChatSummary, chat_line
from kvq_apps.chat.messages import Message
from kvq_apps.chat.transcript import TranscriptView
from kvq_apps.terminal.output import visible

if TYPE_CHECKING:
    from kvq_apps.chat.chat_app import ChatApp

EXAMPLES = (
    ("What is a KV cache?", "ask something; Enter sends, Esc stops the reply"),
    ("/drafts 3", "then choose among three replies to it"),
    ("/system Be brief.", "how the model is to answer"),
)
HELP = "F1 shows every key, / lists the commands, Ctrl+R opens earlier chats, Ctrl+Q leaves."
# A narrower column cannot be read: then fewer are shown, the marked one among them.
COLUMN_CELLS = 36
HINT = "Alt+] and Alt+[ (Alt+N, Alt+P) mark a draft   Enter keeps it   Esc leaves all as it was"
T = TypeVar("T")


class Welcome(Static):
    """Shows a text above a chat without messages: the model, three things to try, and help."""

    DEFAULT_CSS = "Welcome { height: auto; padding: 1 3; }"

    def greet(self, facts: Facts | None) -> None:
        """Names the model, once there is one."""
        head = "kvq chat" if facts is None else f"kvq chat with {visible(facts.model)}"
        examples = [
            Padding(Text.assemble((words, "bold"), f"  {text}"), (0, 0, 0, 2))
            for words, text in EXAMPLES
        ]
        parts = Text(head, "bold"), Text("Three things to try:"), *examples, Text(HELP)
        self.update(Group(*parts))


class ChatList(Vertical):
    """Shows a search line and the chats that it finds, each drawn by `line`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down", "focus_list", "to the list"),
        ("f2", "rename", "rename"),
        ("delete", "delete", "delete"),
    ]
    DEFAULT_CSS = "ChatList { height: auto; } ChatList OptionList { height: auto; }"

    def __init__(
        self, app: "ChatApp", line: Callable[[ChatSummary], str], text: str = "", hint: str = ""
    ) -> None:
        super().__init__()
        self._chat_app = app
        self._line = line
        self._input = Input(text, placeholder=hint)
        self._options = OptionList(markup=False)

    def compose(self) -> ComposeResult:
        yield self._input
        yield self._options

    async def on_mount(self) -> None:
        await self.list_again()

    async def list_again(self) -> None:
        """Searches again, since chats have changed. The marked chat stays marked."""
        marked = self._marked()
        seen: dict[str, ChatSummary] = {}
        for chat in await self._chat_app.find_chats(self._input.value):
            seen.setdefault(chat.id, chat)
        self._options.clear_options()
        self._options.add_options(
            Option(Content(self._line(chat)), id=chat.id) for chat in seen.values()
        )
        if marked in seen:
            self._options.highlighted = self._options.get_option_index(marked)

    def search(self) -> None:
        self._input.focus()

    async def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        await self.list_again()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Opens the first chat on Enter."""
        event.stop()
        self._call(self._chat_app.open_chat, self._first())

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._call(self._chat_app.open_chat, event.option.id)

    def action_focus_list(self) -> None:
        """Moves from the search line to the first chat."""
        self._options.focus()
        if self._options.highlighted is None:
            self._options.action_first()

    def action_rename(self) -> None:
        self._call(self._chat_app.ask_for_title, self._marked() or self._first())

    def action_delete(self) -> None:
        self._call(self._chat_app.ask_to_delete, self._marked() or self._first())

    def _call(self, action: Callable[[str], object], chat_id: str | None) -> None:
        if chat_id is not None:
            action(chat_id)

    def _first(self) -> str | None:
        options = self._options
        return options.get_option_at_index(0).id if options.option_count else None

    def _marked(self) -> str | None:
        index = self._options.highlighted
        return None if index is None else self._options.get_option_at_index(index).id


class Sidebar(ChatList):
    """Shows the chats beside the conversation."""

    DEFAULT_CSS = """
    Sidebar {
        width: 32; height: 1fr; display: none; border-right: solid $foreground-muted;
        &:focus-within { border-right: solid $primary; }
        OptionList { height: 1fr; border: none; }
    }
    """


class BoxScreen(ModalScreen[T | None]):
    """Shows a box over the conversation; Esc closes it without a result."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(None)", "close")]
    DEFAULT_CSS = """
    BoxScreen {
        align: center middle;
        & > Vertical {
            width: 90%; max-width: 100; height: auto; max-height: 90%;
            border: round $primary; background: $surface; padding: 0 1;
        }
    }
    """


class ChatPicker(BoxScreen[None]):
    """Finds a chat to resume by its words."""

    DEFAULT_CSS = "ChatPicker OptionList { max-height: 20; }"

    def __init__(self, app: "ChatApp", text: str) -> None:
        super().__init__()
        hint = "words of a message; Enter opens the first chat"
        self.chats = ChatList(app, chat_line, text, hint)

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self.chats


class EntryScreen(BoxScreen[str]):
    """Asks for a line of text; returns it."""

    def __init__(self, text: str, value: str) -> None:
        super().__init__()
        self._text = text
        self._value = value

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(visible(self._text), markup=False)
            yield Input(self._value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


class HelpScreen(BoxScreen[None]):
    """Shows keys and commands."""

    BINDINGS: ClassVar[list[BindingType]] = [("f1,q", "dismiss(None)", "close")]
    DEFAULT_CSS = "HelpScreen VerticalScroll { height: auto; max-height: 100%; }"

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.scroll = VerticalScroll()

    def compose(self) -> ComposeResult:
        with Vertical() as box, self.scroll:
            yield Static(visible(self.text), markup=False)
        box.border_subtitle = "PgUp and PgDn turn pages, Esc closes"

    def on_mount(self) -> None:
        """Gives the arrow keys to the text."""
        self.scroll.focus()


class QuestionScreen(BoxScreen[str]):
    """Asks a question with a few answers; returns the key of the chosen one."""

    DEFAULT_CSS = """
    QuestionScreen {
        VerticalScroll { height: auto; max-height: 60%; }
        OptionList { height: auto; }
    }
    """

    def __init__(self, text: str, answers: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.scroll = VerticalScroll(can_focus=False)
        self._text = text
        self._options = OptionList(
            *(Option(Content(visible(answer)), id=key) for key, answer in answers), markup=False
        )

    def compose(self) -> ComposeResult:
        with Vertical():
            with self.scroll:
                yield Static(visible(self._text), markup=False)
            yield self._options

    def on_mount(self) -> None:
        """Marks the first answer, so that Enter takes it."""
        self._options.highlighted = 0
        self._options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


class DraftsScreen(ModalScreen[int | None]):
    """Shows `messages` in columns; returns the number of the kept one, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "dismiss(None)", "leave it"),
        ("enter", "keep", "keep it"),
        ("tab", "step(1)", "next"),
        ("shift+tab", "step(-1)", "previous"),
        *((str(number), f"mark({number - 1})", f"draft {number}") for number in range(1, 10)),
    ]
    DEFAULT_CSS = """
    DraftsScreen {
        align: center middle;
        & > Vertical { width: 96%; height: 90%; background: $surface; padding: 0 1; }
        Horizontal { height: 1fr; }
        TranscriptView { width: 1fr; border: round $foreground-muted; }
        TranscriptView.marked { border: round $primary; }
        Static { height: auto; color: $text-muted; }
    }
    """

    def __init__(self, messages: Sequence[Message], marked: int) -> None:
        super().__init__()
        self.marked = marked
        # The conversation already shows the place of a draft among the branches.
        self._messages = [replace(message, branch=1, branches=1) for message in messages]
        self.columns = [TranscriptView() for _ in messages]

    def compose(self) -> ComposeResult:
        with Vertical():
            with Horizontal():
                yield from self.columns
            yield Static(HINT, markup=False)

    def on_mount(self) -> None:
        for column, message in zip(self.columns, self._messages, strict=True):
            column.show([message])
        self._draw()

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def feed(self, number: int, text: str) -> None:
        """Adds text to a draft that is being written."""
        self._messages[number].text += text
        if self.columns[number].is_attached:
            self.columns[number].feed(text)

    def finish(self, messages: Sequence[Message]) -> None:
        """Ends all drafts; `messages` say how each ended."""
        for column, draft, message in zip(self.columns, self._messages, messages, strict=True):
            draft.state = message.state
            if column.is_attached:
                column.finish()
                column.redraw_header(draft)

    def action_step(self, step: int) -> None:
        self.action_mark((self.marked + step) % len(self.columns))

    def action_mark(self, number: int) -> None:
        if number < len(self.columns):
            self.marked = number
            self._draw()

    def action_keep(self) -> None:
        self.dismiss(self.marked)

    def _draw(self) -> None:
        count = len(self.columns)
        room = max(1, min(count, self.size.width // COLUMN_CELLS))
        first = min(max(0, self.marked - room // 2), count - room)
        for number, column in enumerate(self.columns):
            column.display = first <= number < first + room
            column.set_class(number == self.marked, "marked")
            column.border_title = f"{number + 1}/{count}"
        self.columns[self.marked].focus()
