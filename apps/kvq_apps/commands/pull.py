"""`kvq pull`: fetches a model by its name and makes a bundle of it."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps.settings import flags
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_runtime.bundle.bundle import Bundle


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq pull`."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a name that --list shows, a hub id such as Qwen/Qwen3-0.6B, "
        "hf.co/OWNER/REPOSITORY:TYPE for a GGUF file of the hub, or a path",
    )
    flags.add_flags(
        parser, "list", "force", "yes", "offline",
        list="list the catalogue, and models that Ollama, LM Studio and the hub's cache have here",
        yes="change nothing: a pull that is asked for by name asks nothing",
        force="pull again, and replace what is here under the name",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.list:
        return _list(as_json=arguments.json)
    if not arguments.source:
        raise UsageError("SOURCE is missing; `kvq pull --list` shows what has a name")

    from kvq_apps.names.pull_request import parse_pull_request
    from kvq_apps.names.pulling import pull

    request = parse_pull_request(arguments.source)
    bundle = pull(request, replace=arguments.force)
    num_bytes = sum(file.num_bytes for file in bundle.manifest.files.values())
    report = {
        "name": request.name,
        "path": str(bundle.path),
        "bytes": num_bytes,
    }
    if arguments.json:
        output.print_json(report)
    else:
        output.print_note(
            f"{request.name} is ready and takes {format_bytes(num_bytes)} in {bundle.path}\n"
            f"try: {first_command(bundle, request.name)}"
        )
    return 0


def first_command(bundle: "Bundle", name: str) -> str:
    """Returns a command to try the model with, from the catalogue if the model is in it."""
    from kvq_models.catalogue import FIRST_QUESTION, catalogue

    tokenizer, known = bundle.tokenizer(), catalogue().get(name)
    if tokenizer is None or tokenizer.chat_template is None:
        return f'kvq run -m {name} "Once upon a time"'
    question = FIRST_QUESTION if known is None else known.question
    return f'kvq run -m {name} --chat "{question}"'


def _list(*, as_json: bool) -> int:
    from dataclasses import asdict

    from kvq_apps.names.pull_records import pulled_bundle
    from kvq_apps.names.stores import stored_models
    from kvq_models.catalogue import catalogue

    stored = stored_models()
    models = [
        asdict(model) | {"here": pulled_bundle(model.name) is not None}
        for model in catalogue().values()
    ]
    if as_json:
        output.print_json({"models": models, "found": [asdict(model) for model in stored]})
        return 0
    output.print_table(
        (
            (row["name"], row["parameters"], row["memory"], row["license"],
             "yes" if row["here"] else "no", row["good_for"])
            for row in models
        ),
        header=("name", "parameters", "memory", "licence", "here", "good for"),
    )  # fmt: skip
    if stored:
        output.print_data("")
        output.print_table(
            ((model.name, format_bytes(model.num_bytes), model.program) for model in stored),
            header=("found here", "bytes", "left by"),
        )
    return 0
