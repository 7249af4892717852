"""The policy `budget`, the default: bits and evictions have prices, and the cheapest go first."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_WIDTHS
from kvq.formats import CODE_SPAN
from kvq.hull import hull_descent
from kvq.named import require
from kvq.policies import FEWEST_BITS, Evidence, Relief
from kvq.policies.spend import Steps, all_widths, page_bytes_at, present_pages, spend

Costs = NDArray[np.float64]

RUNGS = np.array([(k, v) for k in PAGE_WIDTHS for v in PAGE_WIDTHS] + [(0, 0)], np.int32)
# The retrieval share that a head is assumed to have where no export measured it.
UNKNOWN_SHARE = 0.14
# A logit error e moves a token's attention weight a by a (1 - a) e; eviction removes all of a.
# The squared ratio of both is (1 - a)^2, taken at a = 1/2.
DOUBT = 0.25
# An error in the first or the last layer counts this many times as much.
EDGE = 4.0
# A page that is still to come is priced as the mean of this many newest pages of its head.
RECENT = 4


@dataclass(frozen=True)
class BudgetPolicy:
    """Lowers or evicts pages where this costs least per byte, over all layers and heads.

    Every page can be read at key and value widths of 8, 6, 4 or 2 bits each, or be evicted:
    seventeen rungs, each with its bytes and its damage. Steps down the lower convex hulls of the
    pages are taken in the order of their damage per byte (`kvq.hull`).

    Damage is the squared change of the attention output, and has two parts. The first is what the
    probes see (`Evidence.attention`). To first order, keys rounded to steps s change the output by
    S_t |V_t - X| times a logit noise of sum_d q_d^2 s_d^2 / 12, and values by S_t s_t; for an
    evicted page it is the change that renormalising without it makes. Few probes see a page, so
    each estimate is drawn half way, in logarithms, to the mean of its head (`tempered`). Evictions
    of one head add up faster than rounding errors do (`eviction_prices`).

    The second part is what the probes do not see: a later query may look for one token of the page.
    Few heads do this, and an export measures which (`Evidence.retrieval`). Such a query gives the
    token the share of its attention that repeated text got. Without this part a page that no query
    has asked for yet would be free to evict. With the same value in all heads, pages of heads that
    look nothing up would be kept.

    An error counts relative to the mean output of its layer, and `EDGE` times as much in the first
    and the last layer. Pages that are about to close are priced as the newest of their head, so
    that they may close at fewer bits.

    Sensitivities follow QAQ (arXiv 2403.04643). Pricing heads apart follows RazorAttention (arXiv
    2407.15891), which keeps or drops where this prices. The prior and the price of new pages are
    our own.

    Args:
        prior: Chance, 0 to 1, that a later query looks for one token of a page, per query and over
            all pages together. Default 0.25.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    fewest_bits: ClassVar[tuple[int, int]] = FEWEST_BITS

    prior: float = 0.25

    def __post_init__(self) -> None:
        prior = f"budget: prior={self.prior}"
        require(0 <= self.prior <= 1, "policy", prior, "a chance from 0 to 1")

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        pages, all_costs = present_pages(evidence), self.costs(evidence)
        costs = all_costs[tuple(pages[:, :3].T)]
        new_pages, new_costs = _new_pages(evidence, all_costs)
        steps = hull_steps(
            np.concatenate([pages, new_pages]),
            np.concatenate([costs, new_costs]),
            page_bytes_at(RUNGS, evidence),
        )
        # A page that is not there yet cannot be evicted.
        steps = steps[(steps[:, 2] < all_costs.shape[2]) | (steps[:, 3] > 0)]
        column_costs = np.zeros(evidence.widths.shape[2])
        np.add.at(column_costs, pages[:, 2], costs[:, -1])
        order = np.argsort(column_costs, kind="stable")
        return spend(evidence, steps, bytes_short, columns_short, order)

    def costs(self, evidence: Evidence) -> Costs:
        """Returns the damage float64 [L, Hk, C, rungs] of reading each page at each rung."""
        weights = _weights(evidence)
        return evidence.stack_layers(
            lambda layer: self._layer_costs(evidence, layer, weights[:, layer])
        )

    def _layer_costs(self, evidence: Evidence, layer: int, weights: Costs) -> Costs:
        """Returns the damage in one layer, [Hk, C, rungs].

        `weights` [3, Hk] are the costs of a unit of key, value and eviction error.
        """
        attention, constants = evidence.attention, evidence.constants(layer)
        assert attention is not None
        dim, columns = evidence.head_dim, evidence.widths.shape[2]
        present = evidence.widths[layer, ..., 0] > 0
        key_step, value_step = constants.key_range / CODE_SPAN, constants.value_range / CODE_SPAN
        # What rounding and eviction do to the output of a query that looks for one token.
        square = attention.query_square[layer]
        logit_noise = np.einsum("hd,hcd->hc", square, np.square(key_step)) / 12
        middle = constants.value_min + constants.value_range / 2
        size = dim * (np.square(middle) + np.square(constants.value_range) / 20).mean(axis=-1)
        shares = UNKNOWN_SHARE if evidence.retrieval is None else evidence.retrieval[layer][:, None]
        lookup = self.prior * np.square(shares) / max(1, columns)
        keys = tempered(attention.key_error[layer], present) + lookup * DOUBT * logit_noise * size
        steps = np.square(value_step).mean(axis=-1) * dim / 12
        values = tempered(attention.value_error[layer], present) + lookup * steps
        evicted = tempered(attention.evict_error[layer], present)
        evicted = eviction_prices(evicted, present) + lookup * size
        keys, values, evicted = weights[..., None] * np.stack([keys, values, evicted])
        rounding = [keys * 4.0 ** (8 - k) + values * 4.0 ** (8 - v) for k, v in RUNGS[:-1].tolist()]
        return np.stack([*rounding, evicted], axis=-1)


