"""What the backends over a bundle's graph share: kvq's own cache, and what a bundle says.

Knows no engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.classes import (
    ClassedArena,
    ClassedCache,
    ClassedSpec,
    first_classes,
    open_cache,
    spec_of,
)
from kvq.config import DEFAULT_POLICY, DEFAULT_READ, KvPlan, PageForm
from kvq.errors import BackendError, argument
from kvq.formats import bytes_per_token
from kvq.residency import Resident
from kvq.sizing import Arena, CacheSpec
from kvq_models.config import ModelConfig
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import gpu
from kvq_runtime.backends import Estimate, Mode, ModelFacts, ModelFiles, Pass
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import Sampling, SessionConfig, SessionRequest

_PLAN = KvPlan()

PagedCache = Cache | ClassedCache


class PagedBackend(ABC):
    """A bundle's graph, whose sessions live in the paged, quantised cache."""

    name: str
    cache_kind: str
    device = gpu.PROCESSOR
    takes_trees = takes_drafts = True
    rows_agree = False  # matrix products of a library, which rounds as it likes

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        self.model = _facts(bundle)
        self.weight_bytes_per_step = bundle.weight_bytes_per_step
        self.bundle = bundle
        self.threads = threads
        self._draft_head: PagedBackend | None = None
        self._opening = Lock()

    @property
    def paged(self) -> "PagedBackend":
        """See `Backend.paged`."""
        return self

    @property
    def draft_head(self) -> "PagedBackend":
        """The model's draft head, opened once. Raises `BackendError` where there is none."""
        head = self.bundle.draft_head
        if head is None:
            raise BackendError(
                f"{self.model.name} has no draft head; Qwen 3.5 models and Qwen3-Next have one, in "
                "the tensors mtp.* of their checkpoints. Older exports left it out, and any export "
                "leaves out one of several layers: export a checkpoint whose head is one layer "
                f"again, or choose {argument('draft')} auto"
            )
        with self._opening:
            if self._draft_head is None:
                self._draft_head = self._open_draft_head(head)
            return self._draft_head

    def _open_draft_head(self, head: Bundle) -> "PagedBackend":
        return type(self)(head, threads=self.threads)

    @abstractmethod
    def forward(self, one_pass: Pass[PagedCache]) -> list[NDArray[np.float32]]:
        """See `Backend.forward`."""

    def resident(self) -> Resident | None:
        """See `Backend.resident`; only one whose weights are mapped bounds them."""
        return None

    def close(self) -> None:
        """See `Backend.close`; the draft head's too."""
        if self._draft_head is not None:
            self._draft_head.close()

    @staticmethod
    def reads(files: ModelFiles) -> bool:
        """Whether these files hold a graph."""
        return files.has_onnx

    def tokenizer(self) -> Tokenizer | None:
        """See `Backend.tokenizer`."""
        return self.bundle.tokenizer()

    @staticmethod
    def estimate(files: Bundle, request: SessionRequest, *, threads: int) -> Estimate:
        """See `backends.estimate`."""
        classes = files.config.cache_classes
        held = _config(
            files, request.whole(files.config.context_length), threads, on_processor=True
        )
        return Estimate(
            plan=held.plan,
            context_tokens=held.context_tokens,
            kv_bytes=held.budget_bytes,
            bytes_per_token=lambda plan: sum(bytes_per_token(one.shape, plan) for one in classes),
        )

    def check_mode(self, mode: Mode) -> None:
        """See `Backend.check_mode`."""
        layers = self.bundle.config.num_layers
        wrong = next((layer for layer in mode.silent if not 0 <= layer < layers), None)
        if wrong is not None:
            raise BackendError(f"layer {wrong} is none of the model's: 0 to {layers - 1}")
        if mode.fitted and mode.predicted[:1] != (self.model.fitted_layers,):
            raise BackendError(
                f"{self.bundle.path} has no matrices that predict from layer {mode.predicted[:1]}; "
                f"export it again with {argument('predict')}"
            )
        if mode.silent and not self.bundle.config.uniform:
            raise BackendError(
                f"layers of a {self.bundle.config.model_type} model cannot be left out of a pass: "
                "others read what they pass on, or what they remember; draft by other means, and "
                f"leave {argument('predict')} out"
            )
        if not 0 <= mode.head_tokens <= self.model.vocab_size:
            raise BackendError(
                f"a head of {mode.head_tokens} tokens is not possible: 0 (all) to "
                f"{self.model.vocab_size}"
            )

    def session_config(self, request: SessionRequest) -> SessionConfig:
        """See `Backend.session_config`."""
        if request.draft_head:
            _ = self.draft_head  # refused before any memory is taken
        return _config(
            self.bundle, request, self.threads, on_processor=self.device == gpu.PROCESSOR
        )

    def open_cache(self, config: SessionConfig) -> PagedCache:
        """See `Backend.open_cache`."""
        assert config.arena is not None
        return self.cache_in(config.arena)

    def cache_in(self, arena: Arena | ClassedArena) -> PagedCache:
        """An empty cache of this model in `arena`."""
        classes = self.bundle.config.cache_classes
        return open_cache(
            arena,
            weight_norms=[partial(self.bundle.weight_norms, one.layers) for one in classes],
            retrieval=self.bundle.retrieval,
            feedback=self.bundle.key_feedback,
            engine=self.cache_kind if self.device == gpu.PROCESSOR else self.device,
        )


