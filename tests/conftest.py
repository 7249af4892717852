"""Settings every test shares, read before numpy loads; and what no test may leave behind."""

import logging
import os
from collections.abc import Generator

import pytest

# The arrays are small and the machine is shared: more threads only spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command run in this process sets up logging for itself; the next test must not hear it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    result = yield
    root.handlers[:] = handlers
    root.setLevel(level)
    return result
