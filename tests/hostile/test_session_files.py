"""Session files with a right digest and wrong contents: refused by name, nothing replaced."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.config import KvPlan
from kvq.errors import SnapshotError
from kvq_runtime.config import SessionConfig
from kvq_runtime.sequence.encoding import SequenceState
from kvq_runtime.session import snapshot
from kvq_runtime.session.snapshot import MAGIC
from rule_backend import RuleCache
from serving import Rule, ask, running

VOCAB_SIZE = 10
IDENTITY = {"model": "rule", "context_tokens": 100}


def write(path: Path, header: Any, *parts: bytes, claimed: int | None = None) -> Path:
    """Writes a file of any header and parts, with a right digest."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<8sI", MAGIC, len(text) if claimed is None else claimed)
    body = prefix + text + b"".join(parts)
    path.write_bytes(body + sha256(body).digest())
    return path


def header(*lengths: Any, **changed: Any) -> dict[str, Any]:
    return {
        "format": snapshot.FORMAT,
        "version": snapshot.VERSION,
        "identity": IDENTITY,
        "generator": dict(np.random.default_rng(1).bit_generator.state),
        "part_bytes": list(lengths),
    } | changed


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in header(0, 0, 0, 0).items() if name != key}


def generator(**changed: Any) -> dict[str, Any]:
    return header(0, 0, 0, 0, generator=np.random.default_rng(1).bit_generator.state | changed)


HEADERS: dict[str, Any] = {
    "not JSON": b"{",
    "not text": b"\xff\xfe",
    "a list": [],
    "empty": {},
    "a number": 7,
    "deep": b"[" * 100_000,
    "a number of many digits": b'{"format": ' + b"9" * 5000 + b"}",
    **{f"no {key}": without(key) for key in header()},
    "identity a list": header(0, 0, 0, 0, identity=[1]),
    "identity null": header(0, 0, 0, 0, identity=None),
    "generator null": header(0, 0, 0, 0, generator=None),
    "generator a name": header(0, 0, 0, 0, generator={"bit_generator": "PCG64"}),
    "generator of another kind": generator(bit_generator="MT19937"),
    "generator without a state": generator(state={}),
    "generator with text": generator(state={"state": "x", "inc": 1}),
    "generator too large": generator(state={"state": 1 << 200, "inc": 1}),
    "generator negative": generator(state={"state": -1, "inc": 1}),
    "generator half": generator(has_uint32=[1]),
    "lengths null": header(0, 0, 0, 0, part_bytes=None),
    "lengths text": header("0", 0, 0, 0),
    "two lengths": header(0, 0),
    "five lengths": header(0, 0, 0, 0, 0),
    "a negative length": header(-8, 8, 0, 0),
    "a length of true": header(True, 0, 0, 0),
    "a fraction": header(0.0, 0, 0, 0),
    "a huge length": header(1 << 70, 0, 0, 0),
    "another version": header(0, 0, 0, 0, version=[2]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_wrong_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "one.kvq", HEADERS[name])
    with pytest.raises(SnapshotError, match=r"one\.kvq"):
        snapshot.examine(path)


@pytest.mark.parametrize("lengths", [(9, 4, 4), (8, 5, 4), (8, 4, 3), (16, 0, 0), (0, 0, 18)])
def test_parts_of_wrong_lengths_are_refused(lengths: tuple[int, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "one.kvq", header(*lengths), bytes(17))
    with pytest.raises(SnapshotError, match="wrong length"):
        snapshot.examine(path)


def test_a_header_that_claims_the_whole_file_is_refused(tmp_path: Path) -> None:
    for claimed in (0, 1 << 31, (1 << 32) - 1):
        path = write(tmp_path / "one.kvq", header(0, 0, 0, 0), claimed=claimed)
        with pytest.raises(SnapshotError, match=r"one\.kvq"):
            snapshot.examine(path)


def empty_cache() -> RuleCache:
    config = SessionConfig(plan=KvPlan(), context_tokens=100, budget_bytes=1 << 20)
    return RuleCache(config, chunk_tokens=10, capacity_tokens=100)


def state(**changed: Any) -> SequenceState:
    whole: dict[str, Any] = {
        "tokens": np.array([1, 2, 3], np.int64),
        "logits": np.zeros(VOCAB_SIZE, np.float32),
        "cache": b"[1, 2]",
        "ages": np.zeros(0, np.int32),
    }
    return SequenceState(**(whole | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": np.array([1, VOCAB_SIZE], np.int64)},
        {"tokens": np.array([-1], np.int64)},
        {"tokens": np.array([1 << 62], np.int64)},
        {"logits": np.zeros(VOCAB_SIZE - 1, np.float32)},
        {"logits": np.full(VOCAB_SIZE, np.nan, np.float32)},
        {"logits": np.full(VOCAB_SIZE, np.inf, np.float32)},
        {"ages": np.zeros(4, np.int32)},
        {"ages": np.array([-2], np.int32)},
    ],
    ids=str,
)
def test_contents_the_model_cannot_have_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError, match=r"^one\.kvq .*damaged"):
        snapshot.check_state("one.kvq", state(**changed), vocab_size=VOCAB_SIZE)


def test_a_cache_of_more_tokens_than_the_session_is_put_back() -> None:
    cache = empty_cache()
    cache.ids = [7, 8]
    with pytest.raises(SnapshotError, match="3 tokens and a cache of 4"):
        snapshot.fill("one.kvq", cache, state(cache=b"[1, 2, 3, 4]"))
    assert cache.ids == [7, 8]


def test_what_is_right_goes_on_where_it_was() -> None:
    cache = empty_cache()
    for right in (state(), state(logits=None)):
        snapshot.check_state("one.kvq", right, vocab_size=VOCAB_SIZE)
    snapshot.fill("one.kvq", cache, right)
    assert cache.ids == [1, 2]


@pytest.mark.parametrize("make", [lambda path: write(path, b"{"), lambda path: path.mkdir()])
def test_what_cannot_be_read_is_a_snapshot_error(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "one.kvq")
    with pytest.raises(SnapshotError, match=r"one\.kvq"):
        snapshot.examine(tmp_path / "one.kvq")


@pytest.mark.parametrize(
    "changed",
    [{"generator": {"bit_generator": "PCG64", "state": 1}}, {"cache": b"{"}],
    ids=str,
)
def test_the_server_drops_such_a_file_and_goes_on(
    changed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "STATE"))
    rule = Rule(folder=tmp_path)
    body = {"prompt": [70] * 100, "max_tokens": 3}
    with running(rule.load, sessions=1) as server:
        first = ask(server, "/v1/completions", body).json
    (path,) = tmp_path.rglob("*.kvq")
    contents = snapshot.examine(path)
    whole = {"generator": dict(contents.generator), "identity": dict(contents.identity)}
    cache, tokens = changed.get("cache", contents.state.cache), contents.state.tokens.tobytes()
    assert (contents.state.logits, len(contents.state.ages)) == (None, 0)
    facts = whole | {key: value for key, value in changed.items() if key != "cache"}
    write(path, header(len(tokens), 0, 0, len(cache), **facts), tokens, cache)
    with running(rule.load, sessions=1) as server:
        again = ask(server, "/v1/completions", body)
        assert not path.exists()
    assert again.json["choices"] == first["choices"]
    assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "a saved session cannot be used" in caplog.text
