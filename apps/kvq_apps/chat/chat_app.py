"""The chat on screen: shows what the controller does, and passes on what the user types."""

import logging
import os
import shlex
import signal
import subprocess
import tempfile
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Any, ClassVar, TypeVar

from textual import on, work
from textual.app import App, ComposeResult, SuspendNotSupported, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, ScrollableContainer, Vertical
from textual.driver import Driver
from textual.events import Resize
from textual.screen import Screen
from textual.theme import Theme
from textual.timer import Timer, TimerCallback
from textual.widgets import Footer, Static

from kvq.errors import KvqError, UsageError
from kvq.settings import editor_command
from kvq_apps.chat import commands, keys
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.chat.client import ChatClient
from kvq_apps.chat.controller import ChatController, ClientFor
from kvq_apps.chat.history import ChatSummary, History, chat_title
from kvq_apps.chat.markdown_blocks import code_fences
from kvq_apps.chat.messages import Message, answer_text
from kvq_apps.chat.meter import meter_line
from kvq_apps.chat.prompt import MenuView, PromptBox
from kvq_apps.chat.replies import error_text
from kvq_apps.chat.screens import (
    ChatPicker,
    DraftsScreen,
    EntryScreen,
    HelpScreen,
    QuestionScreen,
    Sidebar,
    Welcome,
)
from kvq_apps.chat.transcript import TranscriptView
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal.output import visible
from kvq_apps.thinking import HIDE

QUIT_WITHIN_S = 1.0
LEAVE_WITHIN_S = 3.0
# Limits after a signal: for running work to stop, and for the KV cache to be saved.
STOP_WITHIN_S = 0.4
SAVE_WITHIN_S = 0.8
QUEUE_LINES = 4
INLINE_LINES = 16
SIDEBAR_COLUMNS = 80
# A lower screen has no room for the welcome text.
WELCOME_LINES, INLINE_WELCOME_LINES = 16, 30
T = TypeVar("T")


class Transcript(TranscriptView):
    """Shows the transcript, with the keys that act on the selected message."""

    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings(app=False)]


class NoteHandler(logging.Handler):
    """Shows warnings in the conversation: on stderr they would tear the screen."""

    def __init__(self, app: "ChatApp") -> None:
        super().__init__(logging.WARNING)
        self._app = app

    def emit(self, record: logging.LogRecord) -> None:
        self._app.call_later(self._app.say, record.getMessage())


