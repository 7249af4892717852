"""Self-speculation with the first layers only."""

from dataclasses import dataclass
from typing import Any

from kvq.errors import UsageError
from kvq_runtime.backends import Backend, Mode
from kvq_runtime.config import SessionConfig
from kvq_specdraft.guessing import SelfGuessing


@dataclass(kw_only=True, eq=False)
class Early(SelfGuessing):
    """Guesses with the first `layer` layers and the head; 0: two thirds of them.

    The draft of LayerSkip (arXiv 2404.16710), whose models are trained for it: others guess badly
    from the middle. Departure: the check computes all layers again, there it goes on from the
    state at the exit.
    """

    layer: int = 0

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """See `Drafter`. Raises `UsageError` for a layer that is no place to exit."""
        layers = backend.model.num_layers
        exit_layer = self.layer or max(1, layers * 2 // 3)
        if not 1 <= exit_layer < layers:
            raise UsageError(
                about="draft",
                value=f"early: layer={self.layer}",
                possible=f"1 to {layers - 1} of this model's {layers} layers",
            )
        self._mode = Mode(skipped=tuple(range(exit_layer, layers)))
        backend.check_mode(self._mode)
