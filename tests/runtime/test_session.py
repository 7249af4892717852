"""A session's tokens, steps, cancelling, rollback and files, over a rule instead of a model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from kvq.config import KvPlan
from kvq.errors import BackendError, BudgetError, SnapshotError, UsageError
from kvq_runtime.answer.generation import GenerationOptions, Step, Vocabulary
from kvq_runtime.backends import SequencePass
from kvq_runtime.config import Sampling, SessionConfig
from kvq_runtime.sequence.passes import run, run_all
from kvq_runtime.session.session import Session
from rule_backend import RULE_LOGIT, RuleBackend, RuleCache

VOCABULARY = 64
END = 63
GREEDY = Sampling(temperature=0)


class Letters:
    """Makes token n a letter; tokens 40 and 41 are the two halves of one character."""

    def __init__(self) -> None:
        self.half = False

    def push(self, token: int) -> str:
        if token == 40:
            self.half = True
            return ""
        if token == 41 and self.half:
            self.half = False
            return "é"
        return chr(ord("A") + token)

    def flush(self) -> str:
        return "�" if self.half else ""


def rule_backend(capacity_tokens: int = 10_000) -> RuleBackend:
    """Makes the next token the sum of all tokens so far, modulo the vocabulary."""
    return RuleBackend(
        lambda tokens: sum(tokens) % VOCABULARY,
        vocab_size=VOCABULARY,
        stop_ids=[END],
        capacity_tokens=capacity_tokens,
    )


def open_session(
    *,
    backend: RuleBackend | None = None,
    context_tokens: int = 1000,
    chunk_tokens: int = 4,
    seed: int = 0,
    capacity_tokens: int = 10_000,
    on_pass: Callable[[Sequence[SequencePass[RuleCache]]], None] = lambda _: None,
    encode: Callable[..., list[int]] | None = None,
    **facts: object,
) -> Session[RuleCache]:
    """Opens a session of `backend`, or of a `rule_backend` of its own."""
    if backend is None:
        backend = rule_backend(capacity_tokens)
        backend.on_pass = on_pass
    backend.model = replace(backend.model, **facts)
    return Session(
        backend=backend,
        vocabulary=Vocabulary(stop_ids=frozenset({END}), detokenizer=Letters, encode=encode),
        config=SessionConfig(
            plan=KvPlan(),
            context_tokens=context_tokens,
            budget_bytes=1000,
            chunk_tokens=chunk_tokens,
            seed=seed,
        ),
    )


def rule(prompt: list[int], count: int) -> list[int]:
    """Returns what greedy generation must give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCABULARY)
    return tokens[len(prompt) :]


def tokens_of(steps: Iterator[Step]) -> list[int]:
    return [step.token for step in steps]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 100])
def test_chunks_do_not_change_the_tokens(chunk_tokens: int) -> None:
    session = open_session(chunk_tokens=chunk_tokens)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert session.prefill(prompt)
    assert tokens_of(session.generate(5, sampling=GREEDY)) == rule(prompt, 5)
    assert session.tokens == (*prompt, *rule(prompt, 5))


def test_every_pass_is_begun_and_committed() -> None:
    session = open_session(chunk_tokens=4)
    session.prefill([1, 2, 3, 4, 5, 6])
    tokens_of(session.generate(3, sampling=GREEDY))
    assert session.sequence.cache.calls == [
        *("begin 4", "commit 4", "begin 2", "commit 2"),
        *("begin 1", "commit 1", "begin 1", "commit 1"),
    ]
    assert session.pending_tokens == 1


