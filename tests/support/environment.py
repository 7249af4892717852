"""Environments for processes that a test starts."""

import os
import sys
from pathlib import Path

# The source roots are wherever this process found them.
ROOTS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
# A worker of xdist has the size of no terminal, which would be believed over the real one.
_NOT_PASSED_ON = ("NO_COLOR", "COLUMNS", "LINES")


def folders_in(home: Path) -> dict[str, str]:
    """Settings by which everything that kvq keeps lies in `home`."""
    names = ("CACHE", "CONFIG", "DATA", "STATE")
    return {f"XDG_{name}_HOME": str(home / name.lower()) for name in names}


def environment_in(home: Path) -> dict[str, str]:
    """A whole environment for `kvq` without a user's flags, whose folders are in `home`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVQ_")}
    for name in _NOT_PASSED_ON:
        clean.pop(name, None)
    return clean | ROOTS | folders_in(home)
