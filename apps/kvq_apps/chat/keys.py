"""Every key the chat knows: one table that footer, palette, help and the user's file share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.binding import Binding

from kvq.json_values import is_object
from kvq_apps import configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRow:
    """A key, or several, and what it does. `app`: works everywhere, also while typing."""

    name: str
    keys: str
    action: str
    says: str
    app: bool = True
    shown: bool = False


KEYS = (
    KeyRow(
        name="send",
        keys="enter",
        action="send",
        says="send; when empty: ask again after a failure",
        app=False,
    ),
    KeyRow(
        name="newline",
        keys="ctrl+j,shift+enter,alt+enter",
        action="newline",
        says="a new line in the message",
        app=False,
    ),
    KeyRow(name="cancel", keys="escape", action="cancel", says="stop the reply", shown=True),
    KeyRow(
        name="interrupt",
        keys="ctrl+c",
        action="interrupt",
        says="copy the selection, else stop the reply; twice: quit",
    ),
    KeyRow(name="quit", keys="ctrl+q", action="quit", says="quit", shown=True),
    KeyRow(name="new", keys="ctrl+n", action="new_chat", says="new chat", shown=True),
    KeyRow(name="resume", keys="ctrl+r", action="resume", says="resume a chat", shown=True),
    KeyRow(name="search", keys="ctrl+f", action="search", says="search in all chats"),
    KeyRow(name="sidebar", keys="ctrl+b", action="sidebar", says="the chats beside, or not"),
    KeyRow(name="editor", keys="ctrl+g", action="editor", says="write in your editor"),
    KeyRow(name="redraw", keys="ctrl+l", action="redraw", says="draw the screen again"),
    KeyRow(name="suspend", keys="ctrl+z", action="suspend_process", says="to the background"),
    KeyRow(name="help", keys="f1", action="help", says="help", shown=True),
    KeyRow(name="page-up", keys="pageup", action="page(-1)", says="a page up"),
    KeyRow(name="page-down", keys="pagedown", action="page(1)", says="a page down"),
    KeyRow(name="previous", keys="alt+up", action="select(-1)", says="select the turn before"),
    KeyRow(name="next", keys="alt+down", action="select(1)", says="select the turn after"),
    KeyRow(
        name="next-draft",
        keys="alt+right_square_bracket,alt+n",
        action="draft(1)",
        says="drafts of the reply side by side, the next one marked",
    ),
    KeyRow(
        name="previous-draft",
        keys="alt+left_square_bracket,alt+p",
        action="draft(-1)",
        says="the same, the one before marked",
    ),
    KeyRow(
        name="thoughts", keys="ctrl+o", action="thoughts", says="what the model thought, or fold it"
    ),
    KeyRow(name="top", keys="home", action="top", says="to the first line", app=False),
    KeyRow(name="bottom", keys="end", action="bottom", says="to the end, and follow it", app=False),
    KeyRow(name="copy", keys="y", action="copy", says="copy the message", app=False),
    KeyRow(name="copy-fence", keys="Y", action="copy_fence", says="copy its code", app=False),
    KeyRow(name="edit", keys="e", action="edit", says="edit the message", app=False),
    KeyRow(name="retry", keys="r", action="retry", says="another reply", app=False),
)
PROMPT_KEYS = ("send", "newline")


def bindings(*, app: bool) -> list[Binding]:
    """The table's rows as Textual takes them, for the app or for the transcript."""
    return [
        Binding(
            row.keys,
            row.action if app else f"app.{row.action}",
            row.says,
            id=row.name,
            show=row.shown,
            # What works while typing comes before what the text box does with the key.
            priority=app and row.name != "cancel",
        )
        for row in KEYS
        if row.app == app and row.name not in PROMPT_KEYS
    ]


def teach_old_terminals() -> None:
    """Reads ESC and Enter as Alt+Enter: terminals without the newer key protocol send that."""
    alt_enter = SimpleNamespace(value="alt+enter")
    ANSI_SEQUENCES_KEYS["\x1b\r"] = (alt_enter,)  # type: ignore[assignment]


# As keyboards have them; other keys by their name or their character.
_NAMES = {
    "escape": "Esc",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "right_square_bracket": "]",
    "left_square_bracket": "[",
}


def key_name(keys: str) -> str:
    """`"ctrl+j,alt+n"` as keyboards name them: `Ctrl+J, Alt+N`."""
    return ", ".join("+".join(_cap(part) for part in key.split("+")) for key in _shifted(keys))


def _shifted(keys: str) -> list[str]:
    return [f"shift+{key}" if len(key) == 1 and key.isupper() else key for key in keys.split(",")]


def _cap(part: str) -> str:
    return _NAMES.get(part, part if len(part) > 1 and part[0].isupper() else part.capitalize())


def help_text(chosen: Mapping[str, str] = MappingProxyType({})) -> str:
    """The table as lines of text, with the keys that the user has `chosen`."""
    names = [key_name(chosen.get(row.name, row.keys)) for row in KEYS]
    width = max(map(len, names)) + 3
    return "\n".join(f"{name:<{width}}{row.says}" for name, row in zip(names, KEYS, strict=True))


def read_keys(path: Path) -> tuple[dict[str, str], list[str]]:
    """The `[keys]` of the user's file, name -> keys, and a warning for each row left out.

    What is wrong with the file as a whole, the configuration says.
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
        elif taken := _taken(keys, name, known | chosen):
            warnings.append(f"{where}: {keys} is the key of {taken} already; choose another")
        else:
            chosen[name] = keys
    return chosen, warnings


def _taken(keys: str, name: str, by_name: Mapping[str, str]) -> str:
    wanted = set(keys.split(","))
    return next(
        (other for other, theirs in by_name.items()
         if other != name and wanted & set(theirs.split(","))),
        "",
    )  # fmt: skip
