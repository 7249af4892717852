"""A sequence and what it takes to answer, as work: whoever holds many runs their passes together.

The step reads the same with and without drafts: what is due and what is drafted go through the
model in one pass, the generation takes the logits, and what agrees with them is committed.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from kvq.errors import UsageError
from kvq_runtime import sequence as sequences
from kvq_runtime.alternatives import Alternative, AlternativesRequest, Writer
from kvq_runtime.auxiliary import Auxiliary
from kvq_runtime.backends import Backend, C
from kvq_runtime.branch_answers import BranchAnswers
from kvq_runtime.config import SessionConfig
from kvq_runtime.drafter import Drafter
from kvq_runtime.drafting import Drafting
from kvq_runtime.generation import (
    IDS_ONLY,
    Cancel,
    Generation,
    GenerationOptions,
    Step,
    Vocabulary,
    never,
)
from kvq_runtime.metrics import Meter, Stopwatch
from kvq_runtime.passes import Work
from kvq_runtime.prediction import Prediction, prediction_named


@dataclass(frozen=True, kw_only=True, slots=True)
class Aids(Generic[C]):
    """What an answer is helped by: who guesses, and what of its prompt is predicted."""

    drafting: Drafting[C]
    prediction: Prediction | None = None


class Answering(Generic[C]):
    """A sequence with an answer to it at a time, and what both are helped by and measured with.

    What takes passes is a generator that asks for them, see `Work`. `aids` are the session's own
    where an answer is given none.
    """

    def __init__(
        self, *, backend: Backend[C], config: SessionConfig, vocabulary: Vocabulary = IDS_ONLY
    ) -> None:
        self.sequence = sequences.TokenSequence(backend, config)
        self._aids = Aids(drafting=Drafting(backend, self.sequence, None))
        self._predict: str | None = None
        self._reader: Auxiliary | None = None
        self._backend = backend
        self._vocabulary = vocabulary
        self._prompt_end = 0
        self._generator = np.random.default_rng(config.seed)
        self._meter = Meter(backend.weight_bytes_per_step)

    @property
    def config(self) -> SessionConfig:
        """What the sequence may hold."""
        return self.sequence.config

    @property
    def drafter(self) -> Drafter | None:
        """Who guesses how the text goes on; one of its own, as it follows this text."""
        return self._aids.drafting.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        if drafter is self.drafter:
            return
        drafting = Drafting(self._backend, self.sequence, drafter)
        self._aids.drafting.close()
        self._aids = replace(self._aids, drafting=drafting)
        self.sequence.states = drafting.states()

    @property
    def predict(self) -> str | None:
        """What of the prompts to come is predicted, as `Engine.session` takes it."""
        return self._predict

    @predict.setter
    def predict(self, text: str | None) -> None:
        if text == self._predict:
            return
        prediction = self._prediction(text)
        reader: Auxiliary | None = None
        if prediction is not None and prediction.path is not None:
            reader = Auxiliary(self._backend, prediction.path, self.config.context_tokens)
        self._close_reader()
        self._predict, self._reader = text, reader
        self._aids = replace(self._aids, prediction=prediction)

    @property
    def predicts(self) -> bool:
        """Whether it may hold predicted keys and values for a prompt."""
        return self._aids.prediction is not None

    def aids(self, drafter: Drafter | None = None, predict: str | None = None) -> Aids[C]:
        """Its own, but for a drafter of the answer's, and for what the answer has predicted.

        Raises what opening the drafter does, and `UsageError` for what cannot be predicted, and for
        a drafter that reads states, which are kept from a text's beginning on.
        """
        own = self._aids
        if predict is not None and predict != self._predict:
            own = replace(own, prediction=self._prediction(predict))
        if drafter is not None:
            if drafter.reads_states:
                raise UsageError(
                    f"{drafter.name} reads the model's states of a whole text, so it cannot be an "
                    "answer's own drafter; give it to the session"
                )
            own = replace(own, drafting=Drafting(self._backend, self.sequence, drafter))
        return own

    @property
    def draft_bytes(self) -> int:
        """What its drafter holds beside the cache; any thread may ask."""
        return self._aids.drafting.held_bytes

    @property
    def auxiliary_bytes(self) -> int:
        """What its auxiliary model holds beside the cache; any thread may ask."""
        reader = self._reader
        return 0 if reader is None else reader.held_bytes

    def begin(
        self, options: GenerationOptions, generator: np.random.Generator | None = None
    ) -> Generation:
        """The answer that goes on from here. Raises `UsageError` where there is no room for one.

        `generator` None: the session's own, which goes on.
        """
        self._check_room()
        return Generation(
            self._vocabulary,
            options,
            history=self.sequence.tokens,
            room=self.sequence.room,
            generator=self._generator if generator is None else generator,
        )

    def stepping(
        self, generation: Generation, cancel: Cancel = never, aids: Aids[C] | None = None
    ) -> Work[C, tuple[tuple[Step, ...], float]]:
        """One round of an answer: draft -> forward -> take -> commit; its steps and seconds.

        The last token chosen stays pending: it goes through the model in the next round.
        """
        sequence, drafting = self.sequence, (aids or self._aids).drafting
        # A cache that could not go back as far as a rollback did may owe a whole prompt.
        due = sequence.ready()
        while sequence.encoding.staleness.gaps or len(due) > sequence.chunk_tokens:
            yield from self.reading(aids=aids)
            due = sequence.ready()
        held = len(sequence)
        first, watch = len(due), Stopwatch()
        with sequence.branch() as branch:
            draft = yield from drafting.draft(generation, branch, due)
            drafted_s = watch.lap()
            passed = yield from branch.extend(
                [*due, *draft.ids],
                None if draft.parents is None else _joined(first, draft.parents),
                rows=range(first - 1, first + len(draft.ids)),
                exact_rows=generation.exact_rows,
            )
            watch.lap()
            accepted = generation.take(passed.logits, draft, cancel=cancel)
            branch.commit([*range(first), *(first + place for place in accepted.path)])
        sequence.append([accepted.token])
        if first:
            self._measure(held, first + len(accepted.path), passed.seconds)
        chosen_s = watch.lap()
        self._meter.chose(accepted.prompt_tokens, len(sequence) - held, chosen_s)
        if accepted.prompt_tokens:
            self._prompt_end = held + accepted.prompt_tokens
        if drafting.drafter is not None and generation.drafts and passed.rows:
            drafting.observe(draft, accepted, passed)
            drafted_s += watch.lap()
            self._meter.drafted(len(draft.ids), len(accepted.path), drafted_s)
        return accepted.steps, drafted_s + passed.seconds + chosen_s

    def answering(self, options: GenerationOptions) -> Work[C, list[Step]]:
        """All of an answer, as work that shares its passes (`passes.run_all`); its steps."""
        generation, steps = self.begin(options), list[Step]()
        while generation.finish_reason is None:
            steps += (yield from self.stepping(generation))[0]
        return steps

    def branches_fit(self, answers: int, max_tokens: int | None, begin_with: bytes = b"") -> bool:
        """Whether so many answers of so many tokens can be written at once: `branch_answers`."""
        if max_tokens is None or not self._backend.takes_trees:
            return False
        # The last token of an answer needs no row, and `begin_with` may be as many as it has bytes.
        rows = answers * (max_tokens - 1 + len(begin_with))
        return answers > 1 and rows <= min(self.config.draft_tokens, self.sequence.room)

    @contextmanager
    def branch_answers(
        self, seeds: Sequence[int], options: GenerationOptions, *, distinct: bool = False
    ) -> Generator[BranchAnswers[C]]:
        """Answers to the text so far, one for each seed; `BranchAnswers.kept` becomes the text's.

        `distinct`: each begins with another token, the likeliest, the second likeliest, and so on.
        """
        answers = [
            self.begin(
                replace(options, first_rank=number) if distinct else options,
                np.random.default_rng(seed),
            )
            for number, seed in enumerate(seeds)
        ]
        with self.sequence.branch() as branch:
            branched = BranchAnswers(branch, answers)
            yield branched
            self.sequence.append(branched.commit())

    def reading(self, max_tokens: int | None = None, aids: Aids[C] | None = None) -> Work[C, float]:
        """Brings one piece of what is due into the cache; its seconds. See `Sequence.advancing`."""
        left = len(self.sequence.ready())
        prediction = (aids or self._aids).prediction
        reader = None if prediction is None or prediction.path is None else self._reader
        seconds = yield from self.sequence.advancing(max_tokens, prediction, reader)
        seconds += yield from self._aids.drafting.reading()
        count = left - self.sequence.pending_tokens
        if count:
            self._measure(self.sequence.cache.tokens, count, seconds)
        return seconds

    def drafting(
        self,
        count: int,
        options: GenerationOptions,
        writer: Writer,
        cancel: Cancel = never,
        *,
        exact: bool = True,
    ) -> Work[C, list[Alternative]]:
        """The work of `drafts`, where nothing is pending."""
        self._check_room()
        asked = AlternativesRequest(
            self._vocabulary,
            options,
            count=count,
            branch_rows=self.config.draft_tokens,
            room=self.sequence.room,
            history=self.sequence.tokens,
            generator=self._generator,
            cancel=cancel,
            recorded=self._backend.model.drafts_method,
            exact=exact,
        )
        with self.sequence.branch() as branch:
            lines = yield from writer.writing(branch, asked)
        return [asked.finished(line) for line in lines]

    def close(self) -> None:
        """Frees the cache's memory, and what its drafter and its auxiliary model hold."""
        self.sequence.close()
        self._aids.drafting.close()
        self._close_reader()

    def _prediction(self, text: str | None) -> Prediction | None:
        """What is predicted as `text` says. Raises `UsageError` for what the backend cannot."""
        prediction = None if text is None else prediction_named(text, self._backend.model)
        if prediction is not None:
            self._backend.check_mode(prediction.mode)
        return prediction

    def _check_room(self) -> None:
        """Raises `UsageError` where no answer can go on."""
        if len(self.sequence) == 0:
            raise UsageError("there is nothing to continue; give a prompt first")
        if self.sequence.room < 1:
            raise UsageError(
                f"the context of {self.config.context_tokens} tokens is full; "
                f"raise {self.config.what_limits} or roll the session back"
            )

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _measure(self, reached: int, count: int, seconds: float) -> None:
        """A pass brought `count` tokens into the cache, the text's first `reached` among them."""
        if reached > self._prompt_end:
            self._meter.decoded(count, seconds, self.sequence.cache.used_bytes)
        else:
            self._meter.prefilled(count, seconds)


def _joined(due: int, parents: Sequence[int]) -> list[int]:
    """Parents of `due` tokens in a row and, after the last of them, those of a draft."""
    return [*range(-1, due - 1), *(due + parent for parent in parents)]
