"""`kvq --completion SHELL`: writes completion scripts for bash, zsh and fish from the parsers.

A shell's configuration loads one with `source <(kvq --completion bash)`.
"""

import shlex
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvq_apps.settings.flag_values import with_component_values
from kvq_apps.settings.flags import FLAGS
from kvq_apps.settings.parsers import Parser

# The metavar of a word, and the command that prints its possible values, one a line.
MODEL = "MODEL"
LISTED = {
    MODEL: "kvq inspect --names 2>/dev/null",
    "SOURCE": "kvq pull --names 2>/dev/null",
    "rm|fit MODEL": "echo rm; echo fit; kvq inspect --names 2>/dev/null",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flag:
    """Describes a flag for a shell: `value` is the metavar, None for a switch.

    `words` are the values that are offered; others may be possible.
    """

    names: tuple[str, ...]
    help: str
    value: str | None
    words: str

    @property
    def offered(self) -> bool:
        """Says whether anything but files is offered."""
        return bool(self.words) or self.value == MODEL


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    name: str
    help: str
    flags: tuple[_Flag, ...]
    lists: str | None = None  # a key of LISTED for the values of its words


def script(shell: str, parsers: Mapping[str, Parser], summaries: Mapping[str, str]) -> str:
    """Returns the script for `shell`.

    Args:
        shell: One of `SHELLS`.
        parsers: For each command the whole parser of `kvq`, with the flags of that command.
        summaries: One line about each command, by its name.
    """
    commands = [
        _command(name, parser.command, summaries[name])
        for name, parser in parsers.items()
        if parser.command is not None
    ]
    top = _flags(next(iter(parsers.values())))
    return SHELLS[shell](commands, top)


def _command(name: str, parser: Parser, summary: str) -> _Command:
    words = [str(word.metavar).strip("[]") for word in parser.actions if not word.option_strings]
    lists = next((word for word in words if word in LISTED), None)
    return _Command(name=name, help=summary, flags=_flags(parser), lists=lists)


def _flags(parser: Parser) -> tuple[_Flag, ...]:
    return tuple(
        _Flag(
            names=tuple(action.option_strings),
            help=_help(action),
            value=_value(action),
            words=" ".join(map(str, action.choices or _suggested(action.option_strings[0]))),
        )
        for action in parser.actions
        if action.option_strings and action.help != SUPPRESS
    )


def _suggested(name: str) -> Iterable[str]:
    flag = FLAGS.get(name.lstrip("-"))
    return () if flag is None else flag.suggests


def _help(action: Action) -> str:
    if "--help" in action.option_strings:
        return "show this help"
    values = vars(action) | {"choices": ", ".join(map(str, action.choices or ()))}
    return " ".join((with_component_values(action.help or "") % values).split())


def _value(action: Action) -> str | None:
    if action.nargs == 0:
        return None
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


def _bash(commands: list[_Command], top: tuple[_Flag, ...]) -> str:
    rows = [
        f"        {command.name}) flags={shlex.quote(_names(command.flags))}"
        + (f'; words="${{words:-$({LISTED[command.lists]})}}"' if command.lists else "")
        + " ;;"
        for command in commands
    ]
    choices = [
        f"        {shlex.quote(f'{command.name} {name}')}) words={_bash_words(flag)} ;;"
        for command in [*commands, _Command(name="", help="", flags=top)]
        for flag in command.flags
        for name in flag.names
        if flag.offered
    ]
    values = [
        f"        {'|'.join(shlex.quote(f'{command.name} {name}') for name in names)}) return ;;"
        for command in commands
        if (names := [name for flag in command.flags if flag.value and not flag.offered
                      for name in flag.names])
    ]  # fmt: skip
    names = " ".join(command.name for command in commands)
    return "\n".join(
        [
            "# What `kvq --completion bash` printed; empty answers are completed as files.",
            "_kvq() {",
            # The shell splits 4:2 at the colon and --kv=4:2 at the =, so the line is read as typed.
            '    local line="${COMP_LINE:0:COMP_POINT}" command="" flags="" words="" word',
            '    local current="${line##*[[:space:]]}" before; local -a typed',
            '    read -ra typed <<< "${line%"$current"}"; before="${typed[*]: -1}"',
            '    for word in "${typed[@]:1}"; do',
            '        case "$word" in -*) ;; *) command="$word"; break ;; esac',
            "    done",
            '    case "$current" in',
            '        --*=*) before="${current%%=*}"; current="${current#*=}" ;;',
            "    esac",
            "    COMPREPLY=()",
            '    case "$command $before" in',
            *choices,
            *values,
            "    esac",
            '    case "$command" in',
            f'        "") flags={shlex.quote(_names(top))}; words="${{words:-{names}}}" ;;',
            *rows,
            "    esac",
            '    case "$current" in -*) words="$flags" ;; esac',
            '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
            '    COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*:}"}"}")',
            "}",
            "complete -o default -F _kvq kvq",
        ]
    )


def _bash_words(flag: _Flag) -> str:
    return f'"$({LISTED[MODEL]})"' if flag.value == MODEL else shlex.quote(flag.words)


def _zsh(commands: list[_Command], top: tuple[_Flag, ...]) -> str:
    def arguments(flags: tuple[_Flag, ...], *more: str) -> str:
        specs = [shlex.quote(spec) for flag in flags for spec in _zsh_specs(flag)]
        return " \\\n            ".join(["_arguments", *specs, *map(shlex.quote, more)])

    described = " ".join(
        shlex.quote(f"{command.name}:{_zsh_text(command.help)}") for command in commands
    )
    rows = [
        f"        {command.name})\n            "
        + arguments(command.flags, "*:file:" + _zsh_function(command.lists))
        + " ;;"
        for command in commands
    ]
    return "\n".join(
        [
            "#compdef kvq",
            *(line for word in LISTED for line in _zsh_listing(word)),
            "_kvq() {",
            f"    local -a commands=({described})",
            "    if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then",
            "        _describe command commands",
            "        return",
            "    fi",
            "    local command=$words[2]",
            "    if [[ $command == -* ]]; then command=''; else shift words; (( CURRENT-- )); fi",
            "    case $command in",
            f"        '')\n            {arguments(top)} ;;",
            *rows,
            "    esac",
            "}",
            'if [[ "${funcstack[1]}" == _kvq ]]; then _kvq "$@"; else compdef _kvq kvq; fi',
        ]
    )


def _zsh_listing(word: str) -> tuple[str, ...]:
    """Returns a function that offers the values of a word of LISTED, and files."""
    return (
        f"{_zsh_function(word)}() {{",
        f'    local -a names=(${{(f)"$({LISTED[word]})"}})',
        "    _alternative 'models:model:compadd -a names' 'files:file:_files'",
        "}",
    )


def _zsh_function(word: str | None) -> str:
    return "_files" if word is None else f"_kvq_{word.replace(' ', '_').lower()}"


def _zsh_specs(flag: _Flag) -> Iterator[str]:
    value = ""
    if flag.words:
        value = f":{_zsh_text(flag.value or 'value')}:({_zsh_text(flag.words)})"
    elif flag.value == MODEL:
        value = f":{MODEL}:{_zsh_function(MODEL)}"
    elif flag.value is not None:
        value = f":{_zsh_text(flag.value)}:_files"
    for name in flag.names:
        yield f"{name}[{_zsh_text(flag.help)}]{value}"


def _zsh_text(text: str) -> str:
    """Returns `text` without the signs that `_arguments` interprets."""
    return text.replace("\\", "\\\\").replace("[", "(").replace("]", ")").replace(":", "\\:")


def _fish(commands: list[_Command], top: tuple[_Flag, ...]) -> str:
    lines = ["# What `kvq --completion fish` printed."]
    for command in commands:
        lines.append(
            f"complete -c kvq -n __fish_use_subcommand -f -a {command.name} "
            f"-d {_fish_text(command.help)}"
        )
    lines += [_fish_flag("__fish_use_subcommand", flag) for flag in top]
    for command in commands:
        condition = f"'__fish_seen_subcommand_from {command.name}'"
        lines += [_fish_flag(condition, flag) for flag in command.flags]
        if command.lists:
            names = _fish_text(f"({LISTED[command.lists]})")
            lines.append(f"complete -c kvq -n {condition} -a {names}")
    return "\n".join(lines)


def _fish_flag(condition: str, flag: _Flag) -> str:
    words = [f"complete -c kvq -n {condition}"]
    for name in flag.names:
        kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
        words.append(f"{kind} {name.lstrip('-')}")
    if flag.words:
        words.append(f"-x -a {_fish_text(flag.words)}")
    elif flag.value == MODEL:
        words.append(f"-r -a {_fish_text(f'({LISTED[MODEL]})')}")
    elif flag.value is not None:
        words.append("-r")
    return " ".join([*words, f"-d {_fish_text(flag.help)}"])


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _names(flags: tuple[_Flag, ...]) -> str:
    return " ".join(name for flag in flags for name in flag.names)


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
