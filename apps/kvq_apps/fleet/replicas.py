"""The number of replicas, and the CPUs that each gets of Ray's machines."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from kvq.errors import UsageError


@dataclass(frozen=True, slots=True)
class Replicas:
    """Holds the bounds between which Ray adds and removes replicas."""

    least: int
    most: int

    @classmethod
    def from_arguments(cls, arguments: Namespace) -> "Replicas":
        """Reads `--replicas N` or `--autoscale LEAST:MOST`, else one. Raises `UsageError`."""
        count, spread = arguments.replicas, arguments.autoscale
        if count is not None and spread is not None:
            raise UsageError("--replicas and --autoscale exclude each other; give one")
        if spread is None:
            count = 1 if count is None else count
            if count < 1:
                raise UsageError(f"--replicas {count} is not possible: give 1 or more")
            return cls(count, count)
        least, _, most = spread.partition(":")
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise UsageError(
                f"--autoscale {spread} is not possible: give the least and the most replicas, "
                "as 1:8"
            )
        return cls(int(least), int(most))

    def options(self, sessions: int) -> dict[str, Any]:
        """Returns options of Ray Serve's `deployment`; busy `sessions` ask for another replica."""
        if self.least == self.most:
            return {"num_replicas": self.most}
        return {
            "autoscaling_config": {
                "min_replicas": self.least,
                "max_replicas": self.most,
                "target_ongoing_requests": sessions,
            }
        }


def share_of(threads: int | None, most: int) -> tuple[float, int]:
    """Returns the CPUs that Ray reserves for each of `most` replicas, and its threads.

    These are `threads`, or an equal part of Ray's CPUs. On one machine there is always room, since
    replicas can take turns on its CPUs. Before Ray is started, as by `serve run`, its CPUs are not
    known, and a replica gets one thread. Raises `UsageError` where no machine has so many CPUs.
    """
    import ray

    if not ray.is_initialized():
        return threads or 1, threads or 1
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    largest = max(nodes, default=0)
    if threads is not None and threads > largest:
        raise UsageError(
            f"--threads {threads} is not possible: the largest machine that Ray has here has "
            f"{largest} CPUs"
        )
    even = min(sum(nodes) / most, largest)
    if threads is None:
        threads = max(1, int(even))
    return min(threads, even) if len(nodes) == 1 else threads, threads
