"""Loads the model of a server, in the engine's thread."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvq.settings import cache_folder
from kvq_apps.completion.prompts import OwnedPrompts
from kvq_apps.names import known_models
from kvq_apps.names.engine import Engine, open_engine
from kvq_apps.serve.config import ServeConfig
from kvq_apps.terminal import cache_report
from kvq_models.infilling import fixed_tokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.constraint import Constraint, Grammar
from kvq_runtime.backends import ModelFiles
from kvq_runtime.config import Sampling
from kvq_runtime.serving.pool import Served
from kvq_runtime.serving.saving import SavedSessions
from kvq_runtime.serving.slots import Slots


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel(Served):
    """Holds a loaded model for the routes; `kv` are the widths as `--kv` writes them.

    `budget_tokens`, `full_kv` and `full_tokens` say what a session holds
    (`kvq_apps.terminal.cache_report`). `names` are all names of the model. `grammar` reads a
    constraint for the model's vocabulary (`Vocabulary.grammar`). `sampling` is the model's own.
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
    full_kv: str
    full_tokens: int
    sampling: Sampling
    loaded_at: int

    @property
    def facts(self) -> dict[str, Any]:
        """Returns what is printed when it is ready; `kv_budget` is a session's bytes."""
        return {
            "model": self.name,
            "kv": self.kv,
            "context": self.context_tokens,
            "budget_tokens": self.budget_tokens,
            "full_kv": self.full_kv,
            "full_tokens": self.full_tokens,
            "kv_budget": self.slot_bytes,
        }


# Several short answers to one prompt are written in one pass, in so many rows.
DRAFT_TOKENS = 64


def load(
    model: str | None,
    engine_options: Mapping[str, Any],
    session_options: Mapping[str, Any],
    config: ServeConfig,
) -> ServedModel:
    """Loads the model and opens every arena. Raises `KvqError`."""
    engine = open_engine(model, **engine_options)
    engine.tokenizer.begin_chat()
    return serve_engine(engine, session_options, config, requested_name=model)


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
    plan, facts = first.config.plan, cache_report.facts(first.config)
    return ServedModel(
        name=engine.model.name,
        names=names_of(engine.files, requested_name),
        tokenizer=engine.tokenizer,
        gaps=OwnedPrompts(engine.tokenizer),
        grammar=engine.vocabulary.grammar,
        backend=engine.backend,
        vocab_size=engine.model.vocab_size,
        stop_ids=engine.model.stop_ids,
        k_bits=plan.k_bits,
        v_bits=plan.v_bits,
        kv=facts["kv"],
        budget_tokens=facts["budget_tokens"],
        full_kv=facts["full_kv"],
        full_tokens=facts["full_tokens"],
        sampling=engine.model.sampling,
        loaded_at=int(time.time()),
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
