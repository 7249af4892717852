"""Random traces of a session: whatever is drafted, rejected, gone back to, saved, loaded or taken
over from another text, its tokens are those of decoding one after the other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvq_runtime.sequence.hunks import common_prefix
from kvq_runtime.session.session import Session
from sequences import advance

# Texts of one trace; of an answer so many tokens are left when another text comes.
TEXTS_OF_A_TRACE, LEFT = 6, 8

# Takes a session on by some tokens, given those that are right, and asserts what it sees of it.
GoesOn = Callable[[Session[Any], Sequence[int], np.random.Generator], None]


class AnsweredText(NamedTuple):
    """A text and what follows it, decoded one by one."""

    ids: Sequence[int]
    answer: Sequence[int]


class GoneBack(NamedTuple):
    """Another text came: `tokens` at the end were not its, and before them so many were lost."""

    tokens: int
    lost: int


def traced(
    opened: Callable[[], Session[Any]],
    texts: Sequence[AnsweredText],
    goes_on: GoesOn,
    seed: int,
    saved: Path,
) -> list[GoneBack]:
    """One trace, of which tokens and bytes are asserted; how its sessions went back."""
    draw, session, gone_back = np.random.default_rng(seed), opened(), list[GoneBack]()
    for _ in range(TEXTS_OF_A_TRACE):
        text, answer = texts[int(draw.integers(len(texts)))]
        kept, encoding = common_prefix(session.tokens, text), session.sequence.encoding
        lost = encoding.recomputed_tokens
        back = session.sequence.cache.tokens - kept
        session.align(text)
        gone_back.append(GoneBack(back, encoding.recomputed_tokens - lost))
        least = int(draw.choice([1, 64]))  # in pieces of any length, or as they come
        while session.sequence.due():
            advance(session.sequence, int(draw.integers(least, 65)))
        done = 0
        while done < len(answer) - LEFT:
            left = None
            match int(draw.integers(6)):
                case 0 | 1 | 2:
                    goes_on(session, answer[done:], draw)
                case 3:
                    left = done - int(draw.integers(done + 1))
                    session.rollback(done - left)
                case 4:
                    left = done
                    session.save(saved)
                    if draw.integers(2):
                        session.close()
                        session = opened()
                    else:
                        goes_on(session, answer[done:], draw)
                    session.load(saved)
                case _:
                    break
            while session.sequence.due():
                advance(session.sequence)
            done = len(session.tokens) - len(text)
            assert list(session.tokens) == [*text, *answer[:done]], (seed, done)
            assert left in (None, done), (seed, done)
            cache = session.sequence.cache
            assert cache.used_bytes <= cache.peak_bytes <= cache.budget_bytes
    session.close()
    return gone_back
