"""`kvq pull`: fetch a model by its name and make a bundle of it."""

from argparse import ArgumentParser, Namespace

from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps import flags, output


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq pull`."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a name that --list shows, a hub id such as Qwen/Qwen3-0.6B, "
        "hf.co/OWNER/REPOSITORY:TYPE for a GGUF file of the hub, or a path",
    )
    flags.add_flags(
        parser, "list", "names", "force", "offline",
        list="list the catalogue, and models that Ollama, LM Studio and the hub's cache have here",
        names="print the names that can be pulled, one a line",
        force="pull again, and replace what is here under the name",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.names:
        return _print_names(as_json=arguments.json)
    if arguments.list:
        return _list(as_json=arguments.json)
    if not arguments.source:
        raise UsageError("SOURCE is missing; `kvq pull --list` shows what has a name")

    from kvq_apps.pulling.pull import pull
    from kvq_apps.pulling.wanted import wanted

    asked = wanted(arguments.source)
    bundle = pull(asked, anew=arguments.force)
    num_bytes = sum(file.num_bytes for file in bundle.manifest.files.values())
    report = {
        "name": asked.name,
        "path": str(bundle.path),
        "bytes": num_bytes,
    }
    if arguments.json:
        output.print_json(report)
    else:
        output.print_note(
            f"{asked.name} takes {format_bytes(num_bytes)} in {bundle.path}; try: "
            f'kvq run -m {asked.name} --chat "What is the capital of France?"'
        )
    return 0


def _print_names(*, as_json: bool) -> int:
    from kvq_apps.pulling.wanted import names

    found = list(dict.fromkeys(names()))
    if as_json:
        output.print_json({"names": found})
    else:
        output.print_data("\n".join(found))
    return 0


def _list(*, as_json: bool) -> int:
    from dataclasses import asdict

    from kvq_apps.pulling.pulled import pulled
    from kvq_apps.pulling.stores import found_models
    from kvq_models.catalogue import catalogue

    elsewhere = found_models()
    models = [asdict(one) | {"here": pulled(one.name) is not None} for one in catalogue().values()]
    if as_json:
        output.print_json({"models": models, "found": [asdict(one) for one in elsewhere]})
        return 0
    output.print_table(
        (
            (row["name"], row["parameters"], row["license"], "yes" if row["here"] else "no",
             row["good_for"])
            for row in models
        ),
        header=("name", "parameters", "licence", "here", "good for"),
    )  # fmt: skip
    if elsewhere:
        output.print_data("")
        output.print_table(
            ((one.name, format_bytes(one.num_bytes), one.program) for one in elsewhere),
            header=("found here", "bytes", "left by"),
        )
    return 0
