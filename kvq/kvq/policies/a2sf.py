"""The policy `a2sf`: accumulated attention that forgets."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.policies import Evidence
from kvq.policies.h2o import H2O


@dataclass(frozen=True, kw_only=True)
class A2SF(H2O):
    """Evicts the pages with the least recent attention, the newest pages last.

    A2SF (arXiv 2407.20485) scores token k at step n by the sum over queries q of a^(n - q) S_qk: at
    each step the accumulated attention is multiplied by a forgetting factor a, so that old tokens
    have no advantage. Here the unit is the page, and a step is an observation, one for every page
    that closes while space is short. Each observation replaces a fifth of the score by the mean
    attention of the newest queries (`mean_mass`).

    Args:
        demote: See `Scorer`; default 0.
        recent: Share, 0 to 1, of the pages that count as recent and go last, as in H2O; 0 uses the
            score alone. Default 0.5.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        assert evidence.attention is not None
        return evidence.attention.mean_mass
