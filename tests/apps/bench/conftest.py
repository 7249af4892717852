"""What tests of these suites begin with."""

from timed import home_of_measurements, tiny_shape

__all__ = ["home_of_measurements", "tiny_shape"]
