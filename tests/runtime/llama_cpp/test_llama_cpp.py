"""llama.cpp itself, over GGUF files of any converter: answers, budgets, rollback, edits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.config import KvPlan
from kvq.errors import BackendError, BudgetError, CacheError, SnapshotError, UsageError
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_models.config import ModelConfig
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import family_for
from kvq_runtime import backends
from kvq_runtime.answer.drafter import Draft, Drafter, Round
from kvq_runtime.backends import SequencePass, sequence_pass
from kvq_runtime.backends.llama_cache import STATE_PREFIX
from kvq_runtime.config import Sampling, SessionRequest
from kvq_runtime.engine import Engine
from kvq_specdraft import drafter_named
from logits import generated, prompt
from pairs import relative_rms
from tiny import COMMON, make_llama_checkpoint

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from tiny_gguf import CONTEXT, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, open_engine  # noqa: E402

GREEDY = Sampling(temperature=0)
EXACT = {"k_bits": 16, "v_bits": 16}
Make = Callable[..., Path]


def all_logits(engine: Engine, ids: list[int], **options: Any) -> np.ndarray:
    with engine.session(**options) as session:
        return np.concatenate(list(session.logits(ids)))


# It computes the model


def tiny_config() -> ModelConfig:
    values = COMMON | {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    return family_for(values).config(values)


def reference_logits(path: Path, ids: list[int]) -> np.ndarray:
    """Computes the numpy forward pass over the file's own weights, restored to float32."""
    from gguf.quants import dequantize

    tensors = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    names = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "o": "attn_output"}
    names |= {"down": "ffn_down"}

    def halves(rows: np.ndarray) -> np.ndarray:
        """Reorders channels: llama.cpp rotates neighbouring channels, kvq i and i + D/2."""
        heads = rows.reshape(-1, 32, 2, HIDDEN)
        return heads.swapaxes(1, 2).reshape(rows.shape)

    def weight(name: str) -> np.ndarray:
        fixed = {"embed": "token_embd", "head": "output", "final_norm": "output_norm"}
        if name in fixed:
            return tensors[f"{fixed[name]}.weight"]
        _, layer, part = name.split(".")
        block = partial("blk.{}.{}.weight".format, layer)
        if part == "qkv":
            q, k, v = (tensors[block(f"attn_{letter}")] for letter in "qkv")
            return np.concatenate([halves(q), halves(k), v])
        if part == "gate_up":
            return np.concatenate([tensors[block("ffn_gate")], tensors[block("ffn_up")]])
        return tensors[block(names[part])]

    positions = np.arange(len(ids))
    return forward(tiny_config(), weight, np.array(ids), positions, PlainAttention(), slice(None))


# RMS of the difference from float32 arithmetic on the same weights, relative to the RMS. llama.cpp
# rounds activations to the block's 8 bits before it multiplies by quantised weights.
TYPE_TOLERANCE = {
    "F32": 0.002, "F16": 0.005, "BF16": 0.02, "Q8_0": 0.03, "Q4_0": 0.03, "Q4_1": 0.03,
    "Q5_0": 0.03, "Q5_1": 0.03,
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPE_TOLERANCE)
def test_files_of_any_type_compute_their_weights(make: Make, kind: str) -> None:
    path, ids = make(kind=kind), prompt(40)
    with open_engine(path) as engine:
        actual = all_logits(engine, ids, **EXACT)
        assert engine.files.weights_json()["types"][kind]["tensors"] >= 16
    expected = reference_logits(path, ids)
    assert relative_rms(actual, expected) < TYPE_TOLERANCE[kind]


