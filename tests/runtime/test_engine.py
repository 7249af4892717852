"""Engine and sessions over a real bundle: both backends, budgets, rollback, files, long rope."""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq import native_library
from kvq.errors import BackendError, BudgetError, SnapshotError, UsageError, argument
from kvq_apps.evaluation.text import kl_divergence
from kvq_apps.settings.flags import format_error
from kvq_runtime.answer.generation import Step
from kvq_runtime.answer.healing import heal
from kvq_runtime.backends import BACKENDS, PREFERENCE, missing
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.session.session import Session
from logits import generated, log_softmax, prompt
from shelf import EIGHT, Shelf
from tiny import make_llama_checkpoint

GREEDY = Sampling(temperature=0)
# Mean KL divergence between the backends by (K, V) bits. The onnx backend rounds activations to
# 8 bits and the reference does not; coarse pages turn that into other codes here and there.
MEAN_DIVERGENCE = {(16, 16): 0.006, (8, 8): 0.008, (4, 2): 0.05}


@pytest.fixture(scope="module")
def folder(shelf: Shelf) -> Path:
    return shelf.bundle(EIGHT)


# The backends over a bundle's graph; `test_llama_cpp.py` is about the other one.
GRAPH_BACKENDS = ("onnx", "float")


@pytest.fixture(scope="module", params=GRAPH_BACKENDS)
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    reason = missing(request.param)
    if reason:
        pytest.skip(reason)
    with Engine.open(folder, backend=request.param, threads=2) as engine:
        yield engine


def test_every_row_of_the_table_is_preferred_somewhere() -> None:
    assert set(PREFERENCE) == set(BACKENDS)


def log_probabilities(folder: Path, name: str, ids: list[int], **options: int) -> np.ndarray:
    """Returns those of every token of `ids`, float64 [T, V]; skips a backend that cannot run."""
    if missing(name):
        pytest.skip(f"{name}: {missing(name)}")
    with Engine.open(folder, backend=name) as engine, engine.session(**options) as session:
        return log_softmax(np.concatenate(list(session.logits(ids))))


@pytest.mark.parametrize(("kv", "nats"), MEAN_DIVERGENCE.items())
def test_backends_agree(folder: Path, kv: tuple[int, int], nats: float) -> None:
    options = {"k_bits": kv[0], "v_bits": kv[1], "chunk_tokens": 64}
    rows = [log_probabilities(folder, name, prompt(400), **options) for name in GRAPH_BACKENDS]
    assert rows[0].std() > 1
    assert kl_divergence(rows[1], rows[0]).mean() < nats


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_an_exact_cache_does_not_depend_on_chunks(engine: Engine, chunk_tokens: int) -> None:
    ids = prompt(70)
    exact = {"k_bits": 16, "v_bits": 16}
    with (
        engine.session(**exact) as whole,
        engine.session(**exact, chunk_tokens=chunk_tokens) as cut,
    ):
        expected = np.concatenate(list(whole.logits(ids)))
        np.testing.assert_allclose(np.concatenate(list(cut.logits(ids))), expected, atol=5e-3)


def test_prefill_and_steps_give_the_same_tokens_as_logits(engine: Engine) -> None:
    ids = prompt(40)
    with engine.session(k_bits=16, v_bits=16) as session:
        session.prefill(ids)
        new = generated(session, 12)
    with engine.session(k_bits=16, v_bits=16) as check:
        rows = np.concatenate(list(check.logits([*ids, *new])))
    assert rows[len(ids) - 1 : -1].argmax(1).tolist() == new


SOUGHT = 310


def _looks_at_itself(tensors: dict[str, np.ndarray]) -> None:
    """Makes a first layer where token `SOUGHT`, alone on one axis, finds only itself."""
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = embedding[SOUGHT] = 0
    embedding[SOUGHT, 0] = 3
    for side in ("q", "k"):
        tensors[f"model.layers.0.self_attn.{side}_proj.weight"][:, 0] = 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnx", "float"])
