"""The plainest cache a session can have, for tests of what stands above it."""

import json

from kvq.cache import Holdings


class ListCache:
    """A cache that remembers token ids only."""

    chunk_tokens = 10_000
    budget_bytes = 1 << 20
    bytes_per_token = 8.0

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.reserved = 0
        self.closed = False

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def used_bytes(self) -> int:
        return 8 * len(self.ids)

    peak_bytes = used_bytes

    def holdings(self) -> Holdings:
        return Holdings(mean_k_bits=5.5, mean_v_bits=4.25, evicted_share=0.125)

    def begin(self, count: int) -> None:
        self.reserved = count

    def commit(self, count: int) -> None:
        assert count == self.reserved

    def rewind(self, rows: int = 0) -> None:
        del self.ids[len(self.ids) - self.reserved :]

    def trim(self, num_tokens: int) -> None:
        del self.ids[num_tokens:]

    def state(self) -> bytes:
        return json.dumps(self.ids).encode()

    def load_state(self, state: bytes) -> None:
        self.ids = json.loads(state)

    def close(self) -> None:
        self.closed = True
