"""How many replicas there are, and what each may take of the machines that Ray has."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from kvq.errors import UsageError


@dataclass(frozen=True, slots=True)
class Replicas:
    """From `least` to `most` replicas; Ray adds and takes away in between."""

    least: int
    most: int

    @classmethod
    def asked(cls, arguments: Namespace) -> "Replicas":
        """What `--replicas N` or `--autoscale LEAST:MOST` say, else one. Raises `UsageError`."""
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
        """Options of Ray Serve's `deployment`: a replica more where all `sessions` are at work."""
        if self.least == self.most:
            return {"num_replicas": self.most}
        return {
            "autoscaling_config": {
                "min_replicas": self.least,
                "max_replicas": self.most,
                "target_ongoing_requests": sessions,
            }
        }


def cpus_each(threads: int | None, most: int) -> int:
    """CPUs of a replica, which are its threads: what is asked, or an even share of what Ray has.

    Raises `UsageError` where no node has so many.
    """
    import ray  # pyright: ignore[reportMissingImports]

    nodes = [int(one["Resources"].get("CPU", 0)) for one in ray.nodes() if one["Alive"]]
    if threads is None:
        return max(1, min(sum(nodes) // most, max(nodes, default=1)))
    if threads > max(nodes, default=0):
        raise UsageError(
            f"--threads {threads} is not possible: Ray's largest machine has "
            f"{max(nodes, default=0)} CPUs"
        )
    return threads
