"""What the flags ask of a session, a sampler and a server. Knows no file and no environment."""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvq.errors import UsageError, argument
from kvq_apps.flags import FLAGS, field

# Fields of `Sampling` by their flags.
SAMPLING_FIELDS = {
    "temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p",
    "repeat-penalty": "repeat_penalty", "repeat-last-n": "repeat_window_tokens",
}  # fmt: skip

# What `--predict` says for no limit but the context.
UNTIL_FULL = -1

# What `--kv-predict` says for another model that reads prompts.
AUXILIARY = "auxiliary"

# What `--draft` says for no drafter.
NO_DRAFTER = "none"


def written(arguments: Namespace, name: str) -> bool:
    """Whether flag `name` stands on the command line, not only in the environment."""
    return name in arguments.written


def given(arguments: Namespace, **names: str) -> dict[str, Any]:
    """Keyword arguments for those flags that have a value: `given(a, temperature="temp")`.

    A flag that the command does not take has none.
    """
    values = {key: getattr(arguments, field(name), None) for key, name in names.items()}
    return {key: value for key, value in values.items() if value is not None}


def sampling(arguments: Namespace) -> Any:
    """The `Sampling` the flags ask for; what is not asked keeps its default."""
    from kvq_runtime.config import Sampling

    return Sampling(**sampling_fields(arguments))


def sampling_fields(arguments: Namespace) -> dict[str, Any]:
    """The fields of `Sampling` that the flags ask for; the model decides the others."""
    return given(arguments, **{row: flag for flag, row in SAMPLING_FIELDS.items()})


def kv_bits(arguments: Namespace) -> dict[str, int]:
    """`k_bits` and `v_bits` as the flags ask for them; empty where the bundle's plan decides.

    `--kbits` and `--vbits` refine what `--kv` says.
    """
    from kvq.config import parse_kv

    bits = given(arguments, k_bits="kbits", v_bits="vbits")
    if arguments.kv is None:
        return bits
    k_bits, v_bits = parse_kv(arguments.kv)
    return {"k_bits": k_bits, "v_bits": v_bits} | bits


def model_name(arguments: Namespace) -> str | None:
    """The model, as a word of its own or as -m. Raises `UsageError` for both."""
    if arguments.name is not None and written(arguments, "model"):
        raise UsageError("the model is given twice; give the model once, as [MODEL] or with -m")
    return arguments.model if arguments.name is None else arguments.name


def max_tokens(predict: int | None, default: int | None) -> int | None:
    """New tokens at most as `--predict` says it; None, its -1: until the context is full."""
    if predict is None:
        return default
    if predict < 1 and predict != UNTIL_FULL:
        raise UsageError(
            f"{argument('--predict')} {predict} is not possible: give 1 or more, or {UNTIL_FULL} "
            "(until the context is full)"
        )
    return None if predict == UNTIL_FULL else predict


def engine_options(arguments: Namespace) -> dict[str, Any]:
    """Keyword arguments of `Engine.open`, all but the model."""
    return given(
        arguments, threads="threads", backend="backend", device="device",
        weights_budget="weights-budget",
    )  # fmt: skip


def session_options(arguments: Namespace) -> dict[str, Any]:
    """Keyword arguments of `Engine.session` as the KV flags and `--draft` ask for them."""
    return (
        kv_bits(arguments)
        | given(arguments, kv_budget="kv-budget", kv_offload="kv-offload")
        | given(arguments, context_tokens="ctx-size")
        | given(arguments, policy="kv-policy", kv_read="kv-read")
        | predictor(arguments)
        | drafter(arguments)
    )


def predictor(arguments: Namespace) -> dict[str, str]:
    """`predict`, with the model of `--kv-predict-with`. Raises `UsageError` for both at once."""
    found = given(arguments, predict="kv-predict", model="kv-predict-with")
    if "model" not in found:
        return found
    name, _, knobs = found.get("predict", AUXILIARY).partition(":")
    if name != AUXILIARY:
        raise UsageError(
            f"{argument('--kv-predict-with')} is for {argument('--kv-predict')} {AUXILIARY}, not "
            f"for {argument('--kv-predict')} {name}"
        )
    from kvq_apps.model_path import resolve_model

    return {"predict": f"{AUXILIARY}:" + ",".join([f"path={resolve_model(found['model'])}", knobs])}


