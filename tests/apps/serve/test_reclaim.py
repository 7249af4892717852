"""What large requests leave behind: freed memory goes back to the system, and only after them."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from kvq_apps.serve.workers import LARGE_BYTES, reclaim
from serving import Rule, ask, running, wait_until


def test_only_large_requests_are_followed_by_it(
    monkeypatch: pytest.MonkeyPatch, own_state: None
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("kvq_apps.serve.http_app.reclaim", lambda: calls.append("reclaim"))
    with running(Rule().load) as server:
        for text, status in (("a b ", 200), ("a b " * (LARGE_BYTES // 4), 400)):
            assert ask(server, "/tokenize", {"content": text}).status == status
        wait_until(lambda: calls)
    assert calls == ["reclaim"]


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's memory")
def test_freed_memory_goes_back_to_the_system() -> None:
    # Small enough to lie in the heap; the last block keeps the heap from shrinking by itself.
    blocks = [bytes(60_000) for _ in range(2000)]
    last = blocks.pop()
    before_kib = held_kib()
    del blocks[:]
    reclaim()
    assert before_kib - held_kib() > 80_000
    assert len(last) == 60_000


def held_kib() -> int:
    return resource.getpagesize() // 1024 * int(Path("/proc/self/statm").read_text().split()[1])
