"""Alternatives against brute force, against plain decoding, and against the paper's formulas."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.config import KvPlan
from kvq.errors import UsageError
from kvq_apps.names import engine as named_engine
from kvq_export.write.writer import write_manifest
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.alternatives import Alternative, AlternativesRequest, log_normalizers
from kvq_runtime.answer.constraint import Constraint
from kvq_runtime.answer.generation import GenerationOptions, Vocabulary
from kvq_runtime.backends import SequencePass
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import Sampling, SessionConfig
from kvq_runtime.engine import Engine
from kvq_runtime.session.session import Session
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
    """Returns the log-probabilities of logits [..., V]."""
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
    """Checks that halves of characters and of stop strings belong to the line that holds them."""

    def said(ids: Sequence[int]) -> str:
        pieces = [BYTES.token_bytes(token, special=False) for token in ids]
        whole = b"".join(pieces).decode(errors="replace")
        places = [whole.find(stop) for stop in stops if stop in whole]
        return whole[: min(places, default=len(whole))]

    spelt = BYTES.encode("é ab the béb")
    request = AlternativesRequest(
        Vocabulary.of(BYTES, frozenset({0})),
        GenerationOptions(max_tokens=6, stop_strings=stops),
        count=3, branch_rows=99, room=99, history=TEXT,
    )  # fmt: skip
    lines = [request.start]
    for place, number in choices:
        line = lines[place % len(lines)]
        token = spelt[number % len(spelt)] if number % 3 else number
        if line.finish_reason is None and token < BYTES.vocab_size:
            lines.append(request.grow(line, token, -1.0))
    for line in lines:
        short = request.shortened(line, 2)
        assert (short.ids, short.logprobs) == (line.ids[:2], line.logprobs[:2])
        for grown in (line, short):
            assert request.finished(grown).text == said(grown.ids)


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
    """Returns the model's own log-probability of each of `tokens` after TEXT."""
    return [
        float(log_probabilities(logits_after([*TEXT, *tokens[:i]]))[token])
        for i, token in enumerate(tokens)
    ]


