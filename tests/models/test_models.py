"""Families: the numpy forward equals transformers; what is not supported is refused by name."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from kvq.config import ConvShape, DeltaShape
from kvq.errors import CheckpointError, ModelError, UnsupportedModelError
from kvq_models.config import Experts, Layer, ModelConfig, RopeConfig
from kvq_models.reference import (
    ACTIVATIONS,
    PlainAttention,
    forward,
)
from kvq_models.registry import FAMILIES, WRAPPERS, family_for, read_checkpoint, text_config
from shelf import Shelf

# Largest difference of a float32 logit; logits here have a standard deviation near 3. Two float32
# implementations that sum in different orders stay below 4e-5.
TOLERANCE = 2e-4
SHORT, LONG = 48, 200  # tokens: within and beyond the 64 tokens the scaled ropes were "trained" on


@pytest.fixture(scope="module", params=list(tiny.CASES))
def checkpoint(request: pytest.FixtureRequest, shelf: Shelf) -> Path:
    return shelf.family(request.param)


def random_ids(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB_SIZE, count)


def reference_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    _, config, _ = read_checkpoint(folder)
    return forward(
        config,
        tiny.checkpoint_weights(folder),
        ids,
        np.arange(len(ids)),
        PlainAttention(),
        long_rope=config.needs_long_rope(len(ids)),
    )


@pytest.mark.sampled
def test_forward_equals_transformers(checkpoint: Path) -> None:
    ids = random_ids(LONG)
    expected = tiny.transformers_logits(checkpoint, ids)
    actual = reference_logits(checkpoint, ids)
    assert expected.std() > 2
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.sampled
def test_chunks_and_steps_equal_one_pass(checkpoint: Path) -> None:
    _, config, _ = read_checkpoint(checkpoint)
    weight, ids = tiny.checkpoint_weights(checkpoint), random_ids(70)
    whole = forward(config, weight, ids, np.arange(70), PlainAttention())
    attend, parts = PlainAttention(), []
    for start, stop in ((0, 1), (1, 8), (8, 68), (68, 69), (69, 70)):
        positions = np.arange(start, stop)
        parts.append(forward(config, weight, ids[start:stop], positions, attend))
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=TOLERANCE)


def test_weights_name_every_tensor_of_the_checkpoint(checkpoint: Path) -> None:
    family, config, _ = read_checkpoint(checkpoint)
    read = tiny.read_safetensors(checkpoint / "model.safetensors")
    tensors = tiny.parts_of(family, config, read)
    sources = family.weights(config).values()
    used = [part for source in sources for part in source.parts]
    used += [source.factors for source in sources if source.factors is not None]
    attending = [layer.attention for layer in config.layers if layer.attends]
    shared = [mixer for mixer in attending if mixer.values == "keys"]
    assert sorted(set(used)) == sorted(tensors)
    assert len(used) == len(tensors) + len(shared), "keys are read twice where values are they"
    for name, source in family.weights(config).items():
        rows = sum(tensors[part].shape[0] for part in source.parts)
        assert (rows, *tensors[source.parts[0]].shape[1:]) == source.shape, name


def test_config_survives_json(checkpoint: Path) -> None:
    _, config, _ = read_checkpoint(checkpoint)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_what_no_layer_can_be_is_refused() -> None:
    config = family_for(llama_json()).config(llama_json())
    for message, change in {
        "the activation 'relu' is none of silu, gelu_tanh": {"feed": {"activation": "relu"}},
        "the place of the norms 'between' is none of": {"norms": "between"},
        "the norm of queries and keys 'all' is none of": {"mixer": {"qk_norm": "all"}},
        "a layer's rope is 1; it must be at most 0": {"mixer": {"rope": 1}},
        "num_heads is 0; it must be a whole number": {"mixer": {"heads": 0}},
    }.items():
        with pytest.raises(ModelError, match=message):
            tiny.altered(config, **change)
    narrow = tiny.altered(config, mixer={"heads": 2, "kv_heads": 1}).layers
    mixed = dataclasses.replace(config, layers=config.layers[:1] + narrow[:1])
    assert [cache_class.layers for cache_class in mixed.cache_classes] == [(0,), (1,)]
    assert (mixed.place(0), mixed.place(1), mixed.uniform) == ((0, 0), (1, 0), False)
    with pytest.raises(ModelError, match="num_layers is 0"):
        dataclasses.replace(config, layers=())


def test_a_layer_reads_the_last_of_its_class_alone() -> None:
    config = family_for(llama_json()).config(llama_json())
    (plain,) = set(config.layers)

    def reads(source: Any, **other: Any) -> Layer:
        mixer = dataclasses.replace(plain.mixer, kv_from=source, **other)
        return dataclasses.replace(plain, mixer=mixer)

    window = dataclasses.replace(plain, mixer=dataclasses.replace(plain.mixer, window_tokens=8))
    layers = (plain, window, plain, reads(2), reads(1, window_tokens=8))
    shared = dataclasses.replace(config, layers=layers)
    assert [cache_class.layers for cache_class in shared.cache_classes] == [(0, 2), (1,)]
    assert [shared.place(layer) for layer in range(5)] == [(0, 0), (1, 0), (0, 1), (0, 1), (1, 0)]
    assert (shared.first_reader, shared.uniform) == (3, False)
    assert shared.attention(4).cache == 1
    for wrong in (reads(0), reads(5), reads(-1), reads("2"), reads(True)):
        with pytest.raises(ModelError, match="reads the keys of layer"):
            dataclasses.replace(config, layers=(*layers[:3], wrong))
    with pytest.raises(ModelError, match="of a layer of another shape"):
        dataclasses.replace(config, layers=(*layers[:3], reads(2, heads=2, kv_heads=1)))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_row_of_the_table_imports(model_type: str) -> None:
    module, name = FAMILIES[model_type].split(":")
    family = getattr(importlib.import_module(module), name)
    assert family.model_type == model_type
    assert family_for({"model_type": model_type}) is family


@pytest.mark.parametrize("case", ["llama-linear", "llama-llama3", "llama-yarn", "phi3-longrope"])
def test_scaling_matters_beyond_the_trained_context(case: str, shelf: Shelf) -> None:
    """Guards the parity above: without the scaling the logits would be far outside TOLERANCE."""
    folder = shelf.family(case)
    _, config, _ = read_checkpoint(folder)
    dim = config.first_attention.head_dim
    plain = 10_000.0 ** -(np.arange(0, dim, 2) / dim)
    unscaled = RopeConfig(inv_freq=tuple(plain.astype(np.float32).tolist()))
    changed = ModelConfig.from_json({**config.to_json(), "ropes": [vars_of(unscaled)]})
    weight, ids = tiny.checkpoint_weights(folder), random_ids(LONG)
    right = reference_logits(folder, ids)
    wrong = forward(changed, weight, ids, np.arange(LONG), PlainAttention())
    assert np.abs(right - wrong)[64:].max() > 0.1


def vars_of(rope: RopeConfig) -> dict[str, Any]:
    return {"inv_freq": rope.inv_freq, "factor": rope.factor}


def test_longrope_picks_one_table_per_session(shelf: Shelf) -> None:
    folder = shelf.family("phi3-longrope")
    _, config, _ = read_checkpoint(folder)
    assert [config.needs_long_rope(tokens) for tokens in (64, 65)] == [False, True]
    assert config.inv_freq(0).shape == config.inv_freq(0, long_rope=True).shape == (24,)
    ratio = config.inv_freq(0) / config.inv_freq(0, long_rope=True)
    expected = [(1 + 0.3 * i) / (1 + 0.02 * i) for i in range(24)]
    np.testing.assert_allclose(ratio, expected, rtol=1e-6)
    assert config.ropes[0].factor == pytest.approx(np.sqrt(1 + np.log(8) / np.log(64)))
    ids = random_ids(SHORT)
    expected = tiny.transformers_logits(folder, ids)
    np.testing.assert_allclose(reference_logits(folder, ids), expected, rtol=0, atol=TOLERANCE)


def test_inverse_frequencies_equal_transformers_within_one_bit(checkpoint: Path) -> None:
    _, config, _ = read_checkpoint(checkpoint)
    model = tiny.transformers_model(checkpoint)
    tiny.transformers_logits(checkpoint, random_ids(1))  # a longer text had it take longer waves
    names = {"full_attention_inv_freq": 0, "sliding_attention_inv_freq": 1, "inv_freq": 0}
    parts = dict(model.model.named_children())
    buffers = dict((parts.get("rotary_emb") or parts["pos_emb"]).named_buffers())
    compared = 0
    for name, index in names.items():
        if name in buffers:
            ours = np.asarray(config.ropes[index].inv_freq, np.float32)
            theirs = buffers[name].numpy()
            assert np.abs(ours.view(np.int32) - theirs.view(np.int32)).max() <= 1
            compared += 1
    turning = [rope for rope in config.ropes if any(rope.inv_freq)]
    assert compared == len(turning)


OLD_AND_NEW_ROPES = [
    (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
    ),
    ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
    ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
]


def llama_json(**overrides: Any) -> dict[str, Any]:
    return {"model_type": "llama", **tiny.COMMON, **overrides}


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW_ROPES)
def test_old_and_new_rope_keys_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    family = family_for(llama_json())
    assert family.config(llama_json(**old)) == family.config(llama_json(**new))


def test_gemma3_old_keys_mean_the_same() -> None:
    common = {
        **tiny.COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "dtype": "bfloat16",
    }
    old = {
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    new = {
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    family = family_for(common)
    config = family.config({**common, **old})
    assert config == family.config({**common, **new})
    assert [layer.mixer.rope for layer in config.layers] == [1, 1, 1, 1, 1, 0] * 2
    assert [layer.mixer.window_tokens for layer in config.layers] == [4096] * 5 + [0] + [
        4096
    ] * 5 + [0]


def test_gemma3_scale_is_rounded_to_the_checkpoint_type() -> None:
    keys = {"model_type": "gemma3_text", **tiny.COMMON, "hidden_size": 3072}
    scales = {
        dtype: family_for(keys).config({**keys, "torch_dtype": dtype}).embedding_scale
        for dtype in ("bfloat16", "float16", "float32")
    }
    assert scales == {
        "bfloat16": 55.5,
        "float16": 55.4375,
        "float32": float(np.float32(np.sqrt(3072))),
    }


def test_gemma3_attention_soft_cap(tmp_path: Path) -> None:
    """Gives the cap to the peer's attention call, as its model reads it and leaves it there."""
    folder = tiny.make_checkpoint("gemma3", tmp_path, attn_logit_softcapping=1.5)
    ids = random_ids(LONG)
    expected = tiny.transformers_logits(folder, ids, softcap=1.5)
    np.testing.assert_allclose(reference_logits(folder, ids), expected, rtol=0, atol=TOLERANCE)
    uncapped = tiny.transformers_logits(folder, ids)
    assert np.abs(expected - uncapped).max() > 0.1


