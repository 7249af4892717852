"""The engines that only a checkout measures: rows of `kvq_apps.bench.engines.ENGINES`."""

PEERS = {
    "transformers": "kvq_lab.engine_transformers:TransformersEngine",
}
