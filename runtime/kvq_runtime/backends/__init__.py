"""The seam between the loop and an engine: its protocols, one table. Knows no engine itself.

To add a backend: one file with a class that has `Backend`'s members, and of its own `missing`,
`reads` and `estimate`, asked before anything is loaded; one row in `BACKENDS`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Holdings
from kvq.config import KvPlan
from kvq.errors import BackendError, UsageError, argument
from kvq.formats import format_bytes
from kvq.residency import ExpertBytes, Resident
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import gpu
from kvq_runtime.config import Sampling, SessionConfig, SessionRequest
from kvq_runtime.gguf_file import GgufFile

if TYPE_CHECKING:
    from kvq_runtime.backends.paged import PagedBackend

logger = logging.getLogger(__name__)

BACKENDS = {
    "onnx": "kvq_runtime.backends.onnx:OnnxBackend",
    "llama.cpp": "kvq_runtime.backends.llama_cpp:LlamaCppBackend",
    "reference": "kvq_runtime.backends.reference:ReferenceBackend",
    "float": "kvq_runtime.backends.reference:FloatBackend",
}

# The one that knows devices beside the processor, and bounds the memory of experts.
DEVICE_BACKEND = "onnx"

# `auto` takes the first of these that reads the model's files and can run here.
PREFERENCE = ("onnx", "llama.cpp", "reference", "float")


class ModelFiles(Protocol):
    """What a model is read from: a bundle folder or a GGUF file."""

    @property
    def path(self) -> Path:
        """The folder or the file."""
        ...

    @property
    def name(self) -> str:
        """What the model is called."""
        ...

    @property
    def kv(self) -> KvPlan:
        """The default plan."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens the model was made for."""
        ...

    @property
    def has_onnx(self) -> bool:
        """Whether there is a graph with a bundle's weights."""
        ...

    @property
    def has_checkpoint(self) -> bool:
        """Whether the weights are those of a checkpoint, as they are."""
        ...

    @property
    def has_gguf(self) -> bool:
        """Whether there is a GGUF file."""
        ...

    @property
    def experts(self) -> ExpertBytes | None:
        """What experts take of the graph's weights; None for a model without any."""
        ...

    def read_ahead(self) -> None:
        """Begins to read what every engine asks for, beside whoever opens the weights."""
        ...

    def weights_json(self) -> dict[str, Any]:
        """Bytes and types of the weights, for reports."""
        ...

    def gguf(self) -> GgufFile:
        """The GGUF file, checked. Raises `ModelError` for a damaged one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the loop and the apps may know of a model, whatever its files are.

    `kv` is the default plan, `stop_ids` end a generation, `fingerprint` identifies the weights. A
    session of more than `short_rope_tokens` uses the second rotary table of a model that has two.
    `drafts_method` writes several drafts best on this model, where that was measured.
    `fitted_layers`: the first layers after which the others' keys and values can be predicted by
    matrices fitted for it, where there are such. `sampling`: how the model asks to be sampled.
    `state_width`: numbers of a state, of a model that can tell those of its rows; else 0.
    """

    name: str
    context_length: int
    vocab_size: int
    num_layers: int
    stop_ids: frozenset[int]
    fingerprint: str
    kv: KvPlan
    short_rope_tokens: int | None = None
    drafts_method: str | None = None
    fitted_layers: int | None = None
    state_width: int = 0
    sampling: Sampling = field(default_factory=Sampling)

    def checked(self, ids: Iterable[int]) -> list[int]:
        """Tokens of the model. Raises `UsageError` for one it does not have."""
        new = list(map(int, ids))
        wrong = next((token for token in new if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} is not one of the model's: 0 to {self.vocab_size - 1}")
        return new


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a session would hold; `bytes_per_token` of a plan is None where it is not possible."""

    plan: KvPlan
    context_tokens: int
    kv_bytes: int
    bytes_per_token: Callable[[KvPlan], float | None]


class SequenceCache(Protocol):
    """One sequence's keys and values, and a branch of rows after them that may be forgotten.

    A pass is `begin`, the pass, and `commit` or `rewind`; several passes may add to one branch.
    `begin(n, parents)` adds n rows: `parents[i]` is the row of the branch that row i follows, -1
    the last token; None: a chain. More rows than a branch holds are possible for a chain that
    begins one, a piece of a prompt, and are committed whole. `view` is that of
    their `Mode`; in the layers of `silent` rows ask nothing and are only stored.
    `edit(start, stop, count)` removes tokens and moves those behind, so that `count` others can
    stand there: a gap, which `begin(n, at=start)` and a commit fill; `why_not_edit` says why a
    cache cannot, `crowded(n)` which tokens to open as gaps where what is gone takes the room of n
    others. `tokens` counts what is in gaps too. `commit(path)` keeps these rows, each the
    parent of the next; `rewind(n)` keeps the first n rows as they are, and the branch open.
    `draft_room` is how many rows a pass may have so that each gets what it would get in a pass of
    its own, `tree_room` how many of these where they are no chain. `trim` keeps at most the first
    `tokens` tokens: fewer, where a cache cannot go back
    exactly; the loop computes what is missing again. `mark` says that somebody will go back to
    `tokens` tokens: where a cache `keeps_places` it is more likely then that these can be kept.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def budget_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def bytes_per_token(self) -> float: ...

    @property
    def draft_room(self) -> int: ...

    @property
    def tree_room(self) -> int: ...

    def holdings(self) -> Holdings: ...

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        /,
        *,
        view: str = "full",
        at: int | None = None,
        silent: Sequence[int] = (),
    ) -> None: ...

    def why_not_edit(self) -> str | None: ...

    def edit(self, start: int, stop: int, count: int, /) -> None: ...

    def crowded(self, tokens: int, /) -> list[tuple[int, int]]: ...

    def commit(self, path: Sequence[int], /) -> None: ...

    def rewind(self, rows: int, /) -> None: ...

    def trim(self, tokens: int, /) -> None: ...

    @property
    def keeps_places(self) -> bool: ...

    def mark(self, tokens: int, /) -> None: ...

    def state(self) -> bytes: ...

    def load_state(self, state: bytes, /) -> None: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=SequenceCache)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How much of a model a pass reads.

    `view` "hi": of 8-bit weights, and of 8-bit pages of the cache, the upper nibbles. A layer of
    `skipped` leaves what enters it as it is. `head_tokens` n: only the first n tokens of the
    vocabulary get logits, all others minus infinity; 0: all get theirs. Rows made by less than the
    whole of every layer are `guesses`: they are rewound and never committed. `silent` are the
    layers without queries, those of both lists.

    Of a layer of `predicted`, all from some layer on, only keys and values are made, from what
    enters the first of them (`kvq_runtime.prediction`): by its own matrix or, `fitted`, by the one
    that the bundle has for that. Such rows may be committed, and have no
    logits worth asking for.
    """

    view: str = "full"
    skipped: tuple[int, ...] = ()
    head_tokens: int = 0
    predicted: tuple[int, ...] = ()
    fitted: bool = False
    guesses: bool = field(init=False, compare=False)
    silent: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "guesses", self.view != "full" or bool(self.skipped))
        object.__setattr__(self, "silent", self.skipped + self.predicted)


WHOLE = Mode()


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePass(Generic[C]):
    """What one sequence brings to a pass: T rows begun in its `cache`.

    `ids` int64 [T, K] and `weights` float32 [T, K]: the embedding of row t is
    sum_k weights[t, k] * E[ids[t, k]]; plain text has K = 1 and weight 1. `positions` int64 [T].
    `wanted` int64 [R]: the rows whose logits are wanted. `exact_rows` n: of these only the n
    largest need be exact and in place, others may be about right but not larger; 0: all are.
    `mode` is the same for all rows of a pass. A draft head also reads `joined` float32 [T, hidden],
    the state of the token before each row's. `states` float32 [T, hidden], where they are wanted,
    is filled with those of the rows (`ModelConfig.draft_head`).
    """

    cache: C
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    positions: NDArray[np.int64]
    wanted: NDArray[np.int64]
    exact_rows: int = 0
    mode: Mode = WHOLE
    joined: NDArray[np.float32] | None = None
    states: NDArray[np.float32] | None = None


def sequence_pass(cache: C, ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> SequencePass[C]:
    """Tokens `ids` [T] right after those in the cache."""
    return SequencePass(
        cache=cache,
        ids=ids[:, None],
        weights=np.ones((len(ids), 1), np.float32),
        positions=cache.tokens + np.arange(len(ids), dtype=np.int64),
        wanted=wanted,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass(Generic[C]):
    """One forward pass: the rows of S sequences, each over a cache of its own.

    `rope_long`: use the long-context rotary frequencies of a model that has two sets; the same
    for every pass of a session.
    """

    rows: tuple[SequencePass[C], ...]
    rope_long: bool = False

    @property
    def exact_rows(self) -> int:
        """What serves every sequence of the pass; see `SequencePass`."""
        counts = [own.exact_rows for own in self.rows if len(own.wanted)]
        return max(counts) if counts and min(counts) else 0

    @property
    def mode(self) -> Mode:
        """That of all its rows."""
        (mode,) = {own.mode for own in self.rows}
        return mode


class Backend(Protocol[C]):
    """Computes forward passes of one model over any number of caches, which it opens itself.

    `cache_kind` names the form of a saved cache: only a cache of the same kind can load it.
    `takes_trees`: rows of a branch may follow any earlier row, not only the newest. `takes_drafts`:
    some rows of a branch may be kept and the others forgotten. `rows_agree`: a
    row's logits are the same, bit for bit, however many rows its pass has.
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
        """Itself, where its sessions live in the paged cache over a bundle's graph."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None for a model that takes ids only."""
        ...

    def session_config(self, request: SessionRequest) -> SessionConfig:
        """What a session gets for what was asked.

        Raises `UsageError`, `BudgetError` naming the smallest budget that works, and
        `BackendError` for what this backend cannot do.
        """
        ...

    def open_cache(self, config: SessionConfig) -> C:
        """An empty cache as `config` says."""
        ...

    def check_mode(self, mode: Mode) -> None:
        """Raises `BackendError` for a mode that passes of this backend cannot have."""
        ...

    def forward(self, one_pass: Pass[C]) -> list[NDArray[np.float32]]:
        """Of each sequence the logits float32 [R, V] of its wanted rows.

        Writes the rows' K and V into the caches, which this backend opened and in which they are
        begun. A sequence's result does not depend on the others of the pass.
        """
        ...

    def resident(self) -> Resident | None:
        """What of its experts is in memory; None where nothing bounds that."""
        ...

    def close(self) -> None:
        """Gives the weights' memory back; the backend cannot be used afterwards."""
        ...


