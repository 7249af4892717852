"""Connects the chat with servers of tools that speak the Model Context Protocol (MCP).

A server may hang, die or send anything, so all of them live in an event loop on a thread of its
own. Only the user's settings file names servers, since that starts programs. The package `mcp` is
imported on that thread, and only if there is a server.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from os import SEEK_END
from os.path import expanduser
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

from kvq.json_values import is_array, is_object
from kvq_apps.settings import configuration
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal.output import storable

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

# A first start may have to fetch the server's package.
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 300.0
MOST_TOOLS = 64
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_KEYS = ("command", "env", "url")
_REASON_CHARACTERS = 300
_DESCRIPTION_CHARACTERS = 2000
_NAME_CHARACTERS = 64
_SCHEMA_CHARACTERS = 16384
_LOG_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolServerSettings:
    """Describes a server: a program with its further environment, or the address of one."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    url: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTool:
    """Describes a tool: its `server`, its `name` there, and the `function` that models see."""

    server: str
    name: str
    function: Mapping[str, Any]


def read_tool_servers(path: Path) -> tuple[list[ToolServerSettings], list[str]]:
    """Reads `[mcp.NAME]` of the user's file; returns servers and a warning for each bad one.

    Errors of the file as a whole are reported by the configuration.
    """
    file = configuration.read(path)
    section = file.values.get(configuration.TOOL_SERVERS)
    servers: list[ToolServerSettings] = []
    warnings: list[str] = []
    for name, values in section.items() if is_object(section) else ():
        trouble = _trouble(name, values)
        if trouble:
            where = file.where(f"{configuration.TOOL_SERVERS}.{name}")
            warnings.append(f"{where}: {trouble}; this server is not used")
            continue
        first, *words = values.get("command") or ("",)
        if Path(first).name != first:
            # Beside this file, and never in the folder where the chat was started.
            first = str(path.parent / expanduser(first))
        command = (first, *words) if first else ()
        env, url = values.get("env", {}), values.get("url", "")
        servers.append(ToolServerSettings(name=name, command=command, env=env, url=url))
    return servers, warnings


def _trouble(name: str, values: Any) -> str:
    """Says what is wrong with the settings of a server, or nothing."""
    if not is_object(values):
        return f'a server of tools is a section; write [mcp.{name}] and command = ["PROGRAM"]'
    command, env, url = (values.get(key) for key in _KEYS)
    is_address = isinstance(url, str) and url.startswith(("http://", "https://"))
    faults = (
        (not _NAME.fullmatch(name), f"{name!r} is no name; take letters, digits, - and _"),
        ({*values} - {*_KEYS}, f"[mcp.{name}] takes the keys {', '.join(_KEYS)}"),
        ((command is None) == (url is None), f"[mcp.{name}] needs either a command or a url"),
        (
            command is not None
            and not (is_array(command) and _all_texts(command) and any(command[:1])),
            'command is a list of texts, such as ["npx", "-y", "PACKAGE"]',
        ),
        (
            env is not None and not (is_object(env) and _all_texts(env.values())),
            'env is a table of texts, such as {TOKEN = "..."}',
        ),
        (url is not None and not is_address, "url begins with http:// or https://"),
    )
    return next((text for wrong, text in faults if wrong), "")


def _all_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


class ToolServer:
    """Keeps the connection with one server; `state` says in words how it is."""

    def __init__(self, settings: ToolServerSettings) -> None:
        self.name = settings.name
        self.state = "starting"
        self.tools: list[Tool] = []
        self._settings = settings
        self._client: Client | None = None
        self._lost = asyncio.Event()

    async def keep(self, say: Callable[[str, bool], None]) -> None:
        """Connects, and stays connected. Says when the tools are there, and what went wrong."""
        with TemporaryFile() as log:
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(START_TIMEOUT_S):
                        client = await stack.enter_async_context(self._connection(log))
                        tools = await _all_tools(client)
                    self._client, self.state = client, "ready"
                    self.tools = [*filter(_is_short, tools)][:MOST_TOOLS]
                    left_out = f" of {len(tools)}" * (len(self.tools) < len(tools))
                    counted = f"{len(self.tools)}{left_out}"
                    say(f"tools of the server {self.name}: {counted}; /mcp lists them", False)
                    await self._lost.wait()
            except Exception as error:  # noqa: BLE001 - what a server does never ends the chat
                self.state = f"failed: {_reason(error, log)}"
            if self.state != "ready":
                self._client, self.tools = None, []
                say(f"the server of tools {self.name} {self.state}", True)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the text of a tool's result, or one that says what failed."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if self._client is None:
            return f"error: the server {self.name} {self.state}"
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                result = await self._client.call_tool(name, {**arguments})
        except TimeoutError:
            return f"error: {self.name} gave no result within {CALL_TIMEOUT_S:.0f} s"
        except Exception as error:  # noqa: BLE001 - the model is told, and the chat goes on
            if isinstance(error, MCPError) and error.error.code == CONNECTION_CLOSED:
                self.state = "failed: the server ended"
                self._lost.set()
            return f"error: {_reason(error)}"
        return _result_text(result)

    def _connection(self, log: Any) -> "Client":
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        # Its lines about what a server writes would fill the screen.
        logging.getLogger("mcp").setLevel(logging.CRITICAL)
        settings = self._settings
        if settings.url:
            return Client(settings.url)
        command, *words = settings.command
        # A project's files, such as node_modules, must not change which program is started.
        parameters = StdioServerParameters(
            command=command, args=words, env={**settings.env}, cwd=Path.home()
        )
        return Client(stdio_client(parameters, errlog=log))


