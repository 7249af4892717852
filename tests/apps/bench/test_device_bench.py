"""`kvq bench` on a device, an emulated one: attention alone, several sequences, what peers lack."""

import importlib.util
from typing import Any, cast

import numpy as np
import pytest

from emulated import emulated_library
from kvq import devices, native
from kvq.errors import BackendError
from kvq_apps.bench import bandwidth
from kvq_apps.bench.engine_kvq import KvqBatch
from kvq_apps.bench.engines import PEERS, PROGRAMS, Setting, check_peers, open_engine
from kvq_apps.bench.measure import SpeedJob, measure
from kvq_apps.bench.report import attentions
from kvq_apps.bench.shapes import shape_bundle
from kvq_lab import engine_onnxruntime, engine_transformers
from kvq_runtime.bundle import Bundle
from kvq_runtime.engine import open_files
from shelf import Shelf

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())
DEPTH = 150


def unseen(done: float, total: float, label: str) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def bundle(tiny_shape: str) -> Bundle:
    return Bundle.open(shape_bundle(tiny_shape))


def attended(batch: KvqBatch) -> np.ndarray:
    """What `KvqBatch.attend` computes, the sum of the layers [B, H * D]."""
    found: list[np.ndarray] = []
    run = batch._graph.run

    def kept(*given: Any, **more: Any) -> None:
        found.append(run(*given, **more).numpy())

    batch._graph.run = kept
    assert batch.attend(1)
    batch._graph.run = run
    return found[0]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_several_sequences_attend_as_each_does_alone(
    bundle: Bundle, device: str, shelf: Shelf
) -> None:
    emulated_library(shelf)
    setting = Setting(kv="8:8")
    opened = open_engine("kvq", bundle, threads=1, settings=[setting], device=device)
    batch = cast(KvqBatch, opened.batch(setting, DEPTH, 8, 3))
    before = [cache.tokens for cache in batch._caches]
    together = attended(batch)
    assert together.shape == (3, 4 * 64)
    np.testing.assert_array_equal(attended(batch), together)  # nothing was left behind
    for row in range(3):
        alone = KvqBatch(batch._graph, batch._caches[row : row + 1], bundle.config)
        alone._qkv = batch._qkv[row : row + 1]
        batch._graph._rows.pop(1, None)
        np.testing.assert_allclose(attended(alone)[0], together[row], rtol=1e-3, atol=1e-3)
    assert not np.allclose(together[0], together[1], atol=0.01)
    assert [cache.tokens for cache in batch._caches] == before == [DEPTH] * 3
    assert not batch.attend(2)
    batch.close()
    opened.close()


@pytest.mark.parametrize("kv", engine_onnxruntime.KINDS["cpu"])
def test_sequences_of_the_peer_attend_as_one_does(bundle: Bundle, kv: str) -> None:
    opened = open_engine("onnxruntime", bundle, threads=1, settings=[])
    if Setting(kv=kv) not in opened.settings:
        pytest.skip(f"this onnxruntime has no {kv} cache")
    found = []
    for depth, count in ((DEPTH, 1), (DEPTH, 3), (DEPTH // 2, 1)):
        batch: Any = opened.batch(Setting(kv=kv), depth, 4, count)
        assert batch.attend(1)
        found.append(batch._bound[1]._binding.get_outputs()[0].numpy())
        batch.close()
    one, three, shallow = found
    assert three.shape == (3, 4 * 64)
    # The first row of random ones is that of one; the caches are alike.
    np.testing.assert_allclose(three[0], one[0], rtol=2e-3, atol=2e-3)
    assert not np.allclose(three[1], three[0], atol=0.01)
    assert not np.allclose(shallow, one, atol=0.01)
    opened.close()


def test_a_device_is_measured_with_its_peer(bundle: Bundle, shelf: Shelf) -> None:
    emulated_library(shelf)
    job = SpeedJob(
        contexts=(70,), kv=("4:2",), peers=("onnxruntime",), rows=(1,), batch=(1, 2), repeat=1,
        prefill_tokens=4, device="emulated",
    )  # fmt: skip
    rows = measure(open_files(bundle.path), job, 1, unseen)
    assert {row["engine"] for row in rows} == {"kvq", "onnxruntime"}
    assert all(row["attention_ms"].keys() == {"1"} for row in rows)
    assert all(row["batch_attention_ms"].keys() == {"2"} for row in rows)
    alone = list(attentions(rows, 2))
    ours = [one for one in alone if one["engine"] == "kvq"]
    assert [(one["batch"], one["rows"]) for one in ours] == [(1, 1), (2, 1)]
    names = {f"onnxruntime {row['kv']}" for row in rows if row["engine"] != "kvq"}
    assert all(one["speedups"].keys() == names for one in ours)


def test_attention_is_held_against_the_memory_and_the_peers() -> None:
    common = {"kv_policy": None, "context": 64, "threads": 1, "memory_bytes_s": 1e9}
    ours = common | {
        "engine": "kvq", "kv": "4:2", "kv_bytes_read": 500_000,
        "attention_ms": {"1": 1.0}, "batch_attention_ms": {"8": 5.0},
    }  # fmt: skip
    peer = common | {
        "engine": "onnxruntime", "kv": "fp16", "kv_bytes_read": 2_000_000,
        "attention_ms": {"1": 3.0}, "batch_attention_ms": {"8": 25.0},
    }  # fmt: skip
    one, eight, theirs, _ = attentions([ours, peer], 4)
    assert (one["layer_us"], one["memory_share"]) == (250.0, pytest.approx(0.5))
    assert (eight["bytes_read"], eight["memory_share"]) == (4_000_000, pytest.approx(0.8))
    assert one["speedups"] == {"onnxruntime fp16": 3.0}
    assert eight["speedups"] == {"onnxruntime fp16": 5.0}
    assert (theirs["memory_share"], theirs["speedups"]) == (pytest.approx(2 / 3), {})


def test_a_devices_memory_is_copied_at_a_speed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_library(shelf)
    clock = iter(range(1000))
    monkeypatch.setattr(devices, "perf_counter", lambda: next(clock))
    # A second for five copies of a MiB, which is read and written.
    assert bandwidth.read_bandwidth(1, "emulated") == pytest.approx(10 << 20)


# What peers lack


def test_a_cache_that_the_operator_lacks_is_named(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_onnxruntime, "_stored_types", lambda _: {"float32"})
    opened = open_engine("onnxruntime", bundle, threads=1, settings=[])
    assert [setting.kv for setting in opened.settings] == ["fp32"]
    assert "onnxruntime fp16, int8 is left out" in capsys.readouterr().err
    opened.close()


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
    modules = {"onnxruntime": "onnxruntime", "llama.cpp": "llama_cpp", "transformers": "torch"}
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
    found = importlib.util.find_spec
    monkeypatch.setattr(
        engine_transformers.importlib.util,
        "find_spec",
        lambda name: None if name in ("hqq", "optimum.quanto") else found(name),
    )
    opened = open_engine("transformers", bundle, threads=1, settings=[])
    assert not {"quanto4", "hqq4"} & {setting.kv for setting in opened.settings}
    told = capsys.readouterr().err
    assert "transformers hqq4 is left out: hqq is not installed; pip install torch" in told
    assert "quanto4 is left out" in told
    opened.close()
