"""Measures how far each engine's quantised KV cache moves its predictions, and what it costs.

    python apps/lab/peer_quality.py CHECKPOINT TEXT --context 2048 --out FOLDER

Every engine runs the checkpoint with weights that its caches share and is compared with itself
holding an unquantised cache, on the same windows of the same text, so that only the cache differs:
the KL divergence over the second half of each window, as `kvq eval --task kld` measures it. All
bytes a cache holds are counted; `COUNTED` says per engine what they are. kvq is measured last, with
fixed widths and once within the bytes of each peer; beside a peer stands how many times the
divergence of that it has. FOLDER keeps the rows of every engine, and a run that finds it goes on.

Engines: kvq pages; transformers' QuantizedCache with Quanto and HQQ, where they are installed,
along both axes; llama.cpp's cache types. kvq computes in floats beside its cache, since rounding of
activations turns the least change of a cache into a visible one.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvq.config import KvPlan
from kvq.errors import BudgetError, KvqError, UsageError
from kvq.files import replace_file
from kvq_apps.evaluation.cache_setting import UNQUANTIZED, CacheSetting
from kvq_apps.evaluation.measurement import Measurement
from kvq_apps.evaluation.text import divergence, windows
from kvq_apps.terminal import output, text_input
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_lab.sweep_report import ratio_text, standard_error
from kvq_models.config import ModelConfig
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.engine import Engine
from peer_sessions import (
    GROUP_TOKENS,
    Openers,
    Windows,
    is_installed,
    transformers_sessions,
)

Row = dict[str, Any]

NOTHING_AHEAD: Mapping[str, int] = {}
SHORTEST_CONTEXT = 4 * GROUP_TOKENS

COUNTED = {
    "kvq": "the whole arena for the context, used or not: codes, scales and mids, floating-point "
    "tail and sinks, room for a chunk, page table, statistics, scratch; forms by calibration, "
    "pages of 64",
    "transformers": "packed codes, scales and zero points, and the residual window, floats as 16 "
    "bits; not the whole cache that every step restores to floats; the prompt attends to exact "
    "keys and values",
    "llama.cpp": "the cells it allocates: blocks of 32 codes and one 16-bit scale, along a token",
}


# kvq and llama.cpp: sessions of ours


def engine_sessions(
    engine: Engine, names: Mapping[str, tuple[int, int]], policy: str | None, context_tokens: int
) -> Openers:
    """Returns openers of the engine's sessions, the unquantised one first, then `names`."""

    def opener(setting: CacheSetting) -> Callable[[], Any]:
        return setting.opener(engine.session, context_tokens)

    openers = {
        name: opener(CacheSetting(k_bits=k_bits, v_bits=v_bits, policy=policy))
        for name, (k_bits, v_bits) in names.items()
    }
    return {"f16": opener(UNQUANTIZED)} | openers


def budget_sessions(engine: Engine, held_bytes: Iterable[float], context_tokens: int) -> Openers:
    """Returns openers of sessions within so many bytes per token."""
    setting = CacheSetting(k_bits=8, v_bits=8, policy="budget")
    return {
        budget_name(size): setting.opener(
            engine.session, context_tokens, int(size * context_tokens)
        )
        for size in sorted(held_bytes, reverse=True)
    }


def budget_name(held_bytes: float) -> str:
    """Names the kvq cache within a peer's bytes per token."""
    return f"budget, {held_bytes:.0f} bytes"


def allocated_bytes(openers: Openers) -> dict[str, int]:
    """Returns what each cache reserves when it is opened, but for those that are refused."""
    sizes: dict[str, int] = {}
    for name, open_session in openers.items():
        with suppress(BudgetError), open_session() as session:
            sizes[name] = session.stats().kv_budget
    return sizes


