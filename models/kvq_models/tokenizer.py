"""Text to token ids and back.

Owns encoding in which a user's text can never become a control token, exact byte-wise decoding,
the control tokens a model has (start, end, fill-in-the-middle) and its chat prompts. What a
vocabulary is kept in is behind `Vocabulary`; the one of a tokenizer.json is here too. Knows no
model arithmetic and no generation loop.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import tokenizers

from kvq.errors import CheckpointError, DataError, ModelError
from kvq_models.chat import ChatTemplate, MessageGuard, find_template
from kvq_models.config import ModelConfig
from kvq_models.control import ControlTokens, FimTokens, find_control
from kvq_models.family import Family
from kvq_models.pieces import PieceIndex, byte_pieces, piece_decoder
from kvq_models.registry import read_json
from kvq_models.slices import SLICE_CHARACTERS, Slices, encoded_up_to
from kvq_models.tools import told_calls

# Texts this short take less than what it costs to let other threads run.
_SHORT_CHARACTERS = 1 << 11
_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


def looks_like_control(content: str) -> bool:
    """Whether a token is written like one that steers the model: `<|...|>`."""
    return _CONTROL.fullmatch(content) is not None


class Vocabulary(Protocol):
    """Pieces and their ids, and the engine that cuts a text into them.

    `special` holds the ids that are control tokens by the vocabulary's own account, with their
    contents. `strips_space`: a decoded text loses its first space.
    """

    special: Mapping[int, str]
    strips_space: bool

    @property
    def size(self) -> int:
        """Ids it can name."""
        ...

    def encode(self, text: str, *, special: bool, most: int | None = None) -> list[int]:
        """Ids of a Unicode text; control tokens in it are recognised only if `special`.

        Of a text of more than `most` tokens, more than `most` of them: the rest may be left out.
        """
        ...

    def piece_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for ids without a name."""
        ...

    def every_piece(self) -> dict[int, bytes]:
        """Every id it can name, and the bytes it stands for."""
        ...

    def piece(self, token: int) -> str | None:
        """A token's content as the vocabulary writes it, or None."""
        ...

    def token_id(self, content: str) -> int | None:
        """The id of a token by its exact content, or None."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """What a checkpoint says of its tokenizer.

    The text of tokenizer.json, tokenizer_config.json and the chat template, if it has one.
    """

    definition: str
    settings: Mapping[str, Any]
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Those of a checkpoint folder. Raises CheckpointError when one is missing or damaged."""
        definition = _read_tokenizer(folder)
        path = folder / "tokenizer_config.json"
        settings = read_json(path) if path.is_file() else {}
        return cls(
            definition=definition,
            settings=settings,
            chat_template=find_template(folder, settings),
        )


