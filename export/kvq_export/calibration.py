"""What an error in one layer's keys or values costs the model's predictions.

Errors of attention outputs are cheap to know at run time; what they cost in the end is not, and
differs between layers by orders of magnitude (Lee et al., arXiv 2502.04420, KVTuner; the layer
sensitivities of KV-AdaQuant, arXiv 2502.15075, are norms of weights instead). So it is measured
once, on the finished bundle: a text is read into 8-bit pages, then the keys of one KV head are read
at fewer bits, its values, or half of its pages are evicted, and the divergence of the following
tokens' predictions is the price. Divided by the error the probes saw, it is nats per unit of error;
of eviction, per unit and page gone, because evictions add up as `kvq.policies.budget` says. One
text says little of a head that it does not use: prices go half way, in logarithms, to their
layer's.

The graph rounds activations, and answers every change of the cache with noise of its own, next to
which all but the dearest layers look alike. A model whose weights fit memory as float32 is
therefore computed exactly; a larger one by its graph, all heads of a layer together, and what that
noise makes is subtracted.

Before that it is found how every head's pages are best encoded, `kvq.config.PageForm`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.config import PAGE_TOKENS, Budget, KvPlan, PageForm
from kvq.policies import MEASURED_WIDTHS, Attention, Sensitivity
from kvq.sizing import CacheSpec
from kvq_export import quality
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import backends
from kvq_runtime.backends import forward_chain
from kvq_runtime.bundle import Bundle

READ_TOKENS = 768
SCORED_TOKENS = 128
CHUNK_TOKENS = 128
# Rounding in float32 moves predictions by this much whatever the cache holds.
NOISE_NATS = 1e-8
# Stored weights up to here are computed with exactly: four to eight times the bytes as float32.
EXACT_WEIGHT_BYTES = 128 << 20
# An eviction error below this share of the output's square is as good as none.
FAINT = 1e-4

EVERY_FORM = PageForm.ROTATED_KEYS | PageForm.CHANNEL_VALUES

Floats = NDArray[np.float64]
Forms = tuple[PageForm, ...]


def calibration_ids(tokenizer: Tokenizer, context_tokens: int) -> NDArray[np.int64] | None:
    """Tokens of prose and code, or None for a context too short to calibrate in."""
    code = resources.files("kvq").joinpath("reference.py").read_text(encoding="utf-8")
    limit = min(READ_TOKENS + SCORED_TOKENS, context_tokens)
    ids = tokenizer.encode(f"{quality.quality_text()}\n\n{code}", start=True)[:limit]
    return np.array(ids, np.int64) if len(ids) >= 4 * PAGE_TOKENS + SCORED_TOKENS else None


class _Reading:
    """A text read into 8-bit pages, and what changing them does to the tokens after it."""

    def __init__(self, bundle: Bundle, ids: NDArray[np.int64], threads: int, forms: Forms) -> None:
        self.exact = bundle.weights_json()["bytes"] <= EXACT_WEIGHT_BYTES
        name = "float" if self.exact else "auto"
        self._backend = backends.open_backend(name, bundle, threads=threads)
        asked = CacheSpec(
            shape=bundle.config.cache_shape,
            plan=KvPlan(k_bits=8, v_bits=8),
            context_tokens=len(ids),
            chunk_tokens=CHUNK_TOKENS,
            threads=threads,
            policy="oldest",
            windows=tuple(layer.window_tokens for layer in bundle.config.layers),
            observed=True,
            forms=forms,
        )
        # Enough for the probes too, so that nothing is ever short.
        enough = Budget(num_bytes=2 * asked.whole_bytes + (1 << 20))
        arena = replace(asked, budget=enough).resolved()
        self.cache = Cache(arena, engine=self._backend.cache_kind)
        read, self._scored = ids[:-SCORED_TOKENS], ids[-SCORED_TOKENS:]
        for start in range(0, len(read), CHUNK_TOKENS):
            self._forward(read[start : start + CHUNK_TOKENS])
        self._state = self.cache.state()
        self.widths = self.cache.columns()[1]
        self.evidence = self.cache.evidence()
        assert self.evidence.attention is not None
        self.attention = self.evidence.attention
        self._expected = quality.log_softmax(self._forward(self._scored))

    def _forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return forward_chain(self._backend, self.cache, ids, np.arange(len(ids)))

    def divergence(
        self, layer: int, heads: Sequence[int], columns: range, k_bits: int, v_bits: int
    ) -> float:
        """Mean nats per scored token once pages of a layer's heads are read at these widths."""
        self.cache.load_state(self._state)
        self.cache.demote(
            np.array([(layer, h, c, k_bits, v_bits) for h in heads for c in columns], np.int32)
        )
        found = quality.log_softmax(self._forward(self._scored))
        return max(quality.compare(self._expected, found)["mean_kld"], NOISE_NATS)

    def close(self) -> None:
        self.cache.close()
        self._backend.close()


