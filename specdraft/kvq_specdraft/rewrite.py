"""A text written again with changes: the source goes on being copied behind each change."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.errors import UsageError
from kvq_runtime.drafter import NO_DRAFT, Draft
from kvq_specdraft.changes import Changes, Expected, spelled
from kvq_specdraft.lookup import Lookup

# A change that is not over after so many tokens is none; its end is looked for among so many
# tokens of the source, so many farther for each token that agrees, and found where so many do.
_MOST_CHANGED = 32
_AHEAD = 64
_FARTHER = 16
_AGREE, _MOST_AGREE = 2, 4
# Weight of all that was expected before the newest token; below this share of right ones the
# source is given up; a run found elsewhere counts as so many right ones at most.
_OLDER = 0.9
_LEAST_RIGHT = 0.25
_MOST_RUN = 8
# The share of its doubts that a reader loses with each right token of a draft.
_SURER = 0.3
# The chance that what begins like a known change is that change.
_KNOWN = 0.8
# From so many new tokens on a text is a prompt, which nobody writes.
_MANY = 256


@dataclass(kw_only=True, eq=False)
class Rewrite(Lookup):
    """Reads along in the text that is being written again, and proposes what comes there next.

    Prompt look-up proposes what followed a run like the text's end: after a change it waits until
    the text has come to such a run again, and where records are alike it finds another's. Here a
    reader keeps its place in the source, as the copies of LLMA (arXiv 2304.04487) do, but beyond
    what was changed: a change ends where text and source agree again. What stood there and what
    came instead is kept with how often it came, so that a name, a key or an indentation that was
    changed once is expected to be changed again; and where copies were often wrong a draft is
    unsure. A reader begins where `lookup` would copy from, and leaves its place for a longer run
    elsewhere when it was wrong too often. A draft ends where the chance that all of it is right
    falls below `least`.
    """

    least: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least < 1:
            raise UsageError(
                about="draft",
                value=f"rewrite: least={self.least}",
                possible="0 up to, not including, 1",
            )
        self._forget()

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        text = "".join(map(chr, new))
        if kept < len(self._text):
            self._forget()
        self._text = self._text[:kept]
        if self._place is None or len(new) >= _MANY:
            self._text += text
            self._stop()
            self._jump()
            return
        hit = True
        for token in text:
            hit = self._read(token)
        if not hit:
            self._jump()

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        if self._place is None:
            return NO_DRAFT
        ids, chances, likely = list[int](), list[float](), 1.0
        doubt = 1 - self._sure
        self._ahead = self._expected(room)
        for expected in self._ahead[:room]:
            own = expected.chance * (1 - doubt)
            likely *= own
            if ids and likely < self.least:
                break
            ids.append(ord(expected.token))
            chances.append(own)
            doubt *= 1 - _SURER
        return Draft(ids=tuple(ids), chances=tuple(chances)) if ids else NO_DRAFT

    @property
    def _sure(self) -> float:
        """What to think of the next token: of a change's end the less the fewer tokens agree."""
        right = self._right / self._tried
        return right if self._open is None else right * (self._agree + 0.2) / (self._agree + 1.2)

    def _forget(self) -> None:
        """Another text begins."""
        self._changes = Changes()
        # How often the reader was right of how often it expected something, the newest most.
        self._right, self._tried = 0.0, 1.0
        # How many tokens agree with where an open change may have ended.
        self._agree = 0
        self._stop()

    def _stop(self) -> None:
        """Nothing is read along with."""
        # Where in the text the reader stands, and what it expects from there on.
        self._place: int | None = None
        self._ahead: list[Expected] = []
        # Of a change that is not over, where it began in the source and in what is written.
        self._open: tuple[int, int] | None = None

    def _jump(self) -> None:
        """Reads on where the longest run like the text's end was, if that promises more."""
        end, length = self._longest()
        if not length or end == self._place:
            return
        if self._open is not None and length <= len(self._text) - self._open[1] + 2 * self._agree:
            return  # it says no more than the reader does
        right = min(length, _MOST_RUN)
        if self._place is None or right * self._tried > self._right * (right + 1):
            self._place, self._ahead, self._open = end, [], None
            self._right, self._tried = right, right + 1

    def _expected(self, count: int) -> list[Expected]:
        """At least `count` tokens from the reader's place on, as far as there are."""
        assert self._place is not None
        ahead = self._ahead
        place = ahead[-1].place if ahead else self._place
        return ahead + self._changes.expected(self._text, place, count - len(ahead))

    def _read(self, token: str) -> bool:
        """`token` is written next; whether it was expected."""
        if self._place is None:
            self._text += token
            return False
        if not self._ahead:
            self._ahead = self._expected(1)
        self._text += token
        hit = bool(self._ahead) and self._ahead[0].token == token
        self._right = _OLDER * self._right + hit
        self._tried = _OLDER * self._tried + 1
        if not self._ahead or self._right < _LEAST_RIGHT * self._tried:
            self._stop()
        elif hit and self._open is None:
            self._advance()
        else:
            if self._open is None:
                self._depart()
            self._close()
        return hit

    def _advance(self) -> None:
        """The next token was written as expected."""
        expected = self._ahead.pop(0)
        self._place = expected.place
        if expected.change is None:
            self._changes.copied(self._text, expected.start, True)
        elif expected.place != expected.start:
            self._changes.count(self._text, expected.start, expected.change)

    def _depart(self) -> None:
        """Something else was written: a change begins, at the latest here."""
        start, change = self._ahead[0].start, self._ahead[0].change
        done = 0
        if change is None:
            self._changes.copied(self._text, start, False)
        else:
            # Of what was left out, nothing of it is what is expected first.
            done = max(0, len(change.written) - sum(one.start == start for one in self._ahead))
        self._open = (start, len(self._text) - 1 - done)

    def _close(self) -> None:
        """Looks for where the change that is open ends, or may end."""
        assert self._open is not None
        start, begun = self._open
        text, written = self._text, self._text[begun:]
        self._ahead = []
        if len(written) > _MOST_CHANGED:
            self._stop()
        elif not self._known(start, written):
            window = text[start : min(start + _AHEAD, begun)]
            found, agree = _agreeing(window, written)
            self._agree = agree
            self._place = start + found + agree
            if agree >= _AGREE:
                while agree < len(written) and found and window[found - 1] == written[-agree - 1]:
                    found, agree = found - 1, agree + 1
                self._changes.learn(text, start, start + found, written[: len(written) - agree])
                self._open = None

    def _known(self, start: int, written: str) -> bool:
        """Whether `written` is, or begins, a change that the source from `start` was met with."""
        for change in self._changes.at(self._text, start):
            if change.written.startswith(written):
                self._place = start + len(change.span)
                if len(change.written) == len(written):
                    self._changes.count(self._text, start, change)
                    self._open = None
                else:
                    self._ahead = spelled(change, start, len(written), _KNOWN)
                    self._agree = _AGREE
                return True
        return False


def _agreeing(source: str, written: str) -> tuple[int, int]:
    """Where in `source` the end of `written` stands, and how many of its last tokens.

    Few of them must stand near, more may stand farther away; none: behind as much as was written.
    """
    best = (0, len(written), 0)
    for agree in range(1, min(len(written), _MOST_AGREE) + 1):
        found = source.find(written[-agree:])
        if found < 0:
            break
        best = max(best, (agree * _FARTHER - found, found, agree))
    return best[1:]
