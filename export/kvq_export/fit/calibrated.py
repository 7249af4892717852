"""Rounds weights with error feedback while a calibration text is read through them.

A checkpoint is run matrix after matrix: products by kvq's kernels, the rest in numpy. When the
text reaches a matrix, the second moments of its inputs are summed, how far they are trusted is
chosen (`damping`), the matrix is rounded (`gptq`), and what follows is computed with the rounded
matrix. So a matrix is rounded for the inputs it will have, one matrix and its moments are in
memory, and the writer gets matrices in the order of the file.

Beside it the checkpoint itself is run over the same text. A matrix is rounded to give from its own
inputs what the checkpoint's gives from unrounded ones (`gptq.compensate`), so that it makes up for
what was rounded before it.

Embeddings and the head are rounded plainly: a row of an embedding is used by itself, and a head of
8 bits loses nothing. Experts of a layer share the moments of what enters all of them, because a
rare one alone would see too few. They make up for nothing, because the two runs may choose
different ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import resources
from itertools import chain
from queue import Empty, Full, Queue
from threading import Event, Thread
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from threadpoolctl import threadpool_limits

from kvq.reference.linear import PANEL_ROWS, BlockFormat, Blocks, PanelFormat, dequantize
from kvq_export.fit.damping import (
    HELD_OUT,
    Dampings,
    choose,
    near_dampings,
    try_damping,
)
from kvq_export.fit.gptq import Moments, compensate, factor, input_moments, quantize_with
from kvq_export.fit.native_products import KernelMatrix, Map
from kvq_export.fit.quality import Original, token_limit
from kvq_export.fit.substitutes import (
    Multiply,
    MultiplyGroups,
    Rows,
    SegmentedAttention,
    Stack,
    SubstituteMatrix,
    no_logits,
)
from kvq_export.write.weights import join_rows, quantize
from kvq_export.write.writer import CheckpointWeights
from kvq_models.config import ModelConfig
from kvq_models.family import WeightSource, is_stack
from kvq_models.products import is_drafts
from kvq_models.reference import Weights, forward
from kvq_models.tokenizer import Tokenizer

# Texts are cut into segments of so many tokens.
SEGMENT_TOKENS = 512
# Time and memory grow with the tokens. Twice as many left no less divergence in six layers of 1.5
# billion parameters' width. A matrix too wide for them gets more damping instead.
MOST_TOKENS = 6144
# Narrow models need fewer: so many for each input of the widest matrix.
TOKENS_PER_COLUMN = 8
# Tokens of a text that the constants of weights are trained on.
TUNING_TOKENS = 256
# A factor takes the cube of the columns. Matrices with more than so many get the damping that suits
# wide ones, for rounding and compensating, and one layer of eight tries whether these help at all.
TRIED_COLUMNS, TRIED_LAYERS, WIDE_DAMPING = 4096, 8, 2.0
# Texts that a bundle is measured on, of all kinds together.
REPORT_TEXTS = 6
# Parts of the text whose products are computed in parallel.
PARTS = 2
# Embeddings and the head, which are rounded plainly.
TABLES = ("embed", "head", "per_layer_embed")
_WAIT_S = 0.2
T = TypeVar("T")


def calibration_segments(
    tokenizer: Tokenizer, config: ModelConfig, text: str | None = None
) -> np.ndarray:
    """Returns token ids int64 [S, segment] of `text`, or of the texts that ship.

    These are prose, code and, where the tokenizer has a chat template, conversations, as many of
    each while there are any. `report_texts` has their ends.
    """
    columns = max(config.hidden_size, config.widest_feed)
    segment = min(SEGMENT_TOKENS, config.context_length)
    count = min(MOST_TOKENS, TOKENS_PER_COLUMN * columns) // segment
    kinds = _read_ids(tokenizer, config, text)
    most = max(1, -(-count // len(kinds)))
    return _with_start(np.concatenate([_cut(ids, segment)[:most] for ids in kinds]), tokenizer)


def tuning_texts(tokenizer: Tokenizer, config: ModelConfig, text: str | None = None) -> np.ndarray:
    """Returns token ids int64 [S, T] of `text`, or of what ships without the ends.

    `report_texts` has the ends.
    """
    kinds = _read_ids(tokenizer, config, text)
    tokens = min(TUNING_TOKENS, config.context_length)
    return _with_start(np.concatenate([_cut(ids, tokens) for ids in kinds]), tokenizer)


def report_texts(tokenizer: Tokenizer, config: ModelConfig) -> np.ndarray:
    """Returns token ids int64 [S, T] that a bundle is measured on: the ends of the texts that ship.

    Calibration reads their beginnings.
    """
    tokens = _report_tokens(config)
    kinds = _shipped_ids(tokenizer)
    ends = [_cut(ids[-REPORT_TEXTS * tokens :], tokens) for ids in kinds]
    pieces = np.concatenate([end[: REPORT_TEXTS // len(kinds)] for end in ends])
    return _with_start(pieces, tokenizer)


def _read_ids(tokenizer: Tokenizer, config: ModelConfig, text: str | None) -> list[list[int]]:
    """Returns the ids of `text`, or by kind those of what ships without the ends."""
    if text is not None:
        return [tokenizer.encode(text, start=True)]
    ends = REPORT_TEXTS * _report_tokens(config)
    return [ids[:-ends] for ids in _shipped_ids(tokenizer)]


def _report_tokens(config: ModelConfig) -> int:
    return min(token_limit(config.vocab_size), config.context_length)


def _cut(ids: list[int], tokens: int) -> np.ndarray:
    """Cuts ids into pieces int64 [n, tokens]; a text shorter than one piece is repeated."""
    return np.resize(ids, max(len(ids) // tokens, 1) * tokens).reshape(-1, tokens).astype(np.int64)


def _with_start(pieces: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Puts the token that begins a text at the start of each piece: some models need it."""
    begin = tokenizer.encode("", start=True)
    pieces[:, : len(begin)] = begin
    return pieces


