"""Constants of weights, trained towards the checkpoint's answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvq.errors import BackendError, KvqError, UnsupportedModelError, UsageError
from kvq.reference.linear import BlockFormat, Grid, PanelFormat, dequantize
from kvq_apps.terminal.output import verdict_rows
from kvq_export import export
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit import tuning
from kvq_export.fit.calibrated import report_texts, tuning_texts
from kvq_export.fit.trainable import Matrix
from kvq_export.phases import no_progress
from kvq_export.write.layout import plan_layout
from kvq_export.write.weights import quantize
from kvq_models.catalogue import embedded_folder
from kvq_models.registry import read_checkpoint
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.bundle import Bundle
from originals import original_of
from shelf import Shelf
from tiny import CASES, make_llama_checkpoint

# Of super-blocks no constants are trained.
WEIGHTS = WeightFormat(bits=4, block=64)
UNKNOWN = {
    "olmoe": "experts",
    "qwen3-moe": "experts",
    "mixtral": "experts",
    "lfm2": "layers that do not attend",
    "qwen3-5": "gated attention",
    "gemma4": "another's keys",
    "gemma4-keys": "normalised values",
    "gemma4-experts": "experts",
    "gpt-oss": "experts",
    "qwen3-5-moe": "experts",
    "qwen3-next": "experts",
    "lfm2-moe": "experts",
    "lfm3": "gated attention",
    "ministral3": "queries that grow",
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_reference_does_or_says_what_it_does_not_know(
    case: str, shelf: Shelf
) -> None:
    original = original_of(shelf.family(case))
    if case in UNKNOWN:
        with pytest.raises(UnsupportedModelError, match=UNKNOWN[case]) as refused:
            tuning.check_tunable(original.config)
        assert original.config.model_type in str(refused.value)
        return
    tuning.check_tunable(original.config)
    texts = np.random.default_rng(0).integers(1, original.config.vocab_size, (2, 40))
    decoder = tuning.checkpoint_decoder(original)
    actual = decoder.logits(decoder.hidden(torch.from_numpy(texts))).numpy().reshape(2, 40, -1)
    for ids, logits in zip(texts, actual, strict=True):
        np.testing.assert_allclose(logits, original.logits(ids), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("grid", [Grid.SYMMETRIC, Grid.ZERO_POINT])
def test_gradients_are_those_of_the_weights_that_are_stored(grid: Grid) -> None:
    rows, columns, form = 20, 50, BlockFormat(bits=4, block=32, grid=grid)
    random = np.random.default_rng(1)
    blocks = quantize(random.standard_normal((rows, columns), np.float32), form)
    matrix = Matrix(PanelFormat.of(form, (rows, columns)), blocks)
    x = torch.from_numpy(random.standard_normal((7, columns), np.float32)).requires_grad_()
    grad = torch.from_numpy(random.standard_normal((7, rows), np.float32))
    (matrix.product(x) * grad).sum().backward()
    actual = [x.grad, matrix.gain.grad, None if matrix.zeros is None else matrix.zeros.grad]

    # The same by torch's own gradients, over weights that are there as a whole.
    matrix.gain.grad = x.grad = None
    if matrix.zeros is not None:
        matrix.zeros.grad = None
    (x @ matrix.rows(torch.arange(rows)).T * grad).sum().backward()
    expected = [x.grad, matrix.gain.grad, None if matrix.zeros is None else matrix.zeros.grad]
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        if expected_gradient is None:
            assert gradient is None
            continue
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-4, rtol=1e-4)
        assert float(expected_gradient.abs().max()) > 0.01


def test_what_is_multiplied_by_is_what_is_stored() -> None:
    """Compares them also once constants have left the places that a panel can store."""
    form = BlockFormat(bits=4, block=32, grid=Grid.ZERO_POINT)
    random = np.random.default_rng(2)
    blocks = quantize(random.standard_normal((20, 64), np.float32), form)
    matrix = Matrix(PanelFormat.of(form, (20, 64)), blocks)
    assert matrix.zeros is not None
    with torch.no_grad():
        matrix.gain += 0.01 * torch.randn_like(matrix.gain)
        matrix.zeros += torch.randn_like(matrix.zeros)
        matrix.zeros[0, 0], matrix.zeros[1, 1] = -3, 40
    stored = matrix.blocks(slice(0, 20))
    np.testing.assert_array_equal(stored.codes, blocks.codes)
    assert stored.offsets is not None
    assert (stored.offsets[0, 0], stored.offsets[1, 1]) == (0, 255)
    with torch.no_grad():
        multiplied = matrix.product(torch.eye(64)).T.numpy()
        rows = matrix.rows(torch.arange(20)).numpy()
    np.testing.assert_allclose(multiplied, dequantize(stored, 4), atol=1e-6)
    np.testing.assert_allclose(rows, dequantize(stored, 4), atol=1e-6)


# A whole bundle


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes texts few and short, and steps larger."""
    whole = tuning.tuning_texts
    monkeypatch.setattr(tuning, "tuning_texts", lambda *arguments: whole(*arguments)[::5, :96])
    monkeypatch.setattr(
        tuning, "report_texts", lambda *arguments: report_texts(*arguments)[::2, :48]
    )
    monkeypatch.setattr(tuning, "PASSES", 1)
    for name in ("GAIN_STEP", "ZERO_STEP", "VECTOR_STEP"):
        monkeypatch.setattr(tuning, name, 3 * getattr(tuning, name))


