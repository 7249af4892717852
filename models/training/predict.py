"""Short distillation of what predicts a prompt's keys and values, from its ridge start.

    python models/training/predict.py CHECKPOINT --layers 3 --train FILE.. --held FILE.. [--steps N]
    python models/training/predict.py CHECKPOINT --auxiliary SMALLER --train FILE.. --held FILE..

KV Prediction (arXiv 2410.08391): maps make the keys and values of the layers from `--layers` on
from the stream that enters it, or those of all layers from an auxiliary model's (rule KVP-C). They
start as ridge regression finds them; then maps, and the auxiliary model with them, are trained for
KL(computed, predicted) of the tokens after a random split plus L1 of keys and values over their
number of layers. The model itself is frozen. Reports nats of what follows held-out prompts,
between those after the computed prompt (0) and after none (1), before and after. `--bundle` is one
that `kvq export CHECKPOINT --kv-predict M` made, M being `--layers`: its maps give way to these.

On a CPU: the defaults, about 6 s a step for the 8.6 M parameters of `default` on one thread. On a
GPU: --device cuda --steps 1000 --rows 64 --length 2048.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from kvq_export import prediction
from kvq_export.writer import write_manifest
from kvq_runtime.auxiliary import consistent
from kvq_runtime.bundle import Bundle
from kvq_runtime.manifest import MAPS_FILE

SINK_TOKENS, TAIL_TOKENS, FOLLOWING_TOKENS = 4, 32, 64
RIDGE = 1e-3

# Of a layer: what enters it [B, T, hidden] and its own keys and values [B, T, 2 Hk D], unrotated,
# to those that it uses.
Change = Callable[[int, Tensor, Tensor], Tensor]
# Of a layer which tokens each sees, bool [T, T]; None: itself and all before it.
Sees = Callable[[int], Tensor | None]


def computed(layer: int, stream: Tensor, own: Tensor) -> Tensor:
    """The layer's own."""
    return own


def all_before(layer: int) -> Tensor | None:
    """Every token sees itself and all before it."""
    return None


