"""Tiny random checkpoints in the form of Qwen3-Embedding and Qwen3-Reranker."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tiny import make_checkpoint, read_safetensors, write_safetensors

QUERY = "Instruct: find it\nQuery:"
PROMPTS = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None}
MODULES = ("models.Transformer", "models.Pooling", "models.Normalize")


def make_embedder(
    folder: Path,
    *,
    pooling: str = "pooling_mode_lasttoken",
    modules: tuple[str, ...] = MODULES,
    **config: Any,
) -> Path:
    """A qwen3 without a head, saved as sentence-transformers does; its texts have an end token."""
    make_checkpoint("qwen3", folder, **config)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in read_safetensors(folder / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    write_safetensors(folder / "model.safetensors", tensors)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "1_Pooling").mkdir()
    for name, content in (
        ("modules.json", [{"type": f"sentence_transformers.{module}"} for module in modules]),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": False, pooling: True}),
        ("config_sentence_transformers.json", PROMPTS),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder


def make_reranker(folder: Path) -> Path:
    """A qwen3 whose vocabulary has both answers and the marks of a thought."""
    make_checkpoint("qwen3", folder, max_position_embeddings=1024)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark) for mark in ("<think>", "</think>")])
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
