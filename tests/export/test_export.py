"""Export: the quantiser, the graph, the bundle it writes, what it leaves behind when stopped."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from kvq import native
from kvq.config import KvPlan
from kvq.errors import BundleError, ModelError, UsageError
from kvq.native_linear import weight_bytes_read
from kvq.reference_linear import (
    WIDTHS,
    BlockFormat,
    Grid,
    View,
    dequantize,
    linear,
    pack,
    restore,
)
from kvq_export import quality
from kvq_export.checkpoint import Checkpoint
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.hub import locate
from kvq_export.random_bundle import random_bundle
from kvq_export.staging import staged
from kvq_export.weights import quantize, quantize_chunks
from kvq_export.writer import stored
from kvq_models.config import Attention, Dense, Layer, ModelConfig, RopeConfig
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import family_for, read_checkpoint
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.manifest import DATA_FILE, MANIFEST_FILE, MODEL_FILE, checksum
from kvq_runtime.onnx_runtime import onnx_runtime, onnx_runtime_state
from shelf import EIGHT, PLAIN
from tiny import altered, checkpoint_weights, make_llama_checkpoint

needs_native = pytest.mark.skipif(not native.available(), reason=native.why_not())


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(found - expected).sum() / np.square(expected).sum())


# Its memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's memory")
def test_large_arrays_of_threads_go_back_to_the_system() -> None:
    program = (
        "import sys, threading\n"
        "import numpy as np\n"
        "from kvq_export import export\n"
        "def held():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon'))\n"
        "def work():\n"
        "    for _ in range(3):\n"
        "        arrays = [np.ones(5 << 20, np.float32) for _ in range(3)]\n"
        "        kept.append(bytearray(1000))\n"
        "        del arrays\n"
        "kept = []\n"
        "if sys.argv[1:]: export._return_large_arrays()\n"
        "before = held()\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(held() - before)\n"
    )
    kept, returned = (
        int(subprocess.check_output([sys.executable, "-c", program, *asked]))
        for asked in ([], ["asked"])
    )
    # Three arrays of 20 MiB at a time.
    assert kept > 20 * 1024
    assert returned < 5 * 1024


# The quantiser


@pytest.mark.parametrize("columns", [96, 128, 80, 2048])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_scale_search_beats_min_max_rounding(bits: int, block: int, columns: int) -> None:
    rows = np.random.default_rng(0).standard_normal((40, columns), np.float32)
    found = dequantize(quantize(rows, BlockFormat(bits=bits, block=block)), bits)[:, :columns]
    padded = np.pad(rows, ((0, 0), (0, -columns % block))).reshape(-1, block)
    step = np.abs(padded).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
    plain = (np.rint(padded / step) * step).reshape(40, -1)[:, :columns]
    limit = {4: 0.75, 8: 0.95}[bits]
    assert relative_error(found, rows) < limit * relative_error(plain, rows)


@pytest.mark.parametrize("bits", [4, 8])
def test_representable_weights_come_back_exactly(bits: int) -> None:
    random = np.random.default_rng(1)
    half = 2 ** (bits - 1)
    levels = random.integers(-half, half, (20, 64)).astype(np.float32)
    levels[:, ::32] = -half
    rows = levels * np.float32(2.0**-6) * np.where(np.arange(20) % 2, 1, -1)[:, None]
    blocks = quantize(rows.astype(np.float32), BlockFormat(bits=bits, block=32))
    np.testing.assert_array_equal(dequantize(blocks, bits), rows)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_zero_point_is_worth_its_byte(bits: int) -> None:
    """Blocks off centre lose a fifth of their error and more; exact ones none, and zero is zero."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((40, 640), np.float32) + np.float32(0.5)
    forms = [BlockFormat(bits=bits, grid=grid) for grid in (Grid.SYMMETRIC, Grid.ZERO_POINT)]
    plain, better = (relative_error(dequantize(quantize(rows, form), bits), rows) for form in forms)
    assert better < 0.8 * plain
    codes = random.integers(0, 1 << bits, (20, 64))
    codes[:, 0], codes[:, 1] = 0, (1 << bits) - 1
    # What a block holds exactly is found again, for any zero point among the codes.
    zeros = random.integers(0, 1 << bits, (20, 1))
    rows = ((codes - zeros) * 2.0**-6).astype(np.float32)
    np.testing.assert_allclose(dequantize(quantize(rows, forms[1]), bits), rows, atol=1e-6)
    rows[0], rows[1] = 0, 1e-30
    assert not dequantize(quantize(rows, forms[1]), bits)[:2].any()


