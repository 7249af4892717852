"""A jinja2 environment for templates that nobody vouches for: what they do comes to an end.

A template spends steps (every block entered, every call and filter), characters (every value made
or written) and seconds of its thread; when one of them is used up it is ended by `TemplateError`.
What makes something large out of something small is refused before it is made. Knows no chat.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from threading import local
from typing import Any, cast

from jinja2 import TemplateError
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.nodes import Concat, Dict, Getitem, List, Node, Output, Slice, TemplateData, Tuple
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Far above what a template needs for a conversation that fills a context of a million tokens.
STEPS = 1 << 20
CHARACTERS = 1 << 24
CHARACTERS_PER_GIVEN = 64
SECONDS = 3.0

# What only slows a template down, or fills it with words.
_LEFT_OUT = ("pprint", "random", "urlize", "wordwrap", "xmlattr")
# Given a number (or one in a format) they make a text that many times as long.
_WIDENING = re.compile(
    "batch|center|expandtabs|format|format_map|indent|ljust|rjust|round|slice|tojson|zfill"
)
# They pass items on and write none of them.
_PASSING = re.compile(
    "abs|attr|count|d|default|dictsort|first|float|groupby|int|items|last|length|list|map|max|min|"
    "reject|rejectattr|reverse|select|selectattr|sort|unique"
)
# Their time grows as the product of two texts: each place of one is compared with all of the other.
_SEARCHING = re.compile("[lr]?strip|r(find|index|partition|split)|trim")
# They make bytes, which nothing here measures.
_MAKES_BYTES = ("encode", "to_bytes")
# What an item of a container counts for, in characters.
_ITEM = 16
# The places of a format, and those whose width is an argument.
_PLACE = re.compile(r"%[^A-Za-z%]*|\{[^{}]*")
_ARGUED = re.compile(r"%[^A-Za-z%]*\*|\{[^{}]*\{")
_NUMBER = re.compile(r"[0-9]+")


class _Budget:
    """What one rendering may still spend."""

    def __init__(self, given: int) -> None:
        self.steps = STEPS
        self.characters = CHARACTERS + CHARACTERS_PER_GIVEN * given
        self.end_s = time.thread_time() + SECONDS


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """`within` a budget its templates may be compiled and rendered, from any thread."""

    globals: dict[str, Any]
    filters: dict[str, Callable[..., Any]]
    intercepted_binops = frozenset(("+", "*", "**", "%", "//"))

    def __init__(self, extensions: Sequence[type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self.made
        )
        self.code_generator_class = _SpendingCode
        self._local = local()
        del self.globals["lipsum"]
        for name in _LEFT_OUT:
            del self.filters[name]

    def bound_filters(self) -> None:
        """Makes every filter spend; called once all filters are there."""
        for name, function in self.filters.items():
            self.filters[name] = self._spending(name, function)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have it."""
        return attr not in _MAKES_BYTES and super().is_safe_attribute(obj, attr, value)

    @contextmanager
    def within(self, given: object) -> Generator[None]:
        """A budget for what happens inside, larger for more that is `given`."""
        self._local.budget = _Budget(_size(given, CHARACTERS))
        try:
            yield
        finally:
            del self._local.budget

    def spend(self, characters: int = 0) -> None:
        """One step that made `characters`. Raises `TemplateError` when that is too much."""
        budget: _Budget = self._local.budget
        budget.steps -= 1
        budget.characters -= characters
        if budget.characters < 0:
            raise TemplateError("it makes more text than it may")
        # The clock costs as much as a step, and no step takes long.
        if budget.steps % 64 == 0 and (budget.steps <= 0 or time.thread_time() > budget.end_s):
            raise TemplateError("it takes more steps than it may")

    def made(self, value: Any) -> Any:
        """`value`, a new container or what is to be written: all that is in it is spent."""
        self.spend(len(value) if isinstance(value, str) else _size(value, self._left))
        return value

    def made_flat(self, value: Any) -> Any:
        """`value`, whose items are not new."""
        self.spend(_length(value))
        return value

    def joined(self, parts: tuple[Any, ...]) -> str:
        """What `~` gives."""
        self.made(parts)
        return "".join(map(str, parts))

    def call(self, context: Context, function: Any, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """One call in a template: a macro, a function, a method of a text."""
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            args = _listed(args)
            self._foresee(function.__name__, (owner, *args, *named.values()))
        result = super().call(context, function, *args, **named)
        return (self.made if function in (dict, Namespace) else self.made_flat)(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """One of the operators that can make much out of little."""
        if operator == "%" and isinstance(left, str):
            self._foresee("format", (left, right))
        elif operator != "+":
            self._foresee_product(operator, left, right)
        return self.made_flat(super().call_binop(context, operator, left, right))

    @property
    def _left(self) -> int:
        return self._local.budget.characters

    def _spending(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passes = _PASSING.fullmatch(name) is not None

        @wraps(function)
        def spending(*args: Any, **named: Any) -> Any:
            if not passes:
                args = _listed(args)
                self._foresee(name, (*args, *named.values()))
            return self.made_flat(function(*args, **named))

        return spending

    def _foresee(self, name: str, values: tuple[Any, ...]) -> None:
        """Refuses a call whose result would be too large, before it is made."""
        texts = [value for value in values if isinstance(value, str)]
        factor = 1
        if _WIDENING.fullmatch(name):
            factor = max((1, *_widths(name, texts, values)))
        elif name == "replace":
            factor = max((1, *map(len, texts[2:3])))
        elif name in ("join", "translate"):
            factor = 1 + max(map(len, texts), default=0)
        elif _SEARCHING.fullmatch(name):
            factor = max((1, *map(len, texts[1:])))
        elif name == "sum" and any(isinstance(value, list | tuple) for value in values[2:]):
            factor = _size(values, self._left)  # each sum is a new list
        if factor * _size(values, self._left) > self._left:
            raise TemplateError(f"{name} would make more text than it may")

    def _foresee_product(self, operator: str, left: Any, right: Any) -> None:
        work = 0
        if isinstance(left, int) and isinstance(right, int):
            # A product or quotient of whole numbers takes the product of their bits.
            bits = left.bit_length()
            power = operator == "**"
            work = (bits * min(abs(right), self._left)) ** 2 if power else bits * right.bit_length()
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(one, float):
                    work = _size(one, self._left) * abs(times)
        if work > self._left:
            raise TemplateError(f"{operator} would make more than it may")


class _SpendingCode(CodeGenerator):
    """Every block spends a step and its own text, every value made its size."""

    def blockvisit(self, nodes: Iterable[Node], frame: Frame) -> None:
        body = list(nodes)
        parts = [part for node in body if isinstance(node, Output) for part in node.nodes]
        length = sum(len(part.data) for part in parts if isinstance(part, TemplateData))
        self.writeline(f"environment.spend({length})")
        super().blockvisit(body, frame)

    def visit_Concat(self, node: Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: List, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: Dict, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, Slice):
            self._made(super().visit_Getitem, node, frame, "made_flat")
        else:
            super().visit_Getitem(node, frame)

    def _made(self, visit: Callable[..., None], node: Any, frame: Frame, by: str = "made") -> None:
        self.write(f"environment.{by}(")
        visit(node, frame)
        self.write(")")


def _listed(args: Iterable[Any]) -> tuple[Any, ...]:
    """The arguments; of what would give its items once, a list of them, which can be measured."""
    return tuple(list(cast(Any, arg)) if isinstance(arg, Iterator) else arg for arg in args)


def _widths(name: str, texts: Sequence[str], values: Sequence[Any]) -> Iterator[int]:
    """The numbers that say how wide a text becomes."""
    if name.startswith("format"):
        for place in _PLACE.findall(" ".join(texts)):
            yield from (int(found[:20]) for found in _NUMBER.findall(place))
        if not any(map(_ARGUED.search, texts)):
            return
    tuples = (cast(tuple[Any, ...], value) for value in values if isinstance(value, tuple))
    within = chain.from_iterable(tuples)
    yield from (abs(value) for value in (*values, *within) if isinstance(value, int))


def _length(value: Any) -> int:
    """Characters or items of a text or container; none of anything else."""
    return len(cast(Sized, value)) if isinstance(value, str | list | tuple | dict) else 0


def _size(value: Any, most: int) -> int:
    """Characters and items of a value, shared ones counted each time; not much more than `most`."""
    total, waiting = 0, [value]
    while waiting and total <= most:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            waiting += [*cast(dict[Any, Any], item), *cast(dict[Any, Any], item).values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += cast(Any, item)
        elif isinstance(item, Namespace):
            waiting.append(object.__getattribute__(item, "_Namespace__attrs"))
        total += _ITEM
    return total
