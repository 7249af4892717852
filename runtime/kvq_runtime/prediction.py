"""KV Prediction (2410.08391): which keys and values of a prompt are predicted and not computed.

A prompt's tokens go through the first layers of the model; the later layers' keys and values are
made from what leaves these layers, by the layers' own matrices or by ones fitted for it. The model
then writes on that cache alone. The first layers of a model as its own auxiliary model are this
project's reading of the paper's layer-pruned ones; SwiftKV (2410.03960) does so after training.

Lossy: what is predicted is counted, saved as such, and never taken for what is computed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvq.errors import UsageError, argument
from kvq.named import named
from kvq_runtime.backends import WHOLE, Mode, ModelFacts
from kvq_runtime.passes import Work

PREDICTORS = {
    "prefix": "kvq_runtime.prediction:Prefix",
    "auxiliary": "kvq_runtime.prediction:WithAuxiliary",
}
# What says that nothing is to be predicted.
OFF = "off"
# What leaves it to the bundle.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Of a prompt of n tokens, those from `sink_tokens` to n - `tail_tokens` are made in `mode`.

    A stretch of fewer than `least_tokens` is computed: predicting it would cost passes. `path`: a
    smaller model reads them in the place of this one, see `kvq_runtime.auxiliary`.
    """

    mode: Mode
    sink_tokens: int
    tail_tokens: int
    least_tokens: int
    path: str | None = None

    def piece(self, start: int, stop: int, *, going_on: bool) -> tuple[int, Mode]:
        """Up to where tokens from `start` on, of a text up to `stop`, are alike, and their mode.

        `going_on`: the token before was predicted.
        """
        first, last = max(start, self.sink_tokens), stop - self.tail_tokens
        if not self.mode.predicted or last - first < (1 if going_on else self.least_tokens):
            return stop, WHOLE
        return (first, WHOLE) if start < first else (last, self.mode)


class PromptReader(Protocol):
    """Another model, which reads prompts in this one's place; see `kvq_runtime.auxiliary`."""

    def taking(
        self, cache: Any, ids: Sequence[int], start: int, *, rope_long: bool
    ) -> Work[Any, float]:
        """Gives `cache` keys and values of the tokens of `ids` from `start` on; seconds of passes.

        `cache` holds the tokens before these.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """`sink` first and `tail` last tokens of every prompt are computed, and fewer than `least`."""

    sink: int = 4
    tail: int = 32
    least: int = 64

    def _prediction(self, mode: Mode, path: str | None = None) -> Prediction:
        if min(self.sink, self.tail - 1, self.least - 1) < 0:
            raise UsageError(
                f"{argument('predict')} takes sink=0 or more, and tail=1 and least=1 or more: the "
                "last token's logits must be computed"
            )
        return Prediction(
            mode=mode,
            sink_tokens=self.sink,
            tail_tokens=self.tail,
            least_tokens=self.least,
            path=path,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WithAuxiliary(_Stretch):
    """Predicts all layers from those of the smaller model in the bundle at `path`."""

    path: str = ""

    def prediction(self, model: ModelFacts) -> Prediction:
        """What this comes to for `model`. Raises `UsageError` where no bundle is named."""
        if not self.path:
            raise UsageError(f"{argument('predict')} auxiliary: path= is missing; name a bundle")
        return self._prediction(Mode(predicted=tuple(range(model.num_layers))), self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix(_Stretch):
    """Predicts a `share` of the layers, the last ones, or all but the first `layers`.

    `maps` auto: later layers' keys and values are made by the bundle's fitted matrices where it has
    those of so many layers; own: by the layers' own. `AUTO` predicts as the bundle was measured to
    do well.
    """

    share: float = 0.5
    layers: int = 0
    maps: str = AUTO

    def prediction(self, model: ModelFacts) -> Prediction:
        """What this comes to for `model`. Raises `UsageError` for what no model can do."""
        count = model.num_layers
        if not 0 <= self.share < 1:
            raise UsageError(
                about="predict",
                value=f"share={self.share:g}",
                possible="give 0 up to, not including, 1 of the layers",
            )
        if self.maps not in (AUTO, "own"):
            raise UsageError(
                about="predict", value=f"maps={self.maps}", possible="choose auto or own"
            )
        computed = self.layers or max(1, count - round(self.share * count))
        if not 1 <= computed <= count:
            raise UsageError(
                about="predict",
                value=f"layers={self.layers}",
                possible=f"1 to {count} of this model's layers can be computed",
            )
        return self._prediction(
            Mode(
                predicted=tuple(range(computed, count)),
                fitted=self.maps == AUTO and computed == model.fitted_layers,
            )
        )


Predictor = Prefix | WithAuxiliary


def prediction_named(text: str, model: ModelFacts) -> Prediction | None:
    """What `50%`, `NAME:option=value,...` or `off` says for `model`. Raises `UsageError`."""
    predictor = predictor_named(text)
    if text.strip().partition(":")[0] == AUTO and predictor is not None:
        if model.fitted_layers is None:
            raise UsageError(
                f"{argument('predict')} {AUTO} is not possible: "
                f"{model.name} was exported without measuring "
                f"what that costs; export it with {argument('predict')} auto, or give a share "
                "such as 50%"
            )
        assert isinstance(predictor, Prefix)
        predictor = replace(predictor, layers=model.fitted_layers)
    return None if predictor is None else predictor.prediction(model)


def predictor_named(text: str) -> Predictor | None:
    """The predictor that `text` names, with its options; None: off. Raises `UsageError`."""
    text = text.strip()
    if text.partition(":")[0] == AUTO:
        text = f"prefix:{text.partition(':')[2]}"
    share = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%(?::(.*))?", text)
    if text == OFF:
        return None
    if share:
        text = f"prefix:share={float(share[1]) / 100},{share[2] or ''}"
    elif text.partition(":")[0] not in PREDICTORS:
        raise UsageError(
            about="predict",
            value=f"{text!r}",
            possible=f"give {OFF}, {AUTO}, a share of the layers "
            f"such as 50%, or one of {', '.join(PREDICTORS)}, such as prefix:layers=12,tail=32",
        )
    return named(argument("predict"), text, PREDICTORS)