KVQ_WIDTHS = ((8, 8), (6, 6), (4, 4), (4, 2), (2, 2))
KVQ_CACHES = {f"K{k}V{v}": (k, v) for k, v in KVQ_WIDTHS}
UNQUANTIZED_CACHES = ("f16", "f32")
LLAMA_CACHES = {"q8_0": (8, 8), "K q8_0, V q4_0": (8, 4), "q4_0": (4, 4)}


# The comparison


def compare(
    engine: str,
    openers: Openers,
    texts: Windows,
    config: ModelConfig,
    allocated: Mapping[str, int] = NOTHING_AHEAD,
) -> list[Row]:
    """Measures a row per cache; the first opener is the reference, and a row of its own.

    `allocated` has the bytes of caches that are allocated before the first token.
    """
    progress = output.ProgressBar()
    try:
        outcomes = divergence(
            list(openers.values()),
            next(iter(openers.values())),
            texts,
            lambda done, total: progress(done, total, engine),
        )
    finally:
        progress.clear()
    tokens = len(texts[0])
    numbers = _numbers(config)
    rows = []
    for name, outcome in zip(openers, outcomes, strict=True):
        if isinstance(outcome, BudgetError):
            output.print_note(f"{engine} {name}: {outcome}")
            continue
        held_bytes = allocated.get(name, outcome.kv_bytes)
        columns = _columns(outcome, held_bytes / tokens, numbers)
        rows.append({"engine": engine, "cache": name} | columns)
    return rows


def _numbers(config: ModelConfig) -> int:
    """Counts the numbers of a token's keys and values."""
    return 2 * config.num_layers * config.first_attention.kv_width


def _columns(measured: Measurement, bytes_per_token: float, numbers: int) -> Row:
    """Returns a row: `bytes_per_token` are of a whole window, `*_next` of one token more."""
    return {
        "bytes_per_token": bytes_per_token,
        "bits": 8 * bytes_per_token / numbers,
        "bytes_per_token_next": measured.bytes_per_token,
        "bits_next": 8 * measured.bytes_per_token / numbers,
        "kld": measured.value,
        "kld_99": measured.details["kld_99"],
        "same_top_1": measured.details["same_top_1"],
        "perplexity": measured.details["perplexity"],
        "window_nats": measured.details["window_nats"],
    }


HEADER = (
    "engine", "cache", "bits", "next", "KLD", "+-", "KLD 99 %", "top 1", "to kvq within its bytes",
)  # fmt: skip


def print_report(report: Mapping[str, Any]) -> None:
    """Prints what was measured on, the table, and what the bytes are."""
    subject = report["subject"]
    output.print_table(
        (name, subject[name]) for name in ("checkpoint", "text", "context", "windows", "versions")
    )
    output.print_data("")
    kvq = {row["cache"]: row for row in report["rows"] if row["engine"] == "kvq"}
    output.print_table((_cells(row, kvq) for row in report["rows"]), header=HEADER)
    output.print_data("")
    output.print_table(COUNTED.items())


