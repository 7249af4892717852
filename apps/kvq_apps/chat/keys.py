"""The table of the chat's keys, which footer, palette, help and the user's file share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.binding import Binding

from kvq.json_values import is_object
from kvq_apps.settings import configuration


@dataclass(frozen=True, slots=True)
class KeyRow:
    """Describes a key, or several, and its action. `app`: works everywhere, also while typing."""

    name: str
    keys: str
    action: str
    help: str
    app: bool = True
    shown: bool = False


KEYS = (
    KeyRow("send", "enter", "send", "send; when empty: ask again after a failure", app=False),
    KeyRow("newline", "ctrl+j,shift+enter,alt+enter", "newline", "a new line in the message",
        app=False),
    KeyRow("cancel", "escape", "cancel", "stop the reply", shown=True),
    KeyRow("interrupt", "ctrl+c", "interrupt",
        "copy the selection, else stop the reply; twice: quit"),
    KeyRow("quit", "ctrl+q", "quit", "quit", shown=True),
    KeyRow("new", "ctrl+n", "new_chat", "new chat", shown=True),
    KeyRow("resume", "ctrl+r", "resume", "resume a chat", shown=True),
    KeyRow("search", "ctrl+f", "resume", "search in all chats"),
    KeyRow("sidebar", "ctrl+b", "sidebar", "the chats beside, or not"),
    KeyRow("editor", "ctrl+g", "editor", "write in your editor"),
    KeyRow("redraw", "ctrl+l", "redraw", "draw the screen again"),
    KeyRow("suspend", "ctrl+z", "suspend_process", "to the background"),
    KeyRow("help", "f1", "help", "help", shown=True),
    KeyRow("page-up", "pageup", "page(-1)", "a page up"),
    KeyRow("page-down", "pagedown", "page(1)", "a page down"),
    KeyRow("previous", "alt+up", "select(-1)", "select the turn before"),
    KeyRow("next", "alt+down", "select(1)", "select the turn after"),
    KeyRow("next-draft", "alt+right_square_bracket,alt+n", "draft(1)",
        "drafts of the reply side by side, the next one marked"),
    KeyRow("previous-draft", "alt+left_square_bracket,alt+p", "draft(-1)",
        "the same, the one before marked"),
    KeyRow("thoughts", "ctrl+o", "thoughts", "thoughts and long messages: show all, or fold"),
    KeyRow("top", "home", "scroll_home", "to the first line", app=False),
    KeyRow("bottom", "end", "scroll_end", "to the end, and follow it", app=False),
    KeyRow("copy", "y", "app.copy", "copy the message", app=False),
    KeyRow("copy-fence", "Y", "app.copy_fence", "copy its code", app=False),
    KeyRow("edit", "e", "app.edit", "edit the message", app=False),
    KeyRow("retry", "r", "app.retry", "another reply", app=False),
)  # fmt: skip
PROMPT_KEYS = ("send", "newline")


def bindings(*, app: bool) -> list[Binding]:
    """Returns the table's rows as Textual takes them, for the app or for the transcript."""
    return [
        Binding(
            row.keys,
            row.action,
            row.help,
            id=row.name,
            show=row.shown,
            # What works while typing comes before what the text box does with the key.
            priority=app and row.name != "cancel",
        )
        for row in KEYS
        if row.app == app and row.name not in PROMPT_KEYS
    ]


def teach_old_terminals() -> None:
    """Reads ESC and Enter as Alt+Enter, which terminals without the newer key protocol send."""
    alt_enter = SimpleNamespace(value="alt+enter")
    ANSI_SEQUENCES_KEYS["\x1b\r"] = (alt_enter,)  # type: ignore[assignment]


# As keyboards name them; other keys have their own name or character.
_NAMES = {
    "escape": "Esc", "pageup": "PgUp", "pagedown": "PgDn",
    "right_square_bracket": "]", "left_square_bracket": "[",
}  # fmt: skip


def key_name(keys: str) -> str:
    """Names keys as keyboards do: `"ctrl+j,alt+n"` becomes `Ctrl+J, Alt+N`."""
    shifted = (
        f"shift+{key}" if len(key) == 1 and key.isupper() else key for key in keys.split(",")
    )
    return ", ".join("+".join(map(_part_name, key.split("+"))) for key in shifted)


def _part_name(part: str) -> str:
    return _NAMES.get(part, part if len(part) > 1 and part[0].isupper() else part.capitalize())


def help_text(chosen: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the table as lines of text, with the keys that the user has `chosen`."""
    names = [key_name(chosen.get(row.name, row.keys)) for row in KEYS]
    width = max(map(len, names)) + 3
    return "\n".join(f"{name:<{width}}{row.help}" for name, row in zip(names, KEYS, strict=True))


def read_keys(path: Path) -> tuple[dict[str, str], list[str]]:
    """Reads `[keys]` of the user's file; returns keys by name and a warning for each bad row.

    Errors of the file as a whole are reported by the configuration.
    """
    file = configuration.read(path)
    section = file.values.get(configuration.KEYS)
    known = {row.name: row.keys for row in KEYS}
    chosen: dict[str, str] = {}
    warnings: list[str] = []
    for name, keys in section.items() if is_object(section) else ():
        where = file.where(f"{configuration.KEYS}.{name}")
        if name not in known:
            warnings.append(f"{where}: there is no key action {name}; F1 lists them")
        elif not isinstance(keys, str) or not keys:
            warnings.append(f'{where}: {name} needs keys in quotes, such as "ctrl+t"')
        elif conflicts := [
            row for row, row_keys in (known | chosen).items()
            if row != name and set(keys.split(",")) & set(row_keys.split(","))
        ]:  # fmt: skip
            warnings.append(f"{where}: {keys} is the key of {conflicts[0]} already; choose another")
        else:
            chosen[name] = keys
    return chosen, warnings
