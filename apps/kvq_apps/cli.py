"""`kvq`: finds the command, loads only its file, and turns what went wrong into an exit code.

Exit codes: 0 ok, 2 usage or bad input, 1 our fault, 130 ended by Ctrl-C, 141 reader went away.
"""

import errno
import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from io import FileIO, TextIOWrapper
from typing import Any, NoReturn

from kvq import __version__
from kvq.errors import KvqError, UsageError, argument
from kvq.settings import (
    agree,
    encode_in_one_thread,
    environment,
    environment_name,
    stay_offline,
)
from kvq_apps import flags, layers, output
from kvq_apps.flag_values import AUTO
from kvq_apps.interrupt import INTERRUPTED, noted_interrupts
from kvq_apps.owners import HelpText

COMMANDS = {
    "pull": ("kvq_apps.commands.pull", "fetch a model by its name"),
    "models": ("kvq_apps.commands.models", "list the models that are here, delete one"),
    "export": ("kvq_apps.commands.export", "turn a Hugging Face checkpoint into a bundle"),
    "run": ("kvq_apps.commands.run", "continue a prompt"),
    "chat": ("kvq_apps.commands.chat", "talk to a model in the terminal"),
    "complete": ("kvq_apps.commands.complete", "complete code at a place of a file"),
    "lsp": ("kvq_apps.commands.lsp", "complete code in an editor: a language server"),
    "serve": ("kvq_apps.commands.serve", "serve a model to editors and other programs"),
    "eval": ("kvq_apps.commands.eval", "measure quality at a KV setting"),
    "bench": ("kvq_apps.commands.bench", "measure speed, also against other engines"),
    "ngrams": ("kvq_apps.commands.ngrams", "count one's own files, for several drafts at once"),
    "inspect": ("kvq_apps.commands.inspect", "show what a bundle holds"),
    "trust": ("kvq_apps.commands.trust", "let a project's settings name models and prompts"),
    "doctor": ("kvq_apps.commands.doctor", "show what this installation found"),
}

# Packages that come with an extra; a command that lacks one says which.
EXTRAS = {
    "apps": ("markdown_it", "pygments", "rich", "starlette", "textual", "uvicorn"),
    "export": ("gguf",),
    "gguf": ("llama_cpp",),
    "plot": ("matplotlib",),
    "ray": ("ray",),
}

