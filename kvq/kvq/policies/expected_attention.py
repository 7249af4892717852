"""The policy `expected-attention`: the attention of future queries in closed form."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.policies import Evidence
from kvq.policies.estimates import mean_square, middle
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Scorer):
    """Evicts the pages that are expected to change the output least.

    Expected Attention (arXiv 2510.00636) models queries as Gaussian, moves their mean and
    covariance to the next positions, and scores a token by E[exp(q.k)] = exp(mu.k + k'Sigma k / 2)
    times the norm of its value. Here mu and the diagonal of Sigma come from the probes' rotated and
    scaled queries at their own positions, and the key of a page is the middle of each channel.
    Scores are logarithms, since only their order counts.

    Args:
        demote: See `Scorer`; default 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "samples"})

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        return evidence.stack_layers(lambda layer: self._layer_importance(evidence, layer))

    def _layer_importance(self, evidence: Evidence, layer: int) -> NDArray[np.floating]:
        assert evidence.attention is not None
        constants = evidence.constants(layer)
        mean = evidence.attention.query_mean[layer]
        variance = np.maximum(evidence.attention.query_square[layer] - np.square(mean), 0)
        key = middle(constants.key_min, constants.key_range)
        logit = np.einsum("hcd,hd->hc", key, mean)
        logit += np.einsum("hcd,hd->hc", np.square(key), variance) / 2
        square = mean_square(constants.value_min, constants.value_range).mean(axis=-1)
        with np.errstate(divide="ignore"):  # a page of zeros moves nothing: minus infinity
            return logit + np.log(square) / 2
