"""`kvq --completion SHELL`: what bash, zsh and fish complete, written from the parsers themselves.

Print it into the shell's configuration: `source <(kvq --completion bash)`.
"""

import shlex
from argparse import PARSER, Action, ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvq_apps.flags import FLAGS

# What a word is called in the help, and the command that prints what it may be, one a line.
MODEL = "MODEL"
LISTED = {
    MODEL: "kvq inspect --names 2>/dev/null",
    "SOURCE": "kvq pull --names 2>/dev/null",
    "rm MODEL": "echo rm; kvq inspect --names 2>/dev/null",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flag:
    """One flag as a shell sees it; `value` is None for a switch, else what it is called.

    Its value is one of `choices`, or else may be one of those it `suggests`.
    """

    names: tuple[str, ...]
    help: str
    value: str | None
    choices: tuple[str, ...]
    suggests: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """What is offered for its value."""
        return self.choices or self.suggests

    @property
    def offered(self) -> bool:
        """Whether anything but files is."""
        return bool(self.words) or self.value == MODEL


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    name: str
    help: str
    flags: tuple[_Flag, ...]
    lists: str | None = None  # of LISTED, what its words may be


def script(shell: str, parsers: Mapping[str, ArgumentParser]) -> str:
    """The script for `shell`; `parsers` holds each command's whole parser of `kvq`, by name."""
    commands = [_command(name, parser) for name, parser in parsers.items()]
    top = _flags(next(iter(parsers.values())))
    return SHELLS[shell](commands, top)


def _command(name: str, parser: ArgumentParser) -> _Command:
    # What argparse keeps of the commands is of a class of its own.
    commands: Any = next(action for action in parser._actions if action.nargs == PARSER)
    summary = next(str(one.help) for one in commands._choices_actions if one.dest == name)
    chosen: ArgumentParser = commands.choices[name]
    words = [str(one.metavar).strip("[]") for one in chosen._actions if not one.option_strings]
    lists = next((word for word in words if word in LISTED), None)
    return _Command(name=name, help=summary, flags=_flags(chosen), lists=lists)


def _flags(parser: ArgumentParser) -> tuple[_Flag, ...]:
    return tuple(
        _Flag(
            names=tuple(action.option_strings),
            help=_help(parser, action),
            value=_value(action),
            choices=tuple(map(str, action.choices or ())),
            suggests=_suggested(action.option_strings[0]),
        )
        for action in parser._actions
        if action.option_strings and action.help != "==SUPPRESS=="
    )


def _suggested(name: str) -> tuple[str, ...]:
    flag = FLAGS.get(name.lstrip("-"))
    return () if flag is None else tuple(flag.suggests)


def _help(parser: ArgumentParser, action: Action) -> str:
    if "--help" in action.option_strings:
        return "show this help"
    return " ".join(parser._get_formatter()._expand_help(action).split())


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
            # As typed: the shell's own words end at each colon of 4:2 and at each = of --kv=4:2.
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
    return f'"$({LISTED[MODEL]})"' if flag.value == MODEL else shlex.quote(_words(flag))


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
    """The function that offers what `word` of LISTED may be, and files."""
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
        value = f":{_zsh_text(flag.value or 'value')}:({_zsh_text(_words(flag))})"
    elif flag.value == MODEL:
        value = f":{MODEL}:{_zsh_function(MODEL)}"
    elif flag.value is not None:
        value = f":{_zsh_text(flag.value)}:_files"
    for name in flag.names:
        yield f"{name}[{_zsh_text(flag.help)}]{value}"


def _zsh_text(text: str) -> str:
    """`text` without what `_arguments` reads as its own signs."""
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
        words.append(f"-x -a {_fish_text(_words(flag))}")
    elif flag.value == MODEL:
        words.append(f"-r -a {_fish_text(f'({LISTED[MODEL]})')}")
    elif flag.value is not None:
        words.append("-r")
    return " ".join([*words, f"-d {_fish_text(flag.help)}"])


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _names(flags: tuple[_Flag, ...]) -> str:
    return " ".join(name for flag in flags for name in flag.names)


def _words(flag: _Flag) -> str:
    return " ".join(flag.words)


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
