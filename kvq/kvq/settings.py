"""The only reader of environment variables: every `KVQ_*` name is derived from a flag's name."""

import os
import secrets
import sys
from pathlib import Path

# Variables that make git look at another checkout than the one it is asked about.
_GIT_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")


def environment(name: str) -> str | None:
    """Returns the value of a flag's variable (`kv-budget` -> `KVQ_KV_BUDGET`), or None."""
    return os.environ.get(environment_name(name))


def environment_name(name: str) -> str:
    """Returns the name of a flag's environment variable."""
    return "KVQ_" + name.lstrip("-").replace("-", "_").upper()


def cache_folder() -> Path:
    """Returns the folder for files that can be made again (exported models, hash records)."""
    return _folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """Returns the folder for what the user sets."""
    return _folder("XDG_CONFIG_HOME", ".config")


def data_folder() -> Path:
    """Returns the folder for what the user made and cannot be made again (chats)."""
    return _folder("XDG_DATA_HOME", ".local/share")


def state_folder() -> Path:
    """Returns the folder for logs and for the records of running servers."""
    return _folder("XDG_STATE_HOME", ".local/state")


def editor_command() -> str:
    """Returns the command line of the user's editor."""
    usual = "notepad" if sys.platform == "win32" else "vi"
    return os.environ.get("VISUAL") or os.environ.get("EDITOR") or usual


def stay_offline() -> None:
    """Makes huggingface_hub use only what is on this machine, from now on."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def is_offline() -> bool:
    """Returns whether the network must not be used."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def silence_onnx_runtime() -> None:
    """Stops ONNX Runtime, here and in child processes, from sending usage reports."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def silence_ray() -> None:
    """Stops Ray, started here or by a child process, from sending usage reports."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def keep_others_from_ray(proxy_middlewares: str) -> None:
    """Makes a Ray that is started here accept only requests with a new random token.

    `proxy_middlewares` names the function that returns the middlewares of Ray's HTTP proxies. A way
    of signing in that the user chose stays.
    """
    os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = proxy_middlewares
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def ray_address() -> str | None:
    """Returns the address of the user's Ray; None or `local`: one is to be started here."""
    return os.environ.get("RAY_ADDRESS") or None


def harmless_git() -> tuple[list[str], dict[str, str]]:
    """Returns the first words of a git command, and its environment, for a checkout made by others.

    Its configuration can start no program (a file monitor) and fetch nothing.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _GIT_PLACES}
    quiet = {"GIT_ALLOW_PROTOCOL": "none", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    return ["git", "-c", "core.fsmonitor=false"], environment | quiet


def assume_yes() -> None:
    """Answers all later questions with yes, as `--yes` does."""
    os.environ[environment_name("yes")] = "1"


def assumes_yes() -> bool:
    """Returns whether questions are answered with yes without asking."""
    return (environment("yes") or "").lower() in ("1", "true", "yes")


def ollama_folder() -> Path:
    """Returns the folder of Ollama's models, by its own variable."""
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")


def terminal_is_plain() -> bool:
    """Returns whether the user asked for output without escape codes (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR")) or terminal_is_dumb()


def terminal_is_dumb() -> bool:
    """Returns whether the terminal says that it takes no escape codes at all."""
    return os.environ.get("TERM") == "dumb"


def _folder(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual) / "kvq"


def encode_in_one_thread() -> None:
    """Turns off the tokenizer's thread pool, whose only effect here is a warning about forks.

    Texts are encoded one at a time. A value that the user has set stays.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
