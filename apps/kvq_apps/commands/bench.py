"""`kvq bench`: measures decode and prefill speed at given depths, also of other engines."""

import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvq.config import DEFAULT_READ, parse_budget, parse_kv, parse_weights
from kvq.errors import ModelError, UsageError, argument
from kvq.files import path_of
from kvq_apps import laboratory
from kvq_apps.settings import flag_values, flags, options
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_apps.bench.measure import SpeedJob
    from kvq_runtime.backends import ModelFiles

DEFAULT_CONTEXTS = (64, 4096)
# With fewer tokens there is little to give up.
DEFAULT_PRESSED_CONTEXTS = (4096,)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq bench`."""
    parser.add_argument("bundle", nargs="?", metavar="MODEL", help="see --model")
    flags.add_flags(
        parser, "model", "device", "weights-budget", "offline", "context",
        device="suites speed and drafts: device to run on, ours and peers: %(choices)s "
        "(default: cpu)",
        context=f"depths in tokens (default: {','.join(map(str, DEFAULT_CONTEXTS))})",
    )  # fmt: skip
    flags.add_flags(parser, "shape")
    parser.add_argument(
        "--wbits",
        metavar="N",
        type=flag_values.whole,
        help="bits of the shape's weights: 3, 4, 5, 6 or 8 (default: 4) [KVQ_WBITS]",
    )
    parser.add_argument(
        "--threads",
        "-t",
        metavar="N,..",
        type=flag_values.wholes,
        help="thread counts to measure with (default: as for `kvq run`) [KVQ_THREADS]",
    )
    flags.add_flags(parser, "peer")
    flags.add_flags(
        parser.add_argument_group("cache"),
        *flags.KV_WIDTHS, "kv", "kv-read", "kv-policy", "kv-budget",
        kv="bits of cached keys and values, or several settings: 4:2,8:8,fp (fp: an "
        "unquantised cache)",
        kv_read="also time steps that read otherwise, each of several: 25%%,all",
        kv_policy="also time decode with too small a budget and each of several policies: "
        "uniform,budget,h2o:recent=0.3",
        kv_budget="the budget of --kv-policy: 8MiB, 1000tok, or 25%% of what the whole context "
        "(--context) takes in fp16",
    )  # fmt: skip
    flags.add_flags(parser, "suite", "tune")
    flags.add_flags(
        parser.add_argument_group("measuring"),
        *("rows", "repeat", "prefill", "prefill-limit", "chats"),
    )
    laboratory.extension("bench").add_flags(parser)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.tune:
        return _run_tune(arguments)
    if arguments.chats is not None and arguments.suite != "serve":
        raise UsageError(
            f"{argument('--chats')} needs {argument('--suite')} serve, the pool that answers them"
        )
    laboratory.extension("bench").check(arguments)
    suite = arguments.suite or "speed"
    if suite == "serve":
        refuse(arguments, "device", "weights-budget")
    own_suites = {"speed": _run_speed, "serve": _run_serve}
    return (own_suites.get(suite) or laboratory.runner("bench", suite, f"--suite {suite}"))(
        arguments
    )


def _run_speed(arguments: Namespace) -> int:
    peers = tuple(dict.fromkeys(arguments.peer or ()))

    from kvq_apps.bench import engines, machine, measure, report

    device = chosen_device(arguments)
    engines.check_peers(peers, device)
    threads = thread_counts(arguments)
    files, gguf = opened_files(arguments), gguf_argument(arguments)
    engine = engines.default_engine(files)
    job = _job(arguments, files, peers, device)
    if engine != engines.KVQ:
        _refuse_without_graph(files, job)
    machine_facts = machine.describe((engine, *peers), device)
    note_load(machine_facts)
    show = report.note_rows if arguments.json else partial(report.print_rows, job=job)
    if not arguments.json:
        report.print_head(files, machine_facts)
    rows: list[dict[str, Any]] = []
    with output.ProgressBar(quiet=not sys.stderr.isatty()) as progress:
        for count in threads:
            for depth_rows in measure.measure(files, job, count, progress, gguf):
                show(depth_rows)
                rows += depth_rows
    if arguments.json:
        output.print_json(report.report(files, job, threads, machine_facts, rows))
    return 0


def _refuse_without_graph(files: "ModelFiles", job: "SpeedJob") -> None:
    """Raises `UsageError` for what is measured of a bundle's graph alone."""
    reasons = {
        f"{argument('--peer')} {','.join(job.peers)}": job.peers and "peers run on its weights",
        f"{argument('--device')} {job.device}": job.device != "cpu" and "a device runs bundles",
        argument("--kv-policy"): job.kv_policy and "llama.cpp's cache gives nothing up",
    }
    for flag, reason in reasons.items():
        if reason:
            raise UsageError(
                f"{flag} is not possible: {files.path} has no ONNX graph, and {reason}; leave the "
                "flag out, or give a bundle"
            )


def note_load(machine_facts: dict[str, Any]) -> None:
    """Says on stderr that the machine is busy, where it is."""
    from kvq_apps.bench import machine

    if machine.busy(machine_facts):
        output.print_note(
            f"the machine is busy (load {machine_facts['load']:.1f} on {machine_facts['cores']} "
            "cores): the medians will be too long, more so for engines that wait spinning"
        )


def _run_serve(arguments: Namespace) -> int:
    refuse(arguments, "peer", "kv-policy", "kv-read")
    if arguments.shape is not None and arguments.chats is None:
        raise UsageError(
            f"a {argument('--shape')} has no tokenizer, which the server needs; add "
            f"{argument('--chats')} 1,4, which does without the server"
        )
    from kvq_apps.bench import chats
    from kvq_apps.bench import serve_bench as serving

    job_options = options.keywords(arguments, repeat="repeat") | first_context(arguments, "context")
    if arguments.chats is None:
        return run_sessions(arguments, serving, serving.ServeJob(**job_options))
    return run_sessions(arguments, chats, chats.ChatsJob(chats=arguments.chats, **job_options))


def refuse(arguments: Namespace, *unknown: str) -> None:
    """Raises `UsageError` for a flag that the suite does not have."""
    for flag in unknown:
        if options.on_command_line(arguments, flag):
            raise UsageError(
                f"{argument('--suite')} {arguments.suite} knows no {argument('--' + flag)}; "
                "leave it out"
            )


def first_context(arguments: Namespace, name: str) -> dict[str, Any]:
    """Returns the first depth of `--context` as the argument `name` of a job, if there is one."""
    return {name: arguments.context[0]} if arguments.context else {}


def run_sessions(arguments: Namespace, suite: Any, job: Any, device: str = "cpu") -> int:
    """Runs a suite whose sessions are of one model, with one number of threads.

    `suite` is a module: `measure(setup, job)` returns what `--json` prints, and `print_report`
    prints that as a table.
    """
    from kvq_apps.bench import machine
    from kvq_apps.bench.suite import Setup

    files, (threads, *_) = opened_files(arguments), thread_counts(arguments)
    machine_facts = machine.describe(("kvq",), device)
    note_load(machine_facts)
    with output.ProgressBar(quiet=not sys.stderr.isatty()) as progress:
        setup = Setup(
            files=files, session_options=options.session_options(arguments), threads=threads,
            progress=progress, device=device,
        )  # fmt: skip
        measured = suite.measure(setup, job)
    facts = {"suite": arguments.suite, "machine": machine_facts, "threads": threads}
    (output.print_json if arguments.json else suite.print_report)(facts | measured)
    return 0


def _run_tune(arguments: Namespace) -> int:
    """Runs `--tune`: measures what is fastest on this machine and keeps it."""
    from kvq_apps.bench.tune import tune
    from kvq_runtime.machine import tuning

    data = tune(lambda name: output.print_note(f"measuring {name}; let other programs rest"))
    tuning.save_tuning(tuning.Tuning(**data["tuning"]))
    if arguments.json:
        output.print_json(data)
    else:
        output.print_table((key, str(value)) for key, value in output.flat(data["tuning"]))
    output.print_note(f"kept in {tuning.tuning_path()}; remove it to go back to what is built in")
    return 0


def chosen_device(arguments: Namespace) -> str:
    """Returns the device that `--device` means here. Raises `BackendError` for an unusable one."""
    from kvq_runtime.machine import gpu

    return gpu.usable_device(arguments.device or gpu.PROCESSOR)


def thread_counts(arguments: Namespace) -> tuple[int, ...]:
    """Returns the numbers of threads to measure with, each once. Raises `UsageError`."""
    from kvq_runtime.machine.tuning import default_threads

    threads = arguments.threads or (default_threads(),)
    # The environment gives a single number.
    threads = (threads,) if isinstance(threads, int) else threads
    if min(threads) < 1:
        raise UsageError(f"{argument('--threads')} {min(threads)} is not possible: give 1 or more")
    return tuple(dict.fromkeys(threads))


def opened_files(arguments: Namespace) -> "ModelFiles":
    """Returns the files of the model or shape. Raises `UsageError` for two of them, `KvqError`."""
    from kvq_apps.bench.model_shapes import shape_bundle
    from kvq_apps.names.model_path import resolve_model
    from kvq_runtime.engine import open_files

    models = [name for name in (arguments.bundle, arguments.shape) if name is not None]
    models += [arguments.model] if options.on_command_line(arguments, "model") else []
    if len(models) > 1:
        raise UsageError(
            f"{' and '.join(models)} were given; name one model, or one {argument('--shape')}"
        )
    if arguments.shape is not None:
        return open_files(shape_bundle(arguments.shape, bits=arguments.wbits or 4))
    return open_files(resolve_model(arguments.bundle or arguments.model))


def gguf_argument(arguments: Namespace) -> "ModelFiles | None":
    """Returns the GGUF file on the command line, if there is one."""
    from kvq_runtime.bundle.gguf_file import GgufFile
    from kvq_runtime.bundle.gguf_format import is_gguf

    path = path_of(arguments.bundle or arguments.model or "", ModelError)
    return GgufFile.open(path) if arguments.shape is None and is_gguf(path) else None


def _job(
    arguments: Namespace, files: "ModelFiles", peers: tuple[str, ...], device: str
) -> "SpeedJob":
    from kvq_apps.bench.measure import SpeedJob
    from kvq_runtime.engine import warn_beyond_training

    kv = kv_settings(arguments, files)
    policies, budget = _pressure(arguments, kv)
    weights_budget = arguments.weights_budget
    contexts = arguments.context or (DEFAULT_PRESSED_CONTEXTS if policies else DEFAULT_CONTEXTS)
    warn_beyond_training(max(contexts), files.context_length)
    return SpeedJob(
        contexts=contexts,
        kv=kv,
        kv_read=_reads(arguments),
        kv_policy=policies,
        kv_budget=budget,
        peers=peers,
        device=device,
        weights_budget=None if weights_budget is None else parse_weights(weights_budget),
        **options.keywords(
            arguments,
            rows="rows",
            repeat="repeat",
            prefill_tokens="prefill",
            prefill_limit_s="prefill-limit",
        ),
    )


def _reads(arguments: Namespace) -> tuple[str, ...]:
    """Returns the shares and selectors of the command line to time besides whole reads."""
    from kvq.selectors import rule_named

    if not options.on_command_line(arguments, "kv-read"):
        return ()
    reads = tuple(dict.fromkeys(flag_values.policies(arguments.kv_read)))
    for read in reads:
        rule_named(read)
    return tuple(read for read in reads if read != DEFAULT_READ)


def _pressure(arguments: Namespace, kv: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """Returns the policies and the budget to measure with, only if the command line has them.

    `KVQ_KV_BUDGET` sets the budget of all sessions, but does not ask to measure its cost.
    """
    from kvq.config import DEFAULT_POLICY
    from kvq.policies import policy_named

    if not any(options.on_command_line(arguments, name) for name in ("kv-policy", "kv-budget")):
        return (), None
    if arguments.kv_budget is None:
        raise UsageError(
            f"{argument('--kv-policy')} needs a {argument('--kv-budget')} too small for the "
            f"context, such as {argument('--kv-budget')} 25%"
        )
    policies = tuple(dict.fromkeys(flag_values.policies(arguments.kv_policy or DEFAULT_POLICY)))
    for policy in policies:
        policy_named(policy)
    parse_budget(arguments.kv_budget)
    if "fp" in kv:
        raise UsageError(
            f"an unquantised cache gives nothing up: {argument('--kv')} fp and "
            f"{argument('--kv-policy')} exclude"
        )
    return policies, arguments.kv_budget


def kv_settings(arguments: Namespace, files: "ModelFiles") -> tuple[str, ...]:
    """Returns the KV settings of kvq to measure, as `--kv` writes them, each once."""
    several = str(arguments.kv or "").split(",")
    if len(several) > 1:
        if options.keywords(arguments, k="kbits", v="vbits"):
            raise UsageError(
                f"{argument('--kbits')} and {argument('--vbits')} refine one setting; "
                f"{argument('--kv')} names several"
            )
        pairs = [parse_kv(text) for text in several]
    else:
        bits = options.kv_bits(arguments)
        plan = files.kv
        pairs = [(bits.get("k_bits", plan.k_bits), bits.get("v_bits", plan.v_bits))]
    return tuple(dict.fromkeys(output.kv_text(*pair) for pair in pairs))
