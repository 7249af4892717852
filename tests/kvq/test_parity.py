"""The library's own kernels and those of other compilers and processors, by recorded calls.

`parity.py` writes calls with the reference's answers, `parity.cpp` replays them. Without the
compilers and the emulators the tests of those builds skip.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import parity
from kvq import native_library
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


HERE = ",".join(native_library.isas()) if native_library.available() else ""
BUILDS = {
    # AMX's instructions in plain memory, whatever the processor has.
    "tiles": Build(
        compiler="g++",
        options=(
            f"-DKVQ_AMX=-include;{ROOT / 'tests/support/emulated_tiles.h'}",
            # GCC 12 warns of its own headers for AVX-512 (bug 105593).
            "-DCMAKE_CXX_FLAGS=-Werror -Wno-error=uninitialized",
        ),
        kernels=",".join(["amxint8", *HERE.removeprefix("amxint8,").split(",")]),
    ),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What programs of a wheel's platform are linked as and run on here, and the kernels it has."""

    target: str
    emulator: tuple[str, ...] = ()
    kernels: str = HERE
    links: str = "libkvq_native.so"


# None: nothing here runs its programs, so that its wheel is only looked into.
WHEELS = {
    "manylinux_2_28_x86_64": Machine(target="x86_64-linux-gnu"),
    "manylinux_2_28_aarch64": Machine(
        target="aarch64-linux-gnu", emulator=(*QEMU, "max"), kernels="neon,generic"
    ),
    "musllinux_1_2_x86_64": Machine(
        target="x86_64-linux-musl", emulator=("/lib/ld-musl-x86_64.so.1",)
    ),
    "macosx_12_0_arm64": None,
    "macosx_12_0_x86_64": None,
    "win_amd64": Machine(
        target="x86_64-windows-gnu", emulator=("wine",), links="libkvq_native.dll.a"
    ),
    "win_arm64": None,
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


def runner(*compiler: str, library: Path, folder: Path) -> Path:
    program = folder / "parity.exe"
    flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "kvq/csrc")
    built = run(*compiler, *flags, RUNNER, library, f"-Wl,-rpath,{library.parent}", "-o", program)
    assert built.returncode == 0, built.stderr
    return program


def assert_kernels_pass(finished: subprocess.CompletedProcess[str], kernels: str) -> None:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == kernels.split(",")
    assert len({line.partition(":")[2] for line in lines}) == 1


@pytest.mark.slow
@pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
def test_the_installed_library_passes_and_a_wrong_answer_shows(cases: Path, tmp_path: Path) -> None:
    needs("g++")
    library = native_library.library_path()
    assert library
    program = runner("g++", library=library, folder=tmp_path)
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
    program = runner(build.compiler, library=folder / native_library.LIBRARY, folder=folder)
    assert_kernels_pass(run(*build.emulator, program, cases), build.kernels)
    if build.older:
        assert_kernels_pass(run(*build.older, program, few_cases), build.older_kernels)


def wheel_of(name: str, shelf: Shelf) -> Path:
    """The folder of the wheel and of what it was linked from, in `name`."""
    for package in ("lief", "scikit_build_core", "ziglang"):
        pytest.importorskip(package, reason=f"{package} not installed: kvq-runtime[wheels]")

    def build(folder: Path) -> None:
        places = ("--out", folder, "--build", folder)
        built = run(sys.executable, ROOT / "kvq/build_wheels.py", name, *places)
        assert built.returncode == 0, built.stdout + built.stderr

    return shelf.once("wheels", name, build)


@pytest.mark.slow
@pytest.mark.cross
@pytest.mark.parametrize("name", WHEELS)
def test_a_wheel_is_in_order_and_its_library_passes(
    name: str, cases: Path, shelf: Shelf, tmp_path: Path
) -> None:
    machine = WHEELS[name]
    needs(*(machine.emulator[:1] if machine else ()))
    folder = wheel_of(name, shelf)
    if machine is None:
        return
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (native_file,) = (file for file in archive.namelist() if "/libkvq_native." in file)
        (tmp_path / Path(native_file).name).write_bytes(archive.read(native_file))
    zig = (sys.executable, "-m", "ziglang", "c++", "-s", "-target", machine.target)
    if machine.links.endswith(".a"):  # what stands for a DLL where programs are linked
        shutil.copy(folder / name / machine.links, tmp_path)
    program = runner(*zig, library=tmp_path / machine.links, folder=tmp_path)
    assert_kernels_pass(run(*machine.emulator, program, cases), machine.kernels)


@pytest.mark.slow
@pytest.mark.cross
@pytest.mark.skipif(sys.platform != "linux", reason="installs the wheel for Linux")
def test_a_wheel_is_installed_without_a_compiler(shelf: Shelf, tmp_path: Path) -> None:
    (wheel,) = wheel_of("manylinux_2_28_x86_64", shelf).glob("*.whl")
    (models,) = wheel_of("kvq-models", shelf).glob("*.whl")
    folder = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", folder)
    assert run(*pip, wheel).returncode == 0
    # -S: not what is installed here; of that only what kvq needs.
    packages = os.pathsep.join([str(folder), *(path for path in sys.path if "-packages" in path)])
    environment = {"PATH": "", "PYTHONPATH": packages, "HOME": str(tmp_path)}

    def start(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *map(str, words)]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )

    def said(*words: str | Path) -> str:
        finished = start(*words)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    code = "from kvq.native_library import *; print(library_path(), ','.join(isas()))"
    library, kernels = said("-c", code).split()
    assert (library, kernels) == (str(folder / "kvq/libkvq_native.so"), HERE)
    tests = (ROOT / "tests/kvq" / name for name in ("test_linear.py", "test_snapshots.py"))
    assert "skipped" not in said("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    # The embedded models are a package of their own.
    answer = ("-m", "kvq_apps.cli", "run", "-m", "nano", "-n", "4", "--temp", "0", "def f")
    assert "`pip install kvq-models` brings it" in start(*answer).stderr
    assert run(*pip, models).returncode == 0
    assert said(*answer).strip()
