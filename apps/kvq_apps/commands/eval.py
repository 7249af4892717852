"""`kvq eval`: measures quality at a KV setting, on texts and look-ups.

It runs one task at one setting, or a `--table` of several widths.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.config import parse_kv
from kvq.errors import BudgetError, ModelError, UsageError, argument
from kvq_apps import laboratory
from kvq_apps.settings import flags, options
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_apps.evaluation.choices import EvaluationChoices
    from kvq_apps.evaluation.measurement import Measurement, OpenSession, Progress
    from kvq_runtime.engine import Engine
    from kvq_runtime.session.session import Session

    # Functions that open sessions with the measured cache, and with an unquantised cache.
    Opened = tuple[OpenSession, OpenSession]

DEFAULT_CONTEXT, WEIGHTS_CONTEXT = 2048, 512
LABORATORY_TASKS = ("calls", "drafts", "edit", "fim", "program", "math", "passages", "replay")
# A table reads its text many times, so it is short.
DEFAULT_WINDOWS = 16


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq eval`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] FILE",
        help="UTF-8 texts (`-`: stdin), for facts prose to hide them in; from a checkout for "
        "calls, drafts and edit source files, for fim also infilling records (.jsonl, .gz, .xz), "
        "for program HumanEval's records, for math GSM8K's, for replay two versions of a file or "
        "folder; a first word that is no file is the model",
    )
    flags.add_flags(parser, *flags.ENGINE_FLAGS)
    flags.add_flags(
        parser, "task", "checkpoint", "context", "max-tokens", "depths", "trials", "seed",
        context=f"tokens per window (default: {DEFAULT_CONTEXT}); "
        "passkey, retrieval and facts take a list of lengths",
        seed="seed of look-ups and of what is chosen "
        "(default: {kvq_apps.evaluation.choices:EvaluationChoices.seed})",
    )  # fmt: skip
    flags.add_flags(parser.add_argument_group("many settings"), "table", "sweep")
    flags.add_flags(
        parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS,
        kv="bits of cached keys and values, such as 4:2; fp: an unquantised cache; "
        "--table takes several",
    )  # fmt: skip
    laboratory.extension("eval").add_flags(parser)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    modes = [name for name in ("task", "table", "sweep") if getattr(arguments, name)]
    if not modes:
        raise UsageError(
            f"{argument('--task')} is missing; choose ppl, kld, weights, passkey, retrieval or "
            "facts"
        )
    if len(modes) > 1:
        raise UsageError(
            f"{argument('--' + modes[0])} and {argument('--' + modes[1])} exclude each other; "
            "give one"
        )
    if (arguments.task == "weights") != (arguments.checkpoint is not None):
        raise UsageError(
            f"{argument('--task')} weights compares a bundle with {argument('--checkpoint')} "
            "MODEL; give both, or neither"
        )
    model, files = model_and_files(arguments)
    mode = _mode(arguments)

    from kvq_apps.names.model_path import model_files
    from kvq_runtime.engine import Engine

    laboratory.extension("eval").check(arguments)
    engine_options = options.engine_options(arguments)
    files_of_model = model_files(model, engine_options.get("backend", "auto"))
    with Engine(files_of_model, **engine_options) as engine:
        return mode(engine, arguments, files)


def _mode(arguments: Namespace) -> "Callable[[Engine, Namespace, list[str]], int]":
    """Returns the function for the mode. Raises `UsageError` if only the laboratory has it."""
    if arguments.sweep:
        return laboratory.runner("eval", "sweep", "--sweep")
    if arguments.task in LABORATORY_TASKS:
        return laboratory.runner("eval", arguments.task, f"--task {arguments.task}")
    if arguments.task == "weights":
        return _weights
    return _table if arguments.table else _one_task


def _one_task(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    from kvq_apps.evaluation.recall import ANSWER_TOKENS

    task = arguments.task
    room = ANSWER_TOKENS.get(task, 0)
    lengths = _lengths(engine, arguments, room) if room else (one_length(engine, arguments),)
    choices = choices_of(arguments)

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        material = choices.material(
            engine.tokenizer, [task], max(lengths) + room, files=files, lengths=lengths
        )
        return material.measure(task, *opened, progress)

    return judge(engine, arguments, max(lengths), room, measure)


def _weights(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Compares a bundle with the checkpoint that it was made of."""
    from kvq_apps.evaluation.original_weights import CheckpointSession, open_original
    from kvq_apps.evaluation.text import divergence

    original = open_original(arguments.checkpoint, engine.model.vocab_size)
    context_tokens = one_length(engine, arguments, WEIGHTS_CONTEXT)
    windows = (
        choices_of(arguments)
        .material(engine.tokenizer, ["kld"], context_tokens, files=files)
        .windows
    )

    if not any(options.on_command_line(arguments, name) for name in flags.KV_FLAGS):
        arguments.kv = "fp"

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        reference: Any = partial(CheckpointSession, original)
        (outcome,) = divergence(opened[:1], reference, windows, progress)
        if isinstance(outcome, BudgetError):
            raise outcome
        return outcome

    return judge(engine, arguments, context_tokens, 0, measure)


