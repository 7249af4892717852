"""Checkpoints as their own floats have them."""

from pathlib import Path

from kvq_export.fit.quality import Original
from kvq_export.read.checkpoint import Checkpoint
from kvq_models.registry import read_checkpoint


def original_of(source: Path) -> Original:
    """The unquantised model of a checkpoint folder."""
    family, config, _ = read_checkpoint(source)
    checkpoint = Checkpoint.open(source)
    return Original(config=config, sources=family.weights(config), checkpoint=checkpoint)
