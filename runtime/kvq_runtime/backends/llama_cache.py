"""One sequence in llama.cpp: a context with its cache. Knows no loop and no text.

Tokens enter at their positions in sequence 0. Positions of an edit's far side wait in sequence 1,
as llama.cpp takes new tokens at the end of a sequence only.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Holdings, check_chunk, check_context
from kvq.errors import BackendError, BudgetError, CacheError, SnapshotError, UsageError, argument
from kvq_runtime.backends import SequencePass
from kvq_runtime.backends.llama_layout import (
    CACHE_TYPES,
    SEQUENCES,
    CacheLayout,
    batch_size,
    keys_are_rotated,
    padded,
)
from kvq_runtime.backends.llama_library import LlamaModel
from kvq_runtime.config import SessionConfig

FLASH_ATTENTION_ON = 1
_MAIN, _PARKED = 0, 1
# A state is the number of tokens, then llama.cpp's own.
STATE_PREFIX = struct.Struct("<Q")
_FLOAT_BITS = 16
# Rotary kinds whose positions have more than one number.
_MULTIDIMENSIONAL_ROPES = (8, 24, 40)


def open_context(
    model: LlamaModel, *, config: SessionConfig, threads: int, sequences: int
) -> tuple[Any, list[str]]:
    """A context as `config` says and llama.cpp's messages. Raises `BackendError`."""
    functions, messages = model.library.functions, model.library.messages
    parameters = functions.llama_context_default_params()
    parameters.n_ctx = padded(config.context_tokens)
    parameters.n_batch = batch_size(config.context_tokens, config.chunk_tokens)
    parameters.n_ubatch = parameters.n_batch
    parameters.n_seq_max = sequences
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.type_k = CACHE_TYPES[config.plan.k_bits].number
    parameters.type_v = CACHE_TYPES[config.plan.v_bits].number
    parameters.flash_attn_type = FLASH_ATTENTION_ON
    # A layer with a window keeps no more than the window; `trim` knows what that costs.
    parameters.swa_full = False
    parameters.kv_unified = True
    parameters.offload_kqv = parameters.op_offload = model.on_gpu
    with messages.collected() as lines:
        context = functions.llama_init_from_model(model.pointer, parameters)
    if not context:
        raise BackendError(
            f"llama.cpp does not open a context of {config.context_tokens} tokens: "
            f"{messages.last_errors()}; lower {argument('context_tokens')} or choose "
            f"{argument('kv', 'fp')}"
        )
    return context, lines