SHELLS = ("bash", "zsh", "fish")
PIPE_CLOSED = 141
# How the system, its loader, and Python or a library that was refused some say that memory had no
# room.
_UNMAPPED = re.compile(
    r"failed to map segment|[Cc]annot allocate memory|can't start new thread|"
    r"error return without exception set|returned NULL without setting an exception"
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Parser(ArgumentParser):
    """An argument parser whose complaints are `UsageError`s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpText, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


class PrintCompletion(Action):
    """Prints what a shell completes, and ends."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, *_: Any) -> None:
        from kvq_apps.shell_completion import script

        output.print_data(script(values, {name: build_parser(name) for name in COMMANDS}))
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    with noted_interrupts() as interrupted:
        return _run(sys.argv[1:] if argv is None else argv, interrupted)


def _run(argv: list[str], interrupted: Callable[[], bool]) -> int:
    _lenient_streams()
    encode_in_one_thread()
    try:
        arguments = parse(argv)
        _set_up_logging(debug=arguments.debug)
        if getattr(arguments, "offline", False):
            stay_offline()
        if getattr(arguments, "yes", False):
            agree()
        if getattr(arguments, "threads", None) == AUTO:
            arguments.threads = _threads_that_pay()
        with _extras_named():
            return arguments.run(arguments)
    except KeyboardInterrupt:
        output.print_note("")
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return PIPE_CLOSED
    except Exception as error:  # noqa: BLE001  the one place that turns our faults into exit code 1
        _debug_traceback(argv)
        return INTERRUPTED if interrupted() else _report(_explained(error), argv)


def _threads_that_pay() -> int:
    """What `--threads auto` stands for on this machine."""
    from kvq_apps.bench.tune import threads_that_pay

    return threads_that_pay(output.print_note)


def _explained(error: Exception) -> Exception:
    """A full disk and a full memory are nobody's fault, and say so."""
    if isinstance(error, MemoryError) or _UNMAPPED.search(str(error)):
        # What failed holds its memory by its frames: to say so takes some, too.
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
    """What is still buffered goes nowhere; the interpreter's last flush must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _extras_named() -> Generator[None]:
    """Turns the absence of an optional package into what to install."""
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


def build_parser(chosen: str | None = None) -> ArgumentParser:
    """The parser of `kvq`; only command `chosen` has its flags, and only its file is imported."""
    parser = Parser(
        prog="kvq",
        description="Language models on a quantised KV cache in a hard byte budget.",
        epilog="`kvq COMMAND --help` lists a command's flags; each has the KVQ_* twin shown there.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"kvq {__version__}")
    parser.add_argument(
        "--completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print what this shell completes: source <(kvq --completion bash)",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False
        )
        if name == chosen:
            module = import_module(module_name)
            module.add_arguments(command)
            flags.add_flags(command, *flags.OUTPUT_FLAGS)
            command.set_defaults(run=module.run)
        else:
            command.set_defaults(run=SUPPRESS)
    return parser


def parse(argv: list[str]) -> Namespace:
    """What a command line says; a wrong one ends the program as argparse does."""
    chosen = next((word for word in argv if not word.startswith("-")), None)
    if chosen is not None and chosen == argv[0] and chosen not in COMMANDS:
        meant = output.did_you_mean(chosen, COMMANDS)
        raise UsageError(f"there is no command {chosen!r}{meant}; `kvq --help` lists all")
    arguments, unknown = build_parser(chosen).parse_known_args(argv or ["--help"])
    if unknown:
        raise UsageError(
            f"{unknown[0]} is not known to `kvq {chosen}`{_nearest(unknown[0], arguments)}; "
            f"see `kvq {chosen} --help`"
        )

    from kvq_apps import configuration

    files = configuration.load()
    for warning in (text for file in files for text in file.warnings):
        output.print_note(f"warning: {warning}")
    untrusted = (file.untrusted(arguments, chosen) for file in files)
    arguments.untrusted = next(filter(None, untrusted), None)
    if arguments.untrusted is not None:
        output.print_note(f"warning: {arguments.untrusted}")
    layers.fill(arguments, layers.environment_layer, *(file.layer(chosen) for file in files))
    return arguments


def _nearest(word: str, arguments: Namespace) -> str:
    """The command's flag that `word` may have meant, as a question, or nothing."""
    known = [f"--{name}" for name in flags.FLAGS if hasattr(arguments, flags.field(name))]
    return output.did_you_mean(word.partition("=")[0], known)


def _report(error: Exception, argv: list[str]) -> int:
    text = error.told(_as_typed(argv)) if isinstance(error, KvqError) else str(error)
    try:
        output.print_error(error, text, as_json=_asked("json", argv))
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError:
        _forget_output()
    return error.exit_code if isinstance(error, KvqError) else 1


def _as_typed(argv: list[str]) -> Callable[[str, str], str]:
    """What to call an argument: its flag as it was typed, or set in the environment, else ours."""
    words = {word.partition("=")[0] for word in argv}

    def called(argument: str, value: str) -> str:
        name = flags.flag_of(argument)
        ours = f"--{name}"
        typed = [*words.intersection(flags.FLAGS[name].synonyms)] if name in flags.FLAGS else []
        if environment(name) is not None:
            typed.append(environment_name(name))
        return f"{typed[0] if typed and ours not in words else ours} {value}".rstrip()

    return called


def _asked(switch: str, argv: list[str]) -> bool:
    """Whether a switch was given, also when the arguments could not be parsed."""
    return f"--{switch}" in argv or environment(switch) in ("1", "true", "yes")


def _debug_traceback(argv: list[str]) -> None:
    if _asked("debug", argv):
        import traceback

        traceback.print_exc()


def _set_up_logging(*, debug: bool) -> None:
    """Warnings and above on stderr as `kvq: ...`; with `--debug` everything."""
    import logging

    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="kvq: %(message)s", force=True
    )


def _lenient_streams() -> None:
    """Text a stream's encoding lacks is escaped; what goes to a closed stream is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            handle = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, TextIOWrapper(FileIO(handle, "w"), "utf-8"))
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
