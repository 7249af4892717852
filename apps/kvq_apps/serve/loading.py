"""From a model's name and the KV flags to a served model. Runs in the engine's thread."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvq.settings import cache_folder
from kvq_apps import known_models
from kvq_apps.completion.prompts import OwnedPrompts
from kvq_apps.opening import open_engine
from kvq_apps.output import kv_text
from kvq_apps.serve.config import ServeConfig
from kvq_models.infilling import fixed_tokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.constraint import Constraint, Grammar
from kvq_runtime.named_engine import Engine
from kvq_runtime.serving.pool import Served
from kvq_runtime.serving.saving import SavedSessions
from kvq_runtime.serving.slots import Slots


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel(Served):
    """What the routes know of the model too; `kv` are the widths as people write them.

    `budget_tokens`: what a session holds at those widths. `names`: every name it goes by.
    `grammar` reads a constraint for the model's vocabulary (`Vocabulary.grammar`). `sampling` is
    the model's own.
    """

    name: str
    names: frozenset[str]
    tokenizer: Tokenizer
    gaps: OwnedPrompts
    grammar: Callable[[Constraint, Callable[[], bool]], Grammar]
    vocab_size: int
    k_bits: int
    v_bits: int
    kv: str
    budget_tokens: int
    sampling: Sampling
    loaded_at: int

    @property
    def facts(self) -> dict[str, Any]:
        """What is told of it where it is announced; `kv_budget` is a session's bytes."""
        return {
            "model": self.name,
            "kv": self.kv,
            "context": self.context_tokens,
            "budget_tokens": self.budget_tokens,
            "kv_budget": self.slot_bytes,
        }


# Several short answers to one prompt are written side by side in so many rows.
DRAFT_TOKENS = 64


def load(
    model: str | None,
    engine_options: Mapping[str, Any],
    session_options: Mapping[str, Any],
    config: ServeConfig,
) -> ServedModel:
    """Loads the model and opens every arena. Raises `KvqError`."""
    engine = open_engine(model, **engine_options)
    return serve_engine(engine, session_options, config, called=model)


def serve_engine(
    engine: Engine,
    session_options: Mapping[str, Any],
    config: ServeConfig,
    *,
    called: str | None = None,
) -> ServedModel:
    """What is served of an opened engine, which the command line `called` so."""
    session_options = {"draft_tokens": DRAFT_TOKENS, **session_options}
    if engine.tokenizer.fim is not None:
        session_options["sink_tokens"] = fixed_tokens(engine.tokenizer)
    first = engine.session(**session_options)
    settings = asdict(replace(first.config, arena=None)) | {"model": engine.model.fingerprint}
    first.close()
    saved = SavedSessions(
        config.saved_folder or cache_folder() / "sessions",
        repr(sorted(settings.items())) + engine.backend.cache_kind,
        config.saved_bytes,
    )
    plan = first.config.plan
    return ServedModel(
        name=engine.model.name,
        names=_names(engine, called),
        tokenizer=engine.tokenizer,
        gaps=OwnedPrompts(engine.tokenizer),
        grammar=engine.vocabulary.grammar,
        backend=engine.backend,
        vocab_size=engine.model.vocab_size,
        stop_ids=engine.model.stop_ids,
        k_bits=plan.k_bits,
        v_bits=plan.v_bits,
        kv=kv_text(plan.k_bits, plan.v_bits),
        budget_tokens=first.config.budget_tokens,
        sampling=engine.model.sampling,
        loaded_at=int(time.time()),
        slots=Slots(lambda: engine.session(**session_options), config.sessions, saved),
        close=engine.close,
    )


def _names(engine: Engine, called: str | None) -> frozenset[str]:
    """The manifest's name, the one asked for, those given here, and the folder's or file's."""
    path = engine.files.path
    given = (name for name, place in known_models.named() if place == path)
    names = {engine.model.name, path.name, *given}
    if called is not None:
        names |= {called, Path(called).name}
    return frozenset(names)
