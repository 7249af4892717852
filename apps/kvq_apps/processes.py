"""Checks whether another process runs, on every system."""

import os
import sys

# Constants of Windows: the right to wait for a process, and the answer that it still runs.
_SYNCHRONIZE = 0x00100000
_WAIT_TIMEOUT = 0x102
_ACCESS_DENIED = 5


def is_alive(process: int) -> bool:
    """Says whether a process of this id runs; ids are reused, so it may be another process."""
    if sys.platform == "win32":
        # On Windows `os.kill(process, 0)` would interrupt it.
        import ctypes

        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.OpenProcess.restype = ctypes.c_void_p
        handle = kernel.OpenProcess(_SYNCHRONIZE, False, process)
        if not handle:
            return ctypes.get_last_error() == _ACCESS_DENIED
        try:
            return kernel.WaitForSingleObject(ctypes.c_void_p(handle), 0) == _WAIT_TIMEOUT
        finally:
            kernel.CloseHandle(ctypes.c_void_p(handle))
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
