"""The models that can be had by a short name: what they are and where they come from, as data.

Fetches nothing. `catalogue.toml` beside this file is the data, and its head says what it means.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from kvq.errors import ModelError

FILE = Path(__file__).with_name("catalogue.toml")
Kind = Literal["hub", "wheel", "path"]

_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One place a model comes from: a hub id, a package and its version, or a path.

    `file` is the one GGUF file of a hub's repository, or a pattern that a package's file matches;
    `quantization` finds that file by a type such as Q4_K_M instead. What is not known of the file,
    its SHA-256 (hex) or its size, is None.
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
        where = "the hub" if self.kind == "hub" else "the package index"
        which = f":{self.quantization}" if self.quantization else ""
        return f"{where} ({self.place}{which})"


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueModel:
    """One model; `parameters` is how many its publisher says it has, such as `135 M`."""

    name: str
    parameters: str
    license: str
    good_for: str
    sources: tuple[Source, ...]


@cache
def catalogue() -> Mapping[str, CatalogueModel]:
    """The models of the installed catalogue, by name."""
    return read_catalogue(FILE.read_text(encoding="utf-8"))


def read_catalogue(text: str) -> dict[str, CatalogueModel]:
    """The models that TOML `text` names. Raises `ModelError` for what is not a catalogue."""
    try:
        models = [_model(row) for row in tomllib.loads(text)["model"]]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the catalogue of models cannot be read: {error!r}") from error
    found = {model.name: model for model in models}
    if len(found) < len(models):
        raise ModelError("the catalogue of models has two models of one name")
    return found


def _model(row: Mapping[str, Any]) -> CatalogueModel:
    name = str(row["name"])
    # It becomes the name of a folder.
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a model: small letters, digits, dots and hyphens")
    sources = tuple(_source(source) for source in row["sources"])
    if not sources:
        raise ValueError(f"{name} has no source")
    return CatalogueModel(
        name=name,
        parameters=str(row["parameters"]),
        license=str(row["license"]),
        good_for=str(row["good-for"]),
        sources=sources,
    )


def _source(row: Mapping[str, Any]) -> Source:
    (kind,) = (kind for kind in get_args(Kind) if kind in row)
    file, digest, num_bytes = row.get("file"), row.get("sha256"), row.get("bytes")
    if kind == "wheel" and not (file and digest and num_bytes):
        raise ValueError(f"{row[kind]}: a package's file needs its pattern, sha256 and bytes")
    if digest is not None and not _SHA256.fullmatch(digest):
        raise ValueError(f"{row[kind]}: {digest!r} is no SHA-256")
    return Source(kind=kind, place=str(row[kind]), file=file, sha256=digest, num_bytes=num_bytes)
