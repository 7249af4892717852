"""Chooses how many bits each matrix gets, by what rounding it does to the model's answers.

A matrix's *damage* is the Kullback-Leibler divergence, in nats per token, of the checkpoint's
answers to a short text when that matrix alone is rounded to 4 bits, over the tokens that are likely
there. Many matrices are tried in one pass over the checkpoint: the text is read once more for each
of them, side by side, and each such *lane* computes one product with a rounded matrix. A pass
begins at the first layer of which it rounds a matrix: what enters that layer is the same in every
lane. Other widths do damage by the square of their step, which is not measured. Bits are then
taken away where that does least damage per byte, until a size is reached (`kvq.hull`), and further
for as long as the total stays below what may be lost.

Damages are assumed to add up. Each weight is rounded by itself here, while an export rounds the
layers with error feedback, which leaves about `FEEDBACK` of the damage. So damages tell which
matrix needs bits more than another, and only roughly how much a model loses: up to twice as much.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np

from kvq.errors import UsageError, argument
from kvq.hull import hull_descent
from kvq.reference.linear import BlockFormat, Blocks, PanelFormat, dequantize
from kvq_export.config import WeightFormat
from kvq_export.fit.calibrated import TABLES
from kvq_export.fit.quality import Original, log_softmax
from kvq_export.fit.substitutes import Rows, SegmentedAttention, Stack, SubstituteMatrix
from kvq_export.phases import Progress
from kvq_export.write.layout import plan_layout
from kvq_export.write.weights import join_rows, quantize
from kvq_export.write.writer import CheckpointWeights
from kvq_models.config import Attention
from kvq_models.family import is_stack
from kvq_models.reference import forward, softcap

# The width at which damage is measured.
MEASURED_BITS = 4
# Texts, and tokens of each. Few suffice: damages differ by more than a factor of a hundred.
TEXTS, TOKENS = 3, 32
FEEDBACK = 0.25
# Tokens that a divergence is summed over: those that are likely when nothing is rounded. All of a
# vocabulary take as long as the layers.
LIKELY = 256
_PER_LAYER_TABLE = "per_layer_embed"
# Tokens that are read at a time, in all lanes together: each needs a few wide rows.
_PASS_TOKENS = 4096


def mixed_formats(
    original: Original,
    segments: np.ndarray,
    weights: WeightFormat,
    threads: int,
    progress: Progress,
) -> dict[str, BlockFormat]:
    """Returns the format of every matrix by canonical name; together they take what is asked for.

    Experts are left out and keep 4 bits: they are most of the bytes, and few tokens reach each. So
    is the table of per-layer embeddings, of which a token reads one row, and no mean counts it.
    `segments` int64 [S, T] are texts. Raises `UsageError` for a size that is too small.
    """
    # Damages take long; a size that is too small is known before.
    _sizes(original, weights, _measured_names(original))
    texts = segments[np.linspace(0, len(segments) - 1, TEXTS).astype(int), :TOKENS]
    return allocate(original, damages(original, texts, weights, threads, progress), weights)


def allocate(
    original: Original, damage: Mapping[str, float], weights: WeightFormat
) -> dict[str, BlockFormat]:
    """Chooses formats as `mixed_formats` does, for these damages at 4 bits by canonical name."""
    widths = [*reversed(weights.widths)]
    steps = np.array([1 / ((1 << bits) - 1) for bits in widths])
    expected = [nats * (1 if name in TABLES else FEEDBACK) for name, nats in damage.items()]
    costs = np.outer(expected, np.square(steps / steps[widths.index(MEASURED_BITS)]))
    sizes, room = _sizes(original, weights, [*damage])
    rungs, used, lost = np.zeros(len(sizes), np.intp), int(sizes[:, 0].sum()), costs[:, 0].sum()
    finer = np.tri(len(widths), dtype=bool).T
    moves: list[tuple[int, int, int]] = []
    for item, rung in zip(*hull_descent(costs, sizes, rungs, finer), strict=True):
        lost += costs[item, rung] - costs[item, rungs[item]]
        if used <= room and lost >= weights.loss_nats:
            break
        moves.append((int(item), int(rungs[item]), int(rung)))
        freed = int(sizes[item, rungs[item]] - sizes[item, rung])
        room = room if used > room else used - freed
        used -= freed
        rungs[item] = rung
    # The last step may have freed much more than was needed.
    for item, before, rung in reversed(moves):
        extra = int(sizes[item, before] - sizes[item, rung])
        if rungs[item] == rung and used + extra <= room:
            rungs[item], used = before, used + extra
    return {
        name: weights.at(widths[rung], original.sources[name].shape[1])
        for name, rung in zip(damage, rungs, strict=True)
    }


def _sizes(
    original: Original, weights: WeightFormat, names: Sequence[str]
) -> tuple[np.ndarray, int]:
    """Returns the size of each matrix by width, widest first, int64 [n, widths], and their limit.

    Sizes are bits of codes where a mean of them is asked for, else bytes of the file. Raises
    `UsageError` for a limit that the fewest bits everywhere exceed.
    """
    shapes = [original.sources[name].shape for name in names]
    forms = [[weights.at(bits, shape[1]) for bits in reversed(weights.widths)] for shape in shapes]
    if weights.mean_bits is not None:
        counts = np.prod(shapes, axis=1)
        sizes = counts[:, None] * np.array([[form.bits for form in row] for row in forms])
        stacks = [name for name in _matrices(original) if is_stack(name)]
        expert_codes = sum(math.prod(original.sources[name].shape) for name in stacks)
        room = weights.mean_bits * (counts.sum() + expert_codes) - weights.bits * expert_codes
        return sizes, int(room)
    assert weights.size_bytes is not None
    sizes = np.array(
        [
            [
                matrix.panels * matrix.panel_bytes
                for matrix in (PanelFormat.of(form, shape) for form in row)
            ]
            for row, shape in zip(forms, shapes, strict=True)
        ]
    )
    measured = WeightFormat(block=weights.block, embedding_bits=MEASURED_BITS)
    layout = plan_layout(original.config, original.sources, measured)
    measured_bytes = int(sizes[:, -1 - weights.widths.index(MEASURED_BITS)].sum())
    room, least = weights.size_bytes - (layout.num_bytes - measured_bytes), int(sizes[:, -1].sum())
    if room < least:
        raise UsageError(
            f"{argument('size_bytes')} {weights.size_bytes} bytes is not possible: with the "
            f"fewest bits everywhere it is {least - room} bytes more; ask for those too, or take "
            "a smaller model"
        )
    return sizes, room


def _matrices(original: Original) -> list[str]:
    """Returns the canonical names of what is quantised."""
    return [name for name, source in original.sources.items() if source.quantised]


def _measured_names(original: Original) -> list[str]:
    """Returns the canonical names of the matrices whose damage is measured."""
    return [
        name for name in _matrices(original) if not (is_stack(name) or name == _PER_LAYER_TABLE)
    ]


def damages(
    original: Original, texts: np.ndarray, weights: WeightFormat, threads: int, progress: Progress
) -> dict[str, float]:
    """Measures the nats per token that each matrix costs at 4 bits, in the model's order.

    `texts` int64 [S, T]. A tied head counts with the embedding.
    """
    names = _measured_names(original)
    lanes = max(1, _PASS_TOKENS // texts.size - 1)
    streams = _streams(original, texts, threads)
    nats: dict[str, float] = {}
    for start in range(0, len(names), lanes):
        progress(len(nats), len(names), "")
        batch = names[start : start + lanes]
        run = _Pass(original, batch, texts, weights, threads, streams)
        nats |= zip(batch, run.divergences(), strict=True)
    return nats


def _streams(original: Original, texts: np.ndarray, threads: int) -> np.ndarray:
    """Returns what enters each layer when nothing is rounded, float32 [L, S T, hidden]."""
    streams: list[np.ndarray] = []
    clean = _Pass(original, (), texts, WeightFormat(), threads)
    clean.read(lambda layer, stream: streams.append(stream))
    return np.stack(streams)


class _Pass:
    """Runs one forward pass over lanes of the same texts; each but the first rounds a matrix."""

    def __init__(
        self,
        original: Original,
        names: Sequence[str],
        texts: np.ndarray,
        weights: WeightFormat,
        threads: int,
        streams: np.ndarray | None = None,
    ) -> None:
        self._original = original
        self._plain = CheckpointWeights(original.checkpoint, original.sources, threads)
        self._texts, self._weights = texts, weights
        self._lanes = {
            name: slice(lane * texts.size, (lane + 1) * texts.size)
            for lane, name in enumerate(names, 1)
        }
        self._hidden = np.empty((0, original.config.hidden_size), np.float32)
        self._start: tuple[int, np.ndarray] | None = None
        if streams is not None and "embed" not in names:
            first = min(_layer_of(name, len(streams) - 1) for name in names)
            # It begins early enough for layers whose keys later ones read.
            mixers = (layer.mixer for layer in original.config.layers)
            sources = [mixer.kv_from for mixer in mixers if isinstance(mixer, Attention)]
            read = [source for source in sources if source is not None]
            first = min(first, *read) if read else first
            self._start = first, np.tile(streams[first], (1 + len(names), 1))

    def divergences(self) -> list[float]:
        """Returns mean nats per token, by lane."""
        self.read()
        return self._answer_divergences()

    def read(self, watch: Callable[[int, np.ndarray], None] | None = None) -> None:
        """Runs the lanes up to the head; `watch` is that of `forward`."""
        config, count = self._original.config, 1 + len(self._lanes)
        ids = np.tile(self._texts.ravel(), count)
        places = np.arange(self._texts.shape[1], dtype=np.int64)
        positions = np.tile(places, count * len(self._texts))
        attend = SegmentedAttention(count * len(self._texts))
        forward(config, self._weight, ids, positions, attend, watch=watch, start_at=self._start)

    def _weight(self, name: str) -> np.ndarray:
        source = self._original.sources[name]
        if not source.quantised:
            return self._original.checkpoint.read(source)
        if is_stack(name):
            return cast(np.ndarray, Stack(partial(self._original.grouped, name)))
        if name == "embed":
            return cast(np.ndarray, Rows(self._rows, self._keep))
        if name == _PER_LAYER_TABLE:
            read = partial(self._original.checkpoint.read_rows, source)
            return cast(np.ndarray, Rows(read, self._keep))
        multiply = self._keep if name == "head" else partial(self._multiply, name)
        return cast(np.ndarray, SubstituteMatrix(multiply))

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        source = self._original.sources["embed"]
        rows = self._original.checkpoint.read_rows(source, ids)
        lane = self._lanes.get("embed")
        if lane is not None:
            rows[lane] = self._rounded(rows[lane])
        return rows

    def _multiply(self, name: str, x: np.ndarray) -> np.ndarray:
        lane = self._lanes.get(name)
        matrix = self._original.checkpoint.read(self._original.sources[name])
        out = x @ matrix.T
        if lane is not None:
            form = PanelFormat.of(self._weights.at(MEASURED_BITS, matrix.shape[1]), matrix.shape)
            blocks = Blocks(*join_rows(self._plain.matrix(name, form)))
            out[lane] = x[lane] @ dequantize(blocks, form.bits)[:, : form.columns].T
        return out

    def _keep(self, x: np.ndarray) -> np.ndarray:
        """Remembers what enters the head: answers of all lanes at once would be too many."""
        self._hidden = x
        return np.zeros((len(x), 1), np.float32)

    def _rounded(self, rows: np.ndarray) -> np.ndarray:
        form = self._weights.at(MEASURED_BITS, rows.shape[1])
        return dequantize(quantize(rows, form), form.bits)[:, : rows.shape[1]]

    def _answer_divergences(self) -> list[float]:
        """Returns mean divergences by lane, over the tokens likely where nothing is rounded.

        With p of the first lane's logits z, and z' of another: sum p (z - z') - lse(z) + lse(z').
        """
        config = self._original.config
        name = "embed" if config.tied_head else "head"
        source, checkpoint = self._original.sources[name], self._original.checkpoint
        lanes = self._hidden.reshape(1 + len(self._lanes), self._texts.size, -1)
        clean = np.concatenate([lanes[0] @ rows.T for rows in checkpoint.chunks(source)], axis=1)
        bias = np.zeros(clean.shape[1], np.float32)
        if config.head_bias:
            bias = checkpoint.read(self._original.sources["head_bias"])
        clean += bias
        likely = np.argpartition(clean, -min(LIKELY, clean.shape[1]), axis=1)[:, -LIKELY:]
        nats = np.zeros(len(lanes) - 1)
        for place, ids in enumerate(likely):
            rows = checkpoint.read_rows(source, ids)
            logits = lanes[:, place] @ rows.T
            if name in self._lanes:
                lane = self._lanes[name].start // self._texts.size
                logits[lane] = lanes[lane, place] @ self._rounded(rows).T
            shares = log_softmax(softcap(logits + bias[ids], config.final_softcap))
            nats += (np.exp(shares[0]) * (shares[0] - shares[1:])).sum(axis=1, dtype=np.float64)
        return (nats / self._texts.size).tolist()


def _layer_of(name: str, last: int) -> int:
    """Returns the layer of a matrix; that of the head is the last one."""
    if name == "per_layer_model":
        return 0
    return int(name.split(".")[1]) if name.startswith("layers.") else last
