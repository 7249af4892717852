"""`kvq eval --task passages`: what the prompts hold, and what its table says."""

from functools import partial
from itertools import chain

import pytest

from kvq.errors import DataError
from kvq_lab.passage_quality import (
    FILE_TOKENS,
    FOLLOWING_TOKENS,
    IN_A_PROMPT,
    PASSAGES,
    passage_prompts,
    taking_over,
)
from kvq_models.tokenizer import ControlTokens, Tokenizer
from kvq_runtime.engine import Engine
from kvq_runtime.session.session import no_progress
from shelf import Shelf
from tiny import byte_level_tokenizer

FILES = [
    (f"{name}.py", "".join(f"{name}{number} = {number}\n" for number in range(99)))
    for name in "abcdefghij"
]
CONTEXT = FILE_TOKENS + FOLLOWING_TOKENS + IN_A_PROMPT * 80
prompts_of = partial(
    passage_prompts,
    Tokenizer.from_json(byte_level_tokenizer().to_str(), ControlTokens(eos=(0,))),
    context_tokens=CONTEXT,
    seed=0,
)


def test_each_passage_is_read_once_before_anything_is_measured() -> None:
    prompts = prompts_of(FILES, limit=5)
    warmup = PASSAGES // IN_A_PROMPT
    assert len(prompts) == warmup + 5
    read = [tuple(ids) for prompt in prompts[:warmup] for ids in prompt.passages]
    assert len(set(read)) == PASSAGES
    for prompt in prompts:
        assert len(prompt.ids) + FOLLOWING_TOKENS <= CONTEXT
        assert {len(ids) for ids in prompt.passages} == {80}
        assert len(prompt.following) == FOLLOWING_TOKENS
        assert prompt.ids == [*chain.from_iterable(prompt.passages), *prompt.alone]
        assert {tuple(ids) for ids in prompt.passages} <= set(read)
    assert prompts_of(FILES, limit=5) == prompts
    with pytest.raises(DataError, match="too few or too short; give 9 source files"):
        prompts_of(FILES[:PASSAGES], limit=5)


def test_the_table_says_what_was_computed(shelf: Shelf) -> None:
    bundle = shelf.bundle(max_position_embeddings=4096)
    with Engine.open(bundle, threads=1) as engine:
        opened = partial(engine.session, context_tokens=CONTEXT + 64)
        result = taking_over(
            partial(opened, kv="8:8"), partial(opened, kv="fp"), prompts_of(FILES, limit=3),
            no_progress,
        )  # fmt: skip
    rows = {row["way"]: row for row in result.details["rows"]}
    assert result.n == 3
    assert rows["read"]["computed"] == result.details["prompt_tokens"] == CONTEXT - FOLLOWING_TOKENS
    assert rows["without them"]["computed"] == FILE_TOKENS
    assert FILE_TOKENS <= rows["taken over"]["computed"] < FILE_TOKENS + 2 * 80
    assert rows["read"]["kld"] < rows["taken over"]["kld"] == result.value
    assert result.value < rows["without them"]["kld"]
