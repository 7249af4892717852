"""Trains the tokenizer: byte-level BPE with ChatML, infilling and file-separator tokens.

    python models/training/vocabulary.py corpus.jsonl.xz --out TOKENIZER

Writes tokenizer.json, tokenizer_config.json and chat_template.jinja. The split pattern is Qwen2's
(words, single digits, runs of punctuation, runs of space), because every engine knows it by name.
Nothing is normalised: what goes in comes out, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvq_models.control import FIM_ORDER, SUFFIX_FIRST

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PREFIX, MIDDLE, SUFFIX, PAD = (
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
)  # fmt: skip
REPOSITORY, FILE = "<|repo_name|>", "<|file_sep|>"
SPECIAL = (END, TURN_START, TURN_END, PREFIX, MIDDLE, SUFFIX, PAD, REPOSITORY, FILE)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIZE = 16384
# Share of each kind of text the merges are learned from.
SHARE = {"python": 0.35, "books": 0.12, "peps": 0.5, "tldr": 0.5, "dialogues": 0.12}


def sample(corpus: Path) -> Iterator[str]:
    """Texts to learn merges from, held-out ones left out."""
    rng = random.Random(0)
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if not document["held_out"] and rng.random() < SHARE[document["kind"]]:
                yield document["text"]


def train(texts: Iterator[str]) -> Tokenizer:
    """A tokenizer of `SIZE` tokens, the special ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    # Every text the model read began after the end of another.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return tokenizer


def main() -> None:
    """Trains and writes the tokenizer's files."""
    parser = argparse.ArgumentParser(description="Trains the tokenizer.")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = train(sample(arguments.corpus))
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "add_bos_token": True,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        FIM_ORDER: SUFFIX_FIRST,
    }
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (arguments.out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    main()
