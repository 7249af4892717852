"""Calibration at export: what errors cost in each layer, in the bundle and in its sessions."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from caches import open_cache
from kvq.cache import Cache
from kvq.config import DEFAULT_POLICY, KvPlan
from kvq.errors import BundleError
from kvq.policies import Sensitivity, policy_named
from kvq_apps.cli import main
from kvq_export import calibration
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.quality import divergences, log_softmax
from kvq_runtime import backends
from kvq_runtime.backends import forward_chain
from kvq_runtime.bundle import MANIFEST_FILE, Bundle, Manifest, checksum
from kvq_runtime.config import SessionRequest
from kvq_runtime.engine import Engine

LAYERS, KV_HEADS = 2, 2
FIELDS = tuple(field.name for field in fields(Sensitivity))


def export(source: Path, name: str = "bundle", **options: Any) -> Bundle:
    chosen = ExportOptions(**{"quality": False, "threads": 1, **options})
    return export_model(source, source.parent / name, chosen)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_llama_checkpoint(tmp_path_factory.mktemp("calibration") / "source")


@pytest.fixture(scope="module")
def bundle(source: Path) -> Bundle:
    return export(source, policy="h2o:recent=0.25")


@pytest.fixture(scope="module")
def sensitivity(bundle: Bundle) -> Sensitivity:
    assert bundle.manifest.sensitivity is not None
    return bundle.manifest.sensitivity


@pytest.fixture(scope="module")
def ids(bundle: Bundle) -> np.ndarray:
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    found = calibration.calibration_ids(tokenizer, bundle.config.context_length)
    assert found is not None
    return found


# What is measured


def test_the_text_is_cut_to_the_context_and_too_short_a_context_gives_none(bundle: Bundle) -> None:
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    whole = calibration.calibration_ids(tokenizer, 1 << 20)
    assert whole is not None
    assert (whole.dtype, whole.shape) == (np.int64, (1792,))
    for context, length in ((896, 896), (895, 895), (512, 512), (384, 384)):
        part = calibration.calibration_ids(tokenizer, context)
        assert part is not None
        assert part.tolist() == whole[:length].tolist()
    assert calibration.calibration_ids(tokenizer, 383) is None
    assert calibration.calibration_ids(tokenizer, 2) is None


def test_every_layer_has_positive_costs_and_fewer_bits_cost_more(sensitivity: Sensitivity) -> None:
    for name in FIELDS:
        values = getattr(sensitivity, name)
        shapes = {"nats": (LAYERS, 3), "norm": (LAYERS,)}
        assert values.shape == shapes.get(name[-4:], (LAYERS, KV_HEADS)), name
        assert values.dtype == np.float64
    for name in ("key", "value", "evict"):
        assert (getattr(sensitivity, name) > 0).all(), name
    for nats in (sensitivity.key_bits_nats, sensitivity.value_bits_nats):
        assert (nats[:, 0] == 0).all()
        assert (nats[:, 1] > calibration.NOISE_NATS).all()
        assert (nats[:, 2] > 4 * nats[:, 1]).all()


def test_a_price_is_the_divergence_over_the_error_that_the_same_tokens_see(
    bundle: Bundle, ids: np.ndarray, sensitivity: Sensitivity
) -> None:
    """Done again by hand: the text into 8-bit pages, one layer changed, the rest of it scored.

    A head pays its layer's price times how much larger the columns of `o` are that read it.
    """
    config, backend = bundle.config, backends.open_backend("float", bundle, threads=1)

    def scored(*actions: tuple[int, int, int], step: int = 128) -> tuple[np.ndarray, list[Any]]:
        """Log-probabilities of the last 128 tokens, and attention after each `step` of them."""
        cache = open_cache(
            config.cache_shape, KvPlan(k_bits=8, v_bits=8), 8 << 20, 512, chunk_tokens=128,
            observed=True, native=backend.cache_kind == "native", forms=bundle.manifest.forms,
        )  # fmt: skip
        for start in range(0, 384, 128):
            forward_chain(backend, cache, ids[start : start + 128], np.arange(128))
        table = [
            (layer, head, column, k_bits, v_bits)
            for layer, k_bits, v_bits in actions
            for head in range(2)
            for column in range(4 if k_bits else 2)
        ]
        assert cache.columns()[1].shape[2] == 4
        cache.demote(np.array(table, np.int32).reshape(-1, 5))
        logits, seen = [], []
        for start in range(384, 512, step):
            part = ids[start : start + step]
            logits.append(forward_chain(backend, cache, part, np.arange(step)))
            seen.append(cache.evidence().attention)
        cache.close()
        return log_softmax(np.concatenate(logits)), seen

    expected, seen = scored()[0], scored(step=32)[1]
    columns = [np.square(bundle.read_weight(f"layers.{layer}.o")).sum(0) for layer in range(LAYERS)]
    passed = np.array(columns).reshape(LAYERS, KV_HEADS, -1).sum(axis=2)
    of_heads = passed / passed.mean(axis=1, keepdims=True)
    cases = {
        "key": ((2, 8), [4.0**6 * one.key_error[..., :4].sum(axis=(1, 2)) for one in seen]),
        "value": ((8, 2), [4.0**6 * one.value_error[..., :4].sum(axis=(1, 2)) for one in seen]),
        "evict": ((0, 0), [2 * one.evict_error[..., :2].sum(axis=(1, 2)) for one in seen]),
    }
    # What the least harmful change does is rounding of activations, not a price.
    tables = {"key": sensitivity.key_bits_nats, "value": sensitivity.value_bits_nats}
    noise = min(side[:, 1].min() for side in tables.values())
    for name, (widths, errors) in cases.items():
        found = [scored((layer, *widths))[0] for layer in range(LAYERS)]
        nats = np.array([divergences(expected, one) for one in found])
        if name != "evict":
            np.testing.assert_allclose(tables[name][:, 2], nats.mean(axis=1), rtol=1e-3)
        pieces = nats.reshape(LAYERS, 4, 32).mean(axis=2) - noise
        prices, doubts = calibration.ratios(pieces, np.transpose(errors), 0.05 * noise)
        np.testing.assert_allclose(prices, pieces.mean(axis=1) / np.mean(errors, axis=0), rtol=1e-6)
        wanted = of_heads * calibration.shrunken(prices, doubts)[:, None]
        np.testing.assert_allclose(getattr(sensitivity, name), wanted, rtol=2e-3)
    backend.close()


# What of a measurement is chance


def test_prices_without_doubt_are_taken_as_measured() -> None:
    """Nats that are a multiple of the errors, piece by piece, leave no doubt, however few."""
    errors = np.array([[1.0, 100.0], [2e-9, 1e-9], [5.0, 5.0]])
    wanted = np.array([0.02, 3.0, 1e-4])
    prices, doubts = calibration.ratios(wanted[:, None] * errors, errors, 1e-12)
    np.testing.assert_allclose(prices, wanted)
    assert (doubts < 1e-9).all()
    np.testing.assert_allclose(calibration.shrunken(prices, doubts), wanted, rtol=1e-5)
    assert calibration.shrunken(prices[:1], np.array([5.0])) == pytest.approx(0.02)


def test_the_doubt_of_a_price_is_how_far_it_falls_from_the_truth() -> None:
    """Of 300 texts of 32 pieces: errors over two decades, each piece's nats off by a factor."""
    draw = np.random.default_rng(0)
    errors = np.exp(draw.normal(0, 1.5, (300, 32)))
    nats = 0.003 * errors * np.exp(draw.normal(-0.08, 0.4, errors.shape))
    prices, doubts = calibration.ratios(nats, errors, 1e-12)
    off = np.log(prices / 0.003)
    assert abs(off.mean()) < 0.03
    assert np.sqrt(np.square(off / doubts).mean()) == pytest.approx(1.3, abs=0.3)
    # The mean of the pieces' own errors at other tokens is what a single look divides by.
    single = np.log(nats.mean(axis=1) / errors[:, 0] / 0.003)
    assert np.square(off).mean() < 0.02 * np.square(single).mean()


