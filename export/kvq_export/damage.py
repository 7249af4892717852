"""How many bits each matrix gets: what rounding it does to the model's answers, against its bytes.

A matrix's damage is the Kullback-Leibler divergence, nats per token, of the checkpoint's answers
from themselves when that matrix alone is rounded to 4 bits, on a short text. Many matrices are
tried in one pass over the checkpoint: the text is read once more for each of them, side by side,
and each such lane computes one product with a rounded matrix. Finer widths do less damage by the
square of their step, which is not measured. Bits are then taken away where that does least damage
per byte, until a size is reached (`kvq.hull`).

Damages are taken to add up, and each weight is rounded by itself here, while an export rounds the
layers with error feedback, which leaves about `FEEDBACK` of the damage (embedding and head are
rounded like here): they say which matrix is worth more than another, not what all do together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import cast

import numpy as np

from kvq.errors import UsageError
from kvq.hull import hull_descent
from kvq.reference_linear import WIDTHS, BlockFormat, Blocks, PanelFormat, dequantize
from kvq_export.calibrated import ENDS
from kvq_export.config import WeightFormat
from kvq_export.layout import plan_layout
from kvq_export.quality import Original
from kvq_export.stand_ins import Product, Rows, SegmentedAttention
from kvq_export.weights import joined, quantize
from kvq_export.writer import CheckpointWeights
from kvq_models.reference import forward, softcap

# Of each of so many texts. Few do: damages of matrices differ by more than a factor of a hundred.
TEXTS, TOKENS = 3, 32
FEEDBACK = 0.25
# Read at a time, all lanes together: a few wide rows are held for each.
_PASS_TOKENS = 4096

Told = Callable[[int, int, str], None]
"""(done, of how many, what is being done)."""


def mixed_formats(
    original: Original, segments: np.ndarray, weights: WeightFormat, threads: int, told: Told
) -> dict[str, BlockFormat]:
    """The format of every matrix, by canonical name; together they take what `weights` asks for.

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
            f"--size {weights.size_bytes} bytes is not possible: with 4 bits everywhere it is "
            f"{sizes[:, -1].sum() - room} bytes more; ask for those too, or take a smaller model"
        )
    at, used = np.zeros(len(sizes), np.intp), int(sizes[:, 0].sum())
    finer = np.tri(len(forms), dtype=bool).T
    taken: list[tuple[int, int, int]] = []
    for item, rung in zip(*hull_descent(costs, sizes, at, finer), strict=True):
        if used <= room:
            break
        taken.append((int(item), int(at[item]), int(rung)))
        used -= int(sizes[item, at[item]] - sizes[item, rung])
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
        return sizes, int(weights.mean_bits * counts.sum())
    assert weights.size_bytes is not None
    panels = [[PanelFormat.of(form, shape) for form in forms] for shape in shapes]
    sizes = np.array([[one.panels * one.panel_bytes for one in row] for row in panels])
    narrow = WeightFormat(block=weights.block, others=dict.fromkeys(names, forms[-1]))
    layout = plan_layout(original.config, original.sources, narrow)
    return sizes, weights.size_bytes - (layout.num_bytes - int(sizes[:, -1].sum()))


