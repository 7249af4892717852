"""`kvq chat`: talks to a model on the whole screen, on a pipe, or line by line."""

import logging
import sys
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvq import settings as environment_settings
from kvq.errors import DataError, KvqError, UsageError
from kvq.files import path_of
from kvq_apps.settings import configuration, flags, options
from kvq_apps.terminal import output, text_input
from kvq_models.catalogue import catalogue, installed_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvq_apps.chat.chat_settings import ChatSettings
    from kvq_apps.chat.client import ChatClient
    from kvq_apps.chat.messages import Message


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq chat`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="what to talk to (as -m)")
    # These come first, since -c is one of them in this command.
    flags.add_flags(parser.add_argument_group("chats"), *flags.CHAT_FLAGS)
    flags.add_flags(parser, *flags.ENGINE_FLAGS, "server", "api-key")
    flags.add_flags(
        parser, "ctx-size", "system", "think", "inline", "theme", "meter", "draft", "draft-model"
    )
    flags.add_flags(parser, "predict", predict=PREDICT_HELP)
    flags.add_flags(parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS)
    sampling = parser.add_argument_group("sampling", flags.SAMPLING_NOTE)
    flags.add_flags(sampling, *flags.SAMPLING_FLAGS)


PREDICT_HELP = (
    "new tokens of a reply at most, after which /more goes on with it, -1: to the end of the "
    "context (default: {kvq_apps.chat.chat_settings:REPLY_TOKENS})"
)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if getattr(arguments, "continue") and str(arguments.name).isdigit():
        raise UsageError(f"-c goes on with the last chat; the context is --ctx {arguments.name}")
    settings = chat_settings(arguments)
    if arguments.list or arguments.search is not None:
        return _list(settings, arguments)
    if arguments.export is not None or getattr(arguments, "import") is not None:
        return _exchange(settings, arguments)
    model_name = options.model_name(arguments)
    model = model_name if settings.model_pinned else _saved_model(settings) or model_name
    to_pull = model in catalogue() or (model is None and not installed_names())
    if arguments.server is None and to_pull:
        from kvq_apps.names.model_path import pull_missing

        pull_missing(model)
    client = _client(arguments, model)
    if not sys.stdin.isatty() or arguments.json:
        return _answer_piped(client, settings, arguments)
    if not sys.stdout.isatty() or environment_settings.terminal_is_dumb():
        from kvq_apps.chat.plain import converse

        return converse(client, settings)
    return _on_screen(client, settings, arguments)


def _on_screen(client: "ChatClient", settings: "ChatSettings", arguments: Namespace) -> int:
    from kvq_apps.chat.chat_app import ChatApp, NoteHandler
    from kvq_apps.chat.keys import teach_old_terminals

    if settings.tool_servers and find_spec("mcp") is None:
        raise ModuleNotFoundError("there is no package mcp", name="mcp")
    teach_old_terminals()
    driver = None
    if arguments.inline and find_spec("termios") is None:
        output.print_note("--inline needs a terminal of Linux or macOS; the whole screen is used")
        arguments.inline = False
    if arguments.inline:
        from kvq_apps.chat.inline import InlineDriver

        driver = InlineDriver
    app = ChatApp(
        client,
        settings,
        client_for=lambda name: _client(arguments, name),
        driver_class=driver,
    )
    logging.basicConfig(handlers=[NoteHandler(app)], force=True)
    # Below the command line the mouse stays the terminal's, for its own selecting and scrolling.
    app.run(mouse=not arguments.inline)
    if arguments.inline and app.session_lines:
        output.print_data("\n".join(app.session_lines))
    return app.return_code or 0


def _answer_piped(client: "ChatClient", settings: "ChatSettings", arguments: Namespace) -> int:
    from kvq_apps.chat.plain import answer_once

    text = text_input.read_standard_input()
    if not text.strip():
        raise UsageError("there is no message on standard input; pipe one in: echo Hi | kvq chat")
    return answer_once(client, settings, text, as_json=arguments.json)


def chat_settings(arguments: Namespace) -> "ChatSettings":
    """Returns the settings that the chat starts with."""
    from kvq_apps.chat.chat_settings import REPLY_TOKENS, ChatSettings
    from kvq_apps.chat.tool_servers import read_tool_servers

    tool_servers, server_warnings = read_tool_servers(configuration.user_path())
    system = arguments.system
    file = configuration.load()
    theme = file.values.get("theme")
    overridden = options.on_command_line(arguments, "theme") or environment_settings.environment(
        "theme"
    )
    return ChatSettings(
        sampling_overrides=options.sampling_fields(arguments),
        max_tokens=options.max_tokens(arguments.predict, REPLY_TOKENS),
        seed=arguments.seed,
        system=None if system is None else text_input.check_argument(system),
        history_path=None if arguments.no_log else history_path(),
        snapshots=None if arguments.no_log else environment_settings.cache_folder() / "chats",
        kv_pinned=any(options.on_command_line(arguments, flag) for flag in flags.KV_FLAGS),
        model_pinned=arguments.name is not None
        or any(options.on_command_line(arguments, flag) for flag in ("model", "server")),
        keys_path=configuration.user_path(),
        theme=arguments.theme,
        theme_origin=theme.origin if theme and not overridden else "--theme",
        **options.keywords(arguments, meter="meter", think="think"),
        warnings=(*file.warnings, *server_warnings),
        tool_servers=tool_servers,
        chat_id=arguments.cid,
        latest=getattr(arguments, "continue"),
    )


def history_path() -> Path:
    """Returns the path of the file with all chats."""
    return environment_settings.data_folder() / "chats.sqlite3"


def _client(arguments: Namespace, model: str | None) -> "ChatClient":
    """Returns the client that the flags ask for; it imports nothing heavy before it is opened."""
    if arguments.server is not None:
        from kvq_apps.chat.remote import RemoteClient

        return RemoteClient(arguments.server, model=model, api_key=arguments.api_key)

    from kvq_apps.chat.local import LocalClient

    return LocalClient(
        model,
        engine_options=options.engine_options(arguments),
        session_options=options.session_options(arguments)
        | options.keywords(arguments, seed="seed"),
    )


def _saved_model(settings: "ChatSettings") -> str:
    """Returns the name of the model of the chat that goes on, or an empty text if unknown."""
    from kvq_apps.chat.history import History

    if not (settings.chat_id or settings.latest):
        return ""
    # The chat opens the history again and reports its errors.
    history = History(settings.history_path)
    try:
        chat_id = settings.chat_id or history.latest()
        saved = None if chat_id is None else history.saved_chat(chat_id)
    except KvqError:
        saved = None
    finally:
        history.close()
    return "" if saved is None else saved.model


def _list(settings: "ChatSettings", arguments: Namespace) -> int:
    """Prints all chats, or those that match a search."""
    from kvq_apps.chat.history import History, chat_line

    history = History(settings.history_path, on_trouble=output.print_note)
    try:
        words = arguments.search
        matches = history.chats() if words is None else history.search(words)
    finally:
        history.close()
    chats = {chat.id: chat for chat in reversed(matches)}
    rows = [chats[key] for key in reversed(chats)]
    if arguments.json:
        output.print_json(
            {"chats": [
                {"id": row.id, "title": row.title, "updated": row.updated_s,
                 "messages": row.messages, "model": row.model, "excerpt": row.excerpt}
                for row in rows
            ]}
        )  # fmt: skip
    for row in () if arguments.json else rows:
        output.print_data(f"{row.id}  {chat_line(row)}")
    if not rows:
        output.print_note("no chat is there yet" if words is None else f"no message has {words!r}")
    return 0


def _exchange(settings: "ChatSettings", arguments: Namespace) -> int:
    """Writes a chat to a file, or reads one into the history."""
    from kvq_apps.chat.conversation import ChatConversation
    from kvq_apps.chat.history import History
    from kvq_apps.chat.interchange import import_chat

    history = History(settings.history_path, on_trouble=output.print_note)
    try:
        source = getattr(arguments, "import")
        if source is not None:
            messages = import_chat(path_of(source, DataError))
            conversation = ChatConversation(lambda write: write(history))
            conversation.adopt(messages)
            output.print_data(conversation.id)
        if arguments.export is not None:
            chat_id = arguments.cid or history.latest()
            if chat_id is None or history.saved_chat(chat_id) is None:
                raise UsageError("there is no such chat to export; `kvq chat --list` shows all")
            _write(arguments.export, history.branch(chat_id))
    finally:
        history.close()
    return 0


def _write(path: str, messages: "Sequence[Message]") -> None:
    """Writes a chat to the file at `path`, or as JSON lines to stdout for `-`."""
    from kvq_apps.chat.interchange import as_lines, export_chat

    if path == "-":
        output.print_data(as_lines(messages), end="")
    else:
        export_chat(path_of(path, DataError), messages)
