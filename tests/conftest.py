"""Settings and models every test shares, read before numpy loads; what no test may leave behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from shelf import Shelf

# What is imported and collected stays: looking for garbage in it took a third of the collection.
gc.disable()
# The arrays are small and the machine is shared: more threads only spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A command reads the byte code that those before it left: without, each compiles all of kvq anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What a developer has set for himself is not what is tested.
os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).parent / "no-settings")
# Nor does he want the models that tests ran among his.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"kvq-tests-{os.getuid()}")
# Behind an `&` of a shell's every child would ignore Ctrl-C, which a terminal's do not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_connect = socket.socket.connect


def _connect_here(self: socket.socket, address: Any) -> None:
    """Tests need no network: a connection that leaves this machine is a failure."""
    away = isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost")
    assert not away, f"a test connects to {address[0]}"
    _connect(self, address)


socket.socket.connect = _connect_here  # type: ignore[method-assign]


# Of the cases of a test marked `sampled` the core runs the first, and one in so many.
SAMPLED = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`: tests wait for servers and terminals, and another can run meanwhile."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist's own answer is what was asked for
    allowed = getattr(os, "sched_getaffinity", None)
    return (len(allowed(0)) if allowed else os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks most cases of a `sampled` test as slow, which the core leaves out and CI runs."""
    seen = set[str]()
    for item in items:
        if item.get_closest_marker("sampled"):
            function = item.nodeid.partition("[")[0]
            # By its name, as drawn by lot: counting would take of crossed lists one value of each.
            if function in seen and crc32(item.nodeid.encode()) % SAMPLED:
                item.add_marker(pytest.mark.slow)
            seen.add(function)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command run in this process sets up logging for itself; the next test must not hear it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    result = yield
    root.handlers[:] = handlers
    root.setLevel(level)
    return result


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Tiny checkpoints and bundles, made once for all workers of this run."""
    from shelf import Shelf

    base = tmp_path_factory.getbasetemp()
    return Shelf((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shelf")


@pytest.fixture(scope="session", autouse=True)
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Models and chats of whoever runs the tests are not seen; a real model lies among them."""
    with pytest.MonkeyPatch.context() as patch:
        if "KVQ_REAL_MODEL" not in os.environ:
            patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and notes about running servers stay here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def kernels_restored() -> Generator[None]:
    """A test may choose the kernels; the next one has the machine's best."""
    from kvq import native_library
    from native_calls import select_isa

    before = native_library.isa() if native_library.available() else ""
    yield
    if before:
        select_isa(before)


@pytest.fixture(scope="session")
def checkpoint(shelf: Shelf) -> Path:
    """The plain tiny llama, to read only."""
    return shelf.checkpoint()


@pytest.fixture(scope="session")
def bundle(shelf: Shelf) -> str:
    """It, exported; to read only."""
    return str(shelf.bundle())
