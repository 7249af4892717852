"""Checkpoints that transformers saved, tied and not, in one file or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.errors import CheckpointError
from kvq_export.export import export_model
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.read.source import open_source
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import family_for, read_checkpoint, text_config
from kvq_runtime.engine import Engine
from shelf import PLAIN
from tiny import (
    CASES,
    COMMON,
    make_checkpoint,
    make_llama_checkpoint,
    read_safetensors,
    write_safetensors,
)

FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3", "phi3", "gemma3")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_is_complete(case: str, tied: bool, tmp_path: Path) -> None:
    assert case in CASES
    folder = make_checkpoint(case, tmp_path, shard_size="200KB", tie_word_embeddings=tied)
    assert len(list(folder.glob("*.safetensors"))) > 1
    family, config, _ = read_checkpoint(folder)
    assert config.tied_head == tied
    checkpoint, sources = Checkpoint.open(folder), family.weights(config)
    checkpoint.check(sources, family.spare(config))
    stored = {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in read_safetensors(file).items()
    }
    assert (HEAD in stored) == (not tied)
    np.testing.assert_array_equal(checkpoint.read(sources["embed"]), stored[EMBEDDING])


def keep_only_the_head(folder: Path, tied: bool) -> None:
    file = folder / "model.safetensors"
    tensors = read_safetensors(file)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    write_safetensors(file, tensors)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))


def test_a_tied_matrix_may_have_either_name(tmp_path: Path) -> None:
    ids, logits = [5, 6, 7, 8], []
    for name in ("both", "head"):
        source = make_llama_checkpoint(tmp_path / name, tie_word_embeddings=True)
        if name == "head":
            keep_only_the_head(source, tied=True)
        bundle = export_model(source, tmp_path / f"{name}-bundle", PLAIN)
        with Engine.open(bundle.path, threads=1) as engine, engine.session() as session:
            logits.append(np.concatenate([*session.logits(ids)]))
    np.testing.assert_array_equal(*logits)


def test_a_head_is_no_embedding_where_they_are_not_tied(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    keep_only_the_head(source, tied=False)
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens\.weight' is missing.*not"):
        export_model(source, tmp_path / "bundle", PLAIN)


def gemma3_that_sees(folder: Path) -> Any:
    """Makes a random checkpoint of a model that sees, and returns the model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    _, keys = CASES["gemma3"]
    # transformers caps no logits of a model that sees.
    values = COMMON | dict(keys) | {"final_logit_softcapping": None}
    text = transformers.AutoConfig.for_model("gemma3_text", **values)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(3)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


