"""The files a user writes settings into, each value with the line it stands on.

Reads the nearest `.kvq.toml` of a project and the user's `config.toml`; what a setting means is
`flags.FLAGS`', what `[keys]` holds the chat's. A file never ends a command: what cannot be used
is left out with one warning. `PROJECT_RULES` says what a project's file may decide.
"""

import hashlib
import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from kvq.config import parse_budget
from kvq.errors import DataError, UsageError
from kvq.json_values import is_array, is_object
from kvq.settings import config_folder, environment
from kvq_apps import layers, options, output, text_input, trust
from kvq_apps.flag_values import AUTO
from kvq_apps.flags import FLAGS, told
from kvq_apps.flags import field as attribute
from kvq_apps.layers import Found

PROJECT_FILE = ".kvq.toml"
KEYS = "keys"
# Settings of these are for every command that takes the flag; the others name their command.
SHARED_SECTIONS = ("model", "kv")
SECTIONS = (*SHARED_SECTIONS, "chat", "lsp", "serve", KEYS)
FLAG_OF = {flag.setting: name for name, flag in FLAGS.items() if flag.setting is not None}
MOST_BYTES = 64 << 10
# The standard library's parser takes time quadratic in the parts of a dotted name.
MOST_DOTS = 16


class Rule(Enum):
    """What the file of a project, which comes from others, may do with a setting."""

    SET = auto()
    # Never beyond what the user's own file says.
    NARROW = auto()
    # It names a file, a network's or a model's, or what a model is told: `kvq trust` first.
    ASK = auto()
    # It would let others in, or send what is said elsewhere.
    NEVER = auto()