def _shipped_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the ids of the texts of `calibration.json`, by kind."""
    file = resources.files("kvq_export").joinpath("calibration.json")
    texts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    kinds = [tokenizer.encode("\n\n".join(texts[kind]), start=True) for kind in ("prose", "code")]
    if tokenizer.chat_template is not None:
        chats = (tokenizer.chat(turns, add_generation_prompt=False) for turns in texts["chats"])
        kinds.append(list(chain.from_iterable(chats)))
    return kinds


class CalibratedWeights:
    """Reads a checkpoint's weights, rounded for the inputs that `segments` of ids give them.

    A `WeightReader`. Matrices must be asked for in the order of the forward pass, each once;
    `close` ends the run. The weights of a `draft` head are each rounded by themselves: the model
    checks what it guesses.
    """

    def __init__(
        self,
        original: Original,
        formats: Mapping[str, PanelFormat],
        segments: np.ndarray,
        threads: int,
        draft: Mapping[str, WeightSource] = MappingProxyType({}),
    ) -> None:
        self._original = original
        sources = {**original.sources, **draft}
        self._plain = CheckpointWeights(original.checkpoint, sources, threads)
        self._formats = formats
        self._segments = _with_held_out_last(segments)
        self._pool = ThreadPoolExecutor(threads, "kvq-calibrate")
        stopped = Event()
        self._rounded_matrices = _Relay[tuple[str, Blocks]](stopped)
        self._unrounded = _Relay[_Unrounded](stopped)
        self._runs = [
            Thread(target=self._run, args=run, name=f"kvq-calibrate-{relay}", daemon=True)
            for relay, run in {
                "unrounded": (self._unrounded_weight, self._unrounded),
                "rounded": (self._weight, self._rounded_matrices),
            }.items()
        ]
        self._limits: threadpool_limits | None = None
        self._dampings: dict[str, Dampings] = {}

    def vector(self, name: str) -> np.ndarray:
        return self._plain.vector(name)

    def matrix(self, name: str, form: PanelFormat) -> Iterator[Blocks]:
        if name in TABLES or is_drafts(name):
            return self._plain.matrix(name, form)
        return self._rounded_matrix(name)

    def close(self) -> None:
        self._rounded_matrices.stopped.set()
        for run in self._runs:
            if run.ident is not None:
                run.join()
        self._pool.shutdown()
        if self._limits is not None:
            self._limits.restore_original_limits()

    def _rounded_matrix(self, name: str) -> Iterator[Blocks]:
        if self._runs[0].ident is None:
            # Products are computed in parallel, so each gets one thread of BLAS: with more they
            # would wait for one another.
            self._limits = threadpool_limits(1, "blas")
            for run in self._runs:
                run.start()
        rounded_name, blocks = self._rounded_matrices.take()
        assert rounded_name == name, f"{rounded_name} was rounded, {name} is asked for"
        step = PANEL_ROWS * max(1, (1 << 20) // blocks.codes.shape[1] // PANEL_ROWS)
        for start in range(0, len(blocks.codes), step):
            yield blocks.picked(slice(start, start + step))

    def _run(self, weight: Weights, relay: "_Relay[Any]") -> None:
        config, segments = self._original.config, self._segments
        positions = np.tile(np.arange(segments.shape[1], dtype=np.int64), len(segments))
        attend = SegmentedAttention(len(segments))
        with suppress(_NobodyWaitsError):
            try:
                # No logits are asked for, so the last layer's output has no use.
                forward(config, weight, segments.ravel(), positions, attend, slice(0, 0))
            except Exception as error:  # noqa: BLE001  raised in the thread that waits
                relay.give(error)

    def _unrounded_weight(self, name: str) -> np.ndarray:
        experts = partial(self._original.grouped, name)
        return self._read(name, partial(self._multiply_unrounded, name), experts)

    def _multiply_unrounded(self, name: str, x: np.ndarray) -> np.ndarray:
        """Multiplies by a matrix of the checkpoint; hands over what the other run compares."""
        matrix = self._original.checkpoint.read(self._original.sources[name])
        packed = KernelMatrix.of(matrix)
        products = packed.multiply(x, self._pool.map)
        is_tall = len(matrix) > matrix.shape[1]
        self._unrounded.give(_Unrounded(name, matrix, packed, x if is_tall else products))
        return products

    def _weight(self, name: str) -> np.ndarray:
        experts = partial(self._multiply_experts, name)
        return self._read(name, partial(self._multiply, name), experts)

    def _read(self, name: str, multiply: Multiply, experts: MultiplyGroups) -> np.ndarray:
        checkpoint, source = self._original.checkpoint, self._original.sources[name]
        if not source.quantised:
            return checkpoint.read(source)
        if is_stack(name):
            return cast(np.ndarray, Stack(experts))
        if name in TABLES:
            return cast(np.ndarray, Rows(partial(checkpoint.read_rows, source), no_logits))
        return cast(np.ndarray, SubstituteMatrix(multiply))

    def _multiply(self, name: str, x: np.ndarray) -> np.ndarray:
        """Rounds a matrix for its inputs, hands it over, and multiplies by the rounded one."""
        checkpoint, source = self._original.checkpoint, self._original.sources[name]
        form = self._formats[name]
        unrounded = self._unrounded.take()
        assert unrounded.name == name, f"one run is at {unrounded.name}, the other at {name}"
        kept = checkpoint.kept_blocks(source, form.format)
        if kept is None:
            matrix = unrounded.matrix
            fitted, held_out = self._input_moments(unrounded.lack(x, self._pool.map), x)
            del unrounded  # It holds as much as x; what follows takes as much again.
            dampings = self._choose_dampings(name, matrix, fitted, held_out, form.format)
            fitted.add(held_out)
            blocks = self._round(matrix, fitted, dampings, form.format)
        else:
            blocks = Blocks(*join_rows(kept))
        packed = KernelMatrix(blocks, form)
        self._rounded_matrices.give((name, blocks))
        return packed.multiply(x, self._pool.map)

    def _input_moments(self, lack: np.ndarray, x: np.ndarray) -> tuple[Moments, Moments]:
        """Returns the moments of the tokens that dampings are fitted to, and of those held out.

        Parts of the text run in parallel; the sums are the same with any number of threads.
        """
        cuts = [_num_fitted(len(x)) * part // PARTS for part in range(1, PARTS + 1)]
        parts = zip(np.split(lack, cuts), np.split(x, cuts), strict=True)
        sums = [self._pool.submit(input_moments, *part) for part in parts]
        fitted = sums[0].result()
        for more in sums[1:-1]:
            fitted.add(more.result())
        return fitted, sums[-1].result()

    def _choose_dampings(
        self, name: str, rows: np.ndarray, fitted: Moments, held_out: Moments, form: BlockFormat
    ) -> Dampings:
        """Tries dampings in parallel, or takes those of the same matrix in a layer before."""
        layer, kind = _layer_and_kind(name)
        before = self._dampings.get(kind)
        costly = rows.shape[1] > TRIED_COLUMNS
        if costly and layer > 1 and layer % TRIED_LAYERS and before is not None:
            return before
        tried = (WIDE_DAMPING,) if costly else near_dampings(before)
        trial = partial(try_damping, rows, fitted, held_out, form)
        trials = list(self._pool.map(trial, tried))
        self._dampings[kind] = choose(rows, held_out, form, trials)
        return self._dampings[kind]

    def _round(
        self, rows: np.ndarray, moments: Moments, dampings: Dampings, form: BlockFormat
    ) -> Blocks:
        """Rounds `rows` with the chosen dampings."""
        lowers = {
            damping: factor(moments.inputs, form.activation_block, damping, self._pool.map)
            for damping in {*dampings}
            if damping is not None
        }
        if dampings.compensating is not None:
            lower = lowers[dampings.compensating]
            rows = compensate(rows, moments, lower, self._pool.map)
        if dampings.rounding is None:
            return quantize(rows, form)
        return quantize_with(rows, lowers[dampings.rounding], form)

    def _multiply_experts(self, name: str, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Multiplies as `_multiply`, each expert's rows with its matrix."""
        checkpoint, source = self._original.checkpoint, self._original.sources[name]
        form = self._formats[name]
        inputs = np.split(x, np.cumsum(counts)[:-1])
        kept = checkpoint.kept_blocks(source, form.format)
        chunks = self._round_experts(name, inputs) if kept is None else kept
        blocks = Blocks(*join_rows(chunks))
        height, outputs = form.rows // len(counts), list[np.ndarray]()
        for expert, rows in enumerate(inputs):
            expert_blocks = blocks.picked(slice(expert * height, (expert + 1) * height))
            outputs.append(rows @ dequantize(expert_blocks, form.bits)[:, : form.columns].T)
        self._rounded_matrices.give((name, blocks))
        return np.concatenate(outputs)

    def _round_experts(self, name: str, inputs: Sequence[np.ndarray]) -> Iterator[Blocks]:
        """Rounds the matrices of all experts for what enters any; `inputs` are those of each."""
        form = self._formats[name].format
        # Each expert's rows are in the text's order, so that their ends are of its end.
        ends = (np.split(rows, [_num_fitted(len(rows))]) for rows in inputs)
        parts = (np.concatenate(rows) for rows in zip(*ends, strict=True))
        fitted, held_out = (Moments(rows.T @ rows) for rows in parts)
        busiest = max(range(len(inputs)), key=lambda expert: len(inputs[expert]))
        tried = self._expert(name, busiest, len(inputs))
        damping = self._choose_dampings(name, tried, fitted, held_out, form).rounding
        fitted.add(held_out)
        lower = None if damping is None else factor(fitted.inputs, form.activation_block, damping)
        for expert in range(len(inputs)):
            rows = self._expert(name, expert, len(inputs))
            yield quantize(rows, form) if lower is None else quantize_with(rows, lower, form)

    def _expert(self, name: str, expert: int, count: int) -> np.ndarray:
        """Returns the matrix of an expert, one of `count`."""
        source = self._original.sources[name]
        height = source.shape[0] // count
        rows = range(expert * height, (expert + 1) * height)
        return np.concatenate([*self._original.checkpoint.chunks(source, rows=rows)])


