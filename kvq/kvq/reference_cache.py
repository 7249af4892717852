"""The cache in numpy: the same calls, bytes and meaning as the native one.

What the native cache is tested against, and what runs without a compiler. Knows no policy: which
page loses bits is told from outside.
"""

import io
from dataclasses import astuple, dataclass, field, fields
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS, AttentionParams
from kvq.errors import CacheError, SnapshotError
from kvq.formats import (
    GRANULES,
    PROBE_ROWS,
    PROBE_STRIDE,
    PROBES,
    RING_SLOTS,
    constant_bytes,
    granule_bytes,
    page_bytes,
)
from kvq.reference import (
    KEYS,
    MEAN_SHARE,
    OBSERVED_MASS,
    PEAK_STEP,
    VALUES,
    Bytes,
    Float,
    Half,
    KeyPart,
    attention_weights,
    decode,
    encode,
    mass_code,
    mass_of,
    normalize,
    page_errors,
    planes,
    rotate,
    sampled_token,
    softmax_attend,
    split_heads,
)
from kvq.sizing import Arena


@dataclass(slots=True)
class Page:
    """One page of one (layer, KV head): codes kept whole, read at the widths it still has."""

    codes: tuple[Bytes, Bytes]
    scale: tuple[Half, Half]
    minimum: tuple[Half, Half]
    bits: tuple[int, int]
    peak_mass: int = 0
    mean_mass: int = 0

    def read(self, side: int) -> Float:
        return decode(self.codes[side], self.scale[side], self.minimum[side], self.bits[side], side)

    def stored(self, head_dim: int) -> bytes:
        """The page's bytes as the native cache keeps them: constants, then planes."""
        constants = [
            part.astype(np.float16).tobytes()
            for side in (KEYS, VALUES)
            for part in (self.scale[side], self.minimum[side])
        ]
        sides = [planes(self.codes[s], self.bits[s], s).tobytes() for s in (KEYS, VALUES)]
        return b"".join(constants + sides)


@dataclass(slots=True)
class Column:
    """Positions of one page of all streams; `pages[stream]` is None once evicted."""

    pos0: int
    first_token: int
    delta: int = 0
    mask: int = (1 << PAGE_TOKENS) - 1
    pages: list[Page | None] = field(default_factory=list)


@dataclass(slots=True)
class _Probe:
    """A query row kept as evidence: float16 [L, H, D], rotated and scaled."""

    token: int
    position: int
    rows: Half


@dataclass(slots=True)
class _Rows:
    """Floating-point rows of one stream, float16 [n, D] each."""

    k: Half
    v: Half


