"""Policies decide which pages of the cache lose bits, or go, when the byte budget is full.

A policy reads evidence and returns actions. It never touches a page itself and runs only when a
page closes. It must be deterministic: among equals the oldest page comes first, then the lowest
layer, then the lowest head.

A policy sees no key and no value, only what `Evidence` has; `estimates.py` estimates more from it.

To add a policy: write a frozen dataclass with the methods of `Policy` in a new file, and add a row
to `POLICIES`. A policy that ranks pages by a number derives from `Scorer`. The documentation's page
of methods shows the first lines of the file and of the class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS, PAGE_WIDTHS
from kvq.errors import argument
from kvq.named import named

# The first are for use; those after the comment are there to compare with.
POLICIES = {
    "budget": "kvq.policies.budget:BudgetPolicy",
    "kv-adaquant": "kvq.policies.kv_adaquant:KvAdaQuant",
    "uniform": "kvq.policies.uniform:Uniform",
    "streaming": "kvq.policies.streaming:Streaming",
    "oldest": "kvq.policies.oldest:Oldest",
    "zipcache": "kvq.policies.zipcache:ZipCache",
    "qaq": "kvq.policies.qaq:Qaq",
    # for comparison
    "a2sf": "kvq.policies.a2sf:A2SF",
    "chunkkv": "kvq.policies.chunkkv:ChunkKV",
    "expected-attention": "kvq.policies.expected_attention:ExpectedAttention",
    "h2o": "kvq.policies.h2o:H2O",
    "l2norm": "kvq.policies.l2norm:L2Norm",
    "lagkv": "kvq.policies.lagkv:LagKV",
    "snapkv": "kvq.policies.snapkv:SnapKV",
}

Floats = NDArray[np.float32]
# The smallest key and value widths of a page that is not evicted.
FEWEST_BITS = (PAGE_WIDTHS[-1], PAGE_WIDTHS[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedAttention:
    """Holds what the probe queries saw of every page; float32 [L, Hk, C] each, 0 for evicted pages.

    Probes are query rows of committed tokens. Of each KV head all its query heads, or four of them,
    are used. The cache keeps the newest rows and, for policies that need "samples", a seeded sample
    of the whole text. Means are over the rows that could see the page (causal, inside the window).
    Without samples all means are over the newest rows.

    `mass`: mean attention weight that the page received. `recent_mass`: the same from the newest
    rows alone. `total_mass`: the mean over all sampled rows, where rows before the page count as 0;
    it estimates the attention accumulated since the text began. `peak_weight`: the largest weight
    that a row gave to a single token of the page, in this and earlier observations; it is halved
    every four observations. `mean_mass`: running mean of `recent_mass`; each observation replaces a
    fifth of it.

    `key_error`, `value_error`: mean squared change of the newest rows' attention output, in squared
    units of values, if the page's keys (values) were read at 8 bits instead of exactly. At b bits
    it is 4^(8 - b) times as much. `evict_error`: the same if the page were evicted.

    `query_mean`, `query_square`: float32 [L, Hk, D], mean and mean square of the probes' rotated
    and scaled query channels over the query heads of a group. `output_square`: the same of the
    attention output.
    """

    mass: Floats
    recent_mass: Floats
    total_mass: Floats
    peak_weight: Floats
    mean_mass: Floats
    key_error: Floats
    value_error: Floats
    evict_error: Floats
    query_mean: Floats
    query_square: Floats
    output_square: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Holds the ranges of one layer's pages, from their stored constants; 0 for evicted pages.

    `key_min`, `key_range`: float32 [Hk, C, D], smallest key and range of each channel over the
    page's tokens. Keys are as they are stored: after RoPE, and in some heads after a Hadamard
    matrix, the same for all pages of a head. `value_min`, `value_range`: float32 [Hk, C, 64],
    smallest value and range of each token over the head's channels.
    """

    key_min: Floats
    key_range: Floats
    value_min: Floats
    value_range: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Holds what a policy may look at.

    Columns are page columns, the oldest first. `constants` and `key_squares` are read layer by
    layer, so that no copy of the whole cache is made.

    Args:
        facts: int64 [C, 4]: position of the first token, position offset, first token, mask of each
            column.
        widths: uint8 [L, Hk, C, 2]: key and value bits of each page, 0 if it is evicted.
        windows: [L]: sliding window of each layer in tokens, 0 for none.
        tokens: Tokens seen so far.
        head_dim: Channels of a head; with `value_groups` it gives the bytes of a page.
        constants: Returns the `Constants` of a layer.
        key_squares: Returns float32 [Hk, C, 64] of a layer: squared norms of the keys as they are
            read; 0 for evicted pages.
        value_groups: Groups of values in a page that have constants of their own.
        closing_pages: How many pages of every layer and head are about to close.
        new_page_widths: uint8 [L, Hk, 2]: key and value bits that new pages close at; None if
            unknown.
        attention: What the probes saw, if the policy asks for it by its `needs`.
        weight_norms: Returns float64 [L, 2]: Frobenius norms of the weights that make a layer's
            keys and values; None if they are unknown.
        retrieval: float32 [L, Hk]: the share of its attention, 0 to 1, that a head gives to an
            earlier occurrence where a text repeats itself (the largest of the group's query heads);
            None if nobody measured it.
    """

    facts: NDArray[np.int64]
    widths: NDArray[np.uint8]
    windows: NDArray[np.int64]
    tokens: int
    head_dim: int
    constants: Callable[[int], Constants]
    key_squares: Callable[[int], Floats]
    value_groups: int = PAGE_TOKENS
    closing_pages: int = 0
    new_page_widths: NDArray[np.uint8] | None = None
    attention: ObservedAttention | None = None
    weight_norms: Callable[[], NDArray[np.float64]] | None = None
    retrieval: Floats | None = None

    def stack_layers(self, function: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        """Returns the results of `function(layer)` for all layers as one array [L, ...]."""
        return np.stack([function(layer) for layer in range(len(self.widths))])


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """Holds what a policy gives up.

    Args:
        actions: int32 [n, 5]: layer, head, column, key bits, value bits of pages to change. Widths
            only fall; 0 and 0 evict the page.
        new_page_widths: uint8 [L, Hk, 2]: the bits that pages close at from now on; None leaves
            them as they are.
        close_gap: Whether the sinks move up to the oldest remaining token behind them, so that
            distances count only stored tokens.
    """

    actions: NDArray[np.int32]
    new_page_widths: NDArray[np.uint8] | None = None
    close_gap: bool = False


class Policy(Protocol):
    """Frees space in the cache when it is asked to.

    `needs` names evidence that costs bytes to keep. "attention": the cache keeps probe queries of
    the newest tokens. "samples", only beside "attention": it keeps probe queries of the whole text
    too.
    """

    needs: ClassVar[frozenset[str]]

    @property
    def fewest_bits(self) -> tuple[int, int] | None:
        """Returns the fewest key and value bits of a page before eviction; None: all its bits."""
        ...

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        """Returns what to give up to free `bytes_short` bytes and `columns_short` columns.

        It may free less only if nothing is left to free.
        """
        ...


def policy_named(text: str) -> Policy:
    """Returns the policy that `NAME` or `NAME:option=value,...` names. Raises `UsageError`."""
    return named(argument("policy"), text, POLICIES)
