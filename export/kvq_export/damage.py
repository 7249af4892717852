"""How many bits each matrix gets: what rounding it does to the model's answers, against its bytes.

A matrix's damage is the Kullback-Leibler divergence, nats per token, of the checkpoint's answers
from themselves when that matrix alone is rounded to 4 bits, on a short text, over the tokens that
are likely there. Many matrices are
tried in one pass over the checkpoint: the text is read once more for each of them, side by side,
and each such lane computes one product with a rounded matrix. A pass begins at the first layer it
rounds a matrix of: what enters that is the same in every lane. Finer widths do less damage by the
square of their step, which is not measured. Bits are then taken away where that does least damage
per byte, until a size is reached (`kvq.hull`), and further for as long as the total stays below
what may be lost.

Damages are taken to add up, and each weight is rounded by itself here, while an export rounds the
layers with error feedback, which leaves about `FEEDBACK` of the damage (embedding and head are
rounded like here): they say which matrix is worth more than another, and what all do together by a
factor: two real models lost 1.4 to 2 times what this tells, 8-bit activations included.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np

from kvq.errors import UsageError, argument
from kvq.hull import hull_descent
from kvq.reference_linear import WIDTHS, BlockFormat, Blocks, PanelFormat, dequantize
from kvq_export.calibrated import ENDS
from kvq_export.config import WeightFormat
from kvq_export.layout import plan_layout
from kvq_export.quality import Original, log_softmax
from kvq_export.stand_ins import Product, Rows, SegmentedAttention, Stack
from kvq_export.weights import joined, quantize
from kvq_export.writer import CheckpointWeights
from kvq_models.config import Attention
from kvq_models.family import is_stack
from kvq_models.reference import forward, softcap

# Of each of so many texts. Few do: damages of matrices differ by more than a factor of a hundred.
TEXTS, TOKENS = 3, 32
FEEDBACK = 0.25
# Tokens that a divergence is summed over: those that are likely when nothing is rounded. All of
# 152,000 took as long as the layers.
LIKELY = 256
_PER_LAYER_TABLE = "per_layer_embed"
# Read at a time, all lanes together: a few wide rows are held for each.
_PASS_TOKENS = 4096

Told = Callable[[int, int, str], None]
"""(done, of how many, what is being done)."""


def mixed_formats(
    original: Original, segments: np.ndarray, weights: WeightFormat, threads: int, told: Told
) -> dict[str, BlockFormat]:
    """The format of every matrix, by canonical name; together they take what `weights` asks for.

    Not of experts, which keep 4 bits: they are most of the bytes, and few tokens hear of each; nor
    of the table of per-layer embeddings, which a token reads a row of, and no mean counts it.
    `segments` int64 [S, T] are texts. Raises `UsageError` for a size that is too small.
    """
    texts = segments[np.linspace(0, len(segments) - 1, TEXTS).astype(int), :TOKENS]
    return allocated(original, damages(original, texts, weights, threads, told), weights)


def allocated(
    original: Original, damage: Mapping[str, float], weights: WeightFormat
) -> dict[str, BlockFormat]:
    """As `mixed_formats`, for these damages at 4 bits by canonical name."""
    forms = [weights.at(bits) for bits in reversed(WIDTHS)]
    steps = np.array([1 / ((1 << form.bits) - 1) for form in forms])
    left = [nats * (1 if name in ENDS else FEEDBACK) for name, nats in damage.items()]
    costs = np.outer(left, np.square(steps / steps[-1]))
    sizes, room = _sizes(original, weights, forms, [*damage])
    if room < sizes[:, -1].sum():
        raise UsageError(
            f"{argument('size_bytes')} {weights.size_bytes} bytes is not possible: "
            "with 4 bits everywhere it is "
            f"{sizes[:, -1].sum() - room} bytes more; ask for those too, or take a smaller model"
        )
    at, used, lost = np.zeros(len(sizes), np.intp), int(sizes[:, 0].sum()), costs[:, 0].sum()
    finer = np.tri(len(forms), dtype=bool).T
    taken: list[tuple[int, int, int]] = []
    for item, rung in zip(*hull_descent(costs, sizes, at, finer), strict=True):
        lost += costs[item, rung] - costs[item, at[item]]
        if used <= room and lost >= weights.loss_nats:
            break
        taken.append((int(item), int(at[item]), int(rung)))
        freed = int(sizes[item, at[item]] - sizes[item, rung])
        room = room if used > room else used - freed
        used -= freed
        at[item] = rung
    # The last step may have freed much more than was short.
    for item, before, rung in reversed(taken):
        back = int(sizes[item, before] - sizes[item, rung])
        if at[item] == rung and used + back <= room:
            at[item], used = before, used + back
    return {name: forms[rung] for name, rung in zip(damage, at, strict=True)}


def _sizes(
    original: Original, weights: WeightFormat, forms: Sequence[BlockFormat], names: Sequence[str]
) -> tuple[np.ndarray, int]:
    """What matrices take in each form, int64 [n, forms], and may take together.

    Bits of codes where a mean of them is asked for, else bytes of the file.
    """
    shapes = [original.sources[name].shape for name in names]
    if weights.mean_bits is not None:
        counts = np.prod(shapes, axis=1)
        sizes = np.outer(counts, [form.bits for form in forms])
        stacks = [name for name in _matrices(original) if is_stack(name)]
        beside = sum(math.prod(original.sources[name].shape) for name in stacks)
        return sizes, int(weights.mean_bits * (counts.sum() + beside) - forms[-1].bits * beside)
    assert weights.size_bytes is not None
    panels = [[PanelFormat.of(form, shape) for form in forms] for shape in shapes]
    sizes = np.array([[one.panels * one.panel_bytes for one in row] for row in panels])
    narrow = WeightFormat(block=weights.block, others=dict.fromkeys(names, forms[-1]))
    layout = plan_layout(original.config, original.sources, narrow)
    return sizes, weights.size_bytes - (layout.num_bytes - int(sizes[:, -1].sum()))


def _matrices(original: Original) -> list[str]:
    """Canonical names of what is quantised."""
    return [name for name, source in original.sources.items() if source.quantised]


def damages(
    original: Original, texts: np.ndarray, weights: WeightFormat, threads: int, told: Told
) -> dict[str, float]:
    """Nats per token that each matrix of the model costs at 4 bits, in the model's order.

    `texts` int64 [S, T]; of a tied head the embedding's are of both.
    """
    names = [
        name for name in _matrices(original) if not (is_stack(name) or name == _PER_LAYER_TABLE)
    ]
    lanes = max(1, _PASS_TOKENS // texts.size - 1)
    streams = _streams(original, texts, threads)
    found: dict[str, float] = {}
    for start in range(0, len(names), lanes):
        told(len(found), len(names), f"what each matrix loses at 4 bits: {names[start]}")
        tried = names[start : start + lanes]
        run = _Pass(original, tried, texts, weights.at(min(WIDTHS)), threads, streams)
        found |= zip(tried, run.divergences(), strict=True)
    return found


def _streams(original: Original, texts: np.ndarray, threads: int) -> np.ndarray:
    """What enters each layer when nothing is rounded, float32 [L, S T, hidden]."""
    found: list[np.ndarray] = []
    clean = _Pass(original, (), texts, WeightFormat().at(min(WIDTHS)), threads)
    clean.read(lambda layer, stream: found.append(stream))
    return np.stack(found)


class _Pass:
    """One forward pass over lanes of the same texts; each but the first has a rounded matrix."""

    def __init__(
        self,
        original: Original,
        tried: Sequence[str],
        texts: np.ndarray,
        form: BlockFormat,
        threads: int,
        streams: np.ndarray | None = None,
    ) -> None:
        self._original = original
        self._plain = CheckpointWeights(original.checkpoint, original.sources, threads)
        self._texts, self._form = texts, form
        self._lanes = {
            name: slice(lane * texts.size, (lane + 1) * texts.size)
            for lane, name in enumerate(tried, 1)
        }
        self._hidden = np.empty((0, original.config.hidden_size), np.float32)
        self._entering: tuple[int, np.ndarray] | None = None
        if streams is not None and "embed" not in tried:
            first = min(_layer_of(name, len(streams) - 1) for name in tried)
            # What later layers read must be there.
            mixers = (layer.mixer for layer in original.config.layers)
            sources = [mixer.kv_from for mixer in mixers if isinstance(mixer, Attention)]
            read = [source for source in sources if source is not None]
            first = min(first, *read) if read else first
            self._entering = first, np.tile(streams[first], (1 + len(tried), 1))

    def divergences(self) -> list[float]:
        """Mean nats per token, by lane."""
        self.read()
        return self._of_answers()

    def read(self, watch: Callable[[int, np.ndarray], None] | None = None) -> None:
        """Runs the lanes up to the head; `watch` as `forward` has it."""
        config, count = self._original.config, 1 + len(self._lanes)
        ids = np.tile(self._texts.ravel(), count)
        places = np.arange(self._texts.shape[1], dtype=np.int64)
        positions = np.tile(places, count * len(self._texts))
        attend = SegmentedAttention(count * len(self._texts))
        forward(config, self._weight, ids, positions, attend, watch=watch, entering=self._entering)

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
        return cast(np.ndarray, Product(multiply))

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
            form = PanelFormat.of(self._form, matrix.shape)
            blocks = Blocks(*joined(self._plain.matrix(name, form)))
            out[lane] = x[lane] @ dequantize(blocks, form.bits)[:, : form.columns].T
        return out

    def _keep(self, x: np.ndarray) -> np.ndarray:
        """Answers of all lanes at once would be too many: the head is multiplied later."""
        self._hidden = x
        return np.zeros((len(x), 1), np.float32)

    def _rounded(self, rows: np.ndarray) -> np.ndarray:
        return dequantize(quantize(rows, self._form), self._form.bits)[:, : rows.shape[1]]

    def _of_answers(self) -> list[float]:
        """Mean divergences over the tokens that are likely where nothing is rounded, by lane.

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
        found = np.zeros(len(lanes) - 1)
        for place, ids in enumerate(likely):
            rows = checkpoint.read_rows(source, ids)
            logits = lanes[:, place] @ rows.T
            if name in self._lanes:
                own = self._lanes[name].start // self._texts.size
                logits[own] = lanes[own, place] @ self._rounded(rows).T
            shares = log_softmax(softcap(logits + bias[ids], config.final_softcap))
            found += (np.exp(shares[0]) * (shares[0] - shares[1:])).sum(axis=1, dtype=np.float64)
        return (found / self._texts.size).tolist()


def _layer_of(name: str, last: int) -> int:
    """Of a layer's matrix; of the head the last, whose stream it is behind."""
    if name == "per_layer_model":
        return 0
    return int(name.split(".")[1]) if name.startswith("layers.") else last
