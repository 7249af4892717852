"""The models that have a short name: what they are and where they come from.

The data is in `catalogue.toml` beside this file, whose head explains it. Nothing is fetched here.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from kvq.errors import ModelError, reason_of

FILE = Path(__file__).with_name("catalogue.toml")
Kind = Literal["hub", "wheel", "path"]

# The first question for a model for which the catalogue has no other.
FIRST_QUESTION = "What is photosynthesis? Answer in one sentence."

_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueSource:
    """Describes one place that a model comes from: a hub id, a package and its version, or a path.

    `file` is the GGUF file of a hub repository, or a pattern for the file of a package;
    `quantization` finds that file by a type such as Q4_K_M instead. `sha256` (hex) and `num_bytes`
    of the file are None if they are unknown.
    """

    kind: Kind
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
    question: str
    sources: tuple[CatalogueSource, ...]


@cache
def catalogue() -> Mapping[str, CatalogueModel]:
    """Returns the models of the installed catalogue, by name."""
    return read_catalogue(FILE.read_text(encoding="utf-8"))


def read_catalogue(text: str) -> dict[str, CatalogueModel]:
    """Returns the models in the TOML `text`. Raises `ModelError` for what is not a catalogue."""
    try:
        models = [_model(row) for row in tomllib.loads(text)["model"]]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the catalogue of models cannot be read: {reason_of(error)}") from error
    by_name = {model.name: model for model in models}
    if len(by_name) < len(models):
        raise ModelError("the catalogue of models has two models of one name")
    return by_name


def _model(row: Mapping[str, Any]) -> CatalogueModel:
    name = str(row["name"])
    # The name becomes that of a folder.
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a model: small letters, digits, dots and hyphens")
    sources = tuple(_source(source) for source in row["sources"])
    if not sources:
        raise ValueError(f"{name} has no source")
    return CatalogueModel(
        name=name,
        parameters=str(row["parameters"]),
        memory=str(row["memory"]),
        license=str(row["license"]),
        good_for=str(row["good-for"]),
        question=str(row.get("try", FIRST_QUESTION)),
        sources=sources,
    )


def _source(row: Mapping[str, Any]) -> CatalogueSource:
    (kind,) = (kind for kind in get_args(Kind) if kind in row)
    file, digest, num_bytes = row.get("file"), row.get("sha256"), row.get("bytes")
    if kind == "wheel" and not (file and digest and num_bytes):
        raise ValueError(f"{row[kind]}: a package's file needs its pattern, sha256 and bytes")
    if digest is not None and not _SHA256.fullmatch(digest):
        raise ValueError(f"{row[kind]}: {digest!r} is no SHA-256")
    return CatalogueSource(
        kind=kind, place=str(row[kind]), file=file, sha256=digest, num_bytes=num_bytes
    )