def test_a_second_prompt_continues_after_the_answer() -> None:
    session = open_session()
    session.prefill([1, 2])
    first = tokens_of(session.generate(2, sampling=GREEDY))
    session.prefill([7, 8])
    assert tokens_of(session.generate(2, sampling=GREEDY)) == rule([1, 2, *first, 7, 8], 2)


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    open_session().prefill(list(range(10)), progress=lambda *row: seen.append(row))
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_a_cancelled_prefill_goes_on_where_it_stopped() -> None:
    session = open_session()
    prompt = [3] * 10
    answers = iter([False, True])
    assert not session.prefill(prompt, cancel=lambda: next(answers))
    assert session.pending_tokens == 6
    assert session.tokens == tuple(prompt)
    assert session.prefill()
    assert session.pending_tokens == 0
    assert tokens_of(session.generate(3, sampling=GREEDY)) == rule(prompt, 3)


def test_generate_finishes_a_cancelled_prefill_or_yields_nothing() -> None:
    session = open_session()
    session.prefill([3] * 10, cancel=lambda: True)
    assert list(session.generate(3, sampling=GREEDY, cancel=lambda: True)) == []
    assert tokens_of(session.generate(2, sampling=GREEDY)) == rule([3] * 10, 2)


def test_a_failed_pass_leaves_the_session_as_it_was() -> None:
    most = 8

    def breaks(one_pass: Sequence[SequencePass[RuleCache]]) -> None:
        if one_pass[0].positions[-1] > most:
            raise BackendError("the rule broke")

    session = open_session(on_pass=breaks)
    session.prefill([1, 2, 3])
    with pytest.raises(BackendError, match="the rule broke"):
        session.prefill([4] * 20)
    assert session.tokens == (1, 2, 3)
    assert session.sequence.cache.calls[-1] == "rewind 0"
    most = 100
    assert tokens_of(session.generate(4, sampling=GREEDY)) == rule([1, 2, 3], 4)


def test_a_budget_refused_midway_leaves_the_session_as_it_was() -> None:
    session = open_session(capacity_tokens=6)
    with pytest.raises(BudgetError, match="4 more tokens do not fit; 6 do"):
        session.prefill([4] * 20)
    assert session.tokens == ()
    assert session.sequence.cache.tokens == 0


def test_end_tokens_stop_and_carry_the_reason() -> None:
    session = open_session()
    session.prefill([60, 3])
    (step,) = session.generate(9, sampling=GREEDY)
    assert (step.token, step.finish_reason) == (END, "stop")
    assert session.tokens == (60, 3, END)


def test_own_stop_ids_replace_the_models() -> None:
    session = open_session()
    session.prefill([60, 3])
    steps = list(session.generate(3, sampling=GREEDY, stop_ids=[rule([60, 3], 2)[-1]]))
    assert [step.token for step in steps] == rule([60, 3], 2)
    assert [step.finish_reason for step in steps] == [None, "stop"]


def test_length_and_context_end_a_generation() -> None:
    session = open_session(context_tokens=6)
    session.prefill([1, 1])
    assert [step.finish_reason for step in session.generate(2, sampling=GREEDY)] == [None, "length"]
    assert [step.finish_reason for step in session.generate(sampling=GREEDY)] == [None, "length"]
    assert len(session.tokens) == 6
    with pytest.raises(UsageError, match="context of 6 tokens is full"):
        next(session.generate(sampling=GREEDY))


def test_cancel_ends_after_the_step_at_hand() -> None:
    session = open_session()
    session.prefill([1, 1])
    answers = iter([False, True])
    steps = list(session.generate(9, sampling=GREEDY, cancel=lambda: next(answers)))
    assert [step.token for step in steps] == [2, 4]
    assert [step.finish_reason for step in steps] == [None, "cancelled"]
    assert session.tokens == (1, 1, 2, 4)


def answers_of_three(
    on_pass: Callable[[Sequence[SequencePass[RuleCache]]], None],
) -> tuple[list[Session[RuleCache]], Iterator[Any]]:
    """Returns sessions of one model that have read a prompt, and their answers, two at a time."""
    backend = rule_backend()
    sessions = [open_session(backend=backend) for _ in range(3)]
    for place, session in enumerate(sessions):
        session.prefill([1, 2 + place])
    backend.on_pass = on_pass
    work = (
        session.answering(GenerationOptions(max_tokens=count, sampling=GREEDY))
        for session, count in zip(sessions, (5, 2, 4), strict=True)
    )
    return sessions, run_all(work, 2)


