"""`kvq batch`: answers a file of prompts, here or spread over processes and machines."""

import asyncio
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import DataError, UsageError, argument, reason_of
from kvq.files import path_of
from kvq_apps.settings import flags, options
from kvq_apps.terminal import output, text_input
from kvq_runtime.config import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from kvq_apps.batch import BatchPrompt, LineDefaults, Row
    from kvq_apps.serve.loading import ServeRequest

# Flags that change what an answer says.
_ANSWER_FLAGS = (
    "model", *flags.KV_FLAGS, *flags.PREDICT_FLAGS, *flags.SAMPLING_FLAGS, "ctx-size", "predict",
    "system", "chat", "think", "stop", "no-heal", *flags.CONSTRAINT_FLAGS,
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq batch`."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="[MODEL] FILE.jsonl",
        help="a JSON object a line, with `prompt` or `messages` and any field of the HTTP "
        "reference; a first word before the file is the model",
    )
    flags.add_flags(
        parser, "out",
        out="the answers, one a line, in the prompts' order; a batch that was interrupted goes on",
    )  # fmt: skip
    flags.add_flags(parser, *flags.ENGINE_FLAGS, "sessions")
    flags.add_flags(parser, "ctx-size", "predict", "system", "chat", "think", "stop", "no-heal")
    flags.add_flags(parser, "draft", "draft-model", *flags.CONSTRAINT_FLAGS)
    flags.add_flags(parser.add_argument_group("many machines"), "ray", "replicas", "autoscale")
    flags.add_flags(parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS)
    flags.add_flags(parser.add_argument_group("sampling"), *flags.SAMPLING_FLAGS)


def run(arguments: Namespace) -> int:
    """Runs the command; the exit code is 2 where a line has an error."""
    from kvq_apps.batch import Answers, read_prompts

    prompts, out = _files(arguments)
    request, defaults = _serve_request(arguments), _line_defaults(arguments)
    settings = json.dumps(
        [request.model, options.keywords(arguments, **{name: name for name in _ANSWER_FLAGS}),
         defaults.fields],
        sort_keys=True, default=str,
    )  # fmt: skip
    digests = {prompt.line: prompt.digest for prompt in read_prompts(prompts, settings)}
    if not digests:
        raise DataError(f"{prompts} has no lines; write one JSON object a line")
    answers = Answers(out, digests)
    total, before = len(digests), len(answers)
    with output.ProgressBar() as progress:

        def keep(prompt: "BatchPrompt", row: "Row") -> None:
            answers.add(prompt, row)
            progress(len(answers), total, f"{len(answers)} of {total} lines")

        waiting = (
            prompt for prompt in read_prompts(prompts, settings) if prompt.line not in answers
        )
        try:
            if before < total:
                _answer(arguments, request, defaults, waiting, keep)
        finally:
            answers.close()
    answers.finish()
    report = {"lines": total, "answered": total - before, "failed": answers.failed, "out": str(out)}
    if arguments.json:
        output.print_json(report)
    if answers.failed:
        output.print_note(f"{answers.failed} of {total} lines have an error in {out}")
    return 2 if answers.failed else 0


def _answer(
    arguments: Namespace,
    request: "ServeRequest",
    defaults: "LineDefaults",
    prompts: "Iterator[BatchPrompt]",
    keep: "Callable[[BatchPrompt, Row], None]",
) -> None:
    """Answers `prompts`, here or on Ray."""
    from kvq_apps.batch import answer_all
    from kvq_apps.names.model_path import pull_missing

    pull_missing(request.model)
    if not arguments.ray:
        asyncio.run(answer_all(request, defaults, prompts, keep))
        return
    from kvq_apps.fleet.cluster import connected

    with connected():
        from kvq_apps.fleet import ray_batch

        ray_batch.answer_all(request, defaults, prompts, arguments, keep)


def _files(arguments: Namespace) -> tuple[Path, Path]:
    """Returns the file of the prompts and that of the answers. Raises `UsageError`."""
    if len(arguments.words) > 2 or (
        len(arguments.words) > 1 and options.on_command_line(arguments, "model")
    ):
        raise UsageError("give one model and one file: kvq batch [MODEL] FILE.jsonl")
    if arguments.out is None:
        raise UsageError(
            f"{argument('--out')} is missing; give the file that the answers go to, such as "
            "answers.jsonl"
        )
    prompts, out = map(path_of, (arguments.words[-1], arguments.out))
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{argument('--out')} {out}: there is no folder {out.parent}")
    if out.absolute() == prompts.absolute():
        raise UsageError(f"{argument('--out')} is the file of the prompts; give another name")
    return prompts, out


def _serve_request(arguments: Namespace) -> "ServeRequest":
    """Returns what the flags ask for. Raises `KvqError`."""
    from kvq_apps.serve.config import ServeConfig
    from kvq_apps.serve.loading import ServeRequest

    return ServeRequest(
        model=arguments.model if len(arguments.words) == 1 else arguments.words[0],
        engine_options=options.engine_options(arguments),
        session_options=options.session_options(arguments),
        # It keeps no session on disk, and nobody waits for its answers at the end.
        config=ServeConfig(
            port=0, saved_bytes=0, grace_s=0.0, **options.keywords(arguments, sessions="sessions")
        ),
    )


def _line_defaults(arguments: Namespace) -> "LineDefaults":
    """Returns what the flags say for every line. Raises `KvqError`."""
    from kvq_apps.batch import LineDefaults
    from kvq_apps.serve.formats import NAMES
    from kvq_apps.serve.protocol import SAMPLING_NAMES

    limit = options.max_tokens(arguments.predict, DEFAULT_MAX_TOKENS)
    fields: Row = {"max_tokens": options.UNTIL_FULL if limit is None else limit}
    fields |= {
        SAMPLING_NAMES[name]: value for name, value in options.sampling_fields(arguments).items()
    }
    fields |= options.keywords(arguments, seed="seed", stop="stop", regex="regex")
    forms = options.keywords(arguments, json_schema="json-schema", grammar="grammar")
    for name, file in forms.items():
        text = text_input.read_text(file)
        fields[name] = text if name == "grammar" else _json(text, file)
    if len([name for name in NAMES if name in fields]) > 1:
        raise UsageError("--json-schema, --grammar and --regex exclude each other; give one")
    if arguments.no_heal:
        fields["x_kvq"] = {"heal": False}
    return LineDefaults(
        fields=fields,
        chat=arguments.chat,
        system=arguments.system,
        **options.keywords(arguments, think="think"),
    )


def _json(text: str, file: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"--json-schema {file} is not JSON: {reason_of(error)}") from None
