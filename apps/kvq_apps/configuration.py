"""The files a user writes settings into, each value with the line it stands on.

Reads the nearest `.kvq.toml` of a project and the user's `config.toml`; what a setting means is
`flags.FLAGS`', what `[keys]` holds the chat's. A file never ends a command: what cannot be used
is left out with one warning.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvq.errors import UsageError
from kvq.settings import config_folder
from kvq_apps import layers, options, output
from kvq_apps.flags import FLAGS
from kvq_apps.layers import Found

PROJECT_FILE = ".kvq.toml"
KEYS = "keys"
# Settings of these are for every command that takes the flag; the others name their command.
SHARED_SECTIONS = ("model", "kv")
SECTIONS = (*SHARED_SECTIONS, "chat", "lsp", "serve", KEYS)
# What may leave this machine or let others in is not a checkout's to say.
PERSONAL = ("chat.server", "serve.host", "serve.socket", "serve.origin", "serve.api-key")
FLAG_OF = {flag.setting: name for name, flag in FLAGS.items() if flag.setting is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class TomlFile:
    """A TOML file's top-level values; `lines` by dotted name, `trouble` says why it is empty."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    trouble: str | None = None

    def where(self, name: str) -> str:
        """`PATH:LINE` of the value called `name` (`kv.budget`)."""
        line = self.lines.get(name) or self.lines.get(name.partition(".")[0])
        return str(self.path) if line is None else f"{self.path}:{line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What one file sets, by flag, and one warning for each row that is left out."""

    values: Mapping[str, Found]
    warnings: tuple[str, ...] = ()

    def layer(self, command: str | None) -> layers.Layer:
        """The settings that count for `command`; None: all."""

        def find(name: str) -> Found | None:
            section = (FLAGS[name].setting or "").partition(".")[0]
            counts = command is None or section in (*SHARED_SECTIONS, command)
            return self.values.get(name) if counts else None

        return find


def user_path() -> Path:
    """The user's own file, there or not."""
    return config_folder() / "config.toml"


def project_path() -> Path | None:
    """The `.kvq.toml` of this folder, or of the nearest one above that has one."""
    with suppress(OSError):
        here = Path.cwd()
        return next(
            (folder / PROJECT_FILE
             for folder in (here, *here.parents) if (folder / PROJECT_FILE).is_file()),
            None,
        )  # fmt: skip
    return None


def load() -> tuple[Settings, ...]:
    """The settings of the project's file and of the user's, the first before the second."""
    project = project_path()
    files = [] if project is None else [settings(read(project), personal=False)]
    return (*files, settings(read(user_path()), personal=True))


def resolved(command: str | None = None) -> dict[str, Found | None]:
    """Every setting with its value, or None where its component's default holds."""
    found_in = (layers.environment_layer, *(file.layer(command) for file in load()))
    return {
        setting: next((found for layer in found_in if (found := layer(name)) is not None), None)
        for setting, name in FLAG_OF.items()
    }


def read(path: Path) -> TomlFile:
    """The file's values and lines; an absent file has none, a damaged one says its `trouble`."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return TomlFile(path=path)
    except OSError as error:
        return TomlFile(path=path, trouble=f"{path} cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return TomlFile(path=path, trouble=f"{path} is not UTF-8 at byte {error.start}")

    import tomllib

    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        return TomlFile(path=path, trouble=f"{path} is not TOML: {error}; nothing in it is used")
    return TomlFile(path=path, values=values, lines=_lines(text))


def settings(file: TomlFile, *, personal: bool) -> Settings:
    """What the file sets; `personal`: it is the user's own."""
    values: dict[str, Found] = {}
    warnings = [] if file.trouble is None else [file.trouble]
    for name, value in _rows(file, warnings):
        try:
            values[FLAG_OF[name]] = _found(file, name, value, personal=personal)
        except UsageError as error:
            warnings.append(f"{file.where(name)}: {error}; this line is not used")
    return Settings(values=values, warnings=tuple(warnings))


def _rows(file: TomlFile, warnings: list[str]) -> Iterator[tuple[str, Any]]:
    """The known settings of the file, `kv.budget` and its value; `warnings` gets the others."""
    for section, rows in file.values.items():
        if section not in SECTIONS:
            known = ", ".join(f"[{name}]" for name in SECTIONS)
            warnings.append(f"{file.where(section)}: there is no section {section}; known: {known}")
        elif not isinstance(rows, dict):
            warnings.append(f"{file.where(section)}: {section} is a section; write [{section}]")
        elif section != KEYS:
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


def _found(file: TomlFile, name: str, value: Any, *, personal: bool) -> Found:
    """The value as the flag reads it. Raises `UsageError`."""
    if name in PERSONAL and not personal:
        raise UsageError(
            f"{name} counts in {user_path()} only, because a project's file comes from others"
        )
    flag = FLAGS[FLAG_OF[name]]
    texts = value if flag.repeats and isinstance(value, list) else [value]
    read_values = [_read(file, name, one) for one in texts]
    return Found(value=read_values if flag.repeats else read_values[0], origin=file.where(name))


def _read(file: TomlFile, name: str, value: Any) -> Any:
    flag = FLAGS[FLAG_OF[name]]
    if flag.switch != isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{name} needs {'true or false' if flag.switch else 'text or a number'}")
    text = str(value)
    if text.startswith(("./", "../")):
        # Of the file's folder, wherever below it the command runs.
        text = str(file.path.parent / text)
    read_value = layers.read_value(FLAG_OF[name], text, name)
    options.check(FLAG_OF[name], read_value)
    return read_value


_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"\s*([^\s=#\[\]][^=#]*?)\s*=")


def _lines(text: str) -> dict[str, int]:
    """The first line of each section and key, by dotted name."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = _bare(header[1])
            lines.setdefault(section, number)
        elif key := _KEY.match(line):
            lines.setdefault(".".join(filter(None, (section, _bare(key[1])))), number)
    return lines


def _bare(name: str) -> str:
    """A dotted name without the quotes TOML allows around its parts."""
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
