"""The protocols between the loop and an engine, and the table of backends.

To add a backend, write one file with a class that has `Backend`'s members, and the static methods
`missing`, `reads` and `estimate`, which are called before anything is loaded. Then add a row to
`BACKENDS`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvq.class_cache import CacheUsage
from kvq.config import KvPlan
from kvq.errors import BackendError, UsageError, argument
from kvq.formats import format_bytes
from kvq.residency import ExpertBytes, Resident
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling, SessionConfig, SessionRequest
from kvq_runtime.machine import gpu
from kvq_runtime.text_embedding import TextEmbedding

if TYPE_CHECKING:
    from kvq_runtime.backends.paged import PagedBackend
    from kvq_runtime.bundle.gguf_file import GgufFile

logger = logging.getLogger(__name__)

BACKENDS = {
    "onnx": "kvq_runtime.backends.onnx:OnnxBackend",
    "llama.cpp": "kvq_runtime.backends.llama_cpp:LlamaCppBackend",
    "float": "kvq_runtime.backends.float:FloatBackend",
}

# The one backend that runs on other devices than the processor and limits experts in memory.
DEVICE_BACKEND = "onnx"

# `auto` takes the first of these that reads the model's files and can run here.
PREFERENCE = ("onnx", "llama.cpp", "float")


class ModelFiles(Protocol):
    """Declares what a model is read from: a bundle folder or a GGUF file."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...

    @property
    def kv(self) -> KvPlan:
        """Returns the default plan of the cache."""
        ...

    @property
    def context_length(self) -> int:
        """Returns the number of tokens that the model was made for."""
        ...

    @property
    def has_onnx(self) -> bool:
        """Returns whether there is a graph with a bundle's weights."""
        ...

    @property
    def has_gguf(self) -> bool: ...

    @property
    def experts(self) -> ExpertBytes | None:
        """Returns the bytes of the experts in the graph's weights; None without experts."""
        ...

    def read_ahead(self) -> None:
        """Begins to read in the background what every engine needs."""
        ...

    def weights_json(self) -> dict[str, Any]:
        """Returns bytes and types of the weights, for reports."""
        ...

    def gguf(self) -> "GgufFile":
        """Returns the checked GGUF file. Raises `ModelError` for a damaged one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Holds the facts of a model that do not depend on its files.

    Attributes:
        name: Name of the model.
        context_length: Tokens that it was made for.
        vocab_size: Number of token ids.
        num_layers: Number of layers.
        stop_ids: Tokens that end a generation.
        fingerprint: Identifies the weights.
        kv: Default plan of the cache.
        short_rope_tokens: A session of more tokens uses the second rotary table of a model that has
            two. None: it has one.
        fitted_layers: The first layers after which the keys and values of the others can be
            predicted by fitted matrices. None: there are no such matrices.
        state_width: Width of a hidden state, of a model that gives those of its rows; else 0.
        embedding: How it makes vectors of texts. None: it cannot.
        sampling: How the model asks to be sampled.
    """

    name: str
    context_length: int
    vocab_size: int
    num_layers: int
    stop_ids: frozenset[int]
    fingerprint: str
    kv: KvPlan
    short_rope_tokens: int | None = None
    fitted_layers: int | None = None
    state_width: int = 0
    embedding: TextEmbedding | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def checked(self, ids: Iterable[int]) -> list[int]:
        """Returns `ids` as a list. Raises `UsageError` for one that the model does not have."""
        new = list(map(int, ids))
        if new and not 0 <= min(new) <= max(new) < self.vocab_size:
            wrong = next(token for token in new if not 0 <= token < self.vocab_size)
            raise UsageError(f"token {wrong} is not one of the model's: 0 to {self.vocab_size - 1}")
        return new


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Holds what a session would hold; `bytes_per_token` returns None for an impossible plan.

    `session` has the budget that was asked for, or the default one, whatever the context needs.
    """

    session: SessionConfig
    plan: KvPlan
    context_tokens: int
    kv_bytes: int
    bytes_per_token: Callable[[KvPlan], float | None]


class SequenceCache(Protocol):
    """Holds one sequence's keys and values, and a branch of rows after them.

    A pass is `begin`, then the forward pass, then `commit` or `rewind`. Several passes may add rows
    to one branch. Rows of a branch are numbered from 0; what is not committed is forgotten.
    """

    @property
    def tokens(self) -> int:
        """Returns how many tokens it holds, those in gaps included."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Returns how many rows of a prompt one pass may have at most."""
        ...

    @property
    def budget_bytes(self) -> int:
        """Returns how many bytes it may use."""
        ...

    @property
    def used_bytes(self) -> int:
        """Returns how many bytes it uses now."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes it has used; any thread may call it."""
        ...

    @property
    def bytes_per_token(self) -> float:
        """Returns the bytes of one more token, all layers."""
        ...

    @property
    def draft_room(self) -> int:
        """Returns how many rows a pass may have so that each gets its exact result.

        That is the result that it would get in a pass of its own.
        """
        ...

    @property
    def tree_room(self) -> int:
        """Returns how many of the `draft_room` rows may be a tree instead of a chain."""
        ...

    def usage(self) -> CacheUsage:
        """Returns how much of the text it holds, and at which widths."""
        ...

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        /,
        *,
        view: str = "full",
        at: int | None = None,
        kv_only_layers: Sequence[int] = (),
    ) -> None:
        """Adds `tokens` rows to the branch, before the pass that fills them.

        A chain that begins a branch may have more rows than a branch holds: a piece of a prompt. It
        is then committed whole. `parents` are the rows of the branch that the new ones follow, -1
        for the last cached token; by default each follows the one before it. `view` is `full`, or
        `hi` for the upper nibbles of 8-bit pages. `at` is the first token of the gap that the rows
        fill. In the layers `kv_only_layers` they attend to nothing and are only stored. Raises
        `BudgetError` where the context has no room.
        """
        ...

    def why_not_edit(self) -> str | None:
        """Returns why it cannot replace tokens in the middle, None if it can."""
        ...

    def edit(self, start: int, stop: int, count: int, /) -> None:
        """Removes tokens `start` to `stop` and moves those after them, leaving a gap for `count`.

        `begin` with `at=start` and a `commit` fill it. Raises `CacheError` where the cache cannot.
        """
        ...

    def crowded(self, tokens: int, /) -> list[tuple[int, int]]:
        """Returns runs of tokens to open as gaps, so that `tokens` more have room.

        There are some where tokens that edits removed still take room. A run is (first token, token
        after the last).
        """
        ...

    def commit(self, path: Sequence[int], /) -> None:
        """Keeps the rows `path`, each the parent of the next, and forgets the others."""
        ...

    def rewind(self, rows: int, /) -> None:
        """Keeps the branch's first `rows` rows as they are; the branch stays open."""
        ...

    def trim(self, tokens: int, /) -> None:
        """Keeps at most the first `tokens` tokens.

        It keeps fewer where it cannot go back exactly. The caller computes the rest again.
        """
        ...

    @property
    def keeps_places(self) -> bool:
        """Returns whether `mark` makes it likelier that `trim` can keep a place."""
        ...

    def mark(self, tokens: int, /) -> None:
        """Notes that somebody will go back to the first `tokens` tokens."""
        ...

    def state(self) -> bytes:
        """Returns everything held, for `load_state`."""
        ...

    def load_state(self, state: bytes, /) -> None:
        """Becomes `state`; raises `SnapshotError` and changes nothing where it refuses."""
        ...

    def close(self) -> None:
        """Frees its memory; it cannot be used afterwards."""
        ...


