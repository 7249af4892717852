"""The flags every command shares: one table. Names the `KVQ_*` twin of each; runs nothing.

A command lists the names it wants with `add_flags`. A value comes from the flag, else from its
environment twin, else from its `setting` in a configuration file, else from the component that
owns the default (left None here).
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
    """One flag: how it is read and what it says. `switch` takes no value, `repeats` collects.

    `setting` is its `section.key` in a configuration file; None: only a command line says it.
    """

    help: str
    setting: str | None = None
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
        setting="model.name",
        metavar="MODEL",
        synonyms=("-m",),
        help="bundle, GGUF file, checkpoint folder, hub id, `nano` (default: `default`)",
    ),
    "backend": Flag(
        setting="model.backend",
        choices=("auto", "onnx", "llama.cpp", "reference"),
        help="engine to run on (default: auto, the fastest present)",
    ),
    "threads": Flag(
        setting="model.threads",
        metavar="N",
        read=whole,
        help="threads to compute with (default: physical cores)",
    ),
    "offline": Flag(
        setting="model.offline", switch=True, help="ask no network, not even for a hub id"
    ),
    # the cache
    "kbits": Flag(
        setting="kv.kbits",
        metavar="BITS",
        read=whole,
        synonyms=("-ctk", "--cache-type-k"),
        help="bits of cached keys: 8, 4 or, not on llama.cpp, 2 (default: the model's plan)",
    ),
    "vbits": Flag(
        setting="kv.vbits",
        metavar="BITS",
        read=whole,
        synonyms=("-ctv", "--cache-type-v"),
        help="bits of cached values: 8, 4 or, not on llama.cpp, 2 (default: the model's plan)",
    ),
    "kv": Flag(
        setting="kv.bits", metavar="K:V", help="both at once, such as 4:2; fp: an unquantised cache"
    ),
    "kv-budget": Flag(
        setting="kv.budget",
        metavar="SIZE",
        help="bytes the cache may use: 64MiB, 4096tok, or 25%% of its fp16 size "
        "(default: what 8192 tokens need)",
    ),
    "kv-policy": Flag(
        setting="kv.policy",
        metavar="NAME[:OPTION=VALUE,..]",
        help="what gives way when the budget is full (default: the model's)",
    ),
    "ctx-size": Flag(
        setting="model.ctx-size",
        metavar="N",
        read=whole,
        help="context limit in tokens (default: the model's)",
    ),
    # running
    "predict": Flag(
        setting="model.predict",
        metavar="N",
        read=whole,
        synonyms=("-n",),
        help="new tokens at most (default: 256)",
    ),
    "stop": Flag(metavar="TEXT", repeats=True, help="end before this text; may be repeated"),
    "system": Flag(
        setting="chat.system",
        metavar="TEXT",
        synonyms=("-s",),
        help="system message; uses the model's chat template",
    ),
    "chat": Flag(switch=True, help="put the prompt into the model's chat template"),
    "no-heal": Flag(
        switch=True, help="keep the prompt's last token even if it is the start of a longer one"
    ),
    "usage": Flag(switch=True, synonyms=("-u",), help="print speed and bytes on stderr at the end"),
    "extract": Flag(
        switch=True, synonyms=("-x",), help="print only the first block of code of the answer"
    ),
    "stream": Flag(
        switch=True, help='with --json: a line {"text"} for each piece, then the object'
    ),
    "no-stream": Flag(switch=True, help="print the answer when it is whole"),
    # sampling
    "temp": Flag(
        setting="model.temp", metavar="T", read=number, help="temperature, 0: greedy (default: 0.8)"
    ),
    "top-k": Flag(
        setting="model.top-k",
        metavar="N",
        read=whole,
        help="keep the N most likely tokens, 0: off (default: 40)",
    ),
    "top-p": Flag(
        setting="model.top-p",
        metavar="P",
        read=number,
        help="keep the most likely share P, 1: off (default: 0.95)",
    ),
    "min-p": Flag(
        setting="model.min-p",
        metavar="P",
        read=number,
        help="drop tokens below P times the best, 0: off (default: 0.05)",
    ),
    "repeat-penalty": Flag(
        setting="model.repeat-penalty",
        metavar="X",
        read=number,
        help="weaken recent tokens, 1: off (default: 1)",
    ),
    "repeat-last-n": Flag(
        setting="model.repeat-last-n",
        metavar="N",
        read=whole,
        help="tokens the penalty looks back on (default: 64)",
    ),
    "seed": Flag(
        setting="model.seed",
        metavar="N",
        read=whole,
        help="seed of the sampler (default: a fresh one)",
    ),
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
    "linear": Flag(
        choices=("kvq", "ort"),
        help="op that multiplies weights (default: kvq; ort: ONNX Runtime's, to compare)",
    ),
    "force": Flag(switch=True, help="replace a bundle that is already there"),
    "no-quality": Flag(switch=True, help="skip the comparison with the unquantised checkpoint"),
    "no-calibrate": Flag(switch=True, help="skip measuring what errors cost in each layer"),
    # inspecting
    "estimate": Flag(
        switch=True, help="say what weights and cache take in memory, and whether that fits"
    ),
    "config": Flag(switch=True, help="print every setting and where its value comes from"),
    "paths": Flag(switch=True, help="print the folders and files kvq uses"),
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
    # benchmarking
    "suite": Flag(
        choices=("speed", "serve", "chat"),
        help="speed: steps and prefill of engines (default); serve: completions over HTTP while "
        "a chat streams, at the first --context; chat: the terminal chat's screen, without a "
        "model, --context tokens long",
    ),
    "shape": Flag(
        metavar="NAME",
        help="random weights in a real model's shape: qwen2.5-0.5b, llama-3.2-1b, qwen3-0.6b or "
        "smollm2-135m",
    ),
    "peer": Flag(
        metavar="NAME,..",
        help="engines to run on the same weights, in turn with ours: onnxruntime, llama.cpp",
    ),
    "rows": Flag(
        metavar="N", read=whole, help="draft rows attention is verified with, 1 to 8 (default: 5)"
    ),
    "repeat": Flag(metavar="N", read=whole, help="rounds of three timed decode steps (default: 7)"),
    "prefill": Flag(
        metavar="N", read=whole, help="tokens added to each depth at once (default: 256)"
    ),
    "prefill-limit": Flag(
        metavar="S", read=number, help="leave out a prefill of more seconds (default: 60)"
    ),
    # serving
    "host": Flag(
        setting="serve.host",
        metavar="NAME",
        help="address to listen on (default: 127.0.0.1, this machine)",
    ),
    "port": Flag(
        setting="serve.port",
        metavar="N",
        read=whole,
        help="port to listen on, 0: any free (default: 8012)",
    ),
    "socket": Flag(
        setting="serve.socket",
        metavar="PATH",
        help="also listen on this unix socket; without --host and --port on it alone",
    ),
    "api-key": Flag(
        setting="serve.api-key",
        metavar="KEY",
        help="what clients must send as `Authorization: Bearer KEY`",
    ),
    "origin": Flag(
        setting="serve.origin",
        metavar="URL",
        repeats=True,
        help="web page that may ask, `*`: any; may be repeated",
    ),
    "alias": Flag(
        setting="serve.alias",
        metavar="NAME",
        repeats=True,
        help="another name of the model; may be repeated",
    ),
    "sessions": Flag(
        setting="serve.sessions",
        metavar="N",
        read=whole,
        help="sessions held at once, each of --kv-budget (default: 4)",
    ),
    "sessions-disk": Flag(
        setting="serve.sessions-disk",
        metavar="SIZE",
        help="bytes of sessions kept on disk, 0: none (default: 2GiB)",
    ),
    "queue": Flag(
        setting="serve.queue",
        metavar="N",
        read=whole,
        help="requests that may wait for a session (default: 64)",
    ),
    "chunk-tokens": Flag(
        setting="serve.chunk-tokens",
        metavar="N",
        read=whole,
        help="tokens of a prompt read at once, while others wait "
        "(default: what takes 50 ms, measured at the start)",
    ),
    "grace": Flag(
        setting="serve.grace",
        metavar="S",
        read=number,
        help="seconds for running answers at the end (default: 8)",
    ),
    # chatting
    "server": Flag(
        setting="chat.server",
        metavar="URL",
        help="talk to a running `kvq serve` instead of loading a model",
    ),
    "inline": Flag(
        setting="chat.inline",
        switch=True,
        help="below the command line instead of on the whole screen",
    ),
    "theme": Flag(
        setting="chat.theme",
        metavar="NAME",
        help="colours (default: those of the last /theme; Ctrl+P lists them)",
    ),
    "meter": Flag(
        setting="chat.meter",
        choices=("full", "short", "off"),
        help="what the line of numbers shows: everything, KV and context, or neither "
        "(default: full)",
    ),
    "continue": Flag(switch=True, synonyms=("-c",), help="go on with the chat used last"),
    "cid": Flag(metavar="ID", help="go on with this chat (--list shows ids)"),
    "no-log": Flag(setting="chat.no-log", switch=True, help="keep this chat in memory only"),
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
SERVE_FLAGS = ("host", "port", "socket", "api-key", "origin", "alias", "grace")
CHAT_FLAGS = ("continue", "cid", "no-log", "list", "search", "export", "import")
ENGINE_FLAGS = ("model", "backend", "threads", "offline")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A flag's value and where it stands: a variable, or a file and its line."""

    value: Any
    origin: str


