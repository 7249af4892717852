"""The table of flags that all commands share.

A command adds the flags it needs with `add_flags`. `sources` finds the value of a flag, `options`
turns values into arguments of engines, sessions and servers.
"""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any

from kvq.config import PAGE_WIDTHS
from kvq.errors import KvqError
from kvq.settings import environment_name
from kvq_apps.settings.flag_values import READERS, ComponentChoices
from kvq_apps.settings.parsers import Group
from kvq_apps.thinking import AUTO, CHOICES


@dataclass(frozen=True, slots=True)
class Flag:
    """Describes one flag.

    A `switch` takes no value; a flag that `repeats` collects its values in a list. `setting` is its
    `section.key` in the user's file; without one it cannot stand there. `default` says in words
    what counts without a value. In `default` and `help`, `{module:NAME}` stands for the value of
    that name. `metavar` decides how a value is read. Shells offer the values that it `suggests`;
    other values are possible. A command with many flags shows only the `common` ones in `--help`.
    """

    help: str
    default: str = ""
    _: KW_ONLY
    setting: str | None = None
    metavar: str = ""
    choices: Collection[str] | None = None
    suggests: Collection[str] = ()
    synonyms: tuple[str, ...] = ()
    switch: bool = False
    repeats: bool = False
    common: bool = False

    @property
    def read(self) -> Callable[[str], Any]:
        """Reads a value from its text."""
        return READERS.get(self.metavar, str)


