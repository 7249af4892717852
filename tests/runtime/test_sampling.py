"""Sampling against distributions worked out by hand, frequencies, and stop strings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import BackendError, UsageError
from kvq_runtime.answer.sampling import candidates, distribution, log_probability, sample
from kvq_runtime.answer.stop_strings import StopStrings
from kvq_runtime.config import Sampling

# Probabilities 0.4, 0.3, 0.2, 0.1 in an order that no filter may rely on.
PROBABILITIES = np.array([0.2, 0.4, 0.1, 0.3])
LOGITS = np.log(PROBABILITIES).astype(np.float32)
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def plain(**changes: object) -> Sampling:
    return Sampling(**(PLAIN | changes))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (plain(), [0.2, 0.4, 0.1, 0.3]),
        (plain(temperature=0), [0, 1, 0, 0]),
        (plain(temperature=0.5), [4 / 30, 16 / 30, 1 / 30, 9 / 30]),
        (plain(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (plain(top_k=9), [0.2, 0.4, 0.1, 0.3]),
        (plain(top_p=0.69), [0, 4 / 7, 0, 3 / 7]),
        (plain(top_p=0.71), [2 / 9, 4 / 9, 0, 3 / 9]),
        (plain(top_p=0.01), [0, 1, 0, 0]),
        (plain(min_p=0.45), [2 / 9, 4 / 9, 0, 3 / 9]),
        (plain(min_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        # top-p sees the distribution before the temperature: 0.4 + 0.3 reach 0.69 at any heat
        (plain(top_p=0.69, temperature=0.5), [0, 16 / 25, 0, 9 / 25]),
        # top-k leaves 4/7 and 3/7, of which the first already reaches 0.5
        (plain(top_k=2, top_p=0.5), [0, 1, 0, 0]),
        (plain(logit_bias={2: np.log(4.0)}), [2 / 13, 4 / 13, 4 / 13, 3 / 13]),
        (plain(logit_bias={1: -np.inf}), [2 / 6, 0, 1 / 6, 3 / 6]),
        (plain(temperature=0, logit_bias={2: 100.0}), [0, 0, 1, 0]),
    ],
)
def test_distribution_by_hand(sampling: Sampling, expected: list[float]) -> None:
    np.testing.assert_allclose(distribution(LOGITS, sampling, []), expected, atol=1e-6)


def test_repetition_penalty_weakens_each_recent_token_once() -> None:
    logits = np.array([2.0, 1.0, -1.0, 0.0], np.float32)
    sampling = plain(repeat_penalty=2.0, repeat_window_tokens=3)
    # token 1 is outside the window, token 0 is in it twice
    weights = np.exp([1.0, 1.0, -2.0, 0.0])
    actual = distribution(logits, sampling, [1, 0, 2, 0])
    np.testing.assert_allclose(actual, weights / weights.sum(), rtol=1e-6)
    np.testing.assert_array_equal(logits, [2.0, 1.0, -1.0, 0.0])


def test_presence_counts_once_and_frequency_each_time() -> None:
    logits = np.array([2.0, 1.0, -1.0, 0.0], np.float32)
    sampling = plain(presence_penalty=0.5, frequency_penalty=0.25, repeat_window_tokens=3)
    # token 1 is outside the window, token 0 is in it twice
    weights = np.exp([2.0 - 0.5 - 2 * 0.25, 1.0, -1.0 - 0.5 - 0.25, 0.0])
    actual = distribution(logits, sampling, [1, 0, 2, 0])
    np.testing.assert_allclose(actual, weights / weights.sum(), rtol=1e-6)
    both = plain(repeat_penalty=2.0, frequency_penalty=-1.0, repeat_window_tokens=1)
    weights = np.exp([2.0 / 2 + 1, 1.0, -1.0, 0.0])
    actual = distribution(logits, both, [2, 0])
    np.testing.assert_allclose(actual, weights / weights.sum(), rtol=1e-6)


def test_equal_logits_keep_the_order_of_their_ids() -> None:
    logits = np.zeros(5, np.float32)
    ids, probabilities = candidates(logits, plain(top_k=3), [])
    assert ids.tolist() == [0, 1, 2]
    np.testing.assert_allclose(probabilities, [1 / 3] * 3)
    assert sample(logits, plain(temperature=0), [], np.random.default_rng(0)) == 0


@pytest.mark.parametrize(
    ("probabilities", "ends", "expected"),
    [
        # three of four candidates are sure; a quarter is needed then, and 0.2 of 0.9 is less
        ([0.2, 0.4, 0.1, 0.3], (7,), [0, 4 / 7, 0, 3 / 7]),
        # an end of 0.1 weighs 3 x 4 x 0.1 against 0.9
        ([0.2, 0.4, 0.1, 0.3], (2,), [0, 0, 1, 0]),
        # of two ends the likelier one
        ([0.2, 0.4, 0.1, 0.3], (2, 0), [1, 0, 0, 0]),
        # an end of 0.05 weighs 3 x 4 x 0.05 against 0.95, and stays among the candidates
        ([0.5, 0.35, 0.05, 0.1], (2,), [50 / 90, 35 / 90, 5 / 90, 0]),
        # no token reaches 0.2: the first end, though it is no candidate
        ([0.19, 0.19, 0.19, 0.19, 0.19, 0.05], (7, 8), [0, 0, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_an_infilling_goes_on_only_while_it_is_sure(
    probabilities: list[float], ends: tuple[int, ...], expected: list[float]
) -> None:
    logits = np.full(9, -np.inf, np.float32)
    logits[: len(probabilities)] = np.log(probabilities)
    actual = distribution(logits, plain(infill_ends=ends), [])
    np.testing.assert_allclose(actual, expected + [0] * (9 - len(expected)), atol=1e-6)
    greedy = distribution(logits, plain(infill_ends=ends, temperature=0), [])
    assert np.argmax(greedy) == np.argmax(probabilities)


@pytest.mark.parametrize(
    "sampling", [plain(), plain(temperature=0.7, top_k=3), plain(top_p=0.85), plain(min_p=0.3)]
)
def test_frequencies_follow_the_distribution(sampling: Sampling) -> None:
    generator = np.random.default_rng(7)
    draws = 4000
    counts = np.bincount(
        [sample(LOGITS, sampling, [], generator) for _ in range(draws)], minlength=4
    )
    expected = distribution(LOGITS, sampling, []) * draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 16.27  # 99.9 % quantile for three degrees of freedom, the most there are


def test_log_probability_is_the_models_own() -> None:
    shifted = LOGITS + np.float32(50)
    for token, probability in enumerate(PROBABILITIES):
        assert log_probability(shifted, token) == pytest.approx(np.log(probability), abs=1e-5)


def test_large_vocabulary_top_k_finds_the_true_best() -> None:
    logits = np.random.default_rng(1).permutation(150_000).astype(np.float32)
    ids, _ = candidates(logits, plain(top_k=40), [])
    np.testing.assert_array_equal(logits[ids], np.arange(149_999, 149_959, -1))


@pytest.mark.parametrize("spread", [0.001, 1.0, 8.0])
def test_large_vocabulary_top_p_is_the_shortest_run(spread: float) -> None:
    logits = np.random.default_rng(2).standard_normal(20_000).astype(np.float32) * spread
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), 0.9)) + 1
    ids, _ = candidates(logits, plain(top_p=0.9), [])
    assert ids.tolist() == sorted(order[:count].tolist())
    # Min-p leaves some of these. With a top-k that all pass, they are in order of size.
    least = probabilities.max() * 0.2
    both, actual = candidates(logits, plain(top_p=0.9, min_p=0.2), [])
    assert both.tolist() == [i for i in ids if probabilities[i] >= least]
    np.testing.assert_allclose(actual, probabilities[both] / probabilities[both].sum(), rtol=1e-5)
    ranked, _ = candidates(logits, plain(top_p=0.9, top_k=19_999), [])
    assert ranked.tolist() == order[: len(ranked)].tolist()
    assert count - 1 <= len(ranked) <= count


def test_a_sum_of_exactly_top_p_is_enough() -> None:
    # Four equal logits have probabilities of exactly a quarter, so two sum to exactly a half.
    ids, probabilities = candidates(np.zeros(4, np.float32), plain(top_p=0.5), [])
    assert (ids.tolist(), probabilities.tolist()) == ([0, 1], [0.5, 0.5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"min_p": 1.0}, "min_p 1.0"),
        ({"repeat_penalty": 0.0}, "repeat_penalty 0.0"),
        ({"repeat_window_tokens": -5}, "repeat_window_tokens -5"),
    ],
)
def test_impossible_values_are_refused_by_name(changes: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Sampling(**changes)


def test_bad_bias_and_bad_logits_are_refused() -> None:
    with pytest.raises(UsageError, match="token 4; this model's tokens are 0 to 3"):
        distribution(LOGITS, plain(logit_bias={4: 1.0}), [])
    with pytest.raises(UsageError, match="forbids every token"):
        distribution(LOGITS, plain(logit_bias=dict.fromkeys(range(4), -np.inf)), [])
    for added in (np.nan, np.inf, 1e39):
        with pytest.raises(UsageError, match=r"logit bias of \S+ for token 2 is not possible"):
            plain(logit_bias={2: added})
    broken = LOGITS.copy()
    broken[2] = np.nan
    with pytest.raises(BackendError, match="not finite"):
        distribution(broken, plain(), [])


def streamed(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Returns what each piece let through, then what waited, and the stop string."""
    stream = StopStrings(stops)
    shown = []
    for piece in pieces:
        shown.append(stream.feed(piece))
        if stream.match is not None:
            return shown, stream.match
    return [*shown, stream.flush()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "match"),
    [
        ([], ["any ", "text"], ["any ", "text", ""], None),
        (["END"], ["a b END c"], ["a b "], "END"),
        (["END"], ["a E", "N", "D"], ["a ", "", ""], "END"),
        (["END"], ["a E", "NORM"], ["a ", "ENORM", ""], None),
        (["END"], ["a EN"], ["a ", "EN"], None),
        (["aab"], ["aa", "aab"], ["", "aa"], "aab"),
        (["\n\n", "User:"], ["hi\n", "Us", "er: no"], ["hi", "\n", ""], "User:"),
        (["b", "ab"], ["xab"], ["x"], "ab"),
        (["a", "ab"], ["xab"], ["x"], "ab"),
        (["é"], ["caf", "é!"], ["caf", ""], "é"),
    ],
)
def test_stop_strings(
    stops: list[str], pieces: list[str], shown: list[str], match: str | None
) -> None:
    assert streamed(stops, pieces) == (shown, match)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty stop string"):
        StopStrings(["x", ""])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_choice_depends_on_no_more_than_the_exact_rows(data: st.DataObject) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    size = 300
    history = generator.integers(0, size, 40).tolist()
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.0, 0.7])),
        top_k=data.draw(st.sampled_from([1, 5, 40])),
        top_p=data.draw(st.sampled_from([0.9, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.05])),
        repeat_penalty=data.draw(st.sampled_from([1.0, 1.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        repeat_window_tokens=16,
        logit_bias={int(token): -5.0 for token in generator.integers(0, size, 3)},
    )
    logits = (3 * generator.standard_normal(size)).astype(np.float32)
    rough = logits.copy()
    order = np.argsort(-logits)
    rest = order[sampling.exact_rows :]
    # all others change, but none becomes larger than the least of the exact ones
    rough[rest] = logits[order[sampling.exact_rows - 1]] - generator.random(len(rest)) - 0.01
    np.testing.assert_array_equal(
        distribution(rough, sampling, history), distribution(logits, sampling, history)
    )


def test_what_may_raise_any_token_needs_every_logit_exact() -> None:
    assert Sampling(temperature=0).exact_rows == 1
    assert Sampling(top_k=40).exact_rows == 40
    for all_of_them in (
        Sampling(top_k=0),
        Sampling(repeat_penalty=0.9),
        Sampling(presence_penalty=-0.1),
        Sampling(logit_bias={3: 1.0}),
    ):
        assert all_of_them.exact_rows == 0
