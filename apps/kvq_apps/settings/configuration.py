"""Reads the user's settings file, `config.toml`: each value with its line.

`flags.FLAGS` defines the settings; the chat reads the sections `[keys]` and `[mcp.NAME]`. A wrong
line never ends a command: it is left out with one warning.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvq.errors import DataError, UsageError
from kvq.files import read_regular
from kvq.json_values import is_array, is_object
from kvq.settings import config_folder
from kvq_apps.settings import sources
from kvq_apps.settings.flags import FLAGS, format_error
from kvq_apps.settings.sources import FlagSource, FlagValue
from kvq_apps.terminal import output

KEYS = "keys"
TOOL_SERVERS = "mcp"
# Settings of these sections count for every command; other sections name their command.
SHARED_SECTIONS = ("model", "kv")
SECTIONS = (*SHARED_SECTIONS, "chat", "lsp", "serve", KEYS, TOOL_SERVERS)
FLAG_OF = {flag.setting: name for name, flag in FLAGS.items() if flag.setting is not None}
MOST_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TomlFile:
    """Holds the top-level values of a TOML file.

    `lines` has the line of each value by its dotted name; `trouble` says why a file has no values.
    """

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    trouble: str | None = None

    def where(self, name: str) -> str:
        """Returns `PATH:LINE` of the value called `name`, such as `kv.budget`."""
        line = self.lines.get(name) or self.lines.get(name.partition(".")[0])
        return str(self.path) if line is None else f"{self.path}:{line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSettings:
    """Holds the file's values by flag, and one warning for each line that is left out."""

    values: Mapping[str, FlagValue]
    warnings: tuple[str, ...] = ()

    def flag_source(self, command: str | None) -> FlagSource:
        """Returns a source of the settings that count for `command`."""
        sections = (*SHARED_SECTIONS, command)
        return lambda name: self.values.get(name) if _section(name) in sections else None


def _section(name: str) -> str:
    return (FLAGS[name].setting or "").partition(".")[0]


def user_path() -> Path:
    """Returns the path of the user's file, which need not exist."""
    return config_folder() / "config.toml"


def load() -> FileSettings:
    """Reads the settings of the user's file."""
    file = read(user_path())
    values: dict[str, FlagValue] = {}
    warnings = [] if file.trouble is None else [file.trouble]
    for name, value in _rows(file, warnings):
        try:
            values[FLAG_OF[name]] = _flag_value(file, name, value)
        except UsageError as error:
            warnings.append(f"{file.where(name)}: {format_error(error)}; this line is not used")
    return FileSettings(values=values, warnings=tuple(warnings))


def resolved() -> dict[str, FlagValue | None]:
    """Returns every setting with its value, or None where the default counts."""
    values = load().values
    return {
        setting: sources.environment_source(name) or values.get(name)
        for setting, name in FLAG_OF.items()
    }


def read(path: Path) -> TomlFile:
    """Reads a file's values and lines; an absent file has none, a damaged one its `trouble`."""
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        return TomlFile(path=path)
    except OSError as error:
        return TomlFile(path=path, trouble=f"{path} cannot be read: {error.strerror}")
    except DataError as error:
        return TomlFile(path=path, trouble=str(error))
    except UnicodeDecodeError as error:
        return TomlFile(path=path, trouble=f"{path} is not UTF-8 at byte {error.start}")

    import tomllib

    try:
        values = tomllib.loads(text)
    # tomllib raises a plain ValueError for a number with more digits than Python reads.
    except (ValueError, RecursionError) as error:
        return TomlFile(path=path, trouble=f"{path} is not TOML: {error}; nothing in it is used")
    return TomlFile(path=path, values=values, lines=_lines(text))


def _rows(file: TomlFile, warnings: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields each known setting and its value; unknown ones are added to `warnings`."""
    for section, rows in file.values.items():
        if section not in SECTIONS:
            known = ", ".join(f"[{name}]" for name in SECTIONS)
            warnings.append(f"{file.where(section)}: there is no section {section}; known: {known}")
        elif not is_object(rows):
            warnings.append(f"{file.where(section)}: {section} is a section; write [{section}]")
        elif section not in (KEYS, TOOL_SERVERS):
            for key, value in rows.items():
                name = f"{section}.{key}"
                if name in FLAG_OF:
                    yield name, value
                else:
                    warnings.append(f"{file.where(name)}: {_unknown(section, key)}")


def _unknown(section: str, key: str) -> str:
    known = [name.partition(".")[2] for name in FLAG_OF if name.startswith(f"{section}.")]
    hint = output.did_you_mean(key, known) or f"; known: {', '.join(known) or 'none yet'}"
    return f"[{section}] has no key {key}{hint}"


def _flag_value(file: TomlFile, name: str, value: Any) -> FlagValue:
    """Returns the value as its flag reads it. Raises `UsageError`."""
    flag = FLAG_OF[name]
    repeats = FLAGS[flag].repeats
    items = value if repeats and is_array(value) else [value]
    values = [sources.checked_value(flag, _path_beside(file, item), name) for item in items]
    return FlagValue(value=values if repeats else values[0], origin=file.where(name))


def _path_beside(file: TomlFile, value: Any) -> Any:
    """Returns a path that begins with ./ or ../ relative to the file, other values unchanged."""
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str(file.path.parent / value)
    return value


def _lines(text: str) -> dict[str, int]:
    """Returns the first line of each section and key, by dotted name."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            header, closing, _ = stripped[1:].partition("]")
            if closing:
                section = _bare(header)
                lines.setdefault(section, number)
        else:
            key, equals, _ = stripped.partition("=")
            if equals and "#" not in key:
                lines.setdefault(".".join(filter(None, (section, _bare(key)))), number)
    return lines


def _bare(name: str) -> str:
    """Returns a dotted name without the quotes that TOML allows around its parts."""
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
