"""`kvq bench`: decode and prefill speed at given depths, also against other engines."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.config import DEFAULT_READ, parse_budget, parse_kv
from kvq.errors import UsageError, argument
from kvq_apps import flag_values, flags, laboratory, options, output

if TYPE_CHECKING:
    from kvq_apps.bench.measure import SpeedJob
    from kvq_apps.bench.suite import Suite
    from kvq_runtime.backends import ModelFiles

DEFAULT_CONTEXTS = (64, 4096)
# In fewer tokens there is little to give up.
DEFAULT_PRESSED_CONTEXTS = (4096,)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq bench`."""
    _add_model(parser)
    _add_cache(parser.add_argument_group("cache"))
    flags.add_flags(parser, "suite", "tune")
    _add_measuring(parser.add_argument_group("measuring"))
    laboratory.part("bench").add_flags(parser)


def _add_model(parser: ArgumentParser) -> None:
    """What is measured, and on what."""
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
        metavar="N,..",
        type=flag_values.wholes,
        default=(),
        help="bits of the shape's weights: 4 or 8; those of a second number are measured beside "
        "(default: 4) [KVQ_WBITS]",
    )
    parser.add_argument(
        "--threads",
        metavar="N,..",
        type=flag_values.wholes,
        help="thread counts to measure with (default: as for `kvq run`) [KVQ_THREADS]",
    )
    flags.add_flags(parser, "peer", "plot", plot="draw decode over context")


def _add_cache(cache: flags.Group) -> None:
    """How ours keeps its cache."""
    flags.add_flags(
        cache, *flags.KV_WIDTHS, "kv",
        kv="both at once, or several settings: 4:2,8:8,fp (fp: an unquantised cache)",
    )  # fmt: skip
    flags.add_flags(
        cache, "kv-read", "kv-policy", "kv-budget",
        kv_read="also time steps that read otherwise, each of several: 25%%,all",
        kv_policy="also time decode with too small a budget and each of several policies: "
        "uniform,budget,h2o:recent=0.3",
        kv_budget="the budget of --kv-policy: 8MiB, 1000tok, or 25%% of what the whole context "
        "(--context) takes in fp16",
    )  # fmt: skip


def _add_measuring(measuring: flags.Group) -> None:
    """How often, and how much at once."""
    flags.add_flags(
        measuring, "rows", "batch", "repeat", "prefill", "prefill-limit", "chats",
    )  # fmt: skip
    measuring.add_argument(
        "--linear",
        metavar="NAME,..",
        type=flag_values.names,
        default=(),
        help="operators to multiply the same weights with: kvq, ort, or hi, which is kvq on the "
        "upper nibbles of 8-bit weights (default: the model's own) [KVQ_LINEAR]",
    )


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.tune:
        return _run_tune(arguments)
    if arguments.chats is not None and arguments.suite != "serve":
        raise UsageError(
            f"{argument('--chats')} needs {argument('--suite')} serve, the pool that answers them"
        )
    laboratory.part("bench").check(arguments)
    suite = arguments.suite or "speed"
    if suite == "serve":
        refuse(arguments, "batch", "device", "weights-budget")
    own = {"speed": _run_speed, "serve": _run_serve}
    return (own.get(suite) or laboratory.runs("bench", suite, f"--suite {suite}"))(arguments)


def _run_speed(arguments: Namespace) -> int:
    """The suite `speed`."""
    peers = tuple(dict.fromkeys(arguments.peer or ()))

    from kvq_apps.bench import engines, machine, measure, plot, report
    from kvq_apps.bench.shapes import shape_bundle
    from kvq_runtime.engine import open_files

    device = chosen_device(arguments)
    engines.check_peers(peers, device)
    if arguments.plot is not None:
        plot.check_plot(arguments.plot)
    threads = thread_counts(arguments)
    files, gguf = opened_files(arguments), _gguf(arguments)
    widths = _widths(arguments)[1:] if arguments.shape else ()
    beside = [open_files(shape_bundle(arguments.shape, bits=bits)) for bits in widths]
    own = engines.own_engine(files)
    if peers and own != engines.OURS:
        raise UsageError(
            f"{argument('--peer')} {','.join(peers)} is not possible: {files.path} has no ONNX "
            "graph, and peers run on its weights; leave the flag out, or give a bundle"
        )
    job = _job(arguments, files, peers, device)
    if job.kv_policy and own != engines.OURS:
        raise UsageError(
            f"{argument('--kv-policy')} is not possible: {files.path} runs on llama.cpp, whose "
            "cache gives nothing up; leave the flag out, or give a bundle"
        )
    found = machine.describe((own, *peers), device)
    note_load(found)
    rows: list[dict[str, Any]] = []
    with output.Progress(quiet=not sys.stderr.isatty()) as progress:
        for count in threads:
            rows += measure.measure(files, job, count, progress, beside=beside, gguf=gguf)
    data = report.report(files, job, threads, found, rows)
    if arguments.plot is not None:
        plot.draw(arguments.plot, data)
    if arguments.json:
        output.print_json(data)
    else:
        report.print_report(data)
    return 0


