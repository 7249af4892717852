"""Matrices that predict later layers' keys and values from an early layer's stream (KV Prediction).

For each number of computed layers and each layer after them the best linear map from what leaves
the former to the keys and values of the latter, before key norm and rotation: ridge regression
towards the layer's own matrix, over Gram matrices summed in float64 text by text (Horton et al.,
arXiv 2410.08391, train such maps; a closed form needs seconds). Tokens weigh as much as they are
looked at, and the first ones, which are computed, weigh nothing. In memory are one text's streams,
keys and values, one layer's attention weights and inner products with their temporaries, per
candidate a square matrix of the hidden size, and at most one of the model's matrices beside its
embedding, as float32; `Fit.peak_bytes` says it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.config import AttentionParams
from kvq.reference_linear import pack
from kvq_export import continuations, quality
from kvq_export.continuations import Passage
from kvq_export.weights import quantize
from kvq_export.writer import stored, write_manifest
from kvq_models.reference import PlainAttention, forward
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle import Bundle
from kvq_runtime.engine import Engine
from kvq_runtime.file_hashes import file_sha256
from kvq_runtime.manifest import MAPS_FILE, FileInfo, Manifest

FIT_TOKENS = 20_000
TEXT_TOKENS = 1024
SINK_TOKENS = 4
# Of the mean of a Gram matrix's diagonal.
RIDGE = 1e-3
# Nats per token that `auto` lets the continuation of a prompt lose.
AUTO_NATS = 0.05
# Passages of the report, of so many tokens and so many that follow.
PASSAGES, PROMPT_TOKENS, SCORED_TOKENS = 8, 512, 64

Floats = NDArray[np.float64]
Maps = dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]]
Step = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Maps by number of computed layers, then by layer: [2 Hk D, hidden] and [2 Hk D] float32."""

    maps: Mapping[int, Maps]
    tokens: int
    peak_bytes: int


class Watched(PlainAttention):
    """Keeps what attention is given, and how much each token is looked at."""

    def __init__(self, first_kept: int) -> None:
        super().__init__()
        self.kept: dict[int, NDArray[np.float32]] = {}
        self.received: Floats = np.zeros(0)
        self._first_kept = first_kept

    def attend(
        self, params: AttentionParams, qkv: np.ndarray, *given: Any, **named: Any
    ) -> np.ndarray:
        """See `Memory`; of a model whose layers are alike, so that none reads another's keys."""
        assert not named.get("shared")
        self.kept[params.layer] = qkv[:, self._first_kept :].astype(np.float32)
        return super().attend(params, qkv, *given, **named)

    def saw(self, params: AttentionParams, query: np.ndarray, weights: np.ndarray) -> None:
        """Sums over layers, heads and queries; late tokens have fewer who could look."""
        seen = weights.sum(axis=(0, 1, 2), dtype=np.float64)
        share = seen / np.arange(len(seen), 0, -1)
        self.received = self.received + share if params.layer else share

    def weights(self) -> Floats:
        """What each token weighs in a fit, 1 on average; the first ones are computed."""
        found = self.received / self.received[SINK_TOKENS:].mean()
        found[:SINK_TOKENS] = 0
        return found


