"""A llama.cpp sequence state of random keys and values, so that a depth costs no compute.

The layout, little-endian: two words of which nothing is known, then a part for each kind of cache:
that of layers that see everything, that of layers with a window, that of states. A part of keys and
values is streams (1), tokens; per token its position, 1, for rotations in several dimensions the
position three times more, and its sequence; whether V is transposed, layers; then per layer all of
K's rows after their type (int32) and row size (int64), and after all layers the same for V. A part
of states is one cell and its position, and stays as it was: what a step does with states takes the
same time whatever they are. llama.cpp checks all of it when it is loaded.
"""

from dataclasses import dataclass

import numpy as np

from kvq.errors import BackendError

# Rows are drawn once and repeated: their values change no timing.
DISTINCT_ROWS = 256


# Before the first part, and before the rows of a layer.
_PREFIX_BYTES, _ROWS_HEAD_BYTES = 8, 12
# Words of one token's cell, without and with the position three times more.
_CELL_WORDS = (3, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKind:
    """ggml's number of a type, and the bytes of a layer's keys or values of one token."""

    type_id: int
    row_bytes: int

    @classmethod
    def read(cls, state: bytes, offset: int) -> "RowKind":
        """From the head of a layer's rows. Raises `BackendError` where there is none."""
        if offset + _ROWS_HEAD_BYTES > len(state):
            raise BackendError(_UNKNOWN)
        type_id = int(np.frombuffer(state, np.int32, 1, offset)[0])
        row_bytes = int(np.frombuffer(state, np.int64, 1, offset + 4)[0])
        if row_bytes <= 0:
            raise BackendError(_UNKNOWN)
        return cls(type_id=type_id, row_bytes=row_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysAndValues:
    """A part of as many layers' rows, all of one size; a token's cell has `cell_words`."""

    cell_words: int
    layers: int
    keys: RowKind
    values: RowKind

    @property
    def num_bytes(self) -> int:
        """Of the state of one token."""
        rows = 2 * _ROWS_HEAD_BYTES + self.keys.row_bytes + self.values.row_bytes
        return _head_bytes(self.cell_words) + self.layers * rows

    @classmethod
    def read(cls, state: bytes, offset: int) -> "KeysAndValues | None":
        """The part that begins there; None where none does."""
        for cell_words in _CELL_WORDS:
            head = _head_bytes(cell_words)
            words = _words(state[offset : offset + head])
            cell = [0, 1, *[0] * (cell_words - 2)]
            if words[:-1] == [1, 1, *cell, 0] and 0 < words[-1] <= len(state):
                layers, keys = words[-1], RowKind.read(state, offset + head)
                half = layers * (_ROWS_HEAD_BYTES + keys.row_bytes)
                values = RowKind.read(state, offset + head + half)
                return cls(cell_words=cell_words, layers=layers, keys=keys, values=values)
        return None

    def random(self, tokens: range, kinds: tuple[str, str]) -> list[np.ndarray]:
        """The part with random rows at the positions `tokens`; uint8."""
        cells = np.zeros((len(tokens), self.cell_words), np.int32)
        cells[:, :-1] = np.array(tokens)[:, None]
        cells[:, 1] = 1
        head = [np.array([1, len(tokens)], np.int32), cells, np.array([0, self.layers], np.int32)]
        parts = [np.frombuffer(words.tobytes(), np.uint8) for words in head]
        for kind, rows in zip(kinds, (self.keys, self.values), strict=True):
            one = np.int32(rows.type_id).tobytes() + np.int64(rows.row_bytes).tobytes()
            layer = np.resize(_random_rows(kind, rows.row_bytes), (len(tokens), rows.row_bytes))
            whole = np.concatenate([np.frombuffer(one, np.uint8), layer.reshape(-1)])
            parts.append(np.tile(whole, self.layers))
        return parts


def _words(state: bytes) -> list[int]:
    """Its whole words; what was cut has fewer than asked for."""
    return np.frombuffer(state[: len(state) // 4 * 4], np.int32).tolist()


def _head_bytes(cell_words: int) -> int:
    """Before the first layer's rows, in the state of one token."""
    return 4 * (2 + cell_words + 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """What a state looks like in this version, read from one of a single token."""

    prefix: bytes
    parts: tuple[KeysAndValues, ...]
    states: bytes

    @classmethod
    def read(cls, state: bytes) -> "StateLayout":
        """From the state of one token at position 0. Raises `BackendError` for another layout."""
        parts, at = list[KeysAndValues](), _PREFIX_BYTES
        while part := KeysAndValues.read(state, at):
            parts.append(part)
            at += part.num_bytes
        states = state[at:]
        one_cell = _words(states[:12]) == [1, 0, 0]
        if not parts or len(parts) > 2 or at > len(state) or (states and not one_cell):
            raise BackendError(_UNKNOWN)
        return cls(prefix=state[:_PREFIX_BYTES], parts=tuple(parts), states=states)

    def random_state(self, tokens: int, kinds: tuple[str, str], window: int = 0) -> np.ndarray:
        """The state of `tokens` tokens at positions 0, 1, ...; uint8. `kinds`: names of K and V.

        Layers of a second part keep the `window` newest.
        """
        found = [np.frombuffer(self.prefix, np.uint8)]
        for index, part in enumerate(self.parts):
            first = max(0, tokens - window) if index else 0
            found += part.random(range(first, tokens), kinds)
        if self.states:
            states = np.frombuffer(self.states, np.uint8).copy()
            states[4:8] = np.frombuffer(np.int32(tokens - 1).tobytes(), np.uint8)
            found.append(states)
        return np.concatenate(found)


_UNKNOWN = (
    "this version of llama.cpp stores a sequence in a layout that is not known here; install "
    "llama-cpp-python 0.3.36, or leave out --peer llama.cpp"
)


def _random_rows(kind: str, row_bytes: int) -> np.ndarray:
    """uint8 [DISTINCT_ROWS, row_bytes] of random values in a type of the cache."""
    from gguf import GGMLQuantizationType
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import quantize

    quant = GGMLQuantizationType[kind.upper()]
    block, block_bytes = GGML_QUANT_SIZES[quant]
    shape = (DISTINCT_ROWS, row_bytes // block_bytes * block)
    rows = np.random.default_rng(0).standard_normal(shape, np.float32)
    return quantize(rows, quant).view(np.uint8)
