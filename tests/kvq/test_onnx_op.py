"""`kvq::Attention` inside ONNX Runtime: the same numbers as the C ABI, and errors as sentences."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from caches import budget_for_tokens, open_cache
from kvq import native_library
from kvq.class_cache import ClassCache
from kvq.config import AttentionParams, CacheShape, KvPlan
from kvq_runtime.machine.onnx_runtime import onnx_runtime
from pairs import Float, attention, forward, frequencies, pack_heads, random_heads

ort = onnx_runtime()
pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

SHAPE = CacheShape(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=64)
WIDTH = (6 + 2 * 2) * 64
CONTEXT = 2400


def model(params: AttentionParams, present: tuple[bool, ...] = (False, False, False)) -> bytes:
    """One `kvq::Attention` node; absent inputs in front of a present one are empty names."""
    optional = ("q_norm", "k_norm", "sink_logits")
    names = [name if there else "" for name, there in zip(optional, present, strict=True)]
    inputs = [
        helper.make_tensor_value_info("qkv", TensorProto.FLOAT, ["T", "W"]),
        helper.make_tensor_value_info("positions", TensorProto.INT64, ["P"]),
        helper.make_tensor_value_info("cache", TensorProto.INT64, ["S"]),
        helper.make_tensor_value_info("sequence_rows", TensorProto.INT64, ["R"]),
        helper.make_tensor_value_info("inv_freq", TensorProto.FLOAT, ["pairs"]),
        *(helper.make_tensor_value_info(n, TensorProto.FLOAT, ["D"]) for n in names if n),
    ]
    node = helper.make_node(
        "Attention",
        ["qkv", "positions", "cache", "sequence_rows", "inv_freq", *_without_tail(names)],
        ["out"],
        name="attention",
        domain="kvq",
        **asdict(params),
    )
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["T", "O"])
    graph = helper.make_graph([node], "attention", inputs, [output])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("kvq", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return made.SerializeToString()


def _without_tail(names: list[str]) -> list[str]:
    """Optional inputs, trailing absent ones left out as exporters do."""
    while names and not names[-1]:
        names = names[:-1]
    return names


def session(graph: bytes, threads: int = 1) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(native_library.library_path()))
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def feed(cache: ClassCache | int, rows: Float, positions: np.ndarray, **extra: Float) -> dict:
    handle = cache if isinstance(cache, int) else cache.handle
    return {
        "qkv": rows,
        "positions": positions,
        "cache": np.array([handle]),
        "sequence_rows": np.array([len(positions)]),
        "inv_freq": frequencies(32),
        **extra,
    }


@pytest.fixture
def caches() -> Iterator[list[ClassCache]]:
    """Two equal caches, divided for two threads."""
    plan = KvPlan(k_bits=4, v_bits=2)
    budget = budget_for_tokens(SHAPE, plan, CONTEXT, threads=2)
    made = [open_cache(SHAPE, plan, budget, CONTEXT, threads=2) for _ in range(2)]
    yield made
    for cache in made:
        cache.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_session_computes_what_attend_computes(caches: list[ClassCache], threads: int) -> None:
    """Prefill in chunks, decoding and drafts, windows and soft caps: equal outputs and bytes."""
    layers = [
        attention(SHAPE, 0, softcap=30.0, rope_factor=1.2),
        attention(SHAPE, 1, window_tokens=700),
    ]
    runs = [session(model(params), threads) for params in layers]
    rng = np.random.default_rng(threads)
    through_graph, direct = caches
    for count in (1, 200, 256, 63, 8, 256, 256, 256, 256, 256, 256, 5, 1, 1):
        rows = [pack_heads(*random_heads(rng, SHAPE, count)) for _ in layers]
        positions = np.arange(count) + direct.tokens
        expected = forward(direct, layers, rows, positions, frequencies(32))
        through_graph.begin(count)
        for run, row, want in zip(runs, rows, expected, strict=True):
            (got,) = run.run(None, feed(through_graph, row, positions))
            assert got.shape == (count, 6 * 64)
            assert (got == want).all()
        for cache in caches:
            cache.commit(count)
    assert through_graph.tokens == direct.tokens == 2071
    assert through_graph.state() == direct.state()


@pytest.mark.parametrize(
    "there", [(True, False, False), (False, True, True), (True, True, False), (False, False, True)]
)
def test_norms_and_sinks_are_optional_inputs(
    caches: list[ClassCache], there: tuple[bool, ...]
) -> None:
    params = attention(SHAPE, 0, norm_eps=1e-5)
    run = session(model(params, there))
    rng = np.random.default_rng(5)
    weights = rng.uniform(0.5, 2, (2, 64)).astype(np.float32)
    options = {"q_norm": weights[0]} if there[0] else {}
    options |= {"k_norm": weights[1]} if there[1] else {}
    options |= {"sink_logits": np.arange(6, dtype=np.float32)} if there[2] else {}
    rows, positions = pack_heads(*random_heads(rng, SHAPE, 30)), np.arange(30)
    through_graph, direct = caches
    for cache in caches:
        cache.begin(30)
    (got,) = run.run(None, feed(through_graph, rows, positions, **options))
    want = direct.attend(params, rows, positions, frequencies(32), **options)
    assert (got == want).all()
    plain = direct.attend(params, rows, positions, frequencies(32))
    assert np.abs(got - plain).max() > 0.01


FIRST = attention(SHAPE, 0)


def rows_of(count: int, width: int = WIDTH) -> Float:
    return np.ones((count, width), np.float32)


def expect_error(message: str, run: Any, inputs: dict) -> None:
    with pytest.raises(Exception, match=f"kvq::Attention: .*{message}") as caught:
        run.run(None, inputs)
    assert type(caught.value).__module__.startswith("onnxruntime")


def test_an_unknown_or_closed_handle_is_an_exception(caches: list[ClassCache]) -> None:
    run = session(model(FIRST))
    expect_error("no open cache has handle 0", run, feed(0, rows_of(1), np.array([0])))
    expect_error("no open cache has handle -7", run, feed(-7, rows_of(1), np.array([0])))
    stale = caches[0].handle
    caches[0].close()
    expect_error(f"no open cache has handle {stale}", run, feed(stale, rows_of(1), np.array([0])))
    caches[1].begin(1)
    assert (run.run(None, feed(caches[1], rows_of(1), np.array([0])))[0] == 1).all()


def test_begin_must_have_been_called(caches: list[ClassCache]) -> None:
    run = session(model(FIRST))
    message = r".*begin\(\) was not called for this many tokens"
    expect_error(message, run, feed(caches[0], rows_of(2), np.array([0, 1])))
    caches[0].begin(3)
    expect_error(message, run, feed(caches[0], rows_of(2), np.array([0, 1])))
    assert (run.run(None, feed(caches[0], rows_of(3), np.arange(3)))[0] == 1).all()


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("qkv", np.ones((2, WIDTH - 64), np.float32)),
        ("qkv", np.ones((3, WIDTH), np.float32)),
        ("positions", np.arange(3)),
        ("cache", np.array([1, 1])),
        ("cache", np.zeros(0, np.int64)),
        ("sequence_rows", np.array([1, 1])),
        ("inv_freq", np.ones(33, np.float32)),
        ("q_norm", np.ones(63, np.float32)),
        ("k_norm", np.ones(128, np.float32)),
        ("sink_logits", np.ones(2, np.float32)),
    ],
)
def test_wrong_shapes_are_refused(
    caches: list[ClassCache], changed: str, value: np.ndarray
) -> None:
    run = session(model(FIRST, (True, True, True)))
    options = {name: np.ones(64, np.float32) for name in ("q_norm", "k_norm")}
    options["sink_logits"] = np.ones(6, np.float32)
    caches[0].begin(2)
    good = feed(caches[0], rows_of(2), np.arange(2), **options)
    expect_error("input shapes do not match the attributes", run, good | {changed: value})
    assert run.run(None, good)[0].shape == (2, 6 * 64)


@pytest.mark.parametrize(
    ("params", "inputs"),
    [
        (attention(SHAPE, 2), {}),
        (attention(CacheShape(num_layers=1, num_heads=8, num_kv_heads=1, head_dim=64)), {}),
        (attention(CacheShape(num_layers=1, num_heads=3, num_kv_heads=1, head_dim=128)), {}),
        (FIRST, {"positions": np.array([-1])}),
        (FIRST, {"positions": np.array([1 << 31])}),
    ],
)
def test_a_node_that_does_not_fit_the_cache_is_refused(
    caches: list[ClassCache], params: AttentionParams, inputs: dict[str, np.ndarray]
) -> None:
    run = session(model(params))
    width = (params.num_heads + 2 * params.num_kv_heads) * params.head_dim
    caches[0].begin(1)
    feeds = feed(caches[0], rows_of(1, width), np.array([0])) | inputs
    expect_error("an argument does not fit the cache", run, feeds)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e5])
@pytest.mark.parametrize("where", [6 * 64, 8 * 64 + 5], ids=["key", "value"])
def test_numbers_beyond_float16_are_refused(
    caches: list[ClassCache], value: float, where: int
) -> None:
    run = session(model(FIRST))
    rows = rows_of(2)
    rows[1, where] = value
    caches[0].begin(2)
    expect_error(
        "a key or value is not finite in float16", run, feed(caches[0], rows, np.arange(2))
    )
    caches[0].rewind()
    caches[0].begin(2)
    assert (run.run(None, feed(caches[0], rows_of(2), np.arange(2)))[0] == 1).all()


def test_a_missing_attribute_is_named() -> None:
    made = onnx.load_from_string(model(FIRST))
    kept = [a for a in made.graph.node[0].attribute if a.name != "window_tokens"]
    del made.graph.node[0].attribute[:]
    made.graph.node[0].attribute.extend(kept)
    with pytest.raises(Exception, match="window_tokens"):
        session(made.SerializeToString())


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("num_heads", (1 << 32) + 6),
        ("num_kv_heads", (1 << 32) + 2),
        ("head_dim", (1 << 32) + 64),
        ("head_dim", 0),
        ("layer", 1 << 32),
        ("layer", -1),
        ("window_tokens", 1 << 63 - 1),
        ("num_heads", 1 << 20),
        ("num_kv_heads", 0),
    ],
)
def test_attributes_out_of_range_are_refused_not_cut(attribute: str, value: int) -> None:
    made = onnx.load_from_string(model(FIRST))
    (node_attribute,) = (a for a in made.graph.node[0].attribute if a.name == attribute)
    node_attribute.i = value
    with pytest.raises(Exception, match=r"out of range|none of a cache's"):
        session(made.SerializeToString())


# ---- several sequences ---------------------------------------------------------------------------


def sequences(count: int) -> list[ClassCache]:
    """Caches of different widths and lengths, filled alike whenever this is called."""
    made = []
    for index, (tokens, widths) in enumerate(
        [(3, (4, 2)), (700, (8, 8)), (1500, (4, 4)), (131, (16, 16)), (1, (8, 2))][:count]
    ):
        plan = KvPlan(k_bits=widths[0], v_bits=widths[1])
        budget = budget_for_tokens(SHAPE, plan, CONTEXT, threads=2)
        cache = open_cache(SHAPE, plan, budget, CONTEXT, threads=2)
        rng = np.random.default_rng(index)
        layers = [attention(SHAPE, layer) for layer in range(2)]
        while cache.tokens < tokens:
            part = min(250, tokens - cache.tokens)
            rows = [pack_heads(*random_heads(rng, SHAPE, part)) for _ in layers]
            forward(cache, layers, rows, np.arange(part) + cache.tokens, frequencies(32))
            cache.commit(part)
        made.append(cache)
    return made


def joined(caches: list[ClassCache], rows: list[Float], positions: list[np.ndarray]) -> dict:
    return feed(caches[0], np.concatenate(rows), np.concatenate(positions)) | {
        "cache": np.array([cache.handle for cache in caches]),
        "sequence_rows": np.array([len(part) for part in rows]),
    }


# Decoding, drafts and trees, and a chunk of a prompt that closes pages, in one pass.
BRANCHES = [
    (1, None),
    (5, [-1, 0, 0, 1, -1]),
    (1, None),
    (200, None),
    (8, [-1, 0, 1, 2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_many_sequences_in_a_pass_equal_each_alone(count: int, threads: int) -> None:
    together, alone = sequences(count), sequences(count)
    params = [attention(SHAPE, 0, softcap=30.0), attention(SHAPE, 1, window_tokens=300)]
    runs = [session(model(layer), threads) for layer in params]
    rng = np.random.default_rng(count)
    for turn in range(3):
        branches = BRANCHES[turn:count] + BRANCHES[: min(turn, count)]
        for group in (together, alone):
            for cache, (rows, parents) in zip(group, branches, strict=True):
                cache.begin(rows, parents)
        for run in runs:
            rows = [pack_heads(*random_heads(rng, SHAPE, n)) for n, _ in branches]
            at = [np.arange(n) + c.tokens for c, (n, _) in zip(together, branches, strict=True)]
            (got,) = run.run(None, joined(together, rows, at))
            want = [
                run.run(None, feed(cache, part, where))[0]
                for cache, part, where in zip(alone, rows, at, strict=True)
            ]
            assert (got == np.concatenate(want)).all()
        for group in (together, alone):
            for cache, (rows, parents) in zip(group, branches, strict=True):
                cache.commit(rows if parents is None else [0])
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.state() == theirs.state()
        mine.close()
        theirs.close()


def test_a_pass_of_sequences_that_do_not_fit_together_is_refused() -> None:
    first, second = sequences(2)
    run = session(model(FIRST))
    for cache in (first, second):
        cache.begin(2)
    rows = [rows_of(2), rows_of(2)]
    good = joined([first, second], rows, [np.arange(2) + 3, np.arange(2) + 700])
    expect_error(
        f"cache {first.handle} is given twice", run, good | {"cache": np.array([first.handle] * 2)}
    )
    expect_error("no open cache has handle -1", run, good | {"cache": np.array([first.handle, -1])})
    for counts in ([3, 0], [1, 2], [2, 3], [-1, 5], [1 << 62, 1 << 62], [4, 1 << 63 - 4]):
        message = "sequence_rows do not add up"
        expect_error(message, run, good | {"sequence_rows": np.array(counts)})
    expect_error("begin", run, good | {"sequence_rows": np.array([1, 3])})
    assert np.isfinite(run.run(None, good)[0]).all()
    for cache in (first, second):
        cache.rewind()
        cache.close()
