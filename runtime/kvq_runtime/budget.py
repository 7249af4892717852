"""How long a session may be and how many bytes it gets, from what the user asked for.

Knows shapes and plans, no session; what a budget means in bytes is `kvq.cache`'s.
"""

from dataclasses import dataclass

from kvq.cache import budget_bytes, minimum_budget
from kvq.config import Budget, CacheShape, KvPlan

# Without a budget there is room for this many tokens, or for the context if that is shorter.
DEFAULT_TOKENS = 8192
SHORTEST_CONTEXT_TOKENS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """What a session's length and bytes depend on, besides what the user asks for."""

    shape: CacheShape
    plan: KvPlan
    model_tokens: int
    chunk_tokens: int
    threads: int
    policy: str

    def session(self, context_tokens: int | None, budget: Budget) -> tuple[int, int]:
        """(context tokens, budget bytes); None and an empty `budget` ask for the defaults.

        The context is the model's, unless the cache is unquantised: it demotes and evicts
        nothing, so its budget decides how long the context can be.
        """
        if context_tokens is not None:
            return context_tokens, self._bytes(context_tokens, budget)
        if self.plan.quantized:
            return self.model_tokens, self._bytes(self.model_tokens, budget)
        if budget.num_bytes is None and budget.fraction is None:
            wanted = DEFAULT_TOKENS if budget.tokens is None else budget.tokens
            context_tokens = min(wanted, self.model_tokens)
            return context_tokens, self._bytes(context_tokens, budget)
        given = self._bytes(self.model_tokens, budget)
        return self._longest(given), given

    def _bytes(self, context_tokens: int, budget: Budget) -> int:
        """Bytes of `budget`; more tokens than the context holds ask for no more bytes."""
        if budget.num_bytes is None and budget.fraction is None:
            wanted = DEFAULT_TOKENS if budget.tokens is None else budget.tokens
            budget = Budget(tokens=min(wanted, context_tokens))
        return budget_bytes(
            budget,
            self.shape,
            self.plan,
            context_tokens,
            chunk_tokens=self.chunk_tokens,
            threads=self.threads,
            policy=self.policy,
        )

    def _longest(self, given: int) -> int:
        """The longest context of an unquantised cache that opens in `given` bytes."""
        fits, too_many = SHORTEST_CONTEXT_TOKENS, self.model_tokens + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if minimum_budget(self.shape, self.plan, middle, threads=self.threads) <= given:
                fits = middle
            else:
                too_many = middle
        return fits
