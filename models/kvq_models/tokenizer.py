"""Turns text into token ids and back.

A user's text can never become a control token when it is encoded. Decoding is exact, byte by byte.
The tokenizer has the control tokens of a model (start, end, fill-in-the-middle) and makes its chat
prompts. `TokenizerVocabulary` hides how a vocabulary is stored; that of a tokenizer.json is here
too.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, cast

import tokenizers

from kvq.errors import CheckpointError, DataError, ModelError, reason_of
from kvq_models.config import ModelConfig
from kvq_models.control import ControlTokens, FimTokens, find_control
from kvq_models.pieces import PieceIndex, byte_pieces, piece_decoder, piece_text

if TYPE_CHECKING:
    from kvq_models.chat import ChatTemplate
    from kvq_models.family import Family

# Encoding a text this short takes less time than letting other threads run.
_SHORT_CHARACTERS = 1 << 11
# The least beginning of a text that is tried first where its tokens are limited.
_FIRST_CHARACTERS = 1 << 15
_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


def looks_like_control(content: str) -> bool:
    """Returns whether a token is written like a control token: `<|...|>`."""
    return _CONTROL.fullmatch(content) is not None


class TokenizerVocabulary(Protocol):
    """Holds pieces and their ids, and cuts a text into them.

    `special` has the ids that the vocabulary itself calls control tokens, with their contents.
    `strips_space`: a decoded text loses its first space.
    """

    special: Mapping[int, str]
    strips_space: bool

    @property
    def size(self) -> int:
        """Returns the number of ids that it can name."""
        ...

    def encode(self, text: str, *, special: bool, most: int | None = None) -> list[int]:
        """Returns the ids of a Unicode text; control tokens in it are recognised only if `special`.

        For a text of more than `most` tokens it returns more than `most` of them, perhaps not all.
        """
        ...

    def piece_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token; none for ids without a name."""
        ...

    def every_piece(self) -> dict[int, bytes]:
        """Returns all ids that it can name, and their bytes."""
        ...

    def piece(self, token: int) -> str | None:
        """Returns a token's content as the vocabulary writes it, or None."""
        ...

    def token_id(self, content: str) -> int | None:
        """Returns the id of a token by its exact content, or None."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """Holds a checkpoint's tokenizer.json, tokenizer_config.json and chat template."""

    definition: str
    settings: Mapping[str, Any]
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Reads a checkpoint folder. Raises CheckpointError if a file is missing or damaged."""
        from kvq_models.keys import read_json

        definition = _read_tokenizer(folder)
        path = folder / "tokenizer_config.json"
        settings = read_json(path) if path.is_file() else {}
        return cls(
            definition=definition,
            settings=settings,
            chat_template=_find_template(folder, settings),
        )


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Holds the token ids of a conversation, and what was changed in it for the template."""

    ids: list[int]
    reconciled: tuple[str, ...] = ()


