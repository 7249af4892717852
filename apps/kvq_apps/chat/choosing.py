"""The chats of the history in the chat on screen: found, opened, renamed, deleted, or beside it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from textual import on, work
from textual.app import App

from kvq.errors import KvqError
from kvq_apps.chat.chat_list import ChatList, Sidebar
from kvq_apps.chat.controller import ChatController
from kvq_apps.chat.history import ChatSummary, History
from kvq_apps.chat.prompt import Prompt
from kvq_apps.chat.screens import ChatPicker, Entry, Question
from kvq_apps.chat.transcript import TranscriptView
from kvq_apps.flags import told

SIDEBAR_COLUMNS = 80
T = TypeVar("T")


class ChoosingApp(App[None]):
    """An app that shows one of many chats."""

    controller: ChatController
    prompt: Prompt
    sidebar: Sidebar
    transcript: TranscriptView
    _wants_sidebar = False

    def say(self, text: str, *, error: bool = False) -> None:
        """Shows a remark in the conversation."""
        self.transcript.note(" ".join(text.split()) if error else text, error=error)

    def action_new_chat(self) -> None:
        self.controller.do(self.controller.new_chat)

    def action_resume(self) -> None:
        self.pick("")

    action_search = action_resume

    def pick(self, text: str) -> None:
        """Lists the chats that have `text`, to open one."""
        if isinstance(self.screen, ChatPicker) or not self.controller.history.is_open:
            return

        self.push_screen(ChatPicker(self._find, text), self._open_chat)

    def _open_chat(self, chat_id: str | None) -> None:
        if chat_id is not None and chat_id != self.controller.conversation.id:
            self.controller.do(partial(self.controller.resume_chat, chat_id))

    async def _find(self, words: str) -> list[ChatSummary]:
        return await self._read(lambda history: history.search(words), [])

    async def _read(self, read: Callable[[History], T], nothing: T) -> T:
        """What is read of the history; `nothing` while it is not open, and where it is damaged."""
        try:
            history = self.controller.history
            return await history.read(read) if history.is_open else nothing
        except KvqError as error:
            self.say(told(error), error=True)
            return nothing

    @on(ChatList.Opened)
    def _opened_beside(self, event: ChatList.Opened) -> None:
        self.prompt.focus()
        self._open_chat(event.chat_id)

    @on(ChatList.Renaming)
    def _renaming(self, event: ChatList.Renaming) -> None:
        self.ask_for_title(event.chat_id)

    @on(ChatList.Deleting)
    def _deleting(self, event: ChatList.Deleting) -> None:
        self.ask_to_delete(event.chat_id)

    async def ask(self, question: str, answers: Sequence[tuple[str, str]]) -> str | None:
        return await self.push_screen_wait(Question(question, answers))

    @work
    async def ask_for_title(self, chat_id: str) -> None:
        """Has the user write another title for a chat."""
        title = await self._title_of(chat_id)
        new = await self.push_screen_wait(Entry("The chat's title:", title))
        if new is not None:
            self.controller.do(partial(self.controller.rename_chat, chat_id, new))

    @work
    async def ask_to_delete(self, chat_id: str) -> None:
        """Deletes a chat, if that is what the user wants."""
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
        """Shows the chats beside the conversation and searches in them, or takes them away."""
        if self.is_inline or self.size.width < SIDEBAR_COLUMNS:
            self.notify("there is no room beside the chat; Ctrl+R lists all", markup=False)
            return
        self.set_sidebar(shown=not self._wants_sidebar)
        self._remember("sidebar", "shown" if self._wants_sidebar else "")
        if self._wants_sidebar:
            self.sidebar.chats.search()

    def set_sidebar(self, *, shown: bool) -> None:
        self._wants_sidebar = shown
        self._draw_sidebar()

    def _draw_sidebar(self) -> None:
        """Shows it where it is wanted and where there is room."""
        before, wide = self.sidebar.display, self.size.width >= SIDEBAR_COLUMNS
        self.sidebar.display = wide and self._wants_sidebar and not self.is_inline
        if before and not self.sidebar.display and self.sidebar.has_focus_within:
            self.prompt.focus()
        if self.sidebar.display:
            self._list_chats()

    @work(exclusive=True, group="chats")
    async def _list_chats(self) -> None:
        """What is listed is what the history holds now."""
        if self.sidebar.display:
            await self.sidebar.chats.list_again()
        if isinstance(self.screen, ChatPicker):
            await self.screen.chats.list_again()

    def _remember(self, name: str, value: str) -> None:
        if self.controller.history.is_open:
            self.controller.history.write(lambda history: history.set(name, value))
