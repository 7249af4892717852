"""Finds which KV heads look for what stood long ago: `kvq.policies.Evidence.retrieval`.

Most heads read the newest tokens and the first ones. A few, retrieval heads (arXiv 2404.15574),
find a token of long ago again, and above all for these a cache keeps old pages. As in
RazorAttention (arXiv 2407.15891) a senseless text that repeats itself shows them: a head is
measured by the attention that its tokens give to the same token before (an echo) and to the one
after that (induction). RazorAttention lets the best heads keep everything and the others nothing;
here the share is a factor of a price (`kvq.policies.budget`). The text is made of the model's own
tokens in a random order.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvq.config import AttentionParams
from kvq_export.fit import quality
from kvq_export.fit.page_encodings import streamed_weights
from kvq_export.phases import Progress, no_progress
from kvq_models.reference import PlainAttention, forward
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import Manifest

# Distinct tokens, and how often they are repeated; fewer tokens where the context is shorter.
TOKENS, TIMES = 256, 3
# With fewer distinct tokens a repeat is so close that any head reads it.
LEAST_TOKENS = 64
_SEED = 1


def score_heads(
    folder: Path, manifest: Manifest, tokenizer: Tokenizer, progress: Progress = no_progress
) -> Manifest:
    """Returns the manifest with every KV head's share; unchanged where the context is too short."""
    bundle = Bundle.open(folder, verify="size")
    begin = tokenizer.encode("", start=True)
    known = np.unique(np.array(tokenizer.encode(quality.quality_text()), np.int64))
    room = min(TOKENS, (bundle.config.context_length - len(begin)) // TIMES, len(known))
    if room < LEAST_TOKENS:
        return manifest
    drawn = np.random.default_rng(_SEED).choice(known, room, replace=False)
    ids = np.concatenate([np.array(begin, np.int64), *[drawn] * TIMES])
    echoes, weights = Echoes(len(begin), room), streamed_weights(bundle)
    layers = bundle.config.num_layers
    forward(
        bundle.config, weights, ids, np.arange(len(ids)), echoes, slice(0, 0),
        watch=lambda layer, _: progress(layer, layers, ""),
    )  # fmt: skip
    shares = [
        echoes.shares[index, layer]
        for index, group in enumerate(bundle.config.cache_classes)
        for layer in range(group.shape.num_layers)
    ]
    return replace(manifest, retrieval=tuple(np.concatenate(shares).round(3).tolist()))


class Echoes(PlainAttention):
    """Watches a text that from token `first` on is the same `period` tokens over and over.

    `shares` has for each class and layer float64 [Hk]: what a token of a repeat gives on average to
    itself and the token after it in all earlier turns. Of the heads that share a KV head, and of
    the layers that read it, the largest counts.
    """

    def __init__(self, first: int, period: int) -> None:
        super().__init__()
        self._first, self._period = first, period
        self.shares: dict[tuple[int, int], NDArray[np.float64]] = {}

    def observe(self, params: AttentionParams, query: np.ndarray, weights: np.ndarray) -> None:
        place = (params.cache, params.layer)
        heads, group, tokens = map(int, weights.shape[:3])
        sums = np.zeros((heads, group))
        rows = np.arange(self._first + self._period, tokens)
        for back in range(self._period, tokens, self._period):
            repeats = rows[rows - back >= self._first]
            echo = weights[:, :, repeats, repeats - back]
            induction = weights[:, :, repeats, repeats - back + 1]
            sums += (echo + induction).sum(axis=-1, dtype=np.float64)
        best = (sums / len(rows)).max(axis=1)
        self.shares[place] = np.maximum(best, self.shares.get(place, 0))
