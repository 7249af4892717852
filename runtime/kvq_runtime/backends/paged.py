"""The common part of the backends over a bundle's graph: kvq's own cache, and facts of a bundle."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Arena, Cache, CacheSpec
from kvq.config import DEFAULT_POLICY, DEFAULT_READ, KvPlan, PageForm
from kvq.devices import storage_on
from kvq.errors import BackendError, argument
from kvq.formats import bytes_per_token
from kvq.residency import Resident
from kvq_models.config import ModelConfig
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends import Estimate, Mode, ModelFacts, ModelFiles, SequencePass
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import Sampling, SessionConfig, SessionRequest
from kvq_runtime.machine import gpu

_PLAN = KvPlan()


class PagedBackend(ABC):
    """Runs a bundle's graph; its sessions live in the paged, quantised cache."""

    name: str
    cache_kind: str
    device = gpu.PROCESSOR
    takes_trees = takes_drafts = True
    rows_agree = False  # a library's products round differently

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        self.model = _facts(bundle)
        self.weight_bytes_per_step = bundle.weight_bytes_per_step
        self.bundle = bundle
        self.threads = threads
        self._draft_head: PagedBackend | None = None
        self._opening = Lock()

    @property
    def paged(self) -> "PagedBackend":
        return self

    @property
    def draft_head(self) -> "PagedBackend":
        """Returns the model's draft head, opened once; raises `BackendError` without one."""
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
    def forward(
        self, rows: Sequence[SequencePass[Cache]], *, rope_long: bool = False
    ) -> list[NDArray[np.float32]]:
        """Implements `Backend.forward`."""

    def resident(self) -> Resident | None:
        """Returns None; only a backend whose weights are mapped limits experts in memory."""
        return None

    def close(self) -> None:
        if self._draft_head is not None:
            self._draft_head.close()

    @staticmethod
    def reads(files: ModelFiles) -> bool:
        return files.has_onnx

    def tokenizer(self) -> Tokenizer | None:
        return self.bundle.tokenizer()

    @staticmethod
    def estimate(files: Bundle, request: SessionRequest, *, threads: int) -> Estimate:
        classes = files.config.cache_classes
        config = _config(
            files, request.whole(files.config.context_length), threads, on_processor=True
        )
        return Estimate(
            session=_config(files, request, threads, on_processor=True),
            plan=config.plan,
            context_tokens=config.context_tokens,
            kv_bytes=config.budget_bytes,
            bytes_per_token=lambda plan: sum(
                bytes_per_token(group.shape, plan) for group in classes
            ),
        )

    def check_mode(self, mode: Mode) -> None:
        layers = self.bundle.config.num_layers
        wrong = next((layer for layer in mode.predicted if not 0 <= layer < layers), None)
        if wrong is not None:
            raise BackendError(f"layer {wrong} is none of the model's: 0 to {layers - 1}")
        if mode.fitted and mode.predicted[:1] != (self.model.fitted_layers,):
            raise BackendError(
                f"{self.bundle.path} has no matrices that predict from layer {mode.predicted[:1]}; "
                f"export it again with {argument('predict')}"
            )
        if mode.predicted and not self.bundle.config.uniform:
            raise BackendError(
                f"layers of a {self.bundle.config.model_type} model cannot be predicted: others "
                f"read what they pass on, or what they remember; leave {argument('predict')} out"
            )
        if not 0 <= mode.head_tokens <= self.model.vocab_size:
            raise BackendError(
                f"a head of {mode.head_tokens} tokens is not possible: 0 (all) to "
                f"{self.model.vocab_size}"
            )

    def session_config(self, request: SessionRequest) -> SessionConfig:
        if request.draft_head:
            _ = self.draft_head  # raises before any memory is taken
        return _config(
            self.bundle, request, self.threads, on_processor=self.device == gpu.PROCESSOR
        )

    def open_cache(self, config: SessionConfig) -> Cache:
        assert config.arena is not None
        return self.cache_in(config.arena)

    def cache_in(self, arena: Arena) -> Cache:
        """Returns an empty cache of this model in `arena`."""
        classes = self.bundle.config.cache_classes
        return Cache(
            arena,
            weight_norms=[partial(self.bundle.weight_norms, group.layers) for group in classes],
            retrieval=self.bundle.retrieval,
            feedback=self.bundle.key_feedback,
            storage=storage_on(self.device),
        )


def _config(
    bundle: Bundle, request: SessionRequest, threads: int, *, on_processor: bool
) -> SessionConfig:
    model, manifest = bundle.config, bundle.manifest
    context_tokens = request.context_tokens
    classes = class_fields(model, bundle.forms)
    drafting = model.drafting if request.draft_head else None
    spec = CacheSpec.of(
        *classes,
        *([] if drafting is None else class_fields(drafting)),
        plan=request.plan(manifest.kv),
        context_tokens=model.context_length if context_tokens is None else context_tokens,
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
    arena = _widest(spec.shortened() if context_tokens is None else spec, request).resolved()
    whole = _session_config(arena, spec, request.seed)
    if drafting is None:
        return whole
    return replace(
        _session_config(arena.first(len(classes)), spec, request.seed),
        draft_head=_session_config(arena.last(), spec, request.seed),
    )


def _session_config(arena: Arena, spec: CacheSpec, seed: int | None) -> SessionConfig:
    """Returns what a sequence in this arena holds."""
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
    """Returns the fields of `ClassSpec` that differ between classes of layers.

    `forms` are those of all KV heads, or empty.
    """
    fields: list[dict[str, Any]] = [
        {
            "shape": group.shape,
            "windows": group.windows,
            "kv_shared_layers": group.kv_shared_layers,
            "page_encodings": tuple(class_forms),
        }
        for group, class_forms in zip(config.cache_classes, config.by_class(forms), strict=True)
    ]
    fields[0] |= {"conv": config.conv_shape, "delta": config.delta_shape}
    return fields


def _widest(spec: CacheSpec, request: SessionRequest) -> CacheSpec:
    """Returns the spec at 8:8 where its bytes cannot hold the context and nobody chose widths.

    The default policy then takes bits where they cost least, which keeps more quality than pages
    that enter at 4:4. A budget in tokens counts at the plan's widths.
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
        embedding=manifest.embedding,
        sampling=Sampling(**manifest.sampling),
    )


def _short_rope_tokens(config: ModelConfig) -> int | None:
    """Returns the longest context of the first rotary table, if the model has a second one."""
    limits = [rope.original_context for rope in config.ropes if rope.long_inv_freq is not None]
    return min((limit for limit in limits if limit is not None), default=None)
