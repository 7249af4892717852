"""Finds the name and the sources of the model that a user asks `kvq pull` for."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvq.errors import ModelError
from kvq.files import path_of
from kvq_apps.names.model_names import HUB_FILE, is_hub_id, is_name, local_name
from kvq_apps.names.stores import stored_models
from kvq_apps.terminal import output
from kvq_models.catalogue import EMBEDDED, CatalogueSource, catalogue
from kvq_runtime.bundle.gguf_format import is_gguf


@dataclass(frozen=True, kw_only=True, slots=True)
class PullRequest:
    """Holds a model to pull: its local name, its sources in order, its licence if known."""

    name: str
    sources: tuple[CatalogueSource, ...]
    license: str | None = None


def parse_pull_request(name: str) -> PullRequest:
    """Returns what `name` means: a catalogue name, a path, another program's model, a hub id.

    Raises a `ModelError` that says what is possible.
    """
    for request in (in_catalogue(name), _path(name), _stored(name), _hub(name)):
        if request is not None:
            return _check(request)
    known = [*catalogue(), *(model.name for model in stored_models())]
    raise ModelError(
        f"there is no model {name!r} to pull{output.did_you_mean(name, known)}; give a name that "
        "`kvq pull --list` shows, a hub id such as Qwen/Qwen3-0.6B, hf.co/OWNER/REPOSITORY:TYPE "
        "for a GGUF file of the hub, or a path"
    )


def in_catalogue(name: str) -> PullRequest | None:
    """Returns the request for the model of the catalogue called `name`, if there is one."""
    model = catalogue().get(name)
    if model is None:
        return None
    return PullRequest(name=model.name, sources=model.sources, license=model.license)


def names() -> Iterator[str]:
    """Yields the names that can be pulled: of the catalogue and of other programs' models."""
    yield from catalogue()
    yield from (model.name for model in stored_models())


def _path(text: str) -> PullRequest | None:
    path = path_of(text, ModelError)
    if not path.exists():
        return None
    resolved = path.resolve()
    if not ((resolved / "config.json").is_file() or (resolved.is_file() and is_gguf(resolved))):
        raise ModelError(
            f"{text or '.'} is no model; give a checkpoint folder, which has a config.json, or a "
            "GGUF file"
        )
    name = resolved.stem if resolved.is_file() else resolved.name
    return PullRequest(name=name, sources=(CatalogueSource(kind="path", place=str(resolved)),))


def _stored(name: str) -> PullRequest | None:
    sources = [model.source for model in stored_models() if model.name == name]
    return PullRequest(name=local_name(name), sources=tuple(sources)) if sources else None


def _hub(name: str) -> PullRequest | None:
    match = HUB_FILE.fullmatch(name)
    if not is_hub_id(name if match is None else match["id"]):
        return None
    source = (
        CatalogueSource(kind="hub", place=name)
        if match is None
        else CatalogueSource(kind="hub", place=match["id"], quantization=match["type"])
    )
    return PullRequest(name=local_name(name), sources=(source,))


def _check(request: PullRequest) -> PullRequest:
    """Returns the request. Raises `ModelError` for a name that no local model can have."""
    if request.name in EMBEDDED:
        raise ModelError(
            f"{request.name} is the name of an embedded model; rename {request.sources[0]} to pull "
            "it"
        )
    if not is_name(request.name):
        raise ModelError(
            f"{request.name!r} cannot be a model's name here, which is made of letters, digits and "
            f". _ + -; rename {request.sources[0]} to pull it"
        )
    return request
