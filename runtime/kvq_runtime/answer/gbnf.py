"""Translates llama.cpp's grammar notation (GBNF) to the Lark notation that llguidance reads.

Rules that refer to no cycle of rules become terminals. A lexer reads these and takes as much as it
can.
"""

import re
from collections.abc import Iterator, Mapping

from kvq.errors import UsageError

_DEPTH = 64
_MOST_REPEATS = 1 << 20
_MOST_RULES = 2000
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|\#[^\n]*)|(?P<name>[A-Za-z0-9_-]+)|(?P<sign>::=|[()|])
    |(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<range>\[(?:[^\]\\\n]|\\.)*\]|\.)
    |(?P<times>[*+?]|\{[ ]*[0-9]{1,7}[ ]*(?:,[ ]*(?:[0-9]{1,7}[ ]*)?)?\})""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([^xuU]))|([^\\])", re.DOTALL
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}

Piece = tuple[str, str]


def to_lark(grammar: str) -> str:
    """Returns `grammar` in Lark notation. Raises `UsageError`, which names the place of a fault."""
    rules = _rules(list(_pieces(grammar)))
    if "root" not in rules:
        raise UsageError("the grammar has no rule named root, where an answer begins; add one")
    references = {
        name: {text for kind, text in body if kind == "name"} for name, body in rules.items()
    }
    for name, targets in references.items():
        if unknown := sorted(targets - rules.keys()):
            raise UsageError(f"the grammar's rule {name!r} names {unknown[0]!r}, which has no rule")
    flat = _terminals(references)
    names = {name: f"{'T' if name in flat else 'r'}{number}" for number, name in enumerate(rules)}
    lines = [f"{names[name]}: {_Body(name, body, names).lark()}" for name, body in rules.items()]
    return "\n".join((f"start: {names['root']}", *lines, ""))


def _pieces(grammar: str) -> Iterator[Piece]:
    place = 0
    while place < len(grammar):
        match = _TOKEN.match(grammar, place)
        if match is None or match.lastgroup is None:
            line = grammar.count("\n", 0, place) + 1
            raise UsageError(
                f"line {line} of the grammar is not GBNF from {grammar[place : place + 20]!r} on"
            )
        if match.lastgroup != "skip":
            yield match.lastgroup, match[0]
        place = match.end()


def _rules(pieces: list[Piece]) -> dict[str, list[Piece]]:
    """Returns the pieces of every rule by name. A rule begins where ::= follows a name."""
    define = ("sign", "::=")
    starts = [
        place
        for place, (kind, _) in enumerate(pieces)
        if kind == "name" and pieces[place + 1 : place + 2] == [define]
    ]
    if pieces and (not starts or starts[0] > 0):
        raise UsageError(f"the grammar begins with {pieces[0][1][:20]!r}; begin it with NAME ::=")
    if len(starts) > _MOST_RULES:
        raise UsageError(f"the grammar has {len(starts)} rules; give at most {_MOST_RULES}")
    rules: dict[str, list[Piece]] = {}
    for start, end in zip(starts, [*starts[1:], len(pieces)], strict=False):
        name, body = pieces[start][1], pieces[start + 2 : end]
        if name in rules:
            raise UsageError(f"the grammar has two rules named {name!r}; keep one")
        rules[name] = body
    return rules


def _terminals(references: Mapping[str, set[str]]) -> set[str]:
    """Returns the rules that reach no cycle of rules."""
    terminals: set[str] = set()
    users: dict[str, list[str]] = {name: [] for name in references}
    remaining = {name: len(targets) for name, targets in references.items()}
    for name, targets in references.items():
        for target in targets:
            users[target].append(name)
    waiting = [name for name, count in remaining.items() if count == 0]
    while waiting:
        name = waiting.pop()
        terminals.add(name)
        for user in users[name]:
            remaining[user] -= 1
            waiting += [user] if remaining[user] == 0 else []
    return terminals