def judge(
    engine: "Engine",
    arguments: Namespace,
    context_tokens: int,
    room: int,
    measure: "Callable[[Opened, Progress], Measurement]",
    **session_options: Any,
) -> int:
    """Measures the cache that the flags ask for and shows the result.

    `measure` gets functions that open sessions of `context_tokens + room` tokens: with this cache
    and `session_options`, and with an unquantised cache.
    """
    from kvq_apps.evaluation.cache_setting import UNQUANTIZED
    from kvq_apps.evaluation.text import SCORE_CHUNK_TOKENS

    tokens = context_tokens + room
    cache = {
        "kv_budget": f"{tokens}tok",
        "context_tokens": tokens,
        "chunk_tokens": SCORE_CHUNK_TOKENS,
        **session_options,
    }
    open_session = partial(engine.session, **(cache | options.session_options(arguments)))
    exact = UNQUANTIZED.opener(engine.session, tokens)
    with output.ProgressBar() as progress:
        # An impossible setting is refused before any work.
        with open_session() as session:
            settings = _settings(session)
        measured = measure((open_session, exact), progress)
    figures = {name: getattr(measured, name) for name in ("kv_bytes", "value", "unit", "n")}
    report = report_head(engine, context_tokens) | settings | figures | measured.details
    return show(arguments, {"task": arguments.task} | report, print_report)


def _settings(session: "Session[Any]") -> dict[str, Any]:
    plan = session.config.plan
    return {
        "kv": output.kv_text(plan.k_bits, plan.v_bits),
        "policy": session.config.policy,
        "kv_budget": session.stats().kv_budget,
    }


def report_head(engine: "Engine", context_tokens: int) -> dict[str, Any]:
    """Returns the fields that every report begins with."""
    names = {"model": engine.model.name, "backend": engine.backend.name}
    return names | {"context": context_tokens}


def show(
    arguments: Namespace, report: dict[str, Any], print_it: Callable[[dict[str, Any]], None]
) -> int:
    """Prints a report and returns the exit code."""
    (output.print_json if arguments.json else print_it)(report)
    return 0


def print_report(report: dict[str, Any]) -> None:
    """Prints a report as a table, and its `rows` as another one."""
    rows = report.pop("rows", [])
    sizes = {"kv_bytes": "held_bytes", "kv_budget": "budget_bytes"}
    output.print_table(output.flat({sizes.get(key, key): value for key, value in report.items()}))
    if rows:
        output.print_data("")
        cells = ([f"{x:.4g}" if isinstance(x, float) else x for x in row.values()] for row in rows)
        output.print_table(cells, header=list(rows[0]))


# Many settings