class LlamaCppCache:
    """`SequenceCache` over a context of llama.cpp's, which allocates all of it at once."""

    def __init__(
        self, model: LlamaModel, layout: CacheLayout, config: SessionConfig, *, threads: int
    ) -> None:
        """Raises `BackendError` where llama.cpp allocates other bytes than `layout` counts."""
        self._model = model
        self._functions = model.library.functions
        self._layout = layout
        self._config = config
        self._window_tokens = layout.window_tokens
        self.context_tokens = config.context_tokens
        self.budget_bytes = config.budget_bytes
        self.tokens = 0
        self._rows = 0
        # Of a branch in a gap: its first token and, aside, how many tokens there are.
        self._at: tuple[int, int] | None = None
        self._context, lines = open_context(
            model,
            config=config,
            threads=threads,
            # Parked tokens count against a window's room; a model with windows, or with states,
            # takes no edits.
            sequences=1 if layout.forgets else SEQUENCES,
        )
        self._rotates_keys = keys_are_rotated(lines)
        self.chunk_tokens = batch_size(config.context_tokens, config.chunk_tokens)
        self.keeps_places = False
        self._batch = _Batch(self._functions, self.chunk_tokens)
        try:
            layout.check(lines, config.plan, config.context_tokens, config.chunk_tokens)
        except BackendError:
            self.close()
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes a step reads now."""
        return self._layout.held_bytes(self._config.plan, self.tokens)

    @property
    def peak_bytes(self) -> int:
        """Bytes that llama.cpp has allocated, full or not; never above the budget."""
        return self._layout.num_bytes(
            self._config.plan, self.context_tokens, self._config.chunk_tokens
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes one more token costs, all layers."""
        return self._layout.bytes_per_token(self._config.plan)

    @property
    def draft_room(self) -> int:
        """Rows of a branch: nothing is quantised later than it is written."""
        return self._config.draft_tokens

    @property
    def tree_room(self) -> int:
        """The same; a pass of rows that branch is refused."""
        return self._config.draft_tokens

    def holdings(self) -> Holdings:
        """One width for every token, and nothing is lost that a token to come could see."""
        plan = self._config.plan
        return Holdings(
            mean_k_bits=plan.k_bits if self.tokens else 0,
            mean_v_bits=plan.v_bits if self.tokens else 0,
            evicted_share=0.0,
        )

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        silent: Sequence[int] = (),
    ) -> None:
        """Makes sure that `tokens` new rows, a chain, have room. Raises `BudgetError`."""
        assert view == "full"
        assert not silent
        first = self._rows
        if parents is not None and list(parents) != list(range(first - 1, first + tokens - 1)):
            raise BackendError(
                "drafts that branch are not possible on the llama.cpp backend, where each token "
                "follows the one before: ask for one draft, or run a bundle with an ONNX graph"
            )
        if at is None:
            check_context(self.tokens, first + tokens, self.context_tokens)
        check_chunk(tokens, self.chunk_tokens)
        if at is not None and self._at is None:
            self._park(at)
            self._at, self.tokens = (at, self.tokens), at
        self._rows += tokens

    def forward(self, rows: "SequencePass[LlamaCppCache]") -> NDArray[np.float32]:
        """Logits float32 [R, V] of one sequence's rows; see `Backend.forward`."""
        context = self._live()
        batch = self._batch.fill(rows.ids[:, 0], rows.positions, rows.wanted)
        status = self._functions.llama_decode(context, batch)
        if status != 0:
            raise CacheError(
                f"llama.cpp could not compute {len(rows.ids)} tokens (status {status}): "
                f"{self._model.library.messages.last_errors()}"
            )
        vocabulary = self._functions.llama_vocab_n_tokens(self._model.vocabulary)
        logits = np.empty((len(rows.wanted), vocabulary), np.float32)
        for place, row in enumerate(rows.wanted.tolist()):
            pointer = self._functions.llama_get_logits_ith(context, row)
            logits[place] = np.ctypeslib.as_array(pointer, (vocabulary,))
        return logits

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the rows `path`, which in a chain are the first ones.

        Raises `BackendError` where some of them cannot be taken back.
        """
        self._check_taken_back(len(path))
        kept = self.tokens + len(path)
        if self._at is not None:
            self._rows = 0
            return self._unpark(kept, self._at[1])
        self.tokens += self._rows
        self._rows = 0
        self.trim(kept)

    def rewind(self, rows: int) -> None:
        """Forgets all but the first `rows` rows of the chain, also after an error.

        Raises `BackendError` where some of them cannot be taken back.
        """
        self._check_taken_back(rows)
        self._rows = rows
        base = self.tokens
        if self._at is not None and rows == 0:
            return self._unpark(base, self._at[1])
        self._truncate(base + rows)
        self.tokens = min(base, self.tokens)

    def trim(self, tokens: int) -> None:
        """Rolls back to the first `tokens` tokens, or to none where these are not all there.

        A layer with a window has forgotten what lies before the last tokens' window, and a state
        holds all tokens so far.
        """
        if tokens < self.tokens:
            self._truncate(tokens)

    def mark(self, tokens: int) -> None:
        """See `SequenceCache`: llama.cpp is not told."""

    def state(self) -> bytes:
        """A snapshot of everything held; `load_state` of an equal cache restores it."""
        size = self._functions.llama_state_seq_get_size(self._live(), _MAIN)
        state = (ctypes.c_uint8 * size)()
        taken = self._functions.llama_state_seq_get_data(self._live(), state, size, _MAIN)
        if taken == 0 and self.tokens:
            raise CacheError("llama.cpp could not copy this session's cache; it was not saved")
        return STATE_PREFIX.pack(self.tokens) + ctypes.string_at(state, taken)

    def load_state(self, state: bytes) -> None:
        """Restores a snapshot; unchanged when it is refused. Raises `SnapshotError`."""
        before = self.state()
        if not self._restored(state):
            self._restored(before)
            raise SnapshotError(
                "llama.cpp refuses this saved cache; it is damaged, or of another model or "
                "version: prefill again"
            )

    def why_not_edit(self) -> str | None:
        """Why tokens in the middle cannot be replaced in this cache, or None."""
        rope = self._functions.llama_model_rope_type(self._model.pointer)
        quantized, unquantized = self._config.plan.k_bits < _FLOAT_BITS, argument("kv", "fp")
        reasons = {
            "this model has states of all tokens so far, from which llama.cpp takes none out": (
                self._layout.state_bytes > 0
            ),
            "the positions of this model have several dimensions": rope in _MULTIDIMENSIONAL_ROPES,
            "this model has attention windows, which forget what an edit brings back into sight": (
                self._window_tokens > 0
            ),
            "llama.cpp cannot shift the positions of this model": (
                not self._functions.llama_memory_can_shift(self._memory())
            ),
            f"llama.cpp cannot shift quantised keys of this head size; choose {unquantized}": (
                quantized and not self._rotates_keys
            ),
            f"llama.cpp cannot shift quantised keys that turn in part; choose {unquantized}": (
                quantized and self._layout.turns_in_part
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def crowded(self, tokens: int) -> list[tuple[int, int]]:
        """None: what is gone leaves its room at once."""
        return []

    def edit(self, start: int, stop: int, count: int) -> None:
        """Removes tokens [start, stop) and moves what follows to leave room for `count` others.

        Approximate from the second layer on: what follows keeps the keys and values it had, and
        llama.cpp turns quantised keys by decoding and encoding them again. Raises `BackendError`
        with the reason where a cache cannot do it.
        """
        reason = self.why_not_edit()
        if reason is not None:
            raise BackendError(f"an edit in the middle is not possible: {reason}")
        if not 0 <= start <= stop <= self.tokens:
            raise UsageError(
                f"tokens {start} to {stop} cannot be replaced; the cache holds {self.tokens}"
            )
        length = self.tokens - (stop - start) + count
        if length > self.context_tokens:
            raise BudgetError(
                f"the edited text has {length} tokens and the context holds "
                f"{self.context_tokens}; open the session with a larger "
                f"{argument('context_tokens')}"
            )
        functions, memory = self._functions, self._memory()
        if start < stop:
            functions.llama_memory_seq_rm(memory, _MAIN, start, stop)
        if length != self.tokens:
            functions.llama_memory_seq_add(memory, _MAIN, stop, -1, start + count - stop)
        self.tokens = length

    def _park(self, at: int) -> None:
        """What stands behind a gap waits aside: llama.cpp takes new tokens at an end only."""
        functions, memory = self._functions, self._memory()
        functions.llama_memory_seq_cp(memory, _MAIN, _PARKED, at, -1)
        functions.llama_memory_seq_rm(memory, _MAIN, at, -1)

    def _unpark(self, first: int, end: int) -> None:
        """Rows of the gap from `first` on are forgotten and what waited comes back."""
        functions, memory = self._functions, self._memory()
        functions.llama_memory_seq_rm(memory, _MAIN, first, -1)
        functions.llama_memory_seq_cp(memory, _PARKED, _MAIN, -1, -1)
        functions.llama_memory_seq_rm(memory, _PARKED, -1, -1)
        self._at, self.tokens = None, end

    def close(self) -> None:
        """Gives the context back; the cache cannot be used afterwards."""
        if self._context is not None:
            self._batch.close()
            self._functions.llama_free(self._context)
            self._context = None

    def __del__(self) -> None:
        if getattr(self, "_context", None) is not None:
            self.close()

    def _restored(self, state: bytes) -> bool:
        """Whether the sequence is now what `state` says; otherwise it is empty."""
        self._clear()
        if len(state) < STATE_PREFIX.size:
            return False
        tokens = STATE_PREFIX.unpack_from(state)[0]
        data = state[STATE_PREFIX.size :]
        if tokens > self.context_tokens:
            return False
        if tokens == 0:
            return True
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        taken = self._functions.llama_state_seq_set_data(self._live(), buffer, len(data), _MAIN)
        last = self._functions.llama_memory_seq_pos_max(self._memory(), _MAIN)
        self.tokens = tokens
        if taken == len(data) and last == tokens - 1 and self._reaches_back():
            return True
        self._clear()
        return False

    def _check_taken_back(self, kept: int) -> None:
        """Raises `BackendError` where a state holds rows of a chain of which a part is kept."""
        if self._layout.state_bytes and 0 < kept < self._rows:
            raise BackendError(
                f"keeping {kept} of {self._rows} tokens of a pass is not possible with this model "
                "on the llama.cpp backend, which takes no tokens back out of its states: leave "
                f"{argument('draft')} out, or run a bundle with an ONNX graph"
            )

    def _reaches_back(self) -> bool:
        """Whether all that the next token may attend to is still there."""
        first = self._functions.llama_memory_seq_pos_min(self._memory(), _MAIN)
        if self._layout.state_bytes:
            # A state has the position of its last token.
            return first == self.tokens - 1
        needed = self.tokens - self._window_tokens if self._window_tokens else 0
        return 0 <= first <= max(0, needed)

    def _truncate(self, tokens: int) -> None:
        """Removes everything from position `tokens` on, pending tokens included."""
        memory = self._memory()
        removed = tokens > 0 and self._functions.llama_memory_seq_rm(memory, _MAIN, tokens, -1)
        self.tokens = tokens
        if not removed or not self._reaches_back():
            self._clear()

    def _clear(self) -> None:
        """Empties everything: a refused state may have left cells that no removal finds."""
        self._functions.llama_memory_clear(self._memory(), False)
        self.tokens = 0

    def _memory(self) -> Any:
        return self._functions.llama_get_memory(self._live())

    def _live(self) -> Any:
        if self._context is None:
            raise CacheError("this session is closed; open another one on the engine")
        return self._context


class _Batch:
    """A llama_batch of one sequence, made once and filled per pass."""

    def __init__(self, functions: Any, capacity: int) -> None:
        self._functions = functions
        self._batch = functions.llama_batch_init(capacity, 0, 1)
        as_array = np.ctypeslib.as_array
        self._tokens = as_array(self._batch.token, (capacity,))
        self._positions = as_array(self._batch.pos, (capacity,))
        self._wanted = as_array(self._batch.logits, (capacity,))
        as_array(self._batch.n_seq_id, (capacity,))[:] = 1
        for i in range(capacity):
            self._batch.seq_id[i][0] = _MAIN

    def fill(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Any:
        """The batch of these tokens; logits are wanted of `rows`."""
        count = len(ids)
        self._batch.n_tokens = count
        self._tokens[:count] = ids
        self._positions[:count] = positions
        self._wanted[:count] = 0
        self._wanted[rows] = 1
        return self._batch

    def close(self) -> None:
        """Frees the batch."""
        self._functions.llama_batch_free(self._batch)
