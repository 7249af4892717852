"""Loads the model of a server, in the engine's thread."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvq.settings import cache_folder
from kvq_apps.completion.prompts import GapPrompts, OwnedPrompts
from kvq_apps.names import known_models
from kvq_apps.names.engine import Engine, open_engine
from kvq_apps.serve.config import ServeConfig
from kvq_apps.terminal import output
from kvq_models.infilling import fixed_tokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.constraint import Constraint, Grammar
from kvq_runtime.backends import ModelFiles
from kvq_runtime.config import Sampling
from kvq_runtime.serving.pool import Served
from kvq_runtime.serving.saving import SavedSessions
from kvq_runtime.serving.slots import Slots
from kvq_runtime.text_embedding import TextEmbedding


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel(Served):
    """Holds a loaded model for the routes, and what they need to read a request.

    `names` are all names of the model; with `strict` a request for another one is refused.
    `grammar` reads a constraint for the model's vocabulary (`Vocabulary.grammar`). `exact`: what
    follows a change in a prompt is read again, unless the request says otherwise. `facts` are what
    is printed when it is ready: those of a session (`output.cache_facts`), the model
    and a session's bytes. `owner` is the request's, whose sessions it may find again.
    """

    name: str
    names: frozenset[str]
    tokenizer: Tokenizer
    owned_gaps: OwnedPrompts
    grammar: Callable[[Constraint, Callable[[], bool]], Grammar]
    vocab_size: int
    k_bits: int
    v_bits: int
    facts: Mapping[str, Any]
    sampling: Sampling
    loaded_at: int
    strict: bool
    exact: bool
    owner: str = ""

    @property
    def gaps(self) -> GapPrompts:
        """Returns the owner's prompts around gaps."""
        return self.owned_gaps.for_owner(self.owner)

    @property
    def embedding(self) -> TextEmbedding | None:
        return self.backend.model.embedding

    @property
    def state_width(self) -> int:
        """Returns how many numbers a vector has."""
        return self.backend.model.state_width


# Several short answers to one prompt are written in one pass, in so many rows.
DRAFT_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeRequest:
    """Holds what flags ask for: a model, how it and its sessions are opened, how it is served."""

    model: str | None
    engine_options: Mapping[str, Any]
    session_options: Mapping[str, Any]
    config: ServeConfig

    def load(self) -> ServedModel:
        """Loads the model and opens every arena. Raises `KvqError`."""
        engine = open_engine(self.model, **self.engine_options)
        engine.tokenizer.begin_chat()
        return serve_engine(engine, self.session_options, self.config, requested_name=self.model)

    def with_threads(self, threads: int) -> "ServeRequest":
        """Returns this request with another number of threads."""
        return replace(self, engine_options={**self.engine_options, "threads": threads})


def serve_engine(
    engine: Engine,
    session_options: Mapping[str, Any],
    config: ServeConfig,
    *,
    requested_name: str | None = None,
) -> ServedModel:
    """Makes a served model of an opened engine; the user called it `requested_name`."""
    moves = config.reuse == "moved"
    session_options = {"draft_tokens": DRAFT_TOKENS, "edits": moves, **session_options}
    if engine.tokenizer.fim is not None:
        session_options["sink_tokens"] = fixed_tokens(engine.tokenizer)
    first = engine.session(**session_options)
    settings = asdict(replace(first.config, arena=None)) | {"model": engine.model.fingerprint}
    first.close()
    saved = SavedSessions(
        config.saved_folder or cache_folder() / "sessions",
        repr(sorted(settings.items())) + engine.backend.cache_kind,
        config.saved_bytes,
        first.config.context_tokens,
    )
    return ServedModel(
        name=engine.model.name,
        names=names_of(engine.files, requested_name) | {*config.aliases},
        tokenizer=engine.tokenizer,
        owned_gaps=OwnedPrompts(engine.tokenizer),
        grammar=engine.vocabulary.grammar,
        backend=engine.backend,
        vocab_size=engine.model.vocab_size,
        stop_ids=engine.model.stop_ids,
        k_bits=first.config.plan.k_bits,
        v_bits=first.config.plan.v_bits,
        facts={
            "model": engine.model.name,
            **output.cache_facts(first.config),
            "kv_budget": first.config.budget_bytes,
        },
        sampling=replace(engine.model.sampling, **config.sampling),
        loaded_at=int(time.time()),
        strict=config.strict_model,
        exact=config.reuse == "exact",
        slots=Slots(lambda: engine.session(**session_options), config.sessions, saved),
        close=engine.close,
    )


def names_of(files: ModelFiles, requested_name: str | None) -> frozenset[str]:
    """Returns all names of the model: in its manifest, of its file, from users, as requested."""
    path = files.path
    chosen_names = (name for name, place in known_models.named_models() if place == path)
    names = {files.name, path.name, *chosen_names}
    if requested_name is not None:
        names |= {requested_name, Path(requested_name).name}
    return frozenset(names)