def test_shrinking_comes_nearer_to_the_truth_than_measuring() -> None:
    """Six layers a factor e apart, three of them measured a factor e^1.5 off: 500 models."""
    draw = np.random.default_rng(1)
    doubts = np.array([0.05, 1.5, 0.1, 1.5, 1.5, 0.2])
    before, after = [], []
    for _ in range(500):
        truth = draw.normal(-6, 1, 6)
        measured = truth + doubts * draw.normal(size=6)
        before.append(measured - truth)
        after.append(np.log(calibration.shrunken(np.exp(measured), doubts)) - truth)
    raw, shrunk = (np.square(np.array(off)).mean(axis=0) for off in (before, after))
    assert shrunk[doubts > 1].mean() < 0.65 * raw[doubts > 1].mean()
    assert (shrunk[doubts < 1] < 1.1 * raw[doubts < 1]).all()


def test_a_layer_of_which_nothing_is_known_gets_the_price_of_the_others_and_takes_none() -> None:
    errors = np.full((3, 8), [[1.0], [2.0], [0.0]])
    nats = 0.01 * errors + np.array([[0.0], [0.0], [1e-9]])
    prices, doubts = calibration.ratios(nats, errors, 1e-12)
    assert doubts[2] == calibration.ANY_DOUBT
    found = calibration.shrunken(prices, doubts)
    np.testing.assert_allclose(found, [0.01, 0.01, 0.01], rtol=1e-3)
    wide = calibration.shrunken(np.array([0.1, 0.001, 7e5]), np.array([0.0, 0.0, 1e9]))
    np.testing.assert_allclose(wide, [0.1, 0.001, 0.01], rtol=1e-3)


