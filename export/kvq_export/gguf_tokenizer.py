"""The vocabulary of a GGUF file as the tokenizer.json of a checkpoint.

Knows the vocabularies that decoders have: byte-level BPE (`gpt2`), whose cut has a name, and pieces
with marked spaces that merge by score (`llama`) or as a list says (`gemma4`). The other way is
`gguf_vocabulary`.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_export.gguf_config import Metadata
from kvq_export.gguf_pre import Row, pre_tokenizer, row_called
from kvq_export.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NO_MERGE,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORD_MARK,
)
from kvq_models.control import FIM_ORDER, SUFFIX_FIRST
from kvq_models.tokenizer import TokenizerFiles

_KEYS = "tokenizer.ggml."
KINDS = ("gpt2", "llama", "gemma4")
# Trained vocabularies have pieces of some dozens; the splits of a piece are as many as its square.
_LONGEST_PIECE = 256
# Tokens of a Phi-3 file after which spaces belong to the token; the file cannot say so.
_PHI3_BARE = ("<unk>", "<s>", "<|endoftext|>")


def read_tokens(metadata: Metadata) -> tuple[list[str], np.ndarray]:
    """The text and the kind of every token; empty for a file that has none.

    Raises `CheckpointError` for lists that do not belong together.
    """
    raw = metadata.values.get(f"{_KEYS}tokens", [])
    if not isinstance(raw, list):
        raise CheckpointError(f"{metadata.path} is damaged: its tokens are no texts")
    types = metadata.values.get(f"{_KEYS}token_type", np.full(len(raw), NORMAL))
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) != len(raw):
        raise CheckpointError(f"{metadata.path} is damaged: its tokens are not all of some kind")
    return [piece.decode("utf-8", errors="replace") for piece in raw], types


def read_tokenizer(metadata: Metadata, tokens: list[str], types: np.ndarray) -> TokenizerFiles:
    """What a checkpoint folder would hold.

    Raises `UnsupportedModelError` for a vocabulary of another kind or cut, `CheckpointError` for
    a damaged one.
    """
    kind = metadata.values.get(f"{_KEYS}model")
    if kind not in KINDS or not tokens:
        what = "no tokenizer" if kind in (None, "no_vocab") else f"a tokenizer of kind {kind!r}"
        raise UnsupportedModelError(f"{metadata.path} has {what}; supported: {', '.join(KINDS)}")
    if len(set(tokens)) < len(tokens):
        raise CheckpointError(f"{metadata.path} is damaged: two of its tokens are the same")
    pieces = _pieces(tokens, types)
    row, parts = None, dict[str, Any]()
    match kind:
        case "gpt2":
            row = _cut(metadata)
            parts = _byte_level(metadata, pieces, row)
        case "llama":
            merges = _merges_by_score(metadata, pieces, types)
            parts = _marked_words(metadata, pieces, types, merges, prefix=True)
        case _:
            parts = _marked_words(metadata, pieces, types, _merges(metadata), prefix=False)
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(metadata, tokens, types)),
        "post_processor": None,
        **parts,
    }
    template = metadata.values.get("tokenizer.chat_template")
    return TokenizerFiles(
        definition=json.dumps(definition, ensure_ascii=False),
        settings=_settings(metadata, tokens, starts=row is None or row.starts),
        chat_template=template if isinstance(template, str) else None,
    )


def _pieces(tokens: list[str], types: np.ndarray) -> dict[str, int]:
    """Text -> id of all but the placeholders that fill a vocabulary up."""
    used = np.flatnonzero(types != UNUSED)
    size = int(used[-1]) + 1 if len(used) else 0
    return {token: index for index, token in enumerate(tokens[:size])}


def _added(metadata: Metadata, tokens: list[str], types: np.ndarray) -> Iterator[dict[str, Any]]:
    strips = metadata.architecture == "phi3" and metadata.values.get(f"{_KEYS}model") == "llama"
    for token in np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN, USER_DEFINED))).tolist():
        yield {
            "id": token,
            "content": tokens[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and tokens[token] not in _PHI3_BARE,
            "normalized": False,
            "special": int(types[token]) != USER_DEFINED,
        }


def _settings(metadata: Metadata, tokens: list[str], *, starts: bool) -> dict[str, Any]:
    named = {
        f"{name}_token": metadata.token(key, len(tokens))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    settings: dict[str, Any] = {
        name: tokens[token] for name, token in named.items() if token is not None
    }
    settings["add_bos_token"] = bool(metadata.values.get(f"{_KEYS}add_bos_token", starts))
    if metadata.values.get("kvq.fim.suffix_first") is True:
        settings[FIM_ORDER] = SUFFIX_FIRST
    return settings


def _cut(metadata: Metadata) -> Row:
    name = metadata.values.get(f"{_KEYS}pre", "default")
    try:
        return row_called(str(name))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{metadata.path}: {error}") from error


def _merges(metadata: Metadata) -> list[list[str]]:
    """The pairs of pieces that a file lists, the first to merge first."""
    raw = metadata.values.get(f"{_KEYS}merges", [])
    if not isinstance(raw, list):
        raise CheckpointError(f"{metadata.path} is damaged: its merges are no texts")
    merges = [merge.decode("utf-8", errors="replace").split(" ") for merge in raw if merge]
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError(f"{metadata.path} is damaged: a merge is not of two pieces")
    return merges


def _byte_level(metadata: Metadata, pieces: dict[str, int], row: Row) -> dict[str, Any]:
    return {
        "normalizer": {"type": "NFC"} if row.composed else None,
        "pre_tokenizer": pre_tokenizer(row),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": row.whole_words,
            "vocab": pieces,
            "merges": _merges(metadata),
        },
    }


def _marked_words(
    metadata: Metadata,
    pieces: dict[str, int],
    types: np.ndarray,
    merges: Sequence[Sequence[str]],
    *,
    prefix: bool,
) -> dict[str, Any]:
    """`prefix`: a file that does not say whether a text begins with a space means that it does."""
    prefix = bool(metadata.values.get(f"{_KEYS}add_space_prefix", prefix))
    single = bool(metadata.values.get(f"{_KEYS}remove_extra_whitespaces", False))
    unknown = np.flatnonzero(types == UNKNOWN).tolist()
    names = list(pieces)
    space = {"String": " "}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *([_replaced({"Regex": " {2,}"}, " ")] if single else []),
                *([{"type": "Prepend", "prepend": WORD_MARK}] if prefix else []),
                _replaced(space, WORD_MARK),
            ],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                _replaced({"String": WORD_MARK}, " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": names[unknown[0]] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": bool((types == BYTE).any()),
            "vocab": pieces,
            "merges": merges,
        },
    }


def _replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _merges_by_score(
    metadata: Metadata, pieces: dict[str, int], types: np.ndarray
) -> list[Sequence[str]]:
    """Every pair of pieces that make a third, the one of the highest score first."""
    scores = metadata.values.get(f"{_KEYS}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(types):
        raise CheckpointError(f"{metadata.path} is damaged: its tokens have no scores")
    normal = {piece for piece, token in pieces.items() if types[token] == NORMAL}
    found: list[tuple[float, int, str, str]] = []
    for piece in normal:
        score = float(scores[pieces[piece]])
        if len(piece) < 2 or score <= NO_MERGE:
            continue
        if len(piece) > _LONGEST_PIECE:
            raise CheckpointError(
                f"{metadata.path} is damaged: a piece of its vocabulary has {len(piece)} "
                f"characters, more than {_LONGEST_PIECE}"
            )
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in normal and right in normal:
                found.append((-score, pieces[piece], left, right))
    found.sort(key=lambda merge: (merge[0], merge[1], -len(merge[2])))
    return [(left, right) for _, _, left, right in found]