def note_load(found: dict[str, Any]) -> None:
    """Says on stderr that the machine is busy, where it is."""
    from kvq_apps.bench import machine

    if machine.busy(found):
        output.print_note(
            f"the machine is busy (load {found['load']:.1f} on {found['cores']} cores): "
            "the medians will be too long, more so for engines that wait spinning"
        )


def _run_serve(arguments: Namespace) -> int:
    """The suite `serve`."""
    refuse(arguments, "peer", "plot", "kv-policy", "kv-read", "linear")
    if arguments.shape is not None and arguments.chats is None:
        raise UsageError(
            f"a {argument('--shape')} has no tokenizer, which the server needs; add "
            f"{argument('--chats')} 1,4, which does without the server"
        )
    from kvq_apps.bench import chats, serving

    given = options.given(arguments, repeat="repeat") | first_context(arguments, "context")
    if arguments.chats is None:
        return run_sessions(arguments, serving, serving.ServeJob(**given))
    return run_sessions(arguments, chats, chats.ChatsJob(chats=arguments.chats, **given))


def refuse(arguments: Namespace, *unknown: str) -> None:
    """Raises `UsageError` for a flag that the suite does not know."""
    for flag in unknown:
        if getattr(arguments, flag) if flag == "linear" else options.written(arguments, flag):
            raise UsageError(
                f"{argument('--suite')} {arguments.suite} knows no {argument('--' + flag)}; "
                "leave it out"
            )


def first_context(arguments: Namespace, name: str) -> dict[str, Any]:
    """The job's argument `name`, where a depth was given."""
    return {name: arguments.context[0]} if arguments.context else {}


def run_sessions(arguments: Namespace, suite: "Suite", job: Any, device: str = "cpu") -> int:
    """A suite whose sessions are of one model, at one number of threads."""
    from kvq_apps.bench.suite import Setup

    files, (threads, *_) = opened_files(arguments), thread_counts(arguments)
    session_options = options.session_options(arguments)

    def measured(progress: output.Shown) -> dict[str, Any]:
        setup = Setup(
            files=files, session_options=session_options, threads=threads, progress=progress,
            device=device,
        )  # fmt: skip
        return {"threads": threads, **suite.measure(setup, job)}

    return run_suite(arguments, ("kvq",), measured, suite.print_report, device)


def run_suite(
    arguments: Namespace,
    engines: tuple[str, ...],
    measured: Callable[[output.Shown], dict[str, Any]],
    print_report: Callable[[dict[str, Any]], None],
    device: str = "cpu",
) -> int:
    """What `measured` gives, on a machine that is described first, printed."""
    from kvq_apps.bench import machine

    found = machine.describe(engines, device)
    note_load(found)
    with output.Progress(quiet=not sys.stderr.isatty()) as progress:
        data = {"suite": arguments.suite, "machine": found, **measured(progress)}
    if arguments.json:
        output.print_json(data)
    else:
        print_report(data)
    return 0


def _run_tune(arguments: Namespace) -> int:
    """`--tune`: what is fastest on this machine, kept for all that runs on it later."""
    from kvq_apps.bench.tune import tune
    from kvq_runtime import tuning

    data = tune(lambda what: output.print_note(f"measuring {what}; let other programs rest"))
    tuning.keep(tuning.Tuning(**data["tuning"]))
    if arguments.json:
        output.print_json(data)
    else:
        output.print_table((key, str(value)) for key, value in output.flat(data["tuning"]))
    output.print_note(f"kept in {tuning.tuning_path()}; remove it to go back to what is built in")
    return 0


def chosen_device(arguments: Namespace) -> str:
    """What `--device` comes to here. Raises `BackendError` for one that cannot be used."""
    from kvq_runtime import gpu

    return gpu.chosen(arguments.device or gpu.PROCESSOR)