def tempered(errors: Costs, present: NDArray[np.bool_]) -> Costs:
    """Returns errors [.., C] moved half way, in logarithms, to the mean of their head."""
    mean = errors.sum(axis=-1, keepdims=True) / np.maximum(present.sum(axis=-1, keepdims=True), 1)
    return np.sqrt(errors * mean)


def eviction_prices(errors: Costs, present: NDArray[np.bool_]) -> Costs:
    """Returns what each eviction adds to the error of its head [.., C], the least harmful first.

    The errors of evicted pages point the same way: n equal evictions of one head give n^2 times the
    squared error of one. So the i-th eviction, counting earlier ones, adds 2i - 1 times its own.
    """
    order = np.argsort(np.where(present, errors, np.inf), axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    already_evicted = (~present).sum(axis=-1, keepdims=True)
    return (2 * (already_evicted + rank) + 1) * errors


def _new_pages(evidence: Evidence, costs: Costs) -> tuple[Steps, Costs]:
    """Returns the pages that are about to close, [n, 5], as a last column, and their costs.

    No query has seen them yet. Each costs as much as the mean of the newest `RECENT` pages of its
    head; costs are [n, rungs].
    """
    widths, columns = all_widths(evidence)[:, :, -1], costs.shape[2]
    present = evidence.widths[..., 0] > 0
    newest = present & (present[..., ::-1].cumsum(axis=-1)[..., ::-1] <= RECENT)
    layers, heads = np.nonzero((widths[..., 0] > 0) & newest.any(axis=-1))
    mean = np.einsum("lhcr,lhc->lhr", costs, newest)[layers, heads]
    mean /= newest.sum(axis=-1)[layers, heads, None]
    place = np.column_stack([layers, heads, np.full_like(layers, columns)])
    return np.concatenate([place, widths[layers, heads]], axis=1).astype(np.int32), mean


def hull_steps(pages: Steps, costs: Costs, rung_bytes: NDArray[np.int64]) -> Steps:
    """Returns the steps of all pages down their convex hulls, the cheapest per byte first.

    `pages` int32 [P, 5] with present widths, `costs` float64 [P, rungs], `rung_bytes` [rungs].
    """
    lower = np.asarray((RUNGS[None] <= RUNGS[:, None]).all(axis=-1))
    start = np.argmax((RUNGS[None] == pages[:, None, 3:]).all(axis=-1), axis=1)
    page, rung = hull_descent(costs, rung_bytes, start, lower)
    return np.column_stack([pages[page, :3], RUNGS[rung]]).astype(np.int32)


def _weights(evidence: Evidence) -> Costs:
    """Returns the cost of a unit of key, value and eviction error in each head, [3, L, Hk]."""
    assert evidence.attention is not None
    output = evidence.attention.output_square.sum(axis=-1).mean(axis=1).astype(np.float64)
    weight = 1 / np.maximum(output, 1e-12)
    weight[[0, -1]] *= EDGE
    return np.broadcast_to(weight[:, None], (3, *evidence.widths.shape[:2]))