FLAGS: dict[str, Flag] = {
    # the model
    "model": Flag("bundle, GGUF file, checkpoint folder, hub id, `default`, `nano`, or a name that "
        "`kvq models` or `kvq pull --list` shows", "the one pulled last, else `default`",
        setting="model.name", metavar="MODEL", synonyms=("-m",), common=True),
    "backend": Flag("engine to run on: %(choices)s", "auto, the fastest present",
        setting="model.backend", metavar="NAME",
        choices=ComponentChoices("kvq_runtime.backends:BACKENDS", "auto")),
    "device": Flag("device to run on: %(choices)s", "cpu", setting="model.device", metavar="NAME",
        choices=ComponentChoices("kvq_runtime.machine.gpu:DEVICES"), common=True),
    "threads": Flag("threads to compute with; auto: as many as pay on this machine, measured once, "
        "in seconds, and kept", "what was measured, else the cores", setting="model.threads",
        metavar="N|auto", suggests=("auto",), synonyms=("-t",), common=True),
    "weights-budget": Flag("bytes of the weights of experts that may be in memory, such as 4GiB: "
        "those that are chosen most; the others are read from the disk when they are needed",
        "what the system has room for", setting="model.weights-budget", metavar="SIZE"),
    "yes": Flag("pull a model of the catalogue that is not here yet without asking", switch=True,
        synonyms=("-y",)),
    "offline": Flag("ask no network, not even for a hub id", setting="model.offline", switch=True),
    # the cache
    "kbits": Flag("bits of cached keys: 8, 4 or, not on llama.cpp, 6 or 2", "the model's plan",
        setting="kv.kbits", metavar="BITS", synonyms=("-ctk", "--cache-type-k")),
    "vbits": Flag("bits of cached values: 8, 4 or, not on llama.cpp, 6 or 2", "the model's plan",
        setting="kv.vbits", metavar="BITS", synonyms=("-ctv", "--cache-type-v")),
    "kv": Flag("bits of cached keys and values, such as 4:2; fp: an unquantised cache",
        setting="kv.bits", metavar="K:V", common=True,
        suggests=("fp", *(f"{k}:{v}" for k in PAGE_WIDTHS for v in PAGE_WIDTHS))),
    "kv-budget": Flag("bytes the cache may use: 64MiB, what 4096tok (so many tokens) need, or 25%% "
        "of what the whole context takes in fp16 (--ctx-size, or the model's; eval: --context); "
        "what must give way begins at 8:8 unless --kv says otherwise",
        "what {kvq.sizing:DEFAULT_TOKENS} tokens need", setting="kv.budget",
        metavar="SIZE", common=True),
    "kv-offload": Flag("bytes of a second tier, such as 8GiB, for pages of the context that the "
        "budget does not hold, so that none loses bits: on a CPU a file, of which a step reads "
        "what --kv-read names; with --device cuda the host's memory, which each pass copies to "
        "the GPU", "none", setting="kv.offload", metavar="SIZE"),
    "kv-policy": Flag("what gives way when the budget is full: {kvq.policies:POLICIES}",
        "the model's", setting="kv.policy",
        metavar="NAME[:OPTION=VALUE,..]", suggests=ComponentChoices("kvq.policies:POLICIES")),
    "kv-read": Flag("what is read of the cache: blasst, all but values that weigh next to "
        "nothing; all; or the share of its pages that a step reads, such as 25%%",
        "{kvq.config:DEFAULT_READ}",
        setting="kv.read", metavar="SHARE|NAME[:OPTION=VALUE,..]",
        suggests=ComponentChoices("kvq.selectors:SELECTORS")),
    "kv-predict": Flag("share of the layers whose keys and values are predicted for a prompt, not "
        "computed: 50%%; lossy, for a faster first token", "off", setting="kv.predict",
        metavar="SHARE|NAME[:OPTION=VALUE,..]",
        suggests=ComponentChoices("kvq_runtime.sequence.prediction:PREDICTORS")),
    "kv-predict-with": Flag("a smaller model of the same vocabulary reads prompts in this one's "
        "place; lossy, and fitted by `kvq export --kv-predict-with`", "none",
        setting="kv.predict-with", metavar="NAME"),
    "ctx-size": Flag("context limit in tokens", "the model's", setting="model.ctx-size",
        metavar="N", synonyms=("-c", "--ctx"), common=True),
    # running
    "predict": Flag("new tokens at most, -1: until the context is full",
        "{kvq_runtime.config:DEFAULT_MAX_TOKENS}", setting="model.predict", metavar="N",
        synonyms=("-n", "--max-tokens", "--n-predict"), common=True),
    "stop": Flag("end before this text; may be repeated", metavar="TEXT", repeats=True,
        synonyms=("-r", "--reverse-prompt")),
    "system": Flag("system message; uses the model's chat template", setting="chat.system",
        metavar="TEXT", synonyms=("-s", "-sys", "--system-prompt"), common=True),
    "chat": Flag("put the prompt into the model's chat template", switch=True, common=True),
    "think": Flag("whether a chat's model thinks first: auto, as its template has it; on or off, "
        "where it can be switched; hide: as auto, and it is not shown", AUTO,
        setting="model.think", metavar="HOW", choices=CHOICES, common=True),
    "json-schema": Flag("the answer is JSON that fits the schema in this file", metavar="FILE",
        common=True),
    "grammar": Flag("the answer follows the grammar in this file, as llama.cpp writes them (GBNF)",
        metavar="FILE", synonyms=("--grammar-file",)),
    "regex": Flag("the answer matches this pattern as a whole", metavar="PATTERN"),
    "exact": Flag("encode all that follows a change again; what is typed goes behind the rest of "
        "the file", switch=True),
    "files": Flag("files that stay in the cache while you go to and fro between them, each in "
        "--kv-budget", "{kvq_apps.commands.lsp:DEFAULT_FILES}", metavar="N"),
    "no-heal": Flag("keep the prompt's last token even if it is the start of a longer one",
        switch=True),
    "usage": Flag("say in two lines how fast it was and what the cache holds",
        synonyms=("-u",), switch=True, common=True),
    "extract": Flag("print only the first block of code of the answer", synonyms=("-x",),
        switch=True, common=True),
    "stream": Flag('with --json: a line {"text"} for each piece, then the object', switch=True),
    "no-stream": Flag("print the answer when it is whole", switch=True),
    "draft": Flag("guess tokens ahead and check them in one pass: auto, rewrite, lookup, suffix, "
        "recycle, quantspec, mtp, none; the answer stays the same",
        "auto, where it does to the bit",
        setting="model.draft", metavar="NAME[:OPTION=VALUE,..]",
        suggests=ComponentChoices("kvq_specdraft:DRAFTERS", "none")),
    "draft-model": Flag("guess with a smaller model of the same vocabulary", metavar="NAME",
        synonyms=("-md", "--model-draft")),
    # sampling
    "temp": Flag("temperature, 0: greedy", "{kvq_runtime.config:Sampling.temperature}",
        setting="model.temp", metavar="T", synonyms=("--temperature",), common=True),
    "top-k": Flag("keep the N most likely tokens, 0: off", "{kvq_runtime.config:Sampling.top_k}",
        setting="model.top-k", metavar="N"),
    "top-p": Flag("keep the most likely share P, 1: off", "{kvq_runtime.config:Sampling.top_p}",
        setting="model.top-p", metavar="P"),
    "min-p": Flag("drop tokens below P times the best, 0: off",
        "{kvq_runtime.config:Sampling.min_p}", setting="model.min-p", metavar="P"),
    "repeat-penalty": Flag("weaken recent tokens, 1: off",
        "{kvq_runtime.config:Sampling.repeat_penalty}", setting="model.repeat-penalty",
        metavar="X"),
    "repeat-last-n": Flag("tokens the penalty looks back on",
        "{kvq_runtime.config:Sampling.repeat_window_tokens}", setting="model.repeat-last-n",
        metavar="N"),
    "seed": Flag("seed of the sampler", "a fresh one", setting="model.seed", metavar="N"),
    # exporting
    "out": Flag("folder to write", "by the model", metavar="PATH", synonyms=("-o",), common=True),
    "format": Flag("files to write: %(choices)s",
        "{kvq_export.config:ExportOptions.format}; gguf: llama.cpp", metavar="NAME",
        choices=ComponentChoices("kvq_export.config:Format"), common=True),
    "gguf-type": Flag("types in the GGUF file: %(choices)s; the last needs llama.cpp",
        "{kvq_export.config:ExportOptions.gguf_type}", metavar="TYPE",
        choices=ComponentChoices("kvq_export.config:GgufType")),
    "wbits": Flag("bits of linear weights: 3, 4, 5, 6 or 8 for all, or a mean such as 4.6 of all "
        "matrices, where those that lose most get more",
        "by what the model would lose, a mean of {kvq_export.config:MEAN_BITS} at most; of a GGUF "
        "file what holds its blocks",
        metavar="X", common=True),
    "size": Flag("bytes that the weights may take, such as 400MB: widths as of a mean --wbits",
        metavar="SIZE", common=True),
    "group": Flag("weights sharing a scale: 32, 64 or 128",
        "super-blocks of 256 where these divide a row, else {kvq_export.config:BLOCK}",
        metavar="N"),
    "embedding-bits": Flag("bits of embedding and output head: 3, 4, 5, 6 or 8",
        "{kvq_export.config:WeightFormat.embedding_bits}; of a mean what it is worth",
        metavar="BITS"),
    "force": Flag("replace a bundle that is already there", switch=True, common=True),
    "no-quality": Flag("skip the comparison with the unquantised checkpoint", switch=True),
    "calibrate": Flag("text that weights are rounded for, or an importance matrix of llama.cpp's",
        "prose, code and chats that come with kvq", metavar="FILE"),
    "no-calibrate": Flag("round every weight by itself: seconds, and worse", switch=True),
    "embed": Flag("give the bundle an output for vectors of texts, and make them from the last "
        "token or from the mean over all: %(choices)s", "as the checkpoint's own files say",
        metavar="NAME", choices=ComponentChoices("kvq_runtime.text_embedding:Pooling")),
    # vectors of texts
    "prompt-name": Flag("kind of the texts, such as query: the model's prompt of this name stands "
        "before each", "the model's", metavar="NAME"),
    "dimensions": Flag("cut each vector to so many of its first numbers", "all", metavar="N"),
    # inspecting
    "estimate": Flag("say what weights and cache take in memory, and whether that fits",
        switch=True),
    "config": Flag("print every setting and where its value comes from", switch=True),
    "paths": Flag("print the folders and files kvq uses", switch=True),
    # evaluating
    "task": Flag("what to measure: ppl, kld, weights, passkey, retrieval or facts; from a checkout "
        "(`apps/lab`) also calls, drafts, edit, fim, program, math, passages and replay",
        choices=("ppl", "kld", "weights", "passkey", "retrieval", "facts", "calls", "drafts",
            "edit", "fim", "program", "math", "passages", "replay"), common=True),
    "checkpoint": Flag("weights: the checkpoint that the bundle was made of: a folder, a GGUF file "
        "or a hub id", metavar="MODEL", common=True),
    "context": Flag("context lengths in tokens", metavar="N,..", common=True),
    "depths": Flag("look-ups: places of the answer, 0 to 1", metavar="X,.."),
    "trials": Flag("look-ups: prompts per length and depth",
        "{kvq_apps.evaluation.choices:EvaluationChoices.trials}", metavar="N"),
    "drafts": Flag("drafts to write side by side", "3", metavar="N", common=True),
    "drafts-method": Flag("how several drafts are written: branches, superposed",
        metavar="NAME[:OPTION=VALUE,..]", suggests=ComponentChoices("kvq_specdraft:WRITERS")),
    "table": Flag("one row of measures for each of the usual KV widths", switch=True, common=True),
    "sweep": Flag("from a checkout (`apps/lab`): policies against budgets against tasks; goes on "
        "with --out", switch=True),
    "max-tokens": Flag("use at most N tokens of the text",
        "all; table: {kvq_apps.commands.eval:DEFAULT_WINDOWS} windows", metavar="N", common=True),
    # benchmarking
    "tune": Flag("measure in seconds what is fastest on this machine, keep it, and end",
        switch=True, common=True),
    "suite": Flag("speed: steps and prefill of engines (default); serve: completions over HTTP "
        "while a chat streams, at the first --context; from a checkout (`apps/lab`) also agent: "
        "prompts whose beginning changed; drafts: all drafters against plain decoding; edit: "
        "recorded typing in a file; ttft: the first token of a prompt, predicted and computed",
        choices=("speed", "serve", "agent", "drafts", "edit", "ttft"), common=True),
    "shape": Flag("random weights in a real model's shape, such as qwen2.5-0.5b or lfm2-1.2b "
        "(a name that is none lists all); NAME:layers=N: its first layers",
        metavar="NAME", common=True),
    "peer": Flag("engines to run on the same weights, in turn with ours: llama.cpp, "
        "llama-bench=COMMAND; from a checkout (`apps/lab`) also transformers",
        metavar="NAME,..", common=True),
    "rows": Flag("rows of one sequence in a pass, timed whole and attention alone, 1 to 256",
        "{kvq_apps.bench.measure:SpeedJob.rows}", metavar="N,.."),
    "chats": Flag("suite serve: instead, tokens per second of so many chats at once, without HTTP",
        metavar="N,.."),
    "repeat": Flag("rounds of three timed decode steps", "{kvq_apps.bench.measure:SpeedJob.repeat}",
        metavar="N"),
    "prefill": Flag("tokens added to each depth at once",
        "{kvq_apps.bench.measure:SpeedJob.prefill_tokens}", metavar="N"),
    "prefill-limit": Flag("leave out a prefill of more seconds",
        "{kvq_apps.bench.measure:SpeedJob.prefill_limit_s}", metavar="S"),
    # serving
    "host": Flag("address to listen on", "{kvq_apps.serve.config:ServeConfig.host}, this machine",
        setting="serve.host", metavar="NAME", common=True),
    "port": Flag("port to listen on, 0: any free", "{kvq_apps.serve.config:ServeConfig.port}",
        setting="serve.port", metavar="N", common=True),
    "socket": Flag("also listen on this unix socket; without --host and --port on it alone",
        setting="serve.socket", metavar="PATH", common=True),
    "api-key": Flag("what clients must send as `Authorization: Bearer KEY`",
        setting="serve.api-key", metavar="KEY", common=True),
    "origin": Flag("web page that may ask, `*`: any; may be repeated", setting="serve.origin",
        metavar="URL", repeats=True),
    "alias": Flag("another name of the model; may be repeated", setting="serve.alias",
        metavar="NAME", repeats=True, synonyms=("-a",)),
    "models-budget": Flag("with several models (-m A -m B): bytes that those in memory may take "
        "together, weights and caches, such as 8GiB; the one unused for longest leaves for another",
        "all may stay", setting="serve.models-budget", metavar="SIZE"),
    "sessions": Flag("sessions held at once, each of --kv-budget",
        "{kvq_apps.serve.config:ServeConfig.sessions}", setting="serve.sessions", metavar="N",
        synonyms=("-np", "--parallel"), common=True),
    "sessions-disk": Flag("bytes of sessions kept on disk, 0: none",
        "{kvq_apps.serve.config:ServeConfig.saved_bytes}", setting="serve.sessions-disk",
        metavar="SIZE"),
    "sessions-folder": Flag("folder of the sessions kept on disk; servers that share one resume "
        "each other's", "in the cache folder", setting="serve.sessions-folder", metavar="PATH"),
    "ray": Flag("on Ray, which spreads the work over processes and machines: the one at "
        "RAY_ADDRESS, one that runs here, or one that is started here", switch=True, common=True),
    "replicas": Flag("with --ray: processes that answer, each with --sessions of its own", "1",
        metavar="N"),
    "autoscale": Flag("with --ray: from so many replicas to so many, as 1:8, as many as requests "
        "need", metavar="LEAST:MOST"),
    "queue": Flag("requests that may wait for a session",
        "{kvq_apps.serve.config:ServeConfig.queue}", setting="serve.queue", metavar="N"),
    "chunk-tokens": Flag("tokens of a prompt read at once, while others wait",
        "what takes 50 ms, measured at the start", setting="serve.chunk-tokens", metavar="N"),
    "reuse": Flag("what of a changed prompt is kept: exact: all before the change; moved: what "
        "follows it too, as it was computed before (a request's x_kvq.exact comes first)",
        "{kvq_apps.serve.config:ServeConfig.reuse}", setting="serve.reuse",
        choices=("exact", "moved")),
    "traces": Flag("send a span of each request, without texts, to the OTLP collector at this "
        "address, such as http://127.0.0.1:4318", setting="serve.traces", metavar="URL"),
    "strict-model": Flag("refuse a request for a model of another name; else any name is taken "
        "for the one that is served", setting="serve.strict-model", switch=True),
    "grace": Flag("seconds for running answers at the end",
        "{kvq_apps.serve.config:ServeConfig.grace_s}", setting="serve.grace", metavar="S"),
    # chatting
    "server": Flag("talk to a running `kvq serve` instead of loading a model",
        setting="chat.server", metavar="URL", common=True),
    "inline": Flag("below the command line instead of on the whole screen", setting="chat.inline",
        switch=True),
    "theme": Flag("colours", "those of the last /theme; Ctrl+P lists them", setting="chat.theme",
        metavar="NAME"),
    "meter": Flag("what the line of numbers shows: everything, KV and context, or neither",
        "{kvq_apps.chat.chat_settings:ChatSettings.meter}", setting="chat.meter",
        choices=("full", "short", "off")),
    "continue": Flag("go on with the chat used last", synonyms=("-c",), switch=True, common=True),
    "cid": Flag("go on with this chat (--list shows ids)", metavar="ID", common=True),
    "no-log": Flag("keep this chat in memory only", setting="chat.no-log", switch=True),
    "list": Flag("list the chats and end", switch=True, common=True),
    "search": Flag("list the chats with a message that has these words", metavar="TEXT"),
    "export": Flag("write a chat (--cid, or the last): .md Markdown, else JSON lines; -: stdout",
        metavar="FILE", common=True),
    "import": Flag("read a chat: JSON lines, Markdown or ChatGPT's JSON; -: stdin", metavar="FILE"),
    # output
    "verbose": Flag("show every number, not the summary alone", synonyms=("-v",), switch=True),
    "json": Flag("print one JSON object on stdout", switch=True, common=True),
    "debug": Flag("show tracebacks and debug logs", switch=True),
}  # fmt: skip

