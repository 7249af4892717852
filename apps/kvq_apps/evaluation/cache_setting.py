"""A cache to judge: its widths, policy and budget, and how sessions on it are opened."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvq.config import FLOAT_WIDTH
from kvq_apps.evaluation.text import SCORE_CHUNK_TOKENS
from kvq_apps.terminal import output
from kvq_runtime.session.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSetting:
    """Holds the widths that pages are closed at, and the policy (None: the engine's default)."""

    k_bits: int
    v_bits: int
    policy: str | None = None

    @property
    def kv(self) -> str:
        """Returns the widths as `--kv` writes them."""
        return output.kv_text(self.k_bits, self.v_bits)

    def opener(
        self,
        open_session: Callable[..., Session[Any]],
        context_tokens: int,
        budget_bytes: int | None = None,
    ) -> Callable[[], Session[Any]]:
        """Returns a function that opens sessions (`Engine.session`) for a context.

        `budget_bytes` None: what the whole context needs.
        """
        options: dict[str, Any] = {} if self.policy is None else {"policy": self.policy}
        return partial(
            open_session,
            k_bits=self.k_bits,
            v_bits=self.v_bits,
            context_tokens=context_tokens,
            kv_budget=f"{context_tokens}tok" if budget_bytes is None else budget_bytes,
            chunk_tokens=SCORE_CHUNK_TOKENS,
            **options,
        )


UNQUANTIZED = CacheSetting(k_bits=FLOAT_WIDTH, v_bits=FLOAT_WIDTH)
