"""Turns values of flags into arguments of engines, sessions, samplers and servers."""

from argparse import Namespace
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvq.errors import UsageError, argument
from kvq.json_values import is_array
from kvq_apps.settings.flags import FLAGS, field

# Fields of `Sampling` by their flags.
SAMPLING_FIELDS = {
    "temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p",
    "repeat-penalty": "repeat_penalty", "repeat-last-n": "repeat_window_tokens",
}  # fmt: skip

# The value of `--predict` that limits answers by the context only.
UNTIL_FULL = -1

# The value of `--kv-predict` for another model that reads prompts.
AUXILIARY = "auxiliary"

# The value of `--draft` for no drafter.
NO_DRAFTER = "none"


def on_command_line(arguments: Namespace, name: str) -> bool:
    """Says whether flag `name` is on the command line, not only in the environment or a file."""
    return name in arguments.command_line


def keywords(arguments: Namespace, **names: str) -> dict[str, Any]:
    """Returns keyword arguments for those flags that have a value: `keywords(a, top_k="top-k")`.

    A flag that the command does not take has no value.
    """
    values = {key: getattr(arguments, field(name), None) for key, name in names.items()}
    return {key: value for key, value in values.items() if value is not None}


def sampling(arguments: Namespace) -> Any:
    """Returns the `Sampling` that the flags ask for; other fields keep their defaults."""
    from kvq_runtime.config import Sampling

    return Sampling(**sampling_fields(arguments))


def sampling_fields(arguments: Namespace) -> dict[str, Any]:
    """Returns the fields of `Sampling` that the flags ask for; the model decides the others."""
    return keywords(arguments, **{row: flag for flag, row in SAMPLING_FIELDS.items()})


def kv_bits(arguments: Namespace) -> dict[str, int]:
    """Returns `k_bits` and `v_bits` as the flags ask for them; empty where the bundle decides.

    `--kbits` and `--vbits` replace a half of `--kv`.
    """
    from kvq.config import parse_kv

    bits = keywords(arguments, k_bits="kbits", v_bits="vbits")
    if arguments.kv is None:
        return bits
    k_bits, v_bits = parse_kv(arguments.kv)
    return {"k_bits": k_bits, "v_bits": v_bits} | bits


def model_name(arguments: Namespace) -> str | None:
    """Returns the model that [MODEL] or -m names. Raises `UsageError` for both, or for several."""
    names = model_names(arguments)
    if len(names) > 1:
        raise UsageError(
            f"{len(names)} models are given ({', '.join(map(str, names))}) and this serves one; "
            "give one -m"
        )
    return names[0]


def model_names(arguments: Namespace) -> list[str | None]:
    """Returns the models that [MODEL] or each -m names, [None] for the default.

    Raises `UsageError` for both at once.
    """
    if arguments.name is not None and on_command_line(arguments, "model"):
        raise UsageError("the model is given twice; give the model once, as [MODEL] or with -m")
    value: Any = arguments.model if arguments.name is None else arguments.name
    return list(value) if is_array(value) else [value]


def max_tokens(predict: int | None, default: int | None) -> int | None:
    """Returns the limit of new tokens; None, for -1, is until the context is full."""
    if predict is None:
        return default
    if predict < 1 and predict != UNTIL_FULL:
        raise UsageError(
            f"{argument('--predict')} {predict} is not possible: give 1 or more, or {UNTIL_FULL} "
            "(until the context is full)"
        )
    return None if predict == UNTIL_FULL else predict