PROJECT_RULES: Mapping[str, Rule] = {
    "model.name": Rule.ASK, "model.backend": Rule.SET, "model.device": Rule.SET,
    "model.threads": Rule.NARROW, "model.offline": Rule.NARROW,
    "model.weights-budget": Rule.NARROW,
    "kv.kbits": Rule.SET, "kv.vbits": Rule.SET, "kv.bits": Rule.SET, "kv.budget": Rule.NARROW,
    "kv.offload": Rule.NARROW, "kv.policy": Rule.SET, "kv.read": Rule.SET,
    # Both can name another model: auxiliary:path=, model:path=.
    "kv.predict": Rule.ASK, "model.draft": Rule.ASK,
    "kv.predict-with": Rule.ASK, "model.ctx-size": Rule.NARROW, "model.predict": Rule.NARROW,
    "chat.system": Rule.ASK, "model.temp": Rule.SET, "model.top-k": Rule.SET,
    "model.top-p": Rule.SET, "model.min-p": Rule.SET, "model.repeat-penalty": Rule.SET,
    "model.repeat-last-n": Rule.SET, "model.seed": Rule.SET,
    "model.think": Rule.SET,
    "serve.host": Rule.NEVER, "serve.port": Rule.SET, "serve.socket": Rule.NEVER,
    "serve.api-key": Rule.NEVER, "serve.origin": Rule.NEVER, "serve.alias": Rule.SET,
    "serve.sessions": Rule.NARROW, "serve.sessions-disk": Rule.NARROW,
    "serve.sessions-folder": Rule.NEVER,
    "serve.queue": Rule.NARROW, "serve.strict-model": Rule.NARROW,
    "serve.chunk-tokens": Rule.SET, "serve.grace": Rule.SET,
    "chat.server": Rule.NEVER, "chat.inline": Rule.SET, "chat.theme": Rule.SET,
    "chat.meter": Rule.SET, "chat.no-log": Rule.NARROW,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TomlFile:
    """A TOML file's top-level values; `lines` by dotted name, `trouble` says why it is empty.

    `digest` is the SHA-256 of its bytes in hex.
    """

    path: Path
    digest: str = ""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    trouble: str | None = None

    def where(self, name: str) -> str:
        """`PATH:LINE` of the value called `name` (`kv.budget`)."""
        line = self.lines.get(name) or self.lines.get(name.partition(".")[0])
        return str(self.path) if line is None else f"{self.path}:{line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What one file sets, by flag, and one warning for each row that is left out.

    `waiting` is what it would set if the user trusted the file at `path`.
    """

    path: Path
    values: Mapping[str, Found]
    waiting: Mapping[str, Found] = field(default_factory=dict[str, Found])
    warnings: tuple[str, ...] = ()

    def layer(self, command: str | None) -> layers.Layer:
        """The settings that count for `command`; None: all."""
        return lambda name: self.values.get(name) if _counts(name, command) else None

    def untrusted(self, arguments: Namespace, command: str | None) -> str | None:
        """One line on what `command` would use of the file if it were trusted; None: nothing."""
        names = [
            str(FLAGS[name].setting)
            for name in self.waiting
            if _counts(name, command)
            and getattr(arguments, attribute(name), "absent") is None
            and environment(name) is None
            and not (name == "model" and getattr(arguments, "name", None))
        ]
        if not names:
            return None
        return (
            f"{self.path}: {', '.join(names)} not used, because a project's file comes from "
            f"others; read it, then `kvq trust {self.path.parent}`"
        )


def _counts(name: str, command: str | None) -> bool:
    section = (FLAGS[name].setting or "").partition(".")[0]
    return command is None or section in (*SHARED_SECTIONS, command)


def user_path() -> Path:
    """The user's own file, there or not."""
    return config_folder() / "config.toml"


def project_path(folder: Path | None = None) -> Path | None:
    """The `.kvq.toml` of `folder` (None: this one), or of the nearest one above that has one."""
    with suppress(OSError):
        here = (folder or Path.cwd()).resolve()
        return next(
            (folder / PROJECT_FILE
             for folder in (here, *here.parents) if (folder / PROJECT_FILE).is_file()),
            None,
        )  # fmt: skip
    return None


def load() -> tuple[Settings, ...]:
    """The settings of the project's file and of the user's, the first before the second."""
    own = settings(read(user_path()))
    project = project_path()
    return (own,) if project is None else (settings(read(project), own), own)


def resolved(command: str | None = None) -> dict[str, Found | None]:
    """Every setting with its value, or None where its component's default holds."""
    found_in = (layers.environment_layer, *(file.layer(command) for file in load()))
    return {
        setting: next((found for layer in found_in if (found := layer(name)) is not None), None)
        for setting, name in FLAG_OF.items()
    }


def waiting() -> dict[str, Found]:
    """The settings of the project's file that wait for trust."""
    return {
        str(FLAGS[name].setting): found for file in load() for name, found in file.waiting.items()
    }


def read(path: Path) -> TomlFile:
    """The file's values and lines; an absent file has none, a damaged one says its `trouble`."""
    try:
        content = text_input.read_regular(path, MOST_BYTES)
        text = content.decode("utf-8")
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
        _check_dots(text)
        values = tomllib.loads(text)
    # A plain ValueError: a number of more digits than Python reads.
    except (ValueError, RecursionError) as error:
        return TomlFile(path=path, trouble=f"{path} is not TOML: {error}; nothing in it is used")
    digest = hashlib.sha256(content).hexdigest()
    return TomlFile(path=path, digest=digest, values=values, lines=_lines(text))


# Strings of TOML's four kinds, open ones to their line's or the text's end, and comments. No
# repetition gives back what it took, so that the time is linear.
_OPAQUE = re.compile(
    r'''"""(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5})?+|'''
    r"""'''(?:[^']|'(?!''))*+(?:'{3,5})?+|"""
    r""""(?:[^"\\\n]|\\[^\n])*+"?+|'[^'\n]*+'?+|#[^\n]*+""",
    re.DOTALL,
)


def _check_dots(text: str) -> None:
    rest = _OPAQUE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(rest.split("\n"), 1):
        if line.count(".") > MOST_DOTS:
            raise ValueError(f"line {number} has more than {MOST_DOTS} dots outside of strings")


def settings(file: TomlFile, own: Settings | None = None) -> Settings:
    """What the file sets; a project's beside the user's `own`, None: it is the user's."""
    values: dict[str, Found] = {}
    waits: dict[str, Found] = {}
    warnings = [] if file.trouble is None else [file.trouble]
    trusted = own is None or trust.is_trusted(file.path, file.digest)
    for name, value in _rows(file, warnings):
        asks = not trusted and PROJECT_RULES[name] is Rule.ASK
        try:
            (waits if asks else values)[FLAG_OF[name]] = _found(file, name, value, own)
        except UsageError as error:
            warnings.append(f"{file.where(name)}: {told(error)}; this line is not used")
    return Settings(path=file.path, values=values, waiting=waits, warnings=tuple(warnings))


def _rows(file: TomlFile, warnings: list[str]) -> Iterator[tuple[str, Any]]:
    """The known settings of the file, `kv.budget` and its value; `warnings` gets the others."""
    for section, rows in file.values.items():
        if section not in SECTIONS:
            known = ", ".join(f"[{name}]" for name in SECTIONS)
            warnings.append(f"{file.where(section)}: there is no section {section}; known: {known}")
        elif not is_object(rows):
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


def _found(file: TomlFile, name: str, value: Any, own: Settings | None) -> Found:
    """The value as the flag reads it. Raises `UsageError`, also for what is not a project's."""
    if own is not None and PROJECT_RULES[name] is Rule.NEVER:
        raise UsageError(
            f"{name} counts in {user_path()} only, because a project's file comes from others"
        )
    flag = FLAGS[FLAG_OF[name]]
    texts = value if flag.repeats and is_array(value) else [value]
    read_values = [_read(file, name, one) for one in texts]
    found = Found(value=read_values if flag.repeats else read_values[0], origin=file.where(name))
    if own is not None and PROJECT_RULES[name] is Rule.NARROW:
        _check_narrows(name, found, own.values.get(FLAG_OF[name]))
    return found


def _check_narrows(name: str, found: Found, limit: Found | None) -> None:
    """Raises `UsageError` for a project's value beyond the one of the user's own file."""
    if limit is None:
        return
    (unit, reach), (own_unit, own_reach) = _reach(name, found.value), _reach(name, limit.value)
    if unit != own_unit or reach > own_reach:
        raise UsageError(
            f"{name} may only narrow what {limit.origin} says ({_shown(limit.value)}), and "
            f"{_shown(found.value)} "
            + ("is of another unit" if unit != own_unit else "goes beyond it")
        )


def _reach(name: str, value: Any) -> tuple[str, float]:
    """What a value of a setting that may only narrow counts, and how much it allows."""
    if isinstance(value, bool):
        return "switch", not value
    if FLAGS[FLAG_OF[name]].metavar != "SIZE":
        return "number", math.inf if value in (options.UNTIL_FULL, AUTO) else value
    if value == "0":
        return "num_bytes", 0
    amounts = asdict(parse_budget(value)).items()
    return next((unit, amount) for unit, amount in amounts if amount is not None)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(file: TomlFile, name: str, value: Any) -> Any:
    flag = FLAGS[FLAG_OF[name]]
    if flag.switch != isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{name} needs {'true or false' if flag.switch else 'text or a number'}")
    try:
        text = str(value)
    except ValueError:
        raise UsageError(f"{name} has more digits than any number needs") from None
    if text.startswith(("./", "../")):
        # Of the file's folder, wherever below it the command runs.
        text = str(file.path.parent / text)
    read_value = layers.read_value(FLAG_OF[name], text, name)
    options.check(FLAG_OF[name], read_value)
    return read_value


def _lines(text: str) -> dict[str, int]:
    """The first line of each section and key, by dotted name."""
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
    """A dotted name without the quotes TOML allows around its parts."""
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
