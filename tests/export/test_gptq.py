"""Rounding with error feedback: on one matrix, and over a checkpoint that is read through."""

from collections.abc import Collection
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from kvq.errors import CheckpointError
from kvq.reference_linear import SCALE_UNIT, BlockFormat, Grid, PanelFormat, dequantize
from kvq_export import gptq
from kvq_export.calibrated import CalibratedWeights, calibration_segments, report_texts
from kvq_export.checkpoint import Checkpoint
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.gptq import DAMPING, RIDGE, factor, matched, quantize_with
from kvq_export.layout import plan_layout
from kvq_export.quality import Original
from kvq_export.stand_ins import Product
from kvq_export.weights import quantize
from kvq_models.config import ModelConfig
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import read_checkpoint
from kvq_models.tokenizer import Tokenizer
from tiny import make_llama_checkpoint

FORM = BlockFormat(bits=4, block=32, grid=Grid.ZERO_POINT)


def correlated(tokens: int, columns: int, seed: int = 0) -> np.ndarray:
    """Inputs that lie mostly in a quarter of their directions, with a few large channels."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, columns // 4)) @ random.standard_normal(
        (columns // 4, columns)
    )
    x += 0.3 * random.standard_normal((tokens, columns))
    x[:, ::17] *= 8
    return x.astype(np.float32)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("grid", [Grid.SYMMETRIC, Grid.ZERO_POINT])
@pytest.mark.parametrize("columns", [96, 80])
def test_products_of_unseen_inputs_err_less_than_by_plain_rounding(
    bits: int, grid: Grid, columns: int
) -> None:
    form = BlockFormat(bits=bits, block=32, grid=grid)
    inputs = correlated(4096, columns)
    x, unseen = inputs[:2048], inputs[2048:]
    weights = np.random.default_rng(1).standard_normal((70, columns), np.float32)
    blocks = quantize_with(weights, factor(x.T @ x, 32), form)
    assert blocks.codes.shape == (70, 96)
    assert int(blocks.codes.max()) < 1 << bits
    found, plain = (
        dequantize(stored, bits)[:, :columns] for stored in (blocks, quantize(weights, form))
    )

    def error(rounded: np.ndarray) -> float:
        return float(np.square(unseen @ (rounded - weights).T).sum())

    assert error(found) < 0.35 * error(plain)
    # Scales are those a panel can hold.
    halves = (blocks.scales / SCALE_UNIT).astype(np.float16)
    np.testing.assert_array_equal(halves.astype(np.float32) * SCALE_UNIT, blocks.scales)


def test_it_is_gptq_from_the_last_column_to_the_first() -> None:
    """With the published update by the inverse of the moments, on a grid that is given."""
    form = BlockFormat(bits=4, block=32)
    x = correlated(512, 32, seed=3).astype(np.float64)
    weights = np.random.default_rng(4).standard_normal((5, 32)).astype(np.float32)
    moments = x.T @ x
    blocks = quantize_with(weights, factor(moments.astype(np.float32), 32), form)
    scale = blocks.scales[:, 0].astype(np.float64)
    left = weights.astype(np.float64).copy()
    damped = moments + DAMPING * np.trace(moments) / 32 * np.eye(32)
    expected = np.empty((5, 32))
    for column in reversed(range(32)):
        expected[:, column] = np.clip(np.rint(left[:, column] / scale) + 8, 0, 15)
        inverse = np.linalg.inv(damped[: column + 1, : column + 1])
        error = left[:, column] - (expected[:, column] - 8) * scale
        left[:, :column] -= np.outer(error / inverse[column, column], inverse[column, :column])
    # A value in the middle between two codes may go to either.
    assert (blocks.codes == expected).mean() > 0.98


def test_a_factor_of_several_panels_is_the_moments_root() -> None:
    x = correlated(3000, 1100).astype(np.float64)
    moments = x.T @ x
    lower = factor(moments.astype(np.float32), 64)
    assert lower.shape == (1152, 1152)
    damped = moments + np.eye(1100) * DAMPING * np.trace(moments) / 1100
    exact = np.linalg.cholesky(damped)
    np.testing.assert_allclose(lower[:1100, :1100], exact, atol=2e-5 * np.abs(exact).max())
    np.testing.assert_array_equal(lower[1100:], np.eye(1152, dtype=np.float32)[1100:])


def test_rows_beside_change_nothing() -> None:
    x = correlated(512, 64)
    lower = factor(x.T @ x, 32)
    weights = np.random.default_rng(2).standard_normal((4500, 64), np.float32)
    whole = quantize_with(weights, lower, FORM)
    for part in (slice(2048, 4096), slice(4096, None)):
        some = quantize_with(weights[part], lower, FORM)
        np.testing.assert_array_equal(some.codes, whole.codes[part])


def test_inputs_that_say_nothing_leave_plain_rounding() -> None:
    weights = np.random.default_rng(2).standard_normal((40, 64), np.float32)
    nothing = quantize_with(weights, factor(np.zeros((64, 64), np.float32), 32), FORM)
    plain = quantize(weights, FORM)
    assert (nothing.codes == plain.codes).mean() > 0.99
    # Moments that rounding made indefinite are damped until they have a factor.
    indefinite = np.full((64, 64), 5, np.float32) - 2 * np.eye(64, dtype=np.float32)
    assert np.isfinite(factor(indefinite, 32)).all()


# A checkpoint


@pytest.fixture
def opened(tmp_path: Path) -> tuple[Original, Tokenizer]:
    source = make_llama_checkpoint(tmp_path / "source", dtype="float32", attention_bias=True)
    family, config, _ = read_checkpoint(source)
    original = Original(
        config=config, sources=family.weights(config), checkpoint=Checkpoint.open(source)
    )
    return original, Tokenizer.from_checkpoint(source, family, config)


def test_segments_are_of_every_kind(opened: tuple[Original, Tokenizer]) -> None:
    original, tokenizer = opened
    segments = calibration_segments(tokenizer, original.config)
    columns = max(original.config.hidden_size, original.config.widest_feed)
    assert segments.shape[1] == min(512, original.config.context_length)
    assert segments.size == pytest.approx(8 * columns, rel=0.5)
    texts = [tokenizer.decode(row.tolist()) for row in segments]
    assert any("#include" in text or "import " in text for text in texts)
    given = calibration_segments(tokenizer, original.config, "one two three")
    assert given.shape == (1, segments.shape[1])
    assert tokenizer.decode(given[0].tolist()).count("one two three") > 2


def test_a_report_reads_what_no_calibration_has(opened: tuple[Original, Tokenizer]) -> None:
    original, tokenizer = opened
    texts = report_texts(tokenizer, original.config)
    assert texts.shape == (6, 384)
    read = calibration_segments(tokenizer, original.config).ravel().tolist()
    known = tokenizer.decode(read)
    for row in texts:
        assert tokenizer.decode(row[150:200].tolist()) not in known


def test_every_matrix_is_rounded_for_the_inputs_it_will_have(
    opened: tuple[Original, Tokenizer],
) -> None:
    """Those of the last layer's are what the layers before it make once they are rounded.

    And to give from them what it gives from those that nothing has changed.
    """
    original, tokenizer = opened
    config: ModelConfig = original.config
    layout = plan_layout(config, original.sources, WeightFormat(block=32))
    segments = calibration_segments(tokenizer, config)
    reader = CalibratedWeights(original, layout.matrices, segments, threads=1)
    stored: dict[str, np.ndarray] = {}
    for name in layout.names:
        if name in layout.matrices:
            form: PanelFormat = layout.matrices[name]
            chunks = [dequantize(one, form.bits) for one in reader.matrix(name, form)]
            stored[name] = np.concatenate(chunks)[:, : form.columns]
        else:
            stored[name] = reader.vector(name)
    reader.close()
    last = f"layers.{config.num_layers - 1}.down"
    matrix = original.checkpoint.read(original.sources[last])

    def entering(rounded: Collection[str]) -> np.ndarray:
        seen: list[np.ndarray] = []

        def weight(name: str) -> np.ndarray:
            if name == last:
                return cast(np.ndarray, Product(lambda x: seen.append(x) or x @ matrix.T))
            source = original.sources[name]
            return stored[name] if name in rounded else original.checkpoint.read(source)

        for ids in segments:
            forward(config, weight, ids, np.arange(len(ids)), PlainAttention())
        return np.concatenate(seen)

    x, exact = entering({*layout.matrices} - {"embed", "head"}), entering(())
    moments, form = x.T @ x, layout.matrices[last].format
    lower = factor(moments, 32)

    def share_of(rows: np.ndarray) -> float:
        found = dequantize(quantize_with(rows, lower, form), 4)[:, : matrix.shape[1]]
        return float((found == stored[last]).mean())

    _, lacking = gptq.seen(matrix, exact, x)
    assert share_of(matched(matrix, lacking, moments)) > 0.97
    assert share_of(matrix) < 0.9


@pytest.mark.parametrize("rows", [70, 96, 200])
def test_a_matrix_makes_up_for_what_its_inputs_lost(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of inputs it has not seen as well; a ridge away from the least squares of those it has.

    However tall it is, and in several panels of columns as in one.
    """
    monkeypatch.setattr(gptq, "_PANEL", 40)
    monkeypatch.setattr(gptq, "_TOKENS", 100)
    inputs = correlated(4096, 96)
    lost = inputs @ np.random.default_rng(5).normal(0, 0.02, (96, 96)).astype(np.float32)
    x, unseen = inputs[:2048], inputs[2048:]
    y, unseen_lost = x + lost[:2048], unseen + lost[2048:]
    weights = np.random.default_rng(1).standard_normal((rows, 96), np.float32)
    moments, lacking = gptq.seen(weights, x, y)
    np.testing.assert_allclose(moments, y.T @ y, rtol=1e-5, atol=1e-2)
    found = matched(weights, lacking, moments)
    damped = moments.astype(np.float64) + RIDGE * np.trace(moments) / 96 * np.eye(96)
    expected = weights + weights @ ((x - y).T @ y) @ np.linalg.inv(damped)
    np.testing.assert_allclose(found, expected, atol=1e-4)

    def error(rows: np.ndarray) -> float:
        return float(np.square(unseen @ weights.T - unseen_lost @ rows.T).sum())

    assert error(found) < 0.1 * error(weights)
    assert matched(weights, gptq.seen(weights, x, x)[1], moments) is weights


