"""The chat that is open: its chosen branch, what the model is given of it, what is written down.

Writing goes through `write`, in order, on another thread; nothing here waits for a disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from time import monotonic, time

from kvq_apps.chat.history import History, new_id
from kvq_apps.chat.messages import Message, ReplyStats

CHUNK_INTERVAL_S = 0.25
TITLE_CHARACTERS = 60

Write = Callable[[Callable[[History], None]], object]


class Conversation:
    """One chat's chosen branch; the last message may be streaming."""

    def __init__(self, write: Write, *, system: str | None = None) -> None:
        self._write = write
        self.id = new_id()
        self.title = ""
        self.messages: list[Message] = []
        self.first_id: str | None = None
        self._system = system
        self._stored = False
        self._unsaved = ""
        self._saved_s = 0.0

    def show(
        self, chat_id: str, title: str, messages: Sequence[Message], first_id: str | None
    ) -> None:
        """Becomes a chat of the history."""
        self.id, self.title, self.messages = chat_id, title, list(messages)
        self.first_id = first_id
        self._stored = True
        self._unsaved = ""

    @property
    def system(self) -> str:
        """The system message, perhaps empty."""
        first = self.messages[0] if self.messages else None
        if first is not None and first.role == "system":
            return first.text
        return "" if self._stored else self._system or ""

    def add(self, role: str, text: str, *, instead_of: Message | None = None) -> Message:
        """Appends a message; `instead_of` one, everything from that on leaves the branch."""
        if not self._stored:
            self._store()
        branches = 1
        if instead_of is not None:
            branches = instead_of.branches + 1
            del self.messages[self.messages.index(instead_of) :]
        parent = self.messages[-1].id if self.messages else None
        message = Message(
            id=new_id(),
            parent_id=parent,
            role=role,
            text=text,
            state="streaming" if role == "assistant" and not text else "done",
            created_s=time(),
            branch=branches,
            branches=branches,
        )
        self.messages.append(message)
        self._save(message)
        if role == "user" and not self.title:
            self._name(text)
        return message

    def adopt(self, messages: Sequence[Message]) -> None:
        """Takes the messages of a file into this empty chat."""
        if messages[0].role == "system":
            self._system = None
        for message in messages:
            self.add(message.role, message.text)

    def feed(self, text: str) -> None:
        """Text arrived for the last message; at most 250 ms of it are not written yet."""
        self.messages[-1].text += text
        self._unsaved += text
        if self._unsaved and monotonic() - self._saved_s >= CHUNK_INTERVAL_S:
            self._flush()

    def finish(self, state: str, stats: ReplyStats) -> None:
        """The last message is over."""
        self._flush()
        message = self.messages[-1]
        message.state, message.stats = state, asdict(stats)
        key, values = message.id, dict(message.stats)
        self._write(lambda history: history.finish(key, state, values))

    def context(self) -> list[Message]:
        """What the model is given: the system message, then all from the first not left out."""
        rows = [row for row in self.messages if row.text and row.state != "streaming"]
        system = [row for row in rows[:1] if row.role == "system"]
        rest = rows[len(system) :]
        firsts = [index for index, row in enumerate(rest) if row.id == self.first_id]
        return system + (rest[firsts[0] :] if firsts else rest)

    def leave_out_oldest(self) -> int:
        """Leaves the oldest question and its answer out of the context; how many messages go."""
        rows = [row for row in self.context() if row.role != "system"]
        questions = [index for index, row in enumerate(rows) if row.role == "user"]
        if len(questions) < 2:
            return 0
        self.first_id = rows[questions[1]].id
        chat_id, first_id = self.id, self.first_id
        self._write(lambda history: history.begin_at(chat_id, first_id))
        return questions[1]

    def last(self, role: str) -> Message | None:
        """The last message of a role."""
        return next((row for row in reversed(self.messages) if row.role == role), None)

    def set_system(self, text: str) -> None:
        """Gives an empty chat its system message."""
        self._system = text

    def _store(self) -> None:
        self._stored = True
        chat_id = self.id
        self._write(lambda history: history.new_chat(chat_id))
        if self._system and not self.messages:
            self.add("system", self._system)

    def _name(self, text: str) -> None:
        self.title = " ".join(text.split())[:TITLE_CHARACTERS]
        chat_id, title = self.id, self.title
        self._write(lambda history: history.rename(chat_id, title))

    def _save(self, message: Message) -> None:
        # The message goes on growing while this waits for its turn.
        chat_id, now = self.id, replace(message)
        self._write(lambda history: history.add(chat_id, now))

    def _flush(self) -> None:
        text, self._unsaved = self._unsaved, ""
        self._saved_s = monotonic()
        if text:
            message_id = self.messages[-1].id
            self._write(lambda history: history.append(message_id, text))