class Tokenizer:
    """A vocabulary, the control tokens of its model and, if it has one, the chat template."""

    def __init__(
        self, vocabulary: Vocabulary, control: ControlTokens, chat_template: str | None = None
    ) -> None:
        self._vocabulary = vocabulary
        named = {token: vocabulary.piece(token) for token in control.ids()}
        self._control: dict[int, str] = {
            **{token: content for token, content in named.items() if content is not None},
            **vocabulary.special,
        }
        self._template = None if chat_template is None else ChatTemplate(chat_template)
        self.control = control

    @classmethod
    def from_json(
        cls, tokenizer_json: str, control: ControlTokens, chat_template: str | None = None
    ) -> Tokenizer:
        """Over the text of a tokenizer.json.

        Raises CheckpointError when `tokenizer_json` is not one, ModelError for its decoder.
        """
        return cls(JsonVocabulary(tokenizer_json, control.ids()), control, chat_template)

    @classmethod
    def from_checkpoint(cls, folder: Path, family: Family, config: ModelConfig) -> Tokenizer:
        """The tokenizer of a checkpoint; control tokens are found by the family's names.

        Raises CheckpointError when a file is missing or damaged.
        """
        return cls.from_files(TokenizerFiles.read(folder), family, config)

    @classmethod
    def from_files(cls, files: TokenizerFiles, family: Family, config: ModelConfig) -> Tokenizer:
        """As `from_checkpoint`, over files that are read already."""
        control = find_control(_load(files.definition), files.settings, family, config)
        return cls.from_json(files.definition, control, files.chat_template)

    @classmethod
    def from_bundle(cls, folder: Path, control: ControlTokens) -> Tokenizer:
        """The tokenizer of a bundle, whose manifest holds the control tokens.

        Raises CheckpointError when tokenizer.json is missing or damaged.
        """
        return cls.from_json(_read_tokenizer(folder), control, find_template(folder, {}))

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can name; a model's vocabulary may be padded beyond it."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self.control.bos

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text or a chat turn."""
        return self.control.eos

    @property
    def fim(self) -> FimTokens | None:
        """The fill-in-the-middle tokens, if the model has them."""
        return self.control.fim

    @cached_property
    def pieces(self) -> PieceIndex:
        """The tokens that are text, by their bytes; made when first asked for."""
        pieces = self._vocabulary.every_piece()
        for token in self._control:
            pieces.pop(token, None)
        return PieceIndex(pieces)

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, if the model has one."""
        return None if self._template is None else self._template.source

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the chat template looks up; none without one."""
        return frozenset() if self._template is None else self._template.variables

    def encode(
        self, text: str, *, special: bool = False, start: bool = False, most: int | None = None
    ) -> list[int]:
        """Token ids of a text.

        Control tokens written in the text are ordinary characters unless `special`; `start` puts
        before it what the model expects at the beginning of a text. Of a text of more than `most`
        tokens, more than `most` of them: that it is too long is known before it is read to its
        end. Raises DataError for text that is not Unicode.
        """
        _check_unicode(text)
        ids = self._vocabulary.encode(text, special=special, most=most)
        if not special:
            ids = [part for token in ids for part in self._spelled(token)]
        return [*self.control.start, *ids] if start else ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of token ids; control tokens only if `special`, broken bytes become U+FFFD."""
        text = b"".join(self.token_bytes(token, special=special) for token in ids)
        if self._vocabulary.strips_space and text.startswith(b" "):
            text = text[1:]
        return text.decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """The bytes a token stands for; none for unnamed ids; control tokens if `special`."""
        if not special and token in self._control:
            return b""
        return self._vocabulary.piece_bytes(token)

    def token_id(self, content: str) -> int | None:
        """The id of a token by its exact content in the vocabulary."""
        return self._vocabulary.token_id(content)

    def is_control(self, token: int) -> bool:
        """True for ids that steer the model and are not text."""
        return token in self._control

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation; `variables` go to the template (tools, ...).

        Control tokens in the messages stay ordinary characters; `most` is that of `encode`.
        Raises ModelError when the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise ModelError(
                "this model has no chat template, so it cannot chat; give it plain text "
                "to continue (kvq run), or choose an instruction-tuned model"
            )
        guard = MessageGuard(self._control.values(), messages, variables or {})
        text = self._template.render(
            {
                "bos_token": self._content(self.control.bos),
                "eos_token": self._content(next(iter(self.control.eos), None)),
                **guard.variables,
                # Marks of calls that are told here are meant.
                "messages": told_calls(guard.messages, self._template.source),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        ids: list[int] = []
        for part, is_template in guard.split(text):
            ids += self.encode(part, special=is_template, most=most)
            if most is not None and len(ids) > most:
                break
        return ids

    def _content(self, token: int | None) -> str:
        return "" if token is None else self._vocabulary.piece(token) or ""

    def _spelled(self, token: int) -> list[int]:
        """The token, or its characters where merges alone would have built a control token."""
        content = self._control.get(token)
        if content is None:
            return [token]
        return [part for character in content for part in self._spelled_character(character)]

    def _spelled_character(self, character: str) -> list[int]:
        whole = self._vocabulary.token_id(character)
        if whole is not None and whole not in self._control:
            return [whole]
        parts: list[int] = []
        for byte in character.encode("utf-8"):
            found = [self._vocabulary.token_id(name) for name in byte_pieces(byte)]
            parts += [part for part in found if part is not None][:1]
        return parts


class JsonVocabulary:
    """The vocabulary of a tokenizer.json, over the `tokenizers` library."""

    def __init__(self, tokenizer_json: str, control: frozenset[int] = frozenset()) -> None:
        """`control` are ids to treat as special besides those the file flags.

        Raises CheckpointError when `tokenizer_json` is not one, ModelError for its decoder.
        """
        self._library = _load(tokenizer_json)
        added = self._library.get_added_tokens_decoder()
        special = {token for token in added if token in control or _is_control(added[token])}
        # A file that an export wrote flags them all; reading another twice takes as long again.
        if any(not added[token].special for token in special):
            self._library = _load(_flagged(tokenizer_json, special))
        self._added = {token: one.content.encode("utf-8") for token, one in added.items()}
        self.special: Mapping[int, str] = {token: added[token].content for token in sorted(special)}
        self._library.no_truncation()
        self._library.no_padding()
        # Held by whoever encodes, and by whoever is next: a long text keeps nobody out.
        self._library_lock, self._next_lock = Lock(), Lock()
        self._rstrips = [one.content for one in added.values() if one.rstrip]
        decoder: Any = self._library.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self._piece_bytes, self.strips_space = piece_decoder(state)

    @property
    def size(self) -> int:
        """See `Vocabulary.size`."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool, most: int | None = None) -> list[int]:
        """See `Vocabulary.encode`. Other threads run meanwhile."""

        def encode(part: str) -> list[int]:
            return self._encode(part, special)

        if len(text) <= SLICE_CHARACTERS:
            return encode(text)
        ids: list[int] = []
        for part in self.slices.of(text):
            ids += encoded_up_to(most, part, encode)
            if most is not None and len(ids) > most:
                break
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._next_lock:
            self._library_lock.acquire()
        try:
            self._library.encode_special_tokens = not special
            if len(text) <= _SHORT_CHARACTERS:
                return self._library.encode(text, add_special_tokens=False).ids
            # Unlike `encode`, this lets other threads run.
            (found,) = self._library.encode_batch_fast([text], add_special_tokens=False)
            return found.ids
        finally:
            self._library_lock.release()

    @cached_property
    def slices(self) -> Slices:
        """Made for the first long text."""
        pieces = [*self._library.get_vocab(), *(f"{content} " for content in self._rstrips)]
        return Slices(pieces, lambda text: self._encode(text, special=False))

    def piece_bytes(self, token: int) -> bytes:
        """See `Vocabulary.piece_bytes`."""
        if token in self._added:
            return self._added[token]
        piece = self._library.id_to_token(token)
        return b"" if piece is None else self._piece_bytes(piece)

    def every_piece(self) -> dict[int, bytes]:
        """See `Vocabulary.every_piece`."""
        named = self._library.id_to_token  # of which the library has no faster list
        pieces = ((token, named(token)) for token in range(self.size))
        told = self._piece_bytes
        return {token: told(piece) for token, piece in pieces if piece is not None} | self._added

    def piece(self, token: int) -> str | None:
        """See `Vocabulary.piece`."""
        return self._library.id_to_token(token)

    def token_id(self, content: str) -> int | None:
        """See `Vocabulary.token_id`."""
        return self._library.token_to_id(content)


class IncrementalDetokenizer:
    """Turns a stream of ids into text pieces that never hold half a character.

    The pieces of `push` and the last one of `flush` together are what `Tokenizer.decode` gives
    for all ids, except that a first space is kept: the stream continues a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: frozenset[int] = frozenset()
        self._skipped = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def fork(self) -> IncrementalDetokenizer:
        """Another that stands at the same place of the same stream."""
        other = copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def skip(self, num_bytes: int) -> None:
        """Leaves out the next `num_bytes` of the stream."""
        self._skipped = num_bytes

    def show(self, control: frozenset[int]) -> None:
        """From now on these control tokens are text."""
        self._shown = control

    def push(self, token: int) -> str:
        """The characters that this token completes, perhaps none."""
        special = token in self._shown
        piece = self._tokenizer.token_bytes(token, special=special)
        skipped = min(self._skipped, len(piece))
        self._skipped -= skipped
        return self._decoder.decode(piece[skipped:])

    def flush(self) -> str:
        """What is left: U+FFFD for a character cut short. The detokenizer is new again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._skipped = 0
        return rest


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text is not valid Unicode at character {error.start}; give UTF-8 text"
        ) from error


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Whether an added token steers the model: flagged special, or written like one."""
    return token.special or looks_like_control(token.content)


def _flagged(tokenizer_json: str, special: set[int]) -> str:
    """The same file, in which these added tokens are flagged special."""
    definition = json.loads(tokenizer_json)
    for token in definition["added_tokens"]:
        token["special"] = token["id"] in special
    return json.dumps(definition)


def _read_tokenizer(folder: Path) -> str:
    path = folder / "tokenizer.json"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no tokenizer.json; save the tokenizer in the fast format "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_definition(text: str) -> None:
    """Raises CheckpointError for what is no description of a tokenizer at all."""
    try:
        definition: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json is not JSON: {error}") from error
    if not isinstance(definition, dict) or "model" not in definition:
        raise CheckpointError("tokenizer.json does not describe a tokenizer: it has no model")


def _load(text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        _check_definition(text)
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error
