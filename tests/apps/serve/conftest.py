"""Servers for every test of them: on a real engine, and on a rule, where order is plain."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from environment import ROOTS, folders_in
from kvq_apps.serve.server import Server
from serving import Rule, loaded, running
from shelf import Shelf


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return folders_in(tmp_path) | ROOTS


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(max_position_embeddings=4096))


@pytest.fixture(scope="module")
def tiny(bundle: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a real engine that keeps nothing on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with running(
            loaded(bundle, context_tokens=512), saved_bytes=0, aliases=("default", "gpt-tiny")
        ) as server:
            yield server


@pytest.fixture
def rule() -> Rule:
    return Rule()


@pytest.fixture
def served(rule: Rule) -> Iterator[Server]:
    """A server on the rule, with one session: what runs and what waits is plain."""
    with running(rule.load, sessions=1, queue=8) as server:
        yield server
