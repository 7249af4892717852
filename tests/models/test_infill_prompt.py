"""The prompt that asks a model to fill in a line, token by token."""

from dataclasses import replace

import pytest

from infill_tokens import FIM, LETTERS, MIDDLE, PREFIX, SUFFIX, infill_tokenizer
from kvq.errors import ModelError
from kvq_models.control import ControlTokens
from kvq_models.infilling import infill_prompt
from kvq_models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return infill_tokenizer()


def test_the_prompt_is_prefix_suffix_middle(tokenizer: Tokenizer) -> None:
    prefix, suffix = "def f(x):\n", "    return y\n"
    assert infill_prompt(tokenizer, prefix, suffix, 100) == [
        PREFIX, *tokenizer.encode(prefix), SUFFIX, *tokenizer.encode(suffix), MIDDLE
    ]  # fmt: skip


def test_a_model_may_be_asked_suffix_first() -> None:
    """The prefix then stands last, and what is cut of it is still its beginning."""
    control = ControlTokens(start=(1,), fim=replace(FIM, suffix_first=True))
    tokenizer = infill_tokenizer(control)
    prefix, suffix = "def f(x):\n", "    return y\n"
    assert infill_prompt(tokenizer, prefix, suffix, 100) == [
        1, PREFIX, SUFFIX, *tokenizer.encode(suffix), MIDDLE, *tokenizer.encode(prefix)
    ]  # fmt: skip
    assert infill_prompt(tokenizer, LETTERS, "", 9) == [
        1, PREFIX, SUFFIX, MIDDLE, *tokenizer.encode(LETTERS[-5:])
    ]  # fmt: skip


def test_what_starts_a_text_stays_first_and_control_words_are_text() -> None:
    control = ControlTokens(start=(1, 2), fim=FIM)
    tokenizer = infill_tokenizer(control)
    ids = infill_prompt(tokenizer, "<|fim_suffix|>", "", 100)
    assert ids[:3] == [1, 2, PREFIX]
    assert ids[-2:] == [SUFFIX, MIDDLE]
    assert ids.count(SUFFIX) == 1
    assert tokenizer.decode(ids[3:-2]) == "<|fim_suffix|>"


@pytest.mark.parametrize(
    ("before", "after", "kept_before", "kept_after"),
    [(40, 4, 13, 4), (40, 40, 13, 4), (3, 40, 3, 14), (10, 40, 10, 7), (0, 2, 0, 2)],
)
def test_a_long_prompt_keeps_what_is_near_the_gap(
    tokenizer: Tokenizer, before: int, after: int, kept_before: int, kept_after: int
) -> None:
    # one token each: 20 tokens leave 17, of which the suffix takes a quarter, or what is left
    prefix, suffix = (LETTERS * 4)[:before], (LETTERS[::-1] * 4)[:after]
    assert len(tokenizer.encode(prefix)) == before
    ids = infill_prompt(tokenizer, prefix, suffix, 20)
    place = ids.index(SUFFIX)
    assert tokenizer.decode(ids[1:place]) == prefix[len(prefix) - kept_before :]
    assert tokenizer.decode(ids[place + 1 : -1]) == suffix[:kept_after]
    assert len(ids) == 3 + kept_before + kept_after <= 20


def test_a_model_without_the_tokens_is_refused(tokenizer: Tokenizer) -> None:
    plain = infill_tokenizer(ControlTokens())
    with pytest.raises(ModelError, match=r"no fill-in-the-middle tokens \(such as <\|fim_prefix"):
        infill_prompt(plain, "a", "b", 100)
    with pytest.raises(ModelError, match="3 tokens has no room for text; give it 4 or more"):
        infill_prompt(tokenizer, "a", "b", 3)
