"""`kvq bench`: the peers compute the same model on the same weights, and what it reports."""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caches import budget_for_tokens, open_cache
from kvq import devices
from kvq.cache import Cache
from kvq.config import KvPlan
from kvq.errors import BackendError, UsageError
from kvq_apps.bench import bandwidth, engine_kvq, gguf_file, shapes
from kvq_apps.bench.engine_llamacpp import LlamaCppEngine
from kvq_apps.bench.engines import (
    ENGINES,
    PEERS,
    PROGRAMS,
    InProcess,
    Setting,
    check_peers,
    open_engine,
)
from kvq_apps.bench.llama_state import KeysAndValues, RowKind, StateLayout
from kvq_apps.bench.measure import Case, SpeedJob, _decode, measure
from kvq_apps.bench.plot import log_ticks
from kvq_apps.bench.report import comparisons, passes
from kvq_apps.cli import main
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.gguf_model import gguf_model
from kvq_export.random_bundle import random_bundle
from kvq_models.registry import family_for
from kvq_runtime import gpu
from kvq_runtime.backends.llama_cache import STATE_PREFIX
from kvq_runtime.bundle import Bundle
from tiny import altered
from tiny_shape import COMMON

SCALED_ROPE = shapes.SHAPES["llama-3.2-1b"]["rope_scaling"]
CASES: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_scaling": {**SCALED_ROPE, "original_max_position_embeddings": 16},
    },
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "hidden_size": 256},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True},
}
# RMS of the difference from our logits with an unquantised cache, relative to their RMS. Every
# engine rounds activations to 8 bits before a matrix product, which costs about 0.015 by itself.
TOLERANCE = {
    ("onnxruntime", "fp32"): 0.03,
    ("onnxruntime", "fp16"): 0.03,
    ("onnxruntime", "int8"): 0.06,
    ("llama.cpp", "f16"): 0.04,
    ("llama.cpp", "q8_0"): 0.05,
    ("llama.cpp", "q4_0"): 0.4,
    ("transformers", "fp32"): 0.03,
    ("transformers", "fp8"): 0.06,
}
KV_ROW_BYTES = {"fp32": 256, "fp16": 128, "int8": 64, "f16": 128, "q8_0": 68, "q4_0": 36}
ROW_KEYS = {
    "engine", "kv", "kv_policy", "kv_read", "context", "threads", "decode_ms", "decode_min_ms",
    "decode_p95_ms", "decode_samples", "relief_share",
    "prefill_tok_s", "prefill_samples", "prefill_skipped", "ttft_ms", "kv_bytes",
    "weight_bytes_read", "kv_bytes_read", "bandwidth_share", "pass_ms", "attention_ms",
    "memory_bytes_s", "batch_attention_ms",
}  # fmt: skip

