"""The attention of all layers and nothing else, on ONNX Runtime's threads as in a whole pass."""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from kvq.cache import Cache
from kvq_runtime.backends.onnx import (
    library_path,
    memory_kind,
    open_session,
    ort_value,
    session_options,
)
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.machine import gpu

# Names the folder of external initializers for a model that is given as bytes.
WEIGHT_FOLDER = "session.model_external_initializers_file_folder_path"


class AttentionGraph:
    """Runs a bundle's attention nodes in one session; queries, keys and values are random."""

    def __init__(self, bundle: Bundle, *, threads: int, device: str = gpu.PROCESSOR) -> None:
        options = session_options(threads)
        options.add_session_config_entry(WEIGHT_FOLDER, str(bundle.path))
        options.register_custom_ops_library(library_path(device))
        model = ir.to_proto(attention_model(bundle)).SerializeToString()
        self._session: Any = open_session(model, options, device)
        self._names = {node.name for node in self._session.get_inputs()}
        self._device = device
        self._rows: dict[int, Any] = {}

    def run(self, cache: Cache, qkv: NDArray[np.float32], *, rope_long: bool) -> Any:
        """Computes every layer's attention for the rows `qkv` [T, width] begun in `cache`.

        Returns the sum of all layers as ONNX Runtime's value on the device, already computed. Rows
        are kept on the device: a later call with the same number of rows must give the same ones.
        """
        feeds = {
            "position_ids": cache.tokens + np.arange(len(qkv)),
            "cache": np.array(cache.handles[:1]),
            "sequence_rows": np.array([len(qkv)]),
            "rope_long": np.array([rope_long], np.int64),
        }
        if len(qkv) not in self._rows:
            self._rows[len(qkv)] = ort_value(qkv, self._device)
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("qkv", self._rows[len(qkv)])
        for name in self._names & feeds.keys():
            binding.bind_ortvalue_input(name, ort_value(feeds[name], gpu.PROCESSOR))
        binding.bind_output("attended", memory_kind(self._device))
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()[0]


def attention_model(bundle: Bundle) -> ir.Model:
    """Makes a model that gives its input `qkv` to every layer and sums up their outputs."""
    model = bundle.read_graph()
    graph = model.graph
    layers = [node for node in graph if node.domain == "kvq" and node.op_type == "Attention"]
    qkv = ir.Value(
        name="qkv",
        shape=ir.Shape(["T", bundle.config.first_attention.qkv_width]),
        type=ir.TensorType(ir.DataType.FLOAT),
    )
    graph.inputs.append(qkv)
    for before, layer in zip([None, *layers], layers, strict=False):
        layer.replace_input_with(0, qkv)
        if before is not None:
            # `sequence_rows` comes out of the layer before: the cache needs the layers in order.
            rows = ir.node("Shape", [before.outputs[0]], {"start": 0, "end": 1})
            graph.insert_before(layer, rows)
            layer.replace_input_with(3, rows.outputs[0])
    total = ir.node("Sum", [layer.outputs[0] for layer in layers], name="attended")
    graph.append(total)
    graph.outputs[:] = [total.outputs[0]]
    total.outputs[0].name = "attended"
    total.outputs[0].dtype, total.outputs[0].shape = ir.DataType.FLOAT, layers[0].outputs[0].shape
    RemoveUnusedNodesPass()(model)
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    return model
