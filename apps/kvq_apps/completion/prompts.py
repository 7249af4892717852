"""Fill-in-the-middle prompts of texts that change a little at every key.

The editor's own engine and the server's routes make them here. Knows texts and tokens, no request.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

from kvq_apps.completion.document import NamedText
from kvq_apps.completion.token_blocks import BlockTokenizer
from kvq_models.infilling import (
    CHARACTERS_PER_TOKEN,
    FRONT_STEPS,
    infill_prompt,
    infill_tokens,
)
from kvq_models.tokenizer import Tokenizer

_NO_LIMIT = 1 << 40
# A server keeps the ids of this many clients' texts.
MOST_OWNERS = 8
# The ids of so many parts of other files are kept.
MOST_FILES = 64


class FittedPrompt(NamedTuple):
    """Holds a prompt's ids, whether something was left out, and the other files' parts of it."""

    ids: list[int]
    truncated: bool
    passages: tuple[tuple[int, ...], ...] = ()


class GapPrompts:
    """Makes prompts for the texts around a gap, for one model; any thread may ask.

    Only what differs from the last texts is encoded. Every method raises `ModelError` for a
    model that cannot fill in a middle.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._blocks = BlockTokenizer(tokenizer)
        self._encode_file = lru_cache(MOST_FILES)(self._file_ids)
        self._lock = Lock()

    @property
    def stop_ids(self) -> frozenset[int]:
        """Returns the tokens that end an infilled text: the model's ends, and infilling tokens."""
        return frozenset((*self._tokenizer.eos_ids, *infill_tokens(self._tokenizer).ids()))

    @property
    def gap_id(self) -> int | None:
        """Returns the token that stands at the gap, None where prompts begin with the suffix."""
        fim = infill_tokens(self._tokenizer)
        return None if fim.suffix_first else fim.suffix

    def encode_whole(self, prefix: str, suffix: str, most: int) -> list[int]:
        """Encodes both texts in full; of more than `most` ids perhaps not all are returned."""
        infill_tokens(self._tokenizer)
        for text in (prefix, suffix):
            if len(text) > CHARACTERS_PER_TOKEN * most:
                ids = self._tokenizer.encode(text, most=most)
                if len(ids) > most:
                    return ids
        return infill_prompt(self._tokenizer, prefix, suffix, _NO_LIMIT, self._encode)

    def fit(
        self, prefix: str, suffix: str, room: int, extra: Sequence[NamedText] = ()
    ) -> FittedPrompt:
        """Returns a prompt of at most `room` tokens.

        `extra` are (file name, text), the least useful first: these are left out first when room is
        short. Then the far ends of prefix and suffix go, the prefix in steps, so that its beginning
        stays the same while somebody types. The last extra stands next to the text around the gap.
        """
        characters, tokens = 0, 0

        def encode(text: str) -> list[int]:
            nonlocal characters, tokens
            text_ids = self._encode(text)
            characters, tokens = characters + len(text), tokens + len(text_ids)
            return text_ids

        step = max(1, room // FRONT_STEPS)
        ids = infill_prompt(self._tokenizer, prefix, suffix, room, encode, step=step)
        start = len(self._tokenizer.control.start)
        if characters < len(prefix) + len(suffix) or tokens > len(ids) - start - 3:
            return FittedPrompt(ids, truncated=True)
        room -= len(ids)
        chosen: list[list[int]] = []
        for name, text in reversed(extra):
            if len(text) > CHARACTERS_PER_TOKEN * room:
                break
            chunk = self._encode_file(name, text)
            if len(chunk) > room:
                break
            room -= len(chunk)
            chosen.append(chunk)
        passages = tuple(map(tuple, reversed(chosen)))
        extra_ids = [token for passage in passages for token in passage]
        whole = [*ids[:start], *extra_ids, *ids[start:]]
        return FittedPrompt(whole, len(chosen) < len(extra), passages)

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            return self._blocks.encode(text)

    def _file_ids(self, name: str, text: str) -> list[int]:
        """Encodes another file; after a separator token its name stands on a line of its own."""
        separator = infill_tokens(self._tokenizer).file
        if separator is None:
            return self._tokenizer.encode(f"{text}\n\n")
        return [separator, *self._tokenizer.encode(f"{name}\n{text}")]


class OwnedPrompts:
    """Keeps the `GapPrompts` of one model for each of the last owners; any thread may ask.

    Owners share nothing: encoding known text is faster, and nobody may learn from that what another
    owner sent.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompts: OrderedDict[str, GapPrompts] = OrderedDict()
        self._lock = Lock()

    def for_owner(self, owner: str) -> GapPrompts:
        """Returns the prompts of `owner`. A new owner replaces the one that asked longest ago."""
        with self._lock:
            prompts = self._prompts.pop(owner, None) or GapPrompts(self._tokenizer)
            self._prompts[owner] = prompts
            if len(self._prompts) > MOST_OWNERS:
                self._prompts.popitem(last=False)
            return prompts
