"""What an empty chat shows: the model, three things to try, and where help is."""

from rich.console import Group
from rich.padding import Padding
from rich.text import Text
from textual.widgets import Static

from kvq_apps.chat.client import Facts

TRY = (
    ("What is a KV cache?", "ask something; Enter sends, Esc stops the reply"),
    ("/drafts 3", "then choose among three replies to it"),
)
SMALLER_KV = "make the cache smaller while the chat goes on"
# For an engine whose cache a chat cannot change.
OTHERWISE = ("/set temp 0.2", "have replies written more soberly")
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
    smaller = facts is not None and facts.smaller_kv
    for words, says in (*TRY, (f"/kv {smaller}", SMALLER_KV) if smaller else OTHERWISE):
        parts.append(Padding(Text.assemble((words, "bold"), f"  {says}"), (0, 0, 0, 2)))
    return Group(*parts, Text(HELP))
