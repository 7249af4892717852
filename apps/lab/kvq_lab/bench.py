"""The suites of `kvq bench` that only a checkout has, and the flags that only they take."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from functools import partial

from kvq.errors import UsageError, argument
from kvq_apps import flags, options, output
from kvq_apps.commands.bench import (
    chosen_device,
    first_context,
    kv_settings,
    note_load,
    opened_files,
    refuse,
    run_sessions,
    run_suite,
    thread_counts,
)


def add_flags(parser: ArgumentParser, /) -> None:
    """The flags of these suites."""
    flags.add_flags(
        parser.add_argument_group("the laboratory's suites"),
        *flags.PREDICT_FLAGS, "drafts", "predict", "right", "drafters",
        kv_predict="suite ttft: what of prompts is predicted (default: "
        "{kvq_lab.ttft:TtftJob.predict})",
        drafts="numbers of drafts to write at once (default: 1,3,5)",
        predict="suite drafts: tokens of an answer at most",
    )  # fmt: skip


def check(arguments: Namespace, /) -> None:
    """Raises `UsageError` for a flag of a suite that was not asked for."""
    if arguments.drafts is not None and arguments.suite != "several":
        raise UsageError(
            f"{argument('--drafts')} needs {argument('--suite')} several, which writes several at "
            "once"
        )
    if arguments.suite != "ttft" and (arguments.kv_predict or arguments.kv_predict_with):
        raise UsageError(
            f"{argument('--kv-predict')} needs {argument('--suite')} ttft, which reads prompts "
            "with it and without, in turn"
        )


def _drafts(arguments: Namespace) -> int:
    """The suite `drafts`."""
    refuse(arguments, "batch", "plot", "kv-policy", "kv-read", "linear")
    from kvq_apps.bench import engines
    from kvq_lab import drafting

    peers = tuple(dict.fromkeys(arguments.peer or ()))
    if peers not in ((), (drafting.LLAMA,)):
        raise UsageError(
            f"{argument('--suite')} drafts knows {argument('--peer')} {drafting.LLAMA} only; "
            "leave others out"
        )
    engines.check_peers(peers)
    device = chosen_device(arguments)
    if peers and device != "cpu":
        raise UsageError(
            f"{argument('--peer')} {drafting.LLAMA} drafts with {argument('--device')} cpu only; "
            "leave one out"
        )
    given = options.given(
        arguments,
        repeat="repeat",
        contexts="context",
        tokens="predict",
        right="right",
        drafters="drafters",
    )
    job = drafting.DraftJob(replay=arguments.shape is not None, peer=bool(peers), **given)
    return run_sessions(arguments, drafting, job, device)


def _several(arguments: Namespace) -> int:
    """The suite `several`."""
    refuse(arguments, "batch", "device")
    refuse(arguments, "peer", "plot", "kv-policy", "linear")
    from kvq_lab import several

    given = options.given(arguments, repeat="repeat", drafts="drafts")
    job = several.SeveralJob(**given, **first_context(arguments, "context"))
    return run_sessions(arguments, several, job)


def _edit(arguments: Namespace) -> int:
    """The suite `edit`."""
    refuse(arguments, "batch", "device")
    for flag in ("plot", "kv-policy", "kv-read", "context"):
        if options.written(arguments, flag):
            raise UsageError(
                f"{argument('--suite')} edit knows no {argument(f'--{flag}')}; leave it out"
            )
    from kvq_apps.bench import engines, machine
    from kvq_lab import editing

    peers = tuple(dict.fromkeys(arguments.peer or ()))
    if peers not in ((), (editing.LLAMA,)) or (peers and arguments.shape is not None):
        raise UsageError(
            f"{argument('--suite')} edit knows {argument('--peer')} {editing.LLAMA}, on a model "
            "that predicts"
        )
    engines.check_peers(peers)
    files = opened_files(arguments)
    if not files.has_onnx:
        raise UsageError(
            f"{argument('--suite')} edit runs a bundle; {files.path} has no ONNX graph"
        )
    wanted = options.given(arguments, events="repeat", tokens="predict")
    if options.written(arguments, "kv"):
        wanted["kv"] = kv_settings(arguments, files)
    job = editing.EditJob(peer=bool(peers), **wanted)
    (threads,) = thread_counts(arguments)[:1]
    found = machine.describe(("kvq",))
    note_load(found)
    with output.Progress(quiet=not sys.stderr.isatty()) as progress:
        data = editing.measure(files, job, threads, progress, shape=arguments.shape is not None)
    data = {"suite": "edit", "machine": found, "threads": threads, **data}
    if arguments.json:
        output.print_json(data)
    else:
        editing.print_report(data)
    return 0


def _ttft(arguments: Namespace) -> int:
    """The suite `ttft`."""
    refuse(arguments, "batch", "device")
    refuse(arguments, "peer", "plot", "kv-policy", "kv-read", "linear")
    from kvq_lab import ttft

    given = options.given(arguments, repeat="repeat", contexts="context")
    given |= options.predictor(arguments)
    return run_sessions(arguments, ttft, ttft.TtftJob(**given))


def _chat(arguments: Namespace) -> int:
    """The suite `chat`."""
    refuse(arguments, "batch", "device")
    from kvq_lab import chat_app

    given = options.given(arguments, repeat="repeat") | first_context(arguments, "tokens")
    job = chat_app.ChatJob(**given)
    return run_suite(arguments, (), partial(chat_app.measure, job), chat_app.print_report)


def _fleet(arguments: Namespace) -> int:
    """The suite `fleet`."""
    from kvq_apps.model_path import default_name
    from kvq_lab import fleet

    refuse(arguments, "batch", "device")
    refuse(arguments, "shape", "threads", "context")
    model = arguments.bundle or arguments.model or default_name()
    job = fleet.FleetJob(model=model, **options.given(arguments, repeat="repeat"))
    return run_suite(arguments, (), partial(fleet.measure, job), fleet.print_report)


RUNS: Mapping[str, Callable[[Namespace], int]] = {
    "drafts": _drafts, "several": _several, "edit": _edit, "ttft": _ttft, "chat": _chat,
    "fleet": _fleet,
}  # fmt: skip
