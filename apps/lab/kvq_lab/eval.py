"""The tasks of `kvq eval` that only a checkout has, and its `--sweep`, with their flags."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.config import MOST_DRAFT_TOKENS, parse_kv
from kvq.errors import UsageError, argument
from kvq.formats import format_bytes
from kvq_apps.commands.eval import (
    DEFAULT_WINDOWS,
    choices_of,
    judge,
    model_and_files,
    one_length,
    print_report,
    refuse,
    report_head,
    show,
)
from kvq_apps.settings import flags, options
from kvq_apps.settings.flag_values import check_range, wholes
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_apps.commands.eval import Opened
    from kvq_apps.evaluation.cache_setting import CacheSetting
    from kvq_apps.evaluation.measurement import Measurement, Progress
    from kvq_apps.evaluation.tasks import Material
    from kvq_lab.sweep import Sweep, SweepFile
    from kvq_runtime.engine import Engine

# Lines to fill in, problems to solve and edits to make.
DEFAULT_LIMIT = 200
# Prompts with other files in front.
DEFAULT_PROMPTS = 16
LINE_TOKENS, PROGRAM_TOKENS, MATH_TOKENS, CALL_TOKENS = 64, 512, 320, 192
# Tools and a request of the task `calls`, beside its conversation.
PROMPT_TOKENS = 1024
# Places where several drafts are written, and tokens before each and of a draft.
DRAFTS_PLACES, DRAFTS_CONTEXT, DRAFTS_TOKENS = 100, 256, 10
DRAFTS = (1, 3, 5)
# Modes that take a flag; the others refuse it.
_OWNERS = {
    "execute": ("fim", "program"), "other-files": ("fim",),
    "drafts": ("drafts",), "drafts-method": ("drafts",),
    "git": ("replay",), "only": ("replay",), "pause": ("replay",),
    "out": ("sweep",), "plot": ("sweep",),
}  # fmt: skip


def add_flags(parser: ArgumentParser, /) -> None:
    """Adds the flags of these tasks and of `--sweep`."""
    tasks = parser.add_argument_group("the laboratory's tasks")
    flags.add_flags(
        tasks, "limit", "predict", "execute", "other-files", "drafts-method", "git", "only",
        "pause", repeated=("drafts-method",),
        predict="tokens of a line, a solution or a draft at most (default: "
        "{kvq_lab.eval:LINE_TOKENS}, program: {kvq_lab.eval:PROGRAM_TOKENS}, math: "
        "{kvq_lab.eval:MATH_TOKENS}, calls: {kvq_lab.eval:CALL_TOKENS}, drafts: "
        "{kvq_lab.eval:DRAFTS_TOKENS}, replay: {kvq_apps.completion.suggestions:DEFAULT_TOKENS})",
        drafts_method="a way to write drafts; may be repeated (default: "
        "each of {kvq_lab.drafts_quality:METHODS})",
    )  # fmt: skip
    tasks.add_argument(
        "--drafts",
        metavar="N,..",
        type=wholes,
        help="numbers of drafts to compare (default: {kvq_lab.eval:DRAFTS}) [KVQ_DRAFTS]",
    )
    flags.add_flags(
        parser.add_argument_group("--sweep"), "tasks", "policies", "budgets", "out", "plot",
        out="sweep: the JSON file to write, or to go on with",
        plot="draw quality over bytes",
    )  # fmt: skip


def check(arguments: Namespace, /) -> None:
    """Refuses what needs no model to be refused."""
    mode = arguments.task or ("sweep" if arguments.sweep else "table")
    for name, takers in _OWNERS.items():
        if mode not in takers and options.on_command_line(arguments, name):
            raise UsageError(
                f"{argument(f'--{name}')} is for {' and '.join(takers)} only; leave it out"
            )
    if mode == "program" and not arguments.execute:
        raise UsageError(
            f"{argument('--task')} program judges programs by running them; add "
            f"{argument('--execute')}, which runs what the "
            "model wrote on this machine, with limits but no sandbox"
        )
    if mode == "replay" and len(model_and_files(arguments)[1]) != (0 if arguments.git else 2):
        raise UsageError(
            f"{argument('--task')} replay compares two versions: kvq eval {argument('--task')} "
            f"replay -m MODEL OLD NEW, two files or two folders, or {argument('--git')} FOLDER"
        )
    if arguments.execute:
        from kvq_lab import execution

        execution.check_possible()
        output.print_note(
            "--execute runs programs the model wrote on this machine: with limits of time "
            f"({execution.TIMEOUT_S:.0f} s) and memory ({format_bytes(execution.MEMORY_BYTES)}), "
            "but not in a sandbox"
        )
    if arguments.plot is not None:
        from kvq_lab.plot import check_plot

        check_plot(arguments.plot)
    if arguments.sweep:
        from kvq_lab.sweep import check_out

        if arguments.out is None:
            raise UsageError(
                f"{argument('--sweep')} needs {argument('--out')} FILE.json, the file it writes "
                "and goes on with"
            )
        check_out(Path(arguments.out))


def _limits(arguments: Namespace, limit: int, tokens: int) -> tuple[int, int]:
    """Returns `--limit` and `--predict`, or these defaults. Raises `UsageError`."""
    values = {"limit": limit, "predict": tokens}
    values |= options.keywords(arguments, limit="limit", predict="predict")
    check_range(1, **values)
    return values["limit"], values["predict"]


def _edit(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Runs the task `edit`: edits of programs, in a cache that moves what follows them."""
    from kvq_lab.edit_quality import edit_cases, editing
    from kvq_lab.text_files import training_texts

    limit, _ = _limits(arguments, DEFAULT_LIMIT, LINE_TOKENS)
    seed, context_tokens = choices_of(arguments).seed, one_length(engine, arguments)

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        texts = [text for file in files for text in training_texts(file)]
        cases = edit_cases(
            engine.tokenizer, texts, limit=limit, context_tokens=context_tokens, seed=seed
        )
        return editing(*opened, cases, progress)

    return judge(engine, arguments, context_tokens, 0, measure)


