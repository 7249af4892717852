"""Counts the bytes of llama.cpp's cache of a model, and the context that a budget buys.

All of it comes from the file. A layer with a window counts as if it kept every token, although
llama.cpp may keep fewer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvq.config import KvPlan
from kvq.errors import BudgetError, argument
from kvq.formats import format_bytes, sized
from kvq.sizing import DEFAULT_TOKENS, SHORTEST_CONTEXT_TOKENS
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.bundle.gguf_format import TENSOR_TYPES
from kvq_runtime.config import SessionRequest

# llama.cpp makes room for a multiple of this many tokens.
CELLS = 256
# llama.cpp's number of the type of keys or values, by their bits.
TYPE_NUMBERS: Mapping[int, int] = {16: 1, 8: 8, 4: 2}
CACHE_TYPES = {bits: TENSOR_TYPES[number] for bits, number in TYPE_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Holds the channels of keys and of values of a token in all layers, and bytes of states."""

    k_width: int
    v_width: int
    state_bytes: int

    @classmethod
    def of(cls, file: GgufFile) -> "CacheLayout":
        """Returns the layout of a file's model."""
        k_width, v_width = (sum(widths) for widths in zip(*file.kv_widths, strict=True))
        return cls(k_width, v_width, file.state_bytes)

    def bytes_per_token(self, plan: KvPlan) -> int:
        """Returns the bytes of one token, all layers."""
        sides = ((plan.k_bits, self.k_width), (plan.v_bits, self.v_width))
        return sum(CACHE_TYPES[bits].num_bytes((width,)) for bits, width in sides)

    def num_bytes(self, plan: KvPlan, tokens: int) -> int:
        """Returns the bytes of `tokens` tokens and of the states."""
        return self.state_bytes + tokens * self.bytes_per_token(plan)

    def session(self, request: SessionRequest, plan: KvPlan, most: int) -> tuple[int, int]:
        """Returns (context tokens, budget bytes) of what was asked of a model made for `most`.

        Each decides the other, as nothing is evicted. Raises `BudgetError` for a budget that cannot
        hold the context or the smallest cache.
        """
        budget, context_tokens = request.kv_budget, request.context_tokens
        budget_bytes, token_bytes = budget.num_bytes, self.bytes_per_token(plan)
        if budget.fraction is not None:
            exact = self.bytes_per_token(KvPlan(k_bits=16, v_bits=16))
            budget_bytes = int(budget.fraction * exact * most)
        if budget.tokens is not None:
            tokens = max(budget.tokens, SHORTEST_CONTEXT_TOKENS)
            if context_tokens is None:
                context_tokens = tokens = min(tokens, most)
            budget_bytes = self.num_bytes(plan, padded(tokens))
        elif context_tokens is None:
            context_tokens = DEFAULT_TOKENS
            if budget_bytes is not None:
                cells = (budget_bytes - self.state_bytes) // (CELLS * token_bytes)
                context_tokens = CELLS * max(cells, 1)
            context_tokens = min(context_tokens, most)
        needed = self.num_bytes(plan, padded(context_tokens))
        if budget_bytes is not None and needed > budget_bytes:
            raise BudgetError(
                f"a context of {context_tokens} tokens takes {sized(needed)} on the llama.cpp "
                f"backend, which evicts nothing, and {argument('kv_budget')} is "
                f"{format_bytes(budget_bytes)}; raise it or lower {argument('context_tokens')}"
            )
        return context_tokens, needed if budget_bytes is None else budget_bytes


def padded(tokens: int) -> int:
    """Returns the cells of a context of `tokens` tokens."""
    return -(-tokens // CELLS) * CELLS