def damages(
    original: Original, texts: np.ndarray, weights: WeightFormat, threads: int, told: Told
) -> dict[str, float]:
    """Nats per token that each matrix of the model costs at 4 bits, in the model's order.

    `texts` int64 [S, T]; of a tied head the embedding's are of both.
    """
    names = [name for name, source in original.sources.items() if len(source.shape) == 2]
    lanes = max(1, _PASS_TOKENS // texts.size - 1)
    found: dict[str, float] = {}
    for start in range(0, len(names), lanes):
        told(len(found), len(names), f"what each matrix loses at 4 bits: {names[start]}")
        tried = names[start : start + lanes]
        run = _Pass(original, tried, texts, weights.at(min(WIDTHS)), threads)
        found |= zip(tried, run.divergences(), strict=True)
    return found


class _Pass:
    """One forward pass over lanes of the same texts; each but the first has a rounded matrix."""

    def __init__(
        self,
        original: Original,
        tried: Sequence[str],
        texts: np.ndarray,
        form: BlockFormat,
        threads: int,
    ) -> None:
        self._original = original
        self._plain = CheckpointWeights(original.checkpoint, original.sources, threads)
        self._texts, self._form = texts, form
        self._lanes = {
            name: slice(lane * texts.size, (lane + 1) * texts.size)
            for lane, name in enumerate(tried, 1)
        }
        self._hidden = np.empty((0, original.config.hidden_size), np.float32)

    def divergences(self) -> list[float]:
        """Mean nats per token, by lane."""
        config, count = self._original.config, 1 + len(self._lanes)
        ids = np.tile(self._texts.ravel(), count)
        positions = np.tile(np.arange(self._texts.shape[1]), count * len(self._texts))
        attend = SegmentedAttention(count * len(self._texts))
        forward(config, self._weight, ids, positions, attend)
        return self._of_answers()

    def _weight(self, name: str) -> np.ndarray:
        source = self._original.sources[name]
        if len(source.shape) == 1:
            return self._original.checkpoint.read(source)
        if name == "embed":
            return cast(np.ndarray, Rows(self._rows, self._keep))
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
            blocks = Blocks(*reduce(joined, self._plain.matrix(name, form)))
            out[lane] = x[lane] @ dequantize(blocks, form.bits)[:, : form.columns].T
        return out

    def _keep(self, x: np.ndarray) -> np.ndarray:
        """Answers of all lanes at once would be too many: the head is multiplied later."""
        self._hidden = x
        return np.zeros((len(x), 1), np.float32)

    def _rounded(self, rows: np.ndarray) -> np.ndarray:
        return dequantize(quantize(rows, self._form), self._form.bits)[:, : rows.shape[1]]

    def _of_answers(self) -> list[float]:
        """Sums over the vocabulary while the head is read, some of its rows at a time.

        With p of the first lane's logits z, and z' of another: sum p (z - z') - lse(z) + lse(z').
        """
        clean, *others = [slice(0, self._texts.size), *self._lanes.values()]
        whole = _LogSum(self._texts.size)
        for chunk, rounded in self._head():
            whole.add(self._logits(clean, chunk, rounded))
        normalizer = whole.value[:, None]
        apart = np.zeros((len(others), self._texts.size))
        wholes = [_LogSum(self._texts.size) for _ in others]
        for chunk, rounded in self._head():
            logits = self._logits(clean, chunk, rounded)
            share = np.exp(logits - normalizer)
            for lane, place in enumerate(others):
                own = self._logits(place, chunk, rounded)
                apart[lane] += (share * (logits - own)).sum(axis=1, dtype=np.float64)
                wholes[lane].add(own)
        found = apart - whole.value + np.array([one.value for one in wholes])
        return found.mean(axis=1).tolist()

    def _head(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Rows of the head, and what they become in the lane that rounds it."""
        name = "embed" if self._original.config.tied_head else "head"
        for chunk in self._original.checkpoint.chunks(self._original.sources[name]):
            yield chunk, self._rounded(chunk) if name in self._lanes else None

    def _logits(self, lane: slice, chunk: np.ndarray, rounded: np.ndarray | None) -> np.ndarray:
        config = self._original.config
        name = "embed" if config.tied_head else "head"
        rows = rounded if rounded is not None and lane == self._lanes[name] else chunk
        return softcap(self._hidden[lane] @ rows.T, config.final_softcap)


class _LogSum:
    """log of the sum of exp over what was added, of each of `rows` rows."""

    def __init__(self, rows: int) -> None:
        self._top, self._sum = np.full(rows, -np.inf), np.zeros(rows)

    def add(self, logits: np.ndarray) -> None:
        top = np.maximum(self._top, logits.max(axis=1))
        self._sum *= np.exp(self._top - top)
        shifted = logits - top[:, None].astype(np.float32)
        self._sum += np.exp(shifted).sum(axis=1, dtype=np.float64)
        self._top = top

    @property
    def value(self) -> np.ndarray:
        return self._top + np.log(self._sum)