def test_yarn_context_reaches_the_stretched_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = family_for(llama_json()).config(llama_json(rope_scaling=scaling))
    assert config.context_length == 2048


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    folder = tiny.make_llama_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert read_checkpoint(folder)[1].eos_token_ids == (0, 2)


def test_mixed_embeddings(tmp_path: Path) -> None:
    folder = tiny.make_llama_checkpoint(tmp_path)
    _, config, _ = read_checkpoint(folder)
    weight, positions = tiny.checkpoint_weights(folder), np.arange(5)
    ids = random_ids(5)
    plain = forward(config, weight, ids, positions, PlainAttention())
    pairs = np.stack([ids, random_ids(5, seed=2)], axis=1)
    weights = np.tile(np.float32([1.0, 0.0]), (5, 1))
    same = forward(config, weight, ids, positions, PlainAttention(), mixed=(pairs, weights))
    np.testing.assert_allclose(same, plain, rtol=0, atol=1e-6)
    half = np.full((5, 2), 0.5, np.float32)
    mixed = forward(config, weight, ids, positions, PlainAttention(), mixed=(pairs, half))
    table = (weight("embed")[pairs[:, 0]] + weight("embed")[pairs[:, 1]]) / 2

    def replaced(name: str) -> np.ndarray:
        return table if name == "embed" else weight(name)

    expected = forward(config, replaced, np.arange(5), positions, PlainAttention())
    np.testing.assert_allclose(mixed, expected, rtol=0, atol=1e-5)


