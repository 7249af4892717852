"""Checkpoints exported to GGUF files, and what stands in these; needs the `gguf` package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_export.gguf.gguf_writer import llama_missing
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import GGUF_FILE

# Nats that a file of a type may be off by: llama.cpp rounds activations to the type of the weights
# and keeps keys and values in float16; random weights are the worst case of either.
NATS = {"q8_0": 0.02, "bf16": 0.01, "q4_0": 1.5, "q4_k_m": 0.8}

needs_llama = pytest.mark.skipif(llama_missing() is not None, reason=str(llama_missing()))


def export(source: Path, kind: str, **options: Any) -> Bundle:
    """The bundle of `source` beside it, its matrices of type `kind`."""
    defaults = {"format": "gguf", "gguf_type": kind, "quality": False, "threads": 1, "force": True}
    destination = source.with_name(f"{source.name}-{kind}")
    return export_model(source, destination, ExportOptions(**(defaults | options)))


def tensors(bundle: Bundle) -> Sequence[Any]:
    """All that a bundle's file holds, as the `gguf` package reads it."""
    return gguf.GGUFReader(bundle.path / GGUF_FILE).tensors


def field(bundle: Bundle, name: str) -> Any:
    """One value of its metadata."""
    return gguf.GGUFReader(bundle.path / GGUF_FILE).fields[name].contents()
