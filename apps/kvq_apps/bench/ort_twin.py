"""The same weights for ONNX Runtime's own operators, written once into the cache folder."""

import hashlib

from kvq.settings import cache_folder
from kvq_apps.model_path import made_once
from kvq_runtime.bundle import Bundle
from kvq_runtime.manifest import DATA_FILE, MODEL_FILE


def ort_twin(bundle: Bundle) -> Bundle:
    """`bundle` itself where its products are MatMulNBits already. Raises `BundleError`."""
    from kvq_export.standard_bundle import standard_bundle

    weights, files = bundle.manifest.weights, bundle.manifest.files
    if weights is None or weights.linear == "ort":
        return bundle
    hashes = "".join(files[name].sha256 for name in (MODEL_FILE, DATA_FILE))
    digest = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    path = made_once(
        cache_folder() / "bench" / f"{bundle.manifest.name}-{digest}-ort",
        "writing the weights once for onnxruntime's operators:",
        lambda destination, progress: standard_bundle(bundle, destination, progress).path,
    )
    return Bundle.open(path, verify="size")