class ChatApp(App[None]):
    """Runs `kvq chat`. `client_for` makes another client when the user changes the model.

    `session_lines` are the lines of the messages since it began, as drawn; they are there at the
    end. The controller calls the methods of the part "What the controller shows" on the screen's
    thread, but `say_from_thread`.
    """

    TITLE = "kvq chat"
    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings(app=True)]
    CSS = """
    Transcript { height: 1fr; }
    Transcript:focus { outline-left: thick $primary; scrollbar-color: $primary; }
    #queue { height: auto; max-height: 4; color: $text-muted; padding: 0 2; display: none; }
    #meter { height: 1; padding: 0 2; color: $text-muted; }
    PromptBox { border-title-color: $accent; border-subtitle-color: $text-muted; }
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
        self.sidebar = Sidebar(self, chat_title, hint="search; F2 renames, Del")
        self.prompt = PromptBox(id="prompt")
        self.controller = ChatController(self, client, settings, client_for)
        self.session_lines: list[str] = []
        self._editing: Message | None = None
        self._unsent = ""
        self._keys: dict[str, str] = {}
        self._interrupted_s = -QUIT_WITHIN_S
        self._wants_sidebar = False
        self._started_s = time()
        self._leaving = False

    # The screen

    def compose(self) -> ComposeResult:
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
        """Limits the height below the command line to half of the terminal."""
        if self.is_inline:
            lines = max(1, min(INLINE_LINES, event.size.height // 2))
            self.query_one("#middle").styles.height = lines
        self.call_after_refresh(self._draw_welcome)
        self.call_after_refresh(self._draw_sidebar)

    def set_timer(self, delay: float, callback: TimerCallback, **options: Any) -> Timer:  # type: ignore[override]
        """Waits for the next tick if one is late, where Textual would never call `callback`."""

        def tick() -> None:
            timer.stop()
            self.call_next(callback)

        timer = self.set_interval(delay, tick, **options)
        return timer

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Lists the palette: Textual's own commands, then every key and slash command."""
        # Textual's own function takes a Screen of an unspecified type.
        yield from super().get_system_commands(screen)  # pyright: ignore[reportUnknownMemberType]
        for row in keys.KEYS:
            if row.app:
                yield SystemCommand(row.help, row.keys, partial(self.run_action, row.action))
        for command in commands.COMMANDS:
            fill = partial(self.prompt.fill, f"/{command.name} ")
            yield SystemCommand(command.usage, command.help, fill)

    def _apply_settings(self) -> None:
        """Applies the user's theme and keys, and warns about those that cannot be used."""
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
                self.prompt.keys_by_name[name] = chosen[name].split(",")
        for warning in warnings:
            self.say(warning, error=True)

    def draw_meter(self) -> None:
        """Draws the meter line, with the seconds of a running reply."""
        controller, activity = self.controller, self.controller.engine.activity
        if controller.engine.stream is not None:
            activity = f"{activity} {monotonic() - controller.engine.stream.started_s:.0f} s"
        if self.transcript.has_more_below:
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

    def say(self, text: str, *, error: bool = False) -> None:
        """Shows a remark in the conversation."""
        self.transcript.note(" ".join(text.split()) if error else text, error=error)

    def say_from_thread(self, text: str, error: bool = True) -> None:
        """Shows a remark of another thread."""
        self.call_later(partial(self.say, text, error=error))

    def changed(self) -> None:
        """Shows new activity, numbers or a changed queue."""
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
        """Shows `messages` alone. An edit of a message that is not among them ends."""
        if self._editing is not None and self._editing.id not in {row.id for row in messages}:
            self._edit(None)
        self.transcript.show(messages)
        self._draw_welcome()

    def add(self, message: Message) -> None:
        """Shows one more message; a message of the user scrolls to the end."""
        self.transcript.add(message)
        if message.role == "user":
            self.transcript.action_scroll_end()

    def feed(self, text: str) -> None:
        """Adds text to the last message; without text draws what is not drawn yet."""
        if text:
            self.transcript.feed(text)
        else:
            self.transcript.settle()

    def finished(self, message: Message) -> None:
        self.transcript.finish()
        self.transcript.redraw_header(message)

    def set_theme(self, name: str) -> None:
        """Sets the last theme, unless the user's settings name one or it is not there."""
        if name in self.available_themes and self.controller.settings.theme is None:
            self.theme = name

    async def ask(self, question: str, answers: Sequence[tuple[str, str]]) -> str | None:
        """Returns the key of the answer that the user chooses, or None."""
        return await self.push_screen_wait(QuestionScreen(question, answers))

    # Messages from the prompt

    @on(PromptBox.Sent)
    def _handle_sent(self, event: PromptBox.Sent) -> None:
        text = event.text
        if text.startswith("/") and not text.startswith("//"):
            try:
                command, argument = commands.parse_command(text)
                command.run(self, argument)
            except Exception as error:  # noqa: BLE001 - what was typed is there to be mended
                self.say(error_text(error), error=True)
                self.prompt.fill(text)
            return
        text = text[1:] if text.startswith("//") else text
        editing = self._editing
        self._edit(None)
        if editing is not None:
            self.controller.do(partial(self.controller.answer_edited, editing, text))
        else:
            self.controller.enqueue(text)

    @on(PromptBox.RetryRequested)
    def _handle_retry(self) -> None:
        if self.controller.unanswered and self._editing is None:
            self.action_retry()

    @on(PromptBox.RecallRequested)
    def _handle_recall(self) -> None:
        if self.controller.queue:
            self.prompt.fill(self.controller.queue.pop())
            self._draw_queue()

    @on(PromptBox.Changed)
    def _handle_changed(self) -> None:
        self.query_one(MenuView).draw(*self.prompt.offered())

    # Keys

    def action_cancel(self) -> None:
        """Stops the reply, or leaves an edit, and focuses the prompt."""
        if not self.controller.engine.cancel() and self._editing is not None:
            self._edit(None)
        self.screen.clear_selection()
        self.transcript.selected = None
        self.transcript.refresh()
        self.prompt.focus()

    def action_interrupt(self) -> None:
        """Handles Ctrl+C: copies a selection, else stops the reply; a second one quits."""
        selected = self.screen.get_selected_text() or self.prompt.selected_text
        if selected:
            self._copy(selected, "selection")
            return
        if isinstance(self.screen, QuestionScreen):
            self.screen.dismiss(None)
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
        if not self.is_inline or not hasattr(signal, "SIGTSTP"):
            super().action_suspend_process()
            return
        with self.suspend():
            os.kill(os.getpid(), signal.SIGTSTP)

    def action_redraw(self) -> None:
        self.refresh(layout=True)

    def action_page(self, step: int) -> None:
        """Scrolls the help, the marked draft, or else the transcript by a screen."""
        screen = self.screen
        view: ScrollableContainer | TranscriptView = self.transcript
        if isinstance(screen, DraftsScreen):
            view = screen.columns[screen.marked]
        elif isinstance(screen, HelpScreen | QuestionScreen):
            view = screen.scroll
        scroll = view.scroll_page_down if step > 0 else view.scroll_page_up
        scroll(animate=False)

    def action_select(self, step: int) -> None:
        """Selects another message, to copy, edit or answer it again."""
        self.transcript.select(step)
        (self.prompt if self.transcript.selected is None else self.transcript).focus()

    def action_thoughts(self) -> None:
        """Unfolds thoughts and long messages, or folds both again."""
        self.transcript.unfold(shown=not self.transcript.unfolded)

    def action_copy(self) -> None:
        message = self._target_message()
        if message is not None:
            self._copy(answer_text(message), "message")

    def action_copy_fence(self) -> None:
        """Copies the code of the selected or last message."""
        message = self._target_message()
        fences = code_fences(answer_text(message)) if message is not None else []
        if fences:
            self._copy(fences[-1], "code")
        else:
            self.notify("there is no code in this message; y copies all of it", markup=False)

    def _target_message(self) -> Message | None:
        return self.transcript.selected or self.controller.conversation.last_message("assistant")

    def _copy(self, text: str, name: str) -> None:
        self.copy_to_clipboard(text)
        self.notify(f"{name} copied: {len(text)} characters", timeout=2, markup=False)

    def action_edit(self) -> None:
        """Edits the selected message, or the user's last one."""
        message = self.transcript.selected or self.controller.conversation.last_message("user")
        if message is None or message.role in ("system", "tool"):
            self.notify("there is no message to edit; Alt+Up selects one", markup=False)
            return
        self._edit(message)
        self.prompt.focus()

    def _edit(self, message: Message | None) -> None:
        """Makes the next text a sibling of `message`; None: an addition at the end.

        The text that was being written comes back when the edit ends.
        """
        if message is not None:
            self._unsent = self.prompt.full_text if self._editing is None else self._unsent
            self.prompt.fill(message.text)
        elif self._editing is not None:
            self.prompt.fill(self._unsent)
        self._editing = message
        hint = "editing an earlier message: Enter branches here, Esc leaves it"
        self.prompt.border_title = None if message is None else hint

    def action_retry(self) -> None:
        """Answers the last question again, beside the present answer."""
        selected = self.transcript.selected
        answer = selected if selected is not None and selected.role == "assistant" else None
        self.controller.do(partial(self.controller.retry, answer))

    def action_draft(self, step: int) -> None:
        """Shows the replies beside the selected or last message; for a question the next branch."""
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
        self.controller.do(partial(self.controller.choose_sibling, message, step))

    def action_editor(self) -> None:
        """Opens the message in the user's editor; on failure the text stays."""
        command, text = editor_command(), self.prompt.full_text
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "message.md"
                path.write_text(text, encoding="utf-8")
                words = [*shlex.split(command), str(path)]
                with self.suspend():
                    # An error that left this block would leave the screen suspended.
                    trouble = _run_in_terminal(words)
                text = path.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, ValueError, SuspendNotSupported) as error:
            trouble = format_error(error)
        if trouble:
            self.notify(f"{command}: {trouble}; set EDITOR to one that works", markup=False)
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

    # The chats of the history

    def action_new_chat(self) -> None:
        self.controller.do(self.controller.new_chat)

    def action_resume(self) -> None:
        self.pick("")

    def pick(self, text: str) -> None:
        """Lists the chats that have `text`, to open one."""
        if isinstance(self.screen, ChatPicker) or not self.controller.history.is_open:
            return

        self.push_screen(ChatPicker(self, text))

    def open_chat(self, chat_id: str) -> None:
        """Goes on with a chat that the sidebar or the picker lists."""
        if isinstance(self.screen, ChatPicker):
            self.screen.dismiss()
        self.prompt.focus()
        if chat_id != self.controller.conversation.id:
            self.controller.do(partial(self.controller.resume_chat, chat_id))

    async def find_chats(self, words: str) -> list[ChatSummary]:
        return await self._read(lambda history: history.search(words), [])

    async def _read(self, read: Callable[[History], T], default: T) -> T:
        """Reads the history; returns `default` while it is not open or cannot be read."""
        try:
            history = self.controller.history
            return await history.read(read) if history.is_open else default
        except KvqError as error:
            self.say(format_error(error), error=True)
            return default

    @work
    async def ask_for_title(self, chat_id: str) -> None:
        title = await self._title_of(chat_id)
        new = await self.push_screen_wait(EntryScreen("The chat's title:", title))
        if new is not None:
            self.controller.do(partial(self.controller.rename_chat, chat_id, new))

    @work
    async def ask_to_delete(self, chat_id: str) -> None:
        """Deletes a chat, if the user agrees."""
        title = await self._title_of(chat_id) or "(no title)"
        text = f"Delete the chat “{title}” with all its messages? It cannot be brought back."
        if await self.ask(text, (("keep", "Keep it"), ("delete", "Delete it"))) == "delete":
            self.controller.do(partial(self.controller.delete_chat, chat_id))

    async def _title_of(self, chat_id: str) -> str:
        if chat_id == self.controller.conversation.id:
            return self.controller.conversation.title
        saved = await self._read(lambda history: history.saved_chat(chat_id), None)
        return "" if saved is None else saved.title

    # The chats beside

    def action_sidebar(self) -> None:
        """Shows the chats beside the conversation and focuses their search, or hides them."""
        if self.is_inline or self.size.width < SIDEBAR_COLUMNS:
            self.notify("there is no room beside the chat; Ctrl+R lists all", markup=False)
            return
        self.set_sidebar(shown=not self._wants_sidebar)
        self._remember("sidebar", "shown" if self._wants_sidebar else "")
        if self._wants_sidebar:
            self.sidebar.search()

    def set_sidebar(self, *, shown: bool) -> None:
        self._wants_sidebar = shown
        self._draw_sidebar()

    def _draw_sidebar(self) -> None:
        """Shows the sidebar where the user wants it and there is room."""
        before, wide = self.sidebar.display, self.size.width >= SIDEBAR_COLUMNS
        self.sidebar.display = wide and self._wants_sidebar and not self.is_inline
        if before and not self.sidebar.display and self.sidebar.has_focus_within:
            self.prompt.focus()
        if self.sidebar.display:
            self._list_chats()

    @work(exclusive=True, group="chats")
    async def _list_chats(self) -> None:
        if self.sidebar.display:
            await self.sidebar.list_again()
        if isinstance(self.screen, ChatPicker):
            await self.screen.chats.list_again()

    def _remember(self, name: str, value: str) -> None:
        if self.controller.history.is_open:
            self.controller.history.write(lambda history: history.set(name, value))

    # Leaving

    async def action_quit(self) -> None:
        """Leaves; on a second call without waiting for anything."""
        if self._leaving:
            self.exit()
            return
        self._leaving = True
        self._start_leaving(self._leave())

    def quit(self) -> None:
        self.run_worker(self.action_quit())

    def _start_leaving(self, leave: Coroutine[Any, Any, None]) -> None:
        """Leaves by `leave`, which replaces a slower way."""
        self.run_worker(leave, exit_on_error=True, exclusive=True, group="leaving")

    async def _leave(self) -> None:
        self._close_screens()
        await self.controller.leave(LEAVE_WITHIN_S)
        self.session_lines = self.transcript.lines_since(self._started_s)
        self.exit()

    def _close_screens(self) -> None:
        """Closes the screens over the conversation, so that waiting jobs go on."""
        while len(self.screen_stack) > 1:
            self.screen.dismiss(None)

    def _end_on_signals(self) -> None:
        """Lets a closed terminal and `kill` end the chat as Ctrl+Q does, but within two seconds."""
        if self.is_headless or os.name != "posix":
            return
        loop = get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            # The handler runs at once, not in the loop's turn: see `_release_terminal`.
            signal.signal(number, lambda number, _: self._handle_signal(loop, number))

    def _handle_signal(self, loop: AbstractEventLoop, number: int) -> None:
        if not os.isatty(0):
            self._release_terminal()
        loop.call_soon_threadsafe(self._end, number)

    def _release_terminal(self) -> None:
        """Stops writing to a terminal that is gone, which could block for ever.

        After a hang-up the kernel sends SIGCONT, at which Textual would begin to draw again.
        """
        signal.signal(signal.SIGCONT, lambda _number, _frame: None)
        if self._driver is not None:
            self._driver.write = lambda data: None

    def _end(self, number: int) -> None:
        self._leaving = True
        self._start_leaving(self._leave_after_signal(number))

    async def _leave_after_signal(self, number: int) -> None:
        self._close_screens()
        await self.controller.leave(STOP_WITHIN_S, SAVE_WITHIN_S)
        if not os.isatty(0):
            os._exit(128 + number)  # all is saved, and Textual would wait for the terminal
        self.exit(return_code=128 + number)


def _run_in_terminal(words: Sequence[str]) -> str:
    """Runs a program, which has the terminal and Ctrl+C meanwhile; returns an error or nothing."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        status = subprocess.run(words, check=False).returncode  # noqa: S603
    except OSError as error:
        return format_error(error)
    finally:
        signal.signal(signal.SIGINT, before)
    return f"it ended with status {status}" if status else ""
