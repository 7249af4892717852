"""Models with recurrent states besides their cache, through llama.cpp.

A state holds all tokens so far, so llama.cpp takes none of them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tiny
from kvq.errors import BackendError
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import read_checkpoint
from kvq_runtime.engine import Engine
from kvq_specdraft import drafter_named
from logits import divergence, generated, prompt

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from exported_gguf import export

EXACT = {"k_bits": 16, "v_bits": 16}
SQUARE_STATES = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
HYBRIDS = {
    "lfm2": {"head_dim": 32},
    "qwen3-5": SQUARE_STATES,
    "qwen3-5-moe": SQUARE_STATES,
    "qwen3-next": {**SQUARE_STATES, "mlp_only_layers": []},
}
# State of a layer that does not attend: two rows of a convolution, or three of a delta net and a
# matrix for each head.
_NET = 4 * (3 * (2 * 2 + 4) * 32 + 4 * 32 * 32)
STATE_BYTES = {
    "lfm2": 3 * 4 * 2 * 128,
    "qwen3-5": 3 * _NET,
    "qwen3-5-moe": 2 * _NET,
    "qwen3-next": 2 * _NET,
}


@pytest.fixture(scope="module", params=HYBRIDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrids") / request.param
    return tiny.make_checkpoint(request.param, folder, **HYBRIDS[request.param])


@pytest.fixture(scope="module")
def hybrid(source: Path) -> Iterator[Engine]:
    with Engine(export(source, "f16"), threads=1, backend="llama.cpp") as engine:
        yield engine


def test_it_computes_the_model_token_by_token(source: Path, hybrid: Engine) -> None:
    ids = prompt(90)
    _, config, _ = read_checkpoint(source)
    weights = tiny.checkpoint_weights(source)
    expected = forward(config, weights, np.array(ids), np.arange(90), PlainAttention(), slice(None))
    for chunk_tokens in (1, 64):
        with hybrid.session(**EXACT, chunk_tokens=chunk_tokens) as session:
            actual = np.concatenate(list(session.logits(ids)))
        nats = [divergence(expected[row : row + 1], actual[row : row + 1]) for row in range(90)]
        # Rounding may send a few rows to other experts.
        assert np.mean(sorted(nats)[:-5]) < 6e-5
    with hybrid.session(**EXACT) as session:
        session.prefill(ids[:60])
        assert generated(session, 1) == [int(expected[59].argmax())]


def test_going_back_computes_again_what_a_state_cannot_give_back(hybrid: Engine) -> None:
    with hybrid.session(**EXACT) as session:
        session.prefill(prompt(60))
        expected = generated(session, 12)
        session.rollback(12)
        assert session.sequence.cache.tokens == 0
        assert session.sequence.encoding.recomputed_tokens == 60
        assert generated(session, 12) == expected
        session.rollback(0)
        assert session.sequence.cache.tokens >= 71


def test_a_state_counts_as_bytes_of_the_session(source: Path, hybrid: Engine) -> None:
    with hybrid.session(**EXACT, context_tokens=256) as session:
        stats = session.stats()
        assert stats.kv_bytes_peak == 256 * stats.bytes_per_token + STATE_BYTES[source.name]
        assert stats.kv_bytes == STATE_BYTES[source.name]


def test_a_saved_session_goes_on_the_same(hybrid: Engine, tmp_path: Path) -> None:
    with hybrid.session(**EXACT) as session, hybrid.session(**EXACT) as other:
        session.prefill(prompt(50))
        generated(session, 5)
        session.save(tmp_path / "one")
        other.load(tmp_path / "one")
        assert other.sequence.cache.tokens == session.sequence.cache.tokens > 0
        assert generated(other, 10) == generated(session, 10)


def test_drafts_are_refused_by_name(hybrid: Engine) -> None:
    message = "draft lookup is not possible with this model on the llama.cpp backend.*choose none"
    with pytest.raises(BackendError, match=message):
        hybrid.session(context_tokens=64, draft=lambda: drafter_named("lookup"))
