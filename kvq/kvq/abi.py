"""The C ABI as ctypes sees it: its version, its structures and the signature of every call.

`kvq/csrc/kvq.h` is the definition; `native` loads the library that this describes.
"""

from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
)
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kvq.config import AttentionParams
from kvq.formats import aligned

# The `KVQ_ABI` this module was written for.
ABI = 30


class Regions(NamedTuple):
    """Holds the bytes of each region that lies before an arena's pages, in their order."""

    state: int
    page_encodings: int
    new_page_widths: int
    views: int
    entries: int
    constant_owners: int
    granule_owners: int
    places: int
    tail: int
    branch: int
    probes: int
    probe_rows: int
    layers: int
    conv_state: int
    conv_rows: int
    delta_state: int
    delta_rows: int
    delta_states: int
    staging_positions: int
    staging: int
    rope: int
    partials: int

    @property
    def num_bytes(self) -> int:
        """Adds them up, each up to where the next may begin."""
        return sum(map(aligned, self))


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a structure that are of one type, in the order of `names`."""
    return tuple((name, kind) for name in names.split())


class NativeConfig(Structure):
    """Mirrors `kvq_config`: what a cache is asked to hold."""

    _fields_ = _fields(
        c_int32,
        "layers heads kv_heads head_dim k_bits v_bits sink_tokens tail_tokens tail_rows "
        "chunk_tokens context_tokens splits probes draft_tokens value_groups page_version "
        "conv_layers conv_width conv_taps conv_checkpoints "
        "delta_layers delta_key_heads delta_value_heads delta_key_dim delta_value_dim delta_taps "
        "delta_states delta_fold",
    )


class NativeLayout(Structure):
    """Mirrors `kvq_layout`: where the regions of an arena lie."""

    _fields_ = (
        ("fixed_bytes", c_int64),
        ("pool_bytes", c_int64),
        ("granule_bytes", c_int64),
        ("constant_bytes", c_int64),
        ("minimum_bytes", c_int64),
        ("max_columns", c_int32),
        ("reserved", c_int32),
        ("regions", c_int64 * len(Regions._fields)),
    )


class NativeStats(Structure):
    """Mirrors `kvq_stats`: what a cache holds."""

    _fields_ = (
        *_fields(c_int32, "columns views tokens tail_rows branch_rows reserved"),
        *_fields(c_int64, "used_bytes peak_bytes pages_seen pages_read"),
        *_fields(c_int64, "device_bytes offloaded_bytes streamed_bytes"),
    )


class NativeDevice(Structure):
    """Mirrors `kvq_device`: what a device is, or why it cannot be used."""

    _fields_ = (
        ("name", c_char * 128),
        ("reason", c_char * 256),
        ("memory_bytes", c_int64),
        ("free_bytes", c_int64),
        ("stream", c_int64),
        ("capability", c_int32),
        ("head_dims", c_int32 * 8),
    )


class NativeRead(Structure):
    """Mirrors `kvq_read`: how little of the pages a pass may read."""

    _fields_ = (("share", c_float), ("octaves", c_float))


class NativeAttention(Structure):
    """Mirrors `kvq_attention`: one layer of one pass. Fields are named as in `AttentionParams`."""

    _fields_ = (
        *_fields(c_int32, "layer num_heads num_kv_heads head_dim"),
        *_fields(c_float, "scale softcap rope_factor norm_eps"),
        *_fields(c_int32, "window_tokens rotary_pairs"),
    )


class NativeResidencyStats(Structure):
    """Mirrors `kvq_residency_stats`: what of a model's experts is in memory."""

    _fields_ = _fields(c_int64, "budget_bytes held_bytes chosen fetched")


class NativeProcessor(Structure):
    """Mirrors `kvq_processor`: what a processor says of itself.

    Its maker, as CPUID spells it, and the size of its second-level cache; empty and 0 where it does
    not say.
    """

    _fields_ = (("maker", c_char * 16), ("level2_bytes", c_int64))


class NativeBuiltIn(Structure):
    """Mirrors `kvq_built_in`: what products do where nobody has measured.

    `second_level`: one row's weights are fetched into the second-level cache alone. They are
    fetched `ahead_bytes` before their use; for panels up to `panel_bytes`, the same place of the
    next panel is fetched. Rounded rows of a prompt are multiplied together until they fill
    `row_bytes`.
    """

    _fields_ = (
        ("second_level", c_int32),
        ("ahead_bytes", c_int64),
        ("panel_bytes", c_int64),
        ("row_bytes", c_int64),
    )