# What gives a flag's value where the command line does not; None: it says nothing.
Layer = Callable[[str], Found | None]


def environment_layer(name: str) -> Found | None:
    """The value of flag `name`'s environment twin. Raises `UsageError` for a bad one."""
    text = environment(name)
    if text is None:
        return None
    variable = environment_name(name)
    value = read_value(name, text, variable)
    return Found(value=[value] if FLAGS[name].repeats else value, origin=variable)


def fill(arguments: Namespace, *layers: Layer) -> None:
    """Gives every flag that was not written what the first layer that has it says.

    Widths of K and V refine `--kv` of their own layer or of a later one, never of an earlier.
    """
    arguments.written = {name for name in FLAGS if given(arguments, value=name)}
    for layer in layers:
        settled = KV_WIDTHS if getattr(arguments, "kv", None) is not None else ()
        for name in FLAGS:
            if name not in settled and getattr(arguments, field(name), "absent") is None:
                found = layer(name)
                setattr(arguments, field(name), None if found is None else found.value)
    for name, flag in FLAGS.items():
        if flag.switch and getattr(arguments, field(name), "absent") is None:
            setattr(arguments, field(name), False)


def written(arguments: Namespace, name: str) -> bool:
    """Whether flag `name` stands on the command line, not only in the environment."""
    return name in arguments.written