def test_zero_and_tiny_blocks_are_stored_as_zeros() -> None:
    rows = np.zeros((2, 64), np.float32)
    rows[1, 40] = 1e-40
    assert not dequantize(quantize(rows, BlockFormat(block=32)), 4).any()


def test_chunks_on_threads_equal_one_call() -> None:
    rows = np.random.default_rng(2).standard_normal((50, 96), np.float32)
    form = BlockFormat(block=32, grid=Grid.ZERO_POINT)
    parts = list(quantize_chunks(np.array_split(rows, 7), form, threads=2))
    for found, whole in zip(zip(*parts, strict=True), quantize(rows, form), strict=True):
        np.testing.assert_array_equal(np.concatenate(found), whole)


@pytest.mark.parametrize(
    "wrong", [{"bits": 3}, {"bits": -4}, {"block": 48}, {"embedding_bits": 16}, {"linear": "mlas"}]
)
def test_impossible_weight_formats_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong.values()))} is not possible"):
        WeightFormat(**wrong)


# The graph


def frequencies(half: int) -> tuple[float, ...]:
    return tuple(map(float, np.float32(10_000.0) ** -(np.arange(half) / half)))


LAYER = Layer(mixer=Attention(heads=4, kv_heads=2, head_dim=16, scale=0.25), feed=Dense(width=96))
BASE = ModelConfig(
    model_type="llama",
    vocab_size=97,
    hidden_size=64,
    layers=(LAYER,) * 2,
    norm_eps=1e-6,
    tied_head=True,
    context_length=128,
    ropes=(RopeConfig(inv_freq=frequencies(8)),),
)
LONG = RopeConfig(
    inv_freq=frequencies(6),
    long_inv_freq=tuple(value / 2 for value in frequencies(6)),
    original_context=64,
    factor=1.2,
)
CONFIGS = {
    "llama": BASE,
    "untied, padded blocks": dataclasses.replace(BASE, tied_head=False, hidden_size=80),
    "tied, padded blocks": dataclasses.replace(BASE, hidden_size=80),
    "biases": altered(BASE, mixer={"qkv_bias": True, "output_bias": True}, feed={"bias": True}),
    "qwen3": altered(BASE, model_type="qwen3", mixer={"qk_norm": "heads"}),
    "phi3": dataclasses.replace(BASE, model_type="phi3", ropes=(LONG,)),
    "starcoder2": altered(
        BASE,
        model_type="starcoder2",
        mixer={"qkv_bias": True, "output_bias": True, "window_tokens": 4},
        feed={"activation": "gelu_tanh", "gated": False, "bias": True},
        norm="layer",
    ),
    "olmo2": altered(BASE, model_type="olmo2", mixer={"qk_norm": "rows"}, norms="after"),
    "gemma3": altered(
        dataclasses.replace(
            BASE,
            layers=(
                dataclasses.replace(
                    LAYER, mixer=dataclasses.replace(LAYER.mixer, window_tokens=4, rope=1)
                ),
                LAYER,
            ),
            ropes=(
                RopeConfig(inv_freq=frequencies(8)),
                RopeConfig(inv_freq=frequencies(8), factor=1.1),
            ),
        ),
        model_type="gemma3_text",
        mixer={"qk_norm": "heads", "softcap": 3.0},
        feed={"activation": "gelu_tanh"},
        norms="both",
        norm_offset=1.0,
        embedding_scale=8.0,
        final_softcap=5.0,
    ),
}
FORMATS = [WeightFormat(bits=8), WeightFormat(bits=4, block=64, embedding_bits=4)]
MIXED = WeightFormat(
    bits=5,
    block=32,
    embedding_bits=6,
    others={
        "layers.0.o": BlockFormat(bits=4, block=32, grid=Grid.MINIMUM),
        "layers.1.down": BlockFormat(bits=8, block=128),
    },
)


