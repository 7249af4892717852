"""One sequence in llama.cpp: a context with its cache, and the bytes that this takes.

Bytes are counted from the file. A layer with a window counts as if it kept every token, although
llama.cpp may keep fewer.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.class_cache import CacheUsage, check_pass
from kvq.config import KvPlan
from kvq.errors import BackendError, BudgetError, CacheError, SnapshotError, argument
from kvq.formats import format_bytes, sized
from kvq.sizing import DEFAULT_TOKENS, SHORTEST_CONTEXT_TOKENS
from kvq_runtime.backends import SequencePass
from kvq_runtime.backends.llama_library import LlamaModel
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.bundle.gguf_format import TENSOR_TYPES
from kvq_runtime.config import SessionConfig, SessionRequest

# A saved state is the number of tokens, then llama.cpp's own state.
STATE_PREFIX = struct.Struct("<Q")
_SEQUENCE = 0
# llama.cpp makes room for a multiple of this many tokens.
CELLS = 256
# llama.cpp's number of the type of keys or values, by their bits.
TYPE_NUMBERS: Mapping[int, int] = {16: 1, 8: 8, 4: 2}
CACHE_TYPES = {bits: TENSOR_TYPES[number] for bits, number in TYPE_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Holds the channels of keys and of values of a token in all layers, and bytes of states."""

    k_width: int
    v_width: int
    state_bytes: int

    @classmethod
    def of(cls, file: GgufFile) -> "CacheLayout":
        """Returns the layout of a file's model."""
        k_width, v_width = (sum(widths) for widths in zip(*file.kv_widths, strict=True))
        return cls(k_width, v_width, file.state_bytes)

    def bytes_per_token(self, plan: KvPlan) -> int:
        """Returns the bytes of one token, all layers."""
        sides = ((plan.k_bits, self.k_width), (plan.v_bits, self.v_width))
        return sum(CACHE_TYPES[bits].num_bytes((width,)) for bits, width in sides)

    def num_bytes(self, plan: KvPlan, tokens: int) -> int:
        """Returns the bytes of `tokens` tokens and of the states."""
        return self.state_bytes + tokens * self.bytes_per_token(plan)

    def session(self, request: SessionRequest, plan: KvPlan, most: int) -> tuple[int, int]:
        """Returns (context tokens, budget bytes) of what was asked of a model made for `most`.

        Each decides the other, as nothing is evicted. Raises `BudgetError` for a budget that cannot
        hold the context or the smallest cache.
        """
        budget, context_tokens = request.kv_budget, request.context_tokens
        budget_bytes, token_bytes = budget.num_bytes, self.bytes_per_token(plan)
        if budget.fraction is not None:
            exact = self.bytes_per_token(KvPlan(k_bits=16, v_bits=16))
            budget_bytes = int(budget.fraction * exact * most)
        if budget.tokens is not None:
            tokens = max(budget.tokens, SHORTEST_CONTEXT_TOKENS)
            if context_tokens is None:
                context_tokens = tokens = min(tokens, most)
            budget_bytes = self.num_bytes(plan, padded(tokens))
        elif context_tokens is None:
            context_tokens = DEFAULT_TOKENS
            if budget_bytes is not None:
                cells = (budget_bytes - self.state_bytes) // (CELLS * token_bytes)
                context_tokens = CELLS * max(cells, 1)
            context_tokens = min(context_tokens, most)
        needed = self.num_bytes(plan, padded(context_tokens))
        if budget_bytes is not None and needed > budget_bytes:
            raise BudgetError(
                f"a context of {context_tokens} tokens takes {sized(needed)} on the llama.cpp "
                f"backend, which evicts nothing, and {argument('kv_budget')} is "
                f"{format_bytes(budget_bytes)}; raise it or lower {argument('context_tokens')}"
            )
        return context_tokens, needed if budget_bytes is None else budget_bytes