def forward_chain(
    backend: Backend[C],
    cache: C,
    ids: NDArray[np.int64],
    wanted: NDArray[np.int64],
    *,
    rope_long: bool = False,
) -> NDArray[np.float32]:
    """Logits float32 [R, V] of `wanted` among the tokens `ids` [T], which `cache` then holds too.

    For measuring and calibrating; what generates text has a `Sequence`.
    """
    cache.begin(len(ids))
    rows = sequence_pass(cache, ids, wanted)
    logits = backend.forward(Pass(rows=(rows,), rope_long=rope_long))[0]
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
    """The backend called `name` (or the best one for `auto`) with the weights of `files` loaded.

    `device` as in `gpu.chosen`; `weights_budget`: bytes of experts that may be in memory, None:
    as the system likes. Raises `UsageError` for an unknown name and `BackendError` for one
    that cannot run here or does not read these files.
    """
    bound: dict[str, Any] = {} if weights_budget is None else {"weights_budget": weights_budget}
    if (found := gpu.chosen(device)) != gpu.PROCESSOR:
        return _open_on(found, name, files, threads=threads, asked=device, bound=bound)
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
    if bound and name != DEVICE_BACKEND:
        raise BackendError(
            f"{argument('weights_budget')} is for bundles on the {DEVICE_BACKEND} backend, whose "
            f"weights are mapped; {files.path} runs on {name} here, so leave it out"
        )
    return _load(name)(files, threads=threads, **bound)