class ToolServers:
    """Runs the user's servers; `say`, called on their thread, shows a note, or an error if True."""

    def __init__(
        self, settings: Sequence[ToolServerSettings], say: Callable[[str, bool], None]
    ) -> None:
        self.servers = [ToolServer(row) for row in settings]
        self._say = say
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._thread = Thread(target=self._run, name="kvq-tools", daemon=True)

    def start(self) -> None:
        """Begins to connect, if there are servers."""
        if self.servers:
            self._loop = asyncio.new_event_loop()
            self._thread.start()

    def offered(self) -> dict[str, ServerTool]:
        """Returns the tools that can be called now; a name met twice begins with its server's."""
        tools: dict[str, ServerTool] = {}
        for server in self.servers:
            for tool in server.tools:
                plain = _model_name(tool.name)
                name = plain if plain not in tools else _model_name(f"{server.name}_{plain}")
                if name not in tools:
                    function = {
                        "name": name,
                        "description": (tool.description or "")[:_DESCRIPTION_CHARACTERS],
                        "parameters": tool.input_schema,
                    }
                    tools[name] = ServerTool(server=server.name, name=tool.name, function=function)
        return tools

    def call(self, tool: ServerTool, arguments: Mapping[str, Any]) -> "Future[str]":
        """Calls a tool that was offered; a cancel of the future reaches the server."""
        assert self._loop is not None
        server = next(row for row in self.servers if row.name == tool.server)
        return asyncio.run_coroutine_threadsafe(server.call(tool.name, arguments), self._loop)

    def end(self) -> None:
        """Ends all servers, without waiting."""
        self._closed = True
        if self._loop is not None and self._main is not None:
            # The loop may have ended by itself.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._main.cancel)

    def join(self, wait_s: float) -> None:
        """Waits until all servers have ended, at most `wait_s`."""
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._keep_all())

    async def _keep_all(self) -> None:
        self._main = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            for server in () if self._closed else self.servers:
                tasks.create_task(server.keep(self._note))
            # Calls of a server that is lost are still answered.
            await asyncio.Event().wait()

    def _note(self, text: str, error: bool) -> None:
        if not self._closed:
            self._say(text, error)


async def _all_tools(client: "Client") -> "list[Tool]":
    tools: list[Tool] = []
    cursor: str | None = None
    while len(tools) <= MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _is_short(tool: "Tool") -> bool:
    """Says whether a tool's name and parameters leave room for a conversation."""
    schema = json.dumps(tool.input_schema)
    return len(tool.name) <= _NAME_CHARACTERS and len(schema) <= _SCHEMA_CHARACTERS


def _model_name(name: str) -> str:
    """Returns a name that every notation of calls can write."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)[:_NAME_CHARACTERS]


def _reason(error: Exception, log: Any = None) -> str:
    """Says in a line why a server failed: its last words where it wrote any."""
    if isinstance(error, ExceptionGroup):
        return _reason(cast("ExceptionGroup[Exception]", error).exceptions[0], log)
    words = ""
    if log is not None:
        log.seek(max(0, log.seek(0, SEEK_END) - _LOG_BYTES))
        words = log.read().decode(errors="replace").rstrip().rpartition("\n")[2].strip()
    is_late = isinstance(error, TimeoutError)
    text = f"no answer within {START_TIMEOUT_S:g} s" if is_late else format_error(error)
    return " ".join(": ".join(filter(None, (text, words))).split())[:_REASON_CHARACTERS]


def _result_text(result: "CallToolResult") -> str:
    """Returns the texts of a result; other parts are named, since the model reads text only."""
    texts: list[str] = []
    for part in result.content:
        resource = getattr(part, "resource", None)
        text = getattr(part if resource is None else resource, "text", None)
        texts.append(
            f"[{part.type} left out: this model reads text only]" if text is None else text
        )
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return storable("error: " * bool(result.is_error) + "\n".join(texts))