def _passages(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Runs the task `passages`: other files in front of a program, taken over from prompts."""
    from kvq_apps.terminal.text_input import read_text
    from kvq_lab.passage_quality import passage_prompts, taking_over

    limit, _ = _limits(arguments, DEFAULT_PROMPTS, LINE_TOKENS)
    seed, context_tokens = choices_of(arguments).seed, one_length(engine, arguments)

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        prompts = passage_prompts(
            engine.tokenizer,
            [(Path(file).name, read_text(file)) for file in files],
            limit=limit,
            context_tokens=context_tokens,
            seed=seed,
        )
        return taking_over(*opened, prompts, progress)

    return judge(engine, arguments, context_tokens, LINE_TOKENS, measure)


def _calls(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Runs the task `calls`: calls of tools after a conversation that shows the files."""
    from kvq_lab.text_files import training_texts
    from kvq_lab.tool_calls import call_problems, calling

    limit, tokens = _limits(arguments, DEFAULT_LIMIT, CALL_TOKENS)
    seed, context_tokens = choices_of(arguments).seed, one_length(engine, arguments)

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        texts = [text for file in files for text in training_texts(file)]
        problems, verdicts = call_problems(
            engine.tokenizer, texts, limit=limit, seed=seed, context_tokens=context_tokens
        )
        return calling(opened[0], problems, verdicts, tokens, progress)

    return judge(engine, arguments, context_tokens, PROMPT_TOKENS + tokens, measure)


def _drafts(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Runs the task `drafts`: the best of several drafts against what stands there."""
    from kvq_apps.names.ngram_file import writer_for
    from kvq_lab.drafts_quality import METHODS, drafting, places
    from kvq_lab.text_files import training_texts

    limit, length = _limits(arguments, DRAFTS_PLACES, DRAFTS_TOKENS)
    # The environment gives a single number or name.
    counts = arguments.drafts or DRAFTS
    counts = (counts,) if isinstance(counts, int) else counts
    methods = arguments.drafts_method or METHODS
    methods = (methods,) if isinstance(methods, str) else methods
    seed, context_tokens = choices_of(arguments).seed, one_length(engine, arguments, DRAFTS_CONTEXT)

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        texts = [text for file in files for text in training_texts(file)]
        chosen = places(
            engine.tokenizer, texts, count=limit, context=context_tokens, length=length, seed=seed
        )
        return drafting(
            opened[0],
            partial(writer_for, tokenizer=engine.tokenizer),
            engine.tokenizer,
            chosen,
            methods,
            counts,
            progress,
        )

    room = MOST_DRAFT_TOKENS
    return judge(engine, arguments, context_tokens, room, measure, draft_tokens=room)


def _replay(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Runs the task `replay`: hunks that somebody wrote, typed in an editor with suggestions."""
    from kvq_apps.commands.lsp import DEFAULT_CONTEXT
    from kvq_apps.completion.completion_engine import CompletionEngine
    from kvq_apps.completion.suggestions import DEFAULT_TOKENS
    from kvq_apps.names.ngram_file import writer_for
    from kvq_lab.text_pairs import commit_pairs, file_pairs
    from kvq_lab.typing_replay import TypingReplay, report

    limit, tokens = _limits(arguments, DEFAULT_LIMIT, DEFAULT_TOKENS)
    context_tokens, only = one_length(engine, arguments, DEFAULT_CONTEXT), arguments.only or "*"
    pairs = (
        commit_pairs(arguments.git, only) if arguments.git else file_pairs(files[0], files[1], only)
    )
    service = CompletionEngine(
        engine,
        writer_for("branches", engine.tokenizer),
        tokens=tokens,
        session_options={"context_tokens": context_tokens} | options.session_options(arguments),
        next_edits=True,
    )
    with closing(service), output.ProgressBar() as progress:
        replay = TypingReplay(service, arguments.pause or "word")
        replay.type_pairs(pairs, limit, progress)
    head = {"task": "replay"} | report_head(engine, context_tokens)
    return show(arguments, head | report(replay), print_report)


def _fim(engine: "Engine", arguments: Namespace, files: Sequence[str]) -> int:
    """Runs the task `fim`: lines of programs to fill in."""
    from kvq_lab import execution, infilling

    limit, tokens = _limits(arguments, DEFAULT_LIMIT, LINE_TOKENS)
    seed, context_tokens = choices_of(arguments).seed, one_length(engine, arguments)
    passes = execution.passes if arguments.execute else None

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        samples = infilling.read_samples(files, seed=seed)[:limit]
        other_files = files if arguments.other_files else ()
        room = context_tokens - tokens
        gaps = infilling.gaps(engine.tokenizer, samples, room, tokens, other_files)
        return infilling.infilling(opened[0], engine.tokenizer, gaps, tokens, progress, passes)

    return judge(engine, arguments, context_tokens, 0, measure)


def _problems(
    task: str, tokens: int, engine: "Engine", arguments: Namespace, files: Sequence[str]
) -> int:
    """Runs the tasks `program` and `math`."""
    from kvq_lab import problems

    limit, tokens = _limits(arguments, DEFAULT_LIMIT, tokens)
    seed, context_tokens = choices_of(arguments).seed, one_length(engine, arguments)

    def measure(opened: "Opened", progress: "Progress") -> "Measurement":
        chosen = problems.problems(
            task,
            engine.tokenizer,
            files,
            limit=limit,
            seed=seed,
            most_tokens=context_tokens - tokens,
        )
        return problems.solving(opened[0], chosen, tokens, progress, problems.UNITS[task])

    return judge(engine, arguments, context_tokens, 0, measure)


def _sweep(engine: "Engine", arguments: Namespace, files: list[str]) -> int:
    """Runs `--sweep`."""
    from kvq_apps.evaluation.cache_setting import UNQUANTIZED
    from kvq_lab import sweep, sweep_report

    refuse(arguments, "--sweep", "kv-budget", "kv-offload", "kv-policy")
    context_tokens = one_length(engine, arguments)
    choices = choices_of(arguments, max_tokens=DEFAULT_WINDOWS * context_tokens)
    tasks = _sweep_tasks(arguments.tasks, files)
    material = choices.material(engine.tokenizer, tasks, context_tokens, files=files)
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
    file = _sweep_file(engine, arguments, plan, material, choices.seed)
    sweep.check_settings(engine.session, plan)
    with output.ProgressBar() as progress:
        sweep.run(engine.session, material, plan, file, progress)
    if arguments.plot is not None:
        sweep_report.draw_sweep(arguments.plot, file.data)
    return show(arguments, file.data, sweep_report.print_sweep)


def _sweep_file(
    engine: "Engine", arguments: Namespace, plan: "Sweep", material: "Material", seed: int
) -> "SweepFile":
    """Opens the file of results, with all by which another run knows that it may go on."""
    from kvq_apps.evaluation.tasks import TEXT_TASKS
    from kvq_lab.sweep import SweepFile

    read: dict[str, dict[str, Any]] = {}
    for task in plan.tasks:
        sequences = (
            [list(ids) for ids in material.windows]
            if task in TEXT_TASKS
            else [question.ids_with_answer for question in material.questions[task]]
        )
        digest = sha256(json.dumps(sequences).encode()).hexdigest()
        read[task] = {"sequences": len(sequences), "sha256": digest}
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
        read,
    )


def _sweep_tasks(written: tuple[str, ...] | None, files: Sequence[str]) -> tuple[str, ...]:
    """Returns what `--tasks` says, or all that the files allow. Raises `UsageError`."""
    from kvq_lab.sweep import TASKS

    for task in written or ():
        if task not in TASKS:
            raise UsageError(
                f"{argument('--tasks')} {task} is not possible: choose from {', '.join(TASKS)}"
            )
        if task == "kld" and not files:
            raise UsageError(
                f"{argument('--tasks')} kld needs a text: kvq eval {argument('--sweep')} -m "
                "MODEL FILE"
            )
    possible = tuple(task for task in TASKS if files or task != "kld")
    return tuple(dict.fromkeys(written or possible))


def _sweep_settings(arguments: Namespace) -> "tuple[CacheSetting, ...]":
    """Reads policies `NAME[:option=value,...][@K:V]`; without widths those of `--kv`, or 8:8."""
    from kvq.policies import POLICIES
    from kvq_apps.evaluation.cache_setting import CacheSetting

    widths = {"k_bits": 8, "v_bits": 8} | options.kv_bits(arguments)
    settings: list[CacheSetting] = []
    for text in arguments.policies or tuple(POLICIES):
        policy, _, pair = text.partition("@")
        if pair:
            k_bits, v_bits = parse_kv(pair, f"--policies {policy}@")
        else:
            k_bits, v_bits = widths["k_bits"], widths["v_bits"]
        settings.append(CacheSetting(policy=policy, k_bits=k_bits, v_bits=v_bits))
    return tuple(dict.fromkeys(settings))


RUNS: "Mapping[str, Callable[[Engine, Namespace, list[str]], int]]" = {
    "calls": _calls,
    "drafts": _drafts,
    "edit": _edit,
    "fim": _fim,
    "passages": _passages,
    "program": partial(_problems, "program", PROGRAM_TOKENS),
    "replay": _replay,
    "math": partial(_problems, "math", MATH_TOKENS),
    "sweep": _sweep,
}
