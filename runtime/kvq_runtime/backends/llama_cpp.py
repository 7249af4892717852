"""llama.cpp over any GGUF file, its own cache inside. Knows no loop.

What it cannot do is refused by name: 2-bit widths, policies and eviction, mixed embeddings, and
models that are not decoders with attention. Without a plan of its own a file runs with an 8-bit
cache. Flash attention is always on: a quantised cache of values needs it.
"""

import logging
from dataclasses import replace
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from kvq.config import FLOAT_WIDTH, KvPlan
from kvq.errors import BackendError, UnsupportedModelError, argument
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends import (
    WHOLE,
    Estimate,
    Mode,
    ModelFacts,
    ModelFiles,
    Pass,
    llama_library,
    llama_trial,
)
from kvq_runtime.backends.llama_cache import LlamaCppCache, open_context
from kvq_runtime.backends.llama_layout import (
    CACHE_TYPES,
    CELLS,
    CacheLayout,
    LayerGroup,
    LlamaSizing,
    layout_of,
    reported_caches,
)
from kvq_runtime.backends.llama_library import LlamaModel
from kvq_runtime.backends.llama_vocabulary import tokenizer_of
from kvq_runtime.config import Sampling, SessionConfig, SessionRequest
from kvq_runtime.gguf_file import GgufFile

NO_POLICY = "none"

logger = logging.getLogger(__name__)


class LlamaCppBackend:
    """One model; every session is a context of its own."""

    name = "llama.cpp"
    takes_trees = False
    takes_drafts: bool
    rows_agree = False
    paged = None

    def __init__(self, files: ModelFiles, *, threads: int, on_gpu: bool = False) -> None:
        reason = self.missing()
        if reason is not None:
            raise BackendError(f"the llama.cpp backend cannot run: {reason}")
        file = files.gguf()
        if file.untried:
            llama_trial.check(file)
        model = LlamaModel(file.path, on_gpu=on_gpu)
        try:
            _refuse_other_kinds(model, file)
            self.layout = _measured_layout(model, file)
            self.takes_drafts = not self.layout.state_bytes
            self._tokenizer = file.bundled_tokenizer or tokenizer_of(model, file)
            self.model = _facts(model, file, self._tokenizer)
            _warn_of_wider(file.name, file.kv, self.model.kv)
        except BaseException:
            model.close()
            raise
        self.weight_bytes_per_step = file.weight_bytes_per_step
        self.cache_kind = f"llama.cpp {model.library.version}"
        self._file = file
        self._model = model
        self._threads = threads
        self._caches: WeakSet[LlamaCppCache] = WeakSet()

    @staticmethod
    def missing() -> str | None:
        """Why this backend cannot run here, or None."""
        return llama_library.missing()

    @staticmethod
    def reads(files: ModelFiles) -> bool:
        """Whether there is a GGUF file."""
        return files.has_gguf

    def tokenizer(self) -> Tokenizer | None:
        """See `Backend.tokenizer`: the bundle's, or the file's own vocabulary."""
        return self._tokenizer

    @staticmethod
    def estimate(files: ModelFiles, request: SessionRequest, *, threads: int) -> Estimate:
        """See `backends.estimate`. Windows, which only llama.cpp knows, count in full."""
        file = files.gguf()
        layout = CacheLayout(
            groups=(LayerGroup(widths=file.kv_widths),), state_bytes=file.state_bytes
        )
        held = _config(file, layout, request.whole(file.context_length))
        return Estimate(
            plan=held.plan,
            context_tokens=held.context_tokens,
            kv_bytes=held.budget_bytes,
            bytes_per_token=lambda plan: (
                None if refusal(file, plan) else layout.bytes_per_token(plan)
            ),
        )

    def session_config(self, request: SessionRequest) -> SessionConfig:
        """See `Backend.session_config`."""
        return _config(self._file, self.layout, request)

    def open_cache(self, config: SessionConfig) -> LlamaCppCache:
        """See `Backend.open_cache`."""
        cache = LlamaCppCache(self._model, self.layout, config, threads=self._threads)
        self._caches.add(cache)
        return cache

    def check_mode(self, mode: Mode) -> None:
        """See `Backend.check_mode`: llama.cpp knows whole passes only."""
        if mode != WHOLE:
            raise BackendError(
                "passes over fewer bits or fewer layers are not possible on the llama.cpp "
                "backend; run a bundle with an ONNX graph"
            )

    def forward(self, one_pass: Pass[LlamaCppCache]) -> list[NDArray[np.float32]]:
        """See `Backend.forward`; each sequence is a context of its own, and a pass of its own."""
        if any(rows.ids.shape[1] != 1 or np.any(rows.weights != 1) for rows in one_pass.rows):
            raise BackendError(
                "mixed embeddings are not possible on the llama.cpp backend; run a bundle with "
                "an ONNX graph"
            )
        return [rows.cache.forward(rows) for rows in one_pass.rows]

    def resident(self) -> None:
        """See `Backend.resident`."""

    def close(self) -> None:
        """See `Backend.close`."""
        for cache in list(self._caches):
            cache.close()
        self._model.close()


