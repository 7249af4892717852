"""Prompts whose beginning changed: `--reuse moved` keeps what follows, `exact` reads it again."""

import random
from pathlib import Path
from typing import Any

import pytest

from kvq.config import FLOAT_WIDTH
from kvq_apps.cli import main
from kvq_runtime.serving import pool
from kvq_runtime.serving.saving import SavedSessions, as_ids
from kvq_runtime.serving.slots import LEAST_SAVED_TOKENS, Slot, Slots
from serving import CHAT, GREEDY, Rule, ask, chat, leased, loaded, metric, running, wait_until
from shelf import Shelf

pytestmark = pytest.mark.usefixtures("own_state")

TEXT = random.Random(0).choices(range(60, 260), k=800)
CHANGED = [*TEXT[:20], 261, 262, 263, *TEXT[22:], *range(70, 90)]


def read(slots: Slots, ids: list[int], *, edits: bool, owner: str = "me") -> tuple[Slot, int]:
    """Reads `ids` as a request does; returns its slot, and how many tokens were kept."""
    slots.saved.flush()
    slot = leased(slots, ids, owner=owner, edits=edits)
    kept = slot.align(ids, edits=edits)
    assert list(slot.session.tokens) == ids
    if slot.session.pending_tokens:
        slot.session.prefill()
    slots.release(slot)
    return slot, kept


@pytest.fixture
def slots(rule: Rule) -> Slots:
    return Slots(rule.session, 1, SavedSessions(Path(), "key", 0))


def test_what_follows_a_change_is_kept(rule: Rule, slots: Slots) -> None:
    first, _ = read(slots, TEXT, edits=True)
    rule.backend.passes.clear()
    _, kept = read(slots, CHANGED, edits=True)
    # Three new tokens, as many after them, the last of the old text, and the new end.
    assert len(CHANGED) - kept == 3 + 3 + 1 + 20
    assert sum(len(ids) for one_pass in rule.backend.passes for ids in one_pass) == 27
    assert first.session.sequence.encoding.staleness.moved >= len(TEXT) - 25


def test_without_edits_what_was_moved_is_read_again(slots: Slots) -> None:
    read(slots, TEXT, edits=True)
    read(slots, CHANGED, edits=True)
    slot, kept = read(slots, CHANGED, edits=False)
    # The tokens that were encoded again behind the change are exact, too.
    assert kept == 26
    assert slot.session.exact


def test_a_longer_text_goes_on_with_what_was_moved(slots: Slots) -> None:
    read(slots, TEXT, edits=True)
    read(slots, CHANGED, edits=True)
    _, kept = read(slots, [*CHANGED, 64, 65], edits=True)
    assert kept == len(CHANGED)


def test_an_edit_that_saves_little_is_not_made(slots: Slots) -> None:
    short = TEXT[: LEAST_SAVED_TOKENS + 20]
    read(slots, short, edits=True)
    slot, kept = read(slots, [*short[:20], 261, *short[21:]], edits=True)
    assert kept == 20
    assert slot.session.exact


def test_a_change_of_a_sink_is_read_again(slots: Slots) -> None:
    read(slots, TEXT, edits=True)
    _, kept = read(slots, [*TEXT[:2], 261, *TEXT[3:]], edits=True)
    assert kept <= 2


def test_texts_of_others_are_not_edited(rule: Rule) -> None:
    slots = Slots(rule.session, 2, SavedSessions(Path(), "key", 0))
    slot, _ = read(slots, TEXT, edits=True)
    other, kept = read(slots, CHANGED, edits=True, owner="another")
    assert other is not slot
    assert kept == 0


def test_the_oldest_turns_may_be_left_out(slots: Slots) -> None:
    slot, _ = read(slots, TEXT, edits=True)
    shorter = [*TEXT[:10], *TEXT[430:], 66]
    again, kept = read(slots, shorter, edits=True)
    assert again is slot
    assert len(shorter) - kept < 25


def test_another_conversation_that_begins_alike_gets_a_copy(rule: Rule) -> None:
    """Its beginning is edited, and the first conversation goes on where it was."""
    slots = Slots(rule.session, 2, SavedSessions(Path(), "key", 0))
    slot, _ = read(slots, TEXT, edits=True)
    other = [*TEXT[:20], 261, *TEXT[21:600], *random.Random(1).choices(range(60, 260), k=150)]
    second, kept = read(slots, other, edits=True)
    assert second is not slot
    assert len(other) - kept < 160
    first, kept = read(slots, [*TEXT, 64], edits=True)
    assert first is slot
    assert kept == len(TEXT)
    assert slot.session.exact


