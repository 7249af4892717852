"""The cache in numpy: the same calls, bytes and meaning as the native one.

What the native cache is tested against, and what runs without a compiler. Knows no policy: which
page loses bits is told from outside.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS, AttentionParams, PageForm
from kvq.errors import CacheError, SnapshotError
from kvq.formats import (
    GRANULES,
    PAGE_VERSION,
    PROBE_ROWS,
    PROBE_STRIDE,
    PROBES,
    constant_bytes,
    granule_bytes,
    page_bytes,
    ring_slots,
)
from kvq.reference import (
    KEYS,
    MEAN_SHARE,
    OBSERVED_MASS,
    PEAK_STEP,
    VALUES,
    Bytes,
    Float,
    Grid,
    Half,
    KeyPart,
    ancestry,
    attention_weights,
    decode,
    encode,
    hadamard,
    mass_code,
    mass_of,
    normalize,
    page_errors,
    planes,
    rotate,
    sampled_token,
    split_heads,
)
from kvq.sizing import Arena

# The last position of a page must be an int32.
MAX_POSITION = (1 << 31) - 1 - 2 * PAGE_TOKENS


def grid_axis(side: int, form: PageForm) -> int:
    """The axis of a page [64, D] that a group of its side lies along: 0 tokens, 1 channels."""
    return 1 if side == VALUES and not form & PageForm.CHANNEL_VALUES else 0


@dataclass(slots=True)
class Page:
    """One page of one (layer, KV head): codes kept whole, read at the widths it still has."""

    codes: tuple[Bytes, Bytes]
    grids: tuple[Grid, Grid]
    bits: tuple[int, int]
    form: PageForm = PageForm.PLAIN
    peak_mass: int = 0
    mean_mass: int = 0

    def read(self, side: int, view: str) -> Float:
        """Values as seen; the view "hi" reads 8 bits as 4, by their hi plane."""
        bits = min(self.bits[side], 4) if view == "hi" else self.bits[side]
        return decode(self.codes[side], self.grids[side], bits, grid_axis(side, self.form))

    def stored(self, constant_bytes: int) -> bytes:
        """The page's bytes as the native cache keeps them: constants in their room, then planes."""
        sides = [planes(self.codes[s], self.bits[s], s).tobytes() for s in (KEYS, VALUES)]
        grids = b"".join(grid.stored() for grid in self.grids)
        return b"".join([grids.ljust(constant_bytes, b"\0"), *sides])


@dataclass(slots=True)
class Column:
    """Positions of one page of all streams; `pages[stream]` is None once evicted."""

    pos0: int
    first_token: int
    delta: int = 0
    mask: int = (1 << PAGE_TOKENS) - 1
    pages: list[Page | None] = field(default_factory=lambda: [])


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


