"""How the pages of every KV head are best encoded, `kvq.config.PageForm`: what makes noise least.

A text is read into 8-bit pages of either form. The noise of logits is sum_d E[q_d^2] range_d^2 up
to a factor, in the basis that keys are stored in; that of values the mean square of the ranges, of
tokens or of channels.
"""

from importlib import resources

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.config import PAGE_TOKENS, KvPlan, PageForm
from kvq.sizing import CacheSpec
from kvq_export import quality
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import backends
from kvq_runtime.backends import forward_chain
from kvq_runtime.backends.paged import PagedBackend
from kvq_runtime.bundle import Bundle

# Tokens read: at most, and so few that a page of each form has nothing to say.
READ_TOKENS, LEAST_TOKENS = 768, 6 * PAGE_TOKENS
CHUNK_TOKENS = 128

EVERY_FORM = PageForm.ROTATED_KEYS | PageForm.CHANNEL_VALUES

Floats = NDArray[np.float64]
Forms = tuple[PageForm, ...]


def choose_forms(bundle: Bundle, tokenizer: Tokenizer, threads: int) -> Forms:
    """The form of each layer's KV heads, layer by layer; none for a context that is too short."""
    code = resources.files("kvq").joinpath("reference.py").read_text(encoding="utf-8")
    limit = min(READ_TOKENS, bundle.config.context_length)
    ids = tokenizer.encode(f"{quality.quality_text()}\n\n{code}", start=True)[:limit]
    if len(ids) < LEAST_TOKENS:
        return ()
    backend = backends.open_backend("auto", bundle, threads=threads).paged
    assert backend is not None
    try:
        found = [_noise(backend, np.array(ids), form) for form in (PageForm.PLAIN, EVERY_FORM)]
    finally:
        backend.close()
    keys, values = zip(*found, strict=True)
    turned, channels = keys[1] < keys[0], values[1] < values[0]
    chosen = turned * PageForm.ROTATED_KEYS + channels * PageForm.CHANNEL_VALUES
    return tuple(map(PageForm, chosen.ravel().tolist()))


def _noise(backend: PagedBackend, ids: NDArray[np.int64], form: PageForm) -> tuple[Floats, Floats]:
    """Of keys and of values [L, Hk], were every head's pages of one form."""
    config, shape = backend.bundle.config, backend.bundle.config.cache_shape
    asked = CacheSpec(
        shape=shape,
        plan=KvPlan(k_bits=8, v_bits=8),
        context_tokens=len(ids),
        chunk_tokens=CHUNK_TOKENS,
        threads=backend.threads,
        policy="oldest",
        windows=config.windows,
        observed=True,
        forms=(form,) * (shape.num_layers * shape.num_kv_heads),
    )
    cache = Cache(asked.resolved(), engine=backend.cache_kind)
    try:
        for start in range(0, len(ids), CHUNK_TOKENS):
            part = ids[start : start + CHUNK_TOKENS]
            forward_chain(backend, cache, part, np.arange(0))
        evidence = cache.evidence()
        assert evidence.attention is not None
        keys, values = np.zeros((2, shape.num_layers, shape.num_kv_heads))
        for layer, query_square in enumerate(evidence.attention.query_square):
            spans = evidence.constants(layer)
            key_square = np.square(spans.key_range).mean(axis=1, dtype=np.float64)
            keys[layer] = (query_square * key_square).sum(axis=-1)
            values[layer] = np.square(spans.value_range).mean(axis=(1, 2), dtype=np.float64)
        return keys, values
    finally:
        cache.close()
