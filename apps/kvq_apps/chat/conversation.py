"""The open chat: its chosen branch, what the model gets of it, and what is stored.

Writing goes through `write`, in order, on another thread; nothing here waits for a disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from time import monotonic, time

from kvq.errors import UsageError
from kvq_apps.chat.client import Facts
from kvq_apps.chat.history import History, SavedChat, model_name, new_id
from kvq_apps.chat.messages import Message, ReplyStats, ToolCall

CHUNK_INTERVAL_S = 0.25
TITLE_CHARACTERS = 60
# A template may know no system message, so the summary goes before the first question it keeps.
SUMMARY_HEAD = "(What was said before, summed up: {})\n\n"

Write = Callable[[Callable[[History], None]], object]


class ChatConversation:
    """Holds the chosen branch of one chat; the last message may be streaming."""

    def __init__(self, write: Write, *, system: str | None = None) -> None:
        self._write = write
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Becomes a new chat."""
        self.id = new_id()
        self.title = ""
        self.messages: list[Message] = []
        self.first_id: str | None = None
        self.summary = ""
        self.model = ""
        self._system = system
        self._stored = False
        self._unsaved: dict[str, str] = {}
        self._saved_s = 0.0

    def show(self, saved: SavedChat) -> None:
        """Becomes a chat of the history, without text that another process still writes."""
        self.id, self.title, self.messages = saved.id, saved.title, list(saved.messages)
        for message in self.messages:
            message.state = "interrupted" if message.state == "streaming" else message.state
        self.first_id, self.summary, self.model = saved.first_id, saved.summary, saved.model
        self._stored = True
        self._unsaved = {}

    def other_model_note(self, facts: Facts) -> str:
        """Returns a note where another model wrote this chat than goes on with it, else nothing."""
        if not self.model or not facts.lasting_name or self.model == facts.lasting_name:
            return ""
        return f"this chat was written with {model_name(self.model)}; {facts.model} goes on with it"

    def remember_model(self, facts: Facts) -> None:
        """Remembers the model that answers now, if its name can open it again."""
        if facts.lasting_name and facts.lasting_name != self.model:
            self.model = model = facts.lasting_name
            chat_id = self.id
            self._write(lambda history: history.remember_model(chat_id, model))

    @property
    def system(self) -> str:
        first = self.messages[0] if self.messages else None
        if first is not None and first.role == "system":
            return first.text
        return "" if self._stored else self._system or ""

    def add(
        self,
        role: str,
        text: str,
        *,
        instead_of: Message | None = None,
        calls: Sequence[ToolCall] = (),
    ) -> Message:
        """Appends a message; with `instead_of` it replaces the branch from that message on.

        Raises `UsageError` where that message is not in the branch.
        """
        branches = 1
        if instead_of is not None:
            branches = instead_of.branches + 1
            del self.messages[self.index_of(instead_of) :]
        if not self._stored:
            self._store()
        parent = self.messages[-1].id if self.messages else None
        message = Message(
            id=new_id(),
            parent_id=parent,
            role=role,
            text=text,
            state="streaming" if role == "assistant" and not (text or calls) else "done",
            created_s=time(),
            branch=branches,
            branches=branches,
            calls=calls,
        )
        self.messages.append(message)
        self._save(message)
        if role == "user" and not self.title:
            self._set_title(text)
        return message

    def index_of(self, message: Message) -> int:
        """Returns the index of `message` in the branch. Raises `UsageError` for another one."""
        ids = [row.id for row in self.messages]
        if message.id not in ids:
            raise UsageError("this message is not on the screen any more; Alt+Up selects another")
        return ids.index(message.id)

    def adopt(self, messages: Sequence[Message]) -> None:
        """Adds the messages of a file to this empty chat."""
        if messages[0].role == "system":
            self._system = None
        for message in messages:
            self.add(message.role, message.text, calls=message.calls)

    def begin_drafts(self, count: int) -> list[Message]:
        """Adds `count` more replies to the last question. The branch has no reply meanwhile."""
        previous = self.last_reply
        before = 0 if previous is None else previous.branches
        drafts: list[Message] = []
        for number in range(1, count + 1):
            message = self.add("assistant", "", instead_of=None if drafts else previous)
            message.branch, message.branches = before + number, before + count
            drafts.append(self.messages.pop())
        return drafts

    @property
    def last_reply(self) -> Message | None:
        """Returns the reply that the branch ends with, if it does."""
        last = self.messages[-1:]
        return last[0] if last and last[0].role == "assistant" else None

    def cut_reply(self) -> Message:
        """Returns the last reply if it is not complete. Raises `UsageError` otherwise."""
        reply = self.last_reply
        if reply is None or reply.state == "done" or not reply.text:
            raise UsageError("there is no reply to go on with: the last one came to its end")
        return reply

    def feed(self, text: str, message: Message | None = None) -> None:
        """Adds text to a message, by default the last, and stores it at most 250 ms later."""
        message = message or self.messages[-1]
        message.text += text
        if text:
            self._unsaved[message.id] = self._unsaved.get(message.id, "") + text
        if self._unsaved and monotonic() - self._saved_s >= CHUNK_INTERVAL_S:
            self._flush()

    def finish(self, state: str, stats: ReplyStats, message: Message | None = None) -> None:
        """Ends a message, by default the last. Calls of a reply that did not end are dropped."""
        self._flush()
        message = message or self.messages[-1]
        message.state, message.stats = state, asdict(stats)
        message.calls = calls = message.calls if state == "done" else ()
        key, values = message.id, dict(message.stats)
        self._write(lambda history: history.finish(key, state, values, calls))

    def context(self, *, up_to: Message | None = None) -> list[Message]:
        """Returns what the model gets: the system message, then all from the first not left out.

        A summary of the messages left out stands before that first one. `up_to` is the last message
        to return, also while it is streaming; the list is empty if it is left out.
        """
        rows = [
            row
            for row in self.messages
            if (row.text or row.calls or row.role == "tool")
            and (row.state != "streaming" or row is up_to)
        ]
        system = [row for row in rows[:1] if row.role == "system"]
        rest = rows[len(system) :]
        first = self._context_start(rest)
        if first and self.summary:
            text = SUMMARY_HEAD.format(self.summary) + rest[first].text
            rest[first] = replace(rest[first], text=text)
        rows = system + rest[first:]
        if up_to is None:
            return rows
        ids = [row.id for row in rows]
        return rows[: ids.index(up_to.id) + 1] if up_to.id in ids else []

    @property
    def num_left_out(self) -> int:
        """Counts the messages of this branch that the model does not get."""
        return self._context_start([row for row in self.messages if row.role != "system"])

    def _context_start(self, rows: Sequence[Message]) -> int:
        ids = [row.id for row in rows]
        return ids.index(self.first_id) if self.first_id in ids else 0

    def oldest_turns(self, characters: int) -> list[Message]:
        """Returns the fewest of the context's oldest questions and answers with `characters`.

        That is at least one question with its answer, but never the last question.
        """
        rows = [row for row in self.context() if row.role != "system"]
        ends = [index for index, row in enumerate(rows) if row.role == "user" and index]
        sizes = list(accumulate(len(row.text) for row in rows))
        enough = [end for end in ends if sizes[end - 1] >= characters]
        return rows[: enough[0] if enough else ends[-1] if ends else 0]

    def leave_out(self, old: Sequence[Message], summary: str = "") -> None:
        """Gives the model `summary`, or nothing, for the context's oldest messages."""
        rows = [row for row in self.context() if row.role != "system"]
        self.first_id, self.summary = rows[len(old)].id, summary
        chat_id, first_id = self.id, self.first_id
        self._write(lambda history: history.set_first_message(chat_id, first_id, summary))

    def last_message(self, role: str) -> Message | None:
        return next((row for row in reversed(self.messages) if row.role == role), None)

    def set_system(self, text: str) -> None:
        """Gives an empty chat its system message."""
        self._system = text

    def rename(self, title: str) -> None:
        """Gives the chat another title. Nothing is stored of an empty chat."""
        self.title = title
        chat_id = self.id
        if self._stored:
            self._write(lambda history: history.rename(chat_id, title))

    def _store(self) -> None:
        self._stored = True
        chat_id, title = self.id, self.title
        self._write(lambda history: history.new_chat(chat_id))
        if title:
            self._write(lambda history: history.rename(chat_id, title))
        if self._system and not self.messages:
            self.add("system", self._system)

    def _set_title(self, text: str) -> None:
        self.rename(" ".join(text.split())[:TITLE_CHARACTERS])

    def _save(self, message: Message) -> None:
        # The message goes on growing while the write waits for its turn.
        chat_id, snapshot = self.id, replace(message)
        self._write(lambda history: history.add(chat_id, snapshot))

    def _flush(self) -> None:
        unsaved, self._unsaved = self._unsaved, {}
        self._saved_s = monotonic()
        for key, text in unsaved.items():
            self._write(lambda history, key=key, text=text: history.append(key, text))
