"""Measures a trained model and writes its card: README.md and card.json in the model's folder.

    python models/training/card.py MODEL PACKED CORPUS.jsonl.xz [--infilling HUMANEVAL.jsonl.gz]
        [--drafts-for LARGER]

Bits per byte, and the share of a larger model's own greedy tokens that this one guesses, are the
checkpoint's (bf16); everything else is what `kvq eval` and `kvq run` print for a bundle exported
from it, so that each figure in the card stands beside the command that gives it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

PROMPTS = (
    "def fibonacci(n):\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
    "The purpose of this proposal is to",
    "def is_prime(n):\n",
    "import json\nfrom pathlib import Path\n\n\ndef read_settings(path):\n",
    '{"name": "kvq", "version": "0.1.0", "dependencies": [',
    "@dataclass\nclass Point:\n",
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def test_",
    'def count_words(text):\n    """',
)
NEW_TOKENS = 110
WINDOWS = 12
# A text loops where a piece of so many tokens at most stands three times in a row or more often,
# and fills so many tokens; looked for in the first tokens of a sample.
LOOP_PIECE, LOOP_TOKENS, LOOP_WITHIN = 16, 12, 48
# Places in held-out code where the larger model goes on, tokens before them, tokens it writes.
DRAFT_PLACES, DRAFT_BEFORE, DRAFT_TOKENS = 24, 512, 128


def kvq(*words: str) -> dict[str, Any]:
    """What a kvq command prints with --json."""
    command = [sys.executable, "-m", "kvq_apps.cli", *words, "--json"]
    print("kvq", *words, file=sys.stderr)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@torch.no_grad()
def bits_per_byte(folder: Path, text: str, length: int) -> float:
    """Of evenly spaced windows of `length` tokens, every token but the first scored."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    runs = max(1, len(ids) // length)
    count = min(WINDOWS, runs)
    nats = size = 0.0
    for index in range(count):
        run = index * runs // count
        part = ids[run * length : (run + 1) * length]
        logits = model(torch.tensor([part])).logits[0, :-1].float()
        nats += float(functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="sum"))
        size += len(tokenizer.decode(part[1:], skip_special_tokens=False).encode())
    return nats / math.log(2) / size


def loops(ids: list[int]) -> bool:
    """Whether a piece of `ids` is said over and over."""
    for piece in range(1, LOOP_PIECE + 1):
        needed = max(2 * piece, LOOP_TOKENS - piece)  # of tokens that equal the one a piece before
        equal = 0
        for before, after in zip(ids, ids[piece:], strict=False):
            equal = equal + 1 if before == after else 0
            if equal >= needed:
                return True
    return False


@torch.no_grad()
def guessed(folder: Path, larger: Path, text: str) -> float:
    """Share of what `larger` writes greedily behind places of `text` that is likeliest here too."""
    small, large = (
        LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        for path in (folder, larger)
    )
    tokenizer = Tokenizer.from_file(str(larger / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    span = (len(ids) - DRAFT_BEFORE) // DRAFT_PLACES
    starts = torch.arange(DRAFT_PLACES)[:, None] * span + torch.arange(DRAFT_BEFORE)
    written = large.generate(
        torch.tensor(ids)[starts], max_new_tokens=DRAFT_TOKENS, min_new_tokens=DRAFT_TOKENS,
        do_sample=False,
    )  # fmt: skip
    likeliest = small(written).logits[:, DRAFT_BEFORE - 1 : -1].argmax(-1)
    return float((likeliest == written[:, DRAFT_BEFORE:]).float().mean())


def measure(arguments: argparse.Namespace, bundle: str) -> dict[str, Any]:
    """Every figure of the card."""
    folder, packed = arguments.model, arguments.packed
    texts = {path.stem.split(".")[1]: path for path in sorted(packed.glob("held_out.*.txt"))}
    found: dict[str, Any] = {"bits_per_byte": {}}
    for kind, path in texts.items():
        text = path.read_text(encoding="utf-8")
        found["bits_per_byte"][kind] = {
            length: round(bits_per_byte(folder, text, length), 4) for length in (1024, 4096)
        }
    python = str(texts["python"])
    corpus = str(arguments.corpus)
    beaten = ("--baseline", corpus) if arguments.baseline else ()
    fim = ("eval", "-m", bundle, "--task", "fim", "--kv", "fp")
    found["fim"] = {"held_out": kvq(*fim, corpus, *beaten, "--limit", "100")}
    if arguments.infilling is not None:
        found["fim"]["humaneval"] = kvq(*fim, str(arguments.infilling), *beaten, "--limit", "100")
    found["table"] = kvq(
        "eval", "-m", bundle, "--table", "--context", str(arguments.context), "--trials", "2",
        "--max-tokens", str(4 * arguments.context), python,
    )  # fmt: skip
    found["passkey"] = kvq(
        "eval", "-m", bundle, "--task", "passkey", "--kv", "fp", "--trials", "2",
        "--context", ",".join(str(n) for n in (512, 1024, 2048, 4000)),
    )  # fmt: skip
    run = ("run", "-m", bundle, "--temp", "0", "-n", str(NEW_TOKENS))
    found["samples"] = {prompt: kvq(*run, prompt)["text"] for prompt in PROMPTS}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    starts = (tokenizer.encode(text).ids[:LOOP_WITHIN] for text in found["samples"].values())
    found["loops"] = sum(map(loops, starts))
    if arguments.drafts_for is not None:
        code = texts["python"].read_text(encoding="utf-8")
        found["guessed"] = round(guessed(folder, arguments.drafts_for, code), 4)
    return found


def rows_of(table: list[dict[str, Any]]) -> str:
    """A markdown table of rows that share their keys."""

    def shown(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    keys = dict.fromkeys(key for row in table for key in row)
    head = [key for key in keys if not str(key).endswith("_rows")]
    lines = [" | ".join(map(str, head)), " | ".join("---" for _ in head)]
    lines += [" | ".join(shown(row.get(key, "")) for key in head) for row in table]
    return "\n".join(f"| {line} |" for line in lines)


def card(about: dict[str, Any], found: dict[str, Any], manifest: dict[str, Any]) -> str:
    """The text of the model card."""
    recipe, shape = about["recipe"], about["model"]
    sizes = manifest["bytes_by_kind"]
    licences = sorted({str(source["licence"]) for source in manifest["sources"]})
    fim = [
        {
            "lines": name,
            "n": report["n"],
            "exact match": report["value"],
            "edit similarity": report.get("edit_similarity"),
            **{
                f"n-gram {key.replace('_', ' ')}": report["baseline"][key]
                for key in ("exact_match", "edit_similarity")
                if "baseline" in report
            },
        }
        for name, report in found["fim"].items()
    ]
    bits = [{"held-out text": kind, **row} for kind, row in found["bits_per_byte"].items()]
    samples = "\n\n".join(
        f"```\n{prompt}\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}{text}\n```"
        for prompt, text in found["samples"].items()
    )
    device = "one CUDA GPU" if about["device"] == "cuda" else "two CPU cores"
    drafts = ""
    if "guessed" in found:
        drafts = f"""