def _open_on(
    found: str,
    name: str,
    files: ModelFiles,
    *,
    threads: int,
    asked: str,
    bound: Mapping[str, Any],
) -> Backend[Any]:
    """The one backend that runs on a device; on the processor where nobody insists on another."""
    try:
        if name not in ("auto", DEVICE_BACKEND) or not _load(DEVICE_BACKEND).reads(files):
            raise BackendError(
                f"{files.path} runs on {found} by the {DEVICE_BACKEND} backend alone, which reads "
                f"bundles; {argument('device', 'cpu')} runs it on the processor"
            )
        return _load(DEVICE_BACKEND)(files, threads=threads, device=found, **bound)
    except BackendError as error:
        if asked != "auto":
            raise
        logger.warning("running on the processor: %s", error)
    return open_backend(name, files, threads=threads, **bound)


def estimate(files: ModelFiles, request: SessionRequest, *, threads: int) -> Estimate:
    """What a session on the best backend that reads `files` would hold, told from them alone.

    Without a budget it gives up none of its tokens, by default the model's context. Loads no
    weights, and asks not whether the backend can run here. Raises what `session_config` would.
    """
    name = next(name for name in PREFERENCE if _load(name).reads(files))
    return _load(name).estimate(files, request, threads=threads)


def bounded_experts(files: ModelFiles, budget_bytes: int) -> ExpertBytes:
    """The experts of `files`, of which so many bytes may be in memory.

    Raises `BackendError` where that bounds nothing, and where it cannot hold one of them.
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
    """Why backend `name` cannot run here, or None when it can."""
    return _load(name).missing()


def choose(files: ModelFiles) -> tuple[str, str | None]:
    """The backend `auto` takes for these files, and why it is not the fastest, or None if it is.

    Raises `BackendError` when none can run here.
    """
    readers = [name for name in PREFERENCE if _load(name).reads(files)]
    name = next((name for name in readers if missing(name) is None), None)
    reason = missing(readers[0])
    if name is None:
        raise BackendError(f"{files.path} cannot run here: {reason}")
    return name, reason


def _load(name: str) -> Any:
    module_name, _, class_name = BACKENDS[name].partition(":")
    return getattr(import_module(module_name), class_name)
