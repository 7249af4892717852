"""Fits matrices that predict later layers' keys and values from an early layer's stream.

This is KV Prediction (Horton et al., arXiv 2410.08391). For each number of computed layers, and for
each layer after them: the best linear map from the stream after the computed ones to the keys and
values of the later one, before key norm and rotation. It is ridge regression towards the layer's
own matrix, over Gram matrices summed in float64, text by text. (The paper trains such maps; a
closed form needs seconds.) Tokens weigh as much as they are looked at; the first ones, which are
computed, weigh nothing.

In memory are one text's streams, keys and values, one layer's attention weights and inner products
with their temporaries, a square matrix of the hidden size for each candidate, and at most one of
the model's matrices beside its embedding, as float32.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.config import AttentionParams
from kvq.files import replace_file
from kvq.reference.linear import pack
from kvq_export.fit import quality
from kvq_export.write.weights import quantize
from kvq_export.write.writer import stored_blocks, write_manifest
from kvq_models.reference import PlainAttention, forward
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.file_hashes import file_sha256
from kvq_runtime.bundle.manifest import MAPS_FILE, FileInfo, Manifest
from kvq_runtime.engine import Engine

FIT_TOKENS = 20_000
TEXT_TOKENS = 1024
SINK_TOKENS = 4
# Penalty, as a share of the mean of a Gram matrix's diagonal.
RIDGE = 1e-3
# Nats per token that `auto` lets the text after a prompt lose.
AUTO_NATS = 0.05
# Passages of the report, tokens of their prompts, and tokens after these.
PASSAGES, PROMPT_TOKENS, SCORED_TOKENS = 8, 512, 64

Floats = NDArray[np.float64]
Maps = dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]]
Step = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """Holds token ids of a prompt, and those that follow it in the text."""

    prompt: Sequence[int]
    following: Sequence[int]


class WatchedAttention(PlainAttention):
    """Remembers the keys and values of every layer, and how much each token is looked at."""

    def __init__(self, first_kv: int) -> None:
        super().__init__()
        self.kv: dict[int, NDArray[np.float32]] = {}
        self.received: Floats = np.zeros(0)
        self._first_kv = first_kv

    def attend(
        self, params: AttentionParams, qkv: np.ndarray, *args: Any, **kwargs: Any
    ) -> np.ndarray:
        """Remembers keys and values; layers are alike, so none reads another's keys."""
        assert not kwargs.get("shared")
        self.kv[params.layer] = qkv[:, self._first_kv :].astype(np.float32)
        return super().attend(params, qkv, *args, **kwargs)

    def observe(self, params: AttentionParams, query: np.ndarray, weights: np.ndarray) -> None:
        """Sums over layers, heads and queries; fewer queries can look at late tokens."""
        total = weights.sum(axis=(0, 1, 2), dtype=np.float64)
        share = total / np.arange(len(total), 0, -1)
        self.received = self.received + share if params.layer else share

    def weights(self) -> Floats:
        """Returns what each token weighs in a fit, 1 on average, 0 for the first ones."""
        weights = self.received / self.received[SINK_TOKENS:].mean()
        weights[:SINK_TOKENS] = 0
        return weights


