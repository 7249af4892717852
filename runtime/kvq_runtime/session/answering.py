"""A sequence and its answers as work, so that a pool can share passes among many.

A step is the same with and without drafts: what is due and what is drafted go through the model in
one pass, the generation takes the logits, and the tokens that agree with them are committed.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.answer.drafter import Drafter
from kvq_runtime.answer.generation import (
    IDS_ONLY,
    Cancel,
    Generation,
    GenerationOptions,
    Step,
    Vocabulary,
    never_cancelled,
)
from kvq_runtime.backends import Backend, C
from kvq_runtime.config import SessionConfig
from kvq_runtime.sequence import sequence as sequences
from kvq_runtime.sequence.passes import PassResult, Work
from kvq_runtime.session.drafting import Drafting
from kvq_runtime.session.metrics import SessionMeter
from kvq_runtime.session.one_thread import OneThread
from kvq_runtime.text_embedding import embedding_of

if TYPE_CHECKING:
    from kvq_runtime.answer.alternatives import Alternative, Writer
    from kvq_runtime.sequence.passages import PromptPassages
    from kvq_runtime.sequence.prediction import Prediction
    from kvq_runtime.session.auxiliary import Auxiliary
    from kvq_runtime.session.branch_answers import BranchAnswers


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHelpers(Generic[C]):
    """Holds what helps an answer: its drafter, and what of its prompt need not be computed.

    That is what is predicted, and the prompt's known passages.
    """

    drafting: Drafting[C]
    prediction: "Prediction | None" = None
    passages: "PromptPassages | None" = None


class Answering(Generic[C]):
    """Holds a sequence with one answer to it at a time, its helpers and its measurements.

    Methods that need passes return `Work`, a generator that asks for them. A method that is given
    no `helpers` uses the session's own.
    """

    def __init__(
        self, *, backend: Backend[C], config: SessionConfig, vocabulary: Vocabulary = IDS_ONLY
    ) -> None:
        self.sequence = sequences.TokenSequence(backend, config)
        self._helpers = AnswerHelpers(drafting=Drafting(backend, self.sequence, None))
        self._predict: str | None = None
        self._reader: Auxiliary | None = None
        self._backend = backend
        self._vocabulary = vocabulary
        self._prompt_end = 0
        self._one_thread = OneThread()
        self._generator = np.random.default_rng(config.seed)
        self._meter = SessionMeter(backend.weight_bytes_per_step)

    @property
    def config(self) -> SessionConfig:
        """Returns what the sequence may hold."""
        return self.sequence.config

    @property
    def drafter(self) -> Drafter | None:
        """Returns the drafter, which belongs to this session alone because it follows its text."""
        return self._helpers.drafting.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        if drafter is self.drafter:
            return
        drafting = Drafting(self._backend, self.sequence, drafter)
        self._helpers.drafting.close()
        self._helpers = replace(self._helpers, drafting=drafting)
        self.sequence.hidden_states = drafting.hidden_states()

    @property
    def predict(self) -> str | None:
        """Returns which part of later prompts is predicted, as `Engine.session` takes it."""
        return self._predict

    @predict.setter
    def predict(self, text: str | None) -> None:
        if text == self._predict:
            return
        prediction = self._prediction(text)
        if prediction is None or prediction.path is None:
            reader = None
        else:
            from kvq_runtime.session.auxiliary import Auxiliary

            reader = Auxiliary(self._backend, prediction.path, self.config.context_tokens)
        self._close_reader()
        self._predict, self._reader = text, reader
        self._helpers = replace(self._helpers, prediction=prediction)

    @property
    def predicts(self) -> bool:
        """Returns whether it may hold predicted keys and values for a prompt."""
        return self._helpers.prediction is not None

    def helpers(
        self,
        drafter: Drafter | None = None,
        predict: str | None = None,
        passages: "PromptPassages | None" = None,
    ) -> AnswerHelpers[C]:
        """Returns the session's own helpers, with another drafter or prediction for one answer.

        Args:
            drafter: A drafter for this answer. None: the session's.
            predict: What is predicted of its prompt. None: as the session does.
            passages: Made by `passages` for this answer's prompt. None: all of it is computed.

        Raises:
            UsageError: For a prediction that the model cannot do, and for a drafter that reads
                hidden states, as these are kept from a text's beginning on.
            BackendError: Where the backend cannot take the drafter's drafts.
        """
        helpers = replace(self._helpers, passages=passages)
        if predict is not None and predict != self._predict:
            helpers = replace(helpers, prediction=self._prediction(predict))
        if drafter is not None:
            if drafter.reads_states:
                raise UsageError(
                    f"{drafter.name} reads the model's states of a whole text, so it cannot be an "
                    "answer's own drafter; give it to the session"
                )
            helpers = replace(helpers, drafting=Drafting(self._backend, self.sequence, drafter))
        return helpers

    def passages(
        self, prompt: Sequence[int], passages: Sequence[Sequence[int]], owner: str = ""
    ) -> "PromptPassages | None":
        """Returns what reads the known passages of a prompt; None where this model cannot.

        A model can whose layers are alike and keep nothing but keys and values.
        """
        paged = self._backend.paged
        if not passages or paged is None or self.sequence.cache.why_not_edit() is not None:
            return None
        if not paged.bundle.config.uniform:
            return None
        from kvq_runtime.sequence.passages import PromptPassages, store_of

        return PromptPassages(store_of(paged), paged.bundle.config, prompt, passages, owner)

    @property
    def draft_bytes(self) -> int:
        """Returns the bytes its drafter holds beside the cache; any thread may call it."""
        return self._helpers.drafting.held_bytes

    @property
    def auxiliary_bytes(self) -> int:
        """Returns the bytes its auxiliary model holds beside the cache; any thread may call it."""
        reader = self._reader
        return 0 if reader is None else reader.held_bytes

    def begin(
        self, options: GenerationOptions, generator: np.random.Generator | None = None
    ) -> Generation:
        """Returns the answer that goes on from here; raises `UsageError` where it has no room.

        `generator` None: the session's own random numbers go on.
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
        self,
        generation: Generation,
        cancel: Cancel = never_cancelled,
        helpers: AnswerHelpers[C] | None = None,
    ) -> Work[C, tuple[tuple[Step, ...], float]]:
        """Does one round of an answer: draft, forward, take, commit; returns its steps and seconds.

        The last token that was chosen stays pending. It goes through the model in the next round.
        """
        sequence, drafting = self.sequence, (helpers or self._helpers).drafting
        # After a rollback that the cache could not follow exactly, a whole prompt may be due.
        due = sequence.ready()
        while sequence.encoding.staleness.gaps or len(due) > sequence.chunk_tokens:
            yield from self.reading(helpers=helpers)
            due = sequence.ready()
        tokens_before = len(sequence)
        first, began = len(due), perf_counter()
        with sequence.branch() as branch:
            draft = yield from drafting.draft(generation, branch, due)
            drafted_s = perf_counter() - began
            result = yield from branch.extend(
                [*due, *draft.ids],
                None if draft.parents is None else _joined(first, draft.parents),
                rows=range(first - 1, first + len(draft.ids)),
                exact_rows=generation.exact_rows,
            )
            began = perf_counter()
            accepted = generation.take(result.logits, draft, cancel=cancel)
            branch.commit([*range(first), *map(first.__add__, accepted.path)])
        sequence.append([accepted.token])
        if first:
            self._measure(tokens_before, first + len(accepted.path), result.seconds)
        ended = perf_counter()
        chosen_s = ended - began
        self._meter.add_choice(accepted.prompt_tokens, len(accepted.path) + 1, chosen_s)
        if accepted.prompt_tokens:
            self._prompt_end = tokens_before + accepted.prompt_tokens
        if drafting.drafter is not None and generation.drafts and result.rows:
            drafting.observe(draft, accepted, result)
            drafted_s += perf_counter() - ended
            self._meter.add_draft(len(draft.ids), len(accepted.path), drafted_s)
        return accepted.steps, drafted_s + result.seconds + chosen_s

    def answering(self, options: GenerationOptions) -> Work[C, list[Step]]:
        """Does a whole answer, whose passes can be shared (`passes.run_all`); returns its steps."""
        generation, steps = self.begin(options), list[Step]()
        while generation.finish_reason is None:
            steps += (yield from self.stepping(generation))[0]
        return steps

    def branches_fit(self, answers: int, max_tokens: int | None, begin_with: bytes = b"") -> bool:
        """Decides whether so many answers of so many tokens can be written by `branch_answers`."""
        if max_tokens is None or not self._backend.takes_trees:
            return False
        # The last token of an answer needs no row, and `begin_with` takes a token a byte at most.
        rows = answers * (max_tokens - 1 + len(begin_with))
        return answers > 1 and rows <= min(self.config.draft_tokens, self.sequence.room)

    @contextmanager
    def branch_answers(
        self, seeds: Sequence[int], options: GenerationOptions, *, distinct: bool = False
    ) -> "Generator[BranchAnswers[C]]":
        """Opens answers to the text so far, one for each seed, over one branch.

        `BranchAnswers.kept` names the answer that the text goes on with. `distinct`: each answer
        begins with another token: the likeliest, the second likeliest, and so on.
        """
        from kvq_runtime.session.branch_answers import BranchAnswers

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

    def reading(
        self, max_tokens: int | None = None, helpers: AnswerHelpers[C] | None = None
    ) -> Work[C, float]:
        """Brings one piece of what is due into the cache; returns its seconds.

        See `TokenSequence.advancing`.
        """
        due_before = len(self.sequence.ready())
        helpers = helpers or self._helpers
        prediction, passages = helpers.prediction, helpers.passages
        reader = None if prediction is None or prediction.path is None else self._reader
        taken_before = self.sequence.encoding.taken_tokens
        seconds = yield from self.sequence.advancing(max_tokens, prediction, reader, passages)
        seconds += yield from self._helpers.drafting.reading()
        from_passages = self.sequence.encoding.taken_tokens - taken_before
        count = due_before - self.sequence.pending_tokens - from_passages
        if count:
            self._measure(self.sequence.cache.tokens, count, seconds)
        return seconds

    @property
    def vocab_size(self) -> int:
        """Returns how many logits a row has."""
        return self._backend.model.vocab_size

    def scoring(self, max_tokens: int) -> Work[C, PassResult]:
        """Brings one piece of what is due into the cache, with the logits of all its rows."""
        piece = self.sequence.ready()[: min(max_tokens, self.sequence.chunk_tokens)]
        with self.sequence.branch() as branch:
            result = yield from branch.extend(piece)
            branch.commit(range(len(piece)))
        return result

    def pooling(self, max_tokens: int | None = None) -> Work[C, tuple[NDArray[np.float32], float]]:
        """Reads the tokens that are pending; returns their pooled states [hidden] and the seconds.

        The states of one token or their mean, as the model's `TextEmbedding` says. It takes
        `max_tokens` in one pass at most. Raises `BackendError` for a model without states.
        """
        embedding = embedding_of(self._backend.model.name, self._backend.model.embedding)
        sums, last = np.zeros(self._backend.model.state_width), np.zeros(0, np.float32)
        count, seconds = self.sequence.pending_tokens, 0.0
        piece_tokens = min(max_tokens or count, self.sequence.chunk_tokens)
        while self.sequence.pending_tokens:
            piece = self.sequence.ready()[:piece_tokens]
            with self.sequence.branch(states=True) as branch:
                result = yield from branch.extend(piece, rows=())
                branch.commit(range(len(piece)))
            assert result.hidden_states is not None
            sums += result.hidden_states.sum(axis=0, dtype=np.float64)
            last, seconds = result.hidden_states[-1], seconds + result.seconds
            self._measure(self.sequence.cache.tokens, len(piece), result.seconds)
        return last if embedding.pooling == "last" else (sums / count).astype(np.float32), seconds

    def drafting(
        self,
        count: int,
        options: GenerationOptions,
        writer: "Writer",
        cancel: Cancel = never_cancelled,
        *,
        exact: bool = True,
    ) -> "Work[C, list[Alternative]]":
        """Does the work of `Session.drafts`, where nothing is pending."""
        from kvq_runtime.answer.alternatives import AlternativesRequest

        self._check_room()
        request = AlternativesRequest(
            self._vocabulary,
            options,
            count=count,
            branch_rows=self.config.draft_tokens,
            room=self.sequence.room,
            history=self.sequence.tokens,
            cancel=cancel,
            exact=exact,
        )
        with self.sequence.branch() as branch:
            lines = yield from writer.writing(branch, request)
        return [request.finished(line) for line in lines]

    def close(self) -> None:
        """Frees the cache's memory, and what its drafter and its auxiliary model hold."""
        self.sequence.close()
        self._helpers.drafting.close()
        self._close_reader()

    def _prediction(self, text: str | None) -> "Prediction | None":
        """Returns the prediction that `text` asks for; raises `UsageError` if it is impossible."""
        if text is None:
            return None
        from kvq_runtime.sequence.prediction import prediction_named

        prediction = prediction_named(text, self._backend.model)
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
                f"raise {self.config.limiting_arguments} or roll the session back"
            )

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _measure(self, reached: int, count: int, seconds: float) -> None:
        """Notes that a pass brought `count` tokens into the cache, up to token `reached`."""
        if reached > self._prompt_end:
            self._meter.add_decode(count, seconds, self.sequence.encoding.cache.used_bytes)
        else:
            self._meter.add_prefill(count, seconds)


def _joined(due: int, parents: Sequence[int]) -> list[int]:
    """Returns the parents of `due` tokens in a row, and of a draft after the last of them."""
    return [*range(-1, due - 1), *(due + parent for parent in parents)]
