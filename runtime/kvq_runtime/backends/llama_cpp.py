"""llama.cpp over any GGUF file, with its own cache.

What it cannot do is refused by name: 2-bit widths, policies and eviction, mixed embeddings, and
models that are not decoders with attention. A file without a plan of its own runs with an 8-bit
cache. Flash attention is always on, as a quantised cache of values needs it.
"""

import logging
from collections.abc import Sequence
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from kvq.config import KvPlan
from kvq.errors import BackendError, UnsupportedModelError, argument
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends import (
    WHOLE,
    Estimate,
    Mode,
    ModelFacts,
    ModelFiles,
    SequencePass,
    llama_library,
)
from kvq_runtime.backends.llama_cache import CACHE_TYPES, CacheLayout, LlamaCppCache
from kvq_runtime.backends.llama_library import LlamaModel
from kvq_runtime.backends.llama_vocabulary import tokenizer_of
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.config import Sampling, SessionConfig, SessionRequest

NO_POLICY = "none"

logger = logging.getLogger(__name__)


class LlamaCppBackend:
    """Runs one model; every session is a context of its own."""

    name = "llama.cpp"
    takes_trees = False
    takes_drafts: bool
    rows_agree = False
    paged = None

    def __init__(
        self, files: ModelFiles, *, threads: int, on_gpu: bool = False, tried: bool = False
    ) -> None:
        """Opens the model of `files`, on a GPU if `on_gpu`; `tried`: without a trial before."""
        if (reason := self.missing()) is not None:
            raise BackendError(f"the llama.cpp backend cannot run: {reason}")
        file = files.gguf()
        if not tried:
            llama_library.check(file)
        model = LlamaModel(file.path, on_gpu=on_gpu)
        try:
            _refuse_other_kinds(model, file)
            self.layout = CacheLayout.of(file)
            self.takes_drafts = not model.has_states
            # Whether trimming may not restore what was there.
            self.forgets = model.has_states or model.window_tokens > 0
            self._tokenizer = file.bundled_tokenizer or tokenizer_of(model, file)
        except BaseException:
            model.close()
            raise
        self.model = ModelFacts(
            name=file.name,
            context_length=file.context_length,
            vocab_size=model.library.functions.llama_vocab_n_tokens(model.vocabulary),
            num_layers=file.num_layers,
            stop_ids=frozenset(() if self._tokenizer is None else self._tokenizer.eos_ids),
            fingerprint=file.fingerprint,
            kv=_possible_plan(file),
            sampling=Sampling(**file.sampling),
        )
        widths, possible = (f"{kv.k_bits}:{kv.v_bits}" for kv in (file.kv, self.model.kv))
        if widths != possible:
            logger.warning(
                "the KV plan of %s is %s; llama.cpp has no 2-bit types, so its default is %s",
                file.name,
                widths,
                possible,
            )
        self.weight_bytes_per_step = file.weight_bytes_per_step
        self.cache_kind = f"llama.cpp {model.library.version}"
        self._file = file
        self._model = model
        self._threads = threads
        self._caches: WeakSet[LlamaCppCache] = WeakSet()

    @staticmethod
    def missing() -> str | None:
        return llama_library.missing()

    @staticmethod
    def reads(files: ModelFiles) -> bool:
        return files.has_gguf

    def tokenizer(self) -> Tokenizer | None:
        """Returns the bundle's tokenizer, else one over the file's own vocabulary."""
        return self._tokenizer

    @staticmethod
    def estimate(files: ModelFiles, request: SessionRequest, *, threads: int) -> Estimate:
        file = files.gguf()
        layout = CacheLayout.of(file)
        config = _config(file, layout, request.whole(file.context_length))
        return Estimate(
            session=_config(file, layout, request),
            plan=config.plan,
            context_tokens=config.context_tokens,
            kv_bytes=config.budget_bytes,
            bytes_per_token=lambda plan: (
                None if refusal(file, plan) else layout.bytes_per_token(plan)
            ),
        )

    def session_config(self, request: SessionRequest) -> SessionConfig:
        return _config(self._file, self.layout, request)

    def open_cache(self, config: SessionConfig) -> LlamaCppCache:
        cache = LlamaCppCache(self._model, self.layout, config, threads=self._threads)
        self._caches.add(cache)
        return cache

    def check_mode(self, mode: Mode) -> None:
        if mode != WHOLE:
            raise _impossible("passes over fewer bits or fewer layers are")

    def forward(
        self, rows: Sequence[SequencePass[LlamaCppCache]], *, rope_long: bool = False
    ) -> list[NDArray[np.float32]]:
        if any(part.ids.shape[1] != 1 or np.any(part.weights != 1) for part in rows):
            raise _impossible("mixed embeddings are")
        return [part.cache.forward(part) for part in rows]

    def resident(self) -> None:
        """Returns None: nothing limits the experts in memory."""

    def close(self) -> None:
        for cache in list(self._caches):
            cache.close()
        self._model.close()


def _impossible(subject: str) -> BackendError:
    return BackendError(
        f"{subject} not possible on the llama.cpp backend: leave that out, or run a bundle with an "
        "ONNX graph"
    )


def refusal(file: GgufFile, plan: KvPlan) -> str | None:
    """Returns why a cache of these widths is not possible, or None."""
    for kind, name, bits in (("keys", "k_bits", plan.k_bits), ("values", "v_bits", plan.v_bits)):
        if bits not in CACHE_TYPES:
            return (
                f"{kind} of {bits} bits ({argument('kv')} or {argument(name)}) are not possible "
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
    options = {
        f"{argument('policy')} {request.policy}": request.policy not in (None, NO_POLICY),
        f"{argument('kv_read')} {request.read}": request.read not in (None, "all"),
        argument("kv_offload"): request.offload_bytes > 0,
    }
    if refused := [option for option, is_set in options.items() if is_set]:
        raise _impossible(f"{refused[0]} is")
    plan = request.plan(_possible_plan(file))
    if (reason := refusal(file, plan)) is not None:
        raise BackendError(reason)
    context_tokens, budget_bytes = layout.session(request, plan, file.context_length)
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
    matches = [kind for kind, holds in kinds.items() if holds]
    if matches:
        raise UnsupportedModelError(
            f"{file.path} is a {file.architecture} model with {' and '.join(matches)}; kvq runs "
            "decoder-only language models whose past is a KV cache"
        )


def _possible_plan(file: GgufFile) -> KvPlan:
    """Returns the file's plan, at the next wider types that llama.cpp has where it lacks one."""
    k_bits, v_bits = (
        min(other for other in CACHE_TYPES if other >= bits)
        for bits in (file.kv.k_bits, file.kv.v_bits)
    )
    return KvPlan(k_bits=k_bits, v_bits=v_bits, sink_tokens=0)
