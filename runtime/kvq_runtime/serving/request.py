"""What a pool is asked for, and why it may refuse."""

from collections.abc import Callable
from dataclasses import dataclass

from kvq.errors import KvqError
from kvq_runtime.answer.alternatives import Writer
from kvq_runtime.answer.constraint import Grammar
from kvq_runtime.answer.drafter import Drafter
from kvq_runtime.answer.generation import GenerationOptions
from kvq_runtime.config import Sampling


class PoolError(KvqError):
    """Says that a pool does not take, or does not finish, a request; `retry_s` later it may.

    `code` is queue_full, shutting_down or not_read.
    """

    def __init__(self, message: str, *, code: str, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_s = retry_s


def shutdown_error() -> PoolError:
    """Returns the error for a request while the pool shuts down."""
    return PoolError(
        "the server is shutting down; ask again when it is back", code="shutting_down", retry_s=5
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """Asks for `choices` continuations of each of `prompts`.

    Attributes:
        prompts: Token ids of each prompt.
        sampling: How tokens are chosen.
        seed: Seed of the first choice; each later one has the next number.
        rank: A value of `scheduler.PRIORITIES`.
        choices: Continuations of each prompt.
        max_tokens: New tokens at most. None: until the context is full. 0: the prompt is only read.
        stop: Texts that end an answer.
        stop_ids: Tokens that end an answer. None: the model's own.
        logprobs: Every token comes with its log-probability.
        top_logprobs: Every token comes with so many likeliest ones.
        reuse: The request may begin from what another request of the same beginning left.
        indent: The answer ends before a line with fewer leading spaces. 0: off.
        time_limit_ms: The answer ends at the first line break after this long. 0: off.
        truncated: The prompt was cut to fit.
        reconciled: What of a conversation was changed for the chat template.
        transient: An editor's request, whose session is not worth saving on disk.
        healed: For each prompt the ids to read and the bytes that its answers begin with, see
            `heal`. Empty: the prompts as they are.
        owner: Whose sessions may be found again. Empty: everyone's.
        grammar: See `GenerationOptions`.
        shown: See `GenerationOptions`.
        draft: Whether the session's drafter is asked, or a function that makes another one for this
            request.
        edits: What follows a change of an earlier prompt is kept as it was computed (PIE), not only
            what stands before it.
        gap: Token that stands where an editor's text has its gap. With `edits`, what lies between
            the gap's old and new place is computed again. None: there is no such token.
        passages: Parts of the prompt that may be taken over from other prompts of the owner, see
            `Session.prefill`.
        predict: What of the prompt is predicted, as in `Engine.session`. None: as the server does.
        distinct: The choices of a prompt begin with different tokens, see `Session.branch_answers`.
        writer: Writes the choices of a prompt side by side. All are known at once, and there may be
            fewer.
        scored: The prompt's own tokens come with log-probabilities. It is read anew for them.
        pooled: Each prompt gives its pooled hidden states, and no text. It is read anew for them.
        compared: Each prompt gives the logits of these tokens after it, and no text.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    seed: int
    rank: int
    choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    reuse: bool = True
    indent: int = 0
    time_limit_ms: int = 0
    truncated: bool = False
    reconciled: tuple[str, ...] = ()
    transient: bool = False
    healed: tuple[tuple[tuple[int, ...], bytes], ...] = ()
    owner: str = ""
    grammar: Grammar | None = None
    shown: frozenset[int] = frozenset()
    draft: bool | Callable[[], Drafter] = True
    edits: bool = False
    gap: int | None = None
    passages: tuple[tuple[int, ...], ...] = ()
    predict: str | None = None
    distinct: bool = False
    writer: Writer | None = None
    scored: bool = False
    pooled: bool = False
    compared: tuple[int, ...] = ()

    @property
    def read(self) -> tuple[tuple[tuple[int, ...], bytes], ...]:
        """Returns for each prompt the ids to read, and the bytes that its answers begin with."""
        return self.healed or tuple((ids, b"") for ids in self.prompts)

    @property
    def num_answers(self) -> int:
        """Returns the choices of all prompts together; one for a prompt that is only read."""
        return len(self.prompts) * self.choices_of_prompt

    @property
    def choices_of_prompt(self) -> int:
        """Returns the choices of each prompt; one for a prompt that is only read."""
        return 1 if self.max_tokens == 0 else self.choices

    def options(self, begin_with: bytes, choice: int = 0) -> GenerationOptions:
        """Returns the options of one choice."""
        return GenerationOptions(
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop_strings=self.stop,
            stop_ids=self.stop_ids,
            logprobs=self.logprobs or self.top_logprobs > 0,
            top_logprobs=self.top_logprobs,
            begin_with=begin_with,
            grammar=self.grammar,
            shown=self.shown,
            draft=self.draft is not False,
            first_rank=choice if self.distinct else 0,
        )
