"""A backend made of a rule instead of a model, for tests of what stands on a backend.

As a mock transport stands in for a network, `RuleBackend` stands in for weights: the next token
is a function of the tokens so far. It keeps every promise of `Backend` and `SequenceCache`, trees
included, in plain lists. It reads no files, so it is not in the table of backends.
"""

import json
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvq.class_cache import CacheUsage
from kvq.config import KvPlan
from kvq.errors import BudgetError
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends import Mode, ModelFacts, SequencePass
from kvq_runtime.config import SessionConfig, SessionRequest

# The logit of the rule's token; all others are 0.
RULE_LOGIT = 8.0


class RuleCache:
    """Token ids in place of keys and values; `calls` tells what was done with it."""

    def __init__(self, config: SessionConfig, *, chunk_tokens: int, capacity_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.capacity_tokens = capacity_tokens
        self.budget_bytes = config.budget_bytes
        self.bytes_per_token = 8.0
        self.ids: list[int] = []  # -1 in a gap
        self.calls: list[str] = []
        self._draft_tokens = config.draft_tokens
        self._rows: list[tuple[int, int]] = []  # (token, parent) of the branch
        self._begun: list[int] = []
        self._at: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are kept."""
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        """Rows of the branch."""
        return len(self._rows)

    @property
    def used_bytes(self) -> int:
        """Eight for each token."""
        return 8 * len(self.ids)

    @property
    def peak_bytes(self) -> int:
        """Of now: rules forget."""
        return self.used_bytes

    @property
    def draft_room(self) -> int:
        """Rows of a branch: a rule sees no pages."""
        return self._draft_tokens

    @property
    def tree_room(self) -> int:
        """The same."""
        return self._draft_tokens

    def usage(self) -> CacheUsage:
        """Made up, so that a report of them can be told from nothing."""
        return CacheUsage(mean_k_bits=5.5, mean_v_bits=4.25, evicted_share=0.125)

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        kv_only_layers: Sequence[int] = (),
    ) -> None:
        """See `SequenceCache`. Raises `BudgetError` beyond `capacity_tokens`."""
        first = len(self._rows)
        if at is not None:
            assert self.ids[at : at + first + tokens] == [-1] * (first + tokens)
        self._at = at
        if at is None and self.tokens + first + tokens > self.capacity_tokens:
            raise BudgetError(f"{tokens} more tokens do not fit; {self.capacity_tokens} do")
        assert tokens <= self.chunk_tokens
        chain = list(range(first - 1, first + tokens - 1))
        self._begun = chain if parents is None else list(parents)
        piece = first == 0 and self._begun == chain
        assert piece or first + tokens <= self._draft_tokens
        assert len(self._begun) == tokens
        assert all(-1 <= parent < first + i for i, parent in enumerate(self._begun))
        self.calls.append(f"begin {tokens}" + " hi" * (view == "hi"))

    def extend(self, ids: Sequence[int]) -> None:
        """The pass that was begun brings `ids`."""
        self._rows += zip(ids, self._begun, strict=True)

    def text(self, row: int) -> list[int]:
        """The tokens that row `row` of the branch sees, itself included."""
        path: list[int] = []
        while row >= 0:
            token, row = self._rows[row]
            path.append(token)
        return self.ids[: self._at] + path[::-1]

    def places(self) -> list[int]:
        """The place in its text of each row of the branch."""
        start = len(self.ids) if self._at is None else self._at
        places: list[int] = []
        for _, parent in self._rows:
            places.append(start if parent < 0 else places[parent] + 1)
        return places

    def commit(self, path: Sequence[int]) -> None:
        """See `SequenceCache`."""
        parents = [-1, *path][: len(path)]
        assert [self._rows[row][1] for row in path] == parents
        at = len(self.ids) if self._at is None else self._at
        self.ids[at : at + len(path)] = [self._rows[row][0] for row in path]
        self._rows = []
        self.calls.append(f"commit {len(path)}")

    def rewind(self, rows: int) -> None:
        """See `SequenceCache`."""
        del self._rows[rows:]
        self.calls.append(f"rewind {rows}")

    def trim(self, tokens: int) -> None:
        """See `SequenceCache`."""
        assert tokens <= len(self.ids)
        assert not self._rows
        del self.ids[tokens:]

    @property
    def keeps_places(self) -> bool:
        """See `SequenceCache`: a rule goes back anywhere."""
        return False

    def mark(self, tokens: int) -> None:
        """See `SequenceCache`."""

    def why_not_edit(self) -> str | None:
        """Nothing keeps a rule from it."""
        return None

    def edit(self, start: int, stop: int, count: int) -> None:
        """See `SequenceCache`."""
        assert 0 <= start <= stop <= len(self.ids)
        self.ids[start:stop] = [-1] * count

    def crowded(self, tokens: int) -> list[tuple[int, int]]:
        """What is gone takes no room."""
        return []

    def state(self) -> bytes:
        """The ids as JSON."""
        return json.dumps(self.ids).encode()

    def load_state(self, state: bytes) -> None:
        """Those of `state`."""
        self.ids = json.loads(state)

    def close(self) -> None:
        """Says so."""
        self.calls.append("close")


class RuleBackend:
    """After the tokens t comes the token `rule(t)`, or one chosen by the logits [V] it gives.

    `rule_of` holds other rules for passes of a mode. `passes` are the passes made, each a list of
    the ids of its sequences, and `caches` the caches opened. `on_pass` is called before each pass:
    it may wait or raise.
    """

    name = cache_kind = "rule"
    weight_bytes_per_step = 100
    takes_trees = takes_drafts = True
    rows_agree = True
    paged = None

    def __init__(
        self,
        rule: Callable[[Sequence[int]], int | NDArray[np.float32]],
        *,
        vocab_size: int,
        stop_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        chunk_tokens: int = 256,
        capacity_tokens: int = 1 << 20,
    ) -> None:
        self.model = ModelFacts(
            name="rule",
            context_length=1 << 20,
            vocab_size=vocab_size,
            num_layers=1,
            stop_ids=frozenset(stop_ids),
            fingerprint="rule",
            kv=KvPlan(),
        )
        self.rule = rule
        self.rule_of: dict[Mode, Callable[[Sequence[int]], int | NDArray[np.float32]]] = {}
        self.on_pass: Callable[[Sequence[SequencePass[RuleCache]]], None] = lambda _: None
        self.passes: list[list[list[int]]] = []
        self.caches: list[RuleCache] = []
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._capacity_tokens = capacity_tokens

    def tokenizer(self) -> Tokenizer | None:
        """See `Backend.tokenizer`."""
        return self._tokenizer

    def session_config(self, request: SessionRequest) -> SessionConfig:
        """See `Backend.session_config`; a budget in bytes, or 1 MiB."""
        return SessionConfig(
            plan=request.plan(self.model.kv),
            context_tokens=request.context_tokens or 1000,
            budget_bytes=request.kv_budget.num_bytes or 1 << 20,
            chunk_tokens=request.chunk_tokens,
            draft_tokens=request.draft_tokens,
            seed=request.seed,
        )

    def open_cache(self, config: SessionConfig) -> RuleCache:
        """See `Backend.open_cache`."""
        cache = RuleCache(
            config, chunk_tokens=self._chunk_tokens, capacity_tokens=self._capacity_tokens
        )
        self.caches.append(cache)
        return cache

    def check_mode(self, mode: Mode) -> None:
        """See `Backend.check_mode`; every mode is possible."""

    def forward(
        self, rows: Sequence[SequencePass[RuleCache]], *, rope_long: bool = False
    ) -> list[NDArray[np.float32]]:
        """See `Backend.forward`."""
        self.on_pass(rows)
        self.passes.append([part.ids[:, 0].tolist() for part in rows])
        return [self._logits(part) for part in rows]

    def _logits(self, rows: SequencePass[RuleCache]) -> NDArray[np.float32]:
        cache, ids = rows.cache, rows.ids[:, 0].tolist()
        np.testing.assert_array_equal(rows.weights, np.ones((len(ids), 1)))
        cache.extend(ids)
        first = cache.num_rows - len(ids)
        logits = np.zeros((len(rows.logit_rows), self.model.vocab_size), np.float32)
        assert rows.positions.tolist() == cache.places()[first:]
        for row, logit in zip(map(int, rows.logit_rows), logits, strict=True):
            answer = self.rule_of.get(rows.mode, self.rule)(cache.text(first + row))
            if isinstance(answer, int):
                logit[answer] = RULE_LOGIT
            else:
                logit[:] = answer
        return logits

    def resident(self) -> None:
        """Nothing is bounded."""

    def close(self) -> None:
        """Nothing to free."""