def test_what_leads_nowhere_costs_nothing(tmp_path: Path) -> None:
    """Layer 0 has no queries, so its keys do not matter; layer 1's output is thrown away."""
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    file = source / "model.safetensors"
    tensors = tiny.read_safetensors(file)
    for name in ("layers.0.self_attn.q_proj", "layers.1.self_attn.o_proj"):
        tensors[f"model.{name}.weight"] = np.zeros_like(tensors[f"model.{name}.weight"])
    tiny.write_safetensors(file, tensors)
    found = export(source).manifest.sensitivity
    assert found is not None
    nothing = calibration.NOISE_NATS
    assert (found.key_bits_nats[:, 1:] == nothing).all()
    assert (found.value_bits_nats[0, 1:] > 10 * nothing).all()
    assert (found.value_bits_nats[1, 1:] == nothing).all()
    for name in FIELDS:
        assert np.isfinite(getattr(found, name)).all()


def test_the_same_bundle_gives_the_same_numbers(
    bundle: Bundle, ids: np.ndarray, sensitivity: Sensitivity
) -> None:
    heard: list[tuple[int, int]] = []
    forms = bundle.manifest.forms
    again = calibration.calibrate(
        bundle, ids, 1, lambda done, total: heard.append((done, total)), forms=forms
    )
    assert heard == [(1, LAYERS), (2, LAYERS)]
    assert again.to_json() == sensitivity.to_json()
    third = calibration.calibrate(bundle, ids, 1, forms=forms)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(third, name), getattr(again, name))


# What the bundle keeps


def test_the_manifest_holds_policy_and_sensitivity(
    bundle: Bundle, sensitivity: Sensitivity
) -> None:
    data = json.loads((bundle.path / MANIFEST_FILE).read_text())
    assert data["kv"] == {"k_bits": 4, "v_bits": 4, "sink_tokens": 4, "policy": "h2o:recent=0.25"}
    assert sorted(data["sensitivity"]) == sorted(FIELDS)
    for name in FIELDS:
        for value in np.ravel(data["sensitivity"][name]):
            assert float(f"{value:.4g}") == value
        assert data["sensitivity"][name] == getattr(sensitivity, name).tolist()
    again = Manifest.from_json(json.loads(json.dumps(bundle.manifest.to_json())))
    assert again == bundle.manifest
    assert again.policy == "h2o:recent=0.25"


def test_sensitivities_are_equal_by_their_four_digits(sensitivity: Sensitivity) -> None:
    def scaled(by: float) -> Sensitivity:
        return Sensitivity(**{name: getattr(sensitivity, name) * by for name in FIELDS})

    assert scaled(1.0) == sensitivity
    assert scaled(1.0 + 1e-9) == sensitivity
    assert scaled(1.01) != sensitivity
    assert sensitivity != sensitivity.to_json()


def without(*names: str) -> Callable[[dict[str, Any]], object]:
    def change(data: dict[str, Any]) -> None:
        for name in names:
            data["sensitivity"].pop(name)

    return change


def given(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["sensitivity"].update({name: value})


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a field missing": without("key"),
    "no fields": without(*FIELDS),
    "a number for all": lambda data: data.update(sensitivity=3),
    "a list for all": lambda data: data.update(sensitivity=[1, 2]),
    "a layer too few": given("value", [1.0]),
    "a layer too many": given("value", [1.0, 1.0, 1.0]),
    "a width too few": given("key_bits_nats", [[0, 1], [0, 1]]),
    "ragged rows": given("key_bits_nats", [[0, 1, 2], [0, 1]]),
    "negative": given("evict", [1.0, -1.0]),
    "not a number": given("evict", [1.0, float("nan")]),
    "infinite": given("key", [1.0, float("inf")]),
    "too large": given("key", [1.0, 10**400]),
    "text": given("key", ["much", "little"]),
    "null": given("key", [None, None]),
    "objects": given("key", [{}, {}]),
}


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The bundle with a manifest that was changed and sealed again."""
    data = json.loads((folder / MANIFEST_FILE).read_text())
    change(data)
    (folder / MANIFEST_FILE).write_text(json.dumps(data | {"checksum": checksum(data)}))
    return folder


@pytest.fixture
def own(bundle: Bundle, tmp_path: Path) -> Path:
    """A bundle whose manifest is this test's own, beside the files of the other."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    for file in bundle.path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / MANIFEST_FILE).unlink()
    (folder / MANIFEST_FILE).write_bytes((bundle.path / MANIFEST_FILE).read_bytes())
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_sensitivity_is_refused(damage: str, own: Path) -> None:
    with pytest.raises(BundleError, match=r"kvq\.json is damaged .*; export the model again"):
        Bundle.open(changed(own, DAMAGES[damage]))


