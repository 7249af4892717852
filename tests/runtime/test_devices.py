"""A model on an emulated device: the engine runs through it, and refuses by name."""

import logging
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulated import emulated_library
from kvq import devices, native_library
from kvq.errors import BackendError, BudgetError, UsageError
from kvq.formats import constant_bytes
from kvq.reference.linear import BlockFormat
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.write.random_bundle import random_bundle
from kvq_runtime.answer.generation import GenerationOptions, Step
from kvq_runtime.backends import WHOLE, Mode, SequencePass, forward_chain, onnx
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine, open_files
from kvq_runtime.machine import gpu
from kvq_runtime.machine.onnx_runtime import onnx_runtime, onnx_runtime_state
from kvq_runtime.sequence.passes import run, run_all
from kvq_runtime.session.metrics import SessionStats
from logits import far
from regions import column_bytes
from shelf import EIGHT, Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

TEXT = np.random.default_rng(3).integers(6, 300, 145)
# Relative distance of logits from exact arithmetic over the processor's cache. With random weights
# it is larger than with trained ones. Most of it is the rounding of inputs to int8: a difference in
# a float's last bit changes some roundings, and these change more in the next product. Queries and
# weights of attention are float16 on the device.
DISTANCE = {"fp": 0.04, "8:8": 0.04, "4:2": 0.08}
GREEDY = Sampling(temperature=0)
# As of a GGUF file of K-quants, beside blocks of 64.
SUPER_BLOCKS = {
    "embed": "6/16/super_symmetric",
    "head": "6/16/super_symmetric",
    "layers.0.qkv": "6/16/super_minimum",
    "layers.0.o": "4/16/super_symmetric",
    "layers.0.gate_up": "4/32/super_minimum",
    "layers.0.down": "5/32/super_minimum",
    "layers.1.qkv": "2/16/super_minimum",
    "layers.1.gate_up": "3/32/super_minimum",
    "layers.1.down": "8/16/super_symmetric",
}


@pytest.fixture(scope="module", autouse=True)
def device(shelf: Shelf) -> None:
    emulated_library(shelf)


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> Path:
    return shelf.bundle(EIGHT)


@pytest.fixture(scope="module", params=["8 bit", "super-blocks"])
def any_bundle(request: pytest.FixtureRequest, bundle: Path, shelf: Shelf) -> Path:
    """A bundle of one format, and one of many."""
    if request.param == "8 bit":
        return bundle
    overrides = {name: BlockFormat.parse(spelled) for name, spelled in SUPER_BLOCKS.items()}
    options = ExportOptions(weights=WeightFormat(bits=8, overrides=overrides))
    config = Bundle.open(bundle).config
    return shelf.once(
        "bundle", SUPER_BLOCKS, lambda path: random_bundle(config, path, options=options)
    )


def logits_of(path: Path, kv: str, **engine: str) -> np.ndarray:
    """Returns logits of a text in pieces: a chunk that closes pages, some tokens, one token."""
    with Engine.open(path, threads=1, **engine) as opened, opened.session(kv=kv) as session:
        cache = session.sequence.cache
        parts = np.split(TEXT, [128, 140, 141])
        return np.concatenate(
            [forward_chain(opened.backend, cache, ids, np.arange(len(ids))) for ids in parts]
        )


@pytest.mark.slow
@pytest.mark.parametrize("kv", DISTANCE)
def test_logits_are_those_of_the_processor(kv: str, any_bundle: Path) -> None:
    got = logits_of(any_bundle, kv, device="emulated")
    want, exact = (logits_of(any_bundle, kv, backend=name) for name in ("onnx", "float"))
    assert far(got, exact) < DISTANCE[kv]
    assert far(got, want) < DISTANCE[kv]
    assert (got.argmax(axis=1) == want.argmax(axis=1)).mean() > 0.9


def test_passes_that_read_less_do_so_on_a_device(any_bundle: Path) -> None:
    modes = [Mode(view="hi"), Mode(head_tokens=100), WHOLE]
    logits = []
    for engine in ({"device": "emulated"}, {"backend": "float"}):
        with (
            Engine.open(any_bundle, threads=1, **engine) as opened,
            opened.session(kv="8:8", predict="50%") as session,
        ):
            session.prefill(TEXT[:100].tolist())  # the second layer is predicted
            with session.sequence.branch() as branch:
                for mode in modes:
                    run(branch.extend([7, 8], mode=mode))
                    logits.append(np.where(np.isinf(branch.logits), 0, branch.logits))
                    branch.rewind(0)
    for got, want in zip(logits[: len(modes)], logits[len(modes) :], strict=True):
        assert far(got, want) < 0.05
    assert far(logits[0], logits[2]) > 0.05


def test_a_session_goes_on_on_the_other_device(bundle: Path, tmp_path: Path) -> None:
    def answer(begin_on: str, go_on_on: str) -> list[int]:
        file = tmp_path / begin_on
        with Engine.open(bundle, device=begin_on) as engine, engine.session(kv="8:8") as session:
            session.prefill(TEXT[:120].tolist())
            session.save(file)
        with Engine.open(bundle, device=go_on_on) as other, other.session(kv="8:8") as session:
            session.load(file)
            return [step.token for step in session.generate(max_tokens=3, sampling=GREEDY)]

    assert answer("cpu", "emulated") == answer("emulated", "cpu")


