"""Answers with drafts against answers without, on real models with quantised caches."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import answers
import kvq
from answers import answered, same_cache
from kvq import native_library
from kvq.config import Budget
from kvq_runtime.answer.drafter import Draft, Drafter, Round
from kvq_runtime.answer.generation import GenerationOptions
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passes import run
from kvq_specdraft import FREE_DRAFTERS, drafter_named
from kvq_specdraft.auto import Auto
from kvq_specdraft.lookup import Lookup
from shelf import Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

GREEDY = Sampling(temperature=0)
SOURCES = sorted((Path(__file__).parents[2] / "kvq/kvq").glob("*.py"))


@pytest.fixture(scope="module")
def embedded(shelf: Shelf) -> Iterator[Engine]:
    with Engine.open(shelf.embedded("nano"), threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(shelf: Shelf) -> Iterator[Engine]:
    with Engine.open(shelf.bundle(max_position_embeddings=2048), threads=1) as engine:
        yield engine


session = partial(answers.session, context_tokens=1024, k_bits=4, v_bits=2)


def prompts(engine: Engine, count: int, tokens: int = 160) -> list[list[int]]:
    """Pieces of our own sources, which repeat themselves as code does."""
    texts = [engine.tokenizer.encode(path.read_text()) for path in SOURCES]
    pieces = [
        text[start : start + tokens] for text in texts for start in range(0, len(text), 2 * tokens)
    ]
    assert len(pieces) >= count
    return pieces[:count]


class Half(Drafter):
    """Proposes an answer known beforehand, each token wrong with a chance of a quarter."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self.length = 0
        self.random = np.random.default_rng(len(text))

    def follow(self, kept: int, new: Sequence[int]) -> None:
        self.length = kept + len(new)

    def propose(self, room: int) -> Draft:
        right = self.text[self.length : self.length + room]
        return Draft(ids=tuple(t if self.random.random() < 0.75 else (t + 1) % 99 for t in right))

    def observe(self, outcome: Round) -> None:
        pass


@pytest.mark.sampled
@pytest.mark.parametrize("room", [2, 3, 5, 8])
@pytest.mark.parametrize("name", FREE_DRAFTERS)
def test_greedy_answers_are_those_of_plain_decoding(embedded: Engine, name: str, room: int) -> None:
    """Compares the caches too, byte for byte; a session goes from prompt to prompt."""
    kept = 0
    with (
        session(embedded, None, draft_tokens=room, policy="oldest") as plain,
        session(embedded, drafter_named(name), draft_tokens=room, policy="oldest") as drafted,
    ):
        for prompt in prompts(embedded, 8):
            expected = answered(plain, prompt, 40, stop_ids=())
            assert answered(drafted, prompt, 40, stop_ids=()) == expected
            assert drafted.tokens == plain.tokens
            same_cache(drafted.sequence.cache, plain.sequence.cache)
        kept = drafted.stats().rounds.accepted_tokens
    assert kept > 0 or name == "auto"


@pytest.mark.slow
def test_auto_is_the_drafter_where_answers_stay_the_same(shelf: Shelf) -> None:
    """Expects none on a backend whose products round differently for several rows."""
    path = shelf.bundle(max_position_embeddings=2048)
    with kvq.Engine.open(path, threads=1) as engine, engine.session() as session:
        assert isinstance(session.drafter, Auto)
        with engine.session(draft=Lookup) as other, engine.session(draft=lambda: None) as plain:
            assert isinstance(other.drafter, Lookup)
            assert plain.drafter is None
    with kvq.Engine.open(path, backend="float") as engine, engine.session() as session:
        assert session.drafter is None


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["lookup:min_ngram=1", "suffix:min_ngram=1", "rewrite:min_ngram=1", "recycle"]
)
def test_greedy_answers_to_many_prompts(tiny: Engine, name: str) -> None:
    """Checks QS-3: 200 prompts, with 1, 2, 4 and 7 guesses at most."""
    random = np.random.default_rng(5)
    many = [(random.integers(6, 300, 6).tolist() * 3)[: random.integers(7, 19)] for _ in range(200)]
    with session(tiny, None) as plain:
        expected = [answered(plain, prompt, 8, stop_ids=()) for prompt in many]
    for room in (2, 3, 5, 8):
        with session(tiny, drafter_named(name), draft_tokens=room) as drafted:
            actual = [answered(drafted, prompt, 8, stop_ids=()) for prompt in many]
            assert actual == expected
            assert drafted.stats().rounds.accepted_tokens > 0


