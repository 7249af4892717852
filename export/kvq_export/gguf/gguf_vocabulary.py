"""Reads a tokenizer.json as the keys of a GGUF file's vocabulary.

Knows the two vocabularies of decoders that llama.cpp has too: byte-level BPE, and pieces with
marked spaces that merge by score. Knows no tensors.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvq.errors import CheckpointError, UnsupportedModelError, argument, reason_of
from kvq.json_values import is_object
from kvq_export.gguf.gguf_pre import pre_tokenizer_name
from kvq_models.family import Family
from kvq_models.tokenizer import Tokenizer, TokenizerFiles
from kvq_runtime.bundle.gguf_file import (
    BYTE,
    CONTROL,
    FIM_KEYS,
    NORMAL,
    TOKENIZER,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from kvq_runtime.bundle.manifest import TOKENIZER_FILE

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
WORD_MARK = "▁"
# Less than the rank of any merge: llama.cpp joins a piece that no merge makes last.
NO_MERGE = -1e9


def read_vocabulary(
    files: TokenizerFiles, tokenizer: Tokenizer, family: Family, vocab_size: int
) -> dict[str, Any]:
    """Returns the keys of a checkpoint's vocabulary, with placeholders up to `vocab_size`.

    Raises `UnsupportedModelError` for one llama.cpp has no form of, `CheckpointError` for a file
    that is not one.
    """
    try:
        definition = json.loads(files.definition)
        by_bytes = _is_byte_level(definition)
        tokens, types = _entries(definition, tokenizer, vocab_size)
        start = tokenizer.control.start
        keys: dict[str, Any] = {
            "model": "gpt2" if by_bytes else "llama",
            "pre": pre_tokenizer_name(definition) if by_bytes else "default",
            "tokens": tokens,
            "token_type": types,
            "add_bos_token": bool(start) and start[0] == tokenizer.bos_id,
            "add_eos_token": False,
        }
        if by_bytes:
            # A key without a merge is left out, and a file without the key is refused.
            keys["merges"] = list(_merges(definition)) or [""]
        else:
            keys["scores"] = _scores(definition, vocab_size)
            before = json.dumps([definition.get("normalizer"), definition.get("pre_tokenizer")])
            keys["add_space_prefix"] = '"Prepend"' in before or (
                '"Metaspace"' in before and '"prepend_scheme": "never"' not in before
            )
            keys["remove_extra_whitespaces"] = '" {2,}"' in before
        ids = _ids(definition, files.settings, tokenizer, family)
        keys |= {f"{key}_token_id": token for key, token in ids.items() if token is not None}
        named = {f"{TOKENIZER}{key}": value for key, value in keys.items()}
        if tokenizer.fim is not None and tokenizer.fim.suffix_first:
            named["kvq.fim.suffix_first"] = True
        if tokenizer.chat_template is not None:
            named["tokenizer.chat_template"] = tokenizer.chat_template
        return named
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{TOKENIZER_FILE} is not as expected ({reason_of(error)}); save the tokenizer again"
        ) from error


def _is_byte_level(definition: Mapping[str, Any]) -> bool:
    """Tells the two kinds of vocabularies apart. Raises `UnsupportedModelError` for others."""
    model = definition["model"]
    if model["type"] == "BPE" and '"ByteLevel"' in json.dumps(definition.get("decoder")):
        return True
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        raise UnsupportedModelError(
            f"kvq writes no GGUF file with this {model['type']} tokenizer; possible are byte-level "
            f"BPE and BPE with a byte fallback. Export it with {argument('format', 'onnx')}"
        )
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in model["vocab"]]
    if missing:
        raise UnsupportedModelError(
            f"the tokenizer has no piece <0x{missing[0]:02X}>, which llama.cpp needs for text "
            f"outside of its vocabulary; export it with {argument('format', 'onnx')}"
        )
    return False


def _entries(
    definition: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int
) -> tuple[list[str], list[int]]:
    """Returns text and kind per id.

    llama.cpp needs every text to be there and to be no other's: a placeholder takes the place of
    one that is missing, empty, cut by a NUL or there already.
    """
    model = definition["model"]
    unknown = model.get("unk_token")
    texts: dict[int, tuple[str, int]] = {}
    for piece, token in model["vocab"].items():
        kind = NORMAL
        if piece == unknown:
            kind = UNKNOWN
        elif tokenizer.is_control(token):
            kind = CONTROL
        elif model.get("byte_fallback") and _BYTE_PIECE.fullmatch(piece):
            kind = BYTE
        texts[token] = piece, kind
    added_tokens: list[dict[str, Any]] = definition.get("added_tokens") or []
    for added in added_tokens:
        token, content = added["id"], added["content"]
        # What is no control token is found in the text before its spaces are marked.
        texts[token] = content.replace(WORD_MARK, " "), USER_DEFINED
        if tokenizer.is_control(token):
            texts[token] = content, UNKNOWN if content == unknown else CONTROL
    tokens, types = list[str](), list[int]()
    texts_used = {text for text, _ in texts.values()}
    free = texts_used - {""}
    for token in range(vocab_size):
        text, kind = texts.get(token, ("", UNUSED))
        if text not in free or "\0" in text:
            text, kind = f"[PAD{token}]", UNUSED
            while text in texts_used:
                text = f"[{text}]"
        free.discard(text)
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _scores(definition: Mapping[str, Any], vocab_size: int) -> list[float]:
    """Returns what decides which pieces join: minus the rank of the merge that makes a piece."""
    scores = [0.0] * vocab_size
    pieces: dict[str, int] = definition["model"]["vocab"]
    for piece, token in pieces.items():
        scores[token] = NO_MERGE if len(piece) > 1 else 0.0
    for rank, merge in enumerate(_merges(definition)):
        token: int = pieces[merge.replace(" ", "", 1)]
        scores[token] = max(scores[token], -float(rank))
    return scores


def _merges(definition: Mapping[str, Any]) -> Iterator[str]:
    """Yields each merge as one text, which files spell as a pair or as a text."""
    for merge in definition["model"]["merges"]:
        yield merge if isinstance(merge, str) else " ".join(merge)


def _ids(
    definition: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: Tokenizer, family: Family
) -> dict[str, int | None]:
    control = tokenizer.control
    turn_ends = (tokenizer.token_id(name) for name in family.turn_ends)
    return {
        "bos": control.bos,
        "eos": next(iter(control.eos), None),
        "eot": next((end for end in turn_ends if end in control.eos[1:]), None),
        "padding": _named(tokenizer, settings.get("pad_token")),
        "unknown": _named(tokenizer, definition["model"].get("unk_token")),
        **{key: getattr(tokenizer.fim, role, None) for role, key in FIM_KEYS.items()},
    }


def _named(tokenizer: Tokenizer, token: Any) -> int | None:
    """Returns the id of a token as a file names it, by its content or by a dict that has it."""
    content = token.get("content") if is_object(token) else token
    return tokenizer.token_id(content) if isinstance(content, str) else None