class CutGraph:
    """A bundle's graph on the CPU kernels, with numpy attention between its pieces.

    Each attention node is taken out: its input becomes an output of the graph and its output an
    input, fed on the next run. MatMulNBits is made not to quantise activations.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        model = ir.load(bundle.model_path)
        for node in list(model.graph):
            if node.op_type == "MatMulNBits":
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
            if node.op_type == "Attention":
                self._cut(model.graph, node)
        # The graph finds its data file beside it.
        path = bundle.path / "cut.onnx"
        ir.save(model, path)
        options = onnx_runtime().SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if bundle.manifest.weights.linear == "kvq":
            options.register_custom_ops_library(str(native.library_path()))
        self.session = onnx_runtime().InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )

    def _cut(self, graph: ir.Graph, node: ir.Node) -> None:
        config, layer = self.bundle.config, node.attributes["layer"].as_int()
        before, after = node.inputs[0], node.outputs[0]
        fed = ir.Value(
            name=f"attended.{layer}",
            shape=ir.Shape(["T", config.num_heads * config.head_dim]),
            type=ir.TensorType(ir.DataType.FLOAT),
        )
        after.replace_all_uses_with(fed)
        before.name, before.dtype = f"qkv.{layer}", ir.DataType.FLOAT
        before.shape = ir.Shape(["T", config.qkv_width])
        graph.remove(node, safe=True)
        graph.inputs.append(fed)
        graph.outputs.append(before)

    def logits(
        self, ids: np.ndarray, mix: np.ndarray, rows: np.ndarray, **options: list[int]
    ) -> np.ndarray:
        config, positions = self.bundle.config, np.arange(len(ids))
        feeds = {
            "input_ids": ids,
            "input_weights": mix,
            "position_ids": positions,
            "cache": np.zeros(1, np.int64),
            "sequence_rows": np.array([len(ids)]),
            "logit_rows": rows,
        } | {name: np.array(value) for name, value in options.items()}
        if config.has_long_rope:
            feeds["rope_long"] = np.ones(1, np.int64)
        for layer in range(config.num_layers):
            width = config.num_heads * config.head_dim
            feeds[f"attended.{layer}"] = np.zeros((len(ids), width), np.float32)
        memory = PlainAttention()
        for layer in range(config.num_layers):
            (qkv,) = self.session.run([f"qkv.{layer}"], feeds)
            norms = [None, None]
            if config.layers[0].mixer.qk_norm == "heads":
                norms = [self.bundle.read_weight(f"layers.{layer}.{n}_norm") for n in "qk"]
            table = config.inv_freq(layer, long_rope=True)
            feeds[f"attended.{layer}"] = memory.attend(
                config.attention(layer), qkv, positions, table, *norms
            )
        return self.session.run(["logits"], feeds)[0]


class Rounded:
    """Stands in for a weight in `forward`: `x @ weight.T` rounds x as `kvq::Linear` does."""

    __array_ufunc__ = None

    def __init__(self, bundle: Bundle, name: str, view: View) -> None:
        self.bundle, self.name, self.view = bundle, name, view
        self.form = bundle.form(name)
        self.panels = pack(self.form, stored(bundle.read_codes(name)))

    @property
    def T(self) -> "Rounded":  # noqa: N802 - numpy's name
        return self

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        return restore(self.form, self.panels)[ids]

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        return linear(self.form, self.panels, x, self.view)


def sources_of(config: ModelConfig) -> Any:
    return family_for({"model_type": config.model_type}).weights(config)


class WithoutLayers:
    """A config whose forward pass is embedding, final norm and head."""

    num_layers = 0

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class Case:
    """A random bundle, a mixed input, and what the numpy forward makes of both."""

    def __init__(self, name: str, weights: WeightFormat, folder: Path) -> None:
        self.config = CONFIGS[name]
        self.bundle = random_bundle(
            self.config, folder / "bundle", options=ExportOptions(weights=weights)
        )
        random = np.random.default_rng(3)
        self.ids = random.integers(0, self.config.vocab_size, (9, 2))
        self.mix = random.uniform(0, 1, (9, 2)).astype(np.float32)
        self.rows = np.array([0, 3, 8])

    def expected(self, weight: Any = None, config: Any = None) -> np.ndarray:
        return forward(
            config or self.config,
            weight or self.bundle.read_weight,
            self.ids[:, 0],
            np.arange(9),
            PlainAttention(),
            self.rows,
            (self.ids, self.mix),
            long_rope=True,
        )

    def rounded(self, view: View = "full", config: Any = None) -> np.ndarray:
        def weight(name: str) -> Any:
            vector = (
                len(sources_of(self.config).get(name, sources_of(self.config)["embed"]).shape) == 1
            )
            return self.bundle.read_weight(name) if vector else Rounded(self.bundle, name, view)

        return self.expected(weight, config)

    def found(self, **options: list[int]) -> np.ndarray:
        return CutGraph(self.bundle).logits(self.ids, self.mix, self.rows, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("weights", FORMATS, ids=["8 bit", "4 bit"])
@pytest.mark.parametrize("name", CONFIGS)
def test_standard_graph_computes_the_reference(
    name: str, weights: WeightFormat, tmp_path: Path
) -> None:
    case = Case(name, dataclasses.replace(weights, linear="ort"), tmp_path)
    np.testing.assert_allclose(case.found(), case.expected(), atol=5e-5, rtol=1e-4)
    case.rows = case.rows[:0]
    assert case.found().shape == (0, case.config.vocab_size)


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("weights", [*FORMATS, MIXED], ids=["8 bit", "4 bit", "mixed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_own_graph_computes_the_reference(name: str, weights: WeightFormat, tmp_path: Path) -> None:
    """But for single activations that float32's rounding carries to the next of 255 levels."""
    case = Case(name, weights, tmp_path)
    found, expected = case.found(), case.rounded()
    assert np.sqrt(relative_error(found, expected)) < 4e-3
    assert np.sqrt(relative_error(found, case.expected())) < 0.1
    upper = case.found(weights_view=[1])
    assert np.sqrt(relative_error(upper, case.rounded("hi"))) < 4e-3
    assert (upper == found).all() == (weights.bits == weights.embedding_bits == 4)
    case.rows = case.rows[:0]
    assert case.found().shape == (0, case.config.vocab_size)


