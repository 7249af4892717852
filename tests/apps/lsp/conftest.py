"""An editor in a thread, before a completer that a test opens and closes."""

from collections.abc import Iterator

import pytest

from language_client import GatedCompleter, ThreadClient


@pytest.fixture
def completer() -> GatedCompleter:
    return GatedCompleter()


@pytest.fixture
def editor(completer: GatedCompleter) -> Iterator[ThreadClient]:
    client = ThreadClient(lambda: completer)
    yield client
    completer.gate.set()
    client.close()
