"""Alternatives against brute force, against plain decoding, and against the paper's formulas."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.config import KvPlan
from kvq.errors import UsageError
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.alternatives import Alternative, AlternativesRequest, log_normalizers
from kvq_runtime.backends import SequencePass
from kvq_runtime.config import Sampling, SessionConfig
from kvq_runtime.constraint import Constraint
from kvq_runtime.engine import Engine
from kvq_runtime.generation import GenerationOptions, Vocabulary
from kvq_runtime.session import Session
from kvq_specdraft import writer_named
from kvq_specdraft.branches import Branches
from kvq_specdraft.ngrams import WEIGHTS, build
from kvq_specdraft.superposed import Superposed
from rule_backend import RuleBackend, RuleCache
from shelf import Shelf
from tiny import byte_level_tokenizer

V = 12
END = 11
TEXT = [3, 1, 4]


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    """Logits [V] that depend on every token, with a few likely ones and hardly ever the end."""
    seed = [len(tokens), *tokens[-3:], sum(tokens)]
    logits = (3 * np.random.default_rng(seed).standard_normal(V)).astype(np.float32)
    logits[END] -= 4
    return logits


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Of logits [..., V]."""
    return logits - log_normalizers(np.atleast_2d(logits)).reshape(*logits.shape[:-1], 1)


BYTES = Tokenizer.from_json(byte_level_tokenizer().to_str(), ControlTokens(eos=(0,)), None)


@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 399)), max_size=30),
    stops=st.sampled_from([(), ("é",), ("b", "ab"), ("the",)]),
)
def test_lines_that_grow_from_one_another_keep_their_own_text(
    choices: list[tuple[int, int]], stops: tuple[str, ...]
) -> None:
    """Whatever halves of characters and of stop strings a line holds back is its own."""

    def said(ids: Sequence[int]) -> str:
        pieces = [BYTES.token_bytes(token, special=False) for token in ids]
        whole = b"".join(pieces).decode(errors="replace")
        places = [whole.find(stop) for stop in stops if stop in whole]
        return whole[: min(places, default=len(whole))]

    spelt = BYTES.encode("é ab the béb")
    asked = AlternativesRequest(
        Vocabulary.of(BYTES, frozenset({0})),
        GenerationOptions(max_tokens=6, stop_strings=stops),
        count=3, branch_rows=99, room=99, history=TEXT, generator=np.random.default_rng(0),
    )  # fmt: skip
    lines = [asked.start]
    for place, number in choices:
        line = lines[place % len(lines)]
        token = spelt[number % len(spelt)] if number % 3 else number
        if line.finish_reason is None and token < BYTES.vocab_size:
            lines.append(asked.grow(line, token, -1.0))
    for line in lines:
        short = asked.shortened(line, 2)
        assert (short.ids, short.logprobs) == (line.ids[:2], line.logprobs[:2])
        for one in (line, short):
            assert asked.finished(one).text == said(one.ids)


def opened(backend: RuleBackend, seed: int = 0, **more: int) -> Session[RuleCache]:
    config = {"context_tokens": 200, "budget_bytes": 1000, "draft_tokens": 100} | more
    session = Session(
        backend=backend,
        config=SessionConfig(plan=KvPlan(), seed=seed, **config),
        vocabulary=Vocabulary(stop_ids=frozenset([END])),
    )
    session.prefill(TEXT)
    return session


def rule_session(seed: int = 0, **more: int) -> Session[RuleCache]:
    return opened(RuleBackend(logits_after, vocab_size=V, stop_ids=[END]), seed, **more)


def logprob_of(tokens: Sequence[int]) -> list[float]:
    """The model's own log-probability of each of `tokens` after TEXT."""
    return [
        float(log_probabilities(logits_after([*TEXT, *tokens[:i]]))[token])
        for i, token in enumerate(tokens)
    ]


def greedy(first: Sequence[int], length: int) -> tuple[int, ...]:
    """`first` and what plain greedy decoding makes of it."""
    ids = list(first)
    while len(ids) < length:
        token = int(np.argmax(logits_after([*TEXT, *ids])))
        if token == END:
            break
        ids.append(token)
    return tuple(ids)


