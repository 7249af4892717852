"""The picture of decode time against context: its axis, and that it is drawn of a report."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq_lab import plot


@given(low=st.floats(1e-6, 1e6), factor=st.floats(1.5, 1e4))
def test_every_axis_has_at_least_three_round_ticks(low: float, factor: float) -> None:
    ticks = plot.log_ticks(low, low * factor)
    assert len(ticks) >= 3
    assert ticks == sorted(set(ticks))
    assert low <= ticks[0]
    assert ticks[-1] <= low * factor


def test_a_report_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [
        {"engine": engine, "kv": "4:4", "kv_policy": None, "threads": 1,
         "context": context, "decode_ms": context / 50}
        for engine in ("kvq", "llama-bench")
        for context in (64, 4096)
    ]  # fmt: skip
    report, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    report.write_text(json.dumps({"model": "tiny", "threads": [1], "rows": rows}))
    monkeypatch.setattr(sys, "argv", ["plot", str(report), str(picture)])
    monkeypatch.delitem(sys.modules, "kvq_lab.plot")
    runpy.run_module("kvq_lab.plot", run_name="__main__")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
