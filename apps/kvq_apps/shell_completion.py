"""`kvq --completion SHELL`: what bash, zsh and fish complete, written from the parsers themselves.

Print it into the shell's configuration: `source <(kvq --completion bash)`.
"""

import shlex
from argparse import Action, ArgumentParser, _HelpAction, _SubParsersAction
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flag:
    """One flag as a shell sees it; `value` is None for a switch, else what it is called."""

    names: tuple[str, ...]
    help: str
    value: str | None
    choices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    name: str
    help: str
    flags: tuple[_Flag, ...]


def script(shell: str, parsers: Mapping[str, ArgumentParser]) -> str:
    """The script for `shell`; `parsers` holds each command's whole parser of `kvq`, by name."""
    commands = [_command(name, parser) for name, parser in parsers.items()]
    top = _flags(next(iter(parsers.values())))
    return SHELLS[shell](commands, top)


def _command(name: str, parser: ArgumentParser) -> _Command:
    actions = (action for action in parser._actions if isinstance(action, _SubParsersAction))
    commands = next(actions)
    summary = next(str(one.help) for one in commands._choices_actions if one.dest == name)
    return _Command(name=name, help=summary, flags=_flags(commands.choices[name]))


def _flags(parser: ArgumentParser) -> tuple[_Flag, ...]:
    return tuple(
        _Flag(
            names=tuple(action.option_strings),
            help=_help(parser, action),
            value=_value(action),
            choices=tuple(map(str, action.choices or ())),
        )
        for action in parser._actions
        if action.option_strings and action.help != "==SUPPRESS=="
    )


def _help(parser: ArgumentParser, action: Action) -> str:
    if isinstance(action, _HelpAction):
        return "show this help"
    return " ".join(parser._get_formatter()._expand_help(action).split())


def _value(action: Action) -> str | None:
    if action.nargs == 0:
        return None
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


def _bash(commands: list[_Command], top: tuple[_Flag, ...]) -> str:
    rows = [
        f"        {command.name}) flags={shlex.quote(_names(command.flags))} ;;"
        for command in commands
    ]
    choices = [
        f"        {shlex.quote(f'{command.name} {name}')}) words={shlex.quote(_words(flag))} ;;"
        for command in [*commands, _Command(name="", help="", flags=top)]
        for flag in command.flags
        for name in flag.names
        if flag.choices
    ]
    values = [
        f"        {'|'.join(shlex.quote(f'{command.name} {name}') for name in names)}) return ;;"
        for command in commands
        if (names := [name for flag in command.flags if flag.value and not flag.choices
                      for name in flag.names])
    ]  # fmt: skip
    names = " ".join(command.name for command in commands)
    return "\n".join(
        [
            "# What `kvq --completion bash` printed; empty answers are completed as files.",
            "_kvq() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
            '    local command="" flags="" words="" word',
            '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
            '        case "$word" in -*) ;; *) command="$word"; break ;; esac',
            "    done",
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
            "}",
            "complete -o default -F _kvq kvq",
        ]
    )


def _zsh(commands: list[_Command], top: tuple[_Flag, ...]) -> str:
    def arguments(flags: tuple[_Flag, ...], *more: str) -> str:
        specs = [shlex.quote(spec) for flag in flags for spec in _zsh_specs(flag)]
        return " \\\n            ".join(["_arguments", *specs, *map(shlex.quote, more)])

    described = " ".join(
        shlex.quote(f"{command.name}:{_zsh_text(command.help)}") for command in commands
    )
    rows = [
        f"        {command.name})\n            {arguments(command.flags, '*:file:_files')} ;;"
        for command in commands
    ]
    return "\n".join(
        [
            "#compdef kvq",
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


def _zsh_specs(flag: _Flag) -> Iterator[str]:
    value = ""
    if flag.choices:
        value = f":{_zsh_text(flag.value or 'value')}:({' '.join(flag.choices)})"
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
    return "\n".join(lines)


def _fish_flag(condition: str, flag: _Flag) -> str:
    words = [f"complete -c kvq -n {condition}"]
    for name in flag.names:
        kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
        words.append(f"{kind} {name.lstrip('-')}")
    if flag.choices:
        words.append(f"-x -a {_fish_text(_words(flag))}")
    elif flag.value is not None:
        words.append("-r")
    return " ".join([*words, f"-d {_fish_text(flag.help)}"])


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _names(flags: tuple[_Flag, ...]) -> str:
    return " ".join(name for flag in flags for name in flag.names)


def _words(flag: _Flag) -> str:
    return " ".join(flag.choices)


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
