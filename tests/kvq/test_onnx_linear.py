"""`kvq::Linear` and `kvq::Embed` in ONNX Runtime: the numbers of the C ABI, errors as sentences."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from emulated import emulated_library
from kvq import devices, native_library
from kvq.native_linear import linear, weight_bytes_read
from kvq.reference.linear import Bytes, Grid, PanelFormat
from kvq_runtime.machine.onnx_runtime import onnx_runtime
from matrices import matrix
from native_calls import embed
from shelf import Shelf

ort = onnx_runtime()
pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

# Enough panels for many units of work, rows for more than one block of them.
FORM = PanelFormat(rows=2005, columns=200, bits=6, block=64, grid=Grid.ZERO_POINT)
TYPES = {
    "x": TensorProto.FLOAT,
    "norm": TensorProto.FLOAT,
    "bias": TensorProto.FLOAT,
    "residual": TensorProto.FLOAT,
    "weights_view": TensorProto.INT64,
    "exact_rows": TensorProto.INT64,
    "layer_modes": TensorProto.INT64,
}
PLAIN = {"activation": 0, "norm_eps": 1e-5, "layer": 1, "first_kept": 500}


def panels(form: PanelFormat = FORM) -> Bytes:
    return matrix(form)[1]


def session(
    names: list[str],
    threads: int = 2,
    folder: Path | None = None,
    form: PanelFormat = FORM,
    library: Path | None = None,
    **attributes: Any,
) -> Any:
    """One Linear node with these inputs beside the weights, which lie in a file in `folder`."""
    order = ["x", "panels", *list(TYPES)[1:]]
    node_inputs = [name if name in names or name == "panels" else "" for name in order]
    while not node_inputs[-1]:
        node_inputs.pop()
    stored = onnx.numpy_helper.from_array(panels(form), "panels")
    node = helper.make_node(
        "Linear", node_inputs, ["out"], domain="kvq", **(asdict(form) | PLAIN | attributes)
    )
    inputs = [helper.make_tensor_value_info(name, TYPES[name], None) for name in names]
    return run_graph(node, inputs, stored, threads, folder, library)


def run_graph(
    node: Any,
    inputs: list[Any],
    stored: Any,
    threads: int,
    folder: Path | None,
    library: Path | None = None,
) -> Any:
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "linear", inputs, [output], [stored])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("kvq", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library or native_library.library_path()))
    source: Any = model.SerializeToString()
    if folder is not None:
        source = str(folder / "model.onnx")
        onnx.save(model, source, save_as_external_data=True, location="data", size_threshold=0)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def activations(rows: int, columns: int = 200) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_session_computes_what_the_abi_computes(threads: int, tmp_path: Path) -> None:
    names = ["x", "norm", "bias", "residual", "weights_view"]
    run = session(names, threads, tmp_path)
    weight, bias = activations(1)[0], activations(1, FORM.rows)[0]
    # 400 rows are prepared in a dispatch of their own, in one after the other blocks.
    for rows in (0, 1, 5, 17, 400):
        x, residual = activations(rows), activations(rows, FORM.rows)
        for view, name in enumerate(("full", "hi")):
            feeds = {"x": x, "norm": weight, "bias": bias, "residual": residual}
            (actual,) = run.run(None, feeds | {"weights_view": np.array([view])})
            expected = linear(
                FORM, panels(), x, norm=weight, norm_eps=1e-5, bias=bias, residual=residual,
                view=name,
            )  # fmt: skip
            np.testing.assert_array_equal(actual, expected)


def test_activation_and_exact_rows() -> None:
    x = activations(3, 400)
    (actual,) = session(["x"], activation=1).run(None, {"x": x})
    np.testing.assert_array_equal(actual, linear(FORM, panels(), x, activation="silu"))
    run, x = session(["x", "exact_rows"]), activations(3)
    for rows in (0, 7, 10_000):
        (actual,) = run.run(None, {"x": x, "exact_rows": np.array([rows])})
        np.testing.assert_array_equal(actual, linear(FORM, panels(), x, exact_rows=rows))


@pytest.mark.parametrize(("bits", "grid"), [(8, Grid.SYMMETRIC), (6, Grid.MINIMUM)])
def test_a_device_computes_many_tokens_and_the_head_in_two_passes(
    bits: int, grid: Grid, shelf: Shelf
) -> None:
    """On the emulated device: a chunk as the processor, and a head exact where it has to be."""
    emulated_library(shelf)
    form = PanelFormat(rows=3008, columns=64, bits=bits, block=32, grid=grid)
    names = ["x", "weights_view", "exact_rows"]
    run = session(names, form=form, library=devices.opened("emulated").library)

    def products(x: np.ndarray, view: int = 0, exact_rows: int = 0) -> np.ndarray:
        feeds = {"weights_view": np.array([view]), "exact_rows": np.array([exact_rows])}
        return np.asarray(run.run(None, {"x": x} | feeds)[0])

    x = activations(19, 64)
    for view, name in enumerate(("full", "hi")):
        np.testing.assert_array_equal(products(x, view), linear(form, panels(form), x, view=name))
    x = x[:3]
    whole, scores, actual = products(x), products(x, 1), products(x, 0, 20)
    read = actual == whole
    np.testing.assert_array_equal(actual[~read], scores[~read])
    assert 128 * 16 <= read.sum(axis=1).min() <= read.sum(axis=1).max() < 0.8 * form.rows
    best = np.argsort(-whole, axis=1)[:, :20]
    assert np.take_along_axis(read, best, axis=1).all()


@pytest.mark.parametrize(
    ("mode", "first", "unread"), [(0, 0, 0), (1, FORM.rows, FORM.panels), (2, 500, 31)]
)
def test_a_layer_reads_what_its_mode_needs(mode: int, first: int, unread: int) -> None:
    run = session(["x", "residual", "layer_modes"])
    x, residual = activations(4), activations(4, FORM.rows)
    before = weight_bytes_read()
    modes = np.array([1, mode, 1])
    (actual,) = run.run(None, {"x": x, "residual": residual, "layer_modes": modes})
    assert weight_bytes_read() - before == (FORM.panels - unread) * FORM.panel_bytes
    expected = linear(FORM, panels(), x, residual=residual)
    np.testing.assert_array_equal(actual[:, first:], expected[:, first:])
    np.testing.assert_array_equal(actual[:, :first], residual[:, :first])


def test_embeddings() -> None:
    node = helper.make_node("Embed", ["ids", "w", "panels"], ["out"], domain="kvq", **asdict(FORM))
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, None),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, None),
    ]
    stored = onnx.numpy_helper.from_array(panels(), "panels")
    run = run_graph(node, inputs, stored, 1, None)
    ids = np.array([[3, 2004], [0, 17], [1, 1]])
    weights = np.array([[0.5, 0.5], [1, 0], [2, -1]], np.float32)
    (actual,) = run.run(None, {"ids": ids, "w": weights})
    np.testing.assert_array_equal(actual, embed(FORM, panels(), ids, weights))
    expect("kvq::Embed: an id is no row", run, {"ids": ids + 1, "w": weights})
    expect("kvq::Embed: input shapes", run, {"ids": ids, "w": weights[:2]})


def expect(message: str, run: Any, feeds: dict[str, np.ndarray]) -> None:
    with pytest.raises(Exception, match=message) as caught:
        run.run(None, feeds)
    assert type(caught.value).__module__.startswith("onnxruntime")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", activations(2, 199)),
        ("norm", activations(1, 199)),
        ("bias", activations(1, 2000)),
        ("residual", activations(3, FORM.rows)),
        ("layer_modes", np.array([0])),
    ],
)
def test_wrong_shapes_are_exceptions(name: str, value: np.ndarray) -> None:
    run = session(["x", name] if name != "x" else ["x"])
    expect("kvq::Linear: input shapes do not match", run, {"x": activations(2)} | {name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("weights_view", [2]), ("exact_rows", [-1]), ("layer_modes", [0, 3])]
)
def test_options_out_of_range_are_exceptions(name: str, value: list[int]) -> None:
    run = session(["x", name])
    expect(f"{name}.* out of range", run, {"x": activations(2), name: np.array(value)})


def test_impossible_attributes_are_refused_at_load() -> None:
    with pytest.raises(Exception, match="no matrix has these attributes"):
        session(["x"], block=48)
