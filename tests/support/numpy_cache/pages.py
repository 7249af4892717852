"""What a numpy cache holds: pages, the views that edits cut them into, floating-point rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS, PageForm
from kvq.errors import CacheError
from kvq.formats import GRANULES, constant_bytes, granule_bytes, page_bytes
from kvq.reference.stored import (
    KEYS,
    VALUES,
    Bytes,
    Float,
    Half,
    PageGrid,
    carried,
    codes_on,
    decode,
    encode,
    hadamard,
    planes,
)
from kvq.sizing import ClassArena

# The mask of a page that is seen whole.
WHOLE = (1 << PAGE_TOKENS) - 1


def grid_axis(side: int, form: PageForm) -> int:
    """The axis of a page [64, D] that a group of its side lies along: 0 tokens, 1 channels."""
    return 1 if side == VALUES and not form & PageForm.CHANNEL_VALUES else 0


@dataclass(slots=True)
class Page:
    """One page of one (layer, KV head): codes kept whole, read at the widths it still has."""

    codes: tuple[Bytes, Bytes]
    grids: tuple[PageGrid, PageGrid]
    bits: tuple[int, int]
    form: PageForm = PageForm.PLAIN
    peak_weight: int = 0
    mean_mass: int = 0

    def read(self, side: int, view: str) -> Float:
        """Values as seen; the view "hi" reads 8 and 6 bits as 4, by their hi plane."""
        bits = min(self.bits[side], 4) if view == "hi" else self.bits[side]
        return decode(self.codes[side], self.grids[side], bits, grid_axis(side, self.form))

    def narrow_keys(self, bits: int, feedback: Float) -> None:
        """Rounds what is read of the keys for a read at fewer bits, see `stored.carried`."""
        grid = self.grids[KEYS]
        keys = carried(self.read(KEYS, "full"), grid, bits, feedback)
        self.codes = codes_on(grid, keys, grid_axis(KEYS, self.form)), self.codes[VALUES]

    def stored(self, constant_bytes: int) -> bytes:
        """The page's bytes as the native cache keeps them: constants in their room, then planes."""
        sides = [planes(self.codes[s], self.bits[s], s).tobytes() for s in (KEYS, VALUES)]
        grids = b"".join(grid.stored() for grid in self.grids)
        return b"".join([grids.ljust(constant_bytes, b"\0"), *sides])