@pytest.mark.slow
def test_what_a_device_does_not_hold_comes_from_the_host(shelf: Shelf) -> None:
    path = shelf.bundle(EIGHT, num_hidden_layers=4)
    options: dict[str, Any] = {"kv": "4:2", "context_tokens": 300, "chunk_tokens": 64}

    def answer(**memory: Any) -> tuple[list[int], SessionStats]:
        with engine.session(**options, **memory) as session:
            session.prefill(TEXT.tolist() + TEXT.tolist()[:60])
            steps = session.generate(max_tokens=3, sampling=GREEDY)
            return [step.token for step in steps], session.stats()

    with Engine.open(path, device="emulated") as engine:
        with engine.session(**options, kv_budget="300tok") as session:
            assert session.config.arena
            (arena,) = session.config.arena.parts
        alone, whole = answer(kv_budget="300tok")
        budget = arena.bytes_with_resident(1)
        tiered, stats = answer(kv_budget=budget, kv_offload="1GiB")
        chosen, _ = answer(kv_budget="300tok", kv_read="50%")
        chosen_tiered, chosen_stats = answer(kv_budget=budget, kv_offload="1GiB", kv_read="50%")
        with pytest.raises(BudgetError, match="twice those of a layer"):
            engine.session(**options, kv_budget=budget - 1, kv_offload="1GiB")
    assert tiered == alone
    assert stats.kv_bytes == whole.kv_bytes
    planes = column_bytes(arena, 4, 2) - arena.streams * constant_bytes(arena.shape.head_dim)
    assert stats.held.offloaded_bytes == stats.held.streamed_bytes == planes
    assert whole.held.offloaded_bytes == 0
    assert chosen == chosen_tiered
    assert chosen_stats.held.streamed_bytes < planes


def test_what_a_processors_memory_does_not_hold_lies_in_a_file(shelf: Shelf) -> None:
    path = shelf.bundle(EIGHT, num_hidden_layers=4)
    options: dict[str, Any] = {"kv": "4:2", "context_tokens": 500, "chunk_tokens": 64}

    def answer(**memory: Any) -> tuple[list[int], SessionStats]:
        with engine.session(**options, **memory) as session:
            session.prefill(TEXT.tolist() * 3)
            steps = session.generate(max_tokens=20, sampling=GREEDY)
            return [step.token for step in steps], session.stats()

    with Engine.open(path) as engine:
        alone, whole = answer(kv_budget="500tok")
        with pytest.raises(BudgetError, match="moves to a file"):
            engine.session(**options, kv_budget=100_000, kv_offload="1GiB")
        budget = whole.kv_budget - 30_000
        filed, stats = answer(kv_budget=budget, kv_offload="1GiB")
    assert filed == alone
    assert stats.kv_bytes == whole.kv_bytes
    assert stats.kv_budget == whole.kv_budget
    assert (stats.held.offloaded_bytes, stats.held.streamed_bytes) == (30_000, 0)


