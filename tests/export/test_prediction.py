"""Maps that predict later layers: fitted, stored, read by both backends, and reported."""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from kvq import native_library
from kvq.errors import BackendError, UsageError
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit import prediction
from kvq_export.fit.prediction import Passage, candidates, fit, measure, ridge
from kvq_runtime.backends import Mode
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import MAPS_FILE
from kvq_runtime.engine import Engine
from logits import divergence, prompt
from shelf import Shelf

needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
EIGHT = WeightFormat(bits=8)


@pytest.fixture(scope="module", autouse=True)
def _little_text() -> Iterator[None]:
    """Fits a tiny model to little text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "FIT_TOKENS", 1500)
        patch.setattr(prediction, "PASSAGES", 2)
        yield


@pytest.fixture(scope="module")
def fitted(shelf: Shelf) -> Path:
    options = ExportOptions(quality=False, calibrate=False, weights=EIGHT, predict="2")
    return shelf.bundle(options, num_hidden_layers=4)


def test_ridge_finds_a_linear_teacher_and_gains_by_every_feature() -> None:
    """Checks KVP-6."""
    rng = np.random.default_rng(0)
    x, teacher = rng.standard_normal((4000, 24)), rng.standard_normal((24, 7))
    for start in (np.zeros((24, 7)), rng.standard_normal((24, 7))):
        actual = ridge(1e9 * x.T @ x, 1e9 * x.T @ (x @ teacher), start)
        near = ridge(x.T @ x, x.T @ (x @ teacher), start)
        assert np.abs(near - teacher).max() < 5e-3
        np.testing.assert_allclose(actual, near, atol=1e-9)  # the penalty grows with the sums
    exact = ridge(x.T @ x, x.T @ (x @ teacher), teacher)
    np.testing.assert_allclose(exact, teacher, atol=1e-6)
    y = np.tanh(x @ teacher) + rng.standard_normal((4000, 7))
    errors = []
    for count in (1, 6, 12, 24):
        part = x[:, :count]
        solution = ridge(part.T @ part, part.T @ y, np.zeros((count, 7)))
        errors.append(np.square(part @ solution - y).sum())
    assert errors == sorted(errors, reverse=True)


def test_a_model_without_a_norm_before_its_layers_is_refused_first(
    shelf: Shelf, tmp_path: Path
) -> None:
    source = shelf.family("olmo2")
    options = ExportOptions(quality=False, calibrate=False, predict="1")
    with pytest.raises(UsageError, match="a layer of olmo2 has none; leave it out"):
        export_model(source, tmp_path / "bundle", options)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
def test_a_fit_recovers_the_layers_own_matrix_where_the_stream_is_its_own(fitted: Path) -> None:
    """Checks KVP-1: the first layer after those computed gets exactly what its own matrix makes."""
    bundle = Bundle.open(fitted)
    maps, tokens = fit(bundle, [prompt(300, seed) for seed in range(3)], (2, 3))
    assert sorted(maps) == [2, 3]
    assert sorted(maps[2]) == [2, 3]
    assert tokens == 900
    kv_rows = slice(bundle.config.first_attention.width, None)
    for layer in (2, 3):
        matrix = bundle.read_weight(f"layers.{layer}.qkv", kv_rows)
        np.testing.assert_allclose(maps[layer][layer][0], matrix, atol=1e-5)
        assert np.abs(maps[layer][layer][1]).max() < 1e-5
    assert np.abs(maps[2][3][0] - bundle.read_weight("layers.3.qkv", kv_rows)).max() > 0.01


def test_candidates_are_a_third_to_all_but_one() -> None:
    assert candidates(6) == (2, 3, 4, 5)
    assert candidates(2) == (1,)
    assert candidates(24) == (8, 11, 14, 17, 20, 23)


@needs_native
def test_both_backends_predict_by_the_bundles_maps(fitted: Path) -> None:
    entry = Bundle.open(fitted).manifest.prediction
    assert entry is not None
    assert (entry["layers"], [row["layers"] for row in entry["rows"]]) == (2, [2])
    row = entry["rows"][0]
    assert row["fitted"]["kld"] < row["own"]["kld"]
    logits: dict[tuple[str, str], np.ndarray] = {}
    for backend in ("onnx", "float"):
        with Engine.open(fitted, backend=backend, threads=1) as engine:
            assert engine.model.fitted_layers == 2
            for predict in ("auto", "prefix:layers=2,maps=own", "off"):
                with engine.session(predict=predict, kv="fp", context_tokens=512) as session:
                    session.prefill(prompt(300))
                    last_logits = session.sequence.state().logits
                    assert last_logits is not None
                    logits[backend, predict] = last_logits[None]
            with pytest.raises(BackendError, match="no matrices that predict"):
                engine.backend.check_mode(Mode(predicted=(3,), fitted=True))
    for predict in ("auto", "prefix:layers=2,maps=own", "off"):
        assert divergence(logits["float", predict], logits["onnx", predict]) < 0.02
    assert divergence(logits["onnx", "auto"], logits["onnx", "prefix:layers=2,maps=own"]) > 0.02


def test_a_bundle_without_maps_has_no_auto(shelf: Shelf, tmp_path: Path) -> None:
    plain = shelf.bundle(ExportOptions(quality=False, weights=EIGHT), num_hidden_layers=4)
    with (
        Engine.open(plain, backend="float") as engine,
        pytest.raises(UsageError, match="predict auto is not possible"),
    ):
        engine.session(predict="auto")
    for options, message in (
        ({"predict": "4"}, "1 to 3 of this model's 4 layers"),
        ({"predict": "2", "tokenizer": False}, "without tokenizer.json"),
    ):
        with pytest.raises(UsageError, match=message):
            export_model(
                shelf.checkpoint(num_hidden_layers=4), tmp_path / "new", ExportOptions(**options)
            )
    auto = ExportOptions(predict="auto")
    with pytest.raises(UsageError, match="1 to 0 of this model's 1 layers"):
        export_model(shelf.checkpoint(num_hidden_layers=1), tmp_path / "new", auto)
    for options in ({"predict": "some"}, {"predict": "2", "format": "gguf"}):
        with pytest.raises(UsageError, match="predict"):
            ExportOptions(**options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_auto_keeps_maps_only_where_little_is_lost(shelf: Shelf, tmp_path: Path) -> None:
    """Uses a model of random weights, whose stream does not say what comes later."""
    options = ExportOptions(quality=False, calibrate=False, predict="auto")
    bundle = export_model(shelf.checkpoint(num_hidden_layers=3), tmp_path / "auto", options)
    report = bundle.manifest.prediction or (bundle.manifest.quality or {})["prediction"]
    lost = [row["fitted"]["nll"] - row["exact_nll"] for row in report["rows"]]
    counts = [row["layers"] for row in report["rows"]][-len(lost) :]
    good = [
        layers for layers, nats in zip(counts, lost, strict=True) if nats <= report["limit_nats"]
    ]
    assert bundle.fitted_layers == (min(good) if good else None)
    assert (bundle.path / MAPS_FILE).exists() == bool(good)
    assert json.loads((bundle.path / "kvq.json").read_text())["files"].keys() >= {"model.onnx"}


@needs_native
def test_a_predicted_prompt_lies_between_the_prompt_and_none(fitted: Path) -> None:
    """Checks KVP-8 for the divergence; what is computed after all costs nothing."""
    passages = [Passage(prompt=prompt(200, n), following=prompt(20, 50 + n)) for n in range(2)]
    with Engine.open(fitted, threads=1) as engine:
        ways = {"exact": "prefix:layers=4", "most": "75%", "few": "prefix:layers=2"}
        costs = measure(engine, passages, ways, kv="fp")
    assert (costs["exact"]["kld"], costs["exact"]["share"]) == (0, 0)
    assert 0 < costs["few"]["kld"] < costs["most"]["kld"]


@pytest.mark.slow
@needs_native
def test_a_trained_model_goes_on_between_the_prompt_and_none(shelf: Shelf) -> None:
    """Checks KVP-8 for the nats of real text: more layers computed, less lost."""
    bundle = shelf.embedded("nano")
    with Engine.open(bundle, threads=1) as engine:
        text = (
            resources.files("kvq_runtime")
            .joinpath("session", "session.py")
            .read_text(encoding="utf-8")
        )
        ids = engine.tokenizer.encode(text)
        passages = [
            Passage(prompt=ids[start : start + 300], following=ids[start + 300 : start + 348])
            for start in (0, 1000)
        ]
        layers = engine.model.num_layers
        ways = {"half": "50%", "one": f"prefix:layers={layers - 1}"}
        costs = measure(engine, passages, ways)
    half, most = costs["half"], costs["one"]
    assert costs["exact_nll"] < half["nll"] < costs["no_prompt_nll"]
    assert abs(most["share"]) < half["share"] < 1
