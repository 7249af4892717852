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
    return _folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """Folder for what the user sets."""
    return _folder("XDG_CONFIG_HOME", ".config")


def data_folder() -> Path:
    """Folder for what the user made and cannot be made again (chats)."""
    return _folder("XDG_DATA_HOME", ".local/share")


def state_folder() -> Path:
    """Folder for what says how things went (logs) and what runs now (servers)."""
    return _folder("XDG_STATE_HOME", ".local/state")


def editor_command() -> str:
    """The user's editor, as a command line."""
    return os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"


def stay_offline() -> None:
    """From now on huggingface_hub takes what it has on this machine and asks no network."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def terminal_is_plain() -> bool:
    """Whether the user asked for output without escape codes (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR")) or terminal_is_dumb()


def terminal_is_dumb() -> bool:
    """Whether the terminal says it takes no escape codes at all."""
    return os.environ.get("TERM") == "dumb"


def _folder(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual) / "kvq"


def encode_in_one_thread() -> None:
    """Keeps the tokenizer from a pool of threads, which only warns about forks here.

    One text at a time is encoded; what a user has set stays.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