def test_rows_pick_logits(tmp_path: Path) -> None:
    folder = tiny.make_llama_checkpoint(tmp_path)
    _, config, _ = read_checkpoint(folder)
    weight, ids, positions = tiny.checkpoint_weights(folder), random_ids(6), np.arange(6)
    whole = forward(config, weight, ids, positions, PlainAttention())
    last = forward(config, weight, ids, positions, PlainAttention(), rows=slice(-1, None))
    some = forward(config, weight, ids, positions, PlainAttention(), rows=np.array([4, 1]))
    np.testing.assert_allclose(last, whole[-1:], rtol=0, atol=1e-5)
    np.testing.assert_allclose(some, whole[[4, 1]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_torch(name: str) -> None:
    import torch

    peers = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    values = np.linspace(-90, 90, 1801, dtype=np.float32)
    expected = peers[name](torch.from_numpy(values).double()).numpy()
    np.testing.assert_allclose(ACTIVATIONS[name](values), expected, rtol=1e-6, atol=1e-6)


SUPPORTED = FAMILIES.keys() | WRAPPERS.keys()
REFUSED = [
    (
        {"model_type": "mamba"},
        f"model_type 'mamba' is not supported; supported: {', '.join(sorted(SUPPORTED)[:4])}, ",
    ),
    ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
    ({"model_type": None}, "names no model_type"),
    ({"model_type": ["llama"]}, "model_type ['llama'] is not supported; supported: "),
    ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported for llama; supported: 'silu'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "supported: default, linear, llama3, y"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "key mrope_section"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not"),
    ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported"),
    ({"residual_multiplier": 0.2}, "residual_multiplier = 0.2, which llama does not know"),
    ({"atention_bias": True}, "did you mean attention_bias"),
    ({"rope_interleaved": True}, "rope_interleaved = True is not supported"),
    ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 2}, "'chunked_attention'"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "needs sliding_window"),
    (
        {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LGX"},
        "sliding_window_pattern = 'LGX' is not supported",
    ),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
        "default, longrope",
    ),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_atte"),
    ({"model_type": "gemma3_text", "dtype": "float8"}, "dtype 'float8' is not supported"),
    ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, "holds rope_type"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_unsupported_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    config_json = llama_json(**keys)
    with pytest.raises(UnsupportedModelError) as refusal:
        family_for(config_json).config(config_json)
    assert message in str(refusal.value)


MALFORMED = [
    ({"hidden_size": None}, "config.json lacks hidden_size, which a llama model needs"),
    ({"vocab_size": "many"}, "vocab_size = 'many'; it should be of kind int"),
    ({"num_hidden_layers": True}, "num_hidden_layers = True; it should be of kind int"),
    ({"num_attention_heads": 0}, "num_heads is 0; it must be a whole number, at least 1"),
    ({"num_attention_heads": 3, "head_dim": None}, "128 is not a multiple of 3"),
    ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key-value heads"),
    ({"eos_token_id": "end"}, "eos_token_id = 'end'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan; it should be finite"),
    ({"rope_theta": -1.0}, "rope rope_theta is -1.0; it must be positive"),
    ({"rope_theta": 1.0}, "both must be above 1"),
    ({"rope_scaling": {"type": "linear"}}, "of kind 'linear' lack factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor is 0.0; it must be positive"),
    ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "rope factor = 'x'"),
    ({"model_type": "mistral"}, "config.json lacks sliding_window"),
    ({"model_type": "exaone4"}, "config.json lacks sliding_window"),
    (
        {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 0},
        "describes no exaone4 model",
    ),
    (
        {
            "model_type": "phi3",
            "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
        },
        "rope short_factor holds 1 numbers; this model needs 32",
    ),
]


