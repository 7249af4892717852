"""The slash commands: one table that help, palette and the app share."""

from dataclasses import dataclass
from difflib import get_close_matches

from kvq.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command: what follows its name, and what it does. `synonyms` do the same."""

    name: str
    says: str
    takes: str = ""
    synonyms: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """How it is written: `/kv [K:V] [SIZE]`."""
        return f"/{self.name} {self.takes}".strip()

    @property
    def needs_words(self) -> bool:
        """Whether it does nothing without what it takes."""
        return bool(self.takes) and not self.takes.startswith("[")


COMMANDS = (
    Command(name="help", says="keys and commands"),
    Command(name="new", says="begin a new chat", synonyms=("clear",)),
    Command(name="rename", takes="[TITLE]", says="give this chat another title"),
    Command(name="delete", says="delete this chat for good"),
    Command(name="retry", says="another reply to the last message"),
    Command(name="more", says="go on with a reply that was cut or stopped"),
    Command(
        name="drafts", takes="N", says="N replies to the last message side by side, to choose one"
    ),
    Command(name="edit", says="edit your last message and answer it again"),
    Command(name="exact", says="compute again what edits left as it was computed before them"),
    Command(name="copy", takes="[code]", says="copy the last reply, or its code"),
    Command(name="system", takes="[TEXT]", says="set or show the system message"),
    Command(
        name="set", takes="NAME VALUE", says="temp, top-k, top-p, min-p, seed, predict or think"
    ),
    Command(name="show", says="the model and every setting"),
    Command(name="kv", takes="[K:V] [SIZE]", says="change the KV bits and budget: /kv 4:2 64MiB"),
    Command(name="stats", says="what the last reply cost"),
    Command(name="model", takes="NAME", says="go on with another model"),
    Command(name="save", says="save the KV cache of this chat now"),
    Command(name="load", takes="FILE", says="read a chat from JSON lines, Markdown or ChatGPT"),
    Command(name="export", takes="FILE", says="write this chat: .md Markdown, else JSON lines"),
    Command(name="search", takes="TEXT", says="find a message in all chats"),
    Command(name="theme", takes="NAME", says="change the colours"),
    Command(name="quit", says="leave", synonyms=("bye", "exit")),
)


def parse_command(line: str) -> tuple[str, str]:
    """`"/kv 4:2"` -> ("kv", "4:2"). Raises `UsageError` for a command that is not there."""
    word, _, rest = line.strip().removeprefix("/").partition(" ")
    names = {name: row.name for row in COMMANDS for name in (row.name, *row.synonyms)}
    if word in names:
        return names[word], rest.strip()
    near = get_close_matches(word, names, n=1)
    hint = f" (did you mean /{near[0]}?)" if near else ""
    raise UsageError(f"/{word} is not a command{hint}; /help lists them, // begins a message")


def matching(text: str) -> list[Command]:
    """The commands that `text`, as far as it is typed, may become; none unless it begins one."""
    word = text.removeprefix("/")
    if word == text or word.startswith("/") or any(part.isspace() for part in word):
        return []
    return [
        row for row in COMMANDS if any(name.startswith(word) for name in (row.name, *row.synonyms))
    ]


def help_text() -> str:
    """The table as lines of text."""
    rows = [(row.usage, row.says) for row in COMMANDS]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width + 2}}{says}" for name, says in rows)
