"""Explains commands and flags of llama.cpp and Ollama that kvq does not have.

Flags that mean the same as a flag of kvq are synonyms in `flags.FLAGS`.
"""

from collections.abc import Container, Sequence

from kvq.errors import UsageError

# Their commands, and what to use here.
COMMANDS = {
    **dict.fromkeys(("list", "ls"), "`kvq models`"),
    **dict.fromkeys(("rm", "remove", "delete"), "`kvq models rm NAME`"),
    **dict.fromkeys(("show", "info"), "`kvq inspect NAME`"),
    **dict.fromkeys(("create", "convert", "quantize"), "`kvq export CHECKPOINT -o NAME`"),
    **dict.fromkeys(("download", "install", "get"), "`kvq pull NAME`"),
    **dict.fromkeys(("generate", "cli"), '`kvq run -m NAME "..."`'),
    "ps": "`kvq serve --status`",
    "stop": "`kvq serve --stop`",
    "server": "`kvq serve NAME`",
    "perplexity": "`kvq eval NAME TEXT --task ppl`",
    "cp": "a copy of the folder that `kvq models` shows, or `kvq export -o ANOTHER-NAME`",
    "push": "nothing: kvq sends no model anywhere",
}

_SAMPLERS = "possible are --temp, --top-k, --top-p, --min-p and --repeat-penalty"
_PULL = "give -m hf.co/OWNER/REPOSITORY:TYPE, once `kvq pull hf.co/OWNER/REPOSITORY:TYPE` was run"
_NO_CHOICE = "kvq has no such choice; leave it out"
_DEVICE = "a model runs whole on the processor, or with --device cuda on one GPU"
_PIECES = "a prompt is read in pieces that pay; `kvq serve --chunk-tokens N` sets their size"
_KEPT = "--kv-policy says what gives way when --kv-budget is full"

# Their flags, and what to use here. A command of kvq may have a flag of the same name.
FLAGS = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), _DEVICE),
    **dict.fromkeys(("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"), _DEVICE),
    **dict.fromkeys(("-fa", "--flash-attn"), "attention is always computed so; leave it out"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url"), _PULL),
    **dict.fromkeys(
        ("-p", "--prompt"),
        'a prompt needs no flag: `kvq run -m NAME "..."`; of a measurement it is --prefill N',
    ),
    **dict.fromkeys(
        ("-f", "--file"), "give the text on standard input: `kvq run -m NAME < FILE`"
    ),
    **dict.fromkeys(
        ("-i", "--interactive", "-cnv", "--conversation"), "`kvq chat NAME` talks in the terminal"
    ),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), _PIECES),
    **dict.fromkeys(("-tb", "--threads-batch"), "--threads N counts for prompts as well"),
    **dict.fromkeys(("--keep", "--context-shift", "--no-context-shift"), _KEPT),
    **dict.fromkeys(
        ("-c", "--ctx", "--ctx-size"), "lengths of the context to measure are --context N,.."
    ),
    **dict.fromkeys(
        ("-np", "--parallel"), "of `kvq serve` it is --sessions N; here one text runs at a time"
    ),
    **dict.fromkeys(
        ("--mirostat", "--typical", "--presence-penalty", "--frequency-penalty", "--samplers"),
        _SAMPLERS,
    ),
    **dict.fromkeys(
        ("--mlock", "--mmap", "--no-mmap", "--numa", "--no-warmup", "--jinja", "-nkvo", "-cb",
         "--no-kv-offload", "--cont-batching", "-no-cnv", "--no-conversation", "-e", "--escape",
         "--no-display-prompt", "--color", "--log-disable", "--prio", "--poll"),
        _NO_CHOICE,
    ),
    **dict.fromkeys(("--lora", "--mmproj", "-mm"), "kvq runs neither adapters nor pictures"),
    "-j": "--json-schema FILE names a file",
    "--slot-save-path": "sessions are kept by themselves; --sessions-folder PATH says where",
    "--list-devices": "`kvq doctor` says what is here",
    "--remove": "`kvq models rm NAME` deletes a model",
}  # fmt: skip


def as_ours(argv: Sequence[str]) -> list[str]:
    """Returns the command line with `kvq help COMMAND` and `kvq version` turned into flags.

    Raises a `UsageError` that names the command of kvq for another program's command.
    """
    if not argv:
        return []
    command, *words = argv
    if command == "help":
        return [*as_ours(words[:1]), "--help"]
    if command == "version":
        return ["--version"]
    if command in COMMANDS:
        raise UsageError(f"there is no command {command!r}; here it is {COMMANDS[command]}")
    return list(argv)


def check_flags(words: Sequence[str], known: Container[str]) -> None:
    """Raises a `UsageError` that helps with another program's flag that a command does not have.

    This comes before parsing, which would read `-ngl` as `-n gl`.
    """
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if flag in FLAGS and flag not in known:
            raise UsageError(f"{flag} is not known here: {FLAGS[flag]}")
