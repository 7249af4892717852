"""Calls in a family's own notation as rules of a grammar, made of the schemas of their arguments.

Every text that fits is read back by the notation's own reader: what it cannot write is left out,
and where a call needs that, there is no call. Knows no request.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvq.errors import UsageError
from kvq_models.call_schemas import KEYWORDS, Branch, alternatives, kind_of, kinds_of
from kvq_models.call_texts import Notation, Values, typed
from kvq_models.tools import ToolForm
from kvq_runtime.constraint import MOST_CHARACTERS, escaped, json_part, slashed

# A schema that holds itself is followed so often.
_MOST_AGAIN = 6
# Readers read what is nested 64 deep, and a rule that was made at one depth is used at others.
_MOST_NESTED = 32
# Numbers with one bound lie before this one: what llguidance counts with.
_FARTHEST = 9_200_000_000_000_000_000
# Numbers without one are none that no float holds, or that Python does not read.
_WHOLE = "-?(0|[1-9][0-9]{0,99})"
_NUMBERS = {"integer": _WHOLE, "number": rf"{_WHOLE}(\.[0-9]{{1,99}})?([eE][+\-]?[0-9]{{1,2}})?"}
# Names that no schema says, where they stand without quotes.
_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_CONTROLS = r"\x00-\x1F"
_UNICODE = r"u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
# How a text begins that is read as a value of a kind.
_BEGINS = {"number": "[-0-9]", "array": r"\[", "object": r"\{"}

# Part of a rule, in Lark; None for what cannot be written.
Part = str | None


class CallRules:
    """Rules of calls in the notation of `form`, in Lark; `spelled` writes a mark there."""

    def __init__(self, form: ToolForm, notation: Notation, spelled: Callable[[str], str]) -> None:
        self._notation = notation
        self._inner = notation.values.inner or notation.values
        self._spelled = spelled
        # Where one of these stands a value ends, so that none has it.
        self._barred = [mark for mark in (form.closing, notation.end.strip()) if mark]
        self._names: dict[str, str] = {}
        self._characters = 0
        # Of the call at hand: its schema, what was made of parts of it, and the parts being read.
        self._root: Mapping[str, Any] = {}
        self._known: dict[tuple[str, int], Part] = {}
        self._within: list[str] = []

    @property
    def lark(self) -> str:
        """The rules that calls refer to."""
        return "".join(f"{name}: {body}\n" for body, name in self._names.items())

    def calls(self, functions: Iterable[Mapping[str, Any]], *, bare: bool = False) -> Sequence[str]:
        """A call of each that can be called, behind the form's own mark or the `bare` one.

        Raises `UsageError` for a schema that a call cannot be held to.
        """
        found = (self._call(function, bare=bare) for function in functions)
        return [call for call in found if call is not None]

    def _call(self, function: Mapping[str, Any], *, bare: bool) -> Part:
        name, schema = function["name"], function.get("parameters") or {"type": "object"}
        json_part(schema)  # which has the bounds of all schemas
        notation = self._notation
        head = (notation.bare_head if bare else notation.head).replace("NAME", name)
        empty = f"{head}{'' if notation.key else '{}'}{notation.tail}"
        if notation.read(empty, {}) != [(name, {})]:
            return None
        self._root, self._known = schema, {}
        found = self._either(
            self._arguments(branch) if notation.key else self._object(branch, free=False)
            for branch in alternatives(schema, schema)
            if "object" in branch["type"] and "enum" not in branch
        )
        return found and _row(self._spelled(head), found, escaped(notation.tail))

    def _arguments(self, branch: Branch) -> Part:
        before, _, behind = self._notation.key.partition("KEY")

        def named(name: str) -> Part:
            return escaped(f"{before}{name}{behind}") if self._may_be_bare(name) else None

        def others(names: Iterable[str]) -> str:
            return _row(escaped(before), self._other(_NAME, names), escaped(behind))

        comma = self._notation.comma
        return self._entries(branch, named, others, self._argument, comma, free=False)

    def _argument(self, schema: Any) -> Part:
        """A value as an argument, and what ends it."""
        values, end = self._notation.values, self._notation.end
        if values.inner is None:
            return (found := self._value(schema)) and _row(found, escaped(end))
        return self._any_of(values, schema, end)

    def _value(self, schema: Any) -> Part:
        """A value within others."""
        text = json.dumps(schema)
        again = self._within.count(text)
        if again == _MOST_AGAIN or len(self._within) == _MOST_NESTED:
            return None
        if (text, again) not in self._known:
            self._within.append(text)
            self._known[text, again] = self._any_of(self._inner, schema, "")
            self._within.pop()
        return self._known[text, again]

    def _any_of(self, values: Values, schema: Any, end: str) -> Part:
        """A value that fits `schema`, and its `end`."""
        kinds = kinds_of(schema, self._root) if values.quotes == ("",) else frozenset[str]()

        def reads(value: Any) -> bool:
            """Whether the text of `value` is read as that."""
            bare = value if isinstance(value, str) else json.dumps(value)
            return values.quotes != ("",) or typed(bare, kinds) == value

        rows: list[Part] = []
        for branch in alternatives(schema, self._root):
            if "enum" in branch:
                rows += [self._literal(values, one, end) for one in branch["enum"] if reads(one)]
            else:
                rows += [self._kind(values, branch, kind, end, kinds) for kind in branch["type"]]
        return self._either(rows)

    def _kind(
        self, values: Values, branch: Branch, kind: str, end: str, kinds: frozenset[str]
    ) -> Part:
        """A value of one kind of `branch`; one without quotes is none of the others of `kinds`."""
        match kind:
            case "string":
                return self._string(values, branch, end, kinds)
            case "boolean":
                return self._words(values, (True, False), end)
            case "null":
                return self._words(values, (None,), end)
            case "object":
                found = self._object(branch, free="properties" not in branch)
            case "array":
                found = self._array(branch)
            case _:
                found = _number(branch, kind)
        return found and _row(found, escaped(end))

    def _words(self, values: Values, meant: Iterable[bool | None], end: str) -> str:
        return self._terminal(_row(f"/({_words(values, meant)})/", escaped(end)))

    def _string(self, values: Values, branch: Branch, end: str, kinds: frozenset[str]) -> Part:
        least, most = branch.get("minLength", 0), branch.get("maxLength")
        barred = [f".*({'|'.join(map(_pattern, self._barred))}).*"]
        if kinds - {"string"}:
            begins = "|".join([r"\x22", *(_BEGINS[kind] for kind in _BEGINS if kind in kinds)])
            words = _words(values, [one for one in (True, False, None) if kind_of(one) in kinds])
            barred += [rf"\s*({begins}).*", f"[^A-Za-z]*({words})[^A-Za-z]*"]
        rows: list[Part] = []
        for quote in values.quotes if most is None or least <= most else ():
            mark, one = _pattern(quote), "."
            bars = [*barred, *([f".*{mark}.*"] if quote and not values.escapes else [])]
            if values.escapes:
                one = f"[^{mark}\\\\{'' if values.controls else _CONTROLS}]"
            if values.escapes and "pattern" not in branch:
                one = rf"({one}|\\([{mark}\\\/bfnrt]|{_UNICODE}))"
            body = [f"/(?s:{one}{{{least},{'' if most is None else most}}})/"]
            body += [_searched(branch["pattern"])] if "pattern" in branch else []
            body += [f"~/(?s:{bar})/" for bar in bars]
            rows.append(self._quoted(quote, self._terminal(" & ".join(body)), end))
        return self._either(rows)

    def _quoted(self, quote: str, body: str, end: str) -> str:
        """The terminal `body` between quotes, which a vocabulary may have as control tokens."""
        mark = self._spelled(quote)
        if mark.startswith("<"):
            return _row(mark, body, mark, escaped(end))
        return self._terminal(_row(mark, body, mark, escaped(end)))

    def _literal(self, values: Values, value: Any, end: str) -> Part:
        """`value` itself, and its `end`."""
        kind, inner = kind_of(value), self._inner
        if kind == "string":
            return self._either(self._text(values, one, value, end) for one in values.quotes)
        if kind in ("boolean", "null"):
            return self._words(values, (value,), end)
        if kind == "number":
            text = json.dumps(value)
            fits = re.fullmatch(_NUMBERS["number"], text)
            return self._terminal(escaped(text + end)) if fits else None
        if kind == "array":
            opening, closing = "[]"
            parts = [self._literal(inner, one, "") for one in value]
        else:
            opening, closing = "{}"
            rows = sorted(value.items(), key=_by_name) if inner.by_name else value.items()
            entries = [(self._key(name), self._literal(inner, one, "")) for name, one in rows]
            parts = [key and one and _row(key, one) for key, one in entries]
        if not all(parts):
            return None
        body = f" {_spaced(inner.comma)} ".join(map(str, parts))
        return _row(escaped(opening), body, escaped(closing + end))

    def _text(self, values: Values, quote: str, text: str, end: str) -> Part:
        """The one string `text` between two of `quote`."""
        ended = [*self._barred, *([quote] if quote and not values.escapes else [])]
        if any(mark in text for mark in ended) or _has_halves(text):
            return None
        body = "".join(_spelt(one, values, quote) for one in text)
        return (
            self._quoted(quote, self._terminal(f"/{body}/"), end)
            if body
            else (_row(self._spelled(quote), self._spelled(quote), escaped(end)))
        )

    def _key(self, name: str) -> Part:
        """The name of an entry of an object and what stands behind it."""
        values = self._inner
        if values.bare:
            return escaped(name + values.colon) if self._may_be_bare(name) else None
        # Readers of some notations know no key without a character.
        found = name and self._literal(values, name, "")
        return _row(found, _spaced(values.colon)) if found else None

    def _may_be_bare(self, name: str) -> bool:
        """Whether the reader has the name of an argument again."""
        notation = self._notation
        head = notation.head.replace("NAME", "f") + notation.key.replace("KEY", name)
        calls = notation.read(f"{head}1{notation.end}{notation.tail}", {})
        again = calls is not None and [list(found) for _, found in calls] == [[name]]
        return again and not any(mark in name for mark in self._barred) and not _has_halves(name)

    def _object(self, branch: Branch, *, free: bool) -> Part:
        values = self._inner

        def others(names: Iterable[str]) -> str:
            if values.bare:
                return _row(self._other(_NAME, names), escaped(values.colon))
            keys = (
                self._other(
                    rf"{one}[^{one}\\{_CONTROLS}]+{one}", (one + name + one for name in names)
                )
                for one in values.quotes
            )
            return _row(f"({' | '.join(keys)})", _spaced(values.colon))

        found = self._entries(branch, self._key, others, self._value, values.comma, free=free)
        return found and _row(escaped("{"), found, escaped("}"))

    def _other(self, pattern: str, names: Iterable[str]) -> str:
        """What fits `pattern`, is none of `names` and has no mark."""
        mine = [f"~{escaped(name)}" for name in names if name]
        bars = [f"~/(?s:.*{_pattern(mark)}.*)/" for mark in self._barred]
        return self._terminal(" & ".join([f"/{pattern}/", *mine, *bars]))

    def _entries(
        self,
        branch: Branch,
        key: Callable[[str], Part],
        others: Callable[[Iterable[str]], str],
        value: Callable[[Any], Part],
        comma: str,
        *,
        free: bool,
    ) -> Part:
        """Properties in their order, each where it must be or may be, and others behind them.

        `free`: others may be there where the schema does not say so.
        """
        required = dict.fromkeys(branch.get("required", ()))
        unnamed = branch.get("additionalProperties", True)
        rows: dict[str, Any] = branch.get("properties", {})
        rows = {**rows, **{name: unnamed for name in required if name not in rows}}
        by_name = self._inner.by_name
        entries: list[tuple[str, bool]] = []
        for name, schema in sorted(rows.items(), key=_by_name) if by_name else rows.items():
            head, body = key(name), value(schema)
            if head is not None and body is not None:
                entries.append((self._rule(_row(head, body)), name in required))
            elif name in required:
                return None
        more = value(unnamed) if free or "additionalProperties" in branch else None
        rest = more and self._rule(_row(others(rows), more))
        return self._chain(entries, rest, _spaced(comma))

    def _chain(self, entries: list[tuple[str, bool]], rest: Part, comma: str) -> str:
        """`entries` and any number of `rest`, `comma` between each two."""
        # What may come where nothing stands before it, and where something does.
        first = ['""'] if rest is None else [f"{rest} ({_row(comma, rest)})*", '""']
        then = '""' if rest is None else f"({_row(comma, rest)})*"
        for entry, required in reversed(entries):
            behind = self._rule(then)
            first = [_row(entry, behind), *([] if required else first)]
            then = _row(f"({_row(comma, entry)}){'' if required else '?'}", behind)
        return self._rule(" | ".join(first))

    def _array(self, branch: Branch) -> Part:
        least, most = branch.get("minItems", 0), branch.get("maxItems")
        fixed: list[str] = []
        for schema in branch.get("prefixItems", ())[:most]:
            found = self._value(schema)
            if found is None:
                # What stands behind it has no place either.
                most = len(fixed)
                break
            fixed.append(found)
        full = most is not None and most <= len(fixed)
        entry = None if full else self._value(branch.get("items", True))
        most = len(fixed) if entry is None else most
        if most is not None and least > most:
            return None
        room = None if most is None else most - len(fixed)
        comma, behind = _spaced(self._inner.comma), max(0, least - len(fixed))
        then = _times(_row(comma, entry), behind, room) if entry and fixed else '""'
        if entry and not fixed:
            fewer = None if room is None else room - 1
            then = _row(entry, _times(_row(comma, entry), max(0, behind - 1), fewer))
            then = self._rule(then if behind else f'{then} | ""')
        for place, one in reversed(list(enumerate(fixed))):
            row = _row(comma if place else '""', one, then)
            then = self._rule(row if place < least else f'{row} | ""')
        return _row(escaped("["), then, escaped("]"))

    def _either(self, rows: Iterable[Part]) -> Part:
        found = list(dict.fromkeys(row for row in rows if row is not None))
        return self._rule(" | ".join(found)) if found else None

    def _rule(self, body: str) -> str:
        return body if body.isidentifier() else self._named(body, "call_")

    def _terminal(self, body: str) -> str:
        return self._named(body, "CALL_")

    def _named(self, body: str, prefix: str) -> str:
        """A name for `body`, the same for the same."""
        body = body or '""'
        if body not in self._names:
            self._characters += len(body)
            if self._characters > MOST_CHARACTERS:
                raise UsageError(
                    f"the schemas of tools make a grammar of more than {MOST_CHARACTERS} "
                    "characters; offer fewer tools, or simpler ones"
                )
            self._names[body] = f"{prefix}{len(self._names)}"
        return self._names[body]


def _number(branch: Branch, kind: str) -> str:
    bounds = {name: branch[name] for name in branch if name in KEYWORDS["number"]}
    if not bounds:
        return f"/{_NUMBERS[kind]}/"
    if not {"minimum", "exclusiveMinimum"} & bounds.keys():
        bounds["minimum"] = -_FARTHEST
    if not {"maximum", "exclusiveMaximum"} & bounds.keys():
        bounds["maximum"] = _FARTHEST
    return json_part({"type": kind, **bounds})


def _row(*parts: str) -> str:
    """Parts that stand one after the other, without those that are nothing."""
    return " ".join(part for part in parts if part != '""')


def _times(part: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    return f"({part}){{{least},{'' if most is None else most}}}"


def _words(values: Values, meant: Iterable[bool | None]) -> str:
    return "|".join(word for one in meant for word in values.words[one])


def _pattern(text: str) -> str:
    """`text` itself as a part of a pattern."""
    return escaped(text)[1:-1]


def _spaced(mark: str) -> str:
    """A mark whose last space may be left out."""
    return f"/{_pattern(mark[:-1])}\\x20?/" if mark.endswith(" ") else escaped(mark)


def _spelt(character: str, values: Values, quote: str) -> str:
    """A character of a string as a part of a pattern."""
    bare = _pattern(character)
    if not values.escapes:
        return bare
    if character in (quote, "\\"):
        return _pattern(f"\\{character}")
    if character >= " ":
        return bare
    spelt = _pattern(json.dumps(character)[1:-1])
    return f"({bare}|{spelt})" if values.controls else spelt


def _has_halves(text: str) -> bool:
    """Whether halves of characters are in it, which no text of a model has."""
    return any("\ud800" <= one <= "\udfff" for one in text)


def _by_name(item: tuple[str, Any]) -> str:
    """Templates sort by this."""
    return item[0].lower()


def _searched(pattern: str) -> str:
    """A pattern that a text has somewhere, as one of the whole text."""
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", lambda one: "x" * len(one[0]), pattern)
    start, end = bare.startswith("^"), bare.endswith("$")
    inside = slice(start, len(pattern) - end)
    flat = bare[inside]
    while (shorter := re.sub(r"\([^()]*\)", "", flat)) != flat:
        flat = shorter
    if re.search(r"[\^$]", bare[inside]) or ("|" in flat and (start or end)):
        raise UsageError(
            f"the pattern {pattern[:60]!r} in the JSON schema has ^ or $ elsewhere than around all "
            "of it, which calls of this model cannot be held to; write it so, or leave it out"
        )
    before, behind = ("" if bound else "(?s:.*)" for bound in (start, end))
    return slashed(f"{before}({pattern[inside]}){behind}")
