"""Which KV heads look for what was said before: `kvq.policies.Evidence.retrieval`.

Most heads read the newest tokens and the first ones; a few, retrieval heads (arXiv 2404.15574),
find a token of long ago again, and for these above all a cache keeps old pages. As in
RazorAttention (arXiv 2407.15891) a text without sense that repeats itself tells: a head is measured
by what its tokens give to the same token before (an echo) and to the one behind that (induction).
There the best heads keep everything and the others nothing; here the share is a factor of a price
(`kvq.policies.budget`), and the text is one of the model's own tokens, in an order of chance.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvq.config import AttentionParams
from kvq_export import quality
from kvq_export.page_forms import weights_in_turn
from kvq_models.reference import PlainAttention, forward
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle import Bundle
from kvq_runtime.manifest import Manifest

# Distinct tokens, said so many times; fewer where the context is shorter.
TOKENS, TIMES = 256, 3
# Of as few distinct ones a repeat is close by, which any head reads.
LEAST_TOKENS = 64
_SEED = 1


def score_heads(folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> Manifest:
    """The manifest with every KV head's share; without, for a context that is too short."""
    bundle = Bundle.open(folder, verify="size")
    begin = tokenizer.encode("", start=True)
    known = np.unique(np.array(tokenizer.encode(quality.quality_text()), np.int64))
    room = min(TOKENS, (bundle.config.context_length - len(begin)) // TIMES, len(known))
    if room < LEAST_TOKENS:
        return manifest
    drawn = np.random.default_rng(_SEED).choice(known, room, replace=False)
    ids = np.concatenate([np.array(begin, np.int64), *[drawn] * TIMES])
    echoes, weights = Echoes(len(begin), room), weights_in_turn(bundle)
    forward(bundle.config, weights, ids, np.arange(len(ids)), echoes, slice(0, 0))
    shares = [
        echoes.shares[index, layer]
        for index, one in enumerate(bundle.config.cache_classes)
        for layer in range(one.shape.num_layers)
    ]
    return replace(manifest, retrieval=tuple(np.concatenate(shares).round(3).tolist()))


class Echoes(PlainAttention):
    """Watches a text that from token `first` on is the same `period` tokens over and over.

    `shares`: of each class and layer float64 [Hk], what a token of a repeat gives on average to
    itself and the token behind it in all earlier turns. Of the heads that share a KV head, and of
    the layers that read it, the largest counts: that one would miss it.
    """

    def __init__(self, first: int, period: int) -> None:
        super().__init__()
        self._first, self._period = first, period
        self.shares: dict[tuple[int, int], NDArray[np.float64]] = {}

    def saw(self, params: AttentionParams, query: np.ndarray, weights: np.ndarray) -> None:
        """See `PlainAttention`."""
        place = (params.cache, params.layer)
        heads, group, tokens = map(int, weights.shape[:3])
        found = np.zeros((heads, group))
        rows = np.arange(self._first + self._period, tokens)
        for back in range(self._period, tokens, self._period):
            own = rows[rows - back >= self._first]
            echo, behind = weights[:, :, own, own - back], weights[:, :, own, own - back + 1]
            found += (echo + behind).sum(axis=-1, dtype=np.float64)
        best = (found / len(rows)).max(axis=1)
        self.shares[place] = np.maximum(best, self.shares.get(place, 0))
