"""Counts the bytes of an arena's regions a second time, to compare with the library's count."""

from kvq.abi import Regions
from kvq.config import CONV_CHECKPOINTS, FOLD_TOKENS, ConvShape, DeltaShape
from kvq.formats import NEWEST_PROBES, SAMPLED_PROBES, granule_bytes, kept_heads, page_bytes
from kvq.geometry import LEAST_DELTA_STATES, Geometry

# `sizeof` of the library's structs.
STATE_BYTES = 200
VIEW_BYTES = 24
ENTRY_BYTES = 40
PROBE_BYTES = 8
BRANCH_ROW_BYTES = 24
CONV_STATE_BYTES = 40
DELTA_STATE_BYTES = 40
LAYER_BYTES = 552
# Rotary frequencies of a layer that those bytes have room for; a head may have more.
LAYER_PAIRS = 128
# Bytes of what a floating-point row is: token, position, how far it has moved.
PLACE_BYTES = 12
# Views that columns share beyond one each: so many, and one more per column. Of them an edit leaves
# free what filling gaps may take.
SPARE_VIEWS, GAP_VIEWS = 64, 32
# Of so many tokens one has its query rows kept, while it is among the newest.
PROBE_STRIDE = 8
# Convolutions: committed rows kept beyond those that the next row needs, so that going back by no
# more computes nothing again; and how many tokens decoding passes from one checkpoint to the next.
CONV_BACK_ROWS = 8
CONV_STEP_TOKENS = 256
# Checkpoints that are kept because they were marked, or gone back to, last: at most so many.
MOST_WANTED = 8


def expected_regions(geometry: Geometry, columns: int, pool_bytes: int) -> Regions:
    """Counts the bytes of everything but pages a second time."""
    shape, dim = geometry.shape, geometry.shape.head_dim
    slots = probe_slots(geometry.draft_tokens, samples=geometry.samples) if geometry.probes else 0
    askers = shape.num_layers + geometry.kv_shared_layers
    split_rows = geometry.splits * geometry.draft_tokens * shape.num_heads
    return Regions(
        state=STATE_BYTES,
        page_encodings=geometry.streams,
        new_page_widths=geometry.streams * 2,
        views=(2 * columns + SPARE_VIEWS) * VIEW_BYTES,
        entries=columns * geometry.streams * ENTRY_BYTES,
        constant_owners=columns * geometry.streams * 4,
        granule_owners=pool_bytes // granule_bytes(dim) * 4,
        places=geometry.tail_rows * PLACE_BYTES,
        tail=geometry.streams * geometry.tail_rows * dim * 4,
        branch=geometry.draft_tokens * BRANCH_ROW_BYTES,
        probes=slots * (1 + geometry.kv_shared_layers) * PROBE_BYTES,
        probe_rows=slots * askers * shape.num_kv_heads * kept_heads(shape) * dim * 2,
        layers=askers * _layer_bytes(dim) if slots else 0,
        conv_state=CONV_STATE_BYTES + 4 * CONV_CHECKPOINTS if geometry.conv else 0,
        conv_rows=conv_bytes(geometry.conv, geometry.draft_tokens),
        delta_state=DELTA_STATE_BYTES + 4 * geometry.delta_states if geometry.delta else 0,
        delta_rows=delta_row_bytes(geometry.delta, geometry.draft_tokens, geometry.delta_states),
        delta_states=delta_state_bytes(geometry.delta, geometry.delta_states),
        staging_positions=geometry.pass_tokens * 4,
        staging=shape.num_kv_heads * geometry.pass_tokens * dim * 4 * geometry.plan.quantized,
        rope=geometry.pass_tokens * dim * 4,
        partials=split_rows * (dim + 2) * 4,
    )


def newest_slots(draft_tokens: int) -> int:
    """Slots for the newest probes: those used, and what drafts overwrite."""
    return NEWEST_PROBES + 2 * -(-draft_tokens // PROBE_STRIDE)


def probe_slots(draft_tokens: int, *, samples: bool) -> int:
    """Slots for all probes; `samples`: those of the whole text among them."""
    return newest_slots(draft_tokens) + SAMPLED_PROBES * samples


def column_bytes(geometry: Geometry, k_bits: int, v_bits: int) -> int:
    """Bytes of one page of every stream."""
    dim, groups = geometry.shape.head_dim, geometry.value_groups
    return geometry.streams * page_bytes(dim, k_bits, v_bits, groups)


def conv_bytes(conv: ConvShape | None, draft_tokens: int) -> int:
    """Bytes of the rows that convolutions remember.

    The newest committed ones, those of a branch, the newest of a chunk, and of every place that may
    be gone back to, of which one is on the way into a chunk, those before it.
    """
    if conv is None:
        return 0
    newest = conv.before + CONV_BACK_ROWS
    rows = 2 * newest + draft_tokens + (CONV_CHECKPOINTS + 1) * conv.before
    return conv.num_layers * rows * conv.width * 4


def most_delta_newest(delta: DeltaShape) -> int:
    """Committed rows of a delta net that are kept at most: see `delta_newest`."""
    return delta.before + 2 * FOLD_TOKENS


def delta_newest(delta: DeltaShape, states: int) -> int:
    """Committed rows of a delta net that are kept beside so many states.

    Two folds', and what convolutions see there: so far can be gone back without computing anything
    again. Who keeps no place to go back to has one fold's, and computes what lies further back.
    """
    if states > LEAST_DELTA_STATES:
        return most_delta_newest(delta)
    return max(delta.before, FOLD_TOKENS)


def delta_row_bytes(delta: DeltaShape | None, draft_tokens: int, states: int) -> int:
    """Bytes of the rows that delta nets remember: the newest, a branch's, the newest of a chunk.

    Of a chunk these begin at the last base but one at the latest, whose state it makes.
    """
    if delta is None:
        return 0
    newest = delta_newest(delta, states)
    rows = newest + draft_tokens + max(newest, 2 * FOLD_TOKENS - 1)
    return delta.num_layers * rows * delta_row_width(delta) * 4


def delta_row_width(delta: DeltaShape) -> int:
    """Numbers that are kept of a token: what was convolved, then k, u and G."""
    kept = delta.key_heads * delta.key_dim + delta.value_width + delta.value_heads
    return delta.conv_width + kept


def delta_state_bytes(delta: DeltaShape | None, states: int) -> int:
    """Bytes of so many states of delta nets, each with the rows that convolutions see before it."""
    if delta is None:
        return 0
    return states * delta.num_layers * (delta.state_width + delta.before * delta.conv_width) * 4


def _layer_bytes(head_dim: int) -> int:
    """Bytes of what is kept of a layer's attention, to repeat it."""
    return LAYER_BYTES + 4 * max(0, head_dim // 2 - LAYER_PAIRS)
