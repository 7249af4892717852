"""What an empty chat shows: the model, three things to try, and where help is."""

from rich.console import Group
from rich.padding import Padding
from rich.text import Text
from textual.widgets import Static

from kvq_apps.chat.client import Facts

TRY = (
    ("What is a KV cache?", "ask something; Enter sends, Esc stops the reply"),
    ("/drafts 3", "then choose among three replies to it"),
    ("/kv 4:2 1MiB", "make the cache smaller while the chat goes on"),
)
HELP = "F1 shows every key, / lists the commands, Ctrl+R opens earlier chats, Ctrl+Q leaves."


class Welcome(Static):
    """Stands above a chat in which nothing was said."""

    DEFAULT_CSS = "Welcome { height: auto; padding: 1 3; }"

    def greet(self, facts: Facts | None) -> None:
        """Names the model, once there is one."""
        self.update(greeting(facts))


def greeting(facts: Facts | None) -> Group:
    """The welcome as it is drawn."""
    head = "kvq chat" if facts is None else f"kvq chat with {facts.model}"
    parts: list[Text | Padding] = [Text(head, "bold"), Text("Three things to try:")]
    for words, says in TRY:
        parts.append(Padding(Text.assemble((words, "bold"), f"  {says}"), (0, 0, 0, 2)))
    return Group(*parts, Text(HELP))
