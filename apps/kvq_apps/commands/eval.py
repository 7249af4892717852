"""`kvq eval`: quality at a KV setting, over texts, generated look-ups or lines to fill in.

One task at one setting, `--table` of several widths, or `--sweep` of policies and budgets.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.config import parse_kv
from kvq.errors import ModelError, UsageError
from kvq.formats import format_bytes
from kvq_apps import flags, options, output

if TYPE_CHECKING:
    from kvq_apps.evaluation.asked import Asked
    from kvq_apps.evaluation.cache_setting import CacheSetting
    from kvq_apps.evaluation.sweep import Sweep, SweepFile
    from kvq_apps.evaluation.tasks import Material
    from kvq_export.continuations import Passage
    from kvq_runtime.engine import Engine
    from kvq_runtime.session import Session

DEFAULT_CONTEXT = 2048
# A table or a sweep reads its text many times, and fills in the same lines.
DEFAULT_WINDOWS = 16
DEFAULT_SWEEP_LINES = 20
# Where several drafts are written, and how long they are.
DRAFTS_PLACES = 100
DRAFTS_CONTEXT = 256
DRAFTS_TOKENS = 10
# Prompts that are predicted.
PREDICT_PASSAGES = 24
PREDICT_CONTEXT = 1024
# A sweep judges pressure: a line to fill in must have this share of the context around it.
LEAST_FILLED = Fraction(3, 4)


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
        "(default: {kvq_apps.evaluation.asked:Asked.seed})",
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("filling in lines, solving problems"),
        "limit", "predict", "execute", "baseline",
        predict="tokens of a line or a solution at most (default: "
        "{kvq_apps.evaluation.asked:Asked.line_tokens}, program: "
        "{kvq_apps.evaluation.problems:PROGRAM_TOKENS}, math: "
        "{kvq_apps.evaluation.problems:MATH_TOKENS})",
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("several drafts"),
        "drafts", "drafts-method",
        drafts="numbers of drafts to compare (default: 1,3,5)",
        drafts_method="a way to write them; may be repeated (default: "
        "each of {kvq_apps.evaluation.several:METHODS})",
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("many settings"),
        "table", "sweep", "tasks", "policies", "budgets", "out", "plot", "ray",
        out="sweep: the JSON file to write, or to go on with",
        plot="draw quality over bytes; task predict: over the time saved",
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS,
        kv="both at once, such as 4:2; fp: an unquantised cache; --table takes several",
        kv_predict="task predict: how many tokens are computed, as prefix:sink=4,tail=32; others: "
        "what of a prompt is predicted (default: off)",
    )  # fmt: skip


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    modes = [name for name in ("task", "table", "sweep") if getattr(arguments, name)]
    if not modes:
        raise UsageError(
            "--task is missing; choose ppl, kld, passkey, retrieval, facts, fim, program, math, "
            "drafts, edit or predict"
        )
    if len(modes) > 1:
        raise UsageError(f"--{modes[0]} and --{modes[1]} exclude each other; give one")
    model, files = _model_and_files(arguments)
    by_task = {"drafts": _drafts, "predict": _predict}
    by_mode = {"task": by_task.get(arguments.task, _one_task), "table": _table, "sweep": _sweep}
    mode = by_mode[modes[0]]

    from kvq_apps.model_path import model_files
    from kvq_runtime.engine import Engine

    _check_before_loading(arguments)
    engine_options = options.engine_options(arguments)
    files_of_model = model_files(model, engine_options.get("backend", "auto"))
    with Engine(files_of_model, **engine_options) as engine:
        return mode(engine, arguments, files)


def _check_before_loading(arguments: Namespace) -> None:
    """Refuses what needs no model to be refused."""
    owners = {
        "baseline": ("fim",),
        "execute": ("fim", "program", "sweep"),
        "out": ("sweep",),
        "plot": ("sweep", "predict"),
        "ray": ("sweep",),
    }
    mode = arguments.task or ("sweep" if arguments.sweep else "table")
    for name, takers in owners.items():
        if mode not in takers and options.written(arguments, name):
            raise UsageError(f"--{name} is for {' and '.join(takers)} only; leave it out")
    if mode == "program" and not arguments.execute:
        raise UsageError(
            "--task program judges programs by running them; add --execute, which runs what the "
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
    if arguments.plot is not None:
        from kvq_apps.bench.plot import check_plot

        check_plot(arguments.plot)
    if arguments.sweep:
        from kvq_apps.evaluation.sweep import check_out

        if arguments.out is None:
            raise UsageError("--sweep needs --out FILE.json, the file it writes and goes on with")
        check_out(Path(arguments.out))


def _one_task(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    from kvq_apps.evaluation import problems
    from kvq_apps.evaluation.cache_setting import UNQUANTIZED
    from kvq_apps.evaluation.recall import ANSWER_TOKENS
    from kvq_apps.evaluation.tasks import RECALL_TASKS
    from kvq_apps.evaluation.text import SCORE_CHUNK_TOKENS

    task = arguments.task
    solution_tokens = problems.ANSWER_TOKENS.get(task)
    answers = {} if solution_tokens is None else {"line_tokens": solution_tokens}
    room = ANSWER_TOKENS.get(task, 0)
    several = task in RECALL_TASKS
    lengths = _lengths(engine, arguments, room) if several else (_one_length(engine, arguments),)
    context_tokens = max(lengths) + room
    cache = {
        "kv_budget": f"{context_tokens}tok",
        "context_tokens": context_tokens,
        "chunk_tokens": SCORE_CHUNK_TOKENS,
    }
    open_session = partial(engine.session, **(cache | options.session_options(arguments)))
    exact = UNQUANTIZED.opener(engine.session, context_tokens)
    asked = _asked(arguments, files, **answers)
    with output.Progress() as progress:
        # An impossible setting is refused before any work.
        with open_session() as session:
            settings = _settings(session)
        material = asked.material(
            engine.tokenizer, [task], context_tokens, lengths=lengths, texts=files, programs=files
        )
        measured = material.measure(task, open_session, exact, progress)
        if arguments.baseline:
            beaten = asked.baseline(engine.tokenizer, arguments.baseline, material.gaps, progress)
            measured.details["baseline"] = beaten
    found = {name: getattr(measured, name) for name in ("kv_bytes", "value", "unit", "n")}
    report = _head(engine, max(lengths)) | settings | found | measured.details
    return _show(arguments, {"task": task} | report, _print)


def _settings(session: "Session[Any]") -> dict[str, Any]:
    """The cache that is judged."""
    plan = session.config.plan
    return {
        "kv": output.kv_text(plan.k_bits, plan.v_bits),
        "policy": session.config.policy,
        "kv_budget": session.stats().kv_budget,
    }


def _head(engine: "Engine", context_tokens: int) -> dict[str, Any]:
    """What every report begins with."""
    names = {"model": engine.model.name, "backend": engine.backend.name}
    return names | {"context": context_tokens}


def _show(
    arguments: Namespace, report: dict[str, Any], print_it: Callable[[dict[str, Any]], None]
) -> int:
    """The end of each mode; its exit code."""
    (output.print_json if arguments.json else print_it)(report)
    return 0


def _drafts(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Several drafts at places in texts: the best of k against what stands there."""
    from kvq_apps.engine import writer_for
    from kvq_apps.evaluation import several
    from kvq_apps.evaluation.documents import training_texts

    context = min(_one_length(engine, arguments, DRAFTS_CONTEXT), engine.model.context_length)
    wanted = _asked(arguments, files, limit=DRAFTS_PLACES, line_tokens=DRAFTS_TOKENS)
    length = wanted.line_tokens
    counts = arguments.drafts or (1, 3, 5)
    texts = [text for file in files for text in training_texts(file)]
    asked = several.places(
        engine.tokenizer, texts, count=wanted.limit, context=context, length=length,
        seed=wanted.seed,
    )  # fmt: skip
    own = options.session_options(arguments)
    with output.Progress() as progress:
        scores = several.measure(
            lambda: several.session_for_drafts(engine, context, **own),
            partial(writer_for, tokenizer=engine.tokenizer),
            engine.tokenizer,
            asked,
            arguments.drafts_method or several.METHODS,
            counts,
            progress,
        )
    found = [own.row(method, k) for (method, k), own in scores.items()]
    report = {"task": "drafts"} | _head(engine, context)
    return _show(arguments, report | {"length": length, "n": len(asked), "rows": found}, _print)


