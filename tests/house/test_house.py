"""The house's own rules: style, types, layers, what an import may load, what a file may say."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("kvq", "models", "runtime", "specdraft", "export", "apps")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        pytest.param(("pyright", "--pythonpath", sys.executable), marks=pytest.mark.slow),
        ("importlinter.cli",),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_checker_is_satisfied(command: tuple[str, ...]) -> None:
    name, *arguments = command
    if name == "importlinter.cli":
        arguments = [
            "-c",
            "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())",
        ]
        finished = run(sys.executable, *arguments)
    else:
        finished = run(sys.executable, "-m", name, *arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def python_files() -> list[Path]:
    return [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]


def test_only_settings_reads_the_environment() -> None:
    readers = [
        path.relative_to(ROOT).as_posix()
        for path in python_files()
        if re.search(r"\bos\.environ\b|\bgetenv\b|from os import environ", path.read_text())
    ]
    assert readers == ["kvq/kvq/settings.py"]


def test_only_output_writes_to_the_terminal() -> None:
    """What is printed elsewhere would reach a terminal with its control characters."""
    writes = re.compile(r"(?<![\w.\"'])print\(|\bstd(out|err)\.(write|buffer)|traceback\.print_")
    writers = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "apps/kvq_apps").rglob("*.py")
        if writes.search(path.read_text())
    ]
    assert writers == ["apps/kvq_apps/terminal/output.py"]


def test_no_library_code_but_tuning_imports_torch_or_transformers() -> None:
    pattern = re.compile(r"^\s*(import|from) (torch|transformers)\b", re.MULTILINE)
    # Recipes are run from a checkout and never installed.
    recipes = {ROOT / "models/training", ROOT / "apps/lab"}
    installed = [path for path in python_files() if recipes.isdisjoint(path.parents)]
    importers = {path for path in installed if pattern.search(path.read_text())}
    assert importers == {
        ROOT / f"export/kvq_export/fit/{name}.py" for name in ("trainable", "tuning")
    }


def test_kernels_include_no_framework_header() -> None:
    of_processors = r"immintrin\.h|arm_neon\.h"
    headers = r"kernels\.h|\w+\.inl|simd_\w+\.h|\.\./(format|platform|tiles)\.h"
    allowed = re.compile(rf'#include (<(c?\w+|{of_processors})>|"({headers})")')
    for path in (ROOT / "kvq/csrc/kernels").iterdir():
        includes = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        assert [line for line in includes if not allowed.match(line)] == [], path


def test_every_module_and_folder_says_what_it_is() -> None:
    for path in python_files():
        assert path.read_text().startswith(('"""', "#!")), f"{path} has no module docstring"
    for folder in (*SOURCES, "tests"):
        assert (ROOT / folder / "README.md").stat().st_size > 0


def test_the_caches_modules_import_each_other_in_no_circle() -> None:
    """Imports inside of functions count as well."""
    modules = {path.stem: path for path in (ROOT / "kvq/kvq").glob("*.py") if path.stem[0] != "_"}
    pattern = re.compile(r"^ *from kvq(?:\.(\w+))? import (.+)$", re.MULTILINE)
    needs = {
        name: {
            submodule
            for module, names in pattern.findall(path.read_text())
            for submodule in ([module] if module else re.findall(r"\w+", names))
            if submodule in modules
        }
        for name, path in modules.items()
    }
    assert needs["devices"] >= {"native"}
    order = list(TopologicalSorter(needs).static_order())
    assert order.index("native") < order.index("devices")


def test_module_names_say_what_is_inside() -> None:
    vague = {"utils", "common", "misc", "manager", "base", "core", "types", "helpers"}
    assert [path for path in python_files() if path.stem in vague] == []
