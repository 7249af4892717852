"""The cache in numpy: the same calls, bytes and meaning as the native one.

What the native cache is tested against, and what runs without a compiler. Knows no policy: which
page loses bits is told from outside.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.array_files import read_arrays
from kvq.config import PAGE_TOKENS, AttentionParams, PageForm
from kvq.errors import CacheError, SnapshotError
from kvq.formats import PAGE_VERSION, constant_bytes
from kvq.reference.delta import DeltaWeights
from kvq.reference.stored import (
    KEYS,
    OBSERVED_MASS,
    VALUES,
    Bytes,
    Float,
    Half,
    KeyPart,
    ancestry,
    attention_weights,
    chosen_pages,
    hadamard,
    normalize,
    page_bounds,
    page_errors,
    rotate,
    split_heads,
    stored_rows,
    weighing,
)
from kvq.selectors import READ_ALL, ReadRule
from kvq.sizing import ClassArena
from numpy_cache.mixed_rows import ConvRows, DeltaRows
from numpy_cache.pages import NO_PLACES, Page, PageTable, Places, Rows, View, grid_axis
from numpy_cache.probes import Look, Looks, Probe, Probes, record
from regions import GAP_VIEWS, SPARE_VIEWS

# Query rows that pass over the pages together.
BLOCK_ROWS = 16
# The last position of a page must be an int32.
MAX_POSITION = (1 << 31) - 1 - 2 * PAGE_TOKENS


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


def _turned_back(delta: int, inv_freq: Float) -> Callable[[Float], Float]:
    """Turns queries to meet keys that stay as they were rotated, `delta` positions ago."""

    def turn(rows: Float) -> Float:
        if delta == 0:
            return rows
        back = np.full(len(rows), -delta, np.int64)
        return rotate(rows[:, None, :], back, inv_freq)[:, 0]

    return turn


class NumpyCache:
    """The cache in numpy: same calls, same bytes and same meaning as the native one."""

    device, handle = "cpu", 0

    def __init__(self, arena: ClassArena) -> None:
        self.arena = arena
        self.table = PageTable(arena)
        empty = np.zeros((0, arena.shape.head_dim), np.float16)
        self._tail = [Rows(empty, empty) for _ in range(arena.streams)]
        self._places = NO_PLACES
        self._conv = arena.conv and ConvRows(arena.conv, arena.draft_tokens)
        states = arena.delta_states
        self._delta = arena.delta and DeltaRows(arena.delta, arena.draft_tokens, states)
        self._open_branch()
        self._rule = READ_ALL
        self.pages_seen = self.pages_read = 0
        self.offloaded_bytes = self.streamed_bytes = 0
        self._probes = Probes(arena)
        self.tokens = 0
        self.peak_bytes = self.used_bytes

    def read_by(self, rule: ReadRule) -> None:
        """How passes read from now on."""
        self._rule = rule

    def set_rounding_feedback(self, feedback: Float) -> None:
        """Keys that close or lose bits are `stored.carried` by it, [L, Hk, D, D]."""
        self.table.feedback = [rows for of_layer in feedback for rows in of_layer]

    # -- bytes --

    @property
    def used_bytes(self) -> int:
        return self.arena.regions.num_bytes + self.table.used_bytes

    @property
    def tail_rows(self) -> int:
        return len(self._places)

    def missing(self, tokens: int) -> tuple[int, int]:
        """(bytes, columns) still missing before `tokens` more can be taken."""
        pages = self._closing(self.branch_rows + tokens)
        needed = pages * self.table.new_page_bytes if pages else 0
        over = self.used_bytes + needed - self.arena.num_bytes
        return max(0, over), max(0, len(self.table) + pages - self.arena.max_columns)

    def _closing(self, tokens: int) -> int:
        return self.arena.closing_pages(len(self._places), tokens)

    # -- a branch, pass by pass --

    def _open_branch(self) -> None:
        """No rows: their parents, positions, and keys and values of every layer and head."""
        self._parents: list[int] = []
        self._branch_positions: NDArray[np.int64] = np.zeros(0, np.int64)
        self._branch: dict[int, list[Rows]] = {}
        self._at: int | None = None
        self._pass_rows = 0
        self._attended: set[int] = set()
        self._view = "full"
        self._kv_only_layers: frozenset[int] = frozenset()
        for other in self._mixers:
            other.forget()

    @property
    def _mixers(self) -> list[ConvRows | DeltaRows]:
        """What remembers rows for layers that do not attend."""
        return [mixer for mixer in (self._conv, self._delta) if mixer is not None]

    @property
    def branch_rows(self) -> int:
        return len(self._parents)

    @property
    def _unattended(self) -> bool:
        """A pass is under way that not every layer has seen."""
        if self._pass_rows == 0:
            return False
        waiting = any(other.unattended for other in self._mixers)
        return waiting or len(self._attended) < self.arena.shape.num_layers

    @property
    def _first(self) -> int:
        """The token the branch begins with."""
        return self.tokens if self._at is None else self._at

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        kv_only_layers: Sequence[int] = (),
    ) -> bool:
        rows = self.branch_rows
        if self._unattended:
            raise CacheError("begin() was called twice without commit() or rewind()")
        room = len(self._places) + rows + tokens
        if (
            not 1 <= tokens <= self.arena.pass_tokens
            or (rows + tokens > self.arena.draft_tokens and (rows or parents is not None))
            or (not self.arena.plan.quantized and room > self.arena.tail_rows)
        ):
            raise CacheError(f"no pass can bring {tokens} tokens here")
        if any(self.missing(tokens)):
            return False
        added = range(rows - 1, rows + tokens - 1) if parents is None else parents
        if any(not -1 <= parent < rows + i for i, parent in enumerate(added)):
            raise CacheError("a row's parent must be -1 or an earlier row of the branch")
        self._begin_at(at, rows + tokens)
        self._parents += added
        self._pass_rows, self._view, self._kv_only_layers = tokens, view, frozenset(kv_only_layers)
        self._attended = set()
        self._probes.begin()
        for other in self._mixers:
            other.begin(tokens)
        return True

    def _begin_at(self, at: int | None, rows: int) -> None:
        """The branch's first row is token `at` of a gap that holds all its rows; None: the end."""
        if self._parents:
            if at is not None and at != self._first:
                raise CacheError("a branch stays where it began")
        elif at is not None and at != self.tokens:
            if self._mixers:
                raise CacheError("what other layers remember is of the end alone")
            occupied = np.concatenate([self._places.tokens, *self.table.held_tokens()])
            if (
                at < 0
                or at + rows > self.tokens
                or ((occupied >= at) & (occupied < at + rows)).any()
            ):
                raise CacheError(f"there is no gap of {rows} tokens at token {at}")
            self._at = at

    def attend(
        self,
        params: AttentionParams,
        qkv: Float,
        positions: NDArray[np.int64],
        inv_freq: Float,
        q_norm: Float | None = None,
        k_norm: Float | None = None,
        sink_logits: Float | None = None,
    ) -> Float:
        """Stores the new keys and values and returns the attention output [T, H * D]."""
        if not 0 < len(qkv) == self._pass_rows:
            raise CacheError(f"begin() was not called for {len(qkv)} tokens")
        if not ((positions >= 0) & (positions <= MAX_POSITION)).all():
            raise CacheError(f"positions must lie in 0 to {MAX_POSITION}")
        q, k, v = split_heads(params, qkv.astype(np.float32))
        if q_norm is not None:
            q = normalize(q, q_norm, params.norm_eps)
        q = rotate(q, positions, inv_freq, params.rope_factor)
        keys, values = stored_rows(params, k, v, positions, inv_freq, k_norm)
        self._store(params.layer, keys, values, positions)
        if self._kv_only_layers:
            self._probes.forget(self._branch_tokens()[-self._pass_rows :])
        elif self.arena.probes:
            tokens = self._branch_tokens()[-self._pass_rows :]
            self._probes.keep(params, q, tokens, positions, inv_freq)
        if params.layer in self._kv_only_layers:
            return np.zeros((len(qkv), params.num_heads * params.head_dim), np.float32)
        out = self._attention(params, q, positions, inv_freq, sink_logits=sink_logits)
        return out.reshape(len(qkv), -1)

    def convolve(self, layer: int, bcx: Float, weight: Float) -> Float:
        """What a convolution gives of the pass's rows [B | C | x], [T, 3 width]: [T, width]."""
        assert self._conv is not None
        if not 0 < len(bcx) == self._pass_rows:
            raise CacheError(f"begin() was not called for {len(bcx)} tokens")
        return self._conv.convolve(layer, bcx, weight, self._parents)

    def recur(self, layer: int, rows: Float, gates: Float, weights: DeltaWeights) -> Float:
        """What a delta net gives of the pass's rows; see `kvq.cache.Cache.recur`."""
        assert self._delta is not None
        if not 0 < len(rows) == self._pass_rows:
            raise CacheError(f"begin() was not called for {len(rows)} tokens")
        return self._delta.recur(layer, rows, gates, weights, self._parents, self.tokens)

    def attend_shared(
        self,
        params: AttentionParams,
        queries: Float,
        rows: NDArray[np.int64],
        inv_freq: Float,
        q_norm: Float | None = None,
    ) -> Float:
        """What queries [R, H * D] of the pass's `rows` find in what layer `params.layer` stored."""
        if not self._parents or self._unattended:
            raise CacheError("a layer is read before every layer has seen the pass")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self._pass_rows:
            raise CacheError(f"the pass has rows 0 to {self._pass_rows - 1}")
        if len(rows) > self.arena.pass_tokens:
            raise CacheError(f"{len(rows)} queries are more than {self.arena.pass_tokens} at once")
        out = np.zeros((len(rows), params.num_heads * params.head_dim), np.float32)
        q = queries.astype(np.float32).reshape(len(rows), params.num_heads, params.head_dim)
        positions = self._branch_positions[-self._pass_rows :][rows]
        q = q if q_norm is None else normalize(q, q_norm, params.norm_eps)
        q = rotate(q, positions, inv_freq, params.rope_factor)
        if self.arena.probes and not self._kv_only_layers:
            row_tokens = self._branch_tokens()
            asking: list[int] = (self.branch_rows - self._pass_rows + rows).tolist()
            newest = [row_tokens[row] not in row_tokens[row + 1 :] for row in asking]
            tokens = [row_tokens[row] for row in asking]
            self._probes.keep_look(params, q, tokens, newest, positions, inv_freq)
        if params.layer in self._kv_only_layers:
            return out
        return self._attention(params, q, positions, inv_freq, rows).reshape(out.shape)

    def _attention(
        self,
        params: AttentionParams,
        q: Float,
        positions: NDArray[np.int64],
        inv_freq: Float,
        rows: NDArray[np.int64] | None = None,
        sink_logits: Float | None = None,
    ) -> Float:
        """What the pass's queries [T, H, D], rotated, give [T, H, D]; of `rows` alone, if given."""
        group = params.num_heads // params.num_kv_heads
        sees = ancestry(self._parents)[-self._pass_rows :]
        sees = sees if rows is None else sees[rows]
        out = np.empty_like(q)
        for head in range(params.num_kv_heads):
            keys = self._keys(params, head, inv_freq, self._view, branch=True)
            seen = keys.seen(positions, params.window_tokens, sees)
            pages = self._read_less(params, head, q, keys, seen)
            for h in range(head * group, (head + 1) * group):
                sink = None if sink_logits is None else float(sink_logits[h])
                logits = keys.logits(q[:, h]) * params.scale
                heard = weighing(params, logits, seen, pages, self._rule.octaves, sink)
                weights = attention_weights(params, logits, heard, sink)
                out[:, h] = weights @ keys.values
        return out

    def _read_less(
        self, params: AttentionParams, head: int, q: Float, keys: _Keys, seen: NDArray[np.bool_]
    ) -> int:
        """Of `seen` [T, n] leaves out the views of pages that the rows of a step do not read.

        Returns how many there are.
        """
        pages = self.table.of_stream(self.table.stream(params.layer, head))
        viewed = [page for _, page, views in pages for _ in views]
        if len(q) > self.arena.draft_tokens:
            return len(viewed)
        group = params.num_heads // params.num_kv_heads
        self.pages_seen += self._pages_passed(seen, len(viewed), group)
        if self._rule.share < 1 and viewed:
            queries = q[:, head * group : (head + 1) * group]
            scores = self._bounds(params, keys, queries, viewed)
            visible = self._visible(seen, len(viewed))
            for t in range(len(q)):
                read = chosen_pages(scores[t], visible[t], self._rule.share)
                seen[t, : len(viewed) * PAGE_TOKENS] &= np.repeat(read, PAGE_TOKENS)
        self.pages_read += self._pages_passed(seen, len(viewed), group)
        return len(viewed)

    def _pages_passed(self, seen: NDArray[np.bool_], pages: int, group: int) -> int:
        """How often rows of a KV head, `group` for each of `seen` [T, n], pass over a page."""
        visible = np.repeat(self._visible(seen, pages), group, axis=0)
        blocks = [visible[at : at + BLOCK_ROWS] for at in range(0, len(visible), BLOCK_ROWS)]
        return sum(int(block.any(axis=0).sum()) for block in blocks)

    def _visible(self, seen: NDArray[np.bool_], pages: int) -> NDArray[np.bool_]:
        """Of which pages rows [R, n] see any key [R, pages]."""
        parts = seen[:, : pages * PAGE_TOKENS].reshape(len(seen), pages, PAGE_TOKENS)
        return np.asarray(parts.any(axis=2), np.bool_)

    def _bounds(
        self, params: AttentionParams, keys: _Keys, q: Float, viewed: Sequence[Page]
    ) -> Float:
        """Scores [T, group, pages] of the queries [T, group, D] by the rule."""
        unit = 1 / params.softcap if params.softcap > 0 else float(np.log2(np.e))
        rows = (q * np.float32(params.scale * unit)).reshape(-1, q.shape[-1])
        columns: list[Float] = []
        for page, (_, turn) in zip(viewed, keys.parts, strict=False):
            grid = page.grids[KEYS]
            columns.append(page_bounds(turn(rows), grid.scale[None], grid.mid[None])[:, 0])
        return np.stack(columns, axis=1).reshape(len(q), -1, len(viewed))

    def _store(self, layer: int, keys: Half, values: Half, positions: NDArray[np.int64]) -> None:
        """Appends the pass's keys and values [T, Hk, D] to a layer's rows of the branch."""
        first = self.branch_rows - self._pass_rows
        before = self._branch_positions[:first]
        self._branch_positions = np.concatenate([before, positions])
        branch_rows = self._branch.get(layer) or [Rows(keys[:0, 0], values[:0, 0])] * keys.shape[1]
        self._branch[layer] = [
            Rows(
                np.concatenate([rows.k[:first], keys[:, head]]),
                np.concatenate([rows.v[:first], values[:, head]]),
            )
            for head, rows in enumerate(branch_rows)
        ]
        self._attended.add(layer)

    def _keys(
        self, params: AttentionParams, head: int, inv_freq: Float, view: str, *, branch: bool
    ) -> _Keys:
        """All a head can look at: pages, the tail, and the branch if that is asked for."""
        stream = self.table.stream(params.layer, head)
        parts: list[KeyPart] = []
        values: list[Float] = []
        where: list[NDArray[np.int64]] = []
        valid: list[NDArray[np.bool_]] = []
        for _, page, views in self.table.of_stream(stream):
            for view_of_page in views:
                turn = self._turned(stream, view_of_page.delta, inv_freq)
                parts.append((page.read(KEYS, view), turn))
                values.append(page.read(VALUES, view))
                first = view_of_page.pos0 + view_of_page.delta
                where.append(first + np.arange(PAGE_TOKENS, dtype=np.int64))
                valid.append(view_of_page.valid)
        tail, places = self._tail[stream], self._places
        floats: list[tuple[Rows, NDArray[np.int64], int]] = []
        for delta in sorted({0, *places.deltas.tolist()}):
            alike = places.deltas == delta
            rows = Rows(tail.k[alike], tail.v[alike])
            floats.append((rows, places.positions[alike], delta))
        if branch:
            floats.append((self._branch[params.layer][head], self._branch_positions, 0))
        for rows, at, delta in floats:
            parts.append((rows.k.astype(np.float32), _turned_back(delta, inv_freq)))
            values.append(rows.v.astype(np.float32))
            where.append(at)
            valid.append(np.ones(len(at), np.bool_))
        return _Keys(np.concatenate(values), np.concatenate(where), np.concatenate(valid), parts)

    def _turned(self, stream: int, delta: int, inv_freq: Float) -> Callable[[Float], Float]:
        """What queries [n, D] become to meet the keys of a stream's page.

        These stay as they were encoded: the query turns back by the page's shift.
        """
        turn = _turned_back(delta, inv_freq)
        rotated = self.table.forms[stream] & PageForm.ROTATED_KEYS
        return (lambda rows: hadamard(turn(rows))) if rotated else turn

    def commit(self, rows: int | Sequence[int]) -> None:
        """Keeps a path of the branch, forgets the rest; closes pages if enough rows stand."""
        count = rows if isinstance(rows, int) else len(rows)
        if not self._parents or not 0 <= count <= self.branch_rows:
            raise CacheError(f"{count} rows cannot be committed of the branch's {self.branch_rows}")
        path = list(range(rows)) if isinstance(rows, int) else list(rows)
        if not path:
            self.rewind()
            return
        inside = all(0 <= row < self.branch_rows for row in path)
        if not inside or [self._parents[row] for row in path] != [-1, *path[:-1]]:
            raise CacheError(f"rows {rows} are no path of the branch's {self.branch_rows} rows")
        if self._unattended:
            raise CacheError("a layer has not seen the newest rows yet")
        self._check_kept(len(path))
        pages = self._closing(len(path))
        tokens = self._first + np.arange(len(path), dtype=np.int64)
        places = self._places.joined(tokens, self._branch_positions[path])
        if not self._fits_views(places, [column.views for column in self.table.columns]):
            raise CacheError("the tokens stand at too many stretches of positions")
        # A slot that another row of the same depth wrote last holds no probe.
        row_tokens = self._branch_tokens()
        self._probes.forget(
            row_tokens[row] for row in path if row_tokens[row] in row_tokens[row + 1 :]
        )
        heads = self.arena.shape.num_kv_heads
        for layer, branch in self._branch.items():
            for head in range(heads):
                tail = self._tail[layer * heads + head]
                tail.k = np.concatenate([tail.k, branch[head].k[path]])
                tail.v = np.concatenate([tail.v, branch[head].v[path]])
        self._places = places
        for other in self._mixers:
            other.commit(path, self.tokens)
        self.tokens += len(path) if self._at is None else 0
        self._open_branch()
        for _ in range(pages):
            self._close_page()
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _check_kept(self, rows: int) -> None:
        for other in self._mixers:
            if (reason := other.why_not_keep(rows)) is not None:
                raise CacheError(reason)

    def _close_page(self) -> None:
        """Packs the first tokens behind the sinks; the text's end stays in floating point."""
        sinks = self.arena.plan.sink_tokens
        chosen = sinks + np.argsort(self._places.tokens[sinks:], kind="stable")[:PAGE_TOKENS]
        rows = [(rows.k[chosen], rows.v[chosen]) for rows in self._tail]
        self.table.append(self._places.take(chosen).views(), rows)
        self._keep_rows(np.setdiff1d(np.arange(len(self._places)), chosen))

    def rewind(self, rows: int = 0) -> None:
        """Keeps only the first `rows` rows of the branch."""
        if not 0 <= rows <= self.branch_rows:
            raise CacheError(f"the branch has {self.branch_rows} rows, not {rows}")
        if rows and self._unattended and rows > self.branch_rows - self._pass_rows:
            raise CacheError("a layer has not seen the newest rows yet")
        self._check_kept(rows)
        self._probes.forget(self._branch_tokens()[rows:])
        if rows == 0:
            self._open_branch()
        elif rows < self.branch_rows:
            self._parents = self._parents[:rows]
            self._pass_rows = 0
            for other in self._mixers:
                other.rewind(rows)

    # -- evidence --

    def _branch_tokens(self) -> list[int]:
        """Which token every row of the branch would be: rows of one depth stand for the same."""
        return (self._first + ancestry(self._parents).sum(axis=1) - 1).tolist()

    def evidence(self, tokens: int) -> tuple[Float, Float]:
        """What the probes among the first `tokens` tokens see.

        Returns facts float32 [8, L, Hk, C] in the order of `ObservedAttention`'s fields, and
        queries float32 [3, L, Hk, D]: of the queries their mean, their mean square, and the mean
        square of their attention's output.
        """
        self._check_between_passes()
        shape, heads = self.arena.shape, self.arena.shape.num_kv_heads
        facts = np.zeros((8, shape.num_layers, heads, len(self.table)), np.float32)
        queries = np.zeros((3, shape.num_layers, heads, shape.head_dim), np.float32)
        for layer in range(shape.num_layers):
            askers = self._probes.askers(layer)
            kinds_by_asker = {
                asker: kinds for asker in askers if any(kinds := self._probes.kinds(asker, tokens))
            }
            for head in range(heads if kinds_by_asker else 0):
                looks = [
                    self._looks(asker, head, *kinds) for asker, kinds in kinds_by_asker.items()
                ]
                rows, outputs = (
                    np.concatenate([getattr(look, name) for both in looks for look in both])
                    for name in ("rows", "outputs")
                )
                rows = self._turned(layer * heads + head, 0, self._probes.layers[layer][1])(rows)
                queries[:, layer, head] = (
                    rows.mean(axis=0),
                    *(np.square(x).mean(axis=0) for x in (rows, outputs)),
                )
                entries = self.table.of_stream(self.table.stream(layer, head))
                columns = [c for c, _, _ in entries]
                pages = [page for _, page, _ in entries]
                facts[:, layer, head, columns] = record(pages, looks, len(askers))
        return facts, queries

    def _looks(self, asker: int, head: int, *kinds: Sequence[Probe]) -> Looks:
        """What an asker's newest probes saw of a stream's pages, and what its sampled ones."""
        newest, sampled = (
            self._look(asker, head, *self._probes.rows(asker, head, probes)) for probes in kinds
        )
        return newest, sampled

    def _look(self, asker: int, head: int, rows: Float, where: NDArray[np.int64]) -> Look:
        """What probe rows [R, D] see of a stream's pages."""
        params, inv_freq = self._probes.layers[asker]
        keys = self._keys(params, head, inv_freq, "full", branch=False)
        seen = keys.seen(where, params.window_tokens, np.zeros((len(rows), 0), np.bool_))
        weights = attention_weights(params, keys.logits(rows), seen)
        look = Look(rows, weights @ keys.values)
        start = 0
        stream = self.table.stream(params.layer, head)
        for _, page, views in self.table.of_stream(stream):
            # What views of one page see adds up; the rows are those that see most of them.
            rows_seeing, mass, peak, errors = 0, 0.0, 0.0, np.zeros(3)
            for view in views:
                part = slice(start, start + PAGE_TOKENS)
                start += PAGE_TOKENS
                sees = seen[:, part].any(axis=1)
                masses = weights[:, part].sum(axis=1)
                heavy = sees & (masses >= OBSERVED_MASS)
                errors += page_errors(
                    weights[heavy, part],
                    self._turned(stream, view.delta, inv_freq)(rows)[heavy],
                    look.outputs[heavy],
                    keys.values[part],
                    page.grids[KEYS].scale,
                    np.expand_dims(page.grids[VALUES].scale, grid_axis(VALUES, page.form)),
                ).sum(axis=0)
                rows_seeing, mass = max(rows_seeing, int(sees.sum())), mass + float(masses.sum())
                peak = max(peak, float(weights[:, part].max(initial=0)))
            look.seen.append(np.array([rows_seeing, mass, peak, *errors]))
        return look

    def constants(self, layer: int) -> tuple[Float, Float]:
        return self.table.constants(layer)

    def key_squares(self, layer: int) -> Float:
        return self.table.key_squares(layer)

    # -- changes between forward passes --

    def trim(self, tokens: int) -> None:
        """Rolls back to the first `tokens` tokens, or to fewer where other layers forgot."""
        self._check_idle()
        if not 0 <= tokens <= self.tokens:
            raise CacheError(f"cannot roll back to {tokens} of {self.tokens} tokens")
        for other in self._mixers:
            tokens = other.trim(tokens, self.tokens)
        self._become(*self._without(tokens, self.tokens, 0))
        self.tokens = tokens

    def mark(self, tokens: int) -> None:
        """What other layers remember of the first `tokens` tokens is kept before other places."""
        if not 1 <= tokens <= self.arena.context_tokens:
            raise CacheError(f"the place {tokens} is none of {self.arena.context_tokens} tokens")
        for other in self._mixers:
            other.mark(tokens)

    def edit(self, start: int, stop: int, count: int) -> None:
        """Removes tokens `start` to `stop`; what follows moves and leaves a gap for `count`."""
        self._check_idle()
        moved = count - (stop - start)
        inside = self.arena.plan.sink_tokens <= start <= stop <= self.tokens
        if not inside or count < 0 or self.tokens + moved > self.arena.context_tokens:
            raise CacheError(f"{count} tokens cannot stand for tokens {start} to {stop}")
        views, kept, places = self._without(start, stop, moved)
        if not self._fits_views(places.take(kept), views, reserve=GAP_VIEWS):
            raise CacheError("the budget has no room for these tokens")
        self._become(views, kept, places)
        self._probes.forget_from(start)
        self.tokens += moved

    def _without(
        self, start: int, stop: int, moved: int
    ) -> tuple[list[list[View]], NDArray[np.bool_], Places]:
        """All columns' views without tokens `start` to `stop`, those behind `moved` further.

        Then which of the rows [n] stay, and the places of all of them.
        """
        places = self._places
        by = np.where(places.tokens >= stop, moved, 0)
        kept = (places.tokens < start) | (places.tokens >= stop)
        after = Places(places.tokens + by, places.positions + by, places.deltas + by)
        return self.table.split(start, stop, moved), kept, after

    def _become(self, views: list[list[View]], kept: NDArray[np.bool_], places: Places) -> None:
        """What `_without` gave."""
        self.table.show(views)
        self._places = places
        self._keep_rows(kept)

    def _fits_views(
        self, places: Places, columns: Sequence[Sequence[View]], reserve: int = 0
    ) -> bool:
        """Whether there are views enough for these rows once they lie in pages, and `reserve` more.

        Every column, also one that is yet to come, has one view of its own; the others are shared.
        """
        further = sum(len(views) - 1 for views in columns if views)
        rows = places.take(slice(self.arena.plan.sink_tokens, None))
        needed = further + rows.stretches + reserve
        return not self.arena.plan.quantized or needed <= self.arena.max_columns + SPARE_VIEWS

    def _keep_rows(self, kept: NDArray[Any]) -> None:
        for rows in self._tail:
            rows.k, rows.v = rows.k[kept], rows.v[kept]
        self._places = self._places.take(kept)

    def demote(self, actions: NDArray[np.int32]) -> None:
        """Rows of (layer, head, column, k_bits, v_bits); widths only fall, 0 and 0 evict."""
        self._check_between_passes()
        self.table.demote(actions)

    def lower_new_page_widths(self, widths: Bytes) -> None:
        """Lowers the widths uint8 [L, Hk, 2] that the pages to come close at."""
        self._check_between_passes()
        self.table.lower_new_page_widths(widths)

    def shift(self, column: int, delta: int) -> None:
        self._check_idle()
        self.table.shift(column, delta)

    def shift_sinks(self, delta: int) -> None:
        """The sinks stand `delta` further than their keys were rotated."""
        self._check_between_passes()
        rows = slice(0, self.arena.plan.sink_tokens)
        positions = self._places.positions[rows] - self._places.deltas[rows] + delta
        if not ((positions >= 0) & (positions <= MAX_POSITION)).all():
            raise CacheError(f"positions must lie in 0 to {MAX_POSITION}")
        self._places.positions[rows], self._places.deltas[rows] = positions, delta

    def mask(self, column: int, mask: int) -> None:
        self._check_idle()
        self.table.mask(column, mask)

    def _check_idle(self) -> None:
        if self._parents:
            raise CacheError("a branch is open: commit() or rewind() it first")

    def _check_between_passes(self) -> None:
        if self._unattended:
            raise CacheError("a forward pass is under way: finish, commit() or rewind() it first")

    # -- what there is --

    def new_page_widths(self) -> Bytes:
        return self.table.new_page_widths()

    def columns(self) -> tuple[NDArray[np.int64], Bytes]:
        return self.table.facts()

    def views(self) -> NDArray[np.int64]:
        return self.table.views()

    def places(self) -> NDArray[np.int64]:
        """Int64 [n, 3]: token, position and delta of the tail's rows."""
        places = self._places
        return np.stack([places.tokens, places.positions, places.deltas], axis=1)

    def page(self, layer: int, head: int, column: int) -> bytes:
        """A page's stored bytes; empty once evicted."""
        page = self.table.page(layer, head, column)
        room = constant_bytes(self.arena.shape.head_dim, self.arena.value_groups)
        return page.stored(room) if page else b""

    def tail(self, layer: int, head: int) -> tuple[Half, Half, NDArray[np.int32]]:
        """Floating-point rows (k, v) [n, D] of one stream and their positions [n]."""
        rows = self._tail[self.table.stream(layer, head)]
        return rows.k, rows.v, self._places.positions.astype(np.int32)

    # -- snapshots --

    def state(self) -> bytes:
        """Everything a later `load_state` needs, as an npz archive."""
        self._check_idle()
        arrays = self.table.arrays() | self._probes.arrays()
        arrays |= {"arena": self._identity(), "places": self.places()}
        for other in self._mixers:
            arrays |= other.arrays()
        arrays["counts"] = np.array([self.tokens, self.peak_bytes], np.int64)
        for stream, rows in enumerate(self._tail):
            arrays[f"tail{stream}k"], arrays[f"tail{stream}v"] = rows.k, rows.v
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    def _identity(self) -> NDArray[np.str_]:
        """What two caches must share to read each other's snapshots; threads are no part of it."""
        arena = self.arena
        identity = (
            PAGE_VERSION,
            *map(int, self.table.forms),
            arena.shape,
            arena.plan,
            arena.context_tokens,
            arena.pass_tokens,
            arena.draft_tokens,
            arena.probe_kinds,
            arena.num_bytes,
            arena.conv,
            arena.delta,
            arena.delta_states,
        )
        return np.array(" ".join(map(str, identity)))

    def load_state(self, state: bytes) -> None:
        """Restores what `state` returned for a cache of the same arena."""
        try:
            arrays = read_arrays(io.BytesIO(state))
        except (ValueError, OSError) as error:
            raise SnapshotError("the saved cache is damaged") from error
        if not np.array_equal(arrays.get("arena", ()), self._identity()):
            raise SnapshotError(
                "the saved cache has another shape, plan or budget than this session"
            )
        halves = [array for array in arrays.values() if array.dtype == np.float16]
        grids = [
            np.frombuffer(array.tobytes(), np.float16, 4)
            for name, array in arrays.items()
            if name.startswith("page") and name[-1] == "g"
        ]
        if not all(np.isfinite(array).all() for array in (*halves, *grids)):
            raise SnapshotError("the saved cache is damaged: it holds what is no number")
        self._restore(arrays)

    def _restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        counts = arrays["counts"].tolist()
        for other in self._mixers:
            other.restore(arrays, counts[0])
        self.tokens, self.peak_bytes = counts
        self._places = Places(*arrays["places"].T)
        streams = range(self.arena.streams)
        self._tail = [Rows(arrays[f"tail{s}k"], arrays[f"tail{s}v"]) for s in streams]
        self.table.restore(arrays)
        self._probes.restore(arrays)
        self._open_branch()

    def close(self) -> None:
        """Nothing to give back: numpy owns the arrays."""
