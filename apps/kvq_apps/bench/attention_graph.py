"""The attention of all layers and nothing else, on ONNX Runtime's threads as in a whole pass."""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from kvq import native
from kvq.cache import Cache
from kvq_apps.bench.gqa_graph import WEIGHT_FOLDER, drop_unused_inputs
from kvq_runtime.backends.onnx import session_options
from kvq_runtime.bundle import Bundle


class AttentionGraph:
    """A session over a bundle's attention nodes; the queries, keys and values are random."""

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        import onnxruntime

        options = session_options(threads)
        options.add_session_config_entry(WEIGHT_FOLDER, str(bundle.path))
        options.register_custom_ops_library(str(native.library_path()))
        self._session: Any = onnxruntime.InferenceSession(
            attention_model(bundle), options, providers=["CPUExecutionProvider"]
        )
        self._names = {node.name for node in self._session.get_inputs()}

    def run(self, cache: Cache, qkv: NDArray[np.float32], *, rope_long: bool) -> None:
        """Every layer's attention for the rows `qkv` [T, width], which are begun in `cache`."""
        feeds = {
            "qkv": qkv,
            "position_ids": cache.tokens + np.arange(len(qkv)),
            "cache": np.array([cache.handle]),
            "sequence_rows": np.array([len(qkv)]),
            "rope_long": np.array([rope_long], np.int64),
        }
        self._session.run(None, {name: feeds[name] for name in self._names})


def attention_model(bundle: Bundle) -> bytes:
    """Its input `qkv` goes to every layer; its output is the sum of what comes of it."""
    model = ir.load(bundle.model_path)
    graph = model.graph
    layers = [node for node in graph if node.domain == "kvq" and node.op_type == "Attention"]
    qkv = ir.Value(
        name="qkv",
        shape=ir.Shape(["T", bundle.config.qkv_width]),
        type=ir.TensorType(ir.DataType.FLOAT),
    )
    graph.inputs.append(qkv)
    for before, layer in zip([None, *layers], layers, strict=False):
        layer.replace_input_with(0, qkv)
        if before is not None:
            # As many rows as came out before: the cache wants its layers in order.
            rows = ir.node("Shape", [before.outputs[0]], {"start": 0, "end": 1})
            graph.insert_before(layer, rows)
            layer.replace_input_with(3, rows.outputs[0])
    total = ir.node("Sum", [layer.outputs[0] for layer in layers], name="attended")
    graph.append(total)
    graph.outputs[:] = [total.outputs[0]]
    total.outputs[0].name = "attended"
    total.outputs[0].dtype, total.outputs[0].shape = ir.DataType.FLOAT, layers[0].outputs[0].shape
    RemoveUnusedNodesPass()(model)
    drop_unused_inputs(graph)
    return ir.to_proto(model).SerializeToString()