def _cells(row: Row, kvq: Mapping[str, Row]) -> tuple[str, ...]:
    ours = None if row["engine"] == "kvq" else kvq.get(budget_name(row["bytes_per_token"]))
    return (
        row["engine"],
        row["cache"],
        f"{row['bits']:.2f}",
        f"{row['bits_next']:.2f}",
        f"{row['kld']:.6f}",
        f"{standard_error(row['window_nats']):.6f}",
        f"{row['kld_99']:.5f}",
        f"{row['same_top_1']:.2%}",
        "" if ours is None else ratio_text(row["window_nats"], ours["window_nats"]),
    )


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures everything; `folder` keeps the exported weights and every engine's rows."""
    context_tokens, threads = arguments.context, arguments.threads
    bundle = exported(arguments.checkpoint, folder / "bundle", threads)
    config = bundle.config
    with Engine(bundle, threads=threads, backend="onnx") as engine:
        ids = engine.tokenizer.encode(text_input.read_text(arguments.text))
        start = engine.tokenizer.control.start
        texts = windows(ids, start, context_tokens)[: arguments.windows]
    subject = {
        "checkpoint": arguments.checkpoint,
        "text": arguments.text,
        "context": context_tokens,
        "windows": len(texts),
        "versions": _versions(),
    }
    path = folder / "rows.json"
    report = resumed(path, subject)
    rows = report["rows"]

    def transformers_rows() -> list[Row]:
        openers = transformers_sessions(arguments.checkpoint, threads)
        return compare("transformers", openers, texts, config)

    def llama_rows() -> list[Row]:
        with Engine(bundle, threads=threads, backend="llama.cpp") as engine:
            openers = engine_sessions(engine, LLAMA_CACHES, None, context_tokens)
            return compare("llama.cpp", openers, texts, config, allocated_bytes(openers))

    def kvq_rows() -> list[Row]:
        sizes = {row["bytes_per_token"] for row in rows if row["cache"] not in UNQUANTIZED_CACHES}
        with Engine(bundle, threads=threads, backend="float") as engine:
            openers = {
                **engine_sessions(engine, KVQ_CACHES, "uniform", context_tokens),
                **budget_sessions(engine, sizes, context_tokens),
            }
            return compare("kvq", openers, texts, config, allocated_bytes(openers))

    measurers = {
        "llama.cpp": llama_rows,
        "transformers": transformers_rows,
        "kvq": kvq_rows,
    }
    for name, measurer in measurers.items():
        if not any(row["engine"] == name for row in rows):
            rows += measurer()
            with replace_file(path, private=False) as stream:
                stream.write(f"{json.dumps(report, indent=1)}\n".encode())
    return report


def exported(checkpoint: str, path: Path, threads: int) -> Bundle:
    """Exports the weights of two engines once: 8 bits for kvq, f16 for llama.cpp."""
    if path.exists():
        return Bundle.open(path, verify="size")
    output.print_note("exporting the weights: 8 bits for kvq, f16 for llama.cpp")
    options = ExportOptions(
        weights=WeightFormat(bits=8, block=32, embedding_bits=8),
        format="both",
        gguf_type="f16",
        kv=KvPlan(k_bits=8, v_bits=8),
        quality=False,
        threads=threads,
    )
    return export_model(checkpoint, path, options)


def resumed(path: Path, subject: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what an earlier run measured. Raises `UsageError` if that was something else."""
    if not path.exists():
        return {"subject": dict(subject), "rows": []}
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if report["subject"] != subject:
        raise UsageError(f"{path} holds another comparison: give another --out, or delete it")
    return report


def _versions() -> str:
    names = {
        "transformers": "transformers",
        "optimum.quanto": "optimum-quanto",
        "hqq": "hqq",
        "llama_cpp": "llama-cpp-python",
    }
    return ", ".join(
        f"{name} {version(name)}" for module, name in names.items() if is_installed(module)
    )


def main() -> int:
    """Runs the comparison, prints it and keeps it; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("checkpoint", help="Hugging Face folder")
    parser.add_argument("text", help="UTF-8 file the checkpoint was not trained on")
    parser.add_argument("--context", type=int, default=2048, help="tokens per window")
    parser.add_argument("--windows", type=int, default=16, help="how many of them at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="folder for weights and rows, to write or to go on with")
    arguments = parser.parse_args()
    try:
        for name, least in (("context", SHORTEST_CONTEXT), ("windows", 1), ("threads", 1)):
            if getattr(arguments, name) < least:
                raise UsageError(
                    f"--{name} {getattr(arguments, name)} is not possible: give {least} or more"
                )
        with ExitStack() as stack:
            folder = arguments.out or stack.enter_context(TemporaryDirectory(prefix="kvq-peers-"))
            report = measure(arguments, Path(folder))
    except KvqError as error:
        output.print_note(f"error: {error}")
        return 2
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
