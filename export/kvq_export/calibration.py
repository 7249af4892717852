"""What an error in one layer's keys or values costs the model's predictions.

Errors of attention outputs are cheap to know at run time; what they cost in the end is not, and
differs between layers by orders of magnitude (Lee et al., arXiv 2502.04420, KVTuner; the layer
sensitivities of KV-AdaQuant, arXiv 2502.15075, are norms of weights instead). So it is measured
once, on the finished bundle: a text is read into 8-bit pages, then one layer's keys are read at
fewer bits, its values, or half of its pages are evicted, and the following tokens' predictions
diverge. Divided by the error that probes among the same tokens see, that is the price, in nats per
unit of error; of eviction, per unit and page gone, because evictions add up as
`kvq.policies.budget` says. Errors differ a thousandfold from token to token, so a price is a ratio
of means over the whole text, and what of it is chance is known from the text's pieces: by that
much it is taken towards the prices of the other layers (`shrunken`). The price is a layer's; of its
heads each pays by how much of an error the output projection passes on.

The graph rounds activations, and answers every change of the cache with noise of its own, next to
which all but the dearest layers look alike. A small model is therefore computed exactly, over as
much text as a minute or two allow; a larger one by its graph, and what that noise makes is
subtracted. What was measured of a checkpoint may lie beside it and is then taken as it is.

Before that it is found how every head's pages are best encoded, `kvq.config.PageForm`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.config import PAGE_TOKENS, Budget, KvPlan, PageForm
from kvq.files import replace_file
from kvq.formats import NEWEST_PROBES, PAGE_VERSION, PROBE_STRIDE
from kvq.policies import MEASURED_WIDTHS, Sensitivity
from kvq.sizing import CacheSpec
from kvq_export import quality
from kvq_export.config import MEAN_BITS, WeightFormat
from kvq_models.config import ModelConfig
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import backends
from kvq_runtime.backends import forward_chain
from kvq_runtime.bundle import Bundle, file_sha256

READ_TOKENS = 768
# Tokens whose predictions are compared: at least, and where they are computed exactly at most.
LEAST_SCORED_TOKENS, SCORED_TOKENS = 128, 1024
CHUNK_TOKENS = 128
# Of so many tokens every probe is among the newest: the pieces errors are observed in.
PIECE_TOKENS = NEWEST_PROBES * PROBE_STRIDE
# Rounding in float32 moves predictions by this much whatever the cache holds.
NOISE_NATS = 1e-8
# Nothing to divide by. Squared, at two bits.
NO_ERROR = 1e-12
# Standard errors of the logarithm of a price are taken for no smaller and no larger than these.
LEAST_DOUBT, ANY_DOUBT = 1e-3, 1e3
# Stored weights times layers times scored tokens that are computed with exactly: of the embedded
# model 1024 tokens.
EXACT_WORK_BYTES = 48 << 30
# Stored weights up to here: as float32 four to eight times the bytes.
EXACT_WEIGHT_BYTES = 64 << 20
# What was measured of the checkpoint it lies beside.
KEPT_FILE = "calibration.json"

EVERY_FORM = PageForm.ROTATED_KEYS | PageForm.CHANNEL_VALUES

Floats = NDArray[np.float64]
Forms = tuple[PageForm, ...]
Calibration = tuple[Forms, Sensitivity | None]


def calibration_ids(tokenizer: Tokenizer, context_tokens: int) -> NDArray[np.int64] | None:
    """Tokens of prose and code, or None for a context too short to calibrate in."""
    code = resources.files("kvq").joinpath("reference.py").read_text(encoding="utf-8")
    limit = min(READ_TOKENS + SCORED_TOKENS, context_tokens)
    ids = tokenizer.encode(f"{quality.quality_text()}\n\n{code}", start=True)[:limit]
    return np.array(ids, np.int64) if len(ids) >= 4 * PAGE_TOKENS + LEAST_SCORED_TOKENS else None


def kept(checkpoint: Path, weights: WeightFormat | None, config: ModelConfig) -> Calibration | None:
    """What lies beside the checkpoint and was measured of these weights at these widths, if any."""
    try:
        found = json.loads((checkpoint / KEPT_FILE).read_bytes())
        if found["of"] != _identity(checkpoint, weights):
            return None
        forms = tuple(map(PageForm, found["forms"]))
        shape = config.num_layers, config.num_kv_heads
        return forms, Sensitivity.from_json(found["sensitivity"], *shape)
    except (OSError, KeyError, TypeError, ValueError):
        return None


def keep(checkpoint: Path, weights: WeightFormat | None, found: Calibration) -> None:
    """Puts what was measured beside the checkpoint, for `kept`."""
    forms, sensitivity = found
    written = {
        "of": _identity(checkpoint, weights),
        "forms": [int(form) for form in forms],
        "sensitivity": None if sensitivity is None else sensitivity.to_json(),
    }
    with replace_file(checkpoint / KEPT_FILE, private=False) as file:
        file.write(f"{json.dumps(written)}\n".encode())


def _identity(checkpoint: Path, weights: WeightFormat | None) -> dict[str, Any]:
    """What prices are true of: pages, widths (None: the default) and the checkpoint's weights.

    Where widths are mixed, which matrix has which follows from the rest.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    asked = weights or WeightFormat(mean_bits=MEAN_BITS)
    asked = replace(asked, others={}) if asked.mixed else asked
    return {
        "pages": PAGE_VERSION,
        "weights": json.loads(json.dumps(asdict(asked))),
        "sha256": {file.name: file_sha256(file) for file in files},
    }


