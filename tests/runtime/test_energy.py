"""The processor's own counters of energy, read from a folder as Linux shows them."""

from pathlib import Path

import pytest

from kvq_runtime.machine.energy import EnergyMeter


def package(folder: Path, name: str, count: int, most: int = 1_000_000_000) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "energy_uj").write_text(f"{count}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    return path


def test_joules_are_those_of_all_packages_since_the_meter_was_made(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 5_000_000)
    package(tmp_path, "intel-rapl:1", 0)
    package(tmp_path, "intel-rapl:0:0", 0)  # the cores of package 0, which it counts, too
    (tmp_path / "intel-rapl").mkdir()
    meter = EnergyMeter(tmp_path)
    package(tmp_path, "intel-rapl:0", 7_500_000)
    package(tmp_path, "intel-rapl:1", 250_000)
    package(tmp_path, "intel-rapl:0:0", 2_000_000)
    assert meter.joules() == pytest.approx(2.75)
    package(tmp_path, "intel-rapl:0", 8_500_000)
    assert meter.joules() == pytest.approx(3.75)


def test_a_counter_that_began_anew_has_counted_its_range(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 9_000_000, most=10_000_000)
    meter = EnergyMeter(tmp_path)
    package(tmp_path, "intel-rapl:0", 500_000, most=10_000_000)
    assert meter.joules() == pytest.approx(1.5)


def test_there_are_no_joules_where_nothing_counts_them(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path).joules() is None
    assert EnergyMeter(tmp_path / "absent").joules() is None
    path = package(tmp_path, "intel-rapl:0", 1)
    meter = EnergyMeter(tmp_path)
    (path / "energy_uj").unlink()
    assert meter.joules() is None
    # As where only the administrator may read it.
    (path / "energy_uj").mkdir()
    assert EnergyMeter(tmp_path).joules() is None