KV_WIDTHS = ("kbits", "vbits")
KV_FLAGS = (*KV_WIDTHS, "kv", "kv-budget", "kv-offload", "kv-policy", "kv-read")
CONSTRAINT_FLAGS = ("json-schema", "grammar", "regex")
PREDICT_FLAGS = ("kv-predict", "kv-predict-with")
# For the help of commands that chat: the defaults of `SAMPLING_FLAGS` are kvq's, not the model's.
SAMPLING_NOTE = "What the model's generation_config.json says comes before the defaults named here."
SAMPLING_FLAGS = (
    "temp", "top-k", "top-p", "min-p", "repeat-penalty", "repeat-last-n", "seed",
)  # fmt: skip
SERVE_FLAGS = (
    "host", "port", "socket", "api-key", "origin", "alias", "strict-model", "models-budget",
    "traces", "grace",
)  # fmt: skip
CHAT_FLAGS = ("continue", "cid", "no-log", "list", "search", "export", "import")
ENGINE_FLAGS = (
    "model", "backend", "device", "threads", "weights-budget", "offline", "yes",
)  # fmt: skip
OUTPUT_FLAGS = ("json", "debug")


def add_flags(parser: Group, *names: str, repeated: Collection[str] = (), **texts: str) -> Group:
    """Adds the flags `names`; `texts` replaces the help of some of them (kv_budget=...).

    Those in `repeated` collect the values of the command line in a list, although others have one.
    """
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
            options |= {"type": flag.read, "metavar": flag.metavar or None, "choices": flag.choices}
            if flag.repeats or name in repeated:
                options["action"] = "append"
        parser.add_argument(f"--{name}", *flag.synonyms, **options)
    return parser


