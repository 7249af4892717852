"""A GGUF file's own vocabulary, as llama.cpp cuts texts with it, and its control tokens.

A token is special if the file says so (types control and unknown) or if it is written like a
control token, as for a tokenizer.json.
"""

import ctypes
import re
from collections.abc import Iterator, Mapping
from functools import cached_property

from kvq.errors import DataError
from kvq_models.control import ControlTokens, FimTokens
from kvq_models.tokenizer import Tokenizer, encoded_up_to, looks_like_control
from kvq_runtime.backends.llama_library import LlamaModel
from kvq_runtime.bundle.gguf_file import (
    CONTROL,
    FIM_KEYS,
    TOKENIZER,
    UNKNOWN,
    USER_DEFINED,
    GgufFile,
)

_PIECE_BYTES = 64
# llama.cpp cuts a text into words by `std::regex`, which recurses for every character of a word. A
# word of 30,000 characters overflows a stack of 8 MiB and ends the program.
_LONG_RUN = re.compile(r"\S{4096}|\s{4096}")


def tokenizer_of(model: LlamaModel, file: GgufFile) -> Tokenizer | None:
    """Returns the tokenizer of a file, None for a file without a vocabulary."""
    functions = model.library.functions
    if functions.llama_vocab_type(model.vocabulary) == functions.LLAMA_VOCAB_TYPE_NONE:
        return None
    vocabulary = LlamaVocabulary(model, file)
    return Tokenizer(vocabulary, _control_tokens(model, file, vocabulary), file.chat_template)


class LlamaVocabulary:
    """Implements `kvq_models.tokenizer.TokenizerVocabulary` over llama.cpp."""

    def __init__(self, model: LlamaModel, file: GgufFile) -> None:
        self._model = model
        self._functions = model.library.functions
        self.size: int = self._functions.llama_vocab_n_tokens(model.vocabulary)
        self._pieces = [
            piece.decode("utf-8", errors="replace")
            for piece in file.strings(f"{TOKENIZER}tokens")[: self.size]
        ]
        types = file.numbers(f"{TOKENIZER}token_type").tolist()
        self.special: Mapping[int, str] = {
            token: piece
            for token, (piece, kind) in enumerate(zip(self._pieces, types, strict=False))
            if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and looks_like_control(piece))
        }
        kind = file.contents.metadata.get(f"{TOKENIZER}model")
        self._splits_words, marks_words = kind == "gpt2", kind == "llama"
        adds_space = file.contents.metadata.get(f"{TOKENIZER}add_space_prefix", marks_words)
        self.strips_space = marks_words and bool(adds_space)

    def encode(self, text: str, *, special: bool, most: int | None = None) -> list[int]:
        """Implements `Vocabulary.encode`; llama.cpp lets other threads run."""

        def cut(beginning: str) -> list[int]:
            parts = (part.encode("utf-8") for part in self._parts(beginning))
            return [token for part in parts for token in self.encode_bytes(part, special=special)]

        return encoded_up_to(most, text, cut)

    def encode_bytes(self, text: bytes, *, special: bool) -> list[int]:
        """Returns the ids of any bytes; what is not UTF-8 is cut as llama.cpp sees fit."""
        # Each byte that is no UTF-8 becomes a character of three.
        room = 3 * len(text) + 2
        tokens = (ctypes.c_int32 * room)()
        count = self._functions.llama_tokenize(
            self._model.vocabulary, text, len(text), tokens, room, False, special
        )
        if count < 0:
            raise DataError(f"a text of {len(text)} bytes has too many tokens; split it")
        return tokens[:count]

    def piece_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.size:
            return b""
        count = -_PIECE_BYTES
        piece = ctypes.create_string_buffer(0)
        while count < 0:
            piece = ctypes.create_string_buffer(-count)
            count = self._functions.llama_token_to_piece(
                self._model.vocabulary, token, piece, len(piece), 0, True
            )
        return piece.raw[:count]

    def every_piece(self) -> dict[int, bytes]:
        return {token: self.piece_bytes(token) for token in range(self.size)}

    def piece(self, token: int) -> str | None:
        return self._pieces[token] if 0 <= token < len(self._pieces) else None

    def token_id(self, content: str) -> int | None:
        return self._ids.get(content)

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Maps contents to ids; of equal contents the first id counts."""
        return {piece: token for token, piece in reversed([*enumerate(self._pieces)])}

    def _parts(self, text: str) -> Iterator[str]:
        """Yields the text, cut within runs too long for llama.cpp's regular expressions."""
        start = 0
        for run in _LONG_RUN.finditer(text) if self._splits_words else ():
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


def _control_tokens(
    model: LlamaModel, file: GgufFile, vocabulary: LlamaVocabulary
) -> ControlTokens:
    functions, handle = model.library.functions, model.vocabulary

    def named(key: str) -> int | None:
        """Returns llama.cpp's token if the file names it; else it may be a wrong guess."""
        token: int = getattr(functions, f"llama_vocab_{key}")(handle)
        is_named = file.contents.metadata.get(f"{TOKENIZER}{key}_token_id") == token
        return token if token >= 0 and (is_named or token in vocabulary.special) else None

    bos = named("bos")
    ends = [
        named("eos"),
        named("eot"),
        *(token for token in vocabulary.special if functions.llama_vocab_is_eog(handle, token)),
    ]
    fim = {role: named(key) for role, key in FIM_KEYS.items()}
    suffix_first = file.contents.metadata.get("kvq.fim.suffix_first") is True
    complete = None not in (fim["prefix"], fim["suffix"], fim["middle"])
    return ControlTokens(
        bos=bos,
        eos=tuple(dict.fromkeys(token for token in ends if token is not None)),
        start=(bos,) if bos is not None and functions.llama_vocab_get_add_bos(handle) else (),
        fim=FimTokens(**fim, suffix_first=suffix_first) if complete else None,  # type: ignore[arg-type]
    )
