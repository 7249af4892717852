"""Random calls of the C ABI in random order, with arguments that make sense and that do not.

    python tests/support/abi_fuzz.py LIBRARY SEED STEPS [THREADS]

Ends without a word, or with a crash, a sanitizer's report or a failed check. Every buffer is as
large as `kvq.h` asks for, so whatever the library reads or writes beyond is its own fault. Calls on
caches are here; those of products are in `abi_products`, and `abi_twins` has calls that all make
sense, whose results are numpy's.
"""

import ctypes
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np

from abi_calls import (
    CLOSED,
    NUMBERS,
    OK,
    USUALLY_WILD,
    Draw,
    Library,
    declared,
    open_library,
)
from abi_products import Products
from abi_twins import Hybrids
from kvq import abi, native
from kvq.config import FOLD_TOKENS
from kvq.formats import PAGE_VERSION, constant_bytes
from pairs import some_feedback

MOST_TOKENS, DIMS, PAIRS = 160, (16, 32, 80), (8, 6, 4, 2)
# Of a cache's convolutions: layers, width, taps, checkpoints; of its delta nets all that
# `kvq_config` has.
CONVOLUTIONS = ((1, 16, 2, 1), (2, 300, 4, 3), (3, 7, 3, 8))
DELTA_NETS = ((1, 1, 1, 16, 16, 2, 2), (2, 2, 4, 16, 32, 4, 3), (1, 2, 2, 32, 16, 3, 5))
# Steps after which every call has been made and has succeeded.
ENOUGH_STEPS = 5000
# No machine of the tests has such a device.
NEVER_SUCCEED = {"kvq_device_open", "kvq_device_best"}


class Opened:
    """A cache the fuzzer opened, and what it needs to know to give it buffers."""

    def __init__(self, handle: int, config: Any) -> None:
        self.handle, self.config = handle, config
        self.position = self.layer = self.mixed = self.rows = 0
        self.gap = -1  # where the last edit left one
        self.states: list[bytes] = []
        self.feedbacks: list[Any] = []  # the library reads them as long as the cache is open


