"""Chooses a replica by the beginnings of texts that it got before.

A text has digests of its beginnings, one for every `BLOCK` characters. If a replica got a text with
the same digest, it probably holds its cache.
"""

import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from kvq.json_values import is_array, is_object

BLOCK = 64
# So many digests are kept for each replica: about 4 million characters.
MOST_BLOCKS = 1 << 16

# Digests of a text's beginnings, the shortest first.
Chain = tuple[bytes, ...]
Replica = TypeVar("Replica", bound=Hashable)


def chains_of(body: bytes, owner: str) -> tuple[Chain, ...]:
    """Returns the digests of a request's text: of its beginnings, and for a gap also of its ends.

    Typing changes the middle of a text, so either half may have been sent before. Texts of
    different owners have no digest in common. A request without a text has no digests.
    """
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not is_object(fields):
        return ()
    before, after = _texts(fields)
    seed = f"{owner}\0{fields.get('cache_salt')}"
    chains = (_chain(before, f"{seed}\0before"), _chain(after[::-1], f"{seed}\0after"))
    return tuple(chain for chain in chains if chain)


def _texts(fields: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the text before and after the place to write at, in a form for comparisons only."""
    if "messages" in fields:
        messages = fields["messages"]
        parts = messages if is_array(messages) else [messages]
        return "".join(map(json.dumps, [fields.get("tools"), *parts])), ""
    prompt = fields.get("prompt", "")
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    if "input_prefix" in fields or "input_suffix" in fields:
        extra = json.dumps(fields.get("input_extra") or "")
        return f"{extra}{fields.get('input_prefix')}{text}", f"{fields.get('input_suffix')}"
    return text, str(fields.get("suffix") or "")


def _chain(text: str, seed: str) -> Chain:
    content = text.encode("utf-32-le", errors="surrogatepass")
    digest = blake2b(seed.encode("utf-8", errors="surrogatepass"), digest_size=8)
    digests: list[bytes] = []
    # A character is 4 bytes.
    for start in range(0, len(text) // BLOCK * BLOCK * 4, BLOCK * 4):
        digest.update(content[start : start + BLOCK * 4])
        digests.append(digest.copy().digest())
    return tuple(digests)


class Placements(Generic[Replica]):
    """Remembers which replica got which texts and ranks replicas; each has `sessions` sessions."""

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self._texts_of: dict[Replica, _ReplicaTexts] = {}

    def keep(self, replicas: Sequence[Replica]) -> None:
        """Keeps the texts of these replicas and forgets all others."""
        self._texts_of = {
            replica: self._texts_of.get(replica) or _ReplicaTexts() for replica in replicas
        }

    def put(self, replica: Replica, chains: Sequence[Chain]) -> None:
        if replica in self._texts_of:
            for chain in chains:
                self._texts_of[replica].put(chain)

    def order(self, chains: Sequence[Chain], loads: Mapping[Replica, int]) -> list[Replica]:
        """Returns all replicas of `loads`, the best for a text first.

        `loads` are the requests that each replica has now. The best replica shares most with the
        text, unless it has as many more requests than the least busy one as it has sessions. A text
        that only begins like others, as chats with one system message do, also goes elsewhere if
        the replica holds as many more texts than the emptiest one as it has sessions. The others
        are ordered by load.
        """
        texts_of = {replica: self._texts_of.get(replica) or _ReplicaTexts() for replica in loads}
        fewest = min((texts.num_texts for texts in texts_of.values()), default=0)
        least = min(loads.values(), default=0)

        def rank(replica: Replica) -> tuple[int, int, int]:
            texts = texts_of[replica]
            shared = sum(map(texts.shared, chains))
            room = texts.num_texts - fewest < self._sessions or any(map(texts.goes_on, chains))
            score = shared if room and loads[replica] - least < self._sessions else 0
            return -score, loads[replica], texts.num_texts

        return sorted(loads, key=rank)


class _ReplicaTexts:
    """Holds the texts of one replica: digests, the oldest first, and whether a text ends there."""

    def __init__(self) -> None:
        self.num_texts = 0
        self._ends: OrderedDict[bytes, bool] = OrderedDict()

    def put(self, chain: Chain) -> None:
        """Adds a text, which replaces the text that it continues."""
        for digest in chain:
            ends = digest == chain[-1]
            self.num_texts += ends - self._ends.get(digest, False)
            self._ends[digest] = ends
            self._ends.move_to_end(digest)
        while len(self._ends) > MOST_BLOCKS:
            self.num_texts -= self._ends.popitem(last=False)[1]

    def shared(self, chain: Chain) -> int:
        """Returns how many blocks at the beginning are known."""
        return next((n for n, digest in enumerate(chain) if digest not in self._ends), len(chain))

    def goes_on(self, chain: Chain) -> bool:
        """Says whether a known text is the beginning of this one."""
        return any(self._ends.get(digest, False) for digest in chain)