class Tokenizer:
    """Encodes and decodes texts with a vocabulary, and renders the chat template if it has one."""

    def __init__(
        self,
        vocabulary: TokenizerVocabulary,
        control: ControlTokens,
        chat_template: str | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        named = {token: vocabulary.piece(token) for token in control.ids()}
        self._control: dict[int, str] = {
            **{token: content for token, content in named.items() if content is not None},
            **vocabulary.special,
        }
        # The text of the chat template, if the model has one.
        self.chat_template = chat_template
        self.control = control

    @classmethod
    def from_json(
        cls, tokenizer_json: str, control: ControlTokens, chat_template: str | None = None
    ) -> Tokenizer:
        """Makes a tokenizer from the text of a tokenizer.json.

        Raises CheckpointError if `tokenizer_json` is not one, ModelError for its decoder.
        """
        return cls(JsonVocabulary(tokenizer_json, control.ids()), control, chat_template)

    @classmethod
    def from_checkpoint(cls, folder: Path, family: Family, config: ModelConfig) -> Tokenizer:
        """Makes the tokenizer of a checkpoint; the family names its control tokens.

        Raises CheckpointError if a file is missing or damaged.
        """
        return cls.from_files(TokenizerFiles.read(folder), family, config)

    @classmethod
    def from_files(cls, files: TokenizerFiles, family: Family, config: ModelConfig) -> Tokenizer:
        """Makes the tokenizer of a checkpoint whose files were read already."""
        control = find_control(_load(files.definition), files.settings, family, config)
        return cls.from_json(files.definition, control, files.chat_template)

    @classmethod
    def from_bundle(cls, folder: Path, control: ControlTokens) -> Tokenizer:
        """Makes the tokenizer of a bundle, whose manifest has the control tokens.

        Raises CheckpointError if tokenizer.json is missing or damaged.
        """
        return cls.from_json(_read_tokenizer(folder), control, _find_template(folder, {}))

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids that it can name; a model's vocabulary may be larger."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        """Returns the token that begins a text, if the model has one."""
        return self.control.bos

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end a text or a chat turn."""
        return self.control.eos

    @property
    def fim(self) -> FimTokens | None:
        """Returns the fill-in-the-middle tokens, if the model has them."""
        return self.control.fim

    @cached_property
    def pieces(self) -> PieceIndex:
        """Returns the text tokens by their bytes; the index is made on first use."""
        pieces = self._vocabulary.every_piece()
        for token in self._control:
            pieces.pop(token, None)
        return PieceIndex(pieces)

    @property
    def template_variables(self) -> frozenset[str]:
        """Returns the names that the chat template looks up; none without a template."""
        return frozenset() if self._template is None else self._template.variables

    def encode(
        self, text: str, *, special: bool = False, start: bool = False, most: int | None = None
    ) -> list[int]:
        """Returns the token ids of a text.

        Control tokens in the text are ordinary characters unless `special`. `start` adds what the
        model expects at the beginning of a text. For a text of more than `most` tokens it returns
        more than `most` of them, perhaps not all, so that a text is known to be too long before all
        of it is read. Raises DataError for text that is not Unicode.
        """
        _check_unicode(text)
        ids = self._vocabulary.encode(text, special=special, most=most)
        if not special and not self._control.keys().isdisjoint(ids):
            ids = [part for token in ids for part in self._spelled(token)]
        return [*self.control.start, *ids] if start else ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of token ids; control tokens only if `special`, bad bytes as U+FFFD."""
        text = b"".join(self.token_bytes(token, special=special) for token in ids)
        if self._vocabulary.strips_space and text.startswith(b" "):
            text = text[1:]
        return text.decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """Returns the bytes of a token; none for unnamed ids; control tokens if `special`."""
        if not special and token in self._control:
            return b""
        return self._vocabulary.piece_bytes(token)

    def token_id(self, content: str) -> int | None:
        """Returns the id of a token by its exact content, or None."""
        return self._vocabulary.token_id(content)

    def is_control(self, token: int) -> bool:
        """Returns whether a token controls the model and is not text."""
        return token in self._control

    def begin_chat(self) -> None:
        """Starts the process that renders the chat template, if there is one, without waiting."""
        if self._template is not None:
            self._template.begin()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, as `prompt` does."""
        prompt = self.prompt(
            messages, variables, most=most, add_generation_prompt=add_generation_prompt
        )
        return prompt.ids

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        most: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> ChatPrompt:
        """Returns a conversation as the model reads it; `variables` go to the template (tools, ..).

        Control tokens in the messages stay ordinary characters; `most` is that of `encode`. If the
        template does not take the messages as they are, they are changed
        (`kvq_models.conversation`). With `continue_final_message` the prompt ends with the text of
        the last message. Raises ModelError if the model has no template or the template refuses the
        messages.
        """
        if self._template is None:
            raise ModelError(
                "this model has no chat template, so it cannot chat; give it plain text "
                "to continue (kvq run), or choose an instruction-tuned model"
            )
        from kvq_models.chat import MessageGuard
        from kvq_models.tools import with_calls_as_text

        guard = MessageGuard(self._control.values(), messages, variables or {})
        text, changes = self._template.prompt(
            {
                "bos_token": self._content(self.control.bos),
                "eos_token": self._content(next(iter(self.control.eos), None)),
                **guard.variables,
                # The marks that are written here are control tokens.
                "messages": with_calls_as_text(guard.messages, self._template.source),
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            }
        )
        ids: list[int] = []
        for part, is_template in guard.split(text):
            ids += self.encode(part, special=is_template, most=most)
            if most is not None and len(ids) > most:
                break
        return ChatPrompt(ids, changes)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        from kvq_models.chat import ChatTemplate

        return None if self.chat_template is None else ChatTemplate(self.chat_template)

    def _content(self, token: int | None) -> str:
        return "" if token is None else self._vocabulary.piece(token) or ""

    def _spelled(self, token: int) -> list[int]:
        """Returns the token, or its characters if merges built a control token from plain text."""
        content = self._control.get(token)
        if content is None:
            return [token]
        return _characters_ids(self._vocabulary, content, self._control)


def _characters_ids(
    vocabulary: TokenizerVocabulary, text: str, control: Collection[int]
) -> list[int]:
    """Returns the ids of each character of a text, or of its bytes, without ids of `control`."""
    parts: list[int] = []
    for character in text:
        whole = vocabulary.token_id(character)
        if whole is not None and whole not in control:
            parts.append(whole)
            continue
        for byte in character.encode("utf-8"):
            ids = [vocabulary.token_id(name) for name in byte_pieces(byte)]
            parts += [part for part in ids if part is not None][:1]
    return parts


def encoded_up_to(most: int | None, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the ids of a text; if it has more than `most`, perhaps those of its beginning alone.

    Beginnings are tried first. The text after a beginning changes its last tokens, so only twice as
    many tokens are certainly too many.
    """
    size = len(text) if most is None else max(_FIRST_CHARACTERS, 4 * most)
    while size < len(text):
        ids = encode(text[:size])
        if most is not None and len(ids) > 2 * most:
            return ids
        size *= 4
    return encode(text)


class JsonVocabulary:
    """Implements `TokenizerVocabulary` for a tokenizer.json, with the `tokenizers` library."""

    def __init__(self, tokenizer_json: str, control: frozenset[int] = frozenset()) -> None:
        """Loads the vocabulary; `control` are ids to treat as special beside those the file flags.

        Raises CheckpointError if `tokenizer_json` is not one, ModelError for its decoder.
        """
        self._library = _load(tokenizer_json)
        added = self._library.get_added_tokens_decoder()
        special = {token for token in added if token in control or _is_control(added[token])}
        # A file that an export wrote flags them all; other files have to be read twice.
        if any(not added[token].special for token in special):
            self._library = _load(_flagged(tokenizer_json, special))
        self._added = {
            token: piece_text(added_token.content).encode() for token, added_token in added.items()
        }
        self.special: Mapping[int, str] = {
            token: piece_text(added[token].content) for token in sorted(special)
        }
        self._library.no_truncation()
        self._library.no_padding()
        self._library_lock = Lock()
        decoder: Any = self._library.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self._bytes_of, self.strips_space = piece_decoder(state)

    @property
    def size(self) -> int:
        return self._library.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool, most: int | None = None) -> list[int]:
        """Encodes as `TokenizerVocabulary` says; other threads run meanwhile."""
        return encoded_up_to(most, text, lambda part: self._encode(part, special))

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._library_lock:
            self._library.encode_special_tokens = not special
            if len(text) <= _SHORT_CHARACTERS:
                return self._library.encode(text, add_special_tokens=False).ids
            # Unlike `encode`, this lets other threads run.
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids

    def piece_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._library.id_to_token(token)
        return b"" if piece is None else self._bytes_of((piece,))[0]

    def every_piece(self) -> dict[int, bytes]:
        named = self._library.id_to_token  # the library has no faster list of pieces
        pieces = {token: piece for token in range(self.size) if (piece := named(token)) is not None}
        return dict(zip(pieces, self._bytes_of(pieces.values()), strict=True)) | self._added

    def piece(self, token: int) -> str | None:
        piece = self._library.id_to_token(token)
        return None if piece is None else piece_text(piece)

    def token_id(self, content: str) -> int | None:
        return self._library.token_to_id(content)


