"""What a text that is written again has in place of what. Characters of its strings are tokens."""

from dataclasses import dataclass, field
from typing import NamedTuple

# Kept of those that begin with the same token.
_MOST_ALIKE = 8
# A change that came once may still be a chance one; a change must be this likely to be expected.
_DOUBT = 0.3
_LEAST_LIKELY = 0.5


@dataclass(slots=True)
class Rate:
    """How often something came of how often it could have."""

    came: int = 0
    possible: int = 0

    def count(self, came: bool) -> None:
        """It could have come, and did or did not."""
        self.came += came
        self.possible += 1


@dataclass(slots=True)
class Change:
    """`written` stands where the source has `span`; how often, in all and by the token before."""

    span: str
    written: str
    everywhere: Rate = field(default_factory=Rate)
    after: dict[str, Rate] = field(default_factory=dict[str, Rate])

    def count(self, before: str, came: bool) -> None:
        """The source had `span` after the token `before`."""
        self.everywhere.count(came)
        self.after.setdefault(before, Rate()).count(came)

    def likely(self, before: str) -> float:
        """The chance that it comes where the source has `span` after `before`."""
        rate = self.after.get(before, self.everywhere)
        return rate.came / (rate.possible + _DOUBT)


class Expected(NamedTuple):
    """A token of what is written next, and its chance if what is before it is right.

    It stands for the source from `start`, as `change` has it or as it is; the next one for the
    source from `place`.
    """

    token: str
    start: int
    place: int
    change: Change | None
    chance: float


class Changes:
    """The changes that one text was written with so far, and where it was copied."""

    def __init__(self) -> None:
        # By the first token of the span.
        self._known: dict[str, list[Change]] = {}
        # By the source's token before: how often a copied token was right.
        self._copied: dict[str, Rate] = {}

    def at(self, text: str, place: int) -> list[Change]:
        """Those whose span the source has at `place`."""
        known = self._known.get(text[place], ())
        return [change for change in known if text.startswith(change.span, place)]

    def count(self, text: str, place: int, came: Change | None) -> None:
        """At `place` the source was changed so, or copied."""
        for change in self.at(text, place):
            change.count(text[place - 1 : place], change is came)

    def copied(self, text: str, place: int, right: bool) -> None:
        """The source's token at `place` was to be copied; whether it was."""
        before = text[place - 1 : place]
        rate = self._copied.get(before)
        if rate is None:
            rate = self._copied[before] = Rate()
        rate.count(right)
        if right and text[place] in self._known:
            self.count(text, place, None)

    def learn(self, text: str, start: int, stop: int, written: str) -> None:
        """`written` came in place of the source from `start` to `stop`.

        What was put in is kept with the source's next token, which says where.
        """
        span = text[start:stop]
        if span == written:
            self.count(text, start, None)
            return
        if not span:
            span, written = text[stop : stop + 1], written + text[stop : stop + 1]
        known = self._known.setdefault(span[0], [])
        same = (one for one in known if one.span == span and one.written == written)
        change = next(same, None)
        if change is None:
            change = Change(span, written)
            known.append(change)
            del known[:-_MOST_ALIKE]
        self.count(text, start, change)

    def expected(self, text: str, place: int, count: int) -> list[Expected]:
        """At least `count` tokens, as far as there is a source, from its `place` on."""
        found = list[Expected]()
        while len(found) < count:
            more = self._next(text, place)
            if not more:
                break
            found += more
            place = more[-1].place
        return found

    def _next(self, text: str, place: int) -> list[Expected]:
        """A change of the source at `place`, or the next token of it; none where it is over."""
        if place >= len(text):
            return []
        token, before = text[place], text[place - 1 : place]
        change, likely = None, 0.0
        if token in self._known:
            change, likely = self._likeliest(text, place, before)
        if change is None:
            rate = self._copied.get(before)
            right = 1.0 if rate is None else (rate.came + 1) / (rate.possible + 1)
            return [Expected(token, place, place + 1, None, (1 - likely) * right)]
        if not change.written:  # what is left out shows in the token behind it
            behind = place + len(change.span)
            left = text[behind : behind + 1]
            return [Expected(one, place, behind + 1, change, likely) for one in left]
        return spelled(change, place, 0, likely)

    def _likeliest(self, text: str, place: int, before: str) -> tuple[Change | None, float]:
        """The change to expect, or none, and how likely the likeliest is."""
        likely = [(one.likely(before), len(one.span), one) for one in self.at(text, place)]
        if not likely:
            return None, 0.0
        most, _, change = max(likely, key=lambda own: own[:2])
        return (change if most >= _LEAST_LIKELY else None), most


def spelled(change: Change, start: int, done: int, chance: float) -> list[Expected]:
    """What `change` of the source from `start` has after its first `done` tokens.

    `chance`: that of the first; the others follow it.
    """
    last = len(change.written) - 1
    return [
        Expected(
            token,
            start,
            start + len(change.span) if own == last else start,
            change,
            chance if own == done else 1.0,
        )
        for own, token in enumerate(change.written)
        if own >= done
    ]
