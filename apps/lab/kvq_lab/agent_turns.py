"""Turns of coding agents whose prompts change near the front, in four forms.

Each form does to its prompt what a kind of agent does: a date and a count of tokens in front, a
list of tools that grows, thoughts that are taken out of old turns, old results that are cut. The
results are files of Python's library. Every request follows from a seed.
"""

import inspect
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle, zip_longest
from typing import Any

Message = dict[str, Any]

_MODULES = (
    *("json.decoder", "textwrap", "shlex", "sched", "queue", "bisect", "heapq", "fnmatch"),
    *("string", "glob", "copy", "csv", "gettext", "netrc", "linecache", "quopri"),
)
_TOOLS = ("read_file", "write_file", "run_command", "search", "list_files", "web_fetch")
_RULES = (
    "Read a file before you change it.",
    "Keep a change as small as the task allows, and say in a sentence what it does.",
    "Run the tests after each change, and read what they print to the end.",
    "Never write a secret into a file, a log or a message.",
    "Follow the style that the file around your change has.",
    "Ask where a task can be understood in two ways, and say which two.",
    "Name a file by its path from the root of the project.",
    "When a command fails, read its output before you call it again.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTurn:
    """Holds one request of the conversation `name`, whose form is `form`."""

    name: str
    form: str
    messages: list[Message]
    tools: list[dict[str, Any]]


def agent_turns(turns: int, result_lines: int, seed: int = 0) -> list[AgentTurn]:
    """Returns `turns` turns of the four forms, two conversations of different forms at a time.

    A tool's result has up to `result_lines` lines.
    """
    each = -(-turns // len(_FORMS))
    talks = [
        list(_conversation(form, each, result_lines, random.Random(f"{seed} {form}")))
        for form in _FORMS
    ]
    pairs = [
        zip_longest(first, second) for first, second in zip(talks[::2], talks[1::2], strict=True)
    ]
    return [turn for pair in pairs for both in pair for turn in both if turn is not None][:turns]


def _conversation(
    form: str, turns: int, result_lines: int, chance: random.Random
) -> Iterator[AgentTurn]:
    """Yields the requests of one conversation; each has the messages of all before it."""
    modules = cycle(chance.sample(_MODULES, len(_MODULES)))
    history: list[Message] = []
    for number in range(turns):
        module = next(modules)
        if number % 5 == 0:
            task = f"Task {number // 5 + 1}: look at {module} and say what could fail in it."
            history.append({"role": "user", "content": task})
        messages, num_tools = _FORMS[form](history, number)
        yield AgentTurn(
            name=form,
            form=form,
            messages=messages,
            tools=[_tool(name) for name in _TOOLS[:num_tools]],
        )
        history += _exchange(module, number, result_lines, chance)


def _exchange(module: str, number: int, result_lines: int, chance: random.Random) -> list[Message]:
    """Returns what the assistant said and called, and the tool's result."""
    path = f"lib/{module.replace('.', '/')}.py"
    lines = inspect.getsource(import_module(module)).splitlines()
    start = chance.randrange(max(1, len(lines) - result_lines))
    shown = "\n".join(lines[start : start + chance.randrange(result_lines // 2, result_lines)])
    call = {
        "id": f"call_{number:04}",
        "type": "function",
        "function": {"name": "read_file", "arguments": json.dumps({"path": path, "line": start})},
    }
    thought = f"The task names {path}. I have not seen lines from {start} on yet, so I read them."
    return [
        {"role": "assistant", "content": f"I read {path} from line {start}.",
         "reasoning_content": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": shown},
    ]  # fmt: skip


def _system(*front: str) -> Message:
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(_RULES, 1))
    text = "You are a careful programmer who works in a terminal.\n\n"
    return {"role": "system", "content": text + "\n".join([*front, "", "Rules:", rules])}


def _dated(history: Sequence[Message], number: int) -> tuple[list[Message], int]:
    """Changes the time of day, and the tokens that are left, in front of everything."""
    time = f"Current time: 2026-05-04T{9 + number // 60:02}:{number % 60:02}:17Z"
    left = f"Token budget left: {200_000 - 1_371 * number}"
    return [_system(time, left, "Directory: /home/me/project"), *_without_thoughts(history)], 3


def _tooled(history: Sequence[Message], number: int) -> tuple[list[Message], int]:
    """Learns another tool every six turns, and is told of the state of the repository."""
    state = f"Branch: main, {number % 7} files changed"
    return [_system("Date: 2026-05-04", state), *_without_thoughts(history)], 2 + number // 6 % 4


def _thinking(history: Sequence[Message], number: int) -> tuple[list[Message], int]:
    """Sends the thoughts of the newest task alone; those of earlier tasks are gone."""
    last = max(place for place, row in enumerate(history) if row["role"] == "user")
    return [_system("Date: 2026-05-04"), *_without_thoughts(history[:last]), *history[last:]], 3


def _cutting(history: Sequence[Message], number: int) -> tuple[list[Message], int]:
    """Cuts the results of all but the newest six calls, and drops the oldest of three tasks."""
    users = [place for place, row in enumerate(history) if row["role"] == "user"]
    kept = history[users[-3] if len(users) > 3 else 0 :]
    results = [place for place, row in enumerate(kept) if row["role"] == "tool"]
    cut = {*results[:-6]}
    rows = [
        row | {"content": "[the result was removed to save room]"} if place in cut else row
        for place, row in enumerate(kept)
    ]
    return [_system("Date: 2026-05-04"), *_without_thoughts(rows)], 3


_FORMS = {"dated": _dated, "tooled": _tooled, "thinking": _thinking, "cutting": _cutting}


def _without_thoughts(rows: Sequence[Message]) -> list[Message]:
    return [{name: value for name, value in row.items() if name != "reasoning_content"}
            for row in rows]  # fmt: skip


def _tool(name: str) -> dict[str, Any]:
    path = {"type": "string", "description": "path from the root of the project"}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does what its name says: {name.replace('_', ' ')}.",
            "parameters": {
                "type": "object",
                "properties": {"path": path, "line": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
