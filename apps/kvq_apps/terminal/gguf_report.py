"""The report of `kvq inspect` on a GGUF file, from the file's header."""

from collections.abc import Iterator
from math import isfinite
from typing import Any

import numpy as np

from kvq.config import KvPlan
from kvq.formats import format_bytes
from kvq.json_values import is_array
from kvq_apps.terminal import output
from kvq_runtime.backends.llama_cache import CACHE_TYPES, CacheLayout
from kvq_runtime.bundle.gguf_file import GgufFile

# Longer arrays and texts are counted instead of shown.
SHOWN_ITEMS = 8
SHOWN_CHARACTERS = 120


def report(file: GgufFile) -> dict[str, Any]:
    """Returns the object of `kvq inspect --json`."""
    kv_bytes = dict(_kv_bytes(file))
    return {
        "format": "gguf",
        "version": file.contents.version,
        "path": str(file.path),
        "bytes": file.contents.num_bytes,
        "name": file.name,
        "architecture": file.architecture,
        "context_length": file.context_length,
        "vocab_size": file.vocab_size,
        "num_layers": file.num_layers,
        "num_heads": max(file.heads),
        "num_key_value_heads": max(file.kv_heads),
        "head_size": file.head_dims[0],
        "weights": file.weights_json(),
        "kv": {"k_bits": file.kv.k_bits, "v_bits": file.kv.v_bits, "sink_tokens": 0},
        "bytes_per_token": kv_bytes.get(output.kv_text(file.kv.k_bits, file.kv.v_bits)),
        "fp16_bytes_per_token": kv_bytes["fp"],
        "bytes_per_token_at": kv_bytes,
        "metadata": {key: _json_value(value) for key, value in file.contents.metadata.items()},
    }


def rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the report as rows of a table."""
    types = data["weights"]["types"]
    return [
        ("file", data["path"]),
        ("format", f"GGUF version {data['version']}"),
        ("model", f"{data['name']} ({data['architecture']})"),
        (
            "shape",
            f"{data['num_layers']} layers, {data['num_heads']} heads over "
            f"{data['num_key_value_heads']} KV heads of {data['head_size']}, vocabulary "
            f"{data['vocab_size']}",
        ),
        ("context", f"{data['context_length']} tokens"),
        ("weights", format_bytes(data["weights"]["bytes"])),
        *(
            (f"weights, {name}", f"{row['tensors']} tensors, {format_bytes(row['bytes'])}")
            for name, row in sorted(types.items())
        ),
        ("KV by llama.cpp", output.kv_text(data["kv"]["k_bits"], data["kv"]["v_bits"])),
        *(
            (
                f"KV per token, {kv}",
                f"{num_bytes} bytes, {format_bytes(num_bytes * data['context_length'])} at context",
            )
            for kv, num_bytes in data["bytes_per_token_at"].items()
        ),
        *((key, _cut(value)) for key, value in data["metadata"].items()),
    ]


def _kv_bytes(file: GgufFile) -> Iterator[tuple[str, int]]:
    """Yields the bytes of one token in all layers for each cache type that the heads allow."""
    layout = CacheLayout.of(file)
    for bits, kind in CACHE_TYPES.items():
        if all(head_dim % kind.block == 0 for head_dim in file.head_dims):
            plan = KvPlan(k_bits=bits, v_bits=bits)
            yield output.kv_text(bits, bits), layout.bytes_per_token(plan)


def _json_value(value: Any) -> Any:
    """Returns a metadata value for JSON; a long array becomes a text with its length."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if is_array(value):
        if len(value) > SHOWN_ITEMS:
            return f"[{len(value)} values]"
        return [
            item.decode(errors="replace") if isinstance(item, bytes) else item for item in value
        ]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
