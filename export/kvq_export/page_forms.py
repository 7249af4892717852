"""How the pages of every KV head are best encoded, `kvq.config.PageForm`: what makes noise least.

A text is read into 8-bit pages of either form, and after every chunk of it noise is looked at. That
of logits is sum_d E[q_d^2] range_d^2 up to a factor, in the basis that keys are stored in. That of
values is what rounding them changes of the newest queries' attention output: a token that no query
reads may have any error, and in some heads its values are by far the largest of a page.
"""

from importlib import resources

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.classes import open_cache, spec_of
from kvq.config import PAGE_TOKENS, KvPlan, PageForm
from kvq_export import quality
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import backends
from kvq_runtime.backends import forward_chain
from kvq_runtime.backends.paged import PagedBackend, class_fields
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
    chosen: list[int] = []
    for plain, other in zip(*found, strict=True):
        turned, channels = (new < old for old, new in zip(plain, other, strict=True))
        forms = turned * PageForm.ROTATED_KEYS + channels * PageForm.CHANNEL_VALUES
        chosen += forms.ravel().tolist()
    return tuple(map(PageForm, chosen))


def _noise(
    backend: PagedBackend, ids: NDArray[np.int64], form: PageForm
) -> list[tuple[Floats, Floats]]:
    """Of keys and of values [L, Hk] of every class, were every head's pages of one form."""
    classes = backend.bundle.config.cache_classes
    streams = sum(one.shape.num_layers * one.shape.num_kv_heads for one in classes)
    asked = spec_of(
        class_fields(backend.bundle.config, (form,) * streams),
        plan=KvPlan(k_bits=8, v_bits=8),
        context_tokens=len(ids),
        chunk_tokens=CHUNK_TOKENS,
        threads=backend.threads,
        policy="oldest",
        observed=True,
    )
    cache = open_cache(asked.resolved(), engine=backend.cache_kind)
    places: list[list[tuple[Floats, Floats]]] = []
    try:
        for start in range(0, len(ids), CHUNK_TOKENS):
            part = ids[start : start + CHUNK_TOKENS]
            forward_chain(backend, cache, part, np.arange(0))
            places.append([_noise_of(part) for part in cache.parts])
    finally:
        cache.close()
    both = (zip(*of_class, strict=True) for of_class in zip(*places, strict=True))
    return [(np.sum(keys, axis=0), np.sum(values, axis=0)) for keys, values in both]


def _noise_of(cache: Cache) -> tuple[Floats, Floats]:
    """As `_noise`, of one class at one place of the text, summed over pages."""
    shape, evidence = cache.shape, cache.evidence()
    assert evidence.attention is not None
    keys = np.zeros((shape.num_layers, shape.num_kv_heads))
    for layer, query_square in enumerate(evidence.attention.query_square):
        spans = evidence.constants(layer)
        key_square = np.square(spans.key_range).sum(axis=1, dtype=np.float64)
        keys[layer] = (query_square * key_square).sum(axis=-1)
    return keys, evidence.attention.value_error.sum(axis=2, dtype=np.float64)
