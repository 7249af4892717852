"""Reads what config.json says of weights that were quantised before: `quantization_config`.

Owns the refusal by name of every way to quantise that is not read; knows no tensor. Keys that say
how the weights came about are left alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq.errors import ModelError, UnsupportedModelError
from kvq_models.keys import Default, Key, MustEqual, Required, read_keys

_WIDTH, _COLUMNS = MustEqual(4, 8), Default(int, -1)
_NONE = MustEqual(None)
_WRITTEN = MustEqual("gptq", "gptq_v2")
_PACKED = MustEqual("pack-quantized")
_KEYS: Mapping[str, Mapping[str, Key]] = {
    "gptq": {
        "bits": _WIDTH, "group_size": _COLUMNS, "desc_act": Default(bool, False),
        "checkpoint_format": _WRITTEN, "format": _WRITTEN, "is_marlin_format": MustEqual(False),
        "adapter": _NONE,
    },
    "awq": {
        "bits": MustEqual(4), "w_bit": MustEqual(4), "group_size": _COLUMNS,
        "q_group_size": _COLUMNS, "version": MustEqual("gemm", "GEMM"), "format": MustEqual("gemm"),
    },
    "mxfp4": {},
    "compressed-tensors": {
        "format": _PACKED, "config_groups": Required(dict), "kv_cache_scheme": _NONE,
        "transform_config": _NONE,
    },
}  # fmt: skip
# Keys of compressed-tensors: of a group of layers, and of its weights.
_GROUP_KEYS: Mapping[str, Key] = {
    "weights": Required(dict), "format": _PACKED, "input_activations": _NONE,
    "output_activations": _NONE,
}  # fmt: skip
_WEIGHTS_KEYS: Mapping[str, Key] = {
    "num_bits": _WIDTH, "type": MustEqual("int"), "strategy": MustEqual("group", "channel"),
    "group_size": _COLUMNS, "symmetric": Default(bool, True), "actorder": Default(object),
    "dynamic": MustEqual(False),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """Says how a matrix was quantised: bits of a code, columns that share a scale (-1: all)."""

    bits: int
    group: int

    def __post_init__(self) -> None:
        if self.group < 1 and self.group != -1:
            raise UnsupportedModelError(f"group_size = {self.group} is neither -1 nor above 0")

    def __str__(self) -> str:
        return f"{self.bits} bits with group_size {self.group}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """Holds what a `quantization_config` says: every matrix has one of `schemes`, MXFP4 has none.

    `zeros`: each has zero points. `lowered`: these are stored with 1 taken off. `dealt`: each says
    which group a column is in.
    """

    method: str
    schemes: tuple[Scheme, ...]
    zeros: bool = True
    lowered: bool = False
    dealt: bool = False


def read_quantization(settings: object) -> Quantization:
    """Reads a `quantization_config`. Raises `UnsupportedModelError` for another kind."""
    try:
        root = _object("quantization_config", {"quantization_config": settings})
        method = _values("quantised", {"quant_method": Required(str)}, root)["quant_method"]
        _values("quantised weights", {"quant_method": MustEqual(*_KEYS)}, root)
        values = _values(method, _KEYS[method], root)
        if method == "mxfp4":
            return Quantization(method=method, schemes=())
        return _compressed(values) if method == "compressed-tensors" else _older(method, values)
    except ModelError as error:
        raise UnsupportedModelError(
            f"these weights are quantised in a way that is not read: {error}. Possible are GPTQ "
            "and compressed-tensors (pack-quantized) of 4 and 8 bits, AWQ (gemm) of 4 bits, and "
            "experts in MXFP4; export one of these or the original checkpoint"
        ) from error


def _older(method: str, values: Mapping[str, Any]) -> Quantization:
    """Reads the settings of GPTQ and AWQ."""
    if method == "awq":
        scheme = Scheme(4, max(values["group_size"], values["q_group_size"]))
        return Quantization(method=method, schemes=(scheme,))
    return Quantization(
        method=method,
        schemes=(Scheme(values["bits"], values["group_size"]),),
        lowered="gptq_v2" not in (values["checkpoint_format"], values["format"]),
        dealt=values["desc_act"],
    )


def _compressed(values: Mapping[str, Any]) -> Quantization:
    """Reads the settings of compressed-tensors, which has them for groups of layers."""
    method, groups = "compressed-tensors", values["config_groups"]
    objects = [_values(method, _GROUP_KEYS, _object(name, groups)) for name in groups]
    weights = [_values(method, _WEIGHTS_KEYS, row["weights"]) for row in objects]
    return Quantization(
        method=method,
        schemes=tuple(Scheme(row["num_bits"], row["group_size"]) for row in weights),
        # Where groups differ, a matrix of a symmetric one has none.
        zeros=not any(row["symmetric"] for row in weights),
        dealt=all(row["actorder"] in ("group", "dynamic") for row in weights),
    )


def _object(name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return _values("quantised", {name: Required(dict)}, values)[name]


def _values(
    model_type: str, keys: Mapping[str, Key], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads these keys of the settings; null and {} count as absent."""
    present = {key: settings[key] for key in keys if settings.get(key) not in (None, {})}
    return read_keys(model_type, keys, present)