class IncrementalDetokenizer:
    """Turns a stream of ids into pieces of text that never have half a character.

    The pieces of `push` and the last one of `flush` together are what `Tokenizer.decode` returns
    for all ids, except that a first space stays, since the stream continues a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: frozenset[int] = frozenset()
        self._skipped = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def fork(self) -> IncrementalDetokenizer:
        """Returns another one that stands at the same place of the same stream."""
        other = copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def skip(self, num_bytes: int) -> None:
        """Leaves out the next `num_bytes` of the stream."""
        self._skipped = num_bytes

    def show(self, control: frozenset[int]) -> None:
        """Makes these control tokens text from now on."""
        self._shown = control

    def push(self, token: int) -> str:
        """Returns the characters that this token completes, perhaps none."""
        special = token in self._shown
        piece = self._tokenizer.token_bytes(token, special=special)
        skipped = min(self._skipped, len(piece))
        self._skipped -= skipped
        return self._decoder.decode(piece[skipped:])

    def flush(self) -> str:
        """Returns U+FFFD for a character that was cut short, else nothing, and starts anew."""
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
    """Returns whether an added token controls the model: flagged special, or written like one."""
    return token.special or looks_like_control(token.content)


def _flagged(tokenizer_json: str, special: set[int]) -> str:
    """Returns the same file with these added tokens flagged special."""
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
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error


def _find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Returns the template from chat_template.jinja, else from tokenizer_config.json, else None.

    Raises ModelError if it cannot be read.
    """
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template: Any = tokenizer_config.get("chat_template")
        if not isinstance(template, list):
            return template
        entries = cast(list[dict[str, str]], template)
        return {entry["name"]: entry["template"] for entry in entries}.get("default")
    except (OSError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ModelError(
            f"the chat template of {folder} cannot be read: {reason_of(error)}"
        ) from error


def _check_definition(text: str) -> None:
    """Raises CheckpointError for what is no description of a tokenizer at all."""
    try:
        definition: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json is not JSON: {reason_of(error)}") from error
    if not isinstance(definition, dict) or "model" not in definition:
        raise CheckpointError("tokenizer.json does not describe a tokenizer: it has no model")


def _load(text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        _check_definition(text)
        raise CheckpointError(f"tokenizer.json cannot be used: {reason_of(error)}") from error
