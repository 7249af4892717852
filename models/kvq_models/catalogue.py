"""The models that have a short name: what they are, where they come from, which are embedded.

The data is in `catalogue.toml` beside this file, whose head explains it. Nothing is fetched here.

The embedded models are in the package `kvq_embedded`. A checkout, and what is installed from it,
has the package. The wheels of kvq-runtime do not, since it is several times their size.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

FILE = Path(__file__).with_name("catalogue.toml")
# The folders of the embedded models, which are also their names.
EMBEDDED = ("default", "nano")
PACKAGE = "kvq_embedded"
# The command that installs the package.
INSTALL = "pip install kvq-models"

# The first question for a model for which the catalogue has no other.
FIRST_QUESTION = "What is photosynthesis? Answer in one sentence."


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueSource:
    """Describes one place that a model comes from: a hub id, a package and its version, or a path.

    `file` is the GGUF file of a hub repository, or a pattern for the file of a package;
    `quantization` finds that file by a type such as Q4_K_M instead. `sha256` (hex) and `num_bytes`
    of the file are None if they are unknown.
    """

    kind: Literal["hub", "wheel", "path"]
    place: str
    file: str | None = None
    quantization: str | None = None
    sha256: str | None = None
    num_bytes: int | None = None

    def __str__(self) -> str:
        if self.kind == "path":
            return self.place
        origin = "the hub" if self.kind == "hub" else "the package index"
        which = f":{self.quantization}" if self.quantization else ""
        return f"{origin} ({self.place}{which})"


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueModel:
    """Describes one model; `parameters` is how many its publisher counts, such as `135 M`.

    `memory` is about what its weights and a session's cache take. `question` is a first question
    for it.
    """

    name: str
    parameters: str
    memory: str
    license: str
    good_for: str
    sources: tuple[CatalogueSource, ...]
    question: str = FIRST_QUESTION


@cache
def catalogue() -> Mapping[str, CatalogueModel]:
    """Returns the models of the installed catalogue, by name."""
    import tomllib

    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))["model"]
    return {
        row["name"]: CatalogueModel(
            **row | {"sources": tuple(CatalogueSource(**source) for source in row["sources"])}
        )
        for row in rows
    }


def embedded_folder(name: str) -> Path | None:
    """Returns the checkpoint folder of the embedded model `name`; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    candidates = (Path(folder) / name for folder in folders)
    return next((folder for folder in candidates if (folder / "config.json").exists()), None)


def installed_names() -> tuple[str, ...]:
    """Returns the names of the embedded models that are installed."""
    return tuple(name for name in EMBEDDED if embedded_folder(name) is not None)