def test_a_copy_is_taken_back_from_the_disk(rule: Rule, tmp_path: Path) -> None:
    """With one slot the text that is edited has gone to disk before."""
    slots = Slots(rule.session, 1, SavedSessions(tmp_path, "key", 1 << 30))
    read(slots, TEXT, edits=True)
    other = [*TEXT[:20], 261, *TEXT[21:600], *random.Random(1).choices(range(60, 260), k=150)]
    assert len(other) - read(slots, other, edits=True)[1] < 160
    assert read(slots, [*TEXT, 64], edits=True)[1] == len(TEXT)
    slots.save_all()


def test_a_text_on_disk_is_edited(rule: Rule, tmp_path: Path) -> None:
    for ids, kept in ((TEXT, 0), (CHANGED, len(CHANGED) - 27)):
        slots = Slots(rule.session, 1, SavedSessions(tmp_path, "key", 1 << 30))
        assert read(slots, ids, edits=True)[1] == kept
        slots.save_all()
    # The changed text took the first one's place on disk. What is moved of it is not exact.
    slots = Slots(rule.session, 1, SavedSessions(tmp_path, "key", 1 << 30))
    assert len(slots.saved) == 1
    assert slots.saved.best(as_ids(CHANGED), "me")[1] == 26


def test_a_copy_that_fails_is_not_edited(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from a damaged file nor from another slot; the prompt is read instead."""
    other = random.Random(2).choices(range(60, 260), k=500)
    slots = Slots(rule.session, 1, SavedSessions(tmp_path, "key", 1 << 30))
    read(slots, TEXT, edits=True)
    read(slots, other, edits=True)
    slots.saved.flush()
    (path,) = tmp_path.glob("*/*.kvq")
    path.write_bytes(path.read_bytes()[:-100])
    assert read(slots, CHANGED, edits=True)[1] == 0
    slots.save_all()

    def refuse(self: Any) -> Any:
        raise MemoryError

    slots = Slots(rule.session, 2, SavedSessions(Path(), "key", 0))
    for ids in (other, TEXT):
        read(slots, ids, edits=True)
    monkeypatch.setattr("kvq_runtime.session.session.Session.capture", refuse)
    alike = [*TEXT[:20], 261, *TEXT[21:600], *random.Random(1).choices(range(60, 260), k=150)]
    assert read(slots, alike, edits=True)[1] == 0


@pytest.mark.parametrize("bits", [4, FLOAT_WIDTH])
def test_a_request_chooses(bits: int, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP with a real engine: the server's way, `x_kvq.exact`, and what the answer says."""
    monkeypatch.setattr(pool, "IDLE_REFRESH_S", 1e9)
    bundle = str(shelf.bundle(max_position_embeddings=4096))
    load = loaded(bundle, k_bits=bits, v_bits=bits)
    story = " ".join(f"Page {number} has {number * number} tokens." for number in range(40))

    def talk(time: str, **fields: Any) -> dict[str, Any]:
        body = chat(f"Now it is {time}. {story}", max_tokens=8, **GREEDY)
        return body | {"x_kvq": fields}

    with running(load, saved_bytes=0, sessions=1, reuse="moved") as server:
        ask(server, CHAT, talk("nine"))
        moved = ask(server, CHAT, talk("half past ten")).json
        assert moved["x_kvq"]["moved_tokens"] > 400
        assert moved["x_kvq"]["exact"] is False
        prompt = moved["usage"]["prompt_tokens"]
        assert prompt - moved["usage"]["prompt_tokens_details"]["cached_tokens"] < 60
        assert metric(server, "moved_tokens_total") > 400
        exact = ask(server, CHAT, talk("half past ten", exact=True)).json
        assert exact["x_kvq"]["moved_tokens"] == 0
        assert exact["x_kvq"]["exact"] is True
    with running(load, saved_bytes=0, sessions=1) as server:
        ask(server, CHAT, talk("nine"))
        plain = ask(server, CHAT, talk("half past ten")).json
        # With fewer bits an answer depends on where pages closed while its prompt was read.
        assert plain["choices"] == exact["choices"] or bits < FLOAT_WIDTH
        ask(server, CHAT, talk("eleven"))
        by_request = ask(server, CHAT, talk("half past ten", exact=False)).json
        assert by_request["x_kvq"]["moved_tokens"] > 400


def test_idle_time_makes_a_moved_text_exact(shelf: Shelf) -> None:
    bundle = str(shelf.bundle(max_position_embeddings=4096))
    story = " ".join(f"Page {number} has {number * number} tokens." for number in range(30))
    with running(loaded(bundle), saved_bytes=0, sessions=1, reuse="moved") as server:
        for time in ("nine", "ten past nine"):
            ask(server, CHAT, chat(f"Now it is {time}. {story}", max_tokens=2, **GREEDY))
        assert server.pool.served is not None
        (slot,) = server.pool.served.slots.all
        wait_until(lambda: not slot.busy and slot.session.exact)


def test_a_wrong_choice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--reuse", "never"]) == 2
    assert "choose from 'exact', 'moved'" in capsys.readouterr().err
