"""The kernel set `amxint8` on emulated tiles: products, and machines that are not offered it.

No processor here need have AMX: `tests/support/emulated_tiles.h` computes its instructions and
refuses what a processor would. `test_parity` replays all recorded calls on the same emulation.
"""

import ctypes
import itertools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvq import native_library
from kvq.native_linear import VIEWS, linear
from kvq.reference import linear as reference_linear
from kvq.reference.linear import BlockFormat, Float, PanelFormat
from matrices import FORMATS, activations, matrix
from native_calls import select_isa
from shelf import Shelf
from tolerances import PRODUCT

pytestmark = [
    pytest.mark.slow,  # builds what it runs
    pytest.mark.usefixtures("kernels_restored"),
    pytest.mark.skipif(not native_library.available(), reason=native_library.why_not()),
]

ROOT = Path(__file__).parents[2]
CSRC, SUPPORT = ROOT / "kvq/csrc", ROOT / "tests/support"
SOURCES = (
    SUPPORT / "tiles.cpp",
    *(CSRC / name for name in (
        "kernels/amxint8.cpp", "linear/amxint8.cpp", "linear/linear.cpp", "platform.cpp",
    )),
)  # fmt: skip
FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-ffp-contract=off", "-I", CSRC,
    "-include", SUPPORT / "emulated_tiles.h",
)  # fmt: skip
# Where the processor has AVX-512, tiles are emulated beside its vectors, else beside plain C++.
VECTORS = (
    "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq",
    "-mavx512vnni",
)  # fmt: skip
VECTORS_HERE = (
    VECTORS if native_library.available() and "avx512vnni" in native_library.isas() else ()
)
# (rows, columns): less than a panel, odd everything, several blocks of every size.
SHAPES = ((5, 7), (33, 449))
# From a tile of sixteen on: one, two and three tiles, whole and not, rows that are left over, and
# more than one call has.
ROWS = (16, 17, 32, 35, 47, 48, 49, 63, 100, 209)


@pytest.fixture(scope="module")
def built(shelf: Shelf) -> Path:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    headers = (*CSRC.rglob("*.h"), *CSRC.rglob("*.inl"), SUPPORT / "emulated_tiles.h", *SOURCES)
    contents = b"".join(path.read_bytes() for path in sorted(headers))

    def build(path: Path) -> None:
        subprocess.run(["g++", *FLAGS, *VECTORS_HERE, *SOURCES, "-o", path], check=True)

    return shelf.once("libkvq_tiles.so", (contents, VECTORS_HERE), build)


@contextmanager
def by_tiles(built: Path) -> Iterator[None]:
    """Products meanwhile are those of emulated tiles."""
    library = ctypes.CDLL(str(built))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "load", lambda: (library, ""))
        yield


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_bit_for_bit_those_of_vectors(kind: BlockFormat, built: Path) -> None:
    """And of one row after the other, and close to the definition."""
    select_isa("avx512vnni" if VECTORS_HERE else "generic")
    for shape, view in itertools.product(SHAPES, VIEWS):
        form = PanelFormat.of(kind, shape)
        panels, x = matrix(form)[1], activations(max(ROWS), shape[1])
        expected = linear(form, panels, x, view=view)
        close(expected, reference_linear.linear(form, panels, x, view))
        with by_tiles(built):
            for rows in ROWS:
                actual = linear(form, panels, x[:rows], view=view)
                np.testing.assert_array_equal(actual, expected[:rows])


def close(actual: Float, expected: Float) -> None:
    size = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(actual - expected) <= PRODUCT.top * size).all()


def test_no_tile_reaches_beyond_the_rows(built: Path) -> None:
    script = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1])\n"
        "for rows in map(int, sys.argv[2:]): library.kvq_multiply_at_the_end_of_memory(rows)"
    )
    rows = (str(count) for count in ROWS if count <= 48)
    subprocess.run([sys.executable, "-c", script, built, *rows], check=True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_row_only(value: float, built: Path) -> None:
    form = PanelFormat(rows=20, columns=100, bits=6, block=32)
    panels, x = matrix(form)[1], activations(20, 100)
    x[17, 99] = value
    with by_tiles(built):
        actual, clean = (linear(form, panels, rows) for rows in (x, np.delete(x, 17, axis=0)))
    assert np.isnan(actual[17]).all()
    np.testing.assert_array_equal(np.delete(actual, 17, axis=0), clean)


@pytest.mark.parametrize(
    ("machine", "kernels", "reason"),
    [
        ("", "amxint8", ""),
        ("refused", "", "the system grants this process no registers"),
        ("faults", "", "a process that tried it ended or computed something else"),
        ("wrong", "", "a process that tried it ended or computed something else"),
    ],
)
def test_tiles_are_offered_where_another_process_survives_them(
    machine: str, kernels: str, reason: str, built: Path
) -> None:
    """Who asks goes on, and nothing is said of the process that ended."""
    script = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1])\n"
        "for name in ('kvq_isa', 'kvq_isa_refused'):\n"
        "    call = getattr(library, name); call.restype = ctypes.c_char_p\n"
        "    print(call().decode())"
    )
    finished = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script, built], check=True, text=True,
        capture_output=True, env={**os.environ, "KVQ_TILES": machine},
    )  # fmt: skip
    assert finished.stderr == ""
    selected, said = finished.stdout.splitlines()
    assert selected == kernels
    assert reason in said
    assert bool(reason) == bool(said)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_the_installed_library_has_the_instructions_themselves() -> None:
    if not shutil.which("objdump"):
        pytest.skip("objdump is not installed")
    library = native_library.library_path()
    assert library
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], check=True, capture_output=True
    ).stdout
    for name in (b"ldtilecfg", b"tileloadd", b"tdpbsud", b"tilestored", b"tilerelease"):
        assert name in listing
