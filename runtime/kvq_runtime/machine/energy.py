"""Energy that the processor counts itself (RAPL, as Linux shows it), where it may be read.

The counters are those of the whole machine, with the work of other programs.
"""

from collections.abc import Mapping
from pathlib import Path

FOLDER = Path("/sys/class/powercap")


class EnergyMeter:
    """Measures the joules since it was made, of all processor packages together."""

    def __init__(self, folder: Path = FOLDER) -> None:
        # `intel-rapl:0` is a package, on AMD's processors too; `intel-rapl:0:1` is a part of one.
        packages = sorted(folder.glob("intel-rapl:[0-9]*"))
        self._packages = [path for path in packages if path.name.count(":") == 1]
        self._last = self._counts()
        self._joules = 0.0

    def joules(self) -> float | None:
        """Returns the joules; None where nothing is counted, or only the administrator may read it.

        A counter that began anew is right only if it did so once since the last call.
        """
        now = self._counts()
        if not now or now.keys() != self._last.keys():
            return None
        for package, count in now.items():
            spent = count - self._last[package]
            if spent < 0:
                spent += _number(package, "max_energy_range_uj")
            self._joules += spent / 1e6
        self._last = now
        return self._joules

    def _counts(self) -> Mapping[Path, int]:
        """Returns the microjoules of each package; empty where one cannot be read."""
        try:
            return {package: _number(package, "energy_uj") for package in self._packages}
        except (OSError, ValueError):
            return {}


def _number(package: Path, name: str) -> int:
    return int((package / name).read_text())
