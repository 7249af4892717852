"""Fits matrices that make a model's keys and values from those of a smaller one (2410.08391).

For each layer: the best affine map from the keys and values of the auxiliary layer that serves it
to its own, before key norm and rotation. It is ridge regression over Gram matrices summed in
float64, text by text; a token weighs as much as the model looks at it. The paper trains these maps,
and the auxiliary model with them, which loses a third less (`apps/lab/log/prediction.md`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError, argument
from kvq_export.fit.prediction import (
    Passage,
    Step,
    WatchedAttention,
    calibration_texts,
    held_out_passages,
    measure,
    ridge,
    store_arrays,
)
from kvq_export.write.writer import write_manifest
from kvq_models.reference import forward
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends.paged import PagedBackend
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import AUXILIARY_FILE, FileInfo, Manifest
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passes import run
from kvq_runtime.session.auxiliary import RULES, AuxiliaryReader, open_auxiliary

Floats = NDArray[np.float64]


def fit(
    base: Bundle,
    auxiliary: PagedBackend,
    texts: Iterable[Sequence[int]],
    served_by: Sequence[int],
) -> list[NDArray[np.float32]]:
    """Returns W [n, 2 Hk D] for each layer of `base`, from the auxiliary layer in `served_by`."""
    config, sequences = base.config, list(texts)
    first_kv = config.first_attention.width
    reader = AuxiliaryReader(auxiliary, max(map(len, sequences)))
    gram: dict[int, Any] = dict.fromkeys(set(served_by), 0.0)
    cross: list[Any] = [0.0] * config.num_layers
    for ids in sequences:
        run(reader.reading(ids))
        attention = WatchedAttention(first_kv)
        positions, last = np.arange(len(ids)), slice(-1, None)
        forward(config, base.read_weight, np.array(ids), positions, attention, last)
        weights = attention.weights()[:, None]
        inputs = {layer: reader.read(layer, 0).astype(np.float64) for layer in gram}
        for layer, features in inputs.items():
            gram[layer] = gram[layer] + (features * weights).T @ features
        for layer, source in enumerate(served_by):
            target = attention.kv[layer]
            cross[layer] = cross[layer] + (inputs[source] * weights).T @ target
    reader.sequence.close()
    return [
        ridge(gram[source], cross[layer], np.zeros_like(cross[layer])).astype(np.float32)
        for layer, source in enumerate(served_by)
    ]


def add_maps(
    folder: Path, manifest: Manifest, path: Path, tokenizer: Tokenizer, threads: int, step: Step
) -> Manifest:
    """Fits maps from the auxiliary model at `path`; returns the manifest with them and their cost.

    Tries both rules of which layer serves which, and keeps the one that loses less. Raises
    `UsageError` for a model that cannot serve, `BackendError` for one of another vocabulary.
    """
    bundle = Bundle.open(folder, verify="size")
    with Engine(bundle, threads=threads) as engine:
        base = engine.backend.paged
        assert base is not None
        auxiliary = open_auxiliary(str(path), base)
    layers = bundle.config.num_layers, auxiliary.bundle.config.num_layers
    if layers[1] > layers[0]:
        raise UsageError(
            f"{argument('predict_with')} {path} is not possible: "
            f"it has {layers[1]} layers, more than the {layers[0]} that it is to predict"
        )
    texts = list(calibration_texts(tokenizer))
    passages = held_out_passages(tokenizer, bundle.config.context_length)
    maps: dict[str, list[NDArray[np.float32]]] = {}
    rows: dict[str, Any] = {}
    for name, rule in RULES.items():
        served_by = rule(*layers)
        step(f"fitting maps from {auxiliary.model.name} by rule {name}")
        maps[name] = fit(bundle, auxiliary, texts, served_by)
        entry = {
            "name": auxiliary.model.name,
            "fingerprint": auxiliary.model.fingerprint,
            "served_by": list(served_by),
        }
        files = {**manifest.files, AUXILIARY_FILE: store(folder, maps[name])}
        write_manifest(folder, replace(manifest, files=files, auxiliary=entry))
        rows[name] = _cost(folder, passages, path, threads) | entry
    best = min(rows, key=lambda name: rows[name]["nll"])
    files = {**manifest.files, AUXILIARY_FILE: store(folder, maps[best])}
    with Engine(auxiliary.bundle, threads=threads) as engine:
        alone = measure(engine, passages, {})["exact_nll"]
    entry = {name: rows[best][name] for name in ("name", "fingerprint", "served_by")}
    report = {"rule": best, "rules": rows, "alone_nll": alone, "passages": len(passages)}
    return replace(manifest, files=files, auxiliary=entry | report)


def store(folder: Path, maps: Sequence[NDArray[np.float32]]) -> FileInfo:
    """Writes `maps` as float16 into `folder`; returns size and hash of the file."""
    arrays = {f"layers.{layer}.map": w.astype(np.float16) for layer, w in enumerate(maps)}
    return store_arrays(folder / AUXILIARY_FILE, arrays)


def _cost(folder: Path, passages: Sequence[Passage], path: Path, threads: int) -> dict[str, float]:
    """Measures texts after a prompt that the auxiliary model read, a computed one, and none."""
    with Engine(Bundle.open(folder, verify="size"), threads=threads) as engine:
        costs = measure(engine, passages, {"read": f"auxiliary:path={path}"})
    read = costs.pop("read")
    return costs | read
