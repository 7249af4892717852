"""What was measured on a machine: kept, read again, and never a part of a result."""

import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.matrices import activations, matrix

from kvq import native, native_linear
from kvq.errors import BackendError, DataError
from kvq.reference_linear import PanelFormat
from kvq_runtime import device, tuning
from kvq_runtime.tuning import (
    MOST_AHEAD_BYTES,
    BuiltIn,
    Processor,
    built_in,
    built_in_of,
    default_threads,
    keep,
    kept,
)

pytestmark = pytest.mark.skipif(not native.available(), reason="no native library")


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_kept_is_used_and_removing_it_goes_back_to_what_is_built_in() -> None:
    assert kept() is None
    assert default_threads() == device.physical_cores()
    found = replace(built_in(), threads=1, past_caches=False, ahead_bytes=4096)
    keep(found)
    assert kept() == found
    assert default_threads() == 1
    tuning.tuning_path().unlink()
    assert kept() is None
    assert default_threads() == device.physical_cores()


@pytest.mark.parametrize("other", [{"processor": "another"}, {"hardware_threads": 4096}])
def test_a_file_of_another_machine_is_not_used(other: dict[str, object]) -> None:
    keep(replace(built_in(), threads=1, **other))
    assert kept() is None
    assert default_threads() == device.physical_cores()


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0},
        {"threads": 1 << 20},
        {"threads": True},
        {"past_caches": 1},
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
        kept()
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
            for past in (None, False, True):
                for ahead in (0, 64, MOST_AHEAD_BYTES):
                    tuning.set_prefetching(replace(built_in(), past_caches=past, ahead_bytes=ahead))
                    found = native_linear.linear(form, panels, rows[:count])
                    np.testing.assert_array_equal(found, usual)
    finally:
        tuning.apply()


def test_the_library_refuses_to_fetch_from_too_far() -> None:
    with pytest.raises(BackendError, match=f"at most {MOST_AHEAD_BYTES}"):
        tuning.set_prefetching(replace(built_in(), ahead_bytes=MOST_AHEAD_BYTES + 1))


@pytest.mark.parametrize(
    ("maker", "level2_kib", "past_caches", "panel_kib", "row_kib"),
    [
        # Zen 3 and Zen 4, as they always were.
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
    maker: str, level2_kib: int, past_caches: bool, panel_kib: int, row_kib: int
) -> None:
    of = Processor(maker=maker, level2_bytes=level2_kib << 10)
    assert built_in_of(of) == BuiltIn(
        past_caches=past_caches,
        ahead_bytes=8 << 10,
        panel_bytes=panel_kib << 10,
        row_bytes=row_kib << 10,
    )
    said = tuning.reason(of)
    assert (maker or "does not name") in said
    assert (f"{level2_kib} KiB" if level2_kib else "not known") in said
    assert ("which pays on AMD's design" in said) == past_caches


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of the processor")
def test_a_processor_says_who_made_it_and_what_its_cache_holds() -> None:
    found = tuning.processor()
    said = Path("/proc/cpuinfo").read_text()
    assert f"vendor_id\t: {found.maker}\n" in said or "vendor_id" not in said
    sizes = {
        folder.joinpath("size").read_text().strip()
        for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")
        if folder.joinpath("level").read_text().strip() == "2"
    }
    assert sizes <= {f"{found.level2_bytes >> 10}K"}
