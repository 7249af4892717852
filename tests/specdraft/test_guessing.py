"""Drafts that cost passes: by the model itself on fewer bits or layers, and by a smaller model."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

import answers
from answers import LIMITS, answered, chi_square, same_cache
from kvq import native
from kvq.config import Budget
from kvq.errors import BackendError, UsageError
from kvq.native_linear import weight_bytes_read
from kvq_export.config import ExportOptions, WeightFormat
from kvq_runtime.backends import Mode
from kvq_runtime.config import Sampling, SessionRequest
from kvq_runtime.drafter import Draft, DraftContext, Drafter, Round
from kvq_runtime.engine import Engine
from kvq_runtime.generation import GenerationOptions
from kvq_runtime.passes import Work, forward_all, run
from kvq_runtime.sampling import distribution
from kvq_runtime.session import Session
from kvq_specdraft import drafter_named
from kvq_specdraft.layer_sets import Choosing, Kinds
from kvq_specdraft.model import Model
from kvq_specdraft.pace import TRIAL_ROUNDS, Pace
from kvq_specdraft.quantspec import QuantSpec
from kvq_specdraft.relay import Relay
from kvq_specdraft.skip import parsed
from rule_backend import RuleBackend
from shelf import EIGHT, PLAIN, Shelf

needs_native = pytest.mark.skipif(not native.available(), reason=native.why_not())
HI = Mode(view="hi")
SIZE = 8


@pytest.fixture(scope="module")
def eight(shelf: Shelf) -> Path:
    return shelf.bundle(EIGHT, num_hidden_layers=3, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(eight: Path) -> Iterator[Engine]:
    with Engine.open(eight, threads=1) as opened:
        yield opened


session = partial(answers.session, context_tokens=700, k_bits=8, v_bits=8)


def prompt(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(6, 300, tokens).tolist()


# Guesses that are often right, and some that never are.
KINDS = (
    "quantspec",
    "quantspec:head=200",
    "skip:layers=1",
    "skip:count=1",
    "early:layer=1",
    "model",
    "lookup+quantspec",
    "auto+model",
)


def made(kind: str, path: Path, **options: float) -> Drafter:
    """The drafter of a kind, which always guesses; the model drafts for itself."""
    asked = {"least": 1e-9, "most": 7} | options
    name, _, own = kind.partition(":")
    own = own or ("path=" + str(path) if name.endswith("model") else "")
    given = ",".join(filter(None, [own, *(f"{key}={value}" for key, value in asked.items())]))
    return drafter_named(f"{name}:{given}")


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("most", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_and_caches_are_those_of_plain_decoding(
    engine: Engine, eight: Path, kind: str, most: int
) -> None:
    """QS-3, QS-6 and QS-7, over closing pages, and from one prompt to the next."""
    with (
        session(engine, None) as plain,
        session(engine, made(kind, eight, most=most)) as drafted,
    ):
        for tokens in (100, 140):
            wanted = answered(plain, prompt(tokens), 70, stop_ids=())
            assert answered(drafted, prompt(tokens), 70, stop_ids=()) == wanted
            same_cache(drafted.sequence.cache, plain.sequence.cache)
        stats = drafted.stats()
        assert stats.rounds.drafted_tokens > 60
        assert (stats.draft_bytes > 0) == kind.endswith("model")


def test_the_free_drafter_comes_first_and_each_learns_from_its_own() -> None:
    """Whose draft a round had decides whether the second hears of it; a pause is the first's."""
    drafts = iter([Draft(ids=(1,)), Draft(pause=2), Draft(ids=(2,))])
    first, second, guess = Mock(), Mock(), Draft(ids=(7,))
    first.propose.side_effect = lambda room: next(drafts)

    def drafting(draft_context: DraftContext) -> Work[Any, Draft]:
        yield from ()
        return guess

    second.drafting.side_effect = drafting
    relay, found, heard = Relay(first, second), list[Draft](), list[tuple[int, int]]()
    for _ in range(5):
        with pytest.raises(StopIteration) as done:
            next(relay.drafting(Mock(room=3)))
        found.append(done.value.value)
        relay.observe(Mock())
        heard.append((first.observe.call_count, second.observe.call_count))
    assert found == [Draft(ids=(1,)), guess, guess, guess, Draft(ids=(2,))]
    assert heard == [(1, 0), (2, 1), (2, 2), (2, 3), (3, 3)]


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("policy", ["budget", "snapkv", "kv-adaquant"])
@pytest.mark.parametrize("kind", ["quantspec", "early:layer=2"])
def test_under_pressure_a_cache_becomes_what_plain_decoding_makes_it(
    engine: Engine, eight: Path, kind: str, policy: str
) -> None:
    with session(engine, None, policy=policy) as ample:
        budget = Budget(num_bytes=ample.config.budget_bytes // 2)
    request = {"policy": policy, "kv_budget": budget}
    with (
        session(engine, None, **request) as plain,
        session(engine, made(kind, eight), **request) as drafted,
    ):
        wanted = answered(plain, prompt(350), 150, stop_ids=())
        assert answered(drafted, prompt(350), 150, stop_ids=()) == wanted
        same_cache(drafted.sequence.cache, plain.sequence.cache)
        stats = drafted.stats()
        assert stats.kv_bytes_peak <= stats.kv_budget
        assert 0 < stats.rounds.accepted_tokens < stats.rounds.drafted_tokens
        assert stats.held.evicted_share > 0 or stats.held.mean_k_bits < 8


@needs_native
def test_where_there_is_one_plane_only_every_guess_is_right(shelf: Shelf) -> None:
    """QS-4: four bits everywhere, so the draft's view is the model's own."""
    path = shelf.bundle(replace(PLAIN, weights=WeightFormat(embedding_bits=4)))
    with (
        Engine.open(path, threads=1) as four,
        session(four, made("quantspec", path), k_bits=4, v_bits=4, context_tokens=300) as drafted,
    ):
        answered(drafted, prompt(150), 64, stop_ids=())
        stats = drafted.stats()
        assert stats.rounds.accepted_tokens == stats.rounds.drafted_tokens > 50


@needs_native
def test_a_draft_reads_half_the_weights(engine: Engine) -> None:
    """QS-10: of every matrix the upper plane and the scales, and no byte of the lower."""
    matrices = [
        form
        for name in ("head", *(f"layers.{i}.{m}" for i in range(3) for m in MATRICES))
        for form in [engine.backend.bundle.form("embed" if name == "head" else name)]
    ]
    with session(engine, None) as opened:
        opened.prefill(prompt(100))
        for mode, view in ((HI, "hi"), (Mode(), "full")):
            with opened.sequence.branch() as branch:
                before = weight_bytes_read()
                run(branch.extend([7], mode=mode))
                read = weight_bytes_read() - before
            assert read == sum(form.panels * form.view_bytes(view) for form in matrices)


MATRICES = ("qkv", "o", "gate_up", "down")


def test_the_head_is_read_in_part_where_the_text_has_frequent_tokens_only() -> None:
    """And the vocabulary is large; in what is left out, fifty of a thousand tokens are too many."""

    def head(text: list[int], vocab_size: int = 151936, **options: int) -> int:
        drafter, backend, asked = QuantSpec(least=1e-9, **options), Mock(), list[Mode]()
        backend.model.vocab_size = vocab_size

        def extend(tokens: list[int], *, mode: Mode) -> Work[Any, Any]:
            asked.append(mode)
            yield from ()
            return Mock(logits=np.zeros((1, 4), np.float32), seconds=0.1)

        draft_context = Mock(room=1, due=[1])
        draft_context.branch.extend = extend
        draft_context.foresight().choose.return_value = (0, None)
        drafter.open(backend, Mock())
        drafter.follow(0, text)
        with pytest.raises(StopIteration):
            next(drafter.drafting(draft_context))
        assert asked[0].view == "hi"
        return asked[0].head_tokens

    frequent, mixed = list(range(1000)), [40_000 * (place % 20 == 0) for place in range(1000)]
    assert [head(frequent), head(mixed), head(mixed + frequent)] == [32768, 0, 32768]
    assert [head(frequent, vocab_size=32000), head(mixed, head=200)] == [0, 200]


def rules(seed: int) -> RuleBackend:
    """A model of eight tokens whose draft view is another, each by the last token."""
    tables = np.random.default_rng(seed).normal(size=(2, SIZE, SIZE)).astype(np.float32) * 1.2
    backend = RuleBackend(lambda text: tables[0, text[-1]], vocab_size=SIZE)
    backend.rule_of[HI] = lambda text: 0.6 * tables[0, text[-1]] + 0.6 * tables[1, text[-1]]
    return backend


@pytest.mark.slow
def test_sampled_answers_have_the_distribution_of_plain_decoding() -> None:
    """QS-5, through the whole session: three tokens by chi-square."""
    backend = rules(0)
    sampling = Sampling(temperature=0.9, top_k=5, min_p=0.02, repeat_penalty=1.3)
    config = backend.session_config(SessionRequest(seed=1))
    opened = Session(backend=backend, config=config)
    opened.drafter = QuantSpec(most=3, least=1e-9)
    seen = np.zeros((SIZE, SIZE), np.int64)
    for _ in range(1500):
        opened.rollback(len(opened.tokens))
        opened.prefill([1, 4])
        steps = list(opened.generate(3, sampling=sampling, stop_ids=()))
        seen[steps[1].token, steps[2].token] += 1
    stats = opened.stats()
    assert 0.5 < stats.rounds.accepted_tokens / stats.rounds.drafted_tokens < 0.95
    wanted = np.zeros((SIZE, SIZE))
    first = chances(backend, [1, 4], sampling)
    for one in range(SIZE):
        second = chances(backend, [1, 4, one], sampling)
        for two in range(SIZE):
            wanted[two] += first[one] * second[two] * chances(backend, [1, 4, one, two], sampling)
    assert chi_square(seen.ravel(), wanted.ravel()) < LIMITS[63]


def test_guesses_end_where_no_token_that_may_come_has_a_logit() -> None:
    """As the end of a form, when its only token is none of the head's first ones."""
    backend = RuleBackend(lambda text: 5, vocab_size=SIZE)
    backend.rule_of[Mode(view="hi", head_tokens=4)] = lambda text: np.array(
        [len(text) < 5, 0, 0, 0, *[-np.inf] * 4], np.float32
    )
    opened = Session(backend=backend, config=backend.session_config(SessionRequest()))
    opened.drafter = QuantSpec(head=4, least=1e-9)
    opened.prefill([1, 4])
    allowed = Sampling(temperature=0, logit_bias={token: -np.inf for token in range(5)})
    assert {step.token for step in opened.generate(4, sampling=allowed)} == {5}
    assert opened.stats().rounds.drafted_tokens == 0


def chances(backend: RuleBackend, text: list[int], sampling: Sampling) -> NDArray[np.float64]:
    logits = backend.rule(text)
    assert not isinstance(logits, int)
    return distribution(logits, sampling, text)


def test_drafts_of_many_share_their_passes() -> None:
    """Two answers in step: every pass, of guesses or of checks, is one for both."""
    greedy = Sampling(temperature=0)

    def opened(backend: RuleBackend) -> Session[Any]:
        made = Session(backend=backend, config=backend.session_config(SessionRequest()))
        made.drafter = QuantSpec(most=3, least=1e-9)
        made.prefill([1, 4])
        return made

    backend = rules(3)
    alone = opened(backend)
    wanted = [step.token for step in alone.generate(13, sampling=greedy, stop_ids=())]
    pair = [opened(backend) for _ in range(2)]
    options = GenerationOptions(max_tokens=13, sampling=greedy, stop_ids=frozenset())
    begun = [one.begin(options) for one in pair]
    backend.passes.clear()
    while begun[0].finish_reason is None:
        run_together([one.stepping(own) for one, own in zip(pair, begun, strict=True)])
    assert all(list(one.tokens[2:]) == wanted for one in pair)
    assert {len(one) for one in backend.passes} == {2}
    assert any(len(one[0]) == 4 for one in backend.passes)


def run_together(works: list[Work[Any, Any]]) -> None:
    calls: list[Any] = []
    answers: list[Any] = [None] * len(works)
    while True:
        calls.clear()
        for work, answer in zip(works, answers, strict=True):
            try:
                calls.append(work.send(answer))
            except StopIteration:
                continue
        if not calls:
            return
        assert len(calls) == len(works)
        answers = forward_all(calls)


@needs_native
def test_a_model_without_a_vocabulary_to_compare_is_refused(engine: Engine, shelf: Shelf) -> None:
    bare = shelf.bundle(ExportOptions(quality=False, name="bare", tokenizer=False))
    with pytest.raises(BackendError, match="bare has no tokenizer"):
        session(engine, Model(path=str(bare)))


@needs_native
def test_a_draft_model_whose_context_is_full_guesses_no_more(engine: Engine, eight: Path) -> None:
    drafter = Model(path=str(eight), context=128, least=1e-9)
    with session(engine, None) as plain, session(engine, drafter) as drafted:
        wanted = answered(plain, prompt(100), 60, stop_ids=())
        assert answered(drafted, prompt(100), 60, stop_ids=()) == wanted
        assert 8 < drafted.stats().rounds.drafted_tokens < 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantspec:gamma=3", "option 'gamma=3'; possible: most=..., least=..., head=..."),
        ("auto+lookup", "draft auto+ 'lookup' is unknown; possible: early, model"),
        ("model+skip", "draft 'model' is unknown; possible: auto, lookup"),
        ("quantspec:most=0", "draft quantspec: most=0 is not possible: 1 or more"),
        ("early:least=1.5", "draft early: least=1.5 is not possible"),
        ("skip:layers=3-", "layers=3- is not possible: layers and spans of them joined by +"),
        ("skip:layers=1,count=2", "give layers= or count=, not both"),
        ("model", "draft model: path= is missing"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_there(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        drafter_named(text)
    assert message in str(refused.value)


@needs_native
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("early:layer=3", "layer=3 is not possible: 1 to 2 of this model's 3 layers"),
        ("skip:layers=0-2", "of this model's 3 layers 3 cannot be left out"),
        ("skip:layers=5", "layer 5 is none of the model's: 0 to 2"),
    ],
)
def test_what_the_model_does_not_have_is_refused(engine: Engine, text: str, message: str) -> None:
    with pytest.raises((UsageError, BackendError)) as refused:
        session(engine, drafter_named(text))
    assert message in str(refused.value)


def test_layers_by_their_text() -> None:
    assert parsed("") == ()
    assert parsed("3+8-10+5") == (3, 5, 8, 9, 10)


def test_layers_that_do_least_are_left_out() -> None:
    """A stream of eight layers of which three hardly turn it."""
    random = np.random.default_rng(5)
    strengths = [1.0, 0.8, 0.01, 0.9, 0.02, 1.0, 0.03, 0.9]
    layers = [strength * random.normal(size=(64, 64)) / 8 for strength in strengths]
    start = random.normal(size=(3, 64))

    def states(skipped: tuple[int, ...]) -> Any:
        stream = start
        for number, layer in enumerate(layers):
            stream = stream if number in skipped else stream + np.tanh(stream @ layer)
        return stream / np.linalg.norm(stream, axis=1, keepdims=True)

    for count in range(8):
        choosing, passes = Choosing(num_layers=8, count=count), 0
        while (skipped := choosing.wanted()) is not None:
            choosing.take(states(skipped))
            passes += 1
        assert len(choosing.best) == len(set(choosing.best)) == count
        assert passes == sum(min(count, layer) + 1 for layer in range(8))
        if count <= 3:
            assert set(choosing.best) <= {2, 4, 6}
        else:
            assert {2, 4, 6} <= set(choosing.best)


def test_kinds_of_text_are_told_apart_by_their_tokens() -> None:
    random = np.random.default_rng(0)
    code, prose = (random.choice(np.arange(first, first + 40), (3, 256)) for first in (0, 30))
    kinds = Kinds()
    assert kinds.nearest(code[0].tolist()) is None
    kinds.keep(code[0].tolist(), (1, 2))
    assert kinds.nearest(prose[0].tolist()) is None
    kinds.keep(prose[0].tolist(), (5,))
    assert kinds.nearest(code[1].tolist()) == (1, 2)
    assert kinds.nearest(prose[1].tolist()) == (5,)
    for number in range(40):
        kinds.keep([100 + number] * 9, (number,))
    assert kinds.nearest(code[2].tolist()) is None


def rounds(pace: Pace, count: int, *, right: float, cost: float, row: float = 0.05) -> list[int]:
    """How long the drafts of so many rounds were, each guess right with the same chance."""
    random, lengths = np.random.default_rng(0), []
    for _ in range(count):
        room = pace.begin(7)
        made = 0
        while made < room:
            made += 1
            if not pace.goes_on(0.85, cost):
                break
        path = 0
        while path < made and random.random() < right:
            path += 1
        rows = 1 + made
        pace.observe(
            Round(
                draft=Draft(ids=(1,) * made),
                path=tuple(range(path)),
                tokens=(*(1,) * path, 2),
                logits=np.zeros((rows, 4), np.float32),
                rows=rows,
                seconds=1 + row * made,
            )
        )
        lengths.append(made)
    return lengths


@pytest.mark.parametrize(("right", "cost"), [(0.95, 0.5), (0.85, 0.3), (0.85, 0.6), (0.9, 0.1)])
def test_drafts_are_as_long_as_pays(right: float, cost: float) -> None:
    """About the best length by the formula of expected tokens over expected time."""
    speeds = [sum(right**i for i in range(n + 1)) / (1 + 0.05 * n + cost * n) for n in range(8)]
    lengths = rounds(Pace(most=7, least=0), 600, right=right, cost=cost)
    typical = int(np.median(lengths[200:]))
    assert speeds[typical] > 0.97 * max(speeds)
    assert typical > 0
    assert lengths[0] == 0
    assert lengths[TRIAL_ROUNDS] == 0


@pytest.mark.parametrize(("right", "cost"), [(0.3, 0.3), (0.85, 0.95)])
def test_where_nothing_pays_there_are_no_drafts_but_trials(right: float, cost: float) -> None:
    lengths = rounds(Pace(most=7, least=0), 1000, right=right, cost=cost)[200:]
    tried = [place for place, made in enumerate(lengths, 200) if made]
    assert len(tried) <= 1 + 800 // TRIAL_ROUNDS
    assert tried
    assert all(place % TRIAL_ROUNDS == 0 for place in tried)


def test_a_threshold_on_the_chance_of_all_guesses() -> None:
    lengths = rounds(Pace(most=7, least=0.5), 400, right=0.85, cost=5)
    # 0.85^4 is the last product above a half.
    assert int(np.median(lengths[100:])) == 5
