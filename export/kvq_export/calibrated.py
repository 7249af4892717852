"""Weights rounded with error feedback while a calibration text is read through them.

A checkpoint is run in numpy, matrix after matrix: when the text reaches one, the second moments of
its inputs are taken, it is rounded (`gptq`), and what follows is computed with the rounded one. So
a matrix is rounded for the inputs it will have, one matrix and its moments are in memory, and the
writer gets them in the order of the file. Embeddings and the head are rounded plainly: a row of
an embedding is used by itself, and a head of 8 bits loses nothing. Experts of a layer share the
moments of what enters all of them: of its own a rare one would see too few.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import resources
from itertools import chain
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, cast

import numpy as np

from kvq.reference_linear import PANEL_ROWS, Blocks, PanelFormat, dequantize
from kvq_export.gptq import factor, quantize_with
from kvq_export.quality import Original, token_limit
from kvq_export.stand_ins import Product, Rows, SegmentedAttention, Stack
from kvq_export.weights import joined
from kvq_export.writer import CheckpointWeights
from kvq_models.config import ModelConfig
from kvq_models.family import is_stack
from kvq_models.reference import forward
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
# Matrices that are rounded plainly.
ENDS = ("embed", "head", "per_layer_embed")
_WAIT_S = 0.2


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
        self._ready: Queue[tuple[str, Blocks] | BaseException] = Queue(maxsize=1)
        self._stopped = Event()
        self._run = Thread(target=self._compute, name="kvq-calibrate", daemon=True)

    def vector(self, name: str) -> np.ndarray:
        """See `WeightReader.vector`."""
        return self._plain.vector(name)

    def matrix(self, name: str, form: PanelFormat) -> Iterator[Blocks]:
        """See `WeightReader.matrix`."""
        return self._plain.matrix(name, form) if name in ENDS else self._rounded(name)

    def close(self) -> None:
        """Ends the run, wherever it is."""
        self._stopped.set()
        if self._run.ident is not None:
            self._run.join()

    def _rounded(self, name: str) -> Iterator[Blocks]:
        if self._run.ident is None:
            self._run.start()
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        assert found[0] == name, f"{found[0]} was rounded, {name} is asked for"
        step = PANEL_ROWS * max(1, (1 << 20) // found[1].codes.shape[1] // PANEL_ROWS)
        for start in range(0, len(found[1].codes), step):
            yield found[1].picked(slice(start, start + step))

    def _compute(self) -> None:
        config, segments = self._original.config, self._segments
        positions = np.tile(np.arange(segments.shape[1], dtype=np.int64), len(segments))
        attend = SegmentedAttention(len(segments))
        try:
            # The last layer's output is of no use: no row of it is asked for.
            forward(config, self._weight, segments.ravel(), positions, attend, slice(0, 0))
        except _NobodyWaitsError:
            pass
        except BaseException as error:  # noqa: BLE001  told to the thread that waits
            self._give(error)

    def _weight(self, name: str) -> np.ndarray:
        checkpoint, source = self._original.checkpoint, self._original.sources[name]
        if not source.quantised:
            return checkpoint.read(source)
        if is_stack(name):
            return cast(np.ndarray, Stack(partial(self._multiply_experts, name)))
        if name in ENDS:
            return cast(np.ndarray, Rows(partial(checkpoint.read_rows, source), _no_logits))
        return cast(np.ndarray, Product(partial(self._multiply, name)))

    def _multiply(self, name: str, x: np.ndarray) -> np.ndarray:
        """Rounds a matrix for its inputs, hands it over, and multiplies by what it became."""
        checkpoint, source = self._original.checkpoint, self._original.sources[name]
        form = self._formats[name]
        stored = checkpoint.stored(source, form.format)
        if stored is None:
            lower = factor(x.T @ x, form.block)
            blocks = quantize_with(checkpoint.read(source), lower, form.format)
            del lower
        else:
            blocks = Blocks(*joined(stored))
        rounded = dequantize(blocks, form.bits)[:, : form.columns]
        self._give((name, blocks))
        return x @ rounded.T

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
        self._give((name, whole or Blocks(*joined(found))))
        return np.concatenate(outputs)

    def _give(self, found: "tuple[str, Blocks] | BaseException") -> None:
        while not self._stopped.is_set():
            try:
                return self._ready.put(found, timeout=_WAIT_S)
            except Full:
                continue
        raise _NobodyWaitsError


def _no_logits(x: np.ndarray) -> np.ndarray:
    return np.zeros((len(x), 1), np.float32)


class _NobodyWaitsError(Exception):
    """Nobody waits for the run any more."""