def drafter(arguments: Namespace) -> dict[str, Any]:
    """`draft`, which makes the drafter of each session; empty where nothing is said of it."""
    asked = _asked_drafter(arguments)
    if asked is None:
        return {}
    if asked == NO_DRAFTER:
        return {"draft": lambda: None}
    from kvq_specdraft import drafter_named

    drafter_named(asked)  # refused before a model is loaded
    return {"draft": lambda: drafter_named(_with_files(asked))}


def _asked_drafter(arguments: Namespace) -> str | None:
    """`--draft`, with the model of `--draft-model`. Raises `UsageError` for another drafter."""
    found = given(arguments, draft="draft", model="draft-model", threads="threads")
    name, _, written = found.get("draft", "").partition(":")
    own = [f"path={found['model']}"] if "model" in found else []
    if own and name in ("", NO_DRAFTER):
        name = "model"
    if own and not _is_model(name):
        raise UsageError(
            f"{argument('--draft-model')} is for {argument('--draft')} model or auto+model, not "
            f"for {argument('--draft')} {name}"
        )
    if not _is_model(name):
        return found.get("draft")
    parts = [*own, *filter(None, written.split(","))]
    if "threads" in found and not any(part.startswith("threads=") for part in parts):
        parts.append(f"threads={found['threads']}")
    return f"{name}:{','.join(parts)}"


def _is_model(name: str) -> bool:
    """Whether another model drafts, alone or after a free drafter."""
    return name.rpartition("+")[2] == "model"


def _with_files(asked: str) -> str:
    """A drafter's text with the files of the model it names in place of the name."""
    from kvq_apps.model_path import resolve_model

    name, _, written = asked.partition(":")
    if not _is_model(name):
        return asked
    parts = [
        f"path={resolve_model(part[5:])}" if part.startswith("path=") else part
        for part in written.split(",")
    ]
    return f"{name}:{','.join(parts)}"


def serve_options(arguments: Namespace) -> dict[str, Any]:
    """Keyword arguments of `ServeConfig` as the flags alone ask for them."""
    found = given(
        arguments, host="host", port="port", api_key="api-key", sessions="sessions", queue="queue",
        chunk_tokens="chunk-tokens", grace_s="grace", saved_bytes="sessions-disk",
        saved_folder="sessions-folder",
    )  # fmt: skip
    if "saved_bytes" in found:
        found["saved_bytes"] = _disk_bytes(found["saved_bytes"])
    if "saved_folder" in found:
        # A replica stands in a folder of its own.
        found["saved_folder"] = Path(found["saved_folder"]).absolute()
    return found


def _disk_bytes(text: str) -> int:
    """What `--sessions-disk` says, 0: nothing is kept. Raises `UsageError`."""
    from kvq.config import parse_budget

    with suppress(UsageError):
        num_bytes = 0 if text == "0" else parse_budget(text).num_bytes
        if num_bytes is not None:
            return num_bytes
    raise UsageError(
        f"{argument('--sessions-disk')} {text} is not possible: give bytes such as 2GiB, or 0"
    )


# The least of each number whose owner is met only once a model is loaded.
_LEAST = {"threads": 1, "ctx-size": 2, "seed": 0}


def _check_least(name: str, value: int | str) -> None:
    # The other text that a number may be, `auto`, has no least.
    if isinstance(value, int) and value < _LEAST[name]:
        raise UsageError(about=f"--{name}", value=value, possible=f"give {_LEAST[name]} or more")


def check(name: str, value: Any) -> None:
    """Raises `UsageError` for a value its owner would refuse, as far as that needs no model."""
    if name in _LEAST:
        _check_least(name, value)
    alone = Namespace(**dict.fromkeys(map(field, FLAGS)) | {field(name): value})
    sampling(alone)
    match name:
        case "predict":
            max_tokens(value, None)
        case "kv" | "kbits" | "vbits":
            from kvq.config import KvPlan

            KvPlan(**kv_bits(alone))
        case "kv-policy":
            from kvq.policies import policy_named

            policy_named(value)
        case "kv-read":
            from kvq.selectors import rule_named

            rule_named(value)
        case "kv-predict":
            from kvq_runtime.prediction import predictor_named

            predictor_named(value)
        case "draft":
            drafter(alone)
        case "kv-budget" | "kv-offload" | "weights-budget":
            from kvq.config import parse_budget, parse_offload, parse_weights

            parse = {"kv-offload": parse_offload, "weights-budget": parse_weights}
            parse.get(name, parse_budget)(value)
        case "port" | "api-key" | "sessions" | "sessions-disk" | "queue" | "chunk-tokens" | "grace":
            from kvq_apps.serve.config import ServeConfig

            ServeConfig(**serve_options(alone))
        case _:
            pass
