"""Query rows that a numpy cache keeps as evidence of what attention looks at.

Which tokens' they are, `csrc/probes.h` says; what they see of the pages is the cache's to compute.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS, AttentionParams
from kvq.formats import NEWEST_PROBES, PROBE_ROWS, PROBE_STRIDE, newest_slots
from kvq.reference import (
    MEAN_SHARE,
    PEAK_STEP,
    Float,
    Half,
    mass_code,
    mass_of,
    sample_slot,
    sampled_token,
)
from kvq.reference_pages import Page
from kvq.sizing import Geometry


@dataclass(slots=True)
class Probe:
    """One token's queries: float16 [L, H, D], rotated and scaled. Token -1: none is held."""

    token: int
    position: int
    rows: Half


class Probes:
    """Those of one cache, slot by slot; `layers`: what every layer's attention was last asked."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._kept: dict[int, Probe] = {}
        self.layers: dict[int, tuple[AttentionParams, Float]] = {}

    def keep(
        self,
        params: AttentionParams,
        q: Float,
        tokens: Sequence[int],
        positions: NDArray[np.int64],
        inv_freq: Float,
    ) -> None:
        """Keeps the rows of q [T, H, D] whose tokens are probes."""
        self.layers[params.layer] = (params, inv_freq)
        for t, (token, position) in enumerate(zip(tokens, positions.tolist(), strict=True)):
            slot = self._slot(token)
            if slot is None:
                continue
            if params.layer == 0:
                shape = (self._geometry.shape.num_layers, *q.shape[1:])
                self._kept[slot] = Probe(token, position, np.zeros(shape, np.float16))
            with np.errstate(over="ignore"):
                rows = (q[t] * np.float32(params.scale)).astype(np.float16)
            self._kept[slot].rows[params.layer] = rows
            # A query that float16 cannot hold is no probe.
            if not np.isfinite(rows).all():
                self._kept[slot].token = -1

    def forget(self, tokens: Iterable[int]) -> None:
        """These are no longer what was seen, or never were kept."""
        for token in tokens:
            slot = self._slot(token)
            if slot in self._kept and self._kept[slot].token == token:
                self._kept[slot].token = -1

    def forget_from(self, first: int) -> None:
        """Likewise all tokens from `first` on."""
        self.forget([probe.token for probe in self._kept.values() if probe.token >= first])

    def newest(self, tokens: int) -> list[Probe]:
        """The newest among the first `tokens` tokens."""
        last = -(-tokens // PROBE_STRIDE)
        first = max(0, last - NEWEST_PROBES)
        return self._of([i * PROBE_STRIDE for i in range(first, last)])

    def sampled(self, tokens: int) -> list[Probe]:
        """Those among the first `tokens` tokens whose slot no draft can have overwritten."""
        horizon = tokens + 2 * self._geometry.draft_tokens
        newest: dict[int, int] = {}
        for run in range(horizon // PAGE_TOKENS + 1):
            slot = sample_slot(run)
            if slot is not None and sampled_token(run) < horizon:
                newest[slot] = sampled_token(run)
        return self._of([token for token in newest.values() if token < tokens])

    def rows(
        self, layer: int, head: int, probes: Sequence[Probe]
    ) -> tuple[Float, NDArray[np.int64]]:
        """Rows [R, D] of a KV head and their positions: many are thinned out evenly."""
        shape = self._geometry.shape
        group = shape.num_heads // shape.num_kv_heads
        own = slice(head * group, (head + 1) * group)
        rows = np.array([p.rows[layer, own] for p in probes], np.float32)
        rows = rows.reshape(-1, shape.head_dim)
        where = np.repeat(np.array([p.position for p in probes], np.int64), group)
        count = min(len(rows), PROBE_ROWS)
        taken = np.arange(count) * len(rows) // max(count, 1)
        return rows[taken], where[taken]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All of it by name, as a snapshot holds it."""
        probes = sorted(self._kept.items())
        facts = [(slot, probe.token, probe.position) for slot, probe in probes]
        arrays: dict[str, NDArray[Any]] = {"probes": np.array(facts, np.int64).reshape(-1, 3)}
        for slot, probe in probes:
            arrays[f"probe{slot}"] = probe.rows
        for layer, (params, inv_freq) in self.layers.items():
            arrays[f"layer{layer}"] = np.array(astuple(params), np.float64)
            arrays[f"layer{layer}f"] = inv_freq
        return arrays

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Takes what `arrays` gave."""
        self._kept = {
            slot: Probe(token, position, arrays[f"probe{slot}"])
            for slot, token, position in arrays["probes"].tolist()
        }
        self.layers = {}
        for layer in range(self._geometry.shape.num_layers):
            if f"layer{layer}" in arrays:
                values = zip(fields(AttentionParams), arrays[f"layer{layer}"], strict=True)
                facts: dict[str, Any] = {f.name: f.type(v) for f, v in values}  # type: ignore[operator]
                self.layers[layer] = AttentionParams(**facts), arrays[f"layer{layer}f"]

    def _slot(self, token: int) -> int | None:
        """Where a token's query is kept, if it is a recent or a sampled probe."""
        newest = newest_slots(self._geometry.draft_tokens)
        if token % PROBE_STRIDE == 0:
            return token // PROBE_STRIDE % newest
        run = token // PAGE_TOKENS
        sample = sample_slot(run) if token == sampled_token(run) else None
        return None if sample is None else newest + sample

    def _of(self, tokens: Sequence[int]) -> list[Probe]:
        """Those of these tokens that are still kept, in their order."""
        kept = {probe.token: probe for probe in self._kept.values()}
        return [kept[token] for token in sorted(tokens) if token in kept]


@dataclass(slots=True)
class Look:
    """What probe rows [R, D] with these outputs [R, D] saw of every page that a stream holds.

    `seen` [6] a page: rows that see any of it, then, summed over these, the mass they give it, but
    of single tokens' weights the largest, and their key, value and eviction errors.
    """

    rows: Float
    outputs: Float
    seen: list[NDArray[np.float64]] = field(default_factory=lambda: [])


def record(pages: Sequence[Page], newest: Look, sampled: Look) -> Float:
    """Facts float32 [8, n] of a stream's n pages, from what two kinds of rows saw of them.

    They are in the order of `kvq.policies.Attention`'s fields; the pages remember their histories.
    """
    facts = np.zeros((8, len(pages)), np.float32)
    for i, (page, new, old) in enumerate(zip(pages, newest.seen, sampled.seen, strict=True)):
        if rows := new[0] + old[0]:
            recent = float(new[1] / max(new[0], 1))
            total = float(old[1] / max(len(sampled.rows), 1))
            facts[:3, i] = (new[1] + old[1]) / rows, recent, total
            facts[5:, i] = new[3:] / max(new[0], 1)
            peak = mass_code(max(new[2], old[2]))
            page.peak_weight = max(1, peak, page.peak_weight - PEAK_STEP)
            before = mass_of(page.mean_mass) if page.mean_mass else recent
            page.mean_mass = mass_code(before + MEAN_SHARE * (recent - before))
        facts[3:5, i] = mass_of(page.peak_weight), mass_of(page.mean_mass)
    return facts