class ReferenceCache:
    """The cache in numpy: same calls, same bytes and same meaning as the native one."""

    handle = None

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.table: list[Column] = []
        self._entering = np.empty((arena.streams, 2), np.uint8)
        self._entering[:] = arena.plan.k_bits, arena.plan.v_bits
        empty = np.zeros((0, arena.shape.head_dim), np.float16)
        self._tail = [_Rows(empty, empty) for _ in range(arena.streams)]
        self._fresh: dict[int, list[_Rows]] = {}
        self._positions: NDArray[np.int64] = np.zeros(0, np.int64)
        self._fresh_positions: NDArray[np.int64] = np.zeros(0, np.int64)
        self._probes: dict[int, _Probe] = {}
        self._layers: dict[int, tuple[AttentionParams, Float]] = {}
        self.tokens = 0
        self.pending = 0
        self.peak_bytes = self.used_bytes

    # -- bytes --

    @property
    def used_bytes(self) -> int:
        dim = self.arena.shape.head_dim
        pages = [page for column in self.table for page in column.pages if page]
        fixed = self.arena.regions.num_bytes
        granules = sum(GRANULES[bits] for page in pages for bits in page.bits)
        return fixed + len(pages) * constant_bytes(dim) + granules * granule_bytes(dim)

    @property
    def tail_rows(self) -> int:
        return len(self._positions)

    def missing(self, tokens: int) -> tuple[int, int]:
        """(bytes, columns) still missing before `tokens` more can be taken."""
        pages = self._closing(tokens)
        dim = self.arena.shape.head_dim
        widths = self._entering.tolist() if pages else []
        needed = pages * sum(page_bytes(dim, *bits) for bits in widths)
        over = self.used_bytes + needed - self.arena.num_bytes
        return max(0, over), max(0, len(self.table) + pages - self.arena.max_columns)

    def _closing(self, tokens: int) -> int:
        return self.arena.closing_pages(len(self._positions), tokens)

    # -- a forward pass --

    def begin(self, tokens: int) -> None:
        if self.pending:
            raise CacheError("begin() was called twice without commit() or abort()")
        if not 1 <= tokens <= self.arena.pass_tokens or any(self.missing(tokens)):
            raise CacheError(f"no room was made for {tokens} tokens")
        if not self.arena.plan.quantized and len(self._positions) + tokens > self.arena.tail_rows:
            raise CacheError(f"no room was made for {tokens} tokens")
        self.pending = tokens
        self._fresh = {}
        self._fresh_positions = self._positions[:0]

    def attend(
        self,
        params: AttentionParams,
        qkv: Float,
        positions: NDArray[np.int64],
        inv_freq: Float,
        q_norm: Float | None = None,
        k_norm: Float | None = None,
    ) -> Float:
        """Stores the new keys and values and returns the attention output [T, H * D]."""
        if len(qkv) != self.pending:
            raise CacheError(f"begin() was not called for {len(qkv)} tokens")
        q, k, v = split_heads(params, qkv.astype(np.float32))
        if q_norm is not None:
            q = normalize(q, q_norm, params.norm_eps)
        if k_norm is not None:
            k = normalize(k, k_norm, params.norm_eps)
        q = rotate(q, positions, inv_freq, params.rope_factor)
        k = rotate(k, positions, inv_freq, params.rope_factor)
        with np.errstate(over="ignore"):
            halves = k.astype(np.float16), v.astype(np.float16)
        if not all(np.isfinite(half).all() for half in halves):
            raise CacheError("a key or value is not finite in float16, so it cannot be cached")
        self._fresh_positions = positions
        self._fresh[params.layer] = [
            _Rows(halves[0][:, head], halves[1][:, head]) for head in range(params.num_kv_heads)
        ]
        if self.arena.probes:
            self._keep_probes(params, q, positions, inv_freq)
        group = params.num_heads // params.num_kv_heads
        out = np.empty_like(q)
        for head in range(params.num_kv_heads):
            values, where, valid, parts = self._visible(params, head, inv_freq)
            for h in range(head * group, (head + 1) * group):

                def logits_of(rows: Float, parts: list[KeyPart] = parts):
                    return np.concatenate([turn(rows) @ keys.T for keys, turn in parts], axis=1)

                out[:, h] = softmax_attend(
                    params, q[:, h], positions, logits_of, values, where, valid
                )
        return out.reshape(len(qkv), -1)

    def _visible(
        self, params: AttentionParams, head: int, inv_freq: Float
    ) -> tuple[
        Float,
        NDArray[np.int64],
        NDArray[np.bool_],
        list[KeyPart],
    ]:
        """Values, positions, validity and (keys, query transform) of all a head can look at."""
        stream = params.layer * params.num_kv_heads + head
        values, where, valid = [], [], []
        parts: list[KeyPart] = []
        for column in self.table:
            page = column.pages[stream]
            if page is None:
                continue

            # The page's keys stay as they were rotated; the query turns back by the shift.
            def turn(rows: Float, delta: int = column.delta) -> Float:
                if delta == 0:
                    return rows
                back = np.full(len(rows), -delta, np.int64)
                return rotate(rows[:, None, :], back, inv_freq)[:, 0]

            parts.append((page.read(KEYS), turn))
            values.append(page.read(VALUES))
            where.append(column.pos0 + column.delta + np.arange(PAGE_TOKENS, dtype=np.int64))
            valid.append(np.array([column.mask >> i & 1 for i in range(PAGE_TOKENS)], np.bool_))
        floats = [(self._tail[stream], self._positions)]
        if self.pending:
            floats.append((self._fresh[params.layer][head], self._fresh_positions))
        for rows, at in floats:
            parts.append((rows.k.astype(np.float32), lambda x: x))
            values.append(rows.v.astype(np.float32))
            where.append(at)
            valid.append(np.ones(len(at), np.bool_))
        return np.concatenate(values), np.concatenate(where), np.concatenate(valid), parts

    def commit(self, tokens: int) -> None:
        """Keeps the first `tokens` pending tokens; closes pages if enough rows stand."""
        computed = self.pending if len(self._fresh) == self.arena.shape.num_layers else 0
        if not self.pending or not 0 <= tokens <= computed:
            raise CacheError(f"{tokens} tokens cannot be committed: {computed} were computed")
        sinks, pages = self.arena.plan.sink_tokens, self._closing(tokens)
        positions = np.concatenate([self._positions, self._fresh_positions[:tokens]])
        closing = positions[sinks : sinks + pages * PAGE_TOKENS].reshape(pages, PAGE_TOKENS)
        if (np.diff(closing, axis=1) != 1).any():
            raise CacheError("the tokens of a page must stand at consecutive positions")
        heads = self.arena.shape.num_kv_heads
        for layer, rows in self._fresh.items():
            for head in range(heads):
                tail = self._tail[layer * heads + head]
                tail.k = np.concatenate([tail.k, rows[head].k[:tokens]])
                tail.v = np.concatenate([tail.v, rows[head].v[:tokens]])
        self._positions = positions
        self.tokens += tokens
        self.pending = 0
        for _ in range(pages):
            self._close_page()
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _close_page(self) -> None:
        sinks = self.arena.plan.sink_tokens
        chosen = slice(sinks, sinks + PAGE_TOKENS)
        keep = np.r_[0:sinks, sinks + PAGE_TOKENS : len(self._positions)]
        first_token = self.tokens - (len(self._positions) - sinks)
        column = Column(pos0=int(self._positions[sinks]), first_token=first_token)
        for rows, bits in zip(self._tail, self._entering.tolist(), strict=True):
            sides = [
                encode(half[chosen].astype(np.float32), side)
                for side, half in ((KEYS, rows.k), (VALUES, rows.v))
            ]
            codes, scale, minimum = zip(*sides, strict=True)
            k_bits, v_bits = bits
            page = Page(codes=codes, scale=scale, minimum=minimum, bits=(k_bits, v_bits))
            column.pages.append(page)
            rows.k, rows.v = rows.k[keep], rows.v[keep]
        self._positions = self._positions[keep]
        self.table.append(column)

    def abort(self) -> None:
        self.pending = 0

    # -- evidence --

    def _keep_probes(
        self, params: AttentionParams, q: Float, positions: NDArray[np.int64], inv_freq: Float
    ) -> None:
        """Keeps the rows of q [T, H, D] whose tokens are probes."""
        self._layers[params.layer] = (params, inv_freq)
        for t, position in enumerate(positions.tolist()):
            slot = _probe_slot(self.tokens + t)
            if slot is None:
                continue
            if params.layer == 0:
                shape = (self.arena.shape.num_layers, *q.shape[1:])
                self._probes[slot] = _Probe(self.tokens + t, position, np.zeros(shape, np.float16))
            with np.errstate(over="ignore"):
                rows = (q[t] * np.float32(params.scale)).astype(np.float16)
            self._probes[slot].rows[params.layer] = rows
            # A query that float16 cannot hold is no probe.
            if not np.isfinite(rows).all():
                self._probes[slot].token = -1

    def _usable_probes(self, tokens: int) -> list[_Probe]:
        """The newest probes among the first `tokens` tokens, oldest first."""
        runs = range((tokens - 1) // PAGE_TOKENS, -1, -1)
        sampled = [token for token in map(sampled_token, runs) if token < tokens]
        last = (tokens - 1) // PROBE_STRIDE
        recent = [i * PROBE_STRIDE for i in range(last, max(-1, last - PROBES), -1)]
        wanted = sorted([*sampled[:PROBES], *recent] if tokens else [])
        held = [self._probes.get(slot) for slot in map(_probe_slot, wanted) if slot is not None]
        return [p for p, token in zip(held, wanted, strict=True) if p and p.token == token]

    def evidence(self, tokens: int) -> tuple[Float, Float]:
        """What the probes among the first `tokens` tokens see.

        Returns facts float32 [6, L, Hk, C] and queries float32 [3, L, Hk, D].

        Facts in order: mass, peak mass, mean mass, key, value and eviction error. Of the queries
        their mean, their mean square, and the mean square of their attention's output.
        """
        self._check_idle()
        shape, heads = self.arena.shape, self.arena.shape.num_kv_heads
        probes = self._usable_probes(tokens)
        facts = np.zeros((6, shape.num_layers, heads, len(self.table)), np.float32)
        queries = np.zeros((3, shape.num_layers, heads, shape.head_dim), np.float32)
        for layer in range(shape.num_layers if probes else 0):
            for head in range(heads):
                group = slice(
                    head * shape.num_heads // heads, (head + 1) * shape.num_heads // heads
                )
                rows = np.concatenate([p.rows[layer, group] for p in probes]).astype(np.float32)
                where = np.repeat([p.position for p in probes], shape.num_heads // heads)
                # Many query heads: evenly spaced rows, so that probes and heads take turns.
                count = min(len(rows), PROBE_ROWS)
                taken = np.arange(count) * len(rows) // count
                rows, where = rows[taken], where[taken]
                queries[0, layer, head] = rows.mean(axis=0)
                queries[1, layer, head] = np.square(rows).mean(axis=0)
                outputs = self._observe(layer, head, rows, where, facts)
                queries[2, layer, head] = np.square(outputs).mean(axis=0)
        return facts, queries

    def _observe(
        self, layer: int, head: int, rows: Float, where: NDArray[np.int64], facts: Float
    ) -> Float:
        """Fills the facts of one stream's pages from probe rows [R, D]; returns their outputs."""
        params, inv_freq = self._layers[layer]
        values, positions, valid, parts = self._visible(params, head, inv_freq)
        logits = np.concatenate([turn(rows) @ keys.T for keys, turn in parts], axis=1)
        weights, seen = attention_weights(params, logits, where, positions, valid)
        outputs = weights @ values
        start = 0
        stream = layer * params.num_kv_heads + head
        for c, column in enumerate(self.table):
            page = column.pages[stream]
            if page is None:
                continue
            part = slice(start, start + PAGE_TOKENS)
            start += PAGE_TOKENS
            sees = seen[:, part].any(axis=1)
            if sees.any():
                mass = weights[sees, part].sum(axis=1)
                heavy = np.nonzero(sees)[0][mass >= OBSERVED_MASS]
                turned = rows
                if column.delta:
                    back = np.full(len(rows), -column.delta, np.int64)
                    turned = rotate(rows[:, None], back, inv_freq)[:, 0]
                errors = page_errors(
                    weights[heavy, part],
                    turned[heavy],
                    outputs[heavy],
                    values[part],
                    page.scale[KEYS].astype(np.float32),
                    page.scale[VALUES].astype(np.float32),
                )
                mean = float(mass.mean())
                facts[0, layer, head, c] = mean
                facts[3:, layer, head, c] = errors.sum(axis=0) / sees.sum()
                page.peak_mass = max(mass_code(mean), 1, page.peak_mass - PEAK_STEP)
                before = mass_of(page.mean_mass) if page.mean_mass else mean
                page.mean_mass = mass_code(before + MEAN_SHARE * (mean - before))
            facts[1, layer, head, c] = mass_of(page.peak_mass)
            facts[2, layer, head, c] = mass_of(page.mean_mass)
        return outputs

    def constants(self) -> tuple[Half, Half]:
        """Scales and minima float16: keys [L, Hk, C, 2, D], values [L, Hk, C, 2, 64]."""
        shape = self.arena.shape
        pages = (shape.num_layers, shape.num_kv_heads, len(self.table), 2)
        out = (
            np.zeros((*pages, shape.head_dim), np.float16),
            np.zeros((*pages, PAGE_TOKENS), np.float16),
        )
        for c, column in enumerate(self.table):
            for stream, page in enumerate(column.pages):
                layer, head = divmod(stream, shape.num_kv_heads)
                for side in (KEYS, VALUES):
                    if page:
                        out[side][layer, head, c] = page.scale[side], page.minimum[side]
        return out

    # -- changes between forward passes --

    def trim(self, tokens: int) -> None:
        """Rolls back to the first `tokens` tokens."""
        if not 0 <= tokens <= self.tokens or self.pending:
            raise CacheError(f"cannot roll back to {tokens} of {self.tokens} tokens")
        sinks = min(self.arena.plan.sink_tokens, len(self._positions))
        first_in_tail = self.tokens - (len(self._positions) - sinks)
        kept = len(self._positions) - (self.tokens - tokens)
        if tokens < first_in_tail:
            kept = min(tokens, sinks)
            while self.table:
                last = self.table[-1]
                inside = tokens - last.first_token
                if inside < PAGE_TOKENS:
                    last.mask &= (1 << max(inside, 0)) - 1
                if last.mask:
                    break
                self.table.pop()
        for rows in self._tail:
            rows.k, rows.v = rows.k[:kept], rows.v[:kept]
        self._positions = self._positions[:kept]
        self.tokens = tokens

    def demote(self, actions: NDArray[np.int32]) -> None:
        """Rows of (layer, head, column, k_bits, v_bits); widths only fall, 0 and 0 evict.

        The column after the last stands for the pages that will close from now on.
        """
        self._check_idle()
        come = len(self.table)
        for layer, head, column, *bits in actions.tolist():
            page = self._page(layer, head, column) if column != come else None
            held = page.bits if page else (0, 0)
            if column == come:
                held = self._entering[self._stream(layer, head)].tolist()
            lower = all(b in GRANULES and b <= h for b, h in zip(bits, held, strict=True))
            if not lower and (any(bits) or column == come):
                raise CacheError("a page's widths only fall")
        for layer, head, column, k_bits, v_bits in actions.tolist():
            stream = self._stream(layer, head)
            if column == come:
                self._entering[stream] = np.minimum(self._entering[stream], (k_bits, v_bits))
                continue
            page = self._page(layer, head, column)
            if not k_bits:
                self.table[column].pages[stream] = None
            elif page and k_bits <= page.bits[0] and v_bits <= page.bits[1]:
                page.bits = (k_bits, v_bits)
        self.table = [column for column in self.table if any(column.pages)]

    def shift(self, column: int, delta: int) -> None:
        self._check_idle()
        self._column(column).delta = delta

    def mask(self, column: int, mask: int) -> None:
        self._check_idle()
        self._column(column).mask = mask & (1 << PAGE_TOKENS) - 1

    def _check_idle(self) -> None:
        if self.pending:
            raise CacheError("a forward pass is under way: commit() or abort() it first")

    def _column(self, column: int) -> Column:
        if not 0 <= column < len(self.table):
            raise CacheError(f"there is no page {column} among {len(self.table)}")
        return self.table[column]

    def _stream(self, layer: int, head: int) -> int:
        heads = self.arena.shape.num_kv_heads
        if not (0 <= layer < self.arena.shape.num_layers and 0 <= head < heads):
            raise CacheError(f"there is no layer {layer}, head {head}")
        return layer * heads + head

    def _page(self, layer: int, head: int, column: int) -> Page | None:
        return self._column(column).pages[self._stream(layer, head)]

    # -- views --

    def entering(self) -> Bytes:
        """Widths the next pages close at, uint8 [L, Hk, 2]."""
        shape = self.arena.shape
        return self._entering.reshape(shape.num_layers, shape.num_kv_heads, 2).copy()

    def columns(self) -> tuple[NDArray[np.int64], Bytes]:
        """Facts int64 [C, 4] (pos0, delta, first_token, mask) and widths uint8 [L, Hk, C, 2]."""
        shape = self.arena.shape
        facts = np.array(
            [
                (c.pos0, c.delta, c.first_token, np.uint64(c.mask).astype(np.int64))
                for c in self.table
            ],
            np.int64,
        ).reshape(-1, 4)
        widths = np.array(
            [[page.bits if page else (0, 0) for page in c.pages] for c in self.table], np.uint8
        ).reshape(len(self.table), shape.num_layers, shape.num_kv_heads, 2)
        return facts, np.ascontiguousarray(widths.transpose(1, 2, 0, 3))

    def page(self, layer: int, head: int, column: int) -> bytes:
        """A page's stored bytes; empty once evicted."""
        page = self._page(layer, head, column)
        return page.stored(self.arena.shape.head_dim) if page else b""

    def tail(self, layer: int, head: int) -> tuple[Half, Half, NDArray[np.int32]]:
        """Floating-point rows (k, v) [n, D] of one stream and their positions [n]."""
        rows = self._tail[layer * self.arena.shape.num_kv_heads + head]
        return rows.k, rows.v, self._positions.astype(np.int32)

    # -- snapshots --

    def state(self) -> bytes:
        """Everything a later `load_state` needs, as an npz archive."""
        facts, widths = self.columns()
        arrays: dict[str, NDArray[np.generic]] = {"facts": facts, "widths": widths}
        arrays["arena"] = self._identity()
        arrays["entering"] = self._entering
        arrays["counts"] = np.array([self.tokens, self.peak_bytes], np.int64)
        arrays["positions"] = self._positions
        for stream, rows in enumerate(self._tail):
            arrays[f"tail{stream}k"], arrays[f"tail{stream}v"] = rows.k, rows.v
        self._save_probes(arrays)
        for c, column in enumerate(self.table):
            for stream, page in enumerate(column.pages):
                for side in (KEYS, VALUES):
                    if page is None:
                        continue
                    name = f"page{c}.{stream}.{side}"
                    arrays[name] = page.codes[side]
                    arrays[name + "c"] = np.stack([page.scale[side], page.minimum[side]])
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    def _save_probes(self, arrays: dict[str, NDArray[Any]]) -> None:
        masses = [
            (page.peak_mass, page.mean_mass) if page else (0, 0)
            for column in self.table
            for page in column.pages
        ]
        arrays["masses"] = np.array(masses, np.uint8).reshape(-1, self.arena.streams, 2)
        probes = sorted(self._probes.items())
        facts = [(slot, probe.token, probe.position) for slot, probe in probes]
        arrays["probes"] = np.array(facts, np.int64).reshape(-1, 3)
        for slot, probe in probes:
            arrays[f"probe{slot}"] = probe.rows
        for layer, (params, inv_freq) in self._layers.items():
            arrays[f"layer{layer}"] = np.array(astuple(params), np.float64)
            arrays[f"layer{layer}f"] = inv_freq

    def _restore_probes(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._probes = {
            slot: _Probe(token, position, arrays[f"probe{slot}"])
            for slot, token, position in arrays["probes"].tolist()
        }
        self._layers = {}
        for layer in range(self.arena.shape.num_layers):
            if f"layer{layer}" in arrays:
                values = zip(fields(AttentionParams), arrays[f"layer{layer}"], strict=True)
                facts: dict[str, Any] = {f.name: f.type(v) for f, v in values}  # type: ignore[operator]
                self._layers[layer] = AttentionParams(**facts), arrays[f"layer{layer}f"]
        for column, masses in zip(self.table, arrays["masses"].tolist(), strict=True):
            for page, (peak, mean) in zip(column.pages, masses, strict=True):
                if page:
                    page.peak_mass, page.mean_mass = peak, mean

    def _identity(self) -> NDArray[np.str_]:
        """What two caches must share to read each other's snapshots; threads are no part of it."""
        arena = self.arena
        held = (arena.shape, arena.plan, arena.tail_rows, arena.probes, arena.num_bytes)
        return np.array(" ".join(map(str, held)))

    def load_state(self, state: bytes) -> None:
        """Restores what `state` returned for a cache of the same arena."""
        try:
            with np.load(io.BytesIO(state), allow_pickle=False) as archive:
                arrays = dict(archive)
        except (ValueError, TypeError, OSError, EOFError, BadZipFile) as error:
            raise SnapshotError("the saved cache is damaged") from error
        if arrays.get("arena") != self._identity():
            raise SnapshotError(
                "the saved cache has another shape, plan or budget than this session"
            )
        self._restore(arrays)

    def _restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.tokens, self.peak_bytes = map(int, arrays["counts"])
        self._positions = arrays["positions"]
        self._entering = arrays["entering"]
        streams = range(self.arena.streams)
        self._tail = [_Rows(arrays[f"tail{s}k"], arrays[f"tail{s}v"]) for s in streams]
        widths = arrays["widths"].reshape(self.arena.streams, -1, 2)
        self.table = []
        for c, (pos0, delta, first_token, mask) in enumerate(arrays["facts"].tolist()):
            column = Column(
                pos0=pos0, first_token=first_token, delta=delta, mask=mask & (1 << 64) - 1
            )
            for stream in streams:
                k_bits, v_bits = map(int, widths[stream, c])
                page = None
                if k_bits:
                    names = [f"page{c}.{stream}.{side}" for side in (KEYS, VALUES)]
                    constants = [arrays[name + "c"] for name in names]
                    page = Page(
                        codes=(arrays[names[0]], arrays[names[1]]),
                        scale=(constants[0][0], constants[1][0]),
                        minimum=(constants[0][1], constants[1][1]),
                        bits=(k_bits, v_bits),
                    )
                column.pages.append(page)
            self.table.append(column)
        self._restore_probes(arrays)
        self.pending = 0

    def close(self) -> None:
        """Nothing to give back: numpy owns the arrays."""


def _probe_slot(token: int) -> int | None:
    """Where a token's query is kept, if it is a recent or a sampled probe."""
    if token % PROBE_STRIDE == 0:
        return token // PROBE_STRIDE % RING_SLOTS
    run = token // PAGE_TOKENS
    return RING_SLOTS + run % RING_SLOTS if token == sampled_token(run) else None
