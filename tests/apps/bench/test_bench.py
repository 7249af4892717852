"""`kvq bench`: what it measures of our cache, and what it reports."""

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from bench_bundles import TOLERANCE, Make, need
from kvq.class_cache import ClassCache
from kvq.errors import BackendError
from kvq_apps.bench import bandwidth, engine_kvq
from kvq_apps.bench.engine_llamacpp import LlamaCppEngine
from kvq_apps.bench.engines import BenchSequence, Setting, check_peers, open_engine
from kvq_apps.bench.measure import Case, SpeedJob, _decode, measure
from kvq_apps.bench.report import print_rows
from kvq_apps.cli import main
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.machine import gpu

KV_ROW_BYTES = {"fp32": 256, "fp16": 128, "int8": 64, "f16": 128, "q8_0": 68, "q4_0": 36}
ROW_KEYS = {
    "engine", "kv", "kv_policy", "kv_read", "context", "threads", "decode_ms", "decode_min_ms",
    "decode_p95_ms", "decode_samples", "relief_share",
    "prefill_tok_s", "prefill_samples", "prefill_skipped", "ttft_ms", "kv_bytes",
    "weight_bytes_read", "kv_bytes_read", "bandwidth_share", "pass_ms", "attention_ms",
    "memory_bytes_s", "relief_ms",
}  # fmt: skip


# What is reported


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def quick_flags(bundle: Bundle) -> list[str]:
    return [str(bundle.path), "--context", "150,20", "--repeat", "2", "--prefill", "16"]