class _Body:
    """Reads one rule's pieces from the left, alternatives inside alternatives."""

    def __init__(self, rule: str, pieces: list[Piece], names: Mapping[str, str]) -> None:
        self._rule = rule
        self._pieces = pieces
        self._names = names
        self._place = 0

    def lark(self) -> str:
        """Returns the whole body."""
        body = self._alternatives(0)
        if self._place < len(self._pieces):
            self._refuse()
        return body

    def _alternatives(self, depth: int) -> str:
        rows = [self._sequence(depth)]
        while self._accept("|"):
            rows.append(self._sequence(depth))
        return " | ".join(rows)

    def _sequence(self, depth: int) -> str:
        items: list[str] = []
        while self._place < len(self._pieces) and self._next not in (("sign", "|"), ("sign", ")")):
            kind, text = self._next
            if kind == "times":
                raise UsageError(f"{text} in the grammar's rule {self._rule!r} repeats nothing")
            self._place += 1
            item, times = self._item(kind, text, depth), self._times()
            items.append(f"{'(' * len(times)}{item}{''.join(f'){repeat}' for repeat in times)}")
        return " ".join(items) or '""'

    def _times(self) -> list[str]:
        """Reads the repeats of what was just read; there may be several."""
        repeats: list[str] = []
        while self._place < len(self._pieces) and self._next[0] == "times":
            if len(repeats) == _DEPTH:
                self._refuse(f", or repeated more than {_DEPTH} times over")
            repeats.append(_times(self._next[1]))
            self._place += 1
        return repeats

    def _item(self, kind: str, text: str, depth: int) -> str:
        if kind == "name":
            return self._names[text]
        if kind == "text":
            return _literal(text[1:-1])
        if kind == "range":
            return "/(?s:.)/" if text == "." else _range(text[1:-1])
        if text != "(" or depth == _DEPTH:
            self._place -= 1
            self._refuse(f", or deeper than {_DEPTH} brackets" if text == "(" else "")
        inner = self._alternatives(depth + 1)
        if not self._accept(")"):
            self._refuse()
        return f"({inner})"

    @property
    def _next(self) -> Piece:
        return self._pieces[self._place]

    def _accept(self, sign: str) -> bool:
        is_next = self._pieces[self._place : self._place + 1] == [("sign", sign)]
        self._place += is_next
        return is_next

    def _refuse(self, more: str = "") -> None:
        rest = self._pieces[self._place][1] if self._place < len(self._pieces) else "its end"
        raise UsageError(
            f"the grammar's rule {self._rule!r} is not understood at {rest[:20]!r}{more}"
        )


def _times(text: str) -> str:
    counts = [int(count) for count in re.findall("[0-9]+", text)]
    if max(counts, default=0) > _MOST_REPEATS or counts != sorted(counts):
        raise UsageError(f"{text} is no number of repeats in a grammar; give {{LEAST,MOST}}")
    return text.replace(" ", "")


def _literal(text: str) -> str:
    characters = [escaped_character(character) for character in _characters(text)]
    return f"/{''.join(characters)}/" if characters else '""'


def _range(text: str) -> str:
    """Returns a set of characters; - stands between the first and last character of a range."""
    sign, inner = ("^", text[1:]) if text.startswith("^") else ("", text)
    parts: list[str] = []
    matches = list(_CHARACTER.finditer(inner))
    place = 0
    while place < len(matches):
        low = high = _character(matches[place])
        if place + 2 < len(matches) and matches[place + 1][0] == "-":
            high = _character(matches[place + 2])
            place += 2
        if low > high:
            raise UsageError(f"[{text[:20]}] in the grammar has a range that runs backwards")
        parts.append(
            escaped_character(low)
            if low == high
            else f"{escaped_character(low)}-{escaped_character(high)}"
        )
        place += 1
    if not parts or sum(len(part[0]) for part in matches) < len(inner):
        raise UsageError(f"[{text[:20]}] in the grammar is not a set of characters")
    return f"/[{sign}{''.join(parts)}]/"


def _characters(text: str) -> list[str]:
    matches = list(_CHARACTER.finditer(text))
    if sum(len(part[0]) for part in matches) < len(text):
        raise UsageError(f"{text[:20]!r} in the grammar has an escape that is not complete")
    return [_character(part) for part in matches]


def _character(match: re.Match[str]) -> str:
    number = match[1] or match[2] or match[3]
    if number is None:
        return _LETTERS.get(match[4], match[4]) if match[4] else match[5]
    code = int(number, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise UsageError(f"{match[0]} in the grammar is no character of Unicode")
    return chr(code)


def escaped_character(character: str) -> str:
    """Returns a character as Lark's patterns write any character."""
    return f"\\x{{{ord(character):X}}}"