C = TypeVar("C", bound=SequenceCache)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """Says how much of a model a pass reads.

    `view` "hi" reads the upper nibbles of 8-bit weights and of 8-bit pages of the cache. Rows made
    of these are `guesses`: they are rewound and never committed. With `head_tokens` n only the
    first n tokens of the vocabulary get logits, all others minus infinity; 0: all get theirs.

    For the layers `predicted`, all from some layer on, only keys and values are made, from what
    enters the first of them (`kvq_runtime.sequence.prediction`). This uses each layer's own matrix
    or, if `fitted`, the one that the bundle has for it. Such rows may be committed. Their logits
    are meaningless.
    """

    view: str = "full"
    head_tokens: int = 0
    predicted: tuple[int, ...] = ()
    fitted: bool = False
    guesses: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "guesses", self.view != "full")


WHOLE = Mode()


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePass(Generic[C]):
    """Holds what one sequence brings to a pass: T rows that were begun in its `cache`.

    Attributes:
        cache: The sequence's cache.
        ids: Int64 [T, K]. The embedding of row t is the sum over k of weights[t, k] * E[ids[t, k]].
            Plain text has K = 1 and weight 1.
        weights: Float32 [T, K].
        positions: Int64 [T], the position of each row.
        logit_rows: Int64 [R], the rows whose logits are asked for.
        exact_rows: Only so many of the largest logits of a row need be exact and in place. Others
            may be inexact but not larger. 0: all are exact.
        mode: How much of the model is read; the same for all rows of a pass.
        joined: Float32 [T, hidden], which only a draft head reads: the hidden state of the token
            before each row's.
        hidden_states: Float32 [T, hidden], filled with the rows' hidden states
            (`ModelConfig.draft_head`). None: they are not asked for.
    """

    cache: C
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    positions: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    exact_rows: int = 0
    mode: Mode = WHOLE
    joined: NDArray[np.float32] | None = None
    hidden_states: NDArray[np.float32] | None = None


