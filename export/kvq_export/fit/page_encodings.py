"""Finds how the pages of every KV head are best encoded: `PageForm`, and the keys' feedback.

A text is read twice. The first reading, in numpy, is for keys. The noise of logits is sum_d r_d^2
s_d up to a factor, in the basis that keys are stored in: r_d is the range of a channel within a
page, and s_d the mean square of queries there that remains when later channels make up for its
error, as `kvq.reference.stored.carried` has them do. The second reading, into 8-bit pages of either
form, is for values: what rounding them changes in the newest queries' attention output. A token
that no query reads may have any error, and in some heads its values are by far the largest of a
page.
"""

from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache, CacheSpec
from kvq.class_cache import ClassCache
from kvq.config import PAGE_TOKENS, AttentionParams, KvPlan, PageForm
from kvq.reference.stored import hadamard
from kvq_export.fit import quality
from kvq_export.fit.calibrated import TABLES
from kvq_export.fit.prediction import store_arrays
from kvq_export.fit.substitutes import Rows, Stack, no_logits
from kvq_export.phases import Progress, no_progress
from kvq_models.family import is_stack
from kvq_models.reference import PlainAttention, Weights, forward
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import backends
from kvq_runtime.backends import forward_chain
from kvq_runtime.backends.paged import PagedBackend, class_fields
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import FEEDBACK_FILE, Manifest

# Tokens that are read, at most and at least: of fewer a page of each form tells nothing.
READ_TOKENS, LEAST_TOKENS = 768, 6 * PAGE_TOKENS
CHUNK_TOKENS = 128
# Share of the mean square of a head's queries that is added to each channel's, as GPTQ does.
DAMPING = 0.01

_CHANNELS = PageForm.CHANNEL_VALUES

Floats = NDArray[np.float64]


def fit_pages(
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    threads: int,
    progress: Progress = no_progress,
) -> Manifest:
    """Finds the form of each layer's KV heads, and writes their feedback; returns the manifest.

    Changes nothing for a context that is too short.
    """
    bundle = Bundle.open(folder, verify="size")
    code = resources.files("kvq_export").joinpath("fit_code.txt").read_text(encoding="utf-8")
    limit = min(READ_TOKENS, bundle.config.context_length)
    ids = np.array(tokenizer.encode(f"{quality.quality_text()}\n\n{code}", start=True)[:limit])
    if len(ids) < LEAST_TOKENS:
        return manifest
    backend = backends.open_backend("auto", bundle, threads=threads).paged
    assert backend is not None
    try:
        values = [_value_noise(backend, ids, form) for form in (PageForm.PLAIN, _CHANNELS)]
    finally:
        backend.close()
    keys = _key_fits(bundle, ids, progress)
    forms: list[PageForm] = []
    feedback: dict[str, NDArray[np.float16]] = {}
    for index, (rotated, key_feedback) in enumerate(keys):
        channels = values[1][index] < values[0][index]
        encoded = rotated * PageForm.ROTATED_KEYS + channels * _CHANNELS
        forms += map(PageForm, encoded.ravel().tolist())
        feedback[str(index)] = key_feedback
    info = store_arrays(folder / FEEDBACK_FILE, feedback)
    return replace(manifest, forms=tuple(forms), files={**manifest.files, FEEDBACK_FILE: info})


