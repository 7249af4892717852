"""Estimates of keys and values from a page's stored ranges, as if they were spread evenly."""

import numpy as np
from numpy.typing import NDArray

from kvq.policies import Floats


def middle(smallest: Floats, span: Floats) -> NDArray[np.floating]:
    """Returns the mean of values between `smallest` and `smallest + span`."""
    return smallest + span * np.float32(0.5)


def mean_square(smallest: Floats, span: Floats) -> NDArray[np.floating]:
    """Returns the mean square of values between `smallest` and `smallest + span`."""
    return np.square(middle(smallest, span)) + np.square(span) * np.float32(1 / 12)
