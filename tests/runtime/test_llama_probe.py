"""A llama.cpp that ends programs is found out in a process of its own, once per build."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvq.errors import BackendError
from kvq.settings import cache_folder
from kvq_apps import model_path
from kvq_apps.bench.engines import check_peers
from kvq_apps.cli import main
from kvq_export.gguf_llama import llama_missing
from kvq_runtime import device
from kvq_runtime.backends import llama_library, llama_probe
from kvq_runtime.gguf_file import GgufFile

# A package in llama-cpp-python's place: it notes that a process loads it, then does as told.
PACKAGE = """
import os, signal, sys
from unittest.mock import MagicMock
with open({starts!r}, "a") as starts:
    starts.write("x")
{what}
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(return_value=0) if name == "llama_decode" else MagicMock()
"""
COMPUTES = "__version__ = '0'"
FAULTS = ("SIGILL", "SIGSEGV", "SIGBUS")


def killed_by(name: str) -> str:
    return f"os.kill(os.getpid(), signal.{name})"


class Install:
    """A build of llama-cpp-python, made again by every call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library = folder / "llama_cpp" / "lib" / "libggml-cpu.so"
        self.library.parent.mkdir(parents=True)
        self._starts = folder / "starts"

    def __call__(self, what: str) -> None:
        source = PACKAGE.format(starts=str(self._starts), what=what)
        (self.folder / "llama_cpp" / "__init__.py").write_text(source)
        shutil.rmtree(self.folder / "llama_cpp" / "__pycache__", ignore_errors=True)

    @property
    def starts(self) -> int:
        return len(self._starts.read_text()) if self._starts.exists() else 0


def next_process() -> None:
    """What this process has found out is forgotten; the cache folder stays."""
    llama_probe._tried.cache_clear()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    install = Install(tmp_path / "packages")
    monkeypatch.syspath_prepend(install.folder)
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    install.library.write_bytes(b"first build")
    return install


# A build that ends programs


@pytest.mark.parametrize("name", FAULTS)
def test_a_build_that_ends_programs_is_named_with_what_to_do(install: Install, name: str) -> None:
    install(killed_by(name))
    reason = llama_library.missing()
    assert reason is not None
    assert f"ends the program that computes with it ({name})" in reason
    assert f"the build in {install.library.parent} uses instructions that this machine" in reason
    flags = llama_probe.build_flags()
    assert reason.endswith(
        f'CMAKE_ARGS="{flags}" pip install --force-reinstall --no-deps --no-cache-dir --no-binary '
        "llama-cpp-python llama-cpp-python"
    )


