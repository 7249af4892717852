"""The peers of `kvq bench` compute the same model on the same weights, at the depth asked for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench_bundles import CASES, KINDS, TOLERANCE, Make, need
from caches import budget_for_tokens, open_cache
from kvq.config import KvPlan
from kvq.errors import BackendError
from kvq_apps.bench import engine_kvq, gguf_file
from kvq_apps.bench.engine_llamacpp import LlamaCppEngine
from kvq_apps.bench.engines import ENGINES, PROGRAMS, Setting, open_engine
from kvq_apps.bench.llama_state import KeysAndValues, RowKind, StateLayout
from kvq_export.gguf_model import gguf_model
from kvq_runtime.backends.llama_cache import STATE_PREFIX
from kvq_runtime.bundle import Bundle
from tiny import altered

# Of the median of the same: experts are chosen otherwise in some rows, and states add errors up.
KIND_TOLERANCE = 0.08

# The peers run the same weights


def logits(bundle: Bundle, engine: str, kv: str) -> np.ndarray:
    """After a prefill of 20 tokens, ten single ones and a second chunk; from an empty cache."""
    ids = np.random.default_rng(0).integers(0, 512, 40)
    opened = open_engine(engine, bundle, threads=1, settings=[Setting(kv="fp")])
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
    bundle = make(case)
    ours, theirs = logits(bundle, "kvq", "fp"), logits(bundle, engine, kv)
    difference = np.sqrt(np.mean((theirs - ours) ** 2) / np.mean(ours**2))
    assert difference < TOLERANCE[engine, kv]


@pytest.mark.parametrize("case", KINDS)
def test_llama_cpp_computes_every_kind(make: Make, case: str) -> None:
    need("llama.cpp")
    bundle = make(case)
    ours, theirs = logits(bundle, "kvq", "fp"), logits(bundle, "llama.cpp", "f16")
    rows = np.mean((theirs - ours) ** 2, axis=1) / np.mean(ours**2, axis=1)
    assert np.sqrt(np.median(rows)) < KIND_TOLERANCE


@pytest.mark.parametrize(
    ("case", "weights"),
    [("llama", {}), ("qwen2", {"block": 64}), ("qwen3", {"bits": 8, "embedding_bits": 4})],
)
def test_gguf_weights_are_the_bundles(
    make: Make, tmp_path: Path, case: str, weights: dict[str, int]
) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from gguf.quants import dequantize

    bundle = make(case, **weights)
    config = bundle.config
    gguf_file.write_gguf(bundle, tmp_path / "model.gguf")
    tensors = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
    }
    q_rows, kv_rows = config.num_heads * 64, config.num_kv_heads * 64
    expected = {"token_embd.weight": bundle.read_weight("embed")}
    expected["output_norm.weight"] = bundle.read_weight("final_norm")
    if not config.tied_head:
        expected["output.weight"] = bundle.read_weight("head")
    for layer in range(config.num_layers):
        parts = {}
        for kind in ("weight", *(["bias"] if config.layers[0].mixer.qkv_bias else [])):
            name = f"layers.{layer}.qkv" + ("_bias" if kind == "bias" else "")
            q, k, v = np.split(bundle.read_weight(name), [q_rows, q_rows + kv_rows])
            if case == "llama":
                q, k = neighbours(q, config.num_heads), neighbours(k, config.num_kv_heads)
            parts |= {f"attn_q.{kind}": q, f"attn_k.{kind}": k, f"attn_v.{kind}": v}
        gate, up = np.split(bundle.read_weight(f"layers.{layer}.gate_up"), 2)
        parts |= {"ffn_gate.weight": gate, "ffn_up.weight": up}
        names = {"attn_output": "o", "ffn_down": "down"}
        names |= {"attn_norm": "attn_norm", "ffn_norm": "mlp_norm"}
        names |= (
            {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
            if config.layers[0].mixer.qk_norm == "heads"
            else {}
        )
        for theirs, ours in names.items():
            parts[f"{theirs}.weight"] = bundle.read_weight(f"layers.{layer}.{ours}")
        expected |= {f"blk.{layer}.{name}": value for name, value in parts.items()}
    assert set(tensors) - {"rope_freqs.weight"} == set(expected)
    for name, value in expected.items():
        # Only the scales are rounded, to 11 significant bits.
        np.testing.assert_allclose(tensors[name], value, rtol=2**-11, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("case", KINDS)
def test_gguf_weights_of_every_kind_keep_their_codes(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """And pass by in parts, of which none is a whole matrix."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from gguf.quants import dequantize

    monkeypatch.setattr(gguf_file, "_CHUNK_WEIGHTS", 1 << 12)
    bundle = make(case)
    gguf_file.write_gguf(bundle, tmp_path / "model.gguf")
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    kinds = {one.tensor_type.name for one in stored.values()}
    assert kinds == {"F32", "Q4_0", "Q8_0", *(["MXFP4"] if "gpt-oss" in case else [])}
    for tensor in gguf_model(bundle.config).tensors:
        rows = np.concatenate([np.array(run) for run in tensor.rows])
        wanted = tensor.arrange(bundle.read_weight(tensor.source, rows))
        one = stored[tensor.name]
        found = dequantize(one.data, one.tensor_type).reshape(wanted.shape)
        np.testing.assert_allclose(found, wanted, rtol=2**-11, atol=1e-9, err_msg=tensor.name)


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head become neighbouring rows, as llama.cpp's converter writes them."""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def test_gguf_carries_a_scaled_rotary_table(make: Make, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    bundle = make("llama")
    gguf_file.write_gguf(bundle, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    base = reader.fields["llama.rope.freq_base"].contents()
    factors = next(t.data for t in reader.tensors if t.name == "rope_freqs.weight")
    table = base ** (-np.arange(32) / 32) / factors
    np.testing.assert_allclose(table, bundle.config.ropes[0].inv_freq, rtol=1e-5)


def test_a_model_gguf_cannot_describe_is_refused(make: Make) -> None:
    config = make("qwen2").config
    assert gguf_file.refusal(config) is None
    windows = altered(config, mixer={"window_tokens": 8})
    assert gguf_file.refusal(windows) == "it has attention windows"
    assert "a soft cap on attention" in str(
        gguf_file.refusal(altered(config, mixer={"softcap": 5}))
    )
    odd = altered(config, feed={"width": 200})
    assert gguf_file.refusal(odd) == "it has rows that are not whole blocks of 32"
    qwen3 = replace(make("qwen3").config, ropes=make("llama").config.ropes)
    assert "as qwen3, which does not compute a rotary table" in str(gguf_file.refusal(qwen3))


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
    if device != "cpu" and engine in ("kvq (MatMulNBits)", "kvq (upper nibbles)"):
        pytest.skip("the processor's alone")
    check_depths(engine, make("qwen2"), device)


@pytest.mark.parametrize("case", ["lfm2-1.2b", "qwen3.5-0.8b", "gemma-4-e2b", "gpt-oss-20b"])
def test_llama_cpp_goes_back_to_states_and_windows(make: Make, case: str) -> None:
    need("llama.cpp")
    check_depths("llama.cpp", make(case), "cpu")


@pytest.mark.parametrize(
    "case", ["qwen3", "lfm2-1.2b", "qwen3.5-0.8b", "gemma-4-e2b", "gpt-oss-20b"]
)
def test_llama_cpp_takes_a_random_state_for_one_it_wrote(make: Make, case: str) -> None:
    need("llama.cpp")
    opened = open_engine("llama.cpp", make(case), threads=1, settings=[])
    assert isinstance(opened, LlamaCppEngine)
    for setting in opened.settings:
        sequence = opened.sequence(setting, 300, 8)
        loaded = sequence._cache.state()
        one = opened.sequence(setting, 0, 8)
        one.forward(np.zeros(1, np.int64))
        layout = StateLayout.read(one._cache.state()[STATE_PREFIX.size :])
        window = opened._backend.layout.window_tokens
        kinds = (setting.kv, setting.kv)
        expected = layout.random_state(300, kinds, window)
        assert len(loaded) == STATE_PREFIX.size + len(expected)
        # Of states llama.cpp keeps those of the token that was computed, which this one shares.
        assert loaded[STATE_PREFIX.size :] == expected.tobytes()
        sequence.close()
        one.close()
    opened.close()


def check_depths(engine: str, bundle: Bundle, device: str) -> None:
    settings = [Setting(kv="4:2"), Setting(kv="fp")]
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


def test_an_unknown_state_layout_is_refused() -> None:
    with pytest.raises(BackendError, match="layout that is not known"):
        StateLayout.read(bytes(200))


@pytest.mark.parametrize("cell_words", [3, 6])
def test_a_state_that_was_cut_is_refused_or_has_fewer_parts(cell_words: int) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    row = RowKind(type_id=1, row_bytes=64)
    part = KeysAndValues(cell_words=cell_words, layers=2, keys=row, values=row)
    states = np.array([1, 0, 0, 7, 8, 9], np.int32).tobytes()
    layout = StateLayout(prefix=bytes(8), parts=(part, part), states=states)
    state = layout.random_state(1, ("f16", "f16"), 1).tobytes()
    assert StateLayout.read(state) == layout
    read = list[int]()
    for length in range(len(state)):
        try:
            found = StateLayout.read(state[:length])
        except BackendError:
            continue
        assert found.parts == layout.parts[: len(found.parts)]
        assert states.startswith(found.states)
        read.append(length)
    # Whole parts, and then states of which nothing but the cell is known.
    first, second = 8 + part.num_bytes, 8 + 2 * part.num_bytes
    assert read == [first, second, *range(second + 12, len(state))]
