"""The engines that only a checkout measures: rows of `kvq_apps.bench.engines.ENGINES`."""

PEERS = {
    "onnxruntime": "kvq_lab.engine_onnxruntime:OnnxRuntimeEngine",
    "transformers": "kvq_lab.engine_transformers:TransformersEngine",
}
