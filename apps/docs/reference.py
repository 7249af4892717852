"""The pages of the reference, made from the code when the site is built; a hook of mkdocs.

No page of them is a file. Each function of `PAGES` returns the Markdown of one page.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from inspect import cleandoc, getmembers, isclass, signature
from pathlib import Path
from typing import Any, get_args

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import kvq
from kvq import settings
from kvq.policies import POLICIES
from kvq.selectors import SELECTORS
from kvq_apps import cli
from kvq_apps.chat.commands import COMMANDS
from kvq_apps.chat.keys import KEYS, key_name
from kvq_apps.settings.configuration import FLAG_OF
from kvq_apps.settings.flag_values import with_component_values
from kvq_apps.settings.flags import FLAGS, Flag
from kvq_models.catalogue import catalogue
from kvq_runtime.bundle import manifest
from kvq_specdraft import DRAFTERS, WRITERS

WIDTH = 80
FOLDERS = (
    settings.config_folder,
    settings.data_folder,
    settings.cache_folder,
    settings.state_folder,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference to those that lie in the folder."""
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


def commands_page() -> str:
    """Returns the help of each command with all its flags, a command a section."""
    sections = "".join(
        f"\n## kvq {name}\n\n```text\n{_help_of(name)}```\n" for name in sorted(cli.COMMANDS)
    )
    return (
        "# Commands\n\n`kvq COMMAND --help` prints the same; of a command with many flags, "
        "`--help-all` does. The name in brackets is the environment variable that stands for the "
        f"flag.\n{sections}"
    )


def _help_of(command: str) -> str:
    parser = cli.build_parser(command).command
    assert parser is not None
    parser.hidden = ()
    return parser.format_help()


def settings_page() -> str:
    """Returns every flag with its variable, its key in a settings file and its default."""
    flags = _table(
        ("flag", "environment", "settings file", "default", "meaning"),
        (_flag_row(name, flag) for name, flag in FLAGS.items()),
    )
    sections = dict.fromkeys(name.partition(".")[0] for name in FLAG_OF)
    keys = _table(
        ("section", "keys"), ((f"`[{section}]`", _keys_of(section)) for section in sections)
    )
    folders = _table(
        ("folder", "what it is for"),
        ((_folder_of(folder), _first_line(folder)) for folder in FOLDERS),
    )
    return (
        "# Settings\n\nA value comes from the flag. Without the flag it comes from the environment "
        f"variable, then from a settings file, then it is the default.\n\n{flags}\n\n"
        f"## Settings file\n\n[How to keep settings](../howto/settings.md) shows one.\n\n{keys}\n\n"
        f"## Folders\n\n`kvq doctor --paths` prints where they are.\n\n{folders}\n"
    )


def _flag_row(name: str, flag: Flag) -> tuple[str, ...]:
    choices = ", ".join(flag.choices or ())
    text = with_component_values(flag.help).replace("%(choices)s", choices).replace("%%", "%")
    spellings = " ".join(f"`{word}`" for word in (f"--{name}", *flag.synonyms))
    setting = f"`{flag.setting}`" if flag.setting else ""
    default = with_component_values(flag.default).replace("%%", "%")
    return spellings, f"`{settings.environment_name(name)}`", setting, default, text


def _keys_of(section: str) -> str:
    keys = (name.removeprefix(f"{section}.") for name in FLAG_OF if name.startswith(f"{section}."))
    return ", ".join(f"`{key}`" for key in keys)


def _folder_of(folder: Callable[[], Path]) -> str:
    name = folder.__name__.removesuffix("_folder")
    return f"`$XDG_{name.upper()}_HOME/kvq`"


def models_page() -> str:
    """Returns the catalogue: what `kvq pull NAME` knows."""
    rows = (
        (f"`{model.name}`", model.parameters, model.memory, model.license, model.good_for)
        for model in catalogue().values()
    )
    table = _table(("name", "parameters", "memory", "licence", "good for"), rows)
    return (
        "# Models with a name\n\n`kvq pull NAME` fetches one of them. *Memory* is that of the "
        "weights at 6 bits and of a cache for 8192 tokens. It is computed, not measured.\n\n"
        f"{table}\n"
    )


def chat_page() -> str:
    """Returns every key and every slash command of the chat in the terminal."""
    keys = _table(
        ("key", "what it does", "name under `[keys]`"),
        ((f"`{key_name(row.keys)}`", row.help, f"`{row.name}`") for row in KEYS),
    )
    commands = _table(
        ("command", "what it does", "also"),
        (
            (f"`{row.usage}`", row.help, " ".join(f"`/{name}`" for name in row.synonyms))
            for row in COMMANDS
        ),
    )
    return (
        "# Keys and commands of the chat\n\nF1 and `/help` show them in `kvq chat`. "
        "[The how-to](../howto/chat.md) says what they are good for.\n\n"
        f"## Keys\n\n{keys}\n\n## Commands\n\n{commands}\n"
    )


def python_page() -> str:
    """Returns every public name of `import kvq` with its signature and its docstring."""
    sections = (_public(name, getattr(kvq, name)) for name in dir(kvq) if name[0] != "_")
    return "# Python\n\nThese are the names of `import kvq`.\n\n" + "\n".join(sections)


