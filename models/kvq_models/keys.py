"""Reads a checkpoint's config.json by a table of keys: required, default or must equal.

It has the three kinds of key, the list of keys that never change the arithmetic, and the refusals.
A key that is neither in the family's table nor known to be harmless is refused by name, unless it
is switched off (null, false or empty), since ignoring it could mean wrong numbers.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvq.errors import CheckpointError, UnsupportedModelError, reason_of


@dataclass(frozen=True, slots=True)
class Required:
    """Describes a key that the checkpoint must have; a `nullable` one may be null, for none."""

    kind: type = int
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Default:
    """Describes a key that the checkpoint may lack or have as null; `value` is used then."""

    kind: type
    value: Any = None


@dataclass(frozen=True, slots=True)
class MustEqual:
    """Describes a key that may only have one of these values; if it is absent, the first counts."""

    allowed: tuple[Any, ...]

    def __init__(self, *allowed: Any) -> None:
        object.__setattr__(self, "allowed", allowed)


Key = Required | Default | MustEqual


def read_keys(model_type: str, keys: Mapping[str, Key], data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checked value of every key in `keys`.

    Raises CheckpointError if a required key is missing or a value has the wrong kind,
    UnsupportedModelError for a value or key that the family does not compute.
    """
    _refuse_unknown(model_type, keys, data)
    return {name: _read_key(model_type, name, key, data) for name, key in keys.items()}


def _read_key(model_type: str, name: str, key: Key, data: Mapping[str, Any]) -> Any:
    value = data.get(name)
    match key:
        case MustEqual(allowed):
            return _read_fixed(model_type, name, allowed, data)
        case Required(kind, nullable):
            if value is None and nullable and name in data:
                return None
            if value is None:
                raise CheckpointError(f"config.json lacks {name}, which a {model_type} model needs")
        case Default(kind, default):
            if value is None:
                return default
    return checked(name, value, kind)


def _read_fixed(
    model_type: str, name: str, allowed: tuple[Any, ...], data: Mapping[str, Any]
) -> Any:
    value = data.get(name, allowed[0])
    if not any(value == option and type(value) is type(option) for option in allowed):
        raise UnsupportedModelError(
            f"{name} = {value!r} is not supported for {model_type}; "
            f"supported: {', '.join(repr(option) for option in allowed)}"
        )
    return value


def checked(name: str, value: Any, kind: type) -> Any:
    """Returns the value if it is of this kind (an int counts as a float).

    Raises CheckpointError.
    """
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
        raise CheckpointError(f"config.json has {name} = {value}; it should be finite")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(
            f"config.json has {name} = {value!r}; it should be of kind {kind.__name__}"
        )
    return value


def _refuse_unknown(model_type: str, keys: Mapping[str, Key], data: Mapping[str, Any]) -> None:
    for name, value in data.items():
        if name in keys or name in HARMLESS or name.startswith("_") or not value:
            continue
        nearest = difflib.get_close_matches(name, keys, n=1)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        raise UnsupportedModelError(
            f"config.json has {name} = {_shortened(value)}, "
            f"which {model_type} does not know{hint}; "
            "if it does not change the arithmetic, remove it from config.json. "
            f"Known: {', '.join(sorted(keys))}"
        )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Keys that never change the logits of an inference pass, whatever their values are.
HARMLESS = frozenset(
    """
    architectures attention_dropout attn_implementation attn_pdrop auto_map bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout decoder_start_token_id diversity_penalty do_sample dropout dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout hidden_dropout_prob id2label initializer_factor
    initializer_range is_llama_config label2id length_penalty max_length max_new_tokens
    max_sequence_length min_length min_p model_max_length model_type name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16
    use_cache use_flash_attention use_flash_attn
    """.split()  # noqa: SIM905 - a list would take a line a word
)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises CheckpointError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    if not isinstance(data, dict):
        kind = type(cast(object, data)).__name__
        raise CheckpointError(f"{path} should hold a JSON object; it holds a {kind}")
    return cast(dict[str, Any], data)
