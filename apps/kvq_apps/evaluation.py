"""Quality at a KV setting: perplexity, divergence from an unquantised cache, passkey retrieval.

Knows sessions and texts, no flags and no terminal. Texts are cut into windows of equal length;
the second half of each window is scored, so that every scored token has a full half of context.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from kvq.errors import DataError
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.session import Session

OpenSession = Callable[[], Session]
Progress = Callable[[int, int], None]
Floats = NDArray[np.floating]

# Logits of this many rows are held at once: 64 rows of a 150k vocabulary are 38 MB.
SCORE_CHUNK_TOKENS = 64

MIN_WINDOW_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One task's outcome: `value` in `unit` over `n` samples, `details` for whoever wants more."""

    value: float
    unit: str
    n: int
    kv_bytes: int
    details: dict[str, object] = field(default_factory=dict)


def windows(ids: Sequence[int], start: Sequence[int], context_tokens: int) -> list[list[int]]:
    """`ids` in runs that fill `context_tokens` with the model's `start` tokens before each.

    A shorter end counts only when it is all there is. Raises `DataError` for a text too short.
    """
    run = context_tokens - len(start)
    if min(len(ids), run) < MIN_WINDOW_TOKENS:
        raise DataError(
            f"the text has {len(ids)} tokens and a window takes {run}; "
            f"scoring needs at least {MIN_WINDOW_TOKENS}"
        )
    count = max(1, len(ids) // run)
    return [[*start, *ids[i * run : (i + 1) * run]] for i in range(count)]


def perplexity(
    open_session: OpenSession,
    tokenizer: Tokenizer,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> Measurement:
    """Perplexity of the scored tokens of `texts` (windows of ids), and bits per byte."""
    nats, scored, text_bytes, kv_bytes = 0.0, 0, 0, 0
    for number, ids in enumerate(texts):
        with open_session() as session:
            for start, logits in _scored_logits(session, ids):
                targets = np.asarray(ids[start + 1 : start + 1 + len(logits)])
                rows = _log_softmax(logits)[np.arange(len(targets)), targets]
                nats -= float(rows.sum(dtype=np.float64))
                scored += len(targets)
            kv_bytes = max(kv_bytes, session.stats().kv_bytes_peak)
        text_bytes += len(tokenizer.decode(list(ids[_first_scored(ids) + 1 :])).encode())
        progress(number + 1, len(texts))
    return Measurement(
        value=exp(min(nats / scored, 700.0)),
        unit="perplexity",
        n=scored,
        kv_bytes=kv_bytes,
        details={
            "nats_per_token": nats / scored,
            "bits_per_byte": nats / log(2) / max(1, text_bytes),
            "windows": len(texts),
        },
    )


def divergence(
    open_session: OpenSession,
    open_reference: OpenSession,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> Measurement:
    """Mean KL divergence of the next-token distributions from those of the reference session."""
    divergences: list[Floats] = []
    agreed, moved, kv_bytes = 0, 0.0, 0
    for number, ids in enumerate(texts):
        with open_session() as session, open_reference() as reference:
            pairs = zip(_scored_logits(session, ids), _scored_logits(reference, ids), strict=True)
            for (start, logits), (_, expected) in pairs:
                targets = np.asarray(ids[start + 1 : start + 1 + len(logits)])
                actual, wanted = _log_softmax(logits), _log_softmax(expected)
                divergences.append(kl_divergence(wanted, actual))
                agreed += int((actual.argmax(1) == wanted.argmax(1)).sum())
                picked = np.arange(len(targets)), targets
                moved += float(np.square(np.exp(actual[picked]) - np.exp(wanted[picked])).sum())
            kv_bytes = max(kv_bytes, session.stats().kv_bytes_peak)
        progress(number + 1, len(texts))
    values = np.concatenate(divergences)
    return Measurement(
        value=float(values.mean()),
        unit="nats",
        n=len(values),
        kv_bytes=kv_bytes,
        details={
            "kld_99_9": float(np.quantile(values, 0.999)),
            "kld_max": float(values.max()),
            "rms_delta_p": float(np.sqrt(moved / len(values))),
            "same_top_1": agreed / len(values),
            "windows": len(texts),
        },
    )


def kl_divergence(wanted: Floats, actual: Floats) -> Floats:
    """KL(wanted || actual) in nats per row of two log-distributions [n, V]; never below zero."""
    return np.maximum((np.exp(wanted) * (wanted - actual)).sum(1, dtype=np.float64), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passkey:
    """One retrieval prompt: `ids` hide `key` at `depth` (0 start, 1 end)."""

    ids: list[int]
    key: str
    length_tokens: int
    depth: float


def passkey(
    open_session: OpenSession,
    tokenizer: Tokenizer,
    prompts: Sequence[Passkey],
    progress: Progress,
) -> Measurement:
    """Share of prompts whose key the model repeats digit by digit, greedily."""
    rows: dict[tuple[int, float], list[bool]] = {}
    kv_bytes = 0
    for number, prompt in enumerate(prompts):
        with open_session() as session:
            session.prefill(prompt.ids)
            steps = session.generate(2 * len(prompt.key) + 4, sampling=Sampling(temperature=0))
            text = tokenizer.decode([step.token for step in steps])
            kv_bytes = max(kv_bytes, session.stats().kv_bytes_peak)
        hits = rows.setdefault((prompt.length_tokens, prompt.depth), [])
        hits.append(first_digits(text) == prompt.key)
        progress(number + 1, len(prompts))
    return Measurement(
        value=sum(map(sum, rows.values())) / len(prompts),
        unit="exact match",
        n=len(prompts),
        kv_bytes=kv_bytes,
        details={
            "rows": [
                {"length": length, "depth": depth, "correct": sum(hits), "trials": len(hits)}
                for (length, depth), hits in rows.items()
            ]
        },
    )


def passkey_prompts(
    tokenizer: Tokenizer,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
) -> list[Passkey]:
    """Prompts of at most each of `lengths` tokens, with the key at each of `depths`."""
    generator = np.random.default_rng(seed)
    return [
        _passkey_prompt(tokenizer, length, depth, generator)
        for length in lengths
        for depth in depths
        for _ in range(trials)
    ]


def first_digits(text: str) -> str:
    """The first run of digits in `text`, or nothing."""
    match = re.search(r"\d+", text)
    return match[0] if match else ""


_TASK = "There is a pass key hidden in a lot of text that does not matter. Find it and keep it.\n"
_QUESTION = "\nWhat is the pass key? The pass key is"
_FILLER = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.",
    "There and back again.", "The river runs to the sea.", "Bread is made of flour.",
    "The train leaves at noon.", "A door can be open or shut.", "Winter follows autumn.",
)  # fmt: skip


def _passkey_prompt(
    tokenizer: Tokenizer, length_tokens: int, depth: float, generator: np.random.Generator
) -> Passkey:
    """Fills up with sentences in random order, then moves back until it fits."""
    key = str(generator.integers(10_000, 100_000))
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    filler: list[str] = []
    fixed = len(tokenizer.encode(f"{_TASK}{needle}{_QUESTION}", start=True))
    room = length_tokens - fixed
    per_round = len(tokenizer.encode(" ".join(_FILLER)))
    for _ in range(max(0, room) // per_round + 1):
        filler.extend(_FILLER[i] for i in generator.permutation(len(_FILLER)))
    while True:
        place = round(depth * len(filler))
        sentences = [*filler[:place], needle, *filler[place:]]
        ids = tokenizer.encode(f"{_TASK}{' '.join(sentences)}{_QUESTION}", start=True)
        if len(ids) <= length_tokens:
            return Passkey(ids=ids, key=key, length_tokens=length_tokens, depth=depth)
        if not filler:
            raise DataError(
                f"a passkey prompt of {length_tokens} tokens is not possible; "
                f"the shortest with this tokenizer has {len(ids)}"
            )
        excess = len(ids) - length_tokens
        del filler[-max(1, excess * len(filler) // (2 * len(ids))) :]


def _scored_logits(session: Session, ids: Sequence[int]) -> Iterator[tuple[int, Floats]]:
    """(position, logits [n, V]) of the rows that predict a scored token of the window."""
    first, start = _first_scored(ids), 0
    for logits in session.logits(ids):
        skip = max(0, first - start)
        rows = logits[skip : max(skip, len(ids) - 1 - start)]
        if len(rows):
            yield start + skip, rows
        start += len(logits)


def _first_scored(ids: Sequence[int]) -> int:
    """Row whose prediction is the first to be scored."""
    return len(ids) // 2 - 1


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
