"""Turns tool schemas into grammar rules for calls in a model family's own notation.

The notation's reader can read every text that fits the rules. Values that the notation cannot write
are left out; a call that needs such a value is left out as well.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvq.errors import UsageError
from kvq_models.call_schemas import FOLLOWED, KEYWORDS, Branch, alternatives, kind_of, kinds_of
from kvq_models.call_texts import Notation, Values, typed
from kvq_models.tools import ToolForm
from kvq_runtime.answer.constraint import MOST_CHARACTERS, escaped, json_part, slashed
from kvq_runtime.answer.schemas import Follower, pattern_fault

# A schema that contains itself is followed so often.
_MOST_AGAIN = 6
# Readers accept 64 levels, and a rule that was made at one level is used at others.
_MOST_NESTED = 32
# The other bound of numbers with one bound; llguidance has no larger ones.
_FARTHEST = 9_200_000_000_000_000_000
# Numbers without bounds are those that a float can hold and Python can read.
_WHOLE = "-?(0|[1-9][0-9]{0,99})"
_NUMBERS = {"integer": _WHOLE, "number": rf"{_WHOLE}(\.[0-9]{{1,99}})?([eE][+\-]?[0-9]{{1,2}})?"}
# Names without quotes that the schema does not list.
_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_CONTROLS = r"\x00-\x1F"
_UNICODE = r"u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
# How texts begin that are read as values of a kind.
_BEGINS = {"number": "[-0-9]", "array": r"\[", "object": r"\{"}

# Part of a rule, in Lark's notation; None for what cannot be written.
RulePart = str | None


def _pattern_fault(pattern: str) -> str | None:
    """Returns what calls cannot follow of a pattern, or None."""
    try:
        _whole_pattern(pattern)
    except UsageError:
        return "^ or $ elsewhere than around all of it"
    return pattern_fault(pattern)


# In notations of their own a schema's `format` is ignored.
CALL_FOLLOWER = Follower(words=FOLLOWED, formats=(), pattern_fault=_pattern_fault)


class CallRules:
    """Builds rules in Lark's notation for calls of `form`; `spelled` writes a mark as a rule."""

    def __init__(self, form: ToolForm, notation: Notation, spelled: Callable[[str], str]) -> None:
        self._notation = notation
        self._inner = notation.values.inner or notation.values
        self._spelled = spelled
        # These marks end a value, so that no value may contain them.
        self._barred = [mark for mark in (form.closing, notation.end.strip()) if mark]
        self._names: dict[str, str] = {}
        self._characters = 0
        # For one call: its schema, the rules of its parts, and the parts that are being read.
        self._root_schema: Mapping[str, Any] = {}
        self._rules_of_schemas: dict[tuple[str, int], RulePart] = {}
        self._open_schemas: list[str] = []

    @property
    def lark(self) -> str:
        """Returns the rules that calls refer to."""
        return "".join(f"{name}: {body}\n" for body, name in self._names.items())

    def calls(self, functions: Iterable[Mapping[str, Any]], *, bare: bool = False) -> Sequence[str]:
        """Returns a rule for each function that can be called, after the usual or the `bare` mark.

        Raises `UsageError` for a schema that a call cannot follow.
        """
        rules = (self._call(function, bare=bare) for function in functions)
        return [call for call in rules if call is not None]

    def _call(self, function: Mapping[str, Any], *, bare: bool) -> RulePart:
        name, schema = function["name"], function.get("parameters") or {"type": "object"}
        notation = self._notation
        if not notation.writes(name, bare=bare):
            return None
        head = (notation.bare_head if bare else notation.head).replace("NAME", name)
        self._root_schema, self._rules_of_schemas = schema, {}
        arguments = self._choice(
            self._arguments(branch) if notation.key else self._object(branch, free=False)
            for branch in alternatives(schema, schema)
            if "object" in branch["type"] and "enum" not in branch
        )
        return arguments and _sequence(self._spelled(head), arguments, escaped(notation.tail))

    def _arguments(self, branch: Branch) -> RulePart:
        prefix, _, suffix = self._notation.key.partition("KEY")

        def argument_name(name: str) -> RulePart:
            return escaped(f"{prefix}{name}{suffix}") if self._may_be_bare(name) else None

        def other_name(names: Iterable[str]) -> str:
            return _sequence(escaped(prefix), self._other(_NAME, names), escaped(suffix))

        comma = self._notation.comma
        return self._entries(branch, argument_name, other_name, self._argument, comma, free=False)

    def _argument(self, schema: Any) -> RulePart:
        """Returns the rule of a value as an argument, with its end."""
        values, end = self._notation.values, self._notation.end
        if values.inner is None:
            return (rule := self._value(schema)) and _sequence(rule, escaped(end))
        return self._any_of(values, schema, end)

    def _value(self, schema: Any) -> RulePart:
        """Returns the rule of a value inside another value."""
        text = json.dumps(schema)
        again = self._open_schemas.count(text)
        if again == _MOST_AGAIN or len(self._open_schemas) == _MOST_NESTED:
            return None
        if (text, again) not in self._rules_of_schemas:
            self._open_schemas.append(text)
            self._rules_of_schemas[text, again] = self._any_of(self._inner, schema, "")
            self._open_schemas.pop()
        return self._rules_of_schemas[text, again]

    def _any_of(self, values: Values, schema: Any, end: str) -> RulePart:
        """Returns the rule of a value that fits `schema`, with its `end`."""
        kinds = kinds_of(schema, self._root_schema) if values.quotes == ("",) else frozenset[str]()

        def reads(value: Any) -> bool:
            """Says whether the text of `value` is read as this value."""
            bare = value if isinstance(value, str) else json.dumps(value)
            return values.quotes != ("",) or typed(bare, kinds) == value

        rows: list[RulePart] = []
        for branch in alternatives(schema, self._root_schema):
            if "enum" in branch:
                rows += [
                    self._literal(values, value, end) for value in branch["enum"] if reads(value)
                ]
            else:
                rows += [self._kind(values, branch, kind, end, kinds) for kind in branch["type"]]
        return self._choice(rows)

    def _kind(
        self, values: Values, branch: Branch, kind: str, end: str, kinds: frozenset[str]
    ) -> RulePart:
        """Returns the rule of one kind of value.

        A string without quotes must not look like a value of another kind of `kinds`.
        """
        match kind:
            case "string":
                return self._string(values, branch, end, kinds)
            case "boolean":
                return self._words(values, (True, False), end)
            case "null":
                return self._words(values, (None,), end)
            case "object":
                rule = self._object(branch, free="properties" not in branch)
            case "array":
                rule = self._array(branch)
            case _:
                rule = _number(branch, kind)
        return rule and _sequence(rule, escaped(end))

    def _words(self, values: Values, meant: Iterable[bool | None], end: str) -> str:
        return self._terminal(_sequence(f"/({_words(values, meant)})/", escaped(end)))

    def _string(self, values: Values, branch: Branch, end: str, kinds: frozenset[str]) -> RulePart:
        least, most = branch.get("minLength", 0), branch.get("maxLength")
        barred = [f".*({'|'.join(map(_pattern, self._barred))}).*"]
        if kinds - {"string"}:
            begins = "|".join([r"\x22", *(_BEGINS[kind] for kind in _BEGINS if kind in kinds)])
            words = _words(
                values, [literal for literal in (True, False, None) if kind_of(literal) in kinds]
            )
            barred += [rf"\s*({begins}).*", f"[^A-Za-z]*({words})[^A-Za-z]*"]
        rows: list[RulePart] = []
        for quote in values.quotes if most is None or least <= most else ():
            mark, character = _pattern(quote), "."
            bars = [*barred, *([f".*{mark}.*"] if quote and not values.escapes else [])]
            if values.escapes:
                character = f"[^{mark}\\\\{'' if values.controls else _CONTROLS}]"
            if values.escapes and "pattern" not in branch:
                character = rf"({character}|\\([{mark}\\\/bfnrt]|{_UNICODE}))"
            body = [f"/(?s:{character}{{{least},{'' if most is None else most}}})/"]
            body += [_whole_pattern(branch["pattern"])] if "pattern" in branch else []
            body += [f"~/(?s:{bar})/" for bar in bars]
            rows.append(self._quoted(quote, self._terminal(" & ".join(body)), end))
        return self._choice(rows)

    def _quoted(self, quote: str, body: str, end: str) -> str:
        """Returns the terminal `body` between quotes, which may be control tokens."""
        mark = self._spelled(quote)
        if mark.startswith("<"):
            return _sequence(mark, body, mark, escaped(end))
        return self._terminal(_sequence(mark, body, mark, escaped(end)))

    def _literal(self, values: Values, value: Any, end: str) -> RulePart:
        """Returns the rule of exactly `value`, with its `end`."""
        kind, inner = kind_of(value), self._inner
        if kind == "string":
            return self._choice(self._text(values, quote, value, end) for quote in values.quotes)
        if kind in ("boolean", "null"):
            return self._words(values, (value,), end)
        if kind == "number":
            text = json.dumps(value)
            fits = re.fullmatch(_NUMBERS["number"], text)
            return self._terminal(escaped(text + end)) if fits else None
        if kind == "array":
            opening, closing = "[]"
            parts = [self._literal(inner, item, "") for item in value]
        else:
            opening, closing = "{}"
            rows = sorted(value.items(), key=_by_name) if inner.by_name else value.items()
            entries = [(self._key(name), self._literal(inner, item, "")) for name, item in rows]
            parts = [key and item and _sequence(key, item) for key, item in entries]
        if not all(parts):
            return None
        body = f" {_with_optional_space(inner.comma)} ".join(map(str, parts))
        return _sequence(escaped(opening), body, escaped(closing + end))

    def _text(self, values: Values, quote: str, text: str, end: str) -> RulePart:
        """Returns the rule of exactly the string `text` between quotes."""
        marks = [*self._barred, *([quote] if quote and not values.escapes else [])]
        if any(mark in text for mark in marks) or _has_surrogates(text):
            return None
        body = "".join(_spelt(character, values, quote) for character in text)
        return (
            self._quoted(quote, self._terminal(f"/{body}/"), end)
            if body
            else (_sequence(self._spelled(quote), self._spelled(quote), escaped(end)))
        )

    def _key(self, name: str) -> RulePart:
        """Returns the rule of an object's key and the colon after it."""
        values = self._inner
        if values.bare:
            return escaped(name + values.colon) if self._may_be_bare(name) else None
        # Readers of some notations know no key without a character.
        literal = name and self._literal(values, name, "")
        return _sequence(literal, _with_optional_space(values.colon)) if literal else None

    def _may_be_bare(self, name: str) -> bool:
        """Says whether the reader can read an argument of this name."""
        notation = self._notation
        head = notation.head.replace("NAME", "f") + notation.key.replace("KEY", name)
        calls = notation.read(f"{head}1{notation.end}{notation.tail}", {})
        again = calls is not None and [list(arguments) for _, arguments in calls] == [[name]]
        return (
            again and not any(mark in name for mark in self._barred) and not _has_surrogates(name)
        )

    def _object(self, branch: Branch, *, free: bool) -> RulePart:
        values = self._inner

        def other_key(names: Iterable[str]) -> str:
            if values.bare:
                return _sequence(self._other(_NAME, names), escaped(values.colon))
            keys = (
                self._other(
                    rf"{quote}[^{quote}\\{_CONTROLS}]+{quote}",
                    (quote + name + quote for name in names),
                )
                for quote in values.quotes
            )
            return _sequence(f"({' | '.join(keys)})", _with_optional_space(values.colon))

        entries = self._entries(branch, self._key, other_key, self._value, values.comma, free=free)
        return entries and _sequence(escaped("{"), entries, escaped("}"))

    def _other(self, pattern: str, names: Iterable[str]) -> str:
        """Returns the rule of a text that fits `pattern`, is not in `names` and has no mark."""
        excluded = [f"~{escaped(name)}" for name in names if name]
        bars = [f"~/(?s:.*{_pattern(mark)}.*)/" for mark in self._barred]
        return self._terminal(" & ".join([f"/{pattern}/", *excluded, *bars]))

    def _entries(
        self,
        branch: Branch,
        key: Callable[[str], RulePart],
        other_key: Callable[[Iterable[str]], str],
        value: Callable[[Any], RulePart],
        comma: str,
        *,
        free: bool,
    ) -> RulePart:
        """Returns the rule of properties in their order, required or optional, and then others.

        With `free` other properties are possible even if the schema does not mention them.
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
                entries.append((self._rule(_sequence(head, body)), name in required))
            elif name in required:
                return None
        more = value(unnamed) if free or "additionalProperties" in branch else None
        rest = more and self._rule(_sequence(other_key(rows), more))
        return self._chain(entries, rest, _with_optional_space(comma))

    def _chain(self, entries: list[tuple[str, bool]], rest: RulePart, comma: str) -> str:
        """Returns the rule of `entries` and any number of `rest`, with `comma` between each two."""
        # What may follow at the beginning, and what may follow after an entry.
        first = ['""'] if rest is None else [f"{rest} ({_sequence(comma, rest)})*", '""']
        then = '""' if rest is None else f"({_sequence(comma, rest)})*"
        for entry, required in reversed(entries):
            following = self._rule(then)
            first = [_sequence(entry, following), *([] if required else first)]
            then = _sequence(f"({_sequence(comma, entry)}){'' if required else '?'}", following)
        return self._rule(" | ".join(first))

    def _array(self, branch: Branch) -> RulePart:
        least, most = branch.get("minItems", 0), branch.get("maxItems")
        fixed: list[str] = []
        for schema in branch.get("prefixItems", ())[:most]:
            item = self._value(schema)
            if item is None:
                # Without it no later item is possible.
                most = len(fixed)
                break
            fixed.append(item)
        full = most is not None and most <= len(fixed)
        entry = None if full else self._value(branch.get("items", True))
        most = len(fixed) if entry is None else most
        if most is not None and least > most:
            return None
        room = None if most is None else most - len(fixed)
        comma, required = _with_optional_space(self._inner.comma), max(0, least - len(fixed))
        then = _repeated(_sequence(comma, entry), required, room) if entry and fixed else '""'
        if entry and not fixed:
            fewer = None if room is None else room - 1
            then = _sequence(entry, _repeated(_sequence(comma, entry), max(0, required - 1), fewer))
            then = self._rule(then if required else f'{then} | ""')
        for place, item in reversed(list(enumerate(fixed))):
            row = _sequence(comma if place else '""', item, then)
            then = self._rule(row if place < least else f'{row} | ""')
        return _sequence(escaped("["), then, escaped("]"))

    def _choice(self, rows: Iterable[RulePart]) -> RulePart:
        choices = list(dict.fromkeys(row for row in rows if row is not None))
        return self._rule(" | ".join(choices)) if choices else None

    def _rule(self, body: str) -> str:
        return body if body.isidentifier() else self._named(body, "call_")

    def _terminal(self, body: str) -> str:
        return self._named(body, "CALL_")

    def _named(self, body: str, prefix: str) -> str:
        """Returns the name of the rule `body`; equal rules have one name."""
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


def _sequence(*parts: str) -> str:
    """Joins parts that follow each other, without empty ones."""
    return " ".join(part for part in parts if part != '""')


def _repeated(part: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    return f"({part}){{{least},{'' if most is None else most}}}"


def _words(values: Values, meant: Iterable[bool | None]) -> str:
    return "|".join(word for value in meant for word in values.words[value])


def _pattern(text: str) -> str:
    """Returns `text` as a part of a pattern that matches it literally."""
    return escaped(text)[1:-1]


def _with_optional_space(mark: str) -> str:
    """Returns the rule of a mark whose last space may be left out."""
    return f"/{_pattern(mark[:-1])}\\x20?/" if mark.endswith(" ") else escaped(mark)


def _spelt(character: str, values: Values, quote: str) -> str:
    """Returns a character of a string as a part of a pattern."""
    bare = _pattern(character)
    if not values.escapes:
        return bare
    if character in (quote, "\\"):
        return _pattern(f"\\{character}")
    if character >= " ":
        return bare
    spelt = _pattern(json.dumps(character)[1:-1])
    return f"({bare}|{spelt})" if values.controls else spelt


def _has_surrogates(text: str) -> bool:
    """Says whether a text has surrogates, which no text of a model has."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _by_name(item: tuple[str, Any]) -> str:
    """Returns the key that templates sort by."""
    return item[0].lower()


def _whole_pattern(pattern: str) -> str:
    """Turns a pattern that may match anywhere in a text into one of the whole text."""
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", lambda match: "x" * len(match[0]), pattern)
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
    prefix, suffix = ("" if bound else "(?s:.*)" for bound in (start, end))
    return slashed(f"{prefix}({pattern[inside]}){suffix}")
