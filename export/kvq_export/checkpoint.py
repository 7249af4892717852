"""Reads the weights of a Hugging Face checkpoint folder: safetensors, single or sharded.

Owns the safetensors header and the refusals; knows no quantiser. Tensors are read in row chunks,
so a large embedding never sits in memory as a whole. Nothing here loads a pickle.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kvq.errors import CheckpointError
from kvq_models.family import WeightSource
from kvq_models.registry import read_json

# The two names of one matrix where a model ties its head to its embedding.
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
FLOAT_DTYPES: dict[str, DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file; `start` is its first byte, counted from the file's."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def __str__(self) -> str:
        return f"tensor {self.name!r} of {self.file.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """An opened folder: every header is read and checked, no weight is read yet."""

    folder: Path
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Raises `CheckpointError` naming the file for anything missing or inconsistent."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder with config.json")
        tensors: dict[str, TensorEntry] = {}
        for file, expected in _weight_files(folder).items():
            entries = read_header(file)
            missing = [name for name in expected if name not in entries]
            if missing:
                raise CheckpointError(
                    f"tensor {missing[0]!r} is missing from {file.name}, where the index puts it"
                    f"{_and_more(missing)}; download the file again"
                )
            # The index says which of two tensors of one name is meant.
            tensors = entries | tensors | {name: entries[name] for name in expected}
        if _EMBEDDING not in tensors and _HEAD in tensors:
            # Of tied weights some tools keep only the other name; `check` refuses it elsewhere.
            tensors[_EMBEDDING] = tensors[_HEAD]
        return cls(folder=folder, tensors=tensors)

    def check(self, sources: Mapping[str, WeightSource]) -> None:
        """Every part exists in a readable dtype, and the shapes are those `sources` ask for.

        Tensors that belong to a layer or to nothing known are refused too: leaving out a bias
        would change the model in silence.
        """
        wanted = [part for source in sources.values() for part in source.parts]
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            raise CheckpointError(
                f"tensor {missing[0]!r} is missing from {self.folder}{_and_more(missing)}; "
                "the weights are incomplete or do not belong to this config.json"
            )
        for source in sources.values():
            self._check_shapes(source)
        if _HEAD in wanted and self.tensors[_EMBEDDING] is self.tensors[_HEAD]:
            raise CheckpointError(
                f"tensor {_EMBEDDING!r} is missing from {self.folder}, and config.json does not "
                "tie it to the head (tie_word_embeddings): the weights are incomplete"
            )
        known = set(wanted)
        extra = [name for name in self.tensors if name not in known and not _ignorable(name)]
        if extra:
            entry = self.tensors[extra[0]]
            raise CheckpointError(
                f"{entry} is not part of this architecture{_and_more(extra)}; "
                "exporting without it would change the model, so check config.json"
            )

    def chunks(
        self,
        source: WeightSource,
        max_weights: int = 1 << 20,
        rows: range | None = None,
        multiple: int = 1,
    ) -> Iterator[np.ndarray]:
        """Float32 row chunks [n, *shape[1:]] of a canonical weight, each about `max_weights`.

        `rows` picks a run of rows. A chunk ends where a part does, else on a `multiple` of rows
        from where it began. Raises `CheckpointError` for a short file, and for NaN or infinite
        weights.
        """
        rows = rows or range(source.shape[0])
        row_weights = math.prod(source.shape[1:])
        step = multiple * max(1, max_weights // max(1, row_weights * multiple))
        first = 0
        for part in source.parts:
            entry = self.tensors[part]
            last = min(rows.stop - first, entry.shape[0])
            for start in range(max(0, rows.start - first), last, step):
                values = self._read(entry, start, min(start + step, last))
                yield values + np.float32(source.offset) if source.offset else values
            first += entry.shape[0]

    def read(self, source: WeightSource) -> np.ndarray:
        """A whole canonical weight, float32."""
        out = np.empty(source.shape, np.float32)
        row = 0
        for chunk in self.chunks(source):
            out[row : row + len(chunk)] = chunk
            row += len(chunk)
        return out

    def read_rows(self, source: WeightSource, rows: np.ndarray) -> np.ndarray:
        """Float32 rows [n, *shape[1:]] of a canonical weight, by index."""
        out = np.empty((len(rows), *source.shape[1:]), np.float32)
        first = 0
        for part in source.parts:
            entry = self.tensors[part]
            for place in np.flatnonzero((rows >= first) & (rows < first + entry.shape[0])):
                row = int(rows[place]) - first
                out[place] = self._read(entry, row, row + 1)[0]
            first += entry.shape[0]
        return out

    def _read(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        dtype = np.dtype(FLOAT_DTYPES[entry.dtype])
        row_weights = math.prod(entry.shape[1:])
        count = (stop - start) * row_weights
        offset = entry.start + start * row_weights * dtype.itemsize
        try:
            values = np.fromfile(entry.file, dtype, count, offset=offset)
        except OSError as error:
            raise CheckpointError(f"{entry} cannot be read: {error.strerror}") from error
        if len(values) < count:
            raise CheckpointError(f"{entry} ends early: {entry.file} was cut while it was read")
        rows = values.astype(np.float32, copy=False).reshape(stop - start, *entry.shape[1:])
        if not np.isfinite(rows).all():
            bad = start + int(np.flatnonzero(~np.isfinite(rows).reshape(len(rows), -1).all(1))[0])
            raise CheckpointError(
                f"{entry} holds NaN or infinite weights (first in row {bad}); "
                "the checkpoint is damaged: download or train it again"
            )
        return rows

    def _check_shapes(self, source: WeightSource) -> None:
        entries = [self.tensors[part] for part in source.parts]
        for entry in entries:
            if entry.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{entry} has dtype {entry.dtype}; F32, F16 and BF16 are possible. "
                    "Export the original checkpoint, not one that is already quantised"
                )
        trailing = all(entry.shape[1:] == source.shape[1:] for entry in entries)
        ranks = all(len(entry.shape) == len(source.shape) for entry in entries)
        if not ranks or not trailing or sum(e.shape[0] for e in entries) != source.shape[0]:
            found = ", ".join(f"{entry} {list(entry.shape)}" for entry in entries)
            together = " in rows together" if len(entries) > 1 else ""
            raise CheckpointError(
                f"wrong shape: {found}; config.json asks for {list(source.shape)}{together}"
            )


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Entries of one safetensors file, with every offset checked against the file's size."""
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} is truncated or not safetensors: its header claims {length} bytes, "
                    f"the file has {file_bytes}; download it again"
                )
            header = json.loads(stream.read(length), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; download the checkpoint again") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged header ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged header (not an object)")
    header.pop("__metadata__", None)
    return {
        name: _entry(file, name, row, LENGTH_BYTES + length, file_bytes)
        for name, row in header.items()
    }