def _predict(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """What follows prompts whose later layers are predicted, against the time that saves."""
    from kvq_apps.evaluation import predicting
    from kvq_apps.evaluation.documents import training_texts

    most = engine.model.context_length - predicting.FOLLOWING_TOKENS
    context = min(_one_length(engine, arguments, PREDICT_CONTEXT), most)
    texts = [text for file in files for text in training_texts(file)]
    count = _asked(arguments, files, limit=PREDICT_PASSAGES).limit
    asked = predicting.passages(engine.tokenizer, texts, count=count, context=context)
    own = options.session_options(arguments)
    with output.Progress() as progress:
        found = predicting.predicting(engine, asked, progress, **own)
    if arguments.kv_predict_with is not None:
        found["auxiliary_nll"] = _alone(arguments, asked)
    report = {"task": "predict"} | _head(engine, context) | found
    if arguments.plot is not None:
        predicting.draw(arguments.plot, report)
    return _show(arguments, report, _print)


def _alone(arguments: Namespace, asked: "list[Passage]") -> float:
    """What the auxiliary model itself makes of what follows."""
    from kvq_apps.model_path import resolve_model
    from kvq_export.continuations import measure
    from kvq_runtime.engine import Engine

    path = resolve_model(arguments.kv_predict_with)
    with Engine.open(path, **options.engine_options(arguments)) as engine:
        return measure(engine, asked, {}).exact_nll


def _print(report: dict[str, Any]) -> None:
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

    _refuse(arguments, "--table", "kv-budget", "kv-offload", "kv-policy", "kbits", "vbits")
    texts = arguments.kv.split(",") if options.written(arguments, "kv") else table.SETTINGS
    pairs = dict.fromkeys(parse_kv(text) for text in texts)
    context_tokens = _one_length(engine, arguments)
    asked = _asked(arguments, files, max_tokens=DEFAULT_WINDOWS * context_tokens)
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
    report = _head(engine, context_tokens) | asked_of_each | {"rows": rows}
    return _show(arguments, report, table.print_table)


def _sweep(engine: "Engine", arguments: Namespace, files: list[str]) -> int:
    from kvq_apps.evaluation import sweep, sweep_report
    from kvq_apps.evaluation.cache_setting import UNQUANTIZED

    _refuse(arguments, "--sweep", "kv-budget", "kv-offload", "kv-policy")
    context_tokens = _one_length(engine, arguments)
    asked = _asked(
        arguments, files, max_tokens=DEFAULT_WINDOWS * context_tokens, limit=DEFAULT_SWEEP_LINES
    )
    tasks = _sweep_tasks(arguments.tasks, asked)
    material = asked.material(
        engine.tokenizer,
        tasks,
        context_tokens,
        texts=asked.texts,
        programs=asked.programs,
        least_prompt_tokens=int(LEAST_FILLED * context_tokens),
    )
    with UNQUANTIZED.opener(engine.session, context_tokens)() as session:
        arena = session.config.arena
        whole = session.stats().bytes_per_token * context_tokens
        fp16_bytes = int(whole) if arena is None else arena.spec.float_bytes
    plan = sweep.Sweep(
        tasks=tasks,
        settings=_sweep_settings(arguments),
        budgets=arguments.budgets or sweep.BUDGETS,
        context_tokens=context_tokens,
        fp16_bytes=fp16_bytes,
    )
    file = _sweep_file(engine, arguments, plan, material, asked.seed)
    sweep.check_settings(engine.session, plan)
    with output.Progress() as progress:
        if arguments.ray:
            _on_ray(engine, arguments, material, plan, file, progress)
        else:
            sweep.run(engine.session, material, plan, file, progress)
    if arguments.plot is not None:
        sweep_report.draw_sweep(arguments.plot, file.data)
    return _show(arguments, file.data, sweep_report.print_sweep)


def _on_ray(
    engine: "Engine",
    arguments: Namespace,
    material: "Material",
    plan: "Sweep",
    file: "SweepFile",
    progress: output.Shown,
) -> None:
    """The cells as tasks of Ray."""
    from kvq_apps.fleet.cluster import connected

    with connected():
        from kvq_apps.fleet import cells

        model = str(engine.files.path)
        cells.run(model, options.engine_options(arguments), material, plan, file, progress)


def _sweep_file(
    engine: "Engine", arguments: Namespace, plan: "Sweep", material: "Material", seed: int
) -> "SweepFile":
    """The file that results go to, with all by which another run knows that it may go on."""
    from kvq_apps.evaluation.sweep import SweepFile

    return SweepFile(
        Path(arguments.out),
        {
            "model": engine.model.name,
            "fingerprint": engine.model.fingerprint,
            "backend": engine.backend.name,
            "context_tokens": plan.context_tokens,
            "fp16_bytes": plan.fp16_bytes,
            "seed": seed,
        },
        {
            task: {"sequences": len(material.sequences(task)), "sha256": material.digest(task)}
            for task in plan.tasks
        },
    )


def _sweep_tasks(wanted: tuple[str, ...] | None, asked: "Asked") -> tuple[str, ...]:
    """What is wanted, or all that the files allow."""
    from kvq_apps.evaluation.sweep import TASKS

    inputs = {"kld": asked.texts, "fim": asked.programs}
    if wanted is None:
        return tuple(task for task in TASKS if inputs.get(task, True))
    for task in wanted:
        if task not in TASKS:
            raise UsageError(f"--tasks {task} is not possible: choose from {', '.join(TASKS)}")
        if not inputs.get(task, True):
            needed = "a text" if task == "kld" else "source files (.py) or infilling records"
            raise UsageError(f"--tasks {task} needs {needed}: kvq eval --sweep -m MODEL FILE")
    return tuple(dict.fromkeys(wanted))


def _sweep_settings(arguments: Namespace) -> "tuple[CacheSetting, ...]":
    """Policies as `NAME[:option=value,...][@K:V]`; without widths those of `--kv`, or 8:8."""
    from kvq.policies import POLICIES
    from kvq_apps.evaluation.cache_setting import CacheSetting

    widths = {"k_bits": 8, "v_bits": 8} | options.kv_bits(arguments)
    found: list[CacheSetting] = []
    for text in arguments.policies or tuple(POLICIES):
        policy, _, own = text.partition("@")
        asked = f"--policies {policy}@"
        k_bits, v_bits = parse_kv(own, asked) if own else (widths["k_bits"], widths["v_bits"])
        found.append(CacheSetting(policy=policy, k_bits=k_bits, v_bits=v_bits))
    return tuple(dict.fromkeys(found))


def _refuse(arguments: Namespace, mode: str, *names: str) -> None:
    for name in names:
        if options.written(arguments, name):
            raise UsageError(f"{mode} chooses the caches itself; leave out --{name}")


def _lengths(
    engine: "Engine", arguments: Namespace, room: int = 0, default: int = DEFAULT_CONTEXT
) -> tuple[int, ...]:
    default = min(default, engine.model.context_length - room)
    lengths: tuple[int, ...] = arguments.context or (default,)
    if min(lengths) < 1:
        raise UsageError(
            f"--context {','.join(map(str, lengths))} is not possible: give numbers of tokens "
            "above 0"
        )
    return lengths


def _one_length(engine: "Engine", arguments: Namespace, default: int = DEFAULT_CONTEXT) -> int:
    length, *more = _lengths(engine, arguments, default=default)
    if more:
        asked = ",".join(map(str, (length, *more)))
        raise UsageError(
            f"--context {asked} is not possible: give one number of tokens; only --task passkey, "
            "retrieval and facts take several"
        )
    return length


def _asked(arguments: Namespace, files: Sequence[str], **defaults: int) -> "Asked":
    """What the flags ask for; `defaults` where they say nothing."""
    from kvq_apps.evaluation import execution
    from kvq_apps.evaluation.asked import Asked

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
    return Asked(**given, files=tuple(files), passes=passes)


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
        raise UsageError(f"--task {arguments.task} makes its own prompts; leave out the files")
    for file in files:
        if file != "-" and not Path(file).exists():
            raise UsageError(f"{file}: no such file")
    if arguments.task and not makes_own and not files:
        takes_records = arguments.task in ("fim", "edit", "program", "math")
        needed = "source files or records" if takes_records else "a text"
        raise UsageError(f"--task {arguments.task} needs {needed}: kvq eval -m MODEL FILE")
    if arguments.table and not files:
        raise UsageError("--table needs a text: kvq eval --table -m MODEL FILE")
    return model, files


def _refuse_missing(name: str) -> None:
    """Raises `UsageError` for a word alone that is neither a file nor a model."""
    from kvq_apps.model_path import ready_model

    try:
        ready_model(name)
    except ModelError as error:
        if not Path(name).exists():
            raise UsageError(f"{name}: no such file, and no model is called so") from error
