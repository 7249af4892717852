"""Where a text goes: shared beginnings, load, and chats that only begin alike."""

import json
from typing import Any

import pytest

from kvq_apps.fleet import prefixes
from kvq_apps.fleet.prefixes import BLOCK, Chain, Placements, chains_of

IDLE = {"a": 0, "b": 0, "c": 0}


def chains(owner: str = "", **fields: Any) -> tuple[Chain, ...]:
    return chains_of(json.dumps(fields).encode(), owner)


def text(letter: str, blocks: int = 10) -> tuple[Chain, ...]:
    return chains(prompt=letter * BLOCK * blocks)


@pytest.fixture
def places() -> Placements[str]:
    placements: Placements[str] = Placements(sessions=2)
    placements.keep(list(IDLE))
    return placements


def test_a_chain_has_a_digest_for_each_block_and_shares_what_its_text_shares() -> None:
    ((*short,),) = chains(prompt="x" * (3 * BLOCK + 5))
    ((*long,),) = chains(prompt="x" * (4 * BLOCK) + "y" * BLOCK)
    assert (len(short), len(long), len({*long})) == (3, 5, 5)
    assert long[:3] == short
    assert chains(prompt="x" * (BLOCK - 1)) == ()
    assert chains_of(b"no JSON", "") == chains_of(b"[1]", "") == chains(content="x" * 999) == ()


def test_a_chat_that_goes_on_begins_as_before() -> None:
    system = {"role": "system", "content": "Be brief. " * 20}
    turns = [system, {"role": "user", "content": "Hi " * 30}]
    (first,) = chains(messages=turns)
    (second,) = chains(messages=[*turns, {"role": "assistant", "content": "Ho"}], model="x")
    assert second[: len(first)] == first
    (armed,) = chains(messages=turns, tools=[{"type": "function"}])
    assert armed[0] != first[0]


def test_texts_of_different_owners_have_nothing_in_common() -> None:
    long = "x" * 640
    chains_of_owners = [
        chains("k1", prompt=long), chains("k2", prompt=long), chains("k1", prompt=long,
        cache_salt="s"),
    ]  # fmt: skip
    assert len({chain[0] for (chain,) in chains_of_owners}) == 3


def test_an_editors_text_is_known_by_its_end_too() -> None:
    body = {"input_prefix": "a" * 6400, "input_suffix": "b" * 640}
    before, after = chains(**body)
    assert (len(before), len(after)) == (100, 10)
    typed = chains(**body | {"input_prefix": "z" + "a" * 6399})
    assert typed[0][0] != before[0]
    assert typed[1] == after
    lines = "".join(f"line {number}\n" for number in range(200))
    (whole,), (grown,) = chains(input_suffix=lines), chains(input_suffix=f"new\n{lines}")
    assert grown[: len(whole)] == whole


def test_a_text_goes_where_its_beginning_went(places: Placements[str]) -> None:
    places.put("b", text("x"))
    places.put("c", text("y"))
    assert places.order(text("x", 30), IDLE)[0] == "b"
    assert places.order(text("y"), IDLE)[0] == "c"
    # One that is new goes where nothing is yet.
    assert places.order(text("z"), IDLE)[0] == "a"


def test_the_longest_beginning_wins(places: Placements[str]) -> None:
    places.put("b", text("x", 10))
    places.put("c", text("x", 12))
    assert places.order(text("x", 14), IDLE)[:2] == ["c", "b"]


def test_who_is_too_busy_is_left_alone(places: Placements[str]) -> None:
    places.put("b", text("x"))
    assert places.order(text("x"), {"a": 1, "b": 2, "c": 1})[0] == "b"
    assert places.order(text("x"), {"a": 1, "b": 3, "c": 2}) == ["a", "c", "b"]


def test_chats_with_one_system_message_spread(places: Placements[str]) -> None:
    system = "s" * BLOCK * 20
    went: list[str] = []
    for number in range(12):
        new = chains(prompt=system + f"{number:02}" * BLOCK)
        went.append(places.order(new, IDLE)[0])
        places.put(went[-1], new)
    assert {replica: went.count(replica) for replica in IDLE} == {"a": 4, "b": 4, "c": 4}
    # One of them that goes on stays where it is, however many are there.
    for number, place in enumerate(went):
        goes_on = chains(prompt=system + f"{number:02}" * BLOCK + "more" * BLOCK)
        assert places.order(goes_on, IDLE)[0] == place
        places.put(place, goes_on)


def test_what_went_to_a_replica_that_is_gone_is_forgotten(places: Placements[str]) -> None:
    places.put("b", text("x"))
    places.keep(["a", "c", "d"])
    assert places.order(text("x"), {"a": 1, "c": 0, "d": 1})[0] == "c"
    places.keep(["a", "b"])
    assert places.order(text("x"), {"a": 0, "b": 1})[0] == "a"


def test_the_oldest_are_forgotten(places: Placements[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_BLOCKS", 25)
    for letter in "xyz":
        places.put("b", text(letter))
    busy = {"a": 0, "b": 1}
    assert [places.order(text(letter), busy)[0] for letter in "xyz"] == ["a", "b", "b"]
