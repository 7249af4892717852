"""`kvq chat`: talk to a model in the terminal, on a pipe, or line by line."""

import logging
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvq import settings as environment_settings
from kvq.errors import KvqError, UsageError
from kvq_apps import configuration, flags, laboratory, options, output, text_input
from kvq_models.catalogue import catalogue
from kvq_models.embedded import installed_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvq_apps.chat.client import ChatClient
    from kvq_apps.chat.messages import Message
    from kvq_apps.chat.settings import ChatSettings


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq chat`."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="what to talk to (as -m)")
    flags.add_flags(parser, *flags.ENGINE_FLAGS, "server", "api-key")
    flags.add_flags(
        parser, "ctx-size", "system", "think", "inline", "theme", "meter", "draft", "draft-model"
    )
    flags.add_flags(parser, "predict", predict=PREDICT_HELP)
    flags.add_flags(parser.add_argument_group("chats"), *flags.CHAT_FLAGS)
    flags.add_flags(parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS)
    sampling = parser.add_argument_group("sampling", flags.OWN_SAMPLING)
    flags.add_flags(sampling, *flags.SAMPLING_FLAGS)
    # Tests and pictures run the whole app on an engine without a model.
    parser.add_argument("--engine", default="", help=SUPPRESS)


PREDICT_HELP = (
    "new tokens of a reply at most, after which /more goes on with it, -1: to the end of the "
    "context (default: {kvq_apps.chat.settings:REPLY_TOKENS})"
)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    settings = chat_settings(arguments)
    if arguments.list or arguments.search is not None:
        return _list(settings, arguments)
    if arguments.export is not None or getattr(arguments, "import") is not None:
        return _exchange(settings, arguments)
    named = options.model_name(arguments)
    model = named if settings.model_pinned else _written_with(settings) or named
    to_pull = model in catalogue() or (model is None and not installed_names())
    if arguments.server is None and not arguments.engine and to_pull:
        from kvq_apps.model_path import pull_missing

        pull_missing(model)
    client = _client(arguments, model)
    if not sys.stdin.isatty() or arguments.json:
        return _answer_piped(client, settings, arguments)
    if not sys.stdout.isatty() or environment_settings.terminal_is_dumb():
        from kvq_apps.chat.plain import converse

        return converse(client, settings)
    return _on_screen(client, settings, arguments)


def _on_screen(client: "ChatClient", settings: "ChatSettings", arguments: Namespace) -> int:
    from kvq_apps.chat.app import ChatApp, NoteHandler
    from kvq_apps.chat.keys import teach_old_terminals

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
    if arguments.inline and app.said:
        output.print_data("\n".join(app.said))
    return app.return_code or 0


def _answer_piped(client: "ChatClient", settings: "ChatSettings", arguments: Namespace) -> int:
    from kvq_apps.chat.plain import answer_once

    text = text_input.read_standard_input()
    if not text.strip():
        raise UsageError("there is no message on standard input; pipe one in: echo Hi | kvq chat")
    return answer_once(client, settings, text, as_json=arguments.json)


def chat_settings(arguments: Namespace) -> "ChatSettings":
    """What the chat starts with."""
    from kvq_apps.chat.settings import REPLY_TOKENS, ChatSettings

    system = arguments.system
    files = configuration.load()
    themes = [file.values["theme"].origin for file in files if "theme" in file.values]
    elsewhere = options.written(arguments, "theme") or environment_settings.environment("theme")
    return ChatSettings(
        asked=options.sampling_fields(arguments),
        max_tokens=options.max_tokens(arguments.predict, REPLY_TOKENS),
        seed=arguments.seed,
        system=None if system is None else text_input.check_argument(system),
        history_path=None if arguments.no_log else history_path(),
        snapshots=None if arguments.no_log else environment_settings.cache_folder() / "chats",
        kv_pinned=any(options.written(arguments, flag) for flag in flags.KV_FLAGS),
        model_pinned=arguments.name is not None
        or any(options.written(arguments, flag) for flag in ("model", "server")),
        keys_path=configuration.user_path(),
        theme=arguments.theme,
        theme_origin=themes[0] if themes and not elsewhere else "--theme",
        **options.given(arguments, meter="meter", think="think"),
        warnings=[
            *(warning for file in files for warning in file.warnings),
            *filter(None, [arguments.untrusted]),
        ],
        chat_id=arguments.cid,
        latest=getattr(arguments, "continue"),
    )


def history_path() -> Path:
    """Where the chats are kept."""
    return environment_settings.data_folder() / "chats.sqlite3"


def _client(arguments: Namespace, model: str | None) -> "ChatClient":
    """The client the flags ask for; nothing heavy is imported before it is opened."""
    if arguments.engine:
        return laboratory.scripted_chat(arguments.engine)
    if arguments.server is not None:
        from kvq_apps.chat.remote import RemoteClient

        return RemoteClient(arguments.server, model=model, api_key=arguments.api_key)

    from kvq_apps.chat.local import LocalClient

    return LocalClient(
        model,
        engine_options=options.engine_options(arguments),
        session_options=options.session_options(arguments) | options.given(arguments, seed="seed"),
    )


def _written_with(settings: "ChatSettings") -> str:
    """What opens the model of the chat that is gone on with, or nothing where that is not known."""
    from kvq_apps.chat.history import History

    if not (settings.chat_id or settings.latest):
        return ""
    # What is wrong with the history is said by the chat, which opens it again.
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
    """Prints the chats, all or those found."""
    from kvq_apps.chat.chat_list import chat_line
    from kvq_apps.chat.history import History

    history = History(settings.history_path, on_trouble=output.print_note)
    try:
        words = arguments.search
        found = history.chats() if words is None else history.search(words)
    finally:
        history.close()
    chats = {chat.id: chat for chat in reversed(found)}
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
    from kvq_apps.chat.conversation import Conversation
    from kvq_apps.chat.history import History
    from kvq_apps.chat.interchange import import_chat, path_of

    history = History(settings.history_path, on_trouble=output.print_note)
    try:
        source = getattr(arguments, "import")
        if source is not None:
            messages = import_chat(path_of(source))
            conversation = Conversation(lambda write: write(history))
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
    """A chat into the file at `path`, or as JSON lines on stdout for `-`."""
    from kvq_apps.chat.interchange import as_lines, export_chat, path_of

    if path == "-":
        output.print_data(as_lines(messages), end="")
    else:
        export_chat(path_of(path), messages)
