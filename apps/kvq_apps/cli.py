"""`kvq`: finds the command, imports only its module, and turns errors into exit codes.

Exit codes: 0 success, 2 wrong usage or input, 1 a fault of kvq, 130 Ctrl-C, 141 a closed pipe.
"""

import errno
import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from importlib import import_module
from io import FileIO, TextIOWrapper
from typing import Any

from kvq import __version__
from kvq.errors import KvqError, UsageError, argument
from kvq.settings import (
    assume_yes,
    encode_in_one_thread,
    environment,
    environment_name,
    stay_offline,
)
from kvq_apps.settings import flags, other_programs, sources
from kvq_apps.settings.flag_values import AUTO
from kvq_apps.settings.parsers import Parser, PrintAllFlags
from kvq_apps.terminal import output
from kvq_apps.terminal.interrupt import INTERRUPTED, noted_interrupts

COMMANDS = {
    "pull": ("kvq_apps.commands.pull", "fetch a model by its name"),
    "models": ("kvq_apps.commands.models", "list the models that are here, delete one"),
    "export": ("kvq_apps.commands.export", "turn a Hugging Face checkpoint into a bundle"),
    "run": ("kvq_apps.commands.run", "continue a prompt"),
    "batch": ("kvq_apps.commands.batch", "answer a file of prompts"),
    "embed": ("kvq_apps.commands.embed", "make vectors of texts, for search"),
    "chat": ("kvq_apps.commands.chat", "talk to a model in the terminal"),
    "complete": ("kvq_apps.commands.complete", "complete code at a place of a file"),
    "lsp": ("kvq_apps.commands.lsp", "complete code in an editor: a language server"),
    "serve": ("kvq_apps.commands.serve", "serve a model to editors and other programs"),
    "eval": ("kvq_apps.commands.eval", "measure quality at a KV setting"),
    "bench": ("kvq_apps.commands.bench", "measure speed, also against other engines"),
    "ngrams": ("kvq_apps.commands.ngrams", "count one's own files, for several drafts at once"),
    "inspect": ("kvq_apps.commands.inspect", "show what a bundle holds"),
    "doctor": ("kvq_apps.commands.doctor", "show what this installation found"),
}

# Packages by the extra that installs them; an error names the extra.
EXTRAS = {
    "apps": ("markdown_it", "pygments", "rich", "starlette", "textual", "uvicorn"),
    "export": ("gguf",),
    "gguf": ("llama_cpp",),
    "mcp": ("mcp",),
    "plot": ("matplotlib",),
    "ray": ("ray",),
    "traces": ("opentelemetry",),
}

