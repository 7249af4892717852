"""The graph of an export: what it computes, its inputs and nodes, the bytes it shares."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from kvq import native_library
from kvq.native_linear import weight_bytes_read
from kvq.reference.linear import (
    BlockFormat,
    Grid,
    View,
    linear,
    pack,
    restore,
)
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.write.random_bundle import random_bundle
from kvq_export.write.writer import stored_blocks
from kvq_models.config import Attention, Dense, Layer, ModelConfig, RopeConfig
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import family_for
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import DATA_FILE, MODEL_FILE
from kvq_runtime.machine.onnx_runtime import onnx_runtime
from matrices import relative_error
from tiny import altered

needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())


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
    overrides={
        "layers.0.o": BlockFormat(bits=4, block=32, grid=Grid.MINIMUM),
        "layers.1.down": BlockFormat(bits=8, block=128),
    },
)
# As a GGUF file of K-quants becomes: rows are padded to whole super-blocks.
SUPER = WeightFormat(
    bits=8,
    overrides={
        name: BlockFormat.parse(spelled)
        for name, spelled in (
            ("embed", "6/16/super_symmetric"),
            ("layers.0.qkv", "6/16/super_minimum"),
            ("layers.0.o", "4/32/super_minimum"),
            ("layers.0.down", "5/32/super_minimum"),
            ("layers.1.o", "3/16/super_symmetric"),
            ("layers.1.gate_up", "2/32/super_minimum"),
            ("layers.1.qkv", "3/32/super_minimum"),
            ("layers.1.down", "8/16/super_symmetric"),
        )
    },
)


class CutGraph:
    """Runs a bundle's graph on the CPU kernels, with numpy attention between its pieces.

    Each attention node is taken out: its input becomes an output of the graph and its output an
    input, fed on the next run.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        model = ir.load(bundle.model_path)
        for node in list(model.graph):
            if node.op_type == "Attention":
                self._cut(model.graph, node)
        # The graph finds its data file beside it.
        path = bundle.path / "cut.onnx"
        ir.save(model, path)
        options = onnx_runtime().SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.register_custom_ops_library(str(native_library.library_path()))
        self.session = onnx_runtime().InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )

    def _cut(self, graph: ir.Graph, node: ir.Node) -> None:
        config, layer = self.bundle.config, node.attributes["layer"].as_int()
        before, after = node.inputs[0], node.outputs[0]
        fed = ir.Value(
            name=f"attended.{layer}",
            shape=ir.Shape(["T", config.first_attention.width]),
            type=ir.TensorType(ir.DataType.FLOAT),
        )
        after.replace_all_uses_with(fed)
        before.name, before.dtype = f"qkv.{layer}", ir.DataType.FLOAT
        before.shape = ir.Shape(["T", config.first_attention.qkv_width])
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
            width = config.first_attention.width
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
    """Takes a weight's place in `forward`: `x @ weight.T` rounds x as `kvq::Linear` does."""

    __array_ufunc__ = None

    def __init__(self, bundle: Bundle, name: str, view: View) -> None:
        self.bundle, self.name, self.view = bundle, name, view
        self.form = bundle.form(name)
        self.panels = pack(self.form, stored_blocks(bundle.read_codes(name)))

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
    """Has a forward pass of embedding, final norm and head alone."""

    num_layers = 0

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class Case:
    """Holds a random bundle, a mixed input, and what the numpy forward makes of both."""

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

    def actual(self, **options: list[int]) -> np.ndarray:
        return CutGraph(self.bundle).logits(self.ids, self.mix, self.rows, **options)


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize(
    "weights", [*FORMATS, MIXED, SUPER], ids=["8 bit", "4 bit", "mixed", "super-blocks"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_own_graph_computes_the_reference(name: str, weights: WeightFormat, tmp_path: Path) -> None:
    """Allows for single activations that float32's rounding carries to the next of 255 levels."""
    case = Case(name, weights, tmp_path)
    actual, expected = case.actual(), case.rounded()
    assert np.sqrt(relative_error(actual, expected)) < 4e-3
    assert np.sqrt(relative_error(actual, case.expected())) < 0.1
    upper = case.actual(weights_view=[1])
    assert np.sqrt(relative_error(upper, case.rounded("hi"))) < 4e-3
    assert (upper == actual).all() == (weights.bits == weights.embedding_bits == 4)
    case.rows = case.rows[:0]
    assert case.actual().shape == (0, case.config.vocab_size)


@needs_native
def test_exact_rows_and_layer_modes(tmp_path: Path) -> None:
    case = Case("biases", WeightFormat(bits=4), tmp_path)
    full = case.actual()
    few = case.actual(exact_rows=[2])
    best = few.argmax(axis=1)[:, None]
    np.testing.assert_array_equal(
        np.take_along_axis(few, best, 1), np.take_along_axis(full, best, 1)
    )
    before = weight_bytes_read()
    skipped = case.actual(layer_modes=[1, 1])
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


def test_a_plain_layer_is_five_nodes(tmp_path: Path) -> None:
    def count(layers: int) -> int:
        config = dataclasses.replace(BASE, layers=(LAYER,) * layers)
        bundle = random_bundle(config, tmp_path / f"{layers}")
        return len(list(ir.load(bundle.model_path).graph))

    assert count(3) - count(2) == 5


def test_tied_head_shares_the_bytes_of_the_embedding(tmp_path: Path) -> None:
    bundle = random_bundle(BASE, tmp_path / "bundle")
    tensors = {
        name: value.const_value
        for name, value in ir.load(bundle.model_path).graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert "embed.panels" in tensors
    assert "head.panels" not in tensors
    assert all(tensor.offset % 64 == 0 for tensor in tensors.values())
    ends = max(tensor.offset + tensor.length for tensor in tensors.values())
    assert ends == (bundle.path / DATA_FILE).stat().st_size == bundle.manifest.weights.num_bytes


def test_random_bundle_depends_on_the_seed_only(tmp_path: Path) -> None:
    hashes = [
        random_bundle(BASE, tmp_path / str(index), seed=seed).manifest.files[DATA_FILE].sha256
        for index, seed in enumerate((7, 7, 8))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_graph_file_is_small_and_names_the_data_file(tmp_path: Path) -> None:
    bundle = random_bundle(BASE, tmp_path / "bundle")
    raw = (bundle.path / MODEL_FILE).read_bytes()
    assert len(raw) < 32 << 10
    assert DATA_FILE.encode() in raw
    assert str(tmp_path).encode() not in raw