def test_answers_that_share_passes_are_those_written_alone() -> None:
    rows: list[int] = []
    _, answers = answers_of_three(lambda made: rows.append(len(made)))
    actual = [(place, tokens_of(iter(steps))) for place, steps in answers]
    assert actual == [(1, rule([1, 3], 2)), (0, rule([1, 2], 5)), (2, rule([1, 4], 4))]
    assert rows == [2, 2, 2, 2]


def test_a_failed_pass_of_several_leaves_each_session_as_it_was() -> None:
    faults = iter([None, BackendError("out of order")])

    def on_pass(_: Sequence[SequencePass[RuleCache]]) -> None:
        if fault := next(faults, None):
            raise fault

    sessions, answers = answers_of_three(on_pass)
    with pytest.raises(BackendError, match="out of order"):
        list(answers)
    for place, begun in enumerate((2, 2, 1)):
        session, expected = sessions[place], rule([1, 2 + place], 4)
        assert session.tokens == (1, 2 + place, *expected[:begun])
        assert tokens_of(session.generate(4 - begun, sampling=GREEDY)) == expected[begun:]


def test_text_is_whole_characters_and_stops_before_a_stop_string() -> None:
    session = open_session()
    session.prefill([20, 20])  # 40, then 80 % 64 = 16, 32, 0, 0, ...
    steps = list(session.generate(3, sampling=GREEDY))
    assert [step.token for step in steps] == [40, 16, 32]
    assert [step.text for step in steps] == ["", "Q", "a�"]
    session = open_session()
    session.prefill([1, 1])  # 2, 4, 8, 16, 32: C E I Q a
    steps = list(session.generate(9, sampling=GREEDY, stop_strings=["IQ"]))
    assert "".join(step.text for step in steps) == "CE"
    assert [step.finish_reason for step in steps] == [None, None, None, "stop"]


def test_held_back_text_comes_out_at_the_end() -> None:
    session = open_session()
    session.prefill([1, 1])
    steps = list(session.generate(3, sampling=GREEDY, stop_strings=["EIX"]))
    assert [step.text for step in steps] == ["C", "", "EI"]


def test_log_probability_of_each_step() -> None:
    session = open_session()
    session.prefill([1, 1])
    (step,) = session.generate(1, sampling=GREEDY, logprobs=True)
    assert step.logprob == pytest.approx(
        RULE_LOGIT - np.log(np.exp(RULE_LOGIT) + VOCABULARY - 1), abs=1e-5
    )


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7])
def test_rollback_then_the_same_again(count: int) -> None:
    session = open_session()
    prompt = [1, 2, 3, 4, 5]
    session.prefill(prompt)
    tokens_of(session.generate(3, sampling=GREEDY))
    session.rollback(count)
    kept = [*prompt, *rule(prompt, 3)][: 8 - count]
    assert session.tokens == tuple(kept)
    assert tokens_of(session.generate(4, sampling=GREEDY)) == rule(kept, 4)


def test_a_cache_that_cannot_go_back_is_filled_again_in_pieces() -> None:
    session = open_session(chunk_tokens=4)
    session.prefill(list(range(10)))
    cache = session.sequence.cache
    cache.chunk_tokens, cache.trim = 4, lambda tokens: cache.ids.clear()
    generation = session.begin(GenerationOptions(max_tokens=3, sampling=GREEDY))
    session.rollback(1)
    while generation.finish_reason is None:
        run(session.stepping(generation))
    assert list(session.tokens[9:]) == rule(list(range(9)), 3)


