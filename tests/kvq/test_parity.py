"""The library's own kernels and those of other compilers and processors, by recorded calls.

`parity.py` writes calls with the reference's answers, `parity.cpp` replays them. Without the
compilers and the emulator the tests of those builds skip.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import parity
from kvq import native
from shelf import Shelf

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "tests/support/parity.cpp"
ARM = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
QEMU = ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", "-cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """A way to build the library, and the machine that runs it with the kernels it must offer.

    `older` is one more, whose kernels the first has proved: it shows that they start there.
    """

    compiler: str
    options: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()
    kernels: str
    older: tuple[str, ...] = ()
    older_kernels: str = ""


HERE = ",".join(native.isas()) if native.available() else ""
BUILDS = {
    "clang": Build(compiler="clang++", kernels=HERE),
    "arm": Build(
        compiler="aarch64-linux-gnu-g++",
        options=ARM,
        emulator=(*QEMU, "max"),
        kernels="neon,generic",
        older=(*QEMU, "cortex-a53"),
        older_kernels="generic",
    ),
}


@pytest.fixture(scope="module")
def cases(shelf: Shelf) -> Path:
    return shelf.once("cases", "all", parity.write)


@pytest.fixture(scope="module")
def few_cases(shelf: Shelf) -> Path:
    return shelf.once("cases", "few", lambda path: parity.write(path, parity.FEW))


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def needs(*programs: str) -> None:
    missing = [name for name in programs if not shutil.which(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def runner(compiler: str, library: Path, folder: Path) -> Path:
    program = folder / "parity"
    flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "kvq/csrc")
    built = run(compiler, *flags, RUNNER, library, f"-Wl,-rpath,{library.parent}", "-o", program)
    assert built.returncode == 0, built.stderr
    return program


def assert_kernels_pass(finished: subprocess.CompletedProcess[str], kernels: str) -> None:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == kernels.split(",")
    assert len({line.partition(":")[2] for line in lines}) == 1


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_the_installed_library_passes_and_a_wrong_answer_shows(cases: Path, tmp_path: Path) -> None:
    needs("g++")
    library = native.library_path()
    assert library
    program = runner("g++", library, tmp_path)
    assert_kernels_pass(run(program, cases), HERE)
    wrong = bytearray(cases.read_bytes())
    wrong[-3] ^= 0x40  # in the last embedding
    (tmp_path / "wrong").write_bytes(wrong)
    finished = run(program, tmp_path / "wrong")
    assert finished.returncode == 1
    assert finished.stdout.count('8/64/minimum": largest error') == HERE.count(",") + 1


@pytest.mark.slow
@pytest.mark.cross
@pytest.mark.parametrize("name", BUILDS)
def test_other_compilers_and_processors_pass_without_a_warning(
    name: str, cases: Path, few_cases: Path, tmp_path: Path
) -> None:
    build = BUILDS[name]
    needs("cmake", build.compiler, *build.emulator[:1])
    folder = tmp_path / "build"
    chosen = (f"-DCMAKE_CXX_COMPILER={build.compiler}", "-DCMAKE_CXX_FLAGS=-Werror")
    configured = run("cmake", "-S", ROOT / "kvq", "-B", folder, *chosen, *build.options)
    assert configured.returncode == 0, configured.stderr
    built = run("cmake", "--build", folder, "--parallel", "2")
    assert built.returncode == 0, built.stderr
    program = runner(build.compiler, folder / native.LIBRARY, tmp_path)
    assert_kernels_pass(run(*build.emulator, program, cases), build.kernels)
    if build.older:
        assert_kernels_pass(run(*build.older, program, few_cases), build.older_kernels)