def opened(folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns config and canonical weights, as an export reads them."""
    source = open_source(folder)
    family, config, _ = source.config()
    checkpoint, sources = source.checkpoint(config), source.weight_sources(family, config)
    checkpoint.check(sources, family.spare(config))
    return config, {name: checkpoint.read(weight) for name, weight in sources.items()}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_language_model_of_one_that_sees_is_read_alone(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = gemma3_that_sees(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = read_safetensors(file)
    assert sum(name.startswith("language_model.model.") for name in tensors) > 40
    if prefix.startswith("model."):  # as memory has it
        tensors = {
            f"model.{name.replace('language_model.model.', 'language_model.')}": value
            for name, value in tensors.items()
        }
    assert sum(name.startswith(prefix) for name in tensors) > 40
    write_safetensors(file, tensors)
    config, weights = opened(tmp_path)
    assert config.model_type == "gemma3_text"
    assert "tensors for images or sounds are left out: kvq reads text" in caplog.text
    ids = np.arange(5, 45)
    actual = forward(config, weights.__getitem__, ids, np.arange(len(ids)), PlainAttention())
    import torch

    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-3)


def gemma4_that_sees_and_hears(folder: Path, row: str) -> Any:
    """Makes a random checkpoint of a model whose text is this row's, and returns the model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.Gemma4Config(
        text_config=COMMON | dict(CASES[row][1]) | {"tie_word_embeddings": True, "pad_token_id": 0},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                       "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                       "patch_size": 8},
        audio_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "output_proj_dims": 32, "subsampling_conv_channels": [8, 8]},
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(4)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scales = name.endswith(("router.scale", "per_expert_scale"))
            parameter.copy_(("norm" in name or scales) + 0.1 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("row", ["gemma4", "gemma4-experts"])
def test_a_gemma_4_that_sees_and_hears_is_read_as_text(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    model = gemma4_that_sees_and_hears(tmp_path, row)
    config, weights = opened(tmp_path)
    assert config.model_type == "gemma4_text"
    assert "tensors for images or sounds are left out: kvq reads text" in caplog.text
    ids = np.arange(5, 45)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    logits = forward(config, weights.__getitem__, ids, np.arange(len(ids)), PlainAttention())
    np.testing.assert_allclose(logits, expected, atol=2e-3)


def test_keys_that_no_layer_reads_any_more_are_left_out(tmp_path: Path) -> None:
    gemma4_that_sees_and_hears(tmp_path, "gemma4")
    file = tmp_path / "model.safetensors"
    expected, tensors = opened(tmp_path)[1], read_safetensors(file)
    stale = "model.language_model.layers.6.self_attn.k_proj.weight"
    write_safetensors(file, tensors | {stale: np.ones((64, 128), np.float32)})
    assert opened(tmp_path)[1].keys() == expected.keys()
    read = stale.replace("6", "2")
    write_safetensors(file, tensors | {read: np.ones((3, 3), np.float32)})
    with pytest.raises(CheckpointError, match="wrong shape"):
        opened(tmp_path)


def test_a_qwen3_5_that_sees_is_read_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaves out what sees, and the draft head."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.Qwen3_5Config(
        text_config=COMMON | dict(CASES["qwen3-5"][1]) | {"pad_token_id": 0},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2,
                       "out_hidden_size": 128, "patch_size": 8},
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(4)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    further = {"mtp.fc.weight": np.ones((128, 256), np.float32)}
    write_safetensors(file, read_safetensors(file) | further)
    language_config, weights = opened(tmp_path)
    assert language_config.model_type == "qwen3_5_text"
    assert "tensors for images or sounds are left out: kvq reads text" in caplog.text
    ids = np.arange(5, 45)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    logits = forward(
        language_config, weights.__getitem__, ids, np.arange(len(ids)), PlainAttention()
    )
    np.testing.assert_allclose(logits, expected, atol=2e-3)


def mistral3_that_sees(folder: Path, text: str, *, outside: bool, inside: bool) -> Any:
    """Makes a random checkpoint whose config says twice whether its head is tied."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    _, keys = CASES[text]
    values = COMMON | dict(keys) | {"model_type": keys.get("model_type", CASES[text][0])}
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "image_size": 32,
              "patch_size": 8}  # fmt: skip
    config = transformers.Mistral3Config(
        text_config=values | {"tie_word_embeddings": inside},
        vision_config=vision,
        tie_word_embeddings=outside,
    )
    torch.manual_seed(4)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("text", ["ministral3", "mistral-window"])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_mistral_says_outside_decides_whether_its_head_is_tied(
    text: str, outside: bool, inside: bool, tmp_path: Path
) -> None:
    model = mistral3_that_sees(tmp_path, text, outside=outside, inside=inside)
    config, weights = opened(tmp_path)
    assert config.model_type == CASES[text][0]
    assert config.tied_head == outside
    import torch

    ids = np.arange(5, 85)
    actual = forward(config, weights.__getitem__, ids, np.arange(len(ids)), PlainAttention())
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-3)


def test_a_head_of_its_own_is_not_left_out_where_it_is_said_to_be_tied(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    file = source / "model.safetensors"
    tensors = read_safetensors(file)
    embedding = tensors["model.embed_tokens.weight"]
    write_safetensors(file, tensors | {"lm_head.weight": embedding})
    assert opened(source)[0].tied_head
    other = embedding.copy()
    other[-1] += 1
    write_safetensors(file, tensors | {"lm_head.weight": other})
    with pytest.raises(CheckpointError, match=r"ties the output head.*has a head of its own"):
        opened(source)


def test_a_part_that_is_none_of_a_language_model_is_refused(tmp_path: Path) -> None:
    gemma3_that_sees(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = read_safetensors(file) | {"model.other_tower.weight": np.ones((2, 2), np.float32)}
    write_safetensors(file, tensors)
    with pytest.raises(CheckpointError, match=r"model\.other_tower\.weight.* is not part"):
        opened(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="a gemma3 model needs a text_config"):
        opened(tmp_path)


def test_what_released_files_leave_out_is_known() -> None:
    """Knows what those of Gemma 3 4B leave out."""
    text_keys = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    actual = text_config(
        {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text_keys}
    )
    assert actual == text_keys | {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "eos_token_id": [1, 106],
    }  # fmt: skip
    small = text_config({"model_type": "mistral3", "text_config": {"vocab_size": 131072}})
    config = family_for(small).config(small)
    assert (config.model_type, config.hidden_size) == ("mistral", 5120)
    assert config.first_attention.head_dim == 128
    assert not config.tied_head
