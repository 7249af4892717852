"""Weights rounded with error feedback while a calibration text is read through them.

A checkpoint is run in numpy, matrix after matrix: when the text reaches one, the second moments of
its inputs are taken, it is rounded (`gptq`), and what follows is computed with the rounded one. So
a matrix is rounded for the inputs it will have, one matrix and its moments are in memory, and the
writer gets them in the order of the file. Beside it the checkpoint itself is run over the same
text: a matrix is rounded to give from its own inputs what the checkpoint's gives from its exact
ones (`gptq.matched`), so that it makes up for what was rounded before it. Embeddings and the head
are rounded plainly: a row of an embedding is used by itself, and a head of 8 bits loses nothing.
Experts of a layer share the moments of what enters all of them, for of its own a rare one would see
too few; they make up for nothing, as the two runs may choose different ones.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import resources
from itertools import chain
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Generic, TypeVar, cast

import numpy as np
from threadpoolctl import threadpool_limits

from kvq.reference_linear import PANEL_ROWS, Blocks, PanelFormat, dequantize
from kvq_export.gptq import factor, matched, quantize_with, seen
from kvq_export.quality import Original, token_limit
from kvq_export.stand_ins import (
    Multiply,
    MultiplyGroups,
    Product,
    Rows,
    SegmentedAttention,
    Stack,
    no_logits,
)
from kvq_export.weights import joined
from kvq_export.writer import CheckpointWeights
from kvq_models.config import ModelConfig
from kvq_models.family import is_stack
from kvq_models.reference import Weights, forward
from kvq_models.tokenizer import Tokenizer

# Tokens that are read together; texts are cut there.
SEGMENT_TOKENS = 512
MOST_TOKENS = 8192
# Fewer do for narrow models: so many times the widest matrix's inputs.
TOKENS_PER_COLUMN = 8
# Of the texts that constants of weights are trained on.
TUNING_TOKENS = 256
# That a bundle is measured on, of all kinds together.
REPORT_TEXTS = 6
# Of the text, whose products are computed side by side.
PARTS = 2
# Matrices that are rounded plainly.
ENDS = ("embed", "head", "per_layer_embed")
_WAIT_S = 0.2
T = TypeVar("T")


def calibration_segments(
    tokenizer: Tokenizer, config: ModelConfig, text: str | None = None
) -> np.ndarray:
    """Token ids int64 [S, segment] of `text`; without, as many of each kind of text that ships.

    Those are prose, code and, where the tokenizer has a chat template, conversations in it.
    """
    columns = max(config.hidden_size, config.widest_feed)
    segment = min(SEGMENT_TOKENS, config.context_length)
    wanted = min(MOST_TOKENS, TOKENS_PER_COLUMN * columns) // segment
    kinds = _shipped(tokenizer) if text is None else [tokenizer.encode(text, start=True)]
    found: list[np.ndarray] = []
    for ids in kinds:
        found.append(_cut(ids, segment)[: max(1, -(-wanted // len(kinds)))])
    return _begun(np.concatenate(found), tokenizer)


def tuning_texts(tokenizer: Tokenizer, config: ModelConfig, text: str | None = None) -> np.ndarray:
    """Token ids int64 [S, T] of `text`; without, of what ships but the ends (`report_texts`)."""
    ends = REPORT_TEXTS * _report_tokens(config)
    kinds = [ids[:-ends] for ids in _shipped(tokenizer)]
    if text is not None:
        kinds = [tokenizer.encode(text, start=True)]
    tokens = min(TUNING_TOKENS, config.context_length)
    return _begun(np.concatenate([_cut(ids, tokens) for ids in kinds]), tokenizer)


def report_texts(tokenizer: Tokenizer, config: ModelConfig) -> np.ndarray:
    """Token ids int64 [S, T] that a bundle is measured on: the ends of the texts that ship.

    Calibration reads their beginnings.
    """
    tokens = _report_tokens(config)
    kinds = _shipped(tokenizer)
    ends = [_cut(ids[-REPORT_TEXTS * tokens :], tokens) for ids in kinds]
    return _begun(np.concatenate([end[: REPORT_TEXTS // len(kinds)] for end in ends]), tokenizer)


def _report_tokens(config: ModelConfig) -> int:
    return min(token_limit(config.vocab_size), config.context_length)


def _cut(ids: list[int], tokens: int) -> np.ndarray:
    """Pieces int64 [n, tokens]; a text shorter than one is read over and over."""
    return np.resize(ids, max(len(ids) // tokens, 1) * tokens).reshape(-1, tokens).astype(np.int64)


def _begun(pieces: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Each with the token that a text begins with: some models are lost without it."""
    begin = tokenizer.encode("", start=True)
    pieces[:, : len(begin)] = begin
    return pieces