def test_sequences_share_the_passes_of_a_device(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(bundle, device="emulated") as engine:
        shared = list[int]()
        forward = engine.backend.forward

        def counted(rows: Sequence[SequencePass[Any]], *, rope_long: bool) -> Any:
            shared.append(len(rows))
            return forward(rows, rope_long=rope_long)

        monkeypatch.setattr(engine.backend, "forward", counted)
        options = GenerationOptions(max_tokens=5, sampling=GREEDY, stop_ids=frozenset())

        def answers(texts: list[list[int]]) -> list[list[int]]:
            """Answers in sessions that answer at once."""
            with ExitStack() as stack:
                opened = [stack.enter_context(engine.session(kv="8:8")) for _ in texts]
                for session, text in zip(opened, texts, strict=True):
                    session.prefill(text)
                shared.clear()
                works = [session.answering(options) for session in opened]
                steps = dict(run_all(works, len(works)))
                return [[step.token for step in steps[place]] for place in range(len(texts))]

        texts = [TEXT[:70].tolist(), TEXT[70:].tolist(), [7, 8, 9]]
        together = answers(texts)
        assert shared == [3] * 4
        assert together == [answers([text])[0] for text in texts]
        assert len({tuple(ids) for ids in together}) == 3


CHOICES: list[tuple[Sampling, dict[str, Any], bool]] = [
    (GREEDY, {}, True),
    (Sampling(temperature=0.9, top_k=40, top_p=0.9), {}, True),
    (Sampling(temperature=0.9, top_k=10, repeat_penalty=1.3), {}, True),
    (Sampling(temperature=0, logit_bias={7: -100.0, 9: -4.0}), {}, True),
    (Sampling(temperature=0.9, top_k=0), {}, False),
    (Sampling(temperature=0, logit_bias={7: 30.0}), {}, False),
    (GREEDY, {"logprobs": True}, False),
]


def test_of_logits_a_device_tells_what_decides(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(bundle, device="emulated") as engine:
        backend = engine.backend
        assert isinstance(backend, onnx.OnnxBackend)
        assert not backend.rows_agree
        whole = 4 * engine.model.vocab_size

        def answer(sampling: Sampling, **options: Any) -> tuple[list[Step], float]:
            """Generates four tokens; returns the bytes of logits of each but the first."""
            with engine.session(kv="8:8", seed=5, draft=lambda: None) as session:
                session.prefill([7, 8, 9])
                before = backend.logit_bytes_copied
                steps = list(session.generate(4, sampling=sampling, stop_ids=[], **options))
            return steps, (backend.logit_bytes_copied - before) / 3

        for sampling, options, few in CHOICES:
            steps, num_bytes = answer(sampling, **options)
            with monkeypatch.context() as patched:
                patched.setattr(devices, "MOST_BEST", 0)
                assert answer(sampling, **options) == (steps, whole)
            best = 8 * max(onnx.FEWEST_BEST, sampling.exact_rows)
            assert num_bytes == (best if few else whole)
            assert best < whole / 2


def test_logits_leave_a_device_for_the_rows_asked_for(bundle: Path) -> None:
    with Engine.open(bundle, device="emulated") as engine, engine.session(kv="8:8") as session:
        backend = engine.backend
        assert isinstance(backend, onnx.OnnxBackend)
        for places in ([], [9], [3, 8, 9]):
            before = backend.logit_bytes_copied
            rows = np.array(places, np.int64)
            logits = forward_chain(backend, session.sequence.cache, TEXT[:10], rows)
            assert logits.shape == (len(places), engine.model.vocab_size)
            assert backend.logit_bytes_copied - before == logits.nbytes


def test_a_device_that_cannot_be_used_is_refused_with_the_reason(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="choose cpu, cuda, auto"):
        Engine.open(bundle, device="tpu")
    with pytest.raises(BackendError, match="onnx backend alone"):
        Engine.open(bundle, device="emulated", backend="float")
    monkeypatch.setattr(devices, "DRIVER", "libno-driver.so")
    devices.opened.cache_clear()
    with pytest.raises(BackendError, match=r"no NVIDIA driver: .* device=\"cpu\""):
        Engine.open(bundle, device="cuda")
    with caplog.at_level(logging.INFO), Engine.open(bundle, device="auto") as engine:
        assert engine.backend.device == "cpu"
    assert "running on the processor: the device 'cuda' cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        ({"init": 100}, "the NVIDIA driver finds no GPU: no such"),
        ({"count": 0}, "the NVIDIA driver finds no GPU"),
        ({"version": 11080}, "too old: it runs CUDA 11.8, kvq needs 13.0 or newer"),
        ({}, ""),
    ],
    ids=["no-device", "none", "old", "usable"],
)
def test_the_driver_is_asked(
    driver: dict[str, int], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    values = {"init": 0, "count": 1, "version": 13000} | driver
    library = tmp_path / "libcuda.so.1"
    source = f"""
        int cuInit(unsigned flags) {{ (void)flags; return {values["init"]}; }}
        int cuDeviceGetCount(int* n) {{ *n = {values["count"]}; return 0; }}
        int cuDriverGetVersion(int* version) {{ *version = {values["version"]}; return 0; }}
        int cuGetErrorString(int e, const char** s) {{ (void)e; *s = "no such"; return 0; }}
    """
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True)
    monkeypatch.setattr(devices, "DRIVER", str(library))
    message = devices.driver_missing()
    assert reason in message
    assert bool(message) == bool(reason)


def test_a_gpu_without_its_libraries_is_told_from_a_broken_bundle(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise onnx_runtime_state().NotImplemented("Could not find an implementation for Linear(1)")

    there = devices.opened("emulated")
    monkeypatch.setattr(devices, "opened", lambda _: there)
    monkeypatch.setattr(onnx_runtime(), "InferenceSession", none)
    with pytest.raises(BackendError, match=r"on the GPU .*Linear.* libraries are missing .*cuDNN"):
        onnx.OnnxBackend(open_files(bundle), threads=1, device="cuda")


def test_a_gpu_the_kernels_are_not_made_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "OLDEST_CAPABILITY", 90)
    devices.opened.cache_clear()
    assert "has compute capability 8.0, kvq needs 9.0" in devices.why_not("emulated")


def test_a_library_of_another_version_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libkvq_cuda.so").write_bytes(b"no library")
    monkeypatch.setitem(devices.LIBRARIES, "emulated", str(tmp_path / "libkvq_cuda.so"))
    devices.opened.cache_clear()
    assert "file too short" in devices.why_not("emulated") or "ELF" in devices.why_not("emulated")
    devices.opened.cache_clear()


@pytest.mark.gpu
def test_a_gpu_gives_what_the_emulator_gives(any_bundle: Path) -> None:
    if reason := gpu.why_not():
        pytest.skip(reason)
    for kv, distance in DISTANCE.items():
        got = logits_of(any_bundle, kv, device="cuda")
        assert far(got, logits_of(any_bundle, kv, device="emulated")) < distance