def tuned(folder: Path) -> tuple[Bundle, dict[str, float]]:
    """Tunes the bundle of nano at `folder`; returns it and the report."""
    source = embedded_folder("nano")
    assert source is not None
    original, bundle = original_of(source), Bundle.open(folder)
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    layout = plan_layout(original.config, original.sources, WEIGHTS)
    options = ExportOptions(weights=WEIGHTS, threads=1, tune=True)
    result = tuning.tune(folder, bundle.manifest, layout, original, tokenizer, options, no_progress)
    opened = Bundle.open(folder)
    assert opened.manifest.files == result[0].files
    return opened, result[1]


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_a_tuned_bundle_answers_more_like_its_checkpoint(tmp_path: Path) -> None:
    source = embedded_folder("nano")
    assert source is not None
    options = ExportOptions(weights=WEIGHTS, calibrate=False, quality=False, threads=1)
    plain = export_model(source, tmp_path / "plain", options)
    for name in ("first", "second"):
        shutil.copytree(plain.path, tmp_path / name)
    first, report = tuned(tmp_path / "first")
    assert report["kept"]
    assert report["after"] + 3 * report["error"] < 0.9 * report["before"]
    # An ordinary bundle: the same files of the same sizes, the same codes, other constants.
    for name, info in plain.manifest.files.items():
        assert first.manifest.files[name].num_bytes == info.num_bytes
    assert {path.name for path in first.path.iterdir()} == {
        path.name for path in plain.path.iterdir()
    }
    stored = plain.manifest.weights
    assert stored is not None
    for name in stored.formats:
        ours, theirs = first.read_codes(name), plain.read_codes(name)
        np.testing.assert_array_equal(ours.codes, theirs.codes)
        assert (ours.scales != theirs.scales).any()
    norms = [made.read_weight("layers.0.attn_norm") for made in (plain, first)]
    assert (norms[0] != norms[1]).any()
    second, _ = tuned(tmp_path / "second")
    assert second.fingerprint == first.fingerprint != plain.fingerprint


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_what_is_trained_is_not_in_super_blocks(tmp_path: Path) -> None:
    """Neither where widths are mixed nor where no text says which, nor at bits that are named."""
    source = make_llama_checkpoint(tmp_path / "source", dtype="float32")
    cases: list[dict[str, Any]] = [{}, {"calibrate": False}, {"weights": WeightFormat(bits=4)}]
    for number, case in enumerate(cases):
        options = ExportOptions(tune=True, fit_cache=False, **case)
        made = export_model(source, tmp_path / str(number), options).manifest.weights
        assert made is not None
        assert not any(form.grid.has_supers for form in made.formats.values())


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_weights_that_gained_too_little_stay_as_they_were_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a random model, whose answers to one text say nothing of those to another."""
    source = make_llama_checkpoint(tmp_path / "source", dtype="float32")
    plain = export_model(source, tmp_path / "plain", ExportOptions(weights=WEIGHTS, quality=False))
    labels: list[str] = []
    tried = export_model(
        source,
        tmp_path / "tried",
        ExportOptions(weights=WEIGHTS, tune=True),
        lambda done, total, label: labels.append(label),
    )
    assert tried.fingerprint == plain.fingerprint
    report = json.loads((tried.path / "kvq.json").read_text())["quality"]["tuning"]
    assert not report["kept"]
    assert report["after"] != report["before"]
    assert report["judged_tokens"] == 3 * 48
    assert any("tuning the weights, step 2 of " in label for label in labels)
    rows = dict(verdict_rows(tried.manifest.to_json() | {"path": "b"}))
    assert "the weights stay as they were rounded" in rows["tuning"]
    assert f"{report['after']:.4f}" in rows["tuning"]


def test_no_text_is_trained_on_and_judged(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="float32")
    family, config, _ = read_checkpoint(source)
    tokenizer = Tokenizer.from_checkpoint(source, family, config)
    trained = tokenizer.decode(tuning_texts(tokenizer, config).ravel().tolist())
    for row in report_texts(tokenizer, config):
        assert tokenizer.decode(row[150:200].tolist()) not in trained
    custom = tuning_texts(tokenizer, config, "one two three " * 500)
    assert "one two three" in tokenizer.decode(custom[0].tolist())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quality": False}, "leave one of them out"),
        ({"format": "gguf"}, "tune is of the ONNX graph"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ExportOptions(tune=True, **options)  # type: ignore[arg-type]


def test_what_it_needs_is_asked_for_before_the_long_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    options = ExportOptions(tune=True, tokenizer=False)
    with pytest.raises(KvqError, match="reads texts"):
        export_model(source, tmp_path / "b", options)
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="kvq-runtime\\[train\\]"):
        export_model(source, tmp_path / "b", ExportOptions(tune=True))
    assert not (tmp_path / "b").exists()