def _entry(file: Path, name: str, row: Any, base: int, file_bytes: int) -> TensorEntry:
    damaged = CheckpointError(f"{file} has a damaged header entry for tensor {name!r}: {row!r}")
    try:
        dtype, shape, (start, stop) = row["dtype"], row["shape"], row["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise damaged from None
    numbers = [*shape, start, stop] if isinstance(shape, list) else [-1]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
        raise damaged
    if base + stop > file_bytes:
        raise CheckpointError(
            f"{file} is truncated: tensor {name!r} ends at byte {base + stop}, "
            f"the file has {file_bytes}; download it again"
        )
    if dtype in ITEM_BYTES and stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise damaged
    return TensorEntry(name=name, file=file, dtype=dtype, shape=tuple(shape), start=base + start)


def _weight_files(folder: Path) -> dict[Path, Sequence[str]]:
    """Each safetensors file with the tensors its index promises (none for a single file)."""
    if (folder / "model.safetensors").exists():
        return {folder / "model.safetensors": ()}
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        hint = (
            f"it has {others[0]}, a pickle that can run code, which is never loaded: save the "
            "model with save_pretrained(..., safe_serialization=True) or pick a safetensors copy"
            if others
            else "model.safetensors or model.safetensors.index.json is needed"
        )
        raise CheckpointError(f"{folder} has no safetensors weights; {hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    files: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in (".", ".."):
            raise CheckpointError(f"{index} puts tensor {name!r} outside the folder: {shard!r}")
        files.setdefault(folder / shard, []).append(name)
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(
            f"shard {missing[0]} is missing from {folder}{_and_more(missing)}; download it again"
        )
    return dict(files)


def _ignorable(name: str) -> bool:
    """Buffers some exporters save; the output head of a model that ties it."""
    return name.endswith(("rotary_emb.inv_freq", "attn.masked_bias")) or name == _HEAD


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name appears twice")
    return out
