"""What helps to find one's way: earlier chats, the first screen, menus, long pastes."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from textual.events import Paste
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from chat_pilot import help_of_app, meter, on_screen, run, say, send, sent_messages, shown, until
from fake_chat import FakeClient, FakeOptions
from kvq_apps import cli
from kvq_apps.chat import controller, keys
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.chat_settings import REPLY_TOKENS, ChatSettings
from kvq_apps.chat.commands import COMMANDS
from kvq_apps.chat.history import History
from kvq_apps.chat.kv_files import forget_oldest
from kvq_apps.chat.prompt import MenuView
from kvq_apps.chat.screens import ChatPicker, EntryScreen, QuestionScreen
from kvq_apps.commands import chat as chat_command
from kvq_runtime.config import Sampling

# Resuming


def test_a_chat_is_resumed_with_its_kv(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await say(app, pilot, "two")

    run(first, folder=tmp_path)

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert "KV cache restored:" in shown(app)
        assert "You asked: two" in shown(app)
        await say(app, pilot, "three")
        assert app.controller.engine.stats.cached_tokens >= 0.9 * (
            app.controller.engine.stats.prompt_tokens - 4
        )

    run(second, folder=tmp_path, latest=True)

    async def other_plan(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert "KV cache restored at 4:2" in shown(app)
        await say(app, pilot, "four")
        assert app.controller.engine.stats.cached_tokens > 0

    client = FakeClient()
    client.facts = dataclasses.replace(client.facts, k_bits=8)
    run(other_plan, client, folder=tmp_path, latest=True)


def kept_in(app: ChatApp) -> tuple[str, int]:
    """Widths and budget of the engine."""
    facts = app.controller.engine.facts
    assert facts is not None
    return f"{facts.k_bits}:{facts.v_bits}", facts.kv_budget


def test_each_chat_goes_on_at_its_own_widths_and_budget(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "narrow")
        await say(app, pilot, "/new")
        await say(app, pilot, "wide")
        await say(app, pilot, "/kv 8:4 32MiB")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert kept_in(app) == ("8:4", 32 << 20)
        assert "KV cache restored at 8:4 in 32.0 MiB: " in shown(app)
        await say(app, pilot, "wide again")
        assert app.controller.engine.stats.cached_tokens > 0
        narrow = (await app.controller.history.read(lambda history: history.search("narrow")))[0]
        app.controller.do(lambda: app.controller.resume_chat(narrow.id))
        await until(pilot, lambda: app.controller.idle)
        assert kept_in(app) == ("4:2", 64 << 20)
        await say(app, pilot, "narrow again")
        assert app.controller.engine.stats.cached_tokens > 0

    run(first, folder=tmp_path)
    run(second, folder=tmp_path, latest=True)


def test_widths_of_the_command_line_hold_and_the_chat_says_so(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await say(app, pilot, "/kv 8:4 32MiB")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert kept_in(app) == ("4:2", 64 << 20)
        texts = [message.text for message in app.transcript.messages if not message.id]
        assert texts == [
            "the KV cache is not restored (it was kept at 8:4 in 32.0 MiB, and you asked for 4:2 "
            "in 64.0 MiB): the next reply encodes the chat again"
        ]

    run(first, folder=tmp_path)
    run(second, folder=tmp_path, latest=True, kv_pinned=True)


def test_a_cache_of_another_model_is_one_sentence(tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        assert [message.text for message in app.transcript.messages if not message.id] == [
            "the KV cache is not restored (it was kept for another model): the next reply encodes "
            "the chat again"
        ]

    other = FakeClient()
    other.facts = dataclasses.replace(other.facts, fingerprint="other")
    run(first, folder=tmp_path)
    run(second, other, folder=tmp_path, latest=True)


def test_the_kv_is_saved_when_nothing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "SAVE_AFTER_S", 0.02)

    def saved_tokens() -> list[int]:
        return [len(json.loads(path.read_text())["tokens"]) for path in tmp_path.glob("kv/*.kv")]

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "one")
        await until(pilot, lambda: saved_tokens() == [app.controller.engine.stats.context_tokens])
        before = saved_tokens()
        await say(app, pilot, "two")
        await until(pilot, lambda: saved_tokens() == [app.controller.engine.stats.context_tokens])
        assert saved_tokens() > before
        await until(pilot, lambda: app.controller.idle)
        # Nothing is new, so nothing is written.
        (path,) = (tmp_path / "kv").glob("*.kv")
        path.unlink()
        await pilot.pause(0.1)
        assert saved_tokens() == []

    run(script, folder=tmp_path)


def test_what_a_killed_process_had_begun_to_write_goes(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.kv-00", tmp_path / ".b.kv-00"
    for path in (old, new, tmp_path / "c.kv"):
        path.write_bytes(b"x" * 10)
    os.utime(old, (0, 0))
    os.utime(tmp_path / "c.kv", (0, 0))
    forget_oldest(tmp_path, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.kv-00", "c.kv"]
    # The newest is kept, even where it is larger than all may be.
    (tmp_path / "d.kv").write_bytes(b"x" * 10)
    forget_oldest(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.kv-00", "d.kv"]


def test_the_list_of_chats_searches_and_opens(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "about foxes")
        await say(app, pilot, "/new")
        await say(app, pilot, "about hens")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, ChatPicker))
        await pilot.press(*"foxes")
        await pilot.pause()
        options = app.screen.query_one("OptionList")
        await until(pilot, lambda: options.option_count == 1)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(
            pilot,
            lambda: app.controller.idle and app.controller.conversation.title == "about foxes",
        )
        assert "You asked: about foxes" in shown(app)
        assert "KV cache restored" in shown(app)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, ChatPicker))
        await pilot.press("escape")
        assert app.controller.conversation.title == "about foxes"

    run(script, folder=tmp_path)


async def sidebar_titles(app: ChatApp, pilot: Pilot[Any], *titles: str) -> None:
    """Waits until the sidebar lists these."""
    options = app.sidebar.query_one(OptionList)

    def listed() -> list[str]:
        return [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]

    await until(pilot, lambda: listed() == list(titles))


def test_the_sidebar_lists_finds_and_opens_chats(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert not app.sidebar.display
        await say(app, pilot, "about foxes")
        await pilot.press("ctrl+b")
        await sidebar_titles(app, pilot, "about foxes")
        assert app.sidebar.has_focus_within
        await pilot.press("escape")
        await say(app, pilot, "/new")
        await say(app, pilot, "about hens")
        await sidebar_titles(app, pilot, "about hens", "about foxes")
        # Where there is no room for it, it is away, and comes back.
        await pilot.resize_terminal(60, 24)
        await until(pilot, lambda: not app.sidebar.display)
        await pilot.resize_terminal(100, 24)
        await until(pilot, lambda: app.sidebar.display)
        app.sidebar.search()
        await pilot.press(*"foxes")
        await until(pilot, lambda: app.sidebar.query_one(OptionList).option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.conversation.title == "about foxes")
        await until(pilot, lambda: app.controller.idle)
        assert app.prompt.has_focus
        await pilot.press("ctrl+b")
        await until(pilot, lambda: not app.sidebar.display)
        await pilot.press("ctrl+b")
        await pilot.pause()

    async def again(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.sidebar.display)
        assert app.prompt.has_focus

    run(script, folder=tmp_path, size=(100, 24))
    run(again, folder=tmp_path, size=(100, 24))


def test_chats_are_renamed_and_deleted(tmp_path: Path) -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "/rename Farm")
        await say(app, pilot, "about hens")
        await say(app, pilot, "/new")
        await say(app, pilot, "about foxes")
        await pilot.press("ctrl+b")
        await sidebar_titles(app, pilot, "about foxes", "Farm")
        # In the list F2 renames the one marked.
        await pilot.press("down", "down", "f2")
        await until(pilot, lambda: isinstance(app.screen, EntryScreen))
        assert app.screen.query_one(Input).value == "Farm"
        await pilot.press("end", "2", "enter")
        await sidebar_titles(app, pilot, "about foxes", "Farm2")
        # Deleting asks first.
        for answer in (["enter"], ["down", "enter"]):
            await until(pilot, lambda: not isinstance(app.screen, EntryScreen | QuestionScreen))
            await pilot.press("delete")
            await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
            await pilot.press(*answer)
        await sidebar_titles(app, pilot, "about foxes")
        await pilot.press("escape")
        await say(app, pilot, "/save")
        kept = [path.stem for path in (tmp_path / "kv").glob("*.kv")]
        assert kept == [app.controller.conversation.id]
        await say(app, pilot, "/delete")
        await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
        await pilot.press("down", "enter")
        await sidebar_titles(app, pilot)
        await until(pilot, lambda: app.controller.idle)
        assert app.controller.conversation.messages == []

    run(script, folder=tmp_path, size=(100, 24))
    history = History(tmp_path / "chats.sqlite3")
    assert history.chats() == history.search("hens") == history.search("foxes") == []
    assert b"hens" not in b"".join(row[0].encode() for row in history._db.execute(
        "SELECT text FROM chunk UNION ALL SELECT text FROM message_text"
    ))  # fmt: skip
    history.close()
    assert list((tmp_path / "kv").iterdir()) == []


def test_an_unknown_chat_is_said() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert "there is no chat nowhere" in shown(app)

    run(script, chat_id="nowhere")


# The first screen, the menu of commands, long pastes


def test_the_first_screen_says_the_model_what_to_try_and_where_help_is() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "ready" in meter(app))
        screen = on_screen(app)
        assert "kvq chat with fake" in screen
        for words in (
            "What is a KV cache?",
            "/drafts 3",
            "/system Be brief.",
            "F1 shows every key",
        ):
            assert words in screen
        assert meter(app) == "ready  KV 0 bytes/64.0 MiB K4V2  context 0/4096 0%  fake"
        await say(app, pilot, "hi")
        assert "Three things to try" not in on_screen(app)
        await say(app, pilot, "/new")
        await until(pilot, lambda: "Three things to try" in on_screen(app))
        await pilot.resize_terminal(60, 12)
        await until(pilot, lambda: "Three things to try" not in on_screen(app))

    run(script, size=(110, 24))


def offered(app: ChatApp) -> list[str]:
    return [row.name for row in app.prompt.offered()[0]]


def test_a_slash_lists_the_commands_and_they_are_completed() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert not app.query_one(MenuView).display
        await pilot.press("/")
        await until(pilot, lambda: app.query_one(MenuView).display)
        assert offered(app) == [command.name for command in COMMANDS]
        assert "/help" in on_screen(app)
        await pilot.press("s")
        assert offered(app) == ["system", "set", "show", "stats", "save", "search"]
        await pilot.press("up", "tab")
        assert app.prompt.text == "/search "
        assert offered(app) == []
        app.prompt.fill("/s")
        await pilot.press("down", "tab")
        assert app.prompt.text == "/set "
        # Enter completes what needs words, and does what needs none.
        await send(app, pilot, "/the")
        assert app.prompt.text == "/theme "
        await send(app, pilot, "/sh")
        await until(pilot, lambda: "model fake, context 4096 tokens" in shown(app))
        # By a synonym, too; what is typed whole is taken as it is.
        app.prompt.fill("/by")
        assert offered(app) == ["quit"]
        await send(app, pilot, "/new")
        assert app.prompt.text == ""
        # Escape closes the list until the text is another; // begins a message.
        app.prompt.fill("/s")
        await pilot.press("escape")
        assert (app.prompt.text, offered(app)) == ("/s", [])
        await pilot.press("t")
        assert offered(app) == ["stats"]
        app.prompt.fill("//s")
        assert offered(app) == []

    run(script)


def test_a_long_paste_is_one_word_until_it_is_sent() -> None:
    client = FakeClient()
    long = "\n".join(f"line {number}" for number in range(200))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await pilot.press(*"see ")
        app.prompt.post_message(Paste(long))
        word = f"[paste 1: 200 lines, {len(long)} characters]"
        await until(pilot, lambda: app.prompt.text == f"see {word}")
        app.prompt.post_message(Paste("short\none"))
        await until(pilot, lambda: app.prompt.text.endswith("short\none"))
        app.prompt.post_message(Paste("x" * 5000))
        await until(pilot, lambda: "[paste 2: 1 lines, 5000 characters]" in app.prompt.text)
        # Backspace takes one away whole.
        await pilot.press("backspace")
        await until(pilot, lambda: app.prompt.text == f"see {word}short\none")
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.idle and client.turns)
        # A word that nothing was pasted for is text.
        await say(app, pilot, word)

    run(script, client)
    assert sent_messages(client, 0) == [("user", f"see {long}short\none")]
    assert sent_messages(client)[-1] == ("user", f"[paste 1: 200 lines, {len(long)} characters]")


def test_the_focus_is_seen() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        writing = app.prompt.styles.border_top[1]
        await pilot.press("alt+up")
        await until(pilot, lambda: app.transcript.has_focus)
        assert app.transcript.styles.outline_left[0] == "thick"
        assert app.prompt.styles.border_top[1] != writing
        await pilot.press("escape")
        await until(pilot, lambda: app.prompt.styles.border_top[1] == writing)
        assert app.transcript.styles.outline_left[0] == ""

    run(script)


@pytest.mark.parametrize(
    ("keys_of", "name"),
    [
        ("ctrl+j,shift+enter,alt+enter", "Ctrl+J, Shift+Enter, Alt+Enter"),
        ("alt+right_square_bracket,alt+n", "Alt+], Alt+N"),
        ("pageup", "PgUp"),
        ("escape", "Esc"),
        ("f1", "F1"),
        ("y", "Y"),
        ("Y", "Shift+Y"),
    ],
)
def test_keys_are_named_as_keyboards_name_them(keys_of: str, name: str) -> None:
    assert keys.key_name(keys_of) == name


def test_keys_of_help_palette_and_bindings_come_from_one_table() -> None:
    text = help_of_app()
    app = ChatApp(FakeClient(), ChatSettings())
    bound = {binding.id for rows in app._bindings.key_to_bindings.values() for binding in rows}
    for row in keys.KEYS:
        assert row.help in text
        assert not row.app or row.name in bound


def test_the_users_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        '[keys]\nnew = "ctrl+t"\nnosuch = "x"\nquit = "ctrl+r"\nsend = "f2"\nhelp = 3\n'
    )

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        text = "".join(shown(app).split())
        assert f"{path}:3:thereisnokeyactionnosuch" in text
        assert f"{path}:4:ctrl+risthekeyofresumealready" in text
        assert f"{path}:6:helpneedskeysinquotes" in text
        await send(app, pilot, "one")
        assert app.prompt.text == "one\n"
        await pilot.press("f2")
        await until(pilot, lambda: app.controller.idle and app.controller.conversation.messages)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: not app.controller.conversation.messages)

    run(script, keys_path=path)


def test_a_broken_settings_file_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    for number, content in enumerate(("[keys", "keys = 1", "\xff")):
        path = settings_file(tmp_path / str(number), monkeypatch, content)
        settings = settings_of()
        assert (settings.theme, settings.meter, settings.sampling) == (None, "full", Sampling())
        assert keys.read_keys(path) == ({}, [])
        assert any(str(path) in warning for warning in settings.warnings)
        warnings += settings.warnings

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        text = "".join(shown(app).split())
        assert all("".join(warning.split()) in text for warning in warnings)

    run(script, warnings=warnings)


def settings_file(folder: Path, patch: pytest.MonkeyPatch, content: str) -> Path:
    """The user's settings, and a project's folder to be in."""
    for name in ("KVQ_SYSTEM", "KVQ_THEME", "KVQ_TEMP", "KVQ_METER"):
        patch.delenv(name, raising=False)
    patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    path = folder / "config" / "kvq" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    project = folder / "project"
    project.mkdir(parents=True)
    patch.chdir(project)
    return path


def settings_of(*words: str) -> ChatSettings:
    """What `kvq chat WORDS` starts the chat with."""
    return chat_command.chat_settings(cli.parse(["chat", *words]))


def test_settings_come_from_flag_environment_user_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_state: None
) -> None:
    user = '[chat]\nsystem = "user"\ntheme = "nord"\nmeter = "short"\n[model]\ntemp = 0.5\n'
    path = settings_file(tmp_path, monkeypatch, user)
    settings = settings_of()
    assert (settings.system, settings.theme, settings.meter) == ("user", "nord", "short")
    assert settings.theme_origin == f"{path}:3"
    assert (settings.sampling.temperature, settings.max_tokens) == (0.5, REPLY_TOKENS)
    # A bad value and an unknown key change nothing, and say where they stand.
    path.write_text('[chat]\nsystem = "user"\nmeter = "loud"\ncolour = "red"\n')
    settings = settings_of()
    assert (settings.system, settings.meter) == ("user", "full")
    (bad, unknown) = settings.warnings
    assert bad.startswith(f"{path}:3: ")
    assert "choose full, short, off" in bad
    assert unknown.startswith(f"{path}:4: [chat] has no key colour")
    monkeypatch.setenv("KVQ_SYSTEM", "environment")
    monkeypatch.setenv("KVQ_THEME", "gruvbox")
    settings = settings_of()
    assert (settings.system, settings.theme) == ("environment", "gruvbox")
    assert settings.theme_origin == "--theme"
    settings = settings_of("--system", "flag", "--theme", "dracula", "--temp", "0")
    assert (settings.system, settings.theme) == ("flag", "dracula")
    assert settings.sampling.temperature == 0


def test_the_users_theme_wins_over_the_one_used_last(tmp_path: Path) -> None:
    warning = "config.toml:3: there is no theme 'nosuch'; Ctrl+P, then Theme, lists them"

    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "/theme nord")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert app.theme == "gruvbox"

    async def third(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert app.theme == "nord"

    async def fourth(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert app.theme == "textual-dark"
        assert warning in " ".join(shown(app).split())

    run(first, folder=tmp_path)
    run(second, folder=tmp_path, theme="gruvbox")
    run(third, folder=tmp_path)
    run(fourth, folder=tmp_path, theme="nosuch", theme_origin="config.toml:3")


def test_the_meter_is_as_long_as_the_user_wants() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        for detail, has, has_not in (
            ("full", "tok/s", "none"), ("short", "context", "tok/s"), ("off", "ready", "KV")
        ):  # fmt: skip
            app.controller.settings.meter = detail
            assert has in meter(app)
            assert has_not not in meter(app)

    run(script, FakeClient(FakeOptions(tok_ms=1)), size=(140, 24))
