"""Tiny GGUF files and engines over them, for the tests of llama.cpp."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvq_runtime.backends import llama_library
from kvq_runtime.engine import Engine
from shelf import Shelf


@pytest.fixture(scope="session", autouse=True)
def _computing() -> None:
    """Skips where llama.cpp is not installed."""
    if reason := llama_library.missing():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.fixture(scope="session")
def make(shelf: Shelf) -> Callable[..., Path]:
    """Makes tiny files, each once; they are only read."""
    from tiny_gguf import write_gguf

    def file(**options: Any) -> Path:
        return shelf.once("tiny.gguf", options, lambda path: write_gguf(path, **options))

    return file


@pytest.fixture(scope="module")
def engine(make: Callable[..., Path]) -> Iterator[Engine]:
    from tiny_gguf import open_engine

    with open_engine(make()) as engine:
        yield engine


@pytest.fixture(scope="module")
def windowed(make: Callable[..., Path]) -> Iterator[Engine]:
    """Opens a model of seven layers, six of which see 24 tokens."""
    from tiny_gguf import open_engine

    with open_engine(make(architecture="gemma3", num_layers=7)) as engine:
        yield engine