@pytest.mark.parametrize(("keys", "message"), MALFORMED)
def test_malformed_config_is_refused(keys: dict[str, Any], message: str) -> None:
    config_json = llama_json(**keys)
    with pytest.raises(ModelError) as refusal:
        family_for(config_json).config(config_json)
    assert message in str(refusal.value)


ODD = [
    *(0, -1, 1 << 40, 10**400, 1e308, 1e-40, float("nan"), True, "x", [[1]], ["x"], {"a": 1}),
    *({"type": ["x"]}, {"rope_type": 5}, {"full_attention": [1]}, {"factor": 1e-60}),
    *({"rope_type": kind, "factor": 1e-60} for kind in ("linear", "yarn")),
    {"rope_type": "default", "partial_rotary_factor": 1e308},
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_odd_values_are_refused_or_give_finite_numbers(model_type: str) -> None:
    # Of lfm3 the third layer is the first that attends.
    layers = {"num_hidden_layers": 3} if model_type == "lfm3" else {}
    keys = llama_json(model_type=model_type, **layers)
    family = family_for(keys)
    needed = {"sliding_window": 8, "attn_logit_softcapping": 9.0, "final_logit_softcapping": None}
    needed |= {"full_attention_interval": 2}
    keys |= {name: needed[name] for name in needed.keys() & family.keys.keys()}
    assert family.config(keys).first_attention.head_dim == 64
    for name in family.keys:
        for odd in ODD:
            try:
                config = family.config({**keys, name: odd})
            except ModelError:
                continue
            json.dumps(config.to_json(), allow_nan=False)  # raises for what is not finite


def test_mistral_null_window_means_none() -> None:
    keys = llama_json(model_type="mistral", sliding_window=None)
    layers = family_for(keys).config(keys).layers
    assert [layer.mixer.window_tokens for layer in layers] == [0, 0]


def test_gemma2_says_whether_it_has_soft_caps() -> None:
    """Checks that null means none, since transformers has defaults for missing caps."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": None}
    keys = llama_json(model_type="gemma2", **caps)
    config = family_for(keys).config(keys)
    assert [layer.mixer.softcap for layer in config.layers] == [50.0, 50.0]
    assert config.final_softcap == 0
    for name in caps:
        with pytest.raises(CheckpointError, match=f"lacks {name}"):
            family_for(keys).config({key: keys[key] for key in keys if key != name})


def test_which_layers_of_smollm3_turn() -> None:
    def ropes(**overrides: Any) -> list[int]:
        keys = llama_json(model_type="smollm3", num_hidden_layers=5, **overrides)
        config = family_for(keys).config(keys)
        assert config.ropes[1].inv_freq == (0.0,)
        return [layer.mixer.rope for layer in config.layers]

    assert ropes() == [0, 0, 0, 1, 0]
    assert ropes(no_rope_layer_interval=2) == [0, 1, 0, 1, 0]
    assert ropes(no_rope_layers=[0, 1, 1, 1, 0]) == [1, 0, 0, 0, 1]
    for odd in ([2, 1, 1, 1, 1], [1, 0]):
        with pytest.raises(ModelError):
            ropes(no_rope_layers=odd)


def exaone4(**keys: Any) -> ModelConfig:
    """Returns EXAONE 4.0 32B with five layers, as its config.json has it."""
    values = {
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 361,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "num_attention_heads": 40,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 1_000_000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
        "vocab_size": 102400,
    } | keys
    return family_for(values).config(values)


def test_layers_of_exaone4_turn_where_they_have_a_window_or_none_has() -> None:
    def kinds(**keys: Any) -> list[tuple[int, int]]:
        mixers = [layer.attention for layer in exaone4(**keys).layers]
        return [(mixer.window_tokens, mixer.rope) for mixer in mixers]

    window, whole = (4096, 0), (0, 1)
    assert exaone4().ropes[1].inv_freq == (0.0,)
    assert exaone4().context_length == 131072
    # By letters the last layer sees everything, by a number it need not.
    assert kinds() == [window, window, window, whole, whole]
    assert kinds(sliding_window_pattern=4) == [window, window, window, whole, window]
    assert kinds(sliding_window_pattern="LG") == [window, whole, window, whole, whole]
    types = ["full_attention", *["sliding_attention"] * 4]
    assert kinds(layer_types=types) == [whole, *[window] * 4]
    # As the small model says it.
    assert kinds(sliding_window=None, sliding_window_pattern=None) == [(0, 0)] * 5
    with pytest.raises(UnsupportedModelError, match="needs sliding_window"):
        kinds(sliding_window=None, layer_types=types)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows_start_at_max_window_layers(model_type: str) -> None:
    keys = llama_json(model_type=model_type, num_hidden_layers=3, sliding_window=9)
    keys |= {"max_window_layers": 1}
    off = family_for(keys).config(keys)
    on = family_for(keys).config({**keys, "use_sliding_window": True})
    assert [layer.mixer.window_tokens for layer in off.layers] == [0, 0, 0]
    assert [layer.mixer.window_tokens for layer in on.layers] == [0, 9, 9]


def lfm2(**keys: Any) -> ModelConfig:
    """Returns LFM2 1.2B as its config.json has it, with two spellings of much."""
    values = {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 2048,
        "conv_dim_out": 2048,
        "conv_use_xavier_init": True,
        "eos_token_id": 7,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048,
        "max_position_embeddings": 128000,
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "theta": 1e6,
        "tie_embedding": True,
        "use_pos_enc": True,
        "vocab_size": 65536,
    } | keys
    return family_for(values).config(values)


def test_lfm2_is_read_in_both_spellings() -> None:
    config = lfm2()
    assert config.widest_feed == 8192
    assert config.tied_head
    assert [i for i, layer in enumerate(config.layers) if layer.attends] == [2, 5, 8, 10, 12, 14]
    assert config.conv_shape == ConvShape(num_layers=10, width=2048, taps=3)
    assert [config.mixer_place(layer) for layer in (0, 3, 15)] == [0, 2, 9]
    assert config.cache_classes[0].layers == (2, 5, 8, 10, 12, 14)
    attention = config.first_attention
    assert (attention.head_dim, attention.kv_heads, config.uniform) == (64, 8, False)
    types = ["full_attention" if layer.attends else "conv" for layer in config.layers]
    other = {"block_ff_dim": None, "intermediate_size": 12288, "full_attn_idxs": None}
    assert lfm2(**other, layer_types=types) == config
    assert lfm2(block_auto_adjust_ff_dim=False).widest_feed == 12288
    assert lfm2(block_ffn_dim_multiplier=0.9).widest_feed == 7424
    assert not lfm2(tie_embedding=None, tie_word_embeddings=False).tied_head


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"conv_bias": True}, "conv_bias = True is not supported"),
        ({"conv_dim": 1024}, "conv_dim = 1024 of lfm2 is not supported beside hidden_size = 2048"),
        ({"num_heads": 16}, "beside num_attention_heads = 32"),
        (
            {"layer_types": ["conv", "sliding_attention"] * 8},
            "'sliding_attention' is not supported",
        ),
        ({"layer_types": ["conv"]}, "1 layers are described"),
        ({"layer_types": ["conv"] * 16}, "no layer has keys and values"),
        ({"conv_L_cache": 17}, "the rows of a convolution is 17; it must be at most 16"),
        (
            {"conv_L_cache": 1},
            "the rows of a convolution is 1; it must be a whole number, at least 2",
        ),
        ({"block_multiple_of": 0}, "block_multiple_of = 0"),
        ({"block_ff_dim": None}, "lacks intermediate_size"),
    ],
)
def test_an_lfm2_that_is_none_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        lfm2(**keys)
    assert message in str(refusal.value)


def qwen3_5(**keys: Any) -> ModelConfig:
    """Returns Qwen 3.5 0.8B as its text_config has it."""
    values = {
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_num_value_heads": 16,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e7,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    } | keys
    return family_for(values).config(values)


def test_a_qwen3_5_is_read_as_delta_nets_and_gated_attention() -> None:
    config = qwen3_5()
    assert [i for i, layer in enumerate(config.layers) if layer.attends] == [3, 7, 11, 15, 19, 23]
    assert config.delta_shape == DeltaShape(
        num_layers=18, key_heads=16, value_heads=16, key_dim=128, value_dim=128, taps=4
    )
    assert [config.mixer_place(layer) for layer in (0, 4, 22)] == [0, 3, 17]
    assert (config.norm_offset, config.uniform) == (1.0, False)
    assert len(config.ropes[0].inv_freq) == 32
    mixer = config.layers[3].attention
    assert (mixer.qkv_width, mixer.projected_width) == (12 * 256, 20 * 256)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    types = ["full_attention" if layer.attends else "linear_attention" for layer in config.layers]
    assert qwen3_5(layer_types=types, full_attention_interval=None) == config
    without = {"rope_parameters": None, "rope_theta": 1e7}
    assert qwen3_5(**without) == config
    assert qwen3_5(**without, partial_rotary_factor=0.5) != config
    outside = {"model_type": "qwen3_5", "tie_word_embeddings": False, "vision_config": {}}
    text = text_config(outside | {"text_config": {"hidden_size": 64, "tie_word_embeddings": True}})
    assert (text["model_type"], text["tie_word_embeddings"]) == ("qwen3_5_text", False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported"),
        ({"layer_types": ["linear_attention"]}, "1 layers are described"),
        ({"layer_types": ["conv"] * 24}, "layer type 'conv' is not supported"),
        ({"full_attention_interval": 0}, "full_attention_interval = 0"),
        ({"full_attention_interval": 25}, "no layer has keys and values"),
        ({"linear_num_value_heads": 24}, "24 value heads cannot share 16 key heads"),
        ({"linear_key_head_dim": 72}, "multiples of 16 up to 256"),
        ({"linear_value_head_dim": 272}, "multiples of 16 up to 256"),
        ({"linear_num_key_heads": 0}, "key_heads of a delta net is 0"),
        ({"linear_conv_kernel_dim": 17}, "over 17 rows: 2 to 16 are possible"),
    ],
)
def test_a_qwen3_5_that_is_none_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        qwen3_5(**keys)
    assert message in str(refusal.value)


def test_a_delta_net_equals_its_peer_step_by_step_and_cut_back(shelf: Shelf) -> None:
    """Compares with both ways of the peer, which computes prompts in chunks and steps otherwise."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = shelf.family("qwen3-5")
    _, config, _ = read_checkpoint(folder)
    weight, ids = tiny.checkpoint_weights(folder), np.random.default_rng(5).integers(0, 384, 90)
    attend = PlainAttention()
    actual = np.concatenate(
        [
            forward(config, weight, ids[start:][:13], np.arange(start, min(start + 13, 90)), attend)
            for start in range(0, 90, 13)
        ]
    )
    np.testing.assert_allclose(actual, tiny.transformers_logits(folder, ids), atol=3e-4)
    model = tiny.transformers_model(folder)
    cache, steps = transformers.DynamicCache(config=model.config), list[np.ndarray]()
    with torch.no_grad():
        for token in ids[:40]:
            steps.append(model(torch.tensor([[token]]), cache=cache).logits[0, 0].numpy())
    np.testing.assert_allclose(actual[:40], steps, atol=3e-4)
    attend.trim(30)
    again = forward(config, weight, ids[30:50], np.arange(30, 50), attend)
    np.testing.assert_allclose(again, actual[30:50], atol=3e-4)


def test_switched_off_unknown_keys_are_accepted() -> None:
    keys = llama_json(new_trick=False, another=None, _private=3)
    assert family_for(keys).config(keys) == family_for(keys).config(llama_json())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1]", "holds a list"),
    ],
)
def test_broken_config_files(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
        read_checkpoint(tmp_path)


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    data = read_checkpoint(tiny.make_llama_checkpoint(tmp_path))[1].to_json()
    for change in ({"vocab_size": "many"}, {"unknown": 1}, {"layers": [{}]}, {"ropes": []}):
        with pytest.raises(ModelError):
            ModelConfig.from_json({**data, **change})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numpy_checkpoint_loads_in_transformers(dtype: str, tmp_path: Path) -> None:
    folder = tiny.make_llama_checkpoint(tmp_path, dtype=dtype, shards=2, attention_bias=True)
    ids = random_ids(40)
    expected = tiny.transformers_logits(folder, ids)
    np.testing.assert_allclose(reference_logits(folder, ids), expected, rtol=0, atol=TOLERANCE)


def test_experts_beside_an_mlp_are_refused_where_they_cannot_be() -> None:
    model_type, keys = tiny.CASES["gemma4-experts"]
    values = {"model_type": model_type, **tiny.COMMON, **keys}
    family = family_for(values)
    config = family.config(values)
    feed = config.layers[0].feed
    assert isinstance(feed, Experts)
    assert feed.beside is not None
    assert (feed.count, feed.chosen, feed.width, feed.normalised) == (8, 3, 48, True)
    assert config.widest_feed == feed.beside.width == tiny.COMMON["intermediate_size"]
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        with pytest.raises(CheckpointError, match=name):
            family.config({**values, name: None})
    with pytest.raises(ModelError, match="norms before and after"):
        tiny.altered(config, norms="before")
