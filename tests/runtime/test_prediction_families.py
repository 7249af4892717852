"""KV Prediction in families whose later layers see less, and norm and scale more."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq import native_library
from kvq_export.fit.prediction import fit
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.engine import Engine
from logits import far, prompt
from shelf import EIGHT, Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
# Windows of 24 and 20 tokens, in all layers, the later ones, or all but one; norms of keys, norms
# around both branches or behind them alone; two sets of rotary frequencies.
FAMILIES = {
    "mistral-window": {"num_hidden_layers": 3},
    "qwen2-window": {},
    "gemma3": {},
    "qwen3": {"num_hidden_layers": 3},
    "olmo2": {},
    "phi3-longrope": {"num_hidden_layers": 3},
}
OPTIONS = {"kv": "fp", "context_tokens": 256, "kv_budget": "256tok"}
TEXT = prompt(150)


@pytest.fixture(params=FAMILIES, scope="module")
def bundle(request: pytest.FixtureRequest, shelf: Shelf) -> Path:
    case, keys = str(request.param), dict[str, Any](FAMILIES[request.param])
    source = shelf.family(case, **keys)
    return shelf.exported(source, EIGHT)


def last_logits(engine: Engine, predict: str, *, refined: bool = False) -> np.ndarray:
    with engine.session(predict=predict, **OPTIONS) as session:
        session.prefill(TEXT)
        while refined and session.refresh():
            pass
        assert session.exact == (refined or predict == "off")
        logits = session.sequence.state().logits
    assert logits is not None
    return logits[None]


@pytest.mark.sampled
def test_prediction_is_the_references_and_is_made_exact(bundle: Path) -> None:
    """Predicts what a window leaves out too: a later layer needs no more than was seen."""
    logits = dict[str, np.ndarray]()
    for backend in ("onnx", "float"):
        with Engine.open(bundle, backend=backend, threads=1) as engine:
            layers = engine.model.num_layers
            logits[backend] = last_logits(engine, "prefix:layers=1,tail=5")
            exact = last_logits(engine, "off")
            refined = last_logits(engine, "prefix:layers=1,tail=5", refined=True)
            last_predicted = last_logits(engine, f"prefix:layers={layers - 1},tail=5")
        assert far(refined, exact) < 1e-3
        assert far(last_predicted, exact) < 1e-3  # the last layer's are its own
        assert far(logits[backend], exact) > 0.15
    assert far(logits["onnx"], logits["float"]) < 0.08


def test_a_fit_starts_where_the_layers_own_matrix_is(bundle: Path) -> None:
    """Checks KVP-7: keys are fitted before their norm and rotation, whatever the layer has."""
    opened = Bundle.open(bundle)
    config = opened.config
    if config.layers[0].norms == "after":
        pytest.skip("nothing is fitted to a stream without a norm")
    first = config.num_layers - 1
    maps, _ = fit(opened, [prompt(120, seed) for seed in range(4)], (first,))
    weights, bias = maps[first][first]
    kept = slice(config.first_attention.width, None)
    matrix = opened.read_weight(f"layers.{first}.qkv", kept)
    np.testing.assert_allclose(weights, matrix, atol=2e-4)
    if config.layers[first].mixer.qkv_bias:
        own_bias = opened.read_weight(f"layers.{first}.qkv_bias")[kept]
        np.testing.assert_allclose(bias, own_bias, atol=2e-4)
    else:
        assert np.abs(bias).max() < 2e-4