def engine_options(arguments: Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of `Engine.open`, without the model.

    Raises `UsageError` for an unknown policy, which is refused before a model is made.
    """
    for policy in keywords(arguments, policy="kv-policy").values():
        from kvq.policies import policy_named

        policy_named(policy)
    return keywords(
        arguments, threads="threads", backend="backend", device="device",
        weights_budget="weights-budget",
    )  # fmt: skip


def session_options(arguments: Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of `Engine.session` for the KV flags and `--draft`."""
    return (
        kv_bits(arguments)
        | keywords(arguments, kv_budget="kv-budget", kv_offload="kv-offload")
        | keywords(arguments, context_tokens="ctx-size")
        | keywords(arguments, policy="kv-policy", kv_read="kv-read")
        | predictor(arguments)
        | drafter(arguments)
    )


def predictor(arguments: Namespace) -> dict[str, str]:
    """Returns `predict`, with the model of `--kv-predict-with`.

    Raises `UsageError` where `--kv-predict` names another predictor.
    """
    values = keywords(arguments, predict="kv-predict", model="kv-predict-with")
    if "model" not in values:
        return values
    name, _, knobs = values.get("predict", AUXILIARY).partition(":")
    if name != AUXILIARY:
        raise UsageError(
            f"{argument('--kv-predict-with')} is for {argument('--kv-predict')} {AUXILIARY}, not "
            f"for {argument('--kv-predict')} {name}"
        )
    from kvq_apps.names.model_path import resolve_model

    return {
        "predict": f"{AUXILIARY}:" + ",".join([f"path={resolve_model(values['model'])}", knobs])
    }


def drafter(arguments: Namespace) -> dict[str, Any]:
    """Returns `draft`, which makes the drafter of each session; empty without such a flag."""
    text = _drafter_text(arguments)
    if text is None:
        return {}
    if text == NO_DRAFTER:
        return {"draft": lambda: None}
    from kvq_specdraft import drafter_named

    drafter_named(text)  # refused before a model is loaded
    return {"draft": lambda: drafter_named(_with_files(text))}


def _drafter_text(arguments: Namespace) -> str | None:
    """Returns `--draft` with the model of `--draft-model`.

    Raises `UsageError` where `--draft` names a drafter without a model.
    """
    values = keywords(arguments, draft="draft", model="draft-model", threads="threads")
    name, _, knobs = values.get("draft", "").partition(":")
    path_option = [f"path={values['model']}"] if "model" in values else []
    if path_option and name in ("", NO_DRAFTER):
        name = "model"
    if path_option and not _is_model(name):
        raise UsageError(
            f"{argument('--draft-model')} is for {argument('--draft')} model or auto+model, not "
            f"for {argument('--draft')} {name}"
        )
    if not _is_model(name):
        return values.get("draft")
    parts = [*path_option, *filter(None, knobs.split(","))]
    if "threads" in values and not any(part.startswith("threads=") for part in parts):
        parts.append(f"threads={values['threads']}")
    return f"{name}:{','.join(parts)}"


def _is_model(name: str) -> bool:
    """Says whether another model drafts, alone or after a drafter without a model."""
    return name.rpartition("+")[2] == "model"


def _with_files(text: str) -> str:
    """Returns a drafter's text with the path of its model's files in place of the model's name."""
    from kvq_apps.names.model_path import resolve_model

    name, _, knobs = text.partition(":")
    if not _is_model(name):
        return text
    parts = [
        f"path={resolve_model(part[5:])}" if part.startswith("path=") else part
        for part in knobs.split(",")
    ]
    return f"{name}:{','.join(parts)}"


def serve_options(arguments: Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of `ServeConfig` that come from single flags."""
    values = keywords(
        arguments, host="host", port="port", api_key="api-key", sessions="sessions", queue="queue",
        chunk_tokens="chunk-tokens", grace_s="grace", saved_bytes="sessions-disk",
        saved_folder="sessions-folder", reuse="reuse",
        traces="traces",
    )  # fmt: skip
    if "saved_bytes" in values:
        values["saved_bytes"] = _disk_bytes(values["saved_bytes"])
    if "saved_folder" in values:
        # A replica's current folder is another one.
        values["saved_folder"] = Path(values["saved_folder"]).absolute()
    return values


def models_bytes(arguments: Namespace) -> int | None:
    """Returns the bytes of `--models-budget`, None for no limit. Raises `UsageError`."""
    from kvq.config import parse_bytes

    text = arguments.models_budget
    return None if text is None else parse_bytes(argument("--models-budget"), text)


def _disk_bytes(text: str) -> int:
    """Returns the bytes of `--sessions-disk`; 0 keeps nothing. Raises `UsageError`."""
    from kvq.config import parse_budget

    with suppress(UsageError):
        num_bytes = 0 if text == "0" else parse_budget(text).num_bytes
        if num_bytes is not None:
            return num_bytes
    raise UsageError(
        f"{argument('--sessions-disk')} {text} is not possible: give bytes such as 2GiB, or 0"
    )


# The least values of numbers that otherwise are checked only once a model is loaded.
_LEAST = {"threads": 1, "ctx-size": 2, "seed": 0}


def _check_least(name: str, value: int | str) -> None:
    # `auto`, the only text, has no least value.
    if isinstance(value, int) and value < _LEAST[name]:
        raise UsageError(about=f"--{name}", value=value, possible=f"give {_LEAST[name]} or more")


def check(name: str, value: Any) -> None:
    """Raises `UsageError` for a value that its component refuses, if that needs no model."""
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
            from kvq_runtime.sequence.prediction import predictor_named

            predictor_named(value)
        case "draft":
            drafter(alone)
        case "kv-budget" | "kv-offload" | "weights-budget" | "models-budget":
            from kvq.config import parse_budget, parse_bytes, parse_offload, parse_weights

            parse = {
                **{"kv-offload": parse_offload, "weights-budget": parse_weights},
                "models-budget": partial(parse_bytes, argument("--models-budget")),
            }
            parse.get(name, parse_budget)(value)
        case "port" | "api-key" | "sessions" | "sessions-disk" | "queue" | "chunk-tokens" | "grace":
            from kvq_apps.serve.config import ServeConfig

            ServeConfig(**serve_options(alone))
        case _:
            pass