@needs_native
def test_exact_rows_and_layer_modes(tmp_path: Path) -> None:
    case = Case("biases", WeightFormat(bits=4), tmp_path)
    full = case.found()
    few = case.found(exact_rows=[2])
    best = few.argmax(axis=1)[:, None]
    np.testing.assert_array_equal(
        np.take_along_axis(few, best, 1), np.take_along_axis(full, best, 1)
    )
    before = weight_bytes_read()
    skipped = case.found(layer_modes=[1, 1])
    read = weight_bytes_read() - before
    # Two runs for two layers' attention, one for the logits; no layer's weights are read.
    head = case.bundle.form("head")
    assert read == head.panels * head.panel_bytes * 3
    nothing = WithoutLayers(case.config)
    np.testing.assert_allclose(skipped, case.rounded(config=nothing), rtol=1e-4, atol=1e-4)


def test_graph_inputs_outputs_and_nodes(tmp_path: Path) -> None:
    bundle = random_bundle(CONFIGS["gemma3"], tmp_path / "bundle")
    model = ir.load(bundle.model_path)
    graph = model.graph
    shapes = {value.name: (value.dtype.name, list(map(str, value.shape))) for value in graph.inputs}
    assert shapes == {
        "input_ids": ("INT64", ["T", "K"]),
        "input_weights": ("FLOAT", ["T", "K"]),
        "position_ids": ("INT64", ["T"]),
        "cache": ("INT64", ["S"]),
        "sequence_rows": ("INT64", ["S"]),
        "logit_rows": ("INT64", ["R"]),
        "weights_view": ("INT64", ["1"]),
        "exact_rows": ("INT64", ["1"]),
        "layer_modes": ("INT64", ["2"]),
        "head_rows": ("INT64", ["1"]),
        "layers.1.map": ("UINT8", ["map.0", "map.1"]),
        "layers.1.map_bias": ("FLOAT", ["map_bias.0"]),
    }
    assert [value.name for value in graph.outputs] == ["logits"]
    assert model.opset_imports == {"": 21, "com.microsoft": 1, "kvq": 1}
    first = next(node for node in graph if node.op_type == "Attention")
    assert {name: attribute.value for name, attribute in first.attributes.items()} == {
        "layer": 0,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "scale": 0.25,
        "softcap": 3.0,
        "window_tokens": 4,
        "rope_factor": pytest.approx(1.1),
        "norm_eps": pytest.approx(1e-6),
    }
    assert [value.name for value in first.inputs[1:]] == [
        "position_ids",
        "cache",
        "sequence_rows",
        "rope.1.inv_freq",
        "layers.0.q_norm",
        "layers.0.k_norm",
    ]
    domains = {node.op_type: node.domain for node in graph}
    assert (domains["Linear"], domains["Embed"]) == ("kvq", "kvq")
    assert "MatMulNBits" not in domains


