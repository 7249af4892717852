"""The suites of `kvq bench` that only a checkout has, and the flags that only they take."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping

from kvq.errors import UsageError, argument
from kvq_apps.commands.bench import (
    chosen_device,
    gguf_argument,
    kv_settings,
    opened_files,
    refuse,
    run_sessions,
)
from kvq_apps.settings import flags, options


def add_flags(parser: ArgumentParser, /) -> None:
    """Adds the flags of these suites."""
    flags.add_flags(
        parser.add_argument_group("the laboratory's suites"),
        *flags.PREDICT_FLAGS, "predict", "right", "drafters",
        kv_predict="suite ttft: what of prompts is predicted (default: "
        "{kvq_lab.ttft:TtftJob.predict})",
        predict="suite drafts: tokens of an answer at most",
    )  # fmt: skip


def check(arguments: Namespace, /) -> None:
    """Raises `UsageError` for a flag of a suite that was not asked for."""
    if arguments.suite != "ttft" and (arguments.kv_predict or arguments.kv_predict_with):
        raise UsageError(
            f"{argument('--kv-predict')} needs {argument('--suite')} ttft, which reads prompts "
            "with it and without, in turn"
        )


def _agent(arguments: Namespace) -> int:
    """Runs the suite `agent`."""
    refuse(arguments, "device", "kv-policy", "kv-read", "shape")
    from kvq_lab import agent_replay

    chosen = options.keywords(arguments, turns="repeat")
    if options.on_command_line(arguments, "context"):
        chosen["context"] = max(arguments.context)
    for peer in arguments.peer or ():
        name, _, program = peer.partition("=")
        if name != "llama-server" or not program:
            raise UsageError(
                f"{argument('--peer')} {peer} is not possible; the suite agent has "
                "llama-server=PROGRAM"
            )
        gguf = gguf_argument(arguments)
        if gguf is None:
            raise UsageError(f"{argument('--peer')} {name} reads GGUF files; measure one of these")
        chosen |= {"peer": program, "peer_model": str(gguf.path)}
    return run_sessions(arguments, agent_replay, agent_replay.ReplayJob(**chosen))


def _drafts(arguments: Namespace) -> int:
    """Runs the suite `drafts`."""
    refuse(arguments, "peer", "kv-policy", "kv-read")
    from kvq_lab import drafting

    chosen = options.keywords(
        arguments,
        repeat="repeat",
        contexts="context",
        tokens="predict",
        right="right",
        drafters="drafters",
    )
    job = drafting.DraftJob(replay=arguments.shape is not None, **chosen)
    return run_sessions(arguments, drafting, job, chosen_device(arguments))


def _edit(arguments: Namespace) -> int:
    """Runs the suite `edit`."""
    refuse(arguments, "device", "peer", "kv-policy", "kv-read", "context", "shape")
    from kvq_lab import editing

    chosen = options.keywords(arguments, events="repeat")
    if options.on_command_line(arguments, "kv"):
        chosen["kv"] = kv_settings(arguments, opened_files(arguments))
    return run_sessions(arguments, editing, editing.EditJob(**chosen))


def _ttft(arguments: Namespace) -> int:
    """Runs the suite `ttft`."""
    refuse(arguments, "device", "peer", "kv-policy", "kv-read")
    from kvq_lab import ttft

    chosen = options.keywords(arguments, repeat="repeat", contexts="context")
    chosen |= options.predictor(arguments)
    return run_sessions(arguments, ttft, ttft.TtftJob(**chosen))


RUNS: Mapping[str, Callable[[Namespace], int]] = {
    "agent": _agent,
    "drafts": _drafts,
    "edit": _edit,
    "ttft": _ttft,
}
