"""Other files in front of a program: what taking them over from earlier prompts loses and saves.

A project's files are cut into passages. Each prompt has some of them in a random order, and then
the beginning of another file. What a session expects of that file's next tokens is compared with
an unquantised cache that computed the whole prompt.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvq.errors import DataError
from kvq_apps.evaluation.measurement import (
    Floats,
    Measurement,
    OpenSession,
    PeakCacheUsage,
    Progress,
    log_softmax,
)
from kvq_apps.evaluation.text import kl_divergence
from kvq_lab.edit_quality import FOLLOWING_TOKENS, first_line
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.sequence.hunks import common_prefix

# Passages of a project, and how many of them stand in a prompt.
PASSAGES, IN_A_PROMPT = 8, 4
# Beginnings of a file that are completed have so many tokens at most, and passages no fewer.
FILE_TOKENS, LEAST_PASSAGE_TOKENS = 400, 64
READ, FROM_STORE, ALONE = "read", "taken over", "without them"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassagePrompt:
    """Holds a prompt: its ids, the passages in it, the file alone, and the tokens that follow."""

    ids: list[int]
    passages: list[list[int]]
    alone: list[int]
    following: list[int]


def passage_prompts(
    tokenizer: Tokenizer,
    files: Sequence[tuple[str, str]],
    *,
    limit: int,
    context_tokens: int,
    seed: int,
) -> list[PassagePrompt]:
    """Returns prompts that have every passage of `files` (name, text) once, and `limit` more.

    Raises `DataError` for too few or too short files.
    """
    chance = random.Random(seed)
    most = (context_tokens - FILE_TOKENS - FOLLOWING_TOKENS) // IN_A_PROMPT
    shuffled = chance.sample(list(files), len(files))
    encoded = [_file_ids(tokenizer, *file)[: FILE_TOKENS + FOLLOWING_TOKENS] for file in shuffled]
    cut = [ids[:most] for ids in encoded[:PASSAGES]]
    rest = [ids for ids in encoded[PASSAGES:] if len(ids) > 2 * FOLLOWING_TOKENS]
    if len(cut) < PASSAGES or min(map(len, cut)) < LEAST_PASSAGE_TOKENS or not rest:
        raise DataError(
            f"{len(files)} files are too few or too short; give {PASSAGES + 1} source files or "
            f"more, and a context of {FILE_TOKENS + 2 * IN_A_PROMPT * LEAST_PASSAGE_TOKENS} tokens"
        )
    start = list(tokenizer.control.start)
    prompts: list[PassagePrompt] = []
    for number in range(PASSAGES // IN_A_PROMPT + limit):
        known = cut[number * IN_A_PROMPT :][:IN_A_PROMPT]
        passages = known or chance.sample(cut, IN_A_PROMPT)
        file = rest[number % len(rest)]
        at = min(FILE_TOKENS, len(file) - FOLLOWING_TOKENS)
        prompts.append(
            PassagePrompt(
                ids=[*start, *(token for passage in passages for token in passage), *file[:at]],
                passages=passages,
                alone=[*start, *file[:at]],
                following=file[at : at + FOLLOWING_TOKENS],
            )
        )
    return prompts


def taking_over(
    open_session: OpenSession,
    open_exact: OpenSession,
    prompts: Sequence[PassagePrompt],
    progress: Progress,
) -> Measurement:
    """Returns the mean KL divergence in nats where passages are taken over, and a row of each way.

    `read` computes the prompt at this width, `without them` the file alone. `prefix_tokens` are
    those that the nearest earlier prompt shares from its beginning, which any engine keeps.
    """
    usage, rows = PeakCacheUsage(), list[_PromptOutcome]()
    warmup = PASSAGES // IN_A_PROMPT
    prefixes: list[int] = []
    for number, prompt in enumerate(prompts):
        if number < warmup:
            _answer(open_session, usage, prompt, prompt.ids, prompt.passages)
        else:
            exact = _answer(open_exact, PeakCacheUsage(), prompt, prompt.ids)
            read = partial(_answer, open_session, usage, prompt)
            answers = {
                READ: read(prompt.ids),
                FROM_STORE: read(prompt.ids, prompt.passages),
                ALONE: read(prompt.alone),
            }
            rows += [_PromptOutcome(way, exact, answer) for way, answer in answers.items()]
            earlier = (common_prefix(before.ids, prompt.ids) for before in prompts[:number])
            prefixes.append(max(earlier))
        progress(number + 1, len(prompts))
    table = [_row([row for row in rows if row.way == way]) for way in (READ, FROM_STORE, ALONE)]
    return usage.measurement(
        float(np.mean([row.nats.mean() for row in rows if row.way == FROM_STORE])),
        "nats",
        len(prompts) - warmup,
        prompt_tokens=float(np.mean([len(prompt.ids) for prompt in prompts[warmup:]])),
        prefix_tokens=float(np.mean(prefixes)),
        rows=table,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PromptAnswer:
    """Holds log-probabilities [n, V] after a prompt, a first line, and what they cost.

    `nats` is the mean negative log-probability of what really follows.
    """

    rows: Floats
    nats: float
    line: str
    computed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _PromptOutcome:
    way: str
    exact: _PromptAnswer
    answer: _PromptAnswer

    @property
    def nats(self) -> Floats:
        return kl_divergence(self.exact.rows, self.answer.rows)

    @property
    def agreement(self) -> float:
        return float((self.answer.rows.argmax(1) == self.exact.rows.argmax(1)).mean())


def _row(outcomes: Sequence[_PromptOutcome]) -> dict[str, object]:
    nats = [float(row.nats.mean()) for row in outcomes]
    error = float(np.std(nats, ddof=1) / len(nats) ** 0.5) if len(nats) > 1 else float("nan")
    same_line = [row.answer.line == row.exact.line for row in outcomes]
    return {
        "way": outcomes[0].way,
        "computed": float(np.mean([row.answer.computed for row in outcomes])),
        "seconds": median(row.answer.seconds for row in outcomes),
        "kld": float(np.mean(nats)),
        "kld_error": error,
        "same_top_1": float(np.mean([row.agreement for row in outcomes])),
        "following_nats": float(np.mean([row.answer.nats for row in outcomes])),
        "same_line": sum(same_line) / len(same_line),
    }


def _answer(
    open_session: OpenSession,
    usage: PeakCacheUsage,
    prompt: PassagePrompt,
    ids: list[int],
    passages: Sequence[list[int]] = (),
) -> _PromptAnswer:
    with open_session() as session:
        started = perf_counter()
        session.prefill(ids, passages=passages)
        seconds = perf_counter() - started
        computed = len(ids) - session.stats().edits.taken_tokens
        state: Any = session.sequence.state()
        rows = log_softmax(np.concatenate(list(session.logits(prompt.following))))
        session.sequence.restore(state)
        line = first_line(session)
        usage.record(session)
    following = np.arange(len(prompt.following) - 1), prompt.following[1:]
    nats = -float(rows[following].mean())
    return _PromptAnswer(rows=rows, nats=nats, line=line, computed=computed, seconds=seconds)


def _file_ids(tokenizer: Tokenizer, name: str, text: str) -> list[int]:
    return tokenizer.encode(f"# {name}\n{text}")
