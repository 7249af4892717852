"""The default: key bits, value bits and eviction in one currency, spent where they cost least.

Every page can be read at (K, V) widths of {8, 6, 4, 2} each, or be gone: seventeen rungs, each with
its bytes and its damage. Steps down the pages' convex hulls are taken where they cost least per
byte, over all pages, layers and heads (`kvq.hull`).

Damage is the squared change of the attention output. Two terms make it up. What the probes see: to
first order, keys rounded to steps s change the output by S_t |V_t - X| times a logit noise of sum_d
q_d^2 s_d^2 / 12, values by S_t s_t; an evicted page by what renormalising without it does
(`Evidence.attention`). Few rows see a page, so every estimate is taken half way, in logarithms, to
the mean of its head (`tempered`). Rounding errors of pages are independent; evictions are not: what
is gone points the same way, so the i-th eviction of a head costs 2i - 1 times what it does alone
(`eviction_prices`). And what probes do not see: a later query may look for one token of the page,
as a question looks for its answer. Few heads do that, and an export knows which
(`Evidence.retrieval`): such a query gives the token the share of its attention that repeats gave
theirs. `prior` is the chance of one, per query and over all pages together. Without the second term
a page nobody has asked for yet is free to evict, and retrieval fails first; were it alike in all
heads, pages of those that look for nothing would be kept for it.

Layers differ in what an error costs in the end: it counts relative to the layer's mean output, and
`EDGE` times as much in the first and last layer. Prices in nats, measured at export layer by layer
on 128 tokens, were used before and lost on both real models that were tried: at a
quarter of the bytes 1.7 and 4.7 times the divergence, at an eighth 2.4 and 2.2 times.

Pages about to enter are pages like others: nobody has looked at them, so each is priced as the
newest of its stream are, and enters at the widths that price affords. Room for a page at 8:8 would
be taken from pages that need it more (0.0068 nats with it, 0.0051 without, at a quarter of the
bytes).

Sensitivities after QAQ (arXiv 2403.04643), heads apart after RazorAttention (arXiv 2407.15891),
which keeps or drops where this prices; the prior and the price of what enters are ours.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_WIDTHS
from kvq.errors import UsageError, argument
from kvq.formats import CODE_SPAN
from kvq.hull import hull_descent
from kvq.policies import Evidence, Relief
from kvq.policies.spend import Steps, all_widths, held_pages, page_bytes_at, spend

Costs = NDArray[np.float64]

RUNGS = np.array([(k, v) for k in PAGE_WIDTHS for v in PAGE_WIDTHS] + [(0, 0)], np.int32)
# What a head's share is taken for where no export measured it.
UNKNOWN_SHARE = 0.14
# A logit that is off by e moves a token's attention a by a (1 - a) e, where its absence takes a:
# (1 - a)^2, with a at one half, since a head that is sure of a repeat is less so of an answer.
DOUBT = 0.25
EDGE = 4.0
RECENT = 4


@dataclass(frozen=True)
class Budget:
    """Convex-hull allocation of bits and evictions."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    prior: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.prior <= 1:
            raise UsageError(
                f"{argument('policy')} budget: prior={self.prior} is no chance; give 0 to 1"
            )

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        pages, every = held_pages(evidence), self.costs(evidence)
        costs = every[tuple(pages[:, :3].T)]
        entering, expected = _entering(evidence, every)
        steps = hull_steps(
            np.concatenate([pages, entering]),
            np.concatenate([costs, expected]),
            page_bytes_at(RUNGS, evidence),
        )
        # What enters cannot be evicted before it is there.
        steps = steps[(steps[:, 2] < every.shape[2]) | (steps[:, 3] > 0)]
        gone = np.zeros(evidence.widths.shape[2])
        np.add.at(gone, pages[:, 2], costs[:, -1])
        return spend(evidence, steps, bytes_short, columns_short, np.argsort(gone, kind="stable"))

    def costs(self, evidence: Evidence) -> Costs:
        """Damage float64 [L, Hk, C, rungs] of reading each page at each rung."""
        weights = _weights(evidence)
        return evidence.of_layers(lambda layer: self._layer(evidence, layer, weights[:, layer]))

    def _layer(self, evidence: Evidence, layer: int, weights: Costs) -> Costs:
        """The damage in one layer [Hk, C, rungs]; `weights` [3, Hk]: of keys, values, evictions."""
        attention, constants = evidence.attention, evidence.constants(layer)
        assert attention is not None
        dim, columns = evidence.head_dim, evidence.widths.shape[2]
        held = evidence.widths[layer, ..., 0] > 0
        key_step, value_step = constants.key_range / CODE_SPAN, constants.value_range / CODE_SPAN
        # Of a query that looks for one token: what rounding and absence do to its output.
        square = attention.query_square[layer]
        logit_noise = np.einsum("hd,hcd->hc", square, np.square(key_step)) / 12
        middle = constants.value_min + constants.value_range / 2
        size = dim * (np.square(middle) + np.square(constants.value_range) / 20).mean(axis=-1)
        shares = UNKNOWN_SHARE if evidence.retrieval is None else evidence.retrieval[layer][:, None]
        unseen = self.prior * np.square(shares) / max(1, columns)
        keys = tempered(attention.key_error[layer], held) + unseen * DOUBT * logit_noise * size
        steps = np.square(value_step).mean(axis=-1) * dim / 12
        values = tempered(attention.value_error[layer], held) + unseen * steps
        evicted = tempered(attention.evict_error[layer], held)
        gone = eviction_prices(evicted, held) + unseen * size
        keys, values, gone = weights[..., None] * np.stack([keys, values, gone])
        rounding = [keys * 4.0 ** (8 - k) + values * 4.0 ** (8 - v) for k, v in RUNGS[:-1].tolist()]
        return np.stack([*rounding, gone], axis=-1)


