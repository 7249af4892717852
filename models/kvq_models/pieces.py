"""What bytes a piece of a vocabulary stands for.

Owns the two alphabets of the tokenizers that models use: byte-level (every byte a printable
character) and marked words with a byte fallback. Knows no ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvq.errors import ModelError

_WORD_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_decoder(decoder: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How a piece becomes bytes, and whether a decoded text loses its first space.

    `decoder` is that part of tokenizer.json.

    Raises ModelError for another kind of decoder.
    """
    parts = {part["type"]: part for part in _decoder_parts(decoder)}
    if "ByteLevel" in parts:
        return _byte_level_bytes, False
    if "ByteFallback" in parts or "Metaspace" in parts:
        scheme = parts.get("Metaspace", {"prepend_scheme": "never"}).get("prepend_scheme", "always")
        return _word_mark_bytes, "Strip" in parts or scheme != "never"
    raise ModelError(
        f"tokenizer decoder {' + '.join(parts) or 'none'} is not supported; "
        "supported: ByteLevel, ByteFallback, Metaspace"
    )


def _decoder_parts(decoder: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoder_parts(part)
    else:
        yield decoder


def _word_mark_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_WORD_MARK, " ").encode("utf-8")


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_CHARACTER_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode("utf-8")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(0x100) if byte not in alphabet]
    return alphabet | {byte: chr(0x100 + index) for index, byte in enumerate(others)}


_BYTE_TO_CHARACTER: Mapping[int, str] = _byte_alphabet()
# Characters of Latin-1 that the alphabet leaves out must not pass for bytes.
_CHARACTER_TO_BYTE: Mapping[int, int] = dict.fromkeys(range(0x100), 0x100) | {
    ord(character): byte for byte, character in _BYTE_TO_CHARACTER.items()
}


def byte_pieces(byte: int) -> tuple[str, str]:
    """Names of a single byte in a vocabulary: as a fallback token, and in the byte alphabet."""
    return f"<0x{byte:02X}>", _BYTE_TO_CHARACTER[byte]