class QueryMoments(PlainAttention):
    """Sums the second moments of the queries of every KV head, float64 [Hk, D, D] by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[tuple[int, int], Floats] = {}

    def observe(self, params: AttentionParams, query: np.ndarray, weights: np.ndarray) -> None:
        """Counts the queries of a layer that owns keys and of its readers alike."""
        place, queries = (params.cache, params.layer), query.swapaxes(0, 1)
        by_head = queries.reshape(params.num_kv_heads, -1, params.head_dim).astype(np.float64)
        moments = by_head.swapaxes(1, 2) @ by_head
        self.moments[place] = self.moments[place] + moments if place in self.moments else moments

    def ranges(self, place: tuple[int, int], sinks: int, *, rotated: bool) -> Floats:
        """Returns mean squares over pages of the keys' ranges, float64 [Hk, D]."""
        keys = self._keys[place][sinks:]
        keys = keys[: len(keys) // PAGE_TOKENS * PAGE_TOKENS]
        pages = keys.reshape(-1, PAGE_TOKENS, *keys.shape[1:])
        pages = hadamard(pages) if rotated else pages
        return np.square(np.ptp(pages, axis=1).astype(np.float64)).mean(axis=0)


def _key_fits(
    bundle: Bundle, ids: NDArray[np.int64], progress: Progress
) -> list[tuple[NDArray[np.bool_], NDArray[np.float16]]]:
    """Finds which heads store their keys rotated, [L, Hk], and their feedback [L, Hk, D, D].

    Both for every class of layers.
    """
    queries = QueryMoments()
    weights = streamed_weights(bundle)
    count = bundle.config.num_layers
    forward(
        bundle.config, weights, ids, np.arange(len(ids)), queries, slice(0, 0),
        watch=lambda layer, _: progress(layer, count, ""),
    )  # fmt: skip
    fits: list[tuple[NDArray[np.bool_], NDArray[np.float16]]] = []
    for index, group in enumerate(bundle.config.cache_classes):
        layers = [
            _key_fit(queries, (index, layer), bundle.kv.sink_tokens)
            for layer in range(group.shape.num_layers)
        ]
        rotated, feedback = zip(*layers, strict=True)
        fits.append((np.array(rotated), np.array(feedback)))
    return fits


def streamed_weights(bundle: Bundle) -> Weights:
    """Returns a bundle's weights for `forward`; one matrix or one expert is in memory at a time."""
    assert bundle.manifest.weights is not None
    matrices = bundle.manifest.weights.formats

    def weight(name: str) -> NDArray[np.float32]:
        if is_stack(name) and name in matrices:
            return cast(Any, Stack(partial(_grouped, bundle, name)))
        if name in TABLES:
            return cast(Any, Rows(partial(bundle.read_weight, name), no_logits))
        return bundle.read_weight(name)

    return weight


def _grouped(
    bundle: Bundle, name: str, x: NDArray[np.float32], counts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Multiplies as `kvq_models.reference.grouped`; only experts with rows are read."""
    height, stops = bundle.form(name).rows // len(counts), np.cumsum(counts)
    out = np.empty((len(x), height), np.float32)
    for expert in np.flatnonzero(counts):
        rows = slice(stops[expert] - counts[expert], stops[expert])
        expert_rows = slice(expert * height, (expert + 1) * height)
        out[rows] = x[rows] @ bundle.read_weight(name, expert_rows).T
    return out


def _key_fit(
    queries: QueryMoments, place: tuple[int, int], sinks: int
) -> tuple[NDArray[np.bool_], NDArray[np.float16]]:
    """Fits one layer as `_key_fits` does."""
    moments, candidates = queries.moments[place], list[tuple[Floats, Floats]]()
    for rotated in (False, True):
        basis_moments = rotate_moments(moments) if rotated else moments
        feedback, remaining = feedback_of(basis_moments)
        noise = (queries.ranges(place, sinks, rotated=rotated) * remaining).sum(axis=-1)
        candidates.append((noise, feedback))
    better = candidates[1][0] < candidates[0][0]
    feedback = np.where(better[:, None, None], candidates[1][1], candidates[0][1])
    return better, feedback.astype(np.float16)


def rotate_moments(moments: Floats) -> Floats:
    """Returns the second moments [..., D, D] of queries after they were rotated."""
    half = hadamard(moments.astype(np.float32)).swapaxes(-1, -2)
    return hadamard(half).astype(np.float64)


def feedback_of(moments: Floats) -> tuple[Floats, Floats]:
    """Returns what of a channel's error is taken off later ones, [..., D, D], and what it costs.

    For queries with second moments [..., D, D]: the rows of the Cholesky factor of their inverse,
    over its diagonal, as in GPTQ (arXiv 2210.17323). A channel's error, made up for, costs [..., D]
    times its square.
    """
    channels = moments.shape[-1]
    mean = np.trace(moments, axis1=-2, axis2=-1)[..., None, None] / channels
    mean = np.maximum(mean, np.finfo(np.float32).tiny)
    damped: Floats = np.asarray(moments / mean + DAMPING * np.eye(channels), np.float64)
    inverse = np.asarray(np.linalg.inv(damped), np.float64)
    lower = np.asarray(np.linalg.cholesky((inverse + inverse.swapaxes(-1, -2)) / 2), np.float64)
    upper = lower.swapaxes(-1, -2)
    diagonal = np.diagonal(upper, axis1=-2, axis2=-1)
    return np.triu(upper / diagonal[..., None], 1), mean[..., 0] / np.square(diagonal)


def _value_noise(backend: PagedBackend, ids: NDArray[np.int64], form: PageForm) -> list[Floats]:
    """Measures noise [L, Hk] of every class, as if all pages of every head were of one form."""
    classes = backend.bundle.config.cache_classes
    spec = CacheSpec.of(
        *class_fields(backend.bundle.config, (form,) * backend.bundle.config.streams),
        plan=KvPlan(k_bits=8, v_bits=8),
        context_tokens=len(ids),
        chunk_tokens=CHUNK_TOKENS,
        threads=backend.threads,
        policy="oldest",
        observed=True,
    )
    cache = Cache(spec.resolved())
    noise = [np.zeros((group.shape.num_layers, group.shape.num_kv_heads)) for group in classes]
    try:
        for start in range(0, len(ids), CHUNK_TOKENS):
            part = ids[start : start + CHUNK_TOKENS]
            forward_chain(backend, cache, part, np.arange(0))
            sums = zip(noise, cache.parts, strict=True)
            noise = [total + _noise_of(part_cache) for total, part_cache in sums]
    finally:
        cache.close()
    return noise


def _noise_of(cache: ClassCache) -> Floats:
    """Measures as `_value_noise`, for one class at one place of the text, summed over pages."""
    attention = cache.evidence().attention
    assert attention is not None
    return attention.value_error.sum(axis=2, dtype=np.float64)
