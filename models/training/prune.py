"""Token pruning in prefill, measured: what later layers lose where they see fewer tokens.

    python models/training/prune.py CHECKPOINT --fit FILE.. --held FILE..

After LazyLLM (arXiv 2407.14057) and FastKV (2502.01068): behind some layer only the prompt tokens
that its attention looked at most go on. Of these tokens two things are measured. `drop` is the
papers': later layers hold nothing of the others. `kept` is this project's own, and another method:
their keys and values are predicted from the stream at that layer, so that every layer's cache holds
every token and a page table needs no set of tokens for each layer. Who looks is `last`, the last 32
tokens of the prompt, as in the papers, or `piece`, the last 16 of each 256, which is what a prompt
read piece by piece can know. The runtime has neither; `apps/lab/log/prediction.md` says why.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from predict import (
    FOLLOWING_TOKENS,
    SINK_TOKENS,
    TAIL_TOKENS,
    Llama,
    Predictor,
    following_nats,
    ridge,
    windows,
    with_ones,
)
from tokenizers import Tokenizer
from torch import Tensor

PIECE_TOKENS, PIECE_ROWS = 256, 16


class Pruning:
    """One way to read a prompt of `stop` tokens: behind layer `first` a share `keep` goes on."""

    def __init__(
        self, predictor: Predictor, base: Llama, stop: int, keep: float, *, pieces: bool
    ) -> None:
        self._predictor, self._base, self._stop, self._keep = predictor, base, stop, keep
        self._pieces = pieces
        self._stream = torch.zeros(0)
        self.pruned = torch.zeros(0, dtype=torch.bool)

    def predicting(self, layer: int, stream: Tensor, own: Tensor) -> Tensor:
        """A `Change`: keys and values of pruned tokens are made from the stream at the layer."""
        own = self.choosing(layer, stream, own)
        if layer < self._predictor.first:
            return own
        if layer == self._predictor.first:
            self._stream = with_ones(self._base.normed(stream))
        made = self._stream @ self._predictor.maps[str(layer)]
        return torch.where(self.pruned[:, None], made, own)

    def choosing(self, layer: int, stream: Tensor, own: Tensor) -> Tensor:
        """A `Change` that changes nothing: which tokens go on behind this layer."""
        if layer == self._predictor.first - 1:
            looked = self._base.looked(layer, stream, own)[0].mean(0)
            self.pruned = torch.zeros(len(looked), dtype=torch.bool)
            end = self._stop - TAIL_TOKENS
            self.pruned[SINK_TOKENS:end] = True
            step = PIECE_TOKENS if self._pieces else end
            for start in range(SINK_TOKENS, end, step):
                stop = min(start + step, end)
                rows = looked[max(start, stop - PIECE_ROWS) : stop]
                if not self._pieces:
                    rows = looked[end : self._stop]
                scores = rows[:, start:stop].mean(0)
                best = scores.topk(int(self._keep * len(scores))).indices
                self.pruned[start + best] = False
        return own

    def sees(self, layer: int) -> Tensor | None:
        """Which tokens each sees [T, T] where pruned ones are dropped; None: all before it."""
        if layer < self._predictor.first:
            return None
        causal = torch.ones(len(self.pruned), len(self.pruned), dtype=torch.bool).tril()
        return (causal & ~self.pruned) | torch.eye(len(causal), dtype=torch.bool)


def main() -> None:
    """A line for each way: how far on the way from the computed prompt (0) to none (1)."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--fit", type=Path, nargs="+", required=True)
    parser.add_argument("--held", type=Path, nargs="+", required=True)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--context", type=int, default=1024)
    asked = parser.parse_args()
    base = Llama(asked.checkpoint, "cpu")
    tokenizer = Tokenizer.from_file(str(asked.checkpoint / "tokenizer.json"))
    fitted = [torch.tensor([text]) for text in windows(tokenizer, asked.fit, 1024, 20)]
    length = asked.context + FOLLOWING_TOKENS
    held = [torch.tensor([text]) for text in windows(tokenizer, asked.held, length, asked.texts)]
    exact = sum(following_nats(base, ids) for ids in held) / len(held)
    alone = [torch.cat([ids[:, :1], ids[:, asked.context :]], dim=1) for ids in held]
    none = sum(following_nats(base, ids) for ids in alone) / len(held)
    print(f"{len(held)} prompts, {exact:.3f} nats after them, {none:.3f} without")
    for first in range(1, base.layers - 1):
        predictor = Predictor(base, first)
        ridge(predictor, base, fitted)
        for keep in (0.0, 0.1, 0.25, 0.5):
            cost = (first + (base.layers - first) * keep) / base.layers
            for pieces in (False, True) if keep else (False,):
                lost = {"kept": 0.0, "drop": 0.0}
                for ids in held:
                    way = Pruning(predictor, base, asked.context, keep, pieces=pieces)
                    lost["kept"] += following_nats(base, ids, way.predicting) / len(held)
                    lost["drop"] += following_nats(base, ids, way.choosing, way.sees) / len(held)
                found = {name: (value - exact) / (none - exact) for name, value in lost.items()}
                print(
                    f"behind layer {first} {keep:.0%} by {'piece' if pieces else 'last'}, cost "
                    f"{cost:.2f}: kept {found['kept']:.3f}, drop {found['drop']:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