def test_a_run_that_nobody_waits_for_ends(opened: tuple[Original, Tokenizer]) -> None:
    original, tokenizer = opened
    layout = plan_layout(original.config, original.sources, WeightFormat())
    segments = calibration_segments(tokenizer, original.config)
    reader = CalibratedWeights(original, layout.matrices, segments, threads=1)
    name = "layers.0.qkv"
    assert len(list(reader.matrix(name, layout.matrices[name]))) == 1
    reader.close()
    assert not any(run.is_alive() for run in reader._runs)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_moments_that_are_no_numbers_are_refused(number: float) -> None:
    """No share of them on the diagonal would help, however large."""
    moments = np.eye(32, dtype=np.float32)
    moments[3, 3] = number
    with pytest.raises(CheckpointError, match="too large for float32"):
        factor(moments, 32)


def test_what_rounding_took_of_small_moments_is_made_up_for() -> None:
    moments = np.diag(np.float32([100, 1, 1, -1.5]))  # less than the share of their mean
    lower = factor(moments, 4)
    added = (lower @ lower.T - moments)[np.diag_indices(4)]
    np.testing.assert_allclose(added, moments.trace() / 4 * DAMPING * 10, rtol=1e-4)


@pytest.mark.slow
def test_an_export_is_deterministic_and_feeds_the_text_it_is_given(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="float32")

    def exported(name: str, **options: object) -> bytes:
        asked = ExportOptions(quality=False, **options)
        return (export_model(source, tmp_path / name, asked).path / "model.onnx.data").read_bytes()

    first = exported("first")
    assert first == exported("second", threads=1)
    assert first != exported("plain", calibrate=False)
    assert first != exported("other", calibration_text="another text altogether " * 50)
