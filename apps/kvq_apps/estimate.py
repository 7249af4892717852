"""What a model takes in memory, told from its files alone: weights, and the cache of one session.

The backends' own sizing is asked, so a session opened with the same settings gets these bytes.
"""

from collections.abc import Callable
from typing import Any

from kvq.config import FLOAT_WIDTH, Budget, KvPlan, parse_budget
from kvq.errors import UsageError
from kvq.formats import bytes_per_token, format_bytes
from kvq_apps import output
from kvq_runtime import device
from kvq_runtime.backends import ModelFiles
from kvq_runtime.backends.llama_layout import CACHE_TYPES, CacheLayout, LayerGroup, LlamaSizing
from kvq_runtime.backends.reference import ReferenceBackend
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import SessionRequest
from kvq_runtime.gguf_file import GgufFile

WIDTHS = ((FLOAT_WIDTH, FLOAT_WIDTH), (8, 8), (8, 4), (4, 4), (4, 2), (2, 2))
UNIT_TOKENS = 1024

# The plan, tokens and bytes of a session, and the bytes of a token at any plan, None: impossible.
_Sized = tuple[KvPlan, int, int, Callable[[KvPlan], float | None]]


def estimate(
    files: ModelFiles,
    *,
    kv_budget: str | None = None,
    context_tokens: int | None = None,
    threads: int | None = None,
    **request: Any,
) -> dict[str, Any]:
    """The object of `kvq inspect --estimate --json`; takes what `Engine.session` does.

    Without a budget the session gives up none of its tokens, by default the model's context.
    Raises what `Engine.session` would.
    """
    size = _bundle_size if isinstance(files, Bundle) and files.has_onnx else _gguf_size
    if context_tokens is None:
        context_tokens = _model_context(files)
    budget = Budget(tokens=context_tokens) if kv_budget is None else parse_budget(kv_budget)
    asked = SessionRequest(kv_budget=budget, context_tokens=context_tokens, **request)
    threads = device.default_threads() if threads is None else threads
    plan, context_tokens, kv_bytes, per_token = size(files, asked, threads)
    weight_bytes = files.weights_json()["bytes"]
    free_bytes = device.probe().memory_free_bytes
    at = {
        output.kv_text(k_bits, v_bits): per_token(KvPlan(k_bits=k_bits, v_bits=v_bits))
        for k_bits, v_bits in WIDTHS
    }
    return {
        "kv": output.kv_text(plan.k_bits, plan.v_bits),
        "context": context_tokens,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_1024_tokens": _unit(per_token(plan)),
        "kv_bytes": kv_bytes,
        "total_bytes": weight_bytes + kv_bytes,
        "memory_free_bytes": free_bytes,
        "fits": weight_bytes + kv_bytes <= free_bytes if free_bytes else None,
        "kv_bytes_per_1024_tokens_at": {
            kv: _unit(num_bytes) for kv, num_bytes in at.items() if num_bytes is not None
        },
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The estimate as table rows."""
    unit = format_bytes(found["kv_bytes_per_1024_tokens"])
    others = (
        f"{kv} {format_bytes(num_bytes)}"
        for kv, num_bytes in found["kv_bytes_per_1024_tokens_at"].items()
    )
    return [
        ("memory, weights", format_bytes(found["weight_bytes"])),
        ("memory, KV", f"{format_bytes(found['kv_bytes'])} for {found['context']} tokens at "
                       f"{found['kv']}"),
        ("memory, together", format_bytes(found["total_bytes"])),
        ("fits", _verdict(found)),
        ("KV per 1024 tokens", f"{unit} ({', '.join(others)})"),
    ]  # fmt: skip


def _verdict(found: dict[str, Any]) -> str:
    if found["fits"] is None:
        return "unknown: this system does not say how much memory is free"
    free = f"{format_bytes(found['memory_free_bytes'])} are free"
    if found["fits"]:
        return f"yes, {free}"
    return f"no, {free}; a smaller --ctx-size or --kv-budget, or fewer bits (--kv), take less"


def _unit(num_bytes: float | None) -> int:
    return round((num_bytes or 0) * UNIT_TOKENS)


def _model_context(files: ModelFiles) -> int:
    if isinstance(files, Bundle) and files.has_onnx:
        return files.config.context_length
    return files.gguf().context_length


def _bundle_size(files: Any, request: SessionRequest, threads: int) -> _Sized:
    """As every backend over a bundle's graph sizes its sessions; the numpy one loads nothing."""
    config = ReferenceBackend(files, threads=threads).session_config(request)
    shape = files.config.cache_shape
    return (
        config.plan,
        config.context_tokens,
        config.budget_bytes,
        lambda plan: bytes_per_token(shape, plan),
    )


def _gguf_size(files: ModelFiles, request: SessionRequest, _threads: int) -> _Sized:
    """By the header: windows llama.cpp gives smaller caches, which only it knows, count in full."""
    file = files.gguf()
    layout = CacheLayout(groups=(LayerGroup(widths=file.kv_widths),))
    plan = request.plan(_possible(file))
    if _gguf_per_token(layout, file, plan) is None:
        raise UsageError(
            f"--kv {output.kv_text(plan.k_bits, plan.v_bits)} is not possible: llama.cpp's caches "
            "of this file are 8 or 4 bits wide, or fp"
        )
    sizing = LlamaSizing(
        layout=layout,
        plan=plan,
        model_tokens=file.context_length,
        chunk_tokens=request.chunk_tokens,
    )
    context_tokens, num_bytes = sizing.session(request)
    return plan, context_tokens, num_bytes, lambda plan: _gguf_per_token(layout, file, plan)


def _possible(file: GgufFile) -> KvPlan:
    """The file's plan, at llama.cpp's next wider types."""
    k_bits, v_bits = (
        min(width for width in CACHE_TYPES if width >= bits)
        for bits in (file.kv.k_bits, file.kv.v_bits)
    )
    return KvPlan(k_bits=k_bits, v_bits=v_bits, sink_tokens=0)


def _gguf_per_token(layout: CacheLayout, file: GgufFile, plan: KvPlan) -> int | None:
    pairs = zip(file.head_dims, (plan.k_bits, plan.v_bits), strict=True)
    if any(bits not in CACHE_TYPES or dim % CACHE_TYPES[bits].block for dim, bits in pairs):
        return None
    return layout.bytes_per_token(plan)