def test_the_standard_graph_asks_for_int8_products(tmp_path: Path) -> None:
    options = ExportOptions(weights=WeightFormat(linear="ort"))
    bundle = random_bundle(BASE, tmp_path / "bundle", options=options)
    products = [n for n in ir.load(bundle.model_path).graph if n.op_type == "MatMulNBits"]
    assert {node.attributes["accuracy_level"].as_int() for node in products} == {4}


def test_a_plain_layer_is_five_nodes(tmp_path: Path) -> None:
    def count(layers: int) -> int:
        config = dataclasses.replace(BASE, layers=(LAYER,) * layers)
        bundle = random_bundle(config, tmp_path / f"{layers}")
        return len(list(ir.load(bundle.model_path).graph))

    assert count(3) - count(2) == 5


def test_tied_head_shares_the_bytes_of_the_embedding(tmp_path: Path) -> None:
    own = random_bundle(BASE, tmp_path / "own")
    names = set(ir.load(own.model_path).graph.initializers)
    assert "embed.panels" in names
    assert "head.panels" not in names
    options = ExportOptions(weights=WeightFormat(linear="ort"))
    bundle = random_bundle(BASE, tmp_path / "bundle", options=options)
    tensors = {
        name: value.const_value
        for name, value in ir.load(bundle.model_path).graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert tensors["head.codes"].offset == tensors["embed.codes"].offset
    assert tensors["head.scales"].offset == tensors["embed.scales"].offset
    assert all(tensor.offset % 64 == 0 for tensor in tensors.values())
    ends = max(tensor.offset + tensor.length for tensor in tensors.values())
    assert ends == (bundle.path / DATA_FILE).stat().st_size == bundle.manifest.weights.num_bytes


def test_onnxruntime_has_the_cpu_kernels_the_graph_uses() -> None:
    kernels = {
        (kernel.domain, kernel.op_name)
        for kernel in onnx_runtime_state().get_all_opkernel_def()
        if kernel.provider == "CPUExecutionProvider"
    }
    microsoft = {
        "MatMulNBits",
        "GatherBlockQuantized",
        "QuickGelu",
    }
    assert {("com.microsoft", name) for name in microsoft} <= kernels
    assert {("", "SimplifiedLayerNormalization"), ("", "Gelu"), ("", "Einsum")} <= kernels


# The bundle an export writes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_come_back_near_the_checkpoint(tmp_path: Path, dtype: str) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype=dtype, attention_bias=True)
    bundle = export_model(source, tmp_path / "bundle", PLAIN)
    expected = checkpoint_weights(source)
    for name, limit in (
        ("embed", 1e-4),
        ("head", 1e-4),
        ("layers.0.qkv", 0.01),
        ("layers.1.gate_up", 0.01),
        ("layers.1.down", 0.01),
    ):
        assert relative_error(bundle.read_weight(name), expected(name)) < limit
    for name in ("final_norm", "layers.1.mlp_norm", "layers.0.qkv_bias"):
        np.testing.assert_array_equal(bundle.read_weight(name), expected(name))
    rows = bundle.read_weight("embed", np.array([5, 2]))
    np.testing.assert_array_equal(rows, bundle.read_weight("embed")[[5, 2]])


def test_sharded_and_single_checkpoints_give_the_same_bytes(tmp_path: Path) -> None:
    single = make_llama_checkpoint(tmp_path / "single", dtype="bfloat16")
    sharded = make_llama_checkpoint(tmp_path / "sharded", dtype="bfloat16", shards=3)
    first = export_model(single, tmp_path / "a", PLAIN)
    second = export_model(sharded, tmp_path / "b", PLAIN)
    assert first.manifest.files == second.manifest.files


def test_manifest_tokenizer_and_licence(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    (source / "README.md").write_text("---\nlanguage: en\nlicense:\n- apache-2.0\n---\n# A model\n")
    options = ExportOptions(kv=KvPlan(k_bits=8, v_bits=4), name="small", quality=False)
    calls: list[tuple[int, int]] = []
    bundle = export_model(
        source, tmp_path / "bundle", options, lambda done, total, _: calls.append((done, total))
    )
    manifest = bundle.manifest
    assert (manifest.name, manifest.kv) == ("small", KvPlan(k_bits=8, v_bits=4))
    assert manifest.source["license"] == "apache-2.0"
    assert manifest.source["model"] == "source"
    assert 0 in manifest.eos_token_ids
    assert manifest.tokens["fim"]["prefix"] == 3
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("def add(first)")) == "def add(first)"
    assert tokenizer.chat([{"role": "user", "content": "hi"}])[0] == 1
    total = manifest.weights.num_bytes
    written = [call for call in calls if call[1] == total]
    assert written == sorted(written)
    assert calls[0][0] == 0  # matrices whose damage was measured
    assert written[-1] == (total, total)
    assert calls[-1] == (1, 1)  # how pages are best encoded


@pytest.mark.parametrize(
    ("said", "sampling"),
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1,
             "repetition_penalty": 1.1, "typical_p": 0.3},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repeat_penalty": 1.1},
        ),
        ({"temperature": 0.7, "top_k": -1}, {"temperature": 0.7, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20}, {"temperature": 0}),
        ({"eos_token_id": 0, "temperature": None}, {}),
        # What cannot be is left out with a warning: the file is often a stranger's.
        (
            {"temperature": "hot", "top_p": 0, "top_k": 10**30, "min_p": 10**400,
             "repetition_penalty": 1.2},
            {"repeat_penalty": 1.2},
        ),
    ],
)  # fmt: skip
def test_the_manifest_keeps_how_the_model_asks_to_be_sampled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: dict[str, Any], sampling: dict[str, Any]
) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps(said))
    bundle = export_model(source, tmp_path / "bundle", PLAIN)
    assert bundle.manifest.sampling == sampling
    assert caplog.text.count("is not possible and is left out") == 4 * (said.get("top_p") == 0)
    with Engine.open(bundle.path, threads=1) as engine:
        assert engine.model.sampling == Sampling(**sampling)
    # A bundle of before says nothing of it, one of later may say more.
    path = bundle.path / MANIFEST_FILE
    data = json.loads(path.read_text())
    for told, wanted in ((None, {}), ({"top_k": 3, "smoothing": 1}, {"top_k": 3})):
        other = {key: value for key, value in data.items() if key != "sampling"}
        other |= {} if told is None else {"sampling": told}
        path.write_text(json.dumps(other | {"checksum": checksum(other)}))
        assert Bundle.open(bundle.path).manifest.sampling == wanted
    for told in ({"top_k": "many"}, {"temperature": -1}, 3):
        other = data | {"sampling": told}
        path.write_text(json.dumps(other | {"checksum": checksum(other)}))
        with pytest.raises(BundleError, match="damaged"):
            Bundle.open(bundle.path)


