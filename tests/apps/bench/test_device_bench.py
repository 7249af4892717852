"""`kvq bench` on a device, an emulated one: its memory, and what peers lack."""

import importlib.util

import pytest

from emulated import emulated_library
from kvq import devices, native_library
from kvq.errors import BackendError
from kvq_apps.bench import bandwidth
from kvq_apps.bench.engines import PEERS, PROGRAMS, check_peers, open_engine
from kvq_apps.bench.measure import SpeedJob, measure
from kvq_apps.bench.model_shapes import shape_bundle
from kvq_lab import engine_transformers
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.engine import open_files
from shelf import Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())


def unseen(done: float, total: float, label: str) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def bundle(tiny_shape: str) -> Bundle:
    return Bundle.open(shape_bundle(tiny_shape))


def test_a_device_is_measured(bundle: Bundle, shelf: Shelf) -> None:
    emulated_library(shelf)
    job = SpeedJob(
        contexts=(70,), kv=("4:2",), rows=(1,), repeat=1, prefill_tokens=4,
        device="emulated",
    )  # fmt: skip
    ((row,),) = measure(open_files(bundle.path), job, 1, unseen)
    assert (row["engine"], row["context"]) == ("kvq", 70)
    assert row["decode_ms"] > 0
    assert row["pass_ms"].keys() == row["attention_ms"].keys() == {"1"}


def test_a_devices_memory_is_copied_at_a_speed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_library(shelf)
    clock = iter(range(1000))
    monkeypatch.setattr(devices, "perf_counter", lambda: next(clock))
    # A second for five copies of a MiB, which is read and written.
    assert bandwidth.read_bandwidth(1, "emulated") == pytest.approx(10 << 20)


# What peers lack


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(peer, marks=[pytest.mark.slow] * (peer == "transformers"))
        for peer in PEERS
        if peer not in PROGRAMS
    ],
)
def test_a_peer_without_cuda_says_what_to_install(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"llama.cpp": "llama_cpp", "transformers": "torch"}
    pytest.importorskip(modules[peer])
    if peer == "llama.cpp" and importlib.util.find_spec("gguf") is None:
        pytest.skip("gguf is not installed")
    if not devices.why_not("cuda"):
        pytest.skip("there is a GPU")
    with pytest.raises(BackendError, match=f"{peer} cannot run here: .*(upgrade|install)"):
        check_peers([peer], "cuda")


@pytest.mark.slow
def test_a_cache_whose_package_is_absent_is_named(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        engine_transformers.importlib.util,
        "find_spec",
        lambda name: None if name in ("hqq", "optimum.quanto") else find_spec(name),
    )
    opened = open_engine("transformers", bundle, threads=1, settings=[])
    assert not {"quanto4", "hqq4"} & {setting.kv for setting in opened.settings}
    notes = capsys.readouterr().err
    assert "transformers hqq4 is left out: hqq is not installed; pip install torch" in notes
    assert "quanto4 is left out" in notes
    opened.close()
