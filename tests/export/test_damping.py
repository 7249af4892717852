"""How far moments are trusted: what is fitted to few tokens must not err more on others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.reference.linear import BlockFormat, Grid, dequantize
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit import calibrated
from kvq_export.fit.damping import (
    DAMPINGS,
    HELD_OUT,
    Dampings,
    Trial,
    choose,
    near_dampings,
    try_damping,
)
from kvq_export.fit.gptq import Moments, compensate, factor, quantize_with
from kvq_export.write.weights import quantize
from originals import moments_of
from tiny import make_llama_checkpoint

FORM = BlockFormat(bits=4, block=64, grid=Grid.ZERO_POINT)
# Strong directions, noise beside them, and the spread of the logarithm of channels' sizes.
INPUTS = {
    "a few directions": (16, 1.0, 1.0),
    "many directions": (200, 1.0, 1.0),
    "equal channels": (200, 1.0, 0.0),
    "a few channels outweigh all others": (16, 3.0, 1.5),
    "nothing in common": (0, 1.0, 1.0),
}


def correlated(kind: str, tokens: int, columns: int, seed: int) -> np.ndarray:
    """Returns inputs float32 [tokens, columns] of a kind; seeds differ in their tokens alone."""
    directions, noise, spread = INPUTS[kind]
    shared, random = np.random.default_rng(0), np.random.default_rng(seed)
    basis = shared.standard_normal((directions, columns)) / max(directions, 1) ** 0.5
    sizes = np.exp(spread * shared.standard_normal(columns))
    x = random.standard_normal((tokens, directions)) @ basis
    return ((x + noise * random.standard_normal((tokens, columns))) * sizes).astype(np.float32)


def weights(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, columns), np.float32)


def split_moments(rows: np.ndarray, unrounded: np.ndarray, x: np.ndarray) -> tuple[Moments, ...]:
    """Returns the moments that candidates are made of, and those of the tokens held out."""
    cut = [round(len(x) * (1 - HELD_OUT))]
    parts = zip(np.split(unrounded, cut), np.split(x, cut), strict=True)
    return tuple(moments_of(rows, *part) for part in parts)


def share_of_plain_error(kind: str, rows: int, columns: int, tokens: int) -> float:
    """Returns the error of products with unseen inputs, as a share of that of plain rounding."""
    x, unseen = (correlated(kind, tokens, columns, seed) for seed in (2, 3))
    matrix = weights(rows, columns)
    fitted, held_out = split_moments(matrix, x, x)
    trials = [try_damping(matrix, fitted, held_out, FORM, damping) for damping in DAMPINGS]
    damping = choose(matrix, held_out, FORM, trials).rounding
    if damping is None:
        return 1.0
    fitted.add(held_out)
    blocks = quantize_with(matrix, factor(fitted.inputs, FORM.block, damping), FORM)
    errors = [
        float(np.square(unseen @ (dequantize(stored, 4) - matrix).T).sum())
        for stored in (blocks, quantize(matrix, FORM))
    ]
    return errors[0] / errors[1]


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("tokens", [256, 1024])
def test_feedback_never_errs_more_than_rounding_on_unseen_inputs(kind: str, tokens: int) -> None:
    share = share_of_plain_error(kind, 256, 2048, tokens)
    # Without anything in common there is nothing to win but grids fitted to the larger channels.
    assert share <= (1.0 if kind == "nothing in common" else 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["many directions", "equal channels"])
def test_a_matrix_much_wider_than_the_text_is_long_loses_nothing(kind: str) -> None:
    assert share_of_plain_error(kind, 768, 4480, 1024) <= 0.95


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("lost", ["what others explain", "noise"])
def test_rows_change_only_where_that_helps_on_unseen_inputs(lost: str, tall: bool) -> None:
    """Loses a share of the inputs that the others tell, or something that nothing tells."""
    columns, tokens = 512, 256
    matrix = weights(640 if tall else 96, columns)
    texts = [correlated("many directions", tokens, columns, seed) for seed in (2, 3)]
    random = np.random.default_rng(4)
    mix = random.normal(0, 0.3 / columns**0.5, (columns, columns))
    losses = [
        text @ mix
        if lost == "what others explain"
        else text.std() * random.normal(0, 0.1, text.shape)
        for text in texts
    ]
    x, unseen = (text - loss.astype(np.float32) for text, loss in zip(texts, losses, strict=True))
    fitted, held_out = split_moments(matrix, texts[0], x)
    trials = [try_damping(matrix, fitted, held_out, FORM, damping) for damping in DAMPINGS]
    damping = choose(matrix, held_out, FORM, trials).compensating
    fitted.add(held_out)
    changed = matrix
    if damping is not None:
        changed = compensate(matrix, fitted, factor(fitted.inputs, FORM.block, damping))
    errors = [
        float(np.square(texts[1] @ matrix.T - unseen @ rows.T).sum()) for rows in (changed, matrix)
    ]
    assert errors[0] <= errors[1] * (0.9 if lost == "what others explain" else 1.0)


def test_what_errs_least_is_chosen_and_nothing_where_all_err_more() -> None:
    matrix, x = weights(4, 64), correlated("many directions", 64, 64, 2)
    held_out = Moments(x.T @ x)
    change = dequantize(quantize(matrix, FORM), 4) - matrix
    plain = float(np.square(x @ change.T).sum())
    worse = [Trial(damping, plain * 1.01, 1.0) for damping in DAMPINGS]
    assert choose(matrix, held_out, FORM, worse) == Dampings(None, None)
    better = [*worse, Trial(7.0, plain * 0.9, 2.0), Trial(8.0, plain * 0.99, -1.0)]
    assert choose(matrix, held_out, FORM, better) == Dampings(7.0, 8.0)


def test_of_wide_matrices_one_layer_in_four_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the trials of six layers where what reads the hidden state alone is not wide."""
    tried: list[int] = []

    def counted(rows: np.ndarray, *arguments: Any) -> Trial:
        tried.append(rows.shape[1])
        return try_damping(rows, *arguments)

    monkeypatch.setattr(calibrated, "try_damping", counted)
    source = make_llama_checkpoint(tmp_path / "source", num_hidden_layers=6)
    config = json.loads((source / "config.json").read_text())
    hidden, feed = config["hidden_size"], config["intermediate_size"]
    assert feed > hidden
    monkeypatch.setattr(calibrated, "TRIED_COLUMNS", hidden)
    monkeypatch.setattr(calibrated, "TRIED_LAYERS", 4)
    options = ExportOptions(weights=WeightFormat(), quality=False, fit_cache=False)
    export_model(source, tmp_path / "bundle", options)
    assert tried.count(feed) == 3  # in layers 0, 1 and 4
    assert tried.count(hidden) >= 6 * 2 * 2  # all that are near the layer before


def test_a_layer_tries_what_is_near_its_neighbours() -> None:
    assert near_dampings(Dampings(0.1, None)) == [0.03, 0.1, 0.3]
    assert near_dampings(Dampings(0.1, 10.0)) == [0.03, 0.1, 0.3, 3.0, 10.0]
    assert near_dampings(Dampings(None, None)) == near_dampings(None) == DAMPINGS