def sequence_pass(
    cache: C, ids: NDArray[np.int64], logit_rows: NDArray[np.int64]
) -> SequencePass[C]:
    """Makes a pass of tokens `ids` [T] right after those in the cache."""
    return SequencePass(
        cache=cache,
        ids=ids[:, None],
        weights=np.ones((len(ids), 1), np.float32),
        positions=cache.tokens + np.arange(len(ids), dtype=np.int64),
        logit_rows=logit_rows,
    )


class Backend(Protocol[C]):
    """Computes forward passes of one model over any number of caches, which it opens itself.

    Attributes:
        name: Name in `BACKENDS`.
        cache_kind: Form of a saved cache. Only a cache of the same kind can load it.
        model: Facts of the model.
        weight_bytes_per_step: Bytes of weights that one decode step reads.
        takes_trees: True: a row of a branch may follow any earlier row, not only the newest.
        takes_drafts: True: some rows of a branch may be kept and the others forgotten.
        rows_agree: True: a row's logits are the same, bit for bit, however many rows its pass has.
    """

    name: str
    cache_kind: str
    model: ModelFacts
    weight_bytes_per_step: int
    takes_trees: bool
    takes_drafts: bool
    rows_agree: bool

    @property
    def paged(self) -> "PagedBackend | None":
        """Returns itself if its sessions live in the paged cache over a graph, else None."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """Returns the model's tokenizer, None for a model that takes ids only."""
        ...

    def session_config(self, request: SessionRequest) -> SessionConfig:
        """Decides what a session gets.

        Args:
            request: What was asked for.

        Returns:
            What the session holds, with its bytes.

        Raises:
            UsageError: For a value that is not possible.
            BudgetError: For a budget that is too small. The message names the smallest one that
                works.
            BackendError: For what this backend cannot do.
        """
        ...

    def open_cache(self, config: SessionConfig) -> C:
        """Opens an empty cache.

        Args:
            config: What it holds, from `session_config`.

        Returns:
            The cache, whose memory is allocated.

        Raises:
            BackendError: Where it cannot be opened.
        """
        ...

    def check_mode(self, mode: Mode) -> None:
        """Raises `BackendError` for a mode that this backend's passes cannot have."""
        ...

    def forward(
        self, rows: Sequence[SequencePass[C]], *, rope_long: bool = False
    ) -> list[NDArray[np.float32]]:
        """Computes one pass and writes the rows' keys and values into their caches.

        A sequence's result does not depend on the others of the pass.

        Args:
            rows: The rows of all sequences. They were begun in caches that this backend opened.
            rope_long: Use the long-context rotary frequencies of a model that has two sets. It is
                the same for every pass of a session.

        Returns:
            For each sequence float32 [R, V], the logits of its `logit_rows`.

        Raises:
            CacheError: Where the model could not be computed.
            BackendError: For rows that this backend cannot compute, or after `close`.
        """
        ...

    def resident(self) -> Resident | None:
        """Returns what of its experts is in memory; None where nothing limits that."""
        ...

    def close(self) -> None:
        """Frees the weights' memory; the backend cannot be used afterwards."""
        ...


def forward_chain(
    backend: Backend[C],
    cache: C,
    ids: NDArray[np.int64],
    logit_rows: NDArray[np.int64],
    *,
    rope_long: bool = False,
) -> NDArray[np.float32]:
    """Returns the logits float32 [R, V] of `logit_rows` among the tokens `ids` [T].

    `cache` holds the tokens afterwards. This is for measuring and calibrating; what generates text
    has a `TokenSequence`.
    """
    cache.begin(len(ids))
    rows = sequence_pass(cache, ids, logit_rows)
    logits = backend.forward((rows,), rope_long=rope_long)[0]
    cache.commit(range(len(ids)))
    return logits