As a drafter: of {DRAFT_TOKENS} tokens that the larger model writes greedily behind each of
{DRAFT_PLACES} places in held-out Python, {found["guessed"]:.1%} are the likeliest here too.
"""
    return f"""---
license: apache-2.0
---
# {about["name"]}

A small Llama trained from nothing for kvq: {about["parameters"] / 1e6:.1f} M parameters,
{shape["num_hidden_layers"]} layers, hidden size {shape["hidden_size"]},
{shape["num_attention_heads"]} query and {shape["num_key_value_heads"]} KV heads of
{shape["head_dim"]} channels, {shape["vocab_size"]} tokens, context
{shape["max_position_embeddings"]}. Trained on {device} for {about["tokens"] / 1e6:.1f} M tokens
({"the last run: " if "earlier" in about else ""}{recipe["steps"]} steps, the last
{recipe["long_steps"]} of them on texts of {recipe["long_length"]}).
{about.get("note", "")}
It completes Python and fills in lines; it knows next to nothing about the world, and what it says
in a chat is the shape of an answer, not an answer.

## Data
{", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in sizes.items())} of text, sources and
versions in `data.json`. Licences: {", ".join(licences)}. Dialogues: Schema-Guided Dialogue
(CC BY-SA 4.0); shell help: tldr-pages (CC BY 4.0). No file under the GPL, LGPL, AGPL or MPL.

## Figures
Bits per byte of held-out files, bf16, windows of 1024 and 4096 tokens:

{rows_of(bits)}

Filling in single lines (`kvq eval --task fim --kv fp`), n-grams of the same corpus beside it:

{rows_of(fim)}

KV settings (`kvq eval --table --context {found["table"].get("context", "")}`), against the same
4-bit weights with an unquantised cache:

{rows_of(found["table"]["rows"])}

Passkey with an unquantised cache (`kvq eval --task passkey --kv fp`), by length and depth:

{rows_of(found["passkey"]["rows"])}
{drafts}
## What it writes
Greedily, as it is, from the mark on. Of these {len(PROMPTS)}, {found["loops"]} say one thing over
and over within {LOOP_WITHIN} tokens: a piece of at most {LOOP_PIECE} tokens, three times in a row
or more often, {LOOP_TOKENS} tokens or more in all.

{samples}
"""


def main() -> None:
    """Measures, then writes the card and its numbers."""
    parser = argparse.ArgumentParser(description="Writes the card of a trained model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--infilling", type=Path)
    parser.add_argument("--baseline", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--drafts-for", type=Path, help="a larger model that this one drafts for")
    arguments = parser.parse_args()
    about = json.loads((arguments.model / "training.json").read_text())
    manifest = json.loads(arguments.corpus.with_suffix(".manifest.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        bundle = str(Path(scratch) / "bundle")
        kvq("export", str(arguments.model), "-o", bundle)
        found = measure(arguments, bundle)
    (arguments.model / "card.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.model / "data.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (arguments.model / "README.md").write_text(card(about, found, manifest), encoding="utf-8")


if __name__ == "__main__":
    main()
