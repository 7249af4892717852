"""Finds and loads the compiled library; says what to install where there is none."""

import ctypes
import sys
from functools import cache
from pathlib import Path

from kvq.abi import ABI, SIGNATURES
from kvq.errors import BackendError
from kvq.settings import environment

LIBRARY = "libkvq_native" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_GET_WHEEL = "pip install --force-reinstall --no-deps --only-binary :all: kvq-runtime"
_BUILD = "install g++, then: pip install -e ."


@cache
def library_path() -> Path | None:
    """Returns where the library is, in any folder of the package: an editable install has two."""
    import kvq

    for folder in kvq.__path__:
        path = Path(folder) / LIBRARY
        if path.is_file():
            return path
    return None


@cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Returns the library, or None and the reason, ending in the command that mends it."""
    path = library_path()
    mend = _BUILD if Path(__file__).parents[1].joinpath("CMakeLists.txt").is_file() else _GET_WHEEL
    if path is None:
        return None, f"{LIBRARY}, the compiled library, is not in this installation; {mend}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} does not load: {error}; {mend}"
    # A library left over from another version would be called with arguments it does not take.
    if not hasattr(library, "kvq_abi") or library.kvq_abi() != ABI:
        return None, f"{path} belongs to another version of kvq; {mend}"
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    choice = environment("isa")
    if choice and library.kvq_isa_select(choice.encode()):
        available = library.kvq_isa_available().decode()
        name, _, reason = library.kvq_isa_refused().decode().partition(": ")
        why = f", since {reason}" if name == choice else ""
        raise BackendError(
            f"KVQ_ISA={choice} is not possible here{why}; this machine runs {available}"
        )
    return library, ""


def available() -> bool:
    """Returns whether the native library can be used."""
    return load()[0] is not None


def why_not() -> str:
    """Returns why the library cannot be used; empty if it can."""
    return load()[1]


def library() -> ctypes.CDLL:
    """Returns the loaded library. Raises `BackendError` with the reason if there is none."""
    loaded, reason = load()
    if loaded is None:
        raise BackendError(f"kvq cannot run a model here: {reason}")
    return loaded


def isa() -> str:
    """Returns the name of the kernels in use: one of `reference/processors.md`, such as `avx2`."""
    return library().kvq_isa().decode()


def isas() -> list[str]:
    """Returns the names of the kernels this machine can run, best first."""
    return library().kvq_isa_available().decode().split(",")


def isa_refused() -> str:
    """Returns `NAME: why` of kernels that the processor announces and that fail here; or empty."""
    return library().kvq_isa_refused().decode()
