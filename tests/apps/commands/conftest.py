"""Where commands find no user's files, and how they are asked in this process."""

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from command_line import Ask
from environment import environment_in
from kvq_apps.cli import main


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return environment_in(tmp_path)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Runs a command with `--json` in this process and returns its object."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str, stdin: bytes = b"") -> dict[str, Any]:
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(stdin)))
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run
