"""Passes that read less than the whole model: fewer bits, a part of the head; shared passes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvq import native_library
from kvq.errors import BackendError
from kvq_export.config import WeightFormat
from kvq_runtime.backends import WHOLE, Mode
from kvq_runtime.config import SessionRequest
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passes import PassRequest, forward_all, run
from kvq_runtime.sequence.sequence import TokenSequence
from logits import far
from rule_backend import RULE_LOGIT, RuleBackend
from shelf import EIGHT, PLAIN, Shelf

HI = Mode(view="hi")
PROMPT = np.random.default_rng(3).integers(6, 300, 200).tolist()
needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())


@pytest.fixture(scope="module")
def eight(shelf: Shelf) -> Path:
    """Makes a bundle of eight bits, with one layer more than two."""
    return shelf.bundle(EIGHT, num_hidden_layers=3)


def logits_of(path: Path, backend: str, modes: list[Mode], bits: int = 8) -> list[np.ndarray]:
    """Returns logits float32 [3, V] of the same three rows in each mode, after one prompt."""
    with (
        Engine.open(path, backend=backend, threads=1) as engine,
        engine.session(k_bits=bits, v_bits=bits, context_tokens=256) as session,
    ):
        session.prefill(PROMPT)
        before = session.sequence.cache.state()
        logits = []
        with session.sequence.branch() as branch:
            for mode in modes:
                run(branch.extend([7, 8, 9], mode=mode))
                logits.append(branch.logits.copy())
                branch.rewind(0)
        assert session.sequence.cache.state() == before
    return logits


@needs_native
def test_a_pass_in_a_mode_is_what_the_reference_computes(eight: Path) -> None:
    modes = [WHOLE, HI, WHOLE]
    actual, expected = (logits_of(eight, name, modes) for name in ("onnx", "float"))
    np.testing.assert_array_equal(actual[0], actual[2])
    for number, logits in enumerate(actual[:2]):
        distances = [far(logits, other) for other in expected[:2]]
        assert distances[number] < 0.15
        assert distances[number] < 0.4 * min(np.delete(distances, number))


@needs_native
def test_a_head_of_the_first_tokens_is_a_part_of_the_whole_head(eight: Path) -> None:
    modes = [HI, Mode(view="hi", head_tokens=101)]
    for backend in ("onnx", "float"):
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
        engine.backend.check_mode(Mode(predicted=(2, 3)))
    with (
        Engine.open(eight, threads=1) as engine,
        pytest.raises(BackendError, match="a head of 999 tokens is not possible"),
    ):
        engine.backend.check_mode(Mode(head_tokens=999))


def test_what_cannot_share_a_pass_gets_one_of_its_own() -> None:
    """Expects four passes for six sequences of two models and modes, each with its answer."""

    def counting(step: int) -> RuleBackend:
        made = RuleBackend(lambda text: (text[-1] + step) % 20, vocab_size=20)
        made.rule_of[HI] = lambda text: (text[-1] + 2 * step) % 20
        return made

    first, second = counting(1), counting(3)
    requests, expected, open_work = list[PassRequest](), [], []
    for number, (backend, mode) in enumerate(
        [(first, WHOLE), (second, WHOLE), (first, HI), (second, HI), (first, WHOLE), (first, HI)]
    ):
        sequence = TokenSequence(backend, backend.session_config(SessionRequest()))
        work = sequence.branch()
        branch = work.__enter__()
        extending = branch.extend([number], mode=mode)
        requests.append(next(extending))
        open_work.append((work, extending))
        expected.append(number + (1 if backend is first else 3) * (2 if mode == HI else 1))
    answers = forward_all(requests)
    assert first.passes == [[[0], [4]], [[2], [5]]]
    assert second.passes == [[[1]], [[3]]]
    for answer, token in zip(answers, expected, strict=True):
        assert answer.logits[0, token] == RULE_LOGIT
    assert [answer.rows for answer in answers] == [2, 1, 2, 1, 2, 2]
    for work, extending in open_work:
        extending.close()
        work.__exit__(None, None, None)
