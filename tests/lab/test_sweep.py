"""`kvq eval --sweep` and `--table` from outside: cells, resuming, refusals, the plot."""

import json
import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvq_apps.cli import main
from kvq_apps.evaluation.cache_setting import CacheSetting
from kvq_apps.evaluation.tasks import Material
from kvq_apps.settings import flag_values
from kvq_lab import sweep
from kvq_lab.sweep_report import against_best
from shelf import Shelf

pytestmark = pytest.mark.slow

TEXT = Path(__file__).read_text()
CONTEXT = 700
# Four streams (two layers, two KV heads) of 64 channels, K and V, two bytes each.
FP16_BYTES = 4 * 64 * 2 * 2 * CONTEXT
QUICK = (
    "--threads", "1", "--context", str(CONTEXT), "--max-tokens", "1400", "--depths", "0.5",
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(max_position_embeddings=1024))


@pytest.fixture(scope="module")
def text(bundle: str) -> str:
    path = Path(bundle).with_name("program.py")
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def whole(bundle: str, text: str) -> Path:
    """The file of a sweep that was not interrupted; its plot lies beside it."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = Path(bundle).with_name("whole.json")
    words = swept(path, "--plot", str(path.with_suffix(".png")))
    assert main(["eval", "-m", bundle, text, *words]) == 0
    return path


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluate(bundle: str, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs `kvq eval` on the bundle and returns its object, or what was refused."""

    def run(*words: str) -> dict[str, Any]:
        code = main(["eval", "-m", bundle, *words, "--json"])
        shown = json.loads(capsys.readouterr().out)
        assert ("error" in shown) == (code == 2)
        return shown

    return run


def swept(path: Path, *more: str, policies: str = "oldest,oldest@4:2") -> tuple[str, ...]:
    words = ("--sweep", *QUICK, "--budgets", "1/2,1/100", "--policies", policies)
    return (*words, "--out", str(path), *more)


def places(data: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(cell[key] for key in ("task", "kv", "budget")) for cell in data["cells"]]


def test_a_sweep_measures_every_cell_and_keeps_its_file(whole: Path) -> None:
    data = json.loads(whole.read_text())
    assert [path.name for path in whole.parent.iterdir() if "partial" in path.name] == []
    assert whole.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    tasks = ["kld", "passkey", "retrieval"]
    assert places(data) == [
        place
        for task in tasks
        for place in [
            (task, "fp", None),
            (task, "8:8", "1/2"), (task, "4:2", "1/2"),
            (task, "8:8", "1/100"), (task, "4:2", "1/100"),
        ]
    ]  # fmt: skip
    assert data["fp16_bytes"] == FP16_BYTES
    assert {task: entry["sequences"] for task, entry in data["tasks"].items()} == {
        "kld": 2, "passkey": 1, "retrieval": 1
    }  # fmt: skip
    for cell in data["cells"]:
        if cell["budget"] == "1/100":
            assert cell["budget_bytes"] == FP16_BYTES // 100
            assert "KV budget cannot hold" in cell["refused"]
            assert "value" not in cell
        else:
            assert cell["held"] == cell["kv_bytes"] / FP16_BYTES
            assert cell["budget"] is None or cell["kv_bytes"] <= cell["budget_bytes"]
    kld = {cell["kv"]: cell.get("value") for cell in data["cells"][:3]}
    assert kld["fp"] == 0.0 < kld["8:8"] < kld["4:2"]


def test_the_score_is_that_of_the_cache_after_it_gave_way(evaluate: Ask, text: str) -> None:
    words = (text, "--task", "kld", *QUICK[:6], "--kv", "8:8")
    whole, pressed = evaluate(*words), evaluate(*words, "--kv-budget", "45%")
    assert pressed["kv_bytes"] <= pressed["kv_budget"] == FP16_BYTES * 45 // 100
    assert pressed["value"] > 10 * whole["value"] > 0


