"""A smaller model that reads prompts for a larger one: which layers serve which, and the result."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from kvq import native_library
from kvq.errors import BackendError, BundleError, UsageError
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit import auxiliary, prediction
from kvq_export.write.writer import write_manifest
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import AUXILIARY_FILE
from kvq_runtime.engine import Engine
from kvq_runtime.session.auxiliary import RULES, consistent, open_auxiliary, pruned
from logits import divergence, generated, prompt
from shelf import PLAIN, Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
EIGHT = WeightFormat(bits=8)
TEXT = prompt(200)
OPTIONS = {"kv": "fp", "context_tokens": 384, "kv_budget": "384tok"}
# Heads, head size and layers differ from those of the model that it reads for.
SMALL = {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 64}


@pytest.fixture(scope="module", autouse=True)
def _little_text() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "FIT_TOKENS", 1500)
        patch.setattr(prediction, "PASSAGES", 1)
        yield


@pytest.fixture(scope="module")
def small(shelf: Shelf) -> Path:
    return shelf.bundle(ExportOptions(quality=False, weights=EIGHT), **SMALL)


@pytest.fixture(scope="module")
def base(shelf: Shelf, small: Path) -> Path:
    options = ExportOptions(quality=False, calibrate=False, weights=EIGHT, predict_with=small)
    return shelf.bundle(options, num_hidden_layers=3)


def opened(engine: Engine, path: Path, knobs: str = "") -> Any:
    return engine.session(predict=f"auxiliary:path={path},{knobs}", **OPTIONS)


def last(session: Any) -> np.ndarray:
    logits = session.sequence.state().logits
    assert logits is not None
    return logits[None]


@pytest.mark.parametrize(
    ("layers", "auxiliary_layers"), [(6, 4), (28, 16), (16, 16), (5, 1), (24, 7)]
)
def test_every_layer_is_served_by_the_rule(layers: int, auxiliary_layers: int) -> None:
    """Checks KVP-2: non-decreasing, onto, and as the paper words them."""
    for rule in RULES.values():
        served = rule(layers, auxiliary_layers)
        assert len(served) == layers
        assert set(served) == set(range(auxiliary_layers))
        assert list(served) == sorted(served)
    each, more = divmod(layers, auxiliary_layers)
    assert [
        consistent(layers, auxiliary_layers).count(layer) for layer in range(auxiliary_layers)
    ] == [each + 1 if layer < more else each for layer in range(auxiliary_layers)]
    kept = [layer * layers // auxiliary_layers for layer in range(auxiliary_layers)]
    for layer, server in enumerate(pruned(layers, auxiliary_layers)):
        assert kept[server] == max(place for place in kept if place <= layer)


def test_half_and_quarter_of_the_layers_are_the_papers() -> None:
    assert pruned(8, 4) == (0, 0, 1, 1, 2, 2, 3, 3)  # the even ones are kept
    assert pruned(8, 2) == (0, 0, 0, 0, 1, 1, 1, 1)  # every fourth


def test_unlike_shapes_are_mapped_and_the_rest_is_computed(base: Path, small: Path) -> None:
    """Checks KVP-2 and 3: the auxiliary model reads nothing while the base model writes."""
    maps = Bundle.open(base).auxiliary_maps()
    assert [array.shape for array in maps] == [(2 * 32 + 1, 2 * 2 * 64)] * 3
    with Engine.open(base, threads=1) as engine, opened(engine, small, "tail=9") as session:
        session.prefill(TEXT)
        stats = session.stats()
        assert (stats.edits.predicted_tokens, stats.edits.stale_tokens) == (187, 196)
        assert session.sequence.cache.tokens == len(TEXT)
        reader = session._reader.sequence
        assert reader.cache.tokens == 191
        generated(session, 3)
        assert (reader.cache.tokens, session.sequence.cache.tokens) == (191, len(TEXT) + 2)
        session.prefill(prompt(80, 3))  # a second prompt goes on where the first one ended
        assert session.stats().edits.predicted_tokens == 187 + 80 + 1 - 9
        guessed = last(session)
        while session.refresh():
            pass
        assert session.exact
        with engine.session(**OPTIONS) as plain:
            plain.prefill(session.tokens)
            assert divergence(last(plain), last(session)) < 2e-3 < divergence(last(plain), guessed)


@pytest.mark.parametrize("backend", ["onnx", "float"])
def test_a_model_that_reads_for_itself_changes_nothing(
    shelf: Shelf, backend: str, tmp_path: Path
) -> None:
    """Checks KVP-1: A = B, j = identity, W = I, b = 0."""
    base = shelf.bundle(ExportOptions(quality=False, weights=EIGHT), num_hidden_layers=3)
    copytree(base, tmp_path / "same")
    bundle = Bundle.open(tmp_path / "same")
    width = 2 * bundle.config.first_attention.kv_width
    identity = np.vstack([np.eye(width), np.zeros(width)]).astype(np.float32)
    info = auxiliary.store(bundle.path, [identity] * 3)
    with Engine.open(base, backend=backend, threads=1) as engine:
        fit = {
            "name": "itself", "served_by": [0, 1, 2], "fingerprint": engine.model.fingerprint
        }  # fmt: skip
        files = {**bundle.manifest.files, AUXILIARY_FILE: info}
        write_manifest(bundle.path, replace(bundle.manifest, files=files, auxiliary=fit))
    with Engine.open(bundle.path, backend=backend, threads=1) as engine:
        logits = dict[str, np.ndarray]()
        for name, predict in (("off", "off"), ("read", f"auxiliary:path={base}")):
            with engine.session(predict=predict, **OPTIONS) as session:
                session.prefill(TEXT)
                assert session.exact == (name == "off")
                logits[name] = last(session)
        # The reader rounds its activations; its keys are float16.
        assert divergence(logits["off"], logits["read"]) < (1e-5 if backend == "onnx" else 0.01)
        assert logits["read"].argmax() == logits["off"].argmax()


def test_all_tokens_computed_is_plain_prefill_bit_for_bit(base: Path, small: Path) -> None:
    """Checks KVP-5."""
    with Engine.open(base, threads=1) as engine:
        states = []
        for predict in (None, f"auxiliary:path={small},tail=200"):
            with engine.session(predict=predict, kv="4:2", context_tokens=256) as session:
                session.prefill(TEXT)
                states.append(session.capture().state.cache)
    assert states[0] == states[1]


def test_a_fit_to_the_model_itself_is_the_identity(small: Path) -> None:
    """Checks KVP-6, as far as the penalty and few tokens allow."""
    with Engine.open(small, backend="float", threads=1) as engine:
        reads: Any = engine.backend
        texts = [prompt(200, seed) for seed in range(5)]
        maps = auxiliary.fit(reads.bundle, reads, texts, (0, 1))
    for weights in maps:
        np.testing.assert_allclose(weights[:-1], np.eye(len(weights) - 1), atol=0.2)
        assert np.abs(weights[-1]).max() < 0.2


def test_models_that_do_not_belong_together_are_refused_by_name(
    shelf: Shelf, base: Path, small: Path, tmp_path: Path
) -> None:
    other = shelf.bundle(PLAIN, **SMALL, seed=5)
    checkpoint = copytree(shelf.checkpoint(**SMALL), tmp_path / "source")
    file = checkpoint / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    names = {token: name for name, token in tokenizer["model"]["vocab"].items()}
    tokenizer["model"]["vocab"] |= {names[100]: 101, names[101]: 100}
    file.write_text(json.dumps(tokenizer))
    stranger = export_model(checkpoint, tmp_path / "stranger", PLAIN).path
    bare = shelf.bundle(ExportOptions(quality=False, name="bare", tokenizer=False), **SMALL)
    with Engine.open(base, threads=1) as engine:
        for wrong, error, message in (
            (stranger, BackendError, r"stranger has another vocabulary .*differ at token 100"),
            (bare, BackendError, "bare has no tokenizer"),
            (other, BackendError, "no matrices that make its keys and values from those of bundle"),
            (tmp_path / "none", BundleError, "none"),
        ):
            with pytest.raises(error, match=message):
                opened(engine, wrong)
        with pytest.raises(UsageError, match="path= is missing"):
            engine.session(predict="auxiliary")
        with engine.session(**OPTIONS) as session:
            before = session.predict
            with pytest.raises(BackendError):
                session.predict = f"auxiliary:path={other}"
            assert session.predict == before
            session.prefill(TEXT)
            assert session.exact
    tall = shelf.bundle(PLAIN, num_hidden_layers=4)
    with pytest.raises(UsageError, match="4 layers, more than the 3"):
        export_model(
            shelf.checkpoint(num_hidden_layers=3),
            tmp_path / "new",
            ExportOptions(quality=False, calibrate=False, predict_with=tall),
        )
    assert not (tmp_path / "new").exists()


def test_weights_are_shared_and_a_cache_of_its_own_is_given_back(base: Path, small: Path) -> None:
    with Engine.open(base, threads=1) as engine:
        backend: Any = engine.backend
        with opened(engine, small) as session:
            assert open_auxiliary(str(small), backend) is open_auxiliary(str(small), backend)
            reader = session._reader
            assert session.stats().auxiliary_bytes == reader.sequence.cache.budget_bytes > 0
            session.predict = "off"
            assert session.stats().auxiliary_bytes == 0
            with pytest.raises(UsageError, match="closed"):
                _ = reader.sequence.cache.tokens
