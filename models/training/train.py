"""Trains one model of the family on packed tokens; resumes exactly; writes a Hugging Face folder.

    python models/training/train.py coder.json PACKED TOKENIZER --out RUN [--start MODEL]
    python models/training/train.py nano.json PACKED TOKENIZER --out RUN --teacher CODER

On a processor a quarter of the time goes by with giving memory back and asking for it again, unless
GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592 is set.
RUN gets checkpoint.pt (weights, optimiser states, step: everything a resumed run needs, since the
order of the data depends on the seed and the step alone), log.jsonl, and at the end the checkpoint
folder `model`. Matrices inside the layers are trained by Muon (arXiv 2502.16982), the embedding and
the norms by AdamW; the rate is constant after a warm-up and falls linearly at the end, so a run may
be made longer as long as its fall has not begun. The last steps read longer texts.
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
from transformers import AttentionInterface, LlamaConfig, LlamaModel
from vocabulary import END, MIDDLE, PREFIX, SUFFIX

# Logits of this many rows exist at once.
LOSS_ROWS = {"cpu": 512, "cuda": 16384}
# Queries of this many positions meet all keys before them at once on a processor: about the size
# at which their scores stay in its caches.
ATTENTION_ROWS = 128


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
        recipe = self._recipe
        length = recipe.length_at(step)
        tokens = self._files[length]
        rows = recipe.tokens_per_step // length
        runs = (len(tokens) - 1) // length
        first = (
            step if length == recipe.length else step - recipe.steps + recipe.long_steps
        ) * rows
        epoch = first // runs
        order = np.random.default_rng((recipe.seed, length, epoch)).permutation(runs)
        picked = [order[(first + row) % runs] for row in range(rows)]
        cut = [tokens[run * length : run * length + length + 1] for run in picked]
        return torch.from_numpy(np.stack(cut).astype(np.int64))


class CausalAttention(torch.autograd.Function):
    """Causal attention as bf16 products of blocks, for processors.

    A layer forwards and backwards over 8192 tokens in 55 ms where torch's own for processors takes
    106, and in 190 for 300 where texts are of 4096 (two cores, bf16). It keeps the probabilities.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [heads, group, length, channels] and key, value [heads, length, channels], bf16."""
        heads, group, length, channels = query.shape
        out = torch.empty_like(query)
        kept = []
        for first in range(0, length, ATTENTION_ROWS):
            stop = min(length, first + ATTENTION_ROWS)
            rows = query[:, :, first:stop].reshape(heads, -1, channels)
            scores = torch.bmm(rows, key[:, :stop].transpose(1, 2))
            shares = _probabilities(scores, scale, first, group)
            block = torch.bmm(shares, value[:, :stop])
            out[:, :, first:stop] = block.view(heads, group, stop - first, channels)
            kept.append(shares)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        """The gradients of query, key and value."""
        query, key, value, out, *kept = ctx.saved_tensors
        heads, group, length, channels = query.shape
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)
        of_query = torch.empty_like(query)
        of_key, of_value = torch.zeros(key.shape), torch.zeros(value.shape)
        for first, shares in zip(range(0, length, ATTENTION_ROWS), kept, strict=True):
            stop = min(length, first + ATTENTION_ROWS)
            part = slice(first, stop)
            rows = query[:, :, part].reshape(heads, -1, channels)
            grads = grad[:, :, part].reshape(heads, -1, channels)
            of_value[:, :stop] += torch.bmm(shares.transpose(1, 2), grads)
            of_shares = torch.bmm(grads, value[:, :stop].transpose(1, 2))
            means = mean[:, :, part].reshape(heads, -1, 1)
            of_scores = _score_gradient(shares, of_shares, means, ctx.scale)
            block = torch.bmm(of_scores, key[:, :stop])
            of_query[:, :, part] = block.view(heads, group, stop - first, channels)
            of_key[:, :stop] += torch.bmm(of_scores.transpose(1, 2), rows)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None


@torch.compile(dynamic=True)
def _probabilities(scores: Tensor, scale: float, first: int, group: int) -> Tensor:
    """Softmax of bf16 [heads, group * rows, keys] over the keys not after each row's own."""
    keys = scores.shape[-1]
    own = torch.arange(scores.shape[1] // group) + first
    seen = (torch.arange(keys)[None] <= own[:, None]).repeat(group, 1)
    scaled = torch.where(seen, scores.float() * scale, -1e30)
    powers = (scaled - scaled.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)).to(scores.dtype)