def test_a_sweep_goes_on_where_it_ended(
    evaluate: Ask,
    bundle: str,
    text: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = json.loads(whole.read_text())["cells"]
    measured: list[tuple[str, int]] = []
    measure_all = Material.measure_all

    def counted(self: Material, task: str, sessions: Any, *more: Any) -> Any:
        measured.append((task, len(sessions)))
        if interrupted and len(measured) == 4:
            raise KeyboardInterrupt
        return measure_all(self, task, sessions, *more)

    monkeypatch.setattr(Material, "measure_all", counted)
    half, interrupted = tmp_path / "half.json", True
    assert main(["eval", "-m", bundle, text, *swept(half)]) == 130
    assert json.loads(half.read_text())["cells"] == cells[:5]
    interrupted = False
    measured.clear()
    assert evaluate(text, *swept(half)) == json.loads(whole.read_text())
    # the three batches of kld are there
    left = ("passkey", "retrieval")
    assert measured == [(task, count) for task in left for count in (1, 2, 2)]
    # another cache fills in its own cells only
    measured.clear()
    policies = "oldest,oldest@2:4,oldest@4:2"
    more = evaluate(text, *swept(half, "--tasks", "passkey", policies=policies))
    assert measured == [("passkey", 1)] * 2
    assert places(more)[len(cells) :] == [("passkey", "2:4", "1/2"), ("passkey", "2:4", "1/100")]
    assert more["cells"][: len(cells)] == cells


def test_a_sweep_of_something_else_is_refused(evaluate: Ask, text: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    words = swept(path, "--tasks", "passkey", policies="oldest")
    evaluate(*words)
    before = path.read_bytes()

    def refusal(*words: str) -> str:
        message = evaluate(*words)["error"]["message"]
        assert path.read_bytes() == before
        return message

    assert "differs in: seed, passkey; give another name" in refusal(*words, "--seed", "5")
    assert "differs in: passkey;" in refusal(*words, "--trials", "2")
    other = "differs in: context_tokens, fp16_bytes, passkey;"
    assert other in refusal(*words, "--context", "600")
    before = b"[]"
    path.write_bytes(before)
    assert "s.json is no sweep; give another --out" in refusal(*words)
    before = b'{"format": "kvq-sweep", "version": 2}'
    path.write_bytes(before)
    assert "version 2, this is version 1" in refusal(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--sweep needs --out FILE.json"),
        (("--out", "no/such/s.json"), "there is no folder no/such"),
        (("--out", "s.txt"), "give a name in .json"),
        (("--out", "s.json", "--plot", "s.exe"), "must end in .png"),
        (("--out", "s.json", "--kv-budget", "25%"), "chooses the caches itself"),
        (("--out", "s.json", "--tasks", "speed"), "--tasks speed is not possible: choose from kld"),
        (("--out", "s.json", "--tasks", "kld"), "--tasks kld needs a text"),
        (("--out", "s.json", "--tasks", "fim"), "--tasks fim is not possible: choose from kld"),
        (("--out", "s.json", "--policies", "eager"), "'eager' is unknown"),
        (("--out", "s.json", "--policies", "oldest@3:3"), "--policies oldest@3:3 is not possible"),
        (("--out", "s.json", "--budgets", "0"), "'0' is not a share above 0"),
        (("--out", "s.json", "--context", "64,128"), "give one number of tokens"),
        (("--out", "s.json", "--task", "ppl"), "--task and --sweep exclude each other"),
        (("--out", "s.json", "--execute"), "--execute is for fim and program only"),
    ],
)
def test_bad_sweeps_are_refused(
    evaluate: Ask, words: tuple[str, ...], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in evaluate("--sweep", *words)["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_the_table_on_the_command_line(
    evaluate: Ask, text: str, bundle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate("--table", text, *QUICK, "--kv", "fp,4:2,2:4")
    assert [row["kv"] for row in report["rows"]] == ["fp", "4:2", "2:4"]
    assert (report["context"], report["windows"], report["questions"]) == (CONTEXT, 2, 2)
    assert report["rows"][1]["bytes_per_token"] == report["rows"][2]["bytes_per_token"]
    assert report["rows"][0]["kld"] == 0.0
    assert main(["eval", "--table", "-m", bundle, text, *QUICK, "--kv", "8:8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split()[:4] == ["kv", "bytes/token", "held", "KLD"]
    assert lines[-1].split()[:2] == ["8:8", "529"]
    assert "needs a text" in evaluate("--table")["error"]["message"]
    assert (
        "leave out --kv-policy"
        in evaluate("--table", text, "--kv-policy", "h2o")["error"]["message"]
    )


def test_the_fim_task_on_the_command_line(evaluate: Ask, tmp_path: Path) -> None:
    text = str(tmp_path / "one_line.py")
    Path(text).write_text("zyxwvu = 12\n" * 60)
    words = (text, "--task", "fim", "--context", "300", "--limit", "3", "--predict", "40")
    report = evaluate(*words)
    assert (report["task"], report["n"], report["unit"]) == ("fim", 3, "exact match")
    assert report["edit_similarity"] < 0.5
    assert "pass_rate" not in report
    assert "--limit 0 is not possible" in evaluate(*words, "--limit", "0")["error"]["message"]
    record = {"prompt": "def f(x):\n", "canonical_solution": "    return 1\n", "suffix": ""}
    record |= {"test": "def check(f):\n    pass\n", "entry_point": "f"}
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    words = (str(tmp_path / "r.jsonl"), "--task", "fim", "--context", "300", "--predict", "4")
    executed = evaluate(*words, "--execute")
    assert (executed["tested"], executed["pass_rate"]) in [(1, 0.0), (1, 1.0)]


def test_the_report_shows_every_cell(
    bundle: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = swept(tmp_path / "s.json", "--tasks", "kld,passkey", policies="oldest")
    assert main(["eval", "-m", bundle, text, *words]) == 0
    shown = capsys.readouterr()
    rows = [line.split("  ") for line in shown.out.split("\n\n")[1].splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0][:4] == ["cache", "budget", "held", "KL divergence, nats"]
    assert [row[:2] for row in cells[1:]] == [
        ["unquantised", "-"], ["oldest 8:8", "1/2"], ["oldest 8:8", "1/100"]
    ]  # fmt: skip
    assert cells[3][2:] == ["refused", "-", "-", "-", "-", "-"]
    assert shown.err.count("refused: oldest 8:8 at 1/100: ") == 1
    assert "kld at 1/2" in shown.err


def test_how_lists_are_read() -> None:
    assert flag_values.policies("oldest,h2o:keep=1,recent=2,oldest@4:2") == (
        "oldest", "h2o:keep=1,recent=2", "oldest@4:2"
    )  # fmt: skip
    assert flag_values.policies("zipcache:a=1@8:4") == ("zipcache:a=1@8:4",)
    assert flag_values.shares("1/2,0.25,10%") == (Fraction(1, 2), Fraction(1, 4), Fraction(1, 10))
    for text in ("0", "-1/2", "1/0", "half", ""):
        with pytest.raises(ArgumentTypeError, match="is not a share above 0"):
            flag_values.shares(text)


def test_budgets_are_shares_of_the_contexts_bytes() -> None:
    plan = sweep.Sweep(
        tasks=("kld",),
        settings=(CacheSetting(k_bits=8, v_bits=8, policy="oldest"),),
        budgets=sweep.BUDGETS,
        context_tokens=100,
        fp16_bytes=9600,
    )
    assert [plan.budget_bytes(budget) for _, budget, _ in plan.batches()] == [
        None, 4800, 2400, 1600, 1200
    ]  # fmt: skip


def test_caches_are_compared_window_by_window_and_ties_are_called_so() -> None:
    """b is worse by e^.5 in every window, give or take .1; c is as often better as worse."""
    base = [0.01, 0.04, 0.02, 0.08]

    def cell(policy: str, factors: list[float]) -> dict[str, object]:
        nats = [nats * factor for nats, factor in zip(base, factors, strict=True)]
        value = sum(nats) / 4
        shared = {"task": "kld", "kv": "8:8", "budget": "1/4", "value": value}
        return {**shared, "policy": policy, "window_nats": nats}

    worse = [math.exp(0.5 + change) for change in (0.1, -0.1, 0.1, -0.1)]
    cells = [cell("a", [1] * 4), cell("b", worse), cell("c", [2, 1.01, 0.5, 1.02])]
    said = against_best([*cells, {"task": "kld", "policy": "d", "kv": "8:8", "budget": "1/4"}])
    error = math.exp(math.sqrt(4 * 0.01 / 3) / 2)
    assert said == {
        ("a 8:8", "1/4"): "best",
        ("b 8:8", "1/4"): f"{math.exp(0.5):.2f} x/ {error:.2f}",
        ("c 8:8", "1/4"): "1.01 x/ 1.33, tie",
    }
