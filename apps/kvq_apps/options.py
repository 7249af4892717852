"""The flags every command shares: one table. Names the `KVQ_*` twin of each; runs nothing.

A command lists the names it wants with `add_flags`. A value comes from the flag, else from its
environment twin, else from the component that owns the default (left None here).
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
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


def names(text: str) -> tuple[str, ...]:
    """`"kld,fim"` -> ("kld", "fim")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def policies(text: str) -> tuple[str, ...]:
    """`"oldest,h2o:keep=1,recent=2"` -> ("oldest", "h2o:keep=1,recent=2")."""
    found: list[str] = []
    for part in text.split(","):
        if "=" in part and ":" not in part.partition("=")[0] and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return tuple(found)


def shares(text: str) -> tuple[Fraction, ...]:
    """`"1/2,0.25,10%"` -> their fractions, each above 0."""
    return tuple(_share(part.strip()) for part in text.split(","))


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if share <= 0:
        raise ArgumentTypeError(f"{text!r} is not a share above 0, such as 1/4, 0.25 or 25%")
    return share


def numbers(text: str) -> tuple[float, ...]:
    """`"0,0.5,1"` -> (0.0, 0.5, 1.0)."""
    return tuple(number(part) for part in text.split(","))


FLAGS: dict[str, Flag] = {
    # the model
    "model": Flag(
        metavar="MODEL",
        synonyms=("-m",),
        help="bundle, GGUF file, checkpoint folder, hub id or `default`",
    ),
    "backend": Flag(
        choices=("auto", "onnx", "llama.cpp", "reference"),
        help="engine to run on (auto: the fastest present)",
    ),
    "threads": Flag(
        metavar="N", read=whole, help="threads to compute with (default: physical cores)"
    ),
    # the cache
    "kbits": Flag(
        metavar="BITS",
        read=whole,
        synonyms=("-ctk", "--cache-type-k"),
        help="bits of cached keys: 8, 4 or, not on llama.cpp, 2 (default: the model's plan)",
    ),
    "vbits": Flag(
        metavar="BITS",
        read=whole,
        synonyms=("-ctv", "--cache-type-v"),
        help="bits of cached values: 8, 4 or, not on llama.cpp, 2 (default: the model's plan)",
    ),
    "kv": Flag(metavar="K:V", help="both at once, such as 4:2; fp: an unquantised cache"),
    "kv-budget": Flag(
        metavar="SIZE",
        help="bytes the cache may use: 64MiB, 4096tok, or 25%% of its fp16 size "
        "(default: what 8192 tokens need)",
    ),
    "kv-policy": Flag(
        metavar="NAME[:OPTION=VALUE,..]", help="what gives way when the budget is full"
    ),
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
    "out": Flag(metavar="PATH", synonyms=("-o",), help="folder to write (default: by the model)"),
    "format": Flag(
        choices=("onnx", "gguf", "both"), help="for which engine (default: onnx; gguf: llama.cpp)"
    ),
    "gguf-type": Flag(
        choices=("q4_k_m", "q4_0", "q8_0", "f16", "bf16"),
        help="types in the GGUF file (default: q4_k_m)",
    ),
    "wbits": Flag(metavar="BITS", read=whole, help="bits of linear weights: 4 or 8 (default: 4)"),
    "group": Flag(
        metavar="N", read=whole, help="weights sharing a scale: 32, 64 or 128 (default: 32)"
    ),
    "embedding-bits": Flag(
        metavar="BITS", read=whole, help="bits of the embedding: 8 or 4 (default: 8)"
    ),
    "force": Flag(switch=True, help="replace a bundle that is already there"),
    "no-quality": Flag(switch=True, help="skip the comparison with the unquantised checkpoint"),
    "no-calibrate": Flag(switch=True, help="skip measuring what errors cost in each layer"),
    # evaluating
    "task": Flag(choices=("ppl", "kld", "passkey", "retrieval", "fim"), help="what to measure"),
    "context": Flag(metavar="N,..", read=wholes, help="context lengths in tokens"),
    "depths": Flag(metavar="X,..", read=numbers, help="look-ups: places of the answer, 0 to 1"),
    "trials": Flag(
        metavar="N", read=whole, help="look-ups: prompts per length and depth (default: 1)"
    ),
    "limit": Flag(
        metavar="N", read=whole, help="lines to fill in at most (default: 200, sweep: 20)"
    ),
    "execute": Flag(
        switch=True, help="run the tests of filled-in lines: programs a model wrote, no sandbox"
    ),
    "baseline": Flag(
        metavar="FILE",
        repeats=True,
        help="also fill in by n-grams of this text or of these records (.jsonl, .gz, .xz)",
    ),
    "table": Flag(switch=True, help="one row of measures for each of the usual KV widths"),
    "sweep": Flag(switch=True, help="policies against budgets against tasks; goes on with --out"),
    "tasks": Flag(
        metavar="NAME,..", read=names, help="sweep: kld, passkey, retrieval, fim (default: all)"
    ),
    "policies": Flag(
        metavar="NAME,..",
        read=policies,
        help="sweep: NAME[:option=value,..][@K:V] (default: every policy, at 8:8)",
    ),
    "budgets": Flag(
        metavar="X,..",
        read=shares,
        help="sweep: shares of the context's fp16 bytes (default: 1/2,1/4,1/6,1/8)",
    ),
    "plot": Flag(metavar="FILE.png", read=Path, help="draw the results"),
    "max-tokens": Flag(
        metavar="N",
        read=whole,
        help="use at most N tokens of the text (default: all; table and sweep: 16 windows)",
    ),
    # serving
    "host": Flag(metavar="NAME", help="address to listen on (default: 127.0.0.1, this machine)"),
    "port": Flag(metavar="N", read=whole, help="port to listen on, 0: any free (default: 8012)"),
    "api-key": Flag(metavar="KEY", help="what clients must send as `Authorization: Bearer KEY`"),
    "origin": Flag(
        metavar="URL", repeats=True, help="web page that may ask, `*`: any; may be repeated"
    ),
    "alias": Flag(metavar="NAME", repeats=True, help="another name of the model; may be repeated"),
    "sessions": Flag(
        metavar="N", read=whole, help="sessions held at once, each of --kv-budget (default: 4)"
    ),
    "sessions-disk": Flag(
        metavar="SIZE", help="bytes of sessions kept on disk, 0: none (default: 2GiB)"
    ),
    "queue": Flag(
        metavar="N", read=whole, help="requests that may wait for a session (default: 64)"
    ),
    "chunk-tokens": Flag(
        metavar="N",
        read=whole,
        help="tokens of a prompt read at once, while others wait "
        "(default: what takes 50 ms, measured at the start)",
    ),
    "grace": Flag(
        metavar="S", read=number, help="seconds for running answers at the end (default: 8)"
    ),
    # chatting
    "server": Flag(metavar="URL", help="talk to a running `kvq serve` instead of loading a model"),
    "inline": Flag(switch=True, help="below the command line instead of on the whole screen"),
    "continue": Flag(switch=True, synonyms=("-c",), help="go on with the chat used last"),
    "cid": Flag(metavar="ID", help="go on with this chat (--list shows ids)"),
    "no-log": Flag(switch=True, help="keep this chat in memory only"),
    "list": Flag(switch=True, help="list the chats and end"),
    "search": Flag(metavar="TEXT", help="list the chats with a message that has these words"),
    "export": Flag(
        metavar="FILE", help="write a chat (--cid, or the last): .md Markdown, else JSON lines"
    ),
    "import": Flag(metavar="FILE", help="read a chat: JSON lines, Markdown or ChatGPT's JSON"),
    # output
    "json": Flag(switch=True, help="print one JSON object on stdout"),
    "debug": Flag(switch=True, help="show tracebacks and debug logs"),
}

KV_WIDTHS = ("kbits", "vbits")
KV_FLAGS = (*KV_WIDTHS, "kv", "kv-budget", "kv-policy")
SAMPLING_FLAGS = (
    "temp", "top-k", "top-p", "min-p", "repeat-penalty", "repeat-last-n", "seed",
)  # fmt: skip
SERVE_FLAGS = ("host", "port", "api-key", "origin", "alias", "grace")
CHAT_FLAGS = ("continue", "cid", "no-log", "list", "search", "export", "import")
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
