"""Parity: every family, exported and run through the engine, against transformers.

The peer is the transformers model with the bundle's own restored weights, so what the weights lose
is in neither. Three graphs are compared with it: one whose matrix products keep float activations
(what is left is the float16 cache), the graph as it ships, and the 4-bit one.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

import tiny
from kvq.cache import Cache, budget_for_tokens
from kvq.config import KvPlan
from kvq_apps.evaluation import kl_divergence
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_models.reference import forward, plain_attention
from kvq_models.registry import read_checkpoint
from kvq_runtime.backends import ForwardInput, missing
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine

# Beyond the 64 tokens (128 for linear) that the scaled ropes were "trained" on, every window, and
# two pages; with the steps within the shortest context, 256.
PROMPT_TOKENS, STEPS = 180, 64
# Greedy tokens can only be equal where no two lead within the tolerance: of this many prompts
# the peer's most decided one is taken.
PROMPTS = 8
CHUNKS = {"1": 1, "7": 7, "64": 64, "all": 256}
FLOAT_KV = {"k_bits": 16, "v_bits": 16}
GREEDY = Sampling(temperature=0)

# Largest difference of a logit; logits have a standard deviation near 3.
TOLERANCE = 5e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """A prompt int64 [T] and what the peer makes of it greedily.

    `tokens` int64 [T + steps] is the prompt and its continuation, `logits` float32 of each of
    them; `margin` is the smallest lead of a greedy token over the next best.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    logits: np.ndarray
    margin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One row of `tiny.CASES`, exported at 8 bits, with its peer."""

    name: str
    checkpoint: Path
    bundle: Bundle
    exact: Engine
    peer: transformers.PreTrainedModel
    expected: Continuation


def export(checkpoint: Path, bits: int) -> Bundle:
    weights = WeightFormat(bits=bits, embedding_bits=8)
    options = ExportOptions(weights=weights, quality=False)
    return export_model(checkpoint, checkpoint.parent / f"bundle-{bits}", options)


def with_float_activations(bundle: Bundle) -> Bundle:
    """A copy whose matrix products do not round activations to 8 bits."""
    folder = bundle.path.with_name(bundle.path.name + "-exact")
    shutil.copytree(bundle.path, folder)
    copy = dataclasses.replace(bundle, path=folder)
    model = ir.load(copy.model_path)
    changed = 0
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
            changed += 1
    assert changed >= 4 * bundle.config.num_layers + 1
    ir.save(model, copy.model_path)
    return copy


def transformers_model(checkpoint: Path) -> transformers.PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def transformers_peer(checkpoint: Path, bundle: Bundle) -> transformers.PreTrainedModel:
    """The checkpoint's model with every weight replaced by what the bundle restores."""
    family, config, _ = read_checkpoint(checkpoint)
    model = transformers_model(checkpoint)
    state = model.state_dict()
    for name, source in family.weights(config).items():
        restored = bundle.read_weight(name) - np.float32(source.offset)
        rows = [len(state[part]) for part in source.parts]
        assert sum(rows) == len(restored)
        parts = np.split(restored, np.cumsum(rows)[:-1])
        for part, values in zip(source.parts, parts, strict=True):
            state[part].copy_(torch.from_numpy(values))
    return model


@torch.no_grad()
def greedy_continuation(peer: transformers.PreTrainedModel) -> Continuation:
    """The peer's greedy continuation of the most decided of some random prompts."""
    draw = np.random.default_rng(1)
    prompts = draw.integers(0, tiny.VOCAB_SIZE, (PROMPTS, PROMPT_TOKENS))
    tokens, logits = [torch.from_numpy(prompts)], []
    past = None
    for _ in range(STEPS + 1):
        out = peer(tokens[-1], past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits)
        tokens.append(out.logits[:, -1:].argmax(-1))
    both = torch.cat(logits, 1)
    best = both[:, PROMPT_TOKENS - 1 :].topk(2).values
    margins = (best[..., 0] - best[..., 1]).amin(1)
    row = int(margins.argmax())
    print("margins", margins)
    return Continuation(
        prompt=prompts[row],
        tokens=torch.cat(tokens[:-1], 1)[row].numpy(),
        logits=both[row].numpy(),
        margin=float(margins[row]),
    )


@torch.no_grad()
def peer_logits(peer: transformers.PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    return peer(torch.from_numpy(ids)[None]).logits[0].numpy()


def session_logits(engine: Engine, ids: np.ndarray, **options: int) -> np.ndarray:
    with engine.session(**options) as session:
        return np.concatenate(list(session.logits(ids.tolist())))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)


def divergence(wanted: np.ndarray, found: np.ndarray) -> float:
    """Mean KL divergence in nats of logits `found` from `wanted`."""
    return float(kl_divergence(log_softmax(wanted), log_softmax(found)).mean())


@pytest.fixture(scope="module", params=list(tiny.CASES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    if missing("onnx"):
        pytest.skip(f"onnx: {missing('onnx')}")
    checkpoint = tiny.make_checkpoint(
        request.param, tmp_path_factory.mktemp(request.param) / "source"
    )
    bundle = export(checkpoint, 8)
    peer = transformers_peer(checkpoint, bundle)
    with Engine(with_float_activations(bundle), threads=2) as exact:
        yield Family(
            name=request.param,
            checkpoint=checkpoint,
            bundle=bundle,
            exact=exact,
            peer=peer,
            expected=greedy_continuation(peer),
        )
