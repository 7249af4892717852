"""Where the embedded models lie: in package `kvq_embedded`, which an installation may lack.

A checkout and what is installed from it have it; the wheels of kvq-runtime do not, since it is
several times their size.
"""

import importlib.util
from pathlib import Path

# Their folders, which are also what a user calls them.
NAMES = ("default", "nano")
PACKAGE = "kvq_embedded"
# What brings the package.
INSTALL = "pip install kvq-models"


def embedded_folder(name: str) -> Path | None:
    """The checkpoint folder of the embedded model `name`; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = (Path(folder) / name for folder in folders)
    return next((folder for folder in found if (folder / "config.json").exists()), None)


def installed_names() -> tuple[str, ...]:
    """The embedded models that are installed, by their names."""
    return tuple(name for name in NAMES if embedded_folder(name) is not None)