@pytest.mark.parametrize("edits", [True, False])
def test_a_prompt_with_a_token_that_is_none_changes_nothing(edits: bool) -> None:
    session, text = open_session(), [token % 60 for token in range(100)]
    session.prefill(text)
    with pytest.raises(UsageError, match="token 64 is not one of the model's"):
        session.align([*text[:10], 5, *text[10:60], 64, *text[60:]], edits=edits)
    assert list(session.tokens) == text


def test_impossible_rollbacks_are_refused() -> None:
    session = open_session()
    session.prefill([1, 2])
    with pytest.raises(UsageError, match="cannot roll back 3 tokens; the session holds 2"):
        session.rollback(3)
    session.rollback(2)
    with pytest.raises(UsageError, match="nothing to continue"):
        next(session.generate())


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "the prompt is empty"),
        ([1, -1], "token -1 is not one of the model's: 0 to 63"),
        ([64], "token 64 is not one"),
        ([1] * 11, "the prompt has 11 tokens and the context holds 10; "),
    ],
)
def test_bad_prompts(ids: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_session(context_tokens=10).prefill(ids)


def test_a_prompt_that_fits_only_without_what_is_held() -> None:
    session = open_session(context_tokens=10)
    session.prefill([1] * 6)
    with pytest.raises(UsageError, match="holds 10, of which 6 are used"):
        session.prefill([1] * 5)


def test_seeds_repeat_and_reseed() -> None:
    hot = Sampling(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0)

    def draw(session: Session) -> list[int]:
        session.prefill([1, 2, 3])
        return tokens_of(session.generate(12, sampling=hot, stop_ids=[]))

    assert draw(open_session(seed=1)) == draw(open_session(seed=1))
    assert draw(open_session(seed=1)) != draw(open_session(seed=2))
    again = open_session(seed=9)
    again.reseed(1)
    assert draw(again) == draw(open_session(seed=1))


def test_a_text_needs_a_tokenizer_and_a_session_says_what_it_is() -> None:
    session = open_session()
    with pytest.raises(UsageError, match="no tokenizer: give token ids"):
        session.prefill("text")
    session = open_session(encode=lambda text, start: [int(start), *map(int, text)])
    session.prefill("23")
    session.prefill("45")
    assert session.tokens == (1, 2, 3, 0, 4, 5)
    assert repr(session) == "<kvq.Session: 6 of 1000 tokens, kv=4:4, budget=1000 bytes>"


def test_logits_of_every_token() -> None:
    session = open_session()
    chunks = list(session.logits([1, 2, 3, 4, 5, 6]))
    assert [len(chunk) for chunk in chunks] == [4, 2]
    assert np.concatenate(chunks).argmax(1).tolist() == [1, 3, 6, 10, 15, 21]


def test_stats_count_prompt_and_new_tokens() -> None:
    session = open_session()
    session.prefill([1, 2, 3, 4, 5])
    tokens_of(session.generate(4, sampling=GREEDY))
    stats = session.stats()
    assert (stats.prompt_tokens, stats.new_tokens) == (5, 4)
    assert (stats.kv_budget, stats.kv_bytes_peak, stats.bytes_per_token) == (1000, 64, 8.0)
    assert stats.kv_bytes == 64
    assert (stats.held.mean_k_bits, stats.held.mean_v_bits, stats.held.evicted_share) == (
        5.5,
        4.25,
        0.125,
    )
    session.rollback(7)
    assert (session.stats().kv_bytes, session.kv_bytes_peak) == (16, 16)
    assert stats.ttft_ms > 0
    # three decode steps at 6, 7 and 8 tokens of 8 bytes, each reading 100 bytes of weights
    read = 3 * 100 + 8 * (6 + 7 + 8)
    assert stats.bandwidth_gb_s * 1e9 / stats.decode_tok_s == pytest.approx(read / 3)


def test_saving_right_after_prefill_keeps_the_logits(tmp_path: Path) -> None:
    session = open_session()
    session.prefill([1, 2, 3])
    session.save(tmp_path / "one.kvq")
    other = open_session()
    other.load(tmp_path / "one.kvq")
    assert tokens_of(other.generate(3, sampling=GREEDY)) == rule([1, 2, 3], 3)
    # The first token needs no pass, the last one has had none.
    assert sum(call.startswith("begin") for call in other.sequence.cache.calls) == 2


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    session = open_session()
    session.prefill([1, 2, 3])
    session.save(tmp_path / "one.kvq")
    return tmp_path / "one.kvq"


def refused(path: Path, session: Session | None = None) -> str:
    session = open_session() if session is None else session
    session.prefill([5, 6])
    with pytest.raises(SnapshotError) as caught:
        session.load(path)
    assert session.tokens == (5, 6)
    assert session.sequence.cache.ids == [5, 6]
    return str(caught.value)


def test_another_model_or_plan_is_refused(saved: Path) -> None:
    assert "another model: rule, this session has other" in refused(
        saved, open_session(fingerprint="other")
    )
    session = open_session()
    session.sequence.config = replace(session.config, plan=KvPlan(k_bits=8))
    assert "another plan" in refused(saved, session)
    assert "another rope_long" in refused(saved, open_session(short_rope_tokens=10))


@pytest.mark.parametrize("kept", [0, 5, 20, 60, -1])
def test_truncated_sessions_are_refused(saved: Path, kept: int) -> None:
    saved.write_bytes(saved.read_bytes()[:kept])
    assert "one.kvq" in refused(saved)


def test_altered_sessions_are_refused(saved: Path) -> None:
    content = saved.read_bytes()
    for place in range(8, len(content), 7):
        saved.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert "truncated or was altered" in refused(saved)


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    session = open_session()
    session.prefill([1])
    with pytest.raises(SnapshotError, match=r"cannot be saved to .*No such file"):
        session.save(tmp_path / "nowhere" / "one.kvq")
    with pytest.raises(SnapshotError, match="cannot be read"):
        session.load(tmp_path / "absent.kvq")
    (tmp_path / "other").write_text("not one of ours")
    with pytest.raises(SnapshotError, match="is not a saved session"):
        session.load(tmp_path / "other")


def test_a_failed_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvq.files.os.fsync", full)
    session = open_session()
    session.prefill([7])
    with pytest.raises(SnapshotError, match="No space left on device"):
        session.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["one.kvq"]


def test_closing_frees_the_cache() -> None:
    with open_session() as session:
        session.prefill([1])
        cache = session.sequence.cache
    assert cache.calls[-1] == "close"
    for use in (lambda: session.prefill([1]), lambda: next(session.generate()), session.stats):
        with pytest.raises(UsageError, match="this session is closed; open another one"):
            use()
    session.close()
    assert cache.calls.count("close") == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.prefill([1, 2]),
        lambda session: session.align([1, 2]),
        lambda session: session.edit(0, 1, [3]),
        lambda session: session.refresh(),
        lambda session: list(session.generate(1)),
        lambda session: session.drafts(1, 1),
        lambda session: list(session.logits([1])),
        lambda session: session.rollback(1),
        lambda session: session.capture(),
    ],
)
def test_a_second_thread_is_told_that_a_session_serves_one(
    call: Callable[[Session[Any]], object],
) -> None:
    session = open_session()
    session.prefill([1, 2, 3])
    refusals: list[str] = []

    def ask() -> None:
        try:
            call(session)
        except UsageError as error:
            refusals.append(str(error))

    def beside(_done: int, _total: int) -> None:
        thread = Thread(target=ask)
        thread.start()
        thread.join(10)

    tokens = session.tokens
    session.prefill([4], progress=beside)
    refusal = refusals.pop()
    assert "another thread uses this session now; a session serves one thread at a time" in refusal
    assert session.tokens == (*tokens, 4)
    # One after another they may.
    beside(0, 0)
    assert not any("another thread" in refusal for refusal in refusals)
