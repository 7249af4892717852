"""One answer, from logits to text: a state machine that calls no model and holds no cache.

`take` is given logits and returns the tokens that they lead to. A `Session`, or a pool of many,
runs these tokens and comes back with the next logits.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_models.pieces import PieceIndex
from kvq_models.tokenizer import IncrementalDetokenizer, Tokenizer
from kvq_runtime.answer.constraint import Constraint, Grammar, Grammars, Guide
from kvq_runtime.answer.drafter import NO_DRAFT, Draft
from kvq_runtime.answer.healing import Beginning
from kvq_runtime.answer.sampling import candidates, draw, likeliest, log_probability, ranked
from kvq_runtime.answer.stop_strings import StopStrings
from kvq_runtime.answer.verify import accept
from kvq_runtime.config import Sampling

Cancel = Callable[[], bool]


def never_cancelled() -> bool:
    """Cancels nothing: always returns False."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Holds one generated token and the text that it completed.

    Attributes:
        token: The token.
        text: Text that is safe to show. It may be empty: a character can span tokens, and text that
            may begin a stop string waits.
        logprob: The model's own natural log-probability, before sampling filters. None unless it
            was asked for.
        top: The likeliest tokens with their log-probabilities, likeliest first, as many as were
            asked for.
        finish_reason: None until the last step, then `stop`, `length` or `cancelled`.
        stop_string: The stop string that ended the answer, if one did.
    """

    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    stop_string: str | None = None


class Detokenizer(Protocol):
    """Turns token ids, one after the other, into whole characters."""

    def fork(self) -> "Detokenizer":
        """Returns another one that stands at the same place."""
        ...

    def skip(self, num_bytes: int) -> None:
        """Leaves out the next `num_bytes` bytes: they belong to the prompt."""
        ...

    def show(self, control: frozenset[int]) -> None:
        """Gives these control tokens a text too."""
        ...

    def push(self, token: int) -> str:
        """Returns the text that `token` completed."""
        ...

    def flush(self) -> str:
        """Returns the rest, when no more tokens come."""
        ...


class NullDetokenizer:
    """Makes no text, for a model without a tokenizer."""

    def fork(self) -> "NullDetokenizer":
        return self

    def skip(self, num_bytes: int) -> None:
        """Does nothing."""

    def show(self, control: frozenset[int]) -> None:
        """Does nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Holds what a generation needs to know of the model's tokens.

    Attributes:
        stop_ids: Tokens that end an answer.
        detokenizer: Makes a fresh detokenizer for each generation.
        pieces: Returns an index that finds tokens by their bytes.
        encode: Turns a text into tokens; its keyword `start` says that nothing stands before the
            text. None: the model has no tokenizer.
        grammars: Reads constraints. None: the model has no tokenizer.
    """

    stop_ids: frozenset[int] = frozenset()
    detokenizer: Callable[[], Detokenizer] = NullDetokenizer
    pieces: Callable[[], PieceIndex] = PieceIndex
    encode: Callable[..., list[int]] | None = None
    grammars: Grammars | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, stop_ids: frozenset[int]) -> "Vocabulary":
        """Returns the vocabulary of a model with this tokenizer, or without one."""
        if tokenizer is None:
            return cls(stop_ids=stop_ids)
        return cls(
            stop_ids=stop_ids,
            detokenizer=lambda: IncrementalDetokenizer(tokenizer),
            pieces=lambda: tokenizer.pieces,
            encode=tokenizer.encode,
            grammars=Grammars(tokenizer),
        )

    def grammar(self, constraint: Constraint, cancelled: Cancel = never_cancelled) -> Grammar:
        """Reads `constraint` for this vocabulary, see `Grammars.read`.

        Raises `UsageError` for a model without a tokenizer.
        """
        if self.grammars is None:
            raise UsageError("this model has no tokenizer, so an answer cannot be constrained")
        return self.grammars.read(constraint, cancelled)


IDS_ONLY = Vocabulary()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """Holds what is asked of one answer.

    Args:
        max_tokens: New tokens at most. None: until the context is full.
        sampling: How tokens are chosen.
        stop_strings: The answer ends before any of these texts.
        stop_ids: The answer ends after any of these tokens. None: the model's end tokens.
        logprobs: Each step has the log-probability of its token.
        top_logprobs: Each step has so many of the likeliest tokens.
        begin_with: Bytes that the first tokens must spell: the end of a prompt that was not
            prefilled, see `heal`. Tokens within them count as the prompt's and make no step. Of the
            first token that reaches beyond them only the rest is text.
        grammar: What follows `begin_with` must match this to its end. `Vocabulary.grammar` reads
            one. None: any text.
        shown: Control tokens whose text is part of the answer.
        draft: False: the session's drafter is not asked. The answer is the same.
        first_rank: The answer begins with the token that so many others are likelier than. 0: as
            the sampling says.

    Raises:
        UsageError: For `max_tokens` below 1, or a `sampling` that is not a `Sampling`.
    """

    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    begin_with: bytes = b""
    grammar: Grammar | None = None
    shown: frozenset[int] = frozenset()
    draft: bool = True
    first_rank: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(about="max_tokens", value=self.max_tokens, possible="give 1 or more")
        _check_sampling(self.sampling)


def _check_sampling(value: object) -> None:
    if not isinstance(value, Sampling):
        raise UsageError(
            "sampling is a Sampling, such as Sampling(temperature=0); "
            f"{type(value).__name__} was given"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """Holds what logits led to.

    `path` are the places of the draft's tokens that were right, and `token` is the token after
    them. The first `prompt_tokens` of these only spell the prompt's end.
    """

    path: tuple[int, ...]
    token: int
    steps: tuple[Step, ...]
    prompt_tokens: int


class Continuation:
    """Tracks what comes after a text, token by token: its text, and why it ended.

    It chooses no token. `new` counts the tokens after the forced beginning. `beginning` knows which
    tokens may come next; None: every token may. `stop_ids` end the answer. Raises `UsageError` for
    a `begin_with` that no tokens spell, and for an empty stop string.
    """

    def __init__(self, vocabulary: Vocabulary, options: GenerationOptions, room: int) -> None:
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.new = 0
        self.room = room
        self._most = options.max_tokens
        self.stop_ids = vocabulary.stop_ids if options.stop_ids is None else options.stop_ids
        self.beginning: Beginning | Guide | None = None
        if options.begin_with or options.grammar is not None:
            self.beginning = Beginning(vocabulary.pieces, options.begin_with)
        if self.beginning is not None and options.grammar is not None:
            self.beginning = options.grammar.guide(self.beginning, self.stop_ids)
        self._detokenizer = vocabulary.detokenizer()
        if options.shown:
            self._detokenizer.show(options.shown)
        if options.begin_with:
            self._detokenizer.skip(len(options.begin_with))
        self._stops = StopStrings(options.stop_strings)

    def fork(self) -> "Continuation":
        """Returns another one that goes on from the same place."""
        other = copy(self)
        other.beginning = copy(self.beginning)
        other._detokenizer = self._detokenizer.fork()
        other._stops = copy(self._stops)
        return other

    @property
    def allowed(self) -> NDArray[np.int64] | None:
        """Returns the tokens that may come next, in the order of their ids. None: every token."""
        return None if self.beginning is None else self.beginning.allowed

    def masked(self, scores: NDArray[np.floating]) -> NDArray[np.floating]:
        """Returns `scores` [V] with minus infinity for the tokens that may not come next."""
        if self.beginning is None or (choices := self.beginning.allowed) is None:
            return scores
        masked = np.full_like(scores, -np.inf)
        masked[choices] = scores[choices]
        return masked

    def take(self, token: int) -> str | None:
        """Returns the text that `token` completes, None where it only spells the prompt's end."""
        self.room -= 1
        text = self._stops.feed(self._detokenizer.push(token))
        ended = False
        if self.beginning is not None:
            if self.beginning.take(token) and self.room > 0:
                return None
            if isinstance(self.beginning, Beginning):
                self.beginning = None
            else:
                ended = self.beginning.ended
        self.new += 1
        if token in self.stop_ids or self._stops.match is not None or ended:
            self.finish_reason = "stop"
        elif self.new == self._most or self.room <= 0:
            self.finish_reason = "length"
        return text

    def rest(self) -> str:
        """Returns the text that waited, now that the end is here."""
        if self._stops.match is None:
            text = self._stops.feed(self._detokenizer.flush())
            text += "" if self._stops.match is not None else self._stops.flush()
        else:
            text = ""
        self.stop_string = self._stops.match
        return text