@dataclass(slots=True)
class View:
    """Tokens of one page that have moved together, as edits leave them.

    Slot i holds token `first_token + i`, whose key was rotated to position `pos0 + i` and stands
    `delta` further now; it is visible where bit i of `mask` is set.
    """

    pos0: int
    delta: int
    first_token: int
    mask: int = WHOLE

    @property
    def place(self) -> tuple[int, int, int]:
        """What slots of one view share."""
        return self.pos0, self.delta, self.first_token

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which slots are visible [64]."""
        return np.array([self.mask >> i & 1 for i in range(PAGE_TOKENS)], np.bool_)

    def facts(self) -> tuple[int, int, int, int]:
        """Position, shift, first token and mask, as int64 holds them."""
        return (*self.place, _signed(self.mask))


@dataclass(slots=True)
class Column:
    """One page of all streams; `pages[stream]` is None once evicted."""

    views: list[View]
    pages: list[Page | None] = field(default_factory=lambda: [])


@dataclass(slots=True)
class Places:
    """Of floating-point rows their tokens, positions, and how far these have moved; int64 [n]."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    deltas: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Any) -> "Places":
        return Places(self.tokens[rows], self.positions[rows], self.deltas[rows])

    def joined(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> "Places":
        """With rows behind them that have not moved."""
        return Places(
            np.concatenate([self.tokens, tokens]),
            np.concatenate([self.positions, positions]),
            np.concatenate([self.deltas, np.zeros_like(tokens)]),
        )

    def views(self) -> list[View]:
        """Those of a page of these rows, as many as they have places."""
        views: dict[tuple[int, int, int], View] = {}
        rows = zip(self.tokens.tolist(), self.positions.tolist(), self.deltas.tolist(), strict=True)
        for slot, (token, position, delta) in enumerate(rows):
            place = (position - delta - slot, delta, token - slot)
            view = views.setdefault(place, View(*place, mask=0))
            view.mask |= 1 << slot
        return list(views.values())

    @property
    def stretches(self) -> int:
        """Runs of rows whose tokens and positions count up and that have moved alike."""
        steps = np.diff([self.tokens, self.positions, self.deltas], axis=1)
        return int((steps != [[1], [1], [0]]).any(axis=0).sum()) + (len(self) > 0)


NO_PLACES = Places(*np.zeros((3, 0), np.int64))


@dataclass(slots=True)
class Rows:
    """Floating-point rows of one stream, float16 [n, D] each."""

    k: Half
    v: Half


class PageTable:
    """The pages of one cache, column by column.

    Closes, demotes and evicts as told; decides nothing. What names a page that there cannot be, or
    is more than it holds, raises `CacheError` and changes nothing.
    """

    def __init__(self, arena: ClassArena) -> None:
        self._arena = arena
        self.columns: list[Column] = []
        self.forms = arena.spec.page_encodings or (PageForm.PLAIN,) * arena.streams
        self.feedback: list[Float | None] = [None] * arena.streams
        self._new_page_widths = np.empty((arena.streams, 2), np.uint8)
        self._new_page_widths[:] = arena.plan.k_bits, arena.plan.v_bits

    def __len__(self) -> int:
        return len(self.columns)

    # -- bytes --

    @property
    def used_bytes(self) -> int:
        dim = self._arena.shape.head_dim
        pages = [page for column in self.columns for page in column.pages if page]
        granules = sum(GRANULES[bits] for page in pages for bits in page.bits)
        constants = constant_bytes(dim, self._arena.value_groups)
        return len(pages) * constants + granules * granule_bytes(dim)

    @property
    def new_page_bytes(self) -> int:
        """What one more page of every stream takes."""
        dim, groups = self._arena.shape.head_dim, self._arena.value_groups
        return sum(page_bytes(dim, k, v, groups) for k, v in self._new_page_widths.tolist())

    # -- what there is --

    def stream(self, layer: int, head: int) -> int:
        """The place of a layer's KV head among all of them."""
        heads = self._arena.shape.num_kv_heads
        if not (0 <= layer < self._arena.shape.num_layers and 0 <= head < heads):
            raise CacheError(f"there is no layer {layer}, head {head}")
        return layer * heads + head

    def column(self, column: int) -> Column:
        if not 0 <= column < len(self.columns):
            raise CacheError(f"there is no page {column} among {len(self.columns)}")
        return self.columns[column]

    def page(self, layer: int, head: int, column: int) -> Page | None:
        """None once evicted."""
        return self.column(column).pages[self.stream(layer, head)]

    def of_stream(self, stream: int) -> list[tuple[int, Page, list[View]]]:
        """(column, page, its views) of a stream's pages that are held."""
        entries: list[tuple[int, Page, list[View]]] = []
        for c, column in enumerate(self.columns):
            page = column.pages[stream]
            if page is not None:
                entries.append((c, page, column.views))
        return entries

    def held_tokens(self) -> list[NDArray[np.int64]]:
        """The tokens that are visible in some page, view by view."""
        views = [view for column in self.columns for view in column.views]
        return [view.first_token + np.flatnonzero(view.valid) for view in views]

    def new_page_widths(self) -> Bytes:
        """Widths the next pages close at, uint8 [L, Hk, 2]."""
        shape = self._arena.shape
        return self._new_page_widths.reshape(shape.num_layers, shape.num_kv_heads, 2).copy()

    def facts(self) -> tuple[NDArray[np.int64], Bytes]:
        """Facts int64 [C, 4] (pos0, delta, first_token, mask) and widths uint8 [L, Hk, C, 2]."""
        shape = self._arena.shape
        rows: list[tuple[int, int, int, int]] = []
        for column in self.columns:
            last = max(column.views, key=lambda view: view.pos0 + view.delta)
            mask = sum(view.mask for view in column.views)  # no slot is seen in two views
            rows.append((*last.place, _signed(mask)))
        facts = np.array(rows, np.int64).reshape(-1, 4)
        widths = np.array(
            [[page.bits if page else (0, 0) for page in c.pages] for c in self.columns], np.uint8
        ).reshape(len(self.columns), shape.num_layers, shape.num_kv_heads, 2)
        return facts, np.ascontiguousarray(widths.transpose(1, 2, 0, 3))

    def views(self) -> NDArray[np.int64]:
        """Int64 [V, 5]: column, pos0, delta, first token and mask of every view."""
        rows = [
            (c, *view.facts()) for c, column in enumerate(self.columns) for view in column.views
        ]
        return np.array(rows, np.int64).reshape(-1, 5)

    def constants(self, layer: int) -> tuple[Float, Float]:
        """Scales and mids of a layer float32: keys [Hk, C, 2, D], values [Hk, C, 2, 64].

        Of values on a grid of channels every token has the channels' root mean squares.
        """
        heads, dim = self._arena.shape.num_kv_heads, self._arena.shape.head_dim
        pages = (heads, len(self.columns), 2)
        out = np.zeros((*pages, dim), np.float32), np.zeros((*pages, PAGE_TOKENS), np.float32)
        for head, c, page in self._of_layer(layer):
            for side in (KEYS, VALUES):
                lines = np.array([page.grids[side].scale, page.grids[side].mid])
                if side > grid_axis(side, page.form):
                    lines = np.sqrt(np.square(lines).mean(axis=1, keepdims=True))
                out[side][head, c] = lines
        return out

    def key_squares(self, layer: int) -> Float:
        """Squared lengths of a layer's keys as read, [Hk, C, 64]; 0 where a page is evicted."""
        heads = self._arena.shape.num_kv_heads
        squares = np.zeros((heads, len(self.columns), PAGE_TOKENS), np.float32)
        for head, c, page in self._of_layer(layer):
            squares[head, c] = np.square(page.read(KEYS, "full")).sum(axis=1)
        return squares

    def _of_layer(self, layer: int) -> Iterator[tuple[int, int, Page]]:
        """(head, column, page) of a layer's pages that are held."""
        for head in range(self._arena.shape.num_kv_heads):
            for c, page, _ in self.of_stream(self.stream(layer, head)):
                yield head, c, page

    # -- changes --

    def append(self, views: list[View], rows: Sequence[tuple[Half, Half]]) -> None:
        """Packs keys and values [64, D] of every stream as a column with these views."""
        column = Column(views)
        packed = zip(self.forms, self.feedback, self._new_page_widths.tolist(), rows, strict=True)
        for form, feedback, (k_bits, v_bits), (keys, values) in packed:
            k, v = keys.astype(np.float32), values.astype(np.float32)
            k = hadamard(k) if form & PageForm.ROTATED_KEYS else k
            k_codes, k_grid = encode(k, grid_axis(KEYS, form), bits=k_bits, feedback=feedback)
            v_codes, v_grid = encode(v, grid_axis(VALUES, form))
            page = Page(
                codes=(k_codes, v_codes), grids=(k_grid, v_grid), bits=(k_bits, v_bits), form=form
            )
            column.pages.append(page)
        self.columns.append(column)

    def demote(self, actions: NDArray[np.int32]) -> None:
        """Rows of (layer, head, column, k_bits, v_bits); widths only fall, 0 and 0 evict."""
        for layer, head, column, *bits in actions.tolist():
            page = self.page(layer, head, column)
            page_bits = page.bits if page else (0, 0)
            lower = all(b in GRANULES and b <= h for b, h in zip(bits, page_bits, strict=True))
            if any(bits) and not lower:
                raise CacheError("a page's widths only fall")
        for layer, head, column, k_bits, v_bits in actions.tolist():
            page = self.page(layer, head, column)
            if not k_bits:
                self.column(column).pages[self.stream(layer, head)] = None
            elif page and k_bits <= page.bits[0] and v_bits <= page.bits[1]:
                feedback = self.feedback[self.stream(layer, head)]
                if feedback is not None and k_bits < page.bits[0]:
                    page.narrow_keys(k_bits, feedback)
                page.bits = (k_bits, v_bits)
        self.columns = [column for column in self.columns if any(column.pages)]

    def lower_new_page_widths(self, widths: Bytes) -> None:
        """Lowers the widths uint8 [L, Hk, 2] that the pages to come close at."""
        pairs = widths.reshape(-1, 2)
        if not np.isin(pairs, list(GRANULES)).all() or (pairs > self._new_page_widths).any():
            raise CacheError("a page's widths only fall")
        self._new_page_widths = pairs.astype(np.uint8)

    def shift(self, column: int, delta: int) -> None:
        for view in self.column(column).views:
            view.delta = delta

    def mask(self, column: int, mask: int) -> None:
        views = self.column(column).views
        if len(views) != 1:
            raise CacheError(f"page {column} has {len(views)} views, each with a mask of its own")
        views[0].mask &= mask

    def split(self, start: int, stop: int, moved: int) -> list[list[View]]:
        """Every column's views once tokens `start` to `stop` are gone and those behind have moved.

        A view that holds tokens of both sides becomes two; views of one page that have come to
        the same place become one.
        """
        columns: list[list[View]] = []
        for column in self.columns:
            views_by_place: dict[tuple[int, int, int], View] = {}
            for view in column.views:
                first = view.first_token
                sides = (
                    (view.mask & _low_bits(start - first), 0),
                    (view.mask & ~_low_bits(stop - first), moved),
                )
                for mask, by in sides:
                    place = (view.pos0, view.delta + by, first + by)
                    if mask:
                        views_by_place.setdefault(place, View(*place, mask=0)).mask |= mask
            columns.append(list(views_by_place.values()))
        return columns

    def show(self, columns: Sequence[list[View]]) -> None:
        """Gives every column these views; one that shows nothing any more goes."""
        for column, views in zip(self.columns, columns, strict=True):
            column.views = views
        self.columns = [column for column in self.columns if column.views]

    # -- snapshots --

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All of it by name, as a snapshot holds it."""
        masses = [
            (page.peak_weight, page.mean_mass) if page else (0, 0)
            for column in self.columns
            for page in column.pages
        ]
        arrays: dict[str, NDArray[Any]] = {
            "widths": self.facts()[1],
            "views": self.views(),
            "new_page_widths": self._new_page_widths,
            "masses": np.array(masses, np.uint8).reshape(-1, self._arena.streams, 2),
        }
        for stream in range(self._arena.streams):
            for c, page, _ in self.of_stream(stream):
                for side in (KEYS, VALUES):
                    name = f"page{c}.{stream}.{side}"
                    arrays[name] = page.codes[side]
                    arrays[name + "g"] = np.frombuffer(page.grids[side].stored(), np.uint8)
        return arrays

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes what `arrays` gave."""
        self._new_page_widths = arrays["new_page_widths"]
        widths = arrays["widths"].reshape(self._arena.streams, -1, 2)
        self.columns = []
        for c in range(widths.shape[1]):
            views = arrays["views"][arrays["views"][:, 0] == c, 1:].tolist()
            column = Column([View(*place, mask=mask & WHOLE) for *place, mask in views])
            for stream, (k_bits, v_bits) in enumerate(widths[:, c].tolist()):
                page = None
                if k_bits:
                    names = [f"page{c}.{stream}.{side}" for side in (KEYS, VALUES)]
                    keys, values = (PageGrid.load(arrays[name + "g"].tobytes()) for name in names)
                    peak_weight, mean_mass = arrays["masses"][c, stream].tolist()
                    page = Page(
                        codes=(arrays[names[0]], arrays[names[1]]),
                        grids=(keys, values),
                        bits=(k_bits, v_bits),
                        form=self.forms[stream],
                        peak_weight=peak_weight,
                        mean_mass=mean_mass,
                    )
                column.pages.append(page)
            self.columns.append(column)


def _low_bits(count: int) -> int:
    return (1 << min(max(count, 0), PAGE_TOKENS)) - 1


def _signed(mask: int) -> int:
    """A mask as an int64 holds it."""
    return mask - (1 << 64) if mask >> 63 else mask