def test_what_weighs_nothing_is_missed_by_no_logit(shelf: Shelf, name: str) -> None:
    """Looks for a token so hard that other pages stand 30 octaves below; nearer ones count."""
    if missing(name):
        pytest.skip(f"{name}: {missing(name)}")
    checkpoint = shelf.once(
        "sharp",
        "a token that finds itself",
        lambda path: make_llama_checkpoint(
            path, max_position_embeddings=1024, change=_looks_at_itself
        ),
    )
    logits, tokens = [], []
    with Engine.open(shelf.exported(checkpoint), backend=name) as engine:
        for read in ("all", "blasst:octaves=30", "blasst:octaves=0.01"):
            with engine.session(kv="8:8", kv_read=read) as session:
                session.prefill(prompt(600))
                steps = [SOUGHT, *prompt(3, seed=1), SOUGHT]
                rows = [next(iter(session.logits([token]))) for token in steps]
                logits.append(np.concatenate(rows))
                tokens.append(generated(session, 12))
    largest = np.abs(logits[0]).max()
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-5 * largest)
    assert tokens[0] == tokens[1]
    assert np.abs(logits[2] - logits[0]).max() > 1e-3 * largest


def test_rollback_is_as_if_it_had_not_happened(engine: Engine) -> None:
    with engine.session(k_bits=16, v_bits=16) as session:
        session.prefill(prompt(30))
        expected = generated(session, 20)
        session.rollback(20)
        assert generated(session, 20) == expected
        session.rollback(25)
        session.prefill(prompt(30)[25:])
        assert generated(session, 20) == expected


def after_rollback(engine: Engine, place: int, farthest: int, **session: Any) -> np.ndarray:
    """Returns logits of tokens after `place`, in a session that went on to `farthest` before."""
    ids = prompt(420)
    with engine.session(kv="4:2", chunk_tokens=64, context_tokens=512, **session) as opened:
        opened.prefill(ids[:64])
        for token in ids[64:farthest]:
            opened.prefill([token])
        opened.rollback(farthest - place)
        return np.concatenate(list(opened.logits(ids[400:403])))


def test_a_rollback_is_exact_to_the_edge_of_a_page(engine: Engine) -> None:
    """Checks that closed pages stay closed: at their edge, they are the whole of the text.

    With a floating-point tail nothing changes until a page closes, and then always the same.
    """
    edge = 4 + 64
    tight = {"kv_budget": "300tok"}  # bytes for no tail beyond the newest page
    never = after_rollback(engine, edge, edge, **tight)
    for farthest in (edge + 3, edge + 70):
        np.testing.assert_array_equal(after_rollback(engine, edge, farthest, **tight), never)
    inside = after_rollback(engine, edge + 5, edge + 5, **tight)
    assert (after_rollback(engine, edge + 5, edge + 70, **tight) != inside).any()
    never = after_rollback(engine, edge, edge)
    np.testing.assert_array_equal(after_rollback(engine, edge, edge + 63), never)
    far = after_rollback(engine, edge, edge + 64)
    assert (far != never).any()
    np.testing.assert_array_equal(after_rollback(engine, edge, edge + 140), far)


def test_a_saved_session_goes_on_the_same(engine: Engine, tmp_path: Path) -> None:
    hot = Sampling(temperature=1.5)
    with engine.session(seed=1) as session, engine.session(seed=2) as other:
        session.prefill(prompt(200))
        # Its generator has moved on from its seed.
        list(session.generate(9, sampling=hot, stop_ids=[]))
        session.save(tmp_path / "one.kvq")
        expected = [step.token for step in session.generate(30, sampling=hot, stop_ids=[])]
        other.prefill(prompt(50, seed=8))
        other.load(tmp_path / "one.kvq")
        assert [step.token for step in other.generate(30, sampling=hot, stop_ids=[])] == expected
        assert other.tokens == session.tokens
    with (
        engine.session(kv_budget="1MiB") as larger,
        pytest.raises(SnapshotError, match="another budget_bytes"),
    ):
        larger.load(tmp_path / "one.kvq")
    with engine.session(k_bits=8) as wider, pytest.raises(SnapshotError, match="another plan"):
        wider.load(tmp_path / "one.kvq")


