"""`kvq eval`: quality at a KV setting, over texts, generated look-ups or lines to fill in.

One task at one setting, or `--table` of several widths.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.config import parse_kv
from kvq.errors import ModelError, UsageError, argument
from kvq.formats import format_bytes
from kvq_apps import flags, laboratory, options, output

if TYPE_CHECKING:
    from kvq_apps.evaluation.choices import EvaluationChoices
    from kvq_apps.evaluation.measurement import Measurement, OpenSession, Progress
    from kvq_runtime.engine import Engine
    from kvq_runtime.session import Session

    # How sessions are opened on the cache that is judged, and on an unquantised one.
    Opened = tuple[OpenSession, OpenSession]

DEFAULT_CONTEXT = 2048
LABORATORY_TASKS = ("drafts", "edit", "predict")
# A table reads its text many times.
DEFAULT_WINDOWS = 16


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq eval`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] FILE",
        help="UTF-8 texts (`-`: stdin), for fim source files or infilling records (.jsonl, .gz, "
        ".xz), for program HumanEval's records, for math GSM8K's, for facts prose to hide "
        "them in; a first word that is no file is the model",
    )
    flags.add_flags(parser, *flags.ENGINE_FLAGS)
    flags.add_flags(
        parser, "task", "context", "max-tokens", "depths", "trials", "seed",
        context=f"tokens per window (default: {DEFAULT_CONTEXT}); "
        "passkey, retrieval and facts take a list of lengths",
        seed="seed of look-ups and of the choice of lines "
        "(default: {kvq_apps.evaluation.choices:EvaluationChoices.seed})",
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("filling in lines, solving problems"),
        "limit", "predict", "execute", "baseline",
        predict="tokens of a line or a solution at most (default: "
        "{kvq_apps.evaluation.choices:EvaluationChoices.line_tokens}, program: "
        "{kvq_apps.evaluation.problems:PROGRAM_TOKENS}, math: "
        "{kvq_apps.evaluation.problems:MATH_TOKENS})",
    )  # fmt: skip
    flags.add_flags(parser.add_argument_group("many settings"), "table", "sweep")
    flags.add_flags(
        parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS,
        kv="both at once, such as 4:2; fp: an unquantised cache; --table takes several",
        kv_predict="what of a prompt is predicted; task predict: how many tokens are computed, as "
        "prefix:sink=4,tail=32 (default: off)",
    )  # fmt: skip
    laboratory.part("eval").add_flags(parser)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    modes = [name for name in ("task", "table", "sweep") if getattr(arguments, name)]
    if not modes:
        raise UsageError(
            f"{argument('--task')} is missing; choose ppl, kld, passkey, retrieval, facts, fim, "
            "program, math, drafts, edit or predict"
        )
    if len(modes) > 1:
        raise UsageError(
            f"{argument('--' + modes[0])} and {argument('--' + modes[1])} exclude each other; "
            "give one"
        )
    model, files = _model_and_files(arguments)
    mode = _mode(arguments)

    from kvq_apps.model_path import model_files
    from kvq_runtime.engine import Engine

    _check_before_loading(arguments)
    engine_options = options.engine_options(arguments)
    files_of_model = model_files(model, engine_options.get("backend", "auto"))
    with Engine(files_of_model, **engine_options) as engine:
        return mode(engine, arguments, files)


def _mode(arguments: Namespace) -> "Callable[[Engine, Namespace, list[str]], int]":
    """What answers. Raises `UsageError` for what only the laboratory has, where there is none."""
    if arguments.sweep:
        return laboratory.runs("eval", "sweep", "--sweep")
    if arguments.task in LABORATORY_TASKS:
        return laboratory.runs("eval", arguments.task, f"--task {arguments.task}")
    return _table if arguments.table else _one_task


def _check_before_loading(arguments: Namespace) -> None:
    """Refuses what needs no model to be refused."""
    owners = {
        "baseline": ("fim",),
        "execute": ("fim", "program", "sweep"),
    }
    mode = arguments.task or ("sweep" if arguments.sweep else "table")
    for name, takers in owners.items():
        if mode not in takers and options.written(arguments, name):
            raise UsageError(
                f"{argument(f'--{name}')} is for {' and '.join(takers)} only; leave it out"
            )
    if mode == "program" and not arguments.execute:
        raise UsageError(
            f"{argument('--task')} program judges programs by running them; add "
            f"{argument('--execute')}, which runs what the "
            "model wrote on this machine, with limits but no sandbox"
        )
    if arguments.execute:
        from kvq_apps.evaluation import execution

        execution.check_possible()
        output.print_note(
            "--execute runs programs the model wrote on this machine: with limits of time "
            f"({execution.TIMEOUT_S:.0f} s) and memory ({format_bytes(execution.MEMORY_BYTES)}), "
            "but not in a sandbox"
        )
    laboratory.part("eval").check(arguments)


def _one_task(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    from kvq_apps.evaluation import problems
    from kvq_apps.evaluation.recall import ANSWER_TOKENS
    from kvq_apps.evaluation.tasks import RECALL_TASKS

    task = arguments.task
    solution_tokens = problems.ANSWER_TOKENS.get(task)
    answers = {} if solution_tokens is None else {"line_tokens": solution_tokens}
    room = ANSWER_TOKENS.get(task, 0)
    several = task in RECALL_TASKS
    lengths = _lengths(engine, arguments, room) if several else (one_length(engine, arguments),)
    asked = choices_of(arguments, files, **answers)

    def measure(opened: "Opened", progress: Any) -> "Measurement":
        context_tokens = max(lengths) + room
        material = asked.material(
            engine.tokenizer, [task], context_tokens, lengths=lengths, texts=files, programs=files
        )
        measured = material.measure(task, *opened, progress)
        if arguments.baseline:
            beaten = asked.baseline(engine.tokenizer, arguments.baseline, material.gaps, progress)
            measured.details["baseline"] = beaten
        return measured

    return judge(engine, arguments, max(lengths), room, measure)


def judge(
    engine: "Engine",
    arguments: Namespace,
    context_tokens: int,
    room: int,
    measure: "Callable[[Opened, Progress], Measurement]",
) -> int:
    """Shows what `measure` finds of the cache that the flags ask for.

    It is given how sessions of `context_tokens + room` tokens on that cache are opened, and how
    those on an unquantised one.
    """
    from kvq_apps.evaluation.cache_setting import UNQUANTIZED
    from kvq_apps.evaluation.text import SCORE_CHUNK_TOKENS

    tokens = context_tokens + room
    cache = {
        "kv_budget": f"{tokens}tok",
        "context_tokens": tokens,
        "chunk_tokens": SCORE_CHUNK_TOKENS,
    }
    open_session = partial(engine.session, **(cache | options.session_options(arguments)))
    exact = UNQUANTIZED.opener(engine.session, tokens)
    with output.Progress() as progress:
        # An impossible setting is refused before any work.
        with open_session() as session:
            settings = _settings(session)
        measured = measure((open_session, exact), progress)
    found = {name: getattr(measured, name) for name in ("kv_bytes", "value", "unit", "n")}
    report = head(engine, context_tokens) | settings | found | measured.details
    return show(arguments, {"task": arguments.task} | report, print_report)


def _settings(session: "Session[Any]") -> dict[str, Any]:
    """The cache that is judged."""
    plan = session.config.plan
    return {
        "kv": output.kv_text(plan.k_bits, plan.v_bits),
        "policy": session.config.policy,
        "kv_budget": session.stats().kv_budget,
    }


def head(engine: "Engine", context_tokens: int) -> dict[str, Any]:
    """What every report begins with."""
    names = {"model": engine.model.name, "backend": engine.backend.name}
    return names | {"context": context_tokens}


def show(
    arguments: Namespace, report: dict[str, Any], print_it: Callable[[dict[str, Any]], None]
) -> int:
    """The end of each mode; its exit code."""
    (output.print_json if arguments.json else print_it)(report)
    return 0


def print_report(report: dict[str, Any]) -> None:
    """A report as a table, and its `rows` as another."""
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
    texts = arguments.kv.split(",") if options.written(arguments, "kv") else table.SETTINGS
    pairs = dict.fromkeys(parse_kv(text) for text in texts)
    context_tokens = one_length(engine, arguments)
    asked = choices_of(arguments, files, max_tokens=DEFAULT_WINDOWS * context_tokens)
    material = asked.material(engine.tokenizer, table.TASKS, context_tokens, texts=files)
    with output.Progress() as progress:
        rows = table.measure_table(
            engine.session,
            material,
            [CacheSetting(k_bits=k_bits, v_bits=v_bits) for k_bits, v_bits in pairs],
            context_tokens,
            progress,
        )
    asked_of_each = {
        "windows": len(material.windows),
        "questions": sum(map(len, material.questions.values())),
    }
    report = head(engine, context_tokens) | asked_of_each | {"rows": rows}
    return show(arguments, report, table.print_table)


def refuse(arguments: Namespace, mode: str, *names: str) -> None:
    """Raises `UsageError` for a flag of the cache, which `mode` chooses itself."""
    for name in names:
        if options.written(arguments, name):
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
    """The one number of tokens that `--context` says. Raises `UsageError` for several."""
    length, *more = _lengths(engine, arguments, default=default)
    if more:
        asked = ",".join(map(str, (length, *more)))
        raise UsageError(
            f"{argument('--context')} {asked} is not possible: give one number of tokens; only "
            f"{argument('--task')} passkey, retrieval and facts take several"
        )
    return length


def choices_of(arguments: Namespace, files: Sequence[str], **defaults: int) -> "EvaluationChoices":
    """What the flags ask for; `defaults` where they say nothing."""
    from kvq_apps.evaluation import execution
    from kvq_apps.evaluation.choices import EvaluationChoices

    given: dict[str, Any] = defaults | options.given(
        arguments,
        max_tokens="max-tokens",
        depths="depths",
        trials="trials",
        limit="limit",
        line_tokens="predict",
        seed="seed",
    )
    passes = execution.passes if arguments.execute else None
    return EvaluationChoices(**given, files=tuple(files), passes=passes)


def _model_and_files(arguments: Namespace) -> tuple[str | None, list[str]]:
    """Without a written `-m`, a first word that is no file is the model."""
    model, files = arguments.model, list(arguments.words)
    may_be_model = bool(files) and files[0] != "-" and not Path(files[0]).is_file()
    if may_be_model and not options.written(arguments, "model"):
        model = files.pop(0)
        if not files:
            _refuse_missing(model)
    makes_own = arguments.task in ("passkey", "retrieval")
    if makes_own and files:
        raise UsageError(
            f"{argument('--task')} {arguments.task} makes its own prompts; leave out the files"
        )
    for file in files:
        if file != "-" and not Path(file).exists():
            raise UsageError(f"{file}: no such file")
    if arguments.task and not makes_own and not files:
        takes_records = arguments.task in ("fim", "edit", "program", "math")
        needed = "source files or records" if takes_records else "a text"
        raise UsageError(
            f"{argument('--task')} {arguments.task} needs {needed}: kvq eval -m MODEL FILE"
        )
    if arguments.table and not files:
        raise UsageError(
            f"{argument('--table')} needs a text: kvq eval {argument('--table')} -m MODEL FILE"
        )
    return model, files


def _refuse_missing(name: str) -> None:
    """Raises `UsageError` for a word alone that is neither a file nor a model."""
    from kvq_apps.model_path import ready_model

    try:
        ready_model(name)
    except ModelError as error:
        if not Path(name).exists():
            raise UsageError(f"{name}: no such file, and no model is called so") from error