def _layer_and_kind(name: str) -> tuple[int, str]:
    """Returns the layer of a canonical name, 0 outside of layers, and the rest of the name."""
    parts = name.split(".", 2)
    return (int(parts[1]), parts[2]) if parts[0] == "layers" else (0, name)


def _num_fitted(tokens: int) -> int:
    """Returns how many of `tokens` dampings are fitted to; the others judge them."""
    return tokens - int(tokens * HELD_OUT)


def _with_held_out_last(segments: np.ndarray) -> np.ndarray:
    """Moves the segments that judge dampings to the end: some of every kind of text."""
    period = round(1 / HELD_OUT)
    held_out = np.arange(len(segments)) % period == period - 1
    return segments[np.argsort(held_out, kind="stable")]


class _Unrounded(NamedTuple):
    """Holds what the unrounded run has of a matrix [N, K], which the rounded one compares with.

    `values` float32 are its products [T, N], or the inputs [T, K] of one that is taller than wide.
    """

    name: str
    matrix: np.ndarray
    packed: KernelMatrix
    values: np.ndarray

    def lack(self, x: np.ndarray, each: Map) -> np.ndarray:
        """Returns what is in `values` more than with inputs `x`, as `gptq.input_moments` wants."""
        is_tall = len(self.matrix) > self.matrix.shape[1]
        return self.values - (x if is_tall else self.packed.multiply(x, each))


class _Relay(Generic[T]):
    """Hands things from one thread to another, one at a time."""

    def __init__(self, stopped: Event) -> None:
        self.stopped = stopped
        self._queue = Queue[T | Exception](maxsize=1)

    def give(self, thing: T | Exception) -> None:
        """Waits until the thing before is taken, then hands over this one."""
        while not self.stopped.is_set():
            try:
                return self._queue.put(thing, timeout=_WAIT_S)
            except Full:
                continue
        raise _NobodyWaitsError

    def take(self) -> T:
        """Waits for a thing and returns it; raises a handed-over exception."""
        while not self.stopped.is_set():
            try:
                thing = self._queue.get(timeout=_WAIT_S)
            except Empty:
                continue
            if isinstance(thing, Exception):
                raise thing
            return thing
        raise _NobodyWaitsError


class _NobodyWaitsError(Exception):
    """Ends a run that nobody waits for any more."""
