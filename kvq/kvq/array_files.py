"""Reads .npz files that anybody may have written, and compares sizes before it reads anything.

Such a file is a ZIP archive without compression, as `numpy.savez` writes it. A file with compressed
or encrypted members, or with Python objects, is refused. So reading never takes more memory than
the file has bytes.
"""

import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

# The kinds of numpy types that are read: numbers, bits and texts.
_KINDS = "biufU"
_ENCRYPTED = 1


@dataclass(frozen=True)
class Form:
    """Describes what an array must be; None in its shape stands for any length."""

    shape: tuple[int | None, ...]
    dtype: type[np.generic]


def read_arrays(
    stream: BinaryIO, forms: Mapping[str, Form] | None = None
) -> dict[str, NDArray[Any]]:
    """Returns the arrays that `forms` names, or all arrays of the file if there are no forms.

    Raises:
        ValueError: The file is damaged, or an array is not of its form; the text says which.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            _check_sizes(stream, members)
            missing = set(forms or ()) - set(members)
            if missing:
                raise ValueError(f"{min(missing)} is missing")
            return {
                name: _read(archive, name, members[name], None if forms is None else forms[name])
                for name in (members if forms is None else forms)
            }
    except (ValueError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged archive raises what its reader happens to fail with
        raise ValueError(str(error) or type(error).__name__) from error


def _check_sizes(stream: BinaryIO, members: Mapping[str, zipfile.ZipInfo]) -> None:
    """Raises `ValueError` if reading would take more bytes than the file has."""
    for name, member in members.items():
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            raise ValueError(f"{name!r} is not stored as it is")
    if sum(member.file_size for member in members.values()) > stream.seek(0, os.SEEK_END):
        raise ValueError("its arrays are larger than the file")


def _read(
    archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo, form: Form | None
) -> NDArray[Any]:
    with archive.open(member) as stream:
        shape, dtype = _header(stream)
        num_bytes = math.prod(shape) * dtype.itemsize
        if dtype.kind not in _KINDS or not dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{name} has elements of {dtype} in the shape {shape}")
        if stream.tell() + num_bytes != member.file_size:
            raise ValueError(f"{name} says it has {num_bytes} bytes, which are not there")
        if form is not None and not _fits(form, shape, dtype):
            raise ValueError(f"{name} is {dtype} of shape {shape}")
        stream.seek(0)
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False), order="C")


def _header(stream: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns the shape and type that a member's header gives. Raises `ValueError`."""
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"an array of version {version}")
    except Exception as error:  # the header is parsed as Python, which can fail in any way
        raise ValueError(f"a header cannot be read: {str(error)[:80]}") from error
    return shape, dtype


def _fits(form: Form, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    return (
        dtype == form.dtype
        and len(shape) == len(form.shape)
        and all(size in (None, length) for size, length in zip(form.shape, shape, strict=True))
    )