_OF_PARAMS = attrgetter(*(field[0] for field in NativeAttention._fields_[:-1]))
_FLOATS, _INTS, _INT32S = POINTER(c_float), POINTER(c_int64), POINTER(c_int32)
_BYTES, _HALVES, _STATS = POINTER(c_uint8), POINTER(c_uint16), POINTER(NativeStats)
_CONFIG = POINTER(NativeConfig)
POINTERS = {
    np.dtype(kind): pointer_type
    for kind, pointer_type in {
        np.float32: _FLOATS, np.float16: _HALVES, np.int64: _INTS, np.int32: _INT32S,
        np.uint8: _BYTES,
    }.items()
}  # fmt: skip
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvq_regions_of": (c_int32, (_CONFIG, c_int32, c_int64, POINTER(c_int64))),
    "kvq_layout_of": (c_int32, (_CONFIG, c_int64, c_int32, POINTER(NativeLayout))),
    "kvq_device_open": (c_int32, (c_char_p, _INT32S, POINTER(NativeDevice))),
    "kvq_device_best": (c_int32, (c_int32, c_void_p, c_int32, c_int32, c_int32, _INT32S, _FLOATS)),
    "kvq_cache_open": (
        c_int32,
        (_CONFIG, c_int64, c_int32, _BYTES, *[c_int32] * 3, c_int64, POINTER(c_int64)),
    ),
    "kvq_cache_close": (c_int32, (c_int64,)),
    "kvq_cache_stats": (c_int32, (c_int64, _STATS)),
    "kvq_cache_read": (c_int32, (c_int64, POINTER(NativeRead))),
    "kvq_cache_feed_back": (c_int32, (c_int64, _FLOATS)),
    "kvq_cache_missing": (c_int32, (c_int64, c_int32, POINTER(c_int64), _INT32S)),
    "kvq_cache_begin": (c_int32, (c_int64, c_int32, _INT32S, c_int32, c_int32, _BYTES)),
    "kvq_cache_attend": (
        c_int32,
        (c_int64, POINTER(NativeAttention), c_int32, _FLOATS, _INTS, *[_FLOATS] * 5),
    ),
    "kvq_cache_convolve": (c_int32, (c_int64, c_int32, c_int32, _FLOATS, _FLOATS, _FLOATS)),
    "kvq_cache_recur": (
        c_int32,
        (c_int64, c_int32, c_int32, *[_FLOATS] * 6, c_float, _FLOATS),
    ),
    "kvq_cache_look": (
        c_int32,
        (c_int64, POINTER(NativeAttention), c_int32, _INTS, _FLOATS, _FLOATS, _FLOATS, _FLOATS),
    ),
    "kvq_cache_commit": (c_int32, (c_int64, _INT32S, c_int32, _STATS)),
    "kvq_cache_rewind": (c_int32, (c_int64, c_int32, _STATS)),
    "kvq_cache_trim": (c_int32, (c_int64, c_int32, _STATS)),
    "kvq_cache_mark": (c_int32, (c_int64, c_int32)),
    "kvq_cache_edit": (c_int32, (c_int64, c_int32, c_int32, c_int32, _STATS)),
    "kvq_cache_demote": (c_int32, (c_int64, _INT32S, c_int32, _STATS)),
    "kvq_cache_demote_entering": (c_int32, (c_int64, _BYTES)),
    "kvq_cache_shift": (c_int32, (c_int64, c_int32, c_int32)),
    "kvq_cache_shift_sinks": (c_int32, (c_int64, c_int32)),
    "kvq_cache_mask": (c_int32, (c_int64, c_int32, c_uint64)),
    "kvq_cache_entering": (c_int32, (c_int64, _BYTES)),
    "kvq_cache_columns": (c_int32, (c_int64, c_int32, _INTS, _BYTES)),
    "kvq_cache_views": (c_int32, (c_int64, c_int32, _INTS)),
    "kvq_cache_places": (c_int32, (c_int64, c_int32, _INTS)),
    "kvq_cache_evidence": (c_int32, (c_int64, c_int32, c_int32, _FLOATS, _FLOATS)),
    "kvq_cache_constants": (c_int32, (c_int64, c_int32, c_int32, _FLOATS, _FLOATS)),
    "kvq_cache_key_squares": (c_int32, (c_int64, c_int32, c_int32, _FLOATS)),
    "kvq_cache_page": (c_int64, (c_int64, c_int32, c_int32, c_int32, _BYTES)),
    "kvq_cache_tail": (c_int32, (c_int64, c_int32, c_int32, c_int32, _HALVES, _HALVES, _INT32S)),
    "kvq_cache_state_bytes": (c_int64, (c_int64,)),
    "kvq_cache_save": (c_int32, (c_int64, _BYTES, c_int64)),
    "kvq_cache_load": (c_int32, (c_int64, c_char_p, c_int64, _STATS)),
    "kvq_pack": (c_int32, (c_int32, c_int32, _FLOATS, c_int32, c_int32, _FLOATS, _BYTES, _BYTES)),
    "kvq_tune": (c_int32, (c_int32, c_int64)),
    "kvq_processor_of": (c_int32, (POINTER(NativeProcessor),)),
    "kvq_built_in_of": (c_int32, (POINTER(NativeProcessor), POINTER(NativeBuiltIn))),
    "kvq_residency_open": (c_int32, (c_int64, POINTER(c_int64))),
    "kvq_residency_close": (c_int32, (c_int64,)),
    "kvq_residency_stats_of": (c_int32, (c_int64, POINTER(NativeResidencyStats))),
    "kvq_status_text": (c_char_p, (c_int32,)),
    "kvq_abi": (c_int32, ()),
    "kvq_isa": (c_char_p, ()),
    "kvq_isa_available": (c_char_p, ()),
    "kvq_isa_select": (c_int32, (c_char_p,)),
    "kvq_isa_refused": (c_char_p, ()),
}


def as_attention(params: AttentionParams, rotary_pairs: int) -> NativeAttention:
    """Returns what a call of `kvq_cache_attend` needs to know of its layer."""
    return NativeAttention(*_OF_PARAMS(params), rotary_pairs)