def _table(engine: "Engine", arguments: Namespace, files: list[str]) -> int:
    from kvq_apps.evaluation import table
    from kvq_apps.evaluation.cache_setting import CacheSetting

    refuse(arguments, "--table", "kv-budget", "kv-offload", "kv-policy", "kbits", "vbits")
    texts = arguments.kv.split(",") if options.on_command_line(arguments, "kv") else table.SETTINGS
    pairs = dict.fromkeys(parse_kv(text) for text in texts)
    context_tokens = one_length(engine, arguments)
    choices = choices_of(arguments, max_tokens=DEFAULT_WINDOWS * context_tokens)
    material = choices.material(engine.tokenizer, table.TASKS, context_tokens, files=files)
    with output.ProgressBar() as progress:
        rows = table.measure_table(
            engine.session,
            material,
            [CacheSetting(k_bits=k_bits, v_bits=v_bits) for k_bits, v_bits in pairs],
            context_tokens,
            progress,
        )
    counts = {
        "windows": len(material.windows),
        "questions": sum(map(len, material.questions.values())),
    }
    report = report_head(engine, context_tokens) | counts | {"rows": rows}
    return show(arguments, report, table.print_table)


def refuse(arguments: Namespace, mode: str, *names: str) -> None:
    """Raises `UsageError` for flags of the cache, which `mode` chooses itself."""
    for name in names:
        if options.on_command_line(arguments, name):
            raise UsageError(f"{mode} chooses the caches itself; leave out {argument(f'--{name}')}")


def _lengths(
    engine: "Engine", arguments: Namespace, room: int = 0, default: int = DEFAULT_CONTEXT
) -> tuple[int, ...]:
    default = min(default, engine.model.context_length - room)
    lengths: tuple[int, ...] = arguments.context or (default,)
    if min(lengths) < 1:
        raise UsageError(
            f"{argument('--context')} {','.join(map(str, lengths))} is not possible: give numbers "
            "of tokens above 0"
        )
    return lengths


def one_length(engine: "Engine", arguments: Namespace, default: int = DEFAULT_CONTEXT) -> int:
    """Returns the number of tokens of `--context`. Raises `UsageError` for several."""
    length, *more = _lengths(engine, arguments, default=default)
    if more:
        lengths = ",".join(map(str, (length, *more)))
        raise UsageError(
            f"{argument('--context')} {lengths} is not possible: give one number of tokens; only "
            f"{argument('--task')} passkey, retrieval and facts take several"
        )
    return length


def choices_of(arguments: Namespace, **defaults: int) -> "EvaluationChoices":
    """Returns the choices of the flags, with `defaults` for missing ones."""
    from kvq_apps.evaluation.choices import EvaluationChoices

    names = {"max_tokens": "max-tokens", "depths": "depths", "trials": "trials", "seed": "seed"}
    values: dict[str, Any] = defaults | options.keywords(arguments, **names)
    return EvaluationChoices(**values)


def model_and_files(arguments: Namespace) -> tuple[str | None, list[str]]:
    """Returns the model and the files; without `-m` a first word that is no file is the model."""
    model, files = arguments.model, list(arguments.words)
    may_be_model = bool(files) and files[0] != "-" and not Path(files[0]).is_file()
    if may_be_model and not options.on_command_line(arguments, "model"):
        model = files.pop(0)
        if not files:
            _refuse_missing(model)
    generates_prompts = arguments.task in ("passkey", "retrieval")
    if generates_prompts and files:
        raise UsageError(
            f"{argument('--task')} {arguments.task} makes its own prompts; leave out the files"
        )
    for file in files:
        if file != "-" and not Path(file).exists():
            raise UsageError(f"{file}: no such file")
    # From a checkout commits can take the files' place.
    if arguments.task and not (generates_prompts or files or getattr(arguments, "git", None)):
        needed = "source files or records" if arguments.task in LABORATORY_TASKS else "a text"
        raise UsageError(
            f"{argument('--task')} {arguments.task} needs {needed}: kvq eval -m MODEL FILE"
        )
    if arguments.table and not files:
        raise UsageError(
            f"{argument('--table')} needs a text: kvq eval {argument('--table')} -m MODEL FILE"
        )
    return model, files


def _refuse_missing(name: str) -> None:
    """Raises `UsageError` for a single word that is neither a file nor a model."""
    from kvq_apps.names.model_path import ready_model

    try:
        ready_model(name)
    except ModelError as error:
        if not Path(name).exists():
            raise UsageError(f"{name}: no such file, and no model is called so") from error