@dataclass(slots=True)
class _Keys:
    """What a head can look at: values [n, D], positions [n], validity [n], keys part by part."""

    values: Float
    positions: NDArray[np.int64]
    valid: NDArray[np.bool_]
    parts: list[KeyPart]

    def logits(self, q: Float) -> Float:
        return np.concatenate([turn(q) @ keys.T for keys, turn in self.parts], axis=1)

    def seen(
        self, at: NDArray[np.int64], window_tokens: int, branch: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which keys rows at these positions see [T, n].

        Of the committed keys the valid ones that do not stand behind them, of the branch's, which
        come last, those of `branch` [T, rows]; of both those inside the window.
        """
        distance = at[:, None] - self.positions[None, :]
        seen = self.valid[None, :] & (distance >= 0)
        seen[:, len(self.positions) - branch.shape[1] :] = branch
        return seen & (distance < window_tokens) if window_tokens > 0 else seen


class ReferenceCache:
    """The cache in numpy: same calls, same bytes and same meaning as the native one."""

    handle = None

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.table: list[Column] = []
        self._forms = arena.spec.forms or (PageForm.PLAIN,) * arena.streams
        self._entering = np.empty((arena.streams, 2), np.uint8)
        self._entering[:] = arena.plan.k_bits, arena.plan.v_bits
        empty = np.zeros((0, arena.shape.head_dim), np.float16)
        self._tail = [_Rows(empty, empty) for _ in range(arena.streams)]
        self._positions: NDArray[np.int64] = np.zeros(0, np.int64)
        self._open_branch()
        self._probes: dict[int, _Probe] = {}
        self._layers: dict[int, tuple[AttentionParams, Float]] = {}
        self.tokens = 0
        self.peak_bytes = self.used_bytes

    # -- bytes --

    @property
    def used_bytes(self) -> int:
        dim = self.arena.shape.head_dim
        pages = [page for column in self.table for page in column.pages if page]
        fixed = self.arena.regions.num_bytes
        granules = sum(GRANULES[bits] for page in pages for bits in page.bits)
        constants = constant_bytes(dim, self.arena.value_groups)
        return fixed + len(pages) * constants + granules * granule_bytes(dim)

    @property
    def tail_rows(self) -> int:
        return len(self._positions)

    def missing(self, tokens: int) -> tuple[int, int]:
        """(bytes, columns) still missing before `tokens` more can be taken."""
        pages = self._closing(self.branch_rows + tokens)
        dim = self.arena.shape.head_dim
        widths = self._entering.tolist() if pages else []
        needed = pages * sum(page_bytes(dim, *bits, self.arena.value_groups) for bits in widths)
        over = self.used_bytes + needed - self.arena.num_bytes
        return max(0, over), max(0, len(self.table) + pages - self.arena.max_columns)

    def _closing(self, tokens: int) -> int:
        return self.arena.closing_pages(len(self._positions), tokens)

    # -- a branch, pass by pass --

    def _open_branch(self) -> None:
        """No rows: their parents, positions, and keys and values of every layer and head."""
        self._parents: list[int] = []
        self._branch_positions: NDArray[np.int64] = np.zeros(0, np.int64)
        self._branch: dict[int, list[_Rows]] = {}
        self._pass_rows = 0
        self._attended: set[int] = set()
        self._view = "full"

    @property
    def branch_rows(self) -> int:
        return len(self._parents)

    @property
    def _unattended(self) -> bool:
        """A pass is under way that not every layer has seen."""
        return self._pass_rows > 0 and len(self._attended) < self.arena.shape.num_layers

    def begin(
        self, tokens: int, parents: Sequence[int] | None = None, *, view: str = "full"
    ) -> None:
        rows = self.branch_rows
        if self._unattended:
            raise CacheError("begin() was called twice without commit() or rewind()")
        room = len(self._positions) + rows + tokens
        if (
            not 1 <= tokens <= self.arena.pass_tokens
            or any(self.missing(tokens))
            or (rows + tokens > self.arena.draft_tokens and (rows or parents is not None))
            or (not self.arena.plan.quantized and room > self.arena.tail_rows)
        ):
            raise CacheError(f"no room was made for {tokens} tokens")
        added = range(rows - 1, rows + tokens - 1) if parents is None else parents
        if any(not -1 <= parent < rows + i for i, parent in enumerate(added)):
            raise CacheError("a row's parent must be -1 or an earlier row of the branch")
        self._parents += added
        self._pass_rows, self._view = tokens, view
        self._attended = set()

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
        if not 0 < len(qkv) == self._pass_rows:
            raise CacheError(f"begin() was not called for {len(qkv)} tokens")
        if not ((positions >= 0) & (positions <= MAX_POSITION)).all():
            raise CacheError(f"positions must lie in 0 to {MAX_POSITION}")
        q, k, v = split_heads(params, qkv.astype(np.float32))
        if q_norm is not None:
            q = normalize(q, q_norm, params.norm_eps)
        if k_norm is not None:
            k = normalize(k, k_norm, params.norm_eps)
        q = rotate(q, positions, inv_freq, params.rope_factor)
        k = rotate(k, positions, inv_freq, params.rope_factor)
        self._store(params.layer, k, v, positions)
        if self.arena.probes:
            self._keep_probes(params, q, positions, inv_freq)
        group = params.num_heads // params.num_kv_heads
        sees = ancestry(self._parents)[-self._pass_rows :]
        out = np.empty_like(q)
        for head in range(params.num_kv_heads):
            keys = self._keys(params, head, inv_freq, self._view, branch=True)
            seen = keys.seen(positions, params.window_tokens, sees)
            for h in range(head * group, (head + 1) * group):
                weights = attention_weights(params, keys.logits(q[:, h]) * params.scale, seen)
                out[:, h] = weights @ keys.values
        return out.reshape(len(qkv), -1)

    def _store(self, layer: int, k: Float, v: Float, positions: NDArray[np.int64]) -> None:
        """Appends the pass's keys and values [T, Hk, D] to a layer's rows of the branch."""
        with np.errstate(over="ignore"):
            keys, values = k.astype(np.float16), v.astype(np.float16)
        if not (np.isfinite(keys).all() and np.isfinite(values).all()):
            raise CacheError("a key or value is not finite in float16, so it cannot be cached")
        first = self.branch_rows - self._pass_rows
        before = self._branch_positions[:first]
        self._branch_positions = np.concatenate([before, positions])
        held = self._branch.get(layer) or [_Rows(keys[:0, 0], values[:0, 0])] * k.shape[1]
        self._branch[layer] = [
            _Rows(
                np.concatenate([rows.k[:first], keys[:, head]]),
                np.concatenate([rows.v[:first], values[:, head]]),
            )
            for head, rows in enumerate(held)
        ]
        self._attended.add(layer)

    def _keys(
        self, params: AttentionParams, head: int, inv_freq: Float, view: str, *, branch: bool
    ) -> _Keys:
        """All a head can look at: pages, the tail, and the branch if that is asked for."""
        stream = params.layer * params.num_kv_heads + head
        parts: list[KeyPart] = []
        values: list[Float] = []
        where: list[NDArray[np.int64]] = []
        valid: list[NDArray[np.bool_]] = []
        for column in self.table:
            page = column.pages[stream]
            if page is None:
                continue
            turn = self._turned(stream, column.delta, inv_freq)
            parts.append((page.read(KEYS, view), turn))
            values.append(page.read(VALUES, view))
            where.append(column.pos0 + column.delta + np.arange(PAGE_TOKENS, dtype=np.int64))
            valid.append(np.array([column.mask >> i & 1 for i in range(PAGE_TOKENS)], np.bool_))
        floats = [(self._tail[stream], self._positions)]
        if branch:
            floats.append((self._branch[params.layer][head], self._branch_positions))
        for rows, at in floats:
            parts.append((rows.k.astype(np.float32), lambda x: x))
            values.append(rows.v.astype(np.float32))
            where.append(at)
            valid.append(np.ones(len(at), np.bool_))
        return _Keys(np.concatenate(values), np.concatenate(where), np.concatenate(valid), parts)

    def _turned(self, stream: int, delta: int, inv_freq: Float) -> Callable[[Float], Float]:
        """What queries [n, D] become to meet the keys of a stream's page.

        These stay as they were encoded: the query turns back by the page's shift.
        """

        def turn(rows: Float) -> Float:
            if delta:
                back = np.full(len(rows), -delta, np.int64)
                rows = rotate(rows[:, None], back, inv_freq)[:, 0]
            return hadamard(rows) if self._forms[stream] & PageForm.ROTATED_KEYS else rows

        return turn

    def commit(self, rows: int | Sequence[int]) -> None:
        """Keeps a path of the branch, forgets the rest; closes pages if enough rows stand."""
        path = list(range(rows)) if isinstance(rows, int) else list(rows)
        count = rows if isinstance(rows, int) else len(path)
        if not self._parents or count < 0:
            raise CacheError(f"{rows} rows cannot be committed: begin() was not called")
        if not path:
            self.rewind()
            return
        inside = all(0 <= row < self.branch_rows for row in path)
        if not inside or [self._parents[row] for row in path] != [-1, *path[:-1]]:
            raise CacheError(f"rows {rows} are no path of the branch's {self.branch_rows} rows")
        if self._unattended:
            raise CacheError("a layer has not seen the newest rows yet")
        sinks, pages = self.arena.plan.sink_tokens, self._closing(len(path))
        positions = np.concatenate([self._positions, self._branch_positions[path]])
        closing = positions[sinks : sinks + pages * PAGE_TOKENS].reshape(pages, PAGE_TOKENS)
        if (np.diff(closing, axis=1) != 1).any():
            raise CacheError("the tokens of a page must stand at consecutive positions")
        self._settle_probes(path)
        heads = self.arena.shape.num_kv_heads
        for layer, branch in self._branch.items():
            for head in range(heads):
                tail = self._tail[layer * heads + head]
                tail.k = np.concatenate([tail.k, branch[head].k[path]])
                tail.v = np.concatenate([tail.v, branch[head].v[path]])
        self._positions = positions
        self.tokens += len(path)
        self._open_branch()
        for _ in range(pages):
            self._close_page()
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _close_page(self) -> None:
        sinks = self.arena.plan.sink_tokens
        chosen = slice(sinks, sinks + PAGE_TOKENS)
        keep = np.r_[0:sinks, sinks + PAGE_TOKENS : len(self._positions)]
        first_token = self.tokens - (len(self._positions) - sinks)
        column = Column(pos0=int(self._positions[sinks]), first_token=first_token)
        for stream, (rows, bits) in enumerate(
            zip(self._tail, self._entering.tolist(), strict=True)
        ):
            form = self._forms[stream]
            k, v = (half[chosen].astype(np.float32) for half in (rows.k, rows.v))
            k = hadamard(k) if form & PageForm.ROTATED_KEYS else k
            sides = [encode(x, grid_axis(side, form)) for side, x in ((KEYS, k), (VALUES, v))]
            codes, grids = zip(*sides, strict=True)
            k_bits, v_bits = bits
            page = Page(codes=codes, grids=grids, bits=(k_bits, v_bits), form=form)
            column.pages.append(page)
            rows.k, rows.v = rows.k[keep], rows.v[keep]
        self._positions = self._positions[keep]
        self.table.append(column)

    def rewind(self, rows: int = 0) -> None:
        """Keeps only the first `rows` rows of the branch."""
        if not 0 <= rows <= self.branch_rows:
            raise CacheError(f"the branch has {self.branch_rows} rows, not {rows}")
        if rows and self._unattended and rows > self.branch_rows - self._pass_rows:
            raise CacheError("a layer has not seen the newest rows yet")
        self._forget_probes(rows)
        if rows == 0:
            self._open_branch()
        elif rows < self.branch_rows:
            self._parents = self._parents[:rows]
            self._pass_rows = 0

    # -- evidence --

    def _keep_probes(
        self, params: AttentionParams, q: Float, positions: NDArray[np.int64], inv_freq: Float
    ) -> None:
        """Keeps the rows of q [T, H, D] whose tokens are probes."""
        self._layers[params.layer] = (params, inv_freq)
        depths = self._depths()[-self._pass_rows :]
        for t, (depth, position) in enumerate(zip(depths, positions.tolist(), strict=True)):
            token = self.tokens + depth
            slot = self._probe_slot(token)
            if slot is None:
                continue
            if params.layer == 0:
                shape = (self.arena.shape.num_layers, *q.shape[1:])
                self._probes[slot] = _Probe(token, position, np.zeros(shape, np.float16))
            with np.errstate(over="ignore"):
                rows = (q[t] * np.float32(params.scale)).astype(np.float16)
            self._probes[slot].rows[params.layer] = rows
            # A query that float16 cannot hold is no probe.
            if not np.isfinite(rows).all():
                self._probes[slot].token = -1

    def _depths(self) -> list[int]:
        """Of every row of the branch, how many rows stand between it and the committed tokens."""
        return (ancestry(self._parents).sum(axis=1) - 1).tolist()

    def _forget_probes(self, kept_rows: int) -> None:
        for depth in self._depths()[kept_rows:]:
            slot = self._probe_slot(self.tokens + depth)
            if slot in self._probes and self._probes[slot].token == self.tokens + depth:
                self._probes[slot].token = -1

    def _settle_probes(self, path: Sequence[int]) -> None:
        """A slot that another row of the same depth wrote last holds no probe."""
        depths = self._depths()
        for depth, row in enumerate(path):
            slot = self._probe_slot(self.tokens + depth)
            if slot in self._probes and depth in depths[row + 1 :]:
                self._probes[slot].token = -1

    def _probe_slot(self, token: int) -> int | None:
        """Where a token's query is kept, if it is a recent or a sampled probe."""
        recent, sampled = ring_slots(self.arena.draft_tokens)
        if token % PROBE_STRIDE == 0:
            return token // PROBE_STRIDE % recent
        run = token // PAGE_TOKENS
        return recent + run % sampled if token == sampled_token(run) else None

    def _usable_probes(self, tokens: int) -> list[_Probe]:
        """The newest probes among the first `tokens` tokens, oldest first."""
        runs = range((tokens - 1) // PAGE_TOKENS, -1, -1)
        sampled = [token for token in map(sampled_token, runs) if token < tokens]
        last = (tokens - 1) // PROBE_STRIDE
        recent = [i * PROBE_STRIDE for i in range(last, max(-1, last - PROBES), -1)]
        wanted = sorted([*sampled[:PROBES], *recent] if tokens else [])
        held = [
            self._probes.get(slot) for slot in map(self._probe_slot, wanted) if slot is not None
        ]
        return [p for p, token in zip(held, wanted, strict=True) if p and p.token == token]

    def evidence(self, tokens: int) -> tuple[Float, Float]:
        """What the probes among the first `tokens` tokens see.

        Returns facts float32 [6, L, Hk, C] and queries float32 [3, L, Hk, D].

        Facts in order: mass, peak mass, mean mass, key, value and eviction error. Of the queries
        their mean, their mean square, and the mean square of their attention's output.
        """
        self._check_between_passes()
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
                met = self._turned(layer * heads + head, 0, self._layers[layer][1])(rows)
                queries[0, layer, head] = met.mean(axis=0)
                queries[1, layer, head] = np.square(met).mean(axis=0)
                outputs = self._observe(layer, head, rows, where, facts)
                queries[2, layer, head] = np.square(outputs).mean(axis=0)
        return facts, queries

    def _observe(
        self, layer: int, head: int, rows: Float, where: NDArray[np.int64], facts: Float
    ) -> Float:
        """Fills the facts of one stream's pages from probe rows [R, D]; returns their outputs."""
        params, inv_freq = self._layers[layer]
        keys = self._keys(params, head, inv_freq, "full", branch=False)
        seen = keys.seen(where, params.window_tokens, np.zeros((len(rows), 0), np.bool_))
        weights = attention_weights(params, keys.logits(rows), seen)
        outputs = weights @ keys.values
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
                turned = self._turned(stream, column.delta, inv_freq)(rows)
                errors = page_errors(
                    weights[heavy, part],
                    turned[heavy],
                    outputs[heavy],
                    keys.values[part],
                    page.grids[KEYS].scale,
                    np.expand_dims(page.grids[VALUES].scale, grid_axis(VALUES, page.form)),
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

    def constants(self) -> tuple[Float, Float]:
        """Scales and mids float32: keys [L, Hk, C, 2, D], values [L, Hk, C, 2, 64].

        Of values on a grid of channels every token has the channels' root mean squares.
        """
        shape = self.arena.shape
        pages = (shape.num_layers, shape.num_kv_heads, len(self.table), 2)
        out = (
            np.zeros((*pages, shape.head_dim), np.float32),
            np.zeros((*pages, PAGE_TOKENS), np.float32),
        )
        for c, column in enumerate(self.table):
            for stream, page in enumerate(column.pages):
                layer, head = divmod(stream, shape.num_kv_heads)
                for side in (KEYS, VALUES):
                    if page:
                        lines = np.array([page.grids[side].scale, page.grids[side].mid])
                        if side > grid_axis(side, page.form):
                            lines = np.sqrt(np.square(lines).mean(axis=1, keepdims=True))
                        out[side][layer, head, c] = lines
        return out

    # -- changes between forward passes --

    def trim(self, tokens: int) -> None:
        """Rolls back to the first `tokens` tokens."""
        self._check_idle()
        if not 0 <= tokens <= self.tokens:
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
        """Rows of (layer, head, column, k_bits, v_bits); widths only fall, 0 and 0 evict."""
        self._check_between_passes()
        for layer, head, column, *bits in actions.tolist():
            page = self._page(layer, head, column)
            held = page.bits if page else (0, 0)
            lower = all(b in GRANULES and b <= h for b, h in zip(bits, held, strict=True))
            if any(bits) and not lower:
                raise CacheError("a page's widths only fall")
        for layer, head, column, k_bits, v_bits in actions.tolist():
            page = self._page(layer, head, column)
            if not k_bits:
                self._column(column).pages[self._stream(layer, head)] = None
            elif page and k_bits <= page.bits[0] and v_bits <= page.bits[1]:
                page.bits = (k_bits, v_bits)
        self.table = [column for column in self.table if any(column.pages)]

    def demote_entering(self, widths: Bytes) -> None:
        """Lowers the widths uint8 [L, Hk, 2] that the pages to come close at."""
        self._check_between_passes()
        wanted = widths.reshape(-1, 2)
        if not np.isin(wanted, list(GRANULES)).all() or (wanted > self._entering).any():
            raise CacheError("a page's widths only fall")
        self._entering = wanted.astype(np.uint8)

    def shift(self, column: int, delta: int) -> None:
        self._check_idle()
        self._column(column).delta = delta

    def mask(self, column: int, mask: int) -> None:
        self._check_idle()
        self._column(column).mask = mask & (1 << PAGE_TOKENS) - 1

    def _check_idle(self) -> None:
        if self._parents:
            raise CacheError("a branch is open: commit() or rewind() it first")

    def _check_between_passes(self) -> None:
        if self._unattended:
            raise CacheError("a forward pass is under way: finish, commit() or rewind() it first")

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
        room = constant_bytes(self.arena.shape.head_dim, self.arena.value_groups)
        return page.stored(room) if page else b""

    def tail(self, layer: int, head: int) -> tuple[Half, Half, NDArray[np.int32]]:
        """Floating-point rows (k, v) [n, D] of one stream and their positions [n]."""
        rows = self._tail[layer * self.arena.shape.num_kv_heads + head]
        return rows.k, rows.v, self._positions.astype(np.int32)

    # -- snapshots --

    def state(self) -> bytes:
        """Everything a later `load_state` needs, as an npz archive."""
        self._check_idle()
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
                    arrays[name + "g"] = np.frombuffer(page.grids[side].stored(), np.uint8)
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
        held = (
            PAGE_VERSION,
            *map(int, self._forms),
            arena.shape,
            arena.plan,
            arena.tail_rows,
            arena.probes,
            arena.num_bytes,
        )
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
                    keys, values = (Grid.load(arrays[name + "g"].tobytes()) for name in names)
                    page = Page(
                        codes=(arrays[names[0]], arrays[names[1]]),
                        grids=(keys, values),
                        bits=(k_bits, v_bits),
                        form=self._forms[stream],
                    )
                column.pages.append(page)
            self.table.append(column)
        self._restore_probes(arrays)
        self._open_branch()

    def close(self) -> None:
        """Nothing to give back: numpy owns the arrays."""