class Caches(Draw):
    """Random calls on up to three caches."""

    def __init__(self, library: Library, seed: int, caches: list[Opened]) -> None:
        super().__init__(seed)
        self.call: Any = library
        self.caches = caches  # which other threads may share
        self.stats = abi.NativeStats()
        self.calls: list[Callable[[Opened], object]] = [
            *[self.forward] * 16, *[self.attend] * 3, self.begin, self.begin, self.commit,
            self.commit, self.rewind, self.trim, self.mark, self.demote, self.entering, self.move,
            self.inspect, *[self.edit] * 4, *[self.convolve] * 2, *[self.recur] * 2, self.look,
            self.look, self.read, self.save, self.load, self.missing, self.feed_back, self.close,
            self.close, self.close,
        ]  # fmt: skip

    def step(self) -> None:
        caches = [*self.caches]
        if not caches or (len(caches) < 3 and self.one_in(100)):
            return self.open()
        self.choice(self.calls)(self.choice(caches))

    def mixers(self) -> tuple[int, ...]:
        """Of a quarter of all caches convolutions, of another delta nets, seldom both."""
        conv, delta = self.choice(CONVOLUTIONS), (*self.choice(DELTA_NETS), FOLD_TOKENS)
        kind = 3 if self.one_in(20) else self.choice((0, 0, 1, 2))
        return *(conv if kind & 1 else (0,) * 4), *(delta if kind & 2 else (0,) * 8)

    def open(self) -> None:
        heads = self.choice((1, 2))
        k_bits, v_bits = self.choice([(16, 16)] + [(k, v) for k in PAIRS for v in PAIRS] * 2)
        sinks, tail, draft = (self.choice(n) for n in ((0, 4, 64), (0, 17, 64), (1, 8, 128)))
        context = self.choice((50, 300, 2000))
        rows = sinks + tail + 64 + draft if k_bits < 16 else max(context, draft)
        chunk = max(draft, self.choice((8, 64, MOST_TOKENS)))
        dim = self.choice(DIMS)
        values = [2, heads * self.choice((1, 3)), heads, dim, k_bits,
                  v_bits, sinks, tail, rows, chunk, context, self.choice((1, 4)),
                  int(self.chance.random() < 0.5 and k_bits < 16), draft,
                  self.choice((64, max(64, dim))), PAGE_VERSION,
                  *self.mixers()]  # fmt: skip
        if self.chance.random() < 0.1:
            values[self.chance.randrange(len(values))] = self.choice(NUMBERS)
        config, layout, handle = abi.NativeConfig(*values), abi.NativeLayout(), ctypes.c_int64()
        columns = -(-max(0, context - sinks - tail) // 64) if k_bits < 16 else 0
        columns = min(columns, 2) if self.chance.random() < 0.5 else self.number(columns)
        regions = (ctypes.c_int64 * len(abi.Regions._fields))()
        pool_bytes = self.number(1 << 20)
        self.call.kvq_regions_of(ctypes.byref(config), columns, pool_bytes, regions)
        self.call.kvq_layout_of(ctypes.byref(config), 1 << 40, columns, ctypes.byref(layout))
        budget = layout.minimum_bytes + self.choice((0, 5000, 100_000, 1 << 20, 1 << 20, -1))
        if budget > 64 << 20:
            return
        most = 255 if self.chance.random() < 0.1 else 3
        # As many as the configuration says, which may be any number now.
        streams = max(0, min(values[0] * values[2], 1 << 16))
        forms = np.array([self.chance.randint(0, most) for _ in range(streams)], np.uint8)
        forms_pointer = native.pointer(forms) if self.chance.random() < 0.9 else None
        device = 1 if self.chance.random() < 0.1 else 0  # of which there are none
        resident = self.number(4) if self.chance.random() < 0.1 else 0
        arguments = ctypes.byref(config), budget, columns, forms_pointer, device, resident
        # A file as long as it is said to be, or shorter, or none.
        file_bytes = self.number(1 << 20) if self.chance.random() < 0.2 else 0
        with tempfile.TemporaryFile() as stream:
            stream.truncate(max(0, min(file_bytes, self.choice((4096, 1 << 20)))))
            file = stream.fileno() if self.chance.random() < 0.9 else -1
            if not self.call.kvq_cache_open(*arguments, file, file_bytes, ctypes.byref(handle)):
                assert device == resident == 0
                assert not (config.conv_layers and config.delta_layers)
                self.caches.append(Opened(handle.value, config))

    def close(self, cache: Opened) -> None:
        if self.chance.random() < 0.3:
            self.call.kvq_cache_close(cache.handle)
            assert self.call.kvq_cache_close(cache.handle) == CLOSED
            if self.chance.random() < 0.9:  # otherwise a handle of nothing stays in use
                with suppress(ValueError):  # another thread removed it
                    self.caches.remove(cache)

    def feed_back(self, cache: Opened) -> None:
        """Numbers, now and then none at all; whoever gives them keeps them."""
        shape = (cache.config.layers, cache.config.kv_heads, cache.config.head_dim)
        feedback = some_feedback(self.numbers, *shape)
        cache.feedbacks.append(feedback)
        self.call.kvq_cache_feed_back(cache.handle, self.optional(feedback, 0.8))

    def begin(self, cache: Opened) -> None:
        tokens = self.number(self.choice((1, 8, cache.config.chunk_tokens)) - 1)
        tokens += tokens < 2**31 - 1
        parents = None
        if self.chance.random() < (0.4 if tokens < 9 else 0.05):
            values = [self.number(12) - 1 for _ in range(min(max(tokens, 0), 4096))]
            parents = (ctypes.c_int32 * max(1, len(values)))(*values)
            tokens = min(tokens, 4096)
        view = self.number(1)
        at = -1 if self.chance.random() < 0.8 else self.number(cache.position)
        at = cache.gap if cache.gap >= 0 and self.chance.random() < 0.7 else at
        silent = None
        if self.chance.random() < 0.2:
            layers = min(max(cache.config.layers, 1), 4096)
            silent = (ctypes.c_uint8 * layers)(*(self.number(1) & 1 for _ in range(layers)))
        if self.call.kvq_cache_begin(cache.handle, tokens, parents, view, at, silent) == 0:
            cache.rows, cache.layer, cache.mixed = tokens, 0, 0

    def rows_of_pass(self, cache: Opened) -> tuple[int, int]:
        """How many rows a layer is said to see, and how many there are."""
        tokens = self.number(MOST_TOKENS) if self.goes_wild() else cache.rows
        return tokens, min(max(tokens, 1), 4096)

    def attention(self, cache: Opened, layer: int) -> abi.NativeAttention:
        c = cache.config
        shape = [c.heads, c.kv_heads, c.head_dim]
        if self.goes_wild(2):
            shape[self.chance.randrange(3)] = self.number(64)
        pairs = self.number(200) if self.goes_wild() else self.choice((0, 4, 8))
        window, softcap = self.choice((0, 1, 100, -5, 2**31 - 1)), self.choice((0, 5))
        layer = self.number(2) if self.goes_wild() else layer
        return abi.NativeAttention(layer, *shape, 0.2, softcap, 1.0, 1e-6, window, pairs)

    def attend(self, cache: Opened) -> None:
        c = cache.config
        tokens, count = self.rows_of_pass(cache)
        facts = self.attention(cache, cache.layer)
        qkv = self.floats(count, max(1, (c.heads + 2 * c.kv_heads) * c.head_dim))
        at = cache.position + np.arange(count, dtype=np.int64)
        if self.goes_wild(2):
            at[self.chance.randrange(count)] = self.choice((*NUMBERS, 2**62, -(2**63)))
        out = np.empty((count, max(1, c.heads * c.head_dim)), np.float32)
        freq, norm = np.ones(256, np.float32), np.ones(256, np.float32)
        norms = [self.optional(norm, 0.3) for _ in range(3)]
        status = self.call.kvq_cache_attend(
            cache.handle, ctypes.byref(facts), tokens, native.pointer(qkv),
            native.pointer(at), native.pointer(freq), *norms, native.pointer(out),
        )  # fmt: skip
        cache.layer += status == OK

    def look(self, cache: Opened) -> None:
        """Queries of some rows of the pass, in any order."""
        c = cache.config
        queries = self.choice(NUMBERS) if self.goes_wild() else self.number(max(0, cache.rows))
        count = min(max(queries, 1), 4096)
        rows = self.numbers.integers(0, max(1, cache.rows), count)
        if self.goes_wild():
            rows[self.chance.randrange(count)] = self.choice((*NUMBERS, 2**62, -(2**63)))
        facts = self.attention(cache, c.layers - 1)
        q = self.floats(count, max(1, c.heads * c.head_dim))
        freq = np.ones(256, np.float32)
        self.call.kvq_cache_look(
            cache.handle, ctypes.byref(facts), queries, native.pointer(rows), native.pointer(q),
            native.pointer(freq), self.optional(freq, 0.3), native.pointer(np.empty_like(q)),
        )  # fmt: skip

    def convolve(self, cache: Opened) -> None:
        c = cache.config
        tokens, count = self.rows_of_pass(cache)
        layer = self.number(3) if self.goes_wild() else cache.mixed
        bcx = self.floats(count, max(1, 3 * c.conv_width))
        weight = self.floats(max(1, c.conv_width), max(1, c.conv_taps))
        out = np.empty((count, max(1, c.conv_width)), np.float32)
        pointers = map(native.pointer, (bcx, weight, out))
        status = self.call.kvq_cache_convolve(cache.handle, layer, tokens, *pointers)
        cache.mixed += status == OK

    def recur(self, cache: Opened) -> None:
        c = cache.config
        tokens, count = self.rows_of_pass(cache)
        layer = self.number(3) if self.goes_wild() else cache.mixed - c.conv_layers
        heads, values = max(1, c.delta_value_heads), c.delta_value_heads * c.delta_value_dim
        convolved = 2 * c.delta_key_heads * c.delta_key_dim + values
        arrays = (
            self.floats(count, max(1, convolved + values)), self.floats(count, 2 * heads),
            self.floats(max(1, convolved), max(1, c.delta_taps)), self.floats(heads),
            self.floats(heads), self.floats(max(1, c.delta_value_dim)),
        )  # fmt: skip
        out = native.pointer(np.empty((count, max(1, values)), np.float32))
        pointers = map(native.pointer, arrays)
        status = self.call.kvq_cache_recur(cache.handle, layer, tokens, *pointers, 1e-6, out)
        cache.mixed += status == OK

    def read(self, cache: Opened) -> None:
        """By any rule, of which some are none."""
        numbers = [self.choice((1.0, 0.25, 0.01)), self.choice((0.0, 4.0))]
        if self.goes_wild():
            numbers[self.chance.randrange(2)] = self.choice((np.nan, np.inf, -1.0, 0.0, 1e30))
        self.call.kvq_cache_read(cache.handle, ctypes.byref(abi.NativeRead(*numbers)))

    def forward(self, cache: Opened) -> None:
        """What a well-behaved caller does, most of the time to its end."""
        self.wild, c = 0.005, cache.config
        self.begin(cache)
        for layer in (self.attend, self.attend):
            layer(cache)
        for layer in [self.convolve] * min(c.conv_layers, 8) + [self.recur] * min(
            c.delta_layers, 8
        ):
            layer(cache)
        if self.one_in(4):
            self.look(cache)
        self.wild = USUALLY_WILD
        if not self.one_in(5):
            status = self.call.kvq_cache_commit(cache.handle, None, cache.rows, None)
            cache.position += cache.rows if status == OK else 0
        if not self.one_in(3):
            self.call.kvq_cache_rewind(cache.handle, 0, None)

    def commit(self, cache: Opened) -> None:
        count = self.number(8)
        rows = [self.number(12) for _ in range(min(max(count, 0), 4096))]
        if self.chance.random() < 0.5:
            rows = sorted(set(rows))
            count = len(rows)
        path = (ctypes.c_int32 * max(1, len(rows)))(*rows)
        count = min(count, 4096)
        self.call.kvq_cache_commit(
            cache.handle, path if self.chance.random() < 0.7 else None, count, self.stats
        )

    def rewind(self, cache: Opened) -> None:
        self.call.kvq_cache_rewind(cache.handle, self.number(8), self.stats)

    def trim(self, cache: Opened) -> None:
        self.call.kvq_cache_stats(cache.handle, self.stats)
        if self.call.kvq_cache_trim(cache.handle, self.number(self.stats.tokens), self.stats) == 0:
            cache.position = min(cache.position, self.stats.tokens)

    def mark(self, cache: Opened) -> None:
        self.call.kvq_cache_mark(cache.handle, self.number(400))

    def edit(self, cache: Opened) -> None:
        self.call.kvq_cache_stats(cache.handle, self.stats)
        start = self.number(self.stats.tokens)
        stop = start + self.number(9) if not self.goes_wild() else self.number(300)
        stop = min(stop, 2**31 - 1)
        count = self.number(9)
        status = self.call.kvq_cache_edit(cache.handle, start, stop, count, self.stats)
        if status == 0:
            cache.gap, cache.position = start if count else -1, self.stats.tokens

    def demote(self, cache: Opened) -> None:
        self.call.kvq_cache_stats(cache.handle, self.stats)
        count = self.choice((0, 1, 1, 1, 2, 12))
        actions = np.array(
            [
                (self.number(1), self.number(1), self.number(self.stats.columns - 1),
                 *self.choice([(0, 0), (2, 2), (4, 2), (8, 6), (6, 4), (0, 2), (5, 5)]))
                for _ in range(count)
            ],
            np.int32,
        ).reshape(-1, 5)  # fmt: skip
        self.call.kvq_cache_demote(cache.handle, native.pointer(actions), count, None)

    def entering(self, cache: Opened) -> None:
        widths = np.zeros(max(1, 2 * cache.config.layers * cache.config.kv_heads), np.uint8)
        self.call.kvq_cache_entering(cache.handle, native.pointer(widths))
        widths[self.chance.randrange(len(widths))] = self.choice((0, 2, 4, 8, 255))
        self.call.kvq_cache_demote_entering(cache.handle, native.pointer(widths))

    def move(self, cache: Opened) -> None:
        self.call.kvq_cache_stats(cache.handle, self.stats)
        last = self.stats.columns - 1
        self.call.kvq_cache_shift_sinks(cache.handle, self.choice(NUMBERS))
        self.call.kvq_cache_shift(cache.handle, self.number(last), self.choice(NUMBERS))
        self.call.kvq_cache_mask(cache.handle, self.number(last), self.numbers.integers(2**63))

    def inspect(self, cache: Opened) -> None:
        c = cache.config
        self.call.kvq_cache_stats(cache.handle, self.stats)
        columns, rows = (
            n if self.chance.random() < 0.9 else self.chance.randint(0, 50)
            for n in (self.stats.columns, self.stats.tail_rows)
        )
        pages = max(1, c.layers * c.kv_heads * columns)
        facts, widths = np.zeros((columns, 4), np.int64), np.zeros((pages, 2), np.uint8)
        pointers = native.pointer(facts), native.pointer(widths)
        self.call.kvq_cache_columns(cache.handle, columns, *pointers)
        views = self.stats.views if self.chance.random() < 0.9 else self.chance.randint(0, 50)
        facts = np.zeros((max(1, views), 5), np.int64)
        self.call.kvq_cache_views(cache.handle, views, native.pointer(facts))
        places = np.zeros((max(1, rows), 3), np.int64)
        self.call.kvq_cache_places(cache.handle, rows, native.pointer(places))
        seen = np.zeros(8 * pages, np.float32)
        queries = np.zeros(3 * c.layers * c.kv_heads * c.head_dim, np.float32)
        pointers = native.pointer(seen), native.pointer(queries)
        tokens = self.number(self.stats.tokens)
        self.call.kvq_cache_evidence(cache.handle, tokens, columns, *pointers)
        grids = [np.zeros((pages, 2, n), np.float32) for n in (c.head_dim, 64)]
        pointers = [native.pointer(part) for part in grids]
        layer = self.number(c.layers - 1)
        self.call.kvq_cache_constants(cache.handle, layer, columns, *pointers)
        squares = native.pointer(np.zeros((pages, 64), np.float32))
        self.call.kvq_cache_key_squares(cache.handle, layer, columns, squares)
        page = np.zeros(constant_bytes(c.head_dim, 256) + 128 * c.head_dim, np.uint8)
        where = self.number(1), self.number(1), self.number(columns)
        self.call.kvq_cache_page(cache.handle, *where, native.pointer(page))
        tail = [np.zeros((max(1, rows), c.head_dim), np.float16) for _ in range(2)]
        pointers = [native.pointer(part) for part in tail]
        at = native.pointer(np.zeros(max(1, rows), np.int32))
        self.call.kvq_cache_tail(cache.handle, self.number(1), self.number(1), rows, *pointers, at)

    def missing(self, cache: Opened) -> None:
        short, columns = ctypes.c_int64(), ctypes.c_int32()
        pointers = ctypes.byref(short), ctypes.byref(columns)
        self.call.kvq_cache_missing(cache.handle, self.number(200), *pointers)

    def save(self, cache: Opened) -> None:
        count = self.call.kvq_cache_state_bytes(cache.handle)
        if count < 0:
            return
        count += self.choice((0, 0, 0, 1))
        out = np.zeros(max(1, count), np.uint8)
        if self.call.kvq_cache_save(cache.handle, native.pointer(out), count) == 0:
            cache.states = [*cache.states[-3:], out.tobytes()]

    def load(self, cache: Opened) -> None:
        states = [state for other in self.caches for state in other.states]
        if not states:
            return
        state = bytearray(self.choice(states))
        for _ in range(self.choice((0, 0, 1, 2, 9))):
            place = self.chance.randrange(min(len(state), self.choice((200, 600, 10**9))))
            state[place] = self.choice((0, 1, 127, 128, 255, self.chance.randrange(256)))
        if self.chance.random() < 0.1:
            del state[self.chance.randrange(len(state)) :]
        self.call.kvq_cache_load(cache.handle, bytes(state), len(state), self.stats)


def run(library: Library, seed: int, steps: int, shared: list[Opened], *, alone: bool) -> None:
    """So many steps of all three kinds of calls; `alone`: no other thread makes any."""
    caches, products = Caches(library, seed, shared), Products(library, seed, selects=alone)
    with closing(Hybrids(seed)) as hybrids, np.errstate(all="ignore"):
        for _ in range(steps):
            kind = caches.chance.random()
            turn = hybrids if kind < 0.02 else products if kind < 0.3 else caches
            turn.step()
    products.close_all()


def main(path: str, seed: int, steps: int, threads: int = 1) -> None:
    """Every thread takes so many steps, on caches that all of them share."""
    library, shared = open_library(path), list[Opened]()
    with ThreadPoolExecutor(threads) as pool:
        runs = [
            pool.submit(run, library, seed + i, steps, shared, alone=threads == 1)
            for i in range(threads)
        ]
    for finished in runs:
        finished.result()
    for cache in shared:
        library.kvq_cache_close(cache.handle)
    missed = declared() - {name for name, count in library.done.items() if count} - NEVER_SUCCEED
    assert threads > 1 or steps < ENOUGH_STEPS or not missed, f"never succeeded: {missed}"


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
