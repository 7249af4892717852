"""What a pool is asked for, and why it may refuse. Knows no protocol."""

from collections.abc import Callable
from dataclasses import dataclass

from kvq.errors import KvqError
from kvq_runtime.alternatives import Writer
from kvq_runtime.config import Sampling
from kvq_runtime.constraint import Grammar
from kvq_runtime.drafter import Drafter
from kvq_runtime.generation import GenerationOptions


class PoolError(KvqError):
    """A pool does not take, or does not finish, a request; `retry_s` later it may.

    `code` is queue_full, shutting_down or not_read.
    """

    def __init__(self, message: str, *, code: str, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_s = retry_s


def leaving() -> PoolError:
    """What a request is answered with while the pool shuts down."""
    return PoolError(
        "the server is shutting down; ask again when it is back", code="shutting_down", retry_s=5
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """`choices` continuations of each of `prompts` (token ids).

    `max_tokens` None: until the context is full; 0: only read the prompt. `stop_ids` None: the
    model's own. `indent`: end before a line with fewer leading spaces; `time_limit_ms`: end at
    the first line break after this long. `top_logprobs` alternatives come with every token.
    `rank` is a value of `scheduler.PRIORITIES`. `reuse`: begin from what another request of this
    beginning left. `transient`: an editor's request, whose session is not worth keeping on disk.
    `healed`: of each prompt the ids to read and the bytes that its answers begin with, as
    `healing.heal` has them; none: the prompts as they are. `owner`: whose sessions may be found
    again, empty where everyone's may. For `grammar` and `shown` see `GenerationOptions`. `draft`:
    whether the session's drafter is asked, or what makes another for this request. `edits`: what
    follows a change of an earlier prompt is kept as it was computed (PIE), not only what stands
    before. `predict`: what of the prompt is predicted, as `Engine.session` takes it; None: as the
    server does. `distinct`: the choices of a prompt begin with different tokens, see
    `Session.branch_answers`. `writer`: who writes the choices of a prompt side by side instead,
    each known when all are; there may be fewer of them.
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
    transient: bool = False
    healed: tuple[tuple[tuple[int, ...], bytes], ...] = ()
    owner: str = ""
    grammar: Grammar | None = None
    shown: frozenset[int] = frozenset()
    draft: bool | Callable[[], Drafter] = True
    edits: bool = False
    predict: str | None = None
    distinct: bool = False
    writer: Writer | None = None

    @property
    def read(self) -> tuple[tuple[tuple[int, ...], bytes], ...]:
        """Of each prompt the ids to read, and the bytes that its answers begin with."""
        return self.healed or tuple((ids, b"") for ids in self.prompts)

    @property
    def num_answers(self) -> int:
        """Choices of all prompts together; one each for a prompt that is only read."""
        return len(self.prompts) * (1 if self.max_tokens == 0 else self.choices)

    def options(self, begin_with: bytes, choice: int = 0) -> GenerationOptions:
        """What is asked of one choice."""
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
