"""What tests of the bench and of the laboratory begin with."""

import pytest

from kvq_apps.bench import bandwidth
from kvq_apps.bench import model_shapes as shapes
from tiny_shape import TINY_SHAPE


@pytest.fixture(autouse=True)
def home_of_measurements(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 1 << 20)


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    """The only name that `--shape` knows."""
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": TINY_SHAPE})
    return "tiny"
