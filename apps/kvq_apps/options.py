"""The flags every command shares: one table. Names the `KVQ_*` twin of each; runs nothing.

A command lists the names it wants with `add_flags`. A value comes from the flag, else from its
environment twin, else from the component that owns the default (left None here).
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvq.errors import UsageError
from kvq.settings import environment, environment_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag: how it is read and what it says. `switch` takes no value, `repeats` collects."""

    help: str
    metavar: str | None = None
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()
    switch: bool = False
    repeats: bool = False


def whole(text: str) -> int:
    """A whole number, as a flag's value."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """A number, as a flag's value."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None


def wholes(text: str) -> tuple[int, ...]:
    """`"64,4096"` -> (64, 4096)."""
    return tuple(whole(part) for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """`"0,0.5,1"` -> (0.0, 0.5, 1.0)."""
    return tuple(number(part) for part in text.split(","))


FLAGS: dict[str, Flag] = {
    # the model
    "model": Flag(
        metavar="MODEL", synonyms=("-m",), help="bundle, checkpoint folder, hub id or `default`"
    ),
    "backend": Flag(
        choices=("auto", "onnx", "reference"), help="engine to run on (auto: the fastest present)"
    ),
    "threads": Flag(
        metavar="N", read=whole, help="threads to compute with (default: physical cores)"
    ),
    # the cache
    "kbits": Flag(
        metavar="BITS",
        read=whole,
        synonyms=("-ctk", "--cache-type-k"),
        help="bits of cached keys: 8, 4 or 2 (default: the bundle's plan)",
    ),
    "vbits": Flag(
        metavar="BITS",
        read=whole,
        synonyms=("-ctv", "--cache-type-v"),
        help="bits of cached values: 8, 4 or 2 (default: the bundle's plan)",
    ),
    "kv": Flag(metavar="K:V", help="both at once, such as 4:2; fp: an unquantised cache"),
    "kv-budget": Flag(
        metavar="SIZE",
        help="bytes the cache may use: 64MiB, 4096tok, or 25%% of its fp16 size "
        "(default: what 8192 tokens need)",
    ),
    "kv-policy": Flag(metavar="NAME", help="what gives way when the budget is full"),
    "ctx-size": Flag(
        metavar="N", read=whole, help="context limit in tokens (default: the model's)"
    ),
    # running
    "predict": Flag(
        metavar="N", read=whole, synonyms=("-n",), help="new tokens at most (default: 256)"
    ),
    "stop": Flag(metavar="TEXT", repeats=True, help="end before this text; may be repeated"),
    "system": Flag(
        metavar="TEXT", synonyms=("-s",), help="system message; uses the model's chat template"
    ),
    "chat": Flag(switch=True, help="put the prompt into the model's chat template"),
    "usage": Flag(switch=True, synonyms=("-u",), help="print speed and bytes on stderr at the end"),
    # sampling
    "temp": Flag(metavar="T", read=number, help="temperature, 0: greedy (default: 0.8)"),
    "top-k": Flag(metavar="N", read=whole, help="keep the N most likely tokens, 0: off"),
    "top-p": Flag(metavar="P", read=number, help="keep the most likely share P, 1: off"),
    "min-p": Flag(metavar="P", read=number, help="drop tokens below P times the best, 0: off"),
    "repeat-penalty": Flag(metavar="X", read=number, help="weaken recent tokens, 1: off"),
    "repeat-last-n": Flag(metavar="N", read=whole, help="tokens the penalty looks back on"),
    "seed": Flag(metavar="N", read=whole, help="seed of the sampler (default: a fresh one)"),
    # exporting
    "out": Flag(metavar="DIR", synonyms=("-o",), help="folder to write (default: by the model)"),
    "format": Flag(choices=("onnx",), help="graph to write"),
    "wbits": Flag(metavar="BITS", read=whole, help="bits of linear weights: 4 or 8 (default: 4)"),
    "group": Flag(
        metavar="N", read=whole, help="weights sharing a scale: 32, 64 or 128 (default: 32)"
    ),
    "embedding-bits": Flag(
        metavar="BITS", read=whole, help="bits of the embedding: 8 or 4 (default: 8)"
    ),
    "force": Flag(switch=True, help="replace a bundle that is already there"),
    "no-quality": Flag(switch=True, help="skip the comparison with the unquantised checkpoint"),
    # evaluating
    "task": Flag(choices=("ppl", "kld", "passkey"), help="what to measure"),
    "context": Flag(metavar="N,..", read=wholes, help="context lengths in tokens"),
    "depths": Flag(metavar="X,..", read=numbers, help="passkey: places of the key, 0 to 1"),
    "trials": Flag(metavar="N", read=whole, help="passkey: keys per length and depth (default: 1)"),
    "max-tokens": Flag(metavar="N", read=whole, help="use at most N tokens of the text"),
    # output
    "json": Flag(switch=True, help="print one JSON object on stdout"),
    "debug": Flag(switch=True, help="show tracebacks and debug logs"),
}

KV_WIDTHS = ("kbits", "vbits")
KV_FLAGS = (*KV_WIDTHS, "kv", "kv-budget", "kv-policy")
SAMPLING_FLAGS = (
    "temp", "top-k", "top-p", "min-p", "repeat-penalty", "repeat-last-n", "seed",
)  # fmt: skip
ENGINE_FLAGS = ("model", "backend", "threads")
OUTPUT_FLAGS = ("json", "debug")


def add_flags(
    parser: ArgumentParser | _ArgumentGroup, *names: str, **texts: str
) -> ArgumentParser | _ArgumentGroup:
    """Adds the named rows of `FLAGS`; `texts` replaces the help of single ones (kv_budget=...)."""
    for name in names:
        flag = FLAGS[name]
        text = texts.get(field(name), flag.help)
        options: dict[str, Any] = {
            "dest": field(name),
            "default": None,
            "help": f"{text} [{environment_name(name)}]",
        }
        if flag.switch:
            options["action"] = "store_true"
        else:
            options |= {"type": flag.read, "metavar": flag.metavar}
            if flag.choices:
                options["choices"] = flag.choices
            if flag.repeats:
                options["action"] = "append"
        parser.add_argument(f"--{name}", *flag.synonyms, **options)
    return parser


def field(name: str) -> str:
    """Attribute of the parsed arguments that holds flag `name`."""
    return name.replace("-", "_")


def fill_from_environment(arguments: Namespace) -> None:
    """Gives every flag that was not written its `KVQ_*` value; `UsageError` for a bad one."""
    settled = KV_WIDTHS if getattr(arguments, "kv", None) is not None else ()
    arguments.written = {name for name in FLAGS if given(arguments, value=name)}
    for name, flag in FLAGS.items():
        if getattr(arguments, field(name), "absent") is None:
            text = None if name in settled else environment(name)
            value = None if text is None else _from_text(name, flag, text)
            setattr(arguments, field(name), False if flag.switch and value is None else value)


def written(arguments: Namespace, name: str) -> bool:
    """Whether flag `name` stands on the command line, not only in the environment."""
    return name in arguments.written


_YES_NO = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def _from_text(name: str, flag: Flag, text: str) -> Any:
    origin = f"{environment_name(name)}={text}"
    if flag.switch:
        if text.lower() not in _YES_NO:
            raise UsageError(f"{origin} is not possible: give 1 or 0")
        return _YES_NO[text.lower()]
    if flag.choices and text not in flag.choices:
        raise UsageError(f"{origin} is not possible: choose {', '.join(flag.choices)}")
    try:
        value = flag.read(text)
    except ArgumentTypeError as error:
        raise UsageError(f"{origin} is not possible: {error}") from None
    return [value] if flag.repeats else value


def given(arguments: Namespace, **names: str) -> dict[str, Any]:
    """Keyword arguments for those flags that have a value: `given(a, temperature="temp")`.

    A flag that the command does not take has none.
    """
    values = {key: getattr(arguments, field(name), None) for key, name in names.items()}
    return {key: value for key, value in values.items() if value is not None}


def sampling(arguments: Namespace) -> Any:
    """The `Sampling` the flags ask for; what is not asked keeps its default."""
    from kvq_runtime.config import Sampling

    return Sampling(
        **given(
            arguments,
            temperature="temp",
            top_k="top-k",
            top_p="top-p",
            min_p="min-p",
            repeat_penalty="repeat-penalty",
            repeat_window_tokens="repeat-last-n",
        )
    )


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


def session_options(arguments: Namespace) -> dict[str, Any]:
    """Keyword arguments of `Engine.session` as the KV flags ask for them."""
    return kv_bits(arguments) | given(
        arguments, kv_budget="kv-budget", context_tokens="ctx-size", policy="kv-policy"
    )
