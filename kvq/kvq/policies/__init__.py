"""Policies decide which pages lose bits when the budget is short; one file, one row each.

A policy sees evidence and returns actions. It never touches a page itself, runs only at page
boundaries, and must be deterministic: ties go to the oldest page, then layer, then head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS
from kvq.errors import argument
from kvq.named import named

# Those to choose among come first.
POLICIES = {
    "budget": "kvq.policies.budget:Budget",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """What probe queries saw of every page; float32 [L, Hk, C] each, 0 where a page is evicted.

    Probes are committed query rows, of a KV head four of its query heads or all, each row's others:
    the newest, and a seeded sample of the whole text where the policy needs it, else all means are
    of the newest. Means are over the rows that could see the page (causal, inside the window).

    `mass`: mean attention weight the page received. `recent_mass`: the same from the newest rows
    alone. `total_mass`: from the sampled rows, those before the page counting as 0: what a query
    gave it on average since the text began. `peak_weight`: the largest weight a row gave a single
    token of it, in this and earlier observations, halved every four of them. `mean_mass`: running
    mean of `recent_mass`, of which every observation forgets a fifth.
    `key_error`, `value_error`: mean squared change of the newest rows' attention output, in units
    of value squared, were the page's keys (values) read at 8 bits instead of exactly; a read at b
    bits costs 4^(8 - b) times as much. `evict_error`: the same were the page gone. (Sampled rows
    tell less of what is to come: an early one sees few pages and gives each of them much.)
    `query_mean`, `query_square`: float32 [L, Hk, D], mean and mean square of the probes' rotated
    and scaled query channels, the group's heads together; `output_square` likewise of the
    attention's output.
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
    """What a layer's pages span, by their stored constants; 0 where one is evicted.

    `key_min`, `key_range`: float32 [Hk, C, D], smallest key and span of each channel over the
    page's tokens (rotated keys). `value_min`, `value_range`: float32 [Hk, C, 64], smallest
    value and span of each token over the head's channels.
    """

    key_min: Floats
    key_range: Floats
    value_min: Floats
    value_range: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a policy may look at.

    `facts` int64 [C, 4]: pos0, delta, first token, mask of each page column, oldest first.
    `widths` uint8 [L, Hk, C, 2]: K and V bits, 0 if evicted. `windows` [L]: sliding windows, 0 for
    none. `tokens`: tokens seen so far. `head_dim`, `value_groups`: they fix the bytes a page frees.
    `entering`: pages of every layer and head that are about to close, at `entry_widths` uint8
    [L, Hk, 2]; 0 where nobody says so.
    `constants` and `key_squares` are read layer by layer, so that no copy of all lies beside the
    cache; `key_squares(layer)`: float32 [Hk, C, 64], squared lengths of the keys as they are read.
    `attention` is there if the policy asks for it by its `needs`. `weight_norms()`: float64 [L, 2],
    Frobenius norms of the weights that make a layer's keys and values; None where nobody knows.
    `retrieval` float32 [L, Hk]: the share of its attention that a head gives, where a text repeats
    itself, to what stood there before (0 to 1; of the query heads the one with most); None where
    nobody measured it.
    """

    facts: NDArray[np.int64]
    widths: NDArray[np.uint8]
    windows: NDArray[np.int64]
    tokens: int
    head_dim: int
    constants: Callable[[int], Constants]
    key_squares: Callable[[int], Floats]
    value_groups: int = PAGE_TOKENS
    entering: int = 0
    entry_widths: NDArray[np.uint8] | None = None
    attention: Attention | None = None
    weight_norms: Callable[[], NDArray[np.float64]] | None = None
    retrieval: Floats | None = None

    def of_layers(self, of_layer: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        """What a function of the layer says of each, stacked [L, ...]."""
        return np.stack([of_layer(layer) for layer in range(len(self.widths))])


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """What a policy gives up.

    `actions` int32 [n, 5]: layer, head, column, K bits, V bits of held pages; widths only fall, 0
    and 0 evict. `entering` uint8 [L, Hk, 2]: what the pages that enter, now and later, close at;
    None: as before. `close_gap`: the sinks move up to the oldest token behind them that is left, so
    that distances count what is held.
    """

    actions: NDArray[np.int32]
    entering: NDArray[np.uint8] | None = None
    close_gap: bool = False


class Policy(Protocol):
    """Frees space when asked. `needs` names evidence that costs bytes to keep.

    These are "attention": the cache keeps probe queries, of the newest tokens; and "samples" beside
    it: of the whole text as well.
    """

    needs: ClassVar[frozenset[str]]

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        """Frees what is short. Less than asked is allowed only if nothing is left to free."""
        ...


def policy_named(text: str) -> Policy:
    """The policy `NAME` or `NAME:option=value,...` of the table. Raises `UsageError`."""
    return named(argument("policy"), text, POLICIES)
