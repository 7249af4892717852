"""`kvq bench --suite fleet` on a real Ray: what it reports of one server and a fleet of two."""

import json

import pytest

from kvq_lab import fleet

pytestmark = pytest.mark.slow


def test_a_fleet_is_measured_beside_a_server(
    ray_home: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ray_home.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fleet, "SESSIONS", 6)
    job = fleet.FleetJob(model="nano", replicas=(2,), repeat=3)
    data = json.loads(json.dumps(fleet.measure(job, lambda *_: None)))
    (row,) = data["rows"]
    assert row["replicas"] == 2
    assert row["plain_ms"] > 0
    assert row["overhead_ms"] == pytest.approx(row["request_ms"] - row["plain_ms"])
    assert min(row["tok_s"], row["plain_tok_s"]) > 0
    # Where each session has a place, the fleet finds what one server finds.
    assert row["prefix_share"] == pytest.approx(data["plain_prefix_share"], rel=0.1)
    assert data["plain_prefix_share"] > 0.5
    fleet.print_report(data)
    assert f"{row['prefix_share']:.1%}" in capsys.readouterr().out
