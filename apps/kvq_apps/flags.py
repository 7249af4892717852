"""The flags every command shares: one table. Names the `KVQ_*` twin of each; runs nothing.

A command lists the names it wants with `add_flags`. Where a value comes from is told in `layers`,
what it means in `options`.
"""

from argparse import ArgumentParser, _ArgumentGroup
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.settings import environment_name
from kvq_apps.flag_values import names, number, numbers, policies, shares, whole, wholes
from kvq_apps.owners import Owned, filled


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag: how it is read and what it says. `switch` takes no value, `repeats` collects.

    `setting` is its `section.key` in a configuration file; None: only a command line says it.
    `default` is what holds without a value; there, as in `help`, `{owner}` is what it owns.
    """

    help: str
    default: str = ""
    setting: str | None = None
    metavar: str | None = None
    read: Callable[[str], Any] = str
    choices: Sequence[str] | None = None
    synonyms: tuple[str, ...] = ()
    switch: bool = False
    repeats: bool = False

    def shown_default(self) -> str:
        """The default in words; empty for a flag that has none."""
        return filled(self.default)


FLAGS: dict[str, Flag] = {
    # the model
    "model": Flag(
        setting="model.name",
        metavar="MODEL",
        synonyms=("-m",),
        help="bundle, GGUF file, checkpoint folder, hub id, `nano`",
        default="`default`",
    ),
    "backend": Flag(
        setting="model.backend",
        metavar="NAME",
        choices=Owned("kvq_runtime.backends:BACKENDS", "auto"),
        help="engine to run on: %(choices)s",
        default="auto, the fastest present",
    ),
    "threads": Flag(
        setting="model.threads",
        metavar="N",
        read=whole,
        help="threads to compute with",
        default="physical cores",
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
        help="bits of cached keys: 8, 4 or, not on llama.cpp, 2",
        default="the model's plan",
    ),
    "vbits": Flag(
        setting="kv.vbits",
        metavar="BITS",
        read=whole,
        synonyms=("-ctv", "--cache-type-v"),
        help="bits of cached values: 8, 4 or, not on llama.cpp, 2",
        default="the model's plan",
    ),
    "kv": Flag(
        setting="kv.bits", metavar="K:V", help="both at once, such as 4:2; fp: an unquantised cache"
    ),
    "kv-budget": Flag(
        setting="kv.budget",
        metavar="SIZE",
        help="bytes the cache may use: 64MiB, 4096tok, or 25%% of its fp16 size",
        default="what {kvq_runtime.budget:DEFAULT_TOKENS} tokens need",
    ),
    "kv-policy": Flag(
        setting="kv.policy",
        metavar="NAME[:OPTION=VALUE,..]",
        help="what gives way when the budget is full",
        default="the model's",
    ),
    "ctx-size": Flag(
        setting="model.ctx-size",
        metavar="N",
        read=whole,
        help="context limit in tokens",
        default="the model's",
    ),
    # running
    "predict": Flag(
        setting="model.predict",
        metavar="N",
        read=whole,
        synonyms=("-n",),
        help="new tokens at most",
        default="{kvq_apps.commands.run:DEFAULT_PREDICT}",
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
        setting="model.temp",
        metavar="T",
        read=number,
        help="temperature, 0: greedy",
        default="{kvq_runtime.config:Sampling.temperature}",
    ),
    "top-k": Flag(
        setting="model.top-k",
        metavar="N",
        read=whole,
        help="keep the N most likely tokens, 0: off",
        default="{kvq_runtime.config:Sampling.top_k}",
    ),
    "top-p": Flag(
        setting="model.top-p",
        metavar="P",
        read=number,
        help="keep the most likely share P, 1: off",
        default="{kvq_runtime.config:Sampling.top_p}",
    ),
    "min-p": Flag(
        setting="model.min-p",
        metavar="P",
        read=number,
        help="drop tokens below P times the best, 0: off",
        default="{kvq_runtime.config:Sampling.min_p}",
    ),
    "repeat-penalty": Flag(
        setting="model.repeat-penalty",
        metavar="X",
        read=number,
        help="weaken recent tokens, 1: off",
        default="{kvq_runtime.config:Sampling.repeat_penalty}",
    ),
    "repeat-last-n": Flag(
        setting="model.repeat-last-n",
        metavar="N",
        read=whole,
        help="tokens the penalty looks back on",
        default="{kvq_runtime.config:Sampling.repeat_window_tokens}",
    ),
    "seed": Flag(
        setting="model.seed",
        metavar="N",
        read=whole,
        help="seed of the sampler",
        default="a fresh one",
    ),
    # exporting
    "out": Flag(metavar="PATH", synonyms=("-o",), help="folder to write", default="by the model"),
    "format": Flag(
        metavar="NAME",
        choices=Owned("kvq_export.config:Format"),
        help="files to write: %(choices)s",
        default="{kvq_export.config:ExportOptions.format}; gguf: llama.cpp",
    ),
    "gguf-type": Flag(
        metavar="TYPE",
        choices=Owned("kvq_export.config:GgufType"),
        help="types in the GGUF file: %(choices)s",
        default="{kvq_export.config:ExportOptions.gguf_type}",
    ),
    "wbits": Flag(
        metavar="BITS",
        read=whole,
        help="bits of linear weights: 4 or 8",
        default="{kvq_export.config:WeightFormat.bits}",
    ),
    "group": Flag(
        metavar="N",
        read=whole,
        help="weights sharing a scale: 32, 64 or 128",
        default="{kvq_export.config:WeightFormat.block}",
    ),
    "embedding-bits": Flag(
        metavar="BITS",
        read=whole,
        help="bits of the embedding: 8 or 4",
        default="{kvq_export.config:WeightFormat.embedding_bits}",
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
        metavar="N",
        read=whole,
        help="look-ups: prompts per length and depth",
        default="{kvq_apps.evaluation.asked:Asked.trials}",
    ),
    "limit": Flag(
        metavar="N",
        read=whole,
        help="lines to fill in at most",
        default="{kvq_apps.evaluation.asked:Asked.limit}, "
        "sweep: {kvq_apps.commands.eval:DEFAULT_SWEEP_LINES}",
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
        metavar="NAME,..", read=names, help="sweep: kld, passkey, retrieval, fim", default="all"
    ),
    "policies": Flag(
        metavar="NAME,..",
        read=policies,
        help="sweep: NAME[:option=value,..][@K:V]",
        default="every policy, at 8:8",
    ),
    "budgets": Flag(
        metavar="X,..",
        read=shares,
        help="sweep: shares of the context's fp16 bytes",
        default="{kvq_apps.evaluation.sweep:BUDGETS}",
    ),
    "plot": Flag(metavar="FILE.png", read=Path, help="draw the results"),
    "max-tokens": Flag(
        metavar="N",
        read=whole,
        help="use at most N tokens of the text",
        default="all; table and sweep: {kvq_apps.commands.eval:DEFAULT_WINDOWS} windows",
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
        metavar="N",
        read=whole,
        help="draft rows attention is verified with, 1 to 8",
        default="{kvq_apps.bench.measure:SpeedJob.rows}",
    ),
    "repeat": Flag(
        metavar="N",
        read=whole,
        help="rounds of three timed decode steps",
        default="{kvq_apps.bench.measure:SpeedJob.repeat}",
    ),
    "prefill": Flag(
        metavar="N",
        read=whole,
        help="tokens added to each depth at once",
        default="{kvq_apps.bench.measure:SpeedJob.prefill_tokens}",
    ),
    "prefill-limit": Flag(
        metavar="S",
        read=number,
        help="leave out a prefill of more seconds",
        default="{kvq_apps.bench.measure:SpeedJob.prefill_limit_s}",
    ),
    # serving
    "host": Flag(
        setting="serve.host",
        metavar="NAME",
        help="address to listen on",
        default="{kvq_apps.serve.config:ServeConfig.host}, this machine",
    ),
    "port": Flag(
        setting="serve.port",
        metavar="N",
        read=whole,
        help="port to listen on, 0: any free",
        default="{kvq_apps.serve.config:ServeConfig.port}",
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
        help="sessions held at once, each of --kv-budget",
        default="{kvq_apps.serve.config:ServeConfig.sessions}",
    ),
    "sessions-disk": Flag(
        setting="serve.sessions-disk",
        metavar="SIZE",
        help="bytes of sessions kept on disk, 0: none",
        default="{kvq_apps.serve.config:ServeConfig.saved_bytes}",
    ),
    "queue": Flag(
        setting="serve.queue",
        metavar="N",
        read=whole,
        help="requests that may wait for a session",
        default="{kvq_apps.serve.config:ServeConfig.queue}",
    ),
    "chunk-tokens": Flag(
        setting="serve.chunk-tokens",
        metavar="N",
        read=whole,
        help="tokens of a prompt read at once, while others wait",
        default="what takes 50 ms, measured at the start",
    ),
    "grace": Flag(
        setting="serve.grace",
        metavar="S",
        read=number,
        help="seconds for running answers at the end",
        default="{kvq_apps.serve.config:ServeConfig.grace_s}",
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
        help="colours",
        default="those of the last /theme; Ctrl+P lists them",
    ),
    "meter": Flag(
        setting="chat.meter",
        choices=("full", "short", "off"),
        help="what the line of numbers shows: everything, KV and context, or neither",
        default="{kvq_apps.chat.settings:ChatSettings.meter}",
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
        default = f" (default: {flag.default})" if flag.default else ""
        text = texts.get(field(name), flag.help + default)
        options: dict[str, Any] = {
            "dest": field(name),
            "default": None,
            "help": f"{text} [{environment_name(name)}]",
        }
        if flag.switch:
            options["action"] = "store_true"
        else:
            options |= {"type": flag.read, "metavar": flag.metavar, "choices": flag.choices}
            if flag.repeats:
                options["action"] = "append"
        parser.add_argument(f"--{name}", *flag.synonyms, **options)
    return parser


def field(name: str) -> str:
    """Attribute of the parsed arguments that holds flag `name`."""
    return name.replace("-", "_")