def refusal(file: GgufFile, plan: KvPlan) -> str | None:
    """Why a cache of these widths is not possible, or None."""
    for what, name, bits in (("keys", "k_bits", plan.k_bits), ("values", "v_bits", plan.v_bits)):
        if bits not in CACHE_TYPES:
            return (
                f"{what} of {bits} bits ({argument('kv')} or {argument(name)}) are not possible "
                "on the llama.cpp backend: choose 8 or 4, or 16 for both "
                f"({argument('kv', 'fp')}); {bits}-bit pages need a bundle with an ONNX graph"
            )
    widths = 2 * (plan.k_bits, plan.v_bits)
    for head_dim, bits in zip(file.head_dims + file.windowed_head_dims, widths, strict=True):
        if head_dim % CACHE_TYPES[bits].block:
            return (
                "a quantised cache is not possible on the llama.cpp backend with heads of "
                f"{head_dim} channels, no multiple of {CACHE_TYPES[bits].block}; choose "
                f"{argument('kv', 'fp')}"
            )
    return None


def _config(file: GgufFile, layout: CacheLayout, request: SessionRequest) -> SessionConfig:
    if request.policy not in (None, NO_POLICY):
        raise BackendError(
            f"{argument('policy')} {request.policy} is not possible on the llama.cpp backend, "
            "whose cache evicts nothing: leave the flag out, or run a bundle with an ONNX graph"
        )
    if request.read not in (None, "all"):
        raise BackendError(
            f"{argument('kv_read')} {request.read} is not possible on the llama.cpp backend, "
            "which reads its whole cache: leave the flag out, or run a bundle with an ONNX graph"
        )
    if request.offload_bytes:
        raise BackendError(
            f"{argument('kv_offload')} is not possible on the llama.cpp backend: leave the flag "
            f"out, or run a bundle with an ONNX graph on {argument('device', 'cuda')}"
        )
    plan = request.plan(_possible_plan(file))
    reason = refusal(file, plan)
    if reason is not None:
        raise BackendError(reason)
    sizing = LlamaSizing(
        layout=layout,
        plan=plan,
        model_tokens=file.context_length,
        chunk_tokens=request.chunk_tokens,
    )
    context_tokens, budget_bytes = sizing.session(request)
    return SessionConfig(
        plan=plan,
        context_tokens=context_tokens,
        budget_bytes=budget_bytes,
        policy=NO_POLICY,
        evicts=False,
        chunk_tokens=request.chunk_tokens,
        draft_tokens=request.draft_tokens,
        seed=request.seed,
    )


def _refuse_other_kinds(model: LlamaModel, file: GgufFile) -> None:
    functions, pointer = model.library.functions, model.pointer
    kinds = {
        "an encoder": functions.llama_model_has_encoder(pointer),
        "no decoder": not functions.llama_model_has_decoder(pointer),
        "a recurrent state instead of a cache": functions.llama_model_is_recurrent(pointer),
        "diffusion instead of a next token": functions.llama_model_is_diffusion(pointer),
    }
    found = [kind for kind, holds in kinds.items() if holds]
    if found:
        raise UnsupportedModelError(
            f"{file.path} is a {file.architecture} model with {' and '.join(found)}; kvq runs "
            "decoder-only language models whose past is a KV cache"
        )


def _measured_layout(model: LlamaModel, file: GgufFile) -> CacheLayout:
    """The caches llama.cpp makes of this model, from its report on a smallest one."""
    config = SessionConfig(
        plan=KvPlan(k_bits=FLOAT_WIDTH, v_bits=FLOAT_WIDTH, sink_tokens=0),
        context_tokens=CELLS,
        budget_bytes=0,
        chunk_tokens=1,
    )
    context, lines = open_context(model, config=config, threads=1, sequences=1)
    model.library.functions.llama_free(context)
    window_tokens = model.library.functions.llama_model_n_swa(model.pointer)
    layout = replace(
        layout_of(reported_caches(lines), file.kv_widths, window_tokens),
        turns_in_part=file.rotary_dim < file.head_dims[0],
        state_bytes=file.state_bytes,
    )
    layout.check(lines, config.plan, config.context_tokens, config.chunk_tokens)
    return layout


def _facts(model: LlamaModel, file: GgufFile, tokenizer: Tokenizer | None) -> ModelFacts:
    return ModelFacts(
        name=file.name,
        context_length=file.context_length,
        vocab_size=model.library.functions.llama_vocab_n_tokens(model.vocabulary),
        num_layers=file.num_layers,
        stop_ids=frozenset(() if tokenizer is None else tokenizer.eos_ids),
        fingerprint=file.fingerprint,
        kv=_possible_plan(file),
        sampling=Sampling(**file.sampling),
    )


def _possible_plan(file: GgufFile) -> KvPlan:
    """The file's plan, at the next wider types llama.cpp has where it lacks one."""
    return KvPlan(k_bits=_wider(file.kv.k_bits), v_bits=_wider(file.kv.v_bits), sink_tokens=0)


def _warn_of_wider(name: str, asked: KvPlan, held: KvPlan) -> None:
    widths = (asked.k_bits, asked.v_bits, held.k_bits, held.v_bits)
    if widths[:2] != widths[2:]:
        logger.warning(
            "the KV plan of %s is %d:%d; llama.cpp has no 2-bit types, so its default is %d:%d",
            name,
            *widths,
        )


def _wider(bits: int) -> int:
    return min(other for other in CACHE_TYPES if other >= bits)
