"""GGUF files from elsewhere: what is damaged, impossible or ends llama.cpp is refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ModelError
from kvq_runtime.backends.llama_cache import CACHE_TYPES
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.bundle.gguf_format import TENSOR_TYPES, is_gguf, read_gguf
from kvq_runtime.engine import Engine

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from tiny_gguf import open_engine, write_gguf  # noqa: E402

Make = Callable[..., Path]


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    return str(caught.value)


def test_a_truncated_file_is_refused_everywhere(make: Make, tmp_path: Path) -> None:
    whole, path = make().read_bytes(), tmp_path / "cut.gguf"
    header = read_gguf(make()).header_bytes
    for cut in (*range(0, header, 97), header, header + 1, len(whole) - 5000, len(whole) - 1):
        path.write_bytes(whole[:cut])
        message = refused(path)
        assert "truncated" in message or "cut short" in message, (cut, message)


def test_wrong_files_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    content, path = make().read_bytes(), tmp_path / "wrong.gguf"

    def message(*changes: tuple[bytes, bytes]) -> str:
        data = content
        for old, new in changes:
            assert data.count(old) >= 1
            data = data.replace(old, new, 1)
        path.write_bytes(data)
        return refused(path)

    assert "not a GGUF file: it begins with b'GGML'" in message((b"GGUF", b"GGML"))
    version = (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0")
    assert "of version 1; kvq reads versions 2 and 3" in message(version)
    assert "big-endian" in message((b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"))
    assert "llama.block_count is None" in message((b"llama.block_count", b"llama.clock_count"))
    twice = (b"llama.attention.key_length", b"llama.rope.dimension_count")
    assert "two values for llama.rope.dimension_count" in message(twice)
    assert "two tensors called blk.0.attn_k.weight" in message((b"blk.0.attn_q", b"blk.0.attn_k"))
    assert "a name of" in message((b"general.name", b"general\0name"))


def test_a_stranger_architecture_is_refused_in_llama_cpps_words(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "one.gguf", keys={"general.architecture": "llama"})
    data = path.read_bytes().replace(b"llama", b"lamma")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="unknown model architecture: 'lamma'"):
        open_engine(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads cannot share 3 KV heads"),
        ({"llama.block_count": 1 << 31}, "llama.block_count is 2147483648"),
        ({"llama.embedding_length": 64}, "its embedding has shape"),
        ({"llama.context_length": "long"}, "llama.context_length is long"),
        ({"split.count": 3}, "one part of a split model"),
        ({"tokenizer.ggml.tokens": ["a"] * 384}, "two of its tokens are the same"),
        ({"general.alignment": 7}, "alignment"),
    ],
)
def test_impossible_numbers_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    assert message in refused(write_gguf(tmp_path / "one.gguf", keys=keys))


def test_models_that_are_no_decoders_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "one.gguf", keys={"general.type": "adapter"})
    path.write_bytes(path.read_bytes().replace(b"token_embd.weight", b"token_other.eight"))
    assert "without a token embedding is an adapter" in refused(path)


MUTANTS = """
import random, sys
from pathlib import Path
from kvq.errors import KvqError
from kvq_runtime.engine import Engine
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.bundle.gguf_format import read_gguf
content, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
header, outcomes = read_gguf(Path(sys.argv[1])).header_bytes, {}
for number in range(int(sys.argv[3])):
    rng, data = random.Random(number), bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(header)
        data[at] = rng.choice((0, 255, rng.randrange(256), data[at] ^ 1 << rng.randrange(8)))
    path.write_bytes(data)
    try:
        with Engine(GgufFile.open(path).trusted(), threads=1) as engine:
            with engine.session(context_tokens=32, k_bits=16, v_bits=16) as session:
                session.prefill([1, 2, 3])
        outcome = "computed"
    except KvqError as error:
        outcome = type(error).__name__
    outcomes[outcome] = outcomes.get(outcome, 0) + 1
print(outcomes)
"""


def test_flipped_bytes_never_end_the_program(make: Make, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", MUTANTS, make(), tmp_path / "mutant.gguf", "120"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "'computed'" in finished.stdout
    assert "'ModelError'" in finished.stdout


def test_a_file_that_ends_llama_cpp_is_refused(tmp_path: Path) -> None:
    """Ends the trial, not this program: llama.cpp asserts that a qwen3 rotates whole heads."""
    path = write_gguf(
        tmp_path / "one.gguf", architecture="qwen3", keys={"qwen3.rope.dimension_count": 32}
    )
    for _ in range(2):
        with pytest.raises(ModelError, match=r"llama.cpp ends the program .*GGML_ASS"):
            Engine.open(path, threads=1)


def test_a_file_that_passed_is_not_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(seed=5)
    Engine.open(path, threads=1).close()

    def run(*_: object, **__: object) -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr(subprocess, "run", run)
    Engine.open(path, threads=1).close()
    with pytest.raises(AssertionError, match="tried again"):
        Engine.open(make(seed=6), threads=1)


def test_the_table_of_types_is_ggufs() -> None:
    rows = gguf.constants.GGML_QUANT_SIZES.items()
    assert {number: astuple(kind) for number, kind in TENSOR_TYPES.items()} == {
        int(kind): (kind.name, *sizes) for kind, sizes in rows
    }
    names = {bits: kind.name for bits, kind in CACHE_TYPES.items()}
    assert names == {16: "F16", 8: "Q8_0", 4: "Q4_0"}


def test_a_file_is_known_by_suffix_or_magic(make: Make, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(make().read_bytes())
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf(tmp_path / "model.bin")
    assert is_gguf(tmp_path / "absent.gguf")
    assert not is_gguf(tmp_path / "folder.gguf")
    assert "cannot be read: No such file" in refused(tmp_path / "absent.gguf")
