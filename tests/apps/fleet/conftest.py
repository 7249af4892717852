"""A real Ray on this machine with two workers, as commands start it."""

import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from environment import environment_in
from ray_fleet import Fleet


@pytest.fixture(scope="module")
def ray_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment in which commands start a small Ray of their own that sees no user's files."""
    if find_spec("ray") is None:
        pytest.skip('needs Ray: pip install "kvq-runtime[ray]"')
    # The paths of Ray's sockets must be short.
    folder = tempfile.mkdtemp(prefix="kvq-ray-", dir="/tmp")
    yield environment_in(tmp_path_factory.mktemp("home")) | {
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": folder,
    }
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def fleet(ray_home: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two replicas of the smallest model, with a folder of sessions that they share."""
    folder = tmp_path_factory.mktemp("sessions")
    started = Fleet(ray_home, folder, "--replicas", "2", "--queue", "24", "--threads", "1")
    try:
        yield started
    finally:
        started.close()
