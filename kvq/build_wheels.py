"""Builds the wheels, for all platforms on one of them, and checks them.

    python kvq/build_wheels.py                      # all of PLATFORMS and kvq-models into dist/
    python kvq/build_wheels.py win_amd64 --out dist # those named

Needs `pip install -e ".[wheels]"`: Zig compiles for all of them. Not part of an installation.
"""

import argparse
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "kvq/csrc"
# The weights of the embedded models have a wheel for all platforms; those of platforms lack them.
MODELS, WEIGHTS = "kvq-models", "kvq_embedded"
LARGEST_BYTES = 6_000_000
OLDEST_GLIBC, OLDEST_MACOS = (2, 28), (12, 0)
GLIBC = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-*.so.?")
MUSL = ("libc.so",)
DARWIN = ("/usr/lib/libSystem.B.dylib", "/usr/lib/libc++.1.dylib")
WINDOWS = ("KERNEL32.dll", "ntdll.dll", "api-ms-win-crt-*-l1-1-0.dll")


@dataclass(frozen=True, slots=True)
class Platform:
    """Holds Zig's and CMake's names, and all libraries of the system that ours may need there."""

    target: str
    system: str
    processor: str
    needed: tuple[str, ...]

    @property
    def library(self) -> str:
        """Returns the library's name in a wheel."""
        suffix = {"Darwin": "dylib", "Windows": "dll"}.get(self.system, "so")
        return f"kvq/libkvq_native.{suffix}"

    @property
    def definitions(self) -> dict[str, str]:
        """Returns the definitions that CMake gets."""
        elf = f"-Wl,--version-script={SOURCES / 'exports.map'}" if self.system == "Linux" else ""
        # CMake's own trial programs are stripped too: else Zig builds its C++ library twice.
        compiler = (sys.executable, "-m", "ziglang", "c++", "-s", "-target", self.target)
        return {
            "CMAKE_SYSTEM_NAME": self.system,
            "CMAKE_SYSTEM_PROCESSOR": self.processor,
            "CMAKE_CXX_COMPILER": ";".join(compiler),
            "CMAKE_SHARED_LINKER_FLAGS": elf,
            "KVQ_DOTPROD": "-mcpu=generic+dotprod",
            # CMake insists that there be such programs and calls neither.
            "CMAKE_RC_COMPILER": sys.executable,
            "CMAKE_INSTALL_NAME_TOOL": sys.executable,
        }


PLATFORMS = {
    "manylinux_2_28_x86_64": Platform("x86_64-linux-gnu.2.28", "Linux", "x86_64", GLIBC),
    "manylinux_2_28_aarch64": Platform("aarch64-linux-gnu.2.28", "Linux", "aarch64", GLIBC),
    "musllinux_1_2_x86_64": Platform("x86_64-linux-musl", "Linux", "x86_64", MUSL),
    "macosx_12_0_arm64": Platform("aarch64-macos.12.0", "Darwin", "arm64", DARWIN),
    "macosx_12_0_x86_64": Platform("x86_64-macos.12.0", "Darwin", "x86_64", DARWIN),
    "win_amd64": Platform("x86_64-windows-gnu", "Windows", "AMD64", WINDOWS),
    "win_arm64": Platform("aarch64-windows-gnu", "Windows", "ARM64", WINDOWS),
}


def build(name: str, out: Path, folder: Path, jobs: int) -> Path:
    """Builds the wheel of platform `name` into `out`, with CMake's files in `folder`/`name`.

    `name` may be `MODELS`. Exits with the compiler's words if that fails.
    """
    if name == MODELS:
        return _built(name, ROOT / "models", {}, out, "kvq_models-*-py3-none-any.whl")
    settings = {
        "wheel.tags": f"py3-none-{name}",
        "wheel.cmake": "true",  # else a failed compilation makes a wheel without the library
        "wheel.exclude": WEIGHTS,
        "build-dir": str(folder / name),
        "build.tool-args": f"-j{jobs}",
        "install.strip": "false",  # this machine's tools cannot strip other platforms' files
    } | {f"cmake.define.{key}": value for key, value in PLATFORMS[name].definitions.items()}
    return _built(name, ROOT, settings, out, f"kvq_runtime-*-py3-none-{name}.whl")