def _public(name: str, value: Any) -> str:
    members = _methods(value) if isclass(value) and not issubclass(value, Exception) else ()
    methods = "".join(f"\n### {name}.{key}\n{_call(key, call)}" for key, call in members)
    return f"## {name}\n{_call(name, value)}{methods}"


def _methods(kind: type) -> Iterable[tuple[str, Any]]:
    """Returns the public calls and properties that say what they do."""
    members = getmembers(kind, lambda member: callable(member) or isinstance(member, property))
    return ((name, member) for name, member in members if name[0] != "_" and member.__doc__)


def _call(name: str, call: Any) -> str:
    shape = "" if isinstance(call, property) else _shape(str(signature(call)))
    return f"\n```python\n{name}{shape}\n```\n\n{_markdown(call.__doc__ or '')}\n"


def _shape(text: str) -> str:
    """Returns a signature as a caller reads it; a long one has a line for each argument."""
    shape = re.sub(r"^\((self|cls)(, )?", "(", _short_names(text))
    return (
        shape if len(shape) < WIDTH else re.sub(r"(^\(|, (?=\*{0,2}\w*[:,=]))", "\\1\n    ", shape)
    )


def _short_names(types: str) -> str:
    """Returns types without their modules, and functions by their names."""
    text = re.sub(r"<function (?:\w+\.)*([\w<>]+) at 0x\w+>", r"\1", types)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)
    arrays = r"numpy\.ndarray\[tuple\[Any, \.\.\.\], numpy\.dtype\[numpy\.(\w+)\]\]"
    return re.sub(arrays, r"NDArray[\1]", text)


def methods_page() -> str:
    """Returns the tables of what is chosen by a name, with the options of each."""
    tables: Mapping[str, tuple[str, Mapping[str, str]]] = {
        "Policies": ("`--kv-policy` says what gives way when the budget is full.", POLICIES),
        "Selectors": ("`--kv-read` says what a step reads of the cache.", SELECTORS),
        "Drafters": ("`--draft` says who guesses tokens that the model checks.", DRAFTERS),
        "Writers": ("`--drafts-method` says how several suggestions are written.", WRITERS),
    }
    sections = "\n".join(
        f"## {title}\n\n{text}\n\n{_table(('name', 'what it does', 'options'), _named(table))}\n"
        for title, (text, table) in tables.items()
    )
    return f"# Policies and drafters\n\nOptions follow the name: `h2o:recent=0.5`.\n\n{sections}"


def _named(table: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    for name, place in table.items():
        module, _, attribute = place.partition(":")
        kind = getattr(import_module(module), attribute)
        text = f"{_first_line(import_module(module))} {_first_line(kind)}"
        yield f"`{name}`", text, ", ".join(map(_option, _options(kind)))


def _options(kind: type) -> Iterable[Field[Any]]:
    return (field for field in fields(kind) if field.init) if is_dataclass(kind) else ()


def _option(field: Field[Any]) -> str:
    return f"`{field.name}`" if field.default is MISSING else f"`{field.name}={field.default}`"


def bundle_page() -> str:
    """Returns the format of a bundle: its files, and the fields of its manifest."""
    names = "\n".join(f"- `{name}`" for name in manifest.BUNDLE_FILES)
    kinds = "\n\n".join(
        f"## {kind.__name__}\n\n{_markdown(kind.__doc__ or '')}\n\n{_fields(kind)}"
        for kind in (manifest.Manifest, manifest.WeightInfo, manifest.GgufInfo, manifest.FileInfo)
    )
    return (
        f"# Bundles\n\nA bundle is the folder that an export writes. This kvq writes version "
        f"{manifest.VERSION} and reads {', '.join(map(str, manifest.READ_VERSIONS))}. Its files "
        f"may be these; the first one, the *manifest*, describes the others:\n\n{names}\n\n"
        f"{kinds}\n"
    )


def _fields(kind: type) -> str:
    rows = ((f"`{field.name}`", f"`{_type_of(field)}`") for field in fields(kind))
    return _table(("field", "type"), rows)


def _type_of(field: Field[Any]) -> str:
    kind: Any = field.type
    return kind.__name__ if isclass(kind) and not get_args(kind) else _short_names(str(kind))


def _first_line(documented: Any) -> str:
    return cleandoc(documented.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _markdown(docstring: str) -> str:
    """Returns a docstring as Markdown: `Args:` and its kin become lists."""
    text = re.sub(
        r"^(Args|Attributes|Returns|Raises|Yields):$",
        r"\n**\1**\n",
        cleandoc(docstring),
        flags=re.M,
    )
    text = re.sub(r"^    (\*{0,2}\w+)(?: \([^)]*\))?: ", r"- `\1`: ", text, flags=re.M)
    return re.sub(r"^    (?=\S)", "", text, flags=re.M).replace("<", "&lt;")


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = tuple(header)
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/commands.md": commands_page,
    "reference/settings.md": settings_page,
    "reference/models.md": models_page,
    "reference/chat.md": chat_page,
    "reference/python.md": python_page,
    "reference/methods.md": methods_page,
    "reference/bundle.md": bundle_page,
}