# The other kinds in the table, made small: what a layer is stays as it is.
_SMALL = {
    **COMMON,
    "num_hidden_layers": 4,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_FEW = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_GEMMA = {
    "global_head_dim": 128,
    "sliding_window": 8,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "granite-2b": {},
    "smollm3-3b": {},
    "lfm2-1.2b": {"num_attention_heads": 2, "full_attn_idxs": [1, 3]},
    "qwen3.5-0.8b": _NET,
    "gemma-4-e2b": {
        **_GEMMA,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512,
    },
    "olmoe-1b-7b": {
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": _FEW,
    "qwen3.5-35b-a3b": {**_NET, **_FEW, "shared_expert_intermediate_size": 64},
    "qwen3-next-80b-a3b": {**_NET, **_FEW, "shared_expert_intermediate_size": 64},
    "lfm2-8b-a1b": {**_FEW, "num_attention_heads": 2, "full_attn_idxs": [1, 3]},
    "gemma-4-26b-a4b": {
        **_GEMMA,
        "num_global_key_value_heads": 1,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "gpt-oss-20b": {"num_local_experts": 4, "sliding_window": 8},
}
SHAPES = {**CASES, **{name: shapes.SHAPES[name] | _SMALL | own for name, own in KINDS.items()}}
# Of the median of the same: experts are chosen otherwise in some rows, and states add errors up.
KIND_TOLERANCE = 0.08

Make = Callable[..., Bundle]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Tiny bundles with random weights, each made once."""
    folder, made = tmp_path_factory.mktemp("bench"), {}

    def bundle(case: str, **weights: int) -> Bundle:
        key = f"{case}-{'-'.join(map(str, weights.values()))}"
        if key not in made:
            config_json = COMMON | SHAPES[case]
            config = family_for(config_json).config(config_json)
            others = shapes._published(config)
            options = ExportOptions(weights=WeightFormat(**weights, others=others))
            made[key] = random_bundle(config, folder / key, options=options)
        return made[key]

    return bundle


def need(engine: str, device: str = "cpu") -> None:
    """Skips a test whose engine is not installed, or whose device is not here."""
    if device != "cpu" and (reason := devices.why_not(device)):
        pytest.skip(reason)
    try:
        check_peers([engine] if engine in PEERS else [], device)
    except BackendError as error:
        pytest.skip(str(error))


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


# What is reported


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def quick_flags(bundle: Bundle) -> list[str]:
    return [str(bundle.path), "--context", "150,20", "--repeat", "2", "--prefill", "16"]


def test_every_engine_is_measured(
    make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    bundle, peers = make("qwen2"), ["onnxruntime"]
    if LlamaCppEngine.missing(gpu.PROCESSOR) is None:
        peers.append("llama.cpp")
    picture = tmp_path / "decode.png"
    data = bench(
        capsys, *quick_flags(bundle), "--kv", "4:2,fp", "--threads", "1,2",
        "--peer", ",".join(peers), "--plot", str(picture),
    )  # fmt: skip
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    settings = [("kvq", "4:2"), ("kvq", "fp")]
    settings += [case for case in TOLERANCE if case[0] in peers]
    expected = [(*case, depth, n) for n in (1, 2) for depth in (20, 150) for case in settings]
    found = [
        tuple(row[key] for key in ("engine", "kv", "context", "threads")) for row in data["rows"]
    ]
    assert found == expected
    for row in data["rows"]:
        assert set(row) == ROW_KEYS
        assert row["decode_ms"] >= row["decode_min_ms"] > 0
        assert row["decode_samples"] == 6
        assert row["prefill_samples"] == 3
        assert row["ttft_ms"] == pytest.approx(16 / row["prefill_tok_s"] * 1e3)
        assert row["pass_ms"].keys() == {"1", "5"}
        alone = {"1", "5"} if row["engine"] in ("kvq", "onnxruntime") else set()
        assert row["attention_ms"].keys() == alone
        assert row["weight_bytes_read"] > 0 < row["bandwidth_share"]
        if row["engine"] != "kvq":
            assert row["kv_bytes_read"] == row["kv_bytes"]
            # two layers of two heads, keys and values
            assert row["kv_bytes"] == row["context"] * 8 * KV_ROW_BYTES[row["kv"]]
    assert (data["threads"], data["peers"], data["pass_rows"]) == ([1, 2], peers, [1, 5])
    assert data["machine"]["cores"] >= 1
    assert data["machine"]["versions"]["onnxruntime"][0].isdigit()
    assert data["medians"]["kvq 4:2, 2 threads"]["150"] == expected_median(data["rows"])
    assert len(data["comparisons"]) == 8


def expected_median(rows: list[dict[str, Any]]) -> float:
    wanted = {"engine": "kvq", "kv": "4:2", "context": 150, "threads": 2}
    return next(row["decode_ms"] for row in rows if wanted.items() <= row.items())


def test_the_table_names_every_case(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", *quick_flags(make("llama")), "--threads", "1", "--peer", "onnxruntime"]
    assert main([*words, "--kbits", "8"]) == 0
    out = capsys.readouterr().out
    assert "tiny" not in out
    assert all(
        text in out
        for text in ("decode ms", "kvq", "8:4", "fp32", "of 1 row", "growth", "of memory")
    )
    assert out.count("onnxruntime  fp32") >= 2


def test_the_tables_have_no_column_of_dashes(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *quick_flags(make("llama")), "--threads", "1", "--kbits", "8"]) == 0
    out = capsys.readouterr().out
    assert "decode ms" in out
    assert "of 1 row" in out
    assert not {"growth", "than", "MatMulNBits"} & set(out.split())
    assert "-" not in out.split()


@given(low=st.floats(1e-6, 1e6), factor=st.floats(1.5, 1e4))
def test_every_axis_has_at_least_three_round_ticks(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert len(ticks) >= 3
    assert ticks == sorted(set(ticks))
    assert low <= ticks[0]
    assert ticks[-1] <= low * factor


def test_a_row_holds_medians_and_rates() -> None:
    setting = Setting(kv="4:2", policy="h2o", budget="1MiB")
    case = Case(engine="kvq", setting=setting, context=64, threads=1, sequence=Silent())
    case.decode_s += [0.004, 0.002, 0.003]
    case.relief_s += [0.0001, 0.0005, 0.0003]
    case.prefill_s += [0.5, 0.25, 2.0]
    case.pass_s |= {1: [0.004, 0.005, 0.009]}
    case.attention_s |= {1: [0.002, 0.001, 0.009], 4: [0.003, 0.004, 0.001]}
    found = case.row(SpeedJob(contexts=(64,), kv=("4:2",), prefill_tokens=100), 1e6)
    assert (found["decode_ms"], found["decode_min_ms"], found["decode_p95_ms"]) == (3.0, 2.0, 4.0)
    assert found["relief_share"] == pytest.approx(0.1)
    assert (found["kv"], found["kv_policy"], case.name) == ("4:2", "h2o", "kvq 4:2 h2o")
    assert (found["prefill_tok_s"], found["ttft_ms"]) == (200.0, 500.0)
    assert (found["pass_ms"], found["attention_ms"]) == ({"1": 5.0}, {"1": 2.0, "4": 3.0})
    assert (found["weight_bytes_read"], found["kv_bytes_read"], found["kv_bytes"]) == (600, 60, 77)
    # 660 bytes in 3 ms, of a million a second
    assert found["bandwidth_share"] == pytest.approx(0.22)


class Silent(InProcess):
    """A sequence nobody runs."""

    kv_bytes = 77

    def forward(self, ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(ids), np.float32)

    def rollback(self) -> None: ...

    def verify(self, rows: int) -> bool:
        return rows < 0

    def attend(self, rows: int) -> bool:
        return rows < 0

    def step_bytes(self) -> tuple[int, int]:
        return 600, 60

    def close(self) -> None: ...


class Busy(Silent):
    """A sequence that makes room in every step."""

    forwards = 0

    def forward(self, ids: np.ndarray) -> np.ndarray:
        self.forwards += 1
        self.relief_s += 0.25
        return super().forward(ids)


def row(engine: str, context: int, decode: float, prefill: float | None) -> dict[str, Any]:
    return {
        "engine": engine, "kv": "x", "kv_policy": None, "context": context, "threads": 1,
        "decode_ms": decode,
        "decode_min_ms": decode - (3 if engine == "onnxruntime" else 1),
        "prefill_tok_s": prefill,
    }  # fmt: skip


def test_comparisons_are_with_the_fastest_peer() -> None:
    rows = [row("kvq", 64, 10.0, 200.0), row("kvq", 4096, 15.0, 100.0)]
    rows += [row("llama.cpp", 64, 9.0, 150.0), row("onnxruntime", 64, 12.0, 250.0)]
    rows += [row("llama.cpp", 4096, 45.0, None)]
    shallow, deep = comparisons(rows)
    assert (shallow["decode_peer"], shallow["decode_speedup"]) == ("llama.cpp x", 0.9)
    assert shallow["decode_min_speedup"] == 8.0 / 9.0
    assert (shallow["prefill_peer"], shallow["prefill_speedup"]) == ("onnxruntime x", 0.8)
    assert (deep["decode_speedup"], deep["growth"], deep["growth_from"]) == (3.0, 1.5, 64)
    assert deep["prefill_peer"] is deep["prefill_speedup"] is None


# Several rows in a pass


@pytest.mark.usefixtures("tiny_shape")
def test_widths_of_weights_are_measured_beside_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """8 bits, their upper nibbles alone, which are as many bytes as 4 bits, and 4 bits."""
    words = ["--shape", "tiny", "--wbits", "8,4", "--linear", "kvq,hi", "--context", "70"]
    data = bench(capsys, *words, "--repeat", "1", "--prefill", "8", "--threads", "1")
    names = [row["engine"] for row in data["rows"]]
    assert names == ["kvq", "kvq (upper nibbles)", "kvq (4 bits)"]
    eight, upper, four = (row["weight_bytes_read"] for row in data["rows"])
    assert upper < 0.65 * eight
    # The head of 4-bit weights has 8 bits, of which only as much is read as a choice needs.
    assert upper <= four < 0.8 * eight
    assert [*data["weights"]["formats"]] == ["8/64/symmetric"]
    assert main(["bench", "--shape", "tiny", "--wbits", "6"]) == 2
    assert "--wbits 6 is not possible: choose 4, 8 or both" in capsys.readouterr().err


def test_our_products_and_onnxruntimes_are_measured_beside_each_other(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make("qwen2")
    words = ["--context", "70", "--repeat", "1", "--prefill", "8", "--threads", "1", "--kv", "8:8"]
    data = bench(
        capsys, str(bundle.path), *words, "--rows", "1,2,130", "--linear", "kvq,ort"
    )  # fmt: skip
    ours, theirs = data["rows"]
    assert (ours["engine"], theirs["engine"]) == ("kvq", "kvq (MatMulNBits)")
    # All that is stored, but norms, biases, rotary frequencies, and of the embedding every panel.
    vectors = 5 * 256 + 2 * bundle.config.qkv_width + 32
    panel_bytes = 16 * 256 + 16 * 4 * 2
    expected = bundle.weight_bytes_per_step - 4 * vectors - panel_bytes
    assert ours["weight_bytes_read"] == expected
    # float32 scales instead of float16
    assert theirs["weight_bytes_read"] > bundle.weight_bytes_per_step
    # 70 tokens of two layers of two heads of 64, keys and values in float16: none has left yet
    assert ours["kv_bytes_read"] == theirs["kv_bytes_read"] == 70 * 2 * 2 * 64 * 2 * 2
    assert [(one["engine"], one["rows"]) for one in data["passes"]] == [
        (engine, rows) for engine in ("kvq", "kvq (MatMulNBits)") for rows in (1, 2, 130)
    ]
    for row in data["rows"]:
        assert row["pass_ms"].keys() == row["attention_ms"].keys() == {"1", "2", "130"}
    assert [one["engine"] for one in data["comparisons"]] == ["kvq", "kvq (MatMulNBits)"]
    assert all(one["decode_peer"] is None for one in data["comparisons"])


def test_what_a_step_reads_of_a_paged_cache(make: Make) -> None:
    opened = open_engine("kvq", make("qwen2"), threads=1, settings=[Setting(kv="4:2")])
    sequence = opened.sequence(Setting(kv="4:2"), 300, 8)
    # 4 sinks and 64 + 40 tokens stay; 3 pages of 64 tokens in each of 2 x 2 streams.
    rows, page = 300 - 3 * 64, 16 * 64 * (2 + 1) + 2 * 64 + 2 * 64 + 16
    assert sequence.step_bytes()[1] == rows * 2 * 2 * 64 * 2 * 2 + 3 * 4 * page
    sequence.close()
    opened.close()


def test_rows_leave_nothing_behind(make: Make) -> None:
    opened = open_engine("kvq", make("qwen2"), threads=1, settings=[Setting(kv="4:2")])
    sequence = opened.sequence(Setting(kv="4:2", draft_tokens=16), 120, 130)
    token = np.array([7])
    first = sequence.forward(token).copy()
    sequence.rollback()
    for rows in (1, 16, 130):
        assert sequence.verify(rows)
        sequence.rollback()
        assert sequence.attend(rows)
        sequence.rollback()
        np.testing.assert_array_equal(sequence.forward(token), first)
        sequence.rollback()
    assert not sequence.verify(257)
    assert not sequence.attend(257)
    sequence.close()
    opened.close()


def test_attention_alone_is_that_of_the_graph(make: Make) -> None:
    config = make("qwen2").config
    opened = open_engine("kvq", make("qwen2"), threads=1, settings=[Setting(kv="8:8")])
    tails = []
    for attention in (opened._attention, None):
        sequence = opened.sequence(Setting(kv="8:8"), 0, 200)
        sequence._attention = attention
        sequence.attend(20)
        cache = sequence._cache
        assert cache.tokens == 20
        tails.append([cache.tail(layer, 1) for layer in range(config.num_layers)])
        sequence.close()
    for graph, direct in zip(*tails, strict=True):
        for ours, theirs in zip(graph, direct, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    opened.close()


@pytest.mark.parametrize("case", ["lfm2-1.2b", "qwen3.5-0.8b"])
def test_attention_between_other_mixers_is_that_of_every_layer(make: Make, case: str) -> None:
    opened = open_engine("kvq", make(case), threads=1, settings=[Setting(kv="8:8")])
    sequence = opened.sequence(Setting(kv="8:8"), 150, 8)
    cache, layers = sequence._cache, sequence._layers
    rows, positions = layers.random_rows(5), np.arange(150, 155)
    assert len(layers._layers) == cache.parts[0].shape.num_layers
    cache.begin(5)
    found = opened._attention.run([cache], rows, rope_long=False).numpy()
    cache.commit(())
    cache.begin(5)
    expected = np.zeros_like(found)
    attending = make(case).config.cache_classes[0].layers
    for layer, one in zip(attending, layers._layers, strict=True):
        norms = [make(case).read_weight(f"layers.{layer}.{side}_norm") for side in "qk"]
        expected += cache.attend(one.params, rows, positions, one.inv_freq, *norms)
    cache.commit(())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert sequence.attend(8)
    # What is kept would need rows of every layer.
    assert not sequence.attend(9)
    sequence.close()
    opened.close()


def test_passes_are_held_against_one_row_and_against_the_twin() -> None:
    common = {"kv": "4:2", "kv_policy": None, "context": 64, "threads": 2}
    ours = common | {
        "engine": "kvq",
        "pass_ms": {"1": 10.0, "5": 14.0},
        "attention_ms": {"1": 2.0, "5": 4.0},
    }
    twin = common | {
        "engine": "kvq (MatMulNBits)",
        "pass_ms": {"1": 18.0, "5": 44.0},
        "attention_ms": {"1": 2.0, "5": 4.0},
    }
    peer = common | {"engine": "onnxruntime", "pass_ms": {"5": 9.0}, "attention_ms": {}}
    one, five, _, _, other = passes([ours, twin, peer])
    assert (one["ratio"], one["rest_ratio"], one["ort_ratio"]) == (1.0, 1.0, 10 / 18)
    assert (five["ratio"], five["rest_ms"], five["rest_ratio"]) == (1.4, 10.0, 1.25)
    assert (five["ort_ratio"], five["rest_ort_ratio"]) == (14 / 44, 0.25)
    assert (other["rows"], other["pass_ms"], other["rest_ms"]) == (5, 9.0, None)
    assert other["ratio"] is other["ort_ratio"] is None


def test_memory_is_read_at_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(bandwidth, "perf_counter", lambda: next(clock) / 4)
    assert bandwidth.read_bandwidth(2) == 4 << 20


def test_a_prefill_too_long_is_left_out(make: Make) -> None:
    job = SpeedJob(
        contexts=(16, 500), kv=("4:2",), repeat=1, prefill_tokens=16, prefill_limit_s=1e-6
    )
    shallow, deep = measure(make("llama"), job, 1, lambda done, total, label: None)
    assert shallow["prefill_skipped"] is None
    assert shallow["prefill_samples"] == 1
    assert "--prefill-limit is" in deep["prefill_skipped"]
    assert deep["prefill_tok_s"] is deep["ttft_ms"] is None
    assert deep["decode_samples"] == 3


# Policies at work


def test_policies_are_measured_beside_the_same_cache_with_room(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[tuple[str, int]] = []
    relieve = Cache.begin

    def counted(cache: Cache, tokens: int, *more: Any, **options: Any) -> None:
        before = cache.used_bytes
        relieve(cache, tokens, *more, **options)
        if cache.used_bytes < before and tokens == 1:
            decided.append((type(cache.policy).__name__, cache.tokens))

    monkeypatch.setattr(Cache, "begin", counted)
    words = ["--context", "400", "--repeat", "2", "--prefill", "16", "--rows", "1", "--kv", "8:8"]
    words += ["--kv-policy", "uniform,h2o:demote=1,recent=0.3", "--kv-budget", "170tok"]
    data = bench(capsys, str(make("qwen2").path), *words, "--threads", "1")
    rows = data["rows"]
    policies = [None, "uniform", "h2o:demote=1,recent=0.3"]
    assert [row["kv_policy"] for row in rows] == policies
    assert [row["decode_samples"] for row in rows] == [2, 2, 2]
    assert (data["kv_policy"], data["kv_budget"]) == (policies[1:], "170tok")
    assert all(set(row) == ROW_KEYS for row in rows)
    free, *pressed = rows
    # Each visit closes one page: the sinks and 63 tokens of 400 stand past the last boundary.
    for name in ("Uniform", "H2O"):
        steps = [tokens for policy, tokens in decided if policy == name and tokens >= 400]
        assert set(steps) == {4 + 7 * 64 - 1}
        assert len(steps) == 2
    assert all(row["kv_bytes"] < free["kv_bytes"] for row in pressed)
    assert all(row["relief_share"] > 0 for row in rows)
    assert [one["kv_policy"] for one in data["pressures"]] == policies[1:]
    for one, row in zip(data["pressures"], pressed, strict=True):
        assert one["decode_ratio"] == row["decode_ms"] / free["decode_ms"]
        assert one["relief_ms"] == pytest.approx(64 * row["decode_ms"] * row["relief_share"])
    assert [one["kv"] for one in data["comparisons"]] == ["8:8"]
    assert data["medians"].keys() >= {"kvq 8:8, 1 thread", "kvq 8:8 uniform, 1 thread"}


@pytest.mark.parametrize(("policies", "samples", "forwards"), [((), 6, 8), (("h2o",), 2, 130)])
def test_relief_is_part_of_a_decode_step(
    policies: tuple[str, ...], samples: int, forwards: int
) -> None:
    job = SpeedJob(contexts=(64,), kv=("4:2",), kv_policy=policies, kv_budget="9%", repeat=2)
    case = Case(
        engine="kvq", setting=job.settings[-1], context=64, threads=1, sequence=(busy := Busy())
    )
    _decode([case], job, lambda done, total, label: None)
    assert (busy.forwards, len(case.decode_s)) == (forwards, samples)
    assert case.relief_s == [0.25] * samples
    assert job.room >= forwards / job.repeat


def test_relief_is_the_time_of_making_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    opened = open_engine("kvq", make("qwen2"), threads=1, settings=[Setting(kv="4:2")])
    sequence = opened.sequence(Setting(kv="4:2"), 20, 8)
    monkeypatch.setattr(engine_kvq, "perf_counter", lambda: next(clock))
    sequence.forward(np.array([1, 2]))
    sequence.forward(np.array([3]))
    assert sequence.relief_s == 2
    sequence.close()
    opened.close()


def test_the_table_of_policies(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A budget in the environment is for sessions; nobody asked what it costs.
    monkeypatch.setenv("KVQ_KV_BUDGET", "60%")
    words = ["bench", str(make("qwen2").path), "--context", "400", "--kv", "8:8"]
    words += ["--prefill", "8", "--repeat", "1", "--threads", "1"]
    assert main(words) == 0
    assert "relief" not in capsys.readouterr().out
    assert main([*words, "--kv-policy", "oldest"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("in 60%", "8:8 oldest", "relief", "with room"))


# Shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("smollm2-135m", 134_515_008),
        ("gpt-oss-20b", 20_914_757_184),
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("lfm2-8b-a1b", 8_339_930_560),
        ("gemma-4-26b-a4b", 25_247_555_870),
    ],
)
def test_a_shape_has_the_parameters_of_its_model(name: str, parameters: int) -> None:
    config = shapes.shape_config(name)
    weights = family_for({"model_type": config.model_type}).weights(config)
    assert sum(math.prod(source.shape) for source in weights.values()) == parameters


@pytest.mark.parametrize(
    ("name", "mixers"),
    [
        ("gpt-oss-20b:layers=2", "Attention Attention"),
        ("qwen3.5-35b-a3b:layers=4", "DeltaNet DeltaNet DeltaNet Attention"),
        ("qwen3-next-80b-a3b:layers=4", "DeltaNet DeltaNet DeltaNet Attention"),
        ("lfm2-8b-a1b:layers=4", "ShortConv ShortConv Attention ShortConv"),
        ("lfm2-1.2b:layers=3", "ShortConv ShortConv Attention"),
        ("gemma-4-26b-a4b:layers=6", " ".join(["Attention"] * 6)),
    ],
)
def test_a_shape_may_have_its_first_layers_alone(name: str, mixers: str) -> None:
    config = shapes.shape_config(name)
    assert [type(layer.mixer).__name__ for layer in config.layers] == mixers.split()
    whole = shapes.shape_config(name.partition(":")[0]).layers
    assert config.layers == whole[: config.num_layers]


def test_a_shape_has_the_experts_that_its_model_was_published_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    fewer = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = shapes.SHAPES["gpt-oss-20b"] | small | fewer | {"num_local_experts": 4}
    monkeypatch.setattr(shapes, "SHAPES", {"small": shape})
    weights = Bundle.open(shapes.shape_bundle("small")).manifest.weights
    assert weights is not None
    experts = {str(form) for name, form in weights.formats.items() if "experts" in name}
    assert experts == {"4/32/e2m1"}
    assert "4/64/zero_point" in map(str, weights.formats.values())


@pytest.mark.usefixtures("tiny_shape")
def test_a_shape_is_made_once() -> None:
    path = shapes.shape_bundle("tiny")
    written = (path / "kvq.json").stat().st_mtime_ns
    assert Bundle.open(path).manifest.name == "tiny"
    assert shapes.shape_bundle("tiny") == path
    assert (path / "kvq.json").stat().st_mtime_ns == written


# What cannot be measured


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "gpt-5"], "choose qwen2.5-0.5b, lfm2-1.2b, qwen3.5-0.8b"),
        (["--shape", "llama-3-8b:layers=33"], "write llama-3-8b:layers=1 to 32"),
        (["--shape", "llama-3-8b:heads=3"], "write llama-3-8b:layers=1 to 32"),
        (["--batch", "0"], "--batch 0 is not possible: give 1 or more"),
        (["--batch", "2", "--suite", "drafts"], "--suite drafts knows no --batch"),
        (["--device", "cpu", "--suite", "several"], "--suite several knows no --device"),
        (["--peer", "onnxruntime,kvq"], "--peer 'kvq' is not known"),
        (["--peer", "vllm"], "choose onnxruntime, llama.cpp, llama-bench=COMMAND"),
        (["--peer", "llama-bench"], "--peer 'llama-bench' is not known"),
        (["--peer", "onnxruntime=it"], "--peer 'onnxruntime=it' is not known"),
        (["--threads", "0"], "--threads 0 is not possible"),
        (["--rows", "257"], "--rows 257 is not possible: give 1 to 256"),
        (["--linear", "blas"], "--linear blas is not possible: choose kvq, ort or hi"),
        (["--chats", "1,4"], "--chats needs --suite serve"),
        (["--kv-predict", "50%"], "--kv-predict needs --suite ttft"),
        (["--repeat", "0"], "--repeat 0"),
        (["--context", "64,-1"], "--context -1"),
        (["--kv", "4:2,3:3"], "choose 8, 6, 4 or 2"),
        (["--kv", "4:2,fp", "--kbits", "8"], "refine one setting"),
        (["--kv-policy", "oldest"], "--kv-policy needs a --kv-budget"),
        (["--kv-policy", "best", "--kv-budget", "1MiB"], "--kv-policy 'best' is unknown"),
        (["--kv-budget", "few"], "--kv-budget 'few' is not possible"),
        (["--kv", "8:8,fp", "--kv-budget", "10%"], "an unquantised cache gives nothing up"),
        (["--context", "300", "--kv-budget", "400tok"], "--kv-policy would have nothing to do"),
        (
            ["--context", "300", "--kv-budget", "4KiB"],
            "cannot hold the least that this model keeps",
        ),
        (["--plot", "no/such/folder/p.png"], "there is no folder"),
        (["--plot", "p.exe"], "must end in .png"),
    ],
)
def test_bad_flags_are_refused(
    make: Make, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    model = [] if "--shape" in words else [str(make("llama").path)]
    assert main(["bench", *model, *words]) == 2
    assert message in capsys.readouterr().err


def test_one_model_or_one_shape(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(make("llama").path), "--shape", "smollm2-135m"]) == 2
    assert "name one model, or one --shape" in capsys.readouterr().err


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match='pip install "kvq-runtime\\[gguf\\]"'):
        check_peers(["llama.cpp"])
    with pytest.raises(BackendError, match="pip install onnxruntime"):
        check_peers(["onnxruntime"])
    with pytest.raises(BackendError, match="pip install torch transformers optimum-quanto"):
        check_peers(["transformers"])
    with pytest.raises(UsageError, match="vllm"):
        check_peers(["vllm"])
