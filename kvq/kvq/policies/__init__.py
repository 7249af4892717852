"""Policies decide which pages lose bits when the budget is short; one file, one row each.

A policy sees evidence and returns actions. It never touches a page itself, runs only at page
boundaries, and must be deterministic: ties go to the oldest page, then layer, then head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS
from kvq.named import named

POLICIES = {
    "budget": "kvq.policies.budget:Budget",
    "chunkkv": "kvq.policies.chunkkv:ChunkKV",
    "expected-attention": "kvq.policies.expected_attention:ExpectedAttention",
    "h2o": "kvq.policies.h2o:H2O",
    "kv-adaquant": "kvq.policies.kv_adaquant:KvAdaQuant",
    "l2norm": "kvq.policies.l2norm:L2Norm",
    "lagkv": "kvq.policies.lagkv:LagKV",
    "oldest": "kvq.policies.oldest:Oldest",
    "qaq": "kvq.policies.qaq:Qaq",
    "snapkv": "kvq.policies.snapkv:SnapKV",
    "streaming": "kvq.policies.streaming:Streaming",
    "uniform": "kvq.policies.uniform:Uniform",
    "zipcache": "kvq.policies.zipcache:ZipCache",
}

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """What probe queries saw of every page; float32 [L, Hk, C] each, 0 where a page is evicted.

    Probes are committed query rows: the newest and a seeded sample of older ones, all query heads
    of a KV head. Means are over the rows that could see the page (causal, inside the window).

    `mass`: mean attention weight the page received. `peak_mass`: the largest `mass` of this and
    earlier observations, halved every four of them. `mean_mass`: their running mean.
    `key_error`, `value_error`: mean squared change of the attention output, in units of value
    squared, were the page's keys (values) read at 8 bits instead of exactly; a read at b bits
    costs 4^(8 - b) times as much. `evict_error`: the same were the page gone.
    `query_mean`, `query_square`: float32 [L, Hk, D], mean and mean square of the probes' rotated
    and scaled query channels, the group's heads together; `output_square` likewise of the
    attention's output.
    """

    mass: Floats
    peak_mass: Floats
    mean_mass: Floats
    key_error: Floats
    value_error: Floats
    evict_error: Floats
    query_mean: Floats
    query_square: Floats
    output_square: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What every page spans, by its stored constants; 0 where it is evicted.

    `key_min`, `key_range`: float32 [L, Hk, C, D], smallest key and span of each channel over the
    page's tokens (rotated keys). `value_min`, `value_range`: float32 [L, Hk, C, 64], smallest
    value and span of each token over the head's channels.
    """

    key_min: Floats
    key_range: Floats
    value_min: Floats
    value_range: Floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sensitivity:
    """What an error in one layer costs, from calibration at export; float64 [L] each.

    `key`, `value`: nats of divergence per unit of `Attention.key_error` and `value_error`, summed
    over heads and pages; `evict` the same per page evicted. `key_bits_nats` and `value_bits_nats`
    float64 [L, 3]: divergence when only that layer's keys (values) are read at 8, 4 and 2 bits.
    """

    key: NDArray[np.float64]
    value: NDArray[np.float64]
    evict: NDArray[np.float64]
    key_bits_nats: NDArray[np.float64]
    value_bits_nats: NDArray[np.float64]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sensitivity) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, list[Any]]:
        """Numbers to four digits, as lists."""
        rounded = {f.name: np.vectorize(_four_digits)(getattr(self, f.name)) for f in fields(self)}
        return {name: values.tolist() for name, values in rounded.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], num_layers: int) -> "Sensitivity":
        """Raises KeyError, TypeError or ValueError for another object."""
        values = {f.name: np.array(data[f.name], np.float64) for f in fields(cls)}
        for name, array in values.items():
            shape = (num_layers, 3) if name.endswith("_nats") else (num_layers,)
            if array.shape != shape or not np.isfinite(array).all() or (array < 0).any():
                raise ValueError(f"{name} of shape {array.shape} is no sensitivity of {shape}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a policy may look at.

    `facts` int64 [C, 4]: pos0, delta, first token, mask of each page column, oldest first.
    `widths` uint8 [L, Hk, C, 2]: K and V bits, 0 if evicted. `windows` [L]: sliding windows, 0 for
    none. `tokens`: tokens seen so far. `head_dim`, `value_groups`: they fix the bytes a page frees.
    `entering`: pages of every layer and head that are about to close, at `entry_widths` uint8
    [L, Hk, 2]; 0 where nobody says so.
    `attention` and `constants` are there if the policy asks for them by its `needs`;
    `sensitivity` is None for a model that was not calibrated.
    """

    facts: NDArray[np.int64]
    widths: NDArray[np.uint8]
    windows: NDArray[np.int64]
    tokens: int
    head_dim: int
    value_groups: int = PAGE_TOKENS
    entering: int = 0
    entry_widths: NDArray[np.uint8] | None = None
    attention: Attention | None = None
    constants: Constants | None = None
    sensitivity: Sensitivity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """What a policy gives up.

    `actions` int32 [n, 5]: layer, head, column, K bits, V bits of held pages; widths only fall, 0
    and 0 evict. `entering` uint8 [L, Hk, 2]: what the pages that enter, now and later, close at;
    None: as before.
    """

    actions: NDArray[np.int32]
    entering: NDArray[np.uint8] | None = None


class Policy(Protocol):
    """Frees space when asked. `needs` names evidence it cannot do without.

    Possible needs: "attention" (the cache keeps probe queries) and "constants".
    """

    needs: ClassVar[frozenset[str]]

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        """Frees what is short. Less than asked is allowed only if nothing is left to free."""
        ...


def policy_named(text: str) -> Policy:
    """The policy `NAME` or `NAME:option=value,...` of the table. Raises `UsageError`."""
    return named("--kv-policy", text, POLICIES)


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
