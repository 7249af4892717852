"""Parts of other open files that a completion should know: those most like the text at the cursor.

A file is cut into blocks of lines. A block counts by the names that it shares with the lines around
the cursor (Jaccard similarity). Knows no protocol and no model.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from kvq_apps.completion.document import NamedText, TextDocument

BLOCK_LINES = 40
# Lines before and after the cursor whose names count.
NEAR_LINES = 20
# So many blocks stand in front of a prompt at most; about 1,500 tokens of code.
MOST_BLOCKS = 4
LEAST_SIMILARITY = 0.05
# Blocks stay that are so good, compared with the best ones: what stands behind blocks that change
# becomes stale.
GOOD_ENOUGH = 0.7
# A longer block was not written by a person.
_MOST_CHARACTERS = 8_000
_NAME = re.compile(r"[^\W\d]\w{2,}")


@dataclass(frozen=True, slots=True)
class Block:
    """Holds some lines of a file, from line `first` on, and the names in them."""

    file: str
    first: int
    text: str
    names: frozenset[str]

    def similarity(self, names: frozenset[str]) -> float:
        """Returns the share of all names, these and its own, that are both; 0 for none."""
        return len(self.names & names) / (len(self.names | names) or 1)


def blocks_of(file: str, document: TextDocument) -> tuple[Block, ...]:
    """Cuts a document into blocks; a change moves those after it by whole lines only."""
    texts = (
        (first, "".join(document.lines(first, first + BLOCK_LINES)))
        for first in range(0, document.num_lines, BLOCK_LINES)
    )
    return tuple(
        Block(file, first, text, names_in(text))
        for first, text in texts
        if text.strip() and len(text) <= _MOST_CHARACTERS
    )


def short_name(path: str) -> str:
    """Returns the last two parts of a path, by which a model is told of a file."""
    return "/".join(path.split("/")[-2:])


def names_in(text: str) -> frozenset[str]:
    """Returns the names of three letters and more in a text."""
    return frozenset(_NAME.findall(text))


def related(
    blocks: Iterable[Block],
    document: TextDocument,
    place: tuple[int, int],
    before: Sequence[NamedText] = (),
) -> tuple[NamedText, ...]:
    """Returns the blocks most like the text at `place`, as (file name, text), in their order.

    Their order does not depend on the place, so that a cursor that moves changes little. `before`
    were chosen for an earlier place, and stay while they are good enough.
    """
    line = place[0]
    near = "".join(document.lines(max(0, line - NEAR_LINES), line + NEAR_LINES))
    names = names_in(near)
    rated = [(block.similarity(names), block) for block in blocks]
    alike = [row for row in rated if row[0] >= LEAST_SIMILARITY]
    best = nlargest(MOST_BLOCKS, alike, key=lambda row: row[0])
    kept = [row for row in rated if (row[1].file, row[1].text) in before]
    if len(kept) == len(before) > 0 and _sum(kept) >= GOOD_ENOUGH * _sum(best) > 0:
        return tuple(before)
    chosen = sorted((block for _, block in best), key=lambda block: (block.file, block.first))
    return tuple((block.file, block.text) for block in chosen)


def _sum(rated: Iterable[tuple[float, Block]]) -> float:
    return sum(similarity for similarity, _ in rated)
