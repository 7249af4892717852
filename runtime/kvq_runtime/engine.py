"""Loads a model once and opens sessions on it. Knows backends by name only."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, cast, overload

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
from kvq_runtime import backends, gpu
from kvq_runtime.alternatives import Writer
from kvq_runtime.backends import ModelFacts, ModelFiles
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import DEFAULT_MAX_TOKENS, Sampling, SessionRequest
from kvq_runtime.drafter import Drafter
from kvq_runtime.generation import Step, Vocabulary
from kvq_runtime.gguf_file import GgufFile
from kvq_runtime.gguf_format import is_gguf
from kvq_runtime.healing import heal
from kvq_runtime.session import Session, no_names
from kvq_runtime.tuning import default_threads

logger = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Engine:
    """One model's weights in memory, and the way to sessions on them.

    `complete` and `chat` answer once; `session` opens a text that grows. Any thread may call
    them, also several at once; `close` is for when none does.
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

        `threads` None: as `tuning.default_threads` has it. `backend` auto: the fastest that
        runs here. `device` cuda: a GPU; auto: a GPU where it can be used, and a line in the log
        where not. `weights_budget`: bytes of a model's experts that may be in memory, 4GiB, those
        that are chosen most; `resident` tells. Raises `BundleError`, `ModelError`,
        `BackendError` or `UsageError`.
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
        """What may be known of the model."""
        return self.backend.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `BackendError` for a model that has none."""
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
        session: Mapping[str, Any] = _NOTHING,
        **generation: Any,
    ) -> str | Iterator[Step]:
        """What follows `text`, as text or, with `stream`, as steps while they are made.

        Runs in a session of its own that is closed at the end. `session` holds arguments of
        `session`, such as {"kv_budget": "64MiB"}; what else is given goes to `Session.generate`,
        such as `sampling`. The end of `text` is healed, see `healing.heal`. `max_tokens` None:
        until the model ends the text or the context is full. Raises what `session`,
        `Session.prefill` and `Session.generate` raise, a stream when its first step is asked for.
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
        **generation: Any,
    ) -> Iterator[Step]: ...

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        *,
        stream: bool = False,
        session: Mapping[str, Any] = _NOTHING,
        **generation: Any,
    ) -> str | Iterator[Step]:
        """The model's answer to `messages`, each {"role": ..., "content": ...}; else as `complete`.

        A text stands for one message of the user. Raises `UsageError` for no messages, `ModelError`
        for a model without a chat template, or whose template refuses the messages.
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
        ids = self.tokenizer.chat(messages, add_generation_prompt=True)
        return self._answer(ids, session, generation | {"max_tokens": max_tokens}, stream=stream)

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
        """A new, empty sequence. What is None comes from the model and its backend.

        `kv` is both widths at once, keys first: 4:2, 8:8 or fp; `k_bits` and `v_bits` refine it.
        `kv_budget` is bytes, or text such as 64MiB, 4096tok or 25% (of what the whole context
        takes in fp16); None: what 8192 tokens (or a shorter context) need. `kv_offload`: bytes of
        the host's memory, 8GiB, for pages of the context that a device's budget does not hold.
        `kv_read` is what is read of the cache's pages: 25% of them, `all`, or a row of
        `kvq.selectors` with options; None: `blasst`. `draft` makes the drafter, such as
        `kvq_specdraft.lookup.Lookup`, or `lambda: None` where every token is to take a pass of its
        own; None: the engine's `drafter`. `draft_tokens`: rows that drafts may take. `predict`:
        predict the keys and values of such a share of the layers of a prompt, 50%, instead of
        computing them, see `kvq_runtime.prediction`; lossy, and None or `off`: none.
        `sink_tokens`: so few of the first tokens stay as they are in front of an edit. `edits`:
        the text will be edited in the middle, so layers with a window keep what it has passed;
        without it an edit may compute all that follows again. Raises `UsageError`, `BackendError`
        for what the backend cannot do, and `BudgetError` for a budget too small, naming the
        smallest that works.
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
        """What of the model's experts is in memory; None where `weights_budget` was not given."""
        return self.backend.resident()

    def drafter(self) -> Drafter | None:
        """The drafter of a session that asks for none in particular; here it gets none."""
        return None

    def writer(self, name: str) -> Writer:
        """The method of `Session.drafts` called `name`; the engine of `import kvq` knows some."""
        return no_names(name)

    def close(self) -> None:
        """Gives the weights' memory back; sessions of this engine end with it."""
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
        """Warns once per length of a context longer than the model knows."""
        if context_tokens > self._longest_context:
            self._longest_context = context_tokens
            warn_beyond_training(context_tokens, self.model.context_length)


def warn_beyond_training(context_tokens: int, model_tokens: int) -> None:
    """Warns of a context longer than the model's own."""
    if context_tokens > model_tokens:
        logger.warning(
            "a context of %d tokens is more than the %d this model was made for; expect "
            "worse text beyond that",
            context_tokens,
            model_tokens,
        )


def check_text(what: str, text: object) -> None:
    """Raises `UsageError` for what is no text."""
    if not isinstance(text, str):
        raise UsageError(f"{what} takes a text; {type(text).__name__} was given")


def check_names(what: str, given: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raises `UsageError` for a name in `given` that is no argument of `function`."""
    parameters = signature(function).parameters.values()
    taken = [one.name for one in parameters if one.name != "self"]
    unknown = next((name for name in given if name not in taken), None)
    if unknown is None or any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    fields = {field.name for field in dataclasses.fields(Sampling)}
    advice = f"give sampling=Sampling({unknown}=...)" if unknown in fields else "leave it out"
    raise UsageError(
        f"{what} takes no argument {unknown!r}; {advice}. Possible are {', '.join(taken)}"
    )


def _budget(given: Budget | str | int | None) -> Budget:
    if given is None:
        return Budget()
    return given if isinstance(given, Budget) else parse_budget(given)


def _are_messages(messages: object) -> bool:
    if not isinstance(messages, Sequence):
        return False
    return all(isinstance(message, Mapping) for message in cast(Sequence[object], messages))


def open_files(path: Path | str) -> ModelFiles:
    """The checked bundle or GGUF file at `path`. Raises `BundleError` or `ModelError`."""
    return GgufFile.open(path) if is_gguf(path) else Bundle.open(path)