def test_a_session_of_another_page_table_is_refused_by_name(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads a session that was saved when tables had fewer rows."""
    tight = {"context_tokens": 512, "kv_budget": "184KiB"}
    with engine.session(**tight) as session:
        session.prefill([1, 2, 3])
        session.save(tmp_path / "session")
    monkeypatch.setattr("kvq.geometry.TABLE_SHARE", 0.01)
    words = r"another evidence: .* \d+ columns, this session has .* \d+ columns; open"
    with engine.session(**tight) as other, pytest.raises(SnapshotError, match=words):
        other.load(tmp_path / "session")


def test_a_tight_budget_is_never_exceeded(engine: Engine) -> None:
    with engine.session(k_bits=8, v_bits=8, kv_budget="200tok") as session:
        session.prefill(prompt(400))
        generated(session, 60)
        stats = session.stats()
    with engine.session(k_bits=8, v_bits=8, kv_budget="500tok") as roomy:
        roomy.prefill(prompt(400))
        free = roomy.stats()
        assert free.kv_bytes_peak > stats.kv_budget
        # 6 pages of 64 tokens are closed; 12 newer tokens and 4 sinks are not.
        assert free.held.mean_k_bits == free.held.mean_v_bits == (6 * 64 * 8 + 16 * 16) / 400
        assert free.held.evicted_share == 0
    assert stats.kv_bytes <= stats.kv_bytes_peak <= stats.kv_budget
    assert 0 < stats.held.mean_k_bits < 16
    assert stats.held.evicted_share < 1
    assert stats.held.mean_v_bits < free.held.mean_v_bits or stats.held.evicted_share > 0
    assert stats.bytes_per_token == 2 * 2 * (64 + 64 + 2 + 2 + 0.25)


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        ({"kv_budget": "200KiB"}, (8, 8)),
        ({"kv_budget": "38%"}, (8, 8)),
        ({"kv_budget": "200KiB", "policy": "budget:prior=1"}, (8, 8)),
        ({"kv_budget": "200KiB", "kv": "4:4"}, (4, 4)),
        ({"kv_budget": "200KiB", "v_bits": 2}, (4, 2)),
        ({"kv_budget": "200KiB", "policy": "streaming"}, (4, 4)),
        ({"kv_budget": "200tok"}, (4, 4)),
        ({"kv_budget": "16MiB"}, (4, 4)),  # holds all of the context
        ({}, (4, 4)),
    ],
)
def test_what_must_give_way_begins_at_8_bits_where_nobody_chose_widths(
    engine: Engine, options: dict[str, Any], widths: tuple[int, int]
) -> None:
    with engine.session(context_tokens=512, **options) as session:
        plan = session.config.plan
        assert (plan.k_bits, plan.v_bits) == widths


@pytest.mark.parametrize("policy", [None, "oldest", "snapkv"])
def test_a_budget_in_tokens_holds_them_and_the_probes(engine: Engine, policy: str | None) -> None:
    with engine.session(kv_budget="300tok", policy=policy) as session:
        session.prefill(prompt(300))
        stats = session.stats()
        assert stats.held.evicted_share == 0
        # 4 pages are closed; 40 newer tokens and 4 sinks are not.
        assert stats.held.mean_k_bits == (256 * 4 + 44 * 16) / 300
        assert stats.held.mean_v_bits == (256 * 4 + 44 * 16) / 300
        session.prefill(prompt(200))
        # The context is longer than the budget: with 7 pages closed something is given up.
        more = session.stats()
        assert more.held.evicted_share > 0 or more.held.mean_v_bits < (448 * 4 + 52 * 16) / 500


def test_the_long_rotary_table_is_chosen_once_by_the_context(shelf: Shelf) -> None:
    folder = shelf.exported(shelf.family("phi3-longrope"), EIGHT)
    rows = {
        (name, context): log_probabilities(
            folder, name, prompt(48), context_tokens=context, k_bits=16, v_bits=16
        )
        for name in GRAPH_BACKENDS
        for context in (64, 65)
    }
    for context, other in ((64, 65), (65, 64)):
        expected = rows["float", context]
        assert kl_divergence(expected, rows["onnx", context]).mean() < 0.01
        assert kl_divergence(expected, rows["onnx", other]).mean() > 0.2


def test_defaults_come_from_the_bundle(engine: Engine) -> None:
    with engine.session() as session:
        assert session.config.context_tokens == 512
        assert (session.config.plan.k_bits, session.config.plan.v_bits) == (4, 4)
        # everything the context can hold stays at the plan's widths
        assert session.config.budget_bytes < 512 * 1024
    with engine.session(kv_budget="512tok") as same:
        assert same.config.budget_bytes == session.config.budget_bytes


def test_a_session_reports_what_it_holds(engine: Engine) -> None:
    """Expects no float tail where the budget is below the context, and chunks that fit pages."""
    with engine.session(chunk_tokens=100) as whole:
        assert (whole.config.plan.tail_tokens, whole.config.chunk_tokens) == (64, 100)
    with pytest.raises(BudgetError, match=r"cannot hold .* \(\d+ bytes\) can") as refused:
        engine.session(kv_budget=4096)
    least = int(re.findall(r"\((\d+) bytes\)", str(refused.value))[0])
    with engine.session(kv_budget=least) as tight:
        assert (tight.config.plan.tail_tokens, tight.config.chunk_tokens) == (0, 64)
        assert tight.config.plan.k_bits == 4
        tight.prefill([1 + index % 200 for index in range(300)])
        assert tight.stats().kv_bytes_peak <= least


def test_refusals_name_numbers(engine: Engine, folder: Path) -> None:
    with pytest.raises(
        UsageError, match=r"backend 'cuda' is not known; choose auto, float, llama.cpp, onnx"
    ):
        Engine.open(folder, backend="cuda")
    with engine.session() as session:
        session.prefill([5])
        with pytest.raises(UsageError, match="seed -1"):
            session.reseed(-1)


def test_a_context_beyond_the_models_warns_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.session(context_tokens=600).close()
    assert [record.message for record in caplog.records] == [
        "a context of 600 tokens is more than the 512 this model was made for; expect worse "
        "text beyond that"
    ]


def test_auto_takes_the_first_that_runs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Engine.open(folder) as engine:
        assert engine.backend.name == next(name for name in GRAPH_BACKENDS if not missing(name))
    assert len(caplog.records) == (0 if missing("onnx") is None else 1)


def test_a_missing_library_is_a_reason_not_a_crash(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "why_not", lambda: "it was not built")
    with pytest.raises(BackendError, match="the onnx backend cannot run: it was not built"):
        Engine.open(folder, backend="onnx")
    with pytest.raises(BackendError, match="cannot run here: it was not built"):
        Engine.open(folder)


def test_completing_a_text_heals_it_as_a_session_would(engine: Engine) -> None:
    text = "the cache holds pag"
    ids, begin_with = heal(engine.tokenizer, engine.tokenizer.encode(text, start=True))
    assert begin_with
    with engine.session() as session:
        session.prefill(ids)
        steps = list(session.generate(12, sampling=GREEDY, begin_with=begin_with))
    assert engine.complete(text, max_tokens=12, sampling=GREEDY) == "".join(
        step.text for step in steps
    )
    assert list(engine.complete(text, 12, stream=True, sampling=GREEDY)) == steps
    with engine.session() as session:
        session.prefill(ids)
        forced = list(session.generate(12, sampling=GREEDY, begin_with=begin_with + b"q"))
    options = {"sampling": GREEDY, "begin_with": b"q", "stream": True}
    assert list(engine.complete(text, 12, **options)) == forced != steps


def test_a_chat_is_the_prompt_its_template_makes(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with engine.session(seed=4) as session:
        session.prefill(engine.tokenizer.chat(messages))
        steps = list(session.generate(10))
    options = {"seed": 4}
    assert list(engine.chat(messages, 10, stream=True, session=options)) == steps
    with pytest.raises(UsageError, match="there are no messages to answer"):
        engine.chat([])
    assert engine.chat("hello", 10, session=options) == "".join(step.text for step in steps)


def test_a_chat_goes_on_with_the_last_message(engine: Engine) -> None:
    question = {"role": "user", "content": "hello"}
    messages = [question, {"role": "assistant", "content": "so"}]
    options = {"seed": 4}

    def steps(ids: Sequence[int]) -> list[Step]:
        with engine.session(seed=4) as session:
            session.prefill(ids)
            return list(session.generate(10))

    again = steps(engine.tokenizer.chat(messages))
    begun = [*engine.tokenizer.chat([question]), *engine.tokenizer.encode("so")]
    assert steps(begun) != again
    asked_for = {"stream": True, "session": options}
    assert list(engine.chat(messages, 10, **asked_for)) == steps(begun)
    assert list(engine.chat(messages, 10, continue_final_message=False, **asked_for)) == again
    with pytest.raises(UsageError, match="continue_final_message True is not possible"):
        engine.chat([question], continue_final_message=True)


def test_what_an_answer_asks_of_its_session_reaches_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Session] = []
    real = Engine.session
    monkeypatch.setattr(
        Engine, "session", lambda *a, **options: opened.append(real(*a, **options)) or opened[-1]
    )
    engine.complete("the", 2, session={"kv": "8:2", "v_bits": 4, "kv_budget": "1MiB"})
    (session,) = opened
    assert (session.config.plan.k_bits, session.config.plan.v_bits) == (8, 4)
    assert session.config.budget_bytes == 1 << 20
    with pytest.raises(UsageError, match="this session is closed"):
        session.prefill([5])
    with pytest.raises(TypeError, match="kv_budgt"):
        engine.complete("the", session={"kv_budgt": "1MiB"})
    with pytest.raises(UsageError, match=r"kv '4/2' is not possible: write K:V widths"):
        engine.session(kv="4/2")


def test_an_engine_says_what_it_is_and_when_it_is_closed(folder: Path) -> None:
    engine = Engine.open(folder, backend="float", threads=2)
    shown = "'bundle': float, threads=2, context_tokens=512, kv=4:4>"
    assert repr(engine) == f"<kvq.Engine {shown}"
    engine.close()
    assert repr(engine) == f"<kvq.Engine {shown.replace(' ', ' closed, ', 1)}"
    for use in (engine.session, lambda: engine.complete("a"), lambda: engine.chat("a")):
        with pytest.raises(UsageError, match="this engine is closed; open the model again"):
            use()


def test_a_session_of_a_closed_engine_says_so(bundle: str) -> None:
    with Engine.open(bundle, threads=1) as engine, engine.session() as session:
        engine.close()
        with pytest.raises(BackendError, match="this model is closed; open it again"):
            session.prefill([7])


def test_what_python_asks_for_is_named_as_python_names_it(bundle: str) -> None:
    with Engine.open(bundle, threads=1) as engine:
        for wrong, complaint in (
            (lambda: engine.complete("a", temperature=0), "sampling=Sampling(temperature=...)"),
            (lambda: engine.complete("a", tokens=3), "complete takes no argument 'tokens'; leave"),
            (lambda: engine.complete(5), "complete takes a text; int was given"),
            (lambda: engine.chat(5), "chat takes a text or messages"),
            (lambda: engine.chat(["hi"]), "chat takes a text or messages"),
            (lambda: engine.complete("a", session={"budget": 3}), "no argument 'budget'"),
            (lambda: engine.complete("a", 0), "max_tokens 0 is not possible"),
            (lambda: engine.complete("a", sampling=0.5), "sampling is a Sampling"),
            (lambda: engine.session(kv="3:2"), "kv 3:2 is not possible"),
            (lambda: Sampling(temperature=-1), "temperature -1 is not possible"),
            (lambda: engine.session().prefill(5), "prefill takes token ids or a text"),
        ):
            with pytest.raises(UsageError) as caught:
                wrong()
            assert complaint in str(caught.value)
            assert "--" not in str(caught.value)
        with pytest.raises(UsageError) as caught:
            Sampling(temperature=-1)
        assert format_error(caught.value).startswith("--temp -1 is not possible")
        assert (caught.value.about, caught.value.value) == ("temperature", -1)
        assert caught.value.possible == "give 0 (greedy) or more"


def test_a_message_names_arguments_as_its_reader_knows_them() -> None:
    longer, unquantized = argument("context_tokens"), argument("kv", "fp")
    error = BackendError(f"raise {longer} or `kvq serve --kv fp`; `{unquantized}` does, --out not")
    assert str(error) == 'raise context_tokens or `kvq serve --kv fp`; `kv="fp"` does, --out not'
    assert (
        format_error(error) == "raise --ctx-size or `kvq serve --kv fp`; `--kv fp` does, --out not"
    )
    assert error.about == "context_tokens"
    assert error.message_for(lambda name, value: f"<{name} {value}>").startswith(
        "raise <context_tokens >"
    )
