"""Rounding with error feedback: on one matrix, and over a checkpoint that is read through."""

from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvq.errors import CheckpointError
from kvq.reference.linear import BlockFormat, Blocks, Grid, PanelFormat, dequantize, pack, restore
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit import gptq
from kvq_export.fit.calibrated import CalibratedWeights, calibration_segments, report_texts
from kvq_export.fit.damping import DAMPINGS
from kvq_export.fit.gptq import LEAST_CHANNEL, compensate, factor, quantize_with
from kvq_export.fit.native_products import KernelMatrix
from kvq_export.fit.quality import Original
from kvq_export.fit.substitutes import SubstituteMatrix
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.write.layout import plan_layout
from kvq_export.write.weights import join_rows, quantize
from kvq_export.write.writer import stored_blocks
from kvq_models.config import ModelConfig
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import read_checkpoint
from kvq_models.tokenizer import Tokenizer
from originals import moments_of
from tiny import make_llama_checkpoint

FORM = BlockFormat(bits=4, block=32, grid=Grid.ZERO_POINT)
DAMPING = 0.1


def correlated(tokens: int, columns: int, seed: int = 0) -> np.ndarray:
    """Returns inputs that lie mostly in a quarter of their directions, with few large channels."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, columns // 4)) @ random.standard_normal(
        (columns // 4, columns)
    )
    x += 0.3 * random.standard_normal((tokens, columns))
    x[:, ::17] *= 8
    return x.astype(np.float32)


def damped(moments: np.ndarray, damping: float) -> np.ndarray:
    """Returns `moments` with a share of each channel's own on the diagonal, and of their mean."""
    diagonal = np.diag(moments)
    return moments + damping * np.diag(diagonal + LEAST_CHANNEL * diagonal.mean())


