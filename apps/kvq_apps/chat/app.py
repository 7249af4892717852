"""The chat on screen: shows what the controller does, hands it what the user types and presses."""

import logging
import os
import signal
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.driver import Driver
from textual.events import Resize
from textual.screen import Screen
from textual.theme import Theme
from textual.timer import Timer
from textual.widgets import Footer, Static

from kvq.errors import UsageError
from kvq_apps.chat import commands, keys
from kvq_apps.chat.blocks import code_fences
from kvq_apps.chat.chat_list import Sidebar
from kvq_apps.chat.client import ChatClient
from kvq_apps.chat.controller import ChatController, ClientFor
from kvq_apps.chat.drafts import DraftsScreen
from kvq_apps.chat.editor import written_in_editor
from kvq_apps.chat.leaving import LeavingApp
from kvq_apps.chat.menu import MenuView
from kvq_apps.chat.messages import Message
from kvq_apps.chat.meter import meter_line
from kvq_apps.chat.prompt import Prompt
from kvq_apps.chat.replies import words_of
from kvq_apps.chat.screens import HelpScreen
from kvq_apps.chat.settings import ChatSettings
from kvq_apps.chat.slash import SlashCommands
from kvq_apps.chat.thoughts import said_of
from kvq_apps.chat.transcript import TranscriptView
from kvq_apps.chat.visible import visible
from kvq_apps.chat.welcome import Welcome
from kvq_apps.thinking import HIDE

QUIT_WITHIN_S = 1.0
QUEUE_LINES = 4
INLINE_LINES = 16
# A lower screen has no room for the welcome.
WELCOME_LINES, INLINE_WELCOME_LINES = 16, 30


class Transcript(TranscriptView):
    """The transcript with the keys that act on the message selected in it."""

    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings(app=False)]


class NoteHandler(logging.Handler):
    """Shows warnings in the conversation: on stderr they would tear the screen."""

    def __init__(self, app: "ChatApp") -> None:
        super().__init__(logging.WARNING)
        self._app = app

    def emit(self, record: logging.LogRecord) -> None:
        """May be called from any thread."""
        self._app.call_later(self._app.say, record.getMessage())