class _Reading:
    """A text read into 8-bit pages, and what changing them does to the tokens after it."""

    def __init__(self, bundle: Bundle, ids: NDArray[np.int64], threads: int, forms: Forms) -> None:
        stored = bundle.weights_json()["bytes"]
        affordable = min(SCORED_TOKENS, EXACT_WORK_BYTES // (stored * bundle.config.num_layers))
        exact = affordable >= LEAST_SCORED_TOKENS and stored <= EXACT_WEIGHT_BYTES
        self._backend = backends.open_backend("float" if exact else "auto", bundle, threads=threads)
        most = min(affordable, quality.MAX_LOGITS // bundle.config.vocab_size) if exact else 0
        scored = max(min(len(ids) - READ_TOKENS, most), LEAST_SCORED_TOKENS)
        scored -= scored % PIECE_TOKENS
        ids = ids[: READ_TOKENS + scored]
        asked = CacheSpec(
            shape=bundle.config.cache_shape,
            plan=KvPlan(k_bits=8, v_bits=8),
            context_tokens=len(ids),
            chunk_tokens=CHUNK_TOKENS,
            threads=threads,
            policy="oldest",
            windows=tuple(layer.mixer.window_tokens for layer in bundle.config.layers),
            observed=True,
            forms=forms,
        )
        # Enough for the probes too, so that nothing is ever short.
        enough = Budget(num_bytes=2 * asked.whole_bytes + (1 << 20))
        arena = replace(asked, budget=enough).resolved()
        self.cache = Cache(arena, engine=self._backend.cache_kind)
        read, self._scored = ids[:-scored], ids[-scored:]
        for start in range(0, len(read), CHUNK_TOKENS):
            self._forward(read[start : start + CHUNK_TOKENS])
        self._state = self.cache.state()
        self.widths = self.cache.columns()[1]
        self.evidence = self.cache.evidence()
        assert self.evidence.attention is not None
        self.attention = self.evidence.attention
        self._expected = quality.log_softmax(self._forward(self._scored))

    def _forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits of all of `ids`, which the cache then holds too."""
        chunks = [ids[start : start + CHUNK_TOKENS] for start in range(0, len(ids), CHUNK_TOKENS)]
        return np.concatenate(
            [forward_chain(self._backend, self.cache, ids, np.arange(len(ids))) for ids in chunks]
        )

    def errors(self) -> Floats:
        """What the changes do to outputs, as pieces of the scored tokens see them: [3, L, pieces].

        Of keys and of values at the narrowest width, and of the older half of the pages evicted:
        squared and summed over a layer's heads and pages, of eviction times the pages gone.
        """
        self.cache.load_state(self._state)
        pages, seen = self.widths.shape[2], []
        half = pages // 2
        narrow = 4.0 ** (MEASURED_WIDTHS[0] - MEASURED_WIDTHS[-1])
        for start in range(0, len(self._scored), PIECE_TOKENS):
            self._forward(self._scored[start : start + PIECE_TOKENS])
            attention = self.cache.evidence().attention
            assert attention is not None
            parts = (
                narrow * attention.key_error[..., :pages],
                narrow * attention.value_error[..., :pages],
                half * attention.evict_error[..., :half],
            )
            seen.append([part.sum(axis=(1, 2), dtype=np.float64) for part in parts])
        return np.stack(seen, axis=-1)

    def divergence(self, layer: int, columns: range, k_bits: int, v_bits: int) -> Floats:
        """Mean nats per token [pieces] once one layer's pages are read at these widths."""
        self.cache.load_state(self._state)
        heads = range(self.widths.shape[1])
        self.cache.demote(
            np.array([(layer, h, c, k_bits, v_bits) for h in heads for c in columns], np.int32)
        )
        found = quality.log_softmax(self._forward(self._scored))
        return quality.divergences(self._expected, found).reshape(-1, PIECE_TOKENS).mean(axis=1)

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
        errors = reading.errors()
        nats, evict = _divergences(reading, progress)
    finally:
        reading.close()
    means = np.maximum(nats.mean(axis=-1), NOISE_NATS)
    means[:, 0] = 0
    # Whatever changes in the cache, rounded activations change with it: what the least harmful of
    # all changes does is no price of it.
    noise = means[:, 1].min()
    shares = _output_shares(bundle)
    key, value, gone = (
        shares * shrunken(*ratios(paid - noise, error, 0.05 * noise))[:, None]
        for paid, error in zip((*nats[:, -1], evict), errors, strict=True)
    )
    key_norm, value_norm = _weight_norms(bundle)
    return Sensitivity(
        key=key,
        value=value,
        evict=gone,
        key_bits_nats=means[0].T,
        value_bits_nats=means[1].T,
        key_norm=key_norm,
        value_norm=value_norm,
    )


def _divergences(reading: _Reading, progress: Callable[[int, int], None]) -> tuple[Floats, Floats]:
    """Nats of a layer's keys and values at each width [2, widths, L, n], of evictions [L, n].

    In n pieces of the text, as `_Reading.divergence` has them; at 8 bits none.
    """
    layers, _, pages, _ = reading.widths.shape
    sides, evictions = [], []
    for layer in range(layers):
        keys = [reading.divergence(layer, range(pages), bits, 8) for bits in MEASURED_WIDTHS[1:]]
        values = [reading.divergence(layer, range(pages), 8, bits) for bits in MEASURED_WIDTHS[1:]]
        sides.append(np.array([[np.zeros_like(side[0]), *side] for side in (keys, values)]))
        evictions.append(reading.divergence(layer, range(pages // 2), 0, 0))
        progress(layer + 1, layers)
    return np.stack(sides, axis=2), np.array(evictions)


def ratios(nats: Floats, errors: Floats, least_nats: float) -> tuple[Floats, Floats]:
    """Prices [L] from pieces of a text [L, n], and the standard errors of their logarithms.

    A price is the mean of `nats`, at least `least_nats`, over that of `errors`; its standard error
    that of a ratio estimate, from what each piece lies off it (Cochran, Sampling Techniques, 1977,
    section 6.4). A mean of single ratios would be ruled by pieces that see next to no error.
    """
    paid = np.maximum(nats.mean(axis=1), least_nats)
    seen = errors.mean(axis=1)
    prices = paid / np.maximum(seen, NO_ERROR)
    off = (nats - prices[:, None] * errors).std(axis=1, ddof=1) / np.sqrt(nats.shape[1])
    return prices, np.where(seen > NO_ERROR, off / paid, ANY_DOUBT)


def shrunken(prices: Floats, doubts: Floats) -> Floats:
    """Prices [L] taken towards their mean, in logarithms, the further the less is known of them.

    `doubts` [L]: standard errors of their logarithms. Empirical Bayes: with a variance t between
    layers, a price known to s keeps t / (t + s^2) of its distance to the mean that weighs each by
    1 / (t + s^2) (Efron and Morris, 1975); t by moments (DerSimonian and Laird, 1986), where layers
    of which nothing is known hardly count. Exact where nothing is in doubt.
    """
    logs, chance = np.log(prices), np.square(np.clip(doubts, LEAST_DOUBT, ANY_DOUBT))
    known = 1 / chance
    spread = (known * np.square(logs - np.average(logs, weights=known))).sum() - (len(logs) - 1)
    scale = known.sum() - np.square(known).sum() / known.sum()
    between = max(0.0, spread / scale) if scale > 0 else 0.0
    mean = np.average(logs, weights=1 / (between + chance))
    return np.exp(mean + between / (between + chance) * (logs - mean))


def _output_shares(bundle: Bundle) -> Floats:
    """What the output projection passes on of a unit of error [L, Hk], 1 on average over a layer.

    That is the squared norm of its columns for the query heads of each KV head.
    """
    config = bundle.config
    shares = np.zeros((config.num_layers, config.num_kv_heads))
    for layer, row in enumerate(shares):
        squares = np.square(bundle.read_weight(f"layers.{layer}.o"), dtype=np.float64).sum(axis=0)
        row[:] = squares.reshape(len(row), -1).sum(axis=1)
    return shares / np.maximum(shares.mean(axis=1, keepdims=True), 1e-12)


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