# Mean KL divergence in nats from the 16-bit cache; rotated 4-bit caches are coarse.
@pytest.mark.parametrize(("kv", "nats"), {(8, 8): 0.003, (8, 4): 0.15, (4, 4): 0.4}.items())
def test_a_quantised_cache_stays_near(engine: Engine, kv: tuple[int, int], nats: float) -> None:
    ids = prompt(300)
    rows = []
    for k_bits, v_bits in ((16, 16), kv):
        logits = all_logits(engine, ids, k_bits=k_bits, v_bits=v_bits).astype(np.float64)
        rows.append(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    divergence = (np.exp(rows[0]) * (rows[0] - rows[1])).sum(axis=1).mean()
    assert 1e-6 < divergence < nats


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_chunks_change_nothing(engine: Engine, chunk_tokens: int) -> None:
    expected = all_logits(engine, prompt(70), **EXACT)
    actual = all_logits(engine, prompt(70), **EXACT, chunk_tokens=chunk_tokens)
    # llama.cpp computes one row in another order than many.
    assert relative_rms(actual, expected) < 0.01


def test_prefill_can_be_cancelled_and_goes_on(engine: Engine) -> None:
    calls, seen = iter([False, True]), []
    with engine.session(**EXACT, chunk_tokens=32) as session, engine.session(**EXACT) as whole:
        assert not session.prefill(prompt(100), cancel=lambda: next(calls))
        assert session.pending_tokens == 68
        assert session.prefill(progress=lambda done, total: seen.append((done, total)))
        assert seen == [(32, 68), (64, 68), (68, 68)]
        whole.prefill(prompt(100))
        assert generated(session, 10) == generated(whole, 10)


def test_text_and_end_tokens(engine: Engine) -> None:
    assert engine.model.stop_ids == {0, 2}
    with engine.session(seed=3) as session:
        session.prefill(engine.tokenizer.encode("def add(first, second)"))
        steps = list(session.generate(40, sampling=Sampling(temperature=2.0), stop_ids=[]))
        bias = Sampling(temperature=0, logit_bias={2: 1e4})
        last = list(session.generate(5, sampling=bias))
    text = engine.tokenizer.decode([step.token for step in steps])
    assert "".join(step.text for step in steps) == text
    assert [(step.token, step.finish_reason) for step in last] == [(2, "stop")]


# Rollback and files


def test_rollback_is_as_if_it_had_not_happened(engine: Engine) -> None:
    with engine.session() as session:
        session.prefill(prompt(60))
        state = session.sequence.cache.state()
        expected = generated(session, 20)
        session.rollback(20)
        assert session.sequence.cache.state() == state
        assert generated(session, 20) == expected
        session.rollback(45)
        session.prefill(prompt(60)[35:])
        assert generated(session, 20) == expected


def test_rejected_tokens_leave_no_trace(engine: Engine) -> None:
    """Does what verification of a draft does: forward five tokens, keep two."""
    config = engine.backend.session_config(SessionRequest(context_tokens=100))
    ids = np.array(prompt(40))
    kept = engine.backend.open_cache(config)
    other = engine.backend.open_cache(config)
    for cache, count in ((kept, 5), (other, 2)):
        push(engine, cache, ids[:30])
        push(engine, cache, ids[30 : 30 + count], commit=2)
    assert kept.tokens == other.tokens == 32
    np.testing.assert_array_equal(push(engine, kept, ids[35:]), push(engine, other, ids[35:]))


@pytest.mark.parametrize("name", ["lookup", "suffix", "rewrite"])
def test_drafts_of_chains_change_no_answer(engine: Engine, name: str) -> None:
    """Uses logits that are not nearly equal, as one row and many rows round differently."""
    prompt = [5, 9, 21, 33, 9, 21, 40] * 5
    bias = {token: 30.0 * (token in prompt) for token in range(60)}
    sampling = Sampling(temperature=0, logit_bias=bias)
    answers = []
    for draft in (None, lambda: drafter_named(name)):
        with engine.session(context_tokens=256, draft=draft) as session:
            session.prefill(prompt)
            steps = list(session.generate(60, sampling=sampling, stop_ids=()))
            answers.append([step.token for step in steps])
            stats = session.stats()
    assert answers[0] == answers[1]
    assert stats.rounds.accepted_tokens > 0


@pytest.mark.parametrize("name", ["auto", "recycle"])
def test_drafters_that_it_cannot_serve_are_refused_by_name(engine: Engine, name: str) -> None:
    message = f"draft {name} is not possible on the llama.cpp backend.*choose rewrite, lookup"
    with pytest.raises(BackendError, match=message):
        engine.session(context_tokens=64, draft=lambda: drafter_named(name))


def test_a_tree_of_drafts_is_refused(engine: Engine) -> None:
    class Tree(Drafter):
        def follow(self, kept: int, new: Any) -> None:
            pass

        def propose(self, room: int) -> Draft:
            return Draft(ids=(1, 2), parents=(-1, -1))

        def observe(self, outcome: Round) -> None:
            pass

    with engine.session(context_tokens=64, draft=Tree) as session:
        session.prefill([1, 2, 3])
        with pytest.raises(BackendError, match="drafts that branch are not possible"):
            list(session.generate(5, stop_ids=()))


def push(engine: Engine, cache: Any, ids: np.ndarray, commit: int | None = None) -> np.ndarray:
    """Makes one forward pass at the end of `cache` and returns the last token's logits."""
    cache.begin(len(ids))
    rows = sequence_pass(cache, np.asarray(ids), np.array([len(ids) - 1]))
    logits = engine.backend.forward((rows,))[0]
    cache.commit(range(len(ids) if commit is None else commit))
    return logits[0]


@pytest.mark.parametrize("back", [3, 180, 400])
def test_windows_roll_back_exactly_or_compute_again(windowed: Engine, back: int) -> None:
    with windowed.session(chunk_tokens=32, context_tokens=900) as session:
        session.prefill(prompt(700))
        expected = generated(session, 12)
        session.rollback(12 + back)
        # 256 cells remain of 712 tokens.
        assert session.sequence.cache.tokens == (700 - back if back < 400 else 0)
        session.prefill(prompt(700)[700 - back :])
        assert generated(session, 12) == expected


def test_windows_count_as_if_they_kept_every_token(windowed: Engine) -> None:
    token_bytes = 7 * 2 * KV_HEADS * 64 // 32 * 34
    with windowed.session(chunk_tokens=32, context_tokens=1000) as session:
        session.prefill(prompt(500))
        stats = session.stats()
        assert stats.kv_budget == stats.kv_bytes_peak == 1024 * token_bytes
        assert stats.kv_bytes == 500 * token_bytes
        assert (stats.held.mean_k_bits, stats.held.mean_v_bits) == (8, 8)
        assert stats.held.evicted_share == 0.0


@pytest.mark.parametrize("name", ["engine", "windowed"])
def test_a_saved_session_goes_on_the_same(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    engine, hot = request.getfixturevalue(name), Sampling(temperature=1.5)
    options = {"chunk_tokens": 32, "context_tokens": 500}
    with engine.session(seed=1, **options) as session, engine.session(seed=2, **options) as other:
        session.prefill(prompt(330))
        generated(session, 9)
        session.save(tmp_path / "one")
        expected = [step.token for step in session.generate(30, sampling=hot, stop_ids=[])]
        other.load(tmp_path / "one")
        assert other.tokens == session.tokens[:339]
        assert [step.token for step in other.generate(30, sampling=hot, stop_ids=[])] == expected


def test_a_damaged_or_foreign_snapshot_changes_nothing(
    engine: Engine, windowed: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "one"
    with engine.session() as session:
        session.prefill(prompt(50))
        expected = generated(session, 5)
        session.save(path)
        with windowed.session() as other, pytest.raises(SnapshotError, match="another model"):
            other.load(path)
        with engine.session(k_bits=4) as other, pytest.raises(SnapshotError, match="another plan"):
            other.load(path)
        content = path.read_bytes()
        path.write_bytes(content[:-40] + bytes(8) + content[-32:])
        with pytest.raises(SnapshotError, match="altered"):
            session.load(path)
        session.rollback(5)
        assert generated(session, 5) == expected


def test_hostile_cache_states_are_refused(engine: Engine) -> None:
    """Gives llama.cpp what a forged snapshot with a right checksum would bring."""
    with engine.session(context_tokens=200) as session:
        session.prefill(prompt(50))
        cache = session.sequence.cache
        state = cache.state()
        rows_at = 8 + 16 + 50 * 12
        heads = [*range(8, 8 + 48), *range(rows_at, rows_at + 24)]
        damaged = [state[:cut] for cut in (0, 7, 8, 20, 100, len(state) - 1)]
        damaged += [state + bytes(4), STATE_PREFIX.pack(51) + state[8:], b"\xff" * 8 + state[8:]]
        damaged += [changed(state, at, 0xFF) for at in heads]
        refused = 0
        for content in damaged:
            try:
                cache.load_state(content)
            except SnapshotError:
                refused += 1
                assert cache.state() == state
            cache.load_state(state)
        assert refused >= 40
        assert cache.state() == state


def changed(content: bytes, at: int, value: int) -> bytes:
    return content[:at] + bytes([value]) + content[at + 1 :]


# Bytes


@pytest.mark.parametrize(("k_bits", "v_bits"), [(16, 16), (8, 8), (8, 4), (4, 4)])
def test_bytes_are_llama_cpps_own(engine: Engine, k_bits: int, v_bits: int) -> None:
    """A state holds the same rows: 6 words, 3 per token, a 12-byte head for K and V of a layer."""
    with engine.session(k_bits=k_bits, v_bits=v_bits, context_tokens=1000) as session:
        stats = session.stats()
        session.prefill(prompt(10))
        state = session.sequence.cache.state()
    rows = len(state) - 8 - 24 - 10 * 12 - 4 * 12
    assert rows == 10 * stats.bytes_per_token
    assert stats.kv_bytes_peak == stats.kv_budget == 1024 * stats.bytes_per_token


def test_a_budget_buys_the_longest_context_that_fits(engine: Engine) -> None:
    per_cells = 256 * 2 * 2 * 128 // 32 * 34
    for kib, cells in ((3 * per_cells / 1024, 3), (3.9 * per_cells / 1024, 3), (5000, 4)):
        with engine.session(kv_budget=f"{kib}KiB") as session:
            assert session.config.context_tokens == 256 * cells
            stats = session.stats()
            assert stats.kv_bytes_peak == cells * per_cells <= stats.kv_budget == int(kib * 1024)
    with engine.session(kv_budget="300tok") as session:
        assert session.config.context_tokens == 300
        assert session.stats().kv_budget == 2 * per_cells
        session.prefill(prompt(300))
        with pytest.raises(UsageError, match="raise context_tokens and kv_budget"):
            session.prefill([7])
    with engine.session(kv_budget="50%") as session:
        assert session.config.context_tokens == 768
    with pytest.raises(BudgetError, match=rf"context of 256 tokens takes .*\({per_cells} bytes\)"):
        engine.session(kv_budget=per_cells - 1)
    with pytest.raises(BudgetError, match=f"{2 * per_cells} bytes"):
        engine.session(kv_budget=2 * per_cells - 1, context_tokens=257)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"v_bits": 2}, r"values of 2 bits \(kv or v_bits\) are not possible on .*: choose 8 or 4"),
        ({"k_bits": 2, "v_bits": 2}, "keys of 2 bits .* are not possible on the llama.cpp backend"),
        ({"policy": "oldest"}, "policy oldest is not possible on the llama.cpp backend"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    engine: Engine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        engine.session(**options)


def test_odd_heads_take_no_quantised_cache(make: Make) -> None:
    with open_engine(make(head_dim=80)) as engine:
        with pytest.raises(
            BackendError, match=r"heads of 80 channels, no multiple of 32; .*kv=.fp."
        ):
            engine.session()
        assert all_logits(engine, prompt(20), **EXACT).std() > 1


def test_mixed_embeddings_are_refused(engine: Engine) -> None:
    cache = engine.backend.open_cache(engine.backend.session_config(SessionRequest()))
    rows = SequencePass(
        cache=cache,
        ids=np.array([[7, 8]]),
        weights=np.array([[0.5, 0.5]], np.float32),
        positions=np.array([0]),
        logit_rows=np.array([0]),
    )
    with pytest.raises(BackendError, match="mixed embeddings are not possible"):
        engine.backend.forward((rows,))


def test_a_closed_engine_refuses_instead_of_crashing(make: Make) -> None:
    engine = open_engine(make())
    session, tokenizer = engine.session(), engine.tokenizer
    session.prefill(prompt(5))
    engine.close()
    with pytest.raises(CacheError, match="this session is closed"):
        session.prefill([7])
    with pytest.raises(BackendError, match="this model is closed"):
        tokenizer.encode("text")
    session.close()


def test_an_edit_computes_again_what_follows(engine: Engine) -> None:
    with engine.session(**EXACT) as session, engine.session(**EXACT) as afresh:
        session.prefill(prompt(60))
        with pytest.raises(BackendError, match="an edit in the middle is not possible"):
            session.sequence.cache.edit(20, 25, 3)
        session.edit(20, 25, [7, 8, 9])
        session.prefill()
        afresh.prefill([*prompt(60)[:20], 7, 8, 9, *prompt(60)[25:]])
        assert session.tokens == afresh.tokens
        assert generated(session, 8) == generated(afresh, 8)
        assert session.sequence.encoding.edit_counts.recomputed_edits == 1


# A bundle with a GGUF file


def test_a_bundle_opens_as_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    options = ExportOptions(
        format="both",
        gguf_type="q8_0",
        kv=KvPlan(k_bits=4, v_bits=2),
        quality=False,
        weights=WeightFormat(bits=8),
    )
    folder = export_model(source, tmp_path / "both", options).path
    rows = {}
    for name, backend in (("auto", "onnx"), ("llama.cpp", "llama.cpp")):
        if backends.missing(backend):
            pytest.skip(f"{backend}: {backends.missing(backend)}")
        with Engine.open(folder, threads=1, backend=name) as engine:
            assert engine.backend.name == backend
            assert (engine.model.name, engine.model.stop_ids) == ("both", {0, 2})
            assert (engine.model.kv.k_bits, engine.model.kv.v_bits) == (
                (4, 2) if backend == "onnx" else (4, 4)
            )
            ids = engine.tokenizer.encode("for index in range(10):")
            rows[backend] = all_logits(engine, ids, **EXACT)
    # Both round weights and activations to 8 bits, in different blocks.
    assert relative_rms(rows["llama.cpp"], rows["onnx"]) < 0.05
    assert [record.message for record in caplog.records] == [
        "the KV plan of both is 4:2; llama.cpp has no 2-bit types, so its default is 4:4"
    ]


def test_a_bundle_of_a_gguf_file_alone(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    options = ExportOptions(
        format="gguf", gguf_type="q8_0", quality=False, kv=KvPlan(k_bits=8, v_bits=4)
    )
    folder = export_model(source, tmp_path / "alone", options).path
    with Engine.open(folder, threads=1) as engine, engine.session() as session:
        assert engine.backend.name == "llama.cpp"
        assert (session.config.plan.k_bits, session.config.plan.v_bits) == (8, 4)
    with pytest.raises(BackendError, match=r"the onnx backend does not read .*; llama.cpp can"):
        Engine.open(folder, backend="onnx")