def candidates(num_layers: int) -> tuple[int, ...]:
    """Numbers of computed layers worth trying: a third to all but one, six at most."""
    counts = range(max(1, num_layers // 3), num_layers)
    return tuple(counts[:: -(-len(counts) // 6)])


def fit(bundle: Bundle, texts: Iterable[Sequence[int]], counts: Sequence[int]) -> Fit:
    """Maps after each of `counts` computed layers, from token sequences `texts`."""
    config = bundle.config
    first_kept = config.num_heads * config.head_dim
    size, rows = config.hidden_size + 1, 2 * config.num_kv_heads * config.head_dim
    grams = {count: np.zeros((size, size)) for count in counts}
    crosses = {
        (count, layer): np.zeros((size, rows))
        for count in counts
        for layer in range(count, config.num_layers)
    }
    tokens = text_bytes = 0
    for ids in texts:
        streams: dict[int, Floats] = {}

        def watch(layer: int, hidden: np.ndarray, streams: dict[int, Floats] = streams) -> None:
            if layer in grams:
                wide = hidden.astype(np.float64)
                scale = np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + config.norm_eps)
                streams[layer] = np.hstack([wide / scale, np.ones((len(wide), 1))])

        attention = Watched(first_kept)
        positions = np.arange(len(ids))
        read = bundle.read_weight  # not kept: four bytes a parameter of all layers at once
        forward(config, read, np.array(ids), positions, attention, slice(-1, None), watch=watch)
        weights = attention.weights()
        for count, stream in streams.items():
            weighted = stream * weights[:, None]
            grams[count] += weighted.T @ stream
            for layer in range(count, config.num_layers):
                crosses[count, layer] += weighted.T @ attention.kept[layer]
        tokens += len(ids)
        held = [*streams.values(), *attention.kept.values(), *attention.kept.values()]
        passing = 3 * 4 * len(ids) * (config.num_heads * len(ids) + 2 * config.widest_feed)
        text_bytes = max(text_bytes, passing + sum(array.nbytes for array in held))
    sums = sum(array.nbytes for array in (*grams.values(), *crosses.values()))
    maps: dict[int, Maps] = {}
    for count in counts:
        maps[count] = {
            layer: _solve(bundle, layer, grams[count], crosses[count, layer])
            for layer in range(count, config.num_layers)
        }
    matrices = bundle.form("embed"), bundle.form("layers.0.down")
    weights = sum(4 * form.rows * form.columns for form in matrices)
    return Fit(maps=maps, tokens=tokens, peak_bytes=sums + text_bytes + weights)


def _solve(
    bundle: Bundle, layer: int, gram: Floats, cross: Floats
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The map of a layer whose norm scales the stream: its own matrix, and what ridge adds."""
    config = bundle.config
    kept = slice(config.num_heads * config.head_dim, None)
    own = bundle.read_weight(f"layers.{layer}.qkv", kept).astype(np.float64)
    bias = np.zeros(len(own))
    if config.layers[layer].attention.qkv_bias:
        bias = bundle.read_weight(f"layers.{layer}.qkv_bias")[kept].astype(np.float64)
    norm = np.append(bundle.read_weight(f"layers.{layer}.attn_norm").astype(np.float64), 1.0)
    found = ridge(norm[:, None] * gram * norm, norm[:, None] * cross, np.vstack([own.T, bias]))
    return found[:-1].T.astype(np.float32), found[-1].astype(np.float32)


def ridge(gram: Floats, cross: Floats, start: Floats) -> Floats:
    """W [n, k] with the least sum of |X W - Y|^2 + lambda |W - start|^2.

    `gram` = X^T X [n, n], `cross` = X^T Y [n, k]; lambda is `RIDGE` of the mean of the diagonal.
    """
    penalty: Floats = RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    return start + np.linalg.solve(gram + penalty, cross - gram @ start)


def store(folder: Path, bundle: Bundle, maps: Maps) -> FileInfo:
    """Writes `maps` at 8 bits into `folder`; size and hash of the file."""
    form, arrays = bundle.map_form(), dict[str, np.ndarray]()
    for layer, (weights, bias) in maps.items():
        arrays[f"layers.{layer}.map"] = pack(form, stored(quantize(weights, form.format)))
        arrays[f"layers.{layer}.map_bias"] = bias
    return store_arrays(folder / MAPS_FILE, arrays)


def store_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> FileInfo:
    """Writes a file of named arrays; its size and hash."""
    with path.open("wb") as stream:
        write: Any = np.savez  # its keywords are names of arrays
        write(stream, **arrays)
    return FileInfo(num_bytes=path.stat().st_size, sha256=file_sha256(path))


def predicting(
    folder: Path, manifest: Manifest, asked: str, tokenizer: Tokenizer, threads: int, step: Step
) -> Manifest:
    """The manifest with maps fitted for the bundle in `folder`, and what they cost.

    `asked` is a number of computed layers, or auto: the fewest that lose at most `AUTO_NATS`; where
    all lose more, none are stored and the report says so.
    """
    bundle = Bundle.open(folder, verify="size")
    layers = bundle.config.num_layers
    counts = candidates(layers) if asked == "auto" else (int(asked),)
    step("fitting what predicts keys and values")
    found = fit(bundle, calibration_texts(tokenizer), counts)
    passages = held_out_passages(tokenizer, bundle.config.context_length)
    rows: list[dict[str, Any]] = []
    chosen: Manifest | None = None
    for count in reversed(counts):
        step(f"what predicting after layer {count} of {layers} costs")
        info = store(folder, bundle, found.maps[count])
        files = {**manifest.files, MAPS_FILE: info}
        fitted = replace(manifest, files=files, prediction={"layers": count})
        write_manifest(folder, fitted)
        row = _cost(folder, passages, count, threads)
        rows.insert(0, row)
        lost = row["fitted"]["nll"] - row["exact_nll"]
        if asked == "auto" and lost > AUTO_NATS:
            break
        chosen = fitted
    report = {
        "limit_nats": AUTO_NATS if asked == "auto" else None,
        "fit_tokens": found.tokens,
        "fit_peak_bytes": found.peak_bytes,
        "passages": len(passages),
        "rows": rows,
    }
    (folder / MAPS_FILE).unlink()
    if chosen is None or chosen.prediction is None:
        return replace(manifest, quality={**(manifest.quality or {}), "prediction": report})
    count = int(chosen.prediction["layers"])
    files = {**manifest.files, MAPS_FILE: store(folder, bundle, found.maps[count])}
    return replace(manifest, files=files, prediction={"layers": count, **report})


def _cost(folder: Path, passages: Sequence[Passage], count: int, threads: int) -> dict[str, Any]:
    """Continuations after a computed prompt, two kinds of predicted ones, and none."""
    with Engine(Bundle.open(folder, verify="size"), threads=threads) as engine:
        ways = {
            "own": f"prefix:layers={count},maps=own",
            "fitted": f"prefix:layers={count}",
        }
        found = continuations.measure(engine, passages, ways)
    return {"layers": count, "exact_nll": found.exact_nll, "no_prompt_nll": found.no_prompt_nll} | {
        name: {"nll": one.nll, "kld": one.kld, "share": one.share}
        for name, one in found.ways.items()
    }


def calibration_texts(tokenizer: Tokenizer) -> Iterable[list[int]]:
    """Token sequences to fit to, `FIT_TOKENS` in all."""
    return _texts(tokenizer, ("kvq", "kvq_models"), FIT_TOKENS)


def _texts(tokenizer: Tokenizer, packages: Sequence[str], most: int) -> Iterable[list[int]]:
    """Sequences of the report's prose and the packages' sources, `most` tokens in all."""
    texts = [quality.quality_text()] if packages[0] == "kvq" else []
    for package in packages:
        files = (file for file in resources.files(package).iterdir() if file.name.endswith(".py"))
        texts += [file.read_text(encoding="utf-8") for file in sorted(files, key=lambda f: f.name)]
    left = most
    for text in texts:
        ids = tokenizer.encode(text, start=True)
        for start in range(0, len(ids), TEXT_TOKENS):
            part = ids[start : start + TEXT_TOKENS]
            if len(part) > 2 * SINK_TOKENS and left > 0:
                left -= len(part)
                yield part


def held_out_passages(tokenizer: Tokenizer, context_tokens: int) -> list[Passage]:
    """Prompts and what follows, from sources that nothing was fitted to."""
    length = min(PROMPT_TOKENS, context_tokens - SCORED_TOKENS)
    found: list[Passage] = []
    for ids in _texts(tokenizer, ("kvq_export", "kvq_runtime"), 1 << 30):
        if len(ids) >= length + SCORED_TOKENS and len(found) < PASSAGES:
            stop = length + SCORED_TOKENS
            found.append(Passage(prompt=ids[:length], following=ids[length:stop]))
    return found
