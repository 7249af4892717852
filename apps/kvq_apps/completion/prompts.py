"""Fill-in-the-middle prompts of texts that change a little at every key, for whoever is asked.

An editor's own engine and the server's routes make them here. Knows texts and tokens, no request.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from kvq_apps.completion.blocks import BlockTokenizer
from kvq_models.infilling import (
    CHARACTERS_PER_TOKEN,
    FRONT_STEPS,
    infill_prompt,
    infill_tokens,
)
from kvq_models.tokenizer import Tokenizer

_NO_LIMIT = 1 << 40
# Of a server's clients so many have their texts' ids kept.
MOST_OWNERS = 8


class GapPrompts:
    """Prompts for the texts around a gap, of one model; any thread may ask.

    Of a text like one of the last ones only what differs is encoded. Every method raises
    `ModelError` for a model that fills in no middle.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._blocks = BlockTokenizer(tokenizer)
        self._lock = Lock()

    @property
    def stop_ids(self) -> frozenset[int]:
        """What ends an infilled text: the model's ends, and any infilling token."""
        return frozenset((*self._tokenizer.eos_ids, *infill_tokens(self._tokenizer).ids()))

    def whole(self, prefix: str, suffix: str, most: int) -> list[int]:
        """Ids of the whole of both texts; more than `most` if there are more, perhaps not all."""
        infill_tokens(self._tokenizer)
        for text in (prefix, suffix):
            if len(text) > CHARACTERS_PER_TOKEN * most:
                ids = self._tokenizer.encode(text, most=most)
                if len(ids) > most:
                    return ids
        return infill_prompt(self._tokenizer, prefix, suffix, _NO_LIMIT, self._encode)

    def fitted(
        self, prefix: str, suffix: str, room: int, extra: Sequence[tuple[str, str]] = ()
    ) -> tuple[list[int], bool]:
        """Ids of at most `room` tokens, and whether something was left out for it.

        `extra` are (file name, text), the least useful first: these go first when room is short,
        then the far ends of prefix and suffix, the prefix in steps, so that its beginning stays
        where it is while somebody types. The newest extra stands next to the text around the gap.
        """
        step = max(1, room // FRONT_STEPS)
        ids = infill_prompt(self._tokenizer, prefix, suffix, room, self._encode, step=step)
        start, near = len(self._tokenizer.control.start), room * CHARACTERS_PER_TOKEN
        both = (self._encode(text) for text in (prefix[-near:], suffix[:near]))
        if max(len(prefix), len(suffix)) > near or sum(map(len, both)) > len(ids) - start - 3:
            return ids, True
        room -= len(ids)
        chosen: list[list[int]] = []
        for name, text in reversed(extra):
            chunk = self._headed(name, text, room)
            if len(chunk) > room:
                break
            room -= len(chunk)
            chosen.append(chunk)
        others = [token for chunk in reversed(chosen) for token in chunk]
        return [*ids[:start], *others, *ids[start:]], len(chosen) < len(extra)

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            return self._blocks.encode(text)

    def _headed(self, name: str, text: str, most: int) -> list[int]:
        """One other file; after a separator token its name stands on a line of its own."""
        separator = infill_tokens(self._tokenizer).file
        if separator is None:
            return self._tokenizer.encode(f"{text}\n\n", most=most)
        return [separator, *self._tokenizer.encode(f"{name}\n{text}", most=most)]


class OwnedPrompts:
    """The `GapPrompts` of one model for each of the owners who asked last; any thread may ask.

    Each has its own, since what is encoded already takes less time: nobody is to learn by that
    what another one sent.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompts: OrderedDict[str, GapPrompts] = OrderedDict()
        self._lock = Lock()

    def of(self, owner: str) -> GapPrompts:
        """Those of `owner`; who has not asked for longest is forgotten for a new one."""
        with self._lock:
            found = self._prompts.pop(owner, None) or GapPrompts(self._tokenizer)
            self._prompts[owner] = found
            if len(self._prompts) > MOST_OWNERS:
                self._prompts.popitem(last=False)
            return found