def greedy(first: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns `first` and the plain greedy decoding after it."""
    ids = list(first)
    while len(ids) < length:
        token = int(np.argmax(logits_after([*TEXT, *ids])))
        if token == END:
            break
        ids.append(token)
    return tuple(ids)


def check_logprobs(drafts: Sequence[Alternative]) -> None:
    for draft in drafts:
        np.testing.assert_allclose(draft.logprobs, logprob_of(draft.ids), atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_likeliest_first_tokens_are_each_continued_greedily(count: int) -> None:
    session = rule_session()
    drafts = session.drafts(count, 7, method=Branches())
    starts = np.argsort(-logits_after(TEXT), kind="stable")[:count]
    assert {draft.ids for draft in drafts} == {greedy([int(token)], 7) for token in starts}
    assert drafts[0].ids == greedy([], 7)
    assert [draft.logprob for draft in drafts[1:]] == sorted(
        (draft.logprob for draft in drafts[1:]), reverse=True
    )
    check_logprobs(drafts)


def test_nothing_of_the_drafts_is_kept() -> None:
    session, other = rule_session(), rule_session()
    session.drafts(3, 6, method=Branches())
    assert session.tokens == tuple(TEXT)
    assert session.sequence.cache.ids == TEXT
    plain = [step.token for step in other.generate(9, sampling=Sampling())]
    assert [step.token for step in session.generate(9, sampling=Sampling())] == plain


def test_a_cancel_in_any_step_gives_what_there_is() -> None:
    for limit in range(7):
        session, calls = rule_session(), iter([False] * limit + [True] * 99)
        drafts = session.drafts(2, 6, method=Branches(), cancel=lambda it=calls: next(it))
        assert all(len(draft.ids) <= limit for draft in drafts)
        assert all(draft.finish_reason in ("cancelled", "stop") for draft in drafts if limit < 6)
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
    ["branches:kind=x", "superposed:tau=0", "superposed:alpha=1", "superposed:_store=x", "x"],
)
def test_impossible_options_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"possible"):
        writer_named(text)


@pytest.mark.parametrize("name", ["auto", "spliced:alpha=0.2"])
def test_a_method_that_is_none_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(UsageError, match="is unknown; possible: branches, superposed"):
        writer_named(name)


# Superposed Decoding


class LinearBackend(RuleBackend):
    """Is linear in its embeddings, so that the logits of a mixture are a mixture of logits.

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
        texts = [rows.cache.text(first + int(row)) for row in rows.logit_rows]
        return np.stack([self.after(text) for text in texts]) if texts else np.zeros((0, V))


def superposed_by_the_paper(
    model: LinearBackend, k: int, length: int, alpha: float, tau: float, known: dict[tuple, dict]
) -> list[tuple[int, ...]]:
    """Computes algorithm 1 of arXiv 2405.18400 in plain loops; `known`: counts by context."""

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
            for token, row in step.items():
                if alpha == 0:
                    both = row  # the counts have no say
                elif any(chance.values()):
                    if chance[token] == 0:
                        continue
                    both = (1 - alpha) * row + alpha * np.log(chance[token])
                else:
                    both = (1 - alpha) * row - 200.0
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
    drafts = session.drafts(k, length, method=method)
    expected = superposed_by_the_paper(model, k, length, alpha, 0.8, known)
    assert {draft.ids for draft in drafts} <= {
        ids[: len(draft.ids)] for draft in drafts for ids in expected
    }
    assert len(drafts) == len({ids for ids in expected})
    for draft in drafts:
        after = [model.after([*TEXT, *draft.ids[:i]]) for i in range(len(draft.ids))]
        true = [float(log_probabilities(row)[t]) for row, t in zip(after, draft.ids, strict=True)]
        np.testing.assert_allclose(draft.logprobs, true, atol=1e-4)


@pytest.mark.parametrize("greedy_row", [0, 1])
def test_a_mixture_of_one_draft_is_greedy_decoding(greedy_row: int) -> None:
    """Uses any model, since nothing is mixed: rows of weight 1 are plain rows."""
    session = rule_session()
    drafts = session.drafts(1, 9, method=Superposed(alpha=0.0, greedy=greedy_row))
    assert [draft.ids for draft in drafts] == [greedy([], 9)]
    check_logprobs(drafts)


def test_k_drafts_take_as_many_passes_as_one() -> None:
    for k in (1, 3, 5):
        model = LinearBackend()
        session = opened(model)
        before = len(model.passes)
        session.drafts(k, 8, method=Superposed(alpha=0.2, tau=1.0))
        rows = [len(row[0]) for row in model.passes[before:]]
        assert rows[:-1] == [2] * 7  # the greedy row and the mixture
        assert len(rows) == 8  # the last asks the model itself
        assert session.sequence.cache.ids == TEXT


# On a model


def test_a_bundle_that_recommends_a_method_of_before_opens(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "older"
    shutil.copytree(shelf.bundle(), path)
    quality = {"drafts": {"method": "spliced:alpha=0.2,tau=0.5", "places": 16}}
    write_manifest(path, replace(Bundle.open(path).manifest, quality=quality))
    with named_engine.Engine.open(path, threads=1) as engine:
        assert Bundle.open(path).manifest.quality == quality
        with engine.session(kv="fp", draft_tokens=40, seed=4) as session:
            session.prefill(range(6, 20))
            default = session.drafts(3, 6)
            assert default == session.drafts(3, 6, method="branches")
            assert len(default) == 3


@pytest.mark.parametrize("method", ["branches", "superposed"])
def test_drafts_fit_their_constraint(method: str, shelf: Shelf) -> None:
    with Engine.open(shelf.bundle(), threads=1) as engine:
        for pattern in ("(yes|no|maybe)", "[0-9]{2,4}", "a{9}"):
            with engine.session(kv="fp", draft_tokens=128, seed=4) as session:
                session.prefill(engine.tokenizer.encode("It is "))
                drafts = session.drafts(
                    3, 9, method=writer_named(method), constraint=Constraint.regex(pattern)
                )
                assert drafts
                assert all(draft.finish_reason != "cancelled" for draft in drafts)
                assert all(re.fullmatch(pattern, draft.text) for draft in drafts), drafts


def test_alternatives_of_a_model_are_exact(shelf: Shelf) -> None:
    with Engine.open(shelf.bundle(), threads=1) as engine:
        rng = np.random.default_rng(2)
        ids = rng.integers(0, engine.model.vocab_size, 40).tolist()
        for name in ("branches", "superposed:tau=1.0"):
            with engine.session(kv="fp", draft_tokens=100, seed=4) as session:
                session.prefill(ids)
                before = session.sequence.state().cache
                drafts = session.drafts(3, 8, method=writer_named(name))
                assert session.sequence.state().cache == before
                assert drafts
                for draft in drafts:
                    with engine.session(kv="fp") as plain:
                        logits = np.concatenate(list(plain.logits([*ids, *draft.ids])))
                    true = log_probabilities(logits)[len(ids) - 1 : -1]
                    logprobs = true[np.arange(len(draft.ids)), list(draft.ids)]
                    np.testing.assert_allclose(draft.logprobs, logprobs, atol=2e-4, err_msg=name)
                with engine.session(kv="fp") as plain:
                    plain.prefill(ids)
                    steps = plain.generate(8, sampling=Sampling(temperature=0))
                    assert drafts[0].ids == tuple(step.token for step in steps)
                # Taking one is a prefill: what comes next is what a fresh run gives.
                session.prefill(drafts[-1].ids)
                with session.sequence.forward([], rows=[-1]) as branch:
                    np.testing.assert_allclose(branch.logits[0], logits[-1], atol=2e-4)


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
    probabilities = Ngrams.open(path).probabilities(text, np.arange(6))
    expected = np.zeros(6)
    for n, weight in WEIGHTS.items():
        context = text[len(text) - n + 1 :]
        runs = [t[i : i + n] for t in texts for i in range(len(t) - n + 1)]
        after = [run[-1] for run in runs if run[:-1] == context]
        if len(context) == n - 1 and after:
            expected += weight * np.bincount(after, minlength=6) / len(after)
    # Counts are kept within 2.2 %, and so is their sum.
    np.testing.assert_allclose(probabilities, expected, rtol=0.05)
    assert probabilities.sum() <= sum(WEIGHTS.values()) + 1e-12


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