class ChatApp(LeavingApp):
    """`kvq chat`. `client_for` makes another client when the user changes the model."""

    TITLE = "kvq chat"
    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings(app=True)]
    CSS = """
    Transcript { height: 1fr; }
    Transcript:focus { outline-left: thick $primary; scrollbar-color: $primary; }
    #queue { height: auto; max-height: 4; color: $text-muted; padding: 0 2; display: none; }
    #meter { height: 1; padding: 0 2; color: $text-muted; }
    Prompt { border-title-color: $accent; border-subtitle-color: $text-muted; }
    """

    def __init__(
        self,
        client: ChatClient,
        settings: ChatSettings,
        *,
        client_for: ClientFor | None = None,
        driver_class: type[Driver] | None = None,
    ) -> None:
        super().__init__(driver_class=driver_class)
        self.transcript = Transcript(id="transcript")
        self.sidebar = Sidebar(self._find)
        self.prompt = Prompt(id="prompt")
        self.controller = ChatController(self, client, settings, client_for)
        self.slash = SlashCommands(self, self.controller)
        self._editing: Message | None = None
        self._unsent = ""
        self._keys: dict[str, str] = {}
        self._interrupted_s = -QUIT_WITHIN_S

    # The screen

    def compose(self) -> ComposeResult:
        """Transcript above, then what is queued, the prompt, the meter and the keys."""
        with Horizontal(id="middle"):
            yield self.sidebar
            with Vertical():
                yield Welcome(markup=False)
                yield self.transcript
        yield Static(id="queue", markup=False)
        yield MenuView(markup=False)
        yield self.prompt
        yield Static(id="meter", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Starts loading once the first frame is on screen."""
        self._end_on_signals()
        self.prompt.focus()
        self._apply_settings()
        self.theme_changed_signal.subscribe(self, self._remember_theme)
        self.set_interval(0.5, self.draw_meter)
        self.call_after_refresh(lambda: self.run_worker(self.controller.work(), exit_on_error=True))

    def on_resize(self, event: Resize) -> None:
        """Below the command line half of the terminal stays the terminal's."""
        if self.is_inline:
            lines = max(1, min(INLINE_LINES, event.size.height // 2))
            self.query_one("#middle").styles.height = lines
        self.call_after_refresh(self._draw_welcome)
        self.call_after_refresh(self._draw_sidebar)

    def set_timer(self, *arguments: Any, **options: Any) -> Timer:
        """A late tick still comes: Textual skips it, and with that one every later resize."""
        timer = super().set_timer(*arguments, **options)
        timer._skip = False  # pyright: ignore[reportPrivateUsage]
        return timer

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: Textual's own commands, then every key and slash command."""
        # Theirs takes a Screen of nothing said.
        yield from super().get_system_commands(screen)  # pyright: ignore[reportUnknownMemberType]
        for row in keys.KEYS:
            if row.app:
                yield SystemCommand(row.says, row.keys, partial(self.run_action, row.action))
        for command in commands.COMMANDS:
            fill = partial(self.prompt.fill, f"/{command.name} ")
            yield SystemCommand(f"/{command.name} {command.takes}".strip(), command.says, fill)

    def _apply_settings(self) -> None:
        """Takes the user's theme and keys; says what cannot be used of them."""
        settings = self.controller.settings
        for warning in settings.warnings:
            self.say(warning, error=True)
        if settings.theme in self.available_themes:
            self.theme = settings.theme
        elif settings.theme is not None:
            where = f"{settings.theme_origin}: there is no theme {settings.theme!r}"
            self.say(f"{where}; Ctrl+P, then Theme, lists them", error=True)
        path = settings.keys_path
        chosen, warnings = keys.read_keys(path) if path is not None else ({}, [])
        self._keys = chosen
        self.set_keymap(chosen)
        for name in keys.PROMPT_KEYS:
            if name in chosen:
                self.prompt.keys_of[name] = chosen[name].split(",")
        for warning in warnings:
            self.say(warning, error=True)

    def draw_meter(self) -> None:
        """Draws the meter: a running reply counts its seconds."""
        controller, activity = self.controller, self.controller.engine.activity
        if controller.engine.stream is not None:
            activity = f"{activity} {monotonic() - controller.engine.stream.started_s:.0f} s"
        if self.transcript.unseen:
            activity = f"{activity}  new below: End"
        width, detail = max(1, self.size.width - 4), controller.settings.meter
        line = meter_line(controller.engine.facts, controller.engine.stats, activity, width, detail)
        self.query_one("#meter", Static).update(visible(line))

    def _draw_queue(self) -> None:
        texts = self.controller.queue
        lines = [f"queued: {text.splitlines()[0][:80]}" for text in texts[-QUEUE_LINES:]]
        if lines:
            lines[-1] += "   (Up in the empty prompt takes it back)"
        queue = self.query_one("#queue", Static)
        queue.update(visible("\n".join(lines)))
        queue.display = bool(texts)

    # What the controller shows

    def say_from_thread(self, text: str) -> None:
        """Shows an error that another thread met."""
        self.call_later(partial(self.say, text, error=True))

    def changed(self) -> None:
        self.transcript.hides_thoughts = self.controller.settings.think == HIDE
        if self.is_running:
            self.draw_meter()
            self._draw_queue()
            self._draw_welcome()
            if self.controller.engine.activity in ("ready", "no model"):
                self._list_chats()

    def _draw_welcome(self) -> None:
        welcome = self.query_one(Welcome)
        room = self.size.height >= (INLINE_WELCOME_LINES if self.is_inline else WELCOME_LINES)
        welcome.display = room and not self.controller.conversation.messages
        welcome.greet(self.controller.engine.facts)

    def show(self, messages: Sequence[Message]) -> None:
        """Shows these; an edit of a message that is not among them is over."""
        if self._editing is not None and self._editing.id not in {row.id for row in messages}:
            self._edit(None)
        self.transcript.show(messages)
        self._draw_welcome()

    def add(self, message: Message) -> None:
        """Shows one more message; the user's own brings the end into view."""
        self.transcript.add(message)
        if message.role == "user":
            self.transcript.action_scroll_end()

    def feed(self, text: str) -> None:
        if text:
            self.transcript.feed(text)
        else:
            self.transcript.settle()

    def finished(self, message: Message) -> None:
        self.transcript.finish()
        self.transcript.restate(message)

    def open_drafts(self, drafts: Sequence[Message], marked: int) -> Awaitable[int | None]:
        return self.push_screen(DraftsScreen(drafts, marked), wait_for_dismiss=True)

    def feed_draft(self, number: int, text: str) -> None:
        for screen in self._drafts_screens():
            screen.feed(number, text)

    def drafts_finished(self, drafts: Sequence[Message]) -> None:
        for screen in self._drafts_screens():
            screen.finish(drafts)

    def _drafts_screens(self) -> list[DraftsScreen]:
        """The one with the drafts, which another may be over; none once it is left."""
        return [screen for screen in self.screen_stack if isinstance(screen, DraftsScreen)]

    def set_theme(self, name: str) -> None:
        """Takes the theme used last, if it is there and the user's settings name no other."""
        if name in self.available_themes and self.controller.settings.theme is None:
            self.theme = name

    # Messages from the prompt

    @on(Prompt.Sent)
    def _sent(self, event: Prompt.Sent) -> None:
        text = event.text
        if text.startswith("/") and not text.startswith("//"):
            try:
                self.slash.run(text)
            except Exception as error:  # noqa: BLE001 - what was typed is there to be mended
                self.say(words_of(error), error=True)
                self.prompt.fill(text)
            return
        text = text[1:] if text.startswith("//") else text
        editing = self._editing
        self._edit(None)
        if editing is not None:
            self.controller.do(partial(self.controller.answer_edited, editing, text))
        else:
            self.controller.enqueue(text)

    @on(Prompt.Again)
    def _again(self) -> None:
        if self.controller.unanswered and self._editing is None:
            self.action_retry()

    @on(Prompt.Recalled)
    def _recalled(self) -> None:
        if self.controller.queue:
            self.prompt.fill(self.controller.queue.pop())
            self._draw_queue()

    @on(Prompt.Changed)
    def _typed(self) -> None:
        self.query_one(MenuView).draw(self.prompt.menu, self.prompt.text)

    @on(TranscriptView.Unseen)
    def _unseen(self) -> None:
        self.draw_meter()

    # Keys

    def action_cancel(self) -> None:
        """Stops the reply, or leaves an edit; the prompt has the focus afterwards."""
        if not self.controller.engine.cancel() and self._editing is not None:
            self._edit(None)
        self.screen.clear_selection()
        self.transcript.selected = None
        self.transcript.refresh()
        self.prompt.focus()

    def action_interrupt(self) -> None:
        """Ctrl+C: copies a selection, else stops the reply, else quits when pressed again."""
        selected = self.screen.get_selected_text() or self.prompt.selected_text
        if selected:
            self._copy(selected, "selection")
            return
        if self.controller.engine.cancel():
            return
        now = monotonic()
        if now - self._interrupted_s <= QUIT_WITHIN_S:
            self.quit()
        self._interrupted_s = now
        self.notify("press Ctrl+C again to quit", timeout=QUIT_WITHIN_S, markup=False)

    # Help, the terminal, and the view

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            text = f"{keys.help_text(self._keys)}\n\n{commands.help_text()}"
            self.push_screen(HelpScreen(text))

    def get_key_display(self, binding: Binding) -> str:
        """Names a key in the footer as keyboards do."""
        return keys.key_name(binding.key)

    def action_suspend_process(self) -> None:
        """Goes to the background; where only the process itself can stop, it does."""
        if not self.is_inline or not hasattr(signal, "SIGTSTP"):
            super().action_suspend_process()
            return
        with self.suspend():
            os.kill(os.getpid(), signal.SIGTSTP)

    def action_redraw(self) -> None:
        self.refresh(layout=True)

    def action_page(self, step: int) -> None:
        """Scrolls the transcript, or the draft that is marked, by a screen."""
        drafts, view = self.screen, self.transcript
        if isinstance(drafts, DraftsScreen):
            view = drafts.columns[drafts.marked]
        scroll = view.scroll_page_down if step > 0 else view.scroll_page_up
        scroll(animate=False)

    def action_top(self) -> None:
        self.transcript.action_scroll_home()

    def action_bottom(self) -> None:
        """Shows the newest line and follows it."""
        self.transcript.action_scroll_end()

    def action_select(self, step: int) -> None:
        """Selects another message, to copy, edit or answer it again."""
        self.transcript.select(step)
        (self.prompt if self.transcript.selected is None else self.transcript).focus()

    def action_thoughts(self) -> None:
        """Shows what the model thought before its answers, or folds it away again."""
        self.transcript.unfold(shown=not self.transcript.unfolded)

    def action_copy(self) -> None:
        """Copies the source of the selected or last message."""
        message = self._chosen()
        if message is not None:
            self._copy(said_of(message), "message")

    def action_copy_fence(self) -> None:
        """Copies the code of the selected or last message."""
        message = self._chosen()
        fences = code_fences(said_of(message)) if message is not None else []
        if fences:
            self._copy(fences[-1], "code")
        else:
            self.notify("there is no code in this message; y copies all of it", markup=False)

    def _chosen(self) -> Message | None:
        return self.transcript.selected or self.controller.conversation.last("assistant")

    def _copy(self, text: str, what: str) -> None:
        self.copy_to_clipboard(text)
        self.notify(f"{what} copied: {len(text)} characters", timeout=2, markup=False)

    def action_edit(self) -> None:
        """Edits the selected message, or the user's last one."""
        message = self.transcript.selected or self.controller.conversation.last("user")
        if message is None or message.role == "system":
            self.notify("there is no message to edit; Alt+Up selects one", markup=False)
            return
        self._edit(message)
        self.prompt.focus()

    def _edit(self, message: Message | None) -> None:
        """What is written next goes beside `message`; None: to the end.

        What was being written comes back when the edit is over.
        """
        if message is not None:
            self._unsent = self.prompt.written if self._editing is None else self._unsent
            self.prompt.fill(message.text)
        elif self._editing is not None:
            self.prompt.fill(self._unsent)
        self._editing = message
        says = "editing an earlier message: Enter branches here, Esc leaves it"
        self.prompt.border_title = None if message is None else says

    def action_retry(self) -> None:
        """Answers the last question again, beside the answer it has."""
        selected = self.transcript.selected
        answer = selected if selected is not None and selected.role == "assistant" else None
        self.controller.do(partial(self.controller.retry, answer))

    def action_draft(self, step: int) -> None:
        """Shows the replies beside the selected or last message; of a question the next branch."""
        if isinstance(self.screen, DraftsScreen):
            self.screen.action_step(step)
            return
        message = self.transcript.selected
        if message is None:
            rows = self.controller.conversation.messages
            message = next((row for row in reversed(rows) if row.branches > 1), None)
        if message is None or message.branches < 2:
            self.notify("there is one draft only; r or /drafts 3 makes more", markup=False)
            return
        answer, controller = message.role == "assistant", self.controller
        show = controller.choose_draft if answer else controller.switch_branch
        controller.do(partial(show, message, step))

    def action_editor(self) -> None:
        """Writes the message in the user's editor; what was written stays if that fails."""
        text, trouble = written_in_editor(self, self.prompt.written)
        if trouble:
            self.notify(trouble, markup=False)
        else:
            self.prompt.fill(text)

    # Themes

    def choose_theme(self, name: str) -> None:
        if name not in self.available_themes:
            raise UsageError(f"there is no theme {name!r}; Ctrl+P, then Theme, lists them")
        self.theme = name

    def _remember_theme(self, theme: Theme) -> None:
        if theme.name != self.controller.settings.theme:
            self._remember("theme", theme.name)
