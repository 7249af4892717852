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


@dataclass(frozen=True, slots=True)
class Share:
    """What a replica takes of its machine: `cpus` that Ray sets aside for its `threads`."""

    cpus: float
    threads: int


def share_of(threads: int | None, most: int) -> Share:
    """The share of each of `most` replicas: of `threads`, or an even one of what Ray has.

    On one machine there is always room: replicas with more threads than it has CPUs take turns.
    What Ray has is not known where it is yet to be started, as by `serve run`: one thread then.
    Raises `UsageError` where no machine has so many.
    """
    import ray

    if not ray.is_initialized():
        return Share(threads or 1, threads or 1)
    nodes = [int(one["Resources"].get("CPU", 0)) for one in ray.nodes() if one["Alive"]]
    largest = max(nodes, default=0)
    if threads is not None and threads > largest:
        raise UsageError(
            f"--threads {threads} is not possible: the largest machine that Ray has here has "
            f"{largest} CPUs"
        )
    even = min(sum(nodes) / most, largest)
    if threads is None:
        threads = max(1, int(even))
    return Share(min(threads, even) if len(nodes) == 1 else threads, threads)