def test_every_engine_is_measured(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make("qwen2")
    peers = ["llama.cpp"] if LlamaCppEngine.missing(gpu.PROCESSOR) is None else []
    data = bench(
        capsys, *quick_flags(bundle), "--kv", "4:2,fp", "--threads", "1,2",
        *(["--peer", *peers] if peers else []),
    )  # fmt: skip
    settings = [("kvq", "4:2"), ("kvq", "fp")]
    settings += [case for case in TOLERANCE if case[0] in peers]
    expected = [(*case, depth, n) for n in (1, 2) for depth in (20, 150) for case in settings]
    cases = [
        tuple(row[key] for key in ("engine", "kv", "context", "threads")) for row in data["rows"]
    ]
    assert cases == expected
    for row in data["rows"]:
        assert set(row) == ROW_KEYS
        assert row["decode_ms"] >= row["decode_min_ms"] > 0
        assert row["decode_samples"] == 6
        assert row["prefill_samples"] == 3
        assert row["ttft_ms"] == pytest.approx(16 / row["prefill_tok_s"] * 1e3)
        assert row["pass_ms"].keys() == {"1", "5"}
        alone = {"1", "5"} if row["engine"] == "kvq" else set()
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


def expected_median(rows: list[dict[str, Any]]) -> float:
    setting = {"engine": "kvq", "kv": "4:2", "context": 150, "threads": 2}
    return next(row["decode_ms"] for row in rows if setting.items() <= row.items())


@pytest.mark.slow
def test_the_table_names_every_case(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    need("transformers")
    words = ["bench", *quick_flags(make("llama")), "--threads", "1", "--peer", "transformers"]
    assert main([*words, "--kbits", "8"]) == 0
    out = capsys.readouterr().out
    assert "tiny" not in out
    assert all(text in out for text in ("decode ms", "kvq", "8:4", "fp32", "of 1 row", "of memory"))
    assert out.count("transformers  fp32") >= 2


def test_the_tables_have_no_column_of_dashes(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *quick_flags(make("llama")), "--threads", "1", "--kbits", "8"]) == 0
    out = capsys.readouterr().out
    assert "decode ms" in out
    assert "of 1 row" in out
    assert "times kvq" not in out
    assert "-" not in out.split()


def test_a_row_holds_medians_and_rates() -> None:
    setting = Setting(kv="4:2", policy="h2o", budget="1MiB")
    case = Case(engine="kvq", setting=setting, context=64, threads=1, sequence=Silent())
    case.decode_s += [0.004, 0.002, 0.003]
    case.relief_s += [0.0001, 0.0005, 0.0003]
    case.prefill_s += [0.5, 0.25, 2.0]
    case.pass_s |= {1: [0.004, 0.005, 0.009]}
    case.attention_s |= {1: [0.002, 0.001, 0.009], 4: [0.003, 0.004, 0.001]}
    row = case.row(SpeedJob(contexts=(64,), kv=("4:2",), prefill_tokens=100), 1e6)
    assert (row["decode_ms"], row["decode_min_ms"], row["decode_p95_ms"]) == (3.0, 2.0, 4.0)
    assert (row["relief_share"], row["relief_ms"]) == pytest.approx((0.1, 64 * 0.3))
    assert (row["kv"], row["kv_policy"], case.name) == ("4:2", "h2o", "kvq 4:2 h2o")
    assert (row["prefill_tok_s"], row["ttft_ms"]) == (200.0, 500.0)
    assert (row["pass_ms"], row["attention_ms"]) == ({"1": 5.0}, {"1": 2.0, "4": 3.0})
    assert (row["weight_bytes_read"], row["kv_bytes_read"], row["kv_bytes"]) == (600, 60, 77)
    # 660 bytes in 3 ms, of a million a second
    assert row["bandwidth_share"] == pytest.approx(0.22)


class Silent(BenchSequence):
    """A sequence nobody runs."""

    kv_bytes = 77

    def forward(self, ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(ids), np.float32)

    def rollback(self) -> None: ...

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


def test_a_run_that_is_ended_has_printed_the_depths_before(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = engine_kvq.KvqEngine.sequence

    def interrupted(engine: engine_kvq.KvqEngine, setting: Setting, depth: int, room: int) -> Any:
        if depth == 150:
            raise KeyboardInterrupt
        return sequence(engine, setting, depth, room)

    monkeypatch.setattr(engine_kvq.KvqEngine, "sequence", interrupted)
    words = ["bench", *quick_flags(make("llama")), "--threads", "1", "--kv", "4:2"]
    assert main(words) == 130
    out = capsys.readouterr().out
    assert out.count("decode ms") == 1
    assert "\n20 tokens, threads: 1; memory: " in out
    assert main([*words, "--json"]) == 130
    assert "kvq 4:2 at 20, threads: 1: " in capsys.readouterr().err


# Several rows in a pass


@pytest.mark.usefixtures("tiny_shape")
def test_a_shape_has_weights_of_the_bits_that_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--shape", "tiny", "--context", "70", "--repeat", "1", "--prefill", "8"]
    read = {}
    for bits in ("8", "4"):
        data = bench(capsys, *words, "--wbits", bits, "--threads", "1")
        read[bits] = data["rows"][0]["weight_bytes_read"]
        assert (bits == "8") == ([*data["weights"]["formats"]] == ["8/64/symmetric"])
    # The head of 4-bit weights has 8 bits, of which only as much is read as a choice needs.
    assert read["4"] < 0.8 * read["8"]
    assert main(["bench", "--shape", "tiny", "--wbits", "7"]) == 2
    assert "--wbits 7 is not possible: choose 3, 4, 5, 6 or 8" in capsys.readouterr().err


def test_a_step_and_a_pass_read_what_is_stored(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make("qwen2", bits=8)
    words = ["--context", "70", "--repeat", "1", "--prefill", "8", "--threads", "1", "--kv", "8:8"]
    (row,) = bench(capsys, str(bundle.path), *words, "--rows", "1,2,130")["rows"]
    # All that is stored, but norms, biases, rotary frequencies, and of the embedding every panel.
    vectors = 5 * 256 + 2 * bundle.config.first_attention.qkv_width + 32
    panel_bytes = 16 * 256 + 16 * 4 * 2
    assert row["weight_bytes_read"] == bundle.weight_bytes_per_step - 4 * vectors - panel_bytes
    # 70 tokens of two layers of two heads of 64, keys and values in float16: none has left yet
    assert row["kv_bytes_read"] == 70 * 2 * 2 * 64 * 2 * 2
    assert row["pass_ms"].keys() == row["attention_ms"].keys() == {"1", "2", "130"}


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


@pytest.mark.parametrize("case", ["qwen2", "lfm2-1.2b", "qwen3.5-0.8b"])
def test_attention_alone_is_that_of_every_layer(make: Make, case: str) -> None:
    """Layers of another kind may stand between those that attend."""
    bundle = make(case)
    config = bundle.config
    opened = open_engine("kvq", bundle, threads=1, settings=[Setting(kv="8:8")])
    sequence = opened.sequence(Setting(kv="8:8"), 150, 16)
    cache = sequence._cache
    rows = engine_kvq.random_rows(5, config.first_attention.qkv_width)
    positions = np.arange(150, 155)
    cache.begin(5)
    actual = opened._attention.run(cache, rows, rope_long=False).numpy()
    cache.commit(())
    cache.begin(5)
    expected = np.zeros_like(actual)
    for layer in config.cache_classes[0].layers:
        normed = config.layers[layer].attention.qk_norm == "heads"
        norms = [bundle.read_weight(f"layers.{layer}.{side}_norm") for side in "qk" * normed]
        params, freq = config.attention(layer), config.inv_freq(layer, long_rope=False)
        expected += cache.attend(params, rows, positions, freq, *(norms or [None, None]))
    cache.commit(())
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert sequence.attend(8)
    # What other layers keep would need rows of every layer.
    assert sequence.attend(9) == (case == "qwen2")
    sequence.close()
    opened.close()


def test_rows_are_held_against_kvq_and_passes_against_one_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kvq_row = {
        "engine": "kvq", "kv": "4:4", "kv_policy": None, "context": 64, "threads": 1,
        "decode_ms": 10.0, "decode_min_ms": 9.0, "prefill_tok_s": 200.0, "prefill_skipped": None,
        "ttft_ms": 1280.0, "kv_bytes": 1024, "kv_bytes_read": 1, "weight_bytes_read": 1023,
        "bandwidth_share": 0.5, "memory_bytes_s": 1 << 30, "pass_ms": {"1": 10.0, "5": 14.0},
        "attention_ms": {"1": 2.0, "5": 4.0},
    }  # fmt: skip
    peer = kvq_row | {
        "engine": "llama.cpp", "kv": "f16", "decode_ms": 12.5, "prefill_tok_s": 50.0,
        "pass_ms": {"5": 9.0}, "attention_ms": {},
    }  # fmt: skip
    rows = [row | {"relief_share": 0.0, "relief_ms": 0.0} for row in (kvq_row, peer)]
    print_rows(rows, SpeedJob(contexts=(64,), kv=("4:4",)))
    caption, table, passes = capsys.readouterr().out.strip().split("\n\n")
    assert caption == "64 tokens, threads: 1; memory: 1.00 GiB/s"
    cells = [re.split("  +", line) for line in table.splitlines()]
    assert cells == [
        ["engine", "kv", "decode ms", "times kvq", "(min)", "prefill 256, tok/s", "times kvq",
         "ttft ms", "KV", "a step reads", "of memory"],
        ["kvq", "4:4", "10.00", "-", "9.00", "200.0", "-", "1280", "1.0 KiB", "1.0 KiB", "50%"],
        ["llama.cpp", "f16", "12.50", "1.25 x", "9.00", "50.0", "0.25 x", "1280", "1.0 KiB",
         "1.0 KiB", "50%"],
    ]  # fmt: skip
    assert [re.split("  +", line) for line in passes.splitlines()] == [
        ["rows of one sequence", "kv", "rows", "pass ms", "of 1 row", "attention ms"],
        ["kvq", "4:4", "1", "10.00", "1.00 x", "2.00"],
        ["kvq", "4:4", "5", "14.00", "1.40 x", "4.00"],
        ["llama.cpp", "f16", "5", "9.00", "-", "-"],
    ]


def test_memory_is_read_at_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(bandwidth, "perf_counter", lambda: next(clock) / 4)
    assert bandwidth.read_bandwidth(2) == 4 << 20


def test_a_prefill_too_long_is_left_out(make: Make) -> None:
    job = SpeedJob(
        contexts=(16, 500), kv=("4:2",), repeat=1, prefill_tokens=16, prefill_limit_s=1e-6
    )
    (shallow,), (deep,) = measure(make("llama"), job, 1, lambda done, total, label: None)
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
    begin = ClassCache.begin

    def counted(cache: ClassCache, tokens: int, *more: Any, **options: Any) -> None:
        before = cache.used_bytes
        begin(cache, tokens, *more, **options)
        if cache.used_bytes < before and tokens == 1:
            decided.append((type(cache.policy).__name__, cache.tokens))

    monkeypatch.setattr(ClassCache, "begin", counted)
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
    for row in pressed:
        assert row["relief_ms"] == pytest.approx(64 * row["decode_ms"] * row["relief_share"])
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
    assert "making room" not in capsys.readouterr().out
    assert main([*words, "--kv-policy", "oldest"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("8:8 oldest", "making room", "at once, ms"))


# What cannot be measured


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "gpt-5"], "choose qwen2.5-0.5b, lfm2-1.2b, qwen3.5-0.8b"),
        (["--shape", "llama-3-8b:layers=33"], "write llama-3-8b:layers=1 to 32"),
        (["--shape", "llama-3-8b:heads=3"], "write llama-3-8b:layers=1 to 32"),
        (["--peer", "llama.cpp", "--suite", "drafts"], "--suite drafts knows no --peer"),
        (["--device", "cpu", "--suite", "edit"], "--suite edit knows no --device"),
        (["--peer", "kvq,llama.cpp"], "--peer 'kvq' is not known"),
        (["--peer", "vllm"], "choose llama.cpp, llama-bench=COMMAND, transformers"),
        (["--peer", "llama-bench"], "--peer 'llama-bench' is not known"),
        (["--peer", "transformers=it"], "--peer 'transformers=it' is not known"),
        (["--peer", "onnxruntime"], "--peer 'onnxruntime' is not known"),
        (["--threads", "0"], "--threads 0 is not possible"),
        (["--rows", "257"], "--rows 257 is not possible: give 1 to 256"),
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
    with pytest.raises(BackendError, match="pip install torch transformers optimum-quanto"):
        check_peers(["transformers"])
