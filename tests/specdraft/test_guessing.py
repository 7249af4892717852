"""Drafts that cost passes: by the model itself on fewer bits, and by a smaller model."""

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
from kvq import native_library
from kvq.config import Budget
from kvq.errors import BackendError, UsageError
from kvq.native_linear import weight_bytes_read
from kvq_export.config import ExportOptions, WeightFormat
from kvq_runtime.answer.drafter import Draft, DraftContext, Drafter, Round
from kvq_runtime.answer.generation import GenerationOptions
from kvq_runtime.answer.sampling import distribution
from kvq_runtime.backends import Mode
from kvq_runtime.config import Sampling, SessionRequest
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passes import Work, forward_all, run
from kvq_runtime.session.session import Session
from kvq_specdraft import drafter_named
from kvq_specdraft.guessing import TRIAL_ROUNDS, Pace
from kvq_specdraft.model import Model
from kvq_specdraft.quantspec import QuantSpec
from kvq_specdraft.relay import Relay
from rule_backend import RuleBackend
from shelf import EIGHT, PLAIN, Shelf

needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
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
    "model",
    "lookup+quantspec",
    "auto+model",
)


def made(kind: str, path: Path, **options: float) -> Drafter:
    """Returns the drafter of a kind, which always guesses; the model drafts for itself."""
    settings = {"least": 1e-9, "most": 7} | options
    name, _, kind_options = kind.partition(":")
    kind_options = kind_options or ("path=" + str(path) if name.endswith("model") else "")
    texts = ",".join(
        filter(None, [kind_options, *(f"{key}={value}" for key, value in settings.items())])
    )
    return drafter_named(f"{name}:{texts}")


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("most", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_and_caches_are_those_of_plain_decoding(
    engine: Engine, eight: Path, kind: str, most: int
) -> None:
    """Checks QS-3, QS-6 and QS-7, over closing pages, and from one prompt to the next."""
    with (
        session(engine, None) as plain,
        session(engine, made(kind, eight, most=most)) as drafted,
    ):
        for tokens in (100, 140):
            expected = answered(plain, prompt(tokens), 70, stop_ids=())
            assert answered(drafted, prompt(tokens), 70, stop_ids=()) == expected
            same_cache(drafted.sequence.cache, plain.sequence.cache)
        stats = drafted.stats()
        assert stats.rounds.drafted_tokens > 60
        assert (stats.draft_bytes > 0) == kind.endswith("model")


def test_the_free_drafter_comes_first_and_each_learns_from_its_own() -> None:
    """Checks that the second learns from its own drafts alone, and that a pause is the first's."""
    drafts = iter([Draft(ids=(1,)), Draft(pause=2), Draft(ids=(2,))])
    first, second, guess = Mock(), Mock(), Draft(ids=(7,))
    first.propose.side_effect = lambda room: next(drafts)

    def drafting(draft_context: DraftContext) -> Work[Any, Draft]:
        yield from ()
        return guess

    second.drafting.side_effect = drafting
    relay, proposed, heard = Relay(first, second), list[Draft](), list[tuple[int, int]]()
    for _ in range(5):
        with pytest.raises(StopIteration) as done:
            next(relay.drafting(Mock(room=3)))
        proposed.append(done.value.value)
        relay.observe(Mock())
        heard.append((first.observe.call_count, second.observe.call_count))
    assert proposed == [Draft(ids=(1,)), guess, guess, guess, Draft(ids=(2,))]
    assert heard == [(1, 0), (2, 1), (2, 2), (2, 3), (3, 3)]


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("policy", ["budget", "snapkv", "kv-adaquant"])
@pytest.mark.parametrize("kind", ["quantspec", "quantspec:head=200"])
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
        expected = answered(plain, prompt(350), 150, stop_ids=())
        assert answered(drafted, prompt(350), 150, stop_ids=()) == expected
        same_cache(drafted.sequence.cache, plain.sequence.cache)
        stats = drafted.stats()
        assert stats.kv_bytes_peak <= stats.kv_budget
        assert 0 < stats.rounds.accepted_tokens < stats.rounds.drafted_tokens
        assert stats.held.evicted_share > 0 or stats.held.mean_k_bits < 8


@needs_native
def test_where_there_is_one_plane_only_every_guess_is_right(shelf: Shelf) -> None:
    """Checks QS-4: with four bits everywhere the draft's view is the model's own."""
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
    """Checks QS-10: a draft reads the upper plane and the scales of every matrix alone."""
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
    """Checks that the vocabulary must be large, and fifty rare tokens of a thousand too many."""

    def head(text: list[int], vocab_size: int = 151936, **options: int) -> int:
        drafter, backend, modes = QuantSpec(least=1e-9, **options), Mock(), list[Mode]()
        backend.model.vocab_size = vocab_size

        def extend(tokens: list[int], *, mode: Mode) -> Work[Any, Any]:
            modes.append(mode)
            yield from ()
            return Mock(logits=np.zeros((1, 4), np.float32), seconds=0.1)

        draft_context = Mock(room=1, due=[1])
        draft_context.branch.extend = extend
        draft_context.foresight().choose.return_value = (0, None)
        drafter.open(backend, Mock())
        drafter.follow(0, text)
        with pytest.raises(StopIteration):
            next(drafter.drafting(draft_context))
        assert modes[0].view == "hi"
        return modes[0].head_tokens

    frequent, mixed = list(range(1000)), [40_000 * (place % 20 == 0) for place in range(1000)]
    assert [head(frequent), head(mixed), head(mixed + frequent)] == [32768, 0, 32768]
    assert [head(frequent, vocab_size=32000), head(mixed, head=200)] == [0, 200]


def rules(seed: int) -> RuleBackend:
    """Returns a model of eight tokens with another draft view; each goes by the last token."""
    tables = np.random.default_rng(seed).normal(size=(2, SIZE, SIZE)).astype(np.float32) * 1.2
    backend = RuleBackend(lambda text: tables[0, text[-1]], vocab_size=SIZE)
    backend.rule_of[HI] = lambda text: 0.6 * tables[0, text[-1]] + 0.6 * tables[1, text[-1]]
    return backend


@pytest.mark.slow
def test_sampled_answers_have_the_distribution_of_plain_decoding() -> None:
    """Checks QS-5, through the whole session: three tokens by chi-square."""
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
    expected = np.zeros((SIZE, SIZE))
    first = chances(backend, [1, 4], sampling)
    for token in range(SIZE):
        second = chances(backend, [1, 4, token], sampling)
        for two in range(SIZE):
            expected[two] += (
                first[token] * second[two] * chances(backend, [1, 4, token, two], sampling)
            )
    assert chi_square(seen.ravel(), expected.ravel()) < LIMITS[63]


def test_guesses_end_where_no_token_that_may_come_has_a_logit() -> None:
    """Uses the end of a form whose only token is none of the head's first ones."""
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
    """Runs two answers in step: every pass, of guesses or of checks, is one for both."""
    greedy = Sampling(temperature=0)

    def opened(backend: RuleBackend) -> Session[Any]:
        made = Session(backend=backend, config=backend.session_config(SessionRequest()))
        made.drafter = QuantSpec(most=3, least=1e-9)
        made.prefill([1, 4])
        return made

    backend = rules(3)
    alone = opened(backend)
    expected = [step.token for step in alone.generate(13, sampling=greedy, stop_ids=())]
    pair = [opened(backend) for _ in range(2)]
    options = GenerationOptions(max_tokens=13, sampling=greedy, stop_ids=frozenset())
    begun = [session.begin(options) for session in pair]
    backend.passes.clear()
    while begun[0].finish_reason is None:
        run_together(
            [session.stepping(answer) for session, answer in zip(pair, begun, strict=True)]
        )
    assert all(list(session.tokens[2:]) == expected for session in pair)
    assert {len(rows) for rows in backend.passes} == {2}
    assert any(len(rows[0]) == 4 for rows in backend.passes)


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
        expected = answered(plain, prompt(100), 60, stop_ids=())
        assert answered(drafted, prompt(100), 60, stop_ids=()) == expected
        assert 8 < drafted.stats().rounds.drafted_tokens < 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantspec:gamma=3", "option 'gamma=3'; possible: most=..., least=..., head=..."),
        ("auto+lookup", "draft auto+ 'lookup' is unknown; possible: model, mtp, quantspec"),
        ("model+quantspec", "draft 'model' is unknown; possible: auto, lookup"),
        ("skip:layers=3", "draft 'skip' is unknown; possible: auto, lookup, model, mtp, quantspec"),
        ("auto+early", "draft auto+ 'early' is unknown; possible: model, mtp, quantspec"),
        ("quantspec:most=0", "draft quantspec: most=0 is not possible: 1 or more"),
        ("quantspec:least=1.5", "draft quantspec: least=1.5 is not possible"),
        ("model", "draft model: path= is missing"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_there(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        drafter_named(text)
    assert message in str(refused.value)


def rounds(pace: Pace, count: int, *, right: float, cost: float, row: float = 0.05) -> list[int]:
    """Returns how long the drafts of `count` rounds were; all guesses have one chance."""
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
    """Compares with the best length by the formula of expected tokens over expected time."""
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
