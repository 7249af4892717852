"""`models/training/predict.py`: its model is the checkpoint's, and what predicts is trained."""

from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvq_export.config import ExportOptions, WeightFormat
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import read_checkpoint
from kvq_runtime.bundle import Bundle
from kvq_runtime.engine import Engine
from logits import divergence, prompt
from shelf import Shelf
from tiny import checkpoint_weights

torch = pytest.importorskip("torch")
RECIPES = Path(__file__).parents[2] / "models/training"
LAYERS = {"num_hidden_layers": 3, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = util.spec_from_file_location("training_predict", RECIPES / "predict.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    pytest.MonkeyPatch().setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)  # more wait for each other on a machine that others use
    return module


@pytest.fixture(scope="module")
def base(recipe: ModuleType, shelf: Shelf) -> Any:
    return recipe.Llama(shelf.checkpoint(**LAYERS), "cpu")


def test_the_model_is_the_checkpoints(base: Any, shelf: Shelf) -> None:
    ids, folder = np.array(prompt(40)), shelf.checkpoint(**LAYERS)
    _, config, _ = read_checkpoint(folder)
    weights = checkpoint_weights(folder)
    wanted = forward(config, weights, ids, np.arange(40), PlainAttention())
    with torch.no_grad():
        found = base.log_probabilities(base(torch.tensor(ids)[None]))[0].numpy()
    assert divergence(wanted, found) < 1e-6


@pytest.mark.parametrize("reads", [False, True])
def test_training_leaves_the_model_as_it_is(
    recipe: ModuleType, base: Any, shelf: Shelf, reads: bool
) -> None:
    """KVP-4: B gets no gradient, the maps and A do; and the loss falls from the ridge start."""
    small = recipe.Llama(shelf.checkpoint(num_hidden_layers=2, tie_word_embeddings=True), "cpu")
    predictor = recipe.Predictor(base, 0 if reads else 1, small if reads else None)
    texts = [prompt(64, seed) for seed in range(12)]
    recipe.ridge(predictor, base, [torch.tensor([text]) for text in texts])
    before = {name: one.detach().clone() for name, one in base.named_parameters()}
    trained = {name: one.detach().clone() for name, one in predictor.named_parameters()}
    steps = recipe.Recipe(steps=6, rows=6, length=64, rate=1e-4 if reads else 1e-3)
    batch = torch.tensor(texts[:6])
    first = float(recipe.loss(predictor, base, batch, 40).detach())
    assert len(list(recipe.distil(predictor, base, texts, steps))) == steps.steps
    assert float(recipe.loss(predictor, base, batch, 40).detach()) < first
    for name, one in base.named_parameters():
        assert one.grad is None
        assert torch.equal(one, before[name])
    moved = {name for name, one in predictor.named_parameters() if not one.equal(trained[name])}
    assert {f"maps.{layer}" for layer in (() if reads else (1, 2))} <= moved
    assert any(name.startswith("auxiliary") for name in moved) == reads
    assert (("maps.0" in moved), ("maps.2" in moved)) == (reads, True)


def test_what_is_computed_costs_nothing_and_maps_find_their_bundle(
    recipe: ModuleType, base: Any, shelf: Shelf, tmp_path: Path
) -> None:
    """KVP-8's ends; and a bundle predicts by the maps that it was given."""
    predictor = recipe.Predictor(base, 2)
    recipe.ridge(predictor, base, [torch.tensor([prompt(200, seed)]) for seed in range(6)])
    found = recipe.shares(predictor, base, [prompt(200, 9)])
    assert found["predicted"] == pytest.approx(found["exact"], abs=5e-3)  # the layer's own matrix
    from kvq_export import prediction
    from kvq_export.export import export_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "FIT_TOKENS", 600)
        patch.setattr(prediction, "PASSAGES", 1)
        options = ExportOptions(
            quality=False, calibrate=False, weights=WeightFormat(bits=8), predict="2"
        )
        folder = export_model(shelf.checkpoint(**LAYERS), tmp_path / "made", options).path
    with torch.no_grad():
        predictor.maps["2"].mul_(0.5)
    recipe.store(folder, predictor, base)
    bundle = Bundle.open(folder)
    kept = slice(bundle.config.num_heads * bundle.config.head_dim, None)
    weights, _ = bundle.restored_maps()[2]
    own = bundle.read_weight("layers.2.qkv", kept)
    np.testing.assert_allclose(weights, 0.5 * own, atol=0.02)
    with Engine.open(folder, backend="reference", threads=1) as engine:
        assert engine.model.fitted_layers == 2
    with pytest.raises(SystemExit, match="no maps after layer 1"):
        recipe.store(folder, recipe.Predictor(base, 1), base)
