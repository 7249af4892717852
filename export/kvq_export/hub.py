"""From what a user calls a checkpoint to a folder: a path as it is, a hub id by the hub's cache.

Knows no tensor. Downloads are resumed by huggingface_hub, and a finished one is found offline.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import BackendError, ModelError

# Weights as safetensors and what reads text; no pickles, no code.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
    "LICENSE*",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A checkpoint on this machine; `name` is a hub id or folder name, `revision` a hub commit."""

    folder: Path
    name: str
    revision: str | None = None


def locate(source: str | Path) -> Located:
    """Raises `ModelError` for what is neither, and for a download that cannot be made."""
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
    folder = _download(str(source))
    return Located(folder=folder, name=str(source), revision=folder.name)


def _download(hub_id: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise BackendError(
            f"{hub_id} is not a folder, and downloading it needs huggingface_hub: "
            "pip install 'kvq-runtime[export]'"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(PATTERNS)))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{hub_id} asks for consent: accept its terms on https://huggingface.co/{hub_id} "
            "and log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(
            f"there is no folder {hub_id} here and no public model {hub_id} on the hub; check "
            "the name, or log in with `hf auth login` for a private one"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{hub_id} cannot be downloaded ({_first_line(error)}) and is not in the local cache; "
            "connect to the network and run again (a broken download continues), or give a "
            "checkpoint folder"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
