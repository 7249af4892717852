"""`kvq bench`: what it measures of our cache, and what it reports."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_bundles import TOLERANCE, Make
from kvq.cache import Cache
from kvq.errors import BackendError
from kvq_apps.bench import bandwidth, engine_kvq
from kvq_apps.bench.engine_llamacpp import LlamaCppEngine
from kvq_apps.bench.engines import InProcess, Setting, check_peers, open_engine
from kvq_apps.bench.measure import Case, SpeedJob, _decode, measure
from kvq_apps.bench.plot import log_ticks
from kvq_apps.bench.report import comparisons, passes
from kvq_apps.cli import main
from kvq_runtime import gpu
from kvq_runtime.bundle import Bundle

KV_ROW_BYTES = {"fp32": 256, "fp16": 128, "int8": 64, "f16": 128, "q8_0": 68, "q4_0": 36}
ROW_KEYS = {
    "engine", "kv", "kv_policy", "kv_read", "context", "threads", "decode_ms", "decode_min_ms",
    "decode_p95_ms", "decode_samples", "relief_share",
    "prefill_tok_s", "prefill_samples", "prefill_skipped", "ttft_ms", "kv_bytes",
    "weight_bytes_read", "kv_bytes_read", "bandwidth_share", "pass_ms", "attention_ms",
    "memory_bytes_s", "batch_attention_ms",
}  # fmt: skip


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
        (["--peer", "vllm"], "choose llama.cpp, llama-bench=COMMAND, onnxruntime"),
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
