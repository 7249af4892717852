"""`kvq eval`: quality of a bundle at a KV setting, over texts or generated passkeys."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps import options, output, text_input

if TYPE_CHECKING:
    from kvq_apps.evaluation import Measurement
    from kvq_runtime.engine import Engine
    from kvq_runtime.session import Session

DEFAULT_CONTEXT = 2048
DEFAULT_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# What a passkey answer may add to a prompt that fills its length.
ANSWER_TOKENS = 16


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq eval`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] FILE",
        help="UTF-8 texts for ppl and kld (`-`: stdin); a first word that is no file is the model",
    )
    options.add_flags(parser, *options.ENGINE_FLAGS)
    options.add_flags(
        parser, "task", "context", "max-tokens", "depths", "trials", "seed",
        context="tokens per window (default: 2048); passkey takes a list of prompt lengths",
        seed="passkey: seed of keys and filler (default: 0)",
    )  # fmt: skip
    options.add_flags(parser.add_argument_group("cache"), *options.KV_FLAGS)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.task is None:
        raise UsageError("--task is missing; choose ppl, kld or passkey")
    model, files = _model_and_files(arguments)

    from kvq_apps.model_path import resolve_model
    from kvq_runtime.engine import Engine

    text = "".join(text_input.read_text(file) for file in files)
    engine_options = options.given(arguments, threads="threads", backend="backend")
    with Engine.open(resolve_model(model), **engine_options) as engine:
        progress = output.Progress()
        job = _job(engine, arguments, text, progress)
        settings = _settings(job)
        try:
            measured = _TASKS[arguments.task](job)
        finally:
            progress.clear()
    report = {
        "task": arguments.task,
        "model": engine.bundle.manifest.name,
        "backend": engine.backend.name,
        "context": max(job.lengths),
        **settings,
        "kv_bytes": measured.kv_bytes,
        "value": measured.value,
        "unit": measured.unit,
        "n": measured.n,
        **measured.details,
    }
    if arguments.json:
        output.print_json(report)
    else:
        _print(report)
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One evaluation: what to measure, and what each of its sessions is opened with."""

    engine: "Engine"
    arguments: Namespace
    text: str
    lengths: tuple[int, ...]
    session_options: dict[str, Any]
    progress: Callable[[int, int], None]

    def open_session(self) -> "Session":
        return self.engine.session(**self.session_options)

    def open_exact_session(self) -> "Session":
        """The same with an unquantised cache that holds everything."""
        tokens = self.session_options["context_tokens"]
        exact = {"k_bits": 16, "v_bits": 16, "kv_budget": f"{tokens}tok"}
        return self.engine.session(**(self.session_options | exact))


def _job(engine: "Engine", arguments: Namespace, text: str, progress: output.Progress) -> _Job:
    from kvq_apps.evaluation import SCORE_CHUNK_TOKENS

    room = ANSWER_TOKENS if arguments.task == "passkey" else 0
    lengths = arguments.context or (min(DEFAULT_CONTEXT, engine.config.context_length - room),)
    if min(lengths) < 1 or (len(lengths) > 1 and arguments.task != "passkey"):
        raise UsageError(
            f"--context {','.join(map(str, lengths))} is not possible: give one number of tokens; "
            "only passkey takes several"
        )
    context_tokens = max(lengths) + room
    session_options = {
        "kv_budget": f"{context_tokens}tok",
        "context_tokens": context_tokens,
        "chunk_tokens": SCORE_CHUNK_TOKENS,
    }
    return _Job(
        engine=engine,
        arguments=arguments,
        text=text,
        lengths=lengths,
        session_options=session_options | options.session_options(arguments),
        progress=progress,
    )


def _settings(job: _Job) -> dict[str, Any]:
    """How the KV setting reads in the report; refuses an impossible one before any work."""
    with job.open_session() as session:
        plan = session.config.plan
        return {
            "kv": output.kv_text(plan.k_bits, plan.v_bits),
            "policy": session.config.policy,
            "kv_budget": session.stats().kv_budget,
        }


def _ppl(job: _Job) -> "Measurement":
    from kvq_apps import evaluation

    tokenizer = job.engine.tokenizer
    return evaluation.perplexity(job.open_session, tokenizer, _windows(job), job.progress)


def _kld(job: _Job) -> "Measurement":
    from kvq_apps import evaluation

    return evaluation.divergence(
        job.open_session, job.open_exact_session, _windows(job), job.progress
    )


def _passkey(job: _Job) -> "Measurement":
    from kvq_apps import evaluation
    from kvq_runtime.config import check_seed

    depths = job.arguments.depths or DEFAULT_DEPTHS
    if not all(0 <= depth <= 1 for depth in depths):
        raise UsageError(f"--depths {depths} is not possible: give numbers from 0 to 1")
    trials = 1 if job.arguments.trials is None else job.arguments.trials
    if trials < 1:
        raise UsageError(f"--trials {trials} is not possible: give 1 or more")
    seed = job.arguments.seed or 0
    check_seed(seed)
    prompts = evaluation.passkey_prompts(
        job.engine.tokenizer, lengths=job.lengths, depths=depths, trials=trials, seed=seed
    )
    return evaluation.passkey(job.open_session, job.engine.tokenizer, prompts, job.progress)


_TASKS = {"ppl": _ppl, "kld": _kld, "passkey": _passkey}


def _windows(job: _Job) -> list[list[int]]:
    from kvq_apps import evaluation

    tokenizer = job.engine.tokenizer
    limit = job.arguments.max_tokens
    if limit is not None and limit < 1:
        raise UsageError(f"--max-tokens {limit} is not possible: give 1 or more")
    ids = tokenizer.encode(job.text)[:limit]
    return evaluation.windows(ids, tokenizer.control.start, job.lengths[0])


def _model_and_files(arguments: Namespace) -> tuple[str | None, list[str]]:
    """Without a written `-m`, a first word that is no file is the model."""
    model, files = arguments.model, list(arguments.words)
    may_be_model = bool(files) and files[0] != "-" and not Path(files[0]).is_file()
    if may_be_model and not options.written(arguments, "model"):
        model = files.pop(0)
    if arguments.task == "passkey" and files:
        raise UsageError("--task passkey makes its own prompts; leave out the files")
    if arguments.task != "passkey" and not files:
        raise UsageError(f"--task {arguments.task} needs a text: kvq eval -m MODEL FILE")
    return model, files


def _print(report: dict[str, Any]) -> None:
    rows = report.pop("rows", [])
    texts = {
        key: f"{value:.6g}" if isinstance(value, float) else value for key, value in report.items()
    }
    for key in ("kv_budget", "kv_bytes"):
        texts[key] = format_bytes(report[key])
    output.print_table(texts.items())
    if rows:
        output.print_data("")
        output.print_table((row.values() for row in rows), header=list(rows[0]))
