"""Real models' shapes with random weights: speed and bytes without a download.

Makes bundles of the configurations in `shapes.json`, in the cache folder. Knows no engine.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq.errors import UsageError, argument
from kvq.reference.linear import WIDTHS, BlockFormat, Grid
from kvq.settings import cache_folder
from kvq_apps.names.model_path import make_once
from kvq_models.config import ModelConfig
from kvq_models.registry import family_for

# The configurations as their publishers wrote them.
SHAPES: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("shapes.json").read_text("utf-8")
)


def shape_json(text: str) -> Mapping[str, Any]:
    """Returns the config.json of shape `NAME`, or of its first layers: `NAME:layers=N`.

    Raises `UsageError` naming what is possible.
    """
    name, _, options = text.partition(":")
    if name not in SHAPES:
        raise UsageError(f"{argument('--shape')} {name!r} is not known; choose {', '.join(SHAPES)}")
    if not options:
        return SHAPES[name]
    key, _, count = options.partition("=")
    most = SHAPES[name]["num_hidden_layers"]
    if key != "layers" or not count.isdecimal() or not 1 <= int(count) <= most:
        raise UsageError(
            f"{argument('--shape')} {text!r} is not possible; write {name}:layers=1 to {most}"
        )
    return {**SHAPES[name], **_first_layers(SHAPES[name], int(count))}


def _first_layers(shape: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns the fields of a shape's config that describe its first layers alone."""
    left_out = shape["num_hidden_layers"] - count
    fields: dict[str, Any] = {
        "num_hidden_layers": count,
        "layer_types": shape.get("layer_types", [])[:count],
        "full_attn_idxs": [layer for layer in shape.get("full_attn_idxs", ()) if layer < count],
        "num_dense_layers": min(shape.get("num_dense_layers", 0), count),
        "num_kv_shared_layers": max(0, shape.get("num_kv_shared_layers", 0) - left_out),
    }
    return {name: value for name, value in fields.items() if name in shape}


def shape_config(name: str) -> ModelConfig:
    """Returns the model of shape `name`, as in `shape_json`."""
    config_json = shape_json(name)
    return family_for(config_json).config(config_json)


def _published(config: ModelConfig) -> dict[str, BlockFormat]:
    """Returns the formats of matrices that a checkpoint has in 4 bits: the experts of gpt-oss."""
    sources = family_for({"model_type": config.model_type}).weights(config)
    form = BlockFormat(bits=4, block=32, grid=Grid.E2M1)
    return {
        name: form
        for name, source in sources.items()
        if config.model_type == "gpt_oss" and "experts" in name and source.quantised
    }


def shape_bundle(name: str, *, bits: int = 4) -> Path:
    """Makes the bundle of shape `name` in the cache folder, unless it is there; returns its path.

    Its weights have `bits`. Raises `ModelError`.
    """
    from kvq_export.config import ExportOptions, WeightFormat
    from kvq_export.write.random_bundle import random_bundle
    from kvq_runtime.bundle.manifest import VERSION

    config = shape_config(name)
    bundle_name = name.replace(":layers=", "-layers-")
    weights = WeightFormat(bits=bits, overrides=_published(config) if bits == min(WIDTHS) else {})
    options = ExportOptions(name=bundle_name, weights=weights)
    parts = [VERSION, asdict(weights), dict(shape_json(name))]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return make_once(
        cache_folder() / "shapes" / f"{bundle_name}-{digest[:12]}",
        "making random weights once in",
        lambda destination, progress: (
            random_bundle(config, destination, options=options, progress=progress).path
        ),
    )
