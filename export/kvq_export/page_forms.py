"""How the pages of every KV head are best encoded: `kvq.config.PageForm`, and the keys' feedback.

A text is read twice. In numpy, for keys: noise of logits is sum_d r_d^2 s_d up to a factor, in the
basis that keys are stored in. r_d is the range of a channel within a page, and s_d the mean square
of queries there that is left when the channels behind it make up for its error, which
`kvq.reference.carried` has them do. And into 8-bit pages of either form, for values: what rounding
them changes of the newest queries' attention output. A token that no query reads may have any
error, and in some heads its values are by far the largest of a page.
"""

from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.classes import open_cache, spec_of
from kvq.config import PAGE_TOKENS, AttentionParams, KvPlan, PageForm
from kvq.reference import hadamard
from kvq_export import quality
from kvq_export.calibrated import ENDS
from kvq_export.prediction import store_arrays
from kvq_export.stand_ins import Rows, Stack, no_logits
from kvq_models.family import is_stack
from kvq_models.reference import PlainAttention, Weights, forward
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import backends
from kvq_runtime.backends import forward_chain
from kvq_runtime.backends.paged import PagedBackend, class_fields
from kvq_runtime.bundle import Bundle
from kvq_runtime.manifest import FEEDBACK_FILE, Manifest

# Tokens read: at most, and so few that a page of each form has nothing to say.
READ_TOKENS, LEAST_TOKENS = 768, 6 * PAGE_TOKENS
CHUNK_TOKENS = 128
# Of the mean square of a head's queries, added to each channel's (GPTQ's damping).
DAMPING = 0.01

_CHANNELS = PageForm.CHANNEL_VALUES

Floats = NDArray[np.float64]


def fit_pages(folder: Path, manifest: Manifest, tokenizer: Tokenizer, threads: int) -> Manifest:
    """The manifest with the form of each layer's KV heads, and its file with their feedback.

    Neither for a context that is too short.
    """
    bundle = Bundle.open(folder, verify="size")
    code = resources.files("kvq").joinpath("reference.py").read_text(encoding="utf-8")
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
    keys = _key_fits(bundle, ids)
    forms: list[PageForm] = []
    feedback: dict[str, NDArray[np.float16]] = {}
    for index, (rotated, own) in enumerate(keys):
        channels = values[1][index] < values[0][index]
        both = rotated * PageForm.ROTATED_KEYS + channels * _CHANNELS
        forms += map(PageForm, both.ravel().tolist())
        feedback[str(index)] = own
    info = store_arrays(folder / FEEDBACK_FILE, feedback)
    return replace(manifest, forms=tuple(forms), files={**manifest.files, FEEDBACK_FILE: info})


