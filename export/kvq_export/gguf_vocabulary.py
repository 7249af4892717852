"""A tokenizer.json as the vocabulary of a GGUF file: pieces, scores, kinds, merges, ids.

Knows the three vocabularies of llama.cpp that such a tokenizer can be, byte-level BPE, pieces with
marked spaces that merge by score, and unigrams. Knows no tensors.
"""

import base64
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvq.errors import CheckpointError, UnsupportedModelError, argument
from kvq.json_values import is_object
from kvq_export.gguf_pre import pre_tokenizer_name
from kvq_models.family import Family
from kvq_models.tokenizer import Tokenizer, TokenizerFiles
from kvq_runtime.manifest import TOKENIZER_FILE

logger = logging.getLogger(__name__)

# llama.cpp's numbers of what a token is.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
WORD_MARK = "▁"
# Below the rank of any merge: a piece no merge makes joins last.
NO_MERGE = -1e9

Kind = Literal["gpt2", "llama", "t5"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What the keys `tokenizer.*` hold; the lists have an entry for each id of the model.

    `ids` maps a key's name (`bos`, `eos`, `fim_pre`, ...) to an id; `suffix_first` is kvq's
    own key.
    """

    kind: Kind
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    pre: str = "default"
    add_bos: bool = False
    space_prefix: bool = False
    merge_spaces: bool = False
    charsmap: bytes = b""
    ids: Mapping[str, int] = field(default_factory=dict[str, int])
    suffix_first: bool = False
    chat_template: str | None = None


def read_vocabulary(
    files: TokenizerFiles, tokenizer: Tokenizer, family: Family, vocab_size: int
) -> Vocabulary:
    """The vocabulary of a checkpoint, with placeholders up to `vocab_size`.

    Raises `UnsupportedModelError` for one llama.cpp has no form of, `CheckpointError` for a file
    that is not one.
    """
    try:
        definition = json.loads(files.definition)
        kind = _kind(definition)
        pieces = _pieces(definition)
        tokens, types = _entries(definition, pieces, tokenizer, vocab_size)
        start = tokenizer.control.start
        if start not in ((), (tokenizer.bos_id,)):
            logger.warning(
                "a text of this model starts with the tokens %s, of which a GGUF file can only "
                "name the first",
                list(start),
            )
        return Vocabulary(
            kind=kind,
            tokens=tokens,
            types=types,
            scores=_scores(definition, kind, pieces, vocab_size),
            merges=list(_merges(definition)) if kind == "gpt2" else (),
            pre=pre_tokenizer_name(definition) if kind == "gpt2" else "default",
            add_bos=bool(start) and start[0] == tokenizer.bos_id,
            space_prefix=_has_space_prefix(definition),
            merge_spaces=any(
                stage["type"] == "Replace" and stage["pattern"].get("Regex") == " {2,}"
                for stage in _normalizers(definition.get("normalizer"))
            ),
            charsmap=_charsmap(definition),
            ids=_ids(definition, files.settings, tokenizer, family),
            suffix_first=tokenizer.fim is not None and tokenizer.fim.suffix_first,
            chat_template=tokenizer.chat_template,
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{TOKENIZER_FILE} is not as expected ({error!r}); save the tokenizer again"
        ) from error


def _kind(definition: Mapping[str, Any]) -> Kind:
    model = definition["model"]
    byte_level = '"ByteLevel"' in json.dumps(definition.get("decoder"))
    match model["type"]:
        case "BPE" if byte_level:
            return "gpt2"
        case "Unigram" if not model.get("byte_fallback"):
            return "t5"
        case "Unigram":
            logger.warning(
                "llama.cpp has no unigrams with a byte fallback; in the GGUF file the pieces merge "
                "by score: other programs may cut some words otherwise, kvq reads tokenizer.json"
            )
        case "BPE" if model.get("byte_fallback"):
            pass
        case other:
            raise UnsupportedModelError(
                f"llama.cpp has no form of this {other} tokenizer; possible are byte-level BPE, "
                f"BPE with a byte fallback and Unigram. Export it with {argument('format', 'onnx')}"
            )
    pieces = _pieces(definition)
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in pieces]
    if missing:
        raise UnsupportedModelError(
            f"the tokenizer has no piece <0x{missing[0]:02X}>, which llama.cpp needs for text "
            f"outside of its vocabulary; export it with {argument('format', 'onnx')}"
        )
    return "llama"


def _pieces(definition: Mapping[str, Any]) -> dict[str, int]:
    """Piece -> id, without the tokens that were added."""
    vocab = definition["model"]["vocab"]
    if is_object(vocab):
        return dict(vocab)
    return {entry[0]: index for index, entry in enumerate(vocab)}


def _entries(
    definition: Mapping[str, Any], pieces: Mapping[str, int], tokenizer: Tokenizer, vocab_size: int
) -> tuple[list[str], list[int]]:
    """Text and kind per id. llama.cpp needs every text to be there and to be no other's."""
    model = definition["model"]
    unknown = {model.get("unk_token")}
    if model.get("unk_id") is not None:
        unknown.add(model["vocab"][model["unk_id"]][0])
    texts: dict[int, tuple[str, int]] = {}
    for piece, token in pieces.items():
        kind = NORMAL
        if piece in unknown:
            kind = UNKNOWN
        elif tokenizer.is_control(token):
            kind = CONTROL
        elif model.get("byte_fallback") and _BYTE_PIECE.fullmatch(piece):
            kind = BYTE
        texts[token] = piece, kind
    added_tokens: list[dict[str, Any]] = definition.get("added_tokens") or []
    for added in added_tokens:
        token, content = added["id"], added["content"]
        if tokenizer.is_control(token):
            is_unknown = content in unknown
            texts[token] = content, UNKNOWN if is_unknown else CONTROL
        else:
            # Found in the text before its spaces are marked.
            texts[token] = content.replace(WORD_MARK, " "), USER_DEFINED
    return _unique(texts, vocab_size)


def _unique(texts: Mapping[int, tuple[str, int]], vocab_size: int) -> tuple[list[str], list[int]]:
    """Placeholders stand in for what is missing, empty, cut by a NUL or there already."""
    tokens: list[str] = []
    types: list[int] = []
    seen: set[str] = set()
    taken = {text for text, _ in texts.values()}
    for token in range(vocab_size):
        text, kind = texts.get(token, ("", UNUSED))
        if not text or "\0" in text or text in seen:
            text, kind = _placeholder(token, taken), UNUSED
        seen.add(text)
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _placeholder(token: int, taken: set[str]) -> str:
    text = f"[PAD{token}]"
    while text in taken:
        text = f"[{text}]"
    return text


def _scores(
    definition: Mapping[str, Any], kind: Kind, pieces: Mapping[str, int], vocab_size: int
) -> list[float]:
    """What decides which pieces join: a unigram's own score, or minus the rank of its merge."""
    if kind == "gpt2":
        return []
    scores = [0.0] * vocab_size
    if definition["model"]["type"] == "Unigram":
        for token, (_, score) in enumerate(definition["model"]["vocab"]):
            scores[token] = float(score)
        return scores
    for piece, token in pieces.items():
        scores[token] = NO_MERGE if len(piece) > 1 else 0.0
    for rank, merge in enumerate(_merges(definition)):
        left, _, right = merge.partition(" ")
        token = pieces[left + right]
        scores[token] = max(scores[token], -float(rank))
    return scores


def _merges(definition: Mapping[str, Any]) -> Iterator[str]:
    """Both spellings, a pair and a text of two, as the text."""
    for merge in definition["model"]["merges"]:
        yield merge if isinstance(merge, str) else " ".join(merge)


def _normalizers(stage: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if stage is None:
        return
    if stage["type"] == "Sequence":
        for part in stage["normalizers"]:
            yield from _normalizers(part)
    else:
        yield stage


def _has_space_prefix(definition: Mapping[str, Any]) -> bool:
    if any(stage["type"] == "Prepend" for stage in _normalizers(definition.get("normalizer"))):
        return True
    before: dict[str, Any] = definition.get("pre_tokenizer") or {}
    parts: list[dict[str, Any]] = before.get("pretokenizers", [before])
    return any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in parts
    )


def _charsmap(definition: Mapping[str, Any]) -> bytes:
    for stage in _normalizers(definition.get("normalizer")):
        if stage["type"] == "Precompiled" and stage.get("precompiled_charsmap"):
            return base64.b64decode(stage["precompiled_charsmap"])
    return b""


def _ids(
    definition: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: Tokenizer, family: Family
) -> dict[str, int]:
    control, fim = tokenizer.control, tokenizer.fim
    first_end = next(iter(control.eos), None)
    turn_ends = (tokenizer.token_id(name) for name in family.turn_ends)
    pad: Any = settings.get("pad_token")
    unknown: Any = definition["model"].get("unk_token")
    found = {
        "bos": control.bos,
        "eos": first_end,
        "eot": next((end for end in turn_ends if end in control.eos and end != first_end), None),
        "pad": _named(tokenizer, pad),
        "unk": definition["model"].get("unk_id", _named(tokenizer, unknown)),
    }
    if fim is not None:
        found |= {
            "fim_pre": fim.prefix,
            "fim_suf": fim.suffix,
            "fim_mid": fim.middle,
            "fim_pad": fim.pad,
            "fim_rep": fim.repo,
            "fim_sep": fim.file,
        }
    return {key: token for key, token in found.items() if token is not None}


def _named(tokenizer: Tokenizer, token: Any) -> int | None:
    """The id of a token as a file names it, by its content or by a dict that holds it."""
    content = token.get("content") if is_object(token) else token
    return tokenizer.token_id(content) if isinstance(content, str) else None
