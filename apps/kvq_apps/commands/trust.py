"""`kvq trust`: lets a project's file name models, and what else it may not without being asked."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from kvq.errors import UsageError
from kvq_apps import configuration, flags, output, trust
from kvq_apps.configuration import Rule


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq trust`."""
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help=f"the project: its {configuration.PROJECT_FILE}, or the nearest one above, is trusted "
        "until it changes (default: this folder)",
    )
    flags.add_flags(
        parser, "list", "revoke", list="list the files that are trusted, and which changed since"
    )


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.list:
        return _list(as_json=arguments.json)
    folder = Path(arguments.folder or ".").expanduser().resolve()
    found = configuration.project_path(folder)
    if arguments.revoke:
        path = found or folder / configuration.PROJECT_FILE
        was = trust.revoke(path)
        _say({"path": str(path), "trusted": False}, as_json=arguments.json)
        output.print_note(f"{path} is no longer trusted" if was else f"{path} was not trusted")
        return 0
    if found is None:
        raise UsageError(
            f"there is no {configuration.PROJECT_FILE} in {folder} or above it; give the folder of "
            "a project that has one"
        )
    return _trust(found, as_json=arguments.json)


def _trust(path: Path, *, as_json: bool) -> int:
    file = configuration.read(path)
    if file.trouble is not None:
        raise UsageError(file.trouble)
    trust.trust(path, file.digest)
    allowed = {
        name: file.values[section][key]
        for name, rule in configuration.PROJECT_RULES.items()
        for section, _, key in [name.partition(".")]
        if rule is Rule.ASK
        and isinstance(file.values.get(section), dict)
        and key in file.values[section]
    }
    _say({"path": str(path), "trusted": True, "settings": allowed}, as_json=as_json)
    shown = ", ".join(f"{name} = {value}" for name, value in allowed.items())
    output.print_note(f"{path} is trusted until it changes: {shown or 'it has nothing to ask for'}")
    return 0


def _say(report: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        output.print_json(report)


def _list(*, as_json: bool) -> int:
    rows = [{"path": note.path, "state": _state(note)} for note in trust.notes()]
    if as_json:
        output.print_json({"projects": rows})
    elif rows:
        output.print_table((row["path"], row["state"]) for row in rows)
    else:
        output.print_note("no project's file is trusted yet: kvq trust FOLDER")
    return 0


def _state(note: trust.Note) -> str:
    path = Path(note.path)
    if not path.is_file():
        return "gone"
    return "trusted" if configuration.read(path).digest == note.digest else "changed since"