def _config(
    bundle: Bundle, request: SessionRequest, threads: int, *, on_processor: bool
) -> SessionConfig:
    model, manifest = bundle.config, bundle.manifest
    given = request.context_tokens
    classes = class_fields(model, bundle.forms)
    drafting = model.drafting if request.draft_head else None
    spec = spec_of(
        classes + ([] if drafting is None else class_fields(drafting)),
        plan=request.plan(manifest.kv),
        context_tokens=model.context_length if given is None else given,
        budget=request.kv_budget,
        chunk_tokens=request.chunk_tokens,
        draft_tokens=request.draft_tokens,
        threads=threads,
        policy=manifest.policy if request.policy is None else request.policy,
        read=DEFAULT_READ if request.read is None else request.read,
        edits=request.edits,
        offload_bytes=request.offload_bytes,
        offload_file=on_processor,
    )
    arena = _widest(spec.shortened() if given is None else spec, request).resolved()
    whole = _held(arena, spec, request.seed)
    if drafting is None:
        return whole
    assert isinstance(arena, ClassedArena)
    own, last = first_classes(arena, len(classes)), arena.parts[-1]
    return replace(_held(own, spec, request.seed), draft_head=_held(last, spec, request.seed))


def _held(
    arena: Arena | ClassedArena, spec: CacheSpec | ClassedSpec, seed: int | None
) -> SessionConfig:
    """What a sequence in this arena holds."""
    return SessionConfig(
        plan=arena.plan,
        context_tokens=arena.context_tokens,
        budget_bytes=arena.num_bytes,
        policy=spec.policy,
        read=spec.read,
        evicts=arena.plan.quantized,
        chunk_tokens=arena.chunk_tokens,
        draft_tokens=arena.draft_tokens,
        seed=seed,
        arena=arena,
    )


def class_fields(config: ModelConfig, forms: Sequence[PageForm] = ()) -> list[dict[str, Any]]:
    """What of a `CacheSpec` is each class's own; `forms` are of all streams, or none."""
    found: list[dict[str, Any]] = [
        {"shape": one.shape, "windows": one.windows, "readers": one.readers, "forms": tuple(own)}
        for one, own in zip(config.cache_classes, config.by_class(forms), strict=True)
    ]
    found[0] |= {"conv": config.conv_shape, "delta": config.delta_shape}
    return found


def _widest(spec: CacheSpec | ClassedSpec, request: SessionRequest) -> CacheSpec | ClassedSpec:
    """The spec at 8:8 where its bytes cannot hold the context and nobody chose widths.

    The default policy then takes bits where they cost least, and of two real models kept more so
    than from pages that enter at 4:4. A budget in tokens is one at the plan's widths.
    """
    widths, usual = (spec.plan.k_bits, spec.plan.v_bits), (_PLAN.k_bits, _PLAN.v_bits)
    chosen = (request.k_bits, request.v_bits) != (None, None) or widths != usual
    takes_bits = spec.policy.partition(":")[0] == DEFAULT_POLICY and not spec.offload_bytes
    short = spec.budget.tokens is None and spec.budget_bytes < spec.whole_bytes
    if chosen or not (takes_bits and short):
        return spec
    widest = spec.changed(plan=replace(spec.plan, k_bits=8, v_bits=8))
    return widest if widest.budget_bytes >= widest.minimum_bytes else spec


def _facts(bundle: Bundle) -> ModelFacts:
    config, manifest = bundle.config, bundle.manifest
    return ModelFacts(
        name=manifest.name,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        stop_ids=frozenset(manifest.eos_token_ids),
        fingerprint=bundle.fingerprint,
        kv=manifest.kv,
        short_rope_tokens=_short_rope_tokens(config),
        fitted_layers=bundle.fitted_layers,
        state_width=config.hidden_size if config.has_states else 0,
        drafts_method=_drafts_method(manifest.quality or {}),
        sampling=Sampling(**manifest.sampling),
    )


def _drafts_method(quality: Mapping[str, Any]) -> str | None:
    """What the export's report recommends."""
    found: object = quality.get("drafts")
    if not isinstance(found, Mapping):
        return None
    method: object = cast(Mapping[str, object], found).get("method")
    return method if isinstance(method, str) else None


def _short_rope_tokens(config: ModelConfig) -> int | None:
    """The longest context of the first rotary table, if the model has a second one."""
    limits = [rope.original_context for rope in config.ropes if rope.long_inv_freq is not None]
    return min((limit for limit in limits if limit is not None), default=None)
