"""Reads llama.cpp's importance matrix: how much the columns of each matrix matter in products.

A file has the squares of what entered a matrix, summed over a text, under llama.cpp's name of the
matrix. A GGUF file has them in a tensor `NAME.in_sum2`. The older form has int32 numbers: how many
matrices; of each how many bytes its name takes, the name, how many calls, how many floats, and the
floats. Only ratios within a row matter here, so nothing is divided by its counts.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvq.errors import DataError, UnsupportedModelError, reason_of
from kvq_export.gguf.gguf_model import ARCHITECTURE_OF
from kvq_export.gguf.gguf_tensors import GgufTensor, tensors_of
from kvq_export.read.checkpoint import read_bytes
from kvq_models.config import ModelConfig
from kvq_runtime.bundle.gguf_format import MAGIC, read_gguf

_SUMS = ".in_sum2"
# Least share of the mean of its row: a column that the text did not use is not free.
LEAST_SHARE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Importance:
    """Holds importances of columns by the canonical name of the matrix, float32 [experts, columns].

    The mean over columns is 1; a matrix that is no stack of experts has one row. `unknown` counts
    names in the file that are of no matrix of the model.
    """

    file: Path
    columns: Mapping[str, np.ndarray]
    unknown: int


def is_importance(path: Path) -> bool:
    """Tells by its first bytes whether a file is an importance matrix and not a text.

    Both forms begin with small numbers, whose zero bytes no text has.
    """
    with suppress(OSError):
        return path.is_file() and 0 in np.fromfile(path, np.uint8, 8)
    return False


def read_importance(path: Path, config: ModelConfig) -> Importance:
    """Reads the importance matrix of a model, of either form.

    Args:
        path: The file.
        config: The model it was made for.

    Returns:
        What it says of the model's matrices.

    Raises:
        DataError: The file is damaged, no importance matrix, or that of another model.
        CheckpointError: It is a GGUF file that is damaged.
        UnsupportedModelError: llama.cpp's names of the model's matrices are not known.
    """
    try:
        is_gguf = np.fromfile(path, np.uint8, len(MAGIC)).tobytes() == MAGIC
        sums = dict(_gguf_sums(path) if is_gguf else _old_sums(path, path.read_bytes()))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from error
    columns = dict[str, np.ndarray]()
    known = {tensor.name: tensor for tensor in _tensors(config, sums) if len(tensor.shape) > 1}
    for name, tensor in known.items():
        if name not in sums:
            continue
        size, width = sums[name].size, tensor.shape[-1]
        if size != (expected := max(1, tensor.experts) * width):
            raise DataError(
                f"{path} has {size} numbers for the columns of {name}, and this model has "
                f"{expected}; give the file that was made for this model"
            )
        rows = _shares(path, name, sums[name].reshape(-1, width))
        if tensor.dealt_columns is not None:
            rows = rows[:, np.argsort(tensor.dealt_columns.columns)]
        # Parts of a joint matrix have the same inputs.
        columns.setdefault(tensor.source, rows)
    if not columns:
        raise DataError(f"{path} has nothing for this model; give the file that was made for it")
    return Importance(file=path, columns=columns, unknown=len(sums.keys() - known.keys()))


def _tensors(config: ModelConfig, names: Mapping[str, np.ndarray]) -> tuple[GgufTensor, ...]:
    kind = config.model_type
    try:
        if kind not in ARCHITECTURE_OF:
            raise UnsupportedModelError(f"{kind} is none of its architectures")
        return tensors_of(config, ARCHITECTURE_OF[kind], names)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"what llama.cpp calls the matrices of this {kind} model is not known: {error}; "
            "calibrate with a text"
        ) from error


def _shares(path: Path, name: str, sums: np.ndarray) -> np.ndarray:
    """Returns rows of sums over their means, 1 for an expert that the text did not use."""
    if not (np.isfinite(sums).all() and (sums >= 0).all()):
        raise _damaged(path, f"the sums of squares of {name} are not all positive numbers")
    means = sums.mean(axis=1, keepdims=True, dtype=np.float64)
    shares = np.divide(sums, means, out=np.ones(sums.shape), where=means > 0)
    return np.maximum(shares, LEAST_SHARE).astype(np.float32)


def _gguf_sums(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    contents = read_gguf(path)
    if (kind := contents.metadata.get("general.type")) != "imatrix":
        raise DataError(f"{path} is a GGUF file of type {kind}, and no importance matrix")
    begin = -(-contents.header_bytes // contents.alignment) * contents.alignment
    for tensor in (row for row in contents.tensors if row.name.endswith(_SUMS)):
        if tensor.kind.name != "F32":
            raise _damaged(path, f"{tensor.name} is of type {tensor.kind.name} and not F32")
        raw = read_bytes(path, begin + tensor.offset, tensor.num_bytes, str(path))
        yield tensor.name.removesuffix(_SUMS), raw.view("<f4")


def _old_sums(path: Path, raw: bytes) -> Iterator[tuple[str, np.ndarray]]:
    at = 0

    def take(num_bytes: int) -> bytes:
        nonlocal at
        if not 0 <= num_bytes <= len(raw) - at:
            raise _damaged(path, f"{num_bytes} bytes are due at byte {at} of {len(raw)}")
        at += num_bytes
        return raw[at - num_bytes : at]

    def number() -> int:
        return int.from_bytes(take(4), "little", signed=True)

    for _ in range(number()):
        name = take(number()).decode(errors="replace")
        number()
        yield name, np.frombuffer(take(4 * number()), "<f4")
    # Older files end here, or with a number of chunks; newer ones with the name of the text, too.
    if (rest := len(raw) - at) not in (0, 4, 8 + int.from_bytes(raw[at + 4 : at + 8], "little")):
        raise _damaged(path, f"{rest} bytes follow its matrices")


def _damaged(path: Path, reason: str) -> DataError:
    subject = f"{path} is neither a text nor a whole importance matrix of llama.cpp"
    return DataError(f"{subject}: {reason}; make or copy it again")
