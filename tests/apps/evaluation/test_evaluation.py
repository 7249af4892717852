"""The measures of `kvq eval` against values worked out by hand; the wording of look-ups."""

import random
from collections.abc import Iterator, Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.errors import BudgetError, DataError
from kvq_apps.evaluation.cache_setting import UNQUANTIZED, CacheSetting
from kvq_apps.evaluation.measurement import log_softmax, score_answer
from kvq_apps.evaluation.recall import (
    ANSWER_TOKENS,
    UNITS,
    RecallQuestion,
    first_digits,
    questions,
    recall,
)
from kvq_apps.evaluation.table import measure_table
from kvq_apps.evaluation.tasks import Material
from kvq_apps.evaluation.text import divergence, kl_divergence, perplexity, windows
from kvq_models.recall import filler_text, key_value, passkey
from kvq_models.tokenizer import ControlTokens, Tokenizer
from kvq_runtime.engine import Engine
from kvq_runtime.session.session import Step, no_progress
from shelf import Shelf
from tiny import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(byte_level_tokenizer().to_str(), ControlTokens())


@pytest.fixture(scope="module")
def engine(shelf: Shelf) -> Iterator[Engine]:
    with Engine.open(shelf.bundle(max_position_embeddings=4096), threads=1) as opened:
        yield opened