@pytest.mark.parametrize(
    ("bits", "grid", "columns"),
    [
        *product((4, 5, 6, 8), (Grid.SYMMETRIC, Grid.ZERO_POINT), (96, 80)),
        *product((4, 5, 6), (Grid.SUPER_MINIMUM,), (512, 300)),
    ],
)
def test_products_of_unseen_inputs_err_less_than_by_plain_rounding(
    bits: int, grid: Grid, columns: int
) -> None:
    form = BlockFormat(bits=bits, block=32, grid=grid)
    wide = form.activation_block
    inputs = correlated(4096, columns)
    x, held_out = inputs[:2048], inputs[2048:]
    weights = np.random.default_rng(1).standard_normal((70, columns), np.float32)
    blocks = quantize_with(weights, factor(x.T @ x, wide, DAMPING), form)
    assert blocks.codes.shape == (70, -(-columns // wide) * wide)
    assert int(blocks.codes.max()) < 1 << bits
    actual, plain = (
        dequantize(stored, bits)[:, :columns] for stored in (blocks, quantize(weights, form))
    )

    def error(rounded: np.ndarray) -> float:
        return float(np.square(held_out @ (rounded - weights).T).sum())

    assert error(actual) < 0.35 * error(plain)
    # Constants are those a panel can hold.
    panels = PanelFormat.of(form, weights.shape)
    stored = pack(panels, stored_blocks(blocks, grid))
    np.testing.assert_array_equal(
        restore(panels, stored)[:70], dequantize(blocks, bits)[:, :columns]
    )


def test_it_is_gptq_from_the_last_column_to_the_first() -> None:
    """Compares with the published update by the inverse of the moments, on a grid that is given."""
    form = BlockFormat(bits=4, block=32)
    x = correlated(512, 32, seed=3).astype(np.float64)
    weights = np.random.default_rng(4).standard_normal((5, 32)).astype(np.float32)
    moments = x.T @ x
    blocks = quantize_with(weights, factor(moments.astype(np.float32), 32, DAMPING), form)
    scale = blocks.scales[:, 0].astype(np.float64)
    remaining = weights.astype(np.float64).copy()
    expected = np.empty((5, 32))
    for column in reversed(range(32)):
        expected[:, column] = np.clip(np.rint(remaining[:, column] / scale) + 8, 0, 15)
        inverse = np.linalg.inv(damped(moments, DAMPING)[: column + 1, : column + 1])
        error = remaining[:, column] - (expected[:, column] - 8) * scale
        remaining[:, :column] -= np.outer(error / inverse[column, column], inverse[column, :column])
    # A value in the middle between two codes may go to either.
    assert (blocks.codes == expected).mean() > 0.98


def test_a_factor_of_several_panels_is_the_moments_root() -> None:
    x = correlated(3000, 1100).astype(np.float64)
    moments = x.T @ x
    lower = factor(moments.astype(np.float32), 64, DAMPING)
    assert lower.shape == (1152, 1152)
    exact = np.linalg.cholesky(damped(moments, DAMPING))
    np.testing.assert_allclose(lower[:1100, :1100], exact, atol=2e-5 * np.abs(exact).max())
    np.testing.assert_array_equal(lower[1100:], np.eye(1152, dtype=np.float32)[1100:])


def test_rows_beside_change_nothing() -> None:
    x = correlated(512, 64)
    lower = factor(x.T @ x, 32, DAMPING)
    weights = np.random.default_rng(2).standard_normal((4500, 64), np.float32)
    whole = quantize_with(weights, lower, FORM)
    for part in (slice(2048, 4096), slice(4096, None)):
        some = quantize_with(weights[part], lower, FORM)
        np.testing.assert_array_equal(some.codes, whole.codes[part])


def test_inputs_that_say_nothing_leave_plain_rounding() -> None:
    weights = np.random.default_rng(2).standard_normal((40, 64), np.float32)
    nothing = quantize_with(weights, factor(np.zeros((64, 64), np.float32), 32, DAMPING), FORM)
    plain = quantize(weights, FORM)
    assert (nothing.codes == plain.codes).mean() > 0.99
    # Moments that rounding made indefinite are damped until they have a factor.
    indefinite = np.full((64, 64), 5, np.float32) - 2 * np.eye(64, dtype=np.float32)
    assert np.isfinite(factor(indefinite, 32, DAMPING)).all()


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
    custom = calibration_segments(tokenizer, original.config, "one two three")
    assert custom.shape == (1, segments.shape[1])
    assert tokenizer.decode(custom[0].tolist()).count("one two three") > 2


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
    """Computes the last layer's inputs by the rounded layers before it.

    It is rounded to give from them what it gives from the inputs that nothing has changed.
    """
    original, tokenizer = opened
    config: ModelConfig = original.config
    layout = plan_layout(config, original.sources, WeightFormat(block=32))
    segments = calibration_segments(tokenizer, config)
    reader = CalibratedWeights(original, layout.matrices, segments, threads=1)
    stored: dict[str, Any] = {}
    for name in layout.names:
        if name in layout.matrices:
            form: PanelFormat = layout.matrices[name]
            stored[name] = Blocks(*join_rows(reader.matrix(name, form)))
        else:
            stored[name] = reader.vector(name)
    reader.close()
    last = f"layers.{config.num_layers - 1}.down"
    matrix = original.checkpoint.read(original.sources[last])

    def inputs_of_last(rounded: Collection[str]) -> np.ndarray:
        inputs: list[np.ndarray] = []

        def weight(name: str) -> np.ndarray:
            if name == last:
                return cast(
                    np.ndarray, SubstituteMatrix(lambda x: inputs.append(x) or x @ matrix.T)
                )
            exact = original.checkpoint.read(original.sources[name])
            if name not in layout.matrices or name in ("embed", "head"):
                return exact
            packed = KernelMatrix.of(exact)
            if name in rounded:
                packed = KernelMatrix(stored[name], layout.matrices[name])
            return cast(np.ndarray, SubstituteMatrix(packed.multiply))

        for ids in segments:
            forward(config, weight, ids, np.arange(len(ids)), PlainAttention())
        return np.concatenate(inputs)

    x, unrounded = inputs_of_last({*layout.matrices} - {"embed", "head"}), inputs_of_last(())
    packed, form = KernelMatrix.of(matrix), layout.matrices[last].format
    moments = gptq.input_moments(packed.multiply(unrounded) - packed.multiply(x), x)
    expected = dequantize(stored[last], 4)[:, : matrix.shape[1]]

    def share_of(rows: np.ndarray, damping: float) -> float:
        lower = factor(moments.inputs, 32, damping)
        actual = dequantize(quantize_with(rows, lower, form), 4)[:, : matrix.shape[1]]
        return float((actual == expected).mean())

    dampings = list(product(DAMPINGS, DAMPINGS))
    shares = [
        share_of(compensate(matrix, moments, factor(moments.inputs, 32, compensating)), rounding)
        for rounding, compensating in dampings
    ]
    assert max(shares) > 0.97
    assert share_of(matrix, dampings[int(np.argmax(shares))][0]) < 0.9


@pytest.mark.parametrize("rows", [70, 96, 200])
def test_a_matrix_makes_up_for_what_its_inputs_lost(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks inputs that it has not seen, too; of those it has, it is a ridge from least squares.

    However tall the matrix is, and in several panels of columns as in one.
    """
    monkeypatch.setattr(gptq, "_PANEL", 40)
    inputs = correlated(4096, 96)
    lost = inputs @ np.random.default_rng(5).normal(0, 0.02, (96, 96)).astype(np.float32)
    x, held_out = inputs[:2048], inputs[2048:]
    y, held_out_lost = x + lost[:2048], held_out + lost[2048:]
    weights = np.random.default_rng(1).standard_normal((rows, 96), np.float32)
    moments = moments_of(weights, x[:900], y[:900])
    moments.add(moments_of(weights, x[900:], y[900:]))
    np.testing.assert_allclose(moments.inputs, y.T @ y, rtol=1e-5, atol=1e-2)
    lower = factor(moments.inputs, 32, DAMPING)
    actual = compensate(weights, moments, lower)
    inverse = np.linalg.inv(damped(moments.inputs.astype(np.float64), DAMPING))
    expected = weights + weights @ ((x - y).T @ y) @ inverse
    np.testing.assert_allclose(actual, expected, atol=1e-4)

    def error(rows: np.ndarray) -> float:
        return float(np.square(held_out @ weights.T - held_out_lost @ rows.T).sum())

    assert error(actual) < 0.1 * error(weights)
    assert compensate(weights, moments_of(weights, x, x), lower) is weights


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
    """Refuses them, because no share of them on the diagonal would help."""
    moments = np.eye(32, dtype=np.float32)
    moments[3, 3] = number
    with pytest.raises(CheckpointError, match="too large for float32"):
        factor(moments, 32, DAMPING)


def test_what_rounding_took_of_small_moments_is_made_up_for() -> None:
    moments = np.diag(np.float32([100, 1, 1, -0.2]))  # more than a tenth of the least channel
    lower = factor(moments, 4, DAMPING)
    added = (lower @ lower.T - moments)[np.diag_indices(4)]
    least = LEAST_CHANNEL * moments.trace() / 4
    np.testing.assert_allclose(added, np.float32([100, 1, 1, 0]) + least, rtol=1e-4)


@pytest.mark.slow
def test_an_export_is_deterministic_and_feeds_the_text_it_is_given(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="float32")

    def exported(name: str, **options: object) -> bytes:
        export_options = ExportOptions(quality=False, **options)
        return (
            export_model(source, tmp_path / name, export_options).path / "model.onnx.data"
        ).read_bytes()

    first = exported("first")
    assert first == exported("second", threads=1)
    assert first != exported("plain", calibrate=False)
    assert first != exported("other", calibration_text="another text altogether " * 50)
