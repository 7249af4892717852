"""What was measured on a machine is kept and read again, and changes no result."""

import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.matrices import activations, matrix

from kvq import native_library, native_linear
from kvq.abi import NativeProcessor
from kvq.errors import BackendError, DataError
from kvq.reference.linear import PanelFormat
from kvq_runtime.machine import device, tuning
from kvq_runtime.machine.tuning import (
    MOST_AHEAD_BYTES,
    built_in,
    built_in_of,
    default_threads,
    load_tuning,
    save_tuning,
)

pytestmark = pytest.mark.skipif(not native_library.available(), reason="no native library")


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_kept_is_used_and_removing_it_goes_back_to_what_is_built_in() -> None:
    assert load_tuning() is None
    assert default_threads() == device.physical_cores()
    saved = replace(built_in(), threads=1, second_level=False, ahead_bytes=4096)
    save_tuning(saved)
    assert load_tuning() == saved
    assert default_threads() == 1
    tuning.tuning_path().unlink()
    assert load_tuning() is None
    assert default_threads() == device.physical_cores()


@pytest.mark.parametrize("other", [{"processor": "another"}, {"hardware_threads": 4096}])
def test_a_file_of_another_machine_is_not_used(other: dict[str, object]) -> None:
    save_tuning(replace(built_in(), threads=1, **other))
    assert load_tuning() is None
    assert default_threads() == device.physical_cores()


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0},
        {"threads": 1 << 20},
        {"threads": True},
        {"second_level": 1},
        {"ahead_bytes": -1},
        {"ahead_bytes": MOST_AHEAD_BYTES + 1},
        {"hardware_threads": "2"},
        {"more": 1},
    ],
)
def test_a_damaged_file_is_said_and_not_used(
    wrong: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    content = asdict(built_in()) | wrong
    tuning.tuning_path().parent.mkdir(parents=True)
    tuning.tuning_path().write_text(json.dumps(content))
    with pytest.raises(DataError, match="remove it, or write it anew"):
        load_tuning()
    with caplog.at_level(logging.WARNING, "kvq"):
        assert default_threads() == device.physical_cores()
    assert str(tuning.tuning_path()) in caplog.text


@pytest.mark.parametrize("bits", [4, 8])
def test_no_result_depends_on_how_weights_are_fetched(bits: int) -> None:
    form = PanelFormat(rows=160, columns=320, bits=bits, block=32)
    panels, rows = matrix(form)[1], activations(5, form.columns)
    try:
        for count in (1, 5):
            usual = native_linear.linear(form, panels, rows[:count])
            for level in (None, False, True):
                for ahead in (0, 64, MOST_AHEAD_BYTES):
                    tuning.set_prefetching(
                        replace(built_in(), second_level=level, ahead_bytes=ahead)
                    )
                    actual = native_linear.linear(form, panels, rows[:count])
                    np.testing.assert_array_equal(actual, usual)
    finally:
        tuning.apply()


def test_the_library_refuses_to_fetch_from_too_far() -> None:
    with pytest.raises(BackendError, match=f"at most {MOST_AHEAD_BYTES}"):
        tuning.set_prefetching(replace(built_in(), ahead_bytes=MOST_AHEAD_BYTES + 1))


@pytest.mark.parametrize(
    ("maker", "level2_kib", "second_level", "panel_kib", "row_kib"),
    [
        # Zen 3 and Zen 4.
        ("AuthenticAMD", 512, True, 32, 256),
        ("AuthenticAMD", 1024, True, 32, 256),
        ("HygonGenuine", 512, True, 32, 256),
        ("GenuineIntel", 256, False, 16, 128),
        ("GenuineIntel", 1280, False, 32, 320),
        ("GenuineIntel", 2048, False, 32, 512),
        # A cache of several cores, or one that a virtual machine makes up.
        ("GenuineIntel", 16 << 10, False, 32, 512),
        ("CentaurHauls", 256, False, 16, 128),
        ("", 0, False, 32, 256),
    ],
)
def test_what_is_built_in_goes_by_the_maker_and_the_cache(
    maker: str, level2_kib: int, second_level: bool, panel_kib: int, row_kib: int
) -> None:
    of = NativeProcessor(maker.encode(), level2_kib << 10)
    values = built_in_of(of)
    assert bool(values.second_level) == second_level
    sizes = values.ahead_bytes, values.panel_bytes, values.row_bytes
    assert sizes == (8 << 10, panel_kib << 10, row_kib << 10)
    said = tuning.reason(of)
    assert (maker or "does not name") in said
    assert (f"{level2_kib} KiB" if level2_kib else "not known") in said
    assert ("which pays on AMD's design" in said) == second_level


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of the processor")
def test_a_processor_says_who_made_it_and_what_its_cache_holds() -> None:
    processor = tuning.processor()
    said = Path("/proc/cpuinfo").read_text()
    assert f"vendor_id\t: {processor.maker.decode()}\n" in said or "vendor_id" not in said
    sizes = {
        folder.joinpath("size").read_text().strip()
        for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")
        if folder.joinpath("level").read_text().strip() == "2"
    }
    assert sizes <= {f"{processor.level2_bytes >> 10}K"}
