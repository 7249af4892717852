"""Checkpoints with a draft head, which transformers leaves out: its tensors are added to what it
saved. And heads made to be right, so that what a session drops or shifts shows as wrong guesses."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvq_models.config import ModelConfig
from kvq_models.products import draft_name
from kvq_models.reference import Weights
from kvq_models.registry import read_checkpoint
from tiny import (
    make_checkpoint,
    parts_of,
    read_safetensors,
    weight_statistics,
    write_safetensors,
)

HEAD = "mtp."
# The token after each of these is the next of them, for a model of `make_walker`.
WALK = tuple(range(20, 60))
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def head_shapes(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's tensors, by those of its model: one layer that attends."""
    (hidden,) = tensors["model.norm.weight"].shape
    layer = next(name for name in tensors if name.endswith("self_attn.q_proj.weight"))
    below = layer.removesuffix("self_attn.q_proj.weight")
    shapes_of_layer = {
        name.removeprefix(below): tensors[name].shape for name in tensors if below in name
    }
    shapes = {f"{HEAD}layers.0.{name}": shape for name, shape in shapes_of_layer.items()}
    shapes[f"{HEAD}fc.weight"] = (hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"{HEAD}{name}.weight"] = (hidden,)
    return shapes


def stacked(tensors: Mapping[str, np.ndarray], below: str = "") -> dict[str, np.ndarray]:
    """The tensors, matrices of experts whose names begin with `below` in two of all of a layer."""
    merged: dict[str, np.ndarray] = {}
    experts: dict[str, dict[tuple[str, int], np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = _OF_EXPERT.fullmatch(name) if name.startswith(below) else None
        if match is None:
            merged[name] = tensor
        else:
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
    for name, matrices in experts.items():
        count = len(matrices) // 3
        both = [
            np.concatenate([matrices["gate", expert], matrices["up", expert]])
            for expert in range(count)
        ]
        merged[f"{name}.gate_up_proj"] = np.stack(both)
        merged[f"{name}.down_proj"] = np.stack(
            [matrices["down", expert] for expert in range(count)]
        )
    return merged


def make_drafting(
    folder: Path, case: str = "qwen3-5", stacks: str | None = None, **overrides: Any
) -> Path:
    """A tiny Qwen 3.5, or another `case`, with a random draft head.

    `stacks`: how names of tensors begin that have all experts of a layer, None: none has.
    """
    make_checkpoint(case, folder, **overrides)
    tensors = read_safetensors(folder / "model.safetensors")
    draw = np.random.default_rng(7)
    for name, shape in head_shapes(tensors).items():
        mean, deviation = weight_statistics(name, shape, norm_offset=1.0)
        tensors[name] = (mean + deviation * draw.standard_normal(shape)).astype(np.float32)
    tensors = tensors if stacks is None else stacked(tensors, stacks)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def drafting_weights(folder: Path) -> tuple[ModelConfig, Weights, Weights]:
    """Config, weights and weights of the head of such a checkpoint, as they are."""
    family, config, _ = read_checkpoint(folder)
    tensors = parts_of(family, config, read_safetensors(folder / "model.safetensors"))
    config = family.with_draft_head(config, tensors)
    sources = family.weights(config) | family.draft_weights(config)

    def weight(name: str) -> np.ndarray:
        source = sources[name]
        rows = np.concatenate([tensors[part] for part in source.parts])
        return rows + np.float32(source.offset)

    return config, weight, lambda name: weight(draft_name(name))


def make_walker(folder: Path, reads: str, case: str = "qwen3-5") -> Path:
    """One that walks along `WALK`, and a head that always guesses right, by the half that it reads.

    `reads` token: it goes one step on from the token that it is given; state: two steps from the
    state before. A head that is given another token's state, or its own at the wrong place, errs.
    Nothing of a layer is added to the stream, so a state says which token it is of.
    """
    make_checkpoint(case, folder, tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    tensors = read_safetensors(folder / "model.safetensors")
    draw = np.random.default_rng(11)
    for name, shape in head_shapes(tensors).items():
        tensors[name] = np.zeros(shape, np.float32)
        if not name.endswith("norm.weight"):
            tensors[name] = draw.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
        if name.endswith("norm.weight"):  # stored as w - 1, but for those of delta nets
            tensors[name] = np.full_like(tensor, "linear_attn" in name)
    # Embeddings of one length, so that a norm changes nothing but a factor.
    hidden, walk = config["hidden_size"], list(WALK)
    embed = draw.standard_normal((config["vocab_size"], hidden)).astype(np.float32)
    embed *= hidden**0.5 / np.linalg.norm(embed, axis=1, keepdims=True)
    after = np.roll(walk, -1)
    head = 0.1 * draw.standard_normal(embed.shape).astype(np.float32)
    head[after] = embed[walk]
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = embed, head
    step = np.linalg.lstsq(embed[walk], embed[after], rcond=None)[0].T
    parts = {"token": [np.eye(hidden), np.zeros((hidden, hidden))]}
    parts["state"] = [np.zeros((hidden, hidden)), step]
    tensors[f"{HEAD}fc.weight"] = np.concatenate(parts[reads], axis=1).astype(np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
