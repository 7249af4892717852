"""Reads the vocabulary of a GGUF file as the tokenizer.json of a checkpoint.

Knows the vocabularies that decoders have: byte-level BPE (`gpt2`), whose cut has a name, and pieces
with marked spaces that merge by score (`llama`) or as a list says (`gemma4`). The other way is
`gguf_vocabulary`.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_export.gguf.gguf_config import Metadata
from kvq_export.gguf.gguf_pre import byte_level, pre_tokenizer, row_called
from kvq_export.gguf.gguf_vocabulary import WORD_MARK
from kvq_models.control import FIM_ORDER, SUFFIX_FIRST
from kvq_models.pieces import distinct_pieces
from kvq_models.tokenizer import TokenizerFiles
from kvq_runtime.bundle.gguf_file import (
    BYTE,
    CONTROL,
    NORMAL,
    TOKENIZER,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)

logger = logging.getLogger(__name__)

KINDS = ("gpt2", "llama", "gemma4")
# Kinds of tokens that no text becomes, whatever it spells.
_NEVER_MADE = (UNKNOWN, CONTROL, BYTE)
# Trained vocabularies have pieces of some dozens; the splits of a piece are as many as its square.
_LONGEST_PIECE = 256
# What llama.cpp takes for the end of an answer, also where a file (Phi-3's) calls it text.
_END = "</s>"
# Tokens of a Phi-3 file after which spaces belong to the token; the file cannot say so.
_PHI3_BARE = ("<unk>", "<s>", "<|endoftext|>")


def read_tokens(metadata: Metadata) -> tuple[list[str], np.ndarray]:
    """Returns the text and the kind of every token; empty for a file that has none.

    Of a text that several tokens have, all but the first are marked: see `distinct_pieces`. Raises
    `CheckpointError` for lists that do not belong together.
    """
    raw = metadata.values.get(f"{TOKENIZER}tokens", [])
    if not isinstance(raw, list):
        raise CheckpointError(f"{metadata.path} is damaged: its tokens are no texts")
    types = metadata.values.get(f"{TOKENIZER}token_type", np.full(len(raw), NORMAL))
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) != len(raw):
        raise CheckpointError(f"{metadata.path} is damaged: its tokens are not all of some kind")
    try:
        pieces = [piece.decode("utf-8") for piece in raw]
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{metadata.path} is damaged: the token {error.object!r} is no UTF-8 text"
        ) from error
    if len(set(pieces)) < len(pieces):
        logger.warning(
            "%s has %d tokens whose text an earlier token has too: texts are read as the earlier",
            metadata.path,
            len(pieces) - len(set(pieces)),
        )
    return list(distinct_pieces(pieces)), types


def read_tokenizer(metadata: Metadata, tokens: list[str], types: np.ndarray) -> TokenizerFiles:
    """Returns the tokenizer files of a checkpoint folder.

    Raises `UnsupportedModelError` for a vocabulary of another kind or cut, `CheckpointError` for a
    damaged one.
    """
    kind = metadata.values.get(f"{TOKENIZER}model")
    if kind not in KINDS or not tokens:
        none = kind in (None, "no_vocab")
        tokenizer = "no tokenizer" if none else f"a tokenizer of kind {kind!r}"
        supported = ", ".join(KINDS)
        raise UnsupportedModelError(f"{metadata.path} has {tokenizer}; supported: {supported}")
    # Without the placeholders that fill a vocabulary up.
    used = np.flatnonzero(types != UNUSED).tolist()
    pieces = {token: index for index, token in enumerate(tokens[: max(used, default=-1) + 1])}
    starts, by_score = True, kind == "llama"
    if kind == "gpt2":
        name = metadata.values.get(f"{TOKENIZER}pre", "default")
        row = row_called(str(name), metadata.path)
        starts = row.starts
        parts: dict[str, Any] = {
            "normalizer": {"type": "NFC"} if row.composed else None,
            "pre_tokenizer": pre_tokenizer(row),
            "decoder": byte_level(use_regex=True),
            "model": {"type": "BPE", "byte_fallback": False, "ignore_merges": row.whole_words},
        }
    else:
        parts = _marked_words(metadata, tokens, types, prefix=by_score)
    merges = _merges_by_score(metadata, pieces, types) if by_score else _merges(metadata, pieces)
    parts["model"] |= {"vocab": pieces, "merges": merges}
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
        settings=_settings(metadata, tokens, starts=starts),
        chat_template=template if isinstance(template, str) else None,
    )


def _added(metadata: Metadata, tokens: list[str], types: np.ndarray) -> Iterator[dict[str, Any]]:
    strips = metadata.architecture == "phi3" and metadata.values.get(f"{TOKENIZER}model") == "llama"
    for token in np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN, USER_DEFINED))).tolist():
        yield {
            "id": token,
            "content": tokens[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and tokens[token] not in _PHI3_BARE,
            "normalized": False,
            "special": int(types[token]) != USER_DEFINED or tokens[token] == _END,
        }


def _settings(metadata: Metadata, tokens: list[str], *, starts: bool) -> dict[str, Any]:
    named = {
        f"{name}_token": metadata.token(key, len(tokens))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    settings: dict[str, Any] = {
        name: tokens[token] for name, token in named.items() if token is not None
    }
    settings["add_bos_token"] = bool(metadata.values.get(f"{TOKENIZER}add_bos_token", starts))
    if metadata.values.get("kvq.fim.suffix_first") is True:
        settings[FIM_ORDER] = SUFFIX_FIRST
    return settings


def _merges(metadata: Metadata, pieces: dict[str, int]) -> list[list[str]]:
    """Returns the pairs of pieces that a file lists, the first to merge first.

    Those of texts that are no tokens, as where a file has another's text twice, are left out.
    """
    raw = metadata.values.get(f"{TOKENIZER}merges", [])
    if not isinstance(raw, list):
        raise CheckpointError(f"{metadata.path} is damaged: its merges are no texts")
    merges = [merge.decode("utf-8", errors="replace").split(" ") for merge in raw if merge]
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError(f"{metadata.path} is damaged: a merge is not of two pieces")
    valid = [merge for merge in merges if pieces.keys() >= {*merge, "".join(merge)}]
    if len(valid) < len(merges):
        logger.warning(
            "%s lists %d merges of texts that are none of its tokens: they are left out",
            metadata.path,
            len(merges) - len(valid),
        )
    return valid


def _marked_words(
    metadata: Metadata, tokens: list[str], types: np.ndarray, *, prefix: bool
) -> dict[str, Any]:
    """Returns the parts of a tokenizer whose pieces have marked spaces.

    `prefix`: a file that does not say whether a text begins with a space means that it does.
    """
    prefix = bool(metadata.values.get(f"{TOKENIZER}add_space_prefix", prefix))
    single = bool(metadata.values.get(f"{TOKENIZER}remove_extra_whitespaces", False))
    unknown = np.flatnonzero(types == UNKNOWN).tolist()

    def replaced(kind: str, pattern: str, content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {kind: pattern}, "content": content}

    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *([replaced("Regex", " {2,}", " ")] if single else []),
                *([{"type": "Prepend", "prepend": WORD_MARK}] if prefix else []),
                replaced("String", " ", WORD_MARK),
            ],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                replaced("String", WORD_MARK, " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown[0]] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": bool((types == BYTE).any()),
        },
    }


def _merges_by_score(
    metadata: Metadata, pieces: dict[str, int], types: np.ndarray
) -> list[Sequence[str]]:
    """Returns every pair of pieces that make a third, the one of the highest score first.

    llama.cpp joins any pair whose text is a token, however low its score, and of equal scores the
    leftmost in the text. A list ranks pairs, not places: with the longest piece and left part
    first, a run of one character, such as an indentation, grows from its left end as well.
    """
    scores = metadata.values.get(f"{TOKENIZER}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(types) or np.isnan(scores).any():
        raise CheckpointError(f"{metadata.path} is damaged: its tokens have no scores")
    texts = {piece for piece, token in pieces.items() if types[token] not in _NEVER_MADE}
    longest = max(map(len, texts), default=0)
    if longest > _LONGEST_PIECE:
        raise CheckpointError(
            f"{metadata.path} is damaged: a piece of its vocabulary has {longest} "
            f"characters, more than {_LONGEST_PIECE}"
        )
    merges = sorted(
        (-float(scores[pieces[piece]]), -len(piece), -at, (piece[:at], piece[at:]))
        for piece in texts
        for at in range(1, len(piece))
        if piece[:at] in texts and piece[at:] in texts
    )
    return [pair for _, _, _, pair in merges]
