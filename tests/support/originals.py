"""Checkpoints as their own floats have them, and what rounding with feedback asks of them."""

from pathlib import Path

import numpy as np

from kvq_export.fit.gptq import Moments, input_moments
from kvq_export.fit.quality import Original
from kvq_export.read.checkpoint import Checkpoint
from kvq_models.registry import read_checkpoint


def original_of(source: Path) -> Original:
    """The unquantised model of a checkpoint folder."""
    family, config, _ = read_checkpoint(source)
    checkpoint = Checkpoint.open(source)
    return Original(config=config, sources=family.weights(config), checkpoint=checkpoint)


def moments_of(rows: np.ndarray, unrounded: np.ndarray, inputs: np.ndarray) -> Moments:
    """Sums the moments of `inputs` float32 [T, K] of a matrix `rows` [N, K].

    `unrounded` [T, K] is what the inputs were before anything was rounded.
    """
    lack = unrounded - inputs
    return input_moments(lack if len(rows) > rows.shape[1] else lack @ rows.T, inputs)
