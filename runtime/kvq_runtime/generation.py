"""One answer, from logits to text: a state machine that never calls a model and holds no cache.

`take` is given logits and says which tokens they lead to; whoever holds the model (a `Session`, a
pool of many, a test with logits made by hand) runs those and comes back with the next logits.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_models.pieces import PieceIndex
from kvq_models.tokenizer import IncrementalDetokenizer, Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.constraint import Constraint, Grammar, Grammars, Guide
from kvq_runtime.drafter import NO_DRAFT, Draft
from kvq_runtime.healing import Beginning
from kvq_runtime.sampling import candidates, draw, likeliest, log_probability, ranked
from kvq_runtime.stop_strings import StopStrings
from kvq_runtime.verify import accept

Cancel = Callable[[], bool]


def never() -> bool:
    """The cancel that does not."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One generated token, the text it completed, and its natural log-probability.

    `text` may be empty: a character can span tokens, and text that may begin a stop string is
    held back. `logprob` is the model's own, before sampling filters, and None unless asked for;
    `top` holds the likeliest (token, log-probability), likeliest first, as many as were asked for.
    `finish_reason` is None until the last step, then stop, length or cancelled; `stop_string` is
    what it stopped at, if at one.
    """

    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    stop_string: str | None = None


class Detokenizer(Protocol):
    """Turns token ids, one by one, into whole characters."""

    def fork(self) -> "Detokenizer":
        """Another that stands at the same place."""
        ...

    def skip(self, num_bytes: int) -> None:
        """Leaves out the first `num_bytes` of what comes: they are the prompt's."""
        ...

    def show(self, control: frozenset[int]) -> None:
        """These control tokens have a text too."""
        ...

    def push(self, token: int) -> str:
        """Text that `token` completed."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come."""
        ...


class NoText:
    """The detokenizer of a model without a tokenizer."""

    def fork(self) -> "NoText":
        """It stands nowhere."""
        return self

    def skip(self, num_bytes: int) -> None:
        """There is nothing to leave out."""

    def show(self, control: frozenset[int]) -> None:
        """There is nothing to show."""

    def push(self, token: int) -> str:
        """Always empty."""
        return ""

    def flush(self) -> str:
        """Always empty."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What a generation knows of the model's tokens.

    `detokenizer` makes a fresh one for each generation; `pieces` finds tokens by their bytes;
    `encode` turns a text into tokens, `start` says that nothing stands before it; `grammars` reads
    constraints.
    """

    stop_ids: frozenset[int] = frozenset()
    detokenizer: Callable[[], Detokenizer] = NoText
    pieces: Callable[[], PieceIndex] = PieceIndex
    encode: Callable[..., list[int]] | None = None
    grammars: Grammars | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, stop_ids: frozenset[int]) -> "Vocabulary":
        """That of a model with this tokenizer, or without one."""
        if tokenizer is None:
            return cls(stop_ids=stop_ids)
        return cls(
            stop_ids=stop_ids,
            detokenizer=lambda: IncrementalDetokenizer(tokenizer),
            pieces=lambda: tokenizer.pieces,
            encode=tokenizer.encode,
            grammars=Grammars(tokenizer),
        )

    def grammar(
        self, constraint: Constraint, cancelled: Callable[[], bool] = lambda: False
    ) -> Grammar:
        """What `Grammars.read` gives for this vocabulary, and raises."""
        if self.grammars is None:
            raise UsageError("this model has no tokenizer, so an answer cannot be constrained")
        return self.grammars.read(constraint, cancelled)