def test_random_bundle_depends_on_the_seed_only(tmp_path: Path) -> None:
    hashes = [
        random_bundle(BASE, tmp_path / str(index), seed=seed).manifest.files[DATA_FILE].sha256
        for index, seed in enumerate((7, 7, 8))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.slow
def test_peak_memory_is_a_few_chunks_not_the_model(tmp_path: Path) -> None:
    source = make_llama_checkpoint(
        tmp_path / "source", dtype="bfloat16", shards=2, vocab_size=1 << 17, hidden_size=256
    )
    weights_bytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    tracemalloc.start()
    try:
        # Calibration holds a small model as float32; a large one it never does.
        export_model(source, tmp_path / "bundle", PLAIN)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert weights_bytes > 128 << 20
    assert peak_bytes < 40 << 20


# What is left when an export does not finish


def stop(done: int, total: int, _label: str) -> None:
    if done > total // 2:
        raise KeyboardInterrupt


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    with pytest.raises(KeyboardInterrupt):
        export_model(source, tmp_path / "bundle", PLAIN, stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_bundle_is_replaced_with_force_only(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    export_model(source, tmp_path / "bundle", PLAIN)
    with pytest.raises(BundleError, match="already holds a bundle; replace it with force"):
        export_model(source, tmp_path / "bundle", PLAIN)
    # Before anything is measured.
    said: list[object] = []
    wide = ExportOptions(weights=WeightFormat(mean_bits=4.5))
    with pytest.raises(BundleError, match="already holds a bundle"):
        export_model(source, tmp_path / "bundle", wide, lambda *news: said.append(news))
    assert said == []
    forced = dataclasses.replace(EIGHT, force=True)
    with pytest.raises(KeyboardInterrupt):
        export_model(source, tmp_path / "bundle", forced, stop)
    assert "4/64/zero_point" in Bundle.open(tmp_path / "bundle").manifest.weights.by_format
    assert [*export_model(source, tmp_path / "bundle", forced).manifest.weights.by_format] == [
        "8/64/symmetric"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "source"]


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    options = dataclasses.replace(PLAIN, force=True)
    with pytest.raises(BundleError, match="is not a bundle, so it is not replaced"):
        export_model(source, tmp_path / "thesis", options)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


def test_what_came_to_be_there_meanwhile_is_never_replaced(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"

    def write() -> None:
        with staged(thesis, force=True):
            thesis.mkdir()
            (thesis / "chapter.tex").write_text("years of work")

    with pytest.raises(BundleError, match="is not a bundle, so it is not replaced"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
    assert (thesis / "chapter.tex").read_text() == "years of work"


def test_what_killed_exports_of_other_names_left_goes_after_a_day(tmp_path: Path) -> None:
    old = time.time() - 2 * 24 * 60 * 60
    left = {".a.01234567.partial", ".b.01234567.old", ".c.notes.partial", "d.01234567.partial"}
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx.data").write_bytes(b"half")
        os.utime(tmp_path / name, (old, old))
    (tmp_path / ".new.01234567.partial").mkdir()
    with staged(tmp_path / "bundle", force=False) as running:
        os.utime(running, (old, old))
        with staged(tmp_path / "second", force=False):
            pass  # a running export is no leftover, however old
    kept = {*left, ".new.01234567.partial", "bundle", "second"} - {".a.01234567.partial"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_link_to_a_bundle_stays_and_the_bundle_is_replaced(tmp_path: Path) -> None:
    bundle, link = tmp_path / "disk" / "bundle", tmp_path / "link"
    bundle.mkdir(parents=True)
    (bundle / MANIFEST_FILE).write_text("old")
    link.symlink_to(bundle)
    with staged(link, force=True) as partial:
        (partial / MANIFEST_FILE).write_text("new")
    assert link.readlink() == bundle
    assert (bundle / MANIFEST_FILE).read_text() == "new"
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


# The hub


def test_a_hub_id_is_found_in_the_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"org/small cannot be downloaded .*connect to the network"
    ):
        locate("org/small")
    # Who asked for no network is not told to connect to it.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="org/small is not on this machine, and offline"):
        locate("org/small")
    commit = "0123456789012345678901234567890123456789"
    model = tmp_path / "models--org--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    make_llama_checkpoint(model / "snapshots" / commit)
    (model / "snapshots" / commit / "LICENSES").mkdir()
    located = locate("org/small")
    assert (located.name, located.revision) == ("org/small", commit)
    bundle = export_model("org/small", tmp_path / "bundle", PLAIN)
    assert bundle.manifest.source["model"] == "org/small"
    assert bundle.manifest.source["revision"] == commit
    assert bundle.manifest.source["license"] == "unknown"


def test_neither_folder_nor_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no checkpoint at"):
        locate(tmp_path / "nothing")
    with pytest.raises(ModelError, match="no folder checkpoints/my--model here"):
        locate("checkpoints/my--model")


# The quality report


def test_divergence_of_known_distributions() -> None:
    expected = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    found = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))
    result = quality.compare(expected, found)
    assert result["mean_kld"] == pytest.approx(0.25 * np.log(2) / 2, rel=1e-5)
    assert result["kld_99_9"] == pytest.approx(0.25 * np.log(2) * 0.999, rel=1e-5)
    assert result["top1_agreement"] == 0.5


def test_report_compares_weights_alone_and_everything(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="bfloat16")
    family, config, _ = read_checkpoint(source)
    original = quality.Original(
        config=config, sources=family.weights(config), checkpoint=Checkpoint.open(source)
    )
    ids = np.arange(40) % config.vocab_size
    exact = forward(config, checkpoint_weights(source), ids, np.arange(40), PlainAttention())
    streamed = original.logits(ids)
    np.testing.assert_allclose(streamed, exact, atol=1e-4)

    def run(plan: KvPlan, asked: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(0).standard_normal(exact.shape).astype(np.float32)
        return exact[: len(asked)] + (noise if plan.quantized else 0)

    steps: list[str] = []
    texts = np.stack([ids, ids])
    report = quality.measure(original.logits, KvPlan(), run, texts, steps.append)
    assert [step[-6:] for step in steps] == ["1 of 2", "2 of 2"]
    assert report["weights"]["kv"] == "fp"
    assert abs(report["weights"]["mean_kld"]) < 1e-5
    assert report["weights"]["top1_agreement"] == 1.0
    assert report["weights_and_kv"]["kv"] == "4:4"
    assert 0.1 < report["weights_and_kv"]["mean_kld"] < report["weights_and_kv"]["kld_99_9"]


def test_an_export_reports_its_own_quality(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="bfloat16")
    options = ExportOptions(weights=WeightFormat(bits=8))
    report = export_model(source, tmp_path / "bundle", options).manifest.quality
    assert report == json.loads((tmp_path / "bundle" / "kvq.json").read_text())["quality"]
    assert report is not None
    assert report["tokens"] == 6 * quality.MAX_TOKENS > 2000
    assert report["weights_and_kv"]["kv"] == "4:4"
    assert 0 <= report["weights"]["mean_kld"] < 0.05
    assert report["weights"]["mean_kld"] < report["weights_and_kv"]["mean_kld"] < 2
    assert report["weights"]["top1_agreement"] > 0.9


def test_graph_file_is_small_and_names_the_data_file(tmp_path: Path) -> None:
    bundle = random_bundle(BASE, tmp_path / "bundle")
    raw = (bundle.path / MODEL_FILE).read_bytes()
    assert len(raw) < 32 << 10
    assert DATA_FILE.encode() in raw
    assert str(tmp_path).encode() not in raw