SHELLS = ("bash", "zsh", "fish")
PIPE_CLOSED = 141
# A command with more flags has `--help-all`, and its `--help` shows the common ones.
MOST_FLAGS = 18
# How the system, its loader, Python or a library say that there is no memory left.
_UNMAPPED = re.compile(
    r"failed to map segment|[Cc]annot allocate memory|can't start new thread|"
    r"error return without exception set|returned NULL without setting an exception"
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PrintVersion(Action):
    """Prints the version and ends."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        output.print_data(f"kvq {__version__}")
        parser.exit()


class PrintCompletion(Action):
    """Prints the completion script of a shell and ends."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, *_: Any) -> None:
        from kvq_apps.settings.shell_completion import SCRIPTS

        output.print_data(SCRIPTS[values])
        parser.exit()


class PrintOffers(Action):
    """Prints what a shell offers at the end of a line, one word a line, and ends."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, *_: Any) -> None:
        from kvq_apps.settings.shell_completion import offers

        summaries = {name: summary for name, (_, summary) in COMMANDS.items()}
        for row in offers(values, build_parser, summaries):
            output.print_data(row)
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    with noted_interrupts() as interrupted:
        return _run(sys.argv[1:] if argv is None else argv, interrupted)


def _run(argv: list[str], interrupted: Callable[[], bool]) -> int:
    _make_streams_lenient()
    encode_in_one_thread()
    try:
        arguments = parse(argv)
        _set_up_logging(debug=arguments.debug)
        if getattr(arguments, "offline", False):
            stay_offline()
        if getattr(arguments, "yes", False):
            assume_yes()
        if getattr(arguments, "threads", None) == AUTO:
            from kvq_apps.bench.tune import threads_that_pay

            arguments.threads = threads_that_pay(output.print_note)
        with _explain_missing_extras():
            return arguments.run(arguments)
    except KeyboardInterrupt:
        output.print_note("")
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return PIPE_CLOSED
    except Exception as error:  # noqa: BLE001  the one place that turns our faults into exit code 1
        if _is_switch_on("debug", argv):
            import traceback

            output.print_note(traceback.format_exc(), end="")
        return INTERRUPTED if interrupted() else _report(_explain(error), argv)


def _explain(error: Exception) -> Exception:
    """Turns errors of a full disk or a full memory into a `UsageError` that says so."""
    if isinstance(error, MemoryError) or _UNMAPPED.search(str(error)):
        # The frames of the error hold memory, and the report needs some.
        error.__traceback__ = error.__context__ = None
        return UsageError(
            f"there is not enough memory for this ({str(error) or 'none is left'}); close other "
            "programs, raise the limit (`ulimit -v`), or use a smaller model, "
            f"{argument('--ctx-size')} or {argument('--kv-budget')}"
        )
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return error
    try:
        sys.stdout.flush()
    except OSError:
        _forget_output()
    where = f" to {error.filename}" if error.filename else ""
    return UsageError(f"cannot write{where}: {error.strerror}")


def _forget_output() -> None:
    """Drops the output that is still buffered, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _explain_missing_extras() -> Generator[None]:
    """Turns the import error of an optional package into one that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        raise UsageError(
            f'this needs {package}; install it with `pip install "kvq-runtime[{extra}]"`'
        ) from error


def build_parser(chosen: str | None = None) -> Parser:
    """Returns the parser of `kvq`.

    Only the command `chosen` has its flags, and only its module is imported.
    """
    parser = Parser(
        prog="kvq",
        description="Language models on a quantised KV cache in a hard byte budget.",
        epilog="`kvq COMMAND --help` lists a command's flags, where it has many the common ones; "
        "each has the KVQ_* twin shown there.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-V", "--version", action=PrintVersion, nargs=0, help="print the version of kvq"
    )
    parser.add_argument(
        "--completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print what this shell completes: source <(kvq --completion bash)",
    )
    parser.add_argument("--complete-line", action=PrintOffers, help=SUPPRESS)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False
        )
        if name == chosen:
            module = import_module(module_name)
            module.add_arguments(command)
            flags.add_flags(command, *flags.OUTPUT_FLAGS)
            if sum(bool(action.option_strings) for action in command.actions) > MOST_FLAGS:
                command.hidden = flags.uncommon()
                command.add_argument(
                    "--help-all", action=PrintAllFlags, nargs=0, help="show all flags and exit"
                )
            command.set_defaults(run=module.run)
            parser.command = command
        else:
            command.set_defaults(run=SUPPRESS)
    return parser


def parse(argv: list[str]) -> Namespace:
    """Returns the parsed command line, filled up from the environment and the user's file."""
    argv = other_programs.as_ours(argv)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    if chosen is not None and chosen == argv[0] and chosen not in COMMANDS:
        hint = output.did_you_mean(chosen, COMMANDS)
        raise UsageError(f"there is no command {chosen!r}{hint}; `kvq --help` lists all")
    parser = build_parser(chosen)
    other_programs.check_flags(argv, _flags_of(parser, chosen))
    arguments, unknown = parser.parse_known_args(argv or ["--help"])
    if unknown and unknown[0] in _flags_of(parser, chosen):
        raise UsageError(f"{unknown[0]} stands behind the command: kvq {chosen} {unknown[0]} ...")
    if unknown:
        known = [f"--{name}" for name in flags.FLAGS if hasattr(arguments, flags.field(name))]
        hint = output.did_you_mean(unknown[0].partition("=")[0], known)
        problem = f"is not known to `kvq {chosen}`{hint}"
        if not unknown[0].startswith("-"):
            flag = ", or belongs behind a flag such as --out" if hasattr(arguments, "out") else ""
            problem = f"is a word too many for `kvq {chosen}`{flag}"
        raise UsageError(f"{unknown[0]} {problem}; see `kvq {chosen} --help`")

    from kvq_apps.settings import configuration

    file = configuration.load()
    for warning in file.warnings:
        output.print_note(f"warning: {warning}")
    sources.fill(arguments, sources.environment_source, file.flag_source(chosen))
    return arguments


def _flags_of(parser: Parser, chosen: str | None) -> Collection[str]:
    """Returns every spelling of the flags of the command `chosen`."""
    return parser.command.spellings if parser.command and chosen in COMMANDS else ()


def _report(error: Exception, argv: list[str]) -> int:
    text = error.message_for(_as_typed(argv)) if isinstance(error, KvqError) else str(error)
    try:
        output.print_error(error, text, as_json=_is_switch_on("json", argv))
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError:
        _forget_output()
    return error.exit_code if isinstance(error, KvqError) else 1


def _as_typed(argv: list[str]) -> Callable[[str, str], str]:
    """Returns a function that writes an argument as the user gave it: a synonym or a variable."""
    words = {word.partition("=")[0] for word in argv}

    def name_argument(argument: str, value: str) -> str:
        name = flags.flag_of(argument)
        ours = f"--{name}"
        typed = [*words.intersection(flags.FLAGS[name].synonyms)] if name in flags.FLAGS else []
        if environment(name) is not None:
            typed.append(environment_name(name))
        return f"{typed[0] if typed and ours not in words else ours} {value}".rstrip()

    return name_argument


def _is_switch_on(switch: str, argv: list[str]) -> bool:
    """Says whether a switch is on, also when the arguments could not be parsed."""
    return f"--{switch}" in argv or environment(switch) in ("1", "true", "yes")


def _set_up_logging(*, debug: bool) -> None:
    """Logs warnings and errors to stderr as `kvq: ...`; with `--debug` everything."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            output.print_note(self.format(record))

    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="kvq: %(message)s", force=True,
        handlers=[Notes()],
    )  # fmt: skip


def _make_streams_lenient() -> None:
    """Escapes characters that a stream cannot encode, and drops output to a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            handle = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, TextIOWrapper(FileIO(handle, "w"), "utf-8"))
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
