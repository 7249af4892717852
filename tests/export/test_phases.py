"""A job of several phases is one amount that only grows, and is whole at its end alone."""

from pathlib import Path

from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_export.phases import Phases

Reports = list[tuple[float, float, str]]


def test_shares_follow_costs_and_nothing_goes_back() -> None:
    reports: Reports = []
    job = Phases({"fetch": 1.0, "make": 3.0}, lambda *at: reports.append(at))
    fetch = job.of("fetch")
    fetch(50, 100, "half of it")
    fetch(100, 100, "all of it")
    fetch(10, 100, "another file")
    inner = Phases({"read": 1.0, "left out": 1.0, "write": 1.0}, job.of("make"))
    inner.of("read")(1, 2, "")
    inner.of("write")(1, 1, "")
    job.end("make")
    assert [(round(share, 3), label) for share, _, label in reports] == [
        (0, "fetch"),
        (0.125, "half of it"),
        (0.25, "all of it"),
        (0.25, "another file"),
        (0.25, "make"),
        (0.25, "read"),
        (0.375, "read"),
        (0.75, "write"),
        (0.99, "write"),
        (1, "make"),
    ]


def test_a_phase_that_costs_nothing_is_not_told() -> None:
    reports: Reports = []
    job = Phases.of_making(lambda *at: reports.append(at), fetches=False)
    job.of("downloading")
    assert reports == []
    job.of("making the bundle")(1, 2, "")
    assert reports[-1] == (0.5, 1.0, "making the bundle")


def test_an_export_is_one_job(checkpoint: Path, tmp_path: Path) -> None:
    reports: Reports = []
    export_model(checkpoint, tmp_path / "made", ExportOptions(), lambda *at: reports.append(at))
    shares = [share for share, _, _ in reports]
    assert shares == sorted(shares)
    assert [share for share in shares if share == 1] == [1]
    assert shares[-1] == 1
    labels = list(dict.fromkeys(label.partition(",")[0] for _, _, label in reports))
    assert labels == [
        "making the bundle",
        "finding which weights need more bits",
        "rounding and writing the weights",
        "fitting the cache to the model",
        "finding what looks far back",
        "comparing with the original model",
    ]
    assert "rounding and writing the weights, layer 2 of 2" in {label for _, _, label in reports}
