"""Trains one model on packed tokens; resumes exactly; writes a Hugging Face folder.

    python models/training/train.py coder.json PACKED TOKENIZER --out RUN [--start MODEL]
    python models/training/train.py nano.json PACKED TOKENIZER --out RUN --teacher CODER

RUN gets checkpoint.pt (weights, optimiser states, step: the order of the data depends on the seed
and the step alone), log.jsonl, and at the end the folder `model`. Muon (arXiv 2502.16982) trains
the matrices inside the layers, AdamW the embedding and the norms. The rate is constant after a
warm-up and falls linearly at the end. The last steps read longer texts.

On a processor glibc takes a quarter of the time for giving memory back, unless
GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592 is set.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel
from vocabulary import END, MIDDLE, PREFIX, SUFFIX, TURN_END

# Logits of this many rows exist at once.
LOSS_ROWS = {"cpu": 512, "cuda": 16384}
SAVE_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train; the defaults are what every model of the family shares."""

    steps: int
    long_steps: int
    tokens_per_step: int
    length: int = 1024
    long_length: int = 4096
    micro_tokens: int = 8192
    warmup_steps: int = 60
    fall: float = 0.4
    matrix_rate: float = 0.02
    vector_rate: float = 0.003
    weight_decay: float = 0.02
    # Of a token that fills a hole: there are few, and they alone say how holes are filled.
    middle_weight: float = 3.0
    # Share of the loss that is the divergence from a teacher's distribution, where there is one
    # (arXiv 1503.02531, at temperature 1); the rest is the text's own token.
    distilled: float = 0.8
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate at `step`, relative to its peak."""
        left = (self.steps - step) / (self.fall * self.steps)
        return min(1.0, (step + 1) / self.warmup_steps, max(left, 0.02))

    def length_at(self, step: int) -> int:
        """Tokens of one text at `step`."""
        return self.length if step < self.steps - self.long_steps else self.long_length


class Data:
    """Batches by step: the same for every run with the same seed, whenever it was interrupted."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._recipe = recipe
        self._files = {
            length: np.memmap(folder / name, np.uint16, "r")
            for length, name in ((recipe.long_length, "long.bin"), (recipe.length, "train.bin"))
        }

    def batch(self, step: int) -> Tensor:
        """int64 [rows, length + 1] of step `step`."""
        recipe, length = self._recipe, self._recipe.length_at(step)
        tokens = self._files[length]
        rows, runs = recipe.tokens_per_step // length, (len(tokens) - 1) // length
        first = step * rows
        if length != recipe.length:
            first -= (recipe.steps - recipe.long_steps) * rows
        epoch = first // runs
        order = np.random.default_rng((recipe.seed, length, epoch)).permutation(runs)
        starts = [order[(first + row) % runs] * length for row in range(rows)]
        cut = [tokens[start : start + length + 1] for start in starts]
        return torch.from_numpy(np.stack(cut).astype(np.int64))


