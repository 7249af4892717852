"""Loads a model once and opens sessions on it."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

import numpy as np
from numpy.typing import NDArray

from kvq.config import (
    DEFAULT_DRAFT_TOKENS,
    Budget,
    parse_budget,
    parse_kv,
    parse_offload,
    parse_weights,
)
from kvq.errors import BackendError, UsageError
from kvq.residency import Resident
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import backends
from kvq_runtime.answer.drafter import Drafter
from kvq_runtime.answer.generation import Step, Vocabulary
from kvq_runtime.answer.healing import heal
from kvq_runtime.backends import ModelFacts, ModelFiles
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.gguf_format import is_gguf
from kvq_runtime.config import DEFAULT_MAX_TOKENS, Sampling, SessionRequest
from kvq_runtime.machine import gpu
from kvq_runtime.machine.tuning import default_threads
from kvq_runtime.session.session import Session, no_writers
from kvq_runtime.text_embedding import embedded_ids, embedding_of

if TYPE_CHECKING:
    from kvq_runtime.answer.alternatives import Writer

logger = logging.getLogger(__name__)

_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class Engine:
    """Holds one model's weights in memory and opens sessions on them.

    `complete` and `chat` answer once; `session` opens a text that grows. Any thread may call them,
    also several at once. Call `close` when no thread uses the engine.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        threads: int | None = None,
        backend: str = "auto",
        device: str = gpu.PROCESSOR,
        weights_budget: str | int | None = None,
    ) -> None:
        self.threads = default_threads() if threads is None else threads
        if self.threads < 1:
            raise UsageError(about="threads", value=self.threads, possible="give 1 or more")
        self.files = files
        files.read_ahead()
        self.backend = backends.open_backend(
            backend,
            files,
            threads=self.threads,
            device=device,
            weights_budget=None if weights_budget is None else parse_weights(weights_budget),
        )
        self._tokenizer = self.backend.tokenizer()
        self.vocabulary = Vocabulary.of(self._tokenizer, self.model.stop_ids)
        self._longest_context = self.model.context_length
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        threads: int | None = None,
        backend: str = "auto",
        device: str = gpu.PROCESSOR,
        weights_budget: str | int | None = None,
    ) -> Self:
        """Opens and checks the bundle or GGUF file at `path`.

        The other arguments, and what is raised, are those of `kvq.Engine.open`.
        """
        return cls(
            open_files(path),
            threads=threads,
            backend=backend,
            device=device,
            weights_budget=weights_budget,
        )

    @property
    def model(self) -> ModelFacts:
        """Returns the facts of the model."""
        return self.backend.model

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises `BackendError` for a model that has none."""
        if self._tokenizer is None:
            raise BackendError(
                f"{self.files.path} has no tokenizer, it takes token ids only; export a "
                "checkpoint that has a tokenizer.json"
            )
        return self._tokenizer

    @overload
    def complete(
        self,
        text: str,
        max_tokens: int | None = ...,
        *,
        stream: Literal[False] = ...,
        session: Mapping[str, Any] = ...,
        **generation: Any,
    ) -> str: ...

    @overload
    def complete(
        self,
        text: str,
        max_tokens: int | None = ...,
        *,
        stream: Literal[True],
        session: Mapping[str, Any] = ...,
        **generation: Any,
    ) -> Iterator[Step]: ...

    def complete(
        self,
        text: str,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        *,
        stream: bool = False,
        session: Mapping[str, Any] = _NO_ARGUMENTS,
        **generation: Any,
    ) -> str | Iterator[Step]:
        """Continues `text` in a session of its own, which is closed at the end.

        The end of `text` is healed, see `heal`.

        Args:
            text: The text to continue.
            max_tokens: New tokens at most. None: until the model ends the text or the context is
                full.
            stream: True: returns steps while they are made.
            session: Arguments of `session`, such as {"kv_budget": "64MiB"}.
            **generation: Arguments of `Session.generate`, such as `sampling`.

        Returns:
            The text that follows, or an iterator of steps.

        Raises:
            UsageError: For an argument that is not possible. This and what `session`,
                `Session.prefill` and `Session.generate` raise comes with the first step if `stream`
                is True.
        """
        self._check_open()
        check_text("complete", text)
        check_names("complete", generation, Session[Any].generate)
        ids, begin_with = heal(self.tokenizer, self.tokenizer.encode(text, start=True))
        begin_with += generation.get("begin_with", b"")
        generation |= {"max_tokens": max_tokens, "begin_with": begin_with}
        return self._answer(ids, session, generation, stream=stream)

    @overload
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_tokens: int | None = ...,
        *,
        stream: Literal[False] = ...,
        session: Mapping[str, Any] = ...,
        continue_final_message: bool | None = ...,
        **generation: Any,
    ) -> str: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_tokens: int | None = ...,
        *,
        stream: Literal[True],
        session: Mapping[str, Any] = ...,
        continue_final_message: bool | None = ...,
        **generation: Any,
    ) -> Iterator[Step]: ...

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        *,
        stream: bool = False,
        session: Mapping[str, Any] = _NO_ARGUMENTS,
        continue_final_message: bool | None = None,
        **generation: Any,
    ) -> str | Iterator[Step]:
        """Answers `messages` in a session of its own, which is closed at the end.

        Args:
            messages: Messages {"role": ..., "content": ...}, or a text, which stands for one
                message of the user.
            max_tokens: As in `complete`.
            stream: As in `complete`.
            session: As in `complete`.
            continue_final_message: True: the answer is the rest of the last message. None: so where
                that is an assistant's without calls.
            **generation: As in `complete`.

        Returns:
            The text of the answer, or an iterator of steps.

        Raises:
            UsageError: For no messages, or an argument that is not possible.
            ModelError: For a model without a chat template, or one that refuses the messages.
        """
        self._check_open()
        check_names("chat", generation, Session[Any].generate)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages:
            raise UsageError("there are no messages to answer; give at least one")
        if not _are_messages(messages):
            raise UsageError(
                'chat takes a text or messages, each {"role": ..., "content": ...}; '
                f"{type(messages).__name__} was given"
            )
        prompt = self.tokenizer.prompt(
            messages,
            continue_final_message=_continues(messages[-1], continue_final_message),
        )
        return self._answer(
            prompt.ids, session, generation | {"max_tokens": max_tokens}, stream=stream
        )

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        session: Mapping[str, Any] = _NO_ARGUMENTS,
    ) -> NDArray[np.float32]:
        """Makes a vector of each text, in a session that is closed at the end.

        Args:
            texts: The texts.
            prompt_name: The kind of the texts, such as `query`, for which the model has a prompt.
                None: its default.
            dimensions: Each vector is cut to so many of its first numbers. None: it has all.
            session: As in `complete`.

        Returns:
            Float32 [texts, dimensions]. Vectors have length 1, unless the model asks for others.

        Raises:
            BackendError: For a model that gives no vectors.
            UsageError: For an empty text, one that the context cannot hold, or an argument that is
                not possible.
        """
        self._check_open()
        check_names("session", session, type(self).session)
        embedding = embedding_of(self.model.name, self.model.embedding)
        rows: list[NDArray[np.float32]] = []
        with self.session(**session) as opened:
            most = opened.config.context_tokens
            for text in texts:
                check_text("embed", text)
                ids = embedded_ids(self.tokenizer, embedding.prompt(prompt_name) + text, most)
                rows.append(embedding.vector(opened.pooled(ids), dimensions))
        return np.stack(rows) if rows else np.zeros((0, 0), np.float32)

    def session(
        self,
        *,
        kv: str | None = None,
        kv_budget: Budget | str | int | None = None,
        kv_offload: str | int | None = None,
        k_bits: int | None = None,
        v_bits: int | None = None,
        context_tokens: int | None = None,
        policy: str | None = None,
        kv_read: str | None = None,
        chunk_tokens: int = 256,
        draft_tokens: int | None = None,
        seed: int | None = None,
        draft: Callable[[], Drafter | None] | None = None,
        predict: str | None = None,
        sink_tokens: int | None = None,
        edits: bool = False,
    ) -> Session[Any]:
        """Opens a new, empty session. What is None comes from the model and its backend.

        Args:
            kv: Both cache widths at once, keys first: `4:2`, `8:8` or `fp` (16 bits).
            kv_budget: Bytes of the cache, or a text such as `64MiB`, `4096tok` or `25%` (of what
                the whole context takes at 16 bits). None: what 8192 tokens, or a shorter context,
                need.
            kv_offload: Bytes of the host's memory, or a text such as `8GiB`, for pages of the
                context that a device's budget does not hold. None: none.
            k_bits: Bits of keys: 2, 4, 6, 8 or 16. Refines `kv`.
            v_bits: Bits of values. 16 is possible for both only. Refines `kv`.
            context_tokens: Tokens of the text at most.
            policy: What gives way when the budget is full: a row of `kvq.policies` with options.
            kv_read: Which pages of the cache a step reads: `25%` of them, `all`, or a row of
                `kvq.selectors` with options. None: `blasst`.
            chunk_tokens: Tokens of a prompt in one pass at most.
            draft_tokens: Rows that drafts may take. None: 8.
            seed: Seed of the sampler. None: a random one.
            draft: Makes the drafter, such as `kvq_specdraft.lookup.Lookup`. `lambda: None`: every
                token takes a pass of its own. None: the engine's `drafter`.
            predict: Share of the layers, such as `50%`, whose keys and values of a prompt are
                predicted instead of computed, see `kvq_runtime.sequence.prediction`. It is lossy.
                None or `off`: no layer.
            sink_tokens: How many first tokens always stay in floating point; never more than the
                model's plan has. An edit that changes one of them computes all that follows again.
            edits: The text will be edited in the middle, so layers with a window keep tokens that
                have left it. False: an edit may compute all that follows again.

        Returns:
            The session. The caller closes it, or uses it in a `with` block.

        Raises:
            UsageError: For an argument that is not possible.
            BackendError: For what the backend cannot do.
            BudgetError: For a budget that is too small. The message names the smallest one that
                works.
        """
        self._check_open()
        both = (None, None) if kv is None else parse_kv(kv)
        request = SessionRequest(
            kv_budget=_budget(kv_budget),
            offload_bytes=0 if kv_offload is None else parse_offload(kv_offload),
            k_bits=both[0] if k_bits is None else k_bits,
            v_bits=both[1] if v_bits is None else v_bits,
            context_tokens=context_tokens,
            policy=policy,
            read=kv_read,
            chunk_tokens=chunk_tokens,
            draft_tokens=DEFAULT_DRAFT_TOKENS if draft_tokens is None else draft_tokens,
            seed=seed,
            sink_tokens=sink_tokens,
            edits=edits,
        )
        return self._session(request, self.drafter if draft is None else draft, predict)

    def resident(self) -> Resident | None:
        """Returns what of the model's experts is in memory; None without a `weights_budget`."""
        return self.backend.resident()

    def drafter(self) -> Drafter | None:
        """Returns the drafter of a session that names none; here it gets none."""
        return None

    def writer(self, name: str) -> "Writer":
        """Returns the method of `Session.drafts` called `name`; here it raises `UsageError`.

        The engine of `import kvq` knows some.
        """
        return no_writers(name)

    def close(self) -> None:
        """Frees the weights' memory; sessions of this engine end with it."""
        self._closed = True
        self.backend.close()

    def __repr__(self) -> str:
        model, state = self.model, "closed, " if self._closed else ""
        return (
            f"<kvq.Engine {model.name!r}: {state}{self.backend.name}, threads={self.threads}, "
            f"context_tokens={model.context_length}, kv={model.kv.k_bits}:{model.kv.v_bits}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this engine is closed; open the model again")

    def _session(
        self, request: SessionRequest, draft: Callable[[], Drafter | None], predict: str | None
    ) -> Session[Any]:
        drafter = draft()
        if drafter is not None and drafter.reads_states:
            request = dataclasses.replace(request, draft_head=True)
        config = self.backend.session_config(request)
        self._warn_beyond_training(config.context_tokens)
        session = Session(backend=self.backend, config=config, vocabulary=self.vocabulary)
        session.drafter = drafter
        session.predict = predict
        session.writers = self.writer
        return session

    def _answer(
        self,
        ids: Sequence[int],
        session: Mapping[str, Any],
        generation: Mapping[str, Any],
        *,
        stream: bool,
    ) -> str | Iterator[Step]:
        check_names("session", session, type(self).session)
        steps = self._steps(ids, session, generation)
        return steps if stream else "".join(step.text for step in steps)

    def _steps(
        self, ids: Sequence[int], session: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> Iterator[Step]:
        with self.session(**session) as opened:
            opened.prefill(ids)
            yield from opened.generate(**generation)

    def _warn_beyond_training(self, context_tokens: int) -> None:
        """Warns once for each length of a context that is longer than the model knows."""
        if context_tokens > self._longest_context:
            self._longest_context = context_tokens
            warn_beyond_training(context_tokens, self.model.context_length)


def warn_beyond_training(context_tokens: int, model_tokens: int) -> None:
    """Warns of a context that is longer than the model's own."""
    if context_tokens > model_tokens:
        logger.warning(
            "a context of %d tokens is more than the %d this model was made for; expect "
            "worse text beyond that",
            context_tokens,
            model_tokens,
        )


def check_text(caller: str, text: object) -> None:
    """Raises `UsageError` for what is no text."""
    if not isinstance(text, str):
        raise UsageError(f"{caller} takes a text; {type(text).__name__} was given")


def check_names(caller: str, arguments: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raises `UsageError` for a name in `arguments` that is no argument of `function`."""
    parameters = signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.name != "self"]
    unknown = next((name for name in arguments if name not in names), None)
    if unknown is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    fields = {field.name for field in dataclasses.fields(Sampling)}
    advice = f"give sampling=Sampling({unknown}=...)" if unknown in fields else "leave it out"
    raise UsageError(
        f"{caller} takes no argument {unknown!r}; {advice}. Possible are {', '.join(names)}"
    )


def _budget(budget: Budget | str | int | None) -> Budget:
    if budget is None:
        return Budget()
    return budget if isinstance(budget, Budget) else parse_budget(budget)


def _are_messages(messages: object) -> bool:
    if not isinstance(messages, Sequence):
        return False
    return all(isinstance(message, Mapping) for message in cast(Sequence[object], messages))


def _continues(last: Mapping[str, Any], choice: bool | None) -> bool:
    """Decides whether the answer goes on with the `last` message.

    Raises `UsageError` where it cannot.
    """
    possible = last.get("role") == "assistant" and not last.get("tool_calls")
    if choice and not possible:
        raise UsageError(
            about="continue_final_message",
            value=choice,
            possible="the last message has to be an assistant's without tool_calls",
        )
    return possible if choice is None else choice


def open_files(path: Path | str) -> ModelFiles:
    """Returns the checked bundle or GGUF file at `path`. Raises `BundleError` or `ModelError`."""
    if not is_gguf(path):
        return Bundle.open(path)
    from kvq_runtime.bundle.gguf_file import GgufFile

    return GgufFile.open(path)
