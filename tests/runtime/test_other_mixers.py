"""Sessions of models most of whose layers do not attend.

Whatever is drafted, forgotten, saved or gone back to, the answers are those of decoding one token
after the other.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq import native_library
from kvq.config import FOLD_TOKENS
from kvq.errors import BackendError, BundleError, UnsupportedModelError, UsageError
from kvq.reference.linear import BlockFormat
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_runtime.backends import Mode
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.graph_check import check_graph
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passes import forward_all
from kvq_runtime.session.session import Session
from kvq_specdraft import drafter_named
from logits import generated, prompt
from sequences import advance
from shelf import EIGHT, PLAIN, Shelf
from traces import AnsweredText, GoneBack, traced

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
CONTEXT = 700
# Two conversations after one system prompt, and a text that shares nothing with them.
SYSTEM = prompt(150)
TEXTS = ([*SYSTEM, *prompt(40)], [*SYSTEM, *prompt(25)[::-1]], prompt(310)[::-1])
STEPS = 24
# After a message, where the answer begins.
ANSWERS = [11, 12, 13]
# How they remember tokens instead of by keys.
MIXERS = {
    "lfm2": "convolutions",
    "qwen3-5": "delta nets",
    "lfm2-moe": "convolutions",
    "qwen3-next": "delta nets",
    "lfm3": "convolutions",
}
# Random traces of each part: those of experts repeat what the mixers' own have shown.
TRACES = {"lfm2": 20, "qwen3-5": 20, "lfm2-moe": 2, "qwen3-next": 2, "lfm3": 2}
PARTS = pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
)


@pytest.fixture(scope="module", params=MIXERS)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def source(shelf: Shelf, case: str) -> Path:
    return shelf.family(case)


@pytest.fixture(scope="module")
def bundle(shelf: Shelf, source: Path) -> Path:
    return shelf.exported(source, EIGHT)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.open(bundle, threads=1) as opened:
        yield opened


def opened(engine: Engine, **options: Any) -> Session[Any]:
    defaults = {"context_tokens": CONTEXT, "kv": "fp", "draft": lambda: None, "chunk_tokens": 64}
    return engine.session(**defaults | options)


def followed(engine: Engine, text: Sequence[int]) -> list[int]:
    with opened(engine) as session:
        session.prefill(text)
        return generated(session, STEPS)


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[list[int]]:
    """Returns what follows each of `TEXTS`, decoded one by one in sessions of their own."""
    answers = [followed(engine, text) for text in TEXTS]
    assert len({tuple(answer) for answer in answers}) == len(TEXTS)
    return answers


@pytest.mark.sampled
@pytest.mark.parametrize("case", [*MIXERS, "gpt-oss"], indirect=True)
def test_a_path_of_a_tree_has_the_logits_of_steps(engine: Engine) -> None:
    """Compares bit for bit: products do not mix rows, nor do sinks or windows.

    The texts end so far from a multiple of 64 rows that no row of a path stands on its other side,
    as attention adds up so many at a time.
    """
    assert engine.backend.rows_agree
    ids, parents = [7, 8, 9, 10, 11, 12], [-1, 0, 0, 2, 1, 3]
    with opened(engine) as tree, opened(engine) as steps:
        for session in (tree, steps):
            session.prefill(TEXTS[0][:170])
        with tree.sequence.forward(ids, parents) as branch:
            actual = branch.logits.copy()
        for path in ([0, 1, 4], [0, 2, 3, 5]):
            for row in path:
                with steps.sequence.forward([ids[row]]) as branch:
                    np.testing.assert_array_equal(branch.logits[0], actual[row])
                    branch.commit([0])
            steps.rollback(len(path))
        # A committed path goes on as if it had been decoded.
        with tree.sequence.forward(ids, parents) as branch:
            branch.commit([0, 2, 3])
        steps.sequence.append([7, 9, 10])
        advance(steps.sequence, 1)
        assert generated(tree, STEPS) == generated(steps, STEPS)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["float"])
def test_other_backends_answer_alike(
    bundle: Path, engine: Engine, answers: list[list[int]], name: str
) -> None:
    with Engine.open(bundle, threads=1, backend=name) as other, opened(other) as session:
        session.prefill(TEXTS[0])
        with opened(engine) as ours:
            ours.prefill(TEXTS[0])
            for token in answers[0][:6]:
                actual, expected = (peer.sequence.encoding.logits for peer in (session, ours))
                assert np.abs(actual - expected).std() < 0.1 * expected.std()
                for peer in (session, ours):
                    peer.sequence.append([token])
                    advance(peer.sequence)
        before = session.sequence.encoding.logits
        with session.sequence.forward([1, 2, 3], [-1, 0, 0]) as branch:
            actual = branch.logits[2]
            branch.commit([0, 2])
        session.rollback(2)
        session.sequence.append([1, 3])
        advance(session.sequence)
        np.testing.assert_allclose(session.sequence.encoding.logits, actual, atol=1e-3)
        session.rollback(2)
        advance(session.sequence)
        np.testing.assert_allclose(session.sequence.encoding.logits, before, atol=1e-3)


def drafted(session: Session[Any], right: Sequence[int], draw: np.random.Generator) -> None:
    """Checks one round of a guess that is right for some tokens, as a chain or in a tree."""
    good = [*right[: int(draw.integers(5))]]
    ids, parents = list(good), list(range(-1, len(good) - 1))
    for _ in range(int(draw.integers(4))):
        parents.append(int(draw.integers(-1, len(ids))))
        ids.append(int(draw.integers(300)))
    if not ids:
        return
    with session.sequence.forward(ids, parents) as branch:
        kept = int(draw.integers(len(good) + 1))
        assert branch.logits[: len(good)].argmax(axis=1).tolist() == [*right[1 : 1 + len(good)]]
        branch.commit(range(kept))


def goes_on(session: Session[Any], right: Sequence[int], draw: np.random.Generator) -> None:
    """Goes on by a step, or twice as often by a round of guesses."""
    if draw.integers(3):
        drafted(session, right, draw)
    else:
        assert generated(session, 1) == [right[0]]


@pytest.mark.sampled
@PARTS
def test_random_traces_answer_as_plain_decoding_does(
    engine: Engine, answers: list[list[int]], case: str, tmp_path: Path, part: int
) -> None:
    texts = [*map(AnsweredText, TEXTS, answers)]
    for seed in range(20 * part, 20 * part + TRACES[case]):
        traced(lambda: opened(engine), texts, goes_on, seed, tmp_path / "one")


@pytest.fixture(scope="module")
def chats(engine: Engine) -> list[AnsweredText]:
    """Returns three conversations, up to each of their answers; two have a changed message."""
    end, turns = min(engine.backend.model.stop_ids), list[AnsweredText]()
    for changed in (None, 1, 2):
        text = [*SYSTEM[:75], end]
        for turn in range(3):
            message = prompt(50 + 7 * turn, seed=turn)
            text += [*(message[::-1] if turn == changed else message), end, *ANSWERS]
            turns.append(AnsweredText([*text], followed(engine, text)))
            text += [*turns[-1].answer[: STEPS // 2], end]
    return turns


@pytest.mark.sampled
@PARTS
def test_random_traces_of_chats_answer_as_plain_decoding_does(
    engine: Engine, chats: list[AnsweredText], case: str, tmp_path: Path, part: int
) -> None:
    """Changes messages and writes answers again: the ends of turns are gone back to."""
    back = list[GoneBack]()
    for seed in range(20 * part, 20 * part + TRACES[case]):
        back += traced(lambda: opened(engine), chats, goes_on, seed, tmp_path / "one")
    # The share says little with few traces; without marks it is below half in the other parts.
    near = [
        step.lost < FOLD_TOKENS + len(ANSWERS) for step in back if step.tokens > 4 * FOLD_TOKENS
    ]
    assert len(near) < 40 or np.mean(near) > 0.5


@pytest.mark.slow
def test_a_prefix_is_computed_again_once(
    engine: Engine, answers: list[list[int]], case: str
) -> None:
    with opened(engine) as session:
        session.prefill(TEXTS[0])
        assert generated(session, STEPS) == answers[0]
        # The prompt's end is a place that is remembered; the system prompt's end is from then on.
        session.rollback(STEPS)
        # A delta net remembers few places, of a prompt where its last chunk begins.
        due, first, second = {
            "convolutions": (1, 127, len(SYSTEM)), "delta nets": (14, 128, 144)
        }[MIXERS[case]]  # fmt: skip
        assert len(session.sequence.due()) == due
        assert session.align(TEXTS[1]) == first
        assert generated(session, STEPS) == answers[1]
        assert session.align(TEXTS[0]) == second
        assert generated(session, STEPS) == answers[0]


@pytest.mark.sampled
@pytest.mark.parametrize("drafter", ["lookup", "recycle", "quantspec"])
def test_drafters_change_nothing(engine: Engine, answers: list[list[int]], drafter: str) -> None:
    for kv in ("fp", "8:8"):
        with (
            opened(engine, kv=kv) as plain,
            opened(engine, kv=kv, draft=lambda: drafter_named(drafter)) as session,
        ):
            for text in TEXTS:
                generations = []
                for peer in (plain, session):
                    peer.align(text)
                    generations.append(generated(peer, STEPS))
                assert generations[0] == generations[1]
                assert kv != "fp" or generations[0] == answers[TEXTS.index(text)]


def test_several_sequences_share_a_pass(engine: Engine) -> None:
    sessions = [opened(engine) for _ in TEXTS]
    for session, text in zip(sessions, TEXTS, strict=True):
        session.prefill(text)
    works = [session.sequence.branch() for session in sessions]
    branches = [work.__enter__() for work in works]
    passes = [
        branch.extend([5, 6, 7][:count]) for branch, count in zip(branches, (2, 1, 3), strict=True)
    ]
    together = [result.logits for result in forward_all([next(request) for request in passes])]
    for work in works:
        work.__exit__(None, None, None)
    for session, count, expected in zip(sessions, (2, 1, 3), together, strict=True):
        with session.sequence.forward([5, 6, 7][:count]) as branch:
            np.testing.assert_array_equal(branch.logits, expected)
        session.close()


def test_an_edit_computes_what_follows_again(
    engine: Engine, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    new = [*TEXTS[2][:200], 3, 4, 5, *TEXTS[2][207:]]
    caplog.set_level("INFO", logger="kvq_runtime")
    with opened(engine, edits=True) as session, opened(engine) as fresh:
        session.prefill(TEXTS[2])
        session.align(new, edits=True)
        assert session.sequence.encoding.edit_counts.recomputed_edits == 1
        assert f"{MIXERS[case]} remember" in caplog.text
        assert session.sequence.encoding.staleness.stale == 0
        fresh.prefill(new)
        assert generated(session, STEPS) == generated(fresh, STEPS)


def test_a_tight_budget_gives_up_pages_and_no_rows(engine: Engine) -> None:
    with opened(engine, kv="4:4") as roomy:
        least = roomy.sequence.cache.arena.spec.minimum_bytes
    with opened(engine, kv="4:4", kv_budget=least + 20_000) as session:
        session.prefill([*TEXTS[2], *TEXTS[0]])
        assert session.stats().kv_bytes_peak <= least + 20_000
        assert len(generated(session, STEPS)) == STEPS
        session.rollback(30)
        assert len(generated(session, STEPS)) == STEPS


@pytest.mark.slow
def test_a_long_text_stays_finite_however_it_is_read(shelf: Shelf, case: str) -> None:
    """Reads 8192 tokens in pieces of 64 and of 200, then steps: the same logits, no drift."""
    source = shelf.family(case, max_position_embeddings=16384)
    text, runs = prompt(300) * 28, []
    with Engine.open(shelf.exported(source, PLAIN), threads=1) as engine:
        for chunk in (64, 200):
            options = {"context_tokens": 9000, "chunk_tokens": chunk, "kv_budget": "9000tok"}
            with opened(engine, **options) as session:
                session.prefill(text[:8192])
                runs.append([session.sequence.encoding.logits])
                for token in text[8192:8200]:
                    session.prefill([token])
                    runs[-1].append(session.sequence.encoding.logits)
    first, second = (np.stack(logits) for logits in runs)
    assert np.isfinite(first).all()
    assert 0.5 < first.std() < 20
    np.testing.assert_allclose(first, second, atol=0.05 * first.std())


def test_what_going_back_computed_again_is_told(engine: Engine, case: str) -> None:
    end = engine.backend.model.stop_ids
    turn = [*SYSTEM, min(end), *prompt(90)]
    with opened(engine) as session:
        session.prefill([*turn, *prompt(100)[::-1]])
        generated(session, 20)
        assert session.stats().recomputed_tokens == 0
        session.align([*turn, *prompt(50)])
        stats = session.stats()
        # The place after the first turn was marked before it was passed.
        kept = len(session.sequence.tokens) - len(session.sequence.due())
        assert stats.recomputed_tokens == len(turn) - kept
        assert len(SYSTEM) + 1 - FOLD_TOKENS < kept <= len(turn)


def test_the_ends_of_several_turns_are_gone_back_to(engine: Engine) -> None:
    """Goes back in a prompt read at once: to the newest turn, the two before it, the first."""
    end = min(engine.backend.model.stop_ids)
    text, ends = list[int](), list[int]()
    for count in (*(len(SYSTEM), 90, 70, 60, 50), 40):
        text += [*prompt(count)[:: -1 if len(ends) % 2 else 1], end]
        ends.append(len(text))
    with opened(engine) as session, opened(engine) as fresh:
        session.prefill(text[:-1])
        for place in (ends[-2], ends[-3], ends[-4], ends[0]):
            kept = session.align([*text[:place], *prompt(30)])
            assert place - FOLD_TOKENS < kept <= place
            fresh.align([])
            fresh.prefill(session.tokens)
            assert generated(session, 6) == generated(fresh, 6)
        # One place is no longer marked: what follows the nearest place before it is computed again.
        session.align(text)
        advance(session.sequence)
        while session.sequence.due():
            advance(session.sequence)
        assert session.align([*text[: ends[1]], *prompt(30)]) >= ends[0] - FOLD_TOKENS


def test_a_graph_of_other_layers_is_refused(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    config, path = opened.config, opened.model_path
    check_graph(path, config, format_of=lambda name: opened.form(name).format)
    form = BlockFormat(bits=8, block=64)
    attends = [layer.attends for layer in config.layers].index(True)
    first, other = config.layers[0].mixer, config.layers[attends].mixer
    for change in ({0: other, attends: first}, {0: other}):
        layers = tuple(
            dataclasses.replace(layer, mixer=change.get(index, layer.mixer))
            for index, layer in enumerate(config.layers)
        )
        other = dataclasses.replace(config, layers=layers)
        with pytest.raises(BundleError, match="does not compute the model"):
            check_graph(path, other, format_of=lambda name: form)


@pytest.mark.sampled
def test_what_they_cannot_do_is_refused_by_name(
    engine: Engine, source: Path, tmp_path: Path
) -> None:
    config = engine.backend.bundle.config
    with pytest.raises(BackendError, match=f"{config.model_type} model cannot be predicted"):
        engine.backend.check_mode(Mode(predicted=(1, 2)))
    for options in (ExportOptions(predict="2"), ExportOptions(predict_with=tmp_path)):
        with pytest.raises(UsageError, match="predict is of models whose layers are"):
            export_model(source, tmp_path / "predicting", options)
    # llama.cpp computes none of these families, or not in these widths.
    wider = {
        "lfm2": "heads that together are not as wide",
        "lfm2_moe": "heads that together are not as wide",
        "qwen3_5_text": "delta nets whose keys are not as wide",
        "qwen3_next": "delta nets whose keys are not as wide",
    }
    why = wider.get(config.model_type, f"not of {config.model_type}")
    with pytest.raises(UnsupportedModelError, match=why):
        export_model(source, tmp_path / "gguf", ExportOptions(format="gguf"))
