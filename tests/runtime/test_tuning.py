"""What was measured on a machine: kept, read again, and never a part of a result."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.matrices import activations, matrix

from kvq import native, native_linear
from kvq.errors import BackendError, DataError
from kvq.reference_linear import PanelFormat
from kvq_runtime import device, tuning
from kvq_runtime.tuning import MOST_AHEAD_BYTES, built_in, default_threads, keep, kept

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
