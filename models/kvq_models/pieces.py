"""The bytes of a vocabulary's pieces, and the tokens with which a text may begin.

It has the two alphabets of the tokenizers that models use: byte-level (every byte is a printable
character) and marked words with a byte fallback; and the order of text tokens by their bytes. It
knows no control tokens, no prompts and no logits.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import ModelError

Ids = NDArray[np.int64]

_WORD_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A vocabulary has every text once. A second piece with the same text gets this suffix and its id.
_SAME_TEXT = "\0same text "


def distinct_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """Yields every piece; one that came before gets a suffix, so that no text has it."""
    seen: set[str] = set()
    for token, piece in enumerate(pieces):
        yield f"{piece}{_SAME_TEXT}{token}" if piece in seen else piece
        seen.add(piece)


def piece_text(piece: str) -> str:
    """Returns a piece without the suffix of `distinct_pieces`."""
    return piece.partition(_SAME_TEXT)[0]


def is_byte_token(piece: str) -> bool:
    """Returns whether a piece stands for one byte of a character that has no token."""
    return _BYTE_TOKEN.fullmatch(piece) is not None


def piece_decoder(
    decoder: Mapping[str, Any] | None,
) -> tuple[Callable[[Iterable[str]], list[bytes]], bool]:
    """Returns how `distinct_pieces` become bytes, and whether a decoded text loses its first space.

    `decoder` is this part of tokenizer.json. Raises ModelError for another kind of decoder.
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


# A whole vocabulary is read at once, so no function is called for each of its pieces.
def _word_mark_bytes(pieces: Iterable[str]) -> list[bytes]:
    contents: list[bytes] = []
    for piece in pieces:
        text = piece.partition(_SAME_TEXT)[0]
        byte = _BYTE_TOKEN.fullmatch(text)
        contents.append(
            bytes([int(byte[1], 16)]) if byte else text.replace(_WORD_MARK, " ").encode("utf-8")
        )
    return contents


def _byte_level_bytes(pieces: Iterable[str]) -> list[bytes]:
    contents: list[bytes] = []
    for piece in pieces:
        text = piece.partition(_SAME_TEXT)[0]
        try:
            contents.append(text.translate(_CHARACTER_TO_BYTE).encode("latin-1"))
        except UnicodeEncodeError:
            contents.append(text.encode("utf-8"))
    return contents


def _byte_alphabet() -> dict[int, str]:
    """Returns GPT-2's alphabet: printable bytes are themselves, others are U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    unprintable = [byte for byte in range(0x100) if byte not in alphabet]
    return alphabet | {byte: chr(0x100 + index) for index, byte in enumerate(unprintable)}


_BYTE_TO_CHARACTER: Mapping[int, str] = _byte_alphabet()
# Latin-1 characters that the alphabet lacks must not be taken for bytes.
_CHARACTER_TO_BYTE: Mapping[int, int] = dict.fromkeys(range(0x100), 0x100) | {
    ord(character): byte for byte, character in _BYTE_TO_CHARACTER.items()
}


def byte_pieces(byte: int) -> tuple[str, str]:
    """Returns the names of a byte in a vocabulary: as a fallback token and in the byte alphabet."""
    return f"<0x{byte:02X}>", _BYTE_TO_CHARACTER[byte]


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """Holds the tokens that may stand at one place of a given text, `ids` in order.

    `ends` has the end of each token that lies within the text; the others reach beyond it.
    """

    ids: Ids
    ends: Mapping[int, int]


NO_PIECES: Mapping[int, bytes] = {}


class PieceIndex:
    """Finds token ids by the bytes that they stand for; ids without bytes are left out.

    Tokens that begin with one byte are sorted when that byte is first asked for, since few bytes of
    a large vocabulary ever are.
    """

    def __init__(self, pieces: Mapping[int, bytes] = NO_PIECES) -> None:
        self._pieces = pieces
        self._longest = max(map(len, pieces.values()), default=0)
        self._by_first_byte = defaultdict[int, list[int]](list)
        for token, piece in pieces.items():
            if piece:
                self._by_first_byte[piece[0]].append(token)
        self._ordered: dict[int, list[int]] = {}

    def extends(self, text: bytes) -> bool:
        """Returns whether some token is longer than `text` and begins with it."""
        return len(self._longer(text)) > 0

    def openings(self, text: bytes) -> Sequence[Opening]:
        """Returns for every place in `text` the tokens that may stand there if a text begins so.

        These are the tokens that begin with the rest of `text`, and those that are a beginning of
        it after which the remainder can be spelled too. An opening is empty if no tokens spell what
        follows.
        """
        openings: list[Opening] = []
        spelled = [False] * len(text) + [True]
        for start in range(len(text) - 1, -1, -1):
            ends: dict[int, int] = {}
            for end in range(start + 1, min(len(text), start + self._longest) + 1):
                if spelled[end]:
                    ends |= dict.fromkeys(self._equal(text[start:end]), end)
            inside = np.fromiter(ends, np.int64, len(ends))
            beyond = np.array(self._longer(text[start:]), np.int64)
            ids = np.sort(np.concatenate([inside, beyond]))
            spelled[start] = len(ids) > 0
            openings.append(Opening(ids=ids, ends=ends))
        return openings[::-1]

    def spelling(self, text: bytes) -> list[int]:
        """Returns tokens that together are `text`, from the left the longest ones, or none.

        If several tokens have the same bytes, it is the first of them.
        """
        openings, ids, place = self.openings(text), list[int](), 0
        while place < len(text):
            ends = openings[place].ends
            if not ends:
                return []
            token = max(ends, key=lambda candidate: (ends[candidate], -candidate))
            ids.append(token)
            place = ends[token]
        return ids

    def _equal(self, piece: bytes) -> list[int]:
        ids, piece_of = self._beginning_like(piece), self._pieces.__getitem__
        first = bisect_left(ids, piece, key=piece_of)
        return ids[first : bisect_right(ids, piece, first, key=piece_of)]

    def _longer(self, beginning: bytes) -> list[int]:
        if not beginning:
            return [token for token, piece in self._pieces.items() if piece]
        ids, piece_of = self._beginning_like(beginning), self._pieces.__getitem__
        first = bisect_right(ids, beginning, key=piece_of)
        last = bisect_right(ids, beginning + b"\xff" * self._longest, first, key=piece_of)
        return ids[first:last]

    def _beginning_like(self, text: bytes) -> list[int]:
        """Returns the ids of all pieces with the first byte of `text`, ordered by their bytes."""
        first = text[0]
        if first not in self._ordered:
            ids = self._by_first_byte.get(first, [])
            self._ordered[first] = sorted(ids, key=self._pieces.__getitem__)
        return self._ordered[first]
