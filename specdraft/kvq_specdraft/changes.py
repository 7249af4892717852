"""Learns what a rewritten text has in place of its source.

Each token is one character of a string.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

# Changes that are remembered for one first token of a span.
_MOST_CHANGES = 8
# Added to the possible occurrences of a change: one that came once may be an accident.
_DOUBT = 0.3
# The least chance with which a change is expected.
_LEAST_CHANCE = 0.5


@dataclass(slots=True)
class Rate:
    """Counts how often something came, of how often it could have come."""

    came: int = 0
    possible: int = 0

    def count(self, came: bool) -> None:
        """Counts one more time that it could have come."""
        self.came += came
        self.possible += 1


@dataclass(slots=True)
class Change:
    """Describes text that is `written` where the source has `span`, and how often this happens.

    It is counted in all (`everywhere`) and by the token before it (`after`).
    """

    span: str
    written: str
    everywhere: Rate = field(default_factory=Rate)
    after: dict[str, Rate] = field(default_factory=dict[str, Rate])

    def count(self, before: str, came: bool) -> None:
        """Counts an occurrence of `span` in the source after the token `before`."""
        self.everywhere.count(came)
        self.after.setdefault(before, Rate()).count(came)

    def chance(self, before: str) -> float:
        """Returns the chance of this change where the source has `span` after `before`."""
        rate = self.after.get(before, self.everywhere)
        return rate.came / (rate.possible + _DOUBT)


class Expected(NamedTuple):
    """Describes a token that is expected, with its chance if all before it is right.

    It stands for the source from `start`, as `change` has it or as it is; the next token stands for
    the source from `place`.
    """

    token: str
    start: int
    place: int
    change: Change | None
    chance: float


class Changes:
    """Remembers the changes with which one text was written so far, and where it was copied."""

    def __init__(self) -> None:
        # Changes by the first token of their span.
        self._known: dict[str, list[Change]] = {}
        # How often a copied token was right, by the token before it in the source.
        self._copy_rates: dict[str, Rate] = {}

    def at(self, text: str, place: int) -> list[Change]:
        """Returns the changes whose span the source has at `place`."""
        known = self._known.get(text[place], ())
        return [change for change in known if text.startswith(change.span, place)]

    def count(self, text: str, place: int, came: Change | None) -> None:
        """Counts that the source was changed like this at `place`, or copied if `came` is None."""
        for change in self.at(text, place):
            change.count(text[place - 1 : place], change is came)

    def count_copy(self, text: str, place: int, right: bool) -> None:
        """Counts whether the expected copy of the source's token at `place` was right."""
        before = text[place - 1 : place]
        rate = self._copy_rates.get(before)
        if rate is None:
            rate = self._copy_rates[before] = Rate()
        rate.count(right)
        if right and text[place] in self._known:
            self.count(text, place, None)

    def learn(self, text: str, start: int, stop: int, written: str) -> None:
        """Learns that `written` came in place of the source from `start` to `stop`.

        An insertion is stored together with the source's next token, which says where it belongs.
        """
        span = text[start:stop]
        if span == written:
            self.count(text, start, None)
            return
        if not span:
            span, written = text[stop : stop + 1], written + text[stop : stop + 1]
        known = self._known.setdefault(span[0], [])
        same = (change for change in known if change.span == span and change.written == written)
        change = next(same, None)
        if change is None:
            change = Change(span, written)
            known.append(change)
            del known[:-_MOST_CHANGES]
        self.count(text, start, change)

    def expected(self, text: str, place: int, count: int) -> list[Expected]:
        """Returns at least `count` expected tokens from `place` on, fewer at the source's end."""
        tokens = list[Expected]()
        while len(tokens) < count:
            more = self._next(text, place)
            if not more:
                break
            tokens += more
            place = more[-1].place
        return tokens

    def _next(self, text: str, place: int) -> list[Expected]:
        """Returns a change of the source at `place`, or its next token; nothing at its end."""
        if place >= len(text):
            return []
        token, before = text[place], text[place - 1 : place]
        change, chance = None, 0.0
        if token in self._known:
            change, chance = self._likeliest(text, place, before)
        if change is None:
            rate = self._copy_rates.get(before)
            right = 1.0 if rate is None else (rate.came + 1) / (rate.possible + 1)
            return [Expected(token, place, place + 1, None, (1 - chance) * right)]
        if not change.written:  # a deletion shows in the token after it
            end = place + len(change.span)
            after = text[end : end + 1]
            return [Expected(character, place, end + 1, change, chance) for character in after]
        return spelled(change, place, 0, chance)

    def _likeliest(self, text: str, place: int, before: str) -> tuple[Change | None, float]:
        """Returns the change to expect, or None, and the chance of the likeliest one."""
        changes = self.at(text, place)
        if not changes:
            return None, 0.0
        change = max(changes, key=lambda change: (change.chance(before), len(change.span)))
        chance = change.chance(before)
        return (change if chance >= _LEAST_CHANCE else None), chance


def spelled(change: Change, start: int, done: int, chance: float) -> list[Expected]:
    """Returns the tokens of `change`, of the source from `start`, after its first `done` ones.

    `chance` is that of the first of them; the others are certain to follow it.
    """
    last = len(change.written) - 1
    return [
        Expected(
            token,
            start,
            start + len(change.span) if place == last else start,
            change,
            chance if place == done else 1.0,
        )
        for place, token in enumerate(change.written)
        if place >= done
    ]
