"""Prompts of random tokens, and how far the logits they lead to are apart."""

import numpy as np

from kvq_runtime.config import Sampling
from kvq_runtime.session.session import Session


def prompt(count: int, seed: int = 0) -> list[int]:
    """`count` tokens of the tiny tokenizer that control nothing."""
    return np.random.default_rng(seed).integers(6, 300, count).tolist()


def generated(session: Session, count: int) -> list[int]:
    """The `count` likeliest tokens after what the session has seen."""
    steps = session.generate(count, sampling=Sampling(temperature=0), stop_ids=[])
    return [step.token for step in steps]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, over the last axis."""
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)


def far(actual: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of the logits `expected`."""
    return float(np.sqrt(np.square(actual - expected).mean() / np.square(expected).mean()))


def divergence(expected_logits: np.ndarray, actual_logits: np.ndarray) -> float:
    """Mean KL divergence in nats of logits `actual_logits` [T, V] from `expected_logits`."""
    expected, actual = log_softmax(expected_logits), log_softmax(actual_logits)
    return float((np.exp(expected) * (expected - actual)).sum(1).mean())
