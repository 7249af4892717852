"""Passes that read less than the whole model: fewer bits, fewer layers; and what shares a pass."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvq import native
from kvq.errors import BackendError
from kvq_export.config import WeightFormat
from kvq_runtime.backends import WHOLE, Mode
from kvq_runtime.config import SessionRequest
from kvq_runtime.engine import Engine
from kvq_runtime.passes import Call, forward_all, run
from kvq_runtime.sequence import TokenSequence
from logits import far
from rule_backend import RULE_LOGIT, RuleBackend
from shelf import EIGHT, PLAIN, Shelf

HI = Mode(view="hi")
PROMPT = np.random.default_rng(3).integers(6, 300, 200).tolist()
needs_native = pytest.mark.skipif(not native.available(), reason=native.why_not())


@pytest.fixture(scope="module")
def eight(shelf: Shelf) -> Path:
    """Eight bits wherever there are weights, and one layer more than two."""
    return shelf.bundle(EIGHT, num_hidden_layers=3)


def logits_of(path: Path, backend: str, modes: list[Mode], bits: int = 8) -> list[np.ndarray]:
    """Logits float32 [3, V] of the same three rows in each mode, after one prompt."""
    with (
        Engine.open(path, backend=backend, threads=1) as engine,
        engine.session(k_bits=bits, v_bits=bits, context_tokens=256) as session,
    ):
        session.prefill(PROMPT)
        before = session.sequence.cache.state()
        found = []
        with session.sequence.branch() as branch:
            for mode in modes:
                run(branch.extend([7, 8, 9], mode=mode))
                found.append(branch.logits.copy())
                branch.rewind(0)
        assert session.sequence.cache.state() == before
    return found


@needs_native
def test_a_pass_in_a_mode_is_what_the_reference_computes(eight: Path) -> None:
    modes = [WHOLE, HI, Mode(skipped=(1,)), Mode(view="hi", skipped=(0, 2)), WHOLE]
    found, expected = (logits_of(eight, name, modes) for name in ("onnx", "reference"))
    np.testing.assert_array_equal(found[0], found[4])
    for number, one in enumerate(found[:4]):
        distances = [far(one, other) for other in expected[:4]]
        assert distances[number] < 0.15
        assert distances[number] < 0.4 * min(np.delete(distances, number))


@needs_native
def test_a_head_of_the_first_tokens_is_a_part_of_the_whole_head(eight: Path) -> None:
    modes = [HI, Mode(view="hi", head_tokens=101)]
    for backend in ("onnx", "reference"):
        whole, part = logits_of(eight, backend, modes)
        np.testing.assert_array_equal(part[:, :101], whole[:, :101])
        assert (part[:, 101:] == -np.inf).all()


@needs_native
def test_four_bits_have_no_upper_half(shelf: Shelf) -> None:
    path = shelf.bundle(replace(PLAIN, weights=WeightFormat(embedding_bits=4)))
    whole, upper = logits_of(path, "onnx", [WHOLE, HI], bits=4)
    np.testing.assert_array_equal(whole, upper)


@needs_native
def test_modes_a_model_cannot_have_are_refused(eight: Path, shelf: Shelf) -> None:
    with (
        Engine.open(eight, threads=1) as engine,
        pytest.raises(BackendError, match="layer 3 is none of the model's: 0 to 2"),
    ):
        engine.backend.check_mode(Mode(skipped=(1, 3)))
    with (
        Engine.open(eight, threads=1) as engine,
        pytest.raises(BackendError, match="a head of 999 tokens is not possible"),
    ):
        engine.backend.check_mode(Mode(head_tokens=999))
    path = shelf.bundle(replace(PLAIN, weights=WeightFormat(linear="ort")))
    with Engine.open(path, threads=1) as engine:
        engine.backend.check_mode(WHOLE)
        with pytest.raises(BackendError, match='linear="ort"'):
            engine.backend.check_mode(HI)


def test_what_cannot_share_a_pass_gets_one_of_its_own() -> None:
    """Two models, two modes: four passes for six sequences, each with its own answer."""

    def counting(step: int) -> RuleBackend:
        made = RuleBackend(lambda text: (text[-1] + step) % 20, vocab_size=20)
        made.rule_of[HI] = lambda text: (text[-1] + 2 * step) % 20
        return made

    one, other = counting(1), counting(3)
    calls, expected, open_work = list[Call](), [], []
    for number, (backend, mode) in enumerate(
        [(one, WHOLE), (other, WHOLE), (one, HI), (other, HI), (one, WHOLE), (one, HI)]
    ):
        sequence = TokenSequence(backend, backend.session_config(SessionRequest()))
        work = sequence.branch()
        branch = work.__enter__()
        asked = branch.extend([number], mode=mode)
        calls.append(next(asked))
        open_work.append((work, asked))
        expected.append(number + (1 if backend is one else 3) * (2 if mode == HI else 1))
    answers = forward_all(calls)
    assert one.passes == [[[0], [4]], [[2], [5]]]
    assert other.passes == [[[1]], [[3]]]
    for answer, token in zip(answers, expected, strict=True):
        assert answer.logits[0, token] == RULE_LOGIT
    assert [answer.rows for answer in answers] == [2, 1, 2, 1, 2, 2]
    for work, asked in open_work:
        asked.close()
        work.__exit__(None, None, None)