class FixedSession:
    """Gives the same next-token distribution at every position, in chunks of three rows."""

    def __init__(self, probabilities: Sequence[float], answer: Sequence[int] = ()) -> None:
        self.row = np.log(np.array(probabilities, np.float32)) + np.float32(7)
        self.answer = list(answer)
        self.tokens: list[int] = []

    def __enter__(self) -> "FixedSession":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to free."""

    def prefill(self, ids: Sequence[int]) -> bool:
        self.tokens += ids
        return True

    def generate(self, max_tokens: int, **_: object) -> Iterator[Step]:
        for token in self.answer[:max_tokens]:
            self.tokens.append(token)
            yield Step(token=token, text="", logprob=None)

    def rollback(self, n_tokens: int) -> None:
        del self.tokens[len(self.tokens) - n_tokens :]

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        self.tokens += ids
        for start in range(0, len(ids), 3):
            yield np.tile(self.row, (min(3, len(ids) - start), 1))

    def stats(self) -> "FixedSession":
        return self

    kv_bytes_peak = 123
    bytes_per_token = 4.5


class FullSession(FixedSession):
    """Has no room after so many rows."""

    def __init__(self, probabilities: Sequence[float], rows: int) -> None:
        super().__init__(probabilities)
        self.rows = rows

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        for logits in super().logits(ids):
            self.rows -= len(logits)
            if self.rows < 0:
                raise BudgetError("no room")
            yield logits


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
    measured = perplexity(lambda: FixedSession([0.5, 0.25, 0.25]), tokenizer, texts, no_progress)
    nats = (5 * log(4) + log(2)) / 6
    assert measured.n == 6
    assert measured.details["nats_per_token"] == pytest.approx(nats, rel=1e-6)
    assert measured.value == pytest.approx(np.exp(nats), rel=1e-6)
    assert measured.kv_bytes == 123


def test_bits_per_byte_counts_the_bytes_of_scored_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("éa" * 8)
    row = np.full(tokenizer.vocab_size, 1 / tokenizer.vocab_size)
    measured = perplexity(lambda: FixedSession(row), tokenizer, [ids], no_progress)
    scored = ids[len(ids) // 2 :]
    bits = len(scored) * np.log2(tokenizer.vocab_size)
    num_bytes = len(tokenizer.decode(scored).encode())
    assert measured.n == len(scored)
    assert measured.details["bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-5)


def test_divergence_of_known_distributions() -> None:
    measured, same = divergence(
        [lambda: FixedSession([0.2, 0.4, 0.4]), lambda: FixedSession([0.5, 0.25, 0.25])],
        lambda: FixedSession([0.5, 0.25, 0.25]),
        [[0, 0, 0, 0, 1, 0]],
        no_progress,
    )
    expected = 0.5 * log(0.5 / 0.2) + 0.5 * log(0.25 / 0.4)
    assert measured.n == 3
    assert measured.value == pytest.approx(expected, rel=1e-5)
    assert measured.details["kld_99"] == pytest.approx(expected, rel=1e-5)
    assert measured.details["kld_99_9"] == pytest.approx(expected, rel=1e-5)
    assert measured.details["same_top_1"] == 0.0
    # the scored tokens are 0, 1 and 0: they moved by 0.3, 0.15 and 0.3
    rms = np.sqrt((0.3**2 + 0.15**2 + 0.3**2) / 3)
    assert measured.details["rms_delta_p"] == pytest.approx(rms, rel=1e-5)
    nats = -(2 * log(0.2) + log(0.4)) / 3
    assert measured.details["perplexity"] == pytest.approx(np.exp(nats), rel=1e-5)
    assert (same.value, same.details["same_top_1"]) == (0.0, 1.0)
    assert (measured.kv_bytes, measured.bytes_per_token) == (123, 4.5)


def test_a_cache_that_is_too_small_is_refused_and_the_others_are_measured() -> None:
    texts = [[0, 1] * 6, [1, 0] * 6]
    outcomes = divergence(
        [
            lambda: FixedSession([0.2, 0.8]),
            lambda: FullSession([0.2, 0.8], 4),
            lambda: FullSession([0.2, 0.8], 7),
        ],
        lambda: FixedSession([0.5, 0.5]),
        texts,
        no_progress,
    )
    alone = divergence(
        [lambda: FixedSession([0.2, 0.8])], lambda: FixedSession([0.5] * 2), texts, no_progress
    )
    assert isinstance(outcomes[1], BudgetError)
    assert outcomes[0] == outcomes[2] == alone[0]


def test_divergence_from_itself_is_zero() -> None:
    rows = np.log(np.array([[0.1, 0.9], [0.5, 0.5]]))
    np.testing.assert_array_equal(kl_divergence(rows, rows), [0.0, 0.0])
    shifted = np.log(np.array([[0.2, 0.8], [0.5, 0.5]]))
    expected = [0.1 * log(0.5) + 0.9 * log(0.9 / 0.8), 0.0]
    np.testing.assert_allclose(kl_divergence(rows, shifted), expected, rtol=1e-12)


# Look-ups


def test_the_wording_of_a_passkey() -> None:
    prompt, answer = passkey(random.Random(1), "One is first. Two is next. Three.", depth=0.5)
    key = answer.strip()
    assert (len(key), key.isdigit(), answer[0]) == (5, True, " ")
    assert prompt == (
        "There is a pass key hidden in a lot of text that does not matter. Find it and keep it.\n"
        f"One is first. The pass key is {key}. Remember it. {key} is the pass key. "
        "Two is next. Three.\nWhat is the pass key? The pass key is"
    )
    first = passkey(random.Random(1), "def f():\n    pass\n", depth=0.0).prompt
    assert f"keep it.\nThe pass key is {key}. Remember it. {key} is the pass key. def f" in first
    last = passkey(random.Random(1), "def f():\n    pass\n", depth=1.0).prompt
    assert f"    pass\nThe pass key is {key}. Remember it. {key} is the pass key.\nWhat" in last


@pytest.mark.parametrize(("depth", "line"), [(0.0, 1), (0.5, 3), (1.0, 5)])
def test_a_table_is_a_program_that_holds(depth: float, line: int) -> None:
    recalled = key_value(random.Random(7), 5, depth)
    lines = recalled.prompt.splitlines()
    assert len(lines) == 8
    name = lines[line].split('"')[1]
    assert lines[-1] == f'assert values["{name}"] =='
    assert lines[line] == f'    "{name}":{recalled.answer},'
    assert recalled.text == f"{recalled.prompt}{recalled.answer}\n"
    exec(recalled.text)  # the assertion is true


def test_filler_is_as_long_as_asked_and_the_same_for_a_seed() -> None:
    text = filler_text(random.Random(3), 2000)
    assert 2000 <= len(text) < 2500
    assert text == filler_text(random.Random(3), 2000) != filler_text(random.Random(4), 2000)
    assert filler_text(random.Random(3), 0) == ""


def ask(tokenizer: Tokenizer, task: str, seed: int = 3, depth: float = 0.5) -> list[RecallQuestion]:
    return questions(
        task, tokenizer, lengths=[400, 900], depths=[0.0, depth, 1.0], trials=2, seed=seed
    )


def test_passkey_prompts_fill_their_length_and_place_the_key(tokenizer: Tokenizer) -> None:
    recall_questions = ask(tokenizer, "passkey")
    assert len(recall_questions) == 12
    assert len({question.answer for question in recall_questions}) == 12
    for question in recall_questions:
        assert question.length_tokens * 0.85 < len(question.ids) <= question.length_tokens
        text = tokenizer.decode(question.ids)
        assert text.count(question.answer) == 2
        assert text.endswith("The pass key is")
        start = text.index("\n") + 1
        needle = text.index(f"The pass key is {question.answer}")
        share = (needle - start) / (text.rindex("\n") - start)
        assert abs(share - question.depth) < 0.2


def test_retrieval_prompts_fill_their_length_and_ask_at_the_depth(tokenizer: Tokenizer) -> None:
    for question in ask(tokenizer, "retrieval"):
        assert question.length_tokens - 40 < len(question.ids) <= question.length_tokens
        *pairs, _, asking = tokenizer.decode(question.ids).splitlines()[1:]
        place = round(question.depth * (len(pairs) - 1))
        assert asking.split('"')[1] == pairs[place].split('"')[1]
        assert pairs[place].endswith(f": {question.answer},")


@pytest.mark.parametrize("task", ["passkey", "retrieval"])
def test_a_question_depends_on_its_own_seed_length_depth_and_trial(
    tokenizer: Tokenizer, task: str
) -> None:
    recall_questions = ask(tokenizer, task)
    assert ask(tokenizer, task) == recall_questions
    assert all(
        question.ids != other.ids
        for question, other in zip(recall_questions, ask(tokenizer, task, 4), strict=True)
    )
    shallow = ask(tokenizer, task, depth=0.25)
    same = [question == other for question, other in zip(recall_questions, shallow, strict=True)]
    assert same == [question.depth in (0.0, 1.0) for question in recall_questions]


@pytest.mark.parametrize("task", ["passkey", "retrieval"])
def test_the_answer_continues_the_prompt(tokenizer: Tokenizer, task: str) -> None:
    for question in ask(tokenizer, task):
        assert question.ids_with_answer[: question.first] == question.ids[: question.first]
        assert tokenizer.decode(question.ids_with_answer) == (
            f"{tokenizer.decode(question.ids)} {question.answer}"
        )
        assert len(question.ids_with_answer) <= question.length_tokens + ANSWER_TOKENS[task]


@pytest.mark.parametrize("task", ["passkey", "retrieval"])
def test_a_prompt_too_short_names_the_shortest(tokenizer: Tokenizer, task: str) -> None:
    with pytest.raises(DataError, match=rf"{task} prompt of 20 tokens is not .* has \d+"):
        questions(task, tokenizer, lengths=[20], depths=[0.5], trials=1, seed=0)


def test_recall_counts_exact_answers_and_how_likely_they_were(tokenizer: Tokenizer) -> None:
    recall_questions = ask(tokenizer, "passkey")
    row = np.full(tokenizer.vocab_size, 1.0)
    # The answer's tokens are half as likely as all others.
    answer_ids = {
        token
        for question in recall_questions
        for token in question.ids_with_answer[question.first :]
    }
    row[list(answer_ids)] = 0.5
    row /= row.sum()
    right = iter([True, False, True, True] * 3)

    def open_session() -> FixedSession:
        question = recall_questions[opened.pop(0)]
        text = f" {question.answer}." if next(right) else " 12 34"
        return FixedSession(row, tokenizer.encode(text))

    opened = list(range(12))
    measured = recall(open_session, tokenizer, recall_questions, no_progress)
    assert (measured.value, measured.n, measured.unit) == (9 / 12, 12, "exact match")
    assert measured.details["answer_nats"] == pytest.approx(-log(row[min(answer_ids)]), rel=1e-5)
    rank = 1 / (1 + len(row) - len(answer_ids))
    assert measured.details["answer_reciprocal_rank"] == pytest.approx(rank)
    rows = measured.details["rows"]
    assert [(r["length"], r["depth"], r["correct"], r["trials"]) for r in rows] == [
        (400, 0.0, 1, 2), (400, 0.5, 2, 2), (400, 1.0, 1, 2),
        (900, 0.0, 2, 2), (900, 0.5, 1, 2), (900, 1.0, 2, 2),
    ]  # fmt: skip


def test_an_answers_score_is_the_models_own(engine: Engine) -> None:
    ids = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog" * 4)
    first = len(ids) - 5
    with engine.session(context_tokens=300, k_bits=16, v_bits=16) as session:
        whole = log_softmax(np.concatenate(list(session.logits(ids))))
    rows = [whole[at - 1] for at in range(first, len(ids))]
    answer_ids = ids[first:]
    with engine.session(context_tokens=300, k_bits=16, v_bits=16) as session:
        session.prefill(ids[: first - 1])
        score = score_answer(session, ids, first)
    assert score.nats == pytest.approx(
        -np.mean([row[token] for row, token in zip(rows, answer_ids, strict=True)]), rel=1e-3
    )
    ranks = [1 + int((row > row[token]).sum()) for row, token in zip(rows, answer_ids, strict=True)]
    assert score.reciprocal_rank == pytest.approx(np.mean([1 / rank for rank in ranks]), rel=0.05)


PROSE = (
    "The mill stands by the water. Nobody has ground flour there for years.\n"
    "Its wheel turns when the river is high, and children watch it from the bridge. "
    "In winter the pond freezes over! Who would not skate on it? Some fall and laugh.\n\n"
) * 40


def facts(tokenizer: Tokenizer, **options: Any) -> list[RecallQuestion]:
    options = {"lengths": [700], "depths": [0.0, 0.25, 1.0], "trials": 1, "seed": 5} | options
    return questions("facts", tokenizer, prose=PROSE, **options)


def test_two_facts_lie_in_prose_and_both_are_asked_for(tokenizer: Tokenizer) -> None:
    recall_questions = facts(tokenizer)
    assert [question.depth for question in recall_questions] == [0.0, 0.5, 0.25, 0.75, 1.0, 0.5]
    for first, second in zip(recall_questions[::2], recall_questions[1::2], strict=True):
        texts = [tokenizer.decode(question.ids) for question in (first, second)]
        documents = [text.rpartition("\n\n")[0] for text in texts]
        assert documents[0] == documents[1]
        assert first.answer != second.answer
        for question, text, document in zip((first, second), texts, documents, strict=True):
            assert 600 < len(question.ids) <= 700
            *_, asks, lead = text.splitlines()
            assert asks.startswith("What is the ")
            statement = f"{lead} {question.answer}."
            assert document.count(statement) == 1
            begin = document.index("\n\n") + 2
            share = (document.index(statement) - begin) / (len(document) - begin)
            assert abs(share - question.depth) < 0.1
            # What is left of it is the prose as it stands, from some sentence on.
            rest = document[begin:].replace(statement, "")
            for hidden in (first, second):
                rest = rest.replace(hidden.answer + ".", "")
            assert "Its wheel turns when the river is high, and children watch it" in rest
            # Without a chat template the answer continues the prompt.
            assert tokenizer.decode(question.ids_with_answer) == f"{text} {question.answer}"
    assert facts(tokenizer) == recall_questions
    other_seed = facts(tokenizer, seed=6)
    assert all(
        question.ids != other.ids
        for question, other in zip(recall_questions, other_seed, strict=True)
    )


def test_a_model_that_chats_is_asked_through_its_template(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    plain = facts(tokenizer)[0]
    text = tokenizer.decode(plain.ids)
    body, question, _ = text.partition("Read this text")[2].rpartition(" called?")
    message = {"role": "user", "content": f"Read this text{body}{question}"}
    assert tokenizer.chat([message], add_generation_prompt=True) == plain.ids
    # How likely the name is, is asked behind the words an answer begins with.
    begun = tokenizer.decode(plain.ids_with_answer[len(plain.ids) : plain.first])
    assert begun.startswith("The ")
    assert tokenizer.decode(plain.ids_with_answer[plain.first :]).strip() == plain.answer


def test_prose_that_is_too_short_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        DataError, match=r"the text fills \d+ of --context 90000; give more or long"
    ):
        facts(tokenizer, lengths=[90_000])
    with pytest.raises(DataError, match="a facts prompt of 20 tokens is not possible"):
        facts(tokenizer, lengths=[20])


@pytest.mark.parametrize("chats", [False, True])
def test_a_fact_is_found_where_the_answer_has_its_name(
    tokenizer: Tokenizer, engine: Engine, *, chats: bool
) -> None:
    used_tokenizer = engine.tokenizer if chats else tokenizer
    recall_questions = facts(used_tokenizer)
    answers = [question.answer for question in recall_questions]
    written = [
        f" {answers[0].upper()}, who else?", f"It is {answers[1]}.",
        f"The text does not say. {answers[3]}?", answers[2], "", answers[5],
    ]  # fmt: skip
    row = np.full(used_tokenizer.vocab_size, 1 / used_tokenizer.vocab_size)
    sessions = [FixedSession(row, used_tokenizer.encode(text)) for text in written]
    opened = iter(sessions)
    measured = recall(
        lambda: next(opened), used_tokenizer, recall_questions, no_progress, UNITS["facts"]
    )
    assert (measured.value, measured.n, measured.unit) == (3 / 6, 6, "facts found")
    rows = measured.details["rows"]
    assert [(r["depth"], r["correct"], r["trials"]) for r in rows] == [
        (0.0, 1, 1), (0.5, 2, 2), (0.25, 0, 1), (0.75, 0, 1), (1.0, 0, 1)
    ]  # fmt: skip
    assert measured.details["answer_nats"] == pytest.approx(
        log(used_tokenizer.vocab_size), rel=1e-5
    )
    # The last tokens that a session was given are the prompt's and the right answer's.
    for session, question in zip(sessions, recall_questions, strict=True):
        assert session.tokens == question.ids_with_answer[:-1]


@pytest.mark.parametrize(
    ("text", "digits"), [(" 71432.", "71432"), ("is 12 or 34", "12"), ("none", ""), ("", "")]
)
def test_first_digits(text: str, digits: str) -> None:
    assert first_digits(text) == digits


# The table


def test_the_table_gives_every_width_its_bytes_and_its_damage(engine: Engine) -> None:
    text = Path(__file__).read_text()[:4000]
    material = Material(
        tokenizer=engine.tokenizer,
        windows=windows(engine.tokenizer.encode(text), (), 600)[:2],
        questions={
            task: questions(task, engine.tokenizer, lengths=[584], depths=[0.5], trials=1, seed=0)
            for task in ("passkey", "retrieval")
        },
    )
    settings = [
        UNQUANTIZED, CacheSetting(k_bits=8, v_bits=8), CacheSetting(k_bits=2, v_bits=2)
    ]  # fmt: skip
    rows = measure_table(engine.session, material, settings, 600, lambda *_: None)
    assert [row["kv"] for row in rows] == ["fp", "8:8", "2:2"]
    # 4 streams: 64 channels of K and V, 16 bits; 272 bytes of constants in a page of 64 tokens
    assert [row["bytes_per_token"] for row in rows] == [
        4 * 64 * 4, 4 * (272 / 64 + 64 * 2), 4 * (272 / 64 + 64 / 2)
    ]  # fmt: skip
    assert rows[0]["kld"] == 0.0 < rows[1]["kld"] < rows[2]["kld"]
    assert rows[0]["kv_bytes"] > rows[1]["kv_bytes"] > rows[2]["kv_bytes"]
    for row in rows:
        assert row["kld"] <= row["kld_99"]
        assert row["perplexity"] > 1
        assert row["retrieval_rows"][0]["answer_nats"] == row["retrieval_nats"] > 0
    # a task alone gives what the table gives
    (alone,) = material.measure_all(
        "kld", [settings[2].opener(engine.session, 600)],
        UNQUANTIZED.opener(engine.session, 600), no_progress,
    )  # fmt: skip
    assert alone.value == rows[2]["kld"]
