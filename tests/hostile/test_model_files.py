"""Altered model files of strangers: each is soon read, or refused in a sentence.

`KVQ_MUTANTS=5000` tries more of them than CI does.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from environment import ROOTS
from kvq_export.read.checkpoint import LENGTH_BYTES
from tiny_gguf import write_gguf

MUTANTS = int(os.environ.get("KVQ_MUTANTS", "400"))
PROGRAM = Path(__file__).with_name("altered.py")


def mutants_of(file: Path, header: int) -> list[str]:
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, file, str(header), str(MUTANTS)],
        env=os.environ | ROOTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    *faults, last = finished.stdout.splitlines()
    assert int(last.removeprefix("refused ")) > MUTANTS / 4
    return faults


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a process has no limits there")
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_altered_gguf_files_are_read_or_refused(architecture: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", kind="Q8_0", architecture=architecture)
    assert mutants_of(file, header=file.read_bytes().index(b"blk.1.") + 4000) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a process has no limits there")
def test_altered_checkpoints_are_read_or_refused(tmp_path: Path) -> None:
    file = tiny.make_llama_checkpoint(tmp_path / "tiny") / "model.safetensors"
    content = file.read_bytes()
    header = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    assert mutants_of(file, header) == []