def _shipped(tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of the texts of `calibration.json`, by kind."""
    file = resources.files("kvq_export").joinpath("calibration.json")
    texts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    kinds = [tokenizer.encode("\n\n".join(texts[kind]), start=True) for kind in ("prose", "code")]
    if tokenizer.chat_template is not None:
        chats = (tokenizer.chat(turns, add_generation_prompt=False) for turns in texts["chats"])
        kinds.append(list(chain.from_iterable(chats)))
    return kinds


class CalibratedWeights:
    """A `WeightReader` of a checkpoint, run over `segments` of ids while it is asked.

    Matrices must be asked for in the order of the forward pass, each once; `close` ends the run.
    """

    def __init__(
        self,
        original: Original,
        formats: Mapping[str, PanelFormat],
        segments: np.ndarray,
        threads: int,
    ) -> None:
        self._original = original
        self._plain = CheckpointWeights(original.checkpoint, original.sources, threads)
        self._formats = formats
        self._segments = segments
        self._pool = ThreadPoolExecutor(threads, "kvq-calibrate")
        stopped = Event()
        self._found = _Relay[tuple[str, Blocks]](stopped)
        self._exact = _Relay[tuple[str, np.ndarray, np.ndarray]](stopped)
        self._runs = [
            Thread(target=self._run, args=run, name=f"kvq-calibrate-{relay}", daemon=True)
            for relay, run in {
                "exact": (self._exact_weight, self._exact),
                "rounded": (self._weight, self._found),
            }.items()
        ]
        self._limits: threadpool_limits | None = None

    def vector(self, name: str) -> np.ndarray:
        """See `WeightReader.vector`."""
        return self._plain.vector(name)

    def matrix(self, name: str, form: PanelFormat) -> Iterator[Blocks]:
        """See `WeightReader.matrix`."""
        return self._plain.matrix(name, form) if name in ENDS else self._rounded(name)

    def close(self) -> None:
        """Ends the runs, wherever they are."""
        self._found.stopped.set()
        for run in self._runs:
            if run.ident is not None:
                run.join()
        self._pool.shutdown()
        if self._limits is not None:
            self._limits.restore_original_limits()

    def _rounded(self, name: str) -> Iterator[Blocks]:
        if self._runs[0].ident is None:
            # Products of matrices are computed side by side: those that each spread over all cores
            # waited for one another, and took twice the processor's time.
            self._limits = threadpool_limits(1, "blas")
            for run in self._runs:
                run.start()
        found, blocks = self._found.take()
        assert found == name, f"{found} was rounded, {name} is asked for"
        step = PANEL_ROWS * max(1, (1 << 20) // blocks.codes.shape[1] // PANEL_ROWS)
        for start in range(0, len(blocks.codes), step):
            yield blocks.picked(slice(start, start + step))

    def _run(self, weight: Weights, relay: "_Relay[Any]") -> None:
        config, segments = self._original.config, self._segments
        positions = np.tile(np.arange(segments.shape[1], dtype=np.int64), len(segments))
        attend = SegmentedAttention(len(segments))
        with suppress(_NobodyWaitsError):
            try:
                # The last layer's output is of no use: no row of it is asked for.
                forward(config, weight, segments.ravel(), positions, attend, slice(0, 0))
            except Exception as error:  # noqa: BLE001  told to the thread that waits
                relay.give(error)

    def _exact_weight(self, name: str) -> np.ndarray:
        experts = partial(self._original.grouped, name)
        return self._read(name, partial(self._multiply_exactly, name), experts)

    def _multiply_exactly(self, name: str, x: np.ndarray) -> np.ndarray:
        """Hands over what enters a matrix, and the matrix."""
        matrix = self._original.checkpoint.read(self._original.sources[name])
        self._exact.give((name, x, matrix))
        return x @ matrix.T

    def _weight(self, name: str) -> np.ndarray:
        experts = partial(self._multiply_experts, name)
        return self._read(name, partial(self._multiply, name), experts)

    def _read(self, name: str, multiply: Multiply, experts: MultiplyGroups) -> np.ndarray:
        checkpoint, source = self._original.checkpoint, self._original.sources[name]
        if not source.quantised:
            return checkpoint.read(source)
        if is_stack(name):
            return cast(np.ndarray, Stack(experts))
        if name in ENDS:
            return cast(np.ndarray, Rows(partial(checkpoint.read_rows, source), no_logits))
        return cast(np.ndarray, Product(multiply))

    def _multiply(self, name: str, x: np.ndarray) -> np.ndarray:
        """Rounds a matrix for its inputs, hands it over, and multiplies by what it became."""
        checkpoint, source = self._original.checkpoint, self._original.sources[name]
        form = self._formats[name]
        met, exact, matrix = self._exact.take()
        assert met == name, f"{met} was met by exact inputs, {name} by others"
        stored = checkpoint.stored(source, form.format)
        if stored is None:
            moments, lacking = self._seen(matrix, exact, x)
            del exact  # As large as x; what follows takes as much again.
            lower = self._pool.submit(factor, moments, form.block)
            wanted = matched(matrix, lacking, moments)
            blocks = quantize_with(wanted, lower.result(), form.format)
        else:
            blocks = Blocks(*joined(stored))
        rounded = dequantize(blocks, form.bits)[:, : form.columns]
        self._found.give((name, blocks))
        return self._product(x, rounded)

    def _product(self, x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """`x` [T, K] times `matrix` [N, K]: [T, N], parts of the text side by side."""
        out = np.empty((len(x), len(matrix)), np.float32)
        parts = zip(np.array_split(x, PARTS), np.array_split(out, PARTS), strict=True)
        for task in [self._pool.submit(np.matmul, part, matrix.T, own) for part, own in parts]:
            task.result()
        return out

    def _seen(
        self, matrix: np.ndarray, exact: np.ndarray, x: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `gptq.seen`, parts of the text side by side; summed alike by any number of threads."""
        parts = zip(np.array_split(exact, PARTS), np.array_split(x, PARTS), strict=True)
        sums = [self._pool.submit(seen, matrix, *part) for part in parts]
        moments, lacking = sums[0].result()
        for other in sums[1:]:
            more, further = other.result()
            moments += more
            lacking += further
        return moments, lacking

    def _multiply_experts(self, name: str, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """As `_multiply`, each expert's rows with its matrix (`kvq_models.reference.grouped`)."""
        checkpoint, source = self._original.checkpoint, self._original.sources[name]
        form = self._formats[name]
        stored = checkpoint.stored(source, form.format)
        lower = None if stored is not None else factor(x.T @ x, form.block)
        whole = None if stored is None else Blocks(*joined(stored))
        height, found, outputs = form.rows // len(counts), list[Blocks](), list[np.ndarray]()
        for expert, rows in enumerate(np.split(x, np.cumsum(counts)[:-1])):
            own = range(expert * height, (expert + 1) * height)
            if lower is not None:
                weights = np.concatenate([*checkpoint.chunks(source, rows=own)])
                blocks = quantize_with(weights, lower, form.format)
                found.append(blocks)
            else:
                assert whole is not None
                blocks = whole.picked(slice(own.start, own.stop))
            outputs.append(rows @ dequantize(blocks, form.bits)[:, : form.columns].T)
        self._found.give((name, whole or Blocks(*joined(found))))
        return np.concatenate(outputs)


class _Relay(Generic[T]):
    """Hands things from one thread to another, one at a time."""

    def __init__(self, stopped: Event) -> None:
        self.stopped = stopped
        self._queue = Queue[T | Exception](maxsize=1)

    def give(self, thing: T | Exception) -> None:
        """Waits until what was given before is taken."""
        while not self.stopped.is_set():
            try:
                return self._queue.put(thing, timeout=_WAIT_S)
            except Full:
                continue
        raise _NobodyWaitsError

    def take(self) -> T:
        """Waits until something is given; raises what was given to be raised."""
        while not self.stopped.is_set():
            try:
                found = self._queue.get(timeout=_WAIT_S)
            except Empty:
                continue
            if isinstance(found, Exception):
                raise found
            return found
        raise _NobodyWaitsError


class _NobodyWaitsError(Exception):
    """Nobody waits for the run any more."""
