"""Random calls of the C ABI in random order, with arguments that make sense and that do not.

    python tests/support/abi_fuzz.py LIBRARY SEED STEPS

Ends without a word, or with a crash or a sanitizer's report. Every buffer is as large as `kvq.h`
asks for, so whatever the library reads or writes beyond is its own fault.
"""

import ctypes
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from kvq import abi, native
from kvq.formats import PAGE_VERSION, constant_bytes, grid_bytes
from pairs import some_feedback

MOST_TOKENS, DIMS, PAIRS = 160, (16, 32, 80), (8, 6, 4, 2)
NUMBERS = (0, 1, -1, 2, 3, 8, 9, 40, 63, 64, 65, 128, 160, 2**31 - 1, -(2**31))
WILD = (np.nan, np.inf, -1e30, 70000.0)


def load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    for name, (result, arguments) in abi.SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    assert library.kvq_abi() == native.ABI
    return library


class Opened:
    """A cache the fuzzer opened, and what it needs to know to give it buffers."""

    def __init__(self, handle: int, config: Any) -> None:
        self.handle, self.config = handle, config
        self.position = self.layer = self.rows = 0
        self.gap = -1  # where the last edit left one
        self.states: list[bytes] = []
        self.feedback: Any = None


class Fuzz:
    """One run of random calls."""

    def __init__(self, library: ctypes.CDLL, seed: int) -> None:
        self.call: Any = library
        self.chance = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.caches: list[Opened] = []
        self.stats = abi.Stats()
        self.wild = 0.15
        self.calls: list[Callable[[Opened], object]] = [
            *[self.forward] * 16, *[self.attend] * 3, self.begin, self.begin, self.commit,
            self.commit, self.rewind, self.trim, self.mark, self.demote, self.entering, self.move,
            self.look, *[self.edit] * 4,
            self.save, self.load, self.missing, self.feed_back, self.close,
        ]  # fmt: skip

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if not self.caches or (len(self.caches) < 3 and self.chance.random() < 0.01):
                self.open()
                continue
            self.chance.choice(self.calls)(self.chance.choice(self.caches))
            self.pack()
        for cache in self.caches:
            self.call.kvq_cache_close(cache.handle)

    def number(self, usual: int) -> int:
        """Mostly 0 to `usual`, now and then anything."""
        if self.chance.random() < self.wild:
            return self.chance.choice(NUMBERS)
        return self.chance.randint(0, max(0, usual))

    def open(self) -> None:
        heads = self.chance.choice((1, 2))
        k_bits, v_bits = self.chance.choice([(16, 16)] + [(k, v) for k in PAIRS for v in PAIRS] * 2)
        sinks, tail, draft = (self.chance.choice(n) for n in ((0, 4, 64), (0, 17, 64), (1, 8, 128)))
        context = self.chance.choice((50, 300, 2000))
        rows = sinks + tail + 64 + draft if k_bits < 16 else max(context, draft)
        chunk = max(draft, self.chance.choice((8, 64, MOST_TOKENS)))
        dim = self.chance.choice(DIMS)
        values = [2, heads * self.chance.choice((1, 3)), heads, dim, k_bits,
                  v_bits, sinks, tail, rows, chunk, context, self.chance.choice((1, 4)),
                  int(self.chance.random() < 0.5 and k_bits < 16), draft,
                  self.chance.choice((64, max(64, dim))), PAGE_VERSION]  # fmt: skip
        if self.chance.random() < 0.1:
            values[self.chance.randrange(len(values))] = self.chance.choice(NUMBERS)
        config, layout, handle = abi.Config(*values), abi.Layout(), ctypes.c_int64()
        columns = -(-max(0, context - sinks - tail) // 64) if k_bits < 16 else 0
        columns = min(columns, 2) if self.chance.random() < 0.5 else self.number(columns)
        self.call.kvq_layout_of(ctypes.byref(config), 1 << 40, columns, ctypes.byref(layout))
        budget = layout.minimum_bytes + self.chance.choice((0, 5000, 100_000, 1 << 20, 1 << 20, -1))
        if budget > 64 << 20:
            return
        most = 255 if self.chance.random() < 0.1 else 3
        # As many as the configuration says, which may be any number now.
        streams = max(0, min(values[0] * values[2], 1 << 16))
        forms = np.array([self.chance.randint(0, most) for _ in range(streams)], np.uint8)
        given = native.pointer(forms) if self.chance.random() < 0.9 else None
        device = 1 if self.chance.random() < 0.1 else 0  # of which there are none
        resident = self.number(4) if self.chance.random() < 0.1 else 0
        asked = ctypes.byref(config), budget, columns, given, device, resident
        # A file as long as it is said to be, or shorter, or none.
        file_bytes = self.number(1 << 20) if self.chance.random() < 0.2 else 0
        with tempfile.TemporaryFile() as stream:
            stream.truncate(max(0, min(file_bytes, self.chance.choice((4096, 1 << 20)))))
            file = stream.fileno() if self.chance.random() < 0.9 else -1
            if not self.call.kvq_cache_open(*asked, file, file_bytes, ctypes.byref(handle)):
                assert device == resident == 0
                self.caches.append(Opened(handle.value, config))

    def close(self, cache: Opened) -> None:
        if self.chance.random() < 0.3:
            self.call.kvq_cache_close(cache.handle)
            self.call.kvq_cache_close(cache.handle)
            if self.chance.random() < 0.9:  # otherwise a handle of nothing stays in use
                self.caches.remove(cache)

    def feed_back(self, cache: Opened) -> None:
        """Numbers, now and then none at all; whoever gives them keeps them."""
        shape = (cache.config.layers, cache.config.kv_heads, cache.config.head_dim)
        given = some_feedback(self.numbers, *shape) if self.chance.random() < 0.8 else None
        pointed = None if given is None else native.pointer(given)
        if not self.call.kvq_cache_feed_back(cache.handle, pointed):
            cache.feedback = given

    def begin(self, cache: Opened) -> None:
        tokens = self.number(self.chance.choice((1, 8, cache.config.chunk_tokens)) - 1)
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
            cache.rows, cache.layer = tokens, 0

    def attend(self, cache: Opened) -> None:
        c = cache.config
        tokens = cache.rows if self.chance.random() > self.wild else self.number(MOST_TOKENS)
        count = min(max(tokens, 1), 4096)
        layer = cache.layer if self.chance.random() > self.wild else self.number(2)
        shape = [c.heads, c.kv_heads, c.head_dim]
        if self.chance.random() < self.wild / 2:
            shape[self.chance.randrange(3)] = self.number(64)
        pairs = (
            self.chance.choice((0, 4, 8)) if self.chance.random() > self.wild else self.number(200)
        )
        window, softcap = self.chance.choice((0, 1, 100, -5, 2**31 - 1)), self.chance.choice((0, 5))
        facts = abi.Attention(layer, *shape, 0.2, softcap, 1.0, 1e-6, window, pairs)
        width = max(1, (c.heads + 2 * c.kv_heads) * c.head_dim)
        qkv = self.numbers.standard_normal((count, width)).astype(np.float32)
        if self.chance.random() < self.wild / 4:
            qkv[self.chance.randrange(count), self.chance.randrange(width)] = self.chance.choice(
                WILD
            )
        at = cache.position + np.arange(count, dtype=np.int64)
        if self.chance.random() < self.wild / 2:
            at[self.chance.randrange(count)] = self.chance.choice((*NUMBERS, 2**62, -(2**63)))
        out = np.empty((count, max(1, c.heads * c.head_dim)), np.float32)
        freq, norm = np.ones(256, np.float32), np.ones(256, np.float32)
        norms = [native.pointer(norm) if self.chance.random() < 0.3 else None for _ in range(3)]
        status = self.call.kvq_cache_attend(
            cache.handle, ctypes.byref(facts), tokens, native.pointer(qkv),
            native.pointer(at), native.pointer(freq), *norms, native.pointer(out),
        )  # fmt: skip
        cache.layer += status == 0

    def forward(self, cache: Opened) -> None:
        """What a well-behaved caller does, most of the time to its end."""
        self.wild = 0.005
        self.begin(cache)
        for _ in range(2):
            self.attend(cache)
        self.wild = 0.15
        if self.chance.random() < 0.8:
            status = self.call.kvq_cache_commit(cache.handle, None, cache.rows, None)
            cache.position += cache.rows if status == 0 else 0
        if self.chance.random() < 0.7:
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
        stop = start + self.number(9) if self.chance.random() > self.wild else self.number(300)
        stop = min(stop, 2**31 - 1)
        count = self.number(9)
        status = self.call.kvq_cache_edit(cache.handle, start, stop, count, self.stats)
        if status == 0:
            cache.gap, cache.position = start if count else -1, self.stats.tokens

    def demote(self, cache: Opened) -> None:
        self.call.kvq_cache_stats(cache.handle, self.stats)
        count = self.chance.randint(0, 12)
        actions = np.array(
            [
                (self.number(1), self.number(1), self.number(self.stats.columns - 1),
                 *self.chance.choice([(0, 0), (2, 2), (4, 2), (8, 6), (6, 4), (0, 2), (5, 5)]))
                for _ in range(count)
            ],
            np.int32,
        ).reshape(-1, 5)  # fmt: skip
        self.call.kvq_cache_demote(cache.handle, native.pointer(actions), count, None)

    def entering(self, cache: Opened) -> None:
        widths = np.zeros(max(1, 2 * cache.config.layers * cache.config.kv_heads), np.uint8)
        self.call.kvq_cache_entering(cache.handle, native.pointer(widths))
        widths[self.chance.randrange(len(widths))] = self.chance.choice((0, 2, 4, 8, 255))
        self.call.kvq_cache_demote_entering(cache.handle, native.pointer(widths))

    def move(self, cache: Opened) -> None:
        self.call.kvq_cache_shift_sinks(cache.handle, self.chance.choice(NUMBERS))
        self.call.kvq_cache_shift(cache.handle, self.number(8), self.chance.choice(NUMBERS))
        self.call.kvq_cache_mask(cache.handle, self.number(8), self.numbers.integers(2**63))

    def look(self, cache: Opened) -> None:
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
        count += self.chance.choice((0, 0, 0, 1))
        out = np.zeros(max(1, count), np.uint8)
        if self.call.kvq_cache_save(cache.handle, native.pointer(out), count) == 0:
            cache.states = [*cache.states[-3:], out.tobytes()]

    def load(self, cache: Opened) -> None:
        states = [state for other in self.caches for state in other.states]
        if not states:
            return
        state = bytearray(self.chance.choice(states))
        for _ in range(self.chance.choice((0, 0, 1, 2, 9))):
            place = self.chance.randrange(min(len(state), self.chance.choice((200, 600, 10**9))))
            state[place] = self.chance.choice((0, 1, 127, 128, 255, self.chance.randrange(256)))
        if self.chance.random() < 0.1:
            del state[self.chance.randrange(len(state)) :]
        self.call.kvq_cache_load(cache.handle, bytes(state), len(state), self.stats)

    def pack(self) -> None:
        dim = self.chance.choice((*DIMS, 256, 7))
        x = self.numbers.standard_normal((64, dim)).astype(np.float32)
        planes, grid = np.zeros(64 * dim, np.uint8), np.zeros(grid_bytes(max(64, dim)), np.uint8)
        self.call.kvq_pack(
            self.chance.randint(0, 1), self.chance.randint(0, 1), native.pointer(x), dim,
            self.number(8), None,
            native.pointer(planes), native.pointer(grid),
        )  # fmt: skip


if __name__ == "__main__":
    path, seed, steps = sys.argv[1:]
    Fuzz(load(path), int(seed)).run(int(steps))
