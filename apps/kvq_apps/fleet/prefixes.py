"""Which replica holds the beginning of a text: what requests say of it, and where they went.

A text is known by digests of its beginnings, one for every `BLOCK` characters. Knows neither Ray
nor tokens: that a digest was seen says that the cache is likely there, and no more.
"""

import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from kvq.json_values import is_array, is_object

BLOCK = 64
# Digests that are remembered of each replica: some 4 million characters.
MOST_BLOCKS = 1 << 16

# Digests of a text's beginnings, the shortest first.
Chain = tuple[bytes, ...]
Replica = TypeVar("Replica", bound=Hashable)


def chains_of(body: bytes, owner: str) -> tuple[Chain, ...]:
    """What the request's JSON says of its text: its beginnings, and of a gap's text its ends too.

    An editor's key changes the middle, so that either half may be what was there before. Texts of
    different `owner`s have nothing in common. Empty for what is no request that writes.
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
    """The text before and behind the place that is written at; only equality means anything."""
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
    found: list[bytes] = []
    # A character is 4 bytes.
    for start in range(0, len(text) // BLOCK * BLOCK * 4, BLOCK * 4):
        digest.update(content[start : start + BLOCK * 4])
        found.append(digest.copy().digest())
    return tuple(found)


class Placements(Generic[Replica]):
    """Where texts went, and where the next should go. Each replica has `sessions` of its own."""

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self._held: dict[Replica, _Held] = {}

    def keep(self, replicas: Sequence[Replica]) -> None:
        """These are all there are; what went to others is forgotten."""
        self._held = {one: self._held.get(one) or _Held() for one in replicas}

    def put(self, replica: Replica, chains: Sequence[Chain]) -> None:
        """Notes that a text went to `replica`."""
        if replica in self._held:
            for chain in chains:
                self._held[replica].put(chain)

    def order(self, chains: Sequence[Chain], loads: Mapping[Replica, int]) -> list[Replica]:
        """All replicas of `loads` (requests that each has now), where the text best goes first.

        That is the one that shares most with it, unless it is busier than the least busy one by
        all its sessions. A text that begins like others and goes on from none of them, as chats
        with one system message do, may go elsewhere sooner: once that replica holds more texts
        than the emptiest by all its sessions. The rest is ordered by load.
        """
        held = {one: self._held.get(one) or _Held() for one in loads}
        fewest = min((one.texts for one in held.values()), default=0)
        least = min(loads.values(), default=0)

        def rank(replica: Replica) -> tuple[int, int, int]:
            here = held[replica]
            shared = sum(map(here.shared, chains))
            room = here.texts - fewest < self._sessions or any(map(here.goes_on, chains))
            wanted = shared if room and loads[replica] - least < self._sessions else 0
            return -wanted, loads[replica], here.texts

        return sorted(loads, key=rank)


class _Held:
    """The texts of one replica: digests, the oldest first, and whether a text ends at each."""

    def __init__(self) -> None:
        self.texts = 0
        self._ends: OrderedDict[bytes, bool] = OrderedDict()

    def put(self, chain: Chain) -> None:
        """A text that goes on from another takes its place."""
        for digest in chain:
            self._set(digest, ends=digest == chain[-1])
        while len(self._ends) > MOST_BLOCKS:
            self.texts -= self._ends.popitem(last=False)[1]

    def shared(self, chain: Chain) -> int:
        """Blocks at the beginning that were there before."""
        return next((n for n, one in enumerate(chain) if one not in self._ends), len(chain))

    def goes_on(self, chain: Chain) -> bool:
        """Whether a whole text from before is the beginning of this one."""
        return any(self._ends.get(digest, False) for digest in chain)

    def _set(self, digest: bytes, *, ends: bool) -> None:
        self.texts += ends - self._ends.get(digest, False)
        self._ends[digest] = ends
        self._ends.move_to_end(digest)
