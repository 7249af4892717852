"""A llama.cpp sequence state of random keys and values, so that a depth costs no compute.

The layout, little-endian: two words of which nothing is known, streams (1), tokens; per token
its position, 1 and its sequence; whether V is transposed, layers; then per layer all of K's rows
after their type (int32) and row size (int64), and after all layers the same for V. llama.cpp
checks it when it is loaded.
"""

from dataclasses import dataclass

import numpy as np

from kvq.errors import BackendError

# Rows are drawn once and repeated: their values change no timing.
DISTINCT_ROWS = 256


# Bytes before the first layer's rows in the state of one token, and before the rows of a layer.
_HEAD_BYTES, _ROWS_HEAD_BYTES = 36, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKind:
    """ggml's number of a type, and the bytes of a layer's keys or values of one token."""

    type_id: int
    row_bytes: int

    @classmethod
    def read(cls, state: bytes, offset: int) -> "RowKind":
        """From the head of a layer's rows."""
        type_id = int(np.frombuffer(state, np.int32, 1, offset)[0])
        return cls(type_id=type_id, row_bytes=int(np.frombuffer(state, np.int64, 1, offset + 4)[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """What a state looks like in this version, read from one of a single token."""

    prefix: bytes
    layers: int
    keys: RowKind
    values: RowKind

    @classmethod
    def read(cls, state: bytes) -> "StateLayout":
        """From the state of one token at position 0. Raises `BackendError` for another layout."""
        words = np.frombuffer(state[:_HEAD_BYTES], np.int32)
        layers = int(words[8]) if len(words) == 9 else 0
        if words[2:8].tolist() != [1, 1, 0, 1, 0, 0] or layers < 1:
            raise BackendError(_UNKNOWN)
        keys = RowKind.read(state, _HEAD_BYTES)
        second_half = _HEAD_BYTES + layers * (_ROWS_HEAD_BYTES + keys.row_bytes)
        if not 0 < second_half <= len(state) - _ROWS_HEAD_BYTES:
            raise BackendError(_UNKNOWN)
        values = RowKind.read(state, second_half)
        if len(state) != second_half + layers * (_ROWS_HEAD_BYTES + values.row_bytes):
            raise BackendError(_UNKNOWN)
        return cls(prefix=state[:12], layers=layers, keys=keys, values=values)

    def random_state(self, tokens: int, kinds: tuple[str, str]) -> np.ndarray:
        """The state of `tokens` tokens at positions 0, 1, ...; uint8. `kinds`: names of K and V."""
        cells = np.zeros((tokens, 3), np.int32)
        cells[:, 0] = np.arange(tokens)
        cells[:, 1] = 1
        head = self.prefix + np.int32(tokens).tobytes() + cells.tobytes()
        head += np.array([0, self.layers], np.int32).tobytes()
        parts = [np.frombuffer(head, np.uint8)]
        for kind, rows in zip(kinds, (self.keys, self.values), strict=True):
            one = np.int32(rows.type_id).tobytes() + np.int64(rows.row_bytes).tobytes()
            layer = np.resize(_random_rows(kind, rows.row_bytes), (tokens, rows.row_bytes))
            whole = np.concatenate([np.frombuffer(one, np.uint8), layer.reshape(-1)])
            parts.append(np.tile(whole, self.layers))
        return np.concatenate(parts)


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