def test_everything_that_opens_llama_cpp_says_so(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(killed_by("SIGSEGV"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(model_path, "_computed", lambda file, _: file)
    file = tmp_path / "zeros.gguf"
    file.write_bytes(llama_probe._zeros())
    for words in (["run", "-m", str(file), "hello"], ["bench", str(file)]):
        assert main(words) == 2
        assert "ends the program that computes with it (SIGSEGV)" in capsys.readouterr().err
    assert main(["doctor", "--json"]) == 0
    assert "computes with it (SIGSEGV)" in capsys.readouterr().out
    assert "(SIGSEGV)" in str(llama_missing())
    if importlib.util.find_spec("gguf") is not None:
        with pytest.raises(BackendError, match=r"llama.cpp cannot run here: .*\(SIGSEGV\)"):
            check_peers(["llama.cpp"])
    assert install.starts == 1


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["sys.exit(1)", "raise ImportError", killed_by("SIGTERM")])
def test_other_ends_are_left_to_whoever_loads_it(install: Install, what: str) -> None:
    """They are errors with words of their own, or none of the build's, and may be over then."""
    install(what)
    for count in (1, 2):
        assert llama_library.missing() is None
        assert install.starts == count
        next_process()


# What is remembered


def test_a_build_that_computes_is_tried_once(install: Install) -> None:
    install(COMPUTES)
    for _ in range(3):
        assert llama_library.missing() is None
        assert install.starts == 1
        next_process()


def replace(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install.library.write_bytes(b"a second build")


def touch(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(install.library, (1, 1))


def move(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(install.library.parent, install.folder / "elsewhere")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(install.folder / "elsewhere"))


def migrate(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "instructions", lambda: frozenset({"sse2", "amx_tile"}))


@pytest.mark.sampled
@pytest.mark.parametrize("change", [replace, touch, move, migrate])
def test_another_build_or_processor_is_tried_again(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Install, pytest.MonkeyPatch], None],
) -> None:
    install(COMPUTES)
    assert llama_library.missing() is None
    install(killed_by("SIGILL"))
    assert llama_library.missing() is None
    change(install, monkeypatch)
    assert "(SIGILL)" in str(llama_library.missing())
    assert install.starts == 2


def test_a_fault_is_not_held_against_the_next_process(install: Install) -> None:
    """A machine can be mended, too."""
    install(killed_by("SIGILL"))
    for _ in range(2):
        assert "(SIGILL)" in str(llama_library.missing())
    assert install.starts == 1
    next_process()
    install(COMPUTES)
    assert llama_library.missing() is None


def test_a_cache_that_cannot_be_written_costs_a_trial_only(
    install: Install, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_bytes(b"")
    install(COMPUTES)
    assert llama_library.missing() is None
    assert install.starts == 1


# What a build is told


@pytest.mark.parametrize(
    ("here", "flags"),
    [
        ("", "-DGGML_NATIVE=OFF"),
        ("neon asimd", "-DGGML_NATIVE=OFF"),
        (
            "sse2 sse4_2 avx avx2 bmi2 fma f16c avx512f avx512_vnni",
            "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON "
            "-DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX_VNNI=OFF -DGGML_AVX512=OFF "
            "-DGGML_AVX512_VBMI=OFF -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=OFF",
        ),
        (
            "sse2 sse4_2 avx avx512f avx512cd avx512bw avx512dq avx512vl amx_tile amx_int8",
            "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=OFF -DGGML_BMI2=OFF "
            "-DGGML_FMA=OFF -DGGML_F16C=OFF -DGGML_AVX_VNNI=OFF -DGGML_AVX512=ON "
            "-DGGML_AVX512_VBMI=OFF -DGGML_AVX512_VNNI=OFF -DGGML_AVX512_BF16=OFF",
        ),
    ],
)
def test_flags_are_what_the_processor_has(
    monkeypatch: pytest.MonkeyPatch, here: str, flags: str
) -> None:
    monkeypatch.setattr(device, "instructions", lambda: frozenset(here.split()))
    assert llama_probe.build_flags() == flags


# The trial itself


def test_the_model_of_the_trial_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "zeros.gguf"
    path.write_bytes(llama_probe._zeros())
    file = GgufFile.open(path)
    assert (file.num_layers, file.vocab_size, file.head_dims) == (2, 64, (64, 64))
    kinds = {tensor.kind.name for tensor in file.contents.tensors}
    assert kinds == {"F32", "Q4_0", "Q8_0"}


def test_a_real_llama_cpp_passes() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    next_process()
    if reason := llama_library.missing():
        pytest.skip(reason)
    assert llama_probe._status() == 0
    assert len(list((cache_folder() / "llama.cpp").iterdir())) == 1


# Products of several rows, by instruction sets: no other product calls them.
SEVERAL_ROWS = (
    "ggml_gemm_q4_0_8x8_q8_0",
    "_Z23ggml_backend_amx_mul_matPK19ggml_compute_paramsP11ggml_tensor",
)


def test_a_real_llama_cpp_with_an_impossible_product_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions for products of several rows begin with an instruction no processor has."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    if sys.platform != "linux" or "avx2" not in device.instructions():
        pytest.skip("other processors have other products")
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    folder = tmp_path / "lib"
    shutil.copytree(Path(str(spec.origin)).parent / "lib", folder)
    (library,) = folder.glob("libggml-cpu.so")
    offsets = [file_offset(library, name) for name in SEVERAL_ROWS]
    assert any(offsets)
    for path in folder.glob("libggml-cpu.so*"):
        content = bytearray(path.read_bytes())
        for offset in filter(None, offsets):
            content[offset : offset + 2] = b"\x0f\x0b"  # ud2
        path.unlink()
        path.write_bytes(content)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(folder))
    assert -llama_probe._status() == signal.SIGILL


def file_offset(library: Path, name: str) -> int | None:
    """Where a function begins in the file of a library, or None."""
    function = getattr(ctypes.CDLL(str(library)), name, None)
    if function is None:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    rows = re.findall(
        rf"(\w+)-(\w+) \S+ (\w+) .*{re.escape(str(library))}", Path("/proc/self/maps").read_text()
    )
    for start, stop, offset in ([int(word, 16) for word in row] for row in rows):
        if start <= address < stop:
            return address - start + offset
    raise AssertionError(name)
