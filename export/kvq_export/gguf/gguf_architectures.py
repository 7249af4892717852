"""How llama.cpp's architectures differ, for files that are read and files that are written.

Facts about llama.cpp are of the commit inside llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Architecture:
    """Says which family this name means, and how llama.cpp computes it, where architectures differ.

    `interleaved`: it rotates neighbouring channels, where checkpoints rotate halves. `fused`: it
    wants one tensor for q, k and v, and one for gate and up. `fused_experts`: gate and up of
    experts are one tensor. `by_key_head`: gates of delta nets lie key head by key head; else the
    heads of their values are dealt out. `rope_factors`: it reads tensors of rotary factors.
    `windows`: layers may have a window. `square`: all heads together are as wide as the hidden
    states. `mixed`: layers may differ in their KV heads and in the width of their MLPs.
    `drafting`: layers of a draft head may follow the model's. `called`: tensors that have other
    names than in most.
    """

    name: str
    family: str
    interleaved: bool = False
    fused: bool = False
    fused_experts: bool = False
    by_key_head: bool = False
    rope_factors: bool = False
    windows: bool = False
    square: bool = False
    mixed: bool = False
    drafting: bool = False
    called: Mapping[str, str] = field(default_factory=dict[str, str])


_POST_NORM = {"ffn_norm": "post_attention_norm"}
_EMBED_NORM = {"output_norm": "token_embd_norm"}
ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("llama", "llama", interleaved=True, rope_factors=True),
        Architecture("mistral3", "ministral3", interleaved=True, rope_factors=True),
        Architecture("granite", "granite", interleaved=True, rope_factors=True),
        Architecture("smollm3", "smollm3", interleaved=True),
        Architecture("qwen2", "qwen2", square=True),
        Architecture("qwen3", "qwen3"),
        Architecture("qwen3moe", "qwen3_moe"),
        Architecture("qwen35", "qwen3_5_text", drafting=True, called=_POST_NORM),
        Architecture("qwen35moe", "qwen3_5_moe_text", drafting=True, called=_POST_NORM),
        Architecture("qwen3next", "qwen3_next", by_key_head=True, drafting=True, called=_POST_NORM),
        Architecture("phi2", "phi", square=True),
        Architecture("phi3", "phi3", fused=True, rope_factors=True, square=True),
        Architecture("gemma", "gemma"),
        Architecture("gemma2", "gemma2", windows=True),
        Architecture("gemma3", "gemma3_text", windows=True),
        Architecture(
            "gemma4", "gemma4_text", fused_experts=True, rope_factors=True, windows=True, mixed=True
        ),
        Architecture("olmo2", "olmo2", windows=True, square=True),
        Architecture("olmoe", "olmoe", square=True),
        Architecture("starcoder2", "starcoder2", square=True),
        Architecture("lfm2", "lfm2", square=True, mixed=True, called=_EMBED_NORM),
        Architecture("lfm2moe", "lfm2_moe", square=True, mixed=True, called=_EMBED_NORM),
        Architecture("gpt-oss", "gpt_oss", windows=True, called=_POST_NORM),
    )
}
