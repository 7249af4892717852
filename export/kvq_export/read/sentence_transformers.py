"""Reads how a checkpoint makes vectors of texts, from the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

from kvq.errors import CheckpointError, UnsupportedModelError, reason_of
from kvq_models.keys import read_json
from kvq_runtime.text_embedding import Pooling, TextEmbedding

_MODULES, _POOLING = "modules.json", "1_Pooling/config.json"
_PROMPTS = "config_sentence_transformers.json"
EMBEDDING_FILES = (_MODULES, _POOLING, _PROMPTS)
# What `1_Pooling/config.json` calls the poolings, in its older form as a switch of its own each.
_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_SWITCH = "pooling_mode_"
_SWITCHES = {f"{_SWITCH}lasttoken": "lasttoken", f"{_SWITCH}mean_tokens": "mean"}
# Modules that say nothing more.
_TRANSFORMER, _POOL, _NORMALIZE = "Transformer", "Pooling", "Normalize"


def read_embedding(folder: Path) -> TextEmbedding | None:
    """Returns how the checkpoint in `folder` makes vectors; None where its files do not say.

    Raises `CheckpointError` for a damaged file, and `UnsupportedModelError` for a pooling or a
    module that is not possible.
    """
    if not (folder / _MODULES).is_file():
        return None
    try:
        rows: Any = json.loads((folder / _MODULES).read_text(encoding="utf-8"))
        modules = [str(row["type"]).rpartition(".")[2] for row in rows]
    except (OSError, ValueError, RecursionError, TypeError, LookupError) as error:
        message = f"{folder / _MODULES} is no list of modules: {reason_of(error)}"
        raise CheckpointError(message) from error
    other = [name for name in modules if name not in (_TRANSFORMER, _POOL, _NORMALIZE)]
    if other:
        raise UnsupportedModelError(
            f"{folder / _MODULES} makes vectors by a module {other[0]}, which kvq has not; "
            f"possible are {_TRANSFORMER}, {_POOL} and {_NORMALIZE}"
        )
    settings = _object(folder / _PROMPTS)
    prompts: Any = settings.get("prompts") or {}
    return TextEmbedding(
        pooling=_pooling(folder),
        normalized=_NORMALIZE in modules,
        prompts={str(kind): str(text) for kind, text in prompts.items()},
        default_prompt=settings.get("default_prompt_name"),
    )


def _pooling(folder: Path) -> Pooling:
    path = folder / _POOLING
    settings = _object(path)
    mode = settings.get("pooling_mode")
    switches = [name for name, on in settings.items() if name.startswith(_SWITCH) and on is True]
    modes = [str(mode)] if mode else [_SWITCHES.get(name, name) for name in switches]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModelError(
            f"{path} asks for the pooling {', '.join(modes) or 'of no name'}; possible are "
            f"{' and '.join(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]]


def _object(path: Path) -> dict[str, Any]:
    """Returns the object in a file, an empty one without the file."""
    return read_json(path) if path.is_file() else {}
