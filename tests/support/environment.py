"""Environments for processes that a test starts."""

import os
import sys
from pathlib import Path

import pytest

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


def node_modules(package: str) -> Path:
    """The folder of Node packages that holds `package`, or a skip.

    KVQ_NODE_MODULES and NODE_PATH name such folders.
    """
    for variable in ("KVQ_NODE_MODULES", "NODE_PATH"):
        for folder in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            if Path(folder, package, "package.json").is_file():
                return Path(folder).absolute()
    pytest.skip(f"neither KVQ_NODE_MODULES nor NODE_PATH holds the npm package {package}")