@pytest.mark.parametrize("make", ["Half", "Forked"])
def test_every_round_leaves_what_plain_decoding_would(tiny: Engine, make: str) -> None:
    """Pages and tail, right guesses and wrong ones; pages close where positions say (QS-6 to 8)."""
    prompt = np.random.default_rng(8).integers(6, 300, 100).tolist()
    states: dict[int, bytes] = {}
    with session(tiny, None) as plain:
        plain.prefill(prompt)
        for _ in plain.generate(120, sampling=GREEDY, stop_ids=()):
            states[plain.sequence.cache.tokens] = plain.sequence.cache.state()
        text = plain.tokens
    drafter = {"Half": Half, "Forked": Forked}[make](text)
    with session(tiny, drafter) as drafted:
        drafted.prefill(prompt)
        generation = drafted.begin(
            GenerationOptions(max_tokens=120, sampling=GREEDY, stop_ids=frozenset())
        )
        plan, rounds = drafted.config.plan, 0
        while generation.finish_reason is None:
            run(drafted.stepping(generation))
            cache = drafted.sequence.cache
            assert cache.state() == states[cache.tokens]
            floats = plan.sink_tokens + plan.tail_tokens
            assert len(cache.parts[0].columns()[0]) == max(0, cache.tokens - floats) // 64
            rounds += 1
        stats = drafted.stats()
        assert rounds < 100
        assert stats.rounds.drafted_tokens > stats.rounds.accepted_tokens > 20


@pytest.mark.sampled
@pytest.mark.parametrize("name", FREE_DRAFTERS)
def test_sampled_answers_are_those_of_plain_decoding(embedded: Engine, name: str) -> None:
    settings = {"sampling": Sampling(temperature=0.7, repeat_penalty=1.1, min_p=0.1)}
    with (
        session(embedded, None, seed=5) as plain,
        session(embedded, drafter_named(name), seed=5) as drafted,
    ):
        for prompt in prompts(embedded, 6):
            expected = answered(plain, prompt, 30, **settings)
            assert answered(drafted, prompt, 30, **settings) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["budget", "oldest", "h2o", "snapkv", "zipcache", "kv-adaquant"])
@pytest.mark.parametrize("room", [3, 8])
def test_a_cache_under_pressure_becomes_what_plain_decoding_makes_it(
    tiny: Engine, policy: str, room: int
) -> None:
    request = {"policy": policy, "draft_tokens": room, "context_tokens": 700}
    prompt = np.random.default_rng(1).integers(6, 300, 260).tolist()
    settings = partial(answered, prompt=prompt, count=260, stop_ids=())
    with session(tiny, None, **request) as ample:
        budget = Budget(num_bytes=ample.config.budget_bytes // 2)
    with session(tiny, None, kv_budget=budget, **request) as plain:
        expected = settings(plain)
        text = plain.tokens
        with session(tiny, Half(text), kv_budget=budget, **request) as drafted:
            assert settings(drafted) == expected
            same_cache(drafted.sequence.cache, plain.sequence.cache)
            stats = drafted.stats()
            assert 0 < stats.rounds.accepted_tokens < stats.rounds.drafted_tokens
            assert stats.kv_bytes_peak <= stats.kv_budget
        plain_stats = plain.stats()
        assert plain_stats.held.evicted_share > 0 or plain_stats.held.mean_v_bits < 8


def test_an_answer_ends_inside_a_run_of_right_guesses_as_it_would_without(tiny: Engine) -> None:
    """Checks QS-11 for a stop string, an end token, a full answer and a cancel."""
    prompt = tiny.tokenizer.encode("The quick brown fox jumps over")
    with session(tiny, None) as opened:
        steps = answered(opened, prompt, 60, stop_ids=())
        text = opened.tokens
    letters = "".join(step.text for step in steps)
    ends = [{"stop_strings": (letters[at : at + 3],), "stop_ids": ()} for at in range(4, 40, 5)] + [
        {"stop_ids": (steps[at].token,)} for at in range(1, 30, 4)
    ]
    for settings in ends:
        actual = []
        for drafter in (None, Half(text), Oracle(text)):
            with session(tiny, drafter) as opened:
                actual.append((answered(opened, prompt, 60, **settings), opened.tokens))
        assert actual[1:] == actual[:1] * 2
        assert actual[0][0][-1].finish_reason == "stop"
    for after in range(1, 20, 3):
        actual = []
        for drafter in (None, Half(text), Oracle(text)):
            with session(tiny, drafter) as opened:
                opened.prefill(prompt)
                cancel = partial(next, iter([False] * after + [True]))
                generated = list(opened.generate(60, sampling=GREEDY, stop_ids=(), cancel=cancel))
                actual.append((generated, opened.tokens))
        assert actual[1:] == actual[:1] * 2
        assert actual[0][0][-1].finish_reason == "cancelled"


class Forked(Half):
    """Proposes a tree: the right token and the next two, each after a wrong one."""

    def propose(self, room: int) -> Draft:
        right = self.text[self.length : self.length + min(3, room // 2)]
        ids = [token for right_token in right for token in ((right_token + 1) % 99, right_token)]
        parents = [2 * (place // 2) - 1 for place in range(len(ids))]
        return Draft(ids=tuple(ids), parents=tuple(parents))


class Oracle(Half):
    """Is always right."""

    def propose(self, room: int) -> Draft:
        return Draft(ids=tuple(self.text[self.length : self.length + room]))