# Flags by the arguments that errors name, where the two names differ.
FLAG_OF_ARGUMENT = {
    "k_bits": "kbits", "v_bits": "vbits", "policy": "kv-policy", "predict": "kv-predict",
    "predict_with": "kv-predict-with", "context_tokens": "ctx-size", "method": "drafts-method",
    "max_tokens": "predict", "temperature": "temp", "repeat_window_tokens": "repeat-last-n",
    "bits": "wbits", "block": "group", "size_bytes": "size", "importance": "calibrate",
}  # fmt: skip


def flag_of(argument: str) -> str:
    """Returns the name of the flag for an argument that an error names."""
    return FLAG_OF_ARGUMENT.get(argument, argument.removeprefix("--").replace("_", "-"))


def format_error(error: BaseException) -> str:
    """Returns the message of an error, with arguments written as flags."""
    if not isinstance(error, KvqError):
        return str(error)
    return error.message_for(lambda name, value: f"--{flag_of(name)} {value}".rstrip())


def uncommon() -> set[str]:
    """Returns the attributes of the parsed arguments for flags that few people use."""
    return {field(name) for name, flag in FLAGS.items() if not flag.common}


def field(name: str) -> str:
    """Returns the attribute of the parsed arguments that holds the flag `name`."""
    return name.replace("-", "_")
