"""Writes a bundle with random weights in a real model's shape, to measure speed and memory.

The bytes are laid out like an exported bundle's; only their values mean nothing.
"""

from pathlib import Path

from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.phases import Progress, no_progress
from kvq_export.write.layout import plan_layout
from kvq_export.write.staging import require_space, staged
from kvq_export.write.writer import RandomWeights, weight_info, write_manifest, write_model
from kvq_models.config import ModelConfig
from kvq_models.registry import family_for
from kvq_models.tokenizer import ControlTokens
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import Manifest


def random_bundle(
    config: ModelConfig,
    destination: str | Path,
    seed: int = 0,
    options: ExportOptions | None = None,
    progress: Progress = no_progress,
) -> Bundle:
    """Writes a bundle of `config`'s shape without a tokenizer; the same seed gives the same bytes.

    Raises `BundleError` for the destination.
    """
    options = options or ExportOptions()
    folder = Path(destination).expanduser()
    family = family_for({"model_type": config.model_type})
    sources = family.weights(config) | family.draft_weights(config)
    layout = plan_layout(config, sources, options.weights or WeightFormat())
    control = ControlTokens(bos=config.bos_token_id, eos=config.eos_token_ids)
    with staged(folder, force=options.force) as partial:
        require_space(partial, layout.num_bytes)
        reader = RandomWeights(sources, seed, _repeated(config))
        files = write_model(partial, config, layout, reader, progress)
        manifest = Manifest(
            name=options.name or folder.name,
            config=config,
            weights=weight_info(layout),
            kv=options.kv,
            files=files,
            eos_token_ids=control.eos,
            tokens=control.to_json(),
            source={"model": "random", "seed": seed, "license": "none"},
        )
        write_manifest(partial, manifest)
    return Bundle.open(folder)


def _repeated(config: ModelConfig) -> dict[str, int]:
    """Returns the rows of values of layers whose values are their keys."""
    return {
        f"layers.{index}.qkv": layer.attention.kv_width
        for index, layer in enumerate(config.layers)
        if layer.owns_keys and layer.attention.values == "keys"
    }
