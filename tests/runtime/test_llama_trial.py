"""A file or a build that ends llama.cpp is found in a process of its own, once for each."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvq.errors import ModelError
from kvq_runtime.backends import llama_library
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.machine import device

pytest.importorskip("gguf", reason="the gguf package is not installed")

from tiny_gguf import write_gguf


class Trials:
    """Stands for the processes: counts them, and ends as `returncode` says."""

    def __init__(self) -> None:
        self.returncode = self.count = 0

    def run(self, *_: object, **__: object) -> SimpleNamespace:
        self.count += 1
        return SimpleNamespace(returncode=self.returncode, stderr=b"")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empties the cache folder; llama.cpp need not be installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(llama_library, "version", lambda _: "1")


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    trials = Trials()
    monkeypatch.setattr(llama_library.subprocess, "run", trials.run)
    return trials


@pytest.fixture
def file(tmp_path: Path) -> GgufFile:
    return GgufFile.open(write_gguf(tmp_path / "one.gguf", num_layers=1))


@pytest.mark.parametrize("returncode", [-4, -11, -6, 0xC000001D])
def test_what_ends_the_program_is_named_with_what_to_do(
    trials: Trials, file: GgufFile, returncode: int
) -> None:
    trials.returncode = returncode
    for count in (1, 2):
        with pytest.raises(ModelError) as caught:
            llama_library.check(file)
        assert trials.count == count
    assert f"ends the program that runs {file.path} (status {returncode})" in str(caught.value)
    assert str(caught.value).endswith(
        'CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install --force-reinstall --no-deps --no-cache-dir '
        "--no-binary llama-cpp-python llama-cpp-python"
    )


@pytest.mark.parametrize(("returncode", "count"), [(0, 1), (llama_library.REFUSED, 2)])
def test_what_passed_is_not_tried_again(
    trials: Trials, file: GgufFile, returncode: int, count: int
) -> None:
    """What is refused in words passes, as the caller will be refused too, and is tried again."""
    trials.returncode = returncode
    for _ in range(2):
        llama_library.check(file)
    assert trials.count == count


def test_files_of_our_own_try_the_build_alone(
    trials: Trials, file: GgufFile, tmp_path: Path
) -> None:
    other = GgufFile.open(write_gguf(tmp_path / "other.gguf", num_layers=1, seed=1))
    for ours in (file.trusted(), other.trusted()):
        llama_library.check(ours)
    assert trials.count == 1
    for strange in (file, other):
        llama_library.check(strange)
    assert trials.count == 3


def test_another_version_or_processor_is_tried_again(
    trials: Trials, file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_library.check(file)
    monkeypatch.setattr(llama_library, "version", lambda _: "2")
    llama_library.check(file)
    monkeypatch.setattr(device, "probe", lambda: SimpleNamespace(processor="another"))
    llama_library.check(file)
    assert trials.count == 3


def test_a_cache_that_cannot_be_written_costs_a_trial_only(
    trials: Trials, file: GgufFile, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_bytes(b"")
    for _ in range(2):
        llama_library.check(file)
    assert trials.count == 2


def test_a_file_that_takes_too_long_is_refused(
    file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(llama_library.subprocess, "run", run)
    with pytest.raises(ModelError, match=r"did not load .* it is damaged, or too large"):
        llama_library.check(file)


# Products of several rows, by instruction sets: no other product calls them.
SEVERAL_ROWS = (
    "ggml_gemm_q4_0_8x8_q8_0",
    "_Z23ggml_backend_amx_mul_matPK19ggml_compute_paramsP11ggml_tensor",
)


def test_a_real_llama_cpp_with_an_impossible_product_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begins its functions for products of several rows with an impossible instruction."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    if sys.platform != "linux" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("other processors have other products")
    file = GgufFile.open(write_gguf(tmp_path / "four.gguf", kind="Q4_0"))
    llama_library.check(file)
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    folder = tmp_path / "altered"
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
    monkeypatch.setattr(llama_library, "version", lambda _: "altered")
    with pytest.raises(ModelError, match=r"ends the program that runs .* \(status -4\)"):
        llama_library.check(file)


def file_offset(library: Path, name: str) -> int | None:
    """Returns where a function begins in the file of a library, or None."""
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
