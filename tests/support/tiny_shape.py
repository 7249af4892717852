"""A shape small enough to be timed in a test. The bench's tests vary it."""

from collections.abc import Mapping
from typing import Any

COMMON: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
TINY_SHAPE = {**COMMON, "model_type": "llama", "tie_word_embeddings": True}
