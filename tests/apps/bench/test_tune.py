"""`kvq bench --tune`: how it chooses, and that what it chose is kept."""

import json
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from kvq import native_library
from kvq.errors import DataError
from kvq_apps.bench import tune
from kvq_apps.cli import main
from kvq_runtime.machine import tuning
from kvq_runtime.machine.device import physical_cores
from kvq_runtime.machine.tuning import Tuning, built_in

pytestmark = pytest.mark.skipif(not native_library.available(), reason="no native library")


def test_as_many_threads_as_pay_and_no_more() -> None:
    assert tune.fewest_threads({1: (8.0, 1.0), 2: (4.0, 1.0), 4: (2.0, 1.0)}) == 4
    # Two threads of a core: the second slows a step down.
    assert tune.fewest_threads({1: (8.0, 8.0), 2: (4.0, 4.0), 4: (4.4, 3.0)}) == 2
    # Memory is busy with two; prompts still gain.
    assert tune.fewest_threads({1: (8.0, 8.0), 2: (4.0, 4.0), 4: (4.0, 2.0)}) == 4
    # A difference as between two runs of the same.
    assert tune.fewest_threads({1: (1.02, 1.0), 2: (1.01, 1.0), 4: (1.0, 1.0)}) == 1


def test_all_small_numbers_of_threads_are_tried_and_those_that_matter() -> None:
    assert tune.thread_counts(2, 2) == (1, 2)
    assert tune.thread_counts(6, 12) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
    assert {96, 192} <= set(tune.thread_counts(96, 192))
    assert len(tune.thread_counts(96, 192)) < 30


@pytest.mark.parametrize(("gain", "kept"), [(1.5, True), (1.01, False)])
def test_only_what_wins_by_more_than_chance_is_kept(
    gain: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(_: object, candidate: Tuning) -> float:
        return (
            1.0 / gain if (candidate.second_level, candidate.ahead_bytes) == (False, 4096) else 1.0
        )

    monkeypatch.setattr(tune, "BUFFER_BYTES", 1)
    monkeypatch.setattr(tune.Weights, "step_seconds", seconds)
    monkeypatch.setattr(tune.Weights, "prompt_seconds", seconds)
    try:
        chosen = Tuning(**tune.tune(lambda _: None)["tuning"])
    finally:
        tuning.apply()
    fetching = {"second_level": False, "ahead_bytes": 4096} if kept else {}
    assert chosen == replace(built_in(), threads=1, **fetching)


def test_the_command_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "Weights", lambda: Small(1 << 20))
    try:
        assert main(["bench", "--tune", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert Tuning(**report["tuning"]) == tuning.load_tuning()
        assert len(report["fetching"]) == 1 + 2 * len(tune.AHEAD_BYTES)
        assert all(row["step_s"] > 0 for row in report["fetching"] + report["threads"])
        assert main(["doctor", "--json"]) == 0
        stored = json.loads(capsys.readouterr().out)["tuning"]
        assert stored["measured"]
        assert stored["remove"] == str(tuning.tuning_path())
        tuning.tuning_path().write_text("{")
        assert main(["doctor", "--json"]) == 0
        assert "remove it" in json.loads(capsys.readouterr().out)["tuning"]["reason"]
    finally:
        tuning.apply()


@pytest.mark.slow
def test_auto_threads_are_measured_once(
    bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds(_: object, candidate: Tuning) -> float:
        assert candidate.threads is not None
        tried.append(candidate.threads)
        return 1.0 / candidate.threads

    tried = list[int]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "BUFFER_BYTES", 1)
    monkeypatch.setattr(tune.Weights, "step_seconds", seconds)
    monkeypatch.setattr(tune.Weights, "prompt_seconds", seconds)
    most = built_in().hardware_threads
    words = ["run", "-m", bundle, "-n", "1", "--temp", "0", "--json", "Once"]
    for times in (1, 2):
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO()))
        assert main([*words, "--threads", "auto"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["threads"] == most
        assert ("measuring" in captured.err) == (times == 1)
    assert set(tried) == set(tune.thread_counts(physical_cores(), most))
    assert tuning.load_tuning() == replace(built_in(), threads=most)
    # What was measured besides stays; a number is never measured.
    tuning.save_tuning(replace(built_in(), second_level=True, ahead_bytes=4096))
    assert tune.threads_that_pay(lambda _: None) == most
    assert tuning.load_tuning() == replace(
        built_in(), second_level=True, ahead_bytes=4096, threads=most
    )


def test_auto_threads_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Tuning) -> None:
        raise DataError("the disk is full")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "save_tuning", full)
    monkeypatch.setattr(tune, "Weights", lambda: Small(1 << 20))
    notes = list[str]()
    try:
        assert 1 <= tune.threads_that_pay(notes.append) <= built_in().hardware_threads
    finally:
        tuning.apply()
    assert "measured anew each time, since the disk is full" in notes[-1]


Small = tune.Weights