class Llama(nn.Module):
    """A checkpoint folder of the llama family, whose keys and values can be replaced."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__()
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers, self.heads = told["num_hidden_layers"], told["num_attention_heads"]
        self.kv_heads, self.dim = told["num_key_value_heads"], told["head_dim"]
        self.eps = told["rms_norm_eps"]
        theta = (told.get("rope_parameters") or told)["rope_theta"]
        self.inv_freq = 1 / theta ** (torch.arange(0, self.dim, 2, device=device) / self.dim)
        stored = load_file(folder / "model.safetensors", device=device)
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): tensor.float() for name, tensor in stored.items()}
        )

    def weight(self, layer: int, name: str) -> Tensor:
        """A matrix or norm of a layer."""
        return self.weights[f"model/layers/{layer}/{name}/weight"]

    def normed(self, x: Tensor) -> Tensor:
        """What `x` is over its root mean square."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, ids: Tensor, change: Change = computed, sees: Sees = all_before) -> Tensor:
        """The stream after the last norm [B, T, hidden] of `ids` int64 [B, T]."""
        x = self.weights["model/embed_tokens/weight"][ids]
        for layer in range(self.layers):
            normed = self.normed(x) * self.weight(layer, "input_layernorm")
            q, k, v = (normed @ self.weight(layer, f"self_attn/{n}_proj").T for n in "qkv")
            kv = change(layer, x, torch.cat([k, v], -1))
            x = x + self._attention(layer, q, kv, sees(layer))
            normed = self.normed(x) * self.weight(layer, "post_attention_layernorm")
            gate, up = (normed @ self.weight(layer, f"mlp/{n}_proj").T for n in ("gate", "up"))
            x = x + (functional.silu(gate) * up) @ self.weight(layer, "mlp/down_proj").T
        return self.normed(x) * self.weights["model/norm/weight"]

    def log_probabilities(self, stream: Tensor) -> Tensor:
        """Of the next token, by the tied head."""
        return (stream @ self.weights["model/embed_tokens/weight"].T).log_softmax(-1)

    def looked(self, layer: int, stream: Tensor, own: Tensor) -> Tensor:
        """Attention weights [B, H, T, T] of a layer that is given `stream`."""
        normed = self.normed(stream) * self.weight(layer, "input_layernorm")
        q, k, _ = self._heads(normed @ self.weight(layer, "self_attn/q_proj").T, own)
        k = k.repeat_interleave(self.heads // self.kv_heads, 1)
        logits = q @ k.transpose(2, 3) / math.sqrt(self.dim)
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        return logits.masked_fill(~causal, -math.inf).softmax(-1)

    def _heads(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [B, heads, T, D]."""
        rows = q.shape[:2]
        k, v = kv.view(*rows, 2, self.kv_heads, self.dim).unbind(2)
        q = self._rotated(q.view(*rows, self.heads, self.dim))
        return q.transpose(1, 2), self._rotated(k).transpose(1, 2), v.transpose(1, 2)

    def _attention(self, layer: int, q: Tensor, kv: Tensor, sees: Tensor | None) -> Tensor:
        rows = q.shape[:2]
        mixed = functional.scaled_dot_product_attention(
            *self._heads(q, kv), attn_mask=sees, is_causal=sees is None, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(*rows, -1) @ self.weight(layer, "self_attn/o_proj").T

    def _rotated(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * self.inv_freq
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Predictor(nn.Module):
    """Affine maps from the stream that enters layer `first`, or from an auxiliary model's cache."""

    def __init__(self, base: Llama, first: int, auxiliary: Llama | None = None) -> None:
        super().__init__()
        self.first, self.auxiliary = first, auxiliary
        width = 2 * base.kv_heads * base.dim
        features = base.weight(0, "input_layernorm").shape[0]
        if auxiliary is not None:
            features = 2 * auxiliary.kv_heads * auxiliary.dim
            self.served_by = consistent(base.layers, auxiliary.layers)
        layers = range(first, base.layers)
        device = base.inv_freq.device
        self.maps = nn.ParameterDict(
            {str(layer): torch.zeros(features + 1, width, device=device) for layer in layers}
        )

    def features(self, base: Llama, ids: Tensor) -> dict[int, Tensor]:
        """What each map is given, [B, T, n + 1]."""
        found: dict[int, Tensor] = {}

        def watch(layer: int, stream: Tensor, own: Tensor) -> Tensor:
            if self.auxiliary is not None:
                found[layer] = with_ones(own)
            elif layer == self.first:
                found[layer] = with_ones(base.normed(stream))
            return own

        if self.auxiliary is not None:
            self.auxiliary(ids, watch)
            return {layer: found[self.served_by[layer]] for layer in range(base.layers)}
        with torch.no_grad():
            base(ids, watch)
        return dict.fromkeys(range(self.first, base.layers), found[self.first])

    def predicted(self, base: Llama, ids: Tensor) -> dict[int, Tensor]:
        """Keys and values [B, T, 2 Hk D] of the layers that are predicted."""
        given = self.features(base, ids)
        return {layer: x @ self.maps[str(layer)] for layer, x in given.items()}


def with_ones(x: Tensor) -> Tensor:
    """Features that an affine map is given: the last one is 1."""
    return functional.pad(x, (0, 1), value=1.0)


def with_predicted(made: dict[int, Tensor], stop: int) -> Change:
    """Layers of `made` use those for the tokens from the sinks to `stop`."""

    def change(layer: int, stream: Tensor, own: Tensor) -> Tensor:
        if layer not in made:
            return own
        parts = own[:, :SINK_TOKENS], made[layer][:, SINK_TOKENS:stop], own[:, stop:]
        return torch.cat(parts, dim=1)

    return change


@torch.no_grad()
def ridge(predictor: Predictor, base: Llama, batches: Sequence[Tensor]) -> None:
    """Sets the maps to the least squares of `batches` int64 [B, T], all tokens alike."""
    gram: dict[str, Tensor] = {}
    cross: dict[str, Tensor] = {}
    for ids in batches:
        own: dict[int, Tensor] = {}
        base(ids, lambda layer, stream, kv, own=own: own.setdefault(layer, kv))
        for layer, x in predictor.features(base, ids).items():
            wide = x[:, SINK_TOKENS:].flatten(0, 1).double()
            target = own[layer][:, SINK_TOKENS:].flatten(0, 1).double()
            gram[str(layer)] = gram.get(str(layer), 0) + wide.T @ wide
            cross[str(layer)] = cross.get(str(layer), 0) + wide.T @ target
    for layer, found in gram.items():
        penalty = RIDGE * found.diagonal().mean() * torch.eye(len(found), device=found.device)
        predictor.maps[layer].copy_(torch.linalg.solve(found + penalty, cross[layer]))


def loss(predictor: Predictor, base: Llama, ids: Tensor, split: int) -> Tensor:
    """KL of the tokens after `split`, in nats, and L1 of keys and values over their layers."""
    own: dict[int, Tensor] = {}
    with torch.no_grad():
        exact = base(ids, lambda layer, stream, kv: own.setdefault(layer, kv))
        truth = base.log_probabilities(exact[:, split:])
    made = predictor.predicted(base, ids)
    found = base.log_probabilities(base(ids, with_predicted(made, split))[:, split:])
    apart = [(x - own[layer])[:, SINK_TOKENS:split].abs().mean() for layer, x in made.items()]
    divergence = (truth.exp() * (truth - found)).sum(-1).mean()
    return divergence + torch.stack(apart).sum() / base.layers


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long and how fast; AdamW, its rate falling along a cosine."""

    steps: int
    rows: int
    length: int
    rate: float
    seed: int = 0


def distil(
    predictor: Predictor, base: Llama, texts: Sequence[Sequence[int]], recipe: Recipe
) -> Iterator[float]:
    """Trains maps and auxiliary model; the loss of each step. The base gets no gradient."""
    base.requires_grad_(requires_grad=False)
    numbers = np.random.default_rng(recipe.seed)
    optimiser = torch.optim.AdamW(predictor.parameters(), lr=recipe.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, recipe.steps)
    for _ in range(recipe.steps):
        picked = numbers.integers(len(texts), size=recipe.rows)
        ids = torch.tensor([list(texts[one]) for one in picked], device=base.inv_freq.device)
        split = int(numbers.integers(recipe.length // 4, recipe.length * 7 // 8))
        optimiser.zero_grad()
        value = loss(predictor, base, ids, split)
        value.backward()
        nn.utils.clip_grad_norm_(predictor.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        yield float(value.detach())


@torch.no_grad()
def following_nats(
    model: Llama, ids: Tensor, change: Change = computed, sees: Sees = all_before
) -> float:
    """Mean nats of the last `FOLLOWING_TOKENS` of `ids` int64 [1, T]."""
    rows = model.log_probabilities(model(ids, change, sees)[:, -FOLLOWING_TOKENS - 1 : -1])
    return -float(rows.gather(-1, ids[:, -FOLLOWING_TOKENS:, None]).mean())


@torch.no_grad()
def shares(predictor: Predictor, base: Llama, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean nats of the last `FOLLOWING_TOKENS` of each text after the rest of it.

    `exact`: it was computed; `none`: it was left out; `predicted`, but for its ends; and `share`,
    how far that is on the way. `auxiliary`: that model alone.
    """
    nats: dict[str, list[float]] = {}
    for text in texts:
        ids = torch.tensor([list(text)], device=base.inv_freq.device)
        stop = len(text) - FOLLOWING_TOKENS
        made = predictor.predicted(base, ids)
        alone = torch.cat([ids[:, :1], ids[:, stop:]], dim=1)
        ways = {
            "exact": (base, ids, computed),
            "none": (base, alone, computed),
            "predicted": (base, ids, with_predicted(made, stop - TAIL_TOKENS)),
        }
        if predictor.auxiliary is not None:
            ways["auxiliary"] = (predictor.auxiliary, ids, computed)
        for name, (model, given, change) in ways.items():
            nats.setdefault(name, []).append(following_nats(model, given, change))
    found = {name: float(np.mean(values)) for name, values in nats.items()}
    way = found["none"] - found["exact"]
    return found | {"share": (found["predicted"] - found["exact"]) / way if way > 0 else math.nan}


def store(folder: Path, predictor: Predictor, base: Llama) -> None:
    """Writes the maps from the stream into the bundle that has others of as many layers."""
    bundle = Bundle.open(folder)
    if bundle.fitted_layers != predictor.first or predictor.auxiliary is not None:
        sys.exit(f"{folder} has no maps after layer {predictor.first}; export it with --kv-predict")
    maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for name, trained in predictor.maps.items():
        norm = base.weight(int(name), "input_layernorm")[:, None]  # a bundle's norm has it inside
        weights = (trained[:-1] / norm).T.detach().cpu().numpy()
        maps[int(name)] = np.ascontiguousarray(weights), trained[-1].detach().cpu().numpy()
    info = prediction.store(folder, bundle, maps)
    files = {**bundle.manifest.files, MAPS_FILE: info}
    told = {"layers": predictor.first, "distilled": True}
    write_manifest(folder, replace(bundle.manifest, files=files, prediction=told))


def windows(tokenizer: Tokenizer, files: Sequence[Path], length: int, most: int) -> list[list[int]]:
    """Token windows of `length`, up to `most`, taken in turn from the files."""
    own = []
    for file in files:
        ids = tokenizer.encode(file.read_text(encoding="utf-8", errors="replace")).ids
        starts = range(0, len(ids) - length + 1, length)
        own.append([ids[start : start + length] for start in starts])
    turns = range(max(map(len, own), default=0))
    return [texts[turn] for turn in turns for texts in own if turn < len(texts)][:most]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--auxiliary", type=Path)
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--held", type=Path, nargs="+", required=True)
    parser.add_argument("--held-texts", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--fit-tokens", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bundle", type=Path)
    asked = parser.parse_args()
    base = Llama(asked.checkpoint, asked.device)
    auxiliary = None if asked.auxiliary is None else Llama(asked.auxiliary, asked.device)
    if (auxiliary is None) != (0 < asked.layers < base.layers):
        sys.exit(f"give --auxiliary, or --layers of 1 to {base.layers - 1}")
    predictor = Predictor(base, 0 if auxiliary else asked.layers, auxiliary)
    tokenizer = Tokenizer.from_file(str(asked.checkpoint / "tokenizer.json"))
    train = windows(tokenizer, asked.train, asked.length, 1 << 30)
    held = windows(tokenizer, asked.held, asked.context + FOLLOWING_TOKENS, asked.held_texts)
    if not train or not held:
        sys.exit("the files hold too little text")
    batches = [
        torch.tensor([text], device=asked.device)
        for text in train[: asked.fit_tokens // asked.length]
    ]
    ridge(predictor, base, batches)
    print("ridge", json.dumps(shares(predictor, base, held)), flush=True)
    recipe = Recipe(steps=asked.steps, rows=asked.rows, length=asked.length, rate=asked.rate)
    for step, value in enumerate(distil(predictor, base, train, recipe), start=1):
        if step % 25 == 0 or step == recipe.steps:
            print(step, f"{value:.4f}", json.dumps(shares(predictor, base, held)), flush=True)
    if asked.bundle is not None:
        store(asked.bundle, predictor, base)


if __name__ == "__main__":
    main()
