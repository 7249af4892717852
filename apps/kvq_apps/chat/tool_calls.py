"""Runs the calls of tools in a reply, each after the person agreed, and adds their results."""

import json
from asyncio import CancelledError, wrap_future
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvq_apps.chat.client import Stream
from kvq_apps.chat.messages import NO_RESULT, ToolCall
from kvq_apps.chat.tool_servers import ServerTool

if TYPE_CHECKING:
    from kvq_apps.chat.controller import ChatController

# So many replies in a row may call tools.
MOST_ROUNDS = 8
# A result may have so many characters, and fewer in a small context.
MOST_CHARACTERS, CHARACTERS_PER_TOKEN = 16384, 2
REFUSED = "error: the user refused this call"
# The answer that Enter takes comes first: somebody may be typing when the question appears.
ANSWERS = (
    ("refuse", "No: refuse this call"),
    ("once", "Yes: run it"),
    ("always", "Yes, and run this tool in this chat without asking again"),
)


class ToolCalls:
    """Answers calls in the conversation that `chat` shows."""

    def __init__(self, chat: "ChatController") -> None:
        self._chat = chat
        # Chat, server and tool for which the question is not repeated.
        self._permissions = set[tuple[str, str, str]]()
        self._warned_model = ""

    def offered(self) -> dict[str, ServerTool]:
        """Returns the tools that the model may call; says once that a model calls none."""
        tools, facts = self._chat.tool_servers.offered(), self._chat.engine.facts
        if not tools or facts is None or facts.calls_tools:
            return tools
        if self._warned_model != facts.model:
            self._warned_model = facts.model
            self._chat.view.say(
                f"{facts.model} gets no tools: its chat template has no form of calls that is "
                "known here; /model NAME opens another, such as qwen3"
            )
        return {}

    async def answer(self, calls: Sequence[ToolCall], tools: Mapping[str, ServerTool]) -> bool:
        """Adds a result for each call; returns False if the person stopped that."""
        stopped = False
        for call in calls:
            result = None if stopped else await self._result(call, tools)
            stopped = result is None
            text = NO_RESULT if result is None else self._bounded(result)
            self._chat.view.add(self._chat.conversation.add("tool", text))
        return not stopped

    async def _result(self, call: ToolCall, tools: Mapping[str, ServerTool]) -> str | None:
        """Returns what the model gets for a call; None if the person stopped the reply."""
        tool, values = tools.get(call.name), call.values
        if tool is None:
            return f"error: there is no tool {call.name}; there are: {', '.join(tools) or 'none'}"
        if values is None:
            return "error: the arguments are not a JSON object; call again with one"
        permission = (self._chat.conversation.id, tool.server, tool.name)
        if permission not in self._permissions:
            answer = await self._ask(tool, values)
            if answer is None:
                return None
            if answer == "refuse":
                return REFUSED
            if answer == "always":
                self._permissions.add(permission)
        return await self._run(tool, values)

    async def _ask(self, tool: ServerTool, values: Mapping[str, Any]) -> str | None:
        self._chat.engine.stream = None
        self._chat.engine.set_activity("a tool is called")
        shown = json.dumps(values, indent=2, ensure_ascii=False)
        question = f"The model calls {tool.name} of the server {tool.server}. Run it?\n\n{shown}"
        return await self._chat.view.ask(question, ANSWERS)

    async def _run(self, tool: ServerTool, values: Mapping[str, Any]) -> str | None:
        engine = self._chat.engine
        engine.stream = stream = Stream()
        engine.set_activity(f"running {tool.name}")
        result = self._chat.tool_servers.call(tool, values)
        stream.when_cancelled(result.cancel)
        try:
            return await wrap_future(result)
        except CancelledError:
            if not stream.cancelled():
                raise
            return None

    def _bounded(self, text: str) -> str:
        facts, most = self._chat.engine.facts, MOST_CHARACTERS
        if facts is not None and facts.context_tokens:
            most = min(most, CHARACTERS_PER_TOKEN * facts.context_tokens)
        rest = len(text) - most
        return text if rest <= 0 else f"{text[:most]}\n[cut: {rest} more characters are left out]"