def _built(name: str, source: Path, settings: dict[str, str], out: Path, wheels: str) -> Path:
    settings_flags = [f"--config-settings={key}={value}" for key, value in settings.items()]
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command = [*pip, f"--wheel-dir={out}", *settings_flags, str(source)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{name} was not built:\n{finished.stdout}{finished.stderr}")
    (wheel,) = out.glob(wheels)
    return wheel


def complaints(wheel: Path, name: str) -> Iterator[str]:
    """Yields what is wrong with a wheel of platform `name`, or of `MODELS`, one sentence each."""
    if name == MODELS:
        yield from _models_complaints(wheel)
        return
    platform = PLATFORMS[name]
    if (num_bytes := wheel.stat().st_size) > LARGEST_BYTES:
        yield f"it has {num_bytes} bytes, of {LARGEST_BYTES} at most"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (.*)", archive.read(about).decode(), re.MULTILINE)
        library = archive.read(platform.library) if platform.library in names else b""
    if tags != [f"py3-none-{name}"]:
        yield f"its tags are {tags}"
    native = [name for name in names if re.search(r"\.(so|dylib|dll|a|lib|exe)\b", name)]
    if native != [platform.library]:
        yield f"its native files are {native}, not {platform.library}"
    if sources := [name for name in names if re.search(r"CMakeLists|\.(cpp|cu|h|inl|map)$", name)]:
        yield f"it holds sources: {', '.join(sources)}"
    if weights := [name for name in names if name.startswith(f"{WEIGHTS}/")]:
        yield f"it holds weights, which {MODELS} brings: {', '.join(weights)}"
    if library:
        yield from _library_complaints(library, platform)


def _models_complaints(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    if foreign := sorted(name for name in names if not name.startswith(f"{WEIGHTS}/")):
        yield f"it holds what belongs to kvq-runtime: {', '.join(foreign)}"
    here = ROOT / "models"
    folders = [card.parent for card in (here / WEIGHTS).glob("*/config.json")]
    files = {file.relative_to(here).as_posix() for folder in folders for file in folder.iterdir()}
    if missing := sorted(files - names):
        yield f"it lacks {', '.join(missing)}"


def _library_complaints(content: bytes, platform: Platform) -> Iterator[str]:
    lief: Any = import_module("lief")
    lief.logging.disable()  # it says which optional parts of a file are not there
    binary = lief.parse(content)
    # A Mac's library names itself among those it needs.
    install_name = f"@rpath/{Path(platform.library).name}"
    for needed in (getattr(library, "name", library) for library in binary.libraries):
        if not any(fnmatch(needed, allowed) for allowed in (*platform.needed, install_name)):
            yield f"the library needs {needed}"
    text = (SOURCES / "kvq.h").read_text()
    declared = {*re.findall(r"^KVQ_EXPORT [^;]*?(\w+)\(", text, re.MULTILINE), "RegisterCustomOps"}
    shown = {function.name for function in binary.exported_functions if function.name}
    if platform.system == "Darwin":
        # There Zig's linker always exports its marks and C++'s new and delete as well.
        more = re.compile(r"_(__dso_handle|_mh_dylib_header|_Z(n[aw]|d[al]).*)")
        shown = {name.removeprefix("_") for name in shown if not more.fullmatch(name)}
    if shown != declared:
        yield f"it exports {sorted(shown - declared)} and lacks {sorted(declared - shown)}"
    machine = str(binary.abstract.header.architecture).rpartition(".")[2]
    if (machine == "ARM64") != (platform.processor in ("aarch64", "arm64", "ARM64")):
        yield f"the library is for {machine}"
    yield from _system_complaints(binary, platform)


def _system_complaints(binary: Any, platform: Platform) -> Iterator[str]:
    if platform.system == "Linux":
        for symbol in binary.imported_symbols:
            match = re.search(r"GLIBC_(\d+)\.(\d+)", str(symbol.symbol_version))
            if match and (int(match[1]), int(match[2])) > OLDEST_GLIBC:
                yield f"{symbol.name} is of {match[0]}"
    if platform.system == "Darwin":
        oldest = tuple(binary.build_version.minos[:2])
        if oldest > OLDEST_MACOS:
            yield f"the library asks for macOS {oldest}"
        if platform.processor == "arm64" and not binary.has_code_signature:
            yield "the library has no signature, without which such a Mac loads nothing"


def main() -> int:
    """Builds and checks the platforms on the command line; returns 1 if a wheel is not in order."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    choices = (*PLATFORMS, MODELS)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=", ".join(choices))
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--build", type=Path, default=ROOT / "build/wheels", help="CMake's folder")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time")
    arguments = parser.parse_args()
    if unknown := set(arguments.platforms) - set(choices):
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(choices)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for name in arguments.platforms or choices:
        print(f"{name}: ", end="", flush=True)
        since = time.perf_counter()
        wheel = build(name, arguments.out.resolve(), arguments.build.resolve(), arguments.jobs)
        seconds, problems = time.perf_counter() - since, list(complaints(wheel, name))
        print(f"{'not in order' if problems else 'ok'}, {seconds:.0f} s, {_sizes(wheel, name)}")
        for problem in problems:
            print(f"  {problem}")
        wrong += bool(problems)
    return int(wrong > 0)


def _sizes(wheel: Path, name: str) -> str:
    total = f"{wheel.stat().st_size / 1e6:.2f} MB"
    if name == MODELS:
        return total
    with zipfile.ZipFile(wheel) as archive:
        packed = {entry.filename: entry.compress_size for entry in archive.infolist()}
    return f"{total}, of which the library {packed.get(PLATFORMS[name].library, 0) / 1e6:.2f}"


if __name__ == "__main__":
    sys.exit(main())
