"""The transcript on screen: following, scrolling, resizing, copying, and how little it draws."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from chat_pilot import gated, meter, run, say, send, shown, telling, until
from fake_chat import FakeClient, FakeOptions
from kvq_apps.chat import streamed_markdown as document_module
from kvq_apps.chat import transcript as transcript_module
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.client import Facts
from kvq_apps.chat.markdown import draw
from kvq_apps.chat.messages import Message, ReplyStats
from kvq_apps.chat.meter import kv_part, meter_line

LONG = "\n\n".join(f"paragraph number {number}" for number in range(60))


def screen_lines(app: ChatApp) -> list[str]:
    view = app.transcript
    return [view.render_line(y).text.rstrip() for y in range(view.size.height)]


def test_the_screen_shows_what_was_streamed() -> None:
    text = "# Title\n\n- one\n- two\n\n```python\nx = 1\n```\n\n| a |\n|---|\n| b |\n\nend **bold**"

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        streamed = shown(app)
        messages = list(app.controller.conversation.messages)
        app.transcript.show(messages)
        assert shown(app) == streamed
        assert "# Title\n\n• one\n• two\n\n python\n x = 1\n\na\n─\nb\n\nend bold" in streamed
        assert "▌ hi" in screen_lines(app)

    run(script, telling(text))


def test_the_name_over_a_reply_stays_when_it_is_whole() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        assert screen_lines(app)[:5] == ["▌ you", "▌ hi", "", "  kvq", "  short"]

    run(script, telling("short"))


def test_hundred_thousand_tokens_open_without_drawing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(
        transcript_module,
        "draw",
        lambda block, *a, **k: drawn.append(block) or draw(block, *a, **k),
    )
    messages = []
    for number in range(100):
        messages.append(Message(id=f"u{number}", role="user", text=f"question {number}"))
        body = "\n\n".join(f"paragraph {part} " + "words of it " * 30 for part in range(11))
        messages.append(Message(id=f"a{number}", role="assistant", text=body))
    assert sum(len(message.text.split()) for message in messages) > 100_000

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.transcript.show(messages)
        await pilot.pause()
        assert len(drawn) < 24
        assert "words of it" in screen_lines(app)[-1]
        app.transcript.focus()
        await pilot.press("home")
        await pilot.pause()
        assert len(drawn) < 48
        assert screen_lines(app)[:2] == ["▌ you", "▌ question 0"]
        # Walking up into rows never drawn shows their last lines first, without jumps.
        await pilot.press("end")
        before = screen_lines(app)
        for _ in range(10):
            app.transcript.scroll_up(animate=False)
            await pilot.pause()
            after = screen_lines(app)
            assert after[1:] == before[:-1]
            before = after

    run(script)


def test_scrolled_up_the_view_stays_and_end_follows_again() -> None:
    client, gate = gated(LONG, f"\n\n{LONG}\n\nlast")

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: "paragraph number 59" in shown(app))
        await pilot.press("pageup", "pageup")
        await pilot.pause()
        before = screen_lines(app)
        assert not app.transcript.follow
        gate.set()
        await until(pilot, lambda: app.controller.idle)
        assert screen_lines(app) == before
        assert "new below: End" in meter(app)
        app.transcript.focus()
        await pilot.press("end")
        await pilot.pause()
        assert screen_lines(app)[-1] == "  last"
        await until(pilot, lambda: "new below" not in meter(app))

    run(script, client)


def test_resizing_while_streaming_keeps_place_and_following() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        for size in ((20, 5), (200, 60), (1, 1), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
        await until(pilot, lambda: app.controller.idle)
        assert app.transcript.follow
        assert screen_lines(app)[-1].endswith("paragraph number 59")
        await pilot.press("pageup", "pageup")
        top = next(line for line in screen_lines(app) if "paragraph" in line)
        await pilot.resize_terminal(60, 24)
        await pilot.pause()
        assert top in screen_lines(app)
        assert not app.transcript.follow

    run(script, telling(LONG, tok_ms=1))


def test_copying_a_message_and_its_code() -> None:
    text = "Here:\n\n```python\nx = '**not bold**'\n```\nand **done**"

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        await pilot.press("alt+up")
        assert app.transcript.has_focus
        await pilot.press("y")
        assert app.clipboard == text
        await pilot.press("Y")
        assert app.clipboard == "x = '**not bold**'"
        await pilot.press("alt+up", "y")
        assert app.clipboard == "hi"
        await pilot.press("escape")
        assert app.prompt.has_focus
        await say(app, pilot, "/copy")
        assert app.clipboard == text

    run(script, telling(text))


def test_a_mouse_selection_crosses_blocks() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        lines = screen_lines(app)
        first = next(y for y, line in enumerate(lines) if "alpha" in line)
        last = next(y for y, line in enumerate(lines) if "omega" in line)
        column = 1 + lines[first].index("beta")
        await pilot.mouse_down("#transcript", offset=(column, first))
        await pilot.hover("#transcript", offset=(1 + lines[last].index("omega") + 4, last))
        await pilot.mouse_up("#transcript", offset=(1 + lines[last].index("omega") + 4, last))
        await pilot.pause()
        await pilot.press("ctrl+c")
        assert app.clipboard.startswith("beta\n\n• item\n\nomeg")

    run(script, telling("alpha beta\n\n- item\n\nomega"))


def test_long_streams_draw_each_frozen_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    tails = []
    monkeypatch.setattr(
        transcript_module,
        "draw",
        lambda block, *a, **k: drawn.append(block.source) or draw(block, *a, **k),
    )
    monkeypatch.setattr(
        document_module, "draw", lambda block, *a, **k: tails.append(block) or draw(block, *a, **k)
    )
    items = "\n".join(f"- item {number}" for number in range(200))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        items = [source for source in drawn if source.startswith("- item")]
        assert len(items) == len(set(items)) <= 200
        # The open end is a block or two, never the list.
        assert max(len(block.source) for block in tails) < 40

    run(script, telling(items, tok_ms=1))


def test_notes_wait_for_the_end_of_a_streaming_message() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await send(app, pilot, "go")
        await until(pilot, lambda: "paragraph number 1" in shown(app))
        app.transcript.note("a remark")
        await until(pilot, lambda: app.controller.idle)
        assert shown(app).endswith("paragraph number 59\na remark")

    run(script, telling(LONG, tok_ms=1))


def test_a_long_message_of_the_users_is_folded_until_a_key_shows_it() -> None:
    lines = [f"line number {number}" for number in range(200)]

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "\n".join(lines))
        folded = shown(app)
        assert "line number 5\n… 194 more lines; Ctrl+O shows them\n" in folded
        assert "line number 6" not in folded
        await pilot.press("ctrl+o")
        assert "\n".join(lines) in shown(app)
        assert "more lines" not in shown(app)
        await pilot.press("ctrl+o")
        assert shown(app) == folded
        # What the model is given is the whole text.
        assert app.controller.conversation.messages[0].text == "\n".join(lines)

    run(script, telling("so long"), size=(80, 24))


def test_a_message_of_twenty_lines_is_shown_whole() -> None:
    text = "\n".join(f"line {number}" for number in range(20))

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, text)
        assert text in shown(app)

    run(script, telling("ok"))


def test_every_theme_draws_the_conversation() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hi")
        for theme in ("textual-dark", "textual-light", "ansi-dark"):
            await say(app, pilot, f"/theme {theme}")
            bold = next(
                segment
                for y in range(app.transcript.size.height)
                for segment in app.transcript.render_line(y)
                if "strong" in segment.text
            )
            assert bold.style is not None
            assert bold.style.bold
            assert "KV" in meter(app)
            assert app.theme == theme

    run(script, telling("a **strong** word\n\n```python\ndef f(): ...\n```"), size=(40, 30))


def test_the_meter_says_what_the_cache_holds() -> None:
    facts = Facts(
        model="m", context_tokens=1000, k_bits=8, v_bits=4, kv_budget=1 << 20, budget_tokens=300
    )
    stats = ReplyStats(
        context_tokens=500, kv_bytes=1 << 18, mean_k_bits=6.54, mean_v_bits=4.25, evicted_share=0.12
    )
    line = meter_line(facts, stats, "ready", 200)
    assert line.startswith("ready  ! 12 % given up  KV 256.0 KiB/1.0 MiB K8V4  ")
    assert "context 500/1000 50%, 300 held at 8:4  bits 6.5:4.2  " in line
    for detail in ("short", "off"):
        assert meter_line(facts, stats, "ready", 30, detail) == "ready  ! 12 % given up"
    little = meter_line(facts, replace(stats, evicted_share=0.001), "ready", 200)
    assert "! less than 1 % given up" in little
    whole = meter_line(replace(facts, budget_tokens=1000), stats, "ready", 200)
    assert "context 500/1000 50%  bits" in whole
    untold = meter_line(facts, ReplyStats(kv_bytes=1 << 18), "ready", 200)
    assert "given up" not in untold
    assert "bits" not in untold
    short = meter_line(facts, ReplyStats(mean_k_bits=16, mean_v_bits=16), "ready", 200)
    assert "all in fp16" in short
    assert "bits" not in short


def test_the_meter_says_what_the_engine_counted() -> None:
    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert "first" not in meter(app)
        assert "tok/s" not in meter(app)
        assert "cached" not in meter(app)
        await say(app, pilot, "hi")
        await say(app, pilot, "and again")
        stats = app.controller.engine.stats
        assert stats.cached_tokens > 0
        for part in (
            f"{stats.decode_tok_s:.1f} tok/s",
            f"context {stats.context_tokens}/4096",
            "/64.0 MiB K4V2",
            f"first {stats.ttft_ms:.0f} ms",
            f"cached {stats.cached_tokens} encoded {stats.prompt_tokens - stats.cached_tokens}",
        ):
            assert part in meter(app)
        await pilot.resize_terminal(42, 24)
        await pilot.pause()
        assert meter(app).startswith(f"ready  {kv_part(app.controller.engine.facts, stats)}")

    run(script, FakeClient(FakeOptions(prefill_ms=3, tok_ms=1)), size=(140, 24))
