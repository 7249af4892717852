"""Finds the embedded models in the package `kvq_embedded`, which an installation may lack.

A checkout, and what is installed from it, has the package. The wheels of kvq-runtime do not, since
it is several times their size.
"""

import importlib.util
from pathlib import Path

# The folders of the embedded models, which are also their names.
NAMES = ("default", "nano")
PACKAGE = "kvq_embedded"
# The command that installs the package.
INSTALL = "pip install kvq-models"


def embedded_folder(name: str) -> Path | None:
    """Returns the checkpoint folder of the embedded model `name`; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    candidates = (Path(folder) / name for folder in folders)
    return next((folder for folder in candidates if (folder / "config.json").exists()), None)


def installed_names() -> tuple[str, ...]:
    """Returns the names of the embedded models that are installed."""
    return tuple(name for name in NAMES if embedded_folder(name) is not None)
