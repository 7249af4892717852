"""Fields of other servers that ask for what this server cannot do.

What is not in the table and not read by anything has no effect, and the answer names it in
`x_kvq.ignored`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_apps.serve.fields import Fields

_SAMPLING = "use temperature, top_k, top_p and min_p"
_REPEATS = "use repeat_penalty, presence_penalty and frequency_penalty"
_NO_PICTURES = "this model reads and writes text only"
# For each field the values that ask for nothing, beside empty ones, and what is possible instead.
UNSUPPORTED: Mapping[str, tuple[Sequence[Any], str]] = {
    "mirostat": ((), _SAMPLING),
    "typical_p": ((1,), _SAMPLING),
    "tfs_z": ((1,), _SAMPLING),
    "top_n_sigma": ((-1,), _SAMPLING),
    "adaptive_target": ((-1,), _SAMPLING),
    "dynatemp_range": ((), _SAMPLING),
    "xtc_probability": ((), _SAMPLING),
    "min_keep": ((1,), _SAMPLING),
    "dry_multiplier": ((), _REPEATS),
    "min_tokens": ((), "use ignore_eos with max_tokens, or n_predict"),
    "post_sampling_probs": ((), "n_probs tells probabilities before sampling"),
    "lora": ((), "export a model with the adapter merged into it"),
    "n_cache_reuse": ((), "/infill keeps what stands behind a change"),
    "return_progress": ((), "comments in a stream say how much of the prompt is read"),
    "modalities": ((["text"],), _NO_PICTURES),
    "audio": ((), _NO_PICTURES),
    "images": ((), _NO_PICTURES),
    "template": ((), "the model's own chat template holds; with raw the prompt is the whole text"),
    "context": ((), "send the conversation as messages"),
}


def refuse_unsupported(fields: Fields) -> None:
    """Raises a `RequestError` for a field that asks for what is not possible here."""
    for name, (harmless, advice) in UNSUPPORTED.items():
        value = fields.get(name)
        if value and value not in harmless:
            fields.refuse_with(name, f"{name} is not supported; {advice}", "unsupported")