def candidates(num_layers: int) -> tuple[int, ...]:
    """Returns numbers of computed layers worth trying: a third to all but one, six at most."""
    counts = range(max(1, num_layers // 3), num_layers)
    return tuple(counts[:: -(-len(counts) // 6)])


def fit(
    bundle: Bundle, texts: Iterable[Sequence[int]], counts: Sequence[int]
) -> tuple[dict[int, Maps], int]:
    """Fits maps after each of `counts` computed layers, from token sequences `texts`.

    Returns them by number of computed layers, then by layer, and the number of tokens. A map is a
    matrix [2 Hk D, hidden] and a bias [2 Hk D], float32.
    """
    config = bundle.config
    first_kv = config.first_attention.width
    size, rows = config.hidden_size + 1, 2 * config.first_attention.kv_width
    grams = {count: np.zeros((size, size)) for count in counts}
    crosses = {
        (count, layer): np.zeros((size, rows))
        for count in counts
        for layer in range(count, config.num_layers)
    }
    tokens = 0
    for ids in texts:
        streams: dict[int, Floats] = {}

        def watch(layer: int, hidden: np.ndarray, streams: dict[int, Floats] = streams) -> None:
            if layer in grams:
                wide = hidden.astype(np.float64)
                scale = np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + config.norm_eps)
                streams[layer] = np.hstack([wide / scale, np.ones((len(wide), 1))])

        attention = WatchedAttention(first_kv)
        positions = np.arange(len(ids))
        read = bundle.read_weight  # not cached: that would be four bytes a parameter
        forward(config, read, np.array(ids), positions, attention, slice(-1, None), watch=watch)
        weights = attention.weights()
        for count, stream in streams.items():
            weighted = stream * weights[:, None]
            grams[count] += weighted.T @ stream
            for layer in range(count, config.num_layers):
                crosses[count, layer] += weighted.T @ attention.kv[layer]
        tokens += len(ids)
    maps: dict[int, Maps] = {}
    for count in counts:
        maps[count] = {
            layer: _solve(bundle, layer, grams[count], crosses[count, layer])
            for layer in range(count, config.num_layers)
        }
    return maps, tokens


def _solve(
    bundle: Bundle, layer: int, gram: Floats, cross: Floats
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the map of a layer whose norm scales the stream: its own matrix, changed by ridge."""
    config = bundle.config
    kv_rows = slice(config.first_attention.width, None)
    matrix = bundle.read_weight(f"layers.{layer}.qkv", kv_rows).astype(np.float64)
    bias = np.zeros(len(matrix))
    if config.layers[layer].attention.qkv_bias:
        bias = bundle.read_weight(f"layers.{layer}.qkv_bias")[kv_rows].astype(np.float64)
    norm = np.append(bundle.read_weight(f"layers.{layer}.attn_norm").astype(np.float64), 1.0)
    solution = ridge(
        norm[:, None] * gram * norm, norm[:, None] * cross, np.vstack([matrix.T, bias])
    )
    return solution[:-1].T.astype(np.float32), solution[-1].astype(np.float32)


def ridge(gram: Floats, cross: Floats, start: Floats) -> Floats:
    """Returns W [n, k] with the least sum of |X W - Y|^2 + lambda |W - start|^2.

    `gram` = X^T X [n, n], `cross` = X^T Y [n, k]; lambda is `RIDGE` of the mean of the diagonal.
    """
    penalty: Floats = RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    return start + np.linalg.solve(gram + penalty, cross - gram @ start)


def store(folder: Path, bundle: Bundle, maps: Maps) -> FileInfo:
    """Writes `maps` at 8 bits into `folder`; returns size and hash of the file."""
    form, arrays = bundle.map_form(), dict[str, np.ndarray]()
    for layer, (weights, bias) in maps.items():
        arrays[f"layers.{layer}.map"] = pack(form, stored_blocks(quantize(weights, form.format)))
        arrays[f"layers.{layer}.map_bias"] = bias
    return store_arrays(folder / MAPS_FILE, arrays)


def store_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> FileInfo:
    """Writes or replaces a file of named arrays; returns its size and hash."""
    with replace_file(path, private=False) as stream:
        write: Any = np.savez  # its keywords are names of arrays
        write(stream, **arrays)
    return FileInfo(num_bytes=path.stat().st_size, sha256=file_sha256(path))


def add_maps(
    folder: Path, manifest: Manifest, predict: str, tokenizer: Tokenizer, threads: int, step: Step
) -> Manifest:
    """Fits maps for the bundle in `folder`; returns the manifest with them and what they cost.

    `predict` is a number of computed layers, or auto: the fewest that lose at most `AUTO_NATS`.
    Where all lose more, none are stored and the report says so.
    """
    bundle = Bundle.open(folder, verify="size")
    layers = bundle.config.num_layers
    counts = candidates(layers) if predict == "auto" else (int(predict),)
    step("fitting what predicts keys and values")
    maps, tokens = fit(bundle, calibration_texts(tokenizer), counts)
    passages = held_out_passages(tokenizer, bundle.config.context_length)
    rows: list[dict[str, Any]] = []
    chosen: Manifest | None = None
    for count in reversed(counts):
        step(f"what predicting after layer {count} of {layers} costs")
        info = store(folder, bundle, maps[count])
        files = {**manifest.files, MAPS_FILE: info}
        fitted = replace(manifest, files=files, prediction={"layers": count})
        write_manifest(folder, fitted)
        row = _cost(folder, passages, count, threads)
        rows.insert(0, row)
        lost = row["fitted"]["nll"] - row["exact_nll"]
        if predict == "auto" and lost > AUTO_NATS:
            break
        chosen = fitted
    report = {
        "limit_nats": AUTO_NATS if predict == "auto" else None,
        "fit_tokens": tokens,
        "passages": len(passages),
        "rows": rows,
    }
    (folder / MAPS_FILE).unlink()
    if chosen is None or chosen.prediction is None:
        return replace(manifest, quality={**(manifest.quality or {}), "prediction": report})
    count = int(chosen.prediction["layers"])
    files = {**manifest.files, MAPS_FILE: store(folder, bundle, maps[count])}
    return replace(manifest, files=files, prediction={"layers": count, **report})


def _cost(folder: Path, passages: Sequence[Passage], count: int, threads: int) -> dict[str, Any]:
    """Measures texts after a computed prompt, two kinds of predicted ones, and none."""
    with Engine(Bundle.open(folder, verify="size"), threads=threads) as engine:
        ways = {
            "own": f"prefix:layers={count},maps=own",
            "fitted": f"prefix:layers={count}",
        }
        return {"layers": count} | measure(engine, passages, ways)


def measure(
    engine: Engine, passages: Sequence[Passage], ways: Mapping[str, str], **options: Any
) -> dict[str, Any]:
    """Returns the mean nats per token after computed prompts and after none, and each way's cost.

    `ways` are arguments of `predict` by name, `options` are a session's. Per token that follows,
    `nll` is in nats, and `kld` is the divergence from the model after the computed prompt. `share`
    is how far `nll` lies on the way from the computed prompt to none, 0 where a prompt is worth
    nothing.
    """
    longest = max(len(passage.prompt) + len(passage.following) for passage in passages)
    options = {"context_tokens": longest} | options
    exact_nll = no_prompt_nll = 0.0
    nll, kld = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for passage in passages:
        truth, nats = _read_passage(engine, passage, "off", options)
        exact_nll += nats / len(passages)
        for name, way in ways.items():
            predicted, nats = _read_passage(engine, passage, way, options)
            nll[name] += nats / len(passages)
            divergence = (np.exp(truth) * (truth - predicted)).sum() / len(truth)
            kld[name] += float(divergence) / len(passages)
        promptless = Passage(prompt=passage.prompt[:1], following=passage.following)
        no_prompt_nll += _read_passage(engine, promptless, "off", options)[1] / len(passages)
    worth = no_prompt_nll - exact_nll
    return {"exact_nll": exact_nll, "no_prompt_nll": no_prompt_nll} | {
        name: {
            "nll": nll[name],
            "kld": kld[name],
            "share": (nll[name] - exact_nll) / worth if worth > 0 else 0.0,
        }
        for name in ways
    }


def _read_passage(
    engine: Engine, passage: Passage, predict: str, options: Mapping[str, Any]
) -> tuple[Floats, float]:
    """Returns log-probabilities float64 [n, V] of what follows, and its mean nats."""
    with engine.session(predict=predict, **options) as session:
        session.prefill(passage.prompt)
        first = session.sequence.state().logits
        rest = list(session.logits(passage.following[:-1])) if len(passage.following) > 1 else []
    assert first is not None
    logits = np.concatenate([first[None], *rest]).astype(np.float64)
    logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return logs, -float(logs[np.arange(len(logs)), list(passage.following)].mean())


def calibration_texts(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields token sequences of prose and code to fit to, `FIT_TOKENS` tokens in all."""
    remaining = FIT_TOKENS
    for part in _parts(tokenizer, [quality.quality_text(), *_code()["fit"]]):
        if remaining > 0:
            remaining -= len(part)
            yield part


def _code() -> Mapping[str, Sequence[str]]:
    """Reads the program texts that ship: those to fit to, and those that a fit is judged on."""
    file = resources.files("kvq_export").joinpath("prediction_code.json")
    return json.loads(file.read_text(encoding="utf-8"))


def _parts(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yields parts of `TEXT_TOKENS` tokens of each text, without very short ends."""
    for text in texts:
        ids = tokenizer.encode(text, start=True)
        for start in range(0, len(ids), TEXT_TOKENS):
            part = ids[start : start + TEXT_TOKENS]
            if len(part) > 2 * SINK_TOKENS:
                yield part


def held_out_passages(tokenizer: Tokenizer, context_tokens: int) -> list[Passage]:
    """Returns prompts and what follows, from sources that nothing was fitted to."""
    length = min(PROMPT_TOKENS, context_tokens - SCORED_TOKENS)
    passages: list[Passage] = []
    for ids in _parts(tokenizer, _code()["held_out"]):
        if len(ids) >= length + SCORED_TOKENS and len(passages) < PASSAGES:
            stop = length + SCORED_TOKENS
            passages.append(Passage(prompt=ids[:length], following=ids[length:stop]))
    return passages
