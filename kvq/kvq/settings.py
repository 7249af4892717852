"""The only reader of the environment: every `KVQ_*` name is derived from a flag's name."""

import os
import sys
from pathlib import Path

# They would have git look at another checkout than the one it is asked about.
_GIT_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")


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
    usual = "notepad" if sys.platform == "win32" else "vi"
    return os.environ.get("VISUAL") or os.environ.get("EDITOR") or usual


def stay_offline() -> None:
    """From now on huggingface_hub takes what it has on this machine and asks no network."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def is_offline() -> bool:
    """Whether no network is to be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def silence_onnx_runtime() -> None:
    """From now on ONNX Runtime, imported here or by a child, reports nothing to its makers."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def silence_ray() -> None:
    """From now on Ray, started here or by a child, reports nothing to its makers."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def ray_address() -> str | None:
    """Where the user's Ray is, by its own variable; `local`: one is to be started here."""
    return os.environ.get("RAY_ADDRESS") or None


def harmless_git() -> tuple[list[str], dict[str, str]]:
    """The first words of a git command, and its environment, for a checkout that others made.

    Its configuration starts no program (the monitor of files) and fetches nothing.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _GIT_PLACES}
    quiet = {"GIT_ALLOW_PROTOCOL": "none", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    return ["git", "-c", "core.fsmonitor=false"], environment | quiet


def agree() -> None:
    """From now on what is asked first is taken as answered with yes, as by `--yes`."""
    os.environ[environment_name("yes")] = "1"


def agreed() -> bool:
    """Whether what is asked first is answered already, with yes."""
    return (environment("yes") or "").lower() in ("1", "true", "yes")


def ollama_folder() -> Path:
    """Folder of the models that Ollama keeps, by its own variable."""
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")


def llama_folder() -> Path | None:
    """Folder of llama.cpp's libraries where it is not llama-cpp-python's, by its own variable."""
    named = os.environ.get("LLAMA_CPP_LIB_PATH")
    return Path(named) if named else None


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