def padded(tokens: int) -> int:
    """Returns the cells of a context of `tokens` tokens."""
    return -(-tokens // CELLS) * CELLS


class LlamaCppCache:
    """Implements `SequenceCache` over a context of llama.cpp, which allocates all of it at once."""

    keeps_places = False
    _context: Any = None

    def __init__(
        self, model: LlamaModel, layout: CacheLayout, config: SessionConfig, *, threads: int
    ) -> None:
        """Raises `BackendError` where llama.cpp does not open the context."""
        self._model = model
        self._functions = model.library.functions
        self._plan = config.plan
        self.context_tokens = config.context_tokens
        self.budget_bytes = config.budget_bytes
        self.chunk_tokens = min(config.chunk_tokens, padded(config.context_tokens))
        # Nothing is quantised later than it is written, so a branch may have any number of rows.
        self.draft_room = self.tree_room = config.draft_tokens
        self.bytes_per_token: float = layout.bytes_per_token(config.plan)
        self.peak_bytes = layout.num_bytes(config.plan, padded(config.context_tokens))
        self._layout = layout
        self.tokens = 0
        self._rows = 0
        self._context = self._opened(threads)

    def _opened(self, threads: int) -> Any:
        parameters = self._functions.llama_context_default_params()
        parameters.n_ctx = padded(self.context_tokens)
        parameters.n_batch = parameters.n_ubatch = self.chunk_tokens
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = TYPE_NUMBERS[self._plan.k_bits]
        parameters.type_v = TYPE_NUMBERS[self._plan.v_bits]
        parameters.flash_attn_type = self._functions.LLAMA_FLASH_ATTN_TYPE_ENABLED
        # A layer with a window keeps little more than the window; `trim` takes that into account.
        parameters.swa_full = False
        parameters.offload_kqv = parameters.op_offload = self._model.on_gpu
        context = self._functions.llama_init_from_model(self._model.pointer, parameters)
        if not context:
            raise BackendError(
                f"llama.cpp does not open a context of {self.context_tokens} tokens: "
                f"{self._model.library.last_errors()}; lower {argument('context_tokens')} or "
                f"choose {argument('kv', 'fp')}"
            )
        return context

    @property
    def used_bytes(self) -> int:
        """Returns the bytes that a step reads now."""
        return self._layout.num_bytes(self._plan, self.tokens)

    def usage(self) -> CacheUsage:
        """Returns one width for every token; nothing is lost that a later token could see."""
        k_bits, v_bits = (self._plan.k_bits, self._plan.v_bits) if self.tokens else (0, 0)
        return CacheUsage(mean_k_bits=k_bits, mean_v_bits=v_bits, evicted_share=0.0)

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        kv_only_layers: Sequence[int] = (),
    ) -> None:
        """Makes sure that `tokens` new rows, a chain, have room. Raises `BudgetError`."""
        assert (view, at, *kv_only_layers) == ("full", None)
        first = self._rows
        if parents is not None and list(parents) != list(range(first - 1, first + tokens - 1)):
            raise BackendError(
                "drafts that branch are not possible on the llama.cpp backend, where each token "
                "follows the one before: ask for one draft, or run a bundle with an ONNX graph"
            )
        check_pass(self.tokens, first, tokens, self.context_tokens, self.chunk_tokens)
        self._rows += tokens

    def forward(self, rows: "SequencePass[LlamaCppCache]") -> NDArray[np.float32]:
        """Returns the logits float32 [R, V] of one sequence's rows, see `Backend.forward`."""
        functions, context, count = self._functions, self._live(), len(rows.ids)
        batch = functions.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            as_array = np.ctypeslib.as_array
            as_array(batch.token, (count,))[:] = rows.ids[:, 0]
            as_array(batch.pos, (count,))[:] = rows.positions
            as_array(batch.n_seq_id, (count,))[:] = 1
            as_array(batch.logits, (count,))[:] = np.isin(np.arange(count), rows.logit_rows)
            for row in range(count):
                batch.seq_id[row][0] = _SEQUENCE
            status = functions.llama_decode(context, batch)
        finally:
            functions.llama_batch_free(batch)
        if status != 0:
            raise CacheError(
                f"llama.cpp could not compute {count} tokens (status {status}): "
                f"{self._model.library.last_errors()}"
            )
        vocabulary = functions.llama_vocab_n_tokens(self._model.vocabulary)
        logits = np.empty((len(rows.logit_rows), vocabulary), np.float32)
        for place, row in enumerate(rows.logit_rows.tolist()):
            pointer = functions.llama_get_logits_ith(context, row)
            logits[place] = np.ctypeslib.as_array(pointer, (vocabulary,))
        return logits

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the rows `path`, which in a chain are the first ones."""
        kept = self.tokens + len(path)
        self.tokens += self._rows
        self._rows = 0
        self.trim(kept)

    def rewind(self, rows: int) -> None:
        """Forgets all but the first `rows` rows of the chain, also after an error."""
        self._rows = rows
        base = self.tokens
        self._truncate(base + rows)
        self.tokens = min(base, self.tokens)

    def trim(self, tokens: int) -> None:
        """Rolls back to the first `tokens` tokens, or to none where these are not all there.

        A layer with a window has forgotten what lies before the last tokens' window, and a
        recurrent state holds all tokens so far.
        """
        if tokens < self.tokens:
            self._truncate(tokens)

    def mark(self, tokens: int) -> None:
        """Does nothing: llama.cpp keeps no places."""

    def why_not_edit(self) -> str:
        return "llama.cpp takes new tokens at the end alone"

    def edit(self, start: int, stop: int, count: int) -> None:
        raise BackendError(f"an edit in the middle is not possible: {self.why_not_edit()}")

    def crowded(self, tokens: int) -> list[tuple[int, int]]:
        """Returns no runs: what is removed frees its room at once."""
        return []

    def state(self) -> bytes:
        size = self._functions.llama_state_seq_get_size(self._live(), _SEQUENCE)
        state = (ctypes.c_uint8 * size)()
        copied = self._functions.llama_state_seq_get_data(self._live(), state, size, _SEQUENCE)
        if copied == 0 and self.tokens:
            raise CacheError("llama.cpp could not copy this session's cache; it was not saved")
        return STATE_PREFIX.pack(self.tokens) + ctypes.string_at(state, copied)

    def load_state(self, state: bytes) -> None:
        before = self.state()
        if not self._restored(state):
            self._restored(before)
            raise SnapshotError(
                "llama.cpp refuses this saved cache; it is damaged, or of another model or "
                "version: prefill again"
            )

    def close(self) -> None:
        if self._context is not None:
            self._functions.llama_free(self._context)
            self._context = None

    def __del__(self) -> None:
        self.close()

    def _restored(self, state: bytes) -> bool:
        """Becomes what `state` says; returns False, and is empty, where this fails."""
        self._clear()
        if len(state) < STATE_PREFIX.size:
            return False
        tokens, data = STATE_PREFIX.unpack_from(state)[0], state[STATE_PREFIX.size :]
        if tokens == 0 or tokens > self.context_tokens:
            return tokens == 0
        functions = self._functions
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        read = functions.llama_state_seq_set_data(self._live(), buffer, len(data), _SEQUENCE)
        last = functions.llama_memory_seq_pos_max(self._memory(), _SEQUENCE)
        self.tokens = tokens
        if read == len(data) and last == tokens - 1 and self._reaches_back():
            return True
        self._clear()
        return False

    def _reaches_back(self) -> bool:
        """Decides whether all that the next token may attend to is still there."""
        first = self._functions.llama_memory_seq_pos_min(self._memory(), _SEQUENCE)
        if self._model.has_states:
            # A state has the position of its last token.
            return first == self.tokens - 1
        window = self._model.window_tokens
        return 0 <= first <= (max(0, self.tokens - window) if window else 0)

    def _truncate(self, tokens: int) -> None:
        """Removes everything from position `tokens` on, pending tokens included."""
        remove = self._functions.llama_memory_seq_rm
        removed = tokens > 0 and remove(self._memory(), _SEQUENCE, tokens, -1)
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