def tempered(errors: Costs, held: NDArray[np.bool_]) -> Costs:
    """Errors [.., C] half way, in logarithms, to their head's mean: few rows tell them apart."""
    mean = errors.sum(axis=-1, keepdims=True) / np.maximum(held.sum(axis=-1, keepdims=True), 1)
    return np.sqrt(errors * mean)


def eviction_prices(errors: Costs, held: NDArray[np.bool_]) -> Costs:
    """What each eviction adds to the error of its head [.., C], the least harmful first.

    What is gone points the same way: n equal evictions of one head err n times each, n^2 in
    squares, so that the i-th adds 2i - 1 times what it does alone. Those before count.
    """
    order = np.argsort(np.where(held, errors, np.inf), axis=-1, kind="stable")
    place = np.argsort(order, axis=-1, kind="stable")
    gone = (~held).sum(axis=-1, keepdims=True)
    return (2 * (gone + place) + 1) * errors


def _entering(evidence: Evidence, costs: Costs) -> tuple[Steps, Costs]:
    """Pages to come [n, 5] in the column after the last, and what they are expected to cost [n, R].

    Nobody has looked at them yet: each is taken for the mean of its stream's newest `RECENT` pages.
    """
    entry, columns = all_widths(evidence)[:, :, -1], costs.shape[2]
    held = evidence.widths[..., 0] > 0
    newest = held & (held[..., ::-1].cumsum(axis=-1)[..., ::-1] <= RECENT)
    layers, heads = np.nonzero((entry[..., 0] > 0) & newest.any(axis=-1))
    mean = np.einsum("lhcr,lhc->lhr", costs, newest)[layers, heads]
    mean /= newest.sum(axis=-1)[layers, heads, None]
    where = np.column_stack([layers, heads, np.full_like(layers, columns)])
    return np.concatenate([where, entry[layers, heads]], axis=1).astype(np.int32), mean


def hull_steps(pages: Steps, costs: Costs, rung_bytes: NDArray[np.int64]) -> Steps:
    """Every page's steps down its convex hull, the cheapest per byte first.

    `pages` int32 [P, 5] with present widths, `costs` float64 [P, rungs], `rung_bytes` [rungs].
    """
    lower = np.asarray((RUNGS[None] <= RUNGS[:, None]).all(axis=-1))
    at = np.argmax((RUNGS[None] == pages[:, None, 3:]).all(axis=-1), axis=1)
    page, rung = hull_descent(costs, rung_bytes, at, lower)
    return np.column_stack([pages[page, :3], RUNGS[rung]]).astype(np.int32)


def _weights(evidence: Evidence) -> Costs:
    """What a unit of key, value and eviction error costs in each head, float64 [3, L, Hk]."""
    assert evidence.attention is not None
    output = evidence.attention.output_square.sum(axis=-1).mean(axis=1).astype(np.float64)
    weight = 1 / np.maximum(output, 1e-12)
    weight[[0, -1]] *= EDGE
    return np.broadcast_to(weight[:, None], (3, *evidence.widths.shape[:2]))
