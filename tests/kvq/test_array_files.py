"""Files of arrays: what `numpy.savez` writes is read, anything else is refused by its header."""

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvq.array_files import Form, read_arrays

ARRAYS: dict[str, np.ndarray] = {
    "map": np.arange(24, dtype=np.uint8).reshape(4, 6),
    "bias": np.linspace(-1, 1, 4, dtype=np.float32),
    "text": np.array("an identity"),
    "nothing": np.zeros((0, 3), np.float16),
}
FORMS = {"map": Form((4, 6), np.uint8), "bias": Form((None,), np.float32)}


def saved(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=True, **(ARRAYS | arrays))
    return stream.getvalue()


def archive(content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """A file whose member `map` has these bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        file.writestr("map.npy", content)
    return stream.getvalue()


def header(text: str, version: bytes = b"\1\0", rows: bytes = b"") -> bytes:
    """A file of an array with this header."""
    return archive(b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode() + rows)


def described(descr: str, shape: str, rows: bytes = bytes(24)) -> bytes:
    fields = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    return header(f"{fields:<117}\n", rows=rows)


def test_arrays_come_back_as_they_were_saved() -> None:
    for content in (saved(), saved(map=np.asfortranarray(ARRAYS["map"]))):
        whole = read_arrays(io.BytesIO(content))
        assert whole.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert whole[name].dtype == array.dtype
            assert whole[name].flags.c_contiguous
            np.testing.assert_array_equal(whole[name], array)
        assert read_arrays(io.BytesIO(content), FORMS).keys() == FORMS.keys()


@pytest.mark.parametrize(
    ("forms", "why"),
    [
        ({"map": Form((4, 7), np.uint8)}, r"map is uint8 of shape \(4, 6\)"),
        ({"map": Form((4,), np.uint8)}, r"map is uint8 of shape \(4, 6\)"),
        ({"bias": Form((None,), np.float16)}, r"bias is float32 of shape \(4,\)"),
        ({"other": Form((None,), np.float16)}, "other is missing"),
    ],
)
def test_an_array_of_another_form_is_refused(forms: dict[str, Form], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_arrays(io.BytesIO(saved()), forms)


DAMAGED = {
    "nothing": b"",
    "an array alone": saved()[:0] + b"\x93NUMPY\1\0",
    "a pickle": b"\x80\4K\1.",
    "compressed": archive(bytes(100), zipfile.ZIP_DEFLATED),
    "packed by bzip2": archive(bytes(100), zipfile.ZIP_BZIP2),
    "an object": saved(map=np.array([print], object)),
    "10^12 rows": described("'|u1'", "(1000000000000,)"),
    "10^12 rows of nothing": described("'|V0'", "(1000000000000,)", b""),
    "10^30 columns of no row": described("'<f8'", f"(0, {10**30})", b""),
    "rows below zero": described("'|u1'", "(-4, -6)"),
    "rows of text": described("'|u1'", "('4', 6)"),
    "no shape": described("'|u1'", "None"),
    "fields": described("[('a', '<f4'), ('b', 'O')]", "(3,)"),
    "a type that is none": described("{}", "(3,)"),
    "a key that is a list": header("{[]: 1}\n"),
    "a header of signs": header(f"{'-' * 9000}1\n"),
    "a header of brackets": header(f"{'(' * 9000}\n"),
    "half a header": archive(b"\x93NUMPY\1\0\xff\xff{"),
    "another version": header("{}\n", version=b"\x09\0"),
    "fewer bytes than it says": described("'|u1'", "(4, 6)", bytes(23)),
    "more bytes than it says": described("'|u1'", "(4, 6)", bytes(25)),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_a_value_error(kind: str) -> None:
    for forms in (None, FORMS, {"map": FORMS["map"]}):
        with pytest.raises(ValueError, match=r"."):
            read_arrays(io.BytesIO(DAMAGED[kind]), forms)


def test_what_would_unpack_to_much_is_not_unpacked() -> None:
    stream, rows = io.BytesIO(), bytes(1 << 20)
    with (
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("map.npy", "w") as member,
    ):
        member.write(b"\x93NUMPY\1\0\x76\0")
        member.write(
            f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({256 << 20},)}}".encode()
        )
        for _ in range(256):
            member.write(rows)
    tracemalloc.start()
    try:
        for forms in (None, FORMS):
            with pytest.raises(ValueError, match=r"is not stored as it is"):
                read_arrays(stream, forms)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_members_that_share_their_bytes_are_refused() -> None:
    content = archive(bytes(1000))
    entry = content[content.index(b"PK\1\2") : content.index(b"PK\5\6")]
    start = content.index(b"PK\1\2")
    rows = b"".join(entry.replace(b"map.npy", b"%03d.npy" % index) for index in range(300))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 300, 300, len(rows), start, 0)
    with pytest.raises(ValueError, match="its arrays are larger than the file"):
        read_arrays(io.BytesIO(content[:start] + rows + end))


def _flipped(content: bytes, chance: np.random.Generator) -> bytes:
    changed = bytearray(content)
    for place in chance.integers(0, len(content), chance.integers(1, 4)):
        changed[place] = chance.integers(0, 256)
    return bytes(changed)


def _cut(content: bytes, chance: np.random.Generator) -> bytes:
    return content[: chance.integers(0, len(content))]


def _doubled(content: bytes, chance: np.random.Generator) -> bytes:
    start, end = sorted(chance.integers(0, len(content), 2))
    return content[:end] + content[start:]


@pytest.mark.parametrize("change", [_flipped, _cut, _doubled])
def test_altered_files_never_raise_anything_else(
    change: Callable[[bytes, np.random.Generator], bytes],
) -> None:
    chance, refused = np.random.default_rng(0), 0
    for _ in range(400):
        altered = change(saved(), chance)
        for forms in (None, FORMS):
            try:
                read_arrays(io.BytesIO(altered), forms)
            except (ValueError, OSError):
                refused += 1
    assert refused > 400
