"""The only reader of the environment: every `KVQ_*` name is derived from a flag's name."""

import os
from pathlib import Path


def environment(name: str) -> str | None:
    """Value of the environment twin of flag `name` (`kv-budget` -> `KVQ_KV_BUDGET`), or None."""
    return os.environ.get(environment_name(name))


def environment_name(name: str) -> str:
    """Name of the environment twin of flag `name`."""
    return "KVQ_" + name.lstrip("-").replace("-", "_").upper()


def cache_folder() -> Path:
    """Folder for files that can be made again (exported default model, hash records)."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "kvq"


def terminal_is_plain() -> bool:
    """Whether the user asked for output without escape codes (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
