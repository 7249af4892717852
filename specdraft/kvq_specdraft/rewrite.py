"""The drafter `rewrite`: a text is written again, and copying goes on after each change."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.errors import UsageError
from kvq_runtime.answer.drafter import NO_DRAFT, Draft
from kvq_specdraft.changes import Changes, Expected, spelled
from kvq_specdraft.lookup import Lookup

# A longer difference is no change: the reader gives up its place.
_MOST_CHANGED = 32
# The end of a change is looked for in this many tokens of the source.
_WINDOW = 64
# Each token that agrees allows the end of a change to be this many tokens farther away.
_FARTHER = 16
# A change is over when this many tokens agree.
_AGREE = 2
# The most tokens that are compared for it.
_MOST_AGREE = 4
# Weight of older tokens against the newest one in the share of right tokens.
_OLDER = 0.9
# Below this share of right tokens the reader gives up its place.
_LEAST_RIGHT = 0.25
# A matching run elsewhere counts as at most this many right tokens.
_MOST_RUN = 8
# Each right token of a draft removes this share of the reader's doubt.
_DOUBT_REMOVED = 0.3
# The chance that a difference that begins like a known change is that change.
_KNOWN_CHANCE = 0.8
# With this many new tokens a text is a prompt, which no answer wrote.
_MANY = 256


@dataclass(kw_only=True, eq=False)
class Rewrite(Lookup):
    """Follows the source of a text that is being rewritten, and proposes what comes next there.

    `lookup` proposes what followed a run like the text's end: after a change it waits until such a
    run comes again, and in similar records it finds that of another record. Here a reader keeps its
    place in the source, as the copies of LLMA (arXiv 2304.04487) do, but also across changes: a
    change ends where text and source agree again. What came in place of what is remembered with how
    often it came. So a name, a key or an indentation that was changed once is expected to change
    again. Where copies were often wrong a draft has low chances. A reader begins where `lookup`
    would copy from, and leaves its place for a longer run elsewhere if it was wrong too often.

    Args:
        max_ngram: The longest run in tokens with which a reader begins. Default 16.
        min_ngram: The shortest such run. Default 2.
        least: A draft ends where the chance that all of it is right falls below this; 0 up to, not
            including, 1. Default 0.2.
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
        if self._place is None:
            return NO_DRAFT
        ids, chances, path_chance = list[int](), list[float](), 1.0
        doubt = 1 - self._certainty
        self._ahead = self._expected(room)
        for expected in self._ahead[:room]:
            chance = expected.chance * (1 - doubt)
            path_chance *= chance
            if ids and path_chance < self.least:
                break
            ids.append(ord(expected.token))
            chances.append(chance)
            doubt *= 1 - _DOUBT_REMOVED
        return Draft(ids=tuple(ids), chances=tuple(chances)) if ids else NO_DRAFT

    @property
    def _certainty(self) -> float:
        """Returns the chance of the next token, small while few tokens agree after a change."""
        right = self._right / self._tried
        return right if self._open is None else right * (self._agree + 0.2) / (self._agree + 1.2)

    def _forget(self) -> None:
        """Forgets all changes, for another text."""
        self._changes = Changes()
        # Right tokens and all tokens that the reader expected, the newest with most weight.
        self._right, self._tried = 0.0, 1.0
        # How many tokens agree with the place where an open change may have ended.
        self._agree = 0
        self._stop()

    def _stop(self) -> None:
        """Gives up the reader's place."""
        # The reader's place in the source, and the tokens that it expects from there on.
        self._place: int | None = None
        self._ahead: list[Expected] = []
        # Where an open change began, in the source and in what is written.
        self._open: tuple[int, int] | None = None

    def _jump(self) -> None:
        """Moves the reader to the longest run like the text's end if that promises more."""
        end, length = self._longest()
        if not length or end == self._place:
            return
        if self._open is not None and length <= len(self._text) - self._open[1] + 2 * self._agree:
            return  # this run tells no more than the reader's place
        right = min(length, _MOST_RUN)
        if self._place is None or right * self._tried > self._right * (right + 1):
            self._place, self._ahead, self._open = end, [], None
            self._right, self._tried = right, right + 1

    def _expected(self, count: int) -> list[Expected]:
        """Returns at least `count` expected tokens from the reader's place on, fewer at the end."""
        assert self._place is not None
        ahead = self._ahead
        place = ahead[-1].place if ahead else self._place
        return ahead + self._changes.expected(self._text, place, count - len(ahead))

    def _read(self, token: str) -> bool:
        """Reads the next written token and returns whether it was expected."""
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
        """Moves on after a token that was written as expected."""
        expected = self._ahead.pop(0)
        self._place = expected.place
        if expected.change is None:
            self._changes.count_copy(self._text, expected.start, True)
        elif expected.place != expected.start:
            self._changes.count(self._text, expected.start, expected.change)

    def _depart(self) -> None:
        """Opens a change after a token that was not expected."""
        start, change = self._ahead[0].start, self._ahead[0].change
        done = 0
        if change is None:
            self._changes.count_copy(self._text, start, False)
        else:
            # For a deletion, of which nothing is written, this is 0.
            waiting = sum(expected.start == start for expected in self._ahead)
            done = max(0, len(change.written) - waiting)
        self._open = (start, len(self._text) - 1 - done)

    def _close(self) -> None:
        """Looks for the place where the open change ends, or may end."""
        assert self._open is not None
        start, begun = self._open
        text, written = self._text, self._text[begun:]
        self._ahead = []
        if len(written) > _MOST_CHANGED:
            self._stop()
        elif not self._is_known(start, written):
            window = text[start : min(start + _WINDOW, begun)]
            end, agree = _agreeing(window, written)
            self._agree = agree
            self._place = start + end + agree
            if agree >= _AGREE:
                while agree < len(written) and end and window[end - 1] == written[-agree - 1]:
                    end, agree = end - 1, agree + 1
                self._changes.learn(text, start, start + end, written[: len(written) - agree])
                self._open = None

    def _is_known(self, start: int, written: str) -> bool:
        """Returns whether `written` is, or begins, a known change of the source from `start`."""
        for change in self._changes.at(self._text, start):
            if change.written.startswith(written):
                self._place = start + len(change.span)
                if len(change.written) == len(written):
                    self._changes.count(self._text, start, change)
                    self._open = None
                else:
                    self._ahead = spelled(change, start, len(written), _KNOWN_CHANCE)
                    self._agree = _AGREE
                return True
        return False


def _agreeing(source: str, written: str) -> tuple[int, int]:
    """Returns where in `source` the end of `written` stands, and how many of its last tokens.

    Few tokens must stand near, more may stand farther away. If none agrees, the place is as far on
    as `written` is long.
    """
    best = (0, len(written), 0)
    for agree in range(1, min(len(written), _MOST_AGREE) + 1):
        place = source.find(written[-agree:])
        if place < 0:
            break
        best = max(best, (agree * _FARTHER - place, place, agree))
    return best[1:]
