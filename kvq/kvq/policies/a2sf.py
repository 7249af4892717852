"""A2SF (2407.20485): accumulated attention that forgets, so that old tokens have no advantage.

The paper scores token k at step n by the sum over queries q of a^(n - q) S_qk: each step multiplies
what was accumulated by a forgetting factor a. Here the unit is the page, and a step is an
observation, one for every page that closes under pressure: a fifth is forgotten each time and the
newest queries' mean attention takes its place (`mean_mass`). Options as those of H2O, whose halves
it keeps: `recent=0` goes by the score alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.policies import Evidence
from kvq.policies.h2o import H2O


@dataclass(frozen=True, kw_only=True)
class A2SF(H2O):
    """Evicts what was attended to least of late, the newest pages last."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        assert evidence.attention is not None
        return evidence.attention.mean_mass
