"""What tests of these suites begin with."""

from bench_bundles import make
from timed import home_of_measurements, tiny_shape

__all__ = ["home_of_measurements", "make", "tiny_shape"]