class Trainer:
    """Model, optimisers and the step between them."""

    def __init__(
        self, settings: dict[str, Any], recipe: Recipe, device: str, teacher: Path | None = None
    ) -> None:
        """`settings` are those of a `LlamaConfig`; `teacher`: a checkpoint folder."""
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.step = recipe, device, 0
        self.model = LlamaModel(LlamaConfig(**settings, use_cache=False)).to(device)
        # Outputs of a block start at zero, so that the first steps learn the embedding.
        for name, parameter in self.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2 and "embed" not in name:
                nn.init.normal_(parameter, std=0.7 / math.sqrt(settings["hidden_size"]))
        self._embedding = self.model.embed_tokens.weight
        layers = self.model.layers
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        vectors = [self._embedding, *(p for p in self.model.parameters() if p.ndim == 1)]
        self.optimisers = [
            torch.optim.Muon(
                matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, momentum=0.95
            ),
            torch.optim.AdamW(vectors, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        for number, layer in enumerate(layers):
            layers[number] = torch.compile(layer)
        self._loss, self._taught_loss = torch.compile(_loss_sum), torch.compile(_taught_loss_sum)
        self._teacher: LlamaModel | None = None
        if teacher is not None:
            read = LlamaModel.from_pretrained(teacher, dtype=torch.bfloat16).to(device)
            self._teacher = read.eval().requires_grad_(requires_grad=False)

    def train_step(self, batch: Tensor, weights: Tensor) -> float:
        """One update on int64 [rows, length + 1] and its targets' weights; nats per token."""
        rate = self.recipe.rate(self.step)
        peaks = (self.recipe.matrix_rate, self.recipe.vector_rate)
        for optimiser, peak in zip(self.optimisers, peaks, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
        total = float(weights.sum())
        rows = max(1, self.recipe.micro_tokens // (batch.shape[1] - 1))
        parts = zip(batch.split(rows), weights.split(rows), strict=True)
        nats = sum(self._backward(*part, total) for part in parts)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return nats

    def _backward(self, batch: Tensor, weights: Tensor, total: float) -> float:
        """Adds the gradient of the mean over `total` weight; returns this part's share."""
        batch, weights = batch.to(self.device), weights.to(self.device).reshape(-1)
        targets = batch[:, 1:].reshape(-1)
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.model(batch[:, :-1]).last_hidden_state.flatten(0, 1)
        # The head is differentiated by rows, so that the logits of all never exist together.
        rows = hidden.detach().to(torch.bfloat16).requires_grad_()
        head = self._embedding.detach().to(torch.bfloat16).requires_grad_()
        if self._teacher is not None:
            with torch.no_grad():
                taught = self._teacher(batch[:, :-1], use_cache=False).last_hidden_state
                taught = taught.flatten(0, 1)
        nats = 0.0
        for start in range(0, len(targets), LOSS_ROWS[self.device]):
            part = slice(start, start + LOSS_ROWS[self.device])
            ours = (rows[part], head, targets[part], weights[part])
            if self._teacher is None:
                loss = self._loss(*ours) / total
            else:
                known = (taught[part], self._teacher.embed_tokens.weight)
                loss = self._taught_loss(*ours, *known, self.recipe.distilled) / total
            loss.backward()
            nats += float(loss.detach())
        hidden.backward(rows.grad.to(hidden.dtype))
        self._embedding.grad += head.grad.float()
        return nats

    def weights(self) -> dict[str, Tensor]:
        """By the names that they have without compilation."""
        state = self.model.state_dict()
        return {name.replace("_orig_mod.", ""): value for name, value in state.items()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Takes weights by these names."""
        compiled = {name.replace("_orig_mod.", ""): name for name in self.model.state_dict()}
        self.model.load_state_dict({compiled[name]: value for name, value in weights.items()})

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        optimisers = [optimiser.state_dict() for optimiser in self.optimisers]
        return {"step": self.step, "model": self.weights(), "optimisers": optimisers}

    def load(self, state: dict[str, Any]) -> None:
        """Becomes what `state` was taken from."""
        self.set_weights(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step = state["step"]


def _loss_sum(rows: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    nats = functional.cross_entropy((rows @ head.T).float(), targets, reduction="none")
    return torch.dot(nats, weights)


def _taught_loss_sum(
    rows: Tensor, head: Tensor, targets: Tensor, weights: Tensor,
    taught: Tensor, taught_head: Tensor, distilled: float,
) -> Tensor:  # fmt: skip
    """`_loss_sum`, of which the divergence from what `taught` rows foretell takes a share."""
    ours = (rows @ head.T).float().log_softmax(-1)
    theirs = (taught @ taught_head.T).float().log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    nats = functional.nll_loss(ours, targets, reduction="none")
    return torch.dot(distilled * divergence + (1 - distilled) * nats, weights)


def target_weights(batch: Tensor, tokenizer: Tokenizer, middle_weight: float) -> Tensor:
    """float32 [rows, length] of the targets: more for what follows a prefix and a suffix."""
    prefix, suffix, middle, end = map(tokenizer.token_to_id, (PREFIX, SUFFIX, MIDDLE, END))
    weights = np.ones((batch.shape[0], batch.shape[1] - 1), np.float32)
    for row, ids in zip(weights, batch.numpy(), strict=True):
        for start in np.flatnonzero(ids == middle).tolist():
            opened = np.flatnonzero(ids[:start] == prefix)
            # After suffix and middle comes the prefix: nobody knows where the hole begins.
            if len(opened) and ids[opened[-1] + 1] != suffix:
                ends = np.flatnonzero(ids[start:] == end)
                row[start : start + ends[0] if len(ends) else len(ids)] = middle_weight
    return torch.from_numpy(weights)


def write_model(trainer: Trainer, tokenizer: Path, out: Path, about: dict[str, Any]) -> None:
    """The Hugging Face checkpoint folder: bf16 weights, configuration, tokenizer."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {
        f"model.{name}": value.to(torch.bfloat16).cpu().contiguous()
        for name, value in trainer.weights().items()
    }
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    config = LlamaConfig(**about["model"], dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(partial)
    ends = [about["model"]["eos_token_id"], about["turn_end"]]
    generation = {"eos_token_id": ends, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
    (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (partial / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def train(trainer: Trainer, tokenizer: Tokenizer, packed: Path, out: Path) -> None:
    """Steps to the recipe's end; saves on the way."""
    recipe, data = trainer.recipe, Data(packed, trainer.recipe)
    saved = time.monotonic()
    while trainer.step < recipe.steps:
        since = time.monotonic()
        batch = data.batch(trainer.step)
        weights = target_weights(batch, tokenizer, recipe.middle_weight)
        nats = trainer.train_step(batch, weights)
        speed = round(recipe.tokens_per_step / (time.monotonic() - since))
        row = {"step": trainer.step, "nats": round(nats, 4), "tokens_per_second": speed}
        with (out / "log.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(f"\r{trainer.step} of {recipe.steps}  {nats:.3f} nats", end="", file=sys.stderr)
        if time.monotonic() - saved > SAVE_SECONDS or trainer.step == recipe.steps:
            torch.save(trainer.state(), out / "checkpoint.partial")
            os.replace(out / "checkpoint.partial", out / "checkpoint.pt")
            saved = time.monotonic()


def main() -> None:
    """Trains, or goes on training, until the recipe's last step."""
    parser = argparse.ArgumentParser(description="Trains one model of the family.")
    parser.add_argument("config", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a checkpoint folder to begin with")
    parser.add_argument("--teacher", type=Path, help="a checkpoint folder to learn from")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # A layer is compiled for the short and the long length.
    torch._dynamo.config.cache_size_limit = 64

    about = json.loads(arguments.config.read_text())
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    about["model"] |= {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
    }  # fmt: skip
    recipe = Recipe(**about["train"])
    trainer = Trainer(about["model"], recipe, arguments.device, arguments.teacher)
    checkpoint = arguments.out / "checkpoint.pt"
    arguments.out.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        trainer.load(torch.load(checkpoint, map_location=arguments.device, weights_only=True))
    elif arguments.start is not None:
        start = load_file(arguments.start / "model.safetensors", device=arguments.device)
        trainer.set_weights({name.removeprefix("model."): part for name, part in start.items()})
    train(trainer, tokenizer, arguments.packed, arguments.out)
    about |= {
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "turn_end": tokenizer.token_to_id(TURN_END),
        "tokens": recipe.steps * recipe.tokens_per_step,
        "device": arguments.device,
        "torch": torch.__version__,
    }
    if arguments.start is not None:
        about["earlier"] = json.loads((arguments.start / "training.json").read_text())
        about["tokens"] += about["earlier"]["tokens"]
    write_model(trainer, arguments.tokenizer, arguments.out / "model", about)


if __name__ == "__main__":
    main()
