"""The tasks of `kvq eval` that only a checkout has, and its `--sweep`, with their flags."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.config import parse_kv
from kvq.errors import UsageError, argument
from kvq_apps import flags, options, output
from kvq_apps.commands.eval import (
    DEFAULT_WINDOWS,
    choices_of,
    head,
    judge,
    one_length,
    print_report,
    refuse,
    show,
)

if TYPE_CHECKING:
    from kvq_apps.commands.eval import Opened
    from kvq_apps.evaluation.cache_setting import CacheSetting
    from kvq_apps.evaluation.choices import EvaluationChoices
    from kvq_apps.evaluation.measurement import Measurement, Progress
    from kvq_apps.evaluation.tasks import Material
    from kvq_export.continuations import Passage
    from kvq_lab.sweep import Sweep, SweepFile
    from kvq_runtime.engine import Engine

# What a sweep fills in, over and over.
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


def add_flags(parser: ArgumentParser, /) -> None:
    """The flags of these tasks."""
    flags.add_flags(
        parser.add_argument_group("several drafts"),
        "drafts", "drafts-method",
        drafts="numbers of drafts to compare (default: 1,3,5)",
        drafts_method="a way to write them; may be repeated (default: "
        "each of {kvq_apps.evaluation.several:METHODS})",
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("--sweep"), "tasks", "policies", "budgets", "out", "plot", "ray",
        out="sweep: the JSON file to write, or to go on with",
        plot="draw quality over bytes; task predict: over the time saved",
    )  # fmt: skip


def check(arguments: Namespace, /) -> None:
    """Refuses what needs no model to be refused."""
    owners = {"out": ("sweep",), "plot": ("sweep", "predict"), "ray": ("sweep",)}
    mode = arguments.task or ("sweep" if arguments.sweep else "table")
    for name, takers in owners.items():
        if mode not in takers and options.written(arguments, name):
            raise UsageError(
                f"{argument(f'--{name}')} is for {' and '.join(takers)} only; leave it out"
            )
    if arguments.plot is not None:
        from kvq_apps.bench.plot import check_plot

        check_plot(arguments.plot)
    if arguments.sweep:
        from kvq_lab.sweep import check_out

        if arguments.out is None:
            raise UsageError(
                f"{argument('--sweep')} needs {argument('--out')} FILE.json, the file it writes "
                "and goes on with"
            )
        check_out(Path(arguments.out))


def _edit(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Edits of programs, in a cache that moves what follows them."""
    from kvq_apps.evaluation.documents import training_texts
    from kvq_lab.edit_quality import edit_cases, editing

    asked = choices_of(arguments, files)
    context_tokens = one_length(engine, arguments)

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        texts = [text for file in files for text in training_texts(file)]
        cases = edit_cases(
            engine.tokenizer, texts, limit=asked.limit, context_tokens=context_tokens,
            seed=asked.seed,
        )  # fmt: skip
        return editing(*opened, cases, progress)

    return judge(engine, arguments, context_tokens, 0, measure)


def _drafts(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Several drafts at places in texts: the best of k against what stands there."""
    from kvq_apps.evaluation import several
    from kvq_apps.evaluation.documents import training_texts
    from kvq_apps.ngram_file import writer_for

    context = min(one_length(engine, arguments, DRAFTS_CONTEXT), engine.model.context_length)
    wanted = choices_of(arguments, files, limit=DRAFTS_PLACES, line_tokens=DRAFTS_TOKENS)
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
    report = {"task": "drafts"} | head(engine, context)
    return show(
        arguments, report | {"length": length, "n": len(asked), "rows": found}, print_report
    )


def _predict(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """What follows prompts whose later layers are predicted, against the time that saves."""
    from kvq_apps.evaluation.documents import training_texts
    from kvq_lab import predicting

    most = engine.model.context_length - predicting.FOLLOWING_TOKENS
    context = min(one_length(engine, arguments, PREDICT_CONTEXT), most)
    texts = [text for file in files for text in training_texts(file)]
    count = choices_of(arguments, files, limit=PREDICT_PASSAGES).limit
    asked = predicting.passages(engine.tokenizer, texts, count=count, context=context)
    own = options.session_options(arguments)
    with output.Progress() as progress:
        found = predicting.predicting(engine, asked, progress, **own)
    if arguments.kv_predict_with is not None:
        found["auxiliary_nll"] = _alone(arguments, asked)
    report = {"task": "predict"} | head(engine, context) | found
    if arguments.plot is not None:
        predicting.draw(arguments.plot, report)
    return show(arguments, report, print_report)


def _alone(arguments: Namespace, asked: "list[Passage]") -> float:
    """What the auxiliary model itself makes of what follows."""
    from kvq_apps.model_path import resolve_model
    from kvq_export.continuations import measure
    from kvq_runtime.engine import Engine

    path = resolve_model(arguments.kv_predict_with)
    with Engine.open(path, **options.engine_options(arguments)) as engine:
        return measure(engine, asked, {}).exact_nll


def _sweep(engine: "Engine", arguments: Namespace, files: list[str]) -> int:
    from kvq_apps.evaluation.cache_setting import UNQUANTIZED
    from kvq_lab import sweep, sweep_report

    refuse(arguments, "--sweep", "kv-budget", "kv-offload", "kv-policy")
    context_tokens = one_length(engine, arguments)
    asked = choices_of(
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
    return show(arguments, file.data, sweep_report.print_sweep)


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
        from kvq_lab import cells

        model = str(engine.files.path)
        cells.run(model, options.engine_options(arguments), material, plan, file, progress)


def _sweep_file(
    engine: "Engine", arguments: Namespace, plan: "Sweep", material: "Material", seed: int
) -> "SweepFile":
    """The file that results go to, with all by which another run knows that it may go on."""
    from kvq_lab.sweep import SweepFile

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


def _sweep_tasks(wanted: tuple[str, ...] | None, asked: "EvaluationChoices") -> tuple[str, ...]:
    """What is wanted, or all that the files allow."""
    from kvq_lab.sweep import TASKS

    inputs = {"kld": asked.texts, "fim": asked.programs}
    if wanted is None:
        return tuple(task for task in TASKS if inputs.get(task, True))
    for task in wanted:
        if task not in TASKS:
            raise UsageError(
                f"{argument('--tasks')} {task} is not possible: choose from {', '.join(TASKS)}"
            )
        if not inputs.get(task, True):
            needed = "a text" if task == "kld" else "source files (.py) or infilling records"
            raise UsageError(
                f"{argument('--tasks')} {task} needs {needed}: kvq eval {argument('--sweep')} -m "
                "MODEL FILE"
            )
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


RUNS: "Mapping[str, Callable[[Engine, Namespace, list[str]], int]]" = {
    "drafts": _drafts, "edit": _edit, "predict": _predict, "sweep": _sweep,
}  # fmt: skip
