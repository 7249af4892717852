"""The peers of `kvq bench` compute the same model on the same weights, at the depth asked for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench_bundles import CASES, KINDS, TOLERANCE, Make, need
from caches import budget_for_tokens, open_cache
from kvq.config import KvPlan
from kvq_apps.bench import engine_kvq, gguf_file
from kvq_apps.bench.engines import ENGINES, PROGRAMS, Setting, open_engine
from kvq_export.gguf.gguf_model import gguf_model
from kvq_runtime.bundle.bundle import Bundle
from tiny import altered

# Of the median of the same: experts are chosen otherwise in some rows, and states add errors up.
KIND_TOLERANCE = 0.08

# The peers run the same weights


def logits(bundle: Bundle, engine: str, kv: str) -> np.ndarray:
    """After a prefill of 20 tokens, ten single ones and a second chunk; from an empty cache."""
    ids = np.random.default_rng(0).integers(0, 512, 40)
    settings = [Setting(kv="fp")] if engine == "kvq" else []
    opened = open_engine(engine, bundle, threads=1, settings=settings)
    sequence = opened.sequence(Setting(kv=kv), 0, 64)
    steps = [ids[:20], *np.split(ids[20:30], 10), ids[30:]]
    rows = [sequence.forward(step).copy() for step in steps]
    sequence.rollback()
    np.testing.assert_allclose(sequence.forward(ids[:20]), rows[0], atol=1e-3)
    sequence.close()
    opened.close()
    return np.stack(rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("engine", "kv"),
    [
        # PyTorch takes seconds to load.
        pytest.param(*case, marks=[pytest.mark.slow] * (case[0] == "transformers"))
        for case in TOLERANCE
    ],
)
def test_a_peer_computes_the_same_logits(make: Make, case: str, engine: str, kv: str) -> None:
    need(engine)
    bundle = make(case, bits=8)
    expected, actual = logits(bundle, "kvq", "fp"), logits(bundle, engine, kv)
    difference = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
    assert difference < TOLERANCE[engine, kv]


@pytest.mark.parametrize("case", KINDS)
def test_llama_cpp_computes_every_kind(
    make: Make, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rounding to blocks, after which other experts may be chosen."""
    need("llama.cpp")
    kind = gguf_file._kind
    exact = {"q4_0": "f16", "q8_0": "f16", "f32": "f32"}
    monkeypatch.setattr(gguf_file, "_kind", lambda *of: exact[kind(*of)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundle = make(case, bits=8)
    expected, actual = logits(bundle, "kvq", "fp"), logits(bundle, "llama.cpp", "f16")
    rows = np.mean((actual - expected) ** 2, axis=1) / np.mean(expected**2, axis=1)
    assert np.sqrt(np.median(rows)) < KIND_TOLERANCE


@pytest.mark.parametrize("case", [*CASES, *KINDS])
def test_gguf_weights_are_the_bundles_rounded_to_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """And pass by in parts, of which none is a whole matrix."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from gguf.quants import dequantize

    monkeypatch.setattr(gguf_file, "_CHUNK_WEIGHTS", 1 << 12)
    bundle = make(case)
    reader = gguf.GGUFReader(gguf_file.gguf_of(bundle, "llama.cpp").path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert {tensor.tensor_type.name for tensor in stored.values()} == {"F32", "Q4_0", "Q8_0"}
    # A step, as a share of the largest weight.
    tolerance = {"F32": 1e-6, "Q4_0": 1 / 7, "Q8_0": 1 / 127}
    for tensor in gguf_model(bundle.config).tensors:
        rows = np.concatenate([np.array(run) for run in tensor.rows])
        expected = tensor.arrange(bundle.read_weight(tensor.source, rows))
        stored_tensor = stored[tensor.name]
        actual = dequantize(stored_tensor.data, stored_tensor.tensor_type).reshape(expected.shape)
        largest = np.abs(expected).max() * tolerance[stored_tensor.tensor_type.name]
        np.testing.assert_allclose(actual, expected, atol=largest, err_msg=tensor.name)


def test_gguf_carries_a_scaled_rotary_table(make: Make) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    bundle = make("llama")
    reader = gguf.GGUFReader(gguf_file.gguf_of(bundle, "llama.cpp").path)
    base = reader.fields["llama.rope.freq_base"].contents()
    factors = next(t.data for t in reader.tensors if t.name == "rope_freqs.weight")
    table = base ** (-np.arange(32) / 32) / factors
    np.testing.assert_allclose(table, bundle.config.ropes[0].inv_freq, rtol=1e-5)


def test_a_model_gguf_cannot_describe_is_refused(make: Make) -> None:
    config = make("qwen2").config
    assert gguf_file.refusal(config) is None
    windows = altered(config, mixer={"window_tokens": 8})
    assert gguf_file.refusal(windows) == "it has attention windows"
    softcap = altered(config, mixer={"softcap": 5})
    assert "layers.0.mixer.softcap = 0.0 instead of 5" in str(gguf_file.refusal(softcap))
    odd = altered(config, feed={"width": 200})
    assert gguf_file.refusal(odd) == "it has rows that are not whole blocks of 32"
    qwen3 = replace(make("qwen3").config, ropes=make("llama").config.ropes)
    assert "as qwen3: it computes another rotary table" in str(gguf_file.refusal(qwen3))


# The depth is real


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, marks=[pytest.mark.slow] * (engine == "transformers"))
        for engine in ENGINES
        if engine not in PROGRAMS
    ],
)
def test_a_filled_cache_is_attended_to(make: Make, engine: str, device: str) -> None:
    need(engine, device)
    check_depths(engine, make("qwen2"), device)


@pytest.mark.parametrize("case", ["lfm2-1.2b", "qwen3.5-0.8b", "gemma-4-e2b", "gpt-oss-20b"])
def test_llama_cpp_goes_back_to_states_and_windows(make: Make, case: str) -> None:
    need("llama.cpp")
    check_depths("llama.cpp", make(case), "cpu")


def check_depths(engine: str, bundle: Bundle, device: str) -> None:
    settings = [Setting(kv="4:2"), Setting(kv="fp")] if engine == "kvq" else []
    opened = open_engine(engine, bundle, threads=1, settings=settings, device=device)
    token = np.array([7])
    for setting in opened.settings:
        seen = []
        for depth in (130, 300):
            sequence = opened.sequence(setting, depth, 8)
            first = sequence.forward(token).copy()
            assert not np.allclose(sequence.forward(token), first, atol=1e-3)
            sequence.rollback()
            np.testing.assert_allclose(sequence.forward(token), first, atol=1e-3)
            seen.append(first)
            sequence.close()
        assert not np.allclose(*seen, atol=1e-3)
        assert np.isfinite(seen).all()
    opened.close()


def test_filling_stores_what_attending_would(make: Make) -> None:
    config = make("qwen3").config
    caches = []
    for window in (1, 0):
        plan, shape = KvPlan(), config.cache_classes[0].shape
        cache = open_cache(shape, plan, budget_for_tokens(shape, plan, 400), 400, chunk_tokens=256)
        engine_kvq.fill(cache, config, 400, window_tokens=window)
        caches.append(cache)
    quick, exact = caches
    assert quick.tokens == exact.tokens == 400
    columns = len(exact.columns()[0])
    assert columns >= 4
    for layer in range(2):
        for head in range(2):
            for column in range(columns):
                assert quick.page(layer, head, column) == exact.page(layer, head, column)
            for ours, theirs in zip(quick.tail(layer, head), exact.tail(layer, head), strict=True):
                np.testing.assert_array_equal(ours, theirs)
