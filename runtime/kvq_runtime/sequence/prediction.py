"""KV Prediction (2410.08391): the keys and values of a prompt that are predicted, not computed.

A prompt's tokens go through the first layers of the model only. The keys and values of the later
layers are made from what leaves the first ones, by the layers' own matrices or by fitted ones. The
paper does this with an auxiliary model of fewer layers; here it may be the model's own first
layers. SwiftKV (2410.03960) does the same after training.

Prediction is lossy. Predicted tokens are counted, saved as such, and never taken for computed ones.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvq.errors import UsageError, argument
from kvq.named import named
from kvq_runtime.backends import WHOLE, Mode, ModelFacts
from kvq_runtime.sequence.passes import Work

PREDICTORS = {
    "prefix": "kvq_runtime.sequence.prediction:Prefix",
    "auxiliary": "kvq_runtime.sequence.prediction:WithAuxiliary",
}
# Predicts nothing.
OFF = "off"
# Leaves the number of predicted layers to the bundle.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Says which tokens of a prompt are predicted, in which `mode`.

    Of n tokens these are the ones from `sink_tokens` to n - `tail_tokens`. A run of fewer than
    `least_tokens` is computed, as predicting it would cost more passes. With `path` a smaller model
    reads them instead of this one, see `kvq_runtime.session.auxiliary`.
    """

    mode: Mode
    sink_tokens: int
    tail_tokens: int
    least_tokens: int
    path: str | None = None

    def piece(self, start: int, stop: int, *, continues: bool) -> tuple[int, Mode]:
        """Returns where the run of tokens from `start` on that share a mode ends, and this mode.

        The text ends at `stop`. `continues`: the token before `start` was predicted.
        """
        first, last = max(start, self.sink_tokens), stop - self.tail_tokens
        if not self.mode.predicted or last - first < (1 if continues else self.least_tokens):
            return stop, WHOLE
        return (first, WHOLE) if start < first else (last, self.mode)


class PromptReader(Protocol):
    """Reads prompts with another model in place of a session's own."""

    def filling(
        self, cache: Any, ids: Sequence[int], start: int, *, rope_long: bool
    ) -> Work[Any, float]:
        """Gives `cache` keys and values of the tokens of `ids` from `start` on; returns seconds.

        `cache` holds the tokens before these.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """Computes the first `sink` and last `tail` tokens, and stretches shorter than `least`."""

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
        """Returns the prediction for `model`. Raises `UsageError` where no bundle is named."""
        if not self.path:
            raise UsageError(f"{argument('predict')} auxiliary: path= is missing; name a bundle")
        return self._prediction(Mode(predicted=tuple(range(model.num_layers))), self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix(_Stretch):
    """Predicts a `share` of the layers, the last ones, or all but the first `layers`.

    With `maps` auto the bundle's fitted matrices make the keys and values where it has some for
    this number of layers; own: the layers' own matrices make them. The name `auto` predicts as many
    layers as the bundle was measured to do well with.
    """

    share: float = 0.5
    layers: int = 0
    maps: str = AUTO

    def prediction(self, model: ModelFacts) -> Prediction:
        """Returns the prediction for `model`. Raises `UsageError` for what no model can do."""
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
    """Returns the prediction that `50%`, `NAME:option=value,...` or `off` asks for.

    None: nothing is predicted. Raises `UsageError` for what `model` cannot do.
    """
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
    """Returns the predictor that `text` names, with its options; None for off.

    Raises `UsageError` for an unknown name or option.
    """
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
