"""What `kvq bench` and `kvq eval` say where only a wheel is installed, and what a wheel holds."""

import tomllib
from pathlib import Path

import pytest

from kvq_apps import laboratory
from kvq_apps.bench import engines
from kvq_apps.cli import main
from kvq_apps.commands import eval as evaluation
from kvq_apps.settings.flags import FLAGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laboratory, "PACKAGE", "kvq_lab_not_here")


@pytest.mark.usefixtures("no_laboratory")
@pytest.mark.parametrize(
    "words",
    [
        *(f"bench --suite {name}" for name in ("drafts", "edit", "ttft")),
        *(f"eval --task {name} {__file__}" for name in evaluation.LABORATORY_TASKS),
        f"eval --sweep {__file__}",
    ],
)
def test_without_it_a_suite_says_that_it_needs_a_checkout(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    flag = " ".join(words.removesuffix(__file__).split()[1:])
    assert capsys.readouterr().err == (
        f"error: {flag} belongs to the laboratory, which only a checkout of kvq has; get one "
        "and install it there with `pip install -e .`, or leave the flag out\n"
    )


def test_without_it_a_peer_says_so_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(engines.ENGINES, "transformers")
    assert main(["bench", "--peer", "transformers"]) == 2
    assert "error: --peer transformers belongs to the laboratory" in capsys.readouterr().err


@pytest.mark.usefixtures("no_laboratory")
@pytest.mark.parametrize("words", ["bench --drafters lookup", "eval --budgets 1/2"])
def test_without_it_its_flags_are_unknown(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert f"{words.split()[1]} is not known to `kvq" in capsys.readouterr().err


def test_it_runs_what_the_commands_name() -> None:
    suites, tasks = FLAGS["suite"].choices or (), evaluation.LABORATORY_TASKS
    assert {"speed", "serve", *laboratory.extension("bench").RUNS} == {*suites}
    assert {"sweep", *tasks} == {*laboratory.extension("eval").RUNS}
    assert {*engines.LABORATORY_PEERS} == {*laboratory.peers()}


def test_a_wheel_has_no_laboratory_and_a_checkout_has() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    folder = "apps/lab/kvq_lab"
    assert folder not in build["wheel"]["packages"]
    beside = [
        override["if"]
        for override in build["overrides"]
        if folder in override.get("wheel", {}).get("packages", ())
    ]
    assert beside == [{"state": "editable"}]