def open_backend(
    name: str,
    files: ModelFiles,
    *,
    threads: int,
    device: str = gpu.PROCESSOR,
    weights_budget: int | None = None,
) -> Backend[Any]:
    """Opens the backend called `name`, a row of `BACKENDS` or `auto`, over the weights of `files`.

    `device` is as in `gpu.usable_device`; `weights_budget` limits the bytes of experts in memory.
    Raises `UsageError` for an unknown name, and `BackendError` for a backend that cannot run here
    or does not read these files.
    """
    options: dict[str, Any] = {} if weights_budget is None else {"weights_budget": weights_budget}
    if (chosen_device := gpu.usable_device(device)) != gpu.PROCESSOR:
        return _open_on(
            chosen_device, name, files, threads=threads, requested_device=device, options=options
        )
    if name == "auto":
        name, reason = choose(files)
        if reason is not None:
            logger.warning("using the slow %s backend: %s", name, reason)
    elif name not in BACKENDS:
        raise UsageError(
            f"backend {name!r} is not known; choose auto, {', '.join(sorted(BACKENDS))}"
        )
    elif not _load(name).reads(files):
        possible = ", ".join(other for other in PREFERENCE if _load(other).reads(files))
        raise BackendError(f"the {name} backend does not read {files.path}; {possible} can")
    if options and name != DEVICE_BACKEND:
        raise BackendError(
            f"{argument('weights_budget')} is for bundles on the {DEVICE_BACKEND} backend, whose "
            f"weights are mapped; {files.path} runs on {name} here, so leave it out"
        )
    return _load(name)(files, threads=threads, **options)


def _open_on(
    device: str,
    name: str,
    files: ModelFiles,
    *,
    threads: int,
    requested_device: str,
    options: Mapping[str, Any],
) -> Backend[Any]:
    """Opens the backend that runs on `device`.

    Where `auto` was asked for and this fails, it opens one on the processor instead.
    """
    try:
        if name not in ("auto", DEVICE_BACKEND) or not _load(DEVICE_BACKEND).reads(files):
            raise BackendError(
                f"{files.path} runs on {device} by the {DEVICE_BACKEND} backend alone, which reads "
                f"bundles; {argument('device', 'cpu')} runs it on the processor"
            )
        return _load(DEVICE_BACKEND)(files, threads=threads, device=device, **options)
    except BackendError as error:
        if requested_device != "auto":
            raise
        logger.warning("running on the processor: %s", error)
    return open_backend(name, files, threads=threads, **options)


def estimate(files: ModelFiles, request: SessionRequest, *, threads: int) -> Estimate:
    """Returns what a session on the best backend for `files` would hold, without loading weights.

    Without a budget it gives up none of its tokens, by default the model's context. Whether the
    backend can run here is not checked. Raises what `session_config` would.
    """
    name = next(name for name in PREFERENCE if _load(name).reads(files))
    return _load(name).estimate(files, request, threads=threads)


def bounded_experts(files: ModelFiles, budget_bytes: int) -> ExpertBytes:
    """Returns the experts of `files`, of which `budget_bytes` may be in memory.

    Raises `BackendError` where there are none, and where the budget cannot hold one of them.
    """
    experts = files.experts
    if experts is None:
        raise BackendError(
            f"{argument('weights_budget')} bounds what experts take in memory, and {files.path} "
            "has none that are mapped: every token reads all its weights, so leave it out"
        )
    if budget_bytes < experts.largest:
        raise BackendError(
            f"{argument('weights_budget')} {format_bytes(budget_bytes)} cannot hold one expert of "
            f"{files.path}; {format_bytes(experts.largest)} can, {format_bytes(experts.chosen)} "
            f"all experts of a token, {format_bytes(experts.stored)} every expert"
        )
    return experts


def missing(name: str) -> str | None:
    """Returns why backend `name` cannot run here, None if it can."""
    return _load(name).missing()


def choose(files: ModelFiles) -> tuple[str, str | None]:
    """Returns the backend that `auto` takes for these files, and why it is not the fastest.

    The reason is None if it is the fastest. Raises `BackendError` when none can run here.
    """
    first_reason: str | None = None
    for name in PREFERENCE:
        if _load(name).reads(files):
            reason = missing(name)
            first_reason = first_reason or reason
            if reason is None:
                return name, first_reason
    raise BackendError(f"{files.path} cannot run here: {first_reason}")


def _load(name: str) -> Any:
    module_name, _, class_name = BACKENDS[name].partition(":")
    return getattr(import_module(module_name), class_name)