def test_a_bundle_that_says_neither_gets_the_default_policy(own: Path) -> None:
    def older(data: dict[str, Any]) -> None:
        del data["sensitivity"], data["kv"]["policy"]

    manifest = Bundle.open(changed(own, older)).manifest
    assert (manifest.policy, manifest.sensitivity) == (DEFAULT_POLICY, None)


@pytest.mark.parametrize("options", [{"calibrate": False}, {"tokenizer": False}])
def test_what_is_not_calibrated_says_null(source: Path, options: dict[str, bool]) -> None:
    made = export(source, "-".join(options), **options)
    assert made.manifest.sensitivity is None
    assert json.loads((made.path / MANIFEST_FILE).read_text())["sensitivity"] is None
    assert made.manifest.policy == DEFAULT_POLICY


def test_a_short_context_is_not_calibrated(tmp_path: Path) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source", max_position_embeddings=383)
    assert export(source).manifest.sensitivity is None
    source = tiny.make_llama_checkpoint(tmp_path / "longer", max_position_embeddings=384)
    assert export(source, "other").manifest.sensitivity is not None


# What sessions get


def test_sessions_decide_by_the_policy_and_sensitivity_of_the_bundle(
    bundle: Bundle, sensitivity: Sensitivity
) -> None:
    with Engine.open(bundle.path, threads=1) as engine:
        for asked, policy in ((None, "h2o:recent=0.25"), ("budget", "budget")):
            config = engine.backend.session_config(SessionRequest(policy=asked))
            assert config.policy == policy
            cache = engine.backend.open_cache(config)
            assert isinstance(cache, Cache)
            assert cache.policy == policy_named(policy)
            assert cache.evidence().sensitivity == sensitivity
            cache.close()
        with engine.session() as session:
            assert session.config.policy == "h2o:recent=0.25"


# The command


def test_the_flags_of_the_command(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(source), "--threads", "1", "--no-quality", "-o"]
    made = tmp_path / "made"
    assert main([*words, str(made), "--no-calibrate", "--kv-policy", "streaming", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"]["policy"] == "streaming"
    manifest = Bundle.open(made).manifest
    assert (manifest.policy, manifest.sensitivity) == ("streaming", None)
    assert main([*words, str(made), "--force", "--no-calibrate"]) == 0
    assert "calibrated" not in capsys.readouterr().out
    assert main([*words, str(made), "--force"]) == 0
    assert f"{DEFAULT_POLICY}, calibrated\n" in capsys.readouterr().out
    assert Bundle.open(made).manifest.sensitivity is not None


def test_an_unknown_policy_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    assert main(["export", str(source), "-o", str(made), "--kv-policy", "newest"]) == 2
    assert "--kv-policy 'newest' is unknown; possible: a2sf, budget, " in capsys.readouterr().err
    assert not made.exists()


# What lies beside a checkpoint


def test_what_was_measured_is_taken_for_the_same_weights_and_widths_only(
    source: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    found = bundle.manifest.forms, bundle.manifest.sensitivity
    options = ExportOptions(quality=False, threads=1)
    calibration.keep(folder, options.weights, found)
    wide = WeightFormat(bits=8)
    assert calibration.kept(folder, wide, bundle.config) is None
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: pytest.fail("measured again"))
    made = export(folder)
    assert (made.manifest.forms, made.manifest.sensitivity) == found
    kept = (folder / calibration.KEPT_FILE).read_bytes()
    for damage in (kept[:-9], b"[]", kept.replace(b"forms", b"norms")):
        (folder / calibration.KEPT_FILE).write_bytes(damage)
        assert calibration.kept(folder, options.weights, bundle.config) is None
    (folder / calibration.KEPT_FILE).write_bytes(kept)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\0\1")
    assert calibration.kept(folder, options.weights, bundle.config) is None
