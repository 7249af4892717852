"""Finds the folder of a checkpoint: a path as it is, a hub id by the hub's cache.

Knows no tensor. `hub_files` brings the files of a hub id.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import ModelError
from kvq_export.phases import Progress, no_progress
from kvq_export.read.hub_files import fetch_checkpoint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """Says where a checkpoint lies here; `name` is a hub id or folder name, `revision` a commit."""

    folder: Path
    name: str
    revision: str | None = None


def locate(source: str | Path, progress: Progress = no_progress) -> Located:
    """Returns where `source` is on this machine; `progress` gets how far a download is.

    Raises `ModelError` for what is neither, and for a download that cannot be made.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return Located(folder=folder, name=folder.resolve().name)
    if folder.exists():
        raise ModelError(f"{source} is a file; give the checkpoint folder that holds config.json")
    if not _HUB_ID.fullmatch(str(source)):
        raise ModelError(
            f"there is no checkpoint at {source}; give a Hugging Face checkpoint folder, "
            "or a hub id such as Qwen/Qwen3-0.6B"
        )
    folder = fetch_checkpoint(str(source), progress)
    return Located(folder=folder, name=str(source), revision=folder.name)