IDS_ONLY = Vocabulary()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """What is asked of one answer.

    It ends after `max_tokens` new tokens (None: when the context is full), after a token of
    `stop_ids` (None: the model's end tokens), or before any of `stop_strings`. `begin_with` is
    the end of a prompt that was not prefilled, see `healing.heal`: the first tokens are chosen
    among those that spell it. Those that lie within it count as the prompt's and make no step;
    of the first that reaches beyond it only the rest is text. What comes after follows `grammar`
    to its end (`Vocabulary.grammar` reads one). The text has the control tokens of `shown`.
    `draft` False: the session's drafter is not asked; the answer is the same. It begins with the
    token that `first_rank` others are likelier than; 0: as the sampling says.
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


def _check_sampling(given: object) -> None:
    if not isinstance(given, Sampling):
        raise UsageError(
            "sampling is a Sampling, such as Sampling(temperature=0); "
            f"{type(given).__name__} was given"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """What logits led to: `path`, the draft's places that were right; the token after them.

    `prompt_tokens` of the path and that token only spell the prompt's end.
    """

    path: tuple[int, ...]
    token: int
    steps: tuple[Step, ...]
    prompt_tokens: int


class Continuation:
    """What comes after a text, token by token: its text, and why it ended. Chooses nothing.

    `new` counts the tokens that are not the forced beginning's, `beginning` knows which may
    come next, where not all may. Raises `UsageError` for a `begin_with` that no tokens spell and
    for an empty stop string.
    """

    def __init__(self, vocabulary: Vocabulary, options: GenerationOptions, room: int) -> None:
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.new = 0
        self.room = room
        self._most = options.max_tokens
        self._stop_ids = vocabulary.stop_ids if options.stop_ids is None else options.stop_ids
        self.beginning: Beginning | Guide | None = None
        if options.begin_with or options.grammar is not None:
            self.beginning = Beginning(vocabulary.pieces, options.begin_with)
        if self.beginning is not None and options.grammar is not None:
            self.beginning = options.grammar.guide(self.beginning, self._stop_ids)
        self._detokenizer = vocabulary.detokenizer()
        if options.shown:
            self._detokenizer.show(options.shown)
        if options.begin_with:
            self._detokenizer.skip(len(options.begin_with))
        self._stops = StopStrings(options.stop_strings)

    def fork(self) -> "Continuation":
        """Another that goes on from the same place."""
        other = copy(self)
        other.beginning = copy(self.beginning)
        other._detokenizer = self._detokenizer.fork()
        other._stops = copy(self._stops)
        return other

    @property
    def allowed(self) -> NDArray[np.int64] | None:
        """The tokens that may come next, in the order of their ids; None: every token."""
        return None if self.beginning is None else self.beginning.allowed

    def is_end(self, token: int) -> bool:
        """Whether `token` says that the answer is over."""
        return token in self._stop_ids

    def take(self, token: int) -> str | None:
        """The text that `token` completes; None where it only spells the prompt's end."""
        self.room -= 1
        text = self._stops.feed(self._detokenizer.push(token))
        ended = False
        if self.beginning is not None:
            if self.beginning.take(token) and self.room > 0:
                return None
            ended = self.beginning.ended
        self.new += 1
        if token in self._stop_ids or self._stops.found is not None or ended:
            self.finish_reason = "stop"
        elif self.new == self._most or self.room <= 0:
            self.finish_reason = "length"
        return text

    def rest(self) -> str:
        """Text held back until the end, which is here."""
        if self._stops.found is None:
            text = self._stops.feed(self._detokenizer.flush())
            text += "" if self._stops.found is not None else self._stops.flush()
        else:
            text = ""
        self.stop_string = self._stops.found
        return text


class Generation:
    """One answer that grows by what `take` is given, until `finish_reason` says why it ended.

    `history` is the text so far and `room` the tokens its context can still take. Raises
    `UsageError` for a `begin_with` that no tokens spell and for an empty stop string.
    """

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
        # Whether a drafter may guess.
        self.drafts = options.draft

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None: it has not."""
        return self._so_far.finish_reason

    @property
    def room(self) -> int:
        """How many tokens it can still choose."""
        limit, so_far = self._options.max_tokens, self._so_far
        return so_far.room if limit is None else min(so_far.room, limit - so_far.new)

    @property
    def exact_rows(self) -> int:
        """How many of the largest logits decide what comes next; 0: all of them may."""
        if self._exact_rows == 0 or self._so_far.allowed is not None:
            return 0
        return max(self._exact_rows, self._rank + 1)

    @property
    def begun(self) -> bool:
        """Whether a token that is not the prompt's was chosen."""
        return self._so_far.new > 0

    def take(
        self, logits: NDArray[np.float32], draft: Draft = NO_DRAFT, *, cancel: Cancel = never
    ) -> Accepted:
        """Chooses tokens along `draft` while they agree with it, and one more.

        `logits` float32 [1 + len(draft.ids), V]: after the text, and after each drafted token.
        Along a draft without probabilities every token is sampled as plain decoding samples it,
        with the same random numbers in the same order, so the answer is the same; along others it
        has the same distribution, see `verify.accept`. `cancel` is asked after each token.
        """
        place, path, steps, prompt_tokens = -1, list[int](), list[Step](), 0
        while True:
            own = logits[place + 1]
            token, guess = accept(*self._candidates(own), draft, place, self._generator)
            step = self._step(own, token, cancel)
            prompt_tokens += step is None
            steps += [] if step is None else [step]
            if self.finish_reason is not None or guess is None:
                return Accepted(
                    path=tuple(path), token=token, steps=tuple(steps), prompt_tokens=prompt_tokens
                )
            path.append(guess)
            place = guess

    def foresight(self) -> "Foresight":
        """A sampler that stands where this answer does and goes on along guesses."""
        return Foresight(
            self._options.sampling, self._history, copy(self._so_far.beginning), self._generator
        )

    def _candidates(
        self, logits: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What may come next, and how likely."""
        allowed = self._so_far.allowed
        rank, self._rank = self._rank, 0
        if rank:
            return ranked(logits, rank, allowed)
        return candidates(logits, self._options.sampling, self._history, allowed)

    def _step(self, logits: NDArray[np.float32], token: int, cancel: Cancel) -> Step | None:
        """Takes `token` as the next; its step unless it only spells the prompt's end."""
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


class Foresight:
    """See `drafter.Foresight`. Its random numbers are the answer's next ones, never used twice."""

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
        """See `drafter.Foresight`."""
        allowed = None if self._beginning is None else self._beginning.allowed
        try:
            ids, probabilities = candidates(logits, self._sampling, self._history, allowed)
        except UsageError:  # the answer's own choice says so too, if it comes to that
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