class Listening(PlainAttention):
    """Sums the second moments of what every KV head is asked, float64 [Hk, D, D] by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[tuple[int, int], Floats] = {}

    def saw(self, params: AttentionParams, query: np.ndarray, weights: np.ndarray) -> None:
        """Its owner's queries and its readers' count alike."""
        place, own = (params.cache, params.layer), query.swapaxes(0, 1)
        of_head = own.reshape(params.num_kv_heads, -1, params.head_dim).astype(np.float64)
        found = of_head.swapaxes(1, 2) @ of_head
        self.moments[place] = self.moments[place] + found if place in self.moments else found

    def ranges(self, place: tuple[int, int], sinks: int, *, rotated: bool) -> Floats:
        """Mean squares over pages of the keys' ranges, float64 [Hk, D]."""
        keys = self._keys[place][sinks:]
        keys = keys[: len(keys) // PAGE_TOKENS * PAGE_TOKENS]
        pages = keys.reshape(-1, PAGE_TOKENS, *keys.shape[1:])
        pages = hadamard(pages) if rotated else pages
        return np.square(np.ptp(pages, axis=1).astype(np.float64)).mean(axis=0)


def _key_fits(
    bundle: Bundle, ids: NDArray[np.int64]
) -> list[tuple[NDArray[np.bool_], NDArray[np.float16]]]:
    """Of every class whether heads store their keys rotated, [L, Hk], and [L, Hk, D, D]."""
    listening = Listening()
    weights = weights_in_turn(bundle)
    forward(bundle.config, weights, ids, np.arange(len(ids)), listening, slice(0, 0))
    found: list[tuple[NDArray[np.bool_], NDArray[np.float16]]] = []
    for index, one in enumerate(bundle.config.cache_classes):
        layers = [
            _key_fit(listening, (index, layer), bundle.kv.sink_tokens)
            for layer in range(one.shape.num_layers)
        ]
        rotated, feedback = zip(*layers, strict=True)
        found.append((np.array(rotated), np.array(feedback)))
    return found


def weights_in_turn(bundle: Bundle) -> Weights:
    """A bundle's, for `forward`: one matrix, one expert or the rows looked up are in memory."""
    assert bundle.manifest.weights is not None
    matrices = bundle.manifest.weights.formats

    def weight(name: str) -> NDArray[np.float32]:
        if is_stack(name) and name in matrices:
            return cast(Any, Stack(partial(_grouped, bundle, name)))
        if name in ENDS:
            return cast(Any, Rows(partial(bundle.read_weight, name), no_logits))
        return bundle.read_weight(name)

    return weight


def _grouped(
    bundle: Bundle, name: str, x: NDArray[np.float32], counts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """As `kvq_models.reference.grouped`; of the experts only those with rows are read."""
    height, stops = bundle.form(name).rows // len(counts), np.cumsum(counts)
    found = np.empty((len(x), height), np.float32)
    for expert in np.flatnonzero(counts):
        rows = slice(stops[expert] - counts[expert], stops[expert])
        own = slice(expert * height, (expert + 1) * height)
        found[rows] = x[rows] @ bundle.read_weight(name, own).T
    return found


def _key_fit(
    listening: Listening, place: tuple[int, int], sinks: int
) -> tuple[NDArray[np.bool_], NDArray[np.float16]]:
    """As `_key_fits`, of one layer."""
    moments, both = listening.moments[place], list[tuple[Floats, Floats]]()
    for rotated in (False, True):
        turned = hadamard_both(moments) if rotated else moments
        feedback, left = feedback_of(turned)
        noise = (listening.ranges(place, sinks, rotated=rotated) * left).sum(axis=-1)
        both.append((noise, feedback))
    better = both[1][0] < both[0][0]
    feedback = np.where(better[:, None, None], both[1][1], both[0][1])
    return better, feedback.astype(np.float16)


def hadamard_both(moments: Floats) -> Floats:
    """Second moments [..., D, D] of what was rotated."""
    half = hadamard(moments.astype(np.float32)).swapaxes(-1, -2)
    return hadamard(half).astype(np.float64)


def feedback_of(moments: Floats) -> tuple[Floats, Floats]:
    """What of a channel's error is taken off those behind it, [..., D, D], and what is left of it.

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
    """[L, Hk] of every class, were every head's pages of one form."""
    classes = backend.bundle.config.cache_classes
    asked = spec_of(
        class_fields(backend.bundle.config, (form,) * backend.bundle.config.streams),
        plan=KvPlan(k_bits=8, v_bits=8),
        context_tokens=len(ids),
        chunk_tokens=CHUNK_TOKENS,
        threads=backend.threads,
        policy="oldest",
        observed=True,
    )
    cache = open_cache(asked.resolved(), engine=backend.cache_kind)
    noise = [np.zeros((one.shape.num_layers, one.shape.num_kv_heads)) for one in classes]
    try:
        for start in range(0, len(ids), CHUNK_TOKENS):
            part = ids[start : start + CHUNK_TOKENS]
            forward_chain(backend, cache, part, np.arange(0))
            noise = [
                so_far + _noise_of(own) for so_far, own in zip(noise, cache.parts, strict=True)
            ]
    finally:
        cache.close()
    return noise


def _noise_of(cache: Cache) -> Floats:
    """As `_value_noise`, of one class at one place of the text, summed over pages."""
    attention = cache.evidence().attention
    assert attention is not None
    return attention.value_error.sum(axis=2, dtype=np.float64)
