"""A llama.cpp sequence state of random keys and values, so that a depth costs no compute.

The layout, little-endian: two words of which nothing is known, streams (1), tokens; per token
its position, 1 and its sequence; whether V is transposed, layers; then per layer all of K's rows
after their type (int32) and row size (int64), and after all layers the same for V. The caller
must check that llama.cpp took it.
"""

from dataclasses import dataclass

import numpy as np

from kvq.errors import BackendError

# Rows are drawn once and repeated: their values change no timing.
DISTINCT_ROWS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """What a state looks like in this version, read from one of a single token."""

    prefix: bytes
    layers: int
    type_id: int
    row_bytes: int

    @classmethod
    def read(cls, state: bytes) -> "StateLayout":
        """From the state of one token at position 0. Raises `BackendError` for another layout."""
        words = np.frombuffer(state[:48], np.int32)
        head, layers = words[2:9].tolist(), int(words[8])
        row_bytes = int(np.frombuffer(state[40:48], np.int64)[0])
        if head[:6] != [1, 1, 0, 1, 0, 0] or len(state) != 36 + 2 * layers * (12 + row_bytes):
            raise BackendError(
                "this version of llama.cpp stores a sequence in a layout that is not known here; "
                "install llama-cpp-python 0.3.36, or leave out --peer llama.cpp"
            )
        return cls(prefix=state[:12], layers=layers, type_id=int(words[9]), row_bytes=row_bytes)

    def random_state(self, tokens: int, kind: str) -> np.ndarray:
        """The state of `tokens` tokens at positions 0, 1, ...; uint8."""
        cells = np.zeros((tokens, 3), np.int32)
        cells[:, 0] = np.arange(tokens)
        cells[:, 1] = 1
        row_head = np.int32(self.type_id).tobytes() + np.int64(self.row_bytes).tobytes()
        rows = np.resize(self._random_rows(kind), (tokens, self.row_bytes))
        one = np.concatenate([np.frombuffer(row_head, np.uint8), rows.reshape(-1)])
        head = self.prefix + np.int32(tokens).tobytes() + cells.tobytes()
        head += np.array([0, self.layers], np.int32).tobytes()
        return np.concatenate([np.frombuffer(head, np.uint8), np.tile(one, 2 * self.layers)])

    def _random_rows(self, kind: str) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.constants import GGML_QUANT_SIZES
        from gguf.quants import quantize

        quant = GGMLQuantizationType[kind.upper()]
        block, block_bytes = GGML_QUANT_SIZES[quant]
        shape = (DISTINCT_ROWS, self.row_bytes // block_bytes * block)
        rows = np.random.default_rng(0).standard_normal(shape, np.float32)
        return quantize(rows, quant).view(np.uint8)
