"""The shapes of `kvq bench` are those of the models whose names they bear."""

import math

import pytest

from kvq_apps.bench import model_shapes as shapes
from kvq_models.registry import family_for
from kvq_runtime.bundle.bundle import Bundle


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("smollm2-135m", 134_515_008),
        ("gpt-oss-20b", 20_914_757_184),
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("lfm2-8b-a1b", 8_339_930_560),
        ("gemma-4-26b-a4b", 25_247_555_870),
    ],
)
def test_a_shape_has_the_parameters_of_its_model(name: str, parameters: int) -> None:
    config = shapes.shape_config(name)
    weights = family_for({"model_type": config.model_type}).weights(config)
    assert sum(math.prod(source.shape) for source in weights.values()) == parameters


@pytest.mark.parametrize(
    ("name", "mixers"),
    [
        ("gpt-oss-20b:layers=2", "Attention Attention"),
        ("qwen3.5-35b-a3b:layers=4", "DeltaNet DeltaNet DeltaNet Attention"),
        ("qwen3-next-80b-a3b:layers=4", "DeltaNet DeltaNet DeltaNet Attention"),
        ("lfm2-8b-a1b:layers=4", "ShortConv ShortConv Attention ShortConv"),
        ("lfm2-1.2b:layers=3", "ShortConv ShortConv Attention"),
        ("gemma-4-26b-a4b:layers=6", " ".join(["Attention"] * 6)),
    ],
)
def test_a_shape_may_have_its_first_layers_alone(name: str, mixers: str) -> None:
    config = shapes.shape_config(name)
    assert [type(layer.mixer).__name__ for layer in config.layers] == mixers.split()
    whole = shapes.shape_config(name.partition(":")[0]).layers
    assert config.layers == whole[: config.num_layers]


def test_a_shape_has_the_experts_that_its_model_was_published_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    fewer = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = shapes.SHAPES["gpt-oss-20b"] | small | fewer | {"num_local_experts": 4}
    monkeypatch.setattr(shapes, "SHAPES", {"small": shape})
    weights = Bundle.open(shapes.shape_bundle("small")).manifest.weights
    assert weights is not None
    experts = {str(form) for name, form in weights.formats.items() if "experts" in name}
    assert experts == {"4/32/e2m1"}
    assert "4/64/zero_point" in map(str, weights.formats.values())


@pytest.mark.usefixtures("tiny_shape")
def test_a_shape_is_made_once() -> None:
    path = shapes.shape_bundle("tiny")
    written = (path / "kvq.json").stat().st_mtime_ns
    assert Bundle.open(path).manifest.name == "tiny"
    assert shapes.shape_bundle("tiny") == path
    first = Bundle.open(shapes.shape_bundle("tiny:layers=1"))
    assert (first.config.num_layers, first.manifest.name) == (1, "tiny-layers-1")
    assert (path / "kvq.json").stat().st_mtime_ns == written