def check_logprobs(found: Sequence[Alternative]) -> None:
    for one in found:
        np.testing.assert_allclose(one.logprobs, logprob_of(one.ids), atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_likeliest_first_tokens_are_each_continued_greedily(count: int) -> None:
    session = rule_session()
    found = session.drafts(count, 7, method=Branches())
    starts = np.argsort(-logits_after(TEXT), kind="stable")[:count]
    assert {one.ids for one in found} == {greedy([int(token)], 7) for token in starts}
    assert found[0].ids == greedy([], 7)
    assert [one.logprob for one in found[1:]] == sorted(
        (one.logprob for one in found[1:]), reverse=True
    )
    check_logprobs(found)


def test_nothing_of_the_drafts_is_kept() -> None:
    session, other = rule_session(), rule_session()
    for method in ("branches", "branches:kind=beam"):
        session.drafts(3, 6, method=writer_named(method))
    assert session.tokens == tuple(TEXT)
    assert session.sequence.cache.ids == TEXT
    plain = [step.token for step in other.generate(9, sampling=Sampling())]
    assert [step.token for step in session.generate(9, sampling=Sampling())] == plain


def test_one_sample_is_the_sampled_answer() -> None:
    sampling = Sampling(temperature=1.3, top_k=0, top_p=0.9, repeat_penalty=1.2)
    found = rule_session(7).drafts(1, 12, method=Branches(kind="samples"), sampling=sampling)
    answer = [step.token for step in rule_session(7).generate(12, sampling=sampling)]
    assert list(found[0].ids) == [token for token in answer if token != END]
    check_logprobs(found)


def test_samples_are_the_models_distribution() -> None:
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    firsts = np.zeros(V)
    session = rule_session(1)
    for _ in range(40):
        for one in session.drafts(50, 1, method=Branches(kind="samples"), sampling=sampling):
            firsts[one.ids[0] if one.ids else END] += 1
    expected = 2000 * np.exp(log_probabilities(logits_after(TEXT)))
    likely = expected >= 5
    chi_square = ((firsts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 40  # 11 degrees of freedom: one run of a million is above


def test_a_beam_as_wide_as_the_tree_finds_the_likeliest_runs() -> None:
    found = rule_session().drafts(V, 2, method=Branches(kind="beam"))
    runs = [run for run in product(range(V), repeat=2) if END not in run]
    ends = [(END,), *((token, END) for token in range(V - 1))]
    best = sorted([*runs, *ends], key=lambda run: -sum(logprob_of(run)))[:V]
    whole = [tuple(token for token in run if token != END) for run in best]
    assert [one.ids for one in found] == whole
    check_logprobs(found)


def test_patience_waits_for_more_ends() -> None:
    def impatient(tokens: Sequence[int]) -> np.ndarray:
        logits = logits_after(tokens)
        logits[END] += 5
        return logits

    def ended(patience: float) -> list[float]:
        session = opened(RuleBackend(impatient, vocab_size=V, stop_ids=[END]))
        found = session.drafts(3, 8, method=Branches(kind="beam", patience=patience))
        return [one.logprob for one in found]

    hasty, patient = ended(1), ended(3)
    assert len(hasty) == len(patient) == 3
    # The third of three that ended first is not so likely as one that ended later.
    assert patient[:1] == hasty[:1]
    assert sum(patient) > sum(hasty)


@pytest.mark.parametrize("method", ["branches", "branches:kind=samples", "branches:kind=beam"])
def test_a_cancel_in_any_step_gives_what_there_is(method: str) -> None:
    for asked in range(7):
        session, calls = rule_session(), iter([False] * asked + [True] * 99)
        found = session.drafts(2, 6, method=writer_named(method), cancel=lambda it=calls: next(it))
        assert all(len(one.ids) <= asked for one in found)
        assert all(one.finish_reason in ("cancelled", "stop") for one in found if asked < 6)
        assert session.sequence.cache.ids == TEXT
        assert session.sequence.cache.num_rows == 0


@pytest.mark.parametrize(
    ("count", "length", "config", "says"),
    [
        (0, 4, {}, "ask for 1 or more"),
        (3, 0, {}, "give 1 or more"),
        (3, 10, {"draft_tokens": 8}, "need 27 rows; this session has room for 8"),
        (5, 12, {"context_tokens": 40}, "the context has room for 37"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_pass(
    count: int, length: int, config: dict[str, int], says: str
) -> None:
    session = rule_session(**config)
    with pytest.raises(UsageError, match=says):
        session.drafts(count, length, method=Branches())
    assert len(session.sequence.cache.calls) == 2  # the prompt's pass


@pytest.mark.parametrize(
    "text",
    ["branches:kind=x", "branches:patience=0", "superposed:tau=0", "superposed:alpha=1", "x"],
)
def test_impossible_options_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"possible"):
        writer_named(text)


# Superposed Decoding


class LinearBackend(RuleBackend):
    """A model that is linear in its embeddings, so that a mixture's logits are a mixture of logits.

    logits after rows r_0..r_n = sum_i 0.7^(n - i) sum_k weights[i, k] M[ids[i, k]]
    """

    def __init__(self) -> None:
        super().__init__(lambda _: 0, vocab_size=V, stop_ids=[END])
        self.matrix = np.random.default_rng(5).standard_normal((V, V)) * 1.5
        self.matrix[:, END] = -9

    def after(self, rows: Sequence[object]) -> np.ndarray:
        """Logits [V]; a row is a token, or (ids, weights)."""
        total = np.zeros(V)
        for row in rows:
            ids, weights = row if isinstance(row, tuple) else ((row,), (1.0,))
            total = 0.7 * total + np.asarray(weights) @ self.matrix[list(ids)]
        return total.astype(np.float32)

    def _logits(self, rows: SequencePass[RuleCache]) -> np.ndarray:
        mixed = rows.ids.shape[1] > 1 or not np.all(rows.weights == 1)
        ids, weights = map(tuple, rows.ids.tolist()), map(tuple, rows.weights.tolist())
        pairs = list(zip(ids, weights, strict=True))
        first = rows.cache.num_rows
        rows.cache.extend(pairs if mixed else rows.ids[:, 0].tolist())
        texts = [rows.cache.text(first + int(row)) for row in rows.wanted]
        return np.stack([self.after(text) for text in texts]) if texts else np.zeros((0, V))


def superposed_by_the_paper(
    model: LinearBackend, k: int, length: int, alpha: float, tau: float, known: dict[tuple, dict]
) -> list[tuple[int, ...]]:
    """Algorithm 1 of arXiv 2405.18400 in plain loops; `known`: counts by context."""

    def log_p(logits: np.ndarray) -> dict[int, float]:
        best = sorted(range(V), key=lambda t: (-logits[t], t))[: 3 * k]
        scaled = np.array([float(logits[t]) / tau for t in best])
        total = np.log(np.exp(scaled - scaled.max()).sum()) + scaled.max()
        return dict(zip(best, scaled - total, strict=True))

    def ngram(context: tuple[int, ...], token: int) -> float:
        total = 0.0
        for n, weight in WEIGHTS.items():
            counts = known.get(context[-(n - 1) :], {})
            if counts:
                total += weight * counts.get(token, 0) / sum(counts.values())
        return total

    first = log_p(model.after(TEXT))
    drafts = [((token,), first[token]) for token in list(first)[:k]]
    rows: list[object] = list(TEXT)
    for _ in range(length - 1):
        scores = np.array([score for _, score in drafts])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        rows.append((tuple(ids[-1] for ids, _ in drafts), tuple(weights)))
        step = log_p(model.after(rows))
        grown = []
        for ids, score in drafts:
            chance = {t: ngram((*TEXT, *ids), t) for t in step}
            for token, own in step.items():
                if alpha == 0:
                    both = own  # the counts have no say
                elif any(chance.values()):
                    if chance[token] == 0:
                        continue
                    both = (1 - alpha) * own + alpha * np.log(chance[token])
                else:
                    both = (1 - alpha) * own - 200.0
                grown.append(((*ids, token), score + both))
        drafts = sorted(grown, key=lambda pair: -pair[1])[:k]
    return [ids for ids, _ in drafts]


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_superposed_drafts_are_those_of_the_papers_algorithm(
    k: int, alpha: float, tmp_path: Path
) -> None:
    model, length = LinearBackend(), 6
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [4, 7, 8, 1, 10, 3, 3, 5], [0, 2, 4, 6, 8, 10, 1, 3]]
    path = tmp_path / "own"
    build(texts, path, vocab_size=V, tokenizer="t")
    known: dict[tuple, dict] = {}
    for text in texts:
        for n in WEIGHTS:
            for i in range(len(text) - n + 1):
                counts = known.setdefault(tuple(text[i : i + n - 1]), {})
                counts[text[i + n - 1]] = counts.get(text[i + n - 1], 0) + 1
    method = Superposed(alpha=alpha, tau=0.8, greedy=0, ngrams=str(path))
    session = opened(model)
    found = session.drafts(k, length, method=method)
    expected = superposed_by_the_paper(model, k, length, alpha, 0.8, known)
    assert {one.ids for one in found} <= {ids[: len(one.ids)] for one in found for ids in expected}
    assert len(found) == len({ids for ids in expected})
    for one in found:
        after = [model.after([*TEXT, *one.ids[:i]]) for i in range(len(one.ids))]
        true = [float(log_probabilities(row)[t]) for row, t in zip(after, one.ids, strict=True)]
        np.testing.assert_allclose(one.logprobs, true, atol=1e-4)


@pytest.mark.parametrize("greedy_row", [0, 1])
def test_a_mixture_of_one_draft_is_greedy_decoding(greedy_row: int) -> None:
    """Where nothing is mixed, any model will do: rows of weight 1 are plain rows."""
    session = rule_session()
    found = session.drafts(1, 9, method=Superposed(alpha=0.0, greedy=greedy_row))
    assert [one.ids for one in found] == [greedy([], 9)]
    check_logprobs(found)


def test_samples_that_all_end_before_a_mixture_are_drafts() -> None:
    def ends(tokens: Sequence[int]) -> np.ndarray:
        logits = logits_after(tokens)
        logits[END] += 60 * (len(tokens) > len(TEXT))
        return logits

    for seed in range(8):
        session = opened(RuleBackend(ends, vocab_size=V, stop_ids=[END]), seed)
        found = session.drafts(2, 6, method=writer_named("spliced"), sampling=Sampling(top_k=0))
        assert 1 <= len(found) <= 2
        assert found[0].ids == (int(np.argmax(logits_after(TEXT))),)
        assert all((len(one.ids), one.finish_reason) == (1, "stop") for one in found)


def test_k_drafts_take_as_many_passes_as_one() -> None:
    for k in (1, 3, 5):
        model = LinearBackend()
        session = opened(model)
        before = len(model.passes)
        session.drafts(k, 8, method=Superposed(alpha=0.2, tau=1.0))
        rows = [len(own[0]) for own in model.passes[before:]]
        assert rows[:-1] == [2] * 7  # the greedy row and the mixture
        assert len(rows) == 8  # the last asks the model itself
        assert session.sequence.cache.ids == TEXT


# On a model


@pytest.mark.parametrize(
    "method",
    ["branches", "branches:kind=samples", "branches:kind=beam", "superposed", "spliced"],
)
def test_drafts_fit_their_constraint(method: str, shelf: Shelf) -> None:
    with Engine.open(shelf.bundle(), threads=1) as engine:
        for pattern in ("(yes|no|maybe)", "[0-9]{2,4}", "a{9}"):
            with engine.session(kv="fp", draft_tokens=128, seed=4) as session:
                session.prefill(engine.tokenizer.encode("It is "))
                found = session.drafts(
                    3, 9, method=writer_named(method), constraint=Constraint.regex(pattern)
                )
                # A beam stops when enough lines have ended, and may show better ones that have not.
                ended = [one for one in found if one.finish_reason != "cancelled"]
                assert len(ended) == len(found) or method.endswith("beam")
                assert ended
                assert all(re.fullmatch(pattern, one.text) for one in ended), found


def test_alternatives_of_a_model_are_exact(shelf: Shelf) -> None:
    with Engine.open(shelf.bundle(), threads=1) as engine:
        rng = np.random.default_rng(2)
        ids = rng.integers(0, engine.model.vocab_size, 40).tolist()
        for name in ("branches", "branches:kind=beam", "superposed:tau=1.0", "spliced:tau=1.0"):
            with engine.session(kv="fp", draft_tokens=100, seed=4) as session:
                session.prefill(ids)
                before = session.sequence.state().cache
                found = session.drafts(3, 8, method=writer_named(name))
                assert session.sequence.state().cache == before
                assert found
                for one in found:
                    with engine.session(kv="fp") as plain:
                        logits = np.concatenate(list(plain.logits([*ids, *one.ids])))
                    true = log_probabilities(logits)[len(ids) - 1 : -1]
                    own = true[np.arange(len(one.ids)), list(one.ids)]
                    np.testing.assert_allclose(one.logprobs, own, atol=2e-4, err_msg=name)
                if name != "branches:kind=beam":
                    with engine.session(kv="fp") as plain:
                        plain.prefill(ids)
                        steps = plain.generate(8, sampling=Sampling(temperature=0))
                        assert found[0].ids == tuple(step.token for step in steps)
                # Taking one is a prefill: what comes next is what a fresh run gives.
                session.prefill(found[-1].ids)
                with session.sequence.forward([], rows=[-1]) as held:
                    np.testing.assert_allclose(held.logits[0], logits[-1], atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=5),
    text=st.lists(st.integers(0, 5), max_size=6),
)
def test_ngrams_are_those_counted_by_hand(
    texts: list[list[int]], text: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from kvq_specdraft.ngrams import Ngrams

    path = tmp_path_factory.mktemp("ngrams") / "own"
    counted = build(texts, path, vocab_size=6, tokenizer="t")
    assert counted == sum(map(len, texts))
    found = Ngrams.open(path).probabilities(text, np.arange(6))
    expected = np.zeros(6)
    for n, weight in WEIGHTS.items():
        context = text[len(text) - n + 1 :]
        runs = [t[i : i + n] for t in texts for i in range(len(t) - n + 1)]
        after = [run[-1] for run in runs if run[:-1] == context]
        if len(context) == n - 1 and after:
            expected += weight * np.bincount(after, minlength=6) / len(after)
    # Counts are kept within 2.2 %, and so is their sum.
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert found.sum() <= sum(WEIGHTS.values()) + 1e-12


def test_a_damaged_file_of_ngrams_is_refused(tmp_path: Path) -> None:
    from kvq.errors import DataError
    from kvq_specdraft.ngrams import Ngrams

    whole, path = tmp_path / "whole", tmp_path / "cut"
    build([[1, 2, 3, 4, 1, 2, 3, 5]] * 3, whole, vocab_size=6, tokenizer="t")
    assert whole.stat().st_mode & 0o077 == 0
    data = whole.read_bytes()
    for length in range(0, len(data) - 8, 7):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match="kvq ngrams build"):
            Ngrams.open(path)
    with pytest.raises(DataError, match="cannot be read"):
        Ngrams.open(tmp_path / "nowhere")
    for place in range(0, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            chances = Ngrams.open(path).probabilities([1, 2, 3], np.arange(6))
        except DataError:
            continue
        assert np.all(np.isfinite(chances))


def test_ngrams_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    from kvq.errors import DataError

    build([[1, 2, 3]], tmp_path / "own", vocab_size=99, tokenizer="t")
    with pytest.raises(DataError, match="vocabulary of 99"):
        rule_session().drafts(2, 4, method=Superposed(ngrams=str(tmp_path / "own")))
