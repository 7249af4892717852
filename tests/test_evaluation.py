"""The measures of `kvq eval` against values worked out by hand."""

from collections.abc import Iterator, Sequence
from math import log

import numpy as np
import pytest

from kvq.errors import DataError
from kvq_apps.evaluation import (
    divergence,
    first_digits,
    kl_divergence,
    passkey_prompts,
    perplexity,
    windows,
)
from kvq_models.tokenizer import ControlTokens, Tokenizer
from tiny import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer().to_str(), ControlTokens())


class FixedSession:
    """Gives the same next-token distribution at every position, in chunks of three rows."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        self.row = np.log(np.array(probabilities, np.float32)) + np.float32(7)

    def __enter__(self) -> "FixedSession":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to free."""

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        for start in range(0, len(ids), 3):
            yield np.tile(self.row, (min(3, len(ids) - start), 1))

    def stats(self) -> "FixedSession":
        return self

    kv_bytes_peak = 123


def unseen(done: int, total: int) -> None:
    """The progress nobody watches."""


def test_windows_fill_the_context_and_drop_a_short_end() -> None:
    assert windows(range(10), [], 5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert windows(range(9), [], 5) == [[0, 1, 2, 3, 4]]
    assert windows(range(9), [99], 5) == [[99, 0, 1, 2, 3], [99, 4, 5, 6, 7]]
    assert windows(range(6), [99], 50) == [[99, 0, 1, 2, 3, 4, 5]]
    with pytest.raises(DataError, match="the text has 3 tokens and a window takes 50"):
        windows(range(3), [], 50)
    with pytest.raises(DataError, match="a window takes 3; scoring needs at least 4"):
        windows(range(100), [99], 4)


def test_perplexity_of_known_probabilities(tokenizer: Tokenizer) -> None:
    # the second half of each window: tokens 1, 2, 2 and 1, 1, 0
    texts = [[0, 0, 0, 1, 2, 2], [2, 2, 2, 1, 1, 0]]
    measured = perplexity(lambda: FixedSession([0.5, 0.25, 0.25]), tokenizer, texts, unseen)
    nats = (5 * log(4) + log(2)) / 6
    assert measured.n == 6
    assert measured.details["nats_per_token"] == pytest.approx(nats, rel=1e-6)
    assert measured.value == pytest.approx(np.exp(nats), rel=1e-6)
    assert measured.kv_bytes == 123


def test_bits_per_byte_counts_the_bytes_of_scored_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("éa" * 8)
    row = np.full(tokenizer.vocab_size, 1 / tokenizer.vocab_size)
    measured = perplexity(lambda: FixedSession(row), tokenizer, [ids], unseen)
    scored = ids[len(ids) // 2 :]
    bits = len(scored) * np.log2(tokenizer.vocab_size)
    num_bytes = len(tokenizer.decode(scored).encode())
    assert measured.n == len(scored)
    assert measured.details["bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-5)


def test_divergence_of_known_distributions() -> None:
    measured = divergence(
        lambda: FixedSession([0.2, 0.4, 0.4]),
        lambda: FixedSession([0.5, 0.25, 0.25]),
        [[0, 0, 0, 0, 1, 0]],
        unseen,
    )
    expected = 0.5 * log(0.5 / 0.2) + 0.5 * log(0.25 / 0.4)
    assert measured.n == 3
    assert measured.value == pytest.approx(expected, rel=1e-5)
    assert measured.details["kld_99_9"] == pytest.approx(expected, rel=1e-5)
    assert measured.details["same_top_1"] == 0.0
    # the scored tokens are 0, 1 and 0: they moved by 0.3, 0.15 and 0.3
    rms = np.sqrt((0.3**2 + 0.15**2 + 0.3**2) / 3)
    assert measured.details["rms_delta_p"] == pytest.approx(rms, rel=1e-5)


def test_divergence_from_itself_is_zero() -> None:
    rows = np.log(np.array([[0.1, 0.9], [0.5, 0.5]]))
    np.testing.assert_array_equal(kl_divergence(rows, rows), [0.0, 0.0])
    shifted = np.log(np.array([[0.2, 0.8], [0.5, 0.5]]))
    expected = [0.1 * log(0.5) + 0.9 * log(0.9 / 0.8), 0.0]
    np.testing.assert_allclose(kl_divergence(rows, shifted), expected, rtol=1e-12)


def test_passkey_prompts_fill_their_length_and_place_the_key(tokenizer: Tokenizer) -> None:
    prompts = passkey_prompts(
        tokenizer, lengths=[400, 900], depths=[0.0, 0.5, 1.0], trials=2, seed=3
    )
    assert len(prompts) == 12
    assert len({prompt.key for prompt in prompts}) == 12
    for prompt in prompts:
        assert prompt.length_tokens * 0.85 < len(prompt.ids) <= prompt.length_tokens
        text = tokenizer.decode(prompt.ids)
        assert text.count(prompt.key) == 2
        assert text.endswith("The pass key is")
        start = text.index("\n") + 1
        needle = text.index(f"The pass key is {prompt.key}")
        share = (needle - start) / (text.rindex("\n") - start)
        assert abs(share - prompt.depth) < 0.2
    again = passkey_prompts(tokenizer, lengths=[400, 900], depths=[0.0, 0.5, 1.0], trials=2, seed=3)
    assert [prompt.ids for prompt in again] == [prompt.ids for prompt in prompts]


def test_a_passkey_prompt_too_short_names_the_shortest(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"of 20 tokens is not possible; .* has \d+"):
        passkey_prompts(tokenizer, lengths=[20], depths=[0.5], trials=1, seed=0)


@pytest.mark.parametrize(
    ("text", "digits"), [(" 71432.", "71432"), ("is 12 or 34", "12"), ("none", ""), ("", "")]
)
def test_first_digits(text: str, digits: str) -> None:
    assert first_digits(text) == digits
