"""Query rows that a numpy cache keeps as evidence of what attention looks at.

Which tokens' they are, `csrc/probes.h` says; what they see of the pages is the cache's to compute.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS, AttentionParams
from kvq.formats import NEWEST_PROBES, PROBE_ROWS, kept_heads
from kvq.geometry import Geometry
from kvq.reference.stored import (
    MEAN_SHARE,
    PEAK_STEP,
    Float,
    Half,
    mass_code,
    mass_of,
    sample_slot,
    sampled_token,
)
from numpy_cache.pages import Page
from regions import PROBE_STRIDE, newest_slots


@dataclass(slots=True)
class Probe:
    """One token's queries, rotated and scaled: float16 [L, Hk, n, D] of all layers that own keys.

    Of the heads that share a KV head they are n, each probe's others, so that all are heard in
    turn. Of a reader they are [1, Hk, n, D]. Token -1: none is held.
    """

    token: int
    position: int
    rows: Half


class Probes:
    """Those of one cache, slot by slot.

    An *asker* is a layer that owns keys or, numbered behind all of them, one that reads the last
    one's. `layers`: what every asker's attention was last asked.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        # Of the layers together, then of every reader.
        self._kept: list[dict[int, Probe]] = [{} for _ in range(1 + geometry.kv_shared_layers)]
        self._looks = 0
        self.layers: dict[int, tuple[AttentionParams, Float]] = {}
        self._kept_heads = kept_heads(geometry.shape)

    def begin(self) -> None:
        """A pass begins: its first look at the last layer will be the first reader's."""
        self._looks = 0

    def askers(self, layer: int) -> list[int]:
        """The layer and those that read its keys."""
        layers = self._geometry.shape.num_layers
        shared = self._geometry.kv_shared_layers if layer == layers - 1 else 0
        return [layer, *range(layers, layers + shared)]

    def keep(
        self,
        params: AttentionParams,
        q: Float,
        tokens: Sequence[int],
        positions: NDArray[np.int64],
        inv_freq: Float,
    ) -> None:
        """Keeps the rows of a layer's q [T, H, D] whose tokens are probes."""
        for t, (token, position) in enumerate(zip(tokens, positions.tolist(), strict=True)):
            slot = self._slot(token)
            if slot is None:
                continue
            if params.layer == 0:
                # What readers asked at another token says nothing of this one.
                for kept in self._kept[1:]:
                    kept.pop(slot, None)
                layers = self._geometry.shape.num_layers
                self._kept[0][slot] = Probe(token, position, self._no_rows(layers))
            self._keep_row(params.layer, self._kept[0][slot], params, q[t])
        self.layers[params.layer] = (params, inv_freq)

    def keep_look(
        self,
        params: AttentionParams,
        q: Float,
        tokens: Sequence[int],
        newest: Sequence[bool],
        positions: NDArray[np.int64],
        inv_freq: Float,
    ) -> None:
        """Likewise of the next reader's, if the layer is one whose readers are heard.

        `newest`: which rows are the newest of their token in the branch. Others are not kept, so
        that a slot holds the queries of that row or nothing.
        """
        layers = self._geometry.shape.num_layers
        if params.layer != layers - 1 or self._looks >= self._geometry.kv_shared_layers:
            return
        reader = layers + self._looks
        self._looks += 1
        for t, (token, position) in enumerate(zip(tokens, positions.tolist(), strict=True)):
            slot = self._slot(token)
            if slot is None or not newest[t]:
                continue
            probe = Probe(token, position, self._no_rows(1))
            self._kept[reader - layers + 1][slot] = probe
            self._keep_row(reader, probe, params, q[t])
        self.layers[reader] = (params, inv_freq)

    def _keep_row(self, asker: int, probe: Probe, params: AttentionParams, q: Float) -> None:
        group = params.num_heads // params.num_kv_heads
        heads = (
            np.arange(self._kept_heads) * group // self._kept_heads + probe.token // PROBE_STRIDE
        )
        of_heads = q.reshape(params.num_kv_heads, group, -1)[:, heads % group]
        with np.errstate(over="ignore"):
            rows = (of_heads * np.float32(params.scale)).astype(np.float16)
        probe.rows[self._row(asker)] = rows
        # A query that float16 cannot hold is no probe.
        if not np.isfinite(rows).all():
            probe.token = -1

    def _no_rows(self, layers: int) -> Half:
        shape = self._geometry.shape
        return np.zeros((layers, shape.num_kv_heads, self._kept_heads, shape.head_dim), np.float16)

    def _row(self, asker: int) -> int:
        """Where an asker's queries lie in those of its probes."""
        return asker if asker < self._geometry.shape.num_layers else 0

    def forget(self, tokens: Iterable[int]) -> None:
        """These are no longer what was seen, or never were kept."""
        for token in tokens:
            slot = self._slot(token)
            for kept in self._kept:
                if slot in kept and kept[slot].token == token:
                    kept[slot].token = -1

    def forget_from(self, first: int) -> None:
        """Likewise all tokens from `first` on."""
        for kept in self._kept:
            self.forget([probe.token for probe in kept.values() if probe.token >= first])

    def kinds(self, asker: int, tokens: int) -> tuple[list[Probe], list[Probe]]:
        """An asker's newest probes among the first `tokens` tokens, and its sample of them."""
        return self._newest(asker, tokens), self._sampled(asker, tokens)

    def _newest(self, asker: int, tokens: int) -> list[Probe]:
        last = -(-tokens // PROBE_STRIDE)
        first = max(0, last - NEWEST_PROBES)
        return self._of(asker, [i * PROBE_STRIDE for i in range(first, last)])

    def _sampled(self, asker: int, tokens: int) -> list[Probe]:
        """Those among the first `tokens` tokens whose slot no draft can have overwritten."""
        horizon = tokens + 2 * self._geometry.draft_tokens
        newest: dict[int, int] = {}
        for run in range((horizon // PAGE_TOKENS + 1) * self._geometry.samples):
            slot = sample_slot(run)
            if slot is not None and sampled_token(run) < horizon:
                newest[slot] = sampled_token(run)
        return self._of(asker, [token for token in newest.values() if token < tokens])

    def rows(
        self, asker: int, head: int, probes: Sequence[Probe]
    ) -> tuple[Float, NDArray[np.int64]]:
        """Rows [R, D] of a KV head and their positions: many are thinned out evenly."""
        rows = np.array([p.rows[self._row(asker), head] for p in probes], np.float32)
        rows = rows.reshape(-1, self._geometry.shape.head_dim)
        where = np.repeat(np.array([p.position for p in probes], np.int64), self._kept_heads)
        count = min(len(rows), PROBE_ROWS)
        spaced = np.arange(count) * len(rows) // max(count, 1)
        return rows[spaced], where[spaced]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All of it by name, as a snapshot holds it."""
        arrays: dict[str, NDArray[Any]] = {}
        for prefix, kept in zip(self._prefixes, self._kept, strict=True):
            probes = sorted(kept.items())
            facts = [(slot, probe.token, probe.position) for slot, probe in probes]
            arrays[f"{prefix}probes"] = np.array(facts, np.int64).reshape(-1, 3)
            for slot, probe in probes:
                arrays[f"{prefix}probe{slot}"] = probe.rows
        for layer, (params, inv_freq) in self.layers.items():
            arrays[f"layer{layer}"] = np.array(astuple(params), np.float64)
            arrays[f"layer{layer}f"] = inv_freq
        return arrays

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Takes what `arrays` gave."""
        self._kept = [
            {
                slot: Probe(token, position, arrays[f"{prefix}probe{slot}"])
                for slot, token, position in arrays[f"{prefix}probes"].tolist()
            }
            for prefix in self._prefixes
        ]
        self.layers = {}
        for layer in range(self._geometry.shape.num_layers + self._geometry.kv_shared_layers):
            if f"layer{layer}" in arrays:
                values = zip(fields(AttentionParams), arrays[f"layer{layer}"], strict=True)
                facts: dict[str, Any] = {f.name: f.type(v) for f, v in values}  # type: ignore[operator]
                self.layers[layer] = AttentionParams(**facts), arrays[f"layer{layer}f"]

    @property
    def _prefixes(self) -> list[str]:
        """Of what a snapshot holds of the layers, then of every reader."""
        return ["", *(f"reader{reader}" for reader in range(self._geometry.kv_shared_layers))]

    def _slot(self, token: int) -> int | None:
        """Where a token's query is kept, if it is a recent or a sampled probe."""
        newest = newest_slots(self._geometry.draft_tokens)
        if token % PROBE_STRIDE == 0:
            return token // PROBE_STRIDE % newest
        run = token // PAGE_TOKENS
        sampled = self._geometry.samples and token == sampled_token(run)
        sample = sample_slot(run) if sampled else None
        return None if sample is None else newest + sample

    def _of(self, asker: int, tokens: Sequence[int]) -> list[Probe]:
        """An asker's of these tokens that are still kept, in their order."""
        probes = self._kept[max(0, asker - self._geometry.shape.num_layers + 1)]
        kept = {probe.token: probe for probe in probes.values()}
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


Looks = tuple[Look, Look]


def record(pages: Sequence[Page], looks: Sequence[Looks], askers: int) -> Float:
    """Facts float32 [8, n] of a stream's n pages, from what its askers saw of them, in sum.

    `looks`: of each that asked anything what its newest rows saw and what its sampled ones. Facts
    are in the order of `ObservedAttention`'s fields; the pages remember their histories, of
    the mean over so many `askers`, for a byte counts up to 1.
    """
    facts = np.zeros((8, len(pages)), np.float32)
    for i, page in enumerate(pages):
        peak, seen = 0.0, False
        for newest, sampled in looks:
            new, old = newest.seen[i], sampled.seen[i]
            if rows := new[0] + old[0]:
                seen, peak = True, max(peak, new[2], old[2])
                facts[:3, i] += (
                    (new[1] + old[1]) / rows,
                    new[1] / max(new[0], 1),
                    old[1] / max(len(sampled.rows), 1),
                )
                facts[5:, i] += new[3:] / max(new[0], 1)
        if seen:
            recent = float(facts[1, i]) / askers
            page.peak_weight = max(1, mass_code(peak), page.peak_weight - PEAK_STEP)
            before = mass_of(page.mean_mass) if page.mean_mass else recent
            page.mean_mass = mass_code(before + MEAN_SHARE * (recent - before))
        facts[3:5, i] = mass_of(page.peak_weight), mass_of(page.mean_mass) * askers
    return facts