_YES_NO = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def read_value(name: str, text: str, origin: str) -> Any:
    """`text` as flag `name` reads it, one of several that `repeats`.

    Raises `UsageError`, naming `origin`.
    """
    flag = FLAGS[name]
    origin = f"{origin}={text}"
    if flag.switch:
        if text.lower() not in _YES_NO:
            raise UsageError(f"{origin} is not possible: give 1 or 0")
        return _YES_NO[text.lower()]
    if flag.choices and text not in flag.choices:
        raise UsageError(f"{origin} is not possible: choose {', '.join(flag.choices)}")
    try:
        return flag.read(text)
    except ArgumentTypeError as error:
        raise UsageError(f"{origin} is not possible: {error}") from None


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


# The least of each number whose owner is met only once a model is loaded.
_LEAST = {"threads": 1, "predict": 1, "ctx-size": 2, "seed": 0}
_SERVE_FIELDS = {
    "port": "port", "api-key": "api_key", "sessions": "sessions", "queue": "queue",
    "chunk-tokens": "chunk_tokens", "grace": "grace_s",
}  # fmt: skip


def check(name: str, value: Any) -> None:
    """Raises `UsageError` for a value its owner would refuse, as far as that needs no model."""
    least = _LEAST.get(name)
    if least is not None and value < least:
        raise UsageError(f"--{name} {value} is not possible: give {least} or more")
    alone = Namespace(**dict.fromkeys(map(field, FLAGS)) | {field(name): value})
    sampling(alone)
    match name:
        case "kv" | "kbits" | "vbits":
            from kvq.config import KvPlan

            KvPlan(**kv_bits(alone))
        case "kv-policy":
            from kvq.policies import policy_named

            policy_named(value)
        case "kv-budget" | "sessions-disk" if (name, value) != ("sessions-disk", "0"):
            from kvq.config import parse_budget

            parse_budget(value)
        case _ if name in _SERVE_FIELDS:
            from kvq_apps.serve.config import ServeConfig

            ServeConfig(**{_SERVE_FIELDS[name]: value})
        case _:
            pass
