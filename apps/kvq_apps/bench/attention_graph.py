"""The attention of all layers and nothing else, on ONNX Runtime's threads as in a whole pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from kvq_runtime import gpu
from kvq_runtime.backends.onnx import (
    held,
    library_path,
    memory_kind,
    open_session,
    session_options,
)
from kvq_runtime.backends.paged import PagedCache
from kvq_runtime.bundle import Bundle

# Where external initializers of a model given as bytes are looked for.
WEIGHT_FOLDER = "session.model_external_initializers_file_folder_path"


class AttentionGraph:
    """A session over a bundle's attention nodes; the queries, keys and values are random.

    It takes rows of one sequence, or with `several` one row of each of several.
    """

    def __init__(
        self, bundle: Bundle, *, threads: int, device: str = gpu.PROCESSOR, several: bool = False
    ) -> None:
        options = session_options(threads)
        options.add_session_config_entry(WEIGHT_FOLDER, str(bundle.path))
        options.register_custom_ops_library(library_path(device))
        model = ir.to_proto(attention_model(bundle, several=several)).SerializeToString()
        self._session: Any = open_session(model, options, device)
        self._names = {node.name for node in self._session.get_inputs()}
        self._device = device
        self._rows: dict[int, Any] = {}

    def run(
        self, caches: Sequence[PagedCache], qkv: NDArray[np.float32], *, rope_long: bool
    ) -> Any:
        """Every layer's attention for the rows `qkv` [T, width], which are begun in `caches`.

        The sum of all layers, ONNX Runtime's value on the device, computed when this returns. As
        many rows again must be the same ones: they lie there from the first call on.
        """
        count = len(qkv) // len(caches)
        feeds = {
            "position_ids": np.concatenate([cache.tokens + np.arange(count) for cache in caches]),
            "cache": np.array([cache.handles[0] for cache in caches]),
            "sequence_rows": np.full(len(caches), count),
            "rope_long": np.array([rope_long], np.int64),
        }
        if len(qkv) not in self._rows:
            self._rows[len(qkv)] = held(qkv, self._device)
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("qkv", self._rows[len(qkv)])
        for name in self._names & feeds.keys():
            binding.bind_ortvalue_input(name, held(feeds[name], gpu.PROCESSOR))
        binding.bind_output("attended", memory_kind(self._device))
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()[0]


def attention_model(bundle: Bundle, *, several: bool = False) -> ir.Model:
    """Its input `qkv` goes to every layer; its output is the sum of what comes of it."""
    model = bundle.read_graph()
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
            # `sequence_rows` as they come out of the layer before: the cache wants them in order.
            rows = ir.node("Shape", [before.outputs[0]], {"start": 0, "end": 1})
            graph.insert_before(layer, rows)
            if several:
                one = ir.AttrTensor("value", ir.Tensor(np.ones(1, np.int64)))
                rows = ir.node("ConstantOfShape", [rows.outputs[0]], {"value": one})
                graph.insert_before(layer, rows)
            layer.replace_input_with(3, rows.outputs[0])
    total = ir.node("Sum", [layer.outputs[0] for layer in layers], name="attended")
    graph.append(total)
    graph.outputs[:] = [total.outputs[0]]
    total.outputs[0].name = "attended"
    total.outputs[0].dtype, total.outputs[0].shape = ir.DataType.FLOAT, layers[0].outputs[0].shape
    RemoveUnusedNodesPass()(model)
    drop_unused_inputs(graph)
    return model


def drop_unused_inputs(graph: ir.Graph) -> None:
    """Takes away what no node reads any more."""
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