@torch.compile(dynamic=True)
def _score_gradient(shares: Tensor, grad: Tensor, mean: Tensor, scale: float) -> Tensor:
    return (shares.float() * (grad.float() - mean) * scale).to(shares.dtype)


@torch.compiler.disable
def blockwise_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **settings: Any
) -> tuple[Tensor, None]:
    """`CausalAttention` as transformers calls an attention: [rows, heads, length, channels]."""
    del module
    rows, heads, length, channels = query.shape
    own = (rows * key.shape[1], length, channels)
    # The rotation leaves float32.
    query, key, value = (part.to(torch.bfloat16) for part in (query, key, value))
    grouped = query.reshape(own[0], heads // key.shape[1], length, channels)
    out = CausalAttention.apply(grouped, key.reshape(own), value.reshape(own), settings["scaling"])
    return out.view(query.shape).transpose(1, 2), None


AttentionInterface.register("blockwise", blockwise_attention)


class Trainer:
    """Model, optimisers and the step between them."""

    def __init__(
        self,
        settings: dict[str, Any],
        recipe: Recipe,
        device: str,
        infilling: tuple[int, ...],
        teacher: Path | None = None,
    ) -> None:
        """`infilling`: prefix, suffix, middle and end tokens; `teacher`: a checkpoint folder."""
        torch.manual_seed(recipe.seed)
        self._infilling = infilling
        attention = "blockwise" if device == "cpu" else "sdpa"
        config = LlamaConfig(**settings, use_cache=False, attn_implementation=attention)
        self.model = LlamaModel(config).to(device)
        self._initialise(config)
        self.recipe, self.device, self.step = recipe, device, 0
        layers = self.model.layers
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        self._embedding = self.model.embed_tokens.weight
        self.optimisers = [
            torch.optim.Muon(
                matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, momentum=0.95
            ),
            torch.optim.AdamW(
                [self._embedding, *others], lr=recipe.vector_rate, betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]  # fmt: skip
        for number, layer in enumerate(layers):
            layers[number] = torch.compile(layer)
        self._loss, self._taught_loss = torch.compile(_loss_sum), torch.compile(_taught_loss_sum)
        self._teacher: LlamaModel | None = None
        if teacher is not None:
            read = LlamaModel.from_pretrained(
                teacher, dtype=torch.bfloat16, attn_implementation=attention
            )
            self._teacher = read.to(device).eval().requires_grad_(requires_grad=False)

    def _initialise(self, config: LlamaConfig) -> None:
        """Outputs of a block start at zero, so that the first steps learn the embedding."""
        for name, parameter in self.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2 and "embed" not in name:
                nn.init.normal_(parameter, std=1 / math.sqrt(config.hidden_size) * 0.7)

    def train_step(self, batch: Tensor) -> float:
        """One update on int64 [rows, length + 1]; returns nats per token."""
        rate = self.recipe.rate(self.step)
        peaks = (self.recipe.matrix_rate, self.recipe.vector_rate)
        for optimiser, peak in zip(self.optimisers, peaks, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
        weights = self._weights(batch)
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

    def _weights(self, batch: Tensor) -> Tensor:
        """float32 [rows, length] of the targets: more for what follows a prefix and a suffix."""
        prefix, suffix, middle, end = self._infilling
        weights = np.ones((batch.shape[0], batch.shape[1] - 1), np.float32)
        for row, ids in zip(weights, batch.numpy(), strict=True):
            for start in np.flatnonzero(ids == middle).tolist():
                opened = np.flatnonzero(ids[:start] == prefix)
                # After suffix and middle comes the prefix: nobody knows where the hole begins.
                if len(opened) and ids[opened[-1] + 1] != suffix:
                    ends = np.flatnonzero(ids[start:] == end)
                    stop = start + ends[0] if len(ends) else len(ids)
                    row[start:stop] = self.recipe.middle_weight
        return torch.from_numpy(weights)

    def _backward(self, batch: Tensor, weights: Tensor, total: float) -> float:
        """Adds the gradient of the mean over `total` weight; returns this part's share."""
        batch = batch.to(self.device)
        weights = weights.to(self.device).reshape(-1)
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
        size = LOSS_ROWS[self.device]
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            given = (rows[part], head, targets[part], weights[part])
            if self._teacher is None:
                loss = self._loss(*given) / total
            else:
                known = (taught[part], self._teacher.embed_tokens.weight)
                loss = self._taught_loss(*given, *known, self.recipe.distilled) / total
            loss.backward()
            nats += float(loss.detach())
        assert rows.grad is not None
        assert head.grad is not None
        hidden.backward(rows.grad.to(hidden.dtype))
        assert self._embedding.grad is not None
        self._embedding.grad += head.grad.float()
        return nats

    @torch.no_grad()
    def bits_per_byte(self, tokenizer: Tokenizer, text: str, length: int, windows: int) -> float:
        """Of evenly spaced windows of `text`, every token of them scored."""
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        runs = max(1, len(ids) // (length + 1))
        nats = size = 0.0
        for run in np.unique(np.linspace(0, runs - 1, min(windows, runs)).astype(int)):
            part = ids[run * (length + 1) : (run + 1) * (length + 1)]
            batch = torch.tensor([part], device=self.device)
            with torch.autocast(self.device, torch.bfloat16):
                hidden = self.model(batch[:, :-1]).last_hidden_state[0]
                logits = hidden @ self._embedding.T
            nats += float(functional.cross_entropy(logits.float(), batch[0, 1:], reduction="sum"))
            size += len(tokenizer.decode(part[1:]).encode())
        return nats / math.log(2) / size

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {
            "step": self.step,
            "model": plain_names(self.model.state_dict()),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Becomes what `state` was taken from."""
        self._set_weights(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step = state["step"]

    def start_from(self, folder: Path) -> None:
        """Takes the weights of a checkpoint folder; the optimisers stay new."""
        saved = load_file(folder / "model.safetensors", device=self.device)
        self._set_weights({name.removeprefix("model."): value for name, value in saved.items()})

    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        own = {name.replace("_orig_mod.", ""): name for name in self.model.state_dict()}
        self.model.load_state_dict({own[name]: value for name, value in weights.items()})


def _loss_sum(rows: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    nats = functional.cross_entropy((rows @ head.T).float(), targets, reduction="none")
    return torch.dot(nats, weights)


def _taught_loss_sum(
    rows: Tensor, head: Tensor, targets: Tensor, weights: Tensor,
    taught: Tensor, taught_head: Tensor, distilled: float,
) -> Tensor:  # fmt: skip
    """`_loss_sum`, of which the divergence from what `taught` rows foretell takes a share."""
    given = (rows @ head.T).float().log_softmax(-1)
    wanted = (taught @ taught_head.T).float().log_softmax(-1)
    divergence = (wanted.exp() * (wanted - given)).sum(-1)
    nats = functional.nll_loss(given, targets, reduction="none")
    return torch.dot(distilled * divergence + (1 - distilled) * nats, weights)


def plain_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as they are without compilation."""
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def write_model(trainer: Trainer, tokenizer: Path, out: Path, about: dict[str, Any]) -> None:
    """The Hugging Face checkpoint folder: bf16 weights, configuration, tokenizer."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {
        f"model.{name}": value.to(torch.bfloat16).cpu().contiguous()
        for name, value in plain_names(trainer.model.state_dict()).items()
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


def save(state: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """What to train, from where to where."""
    parser = argparse.ArgumentParser(description="Trains one model of the family.")
    parser.add_argument("config", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--start", type=Path, help="checkpoint folder whose weights a new run starts from"
    )
    parser.add_argument(
        "--teacher", type=Path, help="checkpoint folder to learn the distribution of"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--stop-minutes", type=float, default=math.inf, help="save and leave then")
    return parser.parse_args(words)


class Journal:
    """The progress line and the log of a run."""

    def __init__(self, path: Path, recipe: Recipe, first: int) -> None:
        self._path, self._recipe, self._first = path, recipe, first
        self._started = self._lap = time.monotonic()
        self._recent: float | None = None

    @property
    def minutes(self) -> float:
        """Since the run, or its continuation, began."""
        return (time.monotonic() - self._started) / 60

    def step(self, step: int, nats: float, bits_per_byte: float | None) -> None:
        """Writes a row and redraws the line."""
        now = time.monotonic()
        speed = round(self._recipe.tokens_per_step / (now - self._lap))
        self._lap = now
        self._recent = nats if self._recent is None else 0.95 * self._recent + 0.05 * nats
        left = self.minutes / (step - self._first) * (self._recipe.steps - step)
        row = {"step": step, "nats": round(nats, 4), "tokens_per_second": speed}
        shown = f"step {step}/{self._recipe.steps}  {self._recent:.3f} nats  {speed} tokens/s  "
        shown += f"{left:.0f} min left"
        if bits_per_byte is not None:
            row["held_out_bits_per_byte"] = bits_per_byte
            shown += f"  held out {bits_per_byte:.4f} bits per byte\n"
        with self._path.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(f"\r{shown:100}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Trains, or goes on training, until the recipe's last step."""
    arguments = arguments_of()
    torch.set_num_threads(arguments.threads)
    # A layer is compiled for the short and the long length and for evaluation.
    torch._dynamo.config.cache_size_limit = 64

    settings = json.loads(arguments.config.read_text())
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    settings["model"] |= {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    recipe = Recipe(**settings["train"])
    infilling = tuple(map(tokenizer.token_to_id, (PREFIX, SUFFIX, MIDDLE, END)))
    trainer = Trainer(settings["model"], recipe, arguments.device, infilling, arguments.teacher)
    checkpoint = arguments.out / "checkpoint.pt"
    arguments.out.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        trainer.load(torch.load(checkpoint, map_location=arguments.device, weights_only=True))
        print(f"resumed at step {trainer.step}", file=sys.stderr)
    elif arguments.start is not None:
        trainer.start_from(arguments.start)
    train(trainer, tokenizer, arguments, checkpoint)
    if trainer.step < recipe.steps:
        return
    about = settings | {
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "turn_end": tokenizer.token_to_id("<|im_end|>"),
        "tokens": recipe.steps * recipe.tokens_per_step,
        "device": arguments.device,
        "torch": torch.__version__,
    }
    if arguments.start is not None:
        about["earlier"] = earlier = json.loads((arguments.start / "training.json").read_text())
        about["tokens"] += earlier["tokens"]
    write_model(trainer, arguments.tokenizer, arguments.out / "model", about)


def train(
    trainer: Trainer, tokenizer: Tokenizer, arguments: argparse.Namespace, checkpoint: Path
) -> None:
    """Steps to the recipe's end, or to the end of the minutes allowed; saves on the way."""
    recipe = trainer.recipe
    data = Data(arguments.packed, recipe)
    held_out = (arguments.packed / "held_out.python.txt").read_text(encoding="utf-8")
    journal = Journal(arguments.out / "log.jsonl", recipe, trainer.step)
    saved = 0.0
    while trainer.step < recipe.steps and journal.minutes < arguments.stop_minutes:
        nats = trainer.train_step(data.batch(trainer.step))
        bits_per_byte = None
        if trainer.step % 200 == 0 or trainer.step == recipe.steps:
            length = recipe.length_at(trainer.step - 1)
            bits_per_byte = trainer.bits_per_byte(tokenizer, held_out, length, 24)
        journal.step(trainer.step, nats, bits_per_byte)
        if journal.minutes - saved > arguments.save_minutes:
            save(trainer.state(), checkpoint)
            saved = journal.minutes
    save(trainer.state(), checkpoint)


if __name__ == "__main__":
    main()
