"""From what a user asks `kvq pull` for to a model's name here and its sources. Fetches nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import ModelError
from kvq_apps import output
from kvq_apps.pulling.names import HUB_FILE, HUB_ID, is_name, name_here
from kvq_apps.pulling.stores import found_models
from kvq_models.catalogue import CatalogueModel, Source, catalogue
from kvq_models.embedded import NAMES as EMBEDDED
from kvq_runtime.gguf_format import is_gguf


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A model to pull: its name here, its sources in order, its licence where it is known."""

    name: str
    sources: tuple[Source, ...]
    license: str | None = None


def wanted(asked: str) -> Wanted:
    """What `asked` means: a name of the catalogue, a path, another program's model, a hub id.

    Raises `ModelError` naming what is possible.
    """
    for found in (in_catalogue(asked), _path(asked), _stored(asked), _hub(asked)):
        if found is not None:
            return _checked(found)
    known = [*catalogue(), *(one.name for one in found_models())]
    raise ModelError(
        f"there is no model {asked!r} to pull{output.did_you_mean(asked, known)}; give a name that "
        "`kvq pull --list` shows, a hub id such as Qwen/Qwen3-0.6B, hf.co/OWNER/REPOSITORY:TYPE "
        "for a GGUF file of the hub, or a path"
    )


def in_catalogue(name: str) -> Wanted | None:
    """The model of the catalogue that is called `name`."""
    model = catalogue().get(name)
    return None if model is None else _of_catalogue(model)


def names() -> Iterator[str]:
    """What can be pulled by a name that is known here."""
    yield from catalogue()
    yield from (one.name for one in found_models())


def _of_catalogue(model: CatalogueModel) -> Wanted:
    return Wanted(name=model.name, sources=model.sources, license=model.license)


def _path(asked: str) -> Wanted | None:
    path = Path(asked).expanduser()
    if not path.exists():
        return None
    whole = path.resolve()
    if not ((whole / "config.json").is_file() or (whole.is_file() and is_gguf(whole))):
        raise ModelError(
            f"{asked or '.'} is no model; give a checkpoint folder, which has a config.json, or a "
            "GGUF file"
        )
    name = whole.stem if whole.is_file() else whole.name
    return Wanted(name=name, sources=(Source(kind="path", place=str(whole)),))


def _stored(asked: str) -> Wanted | None:
    sources = [one.source for one in found_models() if one.name == asked]
    return Wanted(name=name_here(asked), sources=tuple(sources)) if sources else None


def _hub(asked: str) -> Wanted | None:
    match = HUB_FILE.fullmatch(asked)
    if match is None and not HUB_ID.fullmatch(asked):
        return None
    source = (
        Source(kind="hub", place=asked)
        if match is None
        else Source(kind="hub", place=match["id"], quantization=match["type"])
    )
    return Wanted(name=name_here(asked), sources=(source,))


def _checked(found: Wanted) -> Wanted:
    """Raises `ModelError` for a name that no model here can have."""
    if found.name in EMBEDDED:
        raise ModelError(
            f"{found.name} is the name of an embedded model; rename {found.sources[0]} to pull it"
        )
    if not is_name(found.name):
        raise ModelError(
            f"{found.name!r} cannot be a model's name here, which is made of letters, digits and "
            f". _ + -; rename {found.sources[0]} to pull it"
        )
    return found
