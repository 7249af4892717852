"""What shells complete: `kvq --completion SHELL` prints a function that asks `--complete-line`.

A shell's configuration loads it with `source <(kvq --completion bash)`.
"""

import re
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from kvq_apps.settings.flags import FLAGS
from kvq_apps.settings.parsers import Parser

# Each asks with the line up to the cursor, and offers files where nothing comes back.
SCRIPTS = {
    # The shell splits 4:2 at the colon and --kv=4:2 at the =, and replaces what follows these.
    "bash": r"""_kvq() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\n'; local word="${line##*[[:space:]]}"
    COMPREPLY=($(kvq --complete-line "$line" 2>/dev/null | cut -f 1))
    COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[:=]}"}"}")
}
complete -o default -F _kvq kvq""",
    "zsh": r"""#compdef kvq
_kvq() {
    local -a offers=("${(@f)$(kvq --complete-line "$words[1,CURRENT-1] $PREFIX" 2>/dev/null)}")
    if [[ -z $offers ]]; then _files; return; fi
    offers=("${(@)offers//:/\\:}"); offers=("${(@)offers/$'\t'/:}"); _describe kvq offers
}
if [[ "${funcstack[1]}" == _kvq ]]; then _kvq "$@"; else compdef _kvq kvq; fi""",
    "fish": r"""function __kvq_offers
    set -l offers (kvq --complete-line (commandline -cp) 2>/dev/null)
    test -n "$offers"; and printf '%s\n' $offers; or __fish_complete_path (commandline -ct)
end
complete -c kvq -f -a '(__kvq_offers)'""",
}


def offers(
    line: str, build_parser: Callable[[str | None], Parser], summaries: Mapping[str, str]
) -> Iterable[str]:
    """Returns what the last word of `line` may become: rows of a word, a tab, what it means.

    Args:
        line: The command line up to the cursor.
        build_parser: Returns the parser of `kvq` with the flags of a command.
        summaries: One line about each command, by its name.
    """
    before, _, current = line.rpartition(" ")
    typed = before.split() or [""]
    command = next((word for word in typed[1:] if not word.startswith("-")), None)
    parser = build_parser(command)
    actions = [action for action in (parser.command or parser).actions if action.help != SUPPRESS]
    name, equals, _ = current.partition("=") if current.startswith("--") else ("", "", "")
    flag, assigned = (name, f"{name}=") if equals else (typed[-1], "")
    valued = [action for action in actions if flag in action.option_strings and action.nargs != 0]
    if valued:
        words = {f"{assigned}{value}": "" for value in _values(valued[0])}
    elif current.startswith("-"):
        words = {name: _help(action) for action in actions for name in action.option_strings}
    elif parser.command is None:
        words = summaries
    else:
        names = (_names(action) for action in actions if not action.option_strings)
        words = dict.fromkeys(chain.from_iterable(names), "")
    rows = (f"{word}\t{help}".rstrip() for word, help in words.items())
    return (row for row in rows if row.startswith(current))


def _values(action: Action) -> Iterable[object]:
    """Returns what the value of a flag may be; others may be possible."""
    flag = FLAGS.get(action.option_strings[0].lstrip("-"))
    return action.choices or (flag and flag.suggests) or _names(action)


def _names(action: Action) -> Iterable[str]:
    """Returns the names of models that a word or a flag's value may be, by its metavar."""
    match action.metavar:
        case "MODEL" | "rm|fit MODEL":
            from kvq_apps.names.model_path import known_names
            from kvq_models.catalogue import installed_names

            verbs = () if action.metavar == "MODEL" else ("rm", "fit")
            return (*verbs, *installed_names(), *known_names())
        case "SOURCE":
            from kvq_apps.names.pull_request import names

            return names()
        case _:
            return ()


def _help(action: Action) -> str:
    """Returns the help without what follows from other modules, whose import takes time."""
    text = re.split(r" \(default: | \[KVQ_|:? \{|:? %\(", action.help or "")[0]
    return " ".join(text.replace("%%", "%").split())
