"""Renders one chat template in a process of its own, for `template_process`.

It has the template's environment: the functions and tags that templates on the hub expect, in
jinja2's immutable sandbox. The process may take little time and memory, and open nothing.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import IO, Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvq.limited_process import (
    OUT_OF_MEMORY,
    forbid_files_and_processes,
    limit_memory,
    limited_time,
    read_value,
    write_value,
)

# Characters of a template's own error message that are passed on.
_COMPLAINT_CHARACTERS = 500


def main(seconds: str, memory_bytes: str, characters: str) -> None:
    """Compiles the template that comes first, then renders it with each context that follows.

    Each step may take `seconds` of processor time and make a text of `characters`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    renderer = _Renderer(float(seconds), int(characters))
    renderer.warm_up()
    limit_memory(int(memory_bytes))
    forbid_files_and_processes()
    try:
        renderer.serve(sys.stdin.buffer, sys.stdout.buffer)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


class _Renderer:
    """Compiles a template by the first request and renders it for the others."""

    def __init__(self, seconds: float, characters: int) -> None:
        self._seconds = seconds
        self._characters = characters
        self._environment = _environment()
        self._template: Template | None = None

    def warm_up(self) -> None:
        """Loads modules and the time zone that a template may need, before files are forbidden."""
        source = "{{ strftime_now('%Y') | tojson }}{{ raise_exception('') }}"
        with suppress(TemplateError):
            self._environment.from_string(source).render()

    def serve(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        """Answers requests until the stream ends."""
        while (request := read_value(requests)) is not None:
            write_value(answers, self._answer(request))

    def _answer(self, request: Any) -> dict[str, Any]:
        """Returns the result, or the template's error message."""
        try:
            with limited_time(self._seconds):
                if self._template is None:
                    return {"variables": self._compile(request)}
                return {"text": self._render(self._template, request)}
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a template does is its complaint
            named = error if isinstance(error, TemplateError) else f"{type(error).__name__} {error}"
            return {"complaint": str(named)[:_COMPLAINT_CHARACTERS]}

    def _compile(self, source: str) -> list[str]:
        """Returns the names that the template looks up and does not set itself."""
        self._template = self._environment.from_string(source)
        return sorted(meta.find_undeclared_variables(self._environment.parse(source)))

    def _render(self, template: Template, context: Any) -> str:
        parts: list[str] = []
        room = self._characters
        for part in template.generate(context):
            parts.append(part)
            room -= len(part)
            if room < 0:
                raise TemplateError(f"it makes more than {self._characters} characters")
        return "".join(parts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    del environment.globals["lipsum"]
    return environment


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