class Generation:
    """Grows one answer by the logits that `take` is given, until `finish_reason` is set.

    `history` is the text so far, and `room` how many tokens its context can still take. Raises
    `UsageError` for a `begin_with` that no tokens spell, and for an empty stop string.
    """

    # Why the answer ended, None while it goes on.
    finish_reason = cast("str | None", property(attrgetter("_so_far.finish_reason")))

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: GenerationOptions,
        *,
        history: Sequence[int],
        room: int,
        generator: np.random.Generator,
    ) -> None:
        self._options = options
        self._history = list(history)
        self._so_far = Continuation(vocabulary, options, room)
        self._rank = options.first_rank
        every = options.logprobs or options.top_logprobs > 0
        self._exact_rows = 0 if every else options.sampling.exact_rows
        self._generator = generator
        # False: no drafter may guess.
        self.drafts = options.draft

    @property
    def room(self) -> int:
        """Returns how many tokens the answer can still choose."""
        limit, so_far = self._options.max_tokens, self._so_far
        return so_far.room if limit is None else min(so_far.room, limit - so_far.new)

    @property
    def exact_rows(self) -> int:
        """Returns how many of the largest logits decide what comes next; 0: all of them may."""
        if self._exact_rows == 0 or self._so_far.beginning is not None:
            return 0
        return max(self._exact_rows, self._rank + 1)

    @property
    def begun(self) -> bool:
        """Returns whether a token that is not the prompt's was chosen."""
        return self._so_far.new > 0

    def take(
        self,
        logits: NDArray[np.float32],
        draft: Draft = NO_DRAFT,
        *,
        cancel: Cancel = never_cancelled,
    ) -> Accepted:
        """Chooses tokens along `draft` while they agree with it, and one more.

        Along a draft without probabilities every token is sampled as plain decoding samples it,
        with the same random numbers in the same order, so the answer is the same. Along other
        drafts it has the same distribution, see `verify.accept`.

        Args:
            logits: Float32 [1 + len(draft.ids), V], after the text and after each drafted token.
            draft: The guesses. Default: none.
            cancel: Asked after each token.

        Returns:
            The tokens that were chosen, and their steps.
        """
        place, path, steps, prompt_tokens = -1, list[int](), list[Step](), 0
        while True:
            row, allowed, rank = logits[place + 1], self._so_far.allowed, self._rank
            if rank:
                self._rank, choices = 0, ranked(row, rank, allowed)
            else:
                choices = candidates(row, self._options.sampling, self._history, allowed)
            token, guess = accept(*choices, draft, place, self._generator)
            step = self._step(row, token, cancel)
            prompt_tokens += step is None
            steps += [] if step is None else [step]
            if guess is None or self._so_far.finish_reason is not None:
                return Accepted(
                    path=tuple(path), token=token, steps=tuple(steps), prompt_tokens=prompt_tokens
                )
            path.append(guess)
            place = guess

    def foresight(self) -> "SamplingForesight":
        """Returns a sampler that stands where this answer does and goes on along guesses."""
        return SamplingForesight(
            self._options.sampling, self._history, copy(self._so_far.beginning), self._generator
        )

    def _step(self, logits: NDArray[np.float32], token: int, cancel: Cancel) -> Step | None:
        """Takes the next `token`; returns its step unless it only spells the prompt's end."""
        options, so_far = self._options, self._so_far
        self._history.append(token)
        text = so_far.take(token)
        if so_far.finish_reason is None and cancel():
            so_far.finish_reason = "cancelled"
        if text is None:
            return None
        if so_far.finish_reason is not None:
            text += so_far.rest()
        return Step(
            token=token,
            text=text,
            logprob=log_probability(logits, token) if options.logprobs else None,
            top=likeliest(logits, options.top_logprobs) if options.top_logprobs else (),
            finish_reason=so_far.finish_reason,
            stop_string=so_far.stop_string,
        )


class SamplingForesight:
    """Implements `drafter.Foresight`; its random numbers are never used by the answer itself."""

    def __init__(
        self,
        sampling: Sampling,
        history: Sequence[int],
        beginning: Beginning | Guide | None,
        generator: np.random.Generator,
    ) -> None:
        self._sampling = sampling
        self._history = list(history)
        self._beginning = beginning
        self._generator = generator

    def choose(self, logits: NDArray[np.float32]) -> tuple[int, NDArray[np.float64] | None] | None:
        allowed = None if self._beginning is None else self._beginning.allowed
        try:
            ids, probabilities = candidates(logits, self._sampling, self._history, allowed)
        except UsageError:  # the answer itself raises it, if it gets here
            return None
        token = draw(ids, probabilities, self._generator)
        self._history.append(token)
        if self._beginning is not None:
            self._beginning.take(token)
        if self._sampling.greedy:
            return token, None
        dense = np.zeros(len(logits), np.float64)
        dense[ids] = probabilities
        return token, dense