def choose_forms(bundle: Bundle, ids: NDArray[np.int64], threads: int) -> Forms:
    """How each KV head's pages are best encoded, layer by layer: as makes their noise the least.

    That of logits is sum_d E[q_d^2] range_d^2 up to a factor, in the basis that keys are stored in;
    that of values the mean square of the ranges, of tokens or of channels.
    """
    keys, values = zip(
        *(_noise(bundle, ids, threads, form) for form in (PageForm.PLAIN, EVERY_FORM)), strict=True
    )
    turned, channels = keys[1] < keys[0], values[1] < values[0]
    chosen = turned * PageForm.ROTATED_KEYS + channels * PageForm.CHANNEL_VALUES
    return tuple(map(PageForm, chosen.ravel().tolist()))


def _noise(
    bundle: Bundle, ids: NDArray[np.int64], threads: int, form: PageForm
) -> tuple[Floats, Floats]:
    """Of keys and of values [L, Hk], were every head's pages of one form."""
    shape = bundle.config.cache_shape
    forms = (form,) * (shape.num_layers * shape.num_kv_heads)
    reading = _Reading(bundle, ids, threads, forms)
    try:
        keys, values = np.zeros((2, shape.num_layers, shape.num_kv_heads))
        for layer, query_square in enumerate(reading.attention.query_square):
            spans = reading.evidence.constants(layer)
            key_square = np.square(spans.key_range).mean(axis=1, dtype=np.float64)
            keys[layer] = (query_square * key_square).sum(axis=-1)
            values[layer] = np.square(spans.value_range).mean(axis=(1, 2), dtype=np.float64)
        return keys, values
    finally:
        reading.close()


def calibrate(
    bundle: Bundle,
    ids: NDArray[np.int64],
    threads: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    forms: Forms = (),
) -> Sensitivity:
    """Measures every layer of a bundle with a graph; `progress` gets (layers done, layers).

    `forms`: how its pages are encoded, as `choose_forms` has it.
    """
    reading = _Reading(bundle, ids, threads, forms)
    try:
        layers, heads, count, _ = reading.widths.shape
        every, pages, half = range(heads), range(count), range(count // 2)
        _, middle, least = MEASURED_WIDTHS
        together = [[head] for head in every] if reading.exact else [every]
        nats = np.zeros((layers, 2, len(MEASURED_WIDTHS)))
        paid = np.zeros((3, layers, len(together)))
        for layer in range(layers):
            nats[layer, 0, 1] = reading.divergence(layer, every, pages, middle, 8)
            nats[layer, 1, 1] = reading.divergence(layer, every, pages, 8, middle)
            for group, some in enumerate(together):
                paid[0, layer, group] = reading.divergence(layer, some, pages, least, 8)
                paid[1, layer, group] = reading.divergence(layer, some, pages, 8, least)
                paid[2, layer, group] = reading.divergence(layer, some, half, 0, 0)
            nats[layer, :, 2] = paid[:2, layer].sum(axis=-1)
            progress(layer + 1, layers)
        # Whatever changes in the cache, rounded activations change with it: what the least harmful
        # of all changes does is no price of it.
        noise = nats[..., 1].min()
        paid = np.maximum(paid - noise, 0.05 * noise)
        key, value, evict = _prices(paid, reading.attention, half)
        key_norm, value_norm = _weight_norms(bundle)
        return Sensitivity(
            key=key,
            value=value,
            evict=evict,
            key_bits_nats=nats[:, 0],
            value_bits_nats=nats[:, 1],
            key_norm=key_norm,
            value_norm=value_norm,
        )
    finally:
        reading.close()


def _prices(paid: Floats, attention: Attention, half: range) -> Floats:
    """Nats per unit of key, value and eviction error [3, L, Hk], from nats [3, L, Hk or 1].

    `half`: the pages whose eviction was paid for.
    """
    narrow = 4.0 ** (MEASURED_WIDTHS[0] - MEASURED_WIDTHS[-1])
    # A head that looks at the newest tokens alone gives old pages no error to divide by.
    faint = FAINT * attention.output_square.sum(axis=-1, dtype=np.float64)
    lost = np.maximum(attention.evict_error[..., : len(half)].sum(axis=-1), faint)
    sides = (attention.key_error, attention.value_error)
    errors = np.stack([*(narrow * error.sum(axis=-1) for error in sides), len(half) * lost])
    errors = np.maximum(errors, 1e-12)  # what no probe saw counts as next to nothing
    of_layers = (paid.sum(axis=-1) / errors.sum(axis=-1))[..., None]
    of_heads = paid / errors if paid.shape == errors.shape else of_layers
    return np.broadcast_to(np.sqrt(of_layers * of_heads), errors.shape)


def _weight_norms(bundle: Bundle) -> tuple[Floats, Floats]:
    """Frobenius norms [L] of the weights that make keys and values."""
    config = bundle.config
    queries, width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    norms = np.zeros((2, config.num_layers))
    for layer in range(config.num_layers):
        for side in range(2):
            start = queries + side * width
            rows = bundle.read_weight(f"layers.{layer}.qkv", slice(start, start + width))
            norms[side, layer] = np.linalg.norm(rows.astype(np.float64))
    return norms[0], norms[1]
