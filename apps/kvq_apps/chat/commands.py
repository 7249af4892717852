"""The table of slash commands and what each does; help, palette and prompt are made from it."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING

from kvq.config import parse_budget, parse_kv
from kvq.errors import DataError, UsageError
from kvq.files import path_of
from kvq_apps.chat import interchange
from kvq_apps.chat.messages import ReplyStats
from kvq_apps.chat.tool_servers import ToolServer
from kvq_apps.settings import configuration
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_apps.chat.chat_app import ChatApp


def _copy(app: "ChatApp", part: str) -> None:
    if part == "code":
        app.action_copy_fence()
    else:
        app.action_copy()


def _rename(app: "ChatApp", title: str) -> None:
    chat_id = app.controller.conversation.id
    if title:
        app.controller.do(partial(app.controller.rename_chat, chat_id, title))
    else:
        app.ask_for_title(chat_id)


def _drafts(app: "ChatApp", words: str) -> None:
    if not words.isdecimal() or not 1 <= int(words) <= 9:
        raise UsageError("/drafts needs a number from 1 to 9")
    app.controller.make_drafts(int(words))


def _system(app: "ChatApp", text: str) -> None:
    conversation = app.controller.conversation
    if not text:
        app.say(f"system: {conversation.system or '(none)'}")
        return
    app.controller.settings.system = text
    if conversation.messages:
        app.say("the system message begins with the next chat: /new")
    else:
        conversation.set_system(text)
        app.say(f"system: {text}")


def _show(app: "ChatApp", _: str) -> None:
    facts, lines = app.controller.engine.facts, ["no model"]
    if facts is not None:
        lines = [f"model {facts.model}, context {facts.context_tokens} tokens"]
        lines += [facts.cache_text] if facts.cache_text else []
    app.say("\n".join([*lines, *app.controller.settings.lines()]))


def _kv(app: "ChatApp", words: str) -> None:
    k_bits = v_bits = budget = None
    for word in words.split():
        if ":" in word or word in ("fp", "2", "4", "8"):
            k_bits, v_bits = parse_kv(word, "/kv ")
        else:
            parse_budget(word)
            budget = word
    if k_bits is None and budget is None:
        raise UsageError("/kv needs K:V widths, a size, or both: /kv 4:2 64MiB")
    app.controller.do(partial(app.controller.change_kv, k_bits, v_bits, budget))


def _model(app: "ChatApp", name: str) -> None:
    client_for = app.controller.client_for
    if not name or client_for is None:
        raise UsageError("/model needs a NAME: a bundle, a checkpoint folder, or a hub id")
    app.controller.do(partial(app.controller.change_model, client_for(name)))


def _load(app: "ChatApp", name: str) -> None:
    if not name:
        raise UsageError("/load needs a FILE: JSON lines, Markdown or ChatGPT's JSON")
    app.controller.do(partial(app.controller.load_file, path_of(name, DataError)))


def _export(app: "ChatApp", name: str) -> None:
    if not name:
        raise UsageError("/export needs a FILE: .md for Markdown, otherwise JSON lines")
    messages = app.controller.conversation.messages
    interchange.export_chat(path_of(name, DataError), messages)
    app.say(f"{len(messages)} messages are written to {name}")


def _tool_servers(app: "ChatApp", _: str) -> None:
    servers = app.controller.tool_servers.servers
    lines = [f"{server.name}: {server.state}{_tool_names(server)}" for server in servers]
    none = f"no server of tools: [mcp.NAME] in {configuration.user_path()} names one"
    app.say("\n".join(lines) or none)


def _tool_names(server: ToolServer) -> str:
    return f", {', '.join(tool.name for tool in server.tools) or 'no tools'}" * (
        server.state == "ready"
    )


def _stats_text(stats: ReplyStats) -> str:
    """Describes in two lines what a reply cost."""
    return (
        f"{stats.prompt_tokens} prompt tokens, {stats.cached_tokens} of them cached, "
        f"{stats.encoded_tokens} encoded, first token after {stats.ttft_ms:.0f} ms\n"
        f"{stats.new_tokens} new tokens at {stats.decode_tok_s:.1f} tok/s, "
        f"KV {output.format_bytes(stats.kv_bytes)}"
    )


@dataclass(frozen=True, slots=True)
class Command:
    """Describes a command: `run` gets the app and what follows the name, perhaps nothing."""

    name: str
    help: str
    run: "Callable[[ChatApp, str], object]"
    argument: str = ""
    synonyms: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """Returns how the command is written: `/kv [K:V] [SIZE]`."""
        return f"/{self.name} {self.argument}".strip()

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.synonyms

    @property
    def needs_argument(self) -> bool:
        """Tells whether the command does nothing without its argument."""
        return bool(self.argument) and not self.argument.startswith("[")


COMMANDS = (
    Command("help", "keys and commands", lambda app, _: app.action_help()),
    Command("new", "begin a new chat", lambda app, _: app.action_new_chat(), synonyms=("clear",)),
    Command("rename", "give this chat another title", _rename, "[TITLE]"),
    Command("delete", "delete this chat for good",
        lambda app, _: app.ask_to_delete(app.controller.conversation.id)),
    Command("retry", "another reply to the last message", lambda app, _: app.action_retry()),
    Command("more", "go on with a reply that was cut or stopped",
        lambda app, _: app.controller.do(app.controller.replies.continue_reply)),
    Command("drafts", "N replies to the last message side by side, to choose one", _drafts, "N"),
    Command("edit", "edit your last message and answer it again",
        lambda app, _: app.action_edit()),
    Command("exact", "compute again what edits left as it was computed before them",
        lambda app, _: app.controller.do(app.controller.reread)),
    Command("copy", "copy the last reply, or its code", _copy, "[code]"),
    Command("system", "set or show the system message", _system, "[TEXT]"),
    Command("set", "temp, top-k, top-p, min-p, seed, predict or think",
        lambda app, words: app.say(app.controller.settings.change(words)), "NAME VALUE"),
    Command("show", "the model and every setting", _show),
    Command("kv", "change the KV bits and budget: /kv 4:2 64MiB", _kv, "[K:V] [SIZE]"),
    Command("stats", "what the last reply cost",
        lambda app, _: app.say(_stats_text(app.controller.engine.stats))),
    Command("mcp", "the servers of tools, and the tools of each", _tool_servers),
    Command("model", "go on with another model", _model, "NAME"),
    Command("save", "save the KV cache of this chat now",
        lambda app, _: app.controller.do(app.controller.kv_files.save_now)),
    Command("load", "read a chat from JSON lines, Markdown or ChatGPT", _load, "FILE"),
    Command("export", "write this chat: .md Markdown, else JSON lines", _export, "FILE"),
    Command("search", "find a message in all chats", lambda app, words: app.pick(words), "TEXT"),
    Command("theme", "change the colours", lambda app, name: app.choose_theme(name), "NAME"),
    Command("quit", "leave", lambda app, _: app.quit(), synonyms=("bye", "exit")),
)  # fmt: skip


def parse_command(line: str) -> tuple[Command, str]:
    """Splits a line: `"/kv 4:2"` -> (the command `kv`, "4:2"). Raises `UsageError`."""
    word, _, rest = line.strip().removeprefix("/").partition(" ")
    by_name = {name: row for row in COMMANDS for name in row.names}
    if word in by_name:
        return by_name[word], rest.strip()
    similar = get_close_matches(word, by_name, n=1)
    hint = f" (did you mean /{similar[0]}?)" if similar else ""
    raise UsageError(f"/{word} is not a command{hint}; /help lists them, // begins a message")


def matching_commands(text: str) -> list[Command]:
    """Returns the commands that begin with `text`; none unless it is the start of a command."""
    word = text.removeprefix("/")
    if word == text or word.startswith("/") or any(part.isspace() for part in word):
        return []
    return [row for row in COMMANDS if any(name.startswith(word) for name in row.names)]


def help_text() -> str:
    """Returns the table as lines of text."""
    width = max(len(row.usage) for row in COMMANDS)
    return "\n".join(f"{row.usage:<{width + 2}}{row.help}" for row in COMMANDS)