def thread_counts(arguments: Namespace) -> tuple[int, ...]:
    """The numbers of threads to measure with, each once. Raises `UsageError`."""
    from kvq_runtime.tuning import default_threads

    threads = arguments.threads or (default_threads(),)
    # The environment gives a single number.
    threads = (threads,) if isinstance(threads, int) else threads
    if min(threads) < 1:
        raise UsageError(f"{argument('--threads')} {min(threads)} is not possible: give 1 or more")
    return tuple(dict.fromkeys(threads))


def _widths(arguments: Namespace) -> tuple[int, ...]:
    """Bits of the weights of a shape, each once. Raises `UsageError` for those there are not."""
    widths = arguments.wbits or (4,)
    # The environment gives a single number.
    widths = (widths,) if isinstance(widths, int) else tuple(dict.fromkeys(widths))
    for bits in widths:
        if bits not in (4, 8):
            raise UsageError(f"{argument('--wbits')} {bits} is not possible: choose 4, 8 or both")
    return widths


def opened_files(arguments: Namespace) -> "ModelFiles":
    """The files of the one model or shape. Raises `UsageError` for two, `KvqError`."""
    from kvq_apps.bench.shapes import shape_bundle
    from kvq_apps.model_path import resolve_model
    from kvq_runtime.engine import open_files

    written = [name for name in (arguments.bundle, arguments.shape) if name is not None]
    written += [arguments.model] if options.written(arguments, "model") else []
    if len(written) > 1:
        raise UsageError(
            f"{' and '.join(written)} were given; name one model, or one {argument('--shape')}"
        )
    if arguments.shape is not None:
        return open_files(shape_bundle(arguments.shape, bits=_widths(arguments)[0]))
    return open_files(resolve_model(arguments.bundle or arguments.model))


def _gguf(arguments: Namespace) -> "ModelFiles | None":
    """The GGUF file that was given, if one was."""
    from kvq_runtime.gguf_file import GgufFile
    from kvq_runtime.gguf_format import is_gguf

    given = Path(arguments.bundle or arguments.model or "").expanduser()
    return GgufFile.open(given) if arguments.shape is None and is_gguf(given) else None


def _job(
    arguments: Namespace, files: "ModelFiles", peers: tuple[str, ...], device: str
) -> "SpeedJob":
    from kvq_apps.bench.measure import SpeedJob
    from kvq_runtime.engine import warn_beyond_training

    kv = kv_settings(arguments, files)
    policies, budget = _pressure(arguments, kv)
    contexts = arguments.context or (DEFAULT_PRESSED_CONTEXTS if policies else DEFAULT_CONTEXTS)
    warn_beyond_training(max(contexts), files.context_length)
    return SpeedJob(
        contexts=contexts,
        kv=kv,
        kv_read=_reads(arguments),
        kv_policy=policies,
        kv_budget=budget,
        peers=peers,
        linear=arguments.linear,
        device=device,
        weights_budget=_weights_budget(arguments),
        **options.given(
            arguments,
            rows="rows",
            batch="batch",
            repeat="repeat",
            prefill_tokens="prefill",
            prefill_limit_s="prefill-limit",
        ),
    )


def _weights_budget(arguments: Namespace) -> int | None:
    from kvq.config import parse_weights

    asked = arguments.weights_budget
    return None if asked is None else parse_weights(asked)


def _reads(arguments: Namespace) -> tuple[str, ...]:
    """Shares and selectors to time beside whole reads, only those of the command line."""
    from kvq.selectors import rule_named

    if not options.written(arguments, "kv-read"):
        return ()
    reads = tuple(dict.fromkeys(flag_values.policies(arguments.kv_read)))
    for read in reads:
        rule_named(read)
    return tuple(read for read in reads if read != DEFAULT_READ)


def _pressure(arguments: Namespace, kv: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """(policies, budget) to measure pressure with; none unless the command line says so.

    What `KVQ_KV_BUDGET` gives every session is no wish to measure its cost.
    """
    from kvq.config import DEFAULT_POLICY
    from kvq.policies import policy_named

    if not any(options.written(arguments, name) for name in ("kv-policy", "kv-budget")):
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
    """The settings of ours to measure, as `--kv` writes them, each once."""
    several = str(arguments.kv or "").split(",")
    if len(several) > 1:
        if options.given(arguments, k="kbits", v="vbits"):
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
